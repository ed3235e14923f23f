"""Comparisons: which piece of the full model a rank holds, how tensors are related."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

# Relative differences of tensors that were in such a format for a while.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PADDING = -1  # index of an element that belongs to no parameter of the full model


class FullModel:
    """All elements of the full model as one vector, and where a value is in it."""

    def __init__(self, parts: dict[str, Tensor]):
        self.names = list(parts)
        self.shapes = {name: part.shape for name, part in parts.items()}
        self.first = {}  # name → index of its first element in the vector
        self.total = 0
        for name, part in parts.items():
            self.first[name] = self.total
            self.total += part.numel()
        self.values, self.order = self.vector(parts).sort()

    def vector(self, parts: dict[str, Tensor | None]) -> Tensor:
        """A tensor for each parameter, concatenated; zeros for None."""
        flat = []
        for name, shape in self.shapes.items():
            part = parts[name]
            flat.append(torch.zeros(shape.numel()) if part is None else part.flatten())
        return torch.cat([part.double() for part in flat])

    def find(self, part: Tensor) -> Tensor:
        """The index of each element; PADDING if no element has its value."""
        flat = part.double().flatten().contiguous()
        place = torch.searchsorted(self.values, flat).clamp(max=self.total - 1)
        found = self.values[place] == flat
        return torch.where(found, self.order[place], PADDING).view(part.shape)

    def owner(self, index: int) -> str:
        return next(n for n in reversed(self.names) if index >= self.first[n])

    def indices(self, name: str) -> Tensor:
        """The index of each element of one parameter."""
        shape = self.shapes[name]
        first = self.first[name]
        return torch.arange(first, first + shape.numel()).view(shape)


# ---- Which piece of the full model a rank's parameter is.


class Held(Enum):
    NOTHING = "nothing of the full model"
    SEVERAL = "pieces of several parameters"
    REPLICATED = "replicated"
    SHARD = "a shard"
    BLOCKS = "a slice of each of several blocks"
    PERMUTED = "permuted or partial pieces"
    REPEATED = "elements held several times"


@dataclass(frozen=True)
class Piece:
    """What one rank holds, as a type and in words."""

    held: Held
    words: str
    owner: str = ""  # the parameter of the full model, of several the first
    dim: int | None = None  # of SHARD and BLOCKS: dim, number and count of the pieces
    number: int = 0
    pieces: int = 0
    is_others: bool = False  # it is the piece of another rank


def piece_of(index: Tensor, full: FullModel, rank: int, ranks: int) -> Piece:
    """Which piece of the full model the elements with these indices are."""
    inside = index[index != PADDING]
    if inside.numel() == 0:
        return Piece(Held.NOTHING, Held.NOTHING.value)
    name = full.owner(int(inside.min()))
    last = full.owner(int(inside.max()))
    if name != last:
        return Piece(Held.SEVERAL, f"pieces of {name} … {last}", name)
    whole = full.indices(name)
    if torch.equal(index.flatten(), whole.flatten()):
        return Piece(Held.REPLICATED, Held.REPLICATED.value, name)
    is_unique = len(inside.unique()) == len(inside)
    held = Held.PERMUTED if is_unique else Held.REPEATED
    found = shard_of(index, whole, name, rank, ranks)
    return found or Piece(held, held.value, name)


def slice_of(x: Tensor, dim: int, width: int, number: int) -> Tensor:
    """The slice of this number and width along dim; the last ones may be shorter."""
    first = min(number * width, x.shape[dim])
    return x.narrow(dim, first, min(width, x.shape[dim] - first))


def shard_of(index: Tensor, whole: Tensor, name: str, rank: int, ranks: int):
    """One of 2 to `ranks` slices along some dim, perhaps with padding after it; or such
    a slice of each of several blocks (a fused q, k, v)."""
    for blocks, dim in itertools.product((1, 2, 3, 4), range(whole.dim())):
        for pieces in range(2, ranks + 1):
            if blocks > 1 and whole.shape[dim] % (blocks * pieces):
                continue
            for number in range(pieces):
                parts = []
                for block in whole.chunk(blocks, dim):
                    width = -(-block.shape[dim] // pieces)
                    parts.append(slice_of(block, dim, width, number))
                part = torch.cat(parts, dim)
                if not is_padded_copy(index, part, dim):
                    continue
                text = f"Shard({dim})"
                if blocks > 1:
                    text += f" of each of {blocks} blocks"
                if index.shape[dim] > part.shape[dim]:
                    text += " with padding"
                is_others = pieces == ranks and number != rank
                if pieces != ranks:
                    text += f" over {pieces}, piece {number}"
                elif is_others:
                    text += f", the piece of rank {number}"
                held = Held.SHARD if blocks == 1 else Held.BLOCKS
                return Piece(held, text, name, dim, number, pieces, is_others)
    return None


def is_padded_copy(index: Tensor, part: Tensor, dim: int) -> bool:
    """Is a tensor this part, followed by padding along dim?"""
    if index.dim() != part.dim() or index.shape[dim] < part.shape[dim]:
        return False
    own = index.narrow(dim, 0, part.shape[dim])
    rest = index.narrow(dim, part.shape[dim], index.shape[dim] - part.shape[dim])
    return torch.equal(own, part) and bool((rest < 0).all())


# ---- How the ranks' tensors are related to the full model's tensor.


class Kind(Enum):
    SAME = "same"
    SHARD = "a shard"
    PARTIAL = "partial"  # the sum over the ranks is right
    FACTOR = "a factor"  # each is k times the right one
    BIAS = "bias"  # right, but for a bias that was added k times
    REORDERED = "in another order"
    SHAPE = "of another shape"
    SOME = "right on some ranks"
    ROUNDED = "right but for rounding to float32"
    DIFFERS = "differs between ranks"
    WRONG = "wrong"
    NAN = "nan"
    # Of gradients of parameters only. Replicas: ranks that hold the same piece.
    RIGHT = "right"
    FROZEN = "frozen"
    SUM = "sum"  # over the replicas
    MEAN = "mean"
    FACTORS = "factor per rank"
    SCALED_SUM = "scaled sum"
    TIED = "tied"
    MIXED = "of several pieces"
    NONE = "None"
    NOT_TRAINED = "frozen on the ranks"
    TRAINED = "of a frozen parameter"
    USES = "of its uses"
    OTHERS = "another rank's piece"
    REPLICAS = "differs between replicas"
    UNEXPLAINED = "unexplained"


NOT_COMPARED = (Kind.SHAPE, Kind.REORDERED)  # it may be right in another layout


@dataclass(frozen=True)
class Relation:
    """How the ranks hold a tensor of the full model, as a type and in words."""

    kind: Kind
    words: str = ""
    factor: float = 1.0
    dim: int | None = None  # of a shard
    is_other_layout: bool = False  # right, if it is read in another layout

    @property
    def is_right(self) -> bool:
        return self.kind in (Kind.SAME, Kind.SHARD, Kind.RIGHT, Kind.FROZEN)

    def __str__(self) -> str:
        return self.words or self.kind.value


def is_right(relation: Relation | None) -> bool:
    """Is it known to be right?"""
    return relation is not None and relation.is_right


def is_wrong(relation: Relation | None) -> bool:
    """Is it known to be wrong, also in another layout?"""
    if relation is None or relation.kind in NOT_COMPARED:
        return False
    return not relation.is_right


class Ruler:
    """Compares the ranks' tensors with those of the full model."""

    def __init__(self, ranks: int, allowed: float):
        self.ranks = ranks
        self.allowed = allowed  # relative difference

    def near(self, got: Tensor, expected: Tensor, scale: float) -> bool:
        if got.shape != expected.shape:
            return False
        if got.numel() == 0:
            return True
        return (got - expected).abs().max().item() <= self.allowed * scale

    def all_near(self, tensors, pieces, scale: float, k: float = 1.0) -> bool:
        """Is every tensor k times its piece? Padding after the piece does not count."""
        for x, piece in zip(tensors, pieces):
            if not self.near(trimmed(x, piece).double(), k * piece.double(), scale):
                return False
        return True

    def times(self, tensors, pieces, scale: float) -> float:
        """The k if the tensors are k times their pieces; 0 if they are not. A single
        number is a multiple of any: only a count and 1/count say something of it."""
        k = multiple_of(tensors, pieces)
        limit = scale * max(1, abs(k))
        if abs(k) < 1e-6 or not self.all_near(tensors, pieces, limit, k):
            return 0.0
        is_count = min(abs(n - round(n)) for n in (k, 1 / k)) < 1e-6
        is_single = all(piece.numel() == 1 for piece in pieces)
        return 0.0 if is_single and not is_count else k

    def views(self, tensors: list[Tensor], expected: Tensor) -> list[tuple]:
        """What the ranks may hold of a tensor: the relation, and a piece per rank."""
        found = []
        if all(x.shape == expected.shape for x in tensors):
            found.append((Relation(Kind.SAME), [expected] * self.ranks))
        if any(x.dim() != expected.dim() for x in tensors):
            return found
        for dim in range(expected.dim()):
            pieces = pieces_of(expected, dim, [x.shape[dim] for x in tensors])
            if pieces and all(map(same_shape, tensors, pieces)):
                found.append((Relation(Kind.SHARD, f"Shard({dim})", dim=dim), pieces))
        return found

    def relation(self, tensors: list[Tensor], expected: Tensor) -> Relation:
        """The first of the relations that holds, the simplest ones first."""
        nan = nan_ranks(tensors)
        if nan and not nan_ranks([expected]):
            return Relation(Kind.NAN, f"nan on ranks {nan}")
        scale = scale_of(expected)
        views = self.views(tensors, expected)
        for relation, pieces in views:
            if self.all_near(tensors, pieces, scale):
                return relation
        is_full = bool(views) and views[0][0].kind is Kind.SAME
        if is_full and self.near(sum(tensors), expected, scale):
            if not all(self.near(x, tensors[0], scale) for x in tensors):
                return Relation(Kind.PARTIAL)
        for relation, pieces in views:
            k = self.times(tensors, pieces, scale)
            if k:
                return self.factor(k)
            if self.is_partial_shard(tensors, pieces, scale):
                words = f"partial {relation} of ranks that share a piece"
                return Relation(Kind.PARTIAL, words)
        rounded = self.rounded(tensors, views, scale)
        if rounded is not None:
            return rounded
        if self.are_sorted_alike([torch.cat([x.flatten() for x in tensors])], expected):
            return Relation(Kind.REORDERED)
        right = self.right_ranks(tensors, views, scale)
        if right:
            return Relation(Kind.SOME, f"right on ranks {right} only")
        if self.are_sorted_alike(tensors, expected):
            return Relation(Kind.REORDERED)
        if not views:
            shapes = " ".join(str(list(shape)) for shape in {x.shape for x in tensors})
            words = f"of shape {shapes}, not {list(expected.shape)}"
            return Relation(Kind.SHAPE, words)
        if is_full and not all(torch.equal(x, tensors[0]) for x in tensors):
            return Relation(Kind.DIFFERS)
        return Relation(Kind.WRONG)

    def is_partial_shard(self, tensors, pieces, scale: float) -> bool:
        """Is the sum over the ranks that have the same piece right, but no tensor is?
        (A key/value head that several ranks have.)"""
        places = {}  # where a piece begins → ranks
        for rank, piece in enumerate(pieces):
            places.setdefault(piece.storage_offset(), []).append(rank)
        if len(places) == 1 or all(len(ranks) == 1 for ranks in places.values()):
            return False
        sums = [sum(tensors[rank] for rank in ranks) for ranks in places.values()]
        targets = [pieces[ranks[0]] for ranks in places.values()]
        return self.all_near(sums, targets, scale)

    def rounded(self, tensors, views: list[tuple], scale: float) -> Relation | None:
        """Is it right but for the rounding errors of a format? Of a coarse one only if
        all elements are numbers of this format."""
        for dtype, limit in ROUNDING.items():
            if dtype is not torch.float32:
                if not all(torch.equal(x, x.to(dtype).to(x.dtype)) for x in tensors):
                    continue
            for _, pieces in views:
                if self.all_near(tensors, pieces, scale * limit / self.allowed):
                    name = str(dtype).removeprefix("torch.")
                    return Relation(Kind.ROUNDED, f"right but for rounding to {name}")
        return None

    def in_any_layout(self, tensors: list[Tensor], expected: Tensor) -> Relation:
        """The relation, also if the ranks have swapped batch and sequence, or have made
        one dim of both. Only what is then simple is known."""
        simple = (Kind.PARTIAL, Kind.FACTOR, Kind.ROUNDED)
        first = self.relation(tensors, expected)
        if first.is_right or first.kind in simple:
            return first
        for words, others in other_layouts(tensors, expected):
            found = self.relation(others, expected)
            words = f"{found}, {words}"
            if found.is_right:
                return Relation(Kind.REORDERED, words, is_other_layout=True)
            if found.kind in simple:
                return Relation(found.kind, words, found.factor)
        return first

    def factor(self, k: float) -> Relation:
        """In words: T times, 1/T, or k times."""
        if abs(k - self.ranks) < 1e-6:
            return Relation(Kind.FACTOR, "T times", k)
        if abs(k * self.ranks - 1) < 1e-6:
            return Relation(Kind.FACTOR, "1/T", k)
        return Relation(Kind.FACTOR, f"{k:.6g} times", k)

    def gradient_factor(self, k: float) -> Relation:
        words = {self.ranks: " (T)", 1 / self.ranks: " (1/T)"}
        near = [word for count, word in words.items() if abs(k - count) < 1e-6]
        return Relation(Kind.FACTOR, f"factor {k:.6g}{''.join(near)}", k)

    def are_sorted_alike(self, tensors: list[Tensor], expected: Tensor) -> bool:
        """Has each tensor the elements of the full one, in some order?"""
        target = sorted_of(expected)
        if any(x.numel() != target.numel() for x in tensors):
            return False
        scale = scale_of(expected)
        return all(self.near(sorted_of(x), target, scale) for x in tensors)

    def right_ranks(self, tensors, views: list[tuple], scale: float) -> list[int]:
        """The ranks whose piece is right, if those of others are not."""
        for _, pieces in views:
            right = []
            for rank, x in enumerate(tensors):
                own = trimmed(x, pieces[rank])
                if own.numel() and self.near(own, pieces[rank], scale):
                    right.append(rank)
            if right:
                return right
        return []


