"""Beyond the lessons 18: products and the loss in pieces.

Each row of a product belongs to one position, so a product can be computed piece by
piece. Two halves follow from that, and each can be read without the other:
    [loss]      after lesson 03. If each piece of the hidden states passes through head
                and loss, forward and backward, before the next one does, the logits of
                all positions never exist at the same time.
    [products]  after lesson 04. With the sequence split, one piece can be multiplied
                while the next one travels: communication hides behind products (async
                TP).

Run it on 2 or 4 ranks:

    torchrun --standalone --nproc_per_node=2 beyond/18_in_pieces.py

What you will see: [products] the model of lesson 04 trained in one process, with
tensor and sequence parallelism (TP + SP), and with the products of TP + SP in pieces,
with equal losses and gradients; which calls have a product to hide behind, as counted
in one MLP; calls and bytes. [loss] Head and loss of lesson 03's model at once and in
pieces.

Try one change at a time (answers: notebooks/18_in_pieces.ipynb, sections 3 and 5).
    1. --pieces 1: which calls still have a product to hide behind, and why?
    2. In start_scatters, add work.wait() after dist.reduce_scatter. All values agree.
       What does section 3 of the output say?
    3. --pieces 8: which number of section 5 halves, and what grows in section 4?

How to read this file: NEW is the lesson, RUN trains and prints. Bugs: tools/bug.py.
[loss] is one function and its gradient, chunked_cross_entropy; of [products] read
gather_in_pieces first.

Shapes: B batch, S sequence, D hidden, F MLP width, V vocabulary, L layers, T ranks in
    the TP group, e bytes per element. UPPERCASE is the full size, lowercase is this
    rank's slice: x_BsD has s = S/T positions, h_BSf has 1/T of the columns. partial_ in
    front: full shape, still to be summed over ranks. In formulas: Y = B·S·D·e; Q pieces
    (of a rank's slice; in section 5 of the output, of the sequence).

Sources: github.com/pytorch/pytorch/pull/124003 (products in pieces; PyTorch's compiler
    does it with torch._inductor.config._micro_pipeline_tp, on GPUs only; one piece
    there is one rank's slice);
    arXiv:2410.10989 (head and loss in pieces).
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
    from course import lesson00, lesson01, lesson02, lesson03, lesson04
    from harness import cell, on_axes, take_calls
    from travels import PeakBytes, Travels
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 18: products and the loss in pieces
# Read lines 70 to 324, in about 26 minutes. Stop at RUN.

# ---- [loss], after lesson 03: head and loss in pieces

# From lesson 03: the vocabulary is split, so a rank has its columns of the head and of
# the logits. vocab_parallel_cross_entropy is the loss of each position.
#
# The loss needs several tensors as large as the logits: logits, x − max, exp, softmax.
# In pieces of the sequence each is that much smaller, because each piece runs its
# backward before the next one begins, which frees them. Section 5 counts their bytes.


def chunked_cross_entropy(
    h_BSD: Tensor, target_BS: Tensor, head: nn.Module, tp_group, vocab_size, pieces: int
) -> Tensor:
    """Return the mean loss from hidden states: lesson03.sharded_loss of head(h_BSD).

    The head's gradients exist when it returns, so nothing may scale this loss; and it
    runs backward, so it is not for evaluation.
    Shapes: h [B, S, D] and target [B, S], both Replicate() → one number.
    Communication: forward three all-reduces per piece, together of 3·B·S values, and
        one of B·S·D elements (f of the head); backward none.
    """
    loss_of = lesson03.vocab_parallel_cross_entropy
    count = (target_BS != lesson02.IGNORE).sum()
    total = 0.0
    leaf_BSD = h_BSD.detach().requires_grad_()  # the pieces' dL/dh add up here
    targets = target_BS.tensor_split(pieces, 1)
    for h, target in zip(leaf_BSD.tensor_split(pieces, 1), targets):
        logits = F.linear(h, head.weight, head.bias)
        loss = loss_of(logits, target, tp_group, vocab_size).sum()
        (loss / count).backward()
        total = total + loss.detach() / count
    # A rank used its columns of the head: its dL/dh is one of T partial sums.
    grad_BSD = lesson00.all_reduce(leaf_BSD.grad, tp_group)
    return WithGradient.apply(h_BSD, grad_BSD, total)  # with h: backward goes on there


class WithGradient(torch.autograd.Function):
    """A loss whose gradient dL/dh is known already."""

    @staticmethod
    def forward(ctx, h_BSD, grad_BSD, loss):
        ctx.save_for_backward(grad_BSD)
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.saved_tensors[0], None, None


# ---- [products], after lesson 04: one piece travels while another is multiplied

# From lesson 00: a collective that is called with async_op=True only starts;
# work.wait() waits until its result is there.
# From lesson 04: a rank has s = S/T positions. In front of column-parallel linears the
# sequence is gathered, after row-parallel ones it is reduce-scattered; in backward the
# other way round. all_reduce_replicated_gradients sums those of LayerNorms and biases.


def start_gathers(x_BsD: Tensor, tp_group: dist.ProcessGroup, pieces: int) -> list:
    """Start an all-gather for each piece of a slice; wait for none of them.

    Returns for each piece the ranks' tensors [B, s/pieces, D], still empty, and the
    Work to wait for, which also keeps what is sent.
    Raises: ValueError if `pieces` does not divide s.
    """
    started = []
    for piece in lesson00.split(x_BsD, 1, pieces):
        slices = [torch.empty_like(piece) for _ in range(tp_group.size())]
        work = dist.all_gather(slices, piece, group=tp_group, async_op=True)
        started.append((slices, work))
    return started


def gather_in_pieces(
    x_BsD: Tensor, weight: Tensor, tp_group: dist.ProcessGroup, pieces: int
) -> tuple[Tensor, Tensor]:
    """Multiply the gathered sequence with a weight [f, D]: all_gather(x) Wᵀ.

    Shapes: x [B, s, D] Shard(1) → the product [B, S, f], and the gathered x [B, S, D].
        `pieces` divides s.
    Communication: one all-gather per piece, together of B·S·D elements.
    Source: github.com/pytorch/pytorch/pull/124003.
    """
    B, s, D = x_BsD.shape
    T = tp_group.size()
    started = start_gathers(x_BsD, tp_group, pieces)
    x_BSD = x_BsD.new_empty(B, T * s, D)
    y_BSf = x_BsD.new_empty(B, T * s, len(weight))

    def multiply(x: Tensor, first: int) -> None:  # first: its position in the sequence
        x_BSD[:, first : first + x.shape[1]] = x
        y_BSf[:, first : first + x.shape[1]] = F.linear(x, weight)

    # This rank's own slice needs no gather: all pieces travel while it is multiplied.
    multiply(x_BsD, tp_group.rank() * s)
    for i, (slices, work) in enumerate(started):
        work.wait()  # for piece i; the next ones travel while it is multiplied
        for rank, x in enumerate(slices):
            if rank != tp_group.rank():
                multiply(x, rank * s + i * x.shape[1])
    return y_BSf, x_BSD


# ---- Multiply and scatter: one piece travels while the next is multiplied


def start_scatters(
    x_BSf: Tensor, weight: Tensor, tp_group: dist.ProcessGroup, pieces: int
) -> list:
    """Multiply with a weight [D, f]; start the reduce-scatter of each piece at once.

    Piece i has the i-th part of every rank's slice, so that each rank gets its own
    positions of the sum.
    Shapes: x [B, S, f] → for each piece this rank's [B, s/pieces, D], still to be
        waited for. Raises: ValueError if T · pieces does not divide S.
    Communication: one reduce-scatter per piece, together of B·S·D elements.
    """
    T = tp_group.size()
    parts = lesson00.split(x_BSf, 1, T * pieces)  # in the order of positions
    started = []
    for i in range(pieces):
        partial_ys = []  # for each rank, this rank's summand of its part
        for rank in range(T):
            x = parts[rank * pieces + i]
            partial_ys.append(F.linear(x, weight))
        y = torch.empty_like(partial_ys[0])
        work = dist.reduce_scatter(y, partial_ys, group=tp_group, async_op=True)
        started.append((y, work))
    return started


def finish_scatters(started: list) -> Tensor:
    """Wait for the sums of start_scatters and join them: [B, s, D] Shard(1)."""
    sums = []
    for y, work in started:
        work.wait()
        sums.append(y)
    return torch.cat(sums, 1)


# ---- The same two, with their backward

# The backward of a gather is a reduce-scatter, and the other way round (lesson 01). So
# each of the two functions below has one of the two above forward, the other backward.


class GatherThenMultiply(torch.autograd.Function):
    """all_gather(x) Wᵀ in pieces: x [B, s, D], weight [f, D] → [B, S, f].

    Communication: all-gathers of together B·S·D elements forward; backward a second
        all-gather, which travels while dL/dx is computed, and reduce-scatters of the
        pieces of dL/dx, the last of which travels while dL/dW is computed.
    """

    @staticmethod
    def forward(ctx, x_BsD, weight, tp_group, pieces):
        ctx.save_for_backward(x_BsD, weight)  # this rank's slice, as in lesson 04
        ctx.tp_group = tp_group
        ctx.pieces = pieces
        return gather_in_pieces(x_BsD, weight, tp_group, pieces)[0]

    @staticmethod
    def backward(ctx, grad_BSf):
        x_BsD, weight = ctx.saved_tensors
        [(slices, work)] = start_gathers(x_BsD, ctx.tp_group, 1)
        sums = start_scatters(grad_BSf, weight.T, ctx.tp_group, ctx.pieces)
        work.wait()
        x_BSD = torch.cat(slices, 1)
        grad_weight = grad_BSf.flatten(0, 1).T @ x_BSD.flatten(0, 1)
        return finish_scatters(sums), grad_weight, None, None


class MultiplyThenScatter(torch.autograd.Function):
    """reduce_scatter(x Wᵀ) in pieces: x [B, S, f], weight [D, f] → [B, s, D].

    Communication: reduce-scatters forward, all-gathers backward, each together of
        B·S·D elements.
    """

    @staticmethod
    def forward(ctx, x_BSf, weight, tp_group, pieces):
        ctx.save_for_backward(x_BSf, weight)
        ctx.tp_group = tp_group
        ctx.pieces = pieces
        return finish_scatters(start_scatters(x_BSf, weight, tp_group, pieces))

    @staticmethod
    def backward(ctx, grad_BsD):
        x_BSf, weight = ctx.saved_tensors
        grad_BSf, grad_BSD = gather_in_pieces(
            grad_BsD, weight.T, ctx.tp_group, ctx.pieces
        )
        grad_weight = grad_BSD.flatten(0, 1).T @ x_BSf.flatten(0, 1)
        return grad_BSf, grad_weight, None, None


# ---- The model of lesson 04, edited


def apply_in_pieces(x_BsD: Tensor, *linears: nn.Module, pieces: int) -> list[Tensor]:
    """Column-parallel linears of a sharded sequence: one gather, one product for all.

    It takes the place of lesson04.gather_again.
    Shapes: x [B, s, D] Shard(1) → [B, S, f] Shard(2), one for each linear.
    """
    weight = linears[0].weight
    if len(linears) > 1:  # q, k and v are one product, with a copy of their weights
        weight = torch.cat([linear.weight for linear in linears])
    y_BSf = GatherThenMultiply.apply(x_BsD, weight, linears[0].tp_group, pieces)
    outputs = []
    columns = [len(linear.weight) for linear in linears]
    for linear, output in zip(linears, y_BSf.split(columns, -1)):
        outputs.append(output if linear.bias is None else output + linear.bias)
    return outputs


class RowParallelInPieces(nn.Module):
    """A row-parallel linear whose output is reduce-scattered in pieces.

    Shapes: x [B, S, f] Shard(2) → [B, s, D] Shard(1). It keeps weight and bias of the
        linear whose place it takes.
    """

    def __init__(self, linear: lesson01.RowParallelLinear, pieces: int):
        super().__init__()
        self.tp_group = linear.tp_group
        self.pieces = pieces
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x_BSf: Tensor) -> Tensor:
        y_BsD = MultiplyThenScatter.apply(
            x_BSf, self.weight, self.tp_group, self.pieces
        )
        return y_BsD if self.bias is None else y_BsD + self.bias


def transformer_in_pieces(full, tp_group, pieces: int) -> lesson02.Transformer:
    """lesson04.sp_transformer, with each product next to a collective in pieces.

    The reduce-scatter after the embedding is not cut: it has no product.
    """
    model = lesson04.sp_transformer(full, tp_group)
    gather = partial(apply_in_pieces, pieces=pieces)
    for layer in model.layers:
        layer.self_attn.project_qkv = gather
        layer.self_attn.o_proj = RowParallelInPieces(layer.self_attn.o_proj, pieces)
        layer.mlp.up_proj.gather = gather
        layer.mlp.down_proj = RowParallelInPieces(layer.mlp.down_proj, pieces)
    model.lm_head.gather = gather
    return model


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """Train the same model three times on the same batches; then head and loss."""
    tp_group = lesson00.mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    full = lesson02.make_transformer(args)
    batches = lesson02.make_batches(__doc__, args, args.steps)

    runs = {}
    model = copy.deepcopy(full)
    runs["without TP"] = lesson02.train_transformer("without TP", model, batches, args)
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.guard("TP + SP"):
        model = lesson04.sp_transformer(full, tp_group)
        runs["TP + SP"] = train("TP + SP", model, batches, args, tp_group)
    with report.guard("in pieces"):
        model = transformer_in_pieces(full, tp_group, args.pieces)
        runs["in pieces"] = train("in pieces", model, batches, args, tp_group)

    show_training(report, runs, args)
    with report.guard("one MLP"):
        show_what_travels(report, args, tp_group)
    show_communication_in_pieces(report)
    with report.guard("head and loss"):
        show_head_and_loss(report, runs["without TP"], full, batches[0], args, tp_group)


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError if the model cannot be built or sharded."""
    both = args.ranks * args.pieces
    if both > 1024 and not args.seq_len:  # scores have S² elements
        text = f"--pieces {args.pieces}: {args.ranks} ranks · --pieces = {both} tokens"
        raise ValueError(f"{text} at least; take --pieces 4, or give --seq-len, too")
    args.seq_len = args.seq_len or both * math.ceil(32 / both)
    size = lesson02.transformer_sizes(args)
    lesson00.must_divide(args, "seq_len", both, "ranks · --pieces")
    size["v"] = math.ceil(args.vocab_size / args.ranks)
    size["Y"] = lesson00.evaluate("B·S·D·e", size)
    size["Q"] = args.pieces
    return size


