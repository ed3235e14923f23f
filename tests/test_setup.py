"""What a newcomer meets first: make, its environment, the machine check, the README."""

import copy
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import bench
import check
import jobs
import lessons
import pytest
import torch
from jobs import ROOT
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()
DOCS = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("run", "mesh", "teach")]
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def run(*command, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    """A command as at a prompt: without what an outer make passes down."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
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


@pytest.fixture
def folder(tmp_path):
    """A fresh folder with the Makefile in it, and a fake Python."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt", "requirements-extra.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "fake_python").write_text(FAKE_PYTHON)
    (folder / "fake_python").chmod(0o755)
    return folder


def setup(folder: Path, *args, code=0, says="ready", fails="nothing") -> list[str]:
    """What Python was asked to install by a make setup that ends so."""
    calls = folder / "calls"
    calls.write_text("")
    python = f"PYTHON={folder / 'fake_python'}"
    done = run("make", "setup", python, *args, cwd=folder, FAILS=fails)
    text = done.stdout + done.stderr
    assert done.returncode == code and says in text, text
    return [line for line in calls.read_text().splitlines() if "install" in line]


# Make and its environment


def test_help_lists_every_target():
    done = run("make", "--print-data-base")
    listed = re.findall(r"^make ([\w-]+)  +\S", done.stdout, re.M)
    assert done.returncode == 0 and sorted(listed) == sorted(TARGETS)
    phony = re.search(r"^\.PHONY:(.*)", done.stdout, re.M)[1].split()
    assert set(phony) >= TARGETS  # or a file of that name would stop it


def test_every_requirement_is_pinned_and_installed_and_torch_comes_first():
    files = ROOT / "requirements.txt", ROOT / "requirements-extra.txt"
    lines = [line for file in files for line in file.read_text().splitlines()]
    lines = [line.partition("#")[0].strip() for line in lines]
    pins = [Requirement(line) for line in lines if line]
    assert pins[0].name == "torch"
    for pin in pins:
        assert re.fullmatch(r"==[\d.]+", str(pin.specifier)), pin
        if not pin.marker or pin.marker.evaluate():
            assert version(pin.name) in pin.specifier
    names = {pin.name for pin in pins}
    for python in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        env = {"python_version": python}
        fit = [pin.name for pin in pins if not pin.marker or pin.marker.evaluate(env)]
        assert sorted(fit) == sorted(names), f"twice, or missing, for Python {python}"


def test_setup_installs_torch_first_and_only_what_is_new(folder):
    torch, rest = setup(folder)
    assert (folder / ".venv/.base").exists() and setup(folder) == []
    assert re.search(r" torch==[\d.]+$", torch) and rest.endswith("-r requirements.txt")
    (extra,) = setup(folder, "EXTRA=1")
    assert setup(folder, "EXTRA=1") == []
    assert extra.endswith("-r requirements.txt -r requirements-extra.txt")
    later = (folder / ".venv/.base").stat().st_mtime + 10
    os.utime(folder / "requirements.txt", (later, later))
    assert len(setup(folder)) == 2


@pytest.mark.parametrize("where", ["torch==", "-r requirements.txt"])
def test_an_interrupted_installation_starts_over(folder, where):
    setup(folder, fails=where, code=2, says="")
    half = folder / ".venv/half_installed"
    half.touch()
    assert len(setup(folder)) == 2 and not half.exists()


@pytest.mark.parametrize("setting, says", [
    ("VENV=my env", "VENV is to be one word, not: my env"),
    ("VENV=theirs", "error: the folder theirs"),
    ("PYTHON=/no/such", "error: found no Python 3.10 to 3.14 as '/no/such'"),
])  # fmt: skip
def test_what_setup_refuses_in_one_message_and_leaves_alone(folder, setting, says):
    (folder / "theirs").mkdir()
    for name in ("calls", "theirs/thesis.txt"):
        (folder / name).touch()
    before = sorted(folder.rglob("*"))
    assert setup(folder, setting, code=2, says=says) == []
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("target", ["setup", "clean"])
@pytest.mark.parametrize("base", ["{there}", "interrupted {there}", "interrupted", ""])
def test_what_another_folder_made_is_never_removed(folder, target, base):
    """Another clone's environment, which VENV names, with a file of its user in it."""
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / ".base").write_text(base.format(there=folder.with_name("there")) + "\n")
    (theirs / "thesis.txt").write_text("years of work")
    python = f"PYTHON={folder / 'fake_python'}"
    done = run("make", target, "VENV=theirs", python, cwd=folder, FAILS="nothing")
    assert (theirs / "thesis.txt").read_text() == "years of work"
    if target == "setup":
        assert (
            done.returncode == 2 and "error: the folder theirs was not" in done.stdout
        )


