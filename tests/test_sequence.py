"""Lesson 04: a split sequence gives one process's model, in the memory the paper says.

Random models on four ranks against plain PyTorch, to the rounding of float64; bytes
kept for backward against the paper's table; then the lesson's own runs.
"""

import math
import re
import sys
from unittest import mock

import jobs
import pytest
import torch
from runs import ALL_RUNS, PROOF, flag, found, over

DRIVER = ("drive_sequence.py", 4)
LESSON = "04_sequence_parallel"
# Lengths that the ranks do not divide, one weight for embedding and head.
ODD = ("--seq-len", "33", "--tie", "--save-gathered", "--steps", "2", "--seed", "5")
RUNS = [*dict.fromkeys(run for run in ALL_RUNS if run[0] == LESSON)]
RUNS += [run for run in ((LESSON, 3), (LESSON, 2, *ODD)) if run not in RUNS]

driven = pytest.mark.launches(*DRIVER)


# The random models, which test_transformer.py looks at, too.

KINDS = {"logits": 1e-12, "loss": 1e-12, "gradients": 1e-12, "norm": 1e-12,
         "clipped": 1e-12, "clipped above the limit only": 0, "parameters": 1e-12,
         "eval": 1e-12, "replicas": 0, "held": 0, "touched": 0, "tied": 0, "names": 0,
         "own": 0}  # fmt: skip


@driven
@pytest.mark.parametrize("kind", KINDS)
def test_float64_equality(ranks, kind):
    """After two steps, too. To the bit: what ranks of a group hold alike, slices of the
    model, which are copies under PyTorch's names, and in the sum what is cut."""
    worst = max(found(ranks, "models"), key=lambda case: case["diffs"][kind][0])
    assert worst["diffs"][kind][0] <= KINDS[kind], worst


@driven
def test_models_cover_the_ground(ranks):
    both = {True, False}
    assert len(ranks[0]["models"]) >= 64
    for T in (1, 2, 4):
        some = [case for case in ranks[0]["models"] if case["T"] == T]
        for key in ("tied", "save"):
            assert {case[key] for case in some} == both, (T, key)
        if T > 1:
            undivided = [case for case in some if case["S"] % T]
            assert {case["config"]["dropout"] > 0 for case in undivided} == both
            assert len(undivided) < len(some)
            assert any(case["parts"]["busy"] < T for case in some), "a rank of padding"
            assert any(case["config"]["vocab_size"] % T for case in some)


@driven
def test_replicated_gradients_are_parts_before_they_are_added(ranks):
    """They add up to the reference's; no rank has another's, or all, or padding's."""
    for case in found(ranks, "models"):
        parts = case["parts"]
        assert parts["sum"] <= 1e-12, case
        assert parts["idle"] == 0 and parts["alike"] == 0, case
        assert parts["names"] == 6 * case["config"]["layers"] + 2
        assert parts["whole"] == (parts["names"] if parts["busy"] == 1 else 0), case
    busy = {case["parts"]["busy"] for case in found(ranks, "models")}
    assert busy == {1, 2, 3, 4}


@driven
def test_recomputed_to_the_bit(ranks):
    """Dropout on: the masks of the second forward are those of the first."""
    again = {way for way in WAYS if "full" in way or "selective" in way}
    for case in found(ranks, "recomputes"):
        assert case["bits"] == dict.fromkeys(again, True), case
        assert set(case["diffs"]) == set(WAYS)
        assert max(case["diffs"].values()) <= 1e-12, case
        assert case["tensors"] == 18 and case["draws"] == 1, "all draw alike"


# Memory.

# Bytes ÷ sbh that a layer keeps in 16 bits: Korthikanti et al. 2022, arXiv:2205.05198,
# table 2, from t and a = 5·(heads)·s/h. And how much it keeps of the LayerNorms' mean
# and 1/σ, which the paper leaves out.
WAYS = {
    "without TP": lambda t, a: (34 + a, 1),
    "TP": lambda t, a: (10 + (24 + a) / t, 1),
    "TP + SP": lambda t, a: ((34 + a) / t, 1 / t),
    "TP + SP, gathered kept": lambda t, a: ((34 + a) / t + 4 * (1 - 1 / t), 1 / t),
    "TP, selective recompute": lambda t, a: (10 + 24 / t, 1),
    "TP + SP, selective": lambda t, a: (34 / t, 1 / t),
    "TP, full recompute": lambda t, a: (2, 0),
    "TP + SP, full": lambda t, a: (2 / t, 0),
}


@driven
@pytest.mark.parametrize("way", WAYS)
def test_bytes_kept_are_the_papers(ranks, way):
    """Masks have a byte each, numbers 2 in the paper; here 2, and in other cases 4."""
    cases = found(ranks, "memory")
    for case in cases:
        B, S, D, N = case["sizes"]
        units, statistics = WAYS[way](case["T"], 5 * N * S / D)
        wanted = units * S * B * D + 2 * 2 * 2 * S * B * statistics
        numbers, masks = case["bytes"][way]
        assert abs(numbers * 2 / case["size"] + masks - wanted) < 1e-6, case
        assert set(case["bytes"]) == set(WAYS)
    sizes = {(tuple(case["sizes"]), case["T"], case["size"]) for case in cases}
    assert len(sizes) == 6 * 3 * 2


# In this process.


