"""What the tests of the pictures share: drawing, and reading off what was drawn."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
import draw
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Polygon


def drawn(function, *args, **kwargs):
    """The figure that a function has drawn."""
    function(*args, **kwargs)
    return draw.plt.gcf()


def texts(figure) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in ax.texts if t.get_text()]


def boxes(ax) -> list[tuple]:
    """(x, y, width, height, colour) of everything that is filled."""
    return [
        (*around(p), to_hex(p.get_facecolor()).upper())
        for p in ax.patches
        if p.get_fill()
    ]


def around(patch) -> tuple:
    """x, y, width, height; of a polygon, of the box around it."""
    if not isinstance(patch, Polygon):
        return (*patch.get_xy(), patch.get_width(), patch.get_height())
    corners = patch.get_xy()
    return (*corners.min(0), *(corners.max(0) - corners.min(0)))


def color_seen(ax, x, y) -> str:
    """The colour on top at a point."""
    hits = [
        p for p in ax.patches
        if p.get_fill() and p.get_path().contains_point((x, y), p.get_patch_transform())
    ]  # fmt: skip
    return to_hex(hits[-1].get_facecolor()).upper()


def colors_at(ax, x, y) -> list[str]:
    """Colours of the boxes that lie inside the unit square at x, y, top to bottom."""
    inside = lambda a, b, low: low - 1e-6 <= a and a + b <= low + 1 + 1e-6
    hits = [b for b in boxes(ax) if inside(b[0], b[2], x) and inside(b[1], b[3], y)]
    return [color for *_, color in sorted(hits, key=lambda b: (b[1], b[0]))]


def luminance(color) -> float:
    parts = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4
             for c in to_rgb(color)]  # fmt: skip
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
