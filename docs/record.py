"""Record runs of the lessons for the player: what each rank held, sent and got.

    python docs/record.py                   all recordings, into docs/_static/recordings
    python docs/record.py ring mlp          these two
    python docs/record.py --folder F ring   into another folder

A recording is a JSON file. Its events are the player's steps; each has a kind, a
caption, and for every rank the tensors that it made and the bytes that the lesson's own
counter (COMM) counted. The ledger is that counter at the end, next to a formula for
these sizes.

How: live ranks run a lesson's own code while `Recorder` looks on. A scene lists, in
order, what it expects to see: a local name in one of the lesson's functions, its return
value, or a collective called there. Captions are written here by hand; every number
comes from the run. A scene whose steps do not all happen, or that misses a collective,
is an error, and so is a byte more or less than the formula has, but where a bug is on.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "_static" / "recordings"
SMALL = 24  # numbers; of a larger tensor, and of weights, only the shape is shown
sys.path.insert(0, str(ROOT))


class Step:
    """Something to see, and what to say about it.

    Args:
        where, what: "MLP.forward" and a local name, several names, "return", or a
            collective; or "gradient" and the name of a tensor made before.
        says: the caption. {bytes}, those that rank 0 counted, are filled in.
        makes: what it is called from here on; None if it is not to be shown.
        takes: which tensor a collective is given.
        drops: names that are no longer shown after this step.
        nth: of the values that the name gets in one call; the first is 1.
    """

    def __init__(self, where, what, says, makes="", takes="", drops="", nth=1):
        self.where, self.what, self.says, self.nth = where, what, says, nth
        self.makes, self.takes = (makes or "").split(), takes
        self.drops = drops.split()


class Recorder:
    """This rank's events, while the lesson's own code runs inside `with recorder`."""

    def __init__(self, lesson, script: list[Step] = ()):
        self.lesson, self.script = lesson, [copy.copy(step) for step in script]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.events, self.made, self.seen = [], {}, {}
        self.names = {
            code_of(f): f"{thing.__name__}.{name}"
            for thing in vars(lesson).values()
            if isinstance(thing, type)
            for name, f in vars(thing).items()
            if code_of(f)
        } | {code_of(f): name for name, f in vars(lesson).items() if code_of(f)}

    def __enter__(self):
        clear(self.lesson)
        self.originals = {}
        for name, watched in COLLECTIVES.items():
            if original := getattr(self.lesson, name, None):
                self.originals[name] = original
                setattr(self.lesson, name, self.watching(watched, original))
        sys.settrace(self.enter_frame)
        return self

    def __exit__(self, error, *_):
        sys.settrace(None)
        for name, original in self.originals.items():
            setattr(self.lesson, name, original)
        if self.script and not error:
            left = [(step.where, step.what) for step in self.script]
            raise RuntimeError(f"rank {self.rank}: these steps did not happen: {left}")

    # What happens

    def watching(self, collective: str, original):
        """A collective of the lesson that notes its payload, and what came of it."""

        def call(x, *args, **kwargs):
            frame = sys._getframe(1)
            where = self.names.get(frame.f_code, frame.f_code.co_name)
            before = self.counted()
            result = original(x, *args, **kwargs)
            sent = difference(self.counted(), before)
            step = self.script[0] if self.script else None
            if step is None or (step.where, step.what) != (where, collective):
                raise RuntimeError(f"no step for the {collective} in {where}")
            group = next(g for g in args if isinstance(g, dist.ProcessGroup))
            about = {
                "collective": collective,
                "axis": group.group_desc,
                "phase": self.lesson.COMM.phase,
                "group": dist.get_process_group_ranks(group),
            }
            payload = sum(sent.values())
            sends = self.lesson.ring_bytes(collective, payload, group.size())
            more = {"bytes": sent, "sends": sends, "given": x, "call": about}
            if collective == "broadcast":
                source = about["group"][next(a for a in args if isinstance(a, int))]
                if source != self.rank:  # what it gives is only room for what comes
                    more |= {"from": source, "given": None}
            self.take(step, [result], **more)
            return result

        return call

    def enter_frame(self, frame, event, value):
        """Follow the functions that the script names, line by line."""
        where = self.names.get(frame.f_code)
        if not any(step.where == where for step in self.script):
            return None
        self.look(frame, where, "call", None)
        return lambda frame, event, value: self.look(frame, where, event, value)

    def look(self, frame, where, event, value):
        """Is what the next step waits for there now?"""
        if self.script and self.script[0].where == where:
            step, values = self.script[0], frame.f_locals
            if step.what == "return":
                value = value[0] if isinstance(value, tuple) else value
                if event == "return":
                    self.take(step, [value])
            else:
                found = [values.get(name) for name in step.what.split()]
                last = self.seen.setdefault(frame, {}).get(step.what)
                new = last is None or any(a is not b for a, b in zip(found, last))
                if new and all(torch.is_tensor(x) for x in found):
                    self.seen[frame][step.what] = found
                    step.nth -= 1
                    if step.nth == 0:
                        self.take(step, found)
        return lambda frame, event, value: self.look(frame, where, event, value)

    def take(self, step: Step, values, given=None, call=None, **more) -> None:
        """A step of the script happened."""
        self.script.pop(0)
        made = dict(zip(step.makes, values))
        if given is not None and step.takes not in self.made:
            more["given"] = {step.takes: raw(given)}
        more |= {"where": step.where, "takes": step.takes, "call": call}
        kind = "collective" if call else "compute"
        self.add(kind, step.says, made, step.drops, **more)
        for name, value in made.items():
            wanted = any(s.where == "gradient" and s.what == name for s in self.script)
            if wanted and value.requires_grad:
                value.register_hook(lambda grad, name=name: self.gradient(name, grad))

    def gradient(self, name: str, grad: Tensor) -> None:
        """Autograd has come to a tensor of an earlier step."""
        step = self.script[0]
        if (step.where, step.what) != ("gradient", name):
            raise RuntimeError(f"dL/d {name} came, the script waits for {step.where}")
        self.take(step, [grad])

    def counted(self) -> dict:
        """The lesson's own counter: row of the ledger → bytes."""
        return {row_of(call): n for call, n in self.lesson.COMM.bytes.items()}

    # What is kept of it

    def add(self, kind: str, says: str, makes: dict, drops=(), **more) -> None:
        """One event, with the tensors that this rank has from now on."""
        self.made = {n: x for n, x in self.made.items() if n not in drops} | makes
        mine = {"makes": {name: raw(x) for name, x in makes.items()}}
        own = (
            "bytes",
            "sends",
            "to",
            "from",
            "moved",
            "given",
            "marks",
        )  # each rank has its own
        mine |= {key: more.pop(key) for key in own if key in more}
        event = {"kind": kind, "says": says, "drops": list(drops), "mine": mine}
        self.events.append(event | {k: v for k, v in more.items() if v})

    def compare(self, says: str, wanted: dict[str, Tensor], drops=()) -> None:
        """Tensors that are shown, with this rank's part of those of one process."""
        marks, allowed = {}, self.lesson.ALLOWED["float32"]
        for name, whole in wanted.items():
            diff = self.lesson.rel_diff(self.made[name], whole)
            marks[name] = {"diff": diff, "ok": diff <= allowed}
        self.add("check", says, {}, drops, marks=marks)

    def recording(self, **about) -> dict:
        """What all ranks saw, as one; and the ledger, against the formulas."""
        of_ranks = self.lesson.gather_objects(self.events)
        counted, predicted = self.lesson.COMM, about.pop("formulas")
        sizes = about.pop("sizes")
        groups = about.pop("groups", {"tp": self.ranks, "pp": self.ranks})
        ledger = []
        for call in {**predicted, **counted.calls}:
            sent = counted.bytes[call]
            text = predicted.get(call, "0 × 0")
            calls, each = (self.lesson.evaluate(x, sizes) for x in text.split(" × "))
            if calls * each != sent and "bug" not in about:
                raise RuntimeError(f"{call}: counted {sent} bytes, formula {text}")
            if calls or sent:
                row = {"what": call.run, **call._asdict()}
                row |= {"row": row_of(call), "rank": self.rank}
                row |= {"calls": counted.calls[call], "bytes": sent}
                size = groups[call.axis]
                row["ring"] = self.lesson.ring_bytes(call.collective, sent, size)
                row |= {"formula": text, "predicted": calls * each}
                ledger.append(row)
        ledger = [row for rows in self.lesson.gather_objects(ledger) for row in rows]
        events = [joined(parts) for parts in zip(*of_ranks, strict=True)]
        version = torch.__version__.partition("+")[0]
        about |= {"ranks": self.ranks, "torch": version}
        return about | {"ledger": ledger, "events": events}


COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
}


def clear(lesson) -> None:
    """Forget what has been counted."""
    lesson.COMM.calls.clear()
    lesson.COMM.bytes.clear()


def row_of(key: tuple) -> str:
    """What a key of the counter is called in the player's table of bytes."""
    what, phase, collective, axis = key
    return " ".join(x for x in (KINDS.get(what), phase, collective, "over", axis) if x)


def difference(now: dict, before: dict) -> dict:
    """The rows that have grown, and by how much."""
    grown = {row: n - before.get(row, 0) for row, n in now.items()}
    return {row: n for row, n in grown.items() if n}


def code_of(thing):
    """The code object of a function of a lesson, or None."""
    return getattr(getattr(thing, "__func__", thing), "__code__", None)


def raw(held: Tensor) -> dict:
    """A tensor's shape; and its numbers, to full precision, if they are few and not
    weights."""
    who, x = getattr(held, "who", None), held.detach().cpu()
    small = x.numel() <= SMALL and not isinstance(held, nn.Parameter)
    values = x.flatten().tolist() if small else None
    if x.dtype == torch.int64 and x.dim() == 3:  # tokens and targets of a micro-batch
        values = [chr(v) if 0 <= v < 256 else "·" for v in x.flatten().tolist()]
    return {"shape": list(x.shape), "values": values, "who": who}


def joined(parts: list[dict]) -> dict:
    """One event of what each rank saw of it. A tensor that is the same on all ranks of
    a group belongs to that group; any other one belongs to its rank."""
    event = {k: v for k, v in parts[0].items() if k != "mine"}
    if "call" in event:  # each rank called in its own group
        groups = {tuple(part["call"]["group"]) for part in parts}
        event["call"] = event["call"] | {"groups": sorted(map(list, groups))}
        del event["call"]["group"]
    event["ranks"] = [copy.copy(part["mine"]) for part in parts]
    for kind in ("makes", "given"):
        names = dict.fromkeys(n for mine in event["ranks"] for n in mine.get(kind, {}))
        for name in names:
            held = [mine.get(kind, {}).get(name) for mine in event["ranks"]]
            for tensor, who in zip(held, holders(held)):
                if tensor:
                    tensor["who"] = tensor["who"] or who
    for mine in event["ranks"]:
        for kind in ("makes", "given"):
            tensors = [shown(name, x) for name, x in mine.pop(kind, {}).items()]
            if tensors:
                mine[kind] = tensors
        if marks := mine.pop("marks", None):
            mine["marks"] = [
                {"name": n, "diff": float(f"{m['diff']:.1e}"), "ok": m["ok"]}
                for n, m in marks.items()
            ]
    sent = sum(event["ranks"][0].get("bytes", {}).values())
    event["says"] = event["says"].format(bytes=sent)
    return {k: v for k, v in event.items() if v not in ([], None)}


def holders(held: list) -> list[int]:
    """For each rank's tensor, which ranks hold the very same: bit r is rank r."""
    same = lambda a, b: a and b and a["values"] and (
        a["values"] == b["values"] and a["shape"] == b["shape"]
    )  # fmt: skip
    return [
        sum(2**r for r, b in enumerate(held) if r == rank or same(a, b))
        for rank, a in enumerate(held)
    ]


def shown(name: str, x: dict) -> dict:
    """A tensor as the player shows it: numbers rounded to what fits a box."""
    tensor = {"name": name, "shape": x["shape"], "who": x["who"]}
    if x["values"] is not None:
        tensor["values"] = [number(v) for v in x["values"]]
    return tensor


def number(value):
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    value = round(value, 2)
    return int(value) if value == int(value) else value


# The scenes. Each runs on every rank, and returns what rank 0 writes.


