r"""Beyond the lessons, 13: FSDP, and tensor parallelism on a 2D mesh.

FSDP (fully sharded data parallelism) splits the batch as data parallelism (DP) does,
but a rank stores only 1/T of each weight: a weight is all-gathered where it is used. On
a 2D mesh, outer × inner, a rank takes part in both: tensor parallelism (TP) over inner,
FSDP over outer. Then weights, inputs and activations are split on two dims each, and
every rank holds 1/T of all of them.

Run it on 4 ranks (1, 2, 3 and 8 also work; with 2, one axis of the mesh has 1 rank):

    torchrun --standalone --nproc_per_node=4 beyond/13_mesh_2d.py

What you will see: a matrix product on every mesh of the ranks; then the MLP of lesson
01 by FSDP and on a 2D mesh, compared with one process, and with DP and Megatron's split
of that lesson: losses, gradients, bytes stored, bytes sent.

Exercises (answers: notebooks/13_mesh_2d.ipynb, in the section that is named):
    Run with --mesh 4x1, 2x2, 1x4. Which bytes change, and which do not? (section 4)
    Put nn.RMSNorm(hidden) before up_proj in lesson 01's MLP. Which run raises an error
        here with --mesh 1x4? With --mesh 4x1 it does not, but one gradient is marked ✗.
        What is missing after backward? (section 3)
    Save the gathered weight in GatheredMatmul.forward, and do not gather it again in
        backward. Which two numbers change? (section 4)

How to read this file: NEW is the lesson, RUN trains and prints. lesson01.MLP is defined
in lesson 01, and so on. `python tools/bug.py 13` lists bugs to try.

Shapes: B batch, S sequence, D hidden, F MLP width; I, J, K the dims of any matrices
    A[I, J] and B[J, K]; T = outer · inner ranks; e bytes per element; θ the bytes of
    all parameters. UPPERCASE is the full size. Lowercase is this rank's slice, over one
    axis of the mesh: X_outer means that dim X is split over outer. partial_ in front of
    a name: full shape, still to be summed over a group.

Sources: GSPMD, arXiv:2105.04663 (2D mesh); ZeRO, arXiv:1910.02054 (FSDP); the scaling
    book, jax-ml.github.io/scaling-book (notation).
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from course import lesson00, lesson01
    from harness import cell, marked, on_axes, take_calls
    from shardings import unshard
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 13: weights in slices, and two ways to split at once
# Read lines 64 to 206, in about 14 minutes. Stop at RUN.

# From lesson 00: mesh_groups lays out the ranks as a grid and returns this rank's group
# along each axis; all_gather joins slices; reduce_scatter sums, and each rank keeps its
# slice of the sum. From lesson 01: AllGatherWithGrad has a reduce-scatter as backward,
# ReduceScatterWithGrad an all-gather.

# ---- One product on a 2D mesh


def matmul_2d(a_ij: Tensor, b_jk: Tensor, outer, inner) -> Tensor:
    """A[I_outer, J_inner] · B[J_outer, K_inner] → C[I_outer, K_inner] on a 2D mesh.

    The two j are not the same slice: A's J is split over inner, B's over outer. A row
    of C needs all of J. So each operand is gathered over the axis that splits its J,
    and C comes out laid out like A: the next product can follow.

    Shapes: a [I/outer, J/inner], b [J/outer, K/inner] → c [I/outer, K/inner].
    Communication: all-gather of A[I_outer, J] over inner (I·J/outer elements), of
        B[J, K_inner] over outer (J·K/inner elements). Source: arXiv:2105.04663.
    """
    a_iJ = lesson00.all_gather(a_ij, 1, inner)
    b_Jk = lesson00.all_gather(b_jk, 0, outer)
    return a_iJ @ b_Jk


# ---- A parameter that is split twice


def shard_2d(full: Tensor | None, *shardings: tuple) -> nn.Parameter | None:
    """This rank's slice of a parameter that is split over two axes of a mesh.

    shardings: (dim, group) of each split, in order. A weight is split on both of its
    dims. A bias has one dim: it is split over one axis, and each slice over the other.
    full: None, for a linear without bias, stays None.
    """
    if full is None:
        return None
    for dim, group in shardings:
        full = lesson00.shard(full, dim, group)  # a new tensor
    p = nn.Parameter(full)
    p.shardings = shardings  # RUN gathers the slices again: the last split first
    return p


# ---- FSDP: stored in slices, gathered for use


class GatheredMatmul(torch.autograd.Function):
    """X Wᵀ where W is stored in slices along dim: all-gathered for use, never saved.

    Communication: all-gathers of W in forward and in backward; a reduce-scatter of
        dL/dW, which is partial because the ranks of the group have different samples.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup):
        ctx.save_for_backward(x, weight)  # this rank's slice: backward gathers again
        ctx.dim = dim
        ctx.group = group
        return F.linear(x, lesson00.all_gather(weight, dim, group))

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad_y @ lesson00.all_gather(weight, ctx.dim, ctx.group)
        partial_grad_w = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
        grad_w = lesson00.reduce_scatter(partial_grad_w, ctx.dim, ctx.group)
        return grad_x, grad_w, None, None


