"""Lesson 05 on thousands of ranks that are not there: `tools/plan.py --dry-run`.

One process is one rank of each stage, one stage after the other. Its groups are those
of PyTorch's "fake" backend, which sends nothing; its tensors are on the "meta" device:
they have a shape but no values. All else is lesson 05's own code: the model's edits,
the schedule, the pipeline, the optimizer, the counters; and the meters of
beyond/14_schedules.py.

What cannot be had without numbers is made up here, and nothing else: `Unknown` answers
where the lesson looks into a tensor, `storage_id` tells storages apart.
"""

import argparse
import contextlib
import gc
import importlib
import resource
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from predict import (
    LINKS,
    Call,
    counted,
    in_flight,
    lesson,
    moments_bytes,
    parameters,
    saved_bytes,
)
from torch.overrides import TorchFunctionMode

schedules = importlib.import_module("14_schedules")
flat_adamw = importlib.import_module("flat_adamw")
tied_stages = importlib.import_module("tied_stages")
SHOWN = "parameters", "moments", "saved", "sent", "off"
WIDTHS = 13, 15, 15, 12, 14, 9
UNIT = 1 if sys.platform == "darwin" else 1024  # of what getrusage calls maxrss


class AsExpected(int):
    """The number of a micro-batch or a stage in a message: the one that is expected."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return True


class Unknown(TorchFunctionMode):
    """Answers where the lesson reads numbers, which these tensors do not have: a header
    is as expected, with a micro-batch's shape; a norm is 1; tokens are of the
    vocabulary, and all have a target."""

    def __init__(self, shape: list[int]):
        super().__init__()
        self.shape = shape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is torch.Tensor.tolist:
                is_header = len(args[0]) == 5
                return [AsExpected()] * 2 * is_header + self.shape
            if func in (torch.Tensor.item, torch.Tensor.__float__):
                return 1.0
            if func is torch.Tensor.__bool__:
                return True
            if func is torch.Tensor.__getitem__ and torch.is_tensor(args[1]):
                return args[0]  # picked by a mask: all of it
        return func(*args, **(kwargs or {}))


def storage_id(x: torch.Tensor) -> int:
    """Tensors without numbers have no address: the storage itself tells them apart."""
    return x.untyped_storage()._cdata


@contextlib.contextmanager
def as_rank(rank: int, ranks: int):
    """This process is one rank of many, and the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def recompute(stage: torch.nn.Module, what: str) -> None:
    """Lesson 04's Checkpointed in each layer of a stage."""
    for i, layer in enumerate(stage.layers):
        if what == "selective":
            layer.self_attn.core = lesson.Checkpointed(layer.self_attn.core)
        elif what == "full":
            stage.layers[i] = lesson.Checkpointed(layer)


def meta_model(layout, dtype: str):
    """The whole model, without numbers; and the flags that lesson 05 needs besides."""
    more = dict(ragged=False, clip=1.0, dropout=0.0, seed=1, dtype=dtype, device="meta")
    args = argparse.Namespace(**vars(layout) | more)
    with torch.device("meta"):
        full = lesson.make_tied(args)
    args.device = "cpu"  # where the lesson makes a shape, to be read again
    return full, args


def name_update(training) -> None:
    """What lesson 05's update does not send: ZeRO's gather, a tied weight's copy."""
    phase = lesson.METER.phase("mesh", "update")
    training.optimizer.step = phase(training.optimizer.step)
    if hasattr(training, "renew_copy"):
        training.renew_copy = phase(training.renew_copy)


