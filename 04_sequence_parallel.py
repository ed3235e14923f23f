"""Lesson 04: sequence parallelism.

Tensor parallelism (TP) leaves LayerNorm, dropout and the residual whole on every rank:
the same work and the same memory, T times. Here each rank takes a slice of the sequence
for them: a layer's all-reduces become pairs of reduce-scatter and all-gather, which
send as much, and it keeps 1/T of what it keeps in one process.

Run it (2 ranks on a laptop; 1, 3, 4, 6 and 8 work too, the sizes follow):

    torchrun --standalone --nproc_per_node=2 04_sequence_parallel.py

What you will see: lesson 03's transformer without TP, with it, with TP and sequence
parallelism (SP), and by PyTorch's plan; gradients that need one more sum; the bytes
sent; what a layer keeps for backward, to the byte, as in the paper; lengths that T does
not divide. `--hf` adds a Hugging Face model, `--break list` names bugs to switch on.

How to read this file: NEW is the lesson, RUN what it prints, BREAK IT lists its bugs;
fold away what comes below. Short of time? Read GatherThenLinear, split_sequence and
all_reduce_replicated_gradients. Try this, and see what the checks say: leave the line
of layer.dropout out of split_sequence; nn.RMSNorm for nn.LayerNorm in DecoderLayer;
give --seq-len 33, or --save-gathered, and look at the bytes.

Shapes: B batch, S sequence, D hidden, N heads, V vocabulary, L layers, T ranks in the
    TP group. UPPERCASE is the full size, lowercase this rank's slice: x_BsD has this
    rank's s = S/T positions. `partial_` in front: full shape, still to be summed over
    the group, {U_tp}. x → y: on a rank instead of global. PyTorch says Replicate() for
    what every rank holds, Shard(dim) for what is cut, Partial() for terms of a sum.

Sources: Korthikanti et al. 2022, arXiv:2205.05198 (sequence parallelism, memory);
    docs.pytorch.org, torch.distributed.tensor.parallel.SequenceParallel.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# ==== NEW in 04: the sequence, split

# From lesson 01: f before column-parallel linears (identity, all-reduce backward), g
# after row-parallel ones (all-reduce, identity backward). From 02 and 03: tp_ and
# vocab_transformer edit a copy of the model, at places made to be exchanged: `project`
# of attention (f, then q, k, v) and of a LinearWithInputComm, `reduce` of row-parallel
# linears and the embedding (g). ShardedDropout(p, dim, group) drops on a slice along
# dim. p.shardings: how a parameter was cut; one that is whole on every rank has none.


def pad_batch(tokens_BS: Tensor, target_BS: Tensor, ranks: int) -> tuple:
    """Positions at the end of a batch, so that T divides them: [B, S] → [B, ⌈S/T⌉·T].

    At the end: the others keep their places, and the causal mask hides what follows.
    """
    missing = -tokens_BS.shape[1] % ranks
    tokens_BS = F.pad(tokens_BS, (0, missing), value=PAD)
    return tokens_BS, F.pad(target_BS, (0, missing), value=IGNORE)


# g (all-reduce; backward identity) becomes a reduce-scatter; backward an all-gather.


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """The ranks' terms are summed, and each keeps its slice of positions.

    Shapes: y [B, S, D] {U_tp} → [B, s, D] Shard(1). Communication: one reduce-scatter
        of B·S·D elements forward, one all-gather of them backward.
    """
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


# f (identity; backward all-reduce) becomes an all-gather; backward a reduce-scatter.
# gather_and_save (--save-gathered) gives the same numbers, and keeps more for backward.


class GatherThenLinear(torch.autograd.Function):
    """All-gather the sequence, then linears; this rank's slice is kept for backward.

    The weights' gradients need the whole x. Plain autograd would keep it, T slices; the
    paper keeps one slice and gathers again in backward (arXiv:2205.05198, sec. 4.2.2).
    """

    @staticmethod
    def forward(ctx, x_BsD: Tensor, tp_group, *parameters: Tensor) -> tuple:
        weights, biases = parameters[::2], parameters[1::2]  # they come in turn
        ctx.save_for_backward(x_BsD, *weights)
        ctx.tp_group = tp_group
        x_BSD = all_gather(x_BsD, 1, tp_group)
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        x_BsD, *weights = ctx.saved_tensors
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)  # the extra all-gather
        grads, partial_grad_BSD = [], 0
        for grad_BSf, weight in zip(grads_BSf, weights):
            grad_Rf = grad_BSf.flatten(0, 1)  # R rows: all tokens
            grads += [grad_Rf.T @ x_BSD.flatten(0, 1), grad_Rf.sum(0)]
            partial_grad_BSD = partial_grad_BSD + grad_BSf @ weight
        # Each rank used all of x, with its own columns: it has a term of dL/dx for
        # every position. Sum them over ranks, and keep this rank's positions.
        grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)
        return grad_BsD, None, *grads


def gather_then_apply_each(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Column-parallel linears of a split sequence: one all-gather for all of them.

    Shapes: x [B, s, D] Shard(1) → [B, S, f] Shard(2), one for each linear.
    Communication: forward one all-gather of B·S·D elements; backward one
        reduce-scatter, and one all-gather more.
    """
    parameters = [p for linear in linears for p in (linear.weight, linear.bias)]
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same as plain autograd does it: all of x is kept, one all-gather less."""
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


def split_sequence(
    layer: DecoderLayer, tp_group, project=gather_then_apply_each
) -> None:
    """Edit a layer of tp_transformer: between its linears the sequence is split.

    [B, s, D] around LayerNorm, dropout and residual; this rank's heads, and columns of
    the MLP, in between. A head needs all positions: so rotary tables and causal mask
    are still those of the whole sequence, by global position. (To leave the sequence
    split inside attention, too, is another method: context parallelism.)

    Communication: 2 all-gathers and 2 reduce-scatters forward, as many backward, and 2
        all-gathers more unless project is gather_and_save; each of B·S·D elements.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2, fig. 5.
    """
    layer.self_attn.project = project
    layer.self_attn.o_proj.reduce = reduce_scatter_sequence
    layer.mlp.up_proj = LinearWithInputComm(layer.mlp.up_proj, project)
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)  # of [B, s, D]


def sp_transformer(
    full: Transformer, tp_group: dist.ProcessGroup, save_gathered: bool = False
) -> Transformer:
    """Lesson 03's model with the sequence split between its linears.

    Args:
        full: the single-process model, identical on every rank.
        save_gathered: keep gathered inputs for backward, as plain autograd does.
    Shapes: tokens [B, S], T divides S (pad_batch) → logits [B, S, ⌈V/T⌉] Shard(2).
    Communication: that of L layers, and one of each for both ends: a reduce-scatter
        after the embedding, an all-gather before the head. After backward there must
        come all_reduce_replicated_gradients.
    """
    project = gather_and_save if save_gathered else gather_then_apply_each
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, project)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, project)
    return model.train(full.training)  # in eval mode if full is


def all_reduce_replicated_gradients(model: nn.Module, tp_group) -> None:
    """Sum the gradients of replicated parameters over the TP group, before clipping.

    LayerNorms and the biases of row-parallel linears are whole on every rank, but each
    met one slice of the sequence: it has the part of its gradient that comes from those
    tokens. Without SP it had met all tokens. (Megatron-LM: finalize_model_grads.)
    Communication: one all-reduce of (6L + 2)·D: norms (4L + 2)·D, biases 2L·D.
    """
    trained = [p for p in model.parameters() if p.grad is not None]
    replicated = [p for p in trained if not getattr(p, "shardings", ())]
    flat = torch.cat([p.grad.flatten() for p in replicated])
    sums = all_reduce(flat, tp_group).split([p.numel() for p in replicated])
    for p, grad in zip(replicated, sums):
        p.grad.copy_(grad.view_as(p))


# ---- Less memory still: compute again what was not kept


class Checkpointed(nn.Module):
    """A module that keeps its input for backward, and computes the rest again there.

    Around an attention's core (selective recompute) it drops what grows with S², and is
    cheap to compute; around a layer, all (full recompute; arXiv:2205.05198, sec. 5).
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return checkpoint(self.inner, *inputs, use_reentrant=False)


