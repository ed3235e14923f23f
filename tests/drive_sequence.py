"""Four ranks: lesson 04's split sequence against plain torch, forward and backward.

    torchrun --nproc_per_node=4 drive_sequence.py FOLDER

Every rank computes the whole thing alone, in float64, and cuts out what it should have.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_ranks import (
    ROWS,
    Twins,
    columns,
    difference,
    dim_of,
    exact,
    gradients,
    groups_of_4,
    load,
    own_columns,
    random_batch,
    random_model,
    run,
)

lesson = load("04_sequence_parallel")
MODELS, STEPS, RECOMPUTES = 64, 2, 8
LAYERS = [  # B, S, D, N of the layers whose memory is measured
    (1, 4, 8, 4), (2, 8, 16, 4), (3, 12, 24, 4), (1, 16, 64, 8), (4, 8, 32, 16),
    (2, 20, 48, 8),
]  # fmt: skip


def slice_of(x, group):
    """This rank's positions."""
    return x.tensor_split(group.size(), 1)[group.rank()].clone()


def compare_logits(twins, kind: str, got, wanted) -> None:
    """This rank's columns of tokens, at the positions that are not padding."""
    v, group = got.shape[-1], twins.group
    real = own_columns(wanted.shape[-1], v, group)
    right = columns(wanted, v, group)[..., :real]
    twins.note(kind, difference(got[:, : wanted.shape[1], :real], right))


def take_step(twins, batch: tuple, seed: int, from_upstream: bool) -> None:
    """Forward and backward, both ways, on a batch that is padded for the sequence."""
    alone, sp, group = twins.alone, twins.split, twins.group
    (tokens, target, upstream), config = batch, alone.config
    padded, padded_target = lesson.pad_batch(tokens, target, group.size())
    padded = padded.clamp(max=config.vocab_size - 1)  # PAD is no token of ours
    missing = padded.shape[1] - tokens.shape[1]
    padded_upstream = F.pad(upstream, (0, 0, 0, missing))
    if config.dropout:  # masks are drawn by shape: one process pads, too
        tokens, target, upstream = padded, padded_target, padded_upstream
    torch.manual_seed(seed)
    logits = alone(tokens)
    wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    logits.backward(upstream) if from_upstream else wanted.backward()
    torch.manual_seed(seed)
    got = sp(padded)
    loss = lesson.sharded_loss(got, padded_target, group, config.vocab_size)
    if from_upstream:
        got.backward(columns(padded_upstream, got.shape[-1], group))
    else:
        loss.backward()
    compare_logits(twins, "logits", got, logits)
    twins.note("loss", difference(loss, wanted))


def look_at_parts(twins, S: int) -> dict:
    """The ranks' gradients of replicated parameters before they are added: they should
    be parts, which add up; no rank has another's, or all, or something of padding."""
    group, s = twins.group, -(-S // twins.group.size())
    busy = [rank for rank in range(group.size()) if rank * s < S]  # with positions
    found = dict(sum=0.0, idle=0, alike=0, whole=0, names=0, busy=len(busy))
    wholes = gradients(twins.alone)
    for name, mine in gradients(twins.split).items():
        if name in ROWS or dim_of(name) is not None:
            continue
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        found["names"] += 1
        found["sum"] = max(found["sum"], difference(sum(parts), wholes[name]))
        for rank, part in enumerate(parts):
            if rank not in busy:
                found["idle"] += part.count_nonzero().item()
                continue
            found["whole"] += difference(part, wholes[name]) <= 1e-12
            found["alike"] += any(torch.equal(part, other) for other in parts[:rank])
    return found


def try_model(number: int, group) -> dict:
    """Two steps of training, both ways: from random upstream gradients, from a loss."""
    T, save, tied = group.size(), number % 3 == 0, number // 5 % 2 == 1
    full, B, S, generator = random_model(lesson, number, T, tied)
    sp = lesson.sp_transformer(full, group, save)
    twins = Twins(lesson, full, sp, group)
    is_one = sp.lm_head.weight is sp.embed_tokens.weight
    twins.note("tied", exact(is_one is tied))
    for step in range(STEPS):
        batch = random_batch(full.config, B, S, generator)
        take_step(twins, batch, 1000 * number + step, step == 0)
        if step == 0:
            parts = look_at_parts(twins, S)
        before = gradients(sp)
        lesson.all_reduce_replicated_gradients(sp, group)
        after = gradients(sp)
        twins.compare("gradients", after, gradients(twins.alone))
        for name in before:  # what is cut is not touched by the sum
            if name in ROWS or dim_of(name) is not None:
                twins.note("touched", difference(after[name], before[name]), name)
        twins.update((0.3, 3.0, 0.01)[(number + step) % 3])
    with torch.no_grad():
        wanted = twins.alone.eval()(batch[0])
        padded, _ = lesson.pad_batch(*batch[:2], T)
        got = sp.eval()(padded.clamp(max=full.config.vocab_size - 1))
    compare_logits(twins, "eval", got, wanted)
    about = dict(T=T, B=B, S=S, tied=tied, save=save, config=full.config._asdict())
    return about | dict(parts=parts, diffs=twins.end())


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: the storages that autograd keeps, once; which are masks."""

    def __init__(self):
        self.storages = {}
        super().__init__(self.keep, lambda x: x)

    def keep(self, x):
        storage = x.untyped_storage()  # held, so no other has its address
        self.storages[storage.data_ptr()] = storage, x.dtype == torch.bool
        return x

    def look_into(self, node) -> None:
        """Tensors that a Function keeps as attributes of its ctx, past the hooks."""
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, torch.Tensor):
                self.keep(value)
        for before, _ in node.next_functions if node else ():
            self.look_into(before)

    def nbytes(self, without: list) -> list:
        """Bytes of numbers, bytes of masks."""
        left_out = {x.untyped_storage().data_ptr() for x in without}
        found = [0, 0]
        for at in self.storages.keys() - left_out:
            storage, is_mask = self.storages[at]
            found[is_mask] += storage.nbytes()
        return found


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
    results, diffs, bits, draws = {}, {}, {}, set()
    for way, layer in ways_of(full, group).items():
        cut = (lambda t: slice_of(t, group)) if "SP" in way else torch.clone
        mine = cut(x).requires_grad_()
        torch.manual_seed(number)
        y = layer(mine, tables)
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
    return dict(T=T, diffs=diffs, bits=bits, tensors=len(here), draws=len(draws))


def main() -> dict:
    groups = groups_of_4(lesson)
    return dict(
        models=[try_model(n, groups[n % 4]) for n in range(MODELS)],
        memory=[
            try_memory(sizes, dtype, group)
            for sizes in LAYERS for dtype in (torch.bfloat16, torch.float32)
            for group in groups[:3]
        ],
        recomputes=[try_recompute(n, groups[n % 4]) for n in range(RECOMPUTES)],
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