def train(name: str, model, batches, args, tp_group) -> lesson02.TrainingRun:
    """Train a model whose sequence and vocabulary are split, as lesson 04 does."""
    loss_of = partial(
        lesson03.sharded_loss, tp_group=tp_group, vocab_size=args.vocab_size
    )
    sum_up = partial(lesson04.all_reduce_replicated_gradients, tp_group=tp_group)
    run = lesson02.train_transformer(
        name, model, batches, args, tp_group, loss_of=loss_of, after_backward=sum_up
    )
    lesson03.trim_spare_rows(run)  # T need not divide the vocabulary
    return run


# ---- The sections of the output, in order


def show_training(report: lesson00.Report, runs: dict, args) -> None:
    """Losses, norms before clipping, parameters after training; gradients of step 1."""
    allowed = lesson00.ALLOWED[args.dtype]
    values = lambda field: lesson01.values_of(runs, field)
    title = "Losses, gradient norms per step; after training, parameters"
    report.section(f"[products] {title}")
    report.compare("losses", values("losses"), lesson00.ALLOWED_LOSS[args.dtype])
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", values("norms"), allowed, brief=True)
    report.compare("parameters", values("parameters"), allowed, brief=True)
    report.section("[products] Gradients of step 1: norms; diff: largest of an element")
    report.compare("gradients", values("gradients"), allowed, fold=lesson02.module_of)


