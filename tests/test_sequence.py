"""Lesson 04: a split sequence gives one process's model, in the memory the paper says.

Random models on four ranks against plain PyTorch, to the rounding of float64; bytes
kept for backward against the paper's table; then the lesson's own runs.
"""

import math
import re
import sys
from unittest import mock

import jobs
import pytest
import torch
import torch.nn.functional as F
from runs import ALL_RUNS, ALLOWED, PROOF, flag, found, over

DRIVER = ("drive_sequence.py", 4)
LESSON = "04_sequence_parallel"
# Lengths that the ranks do not divide, one weight for embedding and head.
ODD = ("--seq-len", "33", "--tie", "--save-gathered", "--steps", "2", "--seed", "5")
RUNS = [*dict.fromkeys(run for run in ALL_RUNS if run[0] == LESSON)]
RUNS += [run for run in ((LESSON, 3), (LESSON, 2, *ODD)) if run not in RUNS]
WITH_QWEN2 = [
    (LESSON, 2, "--hf"), (LESSON, 4, "--hf", "--tie", "--layers", "1", *PROOF),
]  # fmt: skip
WAYS = [
    "without TP", "TP", "TP + SP", "TP + SP, gathered kept",
    "TP, selective recompute", "TP + SP, selective", "TP, full recompute",
    "TP + SP, full",
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
        lengths = {case["S"] for case in some}
        assert 1 in lengths and max(lengths) >= 2 * T + 1 and len(lengths) >= 5
        if T > 1:
            undivided = [case for case in some if case["S"] % T]
            assert {case["config"]["dropout"] > 0 for case in undivided} == {
                True,
                False,
            }
            assert len(undivided) < len(some)
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
    digests = {}
    for case in found(ranks, "models"):
        key = case["number"], tuple(case["group"])
        digests.setdefault(key, set()).add(case["replicas"])
    assert max(map(len, digests.values())) == 1
    assert len(set.union(*digests.values())) >= 60, "all models alike"


@driven
def test_parameters_are_copies_with_pytorch_names(ranks):
    for case in found(ranks, "models"):
        assert case["own"] and case["names"], case


# Each pair, the linears of a gathered sequence, recompute, refusals.


@driven
@pytest.mark.parametrize("pair", [
    "CopyToTP", "ReduceFromTP", "GatherFromTP", "AllGather", "ReduceScatter",
])  # fmt: skip
def test_pairs_against_one_process(ranks, pair):
    cases = found(ranks, "pairs")
    for case in cases:
        assert max(case["diffs"][pair]) <= 1e-12, case
    wanted = {(T, dim) for T in (2, 4) for dim in range(3)}
    assert {(case["T"], case["dim"]) for case in cases} >= wanted


@driven
@pytest.mark.parametrize("what", ["y", "x", "weights", "biases"])
def test_linears_of_a_gathered_sequence(ranks, what):
    cases = found(ranks, "linears")
    for case in cases:
        assert case["diffs"][what] <= 1e-12, case
        assert case["sent"] == case["wanted"], case
    kinds = {(case["T"], case["linears"], case["save"]) for case in cases}
    assert len(kinds) >= 16, "of 18"


@driven
def test_recomputed_to_the_bit(ranks):
    """Dropout on: the masks of the second forward are those of the first."""
    again = {way for way in WAYS if "full" in way or "selective" in way}
    for case in found(ranks, "recomputes"):
        assert case["bits"] == dict.fromkeys(again, True), case
        assert set(case["diffs"]) == set(WAYS) and case["names"] == 16
        assert max(case["diffs"].values()) <= 1e-12, case
        assert case["one_generator"], case


@driven
@pytest.mark.parametrize("what, said", [
    ("heads", "heads"), ("kv-heads", "heads"), ("6 positions", "not a multiple of 4"),
    ("token 10", "the vocabulary is 0 to 9"), ("token -1", "the vocabulary is 0 to 9"),
])  # fmt: skip
def test_what_cannot_be_split_or_looked_up(ranks, what, said):
    for rank in ranks:
        assert said in rank["refusals"][what], rank["refusals"]


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
    if way == "without TP":
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
        assert set(case["bytes"]) == set(WAYS)
    sizes = {(tuple(c["sizes"]), c["T"], c["size"]) for c in found(ranks, "memory")}
    assert len(sizes) == 6 * 3 * 2


def test_the_papers_coefficients():
    """Table 2 of the paper, 16 bits: bytes ÷ sbh, the LayerNorms' statistics apart."""
    B, S, D, N = 3, 16, 64, 8
    a = 5 * N * S / D
    for t in (1, 2, 4, 8):
        for way, units, share in (
            ("without TP", 34 + a, 1), ("TP", 10 + (24 + a) / t, 1),
            ("TP + SP", (34 + a) / t, 1 / t),
            ("TP + SP, gathered kept", (34 + a) / t + 4 * (1 - 1 / t), 1 / t),
            ("TP, selective recompute", 10 + 24 / t, 1),
            ("TP + SP, selective", 34 / t, 1 / t), ("TP, full recompute", 2, 0),
        ):  # fmt: skip
            stats = 8 * S * B * share
            assert kept(way, B, S, D, N, t, 2) == units * S * B * D + stats, (way, t)


# In this process.


def test_padding_stands_behind_the_sequence():
    pad_batch = jobs.load(LESSON).pad_batch
    for B, S in ((2, 5), (1, 1), (3, 7), (2, 8)):
        for ranks in (1, 2, 3, 4, 8):
            tokens, target = torch.randint(9, (2, B, S))
            longer, targets = pad_batch(tokens, target, ranks)
            assert longer.shape == targets.shape and longer.shape[1] % ranks == 0
            assert 0 <= longer.shape[1] - S < ranks and longer.dtype == torch.int64
            assert torch.equal(longer[:, :S], tokens) and (longer[:, S:] == 256).all()
            assert (
                torch.equal(targets[:, :S], target) and (targets[:, S:] == -100).all()
            )


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


# The lesson's own runs.


def checks(run, table: str) -> dict:
    """What was compared there: name → difference. Over ranks sums are made in another
    order: were all the same to the bit, nothing would have been compared."""
    rows = jobs.result(*run).data["checks"]
    mine = {row["name"]: row["diff"] for row in rows}
    mine = {name.removeprefix(f"{table}: "): diff for name, diff in mine.items()
            if name.startswith(f"{table}: ")}  # fmt: skip
    assert mine and (run[1] == 1 or any(diff > 0 for diff in mine.values()))
    return mine


def names_of(layers: int) -> set[str]:
    modules = [f"self_attn.{one}_proj" for one in "qkvo"]
    modules += ["mlp.up_proj", "mlp.down_proj"]
    modules += ["input_layernorm", "post_attention_layernorm"]
    modules = [f"layers.{i}.{module}" for i in range(layers) for module in modules]
    names = {f"{m}.{p}" for m in [*modules, "norm", "lm_head"]
             for p in ("weight", "bias")}  # fmt: skip
    return names | {"embed_tokens.weight"}


@over(RUNS)
def test_every_gradient_and_parameter_is_compared(run):
    done, several = jobs.result(*run), run[1] > 1
    names = names_of(2) - ({"lm_head.weight"} if "--tie" in run else set())
    plan = ["DTensor"] if several else []
    wanted = {f"{name}, {what}" for name in names for what in ("TP + SP", *plan)}
    assert set(checks(run, "gradients")) == wanted
    wanted |= {f"{name}, TP" for name in names}
    assert set(checks(run, "updates")) >= wanted
    assert done.data["verdict"] == "PASS", done.text


@over(RUNS)
def test_the_reference_is_plain_pytorch(run):
    """Step 1's loss, worked out here from the lesson's model and its padded batch."""
    lesson, data = jobs.load(LESSON), jobs.result(*run).data
    with mock.patch.object(sys, "argv", [LESSON, *run[2:]]):
        args = lesson.parse_args(run[1])
    args.device = "cpu"
    (batch,) = lesson.make_batches(lesson.__doc__, args, 1)
    tokens, target = lesson.pad_batch(*batch, run[1])
    args.seq_len = tokens.shape[1]
    model = lesson.make_tied(args)
    torch.manual_seed(args.seed + 1)
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten(), ignore_index=-100).item()
    limit, _ = ALLOWED[data["dtype"]]
    assert abs(data["losses"][0]["without TP"] - loss) <= limit * loss
    assert abs(loss - math.log(args.vocab_size)) < 1.5, "a fresh model knows nothing"
    (targets,) = {target.ne(-100).sum().item()}
    assert 0 < targets < target.numel(), "some positions have no target"


