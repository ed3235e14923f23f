"""What several scripts of this folder use to gather, to count and to compare.

A helper of the scripts, no script. METER, which counts collectives, and Report, which
checks and prints, are lesson 00's.
"""

import math

import torch
import torch.distributed as dist
from course import lesson00, lesson01, lesson02
from torch import Tensor, nn


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order; of all ranks without a group."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shardings_of(p: Tensor) -> tuple:
    """((dim, group), …): how a parameter is split, in order; () if it is replicated.

    In the lessons it is split over one group at most: p.sharding is (dim, group).
    """
    sharding = lesson01.sharding_of(p)
    return getattr(p, "shardings", (sharding,) if sharding else ())


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first."""
    for dim, group in reversed(shardings):
        x = lesson00.all_gather(x, dim, group)
    return x


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), also of several shardings."""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            tensors[name] = torch.empty(0)  # your edit may have lost it
        else:
            tensors[name] = unshard(x.detach(), shardings_of(p)).clone()
    return tensors


def sizes_without_dropout(args) -> dict[str, int]:
    """Lesson 02's sizes, for scripts that split what Dropout samples as one mask."""
    if args.dropout:
        text = "each rank would have to sample its part of one mask"
        raise ValueError(f"--dropout {args.dropout:g}: {text}; take --dropout 0")
    args.kv_heads = args.kv_heads or args.tp * math.ceil(4 / args.tp)
    args.heads = args.heads or 2 * args.kv_heads
    args.hidden = args.hidden or 8 * args.heads
    return lesson02.transformer_sizes(args)


def take_calls(run: str) -> dict[tuple, list[int]]:
    """A run's collectives, call → payloads, which a later ledger then leaves out."""
    calls = lesson00.METER.calls
    return {call: calls.pop(call) for call in list(calls) if call[0] == run}


def on_axes(formulas: dict, ranks: dict[str, int]) -> dict:
    """The formulas of calls over axes of two ranks or more: one rank sends nothing."""
    return {call: formulas[call] for call in formulas if ranks[call[3]] > 1}


def cell(report, name: str, got: int, formula: str, **size: int) -> str:
    """A measured number, checked against a formula, as a table shows it."""
    cells = report.expect(name, got, formula, **size)
    return cells["bytes"] + ("" if cells["ok"] == "ok" else f" {cells['ok']}")


def marked(text, holds: bool) -> str:
    """A cell of a table; ✗ if its value is wrong."""
    return str(text) if holds else f"{text} ✗"


# ---- Bytes that a rank stores, of a run that lesson 02's train_transformer returned


def bytes_stored(run) -> dict[str, int]:
    """Measured on this rank, after training."""
    moments = []  # and step counts: all that AdamW stores
    for state in run.optimizer.state.values():
        moments.extend(state.values())
    parameters = list(run.model.parameters())
    return {
        "parameters": lesson00.nbytes(parameters),
        "gradients": lesson00.nbytes([p.grad for p in parameters]),
        "optimizer state": lesson00.nbytes(moments),
    }


def add_up(formulas: dict[str, str], sizes: dict[str, dict]) -> tuple[list, dict]:
    """A row for each term, name → formula, with its bytes in each run; and their sums.

    sizes: run → letter → number.
    """
    rows = []
    sums = dict.fromkeys(sizes, 0)
    for name, formula in formulas.items():
        row = {"bytes": name, "formula": formula}
        for run, size in sizes.items():
            nbytes = lesson00.evaluate(formula, size)
            row[run] = f"{nbytes:,}"
            sums[run] += nbytes
        rows.append(row)
    return rows, sums


def measured_row(report, kind: str, formula: str, sums: dict, measured: dict) -> dict:
    """Bytes of each run as measured, checked against sums: run → predicted bytes."""
    row = {"bytes": f"{kind}, measured", "formula": formula}
    for run, predicted in sums.items():
        row[run] = "raised"
        if run in measured:
            name = f"memory: {kind}, {run}"
            row[run] = cell(report, name, measured[run][kind], str(predicted))
    return row
