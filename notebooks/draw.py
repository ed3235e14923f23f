"""Pictures of tensors on ranks, drawn from what a run really held, sent and took.

Nothing here knows a result: every function is handed tensors, counters or timestamps,
and draws those. Two helpers find out where things lie and where they came from:

    places(full, pieces)    where each rank's piece lies in the full tensor: found by
                            looking for its values, so a wrong shard is an error
    senders(call, x)        on a rank: run the same call on tensors full of 2^rank; the
                            bits of what comes out say which ranks are in it

Both give whole numbers whose bit r stands for rank r. A rank has one colour in all
pictures of the course (`COLORS`, of Okabe and Ito, told apart by colour-blind people),
and its number stands beside it. What comes from several ranks is striped in their
colours; what every rank holds alike is grey.

For a further notebook: `rows` draws small tensors with their values, column by column,
`matrices` sharded matrices in a line (a product, a layer's weights), `heat` and
`compare` large ones, `flow` a graph of boxes on ranks with collectives between, `bars`
bytes with predicted marks, `timeline` spans of time, `mesh` ranks on axes, `fit` points
and the line through them. All return the figure; end the cell's last line with `;`.
"""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from torch import Tensor

COLORS = (  # by rank
    "#56B4E9", "#E69F00", "#009E73", "#CC79A7",
    "#F0E442", "#D55E00", "#0072B2", "#BBBBBB",
)  # fmt: skip
PARTS = ("#4D4D4D", "#8C8C8C", "#C8C8C8", "#EDEDED")  # of a bar: not ranks, so grey
EVERYONE = "#E6E6E6"
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
    """The colour of a rank; from the ninth on they repeat."""
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


def senders(call, x: Tensor, rank: int) -> Tensor | None:
    """Which ranks are in each element of call(x): bit r stands for rank r.

    To be run on every rank. The call must move or add, as collectives do.
    """
    return call(torch.full_like(x, 2**rank))


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


def blank(width: float, height: float, title: str = ""):
    """A figure for boxes: as many units across and down, one unit a square."""
    scale = WIDTH / width
    figure, ax = plt.subplots(figsize=(WIDTH, height * scale + 0.02))
    ax.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    ax.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    if title:
        figure.suptitle(title)
    return figure, ax


def box(ax, x, y, width, height, ranks, everyone=0, **style) -> None:
    """A box in the colours of these ranks; grey if they are all of `everyone`."""
    edge = dict(edgecolor="black", linewidth=0.8) | style
    if everyone > 1 and len(ranks) == everyone:
        ranks, fills = ranks[:1], [EVERYONE]
    else:
        fills = [color(rank) for rank in ranks] or ["white"]
    for i, fill in enumerate(fills):
        part = height / len(fills)
        stripe = Rectangle((x, y + i * part), width, part, facecolor=fill, linewidth=0)
        ax.add_patch(stripe)
    ax.add_patch(Rectangle((x, y), width, height, fill=False, **edge))


def write(ax, x, y, text, size=FONT, **style) -> None:
    """Text, centred on a point unless told otherwise."""
    ax.text(x, y, text, fontsize=size, **dict(ha="center", va="center") | style)


def cell(ax, x, y, value: float, ranks, size) -> None:
    """One number in a square of one unit; behind stripes it gets a light plate."""
    box(ax, x, y, 1, 1, ranks)
    number = f"{value:g}" if value == round(value) else f"{value:.2f}"
    style = {"color": ink(color(ranks[0])) if len(ranks) == 1 else "black"}
    if len(ranks) > 1:
        plate = dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1.5)
        style["bbox"] = plate
    write(ax, x + 0.5, y + 0.5, number, size, **style)


