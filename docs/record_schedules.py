"""The scenes of record.py that are in time: two schedules each, on four stages.

Stages compute nothing: a pass takes a stated time, as with script 14's --sleep, and
backward twice as long as forward. Times, messages and bytes are those of the run.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from recorder import SCHEDULES, Call, clear, difference, gather_objects, row_of
from torch import nn

FORWARD = 0.05  # seconds
CHUNKS = {"interleaved": 2}  # parts of its layers that a rank holds; otherwise 1


class IdleStage(nn.Module):
    """A stage of a pipeline that computes nothing: its pipeline takes the time."""

    def __init__(self, shape: list[int]):
        super().__init__()
        self.unit = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return x + self.unit if x.is_floating_point() else self.unit * 1  # tokens


def record(script, group, recorder, kinds: list[str], M: int) -> dict:
    lesson = script.lesson00
    P = group.size()
    rank = group.rank()
    groups = script.lesson05.make_mesh(dict(pp=P, dp=1, tp=1), 60)
    runs = {}
    for kind in kinds:
        one_run(script, groups, kind, M, 0.001)  # the first one warms up
        tries = [one_run(script, groups, kind, M, FORWARD) for _ in range(3)]
        runs[kind] = min(tries, key=duration)
    clear(lesson)
    message = "(40 + b·S·D·e)/2"  # headers and activations: half of either size
    formulas = {}
    for kind, run in runs.items():
        lesson.METER.calls.update(run[rank]["calls"])
        v = CHUNKS.get(kind, 1)
        for phase, last in (("forward", P - 1), ("backward", 0)):
            passes = v - (rank == last)  # the model's last, or first, chunk sends none
            calls = "2·M" if passes == 1 else f"{2 * passes}·M"
            if passes:
                call = Call(kind, phase, "send/recv", "pp")
                formulas[call] = f"{calls} × {message}"
    about = recorder.recording(formulas, {"M": M, "b": 1, "S": 4, "D": 8, "e": 4})
    about["time"] = {"runs": [SCHEDULES[kind] for kind in kinds], "unit": "ms"}
    if chunks := {SCHEDULES[kind]: CHUNKS[kind] for kind in kinds if kind in CHUNKS}:
        about["time"]["chunks"] = chunks
    says = [step["says"] for step in recorder.steps]
    about["events"] = moments(runs, P, M, says)
    return about


def one_run(script, groups, kind: str, M: int, seconds: float) -> list[dict]:
    """Of each stage: when it computed, what it sent when, and what was counted."""
    lesson = script.lesson00
    lesson05 = script.lesson05
    stage = groups["pp"].rank()
    v = CHUNKS.get(kind, 1)
    sent = []
    original = lesson05.send

    def counted():
        calls = lesson.METER.calls.items()
        return {row_of(Call(*call)): sum(payloads) for call, payloads in calls}

    def send(x, label, dst, group):
        before = counted()
        message = original(x, label, dst, group)
        now = {"at": time.time(), "to": dst, "bytes": difference(counted(), before)}
        sent.append(now)
        return message

    clear(lesson)
    chunks = [IdleStage([1, 4, 8]) for _ in range(v)]
    cost = script.cost_of(kind, seconds, v)
    pipeline = script.MeasuredPipeline(chunks, lambda y, _: y.sum(), groups, cost)
    actions = script.actions_of(kind, stage, groups["pp"].size(), M, v)
    for phase in ("forward", "backward"):
        method = lesson.METER.phase(kind, phase)(getattr(pipeline, phase))
        setattr(pipeline, phase, method)
    lesson05.send = send
    dist.barrier()
    pipeline.run(actions, [torch.zeros(2, 1, 4, dtype=torch.int64)] * M)
    lesson05.send = original
    part = {"spans": pipeline.events, "sent": sent}
    part["calls"] = dict(lesson.METER.calls)
    return gather_objects(part)


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
                about = {"run": SCHEDULES[kind], "what": span["what"]}
                about["start"] = round(1e3 * (span["start"] - begin), 1)
                about["end"] = round(1e3 * (span["end"] - begin), 1)
                about["microbatch"] = span["microbatch"]
                if span["chunk"]:
                    about["chunk"] = span["chunk"]
                parts.append((about["start"], stage, about))
            for message in of_stage["sent"]:
                when = round(1e3 * (message["at"] - begin), 1)
                about = {"run": SCHEDULES[kind], "to": message["to"], "at": when}
                parts.append((when, stage, dict(about, bytes=message["bytes"])))
    return sorted(parts, key=lambda part: part[:2])


def moments(runs: dict[str, list], P: int, M: int, says: list[str]) -> list[dict]:
    """What begins, or is sent, at about the same time is one event."""
    parts = spans_and_messages(runs)
    spans = [(stage, part) for _, stage, part in parts if "what" in part]
    shortest = min(span["end"] - span["start"] for _, span in spans)
    together = []
    for part in parts:
        if not together or part[0] - together[-1][0][0] > shortest / 2:
            together.append([])
        together[-1].append(part)
    names = [SCHEDULES[kind] for kind in runs]
    ranks = [{} for _ in range(P)]
    events = [dict(kind="hold", time=0, says=says[0], ranks=ranks)]
    ends = [group[0][0] for group in together[1:]]
    ends.append(max(span["end"] for _, span in spans))
    for group, end in zip(together, ends):
        events.append(moment(group, end, spans, P, names))
    events.append(the_end(spans, P, says[1], names))
    return events


def moment(group: list, end: float, spans: list, P: int, names: list[str]) -> dict:
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
                message = {key: part[key] for key in ("run", "to", "at")}
                own.setdefault("messages", []).append(message)
        ranks.append(own)
    then = (begin + end) / 2
    doing = [state(then, spans, name, P) for name in names]
    second = doing[1].replace("Zero", "zero")
    says = f"{begin:.0f} to {end:.0f} ms; at {then:.0f} ms: {doing[0]}; {second}."
    return dict(kind="time", time=begin, says=says, ranks=ranks)


def kept_at(now: float, spans: list, name: str, P: int) -> list[float]:
    """Micro-batches whose activations each stage holds: forward begun; backward, or the
    weight pass if there is one, not over. A chunk of a stage holds a part of them."""
    of_run = [(stage, span) for stage, span in spans if span["run"] == name]
    last = "weight" if any(s["what"] == "weight" for _, s in of_run) else "backward"
    v = 1 + max(span.get("chunk", 0) for _, span in of_run)
    kept = [0] * P
    for stage, span in of_run:
        if span["what"] == "forward" and span["start"] <= now:
            kept[stage] += 1
        if span["what"] == last and span["end"] <= now:
            kept[stage] -= 1
    return [n / v if n % v else n // v for n in kept]


def state(now: float, spans: list, name: str, P: int) -> str:
    """In words: which stages compute."""
    of_run = [(stage, span) for stage, span in spans if span["run"] == name]
    busy = {stage for stage, span in of_run if span["start"] <= now < span["end"]}
    if now >= max(span["end"] for _, span in of_run):
        return f"{name} is done"
    if len(busy) == P:
        return f"{name} computes on all ranks"
    if not busy:
        return f"{name} waits"
    word = "rank" if len(busy) == 1 else "ranks"
    return f"{name} computes on {word} {', '.join(map(str, sorted(busy)))}"


def the_end(spans: list, P: int, rule: str, names: list[str]) -> dict:
    """Both runs as a whole: waiting/computing, and the most that was kept."""
    waits = []  # waiting/computing, as everywhere
    most = {}
    for name in names:
        of_run = [span for _, span in spans if span["run"] == name]
        took = max(s["end"] for s in of_run) - min(s["start"] for s in of_run)
        busy = sum(s["end"] - s["start"] for s in of_run)
        waits.append(f"{name}: {took * P / busy - 1:.3f} in {took:.0f} ms")
        kept = [kept_at(span["start"], spans, name, P) for span in of_run]
        most[name] = [max(of_stage) for of_stage in zip(*kept)]
    says = f"Waiting/computing. {waits[0]}. {waits[1]}. {rule}"
    end = max(span["end"] for _, span in spans)
    ranks = [{} for _ in range(P)]
    return dict(kind="check", time=end, says=says, kept=most, most=True, ranks=ranks)
