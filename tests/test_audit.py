"""tools/audit.py: finds and names the lessons' bugs, and has no false alarm."""

import copy
import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import jobs
import nursery
import psutil
import pytest
import torch
from audit import command, faults, findings, from_full, rank, subjects
from audit.case import Case
from audit.compare import FullModel, Kind, Relation, Ruler, piece_of, wrong_share
from audit.record import (
    Dropouts,
    Facts,
    Point,
    Step,
    Trace,
    add_hooks,
    drop_rate,
    outputs_of,
)
from torch import nn

# Three jobs try 180 models, a third each.
DRIVERS = [("drive_audit.py", 2, part) for part in ("0", "1", "2")]
pytestmark = [pytest.mark.launches(*driver) for driver in DRIVERS]
pytestmark.append(pytest.mark.timeout(1800))

START = multiprocessing.get_context("forkserver")


class Forked:
    """In place of subprocess.Popen: a rank forked from a process that has torch."""

    def __init__(self, command, env, stdout, stderr):
        START.set_forkserver_preload(nursery.PRELOAD)
        arguments = command[1], env, stdout.name
        self.process = START.Process(target=nursery.rank_of_the_audit, args=arguments)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.join()


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks of the command need not import torch. Signals are tried on others."""
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=Forked))


@pytest.fixture(scope="module")
def ranks():
    """What each rank found, in all three jobs."""
    found = [{}, {}]
    for driver in DRIVERS:
        for whole, part in zip(found, jobs.result(*driver)):
            for key, value in part.items():
                whole[key] = whole[key] + value if key in whole else value
    return found


def test_every_rank_has_the_same_findings(ranks):
    assert all(rank == ranks[0] for rank in ranks)


def test_bugs_are_found_and_named(ranks):
    """Every bug is found, and its first category is what the lesson says it is."""
    bugs = ranks[0]["bugs"]
    assert len(bugs) >= 31
    assert [bug["bug"] for bug in bugs if not bug["categories"]] == []
    assert [bug for bug in bugs if not is_named(bug)] == []


def is_named(bug: dict) -> bool:
    """Is the first category the expected one, or this and more words (a factor)?

    Of some bugs the place is known as well: a parameter or a module.
    """
    category, place = bug["categories"][0]
    expected = bug["expected"]
    if not isinstance(expected, str):
        if place != expected[1]:
            return False
        expected = expected[0]
    return f"{category} ".startswith(f"{expected} ")


def test_bugs_of_other_models_are_found_and_named(ranks):
    """Models that are not the course's: each bug's first category is its cause."""
    bugs = ranks[0]["models"]
    assert len(bugs) >= 98
    for bug in bugs:
        assert bug["categories"] and is_named(bug), bug


def test_the_norms_of_all_ranks_are_said_of_the_first_step(ranks):
    """Rank 0's norm is right, so step 1 is wrong on rank 1 alone."""
    (bug,) = [bug for bug in ranks[0]["models"] if bug["bug"] == "norm on rank 0"]
    said = re.match(
        r"step 1: (\S+), (\S+) on ranks 0, 1, …, not (\S+); ", bug["texts"][0]
    )
    assert said and said[1] == said[3] != said[2]


def of_models(ranks, bug: str) -> dict:
    (found,) = [each for each in ranks[0]["models"] if each["bug"] == bug]
    return found


def test_a_text_says_where_it_was_seen(ranks):
    """Rows of a gradient, the call of a module, and who returns a wrong gradient."""
    assert "in rows [3, 4] of 16 on rank 0" in of_models(ranks, "rows")["texts"][0]
    between = of_models(ranks, "scaled")["texts"][0]
    assert "so the fault is in what the forward of 0 does in between" in between
    router = of_models(ranks, "router")["texts"][0]
    assert "returned wrong by the forward of 1 (partial)" in router
    assert "call 2" in of_models(ranks, "second call")["texts"][0]
    assert "sum over the wrong group" in of_models(ranks, "pieces added")["changes"][0]
    assert "0 before it is of shape [18, 16]" in of_models(ranks, "flat")["texts"][0]
    rounded = of_models(ranks, "float32")["texts"][0]
    assert re.search(r"by \de-0[789] of the largest", rounded)
    said = of_models(ranks, "reduced again")["texts"][0]
    assert re.match(r"after two backward passes off by 0\.\d+", said)
    stacks = [b for b in ranks[0]["models"] if b["model"] == "stack_subject"]
    assert "returned wrong by 1.pair.up (partial)" in stacks[0]["texts"][0]


def test_what_follows_has_no_advice_of_its_own(ranks):
    """A wrong gradient that arrives makes all gradients behind it wrong, and a module's
    wrong parameter its output."""
    bugs = [b for b in ranks[0]["models"] if b["model"] == "pairs_subject"]
    assert bugs[0]["own"] == ["backward partial"]
    assert len(bugs[0]["categories"]) > 4
    stacked = of_models(ranks, "stacked")
    assert stacked["own"] == ["gradient differs between replicas"]
    assert ["gradient unexplained", "up"] in stacked["categories"]
    headed = [b for b in ranks[0]["models"] if b["model"] == "headed_subject"]
    assert set(headed[0]["own"]) == {"gradient sum"}
    assert len(headed[0]["categories"]) > 4
    wrong_piece = of_models(ranks, "broadcast")
    assert wrong_piece["own"] == ["wrong piece"]
    assert ["forward wrong", "attn"] in wrong_piece["categories"]
    # The buffer makes the output of its module wrong.
    assert of_models(ranks, "turns")["own"] == ["buffer"]
    # An average of wrong weights is wrong.
    assert of_models(ranks, "rate of shards")["own"] == ["update"]
    # The norm reads no fault of its own: the place is inside of what it reads.
    inner = of_subject(ranks, "inner_subject")
    assert inner["own"] == ["gradient differs between replicas"]
    assert len(inner["categories"]) > 4


def test_advice_names_modules_or_none(ranks):
    """Advice about modules names some, and DDP is blamed only if there is one."""
    for bug in ranks[0]["models"]:
        for change in bug["changes"]:
            assert not re.search(r"\{modules|read by \.|backward of :", change), bug
    stacks = [b for b in ranks[0]["models"] if b["model"] == "stack_subject"]
    assert stacks[0]["changes"][0].endswith("is read by 1.pair.up.")
    columns = of_models(ranks, "pieces summed")
    assert "DistributedDataParallel" not in columns["changes"][0]


SAID = [  # a bug, and what its first finding says of the cause
    ("behind f", "what the forward of 2 returns to it counts once, not T times"),
    ("added before", "if the output of 0 counts once, not T times"),
    ("left out", "if the output of 0 counts once, not 0 times"),
    ("f in bfloat16", "right but for rounding to bfloat16"),
    ("local index", "in rows [2] of 15 on rank 1"),
    ("full groups", "GroupNorm on sharded channels: num_groups / T groups"),
    ("rows of a head", "wrong elements by rank: 50% 50%"),
    ("scaled too much", "it contains 0.5 times the output of 0 too much"),
    ("no mask", "it is wrong at [0, 1, 2, 3, 4] of 6 along dim 1 only"),
    ("window", "it is wrong at [3, 4, 5] of 6 along dim 1 only"),
    ("own mean, kept", "after one pass: differs between ranks"),
    ("own mean", "after one pass: differs between ranks"),
    ("own mean", "what the buffer is updated with"),
    ("sent after a step", "after step 1, wrong on ranks [1] only"),
    ("second loss summed", "output second of the model is the first wrong tensor"),
    ("f twice", "1.up is sharded, so f is applied twice in front of it"),
    ("residual averaged", "the residual in 1 returns to it counts once, not 1/T times"),
    ("residual detached", "the residual in 1 returns to it counts once, not 0 times"),
    ("summed", "the fault is in what the forward of the model does with it"),
    ("unmasked", "gives 0 for tokens of other ranks before the sum (a mask)"),
    ("row detached", "is a part of it detached?"),
    ("one rank skips a step", "all-reduce the flag (an overflow, a nan)"),
    ("one rank skips", "its place in the optimizer's groups"),
    ("packed", "output x of layers.0 is the first wrong tensor"),
    ("added twice", "if the output of 0 counts once, not T times"),
    ("read", "its mask (is_causal), its scale"),
    ("shared expert", "if the output of 1.shared counts once, not T times"),
    ("row of all", "sum the rows that several ranks have"),
    ("stacked", "Look at what reads this parameter or its module's output"),
    ("norm of partial sums", "input 0 of 1.norm is partial"),
    ("f in front of all", "what every reader returns to it counts once, not T times"),
    ("second loss detached", "what output 1 of 1 returns to it counts once, not 0"),
    ("weights detached", "what all of 1 but its output 1 returns to it counts once"),
    ("gate without f", "returned wrong by layer.gate (partial)"),
    ("gate without f", "in backward (f) where this output is read by layer.gate."),
    ("scale in full", "1.weight is Shard(1), and it is replicated"),
    ("conv as one", "and conv.weight is Shard(0): do they agree?"),
    ("own columns", "a mean or an entropy over the vocabulary"),
    ("no targets", "the loss is nan, not "),
    ("empty mask", "divides 0 by 0"),
    ("empty backward", "nan on ranks [1]"),
    ("added before", "split what has stayed in full"),
    ("summed twice", "if the output of 1.down counts once, not T times"),
    ("bias left out", "that of 1.norm.weight is right"),
    ("bias left out", "would sum the other one's twice"),
    ("own tokens", "after one pass: partial"),
    ("rank 0 only", "after one pass: partial"),
    ("settled", "after all steps: right on ranks [0] only"),
    ("k_norm", "rank 0 has rows 0 to 7 of it, and rows 0 to 15 of 1.k_proj.weight"),
    ("local index", "padding_idx − t · rows of the shard"),
    ("not tracked", "log of a softmax's sum"),
    ("leaky", "counts and scales"),
    ("broadcast", "also of scales and zero points"),
]


