"""One rank of tools/audit.py: runs the parallel model next to the full one.

Every rank builds the full model from the same seed and makes it parallel. It runs both
on the same batches, and stores what it holds and computes. Rank 0 gets all of this and
writes the findings (audit_findings.py) as JSON.
"""

from __future__ import annotations

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
        self.report(f"between collectives, in {self.phase}")
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


def make_values_unique(model: nn.Module) -> None:
    """Shift constant parameters (biases, norms), so that each element can be found.

    The tool finds out which piece of the full model a rank holds by comparing values.
    """
    generator = torch.Generator().manual_seed(12345)
    for p in model.parameters():
        if p.numel() > 1 and len(p.detach().unique()) < p.numel():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data += (0.02 * noise).to(p)


class Watch:
    """Records the output of every module, its gradient, and the order of the calls."""

    def __init__(self, model: nn.Module):
        self.outputs = {}
        self.gradients = {}
        self.handles = []
        for name, module in model.named_modules():
            if name:
                hook = self.hook_of(name)
                self.handles.append(module.register_forward_hook(hook))

    def hook_of(self, name: str):
        def hook(module, inputs, output):
            if isinstance(output, (tuple, list)) and output:
                output = output[0]
            if not torch.is_tensor(output) or not output.is_floating_point():
                return
            if name in self.outputs:  # called several times: only the first is compared
                return
            self.outputs[name] = local_part(output).clone()
            if output.requires_grad:
                output.register_hook(lambda grad: self.keep(name, grad))

        return hook

    def keep(self, name: str, grad: Tensor) -> None:
        self.gradients[name] = local_part(grad).clone()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Run:
    """The full or the parallel model, with the user's loss, optimizer and callbacks."""

    def __init__(self, subject, model: nn.Module, tp_group, args):
        self.subject = subject
        self.model = model
        self.tp_group = tp_group  # None for the full model
        self.args = args

    def forward(self, batch: tuple):
        inputs, target = batch
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
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        optimizer = make(self.model.parameters())
        own = set(map(id, self.model.parameters()))
        has_own = any(id(p) in own for p in optimizer.param_groups[0]["params"])
        if self.tp_group is None and not has_own:
            return type(optimizer)(self.model.parameters(), **optimizer.defaults)
        return optimizer

    def parts(self, what: str) -> dict[str, Tensor | None]:
        """This rank's part of every parameter ("data") or gradient ("grad")."""
        parts = {}
        for name, p in self.model.named_parameters():
            x = getattr(p, what)
            parts[name] = None if x is None else local_part(x).double().clone()
        return parts


def default_loss(output, target) -> Tensor:
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.mse_loss(output, target)


def prepare_batch(subject, step: int, args, device: str) -> tuple[tuple, Tensor]:
    """The user's batch: a tuple of inputs, and the target, in the run's dtype."""
    torch.manual_seed(args.seed + 1000 + step)
    inputs, target = subject.batch(step)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    dtype = getattr(torch, args.dtype)

    def convert(x):
        if torch.is_tensor(x):
            x = x.to(device)
            x = x.to(dtype) if x.is_floating_point() else x
        return x

    return tuple(convert(x) for x in inputs), convert(target)


def dropped(model: nn.Module, run: Run, batch: tuple, seed: int) -> dict[str, Tensor]:
    """Dropout module → which elements it set to zero."""
    zeros = {}

    def hook_of(name):
        def hook(module, inputs, output):
            zeros[name] = local_part(output) == 0

        return hook

    handles = []
    for name, module in model.named_modules():
        if "dropout" in type(module).__name__.lower():
            handles.append(module.register_forward_hook(hook_of(name)))
    torch.manual_seed(seed)
    run.forward(batch)
    for handle in handles:
        handle.remove()
    return zeros


