"""Lesson 03: a split vocabulary gives the loss, gradients and draws of a whole one.

Random batches on four ranks against F.cross_entropy, nn.Embedding and nn.Linear, and
Megatron's own test case; then every number of the lesson's own runs.
"""

import math
import re

import jobs
import pytest
from old_runs import ALL_RUNS, ALLOWED, SIZES, check_gradients, expect, flag, found, over

DRIVER = ("drive_vocab.py", 4)
LESSON = "03_vocab_parallel"
RUNS = [run for run in ALL_RUNS if run[0] == LESSON]
WRITES = [run for run in RUNS if "--train" in run]
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
        assert case["held"] == 0 and case["padding"] == 0 and case["one"], case


@driven
def test_embeddings_cover_the_ground(ranks):
    kinds = {(c["T"], c["tied"], c["V"] < c["T"]) for c in found(ranks, "ends")}
    assert {(T, tied, False) for T in (1, 2, 4) for tied in (True, False)} <= kinds
    assert {T for T, _, more in kinds if more} == {2, 4}


@driven
def test_model(ranks):
    """Mean loss and every gradient; nan where no token counts, as in PyTorch."""
    cases = found(ranks, "models")
    for case in cases:
        assert case["loss"] <= 1e-12 and max(case["grads"].values()) <= 1e-12, case
        assert case["names"], case
    for nan in (True, False):
        assert {case["T"] for case in cases if case["nan"] is nan} == {1, 2, 4}
    assert {case["tied"] for case in cases} == {True, False}


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


# The lesson's own runs: numbers in --json worked out again.


def sizes(run) -> dict:
    return {
        "D": int(flag(run, "--hidden", 64)), "L": int(flag(run, "--layers", 2)),
        "B": int(flag(run, "--batch-size", 4)), "S": int(flag(run, "--seq-len", 32)),
        "V": int(flag(run, "--vocab-size", 257)), "T": run[1],
        "steps": int(flag(run, "--steps", 5)),
        "e": SIZES[flag(run, "--dtype", "float32")],
    }  # fmt: skip


@over(RUNS)
def test_losses_and_gradients(run):
    data, size = jobs.result(*run).data, sizes(run)
    loss_limit, _ = ALLOWED[data["dtype"]]
    assert [row["step"] for row in data["losses"]] == [*range(1, size["steps"] + 1)]
    assert abs(data["losses"][0]["without"] - math.log(size["V"])) < 1.5
    for row in data["losses"]:
        for way in ("with", "by_hand"):
            assert abs(row[way] - row["without"]) <= loss_limit * row["without"], row
        assert row["tokens"] == size["B"] * size["S"]
        assert 0 <= row["padding"] < row["tokens"]
    check_gradients(run)


@over(RUNS)
def test_bytes_sent(run):
    data, size = jobs.result(*run).data, sizes(run)
    tokens, n, T = size["B"] * size["S"], size["steps"], size["T"]
    several = T > 1
    one, all_reduces = tokens * size["D"] * size["e"], 2 * size["L"] + 1
    calls = {
        ("layers", "forward", "all-reduce"): (all_reduces * n, one),
        ("layers", "backward", "all-reduce"): (all_reduces * n, one),
        ("loss", "forward", "all-reduce"): (3 * n, tokens * size["e"]),
    }
    for V in {size["V"], 257, 50257}:
        columns = math.ceil(V / T) * T
        gathered = tokens * columns * size["e"]
        calls[f"gathered, V {V}", "", "all-gather"] = 1, gathered
        calls[f"sharded, V {V}", "", "all-reduce"] = 3, tokens * size["e"]
    expect(data, {
        (what, phase, collective, "tp"): (k * several, k * each * several)
        for (what, phase, collective), (k, each) in calls.items()
    })  # fmt: skip


@over(RUNS)
def test_bytes_the_loss_holds(run):
    """Gathered: PyTorch's log-softmax of all columns, and the count of targets.

    Sharded: the softmax of a rank's columns; of each token, which column is its
    target's (int64), whether it is this rank's, and whether it counts; which columns
    are tokens; the count of targets (int64).
    """
    data, size = jobs.result(*run).data, sizes(run)
    tokens, e, T = size["B"] * size["S"], size["e"], size["T"]
    wanted = {}
    for V in {size["V"], 257, 50257}:
        v = math.ceil(V / T)
        wanted[f"logits gathered, V {V}"] = tokens * V * e + e
        wanted[f"logits sharded, V {V}"] = tokens * (v * e + 8 + 1 + 1) + v + 8
    assert {row["what"]: row["bytes"] for row in data["memory"]} == wanted
    peak = {row["what"]: row["peak_bytes"] for row in data["memory"]}
    for row in data["memory"]:
        assert row["predicted_bytes"] == row["bytes"] <= row["peak_bytes"], row
    ratio = peak["logits sharded, V 50257"] / peak["logits gathered, V 50257"]
    assert ratio < 1.35 / T, peak


@over(RUNS)
def test_rows_of_a_rank(run):
    done, size = jobs.result(*run), sizes(run)
    V, T = size["V"], size["T"]
    v = math.ceil(V / T)
    lines = [line.split() for line in done.data["text"] if " to " in line]
    lines = [words for words in lines if words[0] == "rank" and words[3] == "to"]
    assert len(lines) == T
    inputs = 0
    for r, words in enumerate(lines):
        real = min(V, (r + 1) * v) - r * v
        wanted = [r, r * v, r * v + real - 1, real, v - real]
        assert list(map(int, [words[1], words[2], *words[4:7]])) == wanted
        inputs += int(words[7])
    assert inputs == size["B"] * size["S"]


@over(RUNS)
def test_one_tokens_loss_adds_up(run):
    text = jobs.result(*run).data["text"]
    at = next(i for i, line in enumerate(text) if "One token's loss" in line)
    T = run[1]
    number = re.compile(r"-?\d+\.\d+")
    table = [number.findall(line) for line in text[at + 2 : at + 2 + T]]
    largest, total = ([float(row[i]) for row in table] for i in (0, 1))
    picked = [float(row[2]) for row in table if len(row) == 3]
    assert sum(x != 0 for x in picked) <= 1, "one rank has the target"
    wanted = [max(largest), sum(total), sum(picked)]
    summed = number.findall(text[at + 2 + T])
    assert list(map(float, summed)) == pytest.approx(wanted, abs=1e-3)
    last = float(text[at + 3 + T].split("=")[-1].split()[0])
    assert last == pytest.approx(math.log(wanted[1]) - wanted[2], abs=1e-3)


@over(WRITES)
def test_trains_and_writes(run):
    done = jobs.result(*run)
    checks = {row["name"]: row for row in done.data["checks"]}
    assert checks["the same text without and with TP"]["bad"] == []
    assert 0 < len(done.data["text_written"]) <= 60
    steps = [line for line in done.data["text"] if re.search(r"step +\d+ of 10", line)]
    assert len(steps) >= 2
    losses = [float(line.split()[-1]) for line in steps]
    assert losses[-1] < losses[0]
    written = [line for line in done.data["text"] if line.startswith("   | ")]
    assert written and written[0].startswith("   | def ")


@over(WRITES)
def test_writes_nothing_a_terminal_would_obey(run):
    strange = {c for c in jobs.result(*run).out if not c.isprintable()} - {"\n"}
    assert not strange, strange
