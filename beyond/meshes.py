"""Meshes of as many ranks, and sizes of a model that all of them can share.

A helper of beyond/10_checkpoints.py, no script.
"""

import copy
import math
from typing import NamedTuple

from course import lesson02, lesson05


class Mesh(NamedTuple):
    name: str  # of the column in the tables
    pp: int
    dp: int
    tp: int
    zero: bool  # shard AdamW's moments over dp

    def sizes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    def text(self) -> str:
        return " × ".join(f"{axis} {ranks}" for axis, ranks in self.sizes().items())


def choose_meshes(args) -> list[Mesh]:
    """Mesh A as the flags say, and two others of as many ranks: its axes exchanged."""
    pp, dp, tp = args.pp, args.dp, args.tp
    others = [(dp, tp, pp), (tp, pp, dp)]
    if pp == dp == tp:  # exchanged, they are the same
        others = [(1, dp, pp * tp), (pp * tp, dp, 1)]
    meshes = [Mesh("A", pp, dp, tp, args.zero)]
    for sizes in others:
        mesh = Mesh("ABC"[len(meshes)], *sizes, not args.zero)
        if mesh.sizes() not in [other.sizes() for other in meshes]:
            meshes.append(mesh)
    return meshes


def fill_sizes_for(args, meshes: list[Mesh]) -> list[Mesh]:
    """Fill in sizes that all meshes divide, or at least A. Return those that do."""
    common = copy.copy(args)
    common.pp = max(mesh.pp for mesh in meshes)
    common.dp = math.lcm(*[mesh.dp for mesh in meshes])
    common.tp = math.lcm(*[mesh.tp for mesh in meshes])
    valid = []
    try:
        fill_all(common)
        vars(args).update(vars(common), **meshes[0].sizes())
    except ValueError:
        fill_all(args)  # the sizes that were given do not fit all meshes
    for mesh in meshes:
        own = copy.copy(args)
        vars(own).update(mesh.sizes())
        try:
            fill_all(own)
            valid.append(mesh)
        except ValueError as error:
            args.left_out.append(f"{mesh.text()} is left out: {error}")
    return valid


def fill_all(args) -> None:
    """Fill in sizes that the mesh of these flags divides. ValueError if it cannot."""
    lesson05.fill_sizes(args)
    kv_heads = args.tp * math.ceil(4 / args.tp)
    args.heads = args.heads or 2 * math.lcm(args.kv_heads or kv_heads, args.tp)
    args.kv_heads = args.kv_heads or math.gcd(args.heads, kv_heads)
    args.hidden = args.hidden or 8 * args.heads
    lesson02.transformer_sizes(args)


def flag_for(name: str, value) -> str:
    """The flag that gives a setting this value."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    return f"no {flag}" if value is False else f"{flag} {value}"
