r"""Lesson 00: collectives, or what ranks can say to each other.

A rank is one process with a number; a collective is a call that all ranks of a group
must make: each brings a tensor, and some or all get a result. Tensor parallelism is
nothing but matrix products with the right collectives between them.

Run it (2 ranks on a laptop; try 4 too, 8 at most on a small machine):

    torchrun --standalone --nproc_per_node=2 00_collectives.py

What torchrun does: it starts this file twice, as two processes. They share no memory.
Each finds a RANK of its own in its environment, all run the same program, and the only
way from one to another is a call that both make. Your own first program could be:

    import torch, torch.distributed as dist
    dist.init_process_group("gloo")           # all ranks meet
    x = torch.ones(3) * dist.get_rank()       # rank 0 has zeros, rank 1 ones, …
    dist.all_reduce(x)                        # x is now the sum over ranks, on each
    print(f"rank {dist.get_rank()} has {x.tolist()}\n", end="")  # in one piece
    dist.destroy_process_group()              # they part

What you will see: three ways to hold a tensor, six to move one, an all-reduce made by
hand as a ring, the four sharded matrix products, a product on a 2D mesh, three traps,
a sum with the same bits for every T. Each value is checked on every rank, bytes against
formulas. `--break list` names bugs to switch on, `--only 2` prints section 2 alone.

How to read this file: NEW is the lesson, RUN what it prints, BREAK IT lists its bugs.
HARNESS counts (COMM), compares and prints (report); read past it. A group is a set of
ranks that call together, group.rank() a rank's number in it. A mesh lays ranks out as a
grid: outer 2 × inner 2 is [[0, 1], [2, 3]], its groups along inner are the rows.

Shapes: A[I, J] · B[J, K] = C[I, K]. A suffix names a tensor's dims, one letter each:
    UPPERCASE is the full size, lowercase this rank's 1/T slice of it (a_Ij: columns).
    A[I, J_tp] says the same in words: dim J is split over the mesh axis tp.
    C[I, K] {U_tp} is unreduced: full shape, still to be summed over tp ("partial_").
    T is the number of ranks on an axis, e the bytes of one number. PyTorch's
    words: Replicate() for a tensor that every rank holds whole, Shard(dim) for one
    that is cut along a dim, Partial() for one whose ranks hold terms of a sum.

Sources: the scaling book, jax-ml.github.io/scaling-book (notation, four products);
    GSPMD, arXiv:2105.04663 (2D mesh); docs.pytorch.org/docs/stable/distributed.html.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# ==== NEW in 00: collectives


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if it does not divide."""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    Shapes: full [.., I, ..] → [.., I/T, ..], a new tensor. Communication: none.
    """
    return split(full.detach(), dim, group.size())[group.rank()].clone()


# Each wrapper returns a new tensor and never changes its input. None of them is known
# to autograd (lesson 01 teaches them their backward). In a group of one rank they send
# nothing. COMM.record counts the call and its payload, the bytes of the whole tensor
# that it is about, and notes that this rank is in the call.


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    Shapes: x [...] → [...]. Communication: 1 call on x's elements. op: or MAX, MIN, …
    """
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
            dist.broadcast(out, group_src=src, group=group)
    return out