# ---- The MLP on a 2D mesh
#
# Over inner it is TP: a rank has columns of up_proj and rows of down_proj. Over outer
# it is FSDP: the other dim of each weight is split as well, just to store less, and is
# gathered where it is used.
#
#     tensor            full       on a rank              over inner    over outer
#     x, y              [B, S, D]  [B/outer, S, D/inner]  features      samples
#     h                 [B, S, F]  [B/outer, S, F/inner]  features      samples
#     up_proj.weight    [F, D]     [F/inner, D/outer]     columns (TP)  stored in slices
#     down_proj.weight  [D, F]     [D/outer, F/inner]     rows (TP)     stored in slices
#
# x and y are sharded over inner as well. So where lesson 01 has f, x is all-gathered,
# and where it has g, y is reduce-scattered. With one rank on inner this is FSDP.


class UpLinear2D(nn.Module):
    """The first layer on the 2D mesh, by columns over inner: x_bSd → h_bSf.

    Communication, forward: x is gathered over inner, weight and bias over outer.
        Backward: their gradients are reduce-scattered, the weight is gathered again.
    """

    def __init__(self, full: nn.Linear, outer: dist.ProcessGroup, inner):
        super().__init__()
        self.outer = outer
        self.inner = inner
        self.weight = shard_2d(full.weight, (0, inner), (1, outer))
        self.bias = shard_2d(full.bias, (0, inner), (0, outer))

    def forward(self, x_bSd: Tensor) -> Tensor:
        x_bSD = lesson01.AllGatherWithGrad.apply(x_bSd, 2, self.inner)  # replaces f
        h_bSf = GatheredMatmul.apply(x_bSD, self.weight, 1, self.outer)
        if self.bias is None:
            return h_bSf
        b_f = lesson01.AllGatherWithGrad.apply(self.bias, 0, self.outer)
        return h_bSf + b_f


class DownLinear2D(nn.Module):
    """The second layer on the 2D mesh, by rows over inner: h_bSf → y_bSd.

    Communication, forward: weight and bias are gathered over outer, y is
        reduce-scattered over inner. Backward: dL/dy is gathered over inner, the weight
        again over outer, where the gradients of both are reduce-scattered.
    """

    def __init__(self, full: nn.Linear, outer: dist.ProcessGroup, inner):
        super().__init__()
        self.outer = outer
        self.inner = inner
        self.weight = shard_2d(full.weight, (1, inner), (0, outer))
        self.bias = shard_2d(full.bias, (0, inner), (0, outer))

    def forward(self, h_bSf: Tensor) -> Tensor:
        partial_y_bSD = GatheredMatmul.apply(h_bSf, self.weight, 0, self.outer)
        # Replaces g. The sum is over inner, and each rank keeps its features of y.
        y_bSd = lesson01.ReduceScatterWithGrad.apply(partial_y_bSD, 2, self.inner)
        if self.bias is None:
            return y_bSd
        b_d = lesson01.AllGatherWithGrad.apply(self.bias, 0, self.outer)
        return y_bSd + b_d


