"""Lesson 03: the vocabulary under tensor parallelism.

The largest matrices of a model are often its embedding and its head, [V, D] each, and
the largest activation its logits, [B, S, V]. Each rank takes a range of the vocabulary:
it looks up the tokens it has, and the loss is computed without ever gathering logits.

Run it (2 ranks on a laptop; 1, 3, 4, 6 and 8 work too, the sizes follow):

    torchrun --standalone --nproc_per_node=2 03_vocab_parallel.py

What you will see: who has which rows, where 257 does not divide; lesson 02's decoder,
its vocabulary split, trained beside one process with F.cross_entropy, one with the loss
by hand, and PyTorch's loss_parallel; batches on which a loss goes wrong easily; bytes
sent and kept, against gathering the logits; tokens drawn from logits that nobody has
whole. `--tie` ties embedding and head, `--break list` names the bugs to switch on.

How to read this file: NEW is the lesson, RUN what it prints, BREAK IT lists its bugs.
Below that stands what lessons 00 to 02 explained; fold it away. Short of time? Read
VocabParallelEmbedding, vocab_transformer and VocabParallelCrossEntropy.forward.

Try this, and see what the checks say:
- in vocab_transformer leave the embedding whole (delete its line), and cut the head;
- there, too, give ColumnParallelLinear gather_output=True: the loss is right, and yet;
- in VocabParallelCrossEntropy.forward drop the second all-reduce, but not its sum.

Shapes: B batch, S sequence, D hidden, V vocabulary, L layers, T ranks in the TP group.
    UPPERCASE is the full size, lowercase this rank's slice: logits_BSv has this rank's
    columns of the vocabulary, v = V/T rounded up; the excess is padding.
    `partial_` in front: full shape, still to be summed over the group. x → y: global →
    on a rank. PyTorch says Replicate() for what every rank holds, Shard(dim)
    for what is cut along a dim.

Sources: Megatron-LM, arXiv:1909.08053, sec. 3 (embedding, loss); docs.pytorch.org,
    torch.distributed.tensor.parallel.loss_parallel.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.utils._python_dispatch import TorchDispatchMode

# ==== NEW in 03: the vocabulary, split

# From lesson 02: tp_transformer copies the model and puts parallel modules in the place
# of its linears; the same edit goes on here, with the embedding and the head.
# ColumnParallelLinear has a slice of the outputs (01); shard_parameter cuts a parameter
# and notes in p.shardings how. g (ReduceFromTP): all-reduce forward, identity backward.
# IGNORE as a target: this token has none.


def pad_vocab(full: nn.Module, ranks: int) -> nn.Module:
    """An embedding or a head with rows of zeros at the end, so that T divides them.

    Shapes: weight [V, D] → [⌈V/T⌉·T, D], bias [V] → [⌈V/T⌉·T]. Zeros stay zeros: no
    token is looked up there, and the loss gives those columns no gradient.
    """
    padded = copy.deepcopy(full)
    for name, p in full.named_parameters():
        zeros = p.new_zeros(-len(p) % ranks, *p.shape[1:])  # as many as are missing
        setattr(padded, name, nn.Parameter(torch.cat([p.detach(), zeros])))
    return padded


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError for a token that no rank has; nn.Embedding raises IndexError."""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        low, high = tokens.min().item(), tokens.max().item()
        raise ValueError(
            f"tokens {low} to {high}: the vocabulary is 0 to {vocab_size - 1}"
        )


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group.

    Args:
        full: the single-process embedding, identical on every rank.
        tp_group: the T ranks that share it. Rank t has tokens t·v to (t + 1)·v − 1.
    Shapes (global → on a rank, placement):
        tokens  [B, S] int64 → the same       Replicate()
        weight  [V, D]       → [⌈V/T⌉, D]     Shard(0), the last ones padded
        return  [B, S, D]    → [B, S, D]      Replicate()
    Communication: forward one all-reduce of B·S·D elements (g); backward none.
    Raises: ValueError for a token outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size, self.tp_group = full.num_embeddings, tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        padded = pad_vocab(full, tp_group.size())
        self.weight = shard_parameter(padded.weight, (0, tp_group))  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        check_tokens(tokens_BS, self.vocab_size)
        v = len(self.weight)
        row_BS = tokens_BS - self.tp_group.rank() * v
        mine_BS = (row_BS >= 0) & (row_BS < v)
        # Another rank's token looks up row 0, any row would do: it is zeroed next.
        x_BSD = F.embedding(row_BS.where(mine_BS, 0), self.weight)
        partial_x_BSD = x_BSD * mine_BS.unsqueeze(-1)
        return self.reduce(partial_x_BSD, self.tp_group)


