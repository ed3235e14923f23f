"""What the facts of all ranks say: which parameter or module is wrong, and how.

tools/audit.py prints these findings. Everything here runs on one rank, on CPU tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALLOWED = {"float64": 1e-9, "float32": 2e-4}  # relative difference
OTHER = ", the piece of rank"
FUSED = re.compile("qkv|query_key_value|c_attn|in_proj|gate_up|fused", re.IGNORECASE)
SHARED = re.compile(r"over (\d+), piece (\d+)$")  # several ranks hold one piece
# Relations of a gradient whose cause may be the gradient that arrives at its module.
FROM_FLOW = ("sum", "differs", "unexplained", "zero", "None")
PADDING = -1  # index of an element that belongs to no parameter of the full model


@dataclass
class Facts:
    """What one rank held and computed, next to the full model."""

    full_parts: dict[str, Tensor]
    tied: dict[str, str] = field(default_factory=dict)
    own_tied: dict[str, str] = field(default_factory=dict)  # of the parallel model
    parts: dict[str, Tensor] = field(default_factory=dict)
    batch: list[Tensor] = field(default_factory=list)
    noise: float = 0.0  # change of the full gradients by rounding errors
    full_loss: float = 0.0
    loss: float = 0.0
    full_grads: dict[str, Tensor | None] = field(default_factory=dict)
    # Tied weights: name → module that uses it → the gradient of this use alone.
    use_grads: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)  # requires_grad is False
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # modules, as forward ends them
    own_order: list[str] = field(default_factory=list)  # of the parallel model
    full_input_grads: dict[tuple, Tensor] = field(default_factory=dict)
    input_grads: dict[tuple, Tensor] = field(default_factory=dict)
    full_buffers: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    full_outputs: dict[str, Tensor] = field(default_factory=dict)
    full_output_grads: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_grads: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, Tensor] = field(default_factory=dict)
    recomputed: list[str] = field(default_factory=list)
    train_loss: float = 0.0
    not_in_optimizer: list[str] = field(default_factory=list)
    norms: list[list[float | None]] = field(default_factory=list)
    step_losses: list[list[float]] = field(default_factory=list)  # full, own
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
    fused = fused_blocks(index, whole, rank, ranks)
    if fused:
        return fused
    if torch.equal(inside.sort().values.unique(), inside.sort().values):
        return "permuted or partial pieces"
    return "elements held several times"


def fused_blocks(index: Tensor, whole: Tensor, rank: int, ranks: int) -> str:
    """A slice of each of several blocks (a fused q, k, v), in words, or ""."""
    for dim in range(whole.dim()):
        for count in (2, 3, 4):
            if whole.shape[dim] % (count * ranks):
                continue
            blocks = whole.chunk(count, dim)
            for piece in range(ranks):
                parts = [block.chunk(ranks, dim)[piece] for block in blocks]
                own = torch.cat(parts, dim)
                if own.shape == index.shape and torch.equal(own, index):
                    text = f"Shard({dim}) of each of {count} blocks"
                    return text if piece == rank else f"{text}{OTHER} {piece}"
    return ""


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
    return text if piece == rank else f"{text}{OTHER} {piece}"


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
        self.first = everyone[0]
        self.allowed = max(ALLOWED[dtype], min(1e-3, 100 * self.first.noise))
        self.full = FullModel(self.first.full_parts)
        self.grad = self.full.vector(self.first.full_grads)
        self.largest = self.grad.abs().max().item() or 1.0
        self.findings = []
        self.index = []  # rank → parameter → index of each element
        for facts in everyone:
            found = {name: self.full.find(part) for name, part in facts.parts.items()}
            self.index.append(found)
        self.owners = {}  # parameter → its module, of all ranks
        for facts in everyone:
            for name, owner in facts.owners.items():
                self.owners.setdefault(name, owner)
        self.module_names = self.match_modules()
        self.rename_modules()
        self.unmatched = []  # parameters that cannot be compared
        self.is_piece = {}
        self.table = []

    def add(self, category: str, where: str, text: str, module: str = "") -> None:
        self.findings.append(Finding(category, where, text, module))

    def holders(self, name: str) -> list[int]:
        """The ranks that have a parameter of this name (experts may be apart)."""
        return [r for r, facts in enumerate(self.everyone) if name in facts.parts]

    # ---- Modules that have other names in the full model

    def match_modules(self) -> dict[str, str]:
        """Own name → full name, of modules whose name the full model does not have.

        A module is matched by its parameters: they hold pieces of those of one module
        of the full model. If a leaf has parameters of several (a norm fused with a
        linear), its output is that of the last one.
        """
        order = self.first.order
        sets = {module: self.full_names_in(module) for module in order if module}
        found = {}
        for own in self.first.own_order:
            if own in order or not own:
                continue
            held = self.owned_by(own)
            if not held:
                continue
            same = [module for module, names in sets.items() if names == held]
            if same:
                found[own] = same[0]
            elif any(name.rpartition(".")[0] == own for name in self.owners):
                # Modules end before those around them: the last small one is a leaf.
                inside = [m for m in order if sets.get(m) and sets[m] < held]
                inside.sort(key=lambda module: module.count("."))
                if inside:
                    found[own] = inside[-1]
        self.match_children(found)
        return found

    def match_children(self, found: dict[str, str]) -> None:
        """Modules without parameters (dropout) that have the same name inside."""
        for own in self.first.own_order:
            parent = own.rpartition(".")[0]
            if own in found or own in self.first.order or parent not in found:
                continue
            name = found[parent] + own.removeprefix(parent)
            if name in self.first.order:
                found[own] = name

    def full_names_in(self, module: str) -> set[str]:
        return {name for name in self.full.names if name.startswith(f"{module}.")}

    def owned_by(self, own: str) -> set[str]:
        """Parameters of the full model of which this module holds pieces."""
        held = set()
        names = list(self.owners)
        names.extend(self.first.own_tied)
        for alias in names:
            name = self.first.own_tied.get(alias, alias)
            if alias.startswith(f"{own}."):
                index = self.index[0].get(name)
                inside = [] if index is None else index[index != PADDING]
                if len(inside):
                    held.add(self.full.owner(int(inside[0])))
        return held

    def rename_modules(self) -> None:
        """Store what the ranks recorded under the names of the full model."""

        def renamed(records: dict) -> dict:
            found = {}
            for key, value in records.items():
                if isinstance(key, tuple):
                    key = tuple(self.module_names.get(name, name) for name in key)
                else:
                    key = self.module_names.get(key, key)
                found.setdefault(key, value)
            return found

        for facts in self.everyone:
            facts.outputs = renamed(facts.outputs)
            facts.output_grads = renamed(facts.output_grads)
            facts.input_grads = renamed(facts.input_grads)
            facts.dropped = renamed(facts.dropped)

    def owner(self, name: str) -> str:
        """The module of a parameter, as the full model calls it."""
        own = self.owners.get(name, "")
        return self.module_names.get(own, own)

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
        for name in self.owners:
            self.is_piece[name] = True
            for rank, facts in enumerate(self.everyone):
                if name not in facts.parts:
                    continue
                index = self.index[rank][name]
                unknown = (index == PADDING) & (facts.parts[name] != 0)
                held[index[index != PADDING]] = True
                if unknown.any():
                    self.is_piece[name] = False
                    is_scaled = (
                        self.full.find(facts.parts[name] * self.ranks) >= 0
                    ).all()
                    if is_forward_right or is_scaled:
                        self.unmatched.append(name)
                        break  # scaled or combined on purpose: it cannot be compared
                    share = unknown.double().mean().item()
                    text = f"{share:.0%} of its elements on rank {rank} are in no "
                    text += "parameter of the full model"
                    self.add("not a piece", name, text, self.owner(name))
                    break
        unknown_names = [name for name, good in self.is_piece.items() if not good]
        for name in self.full.names:
            missing = ~held[self.full.indices(name)]
            is_known = not unknown_names and name not in self.first.tied
            if missing.any() and is_known and not self.others_piece(name):
                share = missing.double().mean().item()
                text = f"{share:.0%} of {name} is held by no rank"
                self.add("missing", name, text, name.rpartition(".")[0])
        self.describe_parameters()
        if not is_forward_right:
            self.check_names()
            self.check_buffers()
            self.check_pieces()

    def check_pieces(self) -> None:
        """The loss is wrong: does a rank hold the piece of another, is a fused weight
        split like one matrix?"""
        for row in self.table:
            name = row["parameter"]
            owner = self.owner(name)
            for rank, words in enumerate(row["all"]):
                if OTHER in words:
                    text = f"rank {self.holders(name)[rank]} holds {words}"
                    self.add("wrong piece", name, text, owner)
                    break
                shared = SHARED.search(words)
                if shared and len(row["all"]) == self.ranks:
                    pieces = int(shared[1])
                    usual = rank * pieces // self.ranks
                    if int(shared[2]) != usual:
                        text = f"rank {rank} holds piece {shared[2]} of {pieces}; if "
                        text += f"neighbors share a piece, its piece is {usual}"
                        self.add("wrong piece", name, text, owner)
                        break
            if FUSED.search(name) and row["all"][0] == "Shard(0)":
                text = "by its name it is several matrices, and it is one Shard(0)"
                self.add("fused", name, text, owner)

    def check_buffers(self) -> None:
        """A buffer that has its name from the full model must be equal, or a slice."""
        for name, expected in self.first.full_buffers.items():
            held = [facts.buffers.get(name) for facts in self.everyone]
            if any(x is None for x in held):
                continue
            how = self.relation(held, expected)
            if not is_right(how) and how != "of another shape":
                text = f"it is {how}"
                self.add("buffer", name, text, name.rpartition(".")[0])

    def others_piece(self, name: str) -> bool:
        """Does a rank hold another rank's piece of this parameter?"""
        for rank in range(self.ranks):
            if name not in self.index[rank]:
                continue
            index = self.index[rank][name]
            if OTHER in placement_of(index, self.full, rank, self.ranks):
                return True
        return False

    def check_names(self) -> None:
        """A parameter that has its name from the full model must be a piece of it."""
        for name in self.owners:
            if name not in self.full.names or not self.is_piece[name]:
                continue
            own = self.full.indices(name).flatten()
            for rank in self.holders(name):
                index = self.index[rank][name]
                inside = index[index != PADDING]
                foreign = (inside < own[0]) | (inside > own[-1])
                if foreign.any() and name not in self.first.tied:
                    other = self.full.owner(int(inside[foreign][0]))
                    text = (
                        f"{foreign.double().mean():.0%} of its elements on rank {rank} "
                    )
                    text += f"belong to {other}"
                    module = self.owner(name)
                    self.add("wrong parameter", name, text, module)
                    break

    def describe_parameters(self) -> None:
        """A row for each parameter: which piece the first rank with it holds."""
        for name in self.owners:
            words = []
            whole = set()  # full parameters of which the ranks hold all
            for rank in self.holders(name):
                index = self.index[rank][name]
                words.append(placement_of(index, self.full, rank, self.ranks))
                if words[-1] == "replicated" and index.numel():
                    whole.add(self.full.owner(int(index.min())))
            text = words[0]
            if text == "replicated" and len(words) < self.ranks:
                ranks = ", ".join(str(rank) for rank in self.holders(name))
                text = f"on rank {ranks} only"
            elif len(whole) > 1:
                text = "another one per rank"
            row = {"parameter": name, "placement": text, "all": words}
            self.table.append(row)

    # ---- Forward

    def views(self, tensors: list[Tensor], expected: Tensor) -> list[tuple]:
        """What the ranks may hold of a tensor: ("same" or "Shard(d)", a piece each)."""
        found = []
        if all(x.shape == expected.shape for x in tensors):
            found.append(("same", [expected] * self.ranks))
        if any(x.dim() != expected.dim() for x in tensors):
            return found
        for dim in range(expected.dim()):
            widths = [x.shape[dim] for x in tensors]
            pieces = pieces_of(expected, dim, widths)
            if pieces and all(map(same_shape, tensors, pieces)):
                found.append((f"Shard({dim})", pieces))
        return found

    def all_near(self, tensors, pieces, scale: float, k: float = 1.0) -> bool:
        """Is every tensor k times its piece? Padding after the piece does not count."""
        for x, piece in zip(tensors, pieces):
            if not self.near(trimmed(x, piece).double(), k * piece.double(), scale):
                return False
        return True

    def relation(self, tensors: list[Tensor], expected: Tensor) -> str:
        """How the ranks' tensors relate to the full one: same, a shard, partial, …"""
        scale = max(expected.abs().max().item(), 1e-300) if expected.numel() else 1.0
        views = self.views(tensors, expected)
        for name, pieces in views:
            if self.all_near(tensors, pieces, scale):
                return name
        if views and views[0][0] == "same":
            same = all(self.near(x, tensors[0], scale) for x in tensors)
            if self.near(sum(tensors), expected, scale) and not same:
                return "partial"
        for _, pieces in views:
            k = multiple_of(tensors, pieces)
            if abs(k) > 1e-6 and self.all_near(tensors, pieces, scale, k):
                return self.in_words(k)
        if self.are_same_elements(tensors, expected, scale):
            return "in another order"
        if not views:
            return "of another shape"
        right = self.right_ranks(tensors, views, scale)
        if right:
            return f"right on ranks {right} only"
        if views[0][0] == "same" and not all(
            torch.equal(x, tensors[0]) for x in tensors
        ):
            return "differs between ranks"
        return "wrong"

    def in_words(self, k: float) -> str:
        """A factor: T times, 1/T, or k times."""
        if abs(k - self.ranks) < 1e-6:
            return "T times"
        if abs(k * self.ranks - 1) < 1e-6:
            return "1/T"
        return f"{k:.6g} times"

    def are_same_elements(self, tensors, expected: Tensor, scale: float) -> bool:
        """Do the ranks together hold the elements, each once (or each T times)?"""
        target = sorted_of(expected)
        for held in (torch.cat([x.flatten() for x in tensors]), tensors[0]):
            if held.numel() == target.numel():
                if self.near(sorted_of(held), target, scale):
                    return True
        return False

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

    def is_forward_right(self) -> bool:
        scale = max(abs(self.first.full_loss), 1e-300)
        for facts in self.everyone:
            if not abs(facts.loss - self.first.full_loss) <= self.allowed * scale:
                return False
        return True

    def outputs_of(self, name: str) -> list[Tensor] | None:
        """A module's output on each rank, or None if some rank has none."""
        outputs = [facts.outputs.get(name) for facts in self.everyone]
        if any(x is None for x in outputs) or name not in self.first.full_outputs:
            return None
        return outputs

    def check_forward(self, is_loss_wrong: bool = True) -> bool:
        """Find the first module whose output is wrong. Is there one?"""
        losses = [facts.loss for facts in self.everyone]
        seen = f"the loss is {losses[0]:.6g}, not {self.first.full_loss:.6g}"
        if not is_loss_wrong:
            seen = "the loss is right, as far as its precision shows"
        reordered = []
        for name in self.first.order:
            outputs = self.outputs_of(name)
            if outputs is None:
                continue
            how = self.relation(outputs, self.first.full_outputs[name])
            if is_right(how) or how == "of another shape":
                continue
            if how == "in another order":
                reordered.append(name)
                continue
            if how == "partial" and not self.is_never_summed(name):
                continue
            if reordered:
                seen += f"; the output of {reordered[0]} is in another order"
            how = self.with_bias(name, outputs) or how
            seen += self.share_of_output(name, outputs)
            self.add(f"forward {how}", name or "the model", seen + self.inside(name),
                     name)  # fmt: skip
            return True
        reordered = [name for name in reordered if self.reader_is_wrong(name)]
        if reordered:
            name = reordered[0]
            self.add("forward in another order", name or "the model", seen, name)
            return True
        if not is_loss_wrong:
            return False
        ratio = losses[0] / self.first.full_loss if self.first.full_loss else 0.0
        text = f"all modules are right; {seen} ({ratio:.4g} times)"
        if len(set(losses)) > 1:
            text += "; it differs between ranks: " + numbers(losses)
        self.add("loss", "loss", text)
        return True

    def share_of_output(self, name: str, outputs: list[Tensor]) -> str:
        """How many elements of an output are wrong on each rank, if they compare."""
        expected = self.first.full_outputs[name]
        if any(x.shape != expected.shape for x in outputs):
            return ""
        scale = max(expected.abs().max().item(), 1e-300)
        shares = []
        for x in outputs:
            off = (x - expected).abs() > self.allowed * scale
            shares.append(f"{off.double().mean().item():.0%}")
        return f"; wrong elements by rank: {' '.join(shares)}"

    def inside(self, name: str) -> str:
        """What is known of the modules inside of a module whose output is wrong."""
        prefix = f"{name}." if name else ""
        children = [n for n in self.first.order if n and n.startswith(prefix)]
        children = [n for n in children if n != name and self.outputs_of(n) is not None]
        if not children:
            return ""
        return (
            f"; the outputs of all compared modules inside of it "
            f"({len(children)}, up to {children[-1]}) are right, so the fault is in "
            f"what its forward does with them"
        )

    def biases_of(self, name: str, size: int) -> list[Tensor]:
        """Biases that this module's output may contain: its own, and those near it."""
        parent = name.rpartition(".")[0]
        found = []
        for prefix in (f"{name}.", f"{parent}." if parent else ""):
            for other, x in self.first.full_parts.items():
                if other.startswith(prefix) and other.endswith("bias"):
                    if x.shape == (size,):
                        found.append(x)
        return found

    def with_bias(self, name: str, outputs: list[Tensor]) -> str:
        """Is the output, or its sum over the ranks, off by a multiple of a bias?"""
        expected = self.first.full_outputs[name].double()
        scale = expected.abs().max().item()
        size = expected.shape[-1] if expected.dim() else 0
        for bias in self.biases_of(name, size):
            for _, pieces in self.views(outputs, expected):
                if any(piece.shape[-1] != len(bias) for piece in pieces):
                    continue
                off = [trimmed(x, p).double() - p for x, p in zip(outputs, pieces)]
                biases = [bias.expand_as(x) for x in off]
                k = multiple_of(off, biases)
                if abs(k) > 1e-3 and self.all_near(off, biases, scale, k):
                    return f"bias added {k + 1:.4g} times"
                inner = [piece - bias for piece in pieces]
                rest = [trimmed(x, p) - bias for x, p in zip(outputs, pieces)]
                k = multiple_of(rest, inner)
                if abs(k) > 1e-3 and self.all_near(rest, inner, scale, k):
                    return f"{self.in_words(k)} but for the bias"
            if all(x.shape == expected.shape for x in outputs):
                off = [sum(outputs).double() - expected]
                k = multiple_of(off, [bias.expand_as(expected)])
                if abs(k) > 1e-3 and self.all_near(off, [bias + 0 * off[0]], scale, k):
                    if self.is_never_summed(name):
                        return "partial, but for the bias"
                    return f"bias added {k + 1:.4g} times"
        return ""

    def is_never_summed(self, name: str) -> bool:
        """Does no module around this one sum its output?

        A partial output is right if the module around it sums it, even if that module
        is wrong for another reason or scales the sum.
        """
        parent = name.rpartition(".")[0]
        while parent:
            outputs = self.outputs_of(parent)
            if outputs is not None:
                how = self.relation(outputs, self.first.full_outputs[parent])
                if how != "partial":
                    is_scaled = how.endswith("times") or how == "1/T"
                    same = all(torch.equal(x, outputs[0]) for x in outputs)
                    return not (is_right(how) or is_scaled or same)
            parent = parent.rpartition(".")[0]
        outputs = self.outputs_of("")
        if not name or outputs is None:
            return True
        how = self.relation(outputs, self.first.full_outputs[""])
        return not is_right(how) and not how.endswith("times") and how != "1/T"

    def reader_is_wrong(self, name: str) -> bool:
        """Is the output of the module that contains this one wrong as well?"""
        parent = name.rpartition(".")[0]
        outputs = self.outputs_of(parent)
        if not name or outputs is None:
            return True
        return not is_right(self.relation(outputs, self.first.full_outputs[parent]))

    # ---- Gradients

    def expected_grad(self, rank: int, name: str) -> Tensor:
        """What this rank's gradient should be: the elements of its piece."""
        index = self.index[rank][name]
        expected = self.grad[index.clamp(min=0)]
        return torch.where(index == PADDING, torch.zeros(()).double(), expected)

    def grad_scale(self, name: str) -> float:
        """What differences are compared with: the parameter's largest gradient."""
        scale = 0.0
        for rank in self.holders(name):
            expected = self.expected_grad(rank, name)
            if expected.numel():
                scale = max(scale, expected.abs().max().item())
        floor = min(1e-2, 1e3 * self.allowed)  # a key's bias has the gradient 0
        return max(scale, floor * self.largest)

    def replica_sets(self, name: str) -> list[list[int]]:
        """Which of the ranks that have a parameter hold the same piece of it.

        A rank is given by its place among the ranks that have the parameter.
        """
        sets = []
        held = [self.index[rank][name] for rank in self.holders(name)]
        for place, index in enumerate(held):
            for places in sets:
                if torch.equal(held[places[0]], index):
                    places.append(place)
                    break
            else:
                sets.append([place])
        return sets

    def is_frozen_in_full(self, name: str) -> bool:
        """Has the full model no gradient for this parameter either?"""
        index = self.index[self.holders(name)[0]][name]
        inside = index[index != PADDING]
        if not len(inside):
            return True
        return self.first.full_grads.get(self.full.owner(int(inside[0]))) is None

    def of_uses(self, name: str, grads: list, sets, scale: float) -> str:
        """A tied weight: is the gradient complete for some of its uses only?"""
        places = self.holders(name)
        index = self.index[places[0]][name]
        inside = index[index != PADDING]
        tied = self.full.owner(int(inside[0])) if len(inside) else ""
        uses = self.first.use_grads.get(tied)
        if not uses or any(grad is None for grad in grads):
            return ""
        count = len(sets[0])
        got = []
        columns = []
        for ranks in sets:
            got.append(sum(grads[place] for place in ranks).flatten() / count)
        for grad in uses.values():
            vector = self.full.vector({**self.first.full_grads, tied: grad})
            pieces = []
            for ranks in sets:
                own = self.index[places[ranks[0]]][name]
                piece = torch.where(own == PADDING, 0.0, vector[own.clamp(min=0)])
                pieces.append(piece.flatten())
            columns.append(torch.cat(pieces))
        got = torch.cat(got)
        matrix = torch.stack(columns, 1)
        factors = torch.linalg.lstsq(matrix, got[:, None]).solution[:, 0]
        if not self.near(matrix @ factors, got, scale):
            return ""
        words = []
        for use, k in zip(uses, factors.tolist()):
            words.append(f"{0 if abs(k) < 1e-6 else k:.4g} × {use}")
        return "of its uses: " + " + ".join(words)

    def grad_relation(self, name: str) -> str:
        """How the ranks' gradients of a parameter relate to the right ones."""
        ranks = self.holders(name)
        grads = [self.everyone[rank].grads.get(name) for rank in ranks]
        expected = [self.expected_grad(rank, name) for rank in ranks]
        scale = self.grad_scale(name)
        if all(name in self.everyone[rank].frozen for rank in ranks):
            return "frozen" if self.is_frozen_in_full(name) else "None"
        if any(grad is None for grad in grads):
            is_zero = all(self.near(e, 0 * e, self.largest * 1e-6) for e in expected)
            return "right" if is_zero else "None"
        if any(g.shape != e.shape for g, e in zip(grads, expected)):
            return "of another shape"
        if self.all_near(grads, expected, scale):
            return "right"
        sets = self.replica_sets(name)
        how = self.over_replicas(grads, expected, sets, scale)
        if how:
            return how
        if self.is_tied_apart(name, grads, expected, scale):
            return "tied"
        how = self.over_all_ranks(grads, expected, scale)
        if how:
            return how
        if all(self.near(g, 0 * g, scale) for g in grads):
            return "zero"
        how = self.of_uses(name, grads, sets, scale)
        if how:
            return how
        if self.is_others_piece(name, grads, scale):
            return "another rank's piece"
        if self.all_near(
            [sorted_of(g) for g in grads], [sorted_of(e) for e in expected], scale
        ):
            return "permuted"
        for ranks in sets:
            for rank in ranks:
                if not self.near(grads[rank], grads[ranks[0]], scale):
                    return "differs between replicas"
        return "unexplained"

    def over_replicas(self, grads, expected, sets, scale: float) -> str:
        """Is the sum over the ranks with the same piece right, or a factor off?"""
        sums = [sum(grads[rank] for rank in ranks) for ranks in sets]
        targets = [expected[ranks[0]] for ranks in sets]
        most = max(len(ranks) for ranks in sets)
        if most > 1:
            if self.all_near(sums, targets, scale):
                same = all(torch.equal(g, grads[0]) for g in grads)
                return "factor " + f"{1 / most:.6g}" if same else "sum"
            if self.all_near(sums, targets, scale * most, most):
                return "mean"
        k = multiple_of(grads, expected)
        if abs(k) > 1e-6 and self.all_near(grads, expected, scale * max(1, abs(k)), k):
            return f"factor {k:.6g}"
        factors = [multiple_of([g], [e]) for g, e in zip(grads, expected)]
        if all(abs(k) > 1e-6 for k in factors):
            scaled = [k * e for k, e in zip(factors, expected)]
            if self.all_near(grads, scaled, scale):
                return "factor per rank " + numbers(factors)
        if most > 1:
            k = multiple_of(sums, targets)
            if abs(k) > 1e-6 and self.all_near(sums, targets, scale, k):
                return f"scaled sum, {k:.6g} times"
        return ""

    def over_all_ranks(self, grads, expected, scale: float) -> str:
        """Were gradients of different pieces summed or averaged over the ranks?"""
        if any(e.shape != expected[0].shape for e in expected):
            return ""
        if all(torch.equal(e, expected[0]) for e in expected):
            return ""
        mixed = [sum(expected)] * len(expected)
        k = multiple_of(grads, mixed)
        if abs(k) > 1e-6 and self.all_near(grads, mixed, scale, k):
            return f"of several pieces, {self.in_words(k)} their sum"
        return ""

    def is_tied_apart(self, name: str, grads, expected, scale: float) -> bool:
        """Is the sum over several parameters with the same piece right?"""
        total = list(grads)
        count = 0
        for other in self.first.parts:
            index = [self.index[rank].get(other) for rank in self.holders(name)]
            if other == name or any(x is None for x in index):
                continue
            own = [self.index[rank][name] for rank in self.holders(name)]
            others = [self.everyone[r].grads.get(other) for r in self.holders(name)]
            if any(x is None for x in others):
                continue
            if all(map(torch.equal, own, index)):
                total = [x + y for x, y in zip(total, others)]
                count += 1
        return count > 0 and self.all_near(total, expected, scale)

    def is_others_piece(self, name: str, grads: list, scale: float) -> bool:
        """Has some rank the gradient that belongs to another rank's piece?"""
        for rank, grad in zip(self.holders(name), grads):
            for other in self.holders(name):
                expected = self.expected_grad(other, name)
                if other != rank and self.near(grad, expected, scale):
                    if not self.near(grad, self.expected_grad(rank, name), scale):
                        return True
        return False

    def check_gradients(self) -> None:
        """Gradients of parameters, those closest to the loss first."""
        relations = {}
        for name in self.owners:
            if self.is_piece.get(name):
                relations[name] = self.grad_relation(name)
        for row in self.table:
            row["gradient"] = relations.get(row["parameter"], "not compared")
        wrong = [n for n, how in relations.items() if how not in ("right", "frozen")]
        wrong.sort(key=lambda name: -self.place_of(name))
        flow = self.first_wrong_flow(wrong)
        if wrong and flow is not None and not self.check_slice(flow[0]):
            if relations[wrong[0]] == "unexplained":
                self.check_backward(flow[0])
        is_last = flow is not None and flow[0] == self.last_module()
        if wrong and is_last and not self.check_forward(is_loss_wrong=False):
            text = f"dL/d(output of {flow[0] or 'the model'}): {flow[1]}"
            self.add("loss backward", "loss", text)
        if wrong and flow is not None and flow[1] == "partial":
            if relations[wrong[0]] == "unexplained":
                text = f"dL/d(output of {flow[0] or 'the model'}) is partial"
                text += self.readers_of(flow[0])
                self.add("backward partial", flow[0], text, flow[0])
        for name in wrong:
            text = self.share_of(name) + self.owner_of(name)
            if flow is not None and relations[name].startswith(FROM_FLOW):
                if flow[0] != self.owner(name):
                    text += f"; dL/d(output of {flow[0] or 'the model'}): {flow[1]}"
                text += self.readers_of(flow[0])
            self.add(f"gradient {relations[name]}", name, text, self.owner(name))

    def check_backward(self, writer: str) -> None:
        """Is a module's output gradient right, and what it sends back wrong?"""
        wrong = {}  # reader → what it sends back to which writers
        for key, expected in self.first.full_input_grads.items():
            got = [facts.input_grads.get(key) for facts in self.everyone]
            if any(x is None for x in got):
                continue
            how = self.relation(got, expected)
            if not is_right(how) and how not in ("partial", *NOT_COMPARED):
                wrong.setdefault(key[1], {})[key[0]] = how
        for reader in reversed(self.first.order):
            texts = [f"{to} ({how})" for to, how in wrong.get(reader, {}).items()]
            known = any(to == writer for to in wrong.get(reader, {}))
            inner = any(name.startswith(f"{reader}.") for name in wrong)
            expected = self.first.full_output_grads.get(reader)
            grads = [facts.output_grads.get(reader) for facts in self.everyone]
            if not known or inner or expected is None or any(x is None for x in grads):
                continue
            how = self.relation(grads, expected)
            if is_right(how):
                text = f"dL/d(its output) is right ({how}), and what it sends back is "
                text += f"wrong for {', '.join(texts)}"
                self.add("backward of a module", reader, text, reader)
                return

    def check_slice(self, writer: str) -> bool:
        """Does a module send back a slice of each rank's own partial gradient?

        Column-parallel linears that read an all-gathered tensor return a partial sum
        each. It is computed here, as dL/dy @ W, and its slice is compared with what
        came back. A right backward sums over the ranks before it slices.
        """
        for key, expected in self.first.full_input_grads.items():
            got = [facts.input_grads.get(key) for facts in self.everyone]
            if key[0] != writer or any(x is None for x in got):
                continue
            partial = [self.partial_of(key[1], rank) for rank in range(self.ranks)]
            if any(x is None or x.shape != expected.shape for x in partial):
                continue
            scale = max(expected.abs().max().item(), 1e-300)
            if not self.near(sum(partial), expected.double(), scale):
                continue
            for name, _ in self.views(got, expected):
                if not name.startswith("Shard"):
                    continue
                dim = int(name[6:-1])
                slices = []
                for rank, x in enumerate(partial):
                    slices.append(pieces_of(x, dim, [y.shape[dim] for y in got])[rank])
                if self.all_near(got, slices, scale):
                    text = f"its input is {name} and gathered; each rank's gradient of "
                    text += f"the output of {writer} has its own partial sum only"
                    self.add("backward slice", key[1], text, key[1])
                    return True
        return False

    def partial_of(self, reader: str, rank: int) -> Tensor | None:
        """dL/dx through the column-parallel linears in a module, on one rank."""
        total = None
        facts = self.everyone[rank]
        for name, weight in facts.parts.items():
            owner = self.owner(name)
            is_inside = owner == reader or owner.startswith(f"{reader}.")
            grad = facts.output_grads.get(owner)
            if not is_inside or grad is None or not name.endswith("weight"):
                continue
            words = placement_of(self.index[rank][name], self.full, rank, self.ranks)
            if weight.dim() == 2 and words.startswith("Shard(0)"):
                if grad.shape[-1] == weight.shape[0]:
                    term = grad.double() @ weight
                    if total is not None and total.shape != term.shape:
                        return None  # linears of different inputs
                    total = term if total is None else total + term
        return total

    def owner_of(self, name: str) -> str:
        """Is the gradient right that arrives at the module with this parameter?"""
        owner = self.owner(name)
        expected = self.first.full_output_grads.get(owner)
        grads = [facts.output_grads.get(owner) for facts in self.everyone]
        if expected is None or any(x is None for x in grads):
            return ""
        how = self.relation(grads, expected)
        how = f"right ({how})" if is_right(how) else how
        return f"; dL/d(output of its module, {owner or 'the model'}): {how}"

    def readers_of(self, writer: str) -> str:
        """Which readers of a module's output send back a wrong gradient."""
        wrong = []
        for (module, reader), expected in self.first.full_input_grads.items():
            key = (module, reader)
            grads = [facts.input_grads.get(key) for facts in self.everyone]
            if module != writer or any(x is None for x in grads):
                continue
            how = self.relation(grads, expected)
            if not is_right(how):
                wrong.append(f"{reader} ({how})")
        if not wrong:
            return ""
        return f"; modules that return a wrong gradient: {', '.join(wrong)}"

    def place_of(self, name: str) -> int:
        """When forward ended the module that has a parameter; −1 if it is not known."""
        places = [self.place_of_module(self.owners[name])]
        for alias, first in self.first.own_tied.items():
            if first == name:
                places.append(self.place_of_module(alias.rpartition(".")[0]))
        return min(places)

    def place_of_module(self, owner: str) -> int:
        order = self.first.own_order
        inside = [m for m in order if m.startswith(f"{owner}.") or not owner]
        if len(inside) > (0 if owner else 1):  # it may be used before its children
            return order.index(inside[0])
        while owner and owner not in order:
            owner = owner.rpartition(".")[0]
        return order.index(owner) if owner in order else -1

    def last_module(self) -> str:
        """The module whose output is the model's: what the loss gets."""
        return "" if "" in self.first.full_output_grads else self.first.order[-1]

    def share_of(self, name: str) -> str:
        """How much of a gradient is wrong, on which ranks."""
        scale = self.grad_scale(name)
        shares = []
        for rank in self.holders(name):
            grad = self.everyone[rank].grads.get(name)
            expected = self.expected_grad(rank, name)
            if grad is None or grad.shape != expected.shape or not grad.numel():
                return "this gradient cannot be compared element by element"
            off = (grad - expected).abs() > self.allowed * scale
            shares.append(f"{off.double().mean().item():.0%}")
        return f"wrong elements by rank: {' '.join(shares)}"

    def first_wrong_flow(self, wrong: list[str]) -> tuple[str, str] | None:
        """In backward order, the first module whose output's gradient is wrong.

        It may be partial on purpose, if a later sum repairs it: then the module's own
        parameters have right gradients.
        """
        for name in reversed(self.first.order):
            expected = self.first.full_output_grads.get(name)
            grads = [facts.output_grads.get(name) for facts in self.everyone]
            if expected is None or any(x is None for x in grads):
                continue
            how = self.relation(grads, expected)
            if how == "partial" and self.has_right_gradients(name, wrong):
                continue
            if not is_right(how) and how not in NOT_COMPARED:
                return name, how
        return None

    def has_right_gradients(self, module: str, wrong: list[str]) -> bool:
        """Has a module parameters of its own, and all their gradients are right?"""
        own = [name for name in self.owners if self.owner(name) == module]
        own = [name for name in own if self.is_piece.get(name)]
        return bool(own) and not any(name in wrong for name in own)

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
        for name in self.first.recomputed:
            text = "its mask in backward is another than in forward"
            self.add("dropout recomputed", name, text, name)
        losses = {facts.train_loss for facts in self.everyone}
        first = self.first.train_loss
        apart = max(abs(x - first) for x in losses)
        if apart > self.allowed * max(abs(first), 1e-300):
            if not any(f.category.startswith("dropout") for f in self.findings):
                text = "in train mode the loss differs between ranks, in eval mode not"
                self.add("dropout loss", "loss", text)

    def check_steps(self) -> None:
        """After each step: parameters against the full model's, replicas, norms."""
        for name in self.first.not_in_optimizer:
            text = "the optimizer does not have this parameter"
            self.add("not in the optimizer", name, text, self.owner(name))
        for step, full_after in enumerate(self.first.full_after):
            self.check_loss(step)
            self.check_norm(step)
            if any(not f.category.startswith("dropout") for f in self.findings):
                return  # the update must be wrong as well
            vector = self.full.vector(full_after)
            wrong = []
            for name in self.owners:
                if not self.is_piece[name]:
                    continue
                for rank in self.holders(name):
                    facts = self.everyone[rank]
                    index = self.index[rank][name]
                    expected = vector[index.clamp(min=0)]
                    expected = torch.where(index == PADDING, 0.0 * expected, expected)
                    scale = 1.0
                    if expected.numel():
                        scale = max(expected.abs().max().item(), 1e-300)
                    if not self.near(facts.after[step][name], expected, 10 * scale):
                        wrong.append(name)
                        break
            for name in wrong:
                text = f"after step {step + 1} it differs from the full model's"
                category = "update" + self.drift_of(name, step)
                self.add(category, name, text, self.owner(name))
            if wrong:
                return

    def drift_of(self, name: str, step: int) -> str:
        """Do the replicas of a parameter differ after a step, or was it not updated?"""
        ranks = self.holders(name)
        held = [self.everyone[rank].after[step][name] for rank in ranks]
        before = [self.everyone[rank].parts[name] for rank in ranks]
        still = [r for r, x, old in zip(ranks, held, before) if torch.equal(x, old)]
        if still and len(still) < len(ranks):
            return f" missing on ranks {still}"
        for ranks in self.replica_sets(name):
            for rank in ranks:
                if not torch.equal(held[rank], held[ranks[0]]):
                    return " differs between replicas"
        return ""

    def check_loss(self, step: int) -> None:
        """After a right update the loss must be right, too."""
        full_loss = self.first.step_losses[step][0]
        losses = [facts.step_losses[step][1] for facts in self.everyone]
        limit = 10 * self.allowed * max(abs(full_loss), 1e-300)
        if step > 0 and any(not abs(x - full_loss) <= limit for x in losses):
            text = f"step {step + 1}: {numbers(losses)} on ranks 0, 1, …, not "
            text += f"{full_loss:.6g}; before, losses and updates are right"
            self.add("stale", "loss", text)

    def check_norm(self, step: int) -> None:
        """The norm that the user's own clipping returns."""
        full_norm = self.first.norms[step][0]
        norms = [facts.norms[step][1] for facts in self.everyone]
        if any(norm is None for norm in norms):
            return
        if any(f.category.startswith("gradient") for f in self.findings):
            return
        if any(abs(x - full_norm) > self.allowed * full_norm for x in norms):
            same = max(norms) - min(norms) <= self.allowed * full_norm
            how = "the same on all ranks" if same else "different on the ranks"
            text = f"step {step + 1}: {numbers(norms)} on ranks 0, 1, …, not "
            text += f"{full_norm:.6g}; {how}"
            self.add("norm", "clip()", text)


