"""beyond/16: experts over ranks give one process's model, with every gradient.

Layers of random shapes and routers on eight ranks and seven meshes, against a layer
without a sort, to the rounding of float64; then what the script's own runs say.
"""

from types import SimpleNamespace

import jobs
import pytest
import torch
from runs import EXPERT_RUNS, EXPERTS, found, over, passed, rows_with
from test_refusals import refused_in_one_line

DRIVER = ("drive_experts.py", 8)
lesson = jobs.load(EXPERTS)

driven = pytest.mark.launches(*DRIVER)
pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


# On eight ranks.


@driven
def test_layers_of_random_shapes(ranks):
    """Output, balance loss, norm and all gradients, also in one process; float64."""
    cases = found(ranks, "cases")
    assert {case["k"] for case in cases} >= {1, 2, 3}
    assert {case["skew"] for case in cases} == {0, 3, 30}
    assert {tuple(case["mesh"]) for case in cases} >= {(1, 8, 1), (4, 2, 1), (2, 2, 2)}
    for case in cases:
        names = {"router.weight", "experts.up_proj", "experts.down_proj", "dL/dx", "y"}
        assert set(case["diffs"]) >= names | {"balance", "norm"}
        for what, diff in case["diffs"].items():
            assert diff < 1e-12, (what, case)


@driven
def test_bytes_are_those_of_the_rows(ranks):
    """Each rank sends the rows that its tokens' choices say, and no more."""
    sent = 0
    for case in found(ranks, "cases"):
        assert case["sent"] == case["wanted"], case
        assert (case["sent"] == 0) == (case["mesh"][1] == 1)
        sent += case["sent"]
    assert sent > 0


@driven
def test_some_ranks_have_no_rows(ranks):
    """Fewer rows than experts, or all for one: the exchange has to work without any."""
    few = [case for case in found(ranks, "cases") if case["rows"] < case["E"]]
    assert few and any(case["skew"] == 30 for case in found(ranks, "cases"))


# In this process.


def test_the_example_of_the_docstring():
    x_tD = torch.arange(4.0).view(2, 2)
    expert_tk = torch.tensor([[3, 0], [0, 1]])
    rows, counts, order = lesson.sort_by_expert(x_tD, expert_tk, 4)
    assert order.tolist() == [1, 2, 3, 0] and counts.tolist() == [2, 1, 0, 1]
    assert torch.equal(rows, x_tD[[0, 1, 1, 0]])
    assert torch.equal(lesson.undo_sort(rows, order), x_tD[[0, 0, 1, 1]])


def layer(k: int, experts: int = 4) -> tuple:
    torch.manual_seed(0)
    moe = lesson.MoE(lesson.lesson01.MLP(6, 8), experts, k).double()
    return moe, torch.randn(3, 5, 6, dtype=torch.float64)


@pytest.mark.parametrize("k, learns", [(1, False), (2, True), (4, True)])
def test_the_router_learns_from_the_output_unless_k_is_1(k, learns):
    moe, x = layer(k)
    (moe(x) * torch.randn_like(x)).sum().backward()
    norm = moe.router.weight.grad.norm()
    assert norm > 1e-2 if learns else norm < 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
def test_balance_loss_is_1_if_balanced_and_at_most_E_over_k(k):
    even = torch.full((12, 6), 1 / 6, dtype=torch.float64)
    counts = torch.full((6,), 2 * k)
    assert lesson.balance_loss(even, counts, k, ()).item() == pytest.approx(
        1, abs=1e-15
    )
    same_k = torch.zeros(12, 6, dtype=torch.float64)  # all tokens to the same experts
    same_k[:, :k] = 1 / k
    counts = torch.tensor([12] * k + [0] * (6 - k))
    loss = lesson.balance_loss(same_k, counts, k, ())
    assert loss.item() == pytest.approx(6 / k, abs=1e-14)


def test_balance_loss_is_smallest_elsewhere_but_its_gradient_evens_out():
    """It can be less than 1; a step lowers the probability of the busiest expert."""
    probs = torch.tensor([[0.51, 0.49]] * 6 + [[0.0, 1.0]] * 4, dtype=torch.float64)
    logits = probs.log().clamp(min=-50).requires_grad_()
    loss = lesson.balance_loss(logits.softmax(-1), torch.tensor([6, 4]), 1, ())
    by_hand = 2 * (0.6 * 0.306 + 0.4 * 0.694)  # shares times mean probabilities
    assert loss.item() == pytest.approx(by_hand, abs=1e-12) and by_hand < 1
    loss.backward()
    assert (logits.grad[:6, 0] > 0).all() and (logits.grad[:6, 1] < 0).all()


