"""One rank of the audit: runs the parallel model next to the full one.

Every rank builds the full model from the same seed and makes it parallel. It runs both
on the same batches, and stores what it holds and computes. Rank 0 gets all of this and
writes the findings as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import set_checkpoint_early_stop

from .compare import multiple_of
from .findings import findings_of
from .record import (
    CallCounter,
    Casts,
    Dropouts,
    Facts,
    Names,
    Point,
    State,
    Step,
    Trace,
    Watch,
    local_part,
    outputs_of,
    parts_of,
    plain_name,
    record_parameters,
    states_of,
)


def load_subject(path: Path):
    """Import the user's file, under a name that hides no package of the user's."""
    sys.path.insert(0, str(path.parent))
    name = f"_audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def convert_model(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """The run's device and precision for all parameters and buffers, in place."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    for x in (*model.parameters(), *model.buffers()):
        same = x.dtype
        if x.is_complex():
            same = wide
        elif x.is_floating_point():
            same = dtype
        if x.dtype != same or x.device.type != device.partition(":")[0]:
            x.data = x.data.to(device, same)


def make_values_unique(model: nn.Module) -> None:
    """Make all elements of all parameters different, so that each can be found.

    The tool finds out which piece of the full model a rank holds by comparing values.
    Constant parameters (biases, norms) are shifted by 0.02·randn. Elements that are
    still equal are moved to the next floating-point number. All are numbers of float32,
    so a model that stores them in float32 for a while still has the same ones.
    """
    generator = torch.Generator().manual_seed(12345)
    for p in model.parameters():
        if p.is_complex():
            raise TypeError("a complex parameter: keep its real and imaginary parts")
        if len(p.detach().unique()) < p.numel() or (p == 0).any():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data += (0.02 * noise).to(p)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    if not parameters:
        return
    flat = torch.cat([p.detach().flatten().float() for p in parameters])
    values, order = flat.sort()
    equal = values[1:] <= values[:-1]
    while equal.any():
        before = values[:-1][equal]
        values[1:][equal] = before.nextafter(torch.full_like(before, math.inf))
        equal = values[1:] <= values[:-1]
    flat[order] = values
    pieces = flat.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces):
        p.data.copy_(piece.view(p.shape))


def refuse(subject, name: str, did: str, expected: str) -> None:
    """Raise an error that names a function of the user's file, and its line."""
    code = getattr(getattr(subject, name), "__code__", None)
    place = ""
    if code is not None:
        place = f" (line {code.co_firstlineno} of {Path(code.co_filename).name})"
    raise TypeError(f"{name}(){place} {did}: it has to {expected}")


def in_short(x) -> str:
    """What a function has returned, in a few words."""
    if isinstance(x, type):
        return f"returned the class {x.__name__}"
    if torch.is_tensor(x):
        return f"returned a tensor of shape {list(x.shape)}"
    if x is None:
        return "returned None"
    article = "an" if type(x).__name__[0] in "aeiou" else "a"
    size = f" of length {len(x)}" if isinstance(x, (tuple, list)) else ""
    return f"returned {article} {type(x).__name__}{size}"


def check_model(subject, name: str, model, expected: str) -> None:
    """Refuse what is no model, and a model without values."""
    if not isinstance(model, nn.Module):
        refuse(subject, name, in_short(model), expected)
    for tensor, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            did = f"left {tensor} on the meta device, without values"
            refuse(subject, name, did, expected)


