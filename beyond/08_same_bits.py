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
`--break NAME`. The carried parts at the end are from lessons 00, 01 and 02.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), T ranks in the TP group, e
    bytes per element. UPPERCASE is the full size, lowercase is this rank's slice.
    partial_ in front of a name: full shape, still to be summed over the ranks.

Sources: arXiv:2511.17826 (tree-based kernels that do not depend on T);
    github.com/sgl-project/sglang/pull/15041 (the same in an inference engine).
"""

from __future__ import annotations

import copy
import hashlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ==== NEW in 08: sums in an order that does not depend on T

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
    return tree_sum(list(all_gather(x[None], 0, group)))


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
        weights = split(linear.weight, 0, len(copies))
        biases = split(linear.bias, 0, len(copies))
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
    for x, weight in zip(split(x_BSf, -1, blocks), split(linear.weight, 1, blocks)):
        partial_ys.append(F.linear(x, weight))
    y_BSD = ReduceFromBlocks.apply(linear.tp_group, *partial_ys)
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


def blocked_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """tp_mlp of lesson 01, in blocks. Shapes: x [B, S, D] → [B, S, D]."""
    mlp = tp_mlp(full, tp_group)
    mlp.up_proj = BlockedLinear(mlp.up_proj, blocked_column_linear)
    mlp.down_proj = BlockedLinear(mlp.down_proj, blocked_row_linear)
    return mlp


def same_bits_transformer(full: Transformer, tp_group) -> Transformer:
    """tp_transformer of lesson 02, in blocks: bitwise identical for T = 1, 2, 4 and 8.

    What is replicated (embedding, LayerNorms, head, loss) has the same shapes for every
    T, and attention computes each head on its own: there is nothing to change.
    Another machine or another library may add in another order inside a block. Its
    hashes differ from these, but each must again be one hash for every T.

    Communication: for each all-reduce of B·S·D elements of tp_transformer, an
        all-gather of T·B·S·D elements.
    """
    model = tp_transformer(full, tp_group)
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
        if shardings_of(p):
            dim, _ = shardings_of(p)[0]
            for i, block in enumerate(split(p.grad, dim, blocks)):
                of_blocks[i] = of_blocks[i] + block.double().square().sum()
        else:  # every rank holds all of it: no sum over ranks
            replicated = replicated + p.grad.double().square().sum()
    sharded = tree_all_reduce(tree_sum(of_blocks), tp_group)
    return math.sqrt(sharded + replicated)


# ==== RUN


def main(args, report: Report) -> None:
    """Sums, an MLP and a training run, each in an order that does not depend on T."""
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    # A group of one rank, for the runs that every rank makes on its own.
    alone = mesh_groups({"all": args.ranks, "alone": 1}, args.timeout)["alone"]
    size = sizes_of(args)
    report.begin({"tp": args.ranks}, size)
    full = make_transformer(args)

    show_sums(report, tp_group)
    show_mlps(report, tp_group, alone)

    batches = make_batches(__doc__, args, args.steps)
    runs = {}
    model = copy.deepcopy(full)
    runs["without TP"] = train_with("without TP", model, batches, args, norm_by_pytorch)
    with report.column("TP"):
        model = tp_transformer(full, tp_group)
        norm_of = lambda model: global_norm(model, tp_group)
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


def train_with(name: str, model, batches, args, norm_of) -> TrainingRun:
    """Train as lesson 02 does; norm_of(model) is the norm for clipping."""
    losses = {}
    norms = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        torch.manual_seed(args.seed + step)  # the same dropout masks on all ranks
        optimizer.zero_grad()
        with COMM.label(name, "forward"):
            loss = mean_loss(model(tokens_BS), target_BS)
        with COMM.label(name, "backward"):
            loss.backward()
        if step == 1:
            gradients = unshard_model(model, "grad")
        with COMM.label(name, "clipping"):
            norm = norm_of(model)
        clip_gradients(model, args.clip, norm)
        optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm
    parameters = unshard_model(model, "data")
    return TrainingRun(model, optimizer, losses, norms, gradients, parameters)


def differing(got: Tensor, expected: Tensor) -> int:
    """How many elements differ, by however little."""
    return int((got != expected).sum())


# ---- The sections of the output, in order


def show_sums(report: Report, group) -> None:
    """16 terms, added one by one and as a tree, by one process and by all ranks."""
    T = group.size()
    dtype = getattr(torch, report.args.dtype)
    generator = torch.Generator().manual_seed(report.args.seed)
    # The same 16 terms for every T; this rank holds 16/T of them.
    terms = torch.randn(16, 1000, generator=generator, dtype=dtype)
    terms = list(terms.to(report.args.device))  # drawn on the CPU, on any device
    local_terms = terms[group.rank() * 16 // T :][: 16 // T]
    with COMM.label("one by one", ""):
        summed = all_reduce(sum(local_terms), group)
    with COMM.label("tree", ""):
        summed_as_tree = tree_all_reduce(tree_sum(local_terms), group)
    rows = [
        sum_row(report, "one by one", sum(terms), summed, "all-reduce", group),
        sum_row(report, "tree", tree_sum(terms), summed_as_tree, "all-gather", group),
    ]
    # The sum one by one may differ; the tree must not, on any rank.
    if not report.check(
        "bits", "sum of 16 terms, tree", differs(summed_as_tree, terms)
    ):
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
    call = Call(name, "", collective, group.group_desc)
    row = {"added": name, "one process": digest(expected), f"T = {T}": digest(summed)}
    row["elements that differ"] = differing(summed, expected)
    row["collective"] = collective
    row["bytes"] = COMM.bytes[call]
    # The payload of an all-gather is what comes out of it: T times x.
    copies = T if collective == "all-gather" else 1
    payload = copies * summed.nbytes if T > 1 else 0  # one rank sends nothing
    report.expect(row, "bytes", "bytes", f"sum, {name}", payload)
    diff = rel_diff(summed, expected)
    if not report.check("values", f"sum, {name}", diff, report.allowed):
        row["off"].append(f"T = {T}")
    return row


def mlp_tensors(mlp: MLP, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """What one forward and backward pass of an MLP computes, unsharded."""
    x = x.clone().requires_grad_()  # each MLP gets a gradient of its own
    h_BSf = mlp.up_proj(x)
    y_BSD = mlp.down_proj(F.gelu(h_BSf))
    y_BSD.backward(upstream)
    tensors = {
        "up_proj's output": all_gather(h_BSf, 2, mlp.up_proj.tp_group),
        "down_proj's output, a sum over ranks": y_BSD.detach(),
        "dL/dx, a sum over ranks": x.grad,
    }
    for name, gradient in unshard_model(mlp, "grad").items():
        tensors[f"dL/d {name}"] = gradient
    return tensors


def show_mlps(report: Report, tp_group, alone) -> None:
    """Which tensors of an MLP of width D depend on T, plain and in blocks."""
    args = report.args
    full = MLP(args.hidden, args.hidden).to(args.device, getattr(torch, args.dtype))
    shape = (args.batch_size, args.seq_len, args.hidden)
    x = torch.randn(shape).to(full.up_proj.weight)  # its dtype and device
    upstream = torch.randn(shape).to(full.up_proj.weight)
    # On a group of one rank, T is 1: each rank makes its own reference.
    tp = mlp_tensors(tp_mlp(full, tp_group), x, upstream)
    tp_alone = mlp_tensors(tp_mlp(full, alone), x, upstream)
    blocked = mlp_tensors(blocked_mlp(full, tp_group), x, upstream)
    blocked_alone = mlp_tensors(blocked_mlp(full, alone), x, upstream)

    rows = []
    for name, expected in blocked_alone.items():
        row = {"tensor": name, "elements": expected.numel()}
        row["TP: differ"] = differing(tp[name], tp_alone[name])
        row["in blocks: differ"] = differing(blocked[name], expected)
        row["off"] = []
        # Blocks change the order of sums, so they may differ from plain TP, slightly.
        diff = rel_diff(blocked[name], tp_alone[name])
        if not report.check("values", f"MLP, {name}", diff, report.allowed):
            row["off"].append("tensor")
        is_other = digest(blocked[name]) != digest(expected)
        if not report.check("bits", f"MLP, {name}", float(is_other)):
            row["off"].append("in blocks: differ")
        rows.append(row)
    report.section(
        f"An MLP: elements that T = {args.ranks} changes, compared with T = 1"
    )
    report.table("mlp", rows)


def show_losses(report: Report, runs: dict) -> None:
    """The four runs agree as far as the lessons demand it, with rounding errors."""
    fold = lambda name: "all tensors"  # one row for all gradients, one for parameters
    report.section("Training: losses, gradients of step 1, parameters at the end")
    losses = values_of(runs, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)
    report.compare("gradients", values_of(runs, "gradients"), fold=fold)
    report.compare("norms", values_of(runs, "norms"))
    report.compare("parameters", values_of(runs, "parameters"), fold=fold)


def show_hashes(report: Report, runs: dict) -> None:
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
            is_other = row[kind] != rows["blocks, T = 1"][kind]
            if not report.check("bits", f"training, {kind}", float(is_other)):
                row["off"].append(kind)
            # Each rank has its own reference, so ranks also compare with each other.
            hashes = set(gather_objects(row[kind]))
            report.check("replicas", f"hash of {kind}", len(hashes) - 1)
    report.section(
        "Hashes of all bits of these, for 1, 2, 4 and 8 ranks (run them all)"
    )
    report.say("   TP has another hash of the parameters for each T. Blocks have one.")
    report.table("hashes", list(rows.values()))


def show_cost(report: Report, size: dict[str, int]) -> None:
    """What a step sends: an all-gather for each all-reduce of plain TP."""
    formulas = {
        Call("TP", "forward", "all-reduce", "tp"): "2·L × B·S·D·e",
        Call("TP", "backward", "all-reduce", "tp"): "2·L × B·S·D·e",
        Call("TP", "clipping", "all-reduce", "tp"): "1 × 8",  # a float64
        Call("in blocks", "forward", "all-gather", "tp"): "2·L × T·B·S·D·e",
        Call("in blocks", "backward", "all-gather", "tp"): "2·L × T·B·S·D·e",
        Call("in blocks", "clipping", "all-gather", "tp"): "1 × 8·T",
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
        old="    return tree_sum(list(all_gather(x[None], 0, group)))\n",
        new="    return all_reduce(x, group)\n",
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
    args = lesson_parser(__doc__, BREAKS, sections=5, **sizes).parse_args()
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


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Replicate


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


def ring_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends for a payload of nbytes (lesson 00)."""
    if collective == "send/recv":
        return nbytes
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return round(rounds * nbytes * (ranks - 1) / ranks)


