"""Lesson 05: a mesh of ranks trains as one process does, whatever its shape.

Schedules as lists; then every layout of 2, 4 and 8 ranks on random sizes and options
against plain PyTorch; checkpoints from mesh to mesh; the lesson's own runs.
"""

import json
import math
import re
import shutil
import signal
from itertools import pairwise

import jobs
import pytest
from old_runs import ALL_RUNS, ALLOWED, SIZES, flag, over
from test_old_refusals import as_rank

LESSON = "05_3d_parallel"
DRIVERS = [("drive_3d.py", ranks) for ranks in (8, 4, 2)]
RUNS = [run for run in ALL_RUNS if run[0] == LESSON]
lesson = jobs.load(LESSON)


# Schedules: lists of steps, before any rank is started.


def play(kind: str, P: int, M: int, forward=1, backward=2) -> tuple:
    """Makespan and most micro-batches in flight of each stage, messages for free."""
    lists = [lesson.schedule(kind, stage, P, M) for stage in range(P)]
    done, clock, at = {}, [0] * P, [0] * P
    held, most = [0] * P, [0] * P
    while any(at[r] < len(lists[r]) for r in range(P)):
        moved = False
        for r in range(P):
            if at[r] == len(lists[r]):
                continue
            phase, i = lists[r][at[r]]
            before = r - 1 if phase == "forward" else r + 1
            needs = [(phase, before, i)] if 0 <= before < P else []
            needs += [("forward", r, i)] if phase == "backward" else []
            if any(need not in done for need in needs):
                continue
            start = max([clock[r], *(done[need] for need in needs)])
            clock[r] = start + (forward if phase == "forward" else backward)
            done[phase, r, i] = clock[r]
            held[r] += 1 if phase == "forward" else -1
            most[r] = max(most[r], held[r])
            at[r], moved = at[r] + 1, True
        assert moved, f"{kind} {P} {M}: all stages wait"
    return max(clock), most


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_schedules_do_all_and_in_order(kind):
    for P in range(1, 9):
        for M in range(1, 12):
            for stage in range(P):
                steps = lesson.schedule(kind, stage, P, M)
                for phase in ("forward", "backward"):
                    assert [i for p, i in steps if p == phase] == list(range(M))
                for i in range(M):
                    assert steps.index(("forward", i)) < steps.index(("backward", i))
            span, most = play(kind, P, M)
            assert span == 3 * (M + P - 1), "the ideal, where t_b = 2·t_f"
            wanted = [M if kind == "gpipe" else min(P - r, M) for r in range(P)]
            assert most == wanted


def test_published_makespans():
    assert play("1f1b", 4, 8) == (33, [4, 3, 2, 1])
    assert play("gpipe", 4, 8) == (33, [8, 8, 8, 8])
    assert play("1f1b", 8, 32)[0] == 117


def test_layers_are_dealt_out_once_and_evenly():
    for L in range(1, 14):
        for P in range(1, L + 1):
            parts = [lesson.layers_of(stage, P, L) for stage in range(P)]
            assert [i for part in parts for i in part] == list(range(L))
            sizes = [len(part) for part in parts]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


# Every layout, against plain PyTorch, in float64 and float32.


@pytest.fixture(scope="module", params=DRIVERS, ids=lambda one: f"{one[1]} ranks")
def found(request):
    return jobs.result(*request.param)


def launched(test):
    for driver in DRIVERS:
        test = pytest.mark.launches(*driver)(test)
    return test


@launched
@pytest.mark.parametrize("what", ["loss", "norm", "gradients", "parameters"])
def test_equal_to_one_process(found, what):
    for rank in found:
        for run in rank["runs"]:
            limit = ALLOWED[run["args"]["dtype"]][what != "loss"]
            assert run["diffs"][what][0] <= limit, (run["args"], run["diffs"])


