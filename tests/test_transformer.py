"""Lesson 02: the split transformer equals the whole one, and both are what they say.

Random models trained on four ranks, to the rounding of float64; the reference against
PyTorch's attention and complex numbers; then what the lesson's own runs measured.
"""

import math
import re
from itertools import product
from types import SimpleNamespace

import jobs
import pytest
import torch
import torch.nn.functional as F
from in_ranks import VOCABULARIES, no_group
from runs import ALL_RUNS, SEQUENCE, TRANSFORMER, VOCAB, flag, found, over
from torch import Tensor

DRIVER = ("drive_transformer.py", 4)
RUNS = [run for run in ALL_RUNS if run[0] == TRANSFORMER]
lesson = jobs.load(TRANSFORMER)

driven = pytest.mark.launches(*DRIVER)


# The random models, of lessons 03 and 04, too (in_ranks.Twins).

ROUNDED = {"logits", "loss", "gradients", "norm", "clipped", "parameters", "eval"}
EXACT = {"held", "names", "tied", "own", "replicas", "clipped above the limit only"}


def models_are_equal(models) -> None:
    """After some steps, too. To the bit: what ranks of a group hold alike, slices of
    the model, which are copies under PyTorch's names, and below the limit gradients."""
    for case in models:
        assert case["diffs"].keys() == ROUNDED | EXACT
        for kind, (diff, name) in case["diffs"].items():
            assert diff <= (1e-12 if kind in ROUNDED else 0), (kind, name, case)


def models_cover_the_ground(models) -> None:
    models = {case["number"]: case for case in models}.values()
    wanted = {
        "B": {1, 2, 3}, "layers": {1, 2, 3}, "dropout": {0, 0.1, 0.5},
        "tied": {True, False}, "vocab_size": {*VOCABULARIES},
    }  # fmt: skip
    assert len(models) >= 64
    for T in (1, 2, 4):
        mine = [case for case in models if case["T"] == T]
        for key, values in wanted.items():
            assert {case[key] for case in mine} == values, (T, key)
        assert {T / case["kv_heads"] for case in mine} >= {T, 1, 0.5}
        assert {case["heads"] // case["kv_heads"] for case in mine} >= {1, 2, 3}
        assert {case["seq_len"] > case["S"] for case in mine} == {True, False}
        lengths = {case["S"] for case in mine}
        assert 1 in lengths and max(lengths) >= 2 * T + 1 and len(lengths) >= 5
        many = [case for case in mine if case["B"] * case["S"] >= 2 * T]
        assert len(many) >= 10, "with the first and the last token of every rank"


@driven
def test_float64_equality(ranks):
    models_are_equal(found(ranks, "models"))
    models_cover_the_ground(found(ranks, "models"))


def drop(dropout, x, upstream, draws) -> Tensor:
    """Output and gradient; what is drawn next must be what is drawn in one process."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    y = dropout(x)
    assert torch.equal(torch.rand(3), draws)
    y.backward(upstream)
    return torch.stack([y, x.grad])


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_dropout_under_tp_is_a_part_of_the_whole(p, T):
    """To the bit: a slice of the full mask where x is a slice, the full mask where x is
    whole; all ranks' generators move on together."""
    both = torch.randn(2, 4, 8, 12, 4, dtype=torch.float64)  # x, upstream gradient
    torch.manual_seed(7)
    keep, draws = torch.rand(both[0].shape) >= p, torch.rand(3)
    wanted = (both / (1 - p)).where(keep, 0)
    assert torch.equal(drop(lesson.Dropout(p), *both, draws), wanted)
    for dim, rank in product(range(4), range(T)):
        mine, wanted_here = (t.tensor_split(T, dim + 1)[rank] for t in (both, wanted))
        dropout = lesson.ShardedDropout(p, dim, no_group(T, rank))
        assert torch.equal(drop(dropout, *mine, draws), wanted_here)


@pytest.mark.parametrize("name, split", [
    (TRANSFORMER, "tp_transformer"), (VOCAB, "vocab_transformer"),
    (SEQUENCE, "sp_transformer"),
])  # fmt: skip
@pytest.mark.parametrize("mode", [False, True])
def test_a_model_in_eval_mode_is_split_in_eval_mode(name, split, mode):
    taught = jobs.load(name)
    full = taught.Transformer(taught.Config(257, 16, 4, 4, 2, 8, 0.5)).train(mode)
    model = getattr(taught, split)(full, no_group(2))
    assert {module.training for module in model.modules()} == {mode}


@pytest.mark.parametrize("heads, kv_heads, said", [
    (12, 3, "3 key/value heads on 4 ranks"), (2, 1, "2 heads on 4 ranks"),
])  # fmt: skip
def test_heads_that_do_not_divide(heads, kv_heads, said):
    full = reference(hidden=8 * heads, heads=heads, kv_heads=kv_heads)
    with pytest.raises(ValueError, match=said):
        lesson.tp_transformer(full, no_group(4))


# The reference, in this process.


def reference(seed=0, **changes):
    sizes = dict(
        vocab_size=11, hidden=24, heads=6, kv_heads=3, layers=2, seq_len=10, dropout=0.0
    )
    torch.manual_seed(seed)
    return lesson.Transformer(lesson.Config(**sizes | changes)).double()


def test_rotate_turns_complex_numbers():
    """Feature i and feature i + H/2 are one complex number; position p turns it."""
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


# The data.


def arguments(**changes) -> SimpleNamespace:
    sizes = dict(batch_size=4, seq_len=32, seed=1, device="cpu")
    return SimpleNamespace(**sizes | changes)


def test_batches_are_lines_of_the_text():
    """A row is a piece of a line up to its end; a target is the next byte, or none."""
    lines = [f"{line}\n".encode() for line in lesson.__doc__.splitlines()]
    batches = lesson.make_batches(lesson.__doc__, arguments(), 50)
    rows = [pair for batch in batches for pair in zip(*batch)]
    assert len(rows) == 50 * 4
    lengths = []
    for row, target in rows:
        targets = target[target != lesson.IGNORE].tolist()
        piece = [row[0].item(), *targets]
        assert targets and any(bytes(piece) in line for line in lines)
        assert row.tolist() == [*piece, *32 * [lesson.PAD]][:32]
        assert target.tolist() == [*targets, *32 * [lesson.IGNORE]][:32]
        assert len(piece) == 33 or bytes(piece).endswith(b"\n")
        lengths.append(len(piece))
    assert min(lengths) < 8 and lengths.count(33) > 20, "long rows and short ones"


def test_batches_follow_the_seed_and_nothing_else():
    text = "ä line\n\n  another one, longer\n"
    sizes = [arguments(seed=seed, seq_len=5) for seed in (1, 1, 2)]
    one, same, other = (lesson.make_batches(text, args, 6) for args in sizes)
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
        ('        "layers.*.mlp.up_proj": column,\n',
         '{}        "layers.*.mlp.gate_proj": column,\n'),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_reaches_the_comparison(tmp_path, name):
    """As the lesson's docstring proposes: right numbers, formulas of another model."""
    text = jobs.PATHS[TRANSFORMER].read_text("utf-8")
    for old, new in CHANGES[name]:
        assert old in text
        text = text.replace(old, new.replace("{}", old))
    script = tmp_path / f"{TRANSFORMER}.py"
    script.write_text(text, "utf-8")
    last = jobs.launch(script, 2).out.splitlines()[-1]
    assert re.search(r"^FAIL .*  0 of \d+ numbers, .*[1-9]\d* of \d+ bytes", last), last
