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
from in_ranks import difference, finish, groups_of_4, load, start, write_found
from torch import nn

lesson = load("01_naive_mlp_tp")
SHAPES = {"column": 104, "row": 104, "tp": 104, "naive": 104, "up": 48, "down": 48}
SHAPES["2d"] = 100  # with one rank on the inner axis it is FSDP
LINEARS = "column", "row", "up", "down"
MESHES = ((2, 2), (4, 1), (1, 4), (2, 1))  # outer × inner; the last twice, side by side


def parallel(way: str, full: nn.Module, groups: dict) -> tuple:
    """A full layer spread one way; how its input and its output are cut."""
    tp, outer, inner = (groups.get(axis) for axis in ("tp", "outer", "inner"))
    columns, mesh = (2, tp), ((0, outer), (2, inner))
    if way == "column":
        return lesson.ColumnParallelLinear(full, tp), (), (columns,)
    if way == "row":
        return lesson.RowParallelLinear(full, tp), (columns,), ()
    if way == "tp":
        return lesson.tp_mlp(full, tp), (), ()
    if way == "naive":
        return lesson.naive_mlp(full, tp), (), ()
    make = {"up": lesson.UpLinear2D, "down": lesson.DownLinear2D, "2d": lesson.mlp_2d}
    return make[way](full, outer, inner), mesh, mesh


def piece(x, cuts):
    """This rank's piece of x: cuts are ((dim, group), …), made in that order."""
    for dim, group in cuts:
        assert x.shape[dim] % group.size() == 0, (tuple(x.shape), dim, group.size())
        x = x.tensor_split(group.size(), dim)[group.rank()]
    return x.detach().clone()


def off(got, whole, cuts) -> float:
    """max|piece − wanted piece| / max|whole|; inf for another dtype, too."""
    wanted = piece(whole, cuts)
    if got is None or got.dtype != wanted.dtype:
        return math.inf
    scale = (wanted.double().abs().max() / whole.double().abs().max()).item()
    diff = difference(got, wanted)
    return diff if diff in (0.0, math.inf) else diff * scale


def plain(full: nn.Module, x):
    """The full module in torch's own words; its output."""
    p = dict(full.named_parameters())
    if isinstance(full, nn.Linear):
        return F.linear(x, p["weight"], p["bias"])
    h = F.gelu(F.linear(x, p["up_proj.weight"], p["up_proj.bias"]))
    return F.linear(h, p["down_proj.weight"], p["down_proj.bias"])


def payload(way: str, full: nn.Module, x, y, groups) -> dict:
    """(phase, collective, axis) → bytes sent by one layer, from its whole tensors.

    Of whole MLPs the lesson's own ledger says it.
    """
    f, b = "forward", "backward"
    gather, scatter, reduce = "all-gather", "reduce-scatter", "all-reduce"
    if way == "column":
        return {(b, reduce, "tp"): x.nbytes}
    if way == "row":
        return {(f, reduce, "tp"): y.nbytes}
    ranks_of = {axis: group.size() for axis, group in groups.items()}
    weight = full.weight.nbytes // ranks_of["inner"]
    both = weight + full.bias.nbytes // ranks_of["inner"]
    sent = {(f, gather, "outer"): both}
    sent |= {(b, gather, "outer"): weight, (b, scatter, "outer"): both}
    if way == "up":
        rows = x.nbytes // ranks_of["outer"]
        sent |= {(f, gather, "inner"): rows}
        sent |= {(b, gather, "inner"): rows, (b, scatter, "inner"): rows}
    else:
        rows = y.nbytes // ranks_of["outer"]
        sent |= {(f, scatter, "inner"): rows, (b, gather, "inner"): rows}
    return sent


def draw(shape, generator, whole: bool, dtype):
    if whole:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def draw_layer(way: str, rng, ranks: int, dtype, drawn) -> nn.Module:
    """A full layer of random sizes that the ranks divide where they must."""
    inputs = rng.randint(1, 4) * (1 if way in ("column", "tp") else ranks)
    width = rng.randint(1, 4) * (1 if way == "row" else ranks)
    full = (nn.Linear if way in LINEARS else lesson.MLP)(inputs, width).to(dtype)
    with torch.no_grad():
        for p in full.parameters():
            p.copy_(drawn(p.shape))
    return full


