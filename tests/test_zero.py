"""beyond/15: a model in shards trains as one process does, and holds what it says.

Five layouts of 8 ranks, each kind of unit, random sizes, against plain PyTorch in
float64; what is held and sent, against formulas written here; vectors and their views;
then what the script's own runs say.
"""

from functools import partial

import jobs
import pytest
import torch
import torch.distributed as dist
from runs import ZERO, ZERO_RUNS, flag, found, number, over, passed, rows_with
from test_refusals import refused_in_one_line
from torch import nn

DRIVER = ("drive_zero.py", 8)
lesson = jobs.load(ZERO)
driven = pytest.mark.launches(*DRIVER)
pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores
KINDS = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "kept")


@pytest.fixture(scope="module")
def ranks():
    return jobs.result(*DRIVER)


# On eight ranks.


@driven
def test_equal_to_one_process(ranks):
    """Losses, norms, gradients of all parameters, parameters after training."""
    runs = found(ranks, "runs")
    assert len(runs) == 8 * 5 * len(KINDS)
    assert {tuple(run["sizes"]) for run in runs} >= {(1, 8, 1), (2, 2, 2), (4, 1, 2)}
    assert {run["args"]["microbatches"] for run in runs} == {1, 2, 3}
    assert len({run["args"]["stages"] for run in runs}) > 1
    for run in runs:
        assert max(run["diffs"].values())[0] <= 1e-12, (run["kind"], run["args"])


