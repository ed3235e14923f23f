"""Lesson 03: the vocabulary under tensor parallelism.

The largest matrices of a model are often its embedding and its head, [V, D] each, and
the largest activation its logits, [B, S, V]. Each rank takes a range of the vocabulary:
it looks up the tokens it has, and the loss is computed without ever gathering logits.

Run it (2 ranks on a laptop; 4 and 8 work too):

    torchrun --standalone --nproc_per_node=2 03_vocab_parallel.py

What you will see: lesson 02's transformer with its vocabulary split, trained beside one
process with F.cross_entropy and with the loss written by hand; who has which rows,
where 257 does not divide; one token's loss as it comes about; padding tokens, large
logits, label smoothing; bytes and memory against gathering the logits; the same by
PyTorch's loss_parallel. `--tie` ties embedding and head; `--train 300` trains longer
and lets the model write; `--break list` names the bugs you can switch on.

New here: the embedding, the head, the cross entropy, sampling. Carried over: from 02
the transformer and its training, from 01 the parallel layers, from 00 the collectives.

Shapes: B batch, S sequence, D hidden, V vocabulary, T ranks in the TP group. UPPERCASE
    is the full size, lowercase this rank's slice: logits_BSv has this rank's columns of
    the vocabulary, v = V/T rounded up; what is too much is padding.

Needs: torch (and numpy, else torch warns that it is missing).
Sources: Megatron-LM, arXiv:1909.08053, sec. 3 (embedding, loss); docs.pytorch.org,
    torch.distributed.tensor.parallel.loss_parallel.
"""

from __future__ import annotations  # names that stand further down may be used

import argparse
import copy
import gc
import json
import math
import os
import signal
import sys
import textwrap
import time
import traceback
import weakref
from collections import Counter, namedtuple
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

# ==== NEW in 03: the vocabulary, split


def pad_vocab(full: Tensor, ranks: int) -> Tensor:
    """Zero rows below an embedding or a head, so that T divides them: any V and T.

    Shapes: [V, ...] → [⌈V/T⌉·T, ...]. Zeros stay zeros: no token is looked up there,
    and the loss gives those columns no gradient.
    """
    missing = -len(full) % ranks
    return torch.cat([full, full.new_zeros(missing, *full.shape[1:])])


def first_row(v: int, tp_group: dist.ProcessGroup) -> int:
    """Rank t has the tokens from t·v to (t + 1)·v − 1 of the vocabulary."""
    return tp_group.rank() * v


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError for a token that no rank has; nn.Embedding raises IndexError."""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        low, high = tokens.min().item(), tokens.max().item()
        raise ValueError(
            f"tokens {low} to {high}: the vocabulary is 0 to {vocab_size - 1}"
        )


def look_up(tokens_BS: Tensor, weight_vD: Tensor, V: int, tp_group) -> Tensor:
    """The embeddings of this rank's tokens, zeros for the others': a term of the sum.

    Shapes: tokens [B, S], weight [v, D] → [B, S, D] {U_tp}. ValueError for a token ≥ V.
    """
    check_tokens(tokens_BS, V)
    local_BS = tokens_BS - first_row(len(weight_vD), tp_group)
    mine_BS = (local_BS >= 0) & (local_BS < len(weight_vD))
    # Another rank's token looks up row 0, any row would do: it is zeroed next.
    x_BSD = F.embedding(local_BS.where(mine_BS, 0), weight_vD)
    return x_BSD * mine_BS.unsqueeze(-1)  # others' tokens: zero


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group.

    Args:
        full: the single-process embedding, identical on every rank.
        tp_group: the T ranks that share it.

    Shapes (global → on a rank, placement):
        tokens  [B, S] int64 → the same       Replicate()
        weight  [V, D]       → [⌈V/T⌉, D]     Shard(0), the last ones padded
        return  [B, S, D]    → [B, S, D]      Replicate()
    Communication: forward one all-reduce of B·S·D elements (g); backward none.
    Raises: ValueError for a token outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    placement = {"weight": (("tp", 0),)}

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size, self.tp_group = full.num_embeddings, tp_group
        padded = pad_vocab(full.weight.detach(), tp_group.size())
        self.weight = nn.Parameter(shard(padded, 0, tp_group))  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        partial_x_BSD = look_up(tokens_BS, self.weight, self.vocab_size, self.tp_group)
        return ReduceFromTP.apply(partial_x_BSD, self.tp_group)


class VocabParallelHead(nn.Module):
    """A head whose output features, the vocabulary, are split; logits stay split.

    Args:
        full: the single-process head.
        tied: this rank's rows of the embedding, where head and embedding share them.
    Shapes: x [B, S, D] Replicate() → logits [B, S, ⌈V/T⌉] Shard(2).
    Communication: forward none; backward one all-reduce of B·S·D elements (f).
    """

    placement = {"weight": (("tp", 0),), "bias": (("tp", 0),)}

    def __init__(self, full: nn.Linear, tp_group, tied: nn.Parameter | None = None):
        super().__init__()
        self.tp_group, T = tp_group, tp_group.size()
        weight = shard(pad_vocab(full.weight.detach(), T), 0, tp_group)
        self.weight = nn.Parameter(weight) if tied is None else tied  # [v, D]
        bias = shard(pad_vocab(full.bias.detach(), T), 0, tp_group)
        self.bias = nn.Parameter(bias)  # [v]

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        return F.linear(x_BSD, self.weight, self.bias)


def real_columns(logits_BSv: Tensor, vocab_size: int, tp_group) -> Tensor:
    """[v] bool: which of this rank's columns are tokens, and not padding."""
    v = logits_BSv.shape[-1]
    token_v = first_row(v, tp_group) + torch.arange(v, device=logits_BSv.device)
    return token_v < vocab_size


def largest_logit(logits_BSv: Tensor, tp_group) -> Tensor:
    """[B, S]: the maximum over the whole vocabulary, so that no exp overflows."""
    return all_reduce(logits_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)


def to_softmax(exp_BSv: Tensor, total_BS: Tensor) -> Tensor:
    """This rank's columns of the softmax: all that backward needs."""
    return exp_BSv / total_BS.unsqueeze(-1)


