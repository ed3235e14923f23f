"""What a user can get wrong gets one message, exit code 2, no traceback, by rank 0.

They run in this process, for they come before any group is made; what torchrun makes of
them is in test_faults.py.
"""

import json
import random
import re
import shlex
import shutil
import subprocess
import sys

import jobs
import pytest
from runs import (
    CHECKPOINTS,
    COLLECTIVES,
    CONTEXT,
    MESH,
    MESH_2D,
    MLP,
    SAME_BITS,
    SCHEDULES,
    SEQUENCE,
    TRANSFORMER,
    VOCAB,
    over,
)

# Flags, and what the message must say; if nothing stands there, the flags themselves.
SHARED = [  # the same in all lessons
    ("--break nope", "--break", "nope", "list"),
    ("--break ''", "--break"),
    ("--dtype bfloat16", "--dtype", "bfloat16", "float64"),
    ("--device cuda", "--device"),
    ("--json no/such/folder/out.json", "no/such/folder"),
    ("--json tests", "tests"),
    ("--colour red", "--colour"),
    ("--se 3", "--se"),
    ("--seed 0",), ("--seed -3",), ("--seed first",), (f"--seed {2**64}",),
    ("--timeout 0",), (f"--timeout {'9' * 14}",), ("--timeout 1.5",),
    ("--only 0",), ("--json",), ("extra",),
]  # fmt: skip
OF_01 = [  # and on how many ranks
    (4, "--hidden 66", "--hidden 66", "66 % 4", "= 2", "--hidden 68"),
    (3, "--width 64", "--width 64", "3"),
    (4, "--width 4", "--width 4", "= 1", "take --width 8"),
    (4, "--batch-size 6", "--batch-size 6", "4"),
    (4, "--batch-size 2147483646", "= 2", "take --batch-size 2147483644"),
    (2, "--hidden 0"), (2, "--hidden -64"), (2, "--hidden 1.5"), (2, "--width wide"),
    (2, "--steps 0"),
]  # fmt: skip
OF_13 = [
    (4, "--hidden 66", "--hidden 66", "66 % 4", "= 2", "--hidden 68"),
    (4, "--mesh 2x3", "--mesh 2x3", "2 · 3 = 6", "4 ranks", "take 2x2"),
    (4, "--mesh 2x", "--mesh 2x: is not OUTERxINNER", "take 2x2"),
    (4, "--mesh two", "--mesh two: is not OUTERxINNER", "take 2x2"),
    (4, "--mesh 2*2", "--mesh 2*2: is not OUTERxINNER", "take 2x2"),
    (3, "--hidden 48 --batch-size 6 --mesh 0x3", "0 · 3 = 0", "3 ranks", "take 1x3"),
]  # fmt: skip
OF_MODEL = [  # the same function in 02, 03 and 04
    ("--heads 6 --hidden 48", "--heads 6", "4"),
    ("--heads 6", "--heads 6", "6 % 4", "--heads 8"),
    ("--kv-heads 2", "--kv-heads 2", "4 ranks", "beyond/09_shared_heads.py"),
    ("--kv-heads 6 --heads 12", "--kv-heads 6", "6 % 4", "--kv-heads 8"),
    ("--hidden 72", "--hidden 72", "72 % 16", "--hidden 80"),
    ("--hidden 2 --heads 4", "--hidden 2"), ("--clip 0", "--clip 0", "greater than 0"),
    ("--vocab-size 256", "--vocab-size 256", "257"),
    ("--kv-heads 0",), ("--layers 0",), ("--seq-len -1",),
    ("--dropout 0.91", "at most 0.9"), ("--dropout nan",),
]  # fmt: skip
OF_05 = [
    ("--pp 3", "--pp 3 = 3", "4 ranks", "start 3"),
    ("--pp 4 --layers 3", "--layers 3", "--pp 4", "take --layers 4"),
    ("--pp 2 --layers 1", "--layers 1", "--pp 2", "take --layers 2"),
    ("--tp 4 --kv-heads 2", "--kv-heads 2", "--tp 4", "beyond/09_shared_heads.py"),
    ("--tp 4 --heads 6", "--heads 6", "6 % 4", "--heads 8"),
    ("--clip 0", "--clip 0", "greater than 0"), ("--schedule zb", "--schedule", "1f1b"),
    ("--save ck", "--save"),
]  # fmt: skip
OF_14 = [
    (4, "--sleep -1", "--sleep -1", "at least 0"), (4, "--sleep nan", "--sleep nan"),
    (4, "--microbatches 6", "--microbatches 6", "6 % 4", "take --microbatches 8"),
    (4, "--chunks 3 --layers 8", "--layers 8", "v·P = 12", "take --layers 12"),
    (4, "--batch-size 12", "--batch-size 12", "12 % 8", "take --batch-size 16"),
    (1, "--chunks 2", "--chunks 2", "one rank"),
    (2, "--break chunks --chunks 1", "--break chunks", "--chunks 2 or more"),
]  # fmt: skip
OF_BREAKS = [  # a bug that these flags do not show
    (CHECKPOINTS, 2, "--break position --steps 1", "--steps 2 or more"),
    (CONTEXT, 2, "--break sum --tp 2", "--tp 2: one CP rank", "smaller --tp"),
    (CONTEXT, 4, "--break lse --tp 4", "--tp 4: one CP rank", "smaller --tp"),
]
REFUSED = [
    (COLLECTIVES, 1, "--break skip", "--break", "2 ranks"),
    *((COLLECTIVES, 2, *case) for case in SHARED),
    *((MLP, *case) for case in OF_01),
    *((MESH_2D, *case) for case in OF_13),
    *((TRANSFORMER, 4, *case) for case in OF_MODEL),
    *((lesson, 4, "--kv-heads 2", "beyond/09_shared") for lesson in (VOCAB, SEQUENCE)),
    *((MESH, 4, *case) for case in OF_05),
    *((SCHEDULES, *case) for case in OF_14),
    *OF_BREAKS,
]


