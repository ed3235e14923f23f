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
    tools/bug.py 08 library --ranks 2, then --ranks 4. Why does it need 4? (section 2)
    Leave out split's .contiguous(). Do the hashes change on your machine? (section 3)

How to read this file: NEW is the lesson, RUN trains and prints. Bugs to try:
`python tools/bug.py 08`. lesson02.tp_transformer is defined in lesson 02, and so on.

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
    from harness import cell, gather_objects, marked, on_axes, take_calls
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 08: sums in an order that does not depend on T
# Read lines 60 to 257, in about 20 minutes. Stop at RUN.

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
        if lesson01.sharding_of(p):
            dim, _ = lesson01.sharding_of(p)
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
    full = lesson02.make_transformer(args)

    show_sums(report, tp_group, args)
    show_mlps(report, tp_group, alone, args)

    batches = lesson02.make_batches(__doc__, args, args.steps)
    runs = {}
    model = copy.deepcopy(full)
    norm_of = lesson02.norm_by_pytorch
    runs["without TP"] = train_with("without TP", model, batches, args, norm_of)
    # If your edit raises an error in one run, the others continue.
    with report.guard("TP"):
        model = lesson02.tp_transformer(full, tp_group)
        norm_of = lambda model: lesson02.global_norm(model, tp_group)
        runs["TP"] = train_with("TP", model, batches, args, norm_of)
    with report.guard("blocks, T = 1"):
        model = same_bits_transformer(full, alone)
        norm_of = lambda model: tree_norm(model, alone)
        runs["blocks, T = 1"] = train_with("T = 1", model, batches, args, norm_of)
    with report.guard("in blocks"):
        model = same_bits_transformer(full, tp_group)
        norm_of = lambda model: tree_norm(model, tp_group)
        runs["in blocks"] = train_with("in blocks", model, batches, args, norm_of)

    show_losses(report, runs, args)
    show_hashes(report, runs)
    show_cost(report)


def sizes(args) -> dict[str, int]:
    """The sizes that no T changes are fixed; BLOCKS must be a multiple of the ranks."""
    if BLOCKS % args.ranks:
        rest = f"{BLOCKS} blocks % {args.ranks} ranks = {BLOCKS % args.ranks}, not 0"
        raise ValueError(f"{rest}; start 1, 2, 4 or 8 ranks")
    args.vocab_size = 257
    args.hidden = 64
    args.heads = 16
    args.kv_heads = 8
    args.dropout = 0.1
    args.clip = 1.0
    return lesson02.transformer_sizes(args)


def train_with(name: str, model, batches, args, norm_of) -> lesson02.TrainingRun:
    """Train as lesson 02 does; norm_of(model) is the norm for clipping."""
    METER = lesson00.METER
    losses = {}
    norms = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        torch.manual_seed(args.seed + step)  # the same dropout masks on all ranks
        optimizer.zero_grad()
        with METER.phase(name, "forward"):
            loss = lesson02.mean_loss(model(tokens_BS), target_BS)
        with METER.phase(name, "backward"):
            loss.backward()
        if step == 1:
            gradients = lesson02.unshard_model(model, "grad")
        with METER.phase(name, "clipping"):
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


