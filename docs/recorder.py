"""The recorder of record.py: live ranks run a lesson's own code, and it notes what it
sees, in order:

    all-reduce            the result of a collective: the lesson's wrapper is wrapped
    all-reduce given      what this rank passed to it
    up_proj out           the output of a module, from a forward hook
    down_proj in          its input (in 0, in 1, … if it has several)
    grad down_proj in     the gradient of such a tensor, from a tensor's hook
    op exp                the result of an operation of PyTorch (of WatchOps)

NAME.toml, next to the recording, has the title and the captions: for each step what it
shows of this (`see`), what the tensor is called from here on, and what it says. Every
number comes from the run. A step that was not seen, a collective without a step, and a
byte more or less than the formula has are errors (the last one not if a bug is on).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

try:
    import tomllib
except ImportError:  # Python 3.10: pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "_static" / "recordings"
SMALL = 24  # elements; of a larger tensor only the shape is shown
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "beyond"))

SCHEDULES = {  # of script 14; in the table of bytes their runs have these names
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved",
    "zero-bubble": "Zero bubble",
}
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
}


class Call(NamedTuple):
    """A row of the ledger: what METER counts under this key."""

    run: str
    phase: str
    collective: str
    axis: str


class Seen(NamedTuple):
    """One thing that happened on this rank."""

    label: str
    value: Tensor | None
    comm: dict  # of a collective: what it was called with, and bytes


class Recorder:
    """What this rank sees while a lesson's own code runs inside `with recorder`."""

    def __init__(self, lesson, name: str, *also):
        self.lesson = lesson
        self.modules = (lesson, *also)  # which call collectives under their own names
        self.only_leaving = ()  # phases that count the bytes which leave a rank
        self.counted_otherwise = {}  # calls that the script counts instead of METER
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.script = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
        self.steps = list(self.script["step"])
        self.seen = []
        self.events = []
        self.held = {}
        clear(lesson)

    def phase(self, run: str, phase: str):
        """Within `with`, the lesson's METER counts collectives as this phase."""
        return self.lesson.METER.phase(run, phase)

    # Looking on

    def __enter__(self):
        clear(self.lesson)
        self.originals = []
        for module in self.modules:
            for name, collective in COLLECTIVES.items():
                original = getattr(module, name, None)
                if original is not None:
                    self.originals.append((module, name, original))
                    setattr(module, name, self.wrap(collective, original))
        return self

    def __exit__(self, *_):
        for module, name, original in self.originals:
            setattr(module, name, original)

    def see(self, label: str, value: Tensor | None, **comm) -> None:
        value = None if value is None else value.detach().clone()
        self.seen.append(Seen(label, value, comm))

    def wrap(self, collective: str, original):
        """A collective of the lesson that notes what it was given, and its result."""

        def call(x, *args, **kwargs):
            numbers = [a for a in args if isinstance(a, int)]
            group = next(a for a in args if isinstance(a, dist.ProcessGroup))
            members = dist.get_process_group_ranks(group)
            before = self.counted()
            source = members[numbers[0]] if collective == "broadcast" else None
            # What a receiver passes to a broadcast is only room for the result.
            self.see(f"{collective} given", x if source in (None, self.rank) else None)
            result = original(x, *args, **kwargs)
            sent = difference(self.counted(), before)
            payload = sum(sent.values())
            comm = {
                "bytes": sent,
                "sends": self.lesson.ring(collective, payload, group.size()),
                "call": {"collective": collective, "axis": group.group_desc},
                "group": members,
            }
            comm["call"]["phase"] = self.lesson.METER.label[1]
            if source is None and (numbers or collective == "all-to-all"):
                comm["call"]["dim"] = numbers[0] if numbers else 0
            if source not in (None, self.rank):
                comm["from"] = source
            self.see(collective, result, **comm)
            return result

        return call

    def watch(self, module: nn.Module, *names: str) -> None:
        """Note inputs and outputs of these submodules, and gradients of both."""
        for name in names:
            part = module.get_submodule(name)
            label = name.rpartition(".")[2] or "module"
            part.register_forward_pre_hook(self.inputs_of(label))
            part.register_forward_hook(self.output_of(label))

    def inputs_of(self, label: str):
        def hook(_, inputs):
            tensors = [x for x in inputs if torch.is_tensor(x)]
            for i, x in enumerate(tensors):
                number = f" {i}" if len(tensors) > 1 else ""
                self.see_with_gradient(f"{label} in{number}", x)

        return hook

    def output_of(self, label: str):
        return lambda _, inputs, y: self.see_with_gradient(f"{label} out", y)

    def see_with_gradient(self, label: str, x: Tensor) -> None:
        self.see(label, x)
        if x.requires_grad:
            x.register_hook(lambda grad: self.see(f"grad {label}", grad))

    def counted(self) -> dict:
        """The lesson's own counter: row of the ledger → bytes."""
        calls = (self.lesson.METER.calls | self.counted_otherwise).items()
        return {row_of(Call(*call)): sum(payloads) for call, payloads in calls}

    # From what was seen to the player's steps

    def hold(self, tensors: dict[str, Tensor]) -> None:
        """The first step: what the rank has before anything happens."""
        self.add("hold", self.next_step(), tensors)

    def play(self, grouped: tuple = ()) -> None:
        """The steps of the script that show what was seen, in this order."""
        place = 0
        while self.steps and "see" in self.steps[0]:
            step = self.next_step()
            labels = listed(step["see"])
            made, comm, given = {}, {}, None
            for label, name in zip(labels, listed(step.get("makes", ""))):
                found = self.find(label, place if len(labels) == 1 else 0)
                skipped = self.seen[place:found]
                if any(seen.comm for seen in skipped):
                    raise RuntimeError(f"before {label}: a collective has no step")
                value = self.seen[found].value
                made[name] = value.T if step.get("transpose") else value
                comm = self.seen[found].comm
                if "dim" in comm.get("call", {}) and step.get("transpose"):
                    comm = dict(comm, call=dict(comm["call"]))
                    comm["call"]["dim"] = 1 - comm["call"]["dim"]
                if comm:
                    given = self.seen[found - 1].value
                place = max(place, found + 1)
            self.add("compute", step, made, given, comm)
        if any(seen.comm for seen in self.seen[place:]):
            raise RuntimeError("a collective after the last step has no step")

    def find(self, label: str, start: int) -> int:
        for i, seen in enumerate(self.seen[start:], start):
            if seen.label == label:
                return i
        rest = [seen.label for seen in self.seen[start:]]
        raise RuntimeError(f"rank {self.rank}: no {label!r} in {rest}")

    def next_step(self) -> dict:
        return self.steps.pop(0)

    def compare(self, expected: dict[str, Tensor]) -> None:
        """The last step: this rank's tensors next to those of one process."""
        self.check(expected)
        assert not self.steps, f"steps that did not happen: {self.steps}"

    def check(self, expected: dict, **makes: Tensor) -> None:
        """A step that says of some tensors whether they are those of one process."""
        marks = {}
        self.held.update(makes)
        for name, full in expected.items():
            diff = self.lesson.rel_diff(self.held[name], full)
            marks[name] = {"diff": diff, "ok": diff <= self.lesson.ALLOWED["float32"]}
        self.add("check", self.next_step(), makes, marks=marks)

    def add(self, kind, step: dict, makes: dict, given=None, comm=None, **own) -> None:
        """One event, with the tensors that this rank holds from now on."""
        comm = dict(comm or {})
        drops = listed(step.get("drops", ""))
        takes = step.get("takes", "")
        for name in listed(step.get("copies", "")):
            makes = {listed(step["makes"])[0]: self.held[name]}
        if given is not None and takes not in self.held:
            is_term = {"term": True} if step.get("given_term") else {}
            own["given"] = {takes: raw(given, is_term)}
        own["makes"] = {name: raw(x, step) for name, x in makes.items()}
        for key in ("bytes", "sends", "to", "from", "moved", "splits"):
            if key in comm:
                own[key] = comm.pop(key)
        for name in drops:
            self.held.pop(name, None)
        self.held.update(makes)
        event = {"kind": kind, "says": step["says"], "drops": drops, "own": own}
        if takes:
            event["takes"] = takes
        if "to" in own:
            event["kind"] = "send"
        if "call" in comm:
            event["kind"] = "collective"
            event.update(comm)
        self.events.append(event)

    # All ranks' events, as one recording

    def recording(self, formulas: dict, sizes: dict, groups=None, **about) -> dict:
        ledger = self.ledger(formulas, sizes, groups or {}, "bug" in about)
        events = []
        for parts in zip(*gather_objects(self.events), strict=True):
            events.append(joined(list(parts)))
        about["title"] = self.script["title"]
        about["ranks"] = self.ranks
        about["torch"] = torch.__version__.partition("+")[0]
        about["ledger"] = ledger
        about["events"] = events
        return about

    def ledger(self, formulas: dict, sizes: dict, groups: dict, bug: bool) -> list:
        """The counter of each rank at the end, next to formula: "calls × bytes"."""
        counted = {Call(*call): x for call, x in self.lesson.METER.calls.items()}
        rows = []
        for call in dict.fromkeys([*formulas, *counted]):
            formula = formulas.get(call, "0 × 0")
            calls, each = formula.split(" × ")
            predicted = self.lesson.evaluate(calls, sizes)
            predicted *= self.lesson.evaluate(each, sizes)
            payloads = counted.get(call, [])
            sent = sum(payloads)
            if predicted != sent and not bug:
                raise RuntimeError(f"{call}: counted {sent} bytes, formula {formula}")
            size = groups.get(call.axis, self.ranks)
            row = dict(call._asdict(), what=call.run, row=row_of(call), rank=self.rank)
            row["calls"] = len(payloads)
            row["bytes"] = sent
            row["ring"] = self.lesson.ring(call.collective, sent, size)
            if call.phase in self.only_leaving:
                row["ring"] = sent
            row["formula"] = formula.replace("-", " − ")
            row["predicted"] = predicted
            if predicted or sent:
                rows.append(row)
        return [row for part in gather_objects(rows) for row in part]


