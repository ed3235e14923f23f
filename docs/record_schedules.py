"""The scene of record.py that is in time: GPipe and 1F1B on four stages.

Stages compute nothing: they sleep, twice as long backward as forward. Times, messages
and bytes are those of the run.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from recorder import clear, difference, row_of
from torch import nn

KINDS = {"gpipe": "GPipe", "1f1b": "1F1B"}
MICRO_BATCHES = 8
FORWARD = 0.05  # seconds


class Sleep(torch.autograd.Function):
    """Takes the time of a stage's forward pass, and twice that backward."""

    @staticmethod
    def forward(ctx, x, unit, seconds, shape):
        ctx.seconds = seconds
        ctx.like = x
        time.sleep(seconds)
        return unit.new_zeros(shape)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        floating = ctx.like.is_floating_point()  # tokens have no gradient
        return torch.zeros_like(ctx.like) if floating else None, grad.sum(), None, None


class SleepingStage(nn.Module):
    """A stage of a pipeline that computes nothing, in the time of one that would."""

    def __init__(self, seconds: float, shape: list[int]):
        super().__init__()
        self.seconds = seconds
        self.shape = shape
        self.unit = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return Sleep.apply(x, self.unit, self.seconds, self.shape)


def record(script, group, recorder) -> dict:
    lesson = script.lesson00
    P = group.size()
    M = MICRO_BATCHES
    rank = group.rank()
    groups = script.lesson05.make_mesh(dict(pp=P, dp=1, tp=1), 60)
    runs = {}
    for kind in KINDS:
        one_run(script, groups, kind, 1, 0.001)  # the first one warms up
        tries = [one_run(script, groups, kind, M, FORWARD) for _ in range(3)]
        runs[kind] = min(tries, key=duration)
    clear(lesson)
    message = "2·M × (40 + b·S·D·e)/2"  # headers and activations: half of either size
    formulas = {}
    for kind, run in runs.items():
        for call, n in run[rank]["calls"].items():
            lesson.COMM.calls[call._replace(run=kind)] = n
            lesson.COMM.bytes[call._replace(run=kind)] = run[rank]["bytes"][call]
        if rank < P - 1:
            formulas[lesson.Call(kind, "forward", "send/recv", "pp")] = message
        if rank > 0:
            formulas[lesson.Call(kind, "backward", "send/recv", "pp")] = message
    about = recorder.recording(formulas, {"M": M, "b": 1, "S": 4, "D": 8, "e": 4})
    about["time"] = {"runs": list(KINDS.values()), "unit": "ms"}
    about["events"] = moments(runs, P, M, recorder.steps[0]["says"])
    return about


def one_run(script, groups, kind: str, M: int, seconds: float) -> list[dict]:
    """Of each stage: when it computed, what it sent when, and what was counted."""
    lesson = script.lesson00
    lesson05 = script.lesson05
    stage = groups["pp"].rank()
    sent = []
    original = lesson05.send

    def counted():
        calls = lesson.COMM.bytes.items()
        return {row_of(call._replace(run=kind)): n for call, n in calls}

    def send(x, label, dst, group):
        before = counted()
        message = original(x, label, dst, group)
        sent.append({"at": time.time(), "bytes": difference(counted(), before)})
        return message

    clear(lesson)
    model = SleepingStage(seconds, [1, 4, 8])
    pipeline = script.MeasuredPipeline([model], lambda y, _: y.sum(), groups)
    steps = script.steps_of(kind, stage, groups["pp"].size(), M, 1)
    lesson05.send = send
    dist.barrier()
    pipeline.run(steps, [torch.zeros(2, 1, 4, dtype=torch.int64)] * M)
    lesson05.send = original
    part = {"spans": pipeline.events, "sent": sent}
    part["calls"] = dict(lesson.COMM.calls)
    part["bytes"] = dict(lesson.COMM.bytes)
    return lesson.gather_objects(part)


def begin_and_end(run: list[dict]) -> tuple[float, float]:
    spans = [span for of_stage in run for span in of_stage["spans"]]
    return min(s["start"] for s in spans), max(s["end"] for s in spans)


def duration(run: list[dict]) -> float:
    begin, end = begin_and_end(run)
    return end - begin


