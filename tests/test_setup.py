"""What a newcomer meets first: make, its environment, the machine check, the README."""

import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import check
import lessons
import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()
LESSONS = sorted(path.name for path in ROOT.glob("0?_*.py"))


def make(*args, folder=ROOT, **env) -> subprocess.CompletedProcess:
    """Run make as at a prompt: without what an outer make passes down."""
    passed_down = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"}
    settings = {"VENV", "PYTHON", "INDEX", "TORCH_INDEX", "WHEELS", "RANKS", "ARGS"}
    kept = {k: v for k, v in os.environ.items() if k not in passed_down | settings}
    return subprocess.run(
        ["make", *args], cwd=folder, env=kept | env, text=True, capture_output=True
    )


# A Python that only notes what it was asked: `-m venv DIR` makes DIR/bin/python, a copy
# of itself; `-m pip` fails on the words in the file FAIL, if there is one.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" >> "$NOTES/calls"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip "*) [ ! -f "$NOTES/FAIL" ] || [[ "$*" != *$(cat "$NOTES/FAIL")* ]] ;;
esac
"""


class Machine:
    """A fresh folder with the Makefile in it, and a fake Python."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("Makefile", "requirements.txt", "requirements-extra.txt"):
            shutil.copy(ROOT / name, folder)
        self.python = folder / "fake_python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.stamp = folder / ".venv" / ".base"

    def setup(self, *args):
        """make setup: exit code, output, and what Python was asked to install."""
        calls = self.folder / "calls"
        calls.write_text("")
        notes = str(self.folder)
        done = make(
            "setup", f"PYTHON={self.python}", *args, folder=self.folder, NOTES=notes
        )
        installs = [
            line for line in calls.read_text().splitlines() if "install" in line
        ]
        return done.returncode, done.stdout + done.stderr, installs


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def pins() -> dict[str, list[str]]:
    """Requirement lines of both files by package name, in order."""
    found = {}
    for name in ("requirements.txt", "requirements-extra.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and not line.startswith("#"):
                found.setdefault(re.match(r"[\w-]+", line)[0], []).append(line)
    return found


# Make and its environment


def test_help_lists_every_target():
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.M)
    done = make()
    assert done.returncode == 0
    listed = re.findall(r"^make ([\w-]+)  +\S", done.stdout, re.M)
    assert sorted(listed) == sorted(targets) and len(listed) == done.stdout.count("\n")
    wanted = {"demo", "setup", "check", "lessons", "test", "help", "wheels", "clean"}
    wanted |= {"notebooks", "notebooks-run", "quick", "mutants", "bench"}
    assert wanted <= set(listed)
    database = make("--print-data-base", "--dry-run", "help").stdout
    phony = re.search(r"^\.PHONY:(.*)", database, re.M)[1].split()
    assert set(phony) >= set(targets)  # or a file of that name would stop it


def test_every_requirement_is_pinned_and_torch_comes_first():
    exact = r"[\w-]+==\d+(\.\d+)+(; python_version [<>]=? \"3\.\d+\")?( +#.*)?"
    for lines in pins().values():
        for line in lines:
            assert re.fullmatch(exact, line), line
    assert next(iter(pins())) == "torch" and len(pins()["torch"]) == 1


def test_what_is_installed_is_what_is_pinned():
    from importlib.metadata import version

    here = "<" if sys.version_info < (3, 11) else ">="
    for name, lines in pins().items():
        line = next(x for x in lines if ";" not in x or f"python_version {here}" in x)
        wanted = re.search(r"==([\d.]+)", line)[1]
        assert version(name).partition("+")[0] == wanted, name


def test_setup_installs_torch_first_and_nothing_the_second_time(machine):
    code, _, installs = machine.setup()
    assert code == 0 and machine.stamp.exists()
    assert len(installs) == 2, installs
    assert installs[0].split()[-1] == pins()["torch"][0]
    assert installs[1].endswith("-r requirements.txt")
    code, text, installs = machine.setup()
    assert code == 0 and installs == [] and "ready" in text


def test_extras_are_installed_when_asked_for(machine):
    code, _, installs = machine.setup("EXTRA=1")
    assert code == 0 and len(installs) == 3
    assert installs[2].endswith("-r requirements.txt -r requirements-extra.txt")
    assert machine.setup("EXTRA=1")[2] == []


