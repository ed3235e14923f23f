"""Lesson 04: sequence parallelism.

Under tensor parallelism (TP) every rank computes LayerNorm, dropout and residual of all
positions: the same work and the same memory, T times. Sequence parallelism (SP) gives
each rank a slice of the sequence there. Each all-reduce becomes a reduce-scatter and an
all-gather: an all-reduce goes around a ring of ranks twice, each of these once, so the
ring sends the same bytes. By default this lesson also gathers inputs again in backward
instead of saving them gathered. Then a layer saves 1/T of the bytes that it saves in
one process. For each attention and each MLP the ring makes 5 rounds, 2 forward and 3
backward, where TP makes 4: 25 % more bytes.

Run it on 1, 2 or 4 ranks (3, 6 or 8 take more heads, so they train another model):

    torchrun --standalone --nproc_per_node=2 04_sequence_parallel.py

What you will see: the model of lesson 03 trained on this text in one process, with TP,
with TP and SP, and by PyTorch's plan; gradients that need one more sum; bytes sent;
what a layer saves for backward: 34 bytes per element of its input, 5 per attention
weight and a few per position; lengths that T does not divide.

What to try (answers: notebooks/04_sequence_parallel.ipynb, the section in brackets):
- In split_sequence, delete the line of layer.dropout. Gradients and losses of TP + SP
  are wrong from step 1 on: all slices drop the same elements [12].
- Use nn.RMSNorm in DecoderLayer and Transformer. All values agree, and a ≠ marks what
  changes: the all-reduce of the norms' gradients gets smaller. On a CPU a layer saves
  12·B·S·D more bytes for backward, 1/T of them where the sequence is split [6].
- --save-gathered: 5 all-gathers in backward, not 10, but more bytes saved [5, 7].
- --seq-len 33: S becomes 34 on 2 ranks, and the losses still agree [8].

How to read this file: NEW is the lesson, RUN trains and prints. Short of time? Read
GatherThenLinear, split_sequence and all_reduce_replicated_gradients. Bugs that people
have shipped: `python tools/bug.py 04` lists them, and `… 04 norms` runs one.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, V vocabulary, L
    layers, T ranks in the TP group. UPPERCASE is the full size, lowercase is this
    rank's slice: x_BsD has s = S/T positions. `partial_` in front: full shape, still to
    be summed over the group, written {U_tp}: unreduced. PyTorch calls these placements
    Replicate(), Shard(dim) and Partial(). An arrow means input → output. In formulas:
    X = B·S·D; 2·L + 1 inputs are gathered, two per layer and one of lm_head; p
    parameter tensors; e bytes per element.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (sequence parallelism, memory);
    docs.pytorch.org, torch.distributed.tensor.parallel.SequenceParallel.
"""

from __future__ import annotations

import copy
import math
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.utils.checkpoint import checkpoint

# ==== NEW in 04: the sequence, split
# Read lines 62 to 270, in about 21 minutes. The rest of NEW is optional. Stop at RUN.

# From lessons 01 to 03: f is before column-parallel linears (all-reduce in backward),
# g after row-parallel ones (all-reduce in forward). Two more operations of lesson 01:
#   ReduceScatterWithGrad  a reduce-scatter forward, an all-gather backward
#   AllGatherWithGrad      an all-gather forward, a reduce-scatter backward
# vocab_transformer is a copy of the model with linears and vocabulary split.
# ShardedDropout(p, dim, group) is for a tensor that is sharded along dim. For a
# parameter that is replicated, sharding_of(p) is None. Replaced here:
# Attention.project_qkv (f, then q, k and v) and `reduce` (g) of row-parallel modules.

# One layer. A rank holds s = S/T positions in [B, s, D], and in between its heads or
# columns of all positions (for k and v, d is K·H/T: K key/value heads of size H):
#   [B, s, D]  x → LayerNorm → all-gather ─┐
#   [B, S, d]                              └→ q, k, v → attention → o_proj ─┐   d = D/T
#   [B, s, D]  x + dropout ← reduce-scatter ←───────────────────────────────┘
#   [B, s, D]  x → LayerNorm → all-gather ─┐
#   [B, S, f]                              └→ up_proj → GELU → down_proj ───┐   f = F/T
#   [B, s, D]  x + dropout ← reduce-scatter ←───────────────────────────────┘


# ---- After a row-parallel linear: g becomes a reduce-scatter

# An all-reduce is a reduce-scatter and an all-gather (lesson 00). SP does the first
# half here, works on its slice of positions, and gathers before the next linear.


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """Sum the ranks' partial outputs; each rank gets its slice of the positions.

    Backward all-gathers: a rank's partial_y has all positions, and dL/dy of a position
    is the gradient of every rank's partial_y there. So a rank needs all its slices.

    Shapes: y [B, S, D] {U_tp} → [B, s, D] Shard(1).
    Communication: one reduce-scatter of B·S·D elements forward, one all-gather of
        B·S·D elements backward.
    """
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


# ---- Before column-parallel linears: f becomes an all-gather


class GatherThenLinear(torch.autograd.Function):
    """The forward and backward of gather_again: save only this rank's slice.

    The gradient of a weight needs the input at all positions. Plain autograd would save
    the gathered input, T slices. The paper saves one slice and gathers it again in
    backward (arXiv:2205.05198, sec. 4.2.2). This second gather makes SP send 25 % more
    bytes than TP. (beyond/18_in_pieces.py sends it while dL/dx is computed.)
    """

    @staticmethod
    def forward(ctx, x_BsD: Tensor, tp_group, *parameters: Tensor | None) -> tuple:
        weights = parameters[0::2]  # weight, bias, weight, bias, …
        biases = parameters[1::2]  # None for a linear without bias
        ctx.save_for_backward(x_BsD, *weights)
        ctx.tp_group = tp_group
        ctx.has_bias = [bias is not None for bias in biases]
        x_BSD = all_gather(x_BsD, 1, tp_group)
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        saved = ctx.saved_tensors  # read once: under checkpoint() a second read fails
        x_BsD = saved[0]
        weights = saved[1:]
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)  # gather again
        flat_x = x_BSD.flatten(0, 1)  # [B·S, D]
        partial_grad_BSD = torch.zeros_like(x_BSD)
        grads = []  # of the parameters, in the order of forward
        for grad_BSf, weight, has_bias in zip(grads_BSf, weights, ctx.has_bias):
            flat_grad = grad_BSf.flatten(0, 1)  # [B·S, f]
            grads.append(flat_grad.T @ flat_x)
            grads.append(flat_grad.sum(0) if has_bias else None)
            partial_grad_BSD += grad_BSf @ weight
        # Each rank multiplied all positions by its own columns, so it has a partial
        # dL/dx for every position. Sum over ranks; this rank gets its positions.
        grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)
        return tuple([grad_BsD, None] + grads)  # None: the group has no gradient


