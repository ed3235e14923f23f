"""The pictures show the data they are given: numbers, colours, lengths, places."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from pictures import Panel, draw, drawings, drawn, legible, panels, shade

of_02 = drawings("02_transformer_tp")
of_03 = drawings("03_vocab_parallel")
of_04 = drawings("04_sequence_parallel")
of_05 = drawings("05_3d_parallel")
BLUE, ORANGE, WHITE, BLACK = *draw.COLORS[:2], "#FFFFFF", "#000000"
EVERYONE, GREY = draw.EVERYONE, draw.PARTS[2].upper()


# Colours and places


def luminance(color) -> float:
    parts = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4
             for c in to_rgb(color)]  # fmt: skip
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_colours_can_be_told_apart_and_written_on():
    assert len(set(draw.COLORS)) == 8
    for rank in range(8):
        back = draw.color(rank)
        dark, light = sorted([luminance(back), luminance(draw.ink(back))])
        assert (light + 0.05) / (dark + 0.05) > 4.5, rank  # what WCAG asks of text


def test_colours_of_values_are_no_ranks_colours():
    distance = lambda a, b: max(abs(x - y) for x, y in zip(to_rgb(a), to_rgb(b)))
    shades = [draw.VALUES(i / 20)[:3] for i in range(21) if i != 10]
    assert min(distance(*pair) for pair in product(shades, draw.COLORS[:7])) > 0.12
    below, above = draw.VALUES(0.1), draw.VALUES(0.9)
    assert above[2] - below[2] > 0.3  # in blue, which most colour-blind people see


def test_places_are_found_by_value():
    assert [draw.bits(n) for n in (0, 1, 5, 8)] == [[], [0], [0, 2], [3]]
    full, halves = torch.randn(4, 6), [1] * 3 + [2] * 3
    assert draw.places(full, full.chunk(2, 1)).tolist() == [halves] * 4
    assert draw.places(full[0], full[0].chunk(2)).tolist() == [halves]
    rows = draw.places(full, [full[2:], full[:2], full])
    assert rows[:, 0].tolist() == [6, 6, 5, 5]
    for rank, pieces in ((1, [full, full + 0.1]), (0, [torch.zeros(5, 6)])):
        with pytest.raises(ValueError, match=f"rank {rank}'s piece is nowhere"):
            draw.places(full, pieces)
    heads = {"q": list(torch.randn(3, 2, 4)), "k": list(torch.randn(2, 2, 4))}
    pieces = heads["k"][1].clone(), heads["q"][2], heads["q"][0] + 0.1, torch.ones(4)
    assert of_02.named(pieces, heads) == ["k1", "q2", "?", "?"]


# Small tensors and matrices


def test_rows_show_every_value_in_its_colour():
    values = [torch.tensor([7.0, 8.5]), None, torch.tensor([-3.0, 126.0])]
    who = [torch.tensor([1, 2]), None, torch.tensor([5, 7])]
    lines = [[("x", values, who), ("y", values, who)], [("z", values, who)]]
    seen = drawn(draw.rows, lines)
    ranks, shown = ["rank 0", "rank 1", "rank 2"], ["7", "8.50", "–", "-3", "126"]
    above = [*ranks, "x", *shown, "→", "y", *shown]  # time passes between moments
    assert seen.texts == [*above, *ranks, "z", *shown]
    for text, row, ranks in (
        ("7", 0, [0]), ("8.50", 0, [1]), ("-3", 2, [0, 2]), ("126", 2, [0, 1, 2]),
    ):  # fmt: skip
        x, y = seen.at[text]
        assert abs(y - seen.at[f"rank {row}"][1]) < 0.5
        strip = seen.across(
            x - 0.5, y + (0.4 if len(ranks) > 1 else 0), 1, 0, len(ranks)
        )
        assert strip == [draw.color(rank) for rank in ranks], text
    assert "→" not in drawn(draw.rows, lines, arrow=False).texts


def test_matrices_are_coloured_by_holder_and_blocks_name_them():
    held = torch.randint(0, 3, (6, 7), generator=torch.Generator().manual_seed(0))
    times = torch.zeros(6, 7)
    for i, j, down, across in draw.blocks(held):
        assert (held[i : i + down, j : j + across] == held[i, j]).all()
        times[i : i + down, j : j + across] += 1
    assert (times == 1).all(), "each element lies in one block"

    held = torch.tensor([[1, 1, 3], [1, 1, 3], [7, 7, 2], [4, 0, 0]])
    items = [("A[I, J]", held, "a note"), "=", ("B", held[1:3, 1:], "")]
    seen = drawn(draw.matrices, items, 3)
    first, second = ["0", "0,1", "all", "1", "2"], ["0", "0,1", "all", "1"]
    assert seen.texts == [*first, "A[I, J]", "a note", "=", *second, "B"]
    colors = {0: [WHITE] * 2, 1: [BLUE] * 2, 2: [ORANGE] * 2, 3: [BLUE, ORANGE],
              4: [draw.color(2)] * 2, 7: [EVERYONE] * 2, None: ["", ""]}  # fmt: skip
    left, top = min(b.x for b in seen.boxes), min(b.y for b in seen.boxes)
    for i, j in product(range(5), range(4)):
        who = held[i, j].item() if i < 4 and j < 3 else None
        assert seen.across(left + j, top + i, 1, 1) == colors[who], (i, j)
    to_units = seen.ax.transData.inverted()
    middles = (1, 1), (2.5, 1), (1, 2.5), (2.5, 2.5), (0.5, 3.5)
    for word, at, (x, y) in zip(seen.words, seen.on_screen(), middles):
        assert word.get_position() == pytest.approx((left + x, top + y)), word
        across = 2 if word.get_text() == "all" else 1  # the narrowest block of the name
        assert abs(at.transformed(to_units).width) < across, word


@pytest.mark.parametrize("ranks", [[2], [0, 1], [3, 0, 2], [0, 1, 2, 3]])
def test_a_box_of_several_ranks_has_diagonal_bands(ranks):
    def one_box():
        draw.box(draw.blank(4, 4, 1), 1, 1, 2, 1, ranks, everyone=5)

    seen = drawn(one_box)
    assert seen.across(1, 1, 2, 1, len(ranks)) == [draw.color(rank) for rank in ranks]
    if len(ranks) > 1:  # the other two corners lie on one band or border
        assert seen.under(2.5, 1.1) == seen.under(1.2, 1.75)


def test_thick_lines_part_the_heads_of_a_matrix():
    wide, tall = torch.ones(2, 6).long(), torch.ones(6, 2).long()
    items = [("a", wide, "", (1, 2)), "·", ("b", tall, ""), ("c", tall, "", (0, 3))]
    seen = drawn(draw.matrices, items, 2)
    a, _, c = [p.get_xy() for p in seen.ax.patches if p.get_linewidth() == 1.6]
    (x, y), (left, top) = a, c
    assert seen.lines == [
        [[x + 2] * 2, [y, y + 2]], [[x + 4] * 2, [y, y + 2]],
        [[left, left + 2], [top + 3] * 2],
    ]  # fmt: skip


def test_a_matrix_shows_what_nobody_holds_and_may_go_without_numbers():
    whole = torch.tensor([[1, 0, 2, 2], [0, 1, 2, 0]])
    items = [("one", whole, "note"), ("all", 3 * torch.eye(2).int(), "")]
    seen = drawn(draw.matrices, items, 2, numbers=False)
    assert seen.texts == ["one", "note", "all"]
    assert seen.colors == [
        BLUE, WHITE, ORANGE, ORANGE, WHITE, BLUE, ORANGE, WHITE,
        EVERYONE, WHITE, WHITE, EVERYONE,
    ]  # fmt: skip


def test_lookup_joins_tokens_to_rows_and_shows_the_terms():
    rows = [("a", 1), ("b", 1), ("c", 2), ("pad", 2)]
    one, two = torch.tensor([[0.0, -0.0], [7, -0.0]]), torch.tensor([[-3.0, 4], [0, 0]])
    seen = drawn(of_03.draw_lookup, rows, [2, 0], [one, two], one + two)
    zeros = [("0", WHITE)] * 2
    assert seen.on() == [
        ("rows", ""), ("tokens", ""),
        ("a", BLUE), ("b", BLUE), ("c", ORANGE), ("pad", ORANGE),
        ("c", WHITE), ("a", WHITE),
        ("rank 0", ""), *zeros, ("7", BLUE), ("0", BLUE),
        ("rank 1", ""), ("+", ""), ("-3", ORANGE), ("4", ORANGE), *zeros,
        ("sum", ""), ("→", ""),  # by who brought it
        ("-3", ORANGE), ("4", ORANGE), ("7", BLUE), ("0", BLUE),
    ]  # fmt: skip
    height = {t.get_text(): t.get_position()[1] for t in seen.words[2:6]}
    assert [ys for _, ys in seen.lines] == [[height["c"], 1.5], [height["a"], 2.5]]


# Large tensors


def test_heat_maps_hold_the_tensors():
    one = torch.arange(-6.0, 6).view(3, 4) / 8
    two = one + 0.5 * torch.eye(3, 4)  # its largest is not the largest of the first
    seen = panels(draw.compare, {"up": (one, two), "down": (two, two)})
    maps = [p.ax for p in seen if p.ax.images and not p.ax.get_label()]
    wanted = one, two, two - one, two, two, two - two
    for ax, matrix in zip(maps, wanted, strict=True):
        assert torch.allclose(torch.tensor(ax.images[0].get_array()), matrix)
        assert ax.get_xlabel() == "dim 1: 4"
    for ax in maps[:2]:  # so neither is clipped
        assert ax.images[0].get_clim() == (-1, 1)
    titles = [ax.get_title() for ax in maps]
    assert titles[2] == f"difference ≤ {0.5 / 0.75:.2g} · max" and "≤ 0 ·" in titles[5]
    assert [ax.get_ylabel() for ax in maps[:3]] == ["up\ndim 0: 3", "", ""]
    bar = next(p.ax for p in seen if p.ax.get_ylabel() == "difference")
    bar.figure.draw_without_rendering()
    ticks = [float(text) for text in Panel(bar).ticks]
    assert ticks == pytest.approx(bar.get_yticks(), abs=1e-12)


def test_terms_share_a_scale():
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    *maps, _ = panels(draw.terms, [one, two], one + two, ["a", "b", "sum"])
    images = [p.ax.images[0] for p in maps]
    assert torch.allclose(torch.tensor(images[2].get_array()), one + two)
    assert len({image.get_clim() for image in images}) == 1
    assert [p.texts for p in maps] == [["+"], ["="], []]
    frames = [shade(p.ax.spines["left"].get_edgecolor()) for p in maps[:2]]
    assert frames == [BLUE, ORANGE]


# Graphs


@pytest.mark.parametrize("backward", [False, True])
def test_flow_shows_who_sends(backward):
    stages = [
        {"name": "x", "boxes": ["[2, 4]", "[3, 4]"]},
        {"name": "f", "does": "identity", "moved": 0},
        {"name": "g", "does": "all-reduce", "moved": 1234},
    ]
    seen = drawn(draw.flow, stages, 2, "way", backward)
    said = {"way", "x", "[2, 4]", "[3, 4]", "g", "all-reduce\npayload\n1,234 bytes"}
    assert said <= set(seen.texts) and seen.colors == [BLUE, ORANGE]
    nothing, much = seen.ax.lines
    assert seen.styles == [":", "-"]
    assert nothing.get_linewidth() < much.get_linewidth()
    arrows = [t for t in seen.ax.texts if hasattr(t, "arrow_patch")]
    assert [a.xy[0] < a.xyann[0] for a in arrows] == [backward] * 2


@pytest.mark.parametrize("keys, joins", [
    (["k0", "k1"], [("q0", "k0"), ("q1", "k1")]),
    (["k0"], [("q0", "k0"), ("q1", "k0")]),
])  # fmt: skip
def test_heads_stand_on_their_rank_and_lines_join_what_meets(keys, joins):
    lanes = [[["q0", "q1"], keys], [["q2", "q3"], ["x"] * len(keys)]]
    seen = drawn(of_02.draw_heads, lanes, ["queries", "keys"])
    at, on = seen.at, dict(seen.on())
    assert {"queries", "keys", "rank 0", "rank 1"} <= set(at)
    assert {on[name] for name in ("q0", "q1", *keys)} == {BLUE}
    assert on["q2"] == on["q3"] == ORANGE
    ends = [[at[a][0], at[b][0]] for a, b in joins]
    found = [xs for xs, _ in seen.lines]
    assert np.allclose(found[:2], ends) and len(found) == 4
    assert at["q0"][1] < at["k0"][1] and at["q0"][0] < at["q1"][0] < at["q2"][0]


# Bytes, seconds, numbers


def test_bars_have_their_lengths_colours_and_marks():
    values = {"one": [10.0, 20.0], "two": [5.0, 1.0]}
    seen = drawn(draw.bars, values, ["a", "b"], {"one": 30, "two": 7}, "bytes")
    assert [(b.x, b.width) for b in seen.boxes] == [(0, 10), (10, 20), (0, 5), (5, 1)]
    assert [xs[0] for xs, _ in seen.lines] == [30, 7]
    assert seen.texts == ["30", "6"] and seen.ticks == ["one", "two"]
    assert sorted(seen.legend) == ["a", "b", "predicted"]

    line = [(1.0, 1, "mine"), (2.0, 2, "yours"), (4.0, 3, "ours")]
    seen = drawn(draw.sums, {"one": [(7.5, 0, "all")], "two": line}, 2, "squares")
    parts = [(0, 1, BLUE), (1, 2, ORANGE), (3, 4, EVERYONE)]
    assert seen.spans == [(0, 7.5, WHITE), *parts] and seen.ticks == ["one", "two"]
    assert seen.texts == ["all", "7.5", "mine", "yours", "ours", "7"]
    assert seen.under(0.5, 1) == BLUE

    parts = [(0, 3, 5.0), (1, 9, 2.0), (1, 8, 2.5)]  # as wide as what they count
    ways = {"all": 2.65, "means": 3.1}
    seen = drawn(of_05.draw_weighted, parts, ways, "tokens", "loss")
    assert seen.spans == [(0, 3, BLUE), (3, 9, ORANGE), (12, 8, ORANGE)]
    assert [b.height for b in seen.boxes] == [5, 2, 2.5]
    assert seen.texts == ["0", "rank 1", "rank 1"] and seen.ax.get_xlim() == (0, 20)
    assert [ys[0] for _, ys in seen.lines] == [2.65, 3.1]
    assert len(set(seen.styles)) == 2
    assert seen.legend == ["all: 2.6500", "means: 3.1000"]


def test_lines_go_through_their_points():
    points, name = [(10, 21.0), (1000, 2001.0)], "all-reduce"
    seen = drawn(draw.fit, {name: points}, {name: (1, 2)}, "bytes", "µs")
    dots, (xs, ys) = seen.lines
    assert [*zip(*dots)] == points
    assert ys == pytest.approx([1 + 2 * x for x in xs])
    assert min(xs) == 10 and max(xs) == pytest.approx(1000)

    series = {"right": [0.0, 0.0, 0.0], "broken": [1.0, 3.0, 2.0]}
    seen = drawn(draw.course, series, "step", "apart")
    assert seen.lines == [[[1, 2, 3], values] for values in series.values()]
    one, other = [(line.get_linestyle(), line.get_marker()) for line in seen.ax.lines]
    assert one != other and seen.legend == list(series)


def test_shares_are_the_numbers():
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])]
    total, reference = torch.tensor([1.5, 1.0]), torch.tensor([1.5, 1.25])
    seen = drawn(of_04.draw_shares, parts, total, reference, "dL/dw")
    bars = [(round(b.x + b.width / 2), b.y, b.height, b.color) for b in seen.boxes]
    assert bars == [
        (0, 0, 1, BLUE), (1, -2, 2, BLUE), (0, 0, 0.5, ORANGE), (1, 0, 3, ORANGE),
    ]  # fmt: skip
    assert [ys for _, ys in seen.lines[:2]] == [[1.5, 1.0], [1.5, 1.25]]
    names = {"rank 0's part", "rank 1's part", "all-reduced", "one process"}
    assert set(seen.legend) == names and seen.ax.get_title() == "dL/dw"


def test_columns_show_each_ranks_part_and_what_it_brings():
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([4.0, -math.inf])]
    names = ["a", "b", "c", "pad"]
    brought = [("x", parts, [1.0, 4.0], "max", 4.0)]
    left, right = panels(of_03.draw_columns, brought, names, 2)
    (alone,) = panels(of_03.draw_columns, [("x", parts)], names, 2)
    for panel in (left, alone):
        bars = [(b.y, b.height, b.color) for b in panel.boxes]
        assert bars == [(0, 1, BLUE), (-2, 2, BLUE), (0, 4, ORANGE), (0, 0, ORANGE)]
        one, two, target, four = [p.get_linewidth() for p in panel.filled]
        assert target > one == two == four
        assert panel.texts == ["1.00", "-2.00", "4.00", "−∞"]
        assert [t.get_text() for t in panel.ax.get_xticklabels()] == names
        assert panel.ax.get_title("left") == "x"
        frame, *bars = panel.on_screen([panel.ax, *panel.filled])
        for bar, text, value in zip(bars, panel.on_screen(), (1, -2, 4, 0)):
            assert text.y1 < bar.y0 if value < 0 else text.y0 > bar.y1
            assert frame.y0 < text.y0 and text.y1 < frame.y1
    assert right.texts == ["rank 0: 1.0000", "rank 1: 4.0000", "max 4.0000"]
    fills = [shade(t.get_bbox_patch().get_facecolor()) for t in right.words]
    assert fills == [BLUE, ORANGE, WHITE]


# Spans of time


def test_together_draws_spans_and_shades_where_all_are_in_the_call():
    spans = [(0, "attention", 5.0, 9.0), (1, "attention", 6.0, 9.5), (1, "MLP", 10, 12)]
    calls = [(0, "g", 7.0, 9.0), (1, "g", 8.0, 9.5)]
    seen = drawn(of_02.draw_together, spans, calls, 9.8)
    assert seen.spans == [
        (0, 4, BLUE), (1, 3.5, ORANGE), (5, 2, ORANGE), (2, 2, BLACK), (3, 1.5, BLACK),
        (3, 1, GREY),  # rank 1 comes at 8, rank 0 leaves at 9
    ]  # fmt: skip
    in_all = seen.filled[-1].get_zorder()
    assert in_all < min(p.get_zorder() for p in seen.filled[:-1])
    assert seen.at["g"][0] == 3.5
    one, again, other, *_ = seen.hatches
    assert one == again != other
    assert seen.legend == ["attention", "MLP", "all-reduce", "all ranks are in it"]
    patches = seen.figure.legends[0].get_patches()
    assert [p.get_hatch() for p in patches[:2]] == [one, other]
    assert [shade(p.get_facecolor()) for p in patches[2:]] == [BLACK, GREY]
    ((xs, _),) = seen.lines
    turn = pytest.approx(4.8)
    words = [(t.get_text().strip(), t.get_ha()) for t in seen.words[1:]]
    assert words == [("forward", "right"), ("backward", "left")]
    assert [*xs, *(t.get_position()[0] for t in seen.words[1:])] == [turn] * 4


def test_memory_is_stacked_run_after_run():
    one = [{"seconds": 3 + t / 1000, "a": 10, "b": b} for t, b in ((0, 0), (4, 30))]
    two = [{"seconds": 9 + t / 1000, "a": 5, "b": b} for t, b in ((0, 2), (2, 1))]
    seen = drawn(of_02.draw_memory, {"one": one, "two": two}, ["a", "b"])
    assert [t.split(" ")[:2] for t in seen.texts] == [["one:", "40"], ["two:", "7"]]
    (first, high), (second, low) = seen.lines
    assert first == pytest.approx([0, 4]) and high == [40, 40]
    assert second == pytest.approx([4.48, 6.48]) and low == [7, 7]
    fills = [shade(area.get_facecolor()[0]) for area in seen.ax.collections]
    assert fills[0] == fills[2] != fills[1] == fills[3]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in seen.ax.collections]
    assert tops == [10, 40, 5, 7]


@pytest.mark.parametrize("ms", [(1, 1000), (8, 12), (1000, 1), (5, 5, 5)])
def test_what_is_written_at_a_peak_stays_in_the_picture(ms):
    runs = {}
    for i, t in enumerate(ms):
        begin, end = {"seconds": 0.0, "a": 10**6}, {"seconds": t / 1000, "a": 3 * 10**6}
        runs[f"run {i}, without TP"] = [begin, end]
    seen = drawn(of_02.draw_memory, runs, ["a"])
    frame, *found = seen.on_screen([seen.ax, *seen.words])
    assert len(found) == len(ms)
    for text, around, line in zip(seen.words, found, seen.ax.lines, strict=True):
        assert frame.x0 <= around.x0 and around.x1 <= frame.x1, text
        assert line.get_color() == "black"  # red is for what is predicted
        end = line.get_xdata()[0 if text.get_ha() == "left" else 1]
        assert text.get_position()[0] == end


# Regions of a layer

WHOLE = torch.full((4, 2), 3)
POSITIONS = torch.tensor([[1, 1], [1, 1], [2, 2], [2, 2]])
COLUMNS = torch.tensor([[1, 2]] * 4)
TERMS = torch.stack([torch.full((4, 2), 1), torch.full((4, 2), 2)])
CALL = {"does": "reduce-scatter", "moved": 1234}


def test_how_a_tensor_lies_is_read_off_its_holders():
    cuts = [of_04.layout_of(held, 2) for held in (WHOLE, POSITIONS, COLUMNS, TERMS)]
    assert cuts == ["whole", "positions", "columns", "terms"]
    for held, ranks, wrong in (
        ([[1, 2], [2, 1]], 2, "split both"),
        ([[3, 3], [5, 5]], 3, "some ranks only"),
        ([[0, 1], [0, 1]], 2, "some ranks only"),  # held by no one
    ):
        with pytest.raises(ValueError, match=wrong):
            of_04.layout_of(torch.tensor(held), ranks)


def test_regions_name_runs_and_colour_elements():
    items = [("x", POSITIONS), ("norm", POSITIONS), CALL, ("q", COLUMNS), ("w", WHOLE)]
    lines = [("a layer", items), ("below", [("", TERMS)])]
    seen = drawn(of_04.draw_layer, lines, 2, {2: "D"})
    assert seen.texts == [  # x and norm lie alike: one name below both
        "a layer", "[B, s, D]", "positions", "x", "norm", "reduce-\nscatter",
        "1,234\nbytes", "[B, S, d]", "columns", "q", "[B, S, D]", "whole", "w",
        "below", "[B, S, D]", "terms",
    ]  # fmt: skip
    elements = [b for b in seen.boxes if b.color in (BLUE, ORANGE, EVERYONE)]
    rows, columns = [BLUE] * 4 + [ORANGE] * 4, [BLUE, ORANGE] * 4
    pages = [ORANGE] * 8 + [BLUE] * 8  # rank 0's lies in front
    wanted = [*rows, *rows, *columns, *[EVERYONE] * 8, *pages]
    assert [b.color for b in elements] == wanted
    x, norm, q, _, terms, _ = elements[::8]
    assert x.x < norm.x < q.x and x.y < terms.y


def test_regions_tell_one_dim_from_another():
    """By its width, where letters are given; where not, no shape is claimed."""
    items = [("q", COLUMNS), ("up", COLUMNS.repeat(1, 2)), ("x", POSITIONS)]
    items += [("h", torch.full((4, 4), 3)), ("", TERMS.repeat(1, 1, 2))]
    assert drawn(of_04.draw_layer, [("", items)], 2, {2: "D", 4: "F"}).texts == [
        "[B, S, d]", "columns", "q", "[B, S, f]", "columns", "up",
        "[B, s, D]", "positions", "x", "[B, S, F]", "whole", "h", "[B, S, F]", "terms",
    ]  # fmt: skip
    wanted = ["columns", "q", "up", "positions", "x", "whole", "h", "terms"]
    seen = drawn(of_04.draw_layer, [("", items)], 2)
    assert seen.texts == wanted  # q and up stand together
    with pytest.raises(KeyError):
        of_04.draw_layer([("", items)], 2, {2: "D"})


@pytest.mark.parametrize("dims", [None, {12: "D", 2: "F"}])
@pytest.mark.parametrize("name", ["tensor 6", "tensor of\ntwo lines"])
def test_regions_fit_and_do_not_overlap(name, dims):
    names = [name, *(f"tensor {i}" for i in range(6))]  # the first below the title
    items = [(name, COLUMNS.repeat(1, 6)) for name in names]
    line = ("a long line", [*items, CALL, ("x", TERMS)])
    seen = drawn(of_04.draw_layer, [line, line], 2, dims)
    legible(seen)
    words, patches = seen.on_screen(), seen.on_screen(seen.filled)
    ground = patches[seen.colors.index("#F4F4F4")]
    heading = words[seen.texts.index(name)]
    assert ground.x0 <= heading.x0 and heading.y1 <= ground.y1 + 1
    squares = [at for at, color in zip(patches, seen.colors) if color in draw.COLORS]
    for square, (text, at) in product(squares, zip(seen.texts, words)):
        beside = square.x1 <= at.x0 or at.x1 <= square.x0
        above_or_below = square.y1 <= at.y0 + 1 or at.y1 <= square.y0 + 1
        assert beside or above_or_below, text


# The mesh as a cube, stages, schedules, micro-batches in flight, batches

AXES = "pp", "dp", "tp"


def a_mesh(P, D, T) -> list[dict[str, list[int]]]:
    """Each rank's groups, as the lesson lays ranks out."""
    ranks, groups = np.arange(P * D * T).reshape(P, D, T), []
    for p, d, t in product(range(P), range(D), range(T)):
        lines = ranks[:, d, t], ranks[p, :, t], ranks[p, d]
        groups.append({axis: line.tolist() for axis, line in zip(AXES, lines)})
    return groups


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1), (1, 2, 3)])
def test_cubes_join_the_ranks_of_each_group(sizes):
    groups, ranks = a_mesh(*sizes), range(math.prod(sizes))
    seen = drawn(of_05.draw_cubes, groups, AXES)
    numbers = [t for t in seen.words if t.get_text().isdigit()]
    point = lambda xy: tuple(round(float(v), 6) for v in xy)
    at = {}  # point → (panel, rank)
    for i, text in enumerate(numbers):
        at[point(text.get_position())] = i // len(ranks), int(text.get_text())
    assert sorted(at.values()) == [*product(range(3), ranks)]
    for text, back in seen.on():
        assert back == draw.color(int(text)) if text.isdigit() else not back
    joined = [], [], []
    for line in seen.ax.lines:
        points = [point(xy) for xy in line.get_xydata()]
        panel, _ = at[points[0]]
        if line.get_linewidth() > 3:
            joined[panel].append([at[xy][1] for xy in points])
            assert {at[xy][0] for xy in points} == {panel}
            for (x0, y0), (x1, y1) in pairwise(points):
                ways = (y0 == y1), (x0 == x1), x0 < x1 and y0 > y1
                assert ways[panel], "tp runs across, dp down, pp into the distance"
    for panel, axis in enumerate(reversed(AXES)):
        wanted = sorted({tuple(group[axis]) for group in groups})
        assert sorted(joined[panel]) == [list(line) for line in wanted]
        said = " ".join(f"[{' '.join(map(str, line))}]" for line in wanted)
        assert said in seen.texts
    assert [t for t in seen.texts if t in AXES] == ["tp", "dp", "pp"]


