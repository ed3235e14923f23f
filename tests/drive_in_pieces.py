"""Four ranks: script 18's products, models and loss in pieces against plain torch.

    torchrun --nproc_per_node=4 drive_in_pieces.py FOLDER

Every rank computes everything on its own in float64 and takes the slice that it should
have.
"""

import random
from functools import partial

import torch
import torch.nn.functional as F
from in_ranks import (
    Twins,
    difference,
    groups_of_4,
    is_ours,
    load,
    random_sizes,
    run,
    transposed,
)
from torch import nn

lesson = load("18_in_pieces")
lesson00, lesson01, lesson04 = lesson.lesson00, lesson.lesson01, lesson.lesson04
CASES = 32  # of each kind; of 16 in a row, one for each group and number of pieces
# The dims along which x, the weight and the product are split.
SPLITS = {lesson.GatherThenMultiply: (1, 0, 2), lesson.MultiplyThenScatter: (2, 1, 1)}


class Sizes:
    """Of a random case: pieces, the group's sizes, and tensors of them."""

    def __init__(self, what: str, number: int, group):
        self.rng = rng = random.Random(f"{what} {number}")
        self.generator = torch.Generator().manual_seed(number)
        self.T, self.pieces = group.size(), 1 + number % 4
        self.B = rng.randint(1, 3)
        self.S = self.T * self.pieces * rng.randint(1, 3)
        self.inputs, self.outputs = (self.T * rng.randint(1, 4) for _ in range(2))
        self.is_transposed = rng.random() < 0.5

    def draw(self, *shape) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return transposed(x) if self.is_transposed else x


def try_calls(number: int, group) -> dict:
    """What the two functions without backward return."""
    case = Sizes("calls", number, group)
    x, weight = case.draw(case.B, case.S, case.inputs), case.draw(3, case.inputs)
    x_BsD = lesson00.shard(x, 1, group)
    y, gathered = lesson.gather_in_pieces(x_BsD, weight, group, case.pieces)
    x_BSf, columns = lesson00.shard(x, 2, group), lesson00.shard(weight, 1, group)
    started = lesson.start_scatters(x_BSf, columns, group, case.pieces)
    partial_y = F.linear(x_BSf, columns)
    wanted = lesson00.reduce_scatter(partial_y, 1, group)
    scattered = difference(lesson.finish_scatters(started), wanted)
    return dict(
        T=case.T, pieces=case.pieces, calls=len(started), scattered=scattered,
        same_x=torch.equal(gathered, x), product=difference(y, F.linear(x, weight)),
    )  # fmt: skip


def try_functions(number: int, group) -> dict:
    """Each function with its backward: the product, dL/dx, dL/dW."""
    diffs = {}
    for function, (of_x, of_weight, of_y) in SPLITS.items():
        case = Sizes(function.__name__, number, group)
        x = case.draw(case.B, case.S, case.inputs).requires_grad_()
        weight = case.draw(case.outputs, case.inputs).requires_grad_()
        upstream = case.draw(case.B, case.S, case.outputs)
        wanted = F.linear(x, weight)
        wanted.backward(upstream)

        mine_x = lesson00.shard(x, of_x, group).requires_grad_()
        mine_weight = lesson00.shard(weight, of_weight, group).requires_grad_()
        got = function.apply(mine_x, mine_weight, group, case.pieces)
        mine_upstream = lesson00.shard(upstream, of_y, group)
        if case.is_transposed:
            mine_upstream = transposed(mine_upstream)
        got.backward(mine_upstream)
        diffs[function.__name__] = [
            difference(got, lesson00.shard(wanted, of_y, group)),
            difference(mine_x.grad, lesson00.shard(x.grad, of_x, group)),
            difference(mine_weight.grad, lesson00.shard(weight.grad, of_weight, group)),
        ]
    return dict(T=case.T, pieces=case.pieces, diffs=diffs)


