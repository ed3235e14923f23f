"""Lesson 03: the vocabulary under tensor parallelism.

Embedding and head are often the largest matrices of a model, [V, D] each, and the
logits [B, S, V] its largest activation. Here each rank holds a range of the vocabulary.
It looks up the tokens in its range, and the loss is computed without gathering logits.

Run it on 1, 2 or 4 ranks (on others the model may be larger; the output says so):

    torchrun --standalone --nproc_per_node=2 03_vocab_parallel.py

What you will see: which rank holds which tokens; the model of lesson 02, trained four
times for a few steps: with plain PyTorch, with the loss written by hand, with a sharded
vocabulary, and with PyTorch's loss_parallel; inputs on which a loss easily goes wrong;
bytes sent and saved, compared with gathered logits; tokens sampled from sharded logits.

Try this (answers: notebooks/03_vocab_parallel.ipynb, section 10):
- In vocab_transformer, delete the line that replaces embed_tokens. All losses, norms
  and gradients stay equal. In the output, which call is missing in section 5 (its row
  fails), and what does a rank hold in section 1?
- In vocab_transformer, pass gather_output=True to ColumnParallelLinear. The loss of
  step 1 is still correct, but the gradients are wrong. Why?
- In VocabParallelCrossEntropy.forward, keep the local sum of exp_BSv, but drop the
  all-reduce around it. Each rank has its own loss then. Do the replicas diverge?

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read VocabParallelEmbedding, vocab_transformer and
simplest_cross_entropy. Values in tables 2 and 3: norms, next to the largest difference.

Tokens: a token is a byte (0 to 255) or PAD (256), which fills the end of short lines.
    So V = 257, a prime: two or more ranks do not divide it, and the last ranks' rows
    end in padding. A position without a next byte has the target IGNORE (−100) and no
    loss.

Shapes: B batch, S sequence, D hidden, V vocabulary, L layers, T ranks in the TP group;
    N heads of size H, K key/value heads, F the width of the MLP, e bytes per element.
    UPPERCASE is the full size, lowercase is this rank's slice: logits_BSv has v = V/T
    columns, rounded up. `partial_` in front: full shape, still to be summed over ranks.

Sources: Megatron-LM, arXiv:1909.08053, sec. 3; docs.pytorch.org, loss_parallel.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, parallel

# ==== NEW in 03: the vocabulary, split
# Read lines 56 to 316, in about 26 minutes. Stop at RUN.

# From lesson 00: shard(x, dim, group) is this rank's slice of a replicated tensor.
# From lesson 01: g (ReduceFromTP) is an all-reduce forward and the identity backward,
# f (CopyToTP, inside ColumnParallelLinear) the reverse. shardings_of(p): its split.
# From lesson 02: tp_transformer copies the model and replaces the linears of its
# layers. Here embedding and head of this copy are replaced as well.


def pad_vocab(full: nn.Module, ranks: int) -> nn.Module:
    """Return a copy of an embedding or a head, padded with rows of zeros.

    Then T divides the number of rows. The new ones stay zero: they belong to no token,
    so they are never looked up, and the loss gives them no gradient.

    Shapes: weight [V, D] → [v·T, D], bias [V] → [v·T], with v = ⌈V/T⌉.
    """
    padded = copy.deepcopy(full)
    for name, p in full.named_parameters():
        missing = -len(p) % ranks  # V = 257, T = 4: 3 rows, so that each rank has 65
        zeros = p.new_zeros(missing, *p.shape[1:])
        setattr(padded, name, nn.Parameter(torch.cat([p.detach(), zeros])))
    return padded


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary: no rank has its row."""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        text = f"tokens {tokens.min()} to {tokens.max()}: the vocabulary is 0 to "
        raise ValueError(text + str(vocab_size - 1))


