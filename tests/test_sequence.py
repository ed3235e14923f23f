"""Lesson 04: a split sequence gives one process's model, in the memory the paper says.

Random models on four ranks against plain PyTorch, to the rounding of float64; bytes
kept for backward against the paper's table; then every number of the lesson's own runs.
"""

import math
import re
import sys
from unittest import mock

import jobs
import pytest
import torch
from alone import arguments, first_step
from old_runs import (
    ALL_RUNS,
    ALLOWED,
    SIZES,
    check_gradients,
    check_replicas,
    expect,
    folded,
    found,
    gradient_limit,
    over,
)

DRIVER = ("drive_sequence.py", 4)
LESSON = "04_sequence_parallel"
RUNS = [run for run in ALL_RUNS if run[0] == LESSON]
WITH_QWEN2 = [run for run in RUNS if "--hf" in run]
WAYS = [
    "no parallelism", "TP", "TP + SP", "TP + SP, gathered kept",
    "TP, selective recompute", "TP + SP, selective", "TP, full recompute",
    "TP + SP, full recompute",
]  # fmt: skip

driven = pytest.mark.launches(*DRIVER)


# The random models.


@driven
@pytest.mark.parametrize("kind", [
    "held", "logits", "loss", "gradients", "touched", "norm", "parameters", "eval",
])  # fmt: skip
def test_float64_equality(ranks, kind):
    worst = max(found(ranks, "models"), key=lambda case: case["diffs"][kind][0])
    exact = kind in ("held", "touched")
    assert worst["diffs"][kind][0] <= (0 if exact else 1e-12), worst


@driven
def test_models_cover_the_ground(ranks):
    mine = ranks[0]["models"]
    configs = [case["config"] for case in mine]
    assert len(mine) >= 60 and len({str(config) for config in configs}) >= 55
    for T in (1, 2, 4):
        some = [case for case in mine if case["T"] == T]
        assert len(some) >= 15
        for key, least in (("layers", 3), ("dropout", 3), ("kv_heads", 2)):
            assert len({case["config"][key] for case in some}) >= least, (T, key)
        for key in ("tied", "save"):
            assert {case[key] for case in some} == {True, False}, (T, key)
        assert {case["config"]["seq_len"] > case["S"] for case in some} == {True, False}
        lengths = {case["S"] for case in some}
        assert 1 in lengths and max(lengths) >= 2 * T + 1 and len(lengths) >= 5
        if T > 1:
            assert {S % T == 0 for S in lengths} == {True, False}
            assert any(case["parts"]["busy"] < T for case in some), "a rank of padding"
            assert any(case["config"]["vocab_size"] % T for case in some)
    assert {case["B"] for case in mine} == {1, 2, 3}


@driven
def test_calls_and_bytes(ranks):
    """2L + 1 gathers and scatters each way, the inputs once more; a sum at the end."""
    for case in found(ranks, "models"):
        assert case["sent"] == case["wanted"], case
        assert (case["sent"] == []) is (case["T"] == 1)


@driven
def test_replicated_gradients_are_parts_before_they_are_added(ranks):
    """They add up to the reference's; no rank has another's, or all, or padding's."""
    for case in found(ranks, "models"):
        parts = case["parts"]
        assert parts["sum"][0] <= 1e-12, case
        assert parts["idle"] == 0 and parts["alike"] == 0, case
        assert parts["names"] == 6 * case["config"]["layers"] + 2
        assert parts["whole"] == (parts["names"] if parts["busy"] == 1 else 0), case
    busy = {case["parts"]["busy"] for case in found(ranks, "models")}
    assert busy == {1, 2, 3, 4}


@driven
def test_replicas_stay_equal_to_the_bit(ranks):
    check_replicas(found(ranks, "models"))


@driven
def test_parameters_are_copies_with_pytorch_names(ranks):
    for case in found(ranks, "models"):
        assert case["own"] and case["names"], case


# Each pair, the linears of a gathered sequence, dropout, recompute.


