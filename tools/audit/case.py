"""How the gradients of parameters are related to the full model's."""

from __future__ import annotations

import torch
from torch import Tensor

from .compare import (
    PADDING,
    Kind,
    Relation,
    equal_ones,
    nan_ranks,
    numbers,
    scale_of,
    wrong_rows,
    wrong_share,
)
from .record import Facts
from .tensors import Tensors


class Case(Tensors):
    """What the faults' tests ask: of pieces, of tensors, and of gradients."""

    def __init__(self, everyone: list[Facts], dtype: str):
        super().__init__(everyone, dtype)
        self.vectors = {}  # see compared()
        self.unused_copies = {}  # parameter → ranks; see fill_unused()
        passes = (self.full.grads, self.full.kept)  # in eval and in train mode
        largest = [self.model.vector(grads).abs().max().item() for grads in passes]
        self.largest = max(largest) or 1.0

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
            return Relation(Kind.UNEXPLAINED)
        nan = [ranks[place] for place in nan_ranks(grads)]
        if nan:
            return Relation(Kind.NAN, f"nan on ranks {nan}")
        if self.ruler.all_near(grads, right, scale):
            return Relation(Kind.RIGHT)
        found = None
        if len(ranks) < self.ranks:
            others = self.in_its_place(name, self.vectors[what, None])
            found = self.over_all_ranks(grads, others, scale)
        found = found or self.over_replicas(name, grads, right, scale)
        found = found or self.over_all_ranks(grads, right, scale)
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
            is_known = x is not None and y is not None and not nan_ranks([x, y])
            if is_known and not self.ruler.near(x, y, scale):
                found.append(rank)
        return found

    def replicas_apart(self, name: str, held: list, factor: int = 1) -> list[int]:
        """Two ranks with the same piece whose tensors differ, if there are any."""
        ranks = self.holders(name)
        for places in self.replica_sets(name):
            first = held[places[0]]
            for place in places:
                x = held[place]
                is_same = x is first
                if x is not None and first is not None:
                    is_same = self.ruler.near(x, first, factor * scale_of(first))
                if not is_same:
                    return [ranks[places[0]], ranks[place]]
        return []

    def grad_scale(self, right: list[Tensor]) -> float:
        """What differences are compared with: the parameter's largest gradient."""
        scale = max([e.abs().max().item() for e in right if e.numel()], default=0.0)
        # Rounding errors alone make the gradient of a key's bias, or of a bias in front
        # of a BatchNorm.
        floor = min(1e-2, 1e5 * self.ruler.allowed)
        return max(scale, floor * self.largest)

    # ---- The relations of a gradient, from the simple to the rare

    def over_replicas(self, name: str, grads, right, scale: float) -> Relation | None:
        """Is the sum over the ranks with the same piece right, or a factor off?"""
        near = self.ruler.all_near
        sums, most = self.over_holders(name, grads)
        if most > 1 and near(sums, right, scale):
            sets = self.replica_sets(name)
            if equal_ones(grads) == sets and len(sets) * most == len(grads):
                return self.ruler.gradient_factor(1 / most)
            return Relation(Kind.SUM)
        if most > 1 and near(sums, right, scale * most, most):
            return Relation(Kind.MEAN)
        k = self.ruler.times(grads, right, scale)
        if k:
            return self.ruler.gradient_factor(k)
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
        for ranks in self.replica_sets(name):
            if any(not near(grads[r], grads[ranks[0]], scale) for r in ranks):
                return Relation(Kind.REPLICAS)
        return Relation(Kind.UNEXPLAINED)

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
