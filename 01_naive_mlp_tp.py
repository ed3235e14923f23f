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
stored must match one process or a formula. No times: an MLP as small as this one is
slower on two ranks (from which size on it is faster: notebook, section 7).

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
# Read lines 54 to 296, in about 24 minutes. What follows is optional, up to RUN.

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
#     aₜ = X·Upₜ                 columns of X·Up, complete elements: GELU can be applied
#     Y = Σₜ GELU(aₜ)·Downₜ      one partial sum per rank: g all-reduces, in forward
#     dL/dX = Σₜ dL/daₜ · Upₜᵀ   one partial sum per rank: f all-reduces, in backward
#     dL/dUpₜ = Xᵀ · dL/daₜ      both factors are on rank t: nothing to send
#
#     rank 0    X ── f ── ·Up₀ ── GELU ── ·Down₀ ──┐
#                                                  g ── Y, on both ranks
#     rank 1    X ── f ── ·Up₁ ── GELU ── ·Down₁ ──┘
#
# In forward f does nothing, in backward g does nothing.
#
# Rows first would give partial sums of X·Up, and GELU(a) + GELU(b) is not GELU(a + b):
# an all-reduce of B·S·F elements would be needed before GELU.


def shard_parameter(full: Tensor | None, dim: int | None = None, group=None):
    """This rank's slice of a parameter, which remembers how it was sharded.

    dim: split over group; None to replicate. full: None, for no bias, stays None.
    """
    if full is None:
        return None
    if dim is not None:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.shardings = () if dim is None else ((dim, group),)  # RUN asks: is it a slice?
    return p


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated."""
    return getattr(p, "shardings", ())


# ---- Collectives with a backward
#
# Two numbers: y = w₀·x + w₁·x with x = 5; rank 0 holds w₀ = 1, rank 1 holds w₁ = 2, and
# L = y. In one process dL/dx = w₀ + w₁ = 3 and dL/dw₀ = dL/dw₁ = x = 5.
#     x: rank 0 computes w₀·x only and finds dL/dx = 1, rank 1 finds 2: f has to add.
#     y: all ranks hold the sum, and each has dL/dy = 1. If g added these, dL/dy would
#        be 2, and dL/dw₀ would be 10 instead of 5.
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
    """Megatron's MLP: columns, then rows.

    Communication: one all-reduce of B·S·D elements forward, one backward.
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
    column = parallel.ColwiseParallel()
    plan = {"up_proj": column, "down_proj": parallel.RowwiseParallel()}
    return parallel.parallelize_module(copy.deepcopy(full), mesh, plan)


# ---- For comparison: data parallelism (DP) splits the batch, not the weights


def average_gradients(parameters, dp_group: dist.ProcessGroup) -> None:
    """Average the gradients of ranks that have different samples.

    Otherwise the ranks' copies would diverge. A rank's loss is the mean over its own
    samples; that of the full batch is the mean of these.
    Communication: one all-reduce per parameter, of its size.
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
    check_reference_mlp(report, runs["without TP"], size)
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.column("naive"):
        runs["naive"] = train_mlp("naive", naive_mlp(full, tp_group), batch, args)
    with report.column("Megatron"):  # the run with TP, as in all later lessons
        mlp = tp_mlp(full, tp_group)
        show_placements_mlp(report, full, mlp)
        runs["Megatron"] = train_mlp("Megatron", mlp, batch, args)
    with report.column("DTensor", "plans"), CountDTensor("tp"):
        runs["DTensor"] = train_mlp("DTensor", dtensor_mlp(full, tp_group), batch, args)
    show_results_mlp(report, runs)
    if "Megatron" in runs:
        show_replicas_mlp(report, runs["Megatron"], tp_group)
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
    output: dict[str, Tensor]  # y of step 1, unsharded
    gradients: dict[str, Tensor]  # of step 1, unsharded


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
        torch.manual_seed(args.seed + step)  # the same dropout masks, if you add some
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
            output = {"y": full_y}
            gradients = gradients_of_mlp(mlp, x)
        optimizer.step()
    return MLPRun(mlp, x, losses, output, gradients)


def sgd_of_mlp(mlp: nn.Module, x: Tensor, args) -> torch.optim.SGD:
    """Plain gradient descent, with a larger rate for x."""
    rate = 0.25 / args.hidden
    # The loss is a mean over B·S tokens. A weight's gradient sums over all of them, but
    # a row of dL/dx comes from one: it is B·S times smaller, and x would barely move.
    rate_of_x = rate * args.batch_size * args.seq_len
    groups = [{"params": mlp.parameters()}, {"params": [x], "lr": rate_of_x}]
    return torch.optim.SGD(groups, lr=rate)


def gradients_of_mlp(mlp: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """All gradients, unsharded."""
    gradients = {"dL/d x": unshard_gradient(x)}
    for name, p in mlp.named_parameters():
        gradients[f"dL/d {name}"] = unshard_gradient(p).clone()
    return gradients


def squared_error(y_BSD: Tensor, target_BSD: Tensor) -> Tensor:
    """Squared distance to the target, a mean over tokens."""
    return (y_BSD - target_BSD).square().sum(-1).mean()


def unshard_gradient(p: Tensor) -> Tensor:
    """The full gradient, from the slices of all ranks; zeros if there is none."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    if isinstance(grad, DTensor):
        return grad.full_tensor()  # an all-gather by PyTorch
    return unshard(grad, shardings_of(p))


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first."""
    for dim, group in reversed(shardings):  # one at most in this lesson
        x = all_gather(x, dim, group)
    return x


# ---- The sections of the output, in order


def show_placements_mlp(report: Report, full: MLP, tp: MLP) -> None:
    """The parameters' shapes, and how Megatron's split shards them."""
    report.section("Who holds what under TP: Megatron's split")
    report.table("holdings", placement_rows(full, tp))
    report.conclude(
        "torch stores a weight as (out, in): the paper's columns are dim 0."
    )


def placement_rows(full: nn.Module, tp: nn.Module) -> list[dict]:
    """A row for each parameter: its shape, this rank's slice, how it was sharded."""
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
    return rows


