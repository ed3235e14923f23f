"""Lesson 02: the split transformer equals the whole one, and both are what they say.

Random models trained on four ranks, to the rounding of float64; the reference against
PyTorch's attention and complex numbers; then what the lesson's own runs measured.
"""

import json
import math
import re
from itertools import product
from types import SimpleNamespace

import jobs
import pytest
import torch
import torch.nn.functional as F
from in_ranks import VOCABULARIES, no_group
from runs import (
    ALL_RUNS,
    PROOF,
    SEQUENCE,
    TRANSFORMER,
    VOCAB,
    failed,
    flag,
    found,
    number,
    over,
    rows_with,
)  # fmt: skip
from torch.testing import assert_close

DRIVER = ("drive_transformer.py", 4)
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


def models_cover_the_ground(models, shared_heads=False) -> None:
    """What in_ranks samples, with each number of ranks. shared_heads: T > K, too."""
    wanted = {
        "layers": {1, 2, 3}, "dropout": {0, 0.1, 0.5}, "tied": {True, False},
        "vocab_size": {*VOCABULARIES},
    }  # fmt: skip
    for T in (1, 2, 4):
        mine = [case for case in models if case["T"] == T]
        for key, values in wanted.items():
            assert {case[key] for case in mine} == values, (T, key)
        ratios = {T / case["kv_heads"] for case in mine}
        assert ratios >= {1, 0.5} and (max(ratios) > 1) is (shared_heads and T > 1)
        assert {case["S"] % T > 0 for case in mine} == {T > 1, False}