@pytest.mark.parametrize("bug, words", SAID)
def test_what_is_said_of_a_cause(ranks, bug, words):
    found = of_models(ranks, bug)
    assert words in f"{found['texts'][0]} {found['changes'][0]}"


def of_subject(ranks, model: str) -> dict:
    """The first bug of a model."""
    return next(each for each in ranks[0]["models"] if each["model"] == model)


def test_a_layout_of_the_ranks_own(ranks):
    """[S, B, D] and [B · S, D] are compared. If the rows are shuffled, the gradient in
    front of the blocks says nothing of what is in them."""
    for model in ("layout_subject", "flat_subject"):
        assert of_subject(ranks, model)["changes"][0].endswith("is read by b.up.")
    shuffled = of_subject(ranks, "shuffled_subject")
    assert "returned wrong" not in shuffled["texts"][0]
    assert "is read by" not in shuffled["changes"][0]
    assert set(shuffled["own"]) == {"gradient sum"}


def test_two_faults_have_an_advice_each(ranks):
    found = of_subject(ranks, "branches_subject")
    assert found["own"] == 4 * ["gradient sum"]
    read = [change.rpartition(" ")[2] for change in found["changes"]]
    assert read == ["b.up.", "b.up.", "a.up.", "a.up."]
    findings = [
        {"category": category, "change": change}
        for category, change in zip(found["own"], found["changes"])
    ]
    assert len(command.groups_of(findings)) == 1
    assert len(command.groups_of(findings, "change")) == 2


def test_what_was_not_compared_is_listed(ranks):
    said = {each["model"]: each["not compared"] for each in ranks[0]["right models"]}
    assert said["fused_subject"] == []
    clip = "your clipping (the file has no clip)"
    assert said["drops_subject"] == said["asks_subject"] == [clip]
    first = "1.first on ranks [1], which do not use it"
    assert said["shifted_subject"] == [first, clip]
    own = "parameters that are not the full model's: "
    assert said["block_subject"] == [f"{own}2.extra", clip]
    # A buffer that train mode changes is compared, and so are gradients there.
    assert said["moments_subject"] == said["outputs_subject"] == [clip]
    kept = "what modules keep as attributes: 1.count, 1.last, 1.time"
    assert said["kept_moments_subject"] == [kept, clip]
    where = "of the model, where the loss does not use it:"
    several = [f"output rows {where} in another order"]
    several += [f"output more 0 {where} T times"]
    several += [f"output best {where} wrong", clip]
    assert said["several_subject"] == several
    assert said["empty_subject"] == [clip]  # a rank without rows has no unused ones
    idle = "parameters that no batch uses, so that their gradients are zero: "
    assert said["doubled_subject"] == [f"{own}1.weight", f"{idle}1.idle", clip]
    assert said["unused_subject"][0].startswith(f"{idle}1.scale, 1.experts.0.weight")
    absent = "parameters that no rank has: pooler.weight"
    assert said["headed_subject"] == [absent, "buffers: table", clip]
    assert re.match(r"differences below \de-0\d of", said["float32_loss_subject"][0])
    train, buffers, numbers, last = said["odd_subject"]
    assert train == "gradients in train mode"
    assert "batch_norm.running_mean" in buffers and "random numbers" in numbers
    assert last == clip


def test_a_model_that_is_not_split_is_told(ranks):
    unused = ranks[0]["unused copy"]
    assert unused["categories"] == []
    assert any("which do not use it" in text for text in unused["not compared"])
    (lists,) = [
        each for each in ranks[0]["right models"] if each["model"] == "lists_subject"
    ]
    assert any("numbers from 0: 1.heads.0" in text for text in lists["not compared"])
    assert ranks[0]["not split"]["categories"] == []
    assert ranks[0]["not split"]["is split"] is False
    right = ranks[0]["right models"] + ranks[0]["right"]
    assert all(each["is split"] for each in right)


def test_rounding_errors_of_the_full_model_are_no_fault(ranks):
    """Of a model with products in bfloat16, only what is larger is known."""
    right, wrong = ranks[0]["coarse"]
    assert right["categories"] and right["is rounding"]
    assert wrong["own"][0] == "gradient sum" and not wrong["is rounding"]
    assert not any(bug["is rounding"] for bug in ranks[0]["models"])


def test_autocast_is_off_in_the_audit():
    """Its rounding errors would be taken for faults."""
    x = torch.ones(2, 2)
    for off in (True, False):
        with rank.without_autocast() if off else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert ((x @ x).dtype == torch.float32) is off


def test_pieces_are_named(ranks):
    """What the table says of models that are cut in other ways than the lessons'."""
    held = {each["model"]: each["pieces"] for each in ranks[0]["right models"]}
    fused = held["fused_subject"]
    assert fused["attn.c_attn.weight"] == 2 * ["Shard(0) of each of 3 blocks"]
    assert fused["attn.c_attn.bias"] == 2 * ["Shard(0) of each of 3 blocks"]
    assert fused["attn.c_proj.weight"] == 2 * ["Shard(1)"]
    assert fused["wte.weight"] == fused["attn.c_proj.bias"] == 2 * ["replicated"]
    padded = []
    for each in ranks[0]["right"]:
        padded.append(each["pieces"].get("lm_head.weight"))
    assert ["Shard(0)", "Shard(0) with padding"] in padded


ROWS = [  # rows of a [4, 2] weight on rank 0 of 2 (None: zeros), and what they are
    ([0, 1, 2, 3], "replicated"),
    ([0, 1], "Shard(0)"),
    ([2, 3], "Shard(0), the piece of rank 1"),
    ([0, 1, None], "Shard(0) with padding"),
    ([0, 1, 2], "permuted or partial pieces"),
    ([1, 0], "permuted or partial pieces"),
    ([0, 0], "elements held several times"),
    ([3, 4], "pieces of weight … bias"),
    ([None], "nothing of the full model"),
]


@pytest.mark.parametrize("rows, words", ROWS)
def test_placements_in_words(rows, words):
    values = torch.arange(1, 11).view(5, 2)
    full = FullModel({"weight": values[:4], "bias": values[4:]})
    zeros = torch.zeros(2, dtype=torch.int64)
    part = torch.stack([zeros if row is None else values[row] for row in rows])
    assert piece_of(full.find(part), full, 0, 2).words == words


def test_right_models_raise_no_alarm(ranks):
    models = ranks[0]["right models"]
    assert len(models) >= 24
    assert [model for model in models if model["categories"]] == []
    right = ranks[0]["right"]
    assert len(right) >= 12
    assert [model for model in right if model["categories"]] == []


