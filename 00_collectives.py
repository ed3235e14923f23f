"""Lesson 00: collectives, or what ranks can say to each other.

A rank is one process with a number; a collective is a call that every rank of a group
makes together, and after which each holds something it did not hold before. Tensor
parallelism is nothing but matrix products with the right collectives between them.

Run it (2 ranks on a laptop; try 4 too, 8 at most on a small machine):

    torchrun --standalone --nproc_per_node=2 00_collectives.py

What you will see: first how many ranks there are, their mesh (one axis, called tp) and
who carries their messages (gloo between CPUs, NCCL between GPUs). Then the three ways a
group can hold a tensor; nine ways to move one, each with every rank's values before and
after; an all-reduce built by hand as a ring, its bytes counted; the four sharded matrix
products; a product on a 2D mesh. Every value is checked on every rank. `--trace` shows
each step of the ring, `--bench` measures time, `--break list` names the bugs you can
switch on.

New here: everything. Carried over: nothing.

Shapes: A[I, J] · B[J, K] = C[I, K]. A suffix names a tensor's dims, one letter each:
    UPPERCASE is the full size, lowercase this rank's 1/T slice of it (a_Ij: columns).
    A[I, J_tp] says the same in words: dim J is split over the mesh axis tp.
    C[I, K] {U_tp} is unreduced: full shape, still to be summed over tp ("partial_").
    T is the number of ranks on an axis, V the bytes of a whole tensor.

Needs: torch (and numpy, else torch warns that it is missing).
Sources: the scaling book, jax-ml.github.io/scaling-book (notation, four products);
    GSPMD, arXiv:2105.04663 (2D mesh); docs.pytorch.org/docs/stable/distributed.html.
"""

import argparse
import gc
import json
import os
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter, namedtuple
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# ==== NEW in 00: collectives


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if it does not divide."""
    if x.shape[dim] % parts:
        raise ValueError(
            f"dim {dim} of {list(x.shape)} has {x.shape[dim]} elements, and "
            f"{x.shape[dim]} % {parts} ranks = {x.shape[dim] % parts}, not 0"
        )
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    Shapes: full [.., I, ..] → [.., I/T, ..], a new tensor. Communication: none.
    Raises: ValueError if T does not divide the dim.
    """
    return split(full.detach(), dim, group.size())[group.rank()].clone()