def gather_again(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """All-gather x, apply column-parallel linears; in backward, gather x again.

    Shapes: x [B, s, D] Shard(1) → [B, S, f] Shard(2), one for each linear.
    Communication: one all-gather forward; one all-gather and one reduce-scatter
        backward; each of B·S·D elements.
    """
    parameters = []
    for linear in linears:
        parameters += [linear.weight, linear.bias]
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same by plain autograd, which saves the gathered x (--save-gathered).

    Communication: one all-gather forward, one reduce-scatter backward.
    """
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


class LinearWithInputComm(nn.Module):
    """A column-parallel linear that gathers its input: gather_again or gather_and_save.

    It replaces up_proj and lm_head, and takes over weight and bias under their names,
    so it can pass itself to `gather` as the linear. (For q, k and v `gather` replaces
    Attention.project_qkv.)
    """

    def __init__(self, linear: ColumnParallelLinear, gather):
        super().__init__()
        self.tp_group = linear.tp_group
        self.weight = linear.weight
        self.bias = linear.bias
        self.gather = gather

    def forward(self, x_BsD: Tensor) -> Tensor:
        outputs = self.gather(x_BsD, self)
        return outputs[0]


# ---- The model, edited


def split_sequence(layer: DecoderLayer, tp_group, gather=gather_again) -> None:
    """Edit a layer of tp_transformer: around attention and MLP the sequence is split.

    Attention itself needs all positions of its heads, so rotary tables and causal mask
    stay those of the full sequence, by global position. (Context parallelism is the
    method that also splits the sequence inside attention.)

    Shapes: x [B, s, D] Shard(1) → [B, s, D] Shard(1).
    Communication: 2 all-gathers and 2 reduce-scatters forward, the same backward, and
        with gather_again 2 more all-gathers backward. Each is of B·S·D elements.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2, fig. 5.
    """
    layer.self_attn.project_qkv = gather
    layer.self_attn.o_proj.reduce = reduce_scatter_sequence
    layer.mlp.up_proj = LinearWithInputComm(layer.mlp.up_proj, gather)
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
    # The layer drops elements of a [B, s, D]: each rank must use its slice of the mask.
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)


def sp_transformer(
    full: Transformer, tp_group: dist.ProcessGroup, save_gathered: bool = False
) -> Transformer:
    """A copy of the decoder under TP, with the sequence split between its linears.

    save_gathered: use gather_and_save instead of gather_again.
    Shapes: tokens [B, S], T divides S (pad_batch) → logits [B, S, ⌈V/T⌉] Shard(2).
    Communication: split_sequence in each of L layers; one more reduce-scatter after the
        embedding; one more gather before lm_head. all_reduce_replicated_gradients must
        be called after backward.
    """
    gather = gather_and_save if save_gathered else gather_again
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, gather)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, gather)
    return model.train(full.training)  # in eval mode if full is


# Which gradients are complete after backward? (Lesson 02 has the three kinds.)
# - Sharded weights and biases work on all positions. Complete.
# - LayerNorms and the biases of o_proj and down_proj are replicated, but each rank
#   applies them to its own slice of the sequence. Partial: sum them.
# Without SP every rank applies them to all positions, and their gradients are complete.


def all_reduce_replicated_gradients(model: nn.Module, tp_group) -> None:
    """Sum the gradients of replicated parameters over the TP group, before clipping.

    One flat buffer makes it one collective; a hook on each parameter, as in lesson 02,
    would make one per parameter. (Megatron-LM does it in finalize_model_grads.)
    Communication: one all-reduce of (6·L + 2)·D elements: LayerNorms have (4·L + 2)·D,
        biases of o_proj and down_proj 2·L·D.
    """
    replicated = []
    for p in model.parameters():
        if p.grad is not None and not sharding_of(p):
            replicated.append(p)
    partial_flat = torch.cat([p.grad.flatten() for p in replicated])
    flat = all_reduce(partial_flat, tp_group)
    for p, grad in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.copy_(grad.view_as(p))


# ---- Lengths that T does not divide


def pad_batch(tokens_BS: Tensor, target_BS: Tensor, ranks: int) -> tuple:
    """Pad the sequence at its end so that T divides it.

    At the end, because then all other tokens keep their positions, and the causal mask
    hides the padding from them. PAD (256) is no byte, and a target of IGNORE (−100)
    adds nothing to the loss.
    Shapes: [B, S] → [B, ⌈S/T⌉·T], for tokens and targets.
    """
    missing = -tokens_BS.shape[1] % ranks
    tokens_BS = F.pad(tokens_BS, (0, missing), value=PAD)
    target_BS = F.pad(target_BS, (0, missing), value=IGNORE)
    return tokens_BS, target_BS


# ---- Optional: activation checkpointing


class Checkpointed(nn.Module):
    """A module that saves its inputs only, and runs forward again in backward.

    Around CoreAttention (selective recomputation) it discards the activations that grow
    with S², which are large but cheap to recompute; around a layer (full recomputation)
    it discards everything but the layer's input (arXiv:2205.05198, sec. 5).
    checkpoint() restores the random state, so the second forward draws the same dropout
    masks. Collectives of the inner module also run again: none in CoreAttention; in a
    layer two under TP, four under SP. (The second forward stops as soon as backward has
    all that it needs: without dropout nothing after the last collective is needed, so
    that one is left out.)
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return checkpoint(self.inner, *inputs, use_reentrant=False)


# ---- Optional: the same with PyTorch's API


def sp_plan(keyword: str = "x_BSD", local: bool = True) -> dict:
    """PyTorch's plan for this model (for one of Hugging Face: beyond/hugging_face.py).

    Args:
        keyword: the name by which a layer passes x to its attention.
        local: between modules x is a plain [B, s, D]; otherwise a DTensor [B, S, D].
    """
    column = parallel.ColwiseParallel()
    row = parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    norm = parallel.SequenceParallel()
    gather = parallel.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    # A layer calls its attention by keyword, so there is nothing for input_layouts.
    gather_by_keyword = parallel.PrepareModuleInput(
        input_kwarg_layouts={keyword: Shard(1)},
        desired_input_kwarg_layouts={keyword: Replicate()},
    )
    # SequenceParallel treats a plain tensor as this rank's slice, so give it a slice.
    embedding = parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
    )
    # Logits stay a DTensor: loss_parallel requires it.
    head = parallel.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    return {
        "embed_tokens": embedding,
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": gather_by_keyword,
        "layers.*.self_attn.q_proj": column,
        "layers.*.self_attn.k_proj": column,
        "layers.*.self_attn.v_proj": column,
        "layers.*.self_attn.o_proj": row,
        "layers.*.post_attention_layernorm": norm,
        "layers.*.mlp": gather,
        "layers.*.mlp.up_proj": column,
        "layers.*.mlp.down_proj": row,
        "norm": norm,
        "lm_head": head,
    }


def planned_transformer(full: Transformer, tp_group) -> Transformer:
    """The model by PyTorch's plan; a plan does not cover dropout, so we edit that."""
    model = dtensor_transformer(full, sp_plan(), tp_group)
    for layer in model.layers:
        layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        model.lm_head.weight = model.embed_tokens.weight  # the plan sharded it twice
    return model.train(full.training)  # in eval mode if full is


def planned_loss(logits: DTensor, target_BS: Tensor) -> Tensor:
    """The mean loss of DTensor logits; call it and its backward in loss_parallel().

    The loss is a replicated DTensor, already summed over the ranks: full_tensor() makes
    it a plain tensor, and you need no all-reduce of your own.
    """
    return mean_loss(logits, target_BS).full_tensor()


# ==== RUN


def main(args, report: Report) -> None:
    """Train the same model four times on the same batches, then compare."""
    limit = timedelta(seconds=args.timeout)  # of a call
    tp_group = dist.new_group(timeout=limit, group_desc="tp")  # all ranks
    if 4 % args.ranks:
        report.say("Without flags, K, N and D are larger here, so that T divides K.")
    if report.size["S"] > args.seq_len:
        report.say(f"S is --seq-len {args.seq_len}, padded so that T divides it.")
    batches = make_batches(__doc__, args, args.steps)
    batches = [pad_batch(tokens, target, args.ranks) for tokens, target in batches]
    # From here on T divides S, also without TP: section 6 compares with unpadded ones.
    args.seq_len = report.size["S"]
    full = make_tied(args)

    runs = {}
    train = partial(train_transformer, batches=batches, args=args)
    train_tp = partial(train_with_tp, batches=batches, args=args, tp_group=tp_group)
    runs["without TP"] = train("without TP", copy.deepcopy(full))
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.guard("TP"):
        runs["TP"] = train_tp("TP", vocab_transformer(full, tp_group))
    with report.guard("TP + SP"):
        model = sp_transformer(full, tp_group, args.save_gathered)
        sum_up = partial(all_reduce_replicated_gradients, tp_group=tp_group)
        runs["TP + SP"] = train_tp("TP + SP", model, sum_up=sum_up)
    with report.guard("DTensor", is_formula=True), parallel.loss_parallel():
        model = planned_transformer(full, tp_group)
        runs["DTensor"] = train("DTensor", model, loss_of=planned_loss)

    show_training(report, runs, args)
    if "TP + SP" in runs:
        show_replicas(report, runs["TP + SP"], tp_group)
    show_gradients_sp(report, runs, args)
    show_partial_gradients(report, runs, full, batches[0], tp_group, args)
    show_communication_sp(report, args)
    with report.guard("one layer"):
        show_memory_sp(report, tp_group, args)
    show_padded_lengths(report, tp_group, args)


def sequence_sizes(args) -> dict[str, int]:
    """The letters of the shape legend. S is padded, so that T divides it."""
    size = transformer_sizes(args)
    size["S"] += -args.seq_len % args.ranks
    size["X"] = size["B"] * size["S"] * size["D"]
    size["p"] = 16 * size["L"] + (4 if args.tie else 5)  # parameter tensors
    return size


def train_with_tp(name, model, batches, args, tp_group, sum_up=None) -> TrainingRun:
    """Train a model whose vocabulary is split, sum_up(model) after each backward."""
    loss_of = partial(sharded_loss, tp_group=tp_group, vocab_size=args.vocab_size)
    run = train_transformer(name, model, batches, args, tp_group, loss_of, sum_up)
    trim_spare_rows(run)
    return run


