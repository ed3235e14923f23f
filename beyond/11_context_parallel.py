"""Beyond the lessons 11: context parallelism.

Sequence parallelism (lesson 04) gathers the full sequence in front of every linear, so
each rank still holds B·S·D elements there. With context parallelism (CP) a rank has s =
S/T positions everywhere, inside attention as well. Its queries need the keys and values
of other ranks: these are gathered, or travel around a ring, or are exchanged for heads
(Ulysses). The forward is short; what people get wrong is the backward.

Run it on 1, 2, 3, 4 or 8 ranks:

    torchrun --standalone --nproc_per_node=2 beyond/11_context_parallel.py

What you will see: which positions each rank has; a small decoder trained in one process
and with four kinds of CP, with equal losses, gradients and parameters; the blocks of
scores that each rank computes at each step of the ring; calls and bytes; bytes saved
for backward, which grow with S² except in the ring.

Try one change at a time. notebooks/11_context_parallel.ipynb, section 9, answers.
    1. --tp 2 on 4 ranks: CP over 2 ranks, TP over 2. Which calls are new?
    2. --heads 8 --kv-heads 8, then --kv-heads 2: whose bytes change, and whose do not?
    3. In RingFunction.backward, make the last hop of grad_kv only if step < T − 1, as
       for kv. Which gradients are wrong, and why is the one of q right?

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read merge, RingFunction and the comment below it.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in the CP group, s = S/T
    positions per rank, c positions per chunk (s, or s/2 if zigzag), n and k heads per
    TP rank. A tensor kv has keys and values, stacked: [2, B, K, s, H].

Sources: arXiv:2310.01889 (ring), arXiv:2309.14509 (Ulysses), arXiv:2307.08691
    (FlashAttention-2: blocks and their backward), arXiv:2407.21783, sec. 3.3.2
    (Llama 3: gathers k and v, two chunks per rank).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ==== NEW in 11: context parallelism

# From lesson 00: send_recv(x, dst, like, src, group) sends and receives at once;
# all_to_all sends part j to rank j. From lesson 01: AllGatherWithGrad is an all-gather
# forward and a reduce-scatter backward; ReduceFromTP (g) is an all-reduce forward and
# the identity backward. From lesson 02: CoreAttention is the part of attention without
# parameters; rotate turns q and k by the angles of their positions.

# Linears, LayerNorms and the embedding treat each position on its own, so they work on
# some of the positions as they are. Attention, the loss and gradients need a change.

# ---- Who has which positions

# A query sees keys up to its own position. With contiguous slices rank 0 has little to
# compute and the last rank much. Zigzag cuts the sequence into 2·T chunks and gives
# each rank one from either end: the same work for all. An example, T = 2 and S = 8:
#
#     contiguous   rank 0: 0 1 2 3    rank 1: 4 5 6 7     10 and 26 scores
#     zigzag       rank 0: 0 1 6 7    rank 1: 2 3 4 5     18 and 18


def chunks_of(rank: int, ranks: int, layout: str) -> list[int]:
    """Which chunks of the sequence a rank has: t, or t and 2T − 1 − t if zigzag."""
    return [rank, 2 * ranks - 1 - rank] if layout == "zigzag" else [rank]


def positions_of(rank: int, ranks: int, layout: str, seq_len: int) -> Tensor:
    """Positions of a rank's tokens in the full sequence, in the order it has them."""
    held = chunks_of(rank, ranks, layout)
    chunks = ranks * len(held)
    if seq_len % chunks != 0:
        raise ValueError(f"{layout}: {chunks} chunks do not divide S = {seq_len}")
    return torch.arange(seq_len).view(chunks, -1)[held].flatten()


def split_positions(batch: tuple, cp_group, layout: str) -> tuple[Tensor, Tensor]:
    """This rank's positions of tokens and targets. Shapes: [B, S] → [B, s].

    Targets were shifted before the split: a slice's last target is a token of another
    rank.
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
    k_BKsH = rotate(k_BKsH, cos_sH, sin_sH)
    return rotate(q_BNsH, cos_sH, sin_sH), torch.stack([k_BKsH, v_BKsH])


def repeat_for_queries(kv_2BKcH: Tensor, q_BNcH: Tensor) -> Tensor:
    """Repeat each key/value head for the N/K query heads that it serves.

    This is done after the hop: K heads are sent, not N.
    """
    return kv_2BKcH.repeat_interleave(q_BNcH.shape[1] // kv_2BKcH.shape[2], 2)


def masked_scores(q_BNcH, k_BNcH, query_at: Tensor, key_at: Tensor) -> Tensor:
    """Scores of queries and keys at these positions; −∞ where the key is later."""
    scores_BNcc = q_BNcH @ k_BNcH.mT / math.sqrt(q_BNcH.shape[-1])
    future_cc = (key_at > query_at[:, None]).to(q_BNcH.device)
    return scores_BNcc.masked_fill(future_cc, float("-inf"))


# ---- One: gather all keys and values


def gather_attention(q, k, v, tables, core, cp_group, layout) -> Tensor:
    """This rank's queries against all keys.

    Communication: one all-gather forward, one reduce-scatter backward, each of
        2·B·S·K·H elements. Backward sums: each rank used every key for its own queries,
        so it has a partial gradient for every position.
    """
    T = cp_group.size()
    positions = [positions_of(r, T, layout, T * q.shape[1]) for r in range(T)]
    here = positions[cp_group.rank()]
    q_BNsH, kv_2BKsH = split_heads(q, k, v, tables, core.head_size, here)
    kv_2BKSH = AllGatherWithGrad.apply(kv_2BKsH, 3, cp_group)
    k_BNSH, v_BNSH = repeat_for_queries(kv_2BKSH, q_BNsH)
    scores_BNsS = masked_scores(q_BNsH, k_BNSH, here, torch.cat(positions))
    return (scores_BNsS.softmax(-1) @ v_BNSH).transpose(1, 2).flatten(2)


# ---- Two: a ring, block by block

# A ring never has all keys at once: it computes attention to one block of keys, then to
# the next, and merges the results. One number per query makes that possible: lse = log
# Σ exp(scores) over the keys seen so far. FlashAttention does the same with blocks that
# fit a GPU's fast memory (arXiv:2307.08691, sec. 2.3); here a block is what a rank has.


class Block(NamedTuple):
    """Some of this rank's queries, and some of the keys that it has at the moment."""

    queries: slice  # of this rank's s positions
    keys: slice  # of the s positions whose keys are here
    query_at: Tensor  # positions in the full sequence [c]
    key_at: Tensor