def show_results_mlp(report: Report, runs: dict[str, MLPRun]) -> None:
    """Losses; output and gradients of step 1: the runs that have the full batch."""
    report.section("Losses: squared distance to the target, mean over tokens")
    report.say(
        "   x is also trained: a wrong dL/dx shows in the loss of the next step."
    )
    losses = values_of(runs, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)
    report.section("Gradients of step 1 (value: norm; diff: largest of any element)")
    report.compare("outputs", values_of(runs, "output"), brief="output")
    report.agree("as without TP")
    report.compare("gradients", values_of(runs, "gradients"))


def show_replicas_mlp(report: Report, run: MLPRun, tp_group) -> None:
    """What is replicated must be bitwise identical on all ranks after training."""
    trained = dict(run.mlp.named_parameters(), x=run.x)
    replicas = {name: p for name, p in trained.items() if not shardings_of(p)}
    row = replicas_row(report, "tp", replicas, tp_group)
    report.table("replicas", [row], brief=f"{len(replicas)} replicas")
    report.agree("bitwise identical on all ranks after training, as they must be")


def replicas_row(report: Report, axis: str, tensors: dict, group) -> dict:
    """Compare tensors with those of the group's first rank: the same on all ranks."""
    row = {"identical over": axis, "tensors": len(tensors), "equal": 0, "off": []}
    for name, x in tensors.items():
        replicas = all_gather(x[None], 0, group)
        diff = max(rel_diff(replica, replicas[0]) for replica in replicas)
        if report.check("replicas", name, diff):
            row["equal"] += 1
    if row["equal"] < row["tensors"]:
        row["off"].append("equal")
    return row


def show_dp_mlp(report: Report, runs: dict[str, MLPRun]) -> None:
    """Data parallelism has the same results."""
    report.section(
        "Data parallelism (DP): every rank has all weights, 1/T of the batch"
    )
    compared = {name: runs[name] for name in ("without TP", "DP") if name in runs}
    losses = values_of(compared, "losses")
    report.compare("losses", losses, report.allowed_loss, brief="losses")
    report.compare("outputs", values_of(compared, "output"), brief="output")
    report.compare("gradients", values_of(compared, "gradients"), brief="gradients")
    report.agree("as without TP")


