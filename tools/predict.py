"""What lesson 05 holds, sends and computes on any mesh, by formulas of the sizes.

Bytes sent and saved are those that lesson 05 counts (`traffic`, `saved_bytes`: checked
against its counters); the formulas of its tables are the lesson's own functions. The
time is a roofline: arithmetic at the peak, then messages at the links' rates, then the
pipeline's bubble. `search` goes through all layouts of a model on a machine;
tools/plan.py is its command, docs/_static/planner the same formulas in a page.

Sources: 2104.04473 (pipelines, FLOPs, Table 1), 2205.05198 (activations), 1910.02054
(16 bytes per parameter, ZeRO), 2205.14135 (FlashAttention), 2204.02311 (MFU), all on
arxiv.org; lesson 00 (a ring's cost), lesson 05; beyond/11 (cp, the fourth axis, which
is 1 unless it is asked for: its ring's messages and saved bytes, as counted there).
"""

import argparse
import functools
import importlib
import json
import math
import sys
from collections import Counter
from typing import NamedTuple

from check import ROOT

for folder in (ROOT, ROOT / "beyond"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
lesson = importlib.import_module("course").lesson05
Calls = lesson.Calls

ATTENTION = "math", "flash"  # written out, as in the lessons; or FlashAttention
ZERO = 0, 1, 2, 3  # ZeRO's stage
RECOMPUTE = "none", "selective", "full"  # nothing; attention's core; entire layers
SIZES = "layers hidden heads kv_heads ffn vocab_size seq_len batch_size".split()
# What else a model is, and what lesson 05's model is. biases: of "all" linears and
# LayerNorms; of the q, k and v projections only, with RMSNorm ("qkv"); "none", with
# RMSNorm. gated: an MLP of three matrices (gate, up, down). tie: one vocabulary matrix.
STYLE = {"gated": False, "biases": "all", "tie": False}
BIASES = "all", "qkv", "none"
MACHINE = "gpus node gpu_memory reserve gpu_flops inside between".split()
AXES = "dp", "pp", "tp"
LAYOUT = "dp pp tp micro_batch microbatches recompute attention zero".split()
GB = 1e9


def model(
    layers, hidden, heads, kv_heads, vocab_size, seq_len, batch_size, ffn=None, **style
) -> dict:
    """Sizes of a model. ffn: width of the MLP (default 4·hidden); style: see STYLE."""
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads)
    sizes.update(ffn=ffn or 4 * hidden, vocab_size=vocab_size)
    sizes.update(seq_len=seq_len, batch_size=batch_size, **STYLE)
    sizes.update(style)
    return sizes


