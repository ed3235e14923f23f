"""What the facts of all ranks say: which parameter or module is wrong, and how.

tools/audit.py prints these findings. Everything here runs on one rank, on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

ALLOWED = {"float64": 1e-9, "float32": 2e-4}  # relative difference
PADDING = -1  # index of an element that belongs to no parameter of the full model


@dataclass
class Facts:
    """What one rank held and computed, next to the full model."""

    full_parts: dict[str, Tensor]
    tied: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    batch: list[Tensor] = field(default_factory=list)
    full_loss: float = 0.0
    loss: float = 0.0
    full_output: Tensor | None = None
    output: Tensor | None = None
    full_grads: dict[str, Tensor | None] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # modules, as forward calls them
    full_outputs: dict[str, Tensor] = field(default_factory=dict)
    full_output_grads: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_grads: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, Tensor] = field(default_factory=dict)
    train_loss: float = 0.0
    not_in_optimizer: list[str] = field(default_factory=list)
    norms: list[list[float | None]] = field(default_factory=list)
    full_after: list[dict[str, Tensor]] = field(default_factory=list)
    after: list[dict[str, Tensor]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)


class FullModel:
    """All elements of the full model as one vector, and where a value is in it."""

    def __init__(self, parts: dict[str, Tensor]):
        self.names = list(parts)
        self.shapes = {name: part.shape for name, part in parts.items()}
        self.first = {}  # name → index of its first element in the vector
        total = 0
        for name, part in parts.items():
            self.first[name] = total
            total += part.numel()
        self.total = total
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
        for name in reversed(self.names):
            if index >= self.first[name]:
                return name
        raise IndexError(index)

    def indices(self, name: str) -> Tensor:
        """The index of each element of one parameter."""
        shape = self.shapes[name]
        first = self.first[name]
        return torch.arange(first, first + shape.numel()).view(shape)


def placement_of(index: Tensor, full: FullModel, rank: int, ranks: int) -> str:
    """In words: which piece of the full model this rank's tensor is."""
    inside = index[index != PADDING]
    if inside.numel() == 0:
        return "nothing of the full model"
    name = full.owner(int(inside.min()))
    last = full.owner(int(inside.max()))
    if name != last:
        return f"pieces of {name} … {last}"
    whole = full.indices(name)
    if index.shape == whole.shape and torch.equal(index, whole):
        return "replicated"
    for dim in range(whole.dim()):
        for pieces in range(2, ranks + 1):
            width = -(-whole.shape[dim] // pieces)
            for piece in range(pieces):
                part = whole.narrow(dim, min(piece * width, whole.shape[dim]), 0)
                if piece * width < whole.shape[dim]:
                    length = min(width, whole.shape[dim] - piece * width)
                    part = whole.narrow(dim, piece * width, length)
                if is_padded_copy(index, part, dim):
                    return shard_in_words(index, part, dim, piece, pieces, rank, ranks)
    if torch.equal(inside.sort().values.unique(), inside.sort().values):
        return "permuted or partial pieces"
    return "elements held several times"


def is_padded_copy(index: Tensor, part: Tensor, dim: int) -> bool:
    """Is a tensor this part, followed by padding along dim?"""
    if index.dim() != part.dim() or index.shape[dim] < part.shape[dim]:
        return False
    own = index.narrow(dim, 0, part.shape[dim])
    rest = index.narrow(dim, part.shape[dim], index.shape[dim] - part.shape[dim])
    return own.shape == part.shape and torch.equal(own, part) and bool((rest < 0).all())


def shard_in_words(index, part, dim, piece, pieces, rank, ranks) -> str:
    text = f"Shard({dim})"
    if index.shape[dim] > part.shape[dim]:
        text += " with padding"
    if pieces != ranks:
        return f"{text} over {pieces}, piece {piece}"
    return text if piece == rank else f"{text}, the piece of rank {piece}"


@dataclass
class Finding:
    """One fault: what is wrong, where, and how it relates to the right value."""

    category: str
    where: str  # a parameter or a module
    text: str
    module: str = ""


class Audit:
    """Compares all ranks with the full model, and lists what is wrong."""

    def __init__(self, everyone: list[Facts], dtype: str):
        self.everyone = everyone
        self.ranks = len(everyone)
        self.allowed = ALLOWED[dtype]
        self.first = everyone[0]
        self.full = FullModel(self.first.full_parts)
        self.grad = self.full.vector(self.first.full_grads)
        self.largest = self.grad.abs().max().item() or 1.0
        self.findings = []
        self.index = []  # rank → parameter → index of each element
        for facts in everyone:
            found = {name: self.full.find(part) for name, part in facts.parts.items()}
            self.index.append(found)
        self.is_piece = {}
        self.table = []

    def add(self, category: str, where: str, text: str, module: str = "") -> None:
        self.findings.append(Finding(category, where, text, module))

    def near(self, got: Tensor, expected: Tensor, scale: float) -> bool:
        if got.shape != expected.shape:
            return False
        if got.numel() == 0:
            return True
        return (got - expected).abs().max().item() <= self.allowed * scale

    def run(self) -> None:
        """Check in the order of causes; what must follow from a fault is left out."""
        self.check_inputs()
        is_right = self.is_forward_right()
        self.check_parameters(is_right)
        for row in self.table:
            row["gradient"] = "not compared"
        if not is_right:
            self.check_forward()
            return
        self.check_gradients()
        self.check_dropout()
        self.check_steps()

    # ---- Inputs and parameters

    def check_inputs(self) -> None:
        """All ranks of a TP group must have the same batch and build the same model."""
        for rank, facts in enumerate(self.everyone):
            same = len(facts.batch) == len(self.first.batch)
            same = same and all(map(torch.equal, facts.batch, self.first.batch))
            if not same:
                self.add("batch", "batch", f"rank {rank} has another batch than rank 0")
                break
        for rank, facts in enumerate(self.everyone):
            mine = self.full.vector(facts.full_parts)
            if not torch.equal(mine, self.full.vector(self.first.full_parts)):
                text = f"build() returns another model on rank {rank} than on rank 0"
                self.add("build", "build()", text)
                break

    def check_parameters(self, is_forward_right: bool) -> None:
        """Each parameter must be a piece of the full model, and all pieces be there."""
        held = torch.zeros(self.full.total, dtype=torch.bool)
        for name in self.first.parts:
            self.is_piece[name] = True
            for rank, facts in enumerate(self.everyone):
                if name not in facts.parts:
                    continue
                index = self.index[rank][name]
                unknown = (index == PADDING) & (facts.parts[name] != 0)
                held[index[index != PADDING]] = True
                if unknown.any():
                    self.is_piece[name] = False
                    if is_forward_right:
                        break  # scaled or combined on purpose: it cannot be compared
                    share = unknown.double().mean().item()
                    text = f"{share:.0%} of its elements on rank {rank} are in no "
                    text += "parameter of the full model"
                    self.add("not a piece", name, text, self.first.owners.get(name, ""))
                    break
        unknown_names = [name for name, good in self.is_piece.items() if not good]
        for name in self.full.names:
            missing = ~held[self.full.indices(name)]
            if missing.any() and not unknown_names and name not in self.first.tied:
                share = missing.double().mean().item()
                text = f"{share:.0%} of {name} is held by no rank"
                self.add("missing", name, text, name.rpartition(".")[0])
        self.describe_parameters()
        if not is_forward_right:
            self.check_names()

    def check_names(self) -> None:
        """A parameter that has its name from the full model must be a piece of it."""
        for name in self.first.parts:
            if name not in self.full.names or not self.is_piece[name]:
                continue
            own = self.full.indices(name).flatten()
            for rank in range(self.ranks):
                index = self.index[rank][name]
                inside = index[index != PADDING]
                foreign = (inside < own[0]) | (inside > own[-1])
                if foreign.any() and name not in self.first.tied:
                    other = self.full.owner(int(inside[foreign][0]))
                    text = (
                        f"{foreign.double().mean():.0%} of its elements on rank {rank} "
                    )
                    text += f"belong to {other}"
                    module = self.first.owners.get(name, "")
                    self.add("wrong parameter", name, text, module)
                    break

    def describe_parameters(self) -> None:
        """A row for each parameter: which piece rank 0 holds."""
        for name in self.first.parts:
            words = []
            for rank in range(self.ranks):
                if name in self.index[rank]:
                    index = self.index[rank][name]
                    words.append(placement_of(index, self.full, rank, self.ranks))
            self.table.append({"parameter": name, "placement": words[0], "all": words})

    # ---- Forward

    def relation(self, tensors: list[Tensor], expected: Tensor) -> str:
        """How the ranks' tensors relate to the full one: same, a shard, partial, …"""
        scale = max(expected.abs().max().item(), 1e-300)
        if all(self.near(x, expected, scale) for x in tensors):
            return "same"
        for dim in range(expected.dim()):
            if self.is_sharded(tensors, expected, dim, scale):
                return f"Shard({dim})"
        if all(x.shape == expected.shape for x in tensors):
            if self.near(sum(tensors), expected, scale):
                return "partial"
            if self.near(tensors[0], expected * self.ranks, scale):
                return "T times"
            if self.near(tensors[0] * self.ranks, expected, scale):
                return "1/T"
            if any(not torch.equal(x, tensors[0]) for x in tensors):
                return "differs between ranks"
        return "wrong"

    def is_sharded(self, tensors, expected, dim: int, scale: float) -> bool:
        """Are these the ranks' slices along dim, maybe replicated or with padding?"""
        size = expected.shape[dim]
        widths = {x.shape[dim] for x in tensors if x.dim() == expected.dim()}
        if len(widths) != 1:
            joined = [x for x in tensors if x.dim() == expected.dim()]
            if len(joined) != len(tensors):
                return False
            try:
                return self.near(torch.cat(joined, dim), expected, scale)
            except RuntimeError:
                return False
        (width,) = widths
        if width == 0 or (
            width >= size and self.ranks > 1 and width != -(-size // self.ranks)
        ):
            return False
        pieces = -(-size // width)
        if self.ranks % pieces and pieces > self.ranks:
            return False
        copies = max(1, self.ranks // pieces)
        for rank, x in enumerate(tensors):
            first = min((rank // copies) * width, size)
            length = max(0, min(width, size - first))
            part = expected.narrow(dim, first, length)
            if not self.near(x.narrow(dim, 0, length), part, scale):
                return False
        return True

    def is_forward_right(self) -> bool:
        scale = max(abs(self.first.full_loss), 1e-300)
        for facts in self.everyone:
            if not abs(facts.loss - self.first.full_loss) <= self.allowed * scale:
                return False
        return True

    def check_forward(self) -> None:
        """The loss is wrong: find the first module whose output is wrong."""
        losses = [facts.loss for facts in self.everyone]
        for name in self.first.order:
            outputs = [facts.outputs.get(name) for facts in self.everyone]
            if any(x is None for x in outputs):
                continue
            how = self.relation(outputs, self.first.full_outputs[name])
            if how == "same" or how.startswith("Shard"):
                continue
            if how == "partial" and not self.reader_is_wrong(name):
                continue
            if how == "wrong" or how.startswith("differs"):
                how = self.times_bias(name, outputs) or how
            self.add(f"forward {how}", name, f"the loss is {losses[0]:.6g}, not "
                     f"{self.first.full_loss:.6g}", name)  # fmt: skip
            return
        ratio = losses[0] / self.first.full_loss if self.first.full_loss else 0.0
        text = f"all modules are right; loss {losses[0]:.6g}, not "
        text += f"{self.first.full_loss:.6g} ({ratio:.4g} times)"
        self.add("loss", "loss", text)

    def times_bias(self, name: str, outputs: list[Tensor]) -> str:
        """Is the output off by a multiple of the module's bias?"""
        bias = self.first.full_parts.get(f"{name}.bias")
        expected = self.first.full_outputs[name].double()
        if bias is None or outputs[0].shape != expected.shape:
            return ""
        off = outputs[0].double() - expected
        k = (off * bias).sum() / (bias * bias).expand_as(off).sum()
        if abs(k) < 1e-3 or not self.near(
            off, k * bias.expand_as(off), expected.abs().max()
        ):
            return ""
        return f"bias added {k + 1:.4g} times"

    def reader_is_wrong(self, name: str) -> bool:
        """Is the output of the module that contains this one wrong as well?"""
        parent = name.rpartition(".")[0]
        outputs = [facts.outputs.get(parent) for facts in self.everyone]
        if not parent or any(x is None for x in outputs):
            return True
        how = self.relation(outputs, self.first.full_outputs[parent])
        return how != "same" and not how.startswith("Shard")

    # ---- Gradients

    def expected_grad(self, rank: int, name: str) -> Tensor:
        """What this rank's gradient should be: the elements of its piece."""
        index = self.index[rank][name]
        expected = self.grad[index.clamp(min=0)]
        return torch.where(index == PADDING, torch.zeros(()).double(), expected)

    def grad_scale(self, name: str) -> float:
        scale = 0.0
        for rank in range(self.ranks):
            expected = self.expected_grad(rank, name)
            if expected.numel():
                scale = max(scale, expected.abs().max().item())
        return max(scale, 1e-6 * self.largest)

    def replica_sets(self, name: str) -> list[list[int]]:
        """Ranks that hold the same piece of a parameter."""
        sets = []
        for rank in range(self.ranks):
            for ranks in sets:
                if torch.equal(self.index[ranks[0]][name], self.index[rank][name]):
                    ranks.append(rank)
                    break
            else:
                sets.append([rank])
        return sets

    def grad_relation(self, name: str) -> str:
        """How the ranks' gradients of a parameter relate to the right ones."""
        grads = []
        expected = []
        for rank, facts in enumerate(self.everyone):
            expected.append(self.expected_grad(rank, name))
            grads.append(facts.grads.get(name))
        scale = self.grad_scale(name)
        if any(grad is None for grad in grads):
            is_zero = all(self.near(e, 0 * e, self.largest * 1e-6) for e in expected)
            return "right" if is_zero else "None"
        pairs = list(zip(grads, expected))
        if all(self.near(g, e, scale) for g, e in pairs):
            return "right"
        sets = self.replica_sets(name)
        sums = [sum(grads[rank] for rank in ranks) for ranks in sets]
        targets = [expected[ranks[0]] for ranks in sets]
        most = max(len(ranks) for ranks in sets)
        if most > 1:
            if all(self.near(s, e, scale) for s, e in zip(sums, targets)):
                return "sum"
            if all(self.near(s / most, e, scale) for s, e in zip(sums, targets)):
                return "mean"
        factor = self.factor_of(pairs, scale)
        if factor is not None:
            return f"factor {factor:.6g}"
        if most > 1:
            factor = self.factor_of(list(zip(sums, targets)), scale)
            if factor is not None:
                return f"sum factor {factor:.6g}"
        if all(self.near(g, 0 * g, scale) for g in grads):
            return "zero"
        if self.is_others_piece(name, grads, scale):
            return "another rank's piece"
        if all(self.near(sorted_of(g), sorted_of(e), scale) for g, e in pairs):
            return "permuted"
        for ranks in sets:
            if any(
                not self.near(grads[rank], grads[ranks[0]], scale) for rank in ranks
            ):
                return "differs between replicas"
        return "unexplained"

    def factor_of(self, pairs: list, scale: float) -> float | None:
        """k, if every gradient is k times the right one."""
        over = sum((g * e).sum().item() for g, e in pairs)
        under = sum((e * e).sum().item() for _, e in pairs)
        if under == 0:
            return None
        k = over / under
        if abs(k) < 1e-6 or not all(self.near(g, k * e, scale) for g, e in pairs):
            return None
        return k

    def is_others_piece(self, name: str, grads: list, scale: float) -> bool:
        """Has some rank the gradient that belongs to another rank's piece?"""
        for rank, grad in enumerate(grads):
            for other in range(self.ranks):
                expected = self.expected_grad(other, name)
                if other != rank and self.near(grad, expected, scale):
                    if not self.near(grad, self.expected_grad(rank, name), scale):
                        return True
        return False

    def check_gradients(self) -> None:
        """Gradients of parameters, those closest to the loss first."""
        place = {name: i for i, name in enumerate(self.first.order)}
        relations = {}
        for name in self.first.parts:
            if self.is_piece.get(name):
                relations[name] = self.grad_relation(name)
        for row in self.table:
            row["gradient"] = relations.get(row["parameter"], "not compared")
        wrong = [name for name, how in relations.items() if how != "right"]
        wrong.sort(key=lambda name: -place.get(self.first.owners[name], -1))
        flow = self.first_wrong_flow()
        for name in wrong:
            text = ""
            if flow is not None:
                text = f"dL/d(output of {flow[0]}): {flow[1]}"
            self.add(f"gradient {relations[name]}", name, text, self.first.owners[name])

    def first_wrong_flow(self) -> tuple[str, str] | None:
        """In backward order, the first module whose output's gradient is wrong."""
        for name in reversed(self.first.order):
            expected = self.first.full_output_grads.get(name)
            grads = [facts.output_grads.get(name) for facts in self.everyone]
            if expected is None or any(x is None for x in grads):
                continue
            how = self.relation(grads, expected)
            if how != "same" and not how.startswith("Shard"):
                return name, how
        return None

    # ---- Dropout and steps

    def check_dropout(self) -> None:
        """Replicated tensors drop the same elements on all ranks, shards do not."""
        for name, zeros in self.first.dropped.items():
            outputs = [facts.outputs.get(name) for facts in self.everyone]
            masks = [facts.dropped.get(name) for facts in self.everyone]
            expected = self.first.full_outputs.get(name)
            if expected is None or any(x is None for x in (*outputs, *masks)):
                continue
            if not zeros.any() or zeros.all():
                continue  # no dropout here
            how = self.relation(outputs, expected)
            same = all(torch.equal(mask, masks[0]) for mask in masks)
            if how == "same" and not same:
                self.add("dropout differs", name, "replicated input", name)
            if how.startswith("Shard") and same and len(masks) > 1:
                differ = any(not torch.equal(x, outputs[0]) for x in outputs)
                if differ:
                    self.add("dropout same", name, f"input is {how}", name)
        losses = {facts.train_loss for facts in self.everyone}
        first = self.first.train_loss
        apart = max(abs(x - first) for x in losses)
        if apart > self.allowed * max(abs(first), 1e-300):
            if not any(f.category.startswith("dropout") for f in self.findings):
                text = "in train mode the loss differs between ranks"
                self.add("dropout loss", "loss", text)

    def check_steps(self) -> None:
        """After each step: parameters against the full model's, replicas, norms."""
        for name in self.first.not_in_optimizer:
            text = "the optimizer does not have this parameter"
            self.add("not in the optimizer", name, text, self.first.owners[name])
        self.check_norms()
        if any(not f.category.startswith("dropout") for f in self.findings):
            return  # the updates must be wrong as well
        for step, full_after in enumerate(self.first.full_after):
            vector = self.full.vector(full_after)
            wrong = []
            for name in self.first.parts:
                if not self.is_piece[name]:
                    continue
                for rank, facts in enumerate(self.everyone):
                    index = self.index[rank][name]
                    expected = vector[index.clamp(min=0)]
                    expected = torch.where(index == PADDING, 0.0 * expected, expected)
                    scale = (
                        max(expected.abs().max().item(), 1e-300) if len(expected) else 1
                    )
                    if not self.near(facts.after[step][name], expected, 10 * scale):
                        wrong.append(name)
                        break
            for name in wrong:
                text = f"after step {step + 1} it differs from the full model's"
                self.add("update", name, text, self.first.owners[name])
            if wrong:
                return

    def check_norms(self) -> None:
        """The norm that the user's own clipping returns."""
        for step, (full_norm, _) in enumerate(self.first.norms):
            norms = [facts.norms[step][1] for facts in self.everyone]
            if any(norm is None for norm in norms):
                return
            if any(abs(x - full_norm) > self.allowed * full_norm for x in norms):
                same = max(norms) - min(norms) <= self.allowed * full_norm
                how = "the same on all ranks" if same else "different on the ranks"
                text = f"step {step + 1}: {norms[0]:.6g}, not {full_norm:.6g}; {how}"
                if not any(f.category.startswith("gradient") for f in self.findings):
                    self.add("norm", "clip()", text)
                return


def sorted_of(x: Tensor) -> Tensor:
    return x.flatten().sort().values


def findings_of(everyone: list[Facts], dtype: str) -> dict:
    """What audit.py prints, as data."""
    audit = Audit(everyone, dtype)
    audit.run()
    return {
        "ranks": len(everyone),
        "loss": everyone[0].loss,
        "full_loss": everyone[0].full_loss,
        "parameters": audit.table,
        "calls": everyone[0].calls,
        "findings": [vars(finding) for finding in audit.findings],
    }