def show_gradients_sp(report: Report, runs: dict[str, TrainingRun], args) -> None:
    """Gradients of step 1: all sharded parameters in one row, then replicated ones."""
    text = "all rows but the first: summed by TP + SP"
    report.section(f"Gradients of step 1: norms, relative diff; {text}")
    sharded = set()
    for run in runs.values():
        for name, p in run.model.named_parameters():
            if sharding_of(p):
                sharded.add(name)

    def row_of(name: str) -> str:
        if name in sharded:
            return "sharded parameters"
        if name.endswith("_proj.bias"):
            return "row-parallel biases"
        return module_of(name).rpartition(".")[2].replace("layernorm", "norm")

    gradients = values_of(runs, "gradients")
    report.compare("gradients", gradients, ALLOWED[args.dtype], fold=row_of)


def show_partial_gradients(report, runs, full, batch, tp_group, args) -> None:
    """Gradients of two replicated parameters before and after they are summed."""
    layer = f"layers.{args.layers - 1}"
    report.section(f"Two gradients of {layer} before and after the sum: 3 elements")
    if "TP + SP" not in runs:  # it raised an error
        return
    model = sp_transformer(full, tp_group, args.save_gathered)
    torch.manual_seed(args.seed + 1)  # the dropout masks of step 1
    # Without all_reduce_replicated_gradients afterwards.
    sharded_loss(model(batch[0]), batch[1], tp_group, args.vocab_size).backward()

    names = [f"{layer}.input_layernorm.weight", f"{layer}.self_attn.o_proj.bias"]
    full_gradients = runs["without TP"].gradients
    names = [name for name in names if name in full_gradients]  # not if edited out
    before = {name: model.get_parameter(name).grad for name in names}
    for name in names:
        is_full = rel_diff(before[name], full_gradients[name]) < 1e-3  # on this rank
        # If it were full on all of several ranks, their sum would be T times too large.
        is_wrong = args.ranks > 1 and all(of_all_ranks(is_full, tp_group))
        text = "all ranks have the full gradient"
        report.check(f"partial: {name} before the sum", float(is_wrong), text=text)

    positions = shard(torch.arange(args.seq_len), 0, tp_group)  # of this rank
    label = {"": f"rank {tp_group.rank()}"}
    label["positions"] = f"{positions[0]} to {positions[-1]}"
    rows = of_all_ranks(label | first_numbers(before, names), tp_group)
    for run in ("TP + SP", "without TP"):  # summed over ranks, and the reference
        label = {"": run, "positions": "all"}
        rows.append(label | first_numbers(runs[run].gradients, names))
    report.table(rows)
    diffs = [report.checks[f"gradients: {name}, TP + SP"]["diff"] for name in names]
    if args.ranks > 1 and max(diffs, default=1.0) <= ALLOWED[args.dtype]:
        report.say("A rank has the gradient of its positions; the sum is the full one.")


def first_numbers(tensors: dict[str, Tensor], names: list[str]) -> dict[str, str]:
    """The first numbers of some tensors, each in a column, named without layers.N."""
    row = {}
    for name in names:
        numbers = tensors[name].flatten()[:3].tolist()
        row[name.split(".", 2)[2]] = " ".join(f"{x:9.6f}" for x in numbers)
    return row


# ---- What is sent


def show_communication_sp(report: Report, args) -> None:
    """Collectives of each step, and what a rank of a ring sends for them."""
    n = 2 * args.layers + 1  # inputs that are gathered
    inputs = n, "(2·L + 1)·X·e"
    # gather_again gathers each input twice, the second time in backward.
    gathers = inputs if args.save_gathered else (2 * n, "2·(2·L + 1)·X·e")
    # The LayerNorms, one before each gather, have a weight and a bias each. Their
    # gradients stay Partial(): DTensor sums them at each use, first in float64, for its
    # norm. (It adds the biases of o_proj and down_proj to all positions, so their
    # gradients are complete.)
    clipping = 2 * n + 1, f"2·(2·L + 1)·8·D + {norm_bytes('p')}"
    formulas = {
        ("TP", "forward", "all-reduce", "tp"): inputs,
        ("TP", "backward", "all-reduce", "tp"): inputs,
        ("TP", "loss", "all-reduce", "tp"): (3, "3·B·S·e"),
        ("TP", "clipping", "all-reduce", "tp"): (1, "8"),  # a float64
        ("TP + SP", "forward", "all-gather", "tp"): inputs,
        ("TP + SP", "forward", "reduce-scatter", "tp"): inputs,
        ("TP + SP", "backward", "all-gather", "tp"): gathers,
        ("TP + SP", "backward", "reduce-scatter", "tp"): inputs,
        ("TP + SP", "loss", "all-reduce", "tp"): (3, "3·B·S·e"),
        ("TP + SP", "summing", "all-reduce", "tp"): (1, "(6·L + 2)·D·e"),
        ("TP + SP", "clipping", "all-reduce", "tp"): (1, "8"),
        ("DTensor", "forward", "all-gather", "tp"): inputs,
        ("DTensor", "forward", "reduce-scatter", "tp"): inputs,
        # Not twice as many: DTensor gathers and saves, as section 5 shows.
        ("DTensor", "backward", "all-gather", "tp"): inputs,
        ("DTensor", "backward", "reduce-scatter", "tp"): inputs,
        ("DTensor", "loss", "all-reduce", "tp"): (3, "3·B·S·e"),
        ("DTensor", "clipping", "all-reduce", "tp"): clipping,
        # AdamW uses a gradient three times; no sum is stored, so each use sums again.
        ("DTensor", "update", "all-reduce", "tp"): (6 * n, "3·2·(2·L + 1)·D·e"),
    }
    legend = "bytes: payload; ring: what a rank of a ring sends"
    report.section(f"Communication per step; {legend}")
    report.ledger(formulas, brief=["DTensor", "loss", "clipping"])
    if args.ranks > 1:
        show_rounds(report, args)


def show_rounds(report: Report, args) -> None:
    """Bytes that a rank of a ring sends forward and backward: TP + SP against TP."""
    # A gather or a reduce-scatter is one round of the ring, an all-reduce two. Per
    # gathered input TP makes 4 rounds, and TP + SP 5, or 4 with --save-gathered.
    sent = {"TP": 0, "TP + SP": 0}
    for (run, phase, collective, _), payloads in METER.calls.items():
        if run in sent and phase in ("forward", "backward"):
            sent[run] += ring(collective, sum(payloads), args.ranks) // args.steps
    if sent["TP"] and not {"TP", "TP + SP"} & set(report.raised):
        how = "gathers and saves" if args.save_gathered else "gathers inputs again"
        text = f"{sent['TP + SP'] / sent['TP']:.2f} times TP's bytes: it {how}."
        report.say(f"Forward and backward, TP + SP sends {text}")


# ---- What a layer saves for backward

# In one process, in bytes, in bfloat16 (arXiv:2205.05198, sec. 4.1). X = B·S·D elements
# of the layer's input, A = B·N·S·S attention weights, c bytes of a mean or of 1/σ.
SPLIT_BY_POSITIONS = {  # SP divides these by T
    "LayerNorms' inputs": "4·X",
    "their outputs": "4·X",  # inputs of q, k, v and of up_proj
    "dropout masks": "2·X",  # of the two blocks' outputs
    "mean, 1/σ": "4·B·S·c",  # not in the paper
}
SPLIT_BY_COLUMNS = {  # by heads or columns: TP divides these by T
    "q, k, v": "6·X",
    "input of o_proj": "2·X",
    "of GELU": "8·X",
    "of down_proj": "8·X",
    "softmax": "2·A",
    "its mask": "A",
    "after dropout": "2·A",
}
SUMS_SAVED = "10·X + 4·B·S·c", "24·X + 5·A"  # of the two


class LayerRun(NamedTuple):
    is_split: bool  # is the layer's input [B, s, D]?
    saved: str  # bytes that it saves for backward
    calls: int  # collectives in its backward, on several ranks


# Sums of the above. Recomputation: table 2 of the paper, and the end of its section 5;
# full recomputation repeats the collectives of forward in backward, 2 or 4 more.
LAYER_RUNS = {
    "without TP": LayerRun(False, "34·X + 5·A + 4·B·S·c", 0),
    "TP": LayerRun(False, "10·X + (24·X + 5·A)/T + 4·B·S·c", 2),
    "TP + SP": LayerRun(True, "(34·X + 5·A + 4·B·S·c)/T", 6),
    # It gathers and saves: the outputs of LayerNorms, 4·X, are not divided.
    "DTensor": LayerRun(True, "4·X + (30·X + 5·A + 4·B·S·c)/T", 4),
    "TP, selective": LayerRun(False, "10·X + 24·X/T + 4·B·S·c", 2),
    "TP + SP, selective": LayerRun(True, "(34·X + 4·B·S·c)/T", 6),
    "TP, full": LayerRun(False, "2·X", 4),
    "TP + SP, full": LayerRun(True, "2·X/T", 10),
}


