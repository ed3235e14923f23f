"""Four ranks call every wrapper of lesson 00 on random tensors, against plain torch.

    torchrun --nproc_per_node=4 drive_wrappers.py FOLDER

Each rank draws what all ranks of its group hold, so it can tell what must come out, and
writes what it found to FOLDER/rank<r>.json.
"""

import random
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from in_ranks import load, refused, run

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

    if not shape or view == "plain":
        base = whole(shape)
        return base, base
    if view == "transposed":
        base = whole(shape[::-1])
        return base, base.permute(*reversed(range(len(shape))))
    if view == "strided":
        base = whole([*shape[:-1], 2 * shape[-1]])
        return base, base[..., ::2]
    if view == "offset":
        base = whole([shape[0] + 1, *shape[1:]])
        return base, base[1:]
    base = whole([1, *shape[1:]])
    return base, base.expand(shape)


def piece(x, dim, T, r):
    return x.tensor_split(T, dim)[r]


def add(xs):
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


# wrapper → what it is given after x; peer is a random rank of the group.
CALLS = {
    "all_reduce": ["group"], "all_reduce_max": ["group", "max"],
    "all_gather": ["dim", "group"], "reduce_scatter": ["dim", "group"],
    "all_to_all": ["group", "dim"], "broadcast": ["peer", "group"],
    "scatter": ["peer", "group"], "gather": ["peer", "group"],
    "reduce": ["peer", "group"], "shard": ["dim", "group"],
}  # fmt: skip
# … → what must come out on rank r, where xs are all ranks' x (all the same for shard).
WANTED = {
    "all_reduce": lambda xs, dim, peer, r: add(xs),
    "all_reduce_max": lambda xs, dim, peer, r: torch.stack(xs).amax(0),
    "all_gather": lambda xs, dim, peer, r: torch.cat(xs, dim),
    "reduce_scatter": lambda xs, dim, peer, r: piece(add(xs), dim, len(xs), r),
    "all_to_all": lambda xs, dim, peer, r: torch.cat(
        [piece(x, dim, len(xs), r) for x in xs], dim
    ),
    "broadcast": lambda xs, dim, peer, r: xs[peer],
    "scatter": lambda xs, dim, peer, r: piece(xs[peer], 0, len(xs), r),
    "gather": lambda xs, dim, peer, r: torch.cat(xs) if r == peer else None,
    "reduce": lambda xs, dim, peer, r: add(xs) if r == peer else None,
    "shard": lambda xs, dim, peer, r: piece(xs[r], dim, len(xs), r),
}
DIVIDES = ("reduce_scatter", "all_to_all", "scatter", "shard")
ON_DIM_0 = ("scatter", "gather")
WITH_DIM = ("all_gather", *DIVIDES, *ON_DIM_0)


def call(wrapper: str, x, dim: int, peer: int, group):
    given = dict(dim=dim, peer=peer, group=group, max=dist.ReduceOp.MAX)
    function = getattr(lesson, wrapper.removesuffix("_max"))
    return function(x, *(given[name] for name in CALLS[wrapper]))


def same(got, wanted) -> bool:
    """To the last bit, shape and dtype included."""
    if got is None or wanted is None:
        return got is wanted
    alike = got.dtype == wanted.dtype and got.shape == wanted.shape
    return alike and torch.equal(got, wanted)


