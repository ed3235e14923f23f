r"""Beyond the lessons, 08: training that is bitwise identical for 1, 2, 4 and 8 ranks.

Adding floats rounds: (a + b) + c differs from a + (b + c) in the last bits. Tensor
parallelism adds in an order that depends on T, so its results differ from those of one
process by about 1e-7, as lessons 00 to 05 allow. But if every sum is taken in an order
that does not depend on T, then losses, gradients and parameters do not depend on T
either: not in a single bit. A difference of any size is then a bug.

Run it on 1, 2, 4 or 8 ranks, and compare the hashes:

    torchrun --standalone --nproc_per_node=2 beyond/08_same_bits.py

What you will see: a sum of 16 terms that is bitwise identical for every T; an MLP whose
weights are computed in 8 blocks, compared with plain TP; the transformer of lesson 02,
trained without TP, with plain TP, and in blocks, with a hash of all bits of its losses,
gradients and parameters; and what it costs in bytes.

Exercises (answers: notebooks/08_same_bits.ipynb, in the section that is named):
    Set BLOCKS = 16. All hashes of "in blocks" change. Are they still the same for every
        T? (section 3)
    Run on 2 ranks, then on 4, with --break library. Why does it need 4? (section 2)
    Leave out split's .contiguous(). Do the hashes change on your machine? (section 3)

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. lesson02.tp_transformer is defined in lesson 02, and so on.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), T ranks in the TP group, e
    bytes per element. UPPERCASE is the full size, lowercase is this rank's slice.
    partial_ in front of a name: full shape, still to be summed over the ranks.

Sources: arXiv:2511.17826 (tree-based kernels that do not depend on T);
    github.com/sgl-project/sglang/pull/15041 (the same in an inference engine).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from course import lesson00, lesson01, lesson02
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 08: sums in an order that does not depend on T
# Read lines 59 to 256, in about 20 minutes. Stop at RUN.

# From lesson 00: all_gather, which copies bits and adds nothing. From lesson 01: f is
# the identity forward and an all-reduce backward, g is the reverse. A column-parallel
# linear needs f before it, a row-parallel linear needs g after it. These all-reduces
# are the sums over ranks. From lesson 02: tp_transformer(full, tp_group).

# ---- A sum over terms on several ranks


def tree_sum(terms: list[Tensor]) -> Tensor:
    """Add up each half on its own, then the two sums: (a + b) + (c + d), and so on."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


def tree_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce in an order that we choose, so that it can be the same for every T.

    The order in which a library's all-reduce adds depends on T. Here each rank gets all
    x and adds them as a tree. Example: each rank first sums its 16/T terms with
    tree_sum and passes the result as x. Both trees together form one binary tree over
    the 16 terms. That tree is the same for T = 1, 2, 4, 8 and 16, so the result is
    bitwise identical.

    Shapes: x [...] → [...], Partial() → Replicate(). T is a power of 2.
    Communication: 1 all-gather on T × x's elements. On a ring that is T/2 times the
        bytes of an all-reduce.
    """
    return tree_sum(list(lesson00.all_gather(x[None], 0, group)))


def digest(*tensors) -> str:
    """The first digits of a hash of all bits of these tensors or numbers."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(torch.as_tensor(x, dtype=torch.float64).cpu().numpy().tobytes())
    return sha.hexdigest()[:12]


# ---- Parallel linears in blocks

# A matrix product contains sums, too, and the order in which a library adds there may
# depend on the shape of the matrices. So a slice of a weight is not one product: every
# weight that T ranks share is computed in 8 blocks, of which a rank has 8/T. For every
# T these are the same 8 products of the same shapes.
BLOCKS = 8


