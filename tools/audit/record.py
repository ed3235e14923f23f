"""What one rank records of a model: parameters, the tensors that modules pass on, their
gradients, calls of collectives, and what dropout drops."""

from __future__ import annotations

import re
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
}


class Point(NamedTuple):
    """A tensor that modules pass on: a module's output, or an input that it was given.

    The output of the model itself has the module name "".
    """

    module: str
    call: int = 0  # a module may be called several times in one forward pass
    slot: str = ""  # "input 0" is the first argument, "" the output or its main tensor

    def __str__(self) -> str:
        name = self.module or "the model"
        name += f" (call {self.call + 1})" if self.call else ""
        return f"{self.slot} of {name}" if self.slot else name

    @property
    def is_input(self) -> bool:
        return self.slot.startswith("input ")


@dataclass
class Step:
    """A forward and a backward pass, and what a step of training makes of them."""

    loss: float
    grads: dict[str, Tensor | None]
    norm: float | None = None  # what clip() returns
    clipped: dict[str, Tensor | None] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)  # parameters


@dataclass
class Trace:
    """What one rank held and computed, of the full model or of its own."""

    parts: dict[str, Tensor] = field(default_factory=dict)  # parameters
    tied: dict[str, str] = field(default_factory=dict)  # name → name in parts
    frozen: list[str] = field(default_factory=list)  # requires_grad is False
    unused: list[str] = field(default_factory=list)  # here, but not on other ranks
    buffers: dict[str, Tensor] = field(default_factory=dict)
    # Buffers after the steps: all of a rank, and what changes of the full model's.
    stepped: dict[str, Tensor] = field(default_factory=dict)
    # The same after a pass in train mode, and attributes of modules that change.
    changed: dict[str, Tensor] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)  # attributes changed by each pass
    classes: dict[str, str] = field(default_factory=dict)  # module → its class
    loss: float = 0.0
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    # Gradients after a second backward pass of another batch, without clearing.
    summed: dict[str, Tensor | None] = field(default_factory=dict)
    second_loss: float = 0.0  # of the other batch
    order: list[Point] = field(default_factory=list)  # in the order of forward
    values: dict[Point, Tensor] = field(default_factory=dict)
    same: dict[Point, Point] = field(default_factory=dict)  # another name of a tensor
    callers: dict[Point, Point] = field(default_factory=dict)  # whose forward has it
    flows: dict[Point, Tensor] = field(default_factory=dict)  # dL/d(tensor)
    # Second output of a module (a router's loss) → the same without its part.
    without: dict[Point, dict] = field(default_factory=dict)
    returned: dict[Point, Tensor] = field(default_factory=dict)  # input → its gradient
    writers: dict[Point, Point] = field(default_factory=dict)  # input → whose output
    # What autograd has made directly of a tensor, and of nothing recorded in between.
    made_of: dict[Point, set[Point]] = field(default_factory=dict)
    # Dropout, by module: its inputs if nothing is dropped, and what is dropped.
    drop_inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    drop_masks: dict[str, list[Tensor]] = field(default_factory=dict)
    drop_rates: dict[str, list[float | None]] = field(default_factory=dict)
    recomputed: list[str] = field(default_factory=list)  # with another mask
    # Modules with random numbers that are no dropout: train mode cannot be compared.
    other_random: set[str] = field(default_factory=set)
    train_loss: float = 0.0
    kept_loss: float = 0.0  # in train mode, but nothing is dropped
    kept: dict[str, Tensor | None] = field(default_factory=dict)  # its gradients
    steps: list[Step] = field(default_factory=list)
    # After the steps: what the optimizer keeps → parameter → its tensor.
    kept_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    other_state: list[str] = field(default_factory=list)  # tensors of other shapes

    def point(self, point: Point) -> Point:
        """The name under which a tensor with several names was recorded."""
        for _ in self.same:  # not forever: two modules may be one in the full model
            if point not in self.same:
                break
            point = self.same[point]
        return point

    def value(self, point: Point) -> Tensor | None:
        return self.values.get(self.point(point))

    def flow(self, point: Point) -> Tensor | None:
        return self.flows.get(self.point(point))

    def back(self, reader: Point) -> Tensor | None:
        """The gradient that a module returns to one of its inputs."""
        return self.returned.get(reader)

    def readers(self, point: Point) -> list[Point]:
        """The inputs of modules that are this tensor."""
        point = self.point(point)
        return [key for key, writer in self.writers.items() if writer == point]

    def outputs(self, call: Point) -> list[Point]:
        """All outputs of a call of a module, the main one first."""
        found = [point for point in self.order if not point.is_input]
        return [point for point in found if point._replace(slot="") == call]

    def of_others(self, point: Point, readers: list[Point]) -> Tensor | None:
        """The part of a tensor's gradient that these readers have not returned."""
        rest = self.flow(point)
        names = {reader.module for reader in readers}
        for reader in readers:
            if rest is None or reader not in self.returned:
                return None
            others = names - {reader.module}
            if not any(is_within(reader.module, name) for name in others):
                rest = rest - self.returned[reader]  # with what is returned inside
        return rest


