"""PyTorch's context_parallel, which needs a GPU.

A helper of beyond/11_context_parallel.py, no script.
"""

import torch.nn.functional as F
from course import lesson02

# Its float32 kernel for GPUs pads the log-sum-exps of a chunk to a multiple of so many
# positions, and merging them fails (torch 2.11.0).
ROWS = 32


def why_left_out(args, size: dict) -> str:
    """Why PyTorch's context_parallel cannot run here, or ""."""
    if args.device == "cpu":
        return "it has no CPU kernel."
    if args.dtype == "float64":
        return "its kernels have no float64."
    chunk = size["S"] // (2 * size["C"])
    if chunk % ROWS:
        needed = 2 * size["C"] * ROWS
        text = f"a chunk is S/(2·C) = {chunk} positions, and its GPU kernel pads "
        return text + f"them to a multiple of {ROWS}: take --seq-len {needed}."
    return ""


def pytorch_attention(tensors, tables, head_size: int, cp_group) -> dict:
    """The same by PyTorch's context_parallel, a prototype.

    It shards the buffers in place, zigzag, and F.scaled_dot_product_attention becomes a
    ring. That needs a GPU, and float32 or less. (Run on an H200 with torch 2.11.0, two
    and four ranks, float32: all four tensors agree to 1e-6.) On CPU, PyTorch 2.13
    raises
    NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu
    .default does not have a sharding strategy registered.
    """
    # Imported here: only GPUs get here.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    mesh = DeviceMesh.from_group(cp_group, tensors[0].device.type)
    heads = [x.detach().unflatten(-1, (-1, head_size)) for x in tensors]
    buffers = [x.transpose(1, 2).contiguous().clone() for x in heads]
    buffers += [tables[0].clone(), tables[1].clone()]
    # Restoring a buffer would raise an error, because q, k and v require gradients.
    with context_parallel(
        mesh,
        buffers=buffers,
        buffer_seq_dims=[2, 2, 2, 2, 0, 0],
        no_restore_buffers=set(buffers),
    ):
        q, k, v = [x.requires_grad_() for x in buffers[:3]]
        grad_y, cos, sin = buffers[3:]
        # Each key/value head for the query heads that it serves.
        repeats = q.shape[1] // k.shape[1]
        k = lesson02.rotate(k, cos, sin).repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
        # Inside the `with`, this is a ring.
        y = F.scaled_dot_product_attention(
            lesson02.rotate(q, cos, sin), k, v, is_causal=True
        )
        y.backward(grad_y)
        parts = [y.detach()] + [x.grad for x in buffers[:3]]
        found = _attention.context_parallel_unshard(mesh, parts, [2] * 4)
    names = ("y", "dL/dq", "dL/dk", "dL/dv")
    return {name: x.transpose(1, 2).flatten(2) for name, x in zip(names, found)}
