"""The pictures of notebook 02 show the data they are given."""

import pytest
import torch
from matplotlib.colors import to_hex
from pictures import boxes, colors_at, draw, drawn, texts


def test_heads_are_named_by_their_values():
    full = {"q": list(torch.randn(3, 2, 4)), "k": list(torch.randn(2, 2, 4))}
    pieces = [full["k"][1].clone(), full["q"][2], full["q"][0] + 0.1, torch.ones(4)]
    assert draw.named(pieces, full) == ["k1", "q2", "?", "?"]


@pytest.mark.parametrize("keys, joins", [
    (["k0", "k1"], [("q0", "k0"), ("q1", "k1")]),
    (["k0"], [("q0", "k0"), ("q1", "k0")]),
])  # fmt: skip
def test_heads_stand_on_their_rank_and_lines_join_what_meets(keys, joins):
    lanes = [[["q0", "q1"], keys], [["q2", "q3"], ["x"] * len(keys)]]
    figure = drawn(draw.heads, lanes, ["queries", "keys"])
    ax = figure.axes[0]
    at = {t.get_text(): t.get_position() for t in ax.texts}
    assert {"queries", "keys", "rank 0", "rank 1", "q0", "q3", *keys} <= set(at)
    for rank, names in enumerate((["q0", "q1", *keys], ["q2", "q3"])):
        for name in names:
            x, y = at[name]
            under = [b for b in boxes(ax) if b[0] < x < b[0] + b[2]]
            under = [b[-1] for b in under if b[1] < y < b[1] + b[3]]
            assert under == [draw.color(rank)], name
    lines = [line.get_xdata() for line in ax.lines]
    ends = [[at[a][0], at[b][0]] for a, b in joins]
    assert [list(line) for line in lines[:2]] == ends and len(lines) == 4
    assert at["q0"][1] < at["k0"][1] and at["q0"][0] < at["q1"][0] < at["q2"][0]


def test_thick_lines_part_the_heads_of_a_matrix():
    wide, tall = torch.ones(2, 6), torch.ones(6, 2)
    items = [
        ("a", wide.long(), ""),
        "·",
        ("b", tall.long(), ""),
        ("c", tall.long(), ""),
    ]

    def both():
        draw.matrices(items, 2)
        draw.head_borders({0: (1, 2), 2: (0, 3)})

    ax = drawn(both).axes[0]
    a, _, c = [p for p in ax.patches if p.get_linewidth() == 1.6]
    (x, y), (left, top) = a.get_xy(), c.get_xy()
    assert [[list(v) for v in line.get_data()] for line in ax.lines] == [
        [[x + 2] * 2, [y, y + 2]], [[x + 4] * 2, [y, y + 2]],
        [[left, left + 2], [top + 3] * 2],
    ]  # fmt: skip


def test_masks_fill_what_is_kept_and_part_the_heads():
    whole = torch.tensor([[1, 0, 2, 2], [0, 1, 2, 0]])
    items = [("one", whole, "note", [0, 1]), ("rank 1", whole[:, 2:], "", [1])]
    figure = drawn(draw.masks, items, 2)
    ax = figure.axes[0]
    assert texts(figure) == ["one", "head 0", "head 1", "note", "rank 1", "head 1"]
    blue, orange, white = draw.color(0), draw.color(1), "#FFFFFF"
    wanted = [blue, white, orange, orange, white, blue, orange, white]
    assert [b[-1] for b in boxes(ax)] == [*wanted, orange, orange, orange, white]
    first = boxes(ax)[0]
    (line,) = ax.lines  # between the two heads of the first, none in the second
    assert list(line.get_xdata()) == [first[0] + 2] * 2
    assert list(line.get_ydata()) == [first[1], first[1] + 2]
    at = {t.get_text(): t.get_position()[0] for t in ax.texts[:3]}
    assert (at["head 0"], at["head 1"]) == (first[0] + 1, first[0] + 3)
    everyone = drawn(draw.masks, [("all", 3 * torch.eye(2).int(), "", [])], 2).axes[0]
    assert [b[-1] for b in boxes(everyone)] == [draw.EVERYONE, white, white] + [
        draw.EVERYONE
    ]
    assert not everyone.lines


