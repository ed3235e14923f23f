"""Ranks train lesson 05's model on meshes of every shape, next to the whole one.

    torchrun --nproc_per_node=8 drive_3d.py FOLDER

Every layout of 2 or 6 ranks, and those of 8 that have more axes than one of 6: one mesh
after another in the same processes; sizes and options at random; float64. Every rank
also trains the full model on the full batch in one process, and compares that with what
all ranks of the mesh hold together.
"""

import argparse
import copy
import math
import random
from itertools import product

import torch.distributed as dist
from in_ranks import load, run
from torch.utils._python_dispatch import _disable_current_modes

schedules = load("14_schedules")
flat_adamw = load("flat_adamw")
tied_stages = load("tied_stages")
lesson = load("course").lesson05
STEPS = 2
ON_8 = [(2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 2, 2)]  # the second has other options


def layouts(ranks: int) -> list:
    """All (pp, dp, tp) whose product is the number of ranks; of 8 ranks, ON_8."""
    if ranks == 8:
        return ON_8
    every = product(range(1, ranks + 1), repeat=3)
    return [sizes for sizes in every if math.prod(sizes) == ranks]


def make(number: int, sizes: tuple) -> argparse.Namespace:
    """Sizes and options of a run, at random but the same on every rank."""
    rng = random.Random(f"3d {number} {sizes}")
    pp, dp, tp = sizes
    kv_heads = tp * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 2)
    M = rng.randint(1, 3)
    return argparse.Namespace(
        pp=pp, dp=dp, tp=tp, microbatches=M, schedule=("1f1b", "gpipe")[number % 2],
        ragged=number % 3 > 0, zero=number % 4 > 1, tie=number % 4 in (1, 2),
        heads=heads, kv_heads=kv_heads, hidden=heads * 2 * rng.randint(2, 4),
        layers=pp + rng.randint(0, 2), batch_size=dp * M * rng.randint(2, 3),
        seq_len=rng.randint(5, 13), vocab_size=257, clip=(0.3, 1.0, 100.0)[number % 3],
        dropout=0.0, seed=number + 1, dtype="float64", device="cpu", timeout=60,
        ranks=math.prod(sizes),
    )  # fmt: skip


def counted(training) -> dict:
    """What a rank held, saved and sent in the last step, for test_plan.py."""
    events = training.pipeline.events
    sent = []
    for call, payloads in lesson.METER.calls.items():
        sent.append([*call, len(payloads), sum(payloads)])
    return dict(
        parameters=sum(p.numel() for p in training.parameters.values()),
        saved=sorted({e["bytes"] for e in events if e["what"] == "forward"}),
        in_flight=training.pipeline.held.peak_passes,
        left=training.pipeline.held.now,
        sent=sent,
    )


class ShardedMoments(flat_adamw.FlatTraining):
    """p.grad as lesson 05's own training has it after its sums, for comparison."""

    def sum_gradients(self) -> None:
        super().sum_gradients()
        for p in self.parameters.values():
            p.grad = None  # a tied weight's copy stays without
        optimizer = self.optimizer
        with _disable_current_modes():  # METER does not count this one
            grads = optimizer.unflatten(optimizer.vector.grad)
        for name, grad in grads.items():
            self.parameters[name].grad = grad.clone()


def try_run(number: int, sizes: tuple, groups: dict) -> dict:
    """STEPS steps on a mesh, against the full model."""
    args = make(number, sizes)
    batches = []
    for tokens, target in lesson.make_batches(lesson.__doc__, args, STEPS):
        batches.append(lesson.pad_batch(tokens, target, args.tp))
    args.seq_len = batches[0][0].shape[1]
    full = tied_stages.lesson03.make_tied(args)
    alone = lesson.train_transformer("alone", copy.deepcopy(full), batches, args)
    kind = tied_stages.TiedTraining if args.tie else lesson.MeshTraining
    if args.zero:  # what beyond/10_checkpoints.py trains with
        kind = ShardedMoments
    training = kind(full, groups, args)
    schedules.add_meters(training, schedules.MeasuredPipeline)
    phase = lesson.METER.phase("mesh", "update")
    training.optimizer.step = phase(training.optimizer.step)  # ZeRO gathers there
    if args.tie or args.zero:
        training.renew_copy = phase(training.renew_copy)
    mesh = lesson.train_on_mesh(training, batches)
    diffs = {}
    for kind in ("losses", "norms", "gradients", "parameters"):
        expected = getattr(alone, kind)
        got = getattr(mesh, kind)
        assert got.keys() == expected.keys(), (kind, vars(args))
        off = [[lesson.rel_diff(got[name], x), name] for name, x in expected.items()]
        diffs[kind] = max(off)
    stage = groups["pp"].rank()
    return dict(args=vars(args), diffs=diffs, stage=stage, counted=counted(training))


def main() -> dict:
    runs = []
    for number, sizes in enumerate(layouts(dist.get_world_size())):
        mesh = dict(zip(lesson.AXES, sizes))
        groups = lesson.make_mesh(mesh, 60)
        groups["embedding"] = tied_stages.embedding_group(mesh, 60)
        assert None not in groups.values(), "every rank is in a group of each kind"
        runs.append(try_run(number, sizes, groups))
    return dict(runs=runs)


if __name__ == "__main__":
    run(main, 60)
