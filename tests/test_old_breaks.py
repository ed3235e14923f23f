"""Every `--break` fails its lesson: by the checks it should, with its own diagnosis.

FAILS says which checks each break turns red, no more and no fewer: so a break that
fails for another reason shows, and so does a check that stopped seeing its bug.
"""

import re
from fnmatch import fnmatchcase
from itertools import product

import jobs
import pytest

TENSORS = "{x,up_proj.weight,up_proj.bias,down_proj.weight,down_proj.bias}"
INNER = "{x,up_proj.weight,up_proj.bias,down_proj.weight}"
MEGATRONS = "Megatron's"
TP_BYTES = f"bytes of {{{MEGATRONS},tensor parallel}}"

STEPS = "{1,2,3,4,5}"
# What follows from a wrong first step, by how much depends on the text trained on.
FOLLOWS = ["~{loss,gradient norm} at step {2,3,4,5}", "~* after the last step"]
FIRST_STEP = ["{loss,gradient norm} at step 1", "dL/d *", "loss at step 5", *FOLLOWS]
# In lesson 03 the text also decides which steps have padding.
LATER = [
    "~loss at step {2,3,4,5}, {by hand alone,with TP,gradient norm}",
    "~* after the last step",
]
# Of lesson 05.
MESH_AFTER = ["~* after the last step"]
MESH_ALL = ["{loss,gradient norm} at step {1,2,3}", "dL/d *", *MESH_AFTER]
CASES = "{label smoothing 0.1,V = 50;257}"
# In lesson 04, the model and the tables of layers and lengths. Of one token q and k
# have no gradient, and at 2 ranks rank 1 has no token then.
SP_STEPS = "~loss at step {1,2,3,4,5}, {TP + SP,gradient norm}"
SP_LATER = [
    "~loss at step {2,3,4,5}, {TP + SP,gradient norm}",
    "~* after the last step",
]
SP_FIRST = ["loss at step 1, {TP + SP,gradient norm}", "dL/d *", *SP_LATER]
SP_LAYERS = "{,; gathered kept,; selective,; full recompute}: y and dL/dx"
REPLICATED = "layers.*.{*layernorm.*,self_attn.o_proj.bias,mlp.down_proj.bias}"
LENGTHS = "length {5,31,67}: {loss,dL/d *}"
ONE_TOKEN = "layers.*.{*layernorm.*,mlp.*,self_attn.v_proj.*,self_attn.o_proj.*}"
NOT_EVERYWHERE = (  # checks that some ranks pass, whatever the bug
    "replicas equal on every rank", "bytes of optimizer state with TP",
)  # fmt: skip

ON_ONE_STAGE = {"tied": {"dL/d embed_tokens.weight", "dL/d lm_head.weight"}}