# Each wrapper returns a new tensor and never changes its input. None of them is known
# to autograd: the result has no history (lesson 01 teaches them their backward). In a
# group of one rank nothing is called and nothing counted.


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    Shapes: x [...] → [...]. Communication: 1 call on x's elements.
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
    Raises: ValueError if T does not divide the dim.
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
    Raises: ValueError if T does not divide the dim.
    """
    parts = torch.stack(split(x.detach(), dim, group.size()))
    out = parts.clone()
    if group.size() > 1:
        with COMM.record("all-to-all", x, group):
            dist.all_to_all_single(out, parts, group=group)
    return torch.cat(list(out), dim)


def scatter(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Rank src cuts its x into T parts along dim 0 and hands one to each: → Shard(0).

    Shapes: x [I, ..] on src (elsewhere only its shape counts) → [I/T, ..].
    Communication: 1 call on x's elements.
    """
    parts = split(x.detach(), 0, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("scatter", x, group):
            mine = parts if group.rank() == src else None
            dist.scatter(out, mine, group_src=src, group=group)
    return out


def gather(x: Tensor, dst: int, group: dist.ProcessGroup) -> Tensor | None:
    """Rank dst gets all slices, joined along dim 0; the others get None.

    Shapes: x [i, ..] → [T·i, ..] on dst. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    here = group.rank() == dst
    slices = [torch.empty_like(x) for _ in range(group.size())] if here else None
    with COMM.record("gather", x, group, copies=group.size()):
        dist.gather(x, slices, group_dst=dst, group=group)
    return torch.cat(slices) if here else None


def reduce(x: Tensor, dst: int, group: dist.ProcessGroup) -> Tensor | None:
    """Rank dst gets the sum over ranks, element by element; the others get None.

    Shapes: x [...] → [...] on dst. Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("reduce", out, group):
            dist.reduce(out, group_dst=dst, group=group)
    return out if group.rank() == dst else None


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

    x is cut into T chunks. In T − 1 steps each chunk travels around and is added to on
    the way: rank r then has chunk r + 1 complete (a reduce-scatter). In T − 1 more the
    complete chunks travel around (an all-gather). T need not divide x.

    Args:
        on_step: called as on_step(name, chunks) after each of the 2(T−1) steps.
    Shapes: x [...] → [...], Partial() → Replicate().
    Communication: 2(T−1) sends a rank, together 2·V·(T−1)/T bytes where T divides x;
        summed over all ranks always 2·V·(T−1).
    """
    T, rank = group.size(), group.rank()
    chunks = list(x.detach().flatten().tensor_split(T))
    right, left = (rank + 1) % T, (rank - 1) % T
    for step in range(T - 1):
        mine = (rank - step) % T  # the chunk that I added to in the last step
        theirs = (rank - step - 1) % T
        arrived = send_recv(chunks[mine], right, chunks[theirs], left, group)
        chunks[theirs] = chunks[theirs] + arrived
        if on_step:
            on_step(f"reduce-scatter {step + 1}", chunks)
    for step in range(T - 1):
        mine, theirs = (rank - step + 1) % T, (rank - step) % T
        chunks[theirs] = send_recv(chunks[mine], right, chunks[theirs], left, group)
        if on_step:
            on_step(f"all-gather {step + 1}", chunks)
    return torch.cat(chunks).view(x.shape)


def sum_both(x: Tensor, y: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Two sums, one after the other. The n-th call of one rank meets the n-th of the
    others: the order is the only thing that tells collectives of a group apart."""
    sum_x = all_reduce(x, group)
    sum_y = all_reduce(y, group)
    return sum_x, sum_y


# The four sharded products A · B = C. What decides is the contracted dim J: if it is
# whole in both, there is nothing to send, unless one axis cuts both I and K (case 4).


def matmul_case_1(a_iJ: Tensor, b_JK: Tensor) -> Tensor:
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
    """A[I_tp, J] · B[J, K_tp] → C[I, K_tp]: C has room for tp once, so gather A."""
    return all_gather(a_iJ, 0, group) @ b_Jk


def matmul_case_4_right(a_iJ: Tensor, b_Jk: Tensor, group) -> Tensor:
    """A[I_tp, J] · B[J, K_tp] → C[I_tp, K]: or gather B."""
    return a_iJ @ all_gather(b_Jk, 1, group)


def matmul_2d(a_ij: Tensor, b_jk: Tensor, y_group, x_group) -> Tensor:
    """A[I_y, J_x] · B[J_y, K_x] → C[I_y, K_x] on a mesh y × x (arXiv:2105.04663).

    Each operand is gathered over the axis that splits J, and C is laid out as A.
    Communication: all-gather of A[I_y, J] on x (I·J/Y elements), of B[J, K_x] on y
    (J·K/X elements).
    """
    a_iJ = all_gather(a_ij, 1, x_group)
    b_Jk = all_gather(b_jk, 0, y_group)
    return a_iJ @ b_Jk


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    Args:
        sizes: axis → number of ranks, e.g. {"y": 2, "x": 4}, ranks laid out in order.
        timeout: seconds; a new group does not inherit it, its default is 30 minutes.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


# What counts it all. On a first reading, go on to the next banner.


class CommCounter:
    """Counts calls and payload bytes of every collective, and notes the last one.

    Payload is the logical tensor: V bytes, whatever the algorithm sends. What a ring
    puts on the wire follows from it (`ring_factor`). The note goes to the job's store
    (a small key-value server that all ranks can reach), so that when a rank hangs, the
    others can say where it was last seen.
    """

    def __init__(self):
        self.rows = {}  # (what, phase, collective, axis) → [calls, bytes]
        self.what, self.phase = "", ""  # labels of what comes next, set by the lesson
        self.seconds = 0.0  # spent in collectives, waiting for others included
        self.store, self.rank = None, 0
        self.place = {"state": "before", "number": 0, "call": "any call", "line": ""}
        self.numbers = {}  # who meet → how many calls they had

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        key = (self.what, self.phase, collective, axis)
        calls, before = self.rows.get(key, (0, 0))
        self.rows[key] = [calls + 1, before + nbytes]

    def record(self, collective: str, x: Tensor, group: dist.ProcessGroup, copies=1):
        """Count one call on `copies`·x.nbytes bytes; use as `with COMM.record(…):`."""
        self.count(collective, copies * x.nbytes, group.group_desc)
        frame = sys._getframe(2)  # whoever called the wrapper
        where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
        call = f"{collective} of {list(x.shape)} over {group.group_desc}"
        return self.at(call, where, dist.get_process_group_ranks(group))

    def at(self, call: str, where: str, ranks: list[int] | None = None):
        """What `with` notes on entering and on leaving; ranks: who meet there (all).

        The n-th call of one rank meets the n-th of the others: so calls are numbered
        for each set of ranks.
        """
        number = self.numbers[str(ranks)] = self.numbers.get(str(ranks), 0) + 1
        self.place = {"number": number, "call": call, "line": where, "ranks": ranks}
        return self

    def __enter__(self):
        self.note("in")
        self.start = time.perf_counter()

    def __exit__(self, kind, error, trace):
        self.seconds += time.perf_counter() - self.start
        if error is None:
            self.note("after")

    def note(self, state: str) -> None:
        self.place["state"] = state
        if self.store is not None:
            self.store.set(f"place/{self.rank}", json.dumps(self.place))

    def total(self, **wanted) -> list[int]:
        """[calls, bytes] of all rows with these labels, as in total(collective="…")."""
        names = ("what", "phase", "collective", "axis")
        rows = [(dict(zip(names, key)), row) for key, row in self.rows.items()]
        hits = [row for key, row in rows if wanted.items() <= key.items()]
        return [sum(row[0] for row in hits), sum(row[1] for row in hits)]


COMM = CommCounter()


def ring_factor(collective: str, T: int) -> float:
    """Bytes one rank sends in a ring, as a multiple of the payload V."""
    return {"all-reduce": 2 * (T - 1) / T}.get(collective, (T - 1) / T)


# ==== BREAK IT

Break = namedtuple("Break", "target bug what symptom why thread")
Break.__doc__ = """A bug to switch on: `target`, a dotted name, is replaced by `bug`."""


def skip_on_last_rank(x, group, op=dist.ReduceOp.SUM, good=all_reduce):
    """The last rank goes on without calling."""
    return x.clone() if group.rank() == group.size() - 1 else good(x, group, op)


def other_order_on_last_rank(x, y, group, good=sum_both):
    """The last rank calls its two collectives the other way round."""
    if group.rank() == group.size() - 1:
        return good(y, x, group)[::-1]
    return good(x, y, group)


def longer_on_last_rank(x, group, op=dist.ReduceOp.SUM, good=all_reduce):
    """The last rank brings two elements more."""
    more = x.new_zeros(2) if group.rank() == group.size() - 1 else x.new_zeros(0)
    return good(torch.cat([x.flatten(), more]), group, op)


def in_place_all_reduce(x, group, op=dist.ReduceOp.SUM):
    """Reduces x where it lies; for a view that is not contiguous, a copy of it."""
    with COMM.record("all-reduce", x, group):
        dist.all_reduce(x.contiguous(), op, group=group)
    return x


BREAKS = {
    "skip": Break(
        "all_reduce",
        skip_on_last_rank,
        "the last rank skips its all-reduce, as under `if rank == 0:`",
        "nothing fails at first: the other ranks wait, until the timeout ends the job",
        "a collective returns on no rank before all have called it. The rank that "
        "skipped it waits too, in its next one, and complains like the others",
        "github.com/pytorch/pytorch/issues/115964, …/97191",
    ),
    "order": Break(
        "sum_both",
        other_order_on_last_rank,
        "the last rank calls two all-reduces in the other order",
        "no error, no hang, wrong numbers: x of one rank was added to y of another",
        "calls are matched by their order alone; the names are in your program only",
        "github.com/pytorch/pytorch/issues/109401",
    ),
    "shapes": Break(
        "all_reduce",
        longer_on_last_rank,
        "the last rank brings a longer tensor than the others",
        "the transport aborts a process, without a Python exception to catch",
        "no rank tells the others its shape: each takes its own for everyone's",
        "github.com/pytorch/pytorch/issues/97191",
    ),
    "view": Break(
        "all_reduce",
        in_place_all_reduce,
        "an in-place all-reduce of a view that is not contiguous",
        "contiguous tensors come out right, but overwrite their input: what is printed "
        "as before is the after; a transposed one comes out as it went in, unreduced",
        "`.contiguous()` of such a view is a copy: the sum goes into the copy, and the "
        "copy is dropped",
        "github.com/NVIDIA/Megatron-LM/issues/5337",
    ),
}


def apply_break(broken: Break, module: dict) -> None:
    """Replace the bug's target, `name` or `Class.name`, in a lesson's namespace."""
    owner, _, name = broken.target.rpartition(".")
    if owner:
        setattr(module[owner], name, broken.bug)
    else:
        module[name] = broken.bug


# ==== RUN

ALLOWED = {  # dtype → largest relative difference of a loss, of any other tensor
    "float64": (1e-12, 1e-12),
    "float32": (1e-6, 1e-5),
    "bfloat16": (2e-2, 2e-2),
}


EXACT = {"float64": 0.0, "float32": 0.0, "bfloat16": 2e-2}  # for sums of whole numbers


def rel_diff(a: Tensor, reference: Tensor) -> float:
    """max|a − reference| / max|reference|; inf for nan and for another shape."""
    if a.shape != reference.shape:
        return float("inf")
    a, reference = a.detach().double(), reference.detach().double()
    if a.numel() == 0 or torch.equal(a, reference):
        return 0.0
    diff = ((a - reference).abs().max() / reference.abs().max()).item()
    return diff if diff == diff else float("inf")


def gather_objects(value) -> list:
    """Every rank's value, in rank order: bookkeeping of the lesson, so not counted."""
    everyone = [None] * dist.get_world_size()
    with COMM.at("gathering of results to print", "gather_objects"):
        dist.all_gather_object(everyone, value)
    return everyone


class Report:
    """What a lesson finds: rank 0 prints it, every rank checks it, --json writes it."""

    def __init__(self, lesson: str, args, mesh: dict[str, int], backend: str):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.lesson, self.args, self.checks = lesson, args, []
        self.data = {
            "lesson": lesson, "world_size": self.ranks, "mesh": mesh,
            "backend": backend, "device": args.device, "dtype": args.dtype,
            "losses": [], "gradients": [], "communication": [], "memory": [],
            "checks": [], "text": [],
        }  # fmt: skip
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        where = f"{backend} on {args.device}"
        self.say(f"{lesson}  {ranks}, mesh {axes}  {where}  {args.dtype}")

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            self.data["text"] += text.split("\n")
            print(text, flush=True)

    def table(self, head: str, rows: list[list], align: str) -> None:
        """Print rows under `head` (columns parted by |); align has l or r for each."""
        rows = [head.split("|"), *([str(cell) for cell in row] for row in rows)]
        width = [max(len(row[i]) for row in rows) for i in range(len(align))]
        for row in rows:
            cells = [
                cell.ljust(width[i]) if align[i] == "l" else cell.rjust(width[i])
                for i, cell in enumerate(row)
            ]
            self.say("   " + "  ".join(cells).rstrip())

    def check(self, name: str, diff: float, allowed: float = 0.0) -> str:
        """Note one comparison of this rank; "ok" or "✗" for the table."""
        ok = diff <= allowed  # False for nan too
        self.checks.append([name, diff, allowed, ok])
        return "ok" if ok else "✗"

    def moved(self, what: str, collective: str, axis: str, predicted: int, phase=""):
        """Check counted bytes against a formula; (calls, bytes, "ok" or "✗")."""
        labels = dict(what=what, collective=collective, axis=axis, phase=phase)
        calls, measured = COMM.total(**labels)
        row = dict(labels, calls=calls, bytes=measured, predicted_bytes=predicted)
        self.data["communication"].append(row)
        name = " ".join(filter(None, ["bytes of", what, phase, collective, axis]))
        return calls, measured, self.check(name, abs(measured - predicted))

    def verdict(self, claim: str, broken: Break | None) -> str:
        """All ranks' checks together: the last line, PASS … or FAIL …."""
        everyone = gather_objects(self.checks)
        merged = {}
        for rank, checks in enumerate(everyone):
            for name, diff, allowed, ok in checks:
                row = merged.setdefault(name, dict(name=name, diff=0.0, bad=[]))
                row["allowed"] = allowed
                row["diff"] = max(row["diff"], diff)
                row["bad"] += [] if ok or rank in row["bad"] else [rank]
        bad = [row for row in merged.values() if row["bad"]]
        rows = list(merged.values())
        worst = max(rows, key=lambda row: row["diff"])
        score = dict(worst_rel_diff=worst["diff"], allowed=worst["allowed"])
        self.data.update(score, checks=rows, verdict="FAIL" if bad else "PASS")
        for row in bad[:4]:
            everywhere = len(row["bad"]) == self.ranks
            ranks = "every rank" if everywhere else f"rank {row['bad']}"
            off = f"off by up to {row['diff']:.1e}, allowed {row['allowed']:.0e}"
            line = f"✗ {row['name']}: {off}, on {ranks}"
            self.say(textwrap.fill(line, 88, subsequent_indent="  "))
        if len(bad) > 4:
            self.say(f"✗ and {len(bad) - 4} more")
        if broken:
            self.say(diagnosis(self.args.break_name, broken))
        score = f"worst relative difference {worst['diff']:.1e}, allowed"
        ending = f"{claim}  ({score} {worst['allowed']:.0e})".replace(" 0e+00", " 0")
        if bad:
            ending = f"{len(bad)} of {len(rows)} checks, first: {bad[0]['name']}"
        last_line = f"{self.data['verdict']}  {self.lesson}  {ending}"
        self.say(last_line)
        if self.rank == 0 and self.args.json:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return last_line


def diagnosis(name: str, broken: Break) -> str:
    """What --break NAME did, what one sees, why, and who met it."""
    texts = broken.symptom, broken.why, broken.thread
    lines = ["", *textwrap.wrap(f"--break {name}: {broken.what}", 88)]
    for label, text in zip(("symptom", "why", "met in"), texts):
        lines += textwrap.wrap(f"{label:<9}{text}", 88, subsequent_indent=" " * 9)
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse, but one `error:` line for all ranks, and one --help."""

    def error(self, message):
        """Called by argparse, which would print its usage on every rank."""
        raise ValueError(message)

    def print_help(self, file=None):
        """Once, not once a rank."""
        if int(os.environ.get("RANK", 0)) == 0:
            super().print_help(file)


def lesson_parser(doc: str, steps: int, steps_are: str) -> Parser:
    """The flags that all lessons share."""
    about = doc.partition("Shapes:")[0]
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=style, allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=positive, default=steps, help=f"{steps_are} ({steps})")
    add("--seed", type=int, default=0)
    add("--dtype", choices=ALLOWED, default="float32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each rank has one")
    add("--timeout", type=positive, help="seconds to wait for a rank (60; --break: 5)")
    add("--break", dest="break_name", metavar="NAME", help="a bug; `list` lists them")
    add("--json", type=Path, metavar="PATH", help="write all results there")
    return parser


def positive(text: str) -> int:
    """A flag's value as a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def pick_device(args) -> str:
    """Fill in args.device; the backend: NCCL where every rank has a GPU of its own."""
    local_rank, here = (int(os.environ[k]) for k in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    args.device = args.device or ("cuda" if gpus >= here else "cpu")
    if args.device == "cpu":
        return "gloo"
    if gpus == 0:
        raise ValueError("--device cuda, but torch sees no GPU: leave --device out")
    torch.cuda.set_device(local_rank % gpus)
    return "nccl" if gpus >= here else "gloo"


def last_words(message: str) -> None:
    """What torchrun's closing report shows, should this rank fail."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        words = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(words))


def stop(code: int) -> None:
    """End this rank at once: tidying up while others are in a collective can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(message: str) -> None:
    """A wrong argument: one line, exit code 2. All ranks see it; rank 0 says it."""
    last_words(f"error: {message}")
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(5)  # torchrun ends us when rank 0 has spoken
    stop(2)


def waits_for(rank: int, places: dict) -> list[int]:
    """The ranks that should be in the call that this rank is in, and are not."""
    here = places.get(rank, {"state": "before"})
    if here["state"] != "in":
        return []
    others = here["ranks"] or range(dist.get_world_size())
    return [other for other in others if not same_call(here, places.get(other, {}))]


def chain_from(rank: int, places: dict) -> list[int]:
    """A rank, those that it waits for, those that these wait for, and so on."""
    chain = [rank]
    for one in chain:
        chain += [other for other in waits_for(one, places) if other not in chain]
    return chain


def same_call(here: dict, there: dict) -> bool:
    """Are two ranks in one and the same call?"""
    return all(here[key] == there.get(key) for key in ("state", "number", "call"))


def blame(error: Exception, timeout: int, store) -> str:
    """Where every rank was last seen, and which of them the others waited for.

    To be asked while some rank is in a collective.
    """
    places = {}
    for rank in range(dist.get_world_size()):
        if store.check([f"place/{rank}"]):
            places[rank] = json.loads(store.get(f"place/{rank}"))
    waiting = [rank for rank, place in places.items() if place["state"] == "in"]
    here = dist.get_rank()
    chain = chain_from(here if here in waiting else waiting[0], places)
    calls = {
        rank: (place["number"], place["call"]) if place["state"] == "in" else None
        for rank, place in places.items()
    }
    guilty = [rank for rank in chain if not calls.get(rank)]  # they wait for nobody
    if not guilty:  # a circle: each waits for the next
        chain = chain_from(chain[-1], places)
    waiting = [rank for rank in chain if set(waits_for(rank, places)) & set(guilty)]
    inside = Counter(calls[rank] for rank in sorted(waiting or chain)).most_common(2)
    common = inside[0][0]
    tie = len(inside) == 2 and inside[0][1] == inside[1][1] and not guilty
    guilty = guilty or [rank for rank in chain if calls[rank] != common]
    lines = [
        f"  rank {rank}: {place['state']} call {place['number']}, "
        f"{place['call']} ({place['line']})"
        for rank, place in places.items()
    ]
    names = ", ".join(map(str, sorted(guilty)))
    who = f"this call was not made by rank {names}"
    who += " (a tie: or the others skipped one before)" if tie else ""
    if tie and common[1].startswith("message"):
        who = f"ranks {', '.join(map(str, sorted(chain)))} wait for each other"
    who = who if guilty else "all ranks are in it: one was lost there, or shapes differ"
    head = f"error: call {common[0]}, {common[1]}, did not come about; {who}"
    first = str(error).strip().split("\n")[0]
    said = f"  the transport, after {timeout} s at most: {first[:150]}"
    return "\n".join([head, *lines, said])


def fail(error: Exception, args, store, broken: Break | None) -> None:
    """An exception in main: say who is to blame, once, and end this rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all when one is lost
    if COMM.place["state"] == "in":  # the collective failed: the cause is elsewhere
        message = blame(error, args.timeout, store)
    else:
        traceback.print_exc()
        name = type(error).__name__
        message = f"error: rank {dist.get_rank()} raised {name}: {error}"
        COMM.note(f"raised {name} after")
    if broken:
        message += "\n" + diagnosis(args.break_name, broken)
    last_words(message)
    if store.add("told", 1) == 1:
        print(message, file=sys.stderr, flush=True)
    if COMM.place["state"] == "in":
        time.sleep(1)  # the guilty rank first: torchrun reports the first to end
    stop(1)


def launch(file: str, parse_args, main, breaks: dict[str, Break], module: dict) -> None:
    """Run a lesson's main(args, backend) on this rank, from first check to last."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = parse_args(ranks)
        if args.break_name == "list":
            if int(os.environ.get("RANK", 0)) == 0:
                print(*(f"{name:<15}{breaks[name].what}" for name in breaks), sep="\n")
            return
        check_common(args, ranks, breaks)
        backend = pick_device(args) if "RANK" in os.environ else None
    except ValueError as error:
        refuse(str(error))
    if backend is None:
        ranks = module.get("RANKS", 2)  # of a lesson that shows more with more
        command = f"torchrun --standalone --nproc_per_node={ranks} {Path(file).name}"
        print(f"start it with torchrun, which makes the ranks:\n\n    {command}")
        sys.exit(2)
    store = start_group(args, backend)
    broken = breaks.get(args.break_name)
    if broken:
        last_words(diagnosis(args.break_name, broken))  # it may abort the process
        apply_break(broken, module)
    try:
        verdict = main(args, backend)
        with COMM.at("the last barrier", "launch"):
            dist.barrier()
    except Exception as error:
        fail(error, args, store, broken)
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()
    if verdict.startswith("FAIL"):
        last_words(verdict)
        stop(1)


def start_group(args, backend: str) -> dist.Store:
    """Join the group of all ranks; the store that they share."""
    torch.set_num_threads(1)  # ranks share the cores: more threads would crawl
    torch.manual_seed(args.seed)
    limit = timedelta(seconds=args.timeout)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # torchrun --max-restarts starts all ranks anew, beside what the lost ones stored
    attempt = (store.add("ranks started", 1) - 1) // ranks
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=limit
    )
    COMM.store, COMM.rank = store, rank
    return store


def check_common(args, ranks: int, breaks: dict[str, Break]) -> None:
    """ValueError where a flag that all lessons share cannot be served."""
    if args.break_name is not None and args.break_name not in breaks:
        names = ", ".join(breaks)
        raise ValueError(f"--break {args.break_name}: unknown; there are {names}, list")
    if args.break_name and ranks == 1:
        raise ValueError("--break needs 2 ranks or more: one rank alone breaks nothing")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.json and args.json.is_dir():
        raise ValueError(f"--json {args.json}: this is a folder, a file is wanted")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed {args.seed}: from 0 to 2^32 − 1 it may be")
    if args.timeout is None:
        args.timeout = 5 if args.break_name else 60


def show_three_ways(report: Report, group, dtype) -> None:
    """Section 1: the tensor 0 1 2 … as replicated, sharded and partial."""
    T, rank = group.size(), group.rank()
    size = 2 * T if T <= 4 else T  # so that a row fits the screen
    full = torch.arange(size, dtype=dtype, device=report.args.device)
    mine = shard(full, 0, group)
    terms = [(full * r) % 5 - 2 for r in range(1, T)]  # any numbers, and what is left
    term = [full - sum(terms), *terms][rank]
    joined, added = all_gather(mine, 0, group), all_reduce(term, group)
    report.check("sharded: slices join to A", rel_diff(joined, full))
    report.check("partial: terms sum to A", rel_diff(added, full))
    report.say(
        "\n1  Three ways for a group to hold a tensor A; notation; PyTorch's word"
    )
    rows = [["", "A[I]", "A[I_tp]", "A[I] {U_tp}"]]
    rows += [["", "Replicate()", "Shard(0)", "Partial()"]]
    held = gather_objects([numbers(full), numbers(mine), numbers(term)])
    rows += [[f"rank {r}", *values] for r, values in enumerate(held)]
    rows += [["", "each has all of it", "join them: A", "add them: A"]]
    report.table("|replicated|sharded|partial", rows, "llll")


def numbers(x: Tensor | None) -> str:
    """[ 0  1 10], a column of two characters a number; – for nothing."""
    if x is None:
        return "–"
    return "[" + " ".join(f"{v:2.0f}" for v in x.flatten().tolist()) + "]"


def collectives(T: int) -> list[tuple]:
    """name, what it does, elements before, the call, the formula for the payload, and
    `after`: all ranks' tensors before → all ranks' tensors after, in plain torch."""
    n = 2 if T <= 4 else 1  # elements a slice, so that a row fits the screen
    none = [None] * (T - 1)
    add = lambda xs: torch.stack(xs).sum(0)
    turn = lambda xs, r: [x.tensor_split(T)[r] for x in xs]
    return [
        ("broadcast", "rank 0's tensor goes to every rank",
         4, lambda x, g: broadcast(x, 0, g), lambda xs: [xs[0]] * T),
        ("scatter", "rank 0 hands each rank one slice of its tensor",
         n * T, lambda x, g: scatter(x, 0, g), lambda xs: list(xs[0].tensor_split(T))),
        ("gather", "rank 0 collects every rank's slice",
         n, lambda x, g: gather(x, 0, g), lambda xs: [torch.cat(xs), *none]),
        ("reduce", "rank 0 gets the sum, element by element",
         4, lambda x, g: reduce(x, 0, g), lambda xs: [add(xs), *none]),
        ("all-reduce", "every rank gets the sum, element by element",
         4, all_reduce, lambda xs: [add(xs)] * T),
        ("all-gather", "every rank gets every slice, in rank order",
         n, lambda x, g: all_gather(x, 0, g), lambda xs: [torch.cat(xs)] * T),
        ("reduce-scatter", "the sum, of which each rank keeps only its slice",
         n * T, lambda x, g: reduce_scatter(x, 0, g),
         lambda xs: list(add(xs).tensor_split(T))),
        ("all-to-all", "slice j of rank r becomes slice r of rank j",
         n * T, all_to_all, lambda xs: [torch.cat(turn(xs, r)) for r in range(T)]),
        ("send/recv", "each rank sends to the next, the last to rank 0",
         4, lambda x, g: send_recv(x, (g.rank() + 1) % T, x, (g.rank() - 1) % T, g),
         lambda xs: [xs[r - 1] for r in range(T)]),
    ]  # fmt: skip


def show_collectives(report: Report, group, dtype) -> None:
    """Section 2: nine collectives, each rank's values before and after."""
    T, rank, device = group.size(), group.rank(), report.args.device
    report.say(
        "\n2  Nine ways to move it (rank r starts with 10·r + 0, 1, …; V: its bytes)"
    )
    demos = collectives(T)[: None if T > 1 else -1]  # one rank has no one to send to
    for name, does, size, call, after in demos:
        COMM.what = "picture"
        every = [10 * r + torch.arange(size, dtype=dtype) for r in range(T)]
        mine, wanted = every[rank].to(device), after(every)[rank]
        got = call(mine, group)
        if got is None or wanted is None:
            diff = 0.0 if got is wanted else float("inf")
        else:
            diff = rel_diff(got.cpu(), wanted)
        mark = report.check(name, diff, EXACT[report.args.dtype])
        V = max(size, after(every)[0].numel()) * mine.element_size()
        wire = V if T > 1 else 0
        _, moved, counted = report.moved("picture", name, group.group_desc, wire)
        marks = mark if counted == "ok" else counted
        report.say(f"{name:<16}{does:<51}V = {moved:>3} bytes  {marks:>2}")
        held = gather_objects([numbers(mine), numbers(got)])
        for r, (before, now) in enumerate(held):
            report.say(f"   rank {r}  {before} → {now}")


def show_ring(report: Report, group, dtype) -> None:
    """Section 3: an all-reduce from two collectives, then from sends alone."""
    T, device = group.size(), report.args.device
    size = 2 * T if T <= 4 else T  # so that a row fits the screen
    x = group.rank() + torch.arange(size, dtype=dtype, device=device)
    COMM.what, allowed = "two halves", EXACT[report.args.dtype]
    whole, half = all_reduce(x, group), reduce_scatter(x, 0, group)
    both = all_gather(half, 0, group)
    mark = report.check("reduce-scatter + all-gather", rel_diff(both, whole), allowed)
    report.say(
        "\n3  An all-reduce is a reduce-scatter, then an all-gather (values r + i)"
    )
    rows = gather_objects([numbers(x), numbers(half), numbers(both)])
    rows = [[f"rank {r}", *row, mark] for r, row in enumerate(rows)]
    report.table("|before|reduce-scatter|all-gather|ok", rows, "llllr")
    report.say(
        f"   By hand, as a ring of T = {T} ranks, each sending to the next one only:\n"
        "   T − 1 steps for each half, V/T bytes sent in every step (--trace)"
    )
    rows = []
    for size in (2 * T, 2 * T + 3):
        x = group.rank() + torch.arange(size, dtype=dtype, device=device)
        COMM.what = f"ring of {size}"
        trace = report.args.trace and size == 2 * T
        whole = all_reduce(x, group)
        show = partial(show_step, report, whole) if trace else None
        ring = ring_all_reduce(x, group, show)
        diff = rel_diff(ring, whole)
        mark = report.check(f"ring of {size} elements", diff, allowed)
        V = size * x.element_size()
        sent = gather_objects(COMM.total(what=COMM.what, collective="send/recv")[1])
        off = abs(sum(sent) - 2 * V * (T - 1))
        sums = report.check(f"bytes of ring of {size}", off)
        each = "–"
        if size % T == 0:
            each = f"{2 * V * (T - 1) // T}"
            report.moved(COMM.what, "send/recv", group.group_desc, 2 * V * (T - 1) // T)
        low_high = "–".join(map(str, sorted({min(sent), max(sent)})))
        marks = mark if sums == "ok" else sums
        rows.append([size, V, low_high, each, sum(sent), 2 * V * (T - 1), marks])
    head = "elements|V bytes|a rank sent|2V(T−1)/T|all sent|2V(T−1)|= all-reduce"
    report.table(head, rows, "rrrrrrr")


def show_step(report: Report, whole: Tensor, name: str, chunks: list[Tensor]) -> None:
    """One step of the ring: every rank's chunks, a star behind the complete ones."""
    sums = whole.tensor_split(len(chunks))
    stars = [
        "*" if torch.equal(chunk, sum_) else " " for chunk, sum_ in zip(chunks, sums)
    ]
    rows = gather_objects(" ".join(numbers(c) + star for c, star in zip(chunks, stars)))
    for rank, row in enumerate(rows):
        title = name if rank == 0 else ""
        report.say(f"     {title:<18} rank {rank}   {row}".rstrip())


def products(T: int) -> list[tuple]:
    """case, how A and B lie, the rule, how C lies, the function, and what it takes: A's
    and B's sharded dim (None: whole), C's, the collective, its payload in elements."""
    I, J, K = 2 * T, 4 * T, 3 * T
    return [
        (1, "A[I_tp, J] B[J, K]", "nothing", "C[I_tp, K]",
         lambda a, b, g: matmul_case_1(a, b), (0, None, 0), None, 0),
        (2, "A[I, J_tp] B[J, K]", "AllGather A", "C[I, K]",
         matmul_case_2_gather, (1, None, None), "all-gather", I * J),
        (2, "", "slice B, as 3", "C[I, K]",
         matmul_case_2_slice, (1, None, None), "all-reduce", I * K),
        (3, "A[I, J_tp] B[J_tp, K]", "AllReduce", "C[I, K]",
         matmul_case_3_all_reduce, (1, 0, None), "all-reduce", I * K),
        (3, "", "ReduceScatter", "C[I, K_tp]",
         matmul_case_3_reduce_scatter, (1, 0, 1), "reduce-scatter", I * K),
        (4, "A[I_tp, J] B[J, K_tp]", "AllGather A", "C[I, K_tp]",
         matmul_case_4_left, (0, 1, 1), "all-gather", I * J),
        (4, "", "AllGather B", "C[I_tp, K]",
         matmul_case_4_right, (0, 1, 0), "all-gather", J * K),
    ]  # fmt: skip


def show_matmuls(report: Report, group, dtype) -> None:
    """Section 4: the four sharded products, in `--steps` rounds of random matrices."""
    T, args = group.size(), report.args
    generator = torch.Generator().manual_seed(args.seed)
    cut = lambda x, dim: x if dim is None else shard(x, dim, group)
    rows = []
    for case, lies, rule, c_lies, product, dims, collective, size in products(T):
        COMM.what = f"case {case}: {rule}"
        diff = 0.0
        for _ in range(args.steps):
            a_IJ, b_JK = (
                torch.randint(-2, 3, shape, generator=generator).to(args.device, dtype)
                for shape in ((2 * T, 4 * T), (4 * T, 3 * T))
            )
            with FlopCounterMode(display=False) as flops:
                c = product(cut(a_IJ, dims[0]), cut(b_JK, dims[1]), group)
            diff = max(diff, rel_diff(c, cut(a_IJ @ b_JK, dims[2])))
        mark = report.check(COMM.what, diff)  # sums of whole numbers are exact: bitwise
        predicted = size * a_IJ.element_size() * args.steps if T > 1 else 0
        axis = group.group_desc
        _, moved, counted = report.moved(COMM.what, collective or "", axis, predicted)
        row = [lies and f"{case} {lies}", rule, c_lies, flops.get_total_flops()]
        sent = moved // args.steps
        wire = f"{sent * ring_factor(collective, T):.0f}" if collective else 0
        mark = mark if counted == "ok" else counted
        rows.append([*row, sent, predicted // args.steps, wire, mark])
    I, J, K = 2 * T, 4 * T, 3 * T
    report.say(
        "\n4  C[I, K] = A[I, J] · B[J, K], four ways to be sharded: what about J?\n"
        "   J is summed over. If it is split, a rank has only some terms of the sum,\n"
        "   {U_tp}. Splitting I or K only says which part of C is whose, but tp can\n"
        f"   split only one dim of C (case 4). One process: {2 * I * J * K} flops;\n"
        "   bytes: payload; ring: what each rank of a ring sends"
    )
    head = "A and B lie as|what to do|C lies as|flops|bytes|formula|ring|ok"
    report.table(head, rows, "lllrrrrr")


def show_mesh(report: Report, groups, dtype) -> None:
    """Section 5: the product on a 2D mesh, every matrix split on both axes."""
    args = report.args
    Y, X = groups["y"].size(), groups["x"].size()
    I, J, K = 2 * Y, 2 * Y * X, 3 * X
    generator = torch.Generator().manual_seed(args.seed + 1)
    a_IJ = torch.randint(-2, 3, (I, J), generator=generator).to(args.device, dtype)
    b_JK = torch.randint(-2, 3, (J, K), generator=generator).to(args.device, dtype)
    cut = lambda x: shard(shard(x, 0, groups["y"]), 1, groups["x"])
    COMM.what = "2D product"
    c_ik = matmul_2d(cut(a_IJ), cut(b_JK), groups["y"], groups["x"])
    mark = report.check("2D product", rel_diff(c_ik, cut(a_IJ @ b_JK)))
    report.say(f"\n5  The same on a mesh y {Y} × x {X}: A[I_y, J_x] · B[J_y, K_x]")
    coordinates = gather_objects([groups["y"].rank(), groups["x"].rank()])
    for y in range(Y):
        line = [f"rank {coordinates.index([y, x])} (y {y}, x {x})" for x in range(X)]
        report.say("   " + "   ".join(line))
    rows = []
    for axis, rule, size in (
        ("x", "A[I_y, J]", I * J // Y),
        ("y", "B[J, K_x]", J * K // X),
    ):
        size *= a_IJ.element_size()
        row = report.moved("2D product", "all-gather", axis, size)
        rows.append([f"AllGather over {axis} → {rule}", row[1], size, row[2]])
    rows.append(["multiply → C[I_y, K_x], laid out as A", 0, 0, mark])
    report.table("step|bytes|predicted|ok", rows, "lrrr")


def show_traps(report: Report, group, dtype) -> None:
    """Section 6: a view that is not contiguous, and the order of the calls."""
    T, rank, device = group.size(), group.rank(), report.args.device
    COMM.what = "traps"
    x = torch.arange(6, dtype=dtype, device=device).view(2, 3).T  # a view: [3, 2]
    mine = x + rank  # keeps the view's strides
    before = mine.clone()
    got, wanted = all_reduce(mine, group), T * x + T * (T - 1) // 2
    marks = [report.check("all-reduce of a view", rel_diff(got, wanted))]
    marks += [report.check("its input untouched", rel_diff(mine, before))]
    ones, tens = (torch.full((3,), n, dtype=dtype, device=device) for n in (1, 10))
    sum_1, sum_10 = sum_both(ones, tens, group)
    marks += [report.check("two sums in order: 1s", rel_diff(sum_1, T * ones))]
    marks += [report.check("two sums in order: 10s", rel_diff(sum_10, T * tens))]
    report.say(
        "\n6  Two traps, avoided: in place, a view can come back as it was (--break "
        "view);\n   in another order on one rank, 1s are added to 10s (--break order)"
    )
    rows = [
        ["all-reduce of a transposed view", numbers(before), numbers(got), marks[0]],
        ["and the view itself afterwards", numbers(before), numbers(mine), marks[1]],
        ["two sums in a row: first the 1s", numbers(ones), numbers(sum_1), marks[2]],
        ["then the 10s, on every rank", numbers(tens), numbers(sum_10), marks[3]],
    ]
    report.table("|rank 0 before|after|ok", rows, "lllr")
    report.say()


def bench(report: Report, group, dtype) -> None:
    """`--bench`: seconds against bytes, and the line through them; of this machine."""
    T, device = group.size(), report.args.device
    rows, points = [], []
    for V in (2**exponent for exponent in range(10, 25, 2)):
        x = torch.ones(V // dtype.itemsize // T * T, dtype=dtype, device=device)
        row = [f"{V // 1024} KiB"]
        for name in ("all-gather", "reduce-scatter", "all-reduce"):
            seconds = median_seconds(name, x, group)
            wire = x.nbytes * ring_factor(name, T)
            hops = (T - 1) * (2 if name == "all-reduce" else 1)
            points.append([name, x.nbytes, hops, wire, seconds])
            row += [f"{seconds * 1e6:.0f}", f"{wire / seconds / 1e6:.0f}"]
        rows.append(row)
    report.data["bench"] = points
    report.say("How long it takes on this machine (median of 7)")
    head = "V|all-gather µs|MB/s|reduce-scatter µs|MB/s|all-reduce µs|MB/s"
    report.table(head, rows, "rrrrrrr")
    for name in ("all-gather", "reduce-scatter", "all-reduce"):
        mine = torch.tensor([p[2:] for p in points if p[0] == name]).double()
        weight = 1 / mine[:, 2:]  # a small message counts as much as a big one
        fit = torch.linalg.lstsq(mine[:, :2] * weight, mine[:, 2:] * weight).solution
        alpha, slowness = fit.flatten().tolist()
        report.say(
            f"   {name:<15} time ≈ {mine[0, 0]:.0f} hops · {alpha * 1e6:.0f} µs "
            f"+ bytes on the wire / {1e-6 / slowness:.0f} MB/s"
        )
    report.say()


def median_seconds(name: str, x: Tensor, group, repeats: int = 7) -> float:
    """Median of `repeats` calls after one to warm up."""
    piece, seconds = shard(x, 0, group), []
    call = {
        "all-gather": lambda: all_gather(piece, 0, group),
        "reduce-scatter": lambda: reduce_scatter(x, 0, group),
        "all-reduce": lambda: all_reduce(x, group),
    }[name]
    for _ in range(repeats + 1):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[repeats // 2]


def parse_args(ranks: int) -> argparse.Namespace:
    parser = lesson_parser(__doc__, 3, "rounds of random matrices")
    add = parser.add_argument
    add("--trace", action="store_true", help="show every step of the ring")
    add("--bench", action="store_true", help="also measure time against size")
    return parser.parse_args()


def main(args: argparse.Namespace, backend: str) -> str:
    ranks, dtype = dist.get_world_size(), getattr(torch, args.dtype)
    mesh = {"tp": ranks}
    tp_group = mesh_groups(mesh, args.timeout)["tp"]
    report = Report("00_collectives", args, mesh, backend)
    show_three_ways(report, tp_group, dtype)
    show_collectives(report, tp_group, dtype)
    show_ring(report, tp_group, dtype)
    show_matmuls(report, tp_group, dtype)
    if ranks >= 4 and ranks % 2 == 0:
        show_mesh(report, mesh_groups({"y": 2, "x": ranks // 2}, args.timeout), dtype)
    else:
        report.say("\n5  A product on a 2D mesh: --nproc_per_node=4 shows it")
    show_traps(report, tp_group, dtype)
    if args.bench and ranks > 1:
        bench(report, tp_group, dtype)
    return report.verdict("with ranks == without", BREAKS.get(args.break_name))


if __name__ == "__main__":
    launch(__file__, parse_args, main, BREAKS, globals())
