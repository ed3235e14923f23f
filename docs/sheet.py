"""The sheet to print: parallel training on one A4 page, as SVG and PDF.

    python docs/sheet.py            writes docs/_static/sheet.svg and sheet.pdf

Every number on it is the value of a formula below for the sizes of EXAMPLE. The same
formulas, with the sizes of a run of the course, are what that run measures: see
tests/test_sheet.py. Nothing on the sheet needs color.
"""

import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parent / "_static"
GROUPS = {"T": 4, "C": 4, "R": 4, "DP": 4, "P": 4}
# A model of lesson 05's kind, and one step of one replica. o: AdamW's two moments and
# the weight in float32; U: units of ZeRO; m: rows that leave a rank, if all experts are
# chosen equally often.
EXAMPLE = GROUPS | {
    "B": 8, "S": 4096, "D": 4096, "N": 32, "K": 8, "H": 128, "F": 4 * 4096,
    "V": 50304, "L": 32, "M": 8, "E": 16, "k": 2, "e": 2, "g": 2, "o": 12,
}  # fmt: skip
DERIVED = {
    "X": "B·S·D",
    "Ψ": "2·V·D + V + 2·D + L·(2·D·D + 2·D·K·H + 2·D·F + 2·K·H + F + 7·D)",
    "kv": "2·B·S/C·K·H·e",
    "m": "k·B·S·(R - 1)/R",
    "n": "L",
    "U": "L + 2",
}


def value(formula: str, size: dict) -> float:
    """Of a formula as it is printed: 2·L + 1 is 2 * L + 1."""
    return eval(formula.replace("·", "*"), {}, size)


def example() -> dict[str, float]:
    size = dict(EXAMPLE)
    for letter, formula in DERIVED.items():
        size[letter] = value(formula, size)
    return size


# What rank 0 holds. Columns: weights, gradients, states of the optimizer; sequences of
# the batch; positions between the linears and in attention; heads and MLP width.
COLUMNS = "weights gradients optimizer sequences residual attention width".split()
HEADS = (
    "weights", "gradients", "optimizer\nstates", "sequences\nof the batch",
    "positions:\nnorms, residual", "positions:\nattention", "heads,\nMLP width",
)  # fmt: skip
HOLDS = {
    "DP": ("1", "1", "1", "1/DP", "1", "1", "1"),
    "ZeRO-1": ("1", "1", "1/DP", "1/DP", "1", "1", "1"),
    "ZeRO-2": ("1", "1/DP", "1/DP", "1/DP", "1", "1", "1"),
    "ZeRO-3": ("1/DP", "1/DP", "1/DP", "1/DP", "1", "1", "1"),
    "TP": ("1/T", "1/T", "1/T", "1", "1", "1", "1/T"),
    "TP + SP": ("1/T", "1/T", "1/T", "1", "1/T", "1", "1/T"),
    "CP": ("1", "1", "1", "1", "1/C", "1/C", "1"),
    "EP": ("1/R", "1/R", "1/R", "1/R", "1", "1", "1"),
    "PP": ("1/P", "1/P", "1/P", "1", "1", "1", "1"),
}
HOLDS_NOTES = """
TP: norms, and biases of o and down, are full on every rank. ZeRO-2 and 3: plus one
unit, such as a layer, in full while it is used. CP: keys and values of the other
positions arrive slice by slice. EP: 1/R of the experts; all other weights are full. PP:
1/P of the layers.
"""
LESSONS = {
    "DP": "01, 05", "ZeRO-1": "05, 15", "ZeRO-2": "15", "ZeRO-3": "15, 13",
    "TP": "01, 02, 03", "TP + SP": "04", "CP": "11", "EP": "16", "PP": "05, 14",
}  # fmt: skip


class Sent(NamedTuple):
    """Calls of a rank per step, and their payload."""

    split: str
    phase: str
    collective: str
    calls: str
    payload: str
    where: str


