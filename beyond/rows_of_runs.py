"""A run in one row of a table: compared with another run, its replicas, or formulas.

A helper of beyond/10_checkpoints.py and beyond/15_zero.py, no script.
"""

from collections import Counter

import torch
from course import lesson00
from zero_meters import with_shards


def row_of_run(report, name: str, run, alone) -> dict:
    """A run that is no column: its largest difference from one process."""
    row = {"run": name, "diff": 0.0, "off": []}
    for kind in ("losses", "norms", "gradients", "parameters"):
        if kind == "parameters" and report.args.bf16:
            continue
        allowed = report.allowed_loss if kind == "losses" else report.allowed
        for what, expected in getattr(alone, kind).items():
            got = getattr(run, kind)[what]
            check = f"{what}, {name}"
            if not report.check_tensor(kind, check, got, expected, allowed):
                row["off"].append("diff")
            row["diff"] = max(row["diff"], report.checks[f"{kind}: {check}"]["diff"])
    return row


def replicas_row(report, name: str, run, groups: dict) -> dict:
    """Each rank has unsharded parameters from its own replica: are they the same?"""
    row = {"parameters on all ranks": name, "diff": 0.0, "off": []}
    for x in run.parameters.values():
        for axis in ("data", "tp"):
            for replica in lesson00.all_gather(x[None], 0, groups[axis]):
                row["diff"] = max(row["diff"], lesson00.rel_diff(replica, x))
    if not report.check("replicas", f"parameters on all ranks, {name}", row["diff"]):
        row["off"].append("diff")
    return row


def checked_rows(report, kind: str, formulas: dict, measure, trainings, size) -> dict:
    """Run → row: what `measure` finds in it, checked against formulas of its columns.

    formulas: run → a formula per column. size: letter → number, without ψ and w, which
    are this run's own.
    """
    rows = {}
    for name in formulas:
        if name in trainings:
            sizes = with_shards(size, trainings[name])
            columns = measure(trainings[name])
            rows[name] = dict(run=name, **columns)
            for column, formula in zip(columns, formulas[name]):
                predicted = lesson00.evaluate(formula, sizes)
                what = "calls" if column in ("gathers", "sums") else kind
                report.expect(rows[name], column, what, f"{name}, {column}", predicted)
            rows[name]["formulas"] = ", ".join(formulas[name])
    return rows


def count_equal(report, check: str, run: str, got: dict, expected: dict, fold) -> dict:
    """How many tensors of each kind are bitwise as expected.

    fold: name of a tensor → its kind, which is a column.
    """
    row = {"mesh": run, "off": []}
    equal = Counter()
    total = Counter()
    for name, x in expected.items():
        kind = fold(name)
        total[kind] += 1
        # An empty tensor stands for one that was not loaded.
        diff = lesson00.rel_diff(got.get(name, torch.empty(0)), x)
        if report.check(check, f"{name}, {run}", diff):
            equal[kind] += 1
        elif kind not in row["off"]:
            row["off"].append(kind)
    for kind in total:
        row[kind] = f"{equal[kind]} of {total[kind]}"
    return row