# lesson → break → names of failing checks, {a,b} standing for either, * for anything, ;
# for a comma; with + in front one of them at least is red, with ~ some, all or none.
# After the None those that need 4 ranks. The line it ends with instead, if it does not
# get to its end.
FAILS = {
    "00_collectives": {
        "skip": r"^error: .*; this call was not made by rank {last}(?: \(a tie: .*)?$",
        "shapes": r"exitcode  : -6 .*SIGABRT|error: .*; this call was not made by rank",
        "order": ["two sums in order: {1s,10s}"],
        "view": [
            "reduce-scatter + all-gather",
            "all-reduce of a view",
            "two sums in order: {1s,10s}",
            "ring of {4,7} elements",
        ],
    },
    "01_naive_mlp_tp": {
        "f": [
            f"loss at step {{2,3}}, {{naive split,{MEGATRONS}}}",
            f"dL/d x, {{naive split,{MEGATRONS}}}",
            "dL/d {up_proj.weight,up_proj.bias}, naive split",
            "whole numbers, column: x",
            "f and g on two numbers",
            "tensor parallel: dL/d x",
            f"{TP_BYTES} backward all-reduce tp",
            "bytes of naive split backward all-reduce tp",
        ],
        "g": [
            f"loss at step {{2,3}}, {MEGATRONS}",
            f"dL/d {INNER}, {MEGATRONS}",
            "whole numbers, row: {x,weight}",
            "f and g on two numbers",
            f"tensor parallel: dL/d {INNER}",
            f"{TP_BYTES} backward all-reduce tp",
        ],
        "bias": [
            f"loss at step {{1,2,3}}, {MEGATRONS}",
            f"y, {MEGATRONS}",
            f"dL/d {TENSORS}, {MEGATRONS}",
            "whole numbers, row: y",
            "tensor parallel: loss",
            f"tensor parallel: dL/d {TENSORS}",
        ],
        "plain": [
            "FSDP: dL/d {up_proj,down_proj}.bias",
            "bytes of FSDP backward reduce-scatter dp",
            None,
            "2D mesh: dL/d {up_proj,down_proj}.bias",
            "bytes of 2D mesh backward reduce-scatter y",
        ],
        "gelu": [
            f"loss at step {{1,2,3}}, {MEGATRONS}",
            f"y, {MEGATRONS}",
            f"dL/d {TENSORS}, {MEGATRONS}",
            "tensor parallel: loss",
            f"tensor parallel: dL/d {TENSORS}",
            f"{TP_BYTES} {{forward,backward}} all-reduce tp",
        ],
        "average": [f"FSDP: dL/d {TENSORS}", None, f"2D mesh: dL/d {TENSORS}"],
    },
    "02_transformer_tp": {
        "seed": [*FIRST_STEP, "shards differ from rank to rank"],
        "qkv": FIRST_STEP,
        "mask-heads": [*FIRST_STEP, "bytes of activations with TP"],
        "mask-residual": [*FIRST_STEP, "{replicas equal,one loss} on every rank"],
        "clip": [
            f"gradient norm at step {STEPS}",
            "loss at step 5",
            *FOLLOWS,
            "bytes of clipping all-reduce tp",
            "{replicas equal,one loss} on every rank",
        ],
        "data": [*FIRST_STEP, "{replicas equal,one loss} on every rank"],
        "drift": [
            "{loss,gradient norm} at step 5",
            "layers.*layernorm.* after the last step",
            *FOLLOWS,
            "bytes of optimizer state with TP",
            "{replicas equal,one loss} on every rank",
        ],
    },
    "03_vocab_parallel": {
        "ignored": [
            "~loss at step 1, gradient norm",
            "+loss at step *, with TP",
            "~dL/d *",
            *LATER,
            f"{CASES}: gradient",
            "{only ignored tokens,a vocabulary of 1}: gradient",
        ],
        "mean": [
            "~loss at step 1, {by hand alone,gradient norm}",
            "+loss at step *, with TP",
            "~dL/d *",
            *LATER,
            f"{CASES}: {{loss,gradient}}",
            "only ignored tokens: loss",
            "bytes kept, sharded, V {257,50257}",
        ],
        "gathered": [
            "loss at step 1, {with TP,gradient norm}",
            "loss at step {2,3,4,5}, with TP",
            "dL/d *",
            *LATER,
            "{logits up to 10;000,a vocabulary of 1}: {loss,gradient}",
            f"{CASES}: {{loss,gradient}}",
            "bytes kept, sharded, V {257,50257}",
        ],
        "padding": [
            "loss at step {1,2,3,4,5}, with TP",
            "dL/d *",
            "~loss at step 1, gradient norm",
            *LATER,
            "{label smoothing 0.1,a vocabulary of 1}: {loss,gradient}",
            "~V = 50;257: loss",  # too large by 1e-6 or so
        ],
        "max": [
            "logits up to 10;000: {loss,gradient}",
            "a vocabulary of 1: loss",
            "bytes of {loss forward,sharded; V 257,sharded; V 50257} all-reduce tp",
        ],
        "exponentials": [
            "loss at step 1, gradient norm",
            "loss at step {2,3,4,5}, {by hand alone,with TP,gradient norm}",
            "dL/d *",
            "* after the last step",
            f"{CASES}: gradient",
        ],
        "tie": [
            "loss at step 1, gradient norm",
            "loss at step {2,3,4,5}, {with TP,gradient norm}",
            "dL/d embed_tokens.weight",
            "* after the last step",
        ],
        "loss-parallel": r"^error: rank \d raised \w+Error: .*DTensor",
    },
    "04_sequence_parallel": {
        "norms": [
            "loss at step 1, gradient norm",
            "loss at step 5, TP + SP",
            f"dL/d {REPLICATED}",
            "dL/d norm.*",
            f"{REPLICATED} after the last step",
            "norm.* after the last step",
            *SP_LATER,
            "replicas equal on every rank",
            "bytes of replicated backward all-reduce tp",
            f"+length 1: dL/d {REPLICATED}",
            "+length 1: dL/d norm.*",
            f"length {{5,31,67}}: dL/d {REPLICATED}",
            "length {5,31,67}: dL/d norm.*",
        ],
        "row-bias": [
            *SP_FIRST,
            "loss at step 5, TP + SP",
            f"a layer, TP + SP{SP_LAYERS}",
            "length 1: loss",
            "length 1: dL/d {embed_tokens,norm,lm_head}.*",
            f"length 1: dL/d {ONE_TOKEN}",
            LENGTHS,
        ],
        "length": r"^error: rank \d raised ValueError: dim 1 of .* 1 % 2 ranks = 1",
        "rotary": [
            SP_STEPS,
            "dL/d layers.*.self_attn.{q,k}_proj.weight",
            "~dL/d *",
            *SP_LATER,
            LENGTHS,
        ],
        "mask": [
            *SP_FIRST,
            "loss at step 5, TP + SP",
            f"a layer, TP + SP{SP_LAYERS}",
            LENGTHS,
        ],
        "split": [
            "loss at step 1, gradient norm",
            "loss at step 5, TP + SP",
            "dL/d {embed_tokens,layers,norm}.*",
            *SP_LATER,
            "pair GatherThenLinear: dL/dx",
            "bytes of layers backward reduce-scatter tp",
            "a ring sends as much with SP as with TP alone",
            "a layer, TP + SP{,; selective,; full recompute}: y and dL/dx",
            "length 1: dL/d {embed_tokens,norm}.*",
            f"length 1: dL/d {ONE_TOKEN}",
            "length {5,31,67}: dL/d {embed_tokens,layers,norm}.*",
        ],
        "sum": ["pair GatherFromTP: dL/dx"],
        "slice-mean": [
            "+loss at step *, TP + SP",
            "~loss at step *",
            "~dL/d *",
            *SP_LATER,
            LENGTHS,
        ],
        "keywords": r"^error: rank \d raised ValueError: .* input_layouts .* length",
        "dtensor-loss": r"^error: rank \d raised .*(sharding strategy|DeviceMesh)",
        "tiled": r"^error: rank \d raised RuntimeError: .* a \(64\) .* b \(32\)",
    },
    "05_3d_parallel": {
        "shape": r"exitcode  : -6 .*SIGABRT|error: .*; this call was not made by rank",
        "data": [
            *MESH_ALL,
            "~{bytes of batch broadcast tp,one loss on every rank}",
        ],
        "micro": [*MESH_ALL],
        "order": r"^error: .*message .* rank \d, did not come about; ranks \d, \d wait",
        "norm": ["gradient norm at step {1,2,3}", "~loss at step {2,3}", *MESH_AFTER],
        "tied": [
            "gradient norm at step {1,2,3}",
            "loss at step {2,3}",
            "dL/d {embed_tokens,lm_head}.weight",
            *MESH_AFTER,
            "~tied weights: equal to the bit",
            "~bytes of tied all-reduce pp",
        ],
        "replicas": [*MESH_ALL, "~bytes of batch all-reduce dp"],
        "group": [
            "gradient norm at step {1,2,3}",
            "loss at step {2,3}",
            "dL/d *",
            *MESH_AFTER,
            "replicas: equal to the bit",
            "~bytes of replicas all-reduce {dp,tp}",
            "~bytes that no formula speaks of",
        ],
    },
}
FAILS = {name: breaks for name, breaks in FAILS.items() if name not in jobs.NEW_ANATOMY}
ALSO_AT_4 = [
    ("00_collectives", "skip"),
    ("01_naive_mlp_tp", "average"),
]
ALSO_AT_4 = [one for one in ALSO_AT_4 if one[0] in FAILS]
CONTROL = ("--dtype", "float64")  # runs that test_lessons.py makes anyway


