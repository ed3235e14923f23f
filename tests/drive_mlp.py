"""Four ranks run every split of the MLP on random shapes, against plain torch.

    torchrun --nproc_per_node=4 drive_mlp.py FOLDER

Every rank computes the whole thing alone, with torch's own functions, cuts out what it
should hold, and compares that with what the lesson's layers gave it. Whole MLPs in
float64; single layers with whole numbers, of which sums are exact in any order.
"""

import math
import random

import torch
import torch.nn.functional as F
from in_ranks import difference, groups_of_4, is_ours, load, run, transposed
from shardings import shardings_of
from torch import nn

script = load("13_mesh_2d")
lesson = script.lesson01
MLPS = {"tp": lesson.tp_mlp, "naive": lesson.naive_mlp, "2d": script.mlp_2d}
LINEARS = {"column": lesson.ColumnParallelLinear, "row": lesson.RowParallelLinear,
           "up": script.UpLinear2D, "down": script.DownLinear2D}  # fmt: skip
ON_MESH = "up", "down", "2d"
DTYPES = torch.float32, torch.float64, torch.bfloat16  # of whole numbers


def cuts_of(way: str, groups: dict) -> tuple:
    """How a layer's input and its output are cut: ((dim, group), …) each."""
    if way in ON_MESH:  # with one rank on the inner axis it is FSDP
        cuts = (0, groups["outer"]), (2, groups["inner"])
        return cuts, cuts
    columns = ((2, groups["tp"]),)
    return columns if way == "row" else (), columns if way == "column" else ()


def piece(x, cuts):
    """This rank's piece of x, cut in the order of the cuts."""
    for dim, group in cuts:
        assert x.shape[dim] % group.size() == 0, (tuple(x.shape), dim, group.size())
        x = x.tensor_split(group.size(), dim)[group.rank()]
    return x.detach().clone()


def try_way(way: str, number: int, groups: dict) -> dict:
    """One random shape one way: kind of thing → the largest difference."""
    rng, is_linear = random.Random(f"{way} {number}"), way in LINEARS
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    dtype = DTYPES[number // 4] if is_linear else torch.float64

    def draw(shape):
        if is_linear:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=dtype)

    sizes = [group.size() for group in groups.values()]
    ranks, outer = math.prod(sizes), sizes[0] if way in ON_MESH else 1
    inputs = rng.randint(1, 4) * (1 if way in ("column", "tp") else ranks)
    width = rng.randint(1, 4) * (1 if way == "row" else ranks)
    full = nn.Linear(inputs, width) if is_linear else lesson.MLP(inputs, width)
    if number % 3 == 2:  # linears without bias, in every third shape
        for linear in full.modules():
            if isinstance(linear, nn.Linear):
                linear.bias = None
    full = full.to(dtype)
    for p in full.parameters():
        p.data = draw(p.shape)
    B, S = outer * rng.randint(1, 4), rng.randint(1, 5)
    x, upstream = draw((B, S, inputs)), draw((B, S, width if is_linear else inputs))
    x = transposed(x) if number % 2 else x
    leaf = x.clone().requires_grad_()
    y = full(leaf) if is_linear else full.down_proj(F.gelu(full.up_proj(leaf)))
    y.backward(upstream)

    layer = (LINEARS | MLPS)[way](full, *groups.values())
    x_cuts, y_cuts = cuts_of(way, groups)
    mine = piece(x, x_cuts).requires_grad_()
    got = layer(mine)
    got.backward(transposed(piece(upstream, y_cuts)))

    found = {"y": (got, y, y_cuts), "x": (mine.grad, leaf.grad, x_cuts)}
    for name, p in full.named_parameters():
        held = layer.get_parameter(name)
        found[name] = held.grad, p.grad, shardings_of(held)
    diffs = {
        name: difference(part, piece(whole, cuts), whole)
        for name, (part, whole, cuts) in found.items()
    }
    return dict(way=way, mesh=sizes, shape=[B, S, inputs, width], diffs=diffs)


def backward_of(x_needs_gradient: bool, group) -> dict:
    """All-reduces in tp_mlp's backward, and its weights' gradients against plain."""
    torch.manual_seed(0)
    full = lesson.MLP(3, 4 * group.size()).double()
    x, upstream = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    full(x).backward(upstream)
    mlp = lesson.tp_mlp(full, group)
    y = mlp(x.clone().requires_grad_(x_needs_gradient))
    lesson.METER.calls.clear()
    with lesson.METER.phase("tp", "backward"):
        y.backward(upstream)
    calls = lesson.METER.calls.get(("tp", "backward", "all-reduce", "tp"), [])
    assert len(lesson.METER.calls) == bool(calls), lesson.METER.calls
    diffs = []
    for name, p in full.named_parameters():
        held = mlp.get_parameter(name)
        part = piece(p.grad, shardings_of(held))
        diffs.append(difference(held.grad, part, p.grad))
    return dict(calls=len(calls), diff=max(diffs))


def main() -> dict:
    meshes = []
    for Y, X in ((2, 2), (4, 1), (1, 4), (2, 1)):  # the last twice, side by side
        sizes = {"other": 4 // (Y * X), "outer": Y, "inner": X}
        mesh = lesson.mesh_groups(sizes, 30)
        meshes.append({axis: mesh[axis] for axis in ("outer", "inner")})
    groups, cases = [{"tp": group} for group in groups_of_4(lesson)], []
    for way in LINEARS | MLPS:
        for number in range(12 if way in LINEARS else 72):
            place = (meshes if way in ON_MESH else groups)[number % 4]
            if way in ON_MESH or is_ours(number, place["tp"]):
                cases.append(try_way(way, number, place))
    backward = {}
    for name, needs in (("x needs a gradient", True), ("x needs none", False)):
        backward[name] = backward_of(needs, groups[2]["tp"])
    return dict(cases=cases, backward=backward)


if __name__ == "__main__":
    run(main)