class Builder:
    """Builds the full model several times.

    A copy would have the closures of the first (lambdas, hooks) and use its modules. It
    is a copy only if build() does not make the same again, or shares tensors.
    """

    def __init__(self, subject, args, counter: CallCounter, device: str):
        self.subject = subject
        self.args = args
        self.counter = counter
        self.device = device
        self.restore = [partial(random.setstate, random.getstate())]
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            self.restore.append(partial(numpy.set_state, numpy.get_state()))
        self.first = self.build()

    def build(self) -> nn.Module:
        self.counter.report("build")
        for restore in self.restore:
            restore()
        torch.manual_seed(self.args.seed)
        model = self.subject.build()
        expected = "return the full model, an nn.Module with values: return Model()"
        check_model(self.subject, "build", model, expected)
        convert_model(model, self.device, getattr(torch, self.args.dtype))
        make_values_unique(model)
        return model

    def another(self) -> Run:
        model = None
        with contextlib.suppress(Exception):  # some build() may be called once only
            model = self.build()
        self.counter.report("the full model")
        if model is None or not self.is_like_first(model):
            model = copy.deepcopy(self.first)
        return Run(self.subject, model.eval(), None, self.args)

    def is_like_first(self, model: nn.Module) -> bool:
        """Has a model the same parameters and buffers as the first, but its own?"""
        first, other = [
            dict([*each.named_parameters(), *each.named_buffers()])
            for each in (self.first, model)
        ]
        return list(first) == list(other) and all(
            torch.equal(x, other[name])
            and (x.data_ptr() != other[name].data_ptr() or not x.numel())
            for name, x in first.items()
        )


class Run:
    """The full or the parallel model, with the user's loss, optimizer and callbacks."""

    def __init__(self, subject, model: nn.Module, tp_group, args):
        self.subject = subject
        self.model = model
        self.tp_group = tp_group  # None for the full model
        self.args = args
        names = self.of_user("names")
        self.renamed = Names({} if names is None or tp_group is None else names())

    def of_user(self, name: str):
        return getattr(self.subject, name, None)

    def forward(self, batch: tuple):
        """Output and loss. Random numbers are the same in each pass, on all ranks."""
        seed_all(7 if self.args is None else self.args.seed + 7)
        inputs, target = batch
        if isinstance(inputs, dict):
            output = self.model(**inputs)
        else:
            output = self.model(*inputs)
        return output, self.loss(output, target)

    def loss(self, output, target) -> Tensor:
        """The user's loss gets what the model returns, or if it cannot use that, the
        logits in it (of Hugging Face)."""
        loss_of = self.of_user("loss")
        if loss_of is None:
            found = outputs_of(output)
            if "" not in found:  # token ids, of a model that is served
                return one_number(outputs_of(output, True).get(""))
            if target is not None:
                return default_loss(found[""], target)
            if found[""].requires_grad and not self.is_forward_only():
                expected = "return one, or the file to define loss(output, target)"
                refuse(self.subject, "batch", "returned None as target", expected)
            return one_number(found[""])  # of a model that is served
        loss = self.call_loss(loss_of, output, target)
        if not torch.is_tensor(loss) or loss.numel() != 1:
            expected = "return a tensor with one number, a mean or a sum"
            refuse(self.subject, "loss", in_short(loss), expected)
        return loss

    def call_loss(self, loss_of, output, target) -> Tensor:
        """Call the user's loss with as many arguments as it takes."""
        more = {}
        known = inspect.signature(loss_of).parameters
        if "model" in known:
            more["model"] = self.model
        rest = [target, self.tp_group] if len(known) - len(more) > 2 else [target]
        try:
            inspect.signature(loss_of).bind(output, *rest, **more)
        except TypeError as error:
            expected = "take output and target"
            refuse(self.subject, "loss", f"cannot be called ({error})", expected)
        try:
            return loss_of(output, *rest, **more)
        except (AttributeError, TypeError):
            if not isinstance(getattr(output, "logits", None), Tensor):
                raise
            return loss_of(output.logits, *rest, **more)

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        """Backward, and the sums of gradients that the user's training makes."""
        if self.is_forward_only():
            return
        loss.backward()
        names = ["after_each_backward"]
        if is_last:
            names.append("after_backward")
        for name in names:
            function = self.of_user(name)
            if function is not None and self.tp_group is not None:
                function(self.model)

    def is_forward_only(self) -> bool:
        return getattr(self.args, "forward", False)

    def step(self, batch: tuple, is_last: bool = True) -> Step:
        _, loss = self.forward(batch)
        self.backward(loss, is_last)
        return Step(float(local_part(loss)), self.grads())

    def grads(self) -> dict[str, Tensor | None]:
        return parts_of(self.model, self.renamed, "grad")

    def clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def clip(self, full_norm: float | None) -> float | None:
        """Clip by the user's own function, and return its norm. If there is none, scale
        the gradients as the full model's norm says."""
        max_norm = self.args.clip
        clip = self.of_user("clip")
        if self.tp_group is None:
            grads = [grad for grad in self.grads().values() if grad is not None]
            full_norm = nn.utils.get_total_norm(grads).item()
        elif clip is not None:
            before = self.grads()
            norm = clip(self.model, max_norm)
            if norm is None:
                raise TypeError("clip() returned None: it has to return the norm")
            self.clip_as_torch(before, full_norm)
            return float(norm)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad *= min(1.0, max_norm / (full_norm + 1e-6))
        return full_norm if self.tp_group is None else None

    def clip_as_torch(self, before: dict, norm: float) -> None:
        """Scale the clipped gradients by max_norm / (norm + 1e-6), as for the full
        model, if the user's clip has done this with another small number, or none."""
        after = {name: x for name, x in self.grads().items() if x is not None}
        k = multiple_of(list(after.values()), [before[name] for name in after])
        right = min(1.0, self.args.clip / (norm + 1e-6))
        if k and abs(k / right - 1) < 2e-6 / max(norm, 1e-6):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad *= right / k

    def optimizer(self):
        """The user's optimizer; for the full model, one of the same kind if need be."""
        make = self.of_user("optimizer")
        if make is None:
            parameters = self.model.parameters()  # DTensors and plain ones: no foreach
            return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, foreach=False)
        if "named_parameters" in inspect.signature(make).parameters:
            optimizer = make(self.model.named_parameters())
        else:
            optimizer = make(self.model.parameters())
        if not hasattr(optimizer, "step"):
            made = type(optimizer).__name__
            raise TypeError(f"optimizer() returns a {made}: one object with step()")
        if self.tp_group is not None or not hasattr(optimizer, "param_groups"):
            return optimizer
        if ids_in(optimizer).isdisjoint(map(id, self.model.parameters())):
            known = inspect.signature(type(optimizer)).parameters
            options = {k: v for k, v in optimizer.defaults.items() if k in known}
            trained = [p for p in self.model.parameters() if p.requires_grad]
            return type(optimizer)(trained, **options)
        return optimizer


