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

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. lesson01.MLP is defined in lesson 01, and so on.

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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from course import lesson00, lesson01
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 13: weights in slices, and two ways to split at once
# Read lines 61 to 203, in about 14 minutes. Stop at RUN.

# From lesson 00: mesh_groups lays out the ranks as a grid and returns this rank's group
# along each axis; all_gather joins slices; reduce_scatter sums, and each rank keeps its
# slice of the sum. From lesson 01: AllGatherWithGrad has a reduce-scatter as backward,
# ReduceScatterWithGrad an all-gather; a parameter remembers its shardings.

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
    p.shardings = shardings  # lesson01.unshard undoes the last split first
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
    # Every axis that has a run of its own; all of them are made of the same ranks.
    axes = {"tp": args.ranks, "dp": args.ranks}
    axes.update(args.mesh)  # outer, inner
    tp_group = lesson00.mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    # FSDP is the 2D mesh with all ranks on outer, called dp, and one on inner.
    fsdp_mesh = lesson00.mesh_groups({"dp": args.ranks, "single": 1}, args.timeout)
    dp_group = fsdp_mesh["dp"]
    mesh_2d = lesson00.mesh_groups(args.mesh, args.timeout)
    size = sizes_of_2d(args)
    report.begin(args.mesh, size)
    report.mesh = axes
    show_products_2d(report, size)

    full, batch = lesson01.make_mlp_and_batch(args)
    train_mlp = lesson01.train_mlp
    runs = {}
    mlp = copy.deepcopy(full)
    runs["without TP"] = train_mlp("without TP", mlp, batch, args)
    lesson01.check_reference_mlp(report, runs["without TP"], size)
    with report.column("DP"):
        mlp = copy.deepcopy(full)
        runs["DP"] = train_mlp("DP", mlp, batch, args, dp_group)
    with report.column("Megatron"):
        mlp = lesson01.tp_mlp(full, tp_group)
        runs["Megatron"] = train_mlp("Megatron", mlp, batch, args)
    with report.column("FSDP"):
        single = fsdp_mesh["single"]
        mlp = mlp_2d(full, dp_group, single)
        runs["FSDP"] = train_2d("FSDP", mlp, batch, args, dp_group, single)
    with report.column("2D"):
        mlp = mlp_2d(full, mesh_2d["outer"], mesh_2d["inner"])
        show_placements_2d(report, full, mlp)
        outer, inner = mesh_2d.values()
        runs["2D"] = train_2d("2D", mlp, batch, args, outer, inner)
    show_training_2d(report, runs)
    show_memory_2d(report, runs, size)
    show_communication_2d(report, size)


def train_2d(name, mlp, batch, args, outer, inner) -> lesson01.MLPRun:
    """Train as lesson01.train_mlp does, with x and target split on two dims.

    Over outer a rank has its own samples, over inner its own features of them.
    """
    shardings = ((0, outer), (2, inner))
    x = shard_2d(batch[0], *shardings)
    target = shard_2d(batch[1], *shardings).detach()
    optimizer = lesson01.sgd_of_mlp(mlp, x, args)
    losses = {}
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        with lesson00.COMM.label(name, "forward"):
            y = mlp(x)
        # A mean over this rank's samples. Divided by the number of slices of the batch,
        # the losses of all ranks add up to the loss of the full batch; and backward,
        # which sums gradients over ranks, then finds the gradients of that.
        loss = lesson01.squared_error(y, target) / outer.size()
        with lesson00.COMM.label(name, "backward"):
            loss.backward()
        # For the report only, so without a label: the full y and its loss.
        full_y = lesson01.unshard(y.detach(), shardings)
        full_loss = lesson01.squared_error(full_y, batch[1])
        losses[f"loss, step {step}"] = full_loss.item()
        if step == 1:
            output = {"y": full_y}
            gradients = lesson01.gradients_of_mlp(mlp, x)
        optimizer.step()
    return lesson01.MLPRun(mlp, x, losses, output, gradients)


# ---- The sections of the output, in order


