"""What a newcomer meets first: make, its environment, the machine check, the README."""

import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import check
import jobs
import lessons
import pytest
from jobs import ROOT
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
OF_MAKE = "MAKEFLAGS MAKELEVEL MFLAGS MAKEOVERRIDES".split()
SETTINGS = "VENV PYTHON INDEX TORCH_INDEX WHEELS RANKS ARGS".split()


def run(*command, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    """A command as at a prompt: without what an outer make passes down."""
    kept = {k: v for k, v in os.environ.items() if k not in OF_MAKE + SETTINGS}
    return subprocess.run(
        command, cwd=cwd, env=kept | env, text=True, capture_output=True
    )


# A Python that only notes what it was asked: `-m venv DIR` makes DIR/bin/python, a copy
# of itself; a call with the words in $FAILS fails.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" >> calls
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"$FAILS"*) exit 1 ;;
esac
"""


class Machine:
    """A fresh folder with the Makefile in it, and a fake Python."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for name in ("Makefile", "requirements.txt", "requirements-extra.txt"):
            shutil.copy(ROOT / name, folder)
        (folder / "fake_python").write_text(FAKE_PYTHON)
        (folder / "fake_python").chmod(0o755)

    def setup(self, *args, fails="nothing"):
        """make setup: exit code, output, and what Python was asked to install."""
        calls = self.folder / "calls"
        calls.write_text("")
        command = "make", "setup", f"PYTHON={self.folder / 'fake_python'}", *args
        done = run(*command, cwd=self.folder, FAILS=fails)
        installs = [x for x in calls.read_text().splitlines() if "install" in x]
        return done.returncode, done.stdout + done.stderr, installs

    def installs(self, *args) -> list[str]:
        """What Python was asked to install by a make setup that goes well."""
        code, text, installs = self.setup(*args)
        assert code == 0 and "ready" in text, text
        return installs

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "here")


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
    done = run("make")
    assert done.returncode == 0
    listed = re.findall(r"^make ([\w-]+)  +\S", done.stdout, re.M)
    assert sorted(listed) == sorted(TARGETS) and len(listed) == done.stdout.count("\n")
    wanted = {"demo", "setup", "check", "lessons", "test", "help", "wheels", "clean"}
    wanted |= {"notebooks", "notebooks-run", "quick", "mutants", "bench"}
    assert wanted <= set(listed)
    database = run("make", "--print-data-base", "--dry-run", "help").stdout
    phony = re.search(r"^\.PHONY:(.*)", database, re.M)[1].split()
    assert set(phony) >= TARGETS  # or a file of that name would stop it


def test_every_requirement_is_pinned_and_installed_and_torch_comes_first():
    exact = r"[\w-]+==(\d+\.)+\d+(; python_version (<|==|>=) \"3\.\d+\")?( +#.*)?"
    for name, lines in pins().items():
        assert all(re.fullmatch(exact, line) for line in lines), lines
        pinned = [Requirement(line.partition(" #")[0]) for line in lines]
        (here,) = [pin for pin in pinned if not pin.marker or pin.marker.evaluate()]
        assert here.specifier == f"=={version(name).partition('+')[0]}", name
        for python in ("3.10", "3.11", "3.12", "3.13", "3.14"):
            env = {"python_version": python}
            fit = [pin for pin in pinned if not pin.marker or pin.marker.evaluate(env)]
            assert len(fit) == 1, (name, python)
    assert next(iter(pins())) == "torch" and len(pins()["torch"]) == 1


