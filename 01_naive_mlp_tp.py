"""Lesson 01: one MLP, split over ranks.

The naive split cuts both matrices by columns, and gathers after each. Better: cut the
second one by rows. Each rank then computes its part of the hidden layer, nonlinearity
included, and a single all-reduce adds up the outputs: tensor parallelism (TP).

Run it (2 ranks on a laptop; 3, 4 and 8 work too; 2D needs 4):

    torchrun --standalone --nproc_per_node=2 01_naive_mlp_tp.py

What you will see: the same MLP in one process, split the naive way, Megatron's and by
PyTorch's DTensor, side by side; then other ways (data parallel, FSDP, a 2D mesh).

Try: delete naive_mlp's down_proj line; an nn.RMSNorm before up_proj (it needs whole
tokens: --mesh 2x1); a gated MLP, down(gelu(gate(x)) · up(x)), with a line for gate_proj
wherever up_proj is split. Numbers stay ok; bytes get a ✗, predicted for our MLP.

How to read this file: NEW is the lesson, RUN what it prints, BREAK IT its bugs.

Shapes: B batch, S sequence, D hidden, F MLP width, T ranks in the TP group. UPPERCASE
    is the full size, lowercase this rank's slice: h_BSf is [B, S, F/T]. `partial_` in
    front: full shape, still to be summed over the group. Mesh axes: tp; dp (data
    parallel); outer × inner (2D). F is also torch.nn.functional; f, in prose, CopyToTP.

Sources: Megatron-LM, arXiv:1909.08053, sec. 3; ZeRO, arXiv:1910.02054 (FSDP); GSPMD,
    arXiv:2105.04663 (2D mesh); docs.pytorch.org, torch.distributed.tensor.parallel.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, parallel
from torch.utils._python_dispatch import TorchDispatchMode

# ==== NEW in 01: one MLP, split

# From lesson 00: all_reduce, all_gather, reduce_scatter return new tensors, of which
# autograd knows nothing; shard(x, dim, group) is this rank's slice of what all hold. A
# tensor is Replicate(): whole on every rank, Shard(dim), or Partial(): to be summed.


class MLP(nn.Module):
    """The reference: plain PyTorch, one process. Shapes: x [B, S, D] → [B, S, D]."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


def shard_parameter(full: Tensor, *cuts: tuple[int, dist.ProcessGroup]) -> nn.Parameter:
    """This rank's slice of a parameter, which remembers its cuts: ((dim, group), …)."""
    for dim, group in cuts:
        full = shard(full, dim, group)
    mine = nn.Parameter(full.detach().clone())
    mine.shardings = cuts
    return mine


def unshard(x: Tensor, cuts: tuple) -> Tensor:
    """The whole tensor from all ranks' slices: cuts undone, the last one first."""
    for dim, group in reversed(cuts):
        x = all_gather(x, dim, group)
    return x


# Collectives with a backward: which one is right depends on what the ranks do next.
# After identical work each has the whole gradient, after different work a term of it.
#     class             forward         what the ranks do next      backward
#     CopyToTP (f)      nothing         different work (its W)      all-reduce
#     GatherFromTP      all-gather      identical work, or f first  slice
#     ReduceFromTP (g)  all-reduce      identical work              nothing
#     AllGatherWithGrad    all-gather      different work              reduce-scatter
#     ReduceScatterWithGrad reduce-scatter  different work (its slice)  all-gather
# (backward returns a gradient for each argument of forward, None where there is none.)
class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # every rank has all of x already: nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of the T terms of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward."""

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
        full: the single-process layer, which each rank of tp_group has, and slices.
        copy_input: False where the caller has applied f, once for several layers.
        gather_output: True to make Y whole on every rank, as in the naive split.
    Shapes (global → on a rank, placement):
        x       [B, S, D] → [B, S, D]     Replicate()
        weight  [F, D]    → [F/T, D]      Shard(0): the paper's columns, torch's rows
        return  [B, S, F] → [B, S, F/T]   Shard(2)
    Communication: backward f's all-reduce of B·S·D elements; gather_output B·S·F.
    Raises: ValueError if T does not divide F. Source: arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group, self.copy_input = tp_group, copy_input
        self.gather_output = gather_output
        self.weight = shard_parameter(full.weight, (0, tp_group))  # [f, D]
        self.bias = shard_parameter(full.bias, (0, tp_group))  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        y_BSf = F.linear(x_BSD, self.weight, self.bias)
        if self.gather_output:
            return GatherFromTP.apply(y_BSf, 2, self.tp_group)
        return y_BSf


