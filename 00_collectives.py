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

import argparse
import gc
import hashlib
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

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


def parse_args(ranks: int) -> argparse.Namespace:
    return lesson_parser(__doc__, BREAKS).parse_args()


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
        met="github.com/pytorch/pytorch/issues/115964, …/97191",
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
        met="github.com/pytorch/pytorch/issues/109401",
    ),
    "shapes": dict(
        target="all_reduce",
        old="    out = x.detach().clone(memory_format=torch.contiguous_format)\n",
        new="    more = 2 if group.rank() == group.size() - 1 else 0\n"
        "    out = torch.cat([x.flatten(), x.new_zeros(more)])\n",
        what="the last rank brings a longer tensor than the others",
        symptom="gloo aborts a process, or gives wrong sums on some of the ranks",
        why="no rank tells the others its shape: each takes its own for everyone's",
        met="github.com/pytorch/pytorch/issues/97191",
    ),
    "tree": dict(
        target="tree_sum",
        old="    return tree_sum(terms[:half]) + tree_sum(terms[half:])\n",
        new="    return sum(terms)\n",
        what="terms are added one after the other, in rank order, not as a tree",
        symptom="sums are right, and yet their last bits depend on the number of ranks",
        why="each rank adds up its own terms first: with another T, other terms meet",
        met="github.com/NVIDIA/Megatron-LM/issues/1736",
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
        met="github.com/NVIDIA/Megatron-LM/issues/5337",
    ),
}


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables, says who is missing. Fold it away.


class CommCounter:
    """Calls and payload bytes of every collective, and the call this rank is in now."""

    def __init__(self):
        self.rows = {}  # (what, phase, collective, axis) → [calls, bytes]
        self.what = self.phase = ""  # labels of what is called next
        self.place, self.made, self.store = "in no call", Counter(), None
        self.limit = timedelta(seconds=60)  # of a call, in groups that a model makes

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        row = self.rows.setdefault((self.what, self.phase, collective, axis), [0, 0])
        row[0] += 1
        row[1] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one call on copies·x.nbytes bytes of payload."""
        self.count(collective, copies * x.nbytes, group.group_desc)
        call = f"{collective} of {list(x.shape)} over {group.group_desc}"
        with self.meet(call, dist.get_process_group_ranks(group)):
            yield

    @contextmanager
    def meet(self, call: str, ranks: list[int]):
        """Around a call that ends when all these ranks are in it."""
        before = self.place
        self.made[str(ranks)] += 1  # the n-th call of one meets the n-th of the others
        self.note(f"in call {self.made[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.note(before)  # not after an error: then this rank is still in it

    def note(self, place: str) -> None:
        """Where this rank is, for the others to read if something goes wrong."""
        self.place = place
        if self.store:
            self.store.set(f"place/{dist.get_rank()}", place)


COMM = CommCounter()
ALLOWED = {"float32": (1e-6, 1e-5), "float64": (1e-12, 1e-12)}  # of a loss, of a tensor


def rel_diff(got, wanted) -> float:
    """max|got − wanted| / max|wanted|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    wanted = torch.as_tensor(wanted, dtype=torch.float64).detach().cpu()
    if got.shape != wanted.shape:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    diff = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return diff if diff == diff else math.inf


