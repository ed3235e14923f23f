"""The scenes of record.py that run scripts 13 and 16: a 2D mesh, and experts."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from recorder import Call, Recorder, WatchOps, difference, gather_objects
from torch import Tensor, nn


def mesh_2d(script, _group, name: str) -> dict:
    """One linear of script 13 on outer × inner = 2 × 2, forward and backward."""
    lesson = script.lesson00
    groups = lesson.mesh_groups(dict(outer=2, inner=2), 60)
    outer, inner = groups.values()
    torch.manual_seed(1812)  # no two ranks have equal tensors
    full = nn.Linear(4, 4, bias=False)  # small integers: short to write
    full.weight.data = torch.randint(-2, 3, (4, 4)).float()
    h_BSF, upstream_BSD = torch.randint(-2, 4, (2, 2, 1, 4)).float()
    alone = copy.deepcopy(full)
    place = lambda x: script.shard_2d(x, (0, outer), (2, inner))
    h = place(h_BSF)
    layer = script.DownLinear2D(full, outer, inner)
    recorder = Recorder(lesson, name, script.lesson01)
    recorder.watch(layer, "")
    recorder.hold({"h_bSf": h, "W_fd": layer.weight.T})
    with recorder:
        with recorder.phase("2D", "forward"):
            y = layer(h)
        with recorder.phase("2D", "backward"):
            y.backward(place(upstream_BSD).detach())
    # GatheredMatmul.backward computes dL/dh first; hooks see it when all is done.
    labels = [seen.label for seen in recorder.seen]
    of_h = recorder.seen.pop(labels.index("grad module in"))
    recorder.seen.insert(len(recorder.seen) - 2, of_h)
    recorder.play()
    h_alone = h_BSF.clone().requires_grad_()
    alone(h_alone).backward(upstream_BSD)
    over = {axis: 0 for axis in groups}
    for (*_, axis), payloads in lesson.METER.calls.items():
        over[axis] += sum(payloads)
    recorder.steps[0]["says"] = recorder.steps[0]["says"].format(**over)
    of_w = script.shard_2d(alone.weight.grad, (1, inner), (0, outer))
    recorder.compare({"dL/dh_bSf": place(h_alone.grad), "dL/dW_fd": of_w.T})
    formulas = {}
    for phase, collective, axis, formula in (
        ("forward", "all-gather", "outer", "1 × D·F·e/inner"),
        ("forward", "reduce-scatter", "inner", "1 × B·S·D·e/outer"),
        ("backward", "all-gather", "inner", "1 × B·S·D·e/outer"),
        ("backward", "all-gather", "outer", "1 × D·F·e/inner"),
        ("backward", "reduce-scatter", "outer", "1 × D·F·e/inner"),
    ):
        formulas[Call("2D", phase, collective, axis)] = formula
    sizes = {"B": 2, "S": 1, "D": 4, "F": 4, "e": 4, "outer": 2, "inner": 2}
    at = f"outer {outer.rank()}, inner {inner.rank()}"
    about = {"layout": "mesh wide", "at": gather_objects(at)}
    return recorder.recording(formulas, sizes, groups={"outer": 2, "inner": 2}, **about)


def experts(script, group, name: str) -> dict:
    """A mixture of experts of script 16: two tokens per rank, k = 2 of four experts."""
    lesson = script.lesson00
    R, E, k, t, D = group.size(), 4, 2, 2, 2
    rank = group.rank()
    groups = lesson.mesh_groups(dict(dp=1, ep=R, tp=1), 60)
    torch.manual_seed(58)  # experts (0, 1), (0, 3) and (0, 3), (1, 2)
    full = script.MoE(script.lesson01.MLP(D, 2), E, k)
    x_BSD, upstream_BSD = torch.randn(2, R, t, D)
    alone = copy.deepcopy(full)
    moe = script.ep_moe(full, groups)
    moe.batch_groups = ()  # no balance loss here, so no sums of counts for it
    x = lesson.shard(x_BSD, 0, groups["ep"]).requires_grad_()
    recorder = Recorder(lesson, name)
    recorder.only_leaving = ("forward", "backward")
    watched = WatchRows(recorder, script, groups["ep"])
    owned = torch.arange(E)[rank * E // R : (rank + 1) * E // R]
    recorder.hold({"x_tD": watched.tagged(x[0], [], [2**rank] * t), "experts": owned})
    with watched, recorder, script.CountLeaving() as leaving:
        recorder.counted_otherwise = leaving.calls
        with recorder.phase("EP", "forward"), WatchOps(recorder, "div", "sum"):
            y = moe(x)
        with recorder.phase("EP", "backward"):
            y.backward(lesson.shard(upstream_BSD, 0, groups["ep"]))
    recorder.seen = [seen for seen in recorder.seen if is_shown(seen, t, D)]
    (i,) = [i for i, seen in enumerate(recorder.seen) if seen.label == "all-to-all"]
    arriving = recorder.seen[i].value.view(R, E // R)
    arriving.rows = [f"r{r}" for r in range(R)]
    arriving.columns = [f"e{expert}" for expert in owned.tolist()]
    arriving.who = [2**r for r in range(R) for _ in owned]
    recorder.seen[i] = recorder.seen[i]._replace(value=arriving)
    told = watched.told()
    for step in recorder.steps:
        step["says"] = step["says"].format(**told)
    recorder.play()
    x_alone = x_BSD.clone().requires_grad_()
    alone(x_alone).backward(upstream_BSD)
    expected = {"dL/dx_tD": x_alone.grad[rank]}
    expected["dL/dW_up_eFD"] = lesson.shard(alone.experts.up_proj.grad, 0, groups["ep"])
    found = {"dL/dx_tD": x.grad[0], "dL/dW_up_eFD": moe.experts.up_proj.grad}
    recorder.check(expected, **found)
    assert not recorder.steps
    formulas = {
        Call("EP", "counts", "all-to-all", "ep"): "1 × 8·E",
        Call("EP", "forward", "all-to-all", "ep"): "2 × m·D·e",
        Call("EP", "backward", "all-to-all", "ep"): "2 × m·D·e",
    }
    sizes = {"E": E, "D": D, "e": 4, "m": watched.leaving / 2}
    return recorder.recording(formulas, sizes, layout="rows")


def is_shown(seen, t: int, D: int) -> bool:
    """Of all divisions and sums: the weights [t, k] and y [t, D] only."""
    return not seen.label.startswith("op ") or seen.value.shape == (t, D)


class WatchRows:
    """Notes what script 16 does with rows: whose token each is, for which expert."""

    def __init__(self, recorder: Recorder, script, group):
        self.recorder = recorder
        self.script = script
        self.lesson = script.lesson00
        self.group = group
        self.mine = 2 ** group.rank()
        self.calls = 0
        self.sent = []  # rows from each rank to each, as they went to the experts
        self.leaving = 0  # rows that leave this rank in forward

    def __enter__(self):
        names = ("sort_by_expert", "undo_sort", "all_to_all_rows")
        self.originals = [(self.script, name) for name in names]
        self.originals += [
            (self.script.Experts, "forward"),
            (self.lesson, "all_to_all"),
        ]
        self.originals = [(*at, getattr(*at)) for at in self.originals]
        for at, name, original in self.originals:
            watching = getattr(self, name)
            wrapped = lambda *args, f=watching, g=original: f(g, *args)
            setattr(at, name, wrapped)

    def __exit__(self, *_):
        for at, name, original in self.originals:
            setattr(at, name, original)

    def tagged(self, rows: Tensor, experts: list, who: list) -> Tensor:
        """Rows with the experts that they are for, and the ranks of their tokens."""
        shown = rows.detach().clone()
        if experts:
            shown.rows = [f"e{expert}" for expert in experts]
        shown.who = [r for r in who for _ in range(rows.shape[1])]
        return shown

    def see(self, label: str, rows: Tensor, tags: list, **comm) -> None:
        self.recorder.see(label, rows, **comm)
        shown = self.tagged(rows, *map(list, zip(*tags)))
        self.recorder.seen[-1] = self.recorder.seen[-1]._replace(value=shown)

    def sort_by_expert(self, original, x_tD, expert_tk, experts):
        self.recorder.see("chosen", expert_tk)
        rows, counts, order = original(x_tD, expert_tk, experts)
        chosen = expert_tk.flatten()[order].tolist()
        self.tags = [(expert, self.mine) for expert in chosen]
        self.see("rows", rows, self.tags)
        self.recorder.see("counts", counts)
        self.recorder.seen[-1].value.columns = [f"e{e}" for e in range(experts)]
        return rows, counts, order

    def all_to_all(self, original, counts: Tensor, group) -> Tensor:
        """Of the counts; a phase of its own in the table of bytes."""
        before = self.lesson.METER.label
        self.lesson.METER.label = "EP", "counts"
        counts = original(counts, group)
        self.lesson.METER.label = before
        return counts

    def all_to_all_rows(self, original, x, send, recv, group) -> Tensor:
        to_experts = self.calls % 2 == 0  # backward goes the same two ways
        if self.calls == 0:
            everyone = gather_objects((self.tags, send))
            self.sent = [splits for _, splits in everyone]
            self.arrived = []
            for tags, splits in everyone:
                begin = sum(splits[: group.rank()])
                self.arrived += tags[begin : begin + splits[group.rank()]]
        self.calls += 1
        before, after = self.tags, self.arrived
        if not to_experts:
            before, after = after, before
        counted = self.recorder.counted()
        self.see("exchange given", x, before)
        result = original(x, send, recv, group)
        sent = difference(self.recorder.counted(), counted)
        comm = {"bytes": sent, "sends": sum(sent.values()), "splits": send}
        if self.calls <= 2:
            self.leaving += len(x) - send[group.rank()]
        comm["call"] = {"collective": "all-to-all", "axis": group.group_desc}
        comm["call"].update(phase=self.lesson.METER.label[1], uneven=True)
        comm["group"] = dist.get_process_group_ranks(group)
        self.see("exchange", result, after, **comm)
        return result

    def forward(self, original, module, rows, counts):
        by_expert = sorted(self.arrived, key=lambda tag: tag[0])
        self.see("experts in", rows, by_expert)
        return original(module, rows, counts)

    def undo_sort(self, original, sorted_rD, order):
        rows = original(sorted_rD, order)
        if self.calls == 1:  # on the rank of the experts
            self.see("experts out", rows, self.arrived)
        return rows

    def told(self) -> dict:
        """Numbers of the captions."""
        (to_itself, away), (comes, _) = self.sent
        told = {"away": away, "comes": comes, "rows": to_itself + away}
        for rank in (0, 1):
            told[f"got_{rank}"] = sum(splits[rank] for splits in self.sent)
        return told
