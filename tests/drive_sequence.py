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
from drive_vocab import columns, rows
from in_ranks import difference, finish, groups_of_4, load, start, write_found
from torch import nn

lesson = load("04_sequence_parallel")
MODELS, STEPS, PAIRS, LINEARS, RECOMPUTES = 64, 2, 48, 64, 8
LAYERS = [  # B, S, D, N of the layers whose memory is measured
    (1, 4, 8, 4), (2, 8, 16, 4), (3, 12, 24, 4), (1, 16, 64, 8), (4, 8, 32, 16),
    (2, 20, 48, 8),
]  # fmt: skip


def is_replicated(name: str) -> bool:
    return "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))


def piece(whole, name: str, group):
    """This rank's part of a parameter or a gradient, by lesson 02's and 03's cuts."""
    if is_replicated(name):
        return whole
    if name.startswith(("embed_tokens", "lm_head")):
        return rows(whole, -(-len(whole) // group.size()), group)
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    return whole.tensor_split(group.size(), dim)[group.rank()]


def off(got, whole, name: str, group) -> float:
    """The difference of this rank's piece, by the largest number of the whole."""
    wanted = piece(whole, name, group)
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


def parameters(model) -> dict:
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients(model) -> dict:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def slice_of(x, group):
    """This rank's positions."""
    return x.tensor_split(group.size(), 1)[group.rank()].clone()


def make(number: int, T: int) -> tuple:
    """A random model that T ranks can share, and the sizes of its batches."""
    rng = random.Random(f"model {number}")
    kv_heads = T * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 3)
    B, S = rng.randint(1, 3), rng.randint(1, 11)
    special = {0: rng.choice([1, T + 2]), 1: T * rng.randint(1, 3), 2: T + 1}
    S = special.get(number // 4 % 4, S)
    H = 2 * rng.randint(1, 3) if heads > 2 else 6  # a norm of two numbers is ±1
    config = lesson.Config(
        rng.randint(2, 30), heads * H, heads, kv_heads, rng.choice([1, 1, 2, 3]),
        -(-S // T) * T + rng.randint(0, 3), (0.0, 0.1, 0.5)[number // 3 % 3],
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


def draw_batch(config, B: int, S: int, T: int, generator) -> tuple:
    """Tokens, targets of which some are ignored, upstream gradients of the logits; and
    the same padded, the upstream gradients by zeros."""
    tokens = torch.randint(config.vocab_size, (B, S), generator=generator)
    target = torch.randint(config.vocab_size, (B, S), generator=generator)
    target[:, 1:][torch.rand(B, S - 1, generator=generator) < 0.3] = -100
    shape = B, S, config.vocab_size
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    padded = list(lesson.pad_batch(tokens, target, T))
    padded[0] = padded[0].clamp(max=config.vocab_size - 1)  # PAD is no token of ours
    padded.append(F.pad(upstream, (0, 0, 0, -S % T)))
    return (tokens, target, upstream), padded


def take_step(alone, sp, batches, V: int, group, seed: int, random_upstream) -> tuple:
    """Forward and backward both ways: differences, and gradients before the sum."""
    (tokens, target, upstream), (padded, padded_target, padded_upstream) = batches
    if alone.config.dropout:  # masks are drawn by shape: one process pads, too
        tokens, target, upstream = padded, padded_target, padded_upstream
    torch.manual_seed(seed)
    logits = alone(tokens)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
    logits.backward(upstream) if random_upstream else wanted.backward()
    torch.manual_seed(seed)
    lesson.COMM.rows.clear()
    lesson.COMM.phase = "forward"
    got = sp(padded)
    lesson.COMM.phase = "loss"
    losses = lesson.vocab_parallel_cross_entropy(got, padded_target, group, V)
    loss = lesson.mean_over_targets(losses, padded_target)
    lesson.COMM.phase = "backward"
    v = got.shape[-1]
    if random_upstream:
        got.backward(columns(padded_upstream, v, group, 0.0))
    else:
        loss.backward()
    here = {"logits": [logits_off(got, logits.detach(), group), ""]}
    here["loss"] = [difference(loss, wanted), ""]
    return here, gradients(sp)


def logits_off(got, wanted, group) -> float:
    """This rank's columns of tokens, at the positions that are not padding."""
    v = got.shape[-1]
    real = max(0, min(wanted.shape[-1] - group.rank() * v, v))
    right = columns(wanted, v, group, 0.0)[..., :real]
    return difference(got[:, : wanted.shape[1], :real], right) if real else 0.0


def add_parts(parts: dict, wanted: dict, S: int, group) -> dict:
    """What the ranks' gradients of replicated parameters are before they are added."""
    names = [name for name in wanted if is_replicated(name)]
    flat = torch.cat([parts[name].flatten() for name in names])
    everyone = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(everyone, flat, group=group)
    sizes, s = [wanted[name].numel() for name in names], -(-S // group.size())
    cut = [dict(zip(names, one.split(sizes))) for one in everyone]
    sums = {name: sum(one[name] for one in cut) for name in names}
    busy = [one for rank, one in enumerate(cut) if rank * s < S]
    padding = everyone[len(busy) :]  # ranks that have no position of the sequence
    pairs = [(one, two) for i, two in enumerate(busy) for one in busy[:i]]
    return dict(
        sum=worst_off(sums, {name: wanted[name] for name in names}, group),
        idle=sum(one.count_nonzero().item() for one in padding),
        busy=len(busy), names=len(names),
        alike=sum(torch.equal(one[n], two[n]) for one, two in pairs for n in names),
        whole=sum(  # already right before they are added
            off(one[name], wanted[name], name, group) <= 1e-12
            for one in busy for name in names
        ),
    )  # fmt: skip


def calls_wanted(config, B: int, S: int, T: int, save: bool) -> list:
    """Phase, collective, axis, calls, bytes of a step; worked out by hand."""
    if T == 1:
        return []
    n, e, tokens = 2 * config.layers + 1, 8, B * -(-S // T) * T
    each, again = tokens * config.hidden * e, 0 if save else n
    return sorted([
        ["forward", "all-gather", "tp", n, n * each],
        ["forward", "reduce-scatter", "tp", n, n * each],
        ["loss", "all-reduce", "tp", 3, 3 * tokens * e],
        ["backward", "reduce-scatter", "tp", n, n * each],
        ["backward", "all-gather", "tp", n + again, (n + again) * each],
        ["sum", "all-reduce", "tp", 1, (6 * config.layers + 2) * config.hidden * e],
    ])  # fmt: skip


def replicas(model) -> str:
    """A digest of what should be the same on every rank."""
    digest = hashlib.sha256()
    for name, p in parameters(model).items():
        if is_replicated(name):
            digest.update(p.numpy().tobytes())
    return digest.hexdigest()


def sum_replicated(sp, parts: dict, wanted: dict, group) -> dict:
    """Gradients after the sum; those that are cut are not touched by it."""
    lesson.COMM.phase = "sum"
    lesson.all_reduce_replicated_gradients(sp, group)
    after = gradients(sp)
    cut = [name for name in parts if not is_replicated(name)]
    touched = sum(not torch.equal(after[name], parts[name]) for name in cut)
    return {"gradients": worst_off(after, wanted, group), "touched": [touched, ""]}


def update(alone, sp, optimizers: list, factor: float, group) -> dict:
    """Clipping to so much of the norm, and AdamW, both ways."""
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients(alone).values()))
    torch.nn.utils.clip_grad_norm_(alone.parameters(), factor * norm)
    told = lesson.global_norm(sp, group)
    lesson.clip_gradients(sp, factor * norm, told)
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
    models = copy.deepcopy(full), lesson.sp_transformer(full, group, save)
    alone, sp = models
    diffs = {"held": worst_off(parameters(sp), parameters(full), group)}
    same_names = list(parameters(sp)) == list(parameters(full))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-5) for m in models]
    for step in range(STEPS):
        batches = draw_batch(config, B, S, T, generator)
        step_is = config.vocab_size, group, 1000 * number + step, not step
        here, parts = take_step(*models, batches, *step_is)
        if step == 0:
            added = add_parts(parts, gradients(alone), S, group)
        here |= sum_replicated(sp, parts, gradients(alone), group)
        sent = sorted([*key[1:], *row] for key, row in lesson.COMM.rows.items())
        here |= update(*models, optimizers, (0.3, 3.0)[(number + step) % 2], group)
        for kind, found in here.items():
            diffs[kind] = max(diffs.get(kind, [0.0, ""]), found)
    with torch.no_grad():
        (tokens, *_), (padded, *_) = batches
        wanted, got = alone.eval()(tokens), sp.eval()(padded)
    diffs["eval"] = [logits_off(got, wanted, group), ""]
    return dict(
        number=number, T=T, config=config._asdict(), B=B, S=S, diffs=diffs,
        tied=sp.lm_head.weight is sp.embed_tokens.weight, save=save, names=same_names,
        own=all(torch.equal(p, before[name]) for name, p in parameters(full).items()),
        group=dist.get_process_group_ranks(group), replicas=replicas(sp),
        parts=added, sent=sent, wanted=calls_wanted(config, B, S, T, save),
    )  # fmt: skip


def otherwise(x, number: int):
    """The same numbers, on every other call laid out otherwise."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if number % 2 else x


def try_pairs(number: int, group) -> dict:
    """Which backward goes with which forward: each pair against one process's autograd.

    Into a pair goes x, out of it comes y, and the loss is Σ sin(y)·use. Where each rank
    has a use of its own for y, the loss is the sum over ranks.
    """
    rng, T, r = random.Random(f"pairs {number}"), group.size(), group.rank()
    generator = torch.Generator().manual_seed(number)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)
    shape = [T * rng.randint(1, 2) for _ in range(3)]
    dim = rng.randrange(3)
    cut = lambda t: t.tensor_split(T, dim)[r].clone()
    uses, x, terms = draw(T, *shape), draw(*shape), draw(T, *shape)
    gathered, own, one_use = cut(x), uses[r], uses[:1]
    mine = lambda t: t[r]
    pairs = {  # what goes in here, and y's use; what goes in whole, its uses; our part
        "CopyToTP": (x, own, x, uses, lambda t: t),
        "ReduceFromTP": (terms[r], uses[0], terms, one_use, mine),
        "GatherFromTP": (gathered, uses[0], x, one_use, cut),
        "AllGather": (gathered, own, x, uses, cut),
        "ReduceScatter": (terms[r], cut(uses[0]), terms, one_use, mine),
    }
    found = {}
    for name, (given, use, whole, all_uses, part) in pairs.items():
        whole, given = whole.clone().requires_grad_(), given.clone().requires_grad_()
        summed = whole.sum(0) if whole.dim() == 4 else whole
        sum((summed.sin() * one).sum() for one in all_uses).backward()
        where = () if name in ("CopyToTP", "ReduceFromTP") else (dim,)
        y = getattr(lesson, name).apply(given, *where, group)
        y.backward(otherwise(y.detach().cos() * use, number))
        right = cut(summed.detach()) if name == "ReduceScatter" else summed.detach()
        found[name] = [difference(y, right), difference(given.grad, part(whole.grad))]
    return dict(number=number, T=T, dim=dim, diffs=found)


def try_linears(number: int, group) -> dict:
    """Linears of a gathered sequence; each rank has weights of its own."""
    rng, T, r = random.Random(f"linears {number}"), group.size(), group.rank()
    B, s, D = (rng.randint(1, n) for n in (3, 3, 5))
    widths, save = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))], number % 2
    generator = torch.Generator().manual_seed(number)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    full = [[(draw(f, D), draw(f), draw(B, s * T, f)) for f in widths]
            for _ in range(T)]  # fmt: skip
    whole = draw(B, s * T, D).requires_grad_()
    loss, right = 0.0, []
    for rank, of_rank in enumerate(full):
        for W, b, use in of_rank:
            W.requires_grad_(), b.requires_grad_()
            y = whole @ W.T + b
            right += [y.detach()] if rank == r else []
            loss = loss + (y.sin() * use).sum()
    loss.backward()
    linears = [nn.Linear(D, f, dtype=torch.float64) for f in widths]
    with torch.no_grad():
        for linear, (W, b, _) in zip(linears, full[r]):
            linear.weight.copy_(W), linear.bias.copy_(b)
            linear.tp_group = group
    mine = slice_of(whole.detach(), group).requires_grad_()
    project = lesson.gather_and_keep if save else lesson.gather_then_project
    lesson.COMM.rows.clear()
    lesson.COMM.phase = "forward"
    got = project(mine, *linears)
    lesson.COMM.phase = "backward"
    ups = [otherwise(y.detach().cos() * use, number // 2)
           for y, (_, _, use) in zip(got, full[r])]  # fmt: skip
    torch.autograd.backward(got, ups)
    pairs = list(zip(linears, full[r]))
    diffs = dict(
        y=max(difference(a, b) for a, b in zip(got, right)),
        x=difference(mine.grad, slice_of(whole.grad, group)),
        weights=max(difference(m.weight.grad, W.grad) for m, (W, _, _) in pairs),
        biases=max(difference(m.bias.grad, b.grad) for m, (_, b, _) in pairs),
    )
    each = B * s * T * D * 8
    wanted = [["forward", "all-gather", 1, each]]
    wanted += [["backward", "reduce-scatter", 1, each]]
    wanted += [] if save else [["backward", "all-gather", 1, each]]
    sent = sorted([key[1], key[2], *row] for key, row in lesson.COMM.rows.items())
    return dict(
        number=number, T=T, linears=len(widths), save=save, diffs=diffs, sent=sent,
        wanted=sorted(wanted) if T > 1 else [],
    )  # fmt: skip


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
    """A layer of the reference, its tables, an input, a gradient for its output."""
    torch.manual_seed(seed)
    model = lesson.Transformer(lesson.Config(1, D, N, N, 1, S, p)).to(dtype)
    x, upstream = torch.randn(2, B, S, D).to(dtype)
    return model.layers[0], (model.cos, model.sin, model.future), x, upstream


def ways_of(full, group) -> dict:
    """Name → layer, of the lesson's memory table."""
    return {name: layer for name, layer, *_ in lesson.layer_ways(full, group, 0, 0)}


def try_memory(sizes: tuple, dtype, group) -> dict:
    """Bytes that autograd keeps of a layer built in each of the ways."""
    full, tables, x, _ = make_layer(*sizes, 0.1, dtype, 0)
    found = {}
    for way, layer in ways_of(full, group).items():
        mine = (slice_of(x, group) if "SP" in way else x.clone()).requires_grad_()
        kept = Kept()
        with kept:
            y = layer(mine, tables)
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
    for way, layer in ways_of(full, group).items():
        cut = (lambda t: slice_of(t, group)) if "SP" in way else torch.clone
        mine = cut(x).requires_grad_()
        torch.manual_seed(number)
        y = layer(mine, tables)
        y.backward(cut(upstream))
        draws.append(torch.rand(3).tolist())
        names = [n.replace("inner.", "") for n, _ in layer.named_parameters()]
        grads = [p.grad for p in layer.parameters()]
        results[way] = {"y": y.detach(), "x": mine.grad} | dict(zip(names, grads))
        whole = results["without TP"]
        diffs[way] = max(difference(results[way][k], cut(whole[k])) for k in ("y", "x"))
        plain = results.get("TP + SP" if "SP" in way else "TP", {})
        if "full" in way or "selective" in way:
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
        lesson.Config(10, 2 * heads, heads, kv, 1, 8, 0.0)
    )
    sp = lambda: lesson.sp_transformer(full(4, 4), group)
    calls = {
        "heads": lambda: lesson.sp_transformer(full(2, 1), group),
        "kv-heads": lambda: lesson.sp_transformer(full(4, 1), group),
        "token 10": lambda: sp()(torch.tensor([[0, 10, 2, 3]])),
        "token -1": lambda: sp()(torch.tensor([[-1, 3, 4, 5]])),
        "6 positions": lambda: sp()(torch.zeros(1, 6, dtype=torch.int64)),
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
