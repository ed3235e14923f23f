"""Run a lesson or a script, and say where a fault begins.

    torchrun --standalone --nproc_per_node=2 tools/doctor.py 02_transformer_tp.py

It runs unchanged, with its own flags. From outside, the doctor

- compares what each module returns in the first forward pass of a run with the run
  without TP, and names the first module that is wrong;
- notes each call of torch.distributed in the store of all ranks before it is made: if
  ranks wait for each other, it says where each rank is, and which call differs first;
- names the line that raised, a rank that gloo aborts, a machine that does not answer;
- looks for calls that no rank waited for, and draws conclusions from failed checks.

What it says is the end of torchrun's report. Calls that DTensor makes are not seen.
"""

import collections
import ctypes
import functools
import inspect
import itertools
import json
import linecache
import math
import os
import re
import runpy
import signal
import sys
import textwrap
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12, torch.int64: 0}  # relative


class Script:
    """The lesson or script that is run, and what it says of itself."""

    path = Path()
    meter = None  # its METER: which run, and which phase of it

    @classmethod
    @functools.cache  # it is asked at every call of Python
    def is_own(cls, filename: str) -> bool:
        """Is this file in the script's folder, or in the one above?"""
        folder = Path(filename).parent
        return folder in (cls.path.parent, cls.path.parent.parent)

    @classmethod
    def label(cls) -> tuple[str, str]:
        """The run and its phase, as "with TP", "backward"; empty if it names none."""
        return getattr(cls.meter, "label", None) or ("", "")

    @classmethod
    def find_meter(cls) -> None:
        modules = [sys.modules["__main__"], *sys.modules.values()]
        for module in modules:  # of a script it is lesson 00's
            cls.meter = cls.meter or getattr(module, "__dict__", {}).get("METER")


def lines_of_script(frames) -> list[str]:
    """Where the script is: "line 88 in backward", the innermost first."""
    lines = []
    for frame, number in frames:
        if Script.is_own(frame.f_code.co_filename):
            name = Path(frame.f_code.co_filename)
            at = f"line {number}" if name == Script.path else f"{name.name}:{number}"
            lines.append(f"{at} in {frame.f_code.co_name}")
    return lines


# ---- The first module whose output is wrong


class Output(NamedTuple):
    """What a module returned on this rank, compared with the run without TP."""

    size: int
    norm: float
    off: float  # relative difference; inf if it cannot be a block
    blocks: int  # of this shape that the full tensor has
    block: tuple | None  # the one that it equals
    allowed: float


INPUT = "the model's input"
OUTPUT = "the model's output"
RIGHT = "the forward pass is right"