def show_memory_sp(report: Report, tp_group, args) -> None:
    """What a layer saves for backward, without and with recomputation."""
    A = args.batch_size * args.heads * args.seq_len**2
    c = 2 if args.device == "cpu" else 4  # a GPU has mean and 1/σ in float32
    text = "bytes saved, calls in backward"
    report.section(f"One layer in one process, under TP, under TP + SP: {text}")
    show_terms(report, A, c)
    layer_runs = dict(LAYER_RUNS)
    if args.save_gathered:
        layer_runs["TP + SP"] = layer_runs["DTensor"]  # it gathers and saves as well
    measured = measure_layers(report, tp_group, args)
    rows = []
    for run, layer_run in layer_runs.items():
        if run not in measured:  # DTensor raised an error
            continue
        saved, calls = measured[run]
        cells = report.expect(f"memory: saved, {run}", saved, layer_run.saved, A=A, c=c)
        row = {"run": run, "saved": cells["bytes"], "formula": layer_run.saved}
        row["share"] = f"{saved / measured['without TP'][0]:.0%}"
        row.update(calls=f"{calls}", ok=cells["ok"])
        expected = layer_run.calls if args.ranks > 1 else 0  # one rank sends nothing
        text = f"{calls} collectives, the lesson has {expected}"
        name = f"calls: backward of a layer, {run}"
        if not report.check(name, abs(calls - expected), text=text, is_formula=True):
            row["calls"] += f"≠{expected}"
            if row["ok"] == "ok":
                row["ok"] = "≠"
        rows.append(row)
    report.table(rows)
    text = "Recomputed: selective, attention's core; full, the layer."
    report.say(f"share: of one process. {text}")


def show_terms(report: Report, A: int, c: int) -> None:
    """The terms of 34·X + 5·A + 4·B·S·c, by tensor, and the sum of each part."""
    size = report.size | {"A": A, "c": c}
    parts = []
    for part, total in zip((SPLIT_BY_POSITIONS, SPLIT_BY_COLUMNS), SUMS_SAVED):
        terms = [f"{formula} ({name})" for name, formula in part.items()]
        parts.append(f"{' + '.join(terms)} = {total}")
    total = evaluate(" + ".join(SUMS_SAVED), size)
    report.say(
        f"In bfloat16, K = N. X = B·S·D = {size['X']:,}, A = B·N·S·S = {A:,} attention "
        f"weights, c = {c} bytes. Split by positions: {parts[0]}. By heads or columns: "
        f"{parts[1]}. Together {total:,}"
    )


def measure_layers(report: Report, tp_group, args) -> dict[str, tuple[int, int]]:
    """Bytes that each layer saves in forward, and its collectives in backward."""
    # As in the paper: bfloat16, dropout, and as many key/value heads as heads.
    config = Config(args.vocab_size, args.hidden, args.heads, args.heads, layers=1,
                    seq_len=args.seq_len, dropout=0.1)  # fmt: skip
    model = Transformer(config).to(args.device, torch.bfloat16)
    full = model.layers[0]
    layers = {"without TP": full, **layer_variants(full, tp_group)}
    if args.save_gathered:
        layers["TP + SP"] = layer_with_sp(full, tp_group, gather_and_save)
    if "DTensor" not in report.raised:
        layers["DTensor"] = planned_transformer(model, tp_group).layers[0]

    tables = (model.cos, model.sin, model.future)
    x_BSD = torch.randn(args.batch_size, args.seq_len, args.hidden)
    x_BSD = x_BSD.to(args.device, torch.bfloat16)
    measured = {}
    for run, layer in layers.items():
        x = shard(x_BSD, 1, tp_group) if LAYER_RUNS[run].is_split else x_BSD.clone()
        x.requires_grad_()
        held = [*layer.parameters(), *tables]
        saved = saved_bytes(partial(layer, x, tables), held)
        y = layer(x, tables)
        before = METER.count
        with METER.phase(f"one layer, {run}", "backward"):
            y.backward(torch.ones_like(y))
        measured[run] = saved, METER.count - before
    return measured


def layer_variants(full: DecoderLayer, tp_group) -> dict[str, nn.Module]:
    """One layer under TP and under SP, without and with recomputation."""
    return {
        "TP": layer_with_tp(full, tp_group),
        "TP + SP": layer_with_sp(full, tp_group),
        "TP, selective": recompute_core(layer_with_tp(full, tp_group)),
        "TP + SP, selective": recompute_core(layer_with_sp(full, tp_group)),
        "TP, full": Checkpointed(layer_with_tp(full, tp_group)),
        "TP + SP, full": Checkpointed(layer_with_sp(full, tp_group)),
    }


def layer_with_tp(full: DecoderLayer, tp_group) -> DecoderLayer:
    layer = copy.deepcopy(full)
    parallelize_layer(layer, tp_group)
    return layer


def layer_with_sp(full: DecoderLayer, tp_group, gather=gather_again) -> DecoderLayer:
    layer = layer_with_tp(full, tp_group)
    split_sequence(layer, tp_group, gather)
    return layer


def recompute_core(layer: DecoderLayer) -> DecoderLayer:
    layer.self_attn.core = Checkpointed(layer.self_attn.core)
    return layer


# ---- Lengths that T does not divide


def show_padded_lengths(report: Report, tp_group, args) -> None:
    """Lengths that T does not divide: padded under SP, unpadded without TP."""
    args = copy.copy(args)
    args.dtype = "float64"
    args.dropout = 0.0  # a mask is sampled by shape: padding would change it
    S = args.seq_len
    args.seq_len = 2 * S + 1 + args.ranks  # room for the longest one and its padding
    full = make_tied(args)
    sum_up = partial(all_reduce_replicated_gradients, tp_group=tp_group)

    losses = {"without TP": {}, "TP + SP": {}}
    gradients = {"without TP": {}, "TP + SP": {}}
    report.section("Losses for lengths 1, S − 1, 2·S + 1, padded; float64, no dropout")
    with report.guard("padded lengths"):
        for length in sorted({1, max(1, S - 1), 2 * S + 1}):
            args.seq_len = length
            batch = make_batches(__doc__, args, 1)[0]
            padded = pad_batch(*batch, args.ranks)
            label = f"length {length}, padded to {padded[0].shape[1]}"
            one = train_transformer(label, copy.deepcopy(full), [batch], args)
            model = sp_transformer(full, tp_group, args.save_gathered)
            sp = train_with_tp(label, model, [padded], args, tp_group, sum_up)
            for name, run in {"without TP": one, "TP + SP": sp}.items():
                losses[name][f"loss, {label}"] = run.losses["loss, step 1"]
                for parameter, gradient in run.gradients.items():
                    gradients[name][f"{label}: dL/d {parameter}"] = gradient
        report.compare("lengths", losses, ALLOWED["float64"], brief=True)
        fold = lambda name: name.partition(":")[0]  # a row per length
        report.compare(
            "length gradients", gradients, ALLOWED["float64"], brief=True, fold=fold
        )


# ==== CARRIED OVER from 00, unchanged
# region

from torch.distributed.device_mesh import DeviceMesh


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
    dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    (lesson 00)"""
    x = x.detach().contiguous()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


def of_all_ranks(value, group) -> list:
    """The value of every rank, in order: for what is printed (lesson 00)."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


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


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # x unchanged, as a new node of autograd's graph

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of T partial sums of dL/dx.
        # For each argument of forward: its gradient, and None for the group.
        return all_reduce(partial_grad, ctx.tp_group), None


def shard_parameter(full: Tensor | None, dim: int | None = None, group=None):
    """This rank's slice of a parameter, which remembers how it was sharded.

    (lesson 01)"""
    if full is None:
        return None
    if dim is not None:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.sharding = None if dim is None else (dim, group)  # for sharding_of
    return p


def sharding_of(p: Tensor) -> tuple | None:
    """How a parameter is sharded: (dim, group); None if it is replicated.

    (lesson 01)"""
    return getattr(p, "sharding", None)


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
        if self.gather_output:  # the naive split only, see below
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
        self.reduce = ReduceFromTP.apply  # g; lesson 04 replaces it
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
    mlp = copy.deepcopy(full)  # for its forward: both layers are replaced
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


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


