"""Every bug of bugs/ fails its lesson, by the checks it should, and is explained."""

import re
import subprocess
import sys

import bug
import jobs
import pytest

# Lesson → bug → the checks that it turns red, and last one that stays green; or, of
# one that comes to no verdict, what its error says. The first one is the first failure
# that is printed above FAIL: it points to the cause. "gradients: …" is any gradient,
# where all are wrong and which is worst depends on the training text.
loss = "losses: loss, step 1, {}".format
loss_2 = "losses: loss, step 2, {}".format
norm = "norms: ‖g‖, step 1, {}".format
grad = "gradients: {}".format
value = "values: {}".format
bits = "bits: {}".format
EXPECTED = {
    "00_collectives": {
        "skip": "doctor: ranks .* are waiting in different calls: ",
        "order": (value("two sums, first 1s, then 10s"), value("broadcast")),
        "shapes": "doctor: ",
        "view": (value("all-reduce of a transposed view"),
            value("the view itself afterwards")),
        "wait": (value("a sum started, then waited for"),
            value("two sums, first 1s, then 10s")),
    },
    "01_naive_mlp_tp": {
        "f": (grad("dL/d x, Megatron"), grad("dL/d up_proj.bias, naive"),
            grad("dL/d x, naive"), "replicas: x, ", loss_2("Megatron"),
            "calls: naive backward all-reduce tp",
            grad("dL/d up_proj.weight, Megatron")),
        "g": (grad("dL/d down_proj.weight, Megatron"), grad("dL/d x, Megatron"),
            grad("dL/d up_proj.weight, Megatron"),
            loss_2("Megatron"), grad("dL/d down_proj.bias, Megatron")),
        "bias": ("outputs: y, Megatron", grad("dL/d up_proj.bias, Megatron"),
            loss("Megatron"), "outputs: y, naive"),
        "average": (grad("dL/d down_proj.bias, DP"), loss_2("DP"),
            grad("dL/d up_proj.bias, DP"), "outputs: y, DP"),
    },
    "02_transformer_tp": {
        "seed": (loss("with TP"), "gradients: …", grad("lm_head.weight, with TP"),
            loss("with TP"),
            loss("DTensor")),
        "qkv": (loss("with TP"), "gradients: …",
            grad("layers.0.self_attn.q_proj.weight, with TP"),
            loss("with TP"), loss("DTensor")),
        "mask-heads": (loss("with TP"), "gradients: …", loss("with TP"),
            grad("layers.0.self_attn.v_proj.weight, with TP"),
            grad("layers.0.self_attn.v_proj.weight, DTensor")),
        "mask-residual": (loss("with TP"), "gradients: …",
            grad("lm_head.bias, with TP"),
            "replicas: losses, ", "replicas: norm.weight, ", loss("DTensor")),
        "clip": ("replicas: norms, ", norm("with TP"),
            "calls: with TP clipping all-reduce tp", loss("with TP")),
        "data": (loss("with TP"), "gradients: …", norm("with TP"), "replicas: losses, ",
            loss("DTensor")),
        "drift": ("replicas: embed_tokens.weight, ", "replicas: norm.bias, ",
            "replicas: losses, ", "replicas: norm.weight, ", loss("with TP")),
    },
    "03_vocab_parallel": {
        "ignored": ("gradients: …", grad("embed_tokens.weight, with TP"),
            "hard gradients: 20% ignored, ", loss_2("with TP"), loss("with TP")),
        "mean": (loss("loss by hand"), "gradients: …",
            "hard gradients: 20% ignored, ", "hard values: 20% ignored, ",
            loss("with TP"), "memory: sharded: saved, V 257", loss("DTensor")),
        "gathered": (loss("with TP"), grad("lm_head.weight, spare rows"),
            loss("with TP"),
            "calls: with TP loss all-gather tp", loss("loss by hand")),
        "spare": (loss("with TP"), grad("lm_head.weight, spare rows"),
            loss("with TP"),
            "parameters: lm_head.bias, spare rows", loss("loss by hand")),
        "max": ("hard values: logits × 10,000, ", "hard gradients: logits × 10,000, ",
            "calls: with TP loss all-reduce tp", loss("with TP")),
        "exponentials": ("gradients: …",
            grad("lm_head.weight, with TP"), loss_2("with TP"), loss("with TP")),
        "tie": (grad("lm_head.weight, with TP"), grad("embed_tokens.weight, with TP"),
            loss_2("with TP"), loss("with TP")),
        "loss-parallel": ("runs: DTensor", loss("with TP")),
    },
    "04_sequence_parallel": {
        "norms": (grad("norm.bias, TP + SP"), grad("layers.…"),
            grad("norm.weight, TP + SP"),
            "replicas: norm.weight, ", norm("TP + SP"), loss("TP + SP")),
        "row-bias": (loss("TP"), grad("layers.…"),
            grad("layers.0.mlp.down_proj.bias, TP + SP"),
            loss("TP + SP"), loss("TP"), loss("DTensor")),
        "length": ("runs: padded lengths", loss("TP + SP")),
        "rotary": (loss("TP + SP"), grad("layers.…"),
            grad("layers.0.self_attn.k_proj.weight, TP + SP"),
            loss("TP + SP"), norm("TP + SP"), loss("TP")),
        "mask": (loss("TP + SP"), grad("layers.…"), grad("norm.bias, TP + SP"),
            loss("TP")),
        "split": (grad("norm.bias, TP + SP"), grad("layers.…"),
            grad("norm.weight, TP + SP"), norm("TP + SP"),
            "calls: TP + SP backward reduce-scatter tp", loss("TP + SP")),
        "product": (grad("layers.…"), grad("layers.0.mlp.up_proj.weight, TP + SP"),
            norm("TP + SP"), "calls: TP + SP backward all-gather tp",
            "calls: backward of a layer, TP + SP",
            grad("layers.0.mlp.down_proj.weight, TP + SP")),
        "keywords": ("runs: DTensor", loss("TP + SP")),
        "dtensor-loss": ("runs: DTensor", loss("TP + SP")),
        "tiled": ("runs: DTensor", loss("TP + SP")),
    },
    "05_3d_parallel": {
        "shape": "doctor: ",
        "data": ("runs: micro-batches of the TP group", loss("mesh"),
            grad("embed_tokens.weight, mesh"), "outputs: order of the layers"),
        "micro": (loss("mesh"), grad("…"), grad("lm_head.bias, mesh"), loss("mesh"),
            "outputs: order of the layers"),
        "order": r"doctor: ranks \[0, 1\] are waiting in different calls: ",
        "mixed-up": "doctor: rank 1 raised ValueError: expected the activation of "
            "micro-batch 4",
        "norm": ("norms: ‖g‖, step 1, mesh", loss_2("mesh"), loss("mesh")),
        "tied": (grad("embed_tokens.weight, mesh"), "norms: ‖g‖, step 1, mesh",
            "calls: mesh sums all-reduce embed", loss("mesh")),
        "replicas": (loss("mesh"), grad("…"), grad("lm_head.bias, mesh"),
            "outputs: order of the layers"),
        "group": (grad("…"), grad("norm.bias, mesh"), "replicas: norm.bias, dp",
            loss("mesh")),
    },
    "08_same_bits": {
        "tree": (bits("sum of 16 terms, tree"), bits("training, parameters"),
            value("sum, tree")),
        "library": (bits("sum of 16 terms, tree"), bits("training, parameters"),
            "bytes: in blocks forward all-gather tp", value("sum, tree")),
        "blocks": (bits("MLP, down_proj's output, a sum over ranks"),
            bits("training, gradients"), bits("sum of 16 terms, tree")),
        "accumulate": (bits("MLP, dL/dx, a sum over ranks"),
            bits("training, gradients"), bits("training, parameters"),
            bits("sum of 16 terms, tree")),
    },
    "09_shared_heads": {
        "copies": ("gradients: layers.…", grad("layers.0.self_attn.k_proj.weight, TP"),
            grad("layers.1.self_attn.v_proj.bias, SP"), "norms: ‖g‖, step 1, TP",
            "replicas: layers.0.self_attn.v_proj.weight, SP",
            "calls: TP backward all-reduce replica",
            grad("layers.1.self_attn.q_proj.weight, TP")),
        "input": (grad("layers.1.input_layernorm.bias, TP"),
            grad("layers.0.input_layernorm.weight, TP"),
            grad("layers.1.input_layernorm.weight, TP"), "replicas: losses, TP",
            grad("layers.1.self_attn.k_proj.weight, TP")),
        "twice": ("gradients: layers.…", grad("layers.0.self_attn.v_proj.weight, TP"),
            grad("layers.1.self_attn.k_proj.weight, SP"),
            "replicas: layers.0.self_attn.k_proj.weight, TP"),
        "order": ("runs: key head of rank 1", loss("TP"), loss("SP"),
            "runs: key head of rank 0"),
        "norm": ("norms: ‖g‖, step …", "norms: ‖g‖, step 1, SP", loss_2("TP"),
            "norms: ‖g‖, step 1, TP", grad("layers.0.self_attn.k_proj.weight, TP")),
    },
    "10_checkpoints": {
        "moments": ("loaded: exp_avg/embed_tokens.weight, A again",
            "loaded: exp_avg_sq/norm.bias, B", loss_2("B")),
        "step": ("loaded: step/of AdamW, A again", "bitwise: step/of AdamW, A again",
            loss_2("B")),
        "stale": ("loaded: vector/embed_tokens.weight, A again",
            "loaded: vector/layers.0.input_layernorm.bias, A again",
            "bitwise: weight/norm.bias, A again", loss_2("B")),
        "tied-copy": ("loaded: weight/embed_tokens.weight, C", "norms: ‖g‖, step 2, C",
            loss_2("B")),
        "position": ("batches: batch of step 2, A again", loss_2("B"),
            "loaded: weight/norm.bias, B"),
        "in-place": ("interrupted: the latest checkpoint stays", loss_2("B")),
    },
    "11_context_parallel": {
        "stale": ("gradients: layers.…", grad("layers.0.self_attn.q_proj.weight, ring"),
            grad("layers.1.self_attn.k_proj.weight, zigzag"), "attention: dL/dk, ring",
            "calls: ring backward send/recv cp", loss_2("ring"), loss("ring")),
        "home": ("gradients: layers.…", grad("layers.1.self_attn.k_proj.weight, ring"),
            "attention: dL/dk, zigzag", "attention: dL/dv, ring",
            "attention: dL/dq, ring"),
        "lse": ("gradients: layers.…", "attention: dL/dq, ring",
            "attention: dL/dv, zigzag", "attention: y, ring"),
        "positions": ("outputs: loss, step 1, …", loss("gather"), loss("ring"),
            "attention: dL/dq, zigzag", loss("Ulysses")),
        "count": ("outputs: loss, step 1, …", grad("lm_head.bias, Ulysses"),
            loss("gather"), "calls: ring loss all-reduce cp", "attention: dL/dk, ring"),
        "sum": ("gradients: …", grad("lm_head.bias, ring"),
            "replicas: norm.bias, ring, cp",
            "calls: gather summing all-reduce cp", loss("ring")),
        "average": ("gradients: …", grad("lm_head.bias, ring"), norm("Ulysses"),
            "replicas: norm.bias, ring, cp"),
        "shift": ("outputs: loss, step 1, …", loss("gather"), loss("Ulysses"),
            "attention: dL/dk, ring"),
    },
    "13_mesh_2d": {
        "plain": (grad("dL/d up_proj.bias, FSDP"), grad("dL/d up_proj.bias, 2D"),
            "memory: gradients, FSDP", grad("dL/d up_proj.weight, FSDP")),
        "average": (grad("dL/d down_proj.bias, FSDP"), loss_2("FSDP"), loss_2("2D"),
            grad("dL/d up_proj.weight, 2D"), "outputs: y, 2D"),
    },
    "14_schedules": {
        "leak": ("memory: gpipe, bytes left on rank 0",
            "memory: interleaved, bytes left on rank 1",
            "memory: gpipe, bytes left on rank 1",
            "memory: 1f1b, bytes at the peak on rank 0",
            "memory: 1f1b, in flight on rank 1",
            "memory: interleaved, bytes left on rank 0", grad("lm_head.bias, 1f1b")),
        "early": ("runs: zero-bubble", grad("lm_head.bias, 1f1b")),
        "chunks": "doctor: rank 1 raised ValueError: expected the activation of "
            "micro-batch 1",
        "newest": (grad("lm_head.bias, zero-bubble"), grad("layers.…"),
            grad("lm_head.weight, zero-bubble"),
            grad("lm_head.weight, interleaved")),
        "forgotten": (grad("lm_head.bias, zero-bubble"), grad("layers.…"),
            grad("lm_head.weight, zero-bubble"),
            "memory: zero-bubble, bytes left on rank 1",
            grad("loss, zero-bubble")),
        "history": ("memory: zero-bubble, bytes left on rank 0",
            "memory: zero-bubble, bytes left on rank 1",
            "memory: zero-bubble, in flight on rank 0",
            "memory: gpipe, bytes left on rank 0"),
    },
    "16_expert_parallel": {
        "no-backward": (grad("layers.1.mlp.experts.…"), loss_2("EP"),
            grad("layers.1.mlp.experts.down_proj, EP"),
            "calls: EP backward all-to-all-v ep", "one layer: dL/dx, random, k 2",
            loss("EP")),
        "router": (grad("layers.1.mlp.router.weight, …"), loss_2("EP"),
            "one layer: router.weight, random, k 2", loss("EP")),
        "balance": (loss("EP"), grad("layers.1.mlp.router.weight, …"), loss("EP"),
            loss_2("PyTorch"), "one layer: y, random, k 2"),
        "divided": (grad("layers.1.mlp.experts.…"), norm("EP"), loss_2("EP"),
            "one layer: experts.up_proj, random, k 1",
            grad("layers.1.mlp.router.weight, EP")),
        "all": (grad("layers.1.mlp.experts.…"), "bytes: EP summing all-reduce ep",
            loss_2("EP"), "one layer: experts.down_proj, random, k 3",
            grad("layers.1.mlp.shared_expert.up_proj.weight, EP")),
        "replicas": (grad("layers.1.mlp.experts.…"),
            "replicas: layers.1.mlp.experts.down_proj over dp, EP",
            "bytes: EP summing all-reduce dp", loss("EP")),
        "shared": (grad("layers.1.mlp.shared_expert.…"),
            "replicas: layers.1.mlp.shared_expert.down_proj.weight over ep, EP",
            "one layer: shared_expert.up_proj.bias, random, k 2",
            grad("layers.1.mlp.experts.up_proj, EP")),
        "twice": (loss("EP"), "gradients: …", "calls: EP forward all-reduce tp",
            "one layer: y, all to expert 0, k 1", "calls: EP clipping all-reduce tp"),
        "inverse": (loss("EP"), "gradients: …", "one layer: y, random, k 2",
            "calls: EP backward all-to-all-v ep"),
        "empty": r"doctor: ranks \[0, 1\] are waiting in different calls: ",
        "norm": ("replicas: …", "norms: ‖g‖, step 1, EP", loss_2("EP"),
            "calls: EP clipping all-reduce ep", loss("EP")),
    },
    "15_zero": {
        "last": ("gradients: …", grad("lm_head.bias, ZeRO-2"),
            grad("norm.weight, kept"), loss_2("HSDP"), grad("norm.weight, ZeRO-1")),
        "norm": ("norms: ‖g‖, step …", norm("DP"), norm("ZeRO-3"), loss_2("ZeRO-1"),
            grad("norm.weight, ZeRO-3")),
        "shards": ("norms: ‖g‖, step …", norm("ZeRO-1"), norm("HSDP"), norm("DP")),
        "hybrid": ("norms: ‖g‖, step …", norm("DP"), norm("HSDP"), norm("ZeRO-3")),
        "group": ("gradients: …", grad("lm_head.bias, DP"), grad("lm_head.bias, HSDP"),
            "replicas: parameters on all ranks, DP", "bytes: HSDP, to the other node",
            "calls: DP, sums", loss("DP")),
        "freed": ("runs: ZeRO-3", "runs: HSDP", norm("kept")),
        "average": ("gradients: …", grad("lm_head.bias, fully_shard"),
            norm("fully_shard"), grad("lm_head.bias, ZeRO-3")),
    },
    "18_in_pieces": {
        "pieces": (loss("in pieces"), "gradients: …", grad("lm_head.bias, in pieces"),
            norm("in pieces"), "calls: in pieces, forward of an MLP, behind a product"),
        "partial": ("pieces: …", "pieces: embed_tokens.weight, head and loss in pieces",
            "pieces: norm.weight, head and loss in pieces",
            "bytes: head and loss in pieces",
            "pieces: lm_head.weight, head and loss in pieces"),
    },
}  # fmt: skip
# Where forward becomes wrong: what the doctor says of it.
PLACES = {
    ("02_transformer_tp", "qkv"): "forward is right up to layers.0.input_layernorm and "
    "wrong from layers.0.self_attn.q_proj on",
    ("02_transformer_tp", "mask-residual"): "forward is right up to layers.0.self_attn "
    "and wrong from layers.0.dropout on",
    ("02_transformer_tp", "data"): "forward is wrong from the model's input on",
    ("02_transformer_tp", "mask-heads"): "forward is right up to [a-z0-9._]+ and wrong "
    "from layers.0.self_attn.core.dropout on",
    ("04_sequence_parallel", "mask"): "forward is right up to [a-z0-9._]+ and wrong "
    "from layers.0.dropout on",
    ("03_vocab_parallel", "mean"): "the model's output is right, the loss made from it "
    "is wrong",
    (
        "03_vocab_parallel",
        "spare",
    ): "(forward is right up to norm,|the model's output "
    "is right, the loss made from it is wrong)",
}
# Small models show as much as the default ones. 14 has one step, of stated times.
SMALL = dict.fromkeys(("02", "03", "04", "15"), ("--steps", "2", "--layers", "1"))
SMALL |= dict.fromkeys(("05", "10"), ("--steps", "2", "--layers", "2"))
SMALL["14"] = ("--sleep", "5", "--layers", "4", "--microbatches", "4")
SMALL["00"] = ()
CASES = [(lesson, name) for lesson in EXPECTED for name in EXPECTED[lesson]]


