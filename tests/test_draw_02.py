"""The pictures of notebook 02 show the data they are given."""

import pytest
import torch
from pictures import BLACK, BLUE, ORANGE, WHITE, draw, drawn, extents, shade


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
    seen = drawn(draw.heads, lanes, ["queries", "keys"])
    at = seen.at
    assert {"queries", "keys", "rank 0", "rank 1"} <= set(at)
    for names, color in (["q0", "q1", *keys], BLUE), (["q2", "q3"], ORANGE):
        assert [seen.under(*at[name]) for name in names] == [[color]] * len(names)
    ends = [[at[a][0], at[b][0]] for a, b in joins]
    assert [xs for xs, _ in seen.lines[:2]] == ends and len(seen.lines) == 4
    assert at["q0"][1] < at["k0"][1] and at["q0"][0] < at["q1"][0] < at["q2"][0]


def test_thick_lines_part_the_heads_of_a_matrix():
    wide, tall = torch.ones(2, 6).long(), torch.ones(6, 2).long()

    def both():
        draw.matrices([("a", wide, ""), "·", ("b", tall, ""), ("c", tall, "")], 2)
        draw.head_borders({0: (1, 2), 2: (0, 3)})

    seen = drawn(both)
    a, _, c = [p.get_xy() for p in seen.ax.patches if p.get_linewidth() == 1.6]
    (x, y), (left, top) = a, c
    assert seen.lines == [
        [[x + 2] * 2, [y, y + 2]], [[x + 4] * 2, [y, y + 2]],
        [[left, left + 2], [top + 3] * 2],
    ]  # fmt: skip


def test_masks_fill_what_is_kept_and_part_the_heads():
    whole = torch.tensor([[1, 0, 2, 2], [0, 1, 2, 0]])
    items = [("one", whole, "note", [0, 1]), ("two", whole[:, 2:], "", [2])]
    items.append(("all", 3 * torch.eye(2).int(), "", []))
    seen = drawn(draw.masks, items, 2)
    assert seen.texts == ["one", "head 0", "head 1", "note", "two", "head 2", "all"]
    assert seen.colors == [
        BLUE, WHITE, ORANGE, ORANGE, WHITE, BLUE, ORANGE, WHITE,
        ORANGE, ORANGE, ORANGE, WHITE,
        draw.EVERYONE, WHITE, WHITE, draw.EVERYONE,
    ]  # fmt: skip
    x, y, *_ = seen.boxes[0]  # one line: between the two heads of the first
    assert seen.lines == [[[x + 2] * 2, [y, y + 2]]]
    assert (seen.at["head 0"][0], seen.at["head 1"][0]) == (x + 1, x + 3)


def test_together_draws_spans_and_shades_where_all_are_in_the_call():
    spans = [(0, "attention", 5.0, 9.0), (1, "attention", 6.0, 9.5), (1, "MLP", 10, 12)]
    calls = [(0, "g", 7.0, 9.0), (1, "g", 8.0, 9.5)]
    seen = drawn(draw.together, spans, calls)
    assert seen.spans == [
        (0, 4, BLUE), (1, 3.5, ORANGE), (5, 2, ORANGE), (2, 2, BLACK), (3, 1.5, BLACK),
        (3, 1, draw.SHADE),  # rank 1 comes at 8, rank 0 leaves at 9
    ]  # fmt: skip
    assert seen.texts == ["g"] and seen.at["g"][0] == 3.5
    one, again, other, *_ = [p.get_hatch() for p in seen.filled]
    assert one == again != other
    assert seen.legend == ["attention", "MLP", "all-reduce", "all ranks are in it"]
    patches = seen.figure.legends[0].get_patches()
    assert [shade(p.get_facecolor()) for p in patches[2:]] == [BLACK, draw.SHADE]
    assert not seen.lines
    seen = drawn(draw.together, spans, calls, 9.8)
    ((xs, _),) = seen.lines
    assert xs == pytest.approx([4.8, 4.8])
    words = [(t.get_text().strip(), t.get_ha()) for t in seen.words[1:]]
    assert words == [("forward", "right"), ("backward", "left")]
    assert [t.get_position()[0] for t in seen.words[1:]] == pytest.approx([4.8, 4.8])


def test_memory_is_stacked_run_after_run():
    one = [{"seconds": 3 + t / 1000, "a": 10, "b": b} for t, b in ((0, 0), (4, 30))]
    two = [{"seconds": 9 + t / 1000, "a": 5, "b": b} for t, b in ((0, 2), (2, 1))]
    seen = drawn(draw.memory, {"one": one, "two": two}, ["a", "b"])
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
    runs = {
        f"run {i}, without TP": [
            {"seconds": 0.0, "a": 1_000_000}, {"seconds": t / 1000, "a": 3_000_000},
        ]
        for i, t in enumerate(ms)
    }  # fmt: skip
    seen = drawn(draw.memory, runs, ["a"])
    frame, *found = extents(seen.figure, [seen.ax, *seen.words])
    for text, around, line in zip(seen.words, found, seen.ax.lines, strict=True):
        assert frame.x0 <= around.x0 and around.x1 <= frame.x1, text
        assert line.get_color() == "black"  # red is for what is predicted
        end = line.get_xdata()[0 if text.get_ha() == "left" else 1]
        assert text.get_position()[0] == end
    assert len(found) == len(ms)


def test_sums_are_in_the_colours_of_those_who_bring_them():
    line = [(1.0, 1, "mine"), (2.0, 2, "yours"), (4.0, 3, "ours")]
    seen = drawn(draw.sums, {"one": [(7.5, 0, "all")], "two": line}, 2, "squares")
    parts = [(0, 1, BLUE), (1, 2, ORANGE), (3, 4, draw.EVERYONE)]
    assert seen.spans == [(0, 7.5, WHITE), *parts]
    assert seen.texts == ["all", "7.5", "mine", "yours", "ours", "7"]
    assert seen.in_square(0, 0.5) == [BLUE] and seen.ticks == ["one", "two"]
