"""`make plan`: before you book the GPUs: which dp × pp × tp, and a dry run of it.

Goes through every layout of lesson 05 that a model and a machine allow, with all
micro-batch sizes and with recomputation: how much a rank holds and sends at most, and a
time; the best first. Bytes sent and saved are those that lesson 05 counts.
The time is a roofline: arithmetic at the peak, then messages at the links' rates, then
the pipeline's bubble. It leaves out kernels below their peak, latency, late ranks, and
overlap. So it ranks layouts; it does not tell how long a step takes.

    python tools/plan.py --model llama-3-70b --machine dgx-h100 --gpus 512 --zero
    python tools/plan.py --layers 40 --hidden 5120 --heads 40 --gpus 64
    python tools/plan.py --model gpt-1008b --gpus 3072 --dp 6 --pp 64 --tp 8 --dry-run
    python tools/plan.py --model llama-3-8b --gpus 256 --seq-len 131072 --cp 8

A dry run is lesson 05 itself, its stage, schedule and counters, for one rank of each
stage, with tensors that have shapes but no values, and messages that no rank receives.

The formulas and their sources: tools/predict.py. The same in a page with sliders:
docs/_static/planner.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

from predict import (
    ATTENTION,
    AXES,
    BIASES,
    GB,
    MACHINE,
    MACHINES,
    MODELS,
    RECOMPUTE,
    SIZES,
    STYLE,
    ZERO,
    changed,
    lesson,
    make_layout,
    meshes,
    parameters,
    search,
    usable,
    why_not,
)  # fmt: skip


def read_flags(words=None) -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = lesson.Parser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--model", choices=MODELS, help="sizes of a known one; flags change them")
    add("--machine", choices=MACHINES, default="dgx-a100", help="(dgx-a100)")
    for name in (*SIZES, "gpus", "node"):
        add(f"--{name.replace('_', '-')}", type=lesson.positive)
    yes_or_no = argparse.BooleanOptionalAction
    add("--gated", action=yes_or_no, help="the MLP has three matrices: gate, up, down")
    add("--biases", choices=BIASES, help="which linears have one (all)")
    add("--tie", action=yes_or_no, help="embedding and head are one weight")
    add("--gpu-memory", type=above_zero, metavar="GB", help="of a GPU, such as 80")
    add("--reserve", type=share, help="share of it that stays free (0.1)")
    add("--gpu-flops", type=above_zero, help="its peak FLOP/s, such as 312e12")
    add("--inside", type=above_zero, help="bytes/s within a node, such as 300e9")
    add("--between", type=above_zero, help="bytes/s of a network card, such as 25e9")
    for name in AXES:
        add(f"--{name}", type=lesson.positive, help="only layouts with this size")
    add("--cp", type=lesson.positive, default=1, help="ranks that share each sequence, "
        "in a zigzag ring (1: none; context parallelism, beyond/11)")  # fmt: skip
    add("--micro-batch", type=lesson.positive, metavar="B", help="sequences in one")
    add("--recompute", choices=RECOMPUTE, help="only this")
    add("--attention", choices=ATTENTION, default="flash", help="(flash)")
    add("--zero", type=int, choices=ZERO, nargs="?", const=1, default=0,
        help="ZeRO's stage: shard AdamW's state over dp (1, also without a number), "
        "gradients (2), weights (3)")  # fmt: skip
    add("--top", type=lesson.positive, default=20, help="number of rows (20)")
    add("--json", type=Path, metavar="PATH", help="write all rows there")
    add("--dry-run", type=lesson.positive, nargs="?", const=2, metavar="M",
        help="try the best layout, M micro-batches per step (2)")  # fmt: skip
    return fill(parser.parse_args(words))


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
    default = dict(vocab_size=51200, seq_len=2048, batch_size=512, **STYLE)
    default.update(MODELS.get(args.model, {}))
    default.update(MACHINES[args.machine])
    for name in (*SIZES, *STYLE, *MACHINE):
        if getattr(args, name) is None:
            setattr(args, name, default.get(name))
    missing = [
        name for name in ("layers", "hidden", "heads") if not getattr(args, name)
    ]
    if missing:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ValueError(f"{flags}: how many? Or take --model gpt3")
    args.kv_heads = args.kv_heads or args.heads
    args.ffn = args.ffn or 4 * args.hidden
    mesh = [getattr(args, axis) for axis in AXES]
    args.gpus = args.gpus or (math.prod(mesh) * args.cp if all(mesh) else None)
    if not args.gpus:
        raise ValueError("--gpus: how many?")
    lesson.must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    lesson.must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    if args.cp > 1:
        lesson.must_divide(args, "seq_len", 2 * args.cp, "(2 · --cp: zigzag)")
        tp = args.tp or 1
        lesson.must_divide(args, "seq_len", args.cp * tp, "(--cp · --tp)")
    lesson.raise_refused(args)
    product = args.cp * math.prod(n or 1 for n in mesh)
    if args.gpus % product or (all(mesh) and product != args.gpus):
        text = " × ".join(f"--{x} {n}" for x, n in zip(AXES, mesh) if n)
        if args.cp > 1:
            text = f"{text} × --cp {args.cp}" if text else f"--cp {args.cp}"
        near = product if all(mesh) else max(1, args.gpus // product) * product
        raise ValueError(f"--gpus {args.gpus}, but {text}; take --gpus {near}")
    return args


def asked(args) -> tuple[dict, dict, dict]:
    """What the flags say: the model; what they fix of a layout; and options."""
    fixed = {}
    for name in (*AXES, "micro_batch", "recompute"):
        if getattr(args, name):
            fixed[name] = getattr(args, name)
    if args.cp > 1:
        fixed["cp"] = args.cp
    sizes = {name: getattr(args, name) for name in (*SIZES, *STYLE)}
    return sizes, fixed, {"zero": args.zero, "attention": args.attention}


def find(args) -> tuple[list, list, Counter]:
    """`search` with what the flags say; ValueError if there is nothing to show."""
    sizes, fixed, options = asked(args)
    fits, too_large, refused = search(sizes, args, fixed, **options)
    if fits:
        return fits, too_large, refused
    if too_large:
        least = min(too_large, key=lambda row: row["memory"])
        mesh = " × ".join(f"{axis} {least[axis]}" for axis in AXES)
        raise ValueError(
            f"none of {len(too_large)} layouts fits {usable(args) / GB:.1f} of "
            f"{args.gpu_memory:g} GB (--reserve {args.reserve:g}): the smallest, "
            f"{mesh}, would hold {least['memory'] / GB:.1f}; {what_fits(args)}"
        )
    for name in ("heads", "kv_heads", "ffn", "seq_len"):
        lesson.must_divide(args, name, args.tp or 1, "(--tp)")
    parts = (args.dp or 1) * (args.micro_batch or 1)
    lesson.must_divide(args, "batch_size", parts, "(--dp · --micro-batch)")
    lesson.raise_refused(args)
    for gpus in range(args.gpus, 0, -1):
        if any(not why_not(sizes, **mesh) for mesh in meshes(gpus, fixed)):
            break
    why = "; ".join(f"{reason} ({n})" for reason, n in refused.items())
    raise ValueError(f"--gpus {args.gpus}: {why}; take --gpus {gpus}")


def what_fits(args) -> str:
    """A flag with which some layout fits."""
    sizes, fixed, options = asked(args)
    for stage in range(args.zero + 1, max(ZERO) + 1):
        options["zero"] = stage
        if search(sizes, args, fixed, **options)[0]:
            return f"take --zero {stage}"
    options["zero"] = args.zero
    if all(axis in fixed for axis in AXES):
        fixed = {"cp": args.cp}
    for gpus in (args.gpus * 2**i for i in range(11)):
        machine = changed(args, gpus=gpus)
        if search(sizes, machine, fixed, **options)[0]:
            free = ", and no --dp, --pp, --tp" if args.tp and "tp" not in fixed else ""
            return f"take --gpus {gpus}{free}"
    return f"take --gpu-memory {2 * args.gpu_memory:g}, or a smaller model"


def gigabytes(kind: str, name: str):
    """How GB of a row are shown."""
    return lambda row: f"{row[kind][name] / GB:.1f}"


COLUMNS = [  # heading, width, value
    ("dp", 4, lambda row: row["dp"]),
    ("pp", 3, lambda row: row["pp"]),
    ("tp", 3, lambda row: row["tp"]),
    ("b", 3, lambda row: row["micro_batch"]),
    ("redo", 4, lambda row: row["recompute"].replace("selective", "core")),
    ("holds", 5, lambda row: f"{row['memory'] / GB:.1f}"),
    ("param", 5, gigabytes("bytes", "parameters")),
    ("grads", 5, gigabytes("bytes", "gradients")),
    ("AdamW", 5, gigabytes("bytes", "optimizer")),
    ("activ", 5, gigabytes("bytes", "activations")),
    ("via tp", 6, gigabytes("sent", "tp")),
    ("pp", 4, gigabytes("sent", "pp")),
    ("dp", 5, gigabytes("sent", "dp")),
    ("bubble", 6, lambda row: f"{row['bubble']:.2f}"),
    ("s/step", 6, lambda row: f"{row['seconds']:.2f}"),
    ("MFU", 4, lambda row: f"{row['mfu']:.0%}"),
]
VIA_CP = ("via cp", 6, gigabytes("sent", "cp"))  # instead of the bubble, with --cp
LEGEND = """\
All of this is predicted. b: sequences per micro-batch; redo: what is recomputed (the
core of attention, full layers). GB: what the fullest rank holds, and what a rank sends
per step along each axis, at most (in rings). bubble: waiting over computing. MFU: the
model's FLOPs over what the GPUs could compute in that time; recomputing is no work."""
LEGEND_OF_CP = """\
cp {cp}: each sequence is split over {cp} ranks, which pass keys and values around a
ring (beyond/11). Gradients are summed over the dp × cp ranks of each parameter."""
HOW_WRONG = """\
How wrong: on the ten layouts of arXiv:2104.04473, Table 1, the same formulas give an
MFU of 54 to 75 %; 33 to 39 % was measured. Times are 1.5 to 2.2 times too short, most
for the smallest model, so compare neighboring layouts only, and measure the best."""


