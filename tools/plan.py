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
import time
from collections import Counter
from pathlib import Path

import predict
from predict import AXES, GB, MACHINE, RECOMPUTE, SIZES, ZERO, lesson, usable, why_not
from presets import BIASES, EXPERTS, MACHINES, MODELS, STYLE
from published import BANDS

# What the flags say of a layout besides its mesh.
OPTIONS = "zero attention virtual schedule loss grad_bytes imbalance overlap_dp".split()


MOST_TRIED = 500  # layouts, in the search for flags that are accepted
NEAR = 6  # values of each flag


def read_flags(words=None) -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = lesson.Parser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--model", choices=MODELS, help="sizes of a known one; flags change them")
    add("--machine", choices=MACHINES, default="dgx-a100", help="(dgx-a100)")
    for name in (*SIZES, *EXPERTS, "gpus", "node"):
        add(f"--{name.replace('_', '-')}", type=lesson.positive)
    yes_or_no = argparse.BooleanOptionalAction
    add("--gated", action=yes_or_no, help="the MLP has three matrices: gate, up, down")
    add("--biases", choices=BIASES, help="which linears have one (all)")
    add("--tie", action=yes_or_no, help="embedding and head are one weight")
    add("--qk-norm", action=yes_or_no, help="a norm of each query and key head")
    add("--gpu-memory", type=above_zero, metavar="GB", help="of a GPU, such as 80")
    add("--reserve", type=share, help="share of it that stays free (0.1)")
    add("--gpu-flops", type=above_zero, help="its peak FLOP/s, such as 312e12")
    add("--inside", type=above_zero, help="bytes/s within a node, such as 300e9")
    add("--between", type=above_zero, help="bytes/s of a network card, such as 25e9")
    add("--alpha-inside", type=above_zero, help="s per step of a ring in a node (2e-6)")
    add("--alpha-between", type=above_zero, help="s per step of another ring (1e-5)")
    add_layout_flags(add)
    add("--top", type=lesson.positive, default=20, help="number of rows (20)")
    add("--json", type=Path, metavar="PATH", help="write all rows there")
    add("--dry-run", type=lesson.positive, nargs="?", const=2, metavar="M",
        help="try the best layout, M micro-batches per step (2)")  # fmt: skip
    return fill(parser.parse_args(words))


def add_layout_flags(add) -> None:
    """What a layout must be, and what it may use."""
    for name in AXES:
        add(f"--{name}", type=lesson.positive, help="only layouts with this size")
    add("--cp", type=lesson.positive, help="ranks that share each sequence, in a ring "
        "(beyond/11); not given: tried for long sequences")  # fmt: skip
    add("--ep", type=lesson.positive, help="ranks that share the experts")
    add("--micro-batch", type=lesson.positive, metavar="B", help="sequences in one")
    add("--recompute", choices=RECOMPUTE, help="only this")
    add("--virtual", type=lesson.positive, default=1, metavar="V",
        help="chunks of layers per stage: interleaving (1)")  # fmt: skip
    add("--schedule", choices=predict.SCHEDULES, default="1f1b", help="(1f1b)")
    add("--attention", choices=predict.ATTENTION, default="flash", help="(flash)")
    add("--zero", type=int, choices=ZERO, nargs="?", const=1, default=0,
        help="ZeRO's stage: shard AdamW's state over dp (1, also without a number), "
        "gradients (2), weights (3)")  # fmt: skip
    add("--loss", choices=predict.LOSSES, default="plain", help="(plain: lesson 03's)")
    add("--grad-bytes", type=int, choices=(2, 4), default=2, help="bytes per gradient: "
        "4 if they are accumulated in float32 (2)")  # fmt: skip
    add("--mlp-saves", type=lesson.positive, help="tensors of its width that a gated "
        "MLP saves: 3 if SiLU is fused with the product, otherwise 4 (3)")  # fmt: skip
    add("--imbalance", type=at_least_one, default=1.0, help="tokens of the busiest "
        "experts over the mean (1)")  # fmt: skip
    add("--overlap-dp", action="store_true", help="dp's messages hide behind backward")


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
    lesson.raise_refused(args)
    if args.experts and not (args.top_k and args.expert_ffn):
        raise ValueError("--experts: give --top-k and --expert-ffn as well")
    if args.ep and args.ep > 1 and not args.experts:
        raise ValueError(f"--ep {args.ep}: there are no experts; take --ep 1")
    if args.top_k and not args.experts:
        raise ValueError(f"--top-k {args.top_k}: there are no experts; leave it out, "
                         "or give --experts and --expert-ffn as well")  # fmt: skip
    if args.top_k > args.experts:
        flags = f"--top-k {args.top_k}: there are {args.experts} experts"
        raise ValueError(f"{flags}; take --top-k {args.experts}")
    if args.virtual > 1 and args.schedule != "1f1b":
        raise ValueError(f"--virtual {args.virtual} with --schedule {args.schedule}: "
                         "only 1F1B is interleaved here; take --virtual 1")  # fmt: skip