@launched
def test_layouts_cover_the_ground(found):
    ranks = len(found)
    runs = [run["args"] for run in found[0]["runs"]]
    parts = [n for n in (1, 2, 4, 8) if ranks % n == 0]
    wanted = {
        (pp, dp, tp) for pp in parts for dp in parts for tp in parts
        if pp * dp * tp == ranks
    }  # fmt: skip
    assert {(a["pp"], a["dp"], a["tp"]) for a in runs} == wanted
    assert {a["dtype"] for a in runs} == {"float32", "float64"}
    if ranks == 2:
        return  # three layouts; the options are those of more ranks
    for option in ("schedule", "ragged", "zero", "tie"):
        assert len({a[option] for a in runs}) == 2, option
    assert any(a["layers"] % a["pp"] for a in runs if a["pp"] > 1), "uneven stages"
    assert any(a["seq_len"] % a["tp"] for a in runs if a["tp"] > 1), "padding"
    assert any(a["heads"] != a["kv_heads"] for a in runs)


@launched
def test_stages_hold_the_whole_model_once(found):
    for number in range(len(found[0]["runs"])):
        a = found[0]["runs"][number]["args"]
        held = {}
        for rank in found:
            run = rank["runs"][number]
            held.setdefault(run["stage"], set()).add(tuple(run["parameters"]))
            one = min(a["pp"] - run["stage"], a["microbatches"])
            wanted = a["microbatches"] if a["schedule"] == "gpipe" else one
            assert run["in_flight"] == wanted
        names = [name for stage in held.values() for name in next(iter(stage))]
        assert all(len(stage) == 1 for stage in held.values())
        shared = a["tie"] and a["pp"] == 1
        assert len(names) == len(set(names)) == 5 + 16 * a["layers"] - shared


@pytest.mark.launches(*DRIVERS[0])
def test_checkpoints_go_from_mesh_to_mesh():
    for rank in jobs.result(*DRIVERS[0]):
        steps, after = rank["checkpoints"]
        assert [row[0] for row in steps] == [[2, 2, 2], [1, 4, 2], [4, 2, 1]]
        assert all(row[2] <= 1e-12 for row in steps) and after[0] <= 1e-12, after


# The lesson's own runs: numbers in --json worked out again.


def sizes(run) -> dict:
    return {
        "L": int(flag(run, "--layers", 4)), "B": int(flag(run, "--batch-size", 16)),
        "M": int(flag(run, "--microbatches", 4)), "D": int(flag(run, "--hidden", 64)),
        "S": int(flag(run, "--seq-len", 64 if "--ragged" in run else 32)),
        "e": SIZES[flag(run, "--dtype", "float32")],
        "steps": int(flag(run, "--steps", 3)),
    }  # fmt: skip


@over(RUNS)
def test_losses_and_norms(run):
    data, size = jobs.result(*run).data, sizes(run)
    loss_limit, limit = ALLOWED[data["dtype"]]
    assert [row["step"] for row in data["losses"]] == [*range(1, size["steps"] + 1)]
    for row in data["losses"]:
        assert abs(row["with"] - row["without"]) <= loss_limit * row["without"]
        off = abs(row["norm_with"] - row["norm_without"])
        assert row["norm_without"] > 0.1 and off <= limit * row["norm_without"]
    first = data["losses"][0]
    assert abs(first["without"] - math.log(257)) < 1.5
    assert abs(first["dtensor"] - first["without"]) <= loss_limit * first["without"]


@over(RUNS)
def test_ranks_are_laid_out_as_megatron_does(run):
    data = jobs.result(*run).data
    P, D, T = (data["mesh"][axis] for axis in ("pp", "dp", "tp"))
    assert P * D * T == run[1] == len(data["groups"])
    for rank, groups in enumerate(data["groups"]):
        stage, replica, tp_rank = rank // (D * T), rank // T % D, rank % T
        assert groups["tp"] == [rank - tp_rank + t for t in range(T)]
        assert groups["dp"] == [stage * D * T + d * T + tp_rank for d in range(D)]
        assert groups["pp"] == [(p * D + replica) * T + tp_rank for p in range(P)]