def show(args, fits: list, too_large: list, refused: Counter, took: float) -> None:
    sizes, _, _ = asked(args)
    count = parameters(make_layout(sizes), 0)[0]
    layouts = f"{len(fits) + len(too_large)} layouts in {took:.1f} s, {len(fits)} fit"
    print(f"{count / 1e9:.4g} billion parameters on {args.gpus} GPUs: {layouts}.")
    free = f"{args.reserve:.0%} stay free (--reserve: CUDA, NCCL, fragmentation)"
    print(f"A rank may hold {usable(args) / GB:.1f} of {args.gpu_memory:g} GB: {free}.")
    print(LEGEND)
    columns = list(COLUMNS)
    if args.cp > 1:
        print(LEGEND_OF_CP.format(cp=args.cp))
        names = [name for name, _, _ in COLUMNS]
        columns[names.index("bubble")] = VIA_CP
    print(" ".join(f"{name:>{width}}" for name, width, _ in columns))
    for row in fits[: args.top]:
        print(" ".join(f"{value(row):>{width}}" for _, width, value in columns))
    if too_large:
        least = min(row["memory"] for row in too_large) / GB
        print(
            f"Too large: {len(too_large)} layouts hold more than "
            f"{usable(args) / GB:.1f} GB, {least:.1f} or more."
        )
    if refused:
        reasons = [f"{reason} ({n})" for reason, n in refused.most_common()]
        text = f"{sum(refused.values())} other meshes of {args.gpus} GPUs are refused: "
        print(lesson.wrap(text + "; ".join(reasons)))
    print(HOW_WRONG)


