"""Beyond the lessons 09: more ranks than key/value heads.

Tensor parallelism splits attention by heads. Many models have few key/value heads (K),
each for several query heads. If there are more ranks than that (T > K), a key/value
head cannot be split further: c = T/K ranks hold the same head. Their replicas of its
weights stay equal only if each of them gets the sum of all c gradients.

Run it on 2, 4 or 8 ranks (4 show most):

    torchrun --standalone --nproc_per_node=4 beyond/09_shared_heads.py

What you will see: which rank holds which head; a small decoder trained in one process,
with tensor parallelism (TP), and with TP and sequence parallelism (SP), with equal
losses, gradients and parameters; the sums over replicas, and what they send; the memory
per rank, and why the KV cache does not shrink any more.

Try one change at a time. notebooks/09_shared_heads.ipynb, section 6, answers.
    1. --kv-heads 1 on 4 ranks: one head for all. The sums over replicas have the same
       bytes as before, but their ring column grows. Why? And which group has one rank?
    2. --kv-heads 4 on 4 ranks: c = 1, so lesson 02 could train it. Which calls are
       gone, and why does a rank still store as many bytes of k_proj and v_proj?
    3. Let sum_over_replicas sum p.grad, in p.register_post_accumulate_grad_hook. All
       values still agree. When would they not?

How to read this file: NEW is the lesson, RUN trains and prints. Bugs: tools/bug.py.
Short of time? Read repeat_heads, sum_over_replicas and the norm.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in the TP group, c = T/K ranks
    that hold the same key/value head, v = ⌈V/T⌉ rows of the vocabulary per rank.
    B·S·D is the size of an activation, H·(D + 1) that of one head's weight and bias.

Sources: arXiv:1911.02150 (one key/value head), arXiv:2305.13245 (few of them);
    github.com/bigcode-project/Megatron-LM/pull/36 (both gradients to sum).
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    from course import lesson00, lesson01, lesson02, lesson03, lesson04
    from harness import cell, gather_objects, marked, on_axes
    from stored_bytes import memory_rows
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 09: replicated key/value heads
# Read lines 61 to 211, in about 15 minutes. Stop at RUN.

# From lesson 00: mesh_groups(sizes, timeout) is this rank's group along each axis of a
# mesh. Every rank creates every group, also those it is not in, in the same order.
# From lesson 01: f (CopyToTP) is the identity forward and an all-reduce backward.
# sharding_of(p) is (dim, group), or None: over which group a parameter is sharded.
# From lesson 02: tp_transformer copies the model and splits attention by heads, with
# one f before q, k and v. T must divide the number of key/value heads.
# From lesson 04: sp_transformer also splits the sequence (SP) and the vocabulary.

# Here T ranks are more than K key/value heads. An example with T = 4, N = 8, K = 2:
#
#     rank              0       1       2       3
#     query heads      0 1     2 3     4 5     6 7      N/T for each rank
#     key/value head    0       0       1       1       rank t holds head t // c, c = 2
#
#     replica groups   [0, 1] and [2, 3]    the c ranks that hold the same head
#     kv groups        [0, 2] and [1, 3]    K ranks that together hold each head once
#
# Why t // c and not t % K? Query head i attends to key/value head i // (N/K). Rank t
# has query heads t·N/T to (t + 1)·N/T − 1, and all of them attend to head t // c.


def kv_groups(kv_heads: int, ranks: int, timeout: float) -> dict:
    """This rank's groups "kv" and "replica": the TP ranks as a mesh of K × c ranks.

    T = 4, K = 2: the mesh is [[0, 1], [2, 3]]. A row has the replicas of one head, a
    column has each head once.

    Args:
        kv_heads: K, which divides T.
        ranks: T. The TP group has all ranks here. On a mesh with other axes, call
            mesh_groups with all of them: {"dp": 2, "tp": 4} and {"dp": 2, "kv": 2,
            "replica": 2}.
        timeout: seconds.
    """
    return lesson00.mesh_groups({"kv": kv_heads, "replica": ranks // kv_heads}, timeout)


def repeat_heads(full: nn.Linear, head_size: int, copies: int) -> nn.Linear:
    """A linear in which each head exists c times in a row: heads 0 1 become 0 0 1 1.

    Shapes: weight [K·H, D] → [c·K·H, D], bias [K·H] → [c·K·H].
    """
    repeated = copy.deepcopy(full)
    repeated.out_features = copies * full.out_features
    for name, p in full.named_parameters():
        heads = p.detach().unflatten(0, (-1, head_size))  # [K, H, D] or [K, H]
        heads = heads.repeat_interleave(copies, 0)
        setattr(repeated, name, nn.Parameter(heads.flatten(0, 1)))
    return repeated


def repeat_kv_heads(full: lesson02.Transformer, copies: int) -> lesson02.Transformer:
    """A model of c·K key/value heads that computes the same outputs.

    Each query head attends to one of c equal heads instead of the one head.
    """
    model = copy.deepcopy(full)
    for layer in model.layers:
        attn = layer.self_attn
        attn.k_proj = repeat_heads(attn.k_proj, attn.core.head_size, copies)
        attn.v_proj = repeat_heads(attn.v_proj, attn.core.head_size, copies)
    return model


# ---- The gradient of a head that c ranks hold

# Which gradients are complete after backward? Lesson 02 has three kinds, and a
# replicated key/value head is of the third one: all c ranks compute the same keys and
# values, but each of them uses these for its own query heads only. So each rank has a
# partial gradient. Without the sum, replicas that started equal drift apart.


def sum_over_replicas(linear: nn.Module, kv_group, replica_group) -> None:
    """Make a linear of T heads one of K heads, each replicated on c ranks.

    The ranks of a kv group hold each head once, so gathering over kv_group gives the
    full parameter. The hook runs in backward, as soon as this rank's partial gradient
    exists and before it is added to p.grad. (It runs in every backward, so M times with
    M micro-batches. Large systems sum once, after the last one.)

    Communication: backward, for each parameter one all-reduce over c ranks, of H·D
        elements for a weight, H for a bias.
    """

    def sum_up(partial_grad: Tensor) -> Tensor:
        return lesson00.all_reduce(partial_grad, replica_group)

    for p in linear.parameters():
        p.sharding = (0, kv_group)
        p.replica_group = replica_group
        p.register_hook(sum_up)


def shared_heads_transformer(full, parallelize, groups) -> lesson02.Transformer:
    """A copy of the decoder over T ranks that hold K < T key/value heads.

    It is a model of T key/value heads whose replicas share their gradients.

    Args:
        parallelize: tp_transformer, or sp_transformer for TP and SP.
        groups: "tp", and "kv" and "replica" as kv_groups returns them.
    Communication: the same as parallelize, plus 4·L all-reduces over c ranks backward
        (weights and biases of k_proj and v_proj), 2·L·H·(D + 1) elements in total.
    """
    repeated = repeat_kv_heads(full, groups["replica"].size())
    model = parallelize(repeated, groups["tp"])  # rank t gets head t of 0 0 1 1
    for layer in model.layers:
        sum_over_replicas(layer.self_attn.k_proj, groups["kv"], groups["replica"])
        sum_over_replicas(layer.self_attn.v_proj, groups["kv"], groups["replica"])
    return model


# Backward has two kinds of sums. The hooks sum dL/dW of k and v over c ranks. f sums
# dL/dx over all T ranks, because all query heads of all ranks depend on x.
# They must run in the same order on all ranks. If a rank waited in its replica group
# while its replica waited in the TP group, both would wait forever. That does not
# happen, because all ranks run the same graph: autograd calls f and hooks in one order.


# ---- The norm of a gradient of which c ranks hold the same part


def global_norm_shared(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the full model's gradient, the same on every rank.

    A parameter that c ranks hold would count c times, so its squares are divided by c:
    c = 1 if it is sharded over all T ranks, T if it is replicated, T/K for a replicated
    key/value head. (Lesson 02 has the first two cases only.)
    Communication: one all-reduce of one float64.
    """
    total = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for p in model.parameters():
        if p.grad is None:
            continue
        c = tp_group.size()
        if lesson01.sharding_of(p):
            c //= lesson01.sharding_of(p)[1].size()
        total += p.grad.double().square().sum() / c
    return math.sqrt(lesson00.all_reduce(total, tp_group))