def test_padding_stands_behind_the_sequence():
    pad_batch = jobs.load(LESSON).pad_batch
    for B, S in ((2, 5), (1, 1), (3, 7), (2, 8)):
        for ranks in (1, 2, 3, 4, 8):
            tokens, target = torch.randint(9, (2, B, S))
            longer, targets = pad_batch(tokens, target, ranks)
            assert longer.shape == targets.shape and longer.shape[1] % ranks == 0
            assert 0 <= longer.shape[1] - S < ranks and longer.dtype == torch.int64
            assert torch.equal(longer[:, :S], tokens)
            assert torch.equal(targets[:, :S], target)
            assert (longer[:, S:] == 256).all() and (targets[:, S:] == -100).all()


def test_hf_without_transformers():
    env = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    env |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    with mock.patch.dict(sys.modules, {"transformers": None}):  # cannot be imported
        code, out, err = jobs.run_here(LESSON, "--hf", **env)
    assert code == 2 and out == "" and re.fullmatch(r"error: --hf .*\n", err), err
    named = re.search(r"pip install (transformers==[\d.]+)$", err.strip())
    assert named, err
    wanted = (jobs.ROOT / "requirements-extra.txt").read_text().split()
    assert named[1] in wanted, "the version that the tests have"


# The lesson's own runs.


def checks(run, table: str) -> dict:
    """What was compared there: name → difference. Over ranks sums are made in another
    order: were all the same to the bit, nothing would have been compared."""
    rows = jobs.result(*run).data["checks"]
    mine = {row["name"]: row["diff"] for row in rows}
    mine = {name.removeprefix(f"{table}: "): diff for name, diff in mine.items()
            if name.startswith(f"{table}: ")}  # fmt: skip
    assert mine and (run[1] == 1 or any(diff > 0 for diff in mine.values()))
    return mine


def names_of(run) -> set[str]:
    """Of all parameters; none of our runs has other than 2 layers."""
    lesson = jobs.load(LESSON)
    model = lesson.Transformer(lesson.Config(1, 4, 1, 1, 2, 1, 0.0))
    names = {name for name, _ in model.named_parameters()}
    return names - ({"lm_head.weight"} if "--tie" in run else set())


@over(RUNS)
def test_every_gradient_and_parameter_is_compared(run):
    """At three lengths, too: from 1 to beyond the default, padded to a multiple of T;
    to the rounding of float64 in all runs."""
    data, T, names = jobs.result(*run).data, run[1], names_of(run)
    assert data["verdict"] == "PASS"
    assert abs(data["losses"][0]["without TP"] - math.log(257)) < 1.5, "a fresh model"
    ways = ["TP + SP", "DTensor"] if T > 1 else ["TP + SP"]
    wanted = {f"{name}, {what}" for name in names for what in ways}
    assert set(checks(run, "gradients")) == wanted
    wanted |= {f"{name}, TP" for name in names}
    assert set(checks(run, "updates")) >= wanted

    S = -(-int(flag(run, "--seq-len", 32)) // T) * T
    lengths = [1, S - 1, 2 * S + 1]
    wanted = [f"loss, length {n}, padded to {-(-n // T) * T}" for n in lengths]
    assert [row["name"] for row in data["lengths"]] == wanted
    assert all(row["diff"] <= 1e-12 for row in data["lengths"])
    mine = checks(run, "length gradients")
    assert set(mine) == {f"length {n}: dL/d {name}, TP + SP" for n in lengths
                         for name in names}  # fmt: skip
    assert max(mine.values()) <= 1e-12


@over(RUNS)
def test_parts_of_replicated_gradients(run):
    """Each rank's numbers before they are added differ; the sum is the reference's."""
    *parts, total, alone = rows = jobs.result(*run).data["parts"]
    assert [row[""] for row in parts] == [f"rank {rank}" for rank in range(run[1])]
    assert total[""] == "their sum" and alone[""] == "without TP"
    ends = [[int(end) for end in row["positions"].split(" to ")] for row in parts]
    positions = [place for first, last in ends for place in range(first, last + 1)]
    assert positions == [*range(len(positions))]
    for name in ("input_layernorm.weight", "self_attn.o_proj.bias"):
        numbers = [[float(x) for x in row[name].split()] for row in rows]
        assert len({tuple(three) for three in numbers[: run[1]]}) == run[1]
        for *shares, summed, wanted in zip(*numbers):
            assert abs(sum(shares) - wanted) <= (run[1] + 1) * 0.51e-6, (name, rows)
            assert abs(summed - wanted) <= 1.1e-6
        most = max(abs(x) for x in numbers[-1])
        assert most > 1e-4, "too few digits to tell"


@over([(LESSON, 2, "--hf"), (LESSON, 4, "--hf", "--tie", "--layers", "1", *PROOF)])
def test_hugging_face(run):
    """Loss and every gradient of Qwen2; needs requirements-extra.txt."""
    done = jobs.result(*run)
    assert done.code == 0, done.text
    mine = checks(run, "Qwen2")
    assert all(name.endswith((".weight, DTensor", ".bias, DTensor")) for name in mine)
    # A layer has 4 linears of attention, of which 3 have a bias, 3 of the MLP, 2 norms;
    # around them are the embedding, a norm, and the head where it is not tied.
    wanted = 12 * int(flag(run, "--layers", 2)) + 2 + ("--tie" not in run)
    assert len(mine) == wanted and max(mine.values()) <= 1e-5
    (loss,) = done.data["Qwen2 loss"]
    assert loss["diff"] <= 1e-6 and abs(loss["without TP"] - math.log(257)) < 1