def without_ignored(grad_BSv: Tensor, has_target_BS: Tensor) -> Tensor:
    """Zero the rows of tokens that have no target, also where they are nan."""
    return grad_BSv.where(has_target_BS.unsqueeze(-1), 0)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(logits)[target] of sharded logits: vocab_parallel_cross_entropy.

    With m the largest logit, z = Σ exp(x − m): loss = log z − (x[target] − m). Each of
    m, z and x[target] takes a number from every rank: one all-reduce of B·S values.
    """

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        wide = torch.promote_types(logits_BSv.dtype, torch.float32)
        real_v = real_columns(logits_BSv, vocab_size, tp_group)
        x_BSv = logits_BSv.to(wide).masked_fill(~real_v, float("-inf"))
        # First all-reduce: the largest logit.
        x_BSv = x_BSv - largest_logit(x_BSv, tp_group).unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        total_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. One rank has its column, the others give zero.
        v = logits_BSv.shape[-1]
        local_BS = target_BS - first_row(v, tp_group)
        mine_BS = (local_BS >= 0) & (local_BS < v)
        local_BS = local_BS.where(mine_BS, 0)
        picked_BS = x_BSv.gather(-1, local_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(mine_BS, 0)
        if smoothing:  # and the mean of all logits, in the same all-reduce
            sum_BS = x_BSv.masked_fill(~real_v, 0).sum(-1)
            picked_BS = (1 - smoothing) * picked_BS + smoothing * sum_BS / vocab_size
        loss_BS = total_BS.log() - all_reduce(picked_BS, tp_group)
        has_target_BS = target_BS != ignore
        softmax_BSv = to_softmax(exp_BSv, total_BS)
        ctx.save_for_backward(softmax_BSv, local_BS, mine_BS, has_target_BS, real_v)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(has_target_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # dloss/dx = softmax − onehot(target): each rank has what it takes for its
        # columns, so nothing is sent.
        softmax_BSv, local_BS, mine_BS, has_target_BS, real_v = ctx.saved_tensors
        even = ctx.smoothing / ctx.vocab_size  # what smoothing gives to every token
        grad_BSv = softmax_BSv - even * real_v.to(softmax_BSv)
        hit_BS = (1 - ctx.smoothing) * mine_BS.to(softmax_BSv)
        grad_BSv.scatter_add_(-1, local_BS.unsqueeze(-1), -hit_BS.unsqueeze(-1))
        grad_BSv = without_ignored(grad_BSv * upstream_BS.unsqueeze(-1), has_target_BS)
        return grad_BSv.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor,
    target_BS: Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of every token, from logits whose vocabulary is split over the TP group.

    Args:
        logits_BSv: this rank's columns, padding included.
        target_BS: the right tokens, the same on every rank.
        vocab_size: V, the tokens there are; columns from V on are padding.
        ignore_index: a target that gives no loss and no gradient.
        label_smoothing: ε, as in F.cross_entropy.
    Shapes: logits [B, S, v] Shard(2), target [B, S] → loss [B, S] Replicate(), float32
        or wider; any number of leading dims will do.
    Communication: forward three all-reduces of B·S values; backward none.
    Raises: ValueError for a target outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def mean_over_targets(loss_BS: Tensor, target_BS: Tensor) -> Tensor:
    """The mean over the tokens that have a target; nan if none has, as in PyTorch."""
    return loss_BS.sum() / (target_BS != IGNORE).sum()


class VocabParallelTransformer(nn.Module):
    """Lesson 02's transformer with embedding and head split over the vocabulary.

    Shapes: tokens [B, S] → logits [B, S, ⌈V/T⌉] Shard(2).
    Communication: that of TPTransformer, and one all-reduce of B·S·D elements forward
        (embedding) and one backward (head).
    """

    def __init__(self, full: Transformer, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size = full.config.vocab_size
        self.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)
        self.layers = nn.ModuleList(TPDecoderLayer(x, tp_group) for x in full.layers)
        self.norm = copy.deepcopy(full.norm)
        tied = full.lm_head.weight is full.embed_tokens.weight
        shared = self.embed_tokens.weight if tied else None
        self.lm_head = VocabParallelHead(full.lm_head, tp_group, shared)
        for name, table in full.named_buffers():
            self.register_buffer(name, table.clone(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        S = tokens_BS.shape[1]
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos[:S], self.sin[:S], self.future[:S, :S])
        return self.lm_head(self.norm(x_BSD))


def sample_sharded(logits_v: Tensor, noise_V: Tensor, tp_group, vocab_size: int) -> int:
    """Draw a token from sharded logits, sending two numbers instead of V.

    The largest of logits + Gumbel noise is a draw from softmax(logits): so each rank
    needs to offer only its best column. The noise is drawn whole on
    every rank from one seed, so that the draw is the one that a single process makes.
    Communication: two all-reduces of one value: the best score, and who has it.
    """
    start = first_row(len(logits_v), tp_group)
    mine = min(len(logits_v), max(0, vocab_size - start))  # columns that are tokens
    score, best = torch.tensor([float("-inf")], device=logits_v.device), vocab_size
    if mine:
        scores = logits_v[:mine].float() + noise_V[start : start + mine]
        score, best = scores.max().view(1), start + int(scores.argmax())
    top = all_reduce(score, tp_group, dist.ReduceOp.MAX)
    best = torch.tensor([best if score == top else vocab_size], device=logits_v.device)
    return int(all_reduce(best, tp_group, dist.ReduceOp.MIN))  # of equals, the first


# ==== CARRIED OVER from 00, unchanged


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if it does not divide."""
    if x.shape[dim] % parts:
        raise ValueError(
            f"dim {dim} of {list(x.shape)} has {x.shape[dim]} elements, and "
            f"{x.shape[dim]} % {parts} ranks = {x.shape[dim] % parts}, not 0"
        )
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    Shapes: full [.., I, ..] → [.., I/T, ..], a new tensor. Communication: none.
    Raises: ValueError if T does not divide the dim.
    """
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    Shapes: x [...] → [...]. Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    Shapes: x [.., i, ..] → [.., T·i, ..]. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    Shapes: x [...] → [...], Replicate(). Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            dist.broadcast(out, group_src=src, group=group)
    return out


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    Args:
        sizes: axis → number of ranks, e.g. {"y": 2, "x": 4}, ranks laid out in order.
        timeout: seconds; a new group does not inherit it, its default is 30 minutes.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


class CommCounter:
    """Counts calls and payload bytes of every collective, and notes the last one.

    Payload is the logical tensor: V bytes, whatever the algorithm sends. What a ring
    puts on the wire follows from it (`ring_factor`). The note goes to the job's store
    (a small key-value server that all ranks can reach), so that when a rank hangs, the
    others can say where it was last seen.
    """

    def __init__(self):
        self.rows = {}  # (what, phase, collective, axis) → [calls, bytes]
        self.what, self.phase = "", ""  # labels of what comes next, set by the lesson
        self.seconds = 0.0  # spent in collectives, waiting for others included
        self.store, self.rank = None, 0
        self.place = {"state": "before", "number": 0, "call": "any call", "line": ""}
        self.numbers = {}  # who meet → how many calls they had

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        key = (self.what, self.phase, collective, axis)
        calls, before = self.rows.get(key, (0, 0))
        self.rows[key] = [calls + 1, before + nbytes]

    def record(self, collective: str, x: Tensor, group: dist.ProcessGroup, copies=1):
        """Count one call on `copies`·x.nbytes bytes; use as `with COMM.record(…):`."""
        self.count(collective, copies * x.nbytes, group.group_desc)
        frame = sys._getframe(2)  # whoever called the wrapper
        where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
        call = f"{collective} of {list(x.shape)} over {group.group_desc}"
        return self.at(call, where, dist.get_process_group_ranks(group))

    def at(self, call: str, where: str, ranks: list[int] | None = None):
        """What `with` notes on entering and on leaving; ranks: who meet there (all).

        The n-th call of one rank meets the n-th of the others: so calls are numbered
        for each set of ranks.
        """
        number = self.numbers[str(ranks)] = self.numbers.get(str(ranks), 0) + 1
        self.place = {"number": number, "call": call, "line": where, "ranks": ranks}
        return self

    def __enter__(self):
        self.note("in")
        self.start = time.perf_counter()

    def __exit__(self, kind, error, trace):
        self.seconds += time.perf_counter() - self.start
        if error is None:
            self.note("after")

    def note(self, state: str) -> None:
        self.place["state"] = state
        if self.store is not None:
            self.store.set(f"place/{self.rank}", json.dumps(self.place))

    def total(self, **wanted) -> list[int]:
        """[calls, bytes] of all rows with these labels, as in total(collective="…")."""
        names = ("what", "phase", "collective", "axis")
        rows = [(dict(zip(names, key)), row) for key, row in self.rows.items()]
        hits = [row for key, row in rows if wanted.items() <= key.items()]
        return [sum(row[0] for row in hits), sum(row[1] for row in hits)]


COMM = CommCounter()


def ring_factor(collective: str, T: int) -> float:
    """Bytes one rank sends in a ring, as a multiple of the payload V."""
    return {"all-reduce": 2 * (T - 1) / T}.get(collective, (T - 1) / T)


Break = namedtuple("Break", "target bug what symptom why thread")
Break.__doc__ = """A bug to switch on: `target`, a dotted name, is replaced by `bug`."""


def apply_break(broken: Break, module: dict) -> None:
    """Replace the bug's target, `name` or `Class.name`, in a lesson's namespace."""
    owner, _, name = broken.target.rpartition(".")
    if owner:
        setattr(module[owner], name, broken.bug)
    else:
        module[name] = broken.bug


ALLOWED = {  # dtype → largest relative difference of a loss, of any other tensor
    "float64": (1e-12, 1e-12),
    "float32": (1e-6, 1e-5),
    "bfloat16": (2e-2, 2e-2),
}


def rel_diff(a: Tensor, reference: Tensor) -> float:
    """max|a − reference| / max|reference|; inf for nan and for another shape."""
    if a.shape != reference.shape:
        return float("inf")
    a, reference = a.detach().double(), reference.detach().double()
    if a.numel() == 0 or torch.equal(a, reference):
        return 0.0
    diff = ((a - reference).abs().max() / reference.abs().max()).item()
    return diff if diff == diff else float("inf")


def gather_objects(value) -> list:
    """Every rank's value, in rank order: bookkeeping of the lesson, so not counted."""
    everyone = [None] * dist.get_world_size()
    with COMM.at("gathering of results to print", "gather_objects"):
        dist.all_gather_object(everyone, value)
    return everyone


class Report:
    """What a lesson finds: rank 0 prints it, every rank checks it, --json writes it."""

    def __init__(self, lesson: str, args, mesh: dict[str, int], backend: str):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.lesson, self.args, self.checks = lesson, args, []
        self.data = {
            "lesson": lesson, "world_size": self.ranks, "mesh": mesh,
            "backend": backend, "device": args.device, "dtype": args.dtype,
            "losses": [], "gradients": [], "communication": [], "memory": [],
            "checks": [], "text": [],
        }  # fmt: skip
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        where = f"{backend} on {args.device}"
        self.say(f"{lesson}  {ranks}, mesh {axes}  {where}  {args.dtype}")

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            self.data["text"] += text.split("\n")
            print(text, flush=True)

    def table(self, head: str, rows: list[list], align: str) -> None:
        """Print rows under `head` (columns parted by |); align has l or r for each."""
        rows = [head.split("|"), *([str(cell) for cell in row] for row in rows)]
        width = [max(len(row[i]) for row in rows) for i in range(len(align))]
        for row in rows:
            cells = [
                cell.ljust(width[i]) if align[i] == "l" else cell.rjust(width[i])
                for i, cell in enumerate(row)
            ]
            self.say("   " + "  ".join(cells).rstrip())

    def check(self, name: str, diff: float, allowed: float = 0.0) -> str:
        """Note one comparison of this rank; "ok" or "✗" for the table."""
        ok = diff <= allowed  # False for nan too
        self.checks.append([name, diff, allowed, ok])
        return "ok" if ok else "✗"

    def moved(self, what: str, collective: str, axis: str, predicted: int, phase=""):
        """Check counted bytes against a formula; (calls, bytes, "ok" or "✗")."""
        labels = dict(what=what, collective=collective, axis=axis, phase=phase)
        calls, measured = COMM.total(**labels)
        row = dict(labels, calls=calls, bytes=measured, predicted_bytes=predicted)
        self.data["communication"].append(row)
        name = " ".join(filter(None, ["bytes of", what, phase, collective, axis]))
        return calls, measured, self.check(name, abs(measured - predicted))

    def verdict(self, claim: str, broken: Break | None) -> str:
        """All ranks' checks together: the last line, PASS … or FAIL …."""
        everyone = gather_objects(self.checks)
        merged = {}
        for rank, checks in enumerate(everyone):
            for name, diff, allowed, ok in checks:
                row = merged.setdefault(name, dict(name=name, diff=0.0, bad=[]))
                row["allowed"] = allowed
                row["diff"] = max(row["diff"], diff)
                row["bad"] += [] if ok or rank in row["bad"] else [rank]
        bad = [row for row in merged.values() if row["bad"]]
        rows = list(merged.values())
        worst = max(rows, key=lambda row: row["diff"])
        score = dict(worst_rel_diff=worst["diff"], allowed=worst["allowed"])
        self.data.update(score, checks=rows, verdict="FAIL" if bad else "PASS")
        for row in bad[:4]:
            everywhere = len(row["bad"]) == self.ranks
            ranks = "every rank" if everywhere else f"rank {row['bad']}"
            off = f"off by up to {row['diff']:.1e}, allowed {row['allowed']:.0e}"
            line = f"✗ {row['name']}: {off}, on {ranks}"
            self.say(textwrap.fill(line, 88, subsequent_indent="  "))
        if len(bad) > 4:
            self.say(f"✗ and {len(bad) - 4} more")
        if broken:
            self.say(diagnosis(self.args.break_name, broken))
        score = f"worst relative difference {worst['diff']:.1e}, allowed"
        ending = f"{claim}  ({score} {worst['allowed']:.0e})".replace(" 0e+00", " 0")
        if bad:
            ending = f"{len(bad)} of {len(rows)} checks, first: {bad[0]['name']}"
        last_line = f"{self.data['verdict']}  {self.lesson}  {ending}"
        self.say(last_line)
        if self.rank == 0 and self.args.json:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return last_line


