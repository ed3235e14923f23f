"""What a user can get wrong gets one line, exit code 2 and no traceback.

They run in this process, for they come before any group is made; what torchrun makes of
them is in test_faults.py.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import jobs
import pytest
from runs import (
    COLLECTIVES,
    MESH,
    MESH_2D,
    MLP,
    SAME_BITS,
    SCHEDULES,
    SEQUENCE,
    TRANSFORMER,
    VOCAB,
)

# Flags, and what the message must say; if nothing stands there, the flags themselves.
SHARED = [  # the same in all lessons
    ("--dtype bfloat16", "--dtype", "bfloat16", "float64"),
    ("--device cuda", "--device"),
    ("--json no/such/folder/out.json", "no/such/folder"),
    ("--json tests", "tests"),
    ("--colour red", "--colour"),
    ("--se 3", "--se"),
    ("--seed 0",), ("--seed -3",), ("--seed first",), (f"--seed {2**64}",),
    ("--timeout 0",), (f"--timeout {'9' * 14}",), ("--timeout 1.5",),
    ("--json",), ("extra",),
]  # fmt: skip
OF_01 = [  # and on how many ranks
    (4, "--hidden 66", "--hidden 66", "66 % 4", "= 2", "--hidden 68"),
    (3, "--width 64", "--width 64", "3"),
    (4, "--width 4", "--width 4", "one column", "take --width 8"),
    (4, "--batch-size 6", "--batch-size 6", "4"),
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
    ("--pp 3", "--pp 3 = 3", "4 ranks", "take --nproc_per_node=3"),
    ("--pp 4 --layers 3", "--layers 3", "--pp 4", "take --layers 4"),
    ("--pp 2 --layers 1", "--layers 1", "--pp 2", "take --layers 2"),
    ("--tp 4 --kv-heads 2", "--kv-heads 2", "4 ranks", "beyond/09_shared_heads.py"),
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
]  # fmt: skip
REFUSED = [
    *((COLLECTIVES, 2, *case) for case in SHARED),
    *((MLP, *case) for case in OF_01),
    *((MESH_2D, *case) for case in OF_13),
    *((TRANSFORMER, 4, *case) for case in OF_MODEL),
    *((lesson, 4, "--kv-heads 2", "beyond/09_shared") for lesson in (VOCAB, SEQUENCE)),
    *((MESH, 4, *case) for case in OF_05),
    *((SCHEDULES, *case) for case in OF_14),
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
        assert err == report + "\n"  # torchrun ends all ranks after the first
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
def test_advice_is_right(lesson):
    """Who does what is said gets a run, however many flags were wrong."""
    draw = random.Random(lesson)
    refused = 0
    for _ in range(100):
        flags = {}
        for name, largest in SIZES[lesson].items():
            if draw.random() < 0.7:
                flags[name] = draw.randint(1, largest)
        ranks = draw.choice([2, 3, 4, 6])
        said = refusal(lesson, flags, ranks)
        refused += said != ""
        tries = []
        while said and not said.startswith("--hidden 2: "):
            tries.append(said)
            flags.update(re.findall(r"--(\S+) (\d+)", said.partition("; take ")[2]))
            said = refusal(lesson, flags, ranks)
            assert len(tries) <= len(SIZES[lesson]), tries
    assert refused > 30


def refusal(lesson: str, flags: dict, ranks: int) -> str:
    """What a lesson says of these flags; "" if it takes them."""
    module = jobs.load(lesson)
    add_flags, sizes = {
        MLP: (add_flags_of_mlp, "sizes_of_mlp"),
        TRANSFORMER: (getattr(module, "add_model_flags", None), "transformer_sizes"),
        MESH: (getattr(module, "add_mesh_flags", None), "sizes_of_mesh"),
    }[lesson]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = [word for name, n in flags.items() for word in (f"--{name}", str(n))]
    args = parser.parse_args(words)
    args.ranks, args.dtype, args.seed = ranks, "float32", 1
    try:
        getattr(module, sizes)(args)
    except ValueError as error:
        return str(error)
    return ""


def add_flags_of_mlp(parser) -> None:
    """As the last lines of lesson 01 do."""
    for flag in ("--hidden", "--width", "--batch-size"):
        parser.add_argument(flag, type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=8)


HUGE = {"257": "tried to allocate 2056000000000 bytes", str(2**31 - 1): "overflowed"}


def too_large(rows: str):
    flags = ("--vocab-size", rows, "--hidden", str(2 * 10**9))
    return jobs.launch(jobs.DOCTOR, 2, jobs.PATHS[TRANSFORMER], *flags)


@pytest.mark.parametrize("rows", [
    pytest.param(rows, marks=pytest.mark.ahead.with_args(too_large, rows))
    for rows in HUGE
])  # fmt: skip
def test_sizes_that_fit_no_memory(rows):
    done = jobs.begin(too_large, rows).result()
    said = " ".join(jobs.bug.what_failed("", done.err).split())
    assert HUGE[rows] in said and "this machine has" in said, done.err
    assert said.startswith("doctor: too large") and done.code == 1


@pytest.mark.parametrize("lesson", jobs.LESSONS)
def test_without_torchrun(lesson):
    code, out, err = jobs.run_here(lesson, "--timeout", "5", RANK="abc")  # a cluster's
    assert code == 2 and out == ""
    start = rf"torchrun --standalone --nproc_per_node=2 \S*{lesson}\.py --timeout 5$"
    assert re.search(start, message(err)), err


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


def test_one_rank_of_each_host_says_what_is_wrong():
    """A wrong flag on one host only: nobody else knows it."""
    env = as_rank(2, 4) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    code, out, err = jobs.run_here(MLP, "--hidden", "65", **env)
    assert (code, out) == (2, "") and "--hidden 65" in message(err)
    env["RANK"] = "3"
    env["LOCAL_RANK"] = "1"
    assert jobs.run_here(MLP, "--hidden", "65", **env)[0] == 2  # later, if at all


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
def test_help(lesson):
    code, out, err = jobs.run_here(lesson, "--help")
    assert code == 0 and err == "" and out.startswith("usage: ")
    for flag in ("seed", "dtype", "json", "timeout"):
        assert re.search(rf"^  --{flag}\b", out, re.M), flag
    assert max(map(len, out.splitlines())) <= 88


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_a_system_that_refuses_another_scheduler_is_forgiven(monkeypatch):
    """Ranks ask that who is woken waits for its turn. A sandbox may not allow it."""
    refuse = mock.Mock(side_effect=PermissionError)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    code, _, err = jobs.run_here("01_naive_mlp_tp", "--hidden", "0")
    assert code == 2 and err.startswith("error: ") and "PermissionError" not in err
    assert [call.args[:2] for call in refuse.call_args_list] == [(0, os.SCHED_BATCH)]
