"""tools/small_audit.py, pasted into a script: right models, the bugs of 01 and 02."""

import json
import re
import tempfile
from pathlib import Path

import jobs
import pytest

FILE = jobs.ROOT / "tools" / "small_audit.py"
PAGE = jobs.ROOT / "docs" / "audit.md"

# What a user's script has below the pasted file.
SCRIPT = '''
import copy, hashlib, importlib, itertools, json, os, sys
from pathlib import Path
from types import SimpleNamespace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
import torch.nn.functional as F

torch.set_num_threads(1)
dist.init_process_group("gloo")
group = dist.group.WORLD
RANK, T = group.rank(), group.size()
here = Path(sys.argv[1])
found = {}


def load(bug, number):
    """A lesson with this bug, or without one."""
    (path,) = (here / bug).glob(f"{number}_*.py")
    sys.path.insert(0, str(path.parent))
    sys.modules.pop(path.stem, None)
    lesson = importlib.import_module(path.stem)
    sys.path.pop(0)
    return lesson


def audit(name, full, make, run, **more):
    parallel = make(copy.deepcopy(full))
    found[name] = check(full, parallel, run, group, **more)


def squares(model):
    """The loss of one batch, the same on all ranks, and its backward."""
    x, target = torch.randn(2, 2, 3, 8, dtype=torch.float64)
    loss = F.mse_loss(model(x), target)
    loss.backward()
    return loss


def on_the_mlp(bug, kind):
    lesson = load(bug or "none", "01")
    full = nn.Sequential(nn.Linear(8, 8), lesson.MLP(8, 16)).double()
    parallel = {
        "tp": lesson.tp_mlp, "naive": lesson.naive_mlp, "dtensor": lesson.dtensor_mlp
    }

    def make(model):
        model[1] = parallel[kind](model[1], group)
        return model

    audit(f"01 {bug} {kind}", full, make, squares)


def on_the_batch(bug):
    """Data parallelism: the same weights, each rank has its slice of the batch."""
    lesson = load(bug or "none", "01")
    sizes = SimpleNamespace(seed=1, steps=2, batch_size=2, seq_len=3, hidden=8)
    batch = torch.randn(2, 2, 3, 8, dtype=torch.float64)
    full = lesson.MLP(8, 16).double()

    def run(model):
        dp_group = None if model is full else group
        losses = lesson.train_mlp("run", model, batch, sizes, dp_group).losses
        return list(losses.values())[-1]

    audit(f"01 {bug} dp", full, lambda model: model, run)


def on_the_transformer(bug, kind="tp"):
    lesson = load(bug or "none", "02")
    full = lesson.Transformer(lesson.Config(30, 16, 4, 4, 2, 8, 0.2)).double()
    steps = 1 if bug in ("clip", "drift") else 2
    batches = [tuple(torch.randint(30, (2, 2, 8))) for _ in range(steps)]
    settings = SimpleNamespace(seed=1, clip=0.01)

    def make(model):
        if kind == "dtensor":
            return lesson.dtensor_transformer(model, lesson.tp_plan(), group)
        return lesson.tp_transformer(model, group)

    def run(model):
        tp_group = group if model is not full and kind == "tp" else None
        done = lesson.train_transformer("run", model, batches, settings, tp_group)
        return list(done.losses.values())[-1]

    audit(f"02 {bug} {kind}", full, make, run)


class Gated(nn.Module):
    """Gate and up in one linear, of 8 rows each."""

    def __init__(self):
        super().__init__()
        self.fused, self.down = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        gate, up = self.fused(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def on_a_fused_linear(bug):
    lesson = load("none", "01")

    def slices(x):
        blocks = x.detach().chunk(1 if bug == "one block" else 2)
        return nn.Parameter(torch.cat([b.chunk(T)[RANK] for b in blocks]))

    def make(model):
        model.fused.weight = slices(model.fused.weight)
        model.fused.bias = slices(model.fused.bias)
        model.down = lesson.RowParallelLinear(model.down, group)
        return model

    blocks = {} if bug == "not told" else {"fused": [8, 8]}
    audit(f"fused {bug}", Gated().double(), make, squares, blocks=blocks)


def on_replicas(bug):
    """What happens to a gradient or a tensor, of a model that all ranks have."""
    full = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8)).double()

    def make(model):
        with torch.no_grad():
            if bug == "rank 0's":  # rank 1 has the slice of rank 0
                model[0].weight = nn.Parameter(model[0].weight.chunk(T)[0].clone())
                model[0].forward = lambda x: full[0](x)
            if bug == "nan" and RANK == 1:
                model[1].weight[0] = float("nan")
        return model

    def run(model):
        with torch.set_grad_enabled(bug not in ("served", "served wrong")):
            x, target = torch.randn(2, 2, 3, 8, dtype=torch.float64)
            loss = F.mse_loss(model(x), target)
        if model is not full and bug == "served wrong":
            return loss * 2
        if loss.requires_grad:
            loss.backward()
        grad = model[0].weight.grad
        if model is not full and bug == "by rank":
            grad *= RANK + 2
        if model is not full and bug == "permuted":
            grad.copy_(grad.roll(1, 1))
        if model is not full and bug == "none" and RANK == 1:
            model[0].weight.grad = None
        return loss

    audit(f"replicas {bug}", full, make, run)


def on_dtensors(bug):
    """Each rank has its rows of the batch: a DTensor's gradient is a partial sum."""
    mesh = DeviceMesh.from_group(group, "cpu")
    full = nn.Linear(8, 4).double()

    def make(model):
        return distribute_module(model, mesh)

    def run(model):
        x = torch.randn(4, 8, dtype=torch.float64)
        if model is not full:
            x = distribute_tensor(x, mesh, [Shard(0)])
        loss = model(x).square().mean()
        loss.backward()
        if model is not full and bug == "doubled":
            model.weight.grad *= 2
        return loss

    audit(f"dtensors {bug}", full, make, run)


def on_a_hook(text):
    """The page's hook of an optimizer: which step raises, and what it says."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            dist.broadcast(p, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replicated, every = dict(model.named_parameters()), 2
    exec(text, globals() | locals())
    said = []
    for step in range(1, 7):
        model(torch.ones(4)).sum().backward()
        if step == 3 and RANK == 1:
            model.bias.data[0] += 1e-6
        try:
            optimizer.step()
        except AssertionError as error:
            said.append((step, str(error)))
    found["hook"] = said


todo = json.loads((here / "todo.json").read_text())
torch.manual_seed(5)  # the same full models on all ranks
for name, *arguments in todo:
    globals()[name](*arguments)
(here / f"rank{RANK}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
'''