def rows(lines: list[list[tuple]], title: str = "", arrow: bool = True):
    """Small tensors of all ranks with their values: a row a rank, a column a moment.

    Args:
        lines: each a list of columns (heading, values, who): every rank's 1-D tensor,
            or None, and which ranks are in each element (see `senders`).
        arrow: between columns of a line, where time passes.
    """
    sizes = [[longest(values) for _, values, _ in line] for line in lines]
    width = max(sum(line) + 1.2 * (len(line) - 1) for line in sizes) + 3.2
    ranks = len(lines[0][0][1])
    high = ranks + 2.0
    figure, ax = blank(width, high * len(lines) - 0.4, title)
    size = min(FONT + 2, 31 * WIDTH / width)
    for top, line, wide in zip(range(len(lines)), lines, sizes):
        y, x = top * high + 1.2, 3.0
        for rank in range(ranks):
            write(ax, 2.7, y + rank + 0.5, f"rank {rank}", ha="right")
        for column, (heading, values, who) in enumerate(line):
            if column and arrow:
                write(ax, x - 0.6, y + ranks / 2, "→", FONT + 8)
            write(ax, x, y - 0.45, heading, ha="left", weight="bold")
            for rank, (value, sent) in enumerate(zip(values, who)):
                draw_row(ax, x, y + rank, value, sent, size)
            x += wide[column] + 1.2
    return figure


def longest(values: list) -> int:
    return max([len(v) for v in values if v is not None] + [2])


def draw_row(ax, x, y, values, who, size) -> None:
    """One rank's tensor; a dash where it has none."""
    if values is None:
        write(ax, x + 0.5, y + 0.5, "–", FONT)
        return
    for i, (value, sent) in enumerate(zip(values.tolist(), who.tolist())):
        cell(ax, x + i, y, value, bits(sent), size)


def matrices(items: list, ranks: int, title: str = "", unit: float | None = None):
    """Sharded matrices side by side, each element in the colour of who holds it.

    Args:
        items: (heading, holders, note) with `holders` a matrix of rank sets (see
            `places`), or a text to stand between, such as "·" and "=". A list of them
            in place of one is drawn as terms of a sum, with a plus between.
        ranks: how many there are: what all of them hold is grey.
        unit: elements across the figure; by default what the items take.
    """
    tall = max(item[1].shape[0] for item in every(items))
    total = sum(span(item) for item in items) + 1
    figure, ax = blank(unit or total, tall + 3.2, title)
    x = 0.5 + max(0, ((unit or total) - total) / 2)
    for item in items:
        if isinstance(item, str):
            write(ax, x + 0.75, tall / 2 + 1.6, item, FONT + 8)
        else:
            terms = item if isinstance(item, list) else [item]
            at = x
            for number, term in enumerate(terms):
                if number:
                    write(ax, at - 0.75, tall / 2 + 1.6, "+", FONT + 8)
                draw_matrix(ax, at, tall, term, ranks)
                at += term[1].shape[1] + 1.5
        x += span(item)
    return figure


def every(items: list) -> list[tuple]:
    """All matrices among the items of `matrices`."""
    flat = [x for item in items for x in (item if isinstance(item, list) else [item])]
    return [item for item in flat if not isinstance(item, str)]


def span(item) -> float:
    """How far an item of `matrices` reaches, with the gap behind it."""
    if isinstance(item, str):
        return 1.5
    if isinstance(item, list):
        return sum(span(term) + 1 for term in item)
    return item[1].shape[1] + 0.5


def draw_matrix(ax, x, tall, item, ranks) -> None:
    heading, holders, note = item
    height, width = holders.shape
    y = 1.6 + (tall - height) / 2
    for i in range(height):
        for j in range(width):
            box(ax, x + j, y + i, 1, 1, bits(holders[i, j]), ranks, linewidth=0.4)
    box_edge = Rectangle((x, y), width, height, fill=False, linewidth=1.6)
    ax.add_patch(box_edge)
    write(ax, x + width / 2, y - 0.7, heading, weight="bold")
    write(ax, x + width / 2, y + height + 0.7, note, FONT - 2)


def legend(ax, ranks: int, **where) -> None:
    """Which colour is which rank."""
    handles = [Rectangle((0, 0), 1, 1, facecolor=color(r)) for r in range(ranks)]
    names = [f"rank {r}" for r in range(ranks)]
    style = dict(ncols=ranks, frameon=False, loc="lower center")
    ax.legend(handles, names, **style | where)


# Large tensors


def heat(ax, x: Tensor, title: str, limit: float, edge: str | None = None):
    """A matrix as colours, from −limit to limit; `edge` frames it, in a rank's colour."""
    picture = ax.imshow(x.detach().float(), "PuOr", vmin=-limit, vmax=limit)
    ax.set(xticks=[], yticks=[], title=title)
    for side in ax.spines.values():
        side.set(visible=True, color=edge or "black", linewidth=5 if edge else 1)
    return picture


