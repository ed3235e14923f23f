"""The notebooks: live ranks that recover and end, exercises that judge, clean files.

That their text outputs are what is committed is checked by nbval, which runs them from
top to bottom. Pictures it does not compare: see test_draw.py.
"""

import base64
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jobs
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

import ranks  # noqa: E402

NOTEBOOKS = {
    path.stem: json.loads(path.read_text())
    for path in sorted(FOLDER.glob("0?_*.ipynb"))
}


def cells(name: str, kind: str) -> list[str]:
    found = [c for c in NOTEBOOKS[name]["cells"] if c["cell_type"] == kind]
    return ["".join(cell["source"]) for cell in found]


# Live ranks


@pytest.fixture(scope="module")
def home():
    """What `prepare` changes in this process is put back."""
    environ, folder = dict(os.environ), os.getcwd()
    ranks.prepare()
    yield
    ranks.Ranks.stop_all()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture(scope="module")
def live(home):
    return ranks.start(2, "01_naive_mlp_tp", timeout=4)


def test_what_ranks_print(live, capsys):
    live.px("", "print('same'); print('lines')")
    assert capsys.readouterr().out == "every rank  same\n            lines\n"
    live.px(
        "", "import time; time.sleep(0.3 * (1 - rank)); print('I am', rank)\nrank + 5"
    )
    assert capsys.readouterr().out == (
        "rank 0  I am 0\n        5\nrank 1  I am 1\n        6\n"
    )
    live.px("print('one') if rank else None")
    assert capsys.readouterr().out == "rank 1  one\n"
    live.px("", "value = torch.tensor([rank + 0.5])")
    assert [v.item() for v in live["value"]] == [0.5, 1.5]


def test_a_rank_that_raises(live, capsys):
    live.px("", "kept = torch.full((2,), rank + 1.0)\nmlp = TPMLP(MLP(2, 4), tp_group)")
    with pytest.raises(ranks.RankFailed) as failed:
        live.px(
            "", "if rank == 1:\n    raise ValueError('out')\nall_reduce(kept, tp_group)"
        )
    lines = str(failed.value).splitlines()
    assert lines[1] == "rank 1: ValueError: out (line 2 of the cell)"
    assert lines[0].startswith("rank 0: RuntimeError: Timed out waiting 4000ms")
    assert failed.value._render_traceback_()[-1].endswith(": live.again()")
    live.again()
    said = capsys.readouterr().out
    assert "this call was not made by rank 1" in said and "is kept" in said
    live.px(
        "", "print(all_reduce(kept, tp_group).tolist(), mlp(torch.ones(1, 2)).shape)"
    )
    assert capsys.readouterr().out == "every rank  [3.0, 3.0] torch.Size([1, 2])\n"


def judged(live, capsys, *lines) -> str:
    """What `check` says of these claims."""
    code = "".join(f"    {line}\n" for line in lines)
    live.px("", f"def claims():\n{code}check(claims())")
    return capsys.readouterr().out


ADD_UP = "all_reduce(torch.ones(2), tp_group{})"


def test_check_tells_a_wrong_argument_from_a_rank_that_is_not_there(live, capsys):
    wrong = ADD_UP.format(", op='max'")
    said = judged(live, capsys, f"yield {wrong} is None, ''")
    assert said.startswith("every rank  not yet: TypeError: (): incompatible function")
    assert "live.again()" not in said
    said = judged(live, capsys, f"yield {ADD_UP.format('')}.sum() == 4, ''")
    assert said == "every rank  right\n"  # the group is as it was
    said = judged(live, capsys, "yield rank == 0, 'no'")
    assert said == "every rank  not yet; rank 1: no\n"

    lost = "a collective did not come about; after it, run live.again()\n"
    for caller in (0, 1):
        call = f"{ADD_UP.format('')} if rank == {caller} else None"
        said = judged(live, capsys, f"yield {call} is None, ''")
        assert said == f"every rank  not yet; rank {caller}: {lost}"
        live.again()
        capsys.readouterr()
    said = judged(
        live, capsys, f"{ADD_UP.format('')} if rank == 0 else {wrong}", "yield 1, ''"
    )
    cause, rest = said.split("\n", 1)
    assert cause.startswith("every rank  not yet; rank 1: TypeError: ")
    assert rest.strip() == f"and {lost}".strip()
    live.again()
    said = judged(live, capsys, f"yield {ADD_UP.format('')}.sum() == 4, ''")
    assert said.endswith("every rank  right\n")