def test_together_draws_spans_and_shades_where_all_are_in_the_call():
    spans = [(0, "attention", 5.0, 9.0), (1, "attention", 6.0, 9.5), (1, "MLP", 10, 12)]
    calls = [(0, "g", 7.0, 9.0), (1, "g", 8.0, 9.5)]
    figure = drawn(draw.together, spans, calls)
    ax = figure.axes[0]
    found = [b for b in boxes(ax) if b[-1] != "#C8C8C8"]
    black = "#000000"
    assert [(b[0], b[2], b[-1]) for b in found] == [
        (0, 4, draw.color(0)), (1, 3.5, draw.color(1)), (5, 2, draw.color(1)),
        (2, 2, black), (3, 1.5, black),
    ]  # fmt: skip
    (shade,) = [b for b in boxes(ax) if b[-1] == "#C8C8C8"]
    assert (shade[0], shade[2]) == (3, 1)  # rank 1 comes at 8, rank 0 leaves at 9
    assert texts(figure) == ["g"] and ax.texts[0].get_position()[0] == 3.5
    hatches = [p.get_hatch() for p in ax.patches[:3]]
    assert hatches[0] == hatches[1] != hatches[2]
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert names == ["attention", "MLP", "all-reduce", "all ranks are in it"]
    shown = [to_hex(p.get_facecolor()) for p in figure.legends[0].get_patches()]
    assert shown[2:] == ["#000000", "#c8c8c8"]
    assert not ax.lines
    figure = drawn(draw.together, spans, calls, 9.8)
    (line,) = figure.axes[0].lines
    assert line.get_xdata() == pytest.approx([4.8, 4.8])
    words = figure.axes[0].texts[1:]
    assert [(t.get_text().strip(), t.get_ha()) for t in words] == [
        ("forward", "right"), ("backward", "left"),
    ]  # fmt: skip
    assert all(t.get_position()[0] == pytest.approx(4.8) for t in words)


def test_memory_is_stacked_run_after_run():
    one = [{"seconds": 3 + t / 1000, "a": 10, "b": b} for t, b in ((0, 0), (4, 30))]
    two = [{"seconds": 9 + t / 1000, "a": 5, "b": b} for t, b in ((0, 2), (2, 1))]
    figure = drawn(draw.memory, {"one": one, "two": two}, ["a", "b"])
    ax = figure.axes[0]
    assert [text.split(" ")[:2] for text in texts(figure)] == [
        ["one:", "40"], ["two:", "7"],
    ]  # fmt: skip
    peaks = [(list(line.get_xdata()), line.get_ydata()[0]) for line in ax.lines]
    for (xs, y), (wanted, high) in zip(peaks, (([0, 4], 40), ([4.48, 6.48], 7))):
        assert xs == pytest.approx(wanted) and y == high
    fills = [to_hex(area.get_facecolor()[0]) for area in ax.collections]
    assert fills[0] == fills[2] != fills[1] == fills[3]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in ax.collections]
    assert tops == [10, 40, 5, 7]


@pytest.mark.parametrize("ms", [(1, 1000), (8, 12), (1000, 1), (5, 5, 5)])
def test_what_is_written_at_a_peak_stays_in_the_picture(ms):
    runs = {
        f"run {i}, without TP": [
            {"seconds": 0.0, "a": 1_000_000}, {"seconds": t / 1000, "a": 3_000_000},
        ]
        for i, t in enumerate(ms)
    }  # fmt: skip
    figure = drawn(draw.memory, runs, ["a"])
    figure.canvas.draw()
    frame = figure.axes[0].get_window_extent()
    assert len(figure.axes[0].texts) == len(ms)
    for text, line in zip(figure.axes[0].texts, figure.axes[0].lines):
        around = text.get_window_extent()
        assert frame.x0 <= around.x0 and around.x1 <= frame.x1, text
        assert line.get_color() == "black"  # red is for what is predicted
        ends = line.get_xdata()[0 if text.get_ha() == "left" else 1]
        assert text.get_position()[0] == ends


def test_sums_are_in_the_colours_of_those_who_bring_them():
    line = [(1.0, 1, "mine"), (2.0, 2, "yours"), (4.0, 3, "ours")]
    figure = drawn(draw.sums, {"one": [(7.5, 0, "all")], "two": line}, 2, "squares")
    ax = figure.axes[0]
    wanted = [draw.color(0), draw.color(1), draw.EVERYONE]
    found = [(b[0], b[2], b[-1]) for b in boxes(ax)]
    assert found[0] == (0, 7.5, "#FFFFFF")
    assert found[1:] == list(zip((0, 1, 3), (1, 2, 4), wanted))
    assert texts(figure) == ["all", "7.5", "mine", "yours", "ours", "7"]
    assert colors_at(ax, 0, 0.5) == [draw.color(0)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["one", "two"]