def as_rank(rank: int, ranks: int) -> dict:
    """The environment torchrun gives a rank, without an address to meet at."""
    keys = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return dict(zip(keys, map(str, (rank, ranks, rank, ranks))))


def message(text: str) -> str:
    """Of one error in lines of at most 88 columns: the message in one line."""
    lines = text.splitlines()
    assert lines and lines[0].startswith("error: "), text
    assert all(line.startswith("  ") for line in lines[1:]), text
    assert max(map(len, lines)) <= 88, text
    return " ".join(line.strip() for line in lines)


def refused_in_one_line(lesson: str, ranks: int, flags: str) -> str:
    """What rank 0 says of flags that it refuses."""
    code, out, err = jobs.run_here(lesson, *flags.split(), **as_rank(0, ranks))
    assert (code, out) == (2, "")
    return message(err)


@pytest.mark.parametrize("lesson, ranks, flags, words", [
    pytest.param(*case[:3], case[3:], id=f"{case[0][:2]} {case[1]} {case[2]}")
    for case in REFUSED
])  # fmt: skip
def test_refused(lesson, ranks, flags, words, tmp_path):
    told, flags, said = tmp_path / "error.json", shlex.split(flags), set()
    for rank in {0, ranks - 1}:
        env = as_rank(rank, ranks) | {"TORCHELASTIC_ERROR_FILE": str(told)}
        code, out, err = jobs.run_here(lesson, *flags, **env)
        assert (code, out) == (2, "")
        report = json.loads(told.read_text())["message"]["message"]
        assert err == (report + "\n" if rank == 0 else "")
        said.add(message(report))
        told.unlink()
    (text,) = said  # all ranks say the same
    for word in words or flags:
        assert word in text, text


SIZES = {  # flags that depend on each other, and how large they are here
    MLP: {"hidden": 90, "width": 90, "batch-size": 20},
    TRANSFORMER: {"kv-heads": 9, "heads": 20, "hidden": 150},
    MESH: {"kv-heads": 9, "heads": 20, "hidden": 150, "layers": 5, "batch-size": 40},
}


@pytest.mark.parametrize("lesson", SIZES)
def test_advice_is_right_at_the_first_try(lesson, monkeypatch):
    """Also where one flag's right value makes another one wrong."""
    module = jobs.load(lesson)
    draw = random.Random(lesson)
    refused = 0
    for _ in range(100):
        flags = {}
        for name, largest in SIZES[lesson].items():
            if draw.random() < 0.7:
                flags[name] = draw.randint(1, largest)
        ranks = draw.choice([2, 3, 4, 6])
        said = refusal(module, flags, ranks, monkeypatch)
        if said:
            refused += 1
            flags.update(re.findall(r"--(\S+) (\d+)", said.partition("; take ")[2]))
            again = refusal(module, flags, ranks, monkeypatch)
            assert again == "" or again.startswith("--hidden 2: "), (said, again)
    assert refused > 30


def refusal(module, flags: dict, ranks: int, monkeypatch) -> str:
    """What a lesson says of these flags; "" if it takes them."""
    words = [word for name, n in flags.items() for word in (f"--{name}", str(n))]
    monkeypatch.setattr(sys, "argv", ["lesson.py", *words])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    try:
        module.parse_args(ranks)
    except ValueError as error:
        return str(error)
    return ""


HUGE = {"257": "tried to allocate 2056000000000 bytes", str(2**31 - 1): "overflowed"}


@over([
    (TRANSFORMER, 2, "--vocab-size", rows, "--hidden", str(2 * 10**9))
    for rows in HUGE
])  # fmt: skip
def test_sizes_that_fit_no_memory(run):
    done = jobs.result(*run)
    (text,) = re.findall(r"^error: .*(?:\n  .*)*", done.err, re.M)
    assert HUGE[run[3]] in text and "this machine has" in text
    assert done.code == 1 and "Traceback" not in done.err