@driven
def test_float64_equality(ranks):
    models_are_equal(found(ranks, "models"))
    models_cover_the_ground(found(ranks, "models"))


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_under_tp_is_a_part_of_the_whole(p, T):
    """To the bit: a slice of the full mask where x is a slice, the full mask where x is
    whole; all ranks' generators move on together."""
    x = torch.randn(4, 8, 12, 4, dtype=torch.float64)
    torch.manual_seed(7)
    whole = (x / (1 - p)).where(torch.rand(x.shape) >= p, 0)
    next_draw = torch.rand(())
    cases = [(lesson.Dropout(p), x, whole)]
    for dim, rank in product(range(4), range(T)):
        dropout = lesson.ShardedDropout(p, dim, no_group(T, rank))
        cases.append((dropout, *(t.tensor_split(T, dim)[rank] for t in (x, whole))))
    for dropout, mine, wanted in cases:
        torch.manual_seed(7)
        assert torch.equal(dropout(mine), wanted)
        assert torch.rand(()) == next_draw


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
    (12, 3, "3 key/value heads cannot be split over 4 ranks"), (8, 6, "6 key/value"),
    (8, 2, "2 key/value heads"), (2, 1, "1 key/value heads"),
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
    for H in (2, 6, 16):
        x = torch.randn(2, 3, 12, H, dtype=torch.float64)
        speed = 10000.0 ** (-2 * torch.arange(H // 2, dtype=torch.float64) / H)
        angle = torch.arange(12, dtype=torch.float64)[:, None] * speed
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(angle * 0 + 1, angle)
        tables = [f(angle).repeat(1, 2) for f in (torch.cos, torch.sin)]
        wanted = torch.cat([turned.real, turned.imag], -1)
        assert_close(lesson.rotate(x, *tables), wanted, rtol=0, atol=1e-14)
        got = [table.double() for table in lesson.rotary_table(12, H)]
        assert_close(got, tables, rtol=0, atol=2e-6)  # angles in float32


def test_attention_is_pytorchs():
    """softmax(QKᵀ/√H)V against F.scaled_dot_product_attention, heads shared or not."""
    for heads, kv_heads, S in ((6, 3, 10), (6, 6, 4), (4, 1, 7), (2, 2, 1)):
        full = reference(heads=heads, kv_heads=kv_heads)
        attention, x = full.layers[0].self_attn, torch.randn(2, S, 24).double()
        q, k, v = (
            proj(x).unflatten(-1, (-1, 24 // heads)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (lesson.rotate(y, full.cos[:S], full.sin[:S]) for y in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        wanted = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        got = attention(x, (full.cos, full.sin, full.future))
        assert_close(got, wanted, rtol=0, atol=1e-13)


def test_layer_and_model_are_what_they_say():
    """Pre-LayerNorm, residuals, GELU, head: written out once more."""
    full = reference(layers=1)
    tokens = torch.randint(11, (2, 10))
    layer, x = full.layers[0], full.embed_tokens.weight[tokens]
    norm = lambda m, x: F.layer_norm(x, (24,), m.weight, m.bias)
    tables = full.cos, full.sin, full.future
    x = x + layer.self_attn(norm(layer.input_layernorm, x), tables)
    up, down = layer.mlp.up_proj, layer.mlp.down_proj
    h = norm(layer.post_attention_layernorm, x) @ up.weight.T + up.bias
    x = x + F.gelu(h) @ down.weight.T + down.bias
    wanted = norm(full.norm, x) @ full.lm_head.weight.T + full.lm_head.bias
    assert_close(full(tokens), wanted, rtol=0, atol=1e-13)
    assert up.weight.shape == (96, 24)


# The data.


def make_batches(count: int, seed: int) -> list:
    args = SimpleNamespace(batch_size=4, seq_len=32, seed=seed, device="cpu")
    return lesson.make_batches(lesson.__doc__, args, count)


def test_a_batch_of_one_row_stores_its_tokens_only():
    """A view of S + 1 positions counted as 8 bytes more than the formula has."""
    args = SimpleNamespace(batch_size=1, seq_len=8, seed=1, device="cpu")
    ((tokens, _),) = lesson.make_batches(lesson.__doc__, args, 1)
    assert tokens.shape == (1, 8) and tokens.untyped_storage().nbytes() == 64


def test_one_step_is_compared_as_three_steps_are():
    """A bias of 0.003 after one step of lr = 0.003."""
    assert lesson.LEAST["parameters"] == pytest.approx(3 * 3e-3)
    bias = torch.tensor([3e-3, -3e-3], dtype=torch.float64)
    wrong = bias * 1.001
    assert lesson.rel_diff(wrong, bias) == pytest.approx(1e-3)
    assert lesson.rel_diff(wrong, bias, 0.009) == pytest.approx(1e-3 / 3)
    assert lesson.rel_diff(3 * wrong, 3 * bias, 0.009) == pytest.approx(1e-3)


def test_batches_are_lines_of_the_text():
    """A row is a piece of a line up to its end; a target is the next byte, or none."""
    lines = [f"{line}\n".encode() for line in lesson.__doc__.splitlines()]
    lengths = []
    for tokens, target in make_batches(50, seed=1):
        assert tokens.is_contiguous() and tokens.shape == target.shape == (4, 32)
        for row, nexts in zip(tokens.tolist(), target.tolist()):
            piece = [row[0], *(byte for byte in nexts if byte != lesson.IGNORE)]
            assert any(bytes(piece) in line for line in lines)
            assert len(piece) == 33 or (len(piece) > 1 and bytes(piece)[-1:] == b"\n")
            assert row == [*piece, *32 * [lesson.PAD]][:32]
            assert nexts == [*piece[1:], *32 * [lesson.IGNORE]][:32]
            lengths.append(len(piece))
    assert min(lengths) < 8 and lengths.count(33) > 20, "long rows and short ones"


def test_batches_follow_the_seed():
    (one, _), (other, _) = (make_batches(1, seed)[0] for seed in (1, 2))
    assert not torch.equal(one, other)


# The lesson's own runs.


RUNS = [run for run in ALL_RUNS if run[0] in (TRANSFORMER, VOCAB, SEQUENCE)]


@over(RUNS)
def test_a_fresh_model_knows_nothing(run):
    data = jobs.result(*run).data
    assert data["verdict"] == "PASS"
    (first,) = [r for r in rows_with(data, "name") if r["name"] == "loss, step 1"]
    V = int(flag(run, "--vocab-size", 257))
    assert abs(number(first["without TP"]) - math.log(V)) < 0.6


@over([(TRANSFORMER, 2), (TRANSFORMER, 4, *PROOF)])
def test_memory_is_what_is_replicated_and_a_part_of_what_is_split(run):
    """Its columns add up to the bytes measured, without TP and with it."""
    data = jobs.result(*run).data
    rows = rows_with(data, "replicated", "split")
    kinds = ["parameters", "gradients", "optimizer state", "saved for backward"]
    assert [row["bytes"] for row in rows] == kinds
    for row in rows:
        replicated, split = number(row["replicated"]), number(row["split"])
        assert replicated > 0 and split > replicated
        assert number(row["without TP"]) == replicated + split
        assert number(row["with TP"]) == replicated + split / run[1]


# Edits, as a learner makes them: old text → new, where {} stands for the old.

Q_NORM = [
    ("        self.dropout = Dropout(dropout)  # of the attention weights\n",
     "{}        self.q_norm = nn.RMSNorm(head_size)\n"),
    ("        q_BNSH = rotate(", "        q_BNSH = self.q_norm(q_BNSH)\n{}"),
]  # fmt: skip
SUM = "weight.register_hook(lambda partial_grad: all_reduce(partial_grad, tp_group))\n"
BY_HAND = [
    ("    attn.o_proj = RowParallelLinear(",
     f"    attn.core.q_norm.{SUM}{{}}"),
]  # fmt: skip
BY_PLAN = [
    ("        p = layer.self_attn.core.dropout.p\n",
     f"        layer.self_attn.core.q_norm.{SUM}{{}}"),
]  # fmt: skip
RMS_NORM = [("nn.LayerNorm(D)", "nn.RMSNorm(D)")]
ONLY_ATTENTION = [("    layer.mlp = tp_mlp(layer.mlp, tp_group)\n", "")]
UNUSED = [  # a parameter without a gradient
    ("        self.mlp = MLP(D, 4 * D)\n",
     "{}        self.gain = nn.Parameter(torch.ones(()))\n"),
]  # fmt: skip
GATED = [
    ("F.gelu(self.up_proj(x_BSD))",
     "F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)"),
    ("        self.up_proj = ",
     "        self.gate_proj = nn.Linear(hidden, width)\n{}"),
    ("    mlp.up_proj = ",
     "    mlp.gate_proj = ColumnParallelLinear(full.gate_proj, tp_group)\n{}"),
    ('        "layers.*.mlp.up_proj": column,\n',
     '{}        "layers.*.mlp.gate_proj": column,\n'),
]  # fmt: skip
NO_ROTARY = [  # then the gradient of a key's bias is zero but for rounding errors
    ("        q_BNSH = rotate(q_BNSH, cos_SH[:S], sin_SH[:S])\n", ""),
    ("        k_BKSH = rotate(k_BKSH, cos_SH[:S], sin_SH[:S])\n", ""),
]
ANGLES = [("10000.0 **", "5000.0 **")]
TWICE = [("    return F.cross_entropy(", "    return 2 * F.cross_entropy(")]
RIGHT = {  # edits, and which formulas they change
    "a norm over heads": (Q_NORM + BY_HAND + BY_PLAN, {"memory", "bytes", "calls"}),
    "a gate, RMSNorm": (GATED + RMS_NORM, {"memory", "bytes", "calls"}),
    "only attention is split": (ONLY_ATTENTION, {"memory", "bytes", "calls"}),
    "a parameter without a gradient, no rotary": (UNUSED + NO_ROTARY, {"memory"}),
    "other angles, twice the loss": (ANGLES + TWICE, set()),
}


def run_changed(folder, changes, ranks=2) -> jobs.Done:
    """A run of the lesson with edits."""
    text = jobs.PATHS[TRANSFORMER].read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new.replace("{}", old))
    script = folder / f"{TRANSFORMER}.py"
    script.write_text(text, "utf-8")
    path = folder / "out.json"
    done = jobs.launch(script, ranks, "--json", path)
    assert max(map(len, done.out.splitlines())) <= 88, done.out
    return done._replace(data=json.loads(path.read_text("utf-8")))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_edit_passes(tmp_path, name):
    """As the lesson's docstring proposes: right values, formulas of another model."""
    changes, formulas = RIGHT[name]
    done = run_changed(tmp_path, changes)
    assert done.code == 0 and set(failed(done.data)) == formulas, done.text
    assert f"\nPASS  {TRANSFORMER}  " in done.out and "✗" not in done.out
    assert ("≠" in done.out) is bool(formulas)


def test_a_gradient_that_is_zero_but_for_rounding_errors():
    """Its errors are compared with less than the smallest gradient of a default run."""
    wrong, right = torch.tensor(2e-9), torch.tensor(0.0)
    assert lesson.rel_diff(wrong, right, lesson.LEAST["gradients"]) > 1e-5


def test_a_norm_over_heads_has_partial_gradients(tmp_path):
    """Without the sum that the lesson names it is wrong, and is named first."""
    done = run_changed(tmp_path, Q_NORM + BY_HAND)
    wrong = re.findall(r"^   (\S+) .*✗$", done.out.partition("\n4  ")[0], re.M)
    assert "layers.*.self_attn.core.q_norm" in wrong and len(wrong) < 6, done.out
    (first, *_) = re.findall("^✗ (.*): off by", done.out, re.M)
    assert re.search(r"replicas|gradients: layers\.\d\.self_attn\.core\.q_norm", first)
    gradients = [c["name"] for c in done.data["checks"] if c["ranks"]]
    assert all(", DTensor" in x for x in gradients if x.startswith("gradients"))


def test_gradients_that_are_clipped_twice(tmp_path):
    """Both runs would have the same fault: the one without TP is clipped by PyTorch."""
    done = run_changed(tmp_path, [("p.grad.mul_(scale)", "p.grad.mul_(scale * scale)")])
    assert done.code == 1 and done.data["verdict"] == "FAIL", done.text
    kinds = failed(done.data)
    assert {"losses", "norms", "parameters"} >= kinds.keys() > {"parameters"}
    assert not any(", DTensor" in c["name"] for c in done.data["checks"] if c["ranks"])


COPIED = "    model = copy.deepcopy(full)\n    for layer in model.layers:\n"
RAISING = {
    "with TP": [(COPIED, "    raise TypeError('by hand')\n{}")],
    "DTensor": [("    column = parallel.Col", "    raise TypeError('by plan')\n{}")],
}


@pytest.mark.parametrize("raising", [["with TP"], ["with TP", "DTensor"]])
def test_runs_that_raise(tmp_path, raising):
    """The others go on; sections keep their numbers; what is not compared is not ok."""
    changes = [change for run in raising for change in RAISING[run]]
    done = run_changed(tmp_path, changes)
    assert done.code != 0 and failed(done.data)["runs"] == len(raising), done.text
    assert re.findall(r"^(\d)  ", done.out, re.M) == ["1", "2", "3", "4", "5"]
    wrong = [check for check in done.data["checks"] if check["ranks"]]
    assert [check["name"] for check in wrong] == [f"runs: {run}" for run in raising]
    assert all("TypeError: by" in check["text"] for check in wrong)
    gradients = done.out.partition("\n3  ")[2].partition("\n\n")[0]
    rows = gradients.splitlines()[2:]
    assert len(rows) == 11 and all(row.count("raised") == len(raising) for row in rows)
    assert all(row.endswith("ok") is (len(raising) == 1) for row in rows)
    traffic = done.out.partition("\n4  ")[2].partition("\n5  ")[0]
    assert ("all-reduce" in traffic) is ("DTensor" not in raising)


@pytest.mark.parametrize("lesson", [TRANSFORMER, VOCAB])
def test_the_optimizer_takes_dtensors_beside_plain_tensors(lesson):
    """As on GPUs, where AdamW updates lists of tensors if it is not told otherwise."""
    done = jobs.launch(jobs.ROOT / "tests" / "foreach.py", 2, lesson)
    assert done.code == 0 and "\nPASS  " in done.out, done.text


def test_a_table_of_wrong_numbers_fits_the_screen(tmp_path):
    """Of two runs: norms of q and k whose gradients lack a sum."""
    done = run_changed(tmp_path, Q_NORM)
    assert re.search(r"core.q_norm +0\.\d+ +0\.\d+✗ +0\.\d+✗", done.out), done.out
