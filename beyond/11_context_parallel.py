"""Beyond the lessons 11: context parallelism.

Sequence parallelism (lesson 04) gathers the full sequence in front of attention and of
the MLP, so each rank still holds B·S·D elements there. With context parallelism (CP) a
rank has s = S/C positions everywhere, inside attention as well. Its queries need the
keys and values of other ranks: these are gathered, or travel around a ring, or are
exchanged for heads (Ulysses). The forward is short, but people get the backward wrong.

Run it on 1, 2, 3, 4 or 8 ranks:

    torchrun --standalone --nproc_per_node=2 beyond/11_context_parallel.py

What you will see: which positions each rank has; a small decoder trained in one process
and with four kinds of CP, with equal losses, gradients and parameters; the blocks of
scores that each rank computes at each step of the ring; calls and bytes; bytes saved
for backward, which grow with S² except in the ring.

Try one change at a time. notebooks/11_context_parallel.ipynb, section 9, answers.
    1. --tp 2 on 4 ranks: CP over 2 ranks, TP over 2. Which calls are new?
    2. --heads 8 --kv-heads 8, then --kv-heads 2: whose bytes change, and whose do not?
    3. In RingFunction.backward, make the last hop of grad_kv only if step < C − 1, as
       for kv. Which gradients are wrong in section 4? dL/dq is right there: why is
       q_proj wrong in section 3?

How to read this file: NEW is the lesson, RUN trains and prints. Bugs to try:
`python tools/bug.py 11`. Short of time? Read merge, RingFunction and the start of RUN.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, C ranks in the CP group, T ranks in the
    TP group, s = S/C positions per rank, n = N/T and k = K/T heads per rank, i queries
    and j keys of a block, e bytes per element, Ψ parameters of a rank. A tensor kv has
    keys and values, stacked: [2, B, K, s, H].

Sources: arXiv:2310.01889 (ring), arXiv:2309.14509 (Ulysses), arXiv:2307.08691
    (FlashAttention-2: blocks and their backward), arXiv:2407.21783, sec. 3.3.2
    (Llama 3: gathers k and v, two chunks per rank).
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from course import lesson00, lesson01, lesson02, lesson05
    from harness import cell, gather_objects, marked, on_axes, sizes_without_dropout
    from one_attention import bytes_saved, random_attention, split_attention
    from pytorch_ring import pytorch_attention, why_left_out
    from ulysses import ulysses_attention
    from zigzag import Block, blocks_of, chunks_of, positions_of, recorded_blocks
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 11: context parallelism
# Read lines 68 to 336, in about 27 minutes. Stop at RUN.

# From lesson 00: send_recv(x, dst, like, src, group) sends and receives at once. From
# lesson 01: AllGatherWithGrad is an all-gather forward and a reduce-scatter backward;
# ReduceFromTP (g) is an all-reduce forward and the identity backward. From lesson 02:
# CoreAttention is the part of attention without parameters; rotate turns q and k by the
# angles of their positions. From 05: all_reduce_gradients sums a model's gradients.

# Linears, LayerNorms and the embedding treat each position on its own, so they work on
# some of the positions as they are. Attention, the loss and gradients need a change.

# ---- Who has which positions: contiguous, or zigzag (zigzag.py)


def split_positions(batch: tuple, cp_group, layout: str) -> tuple[Tensor, Tensor]:
    """This rank's positions of tokens and targets. Shapes: [B, S] → [B, s].

    Targets were shifted before the split: a slice's last one is another rank's token.
    """
    tokens_BS, target_BS = batch
    S = tokens_BS.shape[1]
    here = positions_of(cp_group.rank(), cp_group.size(), layout, S)
    return tokens_BS[:, here], target_BS[:, here]


def split_heads(q, k, v, tables: tuple, head_size: int, here: Tensor) -> tuple:
    """Split into heads, and rotate q and k by the angles of the positions `here`.

    Shapes: q [B, s, N·H], k and v [B, s, K·H] → q [B, N, s, H], kv [2, B, K, s, H].
    """
    q_BNsH = q.unflatten(-1, (-1, head_size)).transpose(1, 2)
    k_BKsH = k.unflatten(-1, (-1, head_size)).transpose(1, 2)
    v_BKsH = v.unflatten(-1, (-1, head_size)).transpose(1, 2)
    cos_sH = tables[0][here]
    sin_sH = tables[1][here]
    k_BKsH = lesson02.rotate(k_BKsH, cos_sH, sin_sH)
    return lesson02.rotate(q_BNsH, cos_sH, sin_sH), torch.stack([k_BKsH, v_BKsH])


def repeat_for_queries(kv_2BKjH: Tensor, q_BNiH: Tensor) -> Tensor:
    """Repeat each key/value head for the N/K query heads that it serves.

    This is done after the hop: K heads are sent, not N.
    """
    return kv_2BKjH.repeat_interleave(q_BNiH.shape[1] // kv_2BKjH.shape[2], 2)


def masked_scores(q_BNiH, k_BNjH, query_at: Tensor, key_at: Tensor) -> Tensor:
    """Scores of i queries and j keys at these positions; −∞ where the key is later."""
    scores_BNij = q_BNiH @ k_BNjH.mT / math.sqrt(q_BNiH.shape[-1])
    future_ij = (key_at > query_at[:, None]).to(q_BNiH.device)
    return scores_BNij.masked_fill(future_ij, float("-inf"))


# ---- One: gather all keys and values


def gather_attention(q, k, v, tables, core, cp_group, layout) -> Tensor:
    """This rank's queries against all keys.

    Communication: one all-gather forward, one reduce-scatter backward, each of
        2·B·S·K·H elements. Backward sums: each rank used every key for its own queries,
        so it has a partial gradient for every position.
    """
    C = cp_group.size()
    positions = [positions_of(r, C, layout, C * q.shape[1]) for r in range(C)]
    here = positions[cp_group.rank()]
    q_BNsH, kv_2BKsH = split_heads(q, k, v, tables, core.head_size, here)
    kv_2BKSH = lesson01.AllGatherWithGrad.apply(kv_2BKsH, 3, cp_group)
    k_BNSH, v_BNSH = repeat_for_queries(kv_2BKSH, q_BNsH)
    scores_BNsS = masked_scores(q_BNsH, k_BNSH, here, torch.cat(positions))
    return (scores_BNsS.softmax(-1) @ v_BNSH).transpose(1, 2).flatten(2)


# ---- Two: a ring, block by block

# A ring never has all keys at once: it computes attention to one block of keys, then to
# the next, and merges the results. One number per query makes that possible: lse = log
# Σ exp(scores) over the keys seen so far. FlashAttention does the same with blocks that
# fit a GPU's fast memory (arXiv:2307.08691, sec. 2.3); here a block is what a rank has.


def attend(q_BNiH: Tensor, kv_2BKjH: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys: output [B, N, i, H], and lse [B, N, i, 1]."""
    k_BNjH, v_BNjH = repeat_for_queries(kv_2BKjH, q_BNiH)
    scores_BNij = masked_scores(q_BNiH, k_BNjH, block.query_at, block.key_at)
    lse_BNi1 = scores_BNij.logsumexp(-1, keepdim=True)
    return (scores_BNij - lse_BNi1).exp() @ v_BNjH, lse_BNi1


