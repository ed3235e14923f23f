"""Lesson 04: a split sequence gives one process's model, in the memory the paper says.

Random models on four ranks against plain PyTorch, to the rounding of float64; then the
lesson's own runs, their bytes kept for backward against the paper's table.
"""

import math
import re
import sys
from unittest import mock

import jobs
import pytest
import torch
from runs import ALL_RUNS, PROOF, SEQUENCE, flag, found, over
from test_refusals import as_rank
from test_transformer import models_are_equal, models_cover_the_ground

DRIVER = ("drive_sequence.py", 4)
# Lengths that the ranks do not divide, one weight for embedding and head; other sizes.
ODD = ("--seq-len", "33", "--tie", "--save-gathered", "--steps", "2", "--seed", "5",
       "--batch-size", "3", "--heads", "4", "--hidden", "48")  # fmt: skip
RUNS = [*dict.fromkeys(run for run in ALL_RUNS if run[0] == SEQUENCE)]
RUNS += [(SEQUENCE, 3), (SEQUENCE, 2, *ODD)]

driven = pytest.mark.launches(*DRIVER)


# On four ranks.


@driven
def test_float64_equality(ranks):
    """Replicated gradients are summed over ranks; some ranks have nothing but padding.
    So what a rank has before is its part: also of padding nothing joins in."""
    models = found(ranks, "models")
    models_are_equal(models)
    models_cover_the_ground(models)
    assert len({(case["T"], case["save"]) for case in models}) == 3 * 2
    for T in (2, 4):
        mine = [case for case in models if case["T"] == T]
        assert len({(case["S"] % T > 0, case["dropout"] > 0) for case in mine}) == 4
        slices = [(case["S"], -(-case["S"] // T)) for case in mine]
        assert any(S <= (T - 1) * s for S, s in slices), "a rank of padding"


@driven
def test_recomputed_to_the_bit(ranks):
    """Dropout on: the masks of the second forward are those of the first. No tensor is
    kept for backward but those that a lesson's count of bytes sees."""
    again = {way for way in WAYS if "full" in way or "selective" in way}
    for case in found(ranks, "recomputes"):
        assert case["bits"] == dict.fromkeys(again, True), case
        assert set(case["diffs"]) == set(WAYS)
        assert max(case["diffs"].values()) <= 1e-12, case
        assert case["tensors"] == 18 and case["draws"] == 1, "all draw alike"
        assert case["aside"] == 0, case


# In this process.


def test_padding_stands_behind_the_sequence():
    pad_batch = jobs.load(SEQUENCE).pad_batch
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
    with mock.patch.dict(sys.modules, {"transformers": None}):  # cannot be imported
        code, out, err = jobs.run_here(SEQUENCE, "--hf", **as_rank(0, 2))
    named = re.fullmatch(r"error: --hf .*pip install (transformers==[\d.]+)\n", err)
    assert code == 2 and out == "", err
    assert named, err
    wanted = (jobs.ROOT / "requirements-extra.txt").read_text().split()
    assert named[1] in wanted, "the version that the tests have"


# The lesson's own runs.


def checks(run, table: str) -> dict:
    """What was compared there: name → difference. Over ranks sums are made in another
    order: were all the same to the bit, nothing would have been compared."""
    mine = {}
    for row in jobs.result(*run).data["checks"]:
        found_table, _, name = row["name"].partition(": ")
        if found_table == table:
            mine[name] = row["diff"]
    assert mine and (run[1] == 1 or any(diff > 0 for diff in mine.values()))
    return mine


def names_of(run) -> set[str]:
    """Of all parameters; none of our runs has other than 2 layers."""
    lesson = jobs.load(SEQUENCE)
    model = lesson.Transformer(lesson.Config(1, 4, 1, 1, 2, 1, 0.0))
    names = {name for name, _ in model.named_parameters()}
    return names - ({"lm_head.weight"} if "--tie" in run else set())


def padded(run) -> int:
    """The sequence's length, which the ranks divide."""
    return -(-int(flag(run, "--seq-len", 32)) // run[1]) * run[1]


@over(RUNS)
def test_every_gradient_and_parameter_is_compared(run):
    """At three lengths, too: from 1 to beyond the default, padded to a multiple of T;
    to the rounding of float64 in all runs."""
    data, T, names = jobs.result(*run).data, run[1], names_of(run)
    assert data["verdict"] == "PASS"
    assert abs(data["losses"][0]["without TP"] - math.log(257)) < 1.5, "a fresh model"
    planned = 1 < T <= int(flag(run, "--kv-heads", T))  # a plan copies no heads
    ways = ["TP + SP", "DTensor"] if planned else ["TP + SP"]
    wanted = {f"{name}, {what}" for name in names for what in ways}
    assert set(checks(run, "gradients")) == wanted
    wanted |= {f"{name}, TP" for name in names}
    assert set(checks(run, "updates")) >= wanted

    S = padded(run)
    lengths = [1, S - 1, 2 * S + 1]
    wanted = [f"loss, length {n}, padded to {-(-n // T) * T}" for n in lengths]
    assert [row["name"] for row in data["lengths"]] == wanted
    assert all(row["diff"] <= 1e-12 for row in data["lengths"])
    mine = checks(run, "length gradients")
    assert set(mine) == {f"length {n}: dL/d {name}, TP + SP" for n in lengths
                         for name in names}  # fmt: skip
    assert max(mine.values()) <= 1e-12


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


@over(RUNS)
def test_bytes_kept_are_the_papers(run):
    """As measured by the lesson: bfloat16, masks have a byte each."""
    T, rows = run[1], jobs.result(*run).data["memory"]
    B, S = int(flag(run, "--batch-size", 4)), padded(run)
    x = round(rows[0]["bytes"] / rows[0]["÷ BSD"])  # B·S·D
    D = x // (B * S)
    N = int(flag(run, "--heads", D // 8))
    assert [row["layer"] for row in rows] == [*WAYS]
    for row in rows:
        units, statistics = WAYS[row["layer"]](T, 5 * N * S / D)
        wanted = units * x + 2 * 2 * 2 * B * S * statistics
        assert abs(row["bytes"] - wanted) < 1e-6, row


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


@over([(SEQUENCE, 2, "--hf"), (SEQUENCE, 4, "--hf", "--tie", "--layers", "1", *PROOF)])
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