def run_of(lesson: str, name: str) -> tuple:
    number = lesson[:2]
    ranks = bug.bugs_of(number)[name].get("ranks", 2)
    sizes = SMALL.get(number, ("--steps", "2"))
    # On a busy machine a rank may wait long for another one that does come.
    timeout = () if name in jobs.HANGS else ("--timeout", "120")
    return "bug.py", ranks, number, name, *sizes, *timeout


@pytest.mark.parametrize("lesson, name", [
    pytest.param(
        *case, id=f"{case[0][:2]} {case[1]}",
        marks=[pytest.mark.launches(*run_of(*case))],
    )
    for case in CASES
])  # fmt: skip
def test_fails_and_says_what_it_did(lesson, name):
    """The checks that fail; at the end the edit, the symptom, why, and who met it."""
    edit, wanted = bug.bugs_of(lesson[:2])[name], EXPECTED[lesson][name]
    done = jobs.result(*run_of(lesson, name))
    said = done.data["said"]
    assert done.code == 0 and done.left == [], done.text
    lines = said.splitlines()
    assert max(map(len, lines)) <= 88 and len(lines) <= 40, said
    changed = bug.diff(edit)
    shown = changed if len(changed) <= 6 else changed[:5]
    first = lines.index(shown[0])
    assert lines[first : first + len(shown)] == shown
    words = " ".join(said.split())
    assert words.startswith("changed in ")
    texts = [f"{key}: {edit[key]}" for key in ("symptom", "why", "reported")]
    texts = [edit["what"], *texts]
    if "audit" in edit:
        texts.append(f'tools/audit.py reports it as "{edit["audit"]} …"')
    places = ["".join(said.split()).index("".join(text.split())) for text in texts]
    assert places == sorted(places), said  # and nothing comes behind them
    assert ("in a model of yours: tools/audit.py" in words) == ("audit" in edit)
    if isinstance(wanted, str):
        assert "FAIL" not in said and re.search(wanted, words), said
        return
    *red, green = wanted
    formulas = [row["name"] for row in done.data["checks"] if row["is_formula"]]
    verdict, mark = ("PASS", "≠") if red[0] in formulas else ("FAIL", "✗")
    assert f"\n{verdict}  " in said and done.data["verdict"] == verdict
    bad = {row["name"]: row["ranks"] for row in done.data["checks"]}
    assert bad[green] == [], bad
    for check in red:
        found = [name for name in bad if is_meant(check, name)]
        assert any(bad[name] for name in found), (check, bad)
    first = re.search(f"{mark} (.*)", words)[1]  # the first failure points to the cause
    named = [
        row["name"] for row in done.data["checks"] if is_meant(red[0], row["name"])
    ]
    assert first.startswith(tuple(named)), (first, named)


