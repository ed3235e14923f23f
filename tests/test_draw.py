"""The pictures show the data they are given: numbers, colours, lengths, places."""

import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from pictures import boxes, color_seen, colors_at, draw, drawn, luminance, texts


def test_colours_can_be_told_apart_and_written_on():
    assert len(set(draw.COLORS)) == 8
    for rank in range(8):
        back, front = luminance(draw.color(rank)), luminance(draw.ink(draw.color(rank)))
        light, dark = max(back, front) + 0.05, min(back, front) + 0.05
        assert light / dark > 4.5, rank  # what WCAG asks of text


def test_bits():
    assert [draw.bits(n) for n in (0, 1, 5, 8)] == [[], [0], [0, 2], [3]]


def test_places_are_found_by_value():
    full = torch.randn(4, 6)
    wanted = torch.tensor([[1] * 3 + [2] * 3] * 4)
    assert torch.equal(draw.places(full, list(full.chunk(2, 1))), wanted)
    rows = draw.places(full, [full[2:], full[:2], full])
    assert rows[:, 0].tolist() == [6, 6, 5, 5]
    assert draw.places(full[0], [full[0, :3], full[0, 3:]]).tolist() == [
        [1] * 3 + [2] * 3
    ]
    with pytest.raises(ValueError, match="rank 1's piece is nowhere"):
        draw.places(full, [full, full + 0.1])
    with pytest.raises(ValueError, match="rank 0's piece is nowhere"):
        draw.places(full, [torch.zeros(5, 6)])


def test_rows_show_every_value_in_its_colour():
    values = [torch.tensor([7.0, 8.5]), None, torch.tensor([-3.0, 126.0])]
    who = [torch.tensor([1, 2]), None, torch.tensor([5, 7])]
    figure = drawn(draw.rows, [[("before", values, who)], [("after", values, who)]])
    shown = texts(figure)
    one = ["rank 0", "rank 1", "rank 2", "before", "7", "8.50", "–", "-3", "126"]
    assert shown == one + ["after" if t == "before" else t for t in one]
    ax = figure.axes[0]
    place = {t.get_text(): t.get_position() for t in ax.texts}
    corner = lambda text: (place[text][0] - 0.5, round(place[text][1] - 0.1) - 0.3)
    for text, ranks in (("7", [0]), ("8.50", [1]), ("-3", [0, 2]), ("126", [0, 1, 2])):
        x, y = place[text]
        x, y = x - 0.5, y - (0.5 if len(ranks) == 1 else 0.37)
        found = [c for c in colors_at(ax, x, y) if c != "#FFFFFF"]
        assert found == [draw.color(r) for r in ranks], (text, corner(text))


def test_rows_put_an_arrow_between_moments_only():
    column = ("x", [torch.ones(1)], [torch.ones(1)])
    assert texts(drawn(draw.rows, [[column] * 3])).count("→") == 2
    assert "→" not in texts(drawn(draw.rows, [[column] * 3], arrow=False))


def test_matrices_are_coloured_by_holder():
    held = torch.tensor([[1, 2, 3], [7, 4, 0]])
    figure = drawn(
        draw.matrices, [("A[I, J]", held, "a note"), "=", ("B", held[:1], "")], 3
    )
    first = ["0", "1", "0,1", "all", "2", "", "A[I, J]", "a note", "="]
    assert texts(figure) == [*filter(None, first), "0", "1", "0,1", "B"]
    ax = figure.axes[0]
    left, top = min(b[0] for b in boxes(ax)), min(b[1] for b in boxes(ax))
    wanted = [[[0], [1], [0, 1]], ["everyone", [2], []]]
    for i, line in enumerate(wanted):
        for j, ranks in enumerate(line):
            colors = [draw.color(r) for r in ranks] if ranks != "everyone" else []
            if ranks == "everyone":
                colors = [draw.EVERYONE]
            assert colors_at(ax, left + j, top + i) == (colors or ["#FFFFFF"]), (i, j)


@pytest.mark.parametrize("ranks", [[2], [0, 1], [3, 0, 2], [0, 1, 2, 3]])
def test_a_box_of_several_ranks_has_diagonal_bands(ranks):
    ax = draw.blank(4, 4, 1)
    draw.box(ax, 1, 1, 2, 1, ranks, everyone=5)
    for i, rank in enumerate(ranks):
        middle = (i + 0.5) / len(ranks)  # on the way from one corner to the other
        assert color_seen(ax, 1 + 2 * middle, 1 + middle) == draw.color(rank), i
    if len(ranks) > 1:  # the other two corners lie on one band or border
        assert color_seen(ax, 2.5, 1.1) == color_seen(ax, 1.2, 1.75)


def test_blocks_say_who_holds_them():
    held = torch.tensor([[1, 1, 3], [1, 1, 3], [7, 7, 1]])
    assert draw.blocks(held) == [
        (0, 0, 2, 2), (0, 2, 2, 1), (2, 0, 1, 2), (2, 2, 1, 1)
    ]  # fmt: skip
    random = torch.randint(0, 3, (6, 7), generator=torch.Generator().manual_seed(0))
    times = torch.zeros(6, 7)
    for i, j, down, across in draw.blocks(random):
        block = random[i : i + down, j : j + across]
        assert (block == random[i, j]).all()
        times[i : i + down, j : j + across] += 1
    assert (times == 1).all()
    figure = drawn(draw.matrices, [("A", held, "")], 3)
    ax = figure.axes[0]
    left, top = min(b[0] for b in boxes(ax)), min(b[1] for b in boxes(ax))
    at = {t.get_text(): t.get_position() for t in ax.texts}
    wanted = {"0,1": (2.5, 1), "all": (1, 2.5)}
    for text, (x, y) in wanted.items():
        assert at[text] == pytest.approx((left + x, top + y)), text
    for t in ax.texts:
        if t.get_text() in ("0", "0,1", "all"):  # no wider than its block of 1 or 2
            box = t.get_window_extent().transformed(ax.transData.inverted())
            assert abs(box.width) < (2 if t.get_text() == "all" else 1), t