def listed(lesson: str) -> list:
    """The names that --break list prints."""
    code, out, _ = jobs.run_here(lesson, "--break", "list")
    assert code == 0
    return [line.split()[0] for line in out.splitlines()]


ALL = [(lesson, name) for lesson in FAILS for name in listed(lesson)]
RUNS = [(*one, 2) for one in ALL] + [(*one, 4) for one in ALSO_AT_4]
over_runs = pytest.mark.parametrize("lesson, name, ranks", [
    pytest.param(
        lesson, name, ranks, id=f"{lesson[:2]} {name} {ranks}",
        marks=pytest.mark.launches(lesson, ranks, "--break", name),
    )
    for lesson, name, ranks in RUNS
])  # fmt: skip


def spelled_out(pattern: str, names: set) -> set:
    """Names of checks: every {a,b} becomes a, then b, and * whatever is there."""
    parts = re.split(r"\{(.*?)\}", pattern)
    parts = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
    words = {"".join(words).replace(";", ",") for words in product(*parts)}
    found = {name for word in words for name in names if fnmatchcase(name, word)}
    return found | {word for word in words if "*" not in word}


def expected(patterns: list, ranks: int, names: set) -> tuple[set, set, list]:
    """Names of checks that must be red, that may be, and sets of which one must."""
    if None in patterns:
        at = patterns.index(None)
        patterns = patterns[:at] + (patterns[at + 1 :] if ranks == 4 else [])
    must, may, some = set(), set(), []
    for pattern in patterns:
        found = spelled_out(pattern.lstrip("+~"), names)
        assert found, f"{pattern} stands for nothing"
        if pattern[0] not in "+~":
            must |= found
        elif pattern[0] == "+":
            some.append(found)
    may = must.union(*some)
    for pattern in patterns:
        if pattern[0] == "~":
            may |= spelled_out(pattern[1:], names)
    return must, may, some


