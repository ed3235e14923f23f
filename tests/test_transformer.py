"""Lesson 02: the split transformer equals the whole one, and both are what they say.

Random models trained on four ranks, to the rounding of float64; the reference against
PyTorch's attention and complex numbers; then every number of the lesson's own runs.
"""

import json
import math

import jobs
import pytest
import torch
import torch.nn.functional as F
from old_runs import (
    ALL_RUNS,
    ALLOWED,
    SIZES,
    check_replicas,
    expect,
    flag,
    found,
    gradient_limit,
    over,
)

DRIVER = ("drive_transformer.py", 4)
LESSON = "02_transformer_tp"
RUNS = [run for run in ALL_RUNS if run[0] == LESSON]
PROFILED = [run for run in RUNS if "--profile" in run]


driven = pytest.mark.launches(*DRIVER)


# The random models.


@driven
@pytest.mark.parametrize(
    "kind", ["logits", "gradients", "norm", "clipped", "parameters", "eval", "held"]
)
def test_float64_equality(ranks, kind):
    worst = max(found(ranks, "models"), key=lambda case: case["diffs"][kind][0])
    assert worst["diffs"][kind][0] <= (0 if kind == "held" else 1e-12), worst


@driven
def test_models_cover_the_ground(ranks):
    mine = ranks[0]["models"]
    configs = [case["config"] for case in mine]
    assert len(mine) >= 60 and len({str(config) for config in configs}) >= 55
    for T in (1, 2, 4):
        some = [case for case in mine if case["T"] == T]
        assert {case["S"] for case in some} >= {1} and len(some) >= 15
        for key, least in (("layers", 3), ("dropout", 3), ("kv_heads", 2)):
            assert len({case["config"][key] for case in some}) >= least, (T, key)
        shared = {c["config"]["heads"] // c["config"]["kv_heads"] for c in some}
        assert shared == {1, 2, 3}
        assert {case["config"]["seq_len"] > case["S"] for case in some} == {True, False}
    assert {case["B"] for case in mine} == {1, 2, 3}


@driven
def test_clips_above_the_limit_only(ranks):
    """The norm told is the whole model's; below the limit nothing moves."""
    seen = set()
    for case in found(ranks, "models"):
        for over_limit, diff, untouched in case["clips"]:
            assert diff <= 1e-12
            assert untouched is (over_limit < 1), case["clips"]
            seen.add(untouched)
    assert seen == {True, False}


@driven
def test_all_reduces_of_a_step(ranks):
    """2 a layer forward, 2 backward, of B·S·D numbers each; none on one rank."""
    for case in found(ranks, "models"):
        assert case["sent"] == case["wanted"], case
        assert (case["sent"] == []) is (case["T"] == 1)


@driven
def test_replicas_stay_equal_to_the_bit(ranks):
    check_replicas(found(ranks, "models"))


@driven
def test_parameters_are_copies_with_pytorch_names(ranks):
    for case in found(ranks, "models"):
        assert case["own"] and case["names"], case


@driven
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_dropout_under_tp_is_a_part_of_the_whole(ranks, kind):
    """Output and gradient to the bit; all ranks' generators move on together."""
    cases = [case for rank in ranks for case in rank["dropouts"]]
    for case in cases:
        assert case["diffs"][kind] == [0, 0, 0], case
    assert {(c["T"], c["dim"]) for c in cases} >= {(4, d) for d in range(4)}
    assert len({c["p"] for c in cases}) == 4


@driven
def test_heads_that_do_not_divide(ranks):
    for rank in ranks:
        for what, message in rank["refusals"]:
            assert "% 4" in message and "= 2" in message, (what, message)


# The reference, in this process.


def reference(seed=0, **changes):
    lesson = jobs.load(LESSON)
    sizes = dict(
        vocab_size=11, hidden=24, heads=6, kv_heads=3, layers=2, seq_len=10, dropout=0.0
    )
    torch.manual_seed(seed)
    return lesson.Transformer(lesson.Config(**sizes | changes)).double()


def test_rotate_turns_complex_numbers():
    """Feature i and feature i + H/2 are one complex number; position p turns it."""
    lesson = jobs.load(LESSON)
    for H in (2, 4, 6, 16):
        S = 12
        x = torch.randn(2, 3, S, H, dtype=torch.float64)
        speed = 10000.0 ** (-2 * torch.arange(H // 2, dtype=torch.float64) / H)
        angle = torch.arange(S, dtype=torch.float64)[:, None] * speed
        turned = torch.complex(x[..., : H // 2], x[..., H // 2 :])
        turned = turned * torch.polar(torch.ones_like(angle), angle)
        wanted = torch.cat([turned.real, turned.imag], -1)
        tables = [f(angle).repeat(1, 2) for f in (torch.cos, torch.sin)]
        assert (lesson.rotate(x, *tables) - wanted).abs().max() <= 1e-14
        for table, right in zip(lesson.rotary_table(S, H), tables):
            assert table.shape == (S, H)
            assert (table.double() - right).abs().max() <= 2e-6  # angles in float32


def test_rotated_scores_depend_on_distance_alone():
    lesson = jobs.load(LESSON)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    speed = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angle = torch.arange(20, dtype=torch.float64)[:, None] * speed
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    q, k = (lesson.rotate(x.expand(20, 8), cos, sin) for x in (q, k))
    scores = q @ k.T
    for distance in (0, 1, 5):
        line = scores.diagonal(-distance)
        assert (line - line[0]).abs().max() <= 1e-12
    assert (scores[5, 3] - scores[5, 4]).abs() > 1e-3


def test_attention_is_pytorchs():
    """softmax(QKᵀ/√H)V against F.scaled_dot_product_attention, heads shared or not."""
    lesson = jobs.load(LESSON)
    for heads, kv_heads, S in ((6, 3, 10), (6, 6, 4), (4, 1, 7), (2, 2, 1)):
        full = reference(heads=heads, kv_heads=kv_heads)
        attention, H = full.layers[0].self_attn, 24 // heads
        cos, sin = full.cos[:S], full.sin[:S]
        x = torch.randn(2, S, 24, dtype=torch.float64)
        q, k, v = (
            proj(x).view(2, S, -1, H).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = lesson.rotate(q, cos, sin), lesson.rotate(k, cos, sin)
        owner = torch.arange(heads) // (heads // kv_heads)  # query head → its kv head
        mixed = F.scaled_dot_product_attention(
            q, k[:, owner], v[:, owner], None, 0, True
        )
        wanted = attention.o_proj(mixed.transpose(1, 2).reshape(2, S, 24))
        got = attention(x, cos, sin, full.future[:S, :S])
        assert (got - wanted).abs().max() <= 1e-13


def test_layer_and_model_are_what_they_say():
    """Pre-LayerNorm, residuals, GELU, head: written out once more."""
    full = reference(layers=1)
    tokens = torch.randint(11, (2, 10))
    layer, x = full.layers[0], full.embed_tokens.weight[tokens]
    tables = full.cos, full.sin, full.future
    norm = lambda m, x: F.layer_norm(x, (24,), m.weight, m.bias)
    x = x + layer.self_attn(norm(layer.input_layernorm, x), *tables)
    h = norm(layer.post_attention_layernorm, x)
    h = F.gelu(h @ layer.mlp.up_proj.weight.T + layer.mlp.up_proj.bias)
    x = x + h @ layer.mlp.down_proj.weight.T + layer.mlp.down_proj.bias
    wanted = norm(full.norm, x) @ full.lm_head.weight.T + full.lm_head.bias
    assert (full(tokens) - wanted).abs().max() <= 1e-13
    assert layer.mlp.up_proj.weight.shape == (96, 24)


def test_a_later_token_changes_no_earlier_logit():
    full = reference()
    tokens = torch.randint(11, (1, 10))
    before = full(tokens)
    for at in range(10):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % 11
        after = full(changed)
        assert torch.equal(after[:, :at], before[:, :at])
        differs = (after != before).any(-1)[0]
        assert differs[at:].all()


def test_shorter_sequences_see_the_same_model():
    full = reference()
    tokens = torch.randint(11, (2, 10))
    whole = full(tokens)
    for S in (1, 2, 9):
        assert (full(tokens[:, :S]) - whole[:, :S]).abs().max() <= 1e-13


def saved_by(module, x) -> tuple:
    """What autograd keeps for backward, and the output."""
    kept = []
    pack = lambda t: kept.append(t) or t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    return kept, y


def test_dropout_keeps_a_boolean_mask_and_is_unbiased():
    lesson = jobs.load(LESSON)
    x = torch.full((400, 500), 3.0, requires_grad=True)
    for p in (0.1, 0.5):
        torch.manual_seed(0)
        kept, y = saved_by(lesson.Dropout(p), x)
        assert [t.dtype for t in kept if t.numel() > 1] == [torch.bool]
        assert sum(t.nbytes for t in kept if t.numel() > 1) == x.numel()
        zeros = y == 0
        n = x.numel()
        spread = math.sqrt(p * (1 - p) * n)
        assert abs(zeros.sum().item() - p * n) < 5 * spread
        assert torch.allclose(y[~zeros], torch.tensor(3 / (1 - p)))
        x.grad = None
        y.sum().backward()
        assert torch.equal(x.grad == 0, zeros)
        assert torch.allclose(x.grad[~zeros], torch.tensor(1 / (1 - p)))
        assert torch.equal(lesson.Dropout(p).eval()(x), x)
    assert torch.equal(lesson.Dropout(0.0)(x), x)


# The lesson's own runs: numbers in --json worked out again.


def sizes(run) -> dict:
    found = {
        "D": int(flag(run, "--hidden", 64)), "N": int(flag(run, "--heads", 8)),
        "L": int(flag(run, "--layers", 2)), "B": int(flag(run, "--batch-size", 4)),
        "S": int(flag(run, "--seq-len", 32)), "V": int(flag(run, "--vocab-size", 257)),
        "p": float(flag(run, "--dropout", 0.1)), "T": run[1],
        "steps": int(flag(run, "--steps", 5)),
        "e": SIZES[flag(run, "--dtype", "float32")],
    }  # fmt: skip
    found["K"] = int(flag(run, "--kv-heads", found["N"]))
    return found


def saved_by_a_layer(B, S, D, N, p, T, e, **_) -> int:
    """Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.1, e for their 2 bytes.

    With t ranks 10sbh + 24sbh/t + 5as²b/t bytes in 16 bits: that is, in numbers,

    whole on every rank: two LayerNorms' inputs, the inputs of q-k-v and of the MLP;
    cut: Q, K, V and the projection's input (4sbh); GELU's input and the second
    linear's (8sbh); softmax's output, and, with dropout, what it makes of it (2as²b).
    Masks, one byte an element: of the two outputs (whole), of the softmax (cut).
    And LayerNorm's mean and 1/σ, two numbers a token each.
    """
    sbh, aas = S * B * D, N * S * S * B
    numbers = 4 * sbh + (4 * sbh + 8 * sbh) // T + 2 * 2 * S * B
    numbers += (2 if p else 1) * aas // T
    masks = 2 * sbh + aas // T if p else 0
    return numbers * e + masks


def memory(B, S, D, N, K, L, V, p, T, e, **_) -> dict:
    """What a rank of T holds, in bytes, when embedding and head are whole."""
    H = D // N
    whole = {
        "norms": L * 2 * 2 * D + 2 * D, "o and down bias": L * 2 * D,
        "embedding": V * D, "head": V * D + V,
    }  # fmt: skip
    cut = {
        "q": D * N * H + N * H, "k and v": 2 * (D * K * H + K * H), "o": N * H * D,
        "up": 4 * D * D + 4 * D, "down": 4 * D * D,
    }  # fmt: skip
    P = sum(whole.values()) + L * sum(cut.values()) // T
    tensors = 1 + 16 * L + 2 + 2
    saved = L * saved_by_a_layer(B, S, D, N, p, T, e)
    saved += 8 * B * S  # embedding: tokens, int64
    saved += (
        2 * B * S * D + 2 * B * S
    ) * e  # last norm: input, statistics; head: input
    return {
        "parameters": P * e, "gradients": P * e,
        "optimizer state": 2 * P * e + 4 * tensors,  # and a float32 step count each
        "activations": saved,
    }  # fmt: skip


@over(RUNS)
def test_losses_and_gradients(run):
    data, size = jobs.result(*run).data, sizes(run)
    loss_limit, _ = ALLOWED[data["dtype"]]
    assert [row["step"] for row in data["losses"]] == [*range(1, size["steps"] + 1)]
    first = data["losses"][0]["without"]
    assert abs(first - math.log(size["V"])) < 1.5, "a fresh model knows nothing"
    if size["steps"] == 5 and size["V"] == 257:
        assert data["losses"][-1]["without"] < first - 0.2
    for row in data["losses"]:
        assert abs(row["with"] - row["without"]) <= loss_limit * row["without"], row
    if not size["p"]:
        dtensor = data["losses"][0]["dtensor"]
        assert abs(dtensor - first) <= loss_limit * first
    layers = range(size["L"]) if "--verbose" in run else [None]
    inside = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    wanted = {}
    for i in layers:
        head = "" if i is None else f"layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            wanted |= {f"{head}{name}.{k}": "Replicate()" for k in ("weight", "bias")}
        for name in (*inside, "mlp.up_proj"):
            wanted |= {f"{head}{name}.{k}": "Shard(0)" for k in ("weight", "bias")}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            wanted[f"{head}{name}.weight"] = "Shard(1)"
            wanted[f"{head}{name}.bias"] = "Replicate()"
    for name in ("embed_tokens.weight", "norm.weight", "norm.bias"):
        wanted[name] = "Replicate()"
    wanted |= {"lm_head.weight": "Replicate()", "lm_head.bias": "Replicate()"}
    assert {row["name"]: row["placement"] for row in data["gradients"]} == wanted
    for row in data["gradients"]:
        limit = gradient_limit(run, row["name"])
        assert row["ok"] is True and 0 <= row["rel_diff"] <= limit
        off = abs(row["norm_with"] - row["norm_without"])
        assert row["norm_without"] > 0 and off <= limit * row["norm_without"], row


@over(RUNS)
def test_bytes_sent(run):
    data, size = jobs.result(*run).data, sizes(run)
    L, n, several = size["L"], size["steps"], size["T"] > 1
    one = size["B"] * size["S"] * size["D"] * size["e"]
    wide = one * max(1, 4 // size["e"])  # DTensor's part is in float32 at least
    calls = {
        ("layers", "forward"): (2 * L * n, one),
        ("layers", "backward"): (2 * L * n, one),
        ("clipping", ""): (n, 8),
        ("DTensor", "forward"): (2 * L, wide), ("DTensor", "backward"): (4 * L, wide),
    }  # fmt: skip
    expect(data, {
        (what, phase, "all-reduce", "tp"): (k * several, k * each * several)
        for (what, phase), (k, each) in calls.items()
    })  # fmt: skip


@over(RUNS)
def test_bytes_held(run):
    data, size = jobs.result(*run).data, sizes(run)
    wanted = {}
    for way, T in (("without", 1), ("with", size["T"])):
        for kind, n in memory(**size | {"T": T}).items():
            wanted[f"{kind} {way} TP"] = n
    found = {row["what"]: row["bytes"] for row in data["memory"]}
    assert found == wanted
    for row in data["memory"]:
        assert row["bytes"] == row["predicted_bytes"], row


def test_activations_are_the_papers():
    """34sbh + 5as²b, and 10 + 24/t with TP, in 16 bits; norms' statistics beside it."""
    for t in (1, 2, 4):
        B, S, D, N = 3, 8, 64, 8
        paper = (10 * S * B * D) + (24 * S * B * D + 5 * N * S * S * B) // t
        assert saved_by_a_layer(B, S, D, N, 0.1, t, 2) == paper + 8 * S * B


@over(PROFILED)
def test_profile_writes_traces_and_memory(run):
    """Traces that hold events; at its peak the timeline has what was counted."""
    done, size = jobs.result(*run), sizes(run)
    files = done.data["files"]
    names = {
        f"{way}.rank{rank}.{kind}.json"
        for way in ("without_tp", "with_tp")
        for rank in range(2)
        for kind in ("trace", "memory")
    }
    assert set(files) == names
    for name, text in files.items():
        found, T = json.loads(text), 2 if name.startswith("with_tp") else 1
        if "trace" in name:
            called = {event.get("name") for event in found["traceEvents"]}
            assert {"aten::gelu", "aten::_softmax"} <= called
            assert ("gloo:all_reduce" in called) is (T == 2), name
            continue
        wanted = memory(**size | {"T": T})
        times = [row["seconds"] for row in found]
        assert times == sorted(times) and times[0] >= 0
        for kind in ("parameters", "optimizer state"):
            assert {row[kind] for row in found} == {wanted[kind]}
        assert max(row["gradients"] for row in found) == wanted["gradients"]
        most = max(row["activations"] for row in found)
        # and what the loss keeps, which the table leaves out
        logits = size["B"] * size["S"] * size["V"] * size["e"]
        assert wanted["activations"] <= most <= wanted["activations"] + 2 * logits
        assert min(row["activations"] for row in found) >= 0
        assert found[-1]["activations"] == found[-1]["gradients"] == 0
        peak = max(sum(v for k, v in row.items() if k != "seconds") for row in found)
        if name.endswith("rank0.memory.json"):
            assert done.data["peak_bytes"][name.split(".")[0]] == peak
