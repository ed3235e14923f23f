r"""Lesson 00: collectives, the calls by which ranks exchange tensors.

A rank is one process with a number. A collective is a call that every rank of a group
must make: each passes in a tensor, and some or all of them get a result. Tensor
parallelism is matrix products with the right collectives between them.

Run it (2 ranks on a laptop; also 4, and at most 8 on a small machine):

    torchrun --standalone --nproc_per_node=2 00_collectives.py

torchrun starts this file twice, as two processes that share no memory. Both run the
same program. Each finds its number in the environment variable RANK, and tensors get
from one to the other only by calls that both make. Your own first program could be:

    import torch, torch.distributed as dist
    dist.init_process_group("gloo")           # waits until all ranks have called it
    x = torch.ones(3) * dist.get_rank()       # rank 0 has zeros, rank 1 ones, …
    dist.all_reduce(x)                        # now x is the sum over ranks, on each
    print(f"rank {dist.get_rank()} has {x.tolist()}")
    dist.destroy_process_group()              # the ranks leave the process group

Save it as first.py; torchrun --standalone --nproc_per_node=2 first.py starts it. gloo
carries tensors between CPUs, NCCL between NVIDIA GPUs (used if each rank has one).

What you will see: three placements of a tensor; five collectives and send/recv; an
all-reduce by hand; the four cases of a sharded product; common mistakes. Every rank
checks every value, and the bytes of every call.

Exercises (answers: notebooks/00_collectives.ipynb, in the section that is named):
    In two_all_reduces let the last rank sum y first; then let it skip sum_y. Why does
        one give wrong numbers without an error, while the other waits until a timeout
        (--timeout 8)? (section 8)
    In matmul_case_3_reduce_scatter, scatter dim 0 instead of dim 1. The row marks C
        with ✗, but its bytes stay right. What is computed now? (section 10, no. 3)
    Write an all-reduce by recursive doubling: in step i, exchange everything with rank
        (rank XOR 2^i) and add. Print it with show_algorithm, in main: it takes
        log2(T) steps instead of 2·(T - 1). From T = 4 on each rank sends more, and T
        must be a power of 2. (section 4)

Shapes: A[I, J] · B[J, K] = C[I, K]. The last letters of a tensor's name are its dims:
    UPPERCASE is the full size, lowercase is this rank's 1/T slice of it. a_Ij has all
    rows and a slice of the columns. n is the size of the small vectors, T the number
    of ranks in a group, e the bytes per element. The group is called tp (tensor
    parallel). How a tensor is placed on it, and PyTorch's word for that:
        replicated  A[I]          Replicate()  every rank holds the full tensor
        sharded     A[I_tp]       Shard(dim)   dim I is split over tp
        partial     A[I] {U_tp}   Partial()    full shape, still to be summed over tp
                                               (U: unreduced); named partial_…

Sources: the scaling book, jax-ml.github.io/scaling-book (notation, four products);
    docs.pytorch.org/docs/stable/distributed.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# ==== NEW in 00: collectives
# Read lines 67 to 305, in about 24 minutes. Stop at RUN.

# Every rank begins with these lines (the first is in `launch`, the second in main):
#     dist.init_process_group("gloo")   # "nccl" on GPUs; waits for all ranks
#     torch.manual_seed(1)              # one seed: torch.randn gives all ranks the same
# A group is a set of ranks that make calls together. A rank has a number in each of its
# groups, group.rank(), and a global one, dist.get_rank(): in the group [2, 3], group
# rank 0 is global rank 2. All that follows needs one group, of all ranks:
#     group = dist.new_group(group_desc="tp")   # "tp": the name that METER counts under


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if that is impossible."""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    Shapes: full [.., I, ..] → [.., I/T, ..], a new tensor. Communication: none.
    """
    return split(full.detach(), dim, group.size())[group.rank()].clone()


# ---- Collectives

# Each wrapper returns a new tensor and never changes its input. Autograd does not track
# these calls; lesson 01 wraps some of them in autograd.Functions. The payload of a call
# is the bytes of a rank's input, or of its output if that is larger. In a group of one
# rank a collective sends nothing.


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    op: dist.ReduceOp.MAX, MIN, … instead of the sum.
    Shapes: x [...] → [...]. Communication: 1 call on x's elements.
    """
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    Shapes: x [.., i, ..] → [.., T·i, ..]. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    Shapes: x [.., I, ..] → [.., I/T, ..]. Communication: 1 call on x's elements.
    """
    parts = split(x.detach(), dim, group.size())
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    Shapes: x [...] → [...], Replicate(). Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    # group_src is a number in the group; src= would be the global rank.
    dist.broadcast(out, group_src=src, group=group)
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Cut x into T parts along dim, send part j to rank j, join what arrives along dim.

    Shapes: x [.., I, ..] → [.., I, ..]. Communication: 1 call on x's elements.
    """
    # One tensor [T, ...]: row j is for rank j. In the result, row j is from rank j.
    parts = torch.stack(split(x.detach(), dim, group.size()))
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return torch.cat(list(out), dim)


