"""Every `--break` fails its lesson: by the checks it should, with its own diagnosis.

FAILS says which checks each break turns red, no more and no fewer: so a break that
fails for another reason shows, and so does a check that stopped seeing its bug.
"""

import re
from itertools import product

import jobs
import pytest

TENSORS = "{x,up_proj.weight,up_proj.bias,down_proj.weight,down_proj.bias}"
INNER = "{x,up_proj.weight,up_proj.bias,down_proj.weight}"
MEGATRONS = "Megatron's"
TP_BYTES = f"bytes of {{{MEGATRONS},tensor parallel}}"

# lesson → break → names of failing checks, {a,b} standing for either; after the None
# those that need 4 ranks. The line it ends with instead, if it does not get to its end.
FAILS = {
    "00_collectives": {
        "skip": r"^error: .*; this call was not made by rank {last}$",
        "shapes": r"exitcode  : -6 .*SIGABRT|error: .*; this call was not made by rank",
        "order": ["two sums in order: {1s,10s}"],
        "view": [
            "reduce-scatter + all-gather",
            "all-reduce of a view",
            "two sums in order: {1s,10s}",
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
}
ALSO_AT_4 = [("00_collectives", "skip"), ("01_naive_mlp_tp", "average")]
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


def spelled_out(patterns: list, ranks: int) -> set:
    """Names of checks: every {a,b} becomes a, then b."""
    if None in patterns:
        at = patterns.index(None)
        patterns = patterns[:at] + (patterns[at + 1 :] if ranks == 4 else [])
    names = set()
    for pattern in patterns:
        parts = re.split(r"\{(.*?)\}", pattern)
        parts = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
        names |= {"".join(words) for words in product(*parts)}
    return names


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
    assert set(red) == spelled_out(wanted, ranks)
    for row in done.data["checks"]:
        assert (row["diff"] <= row["allowed"]) is (row["bad"] == []), row
    assert all(bad == list(range(ranks)) for bad in red.values()), red
    assert done.data["verdict"] == "FAIL"
    assert any(check in last for check in red), last


@over_runs
def test_says_its_own_diagnosis(lesson, name, ranks):
    """What was done, symptom, why, and who met it; and no other break's."""
    done = jobs.result(lesson, ranks, "--break", name)
    said = " ".join(done.text.split())
    for other, broken in jobs.load(lesson).BREAKS.items():
        for label, text in (
            (f"--break {other}:", broken.what),
            ("symptom", broken.symptom),
            ("why", broken.why),
            ("met in", broken.thread),
        ):
            words = " ".join(f"{label} {text}".split())
            if other == name:
                assert words in said, words
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
    )
])  # fmt: skip
def test_without_a_break_all_of_these_pass(lesson, ranks):
    done = jobs.result(lesson, ranks, *CONTROL)
    good = {row["name"] for row in done.data["checks"] if not row["bad"]}
    assert done.data["verdict"] == "PASS"
    for name, patterns in FAILS[lesson].items():
        if not isinstance(patterns, str):
            missing = spelled_out(patterns, ranks) - good
            assert not missing, (name, missing)


def test_every_lesson_is_here():
    assert set(jobs.LESSONS) <= set(FAILS), "add the new lesson's breaks to FAILS"
    for lesson in FAILS:
        assert set(listed(lesson)) == set(FAILS[lesson])
