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

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read repeat_heads, sum_over_replicas and the norm.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in the TP group, c = T/K ranks
    that hold the same key/value head, v = ⌈V/T⌉ rows of the vocabulary per rank.
    X = B·S·D elements of an activation, W = H·(D + 1) of one head's weight and bias.

Sources: arXiv:1911.02150 (one key/value head), arXiv:2305.13245 (few of them);
    github.com/bigcode-project/Megatron-LM/pull/36 (both gradients to sum).
"""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

# ==== NEW in 09: replicated key/value heads

# From lesson 00: mesh_groups(sizes, timeout) is this rank's group along each axis of a
# mesh. Every rank creates every group, also those it is not in, in the same order.
# From lesson 01: f (CopyToTP) is the identity forward and an all-reduce backward.
# shardings_of(p) is ((dim, group), …): over which groups a parameter is sharded.
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
    return mesh_groups({"kv": kv_heads, "replica": ranks // kv_heads}, timeout)


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


def repeat_kv_heads(full: Transformer, copies: int) -> Transformer:
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
    for p in linear.parameters():
        p.shardings = ((0, kv_group),)
        p.replica_group = replica_group
        p.register_hook(lambda partial_grad: all_reduce(partial_grad, replica_group))


def shared_heads_transformer(full: Transformer, parallelize, groups) -> Transformer:
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
        for _, group in shardings_of(p):
            c //= group.size()
        total += p.grad.double().square().sum() / c
    return math.sqrt(all_reduce(total, tp_group))


# ---- What it costs

# Past T = K, more ranks still divide the query heads and the MLP. They do not divide
# k_proj, v_proj and what they compute: each rank has max(K/T, 1) heads. For generating
# text that matters most for the KV cache, the keys and values of all earlier tokens:
# its size per rank stays the same, and c ranks hold the same cache.


# ==== RUN


def main(args, report: Report) -> None:
    """Train the same model three times on the same batches, then compare."""
    groups = mesh_groups({"tp": args.ranks}, args.timeout)
    groups.update(kv_groups(args.kv_heads, args.ranks, args.timeout))
    size = sizes_of(args)
    size["c"] = groups["replica"].size()
    size["v"] = math.ceil(args.vocab_size / args.ranks)
    size["X"] = evaluate("B·S·D", size)
    size["W"] = evaluate("H·(D + 1)", size)
    report.begin({"tp": args.ranks}, size)
    # The table of calls needs the size of each group in which something is sent.
    report.mesh = {"tp": args.ranks, "replica": size["c"]}
    full = make_transformer(args)
    batches = make_batches(__doc__, args, args.steps)

    runs = {}
    model = copy.deepcopy(full)
    runs["without TP"] = train_transformer("without TP", model, batches, args)
    # If your edit raises an error in one run, its column says so; the others continue.
    with report.column("TP"):
        runs["TP"] = train_shared(report, full, batches, groups)
    with report.column("SP"):
        runs["SP"] = train_shared_sp(full, batches, args, groups)

    show_training(report, runs)
    show_head_replicas(report, runs, groups)
    show_gradients_shared(report, runs, full, batches[0], groups)
    show_communication_shared(report, size)
    show_memory_shared(report, runs, size, batches[0])
    show_kv_cache(report, runs, size, batches[0])


def train_shared(report: Report, full: Transformer, batches, groups) -> TrainingRun:
    """TP: the model of lesson 02, with replicated key/value heads."""
    model = shared_heads_transformer(full, tp_transformer, groups)
    show_heads(report, full, model, groups)
    norm_of = global_norm_shared
    return train_transformer(
        "TP", model, batches, report.args, groups["tp"], norm_of=norm_of
    )


def train_shared_sp(full: Transformer, batches, args, groups) -> TrainingRun:
    """TP and SP: the model of lesson 04, with replicated key/value heads."""
    tp_group = groups["tp"]

    def loss_of(logits_BSv: Tensor, target_BS: Tensor) -> Tensor:
        return sharded_loss(logits_BSv, target_BS, tp_group, args.vocab_size)

    def sum_replicated(model: nn.Module) -> None:
        # LayerNorms and some biases, but not key/value heads: those have shardings.
        all_reduce_replicated_gradients(model, tp_group)

    model = shared_heads_transformer(full, sp_transformer, groups)
    run = train_transformer(
        "SP", model, batches, args, tp_group, loss_of=loss_of,
        after_backward=sum_replicated, norm_of=global_norm_shared,
    )  # fmt: skip
    trim_padding(run)  # of the vocabulary, whose rows T need not divide
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


def show_heads(report: Report, full: Transformer, model: Transformer, groups) -> None:
    """Which rank holds which heads, and its two groups."""
    local = model.layers[0].self_attn
    full = full.layers[0].self_attn
    H = full.core.head_size
    # Not what should be there: each rank compares its weights with the full model's.
    held = {
        "query heads": heads_held(local.q_proj, full.q_proj, H),
        "key heads": heads_held(local.k_proj, full.k_proj, H),
        "value heads": heads_held(local.v_proj, full.v_proj, H),
        "replica group": dist.get_process_group_ranks(groups["replica"]),
        "kv group": dist.get_process_group_ranks(groups["kv"]),
    }
    rows = []
    for rank, of_rank in enumerate(gather_objects(held)):
        row = {"rank": rank}
        row["query heads"] = " ".join(map(str, of_rank["query heads"]))
        # One number each: T ≥ K, so a rank holds one key/value head.
        row["key head"] = of_rank["key heads"][0]
        row["value head"] = of_rank["value heads"][0]
        row["replica group"] = str(of_rank["replica group"])
        row["kv group"] = str(of_rank["kv group"])
        for column in ("key head", "value head"):
            head = rank // groups["replica"].size()
            # As a check of the kind "runs" it is named before the gradients it spoils.
            report.expect(row, column, "runs", f"{column} of rank {rank}", head)
        rows.append(row)
    report.section("Who holds which head")
    report.table("heads", rows)
    report.say("   The MLP is sharded as in lesson 01. Everything else is Replicate().")


def show_head_replicas(report: Report, runs: dict, groups) -> None:
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
    report.table("replicas", rows)


def replica_diffs(run: TrainingRun, groups) -> tuple[dict, dict]:
    """The largest difference between replicas of each tensor: of heads, of others."""
    heads = {}
    others = {}
    for name, p in run.model.named_parameters():
        if hasattr(p, "replica_group"):
            replicas = all_gather(p[None], 0, groups["replica"])
            heads[name] = max(rel_diff(replica, replicas[0]) for replica in replicas)
        elif not shardings_of(p):  # otherwise each rank has its own shard
            replicas = all_gather(p[None], 0, groups["tp"])
            others[name] = max(rel_diff(replica, replicas[0]) for replica in replicas)
    # Each rank computed the loss itself, from its own replica of the logits.
    losses = gather_objects(run.losses)
    others["losses"] = 0.0 if losses == [run.losses] * len(losses) else math.inf
    return heads, others


def replica_row(report: Report, label: str, run: str, diffs: dict) -> dict:
    """A row that counts how many tensors are equal on the ranks that hold them."""
    row = {"replicas": label, "run": run, "tensors": len(diffs), "equal": 0}
    for name, diff in diffs.items():
        if report.check("replicas", f"{name}, {run}", diff):
            row["equal"] += 1
    row["off"] = [] if row["equal"] == row["tensors"] else ["equal"]
    return row


def show_gradients_shared(report: Report, runs: dict, full, batch, groups) -> None:
    """Gradients of step 1; that of a key head also before the sum over replicas."""
    report.section("Gradients of step 1: norms, and the largest relative difference")
    report.compare("gradients", values_of(runs, "gradients"), fold=module_of)

    name = "layers.0.self_attn.k_proj.weight"
    # Without sum_over_replicas it is a model of T heads, each with its own gradient.
    model = tp_transformer(
        repeat_kv_heads(full, groups["replica"].size()), groups["tp"]
    )
    torch.manual_seed(report.args.seed + 1)  # the dropout masks of step 1
    mean_loss(model(batch[0]), batch[1]).backward()
    partial_grad = model.get_parameter(name).grad
    partial_grads = all_gather(partial_grad[None], 0, groups["replica"])
    heads = runs["without TP"].gradients[name].chunk(groups["kv"].size())
    expected = heads[groups["kv"].rank()]  # this rank's head in the reference
    diff = rel_diff(partial_grads.sum(0), expected)
    report.check("gradients", "sum of partial key gradients", diff, report.allowed)

    report.say(
        "   dL/dW of key head 0, layer 0: what each replica computes, and the sum"
    )
    lines = {f"rank {rank}": grad for rank, grad in enumerate(partial_grads)}
    lines["sum"] = partial_grads.sum(0)
    lines["without TP"] = expected
    for label, grad in lines.items():
        numbers = grad.flatten()[:4].tolist()
        report.say(f"   {label:<12}" + " ".join(f"{x:11.8f}" for x in numbers))


def show_communication_shared(report: Report, size: dict[str, int]) -> None:
    """Calls and bytes per step, as counted, against formulas."""
    # Per layer a weight [H, D] and a bias [H], each for k and for v: W/2 on average.
    replica_sums = "4·L × W·e/2"
    # Once before and after each attention and MLP, once for the embedding or the head.
    per_block = "(2·L+1) × X·e"
    formulas = {
        Call("TP", "forward", "all-reduce", "tp"): "2·L × X·e",
        Call("TP", "backward", "all-reduce", "tp"): "2·L × X·e",
        Call("TP", "backward", "all-reduce", "replica"): replica_sums,
        Call("TP", "clipping", "all-reduce", "tp"): "1 × 8",
        Call("SP", "forward", "all-gather", "tp"): per_block,
        Call("SP", "forward", "reduce-scatter", "tp"): per_block,
        Call("SP", "loss", "all-reduce", "tp"): "3 × B·S·e",
        # x is gathered again for the gradients of weights (lesson 04).
        Call("SP", "backward", "all-gather", "tp"): "(4·L+2) × X·e",
        Call("SP", "backward", "reduce-scatter", "tp"): per_block,
        Call("SP", "backward", "all-reduce", "replica"): replica_sums,
        Call("SP", "summing", "all-reduce", "tp"): "1 × (6·L+2)·D·e",
        Call("SP", "clipping", "all-reduce", "tp"): "1 × 8",
    }
    report.section("Communication per step; new: sums over replicas, axis `replica`")
    report.ledger(formulas, size, steps=report.args.steps)
    heads = evaluate("2·L·W·e", size)
    layers = evaluate("4·L·X·e", size)
    if size["c"] > 1:
        share = f"{heads / layers:.1%} of the {layers:,} of f and g"
        report.say(f"   Sums over replicas: {heads:,} bytes per step, {share}.")
        report.say("   They do not grow with the batch; those of f and g do.")


def show_memory_shared(report: Report, runs: dict, size: dict, batch) -> None:
    """Bytes of parameters and optimizer per rank: a formula per module, and the sum."""
    parameters = {
        "k_proj, v_proj": "2·L·k·W·e",
        "q_proj, up_proj": "L·(D + F)·(D+1)·e/T",
        "weights of o_proj, down_proj": "L·(D + F)·D·e/T",
        "biases of these, LayerNorms": "(6·L+2)·D·e",
        "embed_tokens, lm_head": "(2·D+1)·v·e",
    }
    # k: key/value heads per rank. v: rows of the vocabulary per rank; SP splits it.
    sizes = {
        "without TP": dict(size, T=1, k=size["K"], v=size["V"]),
        "TP": dict(size, k=1, v=size["V"]),
        "SP": dict(size, k=1),
    }
    measured = {run: bytes_stored(runs[run], batch) for run in sizes if run in runs}
    report.section("Memory per rank, in bytes; k = max(K/T, 1) heads per rank")
    rows, sums = add_up(parameters, sizes)
    rows.append(measured_row(report, "parameters", "sum", sums, measured))
    rows.append(measured_row(report, "gradients", "sum", sums, measured))
    # AdamW stores two moments of each parameter, and the number of its steps.
    tensors = len(runs["without TP"].parameters)
    sums = {run: 2 * sums[run] + 4 * tensors for run in sizes}
    formula = f"2·sum + 4·{tensors} tensors"
    rows.append(measured_row(report, "optimizer state", formula, sums, measured))
    report.table("memory", rows)


def show_kv_cache(report: Report, runs: dict, size: dict, batch) -> None:
    """Bytes of keys and values that generation would store per rank, for several T."""
    measured = {1: bytes_of_keys_and_values(runs["without TP"].model, batch)}
    if "TP" in runs:
        measured[size["T"]] = bytes_of_keys_and_values(runs["TP"].model, batch)
    formula = "2·L·B·S·k·H·e"
    rows = []
    # The other numbers of ranks are not running here, so their rows are predicted.
    for T in sorted({1, size["K"], size["T"], 2 * size["T"]}):
        heads = max(size["K"] // T, 1)
        predicted = evaluate(formula, dict(size, k=heads))
        row = {"ranks": T, "heads per rank": heads, "formula": formula}
        row["KV cache per rank"] = measured.get(T, predicted)
        row["on all ranks"] = T * row["KV cache per rank"]
        row["source"] = "measured" if T in measured else "predicted"
        row["ok"] = None
        if T in measured:
            name = f"KV cache, {T} ranks"
            report.expect(row, "KV cache per rank", "memory", name, predicted)
        rows.append(row)
    report.section("KV cache of B·S tokens, in bytes: past T = K it is not divided")
    report.table("kv_cache", rows)


def bytes_of_keys_and_values(model: Transformer, batch) -> int:
    """Measured: what k_proj and v_proj of all layers return in one forward pass."""
    sizes = []

    def add_size(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        sizes.append(output.nbytes)

    hooks = []
    for layer in model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            hooks.append(linear.register_forward_hook(add_size))
    with torch.no_grad():
        model(batch[0])
    for hook in hooks:
        hook.remove()
    return sum(sizes)


# ==== BREAK IT

BREAKS = {
    "copies": dict(
        target="sum_over_replicas",
        old="        p.register_hook(lambda partial_grad: "
        "all_reduce(partial_grad, replica_group))\n",
        new="",
        what="ranks that hold the same key/value head do not sum its gradients",
        symptom="step 1's loss is right; gradients of k and v are not, replicas differ",
        why="each replica has the gradient from its own rank's queries: 1 of c partial "
        "gradients",
        reported="github.com/bigcode-project/Megatron-LM/pull/12 (biases differed)",
        audit="gradient sum",
    ),
    "input": dict(
        target="copy_then_apply_each",
        old="    x_BSD = CopyToTP.apply(x_BSD, linears[0].tp_group)\n"
        "    return apply_each(x_BSD, *linears)\n",
        new="    q_proj, k_proj, v_proj = linears\n"
        "    q = q_proj(CopyToTP.apply(x_BSD, q_proj.tp_group))\n"
        "    return [q, k_proj(x_BSD), v_proj(x_BSD)]\n",
        what="f is applied to the input of q only, because k and v are replicated",
        symptom="step 1's loss and the last layer's gradients of q, k and v are right; "
        "LayerNorms in front of attention get a different gradient on each rank",
        why="keys and values of a rank serve its own queries only, so dL/dx through "
        "them is partial as well",
        reported="github.com/bigcode-project/Megatron-LM/issues/35 and pull 36",
        audit="gradient differs between replicas",
    ),
    "twice": dict(
        target="sum_over_replicas",
        old="        p.replica_group = replica_group\n",
        new="        p.replica_group = replica_group\n"
        "        p.register_hook(lambda grad: all_reduce(grad, replica_group))\n",
        what="gradients of key/value heads are summed over replicas a second time",
        symptom="replicas stay equal, but gradients of k and v are c times too large",
        why="after the first sum they are complete: another sum multiplies them by c",
        reported="github.com/inclusionAI/AReno/pull/496; NVIDIA/Megatron-LM, 6839",
        audit="gradient factor",
    ),
    "order": dict(
        target="repeat_heads",
        old="        heads = heads.repeat_interleave(copies, 0)\n",
        new="        heads = torch.cat([heads] * copies)\n",
        what="heads are repeated as 0 1 0 1 instead of 0 0 1 1: rank t gets t % K",
        symptom="shapes fit; the loss is wrong from step 1 on, except with K = 1",
        why="a rank's queries attend to a key/value head that belongs to other queries",
        reported="github.com/onnx/onnx/pull/7274",
    ),
    "norm": dict(
        target="global_norm_shared",
        old="        for _, group in shardings_of(p):\n"
        "            c //= group.size()\n",
        new="        if shardings_of(p):\n            c = 1\n",
        what="the norm has lesson 02's rule: a parameter is sharded or replicated",
        symptom="gradients of step 1 are right, but norms are too large",
        why="the sum over the TP group has the squares of a key/value head c times",
        reported="github.com/ROCm/TransformerEngine/pull/715; NVIDIA-NeMo/RL, 3788",
        audit="norm",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    """The flags of the model. ValueError if it cannot be built or sharded."""
    sizes = {"steps": 3, "layers": 2, "batch_size": 4, "seq_len": 0, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, sections=7, **sizes)
    add = parser.add_argument
    add("--hidden", type=positive, help="D (8 per head)")
    add("--heads", type=positive, help="N (8, or the next multiple of the ranks)")
    add("--kv-heads", type=positive, help="K (2 on an even number of ranks from 4 on)")
    add("--dropout", type=float, default=0.1, help="probability (0.1)")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    args = parser.parse_args()
    if args.kv_heads is None:
        args.kv_heads = 2 if ranks > 2 and ranks % 2 == 0 else 1
    args.heads = args.heads or ranks * math.ceil(8 / ranks)
    args.hidden = args.hidden or 8 * args.heads
    args.seq_len = args.seq_len or ranks * math.ceil(32 / ranks)
    if args.kv_heads > ranks:
        text = f"--kv-heads {args.kv_heads}: more than {ranks} ranks, so none is shared"
        raise ValueError(f"{text}; see 02_transformer_tp.py, or take {ranks}")
    if ranks % args.kv_heads != 0:
        left = f"{ranks} ranks % {args.kv_heads} = {ranks % args.kv_heads}, not 0"
        divisor = math.gcd(ranks, args.kv_heads)
        raise ValueError(f"--kv-heads {args.kv_heads}: {left}; take {divisor}")
    if args.bug in BREAKS and args.kv_heads == ranks > 1:
        raise ValueError(f"--break with --kv-heads {ranks}: no head has a replica")
    if args.bug == "order" and args.kv_heads == 1:
        raise ValueError("--break order: all ranks hold head 0; start 4 ranks")
    must_divide(args, "heads", ranks, "ranks")
    must_divide(args, "seq_len", ranks, "ranks")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    raise_refused(args)
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout {args.dropout}: must be at least 0 and below 1")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be above 0")
    return args


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
from typing import NamedTuple

import torch.nn.functional as F
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


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank (lesson 01)."""
    return sum(local(x).nbytes for x in tensors if x is not None)


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


