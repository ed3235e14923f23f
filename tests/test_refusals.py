"""What a user can get wrong gets one message, exit code 2, no traceback, by rank 0.

Most refusals run in this process: they come before any group is made. A few go through
torchrun, for what it makes of them.
"""

import json
import re
import subprocess
import sys

import jobs
import pytest
from runs import COLLECTIVES, MESH, MLP, SEQUENCE, TRANSFORMER, VOCAB

# Flags, what the message must say: of flags that all lessons share, tried on one.
SHARED = [
    (("--break", "nope"), "--break", "nope", "list"),
    (("--break", ""), "--break"),
    (("--seed", "0"), "--seed", "0"),
    (("--seed", "-3"), "--seed", "-3"),
    (("--seed", "first"), "--seed", "first"),
    (("--seed", str(2**64)), "--seed", str(2**64)),
    (("--timeout", "0"), "--timeout", "0"),
    (("--timeout", "9" * 14), "--timeout", "9" * 14),
    (("--timeout", "1.5"), "--timeout", "1.5"),
    (("--only", "0"), "--only", "0"),
    (("--dtype", "bfloat16"), "--dtype", "bfloat16", "float64"),
    (("--device", "cuda"), "--device"),
    (("--json", "no/such/folder/out.json"), "no/such/folder"),
    (("--json", "tests"), "tests"),
    (("--json",), "--json"),
    (("--colour", "red"), "--colour"),
    (("--se", "3"), "--se"),
    (("extra",), "extra"),
]
REFUSED = [(lesson, 2, *case) for lesson in (COLLECTIVES, MESH) for case in SHARED]
REFUSED += [
    (COLLECTIVES, 1, ("--break", "skip"), "--break", "2 ranks"),
    (MLP, 4, ("--hidden", "66"), "--hidden 66", "66 % 4", "= 2", "--hidden 68"),
    (MLP, 3, ("--width", "64"), "--width 64", "3"),
    (MLP, 4, ("--batch-size", "6"), "--batch-size 6", "4"),
    (MLP, 2, ("--steps", "0"), "--steps", "0"),
    (MLP, 2, ("--hidden", "0"), "--hidden", "0"),
    (MLP, 2, ("--hidden", "-64"), "--hidden", "-64"),
    (MLP, 2, ("--hidden", "1.5"), "--hidden", "1.5"),
    (MLP, 2, ("--width", "wide"), "--width", "wide"),
    (MLP, 4, ("--mesh", "2x3"), "--mesh 2x3", "2 · 3 = 6", "4 ranks"),
    (MLP, 4, ("--mesh", "2x"), "--mesh 2x", "4 ranks"),
    (MLP, 4, ("--mesh", "two"), "--mesh two", "4 ranks"),
]
# Of the model's sizes, which 02 to 05 share.
MODEL = [
    (("--heads", "6", "--hidden", "48"), "--heads 6", "4"),
    (("--kv-heads", "2"), "--kv-heads 2", "4"),
    (("--kv-heads", "0"), "--kv-heads", "0"),
    (("--layers", "0"), "--layers", "0"),
    (("--seq-len", "-1"), "--seq-len", "-1"),
    (("--vocab-size", "256"), "--vocab-size 256", "257"),
    (("--dropout", "1"), "--dropout", "1"),
    (("--dropout", "nan"), "--dropout", "nan"),
]
REFUSED += [
    (lesson, 4, *case) for lesson in (TRANSFORMER, VOCAB, SEQUENCE) for case in MODEL
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


def refused(lesson, ranks, flags, told) -> str:
    """The message with which every rank refuses, and which rank 0 alone prints."""
    said = set()
    for rank in {0, ranks - 1}:
        env = as_rank(rank, ranks) | {"TORCHELASTIC_ERROR_FILE": str(told)}
        code, out, err = jobs.run_here(lesson, *flags, **env)
        assert (code, out) == (2, "")
        report = json.loads(told.read_text())["message"]["message"]
        told.unlink()
        said.add(message(report))
        assert err == (report + "\n" if rank == 0 else "")
    (text,) = said
    return text


@pytest.mark.parametrize("lesson, ranks, flags, words", [
    pytest.param(*case[:3], case[3:], id=f"{case[0][:2]} {case[1]} {' '.join(case[2])}")
    for case in REFUSED
])  # fmt: skip
def test_refused(lesson, ranks, flags, words, tmp_path):
    text = refused(lesson, ranks, flags, tmp_path / "error.json")
    for word in words:
        assert word in text, text


@pytest.mark.alone
@pytest.mark.parametrize("lesson, ranks, flags", [
    case for case in [
        (MLP, 4, ("--hidden", "66")),
        (COLLECTIVES, 2, ("--break", "nope")),
    ] if case[0] in jobs.LESSONS
])  # fmt: skip
def test_refused_under_torchrun(lesson, ranks, flags):
    done = jobs.torchrun(jobs.PATHS[lesson], ranks, *flags, limit=40)
    assert done.code == 1 and done.out == ""
    assert len(re.findall(r"^error: ", done.err, re.M)) == 1, done.err
    exits = re.findall(r"exitcode +: (\S+)", done.err)
    assert "2" in exits and set(exits) <= {"2", "-15"}, exits  # rank 0; told to stop
    report = done.err.partition("Root Cause")[2]
    assert re.search(r"error: .*" + re.escape(flags[1]), report), done.err
    assert not re.search(r'File "[^"]*/0\d_\w+\.py"', done.err), done.err
    assert done.left == [] and done.wall < 30


@pytest.mark.parametrize("lesson", jobs.LESSONS)
def test_without_torchrun(lesson):
    code, out, err = jobs.run_here(lesson)
    assert code == 2 and err == ""
    ranks = 8 if lesson == MESH else 2
    assert f"torchrun --standalone --nproc_per_node={ranks} {lesson}.py" in out
    assert len(out.splitlines()) <= 4


def test_without_torchrun_in_a_process_of_its_own():
    script = [sys.executable, str(jobs.PATHS[COLLECTIVES])]
    env = jobs.CLEAN_ENV | {"RANK": "abc"}
    done = subprocess.run(
        script, env=env, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 2 and "torchrun" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("lesson", jobs.LESSONS)
@pytest.mark.parametrize("env", [{}, as_rank(0, 2)], ids=["alone", "rank 0"])
def test_help(lesson, env):
    code, out, err = jobs.run_here(lesson, "--help", **env)
    assert code == 0 and err == "" and out.startswith("usage: ")
    for flag in ("seed", "dtype", "only", "break", "json", "timeout"):
        assert re.search(rf"^  --{flag}\b", out, re.M), flag
    assert max(map(len, out.splitlines())) <= 88


@pytest.mark.parametrize("flags", [("--break", "list"), ("--help",)])
def test_rank_0_alone_answers(flags):
    for lesson in jobs.LESSONS:
        assert jobs.run_here(lesson, *flags, **as_rank(1, 2)) == (0, "", "")
