"""Ulysses: attention of a split sequence that exchanges positions for heads.

A helper of beyond/11_context_parallel.py, no script. It needs no other attention: with
all positions of some heads, lesson 02's runs as it is. Heads are independent of each
other, so C ranks can share them, if C divides K.
"""

import torch
from course import lesson00
from torch import Tensor


def exchange(x: Tensor, split_dim: int, join_dim: int, cp_group) -> Tensor:
    """Split x along one dim, send part j to rank j, join along the other dim."""
    parts = torch.stack(lesson00.split(x, split_dim, cp_group.size()))
    return torch.cat(list(lesson00.all_to_all(parts, cp_group)), join_dim)


class Exchange(torch.autograd.Function):
    """An all-to-all. Elements only move, so their gradients move back the same way."""

    @staticmethod
    def forward(ctx, x: Tensor, split_dim: int, join_dim: int, cp_group) -> Tensor:
        ctx.dims = split_dim, join_dim
        ctx.cp_group = cp_group
        return exchange(x, split_dim, join_dim, cp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        split_dim, join_dim = ctx.dims
        return exchange(grad, join_dim, split_dim, ctx.cp_group), None, None, None


def ulysses_attention(q, k, v, tables, core, cp_group, layout) -> Tensor:
    """All S positions of N/C heads instead of s positions of N heads, and back.

    In between, lesson 02's attention runs unchanged: C must divide K.
    Shapes: q [B, s, N·H] → [B, S, N·H/C] → attention [B, S, N·H/C] → [B, s, N·H].
    Communication: 4 all-to-alls forward (q, k, v, output) and 4 backward, together
        B·s·(2·N + 2·K)·H elements forward and the same backward.
    """
    q = Exchange.apply(q, 2, 1, cp_group)
    k = Exchange.apply(k, 2, 1, cp_group)
    v = Exchange.apply(v, 2, 1, cp_group)
    return Exchange.apply(core(q, k, v, tables), 1, 2, cp_group)