def run_stage(full, args, stage: int) -> dict:
    """A step of the first rank of a stage: what it held, sent and kept."""
    ranks, across = args.pp * args.dp * args.tp, args.dp * args.tp
    lesson.METER.calls.clear()
    shape = [args.micro_batch, args.seq_len // args.tp, args.hidden]
    tokens = torch.empty(
        args.batch_size, args.seq_len, dtype=torch.int64, device="meta"
    )
    with (
        as_rank(stage * across, ranks),
        mock.patch.object(schedules.HeldBytes, "key_of", staticmethod(storage_id)),
    ):
        sizes = {axis: getattr(args, axis) for axis in lesson.AXES}
        kind = tied_stages.TiedTraining if args.tie else lesson.MeshTraining
        kind = flat_adamw.FlatTraining if args.zero else kind
        groups = lesson.make_mesh(sizes, 60)
        groups["embedding"] = tied_stages.embedding_group(sizes, 60)
        training = kind(full, groups, args)
        schedules.add_meters(training, schedules.MeasuredPipeline)
        lesson.name_phases(training)
        name_update(training)
        recompute(training.stage_module, args.recompute)
        with Unknown(shape):
            training.train_step((tokens, tokens))
        events = training.pipeline.events
        saved = {e["bytes"] for e in events if e["what"] == "forward"}
        sent = {}
        for call, payloads in lesson.METER.calls.items():
            sent[Call(*call)] = [len(payloads), sum(payloads)]
        adamw = getattr(training.optimizer, "adamw", training.optimizer)
        moments = []
        for state in adamw.state.values():
            moments += [state[kind] for kind in flat_adamw.MOMENTS]
        return dict(
            stage=stage,
            parameters=sum(p.numel() for p in training.parameters.values()),
            moments=lesson.nbytes(moments),
            saved=sorted(saved),  # one value: micro-batches are equal
            in_flight=training.pipeline.held.peak_passes,
            sent=sent,
        )


def predicted(args, stage: int, e: int) -> dict:
    """The same by the formulas. A norm's mean and 1/σ have 32 bits at least, as on a
    GPU; on a CPU they are as wide as what is normed."""
    held, trained, _ = parameters(args, stage)
    return dict(
        stage=stage,
        parameters=held,
        moments=moments_bytes(args, trained, e),
        saved=[saved_bytes(args, stage, e, max(4, e))],
        in_flight=in_flight(args.schedule, stage, args.pp, args.microbatches),
        sent=counted(args, stage, e),
    )


def run(layout, microbatches=None, dtype="bfloat16", stages=None):
    """For each stage: what the lesson counted, and the formulas' values.

    microbatches: of each replica, fewer than a step's: bytes grow with them in a line.
    stages: only these.
    """
    few = min(microbatches or layout.microbatches, layout.microbatches)
    size = few * layout.micro_batch * layout.dp
    layout = argparse.Namespace(
        **vars(layout) | {"microbatches": few, "batch_size": size}
    )
    full, args = meta_model(layout, dtype)
    gc.collect()
    for stage in stages or range(layout.pp):
        e = getattr(torch, dtype).itemsize
        yield run_stage(full, args, stage), predicted(args, stage, e)


def difference(found: dict, wanted: dict) -> int:
    """Of what was counted and what the formulas say: numbers, calls and bytes."""
    off = sum(abs(found[k] - wanted[k]) for k in ("parameters", "moments", "in_flight"))
    off += sum(abs(x - wanted["saved"][0]) for x in found["saved"])
    for key in {*found["sent"], *wanted["sent"]}:
        pairs = zip(found["sent"].get(key, (0, 0)), wanted["sent"].get(key, (0, 0)))
        off += sum(abs(a - b) for a, b in pairs)
    return off


def by_axis(sent: dict) -> dict[str, int]:
    """Bytes of payload along each axis."""
    total = dict.fromkeys(("tp", "pp", "dp"), 0)
    for call, (_, nbytes) in sent.items():
        total[LINKS.get(call.axis, call.axis)] += nbytes
    return total


def show_head(layout, few: int, differs: str) -> None:
    mesh = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in lesson.AXES)
    print(
        f"\nDry run of lesson 05, {mesh}: the first rank of each stage, with {few} of\n"
        f"{layout.microbatches} micro-batches per step (bytes are linear in them). The "
        "lesson counted\nparameters, bytes saved for backward per micro-batch, payload "
        "sent; off: difference\nfrom the formulas."
    )
    if differs:
        print(differs)


def show(layout, microbatches: int, differs="") -> tuple[list[dict], bool]:
    """Run and print; the rows, and whether nothing is off. differs: what a table in
    front of it has and lesson 05 does not."""
    few = min(microbatches, layout.microbatches)
    show_head(layout, few, differs)
    names = "parameters", "saved of one", "sent via tp", "via pp", "via dp", "off"
    print("  stages  " + "".join(f"{x:>{n}}" for x, n in zip(names, WIDTHS)))
    rows, start = [], time.perf_counter()
    for found, wanted in run(layout, microbatches):
        row = found | {"sent": by_axis(found["sent"]), "saved": max(found["saved"])}
        rows.append(row | {"off": difference(found, wanted)})
        seconds = time.perf_counter() - start
        done = f"stage {found['stage'] + 1} of {layout.pp}, {seconds:.0f} s"
        print(f"\r  {done}", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    for first, last, row in alike(rows):
        text = f"{first}" if first == last else f"{first} to {last}"
        cells = row["parameters"], row["saved"], *row["sent"].values(), row["off"]
        print(f"  {text:<8}" + "".join(f"{x:>{n},}" for x, n in zip(cells, WIDTHS)))
    off = sum(row["off"] for row in rows)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 1e9
    print(f"{'PASS' if off == 0 else 'FAIL'}  {len(rows)} stages, {off} off, ", end="")
    print(f"{seconds:.0f} s, {memory:.1f} GB of this machine's memory")
    return rows, off == 0


def alike(rows: list[dict]) -> list[tuple[int, int, dict]]:
    """Stages that follow each other with the same numbers, as first, last, row."""
    found = []
    for row in rows:
        same = found and all(found[-1][2][k] == row[k] for k in SHOWN)
        if same:
            found[-1] = (found[-1][0], row["stage"], row)
        else:
            found.append((row["stage"], row["stage"], row))
    return found