def gather_objects(value, group=None) -> list:
    """The value of every rank (of a group), in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.meet("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args, self.checks, self.number, self.axes = args, {}, 0, {}
        self.allowed_loss, self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int]) -> None:
        """The first line; mesh: axis → ranks."""
        self.axes = self.data["mesh"] = mesh
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, name: str, diff: float, allowed=0.0, kind="numbers") -> bool:
        """Note one comparison on this rank; does it hold here?"""
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan, too
        self.checks[name] = {"diff": diff, "allowed": allowed, "kind": kind, "ok": ok}
        return ok

    def table(self, key: str, rows: list[dict], hide=()) -> None:
        """Print and keep rows of like keys; diff and ok are the worst of all ranks."""
        for row, of_ranks in zip(rows, zip(*gather_objects(rows))):
            for name, worst in (("diff", max), ("ok", all)):
                if name in row:
                    row[name] = worst(other[name] for other in of_ranks)
        self.data.setdefault(key, []).extend(rows)
        if not rows:  # nothing sent: there is one rank
            return
        lines = [" "] * (len(rows) + 1)  # they grow to the right, column by column
        for name in [name for name in rows[0] if name not in hide]:
            texts = [cell(name, row[name]) for row in rows]
            texts.insert(0, name.replace("_bytes", ""))
            width = max(map(len, texts))
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            lines = [f"{line}  {pad(text, width)}" for line, text in zip(lines, texts)]
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed=None, fold=str) -> None:
        """Numbers, or tensors by their norms: of several runs against the first one.

        runs: run → name → value; fold: name → the label of its row.
        """
        allowed = self.allowed if allowed is None else allowed
        rows, missing, first = {}, torch.empty(0), next(iter(runs))
        for name in dict.fromkeys(name for values in runs.values() for name in values):
            row = {"name": fold(name), **dict.fromkeys(runs, 0.0)}
            row = rows.setdefault(fold(name), row | {"diff": 0.0, "ok": True})
            wanted = runs[first].get(name, missing)
            for run, values in runs.items():
                value = values.get(name, missing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if run != first:
                    diff = rel_diff(value, wanted)
                    row["diff"] = max(row["diff"], diff)
                    row["ok"] &= self.check(f"{key}: {name}, {run}", diff, allowed)
        self.table(key, list(rows.values()))

    def measure(self, key: str, rows: list[dict], hide=()) -> None:
        """Rows with bytes and predicted_bytes, which have to be equal."""
        for row in rows:
            name = " ".join(value for value in row.values() if isinstance(value, str))
            off = abs(row["bytes"] - row["predicted_bytes"])
            equal = self.check(f"{key}: {name}", off, kind="bytes")
            row["ok"] = row.get("ok", True) and equal
        self.table(key, rows, hide)

    def ledger(self, formulas: dict, steps: int = 1) -> None:
        """Calls and bytes of a step, as counted, against formulas.

        formulas: (what, phase, collective, axis) → (calls, formula, bytes).
        """
        rows, whats = [], {what for what, *_ in formulas}
        for key in dict.fromkeys([*formulas, *COMM.rows]):
            row = dict(zip(("what", "phase", "collective", "axis"), key))
            calls, formula, predicted = formulas.get(key, (0, "none", 0))
            made, sent = (n / steps for n in COMM.rows.get(key, (0, 0)))
            ranks = self.axes.get(row["axis"], 1)
            if ranks == 1:  # nobody to send to
                calls = predicted = 0
            if row["what"] in whats and (made or calls):
                share = (ranks - 1) / ranks  # of the payload, in a half of a ring
                share = {"all-reduce": 2 * share, "send/recv": 1}.get(key[2], share)
                sent = int(sent) if sent.is_integer() else sent
                row |= {"calls": round(made), "bytes": sent, "formula": formula}
                row |= {"predicted_bytes": predicted, "ring": round(share * sent)}
                off = abs(made - calls)
                row["ok"] = self.check(f"calls: {' '.join(key)}", off, kind="calls")
                rows.append(row)
        alike = [name for name in ("phase", "axis") if len({r[name] for r in rows}) < 2]
        self.measure("communication", rows, hide=["predicted_bytes", *alike])

    def verdict(self) -> str:
        """PASS or FAIL, of all ranks' checks together."""
        rows = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                row = rows.setdefault(name, {"name": name, "bad": []} | check)
                row["diff"] = max(row["diff"], check["diff"])
                row["bad"] += [] if check["ok"] else [rank]
        bad = [row for row in rows.values() if row["bad"]]
        print()
        for row in bad[:4]:
            diff = f"off by {row['diff']:.3g}, allowed {row['allowed']:.3g}"
            print(wrap(f"✗ {row['name']}: {diff}, on ranks {row['bad']}"))
        wrong = Counter(row["kind"] for row in bad)
        kinds = Counter(row["kind"] for row in rows.values())
        counts = ", ".join(f"{wrong[kind]} of {kinds[kind]} {kind}" for kind in kinds)
        numbers = [row for row in rows.values() if row["kind"] == "numbers"]
        worst = max(numbers, key=lambda row: row["diff"])
        diff = f"worst difference {worst['diff']:.1e} (allowed {worst['allowed']:.0e})"
        text = f"{counts} differ" if bad else f"{len(rows)} checks, {diff}"
        self.data |= {"verdict": "FAIL" if bad else "PASS", "checks": [*rows.values()]}
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return f"{self.data['verdict']}  {self.data['lesson']}  {text}"


def cell(name: str, value) -> str:
    """A value as a table shows it."""
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


def lesson_parser(doc: str, breaks: dict, **sizes: int) -> Parser:
    """The flags that all lessons share, and whole numbers with their defaults."""
    about, style = doc.partition("How to read")[0], argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=style, allow_abbrev=False)
    add = parser.add_argument
    for name, default in {**sizes, "seed": 1, "timeout": 60}.items():
        said = f"({default or 'follows the mesh'})"
        add(f"--{name.replace('_', '-')}", type=positive, default=default, help=said)
    add("--dtype", choices=ALLOWED, default="float32", help="float64 is the proof")
    add("--only", type=positive, metavar="N", help="print section N alone")
    add("--break", dest="bug", choices=[*breaks, "list"], metavar="NAME", help="a bug")
    add("--json", type=Path, metavar="PATH", help="write all tables there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Put an edited copy of its target, a name or Class.name, into a lesson."""
    owner, _, name = edit["target"].rpartition(".")
    definition = getattr(module[owner], name) if owner else module[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {} if owner else module  # where the edited copy is defined
    exec(source.replace(edit["old"], edit["new"]), module, scope)
    if owner:
        setattr(module[owner], name, scope[name])


def describe(name: str, edit: dict) -> tuple[str, str]:
    """A bug as a diff; and its symptom, why, and who met it."""
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    for sign, text in (("-", edit["old"]), ("+", edit["new"])):
        lines += [f"{sign} {line}" for line in text.splitlines()]
    told = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "met")]
    return "\n".join([*lines, ""]), "\n".join(told)


