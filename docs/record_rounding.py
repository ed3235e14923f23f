"""Record what rounding does to losses and gradients under TP, and what bugs do.

    python docs/record_rounding.py

It writes docs/rounding.json, which docs/rounding.py draws. One layer of lesson 04's
model is trained on TEXT: without TP, with TP and SP on 1, 2, 4 and 8 ranks, and
with three bugs of bugs/, in float64, float32 and bfloat16. In bfloat16 AdamW has the
weights in float32, as in most training runs, and the logits are cast to float32 before
the loss.

Three differences are recorded, all of them relative. Those of a gradient are the
largest of any parameter: max|a - b| / max|reference|.

loss       of the losses of one step, with TP and without; the largest up to this step
gradient   of the gradients of one step, although the weights differ by then
same       of the gradients that both models have with the same weights: those that the
           run without TP has before this step

norm is the relative difference of the gradient's norm at one step, before clipping.

The yardstick is a fourth one, and needs no TP: the gradient without TP in this dtype,
and that of the same weights in float64.
"""

import argparse
import copy
import json
import os
import runpy
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LESSON = ROOT / "04_sequence_parallel.py"
RECORDING = DOCS / "rounding.json"
DTYPES = ("float64", "float32", "bfloat16")
MARKS = (1, 10, 100, 1000)  # steps at which gradients are compared
# Steps up to which the largest difference of a loss is recorded.
CURVE = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100, 140, 200, 300, 500, 700, 1000)
# Name in the recording → the lesson under which bugs/ has it, and its name there.
BUGS = {"norms": ("04", "norms"), "spare": ("03", "spare"), "clip": ("02", "clip")}
RIGHT = "right"
# (ranks, runs, steps): what is recorded, in each dtype. On one rank no bug shows: there
# is nothing to sum, and no column is spare.
PLAN = (
    (1, [RIGHT], 1000),
    (2, [RIGHT], 1000),
    (2, [*BUGS], 100),
    (4, [RIGHT], 100),
    (4, [*BUGS], 10),
    (8, [RIGHT, *BUGS], 10),
)
SIZES = dict(
    vocab_size=257, hidden=64, heads=8, kv_heads=8, layers=1, seq_len=32, dropout=0.1,
    batch_size=4, clip=1.0, seed=0, device="cpu", tie=False,
)  # fmt: skip

# What the model learns. Every number of the recording depends on it.
TEXT = """
Floating-point numbers have a fixed number of digits, so each sum is rounded.
A sum of three numbers depends on the order: (a + b) + c is not a + (b + c).
Tensor parallelism changes the order of sums, and so it changes the last digits.
One rank adds all products of a row and a column in one order.
Two ranks add half of them each, and an all-reduce adds the two partial sums.
The result is as exact as before. It is only rounded at other places.
Training then makes the difference larger, step after step.
Each update depends on the gradient, and the next gradient on the update.
After many steps two correct runs have different weights and different losses.
A bug does the same, from a larger difference on.
So look at the first step, and at gradients of the same weights.
"""


def load_lesson(bug: str) -> ModuleType:
    """Lesson 04, "right" or with one bug."""
    text = LESSON.read_text("utf-8")
    if bug != RIGHT:
        number, name = BUGS[bug]
        edit = runpy.run_path(str(ROOT / f"bugs/lesson{number}.py"))["BUGS"][name]
        if text.count(edit["old"]) != 1:
            raise ValueError(f"{LESSON.name} does not have the lines of bug {bug} once")
        text = text.replace(edit["old"], edit["new"])
    lesson = ModuleType(f"lesson04_{bug}")
    sys.modules[lesson.__name__] = lesson
    exec(compile(text, LESSON, "exec"), vars(lesson))
    return lesson


# ---- One model, with TP or without