def mlp_2d(full: lesson01.MLP, outer: dist.ProcessGroup, inner) -> lesson01.MLP:
    """The MLP on the 2D mesh; with one rank on inner it is FSDP."""
    mlp = copy.deepcopy(full)
    mlp.up_proj = UpLinear2D(full.up_proj, outer, inner)
    mlp.down_proj = DownLinear2D(full.down_proj, outer, inner)
    return mlp


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """A product on every mesh; then the MLP by FSDP and on a 2D mesh, compared."""
    tp_group = lesson00.mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    # FSDP is the 2D mesh with all ranks on outer, called dp, and one on inner.
    fsdp_mesh = lesson00.mesh_groups({"dp": args.ranks, "single": 1}, args.timeout)
    dp_group = fsdp_mesh["dp"]
    single = fsdp_mesh["single"]
    mesh_2d = lesson00.mesh_groups(args.axes, args.timeout)
    outer = mesh_2d["outer"]
    inner = mesh_2d["inner"]
    torch.manual_seed(args.seed)  # the same matrices, model and batch on every rank
    show_products_2d(report, args)

    full, batch = make_mlp_and_batch(args)
    train_mlp = lesson01.train_mlp
    runs = {}
    runs["without TP"] = train_mlp("without TP", copy.deepcopy(full), batch, args)
    # If your edit raises an error in one run, the others continue.
    with report.guard("DP"):
        runs["DP"] = train_mlp("DP", copy.deepcopy(full), batch, args, dp_group)
    with report.guard("Megatron"):
        mlp = lesson01.tp_mlp(full, tp_group)
        runs["Megatron"] = train_mlp("Megatron", mlp, batch, args)
    with report.guard("FSDP"):
        mlp = mlp_2d(full, dp_group, single)
        runs["FSDP"] = train_2d("FSDP", mlp, batch, args, dp_group, single)
    with report.guard("2D"):
        mlp = mlp_2d(full, outer, inner)
        show_placements_2d(report, full, mlp, args.axes)
        runs["2D"] = train_2d("2D", mlp, batch, args, outer, inner)
    show_training_2d(report, runs, args)
    show_memory_2d(report, runs)
    show_communication_2d(report, args)


def sizes(args) -> dict[str, int]:
    """The letters of the shape legend, and the axes of the 2D mesh."""
    T = args.ranks
    # T has to divide D, F and B: 3 ranks get 66, 264 and 9.
    args.hidden = args.hidden or T * math.ceil(64 / T)
    args.batch_size = args.batch_size or T * math.ceil(8 / T)
    args.width = args.width or 4 * args.hidden
    for name in ("hidden", "width", "batch_size"):
        lesson00.must_divide(args, name, T, "ranks")
    args.axes = axes_of(args.mesh, T)
    args.mesh = " × ".join(f"{axis} {ranks}" for axis, ranks in args.axes.items())
    size = dict(B=args.batch_size, S=args.seq_len, D=args.hidden, F=args.width, T=T)
    size["e"] = getattr(torch, args.dtype).itemsize
    size["θ"] = lesson00.evaluate("(2·D·F + F + D)·e", size)
    return dict(size, **args.axes, I=2 * T, J=4 * T, K=3 * T)


def axes_of(mesh: str | None, ranks: int) -> dict[str, int]:
    """The ranks of outer and inner, from --mesh. ValueError if they do not fit."""
    default_mesh = f"{ranks // 2}x2" if ranks % 2 == 0 else f"1x{ranks}"
    text = mesh or default_mesh
    axes = [int(axis) for axis in text.split("x") if axis.isdecimal()]
    if len(axes) != 2 or text != f"{axes[0]}x{axes[1]}":
        raise ValueError(f"--mesh {text}: is not OUTERxINNER; take {default_mesh}")
    if math.prod(axes) != ranks:
        product = f"{axes[0]} · {axes[1]} = {math.prod(axes)}"
        advice = f"not {ranks} ranks; take {default_mesh}"
        raise ValueError(f"--mesh {text}: {product}, {advice}")
    return {"outer": axes[0], "inner": axes[1]}