@pytest.mark.parametrize("lesson, name", [
    pytest.param(*case, marks=[pytest.mark.launches(*run_of(*case))]) for case in PLACES
])  # fmt: skip
def test_the_place_where_forward_becomes_wrong_is_named(lesson, name):
    said = " ".join(jobs.result(*run_of(lesson, name)).data["said"].split())
    assert re.search(rf"doctor: [\w +,]+: {PLACES[lesson, name]} ", said), said


def is_meant(check: str, name: str) -> bool:
    """A check's name; one that ends in "…" or ", " stands for all that begin so."""
    if check.endswith(("…", ", ")):
        return name.startswith(check.removesuffix("…"))
    return name == check


ORDER = run_of("05_3d_parallel", "order")


@pytest.mark.launches(*ORDER)
def test_a_message_is_named_by_what_it_carries():
    """Both ends of the deadlock say which message they wait for."""
    said = " ".join(jobs.result(*ORDER).data["said"].split())
    to = "rank 0: in message .* activation of micro-batch 2 to stage 1"
    back = "rank 1: in message .* gradient of micro-batch 1 to stage 0"
    assert re.search(to, said) and re.search(back, said), said


# ---- The command


def command(*words) -> subprocess.CompletedProcess:
    tool = [sys.executable, str(jobs.ROOT / "tools" / "bug.py"), *words]
    return subprocess.run(tool, env=jobs.CLEAN_ENV, capture_output=True, text=True)


