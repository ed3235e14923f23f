"""Lesson 03: a sharded vocabulary gives the same loss, gradients and samples.

Random batches on four ranks against F.cross_entropy, and random models. The lesson's
own runs check the bytes that are sent and saved.
"""

import re

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
    """Zero for padding and ignored positions; extreme logits, smoothing, V < T."""
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


def test_a_loss_that_dtensor_lacks_ends_its_column_only(tmp_path):
    """A student's edit: the other runs complete, every section is printed, FAIL."""
    text = jobs.PATHS[VOCAB].read_text("utf-8")
    old = "    logits = logits_BSV.flatten(0, 1)\n"
    plain = "torch.ones_like(target_BS).flatten().unsqueeze(-1)"
    # Mixed with a DTensor: an error.
    new = f"{old}    logits = logits + 0 * (logits.detach() * {plain}).mean()\n"
    assert text.count(old) == 1
    script = tmp_path / f"{VOCAB}.py"
    script.write_text(text.replace(old, new), "utf-8")
    done = jobs.launch(script, 2, "--steps", "2")
    lines = done.out.splitlines()
    sections = [line[0] for line in lines if re.match(r"\d  ", line)]
    assert sections == list("1234567")
    raised = [line for line in lines if line.startswith("   DTensor raised ")]
    assert len(raised) == 1
    (failed,) = [line for line in lines if line.startswith("✗")]
    assert failed.startswith("✗ DTensor raised RuntimeError")
    said = f"FAIL  {VOCAB}  failed: plans 1/1; all values agree"
    assert lines[-1] == said, lines[-1]
