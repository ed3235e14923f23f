"""Sentences that readers found wrong, each compared with what it is about: a small
run, a formula, or the saved output beside it.

tests/test_notebooks.py does the same with the numbers of rules and tables.
"""

import copy
import re

import jobs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_notebooks import numbers, rules, said, text_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

lesson00 = jobs.load("00_collectives")
lesson05 = jobs.load("05_3d_parallel")
script14 = jobs.load("14_schedules")


@pytest.fixture
def as_rank():
    """Be one rank of a group that sends nothing: as_rank(rank, ranks) → its mesh."""

    def join(rank: int, ranks: int):
        leave()
        store = FakeStore()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
        return init_device_mesh("cpu", (ranks,))

    def leave():
        if dist.is_initialized():
            dist.destroy_process_group()

    yield join
    leave()


# ---- Shards


def test_uneven_heads_are_no_plan(as_rank):
    """Notebook 02: 40 heads of 128 on 16 ranks, by PyTorch's plan."""
    columns, per_rank = numbers(
        "02_transformer_tp",
        r"splits the ([\d,]+) columns evenly, ([\d.]+) heads per rank, and the reshape",
    )
    mesh, x = as_rank(0, 16), torch.randn(2, 3, 8)
    for is_local, says in ((True, "is invalid"), (False, "Cannot unflatten unevenly")):
        q_proj = nn.Linear(8, 40 * 128)
        plan = ColwiseParallel(use_local_output=is_local)
        q_proj = parallelize_module(q_proj, mesh, plan)
        assert q_proj.weight.shape[0] == columns
        assert len(q_proj.weight.to_local()) == per_rank * 128
        with pytest.raises(RuntimeError, match=says):
            q_proj(x).view(2, 3, -1, 128)


def largest_gradients(zero: str, is_head: bool) -> float:
    """Of the padding, in 5 steps of AdamW: the last head, or the last unit of an MLP.

    zero: whose part of the padding starts at 0; q, k, v with their biases, or u, g (up
    and gate) with theirs; o or d without, because the bias of the sum is no padding.
    """
    torch.manual_seed(0)
    D, n = 16, 4  # n rows of padding
    out = "o" if is_head else "d"
    model = nn.ModuleDict(
        {x: nn.Linear(D, 5 * n) for x in ("qkv" if is_head else "ug")}
    )
    model[out] = nn.Linear(5 * n, D)
    last = {name: layer.weight[-n:] for name, layer in model.items() if name != out}
    last[out] = model[out].weight[:, -n:]
    with torch.no_grad():
        for name in zero:
            last[name].zero_()
            if name != out:
                model[name].bias[-n:].zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    largest = 0.0
    for _ in range(5):
        x, target = torch.randn(2, 2, 6, D)
        if is_head:
            q, k, v = (model[name](x).unflatten(-1, (5, n)) for name in "qkv")
            heads = (each.transpose(1, 2) for each in (q, k, v))
            h = F.scaled_dot_product_attention(*heads, is_causal=True)
            h = h.transpose(1, 2).flatten(2)
        else:
            h = F.silu(model["g"](x)) * model["u"](x)
        optimizer.zero_grad()
        (model[out](h) - target).square().mean().backward()
        for name, layer in model.items():
            grad = layer.weight.grad
            grad = grad[:, -n:] if name == out else grad[-n:]
            largest = max(largest, grad.abs().max().item())
        optimizer.step()
    return largest


def test_padding_of_zeros_gets_no_gradient():
    """Notebook 02 of heads, notebook 01 of units: zeros everywhere stay zeros."""
    assert "their gradients are 0, so they stay 0" in text_of("02_transformer_tp")
    assert "with zeros in o only they do not" in text_of("02_transformer_tp")
    assert "all zero: they stay zero" in rules("01_naive_mlp_tp")
    assert largest_gradients("qkvo", True) == largest_gradients("ugd", False) == 0
    assert largest_gradients("o", True) > 1e-3
    assert largest_gradients("d", False) > 1e-3


def test_random_dtensors_follow_one_seed(as_rank):
    """Notebook 13: on a CPU one seed makes shards copies, two make replicas differ."""
    text = text_of("13_mesh_2d")
    assert "with one seed gives every rank the same shard, with only a warning" in text
    assert "with a seed per rank a replicated DTensor differs" in text
    found = {}
    for placement, seeds in ((Shard(0), (1, 1)), (Replicate(), (1, 2))):
        for rank, seed in enumerate(seeds):
            mesh = as_rank(rank, 2)
            x = zeros(8, device_mesh=mesh, placements=[placement])
            assert x.numel() == 8, "of the full tensor, as the notebook says"
            torch.manual_seed(seed)
            with pytest.warns(
                UserWarning, match="may not have complete support on cpu"
            ):
                nn.init.uniform_(x)
            found[str(placement), rank] = x.to_local().clone()
    shards, replicas = (
        [found[str(p), r] for r in (0, 1)] for p in (Shard(0), Replicate())
    )
    assert len(shards[0]) == 4 and torch.equal(*shards)
    assert len(replicas[0]) == 8 and not torch.equal(*replicas)


# ---- Bytes


def test_ulysses_with_repeated_heads():
    """Notebook 11: N = 64, K = 8, C = 16; and its ring."""
    ulysses, ring = numbers(
        "11_context_parallel",
        r"forward a rank sends ([\d.]+) · kv bytes then, and (\d+) · kv in the ring",
    )
    N, K, C = 64, 8, 16
    assert (N % C, C % K) == (0, 0)
    exact = (C - 1) / C * (N / K + C / K)
    assert (ulysses, ring) == (pytest.approx(exact, abs=0.05), C - 1)