def merge(y, lse, block_y, block_lse) -> tuple[Tensor, Tensor]:
    """Two softmaxes over different keys become one softmax over all of them.

    Each output counts by its share of Σ exp. If that is 3 over the first keys and 1
    over the others, y is ¾ of the first output plus ¼ of the other.
    """
    total_lse = torch.logaddexp(lse, block_lse)
    y = y * (lse - total_lse).exp() + block_y * (block_lse - total_lse).exp()
    return y, total_lse


def attend_backward(q_BNiH, kv_2BKjH, block: Block, grad_y, delta, lse) -> tuple:
    """What one block adds to dL/dq and to dL/d(kv).

    The weights of the full softmax are exp(scores − lse), with the lse of all keys and
    not of this block. No weights are saved: the scores are computed a second time.
    delta is Σ dL/dy · y over H. It equals Σ dL/dweight · weight over all keys, which
    the backward of a softmax subtracts.
    Source: arXiv:2307.08691, algorithm 2.
    """
    k_BNjH, v_BNjH = repeat_for_queries(kv_2BKjH, q_BNiH)
    scores_BNij = masked_scores(q_BNiH, k_BNjH, block.query_at, block.key_at)
    weights_BNij = (scores_BNij - lse).exp()
    grad_scores_BNij = weights_BNij * (grad_y @ v_BNjH.mT - delta)
    grad_scores_BNij = grad_scores_BNij / math.sqrt(q_BNiH.shape[-1])
    grad_kv = torch.stack([grad_scores_BNij.mT @ q_BNiH, weights_BNij.mT @ grad_y])
    # A key/value head served N/K query heads: sum their gradients.
    grad_kv = grad_kv.unflatten(2, (kv_2BKjH.shape[2], -1)).sum(3)
    return grad_scores_BNij @ k_BNjH, grad_kv


