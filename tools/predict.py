"""What lesson 05 holds, sends and takes on any mesh, by formulas of the sizes.

Bytes sent and saved are those that lesson 05 counts (`traffic`, `saved_bytes`: checked
against its counters); the formulas of its tables are the lesson's own functions. The
time is a roofline: arithmetic at the peak, then messages at the links' rates, then the
pipeline's bubble. `search` looks at all layouts of a model on a machine; tools/plan.py
is its command.

Sources: 2104.04473 (pipelines, FLOPs, Table 1), 2205.05198 (activations), 1910.02054
(16 bytes a parameter), all on arxiv.org; lesson 00 (a ring's cost), lesson 05.
"""

import argparse
import functools
import importlib
import math
import sys
from collections import Counter
from typing import NamedTuple

from check import ROOT

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
lesson = importlib.import_module("05_3d_parallel")

RECOMPUTE = "none", "selective", "full"  # nothing; attention's core; entire layers
SIZES = "layers hidden heads kv_heads ffn vocab_size seq_len batch_size".split()
# What else a model is, and what lesson 05's model is. biases: of "all" linears and
# LayerNorms; of the q, k and v projections only, with RMSNorm ("qkv"); "none", with
# RMSNorm. gated: an MLP of three matrices (gate, up, down). tie: one vocabulary matrix.
STYLE = {"gated": False, "biases": "all", "tie": False}
BIASES = "all", "qkv", "none"
MACHINE = "gpus node gpu_memory gpu_flops inside between".split()
AXES = "dp", "pp", "tp"
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
# GPUs of a node, GB and peak FLOP/s (16 bits, dense) of each, bytes/s in one direction
# to its neighbours: NVLink, InfiniBand. Source: NVIDIA's data sheets of both machines.
MACHINES = {
    "dgx-a100": dict(
        node=8, gpu_memory=80.0, gpu_flops=312e12, inside=300e9, between=25e9
    ),
    "dgx-h100": dict(
        node=8, gpu_memory=80.0, gpu_flops=989e12, inside=450e9, between=50e9
    ),
}


# What a rank holds. A layout is a Namespace of lesson 05's flags, and of micro_batch
# (b, sequences in one), ffn, attention and STYLE.


def make_layout(sizes: dict, pp=1, dp=1, tp=1, micro_batch=1, **more):
    """Lesson 05's flags for a model on pp × dp × tp ranks."""
    layout = {name: sizes[name] for name in SIZES if name in sizes}
    layout.setdefault("ffn", 4 * sizes["hidden"])
    for name, default in STYLE.items():
        layout[name] = sizes.get(name, default)
    layout.update(schedule="1f1b", zero=False, recompute="none")
    layout.update(pp=pp, dp=dp, tp=tp, micro_batch=micro_batch)
    layout["microbatches"] = sizes["batch_size"] // (dp * micro_batch)
    layout.update(more)
    return argparse.Namespace(**layout)


def changed(layout, **changes):
    """A copy of a layout (or a machine) with some values replaced."""
    return argparse.Namespace(**{**vars(layout), **changes})


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
    b, S, D, T = args.micro_batch, args.seq_len, args.hidden, args.tp
    s = S // T if sp else S
    if args.recompute == "full":
        return e * b * s * D  # the layer's input
    norms = 2 * norm_stats(args) * stats
    outside = b * s * (D * (4 * e + 2 * masks) + norms)  # inputs of norms, linears
    # GELU's input and output; with a gate: SiLU's input and output, up, the product.
    mlp = args.ffn * (4 if args.gated else 2)
    inside = 2 * D + mlp  # q, the input of o_proj
    if args.recompute == "selective":  # k and v as they are projected, not repeated
        return outside + e * b * S * (inside + 2 * kv_width(args)) // T
    scores = b * args.heads * S * S // T * (e + masks * (1 + e))
    return outside + e * b * S * (inside + 2 * D) // T + scores


def saved_bytes(args, stage: int, e=2, stats=4) -> int:
    """Bytes that a stage saves for backward per micro-batch, as lesson 05 counts."""
    tokens = args.micro_batch * args.seq_len
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
    """Micro-batches that a stage keeps at a time, by lesson 05's own schedule."""
    kept = most = 0
    for phase, _ in lesson.schedule(kind, stage, P, min(M, P)):
        kept += 1 if phase == "forward" else -1
        most = max(most, kept)
    return M if kind == "gpipe" else most


