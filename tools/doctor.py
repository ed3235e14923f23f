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

# ---- Start and end: what runs instead of functions of PyTorch


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    Script.path = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Script.path.parent)  # from there a script imports its helpers
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    if sys.platform == "linux":  # if torchrun is killed, so is this rank
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)
    dist.init_process_group = join
    dist.destroy_process_group = leave
    dist.distributed_c10d._get_default_store = note_error
    os._exit = leave_at_once
    nn.modules.module.register_module_forward_pre_hook(FORWARD.before)
    nn.modules.module.register_module_forward_hook(FORWARD.after)
    CALLING.watch()
    register_optimizer_step_post_hook(note_optimizer)
    try:
        runpy.run_path(str(Script.path), run_name="__main__")
    except Exception as error:
        on_error(error)


def join(*args, init=dist.init_process_group, **kwargs) -> None:
    """Instead of dist.init_process_group: from here on calls are noted."""
    init(*args, **kwargs)
    modules = [sys.modules["__main__"], *sys.modules.values()]
    meters = [x.METER for x in modules if "METER" in getattr(x, "__dict__", {})]
    if Script.meter is None and meters and hasattr(meters[0], "phase"):
        Script.meter = meters[0]
        watch_phases(Script.meter)
    # After a restart by torchrun the store still has what the last attempt wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d._get_default_store()
    CALLING.store = dist.PrefixStore(f"doctor {attempt}", store)
    CALLING.set_status(CALLING.status)
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)  # Python's would come too late


def leave(group=None, destroy=dist.destroy_process_group) -> None:
    """Instead of dist.destroy_process_group: the script has said its verdict."""
    if group not in (None, dist.group.WORLD):  # one of its groups: it continues
        destroy(group)
        return
    CALLING.is_nested = True  # the doctor's own calls
    lines = CALLING.not_waited_for()
    lines += [f"{run} raised {text}" for run, text in RAISED.items()]
    report = sys._getframe(1).f_locals.get("report")  # MEASURE's, of a lesson
    if hasattr(report, "checks"):
        checks = failed_checks(report.checks)
        lines += conclusions(checks, FORWARD.places()) if checks else []
    FINDINGS.extend(f"doctor: {line}" for line in dict.fromkeys(lines))
    for line in FINDINGS:
        print(wrap(line), flush=True)
    CALLING.store = None
    destroy()


def note_error(get_store=dist.distributed_c10d._get_default_store):
    """Instead of _get_default_store: Report.guard tells others of an error by it."""
    error = sys.exc_info()[1]
    is_lost = re.search("timed out|connection", str(error), re.I)
    if error and not is_lost and CALLING.store is not None:
        raised = (in_short(error), *where_raised(error))
        CALLING.set_status(CALLING.status._replace(raised=raised))
        run = sys._getframe(1).f_locals.get("run")
        module = module_that_raised(error)
        if module:  # it is said at the end, if all ranks raise and continue
            RAISED.setdefault(run, module)
    return get_store()


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


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def on_abort(number: int) -> None:
    """gloo aborts a rank that receives more than it expects. C calls only C."""
    text = f"rank {dist.get_rank()} was aborted (SIGABRT)"
    if dist.get_backend() == "gloo":
        text += ": it got a message of another size than it expects"
    report_failure(text, [])


def on_error(error: BaseException) -> None:
    """An error has ended the script on this rank."""
    if CALLING.store is None:  # it refused a flag, or no process group was made
        raise error
    # The first error; later ones follow from it.
    while error.__cause__ or (error.__context__ and "Store" in type(error).__name__):
        error = error.__cause__ or error.__context__
    report_failure(in_short(error), where_raised(error))


# ---- The script


class Script:
    """The lesson or script that is run."""

    path = Path()
    meter = None  # lesson 00's METER, if it has one: it names runs and their phases


def run_and_phase() -> tuple[str, str]:
    """As "with TP", "backward"; empty if the script names none."""
    return getattr(Script.meter, "label", None) or ("", "")