def show_products_2d(report, size: dict[str, int]) -> None:
    """The product on each mesh outer × inner, with every matrix split on both axes."""
    # Every rank has the full matrices, so each can compute what must come out.
    a_IJ = lesson00.random_matrix(size["I"], size["J"], report.args)
    b_JK = lesson00.random_matrix(size["J"], size["K"], report.args)
    T = size["T"]
    rows = []
    totals = {}  # mesh → bytes
    for inner in range(1, T + 1):
        if T % inner == 0:
            mesh = {"outer": T // inner, "inner": inner}
            rows_of_mesh = product_rows(report, mesh, a_IJ, b_JK, size)
            sent = sum(row["ring"] for row in rows_of_mesh)  # along both axes
            totals[f"{T // inner} × {inner}"] = sent
            rows.extend(rows_of_mesh)
    report.section(
        "A[I_outer, J_inner] · B[J_outer, K_inner] on each mesh of the ranks"
    )
    report.say(
        "   Every rank holds 1/T of A, B and C on every mesh. Formula = payload of an\n"
        "   all-gather; an axis of 1 rank sends nothing, so bytes are 0 there."
    )
    report.table("products", rows, hide=["calls"])
    texts = [f"{sent:,} on {mesh}" for mesh, sent in totals.items()]
    report.say(
        lesson00.wrap(f"   Bytes that a rank of a ring sends: {', '.join(texts)}.")
    )


def product_rows(report, mesh: dict[str, int], a_IJ, b_JK, size) -> list[dict]:
    """The product on one mesh: a row for what is gathered along each axis."""
    groups = lesson00.mesh_groups(mesh, report.args.timeout)
    outer = groups["outer"]
    inner = groups["inner"]
    name = f"{mesh['outer']} × {mesh['inner']}"
    # Rows are split along outer, columns along inner.
    place = lambda full: lesson00.shard(lesson00.shard(full, 0, outer), 1, inner)
    with lesson00.COMM.label(name, ""):
        c_ik = matmul_2d(place(a_IJ), place(b_JK), outer, inner)

    # A is split on J along inner, B along outer: there they are gathered.
    row_of_a = {"mesh": name, "gathered": "A over inner"}
    row_of_b = {"mesh": name, "gathered": "B over outer"}
    for row, group in ((row_of_a, inner), (row_of_b, outer)):
        row["rank 0's group"] = str(dist.get_process_group_ranks(group))
    sizes = dict(size, **mesh)
    lesson00.check_calls(report, row_of_a, name, "I·J·e/outer", sizes, inner)
    lesson00.check_calls(report, row_of_b, name, "J·K·e/inner", sizes, outer)
    lesson00.check_value(report, row_of_b, "mesh", name, c_ik, place(a_IJ @ b_JK))
    return [row_of_a, row_of_b]


def show_placements_2d(report, full: lesson01.MLP, mlp: lesson01.MLP) -> None:
    """The parameters' shapes on the 2D mesh, and how they are split."""
    axes = report.args.mesh
    rows = []
    for name, p in full.named_parameters():
        slice_of_p = mlp.get_parameter(name)
        row = {"parameter": name, "global": list(p.shape)}
        row["on a rank"] = list(slice_of_p.shape)
        row.update({f"over {axis}": "Replicate()" for axis in axes})
        for dim, group in lesson01.shardings_of(slice_of_p):
            row[f"over {group.group_desc}"] = f"Shard({dim})"
        rows.append(row)
    mesh = " × ".join(str(ranks) for ranks in axes.values())
    report.section(f"Who holds what on the mesh outer × inner = {mesh}")
    report.say(
        "   Over inner: columns of up_proj, rows of down_proj (TP). Over outer: the\n"
        "   other dim, to store less (FSDP). A bias is split twice on its one dim."
    )
    report.table("holdings", rows)


def show_training_2d(report, runs: dict[str, lesson01.MLPRun]) -> None:
    """Losses, and output and gradients of step 1, compared with one process."""
    report.section("Losses, and output and gradients of step 1: all as in one process")
    names = ("without TP", "FSDP", "2D")  # DP and Megatron: lesson 01
    compared = {name: runs[name] for name in names if name in runs}
    losses = lesson01.values_of(compared, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)
    report.compare("outputs", lesson01.values_of(compared, "output"))
    report.compare("gradients", lesson01.values_of(compared, "gradients"))


def show_memory_2d(report, runs: dict[str, lesson01.MLPRun], size: dict) -> None:
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
    report.say("   saved = saved for backward: x, and the input and output of GELU")
    lesson01.show_memory_rows(report, runs, formulas, size)


def show_communication_2d(report, size: dict[str, int]) -> None:
    """Collectives per step against formulas."""
    Call = lesson00.Call
    Calls = lesson00.Calls
    # Two weights, and the biases of F and of D elements.
    all_four = [Calls("2", "D·F·e"), Calls("1", "F·e"), Calls("1", "D·e")]
    weights = [Calls("2", "D·F·e")]
    activation = [Calls("1", "B·S·D·e")]
    whole_batch = {
        Call("Megatron", "forward", "all-reduce", "tp"): activation,
        Call("Megatron", "backward", "all-reduce", "tp"): activation,
        Call("DP", "backward", "all-reduce", "dp"): all_four,
        Call("FSDP", "forward", "all-gather", "dp"): all_four,
        Call("FSDP", "backward", "all-gather", "dp"): weights,  # gathered again
        Call("FSDP", "backward", "reduce-scatter", "dp"): all_four,
    }
    # Over outer: FSDP of an inner rank's θ/inner bytes. Over inner: TP of x and y.
    sliced = [Calls("4", "θ/(4·inner)")]
    weights = [Calls("2", "D·F·e/inner")]
    activation = [Calls("1", "B·S·D·e/outer")]
    by_mesh = {
        Call("2D", "forward", "all-gather", "outer"): sliced,
        Call("2D", "backward", "all-gather", "outer"): weights,
        Call("2D", "backward", "reduce-scatter", "outer"): sliced,
        Call("2D", "forward", "all-gather", "inner"): activation,
        Call("2D", "forward", "reduce-scatter", "inner"): activation,
        Call("2D", "backward", "all-gather", "inner"): activation,
        Call("2D", "backward", "reduce-scatter", "inner"): activation,
    }
    report.section("Communication per step; ring: bytes that a rank of a ring sends")
    hidden = ["axis", "calls"]  # a run has one axis, and --json has the calls
    # DP and Megatron are lesson 01's: only with --verbose, or if something is wrong.
    brief = ["Megatron", "DP"]
    steps = report.args.steps
    report.ledger(whole_batch, size, steps=steps, hide=hidden, brief=brief)
    if report.mesh["outer"] > 1 and not report.is_edited:
        report.say("   4 calls: two weights and two biases, together θ/inner bytes")
    report.ledger(by_mesh, size, steps=report.args.steps)
    if report.args.ranks == 1:
        return
    sent = {}  # run → bytes that a rank of a ring sends
    for row in report.data["communication"]:
        sent[row["run"]] = sent.get(row["run"], 0) + row["ring"]
    report.table("totals", [{"ring, total": "bytes", **sent}])
    sentences = []
    for run, other in (("FSDP", "DP"), ("2D", "FSDP"), ("2D", "Megatron")):
        if run in sent and other in sent:
            times = sent[run] / sent[other]
            sentences.append(f"{run} sends {times:.2f} times as much as {other}.")
    report.conclude(" ".join(sentences))


# ==== BREAK IT

BREAKS = {
    "plain": dict(
        target="UpLinear2D.forward",
        old="    b_f = lesson01.AllGatherWithGrad.apply(self.bias, 0, self.outer)\n",
        new="    b_f = lesson00.all_gather(self.bias, 0, self.outer)\n",
        what="a plain all-gather of the bias, which autograd does not track",
        symptom="no error; up_proj.bias of FSDP and 2D has no gradient and never moves",
        why="the gathered tensor has no history; gradients still flow through the rest "
        "of the graph, so nothing reports the gap",
        reported="github.com/pytorch/pytorch/issues/190419; pytorch/pytorch, 153016; "
        "lucidrains/vector-quantize-pytorch, 158",
    ),
    "average": dict(
        target="train_2d",
        old="        loss = lesson01.squared_error(y, target) / outer.size()\n",
        new="        loss = lesson01.squared_error(y, target)\n",
        what="a rank's loss is not divided by the number of slices of the batch",
        symptom="the loss of step 1 is correct; gradients of FSDP are T times too "
        "large, those of 2D as many times as outer has ranks",
        why="each rank's loss is a mean over its own samples, and the reduce-scatters "
        "of backward add the ranks' gradients up: they do not average",
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
    parser = lesson00.lesson_parser(
        __doc__, BREAKS, sections=5, steps=3, seq_len=8, **multiples
    )
    parser.add_argument("--width", type=lesson00.positive, help="F (4 · hidden)")
    text = "the 2D mesh (2 ranks on inner if the number of ranks is even)"
    parser.add_argument("--mesh", metavar="OUTERxINNER", help=text)
    args = parser.parse_args()
    args.width = args.width or 4 * args.hidden
    for name in ("hidden", "width", "batch_size"):
        lesson01.must_divide(args, name, ranks, "ranks")
    lesson01.raise_refused(args)
    default_mesh = f"{ranks // 2}x2" if ranks % 2 == 0 else f"1x{ranks}"
    text = args.mesh or default_mesh
    axes = [int(axis) for axis in text.split("x") if axis.isdecimal()]
    if len(axes) != 2 or text != f"{axes[0]}x{axes[1]}":
        raise ValueError(f"--mesh {text}: is not OUTERxINNER; take {default_mesh}")
    if math.prod(axes) != ranks:
        product = f"{axes[0]} · {axes[1]} = {math.prod(axes)}"
        advice = f"not {ranks} ranks; take {default_mesh}"
        raise ValueError(f"--mesh {text}: {product}, {advice}")
    args.mesh = {"outer": axes[0], "inner": axes[1]}
    return args


def sizes_of_2d(args) -> dict[str, int]:
    """The letters of the shape legend, and the axes of the 2D mesh."""
    size = lesson01.sizes_of_mlp(args)
    size.update(args.mesh)  # outer, inner
    of_products = lesson00.matrix_sizes(args)
    for letter in "IJK":
        size[letter] = of_products[letter]
    return size


# endregion


if __name__ == "__main__":
    lesson00.launch(main, parse_args, globals())