@pytest.mark.parametrize("size, scale", [(0.0, 2.0), (1e-5, 2.0), (1e-3, 1e-3)])
def test_a_router_without_gradient_is_compared_by_the_largest(size, scale):
    """If its own is rounding errors only; else, and all others, by their own."""
    diffs = {}

    def check(name, diff, allowed, text):
        what = name.removeprefix("one layer: ").split(",")[0]
        diffs[what] = diff
        return True

    report = SimpleNamespace(check=check)
    expected = {"y": torch.ones(3), "router.weight": torch.full((2, 2), size)}
    expected.update({"dL/dx": torch.full((3,), 2.0), "experts.up_proj": torch.ones(1)})
    found = {what: x.double() + 2**-20 for what, x in expected.items()}
    shown = lesson.compare_layer(report, "random, k 1", found, expected, 1e-5)
    assert diffs["router.weight"] == pytest.approx(2**-20 / scale, rel=1e-3)
    assert diffs["y"] == diffs["experts.up_proj"] == 2 * diffs["dL/dx"] == 2**-20
    assert shown == f"{max(diffs.values()):.1e}"


@pytest.mark.parametrize("ranks, flags, words", [
    (4, "--ep 3", ("--ep", "3 · 1 = 3", "4 ranks", "take --ep 1 --tp 1")),
    (4, "--tp 8", ("--tp", "= 8", "4 ranks", "take --ep 1 --tp 4")),
    (6, "--ep 4 --tp 2", ("4 · 2 = 8", "6 ranks", "take --ep 1 --tp 2")),
    (2, "--ep 2 --tp 2", ("2 · 2 = 4", "take --ep 1 --tp 2")),
    (2, "--top-k 3 --experts 2", ("--top-k 3", "2 experts", "take --top-k 2")),
    (2, "--top-k 1 --balance 0", ("--balance 0 with --top-k 1", "--balance 0.01")),
    (4, "--experts 6", ("--experts 6", "6 % 4", "--experts 8")),
    (4, "--batch-size 6", ("--batch-size 6", "6 % 4", "--batch-size 8")),
    (2, "--layers 3", ("--layers 3", "3 % 2", "--layers 4")),
    (4, "--kv-heads 3 --tp 2", ("--kv-heads 3", "3 % 2", "--kv-heads 4")),
    (2, "--heads 6", ("--heads 6", "6 % 4", "--heads 8")),
    (2, "--hidden 40", ("--hidden 40", "--hidden 48")),
    (2, "--top-k 9", ("--top-k 9", "8 experts")),
    (2, "--vocab-size 256", ("--vocab-size 256", "257")),
    (2, "--clip 0", ("--clip 0",)), (2, "--balance -1", ("--balance -1",)),
    (2, "--balance inf", ("--balance inf", "take --balance 0.01")),
    (2, "--dropout 0.1", ("--dropout 0.1", "one mask", "take --dropout 0")),
])  # fmt: skip
def test_refused(ranks, flags, words):
    text = refused_in_one_line(EXPERTS, ranks, flags)
    assert all(word in text for word in words), text


# The script's own runs.


@over(EXPERT_RUNS)
def test_passes_and_fits_the_screen(run):
    passed(run)


def mesh_of(run, data: dict) -> dict[str, int]:
    R, T = data["size"]["R"], data["size"]["T"]
    return {"dp": run[1] // (R * T), "ep": R, "tp": T}


@over(EXPERT_RUNS)
def test_every_gradient_and_replica_is_compared(run):
    data = jobs.result(*run).data
    names = {row["name"] for row in data["checks"]}
    parameters = {name.split(", ")[0] for name in names if name.startswith("gradients")}
    layers = data["size"]["L"]
    mesh = mesh_of(run, data)
    assert len(parameters) == 5 + layers * 16 + layers // 2 * 3
    for method in ("EP", "PyTorch"):
        for name in parameters:
            name = name.removeprefix("gradients: ")
            for kind in ("gradients", "parameters"):
                assert f"{kind}: {name}, {method}" in names
            is_expert = ".experts." in name
            for axis in ("dp", "ep", "tp"):
                is_compared = f"replicas: {name} over {axis}, {method}" in names
                if mesh[axis] == 1 or (is_expert and axis != "dp"):
                    assert not is_compared
                elif axis != "tp":
                    assert is_compared
    for router, k in (("random", 1), ("random", 2), ("random", 3)):
        for what in ("y", "dL/dx", "router.weight", "experts.up_proj"):
            assert f"one layer: {what}, {router}, k {k}" in names


@over(EXPERT_RUNS)
def test_rows_add_up(run):
    """All rows of the first layer are computed by some rank; bytes are 0 on one."""
    data = jobs.result(*run).data
    size = data["size"]
    rows = rows_with(data, "ep rank", "computes")
    assert len(rows) == size["R"]
    assert sum(row["computes"] for row in rows) == size["R"] * size["k"] * size["t"]
    assert all(row["sends"] <= size["k"] * size["t"] for row in rows)
    layers = rows_with(data, "router", "‖g‖ by y")
    assert len(layers) >= 4
    for row in layers:
        assert (row["sends"] == "0") == (size["R"] == 1)
        assert (row["‖g‖ by y"] == "0.00") == (row["k"] == 1)
