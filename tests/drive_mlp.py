"""Four ranks run every split of lesson 01's MLP on random shapes, against plain torch.

    torchrun --nproc_per_node=4 drive_mlp.py FOLDER

Every rank computes the whole thing alone, with torch's own functions, cuts out what it
should hold, and compares that with what the lesson's layers gave it.
"""

import copy
import math
import random

import torch
import torch.nn.functional as F
from in_ranks import difference, exact, groups_of_4, load, refused, run
from torch import nn

lesson = load("01_naive_mlp_tp")
SHAPES = {"column": 104, "row": 104, "tp": 104, "naive": 104, "up": 48, "down": 48}
SHAPES["2d"] = 100  # with one rank on the inner axis it is FSDP
LINEARS = "column", "row", "up", "down"
ON_MESH = {"up": lesson.UpLinear2D, "down": lesson.DownLinear2D, "2d": lesson.mlp_2d}
MESHES = ((2, 2), (4, 1), (1, 4), (2, 1))  # outer × inner; the last twice, side by side


def parallel(way: str, full: nn.Module, groups: dict) -> tuple:
    """A full layer spread one way; how its input and its output are cut."""
    if way in ON_MESH:
        outer, inner = groups["outer"], groups["inner"]
        mesh = ((0, outer), (2, inner))
        return ON_MESH[way](full, outer, inner), mesh, mesh
    columns = ((2, groups["tp"]),)
    make, x_cuts, y_cuts = {
        "column": (lesson.ColumnParallelLinear, (), columns),
        "row": (lesson.RowParallelLinear, columns, ()),
        "tp": (lesson.tp_mlp, (), ()),
        "naive": (lesson.naive_mlp, (), ()),
    }[way]
    return make(full, groups["tp"]), x_cuts, y_cuts


def piece(x, cuts):
    """This rank's piece of x: cuts are ((dim, group), …), made in that order."""
    for dim, group in cuts:
        assert x.shape[dim] % group.size() == 0, (tuple(x.shape), dim, group.size())
        x = x.tensor_split(group.size(), dim)[group.rank()]
    return x.detach().clone()


def off(got, whole, cuts) -> float:
    return difference(got, piece(whole, cuts), whole)


def plain(full: nn.Module, x):
    """The full module in torch's own words; its output."""
    p = dict(full.named_parameters())
    if isinstance(full, nn.Linear):
        return F.linear(x, p["weight"], p["bias"])
    h = F.gelu(F.linear(x, p["up_proj.weight"], p["up_proj.bias"]))
    return F.linear(h, p["down_proj.weight"], p["down_proj.bias"])


def draw(shape, generator, whole: bool = False, dtype=torch.float64):
    if whole:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def fill(module: nn.Module, *how) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(draw(p.shape, *how))
    return module


def try_way(way, number, groups, whole=False, dtype=torch.float64) -> dict:
    """One random shape one way: kind of thing → the largest difference."""
    rng = random.Random(f"{way} {number} {whole}")
    how = torch.Generator().manual_seed(rng.getrandbits(32)), whole, dtype
    sizes = {axis: group.size() for axis, group in groups.items()}
    ranks, outer = math.prod(sizes.values()), sizes.get("outer", 1)
    inputs = rng.randint(1, 4) * (1 if way in ("column", "tp") else ranks)
    width = rng.randint(1, 4) * (1 if way == "row" else ranks)
    full = (nn.Linear if way in LINEARS else lesson.MLP)(inputs, width).to(dtype)
    first, *_, last = fill(full, *how).parameters()
    B, S, D = outer * rng.randint(1, 4), rng.randint(1, 5), first.shape[1]
    x = draw((S, B, D), *how).transpose(0, 1)
    x = x.contiguous() if number % 2 else x
    upstream = draw((S, B, len(last)), *how).transpose(0, 1)
    leaf = x.clone().requires_grad_()
    y = plain(full, leaf)
    y.backward(upstream)

    layer, x_cuts, y_cuts = parallel(way, full, groups)
    mine = piece(x, x_cuts).requires_grad_()
    got = layer(mine)
    got.backward(piece(upstream, y_cuts))

    held, before = dict(layer.named_parameters()), copy.deepcopy(full)
    diffs = {"y": off(got, y, y_cuts), "x": off(mine.grad, leaf.grad, x_cuts)}
    for name, p in full.named_parameters():
        cuts = held[name].cuts
        diffs[f"held {name}"] = off(held[name], p, cuts)
        diffs[name] = off(held[name].grad, p.grad, cuts)
    diffs["held names"] = exact(
        [*held] == [name for name, _ in full.named_parameters()]
    )
    with torch.no_grad():  # the layer's parameters are its own
        for p in held.values():
            p += 1
    alike = map(torch.equal, full.parameters(), before.parameters())
    diffs["held apart"] = exact(all(alike))
    return dict(
        way=way, mesh=sizes, shape=[B, S, D, len(last)], whole=whole, dtype=str(dtype),
        diffs=diffs,
    )  # fmt: skip