@over(RUNS)
def test_parts_of_replicated_gradients(run):
    """Each rank's numbers before they are added differ; the sum is the reference's."""
    rows = jobs.result(*run).data["parts"]
    *parts, total, alone = rows
    assert [row[""] for row in parts] == [f"rank {rank}" for rank in range(run[1])]
    ends = [[int(end) for end in row["positions"].split(" to ")] for row in parts]
    positions = [place for first, last in ends for place in range(first, last + 1)]
    assert positions == [*range(len(positions))]
    for name in ("input_layernorm.weight", "self_attn.o_proj.bias"):
        numbers = [[float(x) for x in row[name].split()] for row in rows]
        assert len({tuple(three) for three in numbers[: run[1]]}) == run[1]
        for *shares, summed, wanted in zip(*numbers):
            assert abs(sum(shares) - wanted) <= (run[1] + 1) * 0.51e-6, (name, rows)
            assert abs(summed - wanted) <= 1.1e-6
        most = max(abs(x) for x in numbers[-1])
        assert most > 1e-4, "too few digits to tell"
    assert total[""] == "their sum" and alone[""] == "without TP"


@over(RUNS)
def test_memory_of_a_layer(run):
    """The lesson's rows are the paper's, at the sizes of its flags."""
    data, T = jobs.result(*run).data, run[1]
    B, S = 4, -(-int(flag(run, "--seq-len", 32)) // T) * T
    D, N = {1: (64, 8), 2: (64, 8), 3: (96, 12), 4: (64, 8)}[T]
    wanted = {way: kept(way, B, S, D, N, T, 2) for way in WAYS}
    assert {row["layer"]: row["bytes"] for row in data["memory"]} == wanted
    for row in data["memory"]:
        assert row["predicted_bytes"] == row["bytes"] and row["ok"], row


@over(RUNS)
def test_lengths(run):
    """From 1 to beyond the default, padded to a multiple of T."""
    T, rows = run[1], jobs.result(*run).data["lengths"]
    S = -(-int(flag(run, "--seq-len", 32)) // T) * T
    lengths = [1, S - 1, 2 * S + 1]
    wanted = [f"loss, length {n}, padded to {-(-n // T) * T}" for n in lengths]
    assert [row["name"] for row in rows] == wanted
    assert all(row["diff"] <= 1e-12 for row in rows)
    mine = checks(run, "length gradients")
    names = names_of(2) - ({"lm_head.weight"} if "--tie" in run else set())
    assert set(mine) == {f"length {n}: dL/d {name}, TP + SP" for n in lengths
                         for name in names}  # fmt: skip
    assert max(mine.values()) <= 1e-12


@over(WITH_QWEN2)
def test_hugging_face(run):
    """Loss and every gradient of Qwen2; needs transformers, as in requirements.txt."""
    done = jobs.result(*run)
    assert done.code == 0, done.text
    names = {f"self_attn.{one}_proj.{kind}" for one in "qkv"
             for kind in ("weight", "bias")}  # fmt: skip
    names |= {f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
    names |= {f"{one}_layernorm.weight" for one in ("input", "post_attention")}
    names = {f"model.layers.{i}.{name}" for name in (*names, "self_attn.o_proj.weight")
             for i in range(int(flag(run, "--layers", 2)))}  # fmt: skip
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    names |= set() if "--tie" in run else {"lm_head.weight"}
    mine = checks(run, "Qwen2")
    assert set(mine) == {f"{name}, DTensor" for name in names}
    assert max(mine.values()) <= 1e-5
    (loss,) = done.data["Qwen2 loss"]
    assert loss["diff"] <= 1e-6 and abs(loss["without TP"] - math.log(257)) < 1


def test_hugging_face_at_2_and_4_ranks():
    assert {run[1] for run in WITH_QWEN2} == {2, 4}