def test_a_moved_environment_is_made_anew(tmp_path):
    (tmp_path / "here").mkdir()
    machine = Machine(tmp_path / "here")
    machine.setup("EXTRA=1")
    old = machine.folder / ".venv" / "old_path"
    old.touch()
    machine.folder.rename(tmp_path / "there")
    moved = Machine(tmp_path / "there")
    code, _, installs = moved.setup()
    assert code == 0 and len(installs) == 2
    assert moved.setup()[2] == [] and not (tmp_path / "there/.venv/old_path").exists()


def test_make_from_elsewhere_and_a_folder_of_two_words(machine, tmp_path):
    away = tmp_path / "away"
    (away / "__pycache__").mkdir(parents=True)
    done = make("-f", str(machine.folder / "Makefile"), "clean", folder=away)
    assert done.returncode == 2 and "call make in the folder of" in done.stderr
    assert (away / "__pycache__").exists()
    code, text, installs = machine.setup("VENV=my env")
    assert code == 2 and "VENV is to be one word, not: my env" in text
    assert installs == [] and not (machine.folder / "my").exists()


def test_new_requirements_are_installed(machine):
    machine.setup()
    later = machine.stamp.stat().st_mtime + 10
    os.utime(machine.folder / "requirements.txt", (later, later))
    code, _, installs = machine.setup()
    assert code == 0 and len(installs) == 2


@pytest.mark.parametrize("where", ["torch==", "-r requirements.txt"])
def test_an_interrupted_installation_starts_over(machine, where):
    (machine.folder / "FAIL").write_text(where)
    code, _, _ = machine.setup()
    assert code != 0
    half = machine.folder / ".venv" / "half_installed"
    half.touch()
    (machine.folder / "FAIL").unlink()
    code, _, installs = machine.setup()
    assert code == 0 and len(installs) == 2 and machine.stamp.exists()
    assert not half.exists()


def test_a_folder_of_someone_else_is_left_alone(machine):
    theirs = machine.folder / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").touch()
    code, text, installs = machine.setup("VENV=theirs")
    assert code != 0 and installs == [] and "error: the folder theirs" in text
    make("clean", "VENV=theirs", folder=machine.folder)
    assert (theirs / "thesis.txt").exists()
    machine.setup()
    assert (machine.folder / ".venv").exists()
    make("clean", folder=machine.folder)
    assert not (machine.folder / ".venv").exists()


def test_where_packages_come_from(machine):
    _, _, installs = machine.setup("WHEELS=/stick", "VENV=a")
    assert all("--no-index --find-links /stick" in line for line in installs), installs
    _, _, installs = machine.setup("INDEX=http://mirror", "VENV=b")
    assert all("--index-url http://mirror" in line for line in installs), installs
    _, _, installs = machine.setup("TORCH_INDEX=http://cpu", "VENV=c")
    assert "--index-url http://cpu" in installs[0]
    assert "--index-url" not in installs[1]


def test_no_python_is_one_message(machine):
    code, text, installs = machine.setup("PYTHON=/no/such/python")
    assert code != 0 and installs == []
    assert "error: found no Python 3.10 to 3.14 as '/no/such/python'" in text
    assert not machine.stamp.parent.exists()


# make check


def test_check_passes_here():
    script = [sys.executable, str(ROOT / "tools" / "check.py")]
    local = {"PET_LOCAL_ADDR": "127.0.0.1"}  # whatever this machine is called
    done = subprocess.run(
        script, env=os.environ | local, text=True, capture_output=True
    )
    *rows, verdict = done.stdout.splitlines()
    assert done.returncode == 0 and verdict.startswith("PASS"), done.stdout
    assert len(rows) == 7 and all(re.match(r"ok  \w+", row) for row in rows)
    assert rows[-1].startswith("ok  two ranks") and "[11.0, 22.0, 33.0]" in rows[-1]
    assert len({re.match(r"ok  \w+( \w+)? {2,}", row).end() for row in rows}) == 1