def ids_in(optimizer) -> set[int]:
    """Of the parameters that an optimizer has."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def seed_all(seed: int) -> None:
    """Of PyTorch, Python and, if it is loaded, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def default_loss(output, target) -> Tensor:
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.mse_loss(output, target)


def one_number(x: Tensor | None) -> Tensor:
    """Of an output without a loss: another number for other elements."""
    if x is None:
        raise TypeError("the model returns no tensor: define loss(output, target)")
    places = torch.arange(1, x.numel() + 1, dtype=x.dtype, device=x.device)
    return (x.flatten() * places).mean() / x.numel()


def prepare_batch(subject, step: int, args, device: str) -> tuple:
    """The user's batch: inputs (a tuple or a dict) and target, in the run's dtype."""
    torch.manual_seed(args.seed + 1000 + step)

    def convert(x):
        if torch.is_tensor(x) and x.is_floating_point():
            return x.to(device, getattr(torch, args.dtype))
        return x.to(device) if torch.is_tensor(x) else x

    made = subject.batch(step)
    expected = "return inputs and target; if the inputs have the labels: (inputs, None)"
    is_pair = isinstance(made, (tuple, list)) or torch.is_tensor(made)
    if not is_pair or len(made) != 2:
        refuse(subject, "batch", in_short(made), expected)
    inputs, target = made
    if isinstance(inputs, dict):
        inputs = dict(inputs)
    else:
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return tree_map(convert, (inputs, target))


# ---- The passes