@pytest.mark.parametrize("lesson", EXPECTED)
def test_list(lesson, capsys):
    bugs = bug.bugs_of(lesson[:2])
    assert set(bugs) == set(EXPECTED[lesson]), "the table above has all of them"
    assert bug.main([lesson[:2]]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 88
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [*bugs]
    for edit in bugs.values():
        assert "".join(edit["what"].split()) in "".join(out.split())


@pytest.mark.parametrize("words, said", [
    (["04", "nope"], "error: 04 has no bug nope; there are: norms, row-bias, length"),
    (["77"], "error: no bugs of 77; there are those of 00, 01, 02, 03, 04, 05, 08"),
])  # fmt: skip
def test_a_wrong_name(words, said, capsys):
    assert bug.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said) and printed.out == ""


def a_bug():
    return command("01", "f", "--steps", "2", "--hidden", "16", "--seed", "3")


def wrong_flag():
    return command("01", "f", "--hidden", "65")


@pytest.mark.ahead.with_args(a_bug)
def test_the_command():
    """What the tests above use in parts: first what it edits, then what the lesson
    prints, and its verdict once, at the end."""
    done = jobs.begin(a_bug).result()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    head, _, out = done.stdout.partition("\n\n")
    edit = bug.bugs_of("01")["f"]
    assert head.splitlines()[1:] == bug.diff(edit)
    assert out.startswith("01_naive_mlp_tp  ranks 2") and "\n2  Losses" in out
    assert done.stdout.count("\nFAIL  ") == 1
    assert done.stdout.endswith(f'reports it as "{edit["audit"]} …"\n')