@pytest.mark.parametrize("lesson", jobs.LESSONS)
def test_without_torchrun(lesson):
    code, out, err = jobs.run_here(lesson, RANK="abc")  # some cluster's
    assert code == 2 and err == ""
    ranks = 8 if lesson == MESH else 2
    start = rf"torchrun --standalone --nproc_per_node={ranks} \S*{lesson}\.py"
    assert re.search(start, out), out
    assert len(out.splitlines()) <= 4


def test_without_docstrings(tmp_path):
    """PYTHONOPTIMIZE=2 removes the text that lessons train on: one line says so."""
    script = str(jobs.PATHS[COLLECTIVES])
    command = [sys.executable, "-OO", script]
    done = subprocess.run(command, env=jobs.CLEAN_ENV, capture_output=True, text=True)
    start = f"torchrun --standalone --nproc_per_node=2 {script}"
    assert done.returncode == 2 and start in done.stdout and done.stderr == ""
    env = jobs.CLEAN_ENV | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == "error: PYTHONOPTIMIZE=2 removes docstrings, our training text\n"
    )


@pytest.mark.parametrize("copied, says", [
    ([], "No module named 'course'"),
    (["course.py"], "no 00_collectives.py in the folder above"),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_without_its_repository(tmp_path, copied, says, ranks):
    """One line, by one rank; the others wait for torchrun, which ends them."""
    folder = tmp_path / "beyond"
    folder.mkdir()
    path = jobs.PATHS[SAME_BITS]
    for name in (path.name, *copied):
        shutil.copy(path.with_name(name), folder)
    script = folder / path.name
    if ranks == 1:
        done = jobs.watch([sys.executable, str(script)], 300, {})
        assert done.code == 2
    else:
        done = jobs.torchrun(script, ranks, limit=300)
        assert done.code != 0 and re.search(r"exitcode +: 2 ", done.err)
    assert done.out == "" and done.left == []
    line = f"error: this script imports the course's lessons: {says}\n"
    assert done.err.count("error: this") == done.err.count(line) == 1
    assert str(script) not in re.sub(r"(?m)^.*FAILED.*$", "", done.err), "no traceback"


def test_the_command_has_the_flags_that_were_given():
    _, out, _ = jobs.run_here(MLP, "--hidden", "32", "--only", "2")
    assert out.splitlines()[-1].endswith("01_naive_mlp_tp.py --hidden 32 --only 2"), out


def test_torchrun_names_the_rank_whose_words_are_printed(tmp_path):
    """Its root cause is the earliest failure; the others may end by a signal."""
    times = []
    for rank in (1, 0):  # rank 0 writes last, and is the one that reports
        told = tmp_path / f"{rank}.json"
        env = as_rank(rank, 2) | {"TORCHELASTIC_ERROR_FILE": str(told)}
        assert jobs.run_here(MLP, "--hidden", "65", **env)[0] == 2
        report = json.loads(told.read_text())["message"]
        times.append(int(report["extraInfo"]["timestamp"]))
    assert times[1] < times[0]


def test_one_rank_of_each_host_says_what_is_wrong():
    """A wrong flag on one host only: nobody else knows it."""
    env = as_rank(2, 4) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    code, out, err = jobs.run_here(MLP, "--hidden", "65", **env)
    assert (code, out) == (2, "") and "--hidden 65" in message(err)
    env["RANK"] = "3"
    env["LOCAL_RANK"] = "1"
    assert jobs.run_here(MLP, "--hidden", "65", **env) == (2, "", "")


@pytest.mark.parametrize("tool, flags, words", [
    ("tools/check.py", ["--port", "99999"], "99999: ports are 0 to 65535"),
    ("notebooks/run.py", ["nope"], "error: there is no notebook nope; there are: 00_"),
])  # fmt: skip
def test_wrong_use_of_a_tool_is_one_line(tool, flags, words):
    command = [sys.executable, str(jobs.ROOT / tool), *flags]
    done = subprocess.run(command, env=jobs.CLEAN_ENV, capture_output=True, text=True)
    assert done.returncode in (1, 2) and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lesson", jobs.LESSONS)
def test_help_and_list_by_rank_0_alone(lesson):
    for env in ({}, as_rank(0, 2)):
        code, out, err = jobs.run_here(lesson, "--help", **env)
        assert code == 0 and err == "" and out.startswith("usage: ")
        for flag in ("seed", "dtype", "only", "break", "json", "timeout"):
            assert re.search(rf"^  --{flag}\b", out, re.M), flag
        assert max(map(len, out.splitlines())) <= 88
    for flags in (["--help"], ["--break", "list"]):
        assert jobs.run_here(lesson, *flags, **as_rank(1, 2)) == (0, "", "")