@driven
def test_bytes_held(ranks):
    """The table of the paper, and one unit in full where it is gathered or summed."""
    e = 8
    for run in found(ranks, "runs"):
        parts, units = run["sizes"][1], run["units"]
        shards = sum(-(-n // parts) for n in units)
        vectors = [-(-n // parts) * parts for n in units]
        full, largest = sum(units), max(units)
        kind = KINDS.index(run["kind"])
        parameters = {2: max(vectors) + shards, 3: sum(vectors) + shards}
        gradients = full if kind == 0 else largest + shards
        assert run["held"] == {
            "parameters": e * parameters.get(kind, sum(vectors)),
            "gradients": e * gradients,
            "states": e * 2 * shards,
        }, run
        freed = kind > 1
        assert run["freed"] == ([0] * len(units) if freed else [e * n for n in vectors])


@driven
def test_bytes_sent(ranks):
    """Over the axis of the shards by phase; over that of the replicas once per step."""
    e = 8
    for run in found(ranks, "runs"):
        replicate, parts, _ = run["sizes"]
        args, kind = run["args"], KINDS.index(run["kind"])
        M, steps, U = args["microbatches"], args["steps"], len(run["units"])
        n = sum(-(-n // parts) * parts for n in run["units"])
        gather, scatter, both = "all-gather", "reduce-scatter", "all-reduce"
        expected = {}
        if parts > 1:
            phase = "summing" if kind == 0 else "backward"
            times = 1 if kind == 0 else M
            expected[phase, scatter, "shard"] = times
            if kind < 2:
                expected["update", gather, "shard"] = 1
            else:
                expected["forward", gather, "shard"] = M if kind == 2 else 1
            if kind == 2:
                expected["backward", gather, "shard"] = M
        counted = {}
        for _, phase, collective, axis, calls, nbytes in run["sent"]:
            if axis == "shard" and phase != "norm":
                counted[phase, collective, axis] = (calls, nbytes)
            elif axis == "replicate":
                assert (phase, collective) == ("summing", both)
                assert (calls, nbytes) == (steps * U, steps * n // parts * e)
                assert replicate > 1
        times = {key: (steps * t * U, steps * t * n * e) for key, t in expected.items()}
        assert counted == times, run


@driven
def test_weights_of_the_norm_count_each_element_once(ranks):
    """Over the ranks that share a vector and over tp they sum to the full model."""
    runs = found(ranks, "runs")
    for place in range(5 * len(KINDS)):
        same = [rank["runs"][place] for rank in ranks]
        replicate, _, _ = same[0]["sizes"]
        total = sum(sum(run["weights"]) for run in same) / replicate
        args = same[0]["args"]
        fields = lesson.lesson02.Config._fields
        model = lesson.lesson02.Transformer(
            lesson.lesson02.Config(*(args[name] for name in fields))
        )
        elements = sum(p.numel() for p in model.parameters())
        zeros = total - elements  # at the ends of vectors, each of weight 0
        assert abs(zeros) < 1e-6 * elements, (args, total, elements)
    assert runs


# Vectors and units, in this process.


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_vector_is_padded_and_its_views_share_its_memory(parts):
    tensors = [torch.randn(3, 2), torch.randn(1), torch.randn(2, 2, 2)]
    flat = lesson.flatten(tensors, parts)
    assert len(flat) % parts == 0 and 0 <= len(flat) - 15 < parts
    assert not flat[15:].any()
    views = lesson.views_of(flat, tensors)
    for x, view in zip(tensors, views):
        assert torch.equal(x, view)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def one_rank():
    """A group of one, of this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def unit_of(kind, group, dtype=torch.float32, **options):
    linear = nn.Linear(3, 2).to(dtype)
    groups = dict.fromkeys(("replicate", "shard", "tp"), group)
    return linear, kind([linear], groups, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shard_is_a_part_of_the_vector(dtype, one_rank):
    linear, unit = unit_of(lesson.ShardedStates, one_rank, dtype)
    unit.shard.data[0] += 1
    assert linear.weight[0, 0] == unit.shard[0]
    linear, unit = unit_of(lesson.ShardedParameters, one_rank, dtype)
    assert unit.flat.untyped_storage().nbytes() == 0
    assert unit.shard.dtype == dtype and unit.shard.untyped_storage().nbytes() > 0


def test_updates_that_bfloat16_cannot_hold_add_up(one_rank):
    """The float32 copy takes them; the parameter is rounded from it."""
    linear, unit = unit_of(lesson.ShardedStates, one_rank, torch.bfloat16)
    with torch.no_grad():
        unit.shard.fill_(1.0)
        for _ in range(1000):
            unit.shard += 0.001
            unit.gather_parameters()
    assert unit.shard.dtype == torch.float32 and linear.weight.dtype == torch.bfloat16
    assert linear.weight[0, 0] == 2.0


@pytest.mark.parametrize("keep", [False, True])
def test_parameters_are_there_while_they_are_needed(keep, one_rank):
    """Before forward none, between forward and backward only if they are kept."""
    linear, unit = unit_of(lesson.ShardedParameters, one_rank, keep=keep)
    storage, x = unit.flat.untyped_storage(), torch.ones(1, 3, requires_grad=True)
    expected = unit.shard[:6].view(2, 3).sum(0).detach().clone()
    y = linear(x)
    assert (storage.nbytes() > 0) == keep
    y.sum().backward()
    assert torch.allclose(x.grad[0], expected)
    assert (storage.nbytes() > 0) == keep and linear.weight.grad is None
    unit.after_backward()
    assert storage.nbytes() == 0
    assert torch.equal(unit.shard.grad, torch.ones(8))


class Named(dict):
    """Reads x.name as x["name"]."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


@pytest.mark.parametrize("optimizer, moments", [
    (torch.optim.AdamW, 2),
    (torch.optim.SGD, 0),
    (partial(torch.optim.SGD, momentum=0.9), 1),
])  # fmt: skip
def test_states_of_any_optimizer_are_counted(optimizer, moments, one_rank):
    """All tensors of a parameter but the number of steps."""
    _, unit = unit_of(lesson.ShardedStates, one_rank)
    unit.shard.grad = torch.ones_like(unit.shard)
    adamw = optimizer([unit.shard], lr=0.1)
    adamw.step()
    training = Named(meter=Named(most={}), units=[unit], adamw=adamw)
    assert lesson.bytes_held(training) == {"states": moments * 8 * 4}


def test_bfloat16_may_round_once(monkeypatch):
    """Also if the difference that was measured is 0 by chance."""
    run = Named(losses={"step 1": 5.0}, gradients={"weight": torch.ones(2)})
    monkeypatch.setattr(lesson, "make_training", lambda *args: None)
    monkeypatch.setattr(lesson, "train", lambda *args: run)
    args = Named()
    batches = [(None, torch.zeros(4, 16))]  # the mean of 64 losses
    lesson.allow_rounding(args, None, None, batches, run)
    assert (args.allowed_loss, args.allowed) == (2**-9 / 8, 2**-8)


# What is refused.


@pytest.mark.parametrize("ranks, flags, words", [
    (4, "--tp 3", ("--tp 3", "4 ranks % 3", "take 1")),
    (4, "--batch-size 12", ("--batch-size 12", "--batch-size 16")),
    (4, "--kv-heads 3", ("--kv-heads 3", "--kv-heads 4")),
    (2, "--hidden 40", ("--hidden 40", "--hidden 48")),
    (2, "--vocab-size 256", ("--vocab-size 256", "257")),
    (2, "--clip 0", ("--clip 0",)), (2, "--microbatches 0", ("--microbatches",)),
    (2, "--dropout 0.1", ("--dropout 0.1", "one mask", "take --dropout 0")),
])  # fmt: skip
def test_refused(ranks, flags, words):
    text = refused_in_one_line(ZERO, ranks, flags)
    assert all(word in text for word in words), text


# The script's own runs.


@over(ZERO_RUNS)
def test_passes_and_fits_the_screen(run):
    passed(run)


@over(ZERO_RUNS)
def test_every_run_is_compared(run):
    data = jobs.result(*run).data
    names = {row["name"] for row in data["checks"]}
    runs = ["DP", *KINDS, "fully_shard"]
    if run[1] % 2 == 0:
        runs += ["over all", "HSDP"]
    config = lesson.lesson02.Config(1, 4, 1, 1, data["size"]["L"], 1, 0.0)
    for name in runs:
        for parameter, _ in lesson.lesson02.Transformer(config).named_parameters():
            for kind in ("gradients", "parameters"):
                is_there = f"{kind}: {parameter}, {name}" in names
                assert is_there or (kind == "parameters" and "--bf16" in run)
        assert f"replicas: parameters on all ranks, {name}" in names
        assert f"norms: ‖g‖, step 1, {name}" in names


@over([run for run in ZERO_RUNS if "--bf16" in run])
def test_bytes_per_parameter_in_bfloat16(run):
    """2 + 4 + 12: weights in 16 bits, sums of gradients and AdamW's three in 32."""
    data = jobs.result(*run).data
    rows = {row["run"]: row for row in rows_with(data, "run", "sum/Ψ")}
    assert rows["DP"]["sum/Ψ"] == "18.00"
    assert float(rows["ZeRO-3"]["sum/Ψ"]) < 18 / data["size"]["DP"] + 4


@over([run for run in ZERO_RUNS if run[1] > 1])
def test_what_zero_costs(run):
    data = jobs.result(*run).data
    if data["size"]["DP"] == 1:
        return
    M = int(flag(run, "--microbatches", 2))
    rows = {row["run"]: row for row in rows_with(data, "run", "gathers", "ring")}
    ratio = number(rows["ZeRO-3"]["ring"]) / number(rows["DP"]["ring"])
    expected = M * (2 + 2 + 4) / 8 if "--bf16" in run else 1.5 * M
    assert abs(ratio / expected - 1) < 1e-3
    gathers = {name: number(row["gathers"]) for name, row in rows.items()}
    assert gathers["kept"] * 2 * M == gathers["ZeRO-3"]
    assert gathers["fully_shard"] == gathers["ZeRO-3"]
