"""tools/plan.py: its predictions are what a dry run and real ranks count; they are what
was published; and they keep laws that hold for any sizes."""

import argparse
import json
import math
import random
import re
import sys
import time
from functools import cache
from unittest import mock

import dry_run
import jobs
import plan
import predict
import pytest
from in_ranks import no_group
from runs import ALL_RUNS, MESH, over
from test_refusals import message
from torch.utils.flop_counter import FlopCounterMode

lesson = jobs.load(MESH)
pytestmark = pytest.mark.timeout(300)  # the jobs of test_3d.py, if they are not done


@cache
def dry(flags: str) -> list[dict]:
    """What lesson 05 counts on each stage, dry, with these flags: as predicted."""
    args = json.loads(flags)
    names = "pp", "dp", "tp", "zero", "tie", "schedule"
    b = args["batch_size"] // args["dp"] // args["microbatches"]
    more = {name: args[name] for name in names}
    layout = predict.make_layout(args, micro_batch=b, **more)
    stages = [*dry_run.run(layout, dtype=args["dtype"])]
    for counted, wanted in stages:
        assert counted == wanted and dry_run.difference(counted, wanted) == 0, flags
    assert len(stages) == args["pp"]
    return [counted for counted, _ in stages]


# Predicted = dry run = counted by real ranks, to the byte.

DRIVERS = [("drive_3d.py", ranks) for ranks in (8, 6, 4, 2)]
LESSONS = [run for run in ALL_RUNS if run[0] == MESH and "--ragged" not in run]


@over(DRIVERS)
def test_every_rank_counts_what_was_predicted(run):
    """Random sizes and options, float64; no ragged ones: data decide their bytes."""
    steps = 2  # of drive_3d.py
    for rank in jobs.result(*run):
        for case in rank["runs"]:
            if not case["args"]["ragged"]:
                wanted = dry(json.dumps(case["args"]))[case["stage"]]
                found = dict(case["counted"])
                sent = {tuple(row[:4]): row[4:] for row in found.pop("sent")}
                twice = {k: [steps * n for n in v] for k, v in wanted["sent"].items()}
                assert sent == twice, case["args"]
                assert found == {key: wanted[key] for key in found}, case["args"]


@over(LESSONS)
def test_the_lessons_own_runs(run):
    with mock.patch.object(sys, "argv", [MESH, *run[2:]]):
        args = vars(lesson.parse_args(run[1]))
    args["seq_len"] += -args["seq_len"] % args["tp"]
    names = [*predict.SIZES, *lesson.AXES, "microbatches", "zero", "tie", "schedule"]
    stages = dry(json.dumps({name: args[name] for name in [*names, "dtype"]}))
    data = jobs.result(*run).data
    keys, sent = ("what", "phase", "collective", "axis"), {}
    for row in data["communication"]:  # of rank 0; the lesson checks every rank's
        sent[tuple(row[key] for key in keys)] = [row["calls"], row["bytes"]]
    assert sent == stages[0]["sent"]
    for row, stage in zip(data["memory"], stages):
        assert row["bytes"] == stage["moments"]
        assert row["in flight"] == stage["in_flight"]
    for event in data["timeline"]:
        if event["what"] == "forward":
            assert [event["bytes"]] == stages[event["stage"]]["saved"]


def test_so_many_layouts_are_compared():
    found = {tuple(jobs.result(*run).data["mesh"].values()) for run in LESSONS}
    for driver in DRIVERS:
        every = [case["args"] for case in jobs.result(*driver)[0]["runs"]]
        shown = [args for args in every if not args["ragged"]]
        found |= {tuple(args[axis] for axis in lesson.AXES) for args in shown}
    assert len(found) >= 12 and {math.prod(mesh) for mesh in found} >= {2, 4, 8}


