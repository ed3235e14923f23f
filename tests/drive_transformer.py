"""Four ranks train lesson 02's split transformer on random sizes, beside the whole one.

    torchrun --nproc_per_node=4 drive_transformer.py FOLDER

Every rank trains the whole model alone, cuts out what it should hold, and compares that
with what the lesson's parallel model has (in_ranks.Twins).
"""

import random

import torch
import torch.nn.functional as F
from in_ranks import (
    Twins,
    difference,
    exact,
    gradients,
    groups_of_4,
    load,
    random_batch,
    random_model,
    refused,
    run,
)

lesson = load("02_transformer_tp")
MODELS, DROPOUTS, STEPS = 64, 48, 3


def try_model(number: int, group) -> dict:
    """Three steps of training and one forward without dropout, both ways: from random
    upstream gradients at first, then from the mean loss."""
    full, B, S, generator = random_model(lesson, number, group.size())
    twins = Twins(lesson, full, lesson.tp_transformer(full, group), group, by_rows=())
    alone, tp = twins.alone, twins.split
    for step in range(STEPS):
        tokens, target, upstream = random_batch(full.config, B, S, generator)
        torch.manual_seed(1000 * number + step)
        wanted = alone(tokens)
        torch.manual_seed(1000 * number + step)
        got = tp(tokens)
        twins.note("logits", difference(got, wanted))
        if step == 0:
            wanted.backward(upstream)
            got.backward(upstream)
        else:
            F.cross_entropy(wanted.flatten(0, 1), target.flatten()).backward()
            lesson.mean_loss(got, target).backward()
        twins.compare("gradients", gradients(tp), gradients(alone))
        twins.update((0.3, 3.0, 0.01)[(number + step) % 3])
    with torch.no_grad():
        twins.note("eval", difference(tp.eval()(tokens), alone.eval()(tokens)))
    about = dict(T=group.size(), config=full.config._asdict(), B=B, S=S)
    return about | dict(diffs=twins.end())


def try_dropout(number: int, group) -> dict:
    """A slice of the full mask where x is a slice, the full mask where x is whole:
    differences of output, of gradient; whether the generators moved on alike."""
    rng = random.Random(f"dropout {number}")
    T, r = group.size(), group.rank()
    shape = [T * rng.randint(1, 3) for _ in range(4)]
    dim, p = rng.randrange(4), rng.choice([0.1, 0.25, 0.5, 0.9])
    x, upstream = torch.randn(2, *shape, dtype=torch.float64)
    torch.manual_seed(number)
    keep = torch.rand(shape) >= p
    after = torch.rand(3)
    part = lambda whole: whole.tensor_split(T, dim)[r].contiguous()
    ways = {
        "sharded": (lesson.ShardedDropout(p, dim, group), part),
        "whole": (lesson.Dropout(p), lambda whole: whole),
    }
    found = {}
    for name, (dropout, cut) in ways.items():
        mine = cut(x).clone().requires_grad_()
        torch.manual_seed(number)
        got = dropout(mine)
        in_step = torch.equal(torch.rand(3), after)
        got.backward(cut(upstream))
        plain = [cut((whole / (1 - p)).where(keep, 0)) for whole in (x, upstream)]
        found[name] = [*map(difference, (got, mine.grad), plain), exact(in_step)]
    return dict(T=T, dim=dim, p=p, diffs=found)


def refusals(group) -> dict:
    """What a model says whose heads do not divide."""

    def split(heads: int, kv_heads: int) -> None:
        config = lesson.Config(5, 8 * heads, heads, kv_heads, 1, 4, 0)
        lesson.tp_transformer(lesson.Transformer(config), group)

    return refused({"kv-heads": lambda: split(4, 1), "heads": lambda: split(2, 1)})


def main() -> dict:
    groups = groups_of_4(lesson)
    torch.manual_seed(0)
    return dict(
        models=[try_model(n, groups[n % 4]) for n in range(MODELS)],
        dropouts=[try_dropout(n, groups[n % 4]) for n in range(DROPOUTS)],
        refusals=refusals(groups[2]),
    )


if __name__ == "__main__":
    run(main)
