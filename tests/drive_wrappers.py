"""Four ranks call every wrapper of lesson 00 on random tensors, against plain torch.

    torchrun --nproc_per_node=4 drive_wrappers.py FOLDER

Each rank draws what all ranks of its group hold, so it can tell what must come out, and
writes what it found to FOLDER/rank<r>.json.
"""

import random
from itertools import product

import torch
import torch.distributed as dist
from in_ranks import finish, load, mesh_table, start, write_found

lesson = load("00_collectives")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
VIEWS = ("plain", "transposed", "strided", "offset", "expanded")
CASES = 40  # of each wrapper
MESHES = [{"t4": 4, "t1": 1}, {"far2": 2, "near2": 2}]
RING_SHAPES = [[1], [3], [4], [8], [9], [4, 3], [5, 3], [7]]  # less and more than T


def draw(shape, dtype, view, seed) -> tuple:
    """A tensor of whole numbers, and the memory it is a view of."""
    generator = torch.Generator().manual_seed(seed)

    def whole(shape):
        x = torch.randint(-9, 10, shape, generator=generator)
        if dtype == torch.int64:  # more digits than a float has
            x = x * 2**54 + torch.randint(-99, 100, shape, generator=generator)
        return x.to(dtype)

    first, last = shape[:1], shape[-1:]
    if not shape or view == "plain":
        base = whole(shape)
        return base, base
    if view == "transposed":
        base = whole(shape[::-1])
        return base, base.permute(*reversed(range(len(shape))))
    if view == "strided":
        base = whole([*shape[:-1], 2 * last[0]])
        return base, base[..., ::2]
    if view == "offset":
        base = whole([first[0] + 1, *shape[1:]])
        return base, base[1:]
    base = whole([1, *shape[1:]])
    return base, base.expand(shape)


def piece(x, dim, T, r):
    return x.tensor_split(T, dim)[r]


def add(xs):
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


# wrapper → (the call, what must come out on rank r of T, where xs are all ranks' x).
# peer is a random rank of the group.
WRAPPERS = {
    "all_reduce": (
        lambda x, dim, peer, g: lesson.all_reduce(x, g),
        lambda xs, dim, peer, T, r: add(xs),
    ),
    "all_reduce_max": (
        lambda x, dim, peer, g: lesson.all_reduce(x, g, dist.ReduceOp.MAX),
        lambda xs, dim, peer, T, r: torch.stack(xs).amax(0),
    ),
    "all_gather": (
        lambda x, dim, peer, g: lesson.all_gather(x, dim, g),
        lambda xs, dim, peer, T, r: torch.cat(xs, dim),
    ),
    "reduce_scatter": (
        lambda x, dim, peer, g: lesson.reduce_scatter(x, dim, g),
        lambda xs, dim, peer, T, r: piece(add(xs), dim, T, r),
    ),
    "broadcast": (
        lambda x, dim, peer, g: lesson.broadcast(x, peer, g),
        lambda xs, dim, peer, T, r: xs[peer],
    ),
    "all_to_all": (
        lambda x, dim, peer, g: lesson.all_to_all(x, g, dim),
        lambda xs, dim, peer, T, r: torch.cat([piece(x, dim, T, r) for x in xs], dim),
    ),
    "scatter": (
        lambda x, dim, peer, g: lesson.scatter(x, peer, g),
        lambda xs, dim, peer, T, r: piece(xs[peer], 0, T, r),
    ),
    "gather": (
        lambda x, dim, peer, g: lesson.gather(x, peer, g),
        lambda xs, dim, peer, T, r: torch.cat(xs) if r == peer else None,
    ),
    "reduce": (
        lambda x, dim, peer, g: lesson.reduce(x, peer, g),
        lambda xs, dim, peer, T, r: add(xs) if r == peer else None,
    ),
    "shard": (  # of a tensor that every rank holds
        lambda x, dim, peer, g: lesson.shard(x, dim, g),
        lambda xs, dim, peer, T, r: piece(xs[r], dim, T, r),
    ),
}
DIVIDES = ("reduce_scatter", "all_to_all", "scatter", "shard")
ON_DIM_0 = ("scatter", "gather")
WITH_DIM = ("all_gather", *DIVIDES, *ON_DIM_0)


def same(got, wanted) -> bool:
    """To the last bit, shape and dtype included."""
    if got is None or wanted is None:
        return got is wanted
    alike = got.dtype == wanted.dtype and got.shape == wanted.shape
    return alike and torch.equal(got, wanted)


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


