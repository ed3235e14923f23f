"""Script 14: four schedules are lists of actions, as short as their formulas say; what
a rank holds is measured, so whatever keeps a graph alive is seen; the own runs.
"""

import re
from collections import Counter
from itertools import pairwise, product

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import SCHEDULE_RUNS, SCHEDULES, flag, kind_of, over, passed, rows_with

script = jobs.load(SCHEDULES)
lesson = script.lesson05
pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


# Lists of steps, before any rank is started.


def lists_of(kind: str, P: int, M: int, v: int) -> list[list]:
    """Of each rank: (phase, virtual stage, micro-batch)."""
    lists = []
    for rank in range(P):
        steps = script.actions_of(kind, rank, P, M, v)
        lists.append([(phase, c * P + rank, i) for phase, (c, i) in steps])
    return lists


@pytest.mark.parametrize("kind", script.KINDS)
def test_lists_are_complete_and_as_short_as_the_formula(kind):
    """Each pass once, backward after forward; the whole takes M·(t_F + t_B + t_W) and
    the bubble, for times that differ (zero bubble's: t_W ≤ t_F, t_B)."""
    for P, rounds, v in product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 4)):
        M = P * rounds
        if v > 1 and (kind != "interleaved" or P == 1):
            continue
        lists = lists_of(kind, P, M, v)
        phases = ["forward", "backward"] + ["weight"] * (kind == "zero-bubble")
        for rank, steps in enumerate(lists):
            expected = product(phases, range(rank, v * P, P), range(M))
            assert Counter(steps) == Counter(expected), (P, M, v, rank)
        for t_F, t_B, t_W in ((1, 1, 1), (3, 3, 2), (2, 4, 1)):
            backward = t_B if kind == "zero-bubble" else t_B + t_W
            cost = {"forward": t_F / v, "backward": backward / v, "weight": t_W}
            times = script.plan(lists, v * P - 1, cost)
            took = max(end for _, end in times.values())
            waits = script.bubble_of(kind, P, v, t_F, t_B, t_W)
            computing = M * (t_F + t_B + t_W)
            assert took == pytest.approx(computing + waits), (P, M, v, t_F, t_B, t_W)


def test_the_formula_that_is_printed_is_the_one_that_is_checked(monkeypatch):
    """One text: who edits it sees another number."""
    monkeypatch.setitem(script.WAITS, "1f1b", "(P − 1)·(t_F − t_B·t_W)/v")
    assert script.bubble_of("1f1b", 4, 2, 5.0, 1.5, 2.0) == 3 * (5 - 3) / 2


def test_published_lengths():
    """P 4, M 8: 33 with 1F1B, 28.5 with two chunks, 27 with ZB-H1, of units."""
    lengths = {}
    for kind, v in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        backward = 1 if kind == "zero-bubble" else 2
        cost = {"forward": 1 / v, "backward": backward / v, "weight": 1}
        times = script.plan(lists_of(kind, 4, 8, v), 4 * v - 1, cost)
        lengths[kind] = max(end for _, end in times.values())
    assert lengths == {"1f1b": 33, "interleaved": 28.5, "zero-bubble": 27}


def test_lists_that_do_not_fit_together():
    """A step that needs a later one of its own rank, and two ranks that need each
    other: the next steps are named."""
    lists = lists_of("zero-bubble", 2, 2, 1)
    lists[0].insert(1, lists[0].pop())
    cost = {"forward": 1, "backward": 1, "weight": 1}
    with pytest.raises(ValueError, match=r"all ranks wait.*'weight', 0, 1"):
        script.plan(lists, 1, cost)
    lists = lists_of("1f1b", 2, 2, 1)
    lists[0].remove(("forward", 0, 1))
    lists[0].append(("forward", 0, 1))
    with pytest.raises(ValueError, match=r"'backward', 0, 1.*'forward', 1, 1"):
        script.plan(lists, 1, cost)


# Backward in two parts.


