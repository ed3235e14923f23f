"""Whom the doctor names when ranks wait for each other: over seven meshes, for every
rank and every call, one rank hangs or skips, and the others go on until nobody can. No
process is started: ranks are generators, gloo a list of who has come."""

import json
import re
from collections import Counter, defaultdict
from math import prod

import doctor
import pytest
import torch

MESHES = [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 1, 3), (2, 2, 2), (4, 1, 1)]
WENT_ON = "not in a collective, while ranks .* are waiting in one: it hung, crashed or"
WAITING = "are waiting in different calls: one skipped or reordered a call, or died"
IN_ITS_CALL = (
    f"^all ranks have entered the same call, and it raised an error$|{WAITING}"
)
FAULTS = {  # what a rank does → what must be said
    "hangs": WENT_ON,
    "hangs inside": f"{IN_ITS_CALL}|{WENT_ON}",
    "skips": f"{WAITING}|{WENT_ON}",
    "skips, calls differ": f"{WAITING}|{WENT_ON}",  # calls of two names do not end
}


def calls_of(rank: int, mesh: tuple) -> list[tuple]:
    """A step of lesson 05: ("call", name, ranks) or ("send", "", [from, to])."""
    pp, dp, tp = mesh
    world = [*range(pp * dp * tp)]
    first, stage = rank - rank % tp, rank - rank % (dp * tp)
    tp_ranks = [*range(first, first + tp)]
    dp_ranks = [*range(stage + rank % tp, stage + dp * tp, tp)]
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
        self.fault, self.moves = fault, 0
        self.came = defaultdict(Counter)  # ranks of a call → rank → how many times
        self.names = defaultdict(set)  # of the n-th calls of one set of ranks
        self.notes = [doctor.Calls() for _ in range(prod(mesh))]
        self.running = {}
        for rank in range(prod(mesh)):
            at = position if rank == guilty else None
            self.running[rank] = self.rank(rank, calls_of(rank, mesh), at)
        before = -1
        while self.moves > before:
            before = self.moves
            for rank, steps in [*self.running.items()]:
                if next(steps, "ended") == "ended":
                    del self.running[rank]
                    self.moves += 1

    def rank(self, rank: int, calls: list, position: int | None):
        """One rank: notes as the doctor makes them, and a transport of its own."""
        notes, sent = self.notes[rank], defaultdict(list)
        for i, (kind, name, ranks) in enumerate(calls):
            fault, key = self.fault if i == position else "", str(ranks)
            if fault.startswith("skips"):
                continue
            while fault and fault != "hangs inside":
                yield
            if kind == "wait" and not sent[key]:
                continue  # a skipped send leaves nothing to wait for
            if kind != "send":
                notes.enter(name, key)
            while fault:
                yield
            came = self.came[key]
            if kind == "wait":
                number = sent[key].pop(0)
            else:
                came[rank] += 1
                self.moves += 1
                number = came[rank]
            if kind == "send":
                sent[key].append(number)
                continue
            names = self.names[key, number]
            names.add(name)
            while any(came[other] < number for other in ranks):
                yield
            while len(names) > 1 and "differ" in self.fault:
                yield
            notes.leave()


def named(text: str) -> list[int]:
    """The ranks a message is about; not those that it says wait for them."""
    found = re.match(r"ranks? (\[[\d, ]+\]|\d+)", text)
    return [int(rank) for rank in re.findall(r"\d+", found[1])] if found else []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mesh", MESHES, ids="{0[0]}x{0[1]}x{0[2]}".format)
def test_names_no_wrong_rank(mesh, fault):
    for guilty in range(prod(mesh)):
        for position, call in enumerate(calls_of(guilty, mesh)):
            job = Job(mesh, guilty, position, fault)
            if fault[:5] == "skips" and not job.running:
                assert call[0] == "wait"  # the one thing that nobody misses
                continue
            where = f"rank {guilty} at {position}, {call}: "
            text = doctor.who_is_missing([notes.status for notes in job.notes])
            assert re.search(FAULTS[fault], text), where + text
            if "different calls" in text:  # true of the guilty one, and of others
                assert fault != "hangs", where + text
                assert guilty in named(text), where + text
                assert set(named(text)) <= set(job.running), where + text
            else:
                assert named(text) in ([guilty], []), where + text
                assert named(text) or fault == "hangs inside", where + text


