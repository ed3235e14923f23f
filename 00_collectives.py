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
carries tensors between CPUs, NCCL between NVIDIA GPUs. (The lessons use NCCL if there
is a GPU for each rank; nothing else changes.)

What you will see: five sections; every rank checks every value, and bytes of calls.
    1  the three placements of a tensor: replicated, sharded, partial
    2  five collectives, and send/recv; an all-reduce is made of two of them
    3  an all-reduce by hand, built from send/recv as a ring
    4  the four cases of a sharded matrix product
    5  common mistakes: a view, the order of calls, using an async result too early
`--only 2` prints section 2 only. `--break list` lists bugs that `--break NAME` injects.

Exercises (answers: notebooks/00_collectives.ipynb, in the section that is named):
    Run with --break order, then --break skip. Why does one give wrong numbers without
        an error, while the other waits until a timeout? (section 8)
    In matmul_case_3_reduce_scatter, scatter dim 0 instead of dim 1. The row marks C
        with ✗, but its bytes stay right. What is computed now? (section 10, no. 3)
    Write an all-reduce by recursive doubling: in step i, exchange everything with rank
        (rank XOR 2^i) and add. Print it in show_all_reduce_by_hand: it takes
        log2(T) steps instead of 2·(T − 1). From T = 4 on each rank sends more, and T
        must be a power of 2. (section 4)

How to read this file: NEW is the lesson. RUN calls it and prints; `report` makes tables
and COMM counts, both in HARNESS, which you can skip. BREAK IT lists the bugs. Words are
explained in docs/glossary.md.

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

import argparse
import math
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# ==== NEW in 00: collectives
# Read lines 76 to 344, in about 27 minutes. Stop at RUN.

# Before main, every rank runs these lines (they are in `launch`, in HARNESS):
#     dist.init_process_group("gloo")   # "nccl" on GPUs; waits for all ranks
#     torch.manual_seed(1)              # one seed: torch.randn gives all ranks the same
# A group is a set of ranks that make calls together. A rank has a number in each of its
# groups, group.rank(), and a global one, dist.get_rank(): in the group [2, 3], group
# rank 0 is global rank 2. All that follows needs one group, of all ranks:
#     group = dist.new_group(group_desc="tp")   # "tp": the name that COMM prints


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
# these calls; lesson 01 wraps some of them in autograd.Functions. In a group of one
# rank collectives send nothing. COMM.record counts a call and its payload (bytes of a
# rank's input, or its output if that is larger), and knows in a hang who is where.


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    op: dist.ReduceOp.MAX, MIN, … instead of the sum.
    Shapes: x [...] → [...]. Communication: 1 call on x's elements.
    """
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    Shapes: x [.., i, ..] → [.., T·i, ..]. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    Shapes: x [.., I, ..] → [.., I/T, ..]. Communication: 1 call on x's elements.
    """
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    Shapes: x [...] → [...], Replicate(). Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            # group_src is a number in the group; src= would be the global rank.
            dist.broadcast(out, group_src=src, group=group)
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Cut x into T parts along dim, send part j to rank j, join what arrives along dim.

    Shapes: x [.., I, ..] → [.., I, ..]. Communication: 1 call on x's elements.
    """
    # One tensor [T, ...]: row j is for rank j. In the result, row j is from rank j.
    parts = torch.stack(split(x.detach(), dim, group.size()))
    out = parts.clone()
    if group.size() > 1:
        with COMM.record("all-to-all", x, group):
            dist.all_to_all_single(out, parts, group=group)
    return torch.cat(list(out), dim)


def send_recv(
    x: Tensor, dst: int, like: Tensor, src: int, group: dist.ProcessGroup
) -> Tensor:
    """Send x to group rank dst and receive a tensor shaped `like` from group rank src.

    Both are started before either is waited for: if every rank first waited until its
    own send had ended, a ring would deadlock. Counted: the bytes that this rank sends.
    """
    x = x.detach().contiguous()
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    with COMM.record("send/recv", x, group):
        send = dist.P2POp(dist.isend, x, group=group, group_peer=dst)
        receive = dist.P2POp(dist.irecv, out, group=group, group_peer=src)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
    return out


# ---- An all-reduce by hand


def ring_all_reduce(x: Tensor, group: dist.ProcessGroup, on_step=None) -> Tensor:
    """All-reduce by hand: each rank sends only to the next rank on a ring.

    x is cut into T chunks. The chunk that each rank sends to its right, for T = 3:

        step   rank 0   rank 1   rank 2   and the receiver
        1         2        0        1     adds its own chunk of that number
        2         1        2        0     adds; now rank r has the sum of chunk r
        3         0        1        2     keeps the sum instead of its own chunk
        4         2        0        1     keeps it; now all ranks have all sums

    Follow chunk 0: it starts on rank 1, passes rank 2, and is complete on rank 0 after
    T − 1 steps. These steps are a reduce-scatter, the T − 1 others an all-gather.

    on_step: called with the step's name and the list of chunks after each step.
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
        if step < T:
            name = f"reduce-scatter {step}"
            chunks[recv_chunk] = chunks[recv_chunk] + arrived
        else:
            name = f"all-gather {step - T + 1}"
            chunks[recv_chunk] = arrived
        if on_step:
            on_step(name, chunks)
    return torch.cat(chunks).view(x.shape)


def ring_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends for a payload of nbytes.

    Once around the ring is T − 1 steps of 1/T of the payload; an all-reduce goes around
    twice. For a broadcast it is a mean: all ranks but the last pass all of x on.
    """
    if collective == "send/recv":
        return nbytes
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return round(rounds * nbytes * (ranks - 1) / ranks)


# ---- Two rules: wait before use, and one order of calls


def async_all_reduce(x: Tensor, group, other_work: Callable = lambda: None) -> Tensor:
    """Start an all-reduce, do other work, and only then wait for the sum (async_op)."""
    out = x.clone()  # the call overwrites its argument
    with COMM.record("all-reduce", out, group):
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
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    size = matrix_sizes(args)
    report.begin({"tp": args.ranks}, size)

    show_three_placements(report, size["n"], tp_group)
    show_collectives(report, size["n"], tp_group)
    show_all_reduce_by_hand(report, size["n"], tp_group)
    # Every rank has the full matrices, so each can compute what must come out.
    a_IJ = random_matrix(size["I"], size["J"], args)
    b_JK = random_matrix(size["J"], size["K"], args)
    show_products(report, a_IJ, b_JK, size, tp_group)
    show_mistakes(report, tp_group)


def count_from(start: int, size: int, args) -> Tensor:
    """The vector start, start + 1, … in the run's dtype."""
    dtype = getattr(torch, args.dtype)
    return start + torch.arange(size, device=args.device).to(dtype)


def random_matrix(rows: int, columns: int, args) -> Tensor:
    """Small integers, so that every sum is exact; the same on every rank."""
    dtype = getattr(torch, args.dtype)
    return torch.randint(-2, 3, (rows, columns)).to(args.device, dtype)


