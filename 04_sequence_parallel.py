"""Lesson 04: sequence parallelism.

Under tensor parallelism (TP) every rank computes LayerNorm, dropout and residual of all
positions: the same work and the same memory, T times. Sequence parallelism (SP) gives
each rank a slice of the sequence there. Each all-reduce becomes a reduce-scatter and an
all-gather: an all-reduce goes around a ring of ranks twice, each of these once, so the
ring sends the same bytes. By default this lesson also gathers inputs again in backward
instead of saving them gathered. Then a layer saves 1/T of the bytes that it saves in
one process, and the ring makes 5 rounds where TP makes 4: 25 % more bytes.

Run it on 1, 2 or 4 ranks (3, 6 or 8 take more heads, so they train another model):

    torchrun --standalone --nproc_per_node=2 04_sequence_parallel.py

What you will see: the model of lesson 03 trained on this text in one process, with TP,
with TP and SP, and by PyTorch's plan; gradients that need one more sum; bytes sent;
what a layer saves for backward: 34 bytes per element of its input, 5 per attention
weight and a few per position (--verbose: term by term); lengths that T does not divide.
`--hf` adds a Hugging Face model.

What to try (answers: notebooks/04_sequence_parallel.ipynb, the section in brackets):
- In split_sequence, delete the line of layer.dropout. Gradients and losses of TP + SP
  are wrong from step 1 on: all slices drop the same elements (see --break mask).
- Use nn.RMSNorm in DecoderLayer and Transformer. All numbers agree, and what sums
  gradients of norms sends less. On a CPU a layer stores 12·B·S·D more bytes for
  backward, under TP as well, and 1/T of that where the sequence is split [6].
- --save-gathered: 5 all-gathers in backward, not 10, but more bytes stored [5, 7].
- --seq-len 33: S becomes 34 on 2 ranks, and the losses still agree [8].

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read GatherThenLinear, split_sequence and
all_reduce_replicated_gradients.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, V vocabulary, L
    layers, T ranks in the TP group. UPPERCASE is the full size, lowercase is this
    rank's slice: x_BsD has s = S/T positions. `partial_` in front: full shape, still to
    be summed over the group, written {U_tp}. PyTorch calls these placements
    Replicate(), Shard(dim) and Partial(). An arrow means input → output. In formulas:
    X = B·S·D; 2·L + 1 inputs are gathered, two per layer and one of lm_head; p
    parameter tensors; e bytes per element.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (sequence parallelism, memory);
    docs.pytorch.org, torch.distributed.tensor.parallel.SequenceParallel.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.utils.checkpoint import checkpoint

# ==== NEW in 04: the sequence, split
# Read lines 63 to 264, in about 20 minutes. What follows is optional, up to RUN.

# From lessons 01 to 03: f is before column-parallel linears (all-reduce in backward),
# g after row-parallel ones (all-reduce in forward). vocab_transformer is a copy of the
# model with linears and vocabulary split. ShardedDropout(p, dim, group) is for a tensor
# that is sharded along dim. shardings_of(p) is empty if p is replicated. Replaced here:
# Attention.project_qkv (f, then q, k and v) and `reduce` (g) of row-parallel modules.


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


# ---- After a row-parallel linear: g becomes a reduce-scatter

# An all-reduce is a reduce-scatter and an all-gather (lesson 00). SP does the first
# half here, works on its slice of positions, and gathers before the next linear.


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """Sum the ranks' partial outputs; each rank gets its slice of the positions.

    Shapes: y [B, S, D] {U_tp} → [B, s, D] Shard(1).
    Communication: one reduce-scatter of B·S·D elements forward, one all-gather of
        B·S·D elements backward.
    """
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


# ---- Before column-parallel linears: f becomes an all-gather


class GatherThenLinear(torch.autograd.Function):
    """All-gather the sequence, apply linears, and save only this rank's slice.

    The gradient of a weight needs the input at all positions. Plain autograd would save
    the gathered input, T slices. The paper saves one slice and gathers it again in
    backward (arXiv:2205.05198, sec. 4.2.2). This second gather makes SP send 25 % more
    bytes than TP. It can travel while dL/dx is computed (beyond/18_in_pieces.py).
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
        saved = ctx.saved_tensors  # read once: checkpointing allows no second read
        x_BsD = saved[0]
        weights = saved[1:]
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)  # the second all-gather
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
        return tuple([grad_BsD, None] + grads)