def pass_on(x: Tensor, cp_group) -> Tensor:
    """Send x to the next rank, and return what the previous rank sent."""
    C = cp_group.size()
    rank = cp_group.rank()
    if C == 1:
        return x
    return lesson00.send_recv(x, (rank + 1) % C, x, (rank - 1) % C, cp_group)


class RingFunction(torch.autograd.Function):
    """Attention in C steps: q stays, kv moves to the next rank after each step.

    In backward kv goes around again, and dL/d(kv) with it. Each rank adds what its
    queries contribute; a C-th hop returns the sum to the rank whose keys they are. All
    ranks pass on at every step, also if they have nothing to compute.

    Shapes: q [B, N, s, H], kv [2, B, K, s, H] → y [B, N, s, H].
    Communication: C − 1 sends forward, 2·C − 1 backward, each of 2·B·s·K·H elements.
    """

    @staticmethod
    def forward(ctx, q_BNsH: Tensor, kv_2BKsH: Tensor, cp_group, layout: str) -> Tensor:
        C = cp_group.size()
        rank = cp_group.rank()
        y_BNsH = torch.zeros_like(q_BNsH)
        lse_BNs1 = torch.full_like(q_BNsH[..., :1], float("-inf"))  # no keys so far
        kv = kv_2BKsH
        # The rank's own keys come first. Each query sees one of them, so its lse is
        # finite after step 0. In merge, −∞ with −∞ would give nan.
        for step in range(C):
            owner = (rank - step) % C  # whose keys and values are here now
            for block in blocks_of(rank, owner, C, layout, q_BNsH.shape[2]):
                q = q_BNsH[:, :, block.queries]
                y = y_BNsH[:, :, block.queries]  # y and lse are views
                lse = lse_BNs1[:, :, block.queries]
                block_y, block_lse = attend(q, kv[:, :, :, block.keys], block)
                merged_y, merged_lse = merge(y, lse, block_y, block_lse)
                y.copy_(merged_y)
                lse.copy_(merged_lse)
            if step < C - 1:
                kv = pass_on(kv, cp_group)
        ctx.save_for_backward(q_BNsH, kv_2BKsH, y_BNsH, lse_BNs1)
        ctx.cp_group = cp_group
        ctx.layout = layout
        return y_BNsH

    @staticmethod
    def backward(ctx, grad_y_BNsH: Tensor):
        q_BNsH, kv, y_BNsH, lse_BNs1 = ctx.saved_tensors
        C = ctx.cp_group.size()
        rank = ctx.cp_group.rank()
        delta_BNs1 = (grad_y_BNsH * y_BNsH).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q_BNsH)
        grad_kv = torch.zeros_like(kv)  # travels with kv
        for step in range(C):
            owner = (rank - step) % C
            for block in blocks_of(rank, owner, C, ctx.layout, q_BNsH.shape[2]):
                q = q_BNsH[:, :, block.queries]
                grad_y = grad_y_BNsH[:, :, block.queries]
                delta = delta_BNs1[:, :, block.queries]
                lse = lse_BNs1[:, :, block.queries]
                to_q, to_kv = attend_backward(
                    q, kv[:, :, :, block.keys], block, grad_y, delta, lse
                )
                grad_q[:, :, block.queries] += to_q
                grad_kv[:, :, :, block.keys] += to_kv
            if step < C - 1:
                kv = pass_on(kv, ctx.cp_group)
            grad_kv = pass_on(grad_kv, ctx.cp_group)
        return grad_q, grad_kv, None, None