def test_an_environment_that_has_moved_is_refused_with_advice(folder):
    setup(folder)
    folder = folder.rename(folder.with_name("there"))
    setup(folder, code=2, says="remove it yourself, or choose another")
    shutil.rmtree(folder / ".venv")
    assert len(setup(folder)) == 2


def test_clean_removes_what_is_ours(folder):
    ours, theirs = folder / ".venv", folder / "theirs"
    theirs.mkdir()
    setup(folder)
    run("make", "clean", "VENV=theirs", cwd=folder)
    assert theirs.exists() and ours.exists()
    (theirs / "__pycache__").mkdir()
    done = run("make", "-f", "../Makefile", "clean", cwd=theirs)
    assert done.returncode == 2 and "call make in the folder of" in done.stderr
    assert (theirs / "__pycache__").exists()
    run("make", "clean", cwd=folder)
    assert not ours.exists() and not (theirs / "__pycache__").exists()


@pytest.mark.parametrize("setting, flags, of_all", [
    ("WHEELS=/stick", "--no-index --find-links /stick", True),
    ("INDEX=http://mirror", "--index-url http://mirror", True),
    ("TORCH_INDEX=http://cpu", "--index-url http://cpu", False),
])  # fmt: skip
def test_where_packages_come_from(folder, setting, flags, of_all):
    torch, rest = setup(folder, setting)
    assert flags in torch
    assert flags in rest if of_all else "--index-url" not in rest


# make check


def test_check_passes_here():
    code, out, _ = jobs.run_here("tools/check")
    *rows, verdict = out.splitlines()
    assert code == 0 and verdict.startswith("PASS"), out
    assert len(rows) == 7 and all(row.startswith("ok  ") for row in rows)
    assert "two ranks" in rows[-1] and "[11.0, 22.0, 33.0]" in rows[-1]


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


def test_versions_that_were_tried():
    """make check and the page name the same ones, the pinned one among them."""
    text = DOCS[0].partition("**Versions.**")[2].partition("\n\n")[0]
    assert set(re.findall(r"2\.\d+\.\d+", text)) == set(check.TRIED)
    assert check.pinned_torch() in check.TRIED
    installed = version("torch").partition("+")[0]
    assert check.check_torch("1.0.0", tried=[installed])[1] == ""


