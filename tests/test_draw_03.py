"""The pictures of notebook 03 show the data they are given."""

import math

import torch
from pictures import BLUE, ORANGE, WHITE, draw, drawn, panels, shade


def test_lookup_joins_tokens_to_rows_and_shows_the_terms():
    rows = [("a", 1), ("b", 1), ("c", 2), ("pad", 2)]
    one, two = torch.tensor([[0.0, -0.0], [7, -0.0]]), torch.tensor([[-3.0, 4], [0, 0]])
    seen = drawn(draw.lookup, rows, [2, 0], [one, two], one + two)
    wanted = [  # what is written, and the colours there
        ("rows", []), ("tokens", []),
        ("a", [BLUE]), ("b", [BLUE]), ("c", [ORANGE]), ("pad", [ORANGE]),
        ("c", [WHITE]), ("a", [WHITE]),
        ("rank 0", []), *[("0", [WHITE])] * 2, ("7", [BLUE]), ("0", [BLUE]),
        ("rank 1", []), ("+", []),
        ("-3", [ORANGE]), ("4", [ORANGE]), *[("0", [WHITE])] * 2,
        ("sum", []), ("→", []),  # by who brought it
        ("-3", [ORANGE]), ("4", [ORANGE]), ("7", [BLUE]), ("0", [BLUE]),
    ]  # fmt: skip
    found = [(t.get_text(), seen.under(*t.get_position())) for t in seen.words]
    assert found == wanted
    height = {t.get_text(): t.get_position()[1] for t in seen.words[2:6]}
    assert [ys for _, ys in seen.lines] == [[height["c"], 1.5], [height["a"], 2.5]]


def test_columns_show_each_ranks_part_and_what_it_brings():
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([4.0, -math.inf])]
    names = ["a", "b", "c", "pad"]
    lines = [("x", parts, [1.0, 4.0], "max", 4.0), ("alone", parts)]
    left, right, below, empty = panels(draw.columns, lines, names, 2)
    for panel in (left, below):
        bars = [(b.y, b.height, b.color) for b in panel.boxes]
        wanted = [(0, 1, BLUE), (-2, 2, BLUE), (0, 4, ORANGE), (0, 0, ORANGE)]
        assert bars == wanted
        one, two, target, four = [p.get_linewidth() for p in panel.filled]
        assert target > one == two == four
        assert panel.texts == ["1.00", "-2.00", "4.00", "−∞"]
        assert [t.get_text() for t in panel.ax.get_xticklabels()] == names
        for text, bar in zip(panel.words, panel.filled):
            outside = text.get_position()[1] - bar.get_height()
            down = bar.get_height() < 0
            assert (outside < 0) == down == (text.get_va() == "top")
    assert right.texts == ["rank 0: 1.0000", "rank 1: 4.0000", "max 4.0000"]
    fills = [shade(t.get_bbox_patch().get_facecolor()) for t in right.words]
    assert fills == [BLUE, ORANGE, WHITE]
    assert not empty.texts and left.ax.get_title("left") == "x"
    assert len(panels(draw.columns, lines[1:], names)) == 1
