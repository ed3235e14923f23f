"""Four ranks: lesson 04's split sequence against plain torch, forward and backward.

    torchrun --nproc_per_node=4 drive_sequence.py FOLDER

Every rank computes everything on its own in float64 and takes the slice that it should
have.
"""

from functools import partial

import torch
from in_ranks import MODELS, Twins, groups_of_4, is_ours, load, run

lesson = load("04_sequence_parallel")


def try_model(number: int, group) -> dict:
    save = number % 3 == 0
    split = partial(lesson.sp_transformer, save_gathered=save)
    twins = Twins(lesson, number, group, split, pads=True)
    V = twins.config.vocab_size
    loss_of = partial(lesson.sharded_loss, tp_group=group, vocab_size=V)
    sum_up = partial(lesson.all_reduce_replicated_gradients, tp_group=group)
    return dict(twins.train(loss_of, sum_up), save=save)


def try_recompute(number: int, group) -> dict:
    """Each variant of a layer: do output and gradients of those that recompute equal,
    bitwise, those of the one that saves everything?"""
    T = group.size()
    B, S, D = 1 + number % 3, T * (1 + number % 2), 4 * T
    torch.manual_seed(number)
    model = lesson.Transformer(lesson.Config(1, D, T, T, 1, S, 0.3)).double()
    tables = model.cos, model.sin, model.future
    x, upstream = torch.randn(2, B, S, D, dtype=torch.float64)
    my_positions = lambda whole: lesson.shard(whole, 1, group)
    results = {}
    for name, layer in lesson.layer_variants(model.layers[0], group).items():
        local = my_positions if "SP" in name else torch.clone
        mine = local(x).requires_grad_()
        torch.manual_seed(number)
        y = layer(mine, tables)
        y.backward(local(upstream))
        results[name] = [y, mine.grad, *(p.grad for p in layer.parameters())]
    same = {}
    for name, result in results.items():
        run, _, recompute = name.partition(", ")
        if recompute:
            same[name] = all(map(torch.equal, result, results[run]))
    return same


def main() -> dict:
    groups = groups_of_4(lesson) * (MODELS // 4)
    models = [try_model(n, g) for n, g in enumerate(groups) if is_ours(n, g)]
    recomputes = [try_recompute(n, group) for n, group in enumerate(groups[:8])]
    return dict(models=models, recomputes=recomputes)


if __name__ == "__main__":
    run(main)
