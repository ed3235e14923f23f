"""Notebook 06: the MLP in JAX is lesson 01's, and its compiled collectives are counted.

The notebook's own cells run here, in this process, on four simulated devices.
"""

import builtins
import json
import os
import re
from unittest import mock

import jobs
import numpy as np
import pytest
import test_notebooks
import wrong_06

jax = pytest.importorskip("jax", reason="jax is not installed: make setup EXTRA=1")

NAME = "06_the_same_in_jax"
LESSON = ("01_naive_mlp_tp", 4, "--dtype", "float64")  # the notebook's first run
pytestmark = pytest.mark.launches(*LESSON)


def cells() -> list[str]:
    """The code cells, without exercises, checks and lines for the shell."""
    found = []
    for cell in test_notebooks.NOTEBOOKS[NAME]["cells"]:
        tags = " ".join(cell["metadata"].get("tags", []))
        text = "".join(cell["source"])
        is_exercise = re.search(r"(exercise|check)-\d", tags)
        if cell["cell_type"] == "code" and not is_exercise and text[0] != "!":
            found.append(re.sub(r"^    [!%].*", "    pass", text, flags=re.M))
    return found


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """What the notebook's names are after its last cell."""
    path = tmp_path_factory.mktemp("traces") / "06.json"
    path.write_text(json.dumps(jobs.result(*LESSON).data))
    folder, names = os.getcwd(), {}
    with mock.patch.dict(os.environ):
        for text in cells():
            exec(text.replace('"traces/06.json"', repr(str(path))), names)
    os.chdir(folder)
    return names


def test_without_jax_one_line_says_what_to_do():
    def no_jax(name, *rest):
        if name == "jax":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    real, folder = builtins.__import__, os.getcwd()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(builtins, "__import__", no_jax),
        pytest.raises(SystemExit) as ended,
    ):
        exec(cells()[0], {})
    os.chdir(folder)
    assert str(ended.value) == "JAX is missing; to install it: make setup EXTRA=1"


def test_losses_and_gradients_are_lesson_01s(book):
    run, reference = book["run"], book["reference"]
    assert run["verdict"] == "PASS" and run["world_size"] == len(jax.devices()) == 4
    wanted = [row["Megatron"] for row in run["losses"]]
    norms = {row["name"][5:]: row["Megatron"] for row in run["gradients"][1:]}
    assert len(wanted) == 3 and set(norms) == set(reference)
    ways = ["Megatron", "naive", "DP", "FSDP", "2D"]
    by_hand = ["shard_map, Megatron", "shard_map, FSDP"]
    assert {*book["results"]} == {"one device", *by_hand, *(f"jit, {w}" for w in ways)}
    for name, (losses, gradients) in book["results"].items():
        np.testing.assert_allclose(losses, wanted, 1e-12, err_msg=name)
        for tensor, other in reference.items():
            got = np.array(gradients[tensor])
            diff = np.abs(got - other.numpy()).max() / np.abs(other.numpy()).max()
            assert diff < 1e-12, (name, tensor)
            norm = np.linalg.norm(got)
            assert abs(norm - norms[tensor]) < 1e-12 * norm, (name, tensor)


SLICES = {  # of down_proj.bias and weight, up_proj.bias and weight, x
    "Megatron": [(64,), (64, 64), (64,), (64, 64), (8, 8, 64)],
    "naive": [(16,), (16, 256), (64,), (64, 64), (8, 8, 64)],
    "DP": [(64,), (64, 256), (256,), (256, 64), (2, 8, 64)],
    "FSDP": [(16,), (16, 256), (64,), (256, 16), (2, 8, 64)],
    "2D": [(16,), (32, 128), (64,), (128, 32), (4, 8, 32)],
}


@pytest.mark.parametrize("way", SLICES)
def test_what_a_device_holds(book, way):
    """So the layouts are those whose results were compared, and gradients lie alike."""
    mesh, specs, of_x = book["layouts"][way]
    program, (params, x, _) = book["compile_step"](specs, of_x, mesh)
    held = lambda arrays: [
        array.addressable_shards[0].data.shape for array in jax.tree.leaves(arrays)
    ]
    assert held((params, x)) == SLICES[way]
    _, gradients = program(params, x, x)
    assert held(gradients) == SLICES[way]


