"""Lesson 05: a mesh of ranks trains as one process does, whatever its shape.

Schedules as lists; then layouts of 2, 6 and 8 ranks on random sizes and options against
plain PyTorch; messages; the lesson's own runs.
"""

import json
import math
import re
from functools import cache
from itertools import accumulate, chain, product
from types import SimpleNamespace

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import (
    ALL_RUNS,
    MESH,
    STAGES,
    STAGES_RUNS,
    TIED,
    TIED_RUNS,
    failed,
    flag,
    number,
    over,
    passed,
    rows_with,
)  # fmt: skip
from torch import nn

DRIVERS = [("drive_3d.py", ranks) for ranks in (8, 6, 2)]
RUNS = [run for run in ALL_RUNS if run[0] == MESH]
lesson = jobs.load(MESH)
tied_stages = jobs.load(TIED)
pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


# Schedules: lists of actions, before any rank is started.


def makespan(kind: str, P: int, M: int) -> int:
    """If a forward takes 1, a backward 2, and a message nothing."""
    todo = [lesson.schedule(kind, stage, P, M) for stage in range(P)]

    @cache
    def end(stage: int, number: int) -> int:
        """When a stage has done that many of its steps."""
        if number == 0:
            return 0
        phase, i = todo[stage][number - 1]
        source, arrived = stage + (-1 if phase == "forward" else 1), 0
        if 0 <= source < P:
            arrived = end(source, todo[source].index((phase, i)) + 1)
        return max(end(stage, number - 1), arrived) + (1 if phase == "forward" else 2)

    return max(end(stage, number) for number in range(2 * M + 1) for stage in range(P))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_schedules_do_all_and_in_order(kind):
    """Published are makespans of 33 for P 4, M 8, and of 117 for P 8, M 32."""
    for P, M in product(range(1, 9), (*range(1, 12), 32)):
        for stage in range(P):
            steps = lesson.schedule(kind, stage, P, M)
            for phase in ("forward", "backward"):
                assert [i for p, i in steps if p == phase] == list(range(M))
            for i in range(M):
                assert steps.index(("forward", i)) < steps.index(("backward", i))
            in_flight = accumulate(1 if p == "forward" else -1 for p, _ in steps)
            assert max(in_flight) == (M if kind == "gpipe" else min(P - stage, M))
        assert makespan(kind, P, M) == 3 * (M + P - 1), "the ideal"


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_the_drawing_shows_who_waits(kind):
    """Each step once, in the order of its list, after the one that it waits for; the
    dots are the bubble. A list that waits for a step that is not there ends with !."""
    for P, M in product(range(1, 9), range(1, 12)):
        lists = [lesson.schedule(kind, stage, P, M) for stage in range(P)]
        lines = lesson.draw_in_time(lists)
        assert {len(line) for line in lines} == {2 * (M + P - 1)}
        for stage, (steps, line) in enumerate(zip(lists, lines)):
            marks = [str((i + 1) % 10) if p == "forward" else "abcdefghijk"[i]
                     for p, i in steps]  # fmt: skip
            assert [mark for mark in line if mark != "."] == marks
            if stage and M < 10:
                before = lines[stage - 1]
                for i in range(M):
                    assert before.index(f"{i + 1}") < line.index(f"{i + 1}")
                    assert line.index("abcdefghijk"[i]) < before.index("abcdefghijk"[i])
    one, two = (lesson.schedule("1f1b", stage, 2, 2) for stage in range(2))
    assert lesson.draw_in_time([one, two]) == ["12.a.b", ".1a2b."]
    assert lesson.draw_in_time([one[:1], two]) == ["1...", ".1a!"]
    # Both wait: stage 0 for its first gradient, stage 1 for its second activation.
    assert lesson.draw_in_time([two, one]) == ["1.!", ".1!"]


