"""What a fault's test looks at: one parameter, one tensor, one gradient, one step, …

Every subject has `where` (a parameter, a module, the loss), `module` (if it belongs to
one) and `seen` (what is known of it, in words), and `case` with the facts of all ranks.
"""

from __future__ import annotations

import math
import re

import torch

from .case import Case
from .compare import (
    NOT_COMPARED,
    Held,
    Kind,
    Relation,
    equal_ones,
    is_right,
    is_wrong,
    multiple_of,
    numbers,
    scale_of,
    trimmed,
    wrong_rows,
    wrong_share,
)
from .record import Point, is_within

VAGUE = (Kind.REPLICAS, Kind.UNEXPLAINED)  # gradients whose cause may be elsewhere
OF_FLOW = (*VAGUE, Kind.SUM, Kind.NONE, Kind.MIXED)  # or in what arrives
FUSED = re.compile(  # but not a list of matrices (qkv.0, qkv.weights.0)
    r"(qkv|query_key_value|c_attn|in_proj|gate_up|up_gate|w12|w13|fused)(?!.*\.\d)",
    re.IGNORECASE,
)


class Subject:
    where = ""
    module = ""
    seen = ""
    returned = ()  # modules that return a wrong gradient to it, and how this is related

    def __init__(self, case: Case, where: str = "", module: str = "", seen: str = ""):
        self.case = case
        self.where = where or self.where
        self.module = module or case.owner(where)
        self.seen = seen

    def category(self, key: str) -> str:
        """What a finding is called: the key of its fault, or what says more."""
        return key

    def is_inside(self, module: str) -> bool:
        """Is a module inside of the one to which this belongs?"""
        return module != self.module and is_within(module, self.module)


def of_relation(stage: str):
    """A finding is called by how its subject is related, if the fault is a general one
    of this stage ("forward", "gradient")."""

    def category(self, key: str) -> str:
        return f"{stage} {self.relation}" if key.startswith(stage) else key

    return category


class Start(Subject):
    """What the ranks begin with: the batch and the full model."""

    where = "batch"

    def other_batch(self) -> str | list:
        found = unlike_first([facts.batch for facts in self.case.everyone])
        return found and f"ranks {found} have another batch than rank 0"

    def other_model(self) -> tuple | list:
        held = [list(facts.full.parts.values()) for facts in self.case.everyone]
        found = unlike_first(held)
        return found and ("build()", f"it returns another model on ranks {found}")


