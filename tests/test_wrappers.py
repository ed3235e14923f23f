"""Each wrapper of lesson 00 does what it says, on random tensors, and counts it right.

New tensor out, input untouched, any dim, views, groups of 1, 2 and 4 ranks, bytes. What
is made of them (products, a mesh, two sums) is checked in the lesson's own runs.
"""

import json

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import COLLECTIVES, found

DRIVER = ("drive_wrappers.py", 4)


@pytest.mark.launches(*DRIVER)
@pytest.mark.parametrize("wrapper", [
    "all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "all_to_all",
    "broadcast", "shard", "send_recv", "ring_all_reduce", "async_all_reduce",
])  # fmt: skip
def test_random_cases(ranks, wrapper):
    mine = [case for case in found(ranks, "cases") if case["wrapper"] == wrapper]
    assert len(mine) == 4 * 40
    wrong = [case for case in mine if case["problems"]]
    assert not wrong, f"{len(wrong)} of {len(mine)} cases, the first is {wrong[0]}"


def test_dims_that_do_not_divide():
    """A ValueError with the numbers, and nothing sent: this is no group that could."""
    lesson, group, x = jobs.load(COLLECTIVES), no_group(4), torch.zeros(4, 7)
    calls = [
        lambda: lesson.shard(x, 1, group),
        lambda: lesson.reduce_scatter(x, 1, group),
        lambda: lesson.all_to_all(x, group, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"dim 1 of \[4, 7\] is .* multiple of 4"):
            call()


@pytest.mark.launches(COLLECTIVES, 4)
def test_what_a_ring_sends():
    """2(T−1)/T of the payload for an all-reduce, (T−1)/T for the others."""
    rows = jobs.result(COLLECTIVES, 4).data["communication"]
    products, on_meshes = rows[:7], rows[7:]
    for row in products:
        is_sum = row["what to do"] in ("AllReduce", "slice B, then 3")
        rounds = 2 if is_sum else 1
        assert row["ring"] == row["bytes"] * rounds * 3 / 4, row
    assert [row["mesh"] for row in on_meshes[::2]] == ["4 × 1", "2 × 2", "1 × 4"]
    for row in on_meshes:
        T = len(json.loads(row["rank 0's group"]))
        assert row["ring"] == row["bytes"] * (T - 1) / T, row
        assert (row["bytes"] > 0) is (T > 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_of_a_ring(ranks):
    """2(T − 1) of them, and as many calls per rank; rounds of bytes over all ranks."""
    for row in jobs.result(COLLECTIVES, ranks).data["by hand"]:
        assert row["steps"] == row["calls"] == 2 * (ranks - 1)
        assert row["all send"] == 2 * (ranks - 1) * row["n"] * 4


def test_two_ranks_have_a_mesh_to_look_at():
    """2 × 1 gathers B, 1 × 2 gathers A."""
    rows = jobs.result(COLLECTIVES, 2).data["communication"][7:]
    assert [row["mesh"] for row in rows if row["bytes"]] == ["2 × 1", "1 × 2"]