@pytest.mark.ahead.with_args(wrong_flag)
def test_the_command_with_a_wrong_flag():
    done = jobs.begin(wrong_flag).result()
    assert done.returncode == 2 and "--hidden 65" in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "symptom" not in done.stdout


def test_a_bug_that_does_not_show_is_one_line():
    failed = "PASS  01_naive_mlp_tp  60 checks\n"
    code, said = bug.outcome(bug.bugs_of("01")["f"], "", 0, failed)
    assert code == 1 and said.splitlines()[-1] == (
        "The bug does not show in this run. Try it without other flags."
    )


# ---- The data


def test_diagnoses_differ():
    seen = set()
    for lesson, name in CASES:
        edit = bug.bugs_of(lesson[:2])[name]
        source = r"github\.com/|arXiv:|docs\.|forum|issue"
        assert re.search(source, edit["reported"]), name
        for key in ("what", "symptom", "why"):
            assert len(edit[key]) > 20 and edit[key] not in seen, (name, key)
            seen.add(edit[key])


@pytest.mark.parametrize("lesson, name", CASES)
def test_the_lines_to_edit_occur_once(lesson, name):
    """Whole lines; and what comes out is Python."""
    edit = bug.bugs_of(lesson[:2])[name]
    path, text = bug.edited(lesson[:2], edit)
    compile(text, path, "exec")
    assert "\n" + edit["old"] in (jobs.ROOT / path).read_text("utf-8")
    assert edit["old"].endswith("\n") and edit["old"] != edit["new"]


@pytest.mark.parametrize("old", ["    return 1\n", "return 3\n"])
def test_an_edit_that_is_not_unique_is_refused(old, monkeypatch, tmp_path):
    (tmp_path / "00_x.py").write_text("if x:\n    return 1\nif y:\n    return 1\n")
    monkeypatch.setattr(bug, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"00_x\.py does not have these lines once"):
        bug.edited("00", {"old": old, "new": ""})


def test_what_the_doctor_says_follows_the_verdict():
    """FAIL names the doctor, with all flags; here it has looked already."""
    said = (
        "✗ losses: loss, step 2, TP: 1, expected 2, on ranks [0, 1]\n"
        "FAIL  01_naive_mlp_tp  wrong: losses (2). Where it begins: torchrun\n"
        "  --nproc_per_node=2 tools/doctor.py /tmp/x/01_naive_mlp_tp.py --timeout 15\n"
        "  --json /tmp/out.json\n"
        "doctor: TP: right up to the model's output"
    )
    explained = bug.explain(bug.bugs_of("01")["f"], "01_naive_mlp_tp.py", said)
    assert "wrong: losses (2)\ndoctor: TP: right up to" in explained
    assert "--timeout" not in explained and "✗ losses: loss, step 2" in explained
