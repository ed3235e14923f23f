"""What the driver scripts share: a rank's start and end, differences, random models."""

import copy
import gc
import importlib
import itertools
import json
import math
import random
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "beyond"))


def load(lesson: str):
    return importlib.import_module(lesson)


def run(main, seconds: float = 30) -> None:
    """One rank: what main finds goes to rank<r>.json in the script's one argument."""
    torch.set_num_threads(1)
    gc.freeze()  # no collection, and no count of what is alive, looks at what stays
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    path = Path(sys.argv[1], f"rank{dist.get_rank()}.json")
    path.write_text(json.dumps(main()))
    dist.barrier()
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()


def groups_of_4(lesson) -> list:
    """Of four ranks: groups of 1, of 2 that are not neighbours, of 4, of neighbours."""
    found = []
    for sizes in ({"tp": 1, "x": 4}, {"tp": 2, "x": 2}, {"tp": 4}, {"x": 2, "tp": 2}):
        found.append(load("00_collectives").mesh_groups(sizes, 30)["tp"])
    if hasattr(lesson, "kv_groups"):  # kept for later: all ranks must make them alike
        for group, heads in itertools.product(found, (1, 2)):
            if heads < group.size():
                lesson.kv_groups(heads, group)
    return found


def is_ours(number: int, group) -> bool:
    """Groups of one size work side by side: does ours take this number's case?"""
    ranks = dist.get_process_group_ranks(group)
    place = ranks[0] if len(ranks) == 1 else int(0 not in ranks)
    return number // 4 % (4 // len(ranks)) == place