@functools.cache  # it is asked at every call of dist
def is_own(code) -> bool:
    """Is this code in the script's folder, or in the one above?

    METER's __torch_dispatch__ is not: it only passes on what the script calls.
    """
    path = Path(code.co_filename)
    if path == Path(__file__) or code.co_name == "__torch_dispatch__":
        return False
    return path.parent in (Script.path.parent, Script.path.parent.parent)


def line_of(frame, number: int) -> str:
    """As "line 88 in backward"; empty if this frame is not the script's."""
    if not is_own(frame.f_code):
        return ""
    path = Path(frame.f_code.co_filename)
    at = f"line {number}" if path == Script.path else f"{path.name}:{number}"
    return f"{at} in {frame.f_code.co_name}"


def place_in_script(most=2) -> str:
    """Where the script is now: "line 88 in backward from line 99 in main"."""
    lines = [line_of(*one) for one in traceback.walk_stack(sys._getframe())]
    return " from ".join([line for line in lines if line][:most])


def of_all_ranks(x) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x)
    return everyone


# ---- The first module whose output is wrong

ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12, torch.int64: 0}  # relative
INPUT = "the model's input"
OUTPUT = "the model's output"
RIGHT = "the forward pass is right"


class Forward:
    """What each module returns in the first forward pass of each run."""

    def __init__(self):
        # Of the first run: name of a module → its output. As NumPy arrays: a script
        # that counts the tensors which are alive must not count these.
        self.full = {}
        self.outputs = {}  # run → name → its output, compared with the first run's
        self.names = {}  # module → name in its model

    def before(self, module: nn.Module, inputs: tuple) -> None:
        run, phase = run_and_phase()
        if phase == "forward" and run not in self.outputs:
            self.outputs[run] = {}
            self.names = {part: name for name, part in module.named_modules()}
            self.note(run, INPUT, inputs[0] if inputs else None)

    def after(self, module: nn.Module, inputs: tuple, out) -> None:
        run, phase = run_and_phase()
        if phase == "forward" and module in self.names:
            name = self.names[module] or OUTPUT
            self.note(run, name, out)
            if name == OUTPUT:
                self.names = {}  # the first forward pass of this run has ended

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
            self.outputs[run][name] = compare(x, full, allowed)

    def places(self) -> dict[str, str]:
        """Run → where it is first seen wrong, by what all ranks have noted."""
        everyone = of_all_ranks(self.outputs)
        texts = {}
        for number, run in enumerate(self.outputs):
            ranks = [outputs.get(run, {}) for outputs in everyone]
            texts[run] = where_wrong(ranks) if number else where_ranks_differ(ranks)
        return texts


def compare(x: Tensor, full: Tensor, allowed: float) -> dict:
    """An output on this rank, compared with the one of the run without TP.

    The latter is cut into blocks of the former's shape, the last of which may be
    padded. blocks: how many, 0 if that cannot be. block: the one that x equals.
    """
    found = dict(size=x.numel(), norm=x.norm().item(), full_norm=full.norm().item())
    found.update(allowed=allowed, blocks=0, block=None)
    if x.dim() != full.dim() or any(m > n for n, m in zip(full.shape, x.shape)):
        return found
    counts = [math.ceil(n / max(m, 1)) for n, m in zip(full.shape, x.shape)]
    if math.prod(counts) > 64:
        return found
    found["blocks"] = math.prod(counts)
    scale = full.abs().max().item() if full.numel() else 0.0
    for block in itertools.product(*map(range, counts)):
        cut = [slice(i * m, (i + 1) * m) for i, m in zip(block, x.shape)]
        piece = full[tuple(cut)]
        same = x[tuple(slice(n) for n in piece.shape)]
        if torch.allclose(same, piece, rtol=0.0, atol=allowed * scale):
            return found | {"block": block}
    return found