def test_holdings_have_a_box_where_a_rank_holds_something():
    heads = [f"rank {rank}\nstage {rank // 4}" for rank in range(7)]
    embed, head = [1024, 0, 0, 0, 0, 10, 20], [0, 1500, 0, 0, 0, 0, 0]
    rows = [("embed", 2048, embed), ("head", 300, head)]
    seen = drawn(of_05.draw_holdings, rows, heads)
    assert seen.texts == ["one\nprocess", *heads, "embed", "2,048", "1,024", "10", "20",
                          "head", "300", "1,500"]  # fmt: skip
    wanted = [
        ("2,048", "embed", "one\nprocess", WHITE), ("1,024", "embed", heads[0], BLUE),
        ("10", "embed", heads[5], draw.color(5)),
        ("20", "embed", heads[6], draw.color(6)),
        ("300", "head", "one\nprocess", WHITE), ("1,500", "head", heads[1], ORANGE),
    ]  # fmt: skip
    assert seen.colors == [fill for *_, fill in wanted]
    inks = {t.get_text(): t.get_color() for t in seen.words}
    for number, row, column, fill in wanted:
        assert seen.under(*seen.at[number]) == fill, number
        assert inks[number] == ("white" if number == "20" else "black")
        assert seen.at[number][1] == seen.at[row][1]
        assert abs(seen.at[number][0] - seen.at[column][0]) < 0.1