def test_03_says_what_a_ring_sends():
    """Payload and ring stand apart in the output, and the ratio is the ring's."""
    name = "03_vocab_parallel"
    rows = re.findall(
        r"payload ([\d,]+) bytes, in a ring ([\d,]+)", text_of(name, "printed")
    )
    (gathered, split) = [float(row[1].replace(",", "")) for row in rows]
    (times,) = said(name, r"V/6 times as much .*: ([\d,]+) times for GPT-2's")
    assert times == round(gathered / split) == round(50257 / 6)


# ---- Pipelines


def most_held(steps) -> int:
    held = most = 0
    for phase, *_ in steps:
        held += {"forward": 1, "backward": -1}.get(phase, 0)
        most = max(most, held)
    return most


def test_1f1b_holds_no_more_than_m():
    """Notebooks 05 and 14, also for fewer micro-batches than stages."""
    assert "1F1B min(P − stage, M)" in rules("14_schedules")
    assert "1F1B those of min(P − stage, M)" in text_of("05_3d_parallel")
    for P in (1, 2, 4, 8):
        for M in range(1, 10):
            for stage in range(P):
                steps = lesson05.schedule("1f1b", stage, P, M)
                assert most_held(steps) == min(P - stage, M)


def test_where_the_rule_of_interleaving_holds():
    """Notebook 14: for v ≥ 2 and M > P, and not without."""
    assert "with v ≥ 2 and M > P, on the first rank P·(1 + (P − 1)/(P·v))" in rules(
        "14_schedules"
    )
    for P in (2, 4, 8):
        for v in (1, 2, 3, 4):
            for M in (P, 2 * P, 4 * P):
                kind = "interleaved" if v > 1 else "1f1b"
                chunks = most_held(script14.actions_of(kind, 0, P, M, v))
                is_exact = chunks / v == pytest.approx(P * (1 + (P - 1) / (P * v)))
                assert is_exact == (v > 1 and M > P), (P, v, M)


def test_sums_that_are_divided_again():
    """Notebook 05: p.grad is divided by M after each of three accumulated calls."""
    M, grad, found = 4, 0.0, []
    for _ in range(3):
        grad = (grad + M) / M  # M equal gradients of 1 are added
        found.append(grad)
    assert found == pytest.approx(
        numbers(
            "05_3d_parallel",
            r"that is 4/4 = (\d), .1 . 4./4 = ([\d.]+), ([\d.]+) instead of",
        ),
        abs=0.005,
    )


# ---- Training


@pytest.mark.parametrize("kind, limit, is_hidden", [
    ("SGD", 0.5, True),  # both norms are above the limit
    ("SGD", 1e9, False),  # none is
    ("AdamW", 1e9, True),
])  # fmt: skip
def test_what_hides_a_factor(kind, limit, is_hidden):
    """Notebook 05: all gradients of one model are half of those of the other."""
    text = (
        "AdamW hides a factor that is the same in all gradients. Clipping hides it as "
    )
    text += "well where both norms are above the limit. SGD without clipping does not."
    assert text in text_of("05_3d_parallel")
    torch.manual_seed(0)
    model = nn.Linear(8, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)
    for network, factor in ((model, 1.0), (twin, 0.5)):
        optimizer = getattr(torch.optim, kind)(network.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 8, dtype=torch.float64)
            (factor * network(x).square().sum()).backward()
            nn.utils.clip_grad_norm_(network.parameters(), limit)
            optimizer.step()
    off = lesson00.rel_diff(twin.weight.detach(), model.weight.detach())
    assert (off < 1e-5) == is_hidden


def test_one_limit_for_float64():
    """Notebooks 01 and 12 and the pages on outputs and the audit."""
    allowed = lesson00.ALLOWED["float64"]
    audit = float(
        re.search(
            r'ALLOWED = \{"float64": ([\d.e-]+)',
            (jobs.ROOT / "tools" / "audit" / "tensors.py").read_text("utf-8"),
        )[1]
    )
    number = r"([\d.]+e-\d+)"
    pattern = rf"if it shrinks to {number} or less in float64"
    assert said("01_naive_mlp_tp", pattern) == [allowed]
    pattern = rf"above {number} in a small model is a fault.*allows {number}\)"
    assert said("12_wrong_gradients", pattern) == [allowed, audit]
    page = (jobs.ROOT / "docs" / "audit.md").read_text("utf-8")
    assert f"above {audit:.0e} is normally".replace("e-0", "e-") in page
    assert f"The lessons allow {allowed:.0e},".replace("e-0", "e-") in page


def test_units_of_18():
    """What its first picture shows: 4 pieces, 8 products, a sum as long as dL/dW."""
    pattern = r"units: forward (\d+) and (\d+) while .* backward (\d+) and (\d+)"
    printed = numbers("18_in_pieces", pattern, "printed")
    pieces, products, total, product = 4, 8, 4, 4
    later = max(pieces, products // 2) + products // 2
    assert printed == [pieces + products, later, total + product, max(total, product)]
    pattern = r"takes (\d+) units instead of (\d+), and backward (\d+) instead of (\d+)"
    fast, slow, fast_back, slow_back = numbers("18_in_pieces", pattern)
    assert [slow, fast, slow_back, fast_back] == printed