def as_text(x: Tensor) -> str:
    """The elements in one line, [ 0  1 10]; of five or more the ends."""
    texts = [f"{value:2.0f}" for value in x.flatten().tolist()]  # 2 wide: columns align
    if len(texts) > 4:
        texts[2:-1] = ["…"]
    return f"[{' '.join(texts)}]"


def check_value(report, row: dict, column: str, name: str, got, expected) -> None:
    """Compare two tensors on this rank; if they differ, mark a cell of the row."""
    off = row.setdefault("off", [])
    # Sums of integers are exact in any order; of other numbers, if you have edited it.
    allowed = 0.0 if torch.equal(expected, expected.round()) else report.allowed
    if not report.check_tensor("values", name, got, expected, allowed):
        off.append(column)


def check_calls(report, row: dict, run: str, formula: str, size, group) -> None:
    """Add calls, bytes, ring and formula to a row, and check them.

    Args:
        run: label of the calls to add up; only those on the group's axis count.
        formula: bytes of the one call that a group makes; "0" if it makes none.
    """
    row.update({"calls": 0, "bytes": 0, "ring": 0, "formula": formula})
    for call, calls in COMM.calls.items():
        if call.run == run and call.axis == group.group_desc:
            row["calls"] += calls
            row["bytes"] += COMM.bytes[call]
            # ring: the bytes that a rank of a ring would send for this payload.
            row["ring"] += ring_bytes(call.collective, COMM.bytes[call], group.size())
    calls = 0 if formula == "0" or group.size() == 1 else 1  # one rank sends nothing
    name = f"{run} over {group.group_desc}"
    report.expect(row, "calls", "calls", name, calls)
    report.expect(row, "bytes", "bytes", name, calls * evaluate(formula, size))


# ---- The sections of the output, in order


def show_three_placements(report: Report, n: int, group) -> None:
    """The tensor A = 0, 1, 2, … replicated, sharded and partial."""
    full = count_from(0, n, report.args)
    sharded = shard(full, 0, group)
    # Any tensors that sum to A are partial. The others hold 1s, and rank 0 the rest.
    partial = torch.ones_like(full)
    if group.rank() == 0:
        partial = full - (group.size() - 1)

    columns = ("PyTorch's word", "Replicate()", "Shard(0)", "Partial()")
    words = ("in this course", "A[I]", "A[I_tp]", "A[I] {U_tp}")
    held = [f"rank {group.rank()}", *map(as_text, (full, sharded, partial))]
    rows = [dict(zip(columns, words), ok=None)]
    rows.extend(gather_objects(dict(zip(columns, held), ok=None)))
    # Only the last row is checked: it says how each rank gets A.
    to_get_a = ("to get A", "nothing to do", "all-gather", "all-reduce")
    row = dict(zip(columns, to_get_a), ok=None)
    joined = all_gather(sharded, 0, group)
    summed = all_reduce(partial, group)
    check_value(report, row, "Shard(0)", "sharded, all-gather", joined, full)
    check_value(report, row, "Partial()", "partial, all-reduce", summed, full)
    report.section("Three placements of a tensor A: replicated, sharded, partial")
    report.say("   A is 0, 1, 2, … Partial tensors add up to A, element by element.")
    report.table("placements", [*rows, row])


def show_collectives(report: Report, n: int, group) -> None:
    """Five collectives and send/recv: what every rank has before and after."""
    T = group.size()
    rank = group.rank()
    # Every rank knows what all ranks start with, so it can tell what must come out.
    xs = [count_from(10 * r, n, report.args) for r in range(T)]
    x = xs[rank]
    total = sum(xs)
    slice_of_sum = reduce_scatter(x, 0, group)
    slices = torch.cat([split(x_of_r, 0, T)[rank] for x_of_r in xs])
    right = (rank + 1) % T
    left = (rank - 1) % T
    # Each: what a rank gets; the function and its arguments; what must come out.
    sums = [
        ("all-reduce", "the sum", all_reduce, (x, group), total),
        ("reduce-scatter", "a slice of it",
         reduce_scatter, (x, 0, group), shard(total, 0, group)),
        ("all-gather", "all slices of it",
         all_gather, (slice_of_sum, 0, group), total),
    ]  # fmt: skip
    copies = [
        ("broadcast", f"rank {T - 1}'s", broadcast, (x, T - 1, group), xs[T - 1]),
        ("all-to-all", "a slice of each", all_to_all, (x, group), slices),
        ("send/recv", "the rank before's",
         send_recv, (x, right, x, left, group), xs[left]),
    ]  # fmt: skip
    if T == 1:  # one rank has no other to send to
        copies.pop()
    report.section("Five collectives and send/recv: rank r has 10·r, 10·r + 1, …")
    report.say("   bytes = payload: a rank's input, or its output if that is larger")
    show_moves(report, x, sums, group)
    show_moves(report, x, copies, group)
    report.conclude("A reduce-scatter, then an all-gather: that is an all-reduce.")


def show_moves(report: Report, x: Tensor, moves: list[tuple], group) -> None:
    """Make some calls; show what every rank passes in and gets, and their payload."""
    gets = {"": "a rank gets", "before": ""}
    held = {"": f"rank {group.rank()}", "before": as_text(x)}
    payload = {"": "bytes", "before": "", "off": []}
    for name, effect, function, arguments, expected in moves:
        gets[name] = effect
        with COMM.label(name, ""):
            after = function(*arguments)
        held[name] = as_text(after)
        check_value(report, held, name, name, after, expected)
        # The payload is the full tensor: what goes in, or comes out of an all-gather.
        formula = str(max(arguments[0].nbytes, after.nbytes))
        counted = {}
        check_calls(report, counted, name, formula, {}, group)
        payload[name] = counted["bytes"]
        if counted["off"]:
            payload["off"].append(name)
    rows = [dict(gets, ok=None)]
    rows.extend(gather_objects(held))
    report.table("moves", rows + [payload])


def show_all_reduce_by_hand(report: Report, n: int, group) -> None:
    """All-reduces that are built from send/recv alone."""
    x = count_from(group.rank(), n, report.args)
    report.section("An all-reduce by hand, from send/recv alone")
    show_algorithm(report, ring_all_reduce, x, "2·(T-1)", "2·(T-1)·n·e", group)


def show_algorithm(report, algorithm, x, steps: str, sent: str, group) -> None:
    """An all-reduce by hand, on x and on n + 1 elements, a number T does not divide.

    Args:
        algorithm: called as algorithm(x, group, on_step); it calls send_recv.
        steps, sent: formulas for the number of steps, and for the bytes that all ranks
            together send. They may use T, n, e and log2().
    """
    rows = [algorithm_row(report, algorithm, x, steps, sent, group)]
    # tensor_split makes chunks of different lengths where T does not divide n.
    longer = torch.cat([x, x[:1]])
    rows.append(algorithm_row(report, algorithm, longer, steps, sent, group))
    name = algorithm.__name__
    report.say(f"   {name}, {steps} steps; all ranks together send {sent} bytes")
    report.table("by hand", rows, hide=["calls"])
    times = rows[0]["all send"] / (group.size() * x.nbytes)
    if times:
        report.conclude(f"On average a rank sends {times:.3g} times its tensor.")


