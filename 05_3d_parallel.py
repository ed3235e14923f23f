"""Lesson 05: data × pipeline × tensor parallelism, on one mesh of ranks.

Three ways to spread a model, at right angles to each other: tensor parallelism (TP)
cuts every matrix, a pipeline (PP) cuts the stack of layers into stages, data
parallelism (DP) cuts the batch. A rank has a place on each of the three axes.

Run it (1, 2, 3, 4 and 6 ranks work too; sizes follow the mesh):

    torchrun --standalone --nproc_per_node=8 05_3d_parallel.py

What you will see: who is where; training beside one process; what each rank holds; when
a stage computes and waits; what each axis sends, to the byte; the same by PyTorch.

Try: --pp 4 --schedule gpipe --microbatches 16; --zero (AdamW's moments are sharded),
--ragged (padding is cut off), --tie; --recompute, --bf16 (by PyTorch); --save ck
--steps 2, then --load ck --steps 4 on another mesh; nn.RMSNorm in DecoderLayer.

How to read this file: in two sittings, up to Checkpoints and from there. NEW is the
lesson, RUN what it prints, BREAK IT are bugs (--break list). Short of time? Read
schedule, Pipeline and MeshTraining. Which mesh? tools/plan.py predicts it.

Shapes: B batch, S sequence, D hidden, V vocabulary, L layers; P stages, DP replicas, T
    ranks in a TP group, M micro-batches. UPPERCASE is full size, lowercase a slice:
    x_bsD is a micro-batch of b sequences, s = S/T tokens of each. x → y: input, output.
    Replicate(): every rank holds it, Shard(dim): it is cut, Partial(): terms of a sum.
No dropout: for masks as in one process, random numbers would have to belong to a step,
    a layer and a row, not to a rank. Large systems let them differ.
Sources: Megatron-LM, arXiv:2104.04473 (3D, 1F1B, bubbles); GPipe, arXiv:1811.06965;
    ZeRO, arXiv:1910.02054; docs.pytorch.org, torch.distributed.pipelining.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import shutil
import tempfile
import zlib
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# ==== NEW in 05: data × pipeline × tensor parallelism

# From earlier lessons: COMM counts what is sent, and notes where this rank waits (00);
# p.shardings says how a parameter was cut, ((dim, group), …), if it was (01); PAD is the
# token of padding, IGNORE its target (02); p.rows are a vocabulary's own rows (03);
# sp_transformer is the model edited: heads, columns, vocabulary and sequence cut over
# the TP group, and all_reduce_replicated_gradients has to follow its backward (04).


def make_mesh(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of {"pp": P, "dp": DP, "tp": T}, and two more.

    Rank = (stage · DP + replica) · T + tp_rank: a TP group has neighbours, on the
    fastest links. "pp_backward" is "pp" again, for gradients: NCCL does the messages of a
    group in turn, and an activation whose receiver is busy would hold up the gradient
    behind it. "embedding": first and last stage, for a tied weight. Both count as pp.
    """
    groups = mesh_groups(sizes, timeout)
    lines = torch.arange(dist.get_world_size()).view(sizes["pp"], -1).T.tolist()
    ends = [sorted({line[0], line[-1]}) for line in lines]
    for name, ranks in (("pp_backward", lines), ("embedding", ends)):
        groups[name], _ = dist.new_subgroups_by_enumeration(
            ranks, timeout=timedelta(seconds=timeout), group_desc="pp"
        )
    return groups


def slice_stage(model: Transformer, stage: int, num_stages: int) -> Transformer:
    """Drop from a model what other stages have: its forward is then that of a stage.

    The first ones may have a layer more. The slowest stage sets the pace: large systems
    give those with embedding and head fewer layers.
    Shapes: tokens [b, S] on the first stage, else x_bsD [b, S/T, D] of the stage before
        → logits [b, S, v] on the last stage, else x_bsD for the next.
    """
    mine = torch.arange(len(model.layers)).tensor_split(num_stages)[stage]
    model.layers = nn.ModuleList(model.layers[i] for i in mine)
    if stage > 0:
        model.embed_tokens = nn.Identity()
    if stage < num_stages - 1:
        model.norm, model.lm_head = nn.Identity(), nn.Identity()
    return model


def schedule(kind: str, stage: int, num_stages: int, num_microbatches: int) -> list:
    """What a stage does, in order: [("forward", 0), …, ("backward", 0), …].

    "gpipe": all forwards, then all backwards: every micro-batch's activations are kept
    at the same time (arXiv:1811.06965). "1f1b": as many forwards as there are stages to
    follow, then one forward, one backward in turn, then the backwards that are left: a
    stage keeps P − stage micro-batches at most (arXiv:2104.04473, sec. 2.2). In both a
    stage waits for P − 1 micro-batches while the pipeline fills and drains: the bubble.
    """
    P, M = num_stages, num_microbatches
    warm_up = M if kind == "gpipe" else min(P - stage - 1, M)
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(M - warm_up):
        steps += [("forward", warm_up + i), ("backward", i)]
    return steps + [("backward", i) for i in range(M - warm_up, M)]


# ---- Running it: messages between stages, micro-batches, sums, the optimizer


def send(x: Tensor, to: int, group: dist.ProcessGroup) -> tuple:
    """Start sending to stage `to`; wait_for waits for it. A send ends when its receiver
    is there: if two neighbours both waited here, neither would come (--break order)."""
    x = x.detach().contiguous()
    COMM.count("send/recv", x.nbytes, group.group_desc)
    work = dist.isend(x, group=group, group_dst=to)
    ranks = [dist.get_rank(), dist.get_global_rank(group, to)]
    return work, ranks, x  # x must live until it is received


def wait_for(messages: list[tuple]) -> None:
    """Wait until messages have been received."""
    for work, ranks, _ in messages:
        with COMM.meet("message", ranks):
            work.wait()


def receive(out: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Wait for a tensor from stage `source`, which is written into `out`."""
    with COMM.meet("message", [dist.get_global_rank(group, source), dist.get_rank()]):
        dist.recv(out, group=group, group_src=source)
    return out


class Pipeline:
    """Runs a stage's list of steps: receive, compute, send; and notes when.
    Communication: a micro-batch takes b·s·D elements to the next stage, with the shape
    ahead of them (3 int64), and b·s·D elements back."""

    def __init__(self, stage: nn.Module, loss_of, groups):
        self.stage, self.loss_of, self.rank = stage, loss_of, groups["pp"].rank()
        self.pp, self.back = groups["pp"], groups["pp_backward"]
        self.first, self.last = self.rank == 0, self.rank == self.pp.size() - 1
        self.like = next(stage.parameters())  # tensors are of its dtype, on its device

    def run(self, steps: list[tuple[str, int]], micro_batches: list) -> Tensor:
        """All steps; the sum of the micro-batch losses (0 except on the last stage)."""
        self.micro_batches, self.loss = micro_batches, self.like.new_zeros(())
        self.in_flight, self.pending_sends, self.events = {}, [], []
        for phase, i in steps:
            COMM.phase = phase
            if phase == "forward":
                self.forward(i)
            else:
                self.backward(i)
        wait_for(self.pending_sends)
        COMM.phase = ""
        return self.loss

    def forward(self, i: int) -> None:
        """Micro-batch i through this stage, and on to the next."""
        x, target = self.micro_batches[i]
        if not self.first:  # it cannot know how long they are: the shape comes first
            shape = self.like.new_empty(3, dtype=torch.int64)
            shape = receive(shape, self.rank - 1, self.pp).tolist()
            x = receive(self.like.new_empty(shape), self.rank - 1, self.pp)
            x.requires_grad_()
        with self.record_event("forward", i):
            y = self.stage(x)
            if self.last:
                y = self.loss_of(y, target)
                self.loss = self.loss + y.detach()
        sent = []
        if not self.last:
            shape = torch.tensor(y.shape, device=y.device)
            sent = [send(part, self.rank + 1, self.pp) for part in (shape, y)]
        self.in_flight[i] = x, y, sent  # with all that autograd keeps for backward

    def backward(self, i: int) -> None:
        """The gradient of micro-batch i through this stage, and to the one before."""
        (x, y, sent), grad = self.in_flight.pop(i), None
        if not self.last:
            grad = receive(torch.empty_like(y), self.rank + 1, self.back)
            wait_for(sent)  # not long: the gradient is the answer to it
        with self.record_event("backward", i):
            y.backward(grad)
        if not self.first:
            self.pending_sends.append(send(x.grad, self.rank - 1, self.back))

    @contextmanager
    def record_event(self, what: str, i: int):
        """Note when this stage computed, and the bytes that autograd keeps of it."""
        event = {"what": what, "microbatch": i, "start": time.time()}
        saved = SavedBytes([*self.stage.parameters(), *self.stage.buffers()])
        with saved:
            yield
        if self.like.is_cuda:
            torch.cuda.synchronize()
        self.events.append(event | {"end": time.time(), "bytes": saved.total()})


def make_microbatches(
    batch: tuple, groups, num_microbatches: int, ragged: bool
) -> list:
    """This replica's rows of the batch, as M micro-batches [2, b, S]; ragged: each as
    long as its longest line, rounded up to a multiple of T."""
    mine = shard(torch.stack(batch), 1, groups["dp"])
    parts = split(mine, 1, num_microbatches)
    for i, (tokens, _) in enumerate(parts if ragged else []):
        length = int((tokens != PAD).any(0).sum())
        length += -length % groups["tp"].size()
        parts[i] = parts[i][..., :length].contiguous()
    return parts


def broadcast_batch(batch: tuple, groups, args) -> list[Tensor]:
    """This replica's micro-batches: one rank of a TP group loads them, all get them;
    the others do not know how long they are, so the shape comes before the batch."""
    shared, micro_batches = [], [None] * args.microbatches
    if groups["tp"].rank() == 0:
        micro_batches = make_microbatches(batch, groups, args.microbatches, args.ragged)
    for x in micro_batches:
        shape = torch.tensor([0, 0, 0] if x is None else x.shape, device=args.device)
        shape = broadcast(shape, 0, groups["tp"]).tolist()
        if x is None:
            x = torch.empty(shape, dtype=torch.int64, device=args.device)
        shared.append(broadcast(x, 0, groups["tp"]))
    return shared


def count_targets(micro_batches: list[Tensor], dp_group) -> Tensor:
    """Targets in the whole batch, of all replicas: one all-reduce of one int64."""
    mine = sum((target != IGNORE).sum() for _, target in micro_batches)
    return all_reduce(mine, dp_group)


def part_of_mean(loss_bS: Tensor, batch_targets: Tensor) -> Tensor:
    """What a micro-batch adds to the batch's mean loss. Divided by the batch's targets,
    not its own, parts just add up, and so do gradients: every token weighs the same."""
    return loss_bS.sum() / batch_targets


class FlatAdamW:
    """AdamW on parameters of a rank as one vector: one collective sums all gradients.
    AdamW treats every number on its own, so it does not matter how the vector is cut:
    with `zero` a rank keeps 1/DP of it, and of the two moments, and of the gradient
    once it is summed (ZeRO stage 1, the reduce-scatter of stage 2: arXiv:1910.02054).
    Communication: n elements (padded so that DP divides them): one all-reduce over dp;
        with `zero` one reduce-scatter, and after the update one all-gather.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], groups, zero: bool):
        self.parameters, self.groups, self.zero = parameters, groups, zero
        self.vector = nn.Parameter(self.local_slice(parameters))
        self.adamw = torch.optim.AdamW([self.vector], lr=1e-3, eps=1e-4)  # eps: see 02
        shares = {}  # in the model's norm: of what c ranks of a TP group have, 1/c each
        for name, p in parameters.items():
            parts = math.prod(group.size() for _, group in getattr(p, "shardings", ()))
            shares[name] = torch.full_like(p, parts / groups["tp"].size())
        self.norm_weights = self.local_slice(shares)

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """One vector of a tensor for each parameter."""
        flat = torch.cat([tensors[name].detach().flatten() for name in self.parameters])
        return F.pad(flat, (0, -len(flat) % self.groups["dp"].size()))

    def local_slice(self, tensors: dict[str, Tensor]) -> Tensor:
        """This replica's part of their vector: a slice with `zero`, else all of it."""
        flat = self.flatten(tensors)
        return shard(flat, 0, self.groups["dp"]) if self.zero else flat

    def unflatten(self, part: Tensor) -> dict[str, Tensor]:
        """The opposite: a tensor for each parameter, from all parts of a vector."""
        flat = all_gather(part, 0, self.groups["dp"]) if self.zero else part.detach()
        sizes = [p.numel() for p in self.parameters.values()]
        parts = zip(self.parameters.items(), flat[: sum(sizes)].split(sizes))
        return {name: x.view(p.shape) for (name, p), x in parts}

    def sum_over_replicas(self) -> None:
        """Each replica's gradient is a part of the batch's: they are added up."""
        flat = self.flatten({name: p.grad for name, p in self.parameters.items()})
        if self.zero:
            self.vector.grad = reduce_scatter(flat, 0, self.groups["dp"])
        else:
            self.vector.grad = all_reduce(flat, self.groups["dp"])

    def step(self) -> None:
        """Update this replica's part, and put the whole back into the model."""
        self.adamw.step()
        for name, x in self.unflatten(self.vector).items():
            self.parameters[name].data.copy_(x)