class Alone:
    """The model without TP: what it computes, and how it is clipped."""

    def __init__(self, lesson: ModuleType, full: nn.Module):
        self.lesson = lesson
        self.model = full

    def loss(self, batch: tuple) -> Tensor:
        logits_BSV = self.model(batch[0])
        return self.lesson.mean_loss(at_least_float32(logits_BSV), batch[1])

    def sum_up(self) -> None:
        """There is nothing to sum."""

    def clip(self) -> float:
        """Returns the norm of the gradient before clipping."""
        norm = self.lesson.norm_by_pytorch(self.model)
        self.lesson.clip_by_pytorch(self.model, SIZES["clip"], norm)
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """Full, without the rows that pad the vocabulary."""
        found = self.lesson.unshard_model(self.model, "grad")
        for name, p in self.model.named_parameters():
            found[name] = found[name][: getattr(p, "rows", None)]
        return found


class Split(Alone):
    """The same under TP and SP."""

    def __init__(self, lesson: ModuleType, full: nn.Module, group):
        super().__init__(lesson, lesson.sp_transformer(full, group))
        self.group = group

    def loss(self, batch: tuple) -> Tensor:
        logits_BSv = at_least_float32(self.model(batch[0]))
        vocab_size = SIZES["vocab_size"]
        return self.lesson.sharded_loss(logits_BSv, batch[1], self.group, vocab_size)

    def sum_up(self) -> None:
        self.lesson.all_reduce_replicated_gradients(self.model, self.group)

    def clip(self) -> float:
        norm = self.lesson.global_norm(self.model, self.group)
        self.lesson.clip_gradients(self.model, SIZES["clip"], norm)
        return norm


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def forward_backward(run: Alone, batch: tuple, step: int) -> float:
    """Leave the gradients in the parameters, and return the loss."""
    torch.manual_seed(SIZES["seed"] + step)  # all draw the same dropout masks
    run.model.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    run.sum_up()
    return loss.item()


class Master:
    """AdamW as in the lesson, on a flat copy of the weights in at least float32."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.sizes = [p.numel() for p in self.parameters]
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.flat = at_least_float32(flat).clone()
        self.adamw = torch.optim.AdamW([self.flat], lr=3e-3, eps=1e-4, foreach=False)

    def step(self) -> None:
        gradient = torch.cat([p.grad.flatten() for p in self.parameters])
        self.flat.grad = at_least_float32(gradient)
        self.adamw.step()
        with torch.no_grad():
            for p, values in zip(self.parameters, self.flat.split(self.sizes)):
                p.copy_(values.view_as(p))


# ---- Training, and what is compared


def train(run: Alone, batches: list, at_mark) -> tuple[list[float], list[float]]:
    """Train on each batch, and return losses and norms of gradients. At each of MARKS
    at_mark(step, loss) is called before gradients are clipped."""
    master = Master(run.model)
    losses, norms = [], []
    for step, batch in enumerate(batches, 1):
        losses.append(forward_backward(run, batch, step))
        if step in MARKS:
            at_mark(step, losses[-1])
        norms.append(run.clip())
        master.step()
    return losses, norms


def make_alone(lesson: ModuleType, dtype: str) -> Alone:
    return Alone(lesson, lesson.make_tied(argparse.Namespace(**SIZES, dtype=dtype)))


def train_alone(lesson: ModuleType, dtype: str, batches: list) -> dict:
    """The run without TP: its losses, and of each mark its weights and gradients before
    this step, and how far these are from float64."""
    run = make_alone(lesson, dtype)
    alone = dict(weights={}, gradients={}, yardstick={}, loss_yardstick={})

    def at_mark(step: int, loss: float) -> None:
        alone["weights"][step] = copy.deepcopy(run.model.state_dict())
        alone["gradients"][step] = gradients = run.gradients()
        exact = make_alone(lesson, "float64")
        exact.model.load_state_dict(run.model.state_dict())
        exact_loss = forward_backward(exact, batches[step - 1], step)
        alone["yardstick"][step] = largest(gradients, exact.gradients())
        alone["loss_yardstick"][step] = relative(loss, exact_loss)

    losses, norms = train(run, batches, at_mark)
    return alone | dict(losses=losses, norms=norms)


def train_split(lesson: ModuleType, group, dtype: str, alone: dict, batches) -> dict:
    """The run with TP, compared with the one without."""
    run = Split(lesson, make_alone(lesson, dtype).model, group)
    found = dict(loss={}, gradient={}, same={}, same_loss={}, norm={})

    def at_mark(step: int, _) -> None:
        expected = alone["gradients"][step]
        found["gradient"][step] = largest(run.gradients(), expected)
        full = make_alone(lesson, dtype).model
        full.load_state_dict(alone["weights"][step])
        same = Split(lesson, full, group)
        loss = forward_backward(same, batches[step - 1], step)
        found["same"][step] = largest(same.gradients(), expected)
        found["same_loss"][step] = relative(loss, alone["losses"][step - 1])

    losses, norms = train(run, batches, at_mark)
    for step in found["gradient"]:
        found["norm"][step] = relative(norms[step - 1], alone["norms"][step - 1])
    most = 0.0
    for step, (loss, expected) in enumerate(zip(losses, alone["losses"]), 1):
        most = max(most, relative(loss, expected))
        if step in CURVE:
            found["loss"][step] = most
    return found


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def largest(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of any parameter's gradient."""
    return max(
        relative_tensor(gradients[name], reference)
        for name, reference in expected.items()
    )


