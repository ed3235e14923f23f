"""Four ranks call every wrapper of lesson 00 on random tensors, against plain torch.

    torchrun --nproc_per_node=4 drive_wrappers.py FOLDER

Each rank draws what all ranks of its group hold, so it can tell what must come out.
"""

import random
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from in_ranks import load, run, transposed

lesson = load("00_collectives")
CASES = 40  # of each wrapper: all dtypes and all views with each size of group
MESHES = [{"t4": 4, "t1": 1}, {"far2": 2, "near2": 2}]
RING_SHAPES = [[1], [3], [4], [8], [9], [4, 3], [5, 3], [7]]  # less and more than T
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
VIEWS = {  # the same numbers (but expanded) as a view of other memory
    "plain": lambda x: x,
    "transposed": transposed,
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "expanded": lambda x: x[:1].clone().expand(x.shape),
}


def draw(shape, dtype, view: str, seed: int):
    """Whole numbers; those of int64 have more digits than a float has."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 10, shape, generator=generator)
    if dtype == torch.int64:
        x = x * 2**54 + torch.randint(-99, 100, shape, generator=generator)
    return VIEWS[view](x.to(dtype)) if shape else x.to(dtype)


def add(xs):
    return torch.stack(xs).sum(0, dtype=xs[0].dtype)


# wrapper → what it is given after x; peer is a random rank of the group.
CALLS = {
    "all_reduce": ["group"], "all_reduce_max": ["group", "max"],
    "all_gather": ["dim", "group"], "reduce_scatter": ["dim", "group"],
    "all_to_all": ["group", "dim"], "broadcast": ["peer", "group"],
    "shard": ["dim", "group"],
}  # fmt: skip
# … → what must come out on a case's rank; xs are all ranks' x (all the same for shard).
WANTED = {
    "all_reduce": lambda xs, case: add(xs),
    "all_reduce_max": lambda xs, case: torch.stack(xs).amax(0),
    "all_gather": lambda xs, case: torch.cat(xs, case.dim),
    "reduce_scatter": lambda xs, case: case.piece(add(xs)),
    "all_to_all": lambda xs, case: torch.cat([*map(case.piece, xs)], case.dim),
    "broadcast": lambda xs, case: xs[case.peer],
    "shard": lambda xs, case: case.piece(xs[case.r]),
}
DIVIDES = ("reduce_scatter", "all_to_all", "shard")


def same(got, wanted) -> bool:
    """To the last bit, shape and dtype included."""
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
        self.view = [*VIEWS][number % len(VIEWS)]
        self.about = dict(wrapper=wrapper, number=number, axis=self.axis, T=self.T)
        self.about |= dict(dtype=str(self.dtype), view=self.view, problems=[])
        self.dim, self.peer = 0, (number // 4 + number // 16) % self.T

    def piece(self, x):
        return x.tensor_split(self.T, self.dim)[self.r]

    def draw(self, shapes) -> list:
        """What each rank of the group has."""
        seeds = range(self.number * 4, self.number * 4 + self.T)
        pairs = zip(shapes, seeds)
        return [draw(shape, self.dtype, self.view, seed) for shape, seed in pairs]

    def expect(self, **holds: bool) -> None:
        self.about["problems"] += [name for name in holds if not holds[name]]

    def call(self, x, wrapper, wanted, collective: str, counted: list) -> None:
        """The right result, a new tensor, its input as it was; calls and bytes."""
        memory = x if x._base is None else x._base
        before, strides = memory.detach().clone(), x.stride()
        lesson.METER.calls.clear()
        with lesson.METER.phase("case", "phase"):
            got = wrapper()
        call = ("case", "phase", collective, self.axis)
        calls, nbytes = counted
        payloads = lesson.METER.calls.get(call, [])
        self.expect(
            value=same(got, wanted),
            input=torch.equal(memory, before) and x.stride() == strides,
            counted=set(lesson.METER.calls) == ({call} if calls else set())
            and len(payloads) == calls
            and sum(payloads) == (nbytes if calls else 0),
        )
        if got.numel():
            storages = [t.untyped_storage().data_ptr() for t in (got, x)]
            self.expect(new=storages[0] != storages[1], history=not got.requires_grad)


def try_wrapper(wrapper: str, number: int, groups: dict) -> dict:
    """One random case of one wrapper."""
    case, takes_dim = Case(wrapper, number, groups), "dim" in CALLS[wrapper]
    rng, T = case.rng, case.T
    shape = [rng.randint(1, 5) for _ in range(rng.randint(takes_dim, 4))]
    if takes_dim:
        case.dim = rng.randrange(-len(shape), len(shape))
    if wrapper in DIVIDES:
        shape[case.dim] = T * rng.randint(1, 3)
    ranks = case.draw([shape] * T)
    if wrapper == "shard":
        ranks = [ranks[0]] * T
    wanted, x = WANTED[wrapper](ranks, case), ranks[case.r]
    if case.dtype.is_floating_point and number % 3 == 0:
        x.requires_grad_()
    name = wrapper.removesuffix("_max")
    given = vars(case) | dict(max=dist.ReduceOp.MAX)
    given = [given[what] for what in CALLS[wrapper]]
    copies = T if wrapper == "all_gather" else 1
    counted = [1 if T > 1 and wrapper != "shard" else 0, copies * x.nbytes]
    call = partial(getattr(lesson, name), x, *given)
    case.call(x, call, wanted, name.replace("_", "-"), counted)
    return case.about | dict(shape=shape, dim=case.dim, peer=case.peer)


def try_send(number: int, groups: dict) -> dict:
    """send_recv around a ring by a random distance; each rank's tensor has its size,
    and what arrives is shaped like a view, whose strides are not to be copied."""
    case = Case("send_recv", number, {k: g for k, g in groups.items() if g.size() > 1})
    T, r = case.T, case.r
    far, width = case.rng.randrange(1, T), case.rng.randint(1, 4)
    ranks = case.draw([[rank + 1, width] for rank in range(T)])
    x, wanted = ranks[r], ranks[r - far]
    to, source = (r + far) % T, (r - far) % T
    like = torch.zeros(wanted.T.shape, dtype=x.dtype).T
    send = partial(lesson.send_recv, x, to, like, source, case.group)
    case.call(x, send, wanted, "send/recv", [1, x.nbytes])
    case.expect(like=not like.any())
    return case.about


def try_ring(number: int, groups: dict) -> dict:
    """The ring all-reduce, on sizes from less than T to many times T, in each group."""
    case = Case("ring_all_reduce", number, groups)
    T, r = case.T, case.r
    shape = RING_SHAPES[number // len(groups) % len(RING_SHAPES)]
    ranks = case.draw([shape] * T)
    x, wanted, sums = ranks[r], add(ranks), []

    def send_recv(*args):  # what a rank sends: from step T on, sums of all ranks
        sums.append(args[0].clone())
        return plain(*args)

    plain = lesson.send_recv
    reduce = partial(lesson.ring_all_reduce, x, case.group)
    chunks = x.flatten().tensor_split(T)  # one is not sent in either half
    sent = 2 * x.nbytes - chunks[r].nbytes - chunks[(r + 1) % T].nbytes
    with mock.patch.object(lesson, "send_recv", send_recv):
        case.call(x, reduce, wanted, "send/recv", [2 * (T - 1), sent])
    case.expect(steps=len(sums) == 2 * (T - 1))
    if (
        T > 1
    ):  # half-way, rank r has chunk r, as a reduce-scatter leaves it, and sends it
        case.expect(half_way=same(sums[T - 1], case.piece(wanted.flatten())))
    return case.about | dict(shape=shape)


def try_background(number: int, groups: dict) -> dict:
    """The all-reduce that is waited for later."""
    case = Case("async_all_reduce", number, groups)
    case.view = "plain"
    ranks = case.draw([[1 + number % 6]] * case.T)
    x = ranks[case.r]
    start = partial(lesson.async_all_reduce, x, case.group)
    counted = [1 if case.T > 1 else 0, x.nbytes]
    case.call(x, start, add(ranks), "all-reduce", counted)
    return case.about


def main() -> dict:
    groups, cases = {}, []
    for sizes in MESHES:
        groups |= lesson.mesh_groups(sizes, 30)
    for number in range(CASES):
        cases += [try_wrapper(wrapper, number, groups) for wrapper in CALLS]
        cases += [one(number, groups) for one in (try_send, try_ring, try_background)]
    square = lesson.mesh_groups({"outer": 2, "inner": 2}, 30)
    lines = {x: dist.get_process_group_ranks(group) for x, group in square.items()}
    return dict(cases=cases, lines=[lines])


if __name__ == "__main__":
    run(main)
