"""Lessons under torchrun: verdicts, screens, and of 00 and 01 every number in --json.

The numbers are worked out here a second time: a lesson's own "ok" counts for nothing.
"""

import math
import re

import jobs
from old_runs import ALL_RUNS, ALLOWED, SIZES, expect, flag, limits, over

COLLECTIVES, MLP = "00_collectives", "01_naive_mlp_tp"
TRANSFORMER, SEQUENCE = "02_transformer_tp", "04_sequence_parallel"
STEPS = 3  # the default of --steps


def sizes(run) -> tuple:
    """B, S, D, F, T, steps and the bytes of a number."""
    D = int(flag(run, "--hidden", 64))
    F = int(flag(run, "--width", 4 * D))
    B, S = int(flag(run, "--batch-size", 8)), int(flag(run, "--seq-len", 8))
    steps = int(flag(run, "--steps", STEPS))
    return B, S, D, F, run[1], steps, SIZES[flag(run, "--dtype", "float32")]


def mesh(run) -> tuple:
    """Y and X of the 2D mesh."""
    T = run[1]
    default = f"{T // 2}x2" if T % 2 == 0 else f"{T}x1"
    return tuple(map(int, flag(run, "--mesh", default).split("x")))


MLP_RUNS = [run for run in ALL_RUNS if run[0] == MLP]
COLLECTIVES_RUNS = [run for run in ALL_RUNS if run[0] == COLLECTIVES]


@over(ALL_RUNS)
def test_passes(run):
    done = jobs.result(*run)
    last = done.out.splitlines()[-1]
    assert done.code == 0, done.text
    assert last.startswith(f"PASS  {run[0]}  "), last
    assert (
        done.out.count("PASS") == 1 and "FAIL" not in done.out and "✗" not in done.out
    )
    assert "Traceback" not in done.err and "Warning" not in done.err, done.err
    assert done.left == []


@over(ALL_RUNS)
def test_fits_the_screen(run):
    *lines, _ = jobs.result(*run).out.splitlines()
    wide = [f"{len(line)}: {line}" for line in lines if len(line) > 88]
    assert not wide, "\n".join(wide)
    assert not [line for line in lines if line != line.rstrip()]
    limit = 90 + 10 * max(0, run[1] - 2)  # a rank has a line in each picture
    limit += 30 if {"--trace", "--verbose", "--train"} & set(run) else 0
    limit += 25 if run[0] == SEQUENCE else 0  # it has eight sections
    assert 30 < len(lines) < limit, len(lines)


@over(ALL_RUNS)
def test_json_has_what_was_printed(run):
    done = jobs.result(*run)
    data = done.data
    assert data["text"] == done.out.splitlines()
    assert data["lesson"] == run[0] and data["world_size"] == run[1]
    assert math.prod(data["mesh"].values()) == run[1]
    assert data["dtype"] == flag(run, "--dtype", "float32")
    assert data["device"] == "cpu" and data["backend"] == "gloo"
    assert data["verdict"] == "PASS"
    keys = {
        "communication": {
            "what", "collective", "axis", "phase", "calls", "bytes", "predicted_bytes",
        },
        "losses": {"step", "without", "with"},
        "gradients": {
            "name", "placement", "norm_without", "norm_with", "rel_diff", "ok",
        },
        "memory": {"what", "bytes", "predicted_bytes"},
        "checks": {"name", "diff", "allowed", "bad"},
    }  # fmt: skip
    for table, wanted in keys.items():
        for row in data[table]:
            assert wanted <= set(row), (table, row)
    assert all("dtensor" in row for row in data["losses"][:1])
    worst = max(data["checks"], key=lambda row: row["diff"])
    assert data["worst_rel_diff"] == worst["diff"]
    assert data["allowed"] == worst["allowed"]
    names = [row["name"] for row in data["checks"]]
    assert len(names) == len(set(names)), "two checks of one name"


@over(ALL_RUNS)
def test_every_check_is_within_what_design_allows(run):
    data = jobs.result(*run).data
    loosest = max(ALLOWED[data["dtype"]])
    assert len(data["checks"]) > 30
    wider = {}
    if run[0] >= TRANSFORMER:  # in bfloat16, the gradients of step 1
        wider = {f"dL/d {name}": limit for name, limit in limits(run).items()}
    for row in data["checks"]:
        limit = wider.pop(row["name"], loosest)
        assert row["bad"] == [] and row["diff"] <= row["allowed"], row
        assert row["allowed"] <= limit * (1 + 1e-9), row
        if "bytes" in row["name"]:
            assert row["allowed"] == 0, row
        if re.search(r"\bloss\b", row["name"]) and "norm" not in row["name"]:
            assert row["allowed"] <= ALLOWED[data["dtype"]][0], row
    assert not wider, "gradients that were not compared"