def test_setup_installs_torch_first_and_only_what_is_new_or_has_moved(machine):
    torch, rest = machine.installs()
    assert machine.has(".venv/.base") and machine.installs() == []
    assert torch.split()[-1] == pins()["torch"][0]
    assert rest.endswith("-r requirements.txt")
    (machine.folder / ".venv/old_path").touch()
    machine.folder = machine.folder.rename(machine.folder.with_name("there"))
    *again, extra = machine.installs("EXTRA=1")
    assert len(again) == 2 and machine.installs("EXTRA=1") == []
    assert extra.endswith("-r requirements.txt -r requirements-extra.txt")
    assert not machine.has(".venv/old_path")
    later = (machine.folder / ".venv/.base").stat().st_mtime + 10
    os.utime(machine.folder / "requirements.txt", (later, later))
    assert len(machine.installs()) == 2


@pytest.mark.parametrize("where", ["torch==", "-r requirements.txt"])
def test_an_interrupted_installation_starts_over(machine, where):
    assert machine.setup(fails=where)[0] != 0
    half = machine.folder / ".venv/half_installed"
    half.touch()
    assert len(machine.installs()) == 2 and machine.has(".venv/.base")
    assert not half.exists()


@pytest.mark.parametrize("setting, says", [
    ("VENV=my env", "VENV is to be one word, not: my env"),
    ("VENV=theirs", "error: the folder theirs"),
    ("PYTHON=/no/such", "error: found no Python 3.10 to 3.14 as '/no/such'"),
])  # fmt: skip
def test_what_setup_refuses_in_one_message_and_leaves_alone(machine, setting, says):
    (machine.folder / "theirs").mkdir()
    for name in ("calls", "theirs/thesis.txt"):
        (machine.folder / name).touch()
    before = sorted(machine.folder.rglob("*"))
    code, text, installs = machine.setup(setting)
    assert code == 2 and says in text and installs == []
    assert sorted(machine.folder.rglob("*")) == before


def test_clean_removes_what_is_ours(machine):
    theirs = machine.folder / "theirs"
    theirs.mkdir()
    machine.setup()
    run("make", "clean", "VENV=theirs", cwd=machine.folder)
    assert theirs.exists() and machine.has(".venv")
    (theirs / "__pycache__").mkdir()
    done = run("make", "-f", "../Makefile", "clean", cwd=theirs)
    assert done.returncode == 2 and "call make in the folder of" in done.stderr
    assert machine.has("theirs/__pycache__")
    run("make", "clean", cwd=machine.folder)
    assert not machine.has(".venv") and not machine.has("theirs/__pycache__")


@pytest.mark.parametrize("setting, flags, of_all", [
    ("WHEELS=/stick", "--no-index --find-links /stick", True),
    ("INDEX=http://mirror", "--index-url http://mirror", True),
    ("TORCH_INDEX=http://cpu", "--index-url http://cpu", False),
])  # fmt: skip
def test_where_packages_come_from(machine, setting, flags, of_all):
    torch, rest = machine.installs(setting)
    assert flags in torch
    assert flags in rest if of_all else "--index-url" not in rest


# make check


def test_check_passes_here():
    code, out, _ = jobs.run_here("tools/check")
    *rows, verdict = out.splitlines()
    assert code == 0 and verdict.startswith("PASS"), out
    assert len(rows) == 7
    columns = {re.match(r"ok  \w+( \w+)? {2,}", row).end() for row in rows}
    assert len(columns) == 1
    assert rows[-1].startswith("ok  two ranks") and "[11.0, 22.0, 33.0]" in rows[-1]


def test_check_fails_with_advice(monkeypatch, capsys):
    monkeypatch.setenv("PET_LOCAL_ADDR", "127.0.0.1")
    two_ranks = ("no end after 60 s", "try again after: export …")
    monkeypatch.setattr(check, "check_two_ranks", lambda **_: two_ranks)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = check.main(taken.getsockname()[1])
    text = capsys.readouterr().out
    assert code == 1 and "FAIL  2 of 7 checks" in text
    assert re.search(r"^✗   port +port \d+ at .*in use\n +→ another prog", text, re.M)
    assert re.search(r"^✗   two ranks +no end.*\n +→ try again", text, re.M)


