"""The sheet to print: its formulas are what runs of the course measure, its numbers are
values of these formulas, and it is what the script draws."""

import re
import sys

import jobs
import pytest
from pictures import contrast
from runs import CONTEXT, EXPERTS, MESH, MLP, SEQUENCE, ZERO

sys.path.append(str(jobs.ROOT / "docs"))
sheet = jobs.load("sheet")


def rows_of(lesson: str, ranks: int, key: str) -> list[dict]:
    """Rows of a run's tables that have such a column; numbers are as printed."""
    return [row for row in jobs.result(lesson, ranks).data["rows"] if key in row]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def sizes(lesson: str, ranks: int, **more) -> dict:
    return jobs.result(lesson, ranks).data["size"] | more


# Split of the sheet, lesson and ranks; the run and the names of phases in its table;
# rows on the sheet that the table has.
MEASURED = [
    pytest.param(*case, marks=pytest.mark.launches(*case[1:3]), id=case[0])
    for case in [
        ("TP", SEQUENCE, 2, "TP", 2),
        ("TP + SP", SEQUENCE, 2, "TP + SP", 5),
        ("CP", CONTEXT, 2, "zigzag", 3),
        ("EP", EXPERTS, 2, None, 2),
        ("PP", MESH, 8, None, 2),
        ("DP", MESH, 8, None, 1),
    ]
]
AXIS = {"PP": "pp", "DP": "dp"}  # of the mesh's table


@pytest.mark.parametrize("split, lesson, ranks, run, compared", MEASURED)
def test_what_is_sent_is_what_a_run_counts(split, lesson, ranks, run, compared):
    """Calls and bytes of each row, and what a rank of a ring sends of them."""
    size = sizes(lesson, ranks)
    if lesson == MESH:  # a replica's rows are M micro-batches of b
        size["X"] = size["M"] * size["b"] * size["S"] * size["D"]
    found = 0
    for row in sheet.SENT:
        phases = ("summing", "sums") if row.phase == "once" else (row.phase,)
        for measured in rows_of(lesson, ranks, "calls"):
            collective = measured.get("collective")
            phase = measured.get("phase", measured.get("on the last stage"))
            axis = measured.get("axis", AXIS.get(split))
            if (row.split, row.collective) != (split, collective):
                continue
            if phase not in phases or measured.get("run") != run:
                continue
            if axis != AXIS.get(split):
                continue
            assert number(measured["calls"]) == sheet.value(row.calls, size)
            payload = number(measured["bytes"])
            assert payload == pytest.approx(sheet.value(row.payload, size), abs=1)
            if split != "EP":  # its rows are those that leave a rank
                of_ring = sheet.share(collective, size[sheet.GROUP[split]]) * payload
                assert number(measured["ring"]) == of_ring
            found += 1
    assert found == compared == sum(row.split == split for row in sheet.SENT)


