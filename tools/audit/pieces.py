"""Which piece of the full model each rank holds, and what it calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from .compare import PADDING, FullModel, Held, Relation, equal_ones, piece_of
from .record import Facts, Point, Trace, is_within


def inside(names: dict[str, str], module: str) -> set[str]:
    """The values of the names that are inside of a module."""
    return {names[name] for name in names if name.startswith(f"{module}.")}


class Pieces:
    """Parameters of the ranks and modules, by the full model's names and elements."""

    def __init__(self, everyone: list[Facts]):
        self.everyone = everyone
        self.ranks = len(everyone)
        self.first = everyone[0]
        self.full = self.first.full
        self.own = [facts.own for facts in everyone]
        self.model = FullModel(self.full.parts)
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
        self.unknown = {name: self.unknown_share(name) for name in self.parameters}
        # Only a parameter that is like a piece of the full model can be compared.
        self.matched = [name for name in self.parameters if not self.unknown[name]]
        self.unmatched = [name for name in self.parameters if self.unknown[name]]
        self.renumbered = self.renumbered_modules()

    def holders(self, name: str) -> list[int]:
        """The ranks that have a parameter of this name (experts may be apart)."""
        return [rank for rank, trace in enumerate(self.own) if name in trace.parts]

    def owner_in_full(self, name: str) -> str:
        """The parameter of the full model of which the first rank holds a piece."""
        return self.pieces[self.holders(name)[0]][name].owner

    def is_frozen(self, name: str) -> bool:
        """Does the full model not train it?"""
        return self.owner_in_full(name) in self.full.frozen

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

    # ---- Names of modules, and of tied weights

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

    def uses(self, name: str) -> list[str]:
        """Its names: its own, and all of the tied weight of which it holds a piece."""
        own = self.own[0].tied
        full = self.full.tied
        found = [name, *(alias for alias in own if own[alias] == name)]
        owner = self.owner_in_full(name)
        if owner in full.values() and self.is_tied_after_backward(name):
            found += [owner, *(alias for alias in full if full[alias] == owner)]
        return list(dict.fromkeys(found))

    def is_tied_after_backward(self, name: str) -> bool:
        """Are several parameters pieces of its tied weight, as in a pipeline?"""
        owner = self.owner_in_full(name)
        others = [n for n in self.parameters if n != name]
        return any(self.owner_in_full(n) == owner for n in others)