def where_ranks_differ(ranks: list[dict]) -> str:
    """From which module on the run without TP is not the same on all ranks.

    ranks: of each rank, name of a module → its output.
    """
    if len({tuple(outputs) for outputs in ranks}) > 1:  # other modules: stages
        return ""
    for name in ranks[0]:
        parts = [outputs[name] for outputs in ranks]
        norms = [part["norm"] for part in parts]
        if len({part["size"] for part in parts}) > 1:  # a stage's activations
            return ""
        if max(norms) - min(norms) > parts[0]["allowed"] * max(norms):
            text = f"not the same on all ranks, from {name} on: does a seed, a batch"
            return f"{text} or a weight depend on the rank?"
    return ""


def where_wrong(ranks: list[dict]) -> str:
    """Between which modules forward becomes wrong; "" if that cannot be said.

    ranks: of each rank, name of a module → its output. Of modules inside one that is
    right nothing is said.
    """
    is_right = {}
    for name in ranks[0]:
        parts = [outputs[name] for outputs in ranks if name in outputs]
        if len(parts) == len(ranks):
            is_right[name] = are_right(parts)
    if is_right.get(INPUT) is None:  # the rows of a micro-batch, an activation
        return ""
    outer = tuple(f"{name}." for name in is_right if is_right[name])
    last = ""  # the latest one that is right
    for name in is_right:
        if is_right[name]:
            last = name
        elif is_right[name] is False and not name.startswith(outer):
            right = f"right up to {last} and " if last else ""
            return f"forward is {right}wrong from {name} on"
    if last == OUTPUT:
        return RIGHT
    return f"forward is right up to {last}, then it cannot be compared"


def are_right(parts: list[dict]) -> bool | None:
    """Do the outputs of all ranks fit the one without TP? None: that cannot be said."""
    counts = {part["blocks"] for part in parts}
    if len(counts) > 1 or 0 in counts:
        return None  # of other shapes: a stage's activations, another batch
    (count,) = counts
    blocks = {part["block"] for part in parts}
    if None not in blocks:  # each rank has a block; together they must be all of it
        return len(blocks) == count or None
    if count == 1:
        return False
    # In parts that were cut in another way: an equal norm is no proof.
    norm = math.hypot(*[part["norm"] for part in parts])
    full_norm = parts[0]["full_norm"]
    return None if abs(norm - full_norm) <= 1e-4 * full_norm else False


# ---- What computes the loss, the norm and the update of each run

PLACES = {}  # (run, "loss", "clipping" or "update") → what computes it, and where


def watch_phases(meter) -> None:
    """Note the function that is called first in METER's "loss" and "clipping"."""
    phase = meter.phase

    @contextmanager
    def watched(run: str, name: str):
        with phase(run, name):
            before = sys.getprofile()
            if name in ("loss", "clipping") and (run, name) not in PLACES:
                sys.setprofile(on_call)
            try:
                yield
            finally:
                sys.setprofile(before)

    meter.phase = watched


def on_call(frame, event: str, argument) -> None:
    """Python says each call of a function, until one of the script's is found."""
    if event == "call" and is_own(frame.f_code):
        sys.setprofile(None)
        what = f"{frame.f_code.co_name} (line {frame.f_code.co_firstlineno})"
        PLACES[run_and_phase()] = what, ""


def note_optimizer(optimizer, args, kwargs) -> None:
    """PyTorch calls it after each step of an optimizer."""
    numbers = []  # but no True and False, of how it computes
    for name, value in optimizer.defaults.items():
        if type(value) in (int, float, tuple):
            numbers.append(f"{name} {value}")
    what = f"{type(optimizer).__name__} ({', '.join(numbers)})"
    where = f" at {place_in_script(1) or 'PyTorch'}"
    run = next(reversed(FORWARD.outputs), "")  # the latest one
    PLACES.setdefault((run, "update"), (what, where))


