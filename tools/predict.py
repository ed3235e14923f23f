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

RECOMPUTE = "none", "selective", "full"  # nothing; attention's core; whole layers
SIZES = "layers hidden heads kv_heads vocab_size seq_len batch_size".split()
MACHINE = "gpus node gpu_memory gpu_flops inside between".split()
AXES = "dp", "pp", "tp"
GB = 1e9


def model(layers, hidden, heads, kv_heads, vocab_size, seq_len, batch_size) -> dict:
    return {name: value for name, value in locals().items() if name in SIZES}


def of_table_1(heads, hidden, layers, tp, pp, gpus, batch_size) -> dict:
    """A row of 2104.04473's Table 1: the model, and its layout on A100 GPUs. (They
    measured 43 to 52 % of the peak there, with whole layers recomputed.)"""
    sizes = model(layers, hidden, heads, heads, 51200, 2048, batch_size)
    return sizes | {"gpus": gpus, "published": (gpus // pp // tp, pp, tp)}


MODELS = {
    "gpt3": model(96, 12288, 96, 96, 51200, 2048, 1536),  # 2005.14165, V padded
    # 2407.21783, Table 3; our MLP has two matrices [4D, D], not three [3.5D, D].
    "llama-3-8b": model(32, 4096, 32, 8, 128256, 8192, 512),
    "gpt-1.7b": of_table_1(24, 2304, 24, 1, 1, 32, 512),
    "gpt-3.6b": of_table_1(32, 3072, 30, 2, 1, 64, 512),
    "gpt-7.5b": of_table_1(32, 4096, 36, 4, 1, 128, 512),
    "gpt-18.4b": of_table_1(48, 6144, 40, 8, 1, 256, 1024),
    "gpt-39.1b": of_table_1(64, 8192, 48, 8, 2, 512, 1536),
    "gpt-76.1b": of_table_1(80, 10240, 60, 8, 4, 1024, 1792),
    "gpt-145.6b": of_table_1(96, 12288, 80, 8, 8, 1536, 2304),
    "gpt-310.1b": of_table_1(128, 16384, 96, 8, 16, 1920, 2160),
    "gpt-529.6b": of_table_1(128, 20480, 105, 8, 35, 2520, 2520),
    "gpt-1008b": of_table_1(160, 25600, 128, 8, 64, 3072, 3072),
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


# What a rank holds. A layout is a Namespace of lesson 05's flags; `micro_batch`: b.


def make_layout(sizes: dict, pp=1, dp=1, tp=1, micro_batch=1, **more):
    """Lesson 05's flags for a model on pp × dp × tp ranks."""
    microbatches = sizes["batch_size"] // (dp * micro_batch)
    flags = dict(schedule="1f1b", zero=False, tie=False, recompute="none")
    of_layout = dict(pp=pp, dp=dp, tp=tp, microbatches=microbatches)
    flags |= of_layout | dict(micro_batch=micro_batch) | more
    return argparse.Namespace(**{name: sizes[name] for name in SIZES}, **flags)


def layers_of(args, stage: int) -> int:
    """As slice_stage deals them out: the first stages may have one more."""
    return args.layers // args.pp + (stage < args.layers % args.pp)


def parameters(args, stage: int) -> tuple[int, int, int]:
    """Numbers that a rank of a stage holds, trains, and has whole as all T ranks do.

    12·D² a layer and less (2104.04473, sec. 5.1; no learned positions here), cut by T
    but for norms and the biases added after a sum; ⌈V/T⌉ rows of the vocabulary.
    """
    D, T, layers = args.hidden, args.tp, layers_of(args, stage)
    first, last, v = stage == 0, stage == args.pp - 1, -(-args.vocab_size // T)
    kv = D // args.heads * max(args.kv_heads, T)  # heads that ranks share are copied
    cut = D * (10 * D + 2 * kv) + 5 * D + 2 * kv  # weights, biases
    whole = 6 * D * layers + 2 * D * last
    rows = v * D * (first + last) + v * last
    rows -= v * D * (args.tie and first and last)  # one weight, twice in use
    held = layers * cut // T + whole + rows
    return held, held - v * D * (args.tie and last and not first), whole


def layer_bytes(args, e=2, stats=4, masks=False, sp=True) -> int:
    """Bytes that a layer keeps of a micro-batch for backward (2205.05198, table 2).

    e: bytes of a number; stats: of a norm's mean and 1/σ (0: as the paper, which leaves
    them out); masks: with dropout, a byte an element; sp: the sequence is cut, too.
    """
    b, S, D, T = args.micro_batch, args.seq_len, args.hidden, args.tp
    s = S // T if sp else S  # between the linears
    if args.recompute == "full":
        return e * b * s * D  # the layer's input
    around = b * s * (D * (4 * e + 2 * masks) + 4 * stats)  # norms: inputs, outputs
    inside = 2 + 8  # of a token, times D/T: input of o_proj, GELU, and now q, k, v
    kv = max(args.kv_heads, T) / args.heads
    if args.recompute == "selective":  # as they are projected, not repeated for heads
        return around + round(e * b * S * D * (inside + 2 * kv)) // T
    scores = b * args.heads * S * S // T * (e + masks * (1 + e))
    return around + e * b * S * D * (inside + 2) // T + scores


def saved_bytes(args, stage: int, e=2, stats=4) -> int:
    """What a stage keeps of a micro-batch for backward: as lesson 05 counts it."""
    tokens, T = args.micro_batch * args.seq_len, args.tp
    saved = layers_of(args, stage) * layer_bytes(args, e, stats)
    if stage == 0:
        saved += tokens * (8 + 1)  # the embedding's rows, and which are of this rank
    if stage == args.pp - 1:
        v = -(-args.vocab_size // T)
        saved += (
            tokens // T * 2 * (e * args.hidden + stats)
        )  # the norm, before the head
        saved += tokens * (max(4, e) * v + 8 + 1 + 1) + v  # the loss: softmax, …
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
    """Of a rank in a step: 2 a weight and token forward, 4 backward, and the scores;
    with what is computed again (2104.04473, sec. 5.1 and appendix)."""
    D, S, tokens = args.hidden, args.seq_len, args.batch_size // args.dp * args.seq_len
    scores, kv = 4 * S * D, D // args.heads * max(args.kv_heads, args.tp)
    layer = 2 * D * (10 * D + 2 * kv) + scores
    again = {"none": 0, "selective": scores, "full": layer}[args.recompute]
    head = 2 * D * args.vocab_size * (stage == args.pp - 1)
    layers = layers_of(args, stage)
    return tokens * (layers * (3 * layer + again) + 3 * head) // args.tp


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