class MeshTraining:
    """One model in training on the whole mesh, as this rank takes part in it.
    A tied weight belongs to the first stage, which gets the sum of both gradients; the
    last has a copy, renewed in each step. (Two owners, as in Megatron-LM, stay equal
    only if replicas are summed first.)
    """

    def __init__(self, full: Transformer, groups: dict[str, dist.ProcessGroup], args):
        self.groups, self.args, pp = groups, args, groups["pp"]
        model = sp_transformer(full, groups["tp"])
        tied = model.lm_head.weight is model.embed_tokens.weight and groups["embedding"]
        self.tied = model.lm_head.weight if tied else None
        names = {p: name for name, p in model.named_parameters()}
        self.stage = slice_stage(model, pp.rank(), pp.size())
        # Named as in the full model, where a tied head goes by its embedding's name.
        self.parameters = {names[p]: p for p in self.stage.parameters()}
        owned = dict(self.parameters)
        if tied and pp.rank() > 0:
            del owned["embed_tokens.weight"]  # a copy
        self.optimizer = FlatAdamW(owned, groups, args.zero)
        self.pipeline = Pipeline(self.stage, self.loss, groups)
        self.steps = schedule(args.schedule, pp.rank(), pp.size(), args.microbatches)

    def loss(self, logits_bSv: Tensor, target_bS: Tensor) -> Tensor:
        """A micro-batch's part of the batch's mean loss (lesson 03)."""
        COMM.what, tp_group, V = "loss", self.groups["tp"], self.args.vocab_size
        loss_bS = vocab_parallel_cross_entropy(logits_bSv, target_bS, tp_group, V)
        COMM.what = "layers"
        return part_of_mean(loss_bS, self.batch_targets)

    def gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Forward and backward of a batch; its mean loss where the last stage is."""
        args, groups, pipeline = self.args, self.groups, self.pipeline
        COMM.what = "batch"
        micro_batches = [(None, None)] * args.microbatches
        if pipeline.first or pipeline.last:  # one needs tokens, the other targets
            micro_batches = broadcast_batch(batch, groups, args)
        if pipeline.last:
            self.batch_targets = count_targets(micro_batches, groups["dp"])
        COMM.what = "layers"
        loss = pipeline.run(self.steps, micro_batches)
        COMM.what = "whole"
        all_reduce_replicated_gradients(self.stage, groups["tp"])
        COMM.what = "tied"
        if self.tied is not None:
            self.tied.grad = all_reduce(self.tied.grad, groups["embedding"])
        COMM.what = "replicas"
        self.optimizer.sum_over_replicas()
        return loss

    def update(self) -> float:
        """Clip the gradient by its norm over the whole mesh, and step; that norm.
        Communication: an all-reduce of one float64 over tp, pp, and dp with `zero`."""
        COMM.what = "norm"
        grad = self.optimizer.vector.grad
        squares = (grad.double().square() * self.optimizer.norm_weights).sum()
        for axis in ("tp", "pp", "dp") if self.args.zero else ("tp", "pp"):
            squares = all_reduce(squares, self.groups[axis])
        norm = squares.sqrt().item()
        grad.mul_(min(1.0, self.args.clip / (norm + 1e-6)))
        COMM.what = "replicas"
        self.optimizer.step()
        COMM.what = "tied"
        if self.tied is not None:
            self.tied.data.copy_(broadcast(self.tied, 0, self.groups["embedding"]))
        self.stage.zero_grad()
        COMM.what = ""
        return norm


# ---- Checkpoints: saved under one mesh, loaded under another

COMPLETE = "complete.json"  # the last file of a checkpoint
MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's names for them


def to_dtensor(x: Tensor, p: nn.Parameter, tp_group: dist.ProcessGroup) -> DTensor:
    """x, cut as p is, as a DTensor, which knows its place in the whole tensor: so dcp
    can hand any other mesh its parts. Rows that pad the vocabulary are left out."""
    x, shape, placement = x.detach(), list(x.shape), Replicate()
    for dim, tp_group in getattr(p, "shardings", ()):  # of copies, a smaller group
        placement = Shard(dim)
        shape[dim] *= tp_group.size()
    if hasattr(p, "rows"):
        first = tp_group.rank() * len(x)
        x, shape[0] = x[: max(0, p.rows - first)], p.rows
    mesh = DeviceMesh.from_group(tp_group, x.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )


def state_to_save(training: MeshTraining, moments: dict[str, dict]) -> dict:
    """Weights and moments. What several ranks have has one name: it is written once."""
    state, tp_group = {}, training.groups["tp"]
    for kind, tensors in {"weight": training.parameters, **moments}.items():
        for name, x in tensors.items():
            state[f"{kind}/{name}"] = to_dtensor(x, training.parameters[name], tp_group)
    return state


def save_checkpoint(folder: Path, step: int, training: MeshTraining, about: dict):
    """Write folder/step_NNNNNN: whole, or not at all: it is written under another name,
    and renamed when all ranks are done. What a kill leaves behind has that other name.
    about: this mesh, and what a run must have in common to go on from here."""
    import torch.distributed.checkpoint as dcp  # here: it takes a while

    part, first = folder / f"part_{step:06}", dist.get_rank() == 0
    adam = training.optimizer.adamw.state[training.optimizer.vector]
    moments = {kind: training.optimizer.unflatten(adam[kind]) for kind in MOMENTS}
    if first:
        shutil.rmtree(part, ignore_errors=True)
    with COMM.meet(f"saving of step {step}", [*range(dist.get_world_size())]):
        dcp.save(state_to_save(training, moments), checkpoint_id=part)
    if first:
        files = {file.name: zlib.crc32(file.read_bytes()) for file in part.iterdir()}
        (part / COMPLETE).write_text(json.dumps(about | {"step": step, "files": files}))
        part.rename(folder / f"step_{step:06}")


def load_checkpoint(path: Path, step: int, training: MeshTraining) -> None:
    """Fill this rank's parameters and moments from a checkpoint of any mesh."""
    import torch.distributed.checkpoint as dcp

    optimizer, moments = training.optimizer, {}
    for kind in MOMENTS:
        moments[kind] = optimizer.unflatten(torch.zeros_like(optimizer.vector))
    with COMM.meet(f"loading of step {step}", [*range(dist.get_world_size())]):
        dcp.load(state_to_save(training, moments), checkpoint_id=path)  # in place
    optimizer.vector.data = optimizer.local_slice(training.parameters)
    adam = {kind: optimizer.local_slice(tensors) for kind, tensors in moments.items()}
    optimizer.adamw.state[optimizer.vector] = adam | {"step": torch.tensor(float(step))}


# ---- The same by PyTorch's own API


