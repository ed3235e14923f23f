"""from_full: the full model's weights for shards that were made with random values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .compare import slice_of
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
    sources = dict(full.named_parameters(remove_duplicate=False))
    sources.update(full.named_buffers())
    targets = dict(model.named_parameters())
    targets.update(model.named_buffers())
    names = names or {}
    renamed = {old: new for old, new in names.items() if isinstance(new, str)}
    for long_name, target in targets.items():
        name = plain_name(long_name, {})
        parts = [plain_name(long_name, renamed)]
        if not isinstance(names.get(name, ""), str):
            parts = names[name]
        missing = [part for part in parts if part not in sources]
        if missing and isinstance(target, nn.Parameter):
            raise ValueError(
                f"from_full: the full model has no {missing[0]} (for {name})"
            )
        if missing:
            continue  # a buffer of the parallel model alone
        full_parts = [sources[part].detach() for part in parts]
        sizes = (blocks or {}).get(name)
        if len(parts) > 1:
            sizes = [len(part) for part in full_parts]
            full_parts = [torch.cat(full_parts)]
        value = value_of(target, full_parts[0], (dims or {}).get(name), sizes, tp_group)
        if value.shape != target.shape:
            raise ValueError(
                f"from_full: {name} is {list(target.shape)}, and this rank's slice is "
                f"{list(value.shape)}; say how to slice it by names, blocks or dims"
            )
        target.copy_(value)
    return model


def value_of(target, source: Tensor, dim: int | None, sizes, group) -> Tensor:
    """What a parameter of the parallel model gets of the full tensor."""
    if isinstance(target, DTensor):
        return distribute_tensor(source, target.device_mesh, target.placements)
    dim = sharded_dim(source, target) if dim is None else dim
    return own_slice(source, target, dim, sizes, group)


def sharded_dim(source: Tensor, target: Tensor) -> int | None:
    """The one dim along which the shapes differ, or None."""
    if source.dim() != target.dim():
        return None
    differ = [d for d in range(source.dim()) if source.shape[d] != target.shape[d]]
    return differ[0] if len(differ) == 1 else None


def own_slice(source, target, dim: int | None, sizes: list | None, group) -> Tensor:
    """This rank's slice of each block of a full tensor, with zeros after its end."""
    if dim is None:
        return source
    ranks = group.size()
    found = []
    for block in source.split(sizes or source.shape[dim], dim):
        width = -(-block.shape[dim] // ranks) if sizes else target.shape[dim]
        pieces = min(ranks, -(-block.shape[dim] // width))  # fewer ones are shared
        own = slice_of(block, dim, width, group.rank() * pieces // ranks)
        padding = list(own.shape)
        padding[dim] = width - own.shape[dim]
        found.append(torch.cat([own, own.new_zeros(padding)], dim))
    return torch.cat(found, dim)
