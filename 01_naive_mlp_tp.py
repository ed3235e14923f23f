"""Lesson 01: one MLP, split over ranks.

70 billion parameters in 16-bit precision are 140 GB, more than one GPU holds. Tensor
parallelism (TP) splits each matrix over ranks. In an MLP it splits the first matrix by
columns and the second by rows: each rank computes its slice of the hidden layer,
nonlinearity included, and one all-reduce adds up the outputs. This is the split of
Megatron-LM, NVIDIA's training library. The naive split, both by columns, sends more.

Run it on 2 ranks (1, 3, 4 and 8 also work):

    torchrun --standalone --nproc_per_node=2 01_naive_mlp_tp.py

What you will see: the same MLP in one process, split the naive way, Megatron's way and
by PyTorch's DTensor; then data parallelism (DP). Losses, gradients, bytes sent and
bytes stored must match one process or a formula. No times: an MLP as small as this one
is slower on two ranks (when is it faster? notebook, section 7).

Exercises (explained in notebooks/01_naive_mlp_tp.ipynb):
- Delete naive_mlp's down_proj line: results stay correct, bytes get a ✗ (section 6).
- Put nn.RMSNorm(hidden) before up_proj in MLP: all values agree. Put nn.RMSNorm(width)
  before down_proj: which runs raise an error, and why only these? (section 2)
- Gate the MLP: down(silu(gate(x)) · up(x)), with a line for gate_proj wherever up_proj
  is split. Gradients agree, but backward sends too much: one f is enough (section 9).

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Words are explained in docs/glossary.md.

Shapes: B batch, S sequence, D hidden, F MLP width, T ranks in the TP group. UPPERCASE
    is the full size, lowercase this rank's slice: h_BSf is [B, S, F/T]. `partial_` in
    front: full shape, still to be summed over the group. e is the bytes per element,
    θ = (2·D·F + F + D)·e the bytes of all parameters.
Two letters come twice: F.gelu is in torch.nn.functional, which is imported as F; f and
    g in the text are Megatron's names for the functions CopyToTP and ReduceFromTP.

Sources: Megatron-LM, arXiv:1909.08053, sec. 3; docs.pytorch.org,
    torch.distributed.tensor.parallel.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, parallel
from torch.utils._python_dispatch import TorchDispatchMode

# ==== NEW in 01: one MLP, split

# From lesson 00: all_reduce, all_gather and reduce_scatter return new tensors, and
# autograd does not track them. shard(x, dim, group) is this rank's slice of a tensor
# that all ranks hold. A tensor is Replicate() if every rank holds all of it, Shard(dim)
# if each holds a slice, Partial() if the ranks' tensors are still to be summed.
# Under TP all ranks get the same batch: what is split is the work on it.


class MLP(nn.Module):
    """The reference: plain PyTorch, one process. Shapes: x [B, S, D] → [B, S, D]."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


# ---- The idea: columns, then rows
#
# With Up = up_proj.weightᵀ [D, F] and Down = down_proj.weightᵀ [F, D], and without
# biases, the MLP is Y = GELU(X·Up)·Down. Split Up by columns and Down by rows:
#
#     hₜ = X·Upₜ                 columns of X·Up, complete elements: GELU can be applied
#     Y = Σₜ GELU(hₜ)·Downₜ      one partial sum per rank: all-reduce in forward
#     dL/dX = Σₜ dL/dhₜ · Upₜᵀ   one partial sum per rank: all-reduce in backward
#     dL/dUpₜ = Xᵀ · dL/dhₜ      both factors are on rank t: nothing to send
#
#     rank 0    X ── f ── ·Up₀ ── GELU ── ·Down₀ ──┐
#                                                  g ── Y, on both ranks
#     rank 1    X ── f ── ·Up₁ ── GELU ── ·Down₁ ──┘
#
#     forward  →     f sends nothing               g all-reduces GELU(hₜ)·Downₜ
#     backward ←     f all-reduces dL/dhₜ · Upₜᵀ   g sends nothing
#
# Rows first would give partial sums of X·Up, and GELU(a) + GELU(b) is not GELU(a + b):
# an all-reduce of B·S·F elements would be needed before GELU.


def shard_parameter(full: Tensor | None, dim: int | None = None, group=None):
    """This rank's slice of a parameter, which remembers how it was sharded.

    Args:
        full: the full parameter; None, for a linear without bias, stays None.
        dim: the dim that is split over group; None to replicate the parameter.
    """
    if full is None:
        return None
    if dim is not None:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.shardings = () if dim is None else ((dim, group),)
    return p


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated."""
    return getattr(p, "shardings", ())


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first."""
    for dim, group in reversed(shardings):  # one at most in this lesson
        x = all_gather(x, dim, group)
    return x


