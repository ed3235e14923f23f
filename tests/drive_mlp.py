"""Four ranks run every split of lesson 01's MLP on random shapes, against plain torch.

    torchrun --nproc_per_node=4 drive_mlp.py FOLDER

Every rank computes the whole thing alone, with torch's own functions, cuts out what it
should hold, and compares that with what the lesson's layers gave it.
"""

import copy
import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_ranks import finish, load, start
from torch import nn

lesson = load("01_naive_mlp_tp")
SHAPES = {  # random shapes of each; those that send most have fewer
    "column": 104, "row": 104, "tp": 104, "naive": 104, "fsdp": 60, "2d": 60,
    "fsdp_linear": 24, "up_2d": 24, "down_2d": 24,
}  # fmt: skip
MESHES = ((2, 2), (4, 1), (1, 4))


def axes(groups: dict) -> dict:
    """axis → (ranks, this one)."""
    return {axis: (group.size(), group.rank()) for axis, group in groups.items()}


def cut(x, where, at):
    """This rank's piece: where is ((axis, dim), …), cut in that order."""
    for axis, dim in where:
        T, r = at[axis]
        assert x.shape[dim] % T == 0, (tuple(x.shape), dim, T)
        x = x.tensor_split(T, dim)[r]
    return x.detach().clone()


def off(got, whole, where, at) -> float:
    """max|piece − wanted piece| / max|whole|; inf for a wrong shape or nan."""
    wanted = cut(whole, where, at)
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    diff = (got.double() - wanted.double()).abs().max() / whole.double().abs().max()
    return diff.item() if diff == diff else math.inf


def column(p, x):
    return F.linear(x, p["weight"], p["bias"])


def mlp(p, x):
    h = F.gelu(F.linear(x, p["up_proj.weight"], p["up_proj.bias"]))
    return F.linear(h, p["down_proj.weight"], p["down_proj.bias"])


X, Y, TP, DP = "x", "y", "tp", "dp"
UP_TP = {"up_proj.weight": ((TP, 0),), "up_proj.bias": ((TP, 0),)}
FSDP = {f"{layer}.{kind}": ((DP, 0),) for layer in ("up_proj", "down_proj")
        for kind in ("weight", "bias")}  # fmt: skip
BIAS_2D = ((X, 0), (Y, 0))
# way → what it makes of the full module, the plain function, how x, y and parameters
# are cut, and what B, D and F must be multiples of.
WAYS = {
    "column": (
        lambda full, g: lesson.ColumnParallelLinear(full, g["tp"]), column,
        (), ((TP, 2),), {"weight": ((TP, 0),), "bias": ((TP, 0),)},
        lambda at: (1, 1, at[TP][0]),
    ),
    "row": (
        lambda full, g: lesson.RowParallelLinear(full, g["tp"]), column,
        ((TP, 2),), (), {"weight": ((TP, 1),), "bias": ()},
        lambda at: (1, 1, at[TP][0]),
    ),
    "tp": (
        lambda full, g: lesson.TPMLP(full, g["tp"]), mlp,
        (), (), UP_TP | {"down_proj.weight": ((TP, 1),), "down_proj.bias": ()},
        lambda at: (1, 1, at[TP][0]),
    ),
    "naive": (
        lambda full, g: lesson.NaiveTPMLP(full, g["tp"]), mlp,
        (), (),
        UP_TP | {"down_proj.weight": ((TP, 0),), "down_proj.bias": ((TP, 0),)},
        lambda at: (1, at[TP][0], at[TP][0]),
    ),
    "fsdp_linear": (
        lambda full, g: lesson.FSDPLinear(full, g["dp"]), column,
        ((DP, 0),), ((DP, 0),), {"weight": ((DP, 0),), "bias": ((DP, 0),)},
        lambda at: (at[DP][0], 1, at[DP][0]),
    ),
    "fsdp": (
        lambda full, g: lesson.spread(full, "fsdp", g), mlp,
        ((DP, 0),), ((DP, 0),), FSDP,
        lambda at: (at[DP][0], at[DP][0], at[DP][0]),
    ),
    "up_2d": (
        lambda full, g: lesson.UpLinear2D(full, g), column,
        ((Y, 0), (X, 2)), ((Y, 0), (X, 2)),
        {"weight": ((X, 0), (Y, 1)), "bias": BIAS_2D},
        lambda at: (at[Y][0], at[Y][0] * at[X][0], at[Y][0] * at[X][0]),
    ),
    "down_2d": (
        lambda full, g: lesson.DownLinear2D(full, g), column,
        ((Y, 0), (X, 2)), ((Y, 0), (X, 2)),
        {"weight": ((Y, 0), (X, 1)), "bias": BIAS_2D},
        lambda at: (at[Y][0], at[Y][0] * at[X][0], at[Y][0] * at[X][0]),
    ),
    "2d": (
        lambda full, g: lesson.spread(full, "2d", g), mlp,
        ((Y, 0), (X, 2)), ((Y, 0), (X, 2)),
        {
            "up_proj.weight": ((X, 0), (Y, 1)), "up_proj.bias": BIAS_2D,
            "down_proj.weight": ((Y, 0), (X, 1)), "down_proj.bias": BIAS_2D,
        },
        lambda at: (at[Y][0], at[Y][0] * at[X][0], at[Y][0] * at[X][0]),
    ),
}  # fmt: skip