class Forward:
    """What each module returns in the first forward pass of each run."""

    def __init__(self):
        # Of the first run: name of a module → its output. As NumPy arrays: a script
        # that counts the tensors which are alive must not count these.
        self.full = {}
        self.outputs = {}  # run → name → Output
        self.names = {}  # module → name in its model
        self.raised = {}  # run → the module that raised an error, and shapes

    def watch(self) -> None:
        add_hook = nn.modules.module.register_module_forward_hook
        nn.modules.module.register_module_forward_pre_hook(self.before)
        add_hook(self.after)
        add_hook(self.on_error, always_call=True)  # also if forward raises

    def before(self, module: nn.Module, inputs: tuple) -> None:
        run, phase = Script.label()
        if phase == "forward" and run not in self.outputs:
            self.outputs[run] = {}
            self.names = {part: name for name, part in module.named_modules()}
            self.note(run, INPUT, inputs[0] if inputs else None)
            STEPS.start(run)

    def after(self, module: nn.Module, inputs: tuple, out) -> None:
        run, phase = Script.label()
        if phase == "forward" and module in self.names:
            name = self.names[module] or OUTPUT
            self.note(run, name, out)
            if module is next(iter(self.names)):
                self.names = {}  # the first forward pass of this run has ended

    def on_error(self, module: nn.Module, inputs: tuple, out) -> None:
        """PyTorch calls it after each forward; the first after an error knows where."""
        error = sys.exc_info()[1]
        run = Script.label()[0]
        # checkpoint() ends a second forward pass early by an error that it catches.
        is_own = type(error).__name__ != "_StopRecomputationError"
        if error and is_own and run and run not in self.raised:
            name = self.names.get(module) or "the model"
            self.raised[run] = describe_module(name, module, error)

    def note(self, run: str, name: str, out) -> None:
        if type(out) not in (Tensor, nn.Parameter) or name in self.outputs[run]:
            return
        x = torch.view_as_real(out) if out.is_complex() else out
        x = x.detach().double()
        x = x.where(x.isfinite(), 0)  # masked scores are −∞
        if len(self.outputs) == 1:
            self.full[name] = x.cpu().numpy().copy()
        if name in self.full:
            allowed = ALLOWED.get(out.dtype, 1e-2)
            full = torch.as_tensor(self.full[name], device=x.device)
            block, blocks, off = find_block(x, full, allowed)
            one = Output(x.numel(), x.norm().item(), off, blocks, block, allowed)
            self.outputs[run][name] = one

    def report(self, wrong: list[str]) -> dict[str, str]:
        """Run → where it is first seen wrong, by what all ranks have noted.

        wrong: the runs in which something is wrong.
        """
        everyone = [None] * dist.get_world_size()
        plain = {}  # a class of a file that runpy runs cannot be sent
        for run, outputs in self.outputs.items():
            plain[run] = {name: tuple(output) for name, output in outputs.items()}
        dist.all_gather_object(everyone, plain)
        texts = {}
        runs = list(self.outputs)
        for first in runs[:1]:  # none if the script names no forward pass
            text = self.where_ranks_differ([of_rank[first] for of_rank in everyone])
            if text:
                texts[first] = text
        for run in [run for run in runs[1:] if run in wrong]:
            ranks = []
            for of_rank in everyone:
                found = of_rank.get(run, {})
                ranks.append({name: Output(*x) for name, x in found.items()})
            text = self.where_wrong(ranks)
            if text:
                texts[run] = text
        return texts

    @staticmethod
    def where_ranks_differ(ranks: list[dict]) -> str:
        """From which module on the run without TP is not the same on all ranks.

        ranks: of each rank, name of a module → its output, as a tuple.
        """
        if len({tuple(outputs) for outputs in ranks}) > 1:  # other modules: stages
            return ""
        for name in ranks[0]:
            outputs = [Output(*outputs[name]) for outputs in ranks]
            norms = [output.norm for output in outputs]
            if len({output.size for output in outputs}) > 1:  # a stage's activations
                return ""
            if max(norms) - min(norms) > outputs[0].allowed * max(norms):
                text = (
                    f"not the same on all ranks, from {name} on: does a seed, a batch"
                )
                return f"{text} or a weight depend on the rank?"
        return ""

    def where_wrong(self, ranks: list[dict]) -> str:
        """Between which modules forward becomes wrong; "" if that cannot be said.

        ranks: of each rank, name of a module → its output. Of modules inside one that
        is right nothing is said.
        """
        is_right = {}
        for name in ranks[0]:
            parts = [outputs[name] for outputs in ranks if name in outputs]
            if len(parts) == len(ranks):
                norm = torch.as_tensor(self.full[name]).norm().item()
                is_right[name] = are_right(parts, norm)
        if is_right.get(INPUT) is None:  # the rows of a micro-batch, an activation
            return ""
        outer = tuple(f"{name}." for name in is_right if is_right[name])
        right = ""
        for name in is_right:
            if is_right[name]:
                right = f"right up to {name}"
            elif is_right[name] is False and not name.startswith(outer):
                right = f"{right} and " if right else ""
                return f"forward is {right}wrong from {name} on"
        if right.endswith(OUTPUT):
            return RIGHT
        return f"forward is {right}, then it cannot be compared" if right else ""


def find_block(part: Tensor, full: Tensor, allowed: float) -> tuple:
    """Which block of the full tensor is this? (block or None, blocks, difference)

    The full tensor is cut into blocks of the part's shape; the last may be padded.
    """
    if part.dim() != full.dim():
        return None, 0, math.inf
    counts = [math.ceil(n / max(m, 1)) for n, m in zip(full.shape, part.shape)]
    if any(m > n for n, m in zip(full.shape, part.shape)) or math.prod(counts) > 64:
        return None, 0, math.inf
    scale = full.abs().max().clamp(min=1e-30) if full.numel() else 1.0
    best = math.inf
    for block in itertools.product(*map(range, counts)):
        cut = [slice(i * m, (i + 1) * m) for i, m in zip(block, part.shape)]
        piece = full[tuple(cut)]
        same = part[tuple(slice(n) for n in piece.shape)]
        off = ((same - piece).abs().max() / scale).item() if piece.numel() else 0.0
        if off <= allowed:
            return block, math.prod(counts), off
        best = min(best, off)
    return None, math.prod(counts), best


def are_right(parts: list[Output], norm: float) -> bool | None:
    """Do the outputs of all ranks fit the one without TP? None: that cannot be said."""
    blocks = {part.block for part in parts}
    if len({part.blocks for part in parts}) > 1 or parts[0].blocks == 0:
        return None  # of other shapes: a stage's activations, another batch
    is_cut = max(part.blocks for part in parts) > 1
    if None not in blocks:  # each rank has a block; together they must be all of it
        return len(blocks) == parts[0].blocks or None
    if not is_cut:
        return False
    # In parts that were cut in another way: an equal norm is no proof.
    off = abs(math.hypot(*[part.norm for part in parts]) - norm)
    return None if off <= 1e-4 * norm else False


