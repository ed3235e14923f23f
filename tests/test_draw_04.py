"""Lesson 04's pictures show the data they are given: regions, shares, courses."""

import pytest
import torch
from pictures import BLUE, ORANGE, draw, drawn, extents, legible

WHOLE = torch.full((4, 2), 3)
POSITIONS = torch.tensor([[1, 1], [1, 1], [2, 2], [2, 2]])
COLUMNS = torch.tensor([[1, 2]] * 4)
TERMS = [torch.full((4, 2), 1), torch.full((4, 2), 2)]
CALL = {"does": "reduce-scatter", "moved": 1234}


def test_how_a_tensor_lies_is_read_off_its_holders():
    cuts = [draw.cut_of(held, 2) for held in (WHOLE, POSITIONS, COLUMNS, TERMS)]
    assert cuts == ["whole", "positions", "columns", "terms"]
    for held, ranks, wrong in (
        ([[1, 2], [2, 1]], 2, "split both"),
        ([[3, 3], [5, 5]], 3, "some ranks only"),
        ([[0, 1], [0, 1]], 2, "some ranks only"),  # held by no one
    ):
        with pytest.raises(ValueError, match=wrong):
            draw.cut_of(torch.tensor(held), ranks)


def test_regions_name_runs_and_colour_elements():
    items = [("x", POSITIONS), ("norm", POSITIONS), CALL, ("q", COLUMNS), ("w", WHOLE)]
    lines = [("a layer", items), ("below", [("", TERMS)])]
    seen = drawn(draw.regions, lines, 2, {2: "D"})
    assert seen.texts == [  # x and norm lie alike: one name below both
        "a layer", "[B, s, D]", "positions", "x", "norm", "reduce-\nscatter",
        "1,234\nbytes", "[B, S, d]", "columns", "q", "[B, S, D]", "whole", "w",
        "below", "[B, S, D]", "terms",
    ]  # fmt: skip
    elements = [b for b in seen.boxes if b.color in (BLUE, ORANGE, draw.EVERYONE)]
    rows, columns = [BLUE] * 4 + [ORANGE] * 4, [BLUE, ORANGE] * 4
    pages = [ORANGE] * 8 + [BLUE] * 8  # rank 0's lies in front
    wanted = [*rows, *rows, *columns, *[draw.EVERYONE] * 8, *pages]
    assert [b.color for b in elements] == wanted
    x, norm, q, _, terms, _ = elements[::8]
    assert x.x < norm.x < q.x and x.y < terms.y


def test_regions_tell_one_dim_from_another():
    """By its width, where letters are given; where not, no shape is claimed."""
    items = [("q", COLUMNS), ("up", COLUMNS.repeat(1, 2)), ("x", POSITIONS)]
    items += [("h", torch.full((4, 4), 3)), ("", [t.repeat(1, 2) for t in TERMS])]
    assert drawn(draw.regions, [("", items)], 2, {2: "D", 4: "F"}).texts == [
        "[B, S, d]", "columns", "q", "[B, S, f]", "columns", "up",
        "[B, s, D]", "positions", "x", "[B, S, F]", "whole", "h", "[B, S, F]", "terms",
    ]  # fmt: skip
    wanted = ["columns", "q", "up", "positions", "x", "whole", "h", "terms"]
    assert drawn(draw.regions, [("", items)], 2).texts == wanted  # q and up: one run
    with pytest.raises(KeyError):
        draw.regions([("", items)], 2, {2: "D"})


@pytest.mark.parametrize("dims", [None, {12: "D", 2: "F"}])
@pytest.mark.parametrize("name", ["tensor 6", "tensor of\ntwo lines"])
def test_regions_fit_and_do_not_overlap(name, dims):
    names = [name, *(f"tensor {i}" for i in range(6))]  # the first below the title
    items = [(name, COLUMNS.repeat(1, 6)) for name in names]
    line = ("a long line", [*items, CALL, ("x", TERMS)])
    seen = drawn(draw.regions, [line, line], 2, dims)
    legible(seen)
    words = extents(seen.figure, seen.words)
    patches = extents(seen.figure, seen.filled)
    ground, heading = (
        patches[seen.colors.index("#F4F4F4")],
        words[seen.texts.index(name)],
    )
    assert ground.x0 <= heading.x0 and heading.y1 <= ground.y1 + 1
    squares = [at for at, color in zip(patches, seen.colors) if color in draw.COLORS]
    for square in squares:
        for text, at in zip(seen.texts, words):
            beside = square.x1 <= at.x0 or at.x1 <= square.x0
            above_or_below = square.y1 <= at.y0 + 1 or at.y1 <= square.y0 + 1
            assert beside or above_or_below, text


def test_shares_are_the_numbers():
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])]
    total, reference = torch.tensor([1.5, 1.0]), torch.tensor([1.5, 1.25])
    seen = drawn(draw.shares, parts, total, reference, "dL/dw")
    bars = [(round(b.x + b.width / 2), b.y, b.height, b.color) for b in seen.boxes]
    assert bars == [
        (0, 0, 1, BLUE), (1, -2, 2, BLUE), (0, 0, 0.5, ORANGE), (1, 0, 3, ORANGE),
    ]  # fmt: skip
    assert [ys for _, ys in seen.lines[:2]] == [[1.5, 1.0], [1.5, 1.25]]
    names = {"rank 0's part", "rank 1's part", "all-reduced", "one process"}
    assert set(seen.legend) == names and seen.ax.get_title() == "dL/dw"


def test_a_course_counts_steps_from_one():
    series = {"right": [0.0, 0.0, 0.0], "broken": [1.0, 3.0, 2.0]}
    seen = drawn(draw.course, series, "step", "apart")
    assert seen.lines == [[[1, 2, 3], values] for values in series.values()]
    one, other = [(line.get_linestyle(), line.get_marker()) for line in seen.ax.lines]
    assert one != other and seen.legend == list(series)