def try_way(way, number, groups, whole=False, dtype=torch.float64) -> dict:
    """One random shape one way: largest differences, and the bytes sent."""
    rng = random.Random(f"{way} {number} {whole}")
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    drawn = lambda shape: draw(shape, generator, whole, dtype)
    ranks = math.prod(group.size() for group in groups.values())
    full = draw_layer(way, rng, ranks, dtype, drawn)
    first, *_, last = full.parameters()
    outer = groups["outer"].size() if "outer" in groups else 1
    B, S, D = outer * rng.randint(1, 4), rng.randint(1, 5), first.shape[1]
    x = drawn((B, S, D)) if number % 2 else drawn((S, B, D)).transpose(0, 1)
    upstream = drawn((S, B, len(last))).transpose(0, 1)
    leaf = x.clone().requires_grad_()
    y = plain(full, leaf)
    y.backward(upstream)

    layer, x_cuts, y_cuts = parallel(way, full, groups)
    mine = piece(x, x_cuts).requires_grad_()
    lesson.COMM.rows.clear()
    lesson.COMM.what, lesson.COMM.phase = way, "forward"
    got = layer(mine)
    lesson.COMM.phase = "backward"
    got.backward(piece(upstream, y_cuts))
    sent = {key[1:]: row[1] for key, row in lesson.COMM.rows.items()}

    held = dict(layer.named_parameters())
    diffs = {"y": off(got, y, y_cuts), "x": off(mine.grad, leaf.grad, x_cuts)}
    for name, p in full.named_parameters():
        cuts = held[name].cuts
        diffs[f"held {name}"] = off(held[name], p, cuts)
        diffs[name] = off(held[name].grad, p.grad, cuts)
    before = [p.detach().clone() for p in full.parameters()]
    with torch.no_grad():  # the layer's parameters are its own
        for p in held.values():
            p += 1
    own = all(torch.equal(p, q) for p, q in zip(full.parameters(), before))
    sizes = {axis: group.size() for axis, group in groups.items()}
    wanted = payload(way, full, x, y, groups) if way in LINEARS else {}
    return dict(
        way=way, mesh=sizes, shape=[B, S, D, len(last)], whole=whole, dtype=str(dtype),
        diffs=diffs, own=own, names=[*held] == [*dict(full.named_parameters())],
        sent=sorted([*key, n] for key, n in sent.items()),
        wanted=sorted([*key, n] for key, n in wanted.items() if sizes[key[2]] > 1),
    )  # fmt: skip


def try_average(number: int, group, alone) -> dict:
    """Losses that are means: over a rank's samples, and over all of them."""
    T, r = group.size(), group.rank()
    generator = torch.Generator().manual_seed(number)
    full = lesson.MLP(4, 8).double()
    with torch.no_grad():
        for q in full.parameters():
            q.copy_(draw(q.shape, generator, False, torch.float64))
    x = draw((4 * (1 + number % 3), 2, 4), generator, False, torch.float64)
    reference = copy.deepcopy(full)
    reference(x).square().mean().backward()
    diffs = {}
    ways = {"dp": copy.deepcopy(full), "fsdp": lesson.mlp_2d(full, group, alone)}
    for way, mlp in ways.items():
        mlp(x.tensor_split(T)[r]).square().mean().backward()
        lesson.average_gradients(mlp.parameters(), group)
        for name, p in mlp.named_parameters():
            whole = reference.get_parameter(name).grad
            diffs[f"{way} {name}"] = off(p.grad, whole, getattr(p, "cuts", ()))
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
        "y": off(got, outs[r], ()),
        "x": off(x.grad, leaves[r].grad, ()),
        "input": 0.0 if torch.equal(x.detach(), untouched) else math.inf,
    }


def two_numbers(group) -> list:
    """y = Σ over ranks of w_t·x with w_t = t + 1 and x = 5: y, dL/dx, dL/dw_t."""
    x = torch.tensor(5.0, requires_grad=True)
    w = torch.tensor(group.rank() + 1.0, requires_grad=True)
    y = lesson.ReduceFromTP.apply(lesson.CopyToTP.apply(x, group) * w, group)
    y.backward()
    return [y.item(), x.grad.item(), w.grad.item()]


def refusals(group) -> list:
    """What layers say to a width that the ranks do not divide."""
    T, found = group.size(), []
    column, row, up = (
        lesson.ColumnParallelLinear, lesson.RowParallelLinear, lesson.UpLinear2D
    )  # fmt: skip
    for layer, full, groups in (
        (column, nn.Linear(8, T + 1), [group]),
        (row, nn.Linear(T + 1, 8), [group]),
        (up, nn.Linear(8, T + 1), [group, group]),
    ):
        try:
            layer(full, *groups)
            found.append([T, "none raised"])
        except ValueError as error:
            found.append([T, str(error)])
    return found


def main() -> dict:
    start()
    meshes = [lesson.mesh_groups({"outer": Y, "inner": X}, 30) for Y, X in MESHES[:3]]
    three_axes = lesson.mesh_groups({"other": 2, "outer": 2, "inner": 1}, 30)
    meshes.append({axis: three_axes[axis] for axis in ("outer", "inner")})
    flat = [{"tp": group} for group in groups_of_4(lesson)]
    cases, functions = [], []
    for way, shapes in SHAPES.items():
        places = meshes if way in ("up", "down", "2d") else flat
        for number in range(shapes):
            cases.append(try_way(way, number, places[number % 4]))
        for number in range(12 if way in LINEARS else 0):
            dtype = (torch.float32, torch.float64, torch.bfloat16)[number // 4]
            cases.append(try_way(way, number, places[number % 4], True, dtype))
    groups = [one["tp"] for one in flat]
    averages = [
        [groups[n % 4].size(), try_average(n, groups[n % 4], groups[0])]
        for n in range(12)
    ]
    kinds = "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter"
    for name in kinds:
        for number in range(20):
            group = groups[number % 4]
            functions.append([name, group.size(), try_function(name, number, group)])
    return dict(
        cases=cases, averages=averages, functions=functions,
        two_numbers=[[group.size(), *two_numbers(group)] for group in groups],
        refusals=[*refusals(groups[2]), *refusals(groups[3])],
    )  # fmt: skip


if __name__ == "__main__":
    write_found(main())
    finish()