def send_recv(
    x: Tensor, dst: int, like: Tensor, src: int, group: dist.ProcessGroup
) -> Tensor:
    """Send x to group rank dst and receive a tensor shaped `like` from group rank src.

    Both are started before either is waited for: if every rank first waited until its
    own send had ended, a ring would deadlock. Counted: the bytes that this rank sends.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    x = x.detach().contiguous()
    send = dist.P2POp(dist.isend, x, group=group, group_peer=dst)
    receive = dist.P2POp(dist.irecv, out, group=group, group_peer=src)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return out


# ---- An all-reduce by hand


def ring_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce by hand: each rank sends only to the next rank on a ring.

    x is cut into T chunks. The chunk that each rank sends to its right, for T = 3:

        step   rank 0   rank 1   rank 2   and the receiver
        1         2        0        1     adds its own chunk of that number
        2         1        2        0     adds; now rank r has the sum of chunk r
        3         0        1        2     keeps the sum instead of its own chunk
        4         2        0        1     keeps it; now all ranks have all sums

    Follow chunk 0: it starts on rank 1, passes rank 2, and is complete on rank 0 after
    T − 1 steps. These steps are a reduce-scatter, the T − 1 others an all-gather.

    Shapes: x [...] → [...], Partial() → Replicate(). T need not divide x.
    Communication: 2·(T − 1) send/recv of a chunk per rank; together 2·(T − 1) times x.
    """
    T = group.size()
    rank = group.rank()
    right = (rank + 1) % T
    left = (rank - 1) % T
    chunks = list(x.detach().flatten().tensor_split(T))
    for step in range(1, 2 * T - 1):
        # From step 2 on, a rank sends the chunk that it got in the step before.
        send_chunk = (rank - step) % T
        recv_chunk = (rank - step - 1) % T
        arrived = send_recv(chunks[send_chunk], right, chunks[recv_chunk], left, group)
        if step < T:  # reduce-scatter
            chunks[recv_chunk] = chunks[recv_chunk] + arrived
        else:  # all-gather
            chunks[recv_chunk] = arrived
    return torch.cat(chunks).view(x.shape)


# ---- Two rules: wait before use, and one order of calls


def async_all_reduce(x: Tensor, group, other_work: Callable = lambda: None) -> Tensor:
    """Start an all-reduce, do other work, and only then wait for the sum (async_op)."""
    out = x.clone()  # the call overwrites its argument
    work = dist.all_reduce(out, group=group, async_op=True)
    other_work()  # must neither read nor write `out`
    work.wait()
    # gloo blocks Python in wait(), NCCL the CUDA stream. Other calls wait themselves.
    return out


def two_all_reduces(x: Tensor, y: Tensor, group) -> tuple[Tensor, Tensor]:
    """Sum two tensors, in the same order on every rank.

    The n-th call of one rank in a group is matched with the n-th call of the others.
    Nothing else tells the collectives of a group apart.
    """
    sum_x = all_reduce(x, group)
    sum_y = all_reduce(y, group)
    return sum_x, sum_y


# ---- The four cases of a sharded product A · B = C

# The contracted dim J decides. If J is not split, no rank needs anything from another,
# unless both I and K are split over the group (case 4).


def matmul_case_1(a_iJ: Tensor, b_JK: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K] → C[I_tp, K]: every rank has all of J; nothing is sent."""
    return a_iJ @ b_JK


def matmul_case_2_gather(a_Ij: Tensor, b_JK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J, K] → C[I, K]: all-gather A; each rank does all the work."""
    return all_gather(a_Ij, 1, group) @ b_JK


def matmul_case_2_slice(a_Ij: Tensor, b_JK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J, K] → C[I, K]: slice B, which sends nothing, then case 3."""
    return matmul_case_3_all_reduce(a_Ij, shard(b_JK, 0, group), group)


def matmul_case_3_all_reduce(a_Ij: Tensor, b_jK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J_tp, K] → C[I, K] {U_tp} → AllReduce → C[I, K]."""
    partial_c_IK = a_Ij @ b_jK  # full shape; the sum runs over this rank's part of J
    return all_reduce(partial_c_IK, group)


def matmul_case_3_reduce_scatter(a_Ij: Tensor, b_jK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J_tp, K] → C[I, K] {U_tp} → ReduceScatter → C[I, K_tp]."""
    partial_c_IK = a_Ij @ b_jK
    return reduce_scatter(partial_c_IK, 1, group)


def matmul_case_4_left(a_iJ: Tensor, b_Jk: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K_tp] → C[I, K_tp]: gather A."""
    # From its own slices, rank r could compute only block (r, r) of C.
    return all_gather(a_iJ, 0, group) @ b_Jk


def matmul_case_4_right(a_iJ: Tensor, b_Jk: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K_tp] → C[I_tp, K]: gather B instead."""
    return a_iJ @ all_gather(b_Jk, 1, group)


# ---- Several groups: a mesh


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group along each axis of a mesh.

    A mesh lays out the ranks as a grid, row by row, and each line of the grid is a
    group. sizes {"dp": 2, "tp": 2} is the grid [[0, 1], [2, 3]]: groups [0, 2] and
    [1, 3] along dp, [0, 1] and [2, 3] along tp. With one axis all ranks are one group.
    timeout: seconds that a call may wait (PyTorch: gloo 30 minutes, NCCL 10).
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        for line in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            # Every rank creates every group, also those it is not in, in one order:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


# ==== RUN


def main(args, report: Report) -> None:
    """Print five sections; in each, every rank checks its own values."""
    limit = timedelta(seconds=args.timeout)
    group = dist.new_group(timeout=limit, group_desc="tp")  # all ranks
    torch.manual_seed(args.seed)  # the same matrices on every rank
    show_three_placements(report, args, group)
    show_collectives(report, args, group)
    report.section("An all-reduce by hand, from send/recv alone")
    show_algorithm(report, ring_all_reduce, "2·(T-1)", "2·(T-1)·n·e", args, group)
    show_products(report, args, group)
    show_mistakes(report, args, group)


def matrix_sizes(args) -> dict[str, int]:
    """The letters of the shape legend. T divides I, J, K and n."""
    T = args.ranks
    n = 2 * T if T <= 2 else T  # a row of texts must fit the screen
    e = getattr(torch, args.dtype).itemsize
    return dict(n=n, I=2 * T, J=4 * T, K=3 * T, T=T, e=e)


def count_from(start: int, size: int, args) -> Tensor:
    """The vector start, start + 1, … in the run's dtype."""
    dtype = getattr(torch, args.dtype)
    return start + torch.arange(size, device=args.device).to(dtype)