# ---- Collectives with a backward
#
# Two numbers: y = w₀·x + w₁·x with x = 5; rank 0 holds w₀ = 1, rank 1 holds w₁ = 2, and
# L = y. In one process dL/dx = w₀ + w₁ = 3 and dL/dw₀ = dL/dw₁ = x = 5.
#     x: rank 0 computes w₀·x only, so it finds dL/dx = 1, and rank 1 finds 2. Each is
#        partial: f has to add them.
#     y: all ranks hold the sum, and the loss of each is y: each has dL/dy = 1, all of
#        it. If g added these, dL/dy would be 2, and dL/dw₀ 10 instead of 5.
# So backward depends on what the ranks do with a tensor. Different work: each has a
# partial gradient, to be summed. The same work: each has the full gradient already.
#
#     class              forward       the ranks then do    backward
#     CopyToTP (f)       nothing       different work       all-reduce
#     ReduceFromTP (g)   all-reduce    the same work        nothing
#     GatherFromTP       all-gather    the same work        slice
#
# (Backward returns a gradient for each argument of forward, None where there is none.)
# The same rule for parameters:
#
#     parameter         a rank has     uses it on           its gradient on a rank
#     up_proj           a slice        all of x             complete, of its slice
#     down_proj.weight  a slice        its slice of h       complete, of its slice
#     down_proj.bias    all of it      all of y             complete, equal on all ranks
#     any, under DP     all of it      its samples of x     partial: sum over the ranks
#
# Without that last sum the ranks' copies diverge (average_gradients below).


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # x itself, with a new backward; nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of T partial sums of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.tp_group = tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group.

    Args:
        full: the single-process layer, the same on every rank; with or without bias.
        copy_input: False if the caller has applied f, once for several layers.
        gather_output: True to make Y replicated, as the naive split does.
    Shapes and placement:
        x       [B, S, D], on a rank [B, S, D]      Replicate()
        weight  [F, D], on a rank [F/T, D]          Shard(0), the paper's columns
        bias    [F], on a rank [F/T]                Shard(0)
        return  [B, S, F], on a rank [B, S, F/T]    Shard(2)
    Communication: forward nothing, or one all-gather of B·S·F elements if
        gather_output; backward one all-reduce of B·S·D elements (f) if copy_input.
    Raises: ValueError if T does not divide F. Source: arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group = tp_group
        self.copy_input = copy_input
        self.gather_output = gather_output
        self.weight = shard_parameter(full.weight, 0, tp_group)  # [f, D]
        self.bias = shard_parameter(full.bias, 0, tp_group)  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        y_BSf = F.linear(x_BSD, self.weight, self.bias)
        if self.gather_output:
            return GatherFromTP.apply(y_BSf, 2, self.tp_group)
        return y_BSf


def naive_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Both layers by columns, each output gathered: all ranks apply GELU to all of F.

    Communication: all-gathers of B·S·F and B·S·D elements in forward, all-reduces of
        the same two sizes in backward (f of each layer: dL/dh is partial as well).
    """
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group, gather_output=True)
    mlp.down_proj = ColumnParallelLinear(full.down_proj, tp_group, gather_output=True)
    return mlp


# ---- Columns, then rows: Megatron's split, and PyTorch's


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the full dL/dy; and y is the
        # sum of the partial sums, so dL/dy is also the gradient of each of them.
        return grad, None


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group.

    Shapes and placement:
        x       [B, S, F], on a rank [B, S, F/T]    Shard(2), from ColumnParallelLinear
        weight  [D, F], on a rank [D, F/T]          Shard(1), the paper's rows
        bias    [D], on a rank [D]                  Replicate()
        return  [B, S, D], on a rank [B, S, D]      Replicate()
    Communication: forward one all-reduce of B·S·D elements (g); backward none.
    Raises: ValueError if T does not divide F. Source: arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g, under a name: lesson 04 puts another here
        self.weight = shard_parameter(full.weight, 1, tp_group)  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        if self.bias is None:
            return y_BSD
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward.

    Communication: each all-reduce is of B·S·D elements.
    """
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


def dtensor_mlp(full: MLP, tp_group: dist.ProcessGroup) -> nn.Module:
    """The same split by PyTorch, which inserts f and g itself.

    parallelize_module makes each weight a DTensor: a tensor that knows its placement on
    a mesh of ranks, here our group as one axis. The plan says by columns or by rows; y
    comes out of down_proj as Partial(), and making it Replicate() is g's all-reduce.
    """
    device = full.up_proj.weight.device.type
    mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    plan = {
        "up_proj": parallel.ColwiseParallel(),
        "down_proj": parallel.RowwiseParallel(),
    }
    return parallel.parallelize_module(copy.deepcopy(full), mesh, plan)


# ---- For comparison: data parallelism (DP) splits the batch, not the weights


def average_gradients(parameters, dp_group: dist.ProcessGroup) -> None:
    """Average the gradients of ranks that have different samples.

    A rank's loss is the mean over its own samples, and the mean over all samples is the
    mean of these. Communication: one all-reduce per parameter, of its size.
    """
    for p in parameters:
        if p.grad is not None:  # None: unused in this step, on every rank
            p.grad = all_reduce(p.grad, dp_group) / dp_group.size()


# ---- Optional: two more collectives with a backward, for lesson 04


class AllGatherWithGrad(GatherFromTP):
    """The same forward, but different work follows: reduce-scatter backward."""

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.tp_group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


# ==== RUN


