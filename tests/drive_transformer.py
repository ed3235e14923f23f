"""Four ranks train lesson 02's split transformer on random sizes, beside the whole one.

    torchrun --nproc_per_node=4 drive_transformer.py FOLDER

Every rank trains the whole model alone, cuts out what it should hold by the table CUTS,
and compares that with what the lesson's parallel model has.
"""

import copy
import hashlib
import math
import random

import torch
import torch.nn.functional as F
from in_ranks import difference, finish, groups_of_4, load, start, write_found

lesson = load("02_transformer_tp")
MODELS, DROPOUTS, STEPS = 60, 48, 3
CUTS = {  # what is cut, and along which dim; all else is whole on every rank
    "self_attn.q_proj.weight": 0, "self_attn.q_proj.bias": 0,
    "self_attn.k_proj.weight": 0, "self_attn.k_proj.bias": 0,
    "self_attn.v_proj.weight": 0, "self_attn.v_proj.bias": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.up_proj.weight": 0, "mlp.up_proj.bias": 0, "mlp.down_proj.weight": 1,
}  # fmt: skip


def dim_of(name: str) -> int | None:
    return CUTS.get(".".join(name.split(".")[2:]))


def off(got, whole, name: str, group) -> float:
    """The difference of this rank's piece, by the largest number of the whole."""
    dim = dim_of(name)
    wanted = whole
    if dim is not None:
        assert whole.shape[dim] % group.size() == 0
        wanted = whole.tensor_split(group.size(), dim)[group.rank()]
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    diff = (got - wanted).abs().max().item() / whole.abs().max().item()
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


def make(number: int, T: int) -> tuple:
    """A random config that T ranks can share, and the sizes of its batches."""
    rng = random.Random(f"model {number}")
    kv_heads = T * rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 3)
    B, S = rng.randint(1, 3), rng.randint(1, 9) if number % 5 else 1
    config = lesson.Config(
        rng.randint(2, 30), heads * 2 * rng.randint(1, 4), heads, kv_heads,
        rng.choice([1, 1, 2, 3]), S + rng.randint(0, 3),
        (0.0, 0.1, 0.5)[number // 4 % 3],
    )  # fmt: skip
    full = lesson.Transformer(config).double()
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, p in full.named_parameters():
            size = p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * size + ("norm" in name))
    return config, full, B, S, generator


def backward(logits, target, upstream, loss_of) -> None:
    """From random upstream gradients if there are some, else from the mean loss."""
    if upstream is not None:
        logits.backward(upstream)
    else:
        loss_of(logits, target).backward()


