"""The pictures of notebook 05 show the data they are given."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from pictures import BLUE, ORANGE, WHITE, draw, drawn, legible, panels, shade

AXES = "pp", "dp", "tp"
GREY = draw.PARTS[2].upper()


def a_mesh(P, D, T) -> list[dict[str, list[int]]]:
    """Each rank's groups, as the lesson lays ranks out."""
    ranks = torch.arange(P * D * T).view(P, D, T)
    places = [(p, d, t) for p in range(P) for d in range(D) for t in range(T)]
    return [
        dict(pp=ranks[:, d, t].tolist(), dp=ranks[p, :, t].tolist(),
             tp=ranks[p, d].tolist())
        for p, d, t in places
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1), (1, 2, 3)])
def test_cubes_join_the_ranks_of_each_group(sizes):
    groups = a_mesh(*sizes)
    seen = drawn(draw.cubes, groups, AXES)
    numbers = [t for t in seen.words if t.get_text().isdigit()]
    found = [int(t.get_text()) for t in numbers]
    assert sorted(found) == sorted([*range(len(groups))] * 3)
    at = {}  # place → (panel, rank)
    for i, (text, rank) in enumerate(zip(numbers, found)):
        at[text.get_position()] = i // len(groups), rank
        assert seen.under(*text.get_position())[-1] == draw.color(rank)
    joined = [], [], []
    for line in seen.ax.lines:
        points = [tuple(point) for point in line.get_xydata().tolist()]
        panel, _ = at[points[0]]
        if line.get_linewidth() > 3:
            joined[panel].append([at[point] for point in points])
            for (x0, y0), (x1, y1) in pairwise(points):
                ways = (y0 == y1), (x0 == x1), x0 < x1 and y0 > y1
                assert ways[panel], "tp runs across, dp down, pp into the distance"
    for panel, axis in enumerate(reversed(AXES)):
        wanted = sorted({tuple(group[axis]) for group in groups})
        lines = [[(panel, rank) for rank in line] for line in wanted]
        assert sorted(joined[panel]) == lines
        assert (
            " ".join(f"[{' '.join(map(str, line))}]" for line in wanted) in seen.texts
        )
    assert [t for t in seen.texts if t in AXES] == ["tp", "dp", "pp"]


def test_holdings_have_a_box_where_a_rank_holds_something():
    heads = [f"rank {rank}\nstage {rank // 4}" for rank in range(7)]
    embed, head = [1024, 0, 0, 0, 0, 10, 20], [0, 1500, 0, 0, 0, 0, 0]
    seen = drawn(draw.holdings, [("embed", 2048, embed), ("head", 300, head)], heads)
    assert seen.texts == ["one\nprocess", *heads, "embed", "2,048", "1,024", "10", "20",
                          "head", "300", "1,500"]  # fmt: skip
    fills = [WHITE, BLUE, draw.color(5), draw.color(6), WHITE, ORANGE]
    assert seen.colors == fills
    wanted = [
        ("2,048", "embed", "one\nprocess", "black"),
        ("1,024", "embed", heads[0], "black"), ("10", "embed", heads[5], "black"),
        ("20", "embed", heads[6], "white"), ("300", "head", "one\nprocess", "black"),
        ("1,500", "head", heads[1], "black"),
    ]  # fmt: skip
    inks = {t.get_text(): t.get_color() for t in seen.words}
    for (number, row, column, ink), fill in zip(wanted, fills):
        assert seen.under(*seen.at[number]) == [fill] and inks[number] == ink, number
        assert seen.at[number][1] == seen.at[row][1]
        assert abs(seen.at[number][0] - seen.at[column][0]) < 0.1


SPANS = [  # stage, what, micro-batch, start, end: two stages, two micro-batches
    (0, "forward", 0, 10.0, 10.1), (0, "forward", 1, 10.1, 10.2),
    (0, "backward", 0, 10.5, 10.7), (0, "backward", 1, 10.8, 11.0),
    (1, "forward", 0, 10.1, 10.2), (1, "backward", 0, 10.2, 10.4),
    (1, "forward", 1, 10.4, 10.5), (1, "backward", 1, 10.5, 10.7),
]  # fmt: skip


