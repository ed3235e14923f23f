"""Four ranks: lesson 03's embedding, head, loss and sampling against plain torch.

    torchrun --nproc_per_node=4 drive_vocab.py FOLDER

Every rank computes the whole thing alone, in float64, and cuts out what it should have.
"""

import random
import weakref

import torch
import torch.nn.functional as F
from in_ranks import (
    Twins,
    columns,
    difference,
    exact,
    gradients,
    groups_of_4,
    load,
    own_columns,
    random_batch,
    random_model,
    refused,
    rows,
    run,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

lesson = load("03_vocab_parallel")
SIZES = [*range(1, 61), 257, 1000] * 3 + [1, 2, 3] * 8
DTYPES = torch.float64, torch.float32, torch.bfloat16
STYLES = "random", "high", "low", "far apart", "equal"
ENDS, MODELS, DRAWS = 36, 18, 200


def make_logits(style: str, shape, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    shifts = {"high": 1e4, "low": -1e4}
    if style in shifts:
        return x + shifts[style]
    return {"random": 3 * x, "far apart": 1e4 * x, "equal": torch.ones_like(x)}[style]


def make_targets(V: int, shape, ignore: int, all_ignored: bool, x, rng, generator):
    """Targets in every rank's shard where there is room; some are ignored."""
    target = torch.randint(V, shape, generator=generator)
    flat = target.view(-1)
    flat[: min(4, len(flat))] = torch.tensor([0, V - 1, V // 2, V // 4])[: len(flat)]
    flat[torch.rand(len(flat), generator=generator) < 0.2] = ignore
    lowest = x.reshape(-1, V)[0].argmin()  # one that is not easy to predict
    flat[0] = lowest if lowest != ignore else (lowest + 1) % V
    if all_ignored:
        flat[:] = ignore
    return target


def try_loss(number: int, V: int, group) -> dict:
    """One random batch: the loss of each token, and the gradient."""
    rng = random.Random(f"loss {number}")
    generator = torch.Generator().manual_seed(number)
    T = group.size()
    v = -(-V // T) + rng.choice([0, 0, 0, 1, 3])
    shape = rng.choice([(2, 5), (7,), (1, 3, 4), (1, 6)])
    dtype, style = DTYPES[number % 3], STYLES[number // 3 % 5]
    smoothing = (0.0, 0.1, 1.0)[number // 7 % 3]
    ignore = rng.randrange(V) if number % 4 == 1 else -100
    all_ignored = number % 9 == 8
    x = make_logits(style, (*shape, V), generator).to(dtype)
    target = make_targets(V, shape, ignore, all_ignored, x, rng, generator)
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)

    leaf = x.double().clone().requires_grad_()
    wanted = F.cross_entropy(
        leaf.view(-1, V), target.view(-1), ignore_index=ignore,
        label_smoothing=smoothing, reduction="none",
    ).view(shape)  # fmt: skip
    wanted.backward(upstream)

    mine = columns(x, v, group, rng.choice([0.0, 5.0, 1e30, -1e30]))
    if number % 2:  # the same numbers, laid out otherwise
        mine = mine.transpose(0, -1).contiguous().transpose(0, -1)
    mine.requires_grad_()
    lesson.COMM.rows.clear()
    lesson.COMM.phase = "forward"
    options = dict(label_smoothing=smoothing) if smoothing else {}
    options |= dict(ignore_index=ignore) if ignore != -100 else {}
    got = lesson.vocab_parallel_cross_entropy(mine, target, group, V, **options)
    lesson.COMM.phase = "backward"
    got.backward(upstream.to(wide))
    sent = [[*key[1:3], *row] for key, row in lesson.COMM.rows.items()]
    three = ["forward", "all-reduce", 3, 3 * target.numel() * wide.itemsize]
    real, start = own_columns(V, v, group), group.rank() * v
    # With all logits equal and smoothing 1 nothing is left of softmax − 1/V: then its
    # terms are the measure.
    terms = leaf.detach().softmax(-1) * upstream.unsqueeze(-1)
    terms[target == ignore] = 0
    most = torch.stack([leaf.grad.abs().max(), terms.abs().max()])
    here = leaf.grad[..., start : start + real]
    ignored = target == ignore
    return dict(
        number=number, V=V, T=T, shape=shape, dtype=str(dtype), style=style,
        smoothing=smoothing, ignore=ignore, all_ignored=all_ignored,
        loss=difference(got, wanted.to(wide)), right_dtype=mine.grad.dtype == dtype,
        gradient=difference(mine.grad[..., :real].double(), here, most),
        padding=mine.grad[..., real:].count_nonzero().item(),
        ignored_gradient=mine.grad[ignored].count_nonzero().item(),
        padded=v - real, ignored=int(ignored.sum()),
        own=sorted({int(t) // v for t in target[~ignored]}),
        sent_right=sent == ([three] if T > 1 else []),
    )  # fmt: skip


def megatron(group) -> list:
    """REFERENCES: TP 4, V 128, 0 to 7 four times on every rank's 32 columns."""
    logits = torch.arange(8.0).repeat(16, 4)
    target = torch.arange(0, 32, 2)
    loss = lesson.vocab_parallel_cross_entropy(logits, target, group, 128)
    return loss.tolist()


def on_boundaries(V: int, T: int, shape, generator):
    """Random tokens, and the first and last of every rank's where there is room."""
    v = -(-V // T)
    ends = [end for i in range(0, V, v) for end in (i, min(i + v, V) - 1)]
    tokens = torch.randint(V, shape, generator=generator)
    room = tokens.view(-1)[: len(ends)]
    room.copy_(torch.tensor(ends[: len(room)]))
    return tokens


def try_ends(number: int, group) -> dict:
    """Embedding and head, tied or not, against nn.Embedding and nn.Linear."""
    rng = random.Random(f"ends {number}")
    generator = torch.Generator().manual_seed(number)
    V, D = (*range(1, 13), 30, 61, 257)[number % 15], rng.randint(1, 6)
    B, S, tied = rng.randint(1, 3), rng.randint(8, 10), number // 4 % 2 == 0
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)
    embedding, head = nn.Embedding(V, D).double(), nn.Linear(D, V).double()
    with torch.no_grad():
        for p in (embedding.weight, head.weight, head.bias):
            p.copy_(draw(*p.shape))
    if tied:
        head.weight = embedding.weight
    tokens = on_boundaries(V, group.size(), (B, S), generator)
    upstream = draw(B, S, V)
    v = -(-V // group.size())

    mine = lesson.VocabParallelEmbedding(embedding, group)
    padded = lesson.pad_vocab(head, group.size())
    mine_head = lesson.ColumnParallelLinear(padded, group)
    pairs = {
        "embedding": (mine.weight, embedding.weight),
        "head": (mine_head.weight, head.weight),
        "bias": (mine_head.bias, head.bias),
    }
    diffs = {
        f"held {name}": difference(p.detach(), rows(whole.detach(), group))
        for name, (p, whole) in pairs.items()
    }
    if tied:  # as vocab_transformer does
        mine_head.weight = mine.weight
        pairs["head"] = pairs["embedding"]
    x, got_x = embedding(tokens), mine(tokens)
    wanted, got = head(x.tanh()), mine_head(got_x.tanh())
    wanted.backward(upstream)
    got.backward(columns(upstream, v, group))
    for name, (p, whole) in pairs.items():
        diffs[name] = difference(p.grad, rows(whole.grad, group), whole.grad)
    first, real = group.rank() * v, own_columns(V, v, group)
    diffs["x"] = difference(got_x, x)
    right = columns(wanted, v, group)[..., :real]
    diffs["logits"] = difference(got[..., :real], right, wanted)
    zeros = [not p.grad[real:].any() for p in mine_head.parameters()]
    diffs["held padding: gradient"] = exact(all(zeros))
    ends = {first, first + real - 1} if real else set()
    return dict(
        number=number, V=V, T=group.size(), tied=tied, diffs=diffs,
        ends=ends <= {*tokens.view(-1).tolist()},
    )  # fmt: skip


def try_model(number: int, group) -> dict:
    """The whole model: mean loss, by sharded and by gathered logits, all gradients."""
    tied = number // 4 % 2 == 0
    full, B, S, generator = random_model(lesson, number, group.size(), tied)
    tp = lesson.vocab_transformer(full, group)
    twins = Twins(lesson, full, tp, group)
    is_one = tp.lm_head.weight is tp.embed_tokens.weight
    twins.note("tied", exact(is_one is tied))
    tokens, target, _ = random_batch(full.config, B, S, generator)
    torch.manual_seed(number)
    wanted = F.cross_entropy(twins.alone(tokens).flatten(0, 1), target.flatten())
    wanted.backward()
    for way in ("sharded_loss", "gathered_loss"):
        tp.zero_grad()
        torch.manual_seed(number)
        V = full.config.vocab_size
        loss = getattr(lesson, way)(tp(tokens), target, group, V)
        loss.backward()
        twins.note(way, difference(loss, wanted))
        twins.compare(f"{way}: gradients", gradients(tp), gradients(twins.alone))
        whole = lesson.put_together(tp, "grad")
        for name, grad in gradients(twins.alone).items():
            twins.note("put together", difference(whole.get(name), grad), name)
    return dict(number=number, T=group.size(), tied=tied, diffs=twins.end())


class PeakBytes(TorchDispatchMode):
    """Within `with`: the most bytes that tensors made there took up at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.watch(x.untyped_storage())
        return out

    def watch(self, storage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, key, size)

    def freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peaks(group) -> dict:
    """At most so many bytes at a time, for GPT-2's vocabulary: forward and backward."""
    V, found = 50257, {}
    for way in ("sharded_loss", "gathered_loss"):
        x = torch.zeros(2, 8, -(-V // group.size()), requires_grad=True)
        target = torch.zeros(2, 8, dtype=torch.int64)
        with PeakBytes() as watch:
            getattr(lesson, way)(x, target, group, V).backward()
        found[way] = watch.peak
    return found


def draws(groups) -> dict:
    """sample_sharded against argmax(logits + noise), with T > V and with ties."""
    found = {"random": [], "ties": []}
    for number in range(DRAWS + 40):
        group = groups[1 + number % 3]
        rng = random.Random(f"draw {number}")
        generator = torch.Generator().manual_seed(number)
        V = rng.choice([1, 2, 3, 5, 16, 61, 257])
        logits = torch.randn(V, generator=generator)
        noise = -(-torch.rand(V, generator=generator).log()).log()
        kind = "random" if number < DRAWS else "ties"
        if kind == "ties":
            logits, noise = logits.round(), torch.zeros(V)
        v = -(-V // group.size())
        mine = columns(logits, v, group, rng.choice([0.0, 50.0]))
        got = lesson.sample_sharded(mine, noise, group, V)
        found[kind].append([V, group.size(), got, int((logits + noise).argmax())])
    return found


def refusals(group) -> dict:
    """What is said to tokens and targets that are in no vocabulary."""
    V = 10
    embedding = lesson.VocabParallelEmbedding(nn.Embedding(V, 4), group)
    logits = torch.zeros(2, 3)
    lossy = lesson.vocab_parallel_cross_entropy
    loss = lambda *target: lossy(logits, torch.tensor(target), group, V)
    found = refused({
        "token 10": lambda: embedding(torch.tensor([[0, 10]])),
        "token 11": lambda: embedding(torch.tensor([[11]])),
        "token -1": lambda: embedding(torch.tensor([[-1, 3]])),
        "target 10": lambda: loss(1, 10),
        "target 12": lambda: loss(12, -100),
        "target -1": lambda: loss(-1, 2),
        "target -100": lambda: lossy(logits, torch.tensor([-100, 2]), group, V, 3),
    })  # fmt: skip
    empty = embedding(torch.empty(0, 3, dtype=torch.int64))
    return found | {"no tokens": list(empty.shape)}


def main() -> dict:
    groups, losses = groups_of_4(lesson), []
    for number, V in enumerate(SIZES):
        losses.append(try_loss(number, V, groups[(number + number // 62) % 4]))
    return dict(
        losses=losses,
        megatron=megatron(groups[2]),
        ends=[try_ends(n, groups[n % 4]) for n in range(ENDS)],
        models=[try_model(n, groups[(n + n // 4) % 4]) for n in range(MODELS)],
        draws=draws(groups),
        peaks=[(group.size(), peaks(group)) for group in groups],
        refusals=refusals(groups[2]),
    )


if __name__ == "__main__":
    run(main)