# ---- What it costs

# Past T = K, more ranks still divide the query heads and the MLP. They do not divide
# k_proj, v_proj and what they compute: each rank has max(K/T, 1) heads. For generating
# text that matters most for the KV cache, the keys and values of all earlier tokens:
# its size per rank stays the same, and c ranks hold the same cache.


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """Train the same model three times on the same batches, then compare."""
    groups = lesson00.mesh_groups({"tp": args.ranks}, args.timeout)
    # Ranks that hold one head each, and ranks that share a head.
    groups.update(kv_groups(args.kv_heads, args.ranks, args.timeout))
    full = lesson02.make_transformer(args)
    batches = lesson02.make_batches(__doc__, args, args.steps)

    runs = {}
    model = copy.deepcopy(full)
    alone = lesson02.train_transformer("without TP", model, batches, args)
    runs["without TP"] = alone
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.guard("TP"):
        runs["TP"] = train_shared(report, full, batches, args, groups)
    with report.guard("SP"):
        runs["SP"] = train_shared_sp(full, batches, args, groups)

    show_training(report, runs, args)
    show_head_replicas(report, runs, groups)
    show_gradients_shared(report, runs, full, batches[0], groups, args)
    show_communication_shared(report)
    show_memory_shared(report, runs)
    show_kv_cache(report, runs, batches[0])


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError if the model cannot be built or sharded."""
    T = args.ranks
    if args.kv_heads is None:
        args.kv_heads = 2 if T > 2 and T % 2 == 0 else 1
    args.heads = args.heads or T * math.ceil(8 / T)
    args.hidden = args.hidden or 8 * args.heads
    args.seq_len = args.seq_len or T * math.ceil(32 / T)
    if args.kv_heads > T:
        text = f"--kv-heads {args.kv_heads}: more than {T} ranks, so none is shared"
        raise ValueError(f"{text}; see 02_transformer_tp.py, or take {T}")
    if T % args.kv_heads != 0:
        left = f"{T} ranks % {args.kv_heads} = {T % args.kv_heads}, not 0"
        divisor = math.gcd(T, args.kv_heads)
        raise ValueError(f"--kv-heads {args.kv_heads}: {left}; take {divisor}")
    lesson00.must_divide(args, "heads", T, "ranks")
    lesson00.must_divide(args, "seq_len", T, "ranks")
    args.tp = args.kv_heads  # as many ranks as heads: what lesson 02 can check
    size = lesson02.transformer_sizes(args)
    size.update(T=T, c=T // args.kv_heads, v=math.ceil(args.vocab_size / T))
    return size


def train_shared(report, full, batches, args, groups) -> lesson02.TrainingRun:
    """TP: the model of lesson 02, with replicated key/value heads."""
    model = shared_heads_transformer(full, lesson02.tp_transformer, groups)
    show_heads(report, full, model, groups)
    norm_of = global_norm_shared
    return lesson02.train_transformer(
        "TP", model, batches, args, groups["tp"], norm_of=norm_of
    )


def train_shared_sp(full, batches, args, groups) -> lesson02.TrainingRun:
    """TP and SP: the model of lesson 04, with replicated key/value heads."""
    tp_group = groups["tp"]

    def loss_of(logits_BSv: Tensor, target_BS: Tensor) -> Tensor:
        return lesson03.sharded_loss(logits_BSv, target_BS, tp_group, args.vocab_size)

    def sum_replicated(model: nn.Module) -> None:
        # LayerNorms and some biases, but not key/value heads: those are sharded.
        lesson04.all_reduce_replicated_gradients(model, tp_group)

    model = shared_heads_transformer(full, lesson04.sp_transformer, groups)
    run = lesson02.train_transformer(
        "SP", model, batches, args, tp_group, loss_of=loss_of,
        after_backward=sum_replicated, norm_of=global_norm_shared,
    )  # fmt: skip
    lesson03.trim_spare_rows(run)  # T need not divide the vocabulary
    return run


# ---- The sections of the output, in order


def heads_held(local: nn.Module, full: nn.Linear, head_size: int) -> list[int]:
    """Which heads of the full linear this rank holds: found by their weights."""
    full_heads = full.weight.detach().unflatten(0, (-1, head_size))  # [heads, H, D]
    held = []
    for head in local.weight.detach().unflatten(0, (-1, head_size)):
        for number, full_head in enumerate(full_heads):
            if torch.equal(head, full_head):
                held.append(number)
    return held


def show_heads(report, full, model: lesson02.Transformer, groups) -> None:
    """Which rank holds which heads, and its two groups."""
    local = model.layers[0].self_attn
    full = full.layers[0].self_attn
    H = full.core.head_size
    # Not what should be there: each rank compares its weights with the full model's.
    held = {
        "query heads": heads_held(local.q_proj, full.q_proj, H),
        "key head": heads_held(local.k_proj, full.k_proj, H),
        "value head": heads_held(local.v_proj, full.v_proj, H),
        "replica group": dist.get_process_group_ranks(groups["replica"]),
        "kv group": dist.get_process_group_ranks(groups["kv"]),
    }
    rows = []
    for rank, of_rank in enumerate(gather_objects(held)):
        row = {"rank": rank}
        row["query heads"] = " ".join(map(str, of_rank["query heads"]))
        expected = rank // groups["replica"].size()
        for column in ("key head", "value head"):
            head = of_rank[column][0]  # one: T ≥ K, so a rank holds one of each
            # As a check of the kind "runs" it is named before the gradients it spoils.
            text = f"it is head {head}, and must be head {expected}"
            name = f"runs: {column} of rank {rank}"
            row[column] = marked(head, report.check(name, head != expected, text=text))
        row["replica group"] = str(of_rank["replica group"])
        row["kv group"] = str(of_rank["kv group"])
        rows.append(row)
    report.section("Who holds which head")
    report.table(rows)
    report.say("The MLP is sharded as in lesson 01. Everything else is Replicate().")


def show_training(report: lesson00.Report, runs: dict, args) -> None:
    """Losses, gradient norms before clipping, and the parameters after training."""
    report.section("Losses, gradient norms per step; after training, parameters")
    allowed = lesson00.ALLOWED[args.dtype]
    values = lambda field: lesson01.values_of(runs, field)
    report.compare("losses", values("losses"), lesson00.ALLOWED_LOSS[args.dtype])
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", values("norms"), allowed, brief=True)
    report.compare("parameters", values("parameters"), allowed, brief=True)


def show_head_replicas(report: lesson00.Report, runs: dict, groups) -> None:
    """After training, replicas must be bitwise identical: on c ranks or on all T."""
    if groups["tp"].size() == 1:
        return
    rows = []
    for run in ("TP", "SP"):
        if run in runs:
            heads, others = replica_diffs(runs[run], groups)
            rows.append(replica_row(report, "key/value heads", run, heads))
            rows.append(replica_row(report, "LayerNorms, losses, …", run, others))
    report.section("Replicas after training: key/value heads on c ranks, others on T")
    report.table(rows)


def replica_diffs(run: lesson02.TrainingRun, groups) -> tuple[dict, dict]:
    """The largest difference between replicas of each tensor: of heads, of others."""
    heads = {}
    others = {}
    for name, p in run.model.named_parameters():
        if hasattr(p, "replica_group"):
            replicas = lesson00.all_gather(p[None], 0, groups["replica"])
            heads[name] = largest_diff(replicas)
        elif not lesson01.sharding_of(p):  # otherwise each rank has its own shard
            replicas = lesson00.all_gather(p[None], 0, groups["tp"])
            others[name] = largest_diff(replicas)
    # Each rank computed the loss itself, from its own replica of the logits.
    losses = gather_objects(run.losses)
    others["losses"] = 0.0 if losses == [run.losses] * len(losses) else math.inf
    return heads, others


def largest_diff(replicas: Tensor) -> float:
    """The largest difference of any replica from the first one."""
    return max(lesson00.rel_diff(replica, replicas[0]) for replica in replicas)


def replica_row(report: lesson00.Report, label: str, run: str, diffs: dict) -> dict:
    """A row that counts how many tensors are equal on the ranks that hold them."""
    equal = 0
    for name, diff in diffs.items():
        equal += report.check(f"replicas: {name}, {run}", diff)
    row = {"replicas": label, "run": run, "tensors": len(diffs)}
    return row | {"equal": marked(equal, equal == len(diffs))}


def show_gradients_shared(report, runs: dict, full, batch, groups, args) -> None:
    """Gradients of step 1; that of a key head also before the sum over replicas."""
    allowed = lesson00.ALLOWED[args.dtype]
    report.section("Gradients of step 1: norms, and the largest relative difference")
    gradients = lesson01.values_of(runs, "gradients")
    report.compare("gradients", gradients, allowed, fold=lesson02.module_of)

    name = "layers.0.self_attn.k_proj.weight"
    # Without sum_over_replicas it is a model of T heads, each with its own gradient.
    model = lesson02.tp_transformer(
        repeat_kv_heads(full, groups["replica"].size()), groups["tp"]
    )
    torch.manual_seed(args.seed + 1)  # the dropout masks of step 1
    lesson02.mean_loss(model(batch[0]), batch[1]).backward()
    partial_grad = model.get_parameter(name).grad
    partial_grads = lesson00.all_gather(partial_grad[None], 0, groups["replica"])
    heads = runs["without TP"].gradients[name].chunk(groups["kv"].size())
    expected = heads[groups["kv"].rank()]  # this rank's head in the reference
    name = "one head: sum of partial key gradients"
    report.agree(name, partial_grads.sum(0), expected, allowed)

    report.say("dL/dW of key head 0, layer 0: what each replica computes, and the sum")
    lines = {f"rank {rank}": grad for rank, grad in enumerate(partial_grads)}
    lines["sum"] = partial_grads.sum(0)
    lines["without TP"] = expected
    for label, grad in lines.items():
        numbers = grad.flatten()[:4].tolist()
        report.say(f"{label:<12}" + " ".join(f"{x:11.8f}" for x in numbers))


def show_communication_shared(report: lesson00.Report) -> None:
    """Calls and bytes per step, as counted, against formulas."""
    size = report.size
    L = size["L"]
    x = "B·S·D·e"
    # Per layer a weight [H, D] and a bias [H], each for k and for v.
    replica_sums = (4 * L, "2·L·H·(D+1)·e")
    # Once before and after each attention and MLP, once for the embedding or the head.
    per_block = (2 * L + 1, f"(2·L+1)·{x}")
    formulas = {
        ("TP", "forward", "all-reduce", "tp"): (2 * L, f"2·L·{x}"),
        ("TP", "backward", "all-reduce", "tp"): (2 * L, f"2·L·{x}"),
        ("TP", "backward", "all-reduce", "replica"): replica_sums,
        ("TP", "clipping", "all-reduce", "tp"): (1, "8"),
        ("SP", "forward", "all-gather", "tp"): per_block,
        ("SP", "forward", "reduce-scatter", "tp"): per_block,
        ("SP", "loss", "all-reduce", "tp"): (3, "3·B·S·e"),
        # x is gathered again for the gradients of weights (lesson 04).
        ("SP", "backward", "all-gather", "tp"): (4 * L + 2, f"(4·L+2)·{x}"),
        ("SP", "backward", "reduce-scatter", "tp"): per_block,
        ("SP", "backward", "all-reduce", "replica"): replica_sums,
        ("SP", "summing", "all-reduce", "tp"): (1, "(6·L+2)·D·e"),
        ("SP", "clipping", "all-reduce", "tp"): (1, "8"),
    }
    report.section("Communication per step; new: sums over replicas, axis `replica`")
    report.ledger(on_axes(formulas, {"tp": size["T"], "replica": size["c"]}))
    heads = lesson00.evaluate("2·L·H·(D+1)·e", size)
    layers = lesson00.evaluate("4·L·B·S·D·e", size)
    if size["c"] > 1:
        share = f"{heads / layers:.1%} of the {layers:,} of f and g"
        report.say(f"Sums over replicas: {heads:,} bytes per step, {share}.")
        report.say("They do not grow with the batch; those of f and g do.")


def show_memory_shared(report: lesson00.Report, runs: dict) -> None:
    """Bytes of parameters and optimizer per rank: a formula per module, and the sum."""
    size = report.size
    parameters = {
        "k_proj, v_proj": "2·L·k·H·(D+1)·e",
        "q_proj, up_proj": "L·(D + F)·(D+1)·e/T",
        "weights of o_proj, down_proj": "L·(D + F)·D·e/T",
        "biases of these, LayerNorms": "(6·L+2)·D·e",
        "embed_tokens, lm_head": "(2·D+1)·v·e",
    }
    # k: key/value heads per rank. v: rows of the vocabulary per rank; SP splits it.
    letters = {
        "without TP": dict(size, T=1, k=size["K"], v=size["V"]),
        "TP": dict(size, k=1, v=size["V"]),
        "SP": dict(size, k=1),
    }
    report.section("Memory per rank, in bytes; k = max(K/T, 1) heads per rank")
    rows, _ = memory_rows(report, parameters, letters, runs, "16·L + 5")
    report.table(rows)


def show_kv_cache(report: lesson00.Report, runs: dict, batch) -> None:
    """Bytes of keys and values that generation would store per rank, for several T."""
    size = report.size
    measured = {1: bytes_of_keys_and_values(runs["without TP"].model, batch)}
    if "TP" in runs:
        measured[size["T"]] = bytes_of_keys_and_values(runs["TP"].model, batch)
    formula = "2·L·B·S·k·H·e"
    rows = []
    # The other numbers of ranks are not running here, so their rows are predicted.
    for T in sorted({1, size["K"], size["T"], 2 * size["T"]}):
        heads = max(size["K"] // T, 1)
        nbytes = lesson00.evaluate(formula, dict(size, k=heads))
        shown = f"{nbytes:,}"
        if T in measured:
            nbytes = measured[T]
            name = f"memory: KV cache, {T} ranks"
            shown = cell(report, name, nbytes, formula, k=heads)
        row = {"ranks": T, "heads per rank": heads, "formula": formula}
        row["KV cache per rank"] = shown
        row["on all ranks"] = f"{T * nbytes:,}"
        row["source"] = "measured" if T in measured else "predicted"
        rows.append(row)
    report.section("KV cache of B·S tokens, in bytes: past T = K it is not divided")
    report.table(rows)


def bytes_of_keys_and_values(model: lesson02.Transformer, batch) -> int:
    """Measured: what k_proj and v_proj of all layers return in one forward pass."""
    nbytes = []

    def add_size(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        nbytes.append(output.nbytes)

    hooks = []
    for layer in model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            hooks.append(linear.register_forward_hook(add_size))
    with torch.no_grad():
        model(batch[0])
    for hook in hooks:
        hook.remove()
    return sum(nbytes)


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson02.add_model_flags(parser)
    text = "N (8, or the next multiple of the ranks), D (8 per head), K (2 on an even "
    parser.epilog = f"defaults: {text}number of ranks from 4 on)"
    parser.set_defaults(hidden=None, heads=None, kv_heads=None, seq_len=None)
    lesson00.launch(main, sizes, parser)
