"""Is my difference a bug? The picture and the tables of docs/rounding.md.

    python docs/rounding.py

docs/rounding.json has what docs/record_rounding.py measured. Nothing here is measured
again: a table's cell is a number of the recording, or a range of such numbers.
"""

import json
import sys
from pathlib import Path

import matplotlib

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "notebooks"))
matplotlib.use("Agg")
import draw  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

PAGE = DOCS / "rounding.md"
PICTURE = DOCS / "_static" / "rounding.svg"
RANKS = (1, 2, 4, 8)
DTYPES = ("float64", "float32", "bfloat16")
MARKS = (1, 10, 100, 1000)
# Name in the recording → (what is written, color, marker); no color is that of a rank.
BUGS = {
    "norms": ("gradients of norms not summed", "#54278F", "s"),
    "spare": ("spare columns in the softmax", "#8A5A00", "^"),
    "clip": ("clipped by each rank's own norm", "black", "D"),
}
WHAT = {
    "loss": "the loss, largest up to this step",
    "gradient": "gradients of this step",
    "same": "gradients of the same weights",
    "norm": "norm of the gradient of this step",
}
ALLOWED = {"float64": (1e-12, 1e-12), "float32": (1e-6, 1e-5)}  # loss, gradient
CLEAR = 10  # times the largest difference by rounding: from here on it stands out
FLOOR = 1e-17  # where 0 is drawn


def load() -> dict:
    return json.loads((DOCS / "rounding.json").read_text("utf-8"))


def of_ranks(recording: dict, run: str, dtype: str, what: str, step: int) -> dict:
    """Number of ranks → the difference, of the runs that have this step."""
    found = {}
    for ranks in RANKS:
        values = recording.get(f"{run}-{dtype}-{ranks}", {}).get(what, {})
        if str(step) in values:
            found[ranks] = values[str(step)]
    return found


def rounding(recording: dict, dtype: str, what: str, step: int) -> tuple[float, float]:
    """The smallest and the largest difference of runs without a bug."""
    values = of_ranks(recording, "right", dtype, what, step).values()
    return min(values), max(values)


def written(value: float) -> str:
    """One digit; a 0 is exact."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "") if value else "0"


# ---- Tables, in Markdown


def table(head: list, rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table_of_rounding(recording: dict) -> str:
    rows = []
    for dtype in DTYPES:
        for what, text in WHAT.items():
            row = [dtype, text]
            for step in MARKS:
                least, most = rounding(recording, dtype, what, step)
                row.append(" to ".join(dict.fromkeys([written(least), written(most)])))
            rows.append(row)
        if dtype != "float64":
            row = [dtype, "no TP: these gradients in float64"]
            yardstick = recording[f"alone-{dtype}"]["yardstick"]
            rows.append(row + [written(yardstick[str(step)]) for step in MARKS])
    steps = [f"step {step:,}" for step in MARKS]
    return table(["dtype", "relative difference of", *steps], rows)


COLUMNS = [("loss", 1), ("loss", 10), ("loss", 100), ("same", 1), ("norm", 1)]


def stands_out(recording: dict, dtype: str, what: str, step: int, value) -> bool:
    """Is it clearly larger than any difference by rounding?"""
    return value > CLEAR * rounding(recording, dtype, what, step)[1]


def table_of_bugs(recording: dict) -> str:
    """On two ranks."""
    rows = []
    for bug, (text, _, _) in BUGS.items():
        for dtype in DTYPES:
            row = [text, dtype]
            for what, step in COLUMNS:
                value = recording[f"{bug}-{dtype}-2"][what][str(step)]
                is_clear = stands_out(recording, dtype, what, step, value)
                row.append(f"**{written(value)}**" if is_clear else written(value))
            rows.append(row)
    head = ["loss, step 1", "loss, to step 10", "loss, to step 100"]
    head += ["gradients, step 1", "norm, step 1"]
    return table(["bug", "dtype", *head], rows)


def table_of_ranks(recording: dict) -> str:
    """Every run, by number of ranks."""
    rows = []
    for run in ("right", *BUGS):
        for dtype in DTYPES:
            for ranks in RANKS:
                found = recording.get(f"{run}-{dtype}-{ranks}")
                if found is None:
                    continue
                row = [run, dtype, ranks]
                for what in ("loss", "same"):
                    values = [found[what].get(str(step)) for step in MARKS]
                    row += ["" if v is None else written(v) for v in values]
                rows.append(row)
    head = [f"loss, {step:,}" for step in MARKS]
    head += [f"gradients, {step:,}" for step in MARKS]
    return table(["run", "dtype", "T", *head], rows)


TABLES = {
    "rounding": table_of_rounding,
    "bugs": table_of_bugs,
    "ranks": table_of_ranks,
}


def with_tables(page: str, recording: dict) -> str:
    """The page's text, each table between its two comments written again."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        if not after:
            raise ValueError(f"the page has no place for table {name}")
        page = f"{before}{begin}\n{make(recording)}\n\n{end}{after}"
    return page