def who_is_missing(places: list[str]) -> str:
    """What the ranks' notes say for certain; nobody is accused on a guess."""
    inside = [rank for rank, place in enumerate(places) if place.startswith("in call")]
    outside = [rank for rank in range(len(places)) if rank not in inside]
    if not inside:
        return "a call failed of which nothing is noted: see what the transport says"
    if outside:
        who = f"rank {outside[0]} is" if len(outside) == 1 else f"ranks {outside} are"
        text = f"{who} in no call, ranks {inside} wait"
        return f"{text}: a hang, a crash, or a skipped call"
    if len({*places}) == 1:
        return "a call failed that every rank had come to"
    text = f"ranks {inside} wait for each other"
    return f"{text}: one skipped or swapped a call, or died in it"


def fail(error: Exception, bug: str) -> None:
    """Say what went wrong, once for all ranks; end this rank."""
    words = re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]
    if COMM.store is None:
        stop(1, wrap(f"error: the ranks did not meet: {error}"), speaks=True)
    lost = re.search("[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe", words)
    lost = lost and isinstance(error, RuntimeError)
    if lost:  # others note where they are; or one died: torchrun ends us, and says whom
        time.sleep(3)
    speaks, code, lines = COMM.store.add("told", 1) == 1, 1, []
    what = f"rank {dist.get_rank()} raised {type(error).__name__}: {words}"
    if huge := re.search(r"tried to allocate \S+ \w+|overflowed.*", words, re.I):
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        code, what = 2, f"too large: {huge[0]}; this machine has {has} bytes"
    elif lost:
        ranks = range(dist.get_world_size())
        places = [COMM.store.get(f"place/{rank}").decode() for rank in ranks]
        what = who_is_missing(places)
        lines = [f"  rank {rank}: {place}"[:88] for rank, place in enumerate(places)]
        lines.append(wrap(f"  transport: {words[:150]}"))
    elif speaks and not isinstance(error, OSError):
        traceback.print_exception(error)
    stop(code, "\n".join([wrap(f"error: {what}"), *lines, bug]).strip(), speaks)


def stop(code: int, message: str, speaks: bool) -> None:
    """End this rank at once: tidying up while others are in a collective can hang."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for torchrun's report
        words = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": words}))
    sys.stdout.flush()
    if speaks:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def read_flags(parse_args, breaks: dict) -> argparse.Namespace:
    """What the command line says; the process ends here if that is a list, or wrong."""
    try:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            print(*(f"{name:<14}{breaks[name]['what']}" for name in breaks), sep="\n")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: alone nothing breaks")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        stop(2, wrap(f"error: {error}"), speaks=os.environ.get("RANK", "0") == "0")
    args.ranks, args.device, args.backend = ranks, "cpu", "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device, args.backend = f"cuda:{os.environ['LOCAL_RANK']}", "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """All ranks meet; the store that they share (a new part of it after a restart)."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of --max-restarts
    store = dist.PrefixStore(f"attempt {again}", store)
    where = {"store": store, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, timeout=limit, **where)
    return store


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    lesson, breaks = Path(module["__file__"]), module["BREAKS"]
    if "LOCAL_RANK" not in os.environ and not {"-h", "--help", "list"} & {*sys.argv}:
        command = f"torchrun --standalone --nproc_per_node={module.get('RANKS', 2)}"
        print("start it with torchrun, which makes the ranks:\n")
        print(f"    {command} {lesson.name}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # rank 0 alone prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, breaks)
    torch.set_num_threads(1)  # ranks share the cores: more threads would crawl
    torch.manual_seed(args.seed)
    diff, bug = describe(args.bug, breaks[args.bug]) if args.bug else ("", "")
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.note("in no call")
        if args.bug:
            told = lambda *_: stop(1, bug, COMM.store.add("told", 1) == 1)
            signal.signal(signal.SIGTERM, told)  # the bug has ended another rank
            args.timeout = min(args.timeout, 5)  # of the lesson's groups: it may hang
            apply_edit(breaks[args.bug], module)
            print(diff, flush=True)
        COMM.limit = timedelta(seconds=args.timeout)
        report = Report(lesson.stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{bug}\n{line}".strip(), flush=True)
        with COMM.meet("the last barrier", [*range(args.ranks)]):
            dist.barrier()
    except Exception as error:
        fail(error, bug)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all has been told
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        stop(1, line, speaks=False)
    os._exit(0)  # Python's own end can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
