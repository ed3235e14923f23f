"""Lesson 02: a transformer under tensor parallelism.

Attention splits by heads as an MLP splits by columns: q, k and v by column, o by row.
So a layer needs two all-reduces forward and two backward, and what lies between the
blocks (LayerNorm, residual, dropout, embedding) stays whole and equal on every rank.

Run it (2 ranks on a laptop; 4 and 8 work too):

    torchrun --standalone --nproc_per_node=2 02_transformer_tp.py

What you will see: a decoder that learns to predict this file, byte by byte, in one
process and under TP, side by side: losses, every gradient, the gradient norm and its
clipping, the parameters after the last step. Then what a rank sends and holds, against
the formulas; why shards are cut from one tensor; which dropout masks are shared; and
the same by PyTorch's plan. `--bench` times it, `--profile DIR` writes traces for
Perfetto, `--break list` names the bugs you can switch on.

New here: the model, attention split by heads, dropout, gradient norm under TP, memory.
Carried over: from 01 the parallel layers, f and g; from 00 the collectives.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in the TP group. UPPERCASE is the
    full size, lowercase this rank's slice: q_BnSH has this rank's N/T heads.

Needs: torch (and numpy, else torch warns that it is missing).
Sources: Megatron-LM, arXiv:1909.08053, sec. 3 (the split, dropout); arXiv:2205.05198
    (what activations are kept); RoFormer, arXiv:2104.09864 (rotary embedding);
    docs.pytorch.org, torch.distributed.tensor.parallel and torch.profiler.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

# ==== NEW in 02: a transformer under tensor parallelism

Config = namedtuple("Config", "vocab_size hidden heads kv_heads layers seq_len dropout")


# The reference: one process, plain PyTorch. No collective, no group.


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


# The parallel model, cut from the reference.


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


class TPTransformer(nn.Module):
    """The decoder, its layers split over the TP group; embedding and head are whole.

    Args:
        full: the reference, identical on every rank.
        tp_group: the T ranks that share each layer.

    Shapes: tokens [B, S] → logits [B, S, V], Replicate().
    Communication: 2·L all-reduces of B·S·D elements forward, as many backward.
    """

    def __init__(self, full: Transformer, tp_group: dist.ProcessGroup):
        super().__init__()
        self.embed_tokens = copy.deepcopy(full.embed_tokens)
        self.layers = nn.ModuleList(TPDecoderLayer(x, tp_group) for x in full.layers)
        self.norm = copy.deepcopy(full.norm)
        self.lm_head = copy.deepcopy(full.lm_head)
        for name, table in full.named_buffers():
            self.register_buffer(name, table.clone(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        S = tokens_BS.shape[1]
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos[:S], self.sin[:S], self.future[:S, :S])
        return self.lm_head(self.norm(x_BSD))


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


# ==== BREAK IT


def same_seed_shard(full, dim, group, good=shard):
    """Each rank draws its weights itself, all from one seed: the shards are copies."""
    mine = good(full, dim, group)
    if not full.is_floating_point():
        return mine
    generator = torch.Generator().manual_seed(0)
    return torch.randn(mine.shape, generator=generator).to(mine) * full.std()


def cut_fused_qkv(full, tp_group, good=shard_qkv):
    """q, k and v stacked into one weight, which is then cut into T equal pieces."""
    layers = good(full, tp_group)
    for kind in ("weight", "bias"):
        three = [getattr(x, kind) for x in (full.q_proj, full.k_proj, full.v_proj)]
        mine = shard(torch.cat(three), 0, tp_group)
        for layer, part in zip(
            layers, mine.split([len(getattr(x, kind)) for x in layers])
        ):
            getattr(layer, kind).data = part
    return layers


def first_slice_dropout(x, p, dim, tp_group):
    """Every rank keeps the first slice of the mask."""
    whole = list(x.shape)
    whole[dim] *= tp_group.size()
    keep = torch.rand(whole, device=x.device) >= p
    return x * keep.chunk(tp_group.size(), dim)[0] / (1 - p)


def own_mask_dropout(x, p):
    """Each rank its own mask (moved by its number) for a tensor that all share."""
    keep = torch.rand(x.shape, device=x.device) >= p
    return x * keep.roll(dist.get_rank(), -1) / (1 - p)


def local_norm(model, tp_group):
    """torch.nn.utils.get_total_norm on what this rank has."""
    return math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))


def skip_norms_on_last_rank(model, optimizer):
    """The last rank's LayerNorms are left out of the update."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if last and isinstance(model, TPTransformer):
        for name, p in model.named_parameters():
            p.grad = None if "norm" in name else p.grad
    optimizer.step()
    optimizer.zero_grad()