def two_ranks(program: str) -> tuple[str, str]:
    return check.check_two_ranks(limit=1, command=[sys.executable, "-c", program])


@pytest.mark.parametrize("found, advice, call", [
    (".*does not resolve", "/etc/hosts", lambda: check.check_host_name("no.invalid")),
    (".*is not this machine", "/etc/hosts", lambda: check.check_host_name("192.0.2.1")),
    ("3.9.18", "use Python", lambda: check.check_python((3, 9, 18))),
    ("3.15.0", "use Python", lambda: check.check_python((3, 15, 0))),
    ("2.13", "make setup", lambda: check.check_torch("1.0.0")),
    ("0.2 GiB free", "close", lambda: check.check_memory(lambda: 0.2 * check.GiB)),
    (".*GiB free", "make room", lambda: check.check_disk(wanted=1e18)),
    ("exit code 3; it said: error: r", "says",
     lambda: two_ranks("print('error: rank 1 died'); exit(3)")),
    ("exit code 0", "says", lambda: two_ranks("print('all-reduce [2.0, 4.0, 6.0]')")),
    ("no end after 1 s", "GLOO_SOCKET_IFNAME=lo",
     lambda: two_ranks("import time; time.sleep(60)")),
])  # fmt: skip
def test_check_names_what_is_wrong_and_what_to_do(monkeypatch, found, advice, call):
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    says, do = call()
    assert re.match(found, says) and advice in do


def test_check_host_name_that_takes_long(monkeypatch):
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    release = check.threading.Event()
    monkeypatch.setattr(check, "resolve", lambda name: release.wait(10) and [])
    found, advice = check.check_host_name("slow", wait=0.1)
    release.set()
    assert "no answer in" in found and "/etc/hosts" in advice
    monkeypatch.setattr(check, "resolve", lambda name: [(socket.AF_INET, "127.0.0.1")])
    found, advice = check.check_host_name("good")
    assert re.fullmatch(r"good is 127.0.0.1, in \d.\d s", found) and advice == ""


def test_free_memory_on_macos():
    pages = dict(free=5000, inactive=200000, speculative=1000, purgeable=500)
    text = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
    for kind, number in (pages | {"active": 300000, "wired down": 100000}).items():
        text += f"{f'Pages {kind}:':<40}{number:>12}.\n"
    assert check.free_in_vm_stat(text) == 16384 * sum(pages.values())


# All lessons in one table


@pytest.fixture
def table(tmp_path, monkeypatch, capsys):
    """make lessons in a folder with these files, with a Python for torchrun: exit code,
    rows of the table, what is said below it."""
    launcher = [sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[-1])"]
    monkeypatch.setattr(lessons, "TORCHRUN", launcher)

    def run_lessons(files: dict[str, str], ranks=None):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        code = lessons.main(tmp_path, ranks)
        rows, _, reasons = capsys.readouterr().out.partition("\n\n")
        return code, [line.split() for line in rows.splitlines()], reasons

    return run_lessons


def test_table_of_all_lessons(table):
    says_pass = "print('PASS  00_good  fine')"
    good = {"00_good": says_pass, "05_3d_parallel": says_pass, "notes": "no lesson"}
    bad = {
        "01_bad": "print('FAIL  01_bad  off by 2'); exit(1)",
        "02_late": "import os; print('PASS  02_late', flush=True); os.abort()",
    }
    code, (head, *rows), _ = table(good, ranks=4)
    assert code == 0 and head == ["lesson", "ranks", "verdict", "seconds"]
    assert [row[1:3] for row in rows] == [["4", "PASS"]] * 2
    code, (_, *rows), reasons = table(bad)
    assert code == 1 and [row[:3] for row in rows] == [
        ["00_good", "2", "PASS"], ["01_bad", "2", "FAIL"], ["02_late", "2", "FAIL"],
        ["05_3d_parallel", "8", "PASS"],
    ]  # fmt: skip
    assert all(0 <= float(row[3]) < 30 for row in rows)
    assert "01_bad: exit code 1; FAIL  01_bad  off by 2" in reasons
    assert "02_late: exit code -6; PASS" in reasons and "00_good" not in reasons