LINEARS = [way for way in WAYS if WAYS[way][1] is column]


def payload(way: str, B, S, D, F, at) -> dict:
    """(phase, collective, axis) → elements sent, of the ways that are whole layers."""
    x, y = at.get("x", (1,))[0], at.get("y", (1,))[0]
    f, b = "forward", "backward"
    gather, scatter, reduce = "all-gather", "reduce-scatter", "all-reduce"
    act_up, act_down = B * S * D // y, B * S * F // y
    return {
        "column": {(b, reduce, TP): B * S * D},
        "row": {(f, reduce, TP): B * S * F},  # F: what this layer puts out
        "tp": {(f, reduce, TP): B * S * D, (b, reduce, TP): B * S * D},
        "naive": {(f, gather, TP): B * S * (F + D), (b, reduce, TP): B * S * (F + D)},
        "fsdp_linear": {
            (f, gather, DP): D * F + F,
            (b, gather, DP): D * F,
            (b, scatter, DP): D * F + F,
        },
        "fsdp": {
            (f, gather, DP): 2 * D * F + F + D,
            (b, gather, DP): 2 * D * F,
            (b, scatter, DP): 2 * D * F + F + D,
        },
        "up_2d": {
            (f, gather, X): act_up,
            (f, gather, Y): (D * F + F) // x,
            (b, gather, X): act_up,
            (b, scatter, X): act_up,
            (b, gather, Y): D * F // x,
            (b, scatter, Y): (D * F + F) // x,
        },
        "down_2d": {
            (f, scatter, X): act_down,
            (f, gather, Y): (D * F + F) // x,
            (b, gather, X): act_down,
            (b, gather, Y): D * F // x,
            (b, scatter, Y): (D * F + F) // x,
        },
        "2d": {
            (f, gather, X): act_up,
            (f, scatter, X): act_up,
            (f, gather, Y): (2 * D * F + F + D) // x,
            (b, gather, X): 2 * act_up,
            (b, scatter, X): act_up,
            (b, gather, Y): 2 * D * F // x,
            (b, scatter, Y): (2 * D * F + F + D) // x,
        },
    }[way]