# ---- The same by PyTorch's own API


def sp_plan(keyword: str = "x_BSD", local: bool = True) -> dict:
    """PyTorch's way to say all this, for this model and for Hugging Face's alike.

    Args:
        keyword: the name by which a layer hands x to its attention.
        local: between modules x is a plain [B, s, D]; else a DTensor [B, S, D].
    """
    by_keyword = parallel.PrepareModuleInput(  # it is called with keywords alone
        input_kwarg_layouts={keyword: Shard(1)},
        desired_input_kwarg_layouts={keyword: Replicate()},
    )
    gather = parallel.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    column, norm = parallel.ColwiseParallel(), parallel.SequenceParallel()
    row = parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    embedding = parallel.RowwiseParallel(  # a norm takes a plain tensor for a slice
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
    )
    head = parallel.ColwiseParallel(  # logits stay a DTensor: loss_parallel wants one
        input_layouts=Shard(1), use_local_output=False
    )
    return {
        "embed_tokens": embedding,
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": by_keyword,
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
    """The model by PyTorch's plan; its dropout, which no plan is about, by hand."""
    model = dtensor_transformer(full, sp_plan(), tp_group)
    for layer in model.layers:
        layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:  # the plan has cut it twice
        model.lm_head.weight = model.embed_tokens.weight
    return model.train(full.training)  # in eval mode if full is


def planned_loss(logits: DTensor, target_BS: Tensor) -> Tensor:
    """Call it, and its backward, within loss_parallel(). A DTensor knows what is left
    to sum, and full_tensor() does it; dist.all_reduce of a DTensor fails."""
    return mean_loss(logits, target_BS).full_tensor()


# ==== RUN


def main(args, report: Report) -> None:
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    report.begin({"tp": args.ranks})
    batches = make_batches(__doc__, args, args.steps)
    batches = [pad_batch(*batch, args.ranks) for batch in batches]
    args.seq_len = batches[0][0].shape[1]  # from here on T divides it
    full = make_tied(args)
    sp = sp_transformer(full, tp_group, args.save_gathered)
    runs = train_all(full, sp, batches, args, tp_group)
    show_steps(report, runs, "TP + SP", sp, tp_group)  # section 1; from lesson 02
    show_replicated(report, runs, sp)
    show_parts(report, full, batches[0], runs, tp_group)
    show_communication(report, runs, full.config)
    show_memory(report, tp_group)
    show_lengths(report, tp_group)
    if args.hf:
        show_hugging_face(report, batches[0], tp_group)


def train_all(full, sp, batches, args, tp_group) -> dict[str, TrainingRun]:
    """Four models, on the same batches and with the same masks of dropout."""
    by_hand = partial(sharded_loss, tp_group=tp_group, vocab_size=args.vocab_size)
    sum_up = partial(all_reduce_replicated_gradients, tp_group=tp_group)
    train = partial(train_transformer, batches=batches, args=args)
    runs = {"without TP": train("without TP", copy.deepcopy(full), loss_of=mean_loss)}
    tp = vocab_transformer(full, tp_group)
    runs["TP"] = train("TP", tp, loss_of=by_hand, tp_group=tp_group)
    runs["TP + SP"] = train(
        "TP + SP", sp, loss_of=by_hand, tp_group=tp_group, after_backward=sum_up
    )
    if 1 < args.ranks <= args.kv_heads:  # one rank has nothing to split
        planned = planned_transformer(full, tp_group)
        with parallel.loss_parallel():
            runs["DTensor"] = train("DTensor", planned, loss_of=planned_loss)
    return runs


def show_replicated(report: Report, runs: dict, sp: nn.Module) -> None:
    """Every gradient of step 1; those of parameters that no rank has cut, by name."""

    def fold(name: str) -> str:
        cut = getattr(sp.get_parameter(name), "shardings", ())
        return "cut, as in lesson 03" if cut else module_of(name)

    gradients = {what: run.gradients for what, run in runs.items() if what != "TP"}
    report.section("Gradients of step 1: cut ones; replicated ones (o, down: bias)")
    report.compare("gradients", gradients, fold=fold)


def show_parts(report: Report, full, batch, runs: dict, tp_group) -> None:
    """Gradients of replicated parameters, before and after the all-reduce."""
    args, (tokens_BS, target_BS) = report.args, batch
    model = sp_transformer(full, tp_group, args.save_gathered)
    torch.manual_seed(args.seed + 1)  # the masks of step 1
    sharded_loss(model(tokens_BS), target_BS, tp_group, args.vocab_size).backward()
    summed, wanted = runs["TP + SP"].gradients, runs["without TP"].gradients
    last, parts, s = args.layers - 1, {}, args.seq_len // args.ranks
    for name in ("input_layernorm.weight", "self_attn.o_proj.bias"):
        name = f"layers.{last}.{name}"
        if name not in wanted:  # a changed model
            continue
        parts[name] = model.get_parameter(name).grad
        is_whole = args.ranks > 1 and rel_diff(parts[name], wanted[name]) < 1e-3
        report.check(f"{name}: a rank has a part", float(is_whole))
    rows = []
    for rank, numbers in enumerate(gather_objects(first_numbers(parts, parts))):
        row = {"": f"rank {rank}", "positions": f"{rank * s} to {rank * s + s - 1}"}
        rows.append(row | numbers)
    rows.append({"": "their sum", "positions": "all"} | first_numbers(summed, parts))
    rows.append({"": "without TP", "positions": "all"} | first_numbers(wanted, parts))
    report.section(f"First numbers of two gradients, layer {last}: ranks have parts")
    report.table("parts", rows)


def first_numbers(tensors: dict[str, Tensor], names) -> dict[str, str]:
    texts = {}
    for name in names:
        three = tensors[name].flatten()[:3].tolist()
        texts[name.split(".", 2)[2]] = " ".join(f"{x:9.6f}" for x in three)
    return texts


def show_communication(report: Report, runs: dict, config: Config) -> None:
    """Calls and bytes of a step: all-reduces against gathers and scatters."""
    args, L, D = report.args, config.layers, config.hidden
    tokens, e = args.batch_size * args.seq_len, getattr(torch, args.dtype).itemsize
    n, halves, formulas = 2 * L + 1, ("all-gather", "reduce-scatter"), {}
    kinds = {"TP": ("all-reduce",), "TP + SP": halves, "DTensor": halves}
    for what in [what for what in kinds if what in runs]:
        for phase, collective in product(("forward", "backward"), kinds[what]):
            sent = n, "(2L + 1)·B·S·D", n * tokens * D * e
            formulas[what, phase, collective, "tp"] = sent
        formulas[what, "loss", "all-reduce", "tp"] = 3, "3·B·S", 3 * tokens * e
        if what == "TP + SP":
            sent = 1, "(6L + 2)·D", (6 * L + 2) * D * e
            formulas[what, "summing", "all-reduce", "tp"] = sent
        if what != "DTensor":  # whose calls are counted to the end of backward
            formulas[what, "clipping", "all-reduce", "tp"] = 1, "8 bytes", 8
            formulas[what, "backward", "all-reduce", "copy"] = sums_of_copies(report)
    if not args.save_gathered:
        sent = 2 * n, "(4L + 2)·B·S·D", 2 * n * tokens * D * e
        formulas["TP + SP", "backward", "all-gather", "tp"] = sent
    report.section(f"Communication of a step; a number has {e} bytes")
    report.ledger(formulas, args.steps)
    ring = Counter()
    for row in report.data["communication"]:
        if row["phase"] in ("forward", "backward") and row["axis"] == "tp":
            ring[row["what"]] += row["ring"]
    extra = 0 if args.save_gathered else ring["TP"] // 4
    off = abs(ring["TP + SP"] - extra - ring["TP"])
    report.check("a ring sends as much with SP, and x again", off, kind="bytes")
    report.say(f"   ring: a rank's bytes. SP: {extra:,} over TP, to gather x again")


def layer_variants(full: DecoderLayer, tp_group, scores: float, norms: float) -> list:
    """One layer in the ways of arXiv:2205.05198, table 2 (2/T stands in its text), each
    with the formula for the bytes it keeps, and what of it is whole, what cut by T.
    (The paper's s, b, h, a, t are our S, B, D, N, T.)"""

    def tp() -> DecoderLayer:
        layer = copy.deepcopy(full)
        parallelize_layer(layer, tp_group)
        return layer

    def sp(project=gather_then_apply_each) -> DecoderLayer:
        layer = tp()
        split_sequence(layer, tp_group, project)
        return layer

    def selective(layer: DecoderLayer) -> DecoderLayer:
        layer.self_attn.core = Checkpointed(layer.self_attn.core)
        return layer

    around, between = 10 + norms, 24
    both, every = around + between, around + between + scores
    whole_x = sp(gather_and_save)
    return [
        ("without TP", full, "34 + 5NS/D", every, 0),
        ("TP", tp(), "10 + (24 + 5NS/D)/T", around, between + scores),
        ("TP + SP", sp(), "(34 + 5NS/D)/T", 0, every),
        ("TP + SP, gathered kept", whole_x, "4 + (30 + 5NS/D)/T", 4, every - 4),
        ("TP, selective recompute", selective(tp()), "10 + 24/T", around, between),
        ("TP + SP, selective", selective(sp()), "34/T", 0, both),
        ("TP, full recompute", Checkpointed(tp()), "2", 2, 0),
        ("TP + SP, full", Checkpointed(sp()), "2/T", 0, 2),
    ]


def show_memory(report: Report, tp_group) -> None:
    """What a layer keeps for backward, measured, against the paper's table."""
    args, T, rows = report.args, report.args.ranks, []
    B, S, D, N = args.batch_size, args.seq_len, args.hidden, args.heads
    # As in the paper: with dropout, and as many key/value heads as heads.
    model = Transformer(Config(1, D, N, N, 1, S, 0.1)).to(args.device, torch.bfloat16)
    tables = model.cos, model.sin, model.future
    x_BSD = torch.randn(B, S, D).to(args.device, torch.bfloat16)
    # Mean and 1/σ of the two LayerNorms, which the paper leaves out.
    norms = 4 * (2 if args.device == "cpu" else 4) / D  # a GPU has them in float32
    ways = layer_variants(model.layers[0], tp_group, 5 * N * S / D, norms)
    COMM.what = "memory"
    for name, layer, formula, whole, cut in ways:
        x = shard(x_BSD, 1, tp_group) if "SP" in name else x_BSD.clone()
        saved = SavedBytes([*layer.parameters(), *tables])
        with saved:
            layer(x.requires_grad_(), tables)
        predicted = (whole + cut / T) * x_BSD.numel()
        row = {"layer": name, "formula": formula, "bytes": saved.total()}
        row["÷ BSD"] = saved.total() / x_BSD.numel()
        rows.append(row | {"predicted_bytes": round(predicted)})
    report.section("Bytes that a layer keeps for backward, in bfloat16, with dropout")
    report.say(
        f"   The paper's formulas, times B·S·D = {x_BSD.numel():,}; NS/D = "
        f"{N * S / D:g}. Mean and 1/σ of LayerNorms,\n   which it leaves out, add "
        f"{norms:.4g} to 34, 30 and 10. 5NS/D: scores; 24: between linears."
    )
    report.measure("memory", rows)


def show_lengths(report: Report, tp_group) -> None:
    """Lengths that T does not divide: padded, against one process without padding."""
    args, S = report.args, report.args.seq_len
    by_hand = partial(sharded_loss, tp_group=tp_group, vocab_size=args.vocab_size)
    sizes = vars(args) | {"dtype": "float64", "dropout": 0.0}
    longest = argparse.Namespace(**sizes | {"seq_len": 2 * S + 1 + args.ranks})
    full, losses = make_tied(longest), {"without TP": {}, "TP + SP": {}}
    gradients = {"without TP": {}, "TP + SP": {}}
    for length in sorted({1, max(1, S - 1), 2 * S + 1}):
        shorter = argparse.Namespace(**sizes | {"seq_len": length})
        (batch,) = make_batches(__doc__, shorter, 1)
        padded = pad_batch(*batch, args.ranks)
        for what, model, given, loss_of in (
            ("without TP", copy.deepcopy(full), batch, mean_loss),
            ("TP + SP", sp_transformer(full, tp_group), padded, by_hand),
        ):
            loss, _ = forward_backward("lengths", model, given, loss_of)
            if what == "TP + SP":
                all_reduce_replicated_gradients(model, tp_group)
            name = f"loss, length {length}, padded to {padded[0].shape[1]}"
            losses[what][name] = loss
            for name, gradient in unshard_model(model, "grad").items():
                gradients[what][f"length {length}: dL/d {name}"] = gradient
    report.section("Lengths that T does not divide, padded for SP; float64, no dropout")
    limit, _ = ALLOWED["float64"]
    report.compare("lengths", losses, limit)
    report.compare("length gradients", gradients, limit, lambda name: "all gradients")


def make_qwen2(args) -> nn.Module:
    """Hugging Face's Qwen2 with random weights; in float32, as its norms always are."""
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
    """`--hf`: the same plan on a model that was not written for this course."""
    # x stays a DTensor between modules: Qwen2 counts positions and cuts its causal mask
    # by the shape of x, which must read S and not s.
    plan = sp_plan("hidden_states", local=False)
    plan["layers.*.mlp.gate_proj"] = parallel.ColwiseParallel()
    plan = {f"model.{name}": style for name, style in plan.items()}
    plan["lm_head"] = plan.pop("model.lm_head")
    models = {"without TP": make_qwen2(report.args), "DTensor": make_qwen2(report.args)}
    device = models["DTensor"].device.type
    mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    planned = parallel.parallelize_module(models["DTensor"], mesh, plan)
    if report.args.tie:  # the plan has cut one weight twice
        planned.lm_head.weight = planned.model.embed_tokens.weight
    loss_of = lambda output, target_BS: mean_loss(output.logits, target_BS)
    losses, gradients = {}, {}
    with parallel.loss_parallel():
        for what, model in models.items():
            loss, _ = forward_backward(f"Qwen2, {what}", model, batch, loss_of)
            losses[what] = {"loss": loss}
            gradients[what] = unshard_model(model, "grad")
    report.section("The same plan on Hugging Face's Qwen2, in float32, random weights")
    allowed_loss, allowed = ALLOWED["float32"]
    report.compare("Qwen2 loss", losses, allowed_loss)
    report.compare("Qwen2", gradients, allowed, module_of)


# ==== BREAK IT

BREAKS = {
    "norms": dict(
        target="all_reduce_replicated_gradients",
        old="    sums = all_reduce(flat, tp_group).split(",
        new="    sums = flat.split(",
        what="gradients of LayerNorms and row-parallel biases are not all-reduced",
        symptom="step 1's loss is right; then replicas differ, and losses drift",
        why="they are whole on every rank, which met its own slice of the tokens only",
        reported="github.com/NVIDIA/Megatron-LM/issues/443, 474, 1446; NVIDIA/apex/1686",
    ),
    "row-bias": dict(
        target="RowParallelLinear.forward",
        old="    partial_y_BSD = F.linear(x_BSf, self.weight)\n",
        new="    partial_y_BSD = F.linear(x_BSf, self.weight, self.bias)\n"
        "    return self.reduce(partial_y_BSD, self.tp_group)\n",
        what="the row-parallel bias is added before the reduce-scatter",
        symptom="the first loss is off, also TP's, whose function is the same; with "
        "biases of zero it is right, and under SP their gradients T times too large",
        why="the sum adds it T times; after it each position gets it once, on one rank",
        reported="github.com/huggingface/text-generation-inference/issues/1036",
    ),
    "length": dict(
        target="pad_batch",
        old="    missing = -tokens_BS.shape[1] % ranks\n",
        new="    missing = 0\n",
        what="a batch whose length T does not divide is not padded",
        symptom="all is well until such a length comes: an error about sizes ends it",
        why="slices of the sequence have to be of one size: sums over ranks need it",
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
        symptom="no error, a loss that looks right; on a trained model it would not",
        why="rank t's first token is number t·s of the sequence, not number 0",
        reported="github.com/NVIDIA/Megatron-LM/issues/560 asks it of context parallelism",
    ),
    "mask": dict(
        target="split_sequence",
        old="    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)",
        new="    layer.dropout = Dropout(layer.dropout.p)",
        what="all slices of the sequence drop the same elements",
        symptom="it trains; losses are not one process's, tokens share their masks",
        why="with one seed on all ranks, each must take its own part of what is drawn",
        reported="github.com/NVIDIA/Megatron-LM/issues/206",
    ),
    "split": dict(
        target="GatherThenLinear.backward",
        old="reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)",
        new="shard(partial_grad_BSD, 1, ctx.tp_group)",
        what="backward of the gather takes a slice, and does not sum before",
        symptom="step 1's loss and the head's gradients are right, all others are not",
        why="each rank went on with x in its own way, with its columns of W: it has a "
        "term of dL/dx for every position",
        reported="github.com/NVIDIA/Megatron-LM/issues/1635, pytorch/pytorch issue 153016",
    ),
    "keywords": dict(
        target="sp_plan",
        old="        input_kwarg_layouts={keyword: Shard(1)},\n"
        "        desired_input_kwarg_layouts={keyword: Replicate()},\n",
        new="        input_layouts=Shard(1), desired_input_layouts=Replicate()\n",
        what="PyTorch's plan: keyword arguments, and no input_kwarg_layouts",
        symptom="an error at the first forward: inputs and input_layouts do not match",
        why="a module called by keywords alone has no input for input_layouts to name",
        reported="github.com/pytorch/pytorch/pull/124114, which added input_kwarg_layouts",
    ),
    "dtensor-loss": dict(
        target="planned_loss",
        old="    return mean_loss(logits, target_BS).full_tensor()",
        new="    loss = mean_loss(logits, target_BS)\n"
        "    dist.all_reduce(loss)\n"
        "    return loss",
        what="PyTorch's plan: dist.all_reduce of a loss that is a DTensor",
        symptom="an error: no sharding strategy for it (older: found no DeviceMesh)",
        why="a DTensor knows what there is to sum: .full_tensor() does it; after "
        ".to_local() a sum would count a loss that is whole already T times",
        reported="github.com/pytorch/pytorch/issues/152712, pytorch/torchtitan pull 779",
    ),
    "tiled": dict(
        target="sp_plan",
        old="output_layouts=Shard(1), use_local_output=local\n    )",
        new="output_layouts=Replicate(), use_local_output=local\n    )",
        what="PyTorch's plan: SequenceParallel is given a whole tensor",
        symptom="x leaves the first norm T·S long, and meets what is shorter: an error",
        why="SequenceParallel takes a plain tensor for this rank's slice and cuts none",
        reported="github.com/pytorch/pytorch/issues/129355, pytorch/examples issue 1271",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    sizes = {"layers": 2, "batch_size": 4, "seq_len": 32, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, steps=3, **sizes)
    add = parser.add_argument
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--save-gathered", action="store_true", help="keep gathered inputs")
    add("--hf", action="store_true", help="also Hugging Face's Qwen2, by the plan")
    args = parse_sizes(parser, ranks)
    if args.hf and args.kv_heads < ranks:
        raise ValueError(f"--hf: a plan makes no copies; take --kv-heads {ranks}")
    if args.hf and not find_spec("transformers"):
        raise ValueError("--hf needs Hugging Face's: pip install transformers==5.20.2")
    return args


# endregion


# ==== CARRIED OVER from 00, unchanged
# region


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    (lesson 00)"""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        for line in lines:
            # Every rank creates every group, in one order, even if it is not in it:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


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


class AllGatherWithGrad(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: the transpose of the above.

    (lesson 01)"""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


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


def module_of(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.*.mlp.up_proj (lesson 02)."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join(parts[:-1]) or name


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
    """Raise ValueError for a token outside the vocabulary, which no rank holds.

    (lesson 03)"""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        low = tokens.min().item()
        high = tokens.max().item()
        text = f"tokens {low} to {high}: the vocabulary is 0 to {vocab_size - 1}"
        raise ValueError(text)


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
        self.weight = shard_parameter(padded.weight, (0, tp_group))  # [v, D]

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
        p.rows = full.config.vocab_size  # the rows after these are padding
    return model.train(full.training)  # in eval mode if full is


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(x)[target] of sharded logits x; see vocab_parallel_cross_entropy.

    (lesson 03)"""

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        padding_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.to(torch.promote_types(logits_BSv.dtype, torch.float32))
        x_BSv = x_BSv.masked_fill(padding_v, float("-inf"))  # exp(−∞) = 0
        # First all-reduce: the largest logit, so that no exp overflows.
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. One rank has its column, the others add 0.
        column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
        picked_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(is_local_BS, 0)
        if smoothing:  # Σ q·(x − m) instead, in the same all-reduce
            picked_BS = (1 - smoothing) * picked_BS
            picked_BS += (
                smoothing / vocab_size * x_BSv.masked_fill(padding_v, 0).sum(-1)
            )
        loss_BS = sum_BS.log() - all_reduce(picked_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        has_target_BS = target_BS != ignore
        ctx.save_for_backward(
            softmax_BSv, column_BS, is_local_BS, has_target_BS, padding_v
        )
        ctx.vocab_size = vocab_size
        ctx.smoothing = smoothing
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(has_target_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # Nothing is sent: upstream_BS is equal on all ranks, because they all computed
        # the same loss, and softmax − q needs this rank's columns only.
        softmax_BSv, column_BS, is_local_BS, has_target_BS, padding_v = (
            ctx.saved_tensors
        )
        smooth_target = ctx.smoothing / ctx.vocab_size  # ε/V, for every token
        grad_BSv = (softmax_BSv - smooth_target).masked_fill(padding_v, 0)
        onehot_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -onehot_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored position is 0, but its softmax − q is not.
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


def sharded_loss(logits_BSv: Tensor, target_BS: Tensor, tp_group, vocab_size) -> Tensor:
    """Return the mean loss, from sharded logits (lesson 03)."""
    loss_BS = vocab_parallel_cross_entropy(logits_BSv, target_BS, tp_group, vocab_size)
    return mean_over_targets(loss_BS, target_BS)


def make_tied(args) -> Transformer:
    """Return lesson 02's model; with --tie, head and embedding share one weight.

    (lesson 03)"""
    full = make_transformer(args)
    if args.tie:
        # An embedding starts with a standard deviation of 1, which is much for a head:
        # its logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


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
