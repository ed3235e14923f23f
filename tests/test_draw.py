"""The pictures show the data they are given: numbers, colours, lengths, places."""

import pytest
import torch
from matplotlib.colors import to_rgb
from pictures import BLUE, ORANGE, WHITE, Panel, draw, drawn, extents, panels, shade


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
        found = seen.in_square(x - 0.5, y - (0.5 if len(ranks) == 1 else 0.37))
        assert [c for c in found if c != WHITE] == [draw.color(r) for r in ranks], text
    assert "→" not in drawn(draw.rows, lines, arrow=False).texts


def test_blocks_are_of_one_set_and_cover_the_matrix():
    held = torch.randint(0, 3, (6, 7), generator=torch.Generator().manual_seed(0))
    times = torch.zeros(6, 7)
    for i, j, down, across in draw.blocks(held):
        assert (held[i : i + down, j : j + across] == held[i, j]).all()
        times[i : i + down, j : j + across] += 1
    assert (times == 1).all()


def test_matrices_are_coloured_by_holder_and_blocks_name_them():
    held = torch.tensor([[1, 1, 3], [1, 1, 3], [7, 7, 2], [4, 0, 0]])
    assert draw.blocks(held) == [
        (0, 0, 2, 2), (0, 2, 2, 1), (2, 0, 1, 2), (2, 2, 1, 1),
        (3, 0, 1, 1), (3, 1, 1, 2),
    ]  # fmt: skip
    items = [("A[I, J]", held, "a note"), "=", ("B", held[1:3, 1:], "")]
    seen = drawn(draw.matrices, items, 3)
    first, second = ["0", "0,1", "all", "1", "2"], ["0", "0,1", "all", "1"]
    assert seen.texts == [*first, "A[I, J]", "a note", "=", *second, "B"]
    colors = {0: [WHITE], 1: [BLUE], 2: [ORANGE], 3: [BLUE, ORANGE],
              4: [draw.color(2)], 7: [draw.EVERYONE]}  # fmt: skip
    left, top = min(b.x for b in seen.boxes), min(b.y for b in seen.boxes)
    for i, row in enumerate(held.tolist()):
        for j, who in enumerate(row):
            assert seen.in_square(left + j, top + i) == colors[who], (i, j)
    sizes = extents(seen.figure, seen.words[:5])
    to_units = seen.ax.transData.inverted()
    middles = (1, 1), (2.5, 1), (1, 2.5), (2.5, 2.5), (0.5, 3.5)
    for word, size, (x, y) in zip(seen.words, sizes, middles):
        assert word.get_position() == pytest.approx((left + x, top + y)), word
        across = 2 if word.get_text() == "all" else 1  # the narrowest block of the name
        assert abs(size.transformed(to_units).width) < across, word


@pytest.mark.parametrize("ranks", [[2], [0, 1], [3, 0, 2], [0, 1, 2, 3]])
def test_a_box_of_several_ranks_has_diagonal_bands(ranks):
    def one_box():
        draw.box(draw.blank(4, 4, 1), 1, 1, 2, 1, ranks, everyone=5)

    seen = drawn(one_box)
    for i, rank in enumerate(ranks):
        middle = (i + 0.5) / len(ranks)  # on the way from one corner to the other
        assert seen.under(1 + 2 * middle, 1 + middle)[-1] == draw.color(rank), i
    if len(ranks) > 1:  # the other two corners lie on one band or border
        assert seen.under(2.5, 1.1)[-1] == seen.under(1.2, 1.75)[-1]


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
    bar = next(p for p in seen if p.ax.get_ylabel() == "difference")
    bar.figure.canvas.draw()
    ticks = [float(text) for text in Panel(bar.ax).ticks]
    assert ticks == pytest.approx(bar.ax.get_yticks(), abs=1e-12)


def test_terms_share_a_scale():
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    *maps, _ = panels(draw.terms, [one, two], one + two, ["a", "b", "sum"])
    images = [p.ax.images[0] for p in maps]
    assert torch.allclose(torch.tensor(images[2].get_array()), one + two)
    assert len({image.get_clim() for image in images}) == 1
    assert [p.texts for p in maps] == [["+"], ["="], []]
    frames = [shade(p.ax.spines["left"].get_edgecolor()) for p in maps[:2]]
    assert frames == [BLUE, ORANGE]


def test_colours_of_values_are_no_ranks_colours():
    apart = lambda a, b: max(abs(x - y) for x, y in zip(to_rgb(a), to_rgb(b)))
    shades = [draw.VALUES(i / 20)[:3] for i in range(21) if i != 10]
    closest = min((apart(s, c), c) for s in shades for c in draw.COLORS[:7])
    assert closest[0] > 0.12, closest
    below, above = draw.VALUES(0.1), draw.VALUES(0.9)
    assert above[2] - below[2] > 0.3  # in blue, which most colour-blind people see


@pytest.mark.parametrize("backward", [False, True])
def test_flow_shows_who_sends(backward):
    stages = [
        {"name": "x", "boxes": ["[2, 4]", "[3, 4]"]},
        {"name": "f", "does": "identity", "moved": 0},
        {"name": "g", "does": "all-reduce", "moved": 1234},
    ]
    seen = drawn(draw.flow, stages, 2, "way", backward)
    said = {"way", "x", "[2, 4]", "[3, 4]", "g", "all-reduce\npayload\n1,234 bytes"}
    assert said <= set(seen.texts)
    nothing, much = seen.ax.lines
    assert (nothing.get_linestyle(), much.get_linestyle()) == (":", "-")
    assert nothing.get_linewidth() < much.get_linewidth()
    assert seen.colors == [BLUE, ORANGE]
    arrows = [t for t in seen.ax.texts if hasattr(t, "arrow_patch")]
    assert [a.xy[0] < a.xyann[0] for a in arrows] == [backward] * 2


def test_bars_have_their_lengths_and_marks():
    values = {"one": [10.0, 20.0], "two": [5.0, 1.0]}
    seen = drawn(draw.bars, values, ["a", "b"], {"one": 30, "two": 7}, "bytes")
    assert [(b.x, b.width) for b in seen.boxes] == [(0, 10), (10, 20), (0, 5), (5, 1)]
    assert [xs[0] for xs, _ in seen.lines] == [30, 7]
    assert seen.texts == ["30", "6"] and seen.ticks == ["one", "two"]
    assert sorted(seen.legend) == ["a", "b", "predicted"]


def test_timeline_draws_each_span():
    spans = [(0, "forward", 5.0, 7.0), (1, "backward", 6.0, 9.0), (1, "forward", 9, 10)]
    seen = drawn(draw.timeline, spans)
    assert seen.spans == [(0, 2, BLUE), (1, 3, ORANGE), (4, 1, ORANGE)]
    one, other, again = [p.get_hatch() for p in seen.filled]
    assert one == again != other


def test_fit_draws_points_and_line():
    points, name = [(10, 21.0), (1000, 2001.0)], "all-reduce"
    seen = drawn(draw.fit, {name: points}, {name: (1, 2)}, "bytes", "µs")
    dots, (xs, ys) = seen.lines
    assert [*zip(*dots)] == points
    assert ys == pytest.approx([1 + 2 * x for x in xs])
    assert min(xs) == 10 and max(xs) == pytest.approx(1000)