def as_text(x: Tensor) -> str:
    """The elements in one line, [ 0  1 10]; of five or more the ends."""
    texts = [f"{value:2.0f}" for value in x.flatten().tolist()]  # 2 wide: columns align
    if len(texts) > 4:
        texts[2:-1] = ["…"]
    return f"[{' '.join(texts)}]"


def of_all_ranks(value, group) -> list:
    """The value of every rank, in order: for what is printed."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def check_value(report: Report, name: str, got: Tensor, expected: Tensor, group) -> str:
    """Compare two tensors on every rank: "ok" or ✗, for a cell of a table."""
    # Sums of integers are exact in any order; of other numbers, if you have edited it.
    is_exact = torch.equal(expected, expected.round())
    allowed = 0.0 if is_exact else ALLOWED[str(expected.dtype).removeprefix("torch.")]
    diff = report.agree(f"values: {name}", got, expected, allowed)
    return "ok" if all(of_all_ranks(diff <= allowed, group)) else "✗"


def check_calls(report: Report, run: str, formula: str) -> dict:
    """Compare the calls and bytes of a run with one call: cells of a table.

    formula: the payload in bytes, 0 for a run that sends nothing.
    """
    measured = {call[2]: sizes for call, sizes in METER.calls.items() if call[0] == run}
    calls = sum(len(sizes) for sizes in measured.values())
    sent = report.size["T"] > 1 and formula != "0"  # one rank sends nothing
    report.check(f"calls: {run}", abs(calls - int(sent)), is_formula=True)
    payload = sum(sum(sizes) for sizes in measured.values())
    cells = report.expect(f"bytes: {run}", payload, formula if sent else "0")
    on_ring = 0
    for kind, sizes in measured.items():
        on_ring += ring(kind, sum(sizes), report.size["T"])
    return cells | {"formula": formula, "ring": f"{on_ring:,}"}


# ---- The sections of the output, in order


def show_three_placements(report: Report, args, group) -> None:
    """The tensor A = 0, 1, 2, … replicated, sharded and partial."""
    full = count_from(0, report.size["n"], args)
    sharded = shard(full, 0, group)
    # Any tensors that sum to A are partial. The others hold 1s, and rank 0 the rest.
    term = torch.ones_like(full)
    if group.rank() == 0:
        term = full - (group.size() - 1)

    held = [f"rank {group.rank()}", as_text(full), as_text(sharded), as_text(term)]
    name = "sharded, all-gather"
    joined = check_value(report, name, all_gather(sharded, 0, group), full, group)
    name = "partial, all-reduce"
    summed = check_value(report, name, all_reduce(term, group), full, group)
    lines = [
        ["in this course", "A[I]", "A[I_tp]", "A[I] {U_tp}"],
        *of_all_ranks(held, group),
        ["to get A", "nothing to do", f"all-gather {joined}", f"all-reduce {summed}"],
    ]
    columns = ["PyTorch's word", "Replicate()", "Shard(0)", "Partial()"]
    report.section("Three placements of a tensor A: replicated, sharded, partial")
    report.say("A is 0, 1, 2, … Partial tensors add up to A, element by element.")
    report.table([dict(zip(columns, line)) for line in lines])


def show_collectives(report: Report, args, group) -> None:
    """Five collectives and send/recv: what every rank has before and after."""
    T = group.size()
    rank = group.rank()
    # Every rank knows what all ranks start with, so it can tell what must come out.
    xs = [count_from(10 * r, report.size["n"], args) for r in range(T)]
    x = xs[rank]
    total = sum(xs)
    mine = shard(total, 0, group)
    slices = torch.cat([split(x_of_r, 0, T)[rank] for x_of_r in xs])
    moves = [  # name, what a rank gets in words, how, and what must come out
        ("all-reduce", "the sum", partial(all_reduce, x), total),
        ("reduce-scatter", "a slice of it", partial(reduce_scatter, x, 0), mine),
        ("all-gather", "all slices of it", partial(all_gather, mine, 0), total),
        ("broadcast", f"rank {T - 1}'s", partial(broadcast, x, T - 1), xs[T - 1]),
        ("all-to-all", "a slice of each", partial(all_to_all, x), slices),
    ]
    if T > 1:  # one rank has no other to send to
        pass_on = partial(send_recv, x, (rank + 1) % T, x, (rank - 1) % T)
        moves.append(("send/recv", "the rank before's", pass_on, xs[rank - 1]))
    report.section("Five collectives and send/recv: rank r has 10·r, 10·r + 1, …")
    report.say("bytes = payload: a rank's input, or its output if that is larger")
    show_moves(report, x, moves[:3], group)
    show_moves(report, x, moves[3:], group)
    report.say("A reduce-scatter, then an all-gather: that is an all-reduce.")


def show_moves(report: Report, x: Tensor, moves: list[tuple], group) -> None:
    """A table: what every rank passes in and gets, and the payload of each call."""
    gets = {"": "a rank gets", "before": ""}
    held = {"": f"rank {group.rank()}", "before": as_text(x)}
    payload = {"": "bytes", "before": ""}
    for name, effect, move, expected in moves:
        with METER.phase(name, ""):  # counts the collectives inside
            got = move(group)
        value = check_value(report, name, got, expected, group)
        gets[name] = effect if value == "ok" else f"{effect} ✗"
        held[name] = as_text(got)
        # Each moves a full tensor: it goes in, or comes out of an all-gather.
        cells = check_calls(report, name, "n·e")
        payload[name] = f"{cells['bytes']} {cells['ok']}"
    report.table([gets, *of_all_ranks(held, group), payload])


def show_algorithm(report, algorithm, steps: str, sent: str, args, group) -> None:
    """An all-reduce by hand, of n elements, and of n + 1, a number T does not divide.

    steps, sent: formulas, with T, n, e and log2(), for the steps (calls of send_recv)
        and for the bytes that all ranks together send.
    """
    name = algorithm.__name__
    rows = []
    # Where T does not divide n, tensor_split makes chunks of different lengths.
    for n, formula in [("n", sent), ("n+1", sent.replace("n", "(n+1)"))]:
        x = count_from(group.rank(), evaluate(n, report.size), args)
        run = f"{name} of {len(x)}"
        with METER.phase(run, ""):
            result = algorithm(x, group)
        mine = METER.calls.get((run, "", "send/recv", "tp"), [])  # one for each step
        off = len(mine) - evaluate(steps, report.size)
        holds = report.check(f"steps: {run}", abs(off), is_formula=True)
        # A rank may send more or less than others, so the formula is about all of them.
        by_rank = of_all_ranks(sum(mine), group)
        row = {"n": len(x), "steps": f"{len(mine)} {'ok' if holds else '≠'}"}
        row["a rank sends"] = " or ".join(map(str, sorted(set(by_rank))))
        cells = report.expect(f"bytes: {run}", sum(by_rank), formula)
        row["all send"] = f"{cells['bytes']} {cells['ok']}"
        row["sum"] = check_value(report, run, result, all_reduce(x, group), group)
        rows.append(row)
    report.say(f"{name}, {steps} steps; all ranks together send {sent} bytes")
    report.table(rows)
    times = evaluate(sent, report.size) / evaluate("T·n·e", report.size)
    report.say(f"On average a rank sends {times:.3g} times its tensor.")
    if report.size["T"] == 2 and sent == "2·(T-1)·n·e":
        report.say("With 4 ranks it would be 2·3/4 = 1.5 times, with many almost 2.")


def make_products(size: dict[str, int], args, group) -> list[tuple]:
    """The four cases of a sharded product, each in its variants."""
    # Small integers: sums are exact. Every rank has both, so it can check its part.
    dtype = getattr(torch, args.dtype)
    a_IJ = torch.randint(-2, 3, (size["I"], size["J"])).to(args.device, dtype)
    b_JK = torch.randint(-2, 3, (size["J"], size["K"])).to(args.device, dtype)
    a_iJ = shard(a_IJ, 0, group)
    a_Ij = shard(a_IJ, 1, group)
    b_jK = shard(b_JK, 0, group)
    b_Jk = shard(b_JK, 1, group)
    c_IK = a_IJ @ b_JK  # of which every result must be a slice, or all
    c_iK = shard(c_IK, 0, group)
    c_Ik = shard(c_IK, 1, group)
    # Each: four cells of the table; what computes C, from what; C; payload in bytes.
    return [
        (("1", "A[I_tp, J] B[J, K]", "nothing", "C[I_tp, K]"),
         matmul_case_1, a_iJ, b_JK, c_iK, "0"),
        (("2", "A[I, J_tp] B[J, K]", "AllGather A", "C[I, K]"),
         matmul_case_2_gather, a_Ij, b_JK, c_IK, "I·J·e"),
        (("2", "", "slice B, do 3", "C[I, K]"),
         matmul_case_2_slice, a_Ij, b_JK, c_IK, "I·K·e"),
        (("3", "A[I, J_tp] B[J_tp, K]", "AllReduce", "C[I, K]"),
         matmul_case_3_all_reduce, a_Ij, b_jK, c_IK, "I·K·e"),
        (("3", "", "ReduceScatter", "C[I, K_tp]"),
         matmul_case_3_reduce_scatter, a_Ij, b_jK, c_Ik, "I·K·e"),
        (("4", "A[I_tp, J] B[J, K_tp]", "AllGather A", "C[I, K_tp]"),
         matmul_case_4_left, a_iJ, b_Jk, c_Ik, "I·J·e"),
        (("4", "", "AllGather B", "C[I_tp, K]"),
         matmul_case_4_right, a_iJ, b_Jk, c_iK, "J·K·e"),
    ]  # fmt: skip


def show_products(report: Report, args, group) -> None:
    """What each product computes, multiplies and sends."""
    rows = []
    columns = ("", "A and B are split", "what to do", "C is split")
    products = make_products(report.size, args, group)
    for cells, compute, a, b, expected, formula in products:
        row = dict(zip(columns, cells))
        name = compute.__name__
        # FlopCounterMode counts the floating-point operations of this rank's products.
        with METER.phase(name, ""), FlopCounterMode(display=False) as flops:
            c = compute(a, b, group)
        if check_value(report, name, c, expected, group) != "ok":
            row["C is split"] += " ✗"
        row["flops"] = f"{flops.get_total_flops():,}"
        counted = check_calls(report, name, formula)
        for column in ("bytes", "ring", "formula", "ok"):
            row[column] = counted[column]
        rows.append(row)
    report.section("C[I, K] = A[I, J] · B[J, K]: the four cases of a sharded product")
    report.say(
        "Case 1 does not split J, so no rank sends. Cases 2 and 3 split J. Case 4 "
        "splits I and K over one axis, so one of them has to be gathered. "
        "flops: of one rank; bytes: payload; ring: bytes that a rank of a ring sends."
    )
    report.table(rows)
    sums = f"an all-reduce sends {rows[3]['ring']} bytes, a reduce-scatter"
    report.say(f"On a ring {sums} {rows[4]['ring']}.")


def show_mistakes(report: Report, args, group) -> None:
    """What three common mistakes would change: a view, the call order, not waiting."""
    T = group.size()
    rank = group.rank()
    total = T * (T - 1) // 2
    # Transposed: the elements are no longer in the order of their memory.
    x_of_0 = count_from(0, 4, args).view(2, 2).T
    view = (x_of_0.T + rank).T
    before = view.clone()
    summed = all_reduce(view, group)
    ones = torch.ones_like(before[0])  # in the run's dtype
    two = torch.cat([ones, 10 * ones])
    both = torch.cat(two_all_reduces(ones, 10 * ones, group))
    waited = sum_that_starts_late(rank * ones, group)

    rows = []
    for name, start, got, expected in [
        ("all-reduce of a transposed view", before, summed, T * x_of_0 + total),
        ("the view itself afterwards", before, view, before),
        ("two sums, first 1s, then 10s", two, both, T * two),
        ("a sum started, then waited for", rank * ones, waited, total * ones),
    ]:
        row = {"": name, "rank 0 before": as_text(start), "after": as_text(got)}
        row["ok"] = check_value(report, name, got, expected, group)
        rows.append(row)
    report.section("Common mistakes, avoided: what must come out")
    report.say("Rank r starts with rank 0's elements + r (in row 3 with the same).")
    report.table(rows)


def sum_that_starts_late(x: Tensor, group) -> Tensor:
    """async_all_reduce, where reading the sum before wait() would fail every time.

    The last rank starts only when rank 0 has started. Rank 0 says so in the key-value
    store that all ranks of a job share.
    """
    store = dist.distributed_c10d._get_default_store()
    started = "rank 0 has started its all-reduce"
    if group.size() > 1 and group.rank() == group.size() - 1:
        store.wait([started])
    announce = lambda: store.set(started, "") if group.rank() == 0 else None
    # A copy: a sum that no rank waited for arrives later.
    return async_all_reduce(x, group, announce).clone()


# ==== MEASURE, the same in every lesson: it counts, compares and prints
# region
# Skip it at first. Meter counts, Report compares and prints, launch starts and ends.

import argparse
import json
import os
import signal
import sys
import textwrap
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(TorchDispatchMode):
    """Counts every collective of this rank, also DTensor's and those of backward.

    Within `with METER`, PyTorch calls __torch_dispatch__ instead of each operation.
    calls: (run, phase, collective, axis) → payloads. A payload is the bytes of the full
    tensor: of an all-gather what it returns, of a reduce-scatter what it takes.
    """

    def __init__(self):
        super().__init__()
        self.calls = {}
        self.ranks = {}  # axis → number of ranks of this rank's group along it
        self.label = None  # (run, phase)
        self.count = 0  # of all collectives, in order
        self.last = "none"  # the latest one, for the report of an error

    @contextmanager
    def phase(self, run: str, phase: str):
        """Within `with`: collectives are counted as this phase of this run."""
        before, self.label = self.label, (run, phase)
        try:
            with self:
                yield
        finally:
            self.label = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into local operations first
        collective, group = collective_of(func, args)
        if group is None or group.size() == 1:  # one rank sends nothing
            return func(*args, **(kwargs or {}))
        run, phase = self.label
        axis = group.group_desc
        self.ranks[axis] = group.size()
        self.count += 1
        self.last = f"number {self.count}, {collective} over {axis}, {run} {phase}"
        out = func(*args, **(kwargs or {}))
        if collective != "recv":  # it is counted where it is sent
            payload = max(nbytes(args[0]), nbytes(args[1]), nbytes(out))
            self.calls.setdefault((run, phase, collective, axis), []).append(payload)
        return out


METER = Meter()
# PyTorch has several operations of each kind: allreduce_, all_reduce, …
KINDS = "all-reduce all-gather reduce-scatter broadcast all-to-all send recv".split()


def collective_of(func, args) -> tuple[str, dist.ProcessGroup | None]:
    """The collective that a PyTorch operation is, and its group; None if it is none."""
    namespace, _, name = func._schema.name.partition("::")
    if "c10d" not in namespace or name == "barrier":
        return name, None
    group = None
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            group = dist.ProcessGroup.unbox(x)
    if isinstance(args[-1], str):  # DTensor names its group
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    plain = name.replace("_", "")
    kinds = [kind for kind in KINDS if plain.startswith(kind.replace("-", ""))]
    return (kinds[0].replace("send", "send/recv") if kinds else name), group


def nbytes(x) -> int:
    """Bytes of a tensor (a DTensor: of this rank's part), or of all in a list."""
    if isinstance(x, (list, tuple)):
        return sum(nbytes(part) for part in x)
    return getattr(x, "_local_tensor", x).nbytes if isinstance(x, Tensor) else 0


def saved_bytes(compute, held: list[Tensor]) -> int:
    """Bytes that autograd saves in compute(): each storage once, without those held."""
    storage_of = lambda x: getattr(x, "_local_tensor", x).untyped_storage()
    saved = {}  # its address → the bytes of a storage

    def pack(tensor):
        saved[storage_of(tensor).data_ptr()] = storage_of(tensor).nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    for x in held:
        saved.pop(storage_of(x).data_ptr(), None)
    return sum(saved.values())


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula: of the printed text itself, so the two cannot differ."""
    return round(eval(formula.replace("·", "*"), {"log2": math.log2}, size))


def ring(collective: str, payload: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends (lesson 00)."""
    if collective in ("send/recv", "all-to-all-v"):  # -v: what leaves, by beyond/16
        return payload
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return rounds * payload * (ranks - 1) // ranks


# Allowed relative differences. A loss is a mean, so its rounding errors are smaller.
ALLOWED = {"float32": 1e-5, "float64": 1e-12}
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}
# A difference is divided by the expected size, but at least by this: a smaller gradient
# is 0 but for rounding errors, a parameter moves 0.009 in three AdamW steps of 0.003.
LEAST = {"parameters": 0.009, "gradients": 1e-4}


