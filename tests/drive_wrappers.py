"""Four ranks call every wrapper of lesson 00 on random tensors, against plain torch.

    torchrun --nproc_per_node=4 drive_wrappers.py FOLDER

Each rank draws what all ranks of its group hold, so it can tell what must come out, and
writes what it found to FOLDER/rank<r>.json.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from in_ranks import finish, load, mesh_table, start

lesson = load("00_collectives")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
VIEWS = ("plain", "transposed", "strided", "offset", "expanded")
CASES = 40  # of each wrapper


def draw(shape, dtype, view, seed) -> tuple:
    """A tensor of whole numbers, and the memory it is a view of."""
    generator = torch.Generator().manual_seed(seed)

    def whole(shape):
        x = torch.randint(-9, 10, shape, generator=generator)
        if dtype == torch.int64:  # more digits than a float has
            x = x * 2**54 + torch.randint(-99, 100, shape, generator=generator)
        return x.to(dtype)

    shape = list(shape)
    if view == "transposed" and shape:
        base = whole(shape[::-1])
        return base, base.permute(*reversed(range(len(shape))))
    if view == "strided" and shape:
        base = whole([*shape[:-1], 2 * shape[-1]])
        return base, base[..., ::2]
    if view == "offset" and shape:
        base = whole([shape[0] + 1, *shape[1:]])
        return base, base[1:]
    if view == "expanded" and shape:
        base = whole([1, *shape[1:]])
        return base, base.expand(shape)
    base = whole(shape)
    return base, base


def piece(x, dim, T, r):
    return x.tensor_split(T, dim)[r]


def add(xs):
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


def turned(xs, dim, T, r):
    return torch.cat([piece(x, dim, T, r) for x in xs], dim)


# wrapper → (name in the counter, its dim must divide by T, call, what must come out on
# rank r of T, payload as a multiple of the input). peer is a random rank of the group.
MAX = dist.ReduceOp.MAX
WRAPPERS = {
    "all_reduce": (
        "all-reduce", False, lambda x, d, p, g: lesson.all_reduce(x, g),
        lambda xs, d, p, T, r: add(xs), lambda T: 1,
    ),
    "all_reduce_max": (
        "all-reduce", False, lambda x, d, p, g: lesson.all_reduce(x, g, MAX),
        lambda xs, d, p, T, r: torch.stack(xs).amax(0), lambda T: 1,
    ),
    "all_gather": (
        "all-gather", False, lambda x, d, p, g: lesson.all_gather(x, d, g),
        lambda xs, d, p, T, r: torch.cat(xs, d), lambda T: T,
    ),
    "reduce_scatter": (
        "reduce-scatter", True, lambda x, d, p, g: lesson.reduce_scatter(x, d, g),
        lambda xs, d, p, T, r: piece(add(xs), d, T, r), lambda T: 1,
    ),
    "broadcast": (
        "broadcast", False, lambda x, d, p, g: lesson.broadcast(x, p, g),
        lambda xs, d, p, T, r: xs[p], lambda T: 1,
    ),
    "all_to_all": (
        "all-to-all", True, lambda x, d, p, g: lesson.all_to_all(x, g, d),
        lambda xs, d, p, T, r: turned(xs, d, T, r), lambda T: 1,
    ),
    "scatter": (
        "scatter", True, lambda x, d, p, g: lesson.scatter(x, p, g),
        lambda xs, d, p, T, r: piece(xs[p], 0, T, r), lambda T: 1,
    ),
    "gather": (
        "gather", False, lambda x, d, p, g: lesson.gather(x, p, g),
        lambda xs, d, p, T, r: torch.cat(xs) if r == p else None, lambda T: T,
    ),
    "reduce": (
        "reduce", False, lambda x, d, p, g: lesson.reduce(x, p, g),
        lambda xs, d, p, T, r: add(xs) if r == p else None, lambda T: 1,
    ),
    "shard": (
        None, True, lambda x, d, p, g: lesson.shard(x, d, g),
        lambda xs, d, p, T, r: piece(xs[r], d, T, r), lambda T: 0,
    ),
}  # fmt: skip


def same(got, wanted) -> bool:
    """To the last bit, shape and dtype included."""
    if got is None or wanted is None:
        return got is wanted
    alike = got.dtype == wanted.dtype and got.shape == wanted.shape
    return alike and torch.equal(got, wanted)


def counted(clear=True) -> dict:
    """What the counter has: (what, phase, collective, axis) → [calls, bytes]."""
    rows = {key: list(row) for key, row in lesson.COMM.rows.items()}
    if clear:
        lesson.COMM.rows.clear()
    return rows


def watch(x, base, call) -> tuple:
    """The result of a call, and what is wrong with how it treated its input."""
    before, strides = base.clone(), x.stride()
    lesson.COMM.rows.clear()
    got = call()
    problems = []
    if not torch.equal(base, before) or x.stride() != strides:
        problems.append("input")
    if got is not None:
        there = got.untyped_storage().data_ptr()
        if got.numel() and there == base.untyped_storage().data_ptr():
            problems.append("new")
        if got.requires_grad:
            problems.append("history")
    return got, problems


def try_wrapper(wrapper: str, number: int, groups: dict) -> dict:
    """One random case of one wrapper."""
    collective, divides, call, after, factor = WRAPPERS[wrapper]
    rng = random.Random(f"{wrapper} {number}")
    axis = sorted(groups)[number % len(groups)]
    group = groups[axis]
    T, r = group.size(), group.rank()
    dtype = DTYPES[number // len(groups) % len(DTYPES)]
    view = VIEWS[number % len(VIEWS)]
    cuts_0 = wrapper in ("scatter", "gather")  # these know dim 0 only
    no_dim = wrapper in ("all_reduce", "all_reduce_max", "broadcast", "reduce")
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0 if no_dim else 1, 4))]
    dim = 0 if cuts_0 or not shape else rng.randrange(-len(shape), len(shape))
    if divides:
        shape[dim] = T * rng.randint(1, 3)
    peer = (number // 4 + number // 16) % T
    ranks = [draw(shape, dtype, view, seed=number * 4 + i) for i in range(T)]
    if wrapper == "shard":  # of a tensor that every rank holds
        ranks = [ranks[0]] * T
    base, x = ranks[r]
    x = x.requires_grad_() if dtype.is_floating_point and number % 3 == 0 else x
    lesson.COMM.what, lesson.COMM.phase = wrapper, f"case {number}"
    got, problems = watch(x, base, lambda: call(x, dim, peer, group))
    wanted = after([x.detach() for _, x in ranks], dim, peer, T, r)
    if not same(got, wanted):
        problems.append("value")
    nbytes = factor(T) * x.numel() * dtype.itemsize
    row = {(wrapper, f"case {number}", collective, axis): [1, nbytes]}
    if counted() != (row if T > 1 and collective else {}):
        problems.append("counted")
    about = dict(T=T, dtype=str(dtype), view=view, shape=shape, dim=dim, peer=peer)
    return dict(about, wrapper=wrapper, number=number, axis=axis, problems=problems)


def try_send(number: int, groups: dict) -> dict:
    """send_recv around a ring by a random distance; each rank's tensor has its size."""
    rng = random.Random(f"send {number}")
    axis = [name for name in sorted(groups) if groups[name].size() > 1][number % 3]
    group = groups[axis]
    T, r = group.size(), group.rank()
    dtype, view = DTYPES[number % 4], VIEWS[number % 5]
    far, width = rng.randrange(1, T), rng.randint(1, 4)
    ranks = [draw([i + 1, width], dtype, view, seed=number * 4 + i) for i in range(T)]
    (base, x), like = ranks[r], ranks[(r - far) % T][1]
    lesson.COMM.what, lesson.COMM.phase = "send", ""
    to, source = (r + far) % T, (r - far) % T
    blank = torch.zeros_like(like, memory_format=torch.contiguous_format)
    got, problems = watch(
        x, base, lambda: lesson.send_recv(x, to, blank, source, group)
    )
    if not same(got, like) or blank.any():
        problems.append("value")
    if counted() != {("send", "", "send/recv", axis): [1, x.numel() * dtype.itemsize]}:
        problems.append("counted")
    about = dict(T=T, dtype=str(dtype), view=view, shape=list(x.shape))
    return dict(about, wrapper="send_recv", number=number, problems=problems)