class WatchOps(TorchDispatchMode):
    """Notes the results of some operations, for code that calls no module."""

    def __init__(self, recorder: Recorder, *names: str):
        super().__init__()
        self.recorder = recorder
        self.names = names

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if name in self.names:
            self.recorder.see(f"op {name}", result)
        return result


def listed(words) -> list[str]:
    """A list of names; in a script one name may stand without brackets."""
    if isinstance(words, str):
        return [words] if words else []
    return list(words)


def clear(lesson) -> None:
    """Forget what has been counted."""
    lesson.METER.calls.clear()


def gather_objects(value) -> list:
    """What every rank has, in the order of ranks. METER does not count this call."""
    values = [None] * dist.get_world_size()
    with _disable_current_modes():
        dist.all_gather_object(values, value)
    return values


def row_of(call: Call) -> str:
    """What a key of the counter is called in the player's table of bytes."""
    words = [
        SCHEDULES.get(call.run, ""),
        call.phase,
        call.collective,
        "over",
        call.axis,
    ]
    return " ".join(word for word in words if word)


def difference(now: dict, before: dict) -> dict:
    """The rows that have grown, and by how much."""
    grown = {row: n - before.get(row, 0) for row, n in now.items()}
    return {row: n for row, n in grown.items() if n}


def raw(x: Tensor, step: dict) -> dict:
    """A tensor's shape, its elements if they are few, and how it is to be shown."""
    tensor = {"shape": list(x.shape), "who": getattr(x, "who", None)}
    if x.numel() <= SMALL and not hasattr(x, "closed"):
        tensor["values"] = x.detach().flatten().tolist()
    if x.dtype == torch.int64 and x.dim() == 3:  # tokens and targets of a micro-batch
        characters = [chr(v) if 0 <= v < 256 else "·" for v in x.flatten().tolist()]
        tensor["values"] = characters
    for key in ("term", "under"):
        if key in step:
            tensor[key] = step[key]
    for key in ("values", "columns", "rows", "marked", "under"):
        if hasattr(x, key) and not callable(getattr(x, key)):
            tensor[key] = getattr(x, key)
    return tensor


