"""The pictures show the data they are given: numbers, colours, lengths, places."""

from itertools import product

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from pictures import contrast, draw, drawings, drawn, panels, shade

of_08 = drawings("08_same_bits")
of_03 = drawings("03_vocab_parallel")
of_05 = drawings("05_3d_parallel")
of_14 = drawings("14_schedules")
BLUE, ORANGE, GREEN, PINK = draw.COLORS[:4]
WHITE, BLACK, EVERYONE, GREY = "#FFFFFF", "#000000", draw.EVERYONE, draw.PARTS[2]


# Colours and places


def test_colours_can_be_told_apart_and_written_on():
    assert len(set(draw.COLORS)) == 8
    for color in draw.COLORS:
        assert contrast(color, draw.ink(color)) > 4.5
    distance = lambda a, b: max(abs(x - y) for x, y in zip(to_rgb(a), to_rgb(b)))
    shades = [draw.VALUES(i / 20) for i in range(21) if i != 10]  # 10 is almost white
    assert min(distance(*pair) for pair in product(shades, draw.COLORS[:7])) > 0.12
    below, above = draw.VALUES(0.1), draw.VALUES(0.9)
    assert above[2] - below[2] > 0.3  # in blue, which most colour-blind people see


def test_places_are_found_by_value():
    full, halves = torch.randn(4, 6), [1] * 3 + [2] * 3
    assert draw.places(full, full.chunk(2, 1)).tolist() == [halves] * 4
    assert draw.places(full[0], full[0].chunk(2)).tolist() == [halves]
    rows = draw.places(full, [full[2:], full[:2], full])
    assert rows[:, 0].tolist() == [6, 6, 5, 5]
    with pytest.raises(ValueError, match="rank 1's piece is nowhere"):
        draw.places(full, [full, full + 0.1])


# Small tensors and matrices


def test_rows_show_every_value_in_its_colour():
    values = [torch.tensor([7.0, 8.5]), None, torch.tensor([-3.0, 126.0])]
    who = [torch.tensor([1, 2]), None, torch.tensor([5, 7])]
    seen = drawn(draw.rows, [[("x", values, who), ("y", values, who)]])
    shown = ["7", "8.50", "–", "-3", "126"]
    assert seen.texts == ["rank 0", "rank 1", "rank 2", "x", *shown, "→", "y", *shown]
    for text, fills in (
        ("7", [BLUE]), ("8.50", [ORANGE]), ("-3", [BLUE, GREEN]),
        ("126", [BLUE, ORANGE, GREEN]),
    ):  # fmt: skip
        x, y = seen.at[text]
        assert seen.across(x - 0.5, y + 0.4, 1, 0, len(fills)) == fills, text


def test_matrices_are_coloured_by_holder_and_blocks_name_them():
    held = torch.tensor([[1, 1, 3], [1, 1, 3], [15, 15, 2], [15, 2, 2], [13, 3, 0]])
    items = [("A[I, J]", held, "a note", (1, 2)), "=", ("B", held[:2, :1], "", (0, 1))]
    seen = drawn(draw.matrices, items, 4)
    blocks = ["0", "0,1", "all", "1", "all", "1", "0,2,3", "0,1"]
    assert seen.texts == [*blocks, "A[I, J]", "a note", "=", "0", "B"]
    fills = {0: [WHITE], 1: [BLUE], 2: [ORANGE], 15: [EVERYONE]}
    fills |= {3: [BLUE, ORANGE], 13: [BLUE, GREEN, PINK]}  # several ranks: stripes
    left, top = min(b.x for b in seen.boxes), min(b.y for b in seen.boxes)
    for i, j in product(range(5), range(3)):
        expected = fills[held[i, j].item()]
        found = seen.across(left + j, top + i + 0.1, 0.25, 0, len(expected))
        assert found == expected, (i, j)


TREE = [(1, 2), (4, 8), (3, 12), (15, 240)], [(16, 32), (64, 128), (15, 240)]
ROWS = [("a", 1), ("b", 1), ("c", 2), ("pad", 2)]
ONE, TWO = torch.tensor([[0.0, -0.0], [7, -0.0]]), torch.tensor([[-3.0, 4], [0, 0]])
HELD = [("embed", 2048, [1024, 0]), ("head", 300, [0, 1500])]
STAGES = [
    {"name": "x", "boxes": ["[2, 4]", "[3, 4]"]},
    {"name": "g", "does": "all-reduce", "moved": 1234},
]
LINES = torch.tensor([[*b"ab          "], [*b"c           "]])
LANES = [[["q0"], ["k0"], ["v0"]], [["q1"], ["k1"], ["v1"]]]
BATCH = LINES, 2, [0, 1], ["24 bytes"]
CUBE = [dict(pp=[r & 3, r | 4], dp=[r & 5, r | 2], tp=[r & 6, r | 1]) for r in range(8)]