def make_mlp_and_batch(args) -> tuple[lesson01.MLP, Tensor]:
    """The full MLP, and x and target stacked: the same on every rank, by the seed."""
    torch.manual_seed(args.seed)
    full = lesson01.MLP(args.hidden, args.width)
    full.to(args.device, getattr(torch, args.dtype))
    batch = torch.randn(2, args.batch_size, args.seq_len, args.hidden)
    return full, batch.to(full.up_proj.weight)


def train_2d(name, mlp, batch, args, outer, inner) -> lesson01.MLPRun:
    """Train as lesson01.train_mlp does, with x and target split on two dims.

    Over outer a rank has its own samples, over inner its own features of them.
    """
    shardings = ((0, outer), (2, inner))
    x = shard_2d(batch[0], *shardings)
    target = shard_2d(batch[1], *shardings).detach()
    rate = 0.25 / args.hidden
    of_x = {"params": [x], "lr": rate * args.batch_size * args.seq_len}  # as in 01
    optimizer = torch.optim.SGD([{"params": mlp.parameters()}, of_x], lr=rate)
    losses = {}
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        with lesson00.METER.phase(name, "forward"):
            y = mlp(x)
        # A mean over this rank's samples. Divided by the number of slices of the batch,
        # the losses of all ranks add up to the loss of the full batch; and backward,
        # which sums gradients over ranks, then finds the gradients of that.
        loss = lesson01.squared_error(y, target) / outer.size()
        with lesson00.METER.phase(name, "backward"):
            loss.backward()
        # For the report only, so it is not counted: the full y and its loss.
        full_y = unshard(y.detach(), shardings)
        full_loss = lesson01.squared_error(full_y, batch[1])
        losses[f"loss, step {step}"] = full_loss.item()
        if step == 1:
            output = {"y": full_y}
            gradients = gradients_2d(mlp, x)
        optimizer.step()
    return lesson01.MLPRun(mlp, x, losses, output, gradients)


def gradients_2d(mlp: lesson01.MLP, x: nn.Parameter) -> dict[str, Tensor]:
    """All gradients, unsharded."""
    gradients = {"dL/d x": unshard(x.grad, x.shardings)}
    for name, p in mlp.named_parameters():
        # An edit may leave a parameter without a gradient.
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients[f"dL/d {name}"] = unshard(grad, p.shardings).clone()
    return gradients


# ---- The sections of the output, in order


