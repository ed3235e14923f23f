"""Lesson 02: the split transformer equals the whole one, and both are what they say.

Random models trained on four ranks, to the rounding of float64; the reference against
PyTorch's attention and complex numbers; then what the lesson's own runs measured,
against the papers.
"""

import math
import re
from types import SimpleNamespace

import jobs
import pytest
import torch
import torch.nn.functional as F
from runs import ALL_RUNS, flag, found, over

DRIVER = ("drive_transformer.py", 4)
LESSON = "02_transformer_tp"
RUNS = [run for run in ALL_RUNS if run[0] == LESSON]

driven = pytest.mark.launches(*DRIVER)


# The random models.

KINDS = {"logits": 1e-12, "gradients": 1e-12, "norm": 1e-12, "clipped": 1e-12,
         "clipped above the limit only": 0, "parameters": 1e-12, "eval": 1e-12,
         "replicas": 0, "held": 0, "names": 0, "own": 0}  # fmt: skip


@driven
@pytest.mark.parametrize("kind", KINDS)
def test_float64_equality(ranks, kind):
    """After three steps, too. To the bit: what ranks of a group hold alike, slices of
    the model, which are copies under PyTorch's names, and below the limit gradients."""
    worst = max(found(ranks, "models"), key=lambda case: case["diffs"][kind][0])
    assert worst["diffs"][kind][0] <= KINDS[kind], worst


@driven
def test_models_cover_the_ground(ranks):
    """Lesson 04's driver draws the same ones."""
    mine = ranks[0]["models"]
    assert len(mine) >= 64 and len({str(case["config"]) for case in mine}) >= 55
    assert {case["B"] for case in mine} == {1, 2, 3}
    for T in (1, 2, 4):
        some = [case for case in mine if case["T"] == T]
        configs = [case["config"] for case in some]
        assert len(some) >= 15
        for key, least in (("layers", 3), ("dropout", 3), ("kv_heads", 2)):
            assert len({config[key] for config in configs}) >= least, (T, key)
        assert {c["heads"] // c["kv_heads"] for c in configs} == {1, 2, 3}
        assert {case["config"]["seq_len"] > case["S"] for case in some} == {True, False}
        lengths = {case["S"] for case in some}
        assert 1 in lengths and max(lengths) >= 2 * T + 1 and len(lengths) >= 5


@driven
def test_dropout_under_tp_is_a_part_of_the_whole(ranks):
    """Output and gradient to the bit; all ranks' generators move on together."""
    cases = found(ranks, "dropouts")
    for case in cases:
        assert case["diffs"] == {"sharded": [0, 0, 0], "whole": [0, 0, 0]}, case
    assert {(c["T"], c["dim"]) for c in cases} >= {(4, d) for d in range(4)}
    assert len({c["p"] for c in cases}) == 4


@driven
def test_heads_that_do_not_divide(ranks):
    for rank in ranks:
        for what, message in rank["refusals"].items():
            assert re.fullmatch(r"[qk]_proj: [12] heads on 4 ranks", message), what


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


def test_attention_is_pytorchs():
    """softmax(QKᵀ/√H)V against F.scaled_dot_product_attention, heads shared or not."""
    lesson = jobs.load(LESSON)
    for heads, kv_heads, S in ((6, 3, 10), (6, 6, 4), (4, 1, 7), (2, 2, 1)):
        full = reference(heads=heads, kv_heads=kv_heads)
        attention, H = full.layers[0].self_attn, 24 // heads
        cos, sin = full.cos[:S], full.sin[:S]
        x = torch.randn(2, S, 24, dtype=torch.float64)
        three = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (proj(x).view(2, S, -1, H).transpose(1, 2) for proj in three)
        q, k = lesson.rotate(q, cos, sin), lesson.rotate(k, cos, sin)
        owner = torch.arange(heads) // (heads // kv_heads)  # query head → its kv head
        mixed = F.scaled_dot_product_attention(
            q, k[:, owner], v[:, owner], None, 0, True
        )
        wanted = attention.o_proj(mixed.transpose(1, 2).reshape(2, S, 24))
        got = attention(x, (full.cos, full.sin, full.future))
        assert (got - wanted).abs().max() <= 1e-13


def test_layer_and_model_are_what_they_say():
    """Pre-LayerNorm, residuals, GELU, head: written out once more."""
    full = reference(layers=1)
    tokens = torch.randint(11, (2, 10))
    layer, x = full.layers[0], full.embed_tokens.weight[tokens]
    tables = full.cos, full.sin, full.future
    norm = lambda m, x: F.layer_norm(x, (24,), m.weight, m.bias)
    x = x + layer.self_attn(norm(layer.input_layernorm, x), tables)
    h = norm(layer.post_attention_layernorm, x)
    h = F.gelu(h @ layer.mlp.up_proj.weight.T + layer.mlp.up_proj.bias)
    x = x + h @ layer.mlp.down_proj.weight.T + layer.mlp.down_proj.bias
    wanted = norm(full.norm, x) @ full.lm_head.weight.T + full.lm_head.bias
    assert (full(tokens) - wanted).abs().max() <= 1e-13
    assert layer.mlp.up_proj.weight.shape == (96, 24)


def test_a_later_token_changes_no_earlier_logit():
    """Nor does it matter whether there is one."""
    full = reference()
    tokens = torch.randint(11, (1, 10))
    before = full(tokens)
    for at in range(10):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % 11
        differs = (full(changed) != before).any(-1)[0]
        assert not differs[:at].any() and differs[at:].all()
    for S in (1, 2, 9):
        assert (full(tokens[:, :S]) - before[:, :S]).abs().max() <= 1e-13


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


# The data.


def arguments(**changes) -> SimpleNamespace:
    sizes = dict(batch_size=4, seq_len=32, seed=1, device="cpu")
    return SimpleNamespace(**sizes | changes)


def test_batches_are_lines_of_the_text():
    """A row is a piece of a line up to its end; a target is the next byte, or none."""
    lesson = jobs.load(LESSON)
    lines = [f"{line}\n".encode() for line in lesson.__doc__.splitlines()]
    batches = lesson.make_batches(lesson.__doc__, arguments(), 50)
    assert len(batches) == 50
    ends = []
    for row, target in ((r, t) for batch in batches for r, t in zip(*batch)):
        real = row[row != lesson.PAD].tolist()
        wanted = torch.tensor([*real[1:], lesson.IGNORE])
        padded = len(real) < 32
        ends.append(len(real))
        assert any(bytes(real) in line for line in lines)
        assert (row[len(real) :] == lesson.PAD).all()
        assert torch.equal(target[: len(real) - 1], wanted[:-1])
        assert (target[len(real) :] == lesson.IGNORE).all()
        if padded:  # the line's end is the last thing to be learnt
            assert target[len(real) - 1] == (10 if real[-1] != 10 else lesson.IGNORE)
        assert (target != lesson.IGNORE).any()
    assert min(ends) < 8 and ends.count(32) > 20, "long rows and short ones"


def test_batches_follow_the_seed_and_nothing_else():
    make, text = jobs.load(LESSON).make_batches, "ä line\n\n  another one, longer\n"
    one, same, other = (
        make(text, arguments(seed=seed, seq_len=5), 6) for seed in (1, 1, 2)
    )
    for (a, x), (b, y) in zip(one, same):
        assert torch.equal(a, b) and torch.equal(x, y)
        assert a.is_contiguous() and a.shape == x.shape == (4, 5)
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(one, other))