def fails(lesson, name):
    assert name in FAILS[lesson], f"FAILS does not say what --break {name} turns red"
    return FAILS[lesson][name]


@over_runs
def test_fails_by_the_checks_it_should(lesson, name, ranks):
    wanted = fails(lesson, name)
    done = jobs.result(lesson, ranks, "--break", name)
    assert done.code != 0 and "PASS" not in done.text
    assert done.left == []
    if isinstance(wanted, str):  # it hangs, or is aborted
        assert done.data == {} and "FAIL  " not in done.out
        start_up = done.wall - done.talk  # a measure of how busy this machine is
        assert done.talk < 5 + start_up + 5, "--timeout is 5 s with --break"
        assert re.search(wanted.replace("{last}", f"{ranks - 1}"), done.err, re.M)
        return
    last = done.out.splitlines()[-1]
    assert last.startswith(f"FAIL  {lesson}  "), last
    red = {row["name"]: row["bad"] for row in done.data["checks"] if row["bad"]}
    names = {row["name"] for row in done.data["checks"]}
    must, may, some = expected(wanted, ranks, names)
    assert must <= set(red) <= may, (must - set(red), set(red) - may)
    assert all(one & set(red) for one in some), (some, red)
    for row in done.data["checks"]:
        assert (row["diff"] <= row["allowed"]) is (row["bad"] == []), row
    for check in must - set(NOT_EVERYWHERE) - ON_ONE_STAGE.get(name, set()):
        assert red[check] == list(range(ranks)), check
    assert done.data["verdict"] == "FAIL"
    assert any(check in last for check in red), last


@over_runs
def test_says_its_own_diagnosis(lesson, name, ranks):
    """What was done, symptom, why, and who met it; and no other break's."""
    done = jobs.result(lesson, ranks, "--break", name)
    said = "".join(done.text.split())  # lines are wrapped, at hyphens too
    mine = "".join(" ".join(jobs.load(lesson).BREAKS[name][2:]).split())
    for other, broken in jobs.load(lesson).BREAKS.items():
        for label, text in (
            (f"--break {other}:", broken.what),
            ("symptom", broken.symptom),
            ("why", broken.why),
            ("met in", broken.thread),
        ):
            words = "".join(f"{label} {text}".split())
            if other == name:
                assert words in said, words
            elif label == "symptom" and "".join(text.split()) in mine:
                continue  # of two that look alike one says more
            elif label != "met in":  # two may have been met by the same people
                assert words not in said, words
    wide = [line for line in done.out.splitlines()[:-1] if len(line) > 88]
    assert not wide, "\n".join(wide)


def test_diagnoses_differ():
    seen = {}
    for lesson, name in ALL:
        broken = jobs.load(lesson).BREAKS[name]
        assert re.search(r"github\.com/|arXiv:|docs\.|forum|issue", broken.thread), name
        for text in (broken.what, broken.symptom, broken.why):
            assert len(text) > 20
            assert text not in seen, (name, seen.get(text))
            seen[text] = name


@pytest.mark.parametrize("lesson, ranks", [
    pytest.param(lesson, ranks, marks=pytest.mark.launches(lesson, ranks, *flags))
    for lesson, ranks, *flags in (
        ("00_collectives", 2, *CONTROL),
        ("01_naive_mlp_tp", 2, *CONTROL),
        ("01_naive_mlp_tp", 4, *CONTROL),
        ("02_transformer_tp", 2, *CONTROL),
        ("03_vocab_parallel", 2, *CONTROL),
        ("04_sequence_parallel", 2, *CONTROL),
        ("05_3d_parallel", 2, *CONTROL),
    )
    if lesson in FAILS
])  # fmt: skip
def test_without_a_break_all_of_these_pass(lesson, ranks):
    done = jobs.result(lesson, ranks, *CONTROL)
    good = {row["name"] for row in done.data["checks"] if not row["bad"]}
    assert done.data["verdict"] == "PASS"
    names = {row["name"] for row in done.data["checks"]}
    for name, patterns in FAILS[lesson].items():
        if not isinstance(patterns, str):
            must, may, _ = expected(patterns, ranks, names)
            missing = (must | may & names) - good  # a mesh has checks of its own
            assert not missing, (name, missing)


def test_every_lesson_is_here():
    for lesson in FAILS:
        assert set(listed(lesson)) == set(FAILS[lesson])