def diagnosis(name: str, broken: Break) -> str:
    """What --break NAME did, what one sees, why, and who met it."""
    texts = broken.symptom, broken.why, broken.thread
    lines = ["", *textwrap.wrap(f"--break {name}: {broken.what}", 88)]
    for label, text in zip(("symptom", "why", "met in"), texts):
        lines += textwrap.wrap(f"{label:<9}{text}", 88, subsequent_indent=" " * 9)
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse, but one `error:` line for all ranks, and one --help."""

    def error(self, message):
        """Called by argparse, which would print its usage on every rank."""
        raise ValueError(message)

    def print_help(self, file=None):
        """Once, not once a rank."""
        if int(os.environ.get("RANK", 0)) == 0:
            super().print_help(file)


def lesson_parser(doc: str, steps: int, steps_are: str) -> Parser:
    """The flags that all lessons share."""
    about = doc.partition("Shapes:")[0]
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=style, allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=positive, default=steps, help=f"{steps_are} ({steps})")
    add("--seed", type=int, default=0)
    add("--dtype", choices=ALLOWED, default="float32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each rank has one")
    add("--timeout", type=positive, help="seconds to wait for a rank (60; --break: 5)")
    add("--break", dest="break_name", metavar="NAME", help="a bug; `list` lists them")
    add("--json", type=Path, metavar="PATH", help="write all results there")
    return parser


def positive(text: str) -> int:
    """A flag's value as a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def pick_device(args) -> str:
    """Fill in args.device; the backend: NCCL where every rank has a GPU of its own."""
    local_rank, here = (int(os.environ[k]) for k in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    args.device = args.device or ("cuda" if gpus >= here else "cpu")
    if args.device == "cpu":
        return "gloo"
    if gpus == 0:
        raise ValueError("--device cuda, but torch sees no GPU: leave --device out")
    torch.cuda.set_device(local_rank % gpus)
    return "nccl" if gpus >= here else "gloo"


def last_words(message: str) -> None:
    """What torchrun's closing report shows, should this rank fail."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        words = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(words))


def stop(code: int) -> None:
    """End this rank at once: tidying up while others are in a collective can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(message: str) -> None:
    """A wrong argument: one line, exit code 2. All ranks see it; rank 0 says it."""
    last_words(f"error: {message}")
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(5)  # torchrun ends us when rank 0 has spoken
    stop(2)


def waits_for(rank: int, places: dict) -> list[int]:
    """The ranks that should be in the call that this rank is in, and are not."""
    here = places.get(rank, {"state": "before"})
    if here["state"] != "in":
        return []
    others = here["ranks"] or range(dist.get_world_size())
    return [other for other in others if not same_call(here, places.get(other, {}))]


def chain_from(rank: int, places: dict) -> list[int]:
    """A rank, those that it waits for, those that these wait for, and so on."""
    chain = [rank]
    for one in chain:
        chain += [other for other in waits_for(one, places) if other not in chain]
    return chain


def same_call(here: dict, there: dict) -> bool:
    """Are two ranks in one and the same call?"""
    return all(here[key] == there.get(key) for key in ("state", "number", "call"))


def blame(error: Exception, timeout: int, store) -> str:
    """Where every rank was last seen, and which of them the others waited for.

    To be asked while some rank is in a collective.
    """
    places = {}
    for rank in range(dist.get_world_size()):
        if store.check([f"place/{rank}"]):
            places[rank] = json.loads(store.get(f"place/{rank}"))
    waiting = [rank for rank, place in places.items() if place["state"] == "in"]
    here = dist.get_rank()
    chain = chain_from(here if here in waiting else waiting[0], places)
    calls = {
        rank: (place["number"], place["call"]) if place["state"] == "in" else None
        for rank, place in places.items()
    }
    guilty = [rank for rank in chain if not calls.get(rank)]  # they wait for nobody
    if not guilty:  # a circle: each waits for the next
        chain = chain_from(chain[-1], places)
    waiting = [rank for rank in chain if set(waits_for(rank, places)) & set(guilty)]
    inside = Counter(calls[rank] for rank in sorted(waiting or chain)).most_common(2)
    common = inside[0][0]
    tie = len(inside) == 2 and inside[0][1] == inside[1][1] and not guilty
    guilty = guilty or [rank for rank in chain if calls[rank] != common]
    lines = [
        f"  rank {rank}: {place['state']} call {place['number']}, "
        f"{place['call']} ({place['line']})"
        for rank, place in places.items()
    ]
    names = ", ".join(map(str, sorted(guilty)))
    who = f"this call was not made by rank {names}"
    who += " (a tie: or the others skipped one before)" if tie else ""
    if tie and common[1].startswith("message"):
        who = f"ranks {', '.join(map(str, sorted(chain)))} wait for each other"
    who = who if guilty else "all ranks are in it: one was lost there, or shapes differ"
    head = f"error: call {common[0]}, {common[1]}, did not come about; {who}"
    first = str(error).strip().split("\n")[0]
    said = f"  the transport, after {timeout} s at most: {first[:150]}"
    return "\n".join([head, *lines, said])


def fail(error: Exception, args, store, broken: Break | None) -> None:
    """An exception in main: say who is to blame, once, and end this rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all when one is lost
    if COMM.place["state"] == "in":  # the collective failed: the cause is elsewhere
        message = blame(error, args.timeout, store)
    else:
        traceback.print_exc()
        name = type(error).__name__
        message = f"error: rank {dist.get_rank()} raised {name}: {error}"
        COMM.note(f"raised {name} after")
    if broken:
        message += "\n" + diagnosis(args.break_name, broken)
    last_words(message)
    if store.add("told", 1) == 1:
        print(message, file=sys.stderr, flush=True)
    if COMM.place["state"] == "in":
        time.sleep(1)  # the guilty rank first: torchrun reports the first to end
    stop(1)


def launch(file: str, parse_args, main, breaks: dict[str, Break], module: dict) -> None:
    """Run a lesson's main(args, backend) on this rank, from first check to last."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = parse_args(ranks)
        if args.break_name == "list":
            if int(os.environ.get("RANK", 0)) == 0:
                print(*(f"{name:<15}{breaks[name].what}" for name in breaks), sep="\n")
            return
        check_common(args, ranks, breaks)
        backend = pick_device(args) if "RANK" in os.environ else None
    except ValueError as error:
        refuse(str(error))
    if backend is None:
        ranks = module.get("RANKS", 2)  # of a lesson that shows more with more
        command = f"torchrun --standalone --nproc_per_node={ranks} {Path(file).name}"
        print(f"start it with torchrun, which makes the ranks:\n\n    {command}")
        sys.exit(2)
    store = start_group(args, backend)
    broken = breaks.get(args.break_name)
    if broken:
        last_words(diagnosis(args.break_name, broken))  # it may abort the process
        apply_break(broken, module)
    try:
        verdict = main(args, backend)
        with COMM.at("the last barrier", "launch"):
            dist.barrier()
    except Exception as error:
        fail(error, args, store, broken)
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()
    if verdict.startswith("FAIL"):
        last_words(verdict)
        stop(1)


def start_group(args, backend: str) -> dist.Store:
    """Join the group of all ranks; the store that they share."""
    torch.set_num_threads(1)  # ranks share the cores: more threads would crawl
    torch.manual_seed(args.seed)
    limit = timedelta(seconds=args.timeout)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # torchrun --max-restarts starts all ranks anew, beside what the lost ones stored
    attempt = (store.add("ranks started", 1) - 1) // ranks
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=limit
    )
    COMM.store, COMM.rank = store, rank
    return store


def check_common(args, ranks: int, breaks: dict[str, Break]) -> None:
    """ValueError where a flag that all lessons share cannot be served."""
    if args.break_name is not None and args.break_name not in breaks:
        names = ", ".join(breaks)
        raise ValueError(f"--break {args.break_name}: unknown; there are {names}, list")
    if args.break_name and ranks == 1:
        raise ValueError("--break needs 2 ranks or more: one rank alone breaks nothing")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.json and args.json.is_dir():
        raise ValueError(f"--json {args.json}: this is a folder, a file is wanted")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed {args.seed}: from 0 to 2^32 − 1 it may be")
    if args.timeout is None:
        args.timeout = 5 if args.break_name else 60


# ==== CARRIED OVER from 01, unchanged


