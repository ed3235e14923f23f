"""Lesson 01: one MLP, split over ranks.

Split the first matrix by columns and the second by rows: each rank computes its part of
the hidden layer, nonlinearity included, and a single all-reduce adds up the outputs.
That is tensor parallelism (TP); the rest of this lesson is its backward.

Run it (2 ranks on a laptop; 4 and 8 work too):

    torchrun --standalone --nproc_per_node=2 01_naive_mlp_tp.py

What you will see: the same MLP in one process, split the naive way, Megatron's way and
by PyTorch's DTensor, trained side by side: losses, every gradient, every byte sent.
Then why backward is as it is, on two numbers. Then four ways to spread an MLP (data
parallel, FSDP, TP, a 2D mesh), with what each holds and sends. `--bench` shows when TP
is faster than one process, `--break list` names the bugs you can switch on.

New here: collectives with a backward, the parallel layers, four ways to spread an MLP.
Carried over from 00: the collectives and their counter, and how a lesson runs.

Shapes: B batch, S sequence, D hidden, F MLP width, T ranks in the TP group. UPPERCASE
    is the full size, lowercase this rank's slice: h_BSf is [B, S, F/T]. `partial_` in
    front: full shape, still to be summed over the group, written {U_tp}. W[F_tp, D] is
    W with dim F split over the mesh axis tp; DTensor calls that Shard(0). Axes: tp; dp
    for data parallel; y and x for the 2D mesh. (F is torch.nn.functional too.)

Needs: torch (and numpy, else torch warns that it is missing).
Sources: Megatron-LM, arXiv:1909.08053, sec. 3 (columns, rows, f and g); ZeRO,
    arXiv:1910.02054 (FSDP); GSPMD, arXiv:2105.04663 (the 2D mesh); the scaling book,
    jax-ml.github.io/scaling-book; docs.pytorch.org, torch.distributed.tensor.parallel.
"""

import argparse
import copy
import gc
import json
import os
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter, namedtuple
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
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

# ==== NEW in 01: one MLP, split


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


# Collectives with a backward. Which backward is right depends on what the ranks do with
# the result: the same thing (then it has one gradient), or each its own.


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


