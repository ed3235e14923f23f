"""A small audit: paste this file into your script and run it on your own ranks.

    faults = check(full, parallel, run, group)

Every rank of the group calls it. It runs both models, prints how the ranks' tensors
relate to those of the full model, and returns what is wrong, the same on all ranks.

full, parallel: the full model, the same on every rank, and the parallel model made of
    it; best in float64 (`.double()`), so that a difference is a bug and not rounding.
run(model): forward and backward of one batch, the same on all ranks. It returns the
    loss. It may also clip gradients and step an optimizer: both models are changed.
allowed: a relative difference that is no fault; for float32 take 1e-4.
blocks: of a fused linear that is split block by block: {"attn.qkv": [64, 32, 32]}.
"""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist


def check(full, parallel, run, group, allowed=1e-9, blocks=None):
    """Print a report on rank 0. Return the faults as texts; [] if all is right."""
    compare = partial(compare_all, group=group, allowed=allowed, blocks=blocks or {})
    expected, ours = record(full, run), record(parallel, run)
    faults = []
    for what in ("parameters, buffers", "loss", "gradients", "after run"):
        faults += compare(what, ours[what], expected[what])
    if faults:  # otherwise not: in front of f, a partial gradient is right
        for what in ("forward", "backward"):  # the first wrong output, and gradient
            faults += compare(what, ours[what], expected[what])[:1]
    if group.rank() == 0:
        print("WRONG" if faults else "right in all that was compared", flush=True)
    return faults


def local(x):
    """Copies on the CPU; of a DTensor the full tensor (its partial sums are added)."""
    if isinstance(x, dict):
        return {name: local(each) for name, each in x.items()}
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().to("cpu", copy=True)


def record(model, run):
    """Run a model. Return its tensors by name: values before and after, outputs, …"""
    outputs, upstream, names = {}, {}, {m: n for n, m in model.named_modules()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {n: x for n, x in model.named_buffers() if x.is_floating_point()}
    state.update(parameters)

    def hook(module, args, output):
        x = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return
        name = names[module] or "the model"
        while name in outputs:  # it is called several times
            name += "'"
        outputs[name] = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda grad: upstream.update({name: grad.clone()}))

    hooks = [module.register_forward_hook(hook) for module in names]
    before = local(state)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = torch.as_tensor(run(model))
    for each in hooks:
        each.remove()
    grads = {n: p.data * 0 if p.grad is None else p.grad for n, p in parameters.items()}
    found = {"parameters, buffers": before, "after run": state, "loss": {"loss": loss}}
    found |= {"gradients": grads, "forward": outputs, "backward": upstream}
    return local(found)


def compare_all(what, ours, expected, group, allowed, blocks):
    """Print how many tensors are right, and how they are held. Return the others."""
    counts, faults, T = Counter(), [], group.size()
    for name, full in expected.items():
        module = name if name in blocks else name.rpartition(".")[0]
        if module in blocks:  # reorder: rank 0's slice of each block, then rank 1's, …
            dim = -1 if module == name else 0  # of an output, or of weight and bias
            cut = [block.chunk(T, dim) for block in full.split(blocks[module], dim)]
            full = torch.cat([piece[r] for r in range(T) for piece in cut], dim)
        parts = [None] * T
        dist.all_gather_object(parts, ours.get(name), group=group)
        right, words = explain(parts, full, allowed)
        counts["✗" if right is False else words] += 1
        if right is False:
            faults.append(f"✗ {what}: {name}: {words}")
    if group.rank() == 0:
        said = [f"{number} {words}" for words, number in counts.items()]
        print("\n   ".join([f"{what}: {', '.join(said)}", *faults[:3]]))
    return faults


def explain(parts, full, allowed):
    """(Is it right?, in words), by the first placement and relation that fit."""
    T = len(parts)
    views = [("replicated", [full] * T)]
    for dim in range(full.dim()):  # of two ways if T does not divide it
        views.append((f"Shard({dim})", full.chunk(T, dim)))
        views.append((f"Shard({dim})", full.tensor_split(T, dim)))
    shapes = [getattr(part, "shape", None) for part in parts]
    found = None, "not compared (not on all ranks, or of another shape)"
    for name, pieces in views:
        if [piece.shape for piece in pieces] != shapes:
            continue
        if all(near(*pair, allowed) for pair in zip(parts, pieces)):
            return True, name
        found = False, f"{relation(parts, pieces, full, allowed)} ({name})"
    return found


def relation(parts, pieces, full, allowed):
    """What the ranks hold instead of their pieces of the full tensor."""
    ranks = range(len(parts))
    bad = [r for r in ranks if not parts[r].isfinite().all()]
    if bad:
        return f"nan or inf on ranks {bad}"
    held = [[r for r in ranks if near(part, pieces[r], allowed)] for part in parts]
    if all(held):
        return f"the pieces of ranks {[found[0] for found in held]}"
    right = [r for r in ranks if r in held[r]]
    if right:
        return f"right on ranks {right} only"
    if parts[0].shape == full.shape and near(sum(parts), full, allowed):
        return "partial: a sum over the ranks is missing"
    if full.numel() == 1:
        return f"{[part.item() for part in parts]}, not {full.item()}"
    factors = [(a * b).sum() / (b * b).sum() for a, b in zip(parts, pieces)]
    if all(near(parts[r], factors[r] * pieces[r], allowed) for r in ranks):
        times = dict.fromkeys(f"{factor:.4g}" for factor in factors)
        return f"{', '.join(times)} times the right one"
    if full.dim() > 1 and parts[0].numel():
        off = (parts[0] - pieces[0]).flatten(0, -2)
        if near(off, off[:1].expand_as(off), allowed):
            return "off by one vector at all positions, like a bias"
    ours = torch.cat([part.flatten() for part in parts]).sort().values
    expected = torch.cat([piece.flatten() for piece in pieces]).sort().values
    if near(ours, expected, allowed):
        return "the right elements in another order (see blocks)"
    return "unexplained"


def near(x, expected, allowed):
    """Are two tensors equal but for rounding errors?"""
    off = (x - expected).abs()
    return x.numel() == 0 or bool(off.max() <= allowed * expected.abs().max())
