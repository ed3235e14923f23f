"""What a user can get wrong gets one line, exit code 2, no traceback, on every rank.

Most refusals run in this process: they come before any group is made. A few go through
torchrun, for what it makes of them.
"""

import json
import re

import jobs
import pytest

COLLECTIVES, MLP = "00_collectives", "01_naive_mlp_tp"
TRANSFORMER, VOCAB = "02_transformer_tp", "03_vocab_parallel"
SEQUENCE = "04_sequence_parallel"

# lesson, ranks, flags, what the message must say. What holds for the flags that all
# lessons share is tried on one of them.
BOTH = [
    (("--break", "nope"), "--break nope", "list"),
    (("--steps", "0"), "--steps", "0"),
    (("--steps", "-3"), "--steps", "-3"),
    (("--timeout", "0"), "--timeout", "0"),
    (("--break", ""), "--break"),
    (("--seed", "first"), "--seed", "first"),
    (("--seed", str(2**64)), "--seed", str(2**64)),
    (("--dtype", "float16"), "--dtype", "float16", "bfloat16"),
    (("--device", "tpu"), "--device", "tpu"),
    (("--device", "cuda"), "--device cuda", "GPU"),
    (("--json", "no/such/folder/out.json"), "--json no/such/folder", "no/such/folder"),
    (("--json", "tests"), "--json", "tests"),
    (("--colour", "red"), "--colour"),
    (("extra",), "extra"),
    (("--json",), "--json"),
]
REFUSED = [(lesson, 2, *case) for lesson in (COLLECTIVES, MLP) for case in BOTH]
REFUSED += [
    (COLLECTIVES, 1, ("--break", "skip"), "--break", "2 ranks"),
    (MLP, 1, ("--break", "f"), "--break", "2 ranks"),
    (MLP, 4, ("--hidden", "66"), "--hidden 66", "66 % 4", "= 2", "--hidden 68"),
    (MLP, 3, (), "--hidden 64", "64 % 3", "= 1", "--hidden 66"),
    (MLP, 4, ("--width", "130"), "--width 130", "130 % 4", "= 2", "--width 132"),
    (MLP, 4, ("--batch-size", "6"), "--batch-size 6", "6 % 4", "--batch-size 8"),
    (MLP, 2, ("--hidden", "0"), "--hidden", "0"),
    (MLP, 2, ("--hidden", "-64"), "--hidden", "-64"),
    (MLP, 2, ("--hidden", "1.5"), "--hidden", "1.5"),
    (MLP, 2, ("--width", "wide"), "--width", "wide"),
    (MLP, 2, ("--width", "0"), "--width", "0"),
    (MLP, 2, ("--batch-size", "-8"), "--batch-size", "-8"),
    (MLP, 2, ("--seq-len", "0"), "--seq-len", "0"),
    (MLP, 4, ("--mesh", "2"), "--mesh 2", "2x2"),
    (MLP, 4, ("--mesh", "two"), "--mesh two", "2x2"),
    (MLP, 4, ("--mesh", "2x2x1"), "--mesh 2x2x1", "2x2"),
    (MLP, 4, ("--mesh=-2x-2",), "--mesh -2x-2", "2x2"),
    (MLP, 4, ("--mesh", "2,2"), "--mesh 2,2", "2x2"),
    (MLP, 4, ("--mesh", "3x2"), "--mesh 3x2", "3 × 2 = 6", "4 ranks"),
    (MLP, 4, ("--mesh", "0x4"), "--mesh 0x4", "= 0", "4 ranks"),
    (MLP, 8, ("--mesh", "2x2"), "--mesh 2x2", "2 × 2 = 4", "8 ranks"),
]
# lesson 02's sizes, which lesson 03 shares
MODEL = [
    (4, ("--hidden", "66"), "--hidden 66", "66 % 8 = 2", "--hidden 72"),
    (3, (), "--heads 8", "3 (ranks", "8 % 3 = 2", "--heads 9"),
    (4, ("--heads", "6", "--hidden", "48"), "--heads 6", "6 % 4 = 2", "--heads 8"),
    (16, (), "--heads 8", "8 % 16 = 8", "--heads 16"),
    (2, ("--kv-heads", "3"), "--heads 8", "3 (--kv-heads", "8 % 3 = 2"),
    (4, ("--kv-heads", "2"), "--kv-heads 2", "2 % 4 = 2", "--kv-heads 4"),
    (2, ("--kv-heads", "0"), "--kv-heads", "0"),
    (2, ("--hidden", "40"), "--hidden 40", "--heads 8", "= 5", "even"),
    (2, ("--hidden", "8"), "--hidden 8", "= 1", "even"),
    (2, ("--layers", "0"), "--layers", "0"),
    (2, ("--seq-len", "-1"), "--seq-len", "-1"),
    (2, ("--batch-size", "0"), "--batch-size", "0"),
    (2, ("--vocab-size", "256"), "--vocab-size 256", "257"),
    (2, ("--vocab-size", "0"), "--vocab-size", "0"),
    (2, ("--dropout", "1"), "--dropout 1", "below 1"),
    (2, ("--dropout", "-0.1"), "--dropout -0.1", "below 1"),
    (2, ("--dropout", "nan"), "--dropout nan", "below 1"),
    (2, ("--dropout", "some"), "--dropout", "some"),
    (2, ("--clip", "0"), "--clip 0", "above 0"),
    (2, ("--clip", "-1"), "--clip -1", "above 0"),
    (2, ("--clip", "nan"), "--clip nan", "above 0"),
]
REFUSED += [
    (lesson, *case) for lesson in (TRANSFORMER, VOCAB, SEQUENCE) for case in MODEL
]
REFUSED += [
    (TRANSFORMER, 1, ("--break", "clip"), "--break", "2 ranks"),
    (TRANSFORMER, 2, ("--profile", "no/such"), "--profile no/such", "no such folder"),
    (TRANSFORMER, 2, ("--profile", "Makefile"), "--profile Makefile", "folder"),
    (TRANSFORMER, 2, ("--json", "no/such/out.json"), "--json no/such", "no folder"),
    (VOCAB, 2, ("--prompt", ""), "--prompt", "one byte"),
    (VOCAB, 2, ("--temperature", "-1"), "--temperature -1", "0 or more"),
    (VOCAB, 2, ("--temperature", "nan"), "--temperature nan", "0 or more"),
    (VOCAB, 2, ("--temperature", "inf"), "--temperature inf"),
    (VOCAB, 2, ("--train", "0"), "--train", "0"),
    (VOCAB, 2, ("--write", "0"), "--write", "0"),
    (VOCAB, 1, ("--break", "mean"), "--break", "2 ranks"),
    (SEQUENCE, 1, ("--break", "norms"), "--break", "2 ranks"),
    (SEQUENCE, 2, ("--break", "norm"), "--break norm", "norms, row-bias"),
    (SEQUENCE, 2, ("--profile", "."), "--profile"),
    (SEQUENCE, 4, ("--hf", "--kv-heads", "2"), "--kv-heads 2", "2 % 4 = 2"),
]
MESH = "05_3d_parallel"
REFUSED += [
    (MESH, ranks, flags, *words) for ranks, flags, *words in MODEL
    if flags and flags[0] not in ("--dropout",) and ranks == 2
    and flags not in (("--dtype", "bfloat16"),)
]  # fmt: skip
REFUSED += [
    (MESH, 8, ("--dp", "3"), "--dp 3 × --pp 1 × --tp 1 = 3", "8 ranks"),
    (MESH, 8, ("--tp", "3"), "--tp 3", "8 ranks", "= "),
    (MESH, 4, ("--pp", "2", "--tp", "2", "--dp", "2"), "= 8", "4 ranks"),
    (MESH, 8, ("--dp", "0"), "--dp", "0"),
    (MESH, 8, ("--pp", "-2"), "--pp", "-2"),
    (MESH, 8, ("--pp", "8"), "--pp 8", "--layers 4", "--layers 8"),
    (MESH, 2, ("--pp", "2", "--layers", "1"), "--pp 2", "--layers 1", "--layers 2"),
    (MESH, 8, ("--microbatches", "3"), "--batch-size 16", "= 6", "--batch-size 18"),
    (MESH, 8, ("--batch-size", "4"), "--batch-size 4", "4 % 8 = 4", "--batch-size 8"),
    (MESH, 8, ("--microbatches", "0"), "--microbatches", "0"),
    (MESH, 8, ("--schedule", "zigzag"), "--schedule", "zigzag"),
    (MESH, 8, ("--tp", "8", "--heads", "4"), "--heads 4", "8 (--tp)", "4 % 8 = 4"),
    (MESH, 8, ("--kv-heads", "1"), "--kv-heads 1", "1 % 2 = 1"),
    (MESH, 8, ("--dtype", "bfloat16"), "--dtype bfloat16", "--bf16"),
    (MESH, 8, ("--simulate-compute", "0"), "--simulate-compute", "0"),
    (MESH, 1, ("--break", "norm"), "--break", "2 ranks"),
    (MESH, 8, ("--break", "norm", "--tp", "1"), "--break norm", "--tp 2"),
    (MESH, 2, ("--break", "order", "--pp", "1"), "--break order", "--pp 2"),
    (MESH, 8, ("--load", "no/such"), "--load no/such", "no finished checkpoint"),
    (MESH, 8, ("--load", "tests"), "--load tests", "no finished checkpoint"),
    (MESH, 8, ("--save", "no/such/folder"), "--save no/such/folder", "no folder"),
    (MESH, 8, ("--save", "Makefile"), "--save Makefile", "no folder"),
]