def test_waiting_is_what_is_not_computing():
    assert draw.computing(SPANS) == pytest.approx((10, 11, 0.4), abs=1e-9, rel=0)


def test_pipelines_show_each_micro_batch_and_the_bubble():
    half = [(s, w, i, (a - 9) / 2, (b - 9) / 2) for s, w, i, a, b in SPANS]
    one = [span for span in SPANS if span[2] == 0]  # of two micro-batches
    seen = panels(draw.pipelines, {"A": SPANS, "B": half, "C": one})
    said = "{}: waiting {} of the time, predicted (P−1)/(M+P−1) = {}".format
    assert [panel.ax.get_title(loc="left") for panel in seen] == [
        said("A", "0.400", "0.333"), said("B", "0.400", "0.333"),
        said("C", "0.571", "0.500"),
    ]  # fmt: skip
    colors = [draw.color(stage) for stage, *_ in SPANS]
    for panel, ms in zip(seen, (1000, 500)):
        assert panel.colors == [GREY, GREY, *colors] and panel.ticks == [
            "stage 0",
            "stage 1",
        ]
        found = [[b.x, b.width, b.y + b.height / 2] for b in panel.boxes]
        wanted = [[0, ms, 0], [0, ms, 1]]
        wanted += [[ms * (a - 10), ms * (b - a), stage] for stage, _, _, a, b in SPANS]
        assert np.allclose(found, wanted, rtol=0, atol=1e-6)
        hatched = [bool(p.get_hatch()) for p in panel.filled[2:]]
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


@pytest.mark.parametrize("stage, wanted", [
    (0, [(0, 0), (0, 1), (0.1, 2), (0.7, 1), (1, 0)]),
    (1, [(0, 0), (0.1, 1), (0.4, 0), (0.4, 1), (0.7, 0)]),
])  # fmt: skip
def test_a_stage_holds_from_a_forward_to_its_backward(stage, wanted):
    found = draw.held_over_time(SPANS, stage)
    assert [(round(when, 6), n) for when, n in found] == wanted


def test_in_flight_is_a_step_line_beside_the_prediction():
    runs, predicted = {"A": SPANS, "B": SPANS}, {"A": [2, 1], "B": [4, 4]}
    seen = panels(draw.in_flight, runs, predicted)
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


def test_weighted_bars_are_as_wide_as_what_they_count():
    parts = [(0, 3, 5.0), (1, 9, 2.0), (1, 8, 2.5)]
    lines = {"all": 2.65, "means": 3.1}
    seen = drawn(draw.weighted, parts, lines, "tokens", "loss")
    assert seen.spans == [(0, 3, BLUE), (3, 9, ORANGE), (12, 8, ORANGE)]
    assert [b.height for b in seen.boxes] == [5, 2, 2.5]
    assert seen.texts == ["0", "rank 1", "rank 1"]
    assert [ys[0] for _, ys in seen.lines] == [2.65, 3.1]
    one, other = [line.get_linestyle() for line in seen.ax.lines]
    assert one != other and seen.legend == ["all: 2.6500", "means: 3.1000"]
    assert seen.ax.get_xlim() == (0, 20)


def test_ragged_batches_show_text_padding_and_what_was_cut_off():
    one = torch.tensor([[97, 98, 256, 256], [99, 256, 256, 256]])
    two = torch.tensor([[100, 101, 102, 256], [103, 256, 256, 256]])
    parts = [[(one, 2, [0, 1], ["8 bytes", "16 bytes"])], [(two, 3, [4, 5], ["x"])]]
    seen = drawn(draw.ragged, parts, 256)
    assert seen.texts == [
        "replica 0, micro-batch 1", *"abc", "0", "1", "→", "8 bytes, then 16 bytes",
        "replica 1, micro-batch 1", *"defg", "4", "5", "→", "x",
    ]  # fmt: skip
    for text in "abcdefg0145":
        fill = draw.color(int(text)) if text.isdigit() else GREY
        assert seen.under(*seen.at[text])[-1] == fill, text
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
    legible(drawn(draw.cubes, a_mesh(2, 2, 2), AXES))
    legible(drawn(draw.holdings, rows, heads))
    legible(drawn(draw.ragged, batches, 256))
