"""Four ranks: lesson 04's split sequence against plain torch, forward and backward.

    torchrun --nproc_per_node=4 drive_sequence.py FOLDER

Every rank computes the whole thing alone, in float64, and cuts out what it should have.
"""

import copy
import hashlib
import math
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from drive_transformer import dim_of, gradients, parameters, plain_dropout, plain_loss
from drive_vocab import columns, rows
from in_ranks import difference, finish, groups_of_4, load, start, write_found
from torch import nn

lesson = load("04_sequence_parallel")
MODELS, STEPS, PAIRS, LINEARS, DROPOUTS, RECOMPUTES = 64, 2, 48, 64, 36, 8
LAYERS = [  # B, S, D, N of the layers whose memory is measured
    (1, 4, 8, 4), (2, 8, 16, 4), (3, 12, 24, 4), (1, 16, 64, 8), (4, 8, 32, 16),
    (2, 20, 48, 8),
]  # fmt: skip


def padded(x, T: int):
    """Zeros behind the positions, so that T divides them."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % T))


def part(x, group):
    """This rank's positions, zeros where there are none."""
    return padded(x, group.size()).tensor_split(group.size(), 1)[group.rank()].clone()


def tokens_of(S: int, T: int) -> list:
    """How many positions each rank has that are not padding."""
    s = -(-S // T)
    return [max(0, min(S, (rank + 1) * s) - rank * s) for rank in range(T)]


def off(got, whole, name: str, group) -> float:
    """The difference of this rank's piece, by the largest number of the whole."""
    wanted, dim = whole, dim_of(name)
    if name.startswith(("embed_tokens", "lm_head")):
        wanted = rows(whole, -(-len(whole) // group.size()), group)
    elif dim is not None:
        wanted = whole.tensor_split(group.size(), dim)[group.rank()]
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    most = whole.abs().max().item()
    diff = (got - wanted).abs().max().item() / most if most else math.inf
    return diff if diff == diff else math.inf


def worst_off(pieces: dict, wholes: dict, group) -> list:
    """[largest difference, name] of parameters or gradients."""
    found = {name: off(pieces.get(name), wholes[name], name, group) for name in wholes}
    name = max(found, key=found.get)
    return [found[name], name]


def is_replicated(name: str) -> bool:
    return dim_of(name) is None and not name.startswith(("embed_tokens", "lm_head"))


def make(number: int, T: int) -> tuple:
    """A random model that T ranks can share, and the sizes of its batches."""
    rng = random.Random(f"model {number}")
    kv_heads = T * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 3)
    B, S = rng.randint(1, 3), rng.randint(1, 11)
    S = {0: rng.choice([1, T + 2]), 1: T * rng.randint(1, 3), 2: T + 1}.get(
        number // 4 % 4, S
    )
    H = 2 * rng.randint(1, 3) if heads > 2 else 6  # a norm of two numbers is ±1
    config = lesson.Config(
        rng.randint(2, 30), heads * H, heads, kv_heads,
        rng.choice([1, 1, 2, 3]), S + rng.randint(0, 3),
        (0.0, 0.1, 0.5)[number // 3 % 3],
    )  # fmt: skip
    full = lesson.Transformer(config).double()
    if number // 5 % 2:
        full.lm_head.weight = full.embed_tokens.weight
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, p in full.named_parameters():
            size = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * size + ("norm" in name))
    return config, full, B, S, generator


def draw_batch(config, B: int, S: int, generator) -> tuple:
    """Tokens, targets of which some are ignored, upstream gradients of the logits."""
    tokens = torch.randint(config.vocab_size, (B, S), generator=generator)
    target = torch.randint(config.vocab_size, (B, S), generator=generator)
    target[:, 1:][torch.rand(B, S - 1, generator=generator) < 0.3] = -100
    shape = B, S, config.vocab_size
    return tokens, target, torch.randn(shape, generator=generator, dtype=torch.float64)


def take_step(alone, sp, batch, V: int, group, seed: int, random_upstream) -> tuple:
    """Forward and backward both ways: differences, and gradients before the mending."""
    tokens, target, upstream = batch
    torch.manual_seed(seed)
    logits = alone(tokens)
    wanted = plain_loss(logits, target)
    logits.backward(upstream) if random_upstream else wanted.backward()
    torch.manual_seed(seed)
    lesson.COMM.rows.clear()
    lesson.COMM.phase = "forward"
    got = sp(tokens)
    lesson.COMM.phase = "loss"
    losses = lesson.vocab_parallel_cross_entropy(got, target, group, V)
    loss = lesson.mean_over_targets(losses, target)
    lesson.COMM.phase = "backward"
    v = got.shape[-1]
    got.backward(columns(upstream, v, group, 0.0)) if random_upstream else (
        loss.backward()
    )
    real = max(0, min(V - group.rank() * v, v))
    right = columns(logits.detach(), v, group, 0.0)[..., :real]
    here = {"logits": [difference(got[..., :real], right) if real else 0.0, ""]}
    here["loss"] = [difference(loss, wanted), ""]
    return here, gradients(sp)


def add_parts(parts: dict, wanted: dict, S: int, group) -> dict:
    """What the ranks' gradients of replicated parameters are before they are added."""
    names = [name for name in wanted if is_replicated(name)]
    flat = torch.cat([parts[name].flatten() for name in names])
    everyone = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(everyone, flat, group=group)
    sizes = [wanted[name].numel() for name in names]
    cut = [dict(zip(names, one.split(sizes))) for one in everyone]
    sums = {name: sum(one[name] for one in cut) for name in names}
    has = tokens_of(S, group.size())
    busy = [one for one, tokens in zip(cut, has) if tokens]
    return dict(
        sum=worst_off(sums, {name: wanted[name] for name in names}, group),
        idle=sum(one.count_nonzero().item() for one, n in zip(everyone, has) if not n),
        busy=len(busy), names=len(names),
        alike=sum(
            torch.equal(busy[i][name], busy[j][name])
            for i in range(len(busy)) for j in range(i) for name in names
        ),
        whole=sum(  # already right before they are added
            off(one[name], wanted[name], name, group) <= 1e-12
            for one in busy for name in names
        ),
    )  # fmt: skip


def calls_wanted(config, B: int, S: int, T: int, save: bool) -> list:
    """Phase, collective, axis, calls, bytes of a step; worked out by hand."""
    if T == 1:
        return []
    n, e = 2 * config.layers + 1, 8
    one = B * -(-S // T) * T * config.hidden * e
    again = 0 if save else n
    return sorted([
        ["forward", "all-gather", "tp", n, n * one],
        ["forward", "reduce-scatter", "tp", n, n * one],
        ["loss", "all-reduce", "tp", 3, 3 * B * S * e],
        ["backward", "reduce-scatter", "tp", n, n * one],
        ["backward", "all-gather", "tp", n + again, (n + again) * one],
        ["mend", "all-reduce", "tp", 1, (6 * config.layers + 2) * config.hidden * e],
    ])  # fmt: skip


def replicas(model) -> str:
    """A digest of what should be the same on every rank."""
    digest = hashlib.sha256()
    for name, p in parameters(model).items():
        if is_replicated(name):
            digest.update(p.numpy().tobytes())
    return digest.hexdigest()


def mend(sp, parts: dict, wanted: dict, group) -> dict:
    """The mending: gradients after it; those that are cut are not touched by it."""
    lesson.COMM.phase = "mend"
    lesson.mend_replicated(sp, group)
    after = gradients(sp)
    cut = [name for name in parts if not is_replicated(name)]
    touched = sum(not torch.equal(after[name], parts[name]) for name in cut)
    return {"gradients": worst_off(after, wanted, group), "touched": [touched, ""]}


def update(alone, sp, optimizers: list, factor: float, group) -> dict:
    """Clipping to so much of the norm, and AdamW, both ways."""
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients(alone).values()))
    torch.nn.utils.clip_grad_norm_(alone.parameters(), factor * norm)
    told = lesson.clip_gradients(sp, factor * norm, group)
    for model, optimizer in zip((alone, sp), optimizers):
        optimizer.step()
        model.zero_grad()
    off_by = worst_off(parameters(sp), parameters(alone), group)
    return {"norm": [abs(told - norm) / norm, ""], "parameters": off_by}


def try_model(number: int, group) -> dict:
    """Two steps of training, both ways: from random upstream gradients, from a loss."""
    T, save = group.size(), number % 3 == 0
    config, full, B, S, generator = make(number, T)
    before = {name: p.clone() for name, p in parameters(full).items()}
    models = copy.deepcopy(full), lesson.SPTransformer(full, group, save)
    alone, sp = models
    diffs = {"held": worst_off(parameters(sp), parameters(full), group)}
    same_names = list(parameters(sp)) == list(parameters(full))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-5) for m in models]
    for step in range(STEPS):
        batch, seed = draw_batch(config, B, S, generator), 1000 * number + step
        here, parts = take_step(
            *models, batch, config.vocab_size, group, seed, not step
        )
        if step == 0:
            added = add_parts(parts, gradients(alone), S, group)
        here |= mend(sp, parts, gradients(alone), group)
        sent = sorted([*key[1:], *row] for key, row in lesson.COMM.rows.items())
        here |= update(*models, optimizers, (0.3, 3.0)[(number + step) % 2], group)
        for kind, found in here.items():
            diffs[kind] = max(diffs.get(kind, [0.0, ""]), found)
    diffs["eval"] = [eval_off(alone, sp, batch[0], group), ""]
    return dict(
        number=number, T=T, config=config._asdict(), B=B, S=S, diffs=diffs,
        tied=sp.lm_head.weight is sp.embed_tokens.weight, save=save, names=same_names,
        own=all(torch.equal(p, before[name]) for name, p in parameters(full).items()),
        group=dist.get_process_group_ranks(group), replicas=replicas(sp),
        parts=added, sent=sent, wanted=calls_wanted(config, B, S, T, save),
    )  # fmt: skip


