"""Looks for faults in the order of causes, and says what follows from what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import subjects
from .case import Case
from .compare import NOT_COMPARED, Held, Kind, Relation, is_right, is_wrong
from .faults import FAULTS, Fault
from .record import Facts, Point, is_within
from .subjects import Flow, Subject


@dataclass
class Finding:
    """A fault of one subject."""

    fault: Fault
    subject: Subject
    where: str
    seen: str
    follows: bool = False  # from an earlier finding

    @property
    def category(self) -> str:
        return self.subject.category(self.fault.key)

    def as_dict(self) -> dict:
        names = ", ".join(name for name, _ in self.subject.returned)
        change = self.fault.change.replace("{modules}", names)
        if not names and self.fault.change_alone:
            change = self.fault.change_alone
        return {
            "category": self.category, "where": self.where, "text": self.seen,
            "module": self.subject.module, "what": self.fault.what, "change": change,
            "explained": self.fault.where, "follows": self.follows,
        }  # fmt: skip


IN_LOSS = (Kind.PARTIAL, *NOT_COMPARED)  # outputs of which a right loss can be made
VISIBLE = 1e-6  # relative differences that RIGHT rules out, if nothing else is said
FOLLOWING = (*subjects.VAGUE, Kind.FACTOR, Kind.FACTORS, Kind.USES, Kind.SUM)
DROPOUT = (subjects.Dropped, subjects.Recomputed, subjects.TrainLoss)
HELD = (subjects.Parameter, subjects.Missing, subjects.Buffer)
TRAINED = (subjects.TrainMode, subjects.TrainBuffer)
IN_TRAIN_MODE = (*DROPOUT, *TRAINED)  # the steps are in eval mode


def is_consequence(found: Finding, earlier: list[Finding]) -> bool:
    """Does a fault follow from an earlier one?"""
    subject = found.subject
    # Parameters and buffers that are wrong themselves, as is known for sure.
    sure = [f for f in earlier if isinstance(f.subject, HELD)]
    if any(other.where == found.where for other in sure):
        return True
    if isinstance(subject, subjects.Update) and subject.is_frozen:
        # An average of weights that are wrong themselves.
        others = [f.subject for f in earlier if f.fault.of is subjects.Update]
        if not all(other.is_frozen for other in others):
            return True
    for other in earlier:  # one cause, in one module
        is_same = other.category == found.category and not other.follows
        if is_same and other.subject.module == subject.module:
            return False
    if isinstance(subject, subjects.Output):
        return any(is_within(f.subject.module, subject.module) for f in sure)
    if isinstance(subject, subjects.Gradient):
        return is_fed_wrong(subject, earlier)
    causes = ()
    if isinstance(subject, subjects.TrainMode):
        causes = (subjects.TrainBuffer,)
    elif isinstance(subject, subjects.TrainLoss) and not subject.not_dropped():
        causes = TRAINED
    elif isinstance(subject, (subjects.Step, subjects.Update)):
        causes = TRAINED  # what train mode has changed may be used in the steps
    return any(f.fault.of in causes for f in earlier)


def is_fed_wrong(subject: subjects.Gradient, earlier: list[Finding]) -> bool:
    """Does a wrong gradient of a tensor, which an earlier finding explains, reach this
    parameter in backward?"""
    if subject.is_fed_right or subject.is_apart:
        return False
    causes = []
    for other in earlier:
        own = other.subject
        if isinstance(own, subjects.Gradient) and not own.is_of_backward():
            continue  # what is done after backward changes no other gradient
        # Of a wrong gradient of a tensor, the fault is in the module after it.
        after = other.where.removeprefix("the forward of ")
        place = after if isinstance(own, Flow) else own.module
        if not subject.is_shielded_from(place):
            causes.append(other)
    if any(f.subject.returned for f in causes) or (causes and subject.follows()):
        return True
    is_cause = any(isinstance(f.subject, (Flow, subjects.Gradient)) for f in causes)
    return is_cause and subject.kind in FOLLOWING


class Search:
    """Finds faults, in the order of causes."""

    def __init__(self, case: Case, is_wide: bool = False):
        self.case = case
        self.is_wide = is_wide  # large rounding errors are allowed
        self.findings = []
        self.gradients = {}  # parameter → relation of its gradient
        self.not_compared = []
        self.noisy = []  # parameters that rounding errors alone have updated

    def look(self, subject: Subject) -> bool:
        """Add the first fault that this subject has. Has it one?"""
        for fault in FAULTS:
            seen = fault.of is type(subject) and fault.test(subject)
            if not seen:
                continue
            where, seen = seen if isinstance(seen, tuple) else (subject.where, seen)
            texts = [subject.seen, seen if isinstance(seen, str) else ""]
            texts = list(dict.fromkeys(filter(None, texts)))
            found = Finding(fault, subject, where, "; ".join(texts))
            found.follows = is_consequence(found, self.findings)
            self.findings.append(found)
            return True
        return False

    def run(self) -> None:
        case = self.case
        self.look(subjects.Start(case))
        is_right = case.are_near([trace.loss for trace in case.own], case.full.loss)
        if is_right and case.first.is_forward_only:
            self.check_missing()
            self.look(subjects.OtherBatch(case))
        elif is_right:
            self.check_missing()
            self.check_gradients()
            if not self.findings:
                self.check_accumulation()
            if not self.findings:
                self.check_train_mode()
            self.check_dropout()
            self.check_steps()
        else:
            self.check_parameters()
            self.check_forward()
        self.list_not_compared(is_right)

    def missing(self) -> list[subjects.Missing]:
        """Parameters of the full model that are not all on the ranks."""
        found = [subjects.Missing(self.case, name) for name in self.case.model.names]
        return [subject for subject in found if subject.share]

    def check_missing(self) -> None:
        """Elements that no batch uses may be on no rank, and the loss is right. A
        parameter of which no rank has anything may be left out on purpose."""
        for subject in self.missing():
            if subject.share < 1 and not self.look(subject):
                if subject.where in self.case.parameters:  # another rank's piece
                    self.look(subjects.Parameter(self.case, subject.where))

    def check_parameters(self) -> None:
        case = self.case
        looked = [subjects.Parameter(case, name) for name in case.parameters]
        looked += self.missing()
        looked += [subjects.Buffer(case, name) for name in case.full.buffers]
        for subject in looked:
            self.look(subject)
        self.findings.sort(key=lambda found: FAULTS.index(found.fault))

    def check_forward(self, is_loss_wrong: bool = True) -> bool:
        """Find the first tensor that is wrong. Is there one?"""
        case = self.case
        notes = ["the loss is right, as far as its precision shows"]
        if is_loss_wrong:
            losses = [trace.loss for trace in case.own]
            got = max(losses, key=lambda x: (x != x, abs(x - case.full.loss)))
            digits = 6 if f"{got:.6g}" != f"{case.full.loss:.6g}" else 12
            notes = [f"the loss is {got:.{digits}g}, not {case.full.loss:.{digits}g}"]
        related = [(point, case.relation_of(point)) for point in case.order]
        for point, relation in related:
            if relation is not None and relation.kind is Kind.NAN:
                return self.look(subjects.Output(case, point, notes))
        reordered = []
        others = []
        for point, relation in related:
            if relation is None or relation.is_right:
                continue
            is_used = case.first.is_forward_only or case.full.flow(point) is not None
            if not point.module and (point.is_input or not is_used):
                continue  # of the batch, or nothing that the loss uses
            if relation.kind is Kind.SHAPE:
                others.append(point)
            elif relation.kind is Kind.REORDERED:
                reordered.append(point)
            elif relation.kind is Kind.PARTIAL:
                if not point.is_input and subjects.is_never_summed(case, point):
                    break
            elif not self.is_healed(point):
                break
        else:
            point = None
        reordered = [p for p in reordered if not self.is_healed(p)]
        if point is None and not reordered:
            if is_loss_wrong:
                notes += self.said_of(others, point) + self.said_of_unknown()
                self.look(subjects.Loss(case, notes))
            return is_loss_wrong
        if point is None or any(self.is_added(other, point) for other in reordered):
            point = reordered[0]
        else:
            notes += self.said_of(reordered[:1], point)
        notes += self.said_of(others, point)
        self.look(subjects.Output(case, point, notes))
        return True

    def is_added(self, other: Point, point: Point) -> bool:
        """Is a tensor made of another one and of right ones, all of the same size?"""
        case = self.case
        name = case.full.point
        parts = {p for p, made in case.full.made_of.items() if name(point) in made}
        parts -= {name(point)}
        right = {name(p) for p in case.order if is_right(case.relation_of(p))}
        sizes = {case.full.value(p).numel() for p in (point, *parts)}
        is_sum = name(other) in parts and len(sizes) == 1 < len(parts)
        return is_sum and parts - {name(other)} <= right

    def said_of(self, points: list[Point], wrong: Point | None) -> list[str]:
        """That tensors before the wrong one are in another layout, so that they cannot
        be judged, and how the wrong module's own parameter is cut."""
        case = self.case
        texts = []
        reads = ": is it read in this order?"
        for name, piece in case.pieces[0].items():
            if wrong is not None and case.owner(name) == wrong.module and piece.pieces:
                reads = f", and {name} is {piece.words}: do they agree?"
        for point in points[:2]:
            text = f"{point} before it is {case.relation_of(point)}"
            for name, piece in case.pieces[0].items():
                is_other = piece.held in (Held.BLOCKS, Held.PERMUTED)
                if is_other and case.owner(name) == point.module:
                    text += f" ({name} is {piece.words}{reads})"
                    break
            texts.append(text)
        return texts

    def said_of_unknown(self) -> list[str]:
        """Modules whose outputs could not be compared, the outermost ones."""
        case = self.case
        found = []
        for name in reversed(case.modules(case.full)):
            points = case.full.outputs(Point(name))
            is_unknown = all(case.relation_of(point) is None for point in points)
            is_inner = any(is_within(name, other) for other in found)
            if name and is_unknown and not is_inner:
                found.append(name)
        words = "not compared, because not all ranks have them: the outputs of "
        return [words + some(found[::-1], 4)] if found else []

    def is_healed(self, point: Point) -> bool:
        """Is a call right inside of which this tensor is, or does its reader get what
        is one tensor with it in the full model (after a sum)? Or is all right that the
        full model makes of it (rows of other ranks' tokens are masked)?"""
        case = self.case
        full = case.full.point(point)
        after = case.order[case.order.index(point) + 1 :]
        others = [other for other in after if case.full.point(other) == full]
        is_later = any(is_right(case.relation_of(other)) for other in others)
        if is_later and not point.is_input:  # which its reader has already read
            return True
        if any(case.is_right_call(other) for other in case.around(point)):
            return True
        made = case.full.made_of.get(full, set()) - {full}
        return bool(made) and all(is_right(case.relation_of(other)) for other in made)

    def gradients_of(self, what: str) -> dict[str, Relation]:
        """Parameters that can be compared, and how their gradients are related."""
        return {name: self.case.gradient(name, what) for name in self.case.matched}

    def check_gradients(self) -> None:
        """Gradients of parameters, those closest to the loss first."""
        case = self.case
        self.gradients = self.gradients_of("grads")
        wrong = [name for name, how in self.gradients.items() if not how.is_right]
        wrong.sort(key=lambda name: -case.begins(name))
        if not wrong:
            return
        if self.is_wide:  # a little more than rounding errors has no simple relation
            kinds = {name: self.gradients[name].kind for name in wrong}
            clear = [name for name in wrong if kinds[name] is not Kind.UNEXPLAINED]
            wrong = clear or wrong
        if any(self.look(subjects.TwoPasses(case, name)) for name in wrong):
            return  # what else is wrong is another thing in each run
        flow = self.first_wrong_flow(wrong)
        if flow is not None:
            is_in_forward = flow.is_of_loss() and self.check_forward(False)
            is_cause = flow.is_behind(wrong[0]) or flow.cut_off()
            if is_cause and not is_in_forward:
                self.look(flow)
        for name in wrong:
            self.look(subjects.Gradient(case, name, flow))

    def first_wrong_flow(self, wrong: list[str]) -> Flow | None:
        """In backward order, the first tensor of a module whose gradient is wrong.

        It may be partial on purpose, if a later sum repairs it: then the module's own
        parameters have right gradients.
        """
        case = self.case
        loss = case.relation_of(Point(""), "flow")
        is_factor = loss is not None and loss.kind is Kind.FACTOR
        found = [g.factor for g in self.gradients.values() if g.kind is not Kind.FROZEN]
        # If not all gradients have the loss's factor, ranks average them later.
        is_later = is_factor and any(abs(k - loss.factor) > 1e-6 for k in found)
        for point in reversed(case.full.order):
            relation = case.relation_of(point, "flow")
            if point.is_input or not is_wrong(relation):
                continue
            if not point.module and case.full.point(point) not in case.ends():
                continue  # the model returns it and makes more of it
            if is_later and abs(relation.factor - loss.factor) < 1e-6:
                continue
            if relation.kind is Kind.PARTIAL:
                own = [n for n in self.gradients if case.owner(n) == point.module]
                if own and not any(name in wrong for name in own):
                    continue
            return Flow(case, point, wrong)
        return None

    def check_accumulation(self) -> None:
        """Gradients of two batches together, if those of one are right."""
        if self.look(subjects.OtherBatch(self.case)):
            return
        for name, how in self.gradients_of("summed").items():
            if not how.is_right:
                self.look(subjects.Accumulated(self.case, name))

    def check_train_mode(self) -> None:
        """Loss and gradients in train mode, where nothing is dropped."""
        case = self.case
        if any(trace.other_random for trace in (case.full, *case.own)):
            self.not_compared.append("gradients in train mode")
            return
        for name in case.full.changed:
            if name in case.full.buffers or self.is_running(name):
                self.look(subjects.TrainBuffer(case, name))
        losses = [trace.kept_loss for trace in case.own]
        said = case.unlike(losses, case.full.kept_loss)
        if said:
            self.look(subjects.TrainMode(case, "loss", seen=said))
            return
        if self.findings:
            return  # a wrong buffer is the cause
        found = self.gradients_of("kept")
        for name in sorted(found, key=case.begins, reverse=True):
            if not found[name].is_right:
                said = f"gradient {found[name]}"
                self.look(subjects.TrainMode(case, name, seen=said))

    def is_running(self, name: str) -> bool:
        """Is an attribute changed by each pass of the full model, and the same on all
        ranks? Otherwise it is what the last pass had, or a time."""
        full = self.case.full
        masks = [mask for found in full.drop_masks.values() for mask in found]
        others = [facts.full.changed.get(name) for facts in self.case.everyone]
        is_same = all(x is not None and torch.equal(x, others[0]) for x in others)
        return is_same and name in full.running and not subjects.drops(masks)

    def check_dropout(self) -> None:
        """Replicated tensors drop the same elements on all ranks, shards do not."""
        case = self.case
        for name in dict.fromkeys([*case.full.drop_masks, *case.own[0].drop_masks]):
            masks = [trace.drop_masks.get(name, []) for trace in case.own]
            inputs = [trace.drop_inputs.get(name, []) for trace in case.own]
            full = case.full.drop_inputs.get(name, [])
            expected = case.full.drop_masks.get(name, [])
            if not any(map(subjects.drops, (*masks, expected))):
                continue  # no dropout here
            if any(len(found) != len(full) for found in (*masks, *inputs)):
                self.not_compared.append(f"dropout in the forward of {name}")
                continue
            for number, right in enumerate(full):
                held = [found[number] for found in inputs]
                drops = [own[number] for own in masks]
                if self.look_at_masks(name, right, held, drops):
                    break
        for name in case.own[0].recomputed:
            said = "its mask in backward is another than in forward"
            self.look(subjects.Recomputed(case, name, name, said))
        if not any(f.fault.of in DROPOUT for f in self.findings):
            self.look(subjects.TrainLoss(case))

    def look_at_masks(self, name: str, right: Tensor, held: list, masks: list) -> bool:
        """One call of a dropout. Is it enough to know of this one?"""
        relation = self.case.compare(held, right)
        if not relation.is_right:
            self.not_compared.append(f"dropout in the forward of {name}")
            return True
        is_equal = all(x.shape == held[0].shape and (x == held[0]).all() for x in held)
        if relation.kind is Kind.SHARD and is_equal:
            return False  # all shards are the same, so equal masks may be right
        if relation.kind is Kind.SHARD and subjects.are_equal_by_chance(masks):
            self.not_compared.append(f"dropout of few elements in {name}")
            return True
        return self.look(subjects.Dropped(self.case, name, relation, masks))

    def check_steps(self) -> None:
        """Step by step: the loss, the norm, clipped gradients, updated parameters."""
        case = self.case
        for name in case.first.not_in_optimizer:
            self.look(subjects.Optimizer(case, name))
        for number in range(len(case.full.steps)):
            if any(f.fault.of not in IN_TRAIN_MODE for f in self.findings):
                return  # the update must be wrong as well
            if not self.look(subjects.Step(case, number)):
                for name in sorted(case.parameters, key=case.is_frozen):
                    update = subjects.Update(case, name, number)
                    if name in case.matched or update.are_apart():
                        self.look(update)
                    if update.is_noise and name not in self.noisy:
                        self.noisy.append(name)
        if not self.findings:
            self.check_state()

    def check_state(self) -> None:
        """What the optimizer keeps: it may be used later, or for evaluation. And the
        buffers, which its hooks may change."""
        case = self.case
        is_known = not (self.noisy or case.own[0].other_random)
        for name in case.full.stepped if is_known else ():
            if is_right(case.relation_of_state("buffers", name)):
                self.look(subjects.TrainBuffer(case, name, "stepped"))
        for key in case.full.kept_state:
            for name in case.matched:
                if name not in self.noisy:
                    self.look(subjects.State(case, name, key))

    def list_not_compared(self, is_right: bool) -> None:
        """What RIGHT is not said of."""
        case = self.case
        found = self.not_compared
        add = self.add_names
        if case.first.is_forward_only:
            found.append("gradients: nothing to compare, only forward was run")
        add("parameters that are not the full model's", case.unmatched)
        if not is_right or self.findings:
            return
        differ = case.calls_differ()
        add("outputs of modules that are called another number of times", differ)
        missing = [s.where for s in self.missing() if s.where not in case.unmatched]
        add("parameters that no rank has", missing)
        unused = [] if case.first.is_forward_only else case.unused()
        add("parameters that no batch uses, so that their gradients are zero", unused)
        found += self.unused_outputs()
        add("tensors of lists that each rank numbers from 0", case.renumbered)
        if case.ruler.allowed > VISIBLE:
            found.append(
                f"differences below {case.ruler.allowed:.1g} of the largest element "
                "(the full model's rounding errors)"
            )
        buffers, attributes = self.other_states()
        add("buffers", buffers)
        add("what modules keep as attributes", attributes)
        if case.own[0].other_random:
            names = [name or "the model" for name in sorted(case.own[0].other_random)]
            found.append(f"random numbers in the forward of {some(names)}")
        for name, ranks in case.unused_copies.items():
            found.append(f"{name} on ranks {sorted(ranks)}, which do not use it")
        if 1e4 * case.ruler.allowed >= 1:
            found.append("updates that are small next to the parameters")
        add("updates by rounding errors alone", self.noisy)
        kept = [f"`{key}`" for key in case.own[0].other_state]
        add("tensors of other shapes that the optimizer keeps", kept)
        if case.first.is_forward_only:
            return
        if "clip" not in case.first.has:
            found.append("your clipping (the file has no clip)")
        elif not case.first.is_clipped:
            found.append("your clipping (no norm was above --clip, so nothing changed)")

    def unused_outputs(self) -> list[str]:
        """Outputs of the model that are not right, if the loss does not use them."""
        case = self.case
        found = []
        for point in case.full.outputs(Point("")):
            how = case.relation_of(point)
            is_used = case.own[0].flow(point) is not None
            is_known = is_right(how) or (is_used and how and how.kind in IN_LOSS)
            if not is_known:
                words = how or "not on all ranks"
                found.append(f"{point}, where the loss does not use it: {words}")
        return found

    def add_names(self, words: str, names: list[str]) -> None:
        """Add what these names have in common to what was not compared."""
        if names:
            self.not_compared.append(f"{words}: {some(names)}")

    def other_states(self) -> tuple[list[str], list[str]]:
        """Buffers that are not the full model's, at first or after train mode. And
        other attributes of modules, if training changes those of the full model."""
        case = self.case
        own = case.own[0]
        buffers = set()
        attributes = set()
        for what in ("buffers", "changed", "stepped"):
            for name in getattr(own, what):
                is_changed = what != "buffers" and name in getattr(case.full, what)
                is_known = not (is_changed and own.other_random)
                if is_known and is_right(case.relation_of_state(what, name)):
                    continue
                if name in own.buffers:
                    buffers.add(name)
                elif name in case.full.changed:
                    attributes.add(name)
        return sorted(buffers), sorted(attributes)


def some(names: list[str], most: int = 16) -> str:
    """The first names of a list; --json has all."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def findings_of(everyone: list[Facts], dtype: str) -> dict:
    """What the command prints, as data."""
    case = Case(everyone, dtype)
    search = Search(case)
    search.run()
    is_rounding = False
    if search.findings and 3 * case.first.rounding > case.ruler.allowed:
        # Only what is larger than the errors of the full model's formats is a fault.
        larger = Search(case.with_allowed(3 * case.first.rounding), is_wide=True)
        larger.run()
        is_rounding = not larger.findings
        search = search if is_rounding else larger
    rows = [case.row(n, search.gradients.get(n)) for n in case.parameters]
    return {
        "ranks": case.ranks,
        "loss": case.own[0].loss,
        "full_loss": case.full.loss,
        "parameters": rows + case.buffer_rows(),
        "calls": case.first.calls,
        "modules": case.names,
        "allowed": case.ruler.allowed,
        "is_split": case.is_split(),
        "warnings": case.first.warnings,
        "not_compared": search.not_compared,
        "is_rounding": is_rounding,
        "findings": [finding.as_dict() for finding in search.findings],
    }