@pytest.mark.parametrize("DP, M", [(1, 3), (3, 1), (2, 3)])
def test_a_batch_is_dealt_out_once(DP, M):
    """Each row to one micro-batch of one replica, in order."""
    tokens, dealt = torch.arange(12 * 5).view(12, 5), []
    for replica in range(DP):
        groups = {"dp": no_group(DP, replica)}
        dealt += lesson.make_microbatches((tokens, -tokens), groups, M, ragged=False)
    assert len(dealt) == DP * M
    assert torch.equal(torch.cat(dealt, 1), torch.stack((tokens, -tokens)))


@pytest.mark.parametrize("P", range(1, 14))
def test_layers_are_dealt_out_once_and_evenly(P):
    for L in range(P, 14):
        dealt, sizes = [], []
        for stage in range(P):
            model = SimpleNamespace(layers=[nn.Linear(1, i + 1) for i in range(L)])
            mine = lesson.slice_stage(model, stage, P).layers
            dealt += [layer.out_features - 1 for layer in mine]
            sizes.append(len(mine))
        assert dealt == list(range(L))
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("sizes", [(3, 1, 2), (2, 3, 1), (6, 1, 1), (1, 1, 6)])
def test_every_rank_creates_every_group(sizes, monkeypatch):
    """PyTorch names a group by how many were created. A rank that left some out would
    wait under another name when the next mesh is made in the same process."""
    created = []

    def new_group(ranks=None, **options):
        created.append((sorted(ranks), options.get("group_desc")))
        assert not options.get("use_local_synchronization")
        return ranks

    c10d = torch.distributed.distributed_c10d
    for module in (torch.distributed, c10d):
        monkeypatch.setattr(module, "new_group", new_group)
        monkeypatch.setattr(module, "get_world_size", lambda group=None: 6)
    of_ranks = []
    for rank in range(6):
        created.clear()
        for module in (torch.distributed, c10d):
            monkeypatch.setattr(module, "get_rank", lambda group=None, r=rank: r)
        groups = lesson.make_mesh(dict(zip(("pp", "dp", "tp"), sizes)), 5)
        assert all(rank in ranks for ranks in groups.values()), (rank, groups)
        of_ranks.append([*created])
    assert all(mine == of_ranks[0] for mine in of_ranks)


# Every layout, against plain PyTorch, in float64 (in float32: the lesson's own runs).


@pytest.fixture(scope="module", params=[
    pytest.param(run, id=f"{run[1]} ranks", marks=pytest.mark.launches(*run))
    for run in DRIVERS
])  # fmt: skip
def found(request):
    return jobs.result(*request.param)


def test_equal_to_one_process(found):
    """Losses, norms, gradients, parameters of all stages; micro-batches in flight."""
    ranks, runs = len(found), [run["args"] for run in found[0]["runs"]]
    assert len(runs) == {2: 3, 6: 9, 8: 4}[ranks]
    if ranks > 2:
        for option in ("schedule", "ragged", "zero", "tie"):
            assert len({args[option] for args in runs}) == 2, option
    for run in [run for rank in found for run in rank["runs"]]:
        args = run["args"]
        assert max(run["diffs"].values())[0] <= 1e-12, (args, run["diffs"])
        M = args["microbatches"]
        limit = M if args["schedule"] == "gpipe" else min(args["pp"] - run["stage"], M)
        assert run["counted"]["in_flight"] == limit and run["counted"]["left"] == 0, (
            args
        )


# The lesson's own runs: who is where, and when.


@over(RUNS)
def test_who_is_where(run):
    """Each rank once; two ranks are a pipeline, 4, 6 and 8 have more than one axis."""
    data = jobs.result(*run).data
    P, DP, T = (data["size"][letter] for letter in ("P", "DP", "T"))
    assert P * DP * T == run[1]
    if len(run) == 2:
        assert P == 2 if run[1] % 2 == 0 else P == run[1]
        assert run[1] < 4 or run[1] == 3 or min(P, max(DP, T)) > 1
    rows = rows_with(data, "replica 0", "holds")
    ranks = [json.loads(row[f"replica {i}"]) for row in rows for i in range(DP)]
    assert [*chain.from_iterable(ranks)] == list(range(run[1]))
    assert {len(of_group) for of_group in ranks} == {T}