@driven
@pytest.mark.parametrize("pair", [
    "gather_sequence", "scatter_sequence", "ScatterToSequence", "GatherFromTP",
    "sum_to_slices",
])  # fmt: skip
def test_pairs_against_one_process(ranks, pair):
    cases = found(ranks, "pairs")
    for case in cases:
        assert max(case["diffs"][pair]) <= 1e-12, case
    assert {case["S"] % case["T"] for case in cases if case["T"] == 4} == {0, 1, 2, 3}
    assert {(c["T"], c["dim"]) for c in cases} >= {(T, d) for T in (2, 4)
                                                   for d in range(3)}  # fmt: skip


@driven
@pytest.mark.parametrize("what", ["y", "x", "weights", "biases"])
def test_linears_of_a_gathered_sequence(ranks, what):
    cases = found(ranks, "linears")
    for case in cases:
        assert case["diffs"][what] <= 1e-12, case
        assert case["sent"] == case["wanted"], case
    kinds = {(c["T"], c["linears"], c["save"]) for c in cases if c["S"] % c["T"]}
    assert len(kinds) >= 10, "of 12 with lengths that T does not divide"


@driven
def test_dropout_is_a_slice_of_one_mask(ranks):
    """Output and gradient to the bit; all ranks' generators move on together."""
    cases = found(ranks, "dropouts")
    for case in cases:
        assert case["diffs"] == [0, 0, 0], case
    assert len({case["p"] for case in cases}) == 4
    assert {case["S"] % 4 == 0 for case in cases if case["T"] == 4} == {True, False}


@driven
def test_recomputed_to_the_bit(ranks):
    """Dropout on: the masks of the second forward are those of the first."""
    again = {way for way in WAYS if "recompute" in way or "selective" in way}
    for case in found(ranks, "recomputes"):
        assert case["bits"] == dict.fromkeys(again, True), case
        assert set(case["diffs"]) == set(WAYS) and case["names"] == 16
        assert max(case["diffs"].values()) <= 1e-12, case
        assert case["one_generator"], case


@driven
@pytest.mark.parametrize("what, said", [
    ("heads", ["2 % 4", "= 2"]), ("kv-heads", ["2 % 4", "= 2"]),
    ("split of 6", ["6 % 4", "= 2"]),
    ("token 10", ["0 to 10", "the vocabulary is 0 to 9"]),
    ("token -1", ["-1 to 4", "the vocabulary is 0 to 9"]),
])  # fmt: skip
def test_what_cannot_be_split_or_looked_up(ranks, what, said):
    for rank in ranks:
        assert all(word in rank["refusals"][what] for word in said), rank["refusals"]


@driven
def test_more_positions_than_the_tables_have(ranks):
    """6 and 5 positions are both padded to 8 on four ranks: no shape gives it away."""
    for rank in ranks:
        assert "6" in rank["refusals"]["6 positions of 5"]


# Memory.