def span(rows: torch.Tensor) -> str:
    """Rows in words: 0 to 3 and 8 to 11."""
    rows = rows.tolist()
    starts = [0] + [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    ends = [*starts[1:], len(rows)]
    parts = [f"{rows[i]} to {rows[j - 1]}" for i, j in zip(starts, ends)]
    more = ", …" if len(parts) > 4 else ""
    return " and ".join(parts[:4]) + more


def unlike_first(held: list[list[torch.Tensor]]) -> list[int]:
    """The ranks whose tensors are not those of rank 0."""
    found = []
    for rank, own in enumerate(held):
        is_as_long = len(own) == len(held[0])
        if not is_as_long or not all(map(torch.equal, own, held[0])):
            found.append(rank)
    return found


class Parameter(Subject):
    """A parameter of the ranks, if the loss is wrong."""

    def __init__(self, case: Case, name: str):
        super().__init__(case, name)
        self.ranks = case.holders(name)
        self.pieces = [case.pieces[rank][name] for rank in self.ranks]
        self.unknown = case.unknown[name]

    def unknown_elements(self) -> str:
        """Elements that the full model does not have, in words.

        A T-th of the full parameter is no fault: a bias that is added on every rank.
        Nor are zeros: an added bias, or LoRA's B.
        """
        if not self.unknown:
            return ""
        rank, share = self.unknown
        x = self.case.own[rank].parts[self.where]
        if not x.any() or (self.case.model.find(x * self.case.ranks) >= 0).all():
            return ""
        return f"{share:.0%} of its elements on rank {rank} are in no parameter of it"

    def other_rows(self) -> str:
        """Is it a bias with other rows than the weight of its module, or a norm (of
        keys) that is a shard with other rows than the keys' weight?"""
        shapes = self.case.model.shapes
        weight = f"{self.where.rpartition('.')[0]}.weight"
        is_norm = weight not in shapes or len(shapes[weight]) < 2
        weight = self.of_norm() if is_norm else weight
        if weight == self.where or not {weight, self.where} <= set(shapes):
            return ""
        if shapes[self.where] != shapes[weight][:1] or len(shapes[weight]) < 2:
            return ""
        for rank in self.ranks:
            own, of_weight = self.rows(rank, self.where), self.rows(rank, weight)
            if own is None or of_weight is None:
                continue
            is_as_long = own.shape == of_weight.shape or is_norm
            if is_as_long and not torch.equal(of_weight, own):
                return (
                    f"rank {rank} has rows {span(own)} of it, and rows "
                    f"{span(of_weight)} of {weight}"
                )
        return ""

    def of_norm(self) -> str:
        """The weight whose output is normed by this shard (k_proj of k_norm)."""
        match = re.fullmatch(r"(.*\b[a-z]+_)\w*norm(\.weight)?", self.where)
        if match is None or self.pieces[0].held is not Held.SHARD:
            return ""
        names = [n for n in self.case.model.shapes if n.startswith(match[1])]
        return next((name for name in names if "norm" not in name), "")

    def rows(self, rank: int, name: str) -> torch.Tensor | None:
        """Which rows of a parameter of the full model a rank holds."""
        case = self.case
        if name not in case.index[rank]:
            return None
        shape = case.model.shapes[name]
        places = case.index[rank][name] - case.model.first[name]
        is_own = (places >= 0) & (places < shape.numel())
        width = shape[1:].numel()
        if not places.numel() or not is_own.all():
            return None
        return (places.flatten(1)[:, 0] if width > 1 else places) // width

    def foreign(self) -> str:
        """Which elements belong to a parameter with another name, in words."""
        case = self.case
        is_known = self.where in case.model.names and not self.unknown
        if not is_known or self.where in case.full.tied:
            return ""
        if case.is_renumbered(self.where):
            return ""
        for rank in self.ranks:
            index = case.index[rank][self.where]
            is_own = torch.isin(index, case.model.indices(self.where))
            foreign = index[(index >= 0) & ~is_own]
            if len(foreign):
                share = len(foreign) / index.numel()
                other = case.model.owner(int(foreign[0]))
                return f"{share:.0%} of its elements on rank {rank} belong to {other}"
        return ""

    def others_piece(self) -> str:
        """Which rank holds the piece of another one, in words."""
        T = self.case.ranks
        if self.unknown:
            return ""
        # Two groups of ranks (dp and tp) may have any order, if none is cut in T.
        held = [piece for own in self.case.pieces for piece in own.values()]
        is_cut = len(self.ranks) == T and any(piece.pieces == T for piece in held)
        for rank, piece in zip(self.ranks, self.pieces):
            if piece.is_others:
                return f"rank {rank} holds {piece.words}"
            usual = rank * piece.pieces // T
            is_shared = is_cut and piece.held is Held.SHARD and piece.pieces < T
            if is_shared and piece.number != usual:
                return (
                    f"rank {rank} holds piece {piece.number} of {piece.pieces}; if "
                    f"neighbors share a piece, its piece is {usual}"
                )
        return ""


class Missing(Subject):
    """A parameter of the full model, of which all elements must be on some rank."""

    def __init__(self, case: Case, name: str):
        super().__init__(case, name)
        held = [x.flatten() for found in case.index for x in found.values()]
        missing = ~torch.isin(case.model.indices(name), torch.cat(held))
        self.share = missing.double().mean().item()

    def in_words(self) -> str | bool:
        case = self.case
        pieces = [pieces.get(self.where) for pieces in case.pieces]
        is_others = any(piece is not None and piece.is_others for piece in pieces)
        is_known = not (case.unmatched or self.where in case.full.tied or is_others)
        return is_known and f"{self.share:.0%} of it is held by no rank"


class Buffer(Subject):
    """A buffer that has its name from the full model, if the loss is wrong."""

    def wrong(self) -> str:
        how = self.case.relation_of_state("buffers", self.where)
        if how is None or how.is_right or how.kind in NOT_COMPARED:
            return ""
        return f"it is {how}"


class Output(Subject):
    """The first wrong tensor in forward: a module's output, or an input of a module
    that the code around it has made."""

    category = of_relation("forward")

    def __init__(self, case: Case, point: Point, notes: list[str]):
        self.case = case
        self.point = point
        around = case.around(point)
        self.module = around[0].module if point.is_input and around else point.module
        self.where = self.module or "the model"
        self.expected = case.full.value(point)
        self.held = [trace.value(point) for trace in case.own]
        self.relation = self.bias_relation() or case.relation_of(point)
        self.kind = self.relation.kind
        self.seen = "; ".join([*notes, *self.details(is_all_compared=not notes[1:])])

    def details(self, is_all_compared: bool) -> list[str]:
        case = self.case
        point = self.point
        found = []
        if point.call and not point.is_input:
            found.append(f"its calls before are right: {point}")
        if point.slot:
            found.append(f"{point} is the first wrong tensor: {self.relation}")
            before = case.order[: case.order.index(point)]
            right = [other for other in before if is_right(case.relation_of(other))]
            if right and point.is_input and is_all_compared:
                found.append(
                    f"{right[-1]} is right, so the fault is in what the forward of "
                    f"{self.where} does in between"
                )
        if all(x.shape == self.expected.shape for x in self.held):
            limit = case.ruler.allowed * scale_of(self.expected)
            found.append(wrong_share(self.held, [self.expected] * case.ranks, limit))
        places = self.wrong_places()
        if places and self.kind in (Kind.WRONG, Kind.DIFFERS):
            found.append(places)
        inside = [] if point.is_input else self.inside()
        if inside:
            found.append(
                f"the outputs of all compared modules inside of it ({len(inside)}, up "
                f"to {inside[-1]}) are right, so the fault is in its own forward"
            )
        return found

    def counted_term(self) -> str:
        """A tensor of which it contains several times what it should, or nothing."""
        case = self.case
        expected = self.expected.double()
        if any(x.shape != expected.shape for x in self.held):
            return ""
        off = [x.double() - expected for x in self.held]
        scale = scale_of(expected)
        for point in reversed(case.order[: case.order.index(self.point)]):
            term = case.full.value(point)
            relation = case.relation_of(point)
            if relation is None or relation.kind not in (Kind.SAME, Kind.PARTIAL):
                continue
            if term.numel() != expected.numel():
                continue
            term = term.reshape(expected.shape)  # tokens in one dim (a router)
            name = str(point) if point.slot else f"the output of {point}"
            k = case.ruler.times(off, [term.double()] * case.ranks, scale)
            for count, words in ((case.ranks, "T times"), (0, "0 times")):
                if abs(k - (count - 1)) < 1e-6:
                    return f"it is right if {name} counts once, not {words}"
            if k:
                return f"it contains {k:.4g} times {name} too much"
        return ""

    def norm_of_shard(self) -> str:
        """Is it a norm of a sharded tensor that is right?"""
        name = self.case.full.classes.get(self.point.module, "")
        is_of_channel = re.search("batch|instance", name.lower())
        if self.point.slot or is_of_channel or "norm" not in name.lower():
            return ""
        how = self.case.relation_of(self.point._replace(slot="input 0"))
        dim = 1 if "group" in name.lower() else self.expected.dim() - 1
        if how is None or how.kind is not Kind.SHARD or how.dim != dim:
            return ""
        return f"it is a {name}, and its input is right ({how})"

    def fused(self) -> tuple | None:
        """A weight in this module that is one slice, and whose name says that it is
        several matrices."""
        case = self.case
        inside = {}  # name → how it is held
        for name, piece in case.pieces[0].items():
            if self.module and is_within(case.owner(name), self.module):
                inside[name] = piece
        if any(x.held in (Held.BLOCKS, Held.PERMUTED) for x in inside.values()):
            return None  # that one may be read in a wrong order as well
        for name, piece in inside.items():
            is_one = piece.held is Held.SHARD and piece.dim == 0
            is_fused = is_one and FUSED.search(name)
            if is_fused and not self.is_read_right(Point(case.owner(name))):
                said = "by its name it is several matrices, and it is one Shard(0)"
                return name, said
        return None

    def is_read_right(self, point: Point) -> bool:
        """Is a part of this tensor right, or what is made of its parts?"""
        full = self.case.full
        made = full.made_of.get(full.point(point), ())
        made = [p for p in made if full.value(p).numel() < full.value(point).numel()]
        return any(is_right(self.case.relation_of(other)) for other in made)

    def other_cut(self) -> tuple | None:
        """A buffer in full, and a sharded tensor of this module whose dims it has."""
        case = self.case
        held = {}  # name → its full shape, the dim of its shard
        for name, x in case.full.buffers.items():
            how = case.relation_of_state("buffers", name)
            if is_right(how):
                held[name] = x.shape, how.dim
        for name, piece in case.pieces[0].items():
            if piece.held is Held.SHARD:
                held[name] = case.model.shapes[piece.owner], piece.dim
        own = [name for name in held if case.owner(name) == self.module]
        for name in own:
            shape, dim = held[name]
            for other in own if dim is not None else ():
                full, is_cut = held[other]
                is_one = is_cut is None and len(full) == len(shape)
                if is_one and full[dim] > 1 and shape[dim] % full[dim] == 0:
                    return other, f"{name} is Shard({dim}), and it is replicated"
        return None

    def is_same_on_all(self) -> bool:
        is_full = all(x.shape == self.expected.shape for x in self.held)
        return is_full and len(equal_ones(self.held)) <= 1

    def is_embedding(self) -> bool:
        """Has it a weight, and gets no numbers but tokens?"""
        full = self.case.full
        weight = f"{self.point.module}.weight"
        is_known = weight in full.parts or weight in full.tied
        reads = self.point._replace(slot="input 0") in full.writers
        return is_known and not reads and not self.point.is_input

    def partial_input(self) -> str:
        """The input of its module that is a partial sum, if there is one."""
        for point in self.case.full.writers:
            if point._replace(slot="") == self.point:
                how = self.case.relation_of(point)
                if how is not None and how.kind is Kind.PARTIAL:
                    return f"{point} is partial"
        return ""

    def of_ids(self) -> bool:
        """Are these the token ids that the model returns?"""
        is_whole = (self.expected == self.expected.round()).all()
        is_last = not self.point.module and not self.point.is_input
        return bool(is_last and is_whole and self.case.first.is_forward_only)

    def wrong_places(self) -> str:
        """Where along each dim but the last it is wrong, if only at some places."""
        limit = self.case.ruler.allowed * scale_of(self.expected)
        views = self.case.ruler.views(self.held, self.expected)
        if not views or views[0][0].dim not in (None, self.expected.dim() - 1):
            return ""  # a place along another dim is another one per rank
        off = torch.zeros(self.expected.shape[:-1])
        for x, piece in zip(self.held, views[0][1]):
            off += ((trimmed(x, piece) - piece).abs() > limit).sum(-1)
        found = []
        for dim in range(off.dim()):
            rows = off.transpose(0, dim).flatten(1) if off.dim() > 1 else off[:, None]
            wrong = rows.any(1).nonzero().flatten().tolist()
            if len(wrong) < len(rows):
                found.append(f"at {wrong} of {len(rows)} along dim {dim}")
        return f"it is wrong {' and '.join(found)} only" if found else ""

    def inside(self) -> list[str]:
        """The compared modules inside of this one."""
        names = []
        for point in self.case.full.order:
            is_output = self.is_inside(point.module) and not point.is_input
            if is_output and self.case.relation_of(point):
                names.append(point.module)
        return list(dict.fromkeys(names))

    def biases(self) -> list[torch.Tensor]:
        """Biases that the output may contain, its own and those near it, as tensors
        that can be added to it: their dim may be any (a convolution's is 1)."""
        if self.point.is_input:
            return []
        parent = self.point.module.rpartition(".")[0]
        found = []
        for prefix in (f"{self.point.module}.", f"{parent}." if parent else ""):
            for other, x in self.case.full.parts.items():
                if not other.startswith(prefix) or not other.endswith("bias"):
                    continue
                for dim in reversed(range(self.expected.dim())):
                    if x.shape == (self.expected.shape[dim],):
                        shape = [1] * self.expected.dim()
                        shape[dim] = len(x)
                        found.append(x.view(shape))
        return found

    def bias_relation(self) -> Relation | None:
        """Is the output, or its sum over the ranks, off by a multiple of a bias?"""
        case = self.case
        expected = self.expected.double()
        scale = scale_of(expected)
        for bias in self.biases():
            for _, pieces in case.ruler.views(self.held, expected):
                if not all(fits(bias, piece) for piece in pieces):
                    continue
                own = [trimmed(x, p).double() for x, p in zip(self.held, pieces)]
                off = [x - piece for x, piece in zip(own, pieces)]
                k = case.ruler.times(off, [bias.expand_as(x) for x in off], scale)
                if abs(k) > 1e-3:
                    return Relation(Kind.BIAS, f"bias added {k + 1:.4g} times", k + 1)
                rest = [x - bias for x in own]
                k = case.ruler.times(rest, [piece - bias for piece in pieces], scale)
                if abs(k) > 1e-3:
                    words = f"{case.ruler.factor(k)} but for the bias"
                    return Relation(Kind.FACTOR, words, k)
            if all(x.shape == expected.shape for x in self.held):
                off = sum(self.held).double() - expected
                k = case.ruler.times([off], [bias.expand_as(off)], scale)
                if abs(k) > 1e-3 and is_never_summed(case, self.point):
                    return Relation(Kind.PARTIAL, "partial, but for the bias")
                if abs(k) > 1e-3:
                    return Relation(Kind.BIAS, f"bias added {k + 1:.4g} times", k + 1)
        return None


def fits(bias, piece) -> bool:
    """Can a bias be added to this piece without a change of its shape?"""
    return all(b in (1, n) for b, n in zip(bias.shape, piece.shape))


def is_never_summed(case: Case, point: Point) -> bool:
    """Does no module around this tensor sum it?

    A partial output is right if the module around it sums it, even if that module
    is wrong for another reason or scales the sum.
    """
    for around in case.around(point):
        relation = case.relation_of(around)
        if relation is not None and relation.kind is not Kind.PARTIAL:
            held = [trace.value(around) for trace in case.own]
            same = all(torch.equal(x, held[0]) for x in held)
            is_scaled = relation.kind is Kind.FACTOR
            is_shard = held[0].shape != case.full.value(around).shape
            return not (relation.is_right or is_scaled or same or is_shard)
    return True


class Loss(Subject):
    """The loss, if no tensor before it is wrong."""

    where = "loss"

    def __init__(self, case: Case, notes: list[str]):
        self.case = case
        losses = [trace.loss for trace in case.own]
        ratio = losses[0] / case.full.loss if case.full.loss else 0.0
        texts = ["no compared output of a module is wrong", *notes]
        if abs(ratio - 1) > 1e-3:
            texts.append(f"it is {ratio:.4g} times the right one")
        self.nan = [rank for rank, loss in enumerate(losses) if loss != loss]
        if len(set(losses)) > 1:
            texts.append(f"it differs between ranks: {numbers(losses)}")
        self.seen = "; ".join(texts)
        self.losses = losses

    def is_nan(self) -> str:
        return f"it is nan on ranks {self.nan}" if self.nan else ""

    def is_same(self) -> bool:
        return self.case.are_near(self.losses, self.losses[0])

    def counts_columns_again(self) -> str:
        """Is it log T too large? A sum of exponentials counts every column T times."""
        off = math.log(self.case.ranks)
        if not self.case.are_near(self.losses, self.case.full.loss + off):
            return ""
        return f"it is log {self.case.ranks} too large"

    def is_part(self) -> str:
        """Is it each rank's own part, so that only their sum or mean is right?"""
        total = sum(self.losses)
        if self.is_same():
            return ""
        for words, value in (("sum", total), ("mean", total / self.case.ranks)):
            if self.case.are_near([value], self.case.full.loss):
                return f"the {words} of the ranks' losses is right"
        return ""


class Flow(Subject):
    """The first wrong gradient of a tensor in backward, if a parameter's is wrong."""

    def __init__(self, case: Case, point: Point, wrong: list[str]):
        self.case = case
        inner = case.full.point(point)  # a module that returns this tensor unchanged
        own = case.own[0]
        is_known = all(trace.flow(inner) is not None for trace in case.own)
        is_same = is_known and own.point(inner) == own.point(point)  # on ranks as well
        self.point = inner if is_same else point
        self.relation = case.relation_of(point, "flow")
        self.kind = self.relation.kind
        self.where = self.module = self.point.module
        self.wrong = wrong
        closest = case.gradient(wrong[0])  # to the loss
        self.is_unexplained = closest.kind is Kind.UNEXPLAINED
        name = self.point if self.point.slot else f"output of {self.point}"
        self.text = f"dL/d({name}): {self.relation}"
        self.returned = self.readers()

    def is_nan(self) -> tuple | bool:
        place = self.of_loss() or (self.where or "the model", self.text)
        return self.kind is Kind.NAN and place

    def of_loss(self) -> tuple | bool:
        own = self.case.own[0]
        if not self.is_of_loss() or self.kind is Kind.PARTIAL:
            return False  # a sum is missing behind it
        if own.point(self.point) in map(own.point, own.outputs(Point(""))):
            return "loss", self.text
        return "the model", f"{self.text}; the model makes its output of this tensor"

    def partial(self) -> str | bool:
        """Do all that return something wrong return a partial sum?"""
        kinds = {relation.kind for _, relation in self.returned} or {self.kind}
        is_partial = Kind.PARTIAL in (self.kind, *kinds) and len(kinds) == 1
        words = [f"returned wrong by {name} ({how})" for name, how in self.returned]
        text = "; ".join([self.text, *words])
        return is_partial and self.is_unexplained and text

    def cut_off(self) -> tuple | None:
        """The first module in forward that gets an input without a gradient, unlike in
        the full model, although a gradient arrives at its output."""
        own = self.case.own
        full = self.case.full
        for point in full.writers:
            is_same = is_right(self.case.relation_of(point))
            flows = [trace.flow(point._replace(slot="")) for trace in own]
            arrives = point in full.returned and not any(x is None for x in flows)
            if is_same and arrives and not any(point in t.returned for t in own):
                return point.module, f"{point} has no gradient on the ranks"
        return None

    def is_behind(self, name: str) -> bool:
        """Does a parameter act on it? Otherwise it says nothing of its gradient, unless
        the parameter is in a module whose own backward is wrong."""
        case = self.case
        around = self.backward_of() if case.arrival(name) is None else None
        is_around = around is not None and name.startswith(f"{around[0]}.")
        return is_around or case.order.index(self.point) >= case.begins(name)

    def is_of_loss(self) -> bool:
        """Is it the gradient that the loss returns?"""
        return self.case.full.point(self.point) in self.case.ends()

    def readers(self) -> list[tuple[str, Relation]]:
        """Modules, or functions of a module, that return a wrong gradient to it."""
        case = self.case
        found = []
        for reader in self.common_readers():
            relation = case.relation_of(reader, "back")
            if is_wrong(relation):
                found.append((reader.module, relation))
        names = [name for name, _ in found]
        smallest = []
        for name, relation in found:
            if not any(other.startswith(f"{name}.") for other in names):
                smallest.append((name, relation))
        return smallest or self.functions()

    def common_readers(self) -> list[Point]:
        """The inputs of modules that are this tensor, in the full model and here."""
        own = self.case.own[0].readers(self.point)
        full = self.case.full.readers(self.point)
        return [reader for reader in full if reader in own]

    def functions(self) -> list[tuple[str, Relation]]:
        """The forward around it, if what is wrong is not returned by any module."""
        case = self.case
        if self.is_of_loss():
            return []
        readers = self.common_readers()
        rest = case.full.of_others(self.point, readers)
        held = [trace.of_others(self.point, readers) for trace in case.own]
        if self.user() is None or rest is None or any(x is None for x in held):
            return []
        scale = scale_of(case.full.flow(self.point))
        relation = case.compare(held, rest)
        if case.ruler.near(rest, 0 * rest, scale) or not is_wrong(relation):
            return []
        return [(f"the forward of {self.user()}", relation)]

    def user(self) -> str | None:
        """Whose forward works with it: a module that returns it as it is does not."""
        full = self.case.full
        for around in self.case.around(self.point):
            if full.point(around) != full.point(self.point):
                return around.module or "the model"
        return None

    def made_after(self) -> list[Point]:
        """Inputs that the same forward has made from this tensor or from others.

        Here it may have made one (by a gather) that is this tensor in the full model.
        """
        full = self.case.full
        own = self.case.own[0]
        point = own.point(self.point)
        known = list(own.values)
        made = known[known.index(point) + 1 :] if point in known else []
        after = full.order[full.order.index(self.point) + 1 :]
        after += [other for other in made if other not in after]
        callers = {**own.callers, **full.callers}
        caller = callers.get(self.point)
        return [p for p in after if p.is_input and callers.get(p) == caller]

    def slicer(self) -> tuple[str, str] | None:
        """Who sends back a slice of each rank's own partial gradient: (place, input).

        Column-parallel linears that read an all-gathered tensor return a partial sum
        each. If the gather is inside of a module, it is computed here, as dL/dy @ W.
        """
        case = self.case
        got = [trace.flow(self.point) for trace in case.own]
        for point in self.made_after():
            partial = [trace.flow(point) for trace in case.own]
            if case.is_slice_of(got, partial, case.full.flow(point)):
                place = self.user() or "the model"
                return place, self.sliced(str(point), f"in the forward of {place}")
        readers = case.full.readers(self.point)
        for reader in sorted(readers, key=lambda r: -r.module.count(".")):
            got = [trace.returned.get(reader) for trace in case.own]
            ranks = range(case.ranks)
            partial = [case.column_partial(reader.module, rank) for rank in ranks]
            if case.is_slice_of(got, partial, case.full.returned.get(reader)):
                return reader.module, self.sliced("the output of its gather", "in it")
        return None

    def sliced(self, gathered: str, place: str) -> str:
        return (
            f"the gradient of {gathered} is partial on each rank, and the gradient of "
            f"{self.point} is each rank's slice of its own: the gather is {place}"
        )

    def is_rounded(self) -> tuple[str, str] | None:
        """A module that returns a gradient which is right but for rounding."""
        for reader, relation in self.returned:
            if relation.kind is Kind.ROUNDED:
                return reader, self.text
        return None

    def summed_again(self) -> tuple[str, str] | None:
        """Who returns a complete gradient that is summed over the ranks, as if it were
        partial?"""
        case = self.case
        place, name, text = self.counted({case.ranks - 1: "T times"}) or ("", "", "")
        for other in case.matched if name else ():
            piece = case.pieces[0].get(other)
            is_sharded = piece is not None and piece.held in (Held.SHARD, Held.BLOCKS)
            is_in_it = is_sharded and is_within(case.owner(other), name)
            if is_in_it and case.gradient(other).is_right:
                text += f". {name} is sharded, so f is applied twice in front of it"
                break
        return text and (place, text)

    def lost_term(self) -> tuple[str, str] | None:
        words = {1 / self.case.ranks - 1: "1/T times", -1: "0 times"}
        place, _, text = self.counted(words) or ("", "", "")
        return text and (place, text)

    def counted(self, words: dict[float, str]) -> tuple[str, str, str] | None:
        """A gradient that is returned to it and counts another number of times: the
        place, whose it is, and what is known. It is known of the full model."""
        case = self.case
        full = case.full
        right = full.flow(self.point).double()
        held = [trace.flow(self.point) for trace in case.own]
        user = self.user() or "the model"
        terms = []  # place, name, gradient
        readers = full.readers(self.point)
        for reader in readers:
            name = reader.module or "the model"
            terms.append((user, name, full.returned.get(reader)))
            residual = (name, f"the residual in {name}")
            terms.append((*residual, full.flow(reader._replace(slot=""))))
        if self.user() is not None:
            name = f"the forward of {user}"
            terms.append((user, name, full.of_others(self.point, readers)))
        for output, flows in full.without.items():
            rest = flows.get(full.point(self.point))
            if rest is not None:
                terms.append((user, str(output), right - rest))
                but = f"all of {output.module} but its {output.slot}"
                terms.append((user, but, rest))
        factors = []  # place, name, how often too many its gradient counts
        for place, name, x in terms:
            if x is not None and all(x.shape == y.shape for y in (right, *held)):
                off = [y.double() - right for y in held]
                k = case.ruler.times(off, [x] * case.ranks, scale_of(right))
                factors.append((place, name, k))
        if self.kind is Kind.FACTOR and not self.is_of_loss():
            factors.append((user, "every reader", self.relation.factor - 1))
        for place, name, k in factors:
            for count, word in words.items():
                if abs(k - count) < 1e-6:
                    text = f"{self.text}; it is right if what {name} returns to it "
                    return place, name, f"{text}counts once, not {word}"
        return None

    def untracked(self) -> tuple[str, str] | None:
        """The forward or loss in which autograd does not track a collective."""
        place, text = self.of_loss() or (self.user() or "the model", self.text)
        names = self.case.first.untracked
        names = [self.case.names.get(name, name) or "the model" for name in names]
        is_known = place in names or (place == "loss" and "the model" in names)
        is_simple = self.kind in (Kind.PARTIAL, Kind.FACTOR)
        return (place, text) if is_known and not is_simple else None

    def backward_of(self) -> tuple[str, str] | None:
        """The module whose own backward is wrong, and what is known of it."""
        case = self.case
        if not self.is_unexplained:
            return None
        wrong = {}  # reader → its inputs that get a wrong gradient
        for reader in case.full.returned:
            relation = case.relation_of(reader, "back")
            if is_wrong(relation) and relation.kind is not Kind.PARTIAL:
                wrong.setdefault(reader._replace(slot=""), []).append(reader)
        to = {self.point, *self.made_after()}
        for module in reversed([p for p in case.full.order if not p.slot]):
            inputs = wrong.get(module, [])
            is_known = any(case.full.writers[reader] in to for reader in inputs)
            inner = any(other.module.startswith(f"{module.module}.") for other in wrong)
            relation = case.relation_of(module, "flow")
            if is_known and not inner and case.is_right_call(module, "flow"):
                texts = []
                for reader in inputs:
                    how = case.relation_of(reader, "back")
                    texts.append(f"{case.full.writers[reader]} ({how})")
                return module.module or "the model", (
                    f"dL/d(its output) is right ({relation}), and what it returns is "
                    f"wrong for {', '.join(texts)}"
                )
        for place, relation in self.functions():
            if relation.kind is not Kind.PARTIAL:
                return self.user(), (
                    f"{self.text}; no module that reads it returns a wrong gradient: "
                    f"the fault is in what {place} does with it"
                )
        return None


class Gradient(Subject):
    """A wrong gradient of a parameter; those closest to the loss come first."""

    summed = ""  # another parameter of its module; see summed_sibling()
    category = of_relation("gradient")

    def __init__(self, case: Case, name: str, flow: Flow | None):
        super().__init__(case, name)
        self.relation = case.gradient(name)
        self.kind = self.relation.kind
        self.arrives = case.arrival(name)
        self.is_fed_right = self.is_right_arrival(self.arrives)
        self.is_apart = False  # from the first wrong gradient in backward
        texts = [*filter(None, [case.wrong_elements(name)])]
        if self.arrives is not None:
            words = str(self.arrives)
            if self.is_fed_right and self.arrives.kind is Kind.FACTOR:
                words += ", right if ranks average it"
            elif self.is_fed_right:
                words = f"right ({words})"
            texts.append(
                f"dL/d(output of its module, {self.module or 'the model'}): {words}"
            )
        inner = [name for name in case.full.classes if self.is_inside(name)]
        if flow is not None and self.is_inside(flow.module):
            self.is_fed_right = False  # it is used in front of a wrong gradient
        if self.kind in VAGUE and inner:
            self.is_fed_right = False  # it may be used in front of one that is not seen
        self.summed = self.summed_sibling()
        self.is_fed_right |= bool(self.summed)  # as is known of the other one
        is_of_flow = self.kind in OF_FLOW and not self.is_fed_right
        if flow is not None and is_of_flow and flow.is_behind(name):
            if flow.module != self.module:
                texts.append(flow.text)
            own = self.own_readers(flow)
            self.is_apart = bool(own)
            self.returned = own or flow.returned
            if self.returned:
                words = [f"{name} ({relation})" for name, relation in self.returned]
                texts.append(f"returned wrong by {', '.join(words)}")
        self.seen = "; ".join(texts)

    def summed_sibling(self) -> str:
        """A parameter of its module with as many rows, in full on all ranks, whose
        gradient is right: what arrives is summed for that one."""
        case = self.case
        own = case.compared(self.where, "grads")[1][0]
        others = [n for n in case.matched if case.owner(n) == self.module]
        for name in others if self.kind is Kind.SUM else ():
            x = case.compared(name, "grads")[1][0]
            held = {p[name].held for p in case.pieces if name in p}
            is_like = held == {Held.REPLICATED} and x.shape[:1] == own.shape[:1]
            if is_like and x.any() and case.gradient(name).kind is Kind.RIGHT:
                return name
        return ""

    def is_left_out(self) -> str:
        return self.summed and f"that of {self.summed} is right"

    def padding_row(self) -> bool:
        """Is one row zero on a rank and not in the full model, or the reverse?"""
        held, right = self.case.compared(self.where, "grads")
        limit = self.case.ruler.allowed * self.case.grad_scale(right)
        is_sharded = len(self.case.replica_sets(self.where)) > 1
        for x, e in zip(held, right):
            if self.kind is not Kind.UNEXPLAINED or e.dim() != 2 or len(e) < 3:
                return False
            rows = wrong_rows(x, e, limit)
            is_zero = not e[rows].any() or (is_sharded and not x[rows].any())
            if len(rows) > 1 or not is_zero:
                return False
        return True

    def is_right_arrival(self, arrives: Relation | None) -> bool:
        """Is this gradient right for its module? If a mean over ranks is taken later,
        it may be as many times too large as there are parts of the batch."""
        if arrives is None:
            return False
        is_scaled = self.kind is Kind.MEAN and arrives.kind is Kind.FACTOR
        return arrives.is_right or arrives.is_other_layout or is_scaled

    def is_scaled_after(self) -> bool:
        if self.kind is not Kind.FACTOR or self.arrives is None:
            return False
        return self.is_fed_right and self.arrives.is_right

    def own_readers(self, flow: Flow) -> list[tuple[str, Relation]]:
        """Modules that return a wrong gradient to this one's output, although they get
        a right one: a fault apart from the first wrong gradient in backward."""
        case = self.case
        point = Point(self.module)
        is_known = point in case.full.order and is_wrong(self.arrives)
        if not is_known or case.full.point(point) == case.full.point(flow.point):
            return []
        found = []
        for name, relation in Flow(case, point, [self.where]).returned:
            module = name.removeprefix("the forward of ").removeprefix("the model")
            arrives = case.relation_of(Point(module), "flow")
            is_around = flow.module != module and is_within(flow.module, module)
            if self.is_right_arrival(arrives) and not is_around:
                found.append((name, relation))
        return found

    def is_of_backward(self) -> bool:
        """Is it wrong in backward, and not only in what is done with it afterwards?
        Then a wrong gradient arrives at its module or is returned by it."""
        if self.summed or not self.is_fed_right:
            return not self.summed
        inputs = [point for point in self.case.full.returned]
        own = [point for point in inputs if is_within(point.module, self.module)]
        return any(is_wrong(self.case.relation_of(point, "back")) for point in own)

    def follows(self) -> bool:
        """Does it follow from a wrong gradient behind it, as far as is known?"""
        is_known = self.arrives is not None and self.arrives.kind not in NOT_COMPARED
        if not is_known:
            return self.kind in VAGUE
        return is_wrong(self.arrives)

    def is_shielded_from(self, module: str) -> bool:
        """Does a right gradient arrive at a module around this one, which the other
        module is not inside of? Then nothing wrong comes from there."""
        case = self.case
        if self.where in case.own[0].tied.values():
            return False  # it has other uses
        around = self.module.rpartition(".")[0]
        while around and not is_within(module, around):
            points = [
                p for p in case.full.order if p.module == around and not p.is_input
            ]
            found = [case.relation_of(point, "flow") for point in points]
            if found and all(map(is_right, found)):
                return True
            around = around.rpartition(".")[0]
        return False

    def is_shared_sum(self) -> bool:
        """Is a sum missing over some of the ranks, or of a part of the elements?"""
        return self.kind is Kind.SUM and len(self.case.replica_sets(self.where)) > 1

    def sees_other_data(self) -> str:
        """Do ranks with the same piece of a sharded parameter compute other outputs
        with it? Then they have different samples or tokens."""
        ranks = self.case.holders(self.where)
        same = []
        for places in self.case.replica_sets(self.where):
            same = [ranks[place] for place in places]
            if len(same) in (1, len(ranks)) or not self.is_of_other_data(same):
                return ""
        said = f"ranks {same} hold one piece and have computed different outputs"
        return said if same else ""

    def lacks_dp_sum(self) -> str:
        """Is a sum over them missing? Of a replicated parameter, the sum over all ranks
        is then as many times too large as there are ranks in a group."""
        if self.is_sum_of_groups():
            return "" if self.is_of_other_data(self.groups()[0]) else self.in_groups()
        return self.kind is Kind.SUM and self.sees_other_data()

    def is_sum_of_groups(self) -> bool:
        """Is the sum right over one rank of each group that has one gradient?"""
        groups = self.groups()
        is_scaled = self.kind is Kind.SCALED_SUM and groups
        return is_scaled and abs(self.relation.factor / len(groups[0]) - 1) < 1e-6

    def is_of_other_data(self, ranks: list[int]) -> bool:
        """Have these ranks computed other outputs with it, from other samples?"""
        held = [self.case.own[rank].value(Point(self.module)) for rank in ranks]
        if any(x is None for x in held):
            return False
        near = self.case.ruler.near
        return not all(near(x, held[0], scale_of(held[0])) for x in held)

    def lacks_sum_in_tp(self) -> str:
        """Is it reduced over ranks with other samples (dp), and not over the others?"""
        if self.is_sum_of_groups() and self.is_of_other_data(self.groups()[0]):
            return f"{self.in_groups()}, which have other samples"
        return ""

    def is_read_without_f(self) -> bool:
        """Does a partial gradient arrive, returned by no module (by the loss)?"""
        is_partial = self.arrives is not None and self.arrives.kind is Kind.PARTIAL
        return self.kind is Kind.SUM and is_partial and not self.returned

    def lacks_dp_mean(self) -> str:
        return self.kind is Kind.MEAN and self.sees_other_data()

    def groups(self) -> list[list[int]]:
        """Ranks that have one gradient, if replicas have several and some are equal."""
        grads, _ = self.case.compared(self.where, "grads")
        ranks = self.case.holders(self.where)
        found = [[ranks[place] for place in places] for places in equal_ones(grads)]
        return found if 1 < len(found) < len(ranks) else []

    def in_groups(self) -> str:
        words = " and ".join(f"the same on ranks {ranks}" for ranks in self.groups())
        return f"it is {words}" if words else ""

    def lacks_mean_of_groups(self) -> str:
        """Is a mean over groups of ranks missing, each of which has one gradient?"""
        return self.kind is Kind.MEAN and self.in_groups()

    def is_reduced_wrongly(self) -> str | bool:
        """Was it reduced over other ranks than those that hold the same piece?"""
        if self.kind is Kind.REPLICAS and self.is_fed_right:
            return True
        if self.kind not in VAGUE:
            return False
        case = self.case
        for same in self.groups():
            grad = case.own[same[0]].grads[self.where]
            if grad is None or not grad.any():
                continue
            held = [case.own[rank].parts[self.where] for rank in same]
            if any(not torch.equal(x, held[0]) for x in held):
                return f"ranks {same} hold different pieces and have the same gradient"
        return False

    def is_mixed_by_ddp(self) -> bool:
        return (
            self.kind is Kind.MIXED and "DistributedDataParallel" in self.case.first.has
        )


class TwoPasses(Subject):
    """A parameter whose gradient is wrong, or not the same in each pass."""

    def differ(self) -> str:
        """Two passes of one batch have equal parameters, and other gradients."""
        ranks = self.case.unsteady(self.where)
        return f"two equal passes differ on ranks {ranks}" if ranks else ""


class OtherBatch(Subject):
    """The loss of the second batch, if all is right with the first."""

    where = "loss"

    def wrong(self) -> str:
        losses = [trace.second_loss for trace in self.case.own]
        return self.case.unlike(losses, self.case.full.second_loss)


class Accumulated(Subject):
    """A gradient that is right after one backward pass, and wrong after two."""

    def __init__(self, case: Case, name: str):
        super().__init__(case, name)
        _, self.first = case.compared(name, "grads")
        self.held, self.right = case.compared(name, "summed")
        found = [off_by(x, e) for x, e in zip(self.held, self.right)]
        self.seen = f"after two backward passes off by {max(found):.2g}"

    def is_reduced_again(self) -> bool:
        """Over all ranks, or over those that hold the same piece?"""
        sizes = {len(places) for places in self.case.replica_sets(self.where)}
        sizes = {self.case.ranks, *sizes} - {1}
        return any(map(self.has_first, sizes))

    def has_first(self, times: int) -> bool:
        """Is it so many times the first batch's gradient, plus that of the second?"""
        case = self.case
        for held, one, both in zip(self.held, self.first, self.right):
            right = both + (times - 1) * one
            scale = case.grad_scale([right, both])
            if held is None or not case.ruler.near(held, right, scale):
                return False
        return True


def off_by(x: torch.Tensor | None, right: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    if x is None or x.shape != right.shape:
        return float("inf")
    if not x.numel():
        return 0.0
    return (x - right).abs().max().item() / scale_of(right)


class TrainBuffer(Subject):
    """A buffer that train mode or a step changes, if its value then is wrong."""

    def __init__(self, case: Case, name: str, what: str = "changed"):
        super().__init__(case, name)
        self.what = what

    def wrong(self) -> str:
        case = self.case
        how = case.relation_of_state(self.what, self.where)
        held = [getattr(trace, self.what).get(self.where) for trace in case.own]
        of_shard = [Kind.SHAPE]
        is_read = self.where in case.first.read
        if not is_read or all(torch.equal(x, x.round()) for x in held if x is not None):
            of_shard.append(Kind.PARTIAL)  # a count of a rank's own tokens
        if self.where not in case.full.buffers:
            of_shard.append(Kind.FACTOR)
        if how is None or how.is_right or how.kind in of_shard:
            return ""
        passes = "one pass" if self.what == "changed" else "all steps"
        return f"after {passes}: {how}"


class TrainMode(Subject):
    """A gradient or the loss in train mode, where nothing is dropped."""


class Dropped(Subject):
    """What a dropout drops on each rank: a module's, or one in a module's forward."""

    def __init__(self, case: Case, name: str, relation: Relation, masks: list):
        super().__init__(case, name, name, f"input is {relation}")
        self.relation = relation  # of its input
        self.is_same = all(torch.equal(mask, masks[0]) for mask in masks)

    def other_rate(self) -> str:
        right = self.case.full.drop_rates[self.where]
        for rank, trace in enumerate(self.case.own):
            for own, expected in zip(trace.drop_rates[self.where], right):
                if None not in (own, expected) and abs(own - expected) > 1e-6:
                    return f"p is {own:g} on rank {rank}, and {expected:g} in full"
        return ""


def are_equal_by_chance(masks: list[torch.Tensor]) -> bool:
    """Would independent masks be as equal as these once in a thousand times or more?"""
    drawn = draws_of(masks[0])
    share = drawn.mean().item()  # of what is dropped
    chance = (share**2 + (1 - share) ** 2) ** len(drawn)
    return all(torch.equal(mask, masks[0]) for mask in masks) and chance > 1e-3


def are_kept_by_chance(masks: list[torch.Tensor]) -> bool:
    """Would other masks drop nothing of so few once in a thousand times or more?"""
    drawn = torch.cat([draws_of(mask) for mask in masks])
    return (1 - drawn.mean().item()) ** len(drawn) > 1e-3


def draws_of(mask: torch.Tensor) -> torch.Tensor:
    """What was drawn for a mask: one number of a channel that is dropped whole."""
    for dim in range(mask.dim()):
        first = mask.narrow(dim, 0, min(1, mask.shape[dim]))
        if (mask == first).all():
            mask = first
    return mask.flatten().double()


def drops(masks: list[torch.Tensor]) -> bool:
    """Does a dropout drop some elements, and not all?"""
    return any(mask.any() and not mask.all() for mask in masks)


class Recomputed(Subject):
    """A dropout that backward computes again, with another mask."""


class TrainLoss(Subject):
    """The loss in train mode, on all ranks."""

    where = "loss"

    def not_dropped(self) -> str:
        """Modules in which the full model drops something, if no rank drops any."""
        for trace in self.case.own:
            if any(map(drops, trace.drop_masks.values())):
                return ""
        masks = self.case.full.drop_masks
        if all(are_kept_by_chance(found) for found in masks.values()):
            return ""
        names = [name or "the model" for name in masks if drops(masks[name])]
        return f"the full model drops in {', '.join(names)}" if names else ""

    def apart(self) -> str:
        losses = [trace.train_loss for trace in self.case.own]
        if self.case.are_near(losses, losses[0]):
            return ""
        return f"{numbers(losses)} on ranks 0, 1, …; in eval mode it does not differ"


class Optimizer(Subject):
    """A parameter that the optimizer does not have."""


class Step(Subject):
    """One step of training: the loss, the norm and the clipped gradients."""

    def __init__(self, case: Case, number: int):
        super().__init__(case)
        self.number = number
        self.full = case.full.steps[number]
        self.own = [trace.steps[number] for trace in case.own]

    def wrong_loss(self) -> tuple | None:
        losses = [step.loss for step in self.own]
        said = self.case.unlike(losses, self.full.loss, 10)
        if self.number == 0 or not said:
            return None
        return "loss", f"step {self.number + 1}: {said}"

    def wrong_norm(self) -> tuple | None:
        """What is wrong with the norm that the user's own clipping returns."""
        norms = [step.norm for step in self.own]
        right = self.full.norm
        said = "" if None in norms else self.case.unlike(norms, right)
        if not said:
            return None
        same = self.case.ruler.allowed * right >= max(norms) - min(norms)
        how = "the same on all ranks" if same else "different on the ranks"
        return "clip()", f"step {self.number + 1}: {said}; {how}"

    def wrong_factors(self) -> tuple | None:
        """How many times the right ones the clipped gradients are, rank by rank."""
        case = self.case
        if "clip" not in case.first.has:
            return None
        pairs = [[] for _ in self.own]  # of each rank
        for name in case.matched:
            found = case.compared(name, "clipped", self.number)
            for rank, x, e in zip(case.holders(name), *found):
                if x is not None:
                    pairs[rank].append((x, e))
        found = []
        for own in pairs:
            k = multiple_of(*zip(*own)) if own else 1.0
            found.append(1.0 if abs(k - 1) < 1e-5 else k)  # as numbers() shows it
        if all(k == 1 for k in found):
            return None
        words = f"{numbers(found)} times the right ones on ranks 0, 1, …"
        return "clip()", f"after it the gradients are on average {words}"


class State(Subject):
    """What the optimizer keeps of a parameter, if all parameters are right."""

    def __init__(self, case: Case, name: str, key: str):
        super().__init__(case, name)
        self.key = key

    def wrong(self) -> str:
        case = self.case
        full = case.full.kept_state[self.key].values()
        least = 1e-6 * max(scale_of(x) for x in full)  # of rounding errors alone
        wrong = []
        found = case.state_of(self.key, self.where)
        for rank, held, right in found:
            if not case.ruler.near(held, right, 10 * max(scale_of(right), least)):
                wrong.append(rank)
        if not wrong:
            return ""
        count = len(case.full.steps)
        return f"`{self.key}` after {count} steps is wrong on ranks {wrong}"


class Update(Subject):
    """A parameter that is wrong after a step, or whose gradient is before it."""

    def __init__(self, case: Case, name: str, number: int):
        super().__init__(case, name)
        self.number = number
        self.seen = f"after step {number + 1}"
        self.ranks = case.holders(name)
        self.is_frozen = case.is_frozen(name)
        self.after, self.right = case.compared(name, "after", number)
        self.is_noise = False  # does it differ only where rounding errors moved it?
        self.not_updated = []  # ranks that have left it out; see missing()
        wrong = self.wrong_ranks("after")
        self.is_wrong = bool(wrong)
        if 0 < len(wrong) < len(self.ranks):
            self.seen += f", wrong on ranks {wrong} only"
        if wrong and number > 0:
            self.seen += "; right before, so look at what is kept between steps"

    def category(self, key: str) -> str:
        return f"{key} on ranks {self.not_updated}" if self.not_updated else key

    def wrong_ranks(self, what: str) -> list[int]:
        """The ranks on which its gradient ("grads", "clipped") or it is wrong."""
        case = self.case
        found = []
        if self.where not in case.matched:
            return found
        held, right = case.compared(self.where, what, self.number)
        for place, (rank, x, e) in enumerate(zip(self.ranks, held, right)):
            scale = scale_of(e) if what == "after" else case.grad_scale([e])
            if x is None or rank in case.unused_copies.get(self.where, ()):
                continue
            if case.ruler.near(x, e, 10 * scale):
                if what == "after" and self.is_step_off(place):
                    found.append(rank)
                continue
            if what == "after" and x.shape == e.shape:
                certain = self.certain(place, 1)
                if case.ruler.near(x[certain], e[certain], 10 * scale):
                    self.is_noise = True
                    continue
            found.append(rank)
        return found

    def before(self) -> tuple[list, list]:
        """What the ranks held before the step, and what is right."""
        if self.number == 0:
            return self.case.compared(self.where, "parts")
        return self.case.compared(self.where, "after", self.number - 1)

    def is_step_off(self, place: int) -> bool:
        """Is the step itself wrong, which may be far smaller than the parameter? Only
        elements count whose gradients are known to four digits."""
        case = self.case
        for number in range(self.number + 1):
            if case.compared(self.where, "clipped", number)[0][place] is None:
                return False
        held, right = self.before()
        step = self.right[place] - right[place]
        off = (self.after[place] - held[place] - step)[self.certain(place, 1e4)]
        if not off.numel():
            return False
        limit = (1e-3 + 1e3 * case.ruler.allowed) * step.abs().max().item()
        limit += 16 * case.eps * scale_of(self.right[place])  # of the format
        return off.abs().max().item() > limit

    def certain(self, place: int, times: float) -> torch.Tensor:
        """The elements whose gradients are so many times the rounding errors in all
        steps so far. Of less, Adam and Lion make a whole step, whatever its sign."""
        case = self.case
        found = torch.ones_like(self.right[place], dtype=torch.bool)
        for number in range(self.number + 1):
            held, right = case.compared(self.where, "clipped", number)
            x = held[place]
            e = right[place]
            if x is not None and x.shape == e.shape:
                known = e.abs() > times * case.ruler.allowed * case.grad_scale([e])
                found &= known | (x == e)
        return found

    def wrong_gradient(self, what: str = "grads") -> str:
        wrong = self.wrong_ranks(what)
        said = f"its gradient in step {self.number + 1} is wrong on rank"
        return f"{said} {wrong[0]}" if wrong else ""

    def missing(self) -> bool:
        """Have some ranks not updated it, and others have?"""
        before = [self.case.own[rank].parts[self.where] for rank in self.ranks]
        same = map(torch.equal, before, self.after)
        found = [rank for rank, is_same in zip(self.ranks, same) if is_same]
        is_missing = 0 < len(found) < len(self.ranks) and self.is_wrong
        self.not_updated = found if is_missing else []
        self.others = []  # parameters that such a rank has updated
        for rank in found if is_missing else ():
            trace = self.case.own[rank]
            for name, x in trace.steps[self.number].after.items():
                if not torch.equal(x, trace.parts[name]):
                    self.others.append(name)
        return is_missing

    def grads_apart(self) -> str:
        """Of a parameter that cannot be compared: do the gradients of replicas differ
        already? Only their replicas can be compared."""
        case = self.case
        if self.where not in case.unmatched or not self.are_apart():
            return ""
        grads, _ = case.compared(self.where, "grads", self.number)
        ranks = case.replicas_apart(self.where, grads)
        return f"ranks {ranks} have different gradients" if ranks else ""

    def apart(self) -> bool:
        is_known = self.is_wrong or self.where in self.case.unmatched
        return is_known and self.are_apart()

    def are_apart(self) -> bool:
        """Do replicas, the same before the first step, differ now?"""
        return bool(self.case.replicas_apart(self.where, self.after, 10))