def spans_and_messages(runs: dict[str, list]) -> list[tuple]:
    """(when, stage, a span or a message) of both runs, in ms from each run's start."""
    parts = []
    for kind, run in runs.items():
        begin, _ = begin_and_end(run)
        for stage, of_stage in enumerate(run):
            for span in of_stage["spans"]:
                about = {"run": KINDS[kind], "what": span["what"]}
                about["start"] = round(1e3 * (span["start"] - begin), 1)
                about["end"] = round(1e3 * (span["end"] - begin), 1)
                about["microbatch"] = span["microbatch"]
                parts.append((about["start"], stage, about))
            for message in of_stage["sent"]:
                when = round(1e3 * (message["at"] - begin), 1)
                parts.append((when, stage, {"bytes": message["bytes"]}))
    return sorted(parts, key=lambda part: part[:2])


def moments(runs: dict[str, list], P: int, M: int, start: str) -> list[dict]:
    """What begins, or is sent, at about the same time is one event."""
    parts = spans_and_messages(runs)
    spans = [(stage, part) for _, stage, part in parts if "what" in part]
    shortest = min(span["end"] - span["start"] for _, span in spans)
    together = []
    for part in parts:
        if not together or part[0] - together[-1][0][0] > shortest / 2:
            together.append([])
        together[-1].append(part)
    ranks = [{} for _ in range(P)]
    events = [dict(kind="hold", time=0, says=start, ranks=ranks)]
    ends = [group[0][0] for group in together[1:]]
    ends.append(max(span["end"] for _, span in spans))
    for group, end in zip(together, ends):
        events.append(moment(group, end, spans, P))
    events.append(the_end(spans, P, M))
    return events


def moment(group: list[tuple], end: float, spans: list, P: int) -> dict:
    """One event: what begins now, and how things stand halfway to the next event."""
    begin = group[0][0]
    ranks = []
    for stage in range(P):
        own = {}
        for _, of_stage, part in group:
            if of_stage == stage and "what" in part:
                own.setdefault("spans", []).append(part)
            elif of_stage == stage:
                sums = own.setdefault("bytes", {})
                for row, n in part["bytes"].items():
                    sums[row] = sums.get(row, 0) + n
        ranks.append(own)
    then = (begin + end) / 2
    doing = [state(then, spans, name, P) for name in KINDS.values()]
    says = f"{begin:.0f} to {end:.0f} ms. {doing[0]}; {doing[1]}."
    return dict(kind="time", time=begin, says=says, ranks=ranks)


def kept_at(now: float, spans: list, name: str, P: int) -> list[int]:
    """Micro-batches whose activations each stage holds: forward begun, backward not
    over."""
    kept = [0] * P
    for stage, span in spans:
        if span["run"] != name:
            continue
        if span["what"] == "forward" and span["start"] <= now:
            kept[stage] += 1
        if span["what"] == "backward" and span["end"] <= now:
            kept[stage] -= 1
    return kept


def state(now: float, spans: list, name: str, P: int) -> str:
    """In words: which stages compute."""
    of_run = [(stage, span) for stage, span in spans if span["run"] == name]
    busy = {stage for stage, span in of_run if span["start"] <= now < span["end"]}
    if now >= max(span["end"] for _, span in of_run):
        return f"{name} is done"
    if len(busy) == P:
        return f"{name} computes on all stages"
    if not busy:
        return f"{name} waits"
    return f"{name} computes on {', '.join(str(stage) for stage in sorted(busy))}"


def the_end(spans: list, P: int, M: int) -> dict:
    """Both runs as a whole: waiting/computing, and the most that was kept."""
    waits = []  # waiting/computing, as everywhere
    most = {}
    for name in KINDS.values():
        of_run = [span for _, span in spans if span["run"] == name]
        took = max(s["end"] for s in of_run) - min(s["start"] for s in of_run)
        busy = sum(s["end"] - s["start"] for s in of_run)
        waits.append(f"{name}: {took * P / busy - 1:.3f} in {took:.0f} ms")
        kept = [kept_at(span["start"], spans, name, P) for span in of_run]
        most[name] = [max(of_stage) for of_stage in zip(*kept)]
    rule = f"Predicted: (P − 1)/M = {(P - 1) / M:.3f}."
    says = f"Waiting/computing: {waits[0]}, {waits[1]}. {rule}"
    end = max(span["end"] for _, span in spans)
    ranks = [{} for _ in range(P)]
    return dict(kind="check", time=end, says=says, kept=most, most=True, ranks=ranks)