TODO = [
    *(["on_the_mlp", "", kind] for kind in ("tp", "naive", "dtensor")),
    *(["on_the_mlp", bug, "tp"] for bug in ("f", "g", "bias")),
    ["on_the_mlp", "f", "naive"],
    ["on_dtensors", ""],
    ["on_dtensors", "doubled"],
    *(["on_the_batch", bug] for bug in ("", "average")),
    *(["on_the_transformer", "", kind] for kind in ("tp", "dtensor")),
    *(["on_the_transformer", bug] for bug in jobs.bug.bugs_of("02")),
    *(["on_a_fused_linear", bug] for bug in ("", "one block", "not told")),
    *(["on_replicas", bug] for bug in ("", "served", "served wrong", "by rank")),
    *(["on_replicas", bug] for bug in ("permuted", "none", "nan", "rank 0's")),
]


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for number in ("01", "02"):
            for bug, edit in jobs.bug.bugs_of(number).items():
                write(here / bug, *jobs.bug.edited(number, edit))
            (path,) = jobs.ROOT.glob(f"{number}_*.py")
            write(here / "none", path, path.read_text("utf-8"))
        (here / "script.py").write_text(FILE.read_text("utf-8") + SCRIPT, "utf-8")
        (here / "todo.json").write_text(json.dumps([*TODO, ["on_a_hook", the_hook()]]))
        done = jobs.launch(here / "script.py", 2, here)
        assert done.code == 0, done.text
        found = [json.loads((here / f"rank{r}.json").read_text()) for r in range(2)]
        return found, done.out


