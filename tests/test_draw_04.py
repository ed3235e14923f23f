"""Lesson 04's pictures show the data they are given: regions, shares, courses."""

import pytest
import torch
from matplotlib.colors import to_hex
from pictures import draw, drawn, texts

WHOLE = torch.full((4, 2), 3)
POSITIONS = torch.tensor([[1, 1], [1, 1], [2, 2], [2, 2]])
COLUMNS = torch.tensor([[1, 2]] * 4)
TERMS = [torch.full((4, 2), 1), torch.full((4, 2), 2)]
CALL = {"does": "reduce-scatter", "moved": 1234}


def elements(figure) -> list[tuple]:
    """(x, y, colour) of every element, in the order drawn."""
    colors = {*draw.COLORS, draw.EVERYONE}
    patches = [p for p in figure.axes[0].patches if p.get_fill()]
    found = [(*p.get_xy(), to_hex(p.get_facecolor()).upper()) for p in patches]
    return [one for one in found if one[2] in colors]


def test_how_a_tensor_lies_is_read_off_its_holders():
    cuts = [draw.cut_of(held, 2) for held in (WHOLE, POSITIONS, COLUMNS, TERMS)]
    assert cuts == ["whole", "positions", "columns", "terms"]
    with pytest.raises(ValueError, match="split both"):
        draw.cut_of(torch.tensor([[1, 2], [2, 1]]), 2)
    with pytest.raises(ValueError, match="some ranks only"):
        draw.cut_of(torch.tensor([[3, 3], [5, 5]]), 3)
    with pytest.raises(ValueError, match="some ranks only"):
        draw.cut_of(torch.tensor([[0, 1], [0, 1]]), 2)  # held by no one


def test_regions_name_runs_and_colour_elements():
    items = [("x", POSITIONS), ("norm", POSITIONS), CALL, ("q", COLUMNS), ("w", WHOLE)]
    lines = [("a layer", items), ("below", [("", TERMS)])]
    figure = drawn(draw.regions, lines, 2, {2: "D"})
    shown = texts(figure)
    wanted = ["a layer", "[B, s, D]", "positions", "x", "norm", "reduce-\nscatter",
              "1,234\nbytes", "[B, S, d]", "columns", "q", "[B, S, D]", "whole", "w",
              "below", "[B, S, D]", "terms"]  # fmt: skip
    assert shown == wanted  # x and norm lie alike: one name below both
    blue, orange = draw.color(0), draw.color(1)
    colors = [color for *_, color in elements(figure)]
    rows, columns = [blue] * 4 + [orange] * 4, [blue, orange] * 4
    assert colors[:24] == [*rows, *rows, *columns]
    assert colors[24:32] == [draw.EVERYONE] * 8
    assert colors[32:] == [orange] * 8 + [blue] * 8  # rank 0's page lies in front
    x, norm = elements(figure)[0][0], elements(figure)[8][0]
    assert x < norm < elements(figure)[16][0]
    assert elements(figure)[0][1] < elements(figure)[32][1]


def test_regions_tell_one_dim_from_another():
    """By its width, where letters are given; where not, no shape is claimed."""
    items = [("q", COLUMNS), ("up", COLUMNS.repeat(1, 2)), ("x", POSITIONS)]
    items += [("h", torch.full((4, 4), 3)), ("", [t.repeat(1, 2) for t in TERMS])]
    shown = texts(drawn(draw.regions, [("", items)], 2, {2: "D", 4: "F"}))
    wanted = ["[B, S, d]", "columns", "q", "[B, S, f]", "columns", "up"]
    wanted += ["[B, s, D]", "positions", "x", "[B, S, F]", "whole", "h"]
    wanted += ["[B, S, F]", "terms"]
    assert shown == wanted
    shown = texts(drawn(draw.regions, [("", items)], 2))
    wanted = ["columns", "q", "up", "positions", "x", "whole", "h", "terms"]
    assert shown == wanted  # q and up: one run again
    with pytest.raises(KeyError):
        draw.regions([("", items)], 2, {2: "D"})


def extents(figure, what):
    figure.canvas.draw()
    return [one.get_window_extent() for one in what]


@pytest.mark.parametrize("dims", [None, {12: "D", 2: "F"}])
@pytest.mark.parametrize("name", ["tensor 6", "tensor of\ntwo lines"])
def test_regions_fit_and_do_not_overlap(name, dims):
    names = [name, *(f"tensor {i}" for i in range(6))]  # the first below the title
    items = [(name, COLUMNS.repeat(1, 6)) for name in names]
    line = ("a long line", [*items, CALL, ("x", TERMS)])
    figure = drawn(draw.regions, [line, line], 2, dims)
    ax = figure.axes[0]
    words = [t for t in ax.texts if t.get_text()]
    found = extents(figure, words)
    width, height = figure.get_size_inches() * figure.dpi
    for word, one in zip(words, found):
        assert 0 <= one.x0 and one.x1 <= width, word.get_text()
        assert 0 <= one.y0 and one.y1 <= height, word.get_text()
    for i, (word, one) in enumerate(zip(words, found)):
        for other, two in zip(words[i + 1 :], found[i + 1 :]):
            assert not one.overlaps(two), (word.get_text(), other.get_text())
    grounds = [p for p in ax.patches if to_hex(p.get_facecolor()) == "#f4f4f4"]
    ground = extents(figure, grounds)[0]
    heading = found[[word.get_text() for word in words].index(name)]
    assert ground.x0 <= heading.x0 and heading.y1 <= ground.y1 + 1
    squares = [
        p for p in ax.patches if to_hex(p.get_facecolor()).upper() in draw.COLORS
    ]
    for square in extents(figure, squares):
        for word, one in zip(words, found):
            low, high = max(square.y0, one.y0), min(square.y1, one.y1)
            beside = square.x1 <= one.x0 or one.x1 <= square.x0
            assert beside or high <= low + 1, word.get_text()


def test_shares_are_the_numbers():
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])]
    total, reference = torch.tensor([1.5, 1.0]), torch.tensor([1.5, 1.25])
    figure = drawn(draw.shares, parts, total, reference, "dL/dw")
    ax = figure.axes[0]
    bars = [(p.get_height(), to_hex(p.get_facecolor()).upper()) for p in ax.patches]
    blue, orange = draw.color(0), draw.color(1)
    assert bars == [(1, blue), (-2, blue), (0.5, orange), (3, orange)]
    middles = [p.get_x() + p.get_width() / 2 for p in ax.patches]
    assert [round(x) for x in middles] == [0, 1, 0, 1]
    assert ax.lines[0].get_ydata().tolist() == [1.5, 1.0]
    assert ax.lines[1].get_ydata().tolist() == [1.5, 1.25]
    names = {t.get_text() for t in figure.legends[0].get_texts()}
    assert names == {"rank 0's part", "rank 1's part", "all-reduced", "one process"}
    assert ax.get_title() == "dL/dw"


def test_a_course_counts_steps_from_one():
    series = {"right": [0.0, 0.0, 0.0], "broken": [1.0, 3.0, 2.0]}
    figure = drawn(draw.course, series, "step", "apart")
    ax = figure.axes[0]
    assert [list(line.get_ydata()) for line in ax.lines] == list(series.values())
    assert all(list(line.get_xdata()) == [1, 2, 3] for line in ax.lines)
    styles = [(line.get_linestyle(), line.get_marker()) for line in ax.lines]
    assert len(set(styles)) == 2
    assert [t.get_text() for t in figure.legends[0].get_texts()] == list(series)