# ---- What the script calls in the first step of each run


class Steps:
    """The functions that compute a loss and a norm in each run, and its optimizer."""

    def __init__(self):
        self.calls = {}  # (run, "loss" or "clipping") → functions, with lines
        self.optimizers = {}  # run → class with numbers, line
        self.run = ""

    def start(self, run: str) -> None:
        """From a run's first forward pass on, Python says each call of a function."""
        self.run = run
        sys.setprofile(self.on_call)

    def stop(self, optimizer, args, kwargs) -> None:
        """PyTorch calls it after each step of an optimizer."""
        sys.setprofile(None)
        numbers = []
        for name in ("lr", "betas", "momentum", "eps", "weight_decay"):
            if name in optimizer.defaults:
                numbers.append(f"{name} {optimizer.defaults[name]}")
        frames = traceback.walk_stack(sys._getframe(1))
        place = (lines_of_script(frames) or ["PyTorch"])[0]
        text = f"{type(optimizer).__name__} ({', '.join(numbers)})"
        self.optimizers.setdefault(self.run, (text, place))

    def on_call(self, frame, event: str, argument) -> None:
        """Note what the training step, the code that names phases, calls itself."""
        caller = frame.f_back
        if event != "call" or caller is None or "METER" not in caller.f_code.co_names:
            return
        run, phase = Script.label()
        code = frame.f_code
        is_own = Script.is_own(code.co_filename) and code.co_name != "phase"
        if is_own and run in ("", self.run) and phase not in ("forward", "backward"):
            text = f"{code.co_name} (line {code.co_firstlineno})"
            found = self.calls.setdefault((self.run, phase or "loss"), [])
            if text not in found:
                found.append(text)

    def others(self, run: str, stage: str) -> str:
        """What computes a loss, a norm or an update without TP, and what in this run.

        "" if it is the same.
        """
        first = next(iter(FORWARD.outputs))
        here = self.calls.get((run, stage), [])
        there = self.calls.get((first, stage), [])
        only_here = [text for text in here if text not in there]
        only_there = [text for text in there if text not in here]
        if stage == "update":
            one, other = self.optimizers.get(run), self.optimizers.get(first)
            if one and other and one[0] != other[0]:
                only_here = [" at ".join(one)]
                only_there = [" at ".join(other)]
        if not only_here or not only_there:
            return ""
        return f"{first} by {', '.join(only_there)}; {run} by {', '.join(only_here)}"


# ---- In which call each rank is

CALLS = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
    "all_gather_single reduce_scatter_single "  # FSDP's, from PyTorch 2.13 on
    "broadcast scatter gather reduce all_to_all all_to_all_single barrier new_group "
    "new_subgroups_by_enumeration all_gather_object broadcast_object_list "
    "batch_isend_irecv send recv isend irecv"
).split()
# The latest calls, which are compared if ranks hang. The store needs a second for them.
LOOKED_AT = 1000


class Status(NamedTuple):
    """Where a rank is."""

    inside: bool  # of a call
    call: str  # this call, or the last one
    place: str  # lines of the script
    raised: tuple = ()  # what a run raised that waits whether the other ranks do, too