def ring(lesson, group) -> dict:
    rank, T = group.rank(), group.size()
    args = SimpleNamespace(dtype="float32", device="cpu")
    x = lesson.count_from(10 * rank, T, args)
    chunks_of = lambda values: [chunk.clone() for chunk in values]
    steps, sources = [], []
    # First on tensors full of 2^rank: bit r says that rank r's number is in a chunk.
    bits = torch.full_like(x, 2**rank)
    held = bits  # which ranks' numbers each chunk has in it
    lesson.ring_all_reduce(bits, group, lambda _, c: sources.append(chunks_of(c)))
    recorder = Recorder(lesson)
    start = x.clone()
    start.who = [2**rank] * T
    says = (
        "Four ranks, each with its own four numbers. In the end every rank must have "
        "the sum over all ranks, and each rank may send only to the next one, one "
        "chunk at a time."
    )
    recorder.add("hold", says, {"x": start})
    clear(lesson)
    before = {}

    def on_step(name, chunks):
        nonlocal before, held
        values = torch.cat(chunks)
        now_held = torch.cat(sources[len(steps)])
        values.who = now_held.int().tolist()
        steps.append(name)
        now = recorder.counted()
        half, _, number = name.rpartition(" ")
        says = RING[half].format(number=number)
        more = {"to": (rank + 1) % T, "from": (rank - 1) % T, "takes": "x"}
        # Not by their values: a sum stays as it was if a 0 arrives.
        more["moved"] = (now_held != held).nonzero().flatten().tolist()
        held, sent = now_held, difference(now, before)
        more |= {"bytes": sent, "sends": sum(sent.values())}
        more["where"] = "ring_all_reduce"
        recorder.add("send", says, {"x": values}, **more)
        before = now

    with lesson.COMM.label("ring", ""):
        y = lesson.ring_all_reduce(x, group, on_step)
    says = "Every rank has the sum, as PyTorch's own all-reduce gives it."
    total = x.clone()
    dist.all_reduce(total, group=group)  # to compare with, and not counted
    assert torch.equal(recorder.made["x"], y)
    recorder.compare(says, {"x": total})
    call = lesson.Call("ring", "", "send/recv", "tp")
    return recorder.recording(
        title="An all-reduce as a ring",
        formulas={call: "2·(T-1) × n·e/T"}, sizes={"T": T, "n": x.numel(), "e": 4},
    )  # fmt: skip


RING = {
    "reduce-scatter": "Reduce-scatter, step {number}: each rank sends one chunk to the "
    "next rank, which adds its own number to it.",
    "all-gather": "All-gather, step {number}: each rank sends a finished chunk to the "
    "next rank, which keeps it instead of its own.",
}

MLP_FORWARD = [
    Step("CopyToTP.forward", "return",
         "f is applied before the first product. Forward it does nothing: x is "
         "replicated, so 0 bytes are sent."),
    Step("ColumnParallelLinear.forward", "y_BSf",
         "Each rank multiplies x by its own columns of the first matrix. The result is "
         "its slice of the hidden layer. Nothing is sent.", makes="y_BSf"),
    Step("RowParallelLinear.forward", "x_BSf",
         "GELU works element by element, so each rank applies it to its own slice. "
         "Nothing is sent.", makes="h_BSf", drops="y_BSf"),
    Step("RowParallelLinear.forward", "partial_y_BSD",
         "Each rank multiplies its slice by its own rows of the second matrix. The "
         "result has the full shape, but it is only a partial sum.",
         makes="partial_y_BSD"),
    Step("ReduceFromTP.forward", "all-reduce",
         "g: an all-reduce adds the partial sums of all ranks. Now every rank has the "
         "same sum. This is the only communication forward: {bytes} bytes of payload.",
         takes="partial_y_BSD", makes="y_BSD", drops="partial_y_BSD"),
    Step("RowParallelLinear.forward", "return",
         "The bias is added once, after the sum: y is complete, and replicated.",
         makes="y_BSD"),
]  # fmt: skip
MLP_BACKWARD = [
    Step("ReduceFromTP.backward", "grad",
         "Backward begins with the gradient of the loss, dL/dy, the same on every "
         "rank. g sends nothing backward: dL/dy is also the gradient of each partial "
         "sum.",
         makes="dL/dy_BSD", drops="y_BSD"),
    Step("gradient", "h_BSf",
         "Each rank multiplies it by its rows of the second matrix: the gradient of "
         "its own slice of h. Nothing is sent.", makes="dL/dh_BSf"),
    Step("CopyToTP.backward", "partial_grad",
         "Then back through GELU and the first matrix. Each rank used only its own "
         "columns, so it has only a partial sum of dL/dx.",
         makes="partial_dL/dx_BSD", drops="dL/dh_BSf dL/dy_BSD"),
]  # fmt: skip
F_BACKWARD = Step(
    "CopyToTP.backward", "all-reduce",
    "f: backward it is an all-reduce. The partial sums are added, and every rank has "
    "the full dL/dx: {bytes} bytes of payload, the only communication backward.",
    takes="partial_dL/dx_BSD", makes="dL/dx_BSD", drops="partial_dL/dx_BSD",
)  # fmt: skip
F_BROKEN = Step(
    "CopyToTP.backward", "return",
    "The bug: f without its all-reduce. Each rank passes its partial sum on as if it "
    "were the full dL/dx. No error, no warning, 0 bytes.",
    makes="dL/dx_BSD", drops="partial_dL/dx_BSD",
)  # fmt: skip