@over(RUNS)
def test_bytes_sent_along_pp_and_dp(run):
    """What leaves a rank; the layers' collectives are lesson 04's."""
    data, size = jobs.result(*run).data, sizes(run)
    P, D, T = (data["mesh"][axis] for axis in ("pp", "dp", "tp"))
    M, n = size["M"], size["steps"]
    b, s = size["B"] // (D * M), math.ceil(size["S"] / T)
    for row in data["communication"]:
        assert row["bytes"] == row["predicted_bytes"], row
        assert data["mesh"][row["axis"]] > 1, row
    found = {
        (row["rank"], row["axis"], row["what"], row["phase"]): row
        for row in data["communication"] if row["collective"] != "all-gather"
    }  # fmt: skip
    for rank in range(run[1]):
        stage = rank // (D * T)
        for phase, there in (("forward", stage < P - 1), ("backward", stage > 0)):
            row = found.get((rank, "pp", "layers", phase))
            assert bool(row) == there
            if row and "--ragged" not in run:
                header = 32 if phase == "forward" else 0
                assert row["bytes"] == n * M * (b * s * size["D"] * size["e"] + header)
                assert row["calls"] == n * M * (2 if header else 1)
        if D > 1:
            row = found[rank, "dp", "replicas", ""]
            held = [m for m in data["memory"] if m["what"].endswith(f"stage {stage}")]
            moments = held[0]["bytes"] * (D if "--zero" in run else 1)
            assert row["bytes"] == n * moments // 2


@over(RUNS)
def test_timeline(run):
    """Each step once, in the order of its schedule, and never two at a time."""
    data, M = jobs.result(*run).data, sizes(run)["M"]
    P = data["mesh"]["pp"]
    kind = flag(run, "--schedule", "1f1b")
    for rank in range(run[1]):
        rows = [row for row in data["timeline"] if row["rank"] == rank]
        steps = [(r["what"], r["microbatch"]) for r in rows if r["what"] != "wait"]
        assert steps == lesson.schedule(kind, rows[0]["stage"], P, M)
        for one, two in pairwise(rows):
            assert one["start"] <= one["end"] <= two["start"]
    ends = {(r["rank"], r["what"], r["microbatch"]): r["end"] for r in data["timeline"]}
    across = run[1] // P
    for row in data["timeline"]:
        before = row["rank"] + (-across if row["what"] == "forward" else across)
        if row["what"] != "wait" and 0 <= before < run[1]:
            assert ends[before, row["what"], row["microbatch"]] <= row["start"]
    pictures = [line for line in data["text"] if re.match(r"   stage \d .{72}$", line)]
    assert len(pictures) == P * (1 + ("--simulate-compute" in run))
    for row in data["in_flight"]:
        wanted = M if kind == "gpipe" else min(P - row["stage"], M)
        assert row["measured"] == wanted


SIMULATED = [run for run in RUNS if "--simulate-compute" in run]


@over(SIMULATED)
def test_simulated_makespan(run):
    """Near the ideal, at P = 4 and M = 8, even while others have the cores."""
    data = jobs.result(*run).data
    M, P = sizes(run)["M"], data["mesh"]["pp"]
    assert (P, M) == (4, 8)
    found, ms = data["simulation"], int(flag(run, "--simulate-compute", 0))
    assert found["ideal"] == pytest.approx(3 * ms * (M + P - 1) / 1e3)
    assert 1 <= found["makespan"] / found["ideal"] < 1.3
    wanted = M if flag(run, "--schedule", "1f1b") == "gpipe" else [4, 3, 2, 1]
    assert [row["measured"] for row in data["in_flight"]] == wanted


