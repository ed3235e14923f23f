"""Lesson 03: a sharded vocabulary gives the same loss, gradients and samples.

Random batches on four ranks against F.cross_entropy, and random models. The lesson's
own runs check the bytes that are sent and saved.
"""

import json
import re
from types import SimpleNamespace

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import VOCAB, found
from test_transformer import models_are_equal
from torch import nn

DRIVER = ("drive_vocab.py", 4)
# Of the loss, of its gradient: that of bfloat16 logits is rounded once, at the end.
ALLOWED = {
    "torch.float64": (1e-12, 1e-12), "torch.float32": (1e-6, 1e-5),
    "torch.bfloat16": (1e-6, 2.0**-8),
}  # fmt: skip
lesson = jobs.load(VOCAB)

driven = pytest.mark.launches(*DRIVER)


@driven
@pytest.mark.parametrize("dtype", ALLOWED)
def test_loss_and_gradient(ranks, dtype):
    """Zero for spare columns, ignored positions; extreme logits, smoothing, V < T."""
    cases = [case for case in found(ranks, "losses") if case["dtype"] == dtype]
    assert len(cases) == 5 * 3 * (1 + 2 + 4 + 2), "each on all ranks of its group"
    for case in cases:
        of_loss, of_gradient = ALLOWED[dtype]
        assert case["loss"] <= of_loss and case["gradient"] <= of_gradient, case


@driven
def test_megatrons_published_vector(ranks):
    for rank in ranks:
        expected = [10.2309, 8.2309, 6.2309, 4.2309] * 4
        assert rank["megatron"] == pytest.approx(expected, abs=1e-4)


@driven
def test_embedding_and_head(ranks):
    """Full models, tied or not; the loss from sharded or from gathered logits. Each
    rank's first and last token is looked up."""
    models = found(ranks, "models")
    models_are_equal(models)
    kinds = {(c["T"], c["tied"], c["vocab_size"] < c["T"]) for c in models}
    assert {(T, tied, False) for T in (1, 2, 4) for tied in (True, False)} <= kinds
    assert {(4, True, True), (4, False, True)} <= kinds


@driven
def test_peak_of_memory_is_divided(ranks):
    for T, peak in found(ranks, "peaks"):
        assert peak["sharded_loss"] < 1.35 / T * peak["gathered_loss"], (T, peak)


@driven
def test_draws_are_those_of_one_process(ranks):
    """Also if scores are equal: then the first token, on whichever rank it is."""
    draws = found(ranks, "draws")
    assert len(draws) == 4 * (200 + 40)
    assert [draw for draw in draws if draw[0] != draw[1]] == []


@pytest.mark.parametrize("what, tokens, said", [
    ("tokens", [0, 10], "0 to 10"), ("tokens", [11], "11 to 11"),
    ("tokens", [-1, 3], "-1 to 3"), ("targets", [1, 10], "1 to 10"),
    ("targets", [12, -100], "12 to 12"), ("targets", [-1, 2], "-1 to 2"),
    ("targets, 3 ignored", [-100, 2], "-100 to 2"),
])  # fmt: skip
def test_tokens_outside_the_vocabulary_are_refused(what, tokens, said):
    """Before anything is sent: this group could not."""
    group, tokens = no_group(4), torch.tensor(tokens)
    embedding = lesson.VocabParallelEmbedding(nn.Embedding(10, 4), group)
    logits, loss_of = torch.zeros(len(tokens), 3), lesson.vocab_parallel_cross_entropy
    calls = {
        "tokens": lambda: embedding(tokens),
        "targets": lambda: loss_of(logits, tokens, group, 10),
        "targets, 3 ignored": lambda: loss_of(logits, tokens, group, 10, 3),
    }
    with pytest.raises(ValueError, match=f"tokens {said}: the vocabulary is 0 to 9"):
        calls[what]()