def no_group(size: int, rank: int = 0):
    """Stands for a group where nothing is to be sent, and could not be."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


# Differences.


def difference(got, wanted, whole=None) -> float:
    """max|got − wanted| / max|whole|, where whole is wanted if it is not given; inf for
    another shape or dtype, for none, for nan."""
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    most = (wanted if whole is None else whole).double().abs().max()
    diff = (got.double() - wanted.double()).abs().max() / most
    return diff.item() if diff == diff else math.inf


def transposed(x):
    """The same numbers, laid out otherwise."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def columns(whole, group, v: int | None = None, filler: float = 0.0):
    """This rank's columns, ⌈V/T⌉ or v of them, `filler` where the vocabulary ends."""
    V, T = whole.shape[-1], group.size()
    v = v or -(-V // T)
    padded = F.pad(whole, (0, v * T - V), value=filler)
    return padded.tensor_split(T, -1)[group.rank()].clone()


# Random models, which lessons 02 to 04 train beside the whole one.

VOCABULARIES = (*range(2, 13), 16, 30, 61, 257)  # fewer tokens than ranks, too
MODELS = 64  # of a lesson


def random_sizes(lesson, number: int, T: int, shared_heads=False) -> tuple:
    """Of a model that T ranks can share, and of its batches: config, B, S.

    shared_heads: a fifth of the models have fewer key/value heads than ranks.
    """
    rng = random.Random(f"model {number}")
    kv_heads = T * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 3)
    if shared_heads and number // 4 % 5 == 3:
        kv_heads = max(1, T // rng.choice([2, 4]))
        heads = T * rng.randint(1, 2)
    B, S = rng.randint(1, 3), rng.randint(1, 11)
    S = (rng.choice([1, T + 2]), T * rng.randint(1, 3), T + 1, S)[number // 4 % 4]
    H = 2 * rng.randint(1, 4) if heads > 2 else 6  # a norm of two numbers is ±1
    V = VOCABULARIES[number % len(VOCABULARIES)]
    layers, longest = rng.choice([1, 1, 2, 3]), -(-S // T) * T + rng.randint(0, 3)
    dropout = (0.0, 0.1, 0.5)[number // 3 % 3]
    return lesson.Config(V, heads * H, heads, kv_heads, layers, longest, dropout), B, S


def random_model(lesson, config, tied: bool, generator):
    full = lesson.Transformer(config).double()
    if tied:
        full.lm_head.weight = full.embed_tokens.weight
    with torch.no_grad():
        for name, p in full.named_parameters():
            size = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * size + ("norm" in name))
    return full


class Twins:
    """A whole model of random sizes and its parallel copy in training: what kind of
    thing differs how much at most, and where. What a slice is, p.sharding says."""

    def __init__(
        self, lesson, number: int, group, split, by_rows=True, pads=False,
        shared_heads=False,
    ):  # fmt: skip
        """split: (full, group) → the parallel copy; by_rows: the vocabulary is split;
        pads: where T must divide S; shared_heads: also try T > K."""
        self.lesson, self.number, self.group = lesson, number, group
        T, tied, self.by_rows = group.size(), number // 5 % 2 == 1, by_rows
        self.config, self.B, self.S = random_sizes(lesson, number, T, shared_heads)
        self.padding = -self.S % T if pads else 0
        self.generator = torch.Generator().manual_seed(number)
        self.full = random_model(lesson, self.config, tied, self.generator)
        self.alone, self.before = copy.deepcopy(self.full), copy.deepcopy(self.full)
        self.split = split(self.full, group)
        self.adamw = [
            torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
            for model in (self.alone, self.split)
        ]
        self.diffs = {}
        self.compare("held", "data")
        names = [[*dict(m.named_parameters())] for m in (self.alone, self.split)]
        self.note("names", names[0] != names[1])
        is_one = self.split.lm_head.weight is self.split.embed_tokens.weight
        self.note("tied", is_one is not tied)
        self.about = dict(number=number, T=T, B=self.B, S=self.S, tied=tied)
        self.about |= self.config._asdict()

    def note(self, kind: str, diff: float, name: str = "") -> None:
        self.diffs[kind] = max(self.diffs.get(kind, [0.0, ""]), [float(diff), name])

    def compare(self, kind: str, what: str) -> None:
        """Parameters ("data") or gradients ("grad"): ours with slices of the whole."""
        whole = dict(self.alone.named_parameters())
        for name, p in self.split.named_parameters():
            wanted = alone = getattr(whole[name], what)
            if hasattr(p, "rows"):  # all ranks' are padded to one length
                padding = len(p) * self.group.size() - p.rows
                wanted = torch.cat([alone, alone.new_zeros(padding, *p.shape[1:])])
            if getattr(p, "sharding", None):
                wanted = self.lesson.shard(wanted, *p.sharding)
            self.note(kind, difference(getattr(p, what), wanted, alone), name)

    def columns(self, logits):
        """This rank's of the whole logits, where the vocabulary is split."""
        return columns(logits, self.group) if self.by_rows else logits

    def batch(self) -> tuple:
        """Tokens, targets of which some are ignored, upstream gradients of the logits.
        The first and the last token of every rank come first; padding is at the end."""
        V, B, S = self.config.vocab_size, self.B, self.S + self.padding
        tokens, target = torch.randint(V, (2, B, S), generator=self.generator)
        firsts = torch.arange(0, V, -(-V // self.group.size()))
        ends = torch.cat([firsts, firsts[1:] - 1, torch.tensor([V - 1])])[: B * S]
        tokens.view(-1)[: len(ends)] = ends
        ignored = torch.rand(B, S, generator=self.generator) < 0.3
        # Some are not, or a gradient may be rounding alone.
        ignored[0, self.S - 1] = ignored[:, 0] = False
        target[ignored] = target[:, self.S :] = -100
        upstream = torch.randn(B, S, V, generator=self.generator, dtype=torch.float64)
        upstream[:, self.S :] = 0
        return tokens, target, upstream

    def forward_backward(self, step: int, loss_of) -> None:
        """Both ways, from random gradients of the logits at first, then a loss."""
        tokens, target, upstream = self.batch()
        # Masks are drawn by shape: with dropout one process has the padding, too.
        shown = tokens.shape[1] if self.config.dropout else self.S
        seed = torch.default_generator.manual_seed  # torch's own also looks for GPUs
        seed(1000 * self.number + step)
        wanted = self.alone(tokens[:, :shown])
        seed(1000 * self.number + step)
        got = self.split(tokens)
        self.note("logits", difference(got[:, :shown], self.columns(wanted)))
        loss = F.cross_entropy(wanted.flatten(0, 1), target[:, :shown].flatten())
        split_loss = loss_of(got, target)
        self.note("loss", difference(split_loss, loss))
        if step == 0:
            wanted.backward(upstream[:, :shown])
            got.backward(self.columns(upstream))
        else:
            loss.backward()
            split_loss.backward()

    def update(self, factor: float) -> None:
        """Clip both to so much of the norm, and step."""
        self.compare("gradients", "grad")
        norm = nn.utils.get_total_norm([p.grad for p in self.alone.parameters()]).item()
        told = self.lesson.global_norm(self.split, self.group)
        self.note("norm", abs(told - norm) / norm)
        unclipped = [p.grad.clone() for p in self.split.parameters()]
        self.lesson.clip_gradients(self.split, factor * norm, told)
        nn.utils.clip_grad_norm_(self.alone.parameters(), factor * norm)
        self.compare("clipped", "grad")
        clipped = [p.grad for p in self.split.parameters()]
        same = all(map(torch.equal, clipped, unclipped))
        self.note("clipped above the limit only", same != (factor > 1))
        for adamw in self.adamw:
            adamw.step()
            adamw.zero_grad()
        self.compare("parameters", "data")

    def train(self, loss_of, after_backward=lambda model: None, steps=2) -> dict:
        """What is found in some steps and one forward without dropout. To the bit: what
        ranks hold alike, and the model of which the parallel one was made."""
        for step in range(steps):
            self.forward_backward(step, loss_of)
            after_backward(self.split)
            self.update((0.3, 3.0, 0.01)[(self.number + step) % 3])
        tokens, *_ = self.batch()
        with torch.no_grad():
            wanted, got = (model.eval()(tokens) for model in (self.alone, self.split))
        self.note("eval", difference(got, self.columns(wanted)))
        for name, p in self.split.named_parameters():
            if not getattr(p, "sharding", None):
                of_first = self.lesson.all_gather(p[None], 0, self.group)[0]
                self.note("replicas", not torch.equal(p, of_first), name)
        for p, q in zip(self.full.parameters(), self.before.parameters()):
            self.note("own", not torch.equal(p, q))
        return self.about | dict(diffs=self.diffs)
