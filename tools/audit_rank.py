"""One rank of tools/audit.py: runs the parallel model next to the full one.

Every rank builds the full model from the same seed and makes it parallel. It runs both
on the same batches, and stores what it holds and computes. Rank 0 gets all of this and
writes the findings (audit_findings.py) as JSON.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from audit_findings import Facts, findings_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
}


def load_subject(path: Path):
    """Import the user's file."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class CallCounter(TorchDispatchMode):
    """Counts collectives by phase, and tells the parent where this rank is.

    It sees torch.distributed's calls and those of DTensor, in forward and in backward.
    """

    def __init__(self, store, rank: int):
        super().__init__()
        self.store = store
        self.rank = rank
        self.phase = "start"
        self.calls = Counter()  # "phase: collective" → calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn it into local ops and collectives
        match = re.match(r"_?c10d(?:_functional)?::(\w+)", func._schema.name)
        if match is None or "wait" in match[1] or "autograd" in match[1]:
            return func(*args, **(kwargs or {}))
        name = match[1].replace("_", "").removesuffix("base")
        for word in ("coalesced", "intotensor", "tensor"):
            name = name.replace(word, "")
        name = COLLECTIVES.get(name, name)
        self.calls[f"{self.phase}: {name}"] += 1
        total = sum(self.calls.values())
        self.report(f"in {name}, its collective number {total}, in {self.phase}")
        out = func(*args, **(kwargs or {}))
        # The caller may wait for the result, so the rank can still be in this call.
        self.report(
            f"in or after {name}, its collective number {total}, in {self.phase}"
        )
        return out

    def report(self, status: str) -> None:
        self.store.set(f"status/{self.rank}", status)

    @contextmanager
    def counting(self, phase: str):
        self.phase = phase
        self.report(f"between collectives, in {phase}")
        with self:
            yield


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; detached, on the CPU."""
    if isinstance(x, DTensor):
        x = x.to_local()
    if hasattr(x, "wait"):
        x = x.wait()
    return x.detach().cpu()


def convert_model(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """Move a model and give it the run's precision; complex buffers stay complex."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def convert(x: Tensor) -> Tensor:
        if x.is_complex():
            return x.to(device, wide)
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    return model._apply(convert)