def gather_then_apply_each(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Apply column-parallel linears to a sharded sequence: one all-gather for all.

    Shapes: x [B, s, D] Shard(1) → [B, S, f] Shard(2), one for each linear.
    Communication: one all-gather forward; one all-gather and one reduce-scatter
        backward; each of B·S·D elements.
    """
    parameters = []
    for linear in linears:
        parameters += [linear.weight, linear.bias]
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same by plain autograd (--save-gathered): saves T slices, gathers once.

    Communication: one all-gather forward, one reduce-scatter backward.
    """
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


class LinearWithInputComm(nn.Module):
    """A column-parallel linear that first gathers its input, by a function from above.

    Attention has project_qkv for this. up_proj and lm_head become such a module, which
    has their weight and bias and hands itself to the function, as the only linear.
    """

    def __init__(self, linear: ColumnParallelLinear, gather_and_apply):
        super().__init__()
        self.tp_group = linear.tp_group
        self.weight = linear.weight
        self.bias = linear.bias
        self.gather_and_apply = gather_and_apply

    def forward(self, x_BsD: Tensor) -> Tensor:
        outputs = self.gather_and_apply(x_BsD, self)
        return outputs[0]


# ---- The model, edited

# One layer. A rank holds s = S/T positions in [B, s, D], and in between its heads or
# columns of all positions:
#   [B, s, D]  x → LayerNorm → all-gather ─┐
#   [B, S, d]                              └→ q, k, v → attention → o_proj ─┐   d = D/T
#   [B, s, D]  x + dropout ← reduce-scatter ←───────────────────────────────┘
#   [B, s, D]  x → LayerNorm → all-gather ─┐
#   [B, S, f]                              └→ up_proj → GELU → down_proj ───┐   f = F/T
#   [B, s, D]  x + dropout ← reduce-scatter ←───────────────────────────────┘


def split_sequence(
    layer: DecoderLayer, tp_group, gather_and_apply=gather_then_apply_each
) -> None:
    """Edit a layer of tp_transformer: around attention and MLP the sequence is split.

    Attention itself needs all positions of its heads, so rotary tables and causal mask
    stay those of the full sequence, by global position. (Context parallelism is the
    method that also splits the sequence inside attention.)

    Shapes: x [B, s, D] Shard(1) → [B, s, D] Shard(1).
    Communication: 2 all-gathers and 2 reduce-scatters forward, the same backward, and 2
        more all-gathers backward unless gather_and_apply is gather_and_save. Each is of
        B·S·D elements.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2, fig. 5.
    """
    layer.self_attn.project_qkv = gather_and_apply
    layer.self_attn.o_proj.reduce = reduce_scatter_sequence
    layer.mlp.up_proj = LinearWithInputComm(layer.mlp.up_proj, gather_and_apply)
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
    # The layer drops elements of a [B, s, D]: each rank must use its slice of the mask.
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)


def sp_transformer(
    full: Transformer, tp_group: dist.ProcessGroup, save_gathered: bool = False
) -> Transformer:
    """A copy of the decoder under TP, with the sequence split between its linears.

    save_gathered: save gathered inputs for backward, as plain autograd does.
    Shapes: tokens [B, S], T divides S (pad_batch) → logits [B, S, ⌈V/T⌉] Shard(2).
    Communication: split_sequence in each of L layers; one more reduce-scatter after the
        embedding; one more gather before lm_head. all_reduce_replicated_gradients must
        be called after backward.
    """
    gather_and_apply = gather_and_save if save_gathered else gather_then_apply_each
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, gather_and_apply)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, gather_and_apply)
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
        if p.grad is not None and not shardings_of(p):
            replicated.append(p)
    partial_flat = torch.cat([p.grad.flatten() for p in replicated])
    flat = all_reduce(partial_flat, tp_group)
    for p, grad in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.copy_(grad.view_as(p))


# ---- Optional: activation checkpointing


class Checkpointed(nn.Module):
    """A module that saves its inputs only, and runs forward again in backward.

    Around CoreAttention (selective recomputation) it discards the activations that grow
    with S², which are large but cheap to recompute; around a layer (full recomputation)
    it discards everything but the layer's input (arXiv:2205.05198, sec. 5).
    checkpoint() restores the random state, so the second forward draws the same dropout
    masks. Collectives of the inner module also run again: none in CoreAttention; in a
    layer two under TP, four under SP (without dropout, all but the last).
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return checkpoint(self.inner, *inputs, use_reentrant=False)


# ---- Optional: the same with PyTorch's API


def sp_plan(keyword: str = "x_BSD", local: bool = True) -> dict:
    """PyTorch's plan for this model; Hugging Face models need few changes (--hf).

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


# ==== RUN