@pytest.mark.parametrize("error, lost", [
    (RuntimeError("Timed out waiting 4000ms for recv operation"), True),
    (RuntimeError("Connection closed by peer [::1]:1"), True),
    (RuntimeError("[a/third_party/gloo/x.cc:1] sizes differ"), True),
    (RuntimeError("Invalid scalar type"), False),
    (ValueError("timeout"), False),
])  # fmt: skip
def test_which_errors_mean_that_a_rank_was_lost(monkeypatch, error, lost):
    comm = SimpleNamespace(place={"state": "in"})
    monkeypatch.setitem(ranks.HERE, "lesson", SimpleNamespace(COMM=comm))
    assert ranks.lost_the_others(error) == lost
    comm.place = {"state": "after"}
    assert not ranks.lost_the_others(error)


@pytest.mark.parametrize("hang", ["import time; time.sleep(600)", "while True: pass"])
def test_a_rank_that_hangs(live, capsys, hang):
    live.px("", "kept = torch.full((2,), rank + 1.0)")
    live.view.execute(f"if rank == 1:\n    {hang}", block=False)
    start = time.time()
    live.again()
    assert time.time() - start < 8 and "is kept" in capsys.readouterr().out
    live.px("", "print(all_reduce(kept, tp_group).tolist())")
    assert capsys.readouterr().out == "every rank  [3.0, 3.0]\n"


def test_broken_is_cured_again(live, capsys):
    names = list(live.lesson.BREAKS)
    code = "\n".join(
        [
            "import inspect",
            "def state(target):",
            "    owner, _, name = target.rpartition('.')",
            "    held = getattr(lesson, owner) if owner else lesson",
            "    return vars(held).get(name), globals().get(name)",
            f"for name in {names}:",
            "    target = BREAKS[name].target",
            "    before = state(target)",
            "    with broken(name):",
            "        during = state(target)",
            "    assert during != before and state(target) == before, name",
            "print('cured')",
        ]
    )
    live.px("", code)
    assert capsys.readouterr().out == "every rank  cured\n"


def test_a_rank_that_died(live, capsys):
    os.kill(live.pids[1], signal.SIGKILL)
    live.again()
    assert capsys.readouterr().out == "2 new ranks; what the old ones held is lost\n"
    live.px("", "print(all_reduce(torch.ones(1), tp_group).item())")
    assert capsys.readouterr().out == "every rank  2.0\n"


def test_a_rank_that_is_known_to_be_dead(live):
    # The client needs half a minute to notice: then it does not know that rank at all.
    with mock.patch.object(type(live.client), "ids", [0]):
        assert live.interrupt() is False


def test_how_many_ranks():
    assert [ranks.how_many(4, free) for free in (8, 2, 1.9)] == [4, 4, 2]


START = "import ranks; ranks.prepare(); live = ranks.start(2, '00_collectives')"


def told(client, code: str) -> str:
    """What a kernel prints when it runs this."""
    said = []
    note = lambda message: said.append(message["content"].get("text", ""))
    reply = client.execute_interactive(code, timeout=90, output_hook=note)
    assert reply["content"]["status"] == "ok", reply
    return "".join(said)


def test_a_kernel_that_is_interrupted_restarted_and_killed():
    """After the first its ranks come back, after the others nothing is left of them,
    though one was busy."""
    mark = uuid.uuid4().hex
    kernel = KernelManager()
    kernel.start_kernel(env=os.environ | {jobs.MARK: mark}, cwd=FOLDER)
    try:
        for last in (False, True):
            client = kernel.blocking_client()
            client.start_channels()
            client.wait_for_ready(timeout=60)
            told(client, START)
            assert len(jobs.processes(mark)) > 3
            if not last:
                threading.Timer(2, kernel.interrupt_kernel).start()
                said = told(client, "%%px\nwhile rank == 1: pass")
                assert said.startswith("interrupted")
                assert "is kept" in told(client, "live.again()")
                said = told(client, "%px print(all_reduce(torch.ones(1), tp_group))")
                assert said == "every rank  tensor([2.])\n"
            told(client, "live.view.execute('while True: pass', block=False)")
            client.stop_channels()
            if last:
                os.kill(kernel.provisioner.pid, signal.SIGKILL)
            else:
                kernel.restart_kernel(now=True)
            only_kernel = lambda: all("ipykernel" in c for _, c in jobs.processes(mark))
            until = time.time() + 8
            while not only_kernel() and time.time() < until:
                time.sleep(0.2)
            assert only_kernel(), jobs.processes(mark)
    finally:
        kernel.shutdown_kernel(now=True)
        for pid, _ in jobs.processes(mark):
            os.kill(pid, signal.SIGKILL)