def try_linears(number: int, group) -> dict:
    """Two column-parallel linears and a row-parallel one, with and without biases."""
    case = Sizes("linears", number, group)
    has_bias = [case.rng.random() < 0.5 for _ in range(3)]
    torch.manual_seed(number)
    columns = [
        nn.Linear(case.inputs, case.outputs, bias=bias).double()
        for bias in has_bias[:2]
    ]
    row = nn.Linear(case.outputs, case.inputs, bias=has_bias[2]).double()
    x = case.draw(case.B, case.S, case.inputs).requires_grad_()
    upstream = case.draw(case.B, case.S, case.inputs)
    wanted = row(columns[0](x) * columns[1](x))
    wanted.backward(upstream)

    split = [lesson01.ColumnParallelLinear(linear, group) for linear in columns]
    split_row = lesson01.RowParallelLinear(row, group)
    split_row = lesson.RowParallelInPieces(split_row, case.pieces)
    mine_x = lesson00.shard(x, 1, group).requires_grad_()
    left, right = lesson.apply_in_pieces(mine_x, *split, pieces=case.pieces)
    got = split_row(left * right)
    got.backward(lesson00.shard(upstream, 1, group))
    diffs = [
        difference(got, lesson00.shard(wanted, 1, group)),
        difference(mine_x.grad, lesson00.shard(x.grad, 1, group)),
    ]
    for full, mine in zip([*columns, row], [*split, split_row]):
        for p, q in zip(full.parameters(), mine.parameters(), strict=True):
            grad = p.grad
            if q.sharding:
                grad = lesson00.shard(grad, *q.sharding)
            else:  # the row's bias: this rank's positions only
                q.grad = lesson00.all_reduce(q.grad, group)
            diffs.append(difference(q.grad, grad))
    return dict(T=case.T, pieces=case.pieces, has_bias=has_bias, diffs=diffs)


def try_model(number: int, group) -> dict:
    """A full model; pieces is the largest of 1 to 4 that divides a rank's slice."""
    T = group.size()
    _, _, S = random_sizes(lesson04, number, T)
    s = -(-S // T)
    pieces = max(n for n in (1, 2, 3, 4) if s % n == 0)
    split = partial(lesson.transformer_in_pieces, pieces=pieces)
    twins = Twins(lesson04, number, group, split, pads=True)
    V = twins.config.vocab_size
    loss_of = partial(lesson04.sharded_loss, tp_group=group, vocab_size=V)
    sum_up = partial(lesson04.all_reduce_replicated_gradients, tp_group=group)
    return dict(twins.train(loss_of, sum_up), pieces=pieces)


def try_loss(number: int, group) -> dict:
    """Head and loss in pieces, against F.cross_entropy of all logits."""
    rng = random.Random(f"pieces {number}")
    generator = torch.Generator().manual_seed(number)
    V, D, T = rng.choice([1, 2, 7, 61, 257]), rng.randint(1, 6), group.size()
    B, S = rng.randint(1, 3), rng.randint(1, 9)
    pieces = rng.randint(1, S)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    h, weight, bias = draw(B, S, D), draw(V, D), draw(V) if number % 2 else None
    target = torch.randint(V, (B, S), generator=generator)
    target[torch.rand(B, S, generator=generator) < 0.2] = -100
    target[0, 0] = V - 1  # a mean over no target is 0 / 0

    def leaves(weight, bias):
        return [x.clone().requires_grad_() for x in (h, weight, bias) if x is not None]

    wanted = leaves(weight, bias)
    logits = F.linear(*wanted).flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten())
    loss.backward()
    short = -(-V // T) * T - V
    padded = [None if p is None else F.pad(p, (0, 0) * (p.dim() - 1) + (0, short))
              for p in (weight, bias)]  # fmt: skip
    mine = [None if p is None else lesson00.shard(p, 0, group) for p in padded]
    got = leaves(*mine)
    head = nn.Module()
    head.weight, head.bias = got[1], got[2] if bias is not None else None
    in_pieces = lesson.chunked_cross_entropy(got[0], target, head, group, V, pieces)
    in_pieces.backward()
    diffs = [difference(in_pieces, loss), difference(got[0].grad, wanted[0].grad)]
    for ours, full in zip(got[1:], wanted[1:]):
        rows = F.pad(full.grad, (0, 0) * (full.dim() - 1) + (0, short))
        diffs.append(difference(ours.grad, lesson00.shard(rows, 0, group)))
    return dict(T=T, V=V, pieces=pieces, S=S, diffs=diffs)


def main() -> dict:
    groups = groups_of_4(lesson00)
    order = [(n, groups[(n + n // 4) % 4]) for n in range(CASES)]
    ours = [(n, group) for n, group in order if is_ours(n, group)]
    return dict(
        calls=[try_calls(*case) for case in ours],
        functions=[try_functions(*case) for case in ours],
        linears=[try_linears(*case) for case in ours],
        models=[try_model(*case) for case in ours],
        losses=[try_loss(*case) for case in ours],
    )


if __name__ == "__main__":
    run(main)
