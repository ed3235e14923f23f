"""What the driver scripts share: a rank's start and end, differences, random models."""

import copy
import gc
import importlib
import json
import math
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))


def load(lesson: str):
    return importlib.import_module(lesson)


def run(main, seconds: float = 30) -> None:
    """One rank: what main finds goes to rank<r>.json in the script's one argument."""
    torch.set_num_threads(1)
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
        found.append(lesson.mesh_groups(sizes, 30)["tp"])
    return found


def refused(calls: dict) -> dict:
    """The message of each call's ValueError."""
    found = {}
    for what, call in calls.items():
        try:
            call()
            found[what] = "none raised"
        except ValueError as error:
            found[what] = str(error)
    return found


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


def exact(holds: bool) -> float:
    """Yes or no as a difference."""
    return 0.0 if holds else math.inf


# What a rank should hold of the whole model, by the papers.

CUTS = {  # of a layer: along which dim; all else there is whole on every rank
    "self_attn.q_proj.weight": 0, "self_attn.q_proj.bias": 0,
    "self_attn.k_proj.weight": 0, "self_attn.k_proj.bias": 0,
    "self_attn.v_proj.weight": 0, "self_attn.v_proj.bias": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.up_proj.weight": 0, "mlp.up_proj.bias": 0, "mlp.down_proj.weight": 1,
}  # fmt: skip
ROWS = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")  # from lesson 03 on


def columns(whole, v: int, group, filler: float = 0.0):
    """This rank's v columns of the last dim, `filler` where the vocabulary ends."""
    V = whole.shape[-1]
    padded = F.pad(whole, (0, v * group.size() - V), value=filler)
    return padded[..., group.rank() * v : (group.rank() + 1) * v].clone()


def rows(whole, group):
    """This rank's rows, ⌈V/T⌉ of them, zeros below the last one."""
    v = -(-len(whole) // group.size())
    return columns(whole.movedim(0, -1), v, group).movedim(-1, 0)


def own_columns(V: int, v: int, group) -> int:
    """How many of this rank's v columns are tokens, and not padding."""
    return max(0, min(V - group.rank() * v, v))


def dim_of(name: str) -> int | None:
    """Along which dim a layer's parameter is cut, None if it is not."""
    return CUTS.get(".".join(name.split(".")[2:]))


def cut(whole, name: str, group, by_rows=ROWS):
    """This rank's part of a parameter or a gradient."""
    if name in by_rows:
        return rows(whole, group)
    dim = dim_of(name)
    if dim is None:
        return whole
    assert whole.shape[dim] % group.size() == 0
    return whole.tensor_split(group.size(), dim)[group.rank()]


# Random models, which lessons 02 and 04 train beside the whole one.


def parameters(model) -> dict:
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients(model) -> dict:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def random_model(lesson, number: int, T: int, tied: bool = False) -> tuple:
    """A model of random sizes that T ranks can share, and the sizes of its batches."""
    rng = random.Random(f"model {number}")
    kv_heads = T * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 3)
    B, S = rng.randint(1, 3), rng.randint(1, 11)
    special = {0: rng.choice([1, T + 2]), 1: T * rng.randint(1, 3), 2: T + 1}
    S = special.get(number // 4 % 4, S)
    H = 2 * rng.randint(1, 4) if heads > 2 else 6  # a norm of two numbers is ±1
    config = lesson.Config(
        rng.randint(2, 30), heads * H, heads, kv_heads, rng.choice([1, 1, 2, 3]),
        -(-S // T) * T + rng.randint(0, 3), (0.0, 0.1, 0.5)[number // 3 % 3],
    )  # fmt: skip
    full = lesson.Transformer(config).double()
    if tied:
        full.lm_head.weight = full.embed_tokens.weight
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, p in full.named_parameters():
            size = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * size + ("norm" in name))
    return full, B, S, generator


def random_batch(config, B: int, S: int, generator) -> tuple:
    """Tokens, targets of which some are ignored, upstream gradients of the logits."""
    tokens, target = torch.randint(config.vocab_size, (2, B, S), generator=generator)
    ignored = torch.rand(B, S, generator=generator) < 0.3
    ignored[0, -1] = ignored[:, 0] = False  # or a gradient may be rounding alone
    target[ignored] = -100
    shape = B, S, config.vocab_size
    return tokens, target, torch.randn(shape, generator=generator, dtype=torch.float64)


class Twins:
    """A whole model and its parallel copy in training: what kind of thing differs how
    much at most, and where."""

    def __init__(self, lesson, full, split, group, by_rows=ROWS):
        self.lesson, self.group, self.by_rows = lesson, group, by_rows
        self.alone, self.split, self.diffs = copy.deepcopy(full), split, {}
        self.full, self.before = full, copy.deepcopy(full)
        models = self.alone, self.split
        self.adamw = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-5) for m in models]
        self.compare("held", parameters(split), parameters(full))
        self.note("names", exact([*parameters(split)] == [*parameters(full)]))

    def note(self, kind: str, diff: float, name: str = "") -> None:
        self.diffs[kind] = max(self.diffs.get(kind, [0.0, ""]), [diff, name])

    def compare(self, kind: str, parts: dict, wholes: dict) -> None:
        """This rank's parts with those of whole tensors, by the whole's size."""
        for name, whole in wholes.items():
            wanted = cut(whole, name, self.group, self.by_rows)
            self.note(kind, difference(parts.get(name), wanted, whole), name)

    def update(self, factor: float) -> None:
        """Clip both to so much of the norm, and step."""
        unclipped = gradients(self.split)
        norm = math.sqrt(sum(p.grad.square().sum() for p in self.alone.parameters()))
        told = self.lesson.global_norm(self.split, self.group)
        self.note("norm", abs(told - norm) / norm)
        self.lesson.clip_gradients(self.split, factor * norm, told)
        torch.nn.utils.clip_grad_norm_(self.alone.parameters(), factor * norm)
        self.compare("clipped", gradients(self.split), gradients(self.alone))
        moved = [not torch.equal(p.grad, unclipped[name])
                 for name, p in self.split.named_parameters()]  # fmt: skip
        self.note("clipped above the limit only", exact(any(moved) == (factor < 1)))
        for model, adamw in zip((self.alone, self.split), self.adamw):
            adamw.step()
            model.zero_grad()
        self.compare("parameters", parameters(self.split), parameters(self.alone))

    def end(self) -> dict:
        """What was found; replicas must be equal to the bit, and the model untouched
        of which the parallel one was made."""
        first = dist.get_process_group_ranks(self.group)[0]
        for name, p in parameters(self.split).items():
            if name not in self.by_rows and dim_of(name) is None:
                of_first = p.clone()
                dist.broadcast(of_first, first, self.group)
                self.note("replicas", difference(p, of_first), name)
        for p, q in zip(self.full.parameters(), self.before.parameters()):
            self.note("own", exact(torch.equal(p, q)))
        return self.diffs
