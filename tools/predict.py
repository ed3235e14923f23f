"""What lesson 05 holds, sends and computes on any mesh, by formulas of the sizes.

Bytes sent and saved are those that lesson 05 counts (a test compares them with its
counters). The time is a roofline: arithmetic at the peak, then messages at the links'
rates, then the pipeline's bubble. `search` goes through all layouts of a model on a
machine; tools/plan.py is its command, docs/_static/planner the same formulas in a page,
tools/published.py what other people measured, next to it.

What lesson 05 does not have follows from published formulas: gated MLPs, ZeRO 2 and 3,
FlashAttention, interleaved stages, experts. beyond/11 counts the messages and saved
bytes that the axis cp has here.

Sources: 2104.04473 (pipelines, FLOPs), 2205.05198 (activations), 1910.02054 (16 bytes
per parameter, ZeRO), 2205.14135 (FlashAttention), 2204.02311 (MFU), 2401.10241 (zero
bubble), 2101.03961 (experts), all on arxiv.org; lesson 00 (a ring's cost).
"""

import argparse
import importlib
import math
import sys
from collections import Counter
from typing import NamedTuple

from check import ROOT
from presets import BIASES, EXPERTS, MACHINES, MODELS, STYLE, model  # noqa: F401

for folder in (ROOT, ROOT / "beyond"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
lesson = importlib.import_module("course").lesson05

ATTENTION = "math", "flash"  # written out, as in the lessons; or FlashAttention
ZERO = 0, 1, 2, 3  # ZeRO's stage
# none. selective: what is cheap to compute again (with attention written out its core,
# with FlashAttention the outputs of norms and the MLP's product). half: that, and every
# second linear from k on (k, o, up), which is torchtitan's "selective". full: layers.
RECOMPUTE = "none", "selective", "half", "full"
SCHEDULES = "1f1b", "zb-h1"
SCORES = "half", "all"  # what attention computes of S × S; a causal kernel: half
SIZES = (
    "layers hidden heads kv_heads head_dim ffn vocab_size seq_len batch_size".split()
)
MACHINE = "gpus node gpu_memory reserve gpu_flops inside between".split()
MACHINE += ["alpha_inside", "alpha_between"]
AXES = "dp", "pp", "tp"
LAYOUT = "dp pp tp cp ep micro_batch microbatches recompute attention zero".split()
LAYOUT += ["virtual", "schedule", "light_ends"]
GB = 1e9
# Bytes per logit that a loss saves for backward, and that it holds at most in forward
# and in backward, with the 16-bit logits (measured, tests/test_peak.py). plain: lesson
# 03's: the softmax in float32, the logits, and two more tensors in float32. torch:
# F.cross_entropy of float32 logits; with tp under loss_parallel. fused: one kernel, 16
# bits; logits and gradient. pieces: a plain one of 1/16 of the positions at a time,
# each with its gradients at once; what is saved is the gradient of the head's input.
LOSSES = {
    "plain": (4, 14, 12),
    "torch": (4, 10, 12),
    "fused": (2, 4, 4),
    "pieces": (0, 14, 14),
}
LOSS_PARALLEL = 4, 14, 16
PIECES = 16
# Positions per rank from which on a ring (cp) is worth a try.
SHORTEST_IN_A_RING = 4096


def usable(machine) -> float:
    """Bytes of a GPU's memory that a layout may hold."""
    return machine.gpu_memory * GB * (1 - machine.reserve)


# What a rank holds. A layout is a Namespace of lesson 05's flags, and of what
# make_layout adds.


def make_layout(sizes: dict, pp=1, dp=1, tp=1, micro_batch=1, cp=1, ep=1, **more):
    """Lesson 05's flags for a model on pp × dp × cp × tp ranks, and more.

    With cp > 1 each sequence is split over cp ranks; attention is the zigzag ring of
    beyond/11, of FlashAttention's blocks: no scores are saved. ep ranks share the
    experts; they are ranks of tp, cp and dp, because each of these has tokens of its
    own between the layers (SP). virtual: chunks of layers per stage (interleaving).
    light_ends: the first and the last stage have one layer less. mlp_saves: tensors of
    the MLP's width that are saved. grad_bytes: per gradient that is accumulated.
    imbalance: rows of the busiest rank's experts over the mean. overlap_dp: gradients
    are summed while backward computes. loss: see LOSSES. scores: see SCORES; attention
    that is written out computes all.
    """
    layout = {name: sizes[name] for name in SIZES if name in sizes}
    layout.setdefault("ffn", 4 * sizes["hidden"])
    layout.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    for name, default in (STYLE | EXPERTS).items():
        layout[name] = sizes.get(name, default)
    layout.update(schedule="1f1b", zero=0, recompute="none", attention="math")
    layout.update(virtual=1, light_ends=False, grad_bytes=2, imbalance=1.0)
    layout.update(overlap_dp=False, mlp_saves=3 if layout["gated"] else 2)
    layout.update(loss="plain")
    layout.update(pp=pp, dp=dp, tp=tp, micro_batch=micro_batch, cp=cp, ep=ep)
    layout["microbatches"] = sizes["batch_size"] // (dp * micro_batch)
    layout.update(more)
    layout.setdefault("scores", SCORES[layout["attention"] == "math"])
    if layout["attention"] == "math" and layout["scores"] == "half":
        raise ValueError(
            "--scores half: attention that is written out computes all; leave it out"
        )
    if cp > 1 and layout["attention"] != "flash":
        raise ValueError(f"cp {cp}: a ring saves no scores; take --attention flash")
    if layout["recompute"] not in ways_to_recompute(sizes, layout["attention"]):
        raise ValueError(
            "--recompute half: with FlashAttention and without experts only; take "
            "--recompute selective"
        )
    return argparse.Namespace(**layout)


def ways_to_recompute(sizes: dict, attention: str) -> list[str]:
    """What may be recomputed; half has no formula for experts and saved scores."""
    if attention == "flash" and not sizes.get("experts"):
        return list(RECOMPUTE)
    return [how for how in RECOMPUTE if how != "half"]


def changed(layout, **changes):
    """A copy of a layout (or a machine) with some values replaced."""
    return argparse.Namespace(**{**vars(layout), **changes})


def replicas(args) -> int:
    """Ranks that hold the same parameters, each for its own tokens: gradients are
    summed over dp × cp, and ZeRO shards over all of these ranks."""
    return args.dp * args.cp


def expert_replicas(args) -> int:
    """Ranks that hold the same experts."""
    return args.tp * args.cp * args.dp // args.ep


def has_light_ends(layers: int, pp: int, virtual: int = 1) -> bool:
    """Whether the chunks are even if embedding and head count as a layer each: 126
    layers on 16 stages are 7, 8, …, 8, 7 (2407.21783, sec. 3.3.2)."""
    chunks = pp * virtual
    return pp > 1 and layers % chunks > 0 and (layers + 2) % chunks == 0


def layers_of(args, stage: int) -> int:
    """As slice_stage distributes them: the first stages may have one extra layer."""
    if args.light_ends:
        return (args.layers + 2) // args.pp - (stage in (0, args.pp - 1))
    if stage < args.layers % args.pp:
        return args.layers // args.pp + 1
    return args.layers // args.pp


def q_width(args) -> int:
    """Output features of q_proj."""
    return args.head_dim * args.heads


def kv_width(args) -> int:
    """Output features of k_proj; with T > K each head is replicated on T/K ranks."""
    return args.head_dim * max(args.kv_heads, args.tp)


def matrices(args) -> int:
    """Of an MLP: gate, up, down; or up and down."""
    return 3 if args.gated else 2


def layer_weights(args) -> int:
    """Elements of a layer's matrices that tp shards: q and o, k and v, the MLP's."""
    attention = args.hidden * (2 * q_width(args) + 2 * kv_width(args))
    return attention + matrices(args) * args.hidden * args.ffn


def layer_parameters(args) -> tuple[int, int]:
    """Parameters of a layer without its experts: those that are sharded by T, and the
    replicated ones: norms, biases of row-parallel linears (o, down), the router."""
    sharded = layer_weights(args)
    replicated = 2 * args.hidden  # weights of two norms
    if args.biases in ("all", "qkv"):
        sharded += q_width(args) + 2 * kv_width(args)
    if args.biases == "all":
        sharded += args.ffn * (2 if args.gated else 1)
        replicated += 4 * args.hidden  # biases of two norms, of o and down
    if args.qk_norm:
        replicated += 2 * args.head_dim
    return sharded, replicated + args.hidden * args.experts


def experts_of_layer(args) -> int:
    """Elements of the experts that a rank holds, per layer: E/ep of them."""
    each = matrices(args) * args.hidden * args.expert_ffn
    return args.experts // args.ep * each


def experts_of_stage(args, stage: int) -> int:
    return layers_of(args, stage) * experts_of_layer(args)


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
    held += experts_of_stage(args, stage)
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
    if args.recompute == "half":
        return half_bytes(args, b * S, b * s, e)
    cheap = 0
    if args.recompute == "selective" and args.attention == "flash":
        cheap = 1  # tensors of the MLP that are computed again: the product
    norms = 2 * norm_stats(args) * stats
    inputs = 2 if cheap else 4  # of two norms, and of the linears behind them
    outside = b * s * (D * (inputs * e + 2 * masks) + norms)
    # GELU's input and output; with a gate: gate, up and their product (and SiLU's
    # output, unless one kernel computes the product). q, and the input of o_proj.
    mlp = (args.mlp_saves - cheap) * args.ffn
    inside = 2 * q_width(args) + mlp
    # k and v as they are projected; attention written out repeats them for all heads.
    core_inputs = e * b * S * (inside + 2 * kv_width(args)) // T
    routed = routed_bytes(args, b * s, e, args.mlp_saves - cheap)
    if args.recompute == "selective" and args.attention == "math":
        return outside + core_inputs + routed
    if args.attention == "flash":  # instead of scores one log-sum-exp (float32)
        return outside + core_inputs + 4 * b * args.heads * S // T + routed
    scores = b * args.heads * S * S // T * (e + masks * (1 + e))
    q_k_v_o = inside + 2 * q_width(args)
    return outside + e * b * S * q_k_v_o // T + scores + routed


def half_bytes(args, tokens: int, own: int, e: int) -> int:
    """Bytes that a layer saves with recompute "half": its input, attention's output and
    log-sum-exp, and the outputs of linears 1, 3, 5, 7 of q, k, v, o, gate, up, down
    (without a gate: of q, v, up). own: tokens between the linears. With tp torchtitan
    also saves down's partial output, of all tokens, which is not counted here."""
    outside = own * args.hidden * (2 if args.gated else 1)
    inside = tokens * (2 * q_width(args) + kv_width(args) + args.ffn) // args.tp
    return e * (outside + inside) + 4 * tokens * args.heads // args.tp


def routed_rows(args, tokens: int) -> int:
    """Rows that the experts of the busiest rank compute: top_k per token."""
    return math.ceil(args.top_k * tokens * args.imbalance)


def routed_bytes(args, tokens: int, e: int, mlp_saves: int) -> int:
    """Bytes that the experts of a layer save: the router's softmax (float32), and per
    row the input, what the MLP saves, and the output, which its weight multiplies."""
    if not args.experts:
        return 0
    row = e * (2 * args.hidden + mlp_saves * args.expert_ffn)
    return routed_rows(args, tokens) * row + 4 * args.experts * tokens


def end_bytes(args, stage: int, e=2, stats=4) -> int:
    """Bytes that embedding and loss save for backward per micro-batch."""
    tokens = args.micro_batch * args.seq_len // args.cp
    saved = 0
    if stage == 0:
        saved += tokens * (8 + 1)  # the rows of the embedding, and which are local
    if stage == args.pp - 1:
        norm = 2 * e * args.hidden + norm_stats(args) * stats  # its input, its output
        saved += tokens // args.tp * norm
        if args.loss == "pieces":
            return saved + tokens // args.tp * e * args.hidden
        # The loss: softmax, and per token an index and two masks; per column a mask.
        logit = e if args.loss == "fused" else max(4, e)
        saved += tokens * (logit * vocab_rows(args) + 8 + 1 + 1) + vocab_rows(args)
        if args.loss == "torch" and args.tp > 1:  # DTensor saves the gathered input
            saved += tokens * e * args.hidden
    return saved


def loss_bytes(args, stage: int) -> dict[str, int]:
    """Phase → bytes of one micro-batch's logits and of what the loss makes of them."""
    if stage < args.pp - 1:
        return dict.fromkeys(("saved", "forward", "loss", "head"), 0)
    logits = args.micro_batch * args.seq_len // args.cp * vocab_rows(args)
    if args.loss == "pieces":
        logits = math.ceil(logits / PIECES)
    is_parallel = args.loss == "torch" and args.tp > 1
    saved, forward, backward = LOSS_PARALLEL if is_parallel else LOSSES[args.loss]
    # Pieces of the logits are not alive when forward ends.
    made = 0 if args.loss == "pieces" else 2
    each = {"saved": saved, "forward": made, "loss": forward, "head": backward}
    return {phase: n * logits for phase, n in each.items()}


def saved_bytes(args, stage: int, e=2, stats=4) -> int:
    """Bytes that a stage saves for backward per micro-batch, as lesson 05 counts."""
    layers = layers_of(args, stage) * layer_bytes(args, e, stats)
    return layers + end_bytes(args, stage, e, stats)


def in_flight(kind: str, stage: int, P: int, M: int) -> int:
    """Micro-batches that a stage has in flight at most, by lesson 05's schedule."""
    return M if kind == "gpipe" else min(P - stage, M)


def put_off_bytes(args, stage: int, e=2) -> int:
    """Bytes that ZB-H1 holds for weight passes that are put off, at most.

    With those in flight they are P micro-batches on every stage (2401.10241, sec. 2).
    Each has the input of each linear and the gradient of its output (beyond/14): of q,
    k, v, o, gate, up, down, of the experts, and on the last stage of the head.
    """
    if args.schedule != "zb-h1":
        return 0
    P, M, T, D = args.pp, args.microbatches, args.tp, args.hidden
    tokens = args.micro_batch * args.seq_len // args.cp
    own = tokens // T
    inside = 2 * q_width(args) + 2 * kv_width(args) + matrices(args) * args.ffn
    layer = e * (4 * own * D + tokens * inside // T)
    expert = 2 * D + matrices(args) * args.expert_ffn
    layer += e * routed_rows(args, own) * expert
    held = layers_of(args, stage) * layer
    if stage == P - 1:
        held += e * (own * D + tokens * vocab_rows(args))
    return (min(P, M) - in_flight(args.schedule, stage, P, M)) * held


def layers_in_flight(args, stage: int) -> int:
    """Forward passes of a layer that wait for their backward on a stage, at most.

    A chunk goes P micro-batches at a time, so the warm-up has 2·(P − stage − 1) +
    (v − 1)·P passes of a chunk; with the next one that is v·P·(1 + (P − 1)/(P·v)) on
    stage 0 (2104.04473, sec. 2.2). With light ends a layer is missing: in the first
    chunk, of which stage 0 has 2·P − 1 in flight; in the last one, which goes back at
    once.
    """
    P, M, v = args.pp, args.microbatches, args.virtual
    if v == 1:
        return in_flight(args.schedule, stage, P, M) * layers_of(args, stage)
    passes = min(2 * (P - stage - 1) + (v - 1) * P + 1, v * M)
    if not args.light_ends:
        return passes * (args.layers // (P * v))
    layers = passes * ((args.layers + 2) // (P * v))
    if stage == 0:
        layers -= min(2 * P - 1, M)
    if stage == P - 1:
        layers -= 1
    return layers


def activations(args, stage: int) -> int:
    """Bytes saved by all micro-batches in flight."""
    flying = in_flight(args.schedule, stage, args.pp, args.microbatches)
    total = flying * end_bytes(args, stage)
    total += layers_in_flight(args, stage) * layer_bytes(args)
    return total + put_off_bytes(args, stage)


def layer_in_forward(args, e=2) -> int:
    """Bytes that the forward of a layer needs besides what is saved, when down_proj has
    computed: four tensors between the linears, down's input if it is not saved, and
    with tp its gathered input and the partial output, twice: it is put in order for the
    reduce-scatter."""
    tokens = args.micro_batch * args.seq_len // args.cp
    elements = 4 * (tokens // args.tp) * args.hidden
    if args.tp > 1:
        elements += 3 * tokens * args.hidden
    if args.recompute in ("half", "full"):
        elements += tokens * args.ffn // args.tp
    return e * elements


def layer_in_backward(args, saved: int, e=2) -> int:
    """Bytes that the backward of a layer needs besides what is saved: the tensors that
    it recomputes; gradients of the gate's and up's outputs; and dL/dy, or with tp the
    gathered input, the gathered dL/dy and the partial dL/dx."""
    tokens = args.micro_batch * args.seq_len // args.cp
    outside = tokens * args.hidden * (3 if args.tp > 1 else 1)
    inside = (1 if args.tp > 1 else 2) * tokens * args.ffn // args.tp
    rows = routed_rows(args, tokens // args.tp)
    again = 0
    if args.recompute != "none":
        again = layer_bytes(changed(args, recompute="none")) - saved
    return again + e * (outside + inside + 2 * rows * args.expert_ffn)


def moments_bytes(args, n: int, e: int) -> int:
    """Two moments of n elements of e bytes; ZeRO: 1/DP (arXiv:1910.02054, sec. 5)."""
    return 2 * e * (math.ceil(n / args.dp) if args.zero else n)


def memory(args, stage: int) -> dict[str, int]:
    """Bytes of a rank at the peak, by what they are for: of the fullest phase."""
    return fuller(*phases(args, stage).values())


def fuller(*moments: dict[str, int]) -> dict[str, int]:
    return max(moments, key=lambda held: sum(held.values()))


def phases(args, stage: int) -> dict[str, dict[str, int]]:
    """Phase of the last micro-batch → bytes of a rank at most, by what they are for.

    forward: up to the logits. loss: its forward. head: backward of loss and head.
    layer: backward of a layer. optimizer. tests/test_peak.py compares them with the
    bytes that PyTorch allocates.

    Gradients are there from the first backward of a step on: with one micro-batch not
    before the head's.
    """
    state = state_bytes(args, stage)
    gradients = state.pop("gradients")
    before = gradients if args.microbatches > 1 else 0
    of_loss = loss_bytes(args, stage)
    flying = activations(args, stage)
    unsharded = unsharded_bytes(args, stage)
    found = {}
    for phase in ("forward", "loss", "head"):
        saved = flying - of_loss["saved"]
        found[phase] = held_by(state, before, saved, unsharded[phase], of_loss[phase])
    end = end_bytes(changed(args, pp=2), 1) if stage == args.pp - 1 else 0
    flying -= end  # neither in the forward nor in the backward of a layer
    saved = flying + layer_in_forward(args)
    layer = held_by(state, before, saved, unsharded["in_layer"], 0)
    found["forward"] = fuller(found["forward"], layer)
    found["layer"] = layer_phase(args, stage, state, before, flying)
    found["optimizer"] = held_by(state, gradients, 0, 0, 0)
    return found


def layer_phase(args, stage: int, state: dict, before: int, flying: int) -> dict:
    """What is held in the backward of a layer: of the first one that goes back, when
    all activations are there; of the second one; or of the last but one, when almost
    all layers have gradients."""
    layers = layers_of(args, stage)
    saved = layer_bytes(args)
    again = layer_in_backward(args, saved)
    unsharded = unsharded_bytes(args, stage)
    of_layer, of_head = gradients_one_by_one(args, stage)
    found = []
    for done in {0, min(1, layers - 1), max(0, layers - 2)}:
        gradients = before or of_head + done * of_layer
        of_zero = unsharded["layer" if done else "first"]
        activations = flying - done * saved + again
        found.append(held_by(state, gradients, activations, of_zero, 0))
    return fuller(*found)


def gradients_one_by_one(args, stage: int) -> tuple[int, int]:
    """Bytes of the gradients of a layer, and of the head (fully_shard holds the latter
    unsharded up to the end of backward)."""
    experts = experts_of_layer(args)
    layer = one_layer(args)
    if args.zero >= 2:
        layer = shard(args, layer, experts)
    e = 4 if args.zero == 3 else args.grad_bytes
    head = (stage == args.pp - 1) * vocab_rows(args) * args.hidden
    if args.zero >= 2:
        head = 0 if args.zero == 3 else shard(args, head, 0)
    return e * layer, e * head


def one_layer(args) -> int:
    """Parameters of a layer on a rank, unsharded."""
    sharded, replicated = layer_parameters(args)
    return sharded // args.tp + replicated + experts_of_layer(args)


def held_by(state: dict, gradients, activations, unsharded, loss) -> dict[str, int]:
    more = dict(activations=activations, unsharded=unsharded, loss=loss)
    return {**state, "gradients": gradients, **more}


def state_bytes(args, stage: int) -> dict[str, int]:
    """Bytes of weights, AdamW's state and all gradients, in mixed precision.

    Per parameter 2 + 2 + 12: weight, gradient (4 if it is accumulated in float32), and
    AdamW's two moments and copy of the weight in float32. ZeRO shards over dp × cp the
    12 (stage 1), also the gradient (2), also the weight (3) (1910.02054, sec. 5). Stage
    3 as fully_shard does it: the copy in float32 is the weight, and gradients are as
    wide: 4 + 4 + 8.
    """
    held, trained, _ = parameters(args, stage)
    of_experts = experts_of_stage(args, stage)
    kept = shard(args, held, of_experts)
    if args.zero == 3:
        return {"parameters": 4 * kept, "optimizer": 8 * kept, "gradients": 4 * kept}
    return {
        "parameters": 2 * held,
        "optimizer": 12 * (shard(args, trained, of_experts) if args.zero else trained),
        "gradients": args.grad_bytes * (kept if args.zero == 2 else held),
    }


# Phases of unsharded_bytes: in_layer is the forward of a layer, first the backward of
# the layer that goes back first.
UNSHARDED = "in_layer", "forward", "loss", "head", "first", "layer"


def unsharded_bytes(args, stage: int) -> dict[str, int]:
    """Bytes that ZeRO has unsharded for a while, by phase.

    Stage 2: the gradient of the largest module. Stage 3, measured with fully_shard: the
    vocabulary's 16-bit weights during forward and backward; in forward those of a
    layer, twice while it is gathered; in the backward of the first layer its weights,
    those of the next one and half of its gradients, and after that the previous one's
    in float32, which are being summed. From the head's backward on its gradient.
    """
    layer = one_layer(args)
    matrix = vocab_rows(args) * args.hidden
    if replicas(args) == 1 or args.zero < 2:
        return dict.fromkeys(UNSHARDED, 0)
    if args.zero == 2:
        largest = args.grad_bytes * max(layer, matrix)
        backward = dict.fromkeys(("head", "first", "layer"), largest)
        return dict.fromkeys(UNSHARDED, 0) | backward
    is_last = stage == args.pp - 1
    ends = (stage == 0) + is_last
    if args.tie:
        ends = min(1, ends)
    weights = 2 * ends * matrix
    gradient = 2 * is_last * matrix
    return {
        "in_layer": weights + 4 * layer,
        "forward": weights + 2 * layer,
        "loss": weights,
        "head": weights,
        "first": weights + gradient + 9 * layer // 2,
        "layer": weights + gradient + 17 * layer // 2,
    }


def shard(args, count: int, of_experts: int) -> int:
    """Parameters of a ZeRO shard: experts have fewer replicas than the rest."""
    rest = math.ceil((count - of_experts) / replicas(args))
    return rest + math.ceil(of_experts / expert_replicas(args))


# What it sends, and how long a step takes.


class Call(NamedTuple):
    """What lesson 05's METER counts: its keys are such tuples."""

    run: str
    phase: str
    collective: str
    axis: str


class Sent(NamedTuple):
    """Calls of one kind that a rank makes per step, and their payload in bytes."""

    call: Call
    calls: int
    nbytes: int


class Rows(list):
    """Rows of `traffic`; a row without calls is left out."""

    def add(self, phase: str, collective: str, axis: str, calls: int, nbytes) -> None:
        if calls:
            call = Call("mesh", phase, collective, axis)
            self.append(Sent(call, calls, round(calls * nbytes)))


def traffic(args, stage: int, e=2) -> list[Sent]:
    """Calls and payload of a rank per step: lesson 05's, and those of what it has not.

    Sources: arXiv:2205.05198, sec. 4.2 (layers); arXiv:2104.04473, sec. 3 (stages).
    """
    rows = Rows()
    tokens = args.batch_size // args.dp * args.seq_len // args.cp
    x = e * tokens * args.hidden / args.microbatches  # a micro-batch's activations
    of_layers(args, stage, x, rows)
    of_gradients(args, stage, e, rows)
    of_stages(args, stage, x, e, rows)
    of_attention(args, stage, e, rows)
    of_experts(args, stage, e, rows)
    return rows


def of_layers(args, stage: int, x: float, rows: Rows) -> None:
    """Lesson 04: per block (attention, MLP) an all-gather and a reduce-scatter forward,
    the same in backward, and there one more all-gather. Embedding and head likewise.

    A layer that is recomputed, half or fully, repeats all its calls but the last
    reduce-scatter, whose result is not needed (PyTorch's checkpoint stops before it). A
    layer of experts (beyond/16) without a shared expert has attention's block only.
    """
    M, l = args.microbatches, layers_of(args, stage)
    blocks = l if args.experts and not args.ffn else 2 * l
    first = int(stage == 0)  # embedding: a reduce-scatter; backward an all-gather
    last = int(stage == args.pp - 1)  # head: an all-gather; backward one of each
    rows.add("forward", "all-gather", "tp", M * (blocks + last), x)
    rows.add("forward", "reduce-scatter", "tp", M * (blocks + first), x)
    rows.add("backward", "all-gather", "tp", M * (2 * blocks + first + last), x)
    rows.add("backward", "reduce-scatter", "tp", M * (blocks + last), x)
    if args.recompute in ("half", "full"):
        rows.add("backward", "all-gather", "tp", M * blocks, x)
        rows.add("backward", "reduce-scatter", "tp", M * l, x)


def of_gradients(args, stage: int, e: int, rows: Rows) -> None:
    """Sums over replicas, and the norm. ZeRO 2 and 3 sum in every micro-batch, because
    no rank holds the gradients unsharded from one micro-batch to the next; 3 also
    gathers the weights, forward and backward (1910.02054, sec. 7: 1.5 times the
    traffic, with one micro-batch)."""
    M = args.microbatches
    g = max(e, args.grad_bytes)
    _, trained, replicated = parameters(args, stage)
    of_experts = experts_of_stage(args, stage)
    counts = {"dp": trained - of_experts, "edp": of_experts}
    if args.zero:  # shards of one size
        counts["dp"] += -counts["dp"] % replicas(args)
        counts["edp"] += -counts["edp"] % expert_replicas(args)
    rows.add("sums", "all-reduce", "tp", 1, g * replicated)
    for axis in ("tp", "pp", "dp")[: 3 if args.zero else 2]:
        rows.add("norm", "all-reduce", axis, 1, 8)  # one float64
    for axis, n in counts.items():
        if not n:
            continue
        if args.zero == 0:
            rows.add("sums", "all-reduce", axis, 1, g * n)
        elif args.zero == 1:
            rows.add("sums", "reduce-scatter", axis, 1, g * n)
        else:
            rows.add("backward", "reduce-scatter", axis, M, g * n)
        if args.zero in (1, 2):
            rows.add("update", "all-gather", axis, 1, e * n)
        elif args.zero == 3:
            rows.add("forward", "all-gather", axis, M, e * n)
            rows.add("backward", "all-gather", axis, M, e * n)


def of_stages(args, stage: int, x: float, e: int, rows: Rows) -> None:
    """The batch, messages between stages (of all chunks), the loss, the tied weight."""
    M, v = args.microbatches, args.virtual
    is_first = stage == 0
    is_last = stage == args.pp - 1
    b = args.batch_size // args.dp // M
    positions = b * args.seq_len // args.cp
    if is_first or is_last:
        rows.add("load", "broadcast", "tp", M, 24)  # the shape, 3 int64
        rows.add("load", "broadcast", "tp", M, 2 * 8 * positions)  # tokens, targets
        if args.tie:
            matrix = vocab_rows(args) * args.hidden
            g = max(e, args.grad_bytes)
            rows.add("sums", "all-reduce", "embed", 1, g * matrix)
            rows.add("update", "broadcast", "embed", 1, e * matrix)
    out = v - 1 if is_last else v  # chunks whose output another stage needs
    back = v - 1 if is_first else v
    for phase, count in (("forward", M * out), ("backward", M * back)):
        rows.add(phase, "send/recv", "pp", count, 40)  # header, then a slice of x
        rows.add(phase, "send/recv", "pp", count, x / args.tp)
    if is_last:
        rows.add("load", "all-reduce", "dp", 1, 8)  # count_targets
        # Lesson 03; the loss is computed in float32 at least.
        rows.add("forward", "all-reduce", "tp", 3 * M, max(4, e) * positions)


def of_attention(args, stage: int, e: int, rows: Rows) -> None:
    """Keys and values of a rank's positions go around the cp ranks, and in backward
    once more, with their gradients (beyond/11 counts these calls and bytes). If T > K,
    ranks with the same key/value head sum the gradients of its weights and biases."""
    M, l = args.microbatches, layers_of(args, stage)
    if args.cp > 1:
        tokens = args.batch_size // args.dp * args.seq_len // args.cp
        kv = 2 * e * tokens * kv_width(args) / (args.tp * M)
        rows.add("forward", "send/recv", "cp", M * l * (args.cp - 1), kv)
        rows.add("backward", "send/recv", "cp", M * l * (2 * args.cp - 1), kv)
        if args.recompute == "full":
            rows.add("backward", "send/recv", "cp", M * l * (args.cp - 1), kv)
    if args.tp > args.kv_heads:
        H, D = args.head_dim, args.hidden
        if args.biases == "none":
            rows.add("backward", "all-reduce", "copy", 2 * M * l, e * H * D)
        else:  # k and v, weights and biases
            rows.add("backward", "all-reduce", "copy", 4 * M * l, e * H * (D + 1) / 2)


def of_experts(args, stage: int, e: int, rows: Rows) -> None:
    """An all-to-all of top_k rows per token to the experts, and one back; the same in
    backward, and once more if layers are recomputed. Payload: the busiest rank's."""
    if not args.experts:
        return
    M, l = args.microbatches, layers_of(args, stage)
    tokens = args.micro_batch * args.seq_len // args.cp // args.tp
    nbytes = e * routed_rows(args, tokens) * args.hidden
    again = 2 if args.recompute == "full" else 0
    rows.add("forward", "all-to-all", "ep", 2 * M * l, nbytes)
    rows.add("backward", "all-to-all", "ep", (2 + again) * M * l, nbytes)


def counted(args, stage: int, e=2) -> dict[Call, list]:
    """The same as lesson 05 counts it: Call → calls, bytes."""
    found = {}
    for call, calls, nbytes in traffic(args, stage, e):
        if ranks_along(args, call.axis) > 1:  # otherwise nothing is sent
            row = found.setdefault(call, [0, 0])
            row[0] += calls
            row[1] += nbytes
    return found


# Groups that a line of the mesh has besides: ranks of one key/value head; first and
# last stage; replicas of the same experts.
LINKS = {"copy": "tp", "embed": "pp", "edp": "dp"}


def ranks_along(args, axis: str) -> int:
    """Ranks of a group; see LINKS."""
    if axis == "copy":
        return max(1, args.tp // args.kv_heads)
    if axis == "embed":
        return min(2, args.pp)
    if axis == "edp":
        return expert_replicas(args)
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


def ring_steps(collective: str, ranks: int) -> int:
    """Messages that a rank sends one after the other in a call, each to be waited for.
    In an all-to-all they leave at once."""
    if collective in ("send/recv", "all-to-all"):
        return 1
    return (2 if collective == "all-reduce" else 1) * (ranks - 1)


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
    replica · CP + cp_rank; experts are shared by neighbors. A group that fits into a
    node has the links inside. The ring of a group that spans nodes leaves each node
    through the network cards of all its ranks there (one card per GPU), so its rate
    grows with their number, up to the rate inside. A message between stages, or of keys
    and values along cp, has one sender, so it has one card. In an all-to-all each rank
    sends through its own card what leaves the node.
    """
    found = {}
    for axis, span in spans(args).items():
        ranks = ranks_along(args, axis)
        if fits_in_a_node(span, machine):
            found[axis] = machine.inside
        elif axis in ("cp", "pp"):
            found[axis] = machine.between
        elif axis == "ep":
            outside = max(1, ranks - machine.node)
            found[axis] = min(machine.inside, machine.between * (ranks - 1) / outside)
        else:
            cards = cards_of_a_group(ranks, span // ranks, machine.node)
            found[axis] = min(machine.inside, machine.between * cards)
    return found


def spans(args) -> dict[str, int]:
    """How many neighboring ranks a group of each axis lies among."""
    found = {"tp": args.tp, "dp": args.tp * replicas(args)}
    if args.cp > 1:
        found["cp"] = args.tp * args.cp
    if args.experts:
        found["ep"] = args.ep
        found["edp"] = found["dp"]
    found["pp"] = found["dp"] * args.pp
    return found


def fits_in_a_node(span: int, machine) -> bool:
    return machine.node % span == 0 or machine.gpus <= machine.node


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
    faster all the same, because it moves less memory; FLOPs do not show that.) Experts:
    those that a token takes, on the busiest rank.
    """
    tokens = args.batch_size // args.dp * args.seq_len
    # Zigzag gives each of the cp ranks the same share of tokens and of scores.
    ranks = args.tp * args.cp
    scores = 4 * args.seq_len * q_width(args) // (2 if args.scores == "half" else 1)
    layer = 2 * (layer_weights(args) + active_weights(args)) + scores
    again = 0
    if args.recompute == "full":
        again = layer
    elif args.recompute == "half":
        again = 2 * linears_again(args)
    elif args.recompute == "selective" and args.attention == "math":
        again = scores
    if args.attention == "flash":
        again += scores // 2
    work = layers_of(args, stage) * (3 * layer + again)
    if stage == args.pp - 1:
        work += 3 * 2 * args.hidden * args.vocab_size
    return tokens * work // ranks


def linears_again(args) -> int:
    """Elements of the linears that "half" computes again: k, o, and with a gate up."""
    mlp = args.ffn if args.gated else 0
    return args.hidden * (kv_width(args) + q_width(args) + mlp)


def active_weights(args) -> int:
    """Elements of the experts' matrices that a token uses, times the imbalance."""
    each = matrices(args) * args.hidden * args.expert_ffn
    router = args.hidden * args.experts
    return math.ceil(args.top_k * args.imbalance * each) + router


def model_flops(args) -> int:
    """FLOPs of the model per step, on all ranks together: nothing is recomputed, no
    head is counted twice."""
    one = dict(pp=1, dp=1, tp=1, cp=1, ep=1, light_ends=False, imbalance=1.0)
    return flops(changed(args, recompute="none", attention="math", **one), 0)


def hardware_flops(args) -> int:
    """FLOPs that all ranks together compute per step, with what is recomputed."""
    ranks = args.dp * args.cp * args.tp
    return sum(flops(args, stage) for stage in range(args.pp)) * ranks


# Phases that come once per step; all others come with each micro-batch.
ONCE = ("sums", "norm", "update")


def seconds(args, stage: int, machine, rate: dict) -> tuple[dict, dict]:
    """Seconds of a stage per step, and bytes that a rank sends along each axis.

    Seconds: arithmetic; messages along each axis that belong to micro-batches; "once":
    messages that come once per step. A call takes its bytes over the rate, and alpha
    for each step of its ring.
    """
    took = {"arithmetic": flops(args, stage) / machine.gpu_flops, "once": 0.0}
    took.update(dict.fromkeys(rate, 0.0))
    sent = dict.fromkeys(rate, 0.0)
    alpha = latencies(args, machine)
    for call, calls, payload in traffic(args, stage):
        ranks = ranks_along(args, call.axis)
        if ranks == 1:  # nothing is sent
            continue
        nbytes = payload * ring(call.collective, ranks)
        axis = call.axis if call.axis in rate else LINKS[call.axis]
        steps = calls * ring_steps(call.collective, ranks)
        time = nbytes / rate[axis] + steps * alpha[axis]
        sent[axis] += nbytes
        took["once" if call.phase in ONCE else axis] += time
    return took, sent


def latencies(args, machine) -> dict[str, float]:
    """Seconds per step of a ring along each axis."""
    found = {}
    for axis, span in spans(args).items():
        inside = fits_in_a_node(span, machine)
        found[axis] = machine.alpha_inside if inside else machine.alpha_between
    return found


def in_micro_batches(took: dict) -> float:
    """Seconds of a stage that belong to micro-batches."""
    return sum(took[name] for name in took if name != "once")


def bubble(args) -> float:
    """Waiting over computing of a stage, with F, B (dL/dx alone) and W (dL/dW) equally
    long; recomputing full layers adds an F to B, half of the linears a part of it.

    1F1B waits (P − 1)·(F + B + W) (2104.04473, sec. 2.2), with v chunks per stage one
    v-th of that; ZB-H1 (P − 1)·(F + B − W) (2401.10241). Computing: M·(F + B + W).
    """
    F = W = 1
    B = 2 if args.recompute == "full" else 1
    if args.recompute == "half":
        B += linears_again(args) / layer_weights(args)
    waits = F + B - W if args.schedule == "zb-h1" else F + B + W
    waits *= args.pp - 1
    return waits / (args.virtual * args.microbatches * (F + B + W))


def exposed_dp(args, once: float, each: float, arithmetic: float) -> float:
    """Seconds of dp's messages that a step waits for: all of them, or with overlap_dp
    what backward does not cover. Backward is two thirds of computing; messages that
    come once per step have that of the last micro-batch only."""
    if args.overlap_dp:
        backward = arithmetic * 2 / 3
        once = max(0.0, once - backward / args.microbatches)
        each = max(0.0, each - arithmetic)
    return once + each


def predict(args, machine) -> dict:
    """A layout's row; all of it is predicted. Only the first, the second and the last
    stage are computed: no other stage holds, sends or computes more than these. What
    ZB-H1 puts off grows with the stage: up to the last but one, or to the last of those
    that have a layer more."""
    P = args.pp
    rate = rates(args, machine)
    stages = sorted({0, min(1, P - 1), P - 1})
    fullest = {*stages}
    if args.schedule == "zb-h1":
        fullest |= {max(0, P - 2), max(0, args.layers % P - 1)}
    memories = [memory(args, stage) for stage in sorted(fullest)]
    fullest = fuller(*memories)
    found = [seconds(args, stage, machine, rate) for stage in stages]
    # The slowest stage sets the pace: M + P − 1 times (2104.04473, sec. 2.2).
    slowest = max((took for took, _ in found), key=in_micro_batches)
    waiting = in_micro_batches(slowest) * bubble(args)
    once = max(took["once"] for took, _ in found)
    each = slowest["dp"] + slowest.get("edp", 0.0)
    parts = {
        "arithmetic": slowest["arithmetic"],
        "tp": slowest["tp"],
        "dp": exposed_dp(args, once, each, slowest["arithmetic"]),
        "pp": slowest["pp"] + waiting,  # messages and the bubble
    }
    for axis in ("cp", "ep"):
        if axis in slowest:
            parts[axis] = slowest[axis]
    total = sum(parts.values())
    row = {name: getattr(args, name) for name in LAYOUT}
    row["bytes"] = fullest
    row["memory"] = sum(fullest.values())
    row["sent"] = {axis: max(sent[axis] for _, sent in found) for axis in rate}
    if "edp" in rate:
        row["sent"]["dp"] += row["sent"].pop("edp")
    row["bubble"] = bubble(args)
    row["waiting"] = waiting
    row["tp_leaves_node"] = not fits_in_a_node(args.tp, machine)
    row["seconds"] = total
    row["parts"] = parts
    row["mfu"] = model_flops(args) / (machine.gpu_flops * machine.gpus * total)
    return row


# All layouts of a model on a machine.


def divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    large = [n // i for i in reversed(small) if i * i != n]
    return small + large


def why_not(sizes: dict, dp=1, pp=1, tp=1, cp=1, ep=1, virtual=1) -> str:
    """Which size is not divisible, or "": the conditions of lesson 05, and T > K; with
    cp > 1, two chunks of positions on each rank, and SP within its positions; even
    chunks of layers; and experts that the ranks share evenly."""
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
        ("experts", "ep", ep),
    ):
        if name == "kv_heads" and tp % sizes[name] == 0:
            continue  # each head is replicated on tp / kv_heads ranks
        if sizes.get(name, 0) % parts:
            return f"{name.replace('_', '-')} % {axis} is not 0"
    if tp * cp * dp % ep:
        return "tp · cp · dp % ep is not 0"
    if ep > 1 and not sizes.get("experts"):
        return "ep without experts"
    layers = sizes["layers"]
    if layers < pp:
        return "fewer layers than pp"
    if pp > 1 and virtual > 1 and layers % (pp * virtual):
        if not has_light_ends(layers, pp, virtual):
            return "layers % (pp · virtual) is not 0"
    return ""


def meshes(gpus: int, fixed: dict, seq_len: int = 0):
    """All dp, pp, tp, cp whose product is the number of GPUs, as far as `fixed` allows.

    cp is 1, what `fixed` says, or more for a long sequence: powers of two that leave
    SHORTEST_IN_A_RING positions on a rank.
    """
    for cp in [fixed["cp"]] if "cp" in fixed else rings(seq_len):
        if gpus % cp:
            continue
        for tp in divisors(gpus // cp):
            for pp in divisors(gpus // cp // tp):
                found = {"dp": gpus // cp // tp // pp, "pp": pp, "tp": tp, "cp": cp}
                if agrees(found, fixed):
                    yield found


def rings(seq_len: int) -> list[int]:
    found = [1]
    while seq_len >= 2 * found[-1] * SHORTEST_IN_A_RING:
        found.append(2 * found[-1])
    return found


def agrees(found: dict, fixed: dict) -> bool:
    return all(fixed.get(name, value) == value for name, value in found.items())


def most_gpus(sizes: dict, gpus: int, fixed: dict) -> int:
    """The largest number of GPUs, at most `gpus`, that some mesh of the model has; 0 if
    there is none. Along each axis only sizes that the model allows are tried."""
    cp = fixed.get("cp", 1)
    tps = [tp for tp in divisors(sizes["heads"]) if not why_not(sizes, tp=tp, cp=cp)]
    dps = divisors(sizes["batch_size"])
    pps = range(1, sizes["layers"] + 1)
    tps, dps, pps = (
        [n for n in found if fixed.get(axis, n) == n]
        for axis, found in zip(("tp", "dp", "pp"), (tps, dps, pps))
    )
    v = fixed.get("virtual", 1)
    pps = [pp for pp in pps if not why_not(sizes, pp=pp, virtual=v)]
    products = {cp * tp * dp for tp in tps for dp in dps}
    fitting = {n * pp for n in products for pp in pps if n * pp <= gpus}
    return max(fitting, default=0)


def choices(sizes: dict, mesh: dict, fixed: dict, options: dict):
    """Micro-batch sizes and expert groups of a mesh."""
    virtual = options.get("virtual", 1) if mesh["pp"] > 1 else 1
    groups = [1]
    if sizes.get("experts"):
        groups = divisors(sizes["experts"])
    for b in divisors(sizes["batch_size"] // mesh["dp"]):
        M = sizes["batch_size"] // mesh["dp"] // b
        if virtual > 1 and M % mesh["pp"]:
            continue  # interleaving goes through P micro-batches at a time
        for ep in groups:
            found = {"micro_batch": b, "ep": ep}
            if agrees(found, fixed) and not why_not(sizes, **mesh, ep=ep):
                yield found


def layout_options(sizes: dict, mesh: dict, options: dict) -> dict:
    """Options of a layout: without stages there are no chunks; ends are light if then
    all chunks are even."""
    virtual = options.get("virtual", 1) if mesh["pp"] > 1 else 1
    light = has_light_ends(sizes["layers"], mesh["pp"], virtual)
    return options | dict(virtual=virtual, light_ends=light)


def search(sizes: dict, machine, fixed: dict | None = None, **options) -> tuple:
    """Rows that fit, the fastest first; rows that do not; why dp × pp × tp is refused.

    Args:
        machine: gpus, node, gpu_memory, reserve, gpu_flops, inside, between, alphas.
        fixed: required values, such as {"tp": 8}.
        options: attention, zero, tie, virtual and others; see make_layout.
    """
    fixed = fixed or {}
    fits = []
    too_large = []
    refused = Counter()
    flash = options.get("attention", "math") == "flash"
    ways = ways_to_recompute(sizes, options.get("attention", "math"))
    ways = [fixed["recompute"]] if "recompute" in fixed else ways
    for mesh in meshes(machine.gpus, fixed, flash * sizes["seq_len"]):
        reason = why_not(sizes, **mesh, virtual=options.get("virtual", 1))
        if reason:
            refused[reason] += 1
            continue
        more = layout_options(sizes, mesh, options)
        for found in choices(sizes, mesh, fixed, more):
            for how in ways:
                layout = make_layout(sizes, **mesh, **found, recompute=how, **more)
                row = predict(layout, machine)
                if row["memory"] > usable(machine):
                    too_large.append(row)
                    continue
                fits.append(row)
                if flash and how == "none":  # otherwise the cheap way ties with it
                    break
    return sorted(fits, key=lambda row: row["seconds"]), too_large, refused


def best_of_each(rows: list[dict]) -> list[dict]:
    """The first row of each dp × pp × tp × cp, in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault((row["dp"], row["pp"], row["tp"], row["cp"]), row)
    return list(found.values())
