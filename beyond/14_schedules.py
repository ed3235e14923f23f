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
gradients; messages; and PyTorch's schedules, three of them new.

Exercises; answers are in the sections of notebooks/14_schedules.ipynb in brackets:
    --microbatches 16     which bubbles become half as large [3], and what is held? [4]
    --chunks 4            each chunk has one of L = 16 layers: how long does a rank wait
                          with interleaved, and what does it hold? [5]
    in zero_bubble, run each weight pass right after its backward pass: what is left of
                          the gain? [6]
    --sleep 0             the real times of this small model: what is still seen? [3]

How to read this file: NEW has the lists, a pipeline of chunks, and backward in two
parts; RUN measures and prints; `python tools/bug.py 14` lists bugs. Lesson 05's
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
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from course import lesson00, lesson02, lesson05
    from harness import cell, gather_objects, marked, on_axes
    from held_bytes import HeldBytes, HeldTensor, PipelineMeters, add_meters  # noqa
    from pytorch_schedules import PYTORCH, lists_by_pytorch, pytorch_row
    from timeline import from_first_start, show_timelines
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 14: interleaved and zero-bubble schedules
# Read lines 66 to 343, in about 28 minutes. Stop at RUN.

# From lesson 05: schedule returns the list of a stage's actions, ("forward", 0), …;
# Pipeline runs it: receive, compute, send; slice_stage removes from a model what other
# stages hold. Here an action also names a chunk: ("forward", (1, 0)) is the pass of
# micro-batch 0 through this rank's chunk 1. The v·P chunks of all ranks, in order of
# the model, are the virtual stages. M is a multiple of P.

# ---- Four lists of actions


def actions_of(kind: str, rank: int, P: int, M: int, v: int) -> list:
    """A rank's actions: ("forward", (chunk, micro-batch)), …, "backward", "weight"."""
    if kind == "interleaved":
        return interleaved(rank, P, M, v)
    if kind == "zero-bubble":
        return zero_bubble(rank, P, M)
    return [(phase, (0, i)) for phase, i in lesson05.schedule(kind, rank, P, M)]


def interleaved(rank: int, P: int, M: int, v: int) -> list:
    """1F1B with v chunks of layers on each rank (arXiv:2104.04473, sec. 2.2).

    Rank r holds virtual stage r of v·P as its chunk 0, stage r + P as its chunk 1, and
    so on. P micro-batches go through chunk 0, the same P through chunk 1, …, then the
    next P: after P passes the first one is back, for this rank's next chunk. A pass
    takes 1/v of the time, so the pipeline fills and drains v times as fast: a rank
    waits (P − 1)(t_F + t_B + t_W)/v. All ranks together send v·P − 1 messages per
    micro-batch and direction instead of P − 1.
    """
    order = []
    for first in range(0, M, P):
        for chunk in range(v):
            order += [(chunk, first + i) for i in range(P)]
    order_back = [(v - 1 - chunk, i) for chunk, i in order]  # the last chunk first
    # Before forward and backward alternate, a rank runs P micro-batches through v − 1
    # chunks, then twice 1F1B's P − rank − 1 passes. Once would do if messages took no
    # time; twice leaves each message time to arrive.
    warm_up = min((v - 1) * P + 2 * (P - rank - 1), M * v)
    actions = [("forward", which) for which in order[:warm_up]]
    for i in range(M * v - warm_up):
        actions += [("forward", order[warm_up + i]), ("backward", order_back[i])]
    return actions + [("backward", which) for which in order_back[M * v - warm_up :]]


def zero_bubble(rank: int, P: int, M: int) -> list:
    """1F1B with backward in two parts, B and W (ZB-H1, arXiv:2401.10241, sec. 2).

    B computes dL/dx, for which the stage before waits. W computes dL/dW, for which no
    stage waits: so it can fill the bubble. Forward and backward passes are as in 1F1B.
    Rank r delays each W by r micro-batches. So rank r has at most P − r in flight and
    r that wait for W: P, as rank 0 of 1F1B. Those r are left for the end, when 1F1B
    would wait. Example: the last rank waits (P − 1)·t_F for its first micro-batch.
    After its last B it runs P weight passes, one in its turn and the P − 1 that are
    left. Meanwhile this B goes through the other ranks, and rank 0 ends with its W:
    (P − 1)·t_B + t_W. So the last rank waits (P − 1)(t_B − t_W) more.
    """
    actions = []
    for phase, i in lesson05.schedule("1f1b", rank, P, M):
        actions.append((phase, (0, i)))
        if phase == "backward" and i >= rank:
            actions.append(("weight", (0, i - rank)))
    put_off = range(max(0, M - rank), M)
    return actions + [("weight", (0, i)) for i in put_off]


