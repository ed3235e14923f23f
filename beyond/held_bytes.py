"""A meter of the bytes that autograd holds for backward, in one process.

A helper of beyond/14_schedules.py and tools/dry_run.py, no script.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn


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
