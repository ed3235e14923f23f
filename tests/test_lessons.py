"""Lessons under torchrun: verdicts, screens, and what --json says of every check.

A lesson compares numbers and works out its own formulas: here is looked at whether what
it checked was enough, and by bounds no wider than CONTRIBUTING.md allows.
"""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

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
    failed,
    flag,
    kind_of,
    number,
    over,
    rows_with,
)

CHECK = {"name", "kind", "diff", "allowed", "text", "is_formula", "ranks"}
OF_COMMUNICATION = "phase", "collective", "calls", "bytes", "formula", "ring", "ok"
NO_RUN = ("section", "name", "diff", "ok")  # columns of a comparison that are no run

after_00 = over([run for run in ALL_RUNS if run[0] != COLLECTIVES])


def values(row: dict) -> list[float]:
    """Of a row that compares runs: one number per run, the reference first."""
    return [number(text) for name, text in row.items() if name not in NO_RUN]


def compared(data: dict, start: str) -> list[dict]:
    """The printed comparisons whose name starts so: "loss, " or "dL/d"."""
    return [row for row in rows_with(data, "name") if row["name"].startswith(start)]


@over(ALL_RUNS)
def test_passes_and_fits_the_screen(run):
    done = jobs.result(*run)
    assert done.code == 0, done.text
    lines = done.out.splitlines()
    last = f"PASS  {run[0]}  {len(done.data['checks'])} checks, worst difference "
    assert lines[-1].startswith(last), lines[-1]
    assert not re.search("FAIL|[✗≠]", done.out), "an unedited lesson fits its formulas"
    assert "Traceback" not in done.err and "Warning" not in done.err, done.err
    assert done.left == []
    assert [line for line in lines if len(line) > 88 or line != line.rstrip()] == []
    if run in DEFAULTS and run[1] <= (8 if run[0] == MESH else 2):
        assert len(lines) > 30
        # 00 shows what each rank has before and after each collective: its subject.
        # 04 has the paper's table of activation memory, with its terms.
        most = {COLLECTIVES: 75, SEQUENCE: 62, MESH: 60}
        assert len(lines) <= most.get(run[0], 55)


@over(ALL_RUNS)
def test_checks(run):
    """Every check of every rank: it holds, and allows no more than it should."""
    data = jobs.result(*run).data
    assert data["ranks"] == run[1] and data["verdict"] == "PASS"
    assert data["dtype"] == flag(run, "--dtype", "float32")
    assert len(data["checks"]) > 30
    of_loss, of_tensor = ALLOWED[data["dtype"]]
    for check in data["checks"]:
        assert set(check) == CHECK and check["ranks"] == [], check
        limit = of_tensor if check["allowed"] else 0
        if check["name"] == "gradients: backward as the slope of forward":
            limit = 1e-6  # a finite difference
        elif kind_of(check) == "losses":
            limit = of_loss
        elif check["is_formula"] or kind_of(check) == "runs":
            limit = 0
        assert check["diff"] <= check["allowed"] <= limit, check
    names = [check["name"] for check in data["checks"]]
    assert len(names) == len(set(names)), "one check would hide the other"


@after_00
def test_something_is_trained_and_sent(run):
    """What a lesson compares is there, and not zero; losses fall."""
    data = jobs.result(*run).data
    losses = compared(data, "loss, ")
    kinds = {kind_of(check) for check in data["checks"]}
    assert {"losses", "gradients"} <= kinds
    for row in losses:
        assert len(values(row)) > 1, row
        assert all(math.isfinite(v) and v > 0 for v in values(row)), row
    first, *_, last = map(values, losses)
    assert all(after < before for before, after in zip(first, last))
    ledger = rows_with(data, *OF_COMMUNICATION)
    assert all(number(row["bytes"]) > 0 for row in ledger)
    assert bool(ledger) is (run[1] > 1)


@pytest.mark.parametrize("lesson", ALIKE)
def test_more_ranks_change_nothing(lesson):
    """Neither the reference nor the parallel losses and gradients, as printed."""
    alone, four = (jobs.result(*run).data for run in ALIKE[lesson])
    rows = [rows_with(data, "name", "diff") for data in (alone, four)]
    assert len(rows[0]) > 5
    for one, other in zip(*rows, strict=True):
        assert one["name"] == other["name"]
        assert set(values(one)) == set(values(other)) == {values(one)[0]}, (one, other)