@contextmanager
def without_autocast():
    """torch.autocast does nothing, as with float64, which it never converts."""
    init = torch.autocast.__init__

    def off(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        init(self, device_type, dtype, False, cache_enabled)

    torch.autocast.__init__ = off
    try:
        yield
    finally:
        torch.autocast.__init__ = init


@without_autocast()
def audit(subject, args, counter: CallCounter, device: str) -> Facts:
    """Run both models and return this rank's facts."""
    dtype = getattr(torch, args.dtype)
    torch.set_default_dtype(dtype)
    builder = Builder(subject, args, counter, device)
    limit = timedelta(seconds=args.timeout)
    tp_group = dist.new_group(list(range(dist.get_world_size())), timeout=limit)
    reference = builder.another()
    facts = Facts(full=Trace(), own=Trace())
    facts.has = [name for name in ("clip", "optimizer") if hasattr(subject, name)]
    record_parameters(reference.model, reference.renamed, facts.full)
    counter.report("batch")
    count = max(2, args.steps)
    steps = range(getattr(args, "first", 0), getattr(args, "first", 0) + count)
    batches = [prepare_batch(subject, step, args, device) for step in steps]
    facts.batch = [x.cpu() for x in tree_leaves(batches[0]) if torch.is_tensor(x)]
    counter.report("the full model")
    alone = CallCounter()
    run_full(builder, reference, batches, facts, args, alone)
    counter.report("a full step")
    optimizer = None
    with contextlib.suppress(Exception):  # parallelize may make it
        optimizer = None if args.forward else reference.optimizer()
    if optimizer is not None:  # before parallelize, which may change classes or globals
        train_full(reference, optimizer, batches, facts, alone)
    model = parallelize(subject, builder.first, tp_group, facts, counter, args)
    convert_model(model, device, dtype)  # many constructors name another precision
    run = Run(subject, model.eval(), tp_group, args)
    run.renamed.keeps = facts.full.classes.__contains__
    record_parameters(run.model, run.renamed, facts.own)
    counter.shapes = how_split(facts.full.parts, facts.own.parts, tp_group.size())
    facts.has += {type(module).__name__ for module in run.model.modules()}
    run_passes(run, batches, facts.own, counter)
    counter.report("the search for unused copies")
    facts.own.unused = unused_copies(run, batches[0], facts.own)
    if not args.forward:
        counter.report("optimizer()")
        if optimizer is None:
            train_full(reference, reference.optimizer(), batches, facts, alone)
        compare_steps(run, batches, facts, counter)
    facts.calls = dict(counter.calls)
    facts.untracked = counter.untracked
    if dist.get_rank() > 0:  # rank 0 has the same
        facts.full = Trace(parts=facts.full.parts, changed=facts.full.changed)
    return facts


def run_full(builder, reference: Run, batches: list, facts: Facts, args, alone) -> None:
    """What is known of the full model before the first step."""
    _, loss = builder.another().forward(batches[0])
    # A model that is served has no backward (no_grad, frozen weights, token ids).
    args.forward = getattr(args, "forward", False) or not loss.requires_grad
    facts.is_forward_only = args.forward
    facts.noise, facts.rounding = noise_of(builder.another, batches[0], args)
    facts.use_grads = grads_of_uses(builder.another, batches[0], facts.full.tied)
    run_passes(reference, batches, facts.full, alone)
    with contextlib.suppress(Exception):  # a buffer of other numbers is refused
        facts.read = buffers_read(builder.another(), batches[0])
    seconds = [p for p in facts.full.flows if p.module and p.slot[:6] == "output"]
    for output in seconds[:4]:
        with contextlib.suppress(Exception):  # what it makes is of another type
            without = flows_without(builder.another, batches[0], output)
            facts.full.without[output] = without
    if not math.isfinite(facts.full.loss):
        raise ArithmeticError(f"its loss is {facts.full.loss}")


def how_split(full: dict, own: dict, ranks: int) -> str:
    """What an error about shapes may come from: dims that the ranks do not divide, or a
    slice that is smaller than a head; and which numbers of ranks divide all."""
    uneven = []
    split = []  # size of a dim that is split, size here, in words
    for name in own:
        if name not in full or own[name].dim() != full[name].dim():
            continue
        for dim, size in enumerate(full[name].shape):
            here = own[name].shape[dim]
            if here != size:
                words = f"{name} has {here} of {size} along dim {dim}"
                split.append((size, here, words))
                if size % ranks:
                    uneven.append(words)
    if not split:
        return ""
    least = math.gcd(*[size for size, _, _ in split])
    fits = [str(count) for count in range(2, least + 1) if least % count == 0]
    take = f"{', '.join(fits) or 'none'} would"
    if uneven:
        said = "; ".join(uneven[:3])
        return f"{ranks} ranks do not divide what is split ({said}; of ranks, {take})"
    said = min(split, key=lambda found: found[1])[2]
    return f"the smallest slice: {said}; is it a part of a head? Try fewer ranks"


def parallelize(subject, full, tp_group, facts: Facts, counter, args) -> nn.Module:
    """The user's parallel model, and what PyTorch warned of meanwhile."""
    torch.manual_seed(args.seed + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with counter.counting("parallelize"):
            model = subject.parallelize(full, tp_group)
    for warning in caught:
        text = str(warning.message).partition("\n")[0]
        if warning.category is UserWarning and text not in facts.warnings:
            facts.warnings.append(text)
    model = full if model is None else model
    expected = "return the parallel model, or None if it has changed the full one"
    check_model(subject, "parallelize", model, expected)
    return model


def run_passes(run: Run, batches: list, trace: Trace, counter) -> None:
    """Two passes in eval mode, whose gradients are summed, and some in train mode."""
    watch = Watch(run.model, run.renamed, trace)
    counter.where = lambda: watch.stack[-1].module if watch.stack else ""
    with counter.counting("forward"):
        _, loss = run.forward(batches[0])
    trace.loss = float(local_part(loss))
    with counter.counting("backward"):
        run.backward(loss)
    watch.remove()
    trace.grads = run.grads()
    with counter.counting("two batches"):
        if run.of_user("after_backward") is not None:  # after the last pass only
            run.clear()
            run.step(batches[0], is_last=False)
        second = run.step(batches[1])
        trace.summed = second.grads
        trace.second_loss = second.loss
    if run.is_forward_only():
        trace.kept = trace.grads
    else:
        run_in_train_mode(run, batches[0], trace, counter)
    run.clear()


def run_in_train_mode(run: Run, batch: tuple, trace: Trace, counter) -> None:
    """Two passes in train mode: one that drops nothing, so that its gradients can be
    compared, and one that shows what dropout drops. What they change of buffers and of
    numbers that modules keep is put back."""
    states = states_of(run.model, run.renamed)
    for keep_all in (True, False):
        run.clear()
        run.model.train()
        dropouts = Dropouts(run.model, run.renamed, trace, keep_all)
        counter.where = dropouts.running
        # To the end, otherwise a recomputed dropout that comes last calls no hook.
        with set_checkpoint_early_stop(False), counter.counting("dropout"), dropouts:
            step = run.step(batch)
        dropouts.remove()
        if keep_all:
            trace.kept_loss = step.loss
            trace.kept = step.grads
        trace.train_loss = step.loss
        for state in states:
            if not state.is_same() or (state.is_buffer and run.tp_group is not None):
                note_change(state, trace, keep_all)
            if state.is_buffer or not keep_all:
                state.put_back()
    run.model.eval()


def unused_copies(run: Run, batch: tuple, trace: Trace) -> list[str]:
    """Parameters that have a gradient on other ranks but none here, if no rank's loss
    changes with this rank's copy."""
    lacking = [name for name, grad in trace.grads.items() if grad is None]
    everyone = from_all_ranks((lacking, trace.grads.keys() - lacking))
    trained = set().union(*(names for _, names in everyone))
    copies = []
    for rank, (names, _) in enumerate(everyone):
        copies += [(rank, name) for name in names if name in trained]
    if not copies:
        return []
    right = losses_with(run, batch, [])
    if losses_with(run, batch, copies) != right:
        copies = [one for one in copies if losses_with(run, batch, [one]) == right]
    return [name for rank, name in copies if rank == dist.get_rank()]


def losses_with(run: Run, batch: tuple, copies: list) -> list[float]:
    """The losses of all ranks, if these copies (rank, name) are changed."""
    states = states_of(run.model, run.renamed)
    held = []
    for long_name, p in run.model.named_parameters():
        if (dist.get_rank(), plain_name(long_name, run.renamed)) in copies:
            x = p.data.to_local() if hasattr(p, "to_local") else p.data
            held.append((x, x.clone()))
            x += torch.randn_like(x)
    loss = run.step(batch, is_last=False).loss
    run.clear()
    for x, before in held:
        x.copy_(before)
    for state in states:
        state.put_back()
    digits = 12 if run.args.dtype == "float64" else 5
    return from_all_ranks(f"{loss:.{digits}e}")


@torch.no_grad()
def buffers_read(run: Run, batch: tuple) -> set[str]:
    """The buffers of real numbers on which the loss depends."""
    states = states_of(run.model, run.renamed)
    losses = {}
    for name in ["", *(state.name for state in states if state.is_buffer)]:
        for state in states:
            state.put_back()
            if state.name == name and state.value.is_floating_point():
                state.value += torch.randn_like(state.value)
        losses[name] = float(local_part(run.forward(batch)[1]))
    return {name for name in losses if losses[name] != losses[""]}


def from_all_ranks(x) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


def note_change(state: State, trace: Trace, keep_all: bool) -> None:
    """Record what the first pass that changes a state makes of it; and whether the next
    pass changes it again: then it is a running mean, not what the last pass had."""
    name = state.name
    if keep_all or name not in trace.changed:
        trace.changed[name] = state.now()
    elif not state.is_buffer and not torch.equal(state.now(), trace.changed[name]):
        trace.running.add(name)


def noise_of(another, batch: tuple, args) -> tuple[float, float]:
    """How much rounding errors change the full model's loss and gradients, relative to
    the largest of all of them, and to the largest of each.

    A right parallel model differs by about as much. The errors are 1e-15, or those of
    float32 if the model converts to it (in a norm, or its logits before the loss).
    another: runs a full model. A new one each time, since a forward may change what the
    next one uses (a memory).
    """
    generator = torch.Generator().manual_seed(4321)
    casts = Casts()

    def found(size: float) -> list[Tensor]:
        """The loss and all gradients, with parameters that are so much off."""
        probe = another()
        for p in filter(torch.is_floating_point, probe.model.parameters()):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data *= (1 + size * noise).to(p)
        with casts:
            step = probe.step(batch)
        grads = [x for x in step.grads.values() if x is not None]
        return [torch.tensor([step.loss]).double(), *grads]

    right = found(0.0)
    changed = found(max(casts.eps, 1e-15 if args.dtype == "float64" else 1e-7))
    off = [(x - y).abs().max().item() for x, y in zip(changed, right)]
    sizes = [x.abs().max().item() for x in right]
    largest = max(sizes) or 1.0
    most = max(sizes[1:], default=0.0)
    of_each = [x / size for x, size in zip(off, sizes) if size > 1e-2 * most]
    return max(off) / largest, max(of_each, default=0.0)


def grads_of_uses(another, batch: tuple, tied: dict[str, str]) -> dict:
    """Name of a tied weight → the gradient of each of its uses, on their own."""
    if not tied:
        return {}
    run = another()
    grads = {first: {} for first in tied.values()}
    uses = {**tied, **{first: first for first in grads}}
    copies = {}  # (name, module that uses it) → its own parameter
    for use, first in uses.items():
        owner, _, name = use.rpartition(".")
        module = run.model.get_submodule(owner)
        copies[first, owner] = nn.Parameter(getattr(module, name).detach().clone())
        setattr(module, name, copies[first, owner])
    run.step(batch)
    for (first, owner), p in copies.items():
        if p.grad is not None:
            grads[first][owner] = p.grad.cpu()
    return grads


def flows_without(another, batch: tuple, output: Point) -> dict:
    """The full model's gradients of tensors, if a module's second output has none."""
    run = another()
    trace = Trace()
    calls = itertools.count()

    def cut(module, inputs, made):
        if next(calls) == output.call:
            off = outputs_of(made)[output.slot]
            return tree_map(lambda x: x.detach() if x is off else x, made)

    run.model.get_submodule(output.module).register_forward_hook(cut)
    watch = Watch(run.model, run.renamed, trace)
    run.step(batch)
    watch.remove()
    return trace.flows


def train_full(reference: Run, optimizer, batches: list, facts: Facts, alone) -> None:
    """The full model's steps. alone: what has counted its collectives."""
    states = states_of(reference.model, reference.renamed)
    for batch in batches[: reference.args.steps]:
        train(reference, optimizer, batch, facts.full, alone, None)
        facts.is_clipped |= facts.full.steps[-1].norm > reference.args.clip
    record_optimizer(reference, optimizer, facts.full)
    record_buffers([x for x in states if not x.is_same()], facts.full)
    calls = [name for name in alone.calls if not name.startswith("optimizer")]
    if calls:
        raise RuntimeError(
            f"the full model calls collectives ({'; '.join(calls)}), so it is not what "
            "one process computes: what build() makes must not know the ranks' group"
        )


def compare_steps(run: Run, batches: list, facts: Facts, counter) -> None:
    """Some steps of training: gradients before and after clipping, then parameters."""
    counter.where = lambda: ""
    with counter.counting("optimizer()"):
        optimizer = run.optimizer()
    facts.not_in_optimizer = not_trained(run, optimizer)
    states = states_of(run.model, run.renamed)
    for batch, full in zip(batches, facts.full.steps):
        train(run, optimizer, batch, facts.own, counter, full.norm)
    record_optimizer(run, optimizer, facts.own)
    record_buffers(states, facts.own)  # an optimizer's hook may change some


def record_buffers(states: list[State], trace: Trace) -> None:
    trace.stepped = {x.name: x.now() for x in states if x.is_buffer}


def record_optimizer(run: Run, optimizer, trace: Trace) -> None:
    """What the optimizer keeps of each parameter: momentum, averages of weights.

    In its `state`, or in an attribute that has a tensor for each of its parameters.
    """
    groups = getattr(optimizer, "param_groups", [])
    trained = [p for group in groups for p in group["params"]]
    named = run.model.named_parameters()
    names = {p: plain_name(name, run.renamed) for name, p in named}
    pairs = {}  # what → (parameter, tensor) of each
    for p in trained:
        for key, x in getattr(optimizer, "state", {}).get(p, {}).items():
            pairs.setdefault(key, []).append((p, x))
    for key, value in getattr(optimizer, "__dict__", {}).items():
        tensors = list(value.values()) if isinstance(value, dict) else value
        is_own = key not in ("state", "param_groups", "defaults")
        if not is_own or not isinstance(tensors, (list, tuple)):
            continue
        if tensors and all(map(torch.is_tensor, tensors)):
            if len(tensors) == len(trained):
                pairs[key] = list(zip(trained, tensors))
            else:
                trace.other_state.append(key)
    for key, found in pairs.items():
        for p, x in found:
            is_tensor = torch.is_tensor(x) and x.is_floating_point() and x.numel() > 1
            if is_tensor and p in names and local_part(x).shape == local_part(p).shape:
                own = trace.kept_state.setdefault(key, {})
                own[names[p]] = local_part(x).double().clone()
            elif is_tensor and key not in trace.other_state:
                trace.other_state.append(key)


def not_trained(run: Run, optimizer) -> list[str]:
    """Parameters that the optimizer does not have, if it says which it has."""
    if not getattr(optimizer, "param_groups", None):
        return []
    trained = ids_in(optimizer)
    named = run.model.named_parameters()
    lost = [name for name, p in named if p.requires_grad and id(p) not in trained]
    return [plain_name(name, run.renamed) for name in lost]


def train(run: Run, optimizer, batch: tuple, trace: Trace, counter, full_norm) -> None:
    """One step of training."""
    phase = "a full step" if run.tp_group is None else "training"
    update = "optimizer.step()" if run.tp_group is None else phase
    run.clear()
    with counter.counting(phase):
        step = run.step(batch)
        step.norm = run.clip(full_norm)
    step.clipped = run.grads()
    with counter.counting(update):
        optimizer.step()
    step.after = parts_of(run.model, run.renamed, "data")
    trace.steps.append(step)


# ---- How a rank is run


def audit_here(subject, dtype="float64", steps=2, clip=1.0, seed=1, timeout=60) -> dict:
    """Audit a model on ranks that run already, all of which call this.

    subject: anything with build, parallelize and batch (a module, a namespace).
    Returns the findings, the same on every rank.
    """
    options = argparse.Namespace(
        dtype=dtype, steps=steps, clip=clip, seed=seed, timeout=timeout
    )
    before = torch.get_default_dtype()
    state = torch.get_rng_state()
    try:
        return audit_all(subject, options, CallCounter(), "cpu", lambda found: None)
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(state)


def audit_all(subject, args, counter: CallCounter, device: str, write) -> dict:
    """The findings. If all is right with batch(0) and batch(1) has another loss, the
    audit begins with that. write: gets what is found, as soon as it is known."""
    found = {}
    for args.first in range(2):
        facts = audit(subject, args, counter, device)
        counter.report("gathering results")
        everyone = from_all_ranks(facts)
        if dist.get_rank() == 0:
            counter.report("the audit itself, not your model")
            again = findings_of(everyone, args.dtype) | {"first_batch": args.first}
            if again["findings"] or not found:
                found = again
                write(found)
        found = from_all_ranks(found)[0]
        if [f["category"] for f in found["findings"]] != ["second batch"]:
            break
        counter.calls.clear()
    return found


def place_of(error: BaseException, path: str) -> str:
    """The line of the user's file, and the line of a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, f in enumerate(frames) if f.filename == path]
    places = []
    if own:
        places.append(f"line {frames[own[-1]].lineno} of {Path(path).name}")
        frames = frames[own[-1] + 1 :]
    no_place = "<", str(Path(__file__).parent), contextlib.__file__
    called = [f for f in frames if not f.filename.startswith(no_place)]
    torchs = str(Path(torch.__file__).parent)
    called = [f for f in called if not f.filename.startswith(torchs)] or called
    if called:
        places.append(f"line {called[-1].lineno} of {called[-1].filename}")
    return ", ".join(places)


def in_words(error: BaseException, counter: CallCounter, args) -> str:
    """An error with its place, in one line."""
    if isinstance(error, SystemExit):
        text = f"the file ended the process: sys.exit({error.code})"
    else:
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    module = counter.where()
    places = [f"module {module}" if module else "", place_of(error, args.path)]
    text = ", ".join([text, *filter(None, places)])
    if re.search(r"\b\w+Output\w*", str(error)):  # a class of Hugging Face
        text += "; loss() gets what the model returns: take its logits there"
    if counter.shapes and re.search("shape|size|dim|match", str(error)):
        text += f"; {counter.shapes}"
    refused = ("Float32", "BFloat16", "Half", "'Double'", "float64", "double")
    if args.dtype == "float64" and any(word in str(error) for word in refused):
        text += "; if an operator refuses float64, add --dtype float32"
    return text


def end_with_parent(parent: int) -> None:
    """A rank must not outlive the command that started it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """What the command starts, once per rank."""
    args = argparse.Namespace(**json.loads(os.environ.pop("AUDIT")))
    tools = str(Path(__file__).parents[1])
    sys.path[:] = [path for path in sys.path if path != tools]  # hides nothing of yours
    watcher = threading.Thread(target=end_with_parent, args=[args.parent], daemon=True)
    watcher.start()
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=args.timeout)
    store = dist.TCPStore("127.0.0.1", args.port, is_master=False, timeout=limit)
    status = {"error": None}

    def report(phase: str, more: str = "") -> None:
        status.update(phase=phase, more=more)
        store.set(f"rank {rank}", json.dumps(status))

    counter = CallCounter(report)
    report("starting")
    torch.set_num_threads(1)
    use_gpus = torch.cuda.device_count() >= ranks
    device = f"cuda:{rank}" if use_gpus else "cpu"
    if use_gpus:
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "nccl" if use_gpus else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank, world_size=ranks, timeout=limit,
        )  # fmt: skip
        report("importing the file")
        subject = load_subject(Path(args.path))
        write = lambda found: Path(args.out).write_text(json.dumps(found))
        audit_all(subject, args, counter, device, write)
        report("done")
        dist.barrier()
    except BaseException as error:
        status["error"] = in_words(error, counter, args)
        status["traceback"] = traceback.format_exc()
        status["calls"] = sum(counter.calls.values())
        report(status["phase"], status["more"])
        os._exit(1)
    os._exit(0)