def of_table_1(heads, hidden, layers, tp, pp, gpus, batch_size, measured) -> dict:
    """A row of arXiv:2104.04473, Table 1: the model, and its layout on A100 GPUs.

    measured: TFLOP/s per GPU, with full recomputation, which counts as work there.
    """
    sizes = model(layers, hidden, heads, heads, 51200, 2048, batch_size, tie=True)
    sizes.update(gpus=gpus, published=(gpus // pp // tp, pp, tp))
    sizes.update(measured=measured * 1e12)
    return sizes


def llama(layers, hidden, heads, ffn, batch_size) -> dict:
    """arXiv:2407.21783, Table 3; 128,256 tokens as in the published weights."""
    sizes = (layers, hidden, heads, 8, 128256, 8192, batch_size)
    return model(*sizes, ffn, gated=True, biases="none")


def qwen(layers, hidden, heads, kv_heads, ffn, vocab_size=152064, tie=False) -> dict:
    """arXiv:2412.15115, Table 1, and the config.json of the published weights."""
    sizes = (layers, hidden, heads, kv_heads, vocab_size, 4096, 1024)
    return model(*sizes, ffn, gated=True, biases="qkv", tie=tie)


# Sequences and batches of Qwen2.5 and Mistral are examples; the others are published.
MODELS = {
    # 2005.14165; the vocabulary is padded.
    "gpt3": model(96, 12288, 96, 96, 51200, 2048, 1536, tie=True),
    "llama-3-8b": llama(32, 4096, 32, 14336, 512),
    "llama-3-70b": llama(80, 8192, 64, 28672, 512),
    "llama-3-405b": llama(126, 16384, 128, 53248, 2048),
    "mistral-7b": model(  # arXiv:2310.06825, Table 1
        32, 4096, 32, 8, 32000, 8192, 512, 14336, gated=True, biases="none"
    ),
    "qwen2.5-1.5b": qwen(28, 1536, 12, 2, 8960, 151936, tie=True),
    "qwen2.5-7b": qwen(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": qwen(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": qwen(80, 8192, 64, 8, 29568),
    "gpt-1.7b": of_table_1(24, 2304, 24, 1, 1, 32, 512, 137),
    "gpt-3.6b": of_table_1(32, 3072, 30, 2, 1, 64, 512, 138),
    "gpt-7.5b": of_table_1(32, 4096, 36, 4, 1, 128, 512, 142),
    "gpt-18.4b": of_table_1(48, 6144, 40, 8, 1, 256, 1024, 135),
    "gpt-39.1b": of_table_1(64, 8192, 48, 8, 2, 512, 1536, 138),
    "gpt-76.1b": of_table_1(80, 10240, 60, 8, 4, 1024, 1792, 140),
    "gpt-145.6b": of_table_1(96, 12288, 80, 8, 8, 1536, 2304, 148),
    "gpt-310.1b": of_table_1(128, 16384, 96, 8, 16, 1920, 2160, 155),
    "gpt-529.6b": of_table_1(128, 20480, 105, 8, 35, 2520, 2520, 163),
    "gpt-1008b": of_table_1(160, 25600, 128, 8, 64, 3072, 3072, 163),
}
# GPUs per node, GB and peak FLOP/s (16 bits, dense) of each, bytes/s in one direction
# per GPU: NVLink, InfiniBand. Source: NVIDIA's data sheets of both machines.
# reserve: share of the memory that a layout leaves free, for what is not counted here:
# CUDA's and NCCL's own buffers, fragmentation, temporary tensors. An assumption.
MACHINES = {
    "dgx-a100": dict(
        node=8, gpu_memory=80.0, reserve=0.1, gpu_flops=312e12, inside=300e9,
        between=25e9,
    ),
    "dgx-h100": dict(
        node=8, gpu_memory=80.0, reserve=0.1, gpu_flops=989e12, inside=450e9,
        between=50e9,
    ),
}  # fmt: skip


def usable(machine) -> float:
    """Bytes of a GPU's memory that a layout may hold."""
    return machine.gpu_memory * GB * (1 - machine.reserve)


# What a rank holds. A layout is a Namespace of lesson 05's flags, and of micro_batch
# (b, sequences in one), ffn, attention and STYLE.


def make_layout(sizes: dict, pp=1, dp=1, tp=1, micro_batch=1, cp=1, **more):
    """Lesson 05's flags for a model on pp × dp × cp × tp ranks.

    With cp > 1 each sequence is split over cp ranks; attention is the zigzag ring of
    beyond/11, of FlashAttention's blocks: no scores are saved.
    """
    layout = {name: sizes[name] for name in SIZES if name in sizes}
    layout.setdefault("ffn", 4 * sizes["hidden"])
    for name, default in STYLE.items():
        layout[name] = sizes.get(name, default)
    layout.update(schedule="1f1b", zero=0, recompute="none", attention="math")
    layout.update(pp=pp, dp=dp, tp=tp, micro_batch=micro_batch, cp=cp)
    layout["microbatches"] = sizes["batch_size"] // (dp * micro_batch)
    layout.update(more)
    if cp > 1 and layout["attention"] != "flash":
        raise ValueError(f"cp {cp}: a ring saves no scores; take --attention flash")
    return argparse.Namespace(**layout)


def changed(layout, **changes):
    """A copy of a layout (or a machine) with some values replaced."""
    return argparse.Namespace(**{**vars(layout), **changes})


def replicas(args) -> int:
    """Ranks that hold the same parameters, each for its own tokens: gradients are
    summed over dp × cp, and ZeRO shards over all of these ranks."""
    return args.dp * args.cp


def layers_of(args, stage: int) -> int:
    """As slice_stage distributes them: the first stages may have one extra layer."""
    if stage < args.layers % args.pp:
        return args.layers // args.pp + 1
    return args.layers // args.pp


def kv_width(args) -> int:
    """Output features of k_proj; with T > K each head is replicated on T/K ranks."""
    return args.hidden // args.heads * max(args.kv_heads, args.tp)


def layer_weights(args) -> int:
    """Elements of a layer's matrices: q and o, k and v, the MLP's two or three."""
    attention = args.hidden * (2 * args.hidden + 2 * kv_width(args))
    matrices = 3 if args.gated else 2
    return attention + matrices * args.hidden * args.ffn


def layer_parameters(args) -> tuple[int, int]:
    """Parameters of a layer: those that are sharded by T, and the replicated ones.

    The biases of row-parallel linears (o, down) and the norms are replicated.
    """
    sharded = layer_weights(args)
    replicated = 2 * args.hidden  # weights of two norms
    if args.biases in ("all", "qkv"):
        sharded += args.hidden + 2 * kv_width(args)
    if args.biases == "all":
        sharded += args.ffn * (2 if args.gated else 1)
        replicated += 4 * args.hidden  # biases of two norms, of o and down
    return sharded, replicated


def vocab_rows(args) -> int:
    """Rows of the vocabulary on a rank, ⌈V/T⌉."""
    return math.ceil(args.vocab_size / args.tp)


def parameters(args, stage: int) -> tuple[int, int, int]:
    """Parameters that a rank of a stage holds, trains, and has replicated over tp.

    About 12·D² per layer of the course's model (2104.04473, sec. 5.1; no learned
    positions here), and ⌈V/T⌉ rows of the embedding and of the head.
    """
    is_first = stage == 0
    is_last = stage == args.pp - 1
    layers = layers_of(args, stage)
    sharded, replicated = layer_parameters(args)
    replicated *= layers
    matrix = vocab_rows(args) * args.hidden
    vocabulary = 0
    if is_first:
        vocabulary += matrix
    if is_last and not (args.tie and is_first):  # otherwise one weight, used twice
        vocabulary += matrix
    if is_last:
        replicated += args.hidden  # the last norm
    if is_last and args.biases == "all":
        replicated += args.hidden
        vocabulary += vocab_rows(args)  # the head's bias
    held = layers * sharded // args.tp + replicated + vocabulary
    if args.tie and is_last and not is_first:  # stage 0 trains the tied weight
        return held, held - matrix, replicated
    return held, held, replicated


def norm_stats(args) -> int:
    """Values that a norm saves per token: mean and 1/σ; RMSNorm has no mean."""
    return 2 if args.biases == "all" else 1


def layer_bytes(args, e=2, stats=4, masks=False, sp=True) -> int:
    """Bytes that a layer saves for backward per micro-batch (2205.05198, table 2).

    e: bytes per element; stats: bytes of a norm's mean or 1/σ (0: the paper leaves
    them out); masks: with dropout, one byte per element; sp: the sequence is sharded
    between the linears.
    """
    b, D, T = args.micro_batch, args.hidden, args.tp
    S = args.seq_len // args.cp  # positions that are on this rank
    s = S // T if sp else S
    if args.recompute == "full":
        return e * b * s * D  # the layer's input
    norms = 2 * norm_stats(args) * stats
    outside = b * s * (D * (4 * e + 2 * masks) + norms)  # inputs of norms, linears
    # GELU's input and output; with a gate: SiLU's input and output, up, the product.
    mlp = args.ffn * (4 if args.gated else 2)
    inside = 2 * D + mlp  # q, the input of o_proj
    # k and v as they are projected; attention written out repeats them for all heads.
    core_inputs = e * b * S * (inside + 2 * kv_width(args)) // T
    if args.recompute == "selective":
        return outside + core_inputs
    if args.attention == "flash":  # instead of scores one log-sum-exp (float32)
        return outside + core_inputs + 4 * b * args.heads * S // T
    scores = b * args.heads * S * S // T * (e + masks * (1 + e))
    return outside + e * b * S * (inside + 2 * D) // T + scores


def saved_bytes(args, stage: int, e=2, stats=4) -> int:
    """Bytes that a stage saves for backward per micro-batch, as lesson 05 counts."""
    tokens = args.micro_batch * args.seq_len // args.cp
    saved = layers_of(args, stage) * layer_bytes(args, e, stats)
    if stage == 0:
        saved += tokens * (8 + 1)  # the rows of the embedding, and which are local
    if stage == args.pp - 1:
        norm = 2 * e * args.hidden + norm_stats(args) * stats  # its input, its output
        saved += tokens // args.tp * norm
        # The loss: softmax, and per token an index and two masks; per column a mask.
        saved += tokens * (max(4, e) * vocab_rows(args) + 8 + 1 + 1) + vocab_rows(args)
    return saved


@functools.cache
def in_flight(kind: str, stage: int, P: int, M: int) -> int:
    """Micro-batches that a stage has in flight at most, by lesson 05's schedule."""
    if kind == "gpipe":
        return M
    current = 0
    peak = 0
    for phase, _ in lesson.schedule(kind, stage, P, min(M, P)):
        current += 1 if phase == "forward" else -1
        peak = max(peak, current)
    return peak


def moments_bytes(args, n: int, e: int) -> int:
    """Two moments of n elements of e bytes; ZeRO: 1/DP (arXiv:1910.02054, sec. 5)."""
    return 2 * e * (math.ceil(n / args.dp) if args.zero else n)


def memory(args, stage: int) -> dict[str, int]:
    """Bytes of a rank in mixed precision, by what they are for.

    Per parameter 2 + 2 + 12 bytes: weight, gradient, and AdamW's two moments and copy
    of the weight in float32. ZeRO shards over dp × cp the 12 (stage 1), also the
    gradient (2), also the weight (3) (1910.02054, sec. 5); then one layer at a time is
    unsharded. Activations include those of one layer that is recomputed.
    """
    held, trained, _ = parameters(args, stage)
    shard = math.ceil(held / replicas(args))
    micro_batches = in_flight(args.schedule, stage, args.pp, args.microbatches)
    activations = micro_batches * saved_bytes(args, stage)
    if args.recompute != "none":
        plain = changed(args, recompute="none")
        activations += layer_bytes(plain) - layer_bytes(args)
    sharded, replicated = layer_parameters(args)
    layer = sharded // args.tp + replicated
    largest = max(layer, vocab_rows(args) * args.hidden)
    unsharded = {2: 2 * largest, 3: 4 * largest}  # its gradient; also its weight
    over_replicas = changed(args, dp=replicas(args))
    if replicas(args) == 1:  # nothing is sharded
        unsharded = {}
    return {
        "parameters": 2 * (shard if args.zero >= 3 else held),
        "gradients": 2 * (shard if args.zero >= 2 else held),
        # The two moments in float32, and the weights: half as much again.
        "optimizer": moments_bytes(over_replicas, trained, 4) * 3 // 2,
        "activations": activations,
        "unsharded": unsharded.get(args.zero, 0),
    }


# What it sends, and how long a step takes.


class Sent(NamedTuple):
    """Calls of one kind that a rank makes per step, and their payload in bytes."""

    call: lesson.Call
    calls: int
    nbytes: int


@functools.cache
def compiled(formula: str):
    """A formula as the lesson prints it: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return compile(formula.replace("·", "*"), formula, "eval")


def traffic(args, stage: int, e=2) -> list[Sent]:
    """What lesson 05's ledger predicts, and what only the planner knows.

    A layer that is recomputed repeats all its calls but the last reduce-scatter, whose
    result is not needed (PyTorch's checkpoint stops before it). If T > K, ranks with
    the same key/value head sum the gradients of its weights and biases.
    """
    tokens = args.batch_size // args.dp * args.seq_len // args.cp
    _, trained, replicated = parameters(args, stage)
    size = lesson.traffic_size(args, stage, e, tokens, trained, replicated)
    formulas = lesson.traffic(args, stage)
    if args.zero:
        size["n"] = trained + -trained % replicas(args)
        formulas = with_sharded_states(formulas)
    if args.zero >= 2:
        formulas = with_sharded_gradients(args, formulas)
    formulas = list(formulas.items())
    backward = functools.partial(lesson.Call, "mesh", "backward")
    if args.recompute == "full":
        x = "e·b·S·D"
        formulas.append((backward("all-gather", "tp"), [Calls("2·M·l", x)]))
        formulas.append((backward("reduce-scatter", "tp"), [Calls("M·l", x)]))
    if args.cp > 1:
        size["C"] = args.cp
        size["kv"] = 2 * e * tokens * kv_width(args) / (args.tp * args.microbatches)
        formulas.extend(ring_of_keys(args))
    if args.tp > args.kv_heads:
        size["H"] = args.hidden // args.heads
        formula = [Calls("4·M·l", "e·H·(D + 1)/2")]  # k and v, weights and biases
        if args.biases == "none":
            formula = [Calls("2·M·l", "e·H·D")]
        formulas.append((backward("all-reduce", "copy"), formula))
    rows = []
    for call, terms in formulas:
        for term in terms:
            calls = eval(compiled(term.count), {}, size)
            nbytes = eval(compiled(term.nbytes), {}, size)
            if calls:
                rows.append(Sent(call, calls, round(calls * nbytes)))
    return rows


def ring_of_keys(args) -> list:
    """Keys and values of a rank's positions go around the cp ranks, and in backward
    once more, with their gradients (beyond/11 counts these calls and bytes)."""
    forward = lesson.Call("mesh", "forward", "send/recv", "cp")
    backward = lesson.Call("mesh", "backward", "send/recv", "cp")
    formulas = [(forward, [Calls("M·l·(C - 1)", "kv")])]
    formulas.append((backward, [Calls("M·l·(2·C - 1)", "kv")]))
    if args.recompute != "none":  # both kinds compute attention again
        formulas.append((backward, [Calls("M·l·(C - 1)", "kv")]))
    return formulas


def with_sharded_states(formulas: dict) -> dict:
    """ZeRO 1: each replica gets its slice of the sum, and after the update all slices;
    the norm is a sum over replicas as well (1910.02054, sec. 7)."""
    call = functools.partial(lesson.Call, "mesh")
    formulas = dict(formulas)
    del formulas[call("dp sum", "all-reduce", "dp")]
    formulas[call("norm", "all-reduce", "dp")] = [Calls("1", "8")]
    formulas[call("dp sum", "reduce-scatter", "dp")] = [Calls("1", "e·n")]
    formulas[call("update", "all-gather", "dp")] = [Calls("1", "e·n")]
    return formulas


def with_sharded_gradients(args, formulas: dict) -> dict:
    """ZeRO 2 and 3 sum gradients in every micro-batch, because no rank holds them
    unsharded from one micro-batch to the next; 3 also gathers the weights, forward and
    backward (1910.02054, sec. 7: 1.5 times the traffic, with one micro-batch)."""
    call = functools.partial(lesson.Call, "mesh")
    formulas = dict(formulas)
    del formulas[call("dp sum", "reduce-scatter", "dp")]
    formulas[call("backward", "reduce-scatter", "dp")] = [Calls("M", "e·n")]
    if args.zero == 3:
        del formulas[call("update", "all-gather", "dp")]
        formulas[call("forward", "all-gather", "dp")] = [Calls("M", "e·n")]
        formulas[call("backward", "all-gather", "dp")] = [Calls("M", "e·n")]
    return formulas


def counted(args, stage: int, e=2) -> dict[lesson.Call, list]:
    """The same as lesson 05 counts it: Call → calls, bytes."""
    found = {}
    for call, calls, nbytes in traffic(args, stage, e):
        if ranks_along(args, call.axis) > 1:  # otherwise nothing is sent
            row = found.setdefault(call, [0, 0])
            row[0] += calls
            row[1] += nbytes
    return found


LINKS = {"copy": "tp", "embed": "pp"}  # groups within a line of the mesh


def ranks_along(args, axis: str) -> int:
    """Ranks of a group; copy: of one key/value head; embed: first and last stage."""
    if axis == "copy":
        return max(1, args.tp // args.kv_heads)
    if axis == "embed":
        return min(2, args.pp)
    if axis == "dp":  # whoever has the same parameters
        return replicas(args)
    return getattr(args, axis)


def ring(collective: str, ranks: int) -> float:
    """What a rank sends, as a share of the payload (lesson 00)."""
    if collective == "send/recv":
        return 1
    if collective == "all-reduce":  # a reduce-scatter and an all-gather
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def all_reduce_ways(n: int, ranks: int, alpha: float, beta: float) -> dict[str, dict]:
    """Three ways to an all-reduce of n bytes: rounds, bytes that a rank sends at most,
    seconds. A round takes alpha seconds and its bytes over beta.

    ring: a chunk of n / ranks bytes per round (lesson 00). tree: sums go up a binomial
    tree to rank 0 and the total comes down, n bytes per round. one shot: every rank
    sends its n bytes to all others at once.
    """
    if ranks == 1:  # nothing is sent
        return {}
    depth = (ranks - 1).bit_length()
    ring_rounds = 2 * (ranks - 1)
    ring_bytes = n * ring("all-reduce", ranks)
    to_all = n * (ranks - 1)
    rounds = {"ring": ring_rounds, "tree": 2 * depth, "one shot": 1}
    sent = {"ring": ring_bytes, "tree": depth * n, "one shot": to_all}
    seconds = {
        "ring": ring_rounds * alpha + ring_bytes / beta,
        "tree": 2 * depth * (alpha + n / beta),
        "one shot": alpha + to_all / beta,
    }
    return {
        way: {"rounds": rounds[way], "bytes": sent[way], "seconds": seconds[way]}
        for way in rounds
    }


def rates(args, machine) -> dict[str, float]:
    """Bytes/s that a group has along each axis, in one direction.

    Rank = (stage · DP + replica) · T + tp_rank (make_mesh); with cp, replica is
    replica · CP + cp_rank. A group that fits into a node has the links inside. The ring
    of a group that spans nodes leaves each node through the network cards of all its
    ranks there (one card per GPU), so its rate grows with their number, up to the rate
    inside. A message between stages, or of keys and values along cp, has one sender, so
    it has one card.
    """
    spans = {"tp": args.tp, "dp": args.tp * replicas(args)}  # ranks, innermost first
    if args.cp > 1:
        spans["cp"] = args.tp * args.cp
    spans["pp"] = spans["dp"] * args.pp
    found = {}
    for axis, span in spans.items():
        if machine.node % span == 0 or machine.gpus <= machine.node:
            found[axis] = machine.inside
        elif axis in ("cp", "pp"):
            found[axis] = machine.between
        else:
            ranks = ranks_along(args, axis)
            cards = cards_of_a_group(ranks, span // ranks, machine.node)
            found[axis] = min(machine.inside, machine.between * cards)
    return found


def cards_of_a_group(ranks: int, inner: int, node: int) -> int:
    """Fewest ranks that a group which spans nodes has in one of its nodes.

    Its ranks are `inner` apart. If they fill nodes evenly, these are min(ranks,
    node / inner); 20 ranks in nodes of 8 are 8, 8 and 4.
    """
    if node % inner:
        return 1
    return math.gcd(ranks, node // inner)


def flops(args, stage: int) -> int:
    """FLOPs of a rank per step: 2 per weight and token forward, 4 backward, and the
    scores; with what is recomputed (2104.04473, sec. 5.1 and appendix).

    FlashAttention's backward computes Q·Kᵀ again, half of the scores' forward. (It is
    faster all the same, because it moves less memory; FLOPs do not show that.)
    """
    tokens = args.batch_size // args.dp * args.seq_len
    # Zigzag gives each of the cp ranks the same share of tokens and of scores.
    ranks = args.tp * args.cp
    scores = 4 * args.seq_len * args.hidden
    layer = 2 * layer_weights(args) + scores
    again = {"none": 0, "selective": scores, "full": layer}[args.recompute]
    if args.attention == "flash":
        again += scores // 2
    work = layers_of(args, stage) * (3 * layer + again)
    if stage == args.pp - 1:
        work += 3 * 2 * args.hidden * args.vocab_size
    return tokens * work // ranks


def model_flops(args) -> int:
    """FLOPs of the model per step, on all ranks together: nothing is recomputed, no
    head is counted twice."""
    plain = changed(args, recompute="none", attention="math", pp=1, dp=1, tp=1, cp=1)
    return flops(plain, 0)


def hardware_flops(args) -> int:
    """FLOPs that all ranks together compute per step, with what is recomputed."""
    ranks = args.dp * args.cp * args.tp
    return sum(flops(args, stage) for stage in range(args.pp)) * ranks


def mfu_of_table_1(sizes: dict, machine) -> tuple[float, float]:
    """MFU of a published layout of 2104.04473, Table 1: predicted and measured.

    The table counts recomputed FLOPs as work; MFU does not (2204.02311, sec. 4.1).
    """
    machine = changed(machine, gpus=sizes["gpus"])
    dp, pp, tp = sizes["published"]
    fixed = {"dp": dp, "pp": pp, "tp": tp, "recompute": "full"}
    best = search(sizes, machine, fixed)[0][0]
    layout = make_layout(sizes, micro_batch=best["micro_batch"], **fixed)
    useful = model_flops(layout) / hardware_flops(layout)
    return best["mfu"], sizes["measured"] / machine.gpu_flops * useful


# Phases that come once per step; all others come with each micro-batch.
ONCE = ("tp sum", "dp sum", "tied", "norm", "update")


def seconds(args, stage: int, machine, rate: dict) -> tuple[dict, dict]:
    """Seconds of a stage per step, and bytes that a rank sends along each axis.

    Seconds: arithmetic; messages along each axis that belong to micro-batches; "once":
    messages that come once per step.
    """
    took = {"arithmetic": flops(args, stage) / machine.gpu_flops, "once": 0.0}
    took.update(dict.fromkeys(rate, 0.0))
    sent = dict.fromkeys(rate, 0.0)
    for call, _, payload in traffic(args, stage):
        ranks = ranks_along(args, call.axis)
        if ranks == 1:  # nothing is sent
            continue
        nbytes = payload * ring(call.collective, ranks)
        axis = LINKS.get(call.axis, call.axis)
        sent[axis] += nbytes
        took["once" if call.phase in ONCE else axis] += nbytes / rate[axis]
    return took, sent


def in_micro_batches(took: dict) -> float:
    """Seconds of a stage that belong to micro-batches."""
    return sum(took[name] for name in took if name != "once")


def predict(args, machine) -> dict:
    """A layout's row; all of it is predicted. Only the first, the second and the last
    stage are computed: no other stage holds, sends or computes more than these."""
    P = args.pp
    M = args.microbatches
    rate = rates(args, machine)
    stages = sorted({0, min(1, P - 1), P - 1})
    memories = [memory(args, stage) for stage in stages]
    fullest = max(memories, key=lambda held: sum(held.values()))
    found = [seconds(args, stage, machine, rate) for stage in stages]
    # The slowest stage sets the pace: M + P − 1 times (2104.04473, sec. 2.2).
    slowest = max((took for took, _ in found), key=in_micro_batches)
    waiting = in_micro_batches(slowest) * (P - 1) / M
    parts = {
        "arithmetic": slowest["arithmetic"],
        "tp": slowest["tp"],
        "dp": max(took["once"] for took, _ in found) + slowest["dp"],
        "pp": slowest["pp"] + waiting,  # messages and the bubble
    }
    if args.cp > 1:
        parts["cp"] = slowest["cp"]
    total = sum(parts.values())
    row = {name: getattr(args, name) for name in LAYOUT}
    if args.cp > 1:
        row["cp"] = args.cp
    row["bytes"] = fullest
    row["memory"] = sum(fullest.values())
    row["sent"] = {axis: max(sent[axis] for _, sent in found) for axis in rate}
    row["bubble"] = (P - 1) / M  # waiting over computing (2104.04473, sec. 2.2.1)
    row["seconds"] = total
    row["parts"] = parts
    row["mfu"] = model_flops(args) / (machine.gpu_flops * machine.gpus * total)
    return row


# All layouts of a model on a machine.


def divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    large = [n // i for i in reversed(small) if i * i != n]
    return small + large


def why_not(sizes: dict, dp: int, pp: int, tp: int, cp: int = 1) -> str:
    """Which size is not divisible, or "": the conditions of lesson 05, and T > K; with
    cp > 1, two chunks of positions on each rank, and SP within its positions."""
    if cp > 1 and sizes["seq_len"] % (2 * cp):
        return "seq-len % (2 · cp) is not 0"
    if cp > 1 and sizes["seq_len"] % (cp * tp):
        return "seq-len % (cp · tp) is not 0"
    for name, axis, parts in (
        ("heads", "tp", tp),
        ("kv_heads", "tp", tp),
        ("ffn", "tp", tp),
        ("seq_len", "tp", tp),
        ("batch_size", "dp", dp),
    ):
        if name == "kv_heads" and tp % sizes[name] == 0:
            continue  # each head is replicated on tp / kv_heads ranks
        if sizes[name] % parts:
            return f"{name.replace('_', '-')} % {axis} is not 0"
    return "fewer layers than pp" if sizes["layers"] < pp else ""


def meshes(gpus: int, fixed: dict):
    """All dp, pp, tp whose product is the number of GPUs, as far as `fixed` allows; cp
    is 1, or what `fixed` says."""
    cp = fixed.get("cp", 1)
    if gpus % cp:
        return
    gpus //= cp
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            found = {"dp": gpus // tp // pp, "pp": pp, "tp": tp}
            if cp > 1:
                found["cp"] = cp
            if agrees(found, fixed):
                yield found


def agrees(found: dict, fixed: dict) -> bool:
    return all(fixed.get(name, value) == value for name, value in found.items())


def choices(sizes: dict, mesh: dict, fixed: dict, attention: str):
    """Micro-batch sizes and recomputation of a mesh. With FlashAttention no scores are
    saved, so there is nothing to recompute selectively."""
    for b in divisors(sizes["batch_size"] // mesh["dp"]):
        for recompute in RECOMPUTE:
            if attention == "flash" and recompute == "selective":
                continue
            found = {"micro_batch": b, "recompute": recompute}
            if agrees(found, fixed):
                yield found


def search(sizes: dict, machine, fixed: dict | None = None, **options) -> tuple:
    """Rows that fit, the fastest first; rows that do not; why dp × pp × tp is refused.

    Args:
        machine: gpus, node, gpu_memory, reserve, gpu_flops, inside, between.
        fixed: required values, such as {"tp": 8}.
        options: attention, zero, tie; see make_layout.
    """
    fixed = fixed or {}
    fits = []
    too_large = []
    refused = Counter()
    for mesh in meshes(machine.gpus, fixed):
        reason = why_not(sizes, **mesh)
        if reason:
            refused[reason] += 1
            continue
        attention = options.get("attention", "math")
        for found in choices(sizes, mesh, fixed, attention):
            row = predict(make_layout(sizes, **mesh, **found, **options), machine)
            if row["memory"] <= usable(machine):
                fits.append(row)
            else:
                too_large.append(row)
    return sorted(fits, key=lambda row: row["seconds"]), too_large, refused


def best_of_each(rows: list[dict]) -> list[dict]:
    """The first row of each dp × pp × tp, in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault((row["dp"], row["pp"], row["tp"]), row)
    return list(found.values())


def presets() -> str:
    """Models and machines for the page with sliders."""
    return json.dumps({"models": MODELS, "machines": MACHINES}, indent=1) + "\n"


if __name__ == "__main__":  # written to docs/_static/planner/presets.json
    print(presets(), end="")