NOT_COMPARED = ("of another shape", "in another order")


def is_right(how: str) -> bool:
    """Is a tensor with this relation to the full one right?"""
    return how == "same" or (how.startswith("Shard(") and how.endswith(")"))


def sorted_of(x: Tensor) -> Tensor:
    return x.flatten().sort().values


def same_shape(x: Tensor, piece: Tensor) -> bool:
    """Has a tensor its piece's shape, or more in one dim (padding)?"""
    larger = 0
    for own, expected in zip(x.shape, piece.shape):
        if own < expected:
            return False
        larger += 1 if own > expected else 0
    return larger <= 1


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
    found = []
    for rank in range(ranks):
        first = min(rank // copies * width, size)
        found.append(full.narrow(dim, first, min(width, size - first)))
    return found


def multiple_of(tensors: list[Tensor], pieces: list[Tensor]) -> float:
    """The k for which the tensors are closest to k times their pieces."""
    over = 0.0
    under = 0.0
    for x, piece in zip(tensors, pieces):
        over += (trimmed(x, piece).double() * piece.double()).sum().item()
        under += (piece.double() * piece.double()).sum().item()
    return over / under if under else 0.0


def numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


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
        "unmatched": audit.unmatched,
        "modules": audit.module_names,
        "allowed": audit.allowed,
        "findings": [vars(finding) for finding in audit.findings],
    }