def show_what_travels(report: lesson00.Report, args, tp_group) -> None:
    """Of one MLP's calls: how many have a product between their start and their end?"""
    report.section("[products] One MLP: calls that start before a product, end after")
    report.say("In pieces: 1 + Q·(T - 1) products per gather, Q·T per reduce-scatter.")
    predicted = {  # run, phase → calls, and those behind a product
        ("TP + SP", "forward"): ("2", "0"),
        ("TP + SP", "backward"): ("3", "0"),
        # The sum of the last piece is needed at once.
        ("in pieces", "forward"): ("2·Q", "2·Q - 1"),
        ("in pieces", "backward"): ("2·Q + 1", "2·Q + 1"),
    }
    rows = []
    watched = watch_mlps(args, tp_group)
    for (run, phase), seen in watched.items():
        behind = len([n for n in seen.behind if n > 0])
        row = {"run": run, "phase": phase, "products": seen.products}
        row.update({"calls": len(seen.behind), "behind a product": behind})
        calls, row["formula"] = predicted[run, phase]
        if args.ranks > 1:
            name = f"calls: {run}, {phase} of an MLP"
            row["calls"] = cell(report, name, len(seen.behind), calls)
            name += ", behind a product"
            row["behind a product"] = cell(report, name, behind, row["formula"])
        rows.append(row)
    report.table(rows)
    if args.ranks > 1:
        report.say(count_hidden(watched))