@pytest.mark.parametrize("arguments, says", [
    ([], "name a file"),
    (["no_such_file.py"], "no_such_file.py: no such file"),
    (["README.md"], "README.md: must be a Python file, as my_model.py"),
    (["tools/check.py"], "tools/check.py does not define build"),
    (["--example", "tp", "--ranks", "1"], "--ranks 1: must be from 2 to 64"),
    (["--example", "tp", "--ranks", "100000"], "from 2 to 64; each is a process of"),
    (["--example", "tp", "--clip", "nan"], "--clip nan: must be from 1e-12 to "),
    (["--example", "tp", "--timeout", "nan"], "--timeout nan: must be from 0.001 to "),
    (["--example", "tp", "--json", "/proc/x"], "--json /proc/x: "),
    (["tools/check.py", "--example", "tp"], "take one of them"),
    (["--example", "none"], "invalid choice"),
])  # fmt: skip
def test_wrong_use_is_one_line_and_2(arguments, says, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert says in said.err and said.out == ""  # nothing has run


def test_a_fault_is_one_definition():
    """Each has a test, words, a likely change and a place in the course."""
    for fault in faults.FAULTS:
        assert issubclass(fault.of, subjects.Subject) and callable(fault.test)
        assert fault.key and fault.what and fault.change and fault.where
        if "{modules}" in fault.change:
            assert fault.change_alone, fault.key
        # A module may be "the forward of layers.0".
        assert "backward of {modules}" not in fault.change, fault.key


def case_of_no_rank(point) -> SimpleNamespace:
    """What tests of faults ask, and are told nothing."""
    none = lambda *_: []
    return SimpleNamespace(
        ranks=2, first=SimpleNamespace(has=[], is_forward_only=False),
        pieces=[{}], order=[point],
        full=Trace(), ruler=Ruler(2, 1e-9), holders=none,
        replica_sets=none, compared=lambda *_: ([], []),
        grad_scale=lambda right: 1.0,
    )  # fmt: skip


def test_every_relation_has_a_fault():
    """A kind of relation that no fault knows would be a finding without advice."""
    general = {fault.of for fault in faults.FAULTS if fault.key.endswith("unexplained")}
    assert subjects.Gradient in general
    shapes = [kind for kind in Kind if kind.value in ("same", "a shard", "right")]
    for kind in set(Kind) - set(shapes):
        for of in (subjects.Gradient, subjects.Output):
            subject = of.__new__(of)
            relation = SimpleNamespace(kind=kind, factor=3.0, words="")
            vars(subject).update(relation=relation, kind=kind, arrives=None)
            vars(subject).update(is_fed_right=False, held=[], expected=torch.ones(1))
            subject.point = Point("")
            subject.case = case_of_no_rank(subject.point)
            found = [f for f in faults.FAULTS if f.of is of and f.test(subject)]
            assert found, (kind, of)


def test_two_modules_that_are_one_in_the_full_model():
    """A module that returns what its only child returns has the child's full name."""
    inner = Point("embed")
    assert Trace(same={inner: inner}).point(inner) == inner
    outer = Point("outer")
    assert Trace(same={outer: inner, inner: inner}).point(outer) == inner


def test_the_ranks_that_are_right_are_asked_first():
    """Rank 0 is right and rank 1 is not: that is no other order of the elements."""
    expected = torch.arange(12.0).view(3, 4)
    how = Ruler(2, 1e-9).relation([expected, expected + 1], expected)
    assert how.kind is Kind.SOME and "ranks [0]" in how.words
    how = Ruler(2, 1e-9).relation([expected.flip(0), expected.flip(0)], expected)
    assert how.kind is Kind.REORDERED
    other = torch.zeros(2, 5)
    how = Ruler(2, 1e-9).relation([other, other], expected)
    assert how.kind is Kind.SHAPE and "of shape [2, 5], not [3, 4]" in how.words


def test_a_partial_sum_of_a_shared_piece():
    """Ranks 0 and 1 share one half, ranks 2 and 3 the other one."""
    expected = torch.randn(4, 3, dtype=torch.float64)
    tensors = []
    for half in expected.chunk(2):
        part = torch.randn(2, 3, dtype=torch.float64)
        tensors += [part, half - part]
    how = Ruler(4, 1e-9).relation(tensors, expected)
    assert how.kind is Kind.PARTIAL
    assert str(how) == "partial Shard(0) of ranks that share a piece"
    how = Ruler(4, 1e-9).relation([*tensors[:3], tensors[3] + 1], expected)
    assert how.kind is not Kind.PARTIAL


def test_how_many_elements_are_wrong():
    """No number is said where there is none: nan, nothing off, few of many."""
    right = [torch.ones(1000).double()] * 2
    off = right[0].clone()
    off[0] = 3
    assert wrong_share(right, right, 1e-9) == ""
    assert wrong_share([off, right[0]], right, 1e-9).endswith("by rank: <1% 0%")
    little = right[0] + 1e-12
    assert wrong_share([little, right[0]], right, 1e-9) == ""
    off[1] = math.nan
    assert wrong_share([off, right[0]], right, 1e-9).endswith("by rank: nan 0%")


def test_a_nan_is_no_race_and_a_factor_says_t():
    ruler = Ruler(2, 1e-9)
    one = torch.ones(2).double()
    assert str(ruler.relation([one, one / 0 * 0], one)) == "nan on ranks [1]"
    assert [str(ruler.gradient_factor(k)) for k in (2.0, 0.5, 3.0)] == [
        "factor 2 (T)", "factor 0.5 (1/T)", "factor 3",
    ]  # fmt: skip
    nan = {"weight": one / 0 * 0}
    case = SimpleNamespace(full=Trace(steps=[None]), ruler=ruler)
    case.grad_scale = lambda right: 1.0
    case.holders = lambda name: [0]
    case.compared = lambda *_: ([nan["weight"]], [one])
    assert Case.unsteady(case, "weight") == []


def test_with_wide_limits_a_clear_relation_comes_first():
    """In bfloat16, one element a little off says less than a factor of 2, or than
    replicas that differ."""
    kinds = {"norm": Kind.UNEXPLAINED, "up": Kind.REPLICAS, "bias": Kind.FACTOR}
    case = SimpleNamespace(begins={"bias": 0, "up": 1, "norm": 2}.get)
    for is_wide, expected in ((False, ["norm", "up", "bias"]), (True, ["up", "bias"])):
        search = findings.Search(case, is_wide)
        search.gradients_of = lambda what: {n: Relation(kinds[n]) for n in kinds}
        search.first_wrong_flow = lambda wrong: None
        looked = []
        search.look = looked.append
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subjects, "TwoPasses", lambda case, name: None)
            patch.setattr(subjects, "Gradient", lambda case, name, flow: name)
            search.check_gradients()
        assert [name for name in looked if name] == expected


def case_of_losses(*losses: float) -> SimpleNamespace:
    own = [Trace(loss=loss) for loss in losses]
    case = SimpleNamespace(own=own, full=Trace(loss=2.0), ranks=len(own))
    case.ruler = Ruler(len(own), 1e-9)
    case.are_near = lambda values, right: Case.are_near(case, values, right)
    return case


def test_a_loss_that_is_nan_is_named_first():
    loss = subjects.Loss(case_of_losses(math.nan, 2.5), [])
    first = next(f for f in faults.FAULTS if f.of is subjects.Loss and f.test(loss))
    assert first.key == "loss nan" and loss.is_nan() == "it is nan on ranks [0]"
    assert not subjects.Loss(case_of_losses(2.5, 2.5), []).is_nan()


def test_a_loss_that_counts_every_column_again():
    """The logits are replicated, and the loss takes them for shards of the columns."""
    off = math.log(2)
    loss = subjects.Loss(case_of_losses(2 + off, 2 + off), [])
    first = next(f for f in faults.FAULTS if f.of is subjects.Loss and f.test(loss))
    assert first.key == "loss of replicated logits"
    assert not subjects.Loss(case_of_losses(2 + off, 2.1), []).counts_columns_again()


def gradient_of(module: str, arrives: str, back: str = "right", **more):
    """A wrong gradient of a weight: dL/d(output of its module) is right or not, and so
    is what the module returns."""
    relations = {"right": Relation(Kind.SAME), "wrong": Relation(Kind.WRONG)}
    own = Point(module)
    flows = {own: relations[arrives], Point("layers.1"): relations["right"]}
    full = Trace(returned={own._replace(slot="input 0"): None})
    full.order = list(flows)
    case = SimpleNamespace(full=full, own=[Trace()])
    case.relation_of = lambda point, what: (
        relations[back] if what == "back" else flows[point]
    )
    gradient = subjects.Gradient.__new__(subjects.Gradient)
    vars(gradient).update(
        case=case, where=f"{module}.weight", module=module, kind=Kind.UNEXPLAINED,
        arrives=relations[arrives], is_fed_right=arrives == "right", is_apart=False,
        **more,
    )  # fmt: skip
    return gradient


def test_only_what_is_upstream_of_a_wrong_gradient_follows():
    """A sum that is left out after backward makes no other gradient wrong, and nothing
    wrong comes through a module at which a right gradient arrives."""
    of = lambda *how: SimpleNamespace(subject=gradient_of(*how), where="")
    after_backward = of("layers.2.norm", "right")
    of_backward = of("layers.2.up", "right", "wrong")
    upstream = gradient_of("norm", "wrong")
    assert not findings.is_fed_wrong(upstream, [after_backward])
    assert findings.is_fed_wrong(upstream, [of_backward])
    assert findings.is_fed_wrong(upstream, [after_backward, of_backward])
    shielded = gradient_of("layers.1.up", "wrong")
    assert not findings.is_fed_wrong(shielded, [of_backward])
    inside = of("layers.1.down", "right", "wrong")
    assert findings.is_fed_wrong(shielded, [inside])


def test_a_copy_of_a_tied_weight_begins_where_the_weight_does():
    """In a pipeline the head is a copy of the embedding's weight."""
    case = SimpleNamespace(
        own=[Trace()], full=Trace(tied={"head.weight": "embed.weight"})
    )
    case.parameters = ["embed.weight", "head.weight", "norm.weight"]
    owners = {"head.weight": "embed.weight"}
    case.owner_in_full = lambda name: owners.get(name, name)
    case.is_tied_after_backward = lambda name: Case.is_tied_after_backward(case, name)
    assert Case.uses(case, "head.weight") == ["head.weight", "embed.weight"]
    assert Case.uses(case, "norm.weight") == ["norm.weight"]