def ring_attention(q, k, v, tables, core, cp_group, layout) -> Tensor:
    """Attention by the ring: RingFunction on the heads of this rank's positions."""
    C = cp_group.size()
    here = positions_of(cp_group.rank(), C, layout, C * q.shape[1])
    q_BNsH, kv_2BKsH = split_heads(q, k, v, tables, core.head_size, here)
    y_BNsH = RingFunction.apply(q_BNsH, kv_2BKsH, cp_group, layout)
    return y_BNsH.transpose(1, 2).flatten(2)


# ---- Three: exchange positions for heads (ulysses.py)

# All-to-alls give a rank all S positions of N/C heads, for lesson 02's attention as it
# is, and return its output. Gradients take the same way back. C must divide K.

# ---- The model, its loss, its gradients


class Method(NamedTuple):
    """One of the three kinds of attention, and who has which positions."""

    attention: Callable
    layout: str


METHODS = {
    "gather": Method(gather_attention, "contiguous"),
    "ring": Method(ring_attention, "contiguous"),
    "zigzag": Method(ring_attention, "zigzag"),
    "Ulysses": Method(ulysses_attention, "contiguous"),
}


class SplitAttention(nn.Module):
    """CoreAttention of a split sequence: replaces layer.self_attn.core."""

    def __init__(self, core: nn.Module, method: Method, cp_group):
        super().__init__()
        self.core = core
        self.method = method
        self.cp_group = cp_group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple) -> Tensor:
        attention, layout = self.method
        return attention(q, k, v, tables, self.core, self.cp_group, layout)


def cp_transformer(full, method: Method, cp_group, tp_group) -> lesson02.Transformer:
    """A copy whose attention works on a split sequence; over tp as in lesson 02."""
    model = lesson02.tp_transformer(full, tp_group)
    for layer in model.layers:
        layer.self_attn.core = SplitAttention(layer.self_attn.core, method, cp_group)
    return model


def cp_loss(logits_BsV: Tensor, target_Bs: Tensor, cp_group) -> Tensor:
    """The mean loss over the targets of all ranks, the same on every rank.

    Ranks have different numbers of targets, some none, so each divides its sum by the
    number of all. g adds these up; backward, each rank has its own part of the loss.
    Communication: two all-reduces forward, of an int64 and of the loss.
    """
    logits = logits_BsV.flatten(0, 1)
    loss_sum = F.cross_entropy(logits, target_Bs.flatten(), reduction="sum")
    targets = lesson00.all_reduce((target_Bs != lesson02.IGNORE).sum(), cp_group)
    return lesson01.ReduceFromTP.apply(loss_sum / targets, cp_group)


def sum_over_cp(model: nn.Module, cp_group) -> None:
    """Sum all gradients: each rank applied every parameter to its positions only.

    A sum, not an average: the loss was divided by the number of all targets before.
    Communication: one all-reduce, of all gradients.
    """
    lesson05.all_reduce_gradients(model, cp_group)


# ==== RUN