def terms(parts: list[Tensor], total: Tensor, names: list[str], title: str = ""):
    """Matrices that add up to the last one; framed in the colour of their rank."""
    limit = max(x.abs().max().item() for x in [*parts, total])
    count = len(parts) + 1
    height = WIDTH / count * total.shape[0] / total.shape[1] + 1.2
    figure, axes = plt.subplots(1, count, figsize=(WIDTH, height), layout="constrained")
    edges = [color(rank) for rank in range(len(parts))] + [None]
    signs = ["+"] * (len(parts) - 1) + ["="]
    for ax, part, name, edge in zip(axes, [*parts, total], names, edges):
        picture = heat(ax, part, name, limit, edge)
    for ax, sign in zip(axes, signs):
        ax.text(1.09, 0.5, sign, fontsize=FONT + 10, transform=ax.transAxes,
                ha="center", va="center")  # fmt: skip
    figure.colorbar(picture, ax=axes, shrink=0.8)
    if title:
        figure.suptitle(title)
    return figure


def compare(pairs: dict[str, tuple[Tensor, Tensor]], names=("without TP", "with TP")):
    """Matrices two ways and their difference, a row each.

    The difference has a scale of its own, written beside it: the largest difference, as
    a part of the largest value.
    """
    figure, axes = plt.subplots(
        len(pairs), 3, figsize=(WIDTH, 3.1 * len(pairs)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, (name, (one, two)) in zip(axes, pairs.items()):
        limit = one.abs().max().item()
        off = (two - one).abs().max().item()
        heat(line[0], one, names[0], limit)
        both = heat(line[1], two, names[1], limit)
        figure.colorbar(both, ax=line[:2].tolist(), shrink=0.8)
        title = f"difference: {off / limit:.0e} of max"
        rest = heat(line[2], two - one, title, off or limit)
        figure.colorbar(rest, ax=line[2], shrink=0.8, format="%.0e")
        line[0].set_ylabel(name, fontsize=FONT, weight="bold")
    for ax in axes.flat:
        ax.set_aspect("auto")
    return figure


# Graphs, meshes


def flow(stages: list[dict], ranks: int, title: str = "", backward: bool = False):
    """A graph that runs through all ranks: a lane a rank, collectives across them.

    Args:
        stages: from left to right, each {"name", "boxes"} with a text a rank, or
            {"name", "moved"}: what is called there, and its payload in bytes. Nothing
            moved is drawn as a dashed line.
        backward: arrows point to the left.
    """
    width = sum(2.5 if "boxes" in stage else 1.7 for stage in stages) + 1.4
    figure, ax = blank(width, ranks * 1.2 + 2.1, title)
    bottom, x = 0.9 + ranks * 1.2, 1.3
    for rank in range(ranks):
        y = 0.9 + rank * 1.2 + 0.5
        write(ax, 1.15, y, f"rank {rank}", ha="right")
        ends = (width - 0.1, 1.25) if backward else (1.25, width - 0.1)
        ax.annotate("", (ends[1], y), (ends[0], y),
                    arrowprops=dict(arrowstyle="-|>", linewidth=1.5))  # fmt: skip
    for stage in stages:
        if "boxes" in stage:
            for rank, text in enumerate(stage["boxes"]):
                y = 0.9 + rank * 1.2
                box(ax, x + 0.15, y, 2.2, 1, [rank])
                write(ax, x + 1.25, y + 0.5, text, color=ink(color(rank)))
            write(ax, x + 1.25, 0.45, stage["name"], weight="bold")
            x += 2.5
            continue
        moved = stage["moved"]
        style = dict(linewidth=9 if moved else 2, linestyle="-" if moved else ":")
        ax.plot([x + 0.85] * 2, [0.9, bottom - 0.2], color="black", **style)
        write(ax, x + 0.85, 0.45, stage["name"], weight="bold")
        text = f"{stage['does']}\n{moved} bytes" if moved else "identity\n0 bytes"
        write(ax, x + 0.85, bottom + 0.45, text, FONT - 1)
        x += 1.7
    return figure


def mesh(coordinates: list[list[int]], axes: list[str], title: str = ""):
    """Ranks at their places on a mesh of two or three axes; the last runs across.

    Args:
        coordinates: a list for each rank, as its groups' ranks tell.
    """
    sizes = [max(column) + 1 for column in zip(*coordinates)]
    layers, (down, across) = math.prod(sizes[:-2]), sizes[-2:]
    step = across * 2.2 + 1.2
    figure, ax = blank(max(layers * step + 2.6, 9), down * 1.6 + 1.5, title)
    for rank, place in enumerate(coordinates):
        layer = place[0] if len(place) == 3 else 0
        x, y = 2.6 + layer * step + place[-1] * 2.2, 1.1 + place[-2] * 1.6
        box(ax, x, y, 1.8, 1.2, [rank])
        write(ax, x + 0.9, y + 0.6, f"rank {rank}", color=ink(color(rank)))
        if place[-2] == 0:
            write(ax, x + 0.9, 0.7, f"{axes[-1]} {place[-1]}", weight="bold")
        if place[-1] == 0 and layer == 0:
            write(
                ax, 2.3, y + 0.6, f"{axes[-2]} {place[-2]}", ha="right", weight="bold"
            )
        if len(place) == 3 and place[1] == place[2] == 0:
            write(ax, x, 0.2, f"{axes[0]} {layer}", weight="bold", ha="left")
    return figure


# Bytes, seconds


def bars(values: dict[str, list[float]], parts: list[str], predicted: dict[str, float],
         unit: str = "bytes", title: str = ""):  # fmt: skip
    """Stacked bars, a name each, with a mark where the formula says the end should be.

    Args:
        values: name → measured, one for each of `parts`.
        predicted: name → what the formula gives for the whole bar.
    """
    figure, ax = plt.subplots(
        figsize=(WIDTH, 0.7 * len(values) + 1.8), layout="constrained"
    )
    most = max([sum(v) for v in values.values()] + list(predicted.values()))
    for y, (name, measured) in enumerate(values.items()):
        left = 0
        for part, (value, fill) in enumerate(zip(measured, PARTS)):
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
    ax.xaxis.set_major_locator(plt.MaxNLocator(5))
    figure.legend(loc="outside upper center", ncols=len(parts) + 1, frameon=False)
    if title:
        ax.set_title(title)
    return figure


HATCHES = ("", "//", "..", "xx", "\\\\", "--")


def timeline(spans: list[tuple], unit: str = "ms", title: str = ""):
    """Who did what when: a lane a rank.

    Args:
        spans: (rank, what, start, end), in that unit; each `what` has a hatch.
    """
    ranks = 1 + max(rank for rank, *_ in spans)
    kinds = list(dict.fromkeys(what for _, what, *_ in spans))
    zero = min(start for *_, start, _ in spans)
    figure, ax = plt.subplots(figsize=(WIDTH, 0.8 * ranks + 1.8), layout="constrained")
    for rank, what, start, end in spans:
        hatch = HATCHES[kinds.index(what) % len(HATCHES)]
        ax.barh(rank, end - start, left=start - zero, height=0.8, hatch=hatch,
                color=color(rank), edgecolor="black")  # fmt: skip
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black",
                  hatch=HATCHES[i % len(HATCHES)])
        for i in range(len(kinds))
    ]  # fmt: skip
    figure.legend(handles, kinds, loc="outside upper center", ncols=len(kinds),
                  frameon=False)  # fmt: skip
    if title:
        ax.set_title(title)
    return figure


def fit(series: dict[str, list[tuple]], lines: dict[str, tuple], x: str, y: str):
    """Measured points, and for each series the line offset + slope · x through them."""
    figure, ax = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    marks = ("o", "s", "^", "D")
    for (name, points), mark, shade in zip(series.items(), marks, PARTS):
        xs, ys = zip(*points)
        ax.plot(xs, ys, mark, color=shade, markersize=9, markeredgecolor="black",
                label=name)  # fmt: skip
        offset, slope = lines[name]
        ax.plot(xs, [offset + slope * v for v in xs], color=shade, linewidth=2)
    ax.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    ax.legend(frameon=False)
    return figure