OLD = [lesson for lesson in jobs.LESSONS if lesson not in jobs.NEW_ANATOMY]
REFUSED = [case for case in REFUSED if case[0] in OLD]


def as_rank(rank: int, ranks: int) -> dict:
    """The environment torchrun gives a rank, without an address to meet at."""
    keys = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return dict(zip(keys, map(str, (rank, ranks, rank, ranks))))


@pytest.mark.parametrize("lesson, ranks, flags, words", [
    pytest.param(*case[:3], case[3:], id=f"{case[0][:2]} {case[1]} {' '.join(case[2])}")
    for case in REFUSED
])  # fmt: skip
def test_refused_with_one_line(lesson, ranks, flags, words, tmp_path):
    told = tmp_path / "error.json"
    said = []
    for rank in {0, ranks - 1}:
        env = as_rank(rank, ranks) | {"TORCHELASTIC_ERROR_FILE": str(told)}
        code, out, err = jobs.run_here(lesson, *flags, **env)
        assert code == 2 and out == ""
        said.append(json.loads(told.read_text())["message"]["message"])
        told.unlink()
        if rank == 0:
            assert re.fullmatch(r"error: .*\n", err), err
            assert err.strip() == said[-1]
        else:
            assert err == "", "rank 0 alone says it"
    assert len(set(said)) == 1
    for word in words:
        assert word in said[0], said[0]