def check_reference_mlp(report: Report, run: MLPRun, size: dict[str, int]) -> None:
    """Find out whether the MLP without TP fits its formulas, or has been edited."""
    measured = bytes_stored_mlp(run)
    report.check_model(
        parameters=(measured["params"], size["θ"]),
        activations=(measured["saved"], evaluate("B·S·(D + 2·F)·e", size)),
    )


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
        "   Bytes per rank; saved for backward, in the lesson: x, input, output of GELU"
    )
    show_memory_rows(report, runs, formulas, size)
    rows = {row["run"]: row for row in report.data["memory"]}
    if "Megatron" in rows:
        whole = rows["without TP"]
        of_tp = rows["Megatron"]
        report.conclude(
            f"Under TP a rank stores {of_tp['params'] / whole['params']:.0%} of the "
            f"parameters and {of_tp['saved'] / whole['saved']:.0%} of the activations."
        )


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
    h = Calls("1", "B·S·F·e")
    y = Calls("1", "B·S·D·e")  # x has the same size
    # One gather of each layer's output; in backward the f of each layer.
    formulas = {
        Call("naive", "forward", "all-gather", "tp"): [h, y],
        Call("naive", "backward", "all-reduce", "tp"): [h, y],
    }
    for run in ("Megatron", "DTensor"):
        formulas[Call(run, "forward", "all-reduce", "tp")] = [y]  # g
        formulas[Call(run, "backward", "all-reduce", "tp")] = [y]  # f
    formulas[Call("DP", "backward", "all-reduce", "dp")] = [
        Calls("2", "D·F·e"),  # the weights
        Calls("1", "F·e"),  # the biases
        Calls("1", "D·e"),
    ]
    report.section("Communication per step; ring: bytes that a rank of a ring sends")
    steps = report.args.steps
    report.ledger(formulas, size, steps, hide=["axis"], brief=["DTensor"])
    if report.args.ranks == 1:
        return
    sent = {}  # run → bytes that a rank of a ring sends
    for row in report.data["communication"]:
        sent[row["run"]] = sent.get(row["run"], 0) + row["ring"]
    report.table("totals", [{"ring, total": "bytes", **sent}])
    if "naive" in sent and "Megatron" in sent:
        times = sent["naive"] / sent["Megatron"]
        report.conclude(
            f"The naive split sends {times:.2f} times as much as Megatron's."
        )
    if not all(row["ok"] for row in report.data["communication"]):
        return  # an edit or a bug: the formulas below are not this run's
    equal = size["θ"] / evaluate("2·D·e", size)
    tokens = evaluate("B·S", size)
    report.conclude(
        "Megatron's split sums activations, 2·B·S·D·e bytes, and DP gradients, θ bytes:"
        f" it sends more if B·S > θ/(2·D·e) = {equal:.1f}; here B·S is {tokens}."
    )


# ==== BREAK IT