# Why does a wrong backward not show in the loss? With the bug `stale` (tools/bug.py),
# backward uses a rank's own keys and values at every step.
# 1. A loss is computed forward, and forward is right: step 1's loss is right.
# 2. Most of the update is right. The gradient reaches most weights through the residual
#    sum, and dL/dv hardly depends on the keys while attention is nearly uniform. q_proj
#    and k_proj are off by about their own size, but they have 3.2 % of the norm of all
#    gradients: in step 1 that norm is off by 1.6e-4 (ring, 2 ranks).
# 3. AdamW takes wrong steps in q_proj and k_proj. At first the loss hardly depends on
#    them: at step 3 it is 5.1307 instead of 5.1312.
# 4. Later it does: at step 100 (--steps 100) it is 2.036 instead of 2.017. From step 80
#    on the norm of all gradients jumps, once to 50 times too much.
# In training you have only one of the two losses, and it falls. So compare gradients
# with one process, module by module (section 3), or one attention (section 4).


def main(args, report: lesson00.Report) -> None:
    """Train the same model without CP and by each method, then compare."""
    mesh = {"cp": report.size["C"], "tp": args.tp}
    groups = lesson00.mesh_groups(mesh, args.timeout)
    full = lesson02.make_transformer(args)
    batches = lesson02.make_batches(__doc__, args, args.steps)
    show_positions(report, batches[0])

    methods = dict(METHODS)
    if args.no_ulysses:
        del methods["Ulysses"]
    runs = {}
    model = copy.deepcopy(full)
    runs["without CP"] = lesson02.train_transformer("without CP", model, batches, args)
    for name, method in methods.items():
        # If your edit raises an error in one run, the others continue.
        with report.guard(name):
            runs[name] = train_split(name, full, method, batches, args, groups)

    show_training_cp(report, runs, args, groups["cp"])
    show_gradients_cp(report, runs, args)
    on_a_rank = lesson02.tp_transformer(full, groups["tp"])
    report.size["Ψ"] = sum(p.numel() for p in on_a_rank.parameters())
    show_attention(report, methods, args, groups["cp"])
    show_communication_cp(report, methods)
    show_saved(report, methods, args, groups["cp"])


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError if the model cannot be built or split."""
    ranks = args.ranks
    if ranks % args.tp != 0:
        left = f"{ranks} ranks % {args.tp} = {ranks % args.tp}, not 0"
        raise ValueError(f"--tp {args.tp}: {left}; take {math.gcd(ranks, args.tp)}")
    C = ranks // args.tp
    args.kv_heads = args.kv_heads or ranks * math.ceil(4 / ranks)
    args.seq_len = args.seq_len or 2 * C * math.ceil(32 / C)
    lesson00.must_divide(args, "seq_len", 2 * C, "(2 · CP ranks: zigzag)")
    size = sizes_without_dropout(args)
    k = args.kv_heads // args.tp
    if k % C != 0 and not args.no_ulysses:
        text = f"Ulysses needs {C} CP ranks to divide {k} heads per TP rank"
        text = f"{text}; take {ranks * math.ceil(k / C)}, or add --no-ulysses"
        raise ValueError(f"--kv-heads {args.kv_heads}: {text}")
    args.mesh = f"cp {C} × tp {args.tp}"
    size.update(T=args.tp, C=C, s=args.seq_len // C, n=args.heads // args.tp, k=k)
    return size


def train_split(name, full, method, batches, args, groups) -> lesson02.TrainingRun:
    """Train on this rank's positions; tp shards the layers, cp nothing."""
    cp_group = groups["cp"]
    model = cp_transformer(full, method, cp_group, groups["tp"])
    # As if a data loader had given each rank its positions.
    batches = [split_positions(batch, cp_group, method.layout) for batch in batches]
    loss_of = lambda logits, target: cp_loss(logits, target, cp_group)
    sum_up = lambda model: sum_over_cp(model, cp_group)
    return lesson02.train_transformer(
        name, model, batches, args, groups["tp"], loss_of, after_backward=sum_up
    )


# ---- The sections of the output, in order