def double(x) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64).detach().cpu()


def rel_diff(got, expected, least=0.0) -> float:
    """max|got − expected| / max(max|expected|, least); inf for nan or another shape."""
    got, expected = double(got), double(expected)
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    diff = (got - expected).abs().max() / expected.abs().max().clamp(min=least)
    return math.inf if diff.isnan() else diff.item()


def difference(got, expected) -> str:
    """How a wrong tensor differs, if that can be said in words; otherwise ""."""
    got, expected = double(got), double(expected)
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}, expected {list(expected.shape)}"
    if got.numel() <= 4:
        text = lambda x: " ".join(f"{value:.7g}" for value in x.flatten().tolist())
        return f"{text(got)}, expected {text(expected)}"
    factor = ((got * expected).sum() / (expected * expected).sum()).item()
    if rel_diff(got, factor * expected) < 1e-4 and abs(factor - 1) > 1e-3:
        return f"{factor:.4g} times the expected tensor"
    return ""


def norm(values: list, digits=7) -> str:
    """The norm of several values as one vector, printed."""
    return f"{math.hypot(*[double(x).norm() for x in values]):#.{digits}g}"


class Report:
    """Values that differ from the run without TP are FAIL. A formula is of the lesson's
    own model and split: in an edited one ≠ marks what differs, and the verdict is PASS.
    """

    def __init__(self, size: dict[str, int], steps: int):
        self.size = size  # letter → number
        self.steps = steps
        self.checks = {}  # "kind: name" → a comparison
        self.raised = []  # runs that ended with an error
        self.rows = []  # of all tables, with the number of the section
        self.sent = {}  # run → bytes that a rank of a ring sends per step
        self.sections = 0

    def section(self, title: str) -> None:
        self.sections += 1
        print(f"\n{self.sections}  {title}", flush=True)

    def say(self, text: str) -> None:
        print(textwrap.indent(textwrap.fill(text, 85), "   "), flush=True)

    def table(self, rows: list[dict]) -> None:
        """Rows with the same columns: texts to the left, numbers to the right."""
        self.rows += [dict(row, section=self.sections) for row in rows]
        lines = [""] * (len(rows) + 1)
        for name in rows[0] if rows else []:
            cells = [name] + [str(row[name]) for row in rows]
            width = max(len(cell) for cell in cells)
            pad = str.rjust if cells[1][:1].isdigit() else str.ljust
            for i, cell in enumerate(cells):
                lines[i] += pad(cell, width) + "  "
        print("".join(f"   {line.rstrip()}\n" for line in lines if line), end="")

    def check(self, name, diff, allowed=0.0, text="", is_formula=False) -> bool:
        """Record a comparison, named "kind: what is compared". Does it hold here?"""
        if name in self.checks:  # one would hide the other
            raise ValueError(f"two checks are named {name}")
        text = text or f"off by {diff:.2g}, allowed {allowed:.0e}"
        check = dict(name=name, kind=name.partition(":")[0], diff=diff, allowed=allowed)
        self.checks[name] = dict(check, text=text, is_formula=is_formula)
        return diff <= allowed  # False for nan

    def agree(self, name: str, got, expected, allowed: float) -> float:
        """Check a tensor against its reference. Returns their relative difference."""
        diff = rel_diff(got, expected, LEAST.get(name.partition(":")[0], 0.0))
        text = "" if diff <= allowed else difference(got, expected)
        self.check(name, diff, allowed, text)
        return diff

    def compare(self, kind, runs: dict, allowed: float, brief=False, fold=str) -> None:
        """Compare values of several runs with the first run: run → name → value.

        A row has the norm of each value and the largest difference of any element.
        brief: rows that all hold are one line, which names what is compared.
        fold: name → its row (str: its own); all values of a row are compared.
        """
        first = next(iter(runs))
        rows = {}  # row → names of its values
        diffs = {}  # (row, run) → the largest difference
        for run, values in runs.items():
            for name in runs[first] | values:  # your edit may have added or removed one
                row = fold(name)
                rows.setdefault(row, {})[name] = None
                if run != first:
                    got = values.get(name, math.nan)
                    expected = runs[first].get(name, math.nan)
                    diff = self.agree(f"{kind}: {name}, {run}", got, expected, allowed)
                    diffs[row, run] = max(diff, diffs.get((row, run), 0.0))
        worst = max(diffs.values(), default=0.0)
        if brief and diffs and worst <= allowed:
            names = list(runs[first])
            name = names[0] if len(names) == 1 else f"all {len(names)}"
            return self.say(f"{kind}: {name} as {first}; largest diff {worst:.1e}")
        raised = [] if brief else self.raised
        cells = lambda row: cells_of(row, rows[row], runs, diffs, allowed, raised)
        self.table([cells(row) for row in rows])

    def check_replicas(self, tensors: dict[str, Tensor], group) -> None:
        """After training, what is replicated must be bitwise identical on all ranks."""
        axis = group.group_desc
        differ = []
        for name, x in tensors.items():
            copies = all_gather(x[None], 0, group)
            diff = max(rel_diff(copy, copies[0]) for copy in copies)
            text = f"ranks of {axis} differ by {diff:.2g}"
            if not self.check(f"replicas: {name}, {axis}", diff, text=text):
                differ.append(name)
        names = f" ({', '.join(tensors)})" if len(tensors) < 4 else ""
        text = f"{len(tensors) - len(differ)} of {len(tensors)}{names} are"
        self.say(f"Replicas over {axis}: {text} bitwise identical after training.")
        if differ:
            self.say(f"✗ They differ between ranks: {', '.join(differ)}")

    def expect(self, name: str, got: int, formula: str, **size: int) -> dict:
        """Check measured bytes against a formula; size: letters that differ here."""
        predicted = evaluate(formula, self.size | size)
        text = f"{got:,} bytes, the lesson's formula {formula} gives {predicted:,}"
        holds = self.check(name, abs(got - predicted), text=text, is_formula=True)
        ok = "ok" if holds else f"≠{predicted:,}"
        return {"bytes": f"{got:,}", "formula": formula, "ok": ok}

    def ledger(self, formulas: dict[tuple, tuple[int, str]], brief=()) -> list[dict]:
        """Calls and bytes per step, as counted, against the lesson's formulas.

        formulas: (run, phase, collective, axis) → (calls, formula of the bytes).
        brief: runs or phases whose rows are one line if they hold. Returns the others.
        """
        if dist.get_world_size() == 1:
            self.say("One rank sends nothing.")
            return []
        rows = []
        for call in formulas | METER.calls:  # what no formula predicts has a row, too
            if call[0] not in self.raised:
                calls, formula = formulas.get(call, (0, "0"))
                rows.append(self.ledger_row(call, calls, formula))
        is_brief = lambda row: row["run"] in brief or row["phase"] in brief
        shown = [row for row in rows if row["ok"] != "ok" or not is_brief(row)]
        for column in ("run", "axis"):  # one that says the same in all rows is left out
            if len({row[column] for row in shown}) == 1:
                for row in shown:
                    del row[column]
        self.table(shown)
        if len(shown) < len(rows):
            count = len(rows) - len(shown)
            self.say(f"Rows that hold, not shown: {count} of {', '.join(brief)}")
        return shown

    def ledger_row(self, call: tuple, calls: int, formula: str) -> dict:
        """Check one kind of call: how many, and their bytes. Cells of a table."""
        run, phase, collective, axis = call
        name = " ".join(call)
        payloads = METER.calls.get(call, [])
        payload = sum(payloads) // self.steps
        sent = ring(collective, payload, METER.ranks.get(axis, 1))
        self.sent[run] = self.sent.get(run, 0) + sent
        row = {"run": run, "phase": phase, "collective": collective, "axis": axis}
        row["calls"] = f"{len(payloads) / self.steps:g}"
        row.update(self.expect(f"bytes: {name}", payload, formula))
        row.update(ring=f"{sent:,}", ok=row.pop("ok"))  # the last column
        text = f"{row['calls']} calls per step, the lesson has {calls}"
        diff = abs(len(payloads) / self.steps - calls)
        if not self.check(f"calls: {name}", diff, text=text, is_formula=True):
            row["calls"] += f"≠{calls}"
            row["ok"] = row["ok"].replace("ok", "≠")
        return row

    @contextmanager
    def guard(self, run: str, is_formula=False):
        """Within `with`: an error that all ranks raise ends this run, not the lesson.

        is_formula: True for a plan of PyTorch's, which may not fit an edited model.
        """
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [x for x in frames if x.filename == os.path.abspath(LESSON)]
            at = [x for x in own or frames if x.name != "__torch_dispatch__"][-1]
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            text += f" (line {at.lineno}, in {at.name})"  # the lesson's, not METER's
            said = f"rank {dist.get_rank()}, {run}: {text}; last call: {METER.last}"
            print(said, file=sys.stderr, flush=True)
            if not is_raised_by_all(run, error, at.lineno):
                raise
            self.raised.append(run)
            self.check(f"runs: {run}", math.inf, 0.0, text, is_formula)

    def verdict(self, args) -> str:
        """Print PASS, or what failed on any rank. Returns "", or what was printed."""
        checks = self.of_all_ranks()
        word, lines = words_of_verdict(checks)
        text = "".join(f"\n{fill(line)}" for line in lines)
        print(f"\n{text.strip()}", flush=True)
        if args.json and dist.get_rank() == 0:
            data = dict(verdict=word, ranks=args.ranks, dtype=args.dtype)
            data.update(size=self.size, checks=checks, rows=self.rows)
            args.json.write_text(json.dumps(data, indent=1))
        return text if word == "FAIL" else ""

    def of_all_ranks(self) -> list[dict]:
        """The checks of all ranks: each with the ranks on which it fails."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.checks)
        merged = {}
        for rank, checks in enumerate(everyone):
            for name, check in checks.items():
                found = merged.setdefault(name, dict(check, ranks=[]))
                if not check["diff"] <= check["allowed"]:  # also nan
                    found["ranks"].append(rank)
                if check["diff"] > found["diff"]:  # the worst rank says what is wrong
                    found.update(check)
        return list(merged.values())


def cells_of(row, names, runs: dict, diffs: dict, allowed: float, raised: list) -> dict:
    """A row of Report.compare: each run's norm, and the largest difference."""
    cells = {"name": row}
    for run, values in runs.items():
        values = [values.get(name, math.nan) for name in names]
        holds = diffs.get((row, run), 0.0) <= allowed
        cells[run] = norm(values) if holds else norm(values, 6) + "✗"
    cells.update(dict.fromkeys(raised, "raised"))
    if diffs:
        worst = max(diffs.get((row, run), 0.0) for run in runs)
        cells.update(diff=f"{worst:.1e}", ok="ok" if worst <= allowed else "✗")
    return cells