@over(RUNS)
def test_time_is_drawn(run):
    """For the stages of the mesh, and for P = 4: the dots are the bubble."""
    data = jobs.result(*run).data
    P, M = data["size"]["P"], data["size"]["M"]
    rows = rows_with(data, "time →", "waits/computes")
    drawn = [(int(row["P"]), int(row["M"]), int(row["stage"])) for row in rows]
    expected = [(P, M, stage) for stage in range(P)]
    assert drawn == expected + [(4, 8, stage) for stage in range(4) if P != 4]
    for row in rows:
        P, M = int(row["P"]), int(row["M"])
        waits = row["time →"].count(".")
        assert row["waits/computes"].startswith(f"{waits}/{2 * M} = ")
        assert waits == 2 * (P - 1)
        held = M if "gpipe" in run else min(P - int(row["stage"]), M)
        assert row["holds"] == str(held)


@over(RUNS)
def test_letters_have_values(run):
    """Layers, parameters and replicated ones of rank 0: what its rows are made of."""
    done = jobs.result(*run)
    size, printed = done.data["size"], re.sub(r"\s+", " ", done.out)
    for row in rows_with(done.data, "phase", "formula", "bytes"):
        count = int(number(row["bytes"])) // size["e"]
        if "l" in row["formula"]:
            layers = math.ceil(size["L"] / size["P"])
            ends = "embedding; " if size["P"] > 1 else "embedding or head; + 2: both; "
            assert f"l: {layers} layers; + 1: {ends}" in printed
        if row["formula"] == "e·Ψ":
            assert f"Ψ: {count:,} parameters" in printed
        if row["formula"] == "e·ρ":
            assert f"ρ: {count:,} replicated" in printed
    # No letter is explained that no row of rank 0 has.
    formulas = " ".join(row["formula"] for row in rows_with(done.data, "formula"))
    assert ("layers; + 1" in printed) == ("l" in formulas)
    assert ("40: header" in printed) == ("40" in formulas)
    assert (" replicated" in printed) == ("e·ρ" in formulas)


@over([run for run in RUNS if "--ragged" in run])
def test_ragged_lengths(run):
    done = jobs.result(*run)
    text = re.search(
        r"Lengths of its micro-batches, per replica:\s(\[\[.*?\]\])", done.out, re.S
    )
    lengths = [*chain.from_iterable(json.loads(text[1]))]
    T = done.data["size"]["T"]
    assert len(set(lengths)) >= 2 and all(x % T == 0 for x in lengths)


@over(RUNS)
def test_totals_are_the_sums_of_the_rows(run):
    """Payload and ring of rank 0 per axis, at least what rows that are not folded say;
    all ranks send more than one."""
    data = jobs.result(*run).data
    totals = {
        row["axis, all phases"]: row
        for row in rows_with(data, "axis, all phases", "payload")
    }
    axes = {"pp": data["size"]["P"], "dp": data["size"]["DP"], "tp": data["size"]["T"]}
    assert set(totals) == {axis for axis, ranks in axes.items() if ranks > 1}
    listed = dict.fromkeys(totals, 0)
    for row in rows_with(data, "phase", "collective", "axis", "bytes"):
        listed[row["axis"]] += number(row["bytes"])
    for axis, row in totals.items():
        assert number(row["payload"]) >= listed[axis]
        assert number(row["ring, all ranks"]) > number(row["ring"]) or run[1] == 1


# What left the lesson for scripts beside it.


@over(TIED_RUNS)
def test_a_tied_weight(run):
    """Two calls more between first and last stage, and equal copies after training."""
    done = passed(run, most=60)
    names = [check["name"] for check in done.data["checks"]]
    assert "gradients: lm_head.weight, mesh" not in names
    assert "gradients: embed_tokens.weight, mesh" in names
    assert f"replicas: {tied_stages.TIED}, embed" in names
    rows = rows_with(done.data, "phase", "collective", "axis", "bytes")
    size = done.data["size"]
    nbytes = math.ceil(size["V"] / size["T"]) * size["D"] * size["e"]
    of_weight = [row for row in rows if row["axis"] == "embed"]
    calls = [(row["phase"], row["collective"], row["calls"]) for row in of_weight]
    assert calls == [("sums", "all-reduce", "1"), ("update", "broadcast", "1")]
    assert {number(row["bytes"]) for row in of_weight} == {nbytes}