def draw(shape, generator, whole: bool, dtype):
    if whole:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def try_way(way, number, groups, whole=False, dtype=torch.float64) -> dict:
    """One random shape one way: largest differences, and the bytes sent."""
    make, plain, x_cut, y_cut, cuts, multiples = WAYS[way]
    at = axes(groups)
    rng = random.Random(f"{way} {number} {whole}")
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    B, D, width = (n * rng.randint(1, 4) for n in multiples(at))
    S = rng.randint(1, 5)
    if way == "row":  # its input is the width
        D, width = width, D
    is_mlp = plain is mlp
    full = lesson.MLP(D, width) if is_mlp else nn.Linear(D, width)
    full = full.to(dtype)
    with torch.no_grad():
        for p in full.parameters():
            p.copy_(draw(p.shape, generator, whole, dtype))
    out = D if is_mlp else width
    x = draw((B, S, D), generator, whole, dtype)
    upstream = draw((S, B, out), generator, whole, dtype).transpose(0, 1)
    if not whole and number % 2:
        x = draw((S, B, D), generator, whole, dtype).transpose(0, 1)

    p = {n: q.detach().clone().requires_grad_() for n, q in full.named_parameters()}
    leaf = x.clone().requires_grad_()
    y = plain(p, leaf)
    y.backward(upstream)

    before = {n: q.detach().clone() for n, q in full.named_parameters()}
    layer = make(full, groups)
    mine = cut(x, x_cut, at).requires_grad_()
    lesson.COMM.rows.clear()
    lesson.COMM.what, lesson.COMM.phase = way, "forward"
    got = layer(mine)
    lesson.COMM.phase = "backward"
    got.backward(cut(upstream, y_cut, at))
    sent = {key[1:]: row[1] for key, row in lesson.COMM.rows.items()}

    held = dict(layer.named_parameters())
    diffs = {"y": off(got, y, y_cut, at), "x": off(mine.grad, leaf.grad, x_cut, at)}
    for name in p:
        there = name in held
        diffs[f"held {name}"] = off(held[name], p[name], cuts[name], at) if there else 9
        grad = held[name].grad if there else None
        diffs[name] = off(grad, p[name].grad, cuts[name], at)
    wanted = payload(way, B, S, D, width, at)
    T = {axis: size for axis, (size, _) in at.items()}
    wanted = {k: n * dtype.itemsize for k, n in wanted.items() if T[k[2]] > 1}
    with torch.no_grad():  # the layer's parameters are its own
        for q in held.values():
            q += 1
    own = all(torch.equal(q, before[n]) for n, q in full.named_parameters())
    return dict(
        way=way, number=number, mesh=T, shape=[B, S, D, width], whole=whole,
        dtype=str(dtype), diffs=diffs, own=own, names=sorted(held) == sorted(p),
        sent=sorted([*k, n] for k, n in sent.items()),
        wanted=sorted([*k, n] for k, n in wanted.items()),
    )  # fmt: skip


def try_average(number: int, group) -> dict:
    """Losses that are means: over a rank's samples, and over all of them."""
    T, r = group.size(), group.rank()
    generator = torch.Generator().manual_seed(number)
    D, width, B = 4, 8, 4 * (1 + number % 3)
    full = lesson.MLP(D, width).double()
    with torch.no_grad():
        for q in full.parameters():
            q.copy_(torch.randn(q.shape, generator=generator))
    x = torch.randn(B, 2, D, generator=generator).double()
    alone = copy.deepcopy(full)
    alone(x).square().mean().backward()
    mine = x.tensor_split(T)[r]
    diffs = {}
    for way in ("dp", "fsdp"):
        layer = lesson.spread(full, way, {"dp": group})
        layer(mine).square().mean().backward()
        parameters = list(layer.parameters())
        if way == "dp":
            lesson.average_replicated(parameters, group)
        else:
            lesson.average_sharded(parameters, group)
        where = () if way == "dp" else (("dp", 0),)
        for (name, q), p in zip(alone.named_parameters(), parameters):
            diffs[f"{way} {name}"] = off(p.grad, q.grad, where, {"dp": (T, r)})
    return diffs


# Each autograd function: the same program for all ranks at once, in one process, where
# rank r's tensors are leaves[r]; its gradient is what rank r must get.