def add_up(formulas: dict[str, str], sizes: dict[str, dict]) -> tuple[list, dict]:
    """A row for each formula, with its value in each run; and the sum of each run.

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


def sizes_of(args) -> dict[str, int]:
    """The letters of the shape legend, and e: bytes per element (lesson 02)."""
    e = getattr(torch, args.dtype).itemsize
    return dict(
        B=args.batch_size, S=args.seq_len, D=args.hidden, N=args.heads,
        K=args.kv_heads, H=args.hidden // args.heads, F=4 * args.hidden,
        V=args.vocab_size, L=args.layers, T=args.ranks, e=e,
    )  # fmt: skip


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
        p.rows = full.config.vocab_size  # rows of the full weight; the rest is padding
    return model.train(full.training)  # in eval mode if full is


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(x)[target] of sharded logits x; see vocab_parallel_cross_entropy.

    (lesson 03)"""

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        padding_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.masked_fill(padding_v, float("-inf"))  # exp(−∞) = 0
        x_BSv = x_BSv.to(torch.promote_types(x_BSv.dtype, torch.float32))
        # First all-reduce: the largest logit, so that no exp overflows.
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. Only the rank with the target's row of the head has
        # this column; the others add 0. IGNORE is in no rank's range.
        column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
        picked_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(is_local_BS, 0)
        if smoothing:  # Σ q·(x − m) instead; padding (−∞) is left out
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
        extra_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)  # at the target
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -extra_BS.unsqueeze(-1))
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