def test_lessons_without_an_end_are_stopped(table, monkeypatch):
    monkeypatch.setattr(lessons, "LIMIT", 0.5)
    code, _, reasons = table({"00_long": "import time; time.sleep(60)"})
    assert code == 1 and "00_long: stopped after 0.5 s; no line with" in reasons


def test_a_real_torchrun_in_the_table(tmp_path, capsys):
    (tmp_path / "00_two.py").write_text(
        "import os\n"
        "if (os.environ['RANK'], os.environ['WORLD_SIZE']) == ('1', '2'): print('PASS')"
    )
    assert lessons.main(tmp_path) == 0, capsys.readouterr().out


# README


def commands() -> list[str]:
    """Command lines of README's code blocks, continued lines joined, and what stands
    between backquotes."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", README, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    rest = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
    lines += re.findall(r"`([^`\n]+)`", rest)
    return [line.partition(" #")[0].strip() for line in lines]


def test_readme_names_lessons_definitions_and_bugs_that_exist():
    names = re.findall(r"^\| *\d\d.*?`[^`]*?(0\d_\w+)\.py[^`]*` *\|$", README, re.M)
    rows = re.findall(r"^\| (0\d) \| (`.*) \| (`.*) \|$", README, re.M)
    assert names == jobs.LESSONS and [n for n, *_ in rows] == [n[:2] for n in names]
    for lesson, (_, functions, bugs) in zip(names, rows):
        new = jobs.PATHS[lesson].read_text().partition("# ==== RUN")[0]
        defined = re.findall(r"^(?:class|def) (\w+)", new, re.M)
        functions = re.findall(r"`(\w+)`", functions)
        bugs = re.findall(r"`([\w-]+)`", bugs)
        assert len(functions) == 3 and len(bugs) == 2, lesson
        assert set(functions) <= set(defined), lesson
        assert set(bugs) <= set(jobs.load(lesson).BREAKS), lesson


def test_readme_names_targets_and_settings_that_exist():
    asked = [line.split()[1:] for line in commands() if line.startswith("make ")]
    words = {word for line in asked for word in line}
    settings = {word.partition("=")[0] for word in words if "=" in word}
    named = {word for word in words if "=" not in word}
    assert {"demo", "setup", "check", "test", "lessons", "wheels"} <= named <= TARGETS
    assert all(f"$({name})" in MAKEFILE for name in settings), settings


def test_readme_commands_have_flags_that_exist():
    launcher = set(get_args_parser()._option_string_actions)
    asked = [line for line in commands() if re.match(r"torchrun .*\.py", line)]
    asked = [re.match(r"torchrun (.*) (0\d_\w+)\.py(.*)", line) for line in asked]
    assert len(asked) >= 4 and None not in asked
    assert {match[2] for match in asked} == set(jobs.LESSONS)
    for match in asked:
        before, lesson, after = match.groups()
        _, known, _ = jobs.run_here(lesson, "--help")
        known = re.findall(r"--[a-z-]+", known)
        assert set(re.findall(r"--[a-z_-]+", before)) <= launcher, match[0]
        assert set(re.findall(r"--[a-z-]+", after)) <= set(known), match[0]
        assert "--break" in known


def test_no_package_index_is_named():
    """Whoever installs chooses where from; the repository does not."""
    host = "https?://[a-z0-9_.-]*(py" + "pi|download|whl|index)"
    found = run("git", "grep", "-IiE", host)
    assert found.returncode == 1, found.stdout + found.stderr  # nothing was found


def test_ci_calls_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text and "make test" in text.splitlines()
    assert "bash .ci/run" in (ROOT / ".github/workflows/tests.yml").read_text()