@over(COLLECTIVES_RUNS)
def test_bytes_of_lesson_00(run):
    data = jobs.result(*run).data
    *_, T, steps, size = sizes(run)
    alone = T == 1
    n = 2 if T <= 4 else 1  # elements of a slice
    wanted = {}
    pictures = {
        "broadcast": 4, "scatter": n * T, "gather": n * T, "reduce": 4, "all-reduce": 4,
        "all-gather": n * T, "reduce-scatter": n * T, "all-to-all": n * T,
        "send/recv": 4,
    }  # fmt: skip
    for name, elements in pictures.items():
        if not (alone and name == "send/recv"):
            sent = (0, 0) if alone else (1, elements * size)
            wanted["picture", "", name, "tp"] = sent
    for elements in (2 * T, 2 * T + 3):
        if elements % T == 0:
            sent = 2 * (T - 1), 2 * elements * size * (T - 1) // T
            wanted[f"ring of {elements}", "", "send/recv", "tp"] = sent
    I, J, K = 2 * T, 4 * T, 3 * T
    products = {
        ("case 1: nothing", ""): 0,
        ("case 2: AllGather A", "all-gather"): I * J,
        ("case 2: slice B, as 3", "all-reduce"): I * K,
        ("case 3: AllReduce", "all-reduce"): I * K,
        ("case 3: ReduceScatter", "reduce-scatter"): I * K,
        ("case 4: AllGather A", "all-gather"): I * J,
        ("case 4: AllGather B", "all-gather"): J * K,
    }
    for (what, name), elements in products.items():
        calls = steps if name and not alone else 0
        wanted[what, "", name, "tp"] = calls, calls * elements * size
    if T >= 4:
        Y, X = 2, T // 2
        I, J, K = 2 * Y, 2 * Y * X, 3 * X
        wanted["2D product", "", "all-gather", "x"] = 1, I * J // Y * size
        wanted["2D product", "", "all-gather", "y"] = 1, J * K // X * size
    expect(data, wanted)


@over(COLLECTIVES_RUNS)
def test_screen_of_lesson_00(run):
    """Each collective is a picture: every rank's tensor before and after."""
    text = jobs.result(*run).data["text"]
    T, n = run[1], 2 if run[1] <= 4 else 1
    shown = lambda xs: "[" + " ".join(f"{x:2}" for x in xs) + "]"
    start = [[10 * r + i for i in range(n * T)] for r in range(T)]
    column = lambda j: [sum(x) for x in zip(*start)][j * n : (j + 1) * n]
    after = {
        "reduce-scatter": lambda r: shown(column(r)),
        "all-to-all": lambda r: shown(
            [x for row in start for x in row[r * n : (r + 1) * n]]
        ),
        "scatter": lambda r: shown(start[0][r * n : (r + 1) * n]),
    }
    for name, right in after.items():
        head = next(i for i, line in enumerate(text) if line.startswith(f"{name:<16}"))
        for r in range(T):
            row = f"   rank {r}  {shown(start[r])} → {right(r)}"
            assert text[head + 1 + r] == row
    steps = [
        line for line in text if "all-gather " in line or "reduce-scatter " in line
    ]
    steps = [line for line in steps if line.split()[1].isdecimal()]
    assert len(steps) == (2 * (T - 1) if "--trace" in run else 0)


@over(MLP_RUNS)
def test_losses_of_lesson_01(run):
    data = jobs.result(*run).data
    allowed = ALLOWED[data["dtype"]][0]
    steps = sizes(run)[5]
    assert [row["step"] for row in data["losses"]] == list(range(1, steps + 1))
    losses = [row["without"] for row in data["losses"]]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == steps
    for row in data["losses"]:
        assert all(math.isfinite(v) and v > 0 for v in row.values())
        for other in ("with", "dtensor", "naive"):
            assert abs(row[other] - row["without"]) <= allowed * row["without"], row


