"""tools/audit.py on bugs of the lessons and on right models, in one set of ranks.

torchrun --nproc_per_node=2 drive_audit.py FOLDER PART

PART is 0, 1 or 2: a third of all that is tried.
The suite tries 12 right models. AUDIT_RIGHT=60 tries 60, SHOW=1 prints each result.
"""

import copyreg
import os
import random
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from audit_models import MODELS, block_subject, coarse_subject, renamed_subject
from in_ranks import load, run
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from audit.findings import findings_of
from audit.rank import audit
from audit.record import CallCounter


def reduced(tensor):
    """For pickle: of many small ones, ten times as fast as PyTorch's way."""
    if tensor.dtype == torch.bfloat16 or tensor.requires_grad:
        return tensor.__reduce_ex__(2)
    return torch.from_numpy, (tensor.numpy(),)


copyreg.pickle(torch.Tensor, reduced)
# torch's own looks for GPUs, and notes each time who called: a tenth of all seconds.
torch.manual_seed = torch.default_generator.manual_seed
RIGHT = int(os.environ.get("AUDIT_RIGHT", "12"))  # right models of random sizes


GROUPS = {}  # by their ranks: gloo has a thread for each group, which wakes often


def same_group(new_group, ranks=None, *args, **options):
    """A group of these ranks, one for all models; the first call's options hold."""
    key = tuple(ranks or range(dist.get_world_size()))
    if key not in GROUPS:
        GROUPS[key] = new_group(ranks, *args, **options)
    return GROUPS[key]


def findings(subject, steps: int = 2) -> dict:
    """What the audit says of a model, on all ranks of this driver."""
    options = dict(dtype="float64", seed=1, steps=steps, clip=0.5, timeout=60)
    counter = CallCounter(lambda phase, more="": None)
    facts = audit(subject, types.SimpleNamespace(**options), counter, "cpu")
    torch.set_default_dtype(torch.float32)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    found = findings_of(everyone, "float64")
    categories = [[f["category"], f["where"]] for f in found["findings"]]
    texts = [f["text"] for f in found["findings"]]
    pieces = {row["parameter"]: row["all"] for row in found["parameters"]}
    return {
        "categories": categories, "texts": texts[:1], "pieces": pieces,
        "not compared": found["not_compared"], "is split": found["is_split"],
        "changes": [f["change"] for f in found["findings"]],
        "own": [f["category"] for f in found["findings"] if not f["follows"]],
        "is rounding": found["is_rounding"],
    }  # fmt: skip


# Bugs: each is an edit of a lesson, and the model is the one that shows it.


def mlp_subject(lesson, make=None):
    """Lesson 01's MLP as one module."""
    make = make or lesson.tp_mlp

    def batch(step):
        return torch.randn(2, 3, 8), torch.randn(2, 3, 8)

    return types.SimpleNamespace(
        build=lambda: nn.Sequential(nn.Linear(8, 8), lesson.MLP(8, 16)),
        parallelize=partial(parallel_mlp, make), batch=batch,
    )  # fmt: skip


def parallel_mlp(make, model, tp_group):
    model[1] = make(model[1], tp_group)
    return model


def transformer_subject(
    lesson, make, V=30, tied=False, heads=4, kv_heads=4, S=8, **more
):
    config = lesson.Config(V, 8 * heads, heads, kv_heads, 2, S, 0.2)

    def build():
        model = lesson.Transformer(config)
        if tied:
            model.lm_head.weight = model.embed_tokens.weight
        return model

    def batch(step):
        tokens, target = torch.randint(V, (2, 3, S))
        target[0, :2] = -100  # without a target
        return tokens, target

    return types.SimpleNamespace(build=build, parallelize=make, batch=batch, **more)


def sharded_loss(lesson, V):
    """Lesson 03's loss of sharded logits; plain cross entropy for the full model."""

    def loss(output, target, tp_group):
        if tp_group is None:
            return lesson.mean_loss(output, target)
        return lesson.sharded_loss(output, target, tp_group, V)

    return loss