def test_check_fails_with_advice(monkeypatch, capsys):
    monkeypatch.setenv("PET_LOCAL_ADDR", "127.0.0.1")
    two_ranks = ("no end after 60 s", "try again after: export …")
    monkeypatch.setattr(check, "check_two_ranks", lambda **_: two_ranks)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = check.main(taken.getsockname()[1])
    text = capsys.readouterr().out
    assert code == 1 and "FAIL  2 of 7 checks" in text
    assert re.search(
        r"^✗   port +port \d+ at .*in use\n +→ another program", text, re.M
    )
    assert re.search(r"^✗   two ranks +no end.*\n +→ try again", text, re.M)


def test_check_names_what_is_wrong(monkeypatch):
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    bad = {
        "does not resolve": check.check_host_name("no-such-host.invalid"),
        "is not this machine": check.check_host_name("192.0.2.1"),
        "3.9.18": check.check_python((3, 9, 18)),
        "3.15.0": check.check_python((3, 15, 0)),
        "2.13": check.check_torch("1.0.0"),
        "0.2 GiB free": check.check_memory(lambda: 0.2 * check.GiB),
        "GiB free": check.check_disk(wanted=1e18),
    }
    for found, (says, advice) in bad.items():
        assert found in says and advice, (found, says, advice)
    assert "/etc/hosts" in check.check_host_name("no-such-host.invalid")[1]


def test_check_host_name_that_takes_long(monkeypatch):
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    release = check.threading.Event()
    monkeypatch.setattr(check, "resolve", lambda name: release.wait(10) and [])
    found, advice = check.check_host_name("slow", wait=0.1)
    release.set()
    assert "no answer in" in found and "/etc/hosts" in advice
    monkeypatch.setattr(check, "resolve", lambda name: [(socket.AF_INET, "127.0.0.1")])
    assert check.check_host_name("good") == ("good is 127.0.0.1, in 0.0 s", "")


@pytest.mark.parametrize(
    "program, found, advice",
    [
        (
            "print('error: rank 1 died'); exit(3)",
            "exit code 3; it said: error: r",
            "says",
        ),
        ("print('all-reduce [2.0, 4.0, 6.0]')", "exit code 0", "says"),
        ("import time; time.sleep(60)", "no end after 1 s", "GLOO_SOCKET_IFNAME=lo"),
    ],
)
def test_check_two_ranks_that_fail(program, found, advice):
    command = [sys.executable, "-c", program]
    says, do = check.check_two_ranks(limit=1, command=command)
    assert says.startswith(found) and advice in do


def test_free_memory_on_macos():
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                                5000.\n"
        "Pages active:                            300000.\n"
        "Pages inactive:                          200000.\n"
        "Pages speculative:                         1000.\n"
        "Pages wired down:                        100000.\n"
        "Pages purgeable:                            500.\n"
    )
    assert check.free_in_vm_stat(text) == 16384 * 206500


# All lessons in one table


