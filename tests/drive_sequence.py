"""Four ranks: lesson 04's split sequence against plain torch, forward and backward.

    torchrun --nproc_per_node=4 drive_sequence.py FOLDER

Every rank computes the whole thing alone, in float64, and cuts out what it should have.
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
    return twins.train(loss_of, sum_up) | dict(save=save)


def try_recompute(number: int, group) -> dict:
    """A layer in each way of the lesson's memory table; where it is computed again: are
    output and gradients, to the bit, those of the layer that keeps all?"""
    T = group.size()
    B, S, D = 1 + number % 3, T * (1 + number % 2), 4 * T
    torch.manual_seed(number)
    model = lesson.Transformer(lesson.Config(1, D, T, T, 1, S, 0.3)).double()
    tables = model.cos, model.sin, model.future
    x, upstream = torch.randn(2, B, S, D, dtype=torch.float64)
    my_positions = lambda whole: lesson.shard(whole, 1, group)
    results, same = {}, {}
    for way, layer, *_ in lesson.layer_variants(model.layers[0], group, 0, 0):
        cut = my_positions if "SP" in way else torch.clone
        mine = cut(x).requires_grad_()
        torch.manual_seed(number)
        y = layer(mine, tables)
        y.backward(cut(upstream))
        results[way] = [y, mine.grad, *(p.grad for p in layer.parameters())]
        if "full" in way or "selective" in way:
            plain = results["TP + SP" if "SP" in way else "TP"]
            same[way] = all(map(torch.equal, results[way], plain))
    return same


def main() -> dict:
    groups = groups_of_4(lesson) * (MODELS // 4)
    models = [try_model(n, g) for n, g in enumerate(groups) if is_ours(n, g)]
    recomputes = [try_recompute(n, group) for n, group in enumerate(groups[:8])]
    return dict(models=models, recomputes=recomputes)


if __name__ == "__main__":
    run(main)