@over(SIMULATED)
def test_bytes_in_flight(run):
    """Stages 1 and 2 have the same layers: so much a micro-batch; the last has less."""
    rows = jobs.result(*run).data["in_flight"]
    one = [row["bytes"] / row["measured"] for row in rows]
    assert one[1] == one[2] > 0 and rows[1]["bytes"] > rows[2]["bytes"]
    # a layer keeps its input, q, k, v and more: each [b, s, D]
    size = sizes(run)
    b = size["B"] // size["M"]
    assert one[1] > 10 * b * size["S"] * size["D"] * size["e"]


ALONE = (LESSON, 4, "--pp", "4", "--microbatches", "8", "--simulate-compute", "50")
ALONE += ("--steps", "1", "--layers", "4", "--hidden", "16")


@pytest.mark.alone
def test_simulated_makespan_within_10_percent():
    """On a machine that has nothing else to do; so it may try thrice."""
    for _ in range(3):
        found = jobs.run_lesson(*ALONE).data["simulation"]
        assert found["makespan"] > found["ideal"]
        if found["makespan"] < 1.1 * found["ideal"]:
            break
    assert found["makespan"] < 1.1 * found["ideal"], found
    M, P = 8, 4
    # two fractions of one bubble, over ideal and over wall time
    assert found["over_ideal"] == pytest.approx((P - 1) / M, abs=0.15)
    assert found["over_wall"] == pytest.approx((P - 1) / (M + P - 1), abs=0.1)
    assert found["over_wall"] < found["over_ideal"]


RAGGED = [run for run in RUNS if "--ragged" in run]


@over(RAGGED)
def test_ragged_lengths(run):
    data = jobs.result(*run).data
    lengths = data["lengths"]
    assert len(lengths) == data["mesh"]["dp"]
    assert all(len(one) == sizes(run)["M"] for one in lengths)
    every = [x for one in lengths for x in one]
    assert len(set(every)) >= 3 and max(every) <= sizes(run)["S"]


MIXED = (LESSON, 2, "--bf16", "--recompute", "--dp", "2", "--tp", "1", "--steps", "1")


@pytest.mark.launches(*MIXED)
def test_mixed_precision_and_recompute():
    data = jobs.result(*MIXED).data
    assert data["verdict"] == "PASS"
    checks = {row["name"]: row for row in data["checks"]}
    loss = checks["PyTorch: loss"]
    assert 1e-6 < loss["diff"] < loss["allowed"] == 2e-2, "bfloat16 can be seen"
    assert any("recomputed activations, bfloat16" in line for line in data["text"])


# Checkpoints, by the lesson's flags; a rank killed while one is written.