@pytest.mark.parametrize(
    "samples, key", [(True, "gradient sum"), (False, "missing sum over dp")]
)
def test_a_gradient_that_is_reduced_over_one_group_of_two(samples, key):
    """Ranks 0 and 2 have one gradient, 1 and 3 another, and the sum of both is right.
    If ranks 0 and 2 have different samples, it is reduced over dp, and f is missing."""
    values = [torch.ones(2) * (rank // 2 + 1 if samples else 1) for rank in range(4)]
    own = [SimpleNamespace(value=lambda point, x=x: x) for x in values]
    gradient = subjects.Gradient.__new__(subjects.Gradient)
    case = SimpleNamespace(own=own, ruler=Ruler(4, 1e-9), first=SimpleNamespace(has=[]))
    relation = Relation(Kind.SCALED_SUM, "", 2.0)
    vars(gradient).update(case=case, where="weight", module="norm", relation=relation)
    vars(gradient).update(kind=relation.kind, groups=lambda: [[0, 2], [1, 3]])
    tests = [f for f in faults.FAULTS if f.of is subjects.Gradient]
    first = next(f for f in tests if f.test(gradient))
    assert first.key == key and ("over dp, and not over tp" in first.what) == samples


def test_two_passes_of_one_batch():
    """A gradient that two equal passes give differently is a race, or a memory."""
    right = {"weight": torch.ones(3).double()}
    wrong = {"weight": torch.tensor([1.0, 2, 3]).double()}
    full = Trace(grads=right, steps=[Step(0.0, right)])
    own = [Trace(grads=right, steps=[Step(0.0, right)])]
    own += [Trace(grads=wrong, steps=[Step(0.0, again)]) for again in (wrong, right)]
    case = SimpleNamespace(full=full, ruler=Ruler(3, 1e-9), owner=lambda name: "")
    case.grad_scale = lambda right: 1.0
    case.holders = lambda name: [0, 1, 2]

    def compared(name, what, step=None):
        traces = own if step is None else [trace.steps[step] for trace in own]
        held = [trace.grads[name] for trace in traces]
        return held, [(full if step is None else full.steps[0]).grads[name]] * 3

    case.compared = compared
    case.unsteady = lambda name: Case.unsteady(case, name)
    found = subjects.TwoPasses(case, "weight")
    assert found.differ() == "two equal passes differ on ranks [2]"
    full.steps[0] = Step(0.0, wrong)  # the full model has random numbers
    assert found.differ() == ""
    full.steps.clear()  # only forward was run
    assert found.differ() == ""


def test_replicas_of_one_piece_of_several():
    """Ranks 0 and 1 share one half, ranks 2 and 3 the other one. The gradients are
    averaged over each pair, or one that is accumulated is summed again."""
    first, second = torch.randn(2, 4, 3, dtype=torch.float64)
    case = SimpleNamespace(ruler=Ruler(4, 1e-9), ranks=4, grad_scale=lambda right: 1.0)
    case.replica_sets = lambda name: [[0, 1], [2, 3]]
    right = [half for half in first.chunk(2) for _ in range(2)]
    case.over_holders = lambda name, grads: ([2 * x for x in grads], 2)
    how = Case.over_replicas(case, "weight", [x / 2 for x in right], right, 1.0)
    assert how.kind is Kind.FACTOR and how.factor == 0.5
    again = faults.Accumulated.__new__(faults.Accumulated)
    both = [half for half in (first + second).chunk(2) for _ in range(2)]
    held = [x + y for x, y in zip(right, both)]  # twice the first
    vars(again).update(case=case, where="weight", held=held, first=right, right=both)
    (found, *_) = [f for f in faults.FAULTS if f.of is type(again) and f.test(again)]
    assert found.key == "accumulation reduced again"
    total = sum(first.chunk(2))
    how = Case.over_all_ranks(case, 4 * [total], right, 1.0)
    assert str(how) == "of several pieces (1 times their sum)"


@pytest.mark.parametrize(
    "name, dim, is_found",
    [
        ("LayerNorm", 2, True), ("LayerNorm", 1, False), ("GroupNorm", 1, True),
        ("GatedNorm", 2, True), ("BatchNorm1d", 1, False),
    ],
)  # fmt: skip
def test_a_norm_takes_statistics_along_some_dims(name, dim, is_found):
    """Of a slice of the sequence, a norm's statistics are right."""
    output = subjects.Output.__new__(subjects.Output)
    case = SimpleNamespace(full=SimpleNamespace(classes={"norm": name}))
    case.relation_of = lambda point: Relation(Kind.SHARD, dim=dim)
    vars(output).update(case=case, point=Point("norm"), expected=torch.ones(2, 3, 4))
    assert bool(output.norm_of_shard()) is is_found


@pytest.mark.parametrize("factor, known", [(2.0, 2.0), (0.5, 0.5), (1.3, 0.0)])
def test_a_single_number_is_a_multiple_of_any(factor, known):
    one = [torch.ones(1).double()] * 2
    assert Ruler(2, 1e-9).times([factor * x for x in one], one, 1.0) == known


def test_a_coarse_format_is_known_by_its_numbers():
    """Small differences of other numbers are no rounding errors of bfloat16."""
    expected = torch.linspace(1, 2, 12, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        x = expected.to(dtype).double()
        how = Ruler(2, 1e-9).relation([x, x], expected)
        assert how.kind is Kind.ROUNDED and str(dtype)[6:] in str(how)
    x = expected + 1e-3 * torch.sin(100 * expected)
    assert Ruler(2, 1e-9).relation([x, x], expected).kind is Kind.WRONG


class Remembers(nn.Linear):
    """Adds what the forward before has made."""

    memory = 0.0

    def forward(self, x):
        self.memory = super().forward(x).detach() + 0.5 * self.memory
        return super().forward(x) + self.memory


def test_a_memory_is_no_rounding_error():
    model = Remembers(4, 4).double()
    batch = (torch.randn(2, 4).double(),), torch.randn(2, 4).double()
    args = SimpleNamespace(dtype="float64", seed=1)
    another = lambda: rank.Run(SimpleNamespace(), copy.deepcopy(model), None, None)
    noise, rounding = rank.noise_of(another, batch, args)
    assert 0 < noise < 1e-12 and rounding < 1e-12


def test_a_slice_of_a_partial_gradient_in_any_layout():
    """Each rank returns its slice of its own partial gradient, of [S, B, D] as well."""
    case = SimpleNamespace(ruler=Ruler(2, 1e-9))
    partial = list(torch.randn(2, 6, 3, 4, dtype=torch.float64))
    got = [partial[0][:3], partial[1][3:]]
    for expected in (sum(partial), sum(partial).transpose(0, 1)):
        assert Case.is_slice_of(case, got, partial, expected)
        assert not Case.is_slice_of(
            case, list(sum(partial).chunk(2)), partial, expected
        )


def test_a_compiled_module_is_one_module():
    """torch.compile puts a module of the same name around it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    names = []
    enter = lambda name, module, inputs, keywords: names.append(name)
    handles = add_hooks(model, {}, enter, lambda *_: None)
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            hook(module, (), {})
    assert sorted(names) == ["", "0", "1"] and len(handles) == 6


def test_the_page_shows_what_the_notebook_ran():
    """docs/audit.md has the output of the last run in notebook 12; README a part."""
    path = jobs.ROOT / "notebooks" / "12_wrong_gradients.ipynb"
    said = ""
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if "".join(cell["source"]).endswith("audit.py traces/my_model.py"):
            text = "".join(cell["outputs"][0]["text"])
            said = "\n".join(text.rstrip().splitlines())
    assert said.endswith("WRONG  my_model.py")
    assert said in (jobs.ROOT / "docs" / "audit.md").read_text("utf-8")
    readme = (jobs.ROOT / "README.md").read_text("utf-8")
    excerpt = readme.partition("## Audit your own model")[2].split("```")[1]
    for line in excerpt.splitlines()[1:]:
        assert line.strip() in ("", "…") or line in said.splitlines(), line


def test_the_first_example_of_the_page(forked_ranks, tmp_path, capsys):
    """It runs as it is printed, with the command below it."""
    page = (jobs.ROOT / "docs" / "audit.md").read_text("utf-8")
    text, _, rest = page.partition("```python\n")[2].partition("```")
    flags = re.search(r"audit.py my_model.py (.*)", rest)[1].split()
    path = tmp_path / "my_model.py"
    path.write_text(text)
    assert command.main([str(path), *flags, "--timeout", "100"]) == 0
    said = capsys.readouterr().out
    assert "\n2 ranks\n" in said and "\n4 ranks\n" in said
    assert "\nRIGHT  my_model.py\n" in said and "RIGHT  my_model.py" in rest


HEAD = """
import sys
sys.path.insert(0, {root!r})
import importlib, torch
from torch import nn
lesson = importlib.import_module("01_naive_mlp_tp")

def batch(step):
    return torch.randn(2, 3, 8), torch.randn(2, 3, 8)
"""


def audited(folder, text: str, *flags, capsys, **fields) -> tuple[int, str]:
    """The exit code for a user's file, and what is printed, in one line."""
    path = folder / "my_model.py"
    path.write_text(HEAD.format(root=str(jobs.ROOT)) + text.format(**fields))
    code = command.main([str(path), "--timeout", "100", *flags])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


MISSING_F = """
def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), lesson.MLP(8, 16))

def parallelize(model, tp_group):
    model[1] = lesson.tp_mlp(model[1], tp_group)
    model[1].up_proj.copy_input = False  # the bug: f is missing
    {wrong}
    return model

class Wrong(torch.nn.Module):
    def forward(self, x):
        return x.view(1, 1)  # line 22
"""


@pytest.mark.parametrize("wrong, code, says", [
    ("pass", 1, "0.weight: gradient sum"),
    ("import nowhere", 2, "in parallelize: ModuleNotFoundError: No module named"),
    ("tp_group.rank() and torch.distributed.barrier(tp_group)", 2, "in parallelize"),
    ("return torch.nn.Sequential(model, Wrong())", 1, "line 22 of my_model.py"),
    ("tp_group.rank() and __import__('os')._exit(3)", 2, "ended with exit code 3"),
], ids=["missing f", "no module", "hangs", "raises", "ends"])  # fmt: skip
def test_a_users_file(forked_ranks, tmp_path, capsys, wrong, code, says):
    """A bug is explained; a rank that raises or hangs ends the run, and is named."""
    flags = "--timeout", "30", "--json", str(tmp_path / "out.json")
    found, said = audited(tmp_path, MISSING_F, *flags, capsys=capsys, wrong=wrong)
    assert found == code and says in said, said
    verdict = {1: "WRONG", 2: "NOT KNOWN"}[code]
    if "error: " not in said:  # wrong use has no verdict
        assert said.endswith(f"{verdict} my_model.py")
        (result,) = json.loads((tmp_path / "out.json").read_text())
        assert result["ranks"] == 2 and result["verdict"] == verdict


RIGHT = """
import random

class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))  # its gradient is 0 but for rounding
        self.register_buffer("load", torch.zeros(1))
    def forward(self, x):
        if self.training and {chance} < 0.5:
            return x
        return {result}

class Sign(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, dict(lr=lr))
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= 0.1 * p.grad.sign()

def build():
    return nn.Sequential(*[Unusual() for _ in range(4)], lesson.MLP(8, 16))

def parallelize(model, tp_group):
    model[4] = lesson.tp_mlp(model[4], tp_group)
    return model

def optimizer(parameters):
    return Sign(parameters)

def clip(model, max_norm):
    squares = torch.zeros(2)
    for p in model.parameters():
        squares[int(bool(lesson.sharding_of(p)))] += p.grad.square().sum()
    torch.distributed.all_reduce(squares[1:])
    model[0].load += 1  # as a router counts its tokens
    return squares.sum().sqrt()
"""


@pytest.mark.parametrize("chance, result, code, says", [
    ("random.random()", "x + (x + self.shift).softmax(-1)", 0, [
        "buffers: 0.load", "no norm was above --clip", "rounding errors alone: 0.shift",
    ]),
    ("torch.rand([])", "x * (1 + self.shift)", 0, ["random numbers in the forward of"]),
    ("1", "x * (self.shift / 0)", 2, ["ArithmeticError: its loss is nan"]),
], ids=["python's random", "a random number", "nan"])  # fmt: skip
def test_what_is_unusual_and_right(
    forked_ranks, tmp_path, capsys, chance, result, code, says
):
    """No false alarm, and what could not be compared is listed."""
    fields = dict(chance=chance, result=result)
    found, said = audited(tmp_path, RIGHT, "--clip", "1000", capsys=capsys, **fields)
    assert found == code
    for words in says:
        assert words in said, said


CAPACITY = """
def build():
    model = nn.Sequential(nn.Linear(8, 8), lesson.MLP(8, 16))
    model[1].register_buffer("scale", torch.ones(8))
    return model

def parallelize(model, group):
    model[1] = lesson.tp_mlp(model[1], group)
    model[1].scale = torch.ones(4)
    if {bug}:
        cap = lambda module, inputs, y: y * (torch.arange(y.shape[1]) < 4)[:, None]
        model[1].register_forward_hook(cap)
    return model

def batch(step):
    return torch.randn(2, 3 + 2 * step, 8), torch.randn(2, 3 + 2 * step, 8)
"""


@pytest.mark.parametrize("bug", [True, False])
def test_a_second_batch_that_is_wrong_becomes_the_first(
    forked_ranks, tmp_path, capsys, bug
):
    """So the place is found. The table shows buffers, if one is sharded."""
    code, said = audited(tmp_path, CAPACITY, capsys=capsys, bug=bug)
    assert code == bug
    assert "1.scale Shard(0) buffer" in said
    assert ("all is right with batch(0); these are batch(1), batch(2)" in said) == bug
    assert ("1. 1: forward wrong" in said) == bug
    assert not bug or "it is wrong at [4] of 5 along dim 1 only" in said


def test_a_complex_parameter_is_refused():
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex"):
        rank.make_values_unique(model)


def test_few_elements_may_be_dropped_alike_by_chance():
    none, few = torch.zeros(4), torch.tensor([1.0, 0, 0, 0])
    many = (torch.arange(1000) % 10 == 0).float()
    assert subjects.are_equal_by_chance([none, none])
    assert subjects.are_equal_by_chance([few, few])
    assert not subjects.are_equal_by_chance([few, none])
    assert not subjects.are_equal_by_chance([many, many])
    channels = few[:, None].expand(4, 1000)  # each is dropped as a whole
    assert subjects.are_equal_by_chance([channels, channels])
    assert subjects.are_kept_by_chance([few, none])
    assert subjects.are_kept_by_chance([few[:0]])  # an expert without tokens
    assert not subjects.are_kept_by_chance([few, many])


PLAN = """
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

def parallelize(model, tp_group):
    mesh = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"linear": ColwiseParallel()})

def batch(step):
    return torch.randn(2, 8), torch.randn(2, 8)
"""


def test_a_plan_whose_names_match_nothing(forked_ranks, tmp_path, capsys):
    path = tmp_path / "my_model.py"
    path.write_text(PLAN)
    assert command.main([str(path)]) == 2
    out = capsys.readouterr().out
    assert "warning in parallelize: Parallelize plan key 'linear'" in out
    assert "Nothing is split" in out and "\nNOT KNOWN  my_model.py\n" in out


class Store:
    """What ranks have reported."""

    def __init__(self, held: dict):
        self.held = held

    def check(self, keys):
        return keys[0] in self.held

    def get(self, key):
        return json.dumps(self.held[key])


def ended(held: dict, code=None):
    """What is said of two ranks, of which rank 1 has ended with this exit code."""
    logs = [SimpleNamespace(read_text=lambda *_: "terminate called\nwhat(): no")] * 2
    return command.what_failed(Store(held), [None, code], logs)


def at(phase: str, error: str | None = None, calls: int = 0) -> dict:
    return {"phase": phase, "more": "", "error": error, "calls": calls, "traceback": ""}


def test_the_verdict_on_a_run_that_did_not_end():
    """Only an error or an abort in the parallel model is known to be wrong."""
    slow = {"rank 0": at("forward"), "rank 1": at("forward")}
    assert ended(slow)["verdict"] == "NOT KNOWN"
    assert ended({})["failed"] == ["rank 0: has not started", "rank 1: has not started"]
    assert ended(slow, -9)["verdict"] == "NOT KNOWN"
    aborted = ended(slow, -6)
    assert aborted["verdict"] == "WRONG" and "what(): no" in aborted["failed"][1]
    raised = ended({**slow, "rank 1": at("forward", "ValueError: no")})
    assert raised["verdict"] == "WRONG"
    sizes = "RuntimeError: gloo EnforceNotMet: preamble.length"
    other = ended({**slow, "rank 1": at("forward", sizes)})
    assert other["verdict"] == "WRONG" and "--dtype float32" in other["failed"][-1]
    gone = at("forward", "RuntimeError: gloo: timed out")
    lost = ended({**slow, "rank 1": gone})
    assert lost["verdict"] == "NOT KNOWN"
    assert "rank 1 waited for other ranks in vain" in lost["failed"][1]
    both = ended({"rank 0": at("forward", "ValueError: no"), "rank 1": gone})
    assert both["failed"][1] == "rank 1 lost the connection"
    for phase, calls in (("importing the file", 0), ("parallelize", 0)):
        with pytest.raises(command.WrongUse, match="ImportError"):
            ended({"rank 1": at(phase, "ImportError", calls)})
    late = ended({"rank 1": at("parallelize", "ValueError: late", 1)})
    assert late["verdict"] == "NOT KNOWN" and "late" in late["failed"][0]


def test_ranks_that_start_slowly_get_more_time(monkeypatch):
    monkeypatch.setattr(command, "STARTUP", 2)
    waited = []
    for phase in ("starting", "forward"):
        began = time.time()
        process = SimpleNamespace(poll=lambda: None)
        command.watch([process], Store({"rank 0": at(phase)}), 0.01)
        waited.append(time.time() - began)
    assert waited[0] > 2 > waited[1]


def test_a_rank_has_the_variables_of_torchrun_and_of_the_user(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    env = command.environment({}, 1, 4, 1234)
    assert env["PYTHONPATH"].split(os.pathsep) == ["/mine", str(jobs.ROOT)]
    found = [env[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert found == ["1", "1", "4"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "1234")


def test_a_users_file_hides_no_package(tmp_path):
    """It is imported under a private name, so `import chess` in it finds a package."""
    path = tmp_path / "chess.py"
    path.write_text("here = __name__")
    before = list(sys.path)
    found = rank.load_subject(path)
    sys.path[:] = before
    assert "chess" not in sys.modules and sys.modules[found.here] is found


def test_a_python_without_torch_is_told():
    ended = subprocess.run(
        [sys.executable, "-S", "-E", "tools/audit.py", "--example", "tp"],
        cwd=jobs.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "error: this Python has no torch; see README.md, Start\n"


def test_the_page_names_what_is_not_seen():
    page = (jobs.ROOT / "docs" / "audit.md").read_text("utf-8")
    said = page.partition("## What the tool cannot see")[2].partition("\n## ")[0]
    said = " ".join(said.split())
    for words in ("any buffer that training changes", "not pieces of the full model's",
                  "not called as often", "`dropout_p`", "`main_grad`",
                  "random numbers of your own"):  # fmt: skip
        assert words in said, words


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_plans_of_transformers(forked_ranks, model, monkeypatch, capsys):
    """The file for all plans; the page shows what is said of Qwen3's hook."""
    pytest.importorskip("transformers", "5.20")
    monkeypatch.setenv("MODEL", model)
    monkeypatch.setenv("LAYERS", "1")
    code = command.main(["--example", "hf", "--timeout", "200"])
    said = capsys.readouterr().out
    assert code == (1 if model == "qwen3" else 0), said
    if model == "qwen3":
        page = (jobs.ROOT / "docs" / "audit.md").read_text("utf-8")
        for line in said.splitlines()[1:]:  # the first one is the path here
            assert line in page.splitlines(), line


def test_an_error_has_its_module_and_a_hint():
    counter = SimpleNamespace(where=lambda: "attn.o", shapes="2 ranks do not divide 3")
    args = SimpleNamespace(path=__file__, dtype="float64")
    try:
        nn.Linear(2, 2)(torch.zeros(3))
    except RuntimeError as error:
        said = rank.in_words(error, counter, args)
    assert "module attn.o" in said and "of test_audit.py" in said
    assert "; 2 ranks do not divide 3" in said
    assert re.search(r"line \d+ of /\S+/linear.py", said)  # of the library
    code = "def call():\n    nn.Linear(2, 2)(torch.zeros(3))"
    made = {"nn": nn, "torch": torch}
    exec(compile(code, "/packages/layers.py", "exec"), made)
    try:
        made["call"]()
    except RuntimeError as error:
        said = rank.in_words(error, counter, args)
    assert "line 2 of /packages/layers.py" in said and "linear.py" not in said
    error = RuntimeError("Expected mat_a to be Float32, BFloat16 or Float16 matrix")
    assert "--dtype float32" in rank.in_words(error, counter, args)
    assert "sys.exit(3)" in rank.in_words(SystemExit(3), counter, args)
    error = AttributeError("'CausalLMOutputWithPast' object has no attribute 'view'")
    assert "take its logits" in rank.in_words(error, counter, args)


@pytest.mark.parametrize("held, ranks, says", [
    ({"up": [6, 8], "down": [8, 6]}, 3, "3 ranks do not divide what is split (up has 6 "
     "of 16 along dim 0; down has 6 of 16 along dim 1; of ranks, 2, 4, 8, 16 would)"),
    ({"up": [4, 8]}, 4, "the smallest slice: up has 4 of 16 along dim 0; is it a part"),
    ({"up": [16, 8], "other": [3]}, 3, ""),
])  # fmt: skip
def test_an_error_about_shapes_says_how_parameters_are_split(held, ranks, says):
    full = {"up": torch.zeros(16, 8), "down": torch.zeros(8, 16)}
    own = {name: torch.zeros(shape) for name, shape in held.items()}
    said = rank.how_split(full, own, ranks)
    assert said.startswith(says) and bool(said) == bool(says)


def test_a_loss_gets_what_the_model_returns_or_its_logits():
    """Hugging Face's models return an object; what fails with both is not hidden."""
    output = SimpleNamespace(logits=torch.ones(2, 4), aux_loss=torch.tensor(3.0))
    losses = {
        "output": lambda output, target: output.logits.mean() + output.aux_loss,
        "logits": lambda logits, target: logits.flatten(0, 1).mean(),
        "slice": lambda logits, target, group: logits[:, :-1].mean(),
        "wrong": lambda logits, target: logits.missing,
    }
    found = {}
    for name, loss in losses.items():
        run = rank.Run(SimpleNamespace(loss=loss), nn.Linear(4, 4), None, None)
        try:
            found[name] = run.loss(output, None).item()
        except AttributeError as error:
            found[name] = "missing" in str(error)
    assert found == {"output": 4.0, "logits": 1.0, "slice": 1.0, "wrong": True}


def test_every_tensor_that_a_module_returns_is_recorded():
    """Of a tuple, a list, a dict or a dataclass, the main one first."""
    x, y, z = torch.ones(3, 1).unbind()
    made = dataclasses.make_dataclass("Made", ["loss", "logits"], slots=True)(x, y)
    for output, expected in (
        (x, {"": x}),
        ((None, x, [y, z]), {"": x, "output 2 0": y, "output 2 1": z}),
        ({"loss": x, "logits": (y, 3)}, {"": x, "output logits 0": y}),
        (made, {"": y, "output loss": x}),
        (SimpleNamespace(one=x, two={"three": y}), {"": x, "output two three": y}),
        (3, {}),
    ):
        found = outputs_of(output)
        assert list(map(id, found.values())) == list(map(id, expected.values()))
        assert list(found) == list(expected)


RETURNS = [  # a function of the file, what it returns, and what is said of it
    ("build", nn.Linear, "returned the class Linear: it has to return the full model"),
    ("build", None, "returned None: it has to return the full model, an nn.Module"),
    ("build", nn.Linear(2, 2, device="meta"), "left weight on the meta device, with"),
    ("batch", {"ids": 1, "labels": 2}, "returned a dict: it has to return inputs and"),
    ("batch", {"ids": 1}, "if the inputs have the labels: (inputs, None)"),
    ("batch", torch.ones(3, 2), "returned a tensor of shape [3, 2]: it has to return"),
    ("batch", (1, 2, 3), "returned a tuple of length 3: it has to return inputs and"),
    ("loss", torch.ones(2, 6), "returned a tensor of shape [2, 6]: it has to return a"),
    ("loss", 0.5, "returned a float: it has to return a tensor with one number"),
    ("parallelize", "model", "returned a str: it has to return the parallel model, or"),
]


@pytest.mark.parametrize("name, made, says", RETURNS)
def test_what_a_users_function_returns_is_checked(name, made, says):
    """One line: the function, its line, what it returned and what it has to return."""
    args = SimpleNamespace(seed=1, dtype="float64")
    counter = SimpleNamespace(report=lambda phase: None, counting=nullcontext)
    returns = lambda *_: made
    if name == "loss":
        returns = lambda output, target: made
    subject = SimpleNamespace(**{name: returns})
    run = rank.Run(subject, nn.Identity(), None, None)
    calls = {
        "build": lambda: rank.Builder(subject, args, counter, "cpu"),
        "batch": lambda: rank.prepare_batch(subject, 0, args, "cpu"),
        "loss": lambda: run.loss(torch.ones(2), None),
        "parallelize": lambda: rank.parallelize(
            subject, nn.Identity(), None, Facts(Trace(), Trace()), counter, args
        ),
    }
    with pytest.raises(TypeError) as error:
        calls[name]()
    text = str(error.value)
    assert says in text and text.count("\n") == 0
    line = returns.__code__.co_firstlineno
    assert text.startswith(f"{name}() (line {line} of test_audit.py) ")


def test_a_loss_of_one_argument_is_refused():
    subject = SimpleNamespace(loss=lambda output: output.sum())
    run = rank.Run(subject, nn.Identity(), None, None)
    with pytest.raises(TypeError, match=r"^loss\(\) \(line \d+ of .*take output and"):
        run.loss(torch.ones(2), None)


def test_a_name_that_is_misspelt_is_told(tmp_path, capsys):
    """Not by the word: parallelize_module contains parallelize."""
    path = tmp_path / "my_model.py"
    path.write_text(PLAN.replace("def parallelize(", "def parallelise("))
    assert command.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.endswith("does not define parallelize; is it parallelise, in line 9?\n")


def test_what_a_users_file_may_define():
    """A tuple as output, a loss that gets the model, an optimizer that gets names."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    model.register_forward_hook(lambda module, inputs, output: (output, None))
    run = rank.Run(SimpleNamespace(), model, None, None)
    assert run.forward(((x,), torch.zeros(2, 4)))[1].dim() == 0
    subject = SimpleNamespace(
        loss=lambda output, target, model: output[0].sum() + model.weight.sum(),
        optimizer=lambda named_parameters: torch.optim.SGD(named_parameters, 0.5),
    )
    run = rank.Run(subject, model, None, None)
    right = model(x)[0].sum() + model.weight.sum()
    assert run.forward(((x,), None))[1] == right
    assert run.optimizer().param_groups[0]["param_names"] == ["weight", "bias"]
    # The loss gets what the model returns, also if this has logits.
    made = SimpleNamespace(logits=x, second=x.sum())
    subject = SimpleNamespace(loss=lambda output, target: output.second)
    assert rank.Run(subject, lambda x: made, None, None).forward(((x,), None))[1]
    default = rank.Run(SimpleNamespace(), lambda x: made, None, None)
    assert default.forward(((x,), x))[1] == 0


def test_from_full():
    """By shape, blocks of a fused weight, padding, shared pieces, other names."""
    full = nn.ModuleDict({"up": nn.Linear(4, 6), "qkv": nn.Linear(4, 12, bias=False)})
    full["odd"] = nn.Linear(4, 3, bias=False)
    for rank_ in range(2):
        group = SimpleNamespace(rank=lambda r=rank_: r, size=lambda: 2)
        model = nn.ModuleDict(
            {"fc": nn.Linear(4, 3), "odd": nn.Linear(4, 2, bias=False)}
        )
        model["qkv"] = nn.Linear(4, 6, bias=False)
        from_full(model, full, group, {"fc": "up"}, blocks={"qkv.weight": [4, 4, 4]})
        assert torch.equal(model["fc"].weight, full["up"].weight.chunk(2)[rank_])
        assert torch.equal(model["fc"].bias, full["up"].bias.chunk(2)[rank_])
        blocks = [block.chunk(2)[rank_] for block in full["qkv"].weight.chunk(3)]
        assert torch.equal(model["qkv"].weight, torch.cat(blocks))
        padded = torch.cat([full["odd"].weight, torch.zeros(1, 4)])
        assert torch.equal(model["odd"].weight, padded.chunk(2)[rank_])
    group = SimpleNamespace(rank=lambda: 3, size=lambda: 4)
    model = from_full(nn.Linear(4, 3), full["up"], group)  # two pieces on four ranks
    assert torch.equal(model.weight, full["up"].weight.chunk(2)[1])
    q, k = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
    parts = nn.ModuleDict({"q": q, "k": k})
    fused = nn.ModuleDict({"qk": nn.Linear(4, 3, bias=False)})
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    from_full(fused, parts, group, {"qk.weight": ["q.weight", "k.weight"]})
    slices = [q.weight.chunk(2)[1], k.weight.chunk(2)[1]]
    assert torch.equal(fused["qk"].weight, torch.cat(slices))
    with pytest.raises(ValueError, match="the full model has no fc"):
        from_full(nn.ModuleDict({"fc": nn.Linear(4, 3)}), full, group)


def test_a_full_model_that_cannot_be_built_again_is_copied():
    """Its build() draws numbers that the seed does not fix, returns what it has made
    before, or may be called once only."""
    args = SimpleNamespace(seed=1, dtype="float64")
    counter = SimpleNamespace(report=lambda phase: None)
    numbers = iter(torch.rand(9, 4, 4))
    kept = nn.Linear(4, 4).double()
    once = iter([nn.Linear(4, 4)])
    drawn = lambda: nn.Linear(random.randint(2, 99), 4)
    changing = lambda: nn.ParameterList([next(numbers)])
    for build in (changing, lambda: kept, once.__next__, drawn):
        builder = rank.Builder(SimpleNamespace(build=build), args, counter, "cpu")
        another = builder.another().model
        for p, other in zip(builder.first.parameters(), another.parameters()):
            assert torch.equal(p, other) and p.data_ptr() != other.data_ptr()


ALONE = """
import torch
from torch import distributed as dist, nn

class Split(nn.Linear):
    def forward(self, x):
        y = super().forward(x).detach().clone()
        dist.all_reduce(y)
        return super().forward(x) + y

def build():
    return nn.Sequential(Split(4, 4))

def parallelize(model, tp_group):
    return model

def batch(step):
    return torch.randn(2, 4), torch.randn(2, 4)
"""


def test_a_full_model_that_communicates_is_no_reference(forked_ranks, tmp_path, capsys):
    path = tmp_path / "my_model.py"
    path.write_text(ALONE)
    assert command.main([str(path), "--ranks", "2"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "RuntimeError: the full model calls collectives (forward: all-" in said, said
    assert "NOT KNOWN my_model.py" in said
    # In a group of one rank nothing is sent.
    made = "GROUPS = [dist.new_group([rank]) for rank in range(2)]\n"
    alone = ALONE.replace("class Split", f"{made}\nclass Split")
    path.write_text(alone.replace("(y)", "(y, group=GROUPS[dist.get_rank()])"))
    assert command.main([str(path), "--ranks", "2"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "calls collectives" not in said and "forward all-reduce" not in said, said


AVERAGE = """
GROUP = [None]

class Average(torch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2)
        self.shadow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        if GROUP[0] is not None and {bug!r} == "sent":
            for x in self.shadow:
                torch.distributed.broadcast(x, 0)
    def step(self):
        super().step()
        is_other = GROUP[0] is not None and GROUP[0].rank() == 1
        rate = 0.8 if is_other and {bug!r} == "rate" else 0.9
        for x, p in zip(self.shadow, self.param_groups[0]["params"]):
            x.mul_(rate).add_(p.detach(), alpha=1 - rate)
        if is_other and {bug!r} == "state":
            for state in self.state.values():
                state["exp_avg"] *= 2

def optimizer(parameters):
    return Average(parameters)

def build():
    GROUP[0] = None
    return torch.nn.Sequential(torch.nn.Linear(8, 8), lesson.MLP(8, 16))

def parallelize(model, group):
    GROUP[0] = group
    model[1] = lesson.tp_mlp(model[1], group)
    return model
"""


@pytest.mark.parametrize("bug, says", [
    ("", "RIGHT"),
    ("sent", "1. 1.up_proj.weight: optimizer state"),
    ("rate", "`shadow` after 2 steps is wrong on ranks [1]"),
    ("state", "after step 2, wrong on ranks [1] only; right before, so look at"),
])  # fmt: skip
def test_what_an_optimizer_keeps(forked_ranks, tmp_path, capsys, bug, says):
    """Averages for evaluation change no step: they are compared as pieces."""
    code, said = audited(tmp_path, AVERAGE, capsys=capsys, bug=bug)
    assert code == (1 if bug else 0) and says in said, said


PAIRS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.w13, self.w2 = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = self.w13(x)  # rows of gate and up in turn
        x = x + self.w2(torch.sigmoid(h[..., ::2]) * h[..., 1::2])
        return self.head(x)

def build():
    return Model()

def blocks(x, group):
    parts = [block.chunk(2)[group.rank()] for block in x.detach().chunk(2)]
    return nn.Parameter(torch.cat(parts))

def parallelize(model, group):
    bias = blocks(model.w13.bias, group)
    model.w13 = lesson.ColumnParallelLinear(model.w13, group)
    model.w2 = lesson.RowParallelLinear(model.w2, group)
    if {bug!r} == "bias":
        model.w13.bias = bias
    if {bug!r} == "tie":
        model.head = lesson.ColumnParallelLinear(model.head, group, gather_output=True)
    return model

def batch(step):
    tokens = torch.randint(12, (2, 3, 6))
    return tokens[0], tokens[1]
"""


@pytest.mark.parametrize("bug, says", [
    ("", "RIGHT"),
    ("bias", "1. w13.bias: other rows than its weight"),
    ("bias", "has rows 0 to 7 and 16 to 23 of it, and rows 0 to 15 of w13.weight"),
    ("tie", "gradient tied"),
])  # fmt: skip
def test_two_parameters_that_belong_together(forked_ranks, tmp_path, capsys, bug, says):
    """A bias that is not cut like its weight; a tied weight of which only one use is
    sharded, so that it has become two, cut in different ways."""
    code, said = audited(tmp_path, PAIRS, capsys=capsys, bug=bug)
    assert code == (1 if bug else 0) and says in said, said
    if bug == "bias":
        assert "w13.weight: fused" not in said and "Split it into its parts" not in said
    assert "of its uses" not in said


SERVED = """
gather = importlib.import_module("00_collectives").all_gather

class Served(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.head = lesson.MLP(8, 16), torch.nn.Linear(8, 12)
        self.group = None
    @torch.no_grad()
    def forward(self, x):
        y = self.head(self.mlp(x))
        if self.group is not None and {bug!r} != "argmax":
            y = gather(y, -1, self.group)
        return y.argmax(-1) if {ids} else y

def build():
    return Served()

def parallelize(model, group):
    model.group = group
    model.mlp = lesson.tp_mlp(model.mlp, group)
    if {bug!r} == "no sum":
        model.mlp.down_proj.reduce = lambda partial_y, group: partial_y
    model.head = lesson.ColumnParallelLinear(model.head, group)
    return model

def batch(step):
    return torch.randn(2, 6, 8), torch.randn(2, 6, 12) if {bug!r} else None
"""


@pytest.mark.parametrize("ids, bug, says", [
    (False, "no sum", "1. mlp.down_proj: forward partial"),
    (False, "", "not compared: gradients: nothing to compare, only forward was run"),
    (True, "", "RIGHT my_model.py"),
    (True, "argmax", "An argmax, a top-k or a sampling needs the columns of all"),
])  # fmt: skip
def test_a_model_that_is_served(forked_ranks, tmp_path, capsys, ids, bug, says):
    """It has no backward: parameters, buffers and forward are compared."""
    code, said = audited(tmp_path, SERVED, capsys=capsys, ids=ids, bug=bug)
    assert code == (1 if bug else 0) and says in said, said
    assert "gradients: nothing to compare" in said


class DistributedDataParallel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_a_wrapper_is_no_second_call_of_its_module():
    """Both have one name in the full model."""
    model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
    entered = []
    add_hooks(model, {}, lambda name, *_: entered.append(name), lambda *_: None)
    model(torch.ones(2))
    assert entered == ["", "0"]


def test_a_model_that_is_trained_needs_a_target(forked_ranks, tmp_path, capsys):
    """Or a loss of the file's own: one line says so."""
    text = MISSING_F + "def batch(step): return torch.randn(2, 3, 8), None"
    code, said = audited(tmp_path, text, capsys=capsys, wrong="pass")
    assert code == 2 and said.count("error: ") == 1
    assert "returned None as target: it has to return one, or the file to" in said


def test_forward_alone_is_compared_if_asked_for(forked_ranks, tmp_path, capsys):
    """A trained model without f would be WRONG; served, it is right."""
    fields = dict(capsys=capsys, wrong="pass")
    code, said = audited(tmp_path, MISSING_F, "--forward", **fields)
    assert code == 0
    assert "gradients: nothing to compare" in said and "backward" not in said


@pytest.mark.parametrize("drop", [
    lambda x: nn.functional.dropout(x, 0.3),
    lambda x: nn.functional.dropout(x, 0.5),
    lambda x: torch.native_dropout(x, 0.3, True)[0],
], ids=["function", "half", "operator"])  # fmt: skip
def test_nothing_is_dropped_in_the_pass_that_is_compared(drop):
    """Forward and backward are the identity, whichever operator drops."""
    trace = Trace()
    x = torch.ones(8, requires_grad=True)
    with Dropouts(nn.Linear(2, 2), {}, trace, True):
        y = drop(x)
        y.sum().backward()
    assert torch.equal(y, x) and torch.equal(x.grad, torch.ones(8))
    assert len(trace.drop_inputs[""]) == 1 and not trace.other_random


def test_the_rate_of_a_fused_attention():
    x = torch.zeros(1)
    assert drop_rate((x, x, x, 0.3, True), {}) == 0.3
    assert drop_rate((x, x, x), {"dropout_p": 0.2}) == 0.2
    assert drop_rate((x, x, x), {}) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number, tmp_path):
    """The ranks end with the command, also if it is killed; no traceback of its own."""
    path = tmp_path / "my_model.py"
    path.write_text(PLAN + "\nimport time\ntime.sleep(100)\n")
    process = subprocess.Popen(
        [sys.executable, str(jobs.ROOT / "tools" / "audit.py"), str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=jobs.CLEAN_ENV,
    )  # fmt: skip
    limit = time.time() + 100
    while len(found := psutil.Process(process.pid).children()) < 2:
        assert time.time() < limit
        time.sleep(0.1)
    while any(child.cpu_times().user < 0.5 for child in found):  # torch is imported
        assert time.time() < limit
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode not in (0, 1)
    assert "Traceback" not in error
    _, alive = psutil.wait_procs(found, timeout=60)
    assert alive == []


def test_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-u", "tools/audit.py", "--example", "tp"],
        cwd=jobs.ROOT, stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (ended.returncode, ended.stderr) == (2, "")


ORDER = """
import sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {root!r} + "/beyond")
import importlib, torch
lesson = importlib.import_module("09_shared_heads")
config = lesson.lesson02.Config(30, 32, 8, 2, 1, 6, 0.0)

def build():
    return lesson.lesson02.Transformer(config)

def parallelize(model, tp_group):
    groups = lesson.kv_groups(2, 4, 60)
    groups["tp"] = tp_group
    make = lesson.lesson02.tp_transformer
    return lesson.shared_heads_transformer(model, make, groups)

def batch(step):
    tokens = torch.randint(30, (2, 3, 6))
    return tokens[0], tokens[1]
"""


@pytest.mark.parametrize("name, code", [("", 0), ("order", 1)])
def test_the_order_of_shared_heads_on_four_ranks(
    forked_ranks, tmp_path, capsys, name, code
):
    """The bug order of beyond/09: a rank holds another rank's key/value head."""
    root = jobs.ROOT
    if name:
        root = tmp_path / "course"
        root.mkdir()
        jobs.bug.copy_with_bug("09", jobs.bug.bugs_of("09")[name], root)
    path = tmp_path / "shared.py"
    path.write_text(ORDER.format(root=str(root)))
    assert command.main([str(path), "--ranks", "4", "--timeout", "100"]) == code
    out = capsys.readouterr().out
    assert ("1. layers.0.self_attn.k_proj.weight: wrong piece" in out) == (code == 1)


DP_AND_TP = """
import torch.distributed as dist

def pair_of(rank, apart):  # ranks 0 1 and 2 3 are tp groups; 0 2 and 1 3 are dp groups
    return [rank % 2, rank % 2 + 2] if apart else [rank // 2 * 2, rank // 2 * 2 + 1]

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), lesson.MLP(8, 16))

def parallelize(model, group):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model[1] = lesson.tp_mlp(model[1], groups[dist.get_rank() // 2])
    model.register_forward_pre_hook(
        lambda module, inputs: (inputs[0].chunk(2)[dist.get_rank() // {ranks}],))
    return model

def batch(step):
    return torch.randn(4, 3, 8), torch.randn(4, 3, 8)

def loss(output, target, group):
    if group is None:
        return torch.nn.functional.mse_loss(output, target)
    own = target.chunk(2)[group.rank() // 2]
    part = torch.nn.functional.mse_loss(output, own)
    total = part.detach().clone()
    dist.all_reduce(total)
    return part + total / 4 - part.detach()

def after_backward(model):
    for p in model.parameters():
        if {apart} is None:
            break
        parts = [torch.empty_like(p) for _ in range(4)]
        dist.all_gather(parts, p.grad.contiguous())
        p.grad = sum(parts[r] for r in pair_of(dist.get_rank(), {apart})) / 2
    if {bug!r} == "bias":
        model[1].down_proj.bias.grad *= 2
"""


@pytest.mark.parametrize(
    "apart, bug", [(True, ""), (False, ""), (None, ""), (True, "bias"), (True, "half")]
)
def test_a_gradient_averaged_over_the_wrong_group(
    forked_ranks, tmp_path, capsys, apart, bug
):
    """Two tp groups with different batches: an average over tp leaves them apart. None:
    nothing is averaged."""
    ranks = 4 if bug == "half" else 2  # that take one half of the samples
    fields = dict(capsys=capsys, apart=apart, bug=bug, ranks=ranks)
    code, said = audited(tmp_path, DP_AND_TP, "--ranks", "4", **fields)
    assert code == (0 if apart and not bug else 1), said
    if bug == "bias":
        assert "✗ 1. 1.down_proj.bias: gradient factor 2" in said
    if bug == "half":
        assert "✗ 1. 0: forward right on ranks [0, 1] only" in said
    if apart is None:
        assert "✗ 1. 1.down_proj.weight: missing average over dp" in said
        assert "hold one piece and have computed different outputs" in said
        assert "it is the same on ranks [0, 1] and the same on ranks [2, 3]" in said
    if apart is False:
        first, _, rest = said.partition("✗ 1. ")[2].partition("✗ 2. ")
        assert "ranks [0, 1] hold different pieces and have the same gradient" in first
        assert "a sum over the wrong group (tp for dp)" in first
        assert "the same on ranks [0, 1] and the same on ranks [2, 3]" in rest
        assert "Average over ranks that have different batches (dp)" in rest