BREAKS = {
    "seed": Break(
        "shard",
        same_seed_shard,
        "each rank initialises its shard itself, all from the same seed",
        "it trains, but another model: every head and every MLP column exists T times",
        "equal shards get equal gradients (but for attention's dropout masks) and stay "
        "equal; a T-th of the model is left. Cut the shards from one tensor, or seed "
        "each rank differently",
        "github.com/modelscope/ms-swift/issues/7944, allenai/OLMo-core issue 307",
    ),
    "qkv": Break(
        "shard_qkv",
        cut_fused_qkv,
        "a fused q-k-v weight is cut into contiguous slices",
        "shapes fit and nothing complains; the loss is wrong from step 1 on",
        "the first slice is mostly queries, the last mostly values, and a rank takes "
        "thirds of its slice for its q, k and v. Cut q, k and v each, by heads",
        "github.com/deepspeedai/DeepSpeed/pull/3844",
    ),
    "mask-heads": Break(
        "sharded_dropout",
        first_slice_dropout,
        "one dropout mask for the heads of all ranks",
        "no error; losses near the right ones, never equal to them",
        "heads on different ranks drop the same positions: T times fewer random draws "
        "than the model has. In a sharded region each rank needs draws of its own",
        "github.com/NVIDIA/Megatron-LM/issues/206",
    ),
    "mask-residual": Break(
        "replicated_dropout",
        own_mask_dropout,
        "every rank its own dropout mask on the residual stream",
        "the ranks' losses differ from each other; replicated parameters drift apart",
        "the residual stream is one tensor that all ranks hold, so all must drop the "
        "same elements of it",
        "github.com/NVIDIA/Megatron-LM/issues/206",
    ),
    "clip": Break(
        "global_norm",
        local_norm,
        "gradients are clipped by each rank's own norm",
        "step 1's loss and gradients are right, the norms are not; ranks scale by "
        "different factors, and losses part from step 2 on",
        "a rank sees its own shards' squares only: sum them over the group first",
        "github.com/pytorch/torchtune/issues/2420, pytorch/torchtitan issue 596",
    ),
    "data": Break(
        "pick_batch",
        lambda batches, step: batches[(step + dist.get_rank()) % len(batches)],
        "every rank of the TP group reads a batch of its own",
        "the losses are wrong from step 1 on and differ between ranks; nothing hangs",
        "the ranks of a TP group work on one and the same batch: each has its terms of "
        "sums over features of the same tokens. Split the batch over data parallelism",
        "github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "drift": Break(
        "update",
        skip_norms_on_last_rank,
        "one rank's LayerNorms miss their update",
        "step 1 is right in everything; then that rank's replicas differ from the "
        "others', and losses part slowly",
        "nothing re-synchronises replicated parameters: only equal starts, equal "
        "gradients and equal updates keep them equal",
        "github.com/NVIDIA/Megatron-LM/issues/1446",
    ),
}


# ==== RUN

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