SENT = (
    Sent("TP", "forward", "all-reduce", "2·L + 1", "(2·L + 1)·X·e",
         "g: after o, down, embedding"),
    Sent("TP", "backward", "all-reduce", "2·L + 1", "(2·L + 1)·X·e",
         "f: before q k v, up, head"),
    Sent("TP + SP", "forward", "all-gather", "2·L + 1", "(2·L + 1)·X·e",
         "before q k v, up, head"),
    Sent("TP + SP", "forward", "reduce-scatter", "2·L + 1", "(2·L + 1)·X·e",
         "after o, down, embedding"),
    Sent("TP + SP", "backward", "all-gather", "2·(2·L + 1)", "2·(2·L + 1)·X·e",
         "of dL/dy; of x once more"),
    Sent("TP + SP", "backward", "reduce-scatter", "2·L + 1", "(2·L + 1)·X·e",
         "of dL/dx"),
    Sent("TP + SP", "once", "all-reduce", "1", "(6·L + 2)·D·e",
         "gradients of norms, biases"),
    Sent("CP", "forward", "send/recv", "L·(C - 1)", "L·(C - 1)·kv",
         "ring of keys and values"),
    Sent("CP", "backward", "send/recv", "L·(2·C - 1)", "L·(2·C - 1)·kv",
         "again, with their gradients"),
    Sent("CP", "once", "all-reduce", "1", "Ψ·e", "all gradients, as in DP"),
    Sent("EP", "forward", "all-to-all-v", "3·n", "n·8·E + 2·n·m·D·e",
         "counts; rows out; rows back"),
    Sent("EP", "backward", "all-to-all-v", "2·n", "2·n·m·D·e", "the same way back"),
    Sent("PP", "forward", "send/recv", "2·M", "40·M + X·e/T",
         "to the next stage"),
    Sent("PP", "backward", "send/recv", "2·M", "40·M + X·e/T",
         "to the previous stage"),
    Sent("DP", "once", "all-reduce", "1", "Ψ·e", "all gradients"),
    Sent("ZeRO-1", "once", "reduce-scatter", "U", "Ψ·g", "gradients"),
    Sent("ZeRO-1", "once", "all-gather", "U", "Ψ·e", "updated weights"),
    Sent("ZeRO-2", "backward", "reduce-scatter", "M·U", "M·Ψ·g",
         "gradients, unit by unit"),
    Sent("ZeRO-2", "once", "all-gather", "U", "Ψ·e", "updated weights"),
    Sent("ZeRO-3", "forward", "all-gather", "M·U", "M·Ψ·e", "weights, unit by unit"),
    Sent("ZeRO-3", "backward", "all-gather", "M·U", "M·Ψ·e", "weights again"),
    Sent("ZeRO-3", "backward", "reduce-scatter", "M·U", "M·Ψ·g", "gradients"),
)  # fmt: skip
# The group of each split, and where its ranks belong.
GROUP = {
    "TP": "T", "TP + SP": "T", "CP": "C", "EP": "R", "PP": "P", "DP": "DP",
    "ZeRO-1": "DP", "ZeRO-2": "DP", "ZeRO-3": "DP",
}  # fmt: skip
PLACE = {
    "TP": "inside a node",
    "TP + SP": "inside a node",
    "CP": "inside or across",
    "EP": "inside, if it fits",
    "PP": "across nodes",
    "DP": "across nodes",
    "ZeRO-1": "across nodes",
    "ZeRO-2": "across nodes",
    "ZeRO-3": "inside, or HSDP",
}
BUBBLE = "100·(P - 1)/M"  # percent of a stage's time for computing


def share(collective: str, ranks: int) -> float:
    """What a rank of a ring sends, as a part of the payload (lesson 00). The rows of an
    all-to-all that are counted are those that leave a rank."""
    if collective in ("send/recv", "all-to-all-v"):
        return 1
    rounds = 2 if collective == "all-reduce" else 1
    return rounds * (ranks - 1) / ranks


def sent_by_a_rank(split: str, size: dict) -> float:
    """Bytes per step."""
    ranks = size[GROUP[split]]
    size = size | {"T": 1} if split == "PP" else size  # PP alone
    total = 0.0
    for row in SENT:
        if row.split == split:
            total += share(row.collective, ranks) * value(row.payload, size)
    return total