class NaiveTPMLP(nn.Module):
    """Both layers by columns, each output gathered whole.

    Communication: forward two all-gathers, of B·S·F and B·S·D elements; backward two
    all-reduces, of B·S·D and B·S·F (f, once a layer). GELU runs on all of F everywhere.
    """

    def __init__(self, full: MLP, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
        self.down_proj = ColumnParallelLinear(full.down_proj, tp_group)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = GatherFromTP.apply(self.up_proj(x_BSD), 2, self.tp_group)
        return GatherFromTP.apply(self.down_proj(F.gelu(h_BSF)), 2, self.tp_group)


class GatheredMatmul(torch.autograd.Function):
    """X Wᵀ from slices of both: gathered for use, not kept, gathered again in backward.

    Args:
        x, weight: this rank's slices; what backward keeps is these.
        x_group: gather x over it along its last dim; None if x is whole.
        weight_dim, weight_group: gather the weight along that dim over that group.
    Communication: forward the gathers; backward the same again, and a reduce-scatter of
        each gradient that adds up the ranks' terms and leaves each its slice.
    """

    @staticmethod
    def forward(ctx, x, weight, x_group, weight_dim, weight_group):
        ctx.save_for_backward(x, weight)
        ctx.where = x_group, weight_dim, weight_group
        x = x if x_group is None else all_gather(x, -1, x_group)
        return F.linear(x, all_gather(weight, weight_dim, weight_group))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x_group, weight_dim, weight_group = ctx.where
        x = x if x_group is None else all_gather(x, -1, x_group)
        grad_x = grad @ all_gather(weight, weight_dim, weight_group)
        if x_group is not None:
            grad_x = reduce_scatter(grad_x, -1, x_group)
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        grad_weight = reduce_scatter(grad_weight, weight_dim, weight_group)
        return grad_x, grad_weight, None, None, None


class FSDPLinear(nn.Module):
    """A linear layer stored in T slices and whole only while it is used.

    The batch is split too, so ranks share no computation: what is sharded is memory.
    Shapes: x [B, S, D] → [B/T, S, D]; weight [F, D] → [F/T, D]; bias [F] → [F/T].
    Communication: all-gather of the weight and bias forward, of the weight backward;
        reduce-scatter of both gradients.
    Raises: ValueError if T does not divide F. Source: arXiv:1910.02054 (ZeRO, stage 3).
    """

    placement = {"weight": (("dp", 0),), "bias": (("dp", 0),)}

    def __init__(self, full: nn.Linear, dp_group: dist.ProcessGroup):
        super().__init__()
        self.dp_group = dp_group
        self.weight = nn.Parameter(shard(full.weight, 0, dp_group))
        self.bias = nn.Parameter(shard(full.bias, 0, dp_group))

    def forward(self, x_bSD: Tensor) -> Tensor:
        y_bSF = GatheredMatmul.apply(x_bSD, self.weight, None, 0, self.dp_group)
        return y_bSF + AllGather.apply(self.bias, 0, self.dp_group)


class UpLinear2D(nn.Module):
    """First layer on a mesh Y × X: batch over Y, features over X, weight over both.

    Shapes: x[B_y, S, D_x] → [B_y, S, F_x]; weight W[F_x, D_y]; bias b[F_xy], cut over
        x and each piece again over y.
    Communication: x gathered over X, weight and bias over Y; their gradients back.
    """

    placement = {"weight": (("x", 0), ("y", 1)), "bias": (("x", 0), ("y", 0))}

    def __init__(self, full: nn.Linear, groups: dict[str, dist.ProcessGroup]):
        super().__init__()
        self.x_group, self.y_group = groups["x"], groups["y"]
        weight = shard(full.weight, 0, self.x_group)
        self.weight = nn.Parameter(shard(weight, 1, self.y_group))
        bias = shard(full.bias, 0, self.x_group)
        self.bias = nn.Parameter(shard(bias, 0, self.y_group))

    def forward(self, x_bSd: Tensor) -> Tensor:
        h_bSf = GatheredMatmul.apply(x_bSd, self.weight, self.x_group, 1, self.y_group)
        return h_bSf + AllGather.apply(self.bias, 0, self.y_group)


class DownLinear2D(nn.Module):
    """Second layer on a mesh Y × X: as in TP a partial sum, but reduce-scattered.

    Shapes: h[B_y, S, F_x] → [B_y, S, D_x], as x lay; weight W[D_y, F_x]; bias b[D_xy].
    Communication: weight and bias gathered over Y; the output reduce-scattered over X.
    """

    placement = {"weight": (("y", 0), ("x", 1)), "bias": (("x", 0), ("y", 0))}

    def __init__(self, full: nn.Linear, groups: dict[str, dist.ProcessGroup]):
        super().__init__()
        self.x_group, self.y_group = groups["x"], groups["y"]
        weight = shard(full.weight, 0, self.y_group)
        self.weight = nn.Parameter(shard(weight, 1, self.x_group))
        bias = shard(full.bias, 0, self.x_group)
        self.bias = nn.Parameter(shard(bias, 0, self.y_group))

    def forward(self, h_bSf: Tensor) -> Tensor:
        partial_y_bSD = GatheredMatmul.apply(h_bSf, self.weight, None, 0, self.y_group)
        y_bSd = ReduceScatter.apply(partial_y_bSD, 2, self.x_group)
        return y_bSd + AllGather.apply(self.bias, 0, self.y_group)


def spread(full: MLP, way: str, groups: dict[str, dist.ProcessGroup]) -> nn.Module:
    """The MLP spread one of four ways over the ranks: "dp", "fsdp", "tp" or "2d"."""
    if way == "tp":
        return TPMLP(full, groups["tp"])
    mlp = copy.deepcopy(full)
    if way == "fsdp":
        mlp.up_proj = FSDPLinear(full.up_proj, groups["dp"])
        mlp.down_proj = FSDPLinear(full.down_proj, groups["dp"])
    if way == "2d":
        mlp.up_proj = UpLinear2D(full.up_proj, groups)
        mlp.down_proj = DownLinear2D(full.down_proj, groups)
    return mlp


def average_replicated(tensors: list[Tensor], dp_group: dist.ProcessGroup) -> None:
    """Data parallel: every rank has a gradient of its own loss; the mean is wanted."""
    for x in tensors:
        x.grad = all_reduce(x.grad, dp_group) / dp_group.size()


def average_sharded(tensors: list[Tensor], dp_group: dist.ProcessGroup) -> None:
    """FSDP: the reduce-scatter has added T losses' gradients; the mean is wanted."""
    for x in tensors:
        x.grad = x.grad / dp_group.size()


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


EXACT = {"float64": 0.0, "float32": 0.0, "bfloat16": 2e-2}  # for sums of whole numbers


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


def numbers(x: Tensor | None) -> str:
    """[ 0  1 10], a column of two characters a number; – for nothing."""
    if x is None:
        return "–"
    return "[" + " ".join(f"{v:2.0f}" for v in x.flatten().tolist()) + "]"


# ==== BREAK IT


class ReduceBothWays(torch.autograd.Function):
    """g as a differentiable all-reduce: a sum forward and a sum backward."""

    @staticmethod
    def forward(ctx, partial_y, tp_group):
        ctx.tp_group = tp_group
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.tp_group), None


def bias_before_the_sum(self, x_BSf):
    """F.linear takes a bias, so why not give it one."""
    partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)
    return ReduceFromTP.apply(partial_y_BSD, self.tp_group)


def plain_all_gather(x, dim, group):
    """dist.all_gather under autograd; its own slice put back, to have a gradient."""
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x.detach(), group=group)
    slices[group.rank()] = x
    return torch.cat(slices, dim)


def gelu_before_the_sum(self, x_BSD):
    """Rows first: up_proj split by its inputs, and GELU taken of each rank's terms."""
    group = self.up_proj.tp_group
    T, rank = group.size(), group.rank()
    weight_FD = AllGather.apply(self.up_proj.weight, 0, group)
    bias_F = AllGather.apply(self.up_proj.bias, 0, group) / T
    x_BSd = CopyToTP.apply(x_BSD, group).chunk(T, -1)[rank]
    partial_h_BSF = F.linear(x_BSd, weight_FD.chunk(T, -1)[rank], bias_F)
    h_BSF = ReduceFromTP.apply(F.gelu(partial_h_BSF), group)
    return self.down_proj(CopyToTP.apply(h_BSF, group).chunk(T, -1)[rank])