def make_values_unique(model: nn.Module) -> None:
    """Make all elements of all parameters different, so that each can be found.

    The tool finds out which piece of the full model a rank holds by comparing values.
    Constant parameters (biases, norms) are shifted by 0.02·randn. Elements that are
    still equal are moved to the next floating-point number.
    """
    generator = torch.Generator().manual_seed(12345)
    for p in model.parameters():
        if len(p.detach().unique()) < p.numel() or (p == 0).any():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data += (0.02 * noise).to(p)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    if not parameters:
        return
    values, order = torch.cat([p.detach().flatten() for p in parameters]).sort()
    infinity = torch.full((), float("inf"), dtype=values.dtype, device=values.device)
    equal = values[1:] <= values[:-1]
    while equal.any():
        values[1:][equal] = torch.nextafter(values[:-1][equal], infinity)
        equal = values[1:] <= values[:-1]
    flat = torch.empty_like(values)
    flat[order] = values
    first = 0
    for p in parameters:
        p.data.copy_(flat[first : first + p.numel()].view(p.shape))
        first += p.numel()


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str, renamed: dict[str, str]) -> str:
    """A name without wrappers (DDP, torch.compile, …), as in the full model."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for old, new in renamed.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


class Watch:
    """Records the output of every module, its gradient, and who reads it.

    The output of the model itself has the name "".
    """

    def __init__(self, model: nn.Module, renamed: dict[str, str]):
        self.outputs = {}
        self.gradients = {}
        self.input_gradients = {}  # (module, reader) → what comes back from a reader
        self.held = {}  # id of an output → (its module, the output, so the id stays)
        self.handles = []
        for long_name, module in model.named_modules():
            name = plain_name(long_name, renamed)
            self.handles.append(module.register_forward_hook(self.hook_of(name)))
            reader = self.reader_of(name)
            self.handles.append(
                module.register_forward_pre_hook(reader, with_kwargs=True)
            )

    def reader_of(self, name: str):
        """A hook that gives a module views of its inputs, so that the gradient that
        comes back through this module alone can be seen."""

        def hook(module, inputs, keywords):
            views = {}
            for x in (*inputs, *keywords.values()):
                if torch.is_tensor(x) and id(x) in self.held and x.requires_grad:
                    views[id(x)] = self.view_for(name, x)
            inputs = tuple(views.get(id(x), x) for x in inputs)
            keywords = {key: views.get(id(x), x) for key, x in keywords.items()}
            return inputs, keywords

        return hook

    def view_for(self, reader: str, x: Tensor) -> Tensor:
        """The same tensor for one reader, whose gradient is recorded."""
        writer = self.held[id(x)][0]
        view = x.view_as(x)
        self.held[id(view)] = (writer, view)
        key = (writer, reader)
        view.register_hook(lambda grad: self.keep_of_reader(key, grad))
        return view

    def keep_of_reader(self, key: tuple[str, str], grad: Tensor) -> None:
        if key not in self.input_gradients:
            self.input_gradients[key] = local_part(grad).clone()

    def hook_of(self, name: str):
        def hook(module, inputs, output):
            output = main_output(output)
            if output is None or name in self.outputs:
                return  # a module that is called several times: compare the first call
            self.outputs[name] = local_part(output).clone()
            self.held.setdefault(id(output), (name, output))
            if output.requires_grad:
                output.register_hook(lambda grad: self.keep(name, grad))

        return hook

    def keep(self, name: str, grad: Tensor) -> None:
        if name not in self.gradients:
            self.gradients[name] = local_part(grad).clone()

    def remove(self) -> None:
        self.held.clear()
        for handle in self.handles:
            handle.remove()


def main_output(output) -> Tensor | None:
    """The tensor that a module returns: the first one, or Hugging Face's logits."""
    output = getattr(output, "logits", output)
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if torch.is_tensor(output) and output.is_floating_point():
        return output
    return None


class Run:
    """The full or the parallel model, with the user's loss, optimizer and callbacks."""

    def __init__(self, subject, model: nn.Module, tp_group, args):
        self.subject = subject
        self.model = model
        self.tp_group = tp_group  # None for the full model
        self.args = args
        names = getattr(subject, "names", None)
        self.renamed = {} if names is None or tp_group is None else names()

    def forward(self, batch: tuple):
        """Output and loss. Random numbers are the same in each pass, on all ranks."""
        torch.manual_seed(7 if self.args is None else self.args.seed + 7)
        inputs, target = batch
        if isinstance(inputs, dict):
            output = self.model(**inputs)
        else:
            output = self.model(*inputs)
        output = getattr(output, "logits", output)  # of Hugging Face
        return output, self.loss(output, target)

    def loss(self, output, target) -> Tensor:
        loss_of = getattr(self.subject, "loss", None)
        if loss_of is None:
            return default_loss(output, target)
        if len(inspect.signature(loss_of).parameters) > 2:
            return loss_of(output, target, self.tp_group)
        return loss_of(output, target)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        after_backward = getattr(self.subject, "after_backward", None)
        if after_backward is not None and self.tp_group is not None:
            after_backward(self.model)

    def clip(self, max_norm: float) -> float | None:
        """Clip by the user's own function, if there is one, and return its norm."""
        clip = getattr(self.subject, "clip", None)
        if self.tp_group is None:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(grads)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
            return norm.item()
        return None if clip is None else float(clip(self.model, max_norm))

    def optimizer(self):
        """The user's optimizer; for the full model, one of the same kind if need be."""
        make = getattr(self.subject, "optimizer", None)
        if make is None:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-6)
        optimizer = make(self.model.parameters())
        own = set(map(id, self.model.parameters()))
        has_own = False
        for group in optimizer.param_groups:
            has_own = has_own or any(id(p) in own for p in group["params"])
        if self.tp_group is None and not has_own:
            known = inspect.signature(type(optimizer)).parameters
            options = {k: v for k, v in optimizer.defaults.items() if k in known}
            trained = [p for p in self.model.parameters() if p.requires_grad]
            return type(optimizer)(trained, **options)
        return optimizer

    def parts(self, what: str) -> dict[str, Tensor | None]:
        """This rank's part of every parameter ("data") or gradient ("grad")."""
        parts = {}
        for long_name, p in self.model.named_parameters():
            name = plain_name(long_name, self.renamed)
            if name in parts:  # two parameters with one name in the full model
                name = long_name
            x = getattr(p, what)
            if isinstance(x, DTensor):
                x = x.redistribute(placements=p.placements)  # as an optimizer would
            parts[name] = None if x is None else local_part(x).double().clone()
        return parts