# Exercises

GATED_SP = """class GatedSPMLP(nn.Module):
    def __init__(self, gate, up, down, g):
        super().__init__()
        self.g = g
        self.gate = ColumnParallelLinear(gate, g, copy_input=False)
        self.up = ColumnParallelLinear(up, g, copy_input=False)
        self.down = SPRowParallelLinear(down, g)
    def forward(self, x, S):
"""
GATED_SP_END = """        both = [self.gate, self.up]
        gate, up = linears_of_sequence(x, S, both, self.g)
        return self.down(F.silu(gate) * up)
"""
COUNT_LINES = """def count_lines(micro_batches, dp_group):
    here = sum((target != IGNORE).any(1).sum() for _, target in micro_batches)
    return all_reduce(here, dp_group)
"""
COUNTED = """def parameters_of_model(stage, groups, V):
    named = stage.named_parameters()
    share = lambda name: counted_share(stage, name, groups["tp"])
    n = torch.tensor(sum(share(name) * p.numel() for name, p in named))
"""
WRONG = {  # what people try, and what they are told
    "00_collectives": [
        (1, "mean_over_ranks = all_reduce", "that is the sum"),
        (1, "def mean_over_ranks(x, group):\n    dist.all_reduce(x, group=group)\n"
            "    return x / group.size()", "x has changed"),
        (1, "def mean_over_ranks(x, group):\n    return x.mean()", "its shape is []"),
        (2, "def gather_by_adding(x, group):\n    return all_gather(x, 0, group)",
         "collectives used: {'all-gather': 1}"),
        (2, "def gather_by_adding(x, group):\n    return all_reduce(x, group)",
         "its shape is [2], not [4]"),
        (2, "def gather_by_adding(x, group):\n    full = torch.zeros(2, 2)\n"
            "    full[group.rank()] = x\n    return all_reduce(full, group)",
         "its shape is [2, 2], not [4]"),
        (3, "def product_by_rows(a, b, group):\n"
            "    return shard(all_reduce(a @ b, group), 1, group)\n"
            "predicted = lambda I, J, K, T, size: 0",
         "the shape is [8, 10], not [4, 20]"),
        (3, "def product_by_rows(a, b, group):\n"
            "    return reduce_scatter(a @ b, 0, group)\n"
            "predicted = lambda I, J, K, T, size: size * I * K // T",
         "float32: you predicted 320 bytes, counted were 640"),
        (3, "def product_by_rows(a, b, group):\n"  # no bytes; right by chance at first
            "    return reduce_scatter(a @ b, 0, group)\n"
            "predicted = lambda I, J, K, T, size: 2 * T * I * K",
         "float64: you predicted 192 bytes, counted were 384"),
    ],
    "01_naive_mlp_tp": [
        (1, "class GatedTPMLP(nn.Module):\n    def __init__(self, gate, up, down, g):\n"
            "        super().__init__()\n"
            "        self.gate = ColumnParallelLinear(gate, g)\n"
            "        self.up = ColumnParallelLinear(up, g)\n"
            "        self.down = RowParallelLinear(down, g)\n"
            "    def forward(self, x):\n"
            "        return self.down(F.silu(self.gate(x)) * self.up(x))",
         "f once, for both layers"),
        (1, "class GatedTPMLP(nn.Module):\n    def __init__(self, gate, up, down, g):\n"
            "        super().__init__()\n"
            "        self.all = nn.ModuleList([gate, up, down])\n"
            "    def forward(self, x):\n        gate, up, down = self.all\n"
            "        return down(F.silu(gate(x)) * up(x))",
         "parameters on this rank"),
        (2, "bytes_of_tp = lambda B, S, D, F: 4 * B * S * D", "gives 96; counted"),
        (3, "same = different = AllGather", "`same`: the gradient is [2.0, 4.0]"),
        (3, "same = different = GatherFromTP", "`different`: the gradient is"),
    ],
    "04_sequence_parallel": [
        (1, GATED_SP +
            "        (a,) = linears_of_sequence(x, S, [self.gate], self.g)\n"
            "        (b,) = linears_of_sequence(x, S, [self.up], self.g)\n"
            "        return self.down(F.silu(a) * b)",
         "forward: {'all-gather': 2, 'reduce-scatter': 1}"),
        (1, GATED_SP +
            "        x = all_gather(x, 1, self.g)[:, :S].requires_grad_()\n"
            "        return self.down(F.silu(self.gate(x)) * self.up(x))",
         "dL/dx is missing"),
        (1, GATED_SP +
            "        x = GatherFromTP.apply(x, 1, self.g)[:, :S]\n"
            "        return self.down(F.silu(self.gate(x)) * self.up(x))",
         "dL/dx is wrong: which backward"),
        (1, GATED_SP.replace(", copy_input=False", "") +
            "        x = gather_sequence(x, S, self.g)\n"
            "        return self.down(F.silu(self.gate(x)) * self.up(x))",
         "an all-reduce too; f is still in your column-parallel layers (copy_input"),
        (1, GATED_SP.replace(", copy_input=False", "") +
            "        x = GatherFromTP.apply(x, 1, self.g)[:, :S]\n"
            "        return self.down(F.silu(self.gate(x)) * self.up(x))",
         "backward: {'all-gather': 1, 'all-reduce': 2}, not a reduce-scatter and"),
        (1, GATED_SP +
            "        x, f = gather_sequence(x, S, self.g), CopyToTP.apply\n"
            "        gate, up = (F.linear(x, f(one.weight, self.g), one.bias)\n"
            "                    for one in (self.gate, self.up))\n"
            "        return self.down(F.silu(gate) * up)",
         "dL/d gate.weight is wrong"),
        (1, GATED_SP.replace("    def forward",
            "        self.gate.weight.register_hook(lambda grad: 2 * grad)\n"
            "    def forward") + GATED_SP_END,
         "dL/d gate.weight is wrong"),
        (1, GATED_SP.replace("    def forward",  # added T times, of 1/T: y is right
            "        self.down.bias = nn.Parameter(down.bias / g.size())\n"
            "    def forward") +
            "        both = [self.gate, self.up]\n"
            "        gate, up = linears_of_sequence(x, S, both, self.g)\n"
            "        h = F.silu(gate) * up\n"
            "        y = F.linear(h, self.down.weight, self.down.bias)\n"
            "        return scatter_sequence(y, self.g)",
         "dL/d down.bias is wrong"),
        (1, GATED_SP +  # the bias by one rank: mend_replicated could not sum it
            "        both = [self.gate, self.up]\n"
            "        gate, up = linears_of_sequence(x, S, both, self.g)\n"
            "        bias = self.down.bias if rank == 0 else None\n"
            "        y = F.linear(F.silu(gate) * up, self.down.weight, bias)\n"
            "        return scatter_sequence(y, self.g)",
         "`down.bias` has no gradient on rank 1"),
        (1, "class Rows(nn.Module):\n    def __init__(self, full, g):\n"
            "        super().__init__()\n        self.g = g\n"
            "        self.weight = nn.Parameter(shard(full.weight, 1, g))\n"
            "        self.bias = copy.deepcopy(full.bias)\n"
            "    def forward(self, h):\n"
            "        return scatter_sequence(F.linear(h, self.weight), self.g)"
            " + self.bias\n" +
            GATED_SP.replace("SPRowParallelLinear", "Rows") + GATED_SP_END,
         "expected [[6], [6, 8], [8], [8], [8, 6], [8, 6]]: a cut parameter needs a"),
        (1, "class GatedSPMLP(nn.Module):\n    def __init__(self, gate, up, down, g):\n"
            "        super().__init__()\n"
            "        self.all = nn.ModuleList([gate, up, down])\n"
            "    def forward(self, x, S):\n        gate, up, down = self.all\n"
            "        return down(F.silu(gate(x)) * up(x))",
         "parameters on this rank"),
        (2, "needs_sum = {f'{n}_layernorm.{w}' for n in ('input', 'post_attention')"
            " for w in ('weight', 'bias')}",
         "self_attn.o_proj.bias is not in your set"),
        (2, "needs_sum = {'input_layernorm.weight', 'input_layernorm.bias',"
            " 'self_attn.q_proj.bias'}",
         "self_attn.q_proj.bias is in your set, but its gradient is right"),
        (2, "needs_sum = {'norm'}", "'norm' is not the name of a parameter"),
        (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
            "    mean = loss_Bs.sum() / (target_Bs != IGNORE).sum().clamp(1)\n"
            "    return ReduceFromTP.apply(mean, tp_group) / tp_group.size()",
         "with 2 of 8 targets IGNORE the mean is"),
        (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
            "    total = ReduceFromTP.apply(loss_Bs.sum(), tp_group)\n"
            "    count = (target_Bs != IGNORE).sum().clamp(1)\n"
            "    return total / all_reduce(count, tp_group)",
         "with 5 of 8 targets IGNORE the mean is"),
        (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
            "    count = all_reduce((target_Bs != IGNORE).sum(), tp_group)\n"
            "    return all_reduce(loss_Bs.sum(), tp_group) / count",
         "the result has no gradient"),
        (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
            "    total = CopyToTP.apply(ReduceFromTP.apply(loss_Bs.sum(), tp_group),"
            " tp_group)\n"
            "    count = all_reduce((target_Bs != IGNORE).sum(), tp_group)\n"
            "    return total / count",
         "dL/d loss of one token is"),
    ],
    "05_3d_parallel": [
        (1, "limited = lambda r, P, M, most: schedule('1f1b', r, P, M)",
         "stage 0 of 4, M 8, most 2: it keeps 4 at most, and should keep 2"),
        (1, "limited = lambda r, P, M, most: schedule('gpipe', r, P, M)",
         "stage 0 of 4, M 8, most 4: it keeps 8 at most, and should keep 4"),
        (1, "limited = lambda r, P, M, most: "
            "[(w, i) for i in range(M) for w in ('forward', 'backward')]",
         "it keeps 1 at most, and should keep 4"),
        (1, "def limited(r, P, M, most):\n    k = min(P - r, M, most)\n"
            "    return [(w, i) for first in range(0, M, k) for w in "
            "('forward', 'backward')\n            for i in range(M)[first:first + k]]",
         "before backward 1 it has done 4 of 8 forwards; here it should be 5"),
        (1, "def limited(r, P, M, most):\n    k = min(P - r, M, most)\n"
            "    steps = [(w, i) for i in range(M - k) for w in "
            "('forward', 'backward')]\n    return steps + [(w, i) for w in "
            "('forward', 'backward') for i in range(M - k, M)]",
         "before backward 0 it has done 1 of 8 forwards; here it should be 4"),
        (1, "limited = lambda r, P, M, most: "
            "schedule('1f1b', r, P, M)[:-1]", "these are not 8 backwards in order"),
        (1, "limited = lambda r, P, M, most: schedule('1f1b', r, P, M)[::-1]",
         "these are not 8 forwards in order"),
        (1, "limited = lambda r, P, M, most: [(w, i) for i in range(M) "
            "for w in ('backward', 'forward')]", "comes before forward 0"),
        (2, "count_lines = lambda parts, g: all_reduce(torch.tensor("
            "sum(p.shape[1] for p in parts)), g)\npart_by_lines = None",
         "count_lines gives 16; 14 have a target"),
        (2, "count_lines = lambda parts, g: sum((t != IGNORE).any(1).sum() "
            "for _, t in parts)\npart_by_lines = None",
         "count_lines gives 3; 14 have a target"),
        (2, "count_lines = lambda parts, g: all_reduce(sum((t != IGNORE).any(1).sum()"
            ".item() for _, t in parts), g)\npart_by_lines = None",
         "'int' object has no attribute 'detach'; all_reduce takes a tensor"),
        (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: "
            "loss.mean(1).sum().item() / int(n)", "no tensor, no gradient"),
        (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: loss.mean(1).sum()"
            " / n", "all parts add up to"),
        (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: "
            "(loss.sum(1) / (target != IGNORE).sum(1)).sum() / n",
         ": 0/0? A line may have no target"),
        (2, COUNT_LINES + "part_by_lines = lambda loss, target, n: loss.sum() / "
            "(target != IGNORE).sum().clamp(1) * len(loss) / n", "all parts add up to"),
        (3, "def parameters_of_model(stage, groups, V):\n"
            "    n = torch.tensor(sum(p.numel() for p in stage.parameters()))\n"
            "    return all_reduce(all_reduce(n, groups['tp']), groups['pp'])",
         "{'tp': 2, 'dp': 2}: "),
        (3, COUNTED + "    return all_reduce(n.item(), groups['tp'])",
         "'float' object has no attribute 'detach'; all_reduce takes a tensor"),
        (3, COUNTED + "    for axis in ('tp', 'pp', 'dp'):\n"
            "        n = all_reduce(n, groups[axis])\n    return n.item()",
         "{'dp': 4}: 28004.0, but one process has 7001"),
        (3, COUNTED + "    return all_reduce(all_reduce(n, groups['tp']), "
            "groups['pp']).item()", "{'tp': 2, 'dp': 2}: 7018.0, but one"),
        (3, "def parameters_of_model(stage, groups, V):\n"
            "    T, n = groups['tp'].size(), 0\n"
            "    for name, p in stage.named_parameters():\n"
            "        vocabulary = name.startswith(('embed', 'lm_head'))\n"
            "        n += p.numel() * (1 if tell_placement(stage, name) else 1 / T)\n"
            "        n -= vocabulary * (T * len(p) - V) * p[0].numel() / T\n"
            "    n = all_reduce(torch.tensor(n), groups['tp'])\n"
            "    return all_reduce(n, groups['pp']).item()",
         "{'pp': 2, 'dp': 2, 'tie': True}: 7001.0, but one process has 4945"),
    ],
    "02_transformer_tp": [
        (1, "def largest_gradient(model, tp_group):\n"
            "    return max(p.grad.abs().max() for p in model.parameters()).item()",
         "rank 0: got 1.0, wanted 7.0: the largest is −7 at the end of layers.0.mlp"),
        (1, "def largest_gradient(model, tp_group):\n"
            "    mine = max(p.grad.max() for p in model.parameters())\n"
            "    return all_reduce(mine, tp_group, dist.ReduceOp.MAX)",
         "got 1.0, wanted 7.0"),
        (1, "def largest_gradient(model, tp_group):\n"
            "    return max(all_reduce(p.grad.abs().max(), tp_group, "
            "dist.ReduceOp.MAX)\n               for p in model.parameters())",
         "21 collectives were called, not 1"),
        (1, "def largest_gradient(model, tp_group):\n"
            "    mine = max(p.grad.abs().max() for p in model.parameters())\n"
            "    dist.all_reduce(mine, dist.ReduceOp.MAX, group=tp_group)\n"
            "    return mine.item()",
         "counted were 0 collectives: use the lesson's `all_reduce`"),
        (1, "def largest_gradient(model, tp_group):\n"
            "    mine = max(p.grad.abs().max() for p in model.parameters())\n"
            "    return all_reduce(mine, tp_group, op='max').item()",
         "every rank  not yet: TypeError: (): incompatible function arguments"),
        (2, "sent_in_a_step = lambda B, S, D, L: 16 * L * B * S * D",
         "sent_in_a_step gives 768: return two numbers"),
        (2, "sent_in_a_step = lambda B, S, D, L: (2 * L, 8 * L * B * S * D)",
         "gives (2, 384); counted were (4, 768)"),
        (2, "sent_in_a_step = lambda B, S, D, L: (4 * L, 16 * L * B * S * D)\n"
            "parameters_on_a_rank = lambda D, T: (12 * D * D + 13 * D) // T",
         "gives 1640; counted were 1688"),
        (3, "SharedLinear = lambda full, group: copy.deepcopy(full)",
         "dL/d k_proj.weight is wrong: every rank has a term of it"),
        (3, "def SharedLinear(full, tp_group): return full",
         "dL/d k_proj.weight is wrong: every rank has a term of it"),
        (3, "class SharedLinear(nn.Module):\n    def __init__(self, full, group):\n"
            "        super().__init__()\n"
            "        self.weight, self.bias = full.weight, full.bias\n"
            "    def forward(self, x):\n"
            "        return F.linear(x, self.weight, self.bias)",
         "dL/d k_proj.weight is wrong: every rank has a term of it"),
        (3, "class SharedLinear(nn.Module):\n    def __init__(self, full, group):\n"
            "        super().__init__()\n        self.group = group\n"
            "        self.weight, self.bias = map(copy.deepcopy, full.parameters())\n"
            "    def forward(self, x):\n"
            "        weight = CopyToTP.apply(self.weight, self.group)\n"
            "        return F.linear(x, weight, self.bias)",
         "dL/d k_proj.bias is wrong"),
        (3, "class SharedLinear(nn.Module):\n    def __init__(self, full, group):\n"
            "        super().__init__()\n        self.group = group\n"
            "        self.full = copy.deepcopy(full)\n"
            "    def forward(self, x):\n"
            "        return self.full(CopyToTP.apply(x, self.group))",
         "dL/dx is wrong: is x summed twice?"),
    ],
    "03_vocab_parallel": [
        (1, "def likeliest(x, group, V):\n    return x.argmax(-1)",
         "tokens are wrong"),
        (1, "def likeliest(x, group, V):\n    return all_gather(x, 2, group)"
            "[..., :V].argmax(-1)", "two all-reduces are enough"),
        (1, "def likeliest(x, group, V):\n    m = largest_logit(x, group)\n"
            "    mine = x.argmax(-1) + first_row(x.shape[-1], group)\n"
            "    mine = mine.where(x.amax(-1) == m, 2 * V)\n"
            "    return all_reduce(mine, group, dist.ReduceOp.MIN)",
         "9 is padding: V is 9"),
        (1, "def likeliest(x, group, V):\n"
            "    x = x.masked_fill(~real_columns(x, V, group), float('-inf'))\n"
            "    m = largest_logit(x, group)\n"
            "    mine = x.argmax(-1) + first_row(x.shape[-1], group)\n"
            "    mine = mine.where(x.amax(-1) == m, 0)\n"
            "    return all_reduce(mine, group, dist.ReduceOp.MAX)",
         "V = 10: "),
        (1, "def likeliest(x, group, V):\n    parts = [x.clone().contiguous()"
            " for _ in range(2)]\n"
            "    dist.all_gather(parts, x.contiguous(), group=group)\n"
            "    return torch.cat(parts, 2)[..., :V].argmax(-1)",
         "counted were 0 collectives: use the lesson's `all_reduce`"),
        (1, "def likeliest(x, group, V):\n"
            "    v, first = x.shape[-1], group.rank() * x.shape[-1]\n"
            "    whole = torch.full((*x.shape[:-1], 2 * v), float('-inf'))\n"
            "    whole[..., first : first + v] = x\n"
            "    whole = all_reduce(whole, group, dist.ReduceOp.MAX)\n"
            "    return whole[..., :V].argmax(-1)",
         "sent 6,000 bytes; 12 for each token are enough"),
        (1, "def likeliest(x, group, V):\n"
            "    return all_gather(x, 2, group)[..., :V].argmax(-1).float()",
         "its dtype is torch.float32, not torch.int64"),
        (1, "def likeliest(x, group, V):\n"
            "    return all_reduce(x.argmax(-1) + 2 * group.rank() + 6, group)",
         " is no token"),
        (2, "rows_on_a_rank = lambda V, T: -(-V // T)",
         "rows_on_a_rank gives 4: return two numbers"),
        (2, "rows_on_a_rank = lambda V, T: (V // T, V % T)",
         "rows_on_a_rank of V 9, T 2 gives (4, 1); there are (5, 1)"),
        (2, "rows_on_a_rank = lambda V, T: (-(-V // T), -V % T)\n"
            "sent_by_loss = lambda B, S, V, T: (12 * B * S, 4 * B * S * V)",
         "gives (120, 360); counted were (120, 400)"),
        (2, "sent_by_loss = lambda B, S, V, T: 12 * B * S",
         "sent_by_loss gives 36: return two numbers"),
        (3, "def log_z(x, group, V):\n"
            "    return GatherFromTP.apply(x, 2, group)[..., :V].logsumexp(-1)",
         "sent 384 bytes; 16 for each token are enough"),
        (3, "def log_z(x, group, V):\n    parts = [x.detach().contiguous()"
            " for _ in range(2)]\n"
            "    dist.all_gather(parts, x.detach().contiguous(), group=group)\n"
            "    parts[group.rank()] = x\n"
            "    return torch.cat(parts, 2)[..., :V].logsumexp(-1)",
         "counted were 0 collectives: use the lesson's functions"),
        (3, "def log_z(x, group, V):\n"
            "    x = x.masked_fill(~real_columns(x, V, group), float('-inf'))\n"
            "    m = largest_logit(x, group)\n"
            "    return m + all_reduce((x - m[..., None]).exp().sum(-1), group).log()",
         "no gradient: `all_reduce` is not known to autograd"),
        (3, "def log_z(x, group, V):\n    m = largest_logit(x.detach(), group)\n"
            "    z = (x - m[..., None]).exp().sum(-1)\n"
            "    return m + ReduceFromTP.apply(z, group).log()",
         "the value is wrong (V = 7"),
        (3, "def log_z(x, group, V):\n"
            "    x = x.masked_fill(~real_columns(x, V, group), float('-inf'))\n"
            "    return ReduceFromTP.apply(x.exp().sum(-1), group).log()",
         "the value is wrong (V = 7, logits of about 1000)"),
        (3, "def log_z(x, group, V):\n"
            "    x = x.masked_fill(~real_columns(x, V, group), float('-inf'))\n"
            "    m = largest_logit(x, group)\n"
            "    z = CopyToTP.apply((x - m[..., None]).exp().sum(-1), group)\n"
            "    return m + ReduceFromTP.apply(z, group).log()",
         "the gradient is wrong, 2.00 times as long"),
    ],
}  # fmt: skip