BREAKS = {
    "f": Break(
        "CopyToTP.backward",
        staticmethod(lambda ctx, partial_grad: (partial_grad, None)),
        "f without its all-reduce in backward",
        "step 1's loss is right, and so are the gradients of Megatron's weights; that "
        "of their input x is not. SGD moves x too, as the layers below would move it: "
        "losses part from step 2 on. In the naive split up_proj's gradients suffer too",
        "each rank used its slice of W only, so it has one of the T terms of dL/dx",
        "github.com/NVIDIA/Megatron-LM/issues/19",
    ),
    "g": Break(
        "ReduceFromTP",
        ReduceBothWays,
        "a differentiable all-reduce for g: it all-reduces in backward too",
        "step 1's loss is right; all gradients before g are T times too large, the one "
        "of the bias behind it is right",
        "dL/dy is already whole on every rank; adding T copies of it makes T·dL/dy. "
        "PyTorch's own is for ranks that each have a loss of their own",
        "github.com/pytorch/pytorch/issues/58005, NVIDIA/Megatron-LM issue 559",
    ),
    "bias": Break(
        "RowParallelLinear.forward",
        bias_before_the_sum,
        "the row-parallel bias is added on every rank, before the sum",
        "the loss is wrong from step 1 on, by little while the bias is small; every "
        "gradient is off",
        "the all-reduce adds the bias up T times: only one term of a sum may carry it",
        "github.com/huggingface/text-generation-inference/issues/1036",
    ),
    "plain": Break(
        "AllGather.apply",
        plain_all_gather,
        "a plain dist.all_gather under autograd, the own slice put back into the list",
        "no error and a right loss; FSDP's and the 2D mesh's bias gradients lack the "
        "other ranks' samples",
        "dist.all_gather fills buffers behind autograd's back: what the other "
        "ranks did with our slice has a gradient that never comes back to us",
        "github.com/pytorch/pytorch/issues/190419, …/153016, and issue 158 of "
        "lucidrains/vector-quantize-pytorch",
    ),
    "gelu": Break(
        "TPMLP.forward",
        gelu_before_the_sum,
        "rows first, then columns: GELU is applied to terms of a sum",
        "the loss is wrong from step 1 on",
        "GELU(a) + GELU(b) is not GELU(a + b). Split by rows first, the sum must come "
        "before the nonlinearity: one all-reduce more, of B·S·F",
        "Megatron-LM, arXiv:1909.08053, sec. 3",
    ),
    "average": Break(
        "average_sharded",
        lambda tensors, dp_group: None,
        "FSDP gradients are summed over the ranks, and not averaged",
        "FSDP's and the 2D mesh's losses are right, their gradients too large by the "
        "number of batch slices: SGD would take steps that many times too long",
        "a rank's loss is the mean over its own slice of the batch; the mean over all "
        "of it is the mean of these, not their sum",
        "arXiv:1910.02054; docs.pytorch.org, FSDP's gradient reduction",
    ),
}


# ==== RUN

LEARNING_RATE = 0.05


def squared_error(y_BSD: Tensor, target_BSD: Tensor) -> Tensor:
    """Squared distance of each token, averaged over tokens; in float32 at least."""
    wide = torch.promote_types(y_BSD.dtype, torch.float32)
    return (y_BSD.to(wide) - target_BSD.to(wide)).square().sum(-1).mean()


def make_batch(args, generator) -> tuple[Tensor, Tensor]:
    """A random input and target [B, S, D], the same on every rank."""
    shape = args.batch_size, args.seq_len, args.hidden
    dtype = getattr(torch, args.dtype)
    pair = (torch.randn(shape, generator=generator) for _ in range(2))
    return tuple(x.to(args.device, dtype) for x in pair)


def make_mlp(args) -> MLP:
    """The full MLP, the same on every rank: drawn from the seed before any split."""
    torch.manual_seed(args.seed)
    mlp = MLP(args.hidden, args.width)
    return mlp.to(args.device, getattr(torch, args.dtype))


def dtensor_mlp(full: MLP, tp_group: dist.ProcessGroup, device: str) -> nn.Module:
    """The same MLP by PyTorch's own API: one line says how each layer is split."""
    mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    return parallelize_module(copy.deepcopy(full), mesh, plan)


