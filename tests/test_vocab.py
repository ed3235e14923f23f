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
    """By three all-reduces forward, and none backward."""
    cases = [case for case in found(ranks, "losses") if case["dtype"] == dtype]
    assert len(cases) > 250
    for case in cases:
        assert case["loss"] <= LOSS_ALLOWED[dtype], case
        assert case["gradient"] <= GRAD_ALLOWED[dtype], case
        assert case["right_dtype"] and case["sent_right"], case


@driven
def test_padding_and_ignored_tokens_get_exactly_zero(ranks):
    cases = found(ranks, "losses")
    for case in cases:
        assert case["padding"] == case["ignored_gradient"] == 0, case
    for kind in ("padded", "ignored"):
        assert sum(case[kind] for case in cases) > 500


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
@pytest.mark.parametrize("what", ["x", "logits", "embedding", "head", "bias", "held"])
def test_embedding_and_head(ranks, what):
    """Output, gradients; what is held, zeros of padding included, is held exactly. The
    tokens looked up are the first and the last of every rank, and others."""
    for case in found(ranks, "ends"):
        assert case["ends"], "the first and last token of every rank"
        diffs = [diff for name, diff in case["diffs"].items() if name.startswith(what)]
        assert len(diffs) == (4 if what == "held" else 1)
        assert max(diffs) <= (0 if what == "held" else 1e-12), case
    kinds = {(c["T"], c["tied"], c["V"] < c["T"]) for c in found(ranks, "ends")}
    assert {(T, tied, False) for T in (1, 2, 4) for tied in (True, False)} <= kinds
    assert {T for T, _, more in kinds if more} == {2, 4}


@driven
def test_model(ranks):
    """Mean loss and every gradient, also when put together; all else to the bit."""
    cases = found(ranks, "models")
    for case in cases:
        for kind, (diff, _) in case["diffs"].items():
            rounded = "loss" in kind or kind == "put together"
            assert diff <= (1e-12 if rounded else 0), (kind, case)
        assert len(case["diffs"]) == 10, case["diffs"].keys()
    kinds = {(case["T"], case["tied"]) for case in cases}
    assert kinds == {(T, tied) for T in (1, 2, 4) for tied in (True, False)}


@driven
def test_peak_of_memory_is_divided(ranks):
    for T, peak in found(ranks, "peaks"):
        assert peak["sharded_loss"] < 1.35 / T * peak["gathered_loss"], (T, peak)


@driven
@pytest.mark.parametrize("kind, count", [("random", 200), ("ties", 40)])
def test_draws_are_those_of_one_process(ranks, kind, count):
    """Of equal scores the first, on whichever rank it is."""
    for rank in ranks:
        draws = rank["draws"][kind]
        assert len(draws) == count
        assert [row for row in draws if row[2] != row[3]] == []
        if kind == "random":
            assert sum(V < T for V, T, *_ in draws) >= 10
            assert len({token for V, _, token, _ in draws if V == 257}) > 10


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
    spreads its guess over all of it; a tied weight is one."""
    data, owners = jobs.result(*run).data, []
    assert data["verdict"] == "PASS"
    for row in data["rows"]:
        first, last = map(int, row["tokens"].split(" to "))
        assert last - first + 1 + row["padding"] == math.ceil(257 / run[1])
        owners += range(first, last + 1)
    assert owners == [*range(257)]
    assert sum(row["inputs"] for row in data["rows"]) == 4 * 32
    assert sum(row["targets"] for row in data["rows"]) < 4 * 32, "some have none"
    assert abs(data["losses"][0]["with TP"] - math.log(257)) < 0.6
    names = [row["name"] for row in data["gradients"]]
    assert ("lm_head.weight" in names) is ("--tie" not in run)