class MLP(nn.Module):
    """The reference: plain PyTorch, one process, Y = GELU(X W_upᵀ + b) W_downᵀ + b.

    Shapes: x [B, S, D] → [B, S, D], with [B, S, F] in between.
    """

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (arXiv:1909.08053, 3)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # every rank has all of x already: nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of the T terms of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward (arXiv:1909.08053, 3)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the whole dL/dy; and y is the
        # sum of the terms, so dL/dy is also the gradient of every term.
        return grad, None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward; backward each rank keeps its own slice of the gradient.

    For consumers that are replicated: all ranks go on to do the same with y, so every
    rank has the whole gradient. Compare AllGather.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group.

    Args:
        full: the single-process layer to slice, identical on every rank.
        tp_group: the T ranks that share this layer.
        copy_input: False where the caller has applied f, once for several layers.

    Shapes (global → on a rank, placement):
        x       [B, S, D] → [B, S, D]     Replicate()
        weight  [F, D]    → [F/T, D]      Shard(0): torch stores (out, in), so the
                                          paper's columns of A are our rows
        return  [B, S, F] → [B, S, F/T]   Shard(2)

    Communication: forward none; backward one all-reduce of B·S·D elements (f).
    Raises: ValueError if T does not divide F.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    placement = {
        "weight": (("tp", 0),),
        "bias": (("tp", 0),),
    }  # cut over axis tp along dim 0

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup, copy_input=True):
        super().__init__()
        self.tp_group, self.copy_input = tp_group, copy_input
        self.weight = nn.Parameter(shard(full.weight, 0, tp_group))  # [f, D]
        self.bias = nn.Parameter(shard(full.bias, 0, tp_group))  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        return F.linear(x_BSD, self.weight, self.bias)  # [B, S, f]


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group.

    Args:
        full: the single-process layer to slice, identical on every rank.
        tp_group: the T ranks that share this layer.

    Shapes (global → on a rank, placement):
        x       [B, S, F] → [B, S, F/T]   Shard(2), as ColumnParallelLinear returns it
        weight  [D, F]    → [D, F/T]      Shard(1)
        bias    [D]       → [D]           Replicate()
        return  [B, S, D] → [B, S, D]     Replicate()

    Communication: forward one all-reduce of B·S·D elements (g); backward none.
    Raises: ValueError if T does not divide F.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    placement = {"weight": (("tp", 1),)}

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.weight = nn.Parameter(shard(full.weight, 1, tp_group))  # [D, f]
        self.bias = nn.Parameter(full.bias.detach().clone())  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = ReduceFromTP.apply(partial_y_BSD, self.tp_group)
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


class TPMLP(nn.Module):
    """Megatron's MLP: columns, then rows. One all-reduce forward, one backward.

    GELU works on single elements, so it needs no neighbour: each rank applies it to the
    columns it has. That is why the column split comes first.
    """

    def __init__(self, full: MLP, tp_group: dist.ProcessGroup):
        super().__init__()
        self.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
        self.down_proj = RowParallelLinear(full.down_proj, tp_group)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


def tell_placement(module: nn.Module, name: str) -> tuple:
    """((axis, dim), …) of a parameter, in the order it was cut; () if replicated."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), "placement", {}).get(leaf, ())


def unshard(
    x: Tensor, placement: tuple, groups: dict[str, dist.ProcessGroup]
) -> Tensor:
    """The whole tensor from all ranks' slices: cuts undone, the last one first."""
    for axis, dim in reversed(placement):
        x = all_gather(x, dim, groups[axis])
    return x


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes kept for backward, each storage once, `skip` left out."""

    def __init__(self, skip: list[Tensor]):
        self.skip = {x.untyped_storage().data_ptr() for x in skip}
        self.storages = {}
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.skip:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return x

    def total(self) -> int:
        return sum(self.storages.values())


class CountDTensor(TorchDispatchMode):
    """Within `with`: DTensor's collectives are counted too. (PyTorch's CommDebugMode
    counts calls, not bytes, and takes half a second to import.)"""

    names = {
        "_c10d_functional::all_reduce": "all-reduce",
        "_c10d_functional::all_gather_into_tensor": "all-gather",
        "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    }

    def __init__(self, axis: str):
        super().__init__()
        self.axis = axis

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn it into local ops and collectives
        out = func(*args, **(kwargs or {}))
        if name := self.names.get(func._schema.name):
            COMM.count(name, max(args[0].nbytes, out.nbytes), self.axis)
        return out


def in_words(placement: tuple) -> str:
    """PyTorch's words for a placement on one axis."""
    return ", ".join(f"Shard({dim})" for _, dim in placement) or "Replicate()"


# ==== CARRIED OVER from 02, unchanged


Config = namedtuple("Config", "vocab_size hidden heads kv_heads layers seq_len dropout")


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angle position · 10000^(−2i/H) (arXiv:2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle_SH = torch.outer(torch.arange(seq_len), frequency).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Turn each pair (i, i + H/2) of a head by its position's angle."""
    first, second = x_BNSH.chunk(2, -1)
    return x_BNSH * cos_SH + torch.cat([-second, first], -1) * sin_SH


class Dropout(nn.Module):
    """Zero elements with probability p, scale the others by 1/(1 − p).

    Like nn.Dropout, but the mask kept for backward is boolean, one byte an element, as
    on a GPU (on a CPU nn.Dropout keeps it in x's dtype).
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class Attention(nn.Module):
    """Causal attention written out, so that what it keeps for backward can be counted.

    Shapes: x [B, S, D] → [B, S, D]. K key/value heads serve N/K query heads each.
    """

    def __init__(self, config: Config):
        super().__init__()
        D, H = config.hidden, config.hidden // config.heads
        self.head_size, self.queries_per_kv = H, config.heads // config.kv_heads
        self.q_proj = nn.Linear(D, config.heads * H)
        self.k_proj = nn.Linear(D, config.kv_heads * H)
        self.v_proj = nn.Linear(D, config.kv_heads * H)
        self.o_proj = nn.Linear(D, D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, cos_SH, sin_SH, future_SS) -> Tensor:
        q, k, v = (
            proj(x_BSD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, N, S, H], and [B, K, S, H] twice
        q, k = rotate(q, cos_SH, sin_SH), rotate(k, cos_SH, sin_SH)
        k, v = (x.repeat_interleave(self.queries_per_kv, 1) for x in (k, v))
        scores_BNSS = q @ k.transpose(2, 3) / math.sqrt(self.head_size)
        scores_BNSS = scores_BNSS.masked_fill(future_SS, float("-inf"))
        weights_BNSS = self.dropout(scores_BNSS.softmax(-1))
        return self.o_proj((weights_BNSS @ v).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Pre-LayerNorm: x + dropout(attention(norm(x))), then + dropout(MLP(norm(x)))."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        self.input_layernorm = nn.LayerNorm(D)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(D)
        self.mlp = MLP(D, 4 * D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, *tables: Tensor) -> Tensor:
        attended_BSD = self.self_attn(self.input_layernorm(x_BSD), *tables)
        x_BSD = x_BSD + self.dropout(attended_BSD)
        return x_BSD + self.dropout(self.mlp(self.post_attention_layernorm(x_BSD)))


class Transformer(nn.Module):
    """The reference decoder. Shapes: tokens [B, S] int64 → logits [B, S, V]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size)
        cos_SH, sin_SH = rotary_table(config.seq_len, config.hidden // config.heads)
        self.register_buffer("cos", cos_SH, persistent=False)
        self.register_buffer("sin", sin_SH, persistent=False)
        future_SS = torch.ones(config.seq_len, config.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future_SS, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        S = tokens_BS.shape[1]
        tables = self.cos[:S], self.sin[:S], self.future[:S, :S]
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, *tables)
        return self.lm_head(self.norm(x_BSD))


def replicated_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout where x is whole on every rank: all must drop the same elements.

    They do, because all draw the same numbers, from one seed and in one order:
    sharded_dropout, too, draws its whole mask on every rank.
    """
    keep = torch.rand(x.shape, device=x.device) >= p
    return x * keep / (1 - p)


def sharded_dropout(x: Tensor, p: float, dim: int, tp_group) -> Tensor:
    """Dropout where x is a slice along dim: each rank must drop elements of its own.

    Every rank draws the mask of the whole tensor and keeps its slice, so that the
    result is the single process's. Megatron does not draw the other ranks' parts: it
    has a second generator, seeded with an offset by tp_rank. That is less work, and
    other masks than one process would draw (arXiv:1909.08053, appendix).
    """
    whole = list(x.shape)
    whole[dim] *= tp_group.size()
    keep = torch.rand(whole, device=x.device) >= p
    return x * shard(keep, dim, tp_group) / (1 - p)


def shard_qkv(full: Attention, tp_group) -> list:
    """q_proj, k_proj, v_proj cut by heads: each on its own, so that a rank's queries
    meet the keys and values that belong to them. f comes before, once for the three."""
    three = full.q_proj, full.k_proj, full.v_proj
    return [ColumnParallelLinear(one, tp_group, copy_input=False) for one in three]


class CoreAttention(nn.Module):
    """The part of attention that has no weights: this rank's heads, each on its own.

    Args:
        head_size: H; p: dropout of the attention weights; tp_group: whose heads.
    Shapes: q [B, S, N·H/T], k and v [B, S, K·H/T], tables [S, H] twice and [S, S]
        → [B, S, N·H/T]: heads never meet, so nothing is sent.
    """

    def __init__(self, head_size: int, p: float, tp_group: dist.ProcessGroup):
        super().__init__()
        self.head_size, self.p, self.tp_group = head_size, p, tp_group

    def forward(self, q_BSd, k_BSe, v_BSe, cos_SH, sin_SH, future_SS) -> Tensor:
        q_BnSH, k_BkSH, v_BkSH = (
            x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for x in (q_BSd, k_BSe, v_BSe)
        )
        q_BnSH = rotate(q_BnSH, cos_SH, sin_SH)
        k_BkSH = rotate(k_BkSH, cos_SH, sin_SH)
        queries_per_kv = q_BnSH.shape[1] // k_BkSH.shape[1]
        k_BnSH = k_BkSH.repeat_interleave(queries_per_kv, 1)
        v_BnSH = v_BkSH.repeat_interleave(queries_per_kv, 1)
        scores_BnSS = q_BnSH @ k_BnSH.mT / math.sqrt(self.head_size)
        weights_BnSS = scores_BnSS.masked_fill(future_SS, float("-inf")).softmax(-1)
        if self.p and self.training:
            weights_BnSS = sharded_dropout(weights_BnSS, self.p, 1, self.tp_group)
        return (weights_BnSS @ v_BnSH).transpose(1, 2).flatten(2)


class TPAttention(nn.Module):
    """Attention by heads: q, k, v by column, o by row; heads never meet in between.

    Args:
        full: the single-process attention; its heads and kv heads are multiples of T.

    Shapes (global → on a rank, placement):
        x                      [B, S, D] → [B, S, D]         Replicate()
        q_proj.weight          [D, D]    → [D/T, D]          Shard(0), N/T heads
        k_proj, v_proj.weight  [K·H, D]  → [K·H/T, D]        Shard(0), K/T heads
        o_proj.weight          [D, D]    → [D, D/T]          Shard(1)
    Communication: forward one all-reduce of B·S·D elements (g of o_proj), backward one
        (f before q, k and v).
    Raises: ValueError if T does not divide a projection.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: Attention, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.q_proj, self.k_proj, self.v_proj = shard_qkv(full, tp_group)
        self.core = CoreAttention(full.head_size, full.dropout.p, tp_group)
        self.o_proj = RowParallelLinear(full.o_proj, tp_group)

    def forward(self, x_BSD: Tensor, *tables: Tensor) -> Tensor:
        x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        q_BSd, k_BSe, v_BSe = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
        return self.o_proj(self.core(q_BSd, k_BSe, v_BSe, *tables))


class TPDecoderLayer(nn.Module):
    """A layer: attention and MLP split; LayerNorm, residual and their dropout whole.

    Communication: 2 all-reduces forward and 2 backward, each of B·S·D elements.
    """

    def __init__(self, full: DecoderLayer, tp_group: dist.ProcessGroup):
        super().__init__()
        self.p = full.dropout.p
        self.input_layernorm = copy.deepcopy(full.input_layernorm)
        self.self_attn = TPAttention(full.self_attn, tp_group)
        self.post_attention_layernorm = copy.deepcopy(full.post_attention_layernorm)
        self.mlp = TPMLP(full.mlp, tp_group)

    def forward(self, x_BSD: Tensor, *tables: Tensor) -> Tensor:
        p = self.p if self.training else 0
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), *tables)
        x_BSD = x_BSD + (replicated_dropout(y_BSD, p) if p else y_BSD)
        y_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + (replicated_dropout(y_BSD, p) if p else y_BSD)


