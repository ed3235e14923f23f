"""The lessons' runs that several tests look at, and how a test asks for them."""

import re

import jobs
import pytest

COLLECTIVES, MLP = "00_collectives", "01_naive_mlp_tp"
TRANSFORMER, VOCAB = "02_transformer_tp", "03_vocab_parallel"
SEQUENCE, MESH = "04_sequence_parallel", "05_3d_parallel"
SAME_BITS, SHARED_HEADS = "08_same_bits", "09_shared_heads"
CHECKPOINTS, CONTEXT = "10_checkpoints", "11_context_parallel"
MESH_2D = "13_mesh_2d"
SCHEDULES = "14_schedules"
EXPERTS = "16_expert_parallel"
ZERO = "15_zero"
IN_PIECES = "18_in_pieces"
# What CONTRIBUTING.md allows: of a loss, of any other tensor.
ALLOWED = {"float64": (1e-12, 1e-12), "float32": (1e-6, 1e-5)}

PROOF = ("--dtype", "float64")
BY_3 = ("--hidden", "48", "--batch-size", "6")  # sizes that 3 divides
SHORT = ("--steps", "2", "--microbatches", "2")
DEFAULTS = [(lesson, 2) for lesson in jobs.LESSONS if lesson != MESH]
DEFAULTS += [(COLLECTIVES, 1), (COLLECTIVES, 3), (COLLECTIVES, 4)]
DEFAULTS += [(MESH, ranks) for ranks in (1, 2, 3, 4, 8)]
# One rank and four, on one model: what more ranks must not change.
ALIKE = {
    lesson: [(lesson, 1, *PROOF), (lesson, 4, *PROOF)]
    for lesson in (MLP, TRANSFORMER, VOCAB, SEQUENCE)
}
WITH_FLAGS = [
    (MLP, 2, *PROOF, "--hidden", "32", "--width", "96", "--seed", "7"),
    (MLP, 3, *BY_3, "--steps", "2", "--seq-len", "5"),
    (MLP, 2, "--steps", "60"),  # SGD stays stable
    (TRANSFORMER, 3, *PROOF, "--heads", "9", "--kv-heads", "3", "--hidden", "72"),
    (TRANSFORMER, 2, "--kv-heads", "2", "--hidden", "160", "--vocab-size", "300",
     "--heads", "4", "--batch-size", "3", "--seq-len", "40", "--steps", "5",
     "--layers", "1", "--dropout", "0"),
    (VOCAB, 3, *PROOF, "--tie"),  # which shares out 257 rows unevenly
    (MESH, 4, "--dp", "2", "--ragged", *PROOF, "--heads", "4", "--kv-heads", "2",
     "--seq-len", "61", "--schedule", "gpipe"),
    # No mean of ragged lengths is a whole number here.
    (MESH, 2, "--ragged", "--microbatches", "3", "--batch-size", "6", "--steps", "2",
     "--seed", "4"),
    (MESH, 4, "--pp", "4", "--microbatches", "8"),
    *((MESH, 4, f"--{axis}", "4", *SHORT, "--layers", "1") for axis in ("dp", "tp")),
    *((SHARED_HEADS, ranks) for ranks in (1, 4)),
    (SHARED_HEADS, 8, *PROOF, "--steps", "2"),
    *((SHARED_HEADS, 4, "--kv-heads", kv_heads) for kv_heads in "14"),  # notebook 09
    *((MESH_2D, ranks) for ranks in (1, 2, 4)),
    (MESH_2D, 3, *BY_3, "--steps", "2", "--seq-len", "5"),
    (MESH_2D, 4, *PROOF, "--mesh", "1x4", "--width", "96"),
    (MESH_2D, 8, *PROOF, "--mesh", "2x4", "--steps", "2"),
]  # fmt: skip
# Of a script of beyond/, whose tables are not those of a lesson.
CHECKPOINT_RUNS = [
    (CHECKPOINTS, 1, "--steps", "2"),
    (CHECKPOINTS, 2),
    (CHECKPOINTS, 3, "--steps", "2"),
    (CHECKPOINTS, 4, *PROOF, "--tie", "--zero", "--steps", "2"),
]
ONE_KV_HEAD = ("--heads", "4", "--kv-heads", "1")
CONTEXT_RUNS = [(CONTEXT, ranks) for ranks in (1, 2, 3)]
CONTEXT_RUNS += [
    *((CONTEXT, 2, "--heads", "8", "--kv-heads", kv_heads) for kv_heads in "28"),
    (CONTEXT, 4, "--tp", "2"),  # these three are notebook 11's, too
    (CONTEXT, 4, *PROOF, "--tp", "2", "--steps", "2", "--layers", "1"),
    (CONTEXT, 4, *PROOF, *ONE_KV_HEAD, "--no-ulysses", "--steps", "2"),
    # Lines of the text end before most positions: ranks without any target.
    (CONTEXT, 8, *PROOF, "--seq-len", "160", "--batch-size", "1", "--layers", "1"),
]
SCHEDULE_RUNS = [
    (SCHEDULES, 1, "--sleep", "5"),
    (SCHEDULES, 2, *PROOF, "--sleep", "0", "--microbatches", "6"),
    (SCHEDULES, 4),
    (SCHEDULES, 4, *PROOF, "--sleep", "5", "--chunks", "4", "--layers", "18"),
]
EXPERT_RUNS = [(EXPERTS, ranks) for ranks in (1, 2, 3, 4)]
EXPERT_RUNS += [
    (EXPERTS, 4, *PROOF, "--top-k", "3", "--balance", "0"),
    *((EXPERTS, 4, axis, "2") for axis in ("--ep", "--tp")),  # notebook 16 runs these
    (EXPERTS, 8, *PROOF, "--ep", "2", "--tp", "2", "--top-k", "1", "--steps", "2"),
    # More experts than rows: most get none.
    (EXPERTS, 4, *PROOF, "--experts", "32", "--seq-len", "2", "--steps", "2",
     "--layers", "4"),
]  # fmt: skip
SAME_BITS_RUNS = [(SAME_BITS, ranks) for ranks in (1, 2, 4, 8)]
SAME_BITS_RUNS += [(SAME_BITS, 4, *PROOF, "--layers", "1", "--seed", "5")]
ZERO_RUNS = [(ZERO, ranks) for ranks in (1, 4)]
ZERO_RUNS += [
    (ZERO, 3, "--steps", "2"),
    (ZERO, 4, *PROOF, "--microbatches", "3", "--batch-size", "12", "--steps", "2",
     "--layers", "1"),
    (ZERO, 2, *PROOF, "--tp", "2", "--microbatches", "1"),
    (ZERO, 4, "--microbatches", "4", "--stages", "4"),  # notebook 15 runs these two
    (ZERO, 4, "--bf16", "--steps", "2"),
]  # fmt: skip
IN_PIECES_RUNS = [(IN_PIECES, ranks) for ranks in (1, 2)]
IN_PIECES_RUNS += [
    (IN_PIECES, 2, "--pieces", "1", "--steps", "2"),
    (IN_PIECES, 3, *PROOF, "--pieces", "5", "--seq-len", "30", "--layers", "1"),
    (IN_PIECES, 4, *PROOF, "--pieces", "8", "--steps", "2"),
]
# Scripts beside lesson 05, which have no number.
QWEN2 = "hugging_face"  # lesson 04's plan on it
TIED, STAGES = "tied_stages", "pytorch_stages"
TIED_RUNS = [
    (TIED, 2),
    (TIED, 4, "--dp", "2", "--ragged", *PROOF, "--schedule", "gpipe"),
]
STAGES_RUNS = [(STAGES, 8), (STAGES, 4, "--dp", "2", *PROOF, "--schedule", "gpipe")]
STAGES_RUNS += [(STAGES, 4, "--pp", "4", "--microbatches", "2")]  # 1F1B needs M ≥ P
ALL_RUNS = DEFAULTS + WITH_FLAGS + [run for pair in ALIKE.values() for run in pair]