@pytest.mark.launches(MLP, 2)
def test_a_lesson_is_one_file(tmp_path):
    """All runs of lessons are of one that is alone in a folder. In the repository, with
    the others beside it, it prints the same."""
    path = jobs.copy_alone(jobs.PATHS[MLP], tmp_path)
    assert [*path.parent.iterdir()] == [path]
    done = jobs.launch(jobs.PATHS[MLP], 2)
    assert done.out == jobs.result(MLP, 2).out, done.text


def run_edited(folder: Path, lesson: str, edits: dict[str, str], *flags) -> jobs.Done:
    """A lesson in which these lines are others: old → new, each occurs once."""
    text = jobs.PATHS[lesson].read_text("utf-8")
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / f"{lesson}.py"
    script.write_text(text, "utf-8")
    path = folder / "out.json"
    done = jobs.launch(script, 2, "--json", path, *flags)
    data = json.loads(path.read_text() or "{}")
    return done._replace(data=data)


GELU = "self.down_proj(F.gelu(self.up_proj(x_BSD)))"
COLUMN = "    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)\n"
EDITS = {  # a student's edits of lesson 01 that are right, and what they change
    "relu": ({GELU: GELU.replace("gelu", "relu")}, {"memory"}),
    "norm": (
        {GELU: GELU.replace("x_BSD", "F.rms_norm(x_BSD, x_BSD.shape[-1:])")},
        {"memory"},
    ),
    # Who calls it does not matter: a collective more has a row.
    "a call of dist": (
        {
            "        y_BSD = self.reduce(": "        dist.all_reduce("
            "partial_y_BSD.detach().clone(), group=self.tp_group)\n"
            "        y_BSD = self.reduce("
        },
        {"bytes", "calls"},
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_right_edit_passes(edit, tmp_path):
    """Values agree, so the verdict is PASS; formulas describe the unedited model."""
    edits, off = EDITS[edit]
    done = run_edited(tmp_path, MLP, edits)
    count = sum(failed(done.data).values())
    last = " ".join(done.out.rpartition("\nPASS")[2].split())
    assert done.code == 0, done.text
    assert last.endswith(f"; {count} formulas describe another model or split")
    assert "✗" not in done.out and " ≠" in done.out
    assert max(map(len, done.out.splitlines())) <= 88, done.out
    assert set(failed(done.data)) == off


def test_a_weight_that_is_sliced_by_hand_passes(tmp_path):
    """Without shard_parameter: the shape says how it is sharded."""
    old = "        self.weight = shard_parameter(full.weight, 1, tp_group)  # [D, f]\n"
    new = "        mine = full.weight.chunk(tp_group.size(), 1)[tp_group.rank()]\n"
    new += "        self.weight = nn.Parameter(mine.detach().clone())\n"
    done = run_edited(tmp_path, MLP, {old: new})
    assert done.code == 0, done.text
    assert failed(done.data) == {} and re.search(
        r"down_proj.weight +\[64, 256\] +\[64, 128\] +Shard\(1\)\n", done.out
    )


@pytest.mark.parametrize("count", [1, 9, 20])
def test_the_verdict_counts_what_it_lists(count, capsys):
    """As many lines as formulas: a number that contradicts them helps no reader."""
    lesson = jobs.load(COLLECTIVES)
    report = lesson.Report({}, 1)
    for i in range(count):
        report.check(f"bytes: {i}", 1, is_formula=True)
    checks = list(report.checks.values())
    report.of_all_ranks = lambda: [check | {"ranks": [0]} for check in checks]
    assert report.verdict(SimpleNamespace(json=None, ranks=2)) == ""
    said = capsys.readouterr().out
    assert len(re.findall(r"^≠ bytes: ", said, re.M)) == count
    assert f"; {count} formulas describe another" in " ".join(said.split())


def test_a_wrong_split_of_an_edited_model_fails(tmp_path):
    """Values decide: a gate whose input is not after f has a wrong gradient."""
    gate = "    mlp.gate_proj = ColumnParallelLinear(full.gate_proj, tp_group, False)\n"
    made = "        self.up_proj = nn.Linear(hidden, width)"
    done = run_edited(tmp_path, MLP, {
        GELU: "self.down_proj(F.gelu(self.up_proj(x_BSD)) * self.gate_proj(x_BSD))",
        made: f"        self.gate_proj = nn.Linear(hidden, width)\n{made}",
        COLUMN: COLUMN + gate,
        'plan = {"up_proj": column,': 'plan = {"gate_proj": column, "up_proj": column,',
    })  # fmt: skip
    assert "✗ gradients: dL/d x, Megatron: off by " in done.out, done.text
    assert done.code == 1
    # Causes first; the run's own words are the last that the screen shows.
    marks = re.findall(r"\n✗ (\w+): ", done.out)
    assert marks == ["gradients", "replicas", "losses"]
    # As it was started, with its flags, which change what is run.
    command = f"tools/doctor.py{tmp_path / MLP}.py--json"
    assert command in "".join(done.out.split())
    screen = "\n".join(done.err.rstrip().splitlines()[-25:])
    assert "✗ gradients: dL/d x, Megatron" in screen and "FAIL  01_naive" in screen


def test_a_factor_is_said(tmp_path):
    """What a missing or doubled sum does to a gradient, in words."""
    twice = "all_reduce(all_reduce(partial_grad, ctx.tp_group), ctx.tp_group), None"
    old = "        return all_reduce(partial_grad, ctx.tp_group), None\n"
    done = run_edited(tmp_path, MLP, {old: f"        return {twice}\n"})
    said = " ".join(done.out.split())
    assert done.code == 1
    assert "dL/d x, Megatron: 2 times the expected tensor, on ranks [0, 1]" in said


RAISES = {  # a learner's own error in RowParallelLinear: what is said of it
    "shape mismatch": (
        "torch.zeros(9)[torch.tensor([0, 1])] = torch.zeros(5)",
        "Megatron: RuntimeError: shape mismatch: ",
    ),
    "one rank has other words": (
        'raise ValueError(f"of rank {dist.get_rank()}")',
        "Megatron: ValueError: of rank 0",
    ),
    # No clock decides: on a busy machine a rank may be this late.
    "one rank is seven seconds late": (
        "time.sleep(7 * dist.get_rank()) or 1 / 0",
        "Megatron: ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.launches(MLP, 2)
@pytest.mark.parametrize("name", RAISES)
def test_an_error_on_every_rank_ends_one_run_only(name, tmp_path):
    line, says = RAISES[name]
    old = "        partial_y_BSD = F.linear(x_BSf, self.weight)\n"
    done = run_edited(tmp_path, MLP, {old: f"        {line}\n{old}"})
    lines = (tmp_path / f"{MLP}.py").read_text("utf-8").splitlines()
    at = lines.index(f"        {line}") + 1
    said = " ".join(done.out.split())
    assert f"✗ runs: {says}" in said and f"(line {at}, in forward)" in said, done.text
    assert "  raised  " in done.out, "its column"
    assert failed(done.data) == {"runs": 1}
    assert "Traceback" not in done.out
    assert done.code == 1
    sections = re.findall(r"^(\d)  ", done.out, re.M)
    assert sections == re.findall(r"^(\d)  ", jobs.result(MLP, 2).out, re.M)
    assert done.left == []


def test_one_rank_that_raises_ends_the_job(tmp_path):
    """The other waits for it, until the timeout of its group."""
    old = "        partial_y_BSD = F.linear(x_BSf, self.weight)\n"
    line = "        1 / (self.tp_group.rank() - 1)\n"
    done = run_edited(tmp_path, MLP, {old: line + old}, "--timeout", "5")
    assert done.code == 1 and done.left == []
    # Each rank names its last collective by number: here they differ.
    one = r"ZeroDivisionError: division by zero \(line \d+, in forward\)"
    one = f"^rank 1, Megatron: {one}; last call: none$"
    assert re.search(one, done.err, re.M), done.err
    other = "last call: number 1, all-reduce over tp, Megatron forward"
    assert re.search(f"^rank 0, Megatron: .*; {other}$", done.err, re.M), done.err
    # torchrun's report is of the rank that raised, not of the one that waited for it.
    screen = "\n".join(done.err.rstrip().splitlines()[-25:])
    assert f"\n      {line.strip()}\n" in screen, screen
    assert "\n  ZeroDivisionError: division by zero\n" in screen
    assert "Timed out" not in screen and "site-packages" not in screen, screen
    command = f"tools/doctor.py{tmp_path / MLP}.py--json{tmp_path}/out.json--timeout5"
    assert command in "".join(screen.split())


def test_two_checks_of_one_name_are_an_error(tmp_path):
    done = run_edited(tmp_path, MLP, {
        "    show_memory_of_mlp(report, runs)\n":
        "    show_memory_of_mlp(report, runs)\n" * 2,
    })  # fmt: skip
    assert done.code == 1
    assert "two checks are named memory: params, without TP" in done.err


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
    count = r"  (\d+) checks, "
    assert re.findall(count, shown) == re.findall(count, jobs.result(MLP, 2).out)


COMMAND = re.compile(r"--nproc_per_node=(\d) (?:beyond/)?(\w+)\.py")
NAMES = jobs.LESSONS + jobs.BEYOND
NOTEBOOKS = [jobs.ROOT / f"notebooks/{name}.ipynb" for name in NAMES]
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
