"""`make plan`: before you book the GPUs: which dp × pp × tp, and a dry run of it.

Every layout of lesson 05 that a model and a machine allow, with micro-batch sizes and
what is recomputed: the most that a rank holds and sends, a time; the best first.
Bytes sent and kept are those that lesson 05 counts. The time is a roofline: arithmetic
at the peak, then messages at the links' rates, then the pipeline's bubble. No overlap,
no kernel below its peak, no rank that is late: it ranks layouts, it promises nothing.
The model is lesson 05's: no learned positions, an MLP of two matrices.

    python tools/plan.py --model gpt3 --machine dgx-a100 --gpus 1024
    python tools/plan.py --layers 40 --hidden 5120 --heads 40 --gpus 64
    python tools/plan.py --model gpt-1008b --gpus 3072 --dp 6 --pp 64 --tp 8 --dry-run

A dry run is lesson 05 itself, its stage, schedule and counters, for one rank of each
stage, with tensors that have shapes and no numbers, and messages that go nowhere.

The formulas and their sources: tools/predict.py.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

from predict import (
    AXES,
    GB,
    MACHINE,
    MACHINES,
    MODELS,
    RECOMPUTE,
    SIZES,
    lesson,
    make_layout,
    meshes,
    parameters,
    search,
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
    add("--gpu-memory", type=above_zero, metavar="GB", help="of a GPU, as 80")
    add("--gpu-flops", type=above_zero, help="its peak FLOP/s, as 312e12")
    add("--inside", type=above_zero, help="bytes/s to a GPU of the same node, as 300e9")
    add("--between", type=above_zero, help="bytes/s to another node, as 25e9")
    for name in AXES:
        add(f"--{name}", type=lesson.positive, help="only layouts with so many")
    add("--micro-batch", type=lesson.positive, metavar="B", help="sequences in one")
    add("--recompute", choices=RECOMPUTE, help="only this")
    add("--zero", action="store_true", help="AdamW's state is cut over dp, too")
    add("--tie", action="store_true", help="embedding and head are one weight")
    add("--top", type=lesson.positive, default=20, help="so many rows (20)")
    add("--json", type=Path, metavar="PATH", help="write all rows there")
    add("--dry-run", type=lesson.positive, nargs="?", const=2, metavar="M",
        help="try the best layout, M micro-batches of a step (2)")  # fmt: skip
    return fill(parser.parse_args(words))


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def fill(args) -> argparse.Namespace:
    """What is not given comes from the model, the machine, or the rest."""
    known = MODELS.get(args.model, {})
    usual = dict(vocab_size=51200, seq_len=2048, batch_size=512)
    usual |= known | MACHINES[args.machine]
    for name in (*SIZES, *MACHINE):
        if getattr(args, name) is None:
            setattr(args, name, usual.get(name))
    args.kv_heads = args.kv_heads or args.heads
    missing = [
        name for name in ("layers", "hidden", "heads") if not getattr(args, name)
    ]
    if missing:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ValueError(f"{flags}: how many? Or take --model gpt3")
    mesh = [getattr(args, axis) for axis in AXES]
    args.gpus = args.gpus or (math.prod(mesh) if all(mesh) else None)
    if not args.gpus:
        raise ValueError("--gpus: how many?")
    lesson.must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    lesson.must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    product = math.prod(n or 1 for n in mesh)
    if args.gpus % product or (all(mesh) and product != args.gpus):
        text = " × ".join(f"--{x} {n}" for x, n in zip(AXES, mesh) if n)
        near = product if all(mesh) else max(1, args.gpus // product) * product
        raise ValueError(f"--gpus {args.gpus}, but {text}; take --gpus {near}")
    return args


def asked(args) -> tuple[dict, dict, dict]:
    """What the flags say: sizes; what they fix of a layout; and options."""
    names = *AXES, "micro_batch", "recompute"
    fixed = {name: getattr(args, name) for name in names if getattr(args, name)}
    sizes = {name: getattr(args, name) for name in SIZES}
    return sizes, fixed, dict(zero=args.zero, tie=args.tie)


def find(args) -> tuple[list, list, Counter]:
    """`search` with what the flags say; ValueError if there is nothing to show."""
    sizes, fixed, options = asked(args)
    fits, full, fell = search(sizes, args, fixed, **options)
    if fits:
        return fits, full, fell
    if full:
        least = min(full, key=lambda row: row["memory"])
        mesh = " × ".join(f"{axis} {least[axis]}" for axis in AXES)
        raise ValueError(
            f"none of {len(full)} layouts fits {args.gpu_memory:g} GB: the smallest, "
            f"{mesh}, would hold {least['memory'] / GB:.1f}; {what_fits(args)}"
        )
    for name in ("heads", "kv_heads", "seq_len"):
        lesson.must_divide(args, name, args.tp or 1, "(--tp)")
    parts = (args.dp or 1) * (args.micro_batch or 1)
    lesson.must_divide(args, "batch_size", parts, "(--dp · --micro-batch)")
    for gpus in range(args.gpus, 0, -1):
        if any(not why_not(sizes, **mesh) for mesh in meshes(gpus, fixed)):
            break
    why = "; ".join(f"{reason} ({n})" for reason, n in fell.items())
    raise ValueError(f"--gpus {args.gpus}: {why}; take --gpus {gpus}")


def what_fits(args) -> str:
    """A flag with which some layout fits."""
    sizes, fixed, options = asked(args)
    if not args.zero and search(sizes, args, fixed, **options | {"zero": True})[0]:
        return "take --zero"
    if all(axis in fixed for axis in AXES):
        fixed = {}
    for gpus in (args.gpus * 2**i for i in range(11)):
        machine = argparse.Namespace(**vars(args) | {"gpus": gpus})
        if search(sizes, machine, fixed, **options)[0]:
            free = "" if fixed else ", and no --dp, --pp, --tp" * bool(args.tp)
            return f"take --gpus {gpus}{free}"
    return f"take --gpu-memory {2 * args.gpu_memory:g}, or a smaller model"


def size(of: str, name: str):
    """How a row's GB are shown."""
    return lambda row: f"{row[of][name] / GB:.1f}"