@dataclass
class Facts:
    """What one rank sends to rank 0."""

    full: Trace
    own: Trace
    batch: list[Tensor] = field(default_factory=list)
    noise: float = 0.0  # change of the full gradients by rounding errors
    rounding: float = 0.0  # the same, relative to each parameter's largest
    # Tied weights: name → module that uses it → the gradient of this use alone.
    use_grads: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    not_in_optimizer: list[str] = field(default_factory=list)
    # Names of what the user's file defines, and of the classes of modules.
    has: list[str] = field(default_factory=list)
    is_forward_only: bool = False  # no gradient is compared
    is_clipped: bool = False  # was the norm in some step above --clip?
    read: set[str] = field(default_factory=set)  # buffers on which the loss depends
    warnings: list[str] = field(default_factory=list)  # in parallelize
    calls: dict[str, int] = field(default_factory=dict)
    untracked: set[str] = field(default_factory=set)  # modules; see CallCounter


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself: detached, dense, on CPU."""
    if isinstance(x, DTensor):
        x = x.to_local()
    if hasattr(x, "wait"):
        x = x.wait()
    x = x if x.layout is torch.strided else x.to_dense()
    return x.detach().cpu()


def copy_of(x: Tensor) -> Tensor:
    return local_part(x).clone()


def is_real(x) -> bool:
    """A tensor that can be recorded: those inside of torch.func's transforms cannot."""
    is_plain = torch.is_tensor(x) and x.is_floating_point()
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


class Names(dict):
    """Name of a module here → in the full model. keeps: is this one of its modules, so
    that a part "module" of the name is no wrapper's? Nothing wraps the full model."""

    keeps = staticmethod(lambda name: True)


def plain_name(name: str, renamed: dict[str, str]) -> str:
    """A name without wrappers (DDP, torch.compile, …), as in the full model."""
    keeps = getattr(renamed, "keeps", lambda name: False)
    parts = []
    for part in name.split("."):
        is_kept = part == "module" and keeps(".".join([*parts, part]))
        if part not in WRAPPERS or is_kept:
            parts.append(part)
    name = ".".join(parts)
    for old, new in renamed.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def is_within(name: str, module: str) -> bool:
    """Is this the module of the second name, or inside of it? "" is the model."""
    return f"{name}.".startswith(f"{module}." if module else "")


def parts_of(model: nn.Module, renamed: dict, what: str) -> dict[str, Tensor | None]:
    """This rank's part of every parameter ("data") or gradient ("grad")."""
    parts = {}
    for long_name, p in model.named_parameters():
        if not p.is_floating_point():  # it has no gradient; a buffer, in effect
            continue
        name = plain_name(long_name, renamed)
        if name in parts:  # two parameters with one name in the full model
            name = long_name
        x = getattr(p, what)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=p.placements)  # as an optimizer would
        parts[name] = None if x is None else local_part(x).double().clone()
    return parts