def global_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the whole model's gradient, the same on every rank.

    A rank has a slice of the sharded gradients: their squares are summed over the
    group. It has all of the replicated ones: they are counted once.
    Communication: one all-reduce of one float64.
    """
    sharded, replicated = [], []
    for name, p in model.named_parameters():
        squares = p.grad.double().square().sum()
        (sharded if tell_placement(model, name) else replicated).append(squares)
    return math.sqrt(all_reduce(sum(sharded), tp_group) + sum(replicated))


def clip_gradients(model: nn.Module, max_norm: float, tp_group) -> float:
    """Scale all gradients so that their global norm is at most max_norm; the norm."""
    norm = global_norm(model, tp_group)
    scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    for p in model.parameters():
        p.grad.mul_(scale)
    return norm


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer: every rank updates what it holds, nothing is sent.

    Replicas stay equal because they started equal and got equal gradients.
    """
    optimizer.step()
    optimizer.zero_grad()


def pick_batch(batches: list, step: int) -> tuple[Tensor, Tensor]:
    """The step's tokens and targets: every rank of a TP group takes the same."""
    return batches[step]


def mean_loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Cross entropy averaged over the tokens that count, in float32 at least."""
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.to(wide).flatten(0, 1), target_BS.flatten())


def wide_copy(full: Transformer) -> tuple[Transformer, str]:
    """The model without dropout, in float32 at least, and the name of its dtype.

    For comparisons in which rounding is not the question.
    """
    dtype = torch.promote_types(next(full.parameters()).dtype, torch.float32)
    return copy.deepcopy(full).eval().to(dtype), str(dtype).removeprefix("torch.")


def plan_for(layers: int) -> dict:
    """PyTorch's way to say the same: which linear is split by column, which by row."""
    column, row = ColwiseParallel, RowwiseParallel
    plan = {}
    for i in range(layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"layers.{i}.{name}"] = column()
        plan[f"layers.{i}.self_attn.o_proj"] = row()
        plan[f"layers.{i}.mlp.up_proj"] = column()
        plan[f"layers.{i}.mlp.down_proj"] = row()
    return plan


PAD = 256  # the one token that is not a byte


IGNORE = -100  # what F.cross_entropy takes for "no target here"