@pytest.mark.parametrize("draws, args, shown", [
    (of_08.draw_tree, (2, TREE), [  # ranges of terms, by who adds them
        ("0", BLUE), ("0 … 3", BLUE), ("6 … 7", ORANGE), ("0 … 7", EVERYONE)]),
    (of_03.draw_lookup, (ROWS, [2, 0], [ONE, TWO], ONE + TWO), [
        ("a", BLUE), ("pad", ORANGE), ("7", BLUE), ("4", ORANGE), ("-3", EVERYONE)]),
    (of_05.draw_holdings, (HELD, ["rank 0", "rank 1"]), [
        ("2,048", WHITE), ("1,024", BLUE), ("300", WHITE), ("1,500", ORANGE)]),
    (draw.flow, (STAGES, 2, "way", False), [
        ("[2, 4]", BLUE), ("[3, 4]", ORANGE),
        ("all-reduce\npayload\n1,234 bytes", "")]),
    (of_05.draw_ragged, ([[BATCH] * 2] * 2, ord(" ")), [
        ("a", GREY), ("c", GREY), ("0", BLUE), ("1", ORANGE), ("24 bytes", "")]),
    (draw.heads, (LANES, ["queries", "keys", "values"]), [
        ("q0", BLUE), ("v0", BLUE), ("q1", ORANGE), ("k1", ORANGE)]),
    (of_05.draw_cubes, (CUBE, ["pp", "dp", "tp"]), [
        ("0", BLUE), ("3", PINK), ("[0 1] [2 3] [4 5] [6 7]", "")]),
])  # fmt: skip
def test_a_word_has_the_colour_of_the_rank_that_holds_it(draws, args, shown):
    found = drawn(draws, *args).on()
    assert [pair for pair in shown if pair not in found] == [], found


# Large tensors


def test_heat_maps_hold_the_tensors():
    one = torch.arange(-6.0, 6).view(3, 4) / 8
    two = one + 0.5 * torch.eye(3, 4)  # its largest is not the largest of the first
    seen = panels(draw.compare, {"up": (one, two), "down": (two, two)})
    maps = [p.ax for p in seen if p.ax.get_title()]
    wanted = one, two, two - one, two, two, two - two
    for ax, matrix in zip(maps, wanted, strict=True):
        np.testing.assert_allclose(ax.images[0].get_array(), matrix)
        assert ax.get_xlabel() == "dim 1: 4"
    limits = [ax.images[0].get_clim() for ax in maps[:3]]
    assert limits == [(-1, 1), (-1, 1), (-0.5, 0.5)]  # so nothing is clipped
    titles = [ax.get_title() for ax in maps]
    assert titles[2] == f"difference ≤ {0.5 / 0.75:.2g} · max" and "≤ 0 ·" in titles[5]


# Bytes, seconds, numbers


def test_bars_and_sums_have_their_lengths_and_colours():
    values = {"one": [10.0, 20.0], "two": [5.0, 1.0]}
    seen = drawn(draw.bars, values, ["a", "b"], {"one": 30, "two": 7}, "bytes")
    assert [(b.x, b.width) for b in seen.boxes] == [(0, 10), (10, 20), (0, 5), (5, 1)]
    assert [xs[0] for xs, _ in seen.lines] == [30, 7]  # predicted
    draw.plt.close("all")
    line = [(1.0, 1, "mine"), (2.0, 2, "yours"), (4.0, 3, "ours")]
    seen = drawn(draw.sums, {"one": [(7.5, 0, "all")], "two": line}, 2, "squares")
    parts = [(0, 1, BLUE), (1, 2, ORANGE), (3, 4, EVERYONE)]
    assert seen.spans == [(0, 7.5, WHITE), *parts] and seen.ticks == ["one", "two"]


def test_lines_go_through_their_points():
    points, name = [(10, 21.0), (1000, 2001.0)], "all-reduce"
    seen = drawn(draw.fit, {name: points}, {name: (1, 2)}, "bytes", "µs")
    dots, (xs, ys) = seen.lines
    assert [*zip(*dots)] == points
    assert ys == pytest.approx([1 + 2 * x for x in xs])
    assert min(xs) == 10 and max(xs) == pytest.approx(1000)


def test_together_draws_spans_and_shades_where_all_are_in_the_call():
    spans = [(0, "attention", 5.0, 9.0), (1, "attention", 6.0, 9.5), (1, "MLP", 10, 12)]
    calls = [(0, "g", 7.0, 9.0), (1, "g", 8.0, 9.5)]
    seen = drawn(draw.together, spans, calls, 9.8)
    assert seen.spans == [
        (3, 1, GREY),  # rank 1 comes at 8, rank 0 leaves at 9
        (0, 4, BLUE), (1, 3.5, ORANGE), (5, 2, ORANGE), (2, 2, BLACK), (3, 1.5, BLACK),
    ]  # fmt: skip
    ranks = [round(b.y + b.height / 2) for b in seen.boxes[1:]]
    assert ranks == [0, 1, 1, 0, 1] and seen.at["g"][0] == 3.5
    _, one, again, other, *_ = seen.hatches
    assert one == again != other


# Regions of a layer

