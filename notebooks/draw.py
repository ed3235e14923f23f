"""Pictures of tensors on ranks, drawn from what a run really held, sent and took.

Nothing here knows a result: every function is handed tensors, counters or timestamps,
and draws those. Even the colors are computed:

    draw.places(full, pieces)   where each rank's piece is in the full tensor: found
                                by its values, so a wrong shard is an error
    contributors(call, x)       on a rank (ranks.py): the same call on tensors full of
                                2^rank; its bits say which ranks are in the result

Both return integers whose bit r stands for rank r. A rank has the same color in every
picture of the course (`COLORS`, by Okabe and Ito, which color-blind people can tell
apart), and its number is printed next to it or in it. A box in a color is held by this
rank alone; what several ranks hold is gray, with stripes of their colors at the left if
they are not all. Whose numbers are in a value is another mark: a strip below it. Where
colors are values, none of the ranks' colors is used.

For a further notebook: `rows` draws small tensors with their values, column by column,
`matrices` sharded matrices in a line (a product, a layer's weights), `heat` and
`compare` large ones, `flow` a graph of boxes on ranks with collectives between, `bars`
bytes with predicted marks, `fit` points and the line through them, `course` numbers
step by step, `sums` numbers that are added up; `heads`, `together`, `memory` and
`layer` are of a transformer. All return nothing: the figure appears below the cell. A
shorter picture that one notebook has is drawn there, in folded cells with the tag
`drawing`, of the parts below "Boxes": `blank`, `box`, `tile`, `write`.
"""

import warnings
from itertools import groupby

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator
from torch import Tensor

# matplotlib says it where a picture takes a second, as on a busy machine.
warnings.filterwarnings("ignore", 'Creating legend with loc="best" can be slow')

COLORS = (  # by rank
    "#56B4E9", "#E69F00", "#009E73", "#CC79A7",
    "#F0E442", "#D55E00", "#0072B2", "#BBBBBB",
)  # fmt: skip
PARTS = ("#4D4D4D", "#8C8C8C", "#C8C8C8", "#EDEDED")  # of a bar: not ranks, so gray
LINES = (*PARTS[:2], "#B0B0B0", "#000000")  # seen on white, each with its own marker
EVERYONE = "#E6E6E6"
# Values: brown below zero, purple above. No rank has these, and they differ in blue, so
# people blind to red or green can tell them apart.
VALUES = LinearSegmentedColormap.from_list("values", ("#5B4A1F", "#FAFAFA", "#54278F"))
WIDTH = 11  # inches: 1100 pixels, which GitHub shows at about 850
FONT = 15

plt.rcParams.update(
    {
        "font.size": FONT, "font.family": "DejaVu Sans", "figure.dpi": 100,
        "savefig.dpi": 100, "axes.spines.top": False, "axes.spines.right": False,
        "figure.facecolor": "white", "axes.titlesize": FONT,
    }
)  # fmt: skip


def color(rank: int) -> str:
    """The color of a rank; from the ninth on they repeat."""
    return COLORS[rank % len(COLORS)]


def ink(background: str) -> str:
    """Black or white, whichever can be read on it."""
    channels = [
        c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4
        for c in to_rgb(background)
    ]
    light = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels))
    return "black" if light > 0.18 else "white"


def bits(number: int) -> list[int]:
    """The ranks in a set: 5 → [0, 2]."""
    return [r for r in range(int(number).bit_length()) if int(number) >> r & 1]


def places(full: Tensor, pieces: list[Tensor]) -> Tensor:
    """Which ranks hold each element of a matrix or vector: bit r stands for rank r.

    Found by the values: a piece that is nowhere in `full` (a term of a sum, say) is a
    ValueError.
    """
    full = full.reshape(1, -1) if full.dim() == 1 else full
    held = torch.zeros(full.shape, dtype=torch.int64)
    for rank, piece in enumerate(pieces):
        piece = piece.reshape(1, -1) if piece.dim() == 1 else piece
        (height, width), (rows, columns) = piece.shape, full.shape
        for i in range(0, rows - height + 1):
            for j in range(0, columns - width + 1):
                if torch.allclose(full[i : i + height, j : j + width], piece):
                    held[i : i + height, j : j + width] |= 2**rank
                    break
            else:
                continue
            break
        else:
            raise ValueError(f"rank {rank}'s piece is nowhere in the full tensor")
    return held