def other_place(stages: dict[str, str]) -> list[str]:
    """A loss, a norm or an optimizer that was edited in one of two places.

    stages: run → the stage of a step in which it is first wrong.
    """
    words = {"loss": "the loss", "clipping": "the norm", "update": "the update"}
    first = next(iter(FORWARD.outputs), "")  # the run without TP
    for run, stage in stages.items():
        here = PLACES.get((run, stage))
        there = PLACES.get((first, stage))
        if here and there and here[0] != there[0]:
            text = f"{words[stage]} is computed in two places, and a change of it must "
            text += f"be made in both: {first} by {''.join(there)}; "
            return [f"{text}{run} by {''.join(here)}"]  # as in other runs
    return []


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
        dist.Work.wait = self.watched_wait(dist.Work.wait)

    def watched(self, name: str, call):
        signature = inspect.signature(call)

        @functools.wraps(call)
        def watched(*args, **kwargs):
            if self.is_nested or self.store is None:  # dist calls itself
                return call(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            if name == "recv" and peer_of(name, arguments) is None:  # from any rank
                return self.without_notes(call, *args, **kwargs)
            self.enter(*self.describe(name, arguments), place_in_script())
            if name in ("isend", "irecv"):  # they do not wait
                self.leave()
            out = self.without_notes(call, *args, **kwargs)
            if isinstance(out, dist.Work):
                is_of_script = is_own(sys._getframe(1).f_code)
                self.waits[id(out)] = out, self.status, is_of_script
            self.leave()
            return out

        return watched

    def watched_wait(self, wait):
        """Work.wait: while it waits, this rank is in the call that it waits for."""

        def watched(work, *args, **kwargs):
            _, status, _ = self.waits.pop(id(work), (None, self.status, False))
            if self.is_nested:
                return wait(work, *args, **kwargs)
            self.set_status(Status(True, status.call, place_in_script()))
            result = self.without_notes(wait, work, *args, **kwargs)
            self.leave()
            return result

        return watched

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
        if name in ("send", "isend", "recv", "irecv"):
            return label_of_message(), pair_of(name, peer_of(name, arguments))
        values = list(arguments.values())
        operations = values[0] if name == "batch_isend_irecv" else []
        groups = [x for x in values if isinstance(x, dist.ProcessGroup)]
        groups += [operation.group for operation in operations if operation.group]
        group = groups[0] if groups else dist.group.WORLD
        ranks = str(dist.get_process_group_ranks(group))
        if name.startswith("new_"):
            return f"dist.{name}({values[0] if values else ''})", ranks
        text = ", ".join(self.describe_message(operation) for operation in operations)
        if not operations:
            shapes = [str(list(x.shape)) for x in values if isinstance(x, Tensor)]
            text = " ".join([name, *shapes[:1]])
        phase = " ".join(run_and_phase()).strip()
        phase = f" ({phase})" if phase else ""
        return f"{text} over {group.group_desc}{phase}", ranks

    def describe_message(self, operation: dist.P2POp) -> str:
        """A send or a receive of a batch. The receiver must expect what is sent."""
        name = operation.op.__name__
        shape = list(operation.tensor.shape)
        self.number(str(shape), pair_of(name, operation.peer))
        return f"{name} {shape} {'to' if name == 'isend' else 'from'} {operation.peer}"

    def not_waited_for(self) -> list[str]:
        lines = []
        for _, status, is_of_script in self.waits.values():
            if is_of_script:
                lines.append(f"wait() is missing for {status.call}, {status.place}")
        return lines[:3]

    def report(self) -> list[str]:
        """What is certain; then the call each rank is in, and what differs first."""
        statuses, counts = self.read_all()
        differ, absent = self.first_differences(counts)
        what = who_is_missing(statuses)
        if differ and "same call" in what:
            what = "the ranks made different calls, or in another order"
        ranks = range(len(statuses))
        silent = [rank for rank in ranks if not self.store.check([f"failed/{rank}"])]
        size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))  # ranks per machine
        for first in ranks[::size]:  # what a lost machine wrote may be out of date
            if set(silent).issuperset(ranks[first : first + size]):
                what = f"no rank of machine {first // size} has reported an error: "
                what += "they hang, or it is lost or cannot be reached"
        lines = (differ or absent)[:6]  # the rest follows from them
        texts = {}
        for rank, status in enumerate(statuses):
            where = "in" if status.inside else "in no call, its last one:"
            text = f"{where} {status.call or 'none'}"
            if not (status.inside and status.place and status.place in " ".join(lines)):
                texts[rank] = f"{text}, {status.place}" if status.place else text
        lines = [what, *lines, *by_ranks(texts, "  ")]
        if silent:  # the others have waited for it
            text = f"  ranks {silent} have reported no error so far: they hang, are "
            lines.append(f"{text}stopped, cannot be reached, or are still computing")
        return lines

    def read_all(self) -> tuple[list[Status], list[collections.Counter]]:
        """Where each rank is, and how many calls it has made in each list of calls."""
        ranks = range(dist.get_world_size())
        found = [json.loads(self.store.get(f"status/{rank}")) for rank in ranks]
        statuses = [Status(*status) for status, _ in found]
        return statuses, [collections.Counter(numbers) for _, numbers in found]

    def first_differences(self, counts: list) -> tuple[list[str], list[str]]:
        """Of each list of calls, the first that is not the same on all its ranks.

        Those that differ, and those that some rank has not made.
        """
        differ = []
        absent = []
        for key in dict.fromkeys(itertools.chain(*counts)):
            ranks = [int(rank) for rank in re.findall(r"\d+", key)]
            most = max(counts[rank][key] for rank in ranks)
            for number in range(max(1, most - LOOKED_AT), most + 1):
                made = [rank for rank in ranks if number <= counts[rank][key]]
                calls = set()
                texts = {}
                for rank in made:
                    noted = self.store.get(f"{key}/{number}/{rank}").decode()
                    calls.add(noted.partition("\n")[0])
                    texts[rank] = noted.strip().replace("\n", ", ")
                line = f"  the first difference: {in_list(number, key)}"
                if made != ranks:
                    call = ", ".join(sorted(calls))
                    missing = [rank for rank in ranks if rank not in made]
                    absent.append(f"{line}, {call}: not made by {name_ranks(missing)}")
                    break
                if len(calls) > 1:
                    differ += [line, *by_ranks(texts, "    ")]
                    break
        return differ, absent


