"""beyond/11: a split sequence gives one process's model, forward and backward.

Attention of random shapes on 2, 3, 4 and 8 ranks against PyTorch's own, to the rounding
of float64; the blocks of scores and the bytes; then what the script's own runs say.
"""

import argparse

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import CONTEXT, CONTEXT_RUNS, found, number, over, passed, rows_with
from test_refusals import refused_in_one_line

DRIVER = ("drive_context.py", 8)
lesson = jobs.load(CONTEXT)

driven = pytest.mark.launches(*DRIVER)
pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


# On eight ranks.


@driven
def test_attention_of_random_shapes(ranks):
    """Output and gradients of q, k and v, by each method, in float64."""
    cases = found(ranks, "cases")
    assert {case["T"] for case in cases} == {1, 2, 3, 4, 8}
    assert {case["per_kv"] for case in cases} >= {1, 2, 3}
    assert {case["name"] for case in cases} == {*lesson.METHODS, "gather, zigzag"}
    for case in cases:
        assert set(case["diffs"]) == {"y", "dL/dq", "dL/dk", "dL/dv"}
        for what, diff in case["diffs"].items():
            assert diff < 1e-12, (what, case)


@driven
def test_each_score_is_computed_by_one_rank(ranks):
    """The blocks of all ranks cover the causal triangle once, and nothing above it."""
    scores = {}  # (group, number of the case, layout) → how often each was computed
    for case in found(ranks, "cases"):
        if case["name"] not in ("ring", "zigzag"):
            assert case["blocks"] == []
            continue
        T, S, t = case["T"], case["S"], case["rank"]
        zigzag = case["name"] == "zigzag"
        assert len(case["blocks"]) == (2 * T + 1 if zigzag else t + 1), case
        # At step i a rank has the keys of rank − i; all of a zigzag step are alike.
        per_step = [[b[0] for b in case["blocks"]].count(step) for step in range(T)]
        if zigzag:
            assert per_step == [3] + [2] * (T - 1)
        else:
            assert per_step == [1] * (t + 1) + [0] * (T - t - 1)
        key = tuple(case[name] for name in ("T", "B", "S", "K", "per_kv", "H", "name"))
        count = scores.setdefault(key, torch.zeros(S, S, dtype=torch.int64))
        for _, query, key_at, c in case["blocks"]:
            assert query in case["here"]
            count[query : query + c, key_at : key_at + c] += 1
    for (T, *_), count in scores.items():
        causal = torch.ones_like(count).tril()
        assert (count * causal == causal * count[0, 0]).all() and count[0, 0] > 0
        chunks = count.shape[0] // (2 * T)
        above = count.triu(2 * chunks)  # beyond a diagonal block
        assert (above == 0).all()


@driven
def test_calls_and_bytes(ranks):
    """Of one attention; b: bytes of a rank's keys and values, with K heads."""
    for case in found(ranks, "cases"):
        T, e, name = case["T"], 8, case["name"]
        s, K, N = case["S"] // T, case["K"], case["K"] * case["per_kv"]
        b = 2 * case["B"] * s * K * case["H"] * e
        q = case["B"] * s * N * case["H"] * e
        if T == 1:
            expected = [[0, 0], [0, 0]]
        elif name.startswith("gather"):
            expected = [[1, T * b], [2, 2 * T * b]]
        elif name == "Ulysses":
            expected = [[4, 2 * q + b], [8, 4 * q + 2 * b]]
        else:
            expected = [[T - 1, (T - 1) * b], [3 * T - 2, (3 * T - 2) * b]]
        assert [case["forward"], case["both"]] == expected, case


@driven
def test_comparison_with_pytorch(ranks):
    """All of it but PyTorch's kernels, which need a GPU; ours is in their place."""
    cases = found(ranks, "pytorch")
    assert {case["T"] for case in cases} == {1, 2, 3, 4, 8}
    for case in cases:
        assert set(case["diffs"]) == {"y", "dL/dq", "dL/dk", "dL/dv"}
        assert max(case["diffs"].values()) < 1e-12, case