@over(MLP_RUNS)
def test_gradients_of_lesson_01(run):
    data = jobs.result(*run).data
    allowed = ALLOWED[data["dtype"]][1]
    placements = {
        "y": "Replicate()", "x": "Replicate()",
        "up_proj.weight": "Shard(0)", "up_proj.bias": "Shard(0)",
        "down_proj.weight": "Shard(1)", "down_proj.bias": "Replicate()",
    }  # fmt: skip
    assert {row["name"]: row["placement"] for row in data["gradients"]} == placements
    for row in data["gradients"]:
        assert row["ok"] is True
        assert row["norm_without"] > 0
        off = abs(row["norm_with"] - row["norm_without"]) / row["norm_without"]
        assert off <= allowed, row
        for kind in ("rel_diff", "rel_diff_naive", "rel_diff_dtensor"):
            assert 0 <= row[kind] <= allowed, row


@over(MLP_RUNS)
def test_bytes_of_lesson_01(run):
    data = jobs.result(*run).data
    B, S, D, F, T, steps, size = sizes(run)
    Y, X = mesh(run)
    f, b = "forward", "backward"
    gather, scatter, reduce = "all-gather", "reduce-scatter", "all-reduce"
    n = steps if T > 1 else 0
    P = 2 * D * F + F + D
    elements = {
        ("naive split", f, gather, "tp"): (2 * n, n * B * S * (F + D)),
        ("naive split", b, reduce, "tp"): (2 * n, n * B * S * (F + D)),
        ("Megatron's", f, reduce, "tp"): (n, n * B * S * D),
        ("Megatron's", b, reduce, "tp"): (n, n * B * S * D),
        ("DTensor", f, reduce, "tp"): (n, n * B * S * D),
        ("DTensor", b, reduce, "tp"): (n, n * B * S * D),
    }
    if T > 1:
        elements |= {
            ("data parallel", b, reduce, "dp"): (4, P),
            ("FSDP", f, gather, "dp"): (4, P),
            ("FSDP", b, gather, "dp"): (2, 2 * D * F),
            ("FSDP", b, scatter, "dp"): (4, P),
            ("tensor parallel", f, reduce, "tp"): (1, B * S * D),
            ("tensor parallel", b, reduce, "tp"): (1, B * S * D),
        }
    if X > 1:
        elements |= {
            ("2D mesh", f, gather, "x"): (1, B * S * D // Y),
            ("2D mesh", f, scatter, "x"): (1, B * S * D // Y),
            ("2D mesh", b, gather, "x"): (2, 2 * B * S * D // Y),
            ("2D mesh", b, scatter, "x"): (1, B * S * D // Y),
        }
    if Y > 1:
        elements |= {
            ("2D mesh", f, gather, "y"): (4, P // X),
            ("2D mesh", b, gather, "y"): (2, 2 * D * F // X),
            ("2D mesh", b, scatter, "y"): (4, P // X),
        }
    wanted = {label: (calls, n * size) for label, (calls, n) in elements.items()}
    expect(data, wanted)


@over(MLP_RUNS)
def test_memory_of_lesson_01(run):
    """Parameters, their gradients, what autograd keeps: x, h before and after GELU."""
    data = jobs.result(*run).data
    B, S, D, F, T, _, size = sizes(run)
    P, kept = 2 * D * F + F + D, B * S * (D + 2 * F)
    elements = {
        "one process": (P, kept),
        "data parallel": (P, kept // T),
        "FSDP": (P // T, kept // T),
        "tensor parallel": ((2 * D * F + F) // T + D, B * S * (D + 2 * F // T)),
        "2D mesh": (P // T, kept // T),
    }
    wanted = {}
    for way, (parameters, saved) in elements.items():
        wanted[f"{way}: parameters"] = wanted[f"{way}: gradients"] = parameters * size
        wanted[f"{way}: saved"] = saved * size
    for row in data["memory"]:
        assert row["bytes"] == row["predicted_bytes"], row
    assert {row["what"]: row["bytes"] for row in data["memory"]} == wanted


ALIKE = (
    []
    if MLP in jobs.NEW_ANATOMY
    else [(MLP, T, "--dtype", "float64") for T in (1, 2, 4)]
)


def test_one_rank_is_the_run_without_tp():
    """More ranks change nothing: not the reference, and not the parallel losses."""
    runs = [jobs.result(*run).data["losses"] for run in ALIKE]
    for rows in zip(*runs):
        assert len({row["without"] for row in rows}) == 1, rows
        alone = rows[0]
        for row in rows:
            assert abs(row["with"] - alone["without"]) <= 1e-12 * alone["without"]