def kept(way: str, B, S, D, N, T, e) -> int:
    """Bytes a layer keeps: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4, item by
    item in numbers of e bytes (the paper has 2) and masks of one byte; and LayerNorm's
    mean and 1/σ, two numbers a token each, which the paper leaves out.
    """
    sbh, square = S * B * D, N * S * S * B
    if "full" in way:  # the layer's input alone
        return sbh * e // (T if "SP" in way else 1)
    inputs = 2 + 2  # of two LayerNorms; of q, k, v; of the MLP
    inner = 3 + 1 + 4 + 4  # q, k, v; input of o_proj; of GELU; of down_proj
    bytes_outside = (inputs * e + 2) * sbh + 4 * S * B * e
    bytes_inside = inner * e * sbh
    if "selective" not in way:  # softmax's output, its mask, dropout's output
        bytes_inside += (2 * e + 1) * square
    if way == "no parallelism":
        return bytes_outside + bytes_inside
    cut = bytes_outside if "SP" in way else 0
    total = (cut + bytes_inside) // T + bytes_outside - cut
    if way.endswith("gathered kept"):  # two inputs whole, not a slice of them
        total += 2 * e * (sbh - sbh // T)
    return total


@driven
@pytest.mark.parametrize("way", WAYS)
def test_bytes_kept_are_the_papers(ranks, way):
    for case in found(ranks, "memory"):
        wanted = kept(way, *case["sizes"], case["T"], case["size"])
        assert case["bytes"][way] == wanted, case
    assert all(set(case["bytes"]) == set(WAYS) for case in found(ranks, "memory"))
    sizes = {(tuple(c["sizes"]), c["T"], c["size"]) for c in found(ranks, "memory")}
    assert len(sizes) == 6 * 3 * 2


def test_the_papers_coefficients():
    """Table 2 of the paper, 16 bits: bytes ÷ sbh, the LayerNorms' statistics apart."""
    B, S, D, N = 3, 16, 64, 8
    a = 5 * N * S / D
    for t in (1, 2, 4, 8):
        for way, units, share in (
            ("no parallelism", 34 + a, 1), ("TP", 10 + (24 + a) / t, 1),
            ("TP + SP", (34 + a) / t, 1 / t),
            ("TP + SP, gathered kept", (34 + a) / t + 4 * (1 - 1 / t), 1 / t),
            ("TP, selective recompute", 10 + 24 / t, 1),
            ("TP + SP, selective", 34 / t, 1 / t), ("TP, full recompute", 2, 0),
        ):  # fmt: skip
            stats = 8 * S * B * share
            assert kept(way, B, S, D, N, t, 2) == units * S * B * D + stats, (way, t)


# In this process.


def test_padding_stands_behind_the_sequence():
    pad = jobs.load(LESSON).pad_sequence
    for shape in ((2, 5), (1, 1, 3), (3, 7, 2, 2), (2, 8, 1)):
        for ranks in (1, 2, 3, 4, 8):
            x = torch.randint(9, shape)
            got, S = pad(x, ranks, 256), shape[1]
            assert got.dtype == torch.int64 and got.shape[1] % ranks == 0
            assert 0 <= got.shape[1] - S < ranks
            assert got.shape[:1] + got.shape[2:] == x.shape[:1] + x.shape[2:]
            assert torch.equal(got[:, :S], x) and (got[:, S:] == 256).all()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 8, 3, dtype=torch.float64)
    y = pad(x, 4)
    assert (y[:, 5:] == 0).all() and y.dtype == torch.float64
    y.backward(upstream)
    assert torch.equal(x.grad, upstream[:, :5])


def test_batches_padded_for_pytorchs_plan():
    lesson = jobs.load(LESSON)
    tokens, target = torch.randint(9, (2, 2, 5))
    longer, targets = lesson.pad_batch(tokens, target, 4)
    assert (longer[:, 5:] == 256).all() and (targets[:, 5:] == -100).all()
    assert longer.shape == targets.shape == (2, 8)


def test_hf_without_transformers():
    env = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    env |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    with mock.patch.dict(sys.modules, {"transformers": None}):  # cannot be imported
        code, out, err = jobs.run_here(LESSON, "--hf", **env)
    assert code == 2 and out == "" and re.fullmatch(r"error: --hf .*\n", err), err
    named = re.search(r"pip install (transformers==[\d.]+)$", err.strip())
    assert named, err
    wanted = (jobs.ROOT / "requirements.txt").read_text().split()
    assert named[1] in wanted, "the version that the tests have"


# The lesson's own runs: numbers in --json worked out again.


def sizes(run) -> dict:
    args = arguments(run)
    return {
        "D": args.hidden, "N": args.heads, "L": args.layers, "B": args.batch_size,
        "S": args.seq_len, "V": args.vocab_size, "T": run[1], "steps": args.steps,
        "s": -(-args.seq_len // run[1]), "e": SIZES[args.dtype],
    }  # fmt: skip


def section(run, number: int) -> list[str]:
    """The lines of one numbered part of the output."""
    text = jobs.result(*run).data["text"]
    start = next(i for i, x in enumerate(text) if x.startswith(f"{number}  "))
    return text[start : text.index("", start)]


@over(RUNS)
def test_losses_and_gradients(run):
    data, size = jobs.result(*run).data, sizes(run)
    loss_limit, _ = ALLOWED[data["dtype"]]
    assert [row["step"] for row in data["losses"]] == [*range(1, size["steps"] + 1)]
    first, grads = first_step(run, data["dtype"])
    row = data["losses"][0]
    assert abs(row["without"] - first) <= loss_limit * first
    assert abs(first - math.log(size["V"])) < 1.5, "a fresh model knows nothing"
    for row in data["losses"]:
        for way in ("with", "tp"):
            assert abs(row[way] - row["without"]) <= loss_limit * row["without"], row
        assert row["tokens"] == size["B"] * size["S"] > row["padding"] >= 0
    wide = "float64" if data["dtype"] == "float64" else "float32"
    dry, _ = first_step(run, wide, dropout=False)
    assert abs(data["losses"][0]["dtensor"] - dry) <= ALLOWED[wide][0] * dry
    check_gradients(run)
    for row in data["gradients"]:
        mine = [g for name, g in grads.items() if folded(name, row["name"])]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in mine))
        assert (
            abs(row["norm_without"] - norm) <= gradient_limit(run, row["name"]) * norm
        )


