"""Each wrapper of lesson 00 does what it says, on random tensors, and counts it right.

New tensor out, input untouched, any dim, views, groups of 1, 2 and 4 ranks, bytes.
"""

import re
from itertools import product

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import COLLECTIVES, found

DRIVER = ("drive_wrappers.py", 4)
WITH_DIM = ("all_gather", "reduce_scatter", "all_to_all", "shard")
MOVERS = ("broadcast", *WITH_DIM, "all_reduce", "all_reduce_max", "ring_all_reduce")
DTYPES = ("torch.float32", "torch.float64", "torch.bfloat16", "torch.int64")
VIEWS = ("plain", "transposed", "strided", "offset", "expanded")

driven = pytest.mark.launches(*DRIVER)


def cases(ranks, wrapper):
    return [case for case in found(ranks, "cases") if case["wrapper"] == wrapper]


@driven
@pytest.mark.parametrize("wrapper, count", [
    *((wrapper, 40) for wrapper in (*MOVERS, "send_recv")),
    ("sharded products", 12), ("matmul_2d", 36),
])  # fmt: skip
def test_random_cases(ranks, wrapper, count):
    mine = cases(ranks, wrapper)
    assert len(mine) == 4 * count
    wrong = [case for case in mine if case["problems"]]
    assert not wrong, f"{len(wrong)} of {len(mine)} cases, the first is {wrong[0]}"


@driven
def test_cases_cover_the_ground(ranks):
    """Or the test above would say little."""
    for wrapper in MOVERS:
        mine = cases(ranks, wrapper)
        assert {(c["T"], c["dtype"]) for c in mine} == {*product((1, 2, 4), DTYPES)}
        assert {(c["T"], c["view"]) for c in mine} == {*product((1, 2, 4), VIEWS)}
        if wrapper in WITH_DIM:
            assert {-2, -1, 0, 1, 2} <= {case["dim"] for case in mine}
        if wrapper == "broadcast":
            assert {case["peer"] for case in mine} == {0, 1, 2, 3}


@driven
def test_published_vectors(ranks):
    """Megatron's: the sum of the ranks is 6; of rows 0 to 3, rank r keeps 4·r."""
    for rank, vectors in enumerate(each["vectors"] for each in ranks):
        assert vectors["all_reduce"] == [6.0] * 5
        assert vectors["reduce_scatter"] == [[4.0 * rank] * 3]
        assert vectors["sum_both"] == [4.0, 40.0]
        assert vectors["sum_in_background"] == [[6.0, 30.0], [1.0 * rank, 5.0 * rank]]


@pytest.mark.parametrize("T, shape, dim", [
    (2, [4, 7], 1), (4, [4, 7], 1), (2, [9, 4], 0), (4, [1], 0),
])  # fmt: skip
def test_dims_that_do_not_divide(T, shape, dim):
    """A ValueError with the numbers, and nothing sent: this is no group that could."""
    group, x = no_group(T), torch.zeros(shape)
    lesson, message = jobs.load(COLLECTIVES), f"dim {dim} of {shape} is not a multiple"
    calls = [
        lambda: lesson.shard(x, dim, group),
        lambda: lesson.reduce_scatter(x, dim, group),
        lambda: lesson.all_to_all(x, group, dim),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(f"{message} of {T}")):
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