@pytest.mark.parametrize("recompute", predict.RECOMPUTE)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_dry_run_of_what_is_recomputed(recompute, kv_heads):
    sizes = predict.model(5, 32, 4, kv_heads, 259, 16, 24)
    layout = predict.make_layout(sizes, 2, 3, 2, 2, recompute=recompute, zero=True)
    for counted, wanted in dry_run.run(layout):
        assert counted == wanted


def test_dry_run_at_3072_ranks():
    """The first, a middle and the last of 64 stages, of a model with 10¹² parameters;
    and bytes grow with micro-batches in a line."""
    layout = predict.make_layout(predict.MODELS["gpt-1008b"], pp=64, dp=6, tp=8)
    for stage in (0, 40, 63):
        one, two = (next(dry_run.run(layout, few, stages=[stage])) for few in (1, 2))
        assert one[0] == one[1] and two[0] == two[1] and one[0]["parameters"] > 1.9e9
        for key, (calls, size) in two[0]["sent"].items():
            times = 1 if key[0] in predict.ONCE or key[3] == "dp" else 2
            assert one[0]["sent"][key] == [calls / times, size / times]


def test_arithmetic_is_what_pytorch_counts():
    sizes = predict.model(3, 32, 4, 2, 256, 16, 8)
    layout = predict.make_layout(sizes, pp=2, dp=2, tp=2)
    for stage in (0, 1):
        with FlopCounterMode(display=False) as counter:
            list(dry_run.run(layout, stages=[stage]))
        assert counter.get_total_flops() == predict.flops(layout, stage)


# Published tables.

TABLE_1 = {name: sizes for name, sizes in predict.MODELS.items() if "gpus" in sizes}


def test_parameters_of_table_1():
    """2104.04473: 12·l·h²·(1 + 13/(12h) + (V + s)/(12·l·h)). Ours has no learned
    positions, s·h; a norm after the last layer, 2h; a bias of the head, V."""
    assert len(TABLE_1) == 10
    for name, sizes in TABLE_1.items():
        l, h, V, s = (sizes[k] for k in ("layers", "hidden", "vocab_size", "seq_len"))
        published = float(name.removeprefix("gpt-").removesuffix("b"))
        theirs = 12 * l * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * l * h))
        assert abs(theirs / 1e9 - published) < 0.06, name
        ours = predict.parameters(predict.make_layout(sizes, tie=True), 0)[0]
        assert ours == pytest.approx(theirs - s * h + 2 * h + V, rel=1e-12)


@pytest.mark.parametrize("a, h, L, t, p, batch", [  # its table 3
    (64, 6144, 48, 8, 1, 4), (96, 12288, 96, 8, 8, 64),
    (128, 20480, 105, 8, 35, 280), (160, 25600, 128, 8, 64, 512),
])  # fmt: skip
def test_activations_of_a_layer(a, h, L, t, p, batch):
    """2205.05198, table 2, in bytes over s·b·h: all six variants."""
    s = 2048
    sizes = predict.model(L, h, a, a, 51200, s, batch)
    scores = 5 * a * s / h
    for tp, sp, recompute, wanted in (
        (1, False, "none", 34 + scores),
        (t, False, "none", 10 + 24 / t + scores / t),
        (t, True, "none", (34 + scores) / t),
        (t, False, "selective", 10 + 24 / t),
        (t, True, "selective", 34 / t),
        (t, False, "full", 2),
    ):
        layout = predict.make_layout(sizes, pp=p, tp=tp, recompute=recompute)
        found = predict.layer_bytes(layout, stats=0, masks=True, sp=sp)
        assert found == pytest.approx(s * h * wanted, rel=1e-12)


