"""Lessons under torchrun: verdicts, screens, and what --json says of every check.

A lesson compares numbers and works out its own formulas: here is looked at whether what
it checked was enough, and by bounds no wider than CONTRIBUTING.md allows.
"""

import json
import math
import re
import sys
from pathlib import Path

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
    SEQUENCE,
    TRANSFORMER,
    flag,
    over,
)

# The schema of --json: what every lesson has, and the columns of its tables' rows.
KEYS = {"lesson", "world_size", "mesh", "size", "dtype", "verdict", "checks"}
TABLES = {  # of lessons 01 to 05
    "losses": "name diff ok",  # and a column for each run
    "gradients": "name diff ok",
    "communication": "run phase collective axis calls bytes formula ring ok",
    "memory": "ok",
}
CHECK = {"name", "diff", "allowed", "kind", "ok", "ranks"}
OF_05 = {"groups"}

after_00 = over([run for run in ALL_RUNS if run[0] != COLLECTIVES])


def values(row: dict) -> list[float]:
    """Of a row that compares runs: one number per run, the reference first."""
    return [v for name, v in row.items() if name not in ("name", "diff", "off", "ok")]


@over(ALL_RUNS)
def test_passes_and_fits_the_screen(run):
    done = jobs.result(*run)
    assert done.code == 0, done.text
    lines = done.out.splitlines()
    words = f"PASS  {run[0]}  {len(done.data['checks'])} checks, "
    assert lines[-1].startswith(words), lines[-1]
    assert "FAIL" not in done.out and "✗" not in done.out
    assert "Traceback" not in done.err and "Warning" not in done.err, done.err
    assert done.left == []
    assert [line for line in lines if len(line) > 88 or line != line.rstrip()] == []
    if run in DEFAULTS and run[1] <= (8 if run[0] == MESH else 2):
        assert len(lines) > 30
        # 00 shows what each rank has before and after each collective: its subject.
        assert len(lines) <= {COLLECTIVES: 75, MESH: 60}.get(run[0], 55)


@over(ALL_RUNS)
def test_json(run):
    """Its tables, and every check: none allows more than it should."""
    data = jobs.result(*run).data
    assert data["lesson"] == run[0] and data["world_size"] == run[1]
    assert math.prod(data["mesh"].values()) == run[1]
    assert data["dtype"] == flag(run, "--dtype", "float32")
    assert data["verdict"] == "PASS"
    tables = {} if run[0] == COLLECTIVES else TABLES
    if run[0] == MESH:  # what a rank holds: beyond/14 and 15
        tables = {key: TABLES[key] for key in TABLES if key != "memory"}
    assert set(data) >= KEYS | set(tables) | (OF_05 if run[0] == MESH else set())
    for key, columns in tables.items():
        for row in data[key]:
            assert set(columns.split()) <= set(row), (key, row)
            assert row["ok"] in (True, None), (key, row)  # None: only a sum is checked
        assert any(row["ok"] for row in data[key]) or not data[key]
    assert len(data["checks"]) > 30
    of_loss, of_tensor = ALLOWED[data["dtype"]]
    for row in data["checks"]:
        assert set(row) >= CHECK and row["ok"] and row["ranks"] == [], row
        limit = of_tensor if row["allowed"] else 0
        if row["name"] == "gradients: backward as the slope of forward":
            limit = 1e-6  # a finite difference
        if row["kind"] == "losses":
            limit = of_loss
        elif row["kind"] in ("calls", "bytes", "memory", "runs"):
            limit = 0
        assert row["diff"] <= row["allowed"] <= limit, row


@after_00
def test_something_is_trained_and_sent(run):
    """What a lesson compares is there, and not zero; losses fall."""
    data = jobs.result(*run).data
    for row in [*data["losses"], *data["gradients"]]:
        assert len(values(row)) > 1, row
        assert all(math.isfinite(v) and v > 0 for v in values(row)), row
    first, *_, last = map(values, data["losses"])
    assert all(after < before for before, after in zip(first, last))
    assert all(row["bytes"] > 0 for row in data["communication"])
    assert bool(data["communication"]) is (run[1] > 1)


@pytest.mark.parametrize("lesson", ALIKE)
def test_more_ranks_change_nothing(lesson):
    """Neither the reference nor the parallel losses and gradients."""
    alone, four = (jobs.result(*run).data for run in ALIKE[lesson])
    for key in ("losses", "gradients"):
        for one, other in zip(alone[key], four[key], strict=True):
            wanted = values(one)[0]
            assert values(other)[0] == wanted, "the reference knows of no ranks"
            assert all(abs(v - wanted) <= 1e-12 * wanted for v in values(other)), other


ONLY = (MLP, 2, "--only", "2")