def by_ranks(texts: dict[int, str], indent: str) -> list[str]:
    """A line for each text, with the ranks that have it."""
    ranks = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [f"{indent}{name_ranks(which)}: {text}" for text, which in ranks.items()]


def name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def label_of_message() -> str:
    """What a message carries: lesson 05's send and receive have it in `label`."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
    own = [frame for frame in frames if is_own(frame.f_code)]
    label = own[0].f_locals.get("label") if own else None
    return str(label) if isinstance(label, tuple) else "a message"


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


def failed_checks(checks: dict[str, dict]) -> list[dict]:
    """The checks that failed on any rank, each once; "differs": not the same on all."""
    # `not <=`: also nan
    mine = {name: x for name, x in checks.items() if not x["diff"] <= x["allowed"]}
    everyone = of_all_ranks(mine)
    failed = {}
    for of_rank in everyone:
        for name, check in of_rank.items():
            diffs = {
                other[name]["diff"] if name in other else None for other in everyone
            }
            failed.setdefault(name, check | {"differs": len(diffs) > 1})
    return list(failed.values())


def conclusions(checks: list[dict], places: dict[str, str]) -> list[str]:
    """What the failed checks of all ranks say together: place and cause.

    checks: each with kind, name and text. places: run → where its forward pass becomes
    wrong.
    """
    values = [check for check in checks if not check["is_formula"]]
    if not values:
        return []
    runs = list(FORWARD.outputs)
    lines = [f"{run}: {places[run]}" for run in runs[:1] if places.get(run)]
    fewer, more = different_calls(checks)
    stages = {}  # run → stage of a step
    said = {}  # what is said of the place → runs
    for run in runs[1:]:
        stages[run], text = stage_of(run, values, places.get(run, ""))
        said.setdefault(text, []).append(run)
    where = [f"{', '.join(said[text])}: {text}" for text in said if text]
    why = causes(values, fewer, more)
    lines += where + why if "forward" in stages.values() else why + where
    if not fewer and not more:
        lines += other_place(stages)
    if all(check["allowed"] == 0 and 0 < check["diff"] < 1e-5 for check in values):
        lines.append("only last bits differ: a sum in another order?")
    return lines


def of_kind(kind: str, checks: list[dict]) -> list[dict]:
    return [check for check in checks if check["kind"] == kind]


def is_of(check: dict, run: str) -> bool:
    """Does a check name this run? "gradients: norm.bias, TP + SP" is not of TP."""
    return re.search(rf"[,:] {re.escape(run)}(,|$)", check["name"]) is not None


def different_calls(checks: list[dict]) -> tuple[list[str], list[str]]:
    """Calls of which there are fewer, and of which there are more than predicted.

    Each as (run and phase, how many): ("TP backward", "all-reduce over tp: 0 calls …").
    """
    fewer = []
    more = []
    for check in of_kind("calls", checks):
        call = re.match(r"calls: (.*) (\S+) (\S+)$", check["name"])
        numbers = re.match(r"([\d.]+) calls per step.* has (\d+)", check["text"])
        if call and numbers:
            which = fewer if float(numbers[1]) < float(numbers[2]) else more
            which.append((call[1], f"{call[2]} over {call[3]}: {check['text']}"))
    return fewer, more


def causes(values: list[dict], fewer: list[tuple], more: list[tuple]) -> list[str]:
    """What a wrong number of calls, a factor or a shape says of the cause."""
    lines = []
    gradients = of_kind("gradients", values)
    text = " ".join(check["text"] for check in gradients)
    factors = re.findall(r"([\d.]+) times the expected tensor", text)
    # Backward begins at the output: the last one is nearest the cause.
    factor = float(factors[-1]) if factors else None
    if factor == 0:
        lines.append(
            "no gradient arrived: autograd does not track all_reduce and its like of "
            "lesson 00; in a model use ReduceFromTP or CopyToTP (lesson 01)"
        )
    elif fewer and (gradients or of_kind("replicas", values)):
        where, calls = fewer[0]
        lines.append(f"{where}: a sum over ranks is missing ({calls})")
    elif factor and more:
        where, calls = more[0]
        said = f"{where}: a call too many, and gradients {factor:g} times too large"
        lines.append(f"{said} ({calls})")
    elif factor and factor == dist.get_world_size():
        said = "gradients are T times too large: a sum where a mean belongs, or a sum "
        lines.append(f"{said}of what is already complete")
    if re.search(r"shape \[\d.*expected \[\d", text):
        lines.append(
            "a gradient has the shape of a slice: is p.sharding of its parameter set? "
            "shard_parameter cuts and sets it"
        )
    return lines


def stage_of(run: str, values: list[dict], place: str) -> tuple[str, str]:
    """The stage of a step in which a run is first wrong, and what to say of it.

    Stages are forward, loss, backward, clipping and update; "" if that is not known.
    place: where the run's forward pass becomes wrong.
    """
    mine = [check for check in values if is_of(check, run)]
    failed = {check["kind"] for check in mine}
    in_step_1 = " ".join(x["name"] for x in mine if "step 1, " in x["name"])
    if not failed or "runs" in failed:
        return "", ""
    if "wrong from" in place:
        return "forward", place
    if "losses: " in in_step_1:
        if place == RIGHT:
            return "loss", "the model's output is right, the loss made from it is wrong"
        return "", place
    if "gradients" in failed:
        return "backward", first_in_backward(run, of_kind("gradients", mine))
    if "outputs" in failed:
        return "", place
    if "norms: " in in_step_1:
        return "clipping", "losses and gradients are right, their norm is wrong"
    if "losses" in failed or "parameters" in failed:
        return "update", "step 1 agrees, the update differs"
    return "", ""


def first_in_backward(run: str, gradients: list[dict]) -> str:
    """The wrong gradient that backward computes first: it begins at the output."""
    differ = [check for check in gradients if check["differs"]]
    name = (differ or gradients)[-1]["name"]
    name = name.removeprefix("gradients: ").removesuffix(f", {run}")
    if differ:
        what = name if name.startswith("dL/d") else f"gradients of {name}"
        text = f"the loss of step 1 is right, but ranks have different {what}"
        return f"{text}: each has a part of the sum?"
    text = "the loss of step 1 is right, gradients are wrong"
    return f"{text}: nearest to the output is {name}"


# ---- The report of an error


def in_short(error: BaseException) -> str:
    """One line: its first one, without the [source.cpp:123] that gloo puts in front."""
    text = re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0][:150]
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        return f"too large: {too_large[0]}; this machine has {total:.0f} GB"
    return f"rank {dist.get_rank()} raised {type(error).__name__}: {text}"


def where_raised(error: BaseException) -> list[str]:
    """The script's line that raised, and the module that was called."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_own(frame.f_code):
            code = linecache.getline(frame.f_code.co_filename, number).strip()
            line = f"{line_of(frame, number)}: {code}"
    lines = [line, module_that_raised(error)]
    return [f"  {line}" for line in lines if line]


