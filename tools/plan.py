"""`make plan`: before you book the GPUs: which dp × pp × tp, and a dry run of it.

Goes through every layout of lesson 05 that a model and a machine allow, with all
micro-batch sizes and with recomputation: how much a rank holds at the peak, how much it
sends at most, and a time; the best first. Long sequences are split over cp, experts are
shared over ep. Bytes sent and saved are those that lesson 05 counts.
The time is a roofline: arithmetic at the peak, then messages at the links' rates, then
the pipeline's bubble. It leaves out kernels below their peak and late ranks. So it
ranks layouts; it does not tell how long a step takes (its last lines say how far off).

    python tools/plan.py --model llama-3-70b --machine dgx-h100 --gpus 512 --zero
    python tools/plan.py --layers 40 --hidden 5120 --heads 40 --gpus 64
    python tools/plan.py --model llama-3-405b --machine dgx-h100 --gpus 8192 --virtual 8
    python tools/plan.py --model qwen3-235b-a22b --machine gb200-nvl72 --gpus 288 --zero
    python tools/plan.py --model llama-3-8b --gpus 256 --seq-len 131072
    python tools/plan.py --model gpt-1008b --gpus 3072 --dp 6 --pp 64 --tp 8 --dry-run

A dry run is lesson 05 itself, its stage, schedule and counters, for one rank of each
stage, with tensors that have shapes but no values, and messages that no rank receives.

The formulas and their sources: tools/predict.py. Models and machines: tools/presets.py.
What other people measured: tools/published.py. The same in a page with sliders:
docs/_static/planner.
"""

import argparse
import itertools
import json
import math
import signal
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import predict
from predict import AXES, GB, MACHINE, RECOMPUTE, SIZES, ZERO, lesson, usable, why_not
from presets import BIASES, EXPERTS, MACHINES, MODELS, STYLE
from published import BANDS, peaks, reserved

# What the flags say of a layout besides its mesh.
OPTIONS = "zero attention virtual schedule loss grad_bytes imbalance overlap_dp".split()

MOST_TRIED = 500  # layouts, in the search for flags that are accepted
NEAR = 6  # values of each flag


# A size: what it is, and in brackets what it is without --model.
ABOUT = {
    "layers": "layers of the transformer",
    "hidden": "hidden size",
    "heads": "query heads",
    "kv_heads": "key/value heads (--heads)",
    "head_dim": "size of a head (--hidden / --heads)",
    "ffn": "width of the MLP (4 · --hidden), or of the shared expert (0)",
    "vocab_size": "tokens in the vocabulary (51200)",
    "seq_len": "tokens per sequence (2048)",
    "batch_size": "sequences per step, on all GPUs together (512)",
    "experts": "experts per layer (0)",
    "top_k": "experts per token (0)",
    "expert_ffn": "width of an expert (0)",
}


def read_flags(words=None) -> argparse.Namespace:
    return fill(make_parser().parse_args(words))


class Flags(argparse.ArgumentParser):
    """A wrong flag is an error like any other: argparse would print its usage."""

    def error(self, message):
        raise ValueError(message)


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="plan.py --model NAME --gpus N [--machine NAME] [flags below]",
    )
    names = known(MODELS, "Sizes in brackets are those without --model.")
    add_model_flags(parser.add_argument_group("model", names).add_argument)
    names = known(MACHINES)
    add_machine_flags(parser.add_argument_group("machine", names).add_argument)
    add_layout_flags(parser.add_argument_group("layout").add_argument)
    add = parser.add_argument_group("output", UNITS).add_argument
    add("--top", type=lesson.positive, metavar="N", default=20, help="rows shown (20)")
    add("--json", type=Path, metavar="PATH", help="write all rows there")
    add("--dry-run", type=lesson.positive, nargs="?", const=2, metavar="M",
        help="try the best layout, M micro-batches per step (2)")  # fmt: skip
    return parser


def known(names, more="") -> str:
    """The description of a group of flags; argparse would break names at a hyphen."""
    return textwrap.fill(f"{', '.join(names)}. {more}", 84, break_on_hyphens=False)