def eval_off(alone, sp, tokens, group) -> float:
    with torch.no_grad():
        wanted, got = alone.eval()(tokens), sp.eval()(tokens)
    V, v = wanted.shape[-1], got.shape[-1]
    real = max(0, min(V - group.rank() * v, v))
    right = columns(wanted, v, group, 0.0)[..., :real]
    return difference(got[..., :real], right) if real else 0.0


def otherwise(x, number: int):
    """The same numbers, on every other call laid out otherwise."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if number % 2 else x


def backward_of(y, use, number: int):
    """Backward of Σ sin(y)·use, by an upstream gradient of an odd layout."""
    y.backward(otherwise(y.detach().cos() * use, number))


def try_pairs(number: int, group) -> dict:
    """Forward and backward of each pair against one process's autograd."""
    rng, T, r = random.Random(f"pairs {number}"), group.size(), group.rank()
    B, S, D = (rng.randint(1, n) for n in (3, 9, 5))
    generator = torch.Generator().manual_seed(number)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)
    uses, terms = draw(T, B, S, D), draw(T, B, S, D).requires_grad_()
    s, found = -(-S // T), {}
    note = lambda name, *pairs: found.update({name: [difference(*p) for p in pairs]})

    x = draw(B, s * T, D)  # behind the sequence there is padding, with numbers in it
    whole = x[:, :S].clone().requires_grad_()
    sum((whole.sin() * use).sum() for use in uses).backward()
    mine = x[:, r * s : (r + 1) * s].clone().requires_grad_()
    y = lesson.gather_sequence(mine, S, group)
    backward_of(y, uses[r], number)
    note("gather_sequence", (y, whole), (mine.grad, part(whole.grad, group)))
    got = lesson.sum_to_slices(otherwise(uses[r], number), group)
    note("sum_to_slices", (got, part(uses.sum(0), group)))

    total = terms.sum(0)
    (total.sin() * uses[0]).sum().backward()
    mine = terms[r].detach().clone().requires_grad_()
    y = lesson.scatter_sequence(mine, group)
    backward_of(y, part(uses[0], group), number)
    note("scatter_sequence", (y, part(total, group)), (mine.grad, terms.grad[r]))

    shape = [T * rng.randint(1, 2) for _ in range(3)]
    dim, x, use = rng.randrange(3), draw(*shape), draw(*shape)
    cut = lambda t: t.tensor_split(T, dim)[r].clone()
    whole = x.clone().requires_grad_()
    (whole.sin() * use).sum().backward()
    mine = x.clone().requires_grad_()
    y = lesson.ScatterToSequence.apply(mine, dim, group)
    backward_of(y, cut(use), number)
    note("ScatterToSequence", (y, cut(x)), (mine.grad, whole.grad))
    mine = cut(x).requires_grad_()
    y = lesson.GatherFromTP.apply(mine, dim, group)
    backward_of(y, use, number)
    note("GatherFromTP", (y, x), (mine.grad, cut(whole.grad)))
    return dict(number=number, T=T, S=S, dim=dim, diffs=found)


def try_linears(number: int, group) -> dict:
    """Linears of a gathered sequence; each rank has weights of its own."""
    rng, T, r = random.Random(f"linears {number}"), group.size(), group.rank()
    B, S, D = (rng.randint(1, n) for n in (3, 9, 5))
    widths, save = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))], number % 2
    generator = torch.Generator().manual_seed(number)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)
    full = [[(draw(f, D), draw(f), draw(B, S, f)) for f in widths] for _ in range(T)]
    s = -(-S // T)
    x = draw(B, s * T, D)
    whole = x[:, :S].clone().requires_grad_()
    for W, b, _ in [three for one in full for three in one]:
        W.requires_grad_(), b.requires_grad_()
    loss, right = 0.0, []
    for rank, one in enumerate(full):
        for W, b, use in one:
            y = whole @ W.T + b
            right += [y.detach()] if rank == r else []
            loss = loss + (y.sin() * use).sum()
    loss.backward()
    linears = [nn.Linear(D, f, dtype=torch.float64) for f in widths]
    with torch.no_grad():
        for linear, (W, b, _) in zip(linears, full[r]):
            linear.weight.copy_(W), linear.bias.copy_(b)
    mine = x[:, r * s : (r + 1) * s].clone().requires_grad_()
    lesson.COMM.rows.clear()
    lesson.COMM.phase = "forward"
    got = lesson.linears_of_sequence(mine, S, linears, group, bool(save))
    lesson.COMM.phase = "backward"
    ups = [otherwise(y.detach().cos() * use, number // 2)
           for y, (_, _, use) in zip(got, full[r])]  # fmt: skip
    torch.autograd.backward(got, ups)
    diffs = dict(
        y=max(difference(a, b) for a, b in zip(got, right)),
        x=difference(mine.grad, part(whole.grad, group)),
        weights=max(difference(m.weight.grad, W.grad)
                    for m, (W, _, _) in zip(linears, full[r])),
        biases=max(difference(m.bias.grad, b.grad)
                   for m, (_, b, _) in zip(linears, full[r])),
    )  # fmt: skip
    one = B * s * T * D * 8
    wanted = [["forward", "all-gather", 1, one], ["backward", "reduce-scatter", 1, one]]
    wanted += [] if save else [["backward", "all-gather", 1, one]]
    sent = sorted([key[1], key[2], *row] for key, row in lesson.COMM.rows.items())
    return dict(
        number=number, T=T, S=S, linears=len(widths), save=save, diffs=diffs, sent=sent,
        wanted=sorted(wanted) if T > 1 else [],
    )  # fmt: skip


def try_dropout(number: int, group) -> dict:
    """A slice of one mask, of any length; all ranks' generators move on alike."""
    rng = random.Random(f"dropout {number}")
    B, S, D = (rng.randint(1, n) for n in (3, 9, 5))
    p = rng.choice([0.1, 0.25, 0.5, 0.9])
    torch.manual_seed(number)
    x, upstream = torch.randn(2, B, S, D, dtype=torch.float64)
    torch.manual_seed(number)
    keep = torch.rand(B, S, D) >= p
    after = torch.rand(3)
    mine = part(x, group).requires_grad_()
    torch.manual_seed(number)
    got = lesson.sequence_dropout(mine, p, S, group)
    in_step = torch.equal(torch.rand(3), after)
    got.backward(part(upstream, group))
    diffs = [
        difference(got, part(plain_dropout(x, keep, p), group)),
        difference(mine.grad, part(plain_dropout(upstream, keep, p), group)),
        0.0 if in_step else math.inf,
    ]
    return dict(T=group.size(), S=S, p=p, diffs=diffs)


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: the storages that autograd keeps, each once."""

    def __init__(self):
        self.storages = {}
        super().__init__(self.keep, lambda x: x)

    def keep(self, x):
        storage = x.untyped_storage()
        self.storages[storage.data_ptr()] = storage  # held, so no other has its address
        return x

    def look_into(self, node) -> None:
        """Tensors that a Function keeps as attributes of its ctx, past the hooks."""
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, torch.Tensor):
                self.keep(value)
        for before, _ in node.next_functions if node else ():
            self.look_into(before)

    def nbytes(self, without: list) -> int:
        left_out = {x.untyped_storage().data_ptr() for x in without}
        return sum(self.storages[at].nbytes() for at in self.storages.keys() - left_out)


def make_layer(B: int, S: int, D: int, N: int, p: float, dtype, seed: int) -> tuple:
    """A layer of the reference, its tables, and a gradient for what it returns."""
    torch.manual_seed(seed)
    full = lesson.DecoderLayer(lesson.Config(0, D, N, N, 1, S, p)).to(dtype)
    tables = [x.to(dtype) for x in lesson.rotary_table(S, D // N)]
    tables.append(torch.ones(S, S, dtype=torch.bool).triu(1))
    x, upstream = torch.randn(2, B, S, D).to(dtype)
    return full, tables, x, upstream


def try_memory(sizes: tuple, dtype, group) -> dict:
    """Bytes that autograd keeps of a layer built in each of the ways."""
    full, tables, x, _ = make_layer(*sizes, 0.1, dtype, 0)
    found = {}
    for way, layer in lesson.build_layers(full, group).items():
        mine = (part(x, group) if "SP" in way else x.clone()).requires_grad_()
        kept = Kept()
        with kept:
            y = layer(mine, *tables)
        assert y.shape == mine.shape and y.requires_grad
        kept.look_into(y.grad_fn)
        found[way] = kept.nbytes([*layer.parameters(), *tables])
    return dict(sizes=sizes, T=group.size(), size=dtype.itemsize, bytes=found)


def try_recompute(number: int, group) -> dict:
    """Each way's output and gradients: recomputed to the bit, and the whole layer's."""
    T = group.size()
    sizes = 1 + number % 3, T * (1 + number % 2), 4 * T, T, 0.3, torch.float64
    full, tables, x, upstream = make_layer(*sizes, number)
    results, diffs, bits, draws = {}, {}, {}, []
    for way, layer in lesson.build_layers(full, group).items():
        cut = (lambda t: part(t, group)) if "SP" in way else torch.clone
        mine = cut(x).requires_grad_()
        torch.manual_seed(number)
        y = layer(mine, *tables)
        y.backward(cut(upstream))
        draws.append(torch.rand(3).tolist())
        names = [n.replace("inner.", "") for n, _ in layer.named_parameters()]
        grads = [p.grad for p in layer.parameters()]
        results[way] = {"y": y.detach(), "x": mine.grad} | dict(zip(names, grads))
        whole = results["no parallelism"]
        diffs[way] = max(difference(results[way][k], cut(whole[k])) for k in ("y", "x"))
        plain = results.get("TP + SP" if "SP" in way else "TP", {})
        if "recompute" in way or "selective" in way:
            same = results[way].keys() == plain.keys()
            one = results[way]
            bits[way] = same and all(torch.equal(one[k], plain[k]) for k in plain)
    return dict(
        number=number, T=T, diffs=diffs, bits=bits, names=len(names),
        one_generator=draws == draws[:1] * len(draws),
    )  # fmt: skip


def refusals(group) -> dict:
    """What four ranks say to what they cannot split or look up."""
    full = lambda heads, kv: lesson.Transformer(
        lesson.Config(10, 2 * heads, heads, kv, 1, 5, 0.0)
    )
    sp = lambda: lesson.SPTransformer(full(4, 4), group)
    calls = {
        "heads": lambda: lesson.SPTransformer(full(2, 1), group),
        "kv-heads": lambda: lesson.SPTransformer(full(4, 1), group),
        "token 10": lambda: sp()(torch.tensor([[0, 10]])),
        "token -1": lambda: sp()(torch.tensor([[-1, 3, 4]])),
        "6 positions of 5": lambda: sp()(torch.zeros(1, 6, dtype=torch.int64)),
        "split of 6": lambda: lesson.ScatterToSequence.apply(
            torch.zeros(2, 6), 1, group
        ),
    }
    found = {}
    for what, call in calls.items():
        try:
            call()
            found[what] = "none raised"
        except ValueError as error:
            found[what] = str(error)
    return found


def main() -> dict:
    start()
    groups = groups_of_4(lesson)
    found = dict(
        models=[try_model(n, groups[n % 4]) for n in range(MODELS)],
        pairs=[try_pairs(n, groups[n % 4]) for n in range(PAIRS)],
        linears=[try_linears(n, groups[n // 4 % 4]) for n in range(LINEARS)],
    )
    lesson.COMM.phase = ""
    return found | dict(
        dropouts=[try_dropout(n, groups[n % 4]) for n in range(DROPOUTS)],
        memory=[
            try_memory(sizes, dtype, group)
            for sizes in LAYERS for dtype in (torch.bfloat16, torch.float32)
            for group in groups[:3]
        ],
        recomputes=[try_recompute(n, groups[n % 4]) for n in range(RECOMPUTES)],
        refusals=refusals(groups[2]),
    )  # fmt: skip


if __name__ == "__main__":
    write_found(main())
    finish()