class Case:
    """Which group, dtype, view and random numbers a case has; what it found."""

    def __init__(self, wrapper: str, number: int, groups: dict):
        self.wrapper, self.number = wrapper, number
        self.rng = random.Random(f"{wrapper} {number}")
        self.axis = sorted(groups)[number % len(groups)]
        self.group = groups[self.axis]
        self.T, self.r = self.group.size(), self.group.rank()
        self.dtype = DTYPES[number // len(groups) % len(DTYPES)]
        self.view = VIEWS[number % len(VIEWS)]
        self.dim = self.peer = 0
        lesson.COMM.what, lesson.COMM.phase = wrapper, f"case {number}"

    def draw(self, shapes) -> list[tuple]:
        """(memory, view of it) of each rank of the group."""
        seeds = range(self.number * 4, self.number * 4 + self.T)
        return [draw(s, self.dtype, self.view, i) for s, i in zip(shapes, seeds)]

    def counted(self, collective: str, calls: int, nbytes: int) -> bool:
        """Is this what the counter has, and nothing else?"""
        key = (self.wrapper, f"case {self.number}", collective, self.axis)
        wanted = {key: [calls, nbytes]} if calls else {}
        return lesson.COMM.rows == wanted

    def found(self, shape, problems) -> dict:
        names = "wrapper number axis T view dim peer".split()
        about = {name: getattr(self, name) for name in names}
        return about | dict(dtype=str(self.dtype), shape=shape, problems=problems)


def try_wrapper(wrapper: str, number: int, groups: dict) -> dict:
    """One random case of one wrapper."""
    case = Case(wrapper, number, groups)
    rng, T, r = case.rng, case.T, case.r
    call, after = WRAPPERS[wrapper]
    least = 1 if wrapper in WITH_DIM else 0
    shape = [rng.randint(1, 5) for _ in range(rng.randint(least, 4))]
    if wrapper in WITH_DIM and wrapper not in ON_DIM_0:
        case.dim = rng.randrange(-len(shape), len(shape))
    if wrapper in DIVIDES:
        shape[case.dim] = T * rng.randint(1, 3)
    case.peer = (number // 4 + number // 16) % T
    ranks = case.draw([shape] * T)
    if wrapper == "shard":
        ranks = [ranks[0]] * T
    base, x = ranks[r]
    x = x.requires_grad_() if case.dtype.is_floating_point and number % 3 == 0 else x
    got, problems = watch(x, base, lambda: call(x, case.dim, case.peer, case.group))
    if not same(got, after([x.detach() for _, x in ranks], case.dim, case.peer, T, r)):
        problems.append("value")
    collective = wrapper.removesuffix("_max").replace("_", "-")
    copies = T if wrapper in ("all_gather", "gather") else 1
    calls = 1 if T > 1 and wrapper != "shard" else 0
    if not case.counted(collective, calls, copies * x.nbytes):
        problems.append("counted")
    return case.found(shape, problems)


def try_send(number: int, groups: dict) -> dict:
    """send_recv around a ring by a random distance; each rank's tensor has its size,
    and what arrives is shaped like a view, whose strides are not to be copied."""
    case = Case("send_recv", number, {k: g for k, g in groups.items() if g.size() > 1})
    T, r = case.T, case.r
    case.peer, width = case.rng.randrange(1, T), case.rng.randint(1, 4)
    ranks = case.draw([[rank + 1, width] for rank in range(T)])
    (base, x), (_, wanted) = ranks[r], ranks[r - case.peer]
    to, source = (r + case.peer) % T, (r - case.peer) % T
    like = torch.zeros(wanted.T.shape, dtype=x.dtype).T
    call = lambda: lesson.send_recv(x, to, like, source, case.group)
    got, problems = watch(x, base, call)
    if not same(got, wanted) or like.any():
        problems.append("value")
    if not case.counted("send/recv", 1, x.nbytes):
        problems.append("counted")
    return case.found(list(x.shape), problems)


def try_ring(number: int, groups: dict) -> dict:
    """The ring all-reduce, on sizes from less than T to many times T."""
    case = Case("ring_all_reduce", number, groups)
    T, r = case.T, case.r
    shape = RING_SHAPES[number // len(groups) % len(RING_SHAPES)]
    ranks = case.draw([shape] * T)
    base, x = ranks[r]
    steps = []
    note = lambda name, chunks: steps.append((name, list(chunks)))
    call = lambda: lesson.ring_all_reduce(x, case.group, note)
    got, problems = watch(x, base, call)
    wanted = add([x for _, x in ranks])
    if not same(got, wanted):
        problems.append("value")
    names = [f"{half} {i + 1}" for half in HALVES for i in range(T - 1)]
    if [name for name, _ in steps] != names:
        problems.append("steps")
    elif T > 1:  # half-way, rank r has chunk r, as a reduce-scatter leaves it
        _, chunks = steps[T - 2]
        if not same(chunks[r], piece(wanted.flatten(), 0, T, r)):
            problems.append("half-way")
    sent = sum(nbytes for _, nbytes in lesson.COMM.rows.values())
    by_rank = [None] * T
    dist.all_gather_object(by_rank, sent, group=case.group)
    everyone = 2 * (T - 1) * x.nbytes
    even = x.numel() % T or sent == everyone // T
    if sum(by_rank) != everyone or not even:
        problems.append("bytes")
    if not case.counted("send/recv", 2 * (T - 1), sent):
        problems.append("counted")
    return case.found(shape, problems)


HALVES = ("reduce-scatter", "all-gather")
CALLED = {  # by each product; its payload is the lesson's own formula, which it prints
    "nothing": {},
    "AllGather A": {"all-gather"},
    "AllGather B": {"all-gather"},
    "AllReduce": {"all-reduce"},
    "slice B, as 3": {"all-reduce"},
    "ReduceScatter": {"reduce-scatter"},
}


def cut(x, dim, group):
    if dim is None:
        return x.clone()
    return piece(x, dim, group.size(), group.rank()).contiguous()


def draw_product(case: Case, unit: int) -> tuple:
    """Whole numbers A[I, J] and B[J, K], each dim a multiple of `unit`."""
    case.dtype = DTYPES[case.number % 3]
    I, J, K = (unit * case.rng.randint(1, 4) for _ in range(3))
    generator = torch.Generator().manual_seed(case.number)
    a, b = (torch.randint(-2, 3, s, generator=generator) for s in ((I, J), (J, K)))
    return a.to(case.dtype), b.to(case.dtype), (I, J, K)


def try_products(number: int, groups: dict) -> list[dict]:
    """Each of the four sharded products in each of its ways, as the lesson lists them,
    on random sizes."""
    found = []
    T = groups[sorted(groups)[number % len(groups)]].size()
    a, b, sizes = draw_product(Case("", number, groups), T)
    for row, multiply, a_dim, b_dim, c_dim, elements in lesson.sharded_products(a, b):
        case = Case(multiply.__name__, number, groups)
        case.dtype = a.dtype
        group, called = case.group, CALLED[row["what to do"]] if T > 1 else ()
        lesson.COMM.rows.clear()
        got = multiply(cut(a, a_dim, group), cut(b, b_dim, group), group)
        problems = [] if same(got, cut(a @ b, c_dim, group)) else ["value"]
        counted = [case.counted(name, 1, elements * a.itemsize) for name in called]
        if not all(counted or [not lesson.COMM.rows]):
            problems.append("counted")
        found.append(case.found(sizes, problems))
    return found


def try_mesh(number: int, outer, inner) -> dict:
    case = Case("matmul_2d", number, {"outer": outer, "inner": inner})
    Y, X = outer.size(), inner.size()
    a, b, (I, J, K) = draw_product(case, Y * X)
    lesson.COMM.rows.clear()
    both = lambda x: cut(cut(x, 0, outer), 1, inner)
    got = lesson.matmul_2d(both(a), both(b), outer, inner)
    problems = [] if same(got, both(a @ b)) else ["value"]
    key = ("matmul_2d", f"case {number}", "all-gather")
    rows = {}
    if X > 1:
        rows[(*key, "inner")] = [1, I * J // Y * a.itemsize]
    if Y > 1:
        rows[(*key, "outer")] = [1, J * K // X * a.itemsize]
    if lesson.COMM.rows != rows:
        problems.append("counted")
    return case.found((I, J, K), problems)


def vectors(group) -> dict:
    """Megatron's rank tests, on 4 ranks; and the lesson's own small functions."""
    r = group.rank()
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    both = lesson.sum_both(torch.tensor([1.0]), torch.tensor([10.0]), group)
    x = torch.tensor([1.0, 5.0]) * r
    return {
        "all_reduce": lesson.all_reduce(torch.ones(5) * r, group).tolist(),
        "reduce_scatter": lesson.reduce_scatter(rows, 0, group).tolist(),
        "sum_both": [x.item() for x in both],
        "sum_in_background": [lesson.sum_in_background(x, group).tolist(), x.tolist()],
    }


def refusals(groups: dict) -> list:
    """ValueErrors for dims that do not divide: what was called, what it said."""
    found = []
    for name, group in product(DIVIDES, groups.values()):
        T, (call, _) = group.size(), WRAPPERS[name]
        for shape, dim in (([4, 7], 1), ([9, 4], 0), ([1], 0)):
            if T == 1 or (name == "scatter" and dim != 0):
                continue
            lesson.COMM.rows.clear()
            try:
                call(torch.zeros(shape), dim, 0, group)
                message = "none raised"
            except ValueError as error:
                message = str(error)
            about = dict(name=name, shape=shape, dim=dim, T=T, message=message)
            found.append(about | {"sent": len(lesson.COMM.rows)})
    return found


def main() -> dict:
    groups, tables, cases = {}, {}, []
    for sizes in MESHES:
        groups |= lesson.mesh_groups(sizes, 30)
    for number in range(CASES):
        cases += [try_wrapper(wrapper, number, groups) for wrapper in WRAPPERS]
        cases += [try_send(number, groups), try_ring(number, groups)]
        cases += try_products(number, groups) if number < 12 else []
    tables["groups"] = mesh_table(groups)
    for Y, X in ((2, 2), (4, 1), (1, 4)):
        mesh = lesson.mesh_groups({"outer": Y, "inner": X}, 30)
        tables[f"{Y} x {X}"] = mesh_table(mesh)
        cases += [try_mesh(number, mesh["outer"], mesh["inner"]) for number in range(8)]
    more = dict(vectors=vectors(groups["t4"]), refusals=refusals(groups))
    return dict(cases=cases, tables=tables) | more


if __name__ == "__main__":
    start()
    write_found(main())
    finish()