def add_model_flags(add) -> None:
    yes_or_no = argparse.BooleanOptionalAction
    add("--model", choices=MODELS, metavar="NAME",
        help="take its sizes; flags change them")  # fmt: skip
    for name, text in ABOUT.items():
        kind = from_zero if name in ("ffn", *EXPERTS) else lesson.positive
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    add("--gated", action=yes_or_no, help="the MLP has three matrices: gate, up, down")
    add("--biases", choices=BIASES, help="which linears have one (all)")
    add("--tie", action=yes_or_no, help="embedding and head are one weight")
    add("--qk-norm", action=yes_or_no, help="a norm of each query and key head")


def add_machine_flags(add) -> None:
    add("--machine", choices=MACHINES, metavar="NAME", default="dgx-a100",
        help="take its GPUs and links (dgx-a100); flags change them")  # fmt: skip
    add("--gpus", type=lesson.positive, metavar="N", help="GPUs of the run")
    add("--node", type=lesson.positive, metavar="N", help="GPUs per node")
    add(
        "--gpu-memory",
        type=above_zero,
        metavar="GB",
        help="memory of a GPU; one that is sold as 80 GB has 85",
    )
    add(
        "--reserve",
        type=share,
        metavar="SHARE",
        help="of the memory that stays free (0.1)",
    )
    values = {
        "--gpu-flops": "peak FLOP/s of a GPU, such as 312e12",
        "--inside": "bytes/s within a node, such as 300e9",
        "--between": "bytes/s of a network card, such as 25e9",
        "--alpha-inside": "seconds per step of a ring in a node (2e-6)",
        "--alpha-between": "seconds per step of another ring (1e-5)",
    }
    for flag, text in values.items():
        add(flag, type=above_zero, metavar="X", help=text)


def add_layout_flags(add) -> None:
    """What a layout must be, and what it may use."""
    whole = dict(type=lesson.positive, metavar="N")
    for name in AXES:
        add(f"--{name}", **whole, help=f"only layouts with this {name}")
    add("--cp", **whole, help="ranks that share each sequence, in a ring (beyond/11); "
        "not given: tried for long sequences")  # fmt: skip
    add("--ep", **whole, help="ranks that share the experts; not given: all are tried")
    add("--micro-batch", **whole, help="sequences per micro-batch")
    add("--recompute", choices=RECOMPUTE, help="only layouts that recompute "
        "nothing, what is cheap, that and half of the linears (torchtitan's "
        "selective), or full layers")  # fmt: skip
    add("--virtual", **whole, default=1,
        help="chunks of layers per stage: interleaving (1)")  # fmt: skip
    add("--schedule", choices=predict.SCHEDULES, default="1f1b",
        help="order of a stage's passes (1f1b)")  # fmt: skip
    add("--attention", choices=predict.ATTENTION, default="flash",
        help="math: scores are saved; flash: FlashAttention saves none "
        "(flash)")  # fmt: skip
    add("--scores", choices=predict.SCORES,
        help="how many of the S × S scores a kernel computes: half, if it is causal, "
        "or all (half; math: all)")  # fmt: skip
    add("--zero", type=int, choices=ZERO, nargs="?", const=1, default=0,
        help="ZeRO's stage: shard AdamW's state over dp (1, also without a number), "
        "gradients (2), weights (3), or nothing (0, not given)")  # fmt: skip
    add("--loss", choices=predict.LOSSES, default="plain",
        help="plain: lesson 03's; torch: F.cross_entropy in float32, with tp under "
        "loss_parallel; fused: one kernel; pieces: 1/16 of the positions at a time "
        "(plain)")  # fmt: skip
    add("--grad-bytes", type=int, choices=(2, 4), default=2, help="bytes per gradient: "
        "4 if they are accumulated in float32 (2)")  # fmt: skip
    add("--mlp-saves", type=int, choices=(3, 4), help="tensors of its width that a "
        "gated MLP saves: 3 if SiLU is fused with the product, "
        "otherwise 4 (3)")  # fmt: skip
    add("--imbalance", type=at_least_one, metavar="X", default=1.0,
        help="tokens of the busiest experts over the mean (1)")  # fmt: skip
    add("--overlap-dp", action="store_true", help="dp's messages hide behind backward")


def from_zero(text: str) -> int:
    if text == "0":
        return 0
    try:
        return lesson.positive(text)
    except argparse.ArgumentTypeError:
        said = f"{text} is not a number from 0 to {2**31 - 1}"
        raise argparse.ArgumentTypeError(said) from None