def blocks_of(rank: int, owner: int, ranks: int, layout: str, s: int) -> list[Block]:
    """The blocks that a rank computes while it has the keys of rank `owner`.

    A block whose keys are all later than its queries is left out.
    """
    c = s // len(chunks_of(rank, ranks, layout))
    blocks = []
    for i, query_chunk in enumerate(chunks_of(rank, ranks, layout)):
        for j, key_chunk in enumerate(chunks_of(owner, ranks, layout)):
            if key_chunk <= query_chunk:
                query_at = query_chunk * c + torch.arange(c)
                key_at = key_chunk * c + torch.arange(c)
                queries = slice(i * c, i * c + c)
                blocks.append(Block(queries, slice(j * c, j * c + c), query_at, key_at))
    return blocks


def attend(q_BNcH: Tensor, kv_2BKcH: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys: output [B, N, c, H], and lse [B, N, c, 1]."""
    k_BNcH, v_BNcH = repeat_for_queries(kv_2BKcH, q_BNcH)
    scores_BNcc = masked_scores(q_BNcH, k_BNcH, block.query_at, block.key_at)
    lse_BNc1 = scores_BNcc.logsumexp(-1, keepdim=True)
    return (scores_BNcc - lse_BNc1).exp() @ v_BNcH, lse_BNc1


def merge(y, lse, block_y, block_lse) -> tuple[Tensor, Tensor]:
    """Two softmaxes over different keys become one softmax over all of them.

    Each output counts by its share of Σ exp. If that is 3 over the first keys and 1
    over the others, y is ¾ of the first output plus ¼ of the other.
    """
    total_lse = torch.logaddexp(lse, block_lse)
    y = y * (lse - total_lse).exp() + block_y * (block_lse - total_lse).exp()
    return y, total_lse


def attend_backward(q_BNcH, kv_2BKcH, block: Block, grad_y, delta, lse) -> tuple:
    """What one block adds to dL/dq and to dL/d(kv).

    The weights of the full softmax are exp(scores − lse), with the lse of all keys and
    not of this block. No weights are saved: the scores are computed a second time.
    delta is Σ dL/dy · y over H. It equals Σ dL/dweight · weight over all keys, which
    the backward of a softmax subtracts.
    Source: arXiv:2307.08691, algorithm 2.
    """
    k_BNcH, v_BNcH = repeat_for_queries(kv_2BKcH, q_BNcH)
    scores_BNcc = masked_scores(q_BNcH, k_BNcH, block.query_at, block.key_at)
    weights_BNcc = (scores_BNcc - lse).exp()
    grad_scores_BNcc = weights_BNcc * (grad_y @ v_BNcH.mT - delta)
    grad_scores_BNcc = grad_scores_BNcc / math.sqrt(q_BNcH.shape[-1])
    grad_kv = torch.stack([grad_scores_BNcc.mT @ q_BNcH, weights_BNcc.mT @ grad_y])
    # A key/value head served N/K query heads: sum their gradients.
    grad_kv = grad_kv.unflatten(2, (kv_2BKcH.shape[2], -1)).sum(3)
    return grad_scores_BNcc @ k_BNcH, grad_kv


def pass_on(x: Tensor, cp_group) -> Tensor:
    """Send x to the next rank, and return what the previous rank sent."""
    T = cp_group.size()
    rank = cp_group.rank()
    if T == 1:
        return x
    return send_recv(x, (rank + 1) % T, x, (rank - 1) % T, cp_group)


class RingFunction(torch.autograd.Function):
    """Attention in T steps: q stays, kv moves to the next rank after each step.

    In backward kv goes around again, and dL/d(kv) with it. Each rank adds what its
    queries contribute; a T-th hop returns the sum to the rank whose keys they are. All
    ranks pass on at every step, also if they have nothing to compute.

    Shapes: q [B, N, s, H], kv [2, B, K, s, H] → y [B, N, s, H].
    Communication: T − 1 sends forward, 2·T − 1 backward, each of 2·B·s·K·H elements.
    """

    blocks = []  # (ring step, Block) of each block that forward computed

    @staticmethod
    def forward(ctx, q_BNsH: Tensor, kv_2BKsH: Tensor, cp_group, layout: str) -> Tensor:
        T = cp_group.size()
        rank = cp_group.rank()
        y_BNsH = torch.zeros_like(q_BNsH)
        lse_BNs1 = torch.full_like(q_BNsH[..., :1], float("-inf"))  # no keys so far
        kv = kv_2BKsH
        # The rank's own keys come first. Each query sees one of them, so its lse is
        # finite after step 0. In merge, −∞ with −∞ would give nan.
        for step in range(T):
            owner = (rank - step) % T  # whose keys and values are here now
            for block in blocks_of(rank, owner, T, layout, q_BNsH.shape[2]):
                q = q_BNsH[:, :, block.queries]
                y = y_BNsH[:, :, block.queries]  # y and lse are views
                lse = lse_BNs1[:, :, block.queries]
                block_y, block_lse = attend(q, kv[:, :, :, block.keys], block)
                merged_y, merged_lse = merge(y, lse, block_y, block_lse)
                y.copy_(merged_y)
                lse.copy_(merged_lse)
                RingFunction.blocks.append((step, block))
            if step < T - 1:
                kv = pass_on(kv, cp_group)
        ctx.save_for_backward(q_BNsH, kv_2BKsH, y_BNsH, lse_BNs1)
        ctx.cp_group = cp_group
        ctx.layout = layout
        return y_BNsH

    @staticmethod
    def backward(ctx, grad_y_BNsH: Tensor):
        q_BNsH, kv, y_BNsH, lse_BNs1 = ctx.saved_tensors
        T = ctx.cp_group.size()
        rank = ctx.cp_group.rank()
        delta_BNs1 = (grad_y_BNsH * y_BNsH).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q_BNsH)
        grad_kv = torch.zeros_like(kv)  # travels with kv
        for step in range(T):
            owner = (rank - step) % T
            for block in blocks_of(rank, owner, T, ctx.layout, q_BNsH.shape[2]):
                to_q, to_kv = attend_backward(
                    q_BNsH[:, :, block.queries],
                    kv[:, :, :, block.keys],
                    block,
                    grad_y_BNsH[:, :, block.queries],
                    delta_BNs1[:, :, block.queries],
                    lse_BNs1[:, :, block.queries],
                )
                grad_q[:, :, block.queries] += to_q
                grad_kv[:, :, :, block.keys] += to_kv
            if step < T - 1:
                kv = pass_on(kv, ctx.cp_group)
            grad_kv = pass_on(grad_kv, ctx.cp_group)
        return grad_q, grad_kv, None, None


# Why does a wrong backward not show in the loss? Let backward forget to pass kv on, so
# that it uses its own, stale keys and values at every step (`--break stale`):
# 1. A loss is computed forward, and forward is right. The loss of step 1 has no wrong
#    bit; a later one can differ only through the update of the weights.
# 2. Most of the update is right. The gradient reaches most weights through the residual
#    sum. dL/dv needs only the weights of the softmax, and these are nearly uniform at
#    first, whatever the keys are: v_proj is off by about 10 %. dL/dq and dL/dk are made
#    from the stale keys and values themselves: q_proj and k_proj are off by about their
#    own size. But they have 4 % of the norm of all gradients (section 3), so that norm
#    is off by 2e-5 only (ring).
# 3. AdamW divides by the size of a gradient, so q_proj and k_proj take large steps in
#    wrong directions. The loss hardly depends on them yet: a step changes it by
#    gradient × step, and their gradient is small. At step 3 it is 5.1554 instead of
#    5.1556 (2 ranks). If they were not trained at all, it would be 5.1579.
# 4. Attention learns later where to look. Then the loss is higher than it could be:
#    2.44 instead of 2.20 at step 100 (--steps 100). From step 73 on the norm of all
#    gradients jumps, once to 300 times too much. Before that a log looks healthy: in
#    training you have only one of the two losses, and it falls.
# So compare gradients with one process, module by module (section 3), or one attention
# on its own (section 4).


def ring_attention(q, k, v, tables, core, cp_group, layout) -> Tensor:
    """Attention by the ring: RingFunction on the heads of this rank's positions."""
    T = cp_group.size()
    here = positions_of(cp_group.rank(), T, layout, T * q.shape[1])
    q_BNsH, kv_2BKsH = split_heads(q, k, v, tables, core.head_size, here)
    y_BNsH = RingFunction.apply(q_BNsH, kv_2BKsH, cp_group, layout)
    return y_BNsH.transpose(1, 2).flatten(2)


# ---- Three: exchange positions for heads


def exchange(x: Tensor, split_dim: int, join_dim: int, cp_group) -> Tensor:
    """Split x along one dim, send part j to rank j, join along the other dim."""
    parts = torch.stack(split(x, split_dim, cp_group.size()))
    return torch.cat(list(all_to_all(parts, cp_group)), join_dim)


class Exchange(torch.autograd.Function):
    """An all-to-all. Elements only move, so their gradients move back the same way."""

    @staticmethod
    def forward(ctx, x: Tensor, split_dim: int, join_dim: int, cp_group) -> Tensor:
        ctx.dims = split_dim, join_dim
        ctx.cp_group = cp_group
        return exchange(x, split_dim, join_dim, cp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        split_dim, join_dim = ctx.dims
        return exchange(grad, join_dim, split_dim, ctx.cp_group), None, None, None


def ulysses_attention(q, k, v, tables, core, cp_group, layout) -> Tensor:
    """All S positions of N/T heads instead of s positions of N heads, and back.

    In between, lesson 02's attention runs unchanged: T must divide K.
    Shapes: q [B, s, N·H] → [B, S, N·H/T] → attention [B, S, N·H/T] → [B, s, N·H].
    Communication: 4 all-to-alls forward (q, k, v, output) and 4 backward, together
        B·s·(2·N + 2·K)·H elements forward and the same backward.
    """
    q = Exchange.apply(q, 2, 1, cp_group)
    k = Exchange.apply(k, 2, 1, cp_group)
    v = Exchange.apply(v, 2, 1, cp_group)
    return Exchange.apply(core(q, k, v, tables), 1, 2, cp_group)


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


def cp_transformer(full, method: Method, cp_group, tp_group) -> Transformer:
    """A copy whose attention works on a split sequence; over tp as in lesson 02."""
    model = tp_transformer(full, tp_group)
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
    targets = all_reduce((target_Bs != IGNORE).sum(), cp_group)
    return ReduceFromTP.apply(loss_sum / targets, cp_group)


def sum_over_cp(model: nn.Module, cp_group) -> None:
    """Sum all gradients: each rank applied every parameter to its positions only.

    A sum, not an average: the loss was divided by the number of all targets before.
    Communication: one all-reduce, of all gradients.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    partial_flat = torch.cat([p.grad.flatten() for p in parameters])
    flat = all_reduce(partial_flat, cp_group)
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(grad.view_as(p))


# ==== RUN


def main(args, report: Report) -> None:
    """Train the same model without CP and by each method, then compare."""
    groups = mesh_groups({"cp": args.ranks // args.tp, "tp": args.tp}, args.timeout)
    T = groups["cp"].size()
    size = sizes_of(args)
    size.update(T=T, s=args.seq_len // T)  # T is the size of the CP group here
    size.update(n=args.heads // args.tp, k=args.kv_heads // args.tp)
    report.begin({"cp": T, "tp": args.tp}, size)
    size["q"] = evaluate("B·s·n·H·e", size)  # bytes of a rank's queries
    size["b"] = evaluate("2·B·s·k·H·e", size)  # of its keys and values
    full = make_transformer(args)
    batches = make_batches(__doc__, args, args.steps)
    show_positions(report, batches[0], T)

    methods = dict(METHODS)
    if args.no_ulysses:
        del methods["Ulysses"]
    runs = {}
    model = copy.deepcopy(full)
    runs["without CP"] = train_transformer("without CP", model, batches, args)
    for name, method in methods.items():
        # If your edit raises an error in one run, the others continue.
        with report.column(name):
            runs[name] = train_split(name, full, method, batches, args, groups)

    show_training(report, runs)
    show_cp_replicas(report, runs, groups["cp"])
    show_gradients_cp(report, runs)
    size["P"] = sum(p.numel() for p in tp_transformer(full, groups["tp"]).parameters())
    show_attention(report, methods, size, groups["cp"])
    show_communication_cp(report, methods, size)
    show_saved(report, methods, size, groups["cp"])


def train_split(name, full, method: Method, batches, args, groups) -> TrainingRun:
    """Train on this rank's positions; tp shards the layers, cp nothing."""
    cp_group = groups["cp"]
    model = cp_transformer(full, method, cp_group, groups["tp"])
    # As if a data loader had given each rank its positions.
    batches = [split_positions(batch, cp_group, method.layout) for batch in batches]
    loss_of = lambda logits, target: cp_loss(logits, target, cp_group)
    sum_up = lambda model: sum_over_cp(model, cp_group)
    return train_transformer(
        name, model, batches, args, groups["tp"], loss_of, after_backward=sum_up
    )


# ---- The sections of the output, in order


def show_positions(report: Report, batch, T: int) -> None:
    """Each rank's positions in both layouts, and how many targets it has there."""
    args = report.args
    total = (batch[1] != IGNORE).sum().item()
    rows = []
    for rank in range(T):
        row = {"rank": rank}
        for layout in ("contiguous", "zigzag"):
            here = positions_of(rank, T, layout, args.seq_len)
            ends = []  # first and last position of each chunk
            for chunk in here.chunk(len(chunks_of(rank, T, layout))):
                ends.append(f"{chunk[0]} to {chunk[-1]}")
            row[layout] = ", ".join(ends)
            row[f"targets, {layout}"] = (batch[1][:, here] != IGNORE).sum().item()
        rows.append(row)
    report.section("Who has which positions, and how many targets of the first batch")
    report.table("positions", rows)
    counted = sum(row["targets, contiguous"] for row in rows)
    report.check("runs", "each target is on one rank", abs(counted - total))
    report.say(f"   Each rank divides its sum of losses by all {total} targets.")


def show_cp_replicas(report: Report, runs: dict, cp_group) -> None:
    """After training, what all CP ranks hold must be bitwise identical."""
    diffs = {}
    for name in list(runs)[1:]:
        for parameter, p in runs[name].model.named_parameters():
            replicas = all_gather(p[None], 0, cp_group)
            diff = max(rel_diff(replica, replicas[0]) for replica in replicas)
            diffs[f"{parameter}, {name}"] = diff
        # Each rank has the loss of all positions, from an all-reduce.
        losses = gather_objects(runs[name].losses, cp_group)
        is_same = losses == [runs[name].losses] * len(losses)
        diffs[f"losses, {name}"] = 0.0 if is_same else math.inf
    row = {"replicas": "on all CP ranks", "tensors": len(diffs), "equal": 0}
    for name, diff in diffs.items():
        if report.check("replicas", name, diff):
            row["equal"] += 1
    row["off"] = [] if row["equal"] == row["tensors"] else ["equal"]
    report.table("replicas", [row])


def show_gradients_cp(report: Report, runs: dict[str, TrainingRun]) -> None:
    """Gradients of step 1 by module: their norm, and each method's difference."""
    expected = runs["without CP"].gradients
    rows = {}
    worst = {}  # (module, run) → the largest relative difference of its parameters
    for parameter, gradient in expected.items():
        module = module_of(parameter).removeprefix("layers.*.")
        row = rows.setdefault(module, {"module": module, "norm": 0.0, "off": []})
        row["norm"] = math.hypot(row["norm"], gradient.double().norm().item())
        for name, run in runs.items():
            if name == "without CP":
                continue
            diff = rel_diff(run.gradients[parameter], gradient)
            check = f"{parameter}, {name}"
            if not report.check("gradients", check, diff, report.allowed):
                row["off"].append(name)
            worst[module, name] = max(worst.get((module, name), 0.0), diff)
            row[name] = f"{worst[module, name]:.1e}"
    first = "loss, step 1"  # before any update: if it is off, forward is wrong
    for name in list(runs)[1:]:
        diff = rel_diff(runs[name].losses[first], runs["without CP"].losses[first])
        # The verdict names outputs before gradients.
        report.check("outputs", f"{first}, {name}", diff, report.allowed_loss)
    report.section("Gradients of step 1: norm, and the difference of each method")
    report.table("gradients", list(rows.values()))
    q_and_k = [rows[f"self_attn.{name}"]["norm"] for name in ("q_proj", "k_proj")]
    share = math.hypot(*q_and_k) / runs["without CP"].norms["‖g‖, step 1"]
    report.say(f"   q_proj and k_proj have {share:.1%} of the norm of all gradients.")


# ---- One attention on its own


def show_attention(report: Report, methods: dict, size: dict, cp_group) -> None:
    """Output and gradients of one attention, and the blocks of scores computed."""
    core, tables, tensors = random_attention(report.args, size, size["S"])
    inputs = [x.requires_grad_() for x in tensors[:3]]  # q, k, v
    y_BSD = core(inputs[0], inputs[1], inputs[2], tables)
    y_BSD.backward(tensors[3])
    results = {"without CP": dict(y=y_BSD)}
    for name, x in zip(("dL/dq", "dL/dk", "dL/dv"), inputs):
        results["without CP"][name] = x.grad
    rows = []
    for name, method in methods.items():
        # The ring's forward records which blocks it computed.
        RingFunction.blocks.clear()
        with report.column(f"{name}, one attention"):
            results[name] = split_attention(method, core, tables, tensors, cp_group)
            if method.attention is ring_attention:
                rows.extend(block_rows(report, method.layout, size, cp_group))
    if report.args.device != "cpu":
        with report.column("PyTorch, one attention"):
            results["PyTorch"] = pytorch_attention(tensors, tables, size["H"], cp_group)
    report.section("One attention, random input: output, gradients, blocks of scores")
    report.compare("attention", results)
    report.table("blocks", rows)
    # A step takes as long as its busiest rank; a block is s² or, if zigzag, s²/4.
    contiguous = evaluate("T·s·s", size)
    zigzag = evaluate("(2·T + 1)·s·s/4", size)
    report.say("   Scores per head of the busiest rank of each step, added up:")
    report.say(
        f"   contiguous T·s² = {contiguous:,}, zigzag (2T + 1)·s²/4 = {zigzag:,}."
    )
    if report.args.device == "cpu":
        report.say("   PyTorch's context_parallel is left out: it has no CPU kernel.")


def random_attention(args, size: dict, S: int) -> tuple:
    """CoreAttention, its tables, and random q, k, v and dL/dy of S positions."""
    generator = torch.Generator().manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    tensors = []
    for heads in (size["n"], size["k"], size["k"], size["n"]):
        shape = (size["B"], S, heads * size["H"])
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors.append(x.to(args.device, dtype))
    cos_SH, sin_SH = rotary_table(S, size["H"])
    future_SS = torch.ones(S, S, dtype=torch.bool).triu(1)
    tables = [cos_SH.to(dtype), sin_SH.to(dtype), future_SS]
    return CoreAttention(size["H"], 0.0), [x.to(args.device) for x in tables], tensors


def split_attention(method: Method, core, tables, tensors, cp_group) -> dict:
    """The same from this rank's positions, gathered from all ranks."""
    T = cp_group.size()
    S = tensors[0].shape[1]
    # Where the elements of an all-gather are in the full sequence.
    order = torch.cat([positions_of(r, T, method.layout, S) for r in range(T)])
    here = positions_of(cp_group.rank(), T, method.layout, S)
    q, k, v, grad_y = [x.detach()[:, here] for x in tensors]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = method.attention(q, k, v, tables, core, cp_group, method.layout)
    y.backward(grad_y)
    found = dict(zip(("y", "dL/dq", "dL/dk", "dL/dv"), [y] + [x.grad for x in inputs]))
    for name, x in found.items():
        gathered = all_gather(x, 1, cp_group)  # in the order of ranks
        found[name] = gathered[:, order.argsort()]
    return found


def pytorch_attention(tensors, tables, head_size: int, cp_group) -> dict:
    """The same by PyTorch's context_parallel; written from its documentation, not run.

    It shards the buffers in place, zigzag, and F.scaled_dot_product_attention becomes a
    ring. That needs a GPU, and float32 or less. On CPU, PyTorch 2.13 raises
    NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu
    .default does not have a sharding strategy registered.
    """
    # Imported here: it is a prototype, and only GPUs get here.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    mesh = DeviceMesh.from_group(cp_group, tensors[0].device.type)
    heads = [x.detach().unflatten(-1, (-1, head_size)) for x in tensors]
    buffers = [x.transpose(1, 2).contiguous().clone() for x in heads]
    buffers += [tables[0].clone(), tables[1].clone()]
    # Restoring a buffer would raise an error, because q, k and v require gradients.
    with context_parallel(
        mesh,
        buffers=buffers,
        buffer_seq_dims=[2, 2, 2, 2, 0, 0],
        no_restore_buffers=set(buffers),
    ):
        q, k, v = [x.requires_grad_() for x in buffers[:3]]
        grad_y, cos, sin = buffers[3:]
        kv = repeat_for_queries(torch.stack([rotate(k, cos, sin), v]), q)
        # Inside the `with`, this is a ring.
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), kv[0], kv[1], is_causal=True
        )
        y.backward(grad_y)
        parts = [y.detach(), q.grad, k.grad, v.grad]
        found = _attention.context_parallel_unshard(mesh, parts, [2] * 4)
    names = ("y", "dL/dq", "dL/dk", "dL/dv")
    return {name: x.transpose(1, 2).flatten(2) for name, x in zip(names, found)}