# endregion


# ==== CARRIED OVER from 01, unchanged
# region


class MLP(nn.Module):
    """The reference: plain PyTorch, one process. Shapes: x [B, S, D] → [B, S, D].

    (lesson 01)"""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


def shard_parameter(
    full: Tensor | None, *shardings: tuple[int, dist.ProcessGroup]
) -> nn.Parameter | None:
    """This rank's shard of a parameter, which remembers how it was sharded.

    (lesson 01)"""
    if full is None:
        return None
    for dim, group in shardings:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.shardings = shardings
    return p


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated.

    (lesson 01)"""
    return getattr(p, "shardings", ())


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' shards; the last split is undone first.

    (lesson 01)"""
    for dim, group in reversed(shardings):
        x = all_gather(x, dim, group)
    return x


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # x itself, with a new backward; nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of T partial sums of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.tp_group = tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group = tp_group
        self.copy_input = copy_input
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


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the full dL/dy; and y is the
        # sum of the partial sums, so dL/dy is also the gradient of each of them.
        return grad, None


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        self.weight = shard_parameter(full.weight, (1, tp_group))  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        if self.bias is None:
            return y_BSD
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward.

    (lesson 01)"""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


def values_of(runs: dict, field: str) -> dict:
    """run → its losses, gradients, … (whatever `field` names) (lesson 01)."""
    return {name: getattr(run, field) for name, run in runs.items()}


# endregion


# ==== CARRIED OVER from 02, unchanged
# region


class Config(NamedTuple):
    """The sizes of a model, and its dropout (lesson 02)."""

    vocab_size: int  # V
    hidden: int  # D
    heads: int  # N
    kv_heads: int  # K: each key/value head serves N/K query heads
    layers: int  # L
    seq_len: int  # S, the longest sequence
    dropout: float  # probability, of attention weights and of each block's output


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angles of a rotary embedding (arXiv:2104.09864).

    (lesson 02)"""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle_SH = torch.outer(torch.arange(seq_len), frequency).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Rotate each pair (i, i + H/2) of a head by the angle of its position.

    (lesson 02)"""
    first, second = x_BNSH.chunk(2, -1)
    return x_BNSH * cos_SH + torch.cat([-second, first], -1) * sin_SH


class Dropout(nn.Dropout):
    """nn.Dropout with a mask from torch.rand, as in ShardedDropout below.

    (lesson 02)"""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class CoreAttention(nn.Module):
    """The part of attention that has no parameters (lesson 02)."""

    def __init__(self, head_size: int, dropout: float):
        super().__init__()
        self.head_size = head_size
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple) -> Tensor:
        S = q.shape[1]
        cos_SH, sin_SH, future_SS = tables
        q_BNSH = q.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k_BKSH = k.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v_BKSH = v.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q_BNSH = rotate(q_BNSH, cos_SH[:S], sin_SH[:S])
        k_BKSH = rotate(k_BKSH, cos_SH[:S], sin_SH[:S])
        queries_per_kv = q_BNSH.shape[1] // k_BKSH.shape[1]
        k_BNSH = k_BKSH.repeat_interleave(queries_per_kv, 1)
        v_BNSH = v_BKSH.repeat_interleave(queries_per_kv, 1)
        scores_BNSS = q_BNSH @ k_BNSH.mT / math.sqrt(self.head_size)
        scores_BNSS = scores_BNSS.masked_fill(future_SS[:S, :S], float("-inf"))
        weights_BNSS = self.dropout(scores_BNSS.softmax(-1))
        return (weights_BNSS @ v_BNSH).transpose(1, 2).flatten(2)


def apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The outputs of several linears for the same input (lesson 02)."""
    return [linear(x_BSD) for linear in linears]


