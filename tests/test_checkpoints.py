"""Checkpoints: saved under one mesh, loaded under another; complete, or ignored.

The script's own runs; a chain of starts on 8, 4 and 1 ranks by --save and --load; files
that are damaged; a disk that is full; a rank that is killed while it saves.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path

import jobs
import pytest
from runs import CHECKPOINT_RUNS, CHECKPOINTS, flag, number, over, passed, rows_with
from test_refusals import as_rank, message

pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


# The script's own runs.


def losses_of(data: dict) -> list[dict]:
    """The rows of losses, of the steps before and after the load."""
    rows = rows_with(data, "name", "one process")
    return [row for row in rows if row["name"].startswith("loss, ")]


def meshes_of(data: dict) -> list[tuple]:
    rows = rows_with(data, "mesh", "pp")
    return [(row["pp"], row["dp"], row["tp"]) for row in rows]


@over(CHECKPOINT_RUNS)
def test_passes_and_fits_the_screen(run):
    done = passed(run, 85)
    losses = [number(row["one process"]) for row in losses_of(done.data)]
    assert losses == sorted(losses, reverse=True), "it learns"


@over(CHECKPOINT_RUNS)
def test_every_mesh_loads_what_was_saved(run):
    """Weights, moments and step, bitwise, on A again and on the other meshes."""
    data = jobs.result(*run).data
    ranks = run[1]
    meshes = meshes_of(data)
    assert all(pp * dp * tp == ranks for pp, dp, tp in meshes)
    assert len(set(meshes)) == len(meshes) == (1 if ranks == 1 else 3)
    rows = rows_with(data, "mesh", "vector")  # the last table is of the end, bitwise
    rows = [row for row in rows if row["section"] == rows[0]["section"]]
    loaded = {row["mesh"]: row for row in rows}
    assert list(loaded) == ["A again", "B", "C"][: len(meshes)]
    for row in loaded.values():
        for kind in ("weight", "vector", "exp_avg", "exp_avg_sq", "step"):
            equal, _, expected = row[kind].partition(" of ")
            assert equal == expected and int(equal) > 0, row
    steps = int(flag(run, "--steps", 4))
    losses = [row["name"] for row in losses_of(data)]
    assert losses == [f"loss, step {step}" for step in range(1, steps + 1)]
    for row in losses_of(data)[steps // 2 :]:
        assert set(loaded) < set(row), "resumed runs are compared with one process"


@over(CHECKPOINT_RUNS)
def test_each_element_is_written_once(run):
    data = jobs.result(*run).data
    *files, total = rows_with(data, "file", "parts")
    assert len(files) == run[1], "every rank writes"
    n, e = data["size"]["Ψ"], data["size"]["e"]
    assert number(total["elements, bytes"]) == 3 * n * e
    assert sum(number(row["elements, bytes"]) for row in files) == 3 * n * e
    for row in files:
        assert number(row["elements, bytes"]) < number(row["file, bytes"])
    examples = rows_with(data, "tensor", "placement")
    placements = {row["tensor"]: row["placement"] for row in examples}
    assert placements["weight/norm.weight"] == "Replicate()"
    assert placements["weight/layers.0.mlp.up_proj.weight"] == "Shard(dim=0)"
    assert placements["weight/layers.0.mlp.down_proj.weight"] == "Shard(dim=1)"


def default_settings(ranks: int) -> dict:
    script = jobs.load(CHECKPOINTS)
    args = script.make_parser().parse_args([])
    vars(args).update(ranks=ranks, dtype="float32", seed=1)  # as launch does
    script.sizes(args)
    return args.settings


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_default_model_for_1_2_4_and_8_ranks(ranks):
    """What one of them saves, another one loads without a flag for a size."""
    assert default_settings(ranks) == default_settings(1)


# A chain of starts, each on another mesh, by --save and --load.


SMALL = (
    "--hidden",
    "16",
    "--heads",
    "2",
    "--kv-heads",
    "2",
    "--layers",
    "3",
    "--batch-size",
    "8",
)
SMALL += ("--seq-len", "8", "--microbatches", "2", "--tie", "--dtype", "float64")


def save_a_chain() -> tuple:
    """A folder of checkpoints, and the runs that wrote them."""
    folder = Path(tempfile.mkdtemp()) / "here"
    save = (*SMALL, "--save", folder)
    load = ("--load", folder)
    first = jobs.run_lesson(CHECKPOINTS, 8, *save, "--steps", "2", "--dp", "2")
    other = ("--dp", "2", "--tp", "2", "--zero")
    second = jobs.run_lesson(CHECKPOINTS, 4, *save, *load, "--steps", "4", *other)
    third = jobs.run_lesson(CHECKPOINTS, 1, *SMALL, *load, "--steps", "5")
    return folder, (first, second, third)


@pytest.fixture(scope="module")
def saved():
    folder, runs = jobs.begin(save_a_chain).result()
    yield folder, runs
    shutil.rmtree(folder.parent)


@pytest.mark.ahead.with_args(save_a_chain)
def test_losses_continue_as_if_nothing_had_happened(saved):
    for done in saved[1]:
        assert done.code == 0 and done.data["verdict"] == "PASS", done.text
    meshes = [meshes_of(done.data)[0] for done in saved[1]]
    assert meshes == [(2, 2, 2), (1, 2, 2), (1, 1, 1)]
    rows = [row for done in saved[1] for row in losses_of(done.data)]
    assert [row["name"] for row in rows] == [f"loss, step {n}" for n in (1, 2, 3, 4, 5)]
    for row in rows:
        assert row["A"] == row["one process"] and row["ok"] == "ok", row
    folders = sorted(path.name for path in saved[0].iterdir())
    assert folders == [f"step_{step:06}" for step in range(1, 5)]
    said = " ".join(saved[1][1].out.split())  # lines may be broken anywhere
    assert "step_000002, saved by pp 2 × dp 2 × tp 2." in said


def one_bit(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def changed(**values):
    return lambda data: json.dumps(dict(json.loads(data), **values)).encode()


def without_mesh(data: bytes) -> bytes:
    contents = json.loads(data)
    del contents["mesh"]
    return json.dumps(contents).encode()


LOAD = "--steps 9 --load HERE"
FORGED = "complete.json is not what save_checkpoint writes"


@pytest.mark.parametrize("name, edit, flags, words", [
    # A file of the latest checkpoint, and what becomes of it (None: it is gone).
    ("*.distcp", one_bit, LOAD, "--load .* is damaged"),
    (".metadata", None, LOAD, "--load .*No such file"),
    ("complete.json", None, LOAD, "--load .*No such file"),
    ("complete.json", lambda data: b"{", LOAD, "--load .*Expecting property name"),
    ("complete.json", lambda data: b"\xff\xfe", LOAD, "--load .*complete.json is dam"),
    ("complete.json", changed(text=1), LOAD, "--load .*docstring.*has been edited; un"),
    ("complete.json", lambda data: b"[1, 2]", LOAD, f"--load .*{FORGED}"),
    ("complete.json", changed(files=[1]), LOAD, f"--load .*{FORGED}"),
    ("complete.json", changed(files={"": 1}), LOAD, "--load .*Is a directory"),
    ("complete.json", changed(step="four"), LOAD, "--load .*step is four in the ch"),
    ("complete.json", without_mesh, LOAD, "--load .*complete.json has no 'mesh'"),
    # Nothing is wrong with the files.
    ("", None, f"{LOAD} --hidden 32", "hidden is 16 .* this run; take --hidden 16"),
    ("", None, "--load HERE --steps 4", "of step 4, .*--steps 4; take --steps 8"),
    ("", None, f"{LOAD} --save HERE/../no/folder", "--save"),
    ("", None, f"{LOAD}/../no", "--load .*no complete checkpoint"),
    ("", None, f"{LOAD}/step_000004", "take the folder above it: --load .*here$"),
    ("", None, "--save HERE", r"step_00000\d is already there"),  # from later steps
    ("", None, "--save ''", "--save: '' is not the name of a folder"),
    ("", None, "--load ''", "--load: '' is not the name of a folder"),
])  # fmt: skip
def test_what_cannot_be_resumed_from(saved, tmp_path, name, edit, flags, words):
    """On one rank, before any group is made."""
    folder = tmp_path / "here"
    shutil.copytree(saved[0], folder)
    if name:
        file = sorted((folder / "step_000004").glob(name))[0]
        if edit:
            file.write_bytes(edit(file.read_bytes()))
        else:
            file.unlink()
    refused(flags.replace("HERE", str(folder)), words)


def refused(flags: str, words: str) -> None:
    """One error: line by one rank, exit code 2, and no output."""
    flags = [text if text != "''" else "" for text in flags.split()]
    code, out, err = jobs.run_here(CHECKPOINTS, *SMALL, *flags, **as_rank(0, 1))
    assert code == 2 and out == "", (out, err)
    assert re.search(words, message(err)), err


def test_a_file_in_the_way_is_found_before_training(tmp_path):
    (tmp_path / "part_000003").write_text("not a folder")
    refused(f"--save {tmp_path}", "part_000003 is a file, .*; remove it")


def test_a_folder_into_which_another_run_saves(tmp_path):
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    refused(f"--save {tmp_path}", "--save .*: another run saves into this folder; take")
    os.close(other)
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_other_meshes_do_not_divide(saved):
    """They are left out, with the reason; mesh A must fit."""
    out = " ".join(saved[1][0].out.split())
    assert "pp 1 × dp 2 × tp 4 is left out: --kv-heads 2: 2 % 4 ranks " in out
    assert (
        "pp 4 × dp 2 × tp 1 is left out: --layers 3: fewer than the stages, --pp 4"
        in out
    )


# Files that are wrong, but not for their checksum; a disk that is full.


def test_a_truncated_file_with_a_forged_checksum(saved, tmp_path):
    """The load fails on every rank, with words."""
    folder = tmp_path / "here"
    shutil.copytree(saved[0], folder)
    path = folder / "step_000004"
    file = sorted(path.glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes()[:200])
    contents = json.loads((path / "complete.json").read_text())
    contents["files"][file.name] = zlib.crc32(file.read_bytes())
    (path / "complete.json").write_text(json.dumps(contents))
    done = jobs.run_lesson(CHECKPOINTS, 2, *SMALL, "--load", folder, "--steps", "9")
    said = error_of(done)
    assert re.search(r"step_000004 cannot be read: rank \d: \w+: \S+", said), said


SAVE = "torch.distributed.checkpoint.save"  # the function at which a fault happens


def test_a_full_disk_is_named_as_the_system_does(tmp_path):
    """No disk is full: from the second save on, rank 1's files are too large."""
    script = jobs.ROOT / "tests" / "faulty.py"
    done = jobs.launch(
        script, 2, CHECKPOINTS, "full", 1, 2, *SMALL, "--save", tmp_path / "here",
        FAULT_AT=SAVE, FAULT_TIME=str(tmp_path / "time"),
    )  # fmt: skip
    assert (tmp_path / "time").exists(), "the fault was never reached"
    said = error_of(done)
    assert "step 2 is not saved: rank 1, " in said and "File too large" in said, said
    left = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert left == ["part_000002", "step_000001"]