@over(RUNS)
def test_parts_of_replicated_gradients(run):
    """Each rank's numbers before they are added differ; the sum is the reference's."""
    data, size = jobs.result(*run).data, sizes(run)
    _, grads = first_step(run, data["dtype"])
    last = f"layers.{size['L'] - 1}."
    names = {f"{last}input_layernorm.weight", f"{last}self_attn.o_proj.bias"}
    assert set(data["replicated"]) == names
    for name, cells in data["replicated"].items():
        parts = [[float(x) for x in cell.split()] for cell in cells]
        assert len(parts) == size["T"] and len({tuple(p) for p in parts}) == size["T"]
        wanted = grads[name][:3].tolist()
        most = grads[name].abs().max().item()
        shown = len(cells[0].split()[0].partition(".")[2])  # digits behind the point
        slack = size["T"] * 0.51 * 10**-shown + ALLOWED[data["dtype"]][1] * most
        assert slack < most / 2, "too few digits to tell"
        for got, right in zip(map(sum, zip(*parts)), wanted):
            assert abs(got - right) <= slack, (name, parts, wanted)


@over(RUNS)
def test_bytes_sent(run):
    """The bytes of TP's all-reduces, and the inputs gathered once more."""
    data, size = jobs.result(*run).data, sizes(run)
    n, T, several = 2 * size["L"] + 1, size["T"], size["T"] > 1
    one = size["B"] * size["S"] * size["D"] * size["e"]
    padded = size["B"] * size["s"] * T * size["D"] * size["e"]
    again = 0 if "--save-gathered" in run else n
    calls = {
        ("layers", "forward", "all-reduce"): (n, one),
        ("layers", "backward", "all-reduce"): (n, one),
        ("layers", "forward", "all-gather"): (n, padded),
        ("layers", "forward", "reduce-scatter"): (n, padded),
        ("layers", "backward", "reduce-scatter"): (n, padded),
        ("layers", "backward", "all-gather"): (n + again, padded),
        ("replicated", "backward", "all-reduce"): (
            1, (6 * size["L"] + 2) * size["D"] * size["e"]),
    }  # fmt: skip
    steps = size["steps"] * several
    expect(data, {
        (what, phase, name, "tp"): (k * steps, k * each * steps)
        for (what, phase, name), (k, each) in calls.items()
    })  # fmt: skip
    hop = (T - 1) / T
    wanted = {"TP": 2 * n * one * 2 * hop, "again": again * padded * hop}
    wanted["TP + SP"] = 4 * n * padded * hop + wanted["again"]
    assert data["ring_bytes"] == pytest.approx(wanted)
    by_sp = data["ring_bytes"]["TP + SP"] - data["ring_bytes"]["again"]
    as_long = data["ring_bytes"]["TP"] * size["s"] * T / size["S"]
    assert by_sp == pytest.approx(as_long), "as many bytes, padding apart"


@over(RUNS)
def test_memory_of_a_layer(run):
    data, size = jobs.result(*run).data, sizes(run)
    wide = "float64" if data["dtype"] == "float64" else "float32"
    B, S, D, N, T = size["B"], size["s"] * size["T"], size["D"], size["N"], size["T"]
    wanted = {
        f"a layer, {way}, {kind}": kept(way, B, S, D, N, T, SIZES[kind])
        for way in WAYS for kind in ("bfloat16", wide)
    }  # fmt: skip
    assert {row["what"]: row["bytes"] for row in data["memory"]} == wanted
    for row in data["memory"]:
        assert row["predicted_bytes"] == row["bytes"], row
        assert row["units_of_sbh"] == row["bytes"] / (S * B * D)
        off = row["bytes"] - row["residue"] - row["paper_units"] * S * B * D
        assert abs(off) <= 1e-6, row
    for way in WAYS:
        line = next(x for x in section(run, 6) if x.startswith(f"   {way}  "))
        assert line.endswith(" ok"), line