SPANS = [  # stage, what, micro-batch, start, end: two stages, two micro-batches
    (0, "forward", 0, 10.0, 10.1), (0, "forward", 1, 10.1, 10.2),
    (0, "backward", 0, 10.5, 10.7), (0, "backward", 1, 10.8, 11.0),
    (1, "forward", 0, 10.1, 10.2), (1, "backward", 0, 10.2, 10.4),
    (1, "forward", 1, 10.4, 10.5), (1, "backward", 1, 10.5, 10.7),
]  # fmt: skip


def test_pipelines_show_each_micro_batch_and_the_bubble():
    assert of_05.computing(SPANS) == pytest.approx((10, 11, 0.4), abs=1e-9, rel=0)
    half = [(s, w, i, (a - 9) / 2, (b - 9) / 2) for s, w, i, a, b in SPANS]
    one = [span for span in SPANS if span[2] == 0]  # of two micro-batches
    runs = of_05.with_waiting({"A": SPANS, "B": half, "C": one})
    seen = panels(of_05.draw_pipelines, runs, unit=1e-3)
    said = "{}: waiting {} of the time, predicted (P−1)/(M+P−1) = {}".format
    assert [panel.ax.get_title(loc="left") for panel in seen] == [
        said("A", "0.400", "0.333"), said("B", "0.400", "0.333"),
        said("C", "0.571", "0.500"),
    ]  # fmt: skip
    assert [panel.ax.get_xlabel() for panel in seen] == ["", "", "ms"]
    colors = [draw.color(stage) for stage, *_ in SPANS]
    for panel, ms in zip(seen, (1000, 500)):
        assert panel.colors == [GREY, GREY, *colors]
        assert panel.ticks == ["stage 0", "stage 1"]
        found = [[b.x, b.width, b.y + b.height / 2] for b in panel.boxes]
        wanted = [[0, ms, 0], [0, ms, 1]]
        wanted += [[ms * (a - 10), ms * (b - a), stage] for stage, _, _, a, b in SPANS]
        assert np.allclose(found, wanted, rtol=0, atol=1e-6)
        hatched = [bool(hatch) for hatch in panel.hatches[2:]]
        assert hatched == [what == "backward" for _, what, *_ in SPANS]
        assert panel.texts == [str(i + 1) for _, _, i, *_ in SPANS]
        middles = [(x + width / 2, stage) for x, width, stage in wanted[2:]]
        found = [t.get_position() for t in panel.words]
        assert np.allclose(found, middles, rtol=0, atol=1e-6)
        heights = [p.get_zorder() for p in panel.filled]
        assert max(heights[:2]) <= min(heights[2:])
    assert seen[0].legend == ["forward", "backward", "waiting: the bubble"]
    patches = seen[0].figure.legends[0].get_patches()
    assert [bool(p.get_hatch()) for p in patches] == [False, True, False]