# How long a rank waits. The bubble is this, divided by M·(t_F + t_B + t_W).
WAITS = {
    "gpipe": "(P − 1)·(t_F + t_B + t_W)",
    "1f1b": "(P − 1)·(t_F + t_B + t_W)",
    "interleaved": "(P − 1)·(t_F + t_B + t_W)/v",
    "zero-bubble": "(P − 1)·(t_F + t_B − t_W)",  # if t_W is at most t_F and t_B
}


def bubble_of(kind: str, P: int, v: int, t_F=1.0, t_B=1.0, t_W=1.0) -> float:
    """The value of a formula in WAITS, evaluated as it is printed."""
    letters = {"P": P, "v": v, "t_F": t_F, "t_B": t_B, "t_W": t_W}
    return eval(WAITS[kind].replace("·", "*").replace("−", "-"), letters)


def most_in_flight(kind: str, rank: int, P: int, M: int, v: int) -> int:
    """The most forward passes of a rank whose backward pass is still to come."""
    if kind == "gpipe":  # backward begins when all forward passes are done
        return M
    if kind == "interleaved":  # its warm-up, and one more
        return min((v - 1) * P + 2 * (P - rank - 1) + 1, M * v)
    return min(P - rank, M)


def plan(actions_of_ranks: list[list], last: int, cost: dict[str, float]) -> dict:
    """When each action begins and ends if a message takes no time.

    Args:
        actions_of_ranks: of each rank, (phase, virtual stage, micro-batch), in order.
        last: the number of the last virtual stage.
        cost: phase → how long it takes; without weight passes, "backward" is B and W.
    Returns: (phase, stage, micro-batch) → (begin, end).
    Raises: ValueError if all ranks wait: the lists do not fit together.
    """
    times = {}
    clock = [0.0] * len(actions_of_ranks)
    position = [0] * len(actions_of_ranks)
    left = sum(len(actions) for actions in actions_of_ranks)
    while left:
        before = left
        for rank, actions in enumerate(actions_of_ranks):
            if position[rank] == len(actions):
                continue
            phase, stage, i = actions[position[rank]]
            needs = needed_by(phase, stage, i, last)
            if needs is not None and needs not in times:
                continue  # this rank waits for another one
            begin = clock[rank]
            if needs is not None:
                begin = max(begin, times[needs][1])
            clock[rank] = begin + cost[phase]
            done = "backward" if phase == "full" else phase  # PyTorch's: B and W
            times[done, stage, i] = (begin, clock[rank])
            position[rank] += 1
            left -= 1
        if left == before:
            next_actions = []
            for actions, at in zip(actions_of_ranks, position):
                next_actions.append(actions[at] if at < len(actions) else "the end")
            raise ValueError(f"all ranks wait; their next actions: {next_actions}")
    return times


def needed_by(phase: str, stage: int, i: int, last: int) -> tuple | None:
    """The action that must have ended before this one; None if it needs no other."""
    if phase == "forward":
        return ("forward", stage - 1, i) if stage > 0 else None
    if phase == "weight":
        return ("backward", stage, i)
    return ("backward", stage + 1, i) if stage < last else ("forward", last, i)


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
        # Detached: autograd gives x back with its history, and weight passes run with
        # autograd on. p.grad would get a history, too: a graph of all micro-batches.
        SplitLinear.for_weight_pass.append((ctx.linear, x.detach(), grad_y))
        return grad_y @ ctx.linear.weight, None


class SplitLinear(nn.Module):
    """An edit of nn.Linear: add_weight_gradient is an action of its own."""

    # A list of the pipeline, set while it runs backward. Autograd calls
    # InputGradient.backward, so the list cannot be one of its arguments.
    for_weight_pass = None

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
        if self.bias is not None:
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