def main(args, report: Report) -> None:
    """Train the same MLP on the same batch, split in different ways, and compare."""
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    dp_group = mesh_groups({"dp": args.ranks}, args.timeout)["dp"]  # the same ranks
    size = sizes_of_mlp(args)
    report.begin({"tp": args.ranks}, size)
    report.mesh = {"tp": args.ranks, "dp": args.ranks}  # the axes that section 5 counts
    full, batch = make_mlp_and_batch(args)

    runs = {}
    mlp = copy.deepcopy(full)
    runs["without TP"] = train_mlp("without TP", mlp, batch, args)
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.column("naive"):
        runs["naive"] = train_mlp("naive", naive_mlp(full, tp_group), batch, args)
    with report.column("Megatron"):  # the run with TP, as in all later lessons
        mlp = tp_mlp(full, tp_group)
        show_placements_mlp(report, full, mlp)
        runs["Megatron"] = train_mlp("Megatron", mlp, batch, args)
    with report.column("DTensor"), CountDTensor("tp"):
        runs["DTensor"] = train_mlp("DTensor", dtensor_mlp(full, tp_group), batch, args)
    show_training_mlp(report, runs)
    if "Megatron" in runs:
        show_replicas_mlp(report, runs["Megatron"], tp_group)
    show_gradients_mlp(report, runs)
    with report.column("DP"):
        mlp = copy.deepcopy(full)
        runs["DP"] = train_mlp("DP", mlp, batch, args, dp_group)
    show_dp_mlp(report, runs)
    show_memory_mlp(report, runs, size)
    show_communication_mlp(report, size)


def make_mlp_and_batch(args) -> tuple[MLP, Tensor]:
    """The full MLP, and x and target stacked: the same on every rank, by the seed."""
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    full = MLP(args.hidden, args.width).to(args.device, dtype)
    batch = torch.randn(2, args.batch_size, args.seq_len, args.hidden)
    return full, batch.to(args.device, dtype)


# ---- Training


class MLPRun(NamedTuple):
    mlp: nn.Module
    x: nn.Parameter  # this rank's input, trained as well
    losses: dict[str, float]  # of the full batch, by step
    tensors: dict[str, Tensor]  # y and gradients of step 1, unsharded


def train_mlp(name, mlp, batch, args, dp_group=None) -> MLPRun:
    """Train mlp, and x as if it were the output of a layer below, on one batch.

    A wrong dL/dx moves x to a wrong place, so it shows in the next step's loss.
    dp_group: the ranks that share the batch; None if each has all of it.
    """
    dim = None if dp_group is None else 0
    x = shard_parameter(batch[0], dim, dp_group)
    target = shard_parameter(batch[1], dim, dp_group).detach()
    optimizer = sgd_of_mlp(mlp, x, args)
    losses = {}
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        # COMM.label does nothing but name the collectives inside, for section 5.
        with COMM.label(name, "forward"):
            y = mlp(x)
        loss = squared_error(y, target)
        with COMM.label(name, "backward"):
            loss.backward()
            if dp_group is not None:
                average_gradients(mlp.parameters(), dp_group)
                x.grad = x.grad / dp_group.size()  # no other rank has these samples
        # For the report only, so without a label: the full y and its loss.
        full_y = unshard(y.detach(), x.shardings)
        losses[f"loss, step {step}"] = squared_error(full_y, batch[1]).item()
        if step == 1:
            tensors = results_of_mlp(mlp, x, full_y)
        optimizer.step()
    return MLPRun(mlp, x, losses, tensors)


def sgd_of_mlp(mlp: nn.Module, x: Tensor, args) -> torch.optim.SGD:
    """Plain gradient descent, with a larger rate for x.

    The loss is a mean over B·S tokens. The gradient of a weight sums over all of them,
    that of a row of x comes from one: it is B·S times smaller, and x would barely move.
    """
    rate = 0.25 / args.hidden
    rate_of_x = rate * args.batch_size * args.seq_len
    groups = [{"params": mlp.parameters()}, {"params": [x], "lr": rate_of_x}]
    return torch.optim.SGD(groups, lr=rate)


def results_of_mlp(mlp: nn.Module, x: Tensor, full_y: Tensor) -> dict[str, Tensor]:
    """y and all gradients of a step, unsharded."""
    tensors = {"y": full_y, "dL/d x": unshard_gradient(x)}
    for name, p in mlp.named_parameters():
        tensors[f"dL/d {name}"] = unshard_gradient(p).clone()
    return tensors


def squared_error(y_BSD: Tensor, target_BSD: Tensor) -> Tensor:
    """Squared distance to the target, a mean over tokens."""
    return (y_BSD - target_BSD).square().sum(-1).mean()