class Calls:
    """Writes each call of this rank to the store before it is made."""

    def __init__(self):
        self.store = None  # key-value store of all ranks
        self.status = Status(False, "", "")
        self.is_watching = True  # until this rank reports a failure
        self.is_nested = False  # in a call that dist makes itself
        self.counts = collections.Counter()  # ranks of a call → number of them so far
        self.waits = {}  # id of a Work → it, its call, was it started by the script?

    def watch(self) -> None:
        for name in CALLS:
            if hasattr(dist, name):
                watched = self.watched(name, getattr(dist, name))
                setattr(dist, name, watched)
                # P2POp accepts only its own module's isend and irecv.
                setattr(dist.distributed_c10d, name, watched)
        wait = dist.Work.wait
        dist.Work.wait = lambda *args, **kwargs: self.wait(wait, *args, **kwargs)

    def watched(self, name: str, call):
        signature = inspect.signature(call)

        @functools.wraps(call)
        def watched(*args, **kwargs):
            if self.is_nested or self.store is None:  # dist calls itself
                return call(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            if name == "recv" and peer_of(name, arguments) is None:  # from any rank
                return self.without_notes(call, *args, **kwargs)
            place = lines_of_script(traceback.walk_stack(sys._getframe(1)))
            text = self.describe(name, arguments)
            self.enter(*text, place=" from ".join(place[:2]))
            if name in ("isend", "irecv"):
                self.leave()
            out = self.without_notes(call, *args, **kwargs)
            if isinstance(out, dist.Work):
                is_own = Script.is_own(sys._getframe(1).f_code.co_filename)
                self.waits[id(out)] = out, self.status, is_own
            self.leave()
            return out

        return watched

    def wait(self, wait, work, *args, **kwargs):
        """Work.wait: this rank is in the call that it waits for."""
        _, status, _ = self.waits.pop(id(work), (None, self.status, False))
        if self.is_nested:
            return wait(work, *args, **kwargs)
        place = lines_of_script(traceback.walk_stack(sys._getframe(2)))
        self.set_status(Status(True, status.call, " from ".join(place[:2])))
        result = self.without_notes(wait, work, *args, **kwargs)
        self.leave()
        return result

    def without_notes(self, call, *args, **kwargs):
        """Make a call. If it raises, the status says that this rank is still in it."""
        self.is_nested = True
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            with answer_of_store():
                self.set_status(self.status)
            # Its connections are closed: no other run of the script can continue.
            if re.search("timed? ?out|clos|connect|reset", str(error), re.I):
                on_error(error)
            raise
        finally:
            self.is_nested = False

    def enter(self, text: str, key: str, place="") -> None:
        """This rank makes a call which returns after all these ranks have made it.

        The n-th call of one rank is matched with the n-th call of the others.
        key: the ranks of a group, "[0, 1]", or of a message, "0 to 1".
        """
        number = self.number(text, key, place)
        self.set_status(Status(True, f"{in_list(number, key)}, {text}", place))

    def number(self, text: str, key: str, place="") -> int:
        """Note a call in these ranks' list. Which number is it there?"""
        self.counts[key] += 1
        number = self.counts[key]
        if self.store is not None:
            noted = f"{without_sizes(text)}\n{place}"
            self.store.set(f"{key}/{number}/{dist.get_rank()}", noted)
        return number

    def leave(self) -> None:
        self.set_status(self.status._replace(inside=False))

    def set_status(self, status: Status) -> None:
        self.status = status
        if self.store is not None:
            text = json.dumps([status, self.counts])
            self.store.set(f"status/{dist.get_rank()}", text)

    def describe(self, name: str, arguments: dict) -> tuple[str, str]:
        """A call in words, and those who have to make it: the key of their list."""
        values = list(arguments.values())
        phase = " ".join(Script.label()).strip()
        phase = f" ({phase})" if phase else ""
        if name == "batch_isend_irecv":
            group = values[0][0].group or dist.group.WORLD
            messages = [self.describe_message(operation) for operation in values[0]]
            text = f"{', '.join(messages)} over {group.group_desc}{phase}"
            return text, str(dist.get_process_group_ranks(group))
        groups = [x for x in values if isinstance(x, dist.ProcessGroup)]
        group = groups[0] if groups else dist.group.WORLD
        if name in ("send", "isend", "recv", "irecv"):
            return label_of_message(), pair_of(name, peer_of(name, arguments))
        ranks = str(dist.get_process_group_ranks(group))
        if name.startswith("new_"):
            return f"dist.{name}({values[0] if values else ''})", ranks
        shapes = [str(list(x.shape)) for x in values if isinstance(x, Tensor)]
        return f"{' '.join([name, *shapes[:1]])} over {group.group_desc}{phase}", ranks

    def describe_message(self, operation: dist.P2POp) -> str:
        """A send or a receive of a batch. The receiver must expect what is sent."""
        name = operation.op.__name__
        shape = list(operation.tensor.shape)
        self.number(str(shape), pair_of(name, operation.peer))
        return f"{name} {shape} {'to' if name == 'isend' else 'from'} {operation.peer}"

    def report(self) -> list[str]:
        """What is certain; then the call each rank is in, and what differs first."""
        ranks = range(dist.get_world_size())
        statuses, counts = self.of_all_ranks()
        differences = self.first_differences(counts)
        lines = [who_is_missing(statuses)]
        is_absent = ": not made by " in "".join(differences)
        if differences and not is_absent and "same call" in lines[0]:
            lines = ["the ranks made different calls, or in another order"]
        failed = [rank for rank in ranks if self.store.check([f"failed/{rank}"])]
        silent = sorted(set(ranks).difference(failed))
        size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))  # ranks per machine
        for first in ranks[::size]:  # what a lost machine wrote may be out of date
            if set(silent).issuperset(ranks[first : first + size]):
                text = f"no rank of machine {first // size} has reported an error: "
                lines = [text + "they hang, or it is lost or cannot be reached"]
        said = " ".join(differences)
        texts = {}
        for rank, status in enumerate(statuses):
            where = "in" if status.inside else "in no call, its last one:"
            text = f"{where} {status.call or 'none'}"
            if not (status.inside and status.place and status.place in said):
                texts[rank] = f"{text}, {status.place}" if status.place else text
        lines += differences
        lines += by_ranks(texts, "  ")
        if silent:  # the others have waited for it
            text = f"  ranks {silent} have reported no error so far: they hang, are "
            lines.append(f"{text}stopped, cannot be reached, or are still computing")
        return lines

    def of_all_ranks(self) -> tuple[list[Status], list[collections.Counter]]:
        """Where each rank is, and how many calls it has made in each list of calls."""
        ranks = range(dist.get_world_size())
        found = [json.loads(self.store.get(f"status/{rank}")) for rank in ranks]
        statuses = [Status(*status) for status, _ in found]
        return statuses, [collections.Counter(numbers) for _, numbers in found]

    def first_differences(self, counts: list) -> list[str]:
        """For each list of calls, the first one that is not the same on all its ranks.

        A call that some rank has not made is named if there is no other difference.
        """
        differ = []
        absent = []
        for key in dict.fromkeys(itertools.chain(*counts)):
            ranks = [int(rank) for rank in re.findall(r"\d+", key)]
            most = max(counts[rank][key] for rank in ranks)
            for number in range(max(1, most - LOOKED_AT), most + 1):
                made = [rank for rank in ranks if number <= counts[rank][key]]
                noted = {}
                for rank in made:
                    noted[rank] = self.store.get(f"{key}/{number}/{rank}").decode()
                calls = {text.partition("\n")[0] for text in noted.values()}
                line = f"  the first difference: {in_list(number, key)}"
                if made != ranks:
                    call = ", ".join(sorted(calls))
                    missing = [rank for rank in ranks if rank not in made]
                    absent.append(f"{line}, {call}: not made by {name_ranks(missing)}")
                    break
                if len(calls) > 1:
                    texts = {}
                    for rank, text in noted.items():
                        texts[rank] = text.strip().replace("\n", ", ")
                    differ += [line, *by_ranks(texts, "    ")]
                    break
        return (differ or absent)[:6]  # the rest follows from them

    def not_waited_for(self) -> list[str]:
        lines = []
        for _, status, is_own in self.waits.values():
            if is_own:
                text = f"wait() is missing for {status.call}, {status.place}"
                lines.append(text)
        return lines[:3]