def count_hidden(watched: dict) -> str:
    """How many calls have a product to hide behind, as counted."""
    texts = []
    for run in ("TP + SP", "in pieces"):
        behind = watched[run, "forward"].behind + watched[run, "backward"].behind
        texts.append(f"{len([n for n in behind if n > 0])} of {len(behind)}")
    text = f"TP + SP has {texts[0]} calls behind a product, in pieces {texts[1]}"
    without = [i for i, n in enumerate(behind) if n == 0]
    is_last = without == [len(watched["in pieces", "forward"].behind) - 1]
    return text + (": not forward's last." if is_last else ".")


def watch_mlps(args, tp_group) -> dict:
    """Run an MLP forward and backward at once and in pieces: (run, phase) → Travels."""
    full = lesson02.make_transformer(args)
    mlps = {
        "TP + SP": lesson04.sp_transformer(full, tp_group).layers[0].mlp,
        "in pieces": transformer_in_pieces(full, tp_group, args.pieces).layers[0].mlp,
    }
    seen = {}
    for run, mlp in mlps.items():
        x_BSD = torch.randn(args.batch_size, args.seq_len, args.hidden)
        x_BSD = x_BSD.to(args.device, getattr(torch, args.dtype))
        x_BsD = lesson00.shard(x_BSD, 1, tp_group).requires_grad_()
        with Travels() as seen[run, "forward"]:
            y_BsD = mlp(x_BsD)
        with Travels() as seen[run, "backward"]:
            y_BsD.backward(torch.ones_like(y_BsD))
    return seen