class Run:
    """One MLP in training, with an x of its own that is trained too.

    x stands for the layers below: its gradient is what they would be handed, so a wrong
    one shows in the next loss.
    """

    def __init__(self, name: str, mlp: nn.Module, x_BSD: Tensor, tp_group):
        self.name, self.mlp = name, mlp
        self.x = x_BSD.clone().requires_grad_()
        self.groups = {"tp": tp_group}
        self.losses, self.first = [], {}

    def step(self, target_BSD: Tensor) -> None:
        COMM.what, COMM.phase = self.name, "forward"
        with CountDTensor("tp") if self.name == "DTensor" else nullcontext():
            y_BSD = self.mlp(self.x)
            loss = squared_error(y_BSD, target_BSD)
            COMM.phase = "backward"
            loss.backward()
        COMM.what = COMM.phase = ""
        self.losses.append(loss.item())
        tensors = {"x": self.x, **dict(self.mlp.named_parameters())}
        if not self.first:
            self.first = {"y": y_BSD.detach().clone()}
            self.first |= {
                name: self.whole_grad(name, p) for name, p in tensors.items()
            }
        rates = {"x": LEARNING_RATE * self.x.shape[:2].numel()}  # a token moves one row
        with torch.no_grad():
            for name, p in tensors.items():
                p -= rates.get(name, LEARNING_RATE) * p.grad
                p.grad = None

    def whole_grad(self, name: str, p: Tensor) -> Tensor:
        """The gradient put together from all ranks; empty if there is none."""
        if p.grad is None:
            return torch.empty(0)
        if isinstance(p.grad, DTensor):
            return p.grad.full_tensor()
        where = () if name == "x" else tell_placement(self.mlp, name)
        return unshard(p.grad, where, self.groups)


def show_holdings(report: Report, full: MLP, tp: nn.Module) -> None:
    """Who holds what: parameter, global shape, shape on a rank, placement."""
    rows, letters = [], dict(zip(dict(full.named_parameters()), ("FD", "F", "DF", "D")))
    for name, p in full.named_parameters():
        here, where = list(tp.get_parameter(name).shape), tell_placement(tp, name)
        axes = {dim: f"_{axis}" for axis, dim in where}
        words = ", ".join(d + axes.get(i, "") for i, d in enumerate(letters[name]))
        rows.append([name, list(p.shape), here, in_words(where), f"[{words}]"])
    report.say("\n1  Who holds what (Megatron's split)")
    report.table("parameter|global|on a rank|placement|notation", rows, "lllll")
    report.say(
        "   torch stores W as (out, in): the paper's columns are our dim 0, Shard(0)"
    )


def in_words(placement: tuple) -> str:
    """PyTorch's words for a placement on one axis."""
    return ", ".join(f"Shard({dim})" for _, dim in placement) or "Replicate()"


def show_losses(report: Report, runs: list[Run]) -> None:
    """Losses of all runs, step by step."""
    report.say(
        "\n2  Losses: squared distance, mean over tokens; SGD moves the weights and x"
    )
    rows, allowed = [], ALLOWED[report.args.dtype][0]
    for step, losses in enumerate(zip(*(run.losses for run in runs)), 1):
        diffs = [abs(loss - losses[0]) / abs(losses[0]) for loss in losses]
        marks = [
            report.check(f"loss at step {step}, {run.name}", diff, allowed)
            for run, diff in zip(runs[1:], diffs[1:])
        ]
        row = {"step": step, "without": losses[0], "with": losses[2]}
        report.data["losses"].append(row | {"naive": losses[1], "dtensor": losses[3]})
        mark = "ok" if marks == ["ok"] * 3 else "✗"
        numbers = [f"{loss:.8f}" for loss in losses]
        rows.append([step, *numbers, f"{max(diffs):.1e}", mark])
    head = "step|without TP|naive split|Megatron's|DTensor|relative diff.|ok"
    report.table(head, rows, "rrrrrrr")


def show_gradients(report: Report, runs: list[Run]) -> None:
    """Every gradient of step 1 and the output, against the run without TP."""
    report.say(
        "\n3  Output and gradients at step 1: norms, and largest relative differences"
    )
    without, *others = runs
    rows, allowed = [], ALLOWED[report.args.dtype][1]
    for name, reference in without.first.items():
        label = name if name == "y" else f"dL/d {name}"
        diffs = [rel_diff(run.first[name], reference) for run in others]
        checks = [
            report.check(f"{label}, {run.name}", diff, allowed)
            for run, diff in zip(others, diffs)
        ]
        worst = [max(column) for column in zip(*gather_objects(diffs))]
        norms = [run.first[name].double().norm().item() for run in (without, runs[2])]
        ok = all(diff <= allowed for diff in worst) and checks == ["ok"] * 3
        where = () if name in "xy" else tell_placement(runs[2].mlp, name)
        row = dict(name=name, norm_without=norms[0], norm_with=norms[1])
        row |= dict(zip(("rel_diff_naive", "rel_diff", "rel_diff_dtensor"), worst))
        report.data["gradients"].append(row | dict(placement=in_words(where), ok=ok))
        cells = [f"{norm:.6f}" for norm in norms] + [f"{diff:.1e}" for diff in worst]
        rows.append([label, *cells, "ok" if ok else "✗"])
    head = "|norm alone|Megatron's|naive diff.|Megatron's|DTensor|ok"
    report.table(head, rows, "lrrrrrr")
    corner = [run.first["up_proj.weight"] for run in (without, runs[2])]
    rows = [
        ["dL/d up_proj.weight" if i == 0 else ""]
        + [" ".join(f"{v:9.6f}" for v in c[i, :3].tolist()) if c.numel() else "none"
           for c in corner]
        for i in range(2)
    ]  # fmt: skip
    report.table("its corner [:2, :3]|without TP|Megatron's", rows, "lll")