def show_sums(report: lesson00.Report, group, args) -> None:
    """16 terms, added one by one and as a tree, by one process and by all ranks."""
    T = group.size()
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(args.seed)
    # The same 16 terms for every T; this rank holds 16/T of them.
    terms = torch.randn(16, 1000, generator=generator, dtype=dtype)
    terms = list(terms.to(args.device))  # drawn on the CPU, on any device
    local_terms = terms[group.rank() * 16 // T :][: 16 // T]
    with lesson00.METER.phase("one by one", ""):
        summed = lesson00.all_reduce(sum(local_terms), group)
    with lesson00.METER.phase("tree", ""):
        summed_as_tree = tree_all_reduce(tree_sum(local_terms), group)
    allowed = lesson00.ALLOWED[args.dtype]
    plain = sum_row(report, "one by one", sum(terms), summed, "all-reduce", allowed)
    tree = tree_sum(terms)
    as_tree = sum_row(report, "tree", tree, summed_as_tree, "all-gather", allowed)
    # The sum one by one may differ; the tree must not, on any rank.
    is_other = float(digest(summed_as_tree) != digest(tree))
    text = "it has other bits than with T = 1"
    holds = report.check("bits: sum of 16 terms, tree", is_other, text=text)
    as_tree["all ranks"] = marked(as_tree["all ranks"], holds)
    report.section(
        "A sum of 16 terms of 1,000 elements; a hash stands for all its bits"
    )
    report.say("Compare runs with 1, 2, 4 and 8 ranks: the tree has one hash.")
    report.table([plain, as_tree])


def sum_row(report, name: str, expected, summed, collective: str, allowed) -> dict:
    """A row of section 1, with the payload of its collective."""
    counted = take_calls(name).get((name, "", collective, "tp"), [])
    T = report.size["T"]
    # The payload of an all-gather is what comes out of it: T times x.
    payload = summed.nbytes * (T if collective == "all-gather" else 1)
    payload = payload if T > 1 else 0  # one rank sends nothing
    holds = report.check(
        f"values: sum, {name}", lesson00.rel_diff(summed, expected), allowed
    )
    row = {"added": name, "one process": digest(expected)}
    row["all ranks"] = marked(digest(summed), holds)
    row["elements that differ"] = differing(summed, expected)
    row["collective"] = collective
    row["bytes"] = cell(report, f"bytes: sum, {name}", sum(counted), str(payload))
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


def show_mlps(report: lesson00.Report, tp_group, alone, args) -> None:
    """Which tensors of an MLP of width D depend on T, plain and in blocks."""
    full = lesson01.MLP(args.hidden, args.hidden)
    full.to(args.device, getattr(torch, args.dtype))
    like = full.up_proj.weight  # its dtype and device
    x = torch.randn(args.batch_size, args.seq_len, args.hidden).to(like)
    upstream = torch.randn(x.shape).to(like)
    # On a group of one rank, T is 1: each rank makes its own reference.
    tp = mlp_tensors(lesson01.tp_mlp(full, tp_group), x, upstream)
    tp_alone = mlp_tensors(lesson01.tp_mlp(full, alone), x, upstream)
    blocked = mlp_tensors(blocked_mlp(full, tp_group), x, upstream)
    blocked_alone = mlp_tensors(blocked_mlp(full, alone), x, upstream)

    rows = []
    for name, expected in blocked_alone.items():
        row = {"tensor": name, "elements": f"{expected.numel():,}"}
        row["TP: differ"] = f"{differing(tp[name], tp_alone[name]):,}"
        row["in blocks: differ"] = f"{differing(blocked[name], expected):,}"
        # Blocks change the order of sums, so they may differ from plain TP, slightly.
        allowed = lesson00.ALLOWED[args.dtype]
        diff = report.agree(
            f"values: MLP, {name}", blocked[name], tp_alone[name], allowed
        )
        row["tensor"] = marked(name, diff <= allowed)
        is_other = float(digest(blocked[name]) != digest(expected))
        text = "in blocks it has other bits than with T = 1"
        if not report.check(f"bits: MLP, {name}", is_other, text=text):
            row["in blocks: differ"] = marked(row["in blocks: differ"], False)
        rows.append(row)
    report.section(
        f"An MLP: elements that T = {args.ranks} changes, compared with T = 1"
    )
    report.table(rows)


def show_losses(report: lesson00.Report, runs: dict, args) -> None:
    """The four runs agree as far as the lessons demand it, with rounding errors."""
    fold = lambda name: "all tensors"  # one row for all gradients, one for parameters
    allowed = lesson00.ALLOWED[args.dtype]
    values = lambda field: lesson01.values_of(runs, field)
    report.section("Training: losses, gradients of step 1, parameters at the end")
    report.compare("losses", values("losses"), lesson00.ALLOWED_LOSS[args.dtype])
    report.compare("gradients", values("gradients"), allowed, fold=fold)
    report.compare("norms", values("norms"), allowed)
    report.compare("parameters", values("parameters"), allowed, fold=fold)


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
        for kind in kinds:
            # Each rank has its own reference, so ranks also compare with each other.
            hashes = set(gather_objects(row[kind]))
            text = f"the ranks have {len(hashes)} different hashes"
            report.check(f"replicas: hash of {kind}", len(hashes) - 1, text=text)
            is_other = float(row[kind] != rows["blocks, T = 1"][kind])
            text = "in blocks they have other bits than with T = 1"
            holds = report.check(f"bits: training, {kind}", is_other, text=text)
            row[kind] = marked(row[kind], holds)
    report.section(
        "Hashes of all bits of these, for 1, 2, 4 and 8 ranks (run them all)"
    )
    report.say("TP has another hash of the parameters for each T. Blocks have one.")
    report.table(list(rows.values()))


def show_cost(report: lesson00.Report) -> None:
    """What a step sends: an all-gather for each all-reduce of plain TP."""
    calls = 2 * report.size["L"]
    x = "2·L·B·S·D·e"
    gathered = "2·L·T·B·S·D·e"
    formulas = {
        ("TP", "forward", "all-reduce", "tp"): (calls, x),
        ("TP", "backward", "all-reduce", "tp"): (calls, x),
        ("TP", "clipping", "all-reduce", "tp"): (1, "8"),  # a float64
        ("in blocks", "forward", "all-gather", "tp"): (calls, gathered),
        ("in blocks", "backward", "all-gather", "tp"): (calls, gathered),
        ("in blocks", "clipping", "all-gather", "tp"): (1, "8·T"),
    }
    report.section("Communication per step; ring = bytes that a rank of a ring sends")
    report.ledger(on_axes(formulas, {"tp": report.size["T"]}))
    report.say("On a ring, blocks send T/2 times the bytes of TP: the same for T = 2.")


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    defaults = {"--steps": 3, "--layers": 2, "--batch-size": 4, "--seq-len": 32}
    for flag, default in defaults.items():
        parser.add_argument(flag, type=lesson00.positive, default=default)
    lesson00.launch(main, sizes, parser)