@pytest.mark.parametrize("bias", [True, False])
def test_split_linears_have_the_gradients_of_linears(bias):
    """All bits of dL/dx, and after the weight passes of dL/dW and dL/db."""
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(5, 7), linear(7, 3, bias=bias))
    split = torch.nn.Sequential(linear(5, 7), linear(7, 3, bias=bias))
    split.load_state_dict(model.state_dict())
    script.split_linears(split)
    todo = []
    inputs = torch.randn(3, 2, 4, 5)
    for x, y_grad in zip(inputs, torch.randn(3, 2, 4, 3)):
        got, expected = (x.clone().requires_grad_() for _ in range(2))
        script.SplitLinear.for_weight_pass = []
        split(got).backward(y_grad)
        model(expected).backward(y_grad)
        assert torch.equal(got.grad, expected.grad)
        assert all(
            not x.requires_grad for _, x, _ in script.SplitLinear.for_weight_pass
        )
        todo.append(script.SplitLinear.for_weight_pass)
    assert all(p.grad is None for p in split.parameters())
    for later in todo:
        for linear, x, grad_y in later:
            linear.add_weight_gradient(x, grad_y)
    for p, q in zip(split.parameters(), model.parameters()):
        assert torch.equal(p.grad, q.grad) and not p.grad.requires_grad


# Memory: what autograd holds is measured, so whatever keeps a graph alive is seen.


class Square(torch.nn.Module):
    """Autograd saves one tensor: the input, 32 bytes per row."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x.double() + self.weight).square()


def run_alone(steps, backward=None, forward=None) -> script.MeasuredPipeline:
    """A pipeline of one stage in this process; backward: what replaces its own."""
    group = no_group(1)
    groups = {"pp": group, "pp_backward": group}
    loss_of = lambda y, target: y.sum()
    pipeline = script.MeasuredPipeline([Square()], loss_of, groups)
    if backward is not None:
        pipeline.backward = backward.__get__(pipeline)
    if forward is not None:
        pipeline.forward = forward.__get__(pipeline)
    microbatches = [torch.ones(2, rows, 4) for rows in (1, 5, 2)]
    pipeline.run([(phase, (0, i)) for phase, i in steps], microbatches)
    return pipeline


def test_held_bytes_rise_and_fall():
    """A step per micro-batch, of 1, 5 and 2 rows; at the peak the last two."""
    pipeline = run_alone(lesson.schedule("1f1b", 2, 4, 3))
    changes = [event["bytes"] for event in pipeline.events]
    assert changes == [32, 160, -32, 64, -160, -64]
    assert (pipeline.held.peak, pipeline.held.peak_passes) == (224, 2)
    assert (pipeline.held.now, len(pipeline.held.of_pass)) == (0, 0)
    assert sum(len(of_chunk) for of_chunk in pipeline.in_flight_by_chunk) == 0


def keep_graph(self, which):
    _, y, _ = self.in_flight[which[1]]
    with self.record_event("backward", which[1]):
        y.backward(retain_graph=True)


def keep_loss(self, which):
    _, y, _ = self.in_flight.pop(which[1])
    self.kept = [*getattr(self, "kept", ()), y]
    with self.record_event("backward", which[1]):
        y.backward(retain_graph=True)


def never(self, which):
    """No backward pass at all; the graphs are in a list that nobody thinks of."""
    self.events.append(self.in_flight.pop(which[1]))


@pytest.mark.parametrize("backward", [keep_graph, keep_loss, never])
def test_a_graph_that_is_kept_alive_is_seen(backward):
    pipeline = run_alone(lesson.schedule("1f1b", 0, 1, 3), backward)
    held = pipeline.held
    assert (held.peak_passes, held.peak, held.now) == (3, 8 * 32, 8 * 32)
    held.reset()
    assert (held.peak_passes, held.peak) == (3, 8 * 32), "the next step begins with it"
    for name in ("in_flight", "in_flight_by_chunk", "events", "kept"):
        setattr(pipeline, name, [])
    assert (held.now, len(held.of_pass)) == (0, 0)


def with_auxiliary_graph(self, which):
    script.VirtualPipeline.forward(self, which)
    x, *_ = self.in_flight[which[1]]
    self.kept = [*getattr(self, "kept", ()), self.stage_module(x.float()).mean()]


def test_a_graph_that_is_made_between_passes_is_seen():
    """Of an auxiliary loss, say, that is kept for a log."""
    steps = lesson.schedule("1f1b", 0, 1, 3)
    pipeline = run_alone(steps, forward=with_auxiliary_graph)
    assert pipeline.held.now == 8 * 32
    del pipeline.kept
    assert pipeline.held.now == 0


def with_copies(self, which):
    """Copies in a list, for a picture, say."""
    script.VirtualPipeline.forward(self, which)
    x, *_ = self.in_flight[which[1]]
    self.copies = [*getattr(self, "copies", ()), x.clone()]


def with_a_hook(self, which):
    """A hook that keeps outputs, as a profiler may."""
    self.outputs = getattr(self, "outputs", [])
    keep = lambda module, args, y: self.outputs.append(y.detach())
    with self.stage_module.register_forward_hook(keep):
        script.VirtualPipeline.forward(self, which)


@pytest.mark.parametrize(
    "forward, kept", [(None, 0), (with_copies, 8 * 16), (with_a_hook, 8 * 32)]
)
def test_what_autograd_does_not_hold_is_seen_in_the_process(forward, kept):
    """Eight rows: of x in float32, of y in float64. The script's "bytes left"."""
    pipeline = run_alone(lesson.schedule("1f1b", 0, 1, 3), forward=forward)
    assert (pipeline.held.now, pipeline.left_alive) == (0, kept)