def test_the_second_chunk_of_a_stage_is_white():
    chunk = {0: 0, 1: 1}  # say the second micro-batch is in it
    steps = [(*span[:3], chunk[span[2]], *span[3:]) for span in SPANS]
    assert of_05.computing(steps) == of_05.computing(SPANS)
    seen = drawn(of_05.draw_pipelines, {"": steps}, label="time")
    fills = [WHITE if i else draw.color(stage) for stage, _, i, *_ in SPANS]
    assert seen.colors == [GREY, GREY, *fills]
    assert (seen.boxes[0].width, seen.ax.get_xlabel()) == (1, "time")
    assert {t.get_color() for t in seen.words} == {"black"}


def test_a_stage_holds_from_a_forward_to_its_backward():
    for stage, wanted in (
        (0, [(0, 0), (0, 1), (0.1, 2), (0.7, 1), (1, 0)]),
        (1, [(0, 0), (0.1, 1), (0.4, 0), (0.4, 1), (0.7, 0)]),
    ):
        found = of_05.held_over_time(SPANS, stage)
        assert [(round(when, 6), n) for when, n in found] == wanted


def test_in_flight_is_a_step_line_beside_the_prediction():
    runs, predicted = {"A": SPANS, "B": SPANS}, {"A": [2, 1], "B": [4, 4]}
    seen = panels(of_05.draw_in_flight, runs, predicted)
    wanted = [(0, 2, 2), (0, 2, 4), (1, 1, 1), (1, 1, 4)]
    for panel, (stage, most, limit) in zip(seen, wanted, strict=True):
        (area,) = panel.ax.collections
        assert shade(area.get_facecolor()[0]) == draw.color(stage)
        ends = area.get_paths()[0].vertices.max(0)
        assert abs(ends[0] - 1000) < 1e-6 and ends[1] == most  # ms, micro-batches
        ((_, heights),) = panel.lines
        assert set(heights) == {limit} and panel.texts == [f"at most {most}"]
        assert panel.ax.get_ylim()[1] > 4
    assert [p.ax.get_ylabel() for p in seen] == ["stage 0", "", "stage 1", ""]
    assert [p.ax.get_title() for p in seen] == ["A", "B", "", ""]