def record_parameters(model: nn.Module, renamed: dict[str, str], trace: Trace) -> None:
    """Parameters, which of them are tied or frozen, and buffers."""
    trace.parts = parts_of(model, renamed, "data")
    for name, module in model.named_modules():
        trace.classes[plain_name(name, renamed)] = type(module).__name__
    real = [p for p in model.parameters() if p.is_floating_point()]
    trace.frozen = [name for name, p in zip(trace.parts, real) if not p.requires_grad]
    first = {}
    for long_name, p in model.named_parameters(remove_duplicate=False):
        name = plain_name(long_name, renamed)
        if not p.is_floating_point():
            trace.buffers[name] = numbers_in(p.data)
            continue
        if p in first:
            trace.tied[name] = first[p]
        first.setdefault(p, name)
    for long_name, x in model.named_buffers():
        trace.buffers[plain_name(long_name, renamed)] = numbers_in(x)


@dataclass
class State:
    """A buffer, or a number or tensor that a module keeps as a Python attribute."""

    name: str
    held: dict  # the module's buffers or attributes
    key: str
    value: object
    before: Tensor
    is_buffer: bool

    def now(self) -> Tensor | None:
        return numbers_in(self.held.get(self.key))  # another tensor, if assigned

    def is_same(self) -> bool:
        now = self.now()
        return now is None or torch.equal(now, self.before)

    def put_back(self) -> None:
        x = self.value
        if torch.is_tensor(x):
            as_real(x.to_local() if isinstance(x, DTensor) else x).copy_(self.before)
        self.held[self.key] = self.value


def as_real(x: Tensor) -> Tensor:
    """The same numbers, complex ones as pairs (a table of rotations)."""
    return torch.view_as_real(x.data) if x.is_complex() else x.data


def numbers_in(x) -> Tensor | None:
    """A copy of a number, or of a tensor of them (not sparse or quantized)."""
    if type(x) in (int, float):
        return torch.tensor(x).double()
    is_plain = torch.is_tensor(x) and x.layout == torch.strided and not x.is_quantized
    return as_real(local_part(x)).double().clone() if is_plain else None


def states_of(model: nn.Module, renamed: dict[str, str]) -> list[State]:
    """All that a module may keep from one pass to the next, but parameters."""
    found = []
    for prefix, module in model.named_modules():
        for held in (module._buffers, vars(module)):
            for key, x in held.items():
                name = plain_name(f"{prefix}.{key}" if prefix else key, renamed)
                before = numbers_in(x)
                is_buffer = held is module._buffers
                is_state = is_buffer or not getattr(x, "requires_grad", False)
                if before is not None and is_state:
                    found.append(State(name, held, key, x, before, is_buffer))
    return found


def is_in_backward() -> bool:
    """Does autograd run? It may compute modules again."""
    return torch._C._current_graph_task_id() != -1


def outputs_of(output, is_model: bool = False) -> dict[str, Tensor]:
    """Slot of a point → a tensor that a module returns, the main one first (slot "":
    the first, or Hugging Face's logits); of the model also integers, at the end."""
    found = {}
    integers = {}
    waiting = [("output", output)]
    while waiting:
        slot, x = waiting.pop(0)
        if is_real(x):
            found[slot] = x
        elif is_model and torch.is_tensor(x) and not x.is_complex():
            integers[slot] = x.double()
        elif isinstance(x, (tuple, list)):
            x = dict(enumerate(x))
        elif is_dataclass(x) or hasattr(x, "logits") or type(x) is SimpleNamespace:
            keys = x.__dataclass_fields__ if is_dataclass(x) else vars(x)
            x = {key: getattr(x, key) for key in keys}
        if isinstance(x, dict):
            waiting += [(f"{slot} {key}", part) for key, part in x.items()]
    main = "output logits"
    if not (hasattr(output, "logits") and main in found):
        main = next(iter(found), "")
    found = found or integers
    main = main if main in found else next(iter(found), "")
    rest = {slot: x for slot, x in (found | integers).items() if slot != main}
    return {"": found[main], **rest} if found else {}