@driven
def test_pytorch_has_no_kernel_for_cpu(ranks):
    """The script quotes the error. Once this fails, it can compare on CPU as well."""
    for error in found(ranks, "refused"):
        assert "does not have a sharding strategy registered" in error
        quoted = " ".join(lesson.pytorch_attention.__doc__.split())
        assert error in quoted.replace("_cpu .default", "_cpu.default")


# In this process.


def test_when_pytorch_is_left_out():
    """On a GPU its chunks are padded to 32 positions (run on an H200 with 16: it
    raised; with 32 and 64: it agreed)."""

    def reason(device, dtype, S, C):
        args = argparse.Namespace(device=device, dtype=dtype)
        return lesson.why_left_out(args, {"S": S, "C": C})

    assert "no CPU kernel" in reason("cpu", "float32", 128, 2)
    assert "float64" in reason("cuda:0", "float64", 128, 2)
    assert "take --seq-len 128" in reason("cuda:0", "float32", 64, 2)
    assert "take --seq-len 256" in reason("cuda:0", "float32", 128, 4)
    for S, C in ((128, 2), (256, 2), (256, 4), (512, 4)):
        assert reason("cuda:1", "float32", S, C) == ""


@pytest.mark.parametrize("T", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_positions(T, layout):
    """Each position is on one rank; both layouts give all ranks as many."""
    S = 6 * T
    held = [lesson.positions_of(rank, T, layout, S).tolist() for rank in range(T)]
    assert sorted(x for here in held for x in here) == [*range(S)]
    for rank, here in enumerate(held):
        assert len(here) == 6
        if layout == "contiguous":
            assert here == [*range(6 * rank, 6 * rank + 6)]
        else:
            assert here[:3] == [*range(3 * rank, 3 * rank + 3)]
            assert here[3:] == [*range(S - 3 * rank - 3, S - 3 * rank)]
    with pytest.raises(ValueError, match="do not divide S"):
        lesson.positions_of(0, 2, layout, 2 * 6 + 1)


def test_merge_of_many_blocks():
    """In any order, and where the numbers are so large that exp would overflow."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 5, 4, generator=generator, dtype=torch.float64) * 100
    kv = torch.randn(2, 1, 2, 12, 4, generator=generator, dtype=torch.float64) * 100
    expected = (q @ kv[0].mT / 2).softmax(-1) @ kv[1]
    for order in ((0, 1, 2), (2, 0, 1)):
        y = torch.zeros_like(q)
        lse = torch.full_like(q[..., :1], float("-inf"))
        for i in order:
            at = torch.arange(5) + 100, torch.arange(4)  # all keys are earlier
            block = lesson.Block(slice(0, 5), slice(0, 4), *at)
            y, lse = lesson.merge(
                y, lse, *lesson.attend(q, kv[..., 4 * i : 4 * i + 4, :], block)
            )
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


def test_backward_of_blocks_is_that_of_one_softmax():
    """By autograd of the whole; two query heads share a key/value head."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 3, 2, generator=generator, dtype=torch.float64)
    kv = torch.randn(2, 2, 2, 6, 2, generator=generator, dtype=torch.float64)
    grad_y = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    q.requires_grad_(), kv.requires_grad_()
    k, v = lesson.repeat_for_queries(kv, q)
    scores = q @ k.mT / 2**0.5
    y = scores.softmax(-1) @ v
    y.backward(grad_y)
    lse = scores.detach().logsumexp(-1, keepdim=True)
    delta = (grad_y * y.detach()).sum(-1, keepdim=True)
    to_q = torch.zeros_like(q)
    with torch.no_grad():
        for keys in (slice(0, 3), slice(3, 6)):
            at = torch.arange(3) + 100, torch.arange(3)
            block = lesson.Block(slice(0, 3), keys, *at)
            mine = lesson.attend_backward(
                q, kv[:, :, :, keys], block, grad_y, delta, lse
            )
            to_q += mine[0]
            torch.testing.assert_close(
                mine[1], kv.grad[:, :, :, keys], rtol=0, atol=1e-12
            )
    torch.testing.assert_close(to_q, q.grad, rtol=0, atol=1e-12)


def test_a_rank_without_targets_has_no_loss_and_no_gradient():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    target = torch.full((1, 4), lesson.lesson02.IGNORE)

    def with_others(x, group):
        """The other ranks have 3 targets, and a loss of 2."""
        return x + (2 if x.is_floating_point() else 3)

    with pytest.MonkeyPatch.context() as patch:
        for module in (lesson.lesson00, lesson.lesson01):  # cp_loss's, and g's
            patch.setattr(module, "all_reduce", with_others)
        loss = lesson.cp_loss(logits, target, no_group(2))
    loss.backward()
    assert loss.item() == 2 and logits.grad.abs().max() == 0


@pytest.mark.parametrize("ranks, flags, words", [
    (4, "--seq-len 36", ("--seq-len 36", "36 % 8", "zigzag", "--seq-len 40")),
    (3, "--seq-len 64", ("64 % 6", "--seq-len 66")),
    (4, "--kv-heads 2", ("--kv-heads 2", "Ulysses", "take 4", "--no-ulysses")),
    (4, "--kv-heads 6 --tp 2", ("Ulysses", "3 heads per TP rank", "take 8")),
    (4, "--tp 3", ("--tp 3", "4 ranks % 3 = 1", "take 1")),
    (4, "--kv-heads 3 --tp 2", ("--kv-heads 3", "3 % 2", "--kv-heads 4")),
    (4, "--heads 6", ("--heads 6", "6 % 4", "--heads 8")),
    (2, "--hidden 40", ("--hidden 40", "--hidden 48")),
    (2, "--hidden 2 --heads 1 --kv-heads 1 --no-ulysses", ("--hidden 2",)),
    (2, "--vocab-size 256", ("--vocab-size 256", "257")),
    (2, "--clip 0", ("--clip 0",)),
    (2, "--dropout 0.1", ("--dropout 0.1", "one mask", "take --dropout 0")),
])  # fmt: skip
def test_refused(ranks, flags, words):
    text = refused_in_one_line(CONTEXT, ranks, flags)
    assert all(word in text for word in words), text


# The script's own runs.


@over(CONTEXT_RUNS)
def test_passes_and_fits_the_screen(run):
    passed(run, 85)


@over(CONTEXT_RUNS)
def test_every_gradient_of_every_method_is_compared(run):
    data = jobs.result(*run).data
    names = {row["name"] for row in data["checks"]}
    columns = rows_with(data, "name", "without CP")[0]
    methods = [name for name in lesson.METHODS if name in columns]
    assert ("Ulysses" in methods) == ("--no-ulysses" not in run)
    assert len(methods) >= 3
    layers = data["size"]["L"]
    model = lesson.lesson02.Transformer(
        lesson.lesson02.Config(1, 4, 1, 1, layers, 1, 0.0)
    )
    for method in methods:
        for name, _ in model.named_parameters():
            for kind in ("gradients", "parameters"):
                assert f"{kind}: {name}, {method}" in names
            assert f"replicas: {name}, {method}, cp" in names
        assert f"replicas: losses, {method}, cp" in names
        for what in ("y", "dL/dq", "dL/dk", "dL/dv"):
            assert f"attention: {what}, {method}" in names


@over(CONTEXT_RUNS)
def test_who_has_what(run):
    data = jobs.result(*run).data
    C, S = data["size"]["C"], data["size"]["S"]
    positions = rows_with(data, "contiguous", "zigzag")
    assert C * data["size"]["T"] == run[1] and C == len(positions)
    totals = [
        sum(row[f"targets, {layout}"] for row in positions)
        for layout in ("contiguous", "zigzag")
    ]
    assert totals[0] == totals[1] > 0
    for row in positions:
        s = S // C
        assert row["contiguous"] == f"{row['rank'] * s} to {row['rank'] * s + s - 1}"
    if S == 160:
        assert 0 in [row["targets, contiguous"] for row in positions]


@over(CONTEXT_RUNS)
def test_saved_bytes_grow_with_the_length_in_the_ring_only(run):
    data = jobs.result(*run).data
    for row in rows_with(data, "attention", "formula"):
        lengths = [name for name in row if name.startswith("S ")]
        short, middle, long = (number(row[name]) for name in lengths)
        if row["attention"] in ("ring", "zigzag"):
            assert (middle, long) == (2 * short, 4 * short)
        else:
            assert long > 2 * middle > 4 * short