def joined(parts: list[dict]) -> dict:
    """One event of what each rank saw of it. A tensor that is the same on all ranks of
    a group belongs to that group; any other one belongs to its rank."""
    event = {key: value for key, value in parts[0].items() if key != "own"}
    ranks = [part["own"] for part in parts]
    if "call" in event:  # each rank called in its own group
        groups = {tuple(part["group"]) for part in parts}
        event["call"]["groups"] = sorted(list(group) for group in groups)
        del event["group"]
    for kind in ("makes", "given"):
        names = {}
        for own in ranks:
            names.update(dict.fromkeys(own.get(kind, {})))
        for name in names:
            set_holders([own.get(kind, {}).get(name) for own in ranks])
        for own in ranks:
            tensors = [shown(name, x) for name, x in own.pop(kind, {}).items()]
            if tensors:
                own[kind] = tensors
    for own in ranks:
        marks = own.pop("marks", {})
        for name, mark in marks.items():
            diff = float(f"{mark['diff']:.1e}")
            own.setdefault("marks", []).append(dict(mark, name=name, diff=diff))
    sent = sum(ranks[0].get("bytes", {}).values())
    event["says"] = event["says"].format(bytes=sent)
    event["ranks"] = ranks
    return {key: value for key, value in event.items() if value not in ([], None)}


def set_holders(tensors: list) -> None:
    """Say of each rank's tensor which ranks hold the very same: bit r is rank r."""
    for rank, mine in enumerate(tensors):
        if mine is None or mine["who"] is not None:
            continue
        mine["holders"] = 2**rank
        for other, theirs in enumerate(tensors):
            if other == rank or theirs is None or "values" not in mine:
                continue
            same = mine["values"] == theirs.get("values")
            if same and mine["shape"] == theirs["shape"]:
                mine["holders"] += 2**other
    for mine in tensors:
        if mine is not None and "holders" in mine:
            mine["who"] = mine.pop("holders")


def shown(name: str, x: dict) -> dict:
    """A tensor of a recording: elements have four decimals, the player shows two."""
    tensor = dict(x, name=name)
    if "values" in x:
        tensor["values"] = [number(value) for value in x["values"]]
    return tensor


def number(value):
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    value = round(value, 4)
    return int(value) if value == int(value) else value