def algorithm_row(report, algorithm, x, steps: str, sent: str, group) -> dict:
    """Run an all-reduce by hand; count its steps and its bytes."""
    size = {"T": group.size(), "n": len(x), "e": x.itemsize, "log2": math.log2}
    run = f"{algorithm.__name__} of {len(x)}"
    call = Call(run, "", "send/recv", group.group_desc)
    names = []  # of the steps
    with COMM.label(run, ""):
        result = algorithm(x, group, lambda name, chunks: names.append(name))
    by_rank = gather_objects(COMM.bytes[call])
    row = {"n": len(x), "steps": len(names), "calls": COMM.calls[call]}
    row["a rank sends"] = " or ".join(str(nbytes) for nbytes in sorted(set(by_rank)))
    # A rank may send more or less than others, so the formula is about all of them.
    row["all send"] = sum(by_rank)
    report.expect(row, "steps", "steps", run, evaluate(steps, size))
    report.expect(row, "all send", "bytes", run, evaluate(sent, size))
    check_value(report, row, "n", run, result, all_reduce(x, group))
    return row


def show_products(report: Report, a_IJ: Tensor, b_JK: Tensor, size, group) -> None:
    """The four cases of a sharded product, each in its variants."""
    a_iJ = shard(a_IJ, 0, group)
    a_Ij = shard(a_IJ, 1, group)
    b_jK = shard(b_JK, 0, group)
    b_Jk = shard(b_JK, 1, group)
    c_IK = a_IJ @ b_JK  # of which every result must be a slice, or all
    c_iK = shard(c_IK, 0, group)
    c_Ik = shard(c_IK, 1, group)
    # Each: three texts; payload in bytes; the function and its operands; the result.
    products = [
        ("1 A[I_tp, J] B[J, K]", "nothing", "C[I_tp, K]", "0",
         matmul_case_1, a_iJ, b_JK, c_iK),
        ("2 A[I, J_tp] B[J, K]", "AllGather A", "C[I, K]", "I·J·e",
         matmul_case_2_gather, a_Ij, b_JK, c_IK),
        ("2", "slice B, then 3", "C[I, K]", "I·K·e",
         matmul_case_2_slice, a_Ij, b_JK, c_IK),
        ("3 A[I, J_tp] B[J_tp, K]", "AllReduce", "C[I, K]", "I·K·e",
         matmul_case_3_all_reduce, a_Ij, b_jK, c_IK),
        ("3", "ReduceScatter", "C[I, K_tp]", "I·K·e",
         matmul_case_3_reduce_scatter, a_Ij, b_jK, c_Ik),
        ("4 A[I_tp, J] B[J, K_tp]", "AllGather A", "C[I, K_tp]", "I·J·e",
         matmul_case_4_left, a_iJ, b_Jk, c_Ik),
        ("4", "AllGather B", "C[I_tp, K]", "J·K·e",
         matmul_case_4_right, a_iJ, b_Jk, c_iK),
    ]  # fmt: skip
    rows = [product_row(report, product, size, group) for product in products]
    report.section("C[I, K] = A[I, J] · B[J, K]: the four cases of a sharded product")
    report.say(
        "   1: J is not split: nothing is sent. 2, 3: it is. 4: I and K over one axis\n"
        "   flops: one rank's; bytes: payload; ring: what a rank of a ring sends for it"
    )
    report.table("communication", rows, hide=["calls"])
    if group.size() > 1:
        reduced = rows[3]["ring"]
        scattered = rows[4]["ring"]
        text = f"On a ring an all-reduce sends {reduced:,} bytes, "
        report.conclude(text + f"a reduce-scatter {scattered:,}.")


def product_row(report: Report, product: tuple, size, group) -> dict:
    """Compute one product from this rank's slices; count its work and its bytes."""
    operands, action, result, formula, compute, a, b, expected = product
    name = compute.__name__
    # FlopCounterMode counts the floating-point operations of this rank's products.
    with COMM.label(name, ""), FlopCounterMode(display=False) as flops:
        c = compute(a, b, group)
    row = {"A and B are split": operands, "what to do": action}
    row.update({"C is split": result, "flops": flops.get_total_flops()})
    check_calls(report, row, name, formula, size, group)
    check_value(report, row, "C is split", name, c, expected)
    return row


def show_mistakes(report: Report, group) -> None:
    """What three common mistakes would change: a view, the call order, not waiting."""
    T = group.size()
    rank = group.rank()
    ones = torch.ones_like(count_from(0, 2, report.args))  # in the run's dtype
    sum_of_ranks = T * (T - 1) // 2

    # Transposed: the elements are no longer in the order of their memory.
    view = (count_from(0, 4, report.args) + rank).view(2, 2).T
    before = view.clone()
    summed = all_reduce(view, group)
    expected = T * (before - rank) + sum_of_ranks
    name = "all-reduce of a transposed view"
    rows = [mistake_row(report, name, before, summed, expected)]
    rows.append(mistake_row(report, "the view itself afterwards", before, view, before))

    before = torch.cat([ones, 10 * ones])
    summed = torch.cat(two_all_reduces(ones, 10 * ones, group))
    name = "two sums, first 1s, then 10s"
    rows.append(mistake_row(report, name, before, summed, T * before))

    # So that reading too early fails every time, on any machine: the last rank starts
    # only when rank 0 has started and does its other work. COMM.store is a key-value
    # store of all ranks, and rank 0 writes a key there.
    started = "rank 0 has started its all-reduce"
    if T > 1 and rank == T - 1:
        COMM.store.wait([started])
    announce = lambda: COMM.store.set(started, "") if rank == 0 else None
    # A copy: a sum that no rank waited for arrives later.
    summed = async_all_reduce(rank * ones, group, announce).clone()
    name = "a sum started, then waited for"
    rows.append(mistake_row(report, name, rank * ones, summed, sum_of_ranks * ones))

    report.section("Common mistakes: what must come out (--break view, order, wait)")
    report.say("   Rank r starts with rank 0's elements + r (in row 3 with the same).")
    report.table("mistakes", rows)


def mistake_row(report: Report, name: str, before, after, expected) -> dict:
    """A row of section 5; it shows rank 0, but every rank checks its own values."""
    texts = gather_objects([as_text(before), as_text(after)])[0]
    row = {"": name, "rank 0 before": texts[0], "after": texts[1]}
    check_value(report, row, "after", name, after, expected)
    return row


# ==== BREAK IT

