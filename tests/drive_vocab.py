"""Four ranks: lesson 03's model, loss and sampling against plain torch.

    torchrun --nproc_per_node=4 drive_vocab.py FOLDER

Every rank computes everything on its own in float64 and takes the slice that it should
have.
"""

import random
import weakref
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from in_ranks import Twins, columns, difference, groups_of_4, is_ours, load, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

lesson = load("03_vocab_parallel")
SIZES = [*range(1, 61), 257, 1000, *[1, 2, 3] * 3, 1, 1]  # less than T, too
DTYPES = torch.float64, torch.float32, torch.bfloat16
STYLES = {
    "random": lambda x: 3 * x, "high": lambda x: x + 1e4, "low": lambda x: x - 1e4,
    "far apart": lambda x: 1e4 * x, "equal": torch.ones_like,
}  # fmt: skip
SMOOTHINGS = 0.0, 0.1, 1.0
MODELS, DRAWS, TIES = 36, 200, 40


def make_targets(V: int, shape, ignore: int, x, generator):
    """Targets in every rank's range if there are enough; some are ignored."""
    target = torch.randint(V, shape, generator=generator)
    flat = target.view(-1)
    flat[:4] = torch.tensor([0, V - 1, V // 2, V // 4])
    flat[torch.rand(len(flat), generator=generator) < 0.2] = ignore
    lowest = x.reshape(-1, V)[0].argmin()  # one that is not easy to predict
    flat[0] = lowest if lowest != ignore else (lowest + 1) % V
    return target


def try_loss(number: int, dtype, style: str, smoothing: float, group) -> dict:
    """One random batch: the loss of each token, and the gradient."""
    rng = random.Random(f"loss {number}")
    generator = torch.Generator().manual_seed(number)
    T, V = group.size(), SIZES[number % len(SIZES)]
    v = -(-V // T) + rng.choice([0, 0, 0, 1, 3])
    shape = rng.choice([(2, 5), (7,), (1, 3, 4), (1, 6)])
    ignore = rng.choice([-100, -100, -100, rng.randrange(V)])
    options = dict(label_smoothing=smoothing, ignore_index=ignore)
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn((*shape, V), generator=generator, dtype=torch.float64)
    x = STYLES[style](x).to(dtype)
    target = make_targets(V, shape, ignore, x, generator)
    if number % 9 == 8:
        target[:] = ignore
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)

    leaf = x.double().clone().requires_grad_()
    wanted = F.cross_entropy(
        leaf.view(-1, V), target.view(-1), reduction="none", **options
    ).view(shape)
    wanted.backward(upstream)

    mine = columns(x, group, v, rng.choice([0.0, 5.0, 1e30, -1e30]))
    mine = (mine.mT.contiguous().mT if number % 2 else mine).requires_grad_()
    got = lesson.vocab_parallel_cross_entropy(mine, target, group, V, **options)
    got.backward(upstream.to(wide))
    # With all logits equal and smoothing 1, softmax − 1/V is 0: then the difference is
    # relative to its terms.
    terms = (leaf.detach().softmax(-1) * upstream.unsqueeze(-1))[target != ignore]
    most = torch.cat([leaf.grad.flatten(), terms.flatten()])
    wanted_grad = columns(leaf.grad, group, v)
    return dict(
        number=number, V=V, T=T, shape=shape, dtype=str(dtype), style=style,
        smoothing=smoothing, ignore=ignore, loss=difference(got, wanted.to(wide)),
        gradient=difference(mine.grad.double(), wanted_grad, most),
    )  # fmt: skip


def megatron(group) -> list:
    """Its test: TP 4, V 128, logits 0 to 7 four times on every rank's 32 columns."""
    logits = torch.arange(8.0).repeat(16, 4)
    target = torch.arange(0, 32, 2)
    loss = lesson.vocab_parallel_cross_entropy(logits, target, group, 128)
    return loss.tolist()


def try_model(number: int, group) -> dict:
    """The full model; its mean loss from sharded or from gathered logits."""
    twins = Twins(lesson, number, group, lesson.vocab_transformer)
    loss_of = lesson.gathered_loss if number // 4 % 2 else lesson.sharded_loss
    V = twins.config.vocab_size
    return twins.train(partial(loss_of, tp_group=group, vocab_size=V))


class PeakBytes(TorchDispatchMode):
    """Within `with`: the peak of the bytes of the tensors that are created there."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.alive.update(x.untyped_storage() for x in tensors)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.alive))
        return out


def peaks(group) -> dict:
    """Peak bytes of forward and backward of each loss, for GPT-2's vocabulary."""
    V, found = 50257, {}
    for way in ("sharded_loss", "gathered_loss"):
        x = torch.zeros(2, 8, -(-V // group.size()), requires_grad=True)
        target = torch.zeros(2, 8, dtype=torch.int64)
        with PeakBytes() as watch:
            getattr(lesson, way)(x, target, group, V).backward()
        found[way] = watch.peak
    return found


def try_draw(number: int, groups) -> tuple[int, int]:
    """sample_sharded, and argmax(logits + noise); with T > V, and with ties."""
    group, rng = groups[1 + number % 3], random.Random(f"draw {number}")
    generator = torch.Generator().manual_seed(number)
    V = rng.choice([1, 2, 3, 5, 16, 61, 257])
    logits = torch.randn(V, generator=generator)
    noise = -(-torch.rand(V, generator=generator).log()).log()
    if number >= DRAWS:  # scores that are equal
        logits, noise = logits.round(), torch.zeros(V)
    mine = columns(logits, group, filler=rng.choice([0.0, 50.0]))
    got = lesson.sample_sharded(mine, noise, group, V)
    return got, int((logits + noise).argmax())


def main() -> dict:
    groups = groups_of_4(lesson)
    batches = enumerate(product(DTYPES, STYLES, SMOOTHINGS, groups))
    order = [(n, groups[(n + n // 4) % 4]) for n in range(MODELS)]
    return dict(
        losses=[try_loss(n, *batch) for n, batch in batches if is_ours(n, batch[-1])],
        megatron=megatron(groups[2]),
        models=[try_model(n, group) for n, group in order if is_ours(n, group)],
        draws=[try_draw(n, groups) for n in range(DRAWS + TIES)],
        peaks=[(group.size(), peaks(group)) for group in groups],
    )


if __name__ == "__main__":
    run(main)