def default_loss(output, target) -> Tensor:
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.mse_loss(output, target)


def prepare_batch(subject, step: int, args, device: str) -> tuple:
    """The user's batch: inputs (a tuple or a dict) and target, in the run's dtype."""
    torch.manual_seed(args.seed + 1000 + step)
    inputs, target = subject.batch(step)
    dtype = getattr(torch, args.dtype)

    def convert(x):
        if torch.is_tensor(x):
            x = x.to(device)
            x = x.to(dtype) if x.is_floating_point() else x
        return x

    if isinstance(inputs, dict):
        return {name: convert(x) for name, x in inputs.items()}, convert(target)
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(convert(x) for x in inputs), convert(target)


def tensors_of(batch: tuple) -> list[Tensor]:
    """All tensors of a batch, on the CPU."""
    inputs, target = batch
    found = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    found.append(target)
    return [x.cpu() for x in found if torch.is_tensor(x)]


def dropped(model: nn.Module, run: Run, batch: tuple):
    """Run forward and backward in train mode, and watch dropout.

    Returns, per dropout module, which elements it set to zero; the modules that were
    called again in backward (recomputation) and dropped others; and the loss.
    """
    zeros = {}
    again = {}
    phase = ["forward"]

    def hook_of(name):
        def hook(module, inputs, output):
            held = zeros if phase[0] == "forward" else again
            is_dropped = local_part(output) == 0
            in_place = getattr(module, "inplace", False)
            if inputs and torch.is_tensor(inputs[0]) and not in_place:
                # What was zero before, like masked attention weights, is not dropped.
                is_dropped = is_dropped & (local_part(inputs[0]) != 0)
            held.setdefault(name, []).append(is_dropped)

        return hook

    handles = []
    for name, module in model.named_modules():
        if "dropout" in type(module).__name__.lower():
            hook = hook_of(plain_name(name, run.renamed))
            handles.append(module.register_forward_hook(hook))
    # To the end, otherwise a recomputed dropout that comes last calls no hook.
    with set_checkpoint_early_stop(False):
        _, loss = run.forward(batch)
    phase[0] = "backward"
    loss.backward()
    for handle in handles:
        handle.remove()
    recomputed = []
    for name, masks in again.items():
        known = zeros.get(name, [])
        for mask in masks:
            if not any(torch.equal(mask, other) for other in known):
                recomputed.append(name)
                break
    firsts = {name: masks[0] for name, masks in zeros.items()}
    return firsts, recomputed, float(local_part(loss))


def audit(subject, args, counter: CallCounter, device: str) -> Facts:
    """Run both models and return this rank's facts."""
    dtype = getattr(torch, args.dtype)
    torch.set_default_dtype(dtype)
    counter.report("in build")
    torch.manual_seed(args.seed)
    full = convert_model(subject.build(), device, dtype)
    make_values_unique(full)
    limit = timedelta(seconds=args.timeout)
    tp_group = dist.new_group(list(range(dist.get_world_size())), timeout=limit)
    reference = Run(subject, copy.deepcopy(full).eval(), None, args)
    facts = Facts(full_parts=reference.parts("data"))
    facts.tied = tied_names(full, {})
    facts.full_buffers = buffers_of(full, {})
    counter.report("in batch")
    batch = prepare_batch(subject, 0, args, device)
    facts.batch = tensors_of(batch)
    counter.report("in the full model")
    facts.noise = noise_of(reference, batch, args)
    run_full_model(reference, batch, facts)
    facts.use_grads = grads_of_uses(reference, batch, facts.tied)

    counter.report("in parallelize")
    torch.manual_seed(args.seed + 1)
    model = subject.parallelize(full, tp_group)
    run = Run(subject, (full if model is None else model).eval(), tp_group, args)
    facts.parts = run.parts("data")
    run_parallel_model(run, batch, facts, counter)
    compare_dropout(run, batch, facts, counter)
    compare_steps(subject, reference, run, facts, counter, args, device)
    facts.calls = dict(counter.calls)
    return facts


