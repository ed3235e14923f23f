"""Whom the harness names when ranks wait for each other: over seven meshes, for every
rank and every call, one rank dies, hangs, raises or skips, and the others go on until
nobody can. No process is started: ranks are generators, gloo a list of who has come."""

import json
import re
from collections import Counter, defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import jobs
import pytest

lesson = jobs.load("00_collectives")

MESHES = [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 1, 3), (2, 2, 2), (4, 1, 1)]
WENT_ON = "in no call, .* wait: a hang, a crash, or a skipped call$"
WAITING = "wait for each other: one skipped or swapped a call, or died in it$"
IN_ITS_CALL = f"^a call failed that every rank had come to$|{WAITING}"
FAULTS = {  # what a rank does → what is seen of its process → what must be said
    "leaves": {
        "dead": " died; ",
        "stopped": " is stopped; ",
        "alive": WENT_ON,
        "unknown": WENT_ON,
    },
    "leaves inside": {
        "dead": " died; ",
        "stopped": " is stopped; ",
        "unknown": f"{IN_ITS_CALL}|{WENT_ON}",
    },
    "raises": dict.fromkeys(("alive", "unknown"), "raised RuntimeError: out of luck$"),
    "skips": {"alive": f"{WAITING}|{WENT_ON}"},
    "skips, calls differ": {
        "alive": f"{WAITING}|{WENT_ON}"
    },  # where these meet, they do not end
}


def calls_of(rank: int, mesh: tuple) -> list[tuple]:
    """A step of lesson 05: ("call", name, ranks) or ("send", "", [from, to])."""
    pp, dp, tp = mesh
    stage, world = rank // (dp * tp), [*range(pp * dp * tp)]
    first = rank - rank % tp
    tp_ranks = [*range(first, first + tp)]
    dp_ranks = [stage * dp * tp + i * tp + rank % tp for i in range(dp)]
    before, after = rank - dp * tp, rank + dp * tp
    layers = [("call", "all-reduce over tp", tp_ranks)] * 2
    calls = [("call", "broadcast of the batch", tp_ranks)]
    for into, out in ((before, after), (after, before)):  # forward, then backward
        for _ in range(2):  # micro-batches
            calls += [("receive", "", [into, rank])] if into in world else []
            calls += layers
            calls += [("send", "", [rank, out])] if out in world else []
        calls += [("wait", "", [rank, out])] * 2 if out in world else []
    calls += [("call", "all-reduce over dp", dp_ranks), ("call", "gathering", world)]
    calls = [call for call in calls if len(call[2]) > 1]
    calls *= 2 if len(world) < 4 else 1  # two steps
    return [*calls, ("call", "the last barrier", world)]


class Job:
    """Ranks that run until they are done or wait for what does not come."""

    def __init__(self, mesh: tuple, guilty: int, position: int, fault: str):
        self.store, self.came, self.sent = {}, defaultdict(Counter), Counter()
        self.names = defaultdict(set)  # of the n-th calls of one set of ranks
        self.taken, self.guilty, self.fault = Counter(), guilty, fault
        size = mesh[0] * mesh[1] * mesh[2]
        self.ranks = {r: self.rank(r, calls_of(r, mesh), position) for r in range(size)}
        stuck = 0
        while self.ranks and stuck < 2:
            before = sum(self.counts())
            for rank in [*self.ranks]:
                if next(self.ranks[rank], "ended") == "ended":
                    del self.ranks[rank]
            stuck = stuck + 1 if sum(self.counts()) == before else 0
        self.places = [json.loads(self.store[f"place/{rank}"]) for rank in range(size)]

    def seen(self, process: str) -> str:
        """What is said when this is known of the guilty rank's process."""
        places = [place | {"process": "alive"} for place in self.places]
        places[self.guilty]["process"] = process
        return lesson.who_is_missing(places)

    def counts(self):
        yield len(self.ranks)
        yield from (
            sum(c.values()) for c in (self.sent, self.taken, *self.came.values())
        )

    def corner(self, rank: int):
        """What a rank's notes go to."""
        note = lambda key, value: self.store.__setitem__(f"place/{rank}", value)
        return SimpleNamespace(set=note)

    def rank(self, rank: int, calls: list, position: int):
        """One rank: notes as the harness makes them, and a transport of its own."""
        notes, sending = lesson.CommCounter(), defaultdict(list)
        notes.store = self.corner(rank)
        notes.note()
        for i, (kind, name, ranks) in enumerate(calls):
            fault = self.fault if (rank, i) == (self.guilty, position) else ""
            if fault[:5] == "skips":
                continue
            if fault == "raises":
                notes.note("raised RuntimeError: out of luck", raised=1.0)
            while fault and "inside" not in fault:
                yield
            if kind == "wait":  # a skipped send leaves nothing to wait for
                if not sending[str(ranks)]:
                    continue
                number = sending[str(ranks)].pop(0)
            around = nullcontext() if kind == "send" else notes.meet(name, ranks)
            with around:
                while fault:
                    yield
                if kind == "call":  # over once all have come so many times
                    came = self.came[str(ranks)]
                    came[rank] += 1
                    names = self.names[str(ranks), came[rank]]
                    names.add(name)
                    while any(came[other] < came[rank] for other in ranks):
                        yield
                    while len(names) > 1 and "differ" in self.fault:
                        yield
                elif kind == "send":
                    self.sent[str(ranks)] += 1
                    sending[str(ranks)].append(self.sent[str(ranks)])
                elif kind == "wait":
                    while self.taken[str(ranks)] < number:
                        yield
                else:
                    while self.taken[str(ranks)] == self.sent[str(ranks)]:
                        yield
                    self.taken[str(ranks)] += 1
        notes.note("finished", ends=True)


def named(text: str) -> list[int]:
    """The ranks a message is about; not those that it says wait for them."""
    found = re.match(r"(?:the process of )?ranks? (\[[\d, ]+\]|\d+)", text)
    return [int(rank) for rank in re.findall(r"\d+", found[1])] if found else []


@pytest.fixture(autouse=True)
def without_a_group(monkeypatch):
    """Notes go to the corner of the rank that made them, whatever rank they name."""
    monkeypatch.setattr(lesson.dist, "get_rank", lambda: 0)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mesh", MESHES, ids="{0[0]}x{0[1]}x{0[2]}".format)
def test_names_no_wrong_rank(mesh, fault):
    for guilty in range(mesh[0] * mesh[1] * mesh[2]):
        for position, call in enumerate(calls_of(guilty, mesh)):
            job = Job(mesh, guilty, position, fault)
            if fault[:5] == "skips" and not job.ranks:
                assert call[0] == "wait"  # the one thing that nobody misses
                continue
            where = f"rank {guilty} at {position}, {call}: "
            for process, words in FAULTS[fault].items():
                text = job.seen(process)
                assert re.search(words, text), where + text
                if "each other" in text:  # true of the guilty one, and of others
                    assert fault[:5] == "skips" or "inside" in fault, where + text
                    assert guilty in named(text), where + text
                    assert set(named(text)) <= set(job.ranks), where + text
                else:
                    assert named(text) in ([guilty], []), where + text
                    assert named(text) or IN_ITS_CALL in words, where + text


def test_a_rank_that_torchrun_ends_is_not_the_one_that_died():
    places = [place | {"process": "dead"} for place in Job((1, 1, 4), 2, 5, "").places]
    del places[2]["ends"]  # the others have noted it
    assert named(lesson.who_is_missing(places)) == [2]
