"""Each wrapper of lesson 00 does what it says, on random tensors, and counts it right.

New tensor out, input untouched, any dim, views, groups of 1, 2 and 4 ranks, bytes. What
is made of them (products, two sums) is checked in the lesson's own runs.
"""

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import COLLECTIVES, found, number, rows_with

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


@pytest.mark.launches(*DRIVER)
def test_groups_of_a_mesh(ranks):
    """Of [[0, 1], [2, 3]] the columns are groups along outer, the rows along inner."""
    lines = found(ranks, "lines")
    assert [line["outer"] for line in lines] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [line["inner"] for line in lines] == [[0, 1], [0, 1], [2, 3], [2, 3]]


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
    rows = rows_with(jobs.result(COLLECTIVES, 4).data, "what to do", "ring")
    assert len(rows) == 7
    for row in rows:
        is_sum = row["what to do"] in ("AllReduce", "slice B, do 3")
        rounds = 2 if is_sum else 1
        assert number(row["ring"]) == number(row["bytes"]) * rounds * 3 / 4, row


@pytest.mark.launches(COLLECTIVES, 1)
@pytest.mark.launches(COLLECTIVES, 2)
@pytest.mark.launches(COLLECTIVES, 3)
@pytest.mark.launches(COLLECTIVES, 4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_of_a_ring(ranks):
    """2(T − 1) of them, and rounds of bytes over all ranks."""
    rows = rows_with(jobs.result(COLLECTIVES, ranks).data, "steps", "all send")
    assert len(rows) == 2
    for row in rows:
        assert row["steps"] == f"{2 * (ranks - 1)} ok"
        assert row["all send"] == f"{2 * (ranks - 1) * row['n'] * 4:,} ok"