# The lesson's own runs.


@over(RUNS)
def test_a_fresh_model_knows_nothing(run):
    first, *_ = jobs.result(*run).data["losses"]
    V = int(flag(run, "--vocab-size", 257))
    assert abs(first["without TP"] - math.log(V)) < 1


COLUMN = '        "layers.*.mlp.up_proj": column,\n'
CHANGES = {
    "RMSNorm": [("nn.LayerNorm(D)", "nn.RMSNorm(D)")],
    "attention alone": [("    layer.mlp = tp_mlp(layer.mlp, tp_group)\n", "")],
    "a number that nobody uses": [
        ("        self.mlp = MLP(D, 4 * D)\n",
         "{}        self.gain = nn.Parameter(torch.ones(()))\n"),
    ],
    "gated": [
        ("F.gelu(self.up_proj(x_BSD))",
         "F.gelu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)"),
        ("        self.up_proj = ",
         "        self.gate_proj = nn.Linear(hidden, width)\n{}"),
        ("    mlp.up_proj = ",
         "    mlp.gate_proj = ColumnParallelLinear(full.gate_proj, tp_group)\n{}"),
        (COLUMN, "{}" + COLUMN.replace("up", "gate")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_reaches_the_comparison(tmp_path, name):
    """As the lesson's docstring proposes: right numbers, formulas of another model."""
    text = jobs.PATHS[LESSON].read_text("utf-8")
    for old, new in CHANGES[name]:
        assert old in text
        text = text.replace(old, new.replace("{}", old))
    script = tmp_path / f"{LESSON}.py"
    script.write_text(text, "utf-8")
    last = jobs.launch(script, 2).out.splitlines()[-1]
    assert last.startswith("FAIL") and "numbers all ok" in last, last
    assert "bytes differ" in last