def show_positions(report: lesson00.Report, batch) -> None:
    """Each rank's positions in both layouts, and how many targets it has there."""
    C = report.size["C"]
    total = (batch[1] != lesson02.IGNORE).sum().item()
    counted = 0
    rows = []
    for rank in range(C):
        row = {"rank": rank}
        for layout in ("contiguous", "zigzag"):
            here = positions_of(rank, C, layout, report.size["S"])
            ends = []  # first and last position of each chunk
            for chunk in here.chunk(len(chunks_of(rank, C, layout))):
                ends.append(f"{chunk[0]} to {chunk[-1]}")
            row[layout] = ", ".join(ends)
            has_target = batch[1][:, here] != lesson02.IGNORE
            row[f"targets, {layout}"] = has_target.sum().item()
        counted += row["targets, contiguous"]
        rows.append(row)
    report.section("Who has which positions, and how many targets of the first batch")
    report.table(rows)
    report.check("runs: each target is on one rank", abs(counted - total))
    text = f"Each rank divides its sum of losses by all {total} targets. Layouts: "
    report.say(text + ", ".join(f"{x} {METHODS[x].layout}" for x in METHODS) + ".")


def show_training_cp(report, runs: dict, args, cp_group) -> None:
    """Losses, norms, parameters after training; what CP ranks hold is identical."""
    of_loss = lesson00.ALLOWED_LOSS[args.dtype]
    first = "loss, step 1"  # before any update: if it is off, forward is wrong
    for name in list(runs)[1:]:
        # The verdict names outputs before gradients.
        expected = runs["without CP"].losses[first]
        got = runs[name].losses[first]
        report.agree(f"outputs: {first}, {name}", got, expected, of_loss)
    allowed = lesson00.ALLOWED[args.dtype]
    values = lambda field: lesson01.values_of(runs, field)
    title = "Losses, gradient norms per step; after training, parameters and replicas"
    report.section(title)
    report.compare("losses", values("losses"), of_loss)
    report.compare("norms", values("norms"), allowed, brief=True)
    report.compare("parameters", values("parameters"), allowed, brief=True)
    tensors = {}
    for name in list(runs)[1:]:
        for parameter, p in runs[name].model.named_parameters():
            tensors[f"{parameter}, {name}"] = p
        # Each rank has the loss of all positions, from an all-reduce.
        losses = list(runs[name].losses.values())
        losses = torch.tensor(losses, dtype=torch.float64, device=args.device)
        tensors[f"losses, {name}"] = losses
    report.check_replicas(tensors, cp_group)


def show_gradients_cp(report, runs: dict[str, lesson02.TrainingRun], args) -> None:
    """Gradients of step 1 by module: their norm, and each method's difference."""
    allowed = lesson00.ALLOWED[args.dtype]
    alone = runs["without CP"]
    methods = list(runs)[1:]
    norms = {}  # module → norm of its gradients
    worst = {}  # (module, run) → the largest relative difference of its parameters
    for parameter, gradient in alone.gradients.items():
        module = lesson02.module_of(parameter).removeprefix("layers.*.")
        norms[module] = math.hypot(norms.get(module, 0.0), gradient.double().norm())
        for name in methods:
            got = runs[name].gradients[parameter]
            check = f"gradients: {parameter}, {name}"
            diff = report.agree(check, got, gradient, allowed)
            worst[module, name] = max(worst.get((module, name), 0.0), diff)
    rows = []
    for module, norm in norms.items():
        row = {"module": module, "norm": f"{norm:#.7g}"}
        for name in methods:
            diff = worst[module, name]
            row[name] = marked(f"{diff:.1e}", diff <= allowed)
        rows.append(row)
    report.section("Gradients of step 1: norm, and the difference of each method")
    report.table(rows)
    q_and_k = math.hypot(norms["self_attn.q_proj"], norms["self_attn.k_proj"])
    share = q_and_k / alone.norms["‖g‖, step 1"]
    report.say(f"q_proj and k_proj have {share:.1%} of the norm of all gradients.")


# ---- One attention on its own