def test_heat_maps_hold_the_tensors():
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    figure = drawn(draw.compare, {"up": (one, two), "down": (two, two)})
    maps = [ax.images[0] for ax in figure.axes if ax.images and not ax.get_label()]
    shown = [torch.tensor(image.get_array()) for image in maps]
    for got, wanted in zip(shown, (one, two, two - one, two, two, two - two)):
        assert torch.allclose(got, wanted)
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    off = ((two - one).abs().max() / one.abs().max()).item()
    assert titles[2] == f"difference ≤ {off:.2g} · max" and "≤ 0 ·" in titles[5]
    limit = torch.stack([one, two]).abs().max().item()  # so neither is clipped
    for image in maps[:2]:
        assert image.get_clim() == pytest.approx((-limit, limit))
    rows = [ax for ax in figure.axes if ax.images and not ax.get_label()]
    assert [ax.get_ylabel() for ax in rows[:3]] == ["up\ndim 0: 3", "", ""]
    assert {ax.get_xlabel() for ax in rows} == {"dim 1: 4"}


def test_ticks_of_a_difference_are_exact():
    one = torch.tensor([[0.5, -0.25]])
    figure = drawn(draw.compare, {"up": (one, 2 * one)})
    figure.canvas.draw()
    bar = next(ax for ax in figure.axes if ax.get_ylabel() == "difference")
    for value, label in zip(bar.get_yticks(), bar.get_yticklabels()):
        assert float(label.get_text()) == pytest.approx(value, abs=1e-12)


def test_colours_of_values_are_no_ranks_colours():
    apart = lambda a, b: max(abs(x - y) for x, y in zip(to_rgb(a), to_rgb(b)))
    shades = [draw.VALUES(i / 20)[:3] for i in range(21) if i != 10]
    closest = min((apart(s, c), c) for s in shades for c in draw.COLORS[:7])
    assert closest[0] > 0.12, closest
    below, above = draw.VALUES(0.1), draw.VALUES(0.9)
    assert above[2] - below[2] > 0.3  # in blue, which most colour-blind people see


def test_terms_share_a_scale():
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    figure = drawn(draw.terms, [one, two], one + two, ["a", "b", "sum"])
    maps = [ax.images[0] for ax in figure.axes if ax.images]
    assert torch.allclose(torch.tensor(maps[2].get_array()), one + two)
    assert len({image.get_clim() for image in maps[:3]}) == 1
    assert texts(figure) == ["+", "="]
    frames = [to_hex(a.spines["left"].get_edgecolor()).upper() for a in figure.axes[:2]]
    assert frames == [draw.color(0), draw.color(1)]


def test_flow_shows_who_sends():
    stages = [
        {"name": "x", "boxes": ["[2, 4]", "[3, 4]"]},
        {"name": "f", "does": "identity", "moved": 0},
        {"name": "g", "does": "all-reduce", "moved": 1234},
    ]
    for backward in (False, True):
        figure = drawn(draw.flow, stages, 2, "way", backward)
        shown = texts(figure)
        for text in (
            "way",
            "x",
            "[2, 4]",
            "[3, 4]",
            "g",
            "all-reduce\npayload\n1,234 bytes",
        ):
            assert text in shown
        ax = figure.axes[0]
        assert [line.get_linestyle() for line in ax.lines] == [":", "-"]
        assert ax.lines[0].get_linewidth() < ax.lines[1].get_linewidth()
        assert [b[-1] for b in boxes(ax)] == [draw.color(0), draw.color(1)]
        arrows = [t for t in ax.texts if hasattr(t, "arrow_patch")]
        assert all((a.xy[0] < a.xyann[0]) == backward for a in arrows)
        assert len(arrows) == 2


def test_bars_have_their_lengths_and_marks():
    values = {"one": [10.0, 20.0], "two": [5.0, 1.0]}
    figure = drawn(draw.bars, values, ["a", "b"], {"one": 30, "two": 7}, "bytes")
    ax = figure.axes[0]
    assert [(b[0], b[2]) for b in boxes(ax)] == [(0, 10), (10, 20), (0, 5), (5, 1)]
    assert [line.get_xdata()[0] for line in ax.lines] == [30, 7]
    assert texts(figure) == ["30", "6"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["one", "two"]
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert sorted(names) == ["a", "b", "predicted"]


def test_timeline_draws_each_span():
    spans = [(0, "forward", 5.0, 7.0), (1, "backward", 6.0, 9.0), (1, "forward", 9, 10)]
    figure = drawn(draw.timeline, spans)
    bars = [(b[0], b[2], b[-1]) for b in boxes(figure.axes[0])]
    assert bars == [
        (0, 2, draw.color(0)),
        (1, 3, draw.color(1)),
        (4, 1, draw.color(1)),
    ]
    hatches = [p.get_hatch() for p in figure.axes[0].patches]
    assert hatches[0] == hatches[2] != hatches[1]


def test_fit_draws_points_and_line():
    points = [(10, 21.0), (1000, 2001.0)]
    figure = drawn(
        draw.fit, {"all-reduce": points}, {"all-reduce": (1, 2)}, "bytes", "µs"
    )
    dots, line = figure.axes[0].lines
    assert list(zip(*dots.get_data())) == points
    for x, y in zip(*line.get_data()):
        assert y == pytest.approx(1 + 2 * x)
    assert min(line.get_xdata()) == 10 and max(line.get_xdata()) == pytest.approx(1000)