def plain_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def try_model(number: int, group) -> dict:
    """Three steps of training and one forward without dropout, both ways."""
    config, full, B, S, generator = make(number, group.size())
    before = {name: p.clone() for name, p in parameters(full).items()}
    alone, tp = copy.deepcopy(full), lesson.tp_transformer(full, group)
    same_names = list(parameters(tp)) == list(parameters(full))
    held = worst_off(parameters(tp), parameters(full), group)
    models = (alone, tp)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in models]
    diffs = {k: [0.0, ""] for k in ("logits", "gradients", "norm", "clipped")}
    sent, clips = {}, []
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (B, S), generator=generator)
        target = torch.randint(config.vocab_size, (B, S), generator=generator)
        target[:, 1:][torch.rand(B, S - 1, generator=generator) < 0.3] = -100
        shape = B, S, config.vocab_size
        upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
        upstream = upstream if step == 0 else None
        torch.manual_seed(1000 * number + step)
        logits = alone(tokens)
        backward(logits, target, upstream, plain_loss)
        torch.manual_seed(1000 * number + step)
        lesson.COMM.rows.clear()
        lesson.COMM.phase = "forward"
        got = tp(tokens)
        lesson.COMM.phase = "backward"
        backward(got, target, upstream, lesson.mean_loss)
        sent = {key[1:]: [*row] for key, row in lesson.COMM.rows.items()}
        wanted = gradients(alone)
        here = {"logits": [difference(got, logits), ""]}
        here["gradients"] = worst_off(gradients(tp), wanted, group)
        norm = math.sqrt(sum(g.square().sum().item() for g in wanted.values()))
        limit = norm * (0.3, 3.0, 0.01)[(number + step) % 3]
        unclipped = gradients(tp)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), limit)
        told = lesson.global_norm(tp, group)
        lesson.clip_gradients(tp, limit, told)
        here["clipped"] = worst_off(gradients(tp), gradients(alone), group)
        untouched = all(torch.equal(a, unclipped[n]) for n, a in gradients(tp).items())
        here["norm"] = [abs(told - norm) / norm, ""]
        clips.append([norm / limit, untouched])
        diffs = {kind: max(diffs[kind], here[kind]) for kind in diffs}
        for model, optimizer in zip(models, optimizers):
            optimizer.step()
            model.zero_grad()
    diffs["parameters"] = worst_off(parameters(tp), parameters(alone), group)
    diffs["held"] = held
    with torch.no_grad():
        diffs["eval"] = [difference(tp.eval()(tokens), alone.eval()(tokens)), ""]
    digest = hashlib.sha256()
    for name, p in parameters(tp).items():
        if dim_of(name) is None:
            digest.update(p.numpy().tobytes())
    own = all(torch.equal(p, before[name]) for name, p in parameters(full).items())
    whole = B * S * config.hidden * 8 if group.size() > 1 else 0
    return dict(
        number=number, T=group.size(), config=config._asdict(), B=B, S=S, diffs=diffs,
        clips=clips, own=own, names=same_names, replicas=digest.hexdigest(),
        group=torch.distributed.get_process_group_ranks(group),
        sent=sorted([*key, *row] for key, row in sent.items()),
        wanted=sorted(
            [phase, "all-reduce", "tp", 2 * config.layers, 2 * config.layers * whole]
            for phase in ("forward", "backward") if whole
        ),
    )  # fmt: skip


def plain_dropout(x, keep, p):
    return torch.where(keep, x / (1 - p), torch.zeros_like(x))


def try_dropout(number: int, group) -> dict:
    """A slice of the full mask where x is a slice, the full mask where x is whole."""
    rng = random.Random(f"dropout {number}")
    T, r = group.size(), group.rank()
    shape = [T * rng.randint(1, 3) for _ in range(4)]
    dim, p = rng.randrange(4), rng.choice([0.1, 0.25, 0.5, 0.9])
    x = torch.randn(shape, dtype=torch.float64)  # from the generator's next numbers
    upstream = torch.randn(shape, dtype=torch.float64)
    part = lambda whole: whole.tensor_split(T, dim)[r].contiguous()
    torch.manual_seed(number)
    keep = torch.rand(shape) >= p
    after = torch.rand(3)
    found = {}
    sharded, whole = lesson.ShardedDropout(p, dim, group), lesson.Dropout(p)
    for name, dropout, cut in (
        ("sharded", sharded, part), ("whole", whole, lambda whole: whole),
    ):  # fmt: skip
        mine = cut(x).clone().requires_grad_()
        torch.manual_seed(number)
        got = dropout(mine)
        in_step = torch.equal(torch.rand(3), after)
        got.backward(cut(upstream))
        found[name] = [
            difference(got, cut(plain_dropout(x, keep, p))),
            difference(mine.grad, cut(plain_dropout(upstream, keep, p))),
            0.0 if in_step else math.inf,
        ]
    return dict(T=T, dim=dim, p=p, diffs=found)


def refusals(group) -> list:
    """What a model says whose heads do not divide: (what, message)."""
    found = []
    for what, heads, kv_heads in (("kv-heads", 4, 1), ("heads", 2, 1)):
        full = lesson.Transformer(lesson.Config(5, 2 * heads, heads, kv_heads, 1, 4, 0))
        try:
            lesson.tp_transformer(full, group)
            found.append([what, "none raised"])
        except ValueError as error:
            found.append([what, str(error)])
    return found


def main() -> dict:
    start()
    groups = groups_of_4(lesson)
    torch.manual_seed(0)
    return dict(
        models=[try_model(n, groups[n % 4]) for n in range(MODELS)],
        dropouts=[try_dropout(n, groups[n % 4]) for n in range(DROPOUTS)],
        refusals=refusals(groups[2]),
    )


if __name__ == "__main__":
    write_found(main())
    finish()