def check_gpus(args) -> None:
    """ValueError if the mesh's sizes are no part of the GPUs."""
    mesh = {axis: getattr(args, axis) for axis in (*AXES, "cp")}
    given = {axis: n for axis, n in mesh.items() if n}
    complete = all(mesh[axis] for axis in AXES)
    product = math.prod(given.values())
    args.gpus = args.gpus or (product if complete else None)
    if not args.gpus:
        raise ValueError("--gpus: how many?")
    # With cp left open, a complete mesh may leave a factor to it.
    exact = complete and (mesh["cp"] or args.seq_len < 2 * predict.SHORTEST_IN_A_RING)
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
    if args.mlp_saves:
        options["mlp_saves"] = args.mlp_saves
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
        mesh = " × ".join(f"{axis} {least[axis]}" for axis in AXES)
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
    if not args.model or not why:
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
    return lambda row: f"{row['sent'].get(axis, 0) / GB:.1f}"


def held(*kinds: str):
    return lambda row: f"{sum(row['bytes'][kind] for kind in kinds) / GB:.1f}"


STATES = "parameters", "gradients", "optimizer", "unsharded"
COLUMNS = [  # heading, width, value
    ("dp", 4, lambda row: row["dp"]),
    ("pp", 3, lambda row: row["pp"]),
    ("tp", 3, lambda row: f"{row['tp']}{'*' * row['tp_leaves_node']}"),
    ("cp", 2, lambda row: row["cp"]),
    ("ep", 3, lambda row: row["ep"]),
    ("b", 2, lambda row: row["micro_batch"]),
    ("redo", 4, lambda row: row["recompute"].replace("selective", "some")),
    ("peak", 5, lambda row: f"{row['memory'] / GB:.1f}"),
    ("state", 5, held(*STATES)),
    ("activ", 5, held("activations")),
    ("loss", 4, held("loss")),
    ("via tp", 6, sent("tp")),
    ("pp", 4, sent("pp")),
    ("dp", 5, sent("dp")),
    ("cp", 4, sent("cp")),
    ("ep", 5, sent("ep")),
    ("bubble", 6, lambda row: f"{row['bubble']:.2f}"),
    ("s/step", 6, lambda row: f"{row['seconds']:.2f}"),
    ("MFU", 4, lambda row: f"{row['mfu']:.0%}"),
]
LEGEND = """\
All of this is predicted. b: sequences per micro-batch; redo: what is recomputed (some:
what is cheap; full layers). GB: what the fullest rank holds at the peak (its state:
weights, gradients, AdamW; activations; the loss, for a moment), and what a rank sends
per step along each axis, at most (in rings). bubble: waiting over computing. MFU: the
model's FLOPs over what the GPUs could compute in that time; recomputing is no work.
Attention is charged for all S × S scores: a causal kernel computes about half of them,
so where S is long, a run may be faster than predicted."""
LEAVES = "*: the tp group spans nodes, and waits for the network ten times per layer."
CP = """\
cp: ranks that share each sequence and pass keys and values around a ring (beyond/11).
Gradients are summed over the dp × cp ranks of each parameter."""
EP = """\
ep: ranks that share the experts, {experts} per layer, {top_k} per token; rows travel to
them and back. They are ranks of dp, cp and tp. No published run with experts is among
those below."""