class AllGatherWithGrad(GatherFromTP):
    """The same forward, but different work follows: reduce-scatter backward.

    (lesson 01)"""

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.tp_group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


def unshard(x: Tensor, like: Tensor) -> Tensor:
    """The full tensor from all ranks' slices, sharded as the parameter `like` is.

    (lesson 01)"""
    if isinstance(x, DTensor):
        return x.full_tensor().clone()  # an all-gather if x is sharded
    if sharding_of(like):
        return all_gather(x.detach(), *sharding_of(like))
    return x.detach().clone()


def values_of(runs: dict, field: str) -> dict:
    """One field of each run: run → its values (lesson 01)."""
    return {run: getattr(result, field) for run, result in runs.items()}


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
    """nn.Dropout, but the mask is sampled as in ShardedDropout below (lesson 02)."""

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
        # A function under a name: TP puts another here, with one f for all three.
        self.project_qkv = apply_each
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
        if not sharding_of(p):
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


def transformer_sizes(args) -> dict[str, int]:
    """The letters of the shape legend. ValueError for a flag that does not fit.

    (lesson 02)"""
    T = getattr(args, "tp", args.ranks)  # later lessons have a flag --tp
    # A flag changes only what it names: defaults depend on nothing but the ranks.
    K = T * math.ceil(4 / T)
    for name, default in {"kv_heads": K, "heads": 2 * K, "hidden": 16 * K}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    must_divide(args, "kv_heads", T, "ranks (or fewer: beyond/09_shared_heads.py)")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of 2 numbers; take --hidden 4")
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if not 0 <= args.dropout <= 0.9:  # 1/(1 − p) scales rounding errors
        raise ValueError(f"--dropout {args.dropout}: must be at least 0, at most 0.9")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be greater than 0")
    return dict(
        B=args.batch_size, S=args.seq_len, D=args.hidden, N=args.heads,
        K=args.kv_heads, H=args.hidden // args.heads, F=4 * args.hidden,
        V=args.vocab_size, L=args.layers, T=T, e=getattr(torch, args.dtype).itemsize,
    )  # fmt: skip