def add_hooks(model: nn.Module, renamed: dict[str, str], enter, leave) -> list:
    """Call enter(name, module, …) before each module's forward, and leave after it."""
    handles = []
    for long_name, module in model.named_modules():
        if type(module).__name__ in ("OptimizedModule", "DistributedDataParallel"):
            continue  # around a module that has the same name
        name = plain_name(long_name, renamed)
        before = partial(enter, name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leave, name)))
    return handles


class Watch:
    """Records, in one forward and backward pass, the tensors that modules pass on.

    A module gets a view of each input, so that the gradient that comes back through
    this module alone can be seen. A tensor that several modules return or read is
    recorded once.
    """

    def __init__(self, model: nn.Module, renamed: dict[str, str], trace: Trace):
        self.trace = trace
        self.stack = []  # calls of modules that have not ended, as points
        self.counts = Counter()
        # id of a tensor → (its point, the tensor, so the id stays, its version)
        self.held = {}
        self.handles = add_hooks(model, renamed, self.enter, self.leave)

    def enter(self, name: str, module, inputs: tuple, keywords: dict):
        if is_in_backward():
            return None
        call = Point(name, self.counts[name])
        self.counts[name] += 1
        views = {}
        for number, x in enumerate((*inputs, *keywords.values())):
            if is_real(x) and id(x) not in views:
                views[id(x)] = self.read(x, call._replace(slot=f"input {number}"))
        self.stack.append(call)
        inputs = tuple(views.get(id(x), x) for x in inputs)
        return inputs, {key: views.get(id(x), x) for key, x in keywords.items()}

    def read(self, x: Tensor, slot: Point) -> Tensor:
        """The same tensor for one reader, whose gradient is recorded."""
        self.note(slot, x)
        writer = self.held[id(x)][0]
        self.trace.writers[slot] = writer
        if not x.requires_grad or isinstance(x, nn.Parameter):
            return x
        view = x.view_as(x)
        for key, value in vars(x).items():  # libraries keep placements there
            vars(view).setdefault(key, value)
        self.held[id(view)] = (writer, view, version_of(view))
        self.sum_grads(view, self.trace.returned, slot)
        return view

    def leave(self, name: str, module, inputs, output) -> None:
        if is_in_backward():
            return
        call = self.stack.pop()
        for slot, x in outputs_of(output, not name).items():
            self.note(call._replace(slot=slot), x)

    def note(self, point: Point, x: Tensor) -> None:
        """Record a tensor, or another name of one that was not changed in place."""
        is_known = id(x) in self.held and self.held[id(x)][2] == version_of(x)
        if not (is_known and point.is_input):
            self.trace.order.append(point)
        if self.stack:
            self.trace.callers[point] = self.stack[-1]
        if is_known:
            self.trace.same[point] = self.held[id(x)][0]
            return
        self.trace.values[point] = copy_of(x)
        self.held[id(x)] = (point, x, version_of(x))
        if x.requires_grad:
            self.sum_grads(x, self.trace.flows, point)

    def sum_grads(self, x: Tensor, grads: dict, point: Point) -> None:
        """Record its gradient in this pass (a parameter is in all passes)."""

        def add(grad: Tensor) -> None:
            grads[point] = grads.get(point, 0) + copy_of(grad)

        self.handles.append(x.register_hook(add))

    def remove(self) -> None:
        self.record_graph()
        self.held.clear()
        for handle in self.handles:
            handle.remove()

    def record_graph(self) -> None:
        """Which tensors are made of which, by autograd's graph."""
        nodes = {}  # of the graph → the tensors that it made
        for point, x, _ in self.held.values():
            if x.grad_fn is not None:
                nodes.setdefault(x.grad_fn, []).append(point)
        for node, points in nodes.items():
            waiting = [node]
            seen = set()
            while waiting:
                for before, _ in waiting.pop().next_functions:
                    if before is None or before in seen:
                        continue
                    seen.add(before)
                    for point in nodes.get(before, ()):
                        self.trace.made_of.setdefault(point, set()).update(points)
                    if before not in nodes:
                        waiting.append(before)


def version_of(x: Tensor) -> int:
    """How often it was changed in place."""
    return 0 if x.is_inference() else x._version


# ---- Operators


