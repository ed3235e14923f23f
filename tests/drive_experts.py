"""Eight ranks compute random MoE layers on every mesh dp × ep × tp that they form.

    torchrun --nproc_per_node=8 drive_experts.py FOLDER

Compared with a layer that is written without a sort: each expert computes all tokens,
and a mask keeps those that chose it.
"""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_ranks import difference, load, run

lesson = load("16_expert_parallel")
lesson00, lesson01, lesson02 = lesson.lesson00, lesson.lesson01, lesson.lesson02
MESHES = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 1, 8)]
CASES = 6  # on each mesh
BATCH = ("ep", "dp")  # axes that split it


def random_case(number: int, dp: int, ep: int, tp: int) -> dict:
    rng = random.Random(f"experts {number}")
    E = ep * rng.randint(1, 3)
    sizes = dict(E=E, k=rng.randint(1, min(E, 4)), D=rng.randint(2, 9))
    sizes.update(F=tp * rng.randint(1, 5), B=dp * ep * rng.randint(1, 2))
    # One token per rank: many ranks get no rows. A skew: some experts get all, or none.
    return sizes | dict(S=rng.choice([1, 2, 7]), skew=rng.choice([0, 0, 3, 30]))


def random_layer(case: dict, generator):
    """A layer, its input and dL/dy, the same on every rank."""
    moe = lesson.MoE(lesson01.MLP(case["D"], case["F"]), case["E"], case["k"]).double()
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        x, upstream = torch.randn(
            2, case["B"], case["S"], case["D"], generator=generator, dtype=torch.float64
        )
        x[..., 0] = 1
        moe.router.weight[0, 0] += case["skew"]
        moe.router.weight[-1, 0] -= case["skew"]
    return moe, x, upstream


def by_masks(moe, x):
    """y and the balance loss, from the definition."""
    x = x.flatten(0, 1)
    probs = F.linear(x, moe.router.weight).softmax(-1)
    kept = torch.zeros_like(probs).scatter(1, probs.topk(moe.top_k, -1).indices, 1.0)
    weights = probs * kept / (probs * kept).sum(1, keepdim=True)
    y = moe.shared_expert(x)
    for e, (up, down) in enumerate(zip(moe.experts.up_proj, moe.experts.down_proj)):
        y = y + weights[:, e, None] * F.linear(F.gelu(F.linear(x, up)), down)
    share = kept.sum(0) / kept.sum()
    return y, len(share) * (share.detach() * probs.mean(0)).sum(), kept


def slice_of(p, full):
    """What this rank should hold of a parameter or gradient."""
    for dim, group in lesson.shardings_of(p):
        full = lesson00.shard(full, dim, group)
    return full


def expected_bytes(case: dict, kept, groups: dict) -> int:
    """What this rank sends over ep in both passes: counts, and rows by kept."""
    R, rank = groups["ep"].size(), groups["ep"].rank()
    if R == 1:
        return 0
    of_ep = kept.view(groups["dp"].size(), -1, case["E"])[groups["dp"].rank()]
    rows = of_ep.view(R, -1, R, case["E"] // R).sum((1, 3))  # [from, to]
    leave = rows[rank].sum() + rows[:, rank].sum() - 2 * rows[rank, rank]
    return int(2 * leave * case["D"] * 8 + 8 * case["E"])


def try_case(number: int, mesh: tuple, groups: dict) -> dict:
    case = random_case(number, *mesh)
    full, x, upstream = random_layer(case, torch.Generator().manual_seed(number))
    whole_x = x.clone().requires_grad_()
    whole_y, whole_balance, kept = by_masks(full, whole_x)
    whole_y = whole_y.view_as(x)
    ((whole_y * upstream).sum() + whole_balance).backward()
    own = {name: p.grad.clone() for name, p in full.named_parameters()}
    whole_norm = torch.nn.utils.get_total_norm(own.values())

    diffs = {}
    full.zero_grad()
    alone_x = x.clone().requires_grad_()
    y = full(alone_x)
    ((y * upstream).sum() + full.balance).backward()
    diffs["one process: y"] = difference(y, whole_y)
    diffs["one process: x"] = difference(alone_x.grad, whole_x.grad)
    for name, p in full.named_parameters():
        # Where the weights are 1 and the balance is perfect, nothing is left but noise.
        scale = torch.maximum(own[name].abs().max(), torch.tensor(1e-3)).expand(1)
        diffs[f"one process: {name}"] = difference(p.grad, own[name], scale)

    full.balance = None  # has a history, so it cannot be copied
    moe = lesson.ep_moe(full, groups)
    x_b, upstream_b = lesson.split_batch((x, upstream), groups)
    lesson00.METER.calls.clear()
    with lesson.CountLeaving(), lesson00.METER.phase("EP", ""):
        x_b.requires_grad_()
        y = moe(x_b)
        ((y * upstream_b).sum() + moe.balance).backward()
    sent = sum(lesson00.METER.calls.get(("EP", "", "all-to-all-v", "ep"), []))
    lesson.sum_gradients(moe, groups)
    diffs["y"] = difference(y, *lesson.split_batch((whole_y,), groups), whole_y)
    of_x = lesson.split_batch((whole_x.grad,), groups)
    diffs["dL/dx"] = difference(x_b.grad, *of_x, whole_x.grad)
    balance = moe.balance.detach()
    for axis in BATCH:
        balance = lesson00.all_reduce(balance, groups[axis])
    diffs["balance"] = difference(balance, whole_balance)
    for name, p in moe.named_parameters():
        scale = torch.maximum(own[name].abs().max(), torch.tensor(1e-3)).expand(1)
        diffs[name] = difference(p.grad, slice_of(p, own[name]), scale)
    norm = lesson.ep_norm(moe, groups)
    diffs["norm"] = abs(norm - whole_norm.item()) / whole_norm.item()
    wanted = expected_bytes(case, kept, groups)
    rows = int(kept.sum())
    return case | dict(mesh=mesh, diffs=diffs, sent=sent, wanted=wanted, rows=rows)


def main() -> dict:
    found = {"cases": []}
    for place, mesh in enumerate(MESHES):
        groups = lesson00.mesh_groups(dict(zip(("dp", "ep", "tp"), mesh)), 30)
        for number in range(place * CASES, (place + 1) * CASES):
            found["cases"].append(try_case(number, mesh, groups))
    return found


if __name__ == "__main__":
    assert dist.is_available()
    run(main)