def main(args, report: Report) -> None:
    """Train the same model four times on the same batches, then compare."""
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    batches = []
    for tokens_BS, target_BS in make_batches(__doc__, args, args.steps):
        batches.append(pad_batch(tokens_BS, target_BS, args.ranks))
    padding = batches[0][0].shape[1] - args.seq_len
    # From here on T divides S, also without TP: section 6 compares with no padding.
    args.seq_len += padding
    full = make_tied(args)
    size = sizes_of(args)
    size["X"] = args.batch_size * args.seq_len * args.hidden
    size["p"] = len(list(full.parameters()))
    note = why_these_sizes(args.ranks)
    if padding > 0:
        note += f" S includes padding of {padding}, so that T divides it."
    report.begin({"tp": args.ranks}, size, note.strip())

    runs = {}
    train = partial(train_transformer, batches=batches, args=args)
    runs["without TP"] = train("without TP", copy.deepcopy(full))
    check_reference(report, runs["without TP"], batches[0], size)
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.column("TP"):
        model = vocab_transformer(full, tp_group)
        runs["TP"] = train_with_tp("TP", model, batches, args, tp_group)
    with report.column("TP + SP"):
        model = sp_transformer(full, tp_group, args.save_gathered)
        sum_up = partial(all_reduce_replicated_gradients, tp_group=tp_group)
        run = train_with_tp("TP + SP", model, batches, args, tp_group, sum_up)
        runs["TP + SP"] = run
    plan = report.column("DTensor", "plans")
    with plan, CountDTensor("tp"), parallel.loss_parallel():
        model = planned_transformer(full, tp_group)
        runs["DTensor"] = train("DTensor", model, loss_of=planned_loss)

    show_training(report, runs)
    if "TP + SP" in runs:
        show_replicas(report, runs["TP + SP"], tp_group)
    show_gradients_sp(report, runs)
    show_partial_gradients(report, runs, full, batches[0], tp_group)
    show_communication_sp(report, size)
    with report.column("one layer"):
        show_memory_sp(report, size, tp_group)
    show_padded_lengths(report, tp_group)
    if args.hf:
        show_hugging_face(report, batches[0], tp_group)


