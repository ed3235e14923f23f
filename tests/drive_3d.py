"""Ranks train lesson 05's model on meshes of every shape, beside the whole one.

    torchrun --nproc_per_node=8 drive_3d.py FOLDER

For 1, 2, 4 or 8 ranks: every layout of them, sizes and options at random, in float64
and float32.
Every rank trains the whole model alone on the whole batch, cuts out what it should hold
by the table CUTS, and compares that with what the lesson's stages have.
"""

import argparse
import copy
import math
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from drive_transformer import CUTS
from in_ranks import difference, finish, load, start, write_found

lesson = load("05_3d_parallel")
STEPS = 2
ROWS = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")


def layouts(ranks: int) -> list:
    """All (pp, dp, tp) whose product is the number of ranks."""
    parts = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        (pp, dp, ranks // (pp * dp)) for pp in parts for dp in parts
        if ranks % (pp * dp) == 0
    ]  # fmt: skip


def make(number: int, sizes: tuple) -> argparse.Namespace:
    """Sizes and options of a run, at random but the same on every rank."""
    rng = random.Random(f"3d {number} {sizes}")
    pp, dp, tp = sizes
    kv_heads = tp * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 2)
    M = rng.randint(1, 5)
    return argparse.Namespace(
        pp=pp, dp=dp, tp=tp, microbatches=M, schedule=("1f1b", "gpipe")[number % 2],
        ragged=number % 3 > 0, zero=number % 4 > 1, tie=number // 2 % 2 == 1,
        heads=heads, kv_heads=kv_heads, hidden=heads * 2 * rng.randint(4, 8),
        layers=pp + rng.randint(0, 2), batch_size=dp * M * rng.randint(2, 3),
        seq_len=rng.randint(5, 13), vocab_size=257, clip=(0.3, 1.0, 100.0)[number % 3],
        dropout=0.0, seed=number + 1, dtype="float64", device="cpu", timeout=60,
    )  # fmt: skip


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


def cut(whole, name: str, tp_group):
    """What this rank should hold of a tensor of the whole model."""
    T, r = tp_group.size(), tp_group.rank()
    if name in ROWS:
        rows = math.ceil(len(whole) / T)
        padded = torch.cat(
            [whole, whole.new_zeros(rows * T - len(whole), *whole.shape[1:])]
        )
        return padded[r * rows : (r + 1) * rows]
    dim = CUTS.get(".".join(name.split(".")[2:]))
    return whole if dim is None else whole.chunk(T, dim)[r]


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


def try_run(number: int, sizes: tuple, groups: dict, dtype: str) -> dict:
    """STEPS steps on a mesh, against the whole model."""
    args = make(number, sizes)
    args.dtype = dtype
    if dtype == "float32":  # in tiny models rounding alone is more than 1e-5
        args.kv_heads, args.seq_len = args.tp * math.ceil(4 / args.tp), 32
        args.heads, args.hidden = 2 * args.kv_heads, 16 * args.kv_heads
        parts = args.dp * args.microbatches
        args.batch_size = parts * math.ceil(16 / parts)
    full, batches = model_and_batches(args, STEPS)
    training = lesson.MeshTraining(full, groups, args)
    reference = copy.deepcopy(full)
    wanted = alone(reference, batches, args)
    diffs = {kind: [0.0, ""] for kind in ("loss", "norm", "gradients")}
    optimizer = training.optimizer
    for batch, (loss, norm, grads) in zip(batches, wanted):
        part = training.gradients(batch)
        for axis in ("pp", "dp"):
            dist.all_reduce(part, group=groups[axis])
        mine = optimizer.whole(optimizer.vector.grad)
        here = {
            "loss": [abs(part.item() - loss) / loss, ""],
            "gradients": worst(mine, grads, groups["tp"]),
            "norm": [abs(training.update() - norm) / norm, ""],
        }
        diffs = {kind: max(diffs[kind], here[kind]) for kind in diffs}
    whole = dict(reference.named_parameters())
    diffs["parameters"] = worst(training.parameters, whole, groups["tp"])
    return dict(
        args=vars(args), diffs=diffs, stage=groups["pp"].rank(),
        in_flight=most_in_flight(training.pipeline.events),
        parameters=sorted(training.parameters),
    )  # fmt: skip


def mesh_run(sizes: tuple, full, args):
    """The lesson's training of a model on a mesh of this shape."""
    for axis, size in zip(("pp", "dp", "tp"), sizes):
        setattr(args, axis, size)
    groups = lesson.make_mesh(dict(zip(("pp", "dp", "tp"), sizes)), 60)
    return lesson.MeshTraining(full, groups, args), groups


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
        # what a rank starts with must come from the checkpoint: so zeros
        empty = copy.deepcopy(full)
        if step:
            for p in empty.parameters():
                p.data.zero_()
        training, groups = mesh_run(sizes, empty, args)
        if step:
            lesson.load_checkpoint(folder / f"step_{step:06}", step, training)
        part = training.gradients(batches[step])
        for axis in ("pp", "dp"):
            dist.all_reduce(part, group=groups[axis])
        training.update()
        lesson.save_checkpoint(folder, step + 1, training, {"mesh": str(sizes)})
        loss = wanted[step][0]
        found.append([sizes, args.zero, abs(part.item() - loss) / loss])
    whole = dict(reference.named_parameters())
    return [found, worst(training.parameters, whole, groups["tp"])]


def main() -> dict:
    start(60)
    shapes = layouts(dist.get_world_size())
    found = dict(runs=[])
    for number, sizes in enumerate(shapes):
        groups = lesson.make_mesh(dict(zip(("pp", "dp", "tp"), sizes)), 60)
        for dtype in ("float64", "float32"):
            found["runs"].append(try_run(number, sizes, groups, dtype))
    if dist.get_world_size() == 8:
        found["checkpoints"] = try_checkpoints(Path(sys.argv[1], "checkpoints"))
    return found


if __name__ == "__main__":
    write_found(main())
    finish()