def all_to_all(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Cut x into T parts along dim, send part j to rank j, join what arrives along dim.

    Shapes: x [.., I, ..] → [.., I, ..]. Communication: 1 call on x's elements.
    """
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

    Both are started before either is waited for: if every rank first waited for its own
    send to end, a ring would stand still. Counted: the bytes this rank sends.
    """
    x = x.detach().contiguous()
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    with COMM.record("send/recv", x, group):
        both = [
            dist.P2POp(dist.isend, x, group=group, group_peer=dst),
            dist.P2POp(dist.irecv, out, group=group, group_peer=src),
        ]
        for request in dist.batch_isend_irecv(both):
            request.wait()
    return out


def ring_all_reduce(x: Tensor, group: dist.ProcessGroup, on_step=None) -> Tensor:
    """All-reduce by hand: each rank speaks only to the next one on a ring.

    x is cut into T chunks. Chunk r starts at rank r + 1 and travels around; each rank
    adds its own, and after T − 1 steps it is complete, on rank r (a reduce-scatter).
    In T − 1 more the complete chunks travel around (an all-gather). T need not divide
    x; `on_step(name, chunks)` is called after each step.

    Shapes: x [...] → [...], Partial() → Replicate().
    Communication: a rank sends 2(T−1) chunks of x/T; all together 2(T−1) times x.
    """
    T, rank = group.size(), group.rank()
    chunks = list(x.detach().flatten().tensor_split(T))
    right, left = (rank + 1) % T, (rank - 1) % T
    for step in range(T - 1):
        goes = (rank - step - 1) % T  # at first as it is, then what was just added to
        comes = (rank - step - 2) % T
        arrived = send_recv(chunks[goes], right, chunks[comes], left, group)
        chunks[comes] = chunks[comes] + arrived
        if on_step:
            on_step(f"reduce-scatter {step + 1}", chunks)
    for step in range(T - 1):  # chunk r is complete on rank r: it travels on
        goes, comes = (rank - step) % T, (rank - step - 1) % T
        chunks[comes] = send_recv(chunks[goes], right, chunks[comes], left, group)
        if on_step:
            on_step(f"all-gather {step + 1}", chunks)
    return torch.cat(chunks).view(x.shape)


def ring_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends for a payload of nbytes."""
    if collective == "send/recv":
        return nbytes
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return round(rounds * nbytes * (ranks - 1) / ranks)


def tree_sum(terms: list[Tensor]) -> Tensor:
    """Add up each half by itself, then the two sums: ((a + b) + (c + d)) + …."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


def tree_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce in an order we choose, so that it can be the same for every T.

    Adding floats rounds, so (a + b) + c differs from a + (b + c) in the last bits; and
    how a library's all-reduce adds depends on T. Here each rank gets all terms and adds
    them up as a tree. If x is itself the tree_sum of this rank's share of 16 terms, the
    whole is one tree, the same for T = 1, 2, 4, 8 and 16: no bit depends on T.

    Shapes: x [...] → [...], Partial() → Replicate().
    Communication: 1 all-gather on T × x's elements; a ring sends T/2 times the bytes
        of an all-reduce.
    """
    return tree_sum(list(all_gather(x[None], 0, group)))


def digest(*tensors) -> str:
    """The first digits of a hash of all their bits."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(torch.as_tensor(x, dtype=torch.float64).cpu().numpy().tobytes())
    return sha.hexdigest()[:12]


def async_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """An all-reduce that is started, and waited for later (async_op)."""
    out = x.clone()  # the call below overwrites what it is given
    work = dist.all_reduce(out, group=group, async_op=True)
    # Here a program computes something else, and leaves `out` alone.
    work.wait()  # now `out` is the sum; without async_op the call waits (NCCL: the GPU)
    return out


def two_all_reduces(
    x: Tensor, y: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Two sums. The n-th call of one rank meets the n-th of the others: the order is
    the only thing that tells collectives of a group apart."""
    sum_x = all_reduce(x, group)
    sum_y = all_reduce(y, group)
    return sum_x, sum_y


# The four sharded products A · B = C. What decides is the contracted dim J: if it is
# whole in both, there is nothing to send, unless one axis cuts both I and K (case 4).


def matmul_case_1(a_iJ: Tensor, b_JK: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K] → C[I_tp, K]: J is whole on every rank, nothing to send."""
    return a_iJ @ b_JK


def matmul_case_2_gather(a_Ij: Tensor, b_JK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J, K] → C[I, K]: all-gather A; each rank does all the work."""
    return all_gather(a_Ij, 1, group) @ b_JK


def matmul_case_2_slice(a_Ij: Tensor, b_JK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J, K] → C[I, K]: slice B, which is free, and it is case 3."""
    return matmul_case_3_all_reduce(a_Ij, shard(b_JK, 0, group), group)


def matmul_case_3_all_reduce(a_Ij: Tensor, b_jK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J_tp, K] → C[I, K] {U_tp} → AllReduce → C[I, K]."""
    partial_c_IK = a_Ij @ b_jK  # full shape, this rank's terms of the sum over J
    return all_reduce(partial_c_IK, group)


def matmul_case_3_reduce_scatter(a_Ij: Tensor, b_jK: Tensor, group) -> Tensor:
    """A[I, J_tp] · B[J_tp, K] → C[I, K] {U_tp} → ReduceScatter → C[I, K_tp]."""
    partial_c_IK = a_Ij @ b_jK
    return reduce_scatter(partial_c_IK, 1, group)


def matmul_case_4_left(a_iJ: Tensor, b_Jk: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K_tp] → C[I, K_tp]: from its own slices rank r can make only
    block (r, r) of C. So gather A."""
    return all_gather(a_iJ, 0, group) @ b_Jk


def matmul_case_4_right(a_iJ: Tensor, b_Jk: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K_tp] → C[I_tp, K]: or gather B."""
    return a_iJ @ all_gather(b_Jk, 1, group)


def matmul_2d(a_ij: Tensor, b_jk: Tensor, outer, inner) -> Tensor:
    """A[I_outer, J_inner] · B[J_outer, K_inner] → C[I_outer, K_inner] on a 2D mesh.

    Each operand is gathered over the axis that splits J, and C is laid out as A.
    Communication: all-gather of A[I_outer, J] over inner (I·J/outer elements), of
        B[J, K_inner] over outer (J·K/inner elements). Source: arXiv:2105.04663.
    """
    a_iJ = all_gather(a_ij, 1, inner)
    b_Jk = all_gather(b_jk, 0, outer)
    return a_iJ @ b_Jk


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    Args:
        sizes: axis → number of ranks; {"outer": 2, "inner": 2} makes groups [0, 2] and
            [1, 3] along outer, [0, 1] and [2, 3] along inner.
        timeout: seconds; a new group's own default is long (gloo 30 minutes, NCCL 10).
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


# ==== RUN


def main(args, report: Report) -> None:
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    report.begin({"tp": args.ranks})
    show_three_ways(report, tp_group)
    show_collectives(report, tp_group)
    show_ring(report, tp_group)
    show_products(report, tp_group)
    outer = 2 if args.ranks % 2 == 0 else 1
    groups = mesh_groups({"outer": outer, "inner": args.ranks // outer}, args.timeout)
    show_mesh(report, groups["outer"], groups["inner"])
    show_traps(report, tp_group)
    show_same_bits(report, tp_group)


def numbers(x: Tensor) -> str:
    """[ 0  1 10], two characters or more a number."""
    return f"[{' '.join(f'{value:2.0f}' for value in x.flatten().tolist())}]"


def count_from(start: int, size: int, args) -> Tensor:
    """start, start + 1, … as numbers of the run's dtype."""
    dtype = getattr(torch, args.dtype)
    return start + torch.arange(size, device=args.device).to(dtype)


def show_three_ways(report: Report, group) -> None:
    """The tensor 0 1 2 … as replicated, sharded and partial."""
    T, rank = group.size(), group.rank()
    size = 2 * T if T <= 4 else T  # so that a row fits the screen
    full = count_from(0, size, report.args)
    mine = shard(full, 0, group)
    terms = [(full * r) % 5 - 2 for r in range(1, T)]  # any numbers
    term = [full - sum(terms), *terms][rank]  # rank 0 has the rest of A
    COMM.what = "three ways"
    joined, added = all_gather(mine, 0, group), all_reduce(term, group)
    report.check("sharded: slices join to A", rel_diff(joined, full))
    report.check("partial: terms sum to A", rel_diff(added, full))
    heads = "PyTorch's word", "Replicate()", "Shard(0)", "Partial()"
    lines = [("in this course", "A[I]", "A[I_tp]", "A[I] {U_tp}")]
    lines += gather_objects((f"rank {rank}", *map(numbers, (full, mine, term))))
    lines += [("to get A back", "each has it", "join them", "add them up")]
    report.section("A tensor A in three ways: replicated, sharded, partial")
    report.table("held", [dict(zip(heads, line)) for line in lines])


def show_collectives(report: Report, group) -> None:
    """Six collectives, each rank's values before and after."""
    T, rank, args = group.size(), group.rank(), report.args
    COMM.what = "picture"
    n = 2 if T <= 4 else 1  # numbers a slice, so that a row fits the screen
    # What all ranks start with: one slice, or a whole tensor of T slices.
    slices = [count_from(10 * r, n, args) for r in range(T)]
    rows = [count_from(10 * r, n * T, args) for r in range(T)]
    piece, row = slices[rank], rows[rank]
    after_exchange = torch.cat([other.tensor_split(T)[rank] for other in rows])
    to, source, root = (rank + 1) % T, (rank - 1) % T, T - 1
    pictures = [  # name, what it does; this rank's tensor before, after, and as wanted
        ("broadcast", f"rank {root}'s tensor goes to every rank",
         row, broadcast(row, root, group), rows[root]),
        ("all-reduce", "every rank gets the sum, element by element",
         row, all_reduce(row, group), sum(rows)),
        ("all-gather", "every rank gets every slice, in order",
         piece, all_gather(piece, 0, group), torch.cat(slices)),
        ("reduce-scatter", "each keeps only its slice of the sum",
         row, reduce_scatter(row, 0, group), sum(rows).tensor_split(T)[rank]),
        ("all-to-all", "slice j of rank r becomes slice r of rank j",
         row, all_to_all(row, group), after_exchange),
    ]  # fmt: skip
    if T > 1:  # alone, there is no one to send to
        got = send_recv(row, to, row, source, group)
        does = "each to the next, the last to rank 0"
        pictures.append(("send/recv", does, row, got, rows[source]))
    report.section("Six ways to move it; rank r starts with 10·r, 10·r + 1, …")
    for picture in pictures:
        show_picture(report, group, *picture)


def show_picture(report, group, name, does, before, after, wanted) -> None:
    """One of the six: what it does; what each rank has before and after."""
    payload = max(before.nbytes, after.nbytes)
    calls, sent = COMM.rows.get(("picture", "", name, group.group_desc), (0, 0))
    off = abs(calls - 1) + abs(sent - payload) if group.size() > 1 else calls
    counted = report.check(f"bytes: {name}", off, kind="bytes")
    right = report.check(name, rel_diff(after, wanted))
    ok = cell("ok", all(gather_objects(right and counted)))
    report.say(f"   {name:<16}{does:<46}{ok}")
    line = f"      rank {group.rank()}  {numbers(before)} → {numbers(after)}"
    report.say("\n".join(gather_objects(line)))


def show_ring(report: Report, group) -> None:
    """An all-reduce from two collectives, then from sends alone."""
    T, rank, args = group.size(), group.rank(), report.args
    report.section("An all-reduce is a reduce-scatter, then an all-gather")
    COMM.what = "two halves"
    x = count_from(rank, 2 * T if T <= 4 else T, args)
    whole, half = all_reduce(x, group), reduce_scatter(x, 0, group)
    both = all_gather(half, 0, group)
    ok = report.check("reduce-scatter + all-gather", rel_diff(both, whole))
    row = {"": f"rank {rank}", "before": numbers(x), "reduce-scatter": numbers(half)}
    row |= {"all-gather": numbers(both), "ok": ok}
    report.table("halves", gather_objects(row))
    report.say("   By hand, as a ring. bytes: of all ranks, predicted: 2(T−1) times x")
    rows = []
    for size in (2 * T, 2 * T + 3):
        x = count_from(rank, size, args)
        COMM.what = f"ring of {size}"
        summed = ring_all_reduce(x, group)
        right = report.check(COMM.what, rel_diff(summed, all_reduce(x, group)))
        key = COMM.what, "", "send/recv", group.group_desc
        sent = gather_objects(COMM.rows.get(key, (0, 0))[1])
        rows.append({
            "x": f"{size} numbers", "bytes of x": x.nbytes,
            "a rank sent": " or ".join(f"{n}" for n in sorted({*sent})),
            "bytes": sum(sent), "predicted_bytes": 2 * x.nbytes * (T - 1), "ok": right,
        })  # fmt: skip
    report.measure("ring", rows)


def show_products(report: Report, group) -> None:
    """The four sharded products of whole-number matrices, each in its ways."""
    T = group.size()
    a_IJ = random_matrix(2 * T, 4 * T, report.args)
    b_JK = random_matrix(4 * T, 3 * T, report.args)
    rows = []
    for row, product, *dims, elements in sharded_products(a_IJ, b_JK):
        COMM.what = product.__name__
        a, b, wanted = (
            x if dim is None else shard(x, dim, group)
            for x, dim in zip((a_IJ, b_JK, a_IJ @ b_JK), dims)
        )
        with FlopCounterMode(display=False) as flops:
            c = product(a, b, group)
        sent = {key[2]: n for key, (_, n) in COMM.rows.items() if key[0] == COMM.what}
        row |= {"flops": flops.get_total_flops(), "bytes": sum(sent.values())}
        row["predicted_bytes"] = elements * a.itemsize if T > 1 else 0
        around_twice = sent.get("all-reduce", 0)  # a ring passes it around twice
        row["ring"] = (row["bytes"] + around_twice) * (T - 1) // T
        off = abs(row["bytes"] - row["predicted_bytes"])
        right = report.check(COMM.what, rel_diff(c, wanted))
        row["ok"] = report.check(f"bytes: {COMM.what}", off, kind="bytes") and right
        rows.append(row)
    sizes = f"I, J, K = {2 * T}, {4 * T}, {3 * T}"
    report.section(f"C[I, K] = A[I, J] · B[J, K], {sizes}, four ways to be sharded")
    report.say(
        "   J, which is summed over, is whole in 1 and 4: nothing to send, but in 4 a\n"
        "   rank has only its block of C. In 2 and 3 it is split: gather, or add up.\n"
        "   bytes: of the tensor; ring: what a rank sends (all-reduce: twice)"
    )
    report.table("communication", rows, hide=["predicted_bytes"])


def sharded_products(a_IJ: Tensor, b_JK: Tensor) -> list[tuple]:
    """Each way: how it reads in the table; the function; along which dim A, B and C
    are cut (None: whole); the payload in elements."""
    (I, J), K = a_IJ.shape, b_JK.shape[1]
    ways = [
        ("1 A[I_tp, J] B[J, K]", "nothing", "C[I_tp, K]", "0",
         matmul_case_1, 0, None, 0, 0),
        ("2 A[I, J_tp] B[J, K]", "AllGather A", "C[I, K]", "I·J·e",
         matmul_case_2_gather, 1, None, None, I * J),
        ("2", "slice B, as 3", "C[I, K]", "I·K·e",
         matmul_case_2_slice, 1, None, None, I * K),
        ("3 A[I, J_tp] B[J_tp, K]", "AllReduce", "C[I, K]", "I·K·e",
         matmul_case_3_all_reduce, 1, 0, None, I * K),
        ("3", "ReduceScatter", "C[I, K_tp]", "I·K·e",
         matmul_case_3_reduce_scatter, 1, 0, 1, I * K),
        ("4 A[I_tp, J] B[J, K_tp]", "AllGather A", "C[I, K_tp]", "I·J·e",
         matmul_case_4_left, 0, 1, 1, I * J),
        ("4", "AllGather B", "C[I_tp, K]", "J·K·e",
         matmul_case_4_right, 0, 1, 0, J * K),
    ]  # fmt: skip
    heads = "A and B are split", "what to do", "C is split", "formula"
    return [(dict(zip(heads, way)), *way[len(heads) :]) for way in ways]


def random_matrix(rows: int, columns: int, args) -> Tensor:
    """Small whole numbers, so that every sum is exact; the same on every rank."""
    dtype = getattr(torch, args.dtype)
    return torch.randint(-2, 3, (rows, columns)).to(args.device, dtype)


def show_mesh(report: Report, outer, inner) -> None:
    """The product on a 2D mesh, every matrix split on both axes."""
    Y, X, texts = outer.size(), inner.size(), []
    report.axes = report.axes | {"outer": Y, "inner": X}
    hint = "" if X > 1 else "; try 4 ranks"
    report.section(f"Mesh {Y} × {X}: A[I_outer, J_inner] · B[J_outer, K_inner]{hint}")
    for group in (outer, inner):
        members = gather_objects(str(dist.get_process_group_ranks(group)))
        texts.append(f"{group.group_desc}: {'  '.join(dict.fromkeys(members))}")
    I, J, K = 2 * Y, 2 * Y * X, 3 * X
    report.say(f"   I = {I}, J = {J}, K = {K}; groups along {'; '.join(texts)}")
    a_IJ, b_JK = random_matrix(I, J, report.args), random_matrix(J, K, report.args)
    cut = lambda x: shard(shard(x, 0, outer), 1, inner)
    COMM.what = "2D product"
    c_ik = matmul_2d(cut(a_IJ), cut(b_JK), outer, inner)
    report.check(COMM.what, rel_diff(c_ik, cut(a_IJ @ b_JK)))
    e = a_IJ.element_size()
    report.ledger({
        (COMM.what, "", "all-gather", "inner"): (1, "A: I·J·e/outer", I * J * e // Y),
        (COMM.what, "", "all-gather", "outer"): (1, "B: J·K·e/inner", J * K * e // X),
    })  # fmt: skip


def show_traps(report: Report, group) -> None:
    """A view that is not contiguous, the order of the calls, and not waiting."""
    T, rank, args = group.size(), group.rank(), report.args
    COMM.what = "traps"
    view = (count_from(0, 6, args) + rank).view(2, 3).T  # [3, 2], not contiguous
    before = view.clone()
    sum_of_ranks = T * (T - 1) // 2
    ones = torch.ones_like(view[:, 0])
    sum_1, sum_10 = two_all_reduces(ones, 10 * ones, group)
    ranks = rank * ones
    both, both_summed = torch.cat([ones, 10 * ones]), torch.cat([sum_1, sum_10])
    cases = [  # name; before and after on rank 0; wanted
        ("all-reduce of a transposed view",
         before, all_reduce(view, group), T * (before - rank) + sum_of_ranks),
        ("and the view itself afterwards", before, view, before),
        ("two sums, first 1s, then 10s", both, both_summed, T * both),
        ("a sum started, then waited for",
         ranks, async_all_reduce(ranks, group), sum_of_ranks * ones),
    ]  # fmt: skip
    rows = []
    for name, was, now, wanted in cases:
        row = {"": name, "rank 0 before": numbers(was), "after": numbers(now)}
        rows.append(row | {"ok": report.check(name, rel_diff(now, wanted))})
    report.section("Three traps: a view, the order of the calls, not waiting")
    report.say("   Try --break view, which sums a copy; --break order: 1s meet 10s.")
    report.table("traps", rows)


def show_same_bits(report: Report, group) -> None:
    """16 terms added up by ranks, and by one process: is it the same to the bit?"""
    T, dtype = group.size(), getattr(torch, report.args.dtype)
    report.section("A sum with the same bits for every T: compare 1, 2, 4 and 8 ranks")
    if 16 % T:
        report.say(f"   {T} ranks cannot share 16 terms: try 1, 2, 4 or 8")
        return
    torch.manual_seed(report.args.seed)  # the same terms for every T
    terms = list(torch.randn(16, 1000, dtype=dtype).to(report.args.device))
    mine = terms[group.rank() * 16 // T :][: 16 // T]
    size, rows = terms[0].nbytes, []
    for name, adds, over_ranks, call, payload in (
        ("sum", sum, all_reduce, "all-reduce", size),
        ("tree", tree_sum, tree_all_reduce, "all-gather", T * size),
    ):
        COMM.what = f"16 terms, {name}"
        alone, summed = adds(terms), over_ranks(adds(mine), group)
        _, sent = COMM.rows.get((COMM.what, "", call, "tp"), (0, 0))
        rows.append({
            "added as": name, "one process": digest(alone),
            f"T = {T}": digest(summed), "of 1000 differ": int((summed != alone).sum()),
            "collective": call, "bytes": sent, "predicted_bytes": payload * (T > 1),
        })  # fmt: skip
        report.check(f"{name}: sum", rel_diff(summed, alone), report.allowed)
    report.check("tree: bits", rows[1]["of 1000 differ"], kind="bits")
    report.measure("same bits", rows, hide=["predicted_bytes"])


# ==== BREAK IT

# Bugs that people have shipped, each an edit of a definition above.
BREAKS = {
    "skip": dict(
        target="all_reduce",
        old="    if group.size() > 1:",
        new="    if group.rank() != group.size() - 1:",
        what="the last rank skips its all-reduce: it stands under an `if` on the rank",
        symptom="nothing fails at first: the others wait until the timeout ends all",
        why="an all-reduce ends on no rank before all have called it. (If the rank's "
        "next call is of the same size it is taken for the skipped one: wrong sums)",
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
        symptom="no error, no hang: x of one rank was added to y of another",
        why="calls are matched by their order alone: names exist in your program alone",
        reported="github.com/pytorch/pytorch/issues/109401",
    ),
    "shapes": dict(
        target="all_reduce",
        old="    out = x.detach().clone(memory_format=torch.contiguous_format)\n",
        new="    more = 2 if group.rank() == group.size() - 1 else 0\n"
        "    out = torch.cat([x.flatten(), x.new_zeros(more)])\n",
        what="the last rank brings a longer tensor than the others",
        symptom="gloo aborts a process, or gives wrong sums on some of the ranks",
        why="no rank tells the others its shape: each takes its own for everyone's",
        reported="github.com/pytorch/pytorch/issues/97191",
    ),
    "tree": dict(
        target="tree_sum",
        old="    return tree_sum(terms[:half]) + tree_sum(terms[half:])\n",
        new="    return sum(terms)\n",
        what="terms are added one after the other, in rank order, not as a tree",
        symptom="sums are right, and yet their last bits depend on the number of ranks",
        why="each rank adds up its own terms first: with another T, other terms meet",
        reported="github.com/NVIDIA/Megatron-LM/issues/1736",
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
        symptom="contiguous tensors come out right; a transposed one as it went in",
        why="`.contiguous()` of such a view is a copy: the sum goes into the copy, and "
        "the copy is dropped",
        reported="github.com/NVIDIA/Megatron-LM/issues/5337",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    return lesson_parser(__doc__, BREAKS, sections=7).parse_args()


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables and explains errors. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import argparse
import gc
import inspect
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


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

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run?"""
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        try:
            self.store.wait(keys, timedelta(seconds=5))
        except RuntimeError:  # some rank did not raise
            return False
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = ["runs", "gradients", "replicas", "norms", "losses", "parameters"]


def rel_diff(got, expected) -> float:
    """max|got − expected| / max|expected|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    diff = ((got - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok
        self.raised = {}  # run → the error that ended it
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int]) -> None:
        """Print the first two lines. size: letter of the shape legend → number."""
        self.mesh = mesh
        self.data["mesh"] = mesh
        self.data["size"] = size
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, kind: str, name: str, diff: float, allowed: float = 0.0) -> bool:
        """Record one comparison of this rank. Return whether it holds."""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        self.checks[name] = {"kind": kind, "diff": diff, "allowed": allowed, "ok": ok}
        return ok

    def expect(self, row: dict, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(row[column] - predicted)):
            off.append(column)
        row.setdefault("predicted", {})[column] = f"{name}: predicted {predicted:,}"

    @contextmanager
    def column(self, run: str):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if is_lost(error) or not COMM.all_raised(run, error):
                raise
            COMM.set_status("in no call")
            if dist.get_rank() == 0:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            print(wrap(f"\n{run} raised {self.raised[run]}"), flush=True)
        self.check("runs", f"{run} completes", int(run in self.raised))

    def table(self, key: str, rows: list[dict], hide: list[str] = ()) -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank. Cells that failed
        on any rank are marked ✗. row["predicted"] maps a cell to what was predicted for
        it, printed below the table if it failed. hide: columns to keep, not to print.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for row, other in zip(rows, rows_of_rank):
                merge_row(row, other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if rows:
            self.print_rows(rows, hide)

    def print_rows(self, rows: list[dict], hide: list[str]) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted"):
                continue
            texts = [name]
            for row in rows:
                mark = "✗" if name in row.get("off", []) else ""
                texts.append(cell(name, row[name]) + mark)
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        for row in rows:
            lines.extend(explain_row(row))
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed: float = 0.0, fold=str) -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        all its values and the largest relative difference of any of them.
        """
        allowed = allowed or self.allowed
        nothing = torch.empty(0)  # stands for what a run does not have
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                rows[label].update(dict.fromkeys(self.raised, "raised"))
                rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                value = values.get(name, nothing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                diff = rel_diff(value, reference.get(name, nothing))
                row["diff"] = max(row["diff"], diff)
                if not self.check(key, f"{name}, {run}", diff, allowed):
                    row["off"].append(run)
        self.table(key, list(rows.values()))

    def ledger(self, formulas: dict[Call, str], size: dict, steps: int = 1) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → "calls × bytes per call", as it is printed and evaluated. Calls
        of different sizes: "1 × 8 and 2·L × D·e".
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            ranks = self.mesh.get(call.axis, 1)
            if call.run not in runs or ranks == 1:  # one rank sends nothing
                continue
            formula = formulas.get(call, "0 × 0")
            calls = 0
            nbytes = 0
            for product in formula.split(" and "):
                factors = [evaluate(factor, size) for factor in product.split(" × ")]
                calls += factors[0]
                # Multiplied before rounding: a size may be a mean over micro-batches.
                nbytes += evaluate(f"({product})".replace(" × ", ")·("), size)
            if calls == 0 and COMM.calls[call] == 0:
                continue
            row = call._asdict()
            row["calls"] = per_step(COMM.calls[call], steps)
            row["bytes"] = per_step(COMM.bytes[call], steps)
            row["formula"] = formula
            row["ring"] = ring_bytes(call.collective, row["bytes"], ranks)
            name = " ".join(call)
            self.expect(row, "calls", "calls", name, calls)
            self.expect(row, "bytes", "bytes", name, nbytes)
            rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = []
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        self.table("communication", rows, hide)

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks: the largest diff, and the ranks where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                if name not in merged:
                    merged[name] = dict(check, name=name, ranks=[])
                merged[name]["diff"] = max(merged[name]["diff"], check["diff"])
                if not check["ok"]:
                    merged[name]["ok"] = False
                    merged[name]["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """PASS or FAIL; above FAIL, the worst failed check of each kind."""
        checks = sorted(self.merge_checks(), key=lambda check: -check["diff"])
        kinds = dict.fromkeys(CAUSES_FIRST)
        kinds.update(dict.fromkeys(check["kind"] for check in checks))
        counts = []
        print()
        for kind in kinds:
            of_kind = [check for check in checks if check["kind"] == kind]
            failed = [check for check in of_kind if not check["ok"]]
            if failed:
                worst = failed[0]
                diff = f"off by {worst['diff']:.3g}, allowed {worst['allowed']:.3g}"
                print(wrap(f"✗ {worst['name']}: {diff}, on ranks {worst['ranks']}"))
                counts.append(f"{kind} {len(failed)}/{len(of_kind)}")
        text = f"failed: {', '.join(counts)}"
        if not counts:
            text = f"{len(checks)} checks, worst difference {checks[0]['diff']:.1e}"
            text += f" (allowed {checks[0]['allowed']:.0e})"
        self.data["verdict"] = "FAIL" if counts else "PASS"
        self.data["checks"] = checks
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return wrap(f"{self.data['verdict']}  {self.data['lesson']}  {text}")


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def merge_row(row: dict, other: dict, rank: int) -> None:
    """Add to a row what the same row of another rank says about failed checks."""
    for column in other.get("off", []):
        if column not in row["off"]:
            row["off"].append(column)
    if other.get("off"):
        row.setdefault("off_ranks", []).append(rank)
    if "diff" in row:
        row["diff"] = max(row["diff"], other["diff"])


def explain_row(row: dict) -> list[str]:
    """Lines below a table: what was predicted, and where, if a check failed."""
    lines = []
    for column in row.get("off", []):
        if column in row.get("predicted", {}):
            lines.append(f"   ✗ {column} of {row['predicted'][column]}")
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = next(iter(row.values()))
        lines.append(f"   ✗ {label}: fails on ranks {ranks}; the row shows rank 0")
    return lines


def cell(name: str, value) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "ok" if value else "✗"
    if isinstance(value, float):
        return f"{value:.1e}" if name == "diff" else f"{value:#.7g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


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
    for name, default in dict(sizes, seed=1, timeout=60).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    numbers = range(1, sections + 1)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=numbers, metavar="N", help=text)
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy."""
    owner, _, name = edit["target"].rpartition(".")
    definition = getattr(module[owner], name) if owner else module[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {} if owner else module  # where the edited copy is defined
    exec(source.replace(edit["old"], edit["new"]), module, scope)
    if owner:
        setattr(module[owner], name, scope[name])


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, and where somebody reported it."""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    return "\n".join(lines)


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front."""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def is_lost(error: Exception) -> bool:
    """Is it the transport's: a timeout, or a connection that the other end closed?"""
    # The last two are what TORCH_DISTRIBUTED_DEBUG=DETAIL reports instead of a timeout.
    words = "[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe|monitoredBarrier|mismatch"
    is_found = re.search(words, first_line(error)) is not None
    return isinstance(error, RuntimeError) and is_found


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
    if len(set(statuses)) == 1:
        return "a collective failed although every rank had entered it"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def describe_hang(error: Exception) -> str:
    """Which call each rank is in, by what it wrote down itself."""
    ranks = range(dist.get_world_size())
    statuses = [COMM.store.get(f"status/{rank}").decode() for rank in ranks]
    lines = [wrap(f"error: {who_is_missing(statuses)}")]
    for rank in ranks:
        lines.append(f"  rank {rank}: {statuses[rank]}"[:88])
    lines.append(wrap(f"  transport: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank."""
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    if is_lost(error):  # let others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif is_lost(error):
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # for torchrun's report
        extra = {"timestamp": str(int(time.time()))}
        details = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(details))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


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
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    dist.init_process_group(
        backend, timeout=limit, store=store, rank=rank, world_size=ranks
    )
    return store


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis."""

    def on_sigterm(*_):
        exit_rank(1, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    args.timeout = min(args.timeout, 5)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        command = f"torchrun --standalone --nproc_per_node={module.get('RANKS', 2)}"
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
    torch.set_num_threads(1)  # ranks share the cores: more threads would be slower
    torch.manual_seed(args.seed)
    diagnosis = diagnosis_of(module["BREAKS"][args.bug]) if args.bug else ""
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.set_status("in no call")
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{diagnosis}\n{line}".strip(), flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        exit_rank(1, line, is_reporter=False)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