def write(folder: Path, path: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_text(text, "utf-8")


def the_hook() -> str:
    """The lines of the page that hash replicas."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    (hook,) = [block for block in blocks if "sha256" in block]
    return hook


RIGHT = ["01  tp", "01  naive", "01  dtensor", "01  dp", "02  tp", "02  dtensor"]
RIGHT += ["fused ", "replicas ", "replicas served", "dtensors "]

# A wrong model → what some of its faults begin with.
Q = "layers.0.self_attn.q_proj"
WRONG = {
    "01 f tp": ["gradients: 0.weight: partial", "backward: 0: partial"],
    "01 f naive": ["backward: 1.up_proj: partial"],
    "01 g tp": ["gradients: 1.up_proj.bias: 2 times", "backward: 1.up_proj: 2 times"],
    "01 bias tp": ["forward: 1.down_proj: off by one vector"],
    "01 average dp": ["backward: down_proj: 2 times"],
    "02 seed tp": [f"parameters, buffers: {Q}.weight: unexplained", f"forward: {Q}:"],
    "02 qkv tp": [f"parameters, buffers: {Q}.weight: right on ranks [0] only"],
    "02 mask-heads tp": ["forward: layers.0.self_attn.core.dropout: unexplained"],
    "02 mask-residual tp": ["forward: layers.0.dropout: unexplained"],
    "02 clip tp": ["gradients: norm.weight: 1.", f"gradients: {Q}.weight: 1."],
    "02 data tp": ["forward: embed_tokens: right on ranks [0] only"],
    "02 drift tp": ["gradients: norm.weight: right on ranks [0] only"],
    "fused one block": ["parameters, buffers: fused.weight: the right elements in"],
    "fused not told": ["parameters, buffers: fused.weight: the right elements in"],
    "dtensors doubled": ["gradients: weight: 2 times"],
    "replicas served wrong": ["loss: loss: ["],
    "replicas by rank": ["gradients: 0.weight: 2, 3 times"],
    "replicas permuted": ["gradients: 0.weight: the right elements in another order"],
    "replicas none": ["gradients: 0.weight: right on ranks [0] only"],
    "replicas nan": ["parameters, buffers: 1.weight: nan or inf on ranks [1]"],
    "replicas rank 0's": ["parameters, buffers: 0.weight: the pieces of ranks [0, 0]"],
}


def test_all_ranks_return_the_same(ranks):
    assert ranks[0][0] == ranks[0][1]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_has_no_fault(ranks, name):
    assert ranks[0][0][name] == []


@pytest.mark.parametrize("name", WRONG)
def test_a_bug_is_found_at_its_place(ranks, name):
    faults = ranks[0][0][name]
    for begin in WRONG[name]:
        assert [fault for fault in faults if fault.startswith(f"✗ {begin}")], faults


def test_every_bug_of_the_lessons_is_tried():
    for number in ("01", "02"):
        for bug in jobs.bug.bugs_of(number):
            assert [name for name in WRONG if name.startswith(f"{number} {bug} ")]


def test_only_what_was_said_is_there(ranks):
    assert {*ranks[0][0]} == {*RIGHT, *WRONG, "hook"}


def test_the_report(ranks):
    """A line per kind, by placement, then the faults, then the verdict."""
    said = ranks[1]
    assert "gradients: 3 replicated, 2 Shard(0), 1 Shard(1)\n" in said
    assert said.count("right in all that was compared") == len(RIGHT)
    assert said.count("WRONG") == len(WRONG)
    # A right model shows no places: a gradient in front of f may be partial.
    assert said.count("forward: ") >= said.count("WRONG")
    assert "right in all" in said.partition("forward: ")[0]


def test_the_page_shows_a_report(ranks):
    """docs/audit.md has what is printed of bug f."""
    (report,) = re.findall(r"```text\n(parameters, .*?)```", PAGE.read_text(), re.S)
    assert "gradients: 0.weight: partial" in report and report in ranks[1]


def test_the_hook_names_replicas_that_differ(ranks):
    """Rank 1's bias is off from step 3 on; the hook looks at every second step."""
    said = ranks[0][0]["hook"]
    assert said == [[step, "replicas differ: ['bias']"] for step in (4, 6)]


def test_it_is_short_and_needs_torch_only():
    text = FILE.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    imported = re.findall(r"^(?:import|from) ([\w.]+)", text, re.M)
    assert {name.partition(".")[0] for name in imported} == {
        "collections", "functools", "torch"
    }  # fmt: skip