WHOLE = torch.full((4, 2), 3)
POSITIONS = torch.tensor([[1, 1], [1, 1], [2, 2], [2, 2]])
COLUMNS = torch.tensor([[1, 2]] * 4)
TERMS = torch.stack([torch.full((4, 2), 1), torch.full((4, 2), 2)])
CALL = {"does": "reduce-scatter", "moved": 1234}


def test_a_layout_that_has_no_name_is_refused():
    for held, ranks, wrong in (
        ([[1, 2], [2, 1]], 2, "sharded both"),
        ([[3, 3], [5, 5]], 3, "some ranks only"),
        ([[0, 1], [0, 1]], 2, "some ranks only"),  # held by no one
    ):
        with pytest.raises(ValueError, match=wrong):
            draw.layout_of(torch.tensor(held), ranks)


def test_regions_name_runs_and_colour_elements():
    items = [("x", POSITIONS), ("norm", POSITIONS), CALL, ("q", COLUMNS)]
    items += [("up", COLUMNS.repeat(1, 2)), ("w", WHOLE)]
    lines = [("a layer", items), ("below", [("", TERMS)])]
    seen = drawn(draw.layer, lines, 2, {2: "D", 4: "F"})
    assert seen.texts == [  # x and norm lie alike: one name below both
        "a layer", "[B, s, D]", "positions", "x", "norm", "reduce-\nscatter",
        "1,234\nbytes", "[B, S, d]", "columns", "q", "[B, S, f]", "columns", "up",
        "[B, S, D]", "replicated", "w", "below", "[B, S, D]", "partial",
    ]  # fmt: skip
    elements = [b for b in seen.boxes if b.color in (BLUE, ORANGE, EVERYONE)]
    rows, columns = [BLUE] * 4 + [ORANGE] * 4, [BLUE, ORANGE] * 4
    pages = [ORANGE] * 8 + [BLUE] * 8  # rank 0's lies in front
    wanted = [*rows, *rows, *columns, *columns, *columns, *[EVERYONE] * 8, *pages]
    assert [b.color for b in elements] == wanted


# The mesh as a cube, stages, schedules, micro-batches in flight, batches


SPANS = [  # rank, what, micro-batch, chunk, start, end: two ranks, two micro-batches
    (0, "forward", 0, 0, 10.0, 10.1), (0, "forward", 1, 0, 10.1, 10.2),
    (0, "backward", 0, 0, 10.5, 10.7), (0, "backward", 1, 0, 10.8, 11.0),
    (1, "forward", 0, 0, 10.1, 10.2), (1, "backward", 0, 0, 10.2, 10.4),
    (1, "forward", 1, 0, 10.4, 10.5), (1, "backward", 1, 0, 10.5, 10.7),
]  # fmt: skip


def test_pipelines_show_each_micro_batch_and_the_bubble():
    assert of_14.computing(SPANS) == (10.0, 11.0, pytest.approx(2 / 1.2 - 1))
    seen = panels(of_14.draw_pipelines, {"A": SPANS}, unit=1e-3)
    (panel,) = seen
    expected = [(0, 1000, 0, GREY), (0, 1000, 1, GREY)]
    for rank, _, _, _, start, end in SPANS:
        expected.append(
            (1e3 * (start - 10), 1e3 * (end - start), rank, [BLUE, ORANGE][rank])
        )
    found = [(b.x, b.width, b.y + b.height / 2, b.color) for b in panel.boxes]
    for box, span in zip(found, expected, strict=True):
        assert box == pytest.approx(span, abs=1e-6)
    assert panel.texts == [str(span[2] + 1) for span in SPANS]
    kinds = {"": "forward", draw.HATCHES[1]: "backward", draw.HATCHES[2]: "weight"}
    hatched = [kinds[hatch or ""] for hatch in panel.hatches[2:]]
    assert hatched == [span[1] for span in SPANS]


def test_in_flight_is_a_step_line_beside_the_prediction():
    """A stage holds from a forward's start to its backward's end."""
    runs, predicted = {"A": SPANS, "B": SPANS}, {"A": [2, 1], "B": [4, 4]}
    seen = panels(of_14.draw_in_flight, runs, predicted)
    held = [  # corners of both stages' steps: ms, micro-batches
        [(0, 1), (100, 1), (100, 2), (700, 2), (700, 1), (1000, 1)],
        [(0, 0), (100, 0), (100, 1), (400, 1), (400, 0), (700, 1), (700, 0)],
    ]
    wanted = [(0, 2, 2), (0, 2, 4), (1, 1, 1), (1, 1, 4)]
    for panel, (stage, most, limit) in zip(seen, wanted, strict=True):
        (area,) = panel.ax.collections
        assert shade(area.get_facecolor()[0]) == draw.color(stage)
        corners = np.round(area.get_paths()[0].vertices, 6)
        assert {*held[stage]} <= {tuple(corner) for corner in corners}
        assert tuple(corners.max(0)) == (1000, most)
        ((_, heights),) = panel.lines
        assert set(heights) == {limit} and panel.texts == [f"at most {most}"]
