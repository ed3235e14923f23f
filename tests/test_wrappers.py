"""Each wrapper of lesson 00 does what it says, on random tensors, and counts it right.

New tensor out, input untouched, any dim, views, groups of 1, 2 and 4 ranks, bytes.
"""

import jobs
import pytest
from runs import COLLECTIVES, found

DRIVER = ("drive_wrappers.py", 4)
WITH_ROOT = ("broadcast", "scatter", "gather", "reduce")
WITH_DIM = ("all_gather", "reduce_scatter", "all_to_all", "shard")
MOVERS = (*WITH_ROOT, *WITH_DIM, "all_reduce", "all_reduce_max", "ring_all_reduce")
PRODUCTS = ("matmul_case_1", "matmul_case_2_gather", "matmul_case_2_slice",
            "matmul_case_3_all_reduce", "matmul_case_3_reduce_scatter",
            "matmul_case_4_left", "matmul_case_4_right", "matmul_2d")  # fmt: skip

pytestmark = pytest.mark.launches(*DRIVER)


def cases(ranks, wrapper):
    return [case for case in found(ranks, "cases") if case["wrapper"] == wrapper]


@pytest.mark.parametrize("wrapper", [*MOVERS, "send_recv", *PRODUCTS])
def test_random_cases(ranks, wrapper):
    mine = cases(ranks, wrapper)
    assert len(mine) >= 4 * 12
    wrong = [case for case in mine if case["problems"]]
    assert not wrong, f"{len(wrong)} of {len(mine)} cases, the first is {wrong[0]}"


def test_cases_cover_the_ground(ranks):
    """Or the test above would say little."""
    dtypes = {f"torch.{name}" for name in ("float32", "float64", "bfloat16", "int64")}
    views = {"plain", "transposed", "strided", "offset", "expanded"}
    for wrapper in MOVERS:
        for T in (1, 2, 4):
            mine = [case for case in cases(ranks, wrapper) if case["T"] == T]
            assert {case["dtype"] for case in mine} == dtypes, (wrapper, T)
            assert {case["view"] for case in mine} == views, (wrapper, T)
    for wrapper in WITH_DIM:
        assert {-2, -1, 0, 1, 2} <= {case["dim"] for case in cases(ranks, wrapper)}
    for wrapper in WITH_ROOT:
        assert {case["peer"] for case in cases(ranks, wrapper)} == {0, 1, 2, 3}
    uneven = [case for case in cases(ranks, "ring_all_reduce") if case["shape"] == [7]]
    assert {case["T"] for case in uneven} == {1, 2, 4}


def test_published_vectors(ranks):
    """Megatron's: the sum of the ranks is 6; of rows 0 to 3, rank r keeps 4·r."""
    for rank, vectors in enumerate(each["vectors"] for each in ranks):
        assert vectors["all_reduce"] == [6.0] * 5
        assert vectors["reduce_scatter"] == [[4.0 * rank] * 3]
        assert vectors["sum_both"] == [4.0, 40.0]
        assert vectors["sum_in_background"] == [[6.0, 30.0], [1.0 * rank, 5.0 * rank]]


def test_dims_that_do_not_divide(ranks):
    """A ValueError with the numbers, and nothing sent."""
    *refusals, (_, sent) = ranks[0]["refusals"]
    for _, shape, dim, T, message in refusals:
        assert message == f"dim {dim} of {shape} is not a multiple of {T}"
    assert {row[0] for row in refusals} == {*WITH_DIM, "scatter"} - {"all_gather"}
    assert sent == 0 and all(each["refusals"] == ranks[0]["refusals"] for each in ranks)


@pytest.mark.launches(COLLECTIVES, 4)
def test_what_a_ring_sends():
    """Beside the payload: 2(T−1)/T of it for an all-reduce, else (T−1)/T."""
    rows = jobs.result(COLLECTIVES, 4).data["communication"]
    assert len(rows) == 9
    for row in rows:
        twice = "AllReduce" in row.values() or "slice B, as 3" in row.values()
        T = 2 if row.get("axis") else 4  # the last two are of a mesh 2 × 2
        assert row["ring"] == row["bytes"] * (2 if twice else 1) * (T - 1) / T, row