def try_function(name: str, number: int, group) -> dict:
    """{what: difference} of one autograd function's output and gradient."""
    T, r = group.size(), group.rank()
    rng = random.Random(f"{name} {number}")
    generator = torch.Generator().manual_seed(number)
    shape = [T * rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(-len(shape), len(shape))
    random_like = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    leaves = [random_like(*shape).requires_grad_() for _ in range(T)]
    x = leaves[r].detach().clone().requires_grad_()
    part = lambda t, i: t.tensor_split(T, dim)[i]
    if name == "CopyToTP":  # one x, and each rank has a use of its own for it
        leaves = [leaves[0]] * T
        x = leaves[0].detach().clone().requires_grad_()
        outs, got = leaves, lesson.CopyToTP.apply(x, group)
    elif name == "ReduceFromTP":
        outs, got = [sum(leaves)] * T, lesson.ReduceFromTP.apply(x, group)
    elif name in ("GatherFromTP", "AllGather"):
        outs = [torch.cat(leaves, dim)] * T
        got = getattr(lesson, name).apply(x, dim, group)
    else:
        outs = [part(sum(leaves), i) for i in range(T)]
        got = lesson.ReduceScatter.apply(x, dim, group)
    weights = [random_like(*outs[0].shape) for _ in range(T)]
    if name in ("ReduceFromTP", "GatherFromTP"):  # one loss, the same on all ranks
        whole = (outs[0].tanh() * weights[0]).sum()
        mine = (got.tanh() * weights[0]).sum()
    else:  # each rank has a term of the loss
        whole = sum((out.tanh() * w).sum() for out, w in zip(outs, weights))
        mine = (got.tanh() * weights[r]).sum()
    untouched = x.detach().clone()
    whole.backward()
    mine.backward()
    return {
        "y": off(got, outs[r], (), {}),
        "x": off(x.grad, leaves[r].grad, (), {}),
        "input": 0.0 if torch.equal(x.detach(), untouched) else math.inf,
    }


def refusals(groups: list) -> list:
    """What layers say to a width that does not divide: (layer, F, T, message)."""
    found = []
    for group in groups:
        T = group.size()
        linears = {
            "ColumnParallelLinear": nn.Linear(8, T + 1),
            "RowParallelLinear": nn.Linear(T + 1, 8),
            "FSDPLinear": nn.Linear(8, T + 1),
        }
        for name, full in linears.items():
            try:
                getattr(lesson, name)(full, group)
                message = "none raised"
            except ValueError as error:
                message = str(error)
            found.append([name, T + 1, T, message])
    return found


def main() -> dict:
    start()
    meshes = [lesson.mesh_groups({"y": Y, "x": X}, 30) for Y, X in MESHES]
    flat = []  # groups of 1, 2 that are not neighbours, 4, and 2 neighbours
    for sizes in ((1, 4, 0), (2, 2, 0), (4, 1, 0), (2, 2, 1)):
        flat.append({})
        for axis in ("tp", "dp"):
            names = ("other", axis) if sizes[2] else (axis, "other")
            flat[-1][axis] = lesson.mesh_groups(dict(zip(names, sizes)), 30)[axis]
    cases, averages, functions = [], [], []
    for way, shapes in SHAPES.items():
        for number in range(shapes):
            on_mesh = way.endswith("2d")
            groups = meshes[number % 3] if on_mesh else flat[number % 4]
            cases.append(try_way(way, number, groups))
    for number in range(12):
        for way in LINEARS:
            on_mesh = way.endswith("2d")
            groups = meshes[number % 3] if on_mesh else flat[number % 4]
            dtype = (torch.float32, torch.float64, torch.bfloat16)[number // 4 % 3]
            cases.append(try_way(way, number, groups, whole=True, dtype=dtype))
    for number in range(12):
        group = flat[number % 4]["tp"]
        averages.append([group.size(), try_average(number, group)])
    kinds = "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter"
    for name in kinds:
        for number in range(20):
            group = flat[number % 4]["tp"]
            functions.append([name, group.size(), try_function(name, number, group)])
    refused = refusals([flat[2]["tp"], flat[3]["tp"]])
    return dict(cases=cases, averages=averages, functions=functions, refusals=refused)


if __name__ == "__main__":
    found = main()
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    finish()
