"""What the tests of the pictures share: drawing, and reading off what was drawn."""

import json
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
import draw
from matplotlib.colors import to_hex, to_rgb

# Arrows of the step that is shown: those that do not begin at a cell that is sent, or
# do not end at a new cell of their receiver (or at what is left of it: a bar, or names
# of rows), and what they cross that is to be read.
ARROWS = """player => {
    const stage = player.shadowRoot.querySelector(".stage");
    const svg = stage.querySelector("svg");
    if (!svg) return {tips: 0, astray: [], crossed: []};
    const home = stage.getBoundingClientRect();
    const scale = home.width / stage.offsetWidth;
    const seen = element => element.getClientRects().length > 0;
    const cells = [...stage.querySelectorAll(".cell, .closed .cells")].filter(seen);
    const words = [];
    for (const each of stage.querySelectorAll(
        ".cell, .column, .shape, .chip, .who, .at, figcaption, .mark")) {
        const range = document.createRange();
        for (const node of each.childNodes) {
            if (node.nodeType !== Node.TEXT_NODE) continue;
            range.selectNode(node);
            for (const box of range.getClientRects())
                if (node.data.trim()) words.push([node.data.trim(), box]);
        }
    }
    for (const each of stage.querySelectorAll(".banded")) {
        const {left, top, height} = each.getBoundingClientRect();
        const width = parseFloat(getComputedStyle(each).paddingLeft) * scale;
        if (width) words.push(["a bar", new DOMRect(left + 2, top, width - 2, height)]);
    }
    const near = (cell, x, y) => {
        const box = cell.getBoundingClientRect();
        const numbers = cell.closest(".cells"); // left of them: a bar, or names of rows
        const left = numbers.querySelector(".cell")?.getBoundingClientRect().left;
        const begin = (box.left === left ? numbers : cell).getBoundingClientRect().left;
        const [dx, dy] = [Math.max(begin - x, x - box.right, 0),
                          Math.max(box.top - y, y - box.bottom, 0)];
        return Math.hypot(dx, dy) < 4 * scale;
    };
    const [astray, crossed] = [[], new Set()];
    const tips = [...svg.querySelectorAll(".tip")];
    for (const tip of tips) {
        const end = new DOMPoint(0, 0).matrixTransform(tip.getScreenCTM());
        const lanes = stage.querySelectorAll(".lane");
        const new_cells = ".new .cell, .new.closed .cells";
        if (![...lanes[tip.dataset.to].querySelectorAll(new_cells)].some(
            cell => near(cell, end.x, end.y))) astray.push(`to ${tip.dataset.to}`);
        const sender = lanes[tip.dataset.from];
        const name = CSS.escape(player.events[player.step].takes);
        const leaving = [...sender.querySelectorAll(".cell.leaves")];
        const sent = leaving.length ? leaving
            : [...sender.querySelectorAll(`[data-name="${name}"] :is(.cell, .cells)`)];
        const path = tip.previousElementSibling;
        const begin = path.getPointAtLength(0).matrixTransform(path.getScreenCTM());
        if (!sent.some(cell => near(cell, begin.x, begin.y)))
            astray.push(`from ${tip.dataset.from}`);
    }
    // Numbers of its own: a DOMRect is asked a hundred times slower.
    const read = words.map(([text, {left, right, top, bottom}]) =>
        ({text, left, right, top: top + 3, bottom: bottom - 3}));
    for (const path of svg.querySelectorAll("path:not(.back)")) {
        const [to, length] = [path.getScreenCTM(), path.getTotalLength()];
        for (let at = 0; at <= length; at += 2) {
            const {x, y} = path.getPointAtLength(at).matrixTransform(to);
            for (const {text, left, right, top, bottom} of read)
                if (x > left && x < right && y > top && y < bottom)
                    crossed.add(text);
        }
    }
    return {tips: tips.length, astray, crossed: [...crossed]};
}"""


def walk(player, look: str, key: str = "ArrowRight") -> list:
    """What a look finds at every step of a player, which a key takes on. All in one
    call: each takes its time on a busy machine."""
    steps = f"""(player, key) => player.events.map(() => {{
        const found = ({look})(player);
        player.box.dispatchEvent(new KeyboardEvent("keydown", {{key}}));
        return found;
    }})"""
    return player.evaluate(steps, key)