@over(STAGES_RUNS)
def test_one_step_by_pytorch(run):
    """The loss, and every parameter's gradient on the stage that has it."""
    done = jobs.result(*run)
    assert done.code == 0 and "Traceback" not in done.err, done.text
    assert f"\nPASS  {STAGES}  " in done.out and not re.search("[✗≠]", done.out)
    kinds = [check["kind"] for check in done.data["checks"]]
    L = int(flag(run, "--layers", done.data["size"]["L"]))
    assert kinds.count("losses") == 1 and kinds.count("gradients") == 16 * L + 5
    M, P = done.data["size"]["M"], done.data["size"]["P"]
    kind = "gpipe" if M < P else flag(run, "--schedule", "1f1b")
    assert f"fully_shard, {kind}\n" in done.out


# Edits.


def edited(folder, name: str, path: str, edits: dict[str, str], *flags) -> jobs.Done:
    """A lesson or script on two ranks, in a copy of the course where one file has these
    lines: old → new, each occurs once."""
    (folder / "beyond").mkdir()
    for source in [*jobs.ROOT.glob("0*.py"), *jobs.ROOT.glob("beyond/*.py")]:
        text = source.read_text("utf-8")
        if source.name == path:
            for old, new in edits.items():
                assert text.count(old) == 1, old
                text = text.replace(old, new)
        (folder / source.relative_to(jobs.ROOT)).write_text(text, "utf-8")
    script = folder / jobs.path_of(name).relative_to(jobs.ROOT)
    result = folder / "out.json"
    done = jobs.launch(script, 2, "--steps", "1", "--json", result, *flags)
    return done._replace(data=json.loads(result.read_text() or "{}"))


IN_TWO_RUNS = {
    "        loss = self.pipeline.run(self.actions, self.micro_batches)\n":
    "        half = len(self.micro_batches) // 2\n"
    "        loss = self.pipeline.run(self.actions, self.micro_batches[:half])\n"
    "        rest = self.micro_batches[half:]\n"
    "        loss = loss + self.pipeline.run(self.actions, rest)\n",
    "stage, num_stages, args.microbatches)":
    "stage, num_stages, args.microbatches // 2)",
}  # fmt: skip


def test_accumulating_gradients_passes(tmp_path):
    """Two runs of M/2 micro-batches, one update. The bubble is no longer (P − 1)/M."""
    done = edited(tmp_path, MESH, f"{MESH}.py", IN_TWO_RUNS)
    assert done.code == 0 and "✗" not in done.out, done.text
    assert failed(done.data) == {"schedule": 2}
    assert (
        "\n≠ schedule: stage 0 of 2: holds 2, waits 2/4 = 50%; the lesson 2, 1/4"
        in (done.out)
    )


POST_NORM = {
    "x_BSD=self.input_layernorm(x_BSD)": "x_BSD=x_BSD",
    "self.mlp(self.post_attention_layernorm(x_BSD))":
    "self.mlp(self.input_layernorm(x_BSD))",
    "return x_BSD + self.dropout(y_BSD)":
    "return self.post_attention_layernorm(x_BSD + self.dropout(y_BSD))",
}  # fmt: skip


def test_a_model_that_pytorchs_plan_cannot_run(tmp_path):
    """Norms after the sum: right by hand. Each stage would raise, or wait for one."""
    done = edited(tmp_path, MESH, f"{MESH}.py", POST_NORM)
    assert done.code == 0 and not re.search("[✗≠]", done.out), done.text
    again = tmp_path / "again"
    again.mkdir()
    done = edited(again, STAGES, "02_transformer_tp.py", POST_NORM)
    assert done.code == 1 and failed(done.data) == {"runs": 1}, done.text
    assert "\n✗ runs: PyTorch: RuntimeError: aten.add.Tensor got mixed" in done.out