def unshard_gradient(p: Tensor) -> Tensor:
    """The full gradient, from the slices of all ranks; zeros if there is none."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    if isinstance(grad, DTensor):
        return grad.full_tensor()  # an all-gather by PyTorch
    return unshard(grad, shardings_of(p))


# ---- The sections of the output, in order


def show_placements_mlp(report: Report, full: MLP, tp: MLP) -> None:
    """The parameters' shapes, and how Megatron's split shards them."""
    on_rank = dict(tp.named_parameters())
    rows = []
    for name, p in full.named_parameters():
        slice_of_p = on_rank.get(name, torch.empty(0))  # your edit may have removed it
        row = {"parameter": name, "global": list(p.shape)}
        row["on a rank"] = list(slice_of_p.shape)
        # The placement is what the parameter remembers, not what it should be.
        placements = [f"Shard({dim})" for dim, _ in shardings_of(slice_of_p)]
        row["placement"] = ", ".join(placements) or "Replicate()"
        rows.append(row)
    report.section("Who holds what under TP: Megatron's split")
    report.say("   torch stores a weight as (out, in): the paper's columns are dim 0.")
    report.table("holdings", rows)


def show_training_mlp(report: Report, runs: dict[str, MLPRun]) -> None:
    """Losses of the runs that have the full batch on every rank."""
    report.section("Losses: squared distance to the target, mean over tokens")
    report.say(
        "   x is also trained: a wrong dL/dx shows in the loss of the next step.\n"
        "   diff = max|a − b| / max|b| over elements, b without TP, a of the worst run"
    )
    losses = values_of(runs, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)


def show_replicas_mlp(report: Report, run: MLPRun, tp_group) -> None:
    """What is replicated must be bitwise identical on all ranks after training."""
    rows = []
    for name, p in dict(run.mlp.named_parameters(), x=run.x).items():
        if not shardings_of(p):
            replicas = all_gather(p[None], 0, tp_group)
            diff = max(rel_diff(replica, replicas[0]) for replica in replicas)
            row = {"Megatron's replicas on all ranks": name, "diff": diff}
            report.expect(row, "diff", "replicas", name, 0.0)
            rows.append(row)
    report.table("replicas", rows)


def show_gradients_mlp(report: Report, runs: dict[str, MLPRun]) -> None:
    """Output and gradients of step 1."""
    report.section("Output and gradients of step 1: norms, and diff of the elements")
    outputs = {}
    gradients = {}
    for name, run in runs.items():
        gradients[name] = dict(run.tensors)
        outputs[name] = {"y": gradients[name].pop("y")}
    report.compare("outputs", outputs)
    report.compare("gradients", gradients)


def show_dp_mlp(report: Report, runs: dict[str, MLPRun]) -> None:
    """Data parallelism has the same results, with other bytes per rank."""
    report.section("Data parallelism: every rank has all weights, 1/T of the batch")
    compared = {name: runs[name] for name in ("without TP", "DP") if name in runs}
    losses = values_of(compared, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)
    tensors = values_of(compared, "tensors")
    report.compare("gradients", tensors, fold=lambda name: "y and gradients")


def show_memory_mlp(report: Report, runs: dict[str, MLPRun], size: dict) -> None:
    """Bytes per rank of parameters, gradients and activations saved for backward."""
    # run → parameters (gradients have their shapes); saved: x, GELU's input and output.
    formulas = {
        "without TP": ("θ", "B·S·(D + 2·F)·e"),
        "naive": ("θ/T", "B·S·(D + 2·F)·e"),  # GELU is applied to all of F
        "Megatron": ("(θ - D·e)/T + D·e", "B·S·(D + 2·F/T)·e"),  # x, a bias: replicated
        "DP": ("θ", "B·S·(D + 2·F)·e/T"),
    }
    report.say(
        "   Bytes per rank; saved = saved for backward: x, input, output of GELU"
    )
    show_memory_rows(report, runs, formulas, size)


def show_memory_rows(report: Report, runs: dict, formulas: dict, size: dict) -> None:
    """A row for each run that has formulas: parameters, gradients, saved."""
    rows = []
    for name, (parameters, saved) in formulas.items():
        if name not in runs:
            continue
        row = {"run": name}
        row.update(bytes_stored_mlp(runs[name]))
        row.update({"params =": parameters, "saved =": saved})
        expected = evaluate(parameters, size)
        report.expect(row, "params", "memory", f"parameters, {name}", expected)
        report.expect(row, "grads", "memory", f"gradients, {name}", expected)
        expected = evaluate(saved, size)
        report.expect(row, "saved", "memory", f"saved, {name}", expected)
        row["ok"] = None  # the table sets it, by what is off
        rows.append(row)
    report.table("memory", rows)


def bytes_stored_mlp(run: MLPRun) -> dict[str, int]:
    """Measured on this rank, at the end of training and in one more forward pass."""
    parameters = list(run.mlp.parameters())
    saved = SavedBytes(skip=parameters)
    with saved:
        run.mlp(run.x)  # without a label: section 5 does not count these calls
    return {
        "params": nbytes(parameters),
        "grads": nbytes(p.grad for p in parameters),
        "saved": saved.total(),
    }


def show_communication_mlp(report: Report, size: dict[str, int]) -> None:
    """Collectives per step against formulas; from how many tokens on DP sends less."""
    formulas = {
        # One gather of each layer's output, h and y; in backward the f of each layer.
        Call("naive", "forward", "all-gather", "tp"): "1 × B·S·F·e and 1 × B·S·D·e",
        Call("naive", "backward", "all-reduce", "tp"): "1 × B·S·F·e and 1 × B·S·D·e",
    }
    for run in ("Megatron", "DTensor"):
        formulas[Call(run, "forward", "all-reduce", "tp")] = "1 × B·S·D·e"  # g
        formulas[Call(run, "backward", "all-reduce", "tp")] = "1 × B·S·D·e"  # f
    # The gradients of two weights and two biases.
    formulas[Call("DP", "backward", "all-reduce", "dp")] = (
        "2 × D·F·e and 2 × (F + D)·e/2"
    )
    report.section("Communication per step; ring: bytes that a rank of a ring sends")
    report.ledger(formulas, size, steps=report.args.steps)
    if report.args.ranks == 1:
        report.say("   One rank sends nothing.")
        return
    totals = {"ring, total": "bytes"}
    for row in report.data["communication"]:
        totals[row["run"]] = totals.get(row["run"], 0) + row["ring"]
    report.table("totals", [totals])
    equal = size["θ"] / evaluate("2·D·e", size)
    tokens = evaluate("B·S", size)
    report.say(
        "   Megatron all-reduces activations, 2·B·S·D·e bytes; DP gradients, θ bytes.\n"
        f"   Megatron sends more if B·S > θ/(2·D·e) = {equal:.1f}; here it is {tokens}."
    )


# ---- Measuring


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes saved for backward, each storage once, `skip` left out."""

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
    """Within `with`: DTensor's collectives are counted as well."""

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
        name = func._schema.name
        if name in self.names:
            # The payload is the full tensor: of an all-gather, the output.
            COMM.count(self.names[name], max(args[0].nbytes, out.nbytes), self.axis)
        return out