def subject_of(number: str, lesson, **sizes):
    """The model of a lesson, by its own edits."""
    if number == "01":
        return mlp_subject(lesson)
    if number == "09":
        return shared_heads_subject(lesson)
    if number == "11":
        return cp_subject(lesson)
    sizes["clip"] = clip_of(lesson)
    if number == "02":
        return transformer_subject(lesson, lesson.tp_transformer, **sizes)
    sizes.setdefault("V", 31)
    sizes["loss"] = sharded_loss(lesson, sizes["V"])
    if number == "03":
        return transformer_subject(lesson, lesson.vocab_transformer, **sizes)
    groups = []

    def make(model, tp_group):
        groups.append(tp_group)
        return lesson.sp_transformer(model, tp_group)

    def after_backward(model):
        lesson.all_reduce_replicated_gradients(model, groups[-1])

    sizes["after_backward"] = after_backward
    return transformer_subject(lesson, make, **sizes)


def shared_heads_subject(lesson):
    """beyond/09's model: one key/value head on all ranks, and its own norm."""
    ranks = dist.get_world_size()
    kv_heads = ranks // 2
    groups = lesson.kv_groups(kv_heads, ranks, 60)

    def make(model, tp_group):
        groups["tp"] = tp_group
        tp_transformer = lesson.lesson02.tp_transformer
        return lesson.shared_heads_transformer(model, tp_transformer, groups)

    def clip(model, max_norm):
        norm = lesson.global_norm_shared(model, groups["tp"])
        lesson.lesson02.clip_gradients(model, max_norm, norm)
        return norm

    return transformer_subject(
        lesson.lesson02, make, heads=2 * ranks, kv_heads=kv_heads, clip=clip
    )


class OnItsPositions(nn.Module):
    """A model that takes this rank's positions of the tokens."""

    def __init__(self, module: nn.Module, slice_of):
        super().__init__()
        self.module = module
        self.slice_of = slice_of

    def forward(self, tokens_BS):
        return self.module(self.slice_of(tokens_BS))


def cp_subject(lesson, method: str = "ring", S: int = 8):
    """beyond/11's model: each rank has some positions of the sequence."""
    config = lesson.lesson02.Config(30, 32, 4, 4, 2, S, 0.0)
    groups = lesson.lesson00.mesh_groups({"cp": dist.get_world_size(), "tp": 1}, 60)
    method = lesson.METHODS[method]
    seen = []  # tokens of each forward

    def slice_of(tokens):
        seen.append(tokens)
        return lesson.split_positions((tokens, tokens), groups["cp"], method.layout)[0]

    def parallelize(model, cp_group):
        model = lesson.cp_transformer(model, method, cp_group, groups["tp"])
        return OnItsPositions(model, slice_of)

    def batch(step):
        tokens = torch.randint(30, (3, S))
        target = tokens.roll(-1, 1)
        target[:, -1] = -100
        target[0, :2] = -100  # ranks have different numbers of targets
        return tokens, target

    def loss(output, target, cp_group):
        if cp_group is None:
            return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        whole = (seen[-1], target)
        target_here = lesson.split_positions(whole, cp_group, method.layout)[1]
        return lesson.cp_loss(output, target_here, cp_group)

    def after_backward(model):
        lesson.sum_over_cp(model, groups["cp"])

    return types.SimpleNamespace(
        build=lambda: lesson.lesson02.Transformer(config), parallelize=parallelize,
        batch=batch, loss=loss, after_backward=after_backward,
    )  # fmt: skip


def clip_of(lesson):
    def clip(model, max_norm):
        norm = lesson.global_norm(model, dist.group.WORLD)
        lesson.clip_gradients(model, max_norm, norm)
        return norm

    return clip


def load_from(folder: Path, name: str):
    """A lesson or script of a copy of the course; nothing of another copy is kept."""
    paths = [*folder.glob("0*.py"), *folder.glob("beyond/*.py")]
    names = {path.stem for path in paths}
    for other in names.intersection(sys.modules):
        del sys.modules[other]
    sys.path[:0] = [str(folder / "beyond"), str(folder)]
    try:
        return load(name)
    finally:
        del sys.path[:2]


def try_bug(name: str, of: str) -> dict:
    number = name[:2]
    with tempfile.TemporaryDirectory() as folder:
        jobs.bug.copy_with_bug(number, jobs.bug.bugs_of(number)[of], Path(folder))
        lesson = load_from(Path(folder), name)
        try:
            sizes = {"tied": True} if of == "tie" else {}
            found = findings(subject_of(number, lesson, **sizes))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:200]
            found = {"categories": [["raised", text]]}
    return {"lesson": name, "bug": of, **found}


