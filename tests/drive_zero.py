"""Ranks train 15's model in shards on meshes of every shape, next to the whole one.

    torchrun --nproc_per_node=8 drive_zero.py FOLDER

Eight ranks as nodes (replicate) × ranks of a node (shard) × TP, in half of all ways;
each kind of unit; sizes, micro-batches and schedules at random; float64. Every rank
also trains the full model on the full batch in one process.
"""

import argparse
import copy
import math
import random
from functools import partial

import torch.distributed as dist
from in_ranks import load, run

lesson = load("15_zero")
lesson00, lesson02 = lesson.lesson00, lesson.lesson02
STEPS = 2
LAYOUTS = [(1, 8, 1), (2, 2, 2), (4, 1, 2), (2, 4, 1), (1, 2, 4)]
KINDS = {
    "ZeRO-1": lesson.ShardedStates,
    "ZeRO-2": lesson.ShardedGradients,
    "ZeRO-3": lesson.ShardedParameters,
    "kept": partial(lesson.ShardedParameters, keep=True),
}


def make(number: int, sizes: tuple) -> argparse.Namespace:
    """Sizes and options of a run, at random but the same on every rank."""
    rng = random.Random(f"zero {number} {sizes}")
    replicate, shard, tp = sizes
    kv_heads = tp * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 2)
    M = 1 + number % 3
    return argparse.Namespace(
        dp=replicate * shard, tp=tp, microbatches=M, stages=rng.randint(1, 3),
        heads=heads, kv_heads=kv_heads, hidden=heads * 2 * rng.randint(2, 3),
        layers=rng.randint(1, 2), batch_size=replicate * shard * M * rng.randint(1, 2),
        seq_len=rng.randint(5, 13), vocab_size=257, clip=(0.05, 0.3, 100.0)[number % 3],
        dropout=0.0, seed=number + 1, dtype="float64", device="cpu", timeout=60,
        ranks=math.prod(sizes), steps=STEPS, bf16=False,
    )  # fmt: skip


def try_layout(number: int, sizes: tuple) -> list[dict]:
    """STEPS steps by each kind of unit, against the full model."""
    args = make(number, sizes)
    mesh = lesson00.mesh_groups(dict(zip(("replicate", "shard", "tp"), sizes)), 60)
    data = {"data": args.dp, "other": args.tp}
    mesh["data"] = lesson00.mesh_groups(data, 60)["data"]
    batches = lesson02.make_batches(lesson.__doc__, args, STEPS)
    full = lesson02.make_transformer(args)
    alone = lesson02.train_transformer("alone", copy.deepcopy(full), batches, args)
    found = []
    for name, kind in KINDS.items():
        lesson.METER.calls.clear()
        training = lesson.make_training(name, full, kind, mesh, args)
        got = lesson.train(training, batches)
        diffs = {}
        for what in ("losses", "norms", "gradients", "parameters"):
            expected, values = getattr(alone, what), getattr(got, what)
            assert expected.keys() == values.keys(), (what, vars(args))
            off = [[lesson00.rel_diff(values[x], y), x] for x, y in expected.items()]
            diffs[what] = max(off)
        units = [sum(p.numel() for p in unit.parameters) for unit in training.units]
        counted = lesson.METER.calls.items()
        sent = [[*call, len(payloads), sum(payloads)] for call, payloads in counted]
        found.append(dict(
            args=vars(args), sizes=sizes, kind=name, diffs=diffs, units=units,
            held=lesson.bytes_held(training), sent=sent,
            weights=[weights_of(unit).sum().item() for unit in training.units],
            freed=[unit.flat.untyped_storage().nbytes() for unit in training.units],
        ))  # fmt: skip
    return found


def weights_of(unit):
    """How the elements of this rank's shard count in a norm."""
    weights = lesson.norm_weights(unit.parameters, unit.groups["tp"])
    return unit.slice_of(lesson.flatten(weights, unit.parts))


def main() -> dict:
    runs = []
    assert dist.get_world_size() == 8
    for number, sizes in enumerate(LAYOUTS):
        runs += try_layout(number, sizes)
    return dict(runs=runs)


if __name__ == "__main__":
    run(main, 60)