BREAKS = {
    "f": dict(
        target="CopyToTP.backward",
        old="    return all_reduce(partial_grad, ctx.tp_group), None\n",
        new="    return partial_grad, None\n",
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
    if args.width == ranks:  # PyTorch's DTensor cannot reshape a slice of one column
        reason = f"{ranks} / {ranks} ranks = 1, a rank needs 2 columns or more"
        refuse(args, "width", reason, 2 * ranks)
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


# ---- How bytes are measured


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


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
import argparse
from collections.abc import Callable
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
        for line in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            # Every rank creates every group, also those it is not in, in one order:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, sections: int, **sizes: int) -> Parser:
    """The flags that all lessons share, and integer flags with their defaults.

    (lesson 00)"""
    parser = Parser(
        description=(doc or "").partition("How to read")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, default in dict(sizes, seed=1).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "seconds that a call may wait (default 60; with --break at most 15)"
    add("--timeout", type=positive, default=60, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=range(1, sections + 1), metavar="N", help=text)
    add("--verbose", action="store_true", help="print all rows of all tables")
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def read_flags(parse_args, module: dict) -> argparse.Namespace:
    """The command line; the process ends here if it is wrong, or asks for a list.

    (lesson 00)"""
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
        if not is_reporter:
            time.sleep(10)  # torchrun ends this rank as soon as the other has said it
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
        # Each barrier would warn that it uses this GPU. It should.
        warnings.filterwarnings("ignore", r"barrier\(\): using the device")
    return args


COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
    "broadcast all_to_all all_to_all_single reduce gather scatter"
).split()


def watch_calls() -> None:
    """From here on, calls of dist are checked; groups are created in a named call.

    (lesson 00)"""
    FORWARD.watch()
    for name in COLLECTIVES + ["new_group", "new_subgroups_by_enumeration"]:
        watch = watch_new_groups if name.startswith("new_") else refuse_direct_calls
        setattr(dist, name, watch(getattr(dist, name)))


def refuse_direct_calls(call: Callable) -> Callable:
    """A lesson's own call of a collective raises, unless COMM records it.

    (lesson 00)"""

    def checked(*args, **kwargs):
        is_torch = {"COMM", "lesson00"}.isdisjoint(sys._getframe(1).f_globals)
        is_dtensor = args and type(args[0]).__name__ == "DTensor"
        if not (is_torch or is_dtensor or COMM.is_inside()):
            text = f"dist.{call.__name__} is called directly, so no table counts it; "
            raise RuntimeError(text + "use all_reduce(x, group) … of lesson 00")
        return call(*args, **kwargs)

    return checked


def watch_new_groups(call: Callable) -> Callable:
    """It waits for all ranks: note that this rank is in it, in case one hangs.

    (lesson 00)"""

    def watched(*args, **kwargs):
        before = COMM.status
        COMM.set_status(f"in call dist.{call.__name__}({args[0] if args else ''})")
        group = call(*args, **kwargs)
        COMM.set_status(before)
        return group

    return watched


class Output(NamedTuple):
    """What a module returned on this rank, in marks that can be compared.

    (lesson 00)"""

    shape: torch.Size
    norm: float
    mixed: float  # a sum with weights: it is another one in another order
    allowed: float  # relative difference


INPUT = "the model's input"


class FirstForward:
    """Notes down what each module returns in the first forward pass of each run.

    (lesson 00)"""

    def __init__(self):
        self.outputs = {}  # run → name of a module → its Output, in order of calls
        self.model = None  # while it is in its first forward pass
        self.names = {}  # module of this model → name

    def watch(self) -> None:
        """From here on, for all modules of this rank (lesson 00)."""
        torch.nn.modules.module.register_module_forward_pre_hook(self.before)
        torch.nn.modules.module.register_module_forward_hook(self.after)

    def before(self, module, inputs) -> None:
        if COMM.phase == "forward" and COMM.run not in self.outputs:
            self.outputs[COMM.run] = {}
            self.model = module
            self.names = {part: name for name, part in module.named_modules()}
            self.note(INPUT, inputs[0] if inputs else None)

    def after(self, module, inputs, out) -> None:
        if self.model is not None and module in self.names:
            self.note(self.names[module] or "the model's output", out)
        if module is self.model:
            self.model = None

    def note(self, name: str, out) -> None:
        if type(out) is not Tensor:
            return
        if name in self.outputs[COMM.run]:
            name += ", called again"
        x = torch.view_as_real(out) if out.is_complex() else out
        allowed = ALLOWED.get(str(x.dtype).removeprefix("torch."), 1e-2)
        x = x.detach().flatten().double()
        x = x.where(x.isfinite(), 0)  # masked scores are −∞
        weights = torch.arange(len(x), device=x.device).double().cos()
        marks = Output(out.shape, x.norm().item(), (x @ weights).item(), allowed)
        self.outputs[COMM.run][name] = marks

    def where_wrong(self, run: str) -> str:
        """Between which modules a run's forward pass becomes wrong, in words.

        (lesson 00)"""
        expected = next(iter(self.outputs.values()), {})
        ranks = gather_objects(self.outputs.get(run, {}))
        is_right = {}
        whole = []  # a list of names
        for name in ranks[0]:
            parts = [outputs[name] for outputs in ranks if name in outputs]
            if name in expected and len(parts) == len(ranks):
                is_right[name] = are_right(parts, expected[name])
                if all(part.shape == expected[name].shape for part in parts):
                    whole.append(name)
        if INPUT not in whole and not is_right.get(INPUT):
            return ""
        outer = tuple(f"{name}." for name in whole if is_right[name])
        texts = []
        for name in is_right:
            if name in whole and is_right[name]:
                texts = [f"right up to {name}"]
            if is_right[name] is False and not name.startswith(outer):
                texts.append(f"first seen wrong at {name}")
                break
        return f"; outputs of modules: {', '.join(texts)}" if texts else ""


def are_right(parts: list[Output], full: Output) -> bool | None:
    """Do the outputs of all ranks fit the one without TP? None: that cannot be said.

    (lesson 00)"""
    off = full.allowed * full.norm
    if all(part.shape == full.shape for part in parts):
        return all(abs(part.mixed - full.mixed) <= off for part in parts)
    if sum(math.prod(part.shape) for part in parts) == math.prod(full.shape):
        norm = math.sqrt(sum(part.norm**2 for part in parts))
        return abs(norm - full.norm) <= off
    return None


FORWARD = FirstForward()


def difference(got, expected) -> str:
    """How a wrong tensor differs, if that can be said in words (lesson 00)."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        text = lambda x: list(x.shape) if x.numel() else "none"  # this run has no such
        return f"shape {text(got)}, expected {text(expected)}"
    if got.numel() <= 4:
        values = lambda x: x.flatten().tolist()
        text = lambda x, n: " ".join(f"{value:.{n}g}" for value in values(x))
        digits = 16 if text(got, 7) == text(expected, 7) else 7
        return f"{text(got, digits)}, expected {text(expected, digits)}"
    if got.isnan().any():
        return f"{got.isnan().sum()} of {got.numel()} elements are nan"
    factor = ((got * expected).sum() / (expected * expected).sum()).item()
    if rel_diff(got, factor * expected) < 1e-4 and abs(factor - 1) > 1e-3:
        return f"{factor:.4g} times the expected tensor"
    return ""


def likely_cause(kind: str, failed: list[dict], forward_is_wrong: bool) -> dict:
    """The failed check that is named of those of one kind: in general the worst.

    (lesson 00)"""
    if kind in ("losses", "norms"):
        return failed[0]
    if kind == "gradients" and not forward_is_wrong:
        parameter = failed[-1]["name"].rpartition(",")[0] or failed[-1]["name"]
        return next(c for c in failed if c["name"].startswith(parameter))
    return max(failed, key=lambda check: check["diff"])


def in_words(check: dict) -> str:
    """A failed check: what was found, or by how much it is off (lesson 00)."""
    diff = f"off by {check['diff']:.3g}, allowed {check['allowed']:.3g}"
    if check["allowed"] == 0 and check["diff"] < 1e-5:
        diff += " (only last bits differ: a sum in another order?)"
    text = check["text"] or f"{check['name']}: {diff}"
    text += f", on ranks {check['ranks']}"
    if check["name"].startswith("losses: loss, step 1, "):
        text += FORWARD.where_wrong(check["name"].split(", ")[2])
    return text


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front.

    (lesson 00)"""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def where_raised(error: Exception) -> str:
    """The lesson's line that raised, the module that was called, input and weights.

    (lesson 00)"""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        # The last one in this file; `checked` is in refuse_direct_calls.
        if frame.filename == os.path.abspath(sys.argv[0]) and frame.name != "checked":
            lines = [f"line {frame.lineno}, in {frame.name}: {frame.line}"]
    root = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            root = root or module
            called = module
            inputs = frame.f_locals
    if root is None:
        return wrap(f"   {'; '.join(lines)}")
    names = {module: name for name, module in root.named_modules()}
    shapes = [list(x.shape) for x in inputs.values() if isinstance(x, Tensor)]
    lines.append(f"in {names.get(called) or 'the model'}, with tensors {shapes}")
    for name, layer in [("", called), *called.named_children()]:
        weights = [list(p.shape) for p in layer.parameters(recurse=False)]
        lines.append(f"{name} {type(layer).__name__} {weights}".strip())
    return wrap(f"   {'; '.join(lines)}")


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy.

    (lesson 00)"""
    owner, _, name = edit["target"].rpartition(".")
    modules = [getattr(other, "__dict__", {}) for other in sys.modules.values()]
    modules = [module] + [other for other in modules if other.get("COMM") is COMM]
    home = next(other for other in modules if (owner or name) in other)
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
    for other in modules:
        if other.get(name) is definition:
            other[name] = scope[name]


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, where it was reported, and what the audit says.

    (lesson 00)"""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    if "audit" in edit:  # how it is found in a model of your own
        lines.append(wrap(f'audit: tools/audit.py reports it as "{edit["audit"]} …"'))
    return "\n".join(lines)


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis.

    (lesson 00)"""

    def on_sigterm(*_):
        exit_rank(0, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    # gloo aborts a rank that receives too much, and C calls only functions of C.
    args.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_sigterm)
    ctypes.CDLL(None).signal(signal.SIGABRT, args.on_abort)
    args.timeout = min(args.timeout, 15)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


# endregion


# ==== HARNESS, the same in every lesson
# region MEASURE: it counts, compares and prints tables. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import ctypes
import gc
import inspect
import itertools
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


class Calls(NamedTuple):
    """A formula: how many calls per step, and the payload of each in bytes."""

    count: str
    nbytes: str


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

    def is_inside(self) -> bool:
        """Did a collective of this rank fail, and not the code between collectives?"""
        return self.status.startswith("in call")

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run, outside collectives?"""
        if self.is_inside():
            return False
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        until = time.monotonic() + 5
        while not self.store.check(keys):  # store.wait would print warnings of C++
            if time.monotonic() > until:  # some rank did not raise
                return False
            time.sleep(0.1)
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = "runs outputs gradients replicas norms losses parameters".split()
# Kinds of checks that describe the lesson's model. All others are about values.
FORMULAS = ["plans", "loss", "calls", "steps", "bytes", "memory"]

# What errors are compared with at least. AdamW moves a bias that starts at 0 by 0.003
# per step: three of these. A gradient may be 0 but for rounding errors of some 1e-10.
LEAST = {"parameters": 0.009, "gradients": 1e-4, "PyTorch": 1e-4}


def rel_diff(got, expected, least=0.0) -> float:
    """max|got − expected| / max(max|expected|, least); inf for nan or another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    scale = expected.abs().max().clamp(min=least)
    diff = ((got - expected).abs().max() / scale).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("the report's own call", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok, text
        self.raised = {}  # run → the error that ended it
        self.is_edited = False  # does the model without TP differ from the lesson's?
        self.agreeing = []  # brief tables: (text, the largest diff)
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int], note="") -> None:
        """Print the first lines. size: letter of the legend → number."""
        self.mesh = mesh
        self.data.update(mesh=mesh, size=size)
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))
        if note:
            print(wrap(note))
        if getattr(self.args, "steps", 0) > 100:
            print(f"First, {self.args.steps} steps of the reference, without output.")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def conclude(self, text: str) -> None:
        """End a section with what it shows, if no formula has failed before."""
        failed = {check["kind"] for check in self.checks.values() if not check["ok"]}
        if self.is_edited or not failed.intersection(FORMULAS):
            self.say(textwrap.indent(textwrap.fill(text, 85), "   "))

    def check(self, kind: str, name: str, diff: float, allowed=0.0, text="") -> bool:
        """Record one comparison of this rank, `text` in words. Does it hold?"""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        check = dict(kind=kind, diff=diff, allowed=allowed, ok=ok, text=text)
        self.checks[name] = check
        return ok

    def check_tensor(self, kind, name, got, expected, allowed=0.0, least=0.0) -> bool:
        """Compare two tensors or numbers on this rank."""
        diff = rel_diff(got, expected, least or LEAST.get(kind.split()[-1], 0.0))
        words = "" if diff <= allowed else difference(got, expected)
        text = f"{kind}: {name}: {words}" if words else ""
        return self.check(kind, name, diff, allowed, text)

    def expect(self, row, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        value = row[column]
        is_edit = self.is_edited and kind in FORMULAS
        words = "the lesson has" if is_edit else "predicted"
        unit = f" {kind}" if kind in ("calls", "steps", "bytes") else ""
        text = f"{name}: {value:,}{unit}, {words} {predicted:,}"
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(value - predicted), text=text):
            off.append(column)
            mark = f" ≠ {predicted:,}" if is_edit else text
            row.setdefault("predicted", {})[column] = mark

    def check_model(self, **formulas: tuple[int, int]) -> None:
        """Does the run without TP fit its own formulas? If not, it has been edited.

        formulas: what was measured → (bytes, predicted bytes). In an edited model only
        values decide, because all formulas describe another model.
        """
        for name, (got, predicted) in formulas.items():
            text = f"{name}, without TP: {got:,}, the lesson has {predicted:,}"
            name = f"the model's {name}"
            if not self.check("memory", name, abs(got - predicted), text=text):
                self.is_edited = True

    @contextmanager
    def column(self, run: str, kind="runs"):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if not COMM.all_raised(run, error):
                raise
            if dist.get_rank() == 0 and self.args.verbose:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            text = wrap(f"   {run} raised {self.raised[run]}")
            print(f"{text}\n{where_raised(error)}", flush=True)
        text = f"{run} raised {self.raised.get(run)}"
        self.check(kind, f"{run} completes", int(run in self.raised), text=text)

    def table(self, key: str, rows: list[dict], hide=(), brief: str = "") -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank; row["predicted"]
        has words about them. Cells that failed on any rank are marked. hide: columns
        that are not printed. brief: "16 replicas", for rows that only repeat that all
        is as it must be; without --verbose, those that hold are left to `agree`.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for place, other in enumerate(rows_of_rank):
                merge_row(rows, place, other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if brief and not self.args.verbose:
            worst = max([row.get("diff", 0.0) for row in rows], default=0.0)
            rows = [row for row in rows if row.get("off")]
            if not rows:
                self.agreeing.append((brief, worst))
        if rows:
            self.print_rows(rows, hide)

    def agree(self, how: str) -> None:
        """One line for the brief tables since the last one, as far as they hold."""
        if self.agreeing:
            worst = max(diff for text, diff in self.agreeing)
            what = ", ".join(text for text, diff in self.agreeing)
            how += f", worst {worst:.1e}" if worst else ""
            self.say(wrap(f"   {what}: {how}"))
        self.agreeing.clear()

    def print_rows(self, rows: list[dict], hide, is_short=False) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        notes = []  # below the table
        for row in rows:
            notes.extend(notes_on(row))
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted", "elsewhere"):
                continue
            texts = [name] + [marked_cell(row, name, is_short) for row in rows]
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        if max(map(len, lines)) > 88 and not is_short:
            return self.print_rows(rows, hide, is_short=True)  # ≠ alone, as it fits
        self.say("\n".join([line.rstrip() for line in lines] + notes))

    def compare(self, key, runs: dict, allowed=0.0, fold=str, brief: str = "") -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        its values, and as diff the largest relative difference of one element. brief:
        what is compared, "norms", if it only repeats that the runs agree.
        """
        allowed = allowed or self.allowed
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        has_others = len(runs.keys() - self.raised.keys()) > 1  # to compare with it
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                for run in self.raised:
                    rows[label].setdefault(run, "raised")
                if has_others:
                    rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                if run in self.raised:  # it ended before it had all values
                    row[run] = "raised"
                    continue
                value = values.get(name, torch.empty(0))  # empty: it has none
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                expected = reference.get(name, torch.empty(0))
                diff = rel_diff(value, expected, LEAST.get(key.split()[-1], 0.0))
                row["diff"] = max(row["diff"], diff)
                what = f"{name}, {run}"
                if not self.check_tensor(key, what, value, expected, allowed):
                    row["off"].append(run)
        brief = f"{len(names)} {brief}" if brief and has_others else ""
        self.table(key, list(rows.values()), brief=brief)

    def ledger(self, formulas: dict, size: dict, steps=1, hide=(), brief=()) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → a list of Calls; several if it makes calls of several sizes.
        brief: runs and phases whose rows are printed with --verbose only, or if wrong.
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            if call.run in runs and self.mesh.get(call.axis, 1) > 1:
                row = self.ledger_row(call, formulas.get(call, []), size, steps)
                if row["calls"] or row["off"]:
                    rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = list(hide)
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        less = [row for row in rows if row["run"] in brief or row["phase"] in brief]
        if self.args.verbose:
            less = []
        if self.args.ranks == 1 and "communication" not in self.data:
            self.say("   One rank sends nothing.")
        self.table("communication", [row for row in rows if row not in less], hide)
        if less:
            more = "more " if len(less) < len(rows) else ""
            more += "row" if len(less) == 1 else "rows"
            brief = f"{len(less)} {more} ({', '.join(brief)})"
            self.table("communication", less, hide, brief)
            self.agree("calls and bytes as predicted")

    def ledger_row(self, call: Call, terms: list[Calls], size: dict, steps) -> dict:
        row = call._asdict()
        row["calls"] = per_step(COMM.calls[call], steps)
        row["bytes"] = per_step(COMM.bytes[call], steps)
        row["formula"] = formula_text(terms)
        row["ring"] = ring_bytes(call.collective, row["bytes"], self.mesh[call.axis])
        calls = 0
        nbytes = 0
        for term in terms:
            calls += evaluate(term.count, size)
            # Multiplied before rounding: a size may be a mean over micro-batches.
            nbytes += evaluate(f"({term.count})·({term.nbytes})", size)
        self.expect(row, "calls", "calls", " ".join(call), calls)
        self.expect(row, "bytes", "bytes", " ".join(call), nbytes)
        return row

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks, in order: the largest diff, and where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                one = merged.setdefault(name, dict(check, name=name, ranks=[]))
                one["diff"] = max(one["diff"], check["diff"])
                if not check["ok"]:
                    if one["ok"]:  # the first rank where it fails says what is wrong
                        one.update(ok=False, text=check["text"])
                    one["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """Print PASS or FAIL, and above it what failed and what an edit changed."""
        checks = self.merge_checks()
        kinds = {kind: [] for kind in CAUSES_FIRST}
        for check in checks:
            kinds.setdefault(check["kind"], []).append(check)
        edits = []  # plans and formulas that do not describe an edited model
        for kind in FORMULAS if self.is_edited else []:
            edits.extend(check for check in kinds.pop(kind, []) if not check["ok"])
        print()
        counts = self.name_failures(kinds)
        worst = max(checks, key=lambda check: check["ok"] and check["diff"])
        text = f"worst difference {worst['diff']:.1e} (allowed {worst['allowed']:.0e})"
        text = f"{len(checks) - len(edits)} checks, {text}"
        if counts:
            text = f"failed: {', '.join(counts.values())}"
            text += "; all values agree" if set(counts).issubset(FORMULAS) else ""
        if edits:
            self.name_edits(edits)
            text = text if counts else f"values agree: {text}"
            count = len([check for check in edits if check["kind"] != "plans"])
            count = "1 formula does" if count == 1 else f"{count} formulas do"
            text += f"; the lesson was edited: {count} not describe it"
        verdict = "FAIL" if counts else "PASS"
        self.data.update(verdict=verdict, edited=self.is_edited, checks=checks)
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        print(wrap(f"{verdict}  {self.data['lesson']}  {text}"), flush=True)
        return verdict

    def name_failures(self, kinds: dict[str, list]) -> dict[str, str]:
        """Print one failed check of each kind, causes first; count them by kind."""
        failed = {}
        counts = {}
        for kind, checks in kinds.items():
            wrong = [check for check in checks if not check["ok"]]
            if wrong:
                failed[kind] = wrong
                counts[kind] = f"{kind} {len(wrong)}/{len(checks)}"
        # If the loss of step 1 is wrong, forward is: this comes before gradients.
        forward = [c for c in failed.get("losses", []) if "step 1," in c["name"]]
        early = ("runs", "outputs", "losses") if forward else ()
        for kind in sorted(failed, key=lambda x: (x not in early, x in FORMULAS)):
            cause = likely_cause(kind, failed[kind], bool(forward))
            print(wrap(f"✗ {in_words(cause)}"))
        return counts

    def name_edits(self, edits: list[dict]) -> None:
        """Print what does not describe an edited model, communication before memory."""
        texts = list(dict.fromkeys(check["text"] for check in edits))
        shown = texts if self.args.verbose else texts[:8]
        text = "The lesson was edited. What does not fit it"
        if len(shown) < len(texts):
            text += f"; {len(shown)} of {len(texts)}, all with --verbose"
        print(f"{text}:")
        for text in shown:
            print(wrap(f"≠ {text}"))


def formula_text(terms: list[Calls]) -> str:
    """2·L × B·S·D·e for calls of one size; a sum for calls of several."""
    texts = [f"{term.count} × {term.nbytes}".removeprefix("1 × ") for term in terms]
    return " + ".join(texts) or "none"


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def merge_row(rows: list[dict], place: int, other: dict, rank: int) -> None:
    """Add to this rank's row what another rank's row says of failed checks.

    other: row `place` there. Pipeline stages may have different rows: rows are the same
    if they begin with the same texts. One that fails elsewhere only is added.
    """
    same = [row for row in rows[place:] + rows if label_of(row) == label_of(other)]
    if not same and other.get("off"):
        rows.append(dict(other, off=[], elsewhere=True))
        same = rows[-1:]
    for row in same[:1]:
        for column in other.get("off", []):
            if column not in row["off"]:
                row["off"].append(column)
        if other.get("off"):
            row.setdefault("off_ranks", []).append(rank)
        if "diff" in row:
            row["diff"] = max(row["diff"], other["diff"])


def label_of(row: dict) -> list[str]:
    """The texts that a row begins with; no texts if it begins with a number."""
    return list(itertools.takewhile(lambda x: isinstance(x, str), row.values()))


def notes_on(row: dict) -> list[str]:
    """Lines below a table: what was predicted for a cell that failed, and where."""
    texts = row.get("predicted", {}).values()
    notes = [f"   ✗ {text}" for text in texts if not text.startswith(" ≠")]
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = " ".join(label_of(row)) or next(iter(row.values()))
        notes.append(f"   ✗ {label}: fails on ranks {ranks}, not on rank 0")
    return notes


def marked_cell(row: dict, name: str, is_short: bool) -> str:
    """A value as a table shows it; ✗ if it failed, ≠ if the model was edited."""
    value = row[name]
    predicted = row.get("predicted", {})
    text = "" if value is None else str(value)
    if isinstance(value, bool):
        is_edit = any(mark.startswith(" ≠") for mark in predicted.values())
        text = "ok" if value else "≠" if is_edit else "✗"
    elif isinstance(value, float):
        digits = 4 if is_short else 7
        text = f"{value:.1e}" if name == "diff" else f"{value:#.{digits}g}"
    elif isinstance(value, int):
        text = f"{value:,}"
    if name not in row.get("off", []):
        return text
    mark = predicted.get(name, "")[: 2 if is_short else None]  # short: " ≠"
    return text + (mark if mark.startswith(" ≠") else "✗")


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


# endregion


# region START AND ERRORS: flags, bugs, joining the ranks, hangs. You never need it.


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
    if len({re.sub(r"all-to-all of .*?]", "", text) for text in statuses}) == 1:
        return "all ranks have entered the same call, and it raised an error"
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
        text = f"  ranks {silent} have reported no error so far: they hang, "
        text += "are stopped, cannot be reached, or are still computing"
        lines.append(wrap(text))
    size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))  # ranks per machine
    for first in ranks[::size]:  # what a lost machine wrote last may be out of date
        if set(silent).issuperset(ranks[first : first + size]):
            text = f"error: no rank of machine {first // size} has reported an error: "
            lines[0] = wrap(text + "they hang, or it is lost or cannot be reached")
    lines.append(wrap(f"  raised: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank.

    With the diagnosis of a bug: it shows, so the exit code is 0 (no torchrun report).
    """
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    lost = f"error: rank {dist.get_rank()} got no answer from rank 0's machine: it is "
    lost += f"lost or cannot be reached\n  rank {dist.get_rank()}: {COMM.status}"
    # The store is on that machine, and its calls then never return.
    seconds = 20 + int(os.environ["LOCAL_RANK"])  # one per machine reports
    timer = threading.Timer(seconds, exit_rank, [1, lost, True])
    timer.start()
    COMM.store.set(f"failed/{dist.get_rank()}", text)
    if COMM.is_inside():  # others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 0 if diagnosis else 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif COMM.is_inside():
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    timer.cancel()
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and code:  # for torchrun's report
        # torchrun calls the earliest failure the root cause: the one that is printed.
        seconds = int(time.time()) + (0 if is_reporter else 3600)
        details = {"message": message, "extraInfo": {"timestamp": str(seconds)}}
        Path(path).write_text(json.dumps({"message": details}))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    elif code:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    member = dict(store=store, rank=rank, world_size=ranks)
    dist.init_process_group(backend, timeout=limit, **member)
    return store


def end_with_torchrun() -> None:
    """If torchrun is killed, Linux kills this rank as well, even if it sleeps."""
    if sys.platform == "linux":
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)


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
        watch_calls()
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        fails = report.verdict() == "FAIL"
        print(f"{diagnosis}\n" if fails and args.bug else "", end="", flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if args.bug and not fails:
        text = "error: the bug does not show in this run; try it without other flags"
        exit_rank(1, text, is_reporter=os.environ["RANK"] == "0")
    if fails and not args.bug and os.environ["LOCAL_RANK"] == "0":
        # One rank per host: torchrun's report is then as short as it can be.
        time.sleep(1)  # the other ranks have ended
        exit_rank(1, "FAIL: the verdict is above this report of torchrun", True)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
