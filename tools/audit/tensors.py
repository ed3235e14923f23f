"""How the tensors that modules pass on are related to the full model's."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from .compare import (
    Held,
    Kind,
    Relation,
    Ruler,
    is_right,
    is_wrong,
    numbers,
    pieces_of,
    scale_of,
)
from .pieces import Pieces
from .record import Facts, Point, is_within

ALLOWED = {"float64": 1e-9, "float32": 2e-4}  # relative difference


class Tensors(Pieces):
    """Outputs and inputs of modules, their gradients, and where they are in forward."""

    def __init__(self, everyone: list[Facts], dtype: str):
        super().__init__(everyone)
        allowed = max(ALLOWED[dtype], min(1e-3, 100 * self.first.noise))
        self.ruler = Ruler(self.ranks, allowed)
        self.eps = torch.finfo(getattr(torch, dtype)).eps
        self.order = self.tensors_in_order()
        self.relations = {}  # of outputs and inputs, and of their gradients

    def with_allowed(self, allowed: float) -> Tensors:
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
        "changed", or what the steps have left ("stepped")."""
        held = [getattr(trace, what).get(name) for trace in self.own]
        right = getattr(self.full, what).get(name, self.full.buffers.get(name))
        return self.compare(held, right)

    def buffer_rows(self) -> list[dict]:
        """Rows for buffers, if one of them is not in full on every rank."""
        found = {n: self.relation_of_state("buffers", n) for n in self.full.buffers}
        found = {name: how for name, how in found.items() if how is not None}
        if all(how.kind is Kind.SAME for how in found.values()):
            return []
        rows = []
        for name, how in found.items():
            words = "replicated" if how.kind is Kind.SAME else str(how)
            row = {"parameter": name, "placement": words, "all": [words] * self.ranks}
            is_wrong = not how.is_right and how.kind is not Kind.REORDERED
            rows.append({**row, "gradient": "buffer", "is_wrong": is_wrong})
        return rows

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
        if is_right(found) and self.is_tied_after_backward(name):
            return None  # the gradients of its other uses may have been added
        return found

    def begins(self, name: str) -> int:
        """The first place in the order of forward at which a parameter may be used."""
        modules = [point.module for point in self.order]
        found = []
        for use in self.uses(name):
            module = self.owner(use)
            inside = []
            while True not in inside:
                inside = [is_within(other, module) for other in modules]
                module = module.rpartition(".")[0]
            found.append(inside.index(True))
        return min(found)

    # ---- What a module returns in backward

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
            if is_column and weight.dim() == 2 and grad.shape[-1:] == weight.shape[:1]:
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
