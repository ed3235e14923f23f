"""Parameters that are split over several groups, one after the other.

A helper of beyond/13_mesh_2d.py and beyond/16_expert_parallel.py, no script.
"""

import torch
from course import lesson00, lesson01
from torch import Tensor, nn


def shardings_of(p: Tensor) -> tuple:
    """((dim, group), …): how a parameter is split, in order; () if it is replicated.

    In the lessons it is split over one group at most: p.sharding is (dim, group).
    """
    sharding = lesson01.sharding_of(p)
    return getattr(p, "shardings", (sharding,) if sharding else ())


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first."""
    for dim, group in reversed(shardings):
        x = lesson00.all_gather(x, dim, group)
    return x


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), also of several shardings."""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            tensors[name] = torch.empty(0)  # your edit may have lost it
        else:
            tensors[name] = unshard(x.detach(), shardings_of(p)).clone()
    return tensors