def flag(run, name, default):
    return run[run.index(name) + 1] if name in run else default


def over(runs):
    """Parametrize a test by runs, each launched ahead of it."""
    cases = [
        pytest.param(run, id=" ".join(map(str, run)), marks=pytest.mark.launches(*run))
        for run in runs
    ]
    return pytest.mark.parametrize("run", cases)


# Kinds of checks that allow no difference.
EXACT = "runs replicas blocks bits calls bytes memory saved loaded bitwise interrupted"


def passed(run, most=55):
    """A run of a script of beyond/ that passed: its verdict, a clean screen (of so many
    lines by default on a laptop), and no check allows more than CONTRIBUTING.md."""
    done = jobs.result(*run)
    assert done.code == 0, done.text
    lines = done.out.splitlines()
    words = f"PASS  {run[0]}  {len(done.data['checks'])} checks, "
    assert lines[-1].startswith(words), lines[-1]
    assert not re.search("FAIL|[✗≠]", done.out)
    assert "Traceback" not in done.err and "Warning" not in done.err, done.err
    assert done.left == []
    assert [line for line in lines if len(line) > 88 or line != line.rstrip()] == []
    is_default = len(run) == 2 and run[1] <= 2
    assert 30 < len(lines) <= (most if is_default else 100)
    of_loss, of_tensor = ALLOWED[done.data["dtype"]]
    for check in done.data["checks"]:
        limit = of_loss if kind_of(check) == "losses" else of_tensor
        if kind_of(check) in EXACT.split() or check["is_formula"]:
            limit = 0
        elif kind_of(check) == "plan":  # seconds in units of a step
            limit = 1e-3
        is_rounded = "--bf16" in run and limit > 0
        assert not check["ranks"], check
        assert is_rounded or check["allowed"] <= limit, check
        assert check["diff"] <= check["allowed"], check
    return done


def kind_of(check: dict) -> str:
    """What a check is about: "gradients: dL/d x, naive" → gradients."""
    return check["kind"]


def failed(data: dict) -> dict[str, int]:
    """Kind → how many checks of it failed on some rank."""
    counts = {}
    for check in data["checks"]:
        if check["ranks"]:
            counts[kind_of(check)] = counts.get(kind_of(check), 0) + 1
    return counts


def rows_with(data: dict, *columns: str) -> list[dict]:
    """The rows that were printed and have all these columns; numbers as texts."""
    return [row for row in data["rows"] if set(columns) <= set(row)]


def number(text: str) -> float:
    """The number that a cell shows: 16,384, or 67.19600✗."""
    return float(text.replace(",", "").rstrip("✗"))


def found(ranks, what) -> list:
    """What all ranks of a driver found of something."""
    return [case for rank in ranks for case in rank[what]]
