"""Four ranks run every split of lesson 01's MLP on random shapes, against plain torch.

    torchrun --nproc_per_node=4 drive_mlp.py FOLDER

Every rank computes the whole thing alone, with torch's own functions, cuts out what it
should hold, and compares that with what the lesson's layers gave it.
"""

import math
import random

import torch
import torch.nn.functional as F
from in_ranks import difference, exact, groups_of_4, is_ours, load, run, transposed
from torch import nn

lesson = load("01_naive_mlp_tp")
ON_TP = {"column": lesson.ColumnParallelLinear, "row": lesson.RowParallelLinear,
         "tp": lesson.tp_mlp, "naive": lesson.naive_mlp}  # fmt: skip
ON_MESH = {"up": lesson.UpLinear2D, "down": lesson.DownLinear2D, "2d": lesson.mlp_2d}
LINEARS = "column", "row", "up", "down"
SHAPES = dict.fromkeys(ON_TP, 72) | {"up": 36, "down": 36, "2d": 72}
DTYPES = torch.float32, torch.float64, torch.bfloat16  # of whole numbers


def parallel(way: str, full: nn.Module, groups: dict) -> tuple:
    """A full layer spread one way; how its input and its output are cut."""
    if way in ON_MESH:  # with one rank on the inner axis it is FSDP
        outer, inner = groups["outer"], groups["inner"]
        cuts = (0, outer), (2, inner)
        return ON_MESH[way](full, outer, inner), cuts, cuts
    columns = ((2, groups["tp"]),)
    x_cuts = columns if way == "row" else ()
    y_cuts = columns if way == "column" else ()
    return ON_TP[way](full, groups["tp"]), x_cuts, y_cuts


def piece(x, cuts):
    """This rank's piece of x: cuts are ((dim, group), …), made in that order."""
    for dim, group in cuts:
        assert x.shape[dim] % group.size() == 0, (tuple(x.shape), dim, group.size())
        x = x.tensor_split(group.size(), dim)[group.rank()]
    return x.detach().clone()


def off(got, whole, cuts) -> float:
    return difference(got, piece(whole, cuts), whole)


def draw(shape, generator, whole: bool = False, dtype=torch.float64):
    if whole:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def memory(module: nn.Module) -> set:
    return {p.untyped_storage().data_ptr() for p in module.parameters()}


def try_way(way, number, groups, whole=False, dtype=torch.float64) -> dict:
    """One random shape one way: kind of thing → the largest difference."""
    rng = random.Random(f"{way} {number} {whole}")
    how = torch.Generator().manual_seed(rng.getrandbits(32)), whole, dtype
    sizes = {axis: group.size() for axis, group in groups.items()}
    ranks, outer = math.prod(sizes.values()), sizes.get("outer", 1)
    inputs = rng.randint(1, 4) * (1 if way in ("column", "tp") else ranks)
    width = rng.randint(1, 4) * (1 if way == "row" else ranks)
    full = (nn.Linear if way in LINEARS else lesson.MLP)(inputs, width).to(dtype)
    for p in full.parameters():
        p.data = draw(p.shape, *how)
    outputs = width if way in LINEARS else inputs
    B, S = outer * rng.randint(1, 4), rng.randint(1, 5)
    x, upstream = (draw((B, S, n), *how) for n in (inputs, outputs))
    x = transposed(x) if number % 2 else x
    leaf = x.clone().requires_grad_()
    y = full(leaf) if way in LINEARS else full.down_proj(F.gelu(full.up_proj(leaf)))
    y.backward(upstream)

    layer, x_cuts, y_cuts = parallel(way, full, groups)
    mine = piece(x, x_cuts).requires_grad_()
    got = layer(mine)
    got.backward(transposed(piece(upstream, y_cuts)))

    held = dict(layer.named_parameters())
    diffs = {"y": off(got, y, y_cuts), "x": off(mine.grad, leaf.grad, x_cuts)}
    for name, p in full.named_parameters():
        cuts = held[name].cuts
        diffs[f"held {name}"] = off(held[name], p, cuts)
        diffs[name] = off(held[name].grad, p.grad, cuts)
    names = [name for name, _ in full.named_parameters()]
    diffs["held names"] = exact([*held] == names)
    diffs["held apart"] = exact(memory(layer).isdisjoint(memory(full)))
    return dict(
        way=way, mesh=[*sizes.values()], shape=[B, S, inputs, outputs], whole=whole,
        dtype=str(dtype), diffs=diffs,
    )  # fmt: skip


def main() -> dict:
    meshes = []
    for Y, X in ((2, 2), (4, 1), (1, 4), (2, 1)):  # the last twice, side by side
        sizes = {"other": 4 // (Y * X), "outer": Y, "inner": X}
        mesh = lesson.mesh_groups(sizes, 30)
        meshes.append({axis: mesh[axis] for axis in ("outer", "inner")})
    groups, cases = groups_of_4(lesson), []
    for way, shapes in SHAPES.items():
        places = meshes if way in ON_MESH else [{"tp": group} for group in groups]
        for number in range(shapes):
            place = places[number % 4]
            if way in ON_MESH or is_ours(number, place["tp"]):
                cases.append(try_way(way, number, place))
        for number in range(12 if way in LINEARS else 0):
            dtype = DTYPES[number // 4]
            cases.append(try_way(way, number, places[number % 4], True, dtype))
    return dict(cases=cases)


if __name__ == "__main__":
    run(main)
