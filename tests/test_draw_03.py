"""The pictures of notebook 03 show the data they are given."""

import math

import torch
from matplotlib.colors import to_hex
from pictures import boxes, draw, drawn, texts


def test_lookup_joins_tokens_to_rows_and_shows_the_terms():
    rows = [("a", 1), ("b", 1), ("c", 2), ("pad", 2)]
    one, two = torch.tensor([[0.0, -0.0], [7, -0.0]]), torch.tensor([[-3.0, 4], [0, 0]])
    figure = drawn(draw.lookup, rows, [2, 0], [one, two], one + two)
    ax = figure.axes[0]
    shown = texts(figure)
    assert shown[:2] == ["rows", "tokens"] and shown[2:8] == [*"abc", "pad", *"ca"]
    assert [t for t in shown[8:] if t not in "+→"] == [
        "rank 0", "0", "0", "7", "0", "rank 1", "-3", "4", "0", "0",
        "sum", "-3", "4", "7", "0",
    ]  # fmt: skip
    names = {t.get_text(): t.get_position() for t in ax.texts[2:6]}
    for line, (token, name) in zip(ax.lines, ((0, "c"), (1, "a"))):
        assert list(line.get_ydata()) == [names[name][1], 1.5 + token]
    under = lambda text: [
        b[-1] for b in boxes(ax)
        if b[0] < text.get_position()[0] < b[0] + b[2]
        and b[1] < text.get_position()[1] < b[1] + b[3]
    ]  # fmt: skip
    found = [(t.get_text(), under(t)) for t in ax.texts]
    blue, orange, white = draw.color(0), draw.color(1), "#FFFFFF"
    wanted = {"a": blue, "c": orange, "pad": orange}
    for name, fill in wanted.items():
        assert (name, [fill]) in found
    numbers = [(t, c) for t, c in found if t.lstrip("-").isdigit()]
    white_twice = [[white]] * 2
    assert [c for _, c in numbers[:8]] == [
        *white_twice, [blue], [blue], [orange], [orange], *white_twice,
    ]  # fmt: skip
    brought = [[orange], [orange], [blue], [blue]]  # the sum, by who brought it
    assert [c for _, c in numbers[8:]] == brought


def test_columns_show_each_ranks_part_and_what_it_brings():
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([4.0, -math.inf])]
    lines = [("x", parts, [1.0, 4.0], "max", 4.0), ("alone", parts)]
    figure = drawn(draw.columns, lines, ["a", "b", "c", "pad"], 2)
    left, right, below, empty = figure.axes
    for ax in (left, below):
        bars = [(p.get_height(), to_hex(p.get_facecolor()).upper()) for p in ax.patches]
        blue, orange = draw.color(0), draw.color(1)
        assert bars == [(1, blue), (-2, blue), (4, orange), (0, orange)]
        edges = [p.get_linewidth() for p in ax.patches]
        assert edges[2] > edges[0] == edges[1] == edges[3]
        assert [t.get_text() for t in ax.texts] == ["1.00", "-2.00", "4.00", "−∞"]
        names = [t.get_text() for t in ax.get_xticklabels()]
        assert names == ["a", "b", "c", "pad"]
        for text, bar in zip(ax.texts, ax.patches):
            outside = text.get_position()[1] - bar.get_height()
            down = bar.get_height() < 0
            assert (outside < 0) == down == (text.get_va() == "top")
    assert [t.get_text() for t in right.texts] == [
        "rank 0: 1.0000", "rank 1: 4.0000", "max 4.0000",
    ]  # fmt: skip
    fills = [to_hex(t.get_bbox_patch().get_facecolor()).upper() for t in right.texts]
    assert fills == [draw.color(0), draw.color(1), "#FFFFFF"]
    assert not empty.texts and left.get_title("left") == "x"
    assert len(drawn(draw.columns, lines[1:], [*"abc", "pad"]).axes) == 1
