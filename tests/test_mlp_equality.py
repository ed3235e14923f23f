"""Every split of the MLP equals the MLP, to the rounding of float64, on random shapes.

Outputs and all gradients; bitwise on whole numbers, where nothing rounds. 2d with one
rank on the inner axis is FSDP. What is sent is checked in the lesson's own runs.
"""

import pytest
from runs import found

DRIVER = ("drive_mlp.py", 4)
LINEARS = ("column", "row", "up", "down")
ON_MESH = ("up", "down", "2d")
WAYS = (*LINEARS, "tp", "naive", "2d")
FUNCTIONS = "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter"
ALLOWED = 1e-12

pytestmark = pytest.mark.launches(*DRIVER)


def cases(ranks, way, whole=False):
    mine = [case for case in found(ranks, "cases") if case["way"] == way]
    return [case for case in mine if case["whole"] is whole]


def equal(mine, allowed) -> None:
    """Output, gradients of input, weights and biases; what is held, to the bit: slices,
    which are copies, under PyTorch's names."""
    for case in mine:
        for name, diff in case["diffs"].items():
            assert diff <= (0 if name.startswith("held ") else allowed), (name, case)
        assert len(case["diffs"]) >= 2 + 2 * 2 + 2, "two parameters or more"


@pytest.mark.parametrize("way", WAYS)
def test_float64_equality(ranks, way):
    mine = cases(ranks, way)
    shapes = {(*case["shape"], *case["mesh"].values()) for case in mine}
    assert len(shapes) >= (30 if way in ("up", "down") else 80)
    meshes = {tuple(case["mesh"].values()) for case in mine}
    assert meshes == ({(2, 2), (4, 1), (1, 4), (2, 1)} if way in ON_MESH
                      else {(1,), (2,), (4,)})  # fmt: skip
    equal(mine, ALLOWED)


@pytest.mark.parametrize("way", LINEARS)
def test_bitwise_on_whole_numbers(ranks, way):
    mine = cases(ranks, way, whole=True)
    dtypes = {"torch.float32", "torch.float64", "torch.bfloat16"}
    assert {case["dtype"] for case in mine} == dtypes
    equal(mine, 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_autograd_in_one_process(ranks, name):
    """Output and gradient; the input is not touched."""
    mine = [row for row in found(ranks, "functions") if row[0] == name]
    assert {T for _, T, _ in mine} == {1, 2, 4} and len(mine) == 4 * 68
    for _, _, diffs in mine:
        assert max(diffs["y"], diffs["x"]) <= ALLOWED and diffs["input"] == 0, mine


def test_f_and_g_on_two_numbers(ranks):
    """One process has y = (1 + … + T)·5, so dL/dx = 1 + … + T and dL/dw_t = 5."""
    for T, y, x_grad, w_grad in found(ranks, "two_numbers"):
        total = T * (T + 1) / 2
        assert [y, x_grad, w_grad] == [5 * total, total, 5]


def test_widths_that_do_not_divide(ranks):
    for T, message in found(ranks, "refusals"):
        assert str(T + 1) in message and f"not a multiple of {T}" in message