def show_attention(report, methods: dict, args, cp_group) -> None:
    """Output and gradients of one attention, and the blocks of scores computed."""
    size = report.size
    core, tables, tensors = random_attention(args, size, size["S"])
    inputs = [x.requires_grad_() for x in tensors[:3]]  # q, k, v
    y_BSD = core(inputs[0], inputs[1], inputs[2], tables)
    y_BSD.backward(tensors[3])
    results = {"without CP": dict(y=y_BSD)}
    for name, x in zip(("dL/dq", "dL/dk", "dL/dv"), inputs):
        results["without CP"][name] = x.grad
    rows = []
    for name, method in methods.items():
        with report.guard(f"{name}, one attention"):
            with recorded_blocks(globals()) as blocks:
                results[name] = split_attention(method, core, tables, tensors, cp_group)
            if method.attention is ring_attention:
                rows.extend(block_rows(report, blocks, name, cp_group))
    left_out = why_left_out(args, size)
    if not left_out:
        with report.guard("PyTorch, one attention", is_formula=True):
            results["PyTorch"] = pytorch_attention(tensors, tables, size["H"], cp_group)
    report.section("One attention, random input: output, gradients, blocks of scores")
    report.compare("attention", results, lesson00.ALLOWED[args.dtype])
    report.table(rows)
    # A step takes as long as its busiest rank; a block is s² or, if zigzag, s²/4.
    zigzag = lesson00.evaluate("(2·C + 1)·s·s/4", size)
    text = f"Busiest rank, scores per head: C·s² = {size['C'] * size['s'] ** 2:,}, "
    report.say(text + f"with zigzag (2·C + 1)·s²/4 = {zigzag:,}.")
    if left_out:
        report.say(f"PyTorch's context_parallel is left out: {left_out}")


def block_rows(report, blocks: list, method: str, cp_group) -> list[dict]:
    """How many blocks of scores each rank computed at each step of the ring."""
    layout = METHODS[method].layout
    formula = {"contiguous": "t + 1", "zigzag": "2·C + 1"}[layout]
    computed = [step for step, _ in blocks]  # on this rank
    counts = [computed.count(step) for step in range(report.size["C"])]
    rows = []
    for rank, of_rank in enumerate(gather_objects(counts, cp_group)):
        total = sum(of_rank)
        expected = lesson00.evaluate(formula, dict(report.size, t=rank))
        # A value: a block too many or too few is another attention.
        text = f"{total} blocks, {expected} expected"
        name = f"blocks: {method}, rank {rank}"
        holds = report.check(name, abs(total - expected), text=text)
        row = {"blocks": layout, "rank t": rank}
        row["at each ring step"] = " ".join(map(str, of_rank))
        rows.append(row | {"total": marked(total, holds), "formula": formula})
    return rows


# ---- What is sent, and what is saved


def show_communication_cp(report: lesson00.Report, methods: dict) -> None:
    """Calls and bytes per step of each method, as counted, against formulas."""
    size = report.size
    L = size["L"]
    C = size["C"]
    per_method = {  # phase, collective: calls, bytes
        gather_attention: {
            ("forward", "all-gather"): (L, "L·C·kv"),
            ("backward", "reduce-scatter"): (L, "L·C·kv"),
        },
        ring_attention: {
            ("forward", "send/recv"): (L * (C - 1), "L·(C-1)·kv"),
            ("backward", "send/recv"): (L * (2 * C - 1), "L·(2·C-1)·kv"),
        },
        ulysses_attention: {  # of q, k, v and the output
            ("forward", "all-to-all"): (4 * L, "L·(qy+kv)"),
            ("backward", "all-to-all"): (4 * L, "L·(qy+kv)"),
        },
    }
    # Bytes of a rank's keys and values, and of its queries and the output y.
    size["kv"] = lesson00.evaluate("2·B·s·k·H·e", size)
    size["qy"] = lesson00.evaluate("2·B·s·n·H·e", size)
    formulas = {}
    for run, method in methods.items():
        for (phase, collective), formula in per_method[method.attention].items():
            formulas[run, phase, collective, "cp"] = formula
        # The number of targets (int64) and the loss; then all gradients.
        formulas[run, "loss", "all-reduce", "cp"] = (2, "8 + e")
        formulas[run, "summing", "all-reduce", "cp"] = (1, "Ψ·e")
        # With --tp, lesson 02's calls, on s positions.
        for phase in ("forward", "backward"):
            formulas[run, phase, "all-reduce", "tp"] = (2 * L, "2·L·B·s·D·e")
        formulas[run, "clipping", "all-reduce", "tp"] = (1, "8")
    report.section("Communication per step")
    report.ledger(on_axes(formulas, {"cp": C, "tp": size["T"]}))
    report.say("kv: bytes of a rank's keys and values. qy: of its queries and y.")
    if C > 1:
        show_sent(report, methods)


