"""beyond/18: products and the loss in pieces give what they give at once.

Random sizes and models on four ranks against plain PyTorch, in float64; then what the
script's own runs say.
"""

from itertools import product

import jobs
import pytest
from runs import IN_PIECES, IN_PIECES_RUNS, found, number, over, passed, rows_with
from test_refusals import refused_in_one_line
from test_transformer import models_are_equal

DRIVER = ("drive_in_pieces.py", 4)
lesson = jobs.load(IN_PIECES)

driven = pytest.mark.launches(*DRIVER)
pytestmark = pytest.mark.timeout(900)
KINDS = set(product((1, 2, 4), (1, 2, 3, 4)))  # ranks, pieces


def cases_of(ranks, what) -> list[dict]:
    """Those that the driver tried: all numbers of ranks and of pieces."""
    cases = found(ranks, what)
    assert {(case["T"], case["pieces"]) for case in cases} == KINDS
    return cases


# On four ranks.


@driven
def test_the_two_calls(ranks):
    """The product, the gathered x, which is bitwise x, and the scattered sum."""
    for case in cases_of(ranks, "calls"):
        assert max(case["product"], case["scattered"]) <= 1e-14, case
        assert case["same_x"] and case["calls"] == case["pieces"], case


@driven
def test_the_two_functions(ranks):
    """The product, dL/dx and dL/dW, of tensors that are contiguous and that are not."""
    for case in cases_of(ranks, "functions"):
        assert len(case["diffs"]) == 2
        for diffs in case["diffs"].values():
            assert max(diffs) <= 1e-12, case


@driven
def test_linears_with_and_without_biases(ranks):
    cases = cases_of(ranks, "linears")
    for case in cases:
        assert max(case["diffs"]) <= 1e-12, case
        assert len(case["diffs"]) == 2 + 3 + sum(case["has_bias"])
    assert len({tuple(case["has_bias"]) for case in cases}) == 8


@driven
def test_float64_equality(ranks):
    """Logits, loss, gradients, norm, clipping and parameters of full models."""
    models = found(ranks, "models")
    models_are_equal(models)
    for key, values in (
        ("layers", {1, 2, 3}), ("dropout", {0, 0.1, 0.5}), ("tied", {True, False})
    ):  # fmt: skip
        assert {case[key] for case in models} == values, key
    kinds = {(case["T"], case["pieces"]) for case in models}
    assert kinds >= {*product((1, 2, 4), (1, 2, 3))}


@driven
def test_head_and_loss_in_pieces(ranks):
    """Loss, dL/dh and the head's gradients are those of all logits at once."""
    cases = found(ranks, "losses")
    assert {case["T"] for case in cases} == {1, 2, 4} and len(cases) > 40
    assert any(case["S"] % case["pieces"] for case in cases), "pieces of two lengths"
    for case in cases:
        assert max(case["diffs"]) <= 1e-12, case


# In this process.


@pytest.mark.parametrize("ranks, flags, words", [
    (2, "--seq-len 30", ("--seq-len 30", "30 % 8", "--pieces", "take --seq-len 32")),
    (3, "--pieces 5 --seq-len 32", ("32 % 15", "take --seq-len 45")),
    (2, "--pieces 999999999", ("2 ranks · --pieces = 1999999998", "take --pieces 4")),
    (2, "--pieces 0", ("--pieces", "0")), (2, "--pieces 1.5", ("--pieces", "1.5")),
    (4, "--kv-heads 2", ("--kv-heads 2", "4 ranks", "beyond/09_shared_heads.py")),
    (4, "--heads 6", ("--heads 6", "6 % 4", "--heads 8")),
    (2, "--hidden 40", ("--hidden 40", "--hidden 48")),
    (2, "--vocab-size 256", ("--vocab-size 256", "257")),
    (2, "--clip 0", ("--clip 0",)),
])  # fmt: skip
def test_refused(ranks, flags, words):
    text = refused_in_one_line(IN_PIECES, ranks, flags)
    assert all(word in text for word in words), text


# The script's own runs.


@over(IN_PIECES_RUNS)
def test_passes_and_fits_the_screen(run):
    passed(run)


@over(IN_PIECES_RUNS)
def test_every_gradient_and_parameter_is_compared(run):
    data = jobs.result(*run).data
    checks = {row["name"] for row in data["checks"]}
    config = lesson.lesson02.Config(1, 4, 1, 1, data["size"]["L"], 1, 0.0)
    model = lesson.lesson02.Transformer(config)
    for name, _ in model.named_parameters():
        for way in ("TP + SP", "in pieces"):
            assert f"gradients: {name}, {way}" in checks
            assert f"parameters: {name}, {way}" in checks
        assert f"pieces: {name}, head and loss in pieces" in checks


@over(IN_PIECES_RUNS)
def test_calls_behind_a_product(run):
    """In pieces all but the last reduce-scatter of forward; without pieces none.

    A group of one rank makes these calls, too.
    """
    data = jobs.result(*run).data
    Q = data["size"]["Q"]
    rows = rows_with(data, "run", "phase", "products")
    seen = {}
    for row in rows:
        counted = number(str(row["calls"])), number(str(row["behind a product"]))
        seen[row["run"], row["phase"]] = counted
    assert seen == {
        ("TP + SP", "forward"): (2, 0),
        ("TP + SP", "backward"): (3, 0),
        ("in pieces", "forward"): (2 * Q, 2 * Q - 1),
        ("in pieces", "backward"): (2 * Q + 1, 2 * Q + 1),
    }


@over(IN_PIECES_RUNS)
def test_pieces_add_calls_and_no_bytes(run):
    data = jobs.result(*run).data
    size = data["size"]
    L, Q = size["L"], size["Q"]
    sent = {"TP + SP": {}, "in pieces": {}}
    for row in rows_with(data, "run", "phase", "collective"):
        key = row["phase"], row["collective"]
        sent[row["run"]][key] = number(row["calls"]), number(row["bytes"])
    assert bool(sent["TP + SP"]) is (run[1] > 1)
    calls = {  # of the products; the embedding's reduce-scatter is not in pieces
        ("forward", "all-gather"): (2 * L + 1) * Q,
        ("forward", "reduce-scatter"): 2 * L * Q + 1,
        ("backward", "all-gather"): 2 * L * Q + 2 * L + 2,  # inputs, a second time
        ("backward", "reduce-scatter"): (2 * L + 1) * Q,
    }
    assert sent["in pieces"].keys() == sent["TP + SP"].keys()
    for key, (at_once, nbytes) in sent["TP + SP"].items():
        assert sent["in pieces"][key] == (calls.get(key, at_once), nbytes), key


@over(IN_PIECES_RUNS)
def test_the_peak_of_the_logits_is_divided(run):
    data = jobs.result(*run).data
    at_once, in_pieces = rows_with(data, "head and loss")
    size = data["size"]
    logits = size["B"] * size["S"] * size["v"] * size["e"]
    assert number(at_once["peak of logits"]) == 4 * logits
    assert number(in_pieces["peak of logits"]) * size["Q"] == 4 * logits
    assert in_pieces["bytes"] == at_once["bytes"]
