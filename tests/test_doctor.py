"""What the doctor concludes from outputs of modules, checks and optimizers."""

import re
import sys
from contextlib import contextmanager

import doctor
import jobs
import pytest
import torch

FULL = torch.arange(24.0).view(2, 3, 4)


def outputs_of(*parts) -> list[dict]:
    return [doctor.compare(part, FULL, 1e-6) for part in parts]


HALVES = FULL.chunk(2, 2)
ROWS = FULL.chunk(2, 0)
PADDED = torch.nn.functional.pad(FULL[:, 2:], (0, 0, 0, 1), value=7.0)  # 3 = 2 + 1 rows
CASES = {  # parts of two ranks, and whether they are right
    "equal": ((FULL, FULL), True),
    "one is off": ((FULL, FULL + 1), False),
    "columns": (HALVES, True),
    "columns, exchanged": (HALVES[::-1], True),  # sums over ranks do not see it
    "rows": (ROWS, True),
    "the last block is padded": ((FULL[:, :2], PADDED), True),
    "columns of another tensor": ((HALVES[0], HALVES[1] + 1), False),
    "twice the same block": ((HALVES[0], HALVES[0]), None),  # perhaps a micro-batch
    "even and odd columns": ((FULL[..., ::2], FULL[..., 1::2]), None),  # cut otherwise
    "a sum that is missing": ((FULL / 2, FULL / 2), False),
    "of another shape": ((FULL.flatten(), FULL.flatten()), None),
    "of two shapes": ((FULL, HALVES[0]), None),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_of_all_ranks(case):
    parts, wanted = CASES[case]
    assert doctor.are_right(outputs_of(*parts)) is wanted


def test_between_which_modules():
    """A module inside one that is right is not named, nor one that cannot be judged."""
    right = (FULL, FULL)
    calls = {
        doctor.INPUT: right,
        "a.up": HALVES,
        "a.odd": (FULL + 1, FULL),  # partial sums, inside of `a`
        "a": right,
        "b.cut": (FULL[..., ::2], FULL[..., 1::2]),
        "b.down": (FULL / 2, FULL / 2),
        "b": (FULL / 2, FULL / 2),
    }
    ranks = [{}, {}]
    for name, parts in calls.items():
        for rank, output in enumerate(outputs_of(*parts)):
            ranks[rank][name] = output
    said = doctor.where_wrong(ranks)
    assert said == "forward is right up to a and wrong from b.down on"
    for rank in ranks:  # a stage that gets activations: its module names mean others
        rank[doctor.INPUT] = outputs_of(FULL.flatten())[0]
    assert doctor.where_wrong(ranks) == ""


def raise_in(run: str, model, x) -> None:
    """As Report.guard, whose lesson continues if all ranks raise."""
    try:
        model(x)
    except RuntimeError:
        doctor.note_error(get_store=lambda: None)


def test_the_module_that_raised(monkeypatch):
    """With the shapes of its tensors; the first one of each run."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(doctor, "CALLING", doctor.Calls())
    monkeypatch.setattr(doctor, "RAISED", {})
    doctor.CALLING.store = torch.distributed.HashStore()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 2))
    raise_in("TP", model, FULL)
    said = "in 1, Linear: input [2, 3, 3], weight [2, 4], bias [2]"
    assert doctor.RAISED == {"TP": said}
    assert doctor.CALLING.status.raised[-1] == f"  {said}"
    raise_in("TP", model[0], FULL[0, :, :1])
    assert doctor.RAISED == {"TP": said}
    raise_in("DTensor", model[0], FULL[0, :, :1])
    assert doctor.RAISED["DTensor"].startswith("in the model, Linear: input [3, 1], ")


def reference_loss():
    sharded_loss()


def sharded_loss():
    """Called by the other one: which is called first is noted."""


class Phases:
    """As METER, which names phases."""

    label = None

    @contextmanager
    def phase(self, run: str, name: str):
        self.label = run, name
        try:
            yield
        finally:
            self.label = None


def test_the_first_function_of_a_phase(monkeypatch):
    """Afterwards Python says no calls, in a script without an optimizer neither."""
    meter = Phases()
    monkeypatch.setattr(doctor.Script, "path", jobs.Path(__file__))
    monkeypatch.setattr(doctor.Script, "meter", meter)
    monkeypatch.setattr(doctor, "PLACES", {})
    before = sys.getprofile()
    doctor.watch_phases(meter)
    phases = {  # run, phase → what is called in it
        ("one process", "forward"): sharded_loss,
        ("one process", "loss"): reference_loss,
        ("TP", "loss"): sharded_loss,
        ("TP", "clipping"): list,  # none of the script's
    }
    for (run, phase), call in [*phases.items(), (("TP", "loss"), reference_loss)]:
        with meter.phase(run, phase):
            call()
        assert sys.getprofile() is before
    with pytest.raises(ValueError), meter.phase("DP", "loss"):
        raise ValueError
    assert sys.getprofile() is before
    line = reference_loss.__code__.co_firstlineno
    assert doctor.PLACES == {
        ("one process", "loss"): (f"reference_loss (line {line})", ""),
        ("TP", "loss"): (f"sharded_loss (line {line + 4})", ""),
    }


def test_the_optimizer_of_a_run(monkeypatch):
    """Its first step is noted, with the numbers that it has."""
    monkeypatch.setattr(doctor.Script, "path", jobs.Path(__file__))
    monkeypatch.setattr(doctor, "FORWARD", doctor.Forward())
    monkeypatch.setattr(doctor, "PLACES", {})
    parameters = [torch.nn.Parameter(FULL)]
    for run, rate in (("one process", 0.1), ("TP", 0.2)):
        doctor.FORWARD.outputs[run] = {}
        for lr in (rate, 0.3):
            optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.5)
            doctor.note_optimizer(optimizer, (), {})
    for run, rate in (("one process", 0.1), ("TP", 0.2)):
        what, where = doctor.PLACES[run, "update"]
        assert what == f"SGD (lr {rate}, momentum 0.5, dampening 0, weight_decay 0)"
        assert re.fullmatch(r" at line \d+ in test_the_optimizer_of_a_run", where)


EDITED = """
def __torch_dispatch__():
    raise ValueError

def product():
    __torch_dispatch__()
"""


def test_the_line_that_raised_is_not_the_counters():
    """PyTorch calls METER for each operation: the script's line called that."""
    path = str(doctor.Script.path.parent / "edited.py")
    namespace = {}
    exec(compile(EDITED, path, "exec"), namespace)
    with pytest.raises(ValueError) as raised:
        namespace["product"]()
    assert doctor.where_raised(raised.value) == ["  edited.py:6 in product: "]


def test_ranks_whose_reference_differs():
    """From the first module on that is not the same; stages are not compared."""
    names = (doctor.INPUT, "drop", "head")
    one, two = (dict(zip(names, outputs_of(FULL, FULL, FULL))) for _ in range(2))
    assert doctor.where_ranks_differ([one, two]) == ""
    two |= dict(zip(names[1:], outputs_of(FULL + 1, FULL - 1)))
    assert doctor.where_ranks_differ([one, two]).startswith(
        "not the same on all ranks, from drop on"
    )
    assert doctor.where_ranks_differ([one, dict(list(two.items())[1:])]) == ""
    two = dict(zip(names, outputs_of(FULL, *HALVES)))  # a stage's activations
    assert doctor.where_ranks_differ([one, two]) == ""


def failed(name: str, text: str, differs=False) -> dict:
    is_formula = name.startswith(("calls", "bytes"))
    kind = name.partition(":")[0]
    check = {"name": name, "kind": kind, "text": text, "diff": 1.0, "allowed": 1e-5}
    return check | {"is_formula": is_formula, "differs": differs}


@pytest.fixture
def runs(monkeypatch):
    """Two runs: one process, and TP, which has its own functions and optimizer."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    forward = doctor.Forward()
    forward.outputs = {"one process": {}, "TP": {}}
    monkeypatch.setattr(doctor, "FORWARD", forward)
    places = {
        ("one process", "loss"): ("reference_loss (line 5)", ""),
        ("TP", "loss"): ("sharded_loss (line 9)", ""),
        ("one process", "clipping"): ("norm_by_pytorch (line 20)", ""),
        ("TP", "clipping"): ("global_norm (line 30)", ""),
        ("one process", "update"): ("AdamW", " at line 1"),
        ("TP", "update"): ("SGD", " at line 2"),
    }
    monkeypatch.setattr(doctor, "PLACES", places)


MISSING = failed(
    "calls: TP backward all-reduce tp", "0 calls per step, the lesson has 1"
)
MORE = failed("calls: TP backward all-reduce tp", "2 calls per step, the lesson has 1")
PARTIAL = [failed(f"gradients: {name}, TP", "off by 0.1", differs=True)
           for name in ("embed.weight", "norm.bias", "head.bias")]  # fmt: skip
PARTIAL[-1]["differs"] = False  # the replicas of this one are wrong, and the same
TWICE = failed("gradients: norm.bias, TP", "2 times the expected tensor")
ZERO = failed("gradients: norm.bias, TP", "0 times the expected tensor")
FOUR = failed("gradients: embed.weight, TP", "4 times the expected tensor")
HINTS = {
    "TP backward: a sum over ranks is missing (all-reduce over tp: 0 calls per step":
        [failed("replicas: norm.bias, tp", "ranks of tp differ by 0.1"), MISSING],
    "TP: the loss of step 1 is right, but ranks have different gradients of norm.bias":
        [*PARTIAL, failed("losses: loss, step 2, TP", "1, expected 2")],
    "TP: the loss of step 1 is right, gradients are wrong: nearest to the output is "
    "head.bias":
        [PARTIAL[-1]],
    "TP backward: a call too many, and gradients 2 times too large (all-reduce over tp":
        [FOUR, TWICE, MORE],
    "gradients are T times too large: a sum where a mean belongs": [TWICE],
    "no gradient arrived: autograd does not track all_reduce":
        [ZERO],
    "a gradient has the shape of a slice: is p.sharding of its parameter set?":
        [failed("gradients: w, TP", "shape [4, 2], expected [4, 4]")],
    "TP: the model's output is right, the loss made from it is wrong":
        [failed("losses: loss, step 1, TP", "1, expected 2")],
    "the loss is computed in two places, and a change of it must be made in both: one "
    "process by reference_loss (line 5); TP by sharded_loss (line 9)":
        [failed("losses: loss, step 1, TP", "1, expected 2")],
    "TP: losses and gradients are right, their norm is wrong":
        [failed("norms: ‖g‖, step 1, TP", "1, expected 2")],
    "the norm is computed in two places, and a change of it must be made in both: one "
    "process by norm_by_pytorch (line 20); TP by global_norm (line 30)":
        [failed("norms: ‖g‖, step 1, TP", "1, expected 2")],
    "TP: step 1 agrees, the update differs":
        [failed("losses: loss, step 2, TP", "1, expected 2")],
    "the update is computed in two places, and a change of it must be made in both: "
    "one process by AdamW at line 1; TP by SGD at line 2":
        [failed("parameters: norm.bias, TP", "off by 0.1")],
}  # fmt: skip


@pytest.mark.parametrize("hint", HINTS)
def test_conclusions(runs, hint):
    places = {"TP": doctor.RIGHT}
    said = doctor.conclusions(HINTS[hint], places)
    assert any(line.startswith(hint) for line in said), said


def test_the_place_comes_first_if_forward_is_wrong(runs):
    """A cause that is named comes before a place in backward."""
    place = "forward is right up to a and wrong from b on"
    loss = failed("losses: loss, step 1, TP", "1, expected 2")
    said = doctor.conclusions([loss, *PARTIAL, MISSING], {"TP": place})
    assert said[0] == f"TP: {place}" and "sum over ranks is missing" in said[1]
    said = doctor.conclusions([*PARTIAL, MISSING], {"TP": doctor.RIGHT})
    assert "sum over ranks is missing" in said[0] and said[1].startswith(
        "TP: the loss of step 1 is right"
    )


@pytest.mark.parametrize("checks", [
    [failed("gradients: norm.bias, TP", "off by 0.1")],  # the first thing that is wrong
    [*PARTIAL, failed("losses: loss, step 1, TP", "1, expected 2")],  # forward is wrong
    [PARTIAL[-1]],
    [ZERO, MISSING],  # no gradient has reached that call
    [MISSING], [MORE],  # a formula alone
    [failed("norms: ‖g‖, step 1, TP", "1, expected 2"), TWICE, MORE],
    [failed("losses: loss, step 1, TP", "1, expected 2")],  # forward may be wrong
    [failed("runs: TP", "ValueError"), failed("norms: ‖g‖, step 1, TP", "none")],
])  # fmt: skip
def test_no_conclusion_that_does_not_follow(runs, checks):
    said = " ".join(doctor.conclusions(checks, {}))
    assert not re.search("two places|missing|part of the sum", said), said


def without_wait():
    text = jobs.PATHS["00_collectives"].read_text("utf-8")
    assert text.count("    work.wait()\n") == 1
    return run_edited("00_collectives", text.replace("    work.wait()\n", ""))


def wrong_chunk():
    text = jobs.PATHS["00_collectives"].read_text("utf-8")
    old, new = "send_chunk = (rank - step) % T", "send_chunk = (rank - step + 1) % T"
    assert text.count(old) == 1
    return run_edited("00_collectives", text.replace(old, new), jobs.torchrun)


def run_edited(lesson: str, text: str, start=jobs.launch):
    """A lesson with another text under the doctor: the end of torchrun's report."""
    with jobs.tempfile.TemporaryDirectory() as folder:
        path = jobs.Path(folder, f"{lesson}.py")
        path.write_text(text, "utf-8")
        done = start(jobs.DOCTOR, 2, path, "--timeout", "20")
    return jobs.bug.what_failed("", done.err)


@pytest.mark.ahead.with_args(without_wait)
def test_a_sum_that_is_not_waited_for():
    said = " ".join(jobs.begin(without_wait).result().split())
    assert said.startswith("✗ values: a sum started, then waited for: "), said
    assert "doctor: wait() is missing for call " in said
    assert " of ranks [0, 1], all_reduce [2] over tp, line " in said


@pytest.mark.ahead.with_args(wrong_chunk)
def test_a_ring_that_gloo_aborts():
    """The exercise of every first ring: an index that is off by one."""
    said = jobs.begin(wrong_chunk).result()
    assert said.startswith("doctor: ") and "rank 1: in call " in said, said
    assert "in ring_all_reduce" in " ".join(said.split())
    assert "the first difference: message 4 from rank" in said
    assert "was aborted (SIGABRT): it got a message of another size" in said


# All ways to name the other end of a message; a group that ends before the others, and
# a rank that leaves without a word.
PLAIN = """
from datetime import timedelta
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([1, 2])
x = torch.full((1,), float(rank))
label = torch.zeros(2)  # of a class, not of a message
if rank == 1:
    dist.send(x, 2, group=pair)
    dist.send(x, group=pair, group_dst=1)
    dist.isend(tensor=x, dst=2).wait(timeout=timedelta(seconds=30))
if rank == 2:
    for source in [dict(src=1, group=pair), dict(group=pair, group_src=0), {}]:
        dist.recv(x, **source)
        assert x.item() == 1.0, source
if rank > 0:
    dist.destroy_process_group(group=pair)
dist.all_reduce(x)
assert x.item() == 2.0, x
print(f"rank {rank} has ended well", flush=True)
if rank > 0:
    dist.destroy_process_group()
"""


def plain_script():
    with jobs.tempfile.TemporaryDirectory() as folder:
        path = jobs.Path(folder, "plain.py")
        path.write_text(PLAIN, "utf-8")
        return jobs.launch(jobs.DOCTOR, 3, path)


@pytest.mark.ahead.with_args(plain_script)
def test_a_script_that_is_no_lesson_runs_unchanged():
    done = jobs.begin(plain_script).result()
    assert done.code == 0, done.text
    assert "rank 0 has ended well" in done.text


@pytest.mark.parametrize("name, run, wanted", [
    ("gradients: norm.bias, TP + SP", "TP", False),
    ("gradients: norm.bias, TP + SP", "TP + SP", True),
    ("gradients: norm.bias, TP", "TP", True),
    ("replicas: norm.bias, ring, cp", "ring", True),
    ("runs: DTensor", "DTensor", True),
    ("calls: TP forward all-reduce tp", "TP", False),
])  # fmt: skip
def test_a_check_belongs_to_a_run_by_its_whole_name(name, run, wanted):
    assert doctor.is_of({"name": name}, run) is wanted