def test_a_schedule_that_pytorch_does_not_have(tmp_path):
    edits = {', "gpipe": ScheduleGPipe}': "}"}
    flags = ("--schedule", "gpipe")
    done = edited(tmp_path, STAGES, f"{STAGES}.py", edits, *flags)
    assert done.code == 1 and failed(done.data) == {"runs": 1}, done.text
    assert "\n✗ runs: PyTorch: KeyError: 'gpipe'" in done.out


def test_totals_are_those_of_each_rank(tmp_path):
    """What failed on another rank is named with its rank, and counts there only."""
    loop = "        for phase, i in actions:\n            run_action = "
    skip = loop.replace(
        "            run", "            if i == 3: continue\n            run"
    )
    done = edited(tmp_path, MESH, f"{MESH}.py", {loop: skip})
    checks = {check["name"]: check["ranks"] for check in done.data["checks"]}
    assert checks["calls: mesh forward send/recv pp"] == [0]
    assert checks["calls: mesh backward send/recv pp"] == [1]
    (row,) = rows_with(done.data, "axis, all phases", "payload")
    # 6 messages, 3 to each side, and one of the norm.
    found = [
        row[name]
        for name in ("axis, all phases", "calls", "payload", "ring, all ranks")
    ]
    assert found == ["pp", "7", "98,432", "196,864"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.double() * 2 * self.weight


def stage_0_of_2(monkeypatch, received: list[tuple]) -> lesson.Pipeline:
    """The first of two stages, in this process; received: headers of the gradients."""
    headers = iter(received)

    def recv(out, **_):
        if out.dtype == torch.int64:
            out.copy_(torch.tensor([*next(headers), 1, 2, 3]))

    class Done:
        def wait(self):
            pass

    monkeypatch.setattr(torch.distributed, "isend", lambda *_, **__: Done())
    monkeypatch.setattr(torch.distributed, "recv", recv)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank)
    group = no_group(2)
    group.group_desc = "pp"
    groups = {"pp": group, "pp_backward": group}
    return lesson.Pipeline(Twice().double(), None, groups)


def test_a_message_says_what_it_carries(monkeypatch):
    """Gradients that come in another order than this stage takes them: both are named.

    Shapes are the same, so without a number each would be taken for the other.
    """
    batches = [(torch.ones(1, 2, 3), None)] * 2
    steps = lesson.schedule("gpipe", 0, 2, 2)
    pipeline = stage_0_of_2(monkeypatch, [(0, 0), (1, 0)])
    pipeline.run(steps, batches)
    pipeline = stage_0_of_2(monkeypatch, [(1, 0), (0, 0)])
    text = "expected the gradient of micro-batch 1 to stage 0, got the gradient of "
    with pytest.raises(ValueError, match=text + "micro-batch 2 to stage 0"):
        pipeline.run(steps, batches)
    pipeline = stage_0_of_2(monkeypatch, [(0, 2), (1, 0)])
    with pytest.raises(
        ValueError, match="got the gradient of micro-batch 1 to stage 2"
    ):
        pipeline.run(steps, batches)


SMALL = (
    "--hidden",
    "16",
    "--heads",
    "2",
    "--kv-heads",
    "2",
    "--layers",
    "3",
    "--batch-size",
    "8",
)
SMALL += ("--seq-len", "8", "--microbatches", "2", "--dtype", "float64")


def on_two_machines():
    flags = (*SMALL, "--steps", "2", "--pp", "2", "--tp", "1")
    return jobs.two_agents(jobs.path_of(TIED), 1, *flags)


@pytest.mark.ahead.with_args(on_two_machines)
def test_two_machines():
    """Two agents on this one, as on two hosts: torchrun --nnodes=2."""
    first, second = jobs.begin(on_two_machines).result()
    assert first.code == second.code == 0, first.text + second.text
    last = [one.out.splitlines()[-1] for one in (first, second) if one.out]
    assert len(last) == 1 and last[0].startswith(f"PASS  {TIED}")