def relative_tensor(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max()).item()


# ---- Running it


def rounded(found):
    """Four digits of each number, in a dictionary of dictionaries."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return float(f"{found:.3e}")


def load_alone(folder: Path, dtype: str, batches: list) -> dict:
    """The run without TP. Rank 0 trains it once, for all numbers of ranks."""
    path = folder / f"alone-{dtype}.pt"
    if dist.get_rank() == 0 and not path.exists():
        torch.save(train_alone(load_lesson(RIGHT), dtype, batches), path)
    dist.barrier()
    return torch.load(path)


def record(folder: Path, steps: int, dtypes: list[str], bugs: list[str]) -> None:
    """One rank's part. Rank 0 writes what is found, a file per number of ranks, dtype
    and bug."""
    group = dist.new_group(timeout=timedelta(minutes=30))
    right = load_lesson(RIGHT)
    batches = right.make_batches(TEXT, argparse.Namespace(**SIZES), steps)
    for dtype in dtypes:
        alone = load_alone(folder, dtype, batches)
        found = {name: alone[name] for name in ("yardstick", "loss_yardstick")}
        found["losses"] = {step: alone["losses"][step - 1] for step in alone["weights"]}
        write(folder, found, "alone", dtype)
        for bug in bugs:
            lesson = load_lesson(bug)
            found = train_split(lesson, group, dtype, alone, batches)
            write(folder, found, bug, dtype, group.size())


def write(folder: Path, found: dict, *names) -> None:
    if dist.get_rank() == 0:
        path = folder / f"{'-'.join(map(str, names))}.json"
        path.write_text(json.dumps(rounded(found)))


def launch(folder: Path, ranks: int, *flags: str) -> None:
    """`record` on the given number of ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", __file__, str(folder), *flags]
    subprocess.run(command, check=True)


def gather(folder: Path) -> None:
    """Write all files of the folder into one: a line each, by their names."""
    paths = sorted(folder.glob("*.json"))
    lines = [f'"{path.stem}": {path.read_text()}' for path in paths]
    RECORDING.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=MARKS[-1])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--bugs", nargs="+", default=[RIGHT, *BUGS])
    args = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        record(**vars(args))
        dist.barrier()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        for ranks, bugs, steps in PLAN:  # the longest is first: it trains without TP
            launch(Path(folder), ranks, "--steps", str(steps), "--bugs", *bugs)
        gather(Path(folder))


if __name__ == "__main__":
    main()
