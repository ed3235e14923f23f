"""Lesson 04: a split sequence gives one process's model, in the memory the paper says.

Random models on four ranks against plain PyTorch, to the rounding of float64; then the
lesson's own runs, and edits of it. (The paper's table of bytes: test_plan.py.)
"""

import json
import re
import sys
from unittest import mock

import jobs
import pytest
import torch
import torch.distributed as dist
from runs import (
    ALL_RUNS,
    PROOF,
    QWEN2,
    SEQUENCE,
    failed,
    flag,
    found,
    number,
    over,
    rows_with,
)  # fmt: skip
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


@pytest.fixture
def group_of_one():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_linears_without_biases(group_of_one):
    """On one rank, which sends nothing: output and gradients are plain PyTorch's."""
    lesson, group = jobs.load(SEQUENCE), group_of_one
    torch.manual_seed(0)
    full = [nn.Linear(6, 4, bias=bias).double() for bias in (False, True)]
    split = [lesson.ColumnParallelLinear(linear, group) for linear in full]
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    for apply_each in (lesson.gather_again, lesson.gather_and_save):
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


@pytest.mark.parametrize("T", [1, 2, 4])
def test_terms_of_what_a_layer_saves(T):
    """They add up to the formulas that the table prints, of each run."""
    lesson = jobs.load(SEQUENCE)
    size = dict(B=3, S=8, X=3 * 8 * 16, A=3 * 4 * 8 * 8, c=2)
    parts = lesson.SPLIT_BY_POSITIONS, lesson.SPLIT_BY_COLUMNS
    for part, total in zip(parts, lesson.SUMS_SAVED, strict=True):
        of_terms = [lesson.evaluate(formula, size) for formula in part.values()]
        assert sum(of_terms) == lesson.evaluate(total, size)
    scores = ["softmax", "its mask", "after dropout"]
    by_heads = ["q, k, v", "input of o_proj", "of GELU", "of down_proj", *scores]
    by_positions = ["LayerNorms' inputs", "their outputs", "dropout masks", "mean, 1/σ"]
    assert [list(part) for part in parts] == [by_positions, by_heads]
    saved_by = parts[0] | parts[1]
    terms = list(saved_by)
    without_scores = [name for name in terms if name not in scores]
    gathered = [name for name in terms if name != "their outputs"]
    runs = {  # which terms are saved, which of them T divides
        "without TP": (terms, []),
        "TP": (terms, by_heads),
        "TP + SP": (terms, terms),
        "DTensor": (terms, gathered),
        "TP, selective": (without_scores, by_heads),
        "TP + SP, selective": (without_scores, terms),
    }
    assert [*runs, "TP, full", "TP + SP, full"] == list(lesson.LAYER_RUNS)
    for run, (saved, divided) in runs.items():
        expected = 0
        for name in saved:
            nbytes = lesson.evaluate(saved_by[name], size)
            expected += nbytes / T if name in divided else nbytes
        formula = lesson.LAYER_RUNS[run].saved
        assert lesson.evaluate(formula, dict(size, T=T)) == expected, run


def test_hf_without_transformers():
    with mock.patch.dict(sys.modules, {"transformers": None}):  # cannot be imported
        code, out, err = jobs.run_here(QWEN2, **as_rank(0, 2))
    assert (code, out) == (2, "")
    named = re.fullmatch(r"error: .*pip install (transformers==[\d.]+)\n", err)
    wanted = (jobs.ROOT / "requirements-extra.txt").read_text().split()
    assert named and named[1] in wanted, "the version that the tests have"