@pytest.mark.launches(ZERO, 4)
@pytest.mark.parametrize("split", ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
def test_what_zero_sends_is_what_a_run_counts(split):
    """Shards of one size: Ψ is padded to a multiple of DP."""
    size = sizes(ZERO, 4)
    if split != "DP":
        size["Ψ"] += -size["Ψ"] % size["DP"]
    (run,) = [row for row in rows_of(ZERO, 4, "gathers") if row["run"] == split]
    calls = {"gathers": 0, "sums": 0}
    for row in sheet.SENT:
        if row.split == split:
            kind = "gathers" if row.collective == "all-gather" else "sums"
            calls[kind] += sheet.value(row.calls, size)
    if split == "DP":
        calls["sums"] *= size["U"]  # here one per unit
    assert calls == {kind: number(run[kind]) for kind in calls}
    assert number(run["ring"]) == sheet.sent_by_a_rank(split, size)


@pytest.mark.launches(ZERO, 4)
@pytest.mark.parametrize("split, in_full", [
    ("DP", 0), ("ZeRO-1", 0), ("ZeRO-2", 1), ("ZeRO-3", 2),
])  # fmt: skip
def test_bytes_per_parameter_are_what_a_run_holds(split, in_full):
    """In a run one unit's gradients, or also its weights, are in full as well."""
    size = sizes(ZERO, 4)
    (run,) = [row for row in rows_of(ZERO, 4, "sum/Ψ") if row["run"] == split]
    unit = in_full * size["u"] * size["e"] / size["Ψ"]
    expected = sheet.value(sheet.PER_PARAMETER[split], size) + unit
    assert run["sum/Ψ"] == f"{expected:.2f}"


@pytest.mark.launches(SEQUENCE, 2)
@pytest.mark.parametrize("split", sheet.PER_TOKEN)
def test_bytes_per_token_are_what_a_run_saves(split):
    size = sizes(SEQUENCE, 2)
    (run,) = [row for row in rows_of(SEQUENCE, 2, "saved") if row["run"] == split]
    of_all = size["B"] * size["S"] * sheet.value(sheet.PER_TOKEN[split], size)
    assert number(run["saved"]) == of_all


@pytest.mark.launches(CONTEXT, 2)
def test_what_is_derived_is_what_a_run_has():
    size = sizes(CONTEXT, 2)
    for letter in ("Ψ", "kv"):
        assert sheet.value(sheet.DERIVED[letter], size) == size[letter]


@pytest.mark.launches(MESH, 8)
def test_the_bubble_is_what_a_run_shows():
    found = 0
    for row in rows_of(MESH, 8, "waits/computes"):
        size = {letter: int(row[letter]) for letter in "PM"}
        percent = re.search(r"(\d+)%", row["waits/computes"])[1]
        assert f"{sheet.value(sheet.BUBBLE, size):.0f}" == percent
        found += 1
    assert found >= 4


def part(text: str) -> float:
    """Positions "0 to 15": how many."""
    first, last = re.search(r"(\d+) to (\d+)", text).groups()
    return int(last) - int(first) + 1


RUNS_OF_SHARES = [
    (MLP, 2),
    (SEQUENCE, 2),
    (MESH, 8),
    (CONTEXT, 2),
    (ZERO, 4),
    (EXPERTS, 2),
]


def shares_of_runs() -> dict[tuple, float]:
    """(split, column) → the share that rank 0 has in a run."""
    found = {}
    for row in rows_of(MLP, 2, "placement")[:1]:
        whole, local = row["global"], row["on a rank"]
        found["TP", "weights"] = found["TP", "width"] = local[0] / whole[0]
    (row,) = [r for r in rows_of(SEQUENCE, 2, "positions") if r[""] == "rank 0"]
    found["TP + SP", "residual"] = part(row["positions"]) / sizes(SEQUENCE, 2)["S"]
    size = sizes(CONTEXT, 2)
    found["CP", "attention"] = found["CP", "residual"] = size["s"] / size["S"]
    size = sizes(EXPERTS, 2)
    row = rows_of(EXPERTS, 2, "owns")[0]
    found["EP", "weights"] = part(row["owns"]) / size["E"]
    found["EP", "sequences"] = size["b"] / size["B"]
    size = sizes(MESH, 8)
    row = next(r for r in rows_of(MESH, 8, "holds") if r.get("") == "stage 0")
    found["PP", "weights"] = row["holds"].count("layers.") / size["L"]
    found["DP", "sequences"] = size["b"] * size["M"] / size["B"]
    size = sizes(ZERO, 4)
    unit = size["u"] * size["e"]
    dp, *others = rows_of(ZERO, 4, "sum/Ψ")[:4]
    names = {"weights": "parameters", "gradients": "gradients", "optimizer": "states"}
    for row in others:
        for column, name in names.items():
            held = number(row[name])
            if (row["run"], column) in IN_FULL:
                held -= unit
            found[row["run"], column] = held / number(dp[name])
    return found


IN_FULL = [("ZeRO-2", "gradients"), ("ZeRO-3", "weights"), ("ZeRO-3", "gradients")]


@pytest.mark.parametrize("run", [
    pytest.param(0, marks=[pytest.mark.launches(*run) for run in RUNS_OF_SHARES])
])  # fmt: skip
def test_who_holds_what_is_what_runs_hold(run):
    """Two ranks along each axis: a split halves, what is whole is whole."""
    halves = dict.fromkeys(sheet.GROUPS, 2)
    shares = shares_of_runs()
    assert len(shares) == 18
    for (split, column), measured in shares.items():
        shown = sheet.HOLDS[split][sheet.COLUMNS.index(column)]
        assert sheet.value(shown, halves) == pytest.approx(measured, abs=1e-4), split


def test_what_belongs_to_a_weight_is_where_the_weight_is():
    for split, (weights, gradients, optimizer, *_) in sheet.HOLDS.items():
        if split not in ("ZeRO-1", "ZeRO-2"):
            assert weights == gradients == optimizer, split


def test_the_files_are_what_the_script_draws(tmp_path):
    sheet.main(tmp_path)
    for name in ("sheet.svg", "sheet.pdf"):
        assert (sheet.FOLDER / name).read_bytes() == (tmp_path / name).read_bytes(), (
            name
        )
    assert (tmp_path / "sheet.pdf").read_bytes().count(b"/Type /Page ") == 1


def test_the_sheet_can_be_read():
    """Black on white, no text over another or off the page, none below 6.5 pt."""
    figure = sheet.draw()
    figure.canvas.draw()
    texts = figure.axes[0].texts
    boxes = [text.get_window_extent() for text in texts]
    page = figure.bbox
    for text, box in zip(texts, boxes):
        assert page.x0 + 10 < box.x0 and box.x1 < page.x1 - 10, text
        assert contrast(text.get_color(), "white") > 20 and text.get_fontsize() >= 6.5
    for n, box in enumerate(boxes):
        for other, later in zip(boxes[n + 1 :], texts[n + 1 :]):
            apart = (
                box.x1 <= other.x0
                or other.x1 <= box.x0
                or box.y1 <= other.y0 + 2
                or other.y1 <= box.y0 + 2
            )
            assert apart, (texts[n], later)
    for patch in figure.axes[0].patches:
        assert patch.get_facecolor() in ((0, 0, 0, 1), (1, 1, 1, 1))


def test_the_sheet_is_linked():
    """From the README, for teachers, and on the site."""
    for page, link in {
        "README.md": "](docs/_static/sheet.pdf)",
        "docs/teach.md": "](sheet.md)",
        "docs/sheet.md": "](_static/sheet.pdf)",
        "docs/index.md": "\nsheet\n",
    }.items():
        assert link in (jobs.ROOT / page).read_text("utf-8"), page
