"""Meters of a pipeline: when it computed, and the bytes that are held for backward.

A helper of beyond/14_schedules.py and tools/dry_run.py, no script.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KINDS = Tensor, nn.Parameter


class HeldTensor:
    """A tensor that is held for later; Python calls __del__ when it is released."""

    def __init__(self, tensor: Tensor, meter: HeldBytes, forward_pass: int = 0):
        # Detached: a saved output that kept its history would keep itself alive.
        self.tensor = tensor.detach()
        self.meter = meter
        self.forward_pass = forward_pass  # 0: held for a weight pass
        meter.change(self, +1)

    def __del__(self):
        self.meter.change(self, -1)


class HeldBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd holds for backward: now, and at the peak since reset().

    Put `with meter:` around a run. A saved tensor counts from then until autograd
    releases it, whoever keeps the graph alive. Tensors in one storage count once;
    parameters and buffers of the module do not count. Tensors that are in a list of
    Python, and no graph needs them, are not seen: hold HeldTensor(x, meter) for them.
    """

    def __init__(self, module: nn.Module):
        super().__init__(self.hold, lambda held: held.tensor)
        stored = list(module.parameters()) + list(module.buffers())
        self.ignored = {self.key_of(x) for x in stored}
        self.in_storage = Counter()  # storage → saved tensors in it
        self.of_pass = Counter()  # forward pass → its tensors that are still held
        self.forward_pass = 0
        self.now = 0
        self.reset()

    def hold(self, x: Tensor) -> HeldTensor:
        return HeldTensor(x, self, self.forward_pass)

    def reset(self) -> None:
        self.peak = self.now
        self.peak_passes = len(self.of_pass)

    @staticmethod
    def key_of(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def change(self, held: HeldTensor, by: int) -> None:
        """Count a saved tensor in (by = 1), or out (by = −1)."""
        key = self.key_of(held.tensor)
        if key in self.ignored:
            return
        before = self.in_storage[key]
        self.in_storage[key] += by
        if before == 0:
            self.now += held.tensor.untyped_storage().nbytes()
        elif self.in_storage[key] == 0:
            self.now -= held.tensor.untyped_storage().nbytes()
            del self.in_storage[key]
        self.peak = max(self.peak, self.now)
        if held.forward_pass:
            self.of_pass[held.forward_pass] += by
            if self.of_pass[held.forward_pass] == 0:
                del self.of_pass[held.forward_pass]
            self.peak_passes = max(self.peak_passes, len(self.of_pass))


def bytes_alive(but: Sequence[Tensor] = ()) -> int:
    """Bytes of all tensors that Python holds in this process: in lists, in hooks, ….

    Args:
        but: tensors that do not count.
    Tensors in one storage count once. Those that only autograd holds are not Python's:
    HeldBytes sees them.
    """
    gc.collect()
    in_storage = {}
    for x in gc.get_objects():
        if type(x) in KINDS and x.layout is torch.strided:
            in_storage[HeldBytes.key_of(x)] = x.untyped_storage().nbytes()
    for x in but:
        in_storage.pop(HeldBytes.key_of(x), None)
    return sum(in_storage.values())


class PipelineMeters:
    """What beyond/14's VirtualPipeline gets, to record events and bytes held.

    cost: phase → seconds that an action takes at least; it sleeps for the rest.
    """

    def __init__(self, chunks: list[nn.Module], loss_of, groups, cost=None):
        super().__init__(chunks, loss_of, groups)
        self.cost = cost or dict.fromkeys(("forward", "backward", "weight"), 0.0)
        self.held = HeldBytes(nn.ModuleList(chunks))

    def run(self, actions: list[tuple], micro_batches: list) -> Tensor:
        self.events = []
        self.for_weights = {}  # (chunk, micro-batch) → HeldTensors of its weight pass
        self.linears = []  # of each weight pass: the linears whose dL/dW it computes
        self.held.reset()
        before = bytes_alive(but=self.gradients())
        # Around all of it: a graph that is made between passes is seen as well.
        with self.held:
            loss = super().run(actions, micro_batches)
        self.left_alive = bytes_alive(but=[loss, *self.gradients()]) - before
        return loss

    def bytes_held(self, actions: list[tuple]) -> dict[str, int]:
        """After a run of these actions: the peak, what it should be, what is left."""
        return {
            "in flight": self.held.peak_passes,
            "bytes at the peak": self.held.peak,
            "expected": expected_peak(actions, self.events),
            # Both must be 0: what is saved for backward, or in a list or a hook.
            "bytes left": self.held.now + self.left_alive,
            "left in flight": sum(len(x) for x in self.in_flight_by_chunk),
        }

    def gradients(self) -> list[Tensor]:
        parameters = nn.ModuleList(self.chunks).parameters()
        return [p.grad for p in parameters if p.grad is not None]

    def compute_forward(self, i: int, x: Tensor, target: Tensor) -> Tensor:
        self.held.forward_pass += 1
        with self.record_event("forward", i):
            return super().compute_forward(i, x, target)

    def compute_backward(self, i: int, y: Tensor, grad: Tensor | None) -> None:
        with self.record_event("backward", i):
            super().compute_backward(i, y, grad)
            # These lists are not autograd's: hold them where the meter sees them.
            self.for_weights[self.chunk, i] = [
                (HeldTensor(x, self.held), HeldTensor(grad_y, self.held))
                for _, x, grad_y in self.later[self.chunk, i]
            ]

    def weight(self, which: tuple[int, int]) -> None:
        self.chunk = which[0]
        with self.record_event("weight", which[1]):
            super().weight(which)
            self.linears.append(len(self.for_weights.pop(which)))

    @contextmanager
    def record_event(self, phase: str, i: int):
        """Record when this rank computed, and by how much the bytes held changed."""
        before = self.held.now
        start = time.time()
        yield
        if self.like.is_cuda:
            torch.cuda.synchronize()
        time.sleep(max(0.0, start + self.cost[phase] - time.time()))
        event = {"what": phase, "chunk": self.chunk, "microbatch": i}
        event.update(start=start, end=time.time(), bytes=self.held.now - before)
        self.events.append(event)


def add_meters(training, pipeline: type[PipelineMeters]) -> None:
    """Let lesson 05's training run in a pipeline with meters."""
    training.actions = [(phase, (0, i)) for phase, i in training.actions]
    modules = [training.stage_module]
    training.pipeline = pipeline(modules, training.loss_of_microbatch, training.groups)


def expected_peak(actions: list[tuple], events: list[dict]) -> int:
    """The most bytes held, by the list of actions and what each pass saved.

    A backward pass releases what its forward pass saved. With weight passes it leaves
    inputs and gradients of all linears, until the weight pass releases them.
    """
    changes = {}
    for event in events:
        which = (event["chunk"], event["microbatch"])
        changes[event["what"], which] = event["bytes"]
    now = 0
    peak = 0
    # The change of a weight pass is negative: minus it is what backward left for it.
    for phase, which in actions:
        change = changes[phase, which]
        if phase == "backward":
            change = -changes["forward", which] - changes.get(("weight", which), 0)
        now += change
        peak = max(peak, now)
    return peak
