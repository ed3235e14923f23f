"""Lesson 04: sequence parallelism.

Tensor parallelism leaves LayerNorm, dropout and the residual whole on every rank: the
same work, and the same memory, T times. Here each rank takes a slice of the sequence
for them: each all-reduce becomes a gather and a scatter, of the same bytes on a ring,
and a layer keeps 1/T of what it keeps in one process.

Run it (2 ranks on a laptop; 4 and 8 work too):

    torchrun --standalone --nproc_per_node=2 04_sequence_parallel.py

What you will see: lesson 03's transformer beside one with sequence parallelism, losses
and gradients equal to one process; the gradients that need an all-reduce, before and
after it; which backward belongs to which scatter and gather; the bytes sent; the memory
of a layer, to the byte, as in the paper; lengths that T does not divide; the same by
PyTorch's SequenceParallel. `--hf` adds a Hugging Face model, `--save-gathered` keeps
what the paper does not; `--break list` names the bugs you can switch on.

New here: the sequence, split. Carried over: from 03 the vocabulary, from 02 the
transformer and its training, from 01 the parallel layers, from 00 the collectives.

Shapes: B batch, S sequence, D hidden, F MLP width, V vocabulary, T ranks in the TP
    group. UPPERCASE is the full size, lowercase this rank's slice: x_BsD has the
    positions of this rank, s = S/T rounded up; what is too much is padding.

Needs: torch (and numpy, else torch warns that it is missing); for --hf transformers.
Sources: Korthikanti et al. 2022, arXiv:2205.05198 (sequence parallelism, memory);
    docs.pytorch.org, torch.distributed.tensor.parallel.SequenceParallel.
"""

from __future__ import annotations  # names that stand further down may be used

import argparse
import copy
import gc
import importlib
import json
import math
import os
import signal
import sys
import textwrap
import time
import traceback
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
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# ==== NEW in 04: the sequence, split


def pad_sequence(x_BSD: Tensor, ranks: int, value: float = 0) -> Tensor:
    """Positions at the end, so that T divides them: [B, S, …] → [B, ⌈S/T⌉·T, …].

    At the end: the others keep their positions. Where the whole x is put together it
    is cut off again; a model that does not (pad_batch) has a causal mask against it.
    """
    missing = -x_BSD.shape[1] % ranks
    filling = x_BSD.new_full((len(x_BSD), missing, *x_BSD.shape[2:]), value)
    return torch.cat([x_BSD, filling], 1) if missing else x_BSD


def gather_sequence(x_BsD: Tensor, S: int, tp_group: dist.ProcessGroup) -> Tensor:
    """Into the tensor-parallel region: all slices, and the padding cut off again.

    Each rank goes on with x in its own way, with its columns of W, so each has a term
    of the gradient: backward sums them. What padded rows hold (a bias, say) is cut off,
    so no gradient comes back to it.
    Shapes: x [B, s, D] → [B, S, D]. Communication: forward one all-gather of B·s·T·D
        elements (s·T is S, padded), backward one reduce-scatter of them.
    """
    return AllGather.apply(x_BsD, 1, tp_group)[:, :S]


