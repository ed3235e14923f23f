"""A run in one row of a table: compared with another run, its replicas, or formulas.

A helper of beyond/10_checkpoints.py and beyond/15_zero.py, no script.
"""

from collections import Counter

import torch
from course import lesson00
from harness import cell, marked
from zero_meters import with_shards


def worst_difference(report, name: str, run, alone, args) -> float:
    """Check a run that is no column; the largest difference from one process."""
    worst = 0.0
    for kind in ("losses", "norms", "gradients", "parameters"):
        if kind == "parameters" and args.bf16:
            continue
        allowed = args.allowed_loss if kind == "losses" else args.allowed
        for what, expected in getattr(alone, kind).items():
            got = getattr(run, kind)[what]
            check = f"{kind}: {what}, {name}"
            worst = max(worst, report.agree(check, got, expected, allowed))
    return worst


def replicas_differ(report, name: str, run, groups: dict) -> bool:
    """Each rank has unsharded parameters from its own replica: are they different?"""
    diff = 0.0
    for x in run.parameters.values():
        for axis in ("data", "tp"):
            for replica in lesson00.all_gather(x[None], 0, groups[axis]):
                diff = max(diff, lesson00.rel_diff(replica, x))
    return not report.check(f"replicas: parameters on all ranks, {name}", diff)


def checked_rows(report, kind: str, formulas: dict, measure, trainings) -> tuple:
    """What `measure` finds in each run, checked against formulas of its columns.

    formulas: run → a formula per column.
    Returns: rows to print, and run → column → number.
    """
    rows = []
    found = {}
    for name in formulas:
        if name in trainings:
            letters = with_shards(report.size, trainings[name])  # ψ, w: this run's own
            found[name] = measure(trainings[name])
            row = {"run": name}
            for (column, got), formula in zip(found[name].items(), formulas[name]):
                what = "calls" if column in ("gathers", "sums") else kind
                check = f"{what}: {name}, {column}"
                row[column] = cell(report, check, got, formula, **letters)
            rows.append(row | {"formulas": ", ".join(formulas[name])})
    return rows, found


def count_equal(report, check: str, run: str, got: dict, expected: dict, fold) -> dict:
    """How many tensors of each kind are bitwise as expected.

    fold: name of a tensor → its kind, which is a column.
    """
    equal = Counter()
    total = Counter()
    for name, x in expected.items():
        kind = fold(name)
        total[kind] += 1
        # An empty tensor stands for one that was not loaded.
        diff = lesson00.rel_diff(got.get(name, torch.empty(0)), x)
        equal[kind] += report.check(f"{check}: {name}, {run}", diff)
    row = {"mesh": run}
    for kind in total:
        text = f"{equal[kind]} of {total[kind]}"
        row[kind] = marked(text, equal[kind] == total[kind])
    return row