def make_batches(args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets [B, S] of random lines of this file, as bytes; padded.

    Indentation is cut to half a row: among nothing but spaces every weighting of values
    gives the same, and the gradients of q and k would be zero, or rather rounding.
    """
    lines = [line for line in Path(__file__).read_bytes().split(b"\n") if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    half = args.seq_len // 2
    lines = [line[max(0, n - half) :] for line, n in zip(lines, indents)]
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(count):
        picks = torch.randint(len(lines), (args.batch_size,), generator=generator)
        rows = torch.full((args.batch_size, args.seq_len + 1), PAD)
        for row, pick in zip(rows, picks.tolist()):
            text = (lines[pick] + b"\n")[: args.seq_len + 1]
            row[: len(text)] = torch.tensor(list(text))
        tokens, target = rows[:, :-1].clone(), rows[:, 1:].clone()
        target[target == PAD] = IGNORE
        batches.append((tokens.to(args.device), target.to(args.device)))
    return batches


def make_transformer(args) -> Transformer:
    """The full model, the same on every rank: drawn from the seed before any cut."""
    torch.manual_seed(args.seed)
    config = Config(
        args.vocab_size, args.hidden, args.heads, args.kv_heads, args.layers,
        args.seq_len, args.dropout,
    )  # fmt: skip
    return Transformer(config).to(args.device, getattr(torch, args.dtype))


def tensor_bytes(tensors) -> int:
    """Bytes of all tensors among these."""
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


class Training:
    """One model in training, and what was measured of it."""

    def __init__(self, model: nn.Module, tp_group: dist.ProcessGroup | None, args):
        self.model, self.tp_group, self.args = model, tp_group, args
        # eps above the rounding error of a gradient: AdamW divides by the gradient's
        # size, and would turn rounding into steps as long as any other.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        self.losses, self.norms, self.held, self.first = [], [], {}, {}
        self.rounding = {}  # of bfloat16: measure_rounding

    def step(self, batches: list, step: int, watch=None) -> None:
        tokens, target = (
            batches[step] if not self.tp_group else pick_batch(batches, step)
        )
        torch.manual_seed(self.args.seed + step)  # the masks of this step
        parameters = list(self.model.parameters())
        saved = watch or SavedBytes(skip=[*parameters, *self.model.buffers()])
        COMM.what, COMM.phase = "layers", "forward"
        with saved:
            logits_BSV = self.model(tokens)
        loss = self.loss(logits_BSV, target)
        COMM.phase = "backward"
        self.backward(loss)
        COMM.what, COMM.phase = "bookkeeping", ""
        self.losses.append(loss.item())
        if not self.first:
            self.first = {n: self.whole(n, p.grad) for n, p in self.named()}
            self.held = {
                "parameters": tensor_bytes(parameters),
                "gradients": tensor_bytes(p.grad for p in parameters),
                "activations": saved.total(),
            }
        COMM.what = "clipping"
        if self.tp_group:
            self.norms.append(clip_gradients(self.model, self.args.clip, self.tp_group))
        else:
            # clip_grad_norm_, but with the squares of large tensors added in float64
            norm = torch.nn.utils.get_total_norm(p.grad.double() for p in parameters)
            torch.nn.utils.clip_grads_with_norm_(parameters, self.args.clip, norm)
            self.norms.append(norm.item())
        COMM.what = "bookkeeping"
        update(self.model, self.optimizer)
        if "optimizer state" not in self.held:
            state = self.optimizer.state.values()
            moments = [x for one in state for x in one.values()]
            self.held["optimizer state"] = tensor_bytes(moments)

    def loss(self, logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
        return mean_loss(logits_BSV, target_BS)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def named(self):
        return self.model.named_parameters()

    def whole(self, name: str, x: Tensor) -> Tensor:
        """A parameter, or its gradient, put together from all ranks."""
        where = tell_placement(self.model, name) if self.tp_group else ()
        return unshard(x.detach(), where, {"tp": self.tp_group}).clone()


def measure_rounding(run: Training, full: Transformer, batches: list) -> None:
    """How far bfloat16's rounding alone moves each gradient: against float32, no TP.

    A gradient is a sum of many terms, some large and of both signs: what is left of
    them can be as small as their rounding. So no one tolerance fits all tensors.
    """
    wide = argparse.Namespace(**vars(run.args) | {"dtype": "float32"})
    exact = Training(copy.deepcopy(full).float(), None, wide)
    exact.step(batches, 0)
    run.rounding = {n: rel_diff(run.first[n], g) for n, g in exact.first.items()}


def allowed(without: Training, name: str) -> float:
    """The largest relative difference of a parameter's gradient that is no bug.

    In bfloat16 it is 2e-2, or three times what rounding does to it without TP.
    """
    floor = ALLOWED[without.args.dtype][1]
    return max(floor, 3 * without.rounding.get(name, 0.0))


def fold(name: str, verbose: bool) -> str:
    """layers.3.mlp… → mlp…: one row for the parameter in all layers."""
    parts = name.split(".")
    return ".".join(parts[2:]) if parts[0] == "layers" and not verbose else name


def show_parameters(report: Report, without: Training, tp: Training) -> None:
    """Who holds what, and every gradient of step 1, layers folded into one row."""
    here, rows = dict(tp.named()), {}
    for name, reference in without.first.items():
        diff = rel_diff(tp.first[name], reference)
        mark = report.check(f"dL/d {name}", diff, allowed(without, name))
        where = in_words(tell_placement(tp.model, name))
        cell = rows.setdefault(fold(name, report.args.verbose), [])
        norms = [x.double().square().sum().item() for x in (reference, tp.first[name])]
        cell.append([list(here[name].shape), where, *norms, diff, mark != "ok"])
    worst = gather_objects(
        {key: [max(c[i] for c in cell) for i in (4, 5)] for key, cell in rows.items()}
    )
    table = []
    for key, cell in rows.items():
        shape, where = cell[0][:2]
        norms = [math.sqrt(sum(c[i] for c in cell)) for i in (2, 3)]
        diff, bad = (max(w[key][i] for w in worst) for i in (0, 1))
        row = dict(name=key, placement=where, rel_diff=diff, ok=not bad)
        row |= dict(norm_without=norms[0], norm_with=norms[1])
        report.data["gradients"].append(row)
        cells = [f"{norm:.3f}" for norm in norms] + [f"{diff:.1e}"]
        key = key.removeprefix("layers.")  # --verbose: the row fits the screen
        table.append([key, shape, where, *cells, "✗" if bad else "ok"])
    layers = report.args.layers
    report.say(
        f"\n2  Who holds what; norms of step 1's gradients (a row for {layers} layers)"
    )
    head = "parameter|on a rank|placement|alone|split|diff.|ok"
    report.table(head, table, "lllrrrr")
    name = "layers.0.self_attn.q_proj.weight"
    rows = [
        [
            " ".join(f"{v:9.6f}" for v in x.first[name][i, :3].tolist())
            for x in (without, tp)
        ]
        for i in range(2)
    ]
    report.table("dL/d q_proj.weight, layer 0, alone|split", rows, "ll")


def show_after(report: Report, without: Training, tp: Training) -> None:
    """The parameters after the last step; replicas equal to the bit on all ranks."""
    marks, diffs, squares = [], [], [0.0, 0.0]
    limit, reference = ALLOWED[report.args.dtype][1], dict(without.named())
    for name, p in tp.named():
        p, q = tp.whole(name, p), reference[name].detach()
        diffs.append(rel_diff(p, q))
        squares[0] += (p - q).double().square().sum().item()
        squares[1] += q.double().square().sum().item()
        if report.args.dtype != "bfloat16":
            check = f"{name} after the last step"
            marks.append(report.check(check, diffs[-1], limit))
    if report.args.dtype == "bfloat16":
        # AdamW makes steps of one length from large gradients and from rounding: the
        # parameters that started at zero differ, and only all together are compared.
        diffs = [math.sqrt(squares[0] / squares[1])]
        check = "all parameters after the last step"
        marks.append(report.check(check, diffs[0], limit))
    found = gather_objects([max(diffs), "✗" if "✗" in marks else "ok"])
    worst, mark = max(row[0] for row in found), max(row[1] for row in found)
    whole = {n: p for n, p in tp.named() if not tell_placement(tp.model, n)}
    off = 0.0
    for p in whole.values():
        off = max(off, rel_diff(broadcast(p, 0, tp.tp_group), p))
    off = max(gather_objects(off))  # rank 0, which prints, is equal to itself
    same = report.check("replicas equal on every rank", off)
    losses = gather_objects(tp.losses)
    one = report.check(
        "one loss on every rank", float(losses != [losses[0]] * len(losses))
    )
    report.say(
        f"   After {report.args.steps} steps the parameters differ by {worst:.1e} at "
        f"most: {mark}.\n   Equal to the bit on all ranks: the {len(whole)} replicated "
        f"tensors {same}, the losses {one}"
    )


def check_sizes(args, ranks: int) -> None:
    """ValueError where the model cannot be built, or cannot be cut into `ranks`."""
    pairs = [
        ("--hidden", args.hidden, "--heads", args.heads),
        ("--heads", args.heads, "--kv-heads", args.kv_heads),
        ("--heads", args.heads, "ranks, by --nproc_per_node", ranks),
        ("--kv-heads", args.kv_heads, "ranks, by --nproc_per_node", ranks),
    ]
    for flag, value, other, parts in pairs:
        if value % parts:
            raise ValueError(
                f"{flag} {value} is not a multiple of {parts} ({other}): {value} % "
                f"{parts} = {value % parts}; {flag} {value + parts - value % parts} "
                "would do"
            )
    if args.hidden // args.heads % 2:
        raise ValueError(
            f"--hidden {args.hidden} / --heads {args.heads} = "
            f"{args.hidden // args.heads}: rotary embedding turns pairs, the head size "
            "must be even"
        )
    if args.vocab_size < 257:
        raise ValueError(
            f"--vocab-size {args.vocab_size}: 256 bytes and padding need 257"
        )
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout {args.dropout}: a probability below 1 is wanted")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: a norm above 0 is wanted")
    if args.profile and not args.profile.is_dir():
        raise ValueError(f"--profile {args.profile}: there is no such folder")


# ==== BREAK IT


def gathered_logits(logits, target, tp_group, vocab_size, *rest, good=None):
    """All logits on every rank, and the loss for sharded ones on top of them."""
    whole_BSV = GatherFromTP.apply(logits, logits.dim() - 1, tp_group)
    columns = whole_BSV.shape[-1] * tp_group.size()
    return VocabParallelCrossEntropy.apply(
        whole_BSV, target, tp_group, columns, IGNORE, 0.0
    )


def detached_head(self, x_BSD):
    """The head reads the embedding's rows, but its gradient does not reach them."""
    x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
    return F.linear(x_BSD, self.weight.detach(), self.bias)


def backward_outside(loss_of):
    """loss.backward() after the context has been left."""
    with loss_parallel():
        loss = loss_of()
    loss.backward()
    return loss


BREAKS = {
    "ignored": Break(
        "without_ignored",
        lambda grad_BSv, has_target_BS: grad_BSv,
        "the gradient rows of ignored tokens are not zeroed",
        "the loss of step 1 is right: an ignored token's loss is zero; its gradient is "
        "not, and losses part from step 2 on",
        "dloss/dx = softmax − onehot is not zero where the loss was masked to zero",
        "docs.pytorch.org, torch.nn.functional.cross_entropy, ignore_index; a "
        "predecessor of this course got it wrong",
    ),
    "mean": Break(
        "mean_over_targets",
        lambda loss_BS, target_BS: loss_BS.mean(),
        "the mean is taken over all tokens, padding included",
        "the loss is too small by the share of padding, and so is every gradient; "
        "clipping and AdamW hide the scale, and parameters come out right here",
        "a padding token adds zero to the sum, and one to the count if you let it",
        "docs.pytorch.org, torch.nn.functional.cross_entropy, reduction='mean'; a "
        "predecessor of this course got it wrong",
    ),
    "gathered": Break(
        "vocab_parallel_cross_entropy",
        gathered_logits,
        "gathered logits are fed to the loss for sharded ones",
        "the loss is too large by log T, whatever the model does",
        "every rank adds all of Σ exp to the sum over ranks: it counts T times",
        "github.com/NVIDIA/Megatron-LM/issues/7452",
    ),
    "padding": Break(
        "real_columns",
        lambda logits, vocab_size, tp_group: torch.ones(
            logits.shape[-1], dtype=torch.bool, device=logits.device
        ),
        "the padded columns are left in the softmax",
        "the loss is a little too large, by less the larger the vocabulary",
        "a padded column's logit is 0, not −∞, and exp(0) = 1 joins every sum",
        "github.com/mirage-project/mirage/issues/751, vllm-project/vllm issue 1399",
    ),
    "max": Break(
        "largest_logit",
        lambda logits_BSv, tp_group: torch.zeros_like(logits_BSv[..., 0]),
        "the largest logit is not subtracted",
        "no loss changes while logits are small; large ones give inf or nan; "
        "two all-reduces are left of three",
        "exp(x) overflows float32 above x = 88; exp(x − max) never does",
        "Megatron-LM, arXiv:1909.08053, sec. 3; the first of its three all-reduces",
    ),
    "exponentials": Break(
        "to_softmax",
        lambda exp_BSv, total_BS: exp_BSv,
        "the exponentials are kept for backward, and not the softmax",
        "step 1's loss is right, the gradients are not: too large, about Σ times",
        "the gradient is softmax − onehot: exp without its 1/Σ is too large by Σ",
        "github.com/xrsrke/pipegoose",
    ),
    "tie": Break(
        "VocabParallelHead.forward",
        detached_head,
        "tied embedding and head, with the head's gradient lost (switches --tie on)",
        "step 1's loss is right, the shared weight's gradient lacks the head's part",
        "one parameter with two uses gets the sum of two gradients",
        "github.com/pytorch/torchtitan/issues/1524, NVIDIA/Megatron-LM issue 844",
    ),
    "loss-parallel": Break(
        "backward_inside",
        backward_outside,
        "PyTorch's loss_parallel: backward is called outside the context",
        "an error from deep inside, or a wrong gradient, in backward",
        "the context swaps the kernels of log-softmax and of the loss, and of their "
        "backward, for sharded ones; outside it the ordinary ones meet sharded logits",
        "github.com/pytorch/pytorch/issues/190746",
    ),
}


# ==== RUN


class VocabTraining(Training):
    """Training with the loss by hand; padding rows cut off what is put together."""

    def __init__(self, model, tp_group, args, loss_group):
        super().__init__(model, tp_group, args)
        self.loss_group = loss_group

    def loss(self, logits_BSv: Tensor, target_BS: Tensor) -> Tensor:
        COMM.what = "loss"
        V = self.args.vocab_size
        loss_BS = vocab_parallel_cross_entropy(
            logits_BSv, target_BS, self.loss_group, V
        )
        COMM.what = "layers"
        return mean_over_targets(loss_BS, target_BS)

    def whole(self, name: str, x: Tensor) -> Tensor:
        full = super().whole(name, x)
        vocabulary = name.startswith(("embed_tokens", "lm_head"))
        return full[: self.args.vocab_size] if vocabulary else full


def make_tied(args) -> Transformer:
    """Lesson 02's model; with --tie, head and embedding share their weight."""
    full = make_transformer(args)
    if args.tie:  # drawn small: as a head, the embedding's own rows give huge logits
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


def show_three_losses(report: Report, runs: list[Training], batches) -> None:
    """Three columns: F.cross_entropy, by hand on one rank, with TP."""
    args, rows = report.args, []
    loss_limit, limit = ALLOWED[args.dtype]
    for step, (_, target) in enumerate(batches):
        losses = [run.losses[step] for run in runs]
        norms = [run.norms[step] for run in runs]
        diff = max(abs(x - losses[0]) / losses[0] for x in losses)
        marks = [
            report.check(f"loss at step {step + 1}, {name}", abs(a - b) / b, bound)
            for name, a, b, bound in (
                ("by hand alone", losses[1], losses[0], loss_limit),
                ("with TP", losses[2], losses[0], loss_limit),
                ("gradient norm", norms[2], norms[0], limit),
            )
        ]
        row = {"step": step + 1, "without": losses[0], "with": losses[2]}
        row |= {"by_hand": losses[1], "tokens": target.numel()}
        padding = (target == IGNORE).sum().item()
        report.data["losses"].append(row | {"padding": padding})
        cells = [f"{x:.8f}" for x in losses]
        size = f"{args.batch_size} × {args.seq_len}"
        mark = "ok" if marks == ["ok"] * 3 else "✗"
        rows.append([step + 1, size, padding, *cells, f"{diff:.1e}", mark])
    report.say(
        "\n1  Losses on lines of this file, as bytes; PAD = 256 fills up short ones"
    )
    head = "step|tokens|no target|F.cross_entropy|by hand alone|with TP|diff.|ok"
    report.table(head, rows, "rrrrrrrr")
    report.say(
        "   by hand alone: this lesson's loss in one process; diff.: largest, relative"
    )


def show_rows(report: Report, tp: Training, batches) -> None:
    """Who has which rows, and how many of the batch's tokens and targets are there."""
    V, (tokens, target) = report.args.vocab_size, batches[0]
    v = len(tp.model.embed_tokens.weight)
    start = first_row(v, tp.tp_group)
    end = min(V, start + v)
    inside = [((x >= start) & (x < end)).sum().item() for x in (tokens, target)]
    words = f"{start} to {end - 1}" if end > start else "none"
    real = max(0, end - start)
    mine = [words, real, v - real, *inside]
    report.say(
        f"\n3  Who has which of the {V} tokens, and where the batch's are looked up"
    )
    rows = [[f"rank {r}", *row] for r, row in enumerate(gather_objects(mine))]
    report.table(
        "|tokens|rows|padding rows|of the inputs|of the targets", rows, "llrrrr"
    )
    report.say(
        "   Most of the text is ASCII, below 128: low tokens are looked up more.\n"
        "   Padding rows make the ranks equal in size; the loss leaves them out."
    )
    looked_up = sum(row[4] for row in rows)
    report.check("every token is looked up once", float(looked_up != tokens.numel()))


def show_one_token(report: Report, tp: Training, batches) -> None:
    """One token's loss: what each rank has, and the three all-reduces."""
    group, V = tp.tp_group, report.args.vocab_size
    COMM.what = "one token"
    tokens, target = batches[0]
    at = int((tokens[0] != target[0]).int().argmax())  # where it is not too easy
    with torch.no_grad():
        logits_v = tp.model.eval()(tokens[:1])[0, at].float()
    tp.model.train()
    wanted, v = target[0, at].item(), len(logits_v)
    real_v = real_columns(logits_v, V, group)
    x_v = logits_v.masked_fill(~real_v, float("-inf"))
    largest = largest_logit(x_v.unsqueeze(0), group)[0]
    total = (x_v - largest).exp().sum()
    start = first_row(v, group)
    has = start <= wanted < start + v
    picked = x_v[wanted - start] - largest if has else torch.zeros_like(largest)
    cells = [f"{x:.4f}" for x in (x_v.max().item(), total.item(), picked.item())]
    cells[2] = cells[2] if has else "not here"
    rows = [[f"rank {r}", *row] for r, row in enumerate(gather_objects(cells))]
    m, z, t = largest.item(), *(all_reduce(x, group).item() for x in (total, picked))
    rows.append(["all-reduce", f"max {m:.4f}", f"sum {z:.4f}", f"sum {t:.4f}"])
    report.say(
        f"\n4  One token's loss: after byte {tokens[0, at]} comes {wanted}. x are its "
        "logits, m the largest"
    )
    report.table("|largest x here|Σ exp(x − m)|target's x − m", rows, "lrrr")
    report.say(f"   loss = log {z:.4f} − ({t:.4f}) = {math.log(z) - t:.4f}")


def show_corner_cases(report: Report, group, args) -> None:
    """Batches where a loss goes wrong easily, against F.cross_entropy."""
    dtype, limits = getattr(torch, args.dtype), ALLOWED[args.dtype]
    generator = torch.Generator().manual_seed(args.seed)
    COMM.what, marks = "corner cases", []
    cases = {
        "logits up to 10,000": (257, 10000.0, 0.2, 0.0),
        "label smoothing 0.1": (257, 1.0, 0.2, 0.1),
        "only ignored tokens": (257, 1.0, 1.0, 0.0),
        "a vocabulary of 1": (1, 1.0, 0.2, 0.0),
        "V = 50,257": (50257, 1.0, 0.2, 0.0),
    }
    for name, (V, size, ignored, smoothing) in cases.items():
        x = torch.randn(3, 5, V, generator=generator).to(args.device, dtype) * size
        target = torch.randint(V, (3, 5), generator=generator)
        target[torch.rand(3, 5, generator=generator) < ignored] = IGNORE
        target = target.to(args.device)
        whole = x.clone().requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        wanted = F.cross_entropy(
            whole.to(wide).flatten(0, 1), target.flatten(), label_smoothing=smoothing
        )
        wanted.backward()
        padded = pad_vocab(x.movedim(-1, 0), group.size())
        mine = shard(padded, 0, group).movedim(0, -1).requires_grad_()
        loss_BS = vocab_parallel_cross_entropy(
            mine, target, group, V, IGNORE, smoothing
        )
        loss = mean_over_targets(loss_BS, target)
        loss.backward()
        grad = all_gather(mine.grad, -1, group)[..., :V]
        both_nan = loss.isnan() and wanted.isnan()
        diff = 0.0 if both_nan else rel_diff(loss, wanted)
        mark = report.check(f"{name}: loss", diff, limits[0])
        both_nan = whole.grad.isnan().sum() == grad.isnan().sum() > 0
        diff = 0.0 if both_nan else rel_diff(grad, whole.grad)
        off = report.check(f"{name}: gradient", diff, limits[1])
        marks.append(f"{name} {mark if off == 'ok' else off}")
    report.say(
        "   Against F.cross_entropy, loss and gradient:\n   " + ", ".join(marks[:3])
    )
    report.say("   " + ", ".join(marks[3:]))


def show_vocab_bytes(report: Report, args, ranks: int) -> None:
    """What a step sends, against the formulas."""
    dtype = getattr(torch, args.dtype)
    one = args.batch_size * args.seq_len * args.hidden * dtype.itemsize
    wide = torch.promote_types(dtype, torch.float32).itemsize
    few = args.batch_size * args.seq_len * wide
    rows, L = [], args.layers
    for what, where, phase, formula, n in (
        (
            "layers",
            f"embedding, {L} layers",
            "forward",
            "(2L + 1)·B·S·D",
            (2 * L + 1) * one,
        ),
        (
            "layers",
            f"{L} layers, head",
            "backward",
            "(2L + 1)·B·S·D",
            (2 * L + 1) * one,
        ),
        ("loss", "loss", "forward", "3·B·S", 3 * few),
    ):
        n = n if ranks > 1 else 0
        calls, moved, mark = report.moved(
            what, "all-reduce", "tp", n * args.steps, phase
        )
        each = calls // args.steps, moved // args.steps
        wire = each[1] * ring_factor("all-reduce", ranks)
        rows.append([where, phase, *each, formula, n, f"{wire:.0f}", mark])
    report.say(
        "\n5  Communication in a step: all-reduces; ring: what a rank of a ring sends"
    )
    head = "where|phase|calls|bytes|formula|predicted|ring|ok"
    report.table(head, rows, "llrrlrrr")


class PeakBytes(TorchDispatchMode):
    """Within `with`: the most bytes that tensors made there took up at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.watch(x.untyped_storage())
        return out

    def watch(self, storage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, key, size)

    def freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def gathered_loss(logits_BSv: Tensor, target_BS: Tensor, tp_group, V: int) -> Tensor:
    """What the loss by hand saves: gather all logits, then F.cross_entropy."""
    whole_BSV = GatherFromTP.apply(logits_BSv, 2, tp_group)[..., :V]
    return mean_loss(whole_BSV, target_BS)


def sharded_loss(logits_BSv: Tensor, target_BS: Tensor, tp_group, V: int) -> Tensor:
    """The loss by hand, averaged."""
    loss_BS = vocab_parallel_cross_entropy(logits_BSv, target_BS, tp_group, V)
    return mean_over_targets(loss_BS, target_BS)


def measure_loss(label: str, loss_of, args, tp_group, V: int) -> tuple[int, int]:
    """Bytes that one loss keeps for backward, and has at its peak."""
    shape = args.batch_size, args.seq_len
    generator = torch.Generator().manual_seed(args.seed)
    target = torch.randint(V, shape, generator=generator).to(args.device)
    dtype, v = getattr(torch, args.dtype), -(-V // tp_group.size())
    x = torch.zeros(*shape, v, dtype=dtype, device=args.device, requires_grad=True)
    saved, peak = SavedBytes(skip=[x, target]), PeakBytes()
    COMM.what = label
    with saved, peak:
        loss = loss_of(x, target, tp_group, V)
    kept = saved.total()
    with peak:
        loss.backward()
    return kept, peak.peak


def show_gathering(report: Report, tp_group, args) -> None:
    """Sharded loss against gathered logits: bytes sent, kept for backward, at peak."""
    T, rows, tokens = tp_group.size(), [], args.batch_size * args.seq_len
    size = getattr(torch, args.dtype).itemsize
    wide = max(4, size)  # the loss is computed in float32 at least
    for V in sorted({args.vocab_size, 257, 50257}):
        v = -(-V // T)
        masks = 2 * tokens + v + 8  # whose target, which count, real columns; a count
        for name, loss_of, collective, sent, wanted in (
            ("gathered", gathered_loss, "all-gather", tokens * v * T * size,
             tokens * V * wide + wide),  # log-softmax; the sum of weights
            ("sharded", sharded_loss, "all-reduce", 3 * tokens * wide,
             tokens * v * wide + 8 * tokens + masks),  # softmax, the target's column
        ):  # fmt: skip
            label = f"{name}, V {V}"
            kept, peak = measure_loss(label, loss_of, args, tp_group, V)
            sent = sent if T > 1 else 0
            _, moved, mark = report.moved(label, collective, "tp", sent)
            off = report.check(f"bytes kept, {label}", abs(kept - wanted))
            mark = mark if off == "ok" else off
            row = dict(what=f"logits {label}", bytes=kept, predicted_bytes=wanted)
            report.data["memory"].append(row | {"peak_bytes": peak})
            rows.append([V, name, moved, sent, kept, wanted, peak, mark])
    report.say(
        f"\n6  The loss alone, {tokens} tokens, bytes: logits gathered, or sharded"
    )
    head = "V|logits|sent|predicted|kept|predicted|at peak|ok"
    report.table(head, rows, "rlrrrrrr")


def backward_inside(loss_of):
    """loss.backward() within loss_parallel()."""
    with loss_parallel():
        loss = loss_of()
        loss.backward()
    return loss


def show_loss_parallel(report: Report, full: Transformer, batch, tp_group) -> None:
    """The same by PyTorch's own API: loss, gradients, collectives; no dropout."""
    args, (tokens, target) = report.args, batch
    mesh = DeviceMesh.from_group(tp_group, args.device, mesh_dim_names=("tp",))
    (reference, dtype), (planned, _) = wide_copy(full), wide_copy(full)
    plan = plan_for(args.layers)
    plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    planned = parallelize_module(planned, mesh, plan)
    if args.tie:  # the plan has cut one weight twice
        planned.lm_head.weight = planned.embed_tokens.weight
    wanted = mean_loss(reference(tokens), target)
    wanted.backward()
    COMM.what, COMM.phase = "DTensor", ""
    with CountDTensor("tp"):
        logits = planned(tokens)
        before = COMM.total(what="DTensor")[0]
        loss = backward_inside(lambda: mean_loss(logits, target))
    COMM.what = COMM.phase = ""
    after = COMM.total(what="DTensor")[0]
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    loss_limit, limit = ALLOWED[dtype]
    marks = [report.check("loss_parallel: loss", rel_diff(loss, wanted), loss_limit)]
    if tp_group.size() > 1:
        off = abs(before - 2 * args.layers - 1) + abs(
            after - before - 4 * args.layers - 4
        )
        marks.append(report.check("loss_parallel: collectives", off))
    worst = 0.0
    for (name, p), q in zip(planned.named_parameters(), reference.parameters()):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        diff = rel_diff(grad, q.grad)
        marks.append(report.check(f"loss_parallel: dL/d {name}", diff, limit))
        worst = max(worst, diff)
    report.data["losses"][0]["dtensor"] = loss.item()
    mark = "ok" if set(marks) == {"ok"} else "✗"
    report.say(
        "\n7  The same by PyTorch: RowwiseParallel embedding, ColwiseParallel head, "
        "loss_parallel()\n"
        f"   Without dropout, {dtype}: loss {loss.item():.8f}, alone "
        f"{wanted.item():.8f};\n   gradients differ by {worst:.1e}: {mark}\n"
        f"   Collectives: model forward {before} (2L + 1), loss and backward "
        f"{after - before} (3 + 4L + 1)\n"
    )


def train_and_write(report: Report, args, tp_group) -> None:
    """`--train N`: N steps with TP, then a text, the same without and with TP."""
    full, batches = make_tied(args), make_batches(args, args.train)
    tp = VocabTraining(
        VocabParallelTransformer(full, tp_group), tp_group, args, tp_group
    )
    for step in range(args.train):
        tp.step(batches, step)
        if (step + 1) % max(1, args.train // 6) == 0:
            recent = tp.losses[-20:]
            mean = sum(recent) / len(recent)
            report.say(f"   step {step + 1:>5} of {args.train}, loss {mean:.3f}")
    state = {name: tp.whole(name, p) for name, p in tp.model.named_parameters()}
    if args.tie:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    full.load_state_dict(state)  # the padding rows were cut off
    texts = [write(full, None, args), write(tp.model, tp_group, args)]
    mark = report.check(
        "the same text without and with TP", float(texts[0] != texts[1])
    )
    report.data["text_written"] = texts[1]
    report.say(f"   It writes, without and with TP the same ({mark}):\n")
    for line in (args.prompt + texts[1]).split("\n"):
        shown = "".join(c if c.isprintable() else "·" for c in line)
        report.say("   | " + shown[:80])
    report.say()


def write(model: nn.Module, tp_group, args) -> str:
    """`--write` bytes after the prompt; from sharded logits if there is a group."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens, V = list(args.prompt.encode()), args.vocab_size
    prompt = len(tokens)
    model.eval()
    for _ in range(args.write):
        window = torch.tensor([tokens[-args.seq_len :]], device=args.device)
        with torch.no_grad():
            logits = model(window)[0, -1].float()
        uniform = torch.rand(V, generator=generator).clamp_min(1e-20)
        noise_V = -args.temperature * (-uniform.log()).log()  # Gumbel
        noise_V[256:] = float("-inf")  # bytes only
        noise_V = noise_V.to(args.device)
        if tp_group is None:
            tokens.append(int((logits + noise_V).argmax()))
        else:
            tokens.append(sample_sharded(logits, noise_V, tp_group, V))
    return bytes(tokens[prompt:]).decode(errors="replace")


def parse_args(ranks: int) -> argparse.Namespace:
    parser = lesson_parser(__doc__, 5, "steps of AdamW")
    add = parser.add_argument
    add("--hidden", type=positive, default=64, help="D (default 64)")
    add("--heads", type=positive, default=8, help="N (default 8)")
    add("--kv-heads", type=positive, help="K (default N)")
    add("--layers", type=positive, default=2, help="L (default 2)")
    add("--batch-size", type=positive, default=4, help="B (default 4)")
    add("--seq-len", type=positive, default=32, help="S (default 32)")
    add("--vocab-size", type=positive, default=257, help="V (default 257)")
    add("--dropout", type=float, default=0.1, help="probability (default 0.1)")
    add("--clip", type=float, default=1.0, help="gradient norm allowed (default 1)")
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--verbose", action="store_true", help="a row for each layer's parameters")
    add("--train", type=positive, metavar="N", help="train N steps more, then write")
    add("--prompt", default="def ", help="what the text begins with")
    add("--write", type=positive, default=200, help="bytes to write (default 200)")
    add("--temperature", type=float, default=0.5, help="0: always the likeliest byte")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    args.profile = None
    args.tie = args.tie or args.break_name == "tie"
    check_sizes(args, ranks)
    if not args.prompt:
        raise ValueError(
            "--prompt '': one byte at least, the model continues something"
        )
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature}: 0 or more is wanted")
    return args


def main(args: argparse.Namespace, backend: str) -> str:
    ranks = dist.get_world_size()
    groups = mesh_groups({"tp": ranks}, args.timeout)
    groups |= mesh_groups({"ranks": ranks, "alone": 1}, args.timeout)
    tp_group = groups["tp"]
    report = Report("03_vocab_parallel", args, {"tp": ranks}, backend)
    full, batches = make_tied(args), make_batches(args, args.steps)
    without = Training(copy.deepcopy(full), None, args)
    by_hand = VocabTraining(copy.deepcopy(full), None, args, groups["alone"])
    split = VocabParallelTransformer(full, tp_group)
    tp = VocabTraining(split, tp_group, args, tp_group)
    for step in range(args.steps):
        for run in (without, by_hand, tp):
            run.step(batches, step)
    if args.dtype == "bfloat16":
        measure_rounding(without, full, batches)
    show_three_losses(report, [without, by_hand, tp], batches)
    show_parameters(report, without, tp)
    show_after(report, without, tp)
    show_rows(report, tp, batches)
    show_one_token(report, tp, batches)
    show_corner_cases(report, tp_group, args)
    show_vocab_bytes(report, args, ranks)
    show_gathering(report, tp_group, args)
    show_loss_parallel(report, full, batches[0], tp_group)
    if args.train:
        train_and_write(report, args, tp_group)
    return report.verdict("with TP == without TP", BREAKS.get(args.break_name))


if __name__ == "__main__":
    launch(__file__, parse_args, main, BREAKS, globals())