class Casts(TorchDispatchMode):
    """Notes the coarsest precision to which float64 tensors are converted."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-15

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            if out.is_floating_point():
                self.eps = max(self.eps, torch.finfo(out.dtype).eps)
        return out


def noise_of(reference: Run, batch: tuple, args) -> float:
    """How much rounding errors change the full model's loss and gradients.

    A right parallel model differs by about as much. The errors are 1e-15, or those of
    float32 if the model converts to it (in a norm, or its logits before the loss).
    """
    probe = Run(reference.subject, copy.deepcopy(reference.model), None, args)
    generator = torch.Generator().manual_seed(4321)
    gradients = []
    casts = Casts()
    for step in range(2):
        size = 0.0
        if step == 1:
            size = casts.eps if args.dtype == "float64" else 1e-7
        for p in probe.model.parameters():
            p.grad = None
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data *= (1 + size * noise).to(p)
        with casts:
            _, loss = probe.forward(batch)
        probe.backward(loss)
        found = [x.flatten() for x in probe.parts("grad").values() if x is not None]
        gradients.append(torch.cat([loss.detach().double().cpu().view(1), *found]))
    largest = gradients[0].abs().max().item() or 1.0
    return (gradients[1] - gradients[0]).abs().max().item() / largest


def buffers_of(model: nn.Module, renamed: dict[str, str]) -> dict[str, Tensor]:
    """This rank's buffers of real numbers (tables of positions, masks)."""
    found = {}
    for name, x in model.named_buffers():
        if not x.is_complex():
            found[plain_name(name, renamed)] = local_part(x).double().clone()
    return found


def tied_names(model: nn.Module, renamed: dict[str, str]) -> dict[str, str]:
    """Name of each parameter with several uses → the name under which it is listed."""
    first = {}
    tied = {}
    for long_name, p in model.named_parameters(remove_duplicate=False):
        name = plain_name(long_name, renamed)
        if p in first:
            tied[name] = first[p]
        first.setdefault(p, name)
    return tied


def grads_of_uses(reference: Run, batch: tuple, tied: dict[str, str]) -> dict:
    """Name of a tied weight → the gradient of each of its uses, on their own."""
    if not tied:
        return {}
    untied = copy.deepcopy(reference.model)
    copies = {first: {} for first in tied.values()}  # name → use → its own parameter
    for use, first in [*tied.items(), *((name, name) for name in copies)]:
        module = untied.get_submodule(use.rpartition(".")[0])
        own = nn.Parameter(getattr(module, use.rpartition(".")[2]).detach().clone())
        setattr(module, use.rpartition(".")[2], own)
        copies[first][use.rpartition(".")[0]] = own
    probe = Run(reference.subject, untied, None, reference.args)
    _, loss = probe.forward(batch)
    probe.backward(loss)
    grads = {}
    for first, uses in copies.items():
        found = {use: p.grad for use, p in uses.items() if p.grad is not None}
        grads[first] = {use: grad.cpu() for use, grad in found.items()}
    return grads


def run_full_model(reference: Run, batch: tuple, facts: Facts) -> None:
    """Forward and backward in eval mode: what is right."""
    watch = Watch(reference.model, {})
    _, loss = reference.forward(batch)
    reference.backward(loss)
    facts.full_loss = loss.item()
    facts.full_grads = reference.parts("grad")
    facts.order = list(watch.outputs)
    facts.full_outputs = watch.outputs
    facts.full_output_grads = watch.gradients
    facts.full_input_grads = watch.input_gradients
    watch.remove()