def block_rows(report: Report, layout: str, size: dict, cp_group) -> list[dict]:
    """How many blocks of scores each rank computed at each step of the ring."""
    formulas = {"contiguous": "t + 1", "zigzag": "2·T + 1"}
    T = size["T"]
    # Counted on each rank while it computed them.
    computed = [step for step, _ in RingFunction.blocks]
    counts = [computed.count(step) for step in range(T)]
    rows = []
    for rank, of_rank in enumerate(gather_objects(counts, cp_group)):
        row = {"blocks": layout, "rank t": rank}
        row["at each ring step"] = " ".join(map(str, of_rank))
        row["total"] = sum(of_rank)
        row["formula"] = formulas[layout]
        predicted = evaluate(formulas[layout], dict(size, t=rank))
        report.expect(row, "total", "blocks", f"{layout}, rank {rank}", predicted)
        rows.append(row)
    return rows


# ---- What is sent, and what is saved


def show_communication_cp(report: Report, methods: dict, size: dict) -> None:
    """Calls and bytes per step of each method, as counted, against formulas."""
    per_method = {
        "gather": {
            ("forward", "all-gather"): "L × T·b",
            ("backward", "reduce-scatter"): "L × T·b",
        },
        "ring": {
            ("forward", "send/recv"): "L·(T - 1) × b",
            ("backward", "send/recv"): "L·(2·T - 1) × b",
        },
        "Ulysses": {
            ("forward", "all-to-all"): "4·L × (q+b/2)/2",
            ("backward", "all-to-all"): "4·L × (q+b/2)/2",
        },
    }
    per_method["zigzag"] = per_method["ring"]
    formulas = {}
    for run in methods:
        # Around attention; the four all-to-alls are of q, k, v and the output.
        for (phase, collective), formula in per_method[run].items():
            formulas[Call(run, phase, collective, "cp")] = formula
        # The number of targets (int64) and the loss; then all gradients.
        formulas[Call(run, "loss", "all-reduce", "cp")] = "1 × 8 and 1 × e"
        formulas[Call(run, "summing", "all-reduce", "cp")] = "1 × P·e"
        # With --tp, lesson 02's calls, on s positions.
        formulas[Call(run, "forward", "all-reduce", "tp")] = "2·L × B·s·D·e"
        formulas[Call(run, "backward", "all-reduce", "tp")] = "2·L × B·s·D·e"
        formulas[Call(run, "clipping", "all-reduce", "tp")] = "1 × 8"
    report.section("Communication per step")
    report.ledger(formulas, size, steps=report.args.steps)
    letters = "q: bytes of a rank's queries; b: of its keys and values; P: parameters."
    report.say(f"   {letters}")
    T = size["T"]
    crossing = size["N"] / size["K"] + 1
    report.say("   Keys and values are sent with K heads, not N. Forward, the ring")
    report.say(f"   sends less than Ulysses if T < N/K + 1 = {crossing:g}; T = {T}.")


