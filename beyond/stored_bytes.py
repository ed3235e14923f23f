"""Bytes that a rank stores, measured after a run of lesson 02's train_transformer.

A helper of beyond/09_shared_heads.py and beyond/16_expert_parallel.py, no script.
"""

from course import lesson00
from harness import cell


def memory_rows(report, formulas: dict, sizes: dict, runs: dict, tensors: str) -> tuple:
    """A row for each term of the parameters; then what is measured, and its formula.

    formulas: term → formula. sizes: run → letter → number. tensors: how many
        parameters there are, a formula.
    Returns: the rows, and run → bytes of all parameters by the formulas.
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
    # AdamW stores two moments of each parameter, and the number of its steps.
    count = lesson00.evaluate(tensors, report.size)
    states = {run: 2 * nbytes + 4 * count for run, nbytes in sums.items()}
    predicted = {
        "parameters": (sums, "sum"),
        "gradients": (sums, "sum"),
        "optimizer state": (states, f"2·sum + 4·{count} tensors"),
    }
    measured = {run: bytes_stored(runs[run]) for run in sizes if run in runs}
    for kind, (expected, formula) in predicted.items():
        row = {"bytes": f"{kind}, measured", "formula": formula}
        for run in sizes:
            row[run] = "raised"
            if run in measured:
                name = f"memory: {kind}, {run}"
                got = measured[run][kind]
                row[run] = cell(report, name, got, str(expected[run]))
        rows.append(row)
    return rows, sums


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
