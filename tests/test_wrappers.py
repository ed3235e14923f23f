"""Each wrapper of lesson 00 does what it says, on random tensors, and counts it right.

New tensor out, input untouched, any dim, views, groups of 1, 2 and 4 ranks, bytes.
"""

import jobs
import pytest

DRIVER = ("drive_wrappers.py", 4)
RANKS = range(4)
MOVERS = ("all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "broadcast",
          "all_to_all", "scatter", "gather", "reduce", "shard")  # fmt: skip
MATMULS = ("matmul_case_1", "matmul_case_2_gather", "matmul_case_2_slice",
           "matmul_case_3_all_reduce", "matmul_case_3_reduce_scatter",
           "matmul_case_4_left", "matmul_case_4_right", "matmul_2d")  # fmt: skip
WRAPPERS = (*MOVERS, "send_recv", "ring_all_reduce", *MATMULS)

pytestmark = pytest.mark.launches(*DRIVER)


def cases(ranks, wrapper):
    """(rank, case) of all ranks."""
    return [
        (rank, case)
        for rank, found in enumerate(ranks)
        for case in found["cases"]
        if case["wrapper"] == wrapper
    ]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("problem", ["value", "input", "new", "history", "counted"])
def test_random_cases(ranks, wrapper, problem):
    mine = cases(ranks, wrapper)
    assert len(mine) >= 4 * 12
    wrong = [(rank, case) for rank, case in mine if problem in case["problems"]]
    assert not wrong, f"{len(wrong)} of {len(mine)} cases, first: {wrong[0]}"


def test_cases_cover_the_ground(ranks):
    """Or the test above would say little."""
    assert len(ranks[0]["cases"]) >= 200
    dtypes = {f"torch.{name}" for name in ("float32", "float64", "bfloat16", "int64")}
    views = {"plain", "transposed", "strided", "offset", "expanded"}
    for wrapper in (*MOVERS, "ring_all_reduce"):
        mine = [case for _, case in cases(ranks, wrapper)]
        for T in (1, 2, 4):
            here = [case for case in mine if case["T"] == T]
            assert {case["dtype"] for case in here} == dtypes, (wrapper, T)
            assert {case["view"] for case in here} == views, (wrapper, T)
    for wrapper in ("all_gather", "reduce_scatter", "all_to_all", "shard"):
        dims = {case["dim"] for _, case in cases(ranks, wrapper)}
        assert {-2, -1, 0, 1, 2} <= dims, wrapper
    for wrapper in ("broadcast", "scatter", "gather", "reduce"):
        assert {case["peer"] for _, case in cases(ranks, wrapper)} == {0, 1, 2, 3}


def test_groups_of_a_mesh(ranks):
    """The last axis is the innermost: its ranks are neighbours."""
    wanted = {
        "t4": lambda r: [0, 1, 2, 3],
        "t1": lambda r: [r],
        "far2": lambda r: [r % 2, r % 2 + 2],
        "near2": lambda r: [r // 2 * 2, r // 2 * 2 + 1],
        "y 2x2": lambda r: [r % 2, r % 2 + 2],
        "x 2x2": lambda r: [r // 2 * 2, r // 2 * 2 + 1],
        "y 4x1": lambda r: [0, 1, 2, 3],
        "x 4x1": lambda r: [r],
        "y 1x4": lambda r: [r],
        "x 1x4": lambda r: [0, 1, 2, 3],
    }
    for rank, found in enumerate(ranks):
        assert found["groups"] == {axis: f(rank) for axis, f in wanted.items()}


@pytest.mark.parametrize("problem", ["steps", "half-way"])
def test_steps_of_the_ring(ranks, problem):
    wrong = [
        case
        for case in cases(ranks, "ring_all_reduce")
        if problem in case[1]["problems"]
    ]
    assert not wrong, wrong[0]


def test_bytes_of_the_ring(ranks):
    """2V(T−1)/T a rank where T divides, and 2V(T−1) all together in any case."""
    by_rank = [
        [case for _, case in cases([found], "ring_all_reduce")] for found in ranks
    ]
    uneven = 0
    for number, one in enumerate(by_rank[0]):
        T, V = one["T"], one["V"]
        sent = {rank: by_rank[rank][number]["sent"] for rank in RANKS}
        if one["divides"]:
            assert set(sent.values()) == {2 * V * (T - 1) // T}, one
        uneven += not one["divides"]
        for rank in RANKS:
            group = ranks[rank]["groups"][one["axis"]]
            assert sum(sent[r] for r in group) == 2 * V * (T - 1), one
    assert uneven > 5


def test_published_vectors(ranks):
    """Megatron's: the sum of the ranks is 6; of rows 0 to 3, rank r keeps 4·r."""
    for rank, found in enumerate(ranks):
        assert found["vectors"]["all_reduce"] == [6.0] * 5
        assert found["vectors"]["reduce_scatter"] == [[4.0 * rank] * 3]
        assert found["vectors"]["sum_both"] == [4.0, 40.0]


def test_receiving_into_the_shape_of_a_view(ranks):
    assert [found["like_a_view"] for found in ranks] == ["equal"] * 4


def test_dims_that_do_not_divide(ranks):
    """A ValueError with the arithmetic, and nothing sent."""
    for found in ranks:
        seen = set()
        for name, shape, dim, T, message, sent in found["refusals"]:
            if shape[dim] % T == 0:
                assert message == "none raised"
                continue
            seen.add(name)
            n = shape[dim]
            assert f"{n} % {T}" in message and f"= {n % T}" in message, message
            assert str(shape) in message and f"dim {dim} " in message, message
            assert sent == 0, (name, shape)
        assert seen == {"shard", "reduce_scatter", "all_to_all", "scatter"}


def test_totals_of_the_counter():
    """total() adds up the rows that have all the labels asked for, and no others."""
    counter = jobs.load("00_collectives").CommCounter()
    for number, (what, phase, collective, axis) in enumerate(
        (a, b, c, d)
        for a in ("A", "B")
        for b in ("forward", "backward")
        for c in ("all-reduce", "all-gather")
        for d in ("x", "y")
    ):
        counter.what, counter.phase = what, phase
        counter.count(collective, 2**number, axis)
        counter.count(collective, 2**number, axis)
    assert counter.total() == [32, 2 * (2**16 - 1)]
    assert counter.total(what="B") == [16, 2 * (2**16 - 2**8)]
    one = counter.total(what="A", phase="backward", collective="all-gather", axis="x")
    assert one == [2, 2 * 2**6]
    assert counter.total(axis="z") == [0, 0]


def test_ring_factor():
    factor = jobs.load("00_collectives").ring_factor
    for T in (1, 2, 4, 8):
        assert factor("all-reduce", T) == 2 * (T - 1) / T
        assert factor("all-gather", T) == factor("reduce-scatter", T) == (T - 1) / T