def audit(subject, args, counter: CallCounter, device: str) -> Facts:
    """Run both models and return this rank's facts."""
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed)
    full = subject.build().to(device, getattr(torch, args.dtype))
    make_values_unique(full)
    limit = timedelta(seconds=args.timeout)
    tp_group = dist.new_group(list(range(dist.get_world_size())), timeout=limit)
    reference = Run(subject, copy.deepcopy(full).eval(), None, args)
    facts = Facts(full_parts=reference.parts("data"))
    facts.tied = tied_names(full)

    counter.report("in parallelize")
    torch.manual_seed(args.seed + 1)
    model = subject.parallelize(full, tp_group)
    run = Run(subject, (full if model is None else model).eval(), tp_group, args)
    facts.parts = run.parts("data")

    batch = prepare_batch(subject, 0, args, device)
    facts.batch = [x.cpu() for x in (*batch[0], batch[1]) if torch.is_tensor(x)]
    compare_first_step(reference, run, batch, facts, counter)
    compare_dropout(run, batch, facts, counter, args)
    compare_steps(subject, reference, run, facts, counter, args, device)
    facts.calls = dict(counter.calls)
    return facts


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter with several uses → the name under which it is listed."""
    first = {}
    tied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in first:
            tied[name] = first[p]
        first.setdefault(p, name)
    return tied


def compare_first_step(reference: Run, run: Run, batch, facts: Facts, counter) -> None:
    """Forward and backward in eval mode, with every module's output and gradient."""
    watch_full = Watch(reference.model)
    watch = Watch(run.model)
    output, loss = reference.forward(batch)
    reference.backward(loss)
    facts.full_loss = loss.item()
    facts.full_output = local_part(output)
    with counter.counting("forward"):
        output, loss = run.forward(batch)
    with counter.counting("backward"):
        run.backward(loss)
    facts.loss = float(local_part(loss))
    if isinstance(output, DTensor):
        output = output.full_tensor()
    facts.output = local_part(output)
    facts.full_grads = reference.parts("grad")
    facts.grads = run.parts("grad")
    facts.order = list(watch_full.outputs)
    facts.full_outputs = watch_full.outputs
    facts.full_output_grads = watch_full.gradients
    facts.outputs = watch.outputs
    facts.output_grads = watch.gradients
    facts.owners = owners_of(run.model)
    watch_full.remove()
    watch.remove()


def owners_of(model: nn.Module) -> dict[str, str]:
    """Parameter → the module that has it."""
    return {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}


def compare_dropout(run: Run, batch, facts: Facts, counter, args) -> None:
    """In train mode: which elements each dropout module sets to zero on this rank."""
    run.model.train()
    with counter.counting("dropout"):
        facts.dropped = dropped(run.model, run, batch, args.seed + 7)
    torch.manual_seed(args.seed + 7)
    with counter.counting("dropout"):
        _, loss = run.forward(batch)
    facts.train_loss = float(local_part(loss))
    run.model.eval()


def compare_steps(subject, reference: Run, run: Run, facts, counter, args, device):
    """Some steps of training with clipping; parameters after each of them."""
    optimizers = [reference.optimizer(), run.optimizer()]
    trained = set()
    for group in optimizers[1].param_groups:
        trained.update(map(id, group["params"]))
    for name, p in run.model.named_parameters():
        if p.requires_grad and id(p) not in trained:
            facts.not_in_optimizer.append(name)
    for step in range(args.steps):
        batch = prepare_batch(subject, step, args, device)
        norms = []
        for which, optimizer in zip((reference, run), optimizers):
            for p in which.model.parameters():
                p.grad = None
            phase = "a full step" if which is reference else "training"
            with counter.counting(phase):
                _, loss = which.forward(batch)
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
        facts.full_after.append(reference.parts("data"))
        facts.after.append(run.parts("data"))


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
        facts = audit(load_subject(Path(args.path)), args, counter, device)
        everyone = [None] * ranks
        counter.report("gathering results")
        dist.all_gather_object(everyone, facts)
        if rank == 0:
            text = json.dumps(findings_of(everyone, args.dtype))
            Path(args.out).write_text(text)
        counter.report("done")
        dist.barrier()
    except Exception as error:
        where = traceback.format_exc()
        status = store.get(f"status/{rank}").decode()
        first = next(iter(str(error).splitlines()), "")
        text = f"{type(error).__name__}: {first}"
        store.set(f"error/{rank}", json.dumps([status, text, where]))
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