# What the first finding of each begins with. tools/bug.py says it, and the page of all
# bugs shows it.
BUGS = {}
for name in (*jobs.LESSONS, *jobs.BEYOND):
    told = {}
    if name[:2] in jobs.bug.NUMBERS:
        edits = jobs.bug.bugs_of(name[:2]).items()
        told = {of: edit["audit"] for of, edit in edits if "audit" in edit}
    if told:
        BUGS[name] = told


class GatedMLP(nn.Module):
    """A model that is not the course's: RMSNorm, a gate, no biases, its own split."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        x = self.norm(x)
        h = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return x + self.down_proj(h)


def gated_subject(lesson, hidden: int, width: int):
    def parallelize(model, tp_group):
        for name in ("gate_proj", "up_proj"):
            full = getattr(model[1], name)
            setattr(model[1], name, lesson.ColumnParallelLinear(full, tp_group))
        row = lesson.RowParallelLinear(model[1].down_proj, tp_group)
        model[1].down_proj = row
        return model

    def batch(step):
        return torch.randn(2, 5, hidden), torch.randn(2, 5, hidden)

    def build():
        return nn.Sequential(nn.Linear(hidden, hidden), GatedMLP(hidden, width))

    return types.SimpleNamespace(build=build, parallelize=parallelize, batch=batch)


def dtensor_subject(lesson, **sizes):
    def make(model, tp_group):
        return lesson.dtensor_transformer(model, lesson.tp_plan(), tp_group)

    return transformer_subject(lesson, make, **sizes)


def right_subject(number: int):
    """A right model of random sizes and one of seven kinds."""
    rng = random.Random(f"right {number}")
    T = dist.get_world_size()
    kv_heads = T * rng.randint(1, 2)
    sizes = dict(V=rng.choice([7, 16, 31]), S=T * rng.randint(1, 4))
    sizes.update(kv_heads=kv_heads, heads=kv_heads * rng.randint(1, 2))
    kind = number % 7
    if kind == 6:
        lesson = load("11_context_parallel")
        return cp_subject(lesson, rng.choice(list(lesson.METHODS)), 2 * sizes["S"])
    if kind == 0:
        return gated_subject(load("01_naive_mlp_tp"), 2 * rng.randint(2, 6), 4 * T)
    if kind == 1:
        return dtensor_subject(load("02_transformer_tp"), **sizes)
    name = ("02_transformer_tp", "03_vocab_parallel", "04_sequence_parallel")[kind % 3]
    if name[1] == "3":
        sizes["V"] = rng.choice([7, 31])  # padded for 2 ranks
    sizes["tied"] = kind != 2 and rng.random() < 0.5 and name[1] != "2"
    return subject_of(name[:2], load(name), **sizes)


def try_model(make, bug: str) -> dict:
    """A model of audit_models.py; bug "" is the right one."""
    try:
        found = findings(make(bug))
    except Exception as error:
        found = {"categories": [["raised", f"{type(error).__name__}: {error}"[:200]]]}
    return {"model": make.__name__, "bug": bug, **found}


def main() -> dict:
    dist.new_group = partial(same_group, dist.new_group)
    third = slice(int(sys.argv[2]), None, 3)
    found = {"bugs": [], "right": [], "models": [], "right models": []}
    if third.start == 0:
        found["unused copy"] = try_model(renamed_subject, "rank 0 adds it")
        found["not split"] = try_model(block_subject, "not split")
        found["coarse"] = [try_model(coarse_subject, bug) for bug in ("", "no f")]
    for make, bugs in [*MODELS.items()][third]:
        found["right models"].append(try_model(make, ""))
        show(found["right models"][-1])
        for bug, category in bugs.items():
            found["models"].append({"expected": category, **try_model(make, bug)})
            show(found["models"][-1])
    every_bug = [(name, *bug) for name, bugs in BUGS.items() for bug in bugs.items()]
    for name, bug, category in every_bug[third]:
        found["bugs"].append({"expected": category, **try_bug(name, bug)})
        show(found["bugs"][-1])
    for name in BUGS:
        load_from(jobs.ROOT, name)
    for number in range(RIGHT)[third]:
        said = findings(right_subject(number))
        found["right"].append({"number": number, **said})
        show(found["right"][-1])
    return found


def show(result: dict) -> None:
    if dist.get_rank() == 0 and os.environ.get("SHOW"):
        print(str(result)[:400], flush=True)


if __name__ == "__main__":
    run(main)