def module_that_raised(error: BaseException) -> str:
    """The innermost one, with the shapes of its tensors and parameters; "" if none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [x for x in frames if isinstance(x.f_locals.get("self"), nn.Module)]
    if not frames:
        return ""
    model = frames[0].f_locals["self"]
    module = frames[-1].f_locals["self"]
    names = {part: name for name, part in model.named_modules()}
    shapes = []
    for key, x in (frames[-1].f_locals | dict(module.named_parameters())).items():
        if isinstance(x, Tensor):
            shapes.append(f"{key} {list(x.shape)}")
    name = names.get(module) or "the model"
    return f"in {name}, {type(module).__name__}: {', '.join(shapes[:8])}"


def report_failure(text: str, details: list[str]) -> None:
    """Say once for all ranks where each is; then end this rank."""
    CALLING.is_watching = False
    with answer_of_store():
        lines = lines_of_report(text, details)
    if lines:
        end_rank(lines)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)
    time.sleep(2)  # torchrun's report begins with the rank that ends first
    os._exit(1)


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


def lines_of_report(text: str, details: list[str]) -> list[str]:
    """What this rank has to say for all; nothing if another rank says it.

    Who raised between calls, or else who is in which call.
    """
    store = CALLING.store
    inside = CALLING.status.inside
    store.set(f"failed/{dist.get_rank()}", json.dumps([inside, text, details]))
    keys = [f"failed/{other}" for other in range(dist.get_world_size())]
    wait_for(keys, 3 if inside else 0)  # what the others write
    if store.add("reports", 1) > 1:
        # torchrun ends all ranks after the first one: not before the report exists.
        wait_for(["said"], 10)
        return []
    failed = [json.loads(store.get(key)) for key in keys if store.check([key])]
    raised = [[text, *details] for inside, text, details in failed if not inside]
    if not raised:
        raised = [status.raised for status in CALLING.read_all()[0] if status.raised]
    lines = raised[0] if raised else [*CALLING.report(), f"  {failed[0][1]}"]
    store.set("said", "")
    return lines


def wait_for(keys: list[str], seconds: float) -> None:
    """Until the store has all keys, but no longer than so many seconds."""
    until = time.monotonic() + seconds
    while not CALLING.store.check(keys) and time.monotonic() < until:
        time.sleep(0.1)


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


FORWARD = Forward()
CALLING = Calls()
RAISED = {}  # run → the module in which all ranks raised; the lesson continued
FINDINGS = []  # printed after the verdict


if __name__ == "__main__":
    main()
