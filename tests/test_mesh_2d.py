"""beyond/13: a product on every mesh, and what FSDP and the 2D mesh send and store.

That FSDP and the 2D mesh equal one process on random shapes is in test_mlp_equality.py;
the script's own runs are among those of test_lessons.py.
"""

import json

import jobs
import pytest
from runs import MESH_2D, number, over, rows_with

FOUR = (MESH_2D, 4)
TALL, FLAT = ((MESH_2D, 2, "--mesh", mesh, "--steps", "2") for mesh in ("2x1", "1x2"))


@pytest.mark.launches(*FOUR)
def test_products_gather_along_one_axis_each():
    """(T−1)/T of the payload, T the ranks of the axis; nothing along an axis of one."""
    rows = rows_with(jobs.result(*FOUR).data, "mesh", "gathered")
    assert [row["mesh"] for row in rows[::2]] == ["4 × 1", "2 × 2", "1 × 4"]
    for row in rows:
        T = len(json.loads(row["rank 0's group"]))
        nbytes = number(row["bytes"])
        assert number(row["ring"]) == nbytes * (T - 1) / T, row
        assert (nbytes > 0) is (T > 1)


@pytest.mark.launches(MESH_2D, 2)
def test_two_ranks_have_a_mesh_to_look_at():
    """2 × 1 gathers B, 1 × 2 gathers A."""
    rows = rows_with(jobs.result(MESH_2D, 2).data, "mesh", "gathered")
    assert [row["mesh"] for row in rows if row["bytes"] != "0"] == ["2 × 1", "1 × 2"]


STORED = ("params", "grads", "saved")


def stored(run: tuple) -> dict[str, dict]:
    rows = rows_with(jobs.result(*run).data, "run", "saved")
    return {row["run"]: {what: number(row[what]) for what in STORED} for row in rows}


def sent(run: tuple, name: str, axis: str) -> int:
    """Bytes that a rank of a ring sends along one axis in a run of the MLP."""
    rows = rows_with(jobs.result(*run).data, "run", "axis", "ring")
    rows = [row for row in rows if (row["run"], row["axis"]) == (name, axis)]
    return sum(number(row["ring"]) for row in rows)


def sent_in_all(run: tuple, name: str) -> int:
    """The same along all axes, also of a run whose rows are one line."""
    (row,) = rows_with(jobs.result(*run).data, "ring, total")
    return number(row[name])


@over([FOUR, (MESH_2D, 2)])
def test_what_is_stored_and_sent(run):
    """FSDP: a rank stores 1/T of everything, and sends 1.5 times as much as DP."""
    T = run[1]
    rows = stored(run)
    one = rows["without TP"]
    for name in ("FSDP", "2D"):
        assert rows[name]["params"] * T == rows[name]["grads"] * T == one["params"]
    assert rows["FSDP"]["saved"] * T == one["saved"]
    # Both gathers are of the weights, but the second not of the biases.
    times = sent(run, "FSDP", "dp") / sent_in_all(run, "DP")
    assert 1.48 < times < 1.5


@pytest.mark.launches(*TALL)
@pytest.mark.launches(*FLAT)
def test_with_one_rank_on_inner_the_mesh_is_fsdp():
    """And with one on outer only x and y are sent, as under TP."""
    assert sent(TALL, "2D", "outer") == sent(TALL, "FSDP", "dp") > 0
    assert sent(TALL, "2D", "inner") == sent(FLAT, "2D", "outer") == 0
    assert sent(FLAT, "2D", "inner") == sent_in_all(FLAT, "Megatron") > 0