def ranks_in_group(args: tuple) -> int:
    """How many ranks make this call, by the arguments of its operator."""
    for x in args:
        with suppress(Exception):  # another argument that is text or an object
            if isinstance(x, torch.ScriptObject):
                return dist.ProcessGroup.unbox(x).size()
            if isinstance(x, str):
                return dist.distributed_c10d._resolve_process_group(x).size()
    return dist.get_world_size()


class CallCounter(TorchDispatchMode):
    """Counts collectives by phase, and tells the parent where this rank is.

    It sees torch.distributed's calls and those of DTensor, in forward and in backward.
    """

    def __init__(self, report=lambda phase, more="": None):
        super().__init__()
        self.report = report  # a function of a phase and of more words
        self.where = lambda: ""  # the module whose forward runs
        self.shapes = ""  # how parameters are split, for errors about shapes
        self.phase = "start"
        self.calls = Counter()  # "phase: collective" → calls
        # Modules in whose forward a collective gets a tensor that autograd follows.
        self.untracked = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn it into local ops and collectives
        match = re.match(r"_?c10d(?:_functional)?::(\w+)", func._schema.name)
        is_call = match and "wait" not in match[1] and "autograd" not in match[1]
        if not (is_call and ranks_in_group(args) > 1):  # alone, it sends nothing
            return func(*args, **(kwargs or {}))
        is_plain = func._schema.name.startswith("c10d::") and torch.is_grad_enabled()
        if is_plain and self.phase == "forward":
            if any(getattr(x, "requires_grad", False) for x in tree_leaves(args)):
                self.untracked.add(self.where())
        name = re.sub("_|coalesced|into|tensor|base_?$", "", match[1])
        name = COLLECTIVES.get(name, name)
        self.calls[f"{self.phase}: {name}"] += 1
        where = f"{name}, its collective number {sum(self.calls.values())}"
        self.report(self.phase, f"in {where}, ")
        out = func(*args, **(kwargs or {}))
        # The caller may wait for the result, so the rank can still be in this call.
        self.report(self.phase, f"in or after {where}, ")
        return out

    @contextmanager
    def counting(self, phase: str):
        self.phase = phase
        self.report(phase, "between collectives, ")
        with self:
            yield