SMALL = ("--hidden", "16", "--heads", "2", "--layers", "2", "--batch-size", "8")
SMALL += ("--tie", "--dtype", "float64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two runs from checkpoint to checkpoint, and the one that was not interrupted."""
    folder = tmp_path_factory.mktemp("saved") / "here"
    save = (*SMALL, "--save", folder)
    first = jobs.run_lesson(LESSON, 2, *save, "--steps", "2", "--pp", "2", "--tp", "1")
    second = jobs.run_lesson(LESSON, 2, *save, "--steps", "4", "--load", folder,
                             "--dp", "2", "--zero", "--tp", "1")  # fmt: skip
    third = jobs.run_lesson(LESSON, 1, *SMALL, "--steps", "5", "--load", folder)
    return folder, (first, second, third)


def test_losses_go_on_as_if_nothing_had_happened(saved):
    rows = [row for done in saved[1] for row in done.data["losses"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert abs(row["with"] - row["without"]) <= 1e-12 * row["without"], row
    for done in saved[1]:
        assert done.code == 0 and done.data["verdict"] == "PASS", done.text
    folders = sorted(path.name for path in saved[0].iterdir())
    assert folders == [f"step_{step:06}" for step in range(1, 5)]


def load_says(folder, *flags) -> str:
    """What the lesson says to --load FOLDER, on one rank, before any group is made."""
    flags = (*SMALL, "--steps", "9", "--load", folder, *flags)
    code, out, err = jobs.run_here(LESSON, *flags, **as_rank(0, 1))
    assert code == 2 and out == "" and re.fullmatch(r"error: .*\n", err), (out, err)
    return err


@pytest.mark.parametrize("what", ["truncated", "one bit", "missing", "unfinished",
                                  "foreign", "empty", "no json"])  # fmt: skip
def test_damaged_and_foreign_checkpoints_are_refused(saved, tmp_path, what):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    newest = folder / "step_000004"
    file = sorted(newest.glob("*.distcp"))[0]
    data = file.read_bytes()
    if what == "truncated":
        file.write_bytes(data[:-1])
    elif what == "one bit":
        half = len(data) // 2
        file.write_bytes(data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :])
    elif what == "missing":
        (newest / ".metadata").unlink()
    elif what == "unfinished":
        (newest / "complete.json").unlink()
    elif what == "no json":
        (newest / "complete.json").write_text("{")
    elif what == "foreign":
        about = json.loads((newest / "complete.json").read_text())
        about = json.dumps(about | {"lesson": "another"})
        (newest / "complete.json").write_text(about)
    else:
        shutil.rmtree(folder)
    said = load_says(folder)
    words = {
        "truncated": "damaged", "one bit": "damaged", "missing": ".metadata is missing",
        "unfinished": "complete.json", "no json": "complete.json",
        "foreign": "made with lesson another", "empty": "no finished checkpoint",
    }  # fmt: skip
    assert words[what] in said and str(folder) in said, said


def test_another_models_checkpoint_is_refused(saved):
    said = load_says(saved[0], "--hidden", "32")
    assert "made with hidden 16, this run has 32" in said
    said = load_says(saved[0], "--steps", "4")
    assert "--steps 4" in said and "step 4" in said
    said = load_says(saved[0], "--save", saved[0].parent / "no" / "folder")
    assert "--save" in said


def test_a_folder_with_later_steps_is_not_saved_into(saved):
    flags = (*SMALL, "--save", saved[0])
    code, _, err = jobs.run_here(LESSON, *flags, **as_rank(0, 1))
    assert code == 2 and "step_000001 is there already" in err


@pytest.mark.alone
def test_killed_while_saving_and_started_anew(tmp_path):
    """--max-restarts=1: back from the newest finished checkpoint, same losses."""
    folder, json_path = tmp_path / "here", tmp_path / "out.json"
    done = jobs.torchrun(
        jobs.ROOT / "tests" / "faulty.py", 2, LESSON, "kill", 1, 0, *SMALL,
        "--pp", 2, "--steps", 4, "--save", folder, "--json", json_path,
        FAULT_TIME=str(tmp_path / "time"), FAULT_SAVE="3", PET_MAX_RESTARTS="1",
    )  # fmt: skip
    assert done.code == 0, done.text
    assert (tmp_path / "time").exists(), "nobody was killed"
    assert f"exitcode: -{int(signal.SIGKILL)}" in done.err, done.err
    data = json.loads(json_path.read_text())
    assert data["loaded"]["step"] == 2 and data["verdict"] == "PASS"
    assert [row["step"] for row in data["losses"]] == [3, 4]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step_{step:06}" for step in range(1, 5)]


@pytest.mark.alone
def test_two_machines():
    """Two agents on this one, as on two hosts: torchrun --nnodes=2."""
    flags = (*SMALL, "--steps", "2", "--pp", "2", "--tp", "1")
    first, second = jobs.two_agents(jobs.ROOT / f"{LESSON}.py", 1, *flags)
    assert first.code == second.code == 0, first.text + second.text
    last = [one.out.splitlines()[-1] for one in (first, second) if one.out]
    assert len(last) == 1 and last[0].startswith(f"PASS  {LESSON}")
