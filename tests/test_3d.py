"""Lesson 05: a mesh of ranks trains as one process does, whatever its shape.

Schedules as lists; then every layout of 2, 4, 6 and 8 ranks on random sizes and options
against plain PyTorch; messages; the lesson's own runs.
"""

import re
from functools import cache
from itertools import accumulate, product
from types import SimpleNamespace

import jobs
import pytest
import torch
from in_ranks import no_group
from runs import ALL_RUNS, MESH, over
from torch import nn

DRIVERS = [("drive_3d.py", ranks) for ranks in (8, 6, 4, 2)]
RUNS = [run for run in ALL_RUNS if run[0] == MESH]
lesson = jobs.load(MESH)
pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


# Schedules: lists of steps, before any rank is started.


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
    assert len(runs) == {2: 3, 4: 6, 6: 9, 8: 10}[ranks], "every layout"
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


def test_defaults_show_more_than_one_axis():
    meshes = {run[1]: jobs.result(*run).data["mesh"] for run in RUNS if len(run) == 2}
    assert meshes[2]["pp"] == 2, "two ranks are a pipeline"
    assert all(sum(n > 1 for n in meshes[ranks].values()) > 1 for ranks in (4, 6, 8))


@over([run for run in RUNS if "--ragged" in run])
def test_ragged_lengths(run):
    data = jobs.result(*run).data
    lengths = [x for of_replica in data["lengths"] for x in of_replica]
    assert len(set(lengths)) >= 3 and all(x % data["mesh"]["tp"] == 0 for x in lengths)


POST_NORM = (
    ("x_BSD=self.input_layernorm(x_BSD)", "x_BSD=x_BSD"),
    ("self.mlp(self.post_attention_layernorm(x_BSD))",
     "self.mlp(self.input_layernorm(x_BSD))"),
    ("return x_BSD + self.dropout(y_BSD)",
     "return self.post_attention_layernorm(x_BSD + self.dropout(y_BSD))"),
)  # fmt: skip


def test_a_schedule_that_pytorch_does_not_have(tmp_path):
    """It ends the section of PyTorch only; all others are printed, with a verdict."""
    text = jobs.PATHS[MESH].read_text("utf-8")
    known = 'SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}'
    assert text.count(known) == 1
    script = tmp_path / f"{MESH}.py"
    script.write_text(text.replace(', "gpipe": ScheduleGPipe}', "}"), "utf-8")
    done = jobs.launch(script, 2, "--schedule", "gpipe", "--steps", "1")
    last = done.out.splitlines()[-1]
    assert last == f"FAIL  {MESH}  failed: plans 1/1; all values agree", done.text
    assert "PyTorch raised KeyError: 'gpipe'" in done.out
    assert "✗ PyTorch raised KeyError: 'gpipe', on ranks [0, 1]" in done.out


def test_a_model_that_pytorchs_plan_cannot_run(tmp_path):
    """Norms after the sum: right by hand. Each stage would raise, or wait for one."""
    text = jobs.PATHS[MESH].read_text("utf-8")
    for old, new in POST_NORM:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = tmp_path / f"{MESH}.py"
    script.write_text(text, "utf-8")
    done = jobs.launch(script, 2, "--steps", "1")
    assert f"\nPASS  {MESH}  values agree: " in done.out and "✗" not in done.out, (
        done.text
    )
    assert "\n≠ PyTorch raised RuntimeError: aten.add.Tensor got mixed" in done.out


def test_totals_are_those_of_each_rank(tmp_path):
    """Rows that failed on another rank are printed, and count there only."""
    text = jobs.PATHS[MESH].read_text("utf-8")
    loop = "        for phase, i in steps:\n"
    assert loop in text  # in Pipeline.run at first
    text = text.replace(loop, f"{loop}            if i == 3: continue\n", 1)
    script = tmp_path / f"{MESH}.py"
    script.write_text(text, "utf-8")
    done = jobs.launch(script, 2)
    assert "backward send/recv pp: fails on ranks [1], not on rank 0" in done.out
    # 6 messages, 3 to each side, and one of the norm.
    assert re.search(r"\n   pp +7   98,432  98,432 +196,864\n", done.out), done.out


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


SMALL = ("--hidden", "16", "--heads", "2", "--layers", "3", "--batch-size", "8")
SMALL += ("--seq-len", "8", "--microbatches", "2", "--tie", "--dtype", "float64")


def on_two_machines():
    flags = (*SMALL, "--steps", "2", "--pp", "2", "--tp", "1")
    return jobs.two_agents(jobs.ROOT / f"{MESH}.py", 1, *flags)


@pytest.mark.ahead.with_args(on_two_machines)
def test_two_machines():
    """Two agents on this one, as on two hosts: torchrun --nnodes=2."""
    first, second = jobs.begin(on_two_machines).result()
    assert first.code == second.code == 0, first.text + second.text
    last = [one.out.splitlines()[-1] for one in (first, second) if one.out]
    assert len(last) == 1 and last[0].startswith(f"PASS  {MESH}")