class Casts(TorchDispatchMode):
    """Records the coarsest precision to which tensors are converted."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-15

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            if out.is_floating_point():
                self.eps = max(self.eps, torch.finfo(out.dtype).eps)
        return out


def dropped_by(module: nn.Module, inputs, output) -> Tensor | None:
    """What a module drops, if it is nothing but a dropout: it has no parts, and its
    output is the input, times 0 or one other number."""
    x = inputs[0] if inputs else None
    is_leaf = not [*module.children(), *module.parameters()]
    if not is_leaf or not is_real(x) or not is_real(output) or x is output:
        return None
    x, y = local_part(x).double(), local_part(output).double()
    if x.shape != y.shape:
        return None
    is_kept = (y != 0) & (x != 0)
    factors = y[is_kept] / x[is_kept]
    is_dropped = (y == 0) & (x != 0)
    if not is_dropped.any() or (y[x == 0] != 0).any() or not factors.numel():
        return None
    is_same = (factors - factors[0]).abs().max() <= 1e-5 * factors[0].abs()
    return is_dropped if is_same else None


class Dropouts(TorchDispatchMode):
    """Records what is dropped in a pass in train mode, by modules and by functions.

    Both are seen by their operators. A module that makes its random numbers in another
    way is watched by its output, if it is nothing but a dropout. keep_all: nothing is
    dropped, so that the inputs of dropout can be compared with the full model's.
    """

    def __init__(self, model: nn.Module, renamed: dict, trace: Trace, keep_all: bool):
        super().__init__()
        self.trace = trace
        self.keep_all = keep_all
        self.stack = [""]  # names of modules whose forward runs
        self.unknown = set()  # those with random numbers that may be no dropout
        self.noted = set()  # those whose dropout was seen by its operators
        self.again = {}  # module → masks of what backward computes again
        self.pending = {}  # id of a mask that is not applied yet → (it, what it drops)
        named = model.named_modules()
        self.names = {id(module): plain_name(name, renamed) for name, module in named}
        self.handles = add_hooks(model, renamed, self.enter, self.leave)

    def enter(self, name: str, module, inputs, keywords) -> None:
        self.stack.append(name)
        self.noted.discard(name)

    def leave(self, name: str, module, inputs, output) -> Tensor | None:
        """A dropout that its operators do not show is seen here. If nothing is to be
        dropped, its output is its input."""
        self.stack.pop()
        pending = [key for key, held in self.pending.items() if held[2] == name]
        # Random numbers of Python or NumPy are not seen.
        is_named = "dropout" in type(module).__name__.lower() and name not in self.noted
        unknown = self.unknown & {name}
        self.unknown -= unknown
        if not (pending or unknown or is_named):
            return None
        is_dropped = dropped_by(module, inputs, output)
        if is_dropped is None:  # what is pending may be used outside
            self.trace.other_random |= unknown
            return None
        for key in pending:
            del self.pending[key]
        self.note(name, inputs[0], is_dropped, getattr(module, "p", None))
        return inputs[0] if self.keep_all else None

    def note(self, name: str, x: Tensor, is_dropped: Tensor, rate) -> None:
        """One dropout: its input, or what it drops and with which probability."""
        self.noted.add(name)
        held = self.again if is_in_backward() else self.trace.drop_masks
        if not self.keep_all:
            held.setdefault(name, []).append(copy_of(is_dropped))
        elif not is_in_backward():
            self.trace.drop_inputs.setdefault(name, []).append(copy_of(x))
            self.trace.drop_rates.setdefault(name, []).append(rate)

    def running(self) -> str:
        """The module of the method that runs: a part of a forward that is computed
        again calls no hook."""
        if not is_in_backward():
            return self.stack[-1]
        frame = sys._getframe()
        while frame is not None:
            owner = id(frame.f_locals.get("self"))
            if owner in self.names:
                return self.names[owner]
            frame = frame.f_back
        return ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name.removeprefix("aten::")
        if name == "native_dropout_backward" and self.keep_all:
            return args[0].clone()
        out = func(*args, **kwargs)
        if name == "native_dropout":
            self.note(self.running(), args[0], ~out[1], args[1])
            if self.keep_all:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        elif name in ("bernoulli_", "bernoulli"):
            kept = args[0] if name == "bernoulli" else 0.5  # the default is not passed
            kept = args[1] if len(args) > 1 else kept
            if torch.is_tensor(kept):
                is_same = kept.numel() and (kept == kept.flatten()[0]).all()
                kept = kept.flatten()[0].item() if is_same else None
            drop = copy_of(out) == 0, None if kept is None else 1 - kept
            self.pending[id(out)] = (out, drop, self.stack[-1])
            if self.keep_all:  # F.dropout divides by the share that is kept
                out.fill_(1 if kept is None else kept)
        elif name in ("mul", "mul_") and self.pending:
            for x, noise in ((args[0], args[1]), (args[1], args[0])):
                if id(noise) in self.pending and torch.is_tensor(x):
                    self.note(self.running(), x, *self.pending.pop(id(noise))[1])
        elif torch.Tag.nondeterministic_seeded in func.tags:
            first = out[0] if isinstance(out, (tuple, list)) else out
            is_used = "scaled_dot_product" not in name or drop_rate(args, kwargs) > 0
            if is_used and torch.is_tensor(first):
                self.unknown.add(self.stack[-1])
        return out

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.trace.other_random |= self.unknown
        for _, _, name in self.pending.values():  # used in another way
            self.trace.other_random.add(name)
        known = [mask for masks in self.trace.drop_masks.values() for mask in masks]
        for name, masks in self.again.items():
            for mask in masks:
                if not any(torch.equal(mask, other) for other in known):
                    self.trace.recomputed.append(name)
                    break


def drop_rate(args: tuple, kwargs: dict) -> float:
    """Of an operator of attention: its first number, or the one with this name."""
    found = [x for x in args if type(x) is float]
    return kwargs.get("dropout_p", found[0] if found else 0.0)