# Boxes


def blank(width: float, height: float, unit: float):
    """A figure for boxes, of the given units across and down.

    A unit is `unit` inches, or less where that would be too wide."""
    unit = min(unit, WIDTH / width)
    figure, ax = plt.subplots(figsize=(width * unit, height * unit))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return ax


def letters(text: str, unit: float) -> float:
    """About how many units a bold text takes."""
    return len(text) * 0.0092 * FONT / unit


def box(ax, x, y, width, height, ranks, everyone=0, **style) -> None:
    """A box in its rank's color; gray if several hold it, with stripes of their colors
    at the left if these are not all of `everyone`."""
    edge = dict(edgecolor="black", linewidth=0.8) | style
    fill = color(ranks[0]) if ranks else "white"
    if len(ranks) > 1:
        fill = EVERYONE
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, linewidth=0))
    if 1 < len(ranks) != everyone:
        stripe(ax, x, y, width / 4, height, ranks)
    ax.add_patch(Rectangle((x, y), width, height, fill=False, **edge))


def stripe(ax, x, y, width, height, ranks) -> None:
    """The colors of these ranks next to each other."""
    part = width / len(ranks)
    for i, rank in enumerate(ranks):
        place = (x + i * part, y)
        ax.add_patch(Rectangle(place, part, height, facecolor=color(rank), linewidth=0))


def write(ax, x, y, text, size=FONT, **style) -> None:
    """Text, centred on a point unless told otherwise."""
    ax.text(x, y, text, fontsize=size, **dict(ha="center", va="center") | style)


def tile(ax, x, y, width, height, text, ranks, size=FONT) -> None:
    """A box with a text in its middle: in its rank's color, or white without one."""
    box(ax, x, y, width, height, ranks)
    back = color(ranks[0]) if ranks else "white"
    write(ax, x + width / 2, y + height / 2, text, size, color=ink(back))


def framed_tile(ax, place, text, rank: int, ranks: int) -> None:
    """A rank's box with what every rank holds: gray, framed in the rank's color."""
    x, y, width, height = place
    frame = dict(edgecolor=color(rank), linewidth=3)
    box(ax, x, y, width, height, range(ranks), ranks, **frame)
    write(ax, x + width / 2, y + height / 2, text)


def cell(ax, x, y, value: float, ranks, size, holder: int) -> None:
    """One number in a square of one unit: in its holder's color if it is the holder's
    own, otherwise on white with a strip of the ranks whose numbers are in it."""
    number = f"{value:g}" if value == round(value) else f"{value:.2f}"
    if ranks == [holder]:
        tile(ax, x, y, 1, 1, number, ranks, size)
    else:
        marked(ax, x, y, number, ranks, size, "white")


def marked(ax, x, y, text, ranks, size=FONT, fill=EVERYONE) -> None:
    """A text in a square of one unit, with a strip of these ranks' colors below."""
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, linewidth=0))
    stripe(ax, x, y + 0.7, 1, 0.3, ranks)
    ax.add_patch(Rectangle((x, y), 1, 1, fill=False, linewidth=0.8))
    write(ax, x + 0.5, y + 0.37, text, size)


def rows(lines: list[list[tuple]], arrow: bool = True):
    """Small tensors of all ranks with their values: a row is a rank, a column a time.

    Args:
        lines: each a list of columns (heading, values, who): every rank's 1-D tensor,
            or None, and which ranks are in each element (`contributors` in ranks.py).
        arrow: between columns of a line, where time passes.
    """
    unit, gap = 0.45, 1.3
    wide = [
        [max(longest(values), letters(name, unit)) for name, values, _ in line]
        for line in lines
    ]
    width = max(sum(line) + gap * (len(line) - 1) for line in wide) + 2.2
    ranks = len(lines[0][0][1])
    high = ranks + 1.5
    ax = blank(width, high * len(lines), unit)
    size = min(FONT, FONT * WIDTH / width / unit)
    for top, (line, sizes) in enumerate(zip(lines, wide)):
        y, x = top * high + 1.2, 2.1
        for rank in range(ranks):
            write(ax, 1.9, y + rank + 0.5, f"rank {rank}", ha="right")
        for column, (heading, values, who) in enumerate(line):
            if column and arrow:
                write(ax, x - gap / 2, y + ranks / 2, "→", FONT + 8)
            write(ax, x, y - 0.45, heading, ha="left", weight="bold")
            for rank, (value, sent) in enumerate(zip(values, who)):
                draw_row(ax, x, y + rank, value, sent, size, rank)
            x += sizes[column] + gap


