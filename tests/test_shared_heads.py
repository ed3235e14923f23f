"""beyond/09: fewer key/value heads than ranks give one process's model, with TP and SP.

Random models on four ranks against plain PyTorch, to the rounding of float64; then what
the script's own runs say.
"""

import jobs
import pytest
import torch
from runs import ALL_RUNS, SHARED_HEADS, flag, found, number, over, rows_with
from test_refusals import as_rank, message, refused_in_one_line
from test_transformer import EXACT, ROUNDED, models_are_equal

DRIVER = ("drive_shared_heads.py", 4)
RUNS = [run for run in ALL_RUNS if run[0] == SHARED_HEADS]
lesson = jobs.load(SHARED_HEADS)

driven = pytest.mark.launches(*DRIVER)
pytestmark = pytest.mark.timeout(900)


# On four ranks.


@driven
def test_float64_equality(ranks):
    """With TP and with SP: logits, loss, gradients, norm, clipping, parameters."""
    models = found(ranks, "models")
    models_are_equal(models)
    assert len(ROUNDED) + len(EXACT) > 10
    kinds = {(case["T"], case["kv_heads"], case["with_sp"]) for case in models}
    assert kinds == {(T, K, sp) for T, K in ((2, 1), (4, 1), (4, 2)) for sp in (0, 1)}
    for key, values in (
        ("layers", {1, 2, 3}), ("dropout", {0, 0.1, 0.5}), ("tied", {True, False})
    ):  # fmt: skip
        assert {case[key] for case in models} == values, key


@driven
def test_replicas_of_heads_are_equal(ranks):
    """To the bit, after some steps; weight and bias of k and v in each layer."""
    for case in found(ranks, "models"):
        assert case["heads"] == case["equal"] == 4 * case["layers"], case


# In this process.