class CopyToBlocks(torch.autograd.Function):
    """Megatron's f for blocks: copies forward, one tree of partial gradients backward.

    Shapes: x [B, S, D] → a tuple of 8/T tensors [B, S, D].
    Communication: backward, 1 all-gather on T·B·S·D elements.
    """

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup):
        ctx.tp_group = tp_group
        return tuple(x.view_as(x) for _ in range(BLOCKS // tp_group.size()))

    @staticmethod
    def backward(ctx, *partial_grads: Tensor):
        # One partial dL/dx per block, because each block used all of x.
        return tree_all_reduce(tree_sum(list(partial_grads)), ctx.tp_group), None


class ReduceFromBlocks(torch.autograd.Function):
    """Megatron's g for blocks: one tree of partial results forward, copies backward.

    Shapes: 8/T tensors [B, S, D], Partial() → y [B, S, D], Replicate().
    Communication: forward, 1 all-gather on T·B·S·D elements.
    """

    @staticmethod
    def forward(ctx, tp_group: dist.ProcessGroup, *partial_ys: Tensor):
        ctx.blocks = len(partial_ys)
        return tree_all_reduce(tree_sum(list(partial_ys)), tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is the sum of all terms, so dL/dy is the gradient of each of them.
        return None, *(grad for _ in range(ctx.blocks))


def blocked_column_linears(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """f, then column-parallel linears of the same input, one block at a time.

    Shapes: x [B, S, D] → a list of tensors [B, S, f].
    """
    copies = CopyToBlocks.apply(x_BSD, linears[0].tp_group)
    outputs = []
    for linear in linears:
        weights = lesson00.split(linear.weight, 0, len(copies))
        biases = [None] * len(copies)
        if linear.bias is not None:
            biases = lesson00.split(linear.bias, 0, len(copies))
        blocks = []
        for x, weight, bias in zip(copies, weights, biases):
            blocks.append(F.linear(x, weight, bias))
        outputs.append(torch.cat(blocks, -1))
    # With several linears a copy has several gradients. Autograd adds them in the
    # reverse order of these calls, which is the same for every T.
    return outputs


def blocked_row_linear(x_BSf: Tensor, linear: nn.Module) -> Tensor:
    """A row-parallel linear, one block at a time, then g.

    Shapes: x [B, S, f] → [B, S, D].
    """
    blocks = BLOCKS // linear.tp_group.size()
    partial_ys = []
    weights = lesson00.split(linear.weight, 1, blocks)
    for x, weight in zip(lesson00.split(x_BSf, -1, blocks), weights):
        partial_ys.append(F.linear(x, weight))
    y_BSD = ReduceFromBlocks.apply(linear.tp_group, *partial_ys)
    if linear.bias is None:
        return y_BSD
    return y_BSD + linear.bias


def blocked_column_linear(x_BSD: Tensor, linear: nn.Module) -> Tensor:
    """One column-parallel linear with its f. Shapes: x [B, S, D] → [B, S, f]."""
    return blocked_column_linears(x_BSD, linear)[0]


class BlockedLinear(nn.Module):
    """A parallel linear that is computed in blocks, with the same parameters.

    Args:
        linear: a ColumnParallelLinear or a RowParallelLinear.
        compute: blocked_column_linear or blocked_row_linear.
    """

    def __init__(self, linear: nn.Module, compute):
        super().__init__()
        self.tp_group = linear.tp_group
        self.weight = linear.weight
        self.bias = linear.bias
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self)


def blocked_mlp(full: lesson01.MLP, tp_group: dist.ProcessGroup) -> lesson01.MLP:
    """tp_mlp of lesson 01, in blocks. Shapes: x [B, S, D] → [B, S, D]."""
    mlp = lesson01.tp_mlp(full, tp_group)
    mlp.up_proj = BlockedLinear(mlp.up_proj, blocked_column_linear)
    mlp.down_proj = BlockedLinear(mlp.down_proj, blocked_row_linear)
    return mlp


def same_bits_transformer(full: lesson02.Transformer, tp_group) -> lesson02.Transformer:
    """tp_transformer of lesson 02, in blocks: bitwise identical for T = 1, 2, 4 and 8.

    What is replicated (embedding, LayerNorms, head, loss) has the same shapes for every
    T, and attention computes each head on its own: there is nothing to change.
    Another machine or another library may add in another order inside a block. Its
    hashes differ from these, but each must again be one hash for every T.

    Communication: for each all-reduce of B·S·D elements of tp_transformer, an
        all-gather of T·B·S·D elements.
    """
    model = lesson02.tp_transformer(full, tp_group)
    for layer, full_layer in zip(model.layers, full.layers):
        attn = layer.self_attn
        attn.project_qkv = blocked_column_linears
        attn.o_proj = BlockedLinear(attn.o_proj, blocked_row_linear)
        layer.mlp = blocked_mlp(full_layer.mlp, tp_group)
    return model


# ---- The norm of the gradient is a sum over ranks, too


def tree_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the full gradient: squares are summed per block, then over blocks.

    Communication: one all-gather of T float64.
    """
    blocks = BLOCKS // tp_group.size()
    of_blocks = [0.0] * blocks
    replicated = 0.0
    for p in model.parameters():
        if lesson01.shardings_of(p):
            dim, _ = lesson01.shardings_of(p)[0]
            for i, block in enumerate(lesson00.split(p.grad, dim, blocks)):
                of_blocks[i] = of_blocks[i] + block.double().square().sum()
        else:  # every rank holds all of it: no sum over ranks
            replicated = replicated + p.grad.double().square().sum()
    sharded = tree_all_reduce(tree_sum(of_blocks), tp_group)
    return math.sqrt(sharded + replicated)


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """Sums, an MLP and a training run, each in an order that does not depend on T."""
    tp_group = lesson00.mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    # A group of one rank, for the runs that every rank makes on its own.
    alone = lesson00.mesh_groups({"all": args.ranks, "alone": 1}, args.timeout)["alone"]
    size = lesson02.sizes_of(args)
    report.begin({"tp": args.ranks}, size)
    full = lesson02.make_transformer(args)

    show_sums(report, tp_group)
    show_mlps(report, tp_group, alone)

    batches = lesson02.make_batches(__doc__, args, args.steps)
    runs = {}
    model = copy.deepcopy(full)
    norm_of = lesson02.norm_by_pytorch
    runs["without TP"] = train_with("without TP", model, batches, args, norm_of)
    with report.column("TP"):
        model = lesson02.tp_transformer(full, tp_group)
        norm_of = lambda model: lesson02.global_norm(model, tp_group)
        runs["TP"] = train_with("TP", model, batches, args, norm_of)
    with report.column("blocks, T = 1"):
        model = same_bits_transformer(full, alone)
        norm_of = lambda model: tree_norm(model, alone)
        runs["blocks, T = 1"] = train_with("T = 1", model, batches, args, norm_of)
    with report.column("in blocks"):
        model = same_bits_transformer(full, tp_group)
        norm_of = lambda model: tree_norm(model, tp_group)
        runs["in blocks"] = train_with("in blocks", model, batches, args, norm_of)

    show_losses(report, runs)
    show_hashes(report, runs)
    show_cost(report, size)


def train_with(name: str, model, batches, args, norm_of) -> lesson02.TrainingRun:
    """Train as lesson 02 does; norm_of(model) is the norm for clipping."""
    losses = {}
    norms = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        torch.manual_seed(args.seed + step)  # the same dropout masks on all ranks
        optimizer.zero_grad()
        with lesson00.COMM.label(name, "forward"):
            loss = lesson02.mean_loss(model(tokens_BS), target_BS)
        with lesson00.COMM.label(name, "backward"):
            loss.backward()
        if step == 1:
            gradients = lesson02.unshard_model(model, "grad")
        with lesson00.COMM.label(name, "clipping"):
            norm = norm_of(model)
        lesson02.clip_gradients(model, args.clip, norm)
        optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm
    parameters = lesson02.unshard_model(model, "data")
    return lesson02.TrainingRun(model, optimizer, losses, norms, gradients, parameters)


def differing(got: Tensor, expected: Tensor) -> int:
    """How many elements differ, by however little."""
    return int((got != expected).sum())


# ---- The sections of the output, in order


def show_sums(report: lesson00.Report, group) -> None:
    """16 terms, added one by one and as a tree, by one process and by all ranks."""
    T = group.size()
    dtype = getattr(torch, report.args.dtype)
    generator = torch.Generator().manual_seed(report.args.seed)
    # The same 16 terms for every T; this rank holds 16/T of them.
    terms = torch.randn(16, 1000, generator=generator, dtype=dtype)
    terms = list(terms.to(report.args.device))  # drawn on the CPU, on any device
    local_terms = terms[group.rank() * 16 // T :][: 16 // T]
    with lesson00.COMM.label("one by one", ""):
        summed = lesson00.all_reduce(sum(local_terms), group)
    with lesson00.COMM.label("tree", ""):
        summed_as_tree = tree_all_reduce(tree_sum(local_terms), group)
    rows = [
        sum_row(report, "one by one", sum(terms), summed, "all-reduce", group),
        sum_row(report, "tree", tree_sum(terms), summed_as_tree, "all-gather", group),
    ]
    # The sum one by one may differ; the tree must not, on any rank.
    is_other = differs(summed_as_tree, terms)
    text = "the tree's sum of 16 terms has other bits than with T = 1"
    if not report.check("bits", "sum of 16 terms, tree", is_other, text=text):
        rows[1]["off"].append(f"T = {T}")
    report.section(
        "A sum of 16 terms of 1,000 elements; a hash stands for all its bits"
    )
    report.say("   Compare runs with 1, 2, 4 and 8 ranks: the tree has one hash.")
    report.table("sums", rows)


def differs(summed: Tensor, terms: list[Tensor]) -> float:
    """1.0 if a bit differs from the tree that one process makes, otherwise 0.0."""
    return float(digest(summed) != digest(tree_sum(terms)))


def sum_row(report, name: str, expected, summed, collective: str, group) -> dict:
    """A row of section 1, with the payload of its collective."""
    T = group.size()
    call = lesson00.Call(name, "", collective, group.group_desc)
    row = {"added": name, "one process": digest(expected), f"T = {T}": digest(summed)}
    row["elements that differ"] = differing(summed, expected)
    row["collective"] = collective
    row["bytes"] = lesson00.COMM.bytes[call]
    # The payload of an all-gather is what comes out of it: T times x.
    copies = T if collective == "all-gather" else 1
    payload = copies * summed.nbytes if T > 1 else 0  # one rank sends nothing
    report.expect(row, "bytes", "bytes", f"sum, {name}", payload)
    diff = lesson00.rel_diff(summed, expected)
    if not report.check("values", f"sum, {name}", diff, report.allowed):
        row["off"].append(f"T = {T}")
    return row


def mlp_tensors(mlp: lesson01.MLP, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """What one forward and backward pass of an MLP computes, unsharded."""
    x = x.clone().requires_grad_()  # each MLP gets a gradient of its own
    h_BSf = mlp.up_proj(x)
    y_BSD = mlp.down_proj(F.gelu(h_BSf))
    y_BSD.backward(upstream)
    tensors = {
        "up_proj's output": lesson00.all_gather(h_BSf, 2, mlp.up_proj.tp_group),
        "down_proj's output, a sum over ranks": y_BSD.detach(),
        "dL/dx, a sum over ranks": x.grad,
    }
    for name, gradient in lesson02.unshard_model(mlp, "grad").items():
        tensors[f"dL/d {name}"] = gradient
    return tensors


def show_mlps(report: lesson00.Report, tp_group, alone) -> None:
    """Which tensors of an MLP of width D depend on T, plain and in blocks."""
    args = report.args
    dtype = getattr(torch, args.dtype)
    full = lesson01.MLP(args.hidden, args.hidden).to(args.device, dtype)
    shape = (args.batch_size, args.seq_len, args.hidden)
    x = torch.randn(shape).to(full.up_proj.weight)  # its dtype and device
    upstream = torch.randn(shape).to(full.up_proj.weight)
    # On a group of one rank, T is 1: each rank makes its own reference.
    tp = mlp_tensors(lesson01.tp_mlp(full, tp_group), x, upstream)
    tp_alone = mlp_tensors(lesson01.tp_mlp(full, alone), x, upstream)
    blocked = mlp_tensors(blocked_mlp(full, tp_group), x, upstream)
    blocked_alone = mlp_tensors(blocked_mlp(full, alone), x, upstream)

    rows = []
    for name, expected in blocked_alone.items():
        row = {"tensor": name, "elements": expected.numel()}
        row["TP: differ"] = differing(tp[name], tp_alone[name])
        row["in blocks: differ"] = differing(blocked[name], expected)
        row["off"] = []
        # Blocks change the order of sums, so they may differ from plain TP, slightly.
        diff = lesson00.rel_diff(blocked[name], tp_alone[name])
        if not report.check("values", f"MLP, {name}", diff, report.allowed):
            row["off"].append("tensor")
        is_other = float(digest(blocked[name]) != digest(expected))
        text = f"MLP in blocks: {name} has other bits than with T = 1"
        if not report.check("bits", f"MLP, {name}", is_other, text=text):
            row["off"].append("in blocks: differ")
        rows.append(row)
    report.section(
        f"An MLP: elements that T = {args.ranks} changes, compared with T = 1"
    )
    report.table("mlp", rows)


def show_losses(report: lesson00.Report, runs: dict) -> None:
    """The four runs agree as far as the lessons demand it, with rounding errors."""
    fold = lambda name: "all tensors"  # one row for all gradients, one for parameters
    report.section("Training: losses, gradients of step 1, parameters at the end")
    losses = lesson01.values_of(runs, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)
    report.compare("gradients", lesson01.values_of(runs, "gradients"), fold=fold)
    report.compare("norms", lesson01.values_of(runs, "norms"))
    report.compare("parameters", lesson01.values_of(runs, "parameters"), fold=fold)


def show_hashes(report: lesson00.Report, runs: dict) -> None:
    """All bits of what training gives: one hash for every T, if in blocks."""
    kinds = ["losses", "gradients", "norms", "parameters"]
    rows = {}
    for name, run in runs.items():
        rows[name] = {"run": name}
        for kind in kinds:
            rows[name][kind] = digest(*getattr(run, kind).values())
    if "in blocks" in rows and "blocks, T = 1" in rows:  # neither has raised an error
        row = rows["in blocks"]
        row["off"] = []
        for kind in kinds:
            is_other = float(row[kind] != rows["blocks, T = 1"][kind])
            text = f"training in blocks: {kind} have other bits than with T = 1"
            if not report.check("bits", f"training, {kind}", is_other, text=text):
                row["off"].append(kind)
            # Each rank has its own reference, so ranks also compare with each other.
            hashes = set(lesson00.gather_objects(row[kind]))
            text = f"the ranks have {len(hashes)} different hashes of {kind}"
            report.check("replicas", f"hash of {kind}", len(hashes) - 1, text=text)
    report.section(
        "Hashes of all bits of these, for 1, 2, 4 and 8 ranks (run them all)"
    )
    report.say("   TP has another hash of the parameters for each T. Blocks have one.")
    report.table("hashes", list(rows.values()))


def show_cost(report: lesson00.Report, size: dict[str, int]) -> None:
    """What a step sends: an all-gather for each all-reduce of plain TP."""
    formulas = {
        lesson00.Call("TP", "forward", "all-reduce", "tp"): [
            lesson00.Calls("2·L", "B·S·D·e")
        ],
        lesson00.Call("TP", "backward", "all-reduce", "tp"): [
            lesson00.Calls("2·L", "B·S·D·e")
        ],
        lesson00.Call("TP", "clipping", "all-reduce", "tp"): [
            lesson00.Calls("1", "8")
        ],  # a float64
        lesson00.Call("in blocks", "forward", "all-gather", "tp"): [
            lesson00.Calls("2·L", "T·B·S·D·e")
        ],
        lesson00.Call("in blocks", "backward", "all-gather", "tp"): [
            lesson00.Calls("2·L", "T·B·S·D·e")
        ],
        lesson00.Call("in blocks", "clipping", "all-gather", "tp"): [
            lesson00.Calls("1", "8·T")
        ],
    }
    report.section("Communication per step; ring = bytes that a rank of a ring sends")
    report.ledger(formulas, size, steps=report.args.steps)
    report.say(
        "   On a ring, blocks send T/2 times the bytes of TP: the same for T = 2."
    )


# ==== BREAK IT

# Each keeps all values right, up to rounding errors. Only the bits tell.
BREAKS = {
    "tree": dict(
        target="tree_sum",
        old="    return tree_sum(terms[:half]) + tree_sum(terms[half:])\n",
        new="    return sum(terms)\n",
        what="terms are added one after the other, in rank order, not as a tree",
        symptom="sums are right, but their last bits depend on the number of ranks",
        why="each rank adds its own terms first, so another T pairs other terms",
        reported="github.com/NVIDIA/Megatron-LM/issues/1736",
    ),
    "library": dict(
        target="tree_all_reduce",
        old="    return tree_sum(list(lesson00.all_gather(x[None], 0, group)))\n",
        new="    return lesson00.all_reduce(x, group)\n",
        what="the sum over ranks is left to the library's all-reduce",
        symptom="on 2 ranks all bits are right; on 4 and more the last ones differ",
        why="a library chooses its order by T and by the size of the message. On 2 "
        "ranks there is only one order, because a + b = b + a",
        reported="github.com/vllm-project/vllm/issues/51290",
    ),
    "blocks": dict(
        target="blocked_row_linear",
        old="    blocks = BLOCKS // linear.tp_group.size()\n",
        new="    blocks = 1\n",
        what="each rank computes its slice of a row-parallel weight as one product",
        symptom="the sum over ranks is a tree, and yet its last bits depend on T",
        why="the sum inside a product has D/T terms on a rank, in the library's order: "
        "another T puts other terms into one product",
        reported="github.com/sgl-project/sglang/pull/15041",
    ),
    "accumulate": dict(
        target="CopyToBlocks.backward",
        old="tree_sum(list(partial_grads))",
        new="sum(partial_grads)",
        what="backward adds the gradients of a rank's blocks one by one, not as a tree",
        symptom="forward and step 1's loss are bitwise identical; gradients are not",
        why="backward has sums that forward does not have: their order matters as well",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3392",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    """The sizes that no T changes are fixed; BLOCKS must be a multiple of the ranks."""
    sizes = {"steps": 3, "layers": 2, "batch_size": 4, "seq_len": 32}
    args = lesson00.lesson_parser(__doc__, BREAKS, sections=5, **sizes).parse_args()
    if BLOCKS % ranks:
        rest = f"{BLOCKS} blocks % {ranks} ranks = {BLOCKS % ranks}, not 0"
        raise ValueError(f"{rest}; start 1, 2, 4 or 8 ranks")
    args.vocab_size = 257
    args.hidden = 64
    args.heads = 16
    args.kv_heads = 8
    args.dropout = 0.1
    args.clip = 1.0
    return args


# endregion


if __name__ == "__main__":
    lesson00.launch(main, parse_args, globals())
