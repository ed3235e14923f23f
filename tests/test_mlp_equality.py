"""Every split of the MLP equals the MLP, to the rounding of float64, on random shapes.

Outputs, all gradients, what is sent; bitwise on whole numbers, where nothing rounds.
"""

import pytest

DRIVER = ("drive_mlp.py", 4)
LINEARS = ("column", "row", "fsdp_linear", "up_2d", "down_2d")
WAYS = (*LINEARS, "tp", "naive", "fsdp", "2d")
FUNCTIONS = "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter"
ALLOWED = 1e-12

pytestmark = pytest.mark.launches(*DRIVER)


def cases(ranks, way, whole=False):
    found = [case for rank in ranks for case in rank["cases"]]
    return [case for case in found if case["way"] == way and case["whole"] is whole]


def worst(mine, kind) -> tuple:
    """The largest difference of the tensors of one kind, and where it was."""
    diffs = [
        (diff, name, case["mesh"], case["shape"], case["dtype"])
        for case in mine
        for name, diff in case["diffs"].items()
        if kind(name)
    ]
    assert len(diffs) >= len(mine)
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
    assert len(shapes) >= (80 if way in ("column", "row", "tp", "naive") else 20)
    allowed = 0 if kind == "slices" else ALLOWED
    assert worst(mine, KINDS[kind])[0] <= allowed, worst(mine, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", LINEARS)
def test_bitwise_on_whole_numbers(ranks, way, kind):
    mine = cases(ranks, way, whole=True)
    assert {case["dtype"] for case in mine} == {
        "torch.float32", "torch.float64", "torch.bfloat16",
    }  # fmt: skip
    assert worst(mine, KINDS[kind])[0] == 0, worst(mine, KINDS[kind])


@pytest.mark.parametrize("way", WAYS)
def test_bytes_by_phase_and_axis(ranks, way):
    for case in cases(ranks, way):
        assert case["sent"] == case["wanted"], case


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_copies_with_pytorch_names(ranks, way):
    for case in cases(ranks, way):
        assert case["own"] and case["names"], case


def test_shapes_and_meshes_cover_the_ground(ranks):
    for way in WAYS:
        meshes = {tuple(sorted(case["mesh"].items())) for case in cases(ranks, way)}
        if way.endswith("2d"):
            pairs = ((2, 2), (4, 1), (1, 4))
            assert meshes == {(("x", X), ("y", Y)) for Y, X in pairs}
        else:
            assert meshes == {(("dp", T), ("tp", T)) for T in (1, 2, 4)}


@pytest.mark.parametrize("way", ["dp", "fsdp"])
def test_averages_over_batch_slices(ranks, way):
    diffs = [
        (diff, name, T)
        for rank in ranks
        for T, found in rank["averages"]
        for name, diff in found.items()
        if name.startswith(f"{way} ")
    ]
    assert len(diffs) >= 4 * 12 * 4 and max(diffs)[0] <= ALLOWED, max(diffs)


@pytest.mark.parametrize("what", ["y", "x", "input"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_autograd_in_one_process(ranks, name, what):
    found = [
        (diffs[what], T)
        for rank in ranks
        for function, T, diffs in rank["functions"]
        if function == name
    ]
    assert {T for _, T in found} == {1, 2, 4} and len(found) == 4 * 20
    assert max(found)[0] <= ALLOWED, max(found)


def test_widths_that_do_not_divide(ranks):
    for rank in ranks:
        names = {name for name, *_ in rank["refusals"]}
        assert names == {"ColumnParallelLinear", "RowParallelLinear", "FSDPLinear"}
        for name, width, T, message in rank["refusals"]:
            assert f"{width} % {T}" in message and "= 1" in message, (name, message)
