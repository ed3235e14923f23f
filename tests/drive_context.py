"""Eight ranks compute attention of random shapes by every method of the script.

    torchrun --nproc_per_node=8 drive_context.py FOLDER

The same tensors on every rank; groups of 2, 3, 4 and 8 of the ranks, also of ranks that
are not neighbors. Compared with F.scaled_dot_product_attention on all positions.
"""

import contextlib
import random
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_ranks import difference, load, run
from torch.distributed.tensor import experimental

lesson = load("11_context_parallel")
lesson02 = lesson.lesson02  # with all that it carries over from earlier lessons
METER = lesson.lesson00.METER
GROUPS = [[0, 1], [2, 5, 7], [1, 3, 4, 6], [*range(8)], [3]]
CASES = 6  # of each group


def random_case(number: int, T: int) -> dict:
    """Sizes; S, K and N/K are such that all methods work."""
    rng = random.Random(f"context {number}")
    sizes = dict(
        B=rng.randint(1, 3), S=2 * T * rng.randint(1, 4), K=T * rng.randint(1, 2)
    )
    return sizes | dict(per_kv=rng.randint(1, 3), H=2 * rng.randint(1, 4))


def reference(q, k, v, tables, H: int):
    """In one process, by PyTorch's own attention."""
    q, k, v = (x.unflatten(-1, (-1, H)).transpose(1, 2) for x in (q, k, v))
    cos, sin, _ = tables
    q, k = lesson02.rotate(q, cos, sin), lesson02.rotate(k, cos, sin)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def calls_and_bytes() -> list[int]:
    """Of all that METER has counted since it was cleared."""
    payloads = [x for call in METER.calls.values() for x in call]
    return [len(payloads), sum(payloads)]


def try_case(number: int, group) -> list[dict]:
    T, rank = group.size(), group.rank()
    case = random_case(number, T)
    B, S, K, H = (case[name] for name in "BSKH")
    generator = torch.Generator().manual_seed(number)
    tensors = [
        torch.randn(B, S, heads * H, generator=generator, dtype=torch.float64)
        for heads in (K * case["per_kv"], K, K, K * case["per_kv"])
    ]
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    tables = (*(x.double() for x in lesson02.rotary_table(S, H)), future)
    whole = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = reference(*whole, tables, H)
    expected.backward(tensors[3])
    core, found = lesson02.CoreAttention(H, 0.0), []
    methods = lesson.METHODS | {
        "gather, zigzag": lesson.Method(lesson.gather_attention, "zigzag")
    }
    for name, (attention, layout) in methods.items():
        here = lesson.positions_of(rank, T, layout, S)
        q, k, v = (x[:, here].clone().requires_grad_() for x in tensors[:3])
        METER.calls.clear()
        with lesson.recorded_blocks(vars(lesson)) as computed, METER.phase("", ""):
            y = attention(q, k, v, tables, core, group, layout)
        forward = calls_and_bytes()
        with METER.phase("", ""):
            y.backward(tensors[3][:, here])
        diffs = {"y": difference(y, expected[:, here], expected)}
        for label, x, full in zip("qkv", (q, k, v), whole):
            diffs[f"dL/d{label}"] = difference(x.grad, full.grad[:, here], full.grad)
        blocks = [
            (step, int(block.query_at[0]), int(block.key_at[0]), len(block.key_at))
            for step, block in computed
        ]
        found.append(case | dict(
            name=name, layout=layout, T=T, rank=rank, diffs=diffs, blocks=blocks,
            forward=forward, both=calls_and_bytes(), here=here.tolist(),
        ))  # fmt: skip
    return found


@contextlib.contextmanager
def on_cpu(group):
    """context_parallel with an attention that the CPU has, in place of its ring.

    What it does to buffers and how they are put together again is PyTorch's own.
    """
    original = experimental.context_parallel
    zigzag = [
        lambda S, r=r: lesson.positions_of(r, group.size(), "zigzag", S)
        for r in range(group.size())
    ]

    def attention(q, k, v, is_causal):
        assert is_causal
        S = q.shape[2] * group.size()
        k, v = (lesson.lesson01.AllGatherWithGrad.apply(x, 2, group) for x in (k, v))
        at = [positions(S) for positions in zigzag]
        scores = lesson.masked_scores(q, k, at[group.rank()], torch.cat(at))
        return scores.softmax(-1) @ v

    @contextlib.contextmanager
    def replaced(*args, **more):
        with original(*args, **more):
            ring, F.scaled_dot_product_attention = (
                F.scaled_dot_product_attention,
                attention,
            )
            yield
            F.scaled_dot_product_attention = ring

    experimental.context_parallel = replaced
    yield
    experimental.context_parallel = original


def try_pytorch(number: int, group) -> dict:
    """The script's comparison with PyTorch, but for PyTorch's kernels."""
    T = group.size()
    case = random_case(number, T)
    B, S, K, H = (case[name] for name in "BSKH")
    generator = torch.Generator().manual_seed(number)
    tensors = [
        torch.randn(B, S, heads * H, generator=generator, dtype=torch.float64)
        for heads in (K * case["per_kv"], K, K, K * case["per_kv"])
    ]
    tables = [x.double() for x in lesson02.rotary_table(S, H)] + [None]
    whole = [x.clone().requires_grad_() for x in tensors[:3]]
    expected = reference(*whole, tables, H)
    expected.backward(tensors[3])
    with on_cpu(group):
        found = lesson.pytorch_attention(tensors, tables, H, group)
    right = dict(
        zip(("y", "dL/dq", "dL/dk", "dL/dv"), [expected] + [x.grad for x in whole])
    )
    diffs = {name: difference(found[name], right[name], right[name]) for name in right}
    return case | dict(T=T, diffs=diffs)


def refused_by_pytorch(group) -> str:
    """What context_parallel raises on CPU."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(group, "cpu")
    qkv = [torch.randn(1, 2, 4 * group.size(), 4) for _ in range(3)]
    try:
        with experimental.context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
            F.scaled_dot_product_attention(*qkv, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def main() -> dict:
    limit, cases, pytorch, refused = timedelta(seconds=60), [], [], []
    for place, ranks in enumerate(GROUPS):
        group = dist.new_group(ranks, timeout=limit, group_desc="cp")
        if dist.get_rank() in ranks:
            for number in range(CASES):
                cases += try_case(10 * place + number, group)
                pytorch.append(try_pytorch(10 * place + number, group))
            refused.append(refused_by_pytorch(group))
    return dict(cases=cases, pytorch=pytorch, refused=refused)


if __name__ == "__main__":
    run(main, seconds=60)