def mlp(lesson, group, bug=None) -> dict:
    sizes = dict(batch_size=1, seq_len=3, hidden=2, width=8)
    torch.manual_seed(
        34
    )  # a seed for which both ranks' partial sums of dL/dx are large
    full = lesson.MLP(sizes["hidden"], sizes["width"])
    x_BSD, target_BSD = torch.randn(2, 1, 3, 2)
    if bug:
        lesson.apply_edit(lesson.BREAKS[bug], vars(lesson))
    script = [*MLP_FORWARD, *MLP_BACKWARD, F_BROKEN if bug else F_BACKWARD]
    recorder = Recorder(lesson, script)
    split, alone = lesson.tp_mlp(full, group), copy.deepcopy(full)
    x, x_alone = (x_BSD.clone().requires_grad_() for _ in range(2))
    up, down = "up_proj.weight", "down_proj.weight"
    weights = dict(split.named_parameters())
    says = (
        "Two ranks, one MLP: y = GELU(x · W₁) · W₂ + b. The input x is replicated "
        "(grey). Each rank has half of both matrices: half of the columns of W₁ and "
        "half of the rows of W₂. (torch stores the transposed matrices. Of weights "
        "only the shape is shown.)"
    )
    recorder.add("hold", says, {"x_BSD": x, up: weights[up], down: weights[down]})
    with recorder:
        with lesson.COMM.label("Megatron", "forward"):
            loss = lesson.squared_error(split(x), target_BSD)
        with lesson.COMM.label("Megatron", "backward"):
            loss.backward()
    lesson.squared_error(alone(x_alone), target_BSD).backward()
    wanted = {"dL/dx_BSD": x_alone.grad}
    assert torch.equal(recorder.made["dL/dx_BSD"], x.grad)
    grads, drops = {}, [down, up, "h_BSf"]
    for name, dim in ((up, 0), (down, 1)):
        grads[f"dL/d {name}"] = weights[name].grad
        whole = alone.get_parameter(name).grad
        wanted[f"dL/d {name}"] = lesson.shard(whole, dim, group)
    says = (
        "Each rank has also computed the gradients of its own slices of the weights. "
        "No other rank needs them, so nothing is sent."
    )
    recorder.add("compute", says, grads, drops)
    recorder.compare(MLP_END[bug], wanted)
    formulas = {
        lesson.Call("Megatron", phase, "all-reduce", "tp"): "1 × B·S·D·e"
        for phase in ("forward", "backward")
    }
    about = {"formulas": formulas, "sizes": {"B": 1, "S": 3, "D": 2, "e": 4}}
    title = "One MLP on two ranks, forward and backward"
    if bug:
        title = f"{title}: with --break {bug}"
        return recorder.recording(title=title, bug=bug, **about)
    return recorder.recording(title=title, **about)


MLP_END = {
    None: "Compared with the same MLP in one process: all gradients are the same, "
    "except for rounding errors. One all-reduce forward, one backward.",
    "f": "Compared with the same MLP in one process: dL/dx is wrong on both ranks, and "
    "differs between them. The loss and the gradients of these weights are correct: "
    "the error reaches the layers below, and the loss of the next step.",
}


def mlp_break_f(lesson, group) -> dict:
    return mlp(lesson, group, "f")


ATTENTION = [
    Step("CopyToTP.forward", "return",
         "f is applied once, before all three products. Forward it sends nothing: x is "
         "replicated."),
    Step("Attention.forward", "q k v",
         "Each rank computes queries, keys and values of its own heads only: two of "
         "the four heads, of two numbers each. Nothing is sent.", makes="q k v",
         drops="q_proj.weight o_proj.weight"),
    Step("CoreAttention.forward", "weights_BNSS",
         "Each position weights itself and those before it, separately in each head: "
         "softmax of q · k, a 3 × 3 table per head. Heads do not interact, so nothing "
         "is sent.",
         makes="weights_BnSS", drops="x_BSD"),
    Step("RowParallelLinear.forward", "x_BSf",
         "The weights times the values: the output of this rank's heads.",
         makes="heads_BSd", drops="q k v"),
    Step("RowParallelLinear.forward", "partial_y_BSD",
         "o_proj mixes the heads. It is split by rows: each rank's heads give a "
         "partial sum of the full shape.", makes="partial_y_BSD", drops="weights_BnSS"),
    Step("ReduceFromTP.forward", "all-reduce",
         "g: an all-reduce adds the partial sums, {bytes} bytes of payload. Only here "
         "the heads of different ranks are combined.",
         takes="partial_y_BSD", makes="y_BSD", drops="partial_y_BSD"),
    Step("RowParallelLinear.forward", "return",
         "The bias is added once, after the sum. The output is replicated.",
         makes="y_BSD"),
    Step("ReduceFromTP.backward", "grad",
         "Backward: dL/dy is the same on every rank, and g passes it on. Nothing is "
         "sent.", makes="dL/dy_BSD", drops="y_BSD"),
    Step("gradient", "heads_BSd",
         "Back through o_proj: each rank gets the gradient of its own heads. Nothing "
         "is sent.", makes="dL/dheads_BSd", drops="heads_BSd"),
    Step("CopyToTP.backward", "partial_grad",
         "Back through the heads to x. Queries, keys and values of this rank's heads "
         "together give a partial sum of dL/dx.",
         makes="partial_dL/dx_BSD", drops="dL/dheads_BSd dL/dy_BSD"),
    Step("CopyToTP.backward", "all-reduce",
         "f: backward it is an all-reduce of {bytes} bytes of payload, one for q, k "
         "and v together.",
         takes="partial_dL/dx_BSD", makes="dL/dx_BSD", drops="partial_dL/dx_BSD"),
]  # fmt: skip


def attention(lesson, group) -> dict:
    config = lesson.Config(7, 8, heads=4, kv_heads=4, layers=1, seq_len=3, dropout=0.0)
    layer, tables = layer_and_tables(lesson, config)
    alone = copy.deepcopy(layer).self_attn
    lesson.parallelize_layer(layer, group)
    x_BSD, upstream_BSD = torch.randn(2, 1, 3, 8)
    x, x_alone = (x_BSD.clone().requires_grad_() for _ in range(2))
    split = layer.self_attn
    names = "q_proj.weight", "o_proj.weight"
    says = (
        "Attention with four heads on two ranks. x is replicated (grey): three "
        "positions of eight elements. The projections are split by heads: each rank "
        "has two of the four. (Of weights only the shape is shown.)"
    )
    recorder = Recorder(lesson, ATTENTION)
    held = {name: split.get_parameter(name) for name in names}
    recorder.add("hold", says, {"x_BSD": x} | held)
    with recorder:
        with lesson.COMM.label("with TP", "forward"):
            y = split(x, tables)
        with lesson.COMM.label("with TP", "backward"):
            y.backward(upstream_BSD)
    alone(x_alone, tables).backward(upstream_BSD)
    says = (
        "Compared with the same attention in one process: dL/dx is the same, except "
        "for rounding errors. One all-reduce forward, one backward, for any number of "
        "heads."
    )
    recorder.compare(says, {"dL/dx_BSD": x_alone.grad})
    formulas = {
        lesson.Call("with TP", phase, "all-reduce", "tp"): "1 × B·S·D·e"
        for phase in ("forward", "backward")
    }
    sizes = {"B": 1, "S": 3, "D": 8, "e": 4}
    title = "Attention, split by heads"
    return recorder.recording(title=title, formulas=formulas, sizes=sizes)