@pytest.mark.parametrize("kv_heads, copies", [(1, 1), (1, 4), (2, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_repeated_heads(kv_heads, copies, bias):
    """Head h stands at c·h … c·h + c − 1; the full linear is not changed."""
    full = torch.nn.Linear(5, kv_heads * 3, bias=bias)
    before = {name: p.clone() for name, p in full.named_parameters()}
    repeated = lesson.repeat_heads(full, 3, copies)
    assert repeated.out_features == len(repeated.weight) == copies * kv_heads * 3
    x = torch.randn(7, 5)
    heads = full(x).unflatten(-1, (kv_heads, 3))
    for place, head in enumerate(repeated(x).unflatten(-1, (-1, 3)).unbind(-2)):
        torch.testing.assert_close(head, heads[:, place // copies])
    for name, p in full.named_parameters():
        assert torch.equal(p, before[name])
        assert p.data_ptr() != repeated.get_parameter(name).data_ptr()


@pytest.mark.parametrize("kv_heads, copies", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_a_model_of_repeated_heads_computes_the_same(kv_heads, copies):
    torch.manual_seed(kv_heads)
    config = lesson.lesson02.Config(11, 48, 8, kv_heads, 2, 7, 0.0)
    full = lesson.lesson02.Transformer(config).double()
    tokens = torch.randint(11, (2, 7))
    repeated = lesson.repeat_kv_heads(full, copies)
    torch.testing.assert_close(repeated(tokens), full(tokens), rtol=0, atol=1e-13)


@pytest.mark.parametrize("ranks, flags, words", [
    (4, "--kv-heads 3", ("--kv-heads 3", "4 ranks % 3 = 1", "take 1")),
    (6, "--kv-heads 4", ("6 ranks % 4 = 2", "take 2")),
    (4, "--kv-heads 8", ("--kv-heads 8", "4 ranks", "02_transformer_tp.py", "take 4")),
    (4, "--heads 6", ("--heads 6", "6 % 4", "--heads 8")),
    (4, "--seq-len 30", ("--seq-len 30", "30 % 4", "--seq-len 32")),
    (4, "--hidden 40", ("--hidden 40", "--hidden 48")),
    (4, "--hidden 2 --heads 4", ("--hidden 2",)),
    (4, "--vocab-size 256", ("--vocab-size 256", "257")),
    (4, "--clip 0", ("--clip 0",)), (4, "--dropout 1", ("--dropout 1",)),
])  # fmt: skip
def test_refused(ranks, flags, words):
    text = refused_in_one_line(SHARED_HEADS, ranks, flags)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name, kv_heads", [
    ("02_transformer_tp", 2), ("03_vocab_parallel", 1), ("04_sequence_parallel", 2),
])  # fmt: skip
def test_lessons_name_this_script(name, kv_heads):
    """They refuse T > K, and say where it is."""
    flags = "--kv-heads", kv_heads
    code, out, err = jobs.run_here(name, *flags, **as_rank(0, 4))
    assert (code, out) == (2, "") and "beyond/09_shared_heads.py" in message(err)


# The script's own runs.


@over(RUNS)
def test_who_holds_which_head(run):
    data = jobs.result(*run).data
    T, K, N = (data["size"][letter] for letter in "TKN")
    c = T // K
    heads = rows_with(data, "rank", "query heads")
    assert data["size"]["c"] == c and len(heads) == T
    for rank, row in enumerate(heads):
        queries = [int(head) for head in row["query heads"].split()]
        assert queries == [*range(rank * N // T, (rank + 1) * N // T)]
        # All of a rank's query heads use the key/value head that it holds.
        assert {head * K // N for head in queries} == {int(row["key head"])}
        assert row["key head"] == row["value head"] == str(rank // c)
        first = rank // c * c
        assert row["replica group"] == str([*range(first, first + c)])
        assert row["kv group"] == str([*range(rank % c, T, c)])


@over(RUNS)
def test_every_gradient_parameter_and_replica_is_compared(run):
    data = jobs.result(*run).data
    assert data["verdict"] == "PASS"
    checks = {row["name"] for row in data["checks"]}
    model = lesson.lesson02.Transformer(
        lesson.lesson02.Config(1, 4, 1, 1, 2, 1, 0.0)
    )  # 2 layers
    for name, _ in model.named_parameters():
        for way in ("TP", "SP"):
            assert f"gradients: {name}, {way}" in checks
            assert f"parameters: {name}, {way}" in checks
            is_sharded = f"replicas: {name}, {way}" not in checks
            heads = ".k_proj." in name or ".v_proj." in name
            assert not (heads and is_sharded and run[1] > 1)
    replicas = {check for check in checks if check.startswith("replicas: ")}
    assert len(replicas) == (0 if run[1] == 1 else 2 * 8 + 18 + 15)


@over(RUNS)
def test_bytes_of_sums_and_of_heads(run):
    """Four sums in each layer, of weights [H, D] and biases [H]; only if T > K. A rank
    has max(K/T, 1) heads of k and v, and that much of the KV cache."""
    data = jobs.result(*run).data
    size = data["size"]
    T, K, H, D, L, e = (size[letter] for letter in "TKHDLe")
    sums = [row for row in rows_with(data, "axis") if row["axis"] == "replica"]
    assert [row["run"] for row in sums] == (["TP", "SP"] if T > K else [])
    for row in sums:
        assert row["phase"] == "backward" and number(row["calls"]) == 4 * L
        assert number(row["bytes"]) == 2 * L * (H * D + H) * e
    heads = rows_with(data, "bytes", "without TP")[0]
    assert heads["bytes"] == "k_proj, v_proj"
    assert number(heads["without TP"]) == 2 * L * K * H * (D + 1) * e
    assert heads["TP"] == heads["SP"]
    assert number(heads["TP"]) * K == number(heads["without TP"])
    cache = {row["ranks"]: row for row in rows_with(data, "ranks", "KV cache per rank")}
    assert {n for n, row in cache.items() if row["source"] == "measured"} == {1, T}
    assert set(cache) == {1, K, T, 2 * T}
    whole = number(cache[1]["KV cache per rank"])
    assert whole == 2 * L * size["B"] * size["S"] * K * H * e
    for ranks, row in cache.items():
        assert number(row["KV cache per rank"]) * min(ranks, K) == whole
    assert flag(run, "--kv-heads", str(K)) == str(K)