def error_of(done) -> str:
    """The error of a run that has no verdict: what torchrun's report has of a rank."""
    assert done.code != 0 and "PASS" not in done.out, done.text
    _, _, report = done.err.partition("Root Cause")
    (said,) = re.findall(r"^ *OSError: .*", report, re.M)
    return said


def test_killed_while_saving_and_started_again(tmp_path):
    """--max-restarts=1: from the latest complete checkpoint, with the same losses."""
    folder, json_path = tmp_path / "here", tmp_path / "out.json"
    done = jobs.launch(
        jobs.ROOT / "tests" / "faulty.py", 2, CHECKPOINTS, "kill", 1, 3, *SMALL,
        "--pp", 2, "--steps", 4, "--save", folder, "--json", json_path,
        "--timeout", 20, FAULT_TIME=str(tmp_path / "time"), FAULT_AT=SAVE,
        PET_MAX_RESTARTS="1",
    )  # fmt: skip
    assert done.code == 0, done.text
    assert (tmp_path / "time").exists(), "no rank was killed"
    data = json.loads(json_path.read_text())
    assert data["verdict"] == "PASS" and "step_000002" in done.out
    names = [row["name"] for row in losses_of(data)]
    assert names == ["loss, step 3", "loss, step 4"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step_{step:06}" for step in range(1, 5)]