def how_wrong() -> str:
    bands = [f"{kind}: {low} to {high}" for kind, (low, high) in BANDS.items()]
    first = "How wrong: published runs took longer than predicted, times these: "
    last = ". So compare neighboring layouts only, and measure the best."
    return lesson.wrap(first + "; ".join(bands) + last)


def columns_of(args, rows: list) -> list:
    """cp and ep only if a row has them; then the bubble makes room."""
    hidden = set()
    if all(row["cp"] == 1 for row in rows):
        hidden.add("cp")
    if not args.experts:
        hidden.add("ep")
    if len(hidden) < 2:
        hidden.add("bubble")
    return [column for column in COLUMNS if column[0] not in hidden]


def show(args, fits: list, too_large: list, refused: Counter, took: float) -> None:
    sizes, _, _ = asked(args)
    count = predict.parameters(predict.make_layout(sizes), 0)[0]
    layouts = f"{len(fits) + len(too_large)} layouts in {took:.1f} s, {len(fits)} fit"
    print(f"{count / 1e9:.4g} billion parameters on {args.gpus} GPUs: {layouts}.")
    free = f"{args.reserve:.0%} stay free (--reserve: CUDA, NCCL, fragmentation)"
    print(f"A rank may hold {usable(args) / GB:.1f} of {args.gpu_memory:g} GB: {free}.")
    print(LEGEND)
    rows = fits[: args.top]
    columns = columns_of(args, rows)
    if any(row["tp_leaves_node"] for row in rows):
        print(LEAVES)
    if any(row["cp"] > 1 for row in rows):
        print(CP)
    if args.experts:
        print(EP.format(experts=args.experts, top_k=args.top_k))
    print(" ".join(f"{name:>{width}}" for name, width, _ in columns))
    for row in rows:
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
    print(how_wrong())


def refuse_dry_run(args, best: dict) -> None:
    """ValueError where lesson 05 has another model or another optimizer."""
    wrong = ""
    if best["tp"] > args.kv_heads:
        wrong = f"of tp {best['tp']}, but --kv-heads {args.kv_heads}: lesson 05 does "
        wrong += f"not replicate heads; take --tp {args.kv_heads}"
    elif best["cp"] > 1:
        wrong = f"of --cp {best['cp']}: lesson 05 splits no sequence; take --cp 1"
    elif args.zero > 1:
        wrong = f"of --zero {args.zero}: lesson 05 shards the optimizer only; take "
        wrong += "--zero 1"
    elif best["virtual"] > 1:
        wrong = f"of --virtual {args.virtual}: lesson 05 does not interleave; take "
        wrong += "--virtual 1"
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
    sizes, _, _ = asked(args)
    data = {"asked": {name: getattr(args, name) for name in (*sizes, *MACHINE)}}
    data.update({"predicted": fits, "too large": too_large, "refused": refused})
    passed = True
    if args.dry_run:
        import dry_run

        best = {name: fits[0][name] for name in (*AXES, "micro_batch", "recompute")}
        # Lesson 05 writes attention out, and has one loss; all else is the same.
        layout = predict.make_layout(sizes, **best, zero=args.zero)
        data["dry run"], passed = dry_run.show(layout, args.dry_run)
    if args.json:
        args.json.write_text(json.dumps(data, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `| head` expects
    sys.exit(main())