def add_model_flags(parser) -> None:
    """The flags of the model and of its training (lesson 02)."""
    for flag in ("--hidden", "--heads", "--kv-heads"):
        parser.add_argument(flag, type=positive, help="by default as the ranks need it")
    sizes = {"layers": 2, "vocab-size": 257, "batch-size": 4, "seq-len": 32, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dropout", type=float, default=0.1, help="probability")
    parser.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")


def make_batches(text: str, args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens and targets, each [B, S] int64 (lesson 02)."""
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
        tokens_BS = rows[:, :-1].clone()  # a view would keep S + 1 positions in memory
        target_BS = rows[:, 1:].masked_fill(rows[:, 1:] == PAD, IGNORE)
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
    norm_of=global_norm,
) -> TrainingRun:  # fmt: skip
    """Train one step on each batch (lesson 02)."""
    losses = {}
    norms = {}
    # AdamW divides by a gradient's size: a tiny eps turns rounding errors into steps,
    # which only --dtype float64 keeps small.
    # foreach, the default on GPUs, cannot update DTensors and plain tensors together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, foreach=False)

    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        # One seed for all ranks, so that they sample the same dropout masks.
        torch.manual_seed(args.seed + step)
        optimizer.zero_grad()

        # METER.phase names the collectives inside, for the communication table.
        with METER.phase(name, "forward"):
            logits = model(tokens_BS)
        with METER.phase(name, "loss"):
            loss = loss_of(logits, target_BS)
        with METER.phase(name, "backward"):
            loss.backward()
        if after_backward is not None:
            with METER.phase(name, "summing"):
                after_backward(model)
        if step == 1:
            gradients = unshard_model(model, "grad")

        with METER.phase(name, "clipping"):
            if tp_group is None:
                norm = norm_by_pytorch(model)
                clip_by_pytorch(model, args.clip, norm)
            else:
                norm = norm_of(model, tp_group)
                clip_gradients(model, args.clip, norm)

        # Each rank updates what it holds, and sends nothing. Replicas stay equal only
        # because they start equal and get equal gradients. Nothing else enforces it.
        with METER.phase(name, "update"):
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
        # No gradient: an empty tensor, which differs if another run has one.
        tensors[name] = torch.empty(0) if x is None else unshard(x, p)
    return tensors


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


def clip_by_pytorch(model: nn.Module, max_norm: float, norm: float) -> None:
    """PyTorch's own clipping, with which clip_gradients is compared (lesson 02)."""
    norm = torch.tensor(norm, dtype=torch.float64)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm, foreach=False)


def show_training(report: Report, runs: dict[str, TrainingRun], args) -> None:
    """Losses, gradient norms before clipping, and the parameters after training.

    (lesson 02)"""
    title = "Losses, gradient norms per step; after training, parameters and replicas"
    report.section(title)
    allowed = ALLOWED[args.dtype]
    report.compare("losses", values_of(runs, "losses"), ALLOWED_LOSS[args.dtype])
    # A wrong factor in all gradients hardly changes AdamW's losses, but the norms.
    report.compare("norms", values_of(runs, "norms"), allowed, brief=True)
    parameters = values_of(runs, "parameters")
    in_one_row = lambda name: "all parameters"
    report.compare("parameters", parameters, allowed, brief=True, fold=in_one_row)


def show_replicas(report: Report, run: TrainingRun, tp_group) -> None:
    """After training, replicated tensors must be bitwise identical on all ranks.

    (lesson 02)"""
    tensors = {}
    for name, p in run.model.named_parameters():
        if not sharding_of(p):
            tensors[name] = p
    # Each rank computed its losses and norms itself, from replicas and sums.
    for kind in ("losses", "norms"):
        numbers = list(getattr(run, kind).values())
        tensors[kind] = p.new_tensor(numbers, dtype=torch.float64)
    report.check_replicas(tensors, tp_group)


def module_of(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.*.mlp.up_proj (lesson 02)."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join(parts[:-1]) or name


def norm_bytes(tensors: str) -> str:
    """Bytes that PyTorch sums: one float64 per tensor; before torch 2.11 one.

    (lesson 02)"""
    return f"8·{tensors}" if torch.__version__ >= (2, 11) else "8"


# endregion


# ==== CARRIED OVER from 03, unchanged
# region


def add_spare_rows(full: nn.Module, ranks: int) -> nn.Module:
    """Return a copy of an embedding or a head, with rows of zeros at the end.

    (lesson 03)"""
    longer = copy.deepcopy(full)
    for name, p in full.named_parameters():
        spare = -len(p) % ranks  # V = 257, T = 4: 3 rows, so that each rank has 65
        zeros = p.new_zeros(spare, *p.shape[1:])
        setattr(longer, name, nn.Parameter(torch.cat([p.detach(), zeros])))
    return longer


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary: no rank has its row.

    (lesson 03)"""
    # Python waits for a GPU's min and max here. Fast code leaves this check out.
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        text = f"tokens {tokens.min()} to {tokens.max()}: the vocabulary is 0 to "
        raise ValueError(text + str(vocab_size - 1))


def to_local(tokens: Tensor, v: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's index on a rank, and whether that rank has the token.

    (lesson 03)"""
    index = tokens - rank * v
    is_local = (index >= 0) & (index < v)
    return index.where(is_local, 0), is_local


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group (lesson 03)."""

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size = full.num_embeddings
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        longer = add_spare_rows(full, tp_group.size())
        self.weight = shard_parameter(longer.weight, 0, tp_group)  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        check_tokens(tokens_BS, self.vocab_size)
        v = len(self.weight)
        row_BS, is_local_BS = to_local(tokens_BS, v, self.tp_group.rank())
        x_BSD = F.embedding(row_BS, self.weight)
        # Every token is on one rank, and the other ranks add 0: the sum is its row.
        partial_x_BSD = x_BSD * is_local_BS.unsqueeze(-1)
        return self.reduce(partial_x_BSD, self.tp_group)


def vocab_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """Return lesson 02's parallel model, with embedding and head also sharded.

    (lesson 03)"""
    model = tp_transformer(full, tp_group)
    model.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)
    longer_head = add_spare_rows(full.lm_head, tp_group.size())
    model.lm_head = ColumnParallelLinear(longer_head, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        # One parameter with two uses: autograd adds up the gradients of both.
        model.lm_head.weight = model.embed_tokens.weight
    for p in [model.embed_tokens.weight, *model.lm_head.parameters()]:
        p.rows = full.config.vocab_size  # all later rows are spare; RUN removes them
    return model.train(full.training)  # in eval mode if full is


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The full loss: spare columns, ignored positions, label smoothing, and backward.

    (lesson 03)"""

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        spare_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.masked_fill(spare_v, float("-inf"))  # exp(−∞) = 0
        x_BSv = x_BSv.to(torch.promote_types(x_BSv.dtype, torch.float32))
        # The max has no gradient: whatever number is subtracted, the loss is the same.
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # IGNORE is in no rank's range, so all ranks add 0 for it.
        column_BS, is_local_BS = to_local(target_BS, v, tp_group.rank())
        # This rank's part of Σ q·x. Without smoothing it is x at the target, or 0.
        partial_qx_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        partial_qx_BS.masked_fill_(~is_local_BS, 0)
        ctx.smoothing = smoothing
        ctx.smooth_target = smoothing / vocab_size  # ε/V, for every token
        if smoothing:  # every token counts; spare columns (−∞) are left out
            partial_qx_BS *= 1 - smoothing
            partial_qx_BS += ctx.smooth_target * x_BSv.masked_fill(spare_v, 0).sum(-1)
        loss_BS = sum_BS.log() - all_reduce(partial_qx_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        valid_BS = target_BS != ignore  # True where a position has a target
        ctx.save_for_backward(softmax_BSv, column_BS, is_local_BS, valid_BS, spare_v)
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(valid_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # Nothing is sent: upstream_BS is equal on all ranks, because they all computed
        # the same loss, and softmax − q needs this rank's columns only.
        softmax_BSv, column_BS, is_local_BS, valid_BS, spare_v = ctx.saved_tensors
        grad_BSv = (softmax_BSv - ctx.smooth_target).masked_fill(spare_v, 0)
        extra_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)  # at the target
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -extra_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored position is 0, but its softmax − q is not.
        grad_BSv = grad_BSv.where(valid_BS.unsqueeze(-1), 0)
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

    (lesson 03)"""
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def mean_over_targets(loss_BS: Tensor, target_BS: Tensor) -> Tensor:
    """Return the mean over positions with a target; nan if none has, as in PyTorch.

    (lesson 03)"""
    return loss_BS.sum() / (target_BS != IGNORE).sum()


def sharded_loss(logits_BSv, target_BS, tp_group, vocab_size, smoothing=0.0) -> Tensor:
    """Return the mean loss, from sharded logits (lesson 03)."""
    loss_BS = vocab_parallel_cross_entropy(
        logits_BSv, target_BS, tp_group, vocab_size, label_smoothing=smoothing
    )
    return mean_over_targets(loss_BS, target_BS)


def make_tied(args) -> Transformer:
    """Return lesson 02's model; with --tie, head and embedding share one weight.

    (lesson 03)"""
    full = make_transformer(args)
    if args.tie:
        # An embedding starts with a standard deviation of 1: logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


def trim_spare_rows(run: TrainingRun) -> dict[str, Tensor]:
    """Remove spare rows from a run's gradients and parameters, and return them.

    (lesson 03)"""
    spare = {}
    for name, p in run.model.named_parameters():
        if hasattr(p, "rows"):
            spare[f"gradients: {name}"] = run.gradients[name][p.rows :]
            run.gradients[name] = run.gradients[name][: p.rows]
            spare[f"parameters: {name}"] = run.parameters[name][p.rows :]
            run.parameters[name] = run.parameters[name][: p.rows]
    return spare


# endregion


# ==== MEASURE, the same in every lesson: it counts, compares and prints
# region
# Skip it at first. Meter counts, Report compares and prints, launch starts and ends.

import argparse
import json
import os
import signal
import sys
import textwrap
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode


class Meter(TorchDispatchMode):
    """Counts every collective of this rank, also DTensor's and those of backward.

    Within `with METER`, PyTorch calls __torch_dispatch__ instead of each operation.
    calls: (run, phase, collective, axis) → payloads. A payload is the bytes of the full
    tensor: of an all-gather what it returns, of a reduce-scatter what it takes.
    """

    def __init__(self):
        super().__init__()
        self.calls = {}
        self.ranks = {}  # axis → number of ranks of this rank's group along it
        self.label = None  # (run, phase)
        self.count = 0  # of all collectives, in order
        self.last = "none"  # the latest one, for the report of an error

    @contextmanager
    def phase(self, run: str, phase: str):
        """Within `with`: collectives are counted as this phase of this run."""
        before, self.label = self.label, (run, phase)
        try:
            with self:
                yield
        finally:
            self.label = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into local operations first
        collective, group = collective_of(func, args)
        if group is None or group.size() == 1:  # one rank sends nothing
            return func(*args, **(kwargs or {}))
        run, phase = self.label
        axis = group.group_desc
        self.ranks[axis] = group.size()
        self.count += 1
        self.last = f"number {self.count}, {collective} over {axis}, {run} {phase}"
        out = func(*args, **(kwargs or {}))
        if collective != "recv":  # it is counted where it is sent
            payload = max(nbytes(args[0]), nbytes(args[1]), nbytes(out))
            self.calls.setdefault((run, phase, collective, axis), []).append(payload)
        return out


METER = Meter()
# PyTorch has several operations of each kind: allreduce_, all_reduce, …
KINDS = "all-reduce all-gather reduce-scatter broadcast all-to-all send recv".split()


def collective_of(func, args) -> tuple[str, dist.ProcessGroup | None]:
    """The collective that a PyTorch operation is, and its group; None if it is none."""
    namespace, _, name = func._schema.name.partition("::")
    if "c10d" not in namespace or name == "barrier":
        return name, None
    group = None
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            group = dist.ProcessGroup.unbox(x)
    if isinstance(args[-1], str):  # DTensor names its group
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    plain = name.replace("_", "")
    kinds = [kind for kind in KINDS if plain.startswith(kind.replace("-", ""))]
    return (kinds[0].replace("send", "send/recv") if kinds else name), group


def nbytes(x) -> int:
    """Bytes of a tensor (a DTensor: of this rank's part), or of all in a list."""
    if isinstance(x, (list, tuple)):
        return sum(nbytes(part) for part in x)
    return getattr(x, "_local_tensor", x).nbytes if isinstance(x, Tensor) else 0


def saved_bytes(compute, held: list[Tensor]) -> int:
    """Bytes that autograd saves in compute(): each storage once, without those held."""
    storage_of = lambda x: getattr(x, "_local_tensor", x).untyped_storage()
    saved = {}  # its address → the bytes of a storage

    def pack(tensor):
        saved[storage_of(tensor).data_ptr()] = storage_of(tensor).nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    for x in held:
        saved.pop(storage_of(x).data_ptr(), None)
    return sum(saved.values())


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula: of the printed text itself, so the two cannot differ."""
    return round(eval(formula.replace("·", "*"), {"log2": math.log2}, size))


def ring(collective: str, payload: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends (lesson 00)."""
    if collective in ("send/recv", "all-to-all-v"):  # -v: what leaves, by beyond/16
        return payload
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return rounds * payload * (ranks - 1) // ranks


# Allowed relative differences. A loss is a mean, so its rounding errors are smaller.
ALLOWED = {"float32": 1e-5, "float64": 1e-12}
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}
# A difference is divided by the expected size, but at least by this: a smaller gradient
# is 0 but for rounding errors, a parameter moves 0.009 in three AdamW steps of 0.003.
LEAST = {"parameters": 0.009, "gradients": 1e-4}


def double(x) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).detach().cpu()


def rel_diff(got, expected, least=0.0) -> float:
    """max|got − expected| / max(max|expected|, least); inf for nan or another shape."""
    got, expected = double(got), double(expected)
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    diff = (got - expected).abs().max() / expected.abs().max().clamp(min=least)
    return math.inf if diff.isnan() else diff.item()


def difference(got, expected) -> str:
    """How a wrong tensor differs, if that can be said in words; otherwise ""."""
    got, expected = double(got), double(expected)
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}, expected {list(expected.shape)}"
    if got.numel() <= 4:
        text = lambda x: " ".join(f"{value:.7g}" for value in x.flatten().tolist())
        return f"{text(got)}, expected {text(expected)}"
    factor = ((got * expected).sum() / (expected * expected).sum()).item()
    if rel_diff(got, factor * expected) < 1e-4 and abs(factor - 1) > 1e-3:
        return f"{factor:.4g} times the expected tensor"
    return ""


def norm(values: list, digits=7) -> str:
    """The norm of several values as one vector, printed."""
    return f"{math.hypot(*[double(x).norm() for x in values]):#.{digits}g}"


class Report:
    """Values that differ from the run without TP are FAIL. A formula is of the lesson's
    own model and split: in an edited one ≠ marks what differs, and the verdict is PASS.
    """

    def __init__(self, size: dict[str, int], steps: int):
        self.size = size  # letter → number
        self.steps = steps
        self.checks = {}  # "kind: name" → a comparison
        self.raised = []  # runs that ended with an error
        self.rows = []  # of all tables, with the number of the section
        self.sent = {}  # run → bytes that a rank of a ring sends per step
        self.sections = 0

    def section(self, title: str) -> None:
        self.sections += 1
        print(f"\n{self.sections}  {title}", flush=True)

    def say(self, text: str) -> None:
        print(textwrap.indent(textwrap.fill(text, 85), "   "), flush=True)

    def table(self, rows: list[dict]) -> None:
        """Rows with the same columns: texts to the left, numbers to the right."""
        self.rows += [dict(row, section=self.sections) for row in rows]
        lines = [""] * (len(rows) + 1)
        for name in rows[0] if rows else []:
            cells = [name] + [str(row[name]) for row in rows]
            width = max(len(cell) for cell in cells)
            pad = str.rjust if cells[1][:1].isdigit() else str.ljust
            for i, cell in enumerate(cells):
                lines[i] += pad(cell, width) + "  "
        print("".join(f"   {line.rstrip()}\n" for line in lines if line), end="")

    def check(self, name, diff, allowed=0.0, text="", is_formula=False) -> bool:
        """Record a comparison, named "kind: what is compared". Does it hold here?"""
        if name in self.checks:  # one would hide the other
            raise ValueError(f"two checks are named {name}")
        text = text or f"off by {diff:.2g}, allowed {allowed:.0e}"
        check = dict(name=name, kind=name.partition(":")[0], diff=diff, allowed=allowed)
        self.checks[name] = dict(check, text=text, is_formula=is_formula)
        return diff <= allowed  # False for nan

    def agree(self, name: str, got, expected, allowed: float) -> float:
        """Check a tensor against its reference. Returns their relative difference."""
        diff = rel_diff(got, expected, LEAST.get(name.partition(":")[0], 0.0))
        text = "" if diff <= allowed else difference(got, expected)
        self.check(name, diff, allowed, text)
        return diff

    def compare(self, kind, runs: dict, allowed: float, brief=False, fold=str) -> None:
        """Compare values of several runs with the first run: run → name → value.

        A row has the norm of each value and the largest difference of any element.
        brief: rows that all hold are one line, which names what is compared.
        fold: name → its row (str: its own); all values of a row are compared.
        """
        first = next(iter(runs))
        rows = {}  # row → names of its values
        diffs = {}  # (row, run) → the largest difference
        for run, values in runs.items():
            for name in runs[first] | values:  # your edit may have added or removed one
                row = fold(name)
                rows.setdefault(row, {})[name] = None
                if run != first:
                    got = values.get(name, math.nan)
                    expected = runs[first].get(name, math.nan)
                    diff = self.agree(f"{kind}: {name}, {run}", got, expected, allowed)
                    diffs[row, run] = max(diff, diffs.get((row, run), 0.0))
        worst = max(diffs.values(), default=0.0)
        if brief and diffs and worst <= allowed:
            names = list(runs[first])
            name = names[0] if len(names) == 1 else f"all {len(names)}"
            return self.say(f"{kind}: {name} as {first}; largest diff {worst:.1e}")
        raised = [] if brief else self.raised
        cells = lambda row: cells_of(row, rows[row], runs, diffs, allowed, raised)
        self.table([cells(row) for row in rows])

    def check_replicas(self, tensors: dict[str, Tensor], group) -> None:
        """After training, what is replicated must be bitwise identical on all ranks."""
        axis = group.group_desc
        differ = []
        for name, x in tensors.items():
            copies = all_gather(x[None], 0, group)
            diff = max(rel_diff(copy, copies[0]) for copy in copies)
            text = f"ranks of {axis} differ by {diff:.2g}"
            if not self.check(f"replicas: {name}, {axis}", diff, text=text):
                differ.append(name)
        names = f" ({', '.join(tensors)})" if len(tensors) < 4 else ""
        text = f"{len(tensors) - len(differ)} of {len(tensors)}{names} are"
        self.say(f"Replicas over {axis}: {text} bitwise identical after training.")
        if differ:
            self.say(f"✗ They differ between ranks: {', '.join(differ)}")

    def expect(self, name: str, got: int, formula: str, **size: int) -> dict:
        """Check measured bytes against a formula; size: letters that differ here."""
        predicted = evaluate(formula, self.size | size)
        text = f"{got:,} bytes, the lesson's formula {formula} gives {predicted:,}"
        holds = self.check(name, abs(got - predicted), text=text, is_formula=True)
        ok = "ok" if holds else f"≠{predicted:,}"
        return {"bytes": f"{got:,}", "formula": formula, "ok": ok}

    def ledger(self, formulas: dict[tuple, tuple[int, str]], brief=()) -> list[dict]:
        """Calls and bytes per step, as counted, against the lesson's formulas.

        formulas: (run, phase, collective, axis) → (calls, formula of the bytes).
        brief: runs or phases whose rows are one line if they hold. Returns the others.
        """
        if dist.get_world_size() == 1:
            self.say("One rank sends nothing.")
            return []
        rows = []
        for call in formulas | METER.calls:  # what no formula predicts has a row, too
            if call[0] not in self.raised:
                calls, formula = formulas.get(call, (0, "0"))
                rows.append(self.ledger_row(call, calls, formula))
        is_brief = lambda row: row["run"] in brief or row["phase"] in brief
        shown = [row for row in rows if row["ok"] != "ok" or not is_brief(row)]
        for column in ("run", "axis"):  # one that says the same in all rows is left out
            if len({row[column] for row in shown}) == 1:
                for row in shown:
                    del row[column]
        self.table(shown)
        if len(shown) < len(rows):
            count = len(rows) - len(shown)
            self.say(f"Rows that hold, not shown: {count} of {', '.join(brief)}")
        return shown

    def ledger_row(self, call: tuple, calls: int, formula: str) -> dict:
        """Check one kind of call: how many, and their bytes. Cells of a table."""
        run, phase, collective, axis = call
        name = " ".join(call)
        payloads = METER.calls.get(call, [])
        payload = sum(payloads) // self.steps
        sent = ring(collective, payload, METER.ranks.get(axis, 1))
        self.sent[run] = self.sent.get(run, 0) + sent
        row = {"run": run, "phase": phase, "collective": collective, "axis": axis}
        row["calls"] = f"{len(payloads) / self.steps:g}"
        row.update(self.expect(f"bytes: {name}", payload, formula))
        row.update(ring=f"{sent:,}", ok=row.pop("ok"))  # the last column
        text = f"{row['calls']} calls per step, the lesson has {calls}"
        diff = abs(len(payloads) / self.steps - calls)
        if not self.check(f"calls: {name}", diff, text=text, is_formula=True):
            row["calls"] += f"≠{calls}"
            row["ok"] = row["ok"].replace("ok", "≠")
        return row

    @contextmanager
    def guard(self, run: str, is_formula=False):
        """Within `with`: an error that all ranks raise ends this run, not the lesson.

        is_formula: True for a plan of PyTorch's, which may not fit an edited model.
        """
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [x for x in frames if x.filename == os.path.abspath(LESSON)]
            at = [x for x in own or frames if x.name != "__torch_dispatch__"][-1]
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            text += f" (line {at.lineno}, in {at.name})"  # the lesson's, not METER's
            said = f"rank {dist.get_rank()}, {run}: {text}; last call: {METER.last}"
            print(said, file=sys.stderr, flush=True)
            if not is_raised_by_all(run, error, at.lineno):
                raise
            self.raised.append(run)
            self.check(f"runs: {run}", math.inf, 0.0, text, is_formula)

    def verdict(self, args) -> str:
        """Print PASS, or what failed on any rank. Returns "", or what was printed."""
        checks = self.of_all_ranks()
        word, lines = words_of_verdict(checks)
        text = "".join(f"\n{fill(line)}" for line in lines)
        print(f"\n{text.strip()}", flush=True)
        if args.json and dist.get_rank() == 0:
            data = dict(verdict=word, ranks=args.ranks, dtype=args.dtype)
            data.update(size=self.size, checks=checks, rows=self.rows)
            args.json.write_text(json.dumps(data, indent=1))
        return text if word == "FAIL" else ""

    def of_all_ranks(self) -> list[dict]:
        """The checks of all ranks: each with the ranks on which it fails."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.checks)
        merged = {}
        for rank, checks in enumerate(everyone):
            for name, check in checks.items():
                found = merged.setdefault(name, dict(check, ranks=[]))
                if not check["diff"] <= check["allowed"]:  # also nan
                    found["ranks"].append(rank)
                if check["diff"] > found["diff"]:  # the worst rank says what is wrong
                    found.update(check)
        return list(merged.values())


def cells_of(row, names, runs: dict, diffs: dict, allowed: float, raised: list) -> dict:
    """A row of Report.compare: each run's norm, and the largest difference."""
    cells = {"name": row}
    for run, values in runs.items():
        values = [values.get(name, math.nan) for name in names]
        holds = diffs.get((row, run), 0.0) <= allowed
        cells[run] = norm(values) if holds else norm(values, 6) + "✗"
    cells.update(dict.fromkeys(raised, "raised"))
    if diffs:
        worst = max(diffs.get((row, run), 0.0) for run in runs)
        cells.update(diff=f"{worst:.1e}", ok="ok" if worst <= allowed else "✗")
    return cells


def is_raised_by_all(run: str, error: Exception, line: int) -> bool:
    """Do all ranks raise this error here, after the same number of collectives?"""
    is_lost = "Timed out" in str(error) or "Connection" in str(error)
    store = dist.distributed_c10d._get_default_store()
    what = f"{type(error)} {line} {METER.count} {is_lost}"
    store.set(f"{run}/{dist.get_rank()}", what)
    if is_lost:
        time.sleep(2)  # a rank that has raised another error ends first
        return False
    keys = [f"{run}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(keys, 2 * store.timeout)  # others may raise only after --timeout
    return len({store.get(key) for key in keys}) == 1


LESSON = Path(sys.argv[0])  # the script that was started
fill = textwrap.TextWrapper(88, subsequent_indent="  ", break_on_hyphens=False).fill
WHERE = "Where it begins: torchrun --standalone --nproc_per_node="  # after a failure
WHERE += f"{os.environ.get('WORLD_SIZE', 2)} tools/doctor.py {' '.join(sys.argv)}"
# Kinds of checks, as a step computes what they compare: the first that fails is nearest
# the cause, the others follow from it. Kinds that are not listed come last.
CAUSES = "runs outputs gradients replicas norms losses parameters".split()


def words_of_verdict(checks: list[dict]) -> tuple[str, list[str]]:
    """PASS or FAIL, and the lines to print; the last one says it."""
    formulas = []  # that do not hold
    kinds = {}  # "gradients" → its checks that failed
    for check in checks:
        if check["ranks"] and check["is_formula"]:
            formulas.append(check)
        elif check["ranks"]:
            kinds.setdefault(check["kind"], []).append(check)
    lines = [f"≠ {x['name']}: {x['text']}" for x in formulas[: 3 if kinds else 99]]
    if kinds:
        text = ", ".join(f"{kind} ({len(kinds[kind])})" for kind in kinds)
        last = f"FAIL  {LESSON.stem}  wrong: {text}. {WHERE}"
        return "FAIL", lines + name_causes(kinds) + [last]
    worst = max((check["diff"] for check in checks if not check["ranks"]), default=0.0)
    last = f"PASS  {LESSON.stem}  {len(checks)} checks, worst difference {worst:.1e}"
    if formulas:
        last += f"; {len(formulas)} formulas describe another model or split"
    return "PASS", lines + [last]


def name_causes(kinds: dict[str, list[dict]]) -> list[str]:
    """A line for each kind of failed check, causes before what follows from them."""
    is_forward = any("loss, step 1," in x["name"] for x in kinds.get("losses", []))
    order = CAUSES + list(kinds)
    if is_forward:  # that loss is before any update, and gradients follow from it
        order.insert(order.index("gradients"), "losses")
    lines = []
    for kind in sorted(kinds, key=order.index):
        check = kinds[kind][0]
        if kind == "gradients" and not is_forward:
            # Backward begins at the output: the last one of a run is nearest the cause.
            run = check["name"].rpartition(", ")[2]
            check = [x for x in kinds[kind] if x["name"].endswith(run)][-1]
        lines.append(f"✗ {check['name']}: {check['text']}, on ranks {check['ranks']}")
    return lines


def launch(main, sizes, parser: argparse.ArgumentParser) -> None:
    """One rank: flags, process group, lesson, verdict, exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it where it waits
    with suppress(AttributeError, OSError):  # Linux: a message stops no computing rank
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know ≠
    try:
        args = read_flags(parser)
        report = Report(sizes(args), getattr(args, "steps", 1))  # sizes may refuse one
    except (ValueError, OSError) as error:
        refuse(error)
    if os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # every rank checks, rank 0 prints
    backend = "gloo" if args.device == "cpu" else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(args.device)
    torch.set_num_threads(1)  # ranks share the cores
    limit = timedelta(seconds=args.timeout)
    try:
        # If torchrun restarts the ranks, their store has what the last attempt wrote.
        store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, store)
        dist.init_process_group(backend, None, limit, ranks, rank, store)
        mesh = getattr(args, "mesh", f"tp {args.ranks}")
        where = f"{backend} on {torch.device(args.device).type}"
        print(f"{LESSON.stem}  ranks {args.ranks}, mesh {mesh}  {where}  {args.dtype}")
        print("  ".join(f"{letter} {number}" for letter, number in report.size.items()))
        main(args, report)
        failures = report.verdict(args)
    except Exception as error:
        end_with_error(error)
    dist.barrier()
    dist.destroy_process_group()
    if failures and os.environ["LOCAL_RANK"] == "0":  # torchrun reports one rank
        end(failures, 1)
    sys.stdout.flush()
    os._exit(0)  # a normal exit takes half a second, and DTensor's caches hold groups


def read_flags(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the flags that all lessons have."""
    parser.error = refuse  # argparse itself would print its usage, on every rank
    parser.allow_abbrev = False
    text = "float64 separates bugs from rounding errors"
    parser.add_argument("--dtype", choices=list(ALLOWED), default="float32", help=text)
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--timeout", type=positive, default=60, help="seconds per call")
    parser.add_argument("--json", type=Path, help="write all checks and rows there")
    args = parser.parse_args()
    if args.json:
        args.json.open("a").close()  # an error now, not after the run
    if "LOCAL_RANK" not in os.environ:
        command = "torchrun --standalone --nproc_per_node=2"
        raise ValueError(f"start it with torchrun: {command} {' '.join(sys.argv)}")
    args.ranks = int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    args.device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    return args


def positive(text: str) -> int:
    """A flag's value: a number from 1 on."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def must_divide(args, name: str, parts: int, what: str) -> None:
    """Refuse a flag's value that `parts` does not divide, with a value that works."""
    value = getattr(args, name)
    if value % parts:
        flag = f"--{name.replace('_', '-')}"
        reason = f"{flag} {value}: {value} % {parts} {what} = {value % parts}, not 0"
        raise ValueError(f"{reason}; take {flag} {value + parts - value % parts}")


def refuse(reason) -> None:
    """End with one `error:` line, before any collective runs."""
    time.sleep(0 if os.environ.get("LOCAL_RANK", "0") == "0" else 60)  # one says it
    text = fill(f"error: {reason}")
    print(text, file=sys.stderr)
    end(text, 2)


def end_with_error(error: Exception) -> None:
    """End this rank: torchrun's report has the lesson's lines that led to the error."""
    frames = traceback.format_tb(error.__traceback__)
    text = "".join(x for x in frames if "site-packages" not in x)  # not PyTorch's
    text = f"\n{text}{type(error).__name__}: {error}\nrank {os.environ['RANK']}; "
    text += f"its last call: {METER.last}\n{WHERE}"
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # not started by torchrun
        print(text, file=sys.stderr)
    end(text, 1)


def end(text: str, code: int) -> None:
    """End this rank with an error: torchrun's report of it ends with this text."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        path.write_text(json.dumps({"message": message}))
    sys.stdout.flush()
    time.sleep(1)  # other ranks report their errors, too, or have ended
    os._exit(code)


# endregion


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add_model_flags(parser)
    text = "embedding and head share one weight"
    parser.add_argument("--tie", action="store_true", help=text)
    text = "save gathered inputs: fewer all-gathers in backward, more memory"
    parser.add_argument("--save-gathered", action="store_true", help=text)
    launch(main, sequence_sizes, parser)
