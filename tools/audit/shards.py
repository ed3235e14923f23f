"""from_full: the full model's weights for shards that were made with random values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .record import plain_name


@torch.no_grad()
def from_full(model, full, tp_group, names=None, blocks=None, dims=None) -> nn.Module:
    """Copy the full model's weights into a parallel model that holds shards.

    A parameter (or buffer) of one shape with the full one is copied; if it is smaller
    along one dim, it gets this rank's slice of that dim, zeros where the full one ends.
    If fewer than T pieces fill the dim, neighboring ranks share a piece (key/value
    heads).

    Args:
        names: parallel name → full name, of modules or parameters, or a list of full
            names whose slices are concatenated (a fused q, k, v of three linears).
        blocks: parallel name → sizes of the blocks along the sharded dim of the full
            parameter, each of which is sliced (a fused q, k, v of one linear).
        dims: parallel name → the sharded dim, if the shapes leave a choice.

    Returns the model. Raises ValueError for a parameter that has no counterpart.
    """
    rank = tp_group.rank()
    ranks = tp_group.size()
    sources = dict(full.named_parameters(remove_duplicate=False))
    sources.update(full.named_buffers())
    targets = [*model.named_parameters(), *model.named_buffers()]
    renamed = {}
    lists = {}
    for old, new in (names or {}).items():
        (renamed if isinstance(new, str) else lists)[old] = new
    buffers = dict(model.named_buffers())
    for long_name, target in targets:
        name = plain_name(long_name, {})
        parts = lists.get(name, [plain_name(long_name, renamed)])
        missing = [part for part in parts if part not in sources]
        if missing:
            if long_name in buffers:
                continue  # a buffer of the parallel model alone
            raise ValueError(
                f"from_full: the full model has no {missing[0]} (for {name})"
            )
        if isinstance(target, DTensor):
            shard = distribute_tensor(
                sources[parts[0]].detach(), target.device_mesh, target.placements
            )
            target.copy_(shard)
            continue
        sizes = (blocks or {}).get(name)
        dim = (dims or {}).get(name)
        slices = []
        for part in parts:
            source = sources[part].detach()
            slices += slices_of(source, target, sizes, dim, len(parts), rank, ranks)
        dim = sharded_dim(sources[parts[0]], target, dim, len(parts))
        value = torch.cat(slices, dim or 0) if target.dim() else slices[0]
        if value.shape != target.shape:
            raise ValueError(
                f"from_full: {name} is {list(target.shape)}, and this rank's slice is "
                f"{list(value.shape)}; say how to slice it by names, blocks or dims"
            )
        target.copy_(value)
    return model


def sharded_dim(source: Tensor, target: Tensor, dim: int | None, parts: int):
    """The one dim along which the shapes differ, or None."""
    if dim is not None or source.dim() != target.dim():
        return dim
    shape = list(target.shape)
    if parts > 1 and shape:  # parts are concatenated along the first dim
        return 0
    differ = [d for d, (a, b) in enumerate(zip(source.shape, shape)) if a != b]
    return differ[0] if len(differ) == 1 else None


def slices_of(source, target, sizes, dim, parts: int, rank: int, ranks: int) -> list:
    """This rank's slice of each block of a full tensor."""
    dim = sharded_dim(source, target, dim, parts)
    if dim is None:
        return [source]
    found = []
    for block in source.split(sizes or [source.shape[dim]], dim):
        width = -(-block.shape[dim] // ranks)
        if sizes is None and parts == 1:
            width = target.shape[dim]
        pieces = max(1, -(-block.shape[dim] // width))
        first = min(rank * min(pieces, ranks) // ranks * width, block.shape[dim])
        own = block.narrow(dim, first, min(width, block.shape[dim] - first))
        padding = list(own.shape)
        padding[dim] = width - own.shape[dim]
        found.append(torch.cat([own, own.new_zeros(padding)], dim))
    return found