def pytorch_stage(full: Transformer, mesh: DeviceMesh, args) -> tuple:
    """This rank's part, and the names of its parameters: lesson 04's plan over tp, this
    stage of it, fully_shard over dp (ZeRO stage 3: parameters and gradients, too)."""
    model = parallel.parallelize_module(copy.deepcopy(full), mesh["tp"], sp_plan())
    names = {p: name for name, p in model.named_parameters()}
    model = slice_stage(model, mesh["pp"].get_local_rank(), args.pp)
    names = [names[p] for p in model.parameters()]  # fully_shard makes new ones
    options = {"mesh": mesh["dp"]}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if args.recompute:
        model.layers = nn.ModuleList(map(Checkpointed, model.layers))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options), names


# ==== RUN

AXES = "pp", "dp", "tp"  # outermost first
RANKS = 8  # in the command that a start without torchrun shows
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}  # 1F1B: M ≥ P


def main(args, report: Report) -> None:
    sizes = {axis: getattr(args, axis) for axis in AXES}
    groups = make_mesh(sizes, args.timeout)
    report.begin(sizes)
    batches = make_batches(__doc__, args, args.steps)
    batches = [pad_batch(*batch, args.tp) for batch in batches]
    args.seq_len = batches[0][0].shape[1]  # from here on T divides it
    full = make_tied(args)
    alone = train_transformer("", copy.deepcopy(full), batches, args, mean_loss)
    training = MeshTraining(full, groups, args)
    mesh = train_on_mesh(training, batches, args)
    show_places(report, training)
    show_equality(report, alone, mesh, training, batches[-1])
    if not args.begin:
        show_all_gradients(report, {"one process": alone, "mesh": mesh})
    show_held(report, training)
    show_timeline(report, training)
    show_traffic_3d(report, training, batches[args.begin :])
    if args.tp <= args.kv_heads:  # PyTorch's plan makes no copies
        show_pytorch(report, full, batches[0], groups)


def train_on_mesh(training: MeshTraining, batches: list, args) -> TrainingRun:
    losses, norms, gradients, optimizer = {}, {}, {}, training.optimizer
    try:
        if args.begin:
            load_checkpoint(args.checkpoint, args.begin, training)
        for step, batch in enumerate(batches[args.begin :], args.begin + 1):
            with COMM.meet("start of a step", [*range(args.ranks)]):
                dist.barrier()  # one start for all, for the timeline
            loss = training.gradients(batch)
            COMM.what = ""
            for axis in ("dp", "pp"):  # parts add up; only the last stage has one
                loss = all_reduce(loss, training.groups[axis])
            losses[f"loss, step {step}"] = loss.item()
            if step == 1:
                gradients = gather_stages(
                    training, optimizer.unflatten(optimizer.vector.grad)
                )
            norms[f"‖g‖, step {step}"] = training.update()
            if args.save:
                save_checkpoint(args.save, step, training, args.settings)
    except BaseException as error:  # dcp's is not an Exception, and has many lines
        for failure, _ in getattr(error, "failures", {}).values():
            raise RuntimeError(f"checkpoint: {failure}") from None
        raise
    parameters = gather_stages(training, training.parameters)
    return TrainingRun(losses, norms, gradients, parameters, {})


def gather_stages(training: MeshTraining, tensors: dict) -> dict[str, Tensor]:
    """Whole tensors of all stages, by name; its own where this rank has them."""
    mine = {}
    for name, x in tensors.items():
        p = training.parameters[name]
        x = unshard(x.detach(), getattr(p, "shardings", ()))
        mine[name] = x[: getattr(p, "rows", None)].cpu().clone()
    stages = gather_objects(mine, training.groups["pp"])
    return {name: x for found in stages for name, x in found.items()} | mine


def show_places(report: Report, training: MeshTraining) -> None:
    args, groups, rows = report.args, training.groups, []
    here = {axis: dist.get_process_group_ranks(groups[axis]) for axis in AXES}
    report.data["groups"] = members = gather_objects(here)
    stage, replica, t = (groups[axis].rank() for axis in AXES)
    rank = (stage * args.dp + replica) * args.tp + t
    report.check("rank = (stage · DP + replica) · T + t", abs(rank - dist.get_rank()))
    names = [part_of(name) for name in training.parameters]
    holds = gather_objects(f"{names[0]} … {names[-1]}")
    for stage in range(args.pp):
        row = {"": f"stage {stage}"}
        for replica in range(args.dp):
            first = (stage * args.dp + replica) * args.tp
            row[f"dp {replica}"] = str(members[first]["tp"])
        rows.append(row | {"holds": holds[first]})
    report.section("The mesh: rank = (stage · DP + replica) · T + tp_rank")
    report.say(
        "   [ ]: a TP group sends activations in each layer, on the fastest links. In\n"
        "   a row replicas sum gradients, once a step. A column passes activations on."
    )
    report.table("stages", rows)
    two = args.ranks if args.ranks % 2 else 2
    flags = [f"--{axis} {two}" for axis in AXES if getattr(args, axis) == 1]
    if flags:
        report.say(f"   An axis of one rank: see it with {' or '.join(flags)}.")


def part_of(name: str) -> str:
    return re.match(r"layers\.\d+|\w+", name)[0]


def show_equality(report: Report, alone, mesh, training, batch: tuple) -> None:
    args, groups, pipeline = report.args, training.groups, training.pipeline
    losses = {step: alone.losses[step] for step in mesh.losses}  # not before --load
    norms = {step: alone.norms[step] for step in mesh.norms}
    runs = {"one process": alone._replace(losses=losses, norms=norms), "mesh": mesh}
    show_steps(report, runs, "mesh", training.stage, groups["tp"])  # from lesson 02
    for name, p in training.parameters.items():
        diff = rel_diff(p, broadcast(p, 0, groups["dp"]))
        report.check(f"replicas over dp: {name}", diff)
    if training.tied is not None:
        diff = rel_diff(training.tied, broadcast(training.tied, 0, groups["embedding"]))
        report.check("replicas over pp: the tied weight", diff)
    if args.begin:
        report.say(f"   Went on from {args.checkpoint}, saved by {args.made_by}.")
    wanted = make_microbatches(batch, groups, args.microbatches, args.ragged)
    if pipeline.first or pipeline.last:
        same = all(map(torch.equal, pipeline.micro_batches, wanted))
        report.check("a TP group has its first rank's batch", float(not same))
    every = gather_objects([x.shape[2] for x in wanted])
    lengths = report.data["lengths"] = every[: args.dp * args.tp : args.tp]
    targets = [int((part != IGNORE).sum()) for part in split(batch[1], 0, args.dp)]
    report.say(wrap(f"   Targets in the last batch, by replica: {str(targets)[1:-1]}"))
    report.say(wrap(f"   Lengths of its micro-batches: {str(lengths)[1:-1]}"))


def show_held(report: Report, training: MeshTraining) -> None:
    args, optimizer, stage = report.args, training.optimizer, training.pipeline.rank
    kept, in_flight, activations, M = [], 0, 0, args.microbatches
    for event in training.pipeline.events:  # backwards come in the order of forwards
        kept = [*kept, event["bytes"]] if event["what"] == "forward" else kept[1:]
        in_flight = max(in_flight, len(kept))
        activations = max(activations, sum(kept))
    state = optimizer.adamw.state[optimizer.vector]
    n = sum(p.numel() for p in optimizer.parameters.values())
    formula = "2·e·n/DP" if args.zero else "2·e·n"
    limit = M if args.schedule == "gpipe" else min(args.pp - stage, M)
    row = {"stage": str(stage), "n": n, "bytes": nbytes(map(state.get, MOMENTS))}
    row["predicted_bytes"] = moments_bytes(args, n, optimizer.vector.itemsize)
    row |= {"in flight": in_flight, "limit": limit, "activations": activations}
    row["ok"] = report.check("micro-batches in flight", abs(in_flight - limit))
    every = gather_objects(row)
    report.section("Memory of a rank, in bytes: AdamW's moments, and activations")
    report.say(
        f"   n parameters; bytes: their moments, {formula} (n rounded up for DP); in "
        "flight:\n   micro-batches kept, limit min(P − stage, M), or M for gpipe."
    )
    ranks = dist.get_process_group_ranks(training.pipeline.pp)
    report.measure("memory", [every[rank] for rank in ranks])