def by_ranks(texts: dict[int, str], indent: str) -> list[str]:
    """A line for each text, with the ranks that have it."""
    ranks = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    lines = []
    for text, which in ranks.items():
        lines.append(f"{indent}{name_ranks(which)}: {text}")
    return lines


def name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def label_of_message() -> str:
    """What a message carries: the script's functions have it in `label`."""
    for frame, _ in traceback.walk_stack(sys._getframe(3)):
        if Script.is_own(frame.f_code.co_filename):
            message = frame.f_locals.get("message")
            label = frame.f_locals.get("label") or getattr(message, "label", None)
            return str(label or "a message")
    return "a message"


def peer_of(name: str, arguments: dict) -> int | None:
    """The rank, of all ranks, at the other end of a message; None if it may be any."""
    way = "src" if "recv" in name else "dst"
    in_group = arguments.get(f"group_{way}")
    if in_group is None:
        return arguments.get(way)
    return dist.get_global_rank(arguments.get("group") or dist.group.WORLD, in_group)


def pair_of(name: str, peer: int) -> str:
    """The sender and the receiver of a message: "0 to 1"."""
    pair = [peer, dist.get_rank()] if "recv" in name else [dist.get_rank(), peer]
    return " to ".join(map(str, pair))


def in_list(number: int, key: str) -> str:
    """A call by its number in the list of those who make it: of a group, or of two."""
    if "to" in key:
        return f"message {number} from rank {key}"
    return f"call {number} of ranks {key}"


def without_sizes(text: str) -> str:
    """A call without what may differ between its ranks: an all-to-all's rows, and what
    each rank sends and receives in a batch.
    """
    text = re.sub(r"(all_to_all\w*) \[[\d, ]*\]", r"\1", text)
    return re.sub(r"(isend|irecv) \[[\d, ]*\] (to|from) \d+", r"\1", text)


def who_is_missing(statuses: list[Status]) -> str:
    """What the statuses of all ranks say for certain; no rank is blamed on a guess."""
    waiting = [rank for rank, status in enumerate(statuses) if status.inside]
    missing = [rank for rank, status in enumerate(statuses) if not status.inside]
    if not waiting:
        return "a call failed that is not one of the script's own"
    if missing:
        who = f"{name_ranks(missing)} {'is' if len(missing) == 1 else 'are'} not in a "
        text = f"{who}collective, while ranks {waiting} are waiting in one: it hung, "
        return text + "crashed or skipped a call"
    if len({without_sizes(status.call) for status in statuses}) == 1:
        return "all ranks have entered the same call, and it raised an error"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


# ---- Conclusions from failed checks