# Bugs that people have shipped, each an edit of a definition above.
BREAKS = {
    "skip": dict(
        target="all_reduce",
        old="    if group.size() > 1:",
        new="    if group.rank() != group.size() - 1:",
        what="the last rank skips its all-reduce, which is under an `if` on the rank",
        symptom="no error at first: the others block until the timeout aborts the job",
        why="no rank can complete an all-reduce before all ranks have called it. (If "
        "the last rank's next call has the same type and size, it is matched with the "
        "skipped one: silently wrong sums.)",
        reported="github.com/pytorch/pytorch/issues/115964, …/97191",
    ),
    "order": dict(
        target="two_all_reduces",
        old="    sum_x = all_reduce(x, group)\n    sum_y = all_reduce(y, group)\n",
        new="    last = group.rank() == group.size() - 1\n"
        "    sum_y = all_reduce(y, group) if last else None\n"
        "    sum_x = all_reduce(x, group)\n"
        "    sum_y = sum_y if last else all_reduce(y, group)\n",
        what="the last rank calls two all-reduces in the other order",
        symptom="no error, no hang: one rank's x was added to the others' y",
        why="calls are matched by their order only, not by the names of variables",
        reported="github.com/pytorch/pytorch/issues/109401",
    ),
    "shapes": dict(
        target="all_reduce",
        old="    out = x.detach().clone(memory_format=torch.contiguous_format)\n",
        new="    more = 2 if group.rank() == group.size() - 1 else 0\n"
        "    out = torch.cat([x.flatten(), x.new_zeros(more)])\n",
        what="the last rank passes in a longer tensor than the others",
        symptom="gloo aborts a process, or all wait, or some ranks get wrong sums",
        why="no rank tells the others its shape: each assumes that all have its own",
        reported="github.com/pytorch/pytorch/issues/97191",
    ),
    "view": dict(
        target="all_reduce",
        old="    out = x.detach().clone(memory_format=torch.contiguous_format)\n"
        "    if group.size() > 1:\n"
        '        with COMM.record("all-reduce", out, group):\n'
        "            dist.all_reduce(out, op, group=group)\n",
        new="    out = x.detach().clone()\n"
        "    if group.size() > 1:\n"
        '        with COMM.record("all-reduce", out, group):\n'
        "            dist.all_reduce(out.contiguous(), op, group=group)\n",
        what="an in-place all-reduce of a view that is not contiguous",
        symptom="contiguous tensors are summed; a transposed one stays as it was",
        why="`.contiguous()` of such a view is a copy: the sum goes into the copy, and "
        "the copy is dropped",
        reported="github.com/NVIDIA/Megatron-LM/issues/5337",
    ),
    "wait": dict(
        target="async_all_reduce",
        old="    other_work()  # must neither read nor write `out`\n",
        new="    out = out.clone()\n    other_work()\n",
        what="the result of an async all-reduce is used before work.wait()",
        symptom="no error: a rank computes with its own x, or with a part of the sum. "
        "In most programs it happens only now and then, because it is a race",
        why="async_op=True only starts the sum; until wait() returns, the tensor may "
        "hold anything",
        reported="github.com/OpenNMT/OpenNMT-py/issues/2295",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    return lesson_parser(__doc__, BREAKS, sections=5).parse_args()


def matrix_sizes(args) -> dict[str, int]:
    """The letters of the shape legend: T divides I, J, K and n."""
    T = args.ranks
    e = getattr(torch, args.dtype).itemsize
    n = 2 * T if T <= 2 else T  # a row of text must fit the screen
    return dict(n=n, I=2 * T, J=4 * T, K=3 * T, T=T, e=e)


# ---- The flags that all lessons share


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, sections: int, **sizes: int) -> Parser:
    """The flags that all lessons share, and integer flags with their defaults.

    sections: how many sections the output has. sizes: flag → default; 0 for a default
    that is derived from the mesh.
    """
    parser = Parser(
        description=(doc or "").partition("How to read")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, default in dict(sizes, seed=1).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "seconds that a call may wait (default 60; with --break at most 15)"
    add("--timeout", type=positive, default=60, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=range(1, sections + 1), metavar="N", help=text)
    add("--verbose", action="store_true", help="print all rows of all tables")
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def read_flags(parse_args, module: dict) -> argparse.Namespace:
    """The command line; the process ends here if it is wrong, or asks for a list."""
    try:
        if not module["__doc__"]:
            raise ValueError("PYTHONOPTIMIZE=2 removes docstrings, our training text")
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            for name, edit in module["BREAKS"].items():
                print(f"{name:<14}{edit['what']}")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: one rank shows no bug")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        # One rank of each host reports: on several hosts the flags may differ.
        is_reporter = os.environ.get("LOCAL_RANK", "0") == "0"
        if not is_reporter:
            time.sleep(10)  # torchrun ends this rank as soon as the other has said it
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
        # Each barrier would warn that it uses this GPU. It should.
        warnings.filterwarnings("ignore", r"barrier\(\): using the device")
    return args


# ---- Calls of PyTorch that a lesson makes directly

COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
    "broadcast all_to_all all_to_all_single reduce gather scatter"
).split()


def watch_calls() -> None:
    """From here on, calls of dist are checked; groups are created in a named call."""
    FORWARD.watch()
    for name in COLLECTIVES + ["new_group", "new_subgroups_by_enumeration"]:
        watch = watch_new_groups if name.startswith("new_") else refuse_direct_calls
        setattr(dist, name, watch(getattr(dist, name)))


def refuse_direct_calls(call: Callable) -> Callable:
    """A lesson's own call of a collective raises, unless COMM records it.

    Not refused: PyTorch's calls, and those of a DTensor.
    """

    def checked(*args, **kwargs):
        is_torch = {"COMM", "lesson00"}.isdisjoint(sys._getframe(1).f_globals)
        is_dtensor = args and type(args[0]).__name__ == "DTensor"
        if not (is_torch or is_dtensor or COMM.is_inside()):
            text = f"dist.{call.__name__} is called directly, so no table counts it; "
            raise RuntimeError(text + "use all_reduce(x, group) … of lesson 00")
        return call(*args, **kwargs)

    return checked


def watch_new_groups(call: Callable) -> Callable:
    """It waits for all ranks: note that this rank is in it, in case one hangs."""

    def watched(*args, **kwargs):
        before = COMM.status
        COMM.set_status(f"in call dist.{call.__name__}({args[0] if args else ''})")
        group = call(*args, **kwargs)
        COMM.set_status(before)
        return group

    return watched


# ---- What a failure says


class Output(NamedTuple):
    """What a module returned on this rank, in marks that can be compared."""

    shape: torch.Size
    norm: float
    mixed: float  # a sum with weights: it is another one in another order
    allowed: float  # relative difference


INPUT = "the model's input"


class FirstForward:
    """Notes down what each module returns in the first forward pass of each run."""

    def __init__(self):
        self.outputs = {}  # run → name of a module → its Output, in order of calls
        self.model = None  # while it is in its first forward pass
        self.names = {}  # module of this model → name

    def watch(self) -> None:
        """From here on, for all modules of this rank."""
        torch.nn.modules.module.register_module_forward_pre_hook(self.before)
        torch.nn.modules.module.register_module_forward_hook(self.after)

    def before(self, module, inputs) -> None:
        if COMM.phase == "forward" and COMM.run not in self.outputs:
            self.outputs[COMM.run] = {}
            self.model = module
            self.names = {part: name for name, part in module.named_modules()}
            self.note(INPUT, inputs[0] if inputs else None)

    def after(self, module, inputs, out) -> None:
        if self.model is not None and module in self.names:
            self.note(self.names[module] or "the model's output", out)
        if module is self.model:
            self.model = None

    def note(self, name: str, out) -> None:
        if type(out) is not Tensor:
            return
        if name in self.outputs[COMM.run]:
            name += ", called again"
        x = torch.view_as_real(out) if out.is_complex() else out
        allowed = ALLOWED.get(str(x.dtype).removeprefix("torch."), 1e-2)
        x = x.detach().flatten().double()
        x = x.where(x.isfinite(), 0)  # masked scores are −∞
        weights = torch.arange(len(x), device=x.device).double().cos()
        marks = Output(out.shape, x.norm().item(), (x @ weights).item(), allowed)
        self.outputs[COMM.run][name] = marks

    def where_wrong(self, run: str) -> str:
        """Between which modules a run's forward pass becomes wrong, in words.

        Compared with the first run. Nothing is said of a run that has other inputs, as
        micro-batches. Of modules inside one that is right nothing is said, either.
        """
        expected = next(iter(self.outputs.values()), {})
        ranks = gather_objects(self.outputs.get(run, {}))
        is_right = {}
        whole = []  # a list of names
        for name in ranks[0]:
            parts = [outputs[name] for outputs in ranks if name in outputs]
            if name in expected and len(parts) == len(ranks):
                is_right[name] = are_right(parts, expected[name])
                if all(part.shape == expected[name].shape for part in parts):
                    whole.append(name)
        if INPUT not in whole and not is_right.get(INPUT):
            return ""
        outer = tuple(f"{name}." for name in whole if is_right[name])
        texts = []
        for name in is_right:
            if name in whole and is_right[name]:
                texts = [f"right up to {name}"]
            if is_right[name] is False and not name.startswith(outer):
                texts.append(f"first seen wrong at {name}")
                break
        return f"; outputs of modules: {', '.join(texts)}" if texts else ""


def are_right(parts: list[Output], full: Output) -> bool | None:
    """Do the outputs of all ranks fit the one without TP? None: that cannot be said.

    Of an output in parts, one per rank, only the norm is compared: no rank knows how it
    was cut. So it may be found wrong, but is never called right.
    """
    off = full.allowed * full.norm
    if all(part.shape == full.shape for part in parts):
        return all(abs(part.mixed - full.mixed) <= off for part in parts)
    if sum(math.prod(part.shape) for part in parts) == math.prod(full.shape):
        norm = math.sqrt(sum(part.norm**2 for part in parts))
        return abs(norm - full.norm) <= off
    return None


FORWARD = FirstForward()


def difference(got, expected) -> str:
    """How a wrong tensor differs, if that can be said in words."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        text = lambda x: list(x.shape) if x.numel() else "none"  # this run has no such
        return f"shape {text(got)}, expected {text(expected)}"
    if got.numel() <= 4:
        values = lambda x: x.flatten().tolist()
        text = lambda x, n: " ".join(f"{value:.{n}g}" for value in values(x))
        digits = 16 if text(got, 7) == text(expected, 7) else 7
        return f"{text(got, digits)}, expected {text(expected, digits)}"
    if got.isnan().any():
        return f"{got.isnan().sum()} of {got.numel()} elements are nan"
    factor = ((got * expected).sum() / (expected * expected).sum()).item()
    if rel_diff(got, factor * expected) < 1e-4 and abs(factor - 1) > 1e-3:
        return f"{factor:.4g} times the expected tensor"
    return ""


def likely_cause(kind: str, failed: list[dict], forward_is_wrong: bool) -> dict:
    """The failed check that is named of those of one kind: in general the worst.

    Of losses and norms it is the first step; of gradients, if forward is right, the one
    nearest to the output, where backward begins.
    """
    if kind in ("losses", "norms"):
        return failed[0]
    if kind == "gradients" and not forward_is_wrong:
        parameter = failed[-1]["name"].rpartition(",")[0] or failed[-1]["name"]
        return next(c for c in failed if c["name"].startswith(parameter))
    return max(failed, key=lambda check: check["diff"])


def in_words(check: dict) -> str:
    """A failed check: what was found, or by how much it is off."""
    diff = f"off by {check['diff']:.3g}, allowed {check['allowed']:.3g}"
    if check["allowed"] == 0 and check["diff"] < 1e-5:
        diff += " (only last bits differ: a sum in another order?)"
    text = check["text"] or f"{check['name']}: {diff}"
    text += f", on ranks {check['ranks']}"
    if check["name"].startswith("losses: loss, step 1, "):
        text += FORWARD.where_wrong(check["name"].split(", ")[2])
    return text


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front."""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def where_raised(error: Exception) -> str:
    """The lesson's line that raised, the module that was called, input and weights."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        # The last one in this file; `checked` is in refuse_direct_calls.
        if frame.filename == os.path.abspath(sys.argv[0]) and frame.name != "checked":
            lines = [f"line {frame.lineno}, in {frame.name}: {frame.line}"]
    root = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            root = root or module
            called = module
            inputs = frame.f_locals
    if root is None:
        return wrap(f"   {'; '.join(lines)}")
    names = {module: name for name, module in root.named_modules()}
    shapes = [list(x.shape) for x in inputs.values() if isinstance(x, Tensor)]
    lines.append(f"in {names.get(called) or 'the model'}, with tensors {shapes}")
    for name, layer in [("", called), *called.named_children()]:
        weights = [list(p.shape) for p in layer.parameters(recurse=False)]
        lines.append(f"{name} {type(layer).__name__} {weights}".strip())
    return wrap(f"   {'; '.join(lines)}")


# ---- How --break injects a bug


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy.

    In a script of beyond/ the target may be imported, from a lesson or a helper. The
    script and every module with our COMM that has it get the edited copy.
    """
    owner, _, name = edit["target"].rpartition(".")
    modules = [getattr(other, "__dict__", {}) for other in sys.modules.values()]
    modules = [module] + [other for other in modules if other.get("COMM") is COMM]
    home = next(other for other in modules if (owner or name) in other)
    definition = getattr(home[owner], name) if owner else home[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {}  # where the edited copy is defined
    names = getattr(definition, "__globals__", home)  # that the copy may use
    exec(source.replace(edit["old"], edit["new"]), names, scope)
    if owner:
        setattr(home[owner], name, scope[name])
        return
    for other in modules:
        if other.get(name) is definition:
            other[name] = scope[name]


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, where it was reported, and what the audit says."""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    if "audit" in edit:  # how it is found in a model of your own
        lines.append(wrap(f'audit: tools/audit.py reports it as "{edit["audit"]} …"'))
    return "\n".join(lines)


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis."""

    def on_sigterm(*_):
        exit_rank(0, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    # gloo aborts a rank that receives too much, and C calls only functions of C.
    args.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_sigterm)
    ctypes.CDLL(None).signal(signal.SIGABRT, args.on_abort)
    args.timeout = min(args.timeout, 15)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


# endregion


# ==== HARNESS, the same in every lesson
# region MEASURE: it counts, compares and prints tables. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import ctypes
import gc
import inspect
import itertools
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


class Calls(NamedTuple):
    """A formula: how many calls per step, and the payload of each in bytes."""

    count: str
    nbytes: str


class CommCounter:
    """Counts collectives, and tells other ranks which one this rank is in."""

    def __init__(self):
        self.calls = Counter()  # Call → number of calls
        self.bytes = Counter()  # Call → bytes of payload
        self.run = ""
        self.phase = ""
        self.store = None  # key-value store that all ranks share
        self.status = "in no call"
        self.entered = Counter()  # number of calls this rank has entered, by group

    @contextmanager
    def label(self, run: str, phase: str):
        """Within `with`: collectives are counted as this phase of this run."""
        before = [self.run, self.phase]
        self.run = run
        self.phase = phase
        try:
            yield
        finally:  # calls without a label are the report's own and are in no table
            self.run, self.phase = before

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        call = Call(self.run, self.phase, collective, axis)
        self.calls[call] += 1
        self.bytes[call] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one collective with a payload of copies · x.nbytes bytes."""
        axis = group.group_desc
        self.count(collective, copies * x.nbytes, axis)
        ranks = dist.get_process_group_ranks(group)
        with self.blocking(f"{collective} of {list(x.shape)} over {axis}", ranks):
            yield

    @contextmanager
    def blocking(self, call: str, ranks: list[int]):
        """Around a call that returns only after all these ranks have entered it."""
        before = self.status
        # The n-th call of one rank is matched with the n-th call of the others.
        self.entered[str(ranks)] += 1
        self.set_status(f"in call {self.entered[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.set_status(before)  # not after an error: this rank is still in the call

    def set_status(self, status: str) -> None:
        """Write down where this rank is, so that others can read it after an error."""
        self.status = status
        if self.store is not None:
            self.store.set(f"status/{dist.get_rank()}", status)

    def is_inside(self) -> bool:
        """Did a collective of this rank fail, and not the code between collectives?"""
        return self.status.startswith("in call")

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run, outside collectives?"""
        if self.is_inside():
            return False
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        until = time.monotonic() + 5
        while not self.store.check(keys):  # store.wait would print warnings of C++
            if time.monotonic() > until:  # some rank did not raise
                return False
            time.sleep(0.1)
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = "runs outputs gradients replicas norms losses parameters".split()
# Kinds of checks that describe the lesson's model. All others are about values.
FORMULAS = ["plans", "loss", "calls", "steps", "bytes", "memory"]

# What errors are compared with at least. AdamW moves a bias that starts at 0 by 0.003
# per step: three of these. A gradient may be 0 but for rounding errors of some 1e-10.
LEAST = {"parameters": 0.009, "gradients": 1e-4, "PyTorch": 1e-4}


def rel_diff(got, expected, least=0.0) -> float:
    """max|got − expected| / max(max|expected|, least); inf for nan or another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    scale = expected.abs().max().clamp(min=least)
    diff = ((got - expected).abs().max() / scale).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("the report's own call", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok, text
        self.raised = {}  # run → the error that ended it
        self.is_edited = False  # does the model without TP differ from the lesson's?
        self.agreeing = []  # brief tables: (text, the largest diff)
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int], note="") -> None:
        """Print the first lines. size: letter of the legend → number."""
        self.mesh = mesh
        self.data.update(mesh=mesh, size=size)
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))
        if note:
            print(wrap(note))
        if getattr(self.args, "steps", 0) > 100:
            print(f"First, {self.args.steps} steps of the reference, without output.")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def conclude(self, text: str) -> None:
        """End a section with what it shows, if no formula has failed before."""
        failed = {check["kind"] for check in self.checks.values() if not check["ok"]}
        if self.is_edited or not failed.intersection(FORMULAS):
            self.say(textwrap.indent(textwrap.fill(text, 85), "   "))

    def check(self, kind: str, name: str, diff: float, allowed=0.0, text="") -> bool:
        """Record one comparison of this rank, `text` in words. Does it hold?"""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        check = dict(kind=kind, diff=diff, allowed=allowed, ok=ok, text=text)
        self.checks[name] = check
        return ok

    def check_tensor(self, kind, name, got, expected, allowed=0.0, least=0.0) -> bool:
        """Compare two tensors or numbers on this rank."""
        diff = rel_diff(got, expected, least or LEAST.get(kind.split()[-1], 0.0))
        words = "" if diff <= allowed else difference(got, expected)
        text = f"{kind}: {name}: {words}" if words else ""
        return self.check(kind, name, diff, allowed, text)

    def expect(self, row, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        value = row[column]
        is_edit = self.is_edited and kind in FORMULAS
        words = "the lesson has" if is_edit else "predicted"
        unit = f" {kind}" if kind in ("calls", "steps", "bytes") else ""
        text = f"{name}: {value:,}{unit}, {words} {predicted:,}"
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(value - predicted), text=text):
            off.append(column)
            mark = f" ≠ {predicted:,}" if is_edit else text
            row.setdefault("predicted", {})[column] = mark

    def check_model(self, **formulas: tuple[int, int]) -> None:
        """Does the run without TP fit its own formulas? If not, it has been edited.

        formulas: what was measured → (bytes, predicted bytes). In an edited model only
        values decide, because all formulas describe another model.
        """
        for name, (got, predicted) in formulas.items():
            text = f"{name}, without TP: {got:,}, the lesson has {predicted:,}"
            name = f"the model's {name}"
            if not self.check("memory", name, abs(got - predicted), text=text):
                self.is_edited = True

    @contextmanager
    def column(self, run: str, kind="runs"):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if not COMM.all_raised(run, error):
                raise
            if dist.get_rank() == 0 and self.args.verbose:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            text = wrap(f"   {run} raised {self.raised[run]}")
            print(f"{text}\n{where_raised(error)}", flush=True)
        text = f"{run} raised {self.raised.get(run)}"
        self.check(kind, f"{run} completes", int(run in self.raised), text=text)

    def table(self, key: str, rows: list[dict], hide=(), brief: str = "") -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank; row["predicted"]
        has words about them. Cells that failed on any rank are marked. hide: columns
        that are not printed. brief: "16 replicas", for rows that only repeat that all
        is as it must be; without --verbose, those that hold are left to `agree`.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for place, other in enumerate(rows_of_rank):
                merge_row(rows, place, other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if brief and not self.args.verbose:
            worst = max([row.get("diff", 0.0) for row in rows], default=0.0)
            rows = [row for row in rows if row.get("off")]
            if not rows:
                self.agreeing.append((brief, worst))
        if rows:
            self.print_rows(rows, hide)

    def agree(self, how: str) -> None:
        """One line for the brief tables since the last one, as far as they hold."""
        if self.agreeing:
            worst = max(diff for text, diff in self.agreeing)
            what = ", ".join(text for text, diff in self.agreeing)
            how += f", worst {worst:.1e}" if worst else ""
            self.say(wrap(f"   {what}: {how}"))
        self.agreeing.clear()

    def print_rows(self, rows: list[dict], hide, is_short=False) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        notes = []  # below the table
        for row in rows:
            notes.extend(notes_on(row))
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted", "elsewhere"):
                continue
            texts = [name] + [marked_cell(row, name, is_short) for row in rows]
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        if max(map(len, lines)) > 88 and not is_short:
            return self.print_rows(rows, hide, is_short=True)  # ≠ alone, as it fits
        self.say("\n".join([line.rstrip() for line in lines] + notes))

    def compare(self, key, runs: dict, allowed=0.0, fold=str, brief: str = "") -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        its values, and as diff the largest relative difference of one element. brief:
        what is compared, "norms", if it only repeats that the runs agree.
        """
        allowed = allowed or self.allowed
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        has_others = len(runs.keys() - self.raised.keys()) > 1  # to compare with it
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                for run in self.raised:
                    rows[label].setdefault(run, "raised")
                if has_others:
                    rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                if run in self.raised:  # it ended before it had all values
                    row[run] = "raised"
                    continue
                value = values.get(name, torch.empty(0))  # empty: it has none
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                expected = reference.get(name, torch.empty(0))
                diff = rel_diff(value, expected, LEAST.get(key.split()[-1], 0.0))
                row["diff"] = max(row["diff"], diff)
                what = f"{name}, {run}"
                if not self.check_tensor(key, what, value, expected, allowed):
                    row["off"].append(run)
        brief = f"{len(names)} {brief}" if brief and has_others else ""
        self.table(key, list(rows.values()), brief=brief)

    def ledger(self, formulas: dict, size: dict, steps=1, hide=(), brief=()) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → a list of Calls; several if it makes calls of several sizes.
        brief: runs and phases whose rows are printed with --verbose only, or if wrong.
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            if call.run in runs and self.mesh.get(call.axis, 1) > 1:
                row = self.ledger_row(call, formulas.get(call, []), size, steps)
                if row["calls"] or row["off"]:
                    rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = list(hide)
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        less = [row for row in rows if row["run"] in brief or row["phase"] in brief]
        if self.args.verbose:
            less = []
        if self.args.ranks == 1 and "communication" not in self.data:
            self.say("   One rank sends nothing.")
        self.table("communication", [row for row in rows if row not in less], hide)
        if less:
            more = "more " if len(less) < len(rows) else ""
            more += "row" if len(less) == 1 else "rows"
            brief = f"{len(less)} {more} ({', '.join(brief)})"
            self.table("communication", less, hide, brief)
            self.agree("calls and bytes as predicted")

    def ledger_row(self, call: Call, terms: list[Calls], size: dict, steps) -> dict:
        row = call._asdict()
        row["calls"] = per_step(COMM.calls[call], steps)
        row["bytes"] = per_step(COMM.bytes[call], steps)
        row["formula"] = formula_text(terms)
        row["ring"] = ring_bytes(call.collective, row["bytes"], self.mesh[call.axis])
        calls = 0
        nbytes = 0
        for term in terms:
            calls += evaluate(term.count, size)
            # Multiplied before rounding: a size may be a mean over micro-batches.
            nbytes += evaluate(f"({term.count})·({term.nbytes})", size)
        self.expect(row, "calls", "calls", " ".join(call), calls)
        self.expect(row, "bytes", "bytes", " ".join(call), nbytes)
        return row

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks, in order: the largest diff, and where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                one = merged.setdefault(name, dict(check, name=name, ranks=[]))
                one["diff"] = max(one["diff"], check["diff"])
                if not check["ok"]:
                    if one["ok"]:  # the first rank where it fails says what is wrong
                        one.update(ok=False, text=check["text"])
                    one["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """Print PASS or FAIL, and above it what failed and what an edit changed."""
        checks = self.merge_checks()
        kinds = {kind: [] for kind in CAUSES_FIRST}
        for check in checks:
            kinds.setdefault(check["kind"], []).append(check)
        edits = []  # plans and formulas that do not describe an edited model
        for kind in FORMULAS if self.is_edited else []:
            edits.extend(check for check in kinds.pop(kind, []) if not check["ok"])
        print()
        counts = self.name_failures(kinds)
        worst = max(checks, key=lambda check: check["ok"] and check["diff"])
        text = f"worst difference {worst['diff']:.1e} (allowed {worst['allowed']:.0e})"
        text = f"{len(checks) - len(edits)} checks, {text}"
        if counts:
            text = f"failed: {', '.join(counts.values())}"
            text += "; all values agree" if set(counts).issubset(FORMULAS) else ""
        if edits:
            self.name_edits(edits)
            text = text if counts else f"values agree: {text}"
            count = len([check for check in edits if check["kind"] != "plans"])
            count = "1 formula does" if count == 1 else f"{count} formulas do"
            text += f"; the lesson was edited: {count} not describe it"
        verdict = "FAIL" if counts else "PASS"
        self.data.update(verdict=verdict, edited=self.is_edited, checks=checks)
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        print(wrap(f"{verdict}  {self.data['lesson']}  {text}"), flush=True)
        return verdict

    def name_failures(self, kinds: dict[str, list]) -> dict[str, str]:
        """Print one failed check of each kind, causes first; count them by kind."""
        failed = {}
        counts = {}
        for kind, checks in kinds.items():
            wrong = [check for check in checks if not check["ok"]]
            if wrong:
                failed[kind] = wrong
                counts[kind] = f"{kind} {len(wrong)}/{len(checks)}"
        # If the loss of step 1 is wrong, forward is: this comes before gradients.
        forward = [c for c in failed.get("losses", []) if "step 1," in c["name"]]
        early = ("runs", "outputs", "losses") if forward else ()
        for kind in sorted(failed, key=lambda x: (x not in early, x in FORMULAS)):
            cause = likely_cause(kind, failed[kind], bool(forward))
            print(wrap(f"✗ {in_words(cause)}"))
        return counts

    def name_edits(self, edits: list[dict]) -> None:
        """Print what does not describe an edited model, communication before memory."""
        texts = list(dict.fromkeys(check["text"] for check in edits))
        shown = texts if self.args.verbose else texts[:8]
        text = "The lesson was edited. What does not fit it"
        if len(shown) < len(texts):
            text += f"; {len(shown)} of {len(texts)}, all with --verbose"
        print(f"{text}:")
        for text in shown:
            print(wrap(f"≠ {text}"))


def formula_text(terms: list[Calls]) -> str:
    """2·L × B·S·D·e for calls of one size; a sum for calls of several."""
    texts = [f"{term.count} × {term.nbytes}".removeprefix("1 × ") for term in terms]
    return " + ".join(texts) or "none"


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def merge_row(rows: list[dict], place: int, other: dict, rank: int) -> None:
    """Add to this rank's row what another rank's row says of failed checks.

    other: row `place` there. Pipeline stages may have different rows: rows are the same
    if they begin with the same texts. One that fails elsewhere only is added.
    """
    same = [row for row in rows[place:] + rows if label_of(row) == label_of(other)]
    if not same and other.get("off"):
        rows.append(dict(other, off=[], elsewhere=True))
        same = rows[-1:]
    for row in same[:1]:
        for column in other.get("off", []):
            if column not in row["off"]:
                row["off"].append(column)
        if other.get("off"):
            row.setdefault("off_ranks", []).append(rank)
        if "diff" in row:
            row["diff"] = max(row["diff"], other["diff"])


def label_of(row: dict) -> list[str]:
    """The texts that a row begins with; no texts if it begins with a number."""
    return list(itertools.takewhile(lambda x: isinstance(x, str), row.values()))


def notes_on(row: dict) -> list[str]:
    """Lines below a table: what was predicted for a cell that failed, and where."""
    texts = row.get("predicted", {}).values()
    notes = [f"   ✗ {text}" for text in texts if not text.startswith(" ≠")]
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = " ".join(label_of(row)) or next(iter(row.values()))
        notes.append(f"   ✗ {label}: fails on ranks {ranks}, not on rank 0")
    return notes


def marked_cell(row: dict, name: str, is_short: bool) -> str:
    """A value as a table shows it; ✗ if it failed, ≠ if the model was edited."""
    value = row[name]
    predicted = row.get("predicted", {})
    text = "" if value is None else str(value)
    if isinstance(value, bool):
        is_edit = any(mark.startswith(" ≠") for mark in predicted.values())
        text = "ok" if value else "≠" if is_edit else "✗"
    elif isinstance(value, float):
        digits = 4 if is_short else 7
        text = f"{value:.1e}" if name == "diff" else f"{value:#.{digits}g}"
    elif isinstance(value, int):
        text = f"{value:,}"
    if name not in row.get("off", []):
        return text
    mark = predicted.get(name, "")[: 2 if is_short else None]  # short: " ≠"
    return text + (mark if mark.startswith(" ≠") else "✗")


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


# endregion


# region START AND ERRORS: flags, bugs, joining the ranks, hangs. You never need it.


def who_is_missing(statuses: list[str]) -> str:
    """What the statuses of all ranks say for certain; no rank is blamed on a guess."""
    waiting = []
    missing = []
    for rank, status in enumerate(statuses):
        ranks = waiting if status.startswith("in call") else missing
        ranks.append(rank)
    if not waiting:
        return "a call failed that is not one of the lesson's own"
    if missing:
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        text = f"{who} not in a collective, while ranks {waiting} are waiting in one: "
        return text + "it hung, crashed or skipped a call"
    if len({re.sub(r"all-to-all of .*?]", "", text) for text in statuses}) == 1:
        return "all ranks have entered the same call, and it raised an error"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def describe_hang(error: Exception) -> str:
    """Which call each rank is in, by what it wrote down itself."""
    ranks = range(dist.get_world_size())
    statuses = [COMM.store.get(f"status/{rank}").decode() for rank in ranks]
    lines = [wrap(f"error: {who_is_missing(statuses)}")]
    for rank in ranks:
        lines.append(f"  rank {rank}: {statuses[rank]}"[:88])
    silent = [rank for rank in ranks if not COMM.store.check([f"failed/{rank}"])]
    if silent:  # the others have waited 3 seconds for it
        text = f"  ranks {silent} have reported no error so far: they hang, "
        text += "are stopped, cannot be reached, or are still computing"
        lines.append(wrap(text))
    size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))  # ranks per machine
    for first in ranks[::size]:  # what a lost machine wrote last may be out of date
        if set(silent).issuperset(ranks[first : first + size]):
            text = f"error: no rank of machine {first // size} has reported an error: "
            lines[0] = wrap(text + "they hang, or it is lost or cannot be reached")
    lines.append(wrap(f"  raised: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank.

    With the diagnosis of a bug: it shows, so the exit code is 0 (no torchrun report).
    """
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    lost = f"error: rank {dist.get_rank()} got no answer from rank 0's machine: it is "
    lost += f"lost or cannot be reached\n  rank {dist.get_rank()}: {COMM.status}"
    # The store is on that machine, and its calls then never return.
    seconds = 20 + int(os.environ["LOCAL_RANK"])  # one per machine reports
    timer = threading.Timer(seconds, exit_rank, [1, lost, True])
    timer.start()
    COMM.store.set(f"failed/{dist.get_rank()}", text)
    if COMM.is_inside():  # others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 0 if diagnosis else 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif COMM.is_inside():
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    timer.cancel()
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and code:  # for torchrun's report
        # torchrun calls the earliest failure the root cause: the one that is printed.
        seconds = int(time.time()) + (0 if is_reporter else 3600)
        details = {"message": message, "extraInfo": {"timestamp": str(seconds)}}
        Path(path).write_text(json.dumps({"message": details}))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    elif code:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    member = dict(store=store, rank=rank, world_size=ranks)
    dist.init_process_group(backend, timeout=limit, **member)
    return store


def end_with_torchrun() -> None:
    """If torchrun is killed, Linux kills this rank as well, even if it sleeps."""
    if sys.platform == "linux":
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        # The command is in the lesson's docstring; flags are those that were given.
        command = "torchrun --standalone --nproc_per_node=2"
        if module["__doc__"]:
            command = re.search(r"torchrun \S+ \S+", module["__doc__"])[0]
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
    end_with_torchrun()
    torch.set_num_threads(1)  # ranks share the cores: more threads would be slower
    torch.manual_seed(args.seed)
    diagnosis = diagnosis_of(module["BREAKS"][args.bug]) if args.bug else ""
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.set_status("in no call")
        watch_calls()
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        fails = report.verdict() == "FAIL"
        print(f"{diagnosis}\n" if fails and args.bug else "", end="", flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if args.bug and not fails:
        text = "error: the bug does not show in this run; try it without other flags"
        exit_rank(1, text, is_reporter=os.environ["RANK"] == "0")
    if fails and not args.bug and os.environ["LOCAL_RANK"] == "0":
        # One rank per host: torchrun's report is then as short as it can be.
        time.sleep(1)  # the other ranks have ended
        exit_rank(1, "FAIL: the verdict is above this report of torchrun", True)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