class Attention(nn.Module):
    """Causal attention. Shapes: x [B, S, D] → [B, S, D] (lesson 02)."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        H = config.hidden // config.heads
        self.q_proj = nn.Linear(D, config.heads * H)
        self.k_proj = nn.Linear(D, config.kv_heads * H)
        self.v_proj = nn.Linear(D, config.kv_heads * H)
        self.project_qkv = apply_each  # TP replaces it: one f before all three
        self.core = CoreAttention(H, config.dropout)
        self.o_proj = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        q, k, v = self.project_qkv(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        return self.o_proj(self.core(q, k, v, tables))


class DecoderLayer(nn.Module):
    """Pre-LayerNorm: x + dropout(attention(norm(x))), then + dropout(MLP(norm(x))).

    (lesson 02)"""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        self.input_layernorm = nn.LayerNorm(D)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(D)
        self.mlp = MLP(D, 4 * D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        # By keyword: PyTorch's plan in lesson 04 names the inputs of attention.
        y_BSD = self.self_attn(x_BSD=self.input_layernorm(x_BSD), tables=tables)
        x_BSD = x_BSD + self.dropout(y_BSD)
        y_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + self.dropout(y_BSD)


class Transformer(nn.Module):
    """The decoder. Shapes: tokens [B, S] int64 → logits [B, S, V] (lesson 02)."""

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
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, (self.cos, self.sin, self.future))
        return self.lm_head(self.norm(x_BSD))


class ShardedDropout(nn.Module):
    """Dropout of a tensor that is sharded along dim: ranks must drop independently.

    (lesson 02)"""

    def __init__(self, p: float, dim: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.p = p
        self.dim = dim
        self.tp_group = tp_group

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        full_shape = list(x.shape)
        full_shape[self.dim] *= self.tp_group.size()
        keep = torch.rand(full_shape, device=x.device) >= self.p
        return x * shard(keep, self.dim, self.tp_group) / (1 - self.p)


def copy_then_apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """One f for all linears that read x, so that dL/dx is summed over ranks once.

    (lesson 02)"""
    x_BSD = CopyToTP.apply(x_BSD, linears[0].tp_group)
    return apply_each(x_BSD, *linears)


def parallelize_layer(layer: DecoderLayer, tp_group: dist.ProcessGroup) -> None:
    """Replace the linears of a layer by parallel ones: Megatron's split (lesson 02)."""
    attn = layer.self_attn
    T = tp_group.size()
    kv_heads = attn.k_proj.out_features // attn.core.head_size
    if kv_heads % T != 0:  # a rank would get a fraction of a head
        raise ValueError(f"{kv_heads} key/value heads cannot be split over {T} ranks")

    attn.q_proj = ColumnParallelLinear(attn.q_proj, tp_group, copy_input=False)
    attn.k_proj = ColumnParallelLinear(attn.k_proj, tp_group, copy_input=False)
    attn.v_proj = ColumnParallelLinear(attn.v_proj, tp_group, copy_input=False)
    attn.project_qkv = copy_then_apply_each
    # The attention weights [B, n, S, S] are sharded by head, so along dim 1.
    attn.core.dropout = ShardedDropout(attn.core.dropout.p, 1, tp_group)
    attn.o_proj = RowParallelLinear(attn.o_proj, tp_group)
    layer.mlp = tp_mlp(layer.mlp, tp_group)


