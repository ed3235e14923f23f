"""Lessons under torchrun: verdicts, screens, and what --json says of every check.

A lesson works out its own formulas: here is looked at whether what it checked was
enough, and by bounds no wider than DESIGN 6 allows.
"""

import math
import re
import sys

import jobs
import pytest
from runs import (
    ALIKE,
    ALL_RUNS,
    ALLOWED,
    COLLECTIVES,
    DEFAULTS,
    MESH,
    MLP,
    SAME_BITS,
    flag,
    over,
)

# The schema of --json: what every lesson has, and the columns of its tables' rows.
KEYS = {"lesson", "world_size", "mesh", "dtype", "verdict", "checks", "communication"}
TABLES = {  # of lessons 01 to 05
    "losses": "name diff ok",  # and a column for each run
    "gradients": "name diff ok",
    "communication": "what phase collective axis calls bytes formula predicted_bytes "
    "ring ok",
    "memory": "bytes predicted_bytes ok",
}
CHECK = {"name", "diff", "allowed", "kind", "bad"}
OF_05 = {"groups", "timeline"}

# The collectives that a lesson is about, by axis; where an axis has one rank, none.
TP = {("all-reduce", "tp")}
ABOUT = {
    "01": TP | {("all-gather", "tp"), ("all-reduce", "dp"), ("reduce-scatter", "dp")},
    "02": TP,
    "03": TP,
    "04": TP | {("all-gather", "tp"), ("reduce-scatter", "tp")},
    "05": TP | {("all-reduce", "dp"), ("all-reduce", "pp"), ("send/recv", "pp")},
}
after_00 = over([run for run in ALL_RUNS if run[0] != COLLECTIVES])


def values(row: dict) -> list[float]:
    """Of a row that compares runs: one number a run, the reference first."""
    return [v for name, v in row.items() if name not in ("name", "diff", "ok")]


@over(ALL_RUNS)
def test_passes_and_fits_the_screen(run):
    done = jobs.result(*run)
    assert done.code == 0, done.text
    lines = done.out.splitlines()
    words = f"PASS  {run[0]}  {len(done.data['checks'])} checks, "
    assert lines[-1].startswith(words), lines[-1]
    assert done.out.count("PASS") == 1
    assert "FAIL" not in done.out and "✗" not in done.out
    assert "Traceback" not in done.err and "Warning" not in done.err, done.err
    assert done.left == []
    assert [f"{len(line)}: {line}" for line in lines if len(line) > 88] == []
    assert [line for line in lines if line != line.rstrip()] == []
    assert len(lines) > 30
    if run in DEFAULTS and run[1] <= (8 if run[0] == MESH else 2):
        assert len(lines) <= (80 if run[0] == MESH else 70)


@over(ALL_RUNS)
def test_json(run):
    data = jobs.result(*run).data
    assert data["lesson"] == run[0] and data["world_size"] == run[1]
    assert math.prod(data["mesh"].values()) == run[1]
    assert data["dtype"] == flag(run, "--dtype", "float32")
    assert data["verdict"] == "PASS"
    tables = {} if run[0] == COLLECTIVES else TABLES
    assert set(data) >= KEYS | set(tables) | (OF_05 if run[0] == MESH else set())
    for key, columns in tables.items():
        for row in data[key]:
            assert set(columns.split()) <= set(row) and row["ok"] is True, (key, row)


@over(ALL_RUNS)
def test_every_check_is_within_what_design_allows(run):
    data = jobs.result(*run).data
    of_loss, of_tensor = ALLOWED[data["dtype"]]
    names = {row["name"] for row in data["checks"]}
    assert len(names) == len(data["checks"]) > 30, "two checks of one name"
    for row in data["checks"]:
        assert set(row) >= CHECK, row
        assert row["bad"] == [] and row["diff"] <= row["allowed"], row
        limit = of_tensor if row["kind"] == "numbers" else 0
        if row["kind"] == "numbers" and re.search(r"^losses|\bloss$", row["name"]):
            limit = of_loss
        assert row["allowed"] <= limit, row


@after_00
def test_losses_are_alike_and_fall(run):
    data = jobs.result(*run).data
    of_loss, of_tensor = ALLOWED[data["dtype"]]
    for key, allowed in (("losses", of_loss), ("gradients", of_tensor)):
        for row in data[key]:
            wanted, *others = values(row)
            assert others and all(math.isfinite(v) and v > 0 for v in values(row)), row
            assert all(abs(v - wanted) <= allowed * wanted for v in others), row
    first, *_, last = map(values, data["losses"])
    assert all(after < before for before, after in zip(first, last))


@after_00
def test_bytes_are_counted_and_as_predicted(run):
    data = jobs.result(*run).data
    for row in [*data["communication"], *data["memory"]]:
        assert row["bytes"] == row["predicted_bytes"] > 0, row
    there = {(row["collective"], row["axis"]) for row in data["communication"]}
    sizes = data["mesh"] if run[0] == MESH else dict.fromkeys(("tp", "dp"), run[1])
    about = ABOUT[run[0][:2]]
    assert {(what, axis) for what, axis in about if sizes[axis] > 1} <= there
    assert bool(there) is (run[1] > 1)


