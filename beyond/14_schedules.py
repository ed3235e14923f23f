"""Script 14: four schedules of one pipeline in time: who computes, waits, holds what.

Lesson 05 runs a pipeline as a list of steps per stage. Here four such lists run on the
same ranks, with the same model and batch: GPipe, 1F1B, interleaved 1F1B (each rank
holds several chunks of layers) and zero bubble (backward in two parts, one of which can
wait). All gradients are bitwise those of one process. What differs is when a rank
waits, and how much it holds.

Run it on 4 ranks (1, 2 and 8 also work):

    torchrun --standalone --nproc_per_node=4 beyond/14_schedules.py

What you will see: which layers each rank holds; four timelines, in which each step has
a stated time (--sleep), so that they look as in a textbook; the bubble by formula, by
the lists and as measured; micro-batches in flight and the bytes that they hold;
gradients; messages; the same with PyTorch's schedules.

Exercises; answers are in the sections of notebooks/14_schedules.ipynb in brackets:
    --microbatches 16     which bubbles become half as large, and what is held? [3]
    --chunks 4            the same question for interleaved [5]
    in zero_bubble, run each weight pass right after its backward pass: what is left of
                          the gain? [6]
    --sleep 0             the real times of this small model: what is still seen? [3]

How to read this file: NEW has the lists, a pipeline of chunks, and backward in two
parts; RUN measures and prints; BREAK IT lists bugs for `--break NAME`. Lesson 05's
schedule and Pipeline are used as they are: read them first.

Shapes: B batch, S sequence, D hidden, V vocabulary, L layers, P ranks of the pipeline,
    v chunks per rank, M micro-batches of b = B/M rows, e bytes per element. Times of
    one micro-batch in a stage: t_F forward, t_B for dL/dx, t_W for dL/dW. Each of the
    three is one matrix product per linear, so they are about equal.

Sources: GPipe, arXiv:1811.06965; 1F1B and interleaved, arXiv:2104.04473, sec. 2.2; zero
    bubble (ZB-H1), arXiv:2401.10241; docs.pytorch.org, torch.distributed.pipelining.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

try:
    from course import lesson00, lesson01, lesson02, lesson05
    from held_bytes import HeldBytes, HeldTensor
    from pytorch_schedules import PYTORCH, lists_by_pytorch
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 14: interleaved and zero-bubble schedules
# Read lines 65 to 299, in about 24 minutes. Stop at RUN.

# From lesson 05: schedule returns a stage's list of steps, ("forward", 0), …; Pipeline
# runs such a list: receive, compute, send; slice_stage removes from a model what other
# stages hold. Here a step also names a chunk: ("forward", (1, 0)) is the forward pass
# of micro-batch 0 through this rank's chunk 1.

# ---- Four lists of steps


def steps_of(kind: str, rank: int, P: int, M: int, v: int) -> list:
    """The steps of a rank: ("forward", (chunk, micro-batch)), …

    The other phases are "backward" and, in zero bubble, "weight".
    """
    if kind == "interleaved":
        return interleaved(rank, P, M, v)
    if kind == "zero-bubble":
        return zero_bubble(rank, P, M)
    return [(phase, (0, i)) for phase, i in lesson05.schedule(kind, rank, P, M)]


def interleaved(rank: int, P: int, M: int, v: int) -> list:
    """1F1B with v chunks of layers on each rank (arXiv:2104.04473, sec. 2.2).

    Rank r holds virtual stage r of v·P as its chunk 0, stage r + P as its chunk 1, and
    so on. P micro-batches go through chunk 0, the same P through chunk 1, …, then the
    next P. A pass takes 1/v of the time, so the pipeline fills and drains v times
    as fast: a rank waits (P − 1)(t_F + t_B + t_W)/v. It sends v times as many messages.
    """
    order = []
    for first in range(0, M, P):
        for chunk in range(v):
            order += [(chunk, first + i) for i in range(P)]
    order_back = [(v - 1 - chunk, i) for chunk, i in order]  # the last chunk first
    # Of chunk 0 to v − 2 all P; of the last one as in 1F1B, and backward comes back to
    # this rank 2·(P − rank − 1) passes later.
    warm_up = min((v - 1) * P + 2 * (P - rank - 1), M * v)
    steps = [("forward", which) for which in order[:warm_up]]
    for i in range(M * v - warm_up):
        steps += [("forward", order[warm_up + i]), ("backward", order_back[i])]
    return steps + [("backward", which) for which in order_back[M * v - warm_up :]]


def zero_bubble(rank: int, P: int, M: int) -> list:
    """1F1B with backward in two parts, B and W (ZB-H1, arXiv:2401.10241, sec. 2).

    B computes dL/dx, for which the stage before waits. W computes dL/dW, for which no
    stage waits: so it can fill the bubble. The order of forward and backward passes is
    that of 1F1B. Rank r puts off the weight passes of r micro-batches until after its
    last backward passes, when 1F1B would wait. A rank waits (P − 1)(t_F + t_B − t_W).
    """
    steps = []
    for phase, i in lesson05.schedule("1f1b", rank, P, M):
        steps.append((phase, (0, i)))
        if phase == "backward" and i >= rank:
            steps.append(("weight", (0, i - rank)))
    put_off = range(max(0, M - rank), M)
    return steps + [("weight", (0, i)) for i in put_off]


def bubble_of(kind: str, P: int, v: int, t_F=1.0, t_B=1.0, t_W=1.0) -> float:
    """How long a rank waits; it computes for M·(t_F + t_B + t_W).

    Of zero bubble: if t_W is not larger than t_F and t_B.
    """
    if kind == "interleaved":
        return (P - 1) * (t_F + t_B + t_W) / v
    if kind == "zero-bubble":
        return (P - 1) * (t_F + t_B - t_W)
    return (P - 1) * (t_F + t_B + t_W)


def plan(steps_of_ranks: list[list], last: int, cost: dict[str, float]) -> dict:
    """When each step begins and ends if a message takes no time.

    Args:
        steps_of_ranks: of each rank, (phase, virtual stage, micro-batch), in order.
        last: the number of the last virtual stage.
        cost: phase → how long it takes; a "full" backward pass is B and W in one.
    Returns: (phase, stage, micro-batch) → (begin, end).
    Raises: ValueError if all ranks wait: the lists do not fit together.
    """
    times = {}
    clock = [0.0] * len(steps_of_ranks)
    position = [0] * len(steps_of_ranks)
    left = sum(len(steps) for steps in steps_of_ranks)
    while left:
        before = left
        for rank, steps in enumerate(steps_of_ranks):
            if position[rank] == len(steps):
                continue
            phase, stage, i = steps[position[rank]]
            needs = needed_by(phase, stage, i, last)
            if needs is not None and needs not in times:
                continue  # this rank waits for another one
            begin = clock[rank]
            if needs is not None:
                begin = max(begin, times[needs][1])
            clock[rank] = begin + cost[phase]
            done = "backward" if phase == "full" else phase
            times[done, stage, i] = (begin, clock[rank])
            position[rank] += 1
            left -= 1
        if left == before:
            next_steps = []
            for steps, done in zip(steps_of_ranks, position):
                next_steps.append(steps[done] if done < len(steps) else "the end")
            raise ValueError(f"all ranks wait; their next steps: {next_steps}")
    return times


def needed_by(phase: str, stage: int, i: int, last: int) -> tuple | None:
    """The step that must have ended before this one; None if it needs no other."""
    if phase == "forward":
        return ("forward", stage - 1, i) if stage > 0 else None
    if phase == "weight":
        return ("backward", stage, i)
    return ("backward", stage + 1, i) if stage < last else ("forward", last, i)


# ---- A pipeline of chunks


class VirtualPipeline(lesson05.Pipeline):
    """Lesson 05's pipeline on ranks that hold several chunks of layers each.

    A rank is one virtual stage after the other, always the one that its next step is
    about. The last rank sends to the first: chunk c of rank P − 1 is followed by chunk
    c + 1 of rank 0.
    """

    def __init__(self, chunks: list[nn.Module], loss_of, groups):
        super().__init__(chunks[0], loss_of, groups)
        self.chunks = chunks
        P = self.pp.size()
        self.rank_before = (self.pp.rank() - 1) % P
        self.rank_after = (self.pp.rank() + 1) % P

    def run(self, steps: list[tuple], micro_batches: list) -> Tensor:
        """Run all steps. Return the sum of the losses; 0 without the last stage."""
        self.in_flight_of = [{} for _ in self.chunks]
        self.later = {}  # (chunk, micro-batch) → what its weight pass needs
        return super().run(steps, micro_batches)

    def become(self, chunk: int) -> None:
        """From here on this rank is the virtual stage that is its chunk."""
        P = self.pp.size()
        self.chunk = chunk
        self.number = chunk * P + self.pp.rank()
        self.stage = self.chunks[chunk]
        self.first = self.number == 0
        self.last = self.number == len(self.chunks) * P - 1
        self.in_flight = self.in_flight_of[chunk]

    def forward(self, which: tuple[int, int]) -> None:
        """Run a micro-batch through one of this rank's chunks."""
        chunk, i = which
        self.become(chunk)
        super().forward(i)

    def backward(self, which: tuple[int, int]) -> None:
        """Run backward of a chunk; of SplitLinears only the part for dL/dx."""
        chunk, i = which
        self.become(chunk)
        SplitLinear.later = self.later.setdefault(which, [])
        super().backward(i)

    def weight(self, which: tuple[int, int]) -> None:
        """Compute the weight gradients that backward of this micro-batch left."""
        if which not in self.later:
            text = f"weight pass of micro-batch {which[1] + 1}"
            raise ValueError(f"{text} before its backward pass")
        for linear, x, grad_y in self.later.pop(which):
            linear.add_weight_gradient(x, grad_y)