class Case:
    """Which group, dtype, view and random numbers a case has; what is wrong there."""

    def __init__(self, wrapper: str, number: int, groups: dict):
        self.number, self.rng = number, random.Random(f"{wrapper} {number}")
        self.axis = sorted(groups)[number % len(groups)]
        self.group = groups[self.axis]
        self.T, self.r = self.group.size(), self.group.rank()
        self.dtype = DTYPES[number // len(groups) % len(DTYPES)]
        self.about = dict(wrapper=wrapper, number=number, axis=self.axis, T=self.T)
        self.about |= dict(dtype=str(self.dtype), view=VIEWS[number % len(VIEWS)])
        self.problems = []

    def draw(self, shapes) -> list[tuple]:
        """(memory, view of it) of each rank of the group."""
        seeds = range(self.number * 4, self.number * 4 + self.T)
        view = self.about["view"]
        return [draw(shape, self.dtype, view, i) for shape, i in zip(shapes, seeds)]

    def expect(self, holds: bool, problem: str) -> None:
        self.problems += [] if holds else [problem]

    def watch(self, x, base, call, wanted):
        """Call a wrapper: the right result, a new tensor, its input as it was."""
        before, strides = base.clone(), x.stride()
        lesson.COMM.rows.clear()
        got = call()
        self.expect(same(got, wanted), "value")
        untouched = torch.equal(base, before) and x.stride() == strides
        self.expect(untouched, "input")
        if got is not None:
            there = base.untyped_storage().data_ptr()
            is_new = not got.numel() or got.untyped_storage().data_ptr() != there
            self.expect(is_new, "new")
            self.expect(not got.requires_grad, "history")

    def counted(self, collective: str, calls: int, nbytes: int) -> None:
        """This, and nothing else, is what the counter has."""
        key = (lesson.COMM.what, lesson.COMM.phase, collective, self.axis)
        wanted = {key: [calls, nbytes]} if calls else {}
        self.expect(lesson.COMM.rows == wanted, "counted")

    def found(self, shape, **more) -> dict:
        return self.about | more | dict(shape=shape, problems=self.problems)


def try_wrapper(wrapper: str, number: int, groups: dict) -> dict:
    """One random case of one wrapper."""
    case, dim = Case(wrapper, number, groups), 0
    rng, T, r = case.rng, case.T, case.r
    least = 1 if wrapper in WITH_DIM else 0
    shape = [rng.randint(1, 5) for _ in range(rng.randint(least, 4))]
    if wrapper in WITH_DIM and wrapper not in ON_DIM_0:
        dim = rng.randrange(-len(shape), len(shape))
    if wrapper in DIVIDES:
        shape[dim] = T * rng.randint(1, 3)
    peer = (number // 4 + number // 16) % T
    ranks = case.draw([shape] * T)
    if wrapper == "shard":
        ranks = [ranks[0]] * T
    wanted = WANTED[wrapper]([x for _, x in ranks], dim, peer, r)
    base, x = ranks[r]
    if case.dtype.is_floating_point and number % 3 == 0:
        x.requires_grad_()
    case.watch(x, base, partial(call, wrapper, x, dim, peer, case.group), wanted)
    collective = wrapper.removesuffix("_max").replace("_", "-")
    copies = T if wrapper in ("all_gather", "gather") else 1
    calls = 1 if T > 1 and wrapper != "shard" else 0
    case.counted(collective, calls, copies * x.nbytes)
    return case.found(shape, dim=dim, peer=peer)


def try_send(number: int, groups: dict) -> dict:
    """send_recv around a ring by a random distance; each rank's tensor has its size,
    and what arrives is shaped like a view, whose strides are not to be copied."""
    case = Case("send_recv", number, {k: g for k, g in groups.items() if g.size() > 1})
    T, r = case.T, case.r
    far, width = case.rng.randrange(1, T), case.rng.randint(1, 4)
    ranks = case.draw([[rank + 1, width] for rank in range(T)])
    (base, x), (_, wanted) = ranks[r], ranks[r - far]
    to, source = (r + far) % T, (r - far) % T
    like = torch.zeros(wanted.T.shape, dtype=x.dtype).T
    send = lambda: lesson.send_recv(x, to, like, source, case.group)
    case.watch(x, base, send, wanted)
    case.expect(not like.any(), "like")
    case.counted("send/recv", 1, x.nbytes)
    return case.found([*x.shape])


def try_ring(number: int, groups: dict) -> dict:
    """The ring all-reduce, on sizes from less than T to many times T."""
    case = Case("ring_all_reduce", number, groups)
    T, r = case.T, case.r
    shape = RING_SHAPES[number // len(groups) % len(RING_SHAPES)]
    ranks = case.draw([shape] * T)
    base, x = ranks[r]
    wanted, steps = add([x for _, x in ranks]), []
    note = lambda name, chunks: steps.append((name, list(chunks)))
    reduce = lambda: lesson.ring_all_reduce(x, case.group, note)
    case.watch(x, base, reduce, wanted)
    halves = ("reduce-scatter", "all-gather")
    names = [f"{half} {i + 1}" for half in halves for i in range(T - 1)]
    case.expect([name for name, _ in steps] == names, "steps")
    if T > 1:  # half-way, rank r has chunk r, as a reduce-scatter leaves it
        _, chunks = steps[T - 2]
        case.expect(same(chunks[r], piece(wanted.flatten(), 0, T, r)), "half-way")
    sent = sum(nbytes for _, nbytes in lesson.COMM.rows.values())
    case.counted("send/recv", 2 * (T - 1), sent)
    by_rank = [None] * T
    dist.all_gather_object(by_rank, sent, group=case.group)
    everyone = 2 * (T - 1) * x.nbytes
    case.expect(sum(by_rank) == everyone, "bytes of all")
    case.expect(x.numel() % T or sent == everyone // T, "bytes of a rank")
    return case.found(shape)


def cut(x, *cuts):
    for dim, group in cuts:
        if dim is not None:
            x = piece(x, dim, group.size(), group.rank())
    return x.contiguous()


def draw_product(case: Case, unit: int) -> tuple:
    """Whole numbers A[I, J] and B[J, K], each dim a multiple of `unit`."""
    dtype = DTYPES[case.number % 3]
    I, J, K = (unit * case.rng.randint(1, 4) for _ in range(3))
    generator = torch.Generator().manual_seed(case.number)
    a, b = (torch.randint(-2, 3, s, generator=generator) for s in ((I, J), (J, K)))
    return a.to(dtype), b.to(dtype), (I, J, K)


def try_products(number: int, groups: dict) -> list[dict]:
    """Each of the four sharded products in each of its ways, as the lesson lists them,
    on random sizes (what they send is checked, and printed, in the lesson's run)."""
    found, first = [], Case("", number, groups)
    a, b, sizes = draw_product(first, first.T)
    for _, multiply, *dims, _ in lesson.sharded_products(a, b):
        case = Case(multiply.__name__, number, groups)
        A, B, C = (cut(x, (d, case.group)) for x, d in zip((a, b, a @ b), dims))
        case.expect(same(multiply(A, B, case.group), C), "value")
        found.append(case.found(sizes))
    return found


def try_mesh(number: int, outer, inner) -> dict:
    """The product on a 2D mesh, on random sizes."""
    case = Case("matmul_2d", number, {"outer": outer, "inner": inner})
    a, b, sizes = draw_product(case, outer.size() * inner.size())
    A, B, C = (cut(x, (0, outer), (1, inner)) for x in (a, b, a @ b))
    case.expect(same(lesson.matmul_2d(A, B, outer, inner), C), "value")
    return case.found(sizes)


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
    """What is said to dims that do not divide: (wrapper, shape, dim, T, message)."""
    found, shapes = [], (([4, 7], 1), ([9, 4], 0), ([1], 0))
    lesson.COMM.rows.clear()
    for name, group, (shape, dim) in product(DIVIDES, groups.values(), shapes):
        T = group.size()
        if shape[dim] % T and not (name == "scatter" and dim):
            tried = partial(call, name, torch.zeros(shape), dim, 0, group)
            said = refused({name: tried})
            found.append([name, shape, dim, T, said[name]])
    return [*found, ["sent", len(lesson.COMM.rows)]]


def main() -> dict:
    groups, cases = {}, []
    for sizes in MESHES:
        groups |= lesson.mesh_groups(sizes, 30)
    for number in range(CASES):
        cases += [try_wrapper(wrapper, number, groups) for wrapper in CALLS]
        cases += [try_send(number, groups), try_ring(number, groups)]
        cases += try_products(number, groups) if number < 12 else []
    for Y, X in ((2, 2), (4, 1), (1, 4)):
        mesh = lesson.mesh_groups({"outer": Y, "inner": X}, 30)
        cases += [try_mesh(number, mesh["outer"], mesh["inner"]) for number in range(8)]
    return dict(cases=cases, vectors=vectors(groups["t4"]), refusals=refusals(groups))


if __name__ == "__main__":
    run(main)
