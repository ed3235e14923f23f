"""The pictures of notebook 05 show the data they are given."""

from itertools import pairwise

import pytest
import torch
from matplotlib.colors import to_hex
from pictures import boxes, color_seen, draw, drawn, texts

AXES = "pp", "dp", "tp"


def a_mesh(P, D, T) -> list[dict[str, list[int]]]:
    """Each rank's groups, as the lesson lays ranks out."""
    ranks = torch.arange(P * D * T).view(P, D, T)
    places = [(p, d, t) for p in range(P) for d in range(D) for t in range(T)]
    return [
        dict(pp=ranks[:, d, t].tolist(), dp=ranks[p, :, t].tolist(),
             tp=ranks[p, d].tolist())
        for p, d, t in places
    ]  # fmt: skip


def shade(artist) -> str:
    return to_hex(artist.get_facecolor()).upper()


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1), (1, 2, 3)])
def test_cubes_join_the_ranks_of_each_group(sizes):
    groups = a_mesh(*sizes)
    ranks, figure = len(groups), drawn(draw.cubes, groups, AXES)
    ax = figure.axes[0]
    numbers = [t for t in ax.texts if t.get_text().isdigit()]
    assert sorted(int(t.get_text()) for t in numbers) == sorted([*range(ranks)] * 3)
    at = {}  # (panel, place) → rank
    for i, text in enumerate(numbers):
        at[(i // ranks, *text.get_position())] = int(text.get_text())
        fill = color_seen(ax, *text.get_position())
        assert fill == draw.color(int(text.get_text()))
    thick = {0: [], 1: [], 2: []}
    for line in ax.lines:
        points = [tuple(map(float, p)) for p in line.get_xydata()]
        (panel,) = {p for p, *place in at if tuple(place) == points[0]}
        if line.get_linewidth() > 3:
            thick[panel].append([at[(panel, *point)] for point in points])
            for (x0, y0), (x1, y1) in pairwise(points):
                ways = (y0 == y1), (x0 == x1), x0 < x1 and y0 > y1
                assert ways[panel], "tp runs across, dp down, pp into the distance"
    for panel, axis in enumerate(reversed(AXES)):
        wanted = sorted({tuple(group[axis]) for group in groups})
        assert sorted(map(tuple, thick[panel])) == wanted
        listed = " ".join(f"[{' '.join(map(str, line))}]" for line in wanted)
        assert listed in texts(figure)
    assert [t for t in texts(figure) if t in AXES] == ["tp", "dp", "pp"]


def test_what_stands_on_dark_colours_is_white():
    counts = [0, 0, 0, 0, 0, 10, 20]
    figure = drawn(draw.holdings, [("all", 30, counts)], ["rank"] * 7)
    found = {t.get_text(): t.get_color() for t in figure.axes[0].texts}
    assert [found[text] for text in ("30", "10", "20")] == [
        "black", draw.ink(draw.color(5)), "white",
    ]  # fmt: skip


def test_holdings_have_a_box_where_a_rank_holds_something():
    rows = [("embed", 2048, [1024, 0]), ("head", 300, [0, 1500])]
    figure = drawn(draw.holdings, rows, ["rank 0\nstage 0", "rank 1\nstage 1"])
    wanted = ["one\nprocess", "rank 0\nstage 0", "rank 1\nstage 1", "embed", "2,048",
              "1,024", "head", "300", "1,500"]  # fmt: skip
    assert texts(figure) == wanted
    ax, white = figure.axes[0], "#FFFFFF"
    fills = [fill for *_, fill in boxes(ax)]
    assert fills == [white, draw.color(0), white, draw.color(1)]
    at = {t.get_text(): t.get_position() for t in ax.texts}
    assert color_seen(ax, *at["1,024"]) == draw.color(0)
    assert color_seen(ax, *at["1,500"]) == draw.color(1)
    assert at["1,024"][1] == at["embed"][1] and at["1,500"][1] == at["head"][1]
    for number, head in (("1,024", "rank 0\nstage 0"), ("1,500", "rank 1\nstage 1")):
        assert abs(at[number][0] - at[head][0]) < 0.1


SPANS = [  # stage, what, micro-batch, start, end: two stages, two micro-batches
    (0, "forward", 0, 10.0, 10.1), (0, "forward", 1, 10.1, 10.2),
    (0, "backward", 0, 10.5, 10.7), (0, "backward", 1, 10.8, 11.0),
    (1, "forward", 0, 10.1, 10.2), (1, "backward", 0, 10.2, 10.4),
    (1, "forward", 1, 10.4, 10.5), (1, "backward", 1, 10.5, 10.7),
]  # fmt: skip


def test_waiting_is_what_is_not_computing():
    begin, end, idle = draw.computing(SPANS)
    assert (begin, end) == (10.0, 11.0) and abs(idle - 0.4) < 1e-9


def test_pipelines_show_each_micro_batch_and_the_bubble():
    half = [(s, w, i, (a - 9) / 2, (b - 9) / 2) for s, w, i, a, b in SPANS]
    one = [span for span in SPANS if span[2] == 0]  # of two micro-batches
    figure = drawn(draw.pipelines, {"A": SPANS, "B": half, "C": one})
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        f"{name}: waiting {waiting} of the time, predicted (P−1)/(M+P−1) = {predicted}"
        for name, waiting, predicted in (
            ("A", "0.400", "0.333"), ("B", "0.400", "0.333"), ("C", "0.571", "0.500"),
        )
    ]  # fmt: skip
    for ax, scale in zip(figure.axes, (1000, 500)):
        bars = [p for p in ax.patches if shade(p) != draw.PARTS[2].upper()]
        for bar, text, (stage, what, i, start, end) in zip(bars, ax.texts, SPANS):
            assert abs(bar.get_x() - scale * (start - 10)) < 1e-6
            assert abs(bar.get_width() - scale * (end - start)) < 1e-6
            assert round(bar.get_y() + bar.get_height() / 2) == stage
            assert shade(bar) == draw.color(stage)
            assert bool(bar.get_hatch()) == (what == "backward")
            assert text.get_text() == str(i + 1)
            middle = scale * ((start + end) / 2 - 10), stage
            assert text.get_position() == pytest.approx(middle)
        assert len(bars) == len(ax.texts) == len(SPANS)
        back = [p for p in ax.patches if p not in bars]
        assert [round(p.get_y() + p.get_height() / 2) for p in back] == [0, 1]
        assert all(abs(p.get_width() - scale) < 1e-6 for p in back)
        assert all(p.get_zorder() <= b.get_zorder() for p in back for b in bars)
        names = [t.get_text() for t in ax.get_yticklabels()]
        assert names == ["stage 0", "stage 1"]
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert names == ["forward", "backward", "waiting: the bubble"]
    hatches = [bool(h.get_hatch()) for h in figure.legends[0].get_patches()]
    assert hatches == [False, True, False]


def test_a_stage_holds_from_a_forward_to_its_backward():
    found = [(round(when, 6), n) for when, n in draw.held_over_time(SPANS, 0)]
    assert found == [(0, 0), (0, 1), (0.1, 2), (0.7, 1), (1, 0)]
    found = [(round(when, 6), n) for when, n in draw.held_over_time(SPANS, 1)]
    assert found == [(0, 0), (0.1, 1), (0.4, 0), (0.4, 1), (0.7, 0)]


def test_in_flight_is_a_step_line_beside_the_prediction():
    runs, predicted = {"A": SPANS, "B": SPANS}, {"A": [2, 1], "B": [4, 4]}
    figure = drawn(draw.in_flight, runs, predicted)
    assert len(figure.axes) == 4
    for k, ax in enumerate(figure.axes):
        stage, name = k // 2, "AB"[k % 2]
        (area,) = ax.collections
        assert shade_of(area) == draw.color(stage)
        corners = area.get_paths()[0].vertices
        assert corners[:, 1].max() == (2, 1)[stage]
        assert abs(corners[:, 0].max() - 1000) < 1e-6  # ms
        (limit,) = ax.lines
        assert set(limit.get_ydata()) == {predicted[name][stage]}
        assert [t.get_text() for t in ax.texts] == [f"at most {(2, 1)[stage]}"]
        assert ax.get_ylim()[1] > 4
    names = [ax.get_ylabel() for ax in figure.axes]
    assert names == ["stage 0", "", "stage 1", ""]
    assert [ax.get_title() for ax in figure.axes] == ["A", "B", "", ""]


def shade_of(area) -> str:
    return to_hex(area.get_facecolor()[0]).upper()


def test_weighted_bars_are_as_wide_as_what_they_count():
    parts = [(0, 3, 5.0), (1, 9, 2.0), (1, 8, 2.5)]
    lines = {"all": 2.65, "means": 3.1}
    figure = drawn(draw.weighted, parts, lines, "tokens", "loss")
    ax = figure.axes[0]
    bars = [(p.get_x(), p.get_width(), p.get_height(), shade(p)) for p in ax.patches]
    blue, orange = draw.color(0), draw.color(1)
    assert bars == [(0, 3, 5, blue), (3, 9, 2, orange), (12, 8, 2.5, orange)]
    assert [t.get_text() for t in ax.texts] == ["0", "rank 1", "rank 1"]
    assert [line.get_ydata()[0] for line in ax.lines] == [2.65, 3.1]
    assert len({line.get_linestyle() for line in ax.lines}) == 2
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert names == ["all: 2.6500", "means: 3.1000"]
    assert ax.get_xlim() == (0, 20)


def test_ragged_batches_show_text_padding_and_what_was_cut_off():
    one = torch.tensor([[97, 98, 256, 256], [99, 256, 256, 256]])
    two = torch.tensor([[100, 101, 102, 256], [103, 256, 256, 256]])
    parts = [[(one, 2, [0, 1], ["8 bytes", "16 bytes"])], [(two, 3, [4, 5], ["x"])]]
    figure = drawn(draw.ragged, parts, 256)
    ax = figure.axes[0]
    assert texts(figure) == [
        "replica 0, micro-batch 1", *"abc", "0", "1", "→", "8 bytes, then 16 bytes",
        "replica 1, micro-batch 1", *"defg", "4", "5", "→", "x",
    ]  # fmt: skip
    tokens = [p for p in ax.patches if shade(p) in ("#FFFFFF", draw.PARTS[2].upper())]
    tokens = [p for p in tokens if p.get_fill()]
    grey = [shade(p) == draw.PARTS[2].upper() for p in tokens]
    dotted = [p.get_linestyle() in (":", "dotted") for p in tokens]
    yes, no = True, False
    assert grey == [
        yes,
        yes,
        no,
        no,
        yes,
        no,
        no,
        no,
        yes,
        yes,
        yes,
        no,
        yes,
        *[no] * 3,
    ]
    assert dotted == [no, no, yes, yes] * 2 + [no, no, no, yes] * 2
    for text in ax.texts:
        if text.get_text() in ("0", "1", "4", "5"):
            fill = color_seen(ax, *text.get_position())
            assert fill == draw.color(int(text.get_text()))
        if text.get_text() in "abcdefg":
            assert color_seen(ax, *text.get_position()) == draw.PARTS[2].upper()
    assert [p.get_xy()[0] for p in tokens[:4]] == sorted(
        p.get_xy()[0] for p in tokens[:4]
    )


def test_words_neither_overlap_nor_leave_the_picture():
    groups = a_mesh(2, 2, 2)
    rows = [(f"layers.{i}", 123456, [61728, 61728, 0, 0]) for i in range(4)]
    heads = [f"rank {i}\nstage {i // 2}" for i in range(4)]
    text = torch.full((2, 12), 100)
    said = ["24 bytes: [2, 2, 12]", "384 bytes"]
    batches = [[(text, 12, [0, 1], said)] * 2] * 2
    pictures = [(draw.cubes, groups, AXES), (draw.holdings, rows, heads)]
    for function, *args in [*pictures, (draw.ragged, batches, 256)]:
        figure = drawn(function, *args)
        figure.canvas.draw()
        width, height = figure.get_size_inches() * figure.dpi
        words = [t for t in figure.axes[0].texts if t.get_text()]
        found = [t.get_window_extent() for t in words]
        for i, (word, one) in enumerate(zip(words, found)):
            name = function.__name__, word.get_text()
            assert 0 <= one.x0 and one.x1 <= width, name
            assert 0 <= one.y0 and one.y1 <= height, name
            for other, two in zip(words[i + 1 :], found[i + 1 :]):
                assert not one.overlaps(two), (*name, other.get_text())
