"""Lesson 03: a split vocabulary gives the loss, gradients and draws of a whole one.

Random batches on four ranks against F.cross_entropy, nn.Embedding and nn.Linear, and
Megatron's own test case; then every number of the lesson's own runs.
"""

import math

import jobs
import pytest
from runs import PROOF, VOCAB, found, over

DRIVER = ("drive_vocab.py", 4)
LOSS_ALLOWED = {"torch.float64": 1e-12, "torch.float32": 1e-6, "torch.bfloat16": 1e-6}
# bfloat16 logits are computed in float32; their gradient is rounded once, at the end
GRAD_ALLOWED = {
    "torch.float64": 1e-12, "torch.float32": 1e-5, "torch.bfloat16": 2.0**-8,
}  # fmt: skip

driven = pytest.mark.launches(*DRIVER)


# The loss.


@driven
@pytest.mark.parametrize("dtype", LOSS_ALLOWED)
def test_loss_and_gradient(ranks, dtype):
    cases = [case for case in found(ranks, "losses") if case["dtype"] == dtype]
    assert len(cases) > 250
    for case in cases:
        assert case["loss"] <= LOSS_ALLOWED[dtype], case
        assert case["gradient"] <= GRAD_ALLOWED[dtype], case
        assert case["loss_dtype"] and case["grad_dtype"], case


@driven
def test_padding_and_ignored_tokens_get_exactly_zero(ranks):
    for case in found(ranks, "losses"):
        assert case["padding"] == case["ignored_gradient"] == 0, case
    assert sum(case["padded"] for case in found(ranks, "losses")) > 500
    assert sum(case["ignored"] for case in found(ranks, "losses")) > 500


@driven
def test_three_all_reduces_forward_and_none_backward(ranks):
    for case in found(ranks, "losses"):
        assert case["sent"] == case["wanted"], case


@driven
def test_batches_cover_the_ground(ranks):
    cases = ranks[0]["losses"]
    assert len(cases) >= 200
    assert {case["V"] for case in cases} == {*range(1, 61), 257, 1000}
    for T in (1, 2, 4):
        some = [case for case in cases if case["T"] == T]
        assert len(some) >= 50
        for key, values in (
            ("dtype", 3), ("style", 5), ("smoothing", 3), ("all_ignored", 2),
        ):  # fmt: skip
            assert len({case[key] for case in some}) == values, (T, key)
        kinds = {case["ignore"] == -100 for case in some}
        assert kinds == {True, False} and {len(c["shape"]) for c in some} == {1, 2, 3}
        owners = {owner for case in some for owner in case["own"]}
        assert owners == set(range(T)), "targets in every rank's shard"
        assert T == 1 or sum(case["V"] < T for case in some) >= 5
    pairs = {(case["style"], case["smoothing"], case["dtype"]) for case in cases}
    assert len(pairs) >= 40, "of 45"


@driven
def test_megatrons_published_vector(ranks):
    for rank in ranks:
        wanted = [10.2309, 8.2309, 6.2309, 4.2309] * 4
        assert rank["megatron"] == pytest.approx(wanted, abs=1e-4)


# Embedding, head, model, sampling.


@driven
@pytest.mark.parametrize("what", ["x", "logits", "embedding", "head", "bias"])
def test_embedding_and_head(ranks, what):
    for case in found(ranks, "ends"):
        off = case["grads"][what] if what in case["grads"] else case[what]
        assert off <= 1e-12, case
        assert case["held"] == 0 and case["padding"] == 0, case


@driven
def test_embeddings_cover_the_ground(ranks):
    cases = found(ranks, "ends")
    kinds = {(c["T"], c["tied"], c["V"] < c["T"]) for c in cases}
    assert {(T, tied, False) for T in (1, 2, 4) for tied in (True, False)} <= kinds
    assert {T for T, _, more in kinds if more} == {2, 4}
    assert all(c["ends"] for c in cases), "the first and last token of every rank"


@driven
def test_model(ranks):
    """Mean loss and every gradient; nan where no token counts, as in PyTorch."""
    cases = found(ranks, "models")
    for case in cases:
        assert max(case["grads"].values()) <= 1e-12, case
        assert case["names"] and case["one"], case
    for nan in (True, False):
        assert {case["T"] for case in cases if case["nan"] is nan} == {1, 2, 4}
    assert {case["tied"] for case in cases} == {True, False}


@driven
def test_peak_of_memory_is_divided(ranks):
    for T, peak in found(ranks, "peaks"):
        assert peak["sharded_loss"] < 1.35 / T * peak["gathered_loss"], (T, peak)


@driven
def test_draws_are_those_of_one_process(ranks):
    for rank in ranks:
        draws = rank["draws"]["random"]
        assert len(draws) == 200
        assert [row for row in draws if row[2] != row[3]] == []
        assert sum(V < T for V, T, *_ in draws) >= 10
        assert len({token for V, _, token, _ in draws if V == 257}) > 10


@driven
def test_equal_scores_are_drawn_as_by_argmax(ranks):
    """The first of them, on whichever rank it is."""
    for rank in ranks:
        draws = rank["draws"]["ties"]
        assert len(draws) >= 40
        assert [row for row in draws if row[2] != row[3]] == []


@driven
@pytest.mark.parametrize("what, said", [
    ("token 10", "0 to 10"), ("token 11", "11 to 11"), ("token -1", "-1 to 3"),
    ("target 10", "1 to 10"), ("target 12", "12 to 12"), ("target -1", "-1 to 2"),
    ("target -100", "-100 to 2"),
])  # fmt: skip
def test_what_is_in_no_vocabulary_is_refused(ranks, what, said):
    for rank in ranks:
        message = rank["refusals"][what]
        assert said in message and "the vocabulary is 0 to 9" in message
        assert rank["refusals"]["no tokens"] == [0, 3, 4]


# The lesson's own runs.


@over([(VOCAB, 2), (VOCAB, 3), (VOCAB, 4, *PROOF), (VOCAB, 2, *PROOF, "--tie")])
def test_rows_of_a_rank(run):
    """All ranks' ranges are the vocabulary, once; a model that has learnt nothing
    spreads its guess over all of it."""
    data, T = jobs.result(*run).data, run[1]
    assert data["verdict"] == "PASS"
    owners = []
    for row in data["rows"]:
        first, last = map(int, row["tokens"].split(" to "))
        assert last - first + 1 + row["padding"] == math.ceil(257 / T)
        owners += range(first, last + 1)
    assert owners == [*range(257)]
    assert sum(row["inputs"] for row in data["rows"]) == 4 * 32
    assert sum(row["targets"] for row in data["rows"]) < 4 * 32, "some have none"
    assert abs(data["losses"][0]["with TP"] - math.log(257)) < 0.6


@over([(VOCAB, 2), (VOCAB, 2, *PROOF, "--tie")])
def test_tied_weights_are_one(run):
    names = [row["name"] for row in jobs.result(*run).data["gradients"]]
    assert ("lm_head.weight" in names) is ("--tie" not in run)


@over([(VOCAB, 1)])
def test_one_rank_sends_nothing(run):
    data = jobs.result(*run).data
    assert data["verdict"] == "PASS" and data["communication"] == []
    assert {row["sent"] for row in data["memory"]} == {0}