def tp_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """A copy of the decoder with its layers split over the TP group (lesson 02)."""
    model = copy.deepcopy(full)
    for layer in model.layers:
        parallelize_layer(layer, tp_group)
    return model.train(full.training)  # new modules start in training mode


def global_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the full model's gradient, the same on every rank (lesson 02)."""
    total = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for p in model.parameters():
        if p.grad is None:
            continue
        squares = p.grad.double().square().sum()
        if not shardings_of(p):
            squares /= tp_group.size()  # all T ranks add the same squares
        total += squares
    return math.sqrt(all_reduce(total, tp_group))


def clip_gradients(model: nn.Module, max_norm: float, norm: float) -> None:
    """Scale all gradients by one factor, so that their norm is at most max_norm.

    (lesson 02)"""
    scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


PAD = 256  # the one token that is not a byte


IGNORE = -100  # the target of a position without a next byte; cross_entropy skips it


def make_batches(text: str, args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sample batches of tokens and targets, each [B, S] int64 (lesson 02)."""
    lines = [f"{line}\n".encode() for line in text.splitlines() if line.strip()]
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(count):
        rows = torch.full((args.batch_size, args.seq_len + 1), PAD)
        for row in rows:
            line = lines[torch.randint(len(lines), (), generator=generator)]
            start = torch.randint(len(line) - 1, (), generator=generator)
            line = line[start : start + args.seq_len + 1]
            row[: len(line)] = torch.tensor(list(line))
        tokens_BS = rows[:, :-1].contiguous()
        target_BS = rows[:, 1:]
        target_BS = target_BS.masked_fill(target_BS == PAD, IGNORE)
        batches.append((tokens_BS.to(args.device), target_BS.to(args.device)))
    return batches


def make_transformer(args) -> Transformer:
    """The full model. Every rank initializes the same one, from the same seed.

    (lesson 02)"""
    torch.manual_seed(args.seed)
    config = Config(**{name: getattr(args, name) for name in Config._fields})
    return Transformer(config).to(args.device, getattr(torch, args.dtype))


def mean_loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Cross entropy, averaged over the tokens that have a target (lesson 02)."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())


class TrainingRun(NamedTuple):
    model: Transformer
    optimizer: torch.optim.Optimizer
    losses: dict[str, float]  # by step
    norms: dict[str, float]  # of the gradient before clipping, by step
    gradients: dict[str, Tensor]  # of step 1, unsharded
    parameters: dict[str, Tensor]  # after the last step, unsharded


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which also handles DTensors; in float64.

    (lesson 02)"""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [sum_partial(gradient.double()) for gradient in gradients]
    norm = nn.utils.get_total_norm(gradients, foreach=False)
    # Before torch 2.11 a DTensor's .item() is this rank's part of it (pytorch#166638).
    return norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()


def sum_partial(x: Tensor) -> Tensor:
    """Sum a Partial() DTensor. Before torch 2.11 its norm was that of a rank's part.

    (lesson 02)"""
    if not isinstance(x, DTensor):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), from the slices of all ranks.

    (lesson 02)"""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            x = torch.empty(0)  # no gradient: a mismatch if another run has one
        elif isinstance(x, DTensor):
            x = x.full_tensor()  # an all-gather by PyTorch
        else:
            x = unshard(x, shardings_of(p))
        tensors[name] = x.clone()
    return tensors


def sizes_of(args) -> dict[str, int]:
    """The letters of the shape legend, and e: bytes per element (lesson 02)."""
    e = getattr(torch, args.dtype).itemsize
    return dict(
        B=args.batch_size, S=args.seq_len, D=args.hidden, N=args.heads,
        K=args.kv_heads, H=args.hidden // args.heads, F=4 * args.hidden,
        V=args.vocab_size, L=args.layers, T=args.ranks, e=e,
    )  # fmt: skip


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
