"""What the tests of the pictures share: drawing, and reading off what was drawn."""

import sys
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
import draw
from matplotlib.colors import to_hex

BLUE, ORANGE, WHITE, BLACK = *draw.COLORS[:2], "#FFFFFF", "#000000"


def shade(color) -> str:
    return to_hex(color).upper()


class Box(NamedTuple):
    """What is filled; of a polygon, the box around it."""

    x: float
    y: float
    width: float
    height: float
    color: str


class Panel:
    """One axes of a figure, and what can be seen there, in the order drawn."""

    def __init__(self, ax):
        self.ax, self.figure = ax, ax.figure
        self.filled = [p for p in ax.patches if p.get_fill()]
        self.boxes = []
        for p in self.filled:
            around = p.get_path().get_extents(p.get_patch_transform())
            self.boxes.append(Box(*around.bounds, shade(p.get_facecolor())))
        self.colors = [b.color for b in self.boxes]
        self.spans = [(b.x, b.width, b.color) for b in self.boxes]
        self.lines = [[list(v) for v in line.get_data()] for line in ax.lines]
        self.words = [t for t in ax.texts if t.get_text()]
        self.texts = [t.get_text() for t in self.words]
        self.at = {t.get_text(): t.get_position() for t in self.words}
        self.ticks = [t.get_text() for t in ax.get_yticklabels()]
        self.legend = [
            t.get_text() for legend in self.figure.legends for t in legend.get_texts()
        ]

    def under(self, x, y) -> list[str]:
        """The colours at a point, the one that is seen last."""
        return [
            box.color for box, p in zip(self.boxes, self.filled)
            if p.get_path().contains_point((x, y), p.get_patch_transform())
        ]  # fmt: skip

    def in_square(self, x, y) -> list[str]:
        """Colours of the boxes inside the unit square at x, y, top to bottom."""
        inside = lambda at, size, low: low - 1e-6 <= at and at + size <= low + 1 + 1e-6
        found = [b for b in self.boxes if inside(b.x, b.width, x)]
        found = [b for b in found if inside(b.y, b.height, y)]
        return [b.color for b in sorted(found, key=lambda b: (b.y, b.x))]


def panels(function, *args, **kwargs) -> list[Panel]:
    """What a function has drawn."""
    function(*args, **kwargs)
    return [Panel(ax) for ax in draw.plt.gcf().axes]


def drawn(function, *args, **kwargs) -> Panel:
    """The first panel, or the only one, of what a function has drawn."""
    return panels(function, *args, **kwargs)[0]


def extents(figure, artists) -> list:
    figure.canvas.draw()
    return [artist.get_window_extent() for artist in artists]


def legible(seen: Panel) -> None:
    """Words neither overlap nor leave the picture."""
    width, height = seen.figure.get_size_inches() * seen.figure.dpi
    found = [*zip(seen.texts, extents(seen.figure, seen.words))]
    for text, at in found:
        assert 0 <= at.x0 and at.x1 <= width, text
        assert 0 <= at.y0 and at.y1 <= height, text
    for (text, at), (other, there) in combinations(found, 2):
        assert not at.overlaps(there), (text, other)
