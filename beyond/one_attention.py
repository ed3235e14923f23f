"""One attention on random input: whole, from slices, and what it saves for backward.

A helper of beyond/11_context_parallel.py, no script.
"""

import torch
from course import lesson00, lesson02
from zigzag import positions_of


def random_attention(args, size: dict, S: int) -> tuple:
    """CoreAttention, its tables, and random q, k, v and dL/dy of S positions."""
    generator = torch.Generator().manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    tensors = []
    for heads in (size["n"], size["k"], size["k"], size["n"]):
        shape = (size["B"], S, heads * size["H"])
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors.append(x.to(args.device, dtype))
    cos_SH, sin_SH = lesson02.rotary_table(S, size["H"])
    future_SS = torch.ones(S, S, dtype=torch.bool).triu(1)
    tables = [cos_SH.to(dtype), sin_SH.to(dtype), future_SS]
    core = lesson02.CoreAttention(size["H"], 0.0)
    return core, [x.to(args.device) for x in tables], tensors


def split_attention(method, core, tables, tensors, cp_group) -> dict:
    """Output and gradients from this rank's positions, gathered from all ranks.

    method: a Method of the script; tensors: as random_attention returns them.
    """
    C = cp_group.size()
    S = tensors[0].shape[1]
    # Where the elements of an all-gather are in the full sequence.
    order = torch.cat([positions_of(r, C, method.layout, S) for r in range(C)])
    here = positions_of(cp_group.rank(), C, method.layout, S)
    q, k, v, grad_y = [x.detach()[:, here] for x in tensors]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = method.attention(q, k, v, tables, core, cp_group, method.layout)
    y.backward(grad_y)
    found = dict(zip(("y", "dL/dq", "dL/dk", "dL/dv"), [y] + [x.grad for x in inputs]))
    for name, x in found.items():
        gathered = lesson00.all_gather(x, 1, cp_group)  # in the order of ranks
        found[name] = gathered[:, order.argsort()]
    return found


def bytes_saved(args, method, size: dict, cp_group) -> int:
    """Measured in one forward pass; method is None without CP."""
    core, tables, tensors = random_attention(args, size, size["S"])
    # A rank's slice. Which positions it has does not matter for bytes.
    held = size["S"] if method is None else size["s"]
    q, k, v = [x[:, :held].clone().requires_grad_() for x in tensors[:3]]
    if method is None:
        compute = lambda: core(q, k, v, tables)
    else:
        compute = lambda: method.attention(
            q, k, v, tables, core, cp_group, method.layout
        )
    return lesson00.saved_bytes(compute, [q, k, v] + tables)