def longest(values: list) -> int:
    return max([len(v) for v in values if v is not None] + [2])


def draw_row(ax, x, y, values, who, size, rank: int) -> None:
    """One rank's tensor; a dash where it has none."""
    if values is None:
        write(ax, x + 0.5, y + 0.5, "–", FONT)
        return
    for i, (value, sent) in enumerate(zip(values.tolist(), who.tolist())):
        cell(ax, x + i, y, value, bits(sent), size, rank)


def matrices(items: list, ranks: int, numbers: bool = True):
    """Sharded matrices side by side, each element in the color of its rank, and
    each block with the number of who does.

    Args:
        items: (heading, holders, note) with `holders` a matrix of rank sets (see
            `places`), 0 for no rank, and maybe (dim, size): a thick line along that dim
            after every `size` elements; or a text to put between, as "·" and "=".
        ranks: how many there are: what all of them hold is gray.
        numbers: whether blocks have them.
    """
    unit = 0.3
    drawn = [item for item in items if not isinstance(item, str)]
    notes = any(item[2] for item in drawn)
    tall = max(item[1].shape[0] for item in drawn) + (3 if notes else 2.6)
    wide = [span(item, unit) for item in items]
    ax = blank(sum(wide) + 0.4, tall, unit)
    x = 0.2
    for item, width in zip(items, wide):
        if isinstance(item, str):
            write(ax, x + width / 2, tall / 2, item, FONT + 6)
        else:
            draw_matrix(ax, x + width / 2, tall / 2, item, ranks, numbers)
        x += width


def span(item, unit: float) -> float:
    """How many units an item of `matrices` takes."""
    if isinstance(item, str):
        return 0.6 + letters(item, unit)
    heading, holders, note, *_ = item
    texts = max(letters(text, unit) for text in (heading, note))
    return max(holders.shape[1], texts) + 0.4


def draw_matrix(ax, x, y, item, ranks, numbers) -> None:
    """A matrix around the point x, y, heading above and note below."""
    heading, holders, note, *parts = item
    height, width = holders.shape
    left, top = x - width / 2, y - height / 2
    for i in range(height):
        for j in range(width):
            box(ax, left + j, top + i, 1, 1, bits(holders[i, j]), ranks, linewidth=0.4)
    for i, j, down, across in blocks(holders) if numbers else ():
        label = names_of(bits(holders[i, j]), ranks)
        write_in(ax, left + j, top + i, across, down, label, bits(holders[i, j]))
    frame = Rectangle((left, top), width, height, fill=False, linewidth=1.6)
    ax.add_patch(frame)
    for dim, size in parts:
        for at in range(size, holders.shape[dim], size):
            across = [left + at] * 2 if dim else [left, left + width]
            down = [top, top + height] if dim else [top + at] * 2
            ax.plot(across, down, color="black", linewidth=2.5)
    write(ax, x, top - 0.7, heading, weight="bold")
    write(ax, x, top + height + 0.7, note, FONT - 2)


def blocks(holders: Tensor) -> list[tuple[int, int, int, int]]:
    """Blocks of one set in a matrix of rank sets: (row, column, rows, columns)."""
    found, seen = [], torch.zeros(holders.shape, dtype=torch.bool)
    height, width = holders.shape
    for i in range(height):
        for j in range(width):
            if seen[i, j]:
                continue
            fits = (holders == holders[i, j]) & ~seen
            across = 1
            while j + across < width and fits[i, j + across]:
                across += 1
            down = 1
            while i + down < height and fits[i + down, j : j + across].all():
                down += 1
            seen[i : i + down, j : j + across] = True
            found.append((i, j, down, across))
    return found


def names_of(holders: list[int], ranks: int) -> str:
    """The text in a block: "0", "0,1", or "all"."""
    everyone = ranks > 1 and len(holders) == ranks
    return "all" if everyone else ",".join(map(str, holders))