def scale_of(x: Tensor) -> float:
    """What differences are compared with: the largest element."""
    return max(x.abs().max().item(), 1e-300) if x.numel() else 1.0


def nan_ranks(tensors: list[Tensor | None]) -> list[int]:
    """The places of tensors that contain a nan."""
    held = enumerate(tensors)
    return [place for place, x in held if x is not None and x.isnan().any()]


def sorted_of(x: Tensor) -> Tensor:
    return x.flatten().sort().values


def same_shape(x: Tensor, piece: Tensor) -> bool:
    """Has a tensor its piece's shape, or more in one dim (padding)?"""
    more = [own - size for own, size in zip(x.shape, piece.shape)]
    return min(more, default=0) >= 0 and len([n for n in more if n > 0]) <= 1


def trimmed(x: Tensor, piece: Tensor) -> Tensor:
    """A tensor without its padding."""
    for dim, size in enumerate(piece.shape):
        x = x.narrow(dim, 0, size)
    return x


def pieces_of(full: Tensor, dim: int, widths: list[int]) -> list[Tensor]:
    """The ranks' slices of N elements along dim; [] if that is no sharding.

    Slices of one width may be replicated (fewer pieces than ranks) or padded.
    """
    size = full.shape[dim]
    if sum(widths) == size:
        return list(full.split(widths, dim))
    width = widths[0]
    if any(w != width for w in widths) or width == 0 or width >= size:
        return []
    pieces = -(-size // width)
    ranks = len(widths)
    if pieces > ranks or (ranks % pieces and width * (ranks - 1) >= size + width):
        return []
    copies = max(1, ranks // pieces)
    return [slice_of(full, dim, width, rank // copies) for rank in range(ranks)]


def other_layouts(tensors: list[Tensor], expected: Tensor) -> list[tuple]:
    """The ranks' tensors in the full model's layout, and what was done, in words."""
    found = []
    if expected.dim() <= 2:
        return found
    if all(x.dim() == expected.dim() for x in tensors):
        swapped = [x.transpose(0, 1) for x in tensors]
        found.append(("with dims 0 and 1 swapped", swapped))
    shape = expected.shape
    are_flat = all(x.dim() == expected.dim() - 1 for x in tensors)
    if are_flat and all(len(x) == shape[0] * shape[1] for x in tensors):
        words = "with dims 0 and 1 in one"
        found.append((words, [x.unflatten(0, shape[:2]) for x in tensors]))
        other = (shape[1], shape[0])
        turned = [x.unflatten(0, other).transpose(0, 1) for x in tensors]
        found.append((f"{words}, the second one first", turned))
    return found


def equal_ones(tensors: list[Tensor | None]) -> list[list[int]]:
    """The places of tensors, those of equal ones together; None is equal to nothing."""
    found = []
    for place, x in enumerate(tensors):
        for places in found:
            first = tensors[places[0]]
            if x is not None and first is not None and torch.equal(x, first):
                places.append(place)
                break
        else:
            found.append([place])
    return found


def multiple_of(tensors: list[Tensor], pieces: list[Tensor]) -> float:
    """The k for which the tensors are closest to k times their pieces."""
    over = 0.0
    under = 0.0
    for x, piece in zip(tensors, pieces):
        over += (trimmed(x, piece).double() * piece.double()).sum().item()
        under += (piece.double() * piece.double()).sum().item()
    return over / under if under else 0.0


def wrong_share(got: list[Tensor], right: list[Tensor], limit: float) -> str:
    """How many elements are off by more than the limit on each rank, and by how much
    if that is little."""
    shares = []
    largest = 0.0
    for x, e in zip(got, right):
        off = (x - e).abs()
        if not off.numel() or off.isnan().any():
            shares.append("nan" if off.numel() else "none")
            largest = max(largest, off.numel())
            continue
        share = (off > limit).double().mean().item()
        shares.append("<1%" if 0 < share < 0.005 else f"{share:.0%}")
        largest = max(largest, off.max().item() / scale_of(e))
    if all(share in ("0%", "none") for share in shares):
        return ""  # what is wrong is not a value
    text = f"wrong elements by rank: {' '.join(shares)}"
    return text + (f" by {largest:.1g} of the largest" if largest < 2e-2 else "")


def wrong_rows(got: Tensor, right: Tensor, limit: float) -> list[int]:
    """The first indices of elements that are off by more than the limit."""
    off = (got - right).abs() > limit
    return off.nonzero()[:, 0].unique().tolist() if off.dim() else []


def numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