def test_ragged_batches_show_text_padding_and_what_was_cut_off():
    one = torch.tensor([[97, 98, 256, 256], [99, 256, 256, 256]])
    two = torch.tensor([[100, 101, 102, 256], [103, 256, 256, 256]])
    parts = [[(one, 2, [0, 1], ["8 bytes", "16 bytes"])], [(two, 3, [4, 5], ["x"])]]
    seen = drawn(of_05.draw_ragged, parts, 256)
    assert seen.texts == [
        "replica 0, micro-batch 1", *"abc", "0", "1", "→", "8 bytes, then 16 bytes",
        "replica 1, micro-batch 1", *"defg", "4", "5", "→", "x",
    ]  # fmt: skip
    for text in "abcdefg0145":
        fill = draw.color(int(text)) if text.isdigit() else GREY
        assert seen.under(*seen.at[text]) == fill, text
    tokens = [i for i, color in enumerate(seen.colors) if color in (WHITE, GREY)]
    text, pad, cut = (GREY, "solid"), (WHITE, "solid"), (WHITE, ":")
    found = [(seen.colors[i], seen.filled[i].get_linestyle()) for i in tokens]
    assert found == [
        text, text, cut, cut, text, pad, cut, cut,
        text, text, text, cut, text, pad, pad, cut,
    ]  # fmt: skip
    xs = [seen.boxes[i].x for i in tokens[:4]]
    assert xs == sorted(xs)


def test_words_neither_overlap_nor_leave_the_picture():
    rows = [(f"layers.{i}", 123456, [61728, 61728, 0, 0]) for i in range(4)]
    heads = [f"rank {i}\nstage {i // 2}" for i in range(4)]
    said = ["24 bytes: [2, 2, 12]", "384 bytes"]
    batches = [[(torch.full((2, 12), 100), 12, [0, 1], said)] * 2] * 2
    legible(drawn(of_05.draw_cubes, a_mesh(2, 2, 2), AXES))
    legible(drawn(of_05.draw_holdings, rows, heads))
    legible(drawn(of_05.draw_ragged, batches, 256))