def at_least_one(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to below 1")
    return value


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def fill(args) -> argparse.Namespace:
    """What is not given comes from the model, the machine, or the other flags."""
    default = dict(vocab_size=51200, seq_len=2048, batch_size=512, **STYLE, **EXPERTS)
    default.update(MODELS.get(args.model, {}))
    default.update(MACHINES[args.machine])
    if args.hidden or args.heads:  # a head's size follows from them
        default.pop("head_dim", None)
    for name in (*SIZES, *STYLE, *EXPERTS, *MACHINE):
        if getattr(args, name) is None:
            setattr(args, name, default.get(name))
    missing = [
        name for name in ("layers", "hidden", "heads") if not getattr(args, name)
    ]
    if missing:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ValueError(f"{flags}: how many? Or take --model gpt3")
    args.kv_heads = args.kv_heads or args.heads
    if args.ffn is None:
        args.ffn = 0 if args.experts else 4 * args.hidden
    check_sizes(args)
    check_gpus(args)
    return args


def check_sizes(args) -> None:
    """ValueError where sizes do not go together."""
    heads, kv_heads = args.heads, args.kv_heads
    if heads % kv_heads:
        near = min(predict.divisors(heads), key=lambda n: abs(n - kv_heads))
        said = f"--heads {heads} % {kv_heads} is not 0; take --kv-heads {near}"
        raise ValueError(f"--kv-heads {kv_heads}: {said}")
    if args.head_dim is None:
        lesson.must_divide(
            args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)"
        )
        args.head_dim = args.hidden // args.heads
    else:
        lesson.must_divide(args, "head_dim", 2, "(rotary pairs)")
    check_experts(args)
    if args.mlp_saves and not args.gated:
        raise ValueError(f"--mlp-saves {args.mlp_saves}: the MLP is not gated; leave "
                         "it out, or give --gated as well")  # fmt: skip
    if args.virtual > 1 and args.schedule != "1f1b":
        raise ValueError(f"--virtual {args.virtual} with --schedule {args.schedule}: "
                         "only 1F1B is interleaved here; take --virtual 1")  # fmt: skip


def check_experts(args) -> None:
    """ValueError for flags of experts that do not go together."""
    if not args.experts and not args.ffn:
        raise ValueError("--ffn 0: there are no experts; take --ffn "
                         f"{4 * args.hidden}, or give --experts as well")  # fmt: skip
    missing = ["--top-k"] * (not args.top_k) + ["--expert-ffn"] * (not args.expert_ffn)
    if args.experts and missing:
        raise ValueError(f"--experts: give {' and '.join(missing)} as well")
    if args.ep and args.ep > 1 and not args.experts:
        raise ValueError(f"--ep {args.ep}: there are no experts; take --ep 1")
    if args.top_k and not args.experts:
        raise ValueError(f"--top-k {args.top_k}: there are no experts; leave it out, "
                         "or give --experts and --expert-ffn as well")  # fmt: skip
    if args.top_k > args.experts:
        flags = f"--top-k {args.top_k}: there are {args.experts} experts"
        raise ValueError(f"{flags}; take --top-k {args.experts}")
    if args.imbalance > 1 and not args.experts:
        raise ValueError(f"--imbalance {args.imbalance:g}: there are no experts; take "
                         "--imbalance 1")  # fmt: skip