def run_parallel_model(run: Run, batch: tuple, facts: Facts, counter) -> None:
    """The same of the parallel model, with its collectives counted."""
    watch = Watch(run.model, run.renamed)
    with counter.counting("forward"):
        _, loss = run.forward(batch)
    with counter.counting("backward"):
        run.backward(loss)
    facts.loss = float(local_part(loss))
    facts.grads = run.parts("grad")
    facts.own_order = list(watch.outputs)
    facts.outputs = watch.outputs
    facts.output_grads = watch.gradients
    facts.input_grads = watch.input_gradients
    facts.buffers = buffers_of(run.model, run.renamed)
    facts.owners = {name: name.rpartition(".")[0] for name in facts.parts}
    facts.own_tied = tied_names(run.model, run.renamed)
    for name, p in zip(facts.parts, run.model.parameters()):
        if not p.requires_grad:
            facts.frozen.append(name)
    watch.remove()


def compare_dropout(run: Run, batch, facts: Facts, counter) -> None:
    """In train mode: which elements each dropout module sets to zero on this rank."""
    # A pass in train mode changes buffers (the running means of a BatchNorm).
    buffers = [(x, x.detach().clone()) for x in run.model.buffers()]
    run.model.train()
    with counter.counting("dropout"):
        found = dropped(run.model, run, batch)
    for x, before in buffers:
        x.data.copy_(before)
    facts.dropped = found[0]
    facts.recomputed = found[1]
    facts.train_loss = found[2]
    run.model.eval()


def compare_steps(subject, reference: Run, run: Run, facts, counter, args, device):
    """Some steps of training with clipping; parameters after each of them."""
    optimizers = [reference.optimizer(), run.optimizer()]
    trained = set()
    for group in optimizers[1].param_groups:
        trained.update(map(id, group["params"]))
    for name, p in run.model.named_parameters():
        if p.requires_grad and id(p) not in trained:
            facts.not_in_optimizer.append(plain_name(name, run.renamed))
    for step in range(args.steps):
        batch = prepare_batch(subject, step, args, device)
        norms = []
        losses = []
        for which, optimizer in zip((reference, run), optimizers):
            for p in which.model.parameters():
                p.grad = None
            phase = "a full step" if which is reference else "training"
            with counter.counting(phase):
                _, loss = which.forward(batch)
                losses.append(float(local_part(loss)))
                which.backward(loss)
                norms.append(which.clip(args.clip))
            if norms[-1] is None:  # no function of the user's: scale as the reference
                scale = min(1.0, args.clip / (norms[0] + 1e-6))
                for p in which.model.parameters():
                    if p.grad is not None:
                        p.grad *= scale
            with counter.counting(phase):
                optimizer.step()
        facts.norms.append(norms)
        facts.step_losses.append(losses)
        facts.full_after.append(reference.parts("data"))
        facts.after.append(run.parts("data"))


class Silent:
    """A store that keeps nothing: no rank waits for this rank's status."""

    def set(self, key: str, value: str) -> None:
        pass


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
        counter = CallCounter(Silent(), dist.get_rank())
        facts = audit(subject, options, counter, "cpu")
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(state)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    return findings_of(everyone, dtype)


def line_in(path: str, error: Exception) -> str:
    """The last line of the user's file that was being run, in words."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return f", line {lines[-1]} of {Path(path).name}" if lines else ""


def main() -> None:
    """What audit.py starts, once per rank."""
    args = json.loads(os.environ["AUDIT"])
    args = type("Args", (), args)
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=args.timeout)
    store = dist.TCPStore("127.0.0.1", args.port, is_master=False, timeout=limit)
    counter = CallCounter(store, rank)
    counter.report("starting")
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
        counter.report("importing the file")
        subject = load_subject(Path(args.path))
        facts = audit(subject, args, counter, device)
        everyone = [None] * ranks
        counter.report("gathering results")
        dist.all_gather_object(everyone, facts)
        if rank == 0:
            counter.report("in the audit itself, not in your model")
            text = json.dumps(findings_of(everyone, args.dtype))
            Path(args.out).write_text(text)
        counter.report("done")
        dist.barrier()
    except Exception as error:
        where = traceback.format_exc()
        status = store.get(f"status/{rank}").decode()
        first = next(iter(str(error).splitlines()), "")
        text = f"{type(error).__name__}: {first}{line_in(args.path, error)}"
        store.set(f"error/{rank}", json.dumps([status, text, where]))
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