# Bytes per parameter that is not split by TP, EP or PP.
PER_PARAMETER = {
    "DP": "e + g + o",
    "ZeRO-1": "e + g + o/DP",
    "ZeRO-2": "e + (g + o)/DP",
    "ZeRO-3": "(e + g + o)/DP",
}
# Bytes per token that a layer saves for backward, in 16 bits, with dropout.
PER_TOKEN = {
    "without TP": "34·D + 5·N·S + 8",
    "TP": "10·D + (24·D + 5·N·S)/T + 8",
    "TP + SP": "(34·D + 5·N·S + 8)/T",
    "TP + SP, selective": "(34·D + 8)/T",
    "TP + SP, full": "2·D/T",
}
F_AND_G = (
    ("", "forward", "backward", "SP: forward", "SP: backward", "where"),
    ("f", "identity", "all-reduce", "all-gather", "reduce-scatter",
     "before q k v, before up (and gate), before the head"),
    ("g", "all-reduce", "identity", "reduce-scatter", "all-gather",
     "after o, after down, after the embedding"),
)  # fmt: skip
SUMS = (
    ("gradient of", "is summed over"),
    ("everything, but experts", "DP × CP; divide by the targets of all ranks"),
    ("q k v, up, o, down, embedding, head", "no rank of TP: each has its own slice"),
    (
        "norms, biases of o and down",
        "TP alone: no rank, all are full. SP: the TP ranks",
    ),
    ("a key/value head on T/K ranks", "these T/K ranks"),
    ("an expert", "ranks that hold this expert, only; all else: the EP ranks as well"),
    ("embedding tied to the head, PP", "first and last stage"),
)
CHECK = """
The loss of step 1 is correct and later ones drift: a sum of gradients is missing, or
made twice. Compare with one process, in float64: the gradients of step 1, then the
replicas after the step.
"""
LETTERS = """
B sequences of a replica per step, S positions, D hidden, F MLP width, N heads, K
key/value heads of size H, V vocabulary, L layers (n with experts), E experts, k per
token, M micro-batches, e g o bytes of a weight, a gradient, the optimizer's states, Ψ
parameters, U units of ZeRO, X = B·S·D, kv = 2·B·S/C·K·H·e, m rows that leave a rank.
Ranks: T of TP, C of CP, R that share the experts, P stages, DP replicas.
"""
SENT_NOTES = """
In a ring, a rank sends 2·(T - 1)/T of an all-reduce's payload, (T - 1)/T of an
all-gather's or a reduce-scatter's. Calls of TP, SP, CP and EP come in every layer, and
ranks wait for them; with M micro-batches they are M times as many, with the same bytes
in total. Calls of DP and ZeRO-1 come once, behind backward. HSDP: ZeRO-3 inside each
node, its gradients are summed across. PP sends least, but a stage waits (P - 1)/M of
the time that it computes: {waits:.1f} % here. ZeRO-3 without micro-batches (M = 1)
sends {of_zero:.1f} GB. GB, predicted: each split alone on 4 ranks, B {B}, S {S:,},
D {D:,}, F 4·D, N {N}, K {K}, H {H}, L {L}, V {V:,}, M {M}, k {k}, E {E}, e = g = 2,
Ψ {billions:.2f}·10⁹; EP: rows only, experts chosen equally often.
"""


# Drawing, in millimeters from the top left corner of the page.


class Page:
    """One A4 page."""

    def __init__(self):
        self.figure = plt.figure(figsize=(210 / 25.4, 297 / 25.4), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, 210), ylim=(297, 0))
        self.axes.axis("off")

    def write(self, x, y, text, size=7.2, bold=False, right=False) -> None:
        style = {"fontsize": size, "fontweight": "bold" if bold else "normal"}
        side = "right" if right else "left"
        text = text.replace(" - ", " − ")
        self.axes.text(x, y, text, ha=side, va="center", linespacing=1.1, **style)

    def paragraph(self, y, text, bold=False) -> float:
        """Returns where the next one begins."""
        text = " ".join(text.split()).replace(" = ", "\u00a0=\u00a0")
        for line in textwrap.wrap(text, 125 if bold else 154, break_on_hyphens=False):
            self.write(10, y, line, size=7 if bold else 6.6, bold=bold)
            y += 3.2
        return y

    def line(self, y, width=0.5, left=10, right=200) -> None:
        self.axes.plot([left, right], [y, y], color="black", linewidth=width)

    def box(self, x, y, width, height, filled) -> None:
        face = "black" if filled else "white"
        shape = Rectangle((x, y), width, height, facecolor=face, edgecolor="black")
        shape.set_linewidth(0.5)
        self.axes.add_patch(shape)

    def title(self, y, text) -> None:
        self.write(10, y, text, size=9.5, bold=True)
        self.line(y + 3, width=1)


def draw_holds(page: Page, y: float) -> float:
    page.title(y, "1  Who holds what: rank 0 of 4 ranks has the black part")
    y += 8.5
    left = [38 + 23.4 * i for i in range(len(COLUMNS))]
    page.write(34, y, "lessons", size=6.6, bold=True, right=True)
    for x, head in zip(left, HEADS):
        page.write(x, y, head, size=6.6, bold=True)
    y += 5.5
    for split, shares in HOLDS.items():
        page.write(10, y, split, size=8, bold=True)
        page.write(34, y, LESSONS[split], size=6.6, right=True)
        for x, part in zip(left, shares):
            blocks = round(4 * value(part, GROUPS))
            for block in range(4):
                page.box(x + 2.6 * block, y - 1.5, 2.6, 3, block < blocks)
            page.write(x + 12, y, "all" if part == "1" else part)
        y += 4.5
    return page.paragraph(y, HOLDS_NOTES) + 2