def show_losses_and_norms(report: Report, without: Training, tp: Training) -> None:
    """Loss and gradient norm of each step, without and with TP."""
    loss_limit, limit = ALLOWED[report.args.dtype]
    report.say(
        f"\n1  Training on lines of this file: AdamW, gradients clipped to norm "
        f"{report.args.clip:g}. ‖g‖:\n   the norm before it; diff.: relative difference"
    )
    rows = []
    columns = zip(without.losses, tp.losses, without.norms, tp.norms)
    for step, (a, b, norm_a, norm_b) in enumerate(columns, 1):
        diff, norm_diff = abs(b - a) / abs(a), abs(norm_b - norm_a) / norm_a
        marks = [
            report.check(f"loss at step {step}", diff, loss_limit),
            report.check(f"gradient norm at step {step}", norm_diff, limit),
        ]
        report.data["losses"].append({"step": step, "without": a, "with": b})
        cells = f"{a:.8f}", f"{b:.8f}", f"{diff:.1e}", f"{norm_a:.6f}", f"{norm_b:.6f}"
        mark = "ok" if marks == ["ok"] * 2 else "✗"
        rows.append([step, *cells, f"{norm_diff:.1e}", mark])
    head = "step|loss without TP|loss with TP|diff.|‖g‖ alone|‖g‖ with TP|diff.|ok"
    report.table(head, rows, "rrrrrrrr")


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