@pytest.mark.launches(MLP, 2)
@pytest.mark.launches(*ONLY)
def test_only_one_section():
    whole, only = jobs.result(MLP, 2), jobs.result(*ONLY)
    assert only.out == jobs.section_of(whole.out, 2)
    assert only.data["checks"] == whole.data["checks"]


LONG = (MLP, 2, "--steps", "101", "--only", "2")


@pytest.mark.launches(*LONG)
def test_a_long_run_says_what_comes_first():
    lines = jobs.result(*LONG).out.splitlines()
    assert lines[2] == "First, 101 steps of the reference, without output."


EDITS = {  # a student's edits of lesson 01 that are right
    "relu": ("F.gelu(", "F.relu("),
    "norm": (
        "self.up_proj(x_BSD)",
        "self.up_proj(F.rms_norm(x_BSD, x_BSD.shape[-1:]))",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_right_edit_passes(edit, tmp_path):
    """Values agree, so the verdict is PASS; formulas describe the unedited model."""
    old, new = EDITS[edit]
    text = jobs.PATHS[MLP].read_text("utf-8")
    assert old in text
    script = tmp_path / f"{MLP}.py"
    script.write_text(text.replace(old, new), "utf-8")
    path = tmp_path / "out.json"
    done = jobs.launch(script, 2, "--json", path)
    assert done.code == 0 and f"\nPASS  {MLP}  values agree: " in done.out, done.text
    assert "✗" not in done.out and " ≠ " in done.out
    assert max(map(len, done.out.splitlines())) <= 88, done.out
    data = json.loads(path.read_text())
    assert data["edited"] and data["verdict"] == "PASS"
    off = {row["kind"] for row in data["checks"] if row["ranks"]}
    assert off == {"memory"}


def test_a_wrong_split_of_an_edited_model_fails(tmp_path):
    """Values decide: a gate whose input is not after f has a wrong gradient."""
    text = jobs.PATHS[MLP].read_text("utf-8")
    text = text.replace(
        "self.down_proj(F.gelu(self.up_proj(x_BSD)))",
        "self.down_proj(F.gelu(self.up_proj(x_BSD)) * self.gate_proj(x_BSD))",
    )
    made = "        self.up_proj = nn.Linear(hidden, width)"
    text = text.replace(
        made, f"        self.gate_proj = nn.Linear(hidden, width)\n{made}"
    )
    made = "    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)\n"
    text = text.replace(
        made,
        made
        + "    mlp.gate_proj = ColumnParallelLinear(full.gate_proj, tp_group, False)\n",
    )
    text = text.replace(
        '{"up_proj": column,', '{"gate_proj": column, "up_proj": column,'
    )
    script = tmp_path / f"{MLP}.py"
    script.write_text(text, "utf-8")
    done = jobs.launch(script, 2)
    assert f"\nFAIL  {MLP}  failed: gradients " in done.out, done.text
    assert "✗ gradients: dL/d x, Megatron: off by " in done.out
    assert done.code == 1
    assert "the lesson was edited" in " ".join(done.out.split())


def test_the_line_that_raised_is_said(monkeypatch):
    """Python calls a script by its whole path, whatever path it was started by."""
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    code = compile("def f():\n    1 / 0\nf()\n", str(Path("mine.py").resolve()), "exec")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code, {})
    assert "line 2, in f" in jobs.load(COLLECTIVES).where_raised(raised.value)


def test_a_check_of_no_parameter_may_be_the_cause():
    """The slope of the loss, in 03: its name has no comma."""
    failed = [{"name": f"gradients: {x}", "diff": 1.0} for x in ("a, by hand", "slope")]
    cause = jobs.load(COLLECTIVES).likely_cause("gradients", failed, False)
    assert cause is failed[1]


RAISES = {  # a learner's own error: in which lesson, where, and what is said of it
    "shape mismatch": (
        MLP,
        "def forward(self, x):\n"
        "    torch.zeros(9)[torch.tensor([0, 1])] = torch.zeros(5)\n"
        "RowParallelLinear.forward = forward\n",
        "Megatron raised RuntimeError: shape mismatch: ",
    ),
    "a call of dist": (
        MLP,
        "def forward(self, x):\n"
        "    dist.all_reduce(x, group=self.tp_group)\n"
        "RowParallelLinear.forward = forward\n",
        "Megatron raised RuntimeError: dist.all_reduce is called directly, so no table",
    ),
    "an async call of dist": (
        MLP,
        "def forward(self, x):\n"
        "    dist.all_reduce(x, group=self.tp_group, async_op=True).wait()\n"
        "RowParallelLinear.forward = forward\n",
        "Megatron raised RuntimeError: dist.all_reduce is called directly, so no table",
    ),
    "nothing to compare": (
        SEQUENCE,
        "def all_reduce_replicated_gradients(*args, **more):\n"
        "    raise ValueError('of one rank')\n",
        "padded lengths raised ValueError: of one rank",
    ),
    "one layer": (
        SEQUENCE,
        "def measure_layers(*args):\n    raise ValueError('connection closed')\n",
        "one layer raised ValueError: connection closed",
    ),
}


@pytest.mark.launches(MLP, 2)
@pytest.mark.launches(SEQUENCE, 2)
@pytest.mark.parametrize("name", RAISES)
def test_an_error_on_every_rank_ends_one_run_only(name, tmp_path):
    """Whatever its words are: the transport's is one that is raised in a collective."""
    lesson, edit, says = RAISES[name]
    text = jobs.PATHS[lesson].read_text("utf-8")
    guard = "\nif __name__ =="
    assert text.count(guard) == 1
    script = tmp_path / f"{lesson}.py"
    script.write_text(text.replace(guard, f"\n{edit}{guard}"), "utf-8")
    done = jobs.launch(script, 2)
    said = re.sub(r"\n +", " ", done.out)
    lines = script.read_text("utf-8").splitlines()
    at = lines.index(edit.split("\n")[1]) + 1
    assert says in said and f" line {at}, in " in said, done.text
    assert "1 losses" not in said, "only one run has that loss"
    assert "Traceback" not in done.out
    assert re.search(rf"\nFAIL  {lesson}  failed: runs \d/", done.out)
    assert done.code == 1
    sections = re.findall(r"^(\d)  ", done.out, re.M)
    all_of_them = re.findall(r"^(\d)  ", jobs.result(lesson, 2).out, re.M)
    assert len(sections) >= len(all_of_them) - 1, "later ones are there"
    assert done.left == []


EMPTY = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
# Times what an empty script takes; seen: 1.5, 1.7, 1.9.
LIMITS = {COLLECTIVES: 1.9, MLP: 2.1, TRANSFORMER: 2.4}
# Two ranks without torchrun; what they print, and then their seconds of processors.
TIMED = 'TIMEFORMAT="%U %S"; time (RANK=1 "$@" & RANK=0 "$@" && wait $!)'


def seconds_of(script: Path) -> float:
    """Of processors, for a script on two ranks that imports torch itself. What it
    prints, a terminal can say that does not know our characters."""
    env = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK="0")
    env |= dict(MASTER_ADDR="127.0.0.1", PYTHONIOENCODING="ascii")
    command = ["bash", "-c", TIMED, "bash", sys.executable, str(script)]
    with jobs.held_port() as port:
        done = jobs.watch(command, 100, env | {"MASTER_PORT": str(port)})
    assert done.code == 0, done.text
    assert script.stem == "empty" or "\nPASS  " in done.out
    return sum(map(float, done.err.split()[-2:]))


