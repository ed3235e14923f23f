"""The facts of all ranks, seen from the full model: names, pieces, relations."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from .compare import (
    PADDING,
    FullModel,
    Held,
    Kind,
    Relation,
    Ruler,
    equal_ones,
    is_right,
    is_wrong,
    largest_off,
    numbers,
    piece_of,
    pieces_of,
    scale_of,
    sorted_of,
    wrong_rows,
    wrong_share,
)
from .record import Facts, Point, Trace, is_within

NONE = torch.zeros(0, dtype=torch.int64)  # a rank that does not have a parameter
ALLOWED = {"float64": 1e-9, "float32": 2e-4}  # relative difference


def inside(names: dict[str, str], module: str) -> set[str]:
    """The values of the names that are inside of a module."""
    return {names[name] for name in names if name.startswith(f"{module}.")}


class Case:
    """What the faults' tests ask: what a rank holds, and how it is related."""

    def __init__(self, everyone: list[Facts], dtype: str):
        self.everyone = everyone
        self.ranks = len(everyone)
        self.first = everyone[0]
        self.full = self.first.full
        self.own = [facts.own for facts in everyone]
        allowed = max(ALLOWED[dtype], min(1e-3, 100 * self.first.noise))
        self.ruler = Ruler(self.ranks, allowed)
        self.model = FullModel(self.full.parts)
        self.vectors = {}  # see compared()
        self.unused_copies = {}  # parameter → ranks; see fill_unused()
        self.eps = torch.finfo(getattr(torch, dtype)).eps
        passes = (self.full.grads, self.full.kept)  # in eval and in train mode
        largest = [self.model.vector(grads).abs().max().item() for grads in passes]
        self.largest = max(largest) or 1.0
        names = [name for trace in self.own for name in trace.parts]
        self.parameters = list(dict.fromkeys(names))  # of all ranks
        self.index = []  # rank → parameter → index of each element
        self.pieces = []  # rank → parameter → its piece
        for rank, trace in enumerate(self.own):
            found = {name: self.model.find(x) for name, x in trace.parts.items()}
            self.index.append(found)
            named = {}
            for name, index in found.items():
                named[name] = piece_of(index, self.model, rank, self.ranks)
            self.pieces.append(named)
        self.names = self.match_modules()
        for trace in self.own:
            self.rename(trace)
        self.order = self.tensors_in_order()
        self.unknown = {name: self.unknown_share(name) for name in self.parameters}
        # Only a parameter that is like a piece of the full model can be compared.
        self.matched = [name for name in self.parameters if not self.unknown[name]]
        self.unmatched = [name for name in self.parameters if self.unknown[name]]
        self.renumbered = self.renumbered_modules()
        self.relations = {}  # of outputs and inputs, and of their gradients

    def with_allowed(self, allowed: float) -> Case:
        """The same facts, but larger differences are allowed."""
        case = copy.copy(self)
        case.ruler = Ruler(self.ranks, allowed)
        case.relations = {}
        return case

    def tensors_in_order(self) -> list[Point]:
        """In the order of forward. Here a module may get another tensor (gathered in
        front of it) than the output of a module that it gets in the full model."""
        own = self.own[0]
        after = {}  # point → such tensors
        for point in (*own.values, *own.same):
            writer = self.full.point(point)
            is_other = point in self.full.same and own.point(point) != writer
            if point.is_input and is_other:
                after.setdefault(writer, []).append(point)
        inner = [point for point in self.full.order if point.module or point.is_input]
        last = {self.full.point(point): point for point in inner}
        found = []
        for point in self.full.order:  # a tensor may have several names
            found.append(point)
            if last.get(self.full.point(point)) == point:
                found += after.get(self.full.point(point), [])
        return found

    # ---- Parameters

    def holders(self, name: str) -> list[int]:
        """The ranks that have a parameter of this name (experts may be apart)."""
        return [rank for rank, trace in enumerate(self.own) if name in trace.parts]

    def renumbered_modules(self) -> list[str]:
        """Modules of a list that each rank numbers from 0: heads.0 of rank 1 is heads.2
        of the full model. The names do not say what to compare their tensors with."""
        found = []
        for name in self.parameters:
            pieces = [self.pieces[rank][name] for rank in self.holders(name)]
            whole = [piece.owner for piece in pieces if piece.held is Held.REPLICATED]
            if len(set(whole)) < self.ranks:
                continue
            other = next(x for x in whole if x != name).split(".")
            parts = name.split(".")
            count = 1
            while parts[:count] == other[:count]:
                count += 1
            found.append(".".join(parts[:count]))
        return list(dict.fromkeys(found))

    def is_renumbered(self, module: str) -> bool:
        return any(is_within(module, name) for name in self.renumbered)

    def unknown_share(self, name: str) -> tuple[int, float] | None:
        """The first rank with elements that are in no parameter of the full model, and
        how many.

        Zeros may be padding, if some rank also holds elements of the full model.
        """
        ranks = self.holders(name)
        is_known = any((self.index[rank][name] != PADDING).any() for rank in ranks)
        for rank in ranks:
            unknown = self.index[rank][name] == PADDING
            if is_known:
                unknown = unknown & (self.own[rank].parts[name] != 0)
            if unknown.any():
                return rank, unknown.double().mean().item()
        return None

    def unused(self) -> list[str]:
        """Parameters whose right gradient is zero in both batches on some rank."""
        found = []
        for name in self.matched:
            if self.is_frozen(name):
                continue
            right = [self.compared(name, what)[1] for what in ("grads", "summed")]
            for one, both in zip(*right):
                if one.numel() and not one.any() and not both.any():
                    found.append(name)
                    break
        return found

    def replica_sets(self, name: str) -> list[list[int]]:
        """Which of the ranks that have a parameter began with the same values of it.

        A rank is given by its place among the ranks that have the parameter.
        """
        return equal_ones([self.own[rank].parts[name] for rank in self.holders(name)])

    def expected(self, rank: int, name: str, vector: Tensor) -> Tensor:
        """This rank's piece of what the full model has, as a vector."""
        index = self.index[rank][name]
        piece = vector[index.clamp(min=0)]
        return torch.where(index == PADDING, torch.zeros(()).double(), piece)

    def row(self, name: str, gradient: Relation | None) -> dict:
        """A row of the table: which piece the first rank with the parameter holds."""
        ranks = self.holders(name)
        pieces = [self.pieces[rank][name] for rank in ranks]
        replicated = [p.owner for p in pieces if p.held is Held.REPLICATED]
        text = pieces[0].words
        if len(set(replicated)) > 1:
            text = "another one per rank"
        elif replicated and len(ranks) < self.ranks:
            text = f"on rank {', '.join(map(str, ranks))} only"
        return {
            "parameter": name,
            "placement": text,
            "all": [piece.words for piece in pieces],
            "gradient": "not compared" if gradient is None else str(gradient),
            "is_wrong": gradient is not None and not gradient.is_right,
        }

    def is_split(self) -> bool:
        """Does some rank hold less than the full model, or do the ranks communicate?"""
        held = {piece.held for own in self.pieces for piece in own.values()}
        if held - {Held.REPLICATED, Held.NOTHING}:
            return True
        phases = ("forward", "backward", "training")
        return any(name.startswith(phases) for name in self.first.calls)

    # ---- Modules that have other names in the full model

    def modules(self, trace: Trace) -> list[str]:
        """Names of modules in the order in which forward ends them."""
        return list(dict.fromkeys(p.module for p in trace.order if not p.slot))

    def match_modules(self) -> dict[str, str]:
        """Own name → full name, of modules whose name the full model does not have.

        A module is matched by its parameters: they hold pieces of those of one module
        of the full model. If a leaf has parameters of several (a norm fused with a
        linear), its output is that of the last one.
        """
        order = self.modules(self.full)
        own_order = self.modules(self.own[0])
        leaves = {name.rpartition(".")[0] for name in self.parameters}
        sets = {m: inside({n: n for n in self.model.names}, m) for m in order if m}
        tied = self.own[0].tied
        held = {}  # own parameter → the full model's
        for name in (*self.parameters, *tied):
            piece = self.pieces[0].get(tied.get(name, name))
            if piece is not None and piece.owner:
                held[name] = piece.owner
        found = {}
        for own in own_order:
            names = inside(held, own) if own and own not in order else set()
            same = [module for module in sets if sets[module] == names]
            if names and same:
                found[own] = same[0]
            elif names and own in leaves:
                # Modules end before those around them: the last small one is a leaf.
                smaller = [m for m in sets if sets[m] and sets[m] < names]
                smaller.sort(key=lambda module: module.count("."))
                if smaller:
                    found[own] = smaller[-1]
        for own in own_order:  # modules without parameters (dropout) inside of these
            parent = own.rpartition(".")[0]
            if own not in found and own not in order and parent in found:
                name = found[parent] + own.removeprefix(parent)
                if name in order:
                    found[own] = name
        return found

    def rename(self, trace: Trace) -> None:
        """Store what a rank recorded under the names of the full model."""

        def new(key):
            if isinstance(key, Point):
                return key._replace(module=self.names.get(key.module, key.module))
            return self.names.get(key, key)

        for what in ("values", "same", "callers", "flows", "returned", "writers",
                     "drop_inputs", "drop_masks", "drop_rates"):  # fmt: skip
            found = {}
            for key, value in getattr(trace, what).items():
                is_name = isinstance(value, Point)
                found.setdefault(new(key), new(value) if is_name else value)
            setattr(trace, what, found)

    def owner(self, name: str) -> str:
        """The module of a parameter, as the full model calls it."""
        own = name.rpartition(".")[0]
        return self.names.get(own, own)

    # ---- Tensors that modules pass on

    def calls_differ(self) -> list[str]:
        """Modules that are called another number of times than in the full model."""
        calls = []
        for trace in (self.full, self.own[0]):
            points = sorted([*trace.values, *trace.same])
            calls.append({point.module: point.call for point in points})  # the last one
        full, own = calls
        return [m for m in full if m and m in own and own[m] != full[m]]

    def relation_of(self, point: Point, what: str = "value") -> Relation | None:
        """How a tensor ("value") is related, its gradient ("flow"), or the gradient
        that a module returns to this input ("back"); None if that is not known."""
        key = (point, what)
        if self.is_renumbered(point.module):
            return None
        if key not in self.relations:
            expected = getattr(self.full, what)(point)
            held = [getattr(trace, what)(point) for trace in self.own]
            how = self.compare(held, expected, what != "value")
            if what != "value":
                how = self.in_its_layout(how, point)
            self.relations[key] = how
        return self.relations[key]

    def is_right_call(self, call: Point, what: str = "value") -> bool:
        """Are the outputs of this call of a module right, as far as is known?"""
        found = [self.relation_of(point, what) for point in self.full.outputs(call)]
        return any(map(is_right, found)) and not any(map(is_wrong, found))

    def compare(self, held: list, expected: Tensor | None, in_any_layout=False):
        if expected is None or any(x is None for x in held):
            return None
        if in_any_layout:
            return self.ruler.in_any_layout(held, expected)
        return self.ruler.relation(held, expected)

    def relation_of_state(self, what: str, name: str) -> Relation | None:
        """How the ranks' "buffers" of a name are related, or what train mode has
        "changed"."""
        held = [getattr(trace, what).get(name) for trace in self.own]
        return self.compare(held, getattr(self.full, what).get(name))

    def in_its_layout(self, how: Relation | None, point: Point) -> Relation | None:
        """A gradient has the layout of its tensor. If that is right, a gradient in
        another order is wrong."""
        if how is None or how.kind is not Kind.REORDERED or how.is_other_layout:
            return how
        is_known = is_right(self.relation_of(point))
        return Relation(Kind.WRONG, str(how)) if is_known else how

    def ends(self) -> list[Point]:
        """The tensors that the loss gets: the model's main output, and others of which
        the model itself makes nothing."""
        full = self.full
        found = []
        for point in map(full.point, full.outputs(Point(""))):
            is_read = full.readers(point) or full.made_of.get(point, {point}) != {point}
            if point in full.flows and not (found and is_read):
                found.append(point)
        return found or [full.point(full.order[-1])]

    def around(self, point: Point) -> list[Point]:
        """The calls of modules inside of which this tensor is, the smallest first."""
        found = []
        callers = {**self.full.callers, **self.own[0].callers}
        while point in callers and callers[point] not in found:
            point = callers[point]
            found.append(point)
        return found

    def are_near(self, values: list[float], right: float, factor: int = 1) -> bool:
        """Are all these numbers (losses, norms) right?"""
        limit = factor * self.ruler.allowed * max(abs(right), 1e-300)
        return all(abs(value - right) <= limit for value in values)

    def unlike(self, values: list[float], right: float, factor: int = 1) -> str:
        """What the ranks have, if it is not right, in words."""
        said = f"{numbers(values)} on ranks 0, 1, …, not {right:.6g}"
        return "" if self.are_near(values, right, factor) else said

    def arrival(self, name: str) -> Relation | None:
        """How the gradient is related that arrives at the module of a parameter."""
        found = None
        for point in self.full.order:
            if point.module == self.owner(name) and not point.is_input:
                relation = self.relation_of(point, "flow")
                if found is None or is_wrong(relation):
                    found = relation
        return found

    def begins(self, name: str) -> int:
        """The first place in the order of forward at which a parameter may be used."""
        modules = [point.module for point in self.order]
        tied = self.own[0].tied
        found = []
        for use in (name, *(alias for alias in tied if tied[alias] == name)):
            module = self.owner(use)
            inside = []
            while True not in inside:
                inside = [is_within(other, module) for other in modules]
                module = module.rpartition(".")[0]
            found.append(inside.index(True))
        return min(found)

    # ---- Gradients of parameters

    def compared(self, name: str, what: str, step: int | None = None) -> tuple:
        """What the ranks that have a parameter hold of it, and what is right there.

        what: grads, summed or kept of a pass; grads, clipped or after of a step.
        """
        ranks = self.holders(name)
        key = (what, step)
        if key not in self.vectors:
            full = self.full if step is None else self.full.steps[step]
            self.vectors[key] = self.model.vector(getattr(full, what))
        held = []
        for rank in ranks:
            trace = self.own[rank] if step is None else self.own[rank].steps[step]
            held.append(getattr(trace, what).get(name))
        return held, [self.expected(rank, name, self.vectors[key]) for rank in ranks]

    def state_of(self, key: str, name: str) -> list[tuple]:
        """What the ranks' optimizers keep of a parameter: (rank, held, right)."""
        full = self.full.kept_state.get(key, {})
        if self.owner_in_full(name) not in full:
            return []
        vector = self.model.vector({n: full.get(n) for n in self.model.names})
        found = []
        for rank in self.holders(name):
            held = self.own[rank].kept_state.get(key, {}).get(name)
            right = self.expected(rank, name, vector)
            if held is not None and held.shape == right.shape:
                found.append((rank, held, right))
        return found

    def fill_unused(self, name: str, grads: list, right: list, scale: float) -> None:
        """A rank that does not use its copy has no gradient of it (a bias that rank 0
        adds). This is right if the others' is and no loss depends on the copy, which is
        listed as not compared."""
        for places in self.replica_sets(name):
            used = [place for place in places if grads[place] is not None]
            if used and all(self.ruler.near(grads[i], right[i], scale) for i in used):
                for place in set(places) - set(used):
                    rank = self.holders(name)[place]
                    if name in self.own[rank].unused:
                        grads[place] = right[place]
                        self.unused_copies.setdefault(name, set()).add(rank)

    def gradient(self, name: str, what: str = "grads") -> Relation:
        """How the ranks' gradients of a parameter are related to the right ones.

        The first relation that holds, so the order is from the simple to the rare.
        """
        near = self.ruler.near
        ranks = self.holders(name)
        grads, right = self.compared(name, what)
        scale = self.grad_scale(right)
        frozen = [trace for trace in self.own if name in trace.frozen]
        if len(frozen) == len(ranks) or any(name not in x.unused for x in frozen):
            if self.full.grads.get(self.owner_in_full(name)) is not None:
                return Relation(Kind.NOT_TRAINED)
            if len(frozen) == len(ranks):
                return Relation(Kind.FROZEN)
        if self.is_frozen(name) and any(grad is not None for grad in grads):
            return Relation(Kind.TRAINED)
        for place, e in enumerate(right):  # an expert without tokens has none
            if grads[place] is None and near(e, 0 * e, self.largest * 1e-6):
                grads[place] = torch.zeros_like(e)
        self.fill_unused(name, grads, right, scale)
        if any(grad is None for grad in grads):
            return Relation(Kind.NONE)
        if any(g.shape != e.shape for g, e in zip(grads, right)):
            return Relation(Kind.SHAPE)
        if self.ruler.all_near(grads, right, scale):
            return Relation(Kind.RIGHT)
        found = None
        if len(ranks) < self.ranks:
            others = self.in_its_place(name, self.vectors[what, None])
            found = self.over_all_ranks(grads, others, scale)
        found = found or self.over_replicas(name, grads, right, scale)
        if found is None and self.is_tied_apart(name, what, grads, right, scale):
            found = Relation(Kind.TIED)
        found = found or self.over_all_ranks(grads, right, scale)
        if found is None and all(near(g, 0 * g, scale) for g in grads):
            found = Relation(Kind.ZERO)
        if found is None and what == "grads":
            found = self.of_uses(name, grads, scale)
        return found or self.rare_relation(name, grads, right, scale)

    def unsteady(self, name: str) -> list[int]:
        """The ranks whose gradient is another one in the first step of training than in
        the first pass, which have the same batch and the same parameters."""
        if not self.full.steps:
            return []
        first, right = self.compared(name, "grads")
        again, expected = self.compared(name, "grads", 0)
        scale = self.grad_scale(right)
        if not self.ruler.all_near(expected, right, scale):
            return []  # in the full model as well
        found = []
        for rank, x, y in zip(self.holders(name), first, again):
            if x is not None and y is not None and not self.ruler.near(x, y, scale):
                found.append(rank)
        return found

    def grad_scale(self, right: list[Tensor]) -> float:
        """What differences are compared with: the parameter's largest gradient."""
        scale = max([e.abs().max().item() for e in right if e.numel()], default=0.0)
        # Rounding errors alone make the gradient of a key's bias, or of a bias in front
        # of a BatchNorm.
        floor = min(1e-2, 1e5 * self.ruler.allowed)
        return max(scale, floor * self.largest)

    def owner_in_full(self, name: str) -> str:
        """The parameter of the full model of which the first rank holds a piece."""
        return self.pieces[self.holders(name)[0]][name].owner

    def is_frozen(self, name: str) -> bool:
        """Does the full model not train it?"""
        return self.owner_in_full(name) in self.full.frozen

    def over_replicas(self, name: str, grads, right, scale: float) -> Relation | None:
        """Is the sum over the ranks with the same piece right, or a factor off?"""
        near = self.ruler.all_near
        sums, most = self.over_holders(name, grads)
        if most > 1 and near(sums, right, scale):
            sets = self.replica_sets(name)
            if equal_ones(grads) == sets and len(sets) * most == len(grads):
                return Relation(Kind.FACTOR, f"factor {1 / most:.6g}", 1 / most)
            return Relation(Kind.SUM)
        if most > 1 and near(sums, right, scale * most, most):
            return Relation(Kind.MEAN)
        k = self.ruler.times(grads, right, scale)
        if k:
            return Relation(Kind.FACTOR, f"factor {k:.6g}", k)
        factors = [self.ruler.times([g], [e], scale) for g, e in zip(grads, right)]
        if all(factors):
            return Relation(Kind.FACTORS, f"factor per rank {numbers(factors)}")
        k = self.ruler.times(sums, right, scale)
        if most > 1 and k:
            return Relation(Kind.SCALED_SUM, f"scaled sum, {k:.6g} times", k)
        return None

    def over_holders(self, name: str, grads: list[Tensor]) -> tuple[list, int]:
        """The sum of each element's gradients over the ranks that hold this element,
        and how many do at most. A fused weight may be shared in some rows only."""
        held = torch.cat([self.index[r][name].flatten() for r in self.holders(name)])
        known, places = held.unique(return_inverse=True)
        flat = torch.cat([grad.flatten() for grad in grads]).double()
        sums = torch.zeros(len(known)).double().index_add(0, places, flat)[places]
        counts = places.bincount()[known != PADDING].tolist()
        parts = sums.split([grad.numel() for grad in grads])
        parts = [part.view(grad.shape) for part, grad in zip(parts, grads)]
        return parts, max(counts, default=0)

    def in_its_place(self, name: str, vector: Tensor) -> list[Tensor]:
        """The right gradients of what each rank has in the place of this parameter, if
        the ranks have different ones (experts)."""
        place = list(self.own[self.holders(name)[0]].parts).index(name)
        found = []
        for rank, trace in enumerate(self.own):
            if place < len(trace.parts):
                found.append(self.expected(rank, list(trace.parts)[place], vector))
        return found

    def over_all_ranks(self, grads, right, scale: float) -> Relation | None:
        """Were gradients of different pieces summed or averaged over the ranks?"""
        pieces = [right[places[0]] for places in equal_ones(right)]
        if len(pieces) == 1 or any(e.shape != grads[0].shape for e in right):
            return None
        k = self.ruler.times(grads, [sum(pieces)] * len(grads), scale)
        if k:
            words = f"of several pieces ({self.ruler.factor(k)} their sum)"
            return Relation(Kind.MIXED, words, k)
        return None

    def is_tied_apart(self, name: str, what: str, grads, right, scale: float) -> bool:
        """Is the sum over several parameters with the same piece right?"""
        total = grads
        for other in self.parameters:
            is_same = all(
                torch.equal(found.get(name, NONE), found.get(other, NONE))
                for found in self.index
            )
            more, _ = self.compared(other, what)
            if other != name and is_same and not any(x is None for x in more):
                total = [x + y for x, y in zip(total, more)]
        return total is not grads and self.ruler.all_near(total, right, scale)

    def of_uses(self, name: str, grads: list, scale: float) -> Relation | None:
        """A tied weight: is the gradient complete for some of its uses only?"""
        factors = self.use_factors(name, grads, scale)
        if factors is None:
            return None
        tied = self.owner_in_full(name)
        total = factors
        others = [n for n in self.parameters if n != name]
        others = [n for n in others if self.owner_in_full(n) == tied]
        for other in others:  # on other ranks, or cut in another way
            more, right = self.compared(other, "grads")
            found = None
            if all(x is not None for x in more):
                found = self.use_factors(other, more, self.grad_scale(right))
            if found is not None:
                total = total + found
        if others and (total - 1).abs().max() < 1e-6:
            return Relation(Kind.TIED)
        words = []
        for use, k in zip(self.first.use_grads[tied], factors.tolist()):
            words.append(f"{0 if abs(k) < 1e-6 else k:.4g} × {use}")
        return Relation(Kind.USES, "of its uses: " + " + ".join(words))

    def use_factors(self, name: str, grads: list, scale: float) -> Tensor | None:
        """How often the gradient of each use of a tied weight is in this gradient."""
        places = self.holders(name)
        sets = self.replica_sets(name)
        tied = self.owner_in_full(name)
        uses = self.first.use_grads.get(tied)
        if not uses:
            return None
        got = []
        for ranks in sets:
            got.append(sum(grads[place] for place in ranks).flatten() / len(sets[0]))
        got = torch.cat(got)
        columns = []
        for grad in uses.values():
            vector = self.model.vector({**self.full.grads, tied: grad})
            own = [self.expected(places[ranks[0]], name, vector) for ranks in sets]
            columns.append(torch.cat([piece.flatten() for piece in own]))
        columns = torch.stack(columns, 1)
        factors = torch.linalg.lstsq(columns, got[:, None]).solution[:, 0]
        return factors if self.ruler.near(columns @ factors, got, scale) else None

    def rare_relation(self, name: str, grads, right, scale: float) -> Relation:
        near = self.ruler.near
        for place, grad in enumerate(grads):
            others = [e for other, e in enumerate(right) if other != place]
            is_others = any(near(grad, e, scale) for e in others)
            if is_others and not near(grad, right[place], scale):
                return Relation(Kind.OTHERS)
        sorted_grads = [sorted_of(g) for g in grads]
        sorted_right = [sorted_of(e) for e in right]
        if self.ruler.all_near(sorted_grads, sorted_right, scale):
            # A wide limit (bfloat16) makes nearly all a permutation of nearly all.
            if largest_off(grads, right) > 10 * largest_off(sorted_grads, sorted_right):
                return Relation(Kind.PERMUTED)
        if self.are_slices(grads, right, scale):
            return Relation(Kind.SLICES)
        for ranks in self.replica_sets(name):
            if any(not near(grads[r], grads[ranks[0]], scale) for r in ranks):
                return Relation(Kind.REPLICAS)
        return Relation(Kind.UNEXPLAINED)

    def are_slices(self, grads: list, right: list, scale: float) -> bool:
        """Has each rank of a replicated parameter the right gradient of some elements,
        and no two ranks that of the same, if it is not right on all?"""
        if any(not torch.equal(e, right[0]) for e in right) or not right[0].numel():
            return False
        limit = self.ruler.allowed * scale
        is_near = torch.stack([(g - right[0]).abs() <= limit for g in grads])
        count = is_near.sum(0)
        alone = is_near & (count == 1)
        if not ((count == 1) | (count == len(grads))).all():
            return False
        return bool(alone.flatten(1).any(1).all())

    def wrong_elements(self, name: str) -> str:
        """How much of a gradient is wrong, and where if these are a few rows."""
        grads, right = self.compared(name, "grads")
        limit = self.ruler.allowed * self.grad_scale(right)
        rows = []
        for rank, grad, e in zip(self.holders(name), grads, right):
            if grad is None or grad.shape != e.shape or not grad.numel():
                return "this gradient cannot be compared element by element"
            found = wrong_rows(grad, e, limit)
            if found and len(found) <= min(8, len(e) // 2):
                word = "rows" if e.dim() > 1 else "elements"
                rows.append(f"{word} {found} of {len(e)} on rank {rank}")
        text = wrong_share(grads, right, limit)
        if not text:
            return ""
        return text + (f", in {' and '.join(rows)}" if rows else "")

    def column_partial(self, reader: str, rank: int) -> Tensor | None:
        """dL/dx through the column-parallel linears in a module, on one rank."""
        trace = self.own[rank]
        terms = []
        for name, weight in trace.parts.items():
            owner = self.owner(name)
            piece = self.pieces[rank][name]
            is_column = piece.held is Held.SHARD and piece.dim == 0
            grad = trace.flow(Point(owner))
            if not f"{owner}.".startswith(f"{reader}.") or grad is None:
                continue
            if is_column and weight.dim() == 2 and grad.shape[-1] == len(weight):
                terms.append(grad.double() @ weight)
        if not terms or any(term.shape != terms[0].shape for term in terms):
            return None  # no linears, or linears of different inputs
        return sum(terms)

    def is_slice_of(self, got: list, partial: list, expected: Tensor) -> bool:
        """Has each rank its slice of its own partial gradient, instead of the sum's?

        A right backward of an all-gather sums over the ranks before it slices.
        """
        if any(x is None for x in (*got, *partial, expected)):
            return False
        if expected.dim() > 2 and expected.shape != partial[0].shape:
            expected = expected.transpose(0, 1)  # of batch and sequence
        if any(x.shape != expected.shape for x in partial):
            return False
        scale = scale_of(expected)
        if not self.ruler.near(sum(partial).double(), expected.double(), scale):
            return False
        for relation, _ in self.ruler.views(got, expected):
            if relation.kind is Kind.SHARD:
                dim = relation.dim
                widths = [x.shape[dim] for x in got]
                own = [pieces_of(x, dim, widths)[r] for r, x in enumerate(partial)]
                if self.ruler.all_near(got, own, scale):
                    return True
        return False
