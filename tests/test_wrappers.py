"""Each wrapper of lesson 00 does what it says, on random tensors, and counts it right.

New tensor out, input untouched, any dim, views, groups of 1, 2 and 4 ranks, bytes. What
is made of them (products, a mesh, two sums) is checked in the lesson's own runs.
"""

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
    """Beside the payload: 2(T−1)/T of it for an all-reduce, else (T−1)/T."""
    rows = jobs.result(COLLECTIVES, 4).data["communication"]
    assert len(rows) == 9
    for row in rows:
        twice = "AllReduce" in row.values() or "slice B, as 3" in row.values()
        T = 2 if row.get("axis") else 4  # the last two are of a mesh 2 × 2
        assert row["ring"] == row["bytes"] * (2 if twice else 1) * (T - 1) / T, row
