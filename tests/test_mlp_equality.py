"""Every split of the MLP equals the MLP, to the rounding of float64, on random shapes.

Outputs, all gradients, what a layer sends; bitwise on whole numbers, where nothing
rounds. 2d with one rank on the inner axis is FSDP.
"""

import pytest
from runs import found

DRIVER = ("drive_mlp.py", 4)
LINEARS = ("column", "row", "up", "down")
WAYS = (*LINEARS, "tp", "naive", "2d")
FUNCTIONS = "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter"
ALLOWED = 1e-12

pytestmark = pytest.mark.launches(*DRIVER)


def cases(ranks, way, whole=False):
    mine = [case for case in found(ranks, "cases") if case["way"] == way]
    return [case for case in mine if case["whole"] is whole]


def worst(mine, kind) -> tuple:
    """The largest difference of the tensors of one kind, and where it was."""
    diffs = [
        (diff, name, case["mesh"], case["shape"], case["dtype"])
        for case in mine
        for name, diff in case["diffs"].items()
        if KINDS[kind](name)
    ]
    assert len(diffs) >= len(mine) > 0
    return max(diffs, key=lambda row: row[0])


KINDS = {
    "output": lambda name: name == "y",
    "input gradient": lambda name: name == "x",
    "slices": lambda name: name.startswith("held "),
    "weight gradients": lambda name: name.endswith("weight") and "held" not in name,
    "bias gradients": lambda name: name.endswith("bias") and "held" not in name,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_float64_equality(ranks, way, kind):
    mine = cases(ranks, way)
    shapes = {(*case["shape"], *case["mesh"].values()) for case in mine}
    assert len(shapes) >= (30 if way in ("up", "down") else 80)
    allowed = 0 if kind == "slices" else ALLOWED
    assert worst(mine, kind)[0] <= allowed, worst(mine, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", LINEARS)
def test_bitwise_on_whole_numbers(ranks, way, kind):
    mine = cases(ranks, way, whole=True)
    dtypes = {"torch.float32", "torch.float64", "torch.bfloat16"}
    assert {case["dtype"] for case in mine} == dtypes
    assert worst(mine, kind)[0] == 0, worst(mine, kind)


@pytest.mark.parametrize("way", LINEARS)
def test_bytes_of_a_layer_by_phase_and_axis(ranks, way):
    """Those of whole MLPs are rows of the lesson: see its --json in test_lessons."""
    for case in cases(ranks, way):
        assert case["sent"] == case["wanted"], case


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_copies_with_pytorch_names(ranks, way):
    for case in cases(ranks, way):
        assert case["own"] and case["names"], case


def test_shapes_and_meshes_cover_the_ground(ranks):
    for way in WAYS:
        meshes = {tuple(case["mesh"].values()) for case in cases(ranks, way)}
        on_mesh = way in ("up", "down", "2d")
        wanted = {(2, 2), (4, 1), (1, 4), (2, 1)} if on_mesh else {(1,), (2,), (4,)}
        assert meshes == wanted, way


@pytest.mark.parametrize("way", ["dp", "fsdp"])
def test_averages_over_batch_slices(ranks, way):
    diffs = [
        (diff, name, T)
        for T, by_name in found(ranks, "averages")
        for name, diff in by_name.items()
        if name.startswith(f"{way} ")
    ]
    assert len(diffs) == 4 * 12 * 4 and max(diffs)[0] <= ALLOWED, max(diffs)


@pytest.mark.parametrize("what", ["y", "x", "input"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_autograd_in_one_process(ranks, name, what):
    mine = [row for row in found(ranks, "functions") if row[0] == name]
    assert {T for _, T, _ in mine} == {1, 2, 4} and len(mine) == 4 * 20
    assert max(diffs[what] for _, _, diffs in mine) <= ALLOWED


def test_f_and_g_on_two_numbers(ranks):
    """One process has y = (1 + … + T)·5, so dL/dx = 1 + … + T and dL/dw_t = 5."""
    for T, y, x_grad, w_grad in found(ranks, "two_numbers"):
        total = T * (T + 1) / 2
        assert [y, x_grad, w_grad] == [5 * total, total, 5]


def test_widths_that_do_not_divide(ranks):
    for T, message in found(ranks, "refusals"):
        assert str(T + 1) in message and f"not a multiple of {T}" in message