def conclusions(checks: list[dict], places: dict[str, str]) -> list[str]:
    """What the failed checks of all ranks say together: the place first.

    checks: those that failed, each with name "kind: what", and text. places: run →
        where its forward pass becomes wrong.
    """
    kinds = {}
    for check in checks:
        kinds.setdefault(check["name"].partition(":")[0], []).append(check)
    fewer, more = different_calls(kinds.get("calls", []))
    stages = {}
    for run in list(FORWARD.outputs)[1:]:
        stages[run] = stage_of(run, kinds, places.get(run, ""))
    where = []
    for text in dict.fromkeys(text for _, text in stages.values() if text):
        runs = [run for run in stages if stages[run][1] == text]
        where.append(f"{', '.join(runs)}: {text}")
    why = causes(kinds, fewer, more)
    is_forward = any(stage == "forward" for stage, _ in stages.values())
    lines = where + why if is_forward or not why else why + where
    if not fewer and not more:
        lines += other_places(stages)
    values = [check for check in checks if not check["is_formula"]]
    if values and all(is_in_last_bits(check) for check in values):
        lines.append("only last bits differ: a sum in another order?")
    return lines


def different_calls(checks: list[dict]) -> tuple[list[tuple], list[tuple]]:
    """Calls of which there are fewer, and of which there are more than predicted.

    Each as (run and phase, how many): ("TP backward", "all-reduce over tp: 0 calls …").
    """
    fewer = []
    more = []
    for check in checks:
        text = check["text"]
        numbers = re.search(r"([\d.]+) calls.* (?:has|predicted) ([\d.]+)", text)
        if numbers:
            name = check["name"].partition(": ")[2]
            found = re.match(r"(.*) ([a-z]+-\S+) (\S+)$", name)
            if found:
                name, text = found[1], f"{found[2]} over {found[3]}: {text}"
            is_fewer = float(numbers[1]) < float(numbers[2])
            (fewer if is_fewer else more).append((name, text))
    return fewer, more


def causes(kinds: dict[str, list], fewer: list[str], more: list[str]) -> list[str]:
    """What a wrong number of calls, a factor or a shape says of the cause."""
    lines = []
    text = " ".join(check["text"] for check in kinds.get("gradients", []))
    # Backward begins at the output: the last one is nearest the cause.
    factor = [None, *re.findall(r"([\d.]+) times the expected tensor", text)][-1]
    if factor and float(factor) == 0:
        lines.append(
            "no gradient arrived: autograd does not track all_reduce and its like of "
            "lesson 00; in a model use ReduceFromTP or CopyToTP (lesson 01)"
        )
    elif fewer and ("replicas" in kinds or "gradients" in kinds):
        where, calls = fewer[0]
        lines.append(f"{where}: a sum over ranks is missing ({calls})")
    elif factor and more:
        where, calls = more[0]
        text = f"{where}: a call too many, and gradients {factor} times too large"
        lines.append(f"{text} ({calls})")
    elif factor and float(factor) == dist.get_world_size():
        text = "gradients are T times too large: a sum where a mean belongs, or a sum "
        lines.append(f"{text}of what is already complete")
    if re.search(r"shape \[\d.*expected \[\d", text):
        lines.append(
            "a gradient has the shape of a slice: is p.sharding of its parameter set? "
            "shard_parameter cuts and sets it"
        )
    return lines


def stage_of(run: str, kinds: dict[str, list], place: str) -> tuple[str, str]:
    """The stage of a step in which a run is first wrong, and what to say of it.

    Stages are forward, loss, backward, clipping and update; "" if that is not known.
    """
    failed = {}
    for kind, checks in kinds.items():
        found = [check for check in checks if is_of(check, run)]
        failed.update({kind: found} if found else {})
    at_first = {}  # in step 1
    for kind in ("losses", "norms"):
        names = [check["name"] for check in failed.get(kind, [])]
        at_first[kind] = any("step 1, " in name for name in names)
    if "runs" in failed:
        return "", ""
    if "wrong from" in place:
        return "forward", place
    if at_first["losses"]:
        if place == RIGHT:
            return "loss", "the model's output is right, the loss made from it is wrong"
        return "", place
    if "gradients" in failed:
        return "backward", first_in_backward(run, failed["gradients"])
    if "outputs" in failed:
        return "", place
    if at_first["norms"]:
        return "clipping", "losses and gradients are right, their norm is wrong"
    if "losses" in failed or "parameters" in failed:
        return "update", "step 1 agrees, the update differs"
    return "", ""


def first_in_backward(run: str, checks: list[dict]) -> str:
    """The wrong gradient that backward computes first: it begins at the output."""
    differ = [check for check in checks if check["differs"]]
    name = (differ or checks)[-1]["name"]
    name = name.removeprefix("gradients: ").removesuffix(f", {run}")
    if differ:
        text = f"the loss is right, but ranks have different gradients of {name}"
        return f"{text}: each has a part of the sum?"
    return f"the loss is right, gradients are wrong: nearest to the output is {name}"