def show_sent(report, methods: dict) -> None:
    """Add up what a rank sends around attention per step, and say who sends less."""
    size = report.size
    C = size["C"]
    formulas = {gather_attention: "L·2·(C-1)·kv", ring_attention: "L·(3·C-2)·kv"}
    formulas[ulysses_attention] = "L·2·(C-1)·(qy+kv)/C"
    texts = []
    for run in [run for run in methods if run not in report.raised]:
        sent = 0
        for call, payloads in lesson00.METER.calls.items():
            if (
                call[0] == run
                and call[1] in ("forward", "backward")
                and call[3] == "cp"
            ):
                payload = sum(payloads) // report.steps
                sent += lesson00.ring(call[2], payload, C)
        formula = formulas[methods[run].attention]
        name = f"bytes: {run}, sent around attention"
        texts.append(f"{run} {cell(report, name, sent, formula)}")
    report.say(f"Both phases: {', '.join(texts)} bytes.")
    report.say(
        f"Slices kv per layer: the ring sends {3 * C - 2}, gather {2 * C - 2}; gather "
        f"holds {C} at once."
    )
    ring = C * (3 * C - 2) / (2 * (C - 1))
    report.say(
        "The ring sends less than Ulysses if C·(3·C − 2)/(2·(C − 1)) < N/K + 1: here "
        f"{ring:.3g} and {size['N'] / size['K'] + 1:.3g}."
    )


# Bytes per rank and layer; a = B·n·e. a·S·S, a·s·S: weights of the softmax (lesson 02);
# s·S: the mask; 2·s·H: rotary tables. The ring saves y and lse instead of weights.
SAVED_BY_ATTENTION = {
    lesson02.CoreAttention: "a·(3·S·H+S·S)",
    gather_attention: "a·(s+2·S)·H + s·(a·S+2·H·e+S)",
    ring_attention: "a·s·(2·H+1) + 2·(B·k+1)·s·H·e",
    ulysses_attention: "a·(3·S·H+S·S)/C",
}


def show_saved(report: lesson00.Report, methods: dict, args, cp_group) -> None:
    """Bytes that one attention saves for backward, at three lengths."""
    size = dict(report.size, a=lesson00.evaluate("B·n·e", report.size))
    rows = []
    for name in ["without CP"] + list(methods):
        kind = methods[name].attention if name in methods else lesson02.CoreAttention
        row = {"attention": name, "formula": SAVED_BY_ATTENTION[kind]}
        for S in (size["S"], 2 * size["S"], 4 * size["S"]):
            letters = dict(size, S=S, s=S // size["C"])
            nbytes = bytes_saved(args, methods.get(name), letters, cp_group)
            check = f"memory: saved, {name}, S {S}"
            row[f"S {S}"] = cell(report, check, nbytes, row["formula"], **letters)
        rows.append(row)
    report.section("Bytes that one attention saves for backward on a rank")
    report.table(rows)
    report.say("a = B·n·e. Only the ring has no S·S or s·S: it saves no weights.")


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson02.add_model_flags(parser)
    positive = lesson00.positive
    text = "TP ranks for each CP rank (1)"
    parser.add_argument("--tp", type=positive, default=1, help=text)
    text = "leave out Ulysses, so K may be small"
    parser.add_argument("--no-ulysses", action="store_true", help=text)
    parser.set_defaults(dropout=0.0, seq_len=None)  # a multiple of 2 · CP ranks
    lesson00.launch(main, sizes, parser)