def test_qwen2_is_float32():
    code, out, err = jobs.run_here(QWEN2, "--dtype", "float64", **as_rank(0, 2))
    assert (code, out) == (2, "")
    assert err.startswith("error: --dtype float64: ")
    assert err.endswith("; take --dtype float32\n")


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
    others = ["TP", "TP + SP", "DTensor"]
    S = -(-int(flag(run, "--seq-len", 32)) // T) * T
    rows = {
        *(f"gradients: {name}, {run}" for name in names for run in others),
        *(f"parameters: {name}, {run}" for name in names for run in others),
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
    done = jobs.result(*run)
    assert (CONCLUSION in done.out) is (run[1] > 1)
    *parts, total, alone = rows_with(done.data, "positions")
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


@over([(QWEN2, 2), (QWEN2, 4, "--tie", "--layers", "1")])
def test_hugging_face(run):
    """Loss and every gradient of Qwen2; needs requirements-extra.txt."""
    done = jobs.result(*run)
    assert done.code == 0, done.text
    compared = {row["name"]: row["diff"] for row in done.data["checks"]}
    diffs = [diff for name, diff in compared.items() if name.startswith("gradients: ")]
    # A layer has 4 linears of attention, of which 3 have a bias, 3 of the MLP, 2 norms;
    # around them are the embedding, a norm, and the head where it is not tied.
    wanted = 12 * int(flag(run, "--layers", 2)) + 2 + ("--tie" not in run)
    assert len(diffs) == wanted and 0 < max(diffs) <= 1e-5
    assert compared["losses: loss, step 1, DTensor"] <= 1e-6


@over([(SEQUENCE, 2), (SEQUENCE, 4, *PROOF), (SEQUENCE, 2, *ODD)])
def test_the_table_of_saved_bytes(run):
    """The paper's formulas, and with sequence parallelism 1/T of one process. Its
    letters have values, and the last sentence names both kinds of recomputation."""
    done = jobs.result(*run)
    B, S, D, N, X = (done.data["size"][letter] for letter in "BSDNX")
    printed = re.sub(r"\s+", " ", done.out)
    letters = f"K = N. X = B·S·D = {B * S * D:,}, A = B·N·S·S = {B * N * S * S:,} "
    assert X == B * S * D and f"{letters}attention weights, c = 2 bytes." in printed
    rows = {row["run"]: row for row in rows_with(done.data, "saved")}
    assert len(rows) == 8 and {row["ok"] for row in rows.values()} == {"ok"}
    assert rows["without TP"]["formula"].startswith("34·X + 5·A")
    saved = {run: number(row["saved"]) for run, row in rows.items()}
    for name, row in rows.items():
        assert row["share"] == f"{saved[name] / saved['without TP']:.0%}"
    assert "Recomputed: selective, attention's core; full, the layer." in printed
    whole = saved["without TP"] / run[1]
    if "--save-gathered" in run:
        assert saved["TP"] > saved["TP + SP"] == saved["DTensor"] > whole
    else:
        assert saved["TP"] > saved["DTensor"] > saved["TP + SP"] == whole


# Edits, as a learner makes them: old text → new.

GELU = ("F.gelu(self.up_proj", "F.relu(self.up_proj")
SUM = "    flat = all_reduce(partial_flat, tp_group)\n"
NO_SUM = (SUM, "    flat = partial_flat\n")
WRONG_DIM = (
    "ReduceScatterWithGrad.apply(partial_y_BSD, 1, ",
    "ReduceScatterWithGrad.apply(partial_y_BSD, 0, ",
)
NORM_AFTER = [  # one of two blocks; PyTorch's plan cannot run it
    ("self_attn(x_BSD=self.input_layernorm(x_BSD), ", "self_attn(x_BSD=x_BSD, "),
    ("        x_BSD = x_BSD + self.dropout(y_BSD)\n",
     "        x_BSD = self.input_layernorm(x_BSD + self.dropout(y_BSD))\n"),
]  # fmt: skip
Q_NORM = [
    ("        self.dropout = Dropout(dropout)  # of the attention weights\n",
     "        self.dropout = Dropout(dropout)\n"
     "        self.q_norm = nn.RMSNorm(head_size)\n"),
    ("        q_BNSH = rotate(q_BNSH,", "        q_BNSH = rotate(self.q_norm(q_BNSH),"),
]  # fmt: skip


CONCLUSION = "the sum is the full one"


def run_edited(folder, *edits) -> jobs.Done:
    text = jobs.PATHS[SEQUENCE].read_text("utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / f"{SEQUENCE}.py"
    script.write_text(text, "utf-8")
    path = folder / "out.json"
    done = jobs.launch(script, 2, "--steps", "2", "--json", path)
    return done._replace(data=json.loads(path.read_text() or "{}"))


def test_relu_is_another_formula(tmp_path):
    """It saves one tensor for backward and not two: values agree, formulas do not."""
    done = run_edited(tmp_path, GELU)
    assert max(map(len, done.out.splitlines())) <= 88, done.out
    assert done.code == 0 and "✗" not in done.out, done.text
    assert re.search(r"\n   without TP +377,856 .* 0  ≠ ?443,392\n", done.out), done.out
    assert "6 formulas describe another model" in re.sub(r"\s+", " ", done.out)
    # Recomputation of all saves the input of a layer only.
    assert failed(done.data) == {"memory": 6}


def test_a_norm_of_heads_is_partial_under_tp(tmp_path):
    """TP does not sum its gradient, and the table shows it; TP + SP does."""
    done = run_edited(tmp_path, *Q_NORM)
    assert done.code == 1
    wrong = [
        x["name"] for x in done.data["checks"] if x["ranks"] and not x["is_formula"]
    ]
    of_q_norm = [name for name in wrong if name.startswith("gradients: ")]
    assert of_q_norm and all("q_norm" in name for name in of_q_norm)
    runs = {name.rpartition(", ")[2] for name in wrong}
    assert "TP" in runs and "TP + SP" not in runs, wrong


def test_no_conclusion_from_a_sum_that_is_wrong(tmp_path):
    done = run_edited(tmp_path, NO_SUM)
    assert done.code == 1 and "before and after the sum" in done.out
    assert CONCLUSION not in done.out, done.out


def test_a_norm_after_its_block_passes(tmp_path):
    """PyTorch's plan cannot run it; that describes another model, and fails nothing."""
    done = run_edited(tmp_path, *NORM_AFTER)
    assert done.code == 0 and "✗" not in done.out, done.text
    assert failed(done.data) == {"runs": 1} and "≠ runs: DTensor: " in done.out


def test_a_run_that_raises_is_a_column(tmp_path):
    """The other runs go on, sections keep their numbers, and no sum is concluded."""
    done = run_edited(tmp_path, WRONG_DIM)
    assert done.code == 1
    rows = [row for row in rows_with(done.data, "name", "diff") if "TP + SP" in row]
    assert rows and all(row["TP + SP"] == "raised" for row in rows)
    assert all(row["ok"] == "ok" and "DTensor" in row for row in rows), rows
    sections = re.findall(r"^(\d)  \w", done.out, re.M)
    assert "".join(sections) == "123456"
    assert failed(done.data)["runs"] >= 2 and CONCLUSION not in done.out