# ---- A pipeline of chunks


class VirtualPipeline(lesson05.Pipeline):
    """Lesson 05's pipeline on ranks that hold several chunks of layers each.

    Before each forward and backward pass, `become` sets which virtual stage the rank
    is. Ranks are in a circle: chunk c of rank P − 1 sends to chunk c + 1 of rank 0.
    """

    def __init__(self, chunks: list[nn.Module], loss_of, groups):
        super().__init__(chunks[0], loss_of, groups)
        self.chunks = chunks
        self.rank_before = (self.pp.rank() - 1) % self.pp.size()
        self.rank_after = (self.pp.rank() + 1) % self.pp.size()

    def run(self, actions: list[tuple], micro_batches: list) -> Tensor:
        """Run all actions. Return the sum of the losses; 0 without the last stage."""
        self.in_flight_by_chunk = [{} for _ in self.chunks]
        self.later = {}  # (chunk, micro-batch) → what its weight pass needs
        return super().run(actions, micro_batches)

    def become(self, chunk: int) -> None:
        """Make this rank the virtual stage whose layers are in this chunk.

        Lesson 05's forward and backward read these attributes. There a rank has one
        stage, so they are set once, in __init__.
        """
        P = self.pp.size()
        self.chunk = chunk
        self.stage = chunk * P + self.pp.rank()
        self.stage_module = self.chunks[chunk]
        self.first = self.stage == 0
        self.last = self.stage == len(self.chunks) * P - 1
        self.in_flight = self.in_flight_by_chunk[chunk]

    def forward(self, which: tuple[int, int]) -> None:
        """Run a micro-batch through one of this rank's chunks."""
        chunk, i = which
        self.become(chunk)
        super().forward(i)

    def backward(self, which: tuple[int, int]) -> None:
        """Run backward of a chunk; SplitLinears compute dL/dx only."""
        chunk, i = which
        self.become(chunk)
        SplitLinear.for_weight_pass = self.later.setdefault(which, [])
        super().backward(i)
        SplitLinear.for_weight_pass = None

    def weight(self, which: tuple[int, int]) -> None:
        """Compute the weight gradients that backward of this micro-batch left."""
        if which not in self.later:
            raise ValueError(f"W of micro-batch {which[1] + 1} before its B")
        for linear, x, grad_y in self.later.pop(which):
            linear.add_weight_gradient(x, grad_y)


def chunks_of_model(full: nn.Module, v: int, pp, split: bool) -> tuple[list, dict]:
    """This rank's v chunks of layers, and the names of their parameters.

    split: with SplitLinears, for weight passes.
    """
    chunks = []
    names = {}
    for chunk in range(v):
        model = copy.deepcopy(full)
        if split:
            split_linears(model)
        # Before layers are removed: layer 0 of a chunk may be layer 4 of the model.
        name_of = {p: name for name, p in model.named_parameters()}
        number = chunk * pp.size() + pp.rank()
        chunks.append(lesson05.slice_stage(model, number, v * pp.size()))
        for p in chunks[-1].parameters():
            names[p] = name_of[p]
    return chunks, names


# ==== RUN

KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def main(args, report: lesson00.Report) -> None:
    """Run one batch by each schedule, and compare with one process."""
    groups = lesson05.make_mesh({"pp": args.ranks, "dp": 1, "tp": 1}, args.timeout)
    # The same seed on every rank: all have the same model and batch.
    full = lesson02.make_transformer(args)
    batch = lesson02.make_batches(__doc__, args, 1)[0]
    micro_batches = lesson05.make_microbatches(batch, groups, args.microbatches, False)
    # Each micro-batch's loss is divided by the targets of the batch (lesson 05).
    targets = int((batch[1] != lesson02.IGNORE).sum())

    show_chunks(report, args)
    runs = {}
    warm_up(full, micro_batches, targets, groups)
    for kind in KINDS:
        # If your edit raises an error in one run, the others continue.
        with report.guard(kind):
            runs[kind] = run_schedule(kind, full, micro_batches, targets, groups, args)
    report.section("When each rank computed: all schedules to one scale")
    show_timelines(report, runs)
    show_bubbles(report, runs, args)
    if "zero-bubble" in runs:
        show_weight_passes(report, runs["zero-bubble"].pipeline)
    show_memory(report, runs, args)
    expected = one_process(full, micro_batches, targets)
    loss = lesson02.mean_loss(full(batch[0]), batch[1]).detach()  # without loss_part
    allowed = lesson00.ALLOWED_LOSS[args.dtype]
    report.agree("losses: batch", expected["loss"], loss, allowed)
    show_gradients(report, runs, expected)
    show_messages(report, runs, args)
    show_pytorch(report, full, micro_batches, targets, groups, expected, args)


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError if the model cannot be built or split."""
    P = args.ranks
    args.tp = 1
    args.dropout = 0.0
    args.clip = 1.0
    args.microbatches = args.microbatches or max(8, 2 * P)
    args.chunks = args.chunks or min(2, P)
    args.layers = args.layers or max(8, args.chunks * P, 2 * P)
    args.batch_size = args.batch_size or 2 * args.microbatches
    if P == 1 and args.chunks > 1:
        raise ValueError(f"--chunks {args.chunks}: one rank has no other to wait for")
    if not 0 <= args.sleep < 1e5:
        raise ValueError(f"--sleep {args.sleep}: must be at least 0 and below 100000")
    lesson00.must_divide(args, "microbatches", P, "(ranks; interleaved: rounds of P)")
    lesson00.must_divide(args, "batch_size", args.microbatches, "(--microbatches)")
    if args.layers < args.chunks * P:
        text = f"--layers {args.layers}: fewer than v·P = {args.chunks * P}"
        raise ValueError(f"{text}; take --layers {args.chunks * P}")
    args.mesh = f"pp {P}"
    size = lesson02.transformer_sizes(args)
    b = args.batch_size // args.microbatches
    return dict(size, T=1, P=P, M=args.microbatches, v=args.chunks, b=b)


class ScheduleRun:
    """What one schedule did on this rank."""

    def __init__(self, kind, actions, times, pipeline, names, loss):
        self.actions = actions
        # Its length if t_F = t_B = t_W = 1.
        self.planned = max(end for _, end in times.values())
        self.pipeline = pipeline
        self.loss = loss
        self.gradients = {names[p]: p.grad for p in names if p.grad is not None}
        self.events = gather_objects(pipeline.events)
        # Seconds, mean over ranks. It also makes events' times relative to the start.
        self.computing = from_first_start(self.events, kind)
        self.length = max(of_rank[-1]["end"] for of_rank in self.events)


def chunks_of(kind: str, args) -> int:
    """Chunks of layers on each rank."""
    return args.chunks if kind == "interleaved" else 1


def cost_of(kind: str, unit: float, v: int) -> dict[str, float]:
    """How long an action of a chunk takes if t_F = t_B = t_W = unit in a stage."""
    # Without weight passes, a backward pass computes dL/dx and dL/dW.
    backward = 1 if kind == "zero-bubble" else 2
    return {"forward": unit / v, "backward": backward * unit / v, "weight": unit / v}


def lists_of(kind: str, v: int, args) -> list[list]:
    """Of each rank: (phase, virtual stage, micro-batch), as `plan` takes them."""
    P = args.ranks
    lists = []
    for rank in range(P):
        actions = actions_of(kind, rank, P, args.microbatches, v)
        lists.append([(phase, chunk * P + rank, i) for phase, (chunk, i) in actions])
    return lists


def loss_part(targets: int, logits_bSV: Tensor, target_bS: Tensor) -> Tensor:
    """What a micro-batch adds to the mean loss of the batch (lesson 05)."""
    logits = logits_bSV.transpose(1, 2)
    loss_bS = F.cross_entropy(logits, target_bS, reduction="none")
    return lesson05.part_of_mean(loss_bS, targets)


def run_schedule(kind, full, micro_batches, targets, groups, args) -> ScheduleRun:
    """One batch through a pipeline."""
    v = chunks_of(kind, args)
    chunks, names = chunks_of_model(full, v, groups["pp"], kind == "zero-bubble")
    pipeline = MeasuredPipeline(
        chunks, partial(loss_part, targets), groups, cost_of(kind, args.sleep / 1000, v)
    )
    # Lists that do not fit together are found here, by all ranks, before any waits.
    times = plan(lists_of(kind, v, args), v * args.ranks - 1, cost_of(kind, 1.0, v))
    actions = actions_of(kind, groups["pp"].rank(), args.ranks, args.microbatches, v)
    for phase in ("forward", "backward"):  # METER counts what is sent inside
        method = lesson00.METER.phase(kind, phase)(getattr(pipeline, phase))
        setattr(pipeline, phase, method)
    dist.barrier()  # one start for the timeline
    loss = pipeline.run(actions, micro_batches)
    return ScheduleRun(kind, actions, times, pipeline, names, loss)


def warm_up(full, micro_batches, targets, groups) -> None:
    """The first passes of a process are slow: run them before anything is measured."""
    # With this one schedule, nearly all functions of the others have run as well.
    chunks, _ = chunks_of_model(full, 1, groups["pp"], split=True)
    actions = [("forward", (0, 0)), ("backward", (0, 0)), ("weight", (0, 0))]
    pipeline = MeasuredPipeline(chunks, partial(loss_part, targets), groups)
    pipeline.run(actions, micro_batches[:1])


def one_process(full, micro_batches, targets: int) -> dict[str, Tensor]:
    """The loss and all gradients of the same micro-batches, one after the other."""
    model = copy.deepcopy(full)
    total = 0.0
    for tokens_bS, target_bS in micro_batches:
        # In the order in which each stage takes them: sums have the same rounding.
        loss = loss_part(targets, model(tokens_bS), target_bS)
        loss.backward()
        total = total + loss.detach()
    expected = {name: p.grad for name, p in model.named_parameters()}
    return dict(expected, loss=total)


class MeasuredPipeline(PipelineMeters, VirtualPipeline):
    """A pipeline that also records events and the bytes that it holds."""


# ---- The sections of the output, in order


def show_chunks(report: lesson00.Report, args) -> None:
    """Which layers each rank holds."""
    rows = []
    for rank in range(args.ranks):
        row = {"": f"rank {rank}", "one chunk": layers_in(args, rank, 1)}
        for chunk in range(args.chunks):
            number = chunk * args.ranks + rank
            row[f"chunk {chunk}"] = layers_in(args, number, args.chunks)
        rows.append(row)
    report.section("The layers that each rank holds: in one chunk, or interleaved")
    report.say("E: embedding in front, H: last norm and head behind")
    report.table(rows)


def layers_in(args, number: int, v: int) -> str:
    """The layers of virtual stage `number`, as slice_stage cuts; with E and H."""
    last = v * args.ranks - 1
    layers = torch.arange(args.layers).tensor_split(last + 1)[number].tolist()
    text = " ".join(str(layer) for layer in layers)
    return ("E " if number == 0 else "") + text + (" H" if number == last else "")


def show_bubbles(report, runs: dict[str, ScheduleRun], args) -> None:
    """The bubble, waiting/computing: by formula, from the lists, and as measured."""
    computing = 3 * args.microbatches  # of a rank, in units of t_F = t_B = t_W
    rows = []
    waits = {kind: run.planned - computing for kind, run in runs.items()}
    for kind, run in runs.items():
        wait = waits[kind]
        off = abs(wait - bubble_of(kind, args.ranks, chunks_of(kind, args)))
        text = f"by its lists a rank waits {wait:g}, {off:g} off the formula"
        holds = report.check(f"plan: bubble of {kind}, by its lists", off, 1e-9, text)
        # No action is shorter than stated, so a run cannot be shorter than its plan.
        early = max(0.0, run.planned * args.sleep / 1000 - run.length)
        report.check(f"plan: {kind} is not shorter than its lists", early, 1e-3)
        row = {"schedule": kind, "a rank waits": WAITS[kind]}
        row["="] = marked(f"{wait:g}", holds)
        row["/computing"] = f"{wait / computing:.3f}"
        # On a busy machine it is mostly larger: one late action delays others.
        row["measured"] = f"{run.length / run.computing - 1:.3f}"
        rows.append(row)
    report.section("The bubble: waiting/computing")
    report.table(rows)
    text = f"In column =, 1 is t_F = t_B = t_W: {args.sleep:g} ms at least. "
    if args.ranks > 1 and len(runs) == len(KINDS):
        percent = {kind: f"{100 * waits[kind] / waits['1f1b']:.0f} %" for kind in KINDS}
        text += f"By its list interleaved waits {percent['interleaved']} as long as "
        text += f"1F1B, zero bubble {percent['zero-bubble']}. "
    text += "More than that comes from messages and shared cores, so column measured "
    report.say(f"{text}is not judged: on a busy machine 1F1B can be slower than GPipe.")


def show_weight_passes(report, pipeline: MeasuredPipeline) -> None:
    """Zero bubble: each weight pass has dL/dW of every linear of the rank."""
    modules = nn.ModuleList(pipeline.chunks).modules()  # also those that stay whole
    linears = sum(isinstance(x, (nn.Linear, SplitLinear)) for x in modules)
    off = max(abs(count - linears) for count in pipeline.linears)
    text = f"weight passes of {pipeline.linears} linears, not of {linears} each"
    report.check("plan: linears in W, zero-bubble", off, text=text)
    report.say(f"A weight pass of rank 0 computes dL/dW of its {linears} linears.")


def show_memory(report, runs: dict[str, ScheduleRun], args) -> None:
    """Micro-batches in flight, and the bytes held for backward, at the peak."""
    # Rows are ranks, so that any number of ranks fits the screen.
    flight = [{"in flight, at most": f"rank {rank}"} for rank in range(args.ranks)]
    held = [{"bytes at the peak": f"rank {rank}"} for rank in range(args.ranks)]
    peaks = {}
    for kind, run in runs.items():
        # Each rank measures itself; every rank gets all numbers.
        of_ranks = gather_objects(run.pipeline.bytes_held(run.actions))
        v = chunks_of(kind, args)
        for rank, measured in enumerate(of_ranks):
            most = most_in_flight(kind, rank, args.ranks, args.microbatches, v)
            name = f"memory: {kind}, in flight on rank {rank}"
            flight[rank][kind] = cell(report, name, measured["in flight"], str(most))
            peaks[kind, rank] = measured["bytes at the peak"]
            name = f"memory: {kind}, bytes at the peak on rank {rank}"
            expected = str(measured["expected"])
            held[rank][kind] = cell(report, name, peaks[kind, rank], expected)
            for what in ("bytes left", "left in flight"):  # must be 0
                text = f"{measured[what]:,} when all actions have run"
                name = f"memory: {kind}, {what} on rank {rank}"
                report.check(name, measured[what], text=text)
    report.section("What each rank holds for backward, measured")
    report.say("in flight: passes (interleaved: of a chunk) whose backward is to come")
    report.say("bytes: saved by autograd, and what weight passes still need")
    report.table(flight)
    report.table(held)
    if args.ranks > 1 and len(runs) == len(KINDS):
        first = 100 * peaks["1f1b", 0] / peaks["gpipe", 0]
        last = peaks["zero-bubble", args.ranks - 1] / peaks["1f1b", args.ranks - 1]
        report.say(
            f"On rank 0, 1F1B holds {first:.0f} % of GPipe. On the last rank, zero "
            f"bubble holds {last:.1f} times 1F1B: its weight passes come later."
        )


def show_gradients(report, runs: dict[str, ScheduleRun], expected: dict) -> None:
    """Loss and gradients of each schedule: bitwise those of one process."""
    rows = []
    for kind, run in runs.items():
        # Only the rank of the last stage has a loss; the others add 0.
        found = {"loss": lesson00.all_reduce(run.loss, run.pipeline.pp)}
        for of_rank in gather_objects(run.gradients):
            found.update(of_rank)
        diffs = {}
        for name, x in found.items():
            check = f"gradients: {name}, {kind}"
            diffs[name] = report.agree(check, x, expected[name], 0.0)
        missing = len(expected) - len(found)
        text = f"{missing} parameters have none"
        report.check(f"gradients: all parameters have one, {kind}", missing, text=text)
        worst = max(diffs.values())
        row = {"schedule": kind}
        row["loss"] = marked(f"{found['loss'].item():#.7g}", diffs["loss"] == 0)
        row["gradients"] = len(found) - 1
        row["diff"] = marked(f"{worst:.1e}", worst == missing == 0)
        rows.append(row)
    report.section("Gradients: bitwise those of one process")
    report.table(rows)


def show_messages(report, runs: dict[str, ScheduleRun], args) -> None:
    """Messages of rank 0: M, or (2·v − 1)·M with v chunks."""
    formulas = {}
    for kind, run in runs.items():
        v = chunks_of(kind, args)
        rank = run.pipeline.pp.rank()
        # The last virtual stage has none after it, the first one none before it.
        forward = v - 1 if rank == args.ranks - 1 else v
        backward = v - 1 if rank == 0 else v
        for phase, chunks in (("forward", forward), ("backward", backward)):
            times = f"{chunks}·M" if chunks != 1 else "M"
            count = 2 * chunks * args.microbatches  # a header and a tensor each
            if chunks:
                formula = f"{times}·(40 + e·b·S·D)"
                formulas[kind, phase, "send/recv", "pp"] = (count, formula)
    report.section("Messages of rank 0: a header of 5 int64, and b·S·D elements each")
    report.ledger(on_axes(formulas, {"pp": args.ranks}))
    if args.ranks > 1:
        text = f"{2 * args.chunks - 1} messages with interleaved, 1 with the others"
        report.say(f"Rank 0 sends per micro-batch {text}.")


# ---- The same by PyTorch


def show_pytorch(report, full, micro_batches, targets, groups, expected, args) -> None:
    """PyTorch's schedules: the bubble by their lists, and the gradients of two."""
    report.section("By PyTorch: two chunks per rank, t_F = t_B = t_W = 1")
    if args.ranks == 1 or args.microbatches < 2 * args.ranks:
        report.say("These schedules require 2 ranks and M = 2·P or more.")
        return
    rows = []
    for name, about in PYTORCH.items():
        with report.guard(f"PyTorch's {name}", is_formula=True):
            M = args.microbatches
            made = about.make(full, partial(loss_part, targets), groups["pp"], M)
            lists = lists_by_pytorch(made[0])
            row = pytorch_row(name, lists, M, plan)
            if name == "interleaved":  # action by action as this script
                theirs = lists_by_pytorch(made[0], "backward")
                check = f"PyTorch: {name}: the same lists"
                holds = report.check(check, lists_of(name, 2, args) != theirs)
                row["waits"] = marked(row["waits"], holds)
            if about.is_run:
                found = about.gradients(*made, micro_batches)
                diff = max(lesson00.rel_diff(found[x], expected[x]) for x in found)
                diff = max(gather_objects(diff))
                check = f"PyTorch: gradients, {name}"
                holds = report.check(check, diff, lesson00.ALLOWED[args.dtype])
                row["gradients"] = marked(f"{diff:.1e}", holds)
            rows.append(row)
    report.table(rows)
    report.say(
        "gradients: largest relative difference. in flight: passes through a chunk, on "
        "ranks 0, 1, …. The last three have weight passes as well. Of ZBV and "
        "DualPipeV only the lists are read: there rank r has stages r and 2·P − 1 − r, "
        "so chunks form a V."
    )


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    positive = lesson00.positive
    defaults = {"--hidden": 32, "--heads": 4, "--kv-heads": 2, "--seq-len": 32}
    for flag, default in dict(defaults, **{"--vocab-size": 257}).items():
        add(flag, type=positive, default=default)
    text = "M (8, or 2·P if larger); a multiple of P"
    add("--microbatches", type=positive, default=0, help=text)
    text = "v, chunks of layers per rank when interleaved (2; 1 on one rank)"
    add("--chunks", type=positive, default=0, help=text)
    add("--layers", type=positive, default=0, help="L (8, or v·P if larger)")
    add("--batch-size", type=positive, default=0, help="B (2·M)")
    text = "milliseconds that t_F, t_B and t_W take at least (60; 0: their own time)"
    add("--sleep", type=float, default=60.0, metavar="MS", help=text)
    lesson00.launch(main, sizes, parser)