def vocab_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """Lesson 02's model with embedding and head split over the vocabulary, too.

    Shapes: tokens [B, S] → logits [B, S, ⌈V/T⌉] Shard(2); a rank's columns of them are
        its rows of the head and, where the two are tied, of the embedding.
    Communication: that of tp_transformer, and one all-reduce of B·S·D elements forward
        (g of the embedding) and one backward (f of the head).
    """
    model = tp_transformer(full, tp_group)
    model.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)
    head = pad_vocab(full.lm_head, tp_group.size())
    model.lm_head = ColumnParallelLinear(head, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        model.lm_head.weight = model.embed_tokens.weight  # one tensor, both gradients
    for p in (model.embed_tokens.weight, *model.lm_head.parameters()):
        p.rows = full.config.vocab_size  # the other rows are padding
    return model.train(full.training)  # in eval mode if full is


# ---- The loss, without ever gathering the logits


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(logits)[target] of sharded logits: vocab_parallel_cross_entropy.

    With m the largest logit, z = Σ exp(x − m): loss = log z − (x[target] − m). Each of
    the three, m, z and x[target], costs one all-reduce of B·S values: three in all.
    """

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        first = tp_group.rank() * v  # the token of this rank's first column
        column_v = torch.arange(v, device=logits_BSv.device)
        padding_v = first + column_v >= vocab_size
        wide = torch.promote_types(logits_BSv.dtype, torch.float32)
        x_BSv = logits_BSv.to(wide).masked_fill(padding_v, float("-inf"))
        # First all-reduce: the largest logit, so that no exp overflows.
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. One rank has its column, the others give zero.
        column_BS = target_BS - first
        mine_BS = (column_BS >= 0) & (column_BS < v)
        column_BS = column_BS.where(mine_BS, 0)
        picked_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(mine_BS, 0)
        if smoothing:  # and the mean of all logits, in the same all-reduce
            total_BS = x_BSv.masked_fill(padding_v, 0).sum(-1)
            picked_BS = (1 - smoothing) * picked_BS + smoothing * total_BS / vocab_size
        loss_BS = sum_BS.log() - all_reduce(picked_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        has_target_BS = target_BS != ignore
        ctx.save_for_backward(softmax_BSv, column_BS, mine_BS, has_target_BS, padding_v)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(has_target_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # dloss/dx = softmax − onehot(target): each rank has what it takes for its
        # columns, so nothing is sent.
        softmax_BSv, column_BS, mine_BS, has_target_BS, padding_v = ctx.saved_tensors
        even = ctx.smoothing / ctx.vocab_size  # smoothing's target for every token
        grad_BSv = (softmax_BSv - even).masked_fill(padding_v, 0)
        hit_BS = (1 - ctx.smoothing) * mine_BS.to(softmax_BSv)
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -hit_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored token is zero; its softmax is not.
        grad_BSv = grad_BSv.where(has_target_BS.unsqueeze(-1), 0)
        return grad_BSv.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor,
    target_BS: Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of every token, from logits whose vocabulary is split over the TP group.

    Args:
        logits_BSv: this rank's columns, padding included.
        target_BS: the right tokens, the same on every rank.
        vocab_size: V, the tokens there are; columns from V on are padding.
        ignore_index: a target that gives no loss and no gradient.
        label_smoothing: ε, as in F.cross_entropy.
    Shapes: logits [B, S, v] Shard(2), target [B, S] → loss [B, S] Replicate(), float32
        or wider; any number of leading dims will do.
    Communication: forward three all-reduces of B·S values; backward none.
    Raises: ValueError for a target outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def mean_over_targets(loss_BS: Tensor, target_BS: Tensor) -> Tensor:
    """The mean over the tokens that have a target; nan if none has, as in PyTorch."""
    return loss_BS.sum() / (target_BS != IGNORE).sum()


def sharded_loss(logits_BSv: Tensor, target_BS: Tensor, tp_group, vocab_size) -> Tensor:
    """The mean loss, from logits as they are."""
    loss_BS = vocab_parallel_cross_entropy(logits_BSv, target_BS, tp_group, vocab_size)
    return mean_over_targets(loss_BS, target_BS)


def gathered_loss(logits_BSv: Tensor, target_BS: Tensor, tp_group, vocab_size):
    """For comparison: all columns gathered on every rank, then F.cross_entropy."""
    logits_BSV = GatherFromTP.apply(logits_BSv, 2, tp_group)[..., :vocab_size]
    return mean_loss(logits_BSV, target_BS)


def vocab_plan() -> dict:
    """PyTorch's way to split the vocabulary. Logits stay a DTensor. Weights need no
    padding: a DTensor knows that its shards are of different sizes."""
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    head = column(output_layouts=Shard(-1), use_local_output=False)
    embedding = row(input_layouts=Replicate())
    return tp_plan() | {"embed_tokens": embedding, "lm_head": head}


def train_by_pytorch(full: Transformer, tp_group: dist.ProcessGroup, train):
    """PyTorch's way to the loss: in this context F.cross_entropy of sharded logits does
    the same three all-reduces. Backward has to be in it, too: here all of training is.
    """
    model = dtensor_transformer(full, vocab_plan(), tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        model.lm_head.weight = model.embed_tokens.weight  # the plan has cut it twice
    with parallel.loss_parallel():
        return train("DTensor", model, loss_of=mean_loss)


# ---- A token drawn from sharded logits


def sample_sharded(logits_v: Tensor, noise_V: Tensor, tp_group, vocab_size: int) -> int:
    """Draw a token from sharded logits, sending two numbers instead of V.

    The largest of logits + Gumbel noise is a draw from softmax(logits): each rank needs
    to offer only its best column. The noise is drawn whole on every rank from one seed,
    so the draw is the one that a single process makes.
    Communication: two all-reduces of one value: the best score, and who has it.
    """
    v, T = len(logits_v), tp_group.size()
    padding = 0, v * T - vocab_size  # is never drawn
    noise_v = shard(F.pad(noise_V, padding, value=float("-inf")), 0, tp_group)
    scores_v = logits_v.float() + noise_v
    score, token = scores_v.max(), scores_v.argmax() + tp_group.rank() * v
    top = all_reduce(score, tp_group, dist.ReduceOp.MAX)
    token = token.where(score == top, vocab_size)  # no token: another rank has a better
    return int(all_reduce(token, tp_group, dist.ReduceOp.MIN))  # of equals, the first


# ==== RUN


def main(args, report: Report) -> None:
    groups = mesh_groups({"tp": args.ranks}, args.timeout)
    groups |= mesh_groups({"all": args.ranks, "alone": 1}, args.timeout)  # 1 rank each
    tp_group, V = groups["tp"], args.vocab_size
    report.begin({"tp": args.ranks})
    full, batches = make_tied(args), make_batches(__doc__, args, args.steps)
    plain, split = copy.deepcopy(full), vocab_transformer(full, tp_group)
    train = partial(train_transformer, batches=batches, args=args)
    by_hand = partial(sharded_loss, tp_group=groups["alone"], vocab_size=V)
    with_tp = partial(sharded_loss, tp_group=tp_group, vocab_size=V)
    runs = {
        "without TP": train("without TP", plain, loss_of=mean_loss),
        "loss by hand": train("loss by hand", copy.deepcopy(full), loss_of=by_hand),
        "with TP": train("with TP", split, loss_of=with_tp, tp_group=tp_group),
    }
    if 1 < args.ranks <= args.kv_heads:
        runs["DTensor"] = train_by_pytorch(full, tp_group, train)
    show_cuts(report, full, split)
    show_ranges(report, split, batches[0], tp_group)
    show_steps(report, runs, "with TP", split, tp_group)  # section 2; from lesson 02
    show_news(report, runs)
    show_hard_batches(report, args, tp_group)
    show_traffic(report, runs)
    show_gathering(report, args, tp_group)
    show_sampling(report, plain, split, batches[0], tp_group)


def make_tied(args) -> Transformer:
    """Lesson 02's model; with --tie, head and embedding share their weight."""
    full = make_transformer(args)
    if args.tie:  # drawn small: as a head, the embedding's own rows give huge logits
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


def fold_old(name: str) -> str:
    """A row for each parameter that is cut here anew, and one for the rest."""
    news = name.startswith(("embed_tokens", "lm_head"))
    return name if news else "all others, as in 02"


def show_cuts(report: Report, full, split) -> None:
    report.section("Who holds what: a row of embedding and head for each token")
    rows, others = {}, Counter()
    for name, p in split.named_parameters():
        shape, cuts = full.get_parameter(name).shape, getattr(p, "shardings", ())
        row = {"parameter": name, "global": str([*shape]), "on a rank": str([*p.shape])}
        placement = ", ".join(f"Shard({dim})" for dim, _ in cuts) or "Replicate()"
        if name != fold_old(name):
            others.update({"global": shape.numel(), "on a rank": p.numel()})
            numbers = {place: f"{count:,} numbers" for place, count in others.items()}
            row, placement = {"parameter": fold_old(name), **numbers}, ""
        rows[fold_old(name)] = row | {"placement": placement}
    report.table("holdings", [*rows.values()])


def show_ranges(report: Report, split, batch, tp_group) -> None:
    """Who has which tokens, and how many of a batch are looked up there."""
    V, rank = report.args.vocab_size, tp_group.rank()
    v = -(-V // tp_group.size())
    mine = range(v * rank, min(V, v * rank + v))  # may be none
    row = {"rank": rank, "tokens": f"{mine[0]} to {mine[-1]}" if mine else "none"}
    for name, x_BS in zip(("inputs", "targets"), batch):
        row[name] = ((x_BS >= mine.start) & (x_BS < mine.stop)).sum().item()
    ends = [
        p for p in split.parameters() if hasattr(p, "rows") and hasattr(p, "shardings")
    ]
    row["padding"] = v - len(mine)
    row["Σ|pad|"] = sum(p[len(mine) :].abs().sum().item() for p in ends)
    row["ok"] = report.check("padding is zero after training", row["Σ|pad|"])
    ranks, tokens = gather_objects(row), batch[0].numel()
    looked_up = sum(row["inputs"] for row in ranks)
    report.check("every token is looked up once", abs(looked_up - tokens))
    report.say(
        f"   Who has which of {V} tokens, and looks up how many of a batch's {tokens}; "
        "some have\n   no target. Padding: rows that belong to no token; they stay 0."
    )
    report.table("rows", ranks)


def show_news(report: Report, runs: dict) -> None:
    """Gradients of what is cut here, and all others in one row; some in numbers."""
    report.section("Gradients of step 1: norms; diff: max|a − b| / max|b|")
    gradients = {what: run.gradients for what, run in runs.items()}
    report.compare("gradients", gradients, fold=fold_old)
    rows = []
    for token in "ae":
        row = {"": f"dL/d embedding of {token}"}
        for what in ("without TP", "with TP"):
            corner = runs[what].gradients["embed_tokens.weight"][ord(token), :3]
            row[what] = " ".join(f"{x:9.6f}" for x in corner.tolist())
        rows.append(row)
    report.table("corner", rows)


class Case(NamedTuple):
    """Random logits and targets, and what is hard about them."""

    vocab_size: int = 257
    size: float = 1.0  # of the logits
    ignored: float = 0.2  # share of the tokens
    smoothing: float = 0.0


def show_hard_batches(report: Report, args, tp_group) -> None:
    """Batches on which a loss goes wrong easily, against F.cross_entropy."""
    cases = {
        "logits of about 10,000": Case(size=10000.0),
        "label smoothing 0.1": Case(smoothing=0.1),
        "no token has a target": Case(ignored=1.0),
        "a vocabulary of 1": Case(vocab_size=1),
        "GPT-2's vocabulary": Case(vocab_size=50257),
    }
    rows = []
    for name, case in cases.items():
        (wanted, got), gradients = try_case(case, args, tp_group)
        diffs = nan_or_diff(got, wanted), nan_or_diff(*gradients)
        right = report.check(f"{name}: loss", diffs[0], report.allowed_loss)
        right &= report.check(f"{name}: gradient", diffs[1], report.allowed)
        row = {"case": name, "V": case.vocab_size, "F.cross_entropy": wanted.item()}
        rows.append(row | {"with TP": got.item(), "diff": max(diffs), "ok": right})
    report.section("Where a loss goes wrong easily; diff: of loss and gradient")
    report.table("hard_batches", rows)


def try_case(case: Case, args, tp_group) -> tuple:
    """Loss and gradient of random logits, each by F.cross_entropy and with TP."""
    generator = torch.Generator().manual_seed(args.seed)
    V, T = case.vocab_size, tp_group.size()
    x_BSV = torch.randn(3, 5, V, generator=generator) * case.size
    target_BS = torch.randint(V, (3, 5), generator=generator)
    target_BS[torch.rand(3, 5, generator=generator) < case.ignored] = IGNORE
    target_BS = target_BS.to(args.device)
    x_BSV = x_BSV.to(args.device, getattr(torch, args.dtype)).requires_grad_()
    wanted = F.cross_entropy(
        x_BSV.flatten(0, 1), target_BS.flatten(), label_smoothing=case.smoothing
    )
    wanted.backward()
    padding = 0, -V % T  # of any content: nothing of it may join in
    x_BSv = shard(F.pad(x_BSV, padding, value=9.0), 2, tp_group).requires_grad_()
    COMM.what = "hard batches"
    loss_BS = vocab_parallel_cross_entropy(
        x_BSv, target_BS, tp_group, V, label_smoothing=case.smoothing
    )
    loss = mean_over_targets(loss_BS, target_BS)
    loss.backward()
    gradient = all_gather(x_BSv.grad, 2, tp_group)
    return (wanted, loss), (F.pad(x_BSV.grad, padding), gradient)


def nan_or_diff(got: Tensor, wanted: Tensor) -> float:
    """rel_diff; where nan is right, nan is no difference."""
    if not torch.equal(got.isnan(), wanted.isnan()):
        return math.inf
    return rel_diff(got.where(~got.isnan(), 0), wanted.where(~wanted.isnan(), 0))


def show_traffic(report: Report, runs: dict) -> None:
    """What a step sends, by hand and by PyTorch."""
    args = report.args
    L, e = args.layers, getattr(torch, args.dtype).itemsize
    tokens = args.batch_size * args.seq_len
    each = tokens * args.hidden * e
    n, many = 2 * L + 1, 4 * L + 1
    once = n, "(2L + 1)·B·S·D", n * each
    more = many, "(4L + 1)·B·S·D", many * each
    three = 3, "3·B·S", 3 * tokens * e
    report.section("Communication of a step: the loss sends three numbers a token")
    report.say(
        f"   formula × {e} = bytes. DTensor: an f each for q, k, v; clipping uncounted."
    )
    formulas = {
        ("with TP", "forward", "all-reduce", "tp"): once,
        ("with TP", "loss", "all-reduce", "tp"): three,
        ("with TP", "backward", "all-reduce", "tp"): once,
        ("with TP", "clipping", "all-reduce", "tp"): (1, "one float64", 8),
        ("DTensor", "forward", "all-reduce", "tp"): once,
        ("DTensor", "loss", "all-reduce", "tp"): three,
        ("DTensor", "backward", "all-reduce", "tp"): more,
        ("with TP", "backward", "all-reduce", "copy"): sums_of_copies(report),
    }
    formulas = {key: formula for key, formula in formulas.items() if key[0] in runs}
    report.ledger(formulas, args.steps)


def show_gathering(report: Report, args, tp_group) -> None:
    """The loss alone, from gathered and from sharded logits: bytes sent, and kept."""
    rows, T, e = [], tp_group.size(), getattr(torch, args.dtype).itemsize
    tokens = args.batch_size * args.seq_len
    for V in (257, 50257):
        v = -(-V // T)
        row = measure_loss("gathered", gathered_loss, V, args, tp_group)
        row["formula"] = "B·S·V·e + e"  # log-softmax; a count of targets
        row["predicted_bytes"] = tokens * V * e + e
        check_sent(report, row, "all-gather", 1, tokens * v * T * e)
        rows.append(row)
        row = measure_loss("sharded", sharded_loss, V, args, tp_group)
        # Softmax; of a token the column and two masks; what is padding; a count.
        row["formula"] = "B·S·(v·e + 10) + v + 8"
        row["predicted_bytes"] = tokens * (v * e + 10) + v + 8
        check_sent(report, row, "all-reduce", 3, 3 * tokens * e)
        rows.append(row)
    report.section(
        "The loss alone, in bytes: logits gathered on every rank, or sharded"
    )
    report.say(
        "   sent: bytes, B·S·v·T·e in one all-gather, 3·B·S·e in three all-reduces.\n"
        "   bytes: kept for backward. A number has e; v = ⌈V/T⌉ columns on a rank"
    )
    report.measure("memory", rows)


def measure_loss(name: str, loss_of, V: int, args, tp_group) -> dict:
    """What one loss of V tokens sends, and keeps for backward."""
    shape = args.batch_size, args.seq_len
    x_BSv = torch.zeros(*shape, -(-V // tp_group.size()), device=args.device)
    x_BSv = x_BSv.to(getattr(torch, args.dtype)).requires_grad_()
    target_BS = torch.zeros(shape, dtype=torch.int64, device=args.device)
    COMM.what, COMM.phase = f"{name}, V {V}", ""
    saved = SavedBytes([x_BSv, target_BS])
    with saved:
        loss = loss_of(x_BSv, target_BS, tp_group, V)
    loss.backward()
    return {"V": f"{V}", "logits": name, "sent": 0, "bytes": saved.total()}


def check_sent(report: Report, row: dict, collective: str, calls: int, nbytes) -> None:
    """Calls and bytes that were counted under the row's name."""
    key = f"{row['logits']}, V {row['V']}", "", collective, "tp"
    made, row["sent"] = COMM.rows.get(key, (0, 0))
    wanted = (calls, nbytes) if report.axes["tp"] > 1 else (0, 0)
    off = abs(made - wanted[0]) + abs(row["sent"] - wanted[1])
    row["ok"] = report.check(f"bytes: sent, {key[0]}", off, kind="bytes")


def show_sampling(report: Report, plain, split, batch, tp_group) -> None:
    """A token after each of a line's first bytes, drawn from the softmax."""
    args, (tokens_BS, _), count = report.args, batch, 5
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        logits_SV = plain.eval()(tokens_BS[:1])[0]
        logits_Sv = split.eval()(tokens_BS[:1])[0]
    COMM.what = "sampling"
    wanted, drawn = [], []
    for logits_V, logits_v in zip(logits_SV[:count], logits_Sv):
        uniform_V = torch.rand(args.vocab_size, generator=generator)
        noise_V = -(-uniform_V.log()).log().to(args.device)  # Gumbel
        wanted.append(int((logits_V + noise_V).argmax()))
        drawn.append(sample_sharded(logits_v, noise_V, tp_group, args.vocab_size))
    _, sent = COMM.rows.get(("sampling", "", "all-reduce", "tp"), (0, 0))
    row = {"": "tokens", "without TP": wanted, "with TP": drawn, "bytes": sent}
    row["predicted_bytes"] = count * (4 + 8) if tp_group.size() > 1 else 0
    row["ok"] = report.check("tokens drawn", float(drawn != wanted))
    report.section("Tokens drawn from the softmax; sent: a score and a number, not V")
    report.measure("sampling", [row])


# ==== BREAK IT

# Bugs that people have shipped, each an edit. --break NAME switches one on.
BREAKS = {
    "ignored": dict(
        target="VocabParallelCrossEntropy.backward",
        old="    grad_BSv = grad_BSv.where(has_target_BS.unsqueeze(-1), 0)\n"
        "    return grad_BSv",
        new="    return grad_BSv",
        what="the gradient rows of ignored tokens are not zeroed",
        symptom="the loss of step 1 is right: an ignored token's loss is zero; its "
        "gradient is not, and losses part from step 2 on",
        why="dloss/dx = softmax − onehot is not zero where the loss was masked to zero",
        reported="docs.pytorch.org, torch.nn.functional.cross_entropy, ignore_index",
    ),
    "mean": dict(
        target="mean_over_targets",
        old="    return loss_BS.sum() / (target_BS != IGNORE).sum()",
        new="    return loss_BS.mean()",
        what="the mean is taken over all tokens, those without a target included",
        symptom="the loss is too small by the share of ignored tokens, so is every "
        "gradient; AdamW divides by a gradient's size, and hides most of it",
        why="an ignored token adds zero to the sum, and one to the count if you let it",
        reported="docs.pytorch.org, torch.nn.functional.cross_entropy, reduction='mean'",
    ),
    "gathered": dict(
        target="vocab_parallel_cross_entropy",
        old="    return VocabParallelCrossEntropy.apply(\n",
        new="    logits_BSv = GatherFromTP.apply(\n"
        "        logits_BSv, logits_BSv.dim() - 1, tp_group\n"
        "    )\n"
        "    vocab_size = logits_BSv.shape[-1] * tp_group.size()\n"
        "    return VocabParallelCrossEntropy.apply(\n",
        what="gathered logits are fed to the loss for sharded ones",
        symptom="the loss is too large by log T, whatever the model does, and a little "
        "more where columns of padding join in",
        why="every rank adds all of Σ exp to the sum over ranks: it counts T times",
        reported="github.com/NVIDIA/Megatron-LM/issues/7452",
    ),
    "padding": dict(
        target="VocabParallelCrossEntropy.forward",
        old="padding_v = first + column_v >= vocab_size",
        new="padding_v = first + column_v >= v * tp_group.size()",
        what="the padded columns are left in the softmax",
        symptom="the loss is a little too large, by less the larger the vocabulary",
        why="a padded column's logit is 0, not −∞, and exp(0) = 1 joins every sum",
        reported="github.com/mirage-project/mirage/issues/751, vllm-project/vllm 1399",
    ),
    "max": dict(
        target="VocabParallelCrossEntropy.forward",
        old="max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)",
        new="max_BS = torch.zeros_like(x_BSv[..., 0])",
        what="the largest logit is not subtracted",
        symptom="no loss changes while logits are small; large ones give inf or nan; "
        "two all-reduces are left of three",
        why="exp(x) overflows float32 above x = 88; exp(x − max) never does",
        reported="Megatron-LM, arXiv:1909.08053, sec. 3; the first of its three all-reduces",
    ),
    "exponentials": dict(
        target="VocabParallelCrossEntropy.forward",
        old="softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)",
        new="softmax_BSv = exp_BSv",
        what="the exponentials are kept for backward, and not the softmax",
        symptom="step 1's loss is right, the gradients are not: too large, about Σ "
        "times",
        why="the gradient is softmax − onehot: exp without its 1/Σ is too large by Σ",
        reported="github.com/xrsrke/pipegoose",
    ),
    "tie": dict(
        target="vocab_transformer",
        old="model.lm_head.weight = model.embed_tokens.weight  # one tensor, both "
        "gradients",
        new="model.lm_head.weight.data = model.embed_tokens.weight.data",
        what="tied weights are two parameters on one storage (switches --tie on)",
        symptom="step 1's loss is right; the embedding's gradient lacks the head's "
        "part, and there is a parameter more than in one process",
        why="one parameter with two uses gets the sum of two gradients; two that only "
        "look at the same numbers get one each, and one update each",
        reported="github.com/pytorch/torchtitan/issues/1524, NVIDIA/Megatron-LM issue 844",
    ),
    "loss-parallel": dict(
        target="train_by_pytorch",
        old="    with parallel.loss_parallel():\n"
        '        return train("DTensor", model, loss_of=mean_loss)\n',
        new="    def loss_of(logits, target_BS):\n"
        "        with parallel.loss_parallel():\n"
        "            return mean_loss(logits, target_BS)\n"
        "\n"
        '    return train("DTensor", model, loss_of=loss_of)\n',
        what="PyTorch's loss_parallel: backward is called outside the context",
        symptom="an error from deep inside, in backward",
        why="the context swaps the kernels of log-softmax and of the loss, and of "
        "their backward, for sharded ones; outside it the ordinary ones meet sharded "
        "logits",
        reported="github.com/pytorch/pytorch/issues/190746",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    sizes = {"layers": 2, "batch_size": 4, "seq_len": 32, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, steps=3, **sizes)
    parser.add_argument("--tie", action="store_true", help="one weight for both ends")
    args = parse_sizes(parser, ranks)
    args.tie = args.tie or args.bug == "tie"
    return args


# endregion


# ==== CARRIED OVER from 00, unchanged
# region


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
    """This rank's group along each axis of a mesh, the last axis innermost.

    (lesson 00)"""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


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


def shard_parameter(full: Tensor, *cuts: tuple[int, dist.ProcessGroup]) -> nn.Parameter:
    """This rank's slice of a parameter, which remembers its cuts: ((dim, group), …).

    (lesson 01)"""
    for dim, group in cuts:
        full = shard(full, dim, group)
    mine = nn.Parameter(full.detach().clone())
    mine.shardings = cuts
    return mine


def unshard(x: Tensor, cuts: tuple) -> Tensor:
    """The whole tensor from all ranks' slices: cuts undone, the last one first.

    (lesson 01)"""
    for dim, group in reversed(cuts):
        x = all_gather(x, dim, group)
    return x


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated.

    (lesson 01)"""
    return getattr(p, "shardings", ())


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # every rank has all of x already: nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of the T terms of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group (lesson 01)."""

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


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the whole dL/dy; and y is the
        # sum of the terms, so dL/dy is also the gradient of every term.
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
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward.

    (lesson 01)"""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes kept for backward, each storage once, `skip` left out.

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


def must_divide(args, name: str, parts: int, what: str) -> None:
    """ValueError with the arithmetic if a flag's value is no multiple of parts.

    (lesson 01)"""
    value = getattr(args, name)
    if value % parts:
        flag, up = f"--{name.replace('_', '-')}", value + parts - value % parts
        left = f"{value} % {parts} {what} = {value % parts}, not 0"
        raise ValueError(f"{flag} {value}: {left}; take {flag} {up}")


# endregion


# ==== CARRIED OVER from 02, unchanged
# region


class Config(NamedTuple):
    vocab_size: int  # V
    hidden: int  # D
    heads: int  # N
    kv_heads: int  # K: each key/value head serves N/K query heads
    layers: int  # L
    seq_len: int  # S, the longest sequence
    dropout: float  # probability, of attention weights and of each block's output


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angle position · 10000^(−2i/H) (arXiv:2104.09864).

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
    """nn.Dropout, with the mask sampled as in ShardedDropout below (lesson 02)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class CoreAttention(nn.Module):
    """The part of attention without weights (lesson 02)."""

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
    heads = attn.q_proj.out_features // attn.core.head_size
    kv_heads = attn.k_proj.out_features // attn.core.head_size
    if heads % T != 0 or kv_heads % T != 0:  # a rank would get a fraction of a head
        raise ValueError(f"{heads} heads, {kv_heads} key/value heads on {T} ranks")

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
    return model.train(full.training)  # in eval mode if full is


def tp_plan() -> dict:
    """PyTorch's plan: which linear is split by column and which by row (lesson 02)."""
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
    name, model, batches, args, tp_group=None, loss_of=mean_loss, after_backward=None
) -> TrainingRun:
    """One step on each batch (lesson 02)."""
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
            else:
                norm = global_norm(model, tp_group)
            clip_gradients(model, args.clip, norm)

        # Each rank updates what it holds, and sends nothing. Replicas stay equal only
        # because they start equal and get equal gradients. Nothing else enforces it.
        optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm

    parameters = unshard_model(model, "data")
    return TrainingRun(model, optimizer, losses, norms, gradients, parameters)


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which also handles DTensors; in float64.

    (lesson 02)"""
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients, foreach=False).item()


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), from the slices of all ranks.

    (lesson 02)"""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            x = torch.empty(0)  # no gradient: this is equal to no tensor
        elif isinstance(x, DTensor):
            x = x.full_tensor()  # an all-gather by PyTorch
        else:
            x = unshard(x, shardings_of(p))
        tensors[name] = x.clone()
    return tensors


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
    must_divide(args, "heads", ranks, "ranks")
    if args.kv_heads < ranks:
        text = f"--kv-heads {args.kv_heads}: fewer than {ranks} ranks"
        raise ValueError(f"{text}; take {ranks}, or see beyond/09_shared_heads.py")
    must_divide(args, "kv_heads", ranks, "ranks")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout {args.dropout}: must be at least 0 and below 1")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be greater than 0")
    return args


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
