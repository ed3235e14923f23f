"""A rank's parameters as one vector, which can be sharded in equal slices.

A helper of beyond/15_zero.py and flat_adamw.py, no script. A slice begins and ends
anywhere, also within a parameter.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from course import lesson01
from torch import Tensor, nn


def flatten(tensors: list[Tensor], parts: int) -> Tensor:
    """All elements in one vector, with zeros at its end so that `parts` divides it."""
    flat = torch.cat([x.detach().flatten() for x in tensors])
    return F.pad(flat, (0, -len(flat) % parts))


def views_of(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in a flattened vector, as views: they share its memory."""
    views = []
    start = 0
    for x in like:
        views.append(flat[start : start + x.numel()].view(x.shape))
        start += x.numel()
    return views


def norm_weights(parameters: Iterable[nn.Parameter], tp_group) -> list[Tensor]:
    """How much the square of each element of a gradient counts in a sum over tp.

    What all T ranks of a TP group hold counts 1/T on each. In lesson 02 each parameter
    has one weight. A shard begins and ends within a parameter, so each element has a
    weight of its own: flattened and sliced as the gradient is, the weights fit.
    """
    weights = []
    for p in parameters:
        weight = 1.0 if lesson01.sharding_of(p) else 1 / tp_group.size()
        weights.append(torch.full_like(p, weight, dtype=torch.float64))
    return weights