def show_start(report: Report, full: Transformer, tp_group) -> None:
    """Initialisation: shards of one tensor, against shards drawn from one seed."""
    T = tp_group.size()
    weight = full.layers[0].mlp.up_proj.weight
    cut = all_gather(shard(weight, 0, tp_group), 0, tp_group)
    torch.manual_seed(report.args.seed)
    mine = torch.randn(len(weight) // T, weight.shape[1], device=weight.device)
    drawn = all_gather(mine, 0, tp_group)
    rows = [len(x.unique(dim=0)) for x in (weight.detach(), cut, drawn)]
    mark = report.check("shards differ from rank to rank", float(rows[1] != rows[0]))
    report.say(
        "\n3  Initialisation: every rank draws the full model from one seed and cuts\n"
        f"   it. up_proj has {rows[0]} different rows; put together from its shards "
        f"{rows[1]}: {mark}.\n   Had each rank drawn its own shard from that seed: "
        f"{rows[2]}, each {T} times over.\n"
        "   q, k and v are cut one by one, by heads: a rank's queries need their own\n"
        "   keys and values. A slice of [q; k; v] would mix them (--break qkv)."
    )
    if full.config.dropout == 0:
        return
    report.say(
        "   Dropout: all ranks draw from one seed, so masks are as in one process.\n"
        "   Residual stream, twice a layer: replicated, so all ranks share the mask.\n"
        "   Attention weights: sharded by heads, a rank keeps its slice of the mask.\n"
        "   (Megatron draws the slice alone, from a generator seeded by tp_rank.)"
    )


def show_traffic(report: Report, config: Config, ranks: int) -> None:
    """All-reduces of the layers, and of clipping, against the formulas."""
    args = report.args
    size = getattr(torch, args.dtype).itemsize if ranks > 1 else 0
    one = args.batch_size * args.seq_len * config.hidden * size
    rows = []
    for phase in ("forward", "backward"):
        wanted = 2 * config.layers * one
        cells = report.moved("layers", "all-reduce", "tp", wanted * args.steps, phase)
        calls, moved, mark = cells
        wire = moved // args.steps * ring_factor("all-reduce", ranks)
        rows.append([f"{config.layers} layers", phase, calls // args.steps])
        rows[-1] += [moved // args.steps, "2·L·B·S·D", wanted, f"{wire:.0f}", mark]
    wanted = 8 if ranks > 1 else 0  # one float64
    calls, moved, mark = report.moved(
        "clipping", "all-reduce", "tp", wanted * args.steps
    )
    share = moved / max(1, COMM.total(axis="tp", collective="all-reduce")[1])
    rows.append(["gradient norm", "update", calls // args.steps, moved // args.steps])
    rows[-1] += [
        "one number",
        wanted,
        f"{wanted * ring_factor('all-reduce', ranks):.0f}",
    ]
    rows[-1].append(mark)
    calls, moved = COMM.total(what="layers")
    rest = [calls // args.steps - 4 * config.layers * (ranks > 1)]
    rest += [moved // args.steps - 4 * config.layers * one]
    rows.append(["embedding, head", "both", *rest, "whole on all ranks", 0, 0, ""])
    report.say(
        "\n4  Communication in a step: all-reduces; ring: what a rank of a ring sends"
    )
    head = "where|phase|calls|bytes|formula|predicted|ring|ok"
    report.table(head, rows, "llrrlrrr")
    report.say(f"   share of bytes outside the layers: {100 * share:.3f} %")


def predict_held(config: Config, args, T: int) -> dict[str, int]:
    """Bytes on a rank: parameters, gradients, optimizer state, activations.

    Activations per layer, in the order of forward: LayerNorm keeps its input, mean and
    rstd; q, k and v their one input and, turned, themselves; softmax its output,
    dropout a mask of bytes and its output; o its input, dropout a mask; LayerNorm
    again; up its input, GELU its own, down its own; dropout a mask.
    """
    e = getattr(torch, args.dtype).itemsize
    statistic = (
        4 if args.device == "cuda" else e
    )  # a GPU keeps mean and rstd in float32
    V, D, L, N = config.vocab_size, config.hidden, config.layers, config.heads
    kv, F = 2 * D * config.kv_heads // N, 4 * D
    cut = (D * D + D) + kv * (D + 1) + D * D + (D * F + F) + D * F
    P = L * (cut // T + 2 * D + 4 * D) + V * D + 2 * D + V * D + V
    B, S = args.batch_size, args.seq_len
    tokens, square, drop = B * S, B * N * S * S, config.dropout > 0
    attention = e * (3 * tokens * D + square * (2 if drop else 1) + tokens * D) // T
    layer = (
        e * 4 * tokens * D + statistic * 4 * tokens
    )  # LayerNorms: inputs and outputs
    layer += attention + e * 2 * tokens * F // T
    layer += (square // T + 2 * tokens * D) if drop else 0  # masks, one byte an element
    ends = 8 * tokens + e * 2 * tokens * D + statistic * 2 * tokens
    return {
        "parameters": P * e,
        "gradients": P * e,
        "optimizer state": 2 * P * e + 4 * (16 * L + 5),  # and a step count each
        "activations": L * layer + ends,
    }


def show_memory(report: Report, without: Training, tp: Training, ranks: int) -> None:
    """Bytes held by a rank, without and with TP, against the formulas."""
    config, args = without.model.config, report.args
    wanted = [predict_held(config, args, T) for T in (1, ranks)]
    rows = []
    for kind in wanted[0]:
        cells, marks = [], []
        for name, run, predicted in zip(
            ("without TP", "with TP"), (without, tp), wanted
        ):
            n = run.held[kind]
            row = dict(what=f"{kind} {name}", bytes=n, predicted_bytes=predicted[kind])
            report.data["memory"].append(row)
            cells += [n, predicted[kind]]
            off = abs(n - predicted[kind])
            marks.append(report.check(f"bytes of {kind} {name}", off))
        mark = "ok" if marks == ["ok"] * 2 else "✗"
        rows.append([kind, *cells, f"{cells[2] / cells[0]:.2f}", mark])
    total = [sum(row[i] for row in rows) for i in range(1, 5)]
    rows.append(["sum", *total, f"{total[2] / total[0]:.2f}", ""])
    report.say(
        "\n5  Memory of a rank, in bytes (step 1; model alone, without the loss)"
    )
    head = "|without TP|predicted|with TP|predicted|ratio|ok"
    report.table(head, rows, "lrrrrrr")
    report.say(
        "   Cut by T: attention and MLP, their weights and what they keep in between.\n"
        "   Whole on every rank: embedding, head, LayerNorm, residual and its masks."
    )


def show_plan(report: Report, full: Transformer, batch, tp_group) -> None:
    """The same by PyTorch's own API, without dropout: loss, gradients, collectives."""
    args, config = report.args, full.config
    device, (tokens, target) = args.device, batch
    mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    (reference, dtype), (planned, _) = wide_copy(full), wide_copy(full)
    planned = parallelize_module(planned, mesh, plan_for(config.layers))
    wanted = mean_loss(reference(tokens), target)
    wanted.backward()
    COMM.what, COMM.phase = "DTensor", "forward"
    with CountDTensor("tp"):
        loss = mean_loss(planned(tokens), target)
        COMM.phase = "backward"
        loss.backward()
    COMM.what = COMM.phase = ""
    diff, worst = abs(loss.item() - wanted.item()) / wanted.item(), 0.0
    loss_limit, limit = ALLOWED[dtype]
    marks = [report.check("DTensor's loss", diff, loss_limit)]
    for (name, p), q in zip(planned.named_parameters(), reference.parameters()):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        diff = rel_diff(grad, q.grad)
        marks.append(report.check(f"DTensor's dL/d {name}", diff, limit))
        worst = max(worst, diff)
    size = getattr(torch, dtype).itemsize if tp_group.size() > 1 else 0
    one = tokens.numel() * config.hidden * size
    L, row = config.layers, []
    for phase, times in (("forward", 2), ("backward", 4)):
        cells = report.moved("DTensor", "all-reduce", "tp", times * L * one, phase)
        row.append(
            f"{cells[0]} all-reduces {phase}, {cells[1]} bytes ({times}·L·B·S·D)"
        )
        marks.append(cells[2])
    report.data["losses"][0]["dtensor"] = loss.item()
    mark = "ok" if set(marks) == {"ok"} else "✗"
    report.say(
        "\n6  The same by PyTorch's own plan, a dict of ColwiseParallel() and "
        "RowwiseParallel()\n"
        f"   Without dropout, {dtype}: loss {loss.item():.8f}, alone "
        f"{wanted.item():.8f};\n   gradients differ by {worst:.1e}: {mark}\n"
        f"   {row[0]}\n   {row[1]}:\n"
        "   each of q, k and v has an f of its own; by hand they share one\n"
    )


def bench_sizes(report: Report, args, tp_group) -> None:
    """`--bench`: a step without and with TP over hidden sizes, as ratios."""
    rows = []
    for hidden in (8 * args.heads * scale for scale in (1, 4, 8, 16)):
        sizes = argparse.Namespace(**vars(args) | dict(hidden=hidden, layers=1))
        full, batches = make_transformer(sizes), make_batches(sizes, 1)
        runs = [Training(full, None, sizes)]
        runs.append(Training(TPTransformer(full, tp_group), tp_group, sizes))
        seconds, waits = [[], []], []
        for _ in range(12 if hidden <= 256 else 6):
            for which, run in enumerate(runs):
                dist.barrier()
                start, COMM.seconds = time.perf_counter(), 0.0
                if which or dist.get_rank() == 0:  # one process: the others wait
                    run.step([batches[0]], 0)
                seconds[which].append(time.perf_counter() - start)
            waits.append(COMM.seconds / seconds[1][-1])
        middle = [sorted(s[1:])[len(s) // 2 - 1] for s in seconds]
        share = sorted(waits[1:])[len(waits) // 2 - 1]
        alone, tp, share = gather_objects([*middle, share])[0]
        row = dict(hidden=hidden, alone=alone, tp=tp, share_in_collectives=share)
        report.data.setdefault("bench", []).append(row)
        cells = f"{1000 * alone:.1f}", f"{1000 * tp:.1f}", f"{alone / tp:.2f}"
        rows.append([hidden, *cells, f"{100 * share:.0f} %"])
    report.say(
        f"7  Time of a step of 1 layer, {args.batch_size * args.seq_len} tokens, here"
    )
    head = "hidden|one process ms|TP ms|TP is faster by|of TP's time in collectives"
    report.table(head, rows, "rrrrr")
    report.say()


class MemoryTimeline(torch.autograd.graph.saved_tensors_hooks):
    """Bytes held over time by what they are, noted whenever one of them changes."""

    def __init__(self, run: Training):
        self.start, self.events, self.users = time.perf_counter(), [], {}
        parameters = list(run.model.parameters())
        tensors = [*parameters, *run.model.buffers()]
        self.skip = {x.untyped_storage().data_ptr() for x in tensors}
        self.now = {
            "parameters": tensor_bytes(parameters),
            "optimizer state": run.held["optimizer state"],
            "gradients": 0,
            "activations": 0,
        }
        for p in parameters:
            p.register_post_accumulate_grad_hook(
                lambda p: self.note("gradients", p.grad.nbytes)
            )
        super().__init__(self.pack, lambda kept: kept[0])

    def note(self, kind: str, change: int) -> None:
        self.now[kind] += change
        row = {"seconds": time.perf_counter() - self.start, **self.now}
        self.events.append(row)

    def pack(self, x: Tensor):
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        kept = Kept([x])  # autograd lets go of it once backward has used it
        if key not in self.skip:
            self.users[key] = self.users.get(key, 0) + 1
            if self.users[key] == 1:
                self.note("activations", size)
            weakref.finalize(kept, self.let_go, key, size)
        return kept

    def let_go(self, key: int, size: int) -> None:
        self.users[key] -= 1
        if self.users[key] == 0:
            self.note("activations", -size)


class Kept(list):
    """A list that can be watched."""


def profile_steps(report: Report, full: Transformer, batches, tp_group) -> None:
    """`--profile DIR`: a trace of a step each way, and memory over time by its use."""
    args = report.args
    runs = {"without_tp": Training(copy.deepcopy(full), None, args)}
    runs["with_tp"] = Training(TPTransformer(full, tp_group), tp_group, args)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if args.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for name, run in runs.items():
        run.step(batches, 0)  # a first step makes the optimizer's state
        path = args.profile / f"{name}.rank{report.rank}"
        with torch.profiler.profile(
            activities=activities, profile_memory=True, record_shapes=True
        ) as profiler:
            run.step(batches, 0)
        profiler.export_chrome_trace(f"{path}.trace.json")
        timeline = MemoryTimeline(run)
        with timeline:
            run.step(batches, 0, timeline)
        timeline.note("gradients", -timeline.now["gradients"])  # update drops them
        Path(f"{path}.memory.json").write_text(json.dumps(timeline.events))
        peak = max(sum(list(row.values())[1:]) for row in timeline.events)
        report.data.setdefault("peak_bytes", {})[name] = peak
    peaks = " and ".join(map(str, report.data["peak_bytes"].values()))
    report.say(
        f"   --profile: at the peak {peaks} bytes, without and with TP. Memory over\n"
        f"   time and traces (for ui.perfetto.dev) are in {args.profile}\n"
    )


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
    add("--verbose", action="store_true", help="a row for each layer's parameters")
    add("--bench", action="store_true", help="also measure the time of a step")
    add("--profile", type=Path, metavar="DIR", help="write traces and memory over time")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    check_sizes(args, ranks)
    return args


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


def main(args: argparse.Namespace, backend: str) -> str:
    ranks = dist.get_world_size()
    tp_group = mesh_groups({"tp": ranks}, args.timeout)["tp"]
    report = Report("02_transformer_tp", args, {"tp": ranks}, backend)
    full, batches = make_transformer(args), make_batches(args, args.steps)
    without = Training(copy.deepcopy(full), None, args)
    tp = Training(TPTransformer(full, tp_group), tp_group, args)
    for step in range(args.steps):
        without.step(batches, step)
        tp.step(batches, step)
    if args.dtype == "bfloat16":
        measure_rounding(without, full, batches)
    show_losses_and_norms(report, without, tp)
    show_parameters(report, without, tp)
    show_after(report, without, tp)
    show_start(report, full, tp_group)
    show_traffic(report, full.config, ranks)
    show_memory(report, without, tp, ranks)
    show_plan(report, full, batches[0], tp_group)
    if args.bench:
        bench_sizes(report, args, tp_group)
    if args.profile:
        profile_steps(report, full, batches, tp_group)
    return report.verdict("with TP == without TP", BREAKS.get(args.break_name))


if __name__ == "__main__":
    launch(__file__, parse_args, main, BREAKS, globals())
