"""The scenes of record.py: each runs on every rank, and returns what rank 0 writes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import record_beyond
import record_schedules
import torch
import torch.distributed as dist
from recorder import Call, Recorder, WatchOps, clear, difference
from torch import Tensor, nn


def ring(lesson, group, name: str) -> dict:
    rank = group.rank()
    T = group.size()
    x = lesson.count_from(10 * rank, T, SimpleNamespace(dtype="float32", device="cpu"))
    recorder = Recorder(lesson, name)
    # First on tensors full of 2^rank: bit r says that rank r's number is in a chunk.
    bits = torch.full_like(x, 2**rank)
    sources = [bits]
    watch_ring(lesson, bits, group, sources.append)
    start = x.clone()
    start.who = sources[0].int().tolist()
    recorder.hold({"x": start})
    halves = {step["half"]: step for step in recorder.steps if "half" in step}
    recorder.steps = [step for step in recorder.steps if "half" not in step]
    clear(lesson)

    before = {}

    def on_step(values: Tensor) -> None:
        number = len(recorder.events)  # of the step that has ended, from 1 on
        half = "reduce-scatter" if number < T else "all-gather"
        now = sources[number]
        values.who = now.int().tolist()
        # Not by their values: a sum stays as it was if a 0 arrives.
        changed = now != sources[number - 1]
        comm = {"to": (rank + 1) % T, "from": (rank - 1) % T}
        comm["moved"] = changed.nonzero().flatten().tolist()
        counted = recorder.counted()
        comm["bytes"] = difference(counted, before)
        comm["sends"] = sum(comm["bytes"].values())
        step = dict(halves[half], takes="x")
        number = number if number < T else number - T + 1
        step["says"] = step["says"].replace("NUMBER", str(number))
        recorder.add("send", step, {"x": values}, comm=comm)
        before.update(counted)

    with recorder.phase("ring", ""):
        y = watch_ring(lesson, x, group, on_step)
    total = x.clone()
    dist.all_reduce(total, group=group)  # to compare with, and not counted
    assert torch.equal(recorder.held["x"], y)
    recorder.compare({"x": total})
    call = Call("ring", "", "send/recv", "tp")
    formulas = {call: "2·(T-1) × n·e/T"}
    sizes = {"T": T, "n": x.numel(), "e": 4}
    return recorder.recording(formulas, sizes, layout="ring")


def watch_ring(lesson, x: Tensor, group, on_step) -> Tensor:
    """Run the lesson's all-reduce; call on_step with all of x after each of its steps.

    A rank sends the chunk that it got in the step before. So each call of send_recv has
    the result of the last step, and what is returned has that of the very last one.
    """
    chunks = list(x.flatten().tensor_split(group.size()))
    places = []  # of the chunk that arrives in each step
    original = lesson.send_recv

    def step_has_ended(chunk: Tensor) -> None:
        chunks[places[-1]] = chunk
        on_step(torch.cat(chunks))

    def send_recv(chunk, dst, like, src, group):
        if places:
            step_has_ended(chunk)
        places.append([x.data_ptr() for x in chunks].index(like.data_ptr()))
        return original(chunk, dst, like, src, group)

    lesson.send_recv = send_recv
    y = lesson.ring_all_reduce(x, group)
    lesson.send_recv = original
    step_has_ended(y.tensor_split(group.size())[places[-1]])
    return y


def mlp(lesson, group, name: str) -> dict:
    torch.manual_seed(1715)  # the sums are right as shown, with two decimals
    full = lesson.MLP(2, 8)
    x_BSD, target_BSD = torch.randn(2, 1, 3, 2)
    recorder = Recorder(lesson, name)
    split = lesson.tp_mlp(full, group)
    alone = copy.deepcopy(full)
    x = x_BSD.clone().requires_grad_()
    x_alone = x_BSD.clone().requires_grad_()
    recorder.watch(split, "up_proj", "down_proj")
    held = {"x_BSD": x, "W₁_Df": split.up_proj.weight.T, "b₁_f": split.up_proj.bias}
    held["W₂_fD"] = split.down_proj.weight.T
    held["b₂_D"] = split.down_proj.bias
    held["b₁_f"].under = "W₁_Df"
    held["b₂_D"].under = "W₂_fD"
    recorder.hold(held)
    for part in ("up_proj", "down_proj"):
        weight = split.get_parameter(f"{part}.weight")
        weight.register_hook(
            lambda grad, part=part: recorder.see(f"grad {part} weight", grad)
        )
    with recorder:
        with recorder.phase("Megatron", "forward"):
            loss = lesson.squared_error(split(x), target_BSD)
        with recorder.phase("Megatron", "backward"):
            loss.backward()
    recorder.play()
    assert torch.equal(recorder.held["dL/dx_BSD"], x.grad)
    lesson.squared_error(alone(x_alone), target_BSD).backward()
    up = lesson.shard(alone.up_proj.weight.grad, 0, group)
    down = lesson.shard(alone.down_proj.weight.grad, 1, group)
    recorder.compare(
        {"dL/dx_BSD": x_alone.grad, "dL/dW₁_Df": up.T, "dL/dW₂_fD": down.T}
    )
    formulas = {}
    for phase in ("forward", "backward"):
        formulas[Call("Megatron", phase, "all-reduce", "tp")] = "1 × B·S·D·e"
    about = {"bug": BUGS[name]} if name in BUGS else {}
    return recorder.recording(formulas, {"B": 1, "S": 3, "D": 2, "e": 4}, **about)


def attention(lesson, group, name: str) -> dict:
    config = lesson.Config(7, 4, heads=2, kv_heads=2, layers=1, seq_len=3, dropout=0.0)
    layer, tables = layer_and_tables(lesson, config)
    alone = copy.deepcopy(layer).self_attn
    lesson.parallelize_layer(layer, group)
    x_BSD, upstream_BSD = torch.randn(2, 1, 3, 4)
    x = x_BSD.clone().requires_grad_()
    x_alone = x_BSD.clone().requires_grad_()
    split = layer.self_attn
    recorder = Recorder(lesson, name)
    recorder.watch(split, "q_proj", "k_proj", "v_proj", "core.dropout", "o_proj")
    held = {"x_BSD": x}
    for title in ("W_q_Dd", "W_k_Dd", "W_v_Dd", "W_o_dD"):
        weight = split.get_parameter(f"{title[2]}_proj.weight").T
        weight.closed = True
        held[title] = weight
    recorder.hold(held)
    with recorder:
        with recorder.phase("with TP", "forward"):
            y = split(x, tables)
        with recorder.phase("with TP", "backward"):
            y.backward(upstream_BSD)
    recorder.play()
    alone(x_alone, tables).backward(upstream_BSD)
    recorder.compare({"dL/dx_BSD": x_alone.grad})
    formulas = {}
    for phase in ("forward", "backward"):
        formulas[Call("with TP", phase, "all-reduce", "tp")] = "1 × B·S·D·e"
    sizes = {"B": 1, "S": 3, "D": 4, "e": 4}
    return recorder.recording(formulas, sizes, layout="brief")


def layer_and_tables(lesson, config) -> tuple:
    """One decoder layer, and what it takes from its model: rotary tables and mask."""
    cos, sin = lesson.rotary_table(config.seq_len, config.hidden // config.heads)
    future = torch.ones(config.seq_len, config.seq_len, dtype=torch.bool).triu(1)
    return lesson.DecoderLayer(config), (cos, sin, future)


def vocab_loss(lesson, group, name: str) -> dict:
    V = 7
    v = -(-V // group.size())
    targets_BS = torch.tensor([[1, 6, 3]])
    logits_BSV = torch.randn(1, 3, V) * 2
    padded = nn.functional.pad(logits_BSV, (0, v * group.size() - V))
    local = lesson.shard(padded, 2, group).requires_grad_()
    tokens = range(group.rank() * v, group.rank() * v + v)
    local.columns = [str(token) if token < V else "–" for token in tokens]
    wanted = zip(range(3), targets_BS[0].tolist())
    local.marked = [s * v + t - tokens[0] for s, t in wanted if t in tokens]
    recorder = Recorder(lesson, name)
    recorder.hold({"logits_BSv": local, "target_BS": targets_BS})
    with recorder, WatchOps(recorder, "masked_fill", "sub", "exp"):
        with recorder.phase("with TP", "loss"):
            loss = lesson.vocab_parallel_cross_entropy(local, targets_BS, group, V)
        recorder.see("loss", loss)
        with recorder.phase("with TP", "backward"):
            lesson.mean_over_targets(loss, targets_BS).backward()
    recorder.see("grad logits", local.grad)
    for seen in recorder.seen:
        if seen.value is not None and seen.value.shape == local.shape:
            seen.value.columns = local.columns
            seen.value.marked = local.marked
    recorder.play()
    alone = logits_BSV.clone().requires_grad_()
    loss_BS = nn.functional.cross_entropy(alone.mT, targets_BS, reduction="none")
    loss_BS.mean().backward()
    grad = nn.functional.pad(alone.grad, (0, v * group.size() - V))
    expected = {"loss_BS": loss_BS.detach()}
    expected["dL/dlogits_BSv"] = lesson.shard(grad, 2, group)
    recorder.compare(expected)
    call = Call("with TP", "loss", "all-reduce", "tp")
    return recorder.recording({call: "3 × B·S·e"}, {"B": 1, "S": 3, "e": 4})


def sp_layer(lesson, group, name: str) -> dict:
    config = lesson.Config(7, 4, heads=2, kv_heads=2, layers=1, seq_len=4, dropout=0.0)
    layer, tables = layer_and_tables(lesson, config)
    alone = copy.deepcopy(layer)
    lesson.parallelize_layer(layer, group)
    lesson.split_sequence(layer, group)
    x_BSD, upstream_BSD = torch.randn(2, 1, 4, 4)
    x_BsD = lesson.shard(x_BSD, 1, group).requires_grad_()
    recorder = Recorder(lesson, name)
    recorder.watch(layer, "input_layernorm", "post_attention_layernorm", "")
    recorder.watch(layer, "self_attn.core", "self_attn.o_proj", "mlp.down_proj")
    recorder.hold({"x_BsD": x_BsD})
    with recorder:
        with recorder.phase("TP + SP", "forward"):
            out_BsD = layer(x_BsD, tables)
        with recorder.phase("TP + SP", "backward"):
            out_BsD.backward(lesson.shard(upstream_BSD, 1, group))
        recorder.see("grad x", x_BsD.grad)
        with recorder.phase("TP + SP", "summing"):
            lesson.all_reduce_replicated_gradients(layer, group)
    recorder.play()
    x_alone = x_BSD.clone().requires_grad_()
    alone(x_alone, tables).backward(upstream_BSD)
    full = []
    for part, p in layer.named_parameters():
        if getattr(p, "sharding", None) is None:
            full.append(alone.get_parameter(part).grad.flatten())
    expected = {"grads_of_norms_and_biases": torch.cat(full)}
    expected["dL/dx_BsD"] = lesson.shard(x_alone.grad, 1, group)
    recorder.compare(expected)
    formulas = {}
    for phase, collective, formula in (
        ("forward", "all-gather", "2 × B·S·D·e"),
        ("forward", "reduce-scatter", "2 × B·S·D·e"),
        ("backward", "all-gather", "4 × B·S·D·e"),
        ("backward", "reduce-scatter", "2 × B·S·D·e"),
        ("summing", "all-reduce", "1 × 6·D·e"),
    ):
        formulas[Call("TP + SP", phase, collective, "tp")] = formula
    sizes = {"B": 1, "S": 4, "D": 4, "e": 4}
    return recorder.recording(formulas, sizes, layout="brief")


LINES = "send", "to", "one", "bubble", "stage", "two", "wait", "I"


def batch(lesson, _group, name: str) -> dict:
    """Four ranks: two replicas of two TP ranks each."""
    groups = lesson.make_mesh(dict(pp=1, dp=2, tp=2), 60)
    args = SimpleNamespace(microbatches=2, ragged=True, device="cpu")
    rows = torch.full((len(LINES), 9), lesson.PAD)
    for row, line in zip(rows, LINES):
        row[: len(line)] = torch.tensor(list(line.encode()))
    tokens = rows[:, :-1].clone()
    target = rows[:, 1:].clone()
    target = target.masked_fill(target == lesson.PAD, lesson.IGNORE)
    recorder = Recorder(lesson, name)
    loaded = {}
    if groups["tp"].rank() == 0:
        parts = lesson.make_microbatches((tokens, target), groups, 2, ragged=True)
        loaded = {f"micro_batch_{i}": part for i, part in enumerate(parts, 1)}
    recorder.hold(loaded)
    with recorder, recorder.phase("mesh", "batch"):
        micro_batches = lesson.broadcast_batch((tokens, target), groups, args)
        lesson.count_targets(micro_batches, groups["dp"])
    recorder.play()
    recorder.compare({"all_targets": (target != lesson.IGNORE).sum()})
    formulas = {}
    for phase, collective, axis, formula in (
        # M shapes and M micro-batches: 2·M calls, half of them of either size.
        ("batch", "broadcast", "tp", "2·M × (24 + 2·8·n/M)/2"),
        ("batch", "all-reduce", "dp", "1 × 8"),
    ):
        formulas[Call("mesh", phase, collective, axis)] = formula
    sizes = {"M": 2, "n": sum(part[0].numel() for part in micro_batches)}
    return recorder.recording(formulas, sizes, groups={"tp": 2, "dp": 2})


def wrong_gradient(lesson, group, name: str) -> dict:
    """Lesson 04 with the bug norms: compare piece by piece until one is wrong."""
    config = lesson.Config(7, 4, heads=2, kv_heads=2, layers=1, seq_len=4, dropout=0.0)
    layer, tables = layer_and_tables(lesson, config)
    alone = copy.deepcopy(layer)
    lesson.parallelize_layer(layer, group)
    lesson.split_sequence(layer, group)
    x_BSD, upstream_BSD = torch.randn(2, 1, 4, 4)
    x_alone = x_BSD.clone().requires_grad_()
    y_alone = alone(x_alone, tables)
    y_alone.backward(upstream_BSD)
    x_BsD = lesson.shard(x_BSD, 1, group).requires_grad_()
    recorder = Recorder(lesson, name)
    recorder.hold({"x_BsD": x_BsD})
    y_BsD = layer(x_BsD, tables)
    y_BsD.backward(lesson.shard(upstream_BSD, 1, group))
    lesson.all_reduce_replicated_gradients(layer, group)
    clear(lesson)  # what training sends is not the subject: the search is
    found = {"y_BsD": y_BsD.detach(), "dL/dx_BsD": x_BsD.grad}
    expected = {"y_BsD": lesson.shard(y_alone.detach(), 1, group)}
    expected["dL/dx_BsD"] = lesson.shard(x_alone.grad, 1, group)
    for title, part, dim in (
        ("dL/dW_o_Dd", "self_attn.o_proj.weight", 1),
        ("dL/dlayernorm_D", "input_layernorm.weight", None),
    ):
        found[title] = layer.get_parameter(part).grad
        full = alone.get_parameter(part).grad
        expected[title] = full if dim is None else lesson.shard(full, dim, group)
    for title, value in found.items():
        recorder.check({title: expected[title]}, **{title: value})
    norm = list(found)[-1]
    with recorder, recorder.phase("search", ""):
        lesson.all_reduce(found[norm], group)
    recorder.play()
    recorder.compare({f"sum_of_{norm}": expected[norm]})
    call = Call("search", "", "all-reduce", "tp")
    return recorder.recording({call: "1 × D·e"}, {"D": 4, "e": 4}, bug=BUGS[name])


def context_ring(lesson, group, name: str) -> dict:
    return context(lesson, name, "contiguous")


def context_zigzag(lesson, group, name: str) -> dict:
    return context(lesson, name, "zigzag")


def context(lesson, name: str, layout: str) -> dict:
    """Attention of lesson 11's ring, forward: one head with one element, S = 2·T."""
    T = dist.get_world_size()
    S = 2 * T
    lesson00 = lesson.lesson00
    group = lesson00.mesh_groups({"cp": T}, 60)["cp"]
    rank = group.rank()
    q_full = torch.randint(-2, 3, (1, 1, S, 1)).float()  # short to write
    kv_full = torch.randint(-3, 4, (2, 1, 1, S, 1)).float()
    positions = [lesson.positions_of(r, T, layout, S) for r in range(T)]
    here = positions[rank]
    recorder = Recorder(lesson00, name)
    watched = WatchRing(recorder, lesson, group, positions)
    q_Bs = q_full[:, :, here]
    kv = kv_full[:, :, :, here]
    recorder.hold({"q_s": watched.queries(q_Bs), "kv_2s": watched.keys(kv, rank)})
    with recorder.phase("ring", "forward"), watched:
        y = lesson.RingFunction.apply(q_Bs, kv, group, layout)
    watched.computed()
    recorder.steps = [step for step in recorder.steps if "kind" not in step]
    assert torch.equal(recorder.held["y_s"].flatten(), y.flatten())
    everywhere = torch.arange(S)
    scores = lesson.masked_scores(q_full, kv_full[0], everywhere, everywhere)
    expected = (scores.softmax(-1) @ kv_full[1]).flatten()[here]
    recorder.compare({"y_s": expected})
    call = Call("ring", "forward", "send/recv", "cp")
    formulas = {call: "(C-1) × 2·B·s·K·H·e"}
    sizes = {"C": T, "B": 1, "s": S // T, "K": 1, "H": 1, "e": 4}
    return recorder.recording(formulas, sizes, layout="ring wide")


class WatchRing:
    """Notes what lesson 11's ring computes, and what it passes on."""

    def __init__(self, recorder: Recorder, lesson, group, positions: list[Tensor]):
        self.recorder = recorder
        self.lesson = lesson
        self.group = group
        self.positions = positions
        self.here = positions[group.rank()].tolist()
        self.owner = group.rank()  # whose keys are here
        self.mine = 2 ** group.rank()
        self.captions = {s["kind"]: s for s in recorder.steps if "kind" in s}
        S = sum(len(of_rank) for of_rank in positions)
        self.scores = [""] * (len(self.here) * S)
        self.fresh = []
        self.received = None
        self.y = torch.zeros(len(self.here))

    def __enter__(self):
        names = ("masked_scores", "attend", "merge", "pass_on")
        self.originals = {name: getattr(self.lesson, name) for name in names}
        for name in names:
            setattr(self.lesson, name, getattr(self, name))

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(self.lesson, name, original)

    def queries(self, q: Tensor) -> Tensor:
        shown = q.flatten().clone()
        shown.columns = [str(position) for position in self.here]
        shown.who = self.mine  # also if another rank has the same numbers
        return shown

    def keys(self, kv: Tensor, owner: int) -> Tensor:
        """Keys in the first row, values in the second, and whose they are."""
        shown = kv.reshape(2, -1).clone()
        shown.columns = [str(position) for position in self.positions[owner].tolist()]
        shown.rows = ["k", "v"]
        shown.who = [2**owner] * shown.numel()
        return shown

    def masked_scores(self, q, k, query_at: Tensor, key_at: Tensor) -> Tensor:
        scores = self.originals["masked_scores"](q, k, query_at, key_at)
        S = len(self.scores) // len(self.here)
        for row, query in enumerate(query_at.tolist()):
            for column, key in enumerate(key_at.tolist()):
                if key > query:  # masked
                    continue
                place = self.here.index(query) * S + key
                self.scores[place] = scores[0, 0, row, column].item()
                self.fresh.append(place)
        return scores

    def attend(self, q, kv, block):
        self.block = block
        return self.originals["attend"](q, kv, block)

    def merge(self, *parts):
        y, lse = self.originals["merge"](*parts)
        self.y[self.block.queries] = y.flatten()
        return y, lse

    def computed(self) -> None:
        """A step: the scores so far, and y of the keys so far."""
        S = len(self.scores) // len(self.here)
        shown = torch.zeros(len(self.here), S)
        shown.values = list(self.scores)
        shown.columns = [str(position) for position in range(S)]
        shown.marked = list(self.fresh)
        self.fresh.clear()
        y = self.y.clone()
        y.under = "q_s"
        shown.who = self.mine
        y.who = self.mine
        step = dict(self.captions["compute"])
        makes = {"scores_sS": shown, "y_s": y}
        if self.received is not None:
            makes["kv_2s"] = self.received
            step["drops"] = "next_kv_2s"
        self.recorder.add("compute", step, makes)

    def pass_on(self, kv: Tensor, group) -> Tensor:
        self.computed()
        before = self.recorder.counted()
        received = self.originals["pass_on"](kv, group)
        T = group.size()
        self.owner = (self.owner - 1) % T
        comm = {"to": (group.rank() + 1) % T, "from": (group.rank() - 1) % T}
        comm["moved"] = list(range(kv.numel()))
        comm["bytes"] = difference(self.recorder.counted(), before)
        comm["sends"] = sum(comm["bytes"].values())
        step = dict(self.captions["send"], takes="kv_2s")
        self.received = self.keys(received, self.owner)
        self.recorder.add("send", step, {"next_kv_2s": self.received}, comm=comm)
        return received


SCHEDULES = {  # scene → which schedules, and how many micro-batches
    "schedules": (["gpipe", "1f1b"], 8),
    "schedules-2": (["interleaved", "zero-bubble"], 4),
}


def schedules(lesson, group, name: str) -> dict:
    recorder = Recorder(lesson.lesson00, name)
    kinds, micro_batches = SCHEDULES[name]
    return record_schedules.record(lesson, group, recorder, kinds, micro_batches)


BUGS = {"mlp-break-f": "f", "wrong-gradient": "norms"}  # scene → bug of its lesson
SCENES = {  # name → ranks, the lesson, the scene
    "ring-2": (2, "00_collectives", ring),
    "ring": (4, "00_collectives", ring),
    "ring-8": (8, "00_collectives", ring),
    "mlp": (2, "01_naive_mlp_tp", mlp),
    "mlp-break-f": (2, "01_naive_mlp_tp", mlp),
    "attention": (2, "02_transformer_tp", attention),
    "vocab-loss": (2, "03_vocab_parallel", vocab_loss),
    "sp-layer": (2, "04_sequence_parallel", sp_layer),
    "wrong-gradient": (2, "04_sequence_parallel", wrong_gradient),
    "schedules": (4, "14_schedules", schedules),
    "schedules-2": (4, "14_schedules", schedules),
    "mesh-2d": (4, "13_mesh_2d", record_beyond.mesh_2d),
    "experts": (2, "16_expert_parallel", record_beyond.experts),
    "batch": (4, "05_3d_parallel", batch),
    "context-ring": (4, "11_context_parallel", context_ring),
    "context-zigzag": (4, "11_context_parallel", context_zigzag),
}