@pytest.mark.alone
@pytest.mark.parametrize("lesson, ranks, flags", [
    case for case in (
    (MLP, 4, ("--hidden", "66")),
    (MLP, 2, ("--device", "cuda")),
    (TRANSFORMER, 4, ("--kv-heads", "2")),
    (COLLECTIVES, 2, ("--break", "nope")),
    ) if case[0] in OLD
])  # fmt: skip
def test_refused_under_torchrun(lesson, ranks, flags):
    done = jobs.torchrun(jobs.ROOT / f"{lesson}.py", ranks, *flags, limit=40)
    assert done.code == 1 and done.out == ""
    assert len(re.findall(r"^error: ", done.err, re.M)) == 1, done.err
    exits = re.findall(r"exitcode +: (\S+)", done.err)
    assert "2" in exits and set(exits) <= {"2", "-15"}, exits  # rank 0; told to stop
    report = done.err.partition("Root Cause")[2]
    assert re.search(r"error: .*" + re.escape(" ".join(flags)), report), done.err
    assert not re.search(r'File "[^"]*/0\d_\w+\.py"', done.err), done.err
    assert done.left == [] and done.wall < 30


@pytest.mark.parametrize("lesson", OLD)
def test_without_torchrun(lesson):
    code, out, err = jobs.run_here(lesson)
    assert code == 2 and err == ""
    ranks = 8 if lesson.startswith("05") else 2
    command = f"torchrun --standalone --nproc_per_node={ranks} {lesson}.py"
    assert command in out and len(out.splitlines()) <= 4


@pytest.mark.parametrize("lesson", OLD)
@pytest.mark.parametrize("env", [{}, as_rank(0, 2)], ids=["alone", "rank 0"])
def test_help(lesson, env):
    code, out, err = jobs.run_here(lesson, "--help", **env)
    assert code == 0 and err == "" and out.startswith("usage: ")
    for flag in ("steps", "seed", "dtype", "device", "break", "json", "timeout"):
        assert re.search(rf"^  --{flag}\b", out, re.M), flag
    assert max(map(len, out.splitlines())) <= 88


@pytest.mark.parametrize("lesson", OLD)
def test_list_of_breaks(lesson):
    code, out, err = jobs.run_here(lesson, "--break", "list")
    breaks = jobs.load(lesson).BREAKS
    assert code == 0 and err == ""
    wanted = [[name, broken.what] for name, broken in breaks.items()]
    assert [line.split(maxsplit=1) for line in out.splitlines()] == wanted
    for flags in ("--break", "list"), ("--help",):
        assert jobs.run_here(lesson, *flags, **as_rank(1, 2)) == (0, "", "")