def drawings(name: str) -> SimpleNamespace:
    """The functions of a notebook's drawing cells, run as they stand, with draw.py;
    what follows a line `# Picture: …` calls them."""
    names, path = {"draw": draw}, Path(draw.__file__).with_name(f"{name}.ipynb")
    for cell in json.loads(path.read_text())["cells"]:
        if "drawing" in cell["metadata"].get("tags", []):
            defined, _, _ = "".join(cell["source"]).partition("\n# Picture: ")
            exec(defined, names)
    return SimpleNamespace(**names)


def shade(color) -> str:
    return to_hex(color).upper()


def contrast(one, other) -> float:
    """Of a text and what it stands on: WCAG asks for 4.5."""
    light = []
    for color in (one, other):
        r, g, b = (
            c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4
            for c in to_rgb(color)
        )
        light.append(0.05 + 0.2126 * r + 0.7152 * g + 0.0722 * b)
    return max(light) / min(light)


class Box(NamedTuple):
    """What is filled; of a polygon, the box around it."""

    x: float
    y: float
    width: float
    height: float
    color: str


class Panel:
    """One axes of a figure, and what can be seen there: what covers other things comes
    after them."""

    def __init__(self, ax):
        self.ax, self.figure = ax, ax.figure
        filled = [p for p in ax.patches if p.get_fill()]
        self.filled = sorted(filled, key=lambda p: p.get_zorder())
        self.boxes = []
        for p in self.filled:
            around = p.get_path().get_extents(p.get_patch_transform())
            self.boxes.append(Box(*around.bounds, shade(p.get_facecolor())))
        self.colors = [b.color for b in self.boxes]
        self.spans = [(b.x, b.width, b.color) for b in self.boxes]
        self.hatches = [p.get_hatch() for p in self.filled]
        self.lines = [[list(v) for v in line.get_data()] for line in ax.lines]
        self.styles = [line.get_linestyle() for line in ax.lines]
        self.words = [t for t in ax.texts if t.get_text()]
        self.texts = [t.get_text() for t in self.words]
        self.at = {t.get_text(): t.get_position() for t in self.words}
        self.ticks = [t.get_text() for t in ax.get_yticklabels()]
        self.legend = [
            t.get_text() for legend in self.figure.legends for t in legend.get_texts()
        ]

    def on(self) -> list[tuple[str, str]]:
        """Each text, and the colour that it stands on."""
        return [(t.get_text(), self.under(*t.get_position())) for t in self.words]

    def under(self, x, y) -> str:
        """The colour that is seen at a point; none where nothing is filled."""
        found = [
            box.color for box, p in zip(self.boxes, self.filled)
            if p.get_path().contains_point((x, y), p.get_patch_transform())
        ]  # fmt: skip
        return found[-1] if found else ""

    def across(self, x, y, width, height, points) -> list[str]:
        """Colours at so many points along the diagonal of a box."""
        middles = [(i + 0.5) / points for i in range(points)]
        return [self.under(x + width * m, y + height * m) for m in middles]


def panels(function, *args, **kwargs) -> list[Panel]:
    """What a function has drawn; words neither overlap nor leave the picture."""
    function(*args, **kwargs)
    figure = draw.plt.gcf()
    figure.draw_without_rendering()  # ticks have their texts, words their places
    found = [Panel(ax) for ax in figure.axes]
    for panel in found:
        words = [(t.get_text(), t.get_window_extent()) for t in panel.words]
        for text, at in words:
            assert 0 <= at.x0 and at.x1 <= figure.bbox.width, text
            assert 0 <= at.y0 and at.y1 <= figure.bbox.height, text
        for (text, at), (other, there) in combinations(words, 2):
            assert not at.padded(-0.01).overlaps(there), (text, other)  # may touch
    return found


def drawn(function, *args, **kwargs) -> Panel:
    """The first panel, or the only one, of what a function has drawn."""
    return panels(function, *args, **kwargs)[0]