def naive_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Both layers by columns, each output gathered: GELU on all of F everywhere."""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group, gather_output=True)
    mlp.down_proj = ColumnParallelLinear(full.down_proj, tp_group, gather_output=True)
    return mlp


# ---- Columns, then rows: Megatron's split, and the same by PyTorch's own API


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the whole dL/dy; and y is the
        # sum of the terms, so dL/dy is also the gradient of every term.
        return grad, None


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group.

    Shapes (global → on a rank, placement):
        x       [B, S, F] → [B, S, F/T]   Shard(2), as ColumnParallelLinear returns it
        weight  [D, F]    → [D, F/T]      Shard(1)
        bias    [D]       → [D]           Replicate()
        return  [B, S, D] → [B, S, D]     Replicate()
    Communication: forward one all-reduce of B·S·D elements (g); backward none.
    Raises: ValueError if T does not divide F. Source: arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        self.weight = shard_parameter(full.weight, (1, tp_group))  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward. Columns
    first, as GELU needs finished elements: rows would give terms of them."""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


def dtensor_mlp(full: MLP, tp_group: dist.ProcessGroup) -> nn.Module:
    """The same by PyTorch: a DTensor knows its placement, and calls its collectives."""
    device = full.up_proj.weight.device.type
    mesh = dist.DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    colwise, rowwise = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {"up_proj": colwise, "down_proj": rowwise}
    return parallel.parallelize_module(copy.deepcopy(full), mesh, plan)


# ---- The batch is split, too: FSDP, and a 2D mesh of both