def test_check_says_which_machine_this_is_and_which_interface_to_name(monkeypatch):
    name = "no.such.host.invalid"
    assert "does not resolve" in check.check_first_machine(name)[0]
    found, advice, number, _ = check.check_first_machine("127.0.0.1")
    assert "--node_rank=0" in found and advice == "" and number == 0
    monkeypatch.setattr(check, "resolve", lambda name: [(2, "127.0.1.1")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert check.check_interface("eth7")[1] == "export GLOO_SOCKET_IFNAME=eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert "reached by eth7" in check.check_interface("eth7")[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert check.check_interface("eth7") == ("GLOO_SOCKET_IFNAME=eth7", "")
    assert check.check_interface("")[1]


@pytest.mark.parametrize("tool, flags, says", [
    ("check", ["--port", "x"], "--port"),
    ("lessons", ["--ranks", "0"], "--ranks 0"),
    ("bench", ["--ranks", "0"], "--ranks"),
    ("bench", ["--tokens", "0"], "--tokens"),
    ("bench", ["--json", "/proc/x"], "/proc/x"),
    ("submission", ["--out", "/tmp"], "/tmp: Is a directory"),
])  # fmt: skip
def test_wrong_arguments_of_a_tool_are_one_line(tool, flags, says):
    code, out, err = jobs.run_here(f"tools/{tool}", *flags)
    assert code == 2 and out == "", out
    assert re.fullmatch(r"error: .*\n", err) and says in err, err


def test_wrong_ranks_and_a_folder_that_cannot_be_written(folder):
    done = run("make", "demo", "RANKS=0", cwd=folder)
    assert done.returncode == 2 and "RANKS is to be a number" in done.stderr
    (folder / "file").touch()
    says = "error: the folder file/venv cannot be written here"
    setup(folder, "VENV=file/venv", code=2, says=says)


CHILDREN = """
import subprocess, sys
import bench

start = bench.seconds_of_children()
subprocess.run(["sleep", "1"])
slept = bench.seconds_of_children()
busy = "import time\\nwhile time.process_time() < 0.5: pass"
subprocess.run([sys.executable, "-c", busy])
print(slept - start, bench.seconds_of_children() - slept)
"""


def test_bench_counts_seconds_of_processors():
    """Not how long something waits. In a process of its own: here jobs may end."""
    done = run(sys.executable, "-c", CHILDREN, PYTHONPATH="tools")
    slept, busy = map(float, done.stdout.split())
    assert slept < 0.3 < busy


def test_bench_marks_what_is_above_its_target():
    row = {"lesson": "05_3d_parallel", "ranks": 8, "bare s": 4.0, "lesson s": 8.0}
    row["lesson / bare"] = {"median": 2.0, "quartiles": [1.9, 2.1]}
    assert bench.row_of(row | {"target": 1.8}).endswith("1.8 ✗")
    assert bench.row_of(row | {"target": 2.0}).endswith("2.0")


@pytest.mark.parametrize("name", jobs.LESSONS + jobs.BEYOND)
def test_bench_compares_with_a_script_that_imports_the_same(name):
    text = bench.bare_of(jobs.PATHS[name])
    compile(text, "bare.py", "exec")
    first, *others = text.splitlines()
    assert first == "from __future__ import annotations"
    own = jobs.PATHS[name].read_text("utf-8")
    for line in re.findall(r"^(?:import [\w.]+|from [\w.]+ import [\w ]+)$", own, re.M):
        assert line in others or line == first, line
    helpers = re.findall(r"^    from (\w+) import ", own, re.M)
    for module in helpers if name in jobs.BEYOND else []:
        assert f"from {module} import " in text, module
    assert "init_process_group" in text and "destroy_process_group" in text
    trains = "optim." in own or "train_transformer(" in own or "AdamW(" in own
    assert ("optim.AdamW(" in text) is trains


def test_bench_prints_no_time_of_a_result_that_differs(monkeypatch):
    """Output and all gradients are compared before a clock runs."""
    lesson = jobs.load("01_naive_mlp_tp")
    full, x = lesson.MLP(8, 32), torch.randn(1, 4, 8)
    other = copy.deepcopy(full)
    assert bench.difference(lesson, other, full, x) == 0
    other.down_proj.bias.data += 1e-3
    assert bench.difference(lesson, other, full, x) > bench.ALLOWED
    other = copy.deepcopy(full)  # its output is right
    other.up_proj.weight.register_hook(lambda grad: grad * 1.001)
    assert bench.difference(lesson, other, full, x) > bench.ALLOWED

    by_hand = lambda full, group: copy.deepcopy(full)

    def gather(found, value, group):
        found[:] = [value]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "barrier", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(lesson, "tp_mlp", by_hand)
    monkeypatch.setattr(lesson, "dtensor_mlp", lambda full, group: full)
    group = mock.Mock(size=lambda: 1, rank=lambda: 0)
    with pytest.raises(OSError):  # nothing differs: it goes on
        bench.time_mlps(8, 4, group, 1)
    monkeypatch.setattr(lesson, "tp_mlp", lambda full, group: other)
    with pytest.raises(ValueError, match="hidden 8: results are off by"):
        bench.time_mlps(8, 4, group, 1)


def two_ranks(program: str, limit=300) -> tuple[str, str]:
    return check.check_two_ranks(limit, [sys.executable, "-c", program])


@pytest.mark.parametrize("found, advice, call", [
    (".*does not resolve", "/etc/hosts", lambda: check.check_host_name("no.invalid")),
    (".*is not this machine", "/etc/hosts", lambda: check.check_host_name("192.0.2.1")),
    ("3.9.18", "use Python", lambda: check.check_python((3, 9, 18))),
    ("3.15.0", "use Python", lambda: check.check_python((3, 15, 0))),
    ("2.13", "make setup", lambda: check.check_torch("1.0.0", tried=["1.0.0"])),
    ("0.2 GiB free", "close", lambda: check.check_memory(lambda: 0.2 * check.GiB)),
    (".*GiB free", "make room", lambda: check.check_disk(wanted=1e18)),
    ("exit code 3; it said: error: r", "says",
     lambda: two_ranks("print('error: rank 1 died'); exit(3)")),
    ("exit code 0", "says", lambda: two_ranks("print('all-reduce [2.0, 4.0, 6.0]')")),
    ("no end after 1 s", "GLOO_SOCKET_IFNAME=lo",
     lambda: two_ranks("import time; time.sleep(60)", limit=1)),
])  # fmt: skip
def test_check_names_what_is_wrong_and_what_to_do(monkeypatch, found, advice, call):
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    says, do = call()
    assert re.match(found, says) and advice in do


def test_check_host_name_that_is_good_and_one_that_takes_long(monkeypatch):
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    found, advice = check.check_host_name("localhost")
    assert found.startswith("localhost is ") and advice == ""
    monkeypatch.setattr(check, "resolve", lambda name: time.sleep(2) or [])
    found, advice = check.check_host_name("slow", wait=0.1)
    assert "no answer in" in found and "/etc/hosts" in advice


def test_free_memory_on_macos():
    text = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5000.
Pages active:                            300000.
Pages inactive:                          200000.
Pages speculative:                         1000.
Pages wired down:                        100000.
Pages purgeable:                            500.
"""
    assert check.free_in_vm_stat(text) == 16384 * (5000 + 200000 + 1000 + 500)


# All lessons in one table


def test_table_of_all_lessons(tmp_path, monkeypatch, capsys):
    ends = {
        "00_good": (0, "more\nPASS  00_good  fine\n"),
        "01_bad": (1, "FAIL  01_bad  off by 2\ntorchrun's report"),
        "02_late": (-6, "PASS  02_late"),
        "04_long": (None, "no verdict"),
        "05_3d_parallel": (0, "PASS  05_3d_parallel"),
        "notes": (0, "is no lesson"),
    }
    for name in ends:
        (tmp_path / f"{name}.py").touch()
    run = mock.Mock(side_effect=lambda command, limit: ends[Path(command[-1]).stem])
    monkeypatch.setattr(lessons, "run", run)
    assert lessons.main(tmp_path) == 1
    rows, _, reasons = capsys.readouterr().out.partition("\n\n")
    assert [line.split()[:3] for line in rows.splitlines()] == [
        ["lesson", "ranks", "verdict"],
        ["00_good", "2", "PASS"], ["01_bad", "2", "FAIL"], ["02_late", "2", "FAIL"],
        ["04_long", "2", "FAIL"], ["05_3d_parallel", "8", "PASS"],
    ]  # fmt: skip
    assert "01_bad: exit code 1; FAIL  01_bad  off by 2\n" in reasons
    assert "02_late: exit code -6; PASS" in reasons and "00_good" not in reasons
    assert "04_long: stopped after 300 s; no line with" in reasons

    for failed in ("01_bad", "02_late", "04_long"):
        (tmp_path / f"{failed}.py").unlink()
    assert lessons.main(tmp_path, ranks=4) == 0
    path = str(tmp_path / "05_3d_parallel.py")
    for ranks in ("8", "4"):
        run.assert_any_call([*jobs.TORCHRUN, f"--nproc_per_node={ranks}", path], 300)


# README


def commands() -> list[str]:
    """Command lines of the code blocks of README and docs, continued lines joined, and
    the text between backquotes."""
    text = "\n".join([README, *DOCS])
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    lines += re.findall(r"`([^`\n]+)`", rest)
    return [line.partition(" #")[0].strip() for line in lines]


def test_readme_is_short_and_lists_every_lesson_and_script():
    """Words as `wc -w` counts them, marks of tables included."""
    assert len(README.split()) <= 1100
    rows = re.findall(r"^\| \[\d\d .*?\]\((\S+?)\.py\) \|", README, re.M)
    assert rows == [*jobs.LESSONS, *(f"beyond/{name}" for name in jobs.BEYOND)]


def test_readme_has_first_what_a_newcomer_does_first():
    """Two sentences, the moving picture, then make demo and seven lines of output."""
    opening = README.partition("\n\n")[2].partition("\n\n![")[0]
    assert opening.count(". ") == 1 and opening.endswith(".")
    before, _, after = README.partition("```bash\nmake demo\n```")
    assert before.count("![") == 1 and "](assets/mlp.gif)" in before
    shown = after.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len([line for line in shown if line != "…"]) == 7
    titles = re.findall(r"^## (.*)", README, re.M)
    assert titles == [
        "Start", "The lessons", "Break it", "Where to begin", "Notebooks",
        "Beyond the lessons", "Audit your own model", "More",
    ]  # fmt: skip


def ranks_by_the_rule() -> dict[str, int]:
    """Number of a lesson or script → its ranks, by README's one sentence."""
    rule = re.search(r"05 on (\d) ranks; (.*) on (\d); all others on (\d)\.", README)
    of_05, some, of_some, of_others = rule.groups()
    ranks = {name[:2]: int(of_others) for name in jobs.PATHS}
    for number in re.findall(r"\d\d", some):
        assert number in ranks, number
        ranks[number] = int(of_some)
    return ranks | {"05": int(of_05)}


def test_readme_has_one_command_and_the_rule_for_ranks():
    """The ranks that each lesson and script names in its own docstring."""
    (shown,) = re.findall(r"^torchrun .*", README, re.M)
    ranks = ranks_by_the_rule()
    for name, path in jobs.PATHS.items():
        file = path.relative_to(jobs.ROOT)
        command = f"torchrun --standalone --nproc_per_node={ranks[name[:2]]} {file}"
        (own,) = re.findall(rf"^ +(torchrun \S+ \S+ {file})$", path.read_text(), re.M)
        assert own == command
        assert own == shown or name != "01_naive_mlp_tp"


def slugs(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    kept = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in kept}


def test_readme_links_to_sections_and_lines_that_exist():
    """On the web, where a label of the site's own is unknown. (test_site.py looks for
    the files, and at the links of the site.)"""
    links = re.findall(r"\]\(([\w/.]+)#([\w-]+)\)", README)
    assert len(links) >= 10
    for target, fragment in links:
        path = ROOT / target
        if target.endswith(".md"):
            assert fragment in slugs(path), (target, fragment)
        else:
            first, last = re.fullmatch(r"L(\d+)-L(\d+)", fragment).groups()
            lines = path.read_text().splitlines()
            assert 1 < int(first) < int(last) <= len(lines)
            assert lines[int(first) - 2].startswith("# ==== NEW"), target


def test_teachers_table_names_definitions_and_bugs_that_exist():
    rows = re.findall(r"^\| (0\d) \| (`.*) \| (`.*) \|$", DOCS[2], re.M)
    assert [number for number, *_ in rows] == [name[:2] for name in jobs.LESSONS]
    course = jobs.load("docs.course")
    for lesson, (_, functions, bugs) in zip(jobs.LESSONS, rows):
        new = jobs.PATHS[lesson].read_text().partition("# ==== RUN")[0]
        defined = re.findall(r"^(?:class|def) (\w+)", new, re.M)
        functions = re.findall(r"`(\w+)`", functions)
        bugs = re.findall(r"`([\w-]+)`", bugs)
        assert len(functions) == 3 and len(bugs) == 2, lesson
        assert set(functions) <= set(defined), lesson
        assert set(bugs) <= set(course.bugs_of(lesson)), lesson


def test_readme_names_targets_and_settings_that_exist():
    asked = [shlex.split(x)[1:] for x in commands() if x.startswith("make ")]
    words = {word for line in asked for word in line}
    named = {word for word in words if "=" not in word}
    assert {"demo", "setup", "check", "test", "lessons", "wheels"} <= named <= TARGETS
    for setting in words - named:
        assert f"$({setting.partition('=')[0]})" in MAKEFILE, setting


def test_readme_commands_have_flags_that_exist():
    launcher = set(get_args_parser()._option_string_actions)
    asked = [line for line in commands() if re.match(r"torchrun .*\.py", line)]
    script = r"torchrun (.*) (?:beyond/)?(\d\d_\w+)\.py(.*)"
    asked = [re.match(script, line) for line in asked]
    named = {match[2] for match in asked}
    assert {"01_naive_mlp_tp", "02_transformer_tp", "05_3d_parallel"} <= named
    helps = {lesson: jobs.run_here(lesson, "--help")[1] for lesson in sorted(named)}
    for match in asked:
        before, lesson, after = match.groups()
        known = re.findall(r"--[a-z-]+", helps[lesson])
        assert set(re.findall(r"--[a-z_-]+", before)) <= launcher, match[0]
        assert set(re.findall(r"--[a-z-]+", after)) <= set(known), match[0]


def test_the_readme_says_what_each_machine_installs():
    """On Linux pip takes the CUDA build, of gigabytes, unless an index is named. Only a
    CPU build takes a minute or two. The table is on the page about running."""
    start = README.partition("## Start")[2].partition("```")[0]
    start = " ".join(start.split())
    assert "an environment of 1.5 GB" in start and "CUDA build, 4.7 GB" in start
    assert "without an NVIDIA GPU, and in WSL, add `TORCH_INDEX=…`" in start
    assert "run.md#installing" in start
    rows = re.findall(r"^\| (macOS|Linux)(.*?) \| (.*?) \| (.*?) \|$", DOCS[0], re.M)
    says = {machine + more: (command, build) for machine, more, command, build in rows}
    mac, gpu, cpu = says.values()
    assert [name.split(",")[0] for name in says] == [
        "macOS", "Linux with an NVIDIA GPU", "Linux without one",
    ]  # fmt: skip
    assert "TORCH_INDEX=" in cpu[0] and "1.5 GB" in mac[1] and "4.7 GB" in gpu[1]
    assert "TORCH_INDEX" not in mac[0] + gpu[0]
    for command, build in (mac, cpu):
        assert "CPU build" in build, command
    assert "CUDA build" in gpu[1] and "GB" in gpu[1]
    assert [name for name in says if "minute" in says[name][1]] == [next(iter(says))]


def test_no_package_index_is_named():
    """Whoever installs chooses where from; the repository does not."""
    host = "https?://[a-z0-9_.-]*(py" + "pi|download|whl|index)"
    found = run("git", "grep", "-IiE", host)
    assert found.returncode == 1, found.stdout + found.stderr  # nothing was found


def test_ci_calls_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().endswith("\nmake test\n")
    assert "bash .ci/run" in (ROOT / ".github/workflows/tests.yml").read_text()


def test_the_weekly_workflow_runs_what_the_course_promises():
    """Every Python of docs/run.md, with the torch that is pinned and the newest one."""
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text()
    pythons = re.findall(r'"(3\.\d+)"', weekly)
    first, last = re.search(r"Python (3\.\d+) to (3\.\d+)", DOCS[0]).groups()
    assert (pythons[0], pythons[-1]) == (first, last)
    minors = [int(python[2:]) for python in pythons]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert "torch: [pinned, newest]" in weekly and "schedule:" in weekly
    for target in re.findall(r"make ([a-z]+)", weekly):
        assert target in TARGETS
    assert weekly.endswith("make lessons\n")


@pytest.mark.parametrize("cores, gigabytes, jobs_there", [
    (1, 4, 2), (2, 24, 2), (8, 16, 8), (8, 8, 4), (64, 256, 64),
])  # fmt: skip
def test_make_test_uses_the_cores_of_a_machine(cores, gigabytes, jobs_there):
    assert jobs.jobs_at_a_time(cores, gigabytes * 10**9) == jobs_there


DONE = jobs.Done(0, "PASS", "", 1.0, 1.0, [], {})


def test_a_run_that_a_notebook_shares_happens_once(monkeypatch):
    """If it still waits for its turn, where the notebook asks for it."""
    job, calls = ("09_job", 2, "--steps", "1"), []
    monkeypatch.setitem(jobs.STARTED, job, Future())
    monkeypatch.setitem(jobs.TO_DO, job, lambda *of: calls.append(of) or DONE)
    assert jobs.run_of_a_test("beyond/09_job.py", *job[1:]) is DONE
    jobs.do(job)  # its turn
    assert jobs.run_of_a_test("beyond/09_job.py", *job[1:]) is DONE and calls == [job]
    assert jobs.run_of_a_test("beyond/09_job.py", 2) is None


def test_who_waits_for_a_run_gets_its_error(monkeypatch):
    def fail(*job):
        raise LookupError("no such lesson")

    job = ("09_job", 2)
    monkeypatch.setitem(jobs.STARTED, job, Future())
    monkeypatch.setitem(jobs.TO_DO, job, fail)
    jobs.do(job)
    with pytest.raises(LookupError):
        jobs.result(*job)