def show_products_2d(report: lesson00.Report, args) -> None:
    """The product on each mesh outer × inner, with every matrix split on both axes."""
    # Small integers, so that every sum is exact. Every rank has the full matrices, so
    # each can compute what must come out.
    dtype = getattr(torch, args.dtype)
    size = report.size
    a_IJ = torch.randint(-2, 3, (size["I"], size["J"])).to(args.device, dtype)
    b_JK = torch.randint(-2, 3, (size["J"], size["K"])).to(args.device, dtype)
    T = size["T"]
    rows = []
    texts = []
    for inner in range(1, T + 1):
        if T % inner == 0:
            mesh = {"outer": T // inner, "inner": inner}
            of_mesh, sent = product_rows(report, mesh, a_IJ, b_JK, args)
            rows += of_mesh
            texts.append(f"{sent:,} on {T // inner} × {inner}")
    report.section(
        "A[I_outer, J_inner] · B[J_outer, K_inner] on each mesh of the ranks"
    )
    report.say("Every rank holds 1/T of A, B and C on every mesh.")
    report.say("formula: payload of an all-gather; an axis of 1 rank sends nothing")
    report.table(rows)
    report.say(f"Bytes that a rank of a ring sends: {', '.join(texts)}.")


def block_of(full: Tensor, outer, inner) -> Tensor:
    """This rank's block: rows are split along outer, columns along inner."""
    return lesson00.shard(lesson00.shard(full, 0, outer), 1, inner)


def product_rows(report, mesh: dict[str, int], a_IJ, b_JK, args) -> tuple[list, int]:
    """The product on one mesh: a row for what is gathered along each axis.

    Returns: the rows, and the bytes that a rank of a ring sends along both axes.
    """
    outer, inner = lesson00.mesh_groups(mesh, args.timeout).values()
    name = f"{outer.size()} × {inner.size()}"
    blocks = [block_of(full, outer, inner) for full in (a_IJ, b_JK, a_IJ @ b_JK)]
    with lesson00.METER.phase(name, ""):
        c_ik = matmul_2d(blocks[0], blocks[1], outer, inner)
    holds = report.agree(f"values: {name}", c_ik, blocks[2], 0.0) == 0
    counted = take_calls(name)
    rows = []
    total = 0
    # A is split on J along inner, B along outer: there they are gathered.
    for group, formula in ((inner, "I·J·e/outer"), (outer, "J·K·e/inner")):
        cells, sent = gather_cells(report, counted, name, group, formula, mesh)
        row = {"mesh": marked(name, holds)}
        row["gathered"] = f"{'A' if group is inner else 'B'} over {group.group_desc}"
        row["rank 0's group"] = str(dist.get_process_group_ranks(group))
        rows.append(row | cells)
        total += sent
    return rows, total


def gather_cells(report, counted: dict, name: str, group, formula, mesh) -> tuple:
    """What is counted along one axis, checked; and the bytes that a rank sends."""
    axis = f"{name} over {group.group_desc}"
    calls = 0
    nbytes = 0
    sent = 0
    for call, payloads in counted.items():
        if call[3] == group.group_desc:
            calls += len(payloads)
            nbytes += sum(payloads)
            sent += lesson00.ring(call[2], sum(payloads), group.size())
    is_sent = group.size() > 1  # one rank has everything
    cell(report, f"calls: {axis}", calls, "1" if is_sent else "0")
    expected = formula if is_sent else "0"
    shown = cell(report, f"bytes: {axis}", nbytes, expected, **mesh)
    return {"bytes": shown, "ring": f"{sent:,}", "formula": formula}, sent


def show_placements_2d(report, full: lesson01.MLP, mlp: lesson01.MLP, axes) -> None:
    """The parameters' shapes on the 2D mesh, and how they are split."""
    rows = []
    for name, p in full.named_parameters():
        slice_of_p = mlp.get_parameter(name)
        row = {"parameter": name, "global": list(p.shape)}
        row["on a rank"] = list(slice_of_p.shape)
        row.update({f"over {axis}": "Replicate()" for axis in axes})
        for dim, group in getattr(slice_of_p, "shardings", ()):
            row[f"over {group.group_desc}"] = f"Shard({dim})"
        rows.append(row)
    mesh = " × ".join(str(ranks) for ranks in axes.values())
    report.section(f"Who holds what on the mesh outer × inner = {mesh}")
    report.say(
        "Over inner: columns of up_proj, rows of down_proj (TP). Over outer: the other "
        "dim, to store less (FSDP). A bias is split twice on its one dim."
    )
    report.table(rows)


def show_training_2d(report, runs: dict[str, lesson01.MLPRun], args) -> None:
    """Losses, and output and gradients of step 1, compared with one process."""
    report.section("Losses, and output and gradients of step 1: all as in one process")
    names = ("without TP", "FSDP", "2D")  # DP and Megatron: lesson 01
    compared = {name: runs[name] for name in names if name in runs}
    losses = lesson01.values_of(compared, "losses")
    report.compare("losses", losses, lesson00.ALLOWED_LOSS[args.dtype])
    allowed = lesson00.ALLOWED[args.dtype]
    report.compare("outputs", lesson01.values_of(compared, "output"), allowed)
    report.compare("gradients", lesson01.values_of(compared, "gradients"), allowed)


def show_memory_2d(report, runs: dict[str, lesson01.MLPRun]) -> None:
    """Bytes per rank of parameters, gradients and activations saved for backward."""
    # run → parameters (gradients have their shapes); saved: x, GELU's input and output.
    formulas = {
        "without TP": ("θ", "B·S·(D + 2·F)·e"),
        "DP": ("θ", "B·S·(D + 2·F)·e/T"),
        "Megatron": ("(θ - D·e)/T + D·e", "B·S·(D + 2·F/T)·e"),
        "FSDP": ("θ/T", "B·S·(D + 2·F)·e/T"),
        # UpLinear2D saves the gathered x: all features of a rank's samples.
        "2D": ("θ/T", "B·S·(D/outer+2·F/T)·e"),
    }
    report.section("Memory: bytes per rank")
    report.say("saved = saved for backward: x, and the input and output of GELU")
    rows = []
    for name, (of_weights, of_saved) in formulas.items():
        if name not in runs:
            continue
        mlp = runs[name].mlp
        weights = list(mlp.parameters())
        grads = lesson00.nbytes([p.grad for p in weights])
        saved = lesson00.saved_bytes(partial(mlp, runs[name].x), weights)
        row = {"run": name}
        row["params"] = cell(
            report, f"memory: parameters, {name}", lesson00.nbytes(weights), of_weights
        )
        row["grads"] = cell(report, f"memory: gradients, {name}", grads, of_weights)
        row["saved"] = cell(report, f"memory: saved, {name}", saved, of_saved)
        rows.append(row | {"params =": of_weights, "saved =": of_saved})
    report.table(rows)


def show_communication_2d(report: lesson00.Report, args) -> None:
    """Collectives per step against formulas."""
    weights = "2·D·F·e"  # without biases; θ has them
    x = "B·S·D·e"
    formulas = {
        ("Megatron", "forward", "all-reduce", "tp"): (1, x),
        ("Megatron", "backward", "all-reduce", "tp"): (1, x),
        ("DP", "backward", "all-reduce", "dp"): (4, "θ"),
        ("FSDP", "forward", "all-gather", "dp"): (4, "θ"),
        ("FSDP", "backward", "all-gather", "dp"): (2, weights),  # gathered again
        ("FSDP", "backward", "reduce-scatter", "dp"): (4, "θ"),
        # Over outer: FSDP of an inner rank's θ/inner bytes.
        ("2D", "forward", "all-gather", "outer"): (4, "θ/inner"),
        ("2D", "backward", "all-gather", "outer"): (2, f"{weights}/inner"),
        ("2D", "backward", "reduce-scatter", "outer"): (4, "θ/inner"),
        # Over inner: TP of x and y.
        ("2D", "forward", "all-gather", "inner"): (1, f"{x}/outer"),
        ("2D", "forward", "reduce-scatter", "inner"): (1, f"{x}/outer"),
        ("2D", "backward", "all-gather", "inner"): (1, f"{x}/outer"),
        ("2D", "backward", "reduce-scatter", "inner"): (1, f"{x}/outer"),
    }
    report.section("Communication per step; ring: bytes that a rank of a ring sends")
    report.say("4 calls are of two weights and two biases. DP and Megatron: lesson 01.")
    ranks = dict(args.axes, tp=args.ranks, dp=args.ranks)
    report.ledger(on_axes(formulas, ranks), brief=["Megatron", "DP"])
    sent = report.sent  # run → bytes that a rank of a ring sends
    if not sent:
        return
    total = {"ring, total": "bytes"}
    report.table([total | {run: f"{nbytes:,}" for run, nbytes in sent.items()}])
    sentences = []
    for run, other in (("FSDP", "DP"), ("2D", "FSDP"), ("2D", "Megatron")):
        if run in sent and other in sent:
            times = sent[run] / sent[other]
            sentences.append(f"{run} sends {times:.2f} times as much as {other}.")
    report.say(" ".join(sentences))


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    text = "by default a size that the number of ranks divides"
    for flag in ("--hidden", "--width", "--batch-size"):
        parser.add_argument(flag, type=lesson00.positive, default=0, help=text)
    parser.add_argument("--seq-len", type=lesson00.positive, default=8)
    parser.add_argument("--steps", type=lesson00.positive, default=3)
    text = "the 2D mesh (2 ranks on inner if the number of ranks is even)"
    parser.add_argument("--mesh", metavar="OUTERxINNER", help=text)
    lesson00.launch(main, sizes, parser)