# ==== CARRIED OVER from 04, unchanged
# region


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """Sum the ranks' partial outputs; each rank gets its slice of the positions.

    (lesson 04)"""
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


class GatherThenLinear(torch.autograd.Function):
    """All-gather the sequence, apply linears, and save only this rank's slice.

    (lesson 04)"""

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
        saved = ctx.saved_tensors  # one read: Checkpointed (below) forbids a second
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

    (lesson 04)"""
    parameters = []
    for linear in linears:
        parameters.append(linear.weight)
        parameters.append(linear.bias)
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same by plain autograd (--save-gathered): saves T slices, gathers once.

    (lesson 04)"""
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


class LinearWithInputComm(nn.Module):
    """A column-parallel linear that one of the two functions above computes.

    (lesson 04)"""

    def __init__(self, linear: ColumnParallelLinear, gather_and_apply):
        super().__init__()
        self.tp_group = linear.tp_group
        self.weight = linear.weight
        self.bias = linear.bias
        self.gather_and_apply = gather_and_apply

    def forward(self, x_BsD: Tensor) -> Tensor:
        outputs = self.gather_and_apply(x_BsD, self)
        return outputs[0]


def split_sequence(
    layer: DecoderLayer, tp_group, gather_and_apply=gather_then_apply_each
) -> None:
    """Edit a layer of tp_transformer: around attention and MLP the sequence is split.

    (lesson 04)"""
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

    (lesson 04)"""
    gather_and_apply = gather_and_save if save_gathered else gather_then_apply_each
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, gather_and_apply)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, gather_and_apply)
    return model.train(full.training)  # in eval mode if full is


def all_reduce_replicated_gradients(model: nn.Module, tp_group) -> None:
    """Sum the gradients of replicated parameters over the TP group, before clipping.

    (lesson 04)"""
    replicated = []
    for p in model.parameters():
        if p.grad is not None and not shardings_of(p):
            replicated.append(p)
    partial_flat = torch.cat([p.grad.flatten() for p in replicated])
    flat = all_reduce(partial_flat, tp_group)
    for p, grad in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.copy_(grad.view_as(p))


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
