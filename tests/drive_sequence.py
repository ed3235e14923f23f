"""Four ranks: lesson 04's split sequence against plain torch, forward and backward.

    torchrun --nproc_per_node=4 drive_sequence.py FOLDER

Every rank computes the whole thing alone, in float64, and cuts out what it should have.
"""

from functools import partial

import torch
from in_ranks import MODELS, Twins, difference, groups_of_4, is_ours, load, run

lesson = load("04_sequence_parallel")


def try_model(number: int, group) -> dict:
    save = number % 3 == 0
    split = partial(lesson.sp_transformer, save_gathered=save)
    twins = Twins(lesson, number, group, split, pads=True)
    V = twins.config.vocab_size
    loss_of = partial(lesson.sharded_loss, tp_group=group, vocab_size=V)
    sum_up = partial(lesson.all_reduce_replicated_gradients, tp_group=group)
    return twins.train(loss_of, sum_up) | dict(save=save)


def kept_aside(node) -> list:
    """Tensors that Functions keep as attributes of their ctx, where no hook sees them
    and no count of bytes."""
    values = getattr(node, "__dict__", {}).values()
    found = [x for x in values if isinstance(x, torch.Tensor)]
    for before, _ in node.next_functions:
        found += kept_aside(before) if before else []
    return found


def try_recompute(number: int, group) -> dict:
    """A layer in each way of the lesson's memory table: its output and gradients are
    the whole layer's; where it is computed again, to the bit the parallel layer's."""
    T = group.size()
    B, S, D, N = 1 + number % 3, T * (1 + number % 2), 4 * T, T
    torch.manual_seed(number)
    model = lesson.Transformer(lesson.Config(1, D, N, N, 1, S, 0.3)).double()
    tables = model.cos, model.sin, model.future
    x, upstream = torch.randn(2, B, S, D, dtype=torch.float64)
    my_positions = lambda whole: whole.tensor_split(T, 1)[group.rank()].clone()
    results, diffs, bits, draws, aside = {}, {}, {}, set(), 0
    for way, layer, *_ in lesson.layer_ways(model.layers[0], group, 0, 0):
        cut = my_positions if "SP" in way else torch.clone
        mine = cut(x).requires_grad_()
        torch.manual_seed(number)
        y = layer(mine, tables)
        aside += len(kept_aside(y.grad_fn))
        y.backward(cut(upstream))
        draws.add(torch.rand(()).item())
        here = {"y": y.detach(), "x": mine.grad}
        whole = results.get("without TP", here)
        diffs[way] = max(difference(here[key], cut(whole[key])) for key in "yx")
        for name, p in layer.named_parameters():
            here[name.replace("inner.", "")] = p.grad
        results[way] = here
        if "full" in way or "selective" in way:
            plain = results["TP + SP" if "SP" in way else "TP"]
            same = [torch.equal(here[name], plain[name]) for name in plain]
            bits[way] = here.keys() == plain.keys() and all(same)
    return dict(
        T=T, diffs=diffs, bits=bits, tensors=len(here), draws=len(draws), aside=aside
    )


def main() -> dict:
    groups = groups_of_4(lesson) * (MODELS // 4)
    models = [try_model(n, g) for n, g in enumerate(groups) if is_ours(n, g)]
    recomputes = [try_recompute(n, group) for n, group in enumerate(groups[:8])]
    return dict(models=models, recomputes=recomputes)


if __name__ == "__main__":
    run(main)
