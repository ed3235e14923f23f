"""tools/audit.py on bugs of the lessons and on right models, in one set of ranks.

torchrun --nproc_per_node=2 drive_audit.py FOLDER
"""

import os
import sys
import types
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from in_ranks import load, run
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from audit_findings import findings_of
from audit_rank import CallCounter, audit

RIGHT = 60  # right models of random sizes


class Quiet:
    """A store that nobody reads."""

    def set(self, key: str, value: str) -> None:
        pass


def findings(subject, steps: int = 2) -> dict:
    """What the audit says of a model, on all ranks of this driver."""
    options = dict(dtype="float64", seed=1, steps=steps, clip=0.5, timeout=60)
    counter = CallCounter(Quiet(), dist.get_rank())
    facts = audit(subject, types.SimpleNamespace(**options), counter, "cpu")
    torch.set_default_dtype(torch.float32)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    found = findings_of(everyone, "float64")
    categories = [[f["category"], f["where"]] for f in found["findings"]]
    return {"categories": categories}


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
        tokens = torch.randint(V, (2, 3, S))
        return tokens[0], tokens[1]

    return types.SimpleNamespace(build=build, parallelize=make, batch=batch, **more)


def sharded_loss(lesson, V):
    """Lesson 03's loss of sharded logits; plain cross entropy for the full model."""

    def loss(output, target, tp_group):
        if tp_group is None:
            return lesson.mean_loss(output, target)
        return lesson.sharded_loss(output, target, tp_group, V)

    return loss


def subject_of(number: str, lesson):
    """The model of a lesson, by its own edits."""
    if number == "01":
        return mlp_subject(lesson)
    if number == "02":
        return transformer_subject(
            lesson, lesson.tp_transformer, clip=clip_of(lesson),
        )  # fmt: skip
    V = 31
    loss = sharded_loss(lesson, V)
    if number == "03":
        make = lesson.vocab_transformer
        return transformer_subject(lesson, make, V, loss=loss, clip=clip_of(lesson))
    group = []

    def make(model, tp_group):
        group.append(tp_group)
        return lesson.sp_transformer(model, tp_group)

    def after_backward(model):
        lesson.all_reduce_replicated_gradients(model, group[-1])

    return transformer_subject(
        lesson, make, V, loss=loss, clip=clip_of(lesson), after_backward=after_backward,
    )  # fmt: skip


def clip_of(lesson):
    def clip(model, max_norm):
        norm = lesson.global_norm(model, dist.group.WORLD)
        lesson.clip_gradients(model, max_norm, norm)
        return norm

    return clip


def fresh(name: str):
    """A lesson that no bug has changed."""
    sys.modules.pop(name, None)
    return load(name)


def try_bug(name: str, bug: str) -> dict:
    lesson = fresh(name)
    lesson.apply_edit(lesson.BREAKS[bug], vars(lesson))
    try:
        found = findings(subject_of(name[:2], lesson))
    except Exception as error:
        found = {"categories": [["raised", f"{type(error).__name__}: {error}"[:200]]]}
    return {"lesson": name, "bug": bug, **found}


BUGS = {
    "01_naive_mlp_tp": ["f", "g", "bias"],
    "02_transformer_tp": ["seed", "qkv", "mask-heads", "mask-residual", "clip"],
}


def main() -> dict:
    found = {"bugs": [], "right": []}
    for name, bugs in BUGS.items():
        for bug in bugs:
            found["bugs"].append(try_bug(name, bug))
            if dist.get_rank() == 0 and os.environ.get("SHOW"):
                print(found["bugs"][-1], flush=True)
    return found


if __name__ == "__main__":
    run(main)