FUNCTIONS = "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter"


def try_function(name: str, number: int, group) -> dict:
    """One autograd function's output and gradient, against the same program for all
    ranks at once, in one process: leaves[i] is rank i's input, outs[i] its output."""
    T, r = group.size(), group.rank()
    rng = random.Random(f"{name} {number}")
    generator = torch.Generator().manual_seed(number)
    shape = [T * rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(-len(shape), len(shape))
    leaves = [draw(shape, generator).requires_grad_() for _ in range(T)]
    if name == "CopyToTP":  # one x, and each rank has a use of its own for it
        leaves = leaves[:1] * T
    total, joined = sum(leaves), torch.cat(leaves, dim)
    outs = {
        "CopyToTP": leaves, "ReduceFromTP": [total] * T, "GatherFromTP": [joined] * T,
        "AllGather": [joined] * T, "ReduceScatter": total.tensor_split(T, dim),
    }[name]  # fmt: skip
    uses = [draw(out.shape, generator) for out in outs]
    terms = [(out.tanh() * use).sum() for out, use in zip(outs, uses)]
    # One loss, the same on all ranks; or each rank has a term of the loss.
    one_loss = name in ("ReduceFromTP", "GatherFromTP")
    (terms[0] if one_loss else sum(terms)).backward()
    x = leaves[r].detach().clone().requires_grad_()
    where = () if name in ("CopyToTP", "ReduceFromTP") else (dim,)
    got = getattr(lesson, name).apply(x, *where, group)
    upstream = (1 - got.detach().tanh().square()) * uses[0 if one_loss else r]
    if number % 2:  # the same numbers, laid out otherwise
        upstream = upstream.transpose(0, -1).contiguous().transpose(0, -1)
    got.backward(upstream)
    return {
        "y": difference(got, outs[r]),
        "x": difference(x.grad, leaves[r].grad),
        "input": exact(torch.equal(x, leaves[r])),
    }


def two_numbers(group) -> list:
    """y = Σ over ranks of w_t·x with w_t = t + 1 and x = 5: y, dL/dx, dL/dw_t."""
    x = torch.tensor(5.0, requires_grad=True)
    w = torch.tensor(group.rank() + 1.0, requires_grad=True)
    y = lesson.ReduceFromTP.apply(lesson.CopyToTP.apply(x, group) * w, group)
    y.backward()
    return [y.item(), x.grad.item(), w.grad.item()]


def refusals(group) -> list:
    """(T, what layers say to a width that the ranks do not divide)."""
    T = group.size()
    wide, tall = nn.Linear(8, T + 1), nn.Linear(T + 1, 8)
    said = refused({
        "column": lambda: lesson.ColumnParallelLinear(wide, group),
        "row": lambda: lesson.RowParallelLinear(tall, group),
        "up": lambda: lesson.UpLinear2D(wide, group, group),
    })  # fmt: skip
    return [[T, message] for message in said.values()]


def main() -> dict:
    meshes = [lesson.mesh_groups({"outer": Y, "inner": X}, 30) for Y, X in MESHES[:3]]
    three_axes = lesson.mesh_groups({"other": 2, "outer": 2, "inner": 1}, 30)
    meshes.append({axis: three_axes[axis] for axis in ("outer", "inner")})
    groups, cases, functions = groups_of_4(lesson), [], []
    for way, shapes in SHAPES.items():
        places = meshes if way in ON_MESH else [{"tp": group} for group in groups]
        for number in range(shapes):
            cases.append(try_way(way, number, places[number % 4]))
        for number in range(12 if way in LINEARS else 0):
            dtype = (torch.float32, torch.float64, torch.bfloat16)[number // 4]
            cases.append(try_way(way, number, places[number % 4], True, dtype))
    for name in FUNCTIONS:
        for number in range(68):
            group = groups[number % 4]
            functions.append([name, group.size(), try_function(name, number, group)])
    return dict(
        cases=cases, functions=functions,
        two_numbers=[[group.size(), *two_numbers(group)] for group in groups],
        refusals=[*refusals(groups[2]), *refusals(groups[3])],
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
