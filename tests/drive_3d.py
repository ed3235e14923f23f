"""Ranks train lesson 05's model on meshes of every shape, beside the whole one.

    torchrun --nproc_per_node=8 drive_3d.py FOLDER

For 2, 4, 6 or 8 ranks: every layout of them, sizes and options at random, in float64
and float32.
Every rank trains the whole model alone on the whole batch, cuts out what it should
hold, and compares that with what the lesson's stages have.
"""

import argparse
import copy
import math
import random
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_ranks import cut, difference, load, run

lesson = load("05_3d_parallel")
AXES, STEPS = ("pp", "dp", "tp"), 2


def layouts(ranks: int) -> list:
    """All (pp, dp, tp) whose product is the number of ranks."""
    parts = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [sizes for sizes in product(parts, repeat=3) if math.prod(sizes) == ranks]


def mesh_of(sizes: tuple) -> dict:
    return lesson.make_mesh(dict(zip(AXES, sizes)), 60)


def make(number: int, sizes: tuple, dtype: str = "float64") -> argparse.Namespace:
    """Sizes and options of a run, at random but the same on every rank."""
    rng = random.Random(f"3d {number} {sizes}")
    pp, dp, tp = sizes
    kv_heads = tp * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 2)
    M = rng.randint(1, 5)
    args = argparse.Namespace(
        pp=pp, dp=dp, tp=tp, microbatches=M, schedule=("1f1b", "gpipe")[number % 2],
        ragged=number % 3 > 0, zero=number % 4 > 1, tie=number // 2 % 2 == 1,
        heads=heads, kv_heads=kv_heads, hidden=heads * 2 * rng.randint(4, 8),
        layers=pp + rng.randint(0, 2), batch_size=dp * M * rng.randint(2, 3),
        seq_len=rng.randint(5, 13), vocab_size=257, clip=(0.3, 1.0, 100.0)[number % 3],
        dropout=0.0, seed=number + 1, dtype=dtype, device="cpu", timeout=60,
    )  # fmt: skip
    if dtype == "float32":  # in tiny models rounding alone is more than 1e-5
        args.kv_heads, args.seq_len = tp * math.ceil(4 / tp), 32
        args.heads, args.hidden = 2 * args.kv_heads, 16 * args.kv_heads
        args.batch_size = dp * M * math.ceil(16 / (dp * M))
    return args


def model_and_batches(args, steps: int) -> tuple:
    """The whole model, and batches whose length T divides, as the lesson makes them."""
    batches = lesson.make_batches(lesson.__doc__, args, steps)
    batches = [lesson.pad_batch(*batch, args.tp) for batch in batches]
    args.asked, args.seq_len = args.seq_len, batches[0][0].shape[1]
    return lesson.make_tied(args), batches


def alone(full, batches, args) -> list:
    """Plain PyTorch on whole batches: (loss, norm, gradients) of every step."""
    found, seen = [], list(full.parameters())
    optimizer = torch.optim.AdamW(seen, lr=1e-3, eps=1e-4)
    for tokens, target in batches:
        logits = full(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        grads = {name: p.grad.clone() for name, p in full.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(seen, args.clip).item()
        found.append((loss.item(), norm, grads))
        optimizer.step()
        optimizer.zero_grad()
    return found


def worst(mine: dict, whole: dict, tp_group) -> list:
    """[largest difference, name] over this rank's tensors."""
    found = [[0.0, ""]]
    for name, x in mine.items():
        found.append([difference(x, cut(whole[name], name, tp_group)), name])
    return max(found)


def most_in_flight(events: list) -> int:
    """Micro-batches whose forward a stage had done, and not yet their backward."""
    held = [0]
    for event in events:
        held.append(held[-1] + (1 if event["what"] == "forward" else -1))
    return max(held)


def whole_loss(training, batch) -> float:
    """Forward and backward on the mesh; the batch's loss, of which ranks have parts."""
    part = training.gradients(batch)
    for axis in ("pp", "dp"):
        dist.all_reduce(part, group=training.groups[axis])
    return part.item()


def try_run(number: int, sizes: tuple, groups: dict, dtype: str) -> dict:
    """STEPS steps on a mesh, against the whole model."""
    args = make(number, sizes, dtype)
    full, batches = model_and_batches(args, STEPS)
    training = lesson.MeshTraining(full, groups, args)
    optimizer, tp_group = training.optimizer, groups["tp"]
    reference = copy.deepcopy(full)
    diffs = {}
    for batch, (loss, norm, grads) in zip(batches, alone(reference, batches, args)):
        off_loss = abs(whole_loss(training, batch) - loss) / loss
        mine = optimizer.whole(optimizer.vector.grad)
        here = {
            "loss": [off_loss, ""],
            "gradients": worst(mine, grads, tp_group),
            "norm": [abs(training.update() - norm) / norm, ""],
        }
        diffs = {kind: max(diffs.get(kind, here[kind]), here[kind]) for kind in here}
    whole = dict(reference.named_parameters())
    diffs["parameters"] = worst(training.parameters, whole, tp_group)
    return dict(
        args=vars(args), diffs=diffs, stage=training.pipeline.rank,
        in_flight=most_in_flight(training.pipeline.events),
        parameters=sorted(training.parameters),
    )  # fmt: skip


def try_checkpoints(folder: Path) -> list:
    """Steps of training, each on another mesh, from checkpoint to checkpoint."""
    args = make(3, (2, 2, 2))
    vars(args).update(
        heads=4, kv_heads=2, hidden=16, layers=5, batch_size=16, seq_len=9,
        microbatches=2, tie=True, ragged=False, clip=1.0,
    )  # fmt: skip
    shapes = [((2, 2, 2), False), ((1, 4, 2), True), ((4, 2, 1), False)]
    full, batches = model_and_batches(args, len(shapes))
    reference = copy.deepcopy(full)
    wanted, found = alone(reference, batches, args), []
    for step, (sizes, args.zero) in enumerate(shapes):
        given = copy.deepcopy(full)
        if step:  # what a rank starts with must come from the checkpoint: so zeros
            for p in given.parameters():
                p.data.zero_()
        args.pp, args.dp, args.tp = sizes
        training = lesson.MeshTraining(given, mesh_of(sizes), args)
        if step:
            lesson.load_checkpoint(folder / f"step_{step:06}", step, training)
        loss = wanted[step][0]
        off = abs(whole_loss(training, batches[step]) - loss) / loss
        found.append([sizes, args.zero, off])
        training.update()
        lesson.save_checkpoint(folder, step + 1, training, {"mesh": str(sizes)})
    whole = dict(reference.named_parameters())
    return [found, worst(training.parameters, whole, training.groups["tp"])]


def main() -> dict:
    ranks, runs = dist.get_world_size(), []
    for number, sizes in enumerate(layouts(ranks)):
        groups = mesh_of(sizes)
        for dtype in ("float64", "float32"):
            runs.append(try_run(number, sizes, groups, dtype))
    if ranks < 8:
        return dict(runs=runs)
    folder = Path(sys.argv[1], "checkpoints")
    return dict(runs=runs, checkpoints=try_checkpoints(folder))


if __name__ == "__main__":
    run(main, 60)