def train_with_tp(name, model, batches, args, tp_group, sum_up=None) -> TrainingRun:
    """Train a model whose vocabulary is split, sum_up(model) after each backward."""
    loss_of = partial(sharded_loss, tp_group=tp_group, vocab_size=args.vocab_size)
    run = train_transformer(name, model, batches, args, tp_group, loss_of, sum_up)
    trim_padding(run)
    return run


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

    The loss is a replicated DTensor, already summed; full_tensor() makes it a plain
    tensor (and would sum a Partial() one). dist.all_reduce of a DTensor is an error.
    """
    return mean_loss(logits, target_BS).full_tensor()


def show_gradients_sp(report: Report, runs: dict[str, TrainingRun]) -> None:
    """Gradients of step 1: all sharded parameters in one row, then replicated ones."""
    report.section("Gradients of step 1 (value: norm; diff: largest of any element)")
    if "TP + SP" not in runs:  # it raised an error
        return
    sp_model = runs["TP + SP"].model

    def row_of(name: str) -> str:
        if shardings_of(sp_model.get_parameter(name)):
            return "sharded parameters"
        if name.endswith("_proj.bias"):
            return "biases of o_proj, down_proj"
        return module_of(name)  # a LayerNorm

    gradients = values_of(runs, "gradients")
    gradients.pop("TP", None)  # lesson 03 compares them
    report.compare("gradients", gradients, fold=row_of)
    report.conclude(
        "All rows but the first: replicated parameters, whose gradients TP + SP sums."
    )


def show_partial_gradients(report: Report, runs, full, batch, tp_group) -> None:
    """Gradients of two replicated parameters before and after they are summed."""
    args = report.args
    layer = f"layers.{args.layers - 1}"
    report.section(f"Two gradients of {layer} before and after the sum: first numbers")
    if "TP + SP" not in runs:  # it raised an error
        return
    model = sp_transformer(full, tp_group, args.save_gathered)
    torch.manual_seed(args.seed + 1)  # the dropout masks of step 1
    loss = sharded_loss(model(batch[0]), batch[1], tp_group, args.vocab_size)
    loss.backward()  # and no all_reduce_replicated_gradients

    names = [f"{layer}.input_layernorm.weight", f"{layer}.self_attn.o_proj.bias"]
    complete = runs["without TP"].gradients
    names = [name for name in names if name in complete]  # your edit may remove one
    before = {name: model.get_parameter(name).grad for name in names}
    for name in names:
        # If all ranks had the complete gradient, a sum would make it T times that.
        is_complete = rel_diff(before[name], complete[name]) < 1e-3
        is_complete = args.ranks > 1 and all(gather_objects(is_complete))
        report.check("partial", f"{name} before the sum", int(is_complete))

    s = args.seq_len // args.ranks
    rank = tp_group.rank()
    positions = f"{rank * s} to {rank * s + s - 1}"
    rows = gather_objects(numbers_row(f"rank {rank}", positions, before, names))
    for run in ("TP + SP", "without TP"):  # summed over ranks, and the reference
        rows.append(numbers_row(run, "all", runs[run].gradients, names))
    report.table("parts", rows)
    if args.ranks > 1 and all(report.checks[name]["ok"] for name in report.checks):
        report.conclude("Each rank has the part of its positions; only a sum is full.")


# ---- What is sent


def show_communication_sp(report: Report, size: dict[str, int]) -> None:
    """Collectives of each step, and what a rank of a ring sends for them."""
    inputs = "(2·L + 1)"  # that are gathered
    again = inputs if report.args.save_gathered else f"2·{inputs}"
    # The LayerNorms, one before each gather, have a weight and a bias each. Their
    # gradients stay Partial(): DTensor sums them at each use, first in float64, for its
    # norm. (It adds the biases of o_proj and down_proj to all positions, so their
    # gradients are complete.)
    norm = [Calls(f"2·{inputs}", "8·D"), Calls("1", norm_bytes("p"))]
    formulas = {
        Call("TP", "forward", "all-reduce", "tp"): [Calls(inputs, "X·e")],
        Call("TP", "backward", "all-reduce", "tp"): [Calls(inputs, "X·e")],
        Call("TP", "loss", "all-reduce", "tp"): [Calls("3", "B·S·e")],
        Call("TP", "clipping", "all-reduce", "tp"): [Calls("1", "8")],  # a float64
        Call("TP + SP", "forward", "all-gather", "tp"): [Calls(inputs, "X·e")],
        Call("TP + SP", "forward", "reduce-scatter", "tp"): [Calls(inputs, "X·e")],
        Call("TP + SP", "backward", "all-gather", "tp"): [Calls(again, "X·e")],
        Call("TP + SP", "backward", "reduce-scatter", "tp"): [Calls(inputs, "X·e")],
        Call("TP + SP", "loss", "all-reduce", "tp"): [Calls("3", "B·S·e")],
        Call("TP + SP", "summing", "all-reduce", "tp"): [Calls("1", "(6·L + 2)·D·e")],
        Call("TP + SP", "clipping", "all-reduce", "tp"): [Calls("1", "8")],
        Call("DTensor", "forward", "all-gather", "tp"): [Calls(inputs, "X·e")],
        Call("DTensor", "forward", "reduce-scatter", "tp"): [Calls(inputs, "X·e")],
        # Not twice as many: DTensor saves the gathered inputs, as section 5 shows.
        Call("DTensor", "backward", "all-gather", "tp"): [Calls(inputs, "X·e")],
        Call("DTensor", "backward", "reduce-scatter", "tp"): [Calls(inputs, "X·e")],
        Call("DTensor", "loss", "all-reduce", "tp"): [Calls("3", "B·S·e")],
        Call("DTensor", "clipping", "all-reduce", "tp"): norm,
        # AdamW uses a gradient three times; no sum is stored, so each use sums again.
        Call("DTensor", "update", "all-reduce", "tp"): [Calls(f"3·2·{inputs}", "D·e")],
    }
    report.section("Communication per step; ring: bytes that a rank of a ring sends")
    brief = ["DTensor", "loss", "clipping"]
    report.ledger(formulas, size, report.args.steps, brief=brief)
    # Per input, a gather or reduce-scatter is one round of the ring, an all-reduce two.
    rounds = {"TP": 4, "TP + SP": 4 if report.args.save_gathered else 5, "DTensor": 4}
    totals = ring_rows(report, rounds, f"{inputs}·X·e·(T - 1)/T", size)
    report.table("ring", totals, brief=f"{len(totals)} totals of a ring")
    report.agree("as predicted")
    sent = {row["run"]: row["forward + backward"] for row in totals}
    if sent.get("TP") and "TP + SP" in sent:
        times = sent["TP + SP"] / sent["TP"]
        how = "gathers inputs again in backward"
        if report.args.save_gathered:
            how = "saves gathered inputs"
        report.conclude(
            f"A rank of a ring sends {sent['TP']:,} bytes under TP. Under TP + SP, "
            f"which {how}, it sends {times:.2f} times as many."
        )


# ---- What a layer saves for backward

# The letters of the formulas; show_memory_sp has R and G of each run.
LETTERS = """\
   A   attention weights, B·N·S·S = {A:,}
   c   bytes of a mean or of 1/σ: {c}
   T   shards of what is split by heads or columns
   R   shards of what is split by positions: T under SP, otherwise 1
   G   the same for outputs of LayerNorms: 1 if they are saved gathered"""
SAVED_BY_A_LAYER = {  # bytes, in bfloat16 (arXiv:2205.05198, sec. 4.1)
    "inputs of both LayerNorms": "4·X/R",
    "outputs of both LayerNorms": "4·X/G",  # inputs of q, k, v and of up_proj
    "dropout masks of block outputs": "2·X/R",
    "q, k, v": "6·X/T",
    "input of o_proj": "2·X/T",
    "input of GELU": "8·X/T",
    "input of down_proj": "8·X/T",
    "softmax output": "2·A/T",
    "its dropout mask": "A/T",
    "softmax output after dropout": "2·A/T",
    "mean, 1/σ (not in the paper)": "4·B·S·c/R",
}
SAVED_WITH_RECOMPUTATION = {  # arXiv:2205.05198, table 2 and the end of section 5
    "TP, selective": "10·X + 24·X/T + 4·B·S·c",
    "TP + SP, selective": "(34·X + 4·B·S·c)/T",
    "TP, full": "2·X",
    "TP + SP, full": "2·X/T",
}
# Full recomputation repeats the collectives of forward in backward: 2 or 4 more.
CALLS_IN_BACKWARD = {
    "without TP": 0, "TP": 2, "TP + SP": 6, "DTensor": 4,
    "TP, selective": 2, "TP + SP, selective": 6, "TP, full": 4, "TP + SP, full": 10,
}  # fmt: skip


def show_memory_sp(report: Report, size: dict[str, int], tp_group) -> None:
    """What a layer saves for backward: term by term, then with recomputation."""
    args = report.args
    T = args.ranks
    report.section("Bytes that a layer saves for backward, in bfloat16 (2 bytes)")
    measured = measure_layers(report, tp_group)
    size = dict(size, A=args.batch_size * args.heads * args.seq_len**2)
    size["c"] = 2 if args.device == "cpu" else 4  # a GPU has mean and 1/σ in float32
    sizes = {
        "without TP": dict(size, T=1, R=1, G=1),
        "TP": dict(size, R=1, G=1),
        "TP + SP": dict(size, R=T, G=1 if args.save_gathered else T),
        "DTensor": dict(size, R=T, G=1),  # it saves the gathered inputs
    }
    calls = dict(CALLS_IN_BACKWARD)
    if args.save_gathered:
        calls["TP + SP"] = 4  # no input is gathered a second time
    if T == 1:
        calls = dict.fromkeys(calls, 0)  # one rank sends nothing

    rows, sums = add_up(SAVED_BY_A_LAYER, sizes)
    rows.append(measured_row(report, "saved", "sum", sums, measured))
    of_runs = {run: calls[run] for run in sizes}
    rows.append(measured_row(report, "calls in backward", "", of_runs, measured))
    if args.verbose:
        report.say(LETTERS.format_map(size))
    show_terms(report, rows)
    show_recomputation(report, measured, calls, size)
    of_one = measured["without TP"]["saved"]
    share = {run: f"{100 * measured[run]['saved'] / of_one:.0f} %" for run in measured}
    report.conclude(
        f"Of what one process saves, a rank saves {share['TP']} under TP, "
        f"{share['TP + SP']} under TP + SP, {share['TP + SP, full']} if all is "
        "recomputed."
    )


def show_recomputation(report: Report, measured: dict, calls: dict, size) -> None:
    """What is saved, and what is sent in backward, if it computes some parts again."""
    rows = []
    for name, formula in SAVED_WITH_RECOMPUTATION.items():
        row = {"recomputation": name, "formula": formula}
        row.update(measured[name])
        report.expect(row, "saved", "memory", f"saved, {name}", evaluate(formula, size))
        label = f"backward of a layer, {name}"
        report.expect(row, "calls in backward", "calls", label, calls[name])
        rows.append(row)
    report.table("recomputation", rows, brief=f"{len(rows)} ways to recompute")
    report.agree("bytes and calls as predicted")


# ---- Lengths that T does not divide


def show_padded_lengths(report: Report, tp_group) -> None:
    """Lengths that T does not divide: padded under SP, unpadded without TP."""
    args = copy.copy(report.args)
    args.dtype = "float64"
    args.dropout = 0.0  # a mask is sampled by shape: padding would change it
    S = args.seq_len
    args.seq_len = 2 * S + 1 + args.ranks  # room for the longest one and its padding
    full = make_tied(args)
    sum_up = partial(all_reduce_replicated_gradients, tp_group=tp_group)

    losses = {"without TP": {}, "TP + SP": {}}
    gradients = {"without TP": {}, "TP + SP": {}}
    with report.column("padded lengths"):
        for length in sorted({1, max(1, S - 1), 2 * S + 1}):
            args.seq_len = length
            batch = make_batches(__doc__, args, 1)[0]
            padded = pad_batch(batch[0], batch[1], args.ranks)
            label = f"length {length}, padded to {padded[0].shape[1]}"
            for name in ("without TP", "TP + SP"):  # kept one by one: each may raise
                if name == "without TP":
                    run = train_transformer(label, copy.deepcopy(full), [batch], args)
                else:
                    model = sp_transformer(full, tp_group, args.save_gathered)
                    run = train_with_tp(label, model, [padded], args, tp_group, sum_up)
                losses[name][f"loss, {label}"] = run.losses["loss, step 1"]
                for parameter, gradient in run.gradients.items():
                    gradients[name][f"{label}: dL/d {parameter}"] = gradient
    report.section("Lengths that T does not divide, padded for SP; float64, no dropout")
    report.compare("lengths", losses, ALLOWED_LOSS["float64"], brief="losses")
    one_row = lambda name: "all gradients"
    allowed = ALLOWED["float64"]
    report.compare("length gradients", gradients, allowed, one_row, brief="gradients")
    report.agree("as without TP")


# ==== BREAK IT

BREAKS = {
    "norms": dict(
        target="all_reduce_replicated_gradients",
        old="    flat = all_reduce(partial_flat, tp_group)\n",
        new="    flat = partial_flat\n",
        what="gradients of LayerNorms and row-parallel biases are not summed",
        symptom="step 1's loss is correct; then replicas diverge, and losses drift",
        why="they are replicated, but each rank applied them to its own positions only",
        reported="github.com/NVIDIA/Megatron-LM/issues/443, 474, 1446; apex 1686",
        audit="gradient sum",
    ),
    "row-bias": dict(
        target="RowParallelLinear.forward",
        old="    partial_y_BSD = F.linear(x_BSf, self.weight)\n",
        new="    partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)\n"
        "    return self.reduce(partial_y_BSD, self.tp_group)\n",
        what="the row-parallel bias is added before the reduce-scatter",
        symptom="the loss of TP and of TP + SP is wrong from step 1 on; with biases of "
        "zero it is correct, but under SP their gradients are T times too large",
        why="the sum over ranks adds the bias T times instead of once",
        reported="github.com/huggingface/text-generation-inference/issues/1036",
        audit="forward bias",
    ),
    "length": dict(
        target="pad_batch",
        old="    missing = -tokens_BS.shape[1] % ranks\n",
        new="    missing = 0\n",
        what="a batch whose length T does not divide is not padded",
        symptom="nothing fails until such a length occurs; then an error about sizes",
        why="a reduce-scatter requires slices of the same size on all ranks",
        reported="github.com/pytorch/torchtitan/issues/1306, DeepSpeed issue 5177",
    ),
    "rotary": dict(
        target="sp_transformer",
        old="    model.embed_tokens.reduce = reduce_scatter_sequence\n",
        new="    model.embed_tokens.reduce = reduce_scatter_sequence\n"
        "    s = full.config.seq_len // tp_group.size()\n"
        "    position_S = torch.arange(len(model.cos), device=model.cos.device) % s\n"
        "    model.cos, model.sin = model.cos[position_S], model.sin[position_S]\n",
        what="rotary positions are counted from the start of each slice",
        symptom="no error; the loss differs slightly with random weights, and by more "
        "with trained ones",
        why="the first token of rank t has the position t·s in the sequence, not 0",
        reported="github.com/NVIDIA/Megatron-LM/issues/560 (of context parallelism)",
        audit="buffer",
    ),
    "mask": dict(
        target="split_sequence",
        old="    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)",
        new="    layer.dropout = Dropout(layer.dropout.p)",
        what="all slices of the sequence use the same dropout mask",
        symptom="it trains, but gradients and losses differ from the reference",
        why="all ranks have one seed, so each must slice the mask of all positions",
        reported="github.com/NVIDIA/Megatron-LM/issues/206",
        audit="dropout same",
    ),
    "split": dict(
        target="GatherThenLinear.backward",
        old="    grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)\n",
        new="    grad_BsD = shard(partial_grad_BSD, 1, ctx.tp_group)\n",
        what="the backward of the gather takes a slice without summing first",
        symptom="the loss of step 1 and the gradients of lm_head are correct, the "
        "other gradients are not",
        why="each rank used the gathered x with its own columns of W, so it has a "
        "partial dL/dx for every position",
        reported="github.com/NVIDIA/Megatron-LM/issues/1635, pytorch issue 153016",
        audit="backward slice",
    ),
    "keywords": dict(
        target="sp_plan",
        old="        input_kwarg_layouts={keyword: Shard(1)},\n"
        "        desired_input_kwarg_layouts={keyword: Replicate()},\n",
        new="        input_layouts=Shard(1), desired_input_layouts=Replicate()\n",
        what="PyTorch's plan sets layouts of positional inputs; the call uses keywords",
        symptom="an error in the first forward: inputs and input_layouts do not match",
        why="a module that is called with keywords only has no positional inputs",
        reported="github.com/pytorch/pytorch/pull/124114 (added input_kwarg_layouts)",
    ),
    "dtensor-loss": dict(
        target="planned_loss",
        old="    return mean_loss(logits, target_BS).full_tensor()",
        new="    loss = mean_loss(logits, target_BS)\n"
        "    dist.all_reduce(loss)\n"
        "    return loss",
        what="PyTorch's plan: dist.all_reduce of a loss that is a DTensor",
        symptom="an error: no sharding strategy for it (older PyTorch: no DeviceMesh)",
        why="a DTensor knows what is left to sum, and .full_tensor() does it; after "
        ".to_local() an all-reduce would count a replicated loss T times",
        reported="github.com/pytorch/pytorch/issues/152712, torchtitan pull 779",
    ),
    "tiled": dict(
        target="sp_plan",
        old="        input_layouts=Replicate(), output_layouts=Shard(1), "
        "use_local_output=local\n",
        new="        input_layouts=Replicate(), output_layouts=Replicate(), "
        "use_local_output=local\n",
        what="PyTorch's plan: SequenceParallel gets a replicated tensor",
        symptom="x is T·S long after the first norm: an error about sizes follows",
        why="SequenceParallel treats a plain tensor as this rank's slice",
        reported="github.com/pytorch/pytorch/issues/129355, examples issue 1271",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    sizes = {"steps": 3, "layers": 2, "batch_size": 4, "seq_len": 32, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, sections=7, **sizes)
    add = parser.add_argument
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--save-gathered", action="store_true", help="save gathered inputs")
    add("--hf", action="store_true", help="also Hugging Face's Qwen2, by the plan")
    args = parse_sizes(parser, ranks)
    if args.hf and not find_spec("transformers"):
        raise ValueError("--hf needs Hugging Face's: pip install transformers==5.20.2")
    if args.only == 7 and not args.hf:
        raise ValueError("--only 7: section 7 is printed with --hf only; add --hf")
    return args


# ---- Rows of tables


def numbers_row(label: str, positions: str, tensors: dict, names: list[str]) -> dict:
    """The first numbers of some tensors, each in a column."""
    row = {"": label, "positions": positions}
    for name in names:
        numbers = tensors[name].flatten()[:3].tolist()
        column = name.split(".", 2)[2]  # without layers.N
        row[column] = " ".join(f"{x:9.6f}" for x in numbers)
    return row


def ring_rows(report: Report, rounds: dict, one_round: str, size: dict) -> list[dict]:
    """What a rank of a ring sends in each run, from the rows of the ledger.

    rounds: run → how many there are in forward and backward, per gathered input.
    one_round: a formula, the bytes that a rank sends in one round for each input.
    """
    rows = []
    for run in rounds:
        if run in report.raised:
            continue
        row = {"run": run, "forward + backward": 0}
        row["formula"] = f"{rounds[run]}·{one_round}"
        row.update({"calls after": 0, "ring after": 0})
        for sent in report.data["communication"]:
            if sent["run"] == run and sent["phase"] in ("forward", "backward"):
                row["forward + backward"] += sent["ring"]
            elif sent["run"] == run and sent["phase"] != "loss":
                row["calls after"] += sent["calls"]
                row["ring after"] += sent["ring"]
        predicted = evaluate(row["formula"], size)
        name = f"{run} forward + backward, ring"
        report.expect(row, "forward + backward", "bytes", name, predicted)
        rows.append(row)
    return rows


# ---- How bytes of a layer are measured


def layer_variants(full: DecoderLayer, tp_group) -> dict[str, nn.Module]:
    """One layer under TP and under SP, without and with recomputation."""
    variants = {}
    for recompute in ("", ", selective", ", full"):
        tp_layer = copy.deepcopy(full)
        parallelize_layer(tp_layer, tp_group)
        sp_layer = copy.deepcopy(full)
        parallelize_layer(sp_layer, tp_group)
        split_sequence(sp_layer, tp_group)
        variants[f"TP{recompute}"] = tp_layer
        variants[f"TP + SP{recompute}"] = sp_layer
    for run in ("TP", "TP + SP"):
        attention = variants[f"{run}, selective"].self_attn
        attention.core = Checkpointed(attention.core)
        variants[f"{run}, full"] = Checkpointed(variants[f"{run}, full"])
    return variants


def measure_layers(report: Report, tp_group) -> dict[str, dict[str, int]]:
    """Bytes that each variant saves in forward, and its collectives in backward."""
    args = report.args
    # As in the paper: bfloat16, dropout, and as many key/value heads as heads.
    config = Config(args.vocab_size, args.hidden, args.heads, args.heads, layers=1,
                    seq_len=args.seq_len, dropout=0.1)  # fmt: skip
    model = Transformer(config).to(args.device, torch.bfloat16)
    layers = {"without TP": model.layers[0]}
    layers.update(layer_variants(model.layers[0], tp_group))
    if args.save_gathered:
        split_sequence(layers["TP + SP"], tp_group, gather_and_save)  # edit it again
    if "DTensor" not in report.raised:
        layers["DTensor"] = planned_transformer(model, tp_group).layers[0]

    tables = (model.cos, model.sin, model.future)
    x_BSD = torch.randn(args.batch_size, args.seq_len, args.hidden)
    x_BSD = x_BSD.to(args.device, torch.bfloat16)
    measured = {}
    for name, layer in layers.items():
        is_split = "SP" in name or name == "DTensor"
        x = shard(x_BSD, 1, tp_group) if is_split else x_BSD.clone()
        saved = SavedBytes([*layer.parameters(), *tables])
        with saved:
            y = layer(x.requires_grad_(), tables)
        before = COMM.calls.total()
        with CountDTensor("tp"):
            y.backward(torch.ones_like(y))
        measured[name] = {"saved": saved.total()}
        measured[name]["calls in backward"] = COMM.calls.total() - before
    return measured


# ---- With --hf: the same plan on a model of another library


def make_qwen2(args) -> nn.Module:
    """Hugging Face's Qwen2, random weights, in float32: its norms compute in it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=args.vocab_size, hidden_size=args.hidden,
        intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.seq_len, tie_word_embeddings=args.tie,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    return Qwen2ForCausalLM(config).to(args.device).eval()