def statuses(store, counts: dict, *calls: str) -> doctor.Calls:
    """A doctor's notes after all ranks have written theirs."""
    for rank, call in enumerate(calls):
        status = doctor.Status(bool(call), call, "line 1 in main")
        store.set(f"status/{rank}", json.dumps([status, counts]))
    notes = doctor.Calls()
    notes.store = store
    return notes


def test_who_has_raised_nothing_is_named(monkeypatch):
    """In PyTorch's own section no rank is in one of the script's calls."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    store = torch.distributed.HashStore()
    notes = statuses(store, {}, "", "", "")
    for rank in (0, 2):
        store.set(f"failed/{rank}", "")
    said = " ".join(notes.report())
    assert "ranks [1] have reported no error so far" in said
    store.set("failed/1", "")
    assert "have reported no error" not in " ".join(notes.report())


def test_the_first_difference_is_named(monkeypatch):
    """Also where every rank believes that it is in the same call."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    store = torch.distributed.HashStore()
    calls = {1: ("all_reduce [4]",) * 2, 2: ("all_reduce [4]", "all_gather [2]")}
    for number, texts in calls.items():
        for rank, text in enumerate(texts):
            store.set(f"[0, 1]/{number}/{rank}", text)
    store.set("failed/0", "")
    call = "call 2 of ranks [0, 1], all_reduce [4]"
    lines = statuses(store, {"[0, 1]": 2}, call, call).report()
    assert lines[0] == "the ranks made different calls, or in another order"
    assert "ranks [1] have reported no error" in lines[-1]
    same = statuses(store, {"[0, 1]": 1}, call, call).report()
    assert re.search(IN_ITS_CALL.partition("|")[0], same[0]) and "first" not in same[-1]
    assert lines[1:4] == [
        "  the first difference: call 2 of ranks [0, 1]",
        "    rank 0: all_reduce [4]", "    rank 1: all_gather [2]",
    ]  # fmt: skip


def test_rows_of_an_all_to_all_differ():
    """Each rank sends as many rows as its tokens chose: it is the same call."""
    call = "call 3 of ranks [0, 1], {} [{}, 64] over ep"
    for name, said in (("all_to_all_single", IN_ITS_CALL.partition("|")[0]),
                       ("all_reduce", WAITING)):  # fmt: skip
        both = [doctor.Status(True, call.format(name, n), "") for n in (113, 147)]
        assert re.search(said, doctor.who_is_missing(both)), name


def test_what_a_batch_sends_may_differ():
    call = "call 3 of ranks [0, 1], isend [{}] to {}, irecv [2] from 1 over tp"
    both = [doctor.Status(True, call.format(n, n), "") for n in (0, 1)]
    assert re.search(IN_ITS_CALL.partition("|")[0], doctor.who_is_missing(both))


def test_a_difference_in_the_last_bits_is_called_so():
    check = {"kind": "values", "name": "values: y", "text": "", "allowed": 0.0}
    check["is_formula"] = False
    said = "only last bits differ: a sum in another order?"
    bits = check | {"diff": 4e-8}
    formula = {"kind": "bytes", "name": "bytes: y", "text": "", "is_formula": True}
    assert said in doctor.conclusions([bits, formula], {})
    # The replicas of a weight whose gradient is partial: some differ by 1e-7 only.
    assert said not in doctor.conclusions([bits, bits | {"diff": 0.2}], {})
    assert said not in doctor.conclusions([check | {"diff": 1.0}], {})
    assert said not in doctor.conclusions([check | {"diff": 2e-6, "allowed": 1e-6}], {})