@over(RUNS)
def test_lengths(run):
    """From 1 to beyond the default: padded to a multiple of T, and the same loss."""
    size, rows = sizes(run), [line.split() for line in section(run, 7)]
    rows = [row for row in rows if row[0].isdecimal() and len(row) == 7]
    rows = [row for row in rows if row[1].isdecimal()]  # the head is "7  Other …"
    S, T = size["S"], size["T"]
    lengths = sorted({1, 5, max(1, S - 1), 2 * S + 3})
    assert [int(row[0]) for row in rows] == lengths
    for row in rows:
        length, padded, s = map(int, row[:3])
        assert padded == s * T and 0 <= padded - length < T
        assert abs(float(row[3]) - float(row[4])) <= 1e-10 and row[6] == "ok"
        assert 0 < float(row[5]) <= 1e-12


def compared(run, label: str) -> dict:
    """Names and differences of the checks of PyTorch's plan. Over ranks sums are made
    in another order: were all the same to the bit, nothing would have been compared."""
    rows = {row["name"]: row["diff"] for row in jobs.result(*run).data["checks"]}
    mine = {name: diff for name, diff in rows.items() if name.startswith(f"{label}: ")}
    assert run[1] == 1 or any(diff > 0 for name, diff in mine.items() if "dL/d" in name)
    return mine


@over(RUNS)
def test_collectives_of_pytorchs_plan(run):
    size, text = sizes(run), " ".join(section(run, 8))
    n = 2 * size["L"] + 1 if size["T"] > 1 else 0
    assert f"Forward: {n} all-gathers, {n} reduce-scatters, 0 all-reduces" in text
    back = f"Loss and backward: {n} all-gathers, {n} reduce-scatters, 3 all-reduces"
    assert re.search(rf"{back}\b[^:]*: ok", text), text
    names = {f"DTensor: dL/d {name}" for name in first_step(run, "float64")[1]}
    wanted = names | {"DTensor: loss", "DTensor: collectives"}
    assert set(compared(run, "DTensor")) == wanted


@over(WITH_QWEN2)
def test_hugging_face(run):
    """Loss and every gradient of Qwen2; needs transformers, as in requirements.txt."""
    done, size = jobs.result(*run), sizes(run)
    assert done.code == 0, done.text
    K, L = arguments(run).kv_heads * size["D"] // size["N"], size["L"]
    D, V, tied = size["D"], size["V"], "--tie" in run
    names = {f"self_attn.{one}_proj.{kind}" for one in "qkv"
             for kind in ("weight", "bias")}  # fmt: skip
    names |= {f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
    names |= {f"{one}_layernorm.weight" for one in ("input", "post_attention")}
    names = {f"model.layers.{i}.{n}" for n in (*names, "self_attn.o_proj.weight")
             for i in range(L)}  # fmt: skip
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    names |= set() if tied else {"lm_head.weight"}
    mine = compared(run, "Qwen2")
    assert set(mine) == {f"Qwen2: dL/d {name}" for name in names} | {"Qwen2: loss"}
    for name, diff in mine.items():
        assert diff <= (1e-6 if name.endswith("loss") else 1e-5), name
    layer = D * D + D + 2 * (D * K + K) + D * D + 3 * 4 * D * D + 2 * D
    count = V * D * (1 if tied else 2) + L * layer + D
    text = section(run, 9)
    assert f"{count} random weights" in text[0]
    losses = re.search(r"Loss (\S+), alone (\S+);", text[1])
    got, alone = map(float, losses.groups())
    assert abs(got - alone) <= 1e-6 * alone and abs(alone - math.log(V)) < 1


def test_hugging_face_at_2_and_4_ranks():
    assert {run[1] for run in WITH_QWEN2} == {2, 4}
