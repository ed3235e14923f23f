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

import copy
import math
from contextlib import nullcontext

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


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated."""
    return getattr(p, "shardings", ())


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
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward.

    Columns come first because GELU needs complete elements: rows first would give
    partial sums, and GELU(a) + GELU(b) is not GELU(a + b).
    """
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
    """Reduce-scatter forward, all-gather backward: the transpose of the above."""

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


def add_up(formulas: dict[str, str], sizes: dict[str, dict]) -> tuple[list, dict]:
    """A row for each formula, with its value in each run; and the sum of each run.

    formulas: what is stored → bytes as a formula, such as "2·D·F·e/T".
    sizes: run → letter → number.
    """
    rows = []
    sums = dict.fromkeys(sizes, 0)
    for name, formula in formulas.items():
        row = {"bytes": name, "formula": formula}
        for run, size in sizes.items():
            row[run] = evaluate(formula, size)
            sums[run] += row[run]
        row["ok"] = None  # nothing to check here: only the sum can be measured
        rows.append(row)
    return rows, sums


def measured_row(report, kind: str, formula: str, sums: dict, measured: dict) -> dict:
    """Bytes of each run as measured, checked against sums: run → predicted bytes."""
    row = {"bytes": f"{kind}, measured", "formula": formula}
    for run, predicted in sums.items():
        row[run] = "raised"
        if run in measured:
            row[run] = measured[run][kind]
            report.expect(row, run, "memory", f"{kind}, {run}", predicted)
    return row


def values_of(runs: dict, field: str) -> dict:
    """run → its losses, gradients, … (whatever `field` names)."""
    return {name: getattr(run, field) for name, run in runs.items()}


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
        reported="github.com/NVIDIA/Megatron-LM/issues/19",
    ),
    "g": dict(
        target="RowParallelLinear.forward",
        old="    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n",
        new="    partial_y_BSD = CopyToTP.apply(partial_y_BSD, self.tp_group)\n"
        "    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n",
        what="g all-reduces in backward too, like PyTorch's differentiable all_reduce",
        symptom="step 1's loss is right; all gradients before g are T times too large",
        why="each has all of dL/dy; PyTorch's is for ranks with losses of their own",
        reported="github.com/pytorch/pytorch/issues/58005; NVIDIA/Megatron-LM, 559",
    ),
    "bias": dict(
        target="RowParallelLinear.forward",
        old="    y_BSD = self.reduce(partial_y_BSD, self.tp_group)\n"
        "    return y_BSD + self.bias",
        new="    return self.reduce(partial_y_BSD + self.bias, self.tp_group)",
        what="the row-parallel bias is added on every rank, before the sum",
        symptom="the loss is wrong from step 1 on, by little while the bias is small",
        why="the all-reduce adds up T biases: only one term of a sum may carry it",
        reported="github.com/huggingface/text-generation-inference/issues/1036",
    ),
    "plain": dict(
        target="UpLinear2D.forward",
        old="    return h_bSf + AllGatherWithGrad.apply(self.bias, 0, self.outer)",
        new="    return h_bSf + all_gather(self.bias, 0, self.outer)",
        what="a plain all-gather of the bias, of which autograd knows nothing",
        symptom="no error; up_proj.bias of FSDP and 2D has no gradient, never moves",
        why="the gathered tensor has no history; the rest of the graph hides the gap",
        reported="pytorch issues 190419, 153016; lucidrains/vector-quantize-pytorch 158",
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
        reported="Megatron-LM, arXiv:1909.08053, sec. 3",
    ),
    "average": dict(
        target="average_gradients",
        old="        p.grad = p.grad / batch_group.size()\n",
        new="",
        what="gradients are summed over the batch's slices, and not averaged",
        symptom="step 1's loss is right; gradients are T times too large",
        why="the mean over all samples is the mean of the slices' means, not their sum",
        reported="arXiv:1910.02054; docs.pytorch.org, FSDP's gradient reduction",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    multiples = {"hidden": 64 + -64 % ranks, "batch_size": 8 + -8 % ranks}
    parser = lesson_parser(__doc__, BREAKS, sections=5, steps=3, seq_len=8, **multiples)
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


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
from typing import NamedTuple


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    (lesson 00)"""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        for line in lines:
            # Every rank creates every group, in one order, even if it is not in it:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if it does not divide.

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


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables and explains errors. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import argparse
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
from datetime import timedelta
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
CAUSES_FIRST = ["runs", "gradients", "replicas", "norms", "losses", "parameters"]


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
            for row, other in zip(rows, rows_of_rank):
                merge_row(row, other, rank)
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

    def ledger(self, formulas: dict[Call, str], size: dict, steps: int = 1) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → "calls × bytes per call", as it is printed and evaluated.
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            ranks = self.mesh.get(call.axis, 1)
            if call.run not in runs or ranks == 1:  # one rank sends nothing
                continue
            formula = formulas.get(call, "0 × 0")
            calls, each = [evaluate(factor, size) for factor in formula.split(" × ")]
            if calls == 0 and COMM.calls[call] == 0:
                continue
            row = call._asdict()
            row["calls"] = per_step(COMM.calls[call], steps)
            row["bytes"] = per_step(COMM.bytes[call], steps)
            row["formula"] = formula
            row["ring"] = ring_bytes(call.collective, row["bytes"], ranks)
            name = " ".join(call)
            self.expect(row, "calls", "calls", name, calls)
            self.expect(row, "bytes", "bytes", name, calls * each)
            rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = []
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
        lines.append(f"   ✗ {label}: fails on ranks {ranks}; the row shows rank 0")
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
    """Replace the target of a bug, a name or Class.name, by its edited copy."""
    owner, _, name = edit["target"].rpartition(".")
    definition = getattr(module[owner], name) if owner else module[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {} if owner else module  # where the edited copy is defined
    exec(source.replace(edit["old"], edit["new"]), module, scope)
    if owner:
        setattr(module[owner], name, scope[name])


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, and where somebody reported it."""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
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
    lines.append(wrap(f"  transport: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank."""
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
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
        extra = {"timestamp": str(int(time.time()))}
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


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis."""

    def on_sigterm(*_):
        exit_rank(1, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    args.timeout = min(args.timeout, 5)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        command = f"torchrun --standalone --nproc_per_node={module.get('RANKS', 2)}"
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
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
