"""Every split of the MLP equals the MLP, to the rounding of float64, on random shapes.

Outputs and all gradients; bitwise on whole numbers, where nothing rounds. 2d with one
rank on the inner axis is FSDP. What is sent is checked in the lesson's own runs.
"""

import jobs
import pytest
from in_ranks import no_group
from runs import MLP, found
from torch import nn

DRIVER = ("drive_mlp.py", 4)
LINEARS = ("column", "row", "up", "down")
ON_MESH = ("up", "down", "2d")

driven = pytest.mark.launches(*DRIVER)


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


@driven
@pytest.mark.parametrize("way", [*LINEARS, "tp", "naive", "2d"])
def test_float64_equality(ranks, way):
    mine = cases(ranks, way)
    shapes = {(*case["shape"], *case["mesh"]) for case in mine}
    assert len(shapes) >= (30 if way in ("up", "down") else 60)
    meshes = {tuple(case["mesh"]) for case in mine}
    assert meshes == ({(2, 2), (4, 1), (1, 4), (2, 1)} if way in ON_MESH
                      else {(1,), (2,), (4,)})  # fmt: skip
    equal(mine, 1e-12)


@driven
@pytest.mark.parametrize("way", LINEARS)
def test_bitwise_on_whole_numbers(ranks, way):
    mine = cases(ranks, way, whole=True)
    dtypes = {"torch.float32", "torch.float64", "torch.bfloat16"}
    assert {case["dtype"] for case in mine} == dtypes
    equal(mine, 0)


@pytest.mark.parametrize("T", [2, 4])
@pytest.mark.parametrize("name, full", [
    ("ColumnParallelLinear", (8, 5)), ("RowParallelLinear", (5, 8)),
    ("UpLinear2D", (8, 5)),
])  # fmt: skip
def test_widths_that_do_not_divide(name, full, T):
    group = no_group(T)
    groups = [group, group] if name == "UpLinear2D" else [group]
    with pytest.raises(ValueError, match=rf"\b5\b.* is not a multiple of {T}"):
        getattr(jobs.load(MLP), name)(nn.Linear(*full), *groups)