def refuse_dry_run(args, best: dict) -> None:
    """ValueError where lesson 05 has another model or another optimizer."""
    wrong = ""
    if best["tp"] > args.kv_heads:
        wrong = f"of tp {best['tp']}, but --kv-heads {args.kv_heads}: lesson 05 does "
        wrong += f"not replicate heads; take --tp {args.kv_heads}"
    elif args.cp > 1:
        wrong = f"of --cp {args.cp}: lesson 05 splits no sequence; take --cp 1"
    elif args.zero > 1:
        wrong = f"of --zero {args.zero}: lesson 05 shards the optimizer only; take "
        wrong += "--zero 1"
    elif args.ffn != 4 * args.hidden or args.gated or args.biases != "all":
        wrong = "of a gated MLP, another --ffn than 4 · hidden, or other --biases: "
        wrong += "lesson 05 has none of them; take --model gpt3"
    if wrong:
        raise ValueError(f"--dry-run {wrong}")


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
        print(lesson.wrap(f"error: {error}"), file=sys.stderr)
        return 2
    show(args, fits, too_large, refused, time.perf_counter() - start)
    sizes, _, options = asked(args)
    data = {"asked": {name: getattr(args, name) for name in (*sizes, *MACHINE)}}
    data.update({"predicted": fits, "too large": too_large, "refused": refused})
    passed = True
    if args.dry_run:
        import dry_run

        best = {name: fits[0][name] for name in (*AXES, "micro_batch", "recompute")}
        # Lesson 05 writes attention out; all else is the same.
        options["attention"] = "math"
        layout = make_layout(sizes, **best, **options)
        data["dry run"], passed = dry_run.show(layout, args.dry_run)
    if args.json:
        args.json.write_text(json.dumps(data, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