def test_every_rank_has_tokens_and_targets():
    """Bytes are permuted: otherwise all letters would be those of rank 0 of 2."""
    args = SimpleNamespace(seed=1, batch_size=4, seq_len=32, device="cpu")
    batches = lesson.make_batches(lesson.__doc__, args, 3)
    for T in (2, 4, 8):
        v = -(-257 // T)
        for batch in batches:
            for x_BS in lesson.permute_bytes(*batch):
                counts = [lesson.to_local(x_BS, v, r)[1].sum() for r in range(T)]
                assert min(counts) > 0, (T, counts)
    everything = torch.tensor([*range(256), lesson.PAD, lesson.IGNORE])
    (permuted,) = lesson.permute_bytes(everything)
    assert sorted(permuted[:256].tolist()) == list(range(256))
    assert permuted[256:].tolist() == [lesson.PAD, lesson.IGNORE]


@pytest.mark.launches(VOCAB, 2)
def test_what_it_is_about_is_printed():
    """The hard cases by name, and bytes as a ring sends them, not payloads."""
    run = jobs.result(VOCAB, 2)
    assert f"   {'; '.join(lesson.HARD_CASES)}.\n" in run.out
    rows = [row for row in run.data["rows"] if row["section"] == 6]
    ring = {(row["loss"], row["V"]): row["ring"] for row in rows}
    assert (
        ring["gathered", "50,257"] == f"{4 * 32 * 25129 * 4:,}"
    )  # half of the payload
    assert ring["sharded", "50,257"] == ring["sharded", "257"] == f"{3 * 4 * 32 * 4:,}"
    saved = {row["loss"]: row["saved ="] for row in rows}
    assert saved["sharded"] == "B·S·(v·e + 10) + v + 8"  # the terms of this sentence
    assert "v·e, V·e: softmax. + 10: a column (8), 2 masks. + v: a mask." in run.out
    payload, logits = 3 * 4 * 32 * 4, 4 * 32 * 257 * 4
    assert f" sends {payload:,} bytes; all logits are {logits:,}." in run.out


# Edits, as a student makes them.

ROWS = "x_BSD * is_local_BS.unsqueeze(-1)\n"
LOOKUPS = [
    f"hard {kind}: embedding(arange(V)), with TP" for kind in ("values", "gradients")
]
TRAINED = ["losses: loss, step 1, with TP", "gradients: embed_tokens.weight, with TP"]
OFF_BY_ONE = {  # which token's row is missing, flags, what fails
    "a rank's first row": ("row_BS > 0", [], LOOKUPS + TRAINED),
    "a rank's last row": ("row_BS < v - 1", [], LOOKUPS + TRAINED),
    "a row that no batch has": ("tokens_BS < 299", ["--vocab-size", "300"], LOOKUPS),
}
F_LOSS = (
    "    return F.cross_entropy(logits, target_BS.flatten(), "
    "label_smoothing=smoothing)\n"
)
Z_LOSS = {  # ζ·(log z)², as it is added to the loss of large models
    F_LOSS: F_LOSS.replace("return", "loss =")
    + "    log_z = logits.logsumexp(-1).where(target_BS.flatten() != IGNORE, 0)\n"
    "    return loss + 0.01 * log_z.square().sum() / (target_BS != IGNORE).sum()\n",
    "        loss_BS = sum_BS.log() - all_reduce(partial_qx_BS, tp_group)\n":
    "        ctx.log_z_BS = sum_BS.log() + max_BS\n"
    "        loss_BS = sum_BS.log() - all_reduce(partial_qx_BS, tp_group)\n"
    "        loss_BS = loss_BS + 0.01 * ctx.log_z_BS.square()\n",
    "        grad_BSv = (softmax_BSv - ctx.smooth_target)":
    "        softmax_BSv = softmax_BSv * (1 + 0.02 * ctx.log_z_BS.unsqueeze(-1))\n"
    "        grad_BSv = (softmax_BSv - ctx.smooth_target)",
}  # fmt: skip


def run_edited(folder, edits: dict[str, str], *flags) -> tuple[jobs.Done, list[str]]:
    """The lesson on two ranks with other lines: its end, and the checks that fail."""
    text = jobs.PATHS[VOCAB].read_text("utf-8")
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / f"{VOCAB}.py"
    script.write_text(text, "utf-8")
    path = folder / "checks.json"
    done = jobs.launch(script, 2, "--steps", "1", "--json", path, *flags)
    assert path.exists(), done.text
    checks = json.loads(path.read_text("utf-8"))["checks"]
    return done, [check["name"] for check in checks if check["ranks"]]


@pytest.mark.parametrize("edit", OFF_BY_ONE)
def test_an_embedding_off_by_one_fails(edit, tmp_path):
    """Every row is looked up, and every rank's rows are trained."""
    condition, flags, expected = OFF_BY_ONE[edit]
    edited = ROWS.replace("is_local_BS", f"(is_local_BS & ({condition}))")
    done, failed = run_edited(tmp_path, {ROWS: edited}, *flags)
    assert done.code == 1 and set(expected) <= set(failed), failed
    assert expected is not LOOKUPS or failed == LOOKUPS
    assert f"\nFAIL  {VOCAB}  " in done.out


def test_another_loss_passes_and_ends_dtensors_column_only(tmp_path):
    """PyTorch's plan cannot run it; the other runs complete, every section is there."""
    done, failed = run_edited(tmp_path, Z_LOSS)
    assert done.code == 0, done.text
    assert f"\nPASS  {VOCAB}  " in done.out and "✗" not in done.out
    assert "runs: DTensor" in failed and "\n≠ runs: DTensor: " in done.out
    assert [line[0] for line in done.out.splitlines() if re.match(r"\d  ", line)] == [
        *"1234567"
    ]
    heads = [line for line in done.out.splitlines() if "without TP  loss by" in line]
    assert heads and all("DTensor" in line for line in heads)
    assert "  raised " in done.out