def layer_and_tables(lesson, config) -> tuple:
    """One decoder layer, and what it takes from its model: rotary tables and mask."""
    cos, sin = lesson.rotary_table(config.seq_len, config.hidden // config.heads)
    future = torch.ones(config.seq_len, config.seq_len, dtype=torch.bool).triu(1)
    return lesson.DecoderLayer(config), (cos, sin, future)


LOSS, TARGETS = "VocabParallelCrossEntropy.forward", torch.tensor([[1, 6, 3]])
VOCAB = [
    Step(LOSS, "x_BSv",
         "Two ranks cannot share seven tokens equally: the last column of rank 1 is "
         "padding. It is set to −∞, so that it has no effect.",
         makes="x_BSv", drops="logits_BSv"),
    Step(LOSS, "all-reduce",
         "First all-reduce: the largest logit of each position, so that no exp can "
         "overflow. Each rank contributes the largest of its own columns. {bytes} "
         "bytes of payload.",
         takes="own_max_BS", makes="max_BS"),
    Step(LOSS, "x_BSv",
         "Each rank subtracts it from its own columns. Nothing is sent.",
         makes="x_BSv", drops="max_BS"),
    Step(LOSS, "exp_BSv", "exp, element by element. Nothing is sent.", makes="exp_BSv"),
    Step(LOSS, "all-reduce",
         "Second all-reduce: the sum of the exponentials over the whole vocabulary. "
         "Each rank contributes the sum of its own columns. {bytes} bytes "
         "of payload.",
         takes="own_sum_BS", makes="sum_BS"),
    Step(LOSS, "picked_BS",
         "The logit of the target: only the rank that has its column knows it. The "
         "other rank contributes 0.", makes="picked_BS", nth=2),
    Step(LOSS, "all-reduce",
         "Third all-reduce: after the sum every rank has the target's logit. {bytes} "
         "bytes of payload.",
         takes="picked_BS", makes="x[target]_BS", drops="picked_BS x_BSv"),
    Step(LOSS, "return",
         "loss = log(sum) − x[target], for each position, and the same on every rank. "
         "The logits themselves were never sent.",
         makes="loss_BS", drops="x[target]_BS"),
    Step("VocabParallelCrossEntropy.backward", "return",
         "Backward: the softmax, minus 1 at the target, divided by the number of "
         "positions. Each rank has what it needs for its own columns. Nothing is sent.",
         makes="dL/dlogits_BSv", drops="exp_BSv sum_BS"),
]  # fmt: skip


def vocab_loss(lesson, group) -> dict:
    V, T = 7, group.size()
    logits_BSV = torch.randn(1, 3, V) * 2
    padded = nn.functional.pad(logits_BSV, (0, -V % T))
    mine = lesson.shard(padded, 2, group).requires_grad_()
    says = (
        "The loss of three positions, with a vocabulary of seven tokens on two ranks. "
        "Each rank has the logits of its own tokens: 0 to 3, and 4 to 6. The targets "
        "are replicated (grey): 1, 6 and 3."
    )
    recorder = Recorder(lesson, VOCAB)
    recorder.add("hold", says, {"logits_BSv": mine, "target_BS": TARGETS})
    with recorder:
        with lesson.COMM.label("with TP", "loss"):
            loss = lesson.sharded_loss(mine, TARGETS, group, V)
        with lesson.COMM.label("with TP", "backward"):
            loss.backward()
    alone = logits_BSV.clone().requires_grad_()
    loss_BS = nn.functional.cross_entropy(alone.mT, TARGETS, reduction="none")
    loss_BS.mean().backward()
    grad = nn.functional.pad(alone.grad, (0, -V % T))
    says = (
        "Compared with F.cross_entropy in one process: the same losses and gradients, "
        "except for rounding errors. Three values per position were sent, not seven."
    )
    wanted = {"loss_BS": loss_BS.detach()}
    recorder.compare(says, wanted | {"dL/dlogits_BSv": lesson.shard(grad, 2, group)})
    return recorder.recording(
        title="The loss, with the vocabulary split",
        formulas={lesson.Call("with TP", "loss", "all-reduce", "tp"): "3 × B·S·e"},
        sizes={"B": 1, "S": 3, "e": 4},
    )


GATHER, ROWS = "GatherThenLinear.forward", "RowParallelLinear.forward"
BACK = "GatherThenLinear.backward"
SP_FORWARD = [
    Step("Attention.forward", "x_BSD",
         "LayerNorm works position by position, so each rank applies it to its own "
         "positions only. Nothing is sent.", makes="norm_x_BsD"),
    Step(GATHER, "all-gather",
         "Attention needs all positions. An all-gather joins them: {bytes} bytes of "
         "payload.",
         takes="norm_x_BsD", makes="norm_x_BSD", drops="norm_x_BsD"),
    Step("Attention.forward", "q k v",
         "From here on the heads are split: each rank has queries, keys and values of "
         "its own head, for all positions.", makes="q k v", drops="norm_x_BSD"),
    Step(ROWS, "x_BSf", "The output of this rank's head. Nothing is sent.",
         makes="heads_BSd", drops="q k v"),
    Step(ROWS, "partial_y_BSD",
         "o_proj is split by rows: each rank has a partial sum, for all positions.",
         makes="partial_y_BSD", drops="heads_BSd"),
    Step("ReduceScatterWithGrad.forward", "reduce-scatter",
         "A reduce-scatter adds the partial sums, and each rank keeps only its own "
         "positions: {bytes} bytes of payload. A rank sends half as much as in the "
         "all-reduce that stands here without SP.",
         takes="partial_y_BSD", makes="y_BsD", drops="partial_y_BSD"),
    Step("DecoderLayer.forward", "x_BSD",
         "Bias, dropout and residual, for this rank's positions only.",
         makes="x_BsD", drops="y_BsD", nth=2),
    Step("MLP.forward", "x_BSD",
         "The second half of the layer does the same. LayerNorm, on this rank's "
         "positions.", makes="norm_x_BsD"),
    Step(GATHER, "all-gather",
         "An all-gather joins the positions: {bytes} bytes of payload.",
         takes="norm_x_BsD", makes="norm_x_BSD", drops="norm_x_BsD"),
    Step(ROWS, "x_BSf",
         "Each rank's own columns of the MLP, and GELU. Nothing is sent.",
         makes="h_BSf", drops="norm_x_BSD"),
    Step(ROWS, "partial_y_BSD", "Each rank's own rows: a partial sum.",
         makes="partial_y_BSD", drops="h_BSf"),
    Step("ReduceScatterWithGrad.forward", "reduce-scatter",
         "A reduce-scatter adds them, and each rank keeps its own positions: {bytes} "
         "bytes of payload.",
         takes="partial_y_BSD", makes="y_BsD", drops="partial_y_BSD"),
    Step("DecoderLayer.forward", "return",
         "The residual: the layer's output, sharded by position as its input was.",
         makes="out_BsD", drops="y_BsD x_BsD"),
]  # fmt: skip


def sp_backward(block: str) -> list[Step]:
    return [
        Step("ReduceScatterWithGrad.backward", "all-gather",
             f"Backward through {block}. The backward of a reduce-scatter is an "
             f"all-gather: each rank's partial sum had all positions, so it needs "
             f"all of dL/dy.",
             takes="dL/dy_BsD", makes="dL/dy_BSD", drops="out_BsD dL/dx_BsD"),
        Step(BACK, "all-gather",
             "For the gradients of the weights each rank needs all positions of the "
             "input. It saved only its own: one extra all-gather, {bytes} bytes "
             "of payload.",
             takes="norm_x_BsD", makes="norm_x_BSD"),
        Step(BACK, "reduce-scatter",
             "The backward of an all-gather is a reduce-scatter: the partial sums of "
             "dL/dx are added, and each rank keeps its own positions.",
             takes="partial_dL/dx_BSD", makes="dL/dx_BsD",
             drops="dL/dy_BSD norm_x_BSD"),
    ]  # fmt: skip


SP_END = Step(
    "all_reduce_replicated_gradients", "all-reduce",
    "LayerNorms and the biases of o_proj and down_proj are replicated, but each rank "
    "applied them to its own positions only. A final all-reduce sums their gradients: "
    "{bytes} bytes of payload.",
    takes="own_grads", makes="grads_of_norms_and_biases", drops="dL/dx_BsD",
)  # fmt: skip


SP_INPUT = (
    "The gradient of the layer's input, which the layer before needs: each rank has "
    "it for its own positions."
)


def sp_layer(lesson, group) -> dict:
    config = lesson.Config(7, 4, heads=2, kv_heads=2, layers=1, seq_len=4, dropout=0.0)
    layer, tables = layer_and_tables(lesson, config)
    alone = copy.deepcopy(layer)
    lesson.parallelize_layer(layer, group)
    lesson.split_sequence(layer, group)
    x_BSD, upstream_BSD = torch.randn(2, 1, 4, 4)
    x_BsD = lesson.shard(x_BSD, 1, group).requires_grad_()
    script = SP_FORWARD + sp_backward("the MLP") + sp_backward("attention") + [SP_END]
    recorder = Recorder(lesson, script)
    says = (
        "A transformer layer with the sequence split: four positions, of which each "
        "rank has two. Between the large matrices no rank has the full sequence."
    )
    recorder.add("hold", says, {"x_BsD": x_BsD})
    with recorder:
        with lesson.COMM.label("TP + SP", "forward"):
            out_BsD = layer(x_BsD, tables)
        with lesson.COMM.label("TP + SP", "backward"):
            out_BsD.backward(lesson.shard(upstream_BSD, 1, group))
        with lesson.COMM.label("TP + SP", "summing"):
            lesson.all_reduce_replicated_gradients(layer, group)
    x_alone = x_BSD.clone().requires_grad_()
    alone(x_alone, tables).backward(upstream_BSD)
    whole = [n for n, p in layer.named_parameters() if not getattr(p, "shardings", ())]
    grads = torch.cat([alone.get_parameter(name).grad.flatten() for name in whole])
    says = (
        "Compared with the same layer in one process: the same gradients, except for "
        "rounding errors. All-gathers and reduce-scatters replaced the all-reduces."
    )
    recorder.add("compute", SP_INPUT, {"dL/dx_BsD": x_BsD.grad})
    wanted = {"grads_of_norms_and_biases": grads}
    recorder.compare(says, wanted | {"dL/dx_BsD": lesson.shard(x_alone.grad, 1, group)})
    call = lambda phase, name: lesson.Call("TP + SP", phase, name, "tp")
    formulas = {
        call("forward", "all-gather"): "2 × B·S·D·e",
        call("forward", "reduce-scatter"): "2 × B·S·D·e",
        call("backward", "all-gather"): "4 × B·S·D·e",
        call("backward", "reduce-scatter"): "2 × B·S·D·e",
        call("summing", "all-reduce"): "1 × 6·D·e",
    }
    sizes = {"B": 1, "S": 4, "D": 4, "e": 4}
    title = "A transformer layer with the sequence split"
    return recorder.recording(title=title, formulas=formulas, sizes=sizes)


# The batch: four ranks, two replicas of two TP ranks each.

LINES = "send", "to", "one", "bubble", "stage", "two", "wait", "I"
BATCH = [
    step
    for i, length in ((1, ""), (2, "The second micro-batch, in the same way. "))
    for step in (
        Step("broadcast_batch", "broadcast",
             f"{length}First the shape, three integers: a rank that does not know how "
             "long the lines are cannot allocate memory for them. {bytes} "
             "bytes of payload.",
             takes=f"loaded_shape_{i}", makes=f"shape_{i}"),
        Step("broadcast_batch", "broadcast",
             "Then tokens and targets, into a tensor of that shape. The ranks of a TP "
             "group have the same batch now; the other replica has another one.",
             takes=f"micro_batch_{i}", makes=f"micro_batch_{i}", drops=f"shape_{i}"),
    )
] + [
    Step("count_targets", "all-reduce",
         "Replicas have different numbers of targets. An all-reduce over dp adds them, "
         "{bytes} bytes of payload: every token of the batch will have the same weight.",
         takes="own_targets", makes="all_targets"),
]  # fmt: skip


def batch(lesson, _group) -> dict:
    groups = lesson.make_mesh(dict(pp=1, dp=2, tp=2), 60)
    args = SimpleNamespace(
        microbatches=2, ragged=True, device="cpu", zero=False, hidden=1, tp=2
    )
    rows = torch.full((len(LINES), 9), lesson.PAD)
    for row, line in zip(rows, LINES):
        row[: len(line)] = torch.tensor(list(line.encode()))
    tokens, target = rows[:, :-1].clone(), rows[:, 1:].clone()
    whole = tokens, target.masked_fill(target == lesson.PAD, lesson.IGNORE)
    recorder = Recorder(lesson, BATCH)
    loaded = {}
    if groups["tp"].rank() == 0:
        parts = lesson.make_microbatches(whole, groups, 2, ragged=True)
        loaded = {f"micro_batch_{i}": part for i, part in enumerate(parts, 1)}
    says = (
        "Eight lines of text for two replicas of two ranks each: ranks 0 and 1, ranks "
        "2 and 3. In each replica one rank has loaded its lines, as two micro-batches, "
        "each as long as its longest line. Tokens are above, targets below; · is "
        "padding."
    )
    recorder.add("hold", says, loaded)
    with recorder:
        with lesson.COMM.label("mesh", "batch"):
            micro_batches = lesson.broadcast_batch(whole, groups, args)
            total = lesson.count_targets(micro_batches, groups["dp"])
    says = "The number of targets that one process counts in this batch."
    recorder.compare(says, {"all_targets": (whole[1] != lesson.IGNORE).sum()})
    assert total == recorder.made["all_targets"]
    tokens = sum(part[0].numel() for part in micro_batches)
    call = lambda phase, name, axis: lesson.Call("mesh", phase, name, axis)
    return recorder.recording(
        title="A batch is distributed, its shape first",
        formulas={
            call("shapes", "broadcast", "tp"): "M × 24",
            call("batch", "broadcast", "tp"): "M × 2·8·n/M",
            call("batch", "all-reduce", "dp"): "1 × 8",
        },
        sizes={"M": 2, "n": tokens},
        groups={"tp": 2, "dp": 2},
    )


# Schedules: four stages, in measured time.


class Sleep(torch.autograd.Function):
    """Takes the time of a stage's forward pass, and twice that backward."""

    @staticmethod
    def forward(ctx, x, unit, seconds, shape):
        ctx.seconds, ctx.like = seconds, x
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
        self.seconds, self.shape = seconds, shape
        self.unit = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return Sleep.apply(x, self.unit, self.seconds, self.shape)


KINDS, MICRO_BATCHES, FORWARD = {"gpipe": "GPipe", "1f1b": "1F1B"}, 8, 0.05


def one_run(lesson, groups, kind: str, M: int, seconds: float) -> list[dict]:
    """Of each stage: when it computed, what it sent when, and what was counted."""
    stage, sent, original = groups["pp"].rank(), [], lesson.send

    def send(x, dst, group, what="a message"):
        before = counted()
        message = original(x, dst, group, what)
        sent.append({"at": time.time(), "bytes": difference(counted(), before)})
        return message

    def counted():
        calls = lesson.COMM.bytes.items()
        return {row_of(call._replace(run=kind)): n for call, n in calls}

    clear(lesson)
    model = SleepingStage(seconds, [1, 4, 8])
    pipeline = lesson.Pipeline(model, lambda y, _: y.sum(), groups)
    steps = lesson.schedule(kind, stage, groups["pp"].size(), M)
    lesson.send = send
    dist.barrier()
    pipeline.run(steps, [torch.zeros(2, 1, 4, dtype=torch.int64)] * M)
    lesson.send = original
    calls, nbytes = dict(lesson.COMM.calls), dict(lesson.COMM.bytes)
    mine = {"spans": pipeline.events, "sent": sent, "calls": calls, "bytes": nbytes}
    return lesson.gather_objects(mine)


def begin_and_end(run: list[dict]) -> tuple[float, float]:
    spans = [span for of_stage in run for span in of_stage["spans"]]
    return min(s["start"] for s in spans), max(s["end"] for s in spans)


def schedules(lesson, group) -> dict:
    P, M, rank = group.size(), MICRO_BATCHES, group.rank()
    groups = lesson.make_mesh(dict(pp=P, dp=1, tp=1), 60)
    runs = {}
    took = lambda run: begin_and_end(run)[1] - begin_and_end(run)[0]
    for kind in KINDS:
        one_run(lesson, groups, kind, 1, 0.001)  # the first one warms up
        tries = [one_run(lesson, groups, kind, M, FORWARD) for _ in range(3)]
        runs[kind] = min(tries, key=took)
    recorder = Recorder(lesson)
    clear(lesson)
    predicted = {}
    for kind, run in runs.items():
        for call, n in run[rank]["calls"].items():
            lesson.COMM.calls[call._replace(run=kind)] = n
            lesson.COMM.bytes[call._replace(run=kind)] = run[rank]["bytes"][call]
        call = lambda phase, kind=kind: lesson.Call(kind, phase, "send/recv", "pp")
        if rank < P - 1:
            predicted[call("shapes")] = "M × 24"
            predicted[call("forward")] = "M × b·S·D·e"
        if rank > 0:
            predicted[call("backward")] = "M × b·S·D·e"
    sizes = {"M": M, "b": 1, "S": 4, "D": 8, "e": 4}
    title = "GPipe and 1F1B on four stages"
    about = recorder.recording(title=title, formulas=predicted, sizes=sizes)
    about |= {"time": {"runs": [*KINDS.values()], "unit": "ms"}}
    return about | {"events": moments(runs, P, M)}


def moments(runs: dict[str, list], P: int, M: int) -> list[dict]:
    """What begins, or is sent, at about the same time is one event."""
    parts = []  # (when, stage, a span or a message)
    for kind, run in runs.items():
        begin, _ = begin_and_end(run)
        for stage, of_stage in enumerate(run):
            for span in of_stage["spans"]:
                start, end = (
                    round(1e3 * (span[k] - begin), 1) for k in ("start", "end")
                )
                about = {"run": KINDS[kind], "what": span["what"], "start": start}
                about |= {"end": end, "microbatch": span["microbatch"]}
                parts.append((start, stage, about))
            for message in of_stage["sent"]:
                when = round(1e3 * (message["at"] - begin), 1)
                parts.append((when, stage, {"bytes": message["bytes"]}))
    spans = [(stage, part) for _, stage, part in parts if "what" in part]
    shortest = min(span["end"] - span["start"] for _, span in spans)
    together = []
    for part in sorted(parts, key=lambda part: part[:2]):
        if not together or part[0] - together[-1][0][0] > shortest / 2:
            together.append([])
        together[-1].append(part)
    nothing = {name: [0] * P for name in KINDS.values()}
    ranks = [{} for _ in range(P)]
    events = [
        dict(kind="hold", time=0, says=SCHEDULES_START, kept=nothing, ranks=ranks)
    ]
    ends = [group[0][0] for group in together[1:]] + [max(s["end"] for _, s in spans)]
    for group, end in zip(together, ends):
        events.append(moment(group, end, spans, P))
    return [*events, the_end(spans, P, M)]


def moment(group: list[tuple], end: float, spans: list, P: int) -> dict:
    """One event: what begins now, and how things stand halfway to the next event."""
    now, ranks = group[0][0], []
    for stage in range(P):
        mine = [part for _, s, part in group if s == stage]
        sent = Counter()
        for part in mine:
            sent.update(part.get("bytes", {}))
        part = {"spans": [x for x in mine if "what" in x], "bytes": dict(sent)}
        ranks.append({k: v for k, v in part.items() if v})
    then, says, kept = (now + end) / 2, [f"{now:.0f} to {end:.0f} ms."], {}
    for name in KINDS.values():
        kept[name] = kept_at(then, spans, name, P)
        plural = "" if kept[name][0] == 1 else "es"
        doing = state(then, spans, name, P)
        says.append(
            f"{name} {doing}; stage 0 keeps {kept[name][0]} micro-batch{plural}."
        )
    return dict(kind="time", time=now, says=" ".join(says), kept=kept, ranks=ranks)


SCHEDULES_START = (
    "Four pipeline stages, eight micro-batches, two schedules: above GPipe, below "
    "1F1B. Each bar is measured time on that stage's rank. Compute is simulated: a "
    "stage sleeps, for a backward pass twice as long as for a forward pass. The "
    "messages are real."
)


def kept_at(now: float, spans: list, name: str, P: int) -> list[int]:
    """Micro-batches whose activations each stage holds: forward begun, backward not
    over."""
    kept = [0] * P
    for stage, span in spans:
        if span["run"] == name:
            kept[stage] += span["what"] == "forward" and span["start"] <= now
            kept[stage] -= span["what"] == "backward" and span["end"] <= now
    return kept


def state(now: float, spans: list, name: str, P: int) -> str:
    """In words: which stages compute."""
    mine = [(stage, span) for stage, span in spans if span["run"] == name]
    busy = {s for s, span in mine if span["start"] <= now < span["end"]}
    idle = [stage for stage in range(P) if stage not in busy]
    if now >= max(span["end"] for _, span in mine):
        return "is done"
    if not idle:
        return "computes on all stages"
    return f"waits on stage{'s' * (len(idle) > 1)} {', '.join(map(str, idle))}"


def the_end(spans: list, P: int, M: int) -> dict:
    """The whole of both; waiting as part of the time, as the notebook has it."""
    says = []
    for name in KINDS.values():
        mine = [span for _, span in spans if span["run"] == name]
        took = max(s["end"] for s in mine) - min(s["start"] for s in mine)
        waits = 1 - sum(s["end"] - s["start"] for s in mine) / P / took
        kept = [kept_at(span["start"], spans, name, P) for span in mine]
        most = ", ".join(str(max(of_stage)) for of_stage in zip(*kept))
        says.append(
            f"{name} took {took:.0f} ms, and stages waited {waits:.3f} of it; it kept "
            f"at most {most} micro-batches on stages 0 to {P - 1}."
        )
    rule = f"Predicted for both: (P − 1)/(M + P − 1) = {(P - 1) / (M + P - 1):.3f}."
    end = max(span["end"] for _, span in spans)
    kept = {name: kept_at(end, spans, name, P) for name in KINDS.values()}
    ranks = [{} for _ in range(P)]
    return dict(
        kind="check", time=end, says=" ".join([*says, rule]), kept=kept, ranks=ranks
    )


SCENES = {  # name → ranks, the lesson, the scene
    "ring": (4, "00_collectives", ring),
    "mlp": (2, "01_naive_mlp_tp", mlp),
    "mlp-break-f": (2, "01_naive_mlp_tp", mlp_break_f),
    "attention": (2, "02_transformer_tp", attention),
    "vocab-loss": (2, "03_vocab_parallel", vocab_loss),
    "sp-layer": (2, "04_sequence_parallel", sp_layer),
    "schedules": (4, "05_3d_parallel", schedules),
    "batch": (4, "05_3d_parallel", batch),
}


def record(folder: Path, names: list[str]) -> None:
    """One rank: all scenes for as many ranks as there are."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    for name in names:
        _, module, scene = SCENES[name]
        sys.modules.pop(module, None)  # a scene may have broken it
        lesson = importlib.import_module(module)
        torch.manual_seed(1)
        group = lesson.mesh_groups({"tp": dist.get_world_size()}, 60)["tp"]
        about = {"name": name, "lesson": module} | scene(lesson, group)
        if dist.get_rank() == 0:
            text = json.dumps(about, ensure_ascii=False, separators=(",", ":"))
            Path(folder, f"{name}.json").write_text(text + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)  # as the lessons do: what a tensor still holds of a group can abort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENES))
    args = parser.parse_args()
    names = args.names or [*SCENES]
    if unknown := set(names) - set(SCENES):
        parser.error(f"no recording is called {', '.join(sorted(unknown))}")
    if "RANK" in os.environ:
        return record(args.folder, names)
    args.folder.mkdir(parents=True, exist_ok=True)
    for ranks in dict.fromkeys(SCENES[name][0] for name in names):
        some = [name for name in names if SCENES[name][0] == ranks]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, f"--nproc_per_node={ranks}", __file__, "--folder"]
        env = {"OMP_NUM_THREADS": "1", "PET_LOCAL_ADDR": "127.0.0.1"} | os.environ
        subprocess.run([*command, str(args.folder), *some], check=True, env=env)
        for name in some:
            size = (args.folder / f"{name}.json").stat().st_size
            print(f"{name:12}  {size:6,} bytes")


if __name__ == "__main__":
    main()