def draw_sent(page: Page, y: float) -> float:
    page.title(y, "2  What a rank sends per step, and where its group belongs")
    y += 6.5
    left = (10, 26, 41, 64, 84, 115)
    heads = ("when", "collective", "calls", "payload in bytes", "what, where")
    for x, head in zip(left[1:], heads):
        page.write(x, y, head, size=6.6, bold=True)
    page.write(161, y, "sends, GB", size=6.6, bold=True, right=True)
    page.write(178, y, "its group", size=6.6, bold=True)
    y += 4.2
    size = example()
    most = max(sent_by_a_rank(split, size) for split in GROUP)
    before = ""
    for row in SENT:
        if row.split != before:
            page.line(y - 1.9, width=0.3)
            page.write(left[0], y, row.split, size=8, bold=True)
            sent = sent_by_a_rank(row.split, size)
            page.write(160, y, f"{sent / 1e9:.1f}", bold=True, right=True)
            page.box(162, y - 1.2, max(0.3, 14 * sent / most), 2.4, filled=True)
            page.write(178, y, PLACE[row.split], size=6.6)
        before = row.split
        for x, text in zip(left[1:], row[1:]):
            page.write(x, y, text, size=6.8)
        y += 3.5
    return draw_sent_notes(page, y + 0.4)


def draw_sent_notes(page: Page, y: float) -> float:
    size = example()
    words = dict(size, billions=size["Ψ"] / 1e9, waits=value(BUBBLE, size))
    words["of_zero"] = sent_by_a_rank("ZeRO-3", size | {"M": 1}) / 1e9
    return page.paragraph(y, SENT_NOTES.format(**words)) + 2


def draw_table(page: Page, y: float, left: tuple, rows: tuple, step=3.8) -> float:
    """The first row is the heads."""
    for number, row in enumerate(rows):
        for x, text in zip(left, row):
            if text:
                page.write(x, y, text, size=6.8, bold=number == 0)
        y += step
    return y


def draw_sums(page: Page, y: float) -> float:
    page.title(y, "3  f and g, and which gradients are summed")
    y = draw_table(page, y + 6.3, (10, 18, 42, 66, 92, 120), F_AND_G) + 1
    return draw_table(page, y, (10, 75), SUMS) + 2


def draw_memory(page: Page, y: float) -> float:
    page.title(y, "4  Bytes per parameter, and per token and layer")
    size = example()
    rows = [("bytes per parameter", "", "")]
    for split, formula in PER_PARAMETER.items():
        rows.append((split, formula, f"{value(formula, size):.1f}"))
    draw_table(page, y + 6.3, (10, 30, 62), tuple(rows))
    page.write(10, y + 6.3 + 3.8 * len(rows), "for e = 2, g = 2, o = 12, DP = 4", 6.6)
    rows = [("saved for backward, per token and layer", "", "")]
    for split, formula in PER_TOKEN.items():
        rows.append((split, formula, f"{value(formula, size) / 1e3:,.1f} kB"))
    end = draw_table(page, y + 6.3, (82, 116, 172), tuple(rows))
    note = "in 16 bits, with dropout; 8: mean and 1/σ of two norms; sizes as above"
    page.write(82, end, note, size=6.6)
    return end + 5


def draw() -> plt.Figure:
    page = Page()
    page.write(10, 11, "Parallel training on one page", size=15, bold=True)
    page.write(200, 11, "Tensor parallelism in PyTorch, by running it", right=True)
    y = page.paragraph(17, LETTERS)
    y = draw_holds(page, y + 3)
    y = draw_sent(page, y)
    y = draw_sums(page, y)
    y = draw_memory(page, y)
    page.line(y - 2.5, width=1)
    y = page.paragraph(y + 0.5, CHECK, bold=True)
    if y > 292:
        raise ValueError(f"the page ends at 297 mm, the sheet at {y:.0f}")
    return page.figure


def main(folder: Path = FOLDER) -> None:
    """The same bytes each time, so that a test can compare."""
    with plt.rc_context({"svg.hashsalt": "sheet", "pdf.fonttype": 42}):
        figure = draw()
        figure.savefig(folder / "sheet.svg", metadata={"Date": None})
        figure.savefig(folder / "sheet.pdf", metadata={"CreationDate": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