def find_local_rows(tokens: Tensor, v: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, and whether this rank has that token.

    Rank t has tokens t·v to (t + 1)·v − 1. Tokens of other ranks get row 0: any row is
    valid, because the caller replaces what it reads there by 0.
    """
    row = tokens - rank * v
    is_local = (row >= 0) & (row < v)
    return row.where(is_local, 0), is_local


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group.

    Args:
        full: the single-process embedding, identical on every rank.
        tp_group: the T ranks that share it. Rank t has tokens t·v to (t + 1)·v − 1.
    Shapes: tokens [B, S] int64 → [B, S, D], both Replicate();
        weight [V, D], on a rank [v, D], Shard(0), v = ⌈V/T⌉; T·v − V rows are padding.
    Communication: forward one all-reduce of B·S·D elements (g); backward none.
    Raises: ValueError for a token outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size = full.num_embeddings
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        padded = pad_vocab(full, tp_group.size())
        self.weight = shard_parameter(padded.weight, 0, tp_group)  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        check_tokens(tokens_BS, self.vocab_size)
        v = len(self.weight)
        row_BS, is_local_BS = find_local_rows(tokens_BS, v, self.tp_group.rank())
        x_BSD = F.embedding(row_BS, self.weight)
        # Every token is on one rank, and the other ranks add 0: the sum is its row.
        partial_x_BSD = x_BSD * is_local_BS.unsqueeze(-1)
        return self.reduce(partial_x_BSD, self.tp_group)


def vocab_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """Return lesson 02's parallel model, with embedding and head also sharded.

    Shapes: tokens [B, S] → logits [B, S, v], Shard(2). A rank's columns of the logits
        are its rows of the head (and of the embedding, if they share a weight).
    Communication: the same as tp_transformer, plus one all-reduce of B·S·D elements
        forward (g of the embedding) and one backward (f of the head).
    """
    model = tp_transformer(full, tp_group)
    model.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)
    padded_head = pad_vocab(full.lm_head, tp_group.size())
    model.lm_head = ColumnParallelLinear(padded_head, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        # One parameter with two uses: autograd adds up the gradients of both.
        model.lm_head.weight = model.embed_tokens.weight
    for p in [model.embed_tokens.weight, *model.lm_head.parameters()]:
        p.rows = full.config.vocab_size  # rows of the full weight; the rest is padding
    return model.train(full.training)  # in eval mode if full is


# ---- The loss, without gathering the logits

# −log softmax(x)[target] = log z − (x[target] − m); m = max x, z = Σ exp(x − m). A rank
# has some columns of x, so m, z and x[target] take one all-reduce each.


def simplest_cross_entropy(logits_BSv: Tensor, target_BS: Tensor, tp_group) -> Tensor:
    """The loss of every token if all have a target and no column is padding."""
    max_BS = all_reduce(logits_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
    x_BSv = logits_BSv - max_BS.unsqueeze(-1)  # so that no exp overflows
    sum_BS = all_reduce(x_BSv.exp().sum(-1), tp_group)
    # Only the rank with the target's row of the head has this column; others add 0.
    v = logits_BSv.shape[-1]
    column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
    picked_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
    target_x_BS = all_reduce(picked_BS.where(is_local_BS, 0), tp_group)
    return sum_BS.log() - target_x_BS


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The full loss: with padding, ignored positions, label smoothing, and backward.

    Label smoothing ε replaces onehot(target) by q = (1 − ε)·onehot(target) + ε/V. Then
    the loss is log z − Σ q·(x − m), and its gradient is softmax(x) − q.
    To try another loss, edit forward, backward, and reference_loss (below) as well.
    """

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        padding_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.masked_fill(padding_v, float("-inf"))  # exp(−∞) = 0
        x_BSv = x_BSv.to(torch.promote_types(x_BSv.dtype, torch.float32))
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # IGNORE is in no rank's range, so all ranks add 0 for it.
        column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
        q_x_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        q_x_BS = (1 - smoothing) * q_x_BS.where(is_local_BS, 0)  # of Σ q·(x − m)
        if smoothing:  # every token counts; padding (−∞) is left out
            q_x_BS += smoothing / vocab_size * x_BSv.masked_fill(padding_v, 0).sum(-1)
        loss_BS = sum_BS.log() - all_reduce(q_x_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        counts_BS = target_BS != ignore  # does this position have a target?
        ctx.save_for_backward(softmax_BSv, column_BS, is_local_BS, counts_BS, padding_v)
        ctx.smoothing = smoothing
        ctx.smooth_target = smoothing / vocab_size  # ε/V, for every token
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(counts_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # Nothing is sent: upstream_BS is equal on all ranks, because they all computed
        # the same loss, and softmax − q needs this rank's columns only.
        softmax_BSv, column_BS, is_local_BS, counts_BS, padding_v = ctx.saved_tensors
        grad_BSv = (softmax_BSv - ctx.smooth_target).masked_fill(padding_v, 0)
        extra_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)  # at the target
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -extra_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored position is 0, but its softmax − q is not.
        grad_BSv = grad_BSv.where(counts_BS.unsqueeze(-1), 0)
        return grad_BSv.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor,
    target_BS: Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of every token, from logits that are sharded over the TP group.

    Args:
        logits_BSv: this rank's columns, padding included.
        target_BS: the next tokens, the same on every rank.
        vocab_size: V, the number of tokens; columns from V on are padding.
        ignore_index: a position with this target has loss 0 and gradient 0.
        label_smoothing: ε, as in F.cross_entropy.
    Shapes: logits [B, S, v] Shard(2), target [B, S] → loss [B, S] Replicate(), in
        float32 or wider. Any number of leading dims is valid.
    Communication: forward three all-reduces of B·S values; backward none.
    Raises: ValueError for a target outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def mean_over_targets(loss_BS: Tensor, target_BS: Tensor) -> Tensor:
    """Return the mean over positions with a target; nan if none has, as in PyTorch."""
    return loss_BS.sum() / (target_BS != IGNORE).sum()


def sharded_loss(logits_BSv, target_BS, tp_group, vocab_size, smoothing=0.0) -> Tensor:
    """Return the mean loss, from sharded logits.

    beyond/18_in_pieces.py computes head and loss piece by piece, with less memory.
    """
    loss_BS = vocab_parallel_cross_entropy(
        logits_BSv, target_BS, tp_group, vocab_size, label_smoothing=smoothing
    )
    return mean_over_targets(loss_BS, target_BS)


def reference_loss(logits_BSV: Tensor, target_BS: Tensor, smoothing=0.0) -> Tensor:
    """The mean loss in one process. An edit of the sharded loss belongs here, too."""
    logits = logits_BSV.flatten(0, 1)
    return F.cross_entropy(logits, target_BS.flatten(), label_smoothing=smoothing)


# ---- The same with PyTorch's API


def vocab_plan() -> dict:
    """Return lesson 02's plan, with a sharded embedding and sharded logits."""
    plan = tp_plan()
    # RowwiseParallel shards an embedding [V, D] along dim 0, a linear's weight along 1.
    # DTensor needs no padding: it allows shards of different sizes.
    plan["embed_tokens"] = parallel.RowwiseParallel(input_layouts=Replicate())
    # The logits stay a DTensor, so that loss_parallel sees that they are sharded.
    plan["lm_head"] = parallel.ColwiseParallel(
        output_layouts=Shard(-1), use_local_output=False
    )
    return plan


def dtensor_vocab_transformer(full: Transformer, tp_group) -> Transformer:
    """Return PyTorch's model for vocab_plan, with a tied weight tied again."""
    model = dtensor_transformer(full, vocab_plan(), tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        # The plan sharded the weight twice, once per module.
        model.lm_head.weight = model.embed_tokens.weight
    return model


# ---- A token sampled from sharded logits


def sample_sharded(logits_v: Tensor, noise_V: Tensor, tp_group, vocab_size: int) -> int:
    """Sample a token from sharded logits by sending two numbers instead of V.

    The Gumbel-max trick: argmax(logits + noise) is a sample from softmax(logits), if
    noise = −log(−log u) and u is uniform in (0, 1).
    So a rank passes in its best column only. All ranks generate the full noise from one
    seed, so the sample is that of a single process.

    Communication: two all-reduces of one value each: the best score, and its token.
    """
    v = len(logits_v)
    padding = v * tp_group.size() - vocab_size
    noise_V = F.pad(noise_V, (0, padding), value=float("-inf"))  # is never sampled
    scores_v = logits_v.float() + shard(noise_V, 0, tp_group)
    local_best = scores_v.max()
    local_token = scores_v.argmax() + tp_group.rank() * v
    best = all_reduce(local_best, tp_group, dist.ReduceOp.MAX)
    # A rank without the best score passes V: every token is less, so MIN ignores it.
    token = local_token.where(local_best == best, vocab_size)
    return int(all_reduce(token, tp_group, dist.ReduceOp.MIN))  # if equal, the first


# ==== RUN


def main(args, report: Report) -> None:
    """Train the same model four times, then look at the loss on its own."""
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    # In groups of one rank: "loss by hand" tests the formula without communication.
    single_group = mesh_groups({"all": args.ranks, "one": 1}, args.timeout)["one"]
    size = sizes_of(args)
    size["v"] = math.ceil(args.vocab_size / args.ranks)
    report.begin({"tp": args.ranks}, size, note=why_these_sizes(args.ranks))
    full = make_tied(args)
    batches = make_batches(__doc__, args, args.steps)
    options = dict(vocab_size=args.vocab_size, smoothing=args.smoothing)
    by_hand = partial(sharded_loss, tp_group=single_group, **options)
    with_tp = partial(sharded_loss, tp_group=tp_group, **options)
    reference = partial(reference_loss, smoothing=args.smoothing)

    runs = {}
    train = partial(train_transformer, batches=batches, args=args)
    runs["without TP"] = train("without TP", copy.deepcopy(full), loss_of=reference)
    check_reference(report, runs["without TP"], batches[0], size)
    check_loss(report)
    report.section("Who holds what: each rank has v rows of the vocabulary")
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.column("loss by hand"):
        model = copy.deepcopy(full)
        runs["loss by hand"] = train("loss by hand", model, loss_of=by_hand)
    with report.column("with TP"):
        model = vocab_transformer(full, tp_group)
        show_placements_vocab(report, full, model)
        show_token_ranges(report, batches[0], size)
        runs["with TP"] = train("with TP", model, loss_of=with_tp, tp_group=tp_group)
        padding = trim_padding(runs["with TP"])
    if not args.smoothing:  # loss_parallel has none, if positions are ignored
        with report.column("DTensor", "plans"), CountDTensor("tp"):
            model = dtensor_vocab_transformer(full, tp_group)
            run = train_with_loss_parallel("DTensor", model, batches, args, reference)
            runs["DTensor"] = run

    show_training(report, runs)
    if "with TP" in runs:
        show_replicas(report, runs["with TP"], tp_group)
        show_padding(report, padding)
    report.section("Gradients of step 1 (value: norm; diff: largest of any element)")
    report.compare("gradients", values_of(runs, "gradients"), fold=fold_layers)
    with report.column("hard cases"):
        show_hard_cases(report, tp_group)
    show_communication_vocab(report, runs, size)
    with report.column("loss alone"):
        show_loss_alone(report, size, tp_group)
    if "with TP" in runs:
        show_sampling(report, runs, batches[0], tp_group)


def make_tied(args) -> Transformer:
    """Return lesson 02's model; with --tie, head and embedding share one weight."""
    full = make_transformer(args)
    if args.tie:
        # An embedding starts with a standard deviation of 1, which is too large for a
        # head: its logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


def trim_padding(run: TrainingRun) -> dict[str, Tensor]:
    """Remove padded rows from a run's gradients and parameters, and return them.

    vocab_transformer has set p.rows, the number of rows to keep.
    """
    padding = {}
    for name, p in run.model.named_parameters():
        if hasattr(p, "rows"):
            padding[f"gradients of {name}"] = run.gradients[name][p.rows :]
            run.gradients[name] = run.gradients[name][: p.rows]
            padding[f"parameters of {name}"] = run.parameters[name][p.rows :]
            run.parameters[name] = run.parameters[name][: p.rows]
    return padding


def train_with_loss_parallel(name, model, batches, args, loss_of) -> TrainingRun:
    """Train a model whose logits are a sharded DTensor.

    Within loss_parallel, F.cross_entropy of such logits makes the same three
    all-reduces. Backward must run within it as well, so all of training does here.
    """
    with parallel.loss_parallel():
        return train_transformer(name, model, batches, args, loss_of=loss_of)


# ---- The sections of the output, in order


def show_placements_vocab(report: Report, full: Transformer, tp_model) -> None:
    """Print the shapes of embedding and head, and how they are sharded."""
    rows = []
    for row in placement_rows(full, tp_model):
        name = row["parameter"]
        if name == f"{fold_layers(name)}.weight":  # a bias is split as its weight
            rows.append(row)
    report.table("holdings", rows)


def show_token_ranges(report: Report, batch: tuple, size: dict[str, int]) -> None:
    """Print each rank's tokens, and how often they occur in the first batch."""
    tokens_BS, target_BS = batch
    v = size["v"]
    ignored = (target_BS == IGNORE).sum().item()
    rows = []
    for rank in range(size["T"]):
        held = range(size["V"])[rank * v : rank * v + v]  # empty if V is too small
        row = {"held by": f"rank {rank}"}
        row["tokens"] = f"{held[0]} to {held[-1]}" if held else "none"
        row["inputs"] = find_local_rows(tokens_BS, v, rank)[1].sum().item()
        row["targets"] = find_local_rows(target_BS, v, rank)[1].sum().item()
        row["padding"] = v - len(held)
        rows.append(row)
    # Every position has one input token, and one target or none.
    positions = size["B"] * size["S"]
    for name, nowhere in (("inputs", 0), ("targets", ignored)):
        found = {name: nowhere + sum(row[name] for row in rows)}
        report.expect(found, name, "positions", name, positions)
    report.table("tokens", rows)
    report.conclude(
        f"T·v = {size['T'] * v} rows: {size['V']} and {size['T'] * v - size['V']} of "
        f"padding. No rank holds IGNORE, {ignored} of the {positions} targets."
    )


def show_padding(report: Report, padding: dict[str, Tensor]) -> None:
    """Check that padded rows got no gradient in step 1 and stayed zero to the end."""
    row = {"with TP": "rows of padding", "tensors": len(padding), "zero": 0}
    for name, x in padding.items():
        kind, _, parameter = name.partition(" of ")
        diff = math.inf if x.any() else 0.0
        if report.check(kind, f"{parameter}, rows of padding", diff):
            row["zero"] += 1
    row["off"] = [] if row["zero"] == row["tensors"] else ["zero"]
    brief = f"padded rows of {len(padding)} gradients and parameters"
    report.table("padding", [row], brief=brief)
    report.agree("zero")


# ---- Hard cases


# Random logits and targets, and the line of the loss that they test.
HARD_CASES = {
    "logits × 10,000": dict(scale=10000.0),  # exp stays finite
    "label smoothing 0.1": dict(smoothing=0.1),  # Σ q·(x − m)
    "20% have no target": dict(ignored=0.2),  # the mean over targets
    "none has a target": dict(ignored=1.0),  # 0 / 0 is nan
    "V = 1": dict(V=1),  # ranks with padding only
    "V = 50,257, as GPT-2": dict(V=50257),  # padding, long sums
}


def show_hard_cases(report: Report, tp_group) -> None:
    """Compare the loss and its gradient with F.cross_entropy where it is hard."""
    report.section("Where a loss easily goes wrong")
    rows = [try_case(report, name, tp_group, **HARD_CASES[name]) for name in HARD_CASES]
    report.table("hard cases", rows, brief=f"{len(rows)} hard cases")
    report.agree("as without TP")
    check_slope(report, tp_group)  # backward against forward; and the simplest form


def try_case(
    report: Report, name: str, tp_group, V=257, scale=1.0, ignored=0.0, smoothing=0.0
) -> dict:
    """Return the row of a case. ignored: the share of positions without a target."""
    generator = torch.Generator().manual_seed(report.args.seed)
    x_BSV = torch.randn(3, 5, V, generator=generator) * scale
    x_BSV = x_BSV.to(report.args.device, getattr(torch, report.args.dtype))
    x_BSV.requires_grad_()
    target_BS = torch.randint(V, (3, 5), generator=generator)
    target_BS.view(-1)[: round(ignored * 15)] = IGNORE
    target_BS = target_BS.to(report.args.device)
    # In float64: in float32 the log z + m of an edited loss is off by 0.004 at 35,000.
    expected = reference_loss(x_BSV.double(), target_BS, smoothing)
    expected.backward()

    # Columns of padding may hold anything; here a large logit, which must not matter.
    padding = (0, -V % tp_group.size())
    x_BSv = shard(F.pad(x_BSV, padding, value=9.0), 2, tp_group).requires_grad_()
    loss = sharded_loss(x_BSv, target_BS, tp_group, V, smoothing)
    loss.backward()
    gradient = all_gather(x_BSv.grad, 2, tp_group)

    # nan (no position has a target) has to be nan in both.
    clean = lambda x: x.nan_to_num(nan=math.inf, posinf=math.inf)
    loss_diff = rel_diff(clean(loss), clean(expected))
    gradient_diff = rel_diff(clean(gradient), clean(F.pad(x_BSV.grad, padding)))
    row = {"case": name, "without TP": expected.item(), "with TP": loss.item()}
    row.update(diff=max(loss_diff, gradient_diff), off=[])
    # Kinds of their own: the verdict names the trained run's gradients first.
    if not report.check("hard losses", name, loss_diff, report.allowed_loss):
        row["off"].append("with TP")
    if not report.check("hard gradients", name, gradient_diff, report.allowed):
        row["off"].append("diff")
    return row


# ---- Communication and memory


def show_communication_vocab(report: Report, runs, size: dict[str, int]) -> None:
    """Compare the collectives per step, by hand and by PyTorch, with formulas."""
    tensors = "16·L + 4" if report.args.tie else "16·L + 5"  # parameters of the model
    # Lesson 02's 2·L, plus g of the embedding forward and f of the head backward.
    activations = [Calls("(2·L + 1)", "B·S·D·e")]
    # In PyTorch's plan each of q, k and v has its own f; by hand they share one.
    backward = [Calls("(4·L + 1)", "B·S·D·e")]
    norm = [Calls("1", norm_bytes(f"({tensors})"))]
    formulas = {
        Call("with TP", "forward", "all-reduce", "tp"): activations,
        Call("with TP", "loss", "all-reduce", "tp"): [Calls("3", "B·S·e")],
        Call("with TP", "backward", "all-reduce", "tp"): activations,
        Call("with TP", "clipping", "all-reduce", "tp"): [Calls("1", "8")],  # a float64
        Call("DTensor", "forward", "all-reduce", "tp"): activations,
        Call("DTensor", "loss", "all-reduce", "tp"): [Calls("3", "B·S·e")],
        Call("DTensor", "backward", "all-reduce", "tp"): backward,
        Call("DTensor", "clipping", "all-reduce", "tp"): norm,
    }
    report.section("Communication per step; ring = bytes that one rank of a ring sends")
    formulas = {call: formulas[call] for call in formulas if call.run in runs}
    report.ledger(formulas, size, report.args.steps, brief=["DTensor", "clipping"])
    sent = COMM.bytes[Call("with TP", "loss", "all-reduce", "tp")] // report.args.steps
    if sent:
        report.conclude(
            f"The loss all-reduces 3 values per token, {sent:,} bytes; all logits have "
            f"{evaluate('B·S·V·e', size):,}."
        )


def gathered_loss(logits_BSv: Tensor, target_BS: Tensor, tp_group, vocab_size: int):
    """For comparison: gather all columns on every rank, then use F.cross_entropy."""
    logits_BSV = GatherFromTP.apply(logits_BSv, 2, tp_group)[..., :vocab_size]
    return reference_loss(logits_BSV, target_BS)


def show_loss_alone(report: Report, size: dict[str, int], tp_group) -> None:
    """Measure what one loss sends and saves for backward, for two vocabularies."""
    report.section("The loss alone, from gathered and from sharded logits")
    sizes = {}
    measured = {}
    formulas = {}
    for V in (257, 50257):  # bytes and PAD; GPT-2's vocabulary
        run = f"V {V}"
        v = math.ceil(V / size["T"])
        sizes[run] = dict(size, V=V, v=v)
        measured[run] = measure_losses(report.args, run, sizes[run], tp_group)
        gathered_call = Call(f"gathered, {run}", "loss", "all-gather", "tp")
        sharded_call = Call(f"sharded, {run}", "loss", "all-reduce", "tp")
        formulas[gathered_call] = [Calls("1", f"B·S·{v}·T·e")]  # v columns of each rank
        formulas[sharded_call] = [Calls("3", "B·S·e")]
    report.ledger(formulas, size, brief=["loss"])

    # What autograd saves for backward, in bytes per rank.
    saved = {
        # log-softmax; the number of targets, a float
        "gathered: saved": "B·S·V·e + e",
        # softmax; target columns and count, int64; three masks, one byte each
        "sharded: saved": "B·S·(v·e + 10) + v + 8",
    }
    rows = []
    for what, formula in saved.items():
        sums = {run: evaluate(formula, sizes[run]) for run in sizes}
        rows.append(measured_row(report, what, formula, sums, measured))
    report.say(
        "   v·e: softmax; 10: the target's column, two masks; v: a mask; 8: how many "
        "targets"
    )
    report.table("memory", rows)
    if size["T"] > 1:
        gathered = COMM.bytes[gathered_call]
        report.conclude(
            f"For V = {V:,} a gathered loss sends {gathered:,} bytes, a sharded one "
            f"{COMM.bytes[sharded_call]:,}."
        )


def show_sampling(report: Report, runs: dict, batch: tuple, tp_group) -> None:
    """Sample the next token at each of the first positions of a line."""
    report.section("Tokens sampled; sent for each: a score and its token, not V logits")
    args = report.args
    generator = torch.Generator().manual_seed(args.seed)  # the same on every rank
    tokens_BS = batch[0][:1, :5]
    with torch.no_grad():
        logits_SV = runs["without TP"].model.eval()(tokens_BS)[0]
        logits_Sv = runs["with TP"].model.eval()(tokens_BS)[0]
    row = {"sampled": "tokens", "without TP": [], "with TP": []}
    for logits_V, logits_v in zip(logits_SV, logits_Sv):
        uniform_V = torch.rand(args.vocab_size, generator=generator)
        noise_V = (-(-uniform_V.log()).log()).to(args.device)  # Gumbel
        row["without TP"].append(int((logits_V + noise_V).argmax()))
        with COMM.label("sampling", ""):
            token = sample_sharded(logits_v, noise_V, tp_group, args.vocab_size)
        row["with TP"].append(token)
    row["bytes"] = COMM.bytes[Call("sampling", "", "all-reduce", "tp")]
    # Per token the best score (float32) and its token (int64); with T = 1 nothing.
    predicted = len(row["with TP"]) * (4 + 8) if args.ranks > 1 else 0
    report.expect(row, "bytes", "bytes", "sampling", predicted)
    if not report.check_tensor("sampling", "tokens", row["with TP"], row["without TP"]):
        row["off"].append("with TP")
    report.table("sampling", [row])


# ==== BREAK IT

# Bugs that people have shipped. --break NAME injects one.
BREAKS = {
    "ignored": dict(
        target="VocabParallelCrossEntropy.backward",
        old="    grad_BSv = grad_BSv.where(counts_BS.unsqueeze(-1), 0)\n",
        new="",
        what="the gradient rows of ignored positions are not set to zero",
        symptom="the loss of step 1 is correct, because an ignored position has loss "
        "0; its gradient is not 0, so the losses diverge from step 2 on",
        why="dloss/dx = softmax − onehot is not zero where the loss was masked to zero",
        reported="docs.pytorch.org, torch.nn.functional.cross_entropy, ignore_index",
        audit="loss backward",
    ),
    "mean": dict(
        target="mean_over_targets",
        old="    return loss_BS.sum() / (target_BS != IGNORE).sum()\n",
        new="    return loss_BS.mean()\n",
        what="the mean is taken over all positions, also those without a target",
        symptom="loss and gradients are too small by the share of ignored positions; "
        "clipping to a norm hides this in the parameters, and AdamW most of it",
        why="an ignored position adds 0 to the sum but must not add 1 to the count",
        reported="docs.pytorch.org, torch.nn.functional.cross_entropy, reduction",
        audit="loss",
    ),
    "gathered": dict(
        target="vocab_parallel_cross_entropy",
        old="    check_tokens(target_BS[target_BS != ignore_index], vocab_size)\n",
        new="    check_tokens(target_BS[target_BS != ignore_index], vocab_size)\n"
        "    last = logits_BSv.dim() - 1\n"
        "    logits_BSv = GatherFromTP.apply(logits_BSv, last, tp_group)\n"
        "    vocab_size = logits_BSv.shape[-1] * tp_group.size()\n",
        what="gathered logits are passed to the loss that requires sharded ones",
        symptom="the loss is too large by log T at least, whatever the model does; "
        "columns of padding add a little to it, and get gradients",
        why="every rank passes in all of Σ exp, so the sum over ranks is T times too "
        "large; V is read off the shape, so no column is treated as padding",
        reported="github.com/NVIDIA/Megatron-LM/issues/7452",
        audit="loss",
    ),
    "padding": dict(
        target="VocabParallelCrossEntropy.forward",
        old="    padding_v = token_v >= vocab_size  # columns that are no token",
        new="    padding_v = torch.zeros_like(token_v, dtype=torch.bool)",
        what="columns of padding take part in the softmax",
        symptom="the loss is slightly too large (less with a larger vocabulary), and "
        "rows of padding get gradients",
        why="a column of padding has the logit 0, not −∞: each sum has an extra term",
        reported="github.com/mirage-project/mirage/issues/751, vllm-project/vllm 1399",
        audit="loss",
    ),
    "max": dict(
        target="VocabParallelCrossEntropy.forward",
        old="    max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)",
        new="    max_BS = torch.zeros_like(x_BSv[..., 0])",
        what="the largest logit is not subtracted",
        symptom="losses are correct while logits are small; large logits give inf or "
        "nan, and the loss makes two all-reduces instead of three",
        why="exp(x) overflows float32 above x = 88; exp(x − max) is at most 1",
        reported="Megatron-LM, arXiv:1909.08053, sec. 3: the first of its all-reduces",
    ),
    "exponentials": dict(
        target="VocabParallelCrossEntropy.forward",
        old="    softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)\n",
        new="    softmax_BSv = exp_BSv\n",
        what="the exponentials are saved for backward instead of the softmax",
        symptom="the loss of step 1 is correct, but the gradients are too large by a "
        "factor of about Σ exp, which grows with the vocabulary",
        why="the gradient is softmax − onehot, and exp is Σ exp times the softmax",
        reported="github.com/xrsrke/pipegoose",
        audit="loss backward",
    ),
    "tie": dict(
        target="vocab_transformer",
        old="        model.lm_head.weight = model.embed_tokens.weight\n",
        new="        model.lm_head.weight.data = model.embed_tokens.weight.data\n",
        what="tied weights are two parameters with one storage (--tie is set as well)",
        symptom="the loss of step 1 is correct; the embedding's gradient lacks the "
        "contribution of the head, and there is one parameter too many",
        why="one parameter with two uses gets the sum of both gradients; two "
        "parameters with one storage get one gradient and one update each",
        reported="github.com/pytorch/torchtitan/issues/1524; NVIDIA/Megatron-LM, 844",
        audit="gradient tied",
    ),
    "loss-parallel": dict(
        target="train_with_loss_parallel",
        old="    with parallel.loss_parallel():\n"
        "        return train_transformer(name, model, batches, args, loss_of=loss_of)",
        new="    def loss_within(logits, target_BS):\n"
        "        with parallel.loss_parallel():\n"
        "            return loss_of(logits, target_BS)\n"
        "\n"
        "    return train_transformer(name, model, batches, args, loss_of=loss_within)",
        what="with PyTorch's loss_parallel, backward is called outside the context",
        symptom="backward raises an error from deep inside PyTorch",
        why="the context replaces the kernels of log-softmax and of the loss by ones "
        "for sharded logits, also in backward; outside it the ordinary ones run",
        reported="github.com/pytorch/pytorch/issues/190746",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    sizes = {"steps": 3, "layers": 2, "batch_size": 4, "seq_len": 32, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, sections=7, **sizes)
    text = "embedding and head share one weight"
    parser.add_argument("--tie", action="store_true", help=text)
    text = "ε of label smoothing, 0 to 1 (0); DTensor's column is left out"
    parser.add_argument("--smoothing", type=float, default=0.0, metavar="ε", help=text)
    args = parse_sizes(parser, ranks)
    args.tie = args.tie or args.bug == "tie"
    if not 0 <= args.smoothing <= 1:
        raise ValueError(f"--smoothing {args.smoothing}: must be from 0 to 1; take 0.1")
    return args


# ---- Rows of tables


def fold_layers(name: str) -> str:
    """The row of a parameter: embedding and head have their own, all others one."""
    is_new = name.startswith(("embed_tokens", "lm_head"))
    return name.partition(".")[0] if is_new else "all other modules"


# ---- How bytes are measured


def measure_losses(args, name: str, size: dict[str, int], tp_group) -> dict[str, int]:
    """Return the bytes that each loss saves; count its calls under its own label."""
    dtype = getattr(torch, args.dtype)
    shape = (size["B"], size["S"])
    target_BS = torch.zeros(shape, dtype=torch.int64, device=args.device)
    saved_bytes = {}
    for logits, loss_of in {"gathered": gathered_loss, "sharded": sharded_loss}.items():
        x_BSv = torch.zeros(*shape, size["v"], dtype=dtype, device=args.device)
        x_BSv.requires_grad_()
        saved = SavedBytes([x_BSv, target_BS])  # the logits and targets do not count
        with COMM.label(f"{logits}, {name}", "loss"):
            with saved:
                loss = loss_of(x_BSv, target_BS, tp_group, size["V"])
            loss.backward()
        saved_bytes[f"{logits}: saved"] = saved.total()
    return saved_bytes


# ---- Is the loss the lesson's, and does its backward fit its forward?


def check_loss(report: Report) -> None:
    """Find out whether the loss without TP is the lesson's, or has been edited."""
    x_BSV = torch.arange(4.0 * 8 * 257).sin().view(4, 8, 257)
    target_BS = torch.arange(4 * 8).view(4, 8)
    got = reference_loss(x_BSV, target_BS)
    lesson = F.cross_entropy(x_BSV.mT, target_BS)
    if not report.check_tensor("loss", "without TP", got, lesson, report.allowed_loss):
        report.is_edited = True


def check_slope(report: Report, tp_group) -> None:
    """Is the gradient that of this loss? It is not if only forward was edited.

    Along a direction d a loss changes by (loss(x + h·d) − loss(x − h·d))/2h, and its
    gradient says Σ gradient·d. Here for 15 tokens, each with a random d, in float64.
    Then the loss's simplest form, of NEW, is compared with PyTorch's.
    """
    V = 4 * tp_group.size()  # no padding, so that the simplest form can be compared
    generator = torch.Generator().manual_seed(report.args.seed)
    x_and_d = torch.randn(2, 3, 5, V, generator=generator, dtype=torch.float64)
    x_and_d = x_and_d.to(report.args.device)
    x_BSv, d_BSv = shard(x_and_d, 3, tp_group)
    x_BSv.requires_grad_()
    target_BS = torch.randint(V, (3, 5), generator=generator).to(report.args.device)
    others = target_BS, tp_group, V, IGNORE, report.args.smoothing
    loss_of = lambda x: vocab_parallel_cross_entropy(x, *others)
    (grad_BSv,) = torch.autograd.grad(loss_of(x_BSv).sum(), x_BSv)
    slope_BS = all_reduce((grad_BSv * d_BSv).sum(-1), tp_group)
    h = 1e-5  # the difference is off by about h², and by 1e-16/h
    change_BS = loss_of(x_BSv + h * d_BSv) - loss_of(x_BSv - h * d_BSv)
    diff = rel_diff(slope_BS, change_BS / (2 * h))
    text = f"the gradient differs from a finite difference by {diff:.1e}."
    if not report.check("gradients", "backward as the slope of forward", diff, 1e-6):
        text += " ✗"
    report.say(f"   In 15 directions {text}")
    simplest_BS = simplest_cross_entropy(x_BSv, target_BS, tp_group)
    expected_BS = F.cross_entropy(x_and_d[0].mT, target_BS, reduction="none")
    report.check_tensor("hard losses", "simplest form", simplest_BS, expected_BS, 1e-12)


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
import argparse
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


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


def shard_parameter(full: Tensor | None, dim: int | None = None, group=None):
    """This rank's slice of a parameter, which remembers how it was sharded.

    (lesson 01)"""
    if full is None:
        return None
    if dim is not None:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.shardings = () if dim is None else ((dim, group),)  # RUN asks: is it a slice?
    return p


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated.

    (lesson 01)"""
    return getattr(p, "shardings", ())


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
        self.weight = shard_parameter(full.weight, 0, tp_group)  # [f, D]
        self.bias = shard_parameter(full.bias, 0, tp_group)  # [f]

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
    """Megatron's MLP: columns, then rows (lesson 01)."""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first.

    (lesson 01)"""
    for dim, group in reversed(shardings):  # one at most in this lesson
        x = all_gather(x, dim, group)
    return x


def placement_rows(full: nn.Module, tp: nn.Module) -> list[dict]:
    """A row for each parameter: its shape, this rank's slice, how it was sharded.

    (lesson 01)"""
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


def replicas_row(report: Report, axis: str, tensors: dict, group) -> dict:
    """Compare tensors with those of the group's first rank: the same on all ranks.

    (lesson 01)"""
    row = {"identical over": axis, "tensors": len(tensors), "equal": 0, "off": []}
    for name, x in tensors.items():
        replicas = all_gather(x[None], 0, group)
        diff = max(rel_diff(replica, replicas[0]) for replica in replicas)
        if report.check("replicas", name, diff):
            row["equal"] += 1
    if row["equal"] < row["tensors"]:
        row["off"].append("equal")
    return row


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


class CountDTensor(TorchDispatchMode):
    """Within `with`: DTensor's collectives are counted as well (lesson 01)."""

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
    """This rank's slice of a DTensor, waited for; any other tensor as it is.

    (lesson 01)"""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank (lesson 01)."""
    return sum(local(x).nbytes for x in tensors if x is not None)


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


def tp_plan() -> dict:
    """PyTorch's plan: which linear is split by columns and which by rows.

    (lesson 02)"""
    column = parallel.ColwiseParallel()
    row = parallel.RowwiseParallel()
    return {
        "layers.*.self_attn.q_proj": column,
        "layers.*.self_attn.k_proj": column,
        "layers.*.self_attn.v_proj": column,
        "layers.*.self_attn.o_proj": row,
        "layers.*.mlp.up_proj": column,
        "layers.*.mlp.down_proj": row,
    }


def dtensor_transformer(full: Transformer, plan: dict, tp_group) -> Transformer:
    """The model that PyTorch makes of a plan: its sharded parameters are DTensors.

    (lesson 02)"""
    device = next(full.parameters()).device.type
    mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    model = parallel.parallelize_module(copy.deepcopy(full), mesh, plan)
    # A plan covers linears, not dropout: heads on different ranks need different masks.
    for layer in model.layers:
        p = layer.self_attn.core.dropout.p
        layer.self_attn.core.dropout = ShardedDropout(p, 1, tp_group)
    return model.train(full.training)


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
        tokens_BS = rows[:, :-1].clone()
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
    """The reference: cross entropy, a mean over tokens. Edit it for another loss.

    (lesson 02)"""
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
    norm_of = norm_of or global_norm  # of (model, tp_group)
    # AdamW divides by a gradient's size: a tiny eps turns rounding errors into steps,
    # which only --dtype float64 keeps small.
    # foreach, the default on GPUs, cannot update DTensors and plain tensors together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, foreach=False)

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
    report.section("Losses; and after training, norms, parameters and replicas")
    losses = values_of(runs, "losses")
    report.compare("losses", losses, allowed=report.allowed_loss)
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", values_of(runs, "norms"), brief="norms before clipping")
    parameters = values_of(runs, "parameters")
    whole = lambda name: "all parameters"
    report.compare("parameters", parameters, fold=whole, brief="parameters")
    report.agree("as without TP")


def show_replicas(report: Report, run: TrainingRun, tp_group) -> None:
    """After training, replicated tensors must be bitwise identical on all ranks.

    (lesson 02)"""
    if tp_group.size() == 1:
        return
    tensors = {}
    for name, p in run.model.named_parameters():
        if not shardings_of(p):
            tensors[name] = p
    # Each rank computed its losses and norms itself, from replicas and sums.
    for kind in ("losses", "norms"):
        numbers = list(getattr(run, kind).values())
        tensors[kind] = p.new_tensor(numbers, dtype=torch.float64)
    row = replicas_row(report, "tp", tensors, tp_group)
    report.table("replicas", [row], brief=f"{len(tensors)} replicas, losses and norms")
    report.agree("bitwise identical on all ranks")


PARAMETERS = {
    "embed_tokens, lm_head": "(2·D + 1)·V·e",
    "LayerNorms": "(2·L + 1)·2·D·e",
    "biases of o_proj, down_proj": "2·L·D·e",
    "q_proj, k_proj, v_proj": "L·(N + 2·K)·H·(D + 1)·e/T",  # q has N heads, k, v K each
    "weights of o_proj, down_proj": "L·(D + F)·D·e/T",
    "up_proj": "L·F·(D + 1)·e/T",
}


def saved_terms(dropout: float) -> dict[str, str]:
    """Bytes that the model, without the loss, saves for backward on a rank.

    (lesson 02)"""
    saved = {
        "tokens (int64)": "8·B·S",
        "inputs of LayerNorms": "(2·L + 1)·B·S·D·e",
        "mean and 1/σ of LayerNorms": "(2·L + 1)·2·B·S·e",
        "outputs of LayerNorms": "(2·L + 1)·B·S·D·e",
        "q, k, v in CoreAttention (N heads)": "3·L·B·S·D·e/T",
        "softmax output": "L·B·N·S·S·e/T",
        "input of o_proj": "L·B·S·D·e/T",
        "inputs of GELU and down_proj": "2·L·B·S·F·e/T",
    }
    if dropout > 0:
        saved["dropout masks of outputs (1 byte)"] = "2·L·B·S·D"
        saved["dropout mask of softmax (1 byte)"] = "L·B·N·S·S/T"
        saved["softmax output after dropout"] = "L·B·N·S·S·e/T"
    return saved


def raise_wrong_sizes(args) -> None:
    """Refuse sizes that no transformer of the course can have (lesson 02)."""
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not 0 <= getattr(args, "dropout", 0) <= 0.9:  # 1/(1 − p) scales rounding errors
        raise ValueError(f"--dropout {args.dropout}: must be at least 0, at most 0.9")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be greater than 0")


def why_these_sizes(ranks: int) -> str:
    """Say it if the default sizes, in parse_sizes, are not those of 1, 2 or 4 ranks.

    (lesson 02)"""
    if 4 % ranks == 0:
        return ""
    return f"K, N and D have larger defaults: {ranks} ranks must divide K."


def parse_sizes(parser: argparse.ArgumentParser, ranks: int) -> argparse.Namespace:
    """Parse the command line, with the flags of the model (lesson 02)."""
    kv_heads = ranks * math.ceil(4 / ranks)
    sizes = {"hidden": 16 * kv_heads, "heads": 2 * kv_heads, "kv_heads": kv_heads}
    letters = {"hidden": "D", "heads": "N", "kv_heads": "K"}
    add = parser.add_argument
    for name, default in sizes.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{letters[name]} (default {default} on {ranks} ranks)"
        add(flag, type=positive, default=default, help=text)
    add("--dropout", type=float, default=0.1, help="probability (default 0.1)")
    add("--clip", type=float, default=1.0, help="maximum gradient norm (default 1)")
    args = parser.parse_args()
    if args.kv_heads < ranks:
        reason = f"fewer than {ranks} ranks (possible in beyond/09_shared_heads.py)"
        refuse(args, "kv_heads", reason, ranks)
    must_divide(args, "kv_heads", ranks, "ranks")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    raise_refused(args)
    raise_wrong_sizes(args)
    return args


def sizes_of(args) -> dict[str, int]:
    """The letters of the shape legend, and e: bytes per element (lesson 02)."""
    e = getattr(torch, args.dtype).itemsize
    return dict(
        B=args.batch_size, S=args.seq_len, D=args.hidden, N=args.heads,
        K=args.kv_heads, H=args.hidden // args.heads, F=4 * args.hidden,
        V=args.vocab_size, L=args.layers, T=args.ranks, e=e,
    )  # fmt: skip


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which also handles DTensors; in float64.

    (lesson 02)"""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [sum_partial(gradient.double()) for gradient in gradients]
    norm = nn.utils.get_total_norm(gradients, foreach=False)
    # Before torch 2.11 a DTensor's .item() is this rank's part of it (pytorch#166638).
    return norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()


def norm_bytes(tensors: str) -> str:
    """Bytes that PyTorch sums for its norm: one float64 per tensor (lesson 02)."""
    return f"8·{tensors}" if torch.__version__ >= (2, 11) else "8"


def sum_partial(x: Tensor) -> Tensor:
    """Sum a Partial() DTensor. Before torch 2.11 its norm was that of a rank's part.

    (lesson 02)"""
    if not isinstance(x, DTensor):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


def add_up(formulas: dict[str, str], sizes: dict[str, dict]) -> tuple[list, dict]:
    """A row for each term, name → formula, with its bytes in each run; and their sums.

    (lesson 02)"""
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
    """Bytes of each run as measured, checked against sums: run → predicted bytes.

    (lesson 02)"""
    row = {"bytes": f"{kind}, measured", "formula": formula}
    for run, predicted in sums.items():
        row[run] = "raised"
        if run in measured:
            row[run] = measured[run][kind]
            report.expect(row, run, "memory", f"{kind}, {run}", predicted)
    return row


def bytes_stored(run: TrainingRun, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Measured on this rank, after training and in one more forward pass.

    (lesson 02)"""
    parameters = list(run.model.parameters())
    saved = SavedBytes([*parameters, *run.model.buffers()])
    with saved:
        run.model(batch[0])  # without a label: these calls are in no table
    moments = []  # and step counts: all that AdamW stores
    for state in run.optimizer.state.values():
        moments.extend(state.values())
    return {
        "parameters": nbytes(parameters),
        "gradients": nbytes(p.grad for p in parameters),
        "optimizer state": nbytes(moments),
        "saved for backward": saved.total(),
    }


def check_reference(report: Report, run: TrainingRun, batch, size: dict) -> None:
    """Find out whether the model without TP fits its formulas, or has been edited.

    (lesson 02)"""
    alone = {"without TP": dict(size, T=1)}
    measured = bytes_stored(run, batch)
    _, stored = add_up(PARAMETERS, alone)
    if getattr(report.args, "tie", False):  # lesson 03's flag: one weight for both
        stored["without TP"] -= evaluate("V·D·e", size)
    _, saved = add_up(saved_terms(report.args.dropout), alone)
    parameters = measured["parameters"], stored["without TP"]
    activations = measured["saved for backward"], saved["without TP"]
    report.is_edited = not isinstance(run.optimizer, torch.optim.AdamW)
    report.check_model(parameters=parameters, activations=activations)
    check_tiny_loss(report)


LOSS_OF_TINY = 3.7220588178732883  # of the lesson's model, by check_tiny_loss


def check_tiny_loss(report: Report) -> None:
    """Find out whether a tiny model with stated weights has the lesson's loss.

    (lesson 02)"""
    args = copy.copy(report.args)
    args.vocab_size = 7
    args.hidden = 16
    args.heads = 4
    args.kv_heads = 2
    args.layers = 2
    args.seq_len = 5
    args.dropout = 0.0
    args.dtype = "float64"
    with torch.random.fork_rng():
        model = make_transformer(args)
    with torch.no_grad():
        for number, p in enumerate(model.parameters(), 1):
            weights = torch.arange(p.numel(), dtype=p.dtype, device=p.device)
            p.copy_((number * weights).sin().view_as(p))
        tokens_BS = torch.arange(5, device=args.device)[None]
        loss = mean_loss(model(tokens_BS), tokens_BS + 1).item()
    text = f"loss of a tiny model with fixed weights: {loss:.6f}, the lesson has "
    text += f"{LOSS_OF_TINY:.6f}"
    diff = rel_diff(loss, LOSS_OF_TINY)
    if not report.check("loss", "tiny model", diff, ALLOWED["float64"], text):
        report.is_edited = True


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