def show_communication_in_pieces(report: lesson00.Report) -> None:
    """More calls, the same bytes."""
    L = report.size["L"]
    Q = report.size["Q"]
    inputs = 2 * L + 1  # that are gathered; as many outputs are reduce-scattered
    once = (inputs, "(2·L + 1)·Y")
    formulas = {
        ("TP + SP", "forward", "all-gather"): once,
        ("TP + SP", "forward", "reduce-scatter"): once,
        ("TP + SP", "backward", "all-gather"): (2 * inputs, "2·(2·L + 1)·Y"),
        ("TP + SP", "backward", "reduce-scatter"): once,
        ("in pieces", "forward", "all-gather"): (inputs * Q, "(2·L + 1)·Y"),
        # The output of the embedding has no product, so it is sent whole.
        ("in pieces", "forward", "reduce-scatter"): (2 * L * Q + 1, "(2·L + 1)·Y"),
        # dL/dy of 2·L outputs in pieces; dL/dy of the embedding, and inputs again.
        ("in pieces", "backward", "all-gather"): (
            2 * L * Q + 2 * L + 2, "2·(2·L + 1)·Y",
        ),
        ("in pieces", "backward", "reduce-scatter"): (inputs * Q, "(2·L + 1)·Y"),
    }  # fmt: skip
    for run in ("TP + SP", "in pieces"):  # as lesson 04 has it
        formulas[run, "loss", "all-reduce"] = (3, "3·B·S·e")
        formulas[run, "summing", "all-reduce"] = (1, "(6·L + 2)·D·e")
        formulas[run, "clipping", "all-reduce"] = (1, "8")
    report.section("[products] Communication per step: pieces add calls, no bytes")
    calls = {(*key, "tp"): formula for key, formula in formulas.items()}
    calls = on_axes(calls, {"tp": report.size["T"]})
    report.ledger(calls, brief=["loss", "summing", "clipping"])
    if report.sent and not report.raised:
        sent = {"TP + SP": 0, "in pieces": 0}
        for call, payloads in lesson00.METER.calls.items():
            sent[call[0]] += sum(payloads) // report.steps
        report.say(
            f"Payload of all calls per step: TP + SP {sent['TP + SP']:,} bytes, in "
            f"pieces {sent['in pieces']:,}."
        )