def show_hugging_face(report: Report, batch, tp_group) -> None:
    """With --hf: the same plan on a model that was not written for this course."""
    # x stays a DTensor between modules: Qwen2 derives positions and the causal mask
    # from the shape of x, which must be S there and not s.
    plan = {}
    for name, style in sp_plan("hidden_states", local=False).items():
        plan[f"model.{name}"] = style
    plan["model.layers.*.mlp.gate_proj"] = parallel.ColwiseParallel()
    plan["lm_head"] = plan.pop("model.lm_head")

    args = report.args
    train = partial(train_transformer, "Qwen2", batches=[batch], args=args)
    runs = {}
    model = make_qwen2(args)
    loss_of = lambda output, target_BS: mean_loss(output.logits, target_BS)
    runs["without TP"] = train(model, loss_of=loss_of)
    with report.column("Qwen2, DTensor", "plans"), parallel.loss_parallel():
        device = model.device.type
        mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
        model = parallel.parallelize_module(make_qwen2(args), mesh, plan)
        if args.tie:  # the plan sharded one weight twice
            model.lm_head.weight = model.model.embed_tokens.weight
        loss_of = lambda output, target_BS: planned_loss(output.logits, target_BS)
        runs["DTensor"] = train(model, loss_of=loss_of)
    report.section("The same plan on Hugging Face's Qwen2, in float32, random weights")
    report.compare("Qwen2 loss", values_of(runs, "losses"), ALLOWED_LOSS["float32"])
    gradients = values_of(runs, "gradients")
    report.compare("Qwen2", gradients, ALLOWED["float32"], module_of)


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
import argparse
from collections.abc import Callable
from datetime import timedelta

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


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


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


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first.

    (lesson 01)"""
    for dim, group in reversed(shardings):  # one at most in this lesson
        x = all_gather(x, dim, group)
    return x


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


def module_of(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.*.mlp.up_proj (lesson 02)."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join(parts[:-1]) or name


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


def show_terms(report: Report, rows: list[dict]) -> None:
    """A table of terms and measured sums; without --verbose, of the sums only.

    (lesson 02)"""
    if report.args.verbose:
        report.table("memory", rows)
        return
    sums = [row for row in rows if "off" in row]
    report.table("memory sums", sums, hide=["formula"])
    report.data.setdefault("memory", []).extend(rows)  # --json has all of them


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


# ==== CARRIED OVER from 03, unchanged
# region


def pad_vocab(full: nn.Module, ranks: int) -> nn.Module:
    """Return a copy of an embedding or a head, padded with rows of zeros.

    (lesson 03)"""
    padded = copy.deepcopy(full)
    for name, p in full.named_parameters():
        missing = -len(p) % ranks  # V = 257, T = 4: 3 rows, so that each rank has 65
        zeros = p.new_zeros(missing, *p.shape[1:])
        setattr(padded, name, nn.Parameter(torch.cat([p.detach(), zeros])))
    return padded


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary: no rank has its row.

    (lesson 03)"""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        text = f"tokens {tokens.min()} to {tokens.max()}: the vocabulary is 0 to "
        raise ValueError(text + str(vocab_size - 1))


def find_local_rows(tokens: Tensor, v: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, and whether this rank has that token.

    (lesson 03)"""
    row = tokens - rank * v
    is_local = (row >= 0) & (row < v)
    return row.where(is_local, 0), is_local


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group (lesson 03)."""

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

    (lesson 03)"""
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


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The full loss: with padding, ignored positions, label smoothing, and backward.

    (lesson 03)"""

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
        # An embedding starts with a standard deviation of 1, which is too large for a
        # head: its logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


def trim_padding(run: TrainingRun) -> dict[str, Tensor]:
    """Remove padded rows from a run's gradients and parameters, and return them.

    (lesson 03)"""
    padding = {}
    for name, p in run.model.named_parameters():
        if hasattr(p, "rows"):
            padding[f"gradients of {name}"] = run.gradients[name][p.rows :]
            run.gradients[name] = run.gradients[name][: p.rows]
            padding[f"parameters of {name}"] = run.parameters[name][p.rows :]
            run.parameters[name] = run.parameters[name][: p.rows]
    return padding


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