@pytest.mark.parametrize("lesson", [
    pytest.param(name, marks=[pytest.mark.launches(*run) for run in runs])
    for name, runs in ALIKE.items()
])  # fmt: skip
def test_more_ranks_change_nothing(lesson):
    """Neither the reference nor the parallel losses and gradients."""
    alone, four = (jobs.result(*run).data for run in ALIKE[lesson])
    for key in ("losses", "gradients"):
        assert len(alone[key]) == len(four[key]) > 0
        for one, other in zip(alone[key], four[key]):
            wanted = values(one)[0]
            assert values(other)[0] == wanted, "the reference knows of no ranks"
            assert all(abs(v - wanted) <= 1e-12 * wanted for v in values(other)), other


def hashes(run, table: str, row: int) -> list[str]:
    """What a row of a table of hashes has of these."""
    values = jobs.result(*run).data[table][row].values()
    return [value for value in values if re.fullmatch("[0-9a-f]{12}", str(value))]


SUMS = [(COLLECTIVES, 1), (COLLECTIVES, 2), (COLLECTIVES, 4)]


@pytest.mark.parametrize("runs, table, rows", [
    pytest.param(
        runs, table, rows, id=runs[0][0], marks=[pytest.mark.launches(*r) for r in runs]
    )
    for runs, table, rows in (
        (SUMS, "same bits", {"all-reduce": 0, "tree": 1}),
        (SAME_BITS, "hashes", {"with TP": 1, "tree": 2, "tree, alone": 3}),
    )
])  # fmt: skip
def test_the_same_bits_for_every_number_of_ranks(runs, table, rows):
    """Of a sum, and of losses, gradients, parameters; all-reduces give others each."""
    found = {
        kind: [hashes(run, table, row) for run in runs] for kind, row in rows.items()
    }
    (first, *others), plain = found.pop("tree"), next(iter(found.values()))
    assert len(first) == len(plain[0]) >= 2
    assert all(other == first for other in others + found.get("tree, alone", []))
    assert len({hashes_of[-1] for hashes_of in plain}) == len(runs)


ONLY = (MLP, 2, "--only", "2")


@pytest.mark.launches(MLP, 2)
@pytest.mark.launches(*ONLY)
def test_only_one_section():
    whole, only = jobs.result(MLP, 2), jobs.result(*ONLY)
    head, *lines = whole.out.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"\d  ", line)]
    section = lines[starts[1] - 1 : starts[2] - 1]
    assert only.out.splitlines() == [head, *section, *lines[-2:]]
    assert only.data["checks"] == whole.data["checks"]


def test_a_changed_model_reaches_the_comparison(tmp_path):
    """A student's norm: numbers are compared and right, formulas do not know of it."""
    text = jobs.PATHS[MLP].read_text("utf-8")
    for old, new in (
        ("        self.up_proj = ", "        self.norm = nn.RMSNorm(hidden)\n{}"),
        ("F.gelu(self.up_proj(x_BSD))", "F.gelu(self.up_proj(self.norm(x_BSD)))"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new.format(old))
    script = tmp_path / f"{MLP}.py"
    script.write_text(text, "utf-8")
    last = jobs.launch(script, 2, "--mesh", "2x1").out.splitlines()[-1]
    assert last.startswith("FAIL") and "  0 of " in last, last  # all numbers are right


EMPTY = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
LIMITS = {"00": 1.9, "01": 2.1, "02": 2.4}  # times an empty script; seen: 1.5, 1.7, 1.9
CPU = """
import os, resource, subprocess, sys
command = [sys.executable, *sys.argv[1:]]
envs = [os.environ | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
ranks = [subprocess.Popen(command, env=env) for env in envs]
code = max(rank.wait() for rank in ranks)
print(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))
sys.exit(code)
"""


def test_takes_little_more_than_an_empty_script(tmp_path):
    """Seconds of processors at 2 ranks: other jobs change them little. And all of it
    can be said on a terminal that does not know our characters."""
    empty = tmp_path / "empty.py"
    empty.write_text(EMPTY)
    lessons = [path for path in jobs.PATHS.values() if path.stem[:2] in LIMITS]
    env = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", PYTHONIOENCODING="ascii")
    seconds = {}
    for script in (empty, *lessons):
        meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(jobs.free_port()))
        done = jobs.watch([sys.executable, "-c", CPU, str(script)], 100, env | meet)
        *_, verdict, number = ["PASS", *done.out.splitlines()]
        assert done.code == 0 and verdict.startswith("PASS"), done.text
        seconds[script] = float(number)
    for lesson in lessons:
        limit = LIMITS[lesson.stem[:2]] * seconds[empty]
        assert seconds[lesson] < limit, seconds


@pytest.mark.launches(MLP, 2)
def test_readme_shows_what_the_demo_prints():
    """But for digits: another processor adds in another order."""
    shown = (jobs.ROOT / "README.md").read_text("utf-8").partition("demo output -->")[2]
    lines = shown.partition("<!-- end")[0].splitlines()[2:-1]
    blurred = [
        re.sub(r"\d", "#", line) for line in jobs.result(MLP, 2).out.splitlines()
    ]
    for line in lines:
        assert line == "…" or re.sub(r"\d", "#", line) in blurred, line
