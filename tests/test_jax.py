"""Notebook 06: the MLP in JAX is lesson 01's, and its compiled collectives are counted.

The notebook's own cells run here, in this process, on four simulated devices. Most of
what they say they check themselves, or it is compared with what is committed.
"""

import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import jobs
import numpy as np
import pytest
import test_notebooks

jax = pytest.importorskip("jax", reason="jax is not installed: make setup EXTRA=1")

NAME = "06_the_same_in_jax"
# A file that the notebook reads, and the run that writes it.
RUNS = {
    "traces/06.json": ("01_naive_mlp_tp", 4, "--dtype", "float64"),
    "traces/06_mesh.json": ("13_mesh_2d", 4, "--dtype", "float64"),
}
pytestmark = [pytest.mark.launches(*run) for run in RUNS.values()]


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
    traces = tmp_path_factory.mktemp("traces")
    for path, run in RUNS.items():
        (traces / Path(path).name).write_text(json.dumps(jobs.result(*run).data))
    folder, names = os.getcwd(), {}
    with mock.patch.dict(os.environ):
        for text in cells():
            exec(text.replace('"traces/', f'"{traces}/'), names)
    os.chdir(folder)
    return names


def test_without_jax_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)  # cannot be imported
    monkeypatch.chdir(test_notebooks.FOLDER)
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        exec(cells()[0], {})
    assert str(ended.value) == "JAX is missing; to install it: make setup EXTRA=1"


def test_losses_and_gradients_are_lesson_01s(book):
    """Of each way; and the notebook's comparison sees what is off by 1e-11."""
    assert book["run"]["verdict"] == "PASS" and len(jax.devices()) == 4
    compare, results = book["compare"], book["results"]
    by_hand = ["shard_map, Megatron", "shard_map, FSDP"]
    assert {*results} == {
        "one device",
        *by_hand,
        *(f"jit, {way}" for way in book["layouts"]),
    }
    for name in results:
        compare(name)
    losses, gradients = results["one device"]
    assert len(losses) == 3 and gradients.keys() == book["reference"].keys()
    for tensor, grad in gradients.items():
        results["off"] = losses, gradients | {tensor: grad * (1 + 1e-11)}
        with pytest.raises(AssertionError):
            compare("off")
    results["off"] = [*losses[:2], losses[2] * (1 + 1e-11)], gradients
    with pytest.raises(AssertionError):
        compare("off")


@pytest.mark.parametrize("line", [
    "replica_groups={{0,2},{1,3}}, dimensions={0}",
    "replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true",
    "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_0'}, to_apply=%add",
])  # fmt: skip
def test_three_ways_to_write_which_devices_meet(book, line):
    wanted = {frozenset({0, 2}), frozenset({1, 3})}
    assert book["groups_in"](f"all-reduce(%x), {line}", np.arange(4)) == wanted
    assert book["groups_in"]("source_target_pairs={{0,1}}", np.arange(4)) is None


def test_exercises(book, capsys):
    def verdict(answer, check):
        names = dict(book)
        exec(answer, names)
        capsys.readouterr()
        exec(check, names)
        return capsys.readouterr().out

    test_notebooks.judge_exercises(NAME, verdict)