class AllGatherWithGrad(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: the transpose of AllGatherWithGrad."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


class GatheredMatmul(torch.autograd.Function):
    """X Wᵀ from slices of both: gathered for use, not kept, gathered again in backward.

    x is gathered along its last dim over x_group (None: it is whole), the weight along
    w_dim over w_group; their gradients are reduce-scattered likewise."""

    @staticmethod
    def forward(ctx, x, weight, x_group, w_dim, w_group):
        ctx.save_for_backward(x, weight)  # the slices: that is all that is kept
        ctx.x_group, ctx.w_dim, ctx.w_group = x_group, w_dim, w_group
        x = all_gather(x, -1, x_group) if x_group else x
        return F.linear(x, all_gather(weight, w_dim, w_group))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x = all_gather(x, -1, ctx.x_group) if ctx.x_group else x
        grad_x = grad @ all_gather(weight, ctx.w_dim, ctx.w_group)
        grad_x = reduce_scatter(grad_x, -1, ctx.x_group) if ctx.x_group else grad_x
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        grad_weight = reduce_scatter(grad_weight, ctx.w_dim, ctx.w_group)
        return grad_x, grad_weight, None, None, None


class UpLinear2D(nn.Module):
    """x[B_outer, S, D_inner] → h[B_outer, S, F_inner]; weight W[F_inner, D_outer]."""

    def __init__(self, full: nn.Linear, outer_group, inner_group):
        super().__init__()
        self.outer, self.inner = outer_group, inner_group
        self.weight = shard_parameter(full.weight, (0, inner_group), (1, outer_group))
        self.bias = shard_parameter(full.bias, (0, inner_group), (0, outer_group))

    def forward(self, x_bSd: Tensor) -> Tensor:
        h_bSf = GatheredMatmul.apply(x_bSd, self.weight, self.inner, 1, self.outer)
        return h_bSf + AllGatherWithGrad.apply(self.bias, 0, self.outer)


class DownLinear2D(nn.Module):
    """h[B_outer, S, F_inner] → y[B_outer, S, D_inner]; weight W[D_outer, F_inner]."""

    def __init__(self, full: nn.Linear, outer_group, inner_group):
        super().__init__()
        self.outer, self.inner = outer_group, inner_group
        self.weight = shard_parameter(full.weight, (0, outer_group), (1, inner_group))
        self.bias = shard_parameter(full.bias, (0, inner_group), (0, outer_group))

    def forward(self, h_bSf: Tensor) -> Tensor:
        partial_y_bSD = GatheredMatmul.apply(h_bSf, self.weight, None, 0, self.outer)
        y_bSd = ReduceScatterWithGrad.apply(partial_y_bSD, 2, self.inner)  # TP: g
        return y_bSd + AllGatherWithGrad.apply(self.bias, 0, self.outer)


def mlp_2d(full: MLP, outer_group, inner_group) -> MLP:
    """The batch is cut over outer, features over inner, weights over both. With one
    rank on inner this is FSDP: weights alone are gathered, and only to be used."""
    mlp = copy.deepcopy(full)
    mlp.up_proj = UpLinear2D(full.up_proj, outer_group, inner_group)
    mlp.down_proj = DownLinear2D(full.down_proj, outer_group, inner_group)
    return mlp


def average_gradients(tensors, batch_group: dist.ProcessGroup) -> None:
    """A rank's loss is the mean over its own samples; the mean over all is wanted."""
    for p in tensors:
        if batch_group not in [group for _, group in getattr(p, "shardings", ())]:
            p.grad = all_reduce(p.grad, batch_group)  # else backward has summed it
        p.grad = p.grad / batch_group.size()


# ==== RUN


def main(args, report: Report) -> None:
    groups = {}
    for mesh in ({"tp": args.ranks}, {"dp": args.ranks, "alone": 1}, args.mesh):
        groups |= mesh_groups(mesh, args.timeout)
    tp, dp, outer, inner = (groups[name] for name in ("tp", "dp", "outer", "inner"))
    report.begin({"tp": args.ranks})
    report.axes = {axis: group.size() for axis, group in groups.items()}
    full = MLP(args.hidden, args.width).to(args.device, getattr(torch, args.dtype))
    batch = torch.randn(2, args.batch_size, args.seq_len, args.hidden)  # x and target
    batch = batch.to(full.up_proj.weight)  # every rank draws the same weights and batch
    losses, tensors, held = {}, {}, {}

    def run(name: str, mlp: nn.Module, cuts: tuple = (), batch_group=None) -> None:
        results = train(name, mlp, batch, args, cuts, batch_group)
        losses[name], tensors[name], held[name] = results

    run("without TP", copy.deepcopy(full))
    run("naive", naive_mlp(full, tp))
    run("Megatron", tp_mlp(full, tp))
    if args.ranks > 1:
        run("DTensor", dtensor_mlp(full, tp))
    show_holdings(report, full, tp_mlp(full, tp))
    show_training(report, losses, tensors)
    run("DP", copy.deepcopy(full), ((0, dp),), dp)
    run("FSDP", mlp_2d(full, dp, groups["alone"]), ((0, dp),), dp)
    run("2D", mlp_2d(full, outer, inner), ((0, outer), (2, inner)), outer)
    show_ways(report, losses, tensors, held)
    show_bytes(report)


def train(name: str, mlp: nn.Module, batch: Tensor, args, cuts, batch_group) -> tuple:
    """Losses; output and gradients of step 1, whole; bytes held by this rank.

    SGD moves x, too, as if it were the layers below: so a wrong dL/dx shows in the next
    loss. cuts: of x and the target; batch_group: ranks that have other samples.
    """
    x, target = (shard_parameter(tensor, *cuts) for tensor in batch)
    tensors = {"x": x, **dict(mlp.named_parameters())}
    losses, first, held = {}, {}, {}
    for step in range(1, args.steps + 1):
        saved = SavedBytes(skip=mlp.parameters())
        with CountDTensor("tp") if "DTensor" in name else nullcontext():
            COMM.what, COMM.phase = name, "forward"
            with saved:
                y = mlp(x)
            COMM.phase = "backward"
            squared_error(y, target.detach()).backward()
        trained = {n: p for n, p in tensors.items() if p.grad is not None}
        if batch_group:
            average_gradients(trained.values(), batch_group)
        COMM.what = COMM.phase = ""  # what follows is for the report
        y = unshard(y.detach(), cuts)
        losses[f"step {step}"] = squared_error(y, batch[1]).item()
        if step == 1:
            gradients = {f"dL/d {n}": unshard_gradient(p) for n, p in tensors.items()}
            first = {"y": y, **gradients}
            held["parameters"] = nbytes(mlp.parameters())
            held["gradients"] = nbytes(p.grad for p in mlp.parameters())
            held["kept"] = saved.total()
        # The rate falls with the steps: at a constant one roundings might grow.
        rate, tokens = 0.25 / (args.hidden * step), args.batch_size * args.seq_len
        with torch.no_grad():
            for n, p in trained.items():  # undo x's 1/tokens, or it barely moves
                p -= rate * (tokens if n == "x" else 1) * p.grad
                p.grad = None
    return losses, first, held


def squared_error(y_BSD: Tensor, target_BSD: Tensor) -> Tensor:
    return (y_BSD - target_BSD).square().sum(-1).mean()


def unshard_gradient(p: Tensor) -> Tensor:
    """Put together from all ranks; zeros if there is none."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    return unshard(grad, getattr(p, "shardings", ()))


def show_holdings(report, full: MLP, tp: MLP) -> None:
    rows, whole = [], {name: list(p.shape) for name, p in full.named_parameters()}
    for name, p in tp.named_parameters():
        cuts = [f"Shard({dim})" for dim, _ in getattr(p, "shardings", ())]
        row = {"parameter": name, "global": whole.get(name), "on a rank": list(p.shape)}
        rows.append(row | {"placement": ", ".join(cuts) or "Replicate()"})
    report.section("Who holds what: Megatron's split")
    report.say("   torch stores W as (out, in): the paper's columns are our dim 0")
    report.table("holdings", rows)


def show_training(report, losses: dict, tensors: dict) -> None:
    report.section("Losses: squared distance, mean over tokens; SGD moves W, b and x")
    report.compare("losses", losses, report.allowed_loss)
    report.section("Output, gradients of step 1: norms; diff = max|a − b| / max|b|")
    report.compare("gradients", tensors)
    for run in ("without TP", "Megatron"):
        grad = tensors[run].get("dL/d up_proj.weight", torch.zeros(1, 5))
        numbers = " ".join(f"{number:8.5f}" for number in grad[0, :5].tolist())
        report.say(f"   {run:<10}  dL/d up_proj.weight[0, :5] = {numbers}")


def count_bytes(args) -> dict[str, int]:
    """Of all parameters (P), weights, down_proj's bias, x [B, S, D] and h [B, S, F]."""
    BS, D, F = args.batch_size * args.seq_len, args.hidden, args.width
    size = dict(P=2 * D * F + F + D, weights=2 * D * F, bias=D, x=BS * D, h=BS * F)
    return {name: n * getattr(torch, args.dtype).itemsize for name, n in size.items()}


def show_ways(report, losses: dict, tensors: dict, held: dict) -> None:
    mesh = " × ".join(map(str, report.args.mesh.values()))
    report.section(f"Five ways, the same numbers: bytes a rank holds (2D: {mesh})")
    report.say(
        "   DP (data parallel) cuts the batch, FSDP weights, too, 2D also features.\n"
        "   Kept for backward: 1/T of x and of GELU's input, output (Megatron: whole x)"
    )
    size, T = count_bytes(report.args), report.args.ranks
    P, bias, kept = size["P"], size["bias"], size["x"] + 2 * size["h"]
    predicted = {  # bytes of parameters, and of what is kept
        "without TP": (P, kept),
        "DP": (P, kept // T),
        "FSDP": (P // T, kept // T),
        "Megatron": ((P - bias) // T + bias, size["x"] + 2 * size["h"] // T),
        "2D": (P // T, kept // T),
    }
    losses = {name: losses[name] for name in predicted}
    tensors = {name: tensors[name] for name in predicted}
    report.compare("losses of ways", losses, report.allowed_loss, lambda _: "‖losses‖")
    report.compare("ways", tensors, fold=lambda _: "‖y, dL/d…‖")
    rows = []
    for name, (parameters, activations) in predicted.items():
        wanted = {
            "parameters": parameters,
            "gradients": parameters,
            "kept": activations,
        }
        for kind, n in wanted.items():
            report.check(f"{kind}, {name}", abs(held[name][kind] - n), kind="bytes")
        row = {"what": name, **held[name], "bytes": sum(held[name].values())}
        rows.append(row | {"predicted_bytes": sum(wanted.values())})
    report.measure("memory", rows)


def show_bytes(report) -> None:
    size, args = count_bytes(report.args), report.args
    x, h, P = size["x"], size["h"], size["P"]
    sizes = f"B·S {args.batch_size * args.seq_len}, D {args.hidden}, F {args.width}"
    report.section(f"Communication in a step: {sizes}, P = 2DF + F + D")
    report.say(
        "   formula × bytes of a number (FSDP: outer T, inner 1); ring: what a rank\n"
        "   sends. For DP and FSDP it grows with the weights, for Megatron with tokens"
    )
    formulas = {
        ("naive", "forward", "all-gather", "tp"): (2, "BS(F+D)", h + x),
        ("naive", "backward", "all-reduce", "tp"): (2, "BS(F+D)", h + x),
        ("DP", "backward", "all-reduce", "dp"): (4, "P", P),
    }
    for name in ("Megatron", "DTensor"):
        for phase in ("forward", "backward"):
            formulas[name, phase, "all-reduce", "tp"] = (1, "BSD", x)
    for name, outer, inner in (("FSDP", "dp", "alone"), ("2D", "outer", "inner")):
        n, x_slice = report.axes[inner], x // report.axes[outer]
        formulas |= {
            (name, "forward", "all-gather", outer): (4, "P/inner", P // n),
            (name, "forward", "all-gather", inner): (1, "BSD/outer", x_slice),
            (name, "forward", "reduce-scatter", inner): (1, "BSD/outer", x_slice),
            (name, "backward", "all-gather", outer): (
                2,
                "2DF/inner",
                size["weights"] // n,
            ),
            (name, "backward", "all-gather", inner): (2, "2BSD/outer", 2 * x_slice),
            (name, "backward", "reduce-scatter", outer): (4, "P/inner", P // n),
            (name, "backward", "reduce-scatter", inner): (1, "BSD/outer", x_slice),
        }
    report.ledger(formulas, args.steps)
    totals = {row["what"]: 0 for row in report.data["communication"]}
    for row in report.data["communication"]:
        totals[row["what"]] += row["ring"]
    report.table("totals", [{"ring, in all": "", **totals}] if totals else [])


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes kept for backward, each storage once, `skip` left out."""

    def __init__(self, skip):
        self.skip = {local(x).untyped_storage().data_ptr() for x in skip}
        self.storages = {}
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        storage = local(x).untyped_storage()
        if storage.data_ptr() not in self.skip:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return x

    def total(self) -> int:
        return sum(self.storages.values())


class CountDTensor(TorchDispatchMode):
    """Within `with`: DTensor's collectives are counted, too."""

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


def local(x: Tensor) -> Tensor:
    """This rank's piece of a DTensor, waited for; any other tensor as it is."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank."""
    return sum(local(x).nbytes for x in tensors if x is not None)


def parse_args(ranks: int) -> argparse.Namespace:
    multiples = {"hidden": 64 + -64 % ranks, "batch_size": 8 + -8 % ranks}
    parser = lesson_parser(__doc__, BREAKS, steps=3, seq_len=8, **multiples)
    parser.add_argument("--width", type=positive, help="(4 · hidden)")
    parser.add_argument("--mesh", metavar="OUTERxINNER", help="of the 2D way, as 2x2")
    args = parser.parse_args()
    args.width = args.width or 4 * args.hidden
    for name in ("hidden", "width", "batch_size"):
        must_divide(args, name, ranks, "ranks")
    args.mesh = args.mesh or (f"{ranks // 2}x2" if ranks % 2 == 0 else f"1x{ranks}")
    sizes = [int(n) if n.isdecimal() else 0 for n in args.mesh.split("x")]
    if len(sizes) != 2 or math.prod(sizes) != ranks:
        product = f"{args.mesh.replace('x', ' · ')} = {math.prod(sizes)}"
        raise ValueError(f"--mesh {args.mesh}: {product}, not {ranks} ranks")
    args.mesh = dict(zip(("outer", "inner"), sizes))
    return args


def must_divide(args, name: str, parts: int, what: str) -> None:
    """ValueError with the arithmetic if a flag's value is no multiple of parts."""
    value = getattr(args, name)
    if value % parts:
        flag, up = f"--{name.replace('_', '-')}", value + parts - value % parts
        left = f"{value} % {parts} {what} = {value % parts}, not 0"
        raise ValueError(f"{flag} {value}: {left}; take {flag} {up}")


# ==== BREAK IT

BREAKS = {
    "f": dict(
        target="CopyToTP.backward",
        old="    return all_reduce(partial_grad, ctx.tp_group), None\n",
        new="    return partial_grad, None\n",
        what="f without its all-reduce in backward",
        symptom="step 1's loss is right, so are gradients of Megatron's weights; dL/dx "
        "is not: losses part from step 2 on. The naive up_proj's gradients suffer, too",
        why="each rank used its slice of W only, so it has one of the T terms of dL/dx",
        met="github.com/NVIDIA/Megatron-LM/issues/19",
    ),
    "g": dict(
        target="RowParallelLinear.forward",
        old="    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n",
        new="    partial_y_BSD = CopyToTP.apply(partial_y_BSD, self.tp_group)\n"
        "    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n",
        what="g all-reduces in backward too, like PyTorch's differentiable all_reduce",
        symptom="step 1's loss is right; all gradients before g are T times too large",
        why="each has all of dL/dy; PyTorch's is for ranks with losses of their own",
        met="github.com/pytorch/pytorch/issues/58005, NVIDIA/Megatron-LM issue 559",
    ),
    "bias": dict(
        target="RowParallelLinear.forward",
        old="    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n"
        "    return y_BSD + self.bias",
        new="    return self.reduce(partial_y_BSD + self.bias, self.tp_group)",
        what="the row-parallel bias is added on every rank, before the sum",
        symptom="the loss is wrong from step 1 on, by little while the bias is small",
        why="the all-reduce adds up T biases: only one term of a sum may carry it",
        met="github.com/huggingface/text-generation-inference/issues/1036",
    ),
    "plain": dict(
        target="UpLinear2D.forward",
        old="    return h_bSf + AllGatherWithGrad.apply(self.bias, 0, self.outer)",
        new="    return h_bSf + all_gather(self.bias, 0, self.outer)",
        what="a plain all-gather of the bias, of which autograd knows nothing",
        symptom="no error; up_proj.bias of FSDP and 2D has no gradient, never moves",
        why="the gathered tensor has no history; the rest of the graph hides the gap",
        met="pytorch issues 190419 and 153016, lucidrains/vector-quantize-pytorch 158",
    ),
    "gelu": dict(
        target="tp_mlp",
        old="    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)\n"
        "    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)\n",
        new="    rank, T = tp_group.rank(), tp_group.size()\n"
        "    f = lambda _, x: CopyToTP.apply(x[0], tp_group).chunk(T, -1)[rank]\n"
        "    g = lambda _, h: ReduceFromTP.apply(h[0], tp_group)\n"
        "    mlp.up_proj = RowParallelLinear(full.up_proj, tp_group)\n"
        "    mlp.up_proj.register_forward_pre_hook(f)\n"
        "    mlp.up_proj.reduce = lambda partial_h, tp_group: partial_h\n"
        "    mlp.down_proj = ColumnParallelLinear(full.down_proj, tp_group)\n"
        "    mlp.down_proj.gather_output = True\n"
        "    mlp.down_proj.register_forward_pre_hook(g)\n",
        what="rows first, and GELU before the sum: of terms, not of whole elements",
        symptom="the loss is wrong from step 1 on",
        why="GELU(a) + GELU(b) is not GELU(a + b): the sum over ranks must come first",
        met="Megatron-LM, arXiv:1909.08053, sec. 3",
    ),
    "average": dict(
        target="average_gradients",
        old="        p.grad = p.grad / batch_group.size()\n",
        new="",
        what="gradients are summed over the batch's slices, and not averaged",
        symptom="step 1's loss is right; gradients are T times too large",
        why="the mean over all samples is the mean of the slices' means, not their sum",
        met="arXiv:1910.02054; docs.pytorch.org, FSDP's gradient reduction",
    ),
}


# ==== CARRIED OVER from 00, unchanged
# region


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim (lesson 00)"""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds (lesson 00)"""
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks: Partial() → Replicate() (lesson 00)"""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined: Shard(dim) → Replicate() (lesson 00)"""
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of the sum over ranks: Partial() → Shard(dim) (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last innermost (lesson 00)"""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables, says who is missing. Fold it away.


class CommCounter:
    """Calls and payload bytes of every collective, and the call this rank is in now."""

    def __init__(self):
        self.rows = {}  # (what, phase, collective, axis) → [calls, bytes]
        self.what = self.phase = ""  # labels of what is called next
        self.place, self.made, self.store = "in no call", Counter(), None
        self.limit = timedelta(seconds=60)  # of a call, in groups that a model makes

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        row = self.rows.setdefault((self.what, self.phase, collective, axis), [0, 0])
        row[0] += 1
        row[1] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one call on copies·x.nbytes bytes of payload."""
        self.count(collective, copies * x.nbytes, group.group_desc)
        call = f"{collective} of {list(x.shape)} over {group.group_desc}"
        with self.meet(call, dist.get_process_group_ranks(group)):
            yield

    @contextmanager
    def meet(self, call: str, ranks: list[int]):
        """Around a call that ends when all these ranks are in it."""
        before = self.place
        self.made[str(ranks)] += 1  # the n-th call of one meets the n-th of the others
        self.note(f"in call {self.made[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.note(before)  # not after an error: then this rank is still in it

    def note(self, place: str) -> None:
        """Where this rank is, for the others to read if something goes wrong."""
        self.place = place
        if self.store:
            self.store.set(f"place/{dist.get_rank()}", place)


COMM = CommCounter()
ALLOWED = {"float32": (1e-6, 1e-5), "float64": (1e-12, 1e-12)}  # of a loss, of a tensor


def rel_diff(got, wanted) -> float:
    """max|got − wanted| / max|wanted|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    wanted = torch.as_tensor(wanted, dtype=torch.float64).detach().cpu()
    if got.shape != wanted.shape:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    diff = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return diff if diff == diff else math.inf


def gather_objects(value, group=None) -> list:
    """The value of every rank (of a group), in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.meet("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args, self.checks, self.number, self.axes = args, {}, 0, {}
        self.allowed_loss, self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int]) -> None:
        """The first line; mesh: axis → ranks."""
        self.axes = self.data["mesh"] = mesh
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, name: str, diff: float, allowed=0.0, kind="numbers") -> bool:
        """Note one comparison on this rank; does it hold here?"""
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan, too
        self.checks[name] = {"diff": diff, "allowed": allowed, "kind": kind, "ok": ok}
        return ok

    def table(self, key: str, rows: list[dict], hide=()) -> None:
        """Print and keep rows of like keys; diff and ok are the worst of all ranks."""
        for row, of_ranks in zip(rows, zip(*gather_objects(rows))):
            for name, worst in (("diff", max), ("ok", all)):
                if name in row:
                    row[name] = worst(other[name] for other in of_ranks)
        self.data.setdefault(key, []).extend(rows)
        if not rows:  # nothing sent: there is one rank
            return
        lines = [" "] * (len(rows) + 1)  # they grow to the right, column by column
        for name in [name for name in rows[0] if name not in hide]:
            texts = [cell(name, row[name]) for row in rows]
            texts.insert(0, name.replace("_bytes", ""))
            width = max(map(len, texts))
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            lines = [f"{line}  {pad(text, width)}" for line, text in zip(lines, texts)]
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed=None, fold=str) -> None:
        """Numbers, or tensors by their norms: of several runs against the first one.

        runs: run → name → value; fold: name → the label of its row.
        """
        allowed = self.allowed if allowed is None else allowed
        rows, missing, first = {}, torch.empty(0), next(iter(runs))
        for name in dict.fromkeys(name for values in runs.values() for name in values):
            row = {"name": fold(name), **dict.fromkeys(runs, 0.0)}
            row = rows.setdefault(fold(name), row | {"diff": 0.0, "ok": True})
            wanted = runs[first].get(name, missing)
            for run, values in runs.items():
                value = values.get(name, missing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if run != first:
                    diff = rel_diff(value, wanted)
                    row["diff"] = max(row["diff"], diff)
                    row["ok"] &= self.check(f"{key}: {name}, {run}", diff, allowed)
        self.table(key, list(rows.values()))

    def measure(self, key: str, rows: list[dict], hide=()) -> None:
        """Rows with bytes and predicted_bytes, which have to be equal."""
        for row in rows:
            name = " ".join(value for value in row.values() if isinstance(value, str))
            off = abs(row["bytes"] - row["predicted_bytes"])
            equal = self.check(f"{key}: {name}", off, kind="bytes")
            row["ok"] = row.get("ok", True) and equal
        self.table(key, rows, hide)

    def ledger(self, formulas: dict, steps: int = 1) -> None:
        """Calls and bytes of a step, as counted, against formulas.

        formulas: (what, phase, collective, axis) → (calls, formula, bytes).
        """
        rows, whats = [], {what for what, *_ in formulas}
        for key in dict.fromkeys([*formulas, *COMM.rows]):
            row = dict(zip(("what", "phase", "collective", "axis"), key))
            calls, formula, predicted = formulas.get(key, (0, "none", 0))
            made, sent = (n / steps for n in COMM.rows.get(key, (0, 0)))
            ranks = self.axes.get(row["axis"], 1)
            if ranks == 1:  # nobody to send to
                calls = predicted = 0
            if row["what"] in whats and (made or calls):
                share = (ranks - 1) / ranks  # of the payload, in a half of a ring
                share = {"all-reduce": 2 * share, "send/recv": 1}.get(key[2], share)
                sent = int(sent) if sent.is_integer() else sent
                row |= {"calls": round(made), "bytes": sent, "formula": formula}
                row |= {"predicted_bytes": predicted, "ring": round(share * sent)}
                off = abs(made - calls)
                row["ok"] = self.check(f"calls: {' '.join(key)}", off, kind="calls")
                rows.append(row)
        alike = [name for name in ("phase", "axis") if len({r[name] for r in rows}) < 2]
        self.measure("communication", rows, hide=["predicted_bytes", *alike])

    def verdict(self) -> str:
        """PASS or FAIL, of all ranks' checks together."""
        rows = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                row = rows.setdefault(name, {"name": name, "bad": []} | check)
                row["diff"] = max(row["diff"], check["diff"])
                row["bad"] += [] if check["ok"] else [rank]
        bad = [row for row in rows.values() if row["bad"]]
        print()
        for row in bad[:4]:
            diff = f"off by {row['diff']:.3g}, allowed {row['allowed']:.3g}"
            print(wrap(f"✗ {row['name']}: {diff}, on ranks {row['bad']}"))
        wrong = Counter(row["kind"] for row in bad)
        kinds = Counter(row["kind"] for row in rows.values())
        counts = ", ".join(f"{wrong[kind]} of {kinds[kind]} {kind}" for kind in kinds)
        numbers = [row for row in rows.values() if row["kind"] == "numbers"]
        worst = max(numbers, key=lambda row: row["diff"])
        diff = f"worst difference {worst['diff']:.1e} (allowed {worst['allowed']:.0e})"
        text = f"{counts} differ" if bad else f"{len(rows)} checks, {diff}"
        self.data |= {"verdict": "FAIL" if bad else "PASS", "checks": [*rows.values()]}
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return f"{self.data['verdict']}  {self.data['lesson']}  {text}"


def cell(name: str, value) -> str:
    """A value as a table shows it."""
    if isinstance(value, bool):
        return "ok" if value else "✗"
    if isinstance(value, float):
        return f"{value:.1e}" if name == "diff" else f"{value:#.7g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, **sizes: int) -> Parser:
    """The flags that all lessons share, and whole numbers with their defaults."""
    about, style = doc.partition("How to read")[0], argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=style, allow_abbrev=False)
    add = parser.add_argument
    for name, default in {**sizes, "seed": 1, "timeout": 60}.items():
        said = f"({default or 'follows the mesh'})"
        add(f"--{name.replace('_', '-')}", type=positive, default=default, help=said)
    add("--dtype", choices=ALLOWED, default="float32", help="float64 is the proof")
    add("--only", type=positive, metavar="N", help="print section N alone")
    add("--break", dest="bug", choices=[*breaks, "list"], metavar="NAME", help="a bug")
    add("--json", type=Path, metavar="PATH", help="write all tables there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Put an edited copy of its target, a name or Class.name, into a lesson."""
    owner, _, name = edit["target"].rpartition(".")
    definition = getattr(module[owner], name) if owner else module[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {} if owner else module  # where the edited copy is defined
    exec(source.replace(edit["old"], edit["new"]), module, scope)
    if owner:
        setattr(module[owner], name, scope[name])


def describe(name: str, edit: dict) -> tuple[str, str]:
    """A bug as a diff; and its symptom, why, and who met it."""
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    for sign, text in (("-", edit["old"]), ("+", edit["new"])):
        lines += [f"{sign} {line}" for line in text.splitlines()]
    told = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "met")]
    return "\n".join([*lines, ""]), "\n".join(told)


def who_is_missing(places: list[str]) -> str:
    """What the ranks' notes say for certain; nobody is accused on a guess."""
    inside = [rank for rank, place in enumerate(places) if place.startswith("in call")]
    outside = [rank for rank in range(len(places)) if rank not in inside]
    if not inside:
        return "a call failed of which nothing is noted: see what the transport says"
    if outside:
        who = f"rank {outside[0]} is" if len(outside) == 1 else f"ranks {outside} are"
        text = f"{who} in no call, ranks {inside} wait"
        return f"{text}: a hang, a crash, or a skipped call"
    if len({*places}) == 1:
        return "a call failed that every rank had come to"
    text = f"ranks {inside} wait for each other"
    return f"{text}: one skipped or swapped a call, or died in it"


def fail(error: Exception, bug: str) -> None:
    """Say what went wrong, once for all ranks; end this rank."""
    words = re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]
    if COMM.store is None:
        stop(1, wrap(f"error: the ranks did not meet: {error}"), speaks=True)
    lost = re.search("[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe", words)
    lost = lost and isinstance(error, RuntimeError)
    if lost:  # others note where they are; or one died: torchrun ends us, and says whom
        time.sleep(3)
    speaks, code, lines = COMM.store.add("told", 1) == 1, 1, []
    what = f"rank {dist.get_rank()} raised {type(error).__name__}: {words}"
    if huge := re.search(r"tried to allocate \S+ \w+|overflowed.*", words, re.I):
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        code, what = 2, f"too large: {huge[0]}; this machine has {has} bytes"
    elif lost:
        ranks = range(dist.get_world_size())
        places = [COMM.store.get(f"place/{rank}").decode() for rank in ranks]
        what = who_is_missing(places)
        lines = [f"  rank {rank}: {place}"[:88] for rank, place in enumerate(places)]
        lines.append(wrap(f"  transport: {words[:150]}"))
    elif speaks and not isinstance(error, OSError):
        traceback.print_exception(error)
    stop(code, "\n".join([wrap(f"error: {what}"), *lines, bug]).strip(), speaks)


def stop(code: int, message: str, speaks: bool) -> None:
    """End this rank at once: tidying up while others are in a collective can hang."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for torchrun's report
        words = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": words}))
    sys.stdout.flush()
    if speaks:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def read_flags(parse_args, breaks: dict) -> argparse.Namespace:
    """What the command line says; the process ends here if that is a list, or wrong."""
    try:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            print(*(f"{name:<14}{breaks[name]['what']}" for name in breaks), sep="\n")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: alone nothing breaks")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        stop(2, wrap(f"error: {error}"), speaks=os.environ.get("RANK", "0") == "0")
    args.ranks, args.device, args.backend = ranks, "cpu", "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device, args.backend = f"cuda:{os.environ['LOCAL_RANK']}", "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """All ranks meet; the store that they share (a new part of it after a restart)."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of --max-restarts
    store = dist.PrefixStore(f"attempt {again}", store)
    where = {"store": store, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, timeout=limit, **where)
    return store


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    lesson, breaks = Path(module["__file__"]), module["BREAKS"]
    if "LOCAL_RANK" not in os.environ and not {"-h", "--help", "list"} & {*sys.argv}:
        command = f"torchrun --standalone --nproc_per_node={module.get('RANKS', 2)}"
        print("start it with torchrun, which makes the ranks:\n")
        print(f"    {command} {lesson.name}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # rank 0 alone prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, breaks)
    torch.set_num_threads(1)  # ranks share the cores: more threads would crawl
    torch.manual_seed(args.seed)
    diff, bug = describe(args.bug, breaks[args.bug]) if args.bug else ("", "")
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.note("in no call")
        if args.bug:
            told = lambda *_: stop(1, bug, COMM.store.add("told", 1) == 1)
            signal.signal(signal.SIGTERM, told)  # the bug has ended another rank
            args.timeout = min(args.timeout, 5)  # of the lesson's groups: it may hang
            apply_edit(breaks[args.bug], module)
            print(diff, flush=True)
        COMM.limit = timedelta(seconds=args.timeout)
        report = Report(lesson.stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{bug}\n{line}".strip(), flush=True)
        with COMM.meet("the last barrier", [*range(args.ranks)]):
            dist.barrier()
    except Exception as error:
        fail(error, bug)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all has been told
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        stop(1, line, speaks=False)
    os._exit(0)  # Python's own end can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