def moments_bytes(args, n: int, e: int) -> int:
    """AdamW's of n numbers, padded for DP; --zero: 1/DP of it (1910.02054, sec. 5)."""
    return 2 * e * -(-n // args.dp) * (1 if args.zero else args.dp)


def show_timeline(report: Report, training: MeshTraining) -> None:
    args, P, M = report.args, report.args.pp, report.args.microbatches
    place = {"rank": dist.get_rank(), "stage": training.pipeline.rank}
    events = gather_objects([place | event for event in training.pipeline.events])
    report.data["timeline"] = [event for of_rank in events for event in of_rank]
    ranks = dist.get_process_group_ranks(training.pipeline.pp)
    stages = [events[rank] for rank in ranks]
    begin = min(of_stage[0]["start"] for of_stage in stages)
    length = max(of_stage[-1]["end"] for of_stage in stages) - begin
    report.section(f"The last step, {args.schedule}: stages of the first pipeline")
    report.say("   1 2 … forwards of micro-batches, a b … backwards, · waits; to scale")
    computing = 0  # seconds, mean of the stages
    for stage, of_stage in enumerate(stages):
        line = ["·"] * 72
        for event in of_stage:
            computing += (event["end"] - event["start"]) / P
            start = int((event["start"] - begin) / length * 72)
            end = max(start + 1, round((event["end"] - begin) / length * 72))
            i = event["microbatch"]
            mark = str((i + 1) % 10) if event["what"] == "forward" else chr(97 + i % 26)
            line[start:end] = mark * (end - start)
        report.say(f"   stage {stage} {''.join(line[:72])}")
    bubble = report.data["bubble"] = length / computing - 1
    waits, predicted = 1 - computing / length, (P - 1) / (M + P - 1)
    report.say(
        f"   waiting/computing {bubble:.2f}, predicted (P − 1)/M = {(P - 1) / M:.2f}; "
        f"waiting/all {waits:.2f}, predicted {predicted:.2f}\n"
        "   (for equal stages, free messages; a wait in a TP group counts as computing)"
    )


def show_traffic_3d(report: Report, training: MeshTraining, batches: list) -> None:
    args, M, steps = report.args, report.args.microbatches, len(batches)
    parts = [
        x
        for y in batches
        for x in make_microbatches(y, training.groups, M, args.ragged)
    ]
    MbS = sum(x[0].numel() for x in parts) / steps  # tokens of a step
    whole = [x for x in training.parameters.values() if not getattr(x, "shardings", ())]
    n = training.optimizer.vector.numel() * (args.dp if args.zero else 1)
    e, stage = training.pipeline.like.itemsize, training.pipeline.rank
    rows = traffic(args, stage, MbS, e, n, sum(x.numel() for x in whole))
    report.section("Communication of a step: every rank's checked, stage 0's shown")
    report.say("   X = e·b·S·D, Y = e·H(D+1)/2; n: numbers; 24: a shape; v = ⌈V/T⌉")
    report.axes = report.axes | {"copy": max(1, args.tp // args.kv_heads)}
    report.ledger({x[:4]: (*x[4:6], round(x[6] * steps) / steps) for x in rows}, steps)


def traffic(args, stage: int, MbS: float, e: int, n: int, whole: int) -> list[tuple]:
    """What a rank sends in a step: what, phase, collective, axis, calls, formula, size.
    MbS: tokens of a replica; e: bytes a number; n: numbers it trains; whole: not cut.
    Sources: 2205.05198, sec. 4.2 (inside layers); 2104.04473, sec. 3 (between them)."""
    M, T, D = args.microbatches, args.tp, args.hidden
    first, last, each = stage == 0, stage == args.pp - 1, "calls·X"
    MX, flat = e * MbS * D, e * (n + -n % args.dp)
    tied = args.tie and (first or last), "e·v·D", e * D * -(-args.vocab_size // T)
    layers = args.layers // args.pp + (stage < args.layers % args.pp)  # see slice_stage
    copied = 4 * M * layers * (T > args.kv_heads)  # weights and biases of k and v
    copies = copied, "calls·Y", copied * e * D // args.heads * (D + 1) / 2
    gather = 2 * layers + last  # 2 a layer, one before the head
    scatter, both = gather - last + first, 2 * gather - last + first  # both: backward
    share = 2 * M * (first or last), "M(16·b·S+24)", 16 * MbS + 24 * M
    ahead = 2 * M * (not last), "M(X/T+24)", MX / T + 24 * M
    loss = 3 * M * last, "3·M·e·b·S", 3 * max(e, 4) * MbS  # in float32 at least
    return [  # what is not alike on all stages comes last
        ("layers", "forward", "all-gather", "tp", M * gather, each, gather * MX),
        ("layers", "forward", "reduce-scatter", "tp", M * scatter, each, scatter * MX),
        ("layers", "backward", "all-gather", "tp", M * both, each, both * MX),
        ("layers", "backward", "reduce-scatter", "tp", M * gather, each, gather * MX),
        ("layers", "backward", "all-reduce", "copy", *copies),
        ("whole", "", "all-reduce", "tp", 1, "e·n, not cut", e * whole),
        ("replicas", "", "all-reduce", "dp", not args.zero, "e·n, padded", flat),
        ("replicas", "", "reduce-scatter", "dp", args.zero, "e·n, padded", flat),
        ("replicas", "", "all-gather", "dp", args.zero, "e·n, padded", flat),
        *(("norm", "", "all-reduce", x, x != "dp" or args.zero, "8", 8) for x in AXES),
        ("tied", "", "all-reduce", "pp", *tied),
        ("tied", "", "broadcast", "pp", *tied),
        ("batch", "", "broadcast", "tp", *share),
        ("batch", "", "all-reduce", "dp", last, "8", 8),
        ("layers", "forward", "send/recv", "pp", *ahead),
        ("layers", "backward", "send/recv", "pp", M * (not first), "M·X/T", MX / T),
        ("loss", "forward", "all-reduce", "tp", *loss),
    ]


def pytorch_step(full: Transformer, batch: tuple, groups, args, kind) -> dict:
    ranks = torch.arange(args.ranks).view(args.pp, args.dp, args.tp)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # no hints
    device, pp_group = torch.device(args.device), groups["pp"]
    mine = [groups[axis] for axis in AXES]  # init_device_mesh's would wait 30 minutes
    mesh = DeviceMesh.from_group(mine, device.type, mesh=ranks, mesh_dim_names=AXES)
    model, names = pytorch_stage(full, mesh, args)
    targets, losses = (batch[1] != IGNORE).sum() / args.dp, []

    def loss_of(logits: DTensor, target_bS: Tensor) -> Tensor:
        logits = logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, target_bS.flatten(), reduction="sum")
        return loss / targets  # times DP: fully_shard averages over replicas

    stage = PipelineStage(model, pp_group.rank(), args.pp, device, group=pp_group)
    pipeline = kind(stage, args.microbatches, loss_of, scale_grads=False)  # no 1/M
    tokens_bS, target_bS = (shard(x, 0, groups["dp"]) for x in batch)
    inputs = [tokens_bS] if stage.is_first else []
    with parallel.loss_parallel():
        pipeline.step(*inputs, target=target_bS, losses=losses, return_outputs=False)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    loss = sum((x.full_tensor() for x in losses), loss)
    loss = all_reduce(all_reduce(loss.detach(), pp_group), groups["dp"])
    gradients = unshard_model(model, "grad").values()
    return {"loss": loss / args.dp, **dict(zip(names, gradients))}


def show_pytorch(report: Report, full: Transformer, batch: tuple, groups) -> None:
    args, model = report.args, copy.deepcopy(full)
    model.lm_head.weight = nn.Parameter(full.lm_head.weight.detach().clone())  # untied
    kind = SCHEDULES["gpipe" if args.microbatches < args.pp else args.schedule]
    with COMM.meet("PyTorch's pipeline", [*range(args.ranks)]):
        got = pytorch_step(model, batch, groups, args, kind)
    loss, _ = forward_backward("", model, batch, mean_loss)
    losses = {"one process": {"loss": loss}, "PyTorch": {"loss": got.pop("loss")}}
    wanted = unshard_model(model, "grad")
    gradients = {"one process": {name: wanted[name] for name in got}, "PyTorch": got}
    extra = ", recomputed" * args.recompute + ", in bfloat16" * args.bf16
    extra += ", weights untied" * args.tie
    report.section("The same by PyTorch: its plan, fully_shard and its pipeline")
    report.say(f"   {kind.__name__}, one batch{extra}; gradients: this stage's")
    report.compare("PyTorch", losses, 2e-2 if args.bf16 else report.allowed_loss)
    if not args.bf16:
        report.compare("PyTorch", gradients, fold=lambda name: "gradients")
        return
    small = copy.deepcopy(model).bfloat16()  # how far off is it with no ranks at all?
    forward_backward("", small, batch, mean_loss)
    rows, small = [], unshard_model(small, "grad")
    for name, x in got.items():
        row = {"gradient": name, "diff": rel_diff(x, wanted[name])}
        alone = rel_diff(small[name], wanted[name])
        ok = report.check(f"PyTorch: {name}", row["diff"], max(2e-2, 3 * alone))
        rows.append(row | {"in one process": f"{alone:.1e}", "ok": ok})
    report.table("bf16", sorted(rows, key=lambda row: row["diff"])[-3:])


# ==== BREAK IT

BREAKS = {
    "shape": dict(
        target="broadcast_batch",
        old='        shape = broadcast(shape, 0, groups["tp"]).tolist()\n',
        new="        rows = args.batch_size // args.dp // args.microbatches\n"
        "        shape = [2, rows, args.seq_len]\n",
        what="TP receivers guess the shape of the batch (switches --ragged on)",
        symptom="an error of the transport about sizes, an abort, or a rank that waits",
        why="one rank of the group has the batch, the others' buffers another shape",
        reported="github.com/NVIDIA/Megatron-LM/pull/4103",
    ),
    "data": dict(
        target="broadcast_batch",
        old="    return shared\n",
        new='    return [x.roll(groups["tp"].rank(), 1) for x in shared]  # shuffled\n',
        what="each rank of a TP group shuffles its batch for itself",
        symptom="no error; the loss of step 1 is wrong already, every gradient, too",
        why="a TP group is one model: pieces of different answers are added up",
        reported="github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "micro": dict(
        target="MeshTraining.loss",
        old="    return part_of_mean(loss_bS, self.batch_targets)\n",
        new='    parts = self.args.microbatches * self.groups["dp"].size()\n'
        "    return loss_bS.sum() / (target_bS != IGNORE).sum() / parts\n",
        what="micro-batch losses are averaged, whatever number of targets each has",
        symptom="the loss is a little off, and every gradient; not without padding",
        why="in a mean of means a token counts more where there is much padding",
        reported="github.com/meta-pytorch/torchtune/pull/1875, torchtitan issue 2972",
    ),
    "order": dict(
        target="send",
        old="    return work, ranks, x  # x must live until it is received\n",
        new="    wait_for([(work, ranks, x)])\n"
        "    return torch.futures.collect_all([]), ranks, x\n",
        what="a stage waits for each send to end before it goes on",
        symptom="two neighbours wait for each other until the timeout; not in gpipe",
        why="activation and gradient cross: a send ends when the other side receives",
        reported="github.com/pytorch/pytorch/issues/109401, NVIDIA/nccl issue 479",
    ),
    "norm": dict(
        target="FlatAdamW.__init__",
        old='parts / groups["tp"].size()',
        new="1.0",
        what="the global norm counts replicated parameters once a TP rank",
        symptom="loss and gradients of step 1 are right, clipping takes away too much",
        why="squares of what all T ranks hold are T times in the sum over the group",
        reported="github.com/ROCm/TransformerEngine/pull/715, NVIDIA-NeMo/RL pull 3788",
    ),
    "tied": dict(
        target="MeshTraining.gradients",
        old='self.tied.grad = all_reduce(self.tied.grad, groups["embedding"])',
        new="pass",
        what="gradients of a weight tied over two stages are not summed (--tie is on)",
        symptom="the first loss is right; the embedding's gradient lacks the head's",
        why="a weight with two uses gets the sum of two gradients, wherever they arise",
        reported="github.com/NVIDIA/Megatron-LM/issues/844, pytorch/torchtitan issue 2252",
    ),
    "replicas": dict(
        target="count_targets",
        old="    return all_reduce(mine, dp_group)\n",
        new="    return mine * dp_group.size()\n",
        what="gradients are averaged over replicas with different numbers of targets",
        symptom="loss and gradients are a little off, each step by another factor",
        why="each replica divides by its own targets, then all are weighed alike",
        reported="github.com/pytorch/torchtitan/pull/2206",
    ),
    "group": dict(
        target="FlatAdamW.sum_over_replicas",
        old='all_reduce(flat, self.groups["dp"])',
        new='all_reduce(flat, self.groups["tp"])',
        what="gradients are summed over tp in place of dp",
        symptom="the loss of step 1 is right, every gradient wrong; replicas part ways",
        why="different slices of a parameter are added up, replicas keep their part",
        reported="github.com/ooples/AiDotNet/pull/393",
    ),
}
NEEDS = dict.fromkeys(("shape", "data", "norm"), "tp")  # an axis of 2 ranks or more
NEEDS |= {"order": "pp", "tied": "pp", "replicas": "dp", "group": "dp"}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    follow = "dp pp tp microbatches layers batch_size seq_len hidden heads kv_heads"
    sizes = dict.fromkeys(follow.split(), 0)  # 0: not given, it follows the mesh
    parser = lesson_parser(__doc__, BREAKS, steps=3, vocab_size=257, **sizes)
    add = parser.add_argument
    for name in "ragged zero tie bf16 recompute".split():
        add(f"--{name}", action="store_true")
    add("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    add("--clip", type=float, default=1.0, help="norm that a gradient may have (1)")
    add("--save", type=Path, metavar="DIR", help="a checkpoint there after each step")
    add("--load", type=Path, metavar="DIR", help="from people you trust: a pickle")
    args = parser.parse_args()
    args.ragged = args.ragged or args.bug == "shape"
    args.tie = args.tie or args.bug == "tied"
    fill_mesh(args, ranks)
    fill_sizes(args)
    check_checkpoints(args)
    return args


def fill_mesh(args, ranks: int) -> None:
    """Axes not given have 2 ranks each of an even rest; else, or if last, all of it."""
    needed = NEEDS.get(args.bug, "pp")  # comes first
    free = [axis for axis in dict.fromkeys((needed, *AXES)) if not getattr(args, axis)]
    product = math.prod(getattr(args, axis) or 1 for axis in AXES)
    if ranks % product or (ranks > product and not free):
        text = " × ".join(f"--{x} {getattr(args, x)}" for x in AXES if x not in free)
        text = f"{text} = {product}, but there are {ranks} ranks"
        raise ValueError(f"{text}; start {product} (--nproc_per_node={product})")
    left = ranks // product
    for axis in free:
        setattr(args, axis, 2 if left % 2 == 0 and axis != free[-1] else left)
        left //= getattr(args, axis)
    if args.bug in NEEDS and getattr(args, needed) == 1:
        raise ValueError(f"--break {args.bug} needs --{needed} 2 or more")


def fill_sizes(args) -> None:
    usual = args.tp * math.ceil(4 / args.tp)  # 4, or more: all ranks have some
    args.heads = args.heads or 2 * math.lcm(args.kv_heads or usual, args.tp)
    args.kv_heads = args.kv_heads or math.gcd(args.heads, usual)
    args.hidden, args.dropout = args.hidden or 8 * args.heads, 0.0
    args.seq_len = args.seq_len or (64 if args.ragged else 32)
    args.layers = args.layers or max(4, args.pp)
    args.microbatches = args.microbatches or max(4, args.pp)
    parts = args.dp * args.microbatches
    args.batch_size = args.batch_size or parts * math.ceil(16 / parts)
    must_divide(args, "batch_size", parts, "(--dp · --microbatches)")
    must_divide(args, "heads", args.tp, "(--tp)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    if args.tp % args.kv_heads:  # else c = T/K ranks hold the same one
        must_divide(args, "kv_heads", args.tp, "(--tp)")
    for wrong, text in (
        (args.layers < args.pp, f"--layers {args.layers}: fewer than --pp {args.pp}"),
        (args.vocab_size <= PAD, f"--vocab-size {args.vocab_size}: take 257 or more"),
        (args.hidden < 4, "--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4"),
        (not args.clip > 0, f"--clip {args.clip}: a norm above 0 is wanted"),
    ):
        if wrong:
            raise ValueError(text)


def check_checkpoints(args) -> None:
    alike = "hidden heads kv_heads layers batch_size seq_len vocab_size seed dtype tie"
    args.settings = {name: getattr(args, name) for name in [*alike.split(), "clip"]}
    args.settings["text"] = zlib.crc32(__doc__.encode())  # what it learns
    args.begin, steps = 0, "step_" + 6 * "[0-9]"
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if again and args.save and [*args.save.glob(steps)]:  # a rank was lost
        args.load = args.save
    if args.load:
        take_checkpoint(args, max(args.load.glob(steps), default=None))
    args.settings["mesh"] = " × ".join(f"{axis} {getattr(args, axis)}" for axis in AXES)
    if args.save:
        try:
            args.save.mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=args.save).close()
        except OSError as error:
            raise ValueError(f"--save {args.save}: {error.strerror}") from None
        for path in args.save.glob(steps):
            if int(path.name[5:]) > args.begin:
                text = f"--save {args.save}: {path.name} is there already"
                raise ValueError(f"{text}; --load {args.save}, or another folder")


def take_checkpoint(args, path: Path | None) -> None:
    if not path:
        raise ValueError(f"--load {args.load}: no finished checkpoint step_… in there")
    try:
        about = json.loads((path / COMPLETE).read_text())
        args.checkpoint, args.begin, args.made_by = path, about["step"], about["mesh"]
        for name, checksum in about["files"].items():
            if zlib.crc32((path / name).read_bytes()) != checksum:
                raise ValueError(f"{name} is damaged")
        for name, wanted in {"step": int(path.name[5:]), **args.settings}.items():
            if about[name] != wanted:
                raise ValueError(f"its {name} is {about[name]}, here it is {wanted}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"--load {path}: not to go on from: {error}") from None
    if args.begin >= args.steps:
        more = f"take --steps {args.begin + args.steps}"
        raise ValueError(f"--load {path}: it has done --steps {args.steps}; {more}")


# endregion


# ==== CARRIED OVER from 00, unchanged
# region


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    (lesson 00)"""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        for line in lines:
            # Every rank creates every group, in one order, even if it is not in it:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if it does not divide.

    (lesson 00)"""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    (lesson 00)"""
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    (lesson 00)"""
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    (lesson 00)"""
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    (lesson 00)"""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            # group_src is a number in the group; src= would be the global rank.
            dist.broadcast(out, group_src=src, group=group)
    return out


def ring_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends for a payload of nbytes (lesson 00)."""
    if collective == "send/recv":
        return nbytes
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return round(rounds * nbytes * (ranks - 1) / ranks)


# endregion


# ==== CARRIED OVER from 01, unchanged
# region


class MLP(nn.Module):
    """The reference: plain PyTorch, one process. Shapes: x [B, S, D] → [B, S, D].

    (lesson 01)"""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


def shard_parameter(full: Tensor, *cuts: tuple[int, dist.ProcessGroup]) -> nn.Parameter:
    """This rank's slice of a parameter, which remembers its cuts: ((dim, group), …).

    (lesson 01)"""
    for dim, group in cuts:
        full = shard(full, dim, group)
    mine = nn.Parameter(full.detach().clone())
    mine.shardings = cuts
    return mine


def unshard(x: Tensor, cuts: tuple) -> Tensor:
    """The whole tensor from all ranks' slices: cuts undone, the last one first.

    (lesson 01)"""
    for dim, group in reversed(cuts):
        x = all_gather(x, dim, group)
    return x


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated.

    (lesson 01)"""
    return getattr(p, "shardings", ())


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # every rank has all of x already: nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of the T terms of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group, self.copy_input = tp_group, copy_input
        self.gather_output = gather_output
        self.weight = shard_parameter(full.weight, (0, tp_group))  # [f, D]
        self.bias = shard_parameter(full.bias, (0, tp_group))  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        y_BSf = F.linear(x_BSD, self.weight, self.bias)
        if self.gather_output:
            return GatherFromTP.apply(y_BSf, 2, self.tp_group)
        return y_BSf


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the whole dL/dy; and y is the
        # sum of the terms, so dL/dy is also the gradient of every term.
        return grad, None


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        self.weight = shard_parameter(full.weight, (1, tp_group))  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward.

    (lesson 01)"""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


class AllGatherWithGrad(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: the transpose of the above.

    (lesson 01)"""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes kept for backward, each storage once, `skip` left out.

    (lesson 01)"""

    def __init__(self, skip):
        self.skip = {local(x).untyped_storage().data_ptr() for x in skip}
        self.storages = {}
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        storage = local(x).untyped_storage()
        if storage.data_ptr() not in self.skip:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return x

    def total(self) -> int:
        return sum(self.storages.values())


def local(x: Tensor) -> Tensor:
    """This rank's piece of a DTensor, waited for; any other tensor as it is.

    (lesson 01)"""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank (lesson 01)."""
    return sum(local(x).nbytes for x in tensors if x is not None)


def must_divide(args, name: str, parts: int, what: str) -> None:
    """ValueError with the arithmetic if a flag's value is no multiple of parts.

    (lesson 01)"""
    value = getattr(args, name)
    if value % parts:
        flag, up = f"--{name.replace('_', '-')}", value + parts - value % parts
        left = f"{value} % {parts} {what} = {value % parts}, not 0"
        raise ValueError(f"{flag} {value}: {left}; take {flag} {up}")


# endregion


# ==== CARRIED OVER from 02, unchanged
# region


class Config(NamedTuple):
    vocab_size: int  # V
    hidden: int  # D
    heads: int  # N
    kv_heads: int  # K: each key/value head serves N/K query heads
    layers: int  # L
    seq_len: int  # S, the longest sequence
    dropout: float  # probability, of attention weights and of each block's output


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angle position · 10000^(−2i/H) (arXiv:2104.09864).

    (lesson 02)"""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle_SH = torch.outer(torch.arange(seq_len), frequency).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Rotate each pair (i, i + H/2) of a head by the angle of its position.

    (lesson 02)"""
    first, second = x_BNSH.chunk(2, -1)
    return x_BNSH * cos_SH + torch.cat([-second, first], -1) * sin_SH


class Dropout(nn.Dropout):
    """nn.Dropout, with the mask sampled as in ShardedDropout below (lesson 02)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class CoreAttention(nn.Module):
    """The part of attention without weights (lesson 02)."""

    def __init__(self, head_size: int, dropout: float):
        super().__init__()
        self.head_size = head_size
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple) -> Tensor:
        S = q.shape[1]
        cos_SH, sin_SH, future_SS = tables
        q_BNSH = q.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k_BKSH = k.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v_BKSH = v.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q_BNSH = rotate(q_BNSH, cos_SH[:S], sin_SH[:S])
        k_BKSH = rotate(k_BKSH, cos_SH[:S], sin_SH[:S])
        queries_per_kv = q_BNSH.shape[1] // k_BKSH.shape[1]
        k_BNSH = k_BKSH.repeat_interleave(queries_per_kv, 1)
        v_BNSH = v_BKSH.repeat_interleave(queries_per_kv, 1)
        scores_BNSS = q_BNSH @ k_BNSH.mT / math.sqrt(self.head_size)
        scores_BNSS = scores_BNSS.masked_fill(future_SS[:S, :S], float("-inf"))
        weights_BNSS = self.dropout(scores_BNSS.softmax(-1))
        return (weights_BNSS @ v_BNSH).transpose(1, 2).flatten(2)


def apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The outputs of several linears for the same input (lesson 02)."""
    return [linear(x_BSD) for linear in linears]


class Attention(nn.Module):
    """Causal attention. Shapes: x [B, S, D] → [B, S, D] (lesson 02)."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        H = config.hidden // config.heads
        self.q_proj = nn.Linear(D, config.heads * H)
        self.k_proj = nn.Linear(D, config.kv_heads * H)
        self.v_proj = nn.Linear(D, config.kv_heads * H)
        self.project_qkv = apply_each  # TP replaces it: one f before all three
        self.core = CoreAttention(H, config.dropout)
        self.o_proj = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        q, k, v = self.project_qkv(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        return self.o_proj(self.core(q, k, v, tables))


class DecoderLayer(nn.Module):
    """Pre-LayerNorm: x + dropout(attention(norm(x))), then + dropout(MLP(norm(x))).

    (lesson 02)"""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        self.input_layernorm = nn.LayerNorm(D)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(D)
        self.mlp = MLP(D, 4 * D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        y_BSD = self.self_attn(x_BSD=self.input_layernorm(x_BSD), tables=tables)
        x_BSD = x_BSD + self.dropout(y_BSD)
        y_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + self.dropout(y_BSD)


class Transformer(nn.Module):
    """The decoder. Shapes: tokens [B, S] int64 → logits [B, S, V] (lesson 02)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size)
        cos_SH, sin_SH = rotary_table(config.seq_len, config.hidden // config.heads)
        self.register_buffer("cos", cos_SH, persistent=False)
        self.register_buffer("sin", sin_SH, persistent=False)
        future_SS = torch.ones(config.seq_len, config.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future_SS, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, (self.cos, self.sin, self.future))
        return self.lm_head(self.norm(x_BSD))


class ShardedDropout(nn.Module):
    """Dropout of a tensor that is sharded along dim: ranks must drop independently.

    (lesson 02)"""

    def __init__(self, p: float, dim: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.p = p
        self.dim = dim
        self.tp_group = tp_group

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        full_shape = list(x.shape)
        full_shape[self.dim] *= self.tp_group.size()
        keep = torch.rand(full_shape, device=x.device) >= self.p
        return x * shard(keep, self.dim, self.tp_group) / (1 - self.p)


def copy_then_apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """One f for all linears that read x, so that dL/dx is summed over ranks once.

    (lesson 02)"""
    x_BSD = CopyToTP.apply(x_BSD, linears[0].tp_group)
    return apply_each(x_BSD, *linears)


def parallelize_layer(layer: DecoderLayer, tp_group: dist.ProcessGroup) -> None:
    """Replace the linears of a layer by parallel ones: Megatron's split (lesson 02)."""
    attn = layer.self_attn
    T = tp_group.size()
    heads = attn.q_proj.out_features // attn.core.head_size
    kv_heads = attn.k_proj.out_features // attn.core.head_size
    if heads % T != 0 or kv_heads % T != 0:  # a rank would get a fraction of a head
        raise ValueError(f"{heads} heads, {kv_heads} key/value heads on {T} ranks")

    attn.q_proj = ColumnParallelLinear(attn.q_proj, tp_group, copy_input=False)
    attn.k_proj = ColumnParallelLinear(attn.k_proj, tp_group, copy_input=False)
    attn.v_proj = ColumnParallelLinear(attn.v_proj, tp_group, copy_input=False)
    attn.project_qkv = copy_then_apply_each
    # The attention weights [B, n, S, S] are sharded by head, so along dim 1.
    attn.core.dropout = ShardedDropout(attn.core.dropout.p, 1, tp_group)
    attn.o_proj = RowParallelLinear(attn.o_proj, tp_group)
    layer.mlp = tp_mlp(layer.mlp, tp_group)


def tp_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """A copy of the decoder with its layers split over the TP group (lesson 02)."""
    model = copy.deepcopy(full)
    for layer in model.layers:
        parallelize_layer(layer, tp_group)
    return model.train(full.training)  # in eval mode if full is


def global_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the full model's gradient, the same on every rank (lesson 02)."""
    total = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for p in model.parameters():
        if p.grad is None:
            continue
        squares = p.grad.double().square().sum()
        if not shardings_of(p):
            squares /= tp_group.size()  # all T ranks add the same squares
        total += squares
    return math.sqrt(all_reduce(total, tp_group))


def clip_gradients(model: nn.Module, max_norm: float, norm: float) -> None:
    """Scale all gradients by one factor, so that their norm is at most max_norm.

    (lesson 02)"""
    scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


PAD = 256  # the one token that is not a byte


IGNORE = -100  # the target of a position without a next byte; cross_entropy skips it


def make_batches(text: str, args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sample batches of tokens and targets, each [B, S] int64 (lesson 02)."""
    lines = [f"{line}\n".encode() for line in text.splitlines() if line.strip()]
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(count):
        rows = torch.full((args.batch_size, args.seq_len + 1), PAD)
        for row in rows:
            line = lines[torch.randint(len(lines), (), generator=generator)]
            start = torch.randint(len(line) - 1, (), generator=generator)
            line = line[start : start + args.seq_len + 1]
            row[: len(line)] = torch.tensor(list(line))
        tokens_BS = rows[:, :-1].contiguous()
        target_BS = rows[:, 1:]
        target_BS = target_BS.masked_fill(target_BS == PAD, IGNORE)
        batches.append((tokens_BS.to(args.device), target_BS.to(args.device)))
    return batches


def make_transformer(args) -> Transformer:
    """The full model. Every rank initializes the same one, from the same seed.

    (lesson 02)"""
    torch.manual_seed(args.seed)
    config = Config(**{name: getattr(args, name) for name in Config._fields})
    return Transformer(config).to(args.device, getattr(torch, args.dtype))


def mean_loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Cross entropy, averaged over the tokens that have a target (lesson 02)."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())


class TrainingRun(NamedTuple):
    model: Transformer
    optimizer: torch.optim.Optimizer
    losses: dict[str, float]  # by step
    norms: dict[str, float]  # of the gradient before clipping, by step
    gradients: dict[str, Tensor]  # of step 1, unsharded
    parameters: dict[str, Tensor]  # after the last step, unsharded


def train_transformer(
    name, model, batches, args, tp_group=None, loss_of=mean_loss, after_backward=None
) -> TrainingRun:
    """One step on each batch (lesson 02)."""
    losses = {}
    norms = {}
    # AdamW divides by the size of the gradient. A tiny eps would turn the rounding
    # errors of gradients near 0 into full steps, different ones in each run.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)

    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        # One seed for all ranks, so that they sample the same dropout masks.
        torch.manual_seed(args.seed + step)
        optimizer.zero_grad()

        # COMM.label only names the collectives inside, for the communication table.
        with COMM.label(name, "forward"):
            logits = model(tokens_BS)
        with COMM.label(name, "loss"):
            loss = loss_of(logits, target_BS)
        with COMM.label(name, "backward"):
            loss.backward()
        if after_backward is not None:
            with COMM.label(name, "summing"):
                after_backward(model)
        if step == 1:
            gradients = unshard_model(model, "grad")

        with COMM.label(name, "clipping"):
            if tp_group is None:
                norm = norm_by_pytorch(model)
            else:
                norm = global_norm(model, tp_group)
            clip_gradients(model, args.clip, norm)

        # Each rank updates what it holds, and sends nothing. Replicas stay equal only
        # because they start equal and get equal gradients. Nothing else enforces it.
        optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm

    parameters = unshard_model(model, "data")
    return TrainingRun(model, optimizer, losses, norms, gradients, parameters)


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which also handles DTensors; in float64.

    (lesson 02)"""
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients, foreach=False).item()


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), from the slices of all ranks.

    (lesson 02)"""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            x = torch.empty(0)  # no gradient: this is equal to no tensor
        elif isinstance(x, DTensor):
            x = x.full_tensor()  # an all-gather by PyTorch
        else:
            x = unshard(x, shardings_of(p))
        tensors[name] = x.clone()
    return tensors


# endregion


# ==== CARRIED OVER from 03, unchanged
# region


def pad_vocab(full: nn.Module, ranks: int) -> nn.Module:
    """Return a copy of an embedding or a head, padded with rows of zeros.

    (lesson 03)"""
    padded = copy.deepcopy(full)
    for name, p in full.named_parameters():
        missing = -len(p) % ranks  # V = 257, T = 4: 3 rows, so that each rank has 65
        zeros = p.new_zeros(missing, *p.shape[1:])
        setattr(padded, name, nn.Parameter(torch.cat([p.detach(), zeros])))
    return padded


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary, which no rank holds.

    (lesson 03)"""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        low = tokens.min().item()
        high = tokens.max().item()
        text = f"tokens {low} to {high}: the vocabulary is 0 to {vocab_size - 1}"
        raise ValueError(text)


def find_local_rows(tokens: Tensor, v: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, and whether this rank has that token.

    (lesson 03)"""
    row = tokens - rank * v
    is_local = (row >= 0) & (row < v)
    return row.where(is_local, 0), is_local


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group (lesson 03)."""

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size = full.num_embeddings
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        padded = pad_vocab(full, tp_group.size())
        self.weight = shard_parameter(padded.weight, (0, tp_group))  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        check_tokens(tokens_BS, self.vocab_size)
        v = len(self.weight)
        row_BS, is_local_BS = find_local_rows(tokens_BS, v, self.tp_group.rank())
        x_BSD = F.embedding(row_BS, self.weight)
        # Every token is on one rank, and the other ranks add 0: the sum is its row.
        partial_x_BSD = x_BSD * is_local_BS.unsqueeze(-1)
        return self.reduce(partial_x_BSD, self.tp_group)


def vocab_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """Return lesson 02's parallel model, with embedding and head also sharded.

    (lesson 03)"""
    model = tp_transformer(full, tp_group)
    model.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)
    padded_head = pad_vocab(full.lm_head, tp_group.size())
    model.lm_head = ColumnParallelLinear(padded_head, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        # One parameter with two uses: autograd adds up the gradients of both.
        model.lm_head.weight = model.embed_tokens.weight
    for p in [model.embed_tokens.weight, *model.lm_head.parameters()]:
        p.rows = full.config.vocab_size  # the rows after these are padding
    return model.train(full.training)  # in eval mode if full is


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(x)[target] of sharded logits x; see vocab_parallel_cross_entropy.

    (lesson 03)"""

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        padding_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.to(torch.promote_types(logits_BSv.dtype, torch.float32))
        x_BSv = x_BSv.masked_fill(padding_v, float("-inf"))  # exp(−∞) = 0
        # First all-reduce: the largest logit, so that no exp overflows.
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. One rank has its column, the others add 0.
        column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
        picked_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(is_local_BS, 0)
        if smoothing:  # Σ q·(x − m) instead, in the same all-reduce
            picked_BS = (1 - smoothing) * picked_BS
            picked_BS += (
                smoothing / vocab_size * x_BSv.masked_fill(padding_v, 0).sum(-1)
            )
        loss_BS = sum_BS.log() - all_reduce(picked_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        has_target_BS = target_BS != ignore
        ctx.save_for_backward(
            softmax_BSv, column_BS, is_local_BS, has_target_BS, padding_v
        )
        ctx.vocab_size = vocab_size
        ctx.smoothing = smoothing
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(has_target_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # Nothing is sent: upstream_BS is equal on all ranks, because they all computed
        # the same loss, and softmax − q needs this rank's columns only.
        softmax_BSv, column_BS, is_local_BS, has_target_BS, padding_v = (
            ctx.saved_tensors
        )
        smooth_target = ctx.smoothing / ctx.vocab_size  # ε/V, for every token
        grad_BSv = (softmax_BSv - smooth_target).masked_fill(padding_v, 0)
        onehot_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -onehot_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored position is 0, but its softmax − q is not.
        grad_BSv = grad_BSv.where(has_target_BS.unsqueeze(-1), 0)
        return grad_BSv.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor,
    target_BS: Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of every token, from logits that are sharded over the TP group.

    (lesson 03)"""
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def make_tied(args) -> Transformer:
    """Return lesson 02's model; with --tie, head and embedding share one weight.

    (lesson 03)"""
    full = make_transformer(args)
    if args.tie:
        # An embedding starts with a standard deviation of 1, which is much for a head:
        # its logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


# endregion


# ==== CARRIED OVER from 04, unchanged
# region


def pad_batch(tokens_BS: Tensor, target_BS: Tensor, ranks: int) -> tuple:
    """Positions at the end of a batch, so that T divides them: [B, S] → [B, ⌈S/T⌉·T].

    (lesson 04)"""
    missing = -tokens_BS.shape[1] % ranks
    tokens_BS = F.pad(tokens_BS, (0, missing), value=PAD)
    return tokens_BS, F.pad(target_BS, (0, missing), value=IGNORE)


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """The ranks' terms are summed, and each keeps its slice of positions.

    (lesson 04)"""
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


class GatherThenLinear(torch.autograd.Function):
    """All-gather the sequence, then linears; this rank's slice is kept for backward.

    (lesson 04)"""

    @staticmethod
    def forward(ctx, x_BsD: Tensor, tp_group, *parameters: Tensor) -> tuple:
        weights, biases = parameters[::2], parameters[1::2]  # they come in turn
        ctx.save_for_backward(x_BsD, *weights)
        ctx.tp_group = tp_group
        x_BSD = all_gather(x_BsD, 1, tp_group)
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        x_BsD, *weights = ctx.saved_tensors
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)  # the extra all-gather
        grads, partial_grad_BSD = [], 0
        for grad_BSf, weight in zip(grads_BSf, weights):
            grad_Rf = grad_BSf.flatten(0, 1)  # R rows: all tokens
            grads += [grad_Rf.T @ x_BSD.flatten(0, 1), grad_Rf.sum(0)]
            partial_grad_BSD = partial_grad_BSD + grad_BSf @ weight
        # Each rank used all of x, with its own columns: it has a term of dL/dx for
        # every position. Sum them over ranks, and keep this rank's positions.
        grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)
        return grad_BsD, None, *grads


def gather_then_apply_each(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Column-parallel linears of a split sequence: one all-gather for all of them.

    (lesson 04)"""
    parameters = [p for linear in linears for p in (linear.weight, linear.bias)]
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same as plain autograd does it: all of x is kept, one all-gather less.

    (lesson 04)"""
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


def split_sequence(
    layer: DecoderLayer, tp_group, project=gather_then_apply_each
) -> None:
    """Edit a layer of tp_transformer: between its linears the sequence is split.

    (lesson 04)"""
    layer.self_attn.project = project
    layer.self_attn.o_proj.reduce = reduce_scatter_sequence
    layer.mlp.up_proj = LinearWithInputComm(layer.mlp.up_proj, project)
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)  # of [B, s, D]


def sp_transformer(
    full: Transformer, tp_group: dist.ProcessGroup, save_gathered: bool = False
) -> Transformer:
    """Lesson 03's model with the sequence split between its linears (lesson 04)."""
    project = gather_and_save if save_gathered else gather_then_apply_each
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, project)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, project)
    return model.train(full.training)  # in eval mode if full is


def all_reduce_replicated_gradients(model: nn.Module, tp_group) -> None:
    """Sum the gradients of replicated parameters over the TP group, before clipping.

    (lesson 04)"""
    trained = [p for p in model.parameters() if p.grad is not None]
    replicated = [p for p in trained if not getattr(p, "shardings", ())]
    flat = torch.cat([p.grad.flatten() for p in replicated])
    sums = all_reduce(flat, tp_group).split([p.numel() for p in replicated])
    for p, grad in zip(replicated, sums):
        p.grad.copy_(grad.view_as(p))


class Checkpointed(nn.Module):
    """A module that keeps its input for backward, and computes the rest again there.

    (lesson 04)"""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return checkpoint(self.inner, *inputs, use_reentrant=False)


def sp_plan(keyword: str = "x_BSD", local: bool = True) -> dict:
    """PyTorch's way to say all this, for this model and for Hugging Face's alike.

    (lesson 04)"""
    by_keyword = parallel.PrepareModuleInput(  # it is called with keywords alone
        input_kwarg_layouts={keyword: Shard(1)},
        desired_input_kwarg_layouts={keyword: Replicate()},
    )
    gather = parallel.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    column, norm = parallel.ColwiseParallel(), parallel.SequenceParallel()
    row = parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    embedding = parallel.RowwiseParallel(  # a norm takes a plain tensor for a slice
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
    )
    head = parallel.ColwiseParallel(  # logits stay a DTensor: loss_parallel wants one
        input_layouts=Shard(1), use_local_output=False
    )
    return {
        "embed_tokens": embedding,
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": by_keyword,
        "layers.*.self_attn.q_proj": column,
        "layers.*.self_attn.k_proj": column,
        "layers.*.self_attn.v_proj": column,
        "layers.*.self_attn.o_proj": row,
        "layers.*.post_attention_layernorm": norm,
        "layers.*.mlp": gather,
        "layers.*.mlp.up_proj": column,
        "layers.*.mlp.down_proj": row,
        "norm": norm,
        "lm_head": head,
    }


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables and explains errors. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import argparse
import gc
import inspect
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


class CommCounter:
    """Counts collectives, and tells other ranks which one this rank is in."""

    def __init__(self):
        self.calls = Counter()  # Call → number of calls
        self.bytes = Counter()  # Call → bytes of payload
        self.run = ""
        self.phase = ""
        self.store = None  # key-value store that all ranks share
        self.status = "in no call"
        self.entered = Counter()  # number of calls this rank has entered, by group

    @contextmanager
    def label(self, run: str, phase: str):
        """Within `with`: collectives are counted as this phase of this run."""
        before = [self.run, self.phase]
        self.run = run
        self.phase = phase
        try:
            yield
        finally:  # calls without a label are the report's own and are in no table
            self.run, self.phase = before

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        call = Call(self.run, self.phase, collective, axis)
        self.calls[call] += 1
        self.bytes[call] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one collective with a payload of copies · x.nbytes bytes."""
        axis = group.group_desc
        self.count(collective, copies * x.nbytes, axis)
        ranks = dist.get_process_group_ranks(group)
        with self.blocking(f"{collective} of {list(x.shape)} over {axis}", ranks):
            yield

    @contextmanager
    def blocking(self, call: str, ranks: list[int]):
        """Around a call that returns only after all these ranks have entered it."""
        before = self.status
        # The n-th call of one rank is matched with the n-th call of the others.
        self.entered[str(ranks)] += 1
        self.set_status(f"in call {self.entered[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.set_status(before)  # not after an error: this rank is still in the call

    def set_status(self, status: str) -> None:
        """Write down where this rank is, so that others can read it after an error."""
        self.status = status
        if self.store is not None:
            self.store.set(f"status/{dist.get_rank()}", status)

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run?"""
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        try:
            self.store.wait(keys, timedelta(seconds=5))
        except RuntimeError:  # some rank did not raise
            return False
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = ["runs", "gradients", "replicas", "norms", "losses", "parameters"]


def rel_diff(got, expected) -> float:
    """max|got − expected| / max|expected|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    diff = ((got - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok
        self.raised = {}  # run → the error that ended it
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int]) -> None:
        """Print the first two lines. size: letter of the shape legend → number."""
        self.mesh = mesh
        self.data["mesh"] = mesh
        self.data["size"] = size
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, kind: str, name: str, diff: float, allowed: float = 0.0) -> bool:
        """Record one comparison of this rank. Return whether it holds."""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        self.checks[name] = {"kind": kind, "diff": diff, "allowed": allowed, "ok": ok}
        return ok

    def expect(self, row: dict, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(row[column] - predicted)):
            off.append(column)
        row.setdefault("predicted", {})[column] = f"{name}: predicted {predicted:,}"

    @contextmanager
    def column(self, run: str):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if is_lost(error) or not COMM.all_raised(run, error):
                raise
            COMM.set_status("in no call")
            if dist.get_rank() == 0:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            print(wrap(f"   {run} raised {self.raised[run]}"), flush=True)
        self.check("runs", f"{run} completes", int(run in self.raised))

    def table(self, key: str, rows: list[dict], hide: list[str] = ()) -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank. Cells that failed
        on any rank are marked ✗. row["predicted"] maps a cell to what was predicted for
        it, printed below the table if it failed. hide: columns to keep, not to print.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for row, other in zip(rows, rows_of_rank):
                merge_row(row, other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if rows:
            self.print_rows(rows, hide)

    def print_rows(self, rows: list[dict], hide: list[str]) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted"):
                continue
            texts = [name]
            for row in rows:
                mark = "✗" if name in row.get("off", []) else ""
                texts.append(cell(name, row[name]) + mark)
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        for row in rows:
            lines.extend(explain_row(row))
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed: float = 0.0, fold=str) -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        all its values and the largest relative difference of any of them.
        """
        allowed = allowed or self.allowed
        nothing = torch.empty(0)  # stands for what a run does not have
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                rows[label].update(dict.fromkeys(self.raised, "raised"))
                if len(runs) > 1:  # otherwise there is nothing to compare with
                    rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                value = values.get(name, nothing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                diff = rel_diff(value, reference.get(name, nothing))
                row["diff"] = max(row["diff"], diff)
                if not self.check(key, f"{name}, {run}", diff, allowed):
                    row["off"].append(run)
        self.table(key, list(rows.values()))

    def ledger(self, formulas: dict[Call, str], size: dict, steps: int = 1) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → "calls × bytes per call", as it is printed and evaluated.
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            ranks = self.mesh.get(call.axis, 1)
            if call.run not in runs or ranks == 1:  # one rank sends nothing
                continue
            formula = formulas.get(call, "0 × 0")
            calls, each = [evaluate(factor, size) for factor in formula.split(" × ")]
            if calls == 0 and COMM.calls[call] == 0:
                continue
            row = call._asdict()
            row["calls"] = per_step(COMM.calls[call], steps)
            row["bytes"] = per_step(COMM.bytes[call], steps)
            row["formula"] = formula
            row["ring"] = ring_bytes(call.collective, row["bytes"], ranks)
            name = " ".join(call)
            self.expect(row, "calls", "calls", name, calls)
            self.expect(row, "bytes", "bytes", name, calls * each)
            rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = []
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        self.table("communication", rows, hide)

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks: the largest diff, and the ranks where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                if name not in merged:
                    merged[name] = dict(check, name=name, ranks=[])
                merged[name]["diff"] = max(merged[name]["diff"], check["diff"])
                if not check["ok"]:
                    merged[name]["ok"] = False
                    merged[name]["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """PASS or FAIL; above FAIL, the worst failed check of each kind."""
        checks = sorted(self.merge_checks(), key=lambda check: -check["diff"])
        kinds = dict.fromkeys(CAUSES_FIRST)
        kinds.update(dict.fromkeys(check["kind"] for check in checks))
        counts = []
        print()
        for kind in kinds:
            of_kind = [check for check in checks if check["kind"] == kind]
            failed = [check for check in of_kind if not check["ok"]]
            if failed:
                worst = failed[0]
                diff = f"off by {worst['diff']:.3g}, allowed {worst['allowed']:.3g}"
                print(wrap(f"✗ {worst['name']}: {diff}, on ranks {worst['ranks']}"))
                counts.append(f"{kind} {len(failed)}/{len(of_kind)}")
        text = f"failed: {', '.join(counts)}"
        if not counts:
            text = f"{len(checks)} checks, worst difference {checks[0]['diff']:.1e}"
            text += f" (allowed {checks[0]['allowed']:.0e})"
        self.data["verdict"] = "FAIL" if counts else "PASS"
        self.data["checks"] = checks
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return wrap(f"{self.data['verdict']}  {self.data['lesson']}  {text}")


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def merge_row(row: dict, other: dict, rank: int) -> None:
    """Add to a row what the same row of another rank says about failed checks."""
    for column in other.get("off", []):
        if column not in row["off"]:
            row["off"].append(column)
    if other.get("off"):
        row.setdefault("off_ranks", []).append(rank)
    if "diff" in row:
        row["diff"] = max(row["diff"], other["diff"])


def explain_row(row: dict) -> list[str]:
    """Lines below a table: what was predicted, and where, if a check failed."""
    lines = []
    for column in row.get("off", []):
        if column in row.get("predicted", {}):
            lines.append(f"   ✗ {column} of {row['predicted'][column]}")
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = next(iter(row.values()))
        lines.append(f"   ✗ {label}: fails on ranks {ranks}; the row shows rank 0")
    return lines


def cell(name: str, value) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "ok" if value else "✗"
    if isinstance(value, float):
        return f"{value:.1e}" if name == "diff" else f"{value:#.7g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, sections: int, **sizes: int) -> Parser:
    """The flags that all lessons share, and integer flags with their defaults.

    sections: how many sections the output has. sizes: flag → default; 0 for a default
    that is derived from the mesh.
    """
    parser = Parser(
        description=(doc or "").partition("How to read")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, default in dict(sizes, seed=1, timeout=60).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    numbers = range(1, sections + 1)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=numbers, metavar="N", help=text)
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy."""
    owner, _, name = edit["target"].rpartition(".")
    definition = getattr(module[owner], name) if owner else module[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {} if owner else module  # where the edited copy is defined
    exec(source.replace(edit["old"], edit["new"]), module, scope)
    if owner:
        setattr(module[owner], name, scope[name])


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, and where somebody reported it."""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    return "\n".join(lines)


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front."""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def is_lost(error: Exception) -> bool:
    """Is it the transport's: a timeout, or a connection that the other end closed?"""
    # The last two are what TORCH_DISTRIBUTED_DEBUG=DETAIL reports instead of a timeout.
    words = "[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe|monitoredBarrier|mismatch"
    is_found = re.search(words, first_line(error)) is not None
    return isinstance(error, RuntimeError) and is_found


def who_is_missing(statuses: list[str]) -> str:
    """What the statuses of all ranks say for certain; no rank is blamed on a guess."""
    waiting = []
    missing = []
    for rank, status in enumerate(statuses):
        ranks = waiting if status.startswith("in call") else missing
        ranks.append(rank)
    if not waiting:
        return "a call failed that is not one of the lesson's own"
    if missing:
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        text = f"{who} not in a collective, while ranks {waiting} are waiting in one: "
        return text + "it hung, crashed or skipped a call"
    if len(set(statuses)) == 1:
        return "a collective failed although every rank had entered it"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def describe_hang(error: Exception) -> str:
    """Which call each rank is in, by what it wrote down itself."""
    ranks = range(dist.get_world_size())
    statuses = [COMM.store.get(f"status/{rank}").decode() for rank in ranks]
    lines = [wrap(f"error: {who_is_missing(statuses)}")]
    for rank in ranks:
        lines.append(f"  rank {rank}: {statuses[rank]}"[:88])
    lines.append(wrap(f"  transport: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank."""
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    if is_lost(error):  # let others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif is_lost(error):
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # for torchrun's report
        extra = {"timestamp": str(int(time.time()))}
        details = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(details))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def read_flags(parse_args, module: dict) -> argparse.Namespace:
    """The command line; the process ends here if it is wrong, or asks for a list."""
    try:
        if not module["__doc__"]:
            raise ValueError("PYTHONOPTIMIZE=2 removes docstrings, our training text")
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            for name, edit in module["BREAKS"].items():
                print(f"{name:<14}{edit['what']}")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: one rank shows no bug")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        # One rank of each host reports: on several hosts the flags may differ.
        is_reporter = os.environ.get("LOCAL_RANK", "0") == "0"
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    dist.init_process_group(
        backend, timeout=limit, store=store, rank=rank, world_size=ranks
    )
    return store


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis."""

    def on_sigterm(*_):
        exit_rank(1, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    args.timeout = min(args.timeout, 5)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        command = f"torchrun --standalone --nproc_per_node={module.get('RANKS', 2)}"
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
    torch.set_num_threads(1)  # ranks share the cores: more threads would be slower
    torch.manual_seed(args.seed)
    diagnosis = diagnosis_of(module["BREAKS"][args.bug]) if args.bug else ""
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.set_status("in no call")
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{diagnosis}\n{line}".strip(), flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        exit_rank(1, line, is_reporter=False)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
