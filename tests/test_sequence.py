"""Lesson 04: a split sequence gives one process's model, in the memory the paper says.

Random models on four ranks against plain PyTorch, to the rounding of float64; then the
lesson's own runs. (Its bytes kept for backward: test_plan.py has the paper's table.)
"""

import re
import sys
from unittest import mock

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import ALL_RUNS, PROOF, SEQUENCE, flag, found, over
from test_refusals import as_rank
from test_transformer import models_are_equal, models_cover_the_ground
from torch import nn

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
    for T in (2, 4):
        mine = [case for case in models if case["T"] == T]
        assert {case["save"] for case in mine} == {True, False}
        slices = [(case["S"], -(-case["S"] // T)) for case in mine]
        assert any(S <= (T - 1) * s for S, s in slices), "a rank of padding"


@driven
def test_recomputed_bitwise(ranks):
    """Dropout on: the masks of the second forward are those of the first."""
    names = ["TP, selective", "TP + SP, selective", "TP, full", "TP + SP, full"]
    assert found(ranks, "recomputes") == 4 * 8 * [dict.fromkeys(names, True)]


# In this process.


@pytest.mark.parametrize("B, S", [(2, 5), (1, 1), (3, 7), (2, 8)])
def test_padding_is_behind_the_sequence(B, S):
    pad_batch = jobs.load(SEQUENCE).pad_batch
    for ranks in (1, 2, 3, 4, 8):
        batch = torch.randint(9, (2, B, S))
        padded = torch.stack(pad_batch(*batch, ranks))
        missing = padded.shape[2] - S
        assert padded.shape[2] % ranks == 0 and 0 <= missing < ranks
        assert torch.equal(padded[..., :S], batch)
        assert (padded[0, :, S:] == 256).all() and (padded[1, :, S:] == -100).all()


def test_linears_without_biases():
    """On one rank, which sends nothing: output and gradients are plain PyTorch's."""
    lesson, group = jobs.load(SEQUENCE), no_group(1)
    torch.manual_seed(0)
    full = [nn.Linear(6, 4, bias=bias).double() for bias in (False, True)]
    split = [lesson.ColumnParallelLinear(linear, group) for linear in full]
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    for apply_each in (lesson.gather_then_apply_each, lesson.gather_and_save):
        mine = x.detach().clone().requires_grad_()
        ours, plain = apply_each(mine, *split), [linear(x) for linear in full]
        assert all(torch.allclose(y, z) for y, z in zip(ours, plain))
        sum(y.square().sum() for y in ours).backward()
        sum(y.square().sum() for y in plain).backward()
        assert torch.allclose(mine.grad, x.grad) and split[0].bias is None
        for ours, plain in zip(split, full):
            for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad)
                p.grad = q.grad = None
        x.grad = None


def test_only_7_needs_hf():
    code, out, err = jobs.run_here(SEQUENCE, "--only", "7", **as_rank(0, 2))
    assert (code, out) == (2, "") and re.match("error: --only 7: .*--hf", err)


def test_hf_without_transformers():
    with mock.patch.dict(sys.modules, {"transformers": None}):  # cannot be imported
        code, out, err = jobs.run_here(SEQUENCE, "--hf", **as_rank(0, 2))
    assert (code, out) == (2, "")
    named = re.fullmatch(r"error: --hf .*pip install (transformers==[\d.]+)\n", err)
    wanted = (jobs.ROOT / "requirements-extra.txt").read_text().split()
    assert named and named[1] in wanted, "the version that the tests have"


# The lesson's own runs.


@over(RUNS)
def test_every_gradient_and_parameter_is_compared(run):
    """At three lengths, too: from 1 to beyond the default, padded to a multiple of T;
    there to the rounding of float64 in all runs."""
    data, T, lesson = jobs.result(*run).data, run[1], jobs.load(SEQUENCE)
    assert data["verdict"] == "PASS"
    model = lesson.Transformer(lesson.Config(1, 4, 1, 1, 2, 1, 0.0))  # 2 layers
    names = {name for name, _ in model.named_parameters()}
    names -= {"lm_head.weight"} if "--tie" in run else set()
    others = ["TP + SP", "DTensor"]
    S = -(-int(flag(run, "--seq-len", 32)) // T) * T
    rows = {
        *(f"gradients: {name}, {run}" for name in names for run in others),
        *(f"parameters: {name}, {run}" for name in names for run in ["TP", *others]),
        *(f"length gradients: length {n}, padded to {-(-n // T) * T}: dL/d {name},"
          " TP + SP" for name in names for n in (1, S - 1, 2 * S + 1)),
    }  # fmt: skip
    compared = {row["name"]: row["diff"] for row in data["checks"]}
    assert rows <= set(compared)
    assert ("gradients: lm_head.weight, TP + SP" in compared) is ("--tie" not in run)
    at_lengths = [diff for name, diff in compared.items() if name.startswith("length")]
    assert len(at_lengths) == 3 + 3 * len(names) and max(at_lengths) <= 1e-12


@over(RUNS)
def test_parts_of_replicated_gradients(run):
    """Each rank's numbers before they are added differ; the sum is the reference's."""
    *parts, total, alone = jobs.result(*run).data["parts"]
    assert len(parts) == run[1]
    for name in ("input_layernorm.weight", "self_attn.o_proj.bias"):
        shares, summed, wanted = (
            torch.tensor([[float(x) for x in row[name].split()] for row in rows])
            for rows in (parts, [total], [alone])
        )
        assert len(shares.unique(dim=0)) == run[1]
        assert (shares.sum(0) - summed).abs().max() <= (run[1] + 1) * 0.51e-6
        assert (summed - wanted).abs().max() <= 1.1e-6
        assert wanted.abs().max() > 1e-4, "too few digits to tell"


@over([(SEQUENCE, 2, "--hf"), (SEQUENCE, 4, "--hf", "--tie", "--layers", "1", *PROOF)])
def test_hugging_face(run):
    """Loss and every gradient of Qwen2; needs requirements-extra.txt."""
    done = jobs.result(*run)
    assert done.code == 0, done.text
    compared = {row["name"]: row["diff"] for row in done.data["checks"]}
    diffs = [diff for name, diff in compared.items() if name.startswith("Qwen2: ")]
    # A layer has 4 linears of attention, of which 3 have a bias, 3 of the MLP, 2 norms;
    # around them are the embedding, a norm, and the head where it is not tied.
    wanted = 12 * int(flag(run, "--layers", 2)) + 2 + ("--tie" not in run)
    assert len(diffs) == wanted and 0 < max(diffs) <= 1e-5
    assert compared["Qwen2 loss: loss, step 1, DTensor"] <= 1e-6


def test_rows_of_an_edited_model_fit_the_screen(tmp_path):
    """Four predicted values do not fit: the end of the output has both numbers."""
    script = tmp_path / f"{SEQUENCE}.py"
    text = jobs.PATHS[SEQUENCE].read_text("utf-8")
    assert text.count("F.gelu(self") == 1
    script.write_text(text.replace("F.gelu(self", "F.relu(self"), "utf-8")
    done = jobs.launch(script, 2)
    assert done.code == 0 and "  values agree: " in done.out, done.text
    assert max(map(len, done.out.splitlines())) <= 88, done.out
    assert re.search(r"saved, measured +377,856 ≠  230,400 ≠ ", done.out), done.out
    assert "≠ saved, TP: 230,400, the lesson has 263,168\n" in done.out


NORMS = (SEQUENCE, 2, "--break", "norms", "--steps", "2")


@pytest.mark.launches(*NORMS)
def test_no_conclusion_from_a_sum_that_is_wrong():
    done = jobs.result(*NORMS)
    assert "before and after the sum" in done.out
    assert "only a sum is full" not in done.out, done.out