def test_activations_are_lesson_04s():
    """The formulas of its table of memory, with norms' statistics: 2 bytes there."""
    other = jobs.load("04_sequence_parallel")
    B, S, D, N, T = 1, 8, 32, 4, 2
    full = other.Transformer(other.Config(1, D, N, N, 1, S, 0.1)).layers[0]
    ways = other.layer_ways(full, no_group(T), 5 * N * S / D, 4 * 2 / D)
    for name, _, _, whole, cut in ways:
        if "gathered" in name:
            continue
        how = [r for r in ("selective", "full") if r in name] or ["none"]
        sizes = predict.model(1, D, N, N, 257, S, B)
        tp = 1 if name == "without TP" else T
        layout = predict.make_layout(sizes, tp=tp, recompute=how[0])
        found = predict.layer_bytes(layout, stats=2, masks=True, sp="SP" in name)
        assert found == (whole + cut / T) * B * S * D, name


def test_arithmetic_of_a_step():
    """2104.04473, sec. 5.1: with whole layers again (96, V/16); and without (72)."""
    for sizes in TABLE_1.values():
        dp, pp, tp = sizes["published"]
        l, h, V, s = (sizes[k] for k in ("layers", "hidden", "vocab_size", "seq_len"))
        for recompute, times, share in (("full", 96, 16), ("none", 72, 12)):
            layout = predict.make_layout(sizes, pp, dp, tp, recompute=recompute)
            found = sum(predict.flops(layout, stage) for stage in range(pp)) * dp * tp
            wanted = 1 + s / (6 * h) + V / (share * l * h)
            wanted *= times * sizes["batch_size"] * s * l * h**2
            assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", TABLE_1)
def test_published_layouts_are_legal_and_fit(name):
    sizes, mesh = TABLE_1[name], TABLE_1[name]["published"]
    assert predict.why_not(sizes, *mesh) == ""
    machine = argparse.Namespace(**predict.MACHINES["dgx-a100"], gpus=math.prod(mesh))
    best = predict.best_of_each(predict.search(sizes, machine)[0])
    meshes = [(row["dp"], row["pp"], row["tp"]) for row in best]
    assert mesh in meshes, "it fits"
    print(f"{name}: {mesh} is number {meshes.index(mesh) + 1} of {len(meshes)}")


def random_layouts(count: int):
    rng = random.Random(7)
    for _ in range(count):
        heads, kv_heads = rng.choice([(8, 8), (16, 16), (48, 16), (96, 96), (64, 32)])
        mesh = {axis: rng.choice((1, 2, 3, 8)) for axis in ("pp", "dp")}
        mesh |= {"tp": rng.choice((1, 2, 4)), "micro_batch": rng.randint(1, 8)}
        layers, hidden = mesh["pp"] + rng.randint(0, 20), 2 * heads * rng.randint(1, 64)
        V, S = rng.randint(257, 60000), 8 * rng.randint(1, 512)
        batch = mesh["dp"] * mesh["micro_batch"] * rng.randint(1, 40)
        options = {name: rng.random() < 0.5 for name in ("zero", "tie")}
        options["recompute"] = rng.choice(predict.RECOMPUTE)
        options["schedule"] = rng.choice(("1f1b", "gpipe"))
        sizes = predict.model(layers, hidden, heads, kv_heads, V, S, batch)
        yield sizes, mesh, options