def is_of(check: dict, run: str) -> bool:
    """Does a check name this run? "gradients: norm.bias, TP + SP" is not of TP."""
    return re.search(rf"[,:] {re.escape(run)}(,|$)", check["name"]) is not None


def is_in_last_bits(check: dict) -> bool:
    return check["allowed"] == 0 and 0 < check["diff"] < 1e-5


def other_places(stages: dict[str, tuple]) -> list[str]:
    """A loss, a norm or an optimizer that was edited in one of two places."""
    words = {"loss": "the loss", "clipping": "the norm", "update": "the update"}
    for run, (stage, _) in stages.items():
        place = STEPS.others(run, stage) if stage in words else ""
        if place:  # in other runs it is the same
            text = f"{words[stage]} is computed in two places, and a change of it must "
            return [f"{text}be made in both: {place}"]
    return []


def failed_checks(report) -> list[dict]:
    """The failed checks of all ranks, each once; "differs": not the same on all."""
    mine = {}
    keys = ("diff", "allowed", "text", "is_formula")
    for name, check in getattr(report, "checks", {}).items():
        if not check["diff"] <= check["allowed"]:
            mine[name] = {key: check[key] for key in keys}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    failed = {}
    for of_rank in everyone:
        for name, check in of_rank.items():
            diffs = {of_rank[name]["diff"] for of_rank in everyone if name in of_rank}
            is_everywhere = all(name in of_rank for of_rank in everyone)
            differs = len(diffs) > 1 or not is_everywhere
            failed.setdefault(name, check | {"name": name, "differs": differs})
    return list(failed.values())


# ---- The report


def first_line(error: BaseException) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front."""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def where_raised(error: BaseException) -> list[str]:
    """The script's line that raised, and the module that was called."""
    lines = []
    root = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # METER's __torch_dispatch__ only passes on what the line before it calls.
        if Script.is_own(code.co_filename) and code.co_name != "__torch_dispatch__":
            place = lines_of_script([(frame, number)])[0]
            lines = [
                f"  {place}: {linecache.getline(code.co_filename, number).strip()}"
            ]
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            root = root or module
            called = module
    if root is not None:
        name = dict(map(reversed, root.named_modules())).get(called) or "the model"
        lines.append(f"  {describe_module(name, called, error)}")
    return lines


def describe_module(name: str, module: nn.Module, error: BaseException) -> str:
    """A module in which an error was raised: its tensors and parameters."""
    values = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_locals.get("self") is module:
            values |= frame.f_locals
    values |= dict(module.named_parameters())
    shapes = []
    for key, x in values.items():
        if isinstance(x, Tensor):
            shapes.append(f"{key} {list(x.shape)}")
    return f"in {name}, {type(module).__name__}: {', '.join(shapes[:8])}"


@contextmanager
def answer_of_store():
    """Within `with`: the store must answer. It is on rank 0's machine; if that is lost,
    calls of the store never return.
    """
    rank = dist.get_rank()
    text = f"rank {rank} got no answer from rank 0's machine: it is lost or cannot be "
    lines = [f"{text}reached", f"  rank {rank}: in {CALLING.status.call}"]
    seconds = 20 + int(os.environ["LOCAL_RANK"])  # one on each machine reports
    timer = threading.Timer(seconds, end_rank, [lines, sys.__stderr__])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def report_failure(text: str, details: list[str]) -> None:
    """Say once for all ranks where each is; then end this rank."""
    CALLING.is_watching = False
    with answer_of_store():
        lines = lines_of_report(text, details)
    if lines:
        end_rank(lines)
    Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).unlink(missing_ok=True)
    time.sleep(2)  # torchrun's report begins with the rank that ends first
    os._exit(1)


def lines_of_report(text: str, details: list[str]) -> list[str]:
    """What this rank has to say for all; nothing if another rank says it."""
    store = CALLING.store
    inside = CALLING.status.inside
    store.set(f"failed/{dist.get_rank()}", json.dumps([inside, text, details]))
    keys = [f"failed/{other}" for other in range(dist.get_world_size())]
    until = time.monotonic() + (3 if inside else 0)  # for what the others write
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.1)
    if store.add("reports", 1) > 1:
        # torchrun ends all ranks after the first one: not before the report exists.
        until = time.monotonic() + 10
        while not store.check(["said"]) and time.monotonic() < until:
            time.sleep(0.1)
        return []
    found = [json.loads(store.get(key)) for key in keys if store.check([key])]
    lines = report_of_all(found)
    store.set("said", "")
    return lines


def report_of_all(failed: list) -> list[str]:
    """What is said: who raised between calls, or else who is in which call."""
    for inside, text, details in failed:
        if not inside:
            return [text, *details]
    for status in CALLING.of_all_ranks()[0]:
        if status.raised:
            return [*status.raised]
    return [*CALLING.report(), f"  {failed[0][1]}"]