def scatter_sequence(partial_y_BSD: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Out of it: the ranks' terms are summed, and each keeps its slice of positions.

    Shapes: y [B, S, D] {U_tp} → [B, s, D]. Communication: forward one reduce-scatter of
        B·s·T·D elements, backward one all-gather of them. In lesson 02 an all-reduce
        stood here: that is a reduce-scatter and an all-gather.
    Megatron-LM calls it reduce_scatter_to_sequence_parallel_region; its scatter_to… is
    the mere split below.
    """
    return ReduceScatter.apply(
        pad_sequence(partial_y_BSD, tp_group.size()), 1, tp_group
    )


class ScatterToSequence(torch.autograd.Function):
    """Cut a tensor that all ranks have: split forward, all-gather backward.

    For a model whose input comes whole, as from an embedding that is not split. Each
    rank has the gradient of its slice alone; the whole x needs all of them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return shard(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.tp_group), None, None


def sum_to_slices(partial_grad_BSD: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Backward of the gather in GatherThenLinear: every rank has a term of the gradient
    for every position. (gather_sequence has the same from lesson 01's AllGather.)"""
    padded_BSD = pad_sequence(partial_grad_BSD, tp_group.size())
    return reduce_scatter(padded_BSD, 1, tp_group)


class GatherThenLinear(torch.autograd.Function):
    """gather_sequence and linears on it, keeping this rank's slice for backward.

    The weights' gradients need the whole x. Plain autograd would keep it, T slices; the
    paper keeps one slice and gathers again in backward (arXiv:2205.05198, sec. 4.2.2).
    """

    @staticmethod
    def forward(ctx, x_BsD: Tensor, S: int, tp_group, *parameters: Tensor) -> tuple:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x_BsD, *weights)
        ctx.S, ctx.tp_group = S, tp_group
        x_BSD = all_gather(x_BsD, 1, tp_group)[:, :S]
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        x_BsD, *weights = ctx.saved_tensors
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)[:, : ctx.S]  # the extra all-gather
        grads = []  # of weight and bias in turn, as forward was given them
        for grad_BSf in grads_BSf:
            grad_Rf = grad_BSf.flatten(0, 1)  # R rows: all tokens
            grads += [grad_Rf.T @ x_BSD.flatten(0, 1), grad_Rf.sum(0)]
        partial_grad_BSD = sum(g @ W for g, W in zip(grads_BSf, weights))
        return sum_to_slices(partial_grad_BSD, ctx.tp_group), None, None, *grads


def linears_of_sequence(
    x_BsD: Tensor, S: int, linears: list, tp_group, save_gathered: bool = False
) -> list[Tensor]:
    """Column-parallel linears of a split sequence: one gather for all of them.

    Args:
        linears: layers with this rank's rows of a weight, and its part of the bias.
        save_gathered: keep the whole x for backward; more memory, one gather less.
    Shapes: x [B, s, D], weights [f, D] → [B, S, f] each.
    Communication: forward one all-gather of B·s·T·D elements; backward one
        reduce-scatter and, unless save_gathered, one all-gather of as many.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2.
    """
    if save_gathered:
        x_BSD = gather_sequence(x_BsD, S, tp_group)
        return [F.linear(x_BSD, one.weight, one.bias) for one in linears]
    parameters = [p for one in linears for p in (one.weight, one.bias)]
    return list(GatherThenLinear.apply(x_BsD, S, tp_group, *parameters))


class SPRowParallelLinear(nn.Module):
    """RowParallelLinear that leaves each rank its slice of the sequence.

    Shapes (global → on a rank, placement):
        x       [B, S, F] → [B, S, F/T]     Shard(2)
        weight  [D, F]    → [D, F/T]        Shard(1)
        bias    [D]       → [D]             Replicate(), but see mend_replicated
        return  [B, S, D] → [B, ⌈S/T⌉, D]   Shard(1)
    Communication: forward one reduce-scatter of B·S·D elements, backward one
        all-gather of them.
    """

    placement = {"weight": (("tp", 1),)}

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.weight = nn.Parameter(shard(full.weight, 1, tp_group))  # [D, f]
        self.bias = nn.Parameter(full.bias.detach().clone())  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        return scatter_sequence(partial_y_BSD, self.tp_group) + self.bias


class SPAttention(nn.Module):
    """Attention by heads, from a slice of the sequence to a slice of it.

    A head needs all positions: q, k and v share one gather. Inside, on whole sequences,
    rotary tables and causal mask are those of lesson 02, by global position. (To leave
    the sequence split inside attention, too, is another method: context parallelism.)
    """

    def __init__(self, full: Attention, tp_group, save_gathered: bool = False):
        super().__init__()
        self.tp_group, self.save_gathered = tp_group, save_gathered
        self.q_proj, self.k_proj, self.v_proj = shard_qkv(full, tp_group)
        self.core = CoreAttention(full.head_size, full.dropout.p, tp_group)
        self.o_proj = SPRowParallelLinear(full.o_proj, tp_group)

    def forward(self, x_BsD: Tensor, *tables: Tensor) -> Tensor:
        three, S = [self.q_proj, self.k_proj, self.v_proj], len(tables[0])
        q_BSd, k_BSe, v_BSe = linears_of_sequence(
            x_BsD, S, three, self.tp_group, self.save_gathered
        )
        return self.o_proj(self.core(q_BSd, k_BSe, v_BSe, *tables))


class SPMLP(nn.Module):
    """Megatron's MLP, from a slice of the sequence to a slice of it."""

    def __init__(self, full: MLP, tp_group, save_gathered: bool = False):
        super().__init__()
        self.tp_group, self.save_gathered = tp_group, save_gathered
        self.up_proj = ColumnParallelLinear(full.up_proj, tp_group, copy_input=False)
        self.down_proj = SPRowParallelLinear(full.down_proj, tp_group)

    def forward(self, x_BsD: Tensor, S: int) -> Tensor:
        (h_BSf,) = linears_of_sequence(
            x_BsD, S, [self.up_proj], self.tp_group, self.save_gathered
        )
        return self.down_proj(F.gelu(h_BSf))


def sequence_dropout(x_BsD: Tensor, p: float, S: int, tp_group) -> Tensor:
    """Dropout of a slice of positions: each rank its part of one mask [B, S, D].

    As in sharded_dropout of lesson 02, every rank draws the whole mask, of the length
    without padding, so that the result is the single process's.
    """
    keep_BSD = torch.rand(len(x_BsD), S, x_BsD.shape[2], device=x_BsD.device) >= p
    padded_BSD = pad_sequence(keep_BSD, tp_group.size())
    return x_BsD * shard(padded_BSD, 1, tp_group) / (1 - p)


class SPDecoderLayer(nn.Module):
    """A layer that keeps nothing whole for backward: [B, s, D] around LayerNorm,
    dropout and residual; this rank's heads, and columns of the MLP, in between.

    Communication: forward 2 all-gathers and 2 reduce-scatters, backward the same and 2
        all-gathers more, each of B·S·D elements, S padded.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2, fig. 5.
    """

    def __init__(self, full: DecoderLayer, tp_group, save_gathered: bool = False):
        super().__init__()
        self.p, self.tp_group = full.dropout.p, tp_group
        self.input_layernorm = copy.deepcopy(full.input_layernorm)
        self.self_attn = SPAttention(full.self_attn, tp_group, save_gathered)
        self.post_attention_layernorm = copy.deepcopy(full.post_attention_layernorm)
        self.mlp = SPMLP(full.mlp, tp_group, save_gathered)

    def forward(self, x_BsD: Tensor, *tables: Tensor) -> Tensor:
        S = len(tables[0])
        y_BsD = self.self_attn(self.input_layernorm(x_BsD), *tables)
        x_BsD = x_BsD + self.dropout(y_BsD, S)
        y_BsD = self.mlp(self.post_attention_layernorm(x_BsD), S)
        return x_BsD + self.dropout(y_BsD, S)

    def dropout(self, y_BsD: Tensor, S: int) -> Tensor:
        p = self.p if self.training else 0
        return sequence_dropout(y_BsD, p, S, self.tp_group) if p else y_BsD


class SPEmbedding(nn.Module):
    """VocabParallelEmbedding that leaves each rank its slice of the sequence.

    Shapes: tokens [B, S] → [B, ⌈S/T⌉, D] Shard(1); weight as in lesson 03.
    Communication: forward one reduce-scatter of B·S·D elements, backward one
        all-gather of them.
    """

    placement = {"weight": (("tp", 0),)}

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size, self.tp_group = full.num_embeddings, tp_group
        padded = pad_vocab(full.weight.detach(), tp_group.size())
        self.weight = nn.Parameter(shard(padded, 0, tp_group))  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        partial_x_BSD = look_up(tokens_BS, self.weight, self.vocab_size, self.tp_group)
        return scatter_sequence(partial_x_BSD, self.tp_group)


class SPHead(nn.Module):
    """VocabParallelHead on a split sequence: x [B, s, D] → logits [B, S, v] Shard(2).

    Communication: that of linears_of_sequence.
    """

    placement = {"weight": (("tp", 0),), "bias": (("tp", 0),)}

    def __init__(self, full: nn.Linear, tp_group, tied: nn.Parameter | None = None):
        super().__init__()
        self.tp_group, self.save_gathered, T = tp_group, False, tp_group.size()
        weight = shard(pad_vocab(full.weight.detach(), T), 0, tp_group)
        self.weight = nn.Parameter(weight) if tied is None else tied  # [v, D]
        bias = shard(pad_vocab(full.bias.detach(), T), 0, tp_group)
        self.bias = nn.Parameter(bias)  # [v]

    def forward(self, x_BsD: Tensor, S: int) -> Tensor:
        return linears_of_sequence(x_BsD, S, [self], self.tp_group, self.save_gathered)[
            0
        ]


def position_tables(model: nn.Module, S: int, tp_group) -> tuple[Tensor, ...]:
    """Rotary tables and causal mask of positions 0 to S − 1, the same on every rank.

    Raises: ValueError if the tables are shorter: a slice of them would pass silently.
    """
    if S > len(model.cos):
        raise ValueError(f"{S} positions: the model has tables for {len(model.cos)}")
    return model.cos[:S], model.sin[:S], model.future[:S, :S]


class SPTransformer(nn.Module):
    """Lesson 03's transformer with sequence parallelism: nothing of size S·D is whole
    between its layers.

    Args:
        full: the single-process model, identical on every rank.
        save_gathered: keep gathered inputs for backward, as plain autograd does.
    Shapes: tokens [B, S], any S ≥ 1 → logits [B, S, ⌈V/T⌉] Shard(2).
    Communication of L layers and both ends, B·S·D elements a call, S padded: forward
        2L + 1 all-gathers and 2L + 1 reduce-scatters; backward as many, and 2L + 1
        all-gathers more, of the inputs. mend_replicated has to follow backward.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2.
    """

    def __init__(self, full: Transformer, tp_group, save_gathered: bool = False):
        super().__init__()
        self.vocab_size, self.tp_group = full.config.vocab_size, tp_group
        self.embed_tokens = SPEmbedding(full.embed_tokens, tp_group)
        self.layers = nn.ModuleList(
            SPDecoderLayer(x, tp_group, save_gathered) for x in full.layers
        )
        self.norm = copy.deepcopy(full.norm)
        tied = full.lm_head.weight is full.embed_tokens.weight
        shared = self.embed_tokens.weight if tied else None
        self.lm_head = SPHead(full.lm_head, tp_group, shared)
        self.lm_head.save_gathered = save_gathered
        for name, table in full.named_buffers():
            self.register_buffer(name, table.clone(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        S = tokens_BS.shape[1]
        tables = position_tables(self, S, self.tp_group)
        x_BsD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BsD = layer(x_BsD, *tables)
        return self.lm_head(self.norm(x_BsD), S)


def mend_replicated(model: nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Sum the gradients of replicated parameters over the TP group: after backward,
    before clipping. (Megatron-LM does so in finalize_model_grads.)

    LayerNorms and the biases of row-parallel linears are whole on every rank, but met
    only its slice of the sequence: each rank has the part of the gradient that comes
    from its tokens. Without SP every rank had met all tokens, and no sum was needed.
    Communication: one all-reduce of (6L + 2)·D elements, all gradients in one tensor.
    """
    # A parameter without a placement is not cut: it is whole on every rank.
    replicated = [
        p for name, p in model.named_parameters() if not tell_placement(model, name)
    ]
    flat = torch.cat([p.grad.flatten() for p in replicated])
    parts = all_reduce(flat, tp_group).split([p.numel() for p in replicated])
    for p, whole in zip(replicated, parts):
        p.grad.copy_(whole.view_as(p))


class Recomputed(nn.Module):
    """A module that keeps its input for backward and computes the rest again there.

    Around CoreAttention: selective recompute, that drops what grows with S² and costs
    little to compute. Around a layer: full recompute (arXiv:2205.05198, sec. 5).
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return checkpoint(self.inner, *inputs, use_reentrant=False)


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


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    Shapes: x [.., I, ..] → [.., I/T, ..]. Communication: 1 call on x's elements.
    Raises: ValueError if T does not divide the dim.
    """
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    Shapes: x [...] → [...], Replicate(). Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            dist.broadcast(out, group_src=src, group=group)
    return out


def gather(x: Tensor, dst: int, group: dist.ProcessGroup) -> Tensor | None:
    """Rank dst gets all slices, joined along dim 0; the others get None.

    Shapes: x [i, ..] → [T·i, ..] on dst. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    here = group.rank() == dst
    slices = [torch.empty_like(x) for _ in range(group.size())] if here else None
    with COMM.record("gather", x, group, copies=group.size()):
        dist.gather(x, slices, group_dst=dst, group=group)
    return torch.cat(slices) if here else None


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


class AllGather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward.

    For consumers that differ: every rank uses the gathered x in its own way, so each
    has one term of the gradient, and the terms are added. Compare GatherFromTP.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: the transpose of AllGather."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


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


# ==== CARRIED OVER from 03, unchanged


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


# ==== BREAK IT


def biased_terms(self, x_BSf):
    """The bias joins every rank's term, before the sum over ranks."""
    partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)
    return scatter_sequence(partial_y_BSD, self.tp_group)


def local_positions(model, S, tp_group):
    """Every slice counts its positions from 0."""
    s = -(-S // tp_group.size())
    position_S = torch.arange(S, device=model.cos.device) % s
    return model.cos[position_S], model.sin[position_S], model.future[:S, :S]


def one_mask(x_BsD, p, S, tp_group):
    """All slices drop the same elements: each rank draws for its slice, seeds alike."""
    keep_BsD = torch.rand(x_BsD.shape, device=x_BsD.device) >= p
    return x_BsD * keep_BsD / (1 - p)


def own_slice(partial_grad_BSD, tp_group):
    """This rank's slice of its own term: the other ranks' terms are lost."""
    return shard(pad_sequence(partial_grad_BSD, tp_group.size()), 1, tp_group)


def summed_slices(ctx, grad):
    """A sum over ranks that all have the whole gradient: T times too large."""
    return reduce_scatter(grad, ctx.dim, ctx.tp_group), None, None


def mean_of_means(loss_BS, target_BS, slices=2):
    """Each slice's mean, then the mean of those: a short slice's tokens weigh more."""
    losses, targets = loss_BS.chunk(slices, 1), target_BS.chunk(slices, 1)
    means = [x.sum() / (y != IGNORE).sum().clamp(1) for x, y in zip(losses, targets)]
    return sum(means) / len(means)


def without_keywords(keyword=None):
    """PrepareModuleInput told of positional arguments, where there are none."""
    return PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())


def reduced_dtensor(loss):
    """dist.all_reduce of a DTensor."""
    total = loss.detach()
    dist.all_reduce(total)
    return total


def whole_to_norm(local=True):
    """The norm is handed the whole x by every rank, and takes it for a slice."""
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


BREAKS = {
    "norms": Break(
        "mend_replicated",
        lambda model, tp_group: None,
        "gradients of LayerNorms and row-parallel biases are not all-reduced",
        "step 1's loss is right; these gradients are not, and differ from rank to "
        "rank; so do the replicas from step 2 on, and losses drift, slowly",
        "these parameters are whole on every rank, but met only its tokens: each rank "
        "has the part of the gradient that comes from its slice",
        "github.com/NVIDIA/Megatron-LM/issues/443, 474, 1446; "
        "NVIDIA/TransformerEngine issue 435, NVIDIA/apex issue 1686",
    ),
    "row-bias": Break(
        "SPRowParallelLinear.forward",
        biased_terms,
        "the row-parallel bias is added before the reduce-scatter",
        "the first loss is off; where biases start at zero, as in many a model, it is "
        "right, but not their gradients: T times too large at once",
        "the sum over ranks adds it T times; after the sum each position gets it once, "
        "on the rank that has the position",
        "lesson 01's --break bias, with a reduce-scatter in the all-reduce's place; "
        "github.com/huggingface/text-generation-inference/issues/1036",
    ),
    "length": Break(
        "pad_sequence",
        lambda x_BSD, ranks, value=0: x_BSD,
        "a length that T does not divide is not padded",
        "lengths that T divides work; then one comes that it does not, and an error "
        "about sizes ends the run",
        "slices of the sequence have to be of one size: collectives and sums need it",
        "github.com/pytorch/torchtitan/issues/1306",
    ),
    "rotary": Break(
        "position_tables",
        local_positions,
        "rotary positions are counted from the start of each slice",
        "no error, and a loss that looks right; on a trained model it would not",
        "rank t's first token is number t·s of the sequence, not number 0",
        "a trap in models that count positions by the length of the x they see; "
        "github.com/NVIDIA/Megatron-LM/issues/560 asks it of context parallelism",
    ),
    "mask": Break(
        "sequence_dropout",
        one_mask,
        "all slices of the sequence drop the same elements",
        "training goes on; the loss differs from one process's, and tokens that are s "
        "positions apart share their masks",
        "with one seed on all ranks, each must take its own part of what is drawn, or "
        "have a generator of its own",
        "github.com/NVIDIA/Megatron-LM/issues/206",
    ),
    "split": Break(
        "sum_to_slices",
        own_slice,
        "backward of the gather takes a slice, where it should sum and take a slice",
        "step 1's loss is right, and so are the head's gradients; all before it lack "
        "the other ranks' terms",
        "each rank used the gathered x in its own way, with its columns of W: every "
        "rank has a term of dL/dx for every position",
        "github.com/NVIDIA/Megatron-LM/issues/1635, pytorch/pytorch issue 153016",
    ),
    "sum": Break(
        "GatherFromTP.backward",
        summed_slices,
        "backward of the other gather sums, where it should take a slice",
        "every gradient before that gather is T times too large, and AdamW hides it; "
        "this model has no such gather, so one check of section 4 sees it",
        "all ranks went on alike with the gathered x: each has the whole dL/dx, and a "
        "sum counts it T times",
        "github.com/NVIDIA/Megatron-LM/issues/323, pytorch/pytorch issue 153016",
    ),
    "slice-mean": Break(
        "mean_over_targets",
        mean_of_means,
        "the loss is averaged in each slice of the sequence, then over the slices",
        "right as long as all slices have as many targets; with padding tokens it is "
        "not; here in TP's column too, whose loss is the same function",
        "lines of text end before the row does: the last slice has fewer targets, and "
        "its mean weighs as much as the others'",
        "github.com/pytorch/torchtitan/issues/2972, the same with micro-batches",
    ),
    "keywords": Break(
        "gather_keyword",
        without_keywords,
        "PyTorch's plan: keyword arguments, and no input_kwarg_layouts",
        "an error at the first forward: inputs and input_layouts differ in length",
        "the module is called with keywords alone, as Hugging Face's attention is: it "
        "has no positional input for input_layouts to name",
        "github.com/pytorch/pytorch/pull/124114, which added input_kwarg_layouts",
    ),
    "dtensor-loss": Break(
        "whole_loss",
        reduced_dtensor,
        "PyTorch's plan: dist.all_reduce of a loss that is a DTensor",
        "an error: no sharding strategy for the all-reduce (older versions: found no "
        "DeviceMesh)",
        "a DTensor knows what there is to sum: .full_tensor() does it; after "
        ".to_local() a sum would count a loss that is whole already T times",
        "github.com/pytorch/pytorch/issues/152712, pytorch/torchtitan pull 779",
    ),
    "tiled": Break(
        "embedding_to_slices",
        whole_to_norm,
        "PyTorch's plan: SequenceParallel is given a whole tensor",
        "x comes out of the first norm T·S long, tiled; an error where it meets a "
        "tensor of another length, and silently wrong gradients where it does not",
        "SequenceParallel takes a plain tensor for this rank's slice; it shards none",
        "github.com/pytorch/pytorch/issues/129355, pytorch/examples issue 1271",
    ),
}


# ==== RUN


class SPTraining(VocabTraining):
    """Training in which backward is followed by the sum of the replicas' gradients."""

    def __init__(self, model, tp_group, args, loss_group):
        super().__init__(model, tp_group, args, loss_group)
        self.parts = {}  # gradients of the replicated parameters before that sum

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if not self.parts:
            self.parts = {n: p.grad.clone() for n, p in self.named()}
        COMM.what = "replicated"
        mend_replicated(self.model, self.tp_group)


def show_with_sequence(report: Report, runs: list[Training], batches) -> None:
    """Losses and gradient norms: one process, TP, TP with SP."""
    args, rows = report.args, []
    loss_limit, limit = ALLOWED[args.dtype]
    for step, (_, target) in enumerate(batches):
        losses, norms = ([x[step] for x in (r.losses, r.norms)] for r in runs), []
        losses, norms = zip(*losses)
        diff = max(abs(x - xs[0]) / xs[0] for xs in (losses, norms) for x in xs)
        marks = [
            report.check(f"loss at step {step + 1}, {name}", abs(a - b) / b, bound)
            for name, a, b, bound in (
                ("TP", losses[1], losses[0], loss_limit),
                ("TP + SP", losses[2], losses[0], loss_limit),
                ("gradient norm", norms[2], norms[0], limit),
            )
        ]
        row = {"step": step + 1, "without": losses[0], "with": losses[2]}
        padding = (target == IGNORE).sum().item()
        row |= {"tp": losses[1], "tokens": target.numel(), "padding": padding}
        report.data["losses"].append(row)
        cells = [f"{x:.8f}" for x in losses] + [f"{norms[0]:.5f}", f"{norms[2]:.5f}"]
        mark = "ok" if marks == ["ok"] * 3 else "✗"
        rows.append([step + 1, padding, *cells, f"{diff:.1e}", mark])
    size = f"{args.batch_size} × {args.seq_len}"
    report.say(f"\n1  Losses and gradient norms, {size} tokens a step")
    head = "step|no target|alone|TP|TP + SP|‖g‖ alone|‖g‖ SP|diff.|ok"
    report.table(head, rows, "rrrrrrrrr")
    report.say(
        "   alone: one process; TP: lesson 03's model; ‖g‖: norm of the gradient; "
        "diff.: largest,\n   relative; no target: tokens after which there is padding"
    )


def show_replicated(report: Report, without: Training, sp: Training) -> None:
    """Gradients of replicated parameters, before and after the all-reduce."""
    T, s = report.ranks, -(-report.args.seq_len // report.ranks)
    last = f"layers.{report.args.layers - 1}."
    names = [f"{last}input_layernorm.weight", f"{last}self_attn.o_proj.bias"]
    report.say(
        "\n3  Whole on every rank, but each met only its own tokens: LayerNorms, and "
        "the biases\n   of row-parallel linears. First numbers of two gradients of "
        "layer "
        f"{report.args.layers - 1}"
    )
    corner = lambda x: " ".join(f"{v:8.5f}" for v in x[:3].tolist())
    parts = gather_objects([corner(sp.parts[name]) for name in names])
    rows = []
    for rank, cells in enumerate(parts):
        start, end = rank * s, min(report.args.seq_len, (rank + 1) * s) - 1
        where = f"{start} to {end}" if end >= start else "padding"
        rows.append([f"rank {rank}", where, *cells])
    off = [rel_diff(sp.first[n], without.first[n]) for n in names]
    bad = [x > allowed(without, n) for x, n in zip(off, names)]  # checked in section 2
    bad = [any(marks) for marks in zip(*gather_objects(bad))]
    mended = [corner(sp.first[n]) + (" ✗" if b else " ok") for n, b in zip(names, bad)]
    rows.append(["mended", "all", *mended])
    rows.append(["one process", "all", *(corner(without.first[n]) for n in names)])
    report.table("|positions|input_layernorm.weight|o_proj.bias", rows, "llll")
    alike = sum(parts.count(part) > 1 for part in parts) if T > 1 else 0
    report.check("each rank has a part of its own", float(alike == T > 1))
    keep = {name: [part[i] for part in parts] for i, name in enumerate(names)}
    report.data["replicated"] = keep
    report.say(
        "   mended: mend_replicated adds up all ranks' parts, in one all-reduce after "
        "backward.\n   Without it (--break norms) each rank updates its copy in its "
        "own "
        "way."
    )


def show_pairs(report: Report, tp_group) -> None:
    """Which backward belongs to which forward: each pair on numbers, by its rule."""
    T, rank = tp_group.size(), tp_group.rank()
    generator, S, D = torch.Generator().manual_seed(report.args.seed), 2 * T, 3
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    terms, uses = (draw(T, 2, S, D).to(report.args.device) for _ in range(2))
    x, use, eye = terms[0], uses[rank], torch.eye(D).to(terms)
    cut = lambda whole: shard(whole, 1, tp_group)
    # Into a pair goes `given`, out of it comes y, and the loss is Σ y·upstream. Where
    # each rank has a use of its own for y, the loss is the sum over ranks.
    own, alike = "whole, own uses", "whole, one use"
    pairs = [
        ("f", "identity", "all-reduce", f"whole → {own}",
         lambda y: CopyToTP.apply(y, tp_group), x, use, uses.sum(0)),
        ("g", "all-reduce", "identity", f"terms → {alike}",
         lambda y: ReduceFromTP.apply(y, tp_group), terms[rank], uses[0], uses[0]),
        ("ScatterToSequence", "split", "all-gather", "whole → slices",
         lambda y: ScatterToSequence.apply(y, 1, tp_group), x, cut(uses[0]), uses[0]),
        ("GatherFromTP", "all-gather", "split", f"slices → {alike}",
         lambda y: GatherFromTP.apply(y, 1, tp_group), cut(x), uses[0], cut(uses[0])),
        ("gather_sequence", "all-gather", "reduce-scatter", f"slices → {own}",
         lambda y: gather_sequence(y, S, tp_group), cut(x), use, cut(uses.sum(0))),
        ("GatherThenLinear", "all-gather", "reduce-scatter", "the same, twice gathered",
         lambda y: GatherThenLinear.apply(y, S, tp_group, eye, eye[0] * 0)[0], cut(x),
         use, cut(uses.sum(0))),
        ("scatter_sequence", "reduce-scatter", "all-gather", "terms → slices",
         lambda y: scatter_sequence(y, tp_group), terms[rank], cut(uses[0]), uses[0]),
    ]  # fmt: skip
    rows, marks = [], []
    for name, forward, backward, kind, pair, given, upstream, wanted in pairs:
        given = given.clone().requires_grad_()
        COMM.what = "pairs"
        pair(given).backward(upstream)
        diff = rel_diff(given.grad, wanted)
        marks.append(report.check(f"pair {name}: dL/dx", diff, ALLOWED["float64"][1]))
        rows.append([name, forward, backward, kind])
    marks = [max(found) for found in zip(*gather_objects(marks))]  # ✗ above ok
    rows = [[*row, mark] for row, mark in zip(rows, marks)]
    report.say("\n4  Which backward goes with which forward; each tried on numbers")
    report.table("|forward|backward|x → y|ok", rows, "llllr")
    report.say(
        "   terms: to be summed over ranks, {U_tp}. own uses: each rank goes on with y "
        "in its own\n   way, so its dL/dy is a term: sum them. one use: all go on "
        "alike, "
        "so each has all of\n   dL/dy, and a sum would be T times it."
    )


def show_sp_bytes(report: Report, args, ranks: int) -> None:
    """What a step sends: lesson 03's all-reduces against gathers and scatters."""
    e, L, D = getattr(torch, args.dtype).itemsize, args.layers, args.hidden
    S = -(-args.seq_len // ranks) * ranks
    one = args.batch_size * args.seq_len * D * e
    padded = args.batch_size * S * D * e
    n = 2 * L + 1
    again = 0 if args.save_gathered else n
    table, ring = [], {"TP": 0.0, "TP + SP": 0.0, "again": 0.0}
    for who, what, collective, phase, calls, size, formula in (
        ("TP", "layers", "all-reduce", "forward", n, one, "(2L + 1)·B·S·D"),
        ("TP", "layers", "all-reduce", "backward", n, one, "(2L + 1)·B·S·D"),
        ("TP + SP", "layers", "all-gather", "forward", n, padded, "(2L + 1)·B·S·D"),
        ("TP + SP", "layers", "reduce-scatter", "forward", n, padded, "the same"),
        ("TP + SP", "layers", "reduce-scatter", "backward", n, padded, "the same"),
        ("TP + SP", "layers", "all-gather", "backward", n + again, padded,
         "(2L + 1)·B·S·D" if args.save_gathered else "2·(2L + 1)·B·S·D"),
        ("TP + SP", "replicated", "all-reduce", "backward", 1, (6 * L + 2) * D * e,
         "(6L + 2)·D"),
    ):  # fmt: skip
        predicted = calls * size if ranks > 1 else 0
        cells = report.moved(what, collective, "tp", predicted * args.steps, phase)
        count, moved = cells[0] // args.steps, cells[1] // args.steps
        wire = moved * ring_factor(collective, ranks)
        if what == "layers":
            ring[who] += wire
        row = [who[-2:], collective, phase, count, moved, formula, predicted]
        table.append([*row, f"{wire:.0f}", cells[2]])
    report.say(
        f"\n5  Communication in a step; formulas in elements of {e} bytes; ring: what "
        "a rank sends"
    )
    head = "|collective|phase|calls|bytes|formula|predicted|ring|ok"
    report.table(head, table, "lllrrlrrr")
    extra = again * padded * ring_factor("all-gather", ranks) if ranks > 1 else 0
    compare_rings(report, ring, extra, args.seq_len, S)


def compare_rings(report: Report, ring: dict, extra: float, S: int, padded: int):
    """What a rank of a ring sends with TP, and with SP but for the second gather."""
    off = abs((ring["TP + SP"] - extra) * S - ring["TP"] * padded)
    mark = report.check("a ring sends as much with SP as with TP alone", off)
    report.data["ring_bytes"] = ring | {"again": extra}
    longer = f" (length {padded} for {S})" if padded > S else ""
    report.say(
        "   2L + 1: two a layer, and embedding or head. In a ring an all-reduce is a "
        "scatter and\n   a gather and sends 2(T − 1)/T of its bytes, each of those "
        f"(T − 1)/T. TP sends\n   {ring['TP']:.0f}, SP as much, "
        f"{ring['TP + SP'] - extra:.0f}{longer}: {mark}; and {extra:.0f} to gather "
        "inputs again\n   in backward (the paper overlaps that with computing), and "
        "the replicas' (6L + 2)·D."
    )


def paper_units(e: int, T: int, heads_by_length: float) -> dict[str, tuple]:
    """Way → bytes kept by a layer in units of S·B·D, the formula, share of LayerNorms.

    Args:
        e: bytes of a number; the paper has 2. Masks have 1 byte an element.
        heads_by_length: a·s/h of the paper, N·S/D here.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2, and its text for 2/t;
        "gathered kept" is counted here.
    """
    square = (2 * e + 1) * heads_by_length
    a, b, c = 16 * e + 2, 4 * e + 2, 12 * e  # all; what TP leaves whole; what it cuts
    gathered = 2 * e * (1 - 1 / T)
    q = f"{2 * e + 1}as/h"
    return {
        "no parallelism": (a + square, f"{a} + {q}", 1),
        "TP": (b + (c + square) / T, f"{b} + ({c} + {q})/t", 1),
        "TP + SP": ((a + square) / T, f"({a} + {q})/t", 1 / T),
        "TP + SP, gathered kept": (
            (a + square) / T + gathered, f"… + {2 * e}(1 − 1/t)", 1 / T),
        "TP, selective recompute": (b + c / T, f"{b} + {c}/t", 1),
        "TP + SP, selective": (a / T, f"{a}/t", 1 / T),
        "TP, full recompute": (e, f"{e}", 0),
        "TP + SP, full recompute": (e / T, f"{e}/t", 0),
    }  # fmt: skip


def build_layers(full: DecoderLayer, tp_group) -> dict[str, nn.Module]:
    """The same layer in each of the ways."""
    tp = lambda: TPDecoderLayer(full, tp_group)
    sp = lambda save=False: SPDecoderLayer(full, tp_group, save)
    ways = {
        "no parallelism": full,
        "TP": tp(), "TP + SP": sp(), "TP + SP, gathered kept": sp(True),
        "TP, selective recompute": tp(), "TP + SP, selective": sp(),
        "TP, full recompute": Recomputed(tp()),
        "TP + SP, full recompute": Recomputed(sp()),
    }  # fmt: skip
    for name, layer in ways.items():
        if "selective" in name:
            layer.self_attn.core = Recomputed(layer.self_attn.core)
    return ways


def measure_layers(report: Report, tp_group, dtype: torch.dtype) -> list[list]:
    """Bytes that a layer keeps for backward, measured and as the paper says.

    As in the paper, with dropout and as many key/value heads as heads. In float32 and
    wider output and gradient, too, are compared with the layer in one process.
    """
    args, T = report.args, tp_group.size()
    S = -(-args.seq_len // T) * T  # the paper's lengths divide
    torch.manual_seed(args.seed)
    config = Config(0, args.hidden, args.heads, args.heads, 1, S, 0.1)
    full = DecoderLayer(config).to(args.device, dtype)
    tables = [*rotary_table(S, args.hidden // args.heads)]
    tables = [x.to(args.device, dtype) for x in tables]
    tables.append(torch.ones(S, S, dtype=torch.bool, device=args.device).triu(1))
    shape = args.batch_size, S, args.hidden
    x_BSD, upstream_BSD = (torch.randn(shape).to(args.device, dtype) for _ in range(2))
    e, sbh = dtype.itemsize, math.prod(shape)
    statistic = 4 if args.device == "cuda" else e  # a GPU has mean and rstd in float32
    units, rows, wanted = paper_units(e, T, args.heads * S / args.hidden), [], None
    for name, layer in build_layers(full, tp_group).items():
        cut = (lambda x: shard(x, 1, tp_group)) if "SP" in name else torch.clone
        x = cut(x_BSD).requires_grad_()
        saved = SavedBytes(skip=[*layer.parameters(), *tables])
        torch.manual_seed(args.seed)  # one mask for all
        COMM.what = "layer by layer"
        with saved:
            y = layer(x, *tables)
        y.backward(cut(upstream_BSD))
        found = [y.detach(), x.grad]
        wanted = wanted or [found[0].clone(), found[1].clone()]
        mark = "ok"
        if dtype != torch.bfloat16:
            diff = max(rel_diff(a, cut(b)) for a, b in zip(found, wanted))
            kind = str(dtype).removeprefix("torch.")
            check = f"a layer, {name}: y and dL/dx"
            mark = report.check(check, diff, ALLOWED[kind][1])
        unit, formula, share = units[name]
        stats = round(4 * statistic * args.batch_size * S * share)
        paper = round(unit * sbh)
        rows.append([name, saved.total(), unit, formula, stats, paper, mark])
    return rows


def show_layer_memory(report: Report, tp_group) -> None:
    """A layer's memory against the paper's table, in bfloat16 and in float32."""
    args, T = report.args, tp_group.size()
    S = -(-args.seq_len // T) * T
    sbh, table, scaled = args.batch_size * S * args.hidden, [], []
    wide = torch.promote_types(getattr(torch, args.dtype), torch.float32)
    for dtype in (torch.bfloat16, wide):
        kind = str(dtype).removeprefix("torch.")
        for row in measure_layers(report, tp_group, dtype):
            name, measured, unit, formula, stats, paper, mark = row
            what = f"a layer, {name}, {kind}"
            off = abs(measured - paper - stats)
            mark = max(mark, report.check(f"bytes kept, {what}", off))  # ✗ above ok
            line = dict(what=what, bytes=measured, predicted_bytes=paper + stats)
            line |= dict(units_of_sbh=measured / sbh, paper_units=unit, residue=stats)
            report.data["memory"].append(line | dict(formula=formula))
            coefficient = f"{(measured - stats) / sbh:.2f}"
            cells = [name, measured, stats, coefficient, formula, f"{unit:.2f}", mark]
            (table if kind == "bfloat16" else scaled).append(cells)
    report.say(
        "\n6  What a layer keeps for backward, bytes; bfloat16, dropout; in the "
        f"paper's letters\n   s = {S} positions, b = {args.batch_size} rows, h = "
        f"{args.hidden} hidden, a = {args.heads} heads, t = {T} ranks; sbh = {sbh}"
    )
    head = "|bytes|stats|rest ÷ sbh|formula|gives|ok"
    report.table(head, table, "lrrrlrr")
    marks, kind = {row[-1] for row in scaled}, str(wide).removeprefix("torch.")
    bytes32 = [str(row[1]) for row in scaled[:3]]
    report.say(
        "   5as/h: the heads' scores; 24: between linears; TP cuts both. 10: around "
        "LayerNorm and\n   residual, whole under TP, cut by SP. Gathered inputs kept "
        "are "
        "what the paper avoids;\n   stats, mean and rstd of the LayerNorms, it leaves "
        f"out. In {kind}, masks still of\n   1 byte, the first three are "
        f"{' → '.join(bytes32)}; all {len(scaled)} rows "
        f"{'ok' if marks == {'ok'} else '✗'}"
    )


def show_lengths(report: Report, tp_group) -> None:
    """Lengths that T does not divide: one step, dropout on, in float64."""
    args, T, rows = report.args, tp_group.size(), []
    longest = 2 * args.seq_len + 3
    lengths = sorted({1, 5, max(1, args.seq_len - 1), longest})
    sizes = vars(args) | {"dtype": "float64"}
    full = make_tied(argparse.Namespace(**sizes | {"seq_len": longest}))
    loss_limit, limit = ALLOWED["float64"]
    COMM.what = "lengths"
    for S in lengths:
        some = argparse.Namespace(**sizes | {"seq_len": S})
        ((tokens, target),) = make_batches(some, 1)
        without = Training(copy.deepcopy(full), None, some)
        sp = SPTransformer(full, tp_group, args.save_gathered)
        sp = SPTraining(sp, tp_group, some, tp_group)
        for run in (without, sp):
            run.step([(tokens, target)], 0)
        marks = [report.check(
            f"length {S}: loss",
            abs(sp.losses[0] - without.losses[0]) / without.losses[0], loss_limit,
        )]  # fmt: skip
        worst = 0.0
        for name, g in without.first.items():
            diff = rel_diff(sp.first[name], g)
            marks.append(report.check(f"length {S}: dL/d {name}", diff, limit))
            worst = max(worst, diff)
        s = -(-S // T)
        found = gather_objects([worst, *marks])
        worst = max(row[0] for row in found)
        mark = max(max(row[1:]) for row in found)  # ✗ above ok
        cells = [f"{run.losses[0]:.10f}" for run in (without, sp)]
        rows.append([S, s * T, s, *cells, f"{worst:.1e}", mark])
    report.say(
        "\n7  Other lengths, float64: zeros up to a multiple of T before each "
        "reduce-scatter,\n   cut off after each gather"
    )
    head = "length|padded|a rank's|loss alone|TP + SP|worst gradient|ok"
    report.table(head, rows, "rrrrrrr")


class KeywordDecoderLayer(DecoderLayer):
    """DecoderLayer that calls its attention with keywords, as Hugging Face's do."""

    def forward(self, x_BSD: Tensor, cos_SH, sin_SH, future_SS) -> Tensor:
        tables = dict(cos_SH=cos_SH, sin_SH=sin_SH, future_SS=future_SS)
        y_BSD = self.self_attn(x_BSD=self.input_layernorm(x_BSD), **tables)
        x_BSD = x_BSD + self.dropout(y_BSD)
        return x_BSD + self.dropout(self.mlp(self.post_attention_layernorm(x_BSD)))


def gather_keyword(keyword: str) -> PrepareModuleInput:
    """All-gather the argument of that name before a module: Shard(1) → Replicate()."""
    return PrepareModuleInput(
        input_kwarg_layouts={keyword: Shard(1)},
        desired_input_kwarg_layouts={keyword: Replicate()},
    )


def embedding_to_slices(local: bool = True) -> RowwiseParallel:
    """An embedding by rows, its output reduce-scattered along the sequence."""
    return RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
    )


def sequence_plan(layers: int, keyword: str, local: bool = True) -> dict:
    """PyTorch's way to say all this, for this model and for Hugging Face's alike.

    Args:
        keyword: the name under which a layer hands x to its attention.
        local: x is a plain tensor [B, s, D] between modules; else a DTensor, whose
            shape reads [B, S, D], for models that count positions by it.
    """
    row = dict(output_layouts=Shard(1), use_local_output=local)  # reduce-scatter
    gather = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    plan = {"embed_tokens": embedding_to_slices(local), "norm": SequenceParallel()}
    for i in range(layers):
        layer = {
            "input_layernorm": SequenceParallel(),
            "self_attn": gather_keyword(keyword),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(**row),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": gather,
            "mlp.gate_proj": ColwiseParallel(),  # Qwen2's MLP has one
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(**row),
        }
        plan |= {f"layers.{i}.{name}": style for name, style in layer.items()}
    return plan


def split_head() -> ColwiseParallel:
    """Logits stay split along the vocabulary, as a DTensor: loss_parallel wants one."""
    return ColwiseParallel(input_layouts=Shard(1), use_local_output=False)


def pad_batch(tokens_BS: Tensor, target_BS: Tensor, ranks: int) -> tuple:
    """For models that do not pad: PAD behind the tokens, IGNORE behind the targets."""
    return pad_sequence(tokens_BS, ranks, PAD), pad_sequence(target_BS, ranks, IGNORE)


def whole_loss(loss: Tensor) -> Tensor:
    """A plain tensor, from a DTensor too."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def compare_planned(report: Report, label: str, models, logits_of, batch) -> list:
    """Loss and every gradient of a model under PyTorch's plan, against itself whole.

    Returns: loss whole, loss planned, worst gradient, "ok" or "✗".
    """
    (reference, dtype), planned = models
    loss_limit, limit = ALLOWED[dtype]
    tokens, target = batch
    wanted = mean_loss(logits_of(reference, tokens), target)
    wanted.backward()
    COMM.what, COMM.phase = label, "forward"
    tokens, target = pad_batch(tokens, target, report.ranks)
    with CountDTensor("tp"), loss_parallel():
        logits = logits_of(planned, tokens)
        COMM.phase = "loss and backward"
        loss = mean_loss(logits, target)
        loss.backward()
    COMM.what = COMM.phase = ""
    loss = whole_loss(loss)
    marks = [report.check(f"{label}: loss", rel_diff(loss, wanted), loss_limit)]
    worst, whole = 0.0, dict(reference.named_parameters())
    for name, p in planned.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        diff = rel_diff(grad, whole[name].grad)
        marks.append(report.check(f"{label}: dL/d {name}", diff, limit))
        worst = max(worst, diff)
    mark = "ok" if set(marks) == {"ok"} else "✗"
    return [wanted.item(), loss.item(), worst, mark]


def show_sequence_plan(report: Report, full: Transformer, batch, tp_group) -> None:
    """The same by PyTorch's own API; no dropout."""
    args = report.args
    mesh = DeviceMesh.from_group(tp_group, args.device, mesh_dim_names=("tp",))
    one = wide_copy(full)
    # DTensor needs lengths that T divides; the tables have to reach as far.
    longer = argparse.Namespace(**vars(args) | {"seq_len": args.seq_len + report.ranks})
    planned, _ = wide_copy(make_tied(longer))
    for layer in planned.layers:
        layer.__class__ = KeywordDecoderLayer
    plan = sequence_plan(args.layers, "x_BSD") | {"lm_head": split_head()}
    plan = {n: x for n, x in plan.items() if "gate_proj" not in n}
    planned = parallelize_module(planned, mesh, plan)
    if args.tie:  # the plan has cut one weight twice
        planned.lm_head.weight = planned.embed_tokens.weight
    alone, loss, worst, mark = compare_planned(
        report, "DTensor", (one, planned), lambda model, x: model(x), batch
    )
    report.data["losses"][0]["dtensor"] = loss
    calls = [
        f"{COMM.total(what='DTensor', phase=phase, collective=name)[0]} {name}s"
        for phase in ("forward", "loss and backward")
        for name in ("all-gather", "reduce-scatter", "all-reduce")
    ]
    n = 2 * args.layers + 1 if report.ranks > 1 else 0
    wanted = [n, n, 0, n, n, 3]  # the loss has three, also over one rank
    off = sum(abs(int(x.split()[0]) - y) for x, y in zip(calls, wanted))
    counts = report.check("DTensor: collectives", off)
    kinds = {
        str(p.grad.placements) for n, p in planned.named_parameters() if "norm" in n
    }
    placements = f"{', '.join(sorted(kinds))}: .full_tensor() is the sum over ranks"
    report.say(
        "\n8  The same by PyTorch: SequenceParallel, PrepareModuleInput, "
        "RowwiseParallel(Shard(1))\n"
        f"   Without dropout, {one[1]}: loss {loss:.8f}, alone {alone:.8f};\n"
        f"   gradients differ by {worst:.1e}: {mark}\n"
        f"   Forward: {', '.join(calls[:3])}\n"
        f"   Loss and backward: {', '.join(calls[3:])} (the loss's): {counts}\n"
        "   It keeps the gathered inputs, so it gathers none again. Gradients of norms "
        "are\n   " + placements
    )


def import_transformers():
    """Hugging Face's transformers; ValueError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            "--hf needs Hugging Face's transformers, an extra of this course: "
            "pip install transformers==5.20.2"
        ) from None


def make_qwen2(args) -> nn.Module:
    """Hugging Face's Qwen2 with random weights, of this lesson's sizes, in float32:
    whatever the dtype, it computes norms and softmax in float32."""
    transformers = import_transformers()
    config = transformers.Qwen2Config(
        vocab_size=args.vocab_size, hidden_size=args.hidden,
        intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.seq_len, tie_word_embeddings=args.tie,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    return transformers.Qwen2ForCausalLM(config).to(args.device).eval()


def show_hugging_face(report: Report, batch, tp_group) -> None:
    """`--hf`: the same plan on a model that was not written for this course.

    Between its modules x stays a DTensor: Qwen2 counts positions and cuts its causal
    mask by the shape of x, which must read S and not s.
    """
    args = report.args
    mesh = DeviceMesh.from_group(tp_group, args.device, mesh_dim_names=("tp",))
    plan = sequence_plan(args.layers, "hidden_states", local=False)
    plan = {f"model.{name}": style for name, style in plan.items()}
    plan["lm_head"] = split_head()
    planned = parallelize_module(make_qwen2(args), mesh, plan)
    if args.tie:
        planned.lm_head.weight = planned.model.embed_tokens.weight
    reference = make_qwen2(args)
    alone, loss, worst, mark = compare_planned(
        report, "Qwen2", ((reference, "float32"), planned),
        lambda model, x: model(x).logits, batch,
    )  # fmt: skip
    count = sum(p.numel() for p in reference.parameters())
    report.say(
        f"\n9  The same plan on Hugging Face's Qwen2, {count} random weights, float32\n"
        f"   Loss {loss:.8f}, alone {alone:.8f}; gradients differ by {worst:.1e}: "
        + mark
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
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--verbose", action="store_true", help="a row for each layer's parameters")
    add("--save-gathered", action="store_true", help="keep gathered inputs")
    add("--hf", action="store_true", help="also Hugging Face's Qwen2 by PyTorch's plan")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    args.profile = None
    check_sizes(args, ranks)
    if args.hf:
        import_transformers()
    return args


def main(args: argparse.Namespace, backend: str) -> str:
    ranks = dist.get_world_size()
    tp_group = mesh_groups({"tp": ranks}, args.timeout)["tp"]
    report = Report("04_sequence_parallel", args, {"tp": ranks}, backend)
    full, batches = make_tied(args), make_batches(args, args.steps)
    without = Training(copy.deepcopy(full), None, args)
    tp = VocabParallelTransformer(full, tp_group)
    tp = VocabTraining(tp, tp_group, args, tp_group)
    sp = SPTransformer(full, tp_group, args.save_gathered)
    sp = SPTraining(sp, tp_group, args, tp_group)
    for step in range(args.steps):
        for run in (without, tp, sp):
            run.step(batches, step)
    if args.dtype == "bfloat16":
        measure_rounding(without, full, batches)
    show_with_sequence(report, [without, tp, sp], batches)
    show_parameters(report, without, sp)
    show_after(report, without, sp)
    show_replicated(report, without, sp)
    show_pairs(report, tp_group)
    show_sp_bytes(report, args, ranks)
    show_layer_memory(report, tp_group)
    show_lengths(report, tp_group)
    show_sequence_plan(report, full, batches[0], tp_group)
    if args.hf:
        show_hugging_face(report, batches[0], tp_group)
    report.say()
    claim = "with sequence parallelism == without TP"
    return report.verdict(claim, BREAKS.get(args.break_name))


if __name__ == "__main__":
    launch(__file__, parse_args, main, BREAKS, globals())