def write_in(ax, x, y, width, height, text, holders) -> None:
    """Text in the middle of a block, as large as fits there."""
    inches = ax.figure.get_size_inches()[0] / ax.get_xlim()[1]
    across = 72 * inches * width / (0.7 * max(len(text), 1))
    size = min(FONT - 2, across, 72 * inches * height / 1.3)
    back = color(holders[0]) if len(holders) == 1 else EVERYONE
    back = back if holders else "white"
    style = dict(bbox=dict(facecolor=back, edgecolor="none", pad=1)) if text else {}
    write(ax, x + width / 2, y + height / 2, text, size, color=ink(back), **style)


# Large tensors


def heat(ax, x: Tensor, title: str, limit: float, edge: str | None = None):
    """A matrix as colors, from −limit to limit; `edge` frames it."""
    picture = ax.imshow(x.detach().float().numpy(), VALUES, vmin=-limit, vmax=limit)
    ax.set(xticks=[], yticks=[], title=title)
    for name, dim in (("ylabel", 0), ("xlabel", 1)):
        ax.set(**{name: f"dim {dim}: {x.shape[dim]}"})
    for side in ax.spines.values():
        side.set(visible=True, color=edge or "black", linewidth=5 if edge else 1)
    return picture


def terms(parts: list[Tensor], total: Tensor, names: list[str]):
    """Matrices that add up to the last one; framed in the color of their rank."""
    limit = max(x.abs().max().item() for x in [*parts, total])
    count = len(parts) + 1
    height = WIDTH / count * total.shape[0] / total.shape[1] + 1.2
    figure, axes = plt.subplots(1, count, figsize=(WIDTH, height), layout="constrained")
    edges = [color(rank) for rank in range(len(parts))] + [None]
    signs = ["+"] * (len(parts) - 1) + ["="]
    for ax, part, name, edge in zip(axes, [*parts, total], names, edges):
        picture = heat(ax, part, name, limit, edge)
    for ax in axes[1:]:  # they all have the rows of the first
        ax.set_ylabel("")
    for ax, sign in zip(axes, signs):
        ax.text(1.09, 0.5, sign, fontsize=FONT + 10, transform=ax.transAxes,
                ha="center", va="center")  # fmt: skip
    figure.colorbar(picture, ax=axes, shrink=0.8, label="value")


