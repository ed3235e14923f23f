"""Every split of the MLP equals the MLP, to the rounding of float64, on random shapes.

Those of lesson 01, and beyond/13's on a 2D mesh: outputs and all gradients, with biases
and without; bitwise on whole numbers, where nothing rounds. 2d with one rank on the
inner axis is FSDP. What is sent is checked in the lesson's and the script's own runs.
"""

import jobs
import pytest
from in_ranks import no_group
from runs import MESH_2D, MLP, found
from torch import nn

DRIVER = ("drive_mlp.py", 4)
ON_MESH = ("up", "down", "2d")

driven = pytest.mark.launches(*DRIVER)


def equal(ranks, way: str, allowed: float) -> None:
    """Output, gradients of input, weights and biases, on all ranks of every shape."""
    mine = [case for case in found(ranks, "cases") if case["way"] == way]
    meshes = [[2, 2], [4, 1], [1, 4], [2, 1]] if way in ON_MESH else [[1], [2], [4]]
    assert all(mesh in [case["mesh"] for case in mine] for mesh in meshes)
    with_bias = {any("bias" in name for name in case["diffs"]) for case in mine}
    assert with_bias == {True, False}
    for case in mine:
        assert max(case["diffs"].values()) <= allowed, case


@driven
@pytest.mark.parametrize("way", ["tp", "naive", "2d"])
def test_float64_equality(ranks, way):
    equal(ranks, way, 1e-12)


@driven
@pytest.mark.parametrize("way", ["column", "row", "up", "down"])
def test_bitwise_on_whole_numbers(ranks, way):
    """In float32, float64 and bfloat16."""
    equal(ranks, way, 0)


@driven
def test_f_sends_nothing_if_x_needs_no_gradient(ranks):
    """So an MLP on plain data shows one all-reduce per step; gradients are right."""
    for of_rank in ranks:
        for name, calls in (("x needs a gradient", 1), ("x needs none", 0)):
            seen = of_rank["backward"][name]
            assert seen["calls"] == calls and seen["diff"] <= 1e-12, (name, seen)


@pytest.mark.parametrize("name, full, groups", [
    ("ColumnParallelLinear", (8, 5), 1), ("RowParallelLinear", (5, 8), 1),
    ("UpLinear2D", (8, 5), 2),
])  # fmt: skip
def test_widths_that_do_not_divide(name, full, groups):
    module = jobs.load(MLP if groups == 1 else MESH_2D)
    with pytest.raises(ValueError, match=r"\b5\b.* is not a multiple of 4"):
        getattr(module, name)(nn.Linear(*full), *[no_group(4)] * groups)