def show_head_and_loss(report, alone, full, batch: tuple, args, tp_group) -> None:
    """Head and loss of lesson 03's model, at once and in pieces: is all the same?

    alone: the run without TP, with the loss and the gradients of step 1.
    """
    report.section("[loss] Head and loss of lesson 03's model, at once and in pieces")
    expected = dict(alone.gradients, loss=alone.losses["loss, step 1"])
    rows = []
    peaks = []
    for run, pieces in (("at once", 1), ("in pieces", args.pieces)):
        what = f"head and loss {run}"
        model = lesson03.vocab_transformer(full, tp_group)
        results, peak = measure_head(what, model, batch, args, tp_group, pieces)
        peaks.append(peak)
        row = {"head and loss": run} | head_cells(report, what, pieces, peak)
        diffs = {}
        for name, value in expected.items():
            allowed = lesson00.ALLOWED[args.dtype]
            diffs[name] = report.agree(
                f"pieces: {name}, {what}", results[name], value, allowed
            )
        row["diff"] = f"{max(diffs.values()):.1e}"
        rows.append(row)
    report.table(rows)
    if is_counted(report.size, args.pieces):
        report.say(in_logits(report, peaks))


def in_logits(report: lesson00.Report, peaks: list[int]) -> str:
    """The measured peaks, at once and in pieces, compared with one tensor of logits."""
    one = lesson00.evaluate("B·S·v·e", report.size)
    times = [f"{peak / one:g} times" for peak in peaks]
    text = f"The peak is {times[0]} this rank's logits of all positions, in pieces "
    return f"{text}{times[1]}."


def head_cells(report: lesson00.Report, what: str, pieces: int, peak: int) -> dict:
    """Calls and bytes of head and loss, and the peak of logits; checked."""
    size = report.size
    payloads = take_calls(what).get((what, "loss", "all-reduce", "tp"), [])
    # In forward logits, x − m, exp and softmax; in backward also four.
    formula = "4·B·S·v·e" if what.endswith("at once") else "4·B·S·v·e/Q"
    cells = {"calls": len(payloads), "bytes": sum(payloads)}
    cells.update({"peak of logits": f"{peak:,}", "formula": formula})
    if size["T"] > 1:  # the loss has three all-reduces, f of the head one
        calls = str(3 * pieces + 1)
        cells["calls"] = cell(report, f"calls: {what}", len(payloads), calls)
        nbytes = "3·B·S·e + Y"
        cells["bytes"] = cell(report, f"bytes: {what}", sum(payloads), nbytes)
    if is_counted(size, pieces):
        cells["peak of logits"] = cell(report, f"memory: {what}", peak, formula)
    return cells


def is_counted(size: dict, pieces: int) -> bool:
    """PeakBytes sees shapes only: can it tell logits from hidden states?"""
    return size["v"] != size["D"] and size["S"] > pieces


def measure_head(run, model, batch: tuple, args, tp_group, pieces: int) -> tuple:
    """Loss and gradients of a batch, and the most bytes of logits at one time."""
    torch.manual_seed(args.seed + 1)  # the dropout masks of step 1
    head = model.lm_head
    model.lm_head = nn.Identity()  # so that the model returns hidden states
    h_BSD = model(batch[0])
    model.lm_head = head
    leaf_BSD = h_BSD.detach().requires_grad_()
    target_BS = batch[1]
    V = args.vocab_size
    with PeakBytes(len(head.weight)) as meter, lesson00.METER.phase(run, "loss"):
        if run.endswith("at once"):
            loss = lesson03.sharded_loss(head(leaf_BSD), target_BS, tp_group, V)
        else:
            loss = chunked_cross_entropy(leaf_BSD, target_BS, head, tp_group, V, pieces)
        loss.backward()
    h_BSD.backward(leaf_BSD.grad)
    results = lesson02.unshard_model(model, "grad")
    for name, p in model.named_parameters():
        if hasattr(p, "rows"):  # all later are spare
            results[name] = results[name][: p.rows]
    results["loss"] = loss.item()
    return results, meter.peak


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson02.add_model_flags(parser)
    text = "pieces of a rank's slice of the sequence (4)"
    parser.add_argument("--pieces", type=lesson00.positive, default=4, help=text)
    parser.set_defaults(seq_len=None)  # 32, or the next multiple of ranks · --pieces
    lesson00.launch(main, sizes, parser)