def compare(pairs: dict[str, tuple[Tensor, Tensor]], names=("without TP", "with TP")):
    """Matrices two ways and their difference, a row each.

    Both have one scale, so that neither is clipped. The difference has its own, and its
    largest is written above it, as a part of the largest value of the first.
    """
    figure, axes = plt.subplots(
        len(pairs), 3, figsize=(WIDTH, 3.1 * len(pairs)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, (name, (one, two)) in zip(axes, pairs.items()):
        limit = max(x.abs().max().item() for x in (one, two))
        off = (two - one).abs().max().item()
        heat(line[0], one, names[0], limit)
        both = heat(line[1], two, names[1], limit)
        figure.colorbar(both, ax=line[:2].tolist(), shrink=0.8, label="value")
        title = f"difference ≤ {off / one.abs().max().item():.2g} · max"
        rest = heat(line[2], two - one, title, off or limit)
        ticks = dict(format=lambda value, _: f"{value:.3g}", ticks=MaxNLocator(4))
        figure.colorbar(rest, ax=line[2], shrink=0.8, label="difference", **ticks)
        line[0].set_ylabel(f"{name}\ndim 0: {one.shape[0]}", weight="bold")
        for ax in line[1:]:
            ax.set_ylabel("")
    for ax in axes.flat:
        ax.set_aspect("auto")


# Graphs


def flow(stages: list[dict], ranks: int, title: str = "", backward: bool = False):
    """A graph that runs through all ranks: one lane per rank, collectives across them.

    Args:
        stages: from left to right, each {"name", "boxes"} with a text a rank, or
            {"name", "does", "moved"}: what is called there, and its payload in bytes.
            Where nothing is moved, the line is dotted. A stage with a true "same" has
            equal values on all ranks: gray boxes, framed in the color of the rank.
        backward: arrows point to the left.
    """
    unit = 0.55
    wide = [
        max([letters(t, unit) for t in (s["name"], *s.get("boxes", ()))]) * 0.9 + 0.6
        if "boxes" in s else max(1.9, letters(s["does"], unit) + 0.2)
        for s in stages
    ]  # fmt: skip
    top = 1.8 if title else 0.9
    width, bottom, x = sum(wide) + 2.0, top + ranks * 1.2, 1.6
    ax = blank(width, bottom + 1.6, unit)
    write(ax, 0.2, 0.45, title, ha="left", weight="bold")
    for rank in range(ranks):
        y = top + rank * 1.2 + 0.5
        write(ax, 1.3, y, f"rank {rank}", ha="right")
        ends = (width - 0.05, 1.45)[:: 1 if backward else -1]
        style = dict(arrowstyle="-|>", linewidth=1.5, color="black")
        ax.annotate("", (ends[1], y), (ends[0], y), zorder=0, arrowprops=style)
    for stage, across in zip(stages, wide):
        middle = x + across / 2
        write(ax, middle, top - 0.45, stage["name"], weight="bold")
        if "boxes" in stage:
            for rank, text in enumerate(stage["boxes"]):
                place = x + 0.15, top + rank * 1.2, across - 0.3, 1
                if stage.get("same"):
                    framed_tile(ax, place, text, rank, ranks)
                else:
                    tile(ax, *place, text, [rank])
        else:
            moved = stage["moved"]
            style = dict(linewidth=9 if moved else 3, linestyle="-" if moved else ":")
            ax.plot([middle] * 2, [top, bottom - 0.2], color="black", **style)
            text = f"{stage['does']}\npayload\n{moved:,} bytes"
            write(ax, middle, bottom + 0.65, text, FONT - 1)
        x += across


# Bytes, seconds


def bars(values: dict[str, list[float]], parts: list[str], predicted: dict[str, float],
         unit: str = "bytes", title: str = ""):  # fmt: skip
    """Stacked bars, a name each, with a mark where the formula says the end should be.

    Args:
        values: name → measured, one for each of `parts`.
        predicted: name → what the formula gives for the whole bar.
    """
    figure, ax = plt.subplots(
        figsize=(WIDTH, 0.45 * len(values) + 1.8), layout="constrained"
    )
    most = max([sum(v) for v in values.values()] + list(predicted.values()))
    for y, (name, measured) in enumerate(values.items()):
        left = 0
        fills = PARTS[: len(parts)]  # a part without one would not be drawn
        for part, (value, fill) in enumerate(zip(measured, fills, strict=True)):
            label = parts[part] if y == 0 else None
            ax.barh(y, value, left=left, color=fill, edgecolor="black", label=label)
            left += value
        mark = predicted.get(name)
        if mark is not None:
            label = "predicted" if y == 0 else None
            ax.plot([mark] * 2, [y - 0.48, y + 0.48], color="#D55E00", linewidth=4,
                    label=label)  # fmt: skip
        ax.text(max(left, mark or 0) + most / 80, y, f"{left:,.0f}", va="center")
    ax.set_yticks(range(len(values)), values)
    ax.invert_yaxis()
    ax.set(xlabel=unit, xlim=(0, most * 1.17))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_locator(MaxNLocator(5))
    figure.legend(loc="outside upper center", ncols=len(parts) + 1, frameon=False)
    if title:
        ax.set_title(title)


HATCHES = ("", "//", "..", "xx", "\\\\", "--")


def fit(series: dict[str, list[tuple]], lines: dict[str, tuple], x: str, y: str):
    """Measured points, and for each series the line offset + slope · x through them;
    where there is none, points are joined."""
    _, ax = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    marks = ("o", "s", "^", "D")
    for (name, points), mark, shade in zip(series.items(), marks, LINES):
        xs, ys = zip(*points)
        ax.plot(xs, ys, mark, color=shade, markersize=9, markeredgecolor="black",
                label=name)  # fmt: skip
        if name in lines:
            offset, slope = lines[name]
            xs = [min(xs) * (max(xs) / min(xs)) ** (i / 99) for i in range(100)]
            ys = [offset + slope * v for v in xs]
        ax.plot(xs, ys, color=shade, linewidth=2)
    ax.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("")
    ax.legend(frameon=False)


def curves(series: dict[str, list[float]], x: str, y: str, title: str = ""):
    """Numbers step by step, one line per name; the steps count from 1."""
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    styles = ("o-", "s--", "^:", "D-.")
    for (name, values), style, shade in zip(series.items(), styles, LINES):
        steps = range(1, len(values) + 1)
        ax.plot(steps, values, style, color=shade, linewidth=2, markersize=9,
                markeredgecolor="black", label=name)  # fmt: skip
    ax.set(xlabel=x, ylabel=y, title=title)
    ax.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=len(series), frameon=False)


def sums(lines: dict[str, list[tuple]], ranks: int, unit: str):
    """Numbers that are added up, each in the color of the ranks that contribute it.

    Args:
        lines: name → (value, set of ranks as in `places`, what it is), from the left.
    """
    _, ax = plt.subplots(figsize=(WIDTH, 0.75 * len(lines) + 1.2), layout="constrained")
    totals = [sum(value for value, *_ in line) for line in lines.values()]
    for y, (line, total) in enumerate(zip(lines.values(), totals)):
        left = 0.0
        for value, who, text in line:
            box(ax, left, y - 0.38, value, 0.76, bits(who), ranks)
            plain = len(bits(who)) != 1
            shade = "black" if plain else ink(color(bits(who)[0]))
            ax.text(left + value / 2, y, text, ha="center", va="center", color=shade)
            left += value
        ax.text(total + max(totals) / 80, y, f"{total:.3g}", va="center")
    ax.set_yticks(range(len(lines)), lines)
    ax.set(xlim=(0, max(totals) * 1.1), ylim=(len(lines) - 0.5, -0.5), xlabel=unit)


# A transformer: heads on ranks, blocks and bytes over time, layouts in a layer


def named(pieces, full):
    """What each piece is a copy of: "q3" for full["q"][3]; found by its values."""
    known = {f"{kind}{i}": x for kind, xs in full.items() for i, x in enumerate(xs)}
    same = lambda a, b: a.shape == b.shape and torch.allclose(a, b)
    return [
        next((name for name, x in known.items() if same(x, piece)), "?")
        for piece in pieces
    ]


def heads(lanes, roles):
    """Which heads are on which rank, and lines between those that are combined.

    One lane per rank, one row per role. A head of a shorter row serves several.

    lanes: for each rank and role the names of the heads, as from `named`.
    """
    high, left = 1.7, max(letters(role, 0.5) for role in roles) + 0.4
    wide = [1.5 * max(map(len, lane)) for lane in lanes]
    ax = blank(left + sum(wide) + 0.9 * len(wide), len(roles) * high + 0.7, 0.5)
    for row, role in enumerate(roles):
        write(ax, left - 0.3, 1.3 + row * high, role, ha="right", weight="bold")
    for rank, (lane, across) in enumerate(zip(lanes, wide)):
        x, above = left + sum(wide[:rank]) + 0.9 * rank, []
        write(ax, x + across / 2, 0.4, f"rank {rank}", weight="bold")
        for row, names in enumerate(lane):
            y, step = 0.8 + row * high, across / len(names)
            middles = [x + (i + 0.5) * step for i in range(len(names))]
            for head, middle in zip(names, middles):
                tile(ax, middle - 0.6, y, 1.2, 1, head, [rank])
            most = max(len(above), len(middles)) if above else 0
            for i in range(most):
                ends = [xs[i * len(xs) // most] for xs in (above, middles)]
                ax.plot(ends, [y - high + 1, y], color="black", linewidth=1.5)
            above = middles


def together(spans, calls, turn):
    """Which rank ran what, and when: a row per rank, over time in ms.

    spans: (rank, what, start, end); each `what` has a hatch.
    calls: the same, of collectives, in the order of the calls. Shaded from when the
        last rank enters the call to when the first leaves it.
    turn: when the last rank's backward began; a thin line.
    """
    ranks = 1 + max(rank for rank, *_ in spans)
    kinds = list(dict.fromkeys(what for _, what, *_ in spans))
    zero = min(start for *_, start, _ in spans)
    figure, ax = plt.subplots(figsize=(WIDTH, 0.8 * ranks + 2), layout="constrained")
    place = lambda start, end: dict(width=end - start, left=start - zero, height=0.7)
    for rank, what, *times in spans:
        style = dict(color=color(rank), hatch=HATCHES[kinds.index(what)])
        ax.barh(rank, **place(*times), edgecolor="black", **style)
    for rank, _, *times in calls:
        ax.barh(rank, **place(*times), color="black", edgecolor="black")
    for call in zip(*([c for c in calls if c[0] == rank] for rank in range(ranks))):
        start, end = max(c[2] for c in call) - zero, min(c[3] for c in call) - zero
        ax.axvspan(start, end, color=PARTS[2], zorder=0, linewidth=0)
        write(ax, (start + end) / 2, -0.7, call[0][1], weight="bold")
    ax.axvline(turn - zero, color="black", linewidth=1.2)
    for text, side in (("forward  ", "right"), ("  backward", "left")):
        write(ax, turn - zero, -1.1, text, ha=side)
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set(ylim=(ranks - 0.5, -1.4), xlabel="ms")
    kinds = {what: dict(hatch=hatch) for what, hatch in zip(kinds, HATCHES)}
    kinds["all-reduce"] = dict(facecolor="black")
    kinds["all ranks are in the call"] = dict(facecolor=PARTS[2], linewidth=0)
    style = dict(facecolor="white", edgecolor="black")
    boxes = [Rectangle((0, 0), 1, 1, **style | kind) for kind in kinds.values()]
    figure.legend(boxes, kinds, loc="outside upper center", ncols=len(kinds),
                  frameon=False, columnspacing=1.4)  # fmt: skip


def memory(timelines, parts):
    """Bytes over time, stacked by kind: a step of each run, with a line at its peak.

    timelines: name of a run → {"seconds", part: bytes, …} at each change.
    parts: what is stacked, from below.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    ends = [(run[0]["seconds"], run[-1]["seconds"]) for run in timelines.values()]
    took = [last - first for first, last in ends]
    gap, begin, most, labels = 0.12 * took[0], 0.0, 0, parts
    middle = (sum(took) + gap * (len(took) - 1)) / 2
    for (name, events), seconds in zip(timelines.items(), took):
        shift, end = begin - events[0]["seconds"], begin + seconds
        xs = [1000 * (event["seconds"] + shift) for event in events]
        heights = [[event[part] for event in events] for part in parts]
        ax.stackplot(xs, heights, colors=PARTS, labels=labels, step="post",
                     edgecolor="black", linewidth=0.6)  # fmt: skip
        peak = max(map(sum, zip(*heights)))
        ax.plot([xs[0], xs[-1]], [peak] * 2, color="black", linewidth=2)
        # A text may be longer than its run: it continues where there is room.
        side, x = ("left", xs[0]) if begin < middle else ("right", xs[-1])
        text = f"{name}: {peak:,} at the peak"
        write(ax, x, peak * 1.01, text, ha=side, va="bottom")
        begin, most, labels = end + gap, max(most, peak), []
    ax.set(xlabel="ms, one step after the other", ylabel="bytes", ylim=(0, most * 1.12))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside upper center", ncols=len(parts), frameon=False)


SHAPES = {  # of a tensor on a rank; I is its last dim
    "replicated": "[B, S, I]",
    "positions": "[B, s, I]",
    "columns": "[B, S, i]",
    "partial": "[B, S, I]",
}


def layout_of(held, ranks):
    """Replicated, sharded by positions or columns, or partial: a matrix per rank."""
    if held.dim() == 3:
        return "partial"
    if (held == 2**ranks - 1).all():
        return "replicated"
    if any(number.bit_count() != 1 for number in held.flatten().tolist()):
        raise ValueError(
            "neither replicated nor sharded: an element is on some ranks only"
        )
    if (held == held[:, :1]).all():
        return "positions"
    if (held == held[:1]).all():
        return "columns"
    raise ValueError("sharded both by rows and by columns")


def words_below(item, ranks, dims):
    """A tensor's layout, below its shape if `dims` has a letter for its columns."""
    if isinstance(item, dict):  # a collective
        return []
    layout, columns = layout_of(item[1], ranks), item[1].shape[-1]
    if not dims:
        return [layout]
    shape = SHAPES[layout].replace("I", dims[columns])
    return [shape.replace("i", dims[columns].lower()), layout]


inches = lambda text: 0.125 * max(map(len, text.split("\n")))  # about its width


def extent(held):
    """Elements down and across; partial sums are drawn behind one another."""
    steps = len(held) - 1 if held.dim() == 3 else 0
    return held.shape[-2] + steps, held.shape[-1] + steps


def room(item, e):
    """Inches across that it takes, with e inches an element."""
    if isinstance(item, dict):
        return inches(item["does"].replace("-", "-\n")) + 0.05
    name, held = item
    return max(e * extent(held)[1], inches(name)) + 0.1


def draw_tensor(ax, x, y, held, e, ranks):
    """Around x, y; each element in its holder's color, rank 0's term in front."""
    (down, across), (rows, columns) = extent(held), held.shape[-2:]
    left, top = x - across * e / 2, y + (down / 2 - rows) * e
    for step, term in reversed([*enumerate(held.view(-1, rows, columns).tolist())]):
        corner = left + step * e, top - step * e
        for i, row in enumerate(term):
            for j, number in enumerate(row):
                at, who = (corner[0] + j * e, corner[1] + i * e), bits(number)
                box(ax, *at, e, e, who, ranks, linewidth=0.3)
        frame = Rectangle(corner, columns * e, rows * e, fill=False, linewidth=1.3)
        ax.add_patch(frame)


def draw_call(ax, x, y, width, call):
    """An arrow, with a collective above it and its payload below."""
    arrow = dict(arrowstyle="-|>", linewidth=2.5, color="black")
    ax.annotate("", (x + width - 0.06, y), (x + 0.06, y), arrowprops=arrow)
    middle, does = x + width / 2, call["does"].replace("-", "-\n")
    write(ax, middle, y - 0.1, does, va="bottom", linespacing=0.9)
    moved = f"{call['moved']:,}\nbytes"
    write(ax, middle, y + 0.1, moved, va="top", linespacing=0.9)


def width_of(words, items, e):
    """Inches across of tensors with one placement, or of the words below them."""
    return max(sum(room(item, e) for item in items), *map(inches, ["", *words])) + 0.2


def draw_alike(ax, x, y, words, items, e, tall, ranks):
    """Tensors side by side around the height y, names above, their layout below."""
    width = width_of(words, items, e)
    for i, word in enumerate(words):
        style = dict(size=13) if i else dict(size=14, weight="bold")
        write(ax, x + width / 2, y + tall / 2 + 0.2 + i / 4, word, **style)
    x += (width - sum(room(item, e) for item in items)) / 2
    for name, held in items:
        middle = x + room((name, held), e) / 2
        style = dict(size=14, va="bottom", linespacing=0.95)
        write(ax, middle, y - tall / 2 - 0.05, name, **style)
        draw_tensor(ax, middle, y, held, e, ranks)
        x += room((name, held), e)


def layer(lines, ranks, dims=None):
    """The tensors of a layer in order, each element in the color of who holds it.

    Those with one placement share a background.
    lines: (title, items); an item is (name, held), `held` as from places, or, for
        partial sums, a matrix for each rank; or {"does", "moved"}: a collective and
        its payload.
    dims: number of columns → letter, as {4: "D"}; without it no shape is written.
    """
    below = lambda item: words_below(item, ranks, dims)
    runs = [[(w, [*run]) for w, run in groupby(items, below)] for _, items in lines]
    widest = lambda e: max(sum(width_of(*run, e) for run in line) for line in runs)
    e = next(e / 1000 for e in range(200, 20, -2) if widest(e / 1000) <= 10.9)
    tensors = [item for line in runs for words, run in line if words for item in run]
    tall = e * max(extent(held)[0] for _, held in tensors)
    above = 0.8 + 0.22 * max(name.count("\n") for name, _ in tensors)
    high = above + tall + (0.95 if dims else 0.7)
    ax = blank(WIDTH, high * len(lines), 1)
    for i, ((title, _), line) in enumerate(zip(lines, runs)):
        x, top = 0.05, i * high
        y = top + above + tall / 2
        write(ax, x, top + 0.2, title, ha="left", weight="bold")
        for words, items in line:
            width = width_of(words, items, e)
            if words:
                size = width - 0.06, above + tall - 0.3 + len(words) / 4
                ground = Rectangle((x + 0.03, top + 0.45), *size, facecolor="#F4F4F4")
                ax.add_patch(ground)
                draw_alike(ax, x, y, words, items, e, tall, ranks)
            else:
                draw_call(ax, x, y, width, *items)
            x += width