LIVE = {"05_3d_parallel": 4}  # ranks that stay; elsewhere 2, or as many as you like
RUN = {"05_3d_parallel": 8}  # of the first run


def exercises(name: str) -> dict[int, dict[str, str]]:
    """Number → the cell to fill in, the check, and the folded hint and solution."""
    found, number = {}, None
    for cell in NOTEBOOKS[name]["cells"]:
        text = "".join(cell["source"]).removeprefix("%%px\n")
        for tag in cell["metadata"].get("tags", []):
            if match := re.fullmatch(r"(exercise|check)-(\d)", tag):
                number = int(match[2])
                found.setdefault(number, {})[match[1]] = text
        if cell["cell_type"] == "markdown" and "<summary>Solution" in text:
            code = re.search(r"```python\n%%px\n(.*?)```", text, re.S)[1]
            hint = "<summary>Hint</summary>" in text
            found[number] |= {"solution": code, "hint": hint}
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_exercises(name, home, capsys):
    live = ranks.start(LIVE.get(name, 2), name, timeout=4)
    found = exercises(name)
    assert sorted(found) == [1, 2, 3] and all(e["hint"] for e in found.values())

    def verdict(code, number):
        live.px("", code)
        capsys.readouterr()
        live.px("", found[number]["check"])
        return capsys.readouterr().out

    for number, exercise in found.items():
        assert verdict(exercise["exercise"], number).startswith("every rank  not yet: ")
        assert verdict(exercise["solution"], number) == "every rank  right\n"
    assert {number for number, *_ in WRONG[name]} == {1, 2, 3}
    for number, code, wanted in WRONG[name]:
        said = verdict(code, number)
        assert "not yet" in said and wanted in said, (code, said)
    live.stop()