def is_raised_by_all(run: str, error: Exception, line: int) -> bool:
    """Do all ranks raise this error here, after the same number of collectives?"""
    is_lost = "Timed out" in str(error) or "Connection" in str(error)
    store = dist.distributed_c10d._get_default_store()
    what = f"{type(error)} {line} {METER.count} {is_lost}"
    store.set(f"{run}/{dist.get_rank()}", what)
    if is_lost:
        time.sleep(2)  # a rank that has raised another error ends first
        return False
    keys = [f"{run}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(keys, 2 * store.timeout)  # others may raise only after --timeout
    return len({store.get(key) for key in keys}) == 1


LESSON = Path(sys.argv[0])  # the script that was started
fill = textwrap.TextWrapper(88, subsequent_indent="  ", break_on_hyphens=False).fill
WHERE = "Where it begins: torchrun --standalone --nproc_per_node="  # after a failure
WHERE += f"{os.environ.get('WORLD_SIZE', 2)} tools/doctor.py {' '.join(sys.argv)}"
# Kinds of checks, as a step computes what they compare: the first that fails is nearest
# the cause, the others follow from it. Kinds that are not listed come last.
CAUSES = "runs outputs gradients replicas norms losses parameters".split()


def words_of_verdict(checks: list[dict]) -> tuple[str, list[str]]:
    """PASS or FAIL, and the lines to print; the last one says it."""
    formulas = []  # that do not hold
    kinds = {}  # "gradients" → its checks that failed
    for check in checks:
        if check["ranks"] and check["is_formula"]:
            formulas.append(check)
        elif check["ranks"]:
            kinds.setdefault(check["kind"], []).append(check)
    lines = [f"≠ {x['name']}: {x['text']}" for x in formulas[: 3 if kinds else 99]]
    if kinds:
        text = ", ".join(f"{kind} ({len(kinds[kind])})" for kind in kinds)
        last = f"FAIL  {LESSON.stem}  wrong: {text}. {WHERE}"
        return "FAIL", lines + name_causes(kinds) + [last]
    worst = max((check["diff"] for check in checks if not check["ranks"]), default=0.0)
    last = f"PASS  {LESSON.stem}  {len(checks)} checks, worst difference {worst:.1e}"
    if formulas:
        last += f"; {len(formulas)} formulas describe another model or split"
    return "PASS", lines + [last]


def name_causes(kinds: dict[str, list[dict]]) -> list[str]:
    """A line for each kind of failed check, causes before what follows from them."""
    is_forward = any("loss, step 1," in x["name"] for x in kinds.get("losses", []))
    order = CAUSES + list(kinds)
    if is_forward:  # that loss is before any update, and gradients follow from it
        order.insert(order.index("gradients"), "losses")
    lines = []
    for kind in sorted(kinds, key=order.index):
        check = kinds[kind][0]
        if kind == "gradients" and not is_forward:
            # Backward begins at the output: the last one of a run is nearest the cause.
            run = check["name"].rpartition(", ")[2]
            check = [x for x in kinds[kind] if x["name"].endswith(run)][-1]
        lines.append(f"✗ {check['name']}: {check['text']}, on ranks {check['ranks']}")
    return lines


def launch(main, sizes, parser: argparse.ArgumentParser) -> None:
    """One rank: flags, process group, lesson, verdict, exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it where it waits
    with suppress(AttributeError, OSError):  # Linux: a message stops no computing rank
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know ≠
    try:
        args = read_flags(parser)
        report = Report(sizes(args), getattr(args, "steps", 1))  # sizes may refuse one
    except (ValueError, OSError) as error:
        refuse(error)
    if os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # every rank checks, rank 0 prints
    backend = "gloo" if args.device == "cpu" else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(args.device)
    torch.set_num_threads(1)  # ranks share the cores
    limit = timedelta(seconds=args.timeout)
    try:
        # If torchrun restarts the ranks, their store has what the last attempt wrote.
        store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, store)
        dist.init_process_group(backend, None, limit, ranks, rank, store)
        mesh = getattr(args, "mesh", f"tp {args.ranks}")
        where = f"{backend} on {torch.device(args.device).type}"
        print(f"{LESSON.stem}  ranks {args.ranks}, mesh {mesh}  {where}  {args.dtype}")
        print("  ".join(f"{letter} {number}" for letter, number in report.size.items()))
        main(args, report)
        failures = report.verdict(args)
    except Exception as error:
        end_with_error(error)
    dist.barrier()
    dist.destroy_process_group()
    if failures and os.environ["LOCAL_RANK"] == "0":  # torchrun reports one rank
        end(failures, 1)
    sys.stdout.flush()
    os._exit(0)  # a normal exit takes half a second, and DTensor's caches hold groups


def read_flags(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the flags that all lessons have."""
    parser.error = refuse  # argparse itself would print its usage, on every rank
    parser.allow_abbrev = False
    text = "float64 separates bugs from rounding errors"
    parser.add_argument("--dtype", choices=list(ALLOWED), default="float32", help=text)
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--timeout", type=positive, default=60, help="seconds per call")
    parser.add_argument("--json", type=Path, help="write all checks and rows there")
    args = parser.parse_args()
    if args.json:
        args.json.open("a").close()  # an error now, not after the run
    if "LOCAL_RANK" not in os.environ:
        command = "torchrun --standalone --nproc_per_node=2"
        raise ValueError(f"start it with torchrun: {command} {' '.join(sys.argv)}")
    args.ranks = int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    args.device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    return args


def positive(text: str) -> int:
    """A flag's value: a number from 1 on."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def must_divide(args, name: str, parts: int, what: str) -> None:
    """Refuse a flag's value that `parts` does not divide, with a value that works."""
    value = getattr(args, name)
    if value % parts:
        flag = f"--{name.replace('_', '-')}"
        reason = f"{flag} {value}: {value} % {parts} {what} = {value % parts}, not 0"
        raise ValueError(f"{reason}; take {flag} {value + parts - value % parts}")


def refuse(reason) -> None:
    """End with one `error:` line, before any collective runs."""
    time.sleep(0 if os.environ.get("LOCAL_RANK", "0") == "0" else 60)  # one says it
    text = fill(f"error: {reason}")
    print(text, file=sys.stderr)
    end(text, 2)


def end_with_error(error: Exception) -> None:
    """End this rank: torchrun's report has the lesson's lines that led to the error."""
    frames = traceback.format_tb(error.__traceback__)
    text = "".join(x for x in frames if "site-packages" not in x)  # not PyTorch's
    text = f"\n{text}{type(error).__name__}: {error}\nrank {os.environ['RANK']}; "
    text += f"its last call: {METER.last}\n{WHERE}"
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # not started by torchrun
        print(text, file=sys.stderr)
    end(text, 1)


def end(text: str, code: int) -> None:
    """End this rank with an error: torchrun's report of it ends with this text."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        path.write_text(json.dumps({"message": message}))
    sys.stdout.flush()
    time.sleep(1)  # other ranks report their errors, too, or have ended
    os._exit(code)


# endregion


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    launch(main, matrix_sizes, parser)