# ---- The picture: one panel for each dtype, losses above gradients


def drawn(values: dict) -> tuple[list, list]:
    """Steps and values; a 0 is drawn at the bottom."""
    steps = sorted(map(int, values))
    return steps, [max(values[str(step)], FLOOR) for step in steps]


def draw_right(ax, recording: dict, dtype: str, what: str) -> None:
    """What rounding does: the range over the numbers of ranks, and a line for each."""
    for ranks in RANKS:  # of 4 and 8 ranks there are fewer steps
        steps, values = drawn(recording[f"right-{dtype}-{ranks}"][what])
        ax.plot(steps, values, "-", color=draw.PARTS[1], linewidth=3)
    steps = [int(step) for step in recording[f"right-{dtype}-1"][what]]
    both = [rounding(recording, dtype, what, step) for step in steps]
    low = [max(least, FLOOR) for least, _ in both]
    high = [max(most, FLOOR) for _, most in both]
    label = "no bug: rounding, each T"
    ax.fill_between(steps, low, high, color=draw.PARTS[2], label=label)


def draw_panel(ax, recording: dict, dtype: str, what: str) -> None:
    draw_right(ax, recording, dtype, what)
    for bug, (text, shade, mark) in BUGS.items():
        steps, values = drawn(recording[f"{bug}-{dtype}-2"][what])
        ax.plot(steps, values, mark + "-", color=shade, markersize=7, linewidth=2,
                label=f"bug: {text}")  # fmt: skip
    if dtype in ALLOWED:
        allowed = ALLOWED[dtype][what == "same"]
        ax.axhline(allowed, color="black", linestyle=":", linewidth=2,
                   label="allowed in this course")  # fmt: skip
    ax.set(xscale="log", yscale="log", ylim=(FLOOR / 3, 10), xlim=(0.8, 1300))
    ax.set_xticks(MARKS, [f"{step:,}" for step in MARKS])
    powers = (-15, -12, -9, -6, -3, 0)
    names = [f"1e{power}" if power else "1" for power in powers]
    ax.set_yticks([FLOOR, *(10.0**power for power in powers)], ["0", *names])
    ax.minorticks_off()
    ax.grid(axis="y", color=draw.EVERYONE)


def picture(recording: dict) -> plt.Figure:
    figure, axes = plt.subplots(
        2, 3, figsize=(13, 9.5), layout="constrained", sharex=True, sharey=True
    )
    for column, dtype in enumerate(DTYPES):
        for row, what in enumerate(("loss", "same")):
            draw_panel(axes[row, column], recording, dtype, what)
        axes[0, column].set_title(dtype, fontweight="bold")
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("loss: relative difference,\nlargest up to this step")
    axes[1, 0].set_ylabel("gradients of the same\nweights: relative difference")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def main(page: Path = PAGE, target: Path = PICTURE) -> None:
    """The same bytes each time, so that a test can compare."""
    recording = load()
    page.write_text(with_tables(PAGE.read_text("utf-8"), recording), "utf-8")
    with plt.rc_context({"svg.hashsalt": "rounding"}):
        figure = picture(recording)
        figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