def test_laws():
    machine = argparse.Namespace(**predict.MACHINES["dgx-a100"], gpus=1024)
    for sizes, mesh, options in random_layouts(2000):
        b, B, last = mesh["micro_batch"], sizes["batch_size"], mesh["pp"] - 1
        case = sizes, mesh, options

        def make(batch_size, **changes):
            changed = sizes | {"batch_size": batch_size}  # noqa: B023
            return predict.make_layout(changed, **mesh | options | changes)  # noqa: B023

        # More tp never raises what a rank has.
        few, many = make(B), make(B, tp=2 * mesh["tp"])
        assert predict.parameters(many, 0)[0] <= predict.parameters(few, 0)[0], case
        # Bytes are linear in the batch: what is kept, and what is sent.
        larger = [make(n * B, micro_batch=n * b) for n in (1, 2, 3)]
        x, y, z = (predict.saved_bytes(layout, last) for layout in larger)
        assert z - y == y - x > 0, case
        for x, y, z in zip(*(predict.traffic(make(n * B), last) for n in (1, 2, 3))):
            assert z[-1] - y[-1] == pytest.approx(y[-1] - x[-1]), case
        # The bubble falls with micro-batches, and nothing is faster than the peak.
        one, two = (predict.predict(make(n * B), machine) for n in (1, 2))
        assert 2 * two["bubble"] == pytest.approx(one["bubble"]), case
        assert 0 < one["share"] <= two["share"] * (1 + 1e-9) < 1, case
        # Who computes more again keeps less.
        again = [make(B, recompute=how) for how in predict.RECOMPUTE]
        kept = [predict.saved_bytes(layout, last) for layout in again]
        assert kept[0] > kept[1] > kept[2], case


def told(capsys, *flags) -> tuple[int, str, str]:
    code = plan.main([*map(str, flags)])
    return code, *capsys.readouterr()


def test_table_and_json(capsys, tmp_path):
    path = tmp_path / "rows.json"
    start = time.process_time()
    code, out, _ = told(capsys, "--model", "gpt3", "--gpus", 1024, "--json", path)
    took = time.process_time() - start
    assert code == 0 and "predicted" in out and "heads % tp is not 0 (15)" in out
    assert max(map(len, out.splitlines())) <= 88 and out.count("\n") == 6 + 20 + 3
    data = json.loads(path.read_text())
    rows = data["predicted"]
    times = [row["seconds"] for row in rows]
    assert times == sorted(times) and all(row["memory"] <= 80e9 for row in rows)
    assert all(row["memory"] > 80e9 for row in data["too large"])
    count = len(rows) + len(data["too large"])
    assert count > 1000 and 10_000 * took / count < 5


@pytest.mark.parametrize("bug", ["", "group", "replicas"])
def test_dry_run_finds_a_bug(capsys, bug):
    small = "--layers 4 --hidden 16 --heads 4 --batch-size 8 --seq-len 8"
    small, flat = f"{small} --dp 2 --pp 2 --tp 2", lesson.FlatAdamW
    with (  # what the bug edits is put back
        mock.patch.dict(vars(lesson)),
        mock.patch.object(flat, "sum_over_replicas", flat.sum_over_replicas),
    ):
        if bug:
            lesson.apply_edit(lesson.BREAKS[bug], vars(lesson))
        code, out, err = told(capsys, *small.split(), "--dry-run")
    last, good = out.splitlines()[-1], not bug
    assert (code == 0) == last.startswith("PASS  2 stages, 0 off,") == good, out
    assert max(map(len, out.splitlines())) <= 88 and "stage 2 of 2" in err


@pytest.mark.parametrize("flags, words", [
    (("--model", "gpt3", "--gpus", 16), "80 GB.*175.8; take --gpus 64"),
    (("--model", "gpt3", "--gpus", 1024, "--tp", 5), "take --gpus 1020"),
    (("--model", "gpt3", "--gpus", 128, "--tp", 128), "take --heads 128"),
    (("--model", "gpt3", "--gpus", 1031), "heads % tp is not 0.*take --gpus 1024"),
    (("--layers", 3, "--hidden", 16), "--heads: how many.* --model gpt3"),
    (("--layers", 3, "--hidden", 10, "--heads", 4, "--gpus", 4), "--hidden 16"),
    (("--model", "gpt3"), "--gpus: how many"),
    (("--model", "gpt3", "--inside", "fast"), "fast is not a number above 0"),
    (("--model", "gpt3", "--gpus", 1024, "--json", "/no/where"), "/no/where"),
])  # fmt: skip
def test_refusals(capsys, flags, words):
    code, out, err = told(capsys, *flags)
    assert code == 2 and out == ""
    assert re.search(words, message(err)), err