def check_gpus(args) -> None:
    """ValueError if the mesh's sizes are no part of the GPUs."""
    mesh = {axis: getattr(args, axis) for axis in (*AXES, "cp")}
    given = {axis: n for axis, n in mesh.items() if n}
    complete = all(mesh[axis] for axis in AXES)
    product = math.prod(given.values())
    args.gpus = args.gpus or (product if complete else None)
    if not args.gpus:
        raise ValueError("--gpus: how many? For example --gpus 64")
    # With cp left open, a complete mesh may leave a factor to it.
    exact = complete and (mesh["cp"] or len(predict.rings(args.seq_len)) == 1)
    if args.gpus % product or (exact and product != args.gpus):
        text = " × ".join(f"--{axis} {n}" for axis, n in given.items())
        near = product if complete else max(1, args.gpus // product) * product
        sizes, fixed, options = asked(args)
        take = f"--gpus {near}"
        if not is_possible(sizes, near, fixed, options):
            take = nearest(args) or take
        raise ValueError(f"--gpus {args.gpus}, but {text}; take {take}")


def asked(args) -> tuple[dict, dict, dict]:
    """What the flags say: the model; what they fix of a layout; and options."""
    fixed = {}
    for name in (*AXES, "cp", "ep", "micro_batch", "recompute"):
        if getattr(args, name):
            fixed[name] = getattr(args, name)
    sizes = {name: getattr(args, name) for name in (*SIZES, *STYLE, *EXPERTS)}
    options = {name: getattr(args, name) for name in OPTIONS}
    for name in ("mlp_saves", "scores"):
        if getattr(args, name):
            options[name] = getattr(args, name)
    return sizes, fixed, options


def find(args) -> tuple[list, list, Counter]:
    """`search` with what the flags say; ValueError if there is nothing to show."""
    sizes, fixed, options = asked(args)
    refuse_tp(args, sizes)
    fits, too_large, refused = predict.search(sizes, args, fixed, **options)
    if fits:
        return fits, too_large, refused
    if too_large:
        least = min(too_large, key=lambda row: row["memory"])
        axes = [axis for axis in (*AXES, "cp") if axis in AXES or least[axis] > 1]
        mesh = " × ".join(f"{axis} {least[axis]}" for axis in axes)
        raise ValueError(
            f"none of {len(too_large)} layouts fits {usable(args) / GB:.1f} of "
            f"{args.gpu_memory:g} GB (--reserve {args.reserve:g}): the smallest, "
            f"{mesh}, would hold {least['memory'] / GB:.1f}; {what_fits(args)}"
        )
    raise ValueError(f"{why_none(args, refused)}; take {nearest(args)}")


def why_none(args, refused: Counter) -> str:
    """Which flags no layout has, and why."""
    sizes, fixed, _ = asked(args)
    mesh = {name: fixed[name] for name in (*AXES, "cp", "ep") if name in fixed}
    for some in [{name: mesh[name]} for name in mesh] + [mesh]:
        reason = why_not(sizes, **some)
        if reason and not (list(some) == ["ep"] and args.experts % args.ep == 0):
            flags = " × ".join(f"--{name} {n}" for name, n in some.items())
            return f"{flags}: {reason}"
    parts = fixed.get("dp", 1) * fixed.get("micro_batch", 1)
    if args.batch_size % parts:
        return (
            f"--batch-size {args.batch_size} % {parts} (--dp · --micro-batch) is not 0"
        )
    if not refused:  # meshes are possible, but no micro-batch size is
        said = "a replica's micro-batches are no multiple of pp"
        return f"--virtual {args.virtual}: {said}"
    why = "; ".join(f"{reason} ({n})" for reason, n in refused.items())
    return f"--gpus {args.gpus}: {why}"


def is_possible(sizes: dict, gpus: int, fixed: dict, options: dict) -> bool:
    """Is there any layout, whether or not it fits?"""
    is_flash = options["attention"] == "flash"
    for mesh in predict.meshes(gpus, fixed, is_flash * sizes["seq_len"]):
        if not why_not(sizes, **mesh, virtual=options["virtual"]):
            if any(predict.choices(sizes, mesh, fixed, options)):
                return True
    return False


def nearest(args) -> str:
    """Other values of the layout's flags, few and near, which are accepted."""
    sizes, fixed, options = asked(args)
    fixed["virtual"] = args.virtual
    most = dict.fromkeys((*AXES, "cp"), args.gpus)
    most |= {"ep": args.experts or 1, "micro_batch": args.batch_size}
    names = [name for name in (*most, "virtual") if name in fixed]

    def distance(values: dict) -> tuple:
        off = [abs(math.log(n / fixed[name])) for name, n in values.items()]
        return sum(map(bool, off)), sum(off)

    tried = []
    for name in names:
        values = range(1, args.virtual + 1)
        if name != "virtual":
            values = {*predict.divisors(most[name]), fixed[name]}
        tried.append(sorted(values, key=lambda n: distance({name: n}))[:NEAR])
    found = [dict(zip(names, values)) for values in itertools.product(*tried)]
    for values in sorted(found, key=distance)[:MOST_TRIED]:
        changed = {name: n for name, n in values.items() if n != fixed[name]}
        gpus = args.gpus
        if all(axis in values for axis in AXES):
            gpus = math.prod(values.get(axis, 1) for axis in (*AXES, "cp"))
            changed |= {"gpus": gpus} if gpus != args.gpus else {}
        options["virtual"] = values["virtual"]
        if changed and is_possible(sizes, gpus, fixed | values, options):
            flags = [f"--{name.replace('_', '-')} {n}" for name, n in changed.items()]
            return " ".join(flags)
    more = predict.most_gpus(sizes, args.gpus, fixed)
    return f"--gpus {more}" if more else "other sizes"


def refuse_tp(args, sizes: dict) -> None:
    """ValueError if a known model does not allow --tp, with those that it allows."""
    cp = args.cp or 1
    why = why_not(sizes, tp=args.tp or 1, cp=cp)
    if not args.model or not why or why_not(sizes, cp=cp):
        return
    allowed = [
        tp for tp in predict.divisors(args.heads) if not why_not(sizes, tp=tp, cp=cp)
    ]
    *first, last = map(str, allowed)
    text = f"{', '.join(first)} or {last}" if first else last
    raise ValueError(f"--tp {args.tp}: {why} for {args.model}; take --tp {text}")


def what_fits(args) -> str:
    """A flag with which some layout fits."""
    sizes, fixed, options = asked(args)
    for stage in range(args.zero + 1, max(ZERO) + 1):
        options["zero"] = stage
        if predict.search(sizes, args, fixed, **options)[0]:
            return f"take --zero {stage}"
    options["zero"] = args.zero
    if all(axis in fixed for axis in AXES):
        fixed = {"cp": args.cp or 1}
    for gpus in (args.gpus * 2**i for i in range(11)):
        machine = predict.changed(args, gpus=gpus)
        if predict.search(sizes, machine, fixed, **options)[0]:
            free = ", and no --dp, --pp, --tp" if args.tp and "tp" not in fixed else ""
            return f"take --gpus {gpus}{free}"
    least = min(
        row["memory"] for row in predict.search(sizes, args, fixed, **options)[1]
    )
    needed = math.ceil(least / GB / (1 - args.reserve))
    return f"take --gpu-memory {needed}, or a smaller model"


def sent(axis: str):
    """How GB of a row are shown."""

    def text(row: dict) -> str:
        value = row["sent"].get(axis, 0) / GB
        return f"{value:.1f}" if value < 1000 else f"{value:.0f}"

    return text


def held(*kinds: str):
    return lambda row: f"{sum(row['bytes'][kind] for kind in kinds) / GB:.1f}"


STATES = "parameters", "gradients", "optimizer", "unsharded"
COLUMNS = {  # heading: value
    "dp": lambda row: f"{row['dp']}",
    "pp": lambda row: f"{row['pp']}",
    "tp": lambda row: f"{row['tp']}{'*' * row['tp_leaves_node']}",
    "cp": lambda row: f"{row['cp']}",
    "ep": lambda row: f"{row['ep']}",
    "b": lambda row: f"{row['micro_batch']}",
    "redo": lambda row: row["recompute"].replace("selective", "some"),
    "peak": lambda row: f"{row['memory'] / GB:.1f}",
    "state": held(*STATES),
    "activ": held("activations"),
    "loss": held("loss"),
    "→tp": sent("tp"),
    "→pp": sent("pp"),
    "→dp": sent("dp"),
    "→cp": sent("cp"),
    "→ep": sent("ep"),
    "bubble": lambda row: f"{row['bubble']:.2f}",
    "s/step": lambda row: f"{row['seconds']:.2f}",
    "MFU": lambda row: f"{row['mfu']:.0%}",
}
UNITS = "GB: 10⁹ bytes (PyTorch's errors say GiB, which are 1.074 GB)."
LEGEND = f"""\
All of this is predicted. {UNITS}
b       sequences per micro-batch
redo    what is recomputed: none; some (selective: what is cheap); half (also linears:
        k, o and up; torchtitan's selective mode); full layers
peak    GB that PyTorch allocates on the fullest rank in its fullest phase (forward,
        loss, its backward, a layer's, the optimizer): state (weights, gradients,
        AdamW), activ (activations) and loss (logits and what is made of them)
→tp …   GB that a rank sends per step along each axis, at most (in rings)
bubble  waiting over computing
MFU     the model's FLOPs, without recomputing, over the GPUs' peak in that time"""
LEAVES = "*: the tp group spans nodes, and waits for the network ten times per layer."
CP = """\
cp: ranks that share each sequence and pass keys and values around a ring (beyond/11).
Gradients are summed over the dp × cp ranks of each parameter."""
EP = """\
ep: ranks that share the experts, {experts} per layer, {top_k} per token; rows travel to
them and back. They are ranks of dp, cp and tp."""


def about_scores(args) -> str:
    """How many of attention's scores are charged, and how much more all would be."""
    sizes, _, options = asked(args)
    layout = predict.make_layout(sizes, **options)
    charged = predict.model_flops(layout)
    more = predict.model_flops(predict.changed(layout, scores="all")) / charged - 1
    if layout.scores == "all":
        return wrap("Times and MFU count all S × S scores, as most published MFU do.")
    return wrap(
        "Times and MFU count half of the S × S scores, as a causal kernel computes "
        "them. Most published MFU count all (--scores all): the model's FLOPs are then "
        f"{more:.0%} more here."
    )


def about_cp(args) -> str:
    """How far the search went along cp, if no flag says it."""
    rings = predict.rings(args.seq_len) if args.attention == "flash" else [1]
    least = f"{predict.SHORTEST_IN_A_RING:,} positions per rank"
    return f"cp: tried up to {rings[-1]} (from {least} on). --cp tries another."


def how_wrong() -> str:
    bands = [f"{kind}: {low} to {high}" for kind, (low, high) in BANDS.items()]
    low, high = reserved()
    return wrap(
        "How wrong: published runs took longer than predicted, times these: "
        f"{'; '.join(bands)}. So compare neighboring layouts only, and measure the "
        "best. Peaks are what PyTorch allocates. Its allocator reserves more: in "
        f"{len(peaks())} published runs {low:.2f} to {high:.2f} times as much "
        "(tools/published.py)."
    )


def columns_of(args, rows: list) -> list[str]:
    """cp and ep only if a row has them; then the bubble makes room."""
    hidden = set()
    if all(row["cp"] == 1 for row in rows):
        hidden |= {"cp", "→cp"}
    if not args.experts:
        hidden |= {"ep", "→ep"}
    if len(hidden) < 4:
        hidden.add("bubble")
    return [name for name in COLUMNS if name not in hidden]


def show_rows(args, rows: list) -> None:
    """A table whose columns are as wide as their largest value."""
    names = columns_of(args, rows)
    lines = [names]
    lines += [[COLUMNS[name](row) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for cells in lines:
        print("", *[f"{cell:>{width}}" for cell, width in zip(cells, widths)])


def show_asked(args) -> None:
    """What is the same in all rows."""
    print(
        f"Per step: {args.batch_size} sequences of {args.seq_len:,} tokens. Machine: "
        f"{args.machine}, {args.node} GPUs per node."
    )
    names = ["zero", "attention", "schedule", "virtual", "loss", "grad_bytes"]
    names += ["imbalance"] if args.experts else []
    names += [name for name in ("mlp_saves", "scores") if getattr(args, name)]
    flags = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names]
    flags += ["--overlap-dp"] if args.overlap_dp else []
    print(wrap(f"All rows: {', '.join(flags)}."))


def show(args, fits: list, too_large: list, refused: Counter, took: float) -> None:
    sizes, _, _ = asked(args)
    count = predict.parameters(predict.make_layout(sizes), 0)[0]
    layouts = f"{len(fits) + len(too_large)} layouts in {took:.1f} s, {len(fits)} fit"
    print(f"{count / 1e9:.4g} billion parameters on {args.gpus} GPUs: {layouts}.")
    show_asked(args)
    free = f"{args.reserve:.0%} stay free (--reserve: CUDA, NCCL, fragmentation)"
    print(f"A rank may hold {usable(args) / GB:.1f} of {args.gpu_memory:g} GB: {free}.")
    print(LEGEND)
    rows = fits[: args.top]
    if any(row["tp_leaves_node"] for row in rows):
        print(LEAVES)
    if any(row["cp"] > 1 for row in rows):
        print(CP)
    if args.experts:
        print(EP.format(experts=args.experts, top_k=args.top_k))
    show_rows(args, rows)
    if too_large:
        least = min(row["memory"] for row in too_large) / GB
        print(
            f"Too large: {len(too_large)} layouts hold more than "
            f"{usable(args) / GB:.1f} GB; the smallest holds {least:.1f}."
        )
    if refused:
        reasons = [f"{reason} ({n})" for reason, n in refused.most_common()]
        text = f"Refused of {args.gpus} GPUs: {sum(refused.values())} meshes, because "
        print(wrap(text + "; ".join(reasons)))
    if not args.cp:
        print(about_cp(args))
    print(about_scores(args))
    print(how_wrong())


def refuse_dry_run(args, best: dict) -> None:
    """ValueError where lesson 05 has another model or another optimizer."""
    wrong = ""
    if best["tp"] > args.kv_heads:
        wrong = f"of tp {best['tp']}, but --kv-heads {args.kv_heads}: lesson 05 does "
        wrong += f"not replicate heads; take --tp {args.kv_heads}"
    elif best["cp"] > 1:
        wrong = f"of --cp {best['cp']}: lesson 05 splits no sequence; take --cp 1"
    elif best["recompute"] == "half":
        wrong = "of --recompute half: lesson 05 recomputes no linear on its own; take "
        wrong += "--recompute full"
    elif args.zero > 1:
        wrong = f"of --zero {args.zero}: lesson 05 shards the optimizer only; take "
        wrong += "--zero 1"
    elif best["virtual"] > 1:
        wrong = f"of --virtual {args.virtual}: lesson 05 does not interleave; take "
        wrong += "--virtual 1"
    elif args.schedule != "1f1b":
        wrong = f"of --schedule {args.schedule}: lesson 05 runs 1F1B here; take "
        wrong += "--schedule 1f1b"
    elif args.loss != "plain":
        wrong = f"of --loss {args.loss}: lesson 05 has lesson 03's; take --loss plain"
    elif args.grad_bytes != 2:
        wrong = f"of --grad-bytes {args.grad_bytes}: lesson 05's gradients are as wide "
        wrong += "as its weights; take --grad-bytes 2"
    elif args.experts:
        wrong = f"of --experts {args.experts}: lesson 05 has none; leave it out"
    elif args.qk_norm:
        wrong = "of --qk-norm: lesson 05 does not have it; take --no-qk-norm"
    elif args.head_dim != args.hidden // args.heads:
        wrong = f"of --head-dim {args.head_dim}: lesson 05 has --hidden / --heads; "
        wrong += f"take --head-dim {args.hidden // args.heads}"
    elif args.ffn != 4 * args.hidden or args.gated or args.biases != "all":
        wrong = "of a gated MLP, another --ffn than 4 · hidden, or other --biases: "
        wrong += "lesson 05 has none of them; take --model gpt3"
    if wrong:
        raise ValueError(f"--dry-run {wrong}")


def what_differs(args, best: dict) -> str:
    """What the table has and lesson 05 does not: one sentence each, or ""."""
    sizes, _, options = asked(args)
    mesh = {name: best[name] for name in (*AXES, "micro_batch", "recompute")}
    layout = predict.make_layout(sizes, **mesh, **options)
    flash = predict.saved_bytes(layout, 0)
    scores = predict.saved_bytes(predict.changed(layout, attention="math"), 0)
    said = ""
    if flash != scores:
        core = "saves the scores"
        if best["recompute"] == "selective":
            core = "recomputes only its core"
        said = (
            f"Lesson 05 writes attention out and {core}; the table has FlashAttention. "
            f"Stage 0 saves {scores:,} bytes per micro-batch, with FlashAttention "
            f"{flash:,} (predicted). "
        )
    if best["light_ends"]:
        said += (
            "In the table the first and the last stage have one layer less than the "
            "others; lesson 05 gives the first stages one layer more."
        )
    return wrap(said)


def dry_run_of(args, best: dict) -> tuple[list[dict], bool]:
    """Its rows, and whether nothing is off."""
    import dry_run

    sizes, _, _ = asked(args)
    mesh = {name: best[name] for name in (*AXES, "micro_batch", "recompute")}
    layout = predict.make_layout(sizes, **mesh, zero=args.zero)
    return dry_run.show(layout, args.dry_run, what_differs(args, best))


def main(words=None) -> int:
    try:
        args = read_flags(words)
        start = time.perf_counter()
        fits, too_large, refused = find(args)
        if args.dry_run:
            refuse_dry_run(args, fits[0])
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        told = error
        if isinstance(error, OSError):
            told = f"--json {args.json}: {error.strerror}"
        print(wrap(f"error: {told}"), file=sys.stderr)
        return 2
    show(args, fits, too_large, refused, time.perf_counter() - start)
    data = {"asked": vars(args), "predicted": fits, "too large": too_large}
    data["refused"] = refused
    passed = True
    if args.dry_run:
        data["dry run"], passed = dry_run_of(args, fits[0])
    if args.json:
        args.json.write_text(json.dumps(data, indent=1, default=str))
    return 0 if passed else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `| head` expects
    sys.exit(main())