COLUMNS = [  # heading, width, value
    ("dp", 4, lambda row: row["dp"]),
    ("pp", 3, lambda row: row["pp"]),
    ("tp", 3, lambda row: row["tp"]),
    ("b", 3, lambda row: row["micro_batch"]),
    ("redo", 4, lambda row: row["recompute"].replace("selective", "core")),
    ("holds", 5, lambda row: f"{row['memory'] / GB:.1f}"),
    ("param", 5, size("bytes", "parameters")),
    ("grads", 5, size("bytes", "gradients")),
    ("AdamW", 5, size("bytes", "optimizer")),
    ("activ", 5, size("bytes", "activations")),
    ("via tp", 6, size("sent", "tp")),
    ("pp", 4, size("sent", "pp")),
    ("dp", 5, size("sent", "dp")),
    ("bubble", 6, lambda row: f"{row['bubble']:.2f}"),
    ("s/step", 6, lambda row: f"{row['seconds']:.2f}"),
    ("peak", 4, lambda row: f"{row['share']:.0%}"),
]


def show(args, fits: list, full: list, fell: Counter, took: float) -> None:
    sizes, _, _ = asked(args)
    numbers = parameters(make_layout(sizes, tie=args.tie), 0)[0]
    count = f"{len(fits) + len(full)} layouts in {took:.1f} s, {len(fits)} fit"
    print(
        f"{numbers / 1e9:.1f} billion parameters on {args.gpus} GPUs: {count}.\n"
        "All of this is predicted. b: sequences of a micro-batch; redo: recomputed:\n"
        "attention's core, or layers; GB that the fullest rank holds, and the most a\n"
        "rank sends in a step via each axis (in a ring); bubble: waiting/computing;\n"
        "peak: the model's arithmetic over what the GPUs could do in that time."
    )
    print(" ".join(f"{name:>{width}}" for name, width, _ in COLUMNS))
    for row in fits[: args.top]:
        print(" ".join(f"{value(row):>{width}}" for _, width, value in COLUMNS))
    if full:
        least = min(row["memory"] for row in full) / GB
        print(
            f"Too large: {len(full)} layouts hold more than {args.gpu_memory:g} GB, "
            f"{least:.1f} or more."
        )
    if fell:
        ways = [f"{reason} ({n})" for reason, n in fell.most_common()]
        text = f"dp · pp · tp = {args.gpus} in {sum(fell.values())} ways more, but: "
        print(lesson.wrap(text + "; ".join(ways)))


def main(words=None) -> int:
    try:
        args = read_flags(words)
        start = time.perf_counter()
        fits, full, fell = find(args)
        if args.dry_run and fits[0]["tp"] > args.kv_heads:
            text = f"--dry-run of tp {fits[0]['tp']}, but --kv-heads {args.kv_heads}: "
            raise ValueError(
                f"{text}lesson 05 shares no heads; take --tp {args.kv_heads}"
            )
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        print(lesson.wrap(f"error: {error}"), file=sys.stderr)
        return 2
    show(args, fits, full, fell, time.perf_counter() - start)
    sizes, _, options = asked(args)
    data = {"asked": {name: getattr(args, name) for name in (*sizes, *MACHINE)}}
    data |= {"predicted": fits, "too large": full, "fell": fell}
    good = True
    if args.dry_run:
        import dry_run

        best = {name: fits[0][name] for name in (*AXES, "micro_batch", "recompute")}
        layout = make_layout(sizes, **best, **options)
        data["dry run"], good = dry_run.show(layout, args.dry_run)
    if args.json:
        args.json.write_text(json.dumps(data, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