@pytest.fixture
def fake_lessons(tmp_path, monkeypatch):
    """A folder of three lessons of two lines, and a torchrun that only calls Python."""
    files = {
        "00_good.py": "print('PASS  00_good  fine')",
        "01_bad.py": "print('FAIL  01_bad  off by 2'); exit(1)",
        "02_late.py": "import os; print('PASS  02_late  fine', flush=True); os.abort()",
        "notes.py": "print('not a lesson')",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    torchrun = tmp_path / "torchrun.py"
    torchrun.write_text(
        "import os, sys\nos.execv(sys.executable, [sys.executable, sys.argv[-1]])\n"
    )
    monkeypatch.setattr(lessons, "TORCHRUN", [sys.executable, str(torchrun)])
    return tmp_path


def test_table_of_all_lessons(fake_lessons, capsys):
    assert lessons.main(fake_lessons) == 1
    text = capsys.readouterr().out
    table, _, reasons = text.partition("\n\n")
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["lesson", "ranks", "verdict", "seconds"]
    assert [row[:3] for row in rows[1:]] == [
        ["00_good", "2", "PASS"],
        ["01_bad", "2", "FAIL"],
        ["02_late", "2", "FAIL"],
    ]
    assert all(0 <= float(row[3]) < 30 for row in rows[1:])
    assert "01_bad: exit code 1; FAIL  01_bad  off by 2" in reasons
    assert "02_late: exit code -6; PASS" in reasons and "00_good" not in reasons
    for name in ("01_bad.py", "02_late.py"):
        (fake_lessons / name).unlink()
    assert lessons.main(fake_lessons) == 0


def test_lessons_without_an_end_are_stopped(fake_lessons, monkeypatch, capsys):
    monkeypatch.setattr(lessons, "LIMIT", 0.5)
    (fake_lessons / "00_good.py").write_text("import time; time.sleep(60)")
    assert lessons.main(fake_lessons) == 1
    assert "00_good: stopped after 0.5 s; no line with" in capsys.readouterr().out


def test_ranks_of_each_lesson(fake_lessons, capsys):
    (fake_lessons / "05_3d_parallel.py").write_text("print('PASS')")
    for ranks, wanted in ((None, ["2", "2", "2", "8"]), (4, ["4"] * 4)):
        lessons.main(fake_lessons, ranks)
        table = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
        assert [row.split()[1] for row in table] == wanted


def test_a_real_torchrun_in_the_table(tmp_path, capsys):
    (tmp_path / "00_two.py").write_text(
        "import os\n"
        "if (os.environ['RANK'], os.environ['WORLD_SIZE']) == ('1', '2'): print('PASS')"
    )
    assert lessons.main(tmp_path) == 0, capsys.readouterr().out


# README


def commands(text: str) -> list[str]:
    """Command lines of README's code blocks, continued lines joined."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    spans = re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    return [line.partition(" #")[0].strip() for line in lines + spans]


def test_readme_lists_the_lessons_that_exist():
    table = re.findall(r"^\| *\d\d.*?`[^`]*?(0\d_\w+\.py)[^`]*` *\|$", README, re.M)
    assert table == LESSONS


def test_readme_names_definitions_and_bugs_that_exist():
    rows = re.findall(r"^\| (0\d) \| (`.*) \| (`.*) \|$", README, re.M)
    assert [number for number, *_ in rows] == [name[:2] for name in LESSONS]
    for lesson, (_, functions, bugs) in zip(LESSONS, rows):
        module = importlib.import_module(Path(lesson).stem)
        new = (ROOT / lesson).read_text().partition("# ==== RUN")[0]
        functions = re.findall(r"`(\w+)`", functions)
        bugs = re.findall(r"`([\w-]+)`", bugs)
        assert len(functions) == 3 and len(bugs) == 2, lesson
        for name in functions:
            assert re.search(rf"^(class|def) {name}\b", new, re.M), (lesson, name)
        assert set(bugs) <= set(module.BREAKS), lesson


def test_readme_names_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    asked = [line.split()[1:] for line in commands(README) if line.startswith("make ")]
    named = {word for words in asked for word in words if "=" not in word}
    assert {"demo", "setup", "check", "test", "lessons", "wheels"} <= named <= targets
    for word in {word for words in asked for word in words if "=" in word}:
        name = word.partition("=")[0]
        assert f"$({name})" in MAKEFILE, word


def test_readme_commands_have_flags_that_exist():
    from torch.distributed.run import get_args_parser

    launcher = set(get_args_parser()._option_string_actions)
    asked = [line for line in commands(README) if re.match(r"torchrun .*\.py", line)]
    asked = [re.match(r"torchrun (.*) (0\d_\w+\.py)(.*)", line) for line in asked]
    assert len(asked) >= 4 and None not in asked
    assert {match[2] for match in asked} == set(LESSONS)
    for lesson in LESSONS:
        command = [sys.executable, str(ROOT / lesson), "--help"]
        text = subprocess.run(command, capture_output=True, text=True).stdout
        known = set(re.findall(r"--[a-z-]+", text))
        assert "--break" in known
        for match in asked:
            assert set(re.findall(r"--[a-z_-]+", match[1])) <= launcher, match[0]
            if match[2] == lesson:
                assert set(re.findall(r"--[a-z-]+", match[3])) <= known, match[0]


def test_no_package_index_is_named():
    """Whoever installs chooses where from; the repository does not."""
    host = re.compile(
        r"https?://[\w.-]*(?:py" + r"pi|download|whl|index)[\w./-]*", re.I
    )
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    files = [path for path in files if path.suffix not in {".png", ".gif"}]
    assert ROOT / "Makefile" in files
    for path in files:
        assert not host.search(path.read_text()), path


def test_ci_calls_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text and "make test" in text.splitlines()
    assert "bash .ci/run" in (ROOT / ".github/workflows/tests.yml").read_text()