def local(x: Tensor) -> Tensor:
    """This rank's slice of a DTensor, waited for; any other tensor as it is."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank."""
    return sum(local(x).nbytes for x in tensors if x is not None)


def values_of(runs: dict, field: str) -> dict:
    """run → its losses, gradients, … (whatever `field` names)."""
    return {name: getattr(run, field) for name, run in runs.items()}


# ==== BREAK IT

BREAKS = {
    "f": dict(
        target="CopyToTP.backward",
        old="        return all_reduce(partial_grad, ctx.tp_group), None\n",
        new="        return partial_grad, None\n",
        what="f without its all-reduce in backward",
        symptom="in step 1 the loss and the gradients of Megatron's weights are "
        "correct, but dL/dx is wrong, so the losses diverge from step 2 on; in the "
        "naive split the gradients of up_proj are wrong as well",
        why="each rank computed dL/dx from its slice of W only, which is one of T "
        "partial sums",
        reported="github.com/NVIDIA/Megatron-LM/issues/19",
        audit="gradient sum",
    ),
    "g": dict(
        target="RowParallelLinear.forward",
        old="    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n",
        new="    partial_y_BSD = CopyToTP.apply(partial_y_BSD, self.tp_group)\n"
        "    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n",
        what="g also all-reduces in backward, like PyTorch's differentiable all_reduce",
        symptom="the loss of step 1 is correct; gradients of all that precedes g are "
        "T times too large",
        why="each rank already has the full dL/dy, because all compute the same loss; "
        "PyTorch's all_reduce is for ranks with different losses",
        reported="github.com/pytorch/pytorch/issues/58005; NVIDIA/Megatron-LM, 559",
        audit="gradient factor",
    ),
    "bias": dict(
        target="RowParallelLinear.forward",
        old="    partial_y_BSD = F.linear(x_BSf, self.weight)\n",
        new="    partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)\n"
        "    return self.reduce(partial_y_BSD, self.tp_group)\n",
        what="the row-parallel bias is added on every rank, before the sum",
        symptom="the loss is wrong from step 1 on, slightly while the bias is small",
        why="the all-reduce adds T biases: only one partial sum may contain it",
        reported="github.com/huggingface/text-generation-inference/issues/1036",
        audit="forward bias",
    ),
    "average": dict(
        target="average_gradients",
        old="            p.grad = all_reduce(p.grad, dp_group) / dp_group.size()\n",
        new="            p.grad = all_reduce(p.grad, dp_group)\n",
        what="gradients are summed over the slices of the batch and not averaged",
        symptom="the loss of step 1 is correct; gradients of DP are T times too large",
        why="the mean over all samples is the mean of the slices' means, not their sum",
        reported="arXiv:1910.02054; docs.pytorch.org, FSDP's gradient reduction",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    # The ranks have to divide D, F and B: 3 ranks get 66, 264 and 9.
    multiples = {
        "hidden": ranks * math.ceil(64 / ranks),
        "batch_size": ranks * math.ceil(8 / ranks),
    }
    parser = lesson_parser(__doc__, BREAKS, sections=5, steps=3, seq_len=8, **multiples)
    parser.add_argument("--width", type=positive, help="F (4 · hidden)")
    args = parser.parse_args()
    args.width = args.width or 4 * args.hidden
    for name in ("hidden", "width", "batch_size"):
        must_divide(args, name, ranks, "ranks")
    raise_refused(args)
    return args


def sizes_of_mlp(args) -> dict[str, int]:
    """The letters of the shape legend."""
    size = dict(B=args.batch_size, S=args.seq_len, D=args.hidden, F=args.width)
    size["T"] = args.ranks
    size["e"] = getattr(torch, args.dtype).itemsize
    size["θ"] = evaluate("(2·D·F + F + D)·e", size)
    return size


def must_divide(args, name: str, parts: int, what: str) -> None:
    """Refuse a flag's value that is no multiple of parts, with the arithmetic."""
    value = getattr(args, name)
    if value % parts:
        multiple = value + parts - value % parts
        if multiple >= 2**31:  # the largest value of a flag is 2^31 − 1
            multiple -= parts
        reason = f"{value} % {parts} {what} = {value % parts}, not 0"
        refuse(args, name, reason, multiple)


def refuse(args, name: str, reason: str, value: int) -> None:
    """Keep why a flag is wrong, and set a right value, on which others may depend."""
    flag = f"--{name.replace('_', '-')}"
    refused = vars(args).setdefault("refused", [])
    refused.append((flag, f"{flag} {getattr(args, name)}: {reason}", value))
    setattr(args, name, value)


def raise_refused(args) -> None:
    """ValueError with the first reason, and with all flags that have to change."""
    refused = vars(args).pop("refused", [])
    if refused:
        take = {flag: value for flag, _, value in refused}
        flags = " ".join(f"{flag} {value}" for flag, value in take.items())
        raise ValueError(f"{refused[0][1]}; take {flags}")


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
from datetime import timedelta


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if that is impossible.

    (lesson 00)"""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    (lesson 00)"""
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    (lesson 00)"""
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    (lesson 00)"""
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def ring_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends for a payload of nbytes (lesson 00)."""
    if collective == "send/recv":
        return nbytes
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return round(rounds * nbytes * (ranks - 1) / ranks)


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group along each axis of a mesh (lesson 00)."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        for line in lines:
            # group_desc is the axis under which COMM counts a group's calls.
            # Every rank creates every group, also those it is not in, in one order:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables and explains errors. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import argparse
import ctypes
import gc
import inspect
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


class CommCounter:
    """Counts collectives, and tells other ranks which one this rank is in."""

    def __init__(self):
        self.calls = Counter()  # Call → number of calls
        self.bytes = Counter()  # Call → bytes of payload
        self.run = ""
        self.phase = ""
        self.store = None  # key-value store that all ranks share
        self.status = "in no call"
        self.entered = Counter()  # number of calls this rank has entered, by group

    @contextmanager
    def label(self, run: str, phase: str):
        """Within `with`: collectives are counted as this phase of this run."""
        before = [self.run, self.phase]
        self.run = run
        self.phase = phase
        try:
            yield
        finally:  # calls without a label are the report's own and are in no table
            self.run, self.phase = before

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        call = Call(self.run, self.phase, collective, axis)
        self.calls[call] += 1
        self.bytes[call] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one collective with a payload of copies · x.nbytes bytes."""
        axis = group.group_desc
        self.count(collective, copies * x.nbytes, axis)
        ranks = dist.get_process_group_ranks(group)
        with self.blocking(f"{collective} of {list(x.shape)} over {axis}", ranks):
            yield

    @contextmanager
    def blocking(self, call: str, ranks: list[int]):
        """Around a call that returns only after all these ranks have entered it."""
        before = self.status
        # The n-th call of one rank is matched with the n-th call of the others.
        self.entered[str(ranks)] += 1
        self.set_status(f"in call {self.entered[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.set_status(before)  # not after an error: this rank is still in the call

    def set_status(self, status: str) -> None:
        """Write down where this rank is, so that others can read it after an error."""
        self.status = status
        if self.store is not None:
            self.store.set(f"status/{dist.get_rank()}", status)

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run?"""
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        try:
            self.store.wait(keys, timedelta(seconds=5))
        except RuntimeError:  # some rank did not raise
            return False
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = "runs outputs gradients replicas norms losses parameters".split()


def rel_diff(got, expected) -> float:
    """max|got − expected| / max|expected|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    diff = ((got - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok
        self.raised = {}  # run → the error that ended it
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int]) -> None:
        """Print the first two lines. size: letter of the shape legend → number."""
        self.mesh = mesh
        self.data["mesh"] = mesh
        self.data["size"] = size
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))
        steps = getattr(self.args, "steps", 0)
        if steps > 100:
            print(f"First the reference takes {steps} steps; nothing is printed then.")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, kind: str, name: str, diff: float, allowed: float = 0.0) -> bool:
        """Record one comparison of this rank. Return whether it holds."""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        self.checks[name] = {"kind": kind, "diff": diff, "allowed": allowed, "ok": ok}
        return ok

    def expect(self, row: dict, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(row[column] - predicted)):
            off.append(column)
        row.setdefault("predicted", {})[column] = f"{name}: predicted {predicted:,}"

    @contextmanager
    def column(self, run: str):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if is_lost(error) or not COMM.all_raised(run, error):
                raise
            COMM.set_status("in no call")
            if dist.get_rank() == 0:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            print(wrap(f"   {run} raised {self.raised[run]}"), flush=True)
        self.check("runs", f"{run} completes", int(run in self.raised))

    def table(self, key: str, rows: list[dict], hide: list[str] = ()) -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank. Cells that failed
        on any rank are marked ✗. row["predicted"] maps a cell to what was predicted for
        it, printed below the table if it failed. hide: columns to keep, not to print.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for place, other in enumerate(rows_of_rank):
                merge_row(find_row(rows, other, place), other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if rows:
            self.print_rows(rows, hide)

    def print_rows(self, rows: list[dict], hide: list[str]) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted"):
                continue
            texts = [name]
            for row in rows:
                mark = "✗" if name in row.get("off", []) else ""
                texts.append(cell(name, row[name]) + mark)
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        for row in rows:
            lines.extend(explain_row(row))
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed: float = 0.0, fold=str) -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        all its values and the largest relative difference of any of them.
        """
        allowed = allowed or self.allowed
        nothing = torch.empty(0)  # stands for what a run does not have
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                rows[label].update(dict.fromkeys(self.raised, "raised"))
                if len(runs) > 1:  # otherwise there is nothing to compare with
                    rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                value = values.get(name, nothing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                diff = rel_diff(value, reference.get(name, nothing))
                row["diff"] = max(row["diff"], diff)
                if not self.check(key, f"{name}, {run}", diff, allowed):
                    row["off"].append(run)
        self.table(key, list(rows.values()))

    def ledger(self, formulas: dict[Call, str], size: dict, steps=1, hide=()) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → "calls × bytes per call", as it is printed and evaluated. Calls
        of different sizes: "1 × 8 and 2·L × D·e".
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            ranks = self.mesh.get(call.axis, 1)
            if call.run not in runs or ranks == 1:  # one rank sends nothing
                continue
            formula = formulas.get(call, "0 × 0")
            calls = 0
            nbytes = 0
            for product in formula.split(" and "):
                factors = [evaluate(factor, size) for factor in product.split(" × ")]
                calls += factors[0]
                # Multiplied before rounding: a size may be a mean over micro-batches.
                nbytes += evaluate(f"({product})".replace(" × ", ")·("), size)
            if calls == 0 and COMM.calls[call] == 0:
                continue
            row = call._asdict()
            row["calls"] = per_step(COMM.calls[call], steps)
            row["bytes"] = per_step(COMM.bytes[call], steps)
            row["formula"] = formula
            row["ring"] = ring_bytes(call.collective, row["bytes"], ranks)
            name = " ".join(call)
            self.expect(row, "calls", "calls", name, calls)
            self.expect(row, "bytes", "bytes", name, nbytes)
            rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = list(hide)
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        self.table("communication", rows, hide)

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks: the largest diff, and the ranks where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                if name not in merged:
                    merged[name] = dict(check, name=name, ranks=[])
                merged[name]["diff"] = max(merged[name]["diff"], check["diff"])
                if not check["ok"]:
                    merged[name]["ok"] = False
                    merged[name]["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """PASS or FAIL; above FAIL, the worst failed check of each kind."""
        checks = sorted(self.merge_checks(), key=lambda check: -check["diff"])
        kinds = dict.fromkeys(CAUSES_FIRST)
        kinds.update(dict.fromkeys(check["kind"] for check in checks))
        counts = []
        print()
        for kind in kinds:
            of_kind = [check for check in checks if check["kind"] == kind]
            failed = [check for check in of_kind if not check["ok"]]
            if failed:
                worst = failed[0]
                diff = f"off by {worst['diff']:.3g}, allowed {worst['allowed']:.3g}"
                print(wrap(f"✗ {worst['name']}: {diff}, on ranks {worst['ranks']}"))
                counts.append(f"{kind} {len(failed)}/{len(of_kind)}")
        text = f"failed: {', '.join(counts)}"
        if not counts:
            text = f"{len(checks)} checks, worst difference {checks[0]['diff']:.1e}"
            text += f" (allowed {checks[0]['allowed']:.0e})"
        self.data["verdict"] = "FAIL" if counts else "PASS"
        self.data["checks"] = checks
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return wrap(f"{self.data['verdict']}  {self.data['lesson']}  {text}")


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def find_row(rows: list[dict], other: dict, place: int) -> dict:
    """The row with the same label as another rank's row, which is row `place` there.

    Pipeline stages may have different rows. A row that failed is added if it is new.
    """
    if place < len(rows) and label_of(rows[place]) == label_of(other):
        return rows[place]
    for row in rows:
        if label_of(row) == label_of(other):
            return row
    if other.get("off"):
        rows.append(dict(other, off=[]))
        return rows[-1]
    return {}


def label_of(row: dict) -> list[str]:
    """The texts that a row begins with; no texts if it begins with a number."""
    label = []
    for value in row.values():
        if not isinstance(value, str):
            break
        label.append(value)
    return label


def merge_row(row: dict, other: dict, rank: int) -> None:
    """Add to a row what the same row of another rank says about failed checks."""
    for column in other.get("off", []):
        if column not in row["off"]:
            row["off"].append(column)
    if other.get("off"):
        row.setdefault("off_ranks", []).append(rank)
    if "diff" in row:
        row["diff"] = max(row["diff"], other["diff"])


def explain_row(row: dict) -> list[str]:
    """Lines below a table: what was predicted, and where, if a check failed."""
    lines = []
    for column in row.get("off", []):
        if column in row.get("predicted", {}):
            lines.append(f"   ✗ {column} of {row['predicted'][column]}")
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = next(iter(row.values()))
        lines.append(f"   ✗ {label}: fails on ranks {ranks}, not on rank 0")
    return lines


def cell(name: str, value) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
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


def lesson_parser(doc: str, breaks: dict, sections: int, **sizes: int) -> Parser:
    """The flags that all lessons share, and integer flags with their defaults.

    sections: how many sections the output has. sizes: flag → default; 0 for a default
    that is derived from the mesh.
    """
    parser = Parser(
        description=(doc or "").partition("How to read")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, default in dict(sizes, seed=1, timeout=60).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    numbers = range(1, sections + 1)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=numbers, metavar="N", help=text)
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy.

    In a script of beyond/ the target may be a lesson's: every module that has it under
    its name gets the edited copy.
    """
    owner, _, name = edit["target"].rpartition(".")
    modules = [getattr(other, "__dict__", {}) for other in sys.modules.values()]
    modules = [other for other in modules if other.get("COMM") is COMM]
    home = next(other for other in [module, *modules] if (owner or name) in other)
    definition = getattr(home[owner], name) if owner else home[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {}  # where the edited copy is defined
    names = getattr(definition, "__globals__", home)  # that the copy may use
    exec(source.replace(edit["old"], edit["new"]), names, scope)
    if owner:
        setattr(home[owner], name, scope[name])
        return
    for other in [module, *modules]:
        if other.get(name) is definition:
            other[name] = scope[name]


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, where it was reported, and what the audit says."""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    if "audit" in edit:  # how it is found in a model of your own
        lines.append(wrap(f'audit: tools/audit.py reports it as "{edit["audit"]} …"'))
    return "\n".join(lines)


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front."""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def is_lost(error: Exception) -> bool:
    """Is it the transport's: a timeout, or a connection that the other end closed?"""
    # The last two are what TORCH_DISTRIBUTED_DEBUG=DETAIL reports instead of a timeout.
    words = "[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe|monitoredBarrier|mismatch"
    is_found = re.search(words, first_line(error)) is not None
    return isinstance(error, RuntimeError) and is_found


def who_is_missing(statuses: list[str]) -> str:
    """What the statuses of all ranks say for certain; no rank is blamed on a guess."""
    waiting = []
    missing = []
    for rank, status in enumerate(statuses):
        ranks = waiting if status.startswith("in call") else missing
        ranks.append(rank)
    if not waiting:
        return "a call failed that is not one of the lesson's own"
    if missing:
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        text = f"{who} not in a collective, while ranks {waiting} are waiting in one: "
        return text + "it hung, crashed or skipped a call"
    if len(set(statuses)) == 1:
        return "a collective failed although every rank had entered it"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def describe_hang(error: Exception) -> str:
    """Which call each rank is in, by what it wrote down itself."""
    ranks = range(dist.get_world_size())
    statuses = [COMM.store.get(f"status/{rank}").decode() for rank in ranks]
    lines = [wrap(f"error: {who_is_missing(statuses)}")]
    for rank in ranks:
        lines.append(f"  rank {rank}: {statuses[rank]}"[:88])
    silent = [rank for rank in ranks if not COMM.store.check([f"failed/{rank}"])]
    if silent:  # the others have waited 3 seconds for it
        text = f"  no error was raised on ranks {silent} so far: they hang, "
        lines.append(wrap(text + "are stopped, or are still computing"))
    lines.append(wrap(f"  transport: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank."""
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    COMM.store.set(f"failed/{dist.get_rank()}", text)
    if is_lost(error):  # let others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif is_lost(error):
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # for torchrun's report
        # torchrun calls the earliest failure the root cause: the one that is printed.
        seconds = int(time.time()) + (0 if is_reporter else 3600)
        extra = {"timestamp": str(seconds)}
        details = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(details))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def read_flags(parse_args, module: dict) -> argparse.Namespace:
    """The command line; the process ends here if it is wrong, or asks for a list."""
    try:
        if not module["__doc__"]:
            raise ValueError("PYTHONOPTIMIZE=2 removes docstrings, our training text")
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            for name, edit in module["BREAKS"].items():
                print(f"{name:<14}{edit['what']}")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: one rank shows no bug")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        # One rank of each host reports: on several hosts the flags may differ.
        is_reporter = os.environ.get("LOCAL_RANK", "0") == "0"
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    dist.init_process_group(
        backend, timeout=limit, store=store, rank=rank, world_size=ranks
    )
    return store


def end_with_torchrun() -> None:
    """If torchrun is killed, Linux kills this rank as well, even if it sleeps."""
    if sys.platform == "linux":
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis."""

    def on_sigterm(*_):
        exit_rank(1, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    args.timeout = min(args.timeout, 15)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        # The command is in the lesson's docstring; flags are those that were given.
        command = "torchrun --standalone --nproc_per_node=2"
        if module["__doc__"]:
            command = re.search(r"torchrun \S+ \S+", module["__doc__"])[0]
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
    end_with_torchrun()
    torch.set_num_threads(1)  # ranks share the cores: more threads would be slower
    torch.manual_seed(args.seed)
    diagnosis = diagnosis_of(module["BREAKS"][args.bug]) if args.bug else ""
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.set_status("in no call")
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{diagnosis}\n{line}".strip(), flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        exit_rank(1, line, is_reporter=False)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