@pytest.mark.alone
def test_takes_little_more_than_an_empty_script(tmp_path):
    """At times whoever shares the machine makes it slower: then it is tried again."""
    scripts = {"empty": tmp_path / "empty.py"}
    scripts["empty"].write_text(EMPTY)
    scripts |= {lesson: jobs.PATHS[lesson] for lesson in LIMITS}
    for _ in range(3):
        seconds = {name: seconds_of(script) for name, script in scripts.items()}
        most = {name: times * seconds["empty"] for name, times in LIMITS.items()}
        if all(seconds[name] < most[name] for name in most):
            return
    pytest.fail(str(seconds))


@pytest.mark.launches(MLP, 2)
def test_readme_shows_what_the_demo_prints():
    """But for digits: another processor adds in another order, and what differs by
    1.1e-07 here is the same bits there."""
    shown = (jobs.ROOT / "README.md").read_text("utf-8").partition("demo output -->")[2]
    lines = shown.partition("<!-- end")[0].splitlines()[2:-1]
    blurred = blur(jobs.result(MLP, 2).out).splitlines()
    for line in lines:
        assert line == "…" or blur(line) in blurred, line


COMMAND = re.compile(r"--nproc_per_node=(\d) (?:beyond/)?(\w+)\.py")
NOTEBOOKS = [jobs.ROOT / f"notebooks/{name}.ipynb" for name in jobs.PATHS]
SHOWN = [COMMAND.search(path.read_text("utf-8")).groups() for path in NOTEBOOKS]


@over([(name, int(ranks)) for ranks, name in SHOWN if name != "14_schedules"])
def test_the_site_shows_what_is_printed(run):
    """But for digits and hashes, which depend on a machine's processor, and what its
    speed changes (14 draws its timeline)."""
    shown = (jobs.ROOT / "docs" / "outputs" / f"{run[0]}.txt").read_text("utf-8")
    assert blur(shown) == blur(jobs.result(*run).out)


def blur(text: str) -> str:
    text = re.sub(r"\b[0-9a-f]{12}\b", "hash", text)
    return re.sub(r"e[+-]#", "e-#", re.sub(r"\d", "#", text))