def wrap(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, 88, subsequent_indent=indent, break_on_hyphens=False)


def end_rank(lines: list[str], file=None) -> None:
    """End with an error: torchrun's own report ends with these lines.

    file: where they are printed as well.
    """
    text = "\n".join(wrap(line) for line in [f"doctor: {lines[0]}", *lines[1:]])
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun prints the failure with the earliest time.
        details = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": details}))
    if file or not path:
        print(text, file=file or sys.stderr, flush=True)
    os._exit(1)


def in_short(error: BaseException) -> str:
    text = first_line(error)[:150]
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        return f"too large: {too_large[0]}; this machine has {total:.0f} GB"
    return f"rank {dist.get_rank()} raised {type(error).__name__}: {text}"


def on_error(error: BaseException) -> None:
    """An error has ended the script on this rank."""
    if CALLING.store is None:  # it refused a flag, or no process group was made
        raise error
    while error.__cause__ or (error.__context__ and "Store" in type(error).__name__):
        error = error.__cause__ or error.__context__
    report_failure(in_short(error), where_raised(error))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def on_abort(number: int) -> None:
    """gloo aborts a rank that receives more than it expects. C calls only C."""
    text = f"rank {dist.get_rank()} was aborted (SIGABRT)"
    if dist.get_backend() == "gloo":
        text += ": it got a message of another size than it expects"
    report_failure(text, [])


def join(*args, init=dist.init_process_group, **kwargs) -> None:
    """Instead of dist.init_process_group: from here on calls are noted."""
    init(*args, **kwargs)
    Script.find_meter()
    # After a restart by torchrun the store still has what the last attempt wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d._get_default_store()
    CALLING.store = dist.PrefixStore(f"doctor {attempt}", store)
    CALLING.set_status(CALLING.status)
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)  # Python's would come too late


def note_error(get_store=dist.distributed_c10d._get_default_store):
    """Instead of _get_default_store: Report.run tells other ranks of an error by it."""
    error = sys.exc_info()[1]
    is_lost = re.search("timed out|connection", str(error), re.I)
    if error and not is_lost and CALLING.store is not None:
        raised = (in_short(error), *where_raised(error))
        CALLING.set_status(CALLING.status._replace(raised=raised))
    return get_store()


def leave(group=None, destroy=dist.destroy_process_group) -> None:
    """Instead of dist.destroy_process_group: the script has said its verdict."""
    if group not in (None, dist.group.WORLD):  # one of its groups: it continues
        destroy(group)
        return
    report = sys._getframe(1).f_locals.get("report")
    CALLING.is_nested = True  # the doctor's own calls
    checks = failed_checks(report)
    values = [check for check in checks if not check["is_formula"]]
    wrong = [run for run in FORWARD.outputs if any(is_of(c, run) for c in values)]
    lines = CALLING.not_waited_for()
    lines += [f"{run} raised {text}" for run, text in FORWARD.raised.items()]
    if values:
        places = FORWARD.report(wrong)
        for run in list(FORWARD.outputs)[:1]:
            if run in places:
                lines.append(f"{run}: {places[run]}")
        lines += conclusions(checks, places)
    FINDINGS.extend(f"doctor: {line}" for line in dict.fromkeys(lines))
    for line in FINDINGS:
        print(wrap(line), flush=True)
    CALLING.store = None
    destroy()


def leave_at_once(code: int, exit=os._exit) -> None:
    """Instead of os._exit: say why, and add to what torchrun's report will say."""
    error = sys.exc_info()[1]
    if code and error and CALLING.store and CALLING.is_watching:
        on_error(error)
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if code and FINDINGS and path.is_file():
        report = json.loads(path.read_text())
        lines = [report["message"]["message"], *map(wrap, FINDINGS)]
        report["message"]["message"] = "\n".join(lines)
        path.write_text(json.dumps(report))
    exit(code)


def end_with_torchrun() -> None:
    """If torchrun is killed, Linux kills this rank as well, even if it sleeps."""
    if sys.platform == "linux":
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)


FORWARD = Forward()
STEPS = Steps()
CALLING = Calls()
FINDINGS = []  # printed after the verdict


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    Script.path = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Script.path.parent)  # from there a script imports its helpers
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    end_with_torchrun()
    dist.init_process_group = join
    dist.destroy_process_group = leave
    dist.distributed_c10d._get_default_store = note_error
    os._exit = leave_at_once
    FORWARD.watch()
    register_optimizer_step_post_hook(STEPS.stop)
    CALLING.watch()
    try:
        runpy.run_path(str(Script.path), run_name="__main__")
    except Exception as error:
        on_error(error)


if __name__ == "__main__":
    main()