# ---- Backward in two parts


class InputGradient(torch.autograd.Function):
    """A linear whose backward returns dL/dx, and leaves dL/dW for later.

    y = x·Wᵀ + b has dL/dx = dL/dy·W and dL/dW = (dL/dy)ᵀ·x. Each is one matrix product;
    only the first is on the way to the stage before.
    """

    @staticmethod
    def forward(ctx, x: Tensor, linear: SplitLinear):
        ctx.save_for_backward(x)
        ctx.linear = linear
        return F.linear(x, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        (x,) = ctx.saved_tensors
        # Detached: x has its history again, and would keep all graphs before it alive.
        SplitLinear.later.append((ctx.linear, x.detach(), grad_y))
        return grad_y @ ctx.linear.weight, None


class SplitLinear(nn.Module):
    """An edit of nn.Linear: add_weight_gradient is a step of its own."""

    later = []  # where backward puts what weight gradients need; set by the pipeline

    def __init__(self, full: nn.Linear):
        super().__init__()
        self.weight = full.weight
        self.bias = full.bias

    def forward(self, x: Tensor) -> Tensor:
        return InputGradient.apply(x, self)

    def add_weight_gradient(self, x: Tensor, grad_y: Tensor) -> None:
        """Add dL/dW and dL/db of one micro-batch."""
        grad_y = grad_y.flatten(0, -2)  # [rows, features]
        add_gradient(self.weight, grad_y.T @ x.flatten(0, -2))
        add_gradient(self.bias, grad_y.sum(0))


def add_gradient(p: nn.Parameter, grad: Tensor) -> None:
    """What autograd does at the end of backward."""
    p.grad = grad if p.grad is None else p.grad + grad


def split_linears(module: nn.Module) -> None:
    """Replace each nn.Linear of a module by a SplitLinear with the same parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, SplitLinear(child))
        else:
            split_linears(child)


# ==== RUN

KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble")
COLUMNS = 72  # of a timeline


def main(args, report: lesson00.Report) -> None:
    """Run one batch by each schedule, and compare with one process."""
    P = args.ranks
    groups = lesson05.make_mesh({"pp": P, "dp": 1, "tp": 1}, args.timeout)
    size = lesson02.sizes_of(args)
    size.update(T=1, P=P, M=args.microbatches, v=args.chunks)
    size["b"] = args.batch_size // args.microbatches
    report.begin({"pp": P}, size)
    # The same seed on every rank: all have the same model and batch.
    full = lesson02.make_transformer(args)
    batch = lesson02.make_batches(__doc__, args, 1)[0]
    micro_batches = lesson05.make_microbatches(batch, groups, args.microbatches, False)
    # Each micro-batch's loss is divided by the targets of the batch (lesson 05).
    targets = int((batch[1] != lesson02.IGNORE).sum())

    # Each section prints as soon as its numbers exist.
    show_chunks(report)
    runs = {}
    warm_up(full, micro_batches, targets, groups, args)
    for kind in KINDS:
        with report.column(kind):
            runs[kind] = run_schedule(kind, full, micro_batches, targets, groups, args)
    show_timelines(report, runs)
    show_bubbles(report, runs)
    show_memory(report, runs)
    expected = one_process(full, micro_batches, targets)
    show_gradients(report, runs, expected)
    show_messages(report, runs, size)
    show_pytorch(report, full, micro_batches, targets, groups, expected)


class ScheduleRun:
    """What one schedule did on this rank."""

    def __init__(self, kind, steps, planned, pipeline, names, loss):
        self.steps = steps
        self.planned = planned  # length if t_F = t_B = t_W = 1
        self.pipeline = pipeline
        self.loss = loss
        self.gradients = {names[p]: p.grad for p in names if p.grad is not None}
        # All ranks share one clock if they are on one host: times from the first start.
        self.events = lesson00.gather_objects(pipeline.events)
        begin = min(of_rank[0]["start"] for of_rank in self.events)
        for rank, of_rank in enumerate(self.events):
            for event in of_rank:
                event.update(run=kind, rank=rank)
                event["start"] -= begin
                event["end"] -= begin
        self.length = max(of_rank[-1]["end"] for of_rank in self.events)


def chunks_of(kind: str, args) -> int:
    """Chunks of layers on each rank."""
    return args.chunks if kind == "interleaved" else 1


def cost_of(kind: str, args) -> dict[str, float]:
    """Seconds that a step of a chunk takes at least: t_F = t_B = t_W."""
    # A chunk has 1/v of a stage's layers.
    unit = args.sleep / 1000 / chunks_of(kind, args)
    # Without weight passes, a backward pass computes dL/dx and dL/dW.
    backward = unit if kind == "zero-bubble" else 2 * unit
    return {"forward": unit, "backward": backward, "weight": unit}


def loss_part(targets: int):
    """(logits, targets of a micro-batch) → its part of the mean loss (lesson 05)."""

    def loss_of(logits_bSV: Tensor, target_bS: Tensor) -> Tensor:
        loss_bS = F.cross_entropy(
            logits_bSV.transpose(1, 2), target_bS, reduction="none"
        )
        return lesson05.part_of_mean(loss_bS, targets)

    return loss_of


def make_pipeline(kind, full, targets, groups, cost, args) -> tuple:
    """This rank's chunks in a pipeline, and the names of their parameters."""
    P = args.ranks
    v = chunks_of(kind, args)
    # One module per chunk, in the order of its virtual stages.
    chunks = []
    names = {}
    for chunk in range(v):
        # Every rank cuts its chunks out of a copy of the full model.
        model = copy.deepcopy(full)
        if kind == "zero-bubble":
            split_linears(model)
        # In a chunk, layer 0 may be layer 4 of the full model: so names come first.
        name_of = {p: name for name, p in model.named_parameters()}
        number = chunk * P + groups["pp"].rank()
        chunks.append(lesson05.slice_stage(model, number, v * P))
        for p in chunks[-1].parameters():
            names[p] = name_of[p]
    return MeasuredPipeline(chunks, loss_part(targets), groups, cost), names


def run_schedule(kind, full, micro_batches, targets, groups, args) -> ScheduleRun:
    """One batch through a pipeline; the counters get the schedule's name."""
    cost = cost_of(kind, args)
    pipeline, names = make_pipeline(kind, full, targets, groups, cost, args)
    rank = groups["pp"].rank()
    # Lists that do not fit together are found here, by all ranks, before any waits.
    planned = planned_length(kind, args)
    steps = steps_of(kind, rank, args.ranks, args.microbatches, chunks_of(kind, args))
    with lesson00.COMM.blocking("the barrier before a run", list(range(args.ranks))):
        dist.barrier()  # one start for the timeline
    loss = pipeline.run(steps, micro_batches)
    rename_counts("mesh", kind)
    return ScheduleRun(kind, steps, planned, pipeline, names, loss)


def warm_up(full, micro_batches, targets, groups, args) -> None:
    """The first passes of a process are slow: run them before anything is measured."""
    # With this one schedule, all functions of the others have run as well.
    cost = dict.fromkeys(("forward", "backward", "weight"), 0.0)
    pipeline, _ = make_pipeline("zero-bubble", full, targets, groups, cost, args)
    steps = [(phase, (0, 0)) for phase in cost]
    pipeline.run(steps, micro_batches[:1])
    lesson00.COMM.calls.clear()
    lesson00.COMM.bytes.clear()


def rename_counts(run: str, new: str) -> None:
    """Calls that were counted for one run become those of another."""
    for counter in (lesson00.COMM.calls, lesson00.COMM.bytes):
        for call in list(counter):
            # lesson 05's pipeline counts everything as "mesh".
            if call.run == run:
                counter[call._replace(run=new)] = counter.pop(call)


def one_process(full, micro_batches, targets: int) -> dict[str, Tensor]:
    """The loss and all gradients of the same micro-batches, one after the other."""
    model = copy.deepcopy(full)
    loss_of = loss_part(targets)
    total = 0.0
    for tokens_bS, target_bS in micro_batches:
        # In the order in which each stage takes them: sums have the same rounding.
        loss = loss_of(model(tokens_bS), target_bS)
        loss.backward()
        total = total + loss.detach()
    expected = {"loss": total}
    for name, p in model.named_parameters():
        expected[name] = p.grad
    return expected


# ---- A pipeline that records when it computed, and what it held


class MeasuredPipeline(VirtualPipeline):
    """A pipeline that also records events, and the bytes that it holds.

    cost: phase → seconds that a step takes at least; it sleeps for the rest.
    """

    def __init__(self, chunks: list[nn.Module], loss_of, groups, cost=None):
        super().__init__(chunks, loss_of, groups)
        self.cost = cost or dict.fromkeys(("forward", "backward", "weight"), 0.0)
        self.held = HeldBytes(nn.ModuleList(chunks))

    def run(self, steps: list[tuple], micro_batches: list) -> Tensor:
        self.events = []
        self.for_weights = {}  # (chunk, micro-batch) → HeldTensors of its weight pass
        self.held.reset()
        # Around all of it: a graph that is made between passes is seen as well.
        with self.held:
            return super().run(steps, micro_batches)

    def compute_forward(self, i: int, x: Tensor, target: Tensor) -> Tensor:
        self.held.forward_pass += 1
        with self.record_event("forward", i):
            return super().compute_forward(i, x, target)

    def compute_backward(self, i: int, y: Tensor, grad: Tensor | None) -> None:
        with self.record_event("backward", i):
            super().compute_backward(i, y, grad)
            # These lists are not autograd's: hold them where the meter sees them.
            self.for_weights[self.chunk, i] = [
                (HeldTensor(x, self.held), HeldTensor(grad_y, self.held))
                for _, x, grad_y in SplitLinear.later
            ]

    def weight(self, which: tuple[int, int]) -> None:
        self.chunk = which[0]
        with self.record_event("weight", which[1]):
            super().weight(which)
            del self.for_weights[which]

    @contextmanager
    def record_event(self, phase: str, i: int):
        """Record when this rank computed, and by how much the bytes held changed."""
        before = self.held.now
        start = time.time()
        yield
        if self.like.is_cuda:
            torch.cuda.synchronize()
        time.sleep(max(0.0, start + self.cost[phase] - time.time()))
        event = {"what": phase, "chunk": self.chunk, "microbatch": i}
        event.update(start=start, end=time.time(), bytes=self.held.now - before)
        self.events.append(event)


def add_meters(training: lesson05.MeshTraining) -> None:
    """Let lesson 05's training run in a MeasuredPipeline; for tests and tools."""
    training.steps = [(phase, (0, i)) for phase, i in training.steps]
    pipeline = MeasuredPipeline([training.stage], training.loss, training.groups)
    training.pipeline = pipeline


# ---- The sections of the output, in order


def show_chunks(report: lesson00.Report) -> None:
    """Which layers each rank holds."""
    args = report.args
    rows = []
    for rank in range(args.ranks):
        row = {"": f"rank {rank}", "one chunk": layers_in(args, rank, 1)}
        for chunk in range(args.chunks):
            number = chunk * args.ranks + rank
            row[f"chunk {chunk}"] = layers_in(args, number, args.chunks)
        rows.append(row)
    report.section("The layers that each rank holds: in one chunk, or interleaved")
    report.say("   E: embedding in front, H: last norm and head behind")
    report.table("chunks", rows)


def layers_in(args, number: int, v: int) -> str:
    """The layers of virtual stage `number`, with E and H at the ends."""
    # Virtual stages of all ranks.
    count = v * args.ranks
    # As slice_stage cuts.
    layers = torch.arange(args.layers).tensor_split(count)[number].tolist()
    ends = ("E " if number == 0 else "", " H" if number == count - 1 else "")
    return ends[0] + " ".join(str(layer) for layer in layers) + ends[1]


def show_timelines(report: lesson00.Report, runs: dict[str, ScheduleRun]) -> None:
    """When each rank computed, and waited; all schedules to one scale."""
    report.section("When each rank computed: all schedules to one scale")
    report.say(
        "   1 2 …: forward of micro-batch 1, 2, … (a later chunk: ¹ ² …); a b …: its\n"
        "   backward (a later chunk: A B …); =: a weight pass; ·: it waits"
    )
    report.data["timeline"] = []
    longest = max((run.length for run in runs.values()), default=1.0)
    # One scale, so that a shorter schedule has a shorter line.
    scale = longest / COLUMNS  # seconds per mark
    for kind, run in runs.items():
        report.say(f"   {kind}, {run.length:.2f} s")
        for rank, of_rank in enumerate(run.events):
            report.data["timeline"].extend(of_rank)
            report.say(f"   rank {rank}  {draw_rank(of_rank, run.length, scale)}")


def draw_rank(events: list[dict], length: float, scale: float) -> str:
    """One line of a timeline; scale: seconds per mark."""
    # It waits wherever no event is drawn.
    line = ["·"] * round(length / scale)
    for event in events:
        start = int(event["start"] / scale)
        # At least one mark, however short the step was.
        end = max(start + 1, round(event["end"] / scale))
        line[start:end] = mark_of(event) * (end - start)
    return "".join(line[: round(length / scale)])


def mark_of(event: dict) -> str:
    """The mark of a step in a timeline."""
    i = event["microbatch"]
    if event["what"] == "weight":
        return "="
    if event["what"] == "forward":
        digits = "⁰¹²³⁴⁵⁶⁷⁸⁹" if event["chunk"] else "0123456789"
        return digits[(i + 1) % 10]
    return chr(ord("A" if event["chunk"] else "a") + i % 26)


def show_bubbles(report: lesson00.Report, runs: dict[str, ScheduleRun]) -> None:
    """The bubble, waiting/computing: by formula, from the lists, and as measured."""
    args = report.args
    P = args.ranks
    M = args.microbatches
    formulas = {
        "gpipe": "(P − 1)(t_F + t_B + t_W)",
        "1f1b": "(P − 1)(t_F + t_B + t_W)",
        "interleaved": "(P − 1)(t_F + t_B + t_W)/v",
        "zero-bubble": "(P − 1)(t_F + t_B − t_W)",
    }
    rows = []
    for kind, run in runs.items():
        # Waiting and computing in units of t_F.
        computing = 3 * M  # if t_F = t_B = t_W = 1
        waits = run.planned - computing
        row = {"schedule": kind, "a rank waits": formulas[kind], "=": f"{waits:g}"}
        row["/computing"] = f"{waits / computing:.3f}"
        row["off"] = []
        predicted = bubble_of(kind, P, chunks_of(kind, args))
        name = f"bubble of {kind}, by its lists"
        if not report.check("plan", name, abs(waits - predicted), 1e-9):
            row["off"].append("=")
        # No step is shorter than stated, so a run cannot be shorter than its plan.
        shortest = (computing + waits) * args.sleep / 1000
        name = f"{kind} is not shorter than its lists"
        report.check("plan", name, max(0.0, shortest - run.length), 1e-3)
        bubble = run.length / mean_computing(run) - 1
        # On a busy machine this is larger, never smaller.
        row["measured"] = f"{bubble:.3f}"
        report.data.setdefault("bubble", {})[kind] = bubble
        rows.append(row)
    report.section("The bubble: waiting/computing")
    report.table("bubbles", rows)
    text = "What is more than planned comes from messages and from shared cores."
    if args.sleep:
        text = f"t_F = t_B = t_W = {args.sleep:g} ms at least. {text}"
    report.conclude(text)
    waits = {kind: run.planned - 3 * M for kind, run in runs.items()}
    if waits.get("1f1b") and len(waits) == len(KINDS):
        shares = [100 * waits[kind] / waits["1f1b"] for kind in KINDS[2:]]
        text = (
            "By their lists, interleaved waits {:.0f} % as long as 1F1B, zero bubble "
        )
        report.conclude(f"{text}{{:.0f}} %.".format(*shares))


def mean_computing(run: ScheduleRun) -> float:
    """Seconds that a rank computed, mean over ranks."""
    total = 0.0
    for of_rank in run.events:
        for event in of_rank:
            total += event["end"] - event["start"]
    return total / len(run.events)


def planned_length(kind: str, args) -> float:
    """A run's length by its lists, if t_F = t_B = t_W = 1 and messages take no time."""
    v = chunks_of(kind, args)
    # --sleep 1000 is one unit per t_F.
    cost = cost_of(kind, argparse.Namespace(sleep=1000, chunks=args.chunks))
    lists = []
    for rank in range(args.ranks):
        lists.append(stage_numbers(kind, rank, v, args))
    times = plan(lists, v * args.ranks - 1, cost)
    return max(end for _, end in times.values())


def stage_numbers(kind: str, rank: int, v: int, args) -> list[tuple]:
    """A rank's steps with virtual stages instead of chunks: as `plan` takes them."""
    steps = []
    for phase, (chunk, i) in steps_of(kind, rank, args.ranks, args.microbatches, v):
        steps.append((phase, chunk * args.ranks + rank, i))
    return steps


def in_flight_of(kind: str, rank: int, args) -> int:
    """Forward passes without a backward pass yet, at most: chunks × micro-batches."""
    P = args.ranks
    M = args.microbatches
    # GPipe begins backward when all forward passes are done.
    if kind == "gpipe":
        return M
    if kind == "interleaved":
        v = args.chunks
        return min((v - 1) * P + 2 * (P - rank - 1) + 1, M * v)
    return min(P - rank, M)


def show_memory(report: lesson00.Report, runs: dict[str, ScheduleRun]) -> None:
    """Micro-batches in flight, and the bytes held for backward, at the peak."""
    args = report.args
    flight = []
    held = []
    for rank in range(args.ranks):
        flight.append({"in flight, at most": f"rank {rank}"})
        held.append({"bytes at the peak": f"rank {rank}"})
    left = 0
    for kind, run in runs.items():
        # Each rank measures itself; every rank gets all numbers.
        measured = {"peak": run.pipeline.held.peak, "expected": expected_peak(run)}
        measured["passes"] = run.pipeline.held.peak_passes
        measured["left"] = run.pipeline.held.now
        measured["not done"] = sum(len(x) for x in run.pipeline.in_flight_of)
        for rank, of_rank in enumerate(lesson00.gather_objects(measured)):
            flight[rank][kind] = of_rank["passes"]
            held[rank][kind] = of_rank["peak"]
            name = f"{kind}, in flight on rank {rank}"
            predicted = in_flight_of(kind, rank, args)
            report.expect(flight[rank], kind, "memory", name, predicted)
            name = f"{kind}, bytes at the peak on rank {rank}"
            report.expect(held[rank], kind, "memory", name, of_rank["expected"])
            report.check(
                "memory", f"{kind}, bytes left on rank {rank}", of_rank["left"]
            )
            name = f"{kind}, left in flight on rank {rank}"
            report.check("memory", name, of_rank["not done"])
            left += of_rank["left"]
    # Rows are ranks, so that any number of ranks fits the screen.
    report.section("What each rank holds for backward, measured")
    report.say(
        "   in flight  forward passes whose backward pass is still to come\n"
        "              (interleaved: each of one chunk, 1/v of a stage)\n"
        "   bytes      saved by autograd, and what weight passes still need"
    )
    report.table("in flight", flight)
    report.table("memory", held)
    report.say(f"   Held at the end: {left:,} bytes.")
    if args.ranks > 1 and len(runs) == len(KINDS):
        first = held[0]["1f1b"] / held[0]["gpipe"]
        last = held[-1]["zero-bubble"] / held[-1]["1f1b"]
        report.conclude(
            f"On rank 0, 1F1B holds {100 * first:.0f} % of GPipe. On the last rank, "
            f"zero bubble holds {last:.1f} times as much as 1F1B, because its weight "
            "passes come later."
        )


def expected_peak(run: ScheduleRun) -> int:
    """The most bytes held, by the list of steps and what each pass saved.

    A backward pass releases what its forward pass saved. With weight passes it leaves
    inputs and gradients of all linears, until the weight pass releases them.
    """
    saved = {}
    for event in run.pipeline.events:
        which = (event["chunk"], event["microbatch"])
        if event["what"] == "forward":
            saved[which] = event["bytes"]
        # What a weight pass releases is what backward had left for it.
        elif event["what"] == "weight":
            saved["weight", which] = -event["bytes"]
    now = 0
    peak = 0
    # In the order of the list, not of the clock.
    for phase, which in run.steps:
        if phase == "forward":
            now += saved[which]
        elif phase == "backward":
            now -= saved[which] - saved.get(("weight", which), 0)
        else:
            now -= saved["weight", which]
        peak = max(peak, now)
    return peak


def show_gradients(report, runs: dict[str, ScheduleRun], expected: dict) -> None:
    """Loss and gradients of each schedule: bitwise those of one process."""
    rows = []
    for kind, run in runs.items():
        # Only the rank of the last stage has a loss; the others add 0.
        loss = lesson00.all_reduce(run.loss, run.pipeline.pp)
        row = {"schedule": kind, "loss": loss.item(), "gradients": 0, "diff": 0.0}
        row["off"] = []
        if not report.check(
            "gradients", f"loss, {kind}", off_by(loss, expected["loss"])
        ):
            row["off"].append("loss")
        of_ranks = lesson00.gather_objects(run.gradients)
        for of_rank in of_ranks:
            for name, grad in of_rank.items():
                diff = off_by(grad, expected[name])
                row["diff"] = max(row["diff"], diff)
                row["gradients"] += 1
                if not report.check("gradients", f"{name}, {kind}", diff):
                    row["off"].append("diff")
        # One entry of `expected` is the loss.
        missing = len(expected) - 1 - row["gradients"]
        report.check("gradients", f"all parameters have one, {kind}", missing)
        rows.append(row)
    report.section("Gradients: bitwise those of one process")
    report.table("gradients", rows)


def off_by(x: Tensor, expected: Tensor) -> float:
    """0 if all bits are the same."""
    return 0.0 if torch.equal(x, expected) else lesson00.rel_diff(x, expected) or 1e-30


def show_messages(report: lesson00.Report, runs: dict, size: dict) -> None:
    """Messages of rank 0: with v chunks v times as many."""
    formulas = {}
    P = report.args.ranks
    for kind, run in runs.items():
        v = chunks_of(kind, report.args)
        rank = run.pipeline.pp.rank()
        # The last virtual stage has none after it, the first one none before it.
        for phase, chunks in (
            ("forward", v - 1 if rank == P - 1 else v),
            ("backward", v - 1 if rank == 0 else v),
        ):
            call = lesson00.Call(kind, phase, "send/recv", "pp")
            count = f"{chunks}·M" if chunks != 1 else "M"
            header = lesson00.Calls(count, "40")
            formulas[call] = [header, lesson00.Calls(count, "e·b·S·D")]
    report.section("Messages of rank 0: a header of 5 int64, and b·S·D elements each")
    report.ledger(formulas, size, hide=["collective"])


# ---- The same by PyTorch


def show_pytorch(report, full, micro_batches, targets: int, groups, expected) -> None:
    """PyTorch's schedules: the bubble by their lists, and the gradients of two."""
    args = report.args
    report.section("By PyTorch: two chunks per rank, t_F = t_B = t_W = 1")
    if args.ranks == 1 or args.microbatches < 2 * args.ranks:
        report.say("   These schedules require 2 ranks and M = 2·P or more.")
        return
    # It logs its plans.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    rows = []
    is_other = True  # are its lists of interleaved 1F1B other than ours?
    for name, about in PYTORCH.items():
        with report.column(f"PyTorch's {name}"):
            schedule, names = pytorch_schedule(about, full, targets, groups, args)
            row = pytorch_row(name, schedule, args)
            if name == "interleaved":
                lists = [
                    stage_numbers(name, rank, 2, args) for rank in range(args.ranks)
                ]
                is_other = lists != lists_by_pytorch(schedule, full="backward")
                report.check("PyTorch", "interleaved: the same lists", float(is_other))
            if about.is_run:
                diff = pytorch_gradients(schedule, names, micro_batches, expected, args)
                row["gradients"] = f"{diff:.1e}"
                allowed = report.allowed
                if not report.check("PyTorch", f"gradients, {name}", diff, allowed):
                    row["off"] = ["gradients"]
            rows.append(row)
    report.table("PyTorch", rows)
    if not is_other:
        report.say(
            "   Its interleaved schedule has the lists of this script, step by step."
        )


def pytorch_schedule(about, full, targets: int, groups, args) -> tuple:
    """A schedule of PyTorch with this rank's two stages, and their parameters."""
    P = args.ranks
    rank = groups["pp"].rank()
    stages = []
    names = {}
    # In a V, rank 0 has the first and the last stage.
    for number in (rank, 2 * P - 1 - rank if about.is_v else P + rank):
        model = copy.deepcopy(full)
        name_of = {p: name for name, p in model.named_parameters()}
        module = lesson05.slice_stage(model, number, 2 * P)
        for p in module.parameters():
            names[p] = name_of[p]
        device = torch.device(args.device)
        stages.append(PipelineStage(module, number, 2 * P, device, group=groups["pp"]))
    # scale_grads: a loss is divided by the batch's targets already, not by M.
    schedule = about.schedule(
        stages, args.microbatches, loss_fn=loss_part(targets), scale_grads=False
    )
    return schedule, names


def pytorch_row(name: str, schedule, args) -> dict:
    """A schedule's bubble by its lists, and what a rank has in flight."""
    cost = {"forward": 0.5, "backward": 0.5, "weight": 0.5, "full": 1.0}
    lists = lists_by_pytorch(schedule)
    # A chunk is half of a stage here.
    times = plan(lists, 2 * args.ranks - 1, cost)
    waits = max(end for _, end in times.values()) - 3 * args.microbatches
    most = []
    for steps in lists:
        in_flight = [0]
        for phase, _, _ in steps:
            change = {"forward": 1, "weight": 0}.get(phase, -1)
            in_flight.append(in_flight[-1] + change)
        most.append(str(max(in_flight)))
    row = {"PyTorch's": name, "waits": f"{waits:g}"}
    row["/computing"] = f"{waits / (3 * args.microbatches):.3f}"
    row["in flight"] = " ".join(most)
    row["gradients"] = ""  # largest relative difference
    return row


def pytorch_gradients(schedule, names, micro_batches, expected: dict, args) -> float:
    """One step; the largest relative difference of a gradient of this rank."""
    # PyTorch splits the batch itself: into the same micro-batches.
    tokens_BS = torch.cat([tokens for tokens, _ in micro_batches])
    target_BS = torch.cat([target for _, target in micro_batches])
    # The first stage takes tokens; the rank of the last one uses the targets.
    inputs = [tokens_BS] if dist.get_rank() == 0 else []
    with lesson00.COMM.blocking("PyTorch's pipeline", list(range(args.ranks))):
        schedule.step(*inputs, target=target_BS, losses=[])
    diffs = [lesson00.rel_diff(p.grad, expected[name]) for p, name in names.items()]
    return max(diffs)


# ==== BREAK IT

BREAKS = {
    "leak": dict(
        target="Pipeline.compute_backward",
        old="    y.backward(grad)\n",
        new="    y.backward(grad, retain_graph=True)\n"
        '    vars(self).setdefault("kept", []).append(y)  # to look at it later\n',
        what="the graph of a micro-batch is kept after its backward pass",
        symptom="all losses and gradients are right; 1F1B holds as much as GPipe",
        why="autograd frees what it saved when no graph needs it; 1F1B relies on that",
        reported="github.com/verl-project/verl/pull/7874, pytorch/pytorch pull 138119",
    ),
    "early": dict(
        target="zero_bubble",
        old='        if phase == "backward" and i >= rank:\n',
        new='        if phase == "forward" and i >= rank:\n',
        what="weight passes follow forward passes: on rank 0, W comes before its B",
        symptom="an error before the run: a step needs another that comes after it",
        why="dL/dW needs dL/dy, which the backward pass receives",
        reported="github.com/sail-sg/zero-bubble-pipeline-parallelism/issues/72",
    ),
    "chunks": dict(
        target="interleaved",
        old='    steps = [("forward", which) for which in order[:warm_up]]\n',
        new="    if rank == P - 1:  # the next chunk's first one could be there\n"
        "        order[P - 1 : P + 1] = [order[P], order[P - 1]]\n"
        '    steps = [("forward", which) for which in order[:warm_up]]\n',
        what="the last rank takes chunks in another order than they are sent",
        symptom="an error that names two messages; without the check, wrong gradients",
        why="two ranks have one queue per direction, for the messages of all chunks",
        reported="github.com/NVIDIA/Megatron-LM/issues/1450, pytorch/PiPPy pull 1088",
    ),
    "newest": dict(
        target="VirtualPipeline.weight",
        old="    for linear, x, grad_y in self.later.pop(which):\n",
        new="    for linear, x, grad_y in self.later[max(self.later)]:  # the newest\n",
        what="a weight pass takes the newest micro-batch instead of its own",
        symptom="the loss and dL/dx are right; weights of all ranks but 0 are wrong",
        why="some micro-batches are counted twice, others not at all",
        reported="github.com/pytorch/pytorch/pull/130210 (a review)",
    ),
    "forgotten": dict(
        target="zero_bubble",
        old='    return steps + [("weight", (0, i)) for i in put_off]\n',
        new="    return steps\n",
        what="the weight passes that were put off are never run",
        symptom="the loss is right; weight gradients of all ranks but 0 lack a part",
        why="no other step needs a weight gradient, so nothing waits for it",
        reported="github.com/deepspeedai/Megatron-DeepSpeed/issues/442",
    ),
    "history": dict(
        target="InputGradient.backward",
        old="x.detach()",
        new="x",
        what="what a weight pass needs is kept with its history",
        symptom="all gradients are right; the memory of zero bubble grows with M",
        why="a saved input points to the graph that made it, so that graph stays alive",
        reported="github.com/pytorch/pytorch/issues/3818",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    sizes = dict(hidden=32, heads=4, kv_heads=2, seq_len=32, vocab_size=257)
    parser = lesson00.lesson_parser(__doc__, BREAKS, sections=7, **sizes)
    add = parser.add_argument
    positive = lesson00.positive
    text = "M (8, or 2·P if larger); a multiple of P"
    add("--microbatches", type=positive, default=max(8, 2 * ranks), help=text)
    text = "v, chunks of layers per rank when interleaved (2; 1 on one rank)"
    add("--chunks", type=positive, default=min(2, ranks), help=text)
    add("--layers", type=positive, default=0, help="L (8, or v·P if larger)")
    add("--batch-size", type=positive, default=0, help="B (2·M)")
    text = "milliseconds that t_F, t_B and t_W take at least (60; 0: their own time)"
    add("--sleep", type=float, default=60.0, metavar="MS", help=text)
    args = parser.parse_args()
    args.dropout = 0.0
    args.layers = args.layers or max(8, args.chunks * ranks, 2 * ranks)
    args.batch_size = args.batch_size or 2 * args.microbatches
    if ranks == 1 and args.chunks > 1:
        raise ValueError(f"--chunks {args.chunks}: one rank has no other to wait for")
    lesson01.must_divide(
        args, "microbatches", ranks, "(ranks; interleaved: rounds of P)"
    )
    lesson01.must_divide(args, "batch_size", args.microbatches, "(--microbatches)")
    lesson01.must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    lesson01.must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    if args.layers < args.chunks * ranks:
        reason = f"fewer than v·P = {args.chunks * ranks}"
        lesson01.refuse(args, "layers", reason, args.chunks * ranks)
    lesson01.raise_refused(args)
    if args.vocab_size <= lesson02.PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if not 0 <= args.sleep < 1e5:
        raise ValueError(f"--sleep {args.sleep}: must be at least 0 and below 100000")
    return args


# endregion


if __name__ == "__main__":
    lesson00.launch(main, parse_args, globals())