def send_like_a_view(group) -> str:
    """What arrives is shaped like a view; its strides are not to be copied. The last
    thing tried, as a rank that raised here leaves a message on its way."""
    x, T = torch.arange(6.0).view(2, 3), group.size()
    to, source = (group.rank() + 1) % T, (group.rank() - 1) % T
    try:
        got = lesson.send_recv(x + group.rank(), to, torch.ones(3, 2).T, source, group)
    except RuntimeError as error:
        return f"raised {error}"
    return "equal" if same(got, x + source) else f"got {got}"


def try_ring(number: int, groups: dict) -> dict:
    """The ring all-reduce, on sizes from less than T to many times T."""
    rng = random.Random(f"ring {number}")
    axis = sorted(groups)[number % len(groups)]
    group = groups[axis]
    T, r = group.size(), group.rank()
    dtype, view = DTYPES[number // len(groups) % 4], VIEWS[number % 5]
    shapes = [[1], [3], [T], [2 * T], [2 * T + 1], [T, rng.randint(1, 4)], [5, 3], [7]]
    shape = shapes[number % len(shapes)]
    ranks = [draw(shape, dtype, view, seed=number * 4 + i) for i in range(T)]
    base, x = ranks[r]
    steps = []
    lesson.COMM.what, lesson.COMM.phase = "ring", ""

    def note(name, chunks):
        steps.append([name, [chunk.clone() for chunk in chunks]])

    call = lambda: lesson.ring_all_reduce(x, group, note)
    got, problems = watch(x, base, call)
    wanted = add([x for _, x in ranks])
    if not same(got, wanted):
        problems.append("value")
    if len(steps) != 2 * (T - 1):
        problems.append("steps")
    elif T > 1:  # half-way, chunk r + 1 is complete on rank r
        done = (r + 1) % T
        chunk = wanted.flatten().tensor_split(T)[done]
        if not same(steps[T - 2][1][done], chunk):
            problems.append("half-way")
    sends = counted()
    calls, sent = sends.pop(("ring", "", "send/recv", axis), [0, 0])
    if sends or calls != 2 * (T - 1):
        problems.append("counted")
    V = x.numel() * dtype.itemsize
    about = dict(T=T, dtype=str(dtype), view=view, shape=shape, axis=axis)
    about |= dict(V=V, sent=sent, divides=x.numel() % T == 0)
    return dict(about, wrapper="ring_all_reduce", number=number, problems=problems)


def cut(x, dim, group):
    if dim is None:
        return x.clone()
    return piece(x, dim, group.size(), group.rank()).contiguous()


# The products: A's and B's sharded dim, C's, and the collective and its payload.
MATMULS = {
    "matmul_case_1": (0, None, 0, None, lambda I, J, K: 0),
    "matmul_case_2_gather": (1, None, None, "all-gather", lambda I, J, K: I * J),
    "matmul_case_2_slice": (1, None, None, "all-reduce", lambda I, J, K: I * K),
    "matmul_case_3_all_reduce": (1, 0, None, "all-reduce", lambda I, J, K: I * K),
    "matmul_case_3_reduce_scatter": (1, 0, 1, "reduce-scatter", lambda I, J, K: I * K),
    "matmul_case_4_left": (0, 1, 1, "all-gather", lambda I, J, K: I * J),
    "matmul_case_4_right": (0, 1, 0, "all-gather", lambda I, J, K: J * K),
}


def random_product(rng, unit, number):
    """Whole numbers A[I, J] and B[J, K], each dim a multiple of `unit`."""
    dtype = DTYPES[number % 3]
    I, J, K = (unit * rng.randint(1, 4) for _ in range(3))
    generator = torch.Generator().manual_seed(number)
    whole = lambda *s: torch.randint(-2, 3, s, generator=generator).to(dtype)
    return whole(I, J), whole(J, K), (I, J, K)


def try_matmul(name: str, number: int, groups: dict) -> dict:
    rng = random.Random(f"{name} {number}")
    axis = sorted(groups)[number % len(groups)]
    group = groups[axis]
    T = group.size()
    a_dim, b_dim, c_dim, collective, payload = MATMULS[name]
    a, b, sizes = random_product(rng, T, number)
    lesson.COMM.rows.clear()
    lesson.COMM.what = lesson.COMM.phase = ""
    args = [cut(a, a_dim, group), cut(b, b_dim, group)]
    args += [] if collective is None else [group]
    got = getattr(lesson, name)(*args)
    problems = [] if same(got, cut(a @ b, c_dim, group)) else ["value"]
    nbytes = payload(*sizes) * a.dtype.itemsize
    row = {("", "", collective, axis): [1, nbytes]}
    if counted() != (row if collective and T > 1 else {}):
        problems.append("counted")
    about = dict(T=T, dtype=str(a.dtype), view="plain", shape=list(sizes))
    return dict(about, wrapper=name, number=number, problems=problems)


def try_matmul_2d(number: int, mesh: dict, groups: dict) -> dict:
    y, x = groups["y"], groups["x"]
    Y, X = y.size(), x.size()
    rng = random.Random(f"2d {number}")
    a, b, (I, J, K) = random_product(rng, Y * X, number)
    lesson.COMM.rows.clear()
    lesson.COMM.what = lesson.COMM.phase = ""
    both = lambda t: cut(cut(t, 0, y), 1, x)
    got = lesson.matmul_2d(both(a), both(b), y, x)
    problems = [] if same(got, both(a @ b)) else ["value"]
    size = a.dtype.itemsize
    rows = {}
    if X > 1:
        rows["", "", "all-gather", "x"] = [1, I * J // Y * size]
    if Y > 1:
        rows["", "", "all-gather", "y"] = [1, J * K // X * size]
    if counted() != rows:
        problems.append("counted")
    about = dict(T=4, dtype=str(a.dtype), view="plain", shape=[I, J, K], mesh=mesh)
    return dict(about, wrapper="matmul_2d", number=number, problems=problems)


def vectors(group) -> dict:
    """Megatron's rank tests, on 4 ranks."""
    r = group.rank()
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    first, second = lesson.sum_both(torch.tensor([1.0]), torch.tensor([10.0]), group)
    return {
        "all_reduce": lesson.all_reduce(torch.ones(5) * r, group).tolist(),
        "reduce_scatter": lesson.reduce_scatter(rows, 0, group).tolist(),
        "sum_both": [first.item(), second.item()],
    }


def refusals(groups: dict) -> list:
    """ValueErrors for dims that do not divide: (wrapper, shape, dim, T, message)."""
    found = []
    calls = {
        "shard": lambda x, d, g: lesson.shard(x, d, g),
        "reduce_scatter": lambda x, d, g: lesson.reduce_scatter(x, d, g),
        "all_to_all": lambda x, d, g: lesson.all_to_all(x, g, d),
        "scatter": lambda x, d, g: lesson.scatter(x, 0, g),
    }
    for (name, call), group in product(calls.items(), groups.values()):
        T = group.size()
        for shape, dim in (([4, 7], 1), ([9, 4], 0), ([1], 0)):
            if T == 1 or (name == "scatter" and dim != 0):
                continue
            lesson.COMM.rows.clear()
            try:
                call(torch.zeros(shape), dim, group)
                message = "none raised"
            except ValueError as error:
                message = str(error)
            found.append([name, shape, dim, T, message, len(lesson.COMM.rows)])
    return found


def main() -> dict:
    start()
    groups, tables = {}, {}
    meshes = [{"t4": 4, "t1": 1}, {"far2": 2, "near2": 2}]
    for sizes in meshes:
        made = lesson.mesh_groups(sizes, 30)
        groups |= made
        tables |= mesh_table(made)
    cases = []
    for wrapper in WRAPPERS:
        for number in range(CASES):
            cases.append(try_wrapper(wrapper, number, groups))
    for number in range(CASES):
        cases += [try_send(number, groups), try_ring(number, groups)]
    for name in MATMULS:
        cases += [try_matmul(name, number, groups) for number in range(12)]
    for Y, X in ((2, 2), (4, 1), (1, 4)):
        mesh = {"y": Y, "x": X}
        made = lesson.mesh_groups(mesh, 30)
        tables |= {f"{axis} {Y}x{X}": t for axis, t in mesh_table(made).items()}
        cases += [try_matmul_2d(number, mesh, made) for number in range(8)]
    return dict(
        cases=cases,
        groups=tables,
        vectors=vectors(groups["t4"]),
        refusals=refusals(groups),
        like_a_view=send_like_a_view(groups["t4"]),
    )


if __name__ == "__main__":
    found = main()
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    finish()