def memory(args, stage: int) -> dict[str, int]:
    """Bytes of a rank in mixed precision: 2 + 2 + 12 a parameter (1910.02054, sec. 3.1;
    with `zero` 12/DP), and activations, with what one layer computes again."""
    held, trained, _ = parameters(args, stage)
    flying = in_flight(args.schedule, stage, args.pp, args.microbatches)
    activations = flying * saved_bytes(args, stage)
    if args.recompute != "none":
        again = argparse.Namespace(**{**vars(args), "recompute": "none"})
        activations += layer_bytes(again) - layer_bytes(args)
    # AdamW's two moments in 32 bits, and the weights in 32 bits: half as much again.
    optimizer = lesson.moments_bytes(args, trained, 4) * 3 // 2
    return dict(
        parameters=2 * held, gradients=2 * held, optimizer=optimizer,
        activations=activations,
    )  # fmt: skip


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

    A layer that is recomputed sends again all but its last reduce-scatter, whose result
    is not needed (PyTorch's checkpoint stops before it). Key/value heads that T > K
    ranks share are copies: backward sums the gradients of their weights and biases.
    """
    tokens = args.batch_size // args.dp * args.seq_len
    _, trained, replicated = parameters(args, stage)
    size = lesson.traffic_size(args, stage, e, tokens, trained, replicated)
    formulas = list(lesson.traffic(args, stage).items())
    backward = functools.partial(lesson.Call, "mesh", "backward")
    if args.recompute == "full":
        formulas.append((backward("all-gather", "tp"), "2·M·l × X"))
        formulas.append((backward("reduce-scatter", "tp"), "M·l × X"))
    if args.tp > args.kv_heads:
        size["H"] = args.hidden // args.heads
        formulas.append((backward("all-reduce", "copy"), "4·M·l × e·H·(D + 1)/2"))
    rows = []
    for call, formula in formulas:
        calls, each = [eval(compiled(x), {}, size) for x in formula.split(" × ")]
        if calls:
            rows.append(Sent(call, calls, round(calls * each)))
    return rows


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
    """Ranks of a group: "copy" shares a head, "embed" is first and last stage."""
    if axis == "copy":
        return max(1, args.tp // args.kv_heads)
    if axis == "embed":
        return min(2, args.pp)
    return getattr(args, axis)


def ring(collective: str, ranks: int) -> float:
    """What a rank sends, of a payload (lesson 00): an all-reduce goes round twice."""
    half = (ranks - 1) / ranks
    return {"all-reduce": 2 * half, "send/recv": 1}.get(collective, half)


def rates(args, machine) -> dict[str, float]:
    """Bytes/s that a group has along each axis, in one direction.

    Rank = (stage · DP + replica) · T + tp_rank (make_mesh). A group that fits into a
    node has the links inside. The ring of a group that spans nodes leaves each node
    through the network cards of all its ranks there (one card per GPU), so its rate
    grows with their number, up to the rate inside. A message between stages has one
    sender, so it has one card.
    """
    span = 1
    found = {}
    for axis in ("tp", "dp", "pp"):  # innermost first
        inner = span
        span *= getattr(args, axis)
        if machine.node % span == 0 or machine.gpus <= machine.node:
            found[axis] = machine.inside
        elif axis == "pp":
            found[axis] = machine.between
        else:
            cards = cards_of_a_group(getattr(args, axis), inner, machine.node)
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
    scores; with what is recomputed (2104.04473, sec. 5.1 and appendix)."""
    tokens = args.batch_size // args.dp * args.seq_len
    scores = 4 * args.seq_len * args.hidden
    layer = 2 * layer_weights(args) + scores
    again = {"none": 0, "selective": scores, "full": layer}[args.recompute]
    work = layers_of(args, stage) * (3 * layer + again)
    if stage == args.pp - 1:
        work += 3 * 2 * args.hidden * args.vocab_size
    return tokens * work // args.tp


# Phases that come once per step; all others come with each micro-batch.
ONCE = ("tp sum", "dp sum", "tied", "norm", "update")


def seconds(args, stage: int, machine, rate: dict) -> tuple[dict, dict]:
    """Of a stage in a step: seconds of arithmetic, of messages along each axis that
    belong to micro-batches, of those that come once; and bytes sent along each axis."""
    took = {"arithmetic": flops(args, stage) / machine.gpu_flops, "once": 0.0}
    took |= dict.fromkeys(rate, 0.0)
    sent = dict.fromkeys(rate, 0.0)
    for call, _, nbytes in traffic(args, stage):
        nbytes *= ring(call.collective, ranks_along(args, call.axis))
        axis = LINKS.get(call.axis, call.axis)
        sent[axis] += nbytes
        took["once" if call.phase in ONCE else axis] += nbytes / rate[axis]
    return took, sent


def predict(args, machine) -> dict:
    """A layout's row; all of it predicted. Of the stages, the first, the second and the
    last are looked at: no other holds, sends or computes more than all of these."""
    P, M, rate = args.pp, args.microbatches, rates(args, machine)
    stages = {0, min(1, P - 1), P - 1}
    held = max((memory(args, stage) for stage in stages), key=lambda x: sum(x.values()))
    found = [seconds(args, stage, machine, rate) for stage in stages]
    each = lambda took: sum(took.values()) - took["once"]
    # The slowest stage sets the pace: M + P − 1 times (2104.04473, sec. 2.2).
    slowest = max((took for took, _ in found), key=each)
    once = max(took["once"] for took, _ in found)
    total = each(slowest) * (M + P - 1) / M + once
    parts = {"arithmetic": slowest["arithmetic"], "tp": slowest["tp"]}
    parts |= {"dp": once, "pp": total - sum(parts.values()) - once}  # with the bubble
    plain = argparse.Namespace(**{**vars(args), "recompute": "none", "pp": 1})
    useful = flops(plain, 0) * args.dp * args.tp
    names = "dp", "pp", "tp", "micro_batch", "microbatches", "recompute"
    return {name: getattr(args, name) for name in names} | {
        "bytes": held,
        "memory": sum(held.values()),
        "sent": {axis: max(sent[axis] for _, sent in found) for axis in rate},
        "bubble": (P - 1) / M,  # over computing (2104.04473, sec. 2.2.1)
        "seconds": total,
        "parts": parts,
        "share": useful / machine.gpu_flops / machine.gpus / total,
    }


# All layouts of a model on a machine.


def divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def why_not(sizes: dict, dp: int, pp: int, tp: int) -> str:
    """What does not divide, or nothing; as lesson 05 asks."""
    shared = tp % sizes["kv_heads"] == 0  # by tp / kv_heads ranks each
    for name, axis, parts in (
        ("heads", "tp", tp),
        ("kv_heads", "tp", 1 if shared else tp),
        ("ffn", "tp", tp),
        ("seq_len", "tp", tp),
        ("batch_size", "dp", dp),
    ):
        if sizes[name] % parts:
            return f"{name.replace('_', '-')} % {axis} is not 0"
    return "fewer layers than pp" if sizes["layers"] < pp else ""


def meshes(gpus: int, fixed: dict):
    """All dp, pp, tp whose product is the number of GPUs, as far as they are wanted."""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            found = {"dp": gpus // tp // pp, "pp": pp, "tp": tp}
            if all(fixed.get(axis, n) == n for axis, n in found.items()):
                yield found


def search(sizes: dict, machine, fixed: dict = {}, **options) -> tuple:  # noqa: B006
    """Rows that fit, the fastest first; those that do not; why dp × pp × tp fell.

    machine: node, gpus, gpu_memory, gpu_flops, inside, between; fixed: {"tp": 8, …},
    what is wanted of a layout; options: zero, tie.
    """
    fits, full, fell = [], [], Counter()
    for mesh in meshes(machine.gpus, fixed):
        if reason := why_not(sizes, **mesh):
            fell[reason] += 1
            continue
        for b in divisors(sizes["batch_size"] // mesh["dp"]):
            for recompute in RECOMPUTE:
                more = dict(micro_batch=b, recompute=recompute)
                if all(fixed.get(name, value) == value for name, value in more.items()):
                    layout = make_layout(sizes, **mesh, **more, **options)
                    row = predict(layout, machine)
                    good = row["memory"] <= machine.gpu_memory * GB
                    (fits if good else full).append(row)
    return sorted(fits, key=lambda row: row["seconds"]), full, fell


def best_of_each(rows: list[dict]) -> list[dict]:
    """Of the layouts alike in dp, pp and tp the first; in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault((row["dp"], row["pp"], row["tp"]), row)
    return list(found.values())