# Files


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_complete(name):
    code, text = cells(name, "code"), "\n".join(cells(name, "markdown"))
    assert code[0] == cells("00_collectives", "code")[0]  # finds the course
    command = f"!torchrun --standalone --nproc_per_node={RUN.get(name, 2)} {name}"
    assert code[1].startswith(command)
    assert any("broken(" in cell for cell in code)
    assert text.count("<summary><b>Quiz.</b>") >= 5
    assert text.count("<details>") == text.count("</details>")
    assert sum("ranks.code(" in cell for cell in code) >= 5
    longest = max((len(line), line) for cell in code for line in cell.splitlines())
    assert longest[0] <= 88, longest


def test_pictures_of_the_readme_are_the_notebooks():
    found = {}
    for book in NOTEBOOKS.values():
        for cell in book["cells"]:
            for tag in cell["metadata"].get("tags", []):
                if tag.startswith("asset-"):
                    (png,) = [o["data"]["image/png"] for o in cell["outputs"]]
                    found[f"{tag.removeprefix('asset-')}.png"] = base64.b64decode(png)
    stored = {path.name: path.read_bytes() for path in (ROOT / "assets").iterdir()}
    assert stored == found
    shown = re.findall(r"^!\[.+\]\(assets/(.+)\)$", README, re.M)
    assert sorted(shown) == sorted(stored)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_lesson_code_is_shown_and_not_retyped(name):
    lesson = jobs.load(name)
    code = "\n".join(cells(name, "code"))
    for kind, defined in re.findall(r"^(class|def) (\w+)", code, re.M):
        assert not hasattr(lesson, defined), f"{kind} {defined} stands in the lesson"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_saved_clean(name):
    book = NOTEBOOKS[name]
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    number = 0
    for cell in book["cells"]:
        assert set(cell["metadata"]) <= {"tags"}
        if cell["cell_type"] == "code":
            number += 1
            assert cell["execution_count"] == number, "run from top to bottom"
            for output in cell["outputs"]:
                good = output["output_type"] != "error"
                assert good or "raises-exception" in cell["metadata"]["tags"]
                assert not output.get("metadata")
    text = json.dumps(book)
    assert not re.search(r"/(tmp|root|home|Users|var)/|\\u001b", text)