# Bytes per rank and layer; a = B·n·e. a·S·S and a·s·S are weights of the softmax, as in
# lesson 02; s·S alone is the mask, and 2·s·H the rotary tables. The ring saves y and
# lse instead of weights.
SAVED_BY_ATTENTION = {
    "without CP": "a·(3·S·H+S·S)",
    "gather": "a·(s+2·S)·H + s·(a·S+2·H·e+S)",
    "ring": "a·s·(2·H+1) + 2·(B·k+1)·s·H·e",
    "zigzag": "a·s·(2·H+1) + 2·(B·k+1)·s·H·e",
    "Ulysses": "a·(3·S·H+S·S)/T",
}


def show_saved(report: Report, methods: dict, size: dict, cp_group) -> None:
    """Bytes that one attention saves for backward, at three lengths."""
    rows = []
    for name in ["without CP"] + list(methods):
        row = {"attention": name, "formula": SAVED_BY_ATTENTION[name]}
        for S in (size["S"], 2 * size["S"], 4 * size["S"]):
            sizes = dict(size, S=S, s=S // size["T"], a=evaluate("B·n·e", size))
            column = f"S {S}"
            row[column] = bytes_saved(report.args, methods.get(name), sizes, cp_group)
            predicted = evaluate(row["formula"], sizes)
            report.expect(row, column, "memory", f"saved, {name}, {column}", predicted)
        rows.append(row)
    report.section("Bytes that one attention saves for backward on a rank")
    report.table("saved", rows)
    report.say("   a = B·n·e. Only the ring has no S·S or s·S: it saves no weights.")


def bytes_saved(args, method: Method | None, size: dict, cp_group) -> int:
    """Measured in one forward pass; method is None without CP."""
    core, tables, tensors = random_attention(args, size, size["S"])
    # A rank's slice. Which positions it has does not matter for bytes.
    held = size["S"] if method is None else size["s"]
    q, k, v = [x[:, :held].clone().requires_grad_() for x in tensors[:3]]
    saved = SavedBytes([q, k, v] + tables)
    with saved:
        if method is None:
            core(q, k, v, tables)
        else:
            method.attention(q, k, v, tables, core, cp_group, method.layout)
    return saved.total()


# ==== BREAK IT

BREAKS = {
    "stale": dict(
        target="RingFunction.backward",
        old="        if step < T - 1:\n            kv = pass_on(kv, ctx.cp_group)\n",
        new="",
        what="in backward every step uses this rank's own keys and values",
        symptom="the loss of step 1 is right, later ones are off by 1e-4 at "
        "first; gradients of q_proj and k_proj are off by about their own size",
        why="a block of another rank's keys needs these keys in backward, so they have "
        "to travel again. The loss hides it: it is computed forward, and most of the "
        "update is right, because q and k get a small part of all gradients at first",
        reported="github.com/huggingface/diffusers/issues/14265",
        audit="backward of a module",
    ),
    "home": dict(
        target="RingFunction.backward",
        old="            grad_kv[:, :, :, block.keys] += to_kv\n",
        new="            if owner == rank:\n"
        "                grad_kv[:, :, :, block.keys] += to_kv\n",
        what="a rank drops the gradients of keys and values of other ranks",
        symptom="step 1's loss and dL/dq are right; dL/dk and dL/dv are too small, "
        "most of all at early positions",
        why="a key is used by the queries of all later ranks: its gradient is a sum "
        "over ranks",
        reported="github.com/NVIDIA/TransformerEngine/issues/1557 (wrong dQ, dK, dV)",
        audit="backward of a module",
    ),
    "lse": dict(
        target="attend_backward",
        old="    weights_BNcc = (scores_BNcc - lse).exp()\n",
        new="    weights_BNcc = scores_BNcc.softmax(-1)\n",
        what="backward normalizes the weights of each block by that block only",
        symptom="the loss of step 1 is right; gradients are too large: of q on all "
        "ranks that see more than one block, of k and v on all ranks",
        why="the weights of a block sum to 1 then, instead of to its share of Σ exp",
        reported="github.com/meta-pytorch/attention-gym/pull/200 (lse in wrong units)",
        audit="backward of a module",
    ),
    "positions": dict(
        target="split_heads",
        old="    cos_sH = tables[0][here]\n    sin_sH = tables[1][here]\n",
        new="    cos_sH = tables[0][: q.shape[1]]\n"
        "    sin_sH = tables[1][: q.shape[1]]\n",
        what="each rank counts its rotary positions from 0",
        symptom="no error; the loss of step 1 differs slightly: distances between "
        "tokens of different ranks are wrong. Ulysses is right",
        why="the angle of a key depends on its position in the full sequence",
        reported="github.com/NVIDIA/Megatron-LM/issues/560",
        audit="forward right on",
    ),
    "count": dict(
        target="cp_loss",
        old="    targets = all_reduce((target_Bs != IGNORE).sum(), cp_group)\n",
        new="    targets = (target_Bs != IGNORE).sum() * cp_group.size()\n",
        what="each rank divides its loss by its own number of targets",
        symptom="the loss is wrong, and nan if a rank has no target",
        why="the mean of means is another number: ranks with few targets would count "
        "as much as ranks with many",
        reported="github.com/verl-project/verl/pull/6049",
        audit="loss",
    ),
    "sum": dict(
        target="sum_over_cp",
        old="    flat = all_reduce(partial_flat, cp_group)\n",
        new="    flat = partial_flat\n",
        what="gradients are not summed over CP ranks",
        symptom="step 1's loss is right; then replicas of all parameters differ",
        why="each rank has the gradient from its own positions only",
        reported="github.com/EleutherAI/gpt-neox/pull/1299 (adds the sum over cp)",
        audit="gradient sum",
    ),
    "average": dict(
        target="sum_over_cp",
        old="    flat = all_reduce(partial_flat, cp_group)\n",
        new="    flat = all_reduce(partial_flat, cp_group) / cp_group.size()\n",
        what="gradients are averaged over CP ranks, as data parallelism does",
        symptom="all gradients are T times too small; clipping and AdamW hide most of "
        "that in the losses",
        why="cp_loss divided by the number of all targets already: 1/T comes twice",
        reported="github.com/NVIDIA/Megatron-LM/issues/673",
        audit="gradient factor",
    ),
    "shift": dict(
        target="split_positions",
        old="    return tokens_BS[:, here], target_BS[:, here]\n",
        new="    tokens_Bs = tokens_BS[:, here]\n"
        "    target_Bs = tokens_Bs.roll(-1, 1)\n"
        "    return tokens_Bs, target_Bs.masked_fill(target_Bs == PAD, IGNORE)\n",
        what="targets are shifted after the sequence was split",
        symptom="the loss is slightly wrong: each chunk's last target is a wrong token",
        why="the token that follows a chunk is on another rank",
        reported="github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449",
        audit="loss",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    """The flags of the model. ValueError if it cannot be built or split."""
    sizes = {"steps": 3, "layers": 2, "batch_size": 4, "seq_len": 0, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, sections=6, **sizes)
    add = parser.add_argument
    add("--tp", type=positive, default=1, help="TP ranks for each CP rank (1)")
    add("--hidden", type=positive, help="D (8 per head)")
    add("--heads", type=positive, help="N (2·K)")
    add("--kv-heads", type=positive, help="K (4, or the next multiple of the ranks)")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    add(
        "--no-ulysses", action="store_true", help="leave out Ulysses, so K may be small"
    )
    args = parser.parse_args()
    args.dropout = 0.0  # each block would have to draw its part of one mask
    if ranks % args.tp != 0:
        left = f"{ranks} ranks % {args.tp} = {ranks % args.tp}, not 0"
        raise ValueError(f"--tp {args.tp}: {left}; take {math.gcd(ranks, args.tp)}")
    T = ranks // args.tp
    args.kv_heads = args.kv_heads or ranks * math.ceil(4 / ranks)
    args.heads = args.heads or 2 * args.kv_heads
    args.hidden = args.hidden or 8 * args.heads
    args.seq_len = args.seq_len or 2 * T * math.ceil(32 / T)
    must_divide(args, "seq_len", 2 * T, "(2 · CP ranks: zigzag)")
    must_divide(args, "kv_heads", args.tp, "(--tp)")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    raise_refused(args)
    k = args.kv_heads // args.tp
    if k % T != 0 and not args.no_ulysses:
        text = f"Ulysses needs {T} CP ranks to divide {k} heads per TP rank"
        text = f"{text}; take {ranks * math.ceil(k / T)}, or add --no-ulysses"
        raise ValueError(f"--kv-heads {args.kv_heads}: {text}")
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be above 0")
    return args


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
import torch.distributed as dist
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


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Cut x into T parts along dim, send part j to rank j, join what arrives along dim.

    (lesson 00)"""
    # One tensor [T, ...]: row j is for rank j. In the result, row j is from rank j.
    parts = torch.stack(split(x.detach(), dim, group.size()))
    out = parts.clone()
    if group.size() > 1:
        with COMM.record("all-to-all", x, group):
            dist.all_to_all_single(out, parts, group=group)
    return torch.cat(list(out), dim)


def send_recv(
    x: Tensor, dst: int, like: Tensor, src: int, group: dist.ProcessGroup
) -> Tensor:
    """Send x to group rank dst and receive a tensor shaped `like` from group rank src.

    (lesson 00)"""
    x = x.detach().contiguous()
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    with COMM.record("send/recv", x, group):
        operations = [
            dist.P2POp(dist.isend, x, group=group, group_peer=dst),
            dist.P2POp(dist.irecv, out, group=group, group_peer=src),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return out


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


class AllGatherWithGrad(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes saved for backward, each storage once, `skip` left out.

    (lesson 01)"""

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


def local(x: Tensor) -> Tensor:
    """This rank's piece of a DTensor, waited for; any other tensor as it is.

    (lesson 01)"""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def values_of(runs: dict, field: str) -> dict:
    """run → its losses, gradients, … (whatever `field` names) (lesson 01)."""
    return {name: getattr(run, field) for name, run in runs.items()}


def must_divide(args, name: str, parts: int, what: str) -> None:
    """Refuse a flag's value that is no multiple of parts, with the arithmetic.

    (lesson 01)"""
    value = getattr(args, name)
    if value % parts:
        multiple = value + parts - value % parts
        if multiple >= 2**31:  # the largest value of a flag is 2^31 − 1
            multiple -= parts
        reason = f"{value} % {parts} {what} = {value % parts}, not 0"
        refuse(args, name, reason, multiple)


def refuse(args, name: str, reason: str, value: int) -> None:
    """Keep why a flag is wrong, and set a right value, on which others may depend.

    (lesson 01)"""
    flag = f"--{name.replace('_', '-')}"
    refused = vars(args).setdefault("refused", [])
    refused.append((flag, f"{flag} {getattr(args, name)}: {reason}", value))
    setattr(args, name, value)


def raise_refused(args) -> None:
    """ValueError with the first reason, and with all flags that have to change.

    (lesson 01)"""
    refused = vars(args).pop("refused", [])
    if refused:
        take = {flag: value for flag, _, value in refused}
        flags = " ".join(f"{flag} {value}" for flag, value in take.items())
        raise ValueError(f"{refused[0][1]}; take {flags}")


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


def train_transformer(
    name, model, batches, args, tp_group=None, loss_of=mean_loss, after_backward=None,
    norm_of=None,
) -> TrainingRun:  # fmt: skip
    """Train one step on each batch (lesson 02)."""
    losses = {}
    norms = {}
    # AdamW divides by the size of the gradient. A tiny eps would turn the rounding
    # errors of gradients near 0 into full steps, different ones in each run.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)

    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        # One seed for all ranks, so that they sample the same dropout masks.
        torch.manual_seed(args.seed + step)
        optimizer.zero_grad()

        # COMM.label only names the collectives inside, for the communication table.
        with COMM.label(name, "forward"):
            logits = model(tokens_BS)
        with COMM.label(name, "loss"):
            loss = loss_of(logits, target_BS)
        with COMM.label(name, "backward"):
            loss.backward()
        if after_backward is not None:
            with COMM.label(name, "summing"):
                after_backward(model)
        if step == 1:
            gradients = unshard_model(model, "grad")

        with COMM.label(name, "clipping"):
            if tp_group is None:
                norm = norm_by_pytorch(model)
            elif norm_of is None:
                norm = global_norm(model, tp_group)
            else:
                norm = norm_of(model, tp_group)
            clip_gradients(model, args.clip, norm)

        # Each rank updates what it holds, and sends nothing. Replicas stay equal only
        # because they start equal and get equal gradients. Nothing else enforces it.
        with COMM.label(name, "update"):
            optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm

    parameters = unshard_model(model, "data")
    return TrainingRun(model, optimizer, losses, norms, gradients, parameters)


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


def show_training(report: Report, runs: dict[str, TrainingRun]) -> None:
    """Losses, gradient norms before clipping, and the parameters after training.

    (lesson 02)"""
    losses = values_of(runs, "losses")
    norms = values_of(runs, "norms")
    parameters = values_of(runs, "parameters")
    report.section("Losses, norms of gradients before clipping, norm of the parameters")
    report.compare("losses", losses, allowed=report.allowed_loss)
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", norms)
    report.compare("parameters", parameters, fold=lambda name: "all parameters")


def module_of(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.*.mlp.up_proj (lesson 02)."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join(parts[:-1]) or name


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