# The script's own runs: who computed when.


@over(SCHEDULE_RUNS)
def test_passes_and_fits_the_screen(run):
    done = passed(run)
    compared = [c for c in done.data["checks"] if kind_of(c) == "gradients"]
    assert all(check["allowed"] == check["diff"] == 0 for check in compared), "bitwise"
    assert len(compared) >= 4 * 50


def events(data: dict) -> list[dict]:
    """Of the timeline: which step a rank computed from when to when."""
    return rows_with(data, "what", "microbatch")


@over(SCHEDULE_RUNS)
def test_timeline(run):
    """Each step once, in the order of its list, and none before what it needs."""
    done = jobs.result(*run)
    P = run[1]
    M = done.data["size"]["M"]
    for kind in script.KINDS:
        v = done.data["size"]["v"] if kind == "interleaved" else 1
        rows = [row for row in events(done.data) if row["run"] == kind]
        for rank in range(P):
            own = [row for row in rows if row["rank"] == rank]
            steps = [(r["what"], (r["chunk"], r["microbatch"])) for r in own]
            assert steps == script.actions_of(kind, rank, P, M, v)
            for one, two in pairwise(own):
                assert one["start"] <= one["end"] <= two["start"]
        ends = {}
        for r in rows:
            ends[r["what"], r["chunk"] * P + r["rank"], r["microbatch"]] = r["end"]
        for r in rows:
            stage = r["chunk"] * P + r["rank"]
            needs = script.needed_by(r["what"], stage, r["microbatch"], v * P - 1)
            if needs is not None:
                assert ends[needs] <= r["start"], (kind, r)
        lines = re.findall(r"^   rank \d+  [^\[]{1,72}$", done.out, re.M)
        assert len(lines) >= 4 * P


@over([run for run in SCHEDULE_RUNS if flag(run, "--sleep", "60") != "0"])
def test_steps_of_a_stated_time(run):
    """No step is shorter. (No limit above: the machine may be busy.)"""
    done = jobs.result(*run)
    least = float(flag(run, "--sleep", "60")) / 1000
    for row in events(done.data):
        cost = least
        if row["run"] == "interleaved":
            cost /= done.data["size"]["v"]
        if row["what"] == "backward" and row["run"] != "zero-bubble":
            cost *= 2
        assert row["end"] - row["start"] >= cost * 0.99, row
    P, M = run[1], done.data["size"]["M"]
    rows = rows_with(done.data, "schedule", "/computing")
    bubble = {row["schedule"]: row for row in rows}
    assert float(bubble["1f1b"]["measured"]) > (P - 1) / M * 0.9
    assert f": {least * 1000:g} ms at least" in done.out
