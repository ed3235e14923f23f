"""What is computed while a call travels, and how much memory head and loss take.

A helper of beyond/18_in_pieces.py, no script.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WATCHED = ("all_gather", "reduce_scatter")
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Travels(TorchDispatchMode):
    """Within `with`: products, and for each call how many were computed before its end.

    A call that waits itself ends at once.
    """

    def __init__(self):
        super().__init__()
        self.products = 0
        self.behind = []

    def __enter__(self):
        self.calls = {name: getattr(dist, name) for name in WATCHED}
        for name, call in self.calls.items():
            setattr(dist, name, partial(self.start, call))
        return super().__enter__()

    def __exit__(self, kind, error, trace):
        for name, call in self.calls.items():
            setattr(dist, name, call)
        return super().__exit__(kind, error, trace)

    def start(self, call, *args, **kwargs):
        """Make a call; what it returns to wait for says when that happens."""
        work = call(*args, **kwargs)
        self.behind.append(0)
        return work and Waiting(work, self, len(self.behind) - 1, self.products)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in PRODUCTS:
            self.products += 1
        return func(*args, **(kwargs or {}))


class Waiting:
    """The Work of one call; wait() notes how many products came since its start."""

    def __init__(self, work: dist.Work, seen: Travels, number: int, products: int):
        self.work = work
        self.seen = seen
        self.number = number
        self.products = products  # before the call
        self.has_ended = False

    def wait(self) -> None:
        if not self.has_ended:
            self.seen.behind[self.number] = self.seen.products - self.products
        self.has_ended = True
        self.work.wait()


# ---- How much memory head and loss take


class PeakBytes(TorchDispatchMode):
    """Within `with`: the most bytes at one time in floats [B, S, columns]."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns = columns
        self.alive = weakref.WeakSet()  # a storage leaves it when it is freed
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.dim() == 3:
            # Larger than the bias and its gradient.
            if out.shape[-1] == self.columns and out.numel() > self.columns:
                self.alive.add(out.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.alive))
        return out