def show_bytes(report: Report, args, ranks: int) -> None:
    """What the two splits send in a step, and DTensor's, against the formulas."""
    size = getattr(torch, args.dtype).itemsize if ranks > 1 else 0
    BSD = args.batch_size * args.seq_len * args.hidden * size * args.steps
    BSF = args.batch_size * args.seq_len * args.width * size * args.steps
    wanted = [
        ("naive split", "forward", "all-gather", "B·S·(F + D)", BSF + BSD),
        ("naive split", "backward", "all-reduce", "B·S·(F + D)", BSF + BSD),
        ("Megatron's", "forward", "all-reduce", "B·S·D", BSD),
        ("Megatron's", "backward", "all-reduce", "B·S·D", BSD),
        ("DTensor", "forward", "all-reduce", "B·S·D", BSD),
        ("DTensor", "backward", "all-reduce", "B·S·D", BSD),
    ]
    rows = []
    for what, phase, collective, formula, predicted in wanted:
        calls, moved, mark = report.moved(what, collective, "tp", predicted, phase)
        wire = moved * ring_factor(collective, ranks) / args.steps
        each = calls // args.steps, moved // args.steps, formula
        rows.append([what, phase, collective, *each, predicted // args.steps])
        rows[-1] += [f"{wire:.0f}", mark]
    report.say(
        "\n4  Communication in a step: payload, and what each rank of a ring sends"
    )
    head = "split|phase|collective|calls|bytes|formula|predicted|ring|ok"
    report.table(head, rows, "lllrrlrrr")


def show_why(report: Report, tp_group, device: str) -> None:
    """GELU needs whole sums; f and g on two numbers a rank."""
    T, rank = tp_group.size(), tp_group.rank()
    a, b = torch.tensor(3.0), torch.tensor(-2.0)
    late, early = F.gelu(a + b).item(), (F.gelu(a) + F.gelu(b)).item()
    report.say(
        "\n5  Why columns, then rows: GELU works on single elements. After a split by\n"
        "   columns each rank has whole elements, and goes on without a gather. After\n"
        "   a split by rows it would have terms of sums, and\n"
        f"   GELU(3 + −2) = {late:.3f} is not GELU(3) + GELU(−2) = {early:.3f}.\n"
        "   Why f (identity forward, all-reduce backward) stands before and g\n"
        "   (all-reduce forward, identity backward) behind: y = w_0·x + w_1·x + …,\n"
        "   rank t holds w_t = t + 1; x = 3, L = y"
    )
    rows = []
    ways = {
        "f and g": (CopyToTP.apply, ReduceFromTP.apply),
        "without f": (lambda x, group: x, ReduceFromTP.apply),
        "g by PyTorch's all_reduce": (CopyToTP.apply, pytorch_all_reduce),
    }
    x, w_T = torch.tensor(3.0, requires_grad=True), torch.arange(1.0, T + 1)
    (w_T.requires_grad_() * x).sum().backward()  # all of it in one process
    right = [x.grad.item(), w_T.grad[rank].item()]
    rows.append(["one process", *(f"{v:.0f}" for v in right), "the truth"])
    remarks = ("equal", "dL/dx: one term each", f"all times T = {T}")
    for (name, (f, g)), remark in zip(ways.items(), remarks):
        x = torch.tensor(3.0, device=device, requires_grad=True)
        w = torch.tensor(rank + 1.0, device=device, requires_grad=True)
        g(f(x, tp_group) * w, tp_group).backward()
        grads = [x.grad.item(), w.grad.item()]
        if name == "f and g":
            off = max(abs(got - want) for got, want in zip(grads, right))
            mark = report.check("f and g on two numbers", off)
            remark = "ok, equal" if mark == "ok" else "✗, not equal"
        cells = [name]
        for column in zip(*gather_objects([f"{v:.0f}" for v in grads])):
            same = set(column) == {column[0]}
            cells.append(f"{column[0]} on each" if same else " ".join(column))
        rows.append([*cells, remark])
    report.table("|dL/dx, by rank|dL/dw_t, by rank|", rows, "llll")
    report.say(
        "   PyTorch's is right for its own purpose: each rank has a loss, and all are\n"
        "   added up, L = T·y. Here the ranks hold one and the same loss."
    )


def pytorch_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """torch.distributed.nn.functional.all_reduce, less its notice of being renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.distributed.nn.functional.all_reduce(x, group=group)


def show_exact(report: Report, args, tp_group) -> None:
    """Both layers on whole numbers: no rounding, so equality is bitwise."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    dtype = getattr(torch, args.dtype)

    def whole(*shape):
        x = torch.randint(-1, 2, shape, generator=generator)
        return x.to(args.device, dtype)

    COMM.what, marks = "whole numbers", []
    sizes = {"column": (args.hidden, args.width), "row": (args.width, args.hidden)}
    for kind, (inner, outer) in sizes.items():
        full = nn.Linear(inner, outer, device=args.device, dtype=dtype)
        with torch.no_grad():
            full.weight.copy_(whole(outer, inner))
            full.bias.copy_(whole(outer))
        x, upstream = (whole(args.batch_size, args.seq_len, n) for n in (inner, outer))
        reference = both_passes(full, x, upstream)
        if kind == "column":
            layer, cut = ColumnParallelLinear(full, tp_group), ((), ("tp", 2))
        else:
            layer, cut = RowParallelLinear(full, tp_group), (("tp", 2), ())
        pieces = [
            shard(v, c[1], tp_group) if c else v for v, c in zip((x, upstream), cut)
        ]
        got = both_passes(layer, *pieces)
        where = {"y": cut[1:], "x": cut[:1]}
        where |= {name: layer.placement.get(name, ()) for name in ("weight", "bias")}
        for name, value in got.items():
            value = unshard(value, tuple(filter(None, where[name])), {"tp": tp_group})
            diff = rel_diff(value, reference[name])
            marks.append(
                report.check(f"whole numbers, {kind}: {name}", diff, EXACT[args.dtype])
            )
    good = "ok" if marks == ["ok"] * 8 else "✗"
    report.say(
        "   On whole numbers nothing is rounded: y, dL/dx, dL/dW, dL/db of both\n"
        "   parallel layers equal the full layer's to the last bit. What differs\n"
        f"   above is rounding, of sums in another order: {good}"
    )


def both_passes(layer: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of one layer for a given dL/dy."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def predict_memory(args, way: str, ranks: int, mesh: dict[str, int]) -> list[int]:
    """Elements a rank holds: parameters, gradients, saved for backward."""
    B, S, D, F = args.batch_size, args.seq_len, args.hidden, args.width
    P, y, x = 2 * D * F + F + D, mesh["y"], mesh["x"]
    parameters = {
        "alone": P, "dp": P, "fsdp": P // ranks,
        "tp": (2 * D * F + F) // ranks + D, "2d": P // ranks,
    }  # fmt: skip
    saved = {
        "alone": B * S * (D + 2 * F), "dp": B // ranks * S * (D + 2 * F),
        "fsdp": B // ranks * S * (D + 2 * F), "tp": B * S * (D + 2 * F // ranks),
        "2d": B // y * S * (D + 2 * F) // x,
    }  # fmt: skip
    return [parameters[way], parameters[way], saved[way]]


def predict_bytes(args, way: str, mesh: dict[str, int]) -> dict[tuple, int]:
    """(phase, collective, axis) → elements of payload."""
    B, S, D, F = args.batch_size, args.seq_len, args.hidden, args.width
    y, x = mesh["y"], mesh["x"]
    act, weights, biases = B // y * S * D, 2 * D * F // x, (F + D) // x
    return {
        "alone": {},
        "dp": {("backward", "all-reduce", "dp"): 2 * D * F + F + D},
        "fsdp": {
            ("forward", "all-gather", "dp"): 2 * D * F + F + D,
            ("backward", "all-gather", "dp"): 2 * D * F,
            ("backward", "reduce-scatter", "dp"): 2 * D * F + F + D,
        },
        "tp": {
            ("forward", "all-reduce", "tp"): B * S * D,
            ("backward", "all-reduce", "tp"): B * S * D,
        },
        "2d": {
            ("forward", "all-gather", "x"): act,
            ("forward", "reduce-scatter", "x"): act,
            ("forward", "all-gather", "y"): weights + biases,
            ("backward", "all-gather", "x"): 2 * act,
            ("backward", "reduce-scatter", "x"): act,
            ("backward", "all-gather", "y"): weights,
            ("backward", "reduce-scatter", "y"): weights + biases,
        },
    }[way]


WAYS = {  # way → its name, how the batch is cut, the axis whose ranks share no sample
    "alone": ("one process", (), None),
    "dp": ("data parallel", (("dp", 0),), "dp"),
    "fsdp": ("FSDP", (("dp", 0),), "dp"),
    "tp": ("tensor parallel", (), None),
    "2d": ("2D mesh", (("y", 0), ("x", 2)), "y"),
}


def try_way(report: Report, way: str, full: MLP, batch, groups, reference) -> list:
    """One step one way: what it holds, and whether loss and gradients are right."""
    name, cut, dp_axis = WAYS[way]
    x, target = batch
    for axis, dim in cut:
        x, target = shard(x, dim, groups[axis]), shard(target, dim, groups[axis])
    x = x.clone().requires_grad_()
    mlp = copy.deepcopy(full) if way == "alone" else spread(full, way, groups)
    tensors = {"x": x, **dict(mlp.named_parameters())}
    COMM.what, COMM.phase = name, "forward"
    saved = SavedBytes(skip=list(mlp.parameters()))
    with saved:
        y = mlp(x)
    loss = squared_error(y, target)
    COMM.phase = "backward"
    loss.backward()
    if way == "dp":
        average_replicated(list(mlp.parameters()), groups["dp"])
        x.grad = x.grad / groups["dp"].size()  # no one else has these samples
    elif dp_axis:
        average_sharded(list(tensors.values()), groups[dp_axis])
    COMM.what = COMM.phase = ""
    losses = gather_objects(loss.item())
    mean = sum(losses) / len(losses) * (groups["x"].size() if way == "2d" else 1)
    if not reference:
        reference.update({n: p.grad for n, p in tensors.items()}, loss=mean)
    allowed = ALLOWED[report.args.dtype]
    diff = abs(mean - reference["loss"]) / reference["loss"]
    marks = [report.check(f"{name}: loss", diff, allowed[0])]
    for n, p in tensors.items():
        where = cut if n == "x" else tell_placement(mlp, n)
        off = rel_diff(unshard(p.grad, where, groups), reference[n])
        marks.append(report.check(f"{name}: dL/d {n}", off, allowed[1]))
        diff = max(diff, off)
    held = [sum(t.nbytes for t in mlp.parameters())]
    held += [sum(t.grad.nbytes for t in mlp.parameters()), saved.total()]
    return [held, diff, "ok" if set(marks) == {"ok"} else "✗"]


def check_held(report: Report, name: str, held: list[int], wanted: list[int]) -> str:
    """Bytes held against the formulas; "ok" or "✗"."""
    marks = []
    for kind, n, predicted in zip(("parameters", "gradients", "saved"), held, wanted):
        row = dict(what=f"{name}: {kind}", bytes=n, predicted_bytes=predicted)
        report.data["memory"].append(row)
        marks.append(report.check(f"bytes of {row['what']}", abs(n - predicted)))
    return "ok" if marks == ["ok"] * 3 else "✗"


def check_sent(report: Report, way: str, groups, mesh) -> list[list]:
    """Bytes sent against the formulas: a row for each phase and axis."""
    size, rows = getattr(torch, report.args.dtype).itemsize, {}
    for (phase, collective, axis), n in predict_bytes(report.args, way, mesh).items():
        ranks = groups[axis].size()
        if ranks == 1:
            continue  # no one to send to
        _, moved, mark = report.moved(WAYS[way][0], collective, axis, n * size, phase)
        cell = rows.setdefault((phase, axis), [[], 0, 0, 0.0, []])
        cell[0].append(collective)
        cell[1] += moved
        cell[2] += n * size
        cell[3] += moved * ring_factor(collective, ranks)
        cell[4].append(mark)
    return [
        [way.upper(), phase, axis, " + ".join(names), moved, predicted, f"{wire:.0f}"]
        + ["✗" if "✗" in marks else "ok"]
        for (phase, axis), (names, moved, predicted, wire, marks) in rows.items()
    ]


def show_ways(report: Report, full: MLP, batch, groups, mesh) -> None:
    """Four ways to spread the same MLP: what each rank holds and sends."""
    args, reference, held_rows, sent_rows = report.args, {}, [], []
    size = getattr(torch, args.dtype).itemsize
    for way, (name, *_) in WAYS.items():
        held, diff, mark = try_way(report, way, full, batch, groups, reference)
        ranks = groups["tp"].size()
        wanted = [n * size for n in predict_memory(args, way, ranks, mesh)]
        mark = check_held(report, name, held, wanted) if mark == "ok" else mark
        held_rows.append([name, *held, sum(held), sum(wanted), f"{diff:.1e}", mark])
        sent_rows += check_sent(report, way, groups, mesh)
    where = " × ".join(f"{axis} {n}" for axis, n in mesh.items())
    report.say(
        f"\n6  Four ways to spread it, one step each (2D mesh: {where}). Bytes held:\n"
        "   parameters, gradients, and what is kept for backward. (FSDP: fully\n"
        "   sharded data parallel)"
    )
    head = "|parameters|gradients|kept|sum|predicted|rel. diff.|ok"
    report.table(head, held_rows, "lrrrrrrr")
    report.say("   and bytes sent: payload, and what each rank of a ring sends")
    head = "|phase|axis|collectives|bytes|predicted|ring|ok"
    report.table(head, sent_rows, "llllrrrr")
    tokens = args.batch_size * args.seq_len
    report.say(
        "   Data parallel sends every gradient, 2·D·F numbers however few the tokens.\n"
        "   FSDP gathers the weights too, twice: in a ring 1.5 times those bytes.\n"
        "   TP sends activations, 2·B·S·D, however wide the MLP: less than data\n"
        f"   parallel where B·S < F (here {tokens} and {args.width}). FSDP, TP and 2D\n"
        "   hold about 1/T of the weights; TP keeps all of x, the others their\n"
        "   samples only.\n"
    )


def bench_steps(report: Report, args, tp_group) -> None:
    """`--bench`: one process, TP by hand, DTensor, over hidden sizes; as ratios."""
    rows, pays = [], None
    for hidden in (16, 64, 256, 1024, 2048):
        sizes = argparse.Namespace(**vars(args) | dict(hidden=hidden, width=4 * hidden))
        full = make_mlp(sizes)
        batch = make_batch(sizes, torch.Generator().manual_seed(args.seed))
        alone, by_hand, dtensor = median_seconds_of(full, batch, tp_group, args.device)
        row = dict(hidden=hidden, alone=alone, by_hand=by_hand, dtensor=dtensor)
        report.data.setdefault("bench", []).append(row)
        pays = pays or (hidden if by_hand < alone else None)
        ms = [f"{1000 * t:.2f}" for t in (alone, by_hand, dtensor)]
        rows.append([hidden, *ms, f"{alone / by_hand:.2f}", f"{by_hand / dtensor:.2f}"])
    tokens = args.batch_size * args.seq_len
    report.say(
        f"7  Time of a step of {tokens} tokens on this machine, one thread a rank "
        "(medians)"
    )
    head = "hidden|one process ms|TP ms|DTensor ms|TP is faster by|TP / DTensor"
    report.table(head, rows, "rrrrrr")
    report.say(f"   TP starts to pay at hidden {pays}\n")


def median_seconds_of(full: MLP, batch, tp_group, device: str) -> list[float]:
    """Median seconds of a step: one process, TP by hand, DTensor, taking turns."""
    mlps = [full, TPMLP(full, tp_group), dtensor_mlp(full, tp_group, device)]
    optimizers = [torch.optim.SGD(mlp.parameters(), lr=1e-3) for mlp in mlps]
    x, target = batch
    seconds = [[], [], []]
    for _ in range(40 if full.up_proj.in_features <= 256 else 8):
        for which, (mlp, optimizer) in enumerate(zip(mlps, optimizers)):
            dist.barrier()
            start = time.perf_counter()
            if which > 0 or dist.get_rank() == 0:  # one process: the others wait
                squared_error(mlp(x.requires_grad_()), target).backward()
                optimizer.step()
                optimizer.zero_grad()
            if x.is_cuda:
                torch.cuda.synchronize()
            seconds[which].append(time.perf_counter() - start)
    medians = [sorted(s[1:])[len(s) // 2 - 1] for s in seconds]
    return gather_objects(medians)[0]


def parse_args(ranks: int) -> argparse.Namespace:
    parser = lesson_parser(__doc__, 3, "steps of SGD")
    add = parser.add_argument
    add("--hidden", type=positive, default=64, help="D (default 64)")
    add("--width", type=positive, help="F (default 4·D)")
    add("--batch-size", type=positive, default=8, help="B (default 8)")
    add("--seq-len", type=positive, default=8, help="S (default 8)")
    add("--mesh", metavar="YxX", help="the 2D mesh, as 2x2 (default: X is 2)")
    add("--bench", action="store_true", help="also measure the time of a step")
    args = parser.parse_args()
    args.width = args.width or 4 * args.hidden
    args.mesh = parse_mesh(args.mesh, ranks)
    for flag, value, parts in (
        ("--hidden", args.hidden, ranks),
        ("--width", args.width, ranks),
        ("--batch-size", args.batch_size, ranks),
    ):
        if value % parts:
            up = value + parts - value % parts
            raise ValueError(
                f"{flag} {value}: {value} % {parts} ranks = {value % parts}, not 0; "
                f"{flag} {up} would do"
            )
    return args


def parse_mesh(text: str | None, ranks: int) -> dict[str, int]:
    """{"y": Y, "x": X} of "YxX"; by default X is 2 where that divides the ranks."""
    if text is None:
        x = 2 if ranks % 2 == 0 else 1
        return {"y": ranks // x, "x": x}
    y, _, x = text.partition("x")
    if not (y.isdecimal() and x.isdecimal()):
        raise ValueError(f"--mesh {text}: two numbers are wanted, as in --mesh 2x2")
    if int(y) * int(x) != ranks:
        product = f"{int(y)} × {int(x)} = {int(y) * int(x)}"
        raise ValueError(
            f"--mesh {text}: {product}, but there are {ranks} ranks; "
            f"take --nproc_per_node={int(y) * int(x)} or another mesh"
        )
    return {"y": int(y), "x": int(x)}


def main(args: argparse.Namespace, backend: str) -> str:
    ranks = dist.get_world_size()
    groups = {}
    for mesh in ({"tp": ranks}, {"dp": ranks}, args.mesh):
        groups |= mesh_groups(mesh, args.timeout)
    tp_group = groups["tp"]
    report = Report("01_naive_mlp_tp", args, {"tp": ranks}, backend)
    full = make_mlp(args)
    batch = make_batch(args, torch.Generator().manual_seed(args.seed))
    runs = [
        Run("without TP", copy.deepcopy(full), batch[0], tp_group),
        Run("naive split", NaiveTPMLP(full, tp_group), batch[0], tp_group),
        Run("Megatron's", TPMLP(full, tp_group), batch[0], tp_group),
        Run("DTensor", dtensor_mlp(full, tp_group, args.device), batch[0], tp_group),
    ]
    show_holdings(report, full, runs[2].mlp)
    for _ in range(args.steps):
        for run in runs:
            run.step(batch[1])
    show_losses(report, runs)
    show_gradients(report, runs)
    show_exact(report, args, tp_group)
    show_bytes(report, args, ranks)
    show_why(report, tp_group, args.device)
    show_ways(report, full, batch, groups, args.mesh)
    if args.bench:
        bench_steps(report, args, tp_group)
    return report.verdict("with TP == without TP", BREAKS.get(args.break_name))


if __name__ == "__main__":
    launch(__file__, parse_args, main, BREAKS, globals())
