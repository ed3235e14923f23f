"""Lesson 03: a split vocabulary gives the loss, gradients and draws of a whole one.

Random batches on four ranks against F.cross_entropy, and random models. What is sent
and kept is checked in the lesson's own runs.
"""

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
    """That of padding and of ignored tokens is zero; far logits, smoothing, V < T."""
    cases = [case for case in found(ranks, "losses") if case["dtype"] == dtype]
    assert len(cases) == 5 * 3 * (1 + 2 + 4 + 2), "each on all ranks of its group"
    for case in cases:
        of_loss, of_gradient = ALLOWED[dtype]
        assert case["loss"] <= of_loss and case["gradient"] <= of_gradient, case


@driven
def test_megatrons_published_vector(ranks):
    for rank in ranks:
        wanted = [10.2309, 8.2309, 6.2309, 4.2309] * 4
        assert rank["megatron"] == pytest.approx(wanted, abs=1e-4)


@driven
def test_embedding_and_head(ranks):
    """Whole models, tied or not; the loss from sharded or from gathered logits. Each
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
    """Also of equal scores: then it is the first, on whichever rank it is."""
    draws = found(ranks, "draws")
    assert len(draws) == 4 * (200 + 40)
    assert [draw for draw in draws if draw[0] != draw[1]] == []


@pytest.mark.parametrize("what, tokens, said", [
    ("tokens", [0, 10], "0 to 10"), ("tokens", [11], "11 to 11"),
    ("tokens", [-1, 3], "-1 to 3"), ("targets", [1, 10], "1 to 10"),
    ("targets", [12, -100], "12 to 12"), ("targets", [-1, 2], "-1 to 2"),
    ("targets, 3 ignored", [-100, 2], "-100 to 2"),
])  # fmt: skip
def test_what_is_in_no_vocabulary_is_refused(what, tokens, said):
    """Before anything is sent: this is no group that could."""
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