x, h, weights, biases = (8 * n for n in (8 * 8 * 64, 8 * 8 * 256, 2 * 64 * 256, 320))
P = weights + biases
COUNTED = {  # (collective, axis) → tensors, bytes
    "Megatron": {("all-reduce", "tp"): [2, 2 * x]},
    "naive": {("all-gather", "tp"): [1, h], ("all-reduce", "tp"): [2, x + h],
              ("all-reduce", "loss"): [1, 8 * 8 * 8]},
    "DP": {("all-reduce", "dp"): [4, P], ("all-reduce", "loss"): [1, 8]},
    "FSDP": {("all-gather", "dp"): [4, P], ("all-reduce", "dp"): [4, P],
             ("all-reduce", "loss"): [1, 8]},
    "2D": {("all-gather", "inner"): [2, x], ("all-gather", "outer"): [4, P // 2],
           ("all-reduce", "inner"): [2, x], ("all-reduce", "outer"): [4, P // 2],
           ("all-reduce", "loss"): [2, 8 * 4 * 8 + 8]},
    "shard_map, FSDP": {("all-gather", "dp"): [4, P], ("reduce-scatter", "dp"): [4, P],
                        ("all-reduce", "loss"): [1, 8]},
}  # fmt: skip
DIFFERS = {"naive", "FSDP", "2D"}  # from lesson 01, the sums for the loss aside


@pytest.mark.parametrize("way", COUNTED)
def test_collectives_of_the_compiled_programs(book, way):
    assert book["counted"][way] == COUNTED[way]
    if way in book["layouts"]:
        ours = book["lessons_ledger"](way)
        chosen = {k: v for k, v in COUNTED[way].items() if k[1] != "loss"}
        assert (chosen != ours) == (way in DIFFERS)


def test_what_two_layouts_of_a_2d_mesh_cost(book):
    total = lambda name: sum(row[1] for row in book["counted"][name].values())
    assert total("GSPMD's layout") == x + P // 2
    assert total("both alike") == x // 2 + h // 2 + P // 2


@pytest.mark.parametrize("line", [
    "replica_groups={{0,2},{1,3}}, dimensions={0}",
    "replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true",
    "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_0'}, to_apply=%add",
])  # fmt: skip
def test_three_ways_to_write_which_devices_meet(book, line):
    wanted = {frozenset({0, 2}), frozenset({1, 3})}
    assert book["groups_in"](f"all-reduce(%x), {line}", np.arange(4)) == wanted
    assert book["groups_in"]("source_target_pairs={{0,1}}", np.arange(4)) is None


def test_which_products_the_types_refuse(book):
    assert set(book["refused"]) == {"3", "4"}
    assert "ambiguous how the output should be sharded" in book["refused"]["3"]


def test_f_is_pvary_forward_and_psum_backward(book):
    varies, same = "float64[8,8,64]{V:tp}", "float64[8,8,64]"
    for steps in (book["forward_steps"], book["backward_steps"]):
        names = [name for name, *_ in steps]
        assert names == ["pvary", "dot_general", "dot_general", "psum"]
        (_, (before,), after), *_, (_, (term,), total) = steps
        assert [str(t) for t in (before, after)] == [same, varies]
        assert [str(t) for t in (term, total)] == [varies, same]


ALL = {"x", "up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"}


@pytest.mark.parametrize("f, g, checked, wrong, times", [
    ("identity", "psum", True, set(), 1),
    ("identity", "psum", False, ALL - {"down_proj.bias"}, 4),
    ("f", "g", False, set(), 1),
    ("identity", "g", False, {"x"}, 1),
])  # fmt: skip
def test_which_gradients_are_wrong_without_f(book, f, g, checked, wrong, times):
    loss, gradients = book["gradients_on_device"](book[f], book[g], checked)
    wanted = book["run"]["losses"][0]["without TP"]
    assert abs(loss - wanted) < 1e-12 * wanted  # right in any case
    assert book["report"]("", loss, gradients) == wrong
    for tensor in wrong - {"x"}:
        other = times * book["reference"][tensor].numpy()
        np.testing.assert_allclose(np.array(gradients[tensor]), other, atol=1e-12)
    if wrong:  # each device has its own term of dL/dx, times too large with the rest
        total = np.array(gradients["x"]).sum(0)
        other = times * book["reference"]["x"].numpy()
        np.testing.assert_allclose(total, other, atol=1e-12)


def test_exercises(book, capsys):
    found = test_notebooks.exercises(NAME)
    assert sorted(found) == sorted({number for number, *_ in wrong_06.WRONG})
    assert sorted(found) == [1, 2, 3]

    def verdict(number, code):
        names = dict(book)
        exec(code, names)
        capsys.readouterr()
        exec(found[number]["check"], names)
        return capsys.readouterr().out

    for number, exercise in found.items():
        assert verdict(number, exercise["exercise"]).startswith("not yet: ")
        assert verdict(number, exercise["solution"]) == "right\n"
    for number, edits, wanted in wrong_06.WRONG:
        answer = found[number]["solution"]
        for old, new in edits.items():
            assert old in answer, f"the solution has no {old!r}"
            answer = answer.replace(old, new)
        said = verdict(number, answer)
        assert said.startswith("not yet: ") and wanted in said, (answer, said)
