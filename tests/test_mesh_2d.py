"""beyond/13: a product on every mesh, and what FSDP and the 2D mesh send and store.

That FSDP and the 2D mesh equal one process on random shapes is in test_mlp_equality.py;
the script's own runs are among those of test_lessons.py.
"""

import json

import jobs
import pytest
from runs import MESH_2D, over

FOUR = (MESH_2D, 4)


@pytest.mark.launches(*FOUR)
def test_products_gather_along_one_axis_each():
    """(T−1)/T of the payload, T the ranks of the axis; nothing along an axis of one."""
    rows = jobs.result(*FOUR).data["products"]
    assert [row["mesh"] for row in rows[::2]] == ["4 × 1", "2 × 2", "1 × 4"]
    for row in rows:
        T = len(json.loads(row["rank 0's group"]))
        assert row["ring"] == row["bytes"] * (T - 1) / T, row
        assert (row["bytes"] > 0) is (T > 1)


@pytest.mark.launches(MESH_2D, 2)
def test_two_ranks_have_a_mesh_to_look_at():
    """2 × 1 gathers B, 1 × 2 gathers A."""
    rows = jobs.result(MESH_2D, 2).data["products"]
    assert [row["mesh"] for row in rows if row["bytes"]] == ["2 × 1", "1 × 2"]


def stored(run: tuple) -> dict[str, dict]:
    return {row["run"]: row for row in jobs.result(*run).data["memory"]}


def sent(run: tuple, name: str, axis: str) -> int:
    """Bytes that a rank of a ring sends along one axis in a run of the MLP."""
    rows = jobs.result(*run).data["communication"]
    return sum(r["ring"] for r in rows if (r["run"], r["axis"]) == (name, axis))


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
    times = sent(run, "FSDP", "dp") / sent(run, "DP", "dp")
    assert 1.48 < times < 1.5


def test_with_one_rank_on_inner_the_mesh_is_fsdp():
    """And with one on outer only x and y are sent, as under TP."""
    tall, flat = (
        (MESH_2D, 2, "--mesh", mesh, "--steps", "2") for mesh in ("2x1", "1x2")
    )
    assert sent(tall, "2D", "outer") == sent(tall, "FSDP", "dp") > 0
    assert sent(tall, "2D", "inner") == sent(flat, "2D", "outer") == 0
    assert sent(flat, "2D", "inner") == sent(flat, "Megatron", "tp") > 0
