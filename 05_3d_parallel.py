"""Lesson 05: data × pipeline × tensor parallelism, on one mesh of ranks.

Three ways to spread a model, at right angles to each other: tensor parallelism cuts
every matrix, a pipeline cuts the stack of layers into stages, data parallelism cuts the
batch. A rank has one place on each of the three axes, and one group along each.

Run it (8 ranks as 2 × 2 × 2; a laptop will do, and 1, 2 and 4 ranks work too):

    torchrun --standalone --nproc_per_node=8 05_3d_parallel.py

What you will see: which rank is where on the mesh; the model trained on 8 ranks beside
one process that sees the whole batch: losses, every gradient, every parameter after the
last step; when each stage computed and when it waited because the pipeline fills and
drains (the bubble); what each axis sends, to the byte; the same by PyTorch's own parts.
`--pp 4 --simulate-compute 20` shows a pipeline's true shape, `--schedule gpipe` the
other schedule, `--ragged` batches of different lengths, `--zero` a sharded optimizer,
`--save` and `--load` checkpoints that change the mesh, `--break list` the bugs you can
switch on.

New here: the mesh, stages, schedules, sums over replicas, checkpoints. Carried over:
from 04 the layers (sequence parallelism is on), from 03 the loss, from 02 the
transformer, from 01 the parallel layers, from 00 the collectives.

Shapes: B batch, S sequence, D hidden, V vocabulary; T ranks in the TP group, P stages,
    M micro-batches. UPPERCASE is the full size, lowercase this rank's slice: x_bsD is
    a micro-batch of b sequences, s = S/T rounded up tokens of each on this rank.

No dropout here: for masks as in one process, each random number would have to belong
    to a step, a layer and a row, not to a rank. Large systems let them differ.
Needs: torch (and numpy, else torch warns that it is missing).
Sources: Megatron-LM on GPU clusters, arXiv:2104.04473 (3D, 1F1B, bubbles); GPipe,
    arXiv:1811.06965; ZeRO, arXiv:1910.02054; docs.pytorch.org, torch.distributed
    (pipelining, fully_shard, tensor.parallel, checkpoint).
"""

from __future__ import annotations  # names that stand further down may be used

import argparse
import copy
import gc
import json
import math
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
import zlib
from collections import Counter, namedtuple
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

# ==== NEW in 05: data × pipeline × tensor parallelism

# From earlier lessons: COMM counts what is sent, and notes in `with COMM.at(…)` where
# this rank is (00); PAD is no token, IGNORE no target (02).

AXES = "pp", "dp", "tp"  # outermost first


def make_mesh(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of {"pp": P, "dp": DP, "tp": T}, and two more.

    Rank = (stage · DP + replica) · T + tp_rank. The last axis is the innermost: ranks
    of a TP group are neighbours, on the fastest links, since they talk in every layer;
    those of a PP group are the farthest apart, since they talk once a stage.

    "back" joins the same ranks as "pp", for gradients on their way back. NCCL does the
    messages of a group one after the other: an activation whose receiver is still busy
    would hold up the gradient behind it. "ends" joins the first and the last stage, for
    a tied weight; it is None on stages between. All three move along pp, and are
    counted there.
    """
    groups = mesh_groups(sizes, timeout)
    lines = torch.arange(dist.get_world_size()).view(sizes["pp"], -1).T.tolist()
    ends = [sorted({line[0], line[-1]}) for line in lines]
    for name, ranks in (("back", lines), ("ends", ends)):
        groups[name], _ = dist.new_subgroups_by_enumeration(
            ranks, timeout=timedelta(seconds=timeout), group_desc="pp"
        )
    return groups


# The pipeline: the layers in stages, the batch in micro-batches.


def layers_of(stage: int, num_stages: int, layers: int) -> range:
    """The layers of a stage: as equal as can be, the first stages have one more.

    The step goes at the pace of the slowest stage. Embedding and head are work too:
    large systems give the stages at the ends fewer layers.
    """
    each, more = divmod(layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


class Stage(nn.Module):
    """One stage: embedding on the first, then layers, norm and head on the last.

    Parameters keep the names that they have in the full model, layers their numbers.

    Args:
        full: the single-process model, identical on every rank.
        groups: of make_mesh; each stage is split over its TP group, as in lesson 04.

    Shapes: tokens [b, S] on the first stage, else x_bsD [b, s, D] of the stage before
        → logits [b, S, v] on the last, else x_bsD for the next. S is given besides:
        T·s may be more, with padding.
    """

    def __init__(self, full: Transformer, groups: dict[str, dist.ProcessGroup]):
        super().__init__()
        stage, num_stages = groups["pp"].rank(), groups["pp"].size()
        self.first, self.last = stage == 0, stage == num_stages - 1
        tp_group, shared = groups["tp"], None
        self.tied = full.lm_head.weight is full.embed_tokens.weight
        if self.first:
            self.embed_tokens = SPEmbedding(full.embed_tokens, tp_group)
        mine = layers_of(stage, num_stages, len(full.layers))
        layers = {str(i): SPDecoderLayer(full.layers[i], tp_group) for i in mine}
        self.layers = nn.ModuleDict(layers)
        if self.last:
            self.norm = copy.deepcopy(full.norm)
            if self.tied and self.first:  # else the last stage has a copy: sum_tied
                shared = self.embed_tokens.weight
            self.lm_head = SPHead(full.lm_head, tp_group, shared)
        for name, table in full.named_buffers():
            self.register_buffer(name, table.clone(), persistent=False)

    def forward(self, x: Tensor, S: int) -> Tensor:
        if self.first:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, self.cos[:S], self.sin[:S], self.future[:S, :S])
        return self.lm_head(self.norm(x), S) if self.last else x


def schedule(
    kind: str, stage: int, num_stages: int, num_microbatches: int
) -> list[tuple[str, int]]:
    """What a stage does, in order: [("forward", 0), …, ("backward", 0), …].

    "gpipe": all forwards, then all backwards. Every micro-batch's activations are kept
    at the same time (arXiv:1811.06965).
    "1f1b": as many forwards as there are stages to follow, then one forward, one
    backward in turn, then the backwards that are left. A stage keeps P − stage
    micro-batches at most, however many there are (arXiv:2104.04473, sec. 2.2).

    Both take the same time: stages wait while the pipeline fills and drains, P − 1
    micro-batches long, which is the bubble. 1F1B saves memory.
    """
    P, M = num_stages, num_microbatches
    warm_up = M if kind == "gpipe" else min(P - stage - 1, M)
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(M - warm_up):
        steps += [("forward", warm_up + i), ("backward", i)]
    return steps + [("backward", i) for i in range(M - warm_up, M)]


def send(parts: list[Tensor], to: int, group: dist.ProcessGroup) -> list[tuple]:
    """Start sending tensors to stage `to`, and do not wait; what to wait for later.

    A send ends when the other side receives. Two neighbours that both waited for their
    send, one of an activation, one of a gradient, would wait for ever (--break order).
    """
    started, rank = [], dist.get_global_rank(group, to)
    for part in parts:
        part = part.detach().contiguous()
        COMM.count("send/recv", part.nbytes, group.group_desc)
        with COMM.at(f"message to rank {rank}", "send", [dist.get_rank(), rank]):
            work = dist.isend(part, group=group, group_dst=to)
        started.append((work, rank, part))  # a tensor must live until it is sent
    return started


def end_of(started: list[tuple]) -> None:
    """Wait until what `send` started has been received."""
    for work, rank, _ in started:
        with COMM.at(f"message to rank {rank}", "end_of", [dist.get_rank(), rank]):
            work.wait()


def receive(like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Wait for a tensor shaped `like` from stage `source`."""
    out = torch.empty_like(like)
    rank = dist.get_global_rank(group, source)
    with COMM.at(f"message from rank {rank}", "receive", [rank, dist.get_rank()]):
        dist.recv(out, group=group, group_src=source)
    return out


class Pipeline:
    """Runs a stage's list of steps: receive, compute, send; and notes when.

    Communication: per micro-batch and stage boundary b·s·D elements forward, with the
        shape ahead of them (4 int64), and b·s·D elements backward.
    """

    def __init__(self, stage: nn.Module, loss_of, groups, dtype: torch.dtype):
        self.stage, self.loss_of, self.dtype = stage, loss_of, dtype
        self.pp, self.back = groups["pp"], groups["back"]
        self.number = self.pp.rank()
        self.first = self.number == 0
        self.last = self.number == self.pp.size() - 1

    def run(self, steps: list, micro_batches: list, device: str) -> Tensor:
        """All steps of a list; the sum of the micro-batch losses (0 but on the last).

        micro_batches: [2, b, S] each, tokens and targets; None on stages in between.
        """
        self.micro_batches, self.device = micro_batches, device
        self.kept, self.in_flight, self.events = {}, 0, []
        self.bytes_of, self.peak = {}, 0  # bytes kept for backward, by micro-batch
        self.losses, self.returned = [], []
        for phase, i in steps:
            COMM.phase = phase
            (self.forward if phase == "forward" else self.backward)(i)
        end_of(self.returned)
        COMM.phase = ""
        return sum(self.losses, torch.zeros((), dtype=self.dtype, device=device))

    def forward(self, i: int) -> None:
        """Micro-batch i through this stage, and on to the next."""
        if self.first:
            x = self.micro_batches[i][0]
            S = x.shape[1]
        else:
            with self.clock("wait", i):
                S, x = self.receive_activation()
            x.requires_grad_()
        saved = SavedBytes([*self.stage.parameters(), *self.stage.buffers()])
        with self.clock("forward", i), saved:
            y = self.stage(x, S)
            if self.last:
                y = self.loss_of(y, self.micro_batches[i][1])
                self.losses.append(y.detach())
        sent = []
        if not self.last:
            shape = torch.tensor([S, *y.shape], device=self.device)
            sent = send([shape, y], self.number + 1, self.pp)
        self.kept[i] = x, y, sent  # with all that autograd keeps for backward
        self.in_flight = max(self.in_flight, len(self.kept))
        self.bytes_of[i] = saved.total()
        self.peak = max(self.peak, sum(self.bytes_of[k] for k in self.kept))

    def receive_activation(self) -> tuple[int, Tensor]:
        """This stage cannot know how long the sequences are: the shape comes first."""
        shape = torch.empty(4, dtype=torch.int64, device=self.device)
        S, *shape = receive(shape, self.number - 1, self.pp).tolist()
        like = torch.empty(shape, dtype=self.dtype, device=self.device)
        return S, receive(like, self.number - 1, self.pp)

    def backward(self, i: int) -> None:
        """The gradient of micro-batch i through this stage, and to the one before."""
        x, y, sent = self.kept.pop(i)
        grad = None
        if not self.last:
            with self.clock("wait", i):
                grad = receive(y, self.number + 1, self.back)  # shaped as y
            end_of(sent)  # no wait: the gradient answers this message, so it arrived
        with self.clock("backward", i):
            y.backward(grad)
        if not self.first:
            self.returned += send([x.grad], self.number - 1, self.back)

    @contextmanager
    def clock(self, what: str, i: int):
        """Note when something began and ended, by the clock that all ranks share."""
        start = time.time()
        yield
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.events.append((what, i, start, time.time()))


# The batch: cut over replicas and into micro-batches, dealt out to a TP group.


def cut_batch(batch: tuple, dp_group, num_microbatches: int, ragged: bool) -> list:
    """This replica's rows of the batch, as M micro-batches [2, b, S].

    ragged: each without the columns that are nothing but padding, so that every
    replica and every micro-batch has its own length.
    """
    mine = shard(torch.stack(batch), 1, dp_group)
    parts = split(mine, 1, num_microbatches)
    if not ragged:
        return parts
    lengths = [int((tokens != PAD).any(0).sum()) for tokens, _ in parts]
    return [part[..., :length].contiguous() for part, length in zip(parts, lengths)]


def share_batch(load, tp_group: dist.ProcessGroup, device: str) -> list[Tensor]:
    """The micro-batches that the first rank of a TP group loads, on all of them.

    All ranks of a TP group must compute on the same tokens. The others do not know
    their number: the shape is broadcast first, then the batch.
    """
    loads = tp_group.rank() == 0
    parts = load() if loads else []
    count = broadcast(torch.tensor(len(parts), device=device), 0, tp_group)
    return [
        broadcast_any(parts[i] if loads else None, tp_group, device)
        for i in range(count)
    ]


def broadcast_any(x: Tensor | None, tp_group, device: str) -> Tensor:
    """[2, b, S] from the group's first rank, whatever b and S are; None elsewhere."""
    shape = torch.tensor([0, 0, 0] if x is None else x.shape, device=device)
    shape = broadcast(shape, 0, tp_group).tolist()
    if x is None:
        x = torch.empty(shape, dtype=torch.int64, device=device)
    return broadcast(x, 0, tp_group)


def count_targets(micro_batches: list[Tensor], dp_group) -> Tensor:
    """Tokens with a target in the whole batch, of all micro-batches and replicas.

    Communication: one all-reduce of one int64 over dp.
    """
    here = sum((target != IGNORE).sum() for _, target in micro_batches)
    return all_reduce(here, dp_group)


def part_of_mean(loss_bS: Tensor, target_bS: Tensor, batch_targets: Tensor) -> Tensor:
    """What a micro-batch adds to the mean loss of the whole batch.

    Every token weighs the same, wherever it is: divided by the number in the batch, not
    in the micro-batch, parts just add up, over micro-batches and over replicas; and so
    do their gradients.
    """
    return loss_bS.sum() / batch_targets


# After the last backward: sums of gradients, the norm, the update.


def sum_tied(stage: Stage, ends: dist.ProcessGroup | None) -> None:
    """Tied embedding and head on different stages: the gradient is the sum of both.

    Each of the two stages has a copy of the weight. The copies started equal, get the
    same gradient here and take the same steps: they stay equal.
    Communication: one all-reduce of v·D elements between first and last stage.
    """
    if stage.tied and stage.first != stage.last and (stage.first or stage.last):
        weight = (stage.embed_tokens if stage.first else stage.lm_head).weight
        weight.grad = all_reduce(weight.grad, ends)


def is_copy(stage: Stage, name: str) -> bool:
    """Is this the last stage's copy of the embedding?"""
    return stage.tied and not stage.first and name == "lm_head.weight"


def counted_share(stage: Stage, name: str, tp_group) -> float:
    """By how much a parameter's squares count here in the norm of the whole model.

    A slice counts fully. What all T ranks of a TP group hold whole counts 1/T on each,
    so once; the copy of a tied weight has been counted on the first stage.
    """
    if is_copy(stage, name):
        return 0.0
    return 1.0 if tell_placement(stage, name) else 1 / tp_group.size()


class FlatAdamW:
    """AdamW on all parameters of a rank as one vector; gradients summed over replicas.

    One vector: one collective for all of them. AdamW treats every number on its own, so
    it does not matter how the vector is cut: with `zero` a rank keeps 1/DP of it, and
    of the two moments, and of the gradient once it is summed (ZeRO stage 1, with the
    reduce-scatter of stage 2: arXiv:1910.02054).

    Communication: n elements (padded so that DP divides them): one all-reduce over dp;
        with `zero` one reduce-scatter, and after the update one all-gather.
    """

    def __init__(self, stage: Stage, groups: dict[str, dist.ProcessGroup], zero: bool):
        self.parameters = dict(stage.named_parameters())
        self.groups, self.dp_group, self.zero = groups, groups["dp"], zero
        own = self.cut(self.flatten(self.parameters.values()))
        self.own = nn.Parameter(own)  # a copy; each step overwrites the model's from it
        self.adamw = torch.optim.AdamW([self.own], lr=1e-3, eps=1e-4)
        counts = [
            torch.full_like(p, counted_share(stage, name, groups["tp"]))
            for name, p in self.parameters.items()
        ]
        self.counts = self.cut(self.flatten(counts))

    def flatten(self, tensors) -> Tensor:
        """One vector of many tensors."""
        flat = torch.cat([x.detach().flatten() for x in tensors])
        return F.pad(flat, (0, -len(flat) % self.dp_group.size()))

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a vector, shaped as the parameters are."""
        sizes = [p.numel() for p in self.parameters.values()]
        parts = flat[: sum(sizes)].split(sizes)
        named = self.parameters.items()
        return {name: x.view(p.shape) for (name, p), x in zip(named, parts)}

    def cut(self, flat: Tensor) -> Tensor:
        """This replica's part of a vector: a slice with `zero`, else all of it."""
        return shard(flat, 0, self.dp_group) if self.zero else flat.clone()

    def whole(self, part: Tensor) -> Tensor:
        """The vector whose part this is."""
        return all_gather(part, 0, self.dp_group) if self.zero else part.detach()

    def sum_over_replicas(self) -> None:
        """Each replica's gradient is a part of the batch's: they are added up."""
        flat = self.flatten(p.grad for p in self.parameters.values())
        if self.zero:
            self.own.grad = reduce_scatter(flat, 0, self.dp_group)
        else:
            self.own.grad = all_reduce(flat, self.dp_group)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient so that its norm over the mesh is at most that; the norm.

        Communication: one all-reduce of one float64 over tp, pp, and dp with `zero`.
        """
        squares = (self.own.grad.double().square() * self.counts).sum()
        for axis in ("tp", "pp", *(["dp"] if self.zero else [])):
            squares = all_reduce(squares, self.groups[axis])
        norm = squares.sqrt().item()
        self.own.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def step(self) -> None:
        """Update this replica's part, and put the whole back into the model."""
        self.adamw.step()
        self.put_back()
        self.own.grad = None

    def put_back(self) -> None:
        """The model's parameters from the vector's parts."""
        for name, x in self.unflatten(self.whole(self.own)).items():
            self.parameters[name].data.copy_(x)
            self.parameters[name].grad = None


class MeshTraining:
    """One model in training on the whole mesh, as this rank takes part in it."""

    def __init__(self, full: Transformer, groups: dict[str, dist.ProcessGroup], args):
        self.groups, self.args = groups, args
        self.stage = Stage(full, groups)
        dtype = next(self.stage.parameters()).dtype
        self.pipeline = Pipeline(self.stage, self.loss, groups, dtype)
        self.optimizer = FlatAdamW(self.stage, groups, args.zero)
        pp = groups["pp"]
        self.steps = schedule(args.schedule, pp.rank(), pp.size(), args.microbatches)

    def loss(self, logits_bSv: Tensor, target_bS: Tensor) -> Tensor:
        """A micro-batch's part of the batch's mean loss (lesson 03)."""
        COMM.what = "loss"
        loss_bS = vocab_parallel_cross_entropy(
            logits_bSv, target_bS, self.groups["tp"], self.args.vocab_size
        )
        COMM.what = "layers"
        return part_of_mean(loss_bS, target_bS, self.batch_targets)

    def gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Forward and backward of a batch; its mean loss where the last stage is."""
        args, groups = self.args, self.groups
        micro_batches = None
        COMM.what = "batch"
        if self.stage.first or self.stage.last:  # the others need no tokens
            load = lambda: cut_batch(
                batch, groups["dp"], args.microbatches, args.ragged
            )
            micro_batches = share_batch(load, groups["tp"], args.device)
        if self.stage.last:
            self.batch_targets = count_targets(micro_batches, groups["dp"])
        COMM.what = "layers"
        loss = self.pipeline.run(self.steps, micro_batches, args.device)
        COMM.what = "replicated"
        mend_replicated(self.stage, groups["tp"])
        COMM.what = "tied"
        sum_tied(self.stage, groups["ends"])
        COMM.what = "replicas"
        self.optimizer.sum_over_replicas()
        return loss

    def update(self) -> float:
        """Clip and step; the gradient's norm before clipping."""
        COMM.what = "norm"
        norm = self.optimizer.clip(self.args.clip)
        COMM.what = "replicas"
        self.optimizer.step()
        COMM.what = ""
        return norm


# Checkpoints: saved under one mesh, loaded under another.

COMPLETE = "complete.json"  # the last file of a checkpoint


def fingerprint(file: Path) -> list[int]:
    """Size and checksum of a file."""
    data = file.read_bytes()
    return [len(data), zlib.crc32(data)]


def settings(args) -> dict:
    """What must be alike for a checkpoint to continue a run; the mesh need not be."""
    names = "hidden heads kv_heads layers batch_size seq_len vocab_size seed dtype tie"
    alike = {name: getattr(args, name) for name in [*names.split(), "clip"]}
    text = zlib.crc32(Path(__file__).read_bytes())  # the lines that it trains on
    return (
        {"lesson": "05_3d_parallel"} | alike | {"the text of this file, checksum": text}
    )


def find_checkpoint(folder: Path, args) -> tuple[Path, int]:
    """The newest finished checkpoint of a folder, and its step.

    Raises: ValueError where there is none, where a file of it is missing or damaged,
        or where it belongs to another model or run.
    """
    found = sorted(folder.glob("step_[0-9]*")) if folder.is_dir() else []
    if not found:
        raise ValueError(f"--load {folder}: no finished checkpoint step_… in there")
    path = found[-1]
    try:
        about = json.loads((path / COMPLETE).read_text())
        files, step = dict(about["files"]), int(about["step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"--load {path}: no {COMPLETE} of this lesson in it: not one of its "
            "checkpoints, or a damaged one"
        ) from None
    for name, wanted in settings(args).items():
        if about.get(name) != wanted:
            raise ValueError(
                f"--load {path}: made with {name} {about.get(name)}, this run has "
                f"{wanted}"
            )
    for name, wanted in files.items():
        if not (path / name).is_file() or fingerprint(path / name) != wanted:
            raise ValueError(
                f"--load {path}: the file {name} is missing or damaged; without this "
                "folder the one before it is taken"
            )
    return path, step


def in_whole(x: Tensor, name: str, stage: Stage, vocab_size: int, mesh) -> DTensor:
    """A rank's slice as a DTensor, which knows its place in the whole tensor.

    So torch.distributed.checkpoint can hand any other mesh its parts of it. Rows that
    pad the vocabulary are left out: how many there are depends on T.
    """
    x = x.detach()
    placement = tell_placement(stage, name)
    if not placement:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    ((_, dim),) = placement
    shape = list(x.shape)
    shape[dim] *= mesh.size()
    if name.startswith(("embed_tokens", "lm_head")):
        start = mesh.get_local_rank() * len(x)
        x, shape[0] = x[: max(0, vocab_size - start)], vocab_size
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def state_to_save(training: MeshTraining, moments: dict[str, dict]) -> dict:
    """Parameters and AdamW's moments by the names of the full model.

    Replicas and TP ranks may hold the same tensor: it is written once. A tied head has
    its embedding's name: whichever stages hold it take it from there.
    """
    args, stage, tp_group = training.args, training.stage, training.groups["tp"]
    mesh = DeviceMesh.from_group(tp_group, args.device, mesh_dim_names=("tp",))
    state = {}
    for name, p in training.optimizer.parameters.items():
        shared = "embed_tokens.weight" if is_copy(stage, name) else name
        for kind, x in (("weight", p), *((k, m[name]) for k, m in moments.items())):
            whole = in_whole(x, name, stage, args.vocab_size, mesh)
            state[f"{kind}/{shared}"] = whole
    return state


def save_checkpoint(folder: Path, step: int, training: MeshTraining) -> None:
    """Write folder/step_NNNNNN: whole, or not at all.

    It is written under another name, with a list of its files at the end, and renamed
    when all ranks are done: a rename happens or does not. What a kill leaves behind has
    the other name, and the checkpoints of earlier steps are not touched.
    """
    part, final = folder / f"part_{step:06}", folder / f"step_{step:06}"
    optimizer, first = training.optimizer, dist.get_rank() == 0
    adam = optimizer.adamw.state[optimizer.own]
    moments = {
        kind: optimizer.unflatten(optimizer.whole(adam[kind]))
        for kind in ("exp_avg", "exp_avg_sq")
    }
    with COMM.at(f"saving of step {step}", "save_checkpoint"):
        if first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        dcp.save(state_to_save(training, moments), checkpoint_id=part)
        dist.barrier()
        if first:
            files = {file.name: fingerprint(file) for file in sorted(part.iterdir())}
            mesh = " × ".join(f"{x} {getattr(training.args, x)}" for x in AXES)
            about = settings(training.args) | dict(step=step, mesh=mesh, files=files)
            with open(part / COMPLETE, "w") as file:
                file.write(json.dumps(about, indent=1))
                file.flush()
                os.fsync(file.fileno())
            part.rename(final)
        dist.barrier()


def load_checkpoint(path: Path, step: int, training: MeshTraining) -> None:
    """Fill this rank's parameters and moments from a checkpoint of any mesh."""
    optimizer = training.optimizer
    moments = {
        kind: {n: torch.zeros_like(p) for n, p in optimizer.parameters.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    with COMM.at(f"loading of step {step}", "load_checkpoint"):
        dcp.load(state_to_save(training, moments), checkpoint_id=path)  # in place
    optimizer.own.data = optimizer.cut(optimizer.flatten(optimizer.parameters.values()))
    adam = {k: optimizer.cut(optimizer.flatten(m.values())) for k, m in moments.items()}
    optimizer.adamw.state[optimizer.own] = adam | {"step": torch.tensor(float(step))}


# ==== CARRIED OVER from 00, unchanged


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if it does not divide."""
    if x.shape[dim] % parts:
        raise ValueError(
            f"dim {dim} of {list(x.shape)} has {x.shape[dim]} elements, and "
            f"{x.shape[dim]} % {parts} ranks = {x.shape[dim] % parts}, not 0"
        )
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    Shapes: full [.., I, ..] → [.., I/T, ..], a new tensor. Communication: none.
    Raises: ValueError if T does not divide the dim.
    """
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    Shapes: x [...] → [...]. Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    Shapes: x [.., i, ..] → [.., T·i, ..]. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    Shapes: x [.., I, ..] → [.., I/T, ..]. Communication: 1 call on x's elements.
    Raises: ValueError if T does not divide the dim.
    """
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    Shapes: x [...] → [...], Replicate(). Communication: 1 call on x's elements.
    """
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            dist.broadcast(out, group_src=src, group=group)
    return out


def scatter(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Rank src cuts its x into T parts along dim 0 and hands one to each: → Shard(0).

    Shapes: x [I, ..] on src (elsewhere only its shape counts) → [I/T, ..].
    Communication: 1 call on x's elements.
    """
    parts = split(x.detach(), 0, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("scatter", x, group):
            mine = parts if group.rank() == src else None
            dist.scatter(out, mine, group_src=src, group=group)
    return out


def gather(x: Tensor, dst: int, group: dist.ProcessGroup) -> Tensor | None:
    """Rank dst gets all slices, joined along dim 0; the others get None.

    Shapes: x [i, ..] → [T·i, ..] on dst. Communication: 1 call on T × x's elements.
    """
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    here = group.rank() == dst
    slices = [torch.empty_like(x) for _ in range(group.size())] if here else None
    with COMM.record("gather", x, group, copies=group.size()):
        dist.gather(x, slices, group_dst=dst, group=group)
    return torch.cat(slices) if here else None


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh, the last axis innermost.

    Args:
        sizes: axis → number of ranks, e.g. {"y": 2, "x": 4}, ranks laid out in order.
        timeout: seconds; a new group does not inherit it, its default is 30 minutes.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


class CommCounter:
    """Counts calls and payload bytes of every collective, and notes the last one.

    Payload is the logical tensor: V bytes, whatever the algorithm sends. What a ring
    puts on the wire follows from it (`ring_factor`). The note goes to the job's store
    (a small key-value server that all ranks can reach), so that when a rank hangs, the
    others can say where it was last seen.
    """

    def __init__(self):
        self.rows = {}  # (what, phase, collective, axis) → [calls, bytes]
        self.what, self.phase = "", ""  # labels of what comes next, set by the lesson
        self.seconds = 0.0  # spent in collectives, waiting for others included
        self.store, self.rank = None, 0
        self.place = {"state": "before", "number": 0, "call": "any call", "line": ""}
        self.numbers = {}  # who meet → how many calls they had

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        key = (self.what, self.phase, collective, axis)
        calls, before = self.rows.get(key, (0, 0))
        self.rows[key] = [calls + 1, before + nbytes]

    def record(self, collective: str, x: Tensor, group: dist.ProcessGroup, copies=1):
        """Count one call on `copies`·x.nbytes bytes; use as `with COMM.record(…):`."""
        self.count(collective, copies * x.nbytes, group.group_desc)
        frame = sys._getframe(2)  # whoever called the wrapper
        where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
        call = f"{collective} of {list(x.shape)} over {group.group_desc}"
        return self.at(call, where, dist.get_process_group_ranks(group))

    def at(self, call: str, where: str, ranks: list[int] | None = None):
        """What `with` notes on entering and on leaving; ranks: who meet there (all).

        The n-th call of one rank meets the n-th of the others: so calls are numbered
        for each set of ranks.
        """
        number = self.numbers[str(ranks)] = self.numbers.get(str(ranks), 0) + 1
        self.place = {"number": number, "call": call, "line": where, "ranks": ranks}
        return self

    def __enter__(self):
        self.note("in")
        self.start = time.perf_counter()

    def __exit__(self, kind, error, trace):
        self.seconds += time.perf_counter() - self.start
        if error is None:
            self.note("after")

    def note(self, state: str) -> None:
        self.place["state"] = state
        if self.store is not None:
            self.store.set(f"place/{self.rank}", json.dumps(self.place))

    def total(self, **wanted) -> list[int]:
        """[calls, bytes] of all rows with these labels, as in total(collective="…")."""
        names = ("what", "phase", "collective", "axis")
        rows = [(dict(zip(names, key)), row) for key, row in self.rows.items()]
        hits = [row for key, row in rows if wanted.items() <= key.items()]
        return [sum(row[0] for row in hits), sum(row[1] for row in hits)]


COMM = CommCounter()


Break = namedtuple("Break", "target bug what symptom why thread")
Break.__doc__ = """A bug to switch on: `target`, a dotted name, is replaced by `bug`."""


def apply_break(broken: Break, module: dict) -> None:
    """Replace the bug's target, `name` or `Class.name`, in a lesson's namespace."""
    owner, _, name = broken.target.rpartition(".")
    if owner:
        setattr(module[owner], name, broken.bug)
    else:
        module[name] = broken.bug


ALLOWED = {  # dtype → largest relative difference of a loss, of any other tensor
    "float64": (1e-12, 1e-12),
    "float32": (1e-6, 1e-5),
    "bfloat16": (2e-2, 2e-2),
}


def rel_diff(a: Tensor, reference: Tensor) -> float:
    """max|a − reference| / max|reference|; inf for nan and for another shape."""
    if a.shape != reference.shape:
        return float("inf")
    a, reference = a.detach().double(), reference.detach().double()
    if a.numel() == 0 or torch.equal(a, reference):
        return 0.0
    diff = ((a - reference).abs().max() / reference.abs().max()).item()
    return diff if diff == diff else float("inf")


def gather_objects(value) -> list:
    """Every rank's value, in rank order: bookkeeping of the lesson, so not counted."""
    everyone = [None] * dist.get_world_size()
    with COMM.at("gathering of results to print", "gather_objects"):
        dist.all_gather_object(everyone, value)
    return everyone


class Report:
    """What a lesson finds: rank 0 prints it, every rank checks it, --json writes it."""

    def __init__(self, lesson: str, args, mesh: dict[str, int], backend: str):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.lesson, self.args, self.checks = lesson, args, []
        self.data = {
            "lesson": lesson, "world_size": self.ranks, "mesh": mesh,
            "backend": backend, "device": args.device, "dtype": args.dtype,
            "losses": [], "gradients": [], "communication": [], "memory": [],
            "checks": [], "text": [],
        }  # fmt: skip
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        where = f"{backend} on {args.device}"
        self.say(f"{lesson}  {ranks}, mesh {axes}  {where}  {args.dtype}")

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            self.data["text"] += text.split("\n")
            print(text, flush=True)

    def table(self, head: str, rows: list[list], align: str) -> None:
        """Print rows under `head` (columns parted by |); align has l or r for each."""
        rows = [head.split("|"), *([str(cell) for cell in row] for row in rows)]
        width = [max(len(row[i]) for row in rows) for i in range(len(align))]
        for row in rows:
            cells = [
                cell.ljust(width[i]) if align[i] == "l" else cell.rjust(width[i])
                for i, cell in enumerate(row)
            ]
            self.say("   " + "  ".join(cells).rstrip())

    def check(self, name: str, diff: float, allowed: float = 0.0) -> str:
        """Note one comparison of this rank; "ok" or "✗" for the table."""
        ok = diff <= allowed  # False for nan too
        self.checks.append([name, diff, allowed, ok])
        return "ok" if ok else "✗"

    def moved(self, what: str, collective: str, axis: str, predicted: int, phase=""):
        """Check counted bytes against a formula; (calls, bytes, "ok" or "✗")."""
        labels = dict(what=what, collective=collective, axis=axis, phase=phase)
        calls, measured = COMM.total(**labels)
        row = dict(labels, calls=calls, bytes=measured, predicted_bytes=predicted)
        self.data["communication"].append(row)
        name = " ".join(filter(None, ["bytes of", what, phase, collective, axis]))
        return calls, measured, self.check(name, abs(measured - predicted))

    def verdict(self, claim: str, broken: Break | None) -> str:
        """All ranks' checks together: the last line, PASS … or FAIL …."""
        everyone = gather_objects(self.checks)
        merged = {}
        for rank, checks in enumerate(everyone):
            for name, diff, allowed, ok in checks:
                row = merged.setdefault(name, dict(name=name, diff=0.0, bad=[]))
                row["allowed"] = allowed
                row["diff"] = max(row["diff"], diff)
                row["bad"] += [] if ok or rank in row["bad"] else [rank]
        bad = [row for row in merged.values() if row["bad"]]
        rows = list(merged.values())
        worst = max(rows, key=lambda row: row["diff"])
        score = dict(worst_rel_diff=worst["diff"], allowed=worst["allowed"])
        self.data.update(score, checks=rows, verdict="FAIL" if bad else "PASS")
        for row in bad[:4]:
            everywhere = len(row["bad"]) == self.ranks
            ranks = "every rank" if everywhere else f"rank {row['bad']}"
            off = f"off by up to {row['diff']:.1e}, allowed {row['allowed']:.0e}"
            line = f"✗ {row['name']}: {off}, on {ranks}"
            self.say(textwrap.fill(line, 88, subsequent_indent="  "))
        if len(bad) > 4:
            self.say(f"✗ and {len(bad) - 4} more")
        if broken:
            self.say(diagnosis(self.args.break_name, broken))
        score = f"worst relative difference {worst['diff']:.1e}, allowed"
        ending = f"{claim}  ({score} {worst['allowed']:.0e})".replace(" 0e+00", " 0")
        if bad:
            ending = f"{len(bad)} of {len(rows)} checks, first: {bad[0]['name']}"
        last_line = f"{self.data['verdict']}  {self.lesson}  {ending}"
        self.say(last_line)
        if self.rank == 0 and self.args.json:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return last_line


def diagnosis(name: str, broken: Break) -> str:
    """What --break NAME did, what one sees, why, and who met it."""
    texts = broken.symptom, broken.why, broken.thread
    lines = ["", *textwrap.wrap(f"--break {name}: {broken.what}", 88)]
    for label, text in zip(("symptom", "why", "met in"), texts):
        lines += textwrap.wrap(f"{label:<9}{text}", 88, subsequent_indent=" " * 9)
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse, but one `error:` line for all ranks, and one --help."""

    def error(self, message):
        """Called by argparse, which would print its usage on every rank."""
        raise ValueError(message)

    def print_help(self, file=None):
        """Once, not once a rank."""
        if int(os.environ.get("RANK", 0)) == 0:
            super().print_help(file)


def lesson_parser(doc: str, steps: int, steps_are: str) -> Parser:
    """The flags that all lessons share."""
    about = doc.partition("Shapes:")[0]
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=style, allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=positive, default=steps, help=f"{steps_are} ({steps})")
    add("--seed", type=int, default=0)
    add("--dtype", choices=ALLOWED, default="float32")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each rank has one")
    add("--timeout", type=positive, help="seconds to wait for a rank (60; --break: 5)")
    add("--break", dest="break_name", metavar="NAME", help="a bug; `list` lists them")
    add("--json", type=Path, metavar="PATH", help="write all results there")
    return parser


def positive(text: str) -> int:
    """A flag's value as a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def pick_device(args) -> str:
    """Fill in args.device; the backend: NCCL where every rank has a GPU of its own."""
    local_rank, here = (int(os.environ[k]) for k in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    args.device = args.device or ("cuda" if gpus >= here else "cpu")
    if args.device == "cpu":
        return "gloo"
    if gpus == 0:
        raise ValueError("--device cuda, but torch sees no GPU: leave --device out")
    torch.cuda.set_device(local_rank % gpus)
    return "nccl" if gpus >= here else "gloo"


def last_words(message: str) -> None:
    """What torchrun's closing report shows, should this rank fail."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        words = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(words))


def stop(code: int) -> None:
    """End this rank at once: tidying up while others are in a collective can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(message: str) -> None:
    """A wrong argument: one line, exit code 2. All ranks see it; rank 0 says it."""
    last_words(f"error: {message}")
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(5)  # torchrun ends us when rank 0 has spoken
    stop(2)


def waits_for(rank: int, places: dict) -> list[int]:
    """The ranks that should be in the call that this rank is in, and are not."""
    here = places.get(rank, {"state": "before"})
    if here["state"] != "in":
        return []
    others = here["ranks"] or range(dist.get_world_size())
    return [other for other in others if not same_call(here, places.get(other, {}))]


def chain_from(rank: int, places: dict) -> list[int]:
    """A rank, those that it waits for, those that these wait for, and so on."""
    chain = [rank]
    for one in chain:
        chain += [other for other in waits_for(one, places) if other not in chain]
    return chain


def same_call(here: dict, there: dict) -> bool:
    """Are two ranks in one and the same call?"""
    return all(here[key] == there.get(key) for key in ("state", "number", "call"))


def blame(error: Exception, timeout: int, store) -> str:
    """Where every rank was last seen, and which of them the others waited for.

    To be asked while some rank is in a collective.
    """
    places = {}
    for rank in range(dist.get_world_size()):
        if store.check([f"place/{rank}"]):
            places[rank] = json.loads(store.get(f"place/{rank}"))
    waiting = [rank for rank, place in places.items() if place["state"] == "in"]
    here = dist.get_rank()
    chain = chain_from(here if here in waiting else waiting[0], places)
    calls = {
        rank: (place["number"], place["call"]) if place["state"] == "in" else None
        for rank, place in places.items()
    }
    guilty = [rank for rank in chain if not calls.get(rank)]  # they wait for nobody
    if not guilty:  # a circle: each waits for the next
        chain = chain_from(chain[-1], places)
    waiting = [rank for rank in chain if set(waits_for(rank, places)) & set(guilty)]
    inside = Counter(calls[rank] for rank in sorted(waiting or chain)).most_common(2)
    common = inside[0][0]
    tie = len(inside) == 2 and inside[0][1] == inside[1][1] and not guilty
    guilty = guilty or [rank for rank in chain if calls[rank] != common]
    lines = [
        f"  rank {rank}: {place['state']} call {place['number']}, "
        f"{place['call']} ({place['line']})"
        for rank, place in places.items()
    ]
    names = ", ".join(map(str, sorted(guilty)))
    who = f"this call was not made by rank {names}"
    who += " (a tie: or the others skipped one before)" if tie else ""
    if tie and common[1].startswith("message"):
        who = f"ranks {', '.join(map(str, sorted(chain)))} wait for each other"
    who = who if guilty else "all ranks are in it: one was lost there, or shapes differ"
    head = f"error: call {common[0]}, {common[1]}, did not come about; {who}"
    first = str(error).strip().split("\n")[0]
    said = f"  the transport, after {timeout} s at most: {first[:150]}"
    return "\n".join([head, *lines, said])


def fail(error: Exception, args, store, broken: Break | None) -> None:
    """An exception in main: say who is to blame, once, and end this rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all when one is lost
    if COMM.place["state"] == "in":  # the collective failed: the cause is elsewhere
        message = blame(error, args.timeout, store)
    else:
        traceback.print_exc()
        name = type(error).__name__
        message = f"error: rank {dist.get_rank()} raised {name}: {error}"
        COMM.note(f"raised {name} after")
    if broken:
        message += "\n" + diagnosis(args.break_name, broken)
    last_words(message)
    if store.add("told", 1) == 1:
        print(message, file=sys.stderr, flush=True)
    if COMM.place["state"] == "in":
        time.sleep(1)  # the guilty rank first: torchrun reports the first to end
    stop(1)


def launch(file: str, parse_args, main, breaks: dict[str, Break], module: dict) -> None:
    """Run a lesson's main(args, backend) on this rank, from first check to last."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = parse_args(ranks)
        if args.break_name == "list":
            if int(os.environ.get("RANK", 0)) == 0:
                print(*(f"{name:<15}{breaks[name].what}" for name in breaks), sep="\n")
            return
        check_common(args, ranks, breaks)
        backend = pick_device(args) if "RANK" in os.environ else None
    except ValueError as error:
        refuse(str(error))
    if backend is None:
        ranks = module.get("RANKS", 2)  # of a lesson that shows more with more
        command = f"torchrun --standalone --nproc_per_node={ranks} {Path(file).name}"
        print(f"start it with torchrun, which makes the ranks:\n\n    {command}")
        sys.exit(2)
    store = start_group(args, backend)
    broken = breaks.get(args.break_name)
    if broken:
        last_words(diagnosis(args.break_name, broken))  # it may abort the process
        apply_break(broken, module)
    try:
        verdict = main(args, backend)
        with COMM.at("the last barrier", "launch"):
            dist.barrier()
    except Exception as error:
        fail(error, args, store, broken)
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()
    if verdict.startswith("FAIL"):
        last_words(verdict)
        stop(1)


def start_group(args, backend: str) -> dist.Store:
    """Join the group of all ranks; the store that they share."""
    torch.set_num_threads(1)  # ranks share the cores: more threads would crawl
    torch.manual_seed(args.seed)
    limit = timedelta(seconds=args.timeout)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # torchrun --max-restarts starts all ranks anew, beside what the lost ones stored
    attempt = (store.add("ranks started", 1) - 1) // ranks
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=limit
    )
    COMM.store, COMM.rank = store, rank
    return store


def check_common(args, ranks: int, breaks: dict[str, Break]) -> None:
    """ValueError where a flag that all lessons share cannot be served."""
    if args.break_name is not None and args.break_name not in breaks:
        names = ", ".join(breaks)
        raise ValueError(f"--break {args.break_name}: unknown; there are {names}, list")
    if args.break_name and ranks == 1:
        raise ValueError("--break needs 2 ranks or more: one rank alone breaks nothing")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.json and args.json.is_dir():
        raise ValueError(f"--json {args.json}: this is a folder, a file is wanted")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed {args.seed}: from 0 to 2^32 − 1 it may be")
    if args.timeout is None:
        args.timeout = 5 if args.break_name else 60


def numbers(x: Tensor | None) -> str:
    """[ 0  1 10], a column of two characters a number; – for nothing."""
    if x is None:
        return "–"
    return "[" + " ".join(f"{v:2.0f}" for v in x.flatten().tolist()) + "]"


# ==== CARRIED OVER from 01, unchanged


class MLP(nn.Module):
    """The reference: plain PyTorch, one process, Y = GELU(X W_upᵀ + b) W_downᵀ + b.

    Shapes: x [B, S, D] → [B, S, D], with [B, S, F] in between.
    """

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (arXiv:1909.08053, 3)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # every rank has all of x already: nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of the T terms of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class AllGather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward.

    For consumers that differ: every rank uses the gathered x in its own way, so each
    has one term of the gradient, and the terms are added. Compare GatherFromTP.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: the transpose of AllGather."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group.

    Args:
        full: the single-process layer to slice, identical on every rank.
        tp_group: the T ranks that share this layer.
        copy_input: False where the caller has applied f, once for several layers.

    Shapes (global → on a rank, placement):
        x       [B, S, D] → [B, S, D]     Replicate()
        weight  [F, D]    → [F/T, D]      Shard(0): torch stores (out, in), so the
                                          paper's columns of A are our rows
        return  [B, S, F] → [B, S, F/T]   Shard(2)

    Communication: forward none; backward one all-reduce of B·S·D elements (f).
    Raises: ValueError if T does not divide F.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """

    placement = {
        "weight": (("tp", 0),),
        "bias": (("tp", 0),),
    }  # cut over axis tp along dim 0

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup, copy_input=True):
        super().__init__()
        self.tp_group, self.copy_input = tp_group, copy_input
        self.weight = nn.Parameter(shard(full.weight, 0, tp_group))  # [f, D]
        self.bias = nn.Parameter(shard(full.bias, 0, tp_group))  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        return F.linear(x_BSD, self.weight, self.bias)  # [B, S, f]


def tell_placement(module: nn.Module, name: str) -> tuple:
    """((axis, dim), …) of a parameter, in the order it was cut; () if replicated."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), "placement", {}).get(leaf, ())


def unshard(
    x: Tensor, placement: tuple, groups: dict[str, dist.ProcessGroup]
) -> Tensor:
    """The whole tensor from all ranks' slices: cuts undone, the last one first."""
    for axis, dim in reversed(placement):
        x = all_gather(x, dim, groups[axis])
    return x


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes kept for backward, each storage once, `skip` left out."""

    def __init__(self, skip: list[Tensor]):
        self.skip = {x.untyped_storage().data_ptr() for x in skip}
        self.storages = {}
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.skip:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return x

    def total(self) -> int:
        return sum(self.storages.values())


def in_words(placement: tuple) -> str:
    """PyTorch's words for a placement on one axis."""
    return ", ".join(f"Shard({dim})" for _, dim in placement) or "Replicate()"


# ==== CARRIED OVER from 02, unchanged


Config = namedtuple("Config", "vocab_size hidden heads kv_heads layers seq_len dropout")


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angle position · 10000^(−2i/H) (arXiv:2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle_SH = torch.outer(torch.arange(seq_len), frequency).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Turn each pair (i, i + H/2) of a head by its position's angle."""
    first, second = x_BNSH.chunk(2, -1)
    return x_BNSH * cos_SH + torch.cat([-second, first], -1) * sin_SH


class Dropout(nn.Module):
    """Zero elements with probability p, scale the others by 1/(1 − p).

    Like nn.Dropout, but the mask kept for backward is boolean, one byte an element, as
    on a GPU (on a CPU nn.Dropout keeps it in x's dtype).
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class Attention(nn.Module):
    """Causal attention written out, so that what it keeps for backward can be counted.

    Shapes: x [B, S, D] → [B, S, D]. K key/value heads serve N/K query heads each.
    """

    def __init__(self, config: Config):
        super().__init__()
        D, H = config.hidden, config.hidden // config.heads
        self.head_size, self.queries_per_kv = H, config.heads // config.kv_heads
        self.q_proj = nn.Linear(D, config.heads * H)
        self.k_proj = nn.Linear(D, config.kv_heads * H)
        self.v_proj = nn.Linear(D, config.kv_heads * H)
        self.o_proj = nn.Linear(D, D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, cos_SH, sin_SH, future_SS) -> Tensor:
        q, k, v = (
            proj(x_BSD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, N, S, H], and [B, K, S, H] twice
        q, k = rotate(q, cos_SH, sin_SH), rotate(k, cos_SH, sin_SH)
        k, v = (x.repeat_interleave(self.queries_per_kv, 1) for x in (k, v))
        scores_BNSS = q @ k.transpose(2, 3) / math.sqrt(self.head_size)
        scores_BNSS = scores_BNSS.masked_fill(future_SS, float("-inf"))
        weights_BNSS = self.dropout(scores_BNSS.softmax(-1))
        return self.o_proj((weights_BNSS @ v).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Pre-LayerNorm: x + dropout(attention(norm(x))), then + dropout(MLP(norm(x)))."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        self.input_layernorm = nn.LayerNorm(D)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(D)
        self.mlp = MLP(D, 4 * D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, *tables: Tensor) -> Tensor:
        attended_BSD = self.self_attn(self.input_layernorm(x_BSD), *tables)
        x_BSD = x_BSD + self.dropout(attended_BSD)
        return x_BSD + self.dropout(self.mlp(self.post_attention_layernorm(x_BSD)))


class Transformer(nn.Module):
    """The reference decoder. Shapes: tokens [B, S] int64 → logits [B, S, V]."""

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
        S = tokens_BS.shape[1]
        tables = self.cos[:S], self.sin[:S], self.future[:S, :S]
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, *tables)
        return self.lm_head(self.norm(x_BSD))


def sharded_dropout(x: Tensor, p: float, dim: int, tp_group) -> Tensor:
    """Dropout where x is a slice along dim: each rank must drop elements of its own.

    Every rank draws the mask of the whole tensor and keeps its slice, so that the
    result is the single process's. Megatron does not draw the other ranks' parts: it
    has a second generator, seeded with an offset by tp_rank. That is less work, and
    other masks than one process would draw (arXiv:1909.08053, appendix).
    """
    whole = list(x.shape)
    whole[dim] *= tp_group.size()
    keep = torch.rand(whole, device=x.device) >= p
    return x * shard(keep, dim, tp_group) / (1 - p)


def shard_qkv(full: Attention, tp_group) -> list:
    """q_proj, k_proj, v_proj cut by heads: each on its own, so that a rank's queries
    meet the keys and values that belong to them. f comes before, once for the three."""
    three = full.q_proj, full.k_proj, full.v_proj
    return [ColumnParallelLinear(one, tp_group, copy_input=False) for one in three]


class CoreAttention(nn.Module):
    """The part of attention that has no weights: this rank's heads, each on its own.

    Args:
        head_size: H; p: dropout of the attention weights; tp_group: whose heads.
    Shapes: q [B, S, N·H/T], k and v [B, S, K·H/T], tables [S, H] twice and [S, S]
        → [B, S, N·H/T]: heads never meet, so nothing is sent.
    """

    def __init__(self, head_size: int, p: float, tp_group: dist.ProcessGroup):
        super().__init__()
        self.head_size, self.p, self.tp_group = head_size, p, tp_group

    def forward(self, q_BSd, k_BSe, v_BSe, cos_SH, sin_SH, future_SS) -> Tensor:
        q_BnSH, k_BkSH, v_BkSH = (
            x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for x in (q_BSd, k_BSe, v_BSe)
        )
        q_BnSH = rotate(q_BnSH, cos_SH, sin_SH)
        k_BkSH = rotate(k_BkSH, cos_SH, sin_SH)
        queries_per_kv = q_BnSH.shape[1] // k_BkSH.shape[1]
        k_BnSH = k_BkSH.repeat_interleave(queries_per_kv, 1)
        v_BnSH = v_BkSH.repeat_interleave(queries_per_kv, 1)
        scores_BnSS = q_BnSH @ k_BnSH.mT / math.sqrt(self.head_size)
        weights_BnSS = scores_BnSS.masked_fill(future_SS, float("-inf")).softmax(-1)
        if self.p and self.training:
            weights_BnSS = sharded_dropout(weights_BnSS, self.p, 1, self.tp_group)
        return (weights_BnSS @ v_BnSH).transpose(1, 2).flatten(2)


def global_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the whole model's gradient, the same on every rank.

    A rank has a slice of the sharded gradients: their squares are summed over the
    group. It has all of the replicated ones: they are counted once.
    Communication: one all-reduce of one float64.
    """
    sharded, replicated = [], []
    for name, p in model.named_parameters():
        squares = p.grad.double().square().sum()
        (sharded if tell_placement(model, name) else replicated).append(squares)
    return math.sqrt(all_reduce(sum(sharded), tp_group) + sum(replicated))


def clip_gradients(model: nn.Module, max_norm: float, tp_group) -> float:
    """Scale all gradients so that their global norm is at most max_norm; the norm."""
    norm = global_norm(model, tp_group)
    scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    for p in model.parameters():
        p.grad.mul_(scale)
    return norm


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer: every rank updates what it holds, nothing is sent.

    Replicas stay equal because they started equal and got equal gradients.
    """
    optimizer.step()
    optimizer.zero_grad()


def pick_batch(batches: list, step: int) -> tuple[Tensor, Tensor]:
    """The step's tokens and targets: every rank of a TP group takes the same."""
    return batches[step]


def mean_loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Cross entropy averaged over the tokens that count, in float32 at least."""
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.to(wide).flatten(0, 1), target_BS.flatten())


def plan_for(layers: int) -> dict:
    """PyTorch's way to say the same: which linear is split by column, which by row."""
    column, row = ColwiseParallel, RowwiseParallel
    plan = {}
    for i in range(layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"layers.{i}.{name}"] = column()
        plan[f"layers.{i}.self_attn.o_proj"] = row()
        plan[f"layers.{i}.mlp.up_proj"] = column()
        plan[f"layers.{i}.mlp.down_proj"] = row()
    return plan


PAD = 256  # the one token that is not a byte


IGNORE = -100  # what F.cross_entropy takes for "no target here"


def make_batches(args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets [B, S] of random lines of this file, as bytes; padded.

    Indentation is cut to half a row: among nothing but spaces every weighting of values
    gives the same, and the gradients of q and k would be zero, or rather rounding.
    """
    lines = [line for line in Path(__file__).read_bytes().split(b"\n") if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    half = args.seq_len // 2
    lines = [line[max(0, n - half) :] for line, n in zip(lines, indents)]
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(count):
        picks = torch.randint(len(lines), (args.batch_size,), generator=generator)
        rows = torch.full((args.batch_size, args.seq_len + 1), PAD)
        for row, pick in zip(rows, picks.tolist()):
            text = (lines[pick] + b"\n")[: args.seq_len + 1]
            row[: len(text)] = torch.tensor(list(text))
        tokens, target = rows[:, :-1].clone(), rows[:, 1:].clone()
        target[target == PAD] = IGNORE
        batches.append((tokens.to(args.device), target.to(args.device)))
    return batches


def make_transformer(args) -> Transformer:
    """The full model, the same on every rank: drawn from the seed before any cut."""
    torch.manual_seed(args.seed)
    config = Config(
        args.vocab_size, args.hidden, args.heads, args.kv_heads, args.layers,
        args.seq_len, args.dropout,
    )  # fmt: skip
    return Transformer(config).to(args.device, getattr(torch, args.dtype))


def tensor_bytes(tensors) -> int:
    """Bytes of all tensors among these."""
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


class Training:
    """One model in training, and what was measured of it."""

    def __init__(self, model: nn.Module, tp_group: dist.ProcessGroup | None, args):
        self.model, self.tp_group, self.args = model, tp_group, args
        # eps above the rounding error of a gradient: AdamW divides by the gradient's
        # size, and would turn rounding into steps as long as any other.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        self.losses, self.norms, self.held, self.first = [], [], {}, {}
        self.rounding = {}  # of bfloat16: measure_rounding

    def step(self, batches: list, step: int, watch=None) -> None:
        tokens, target = (
            batches[step] if not self.tp_group else pick_batch(batches, step)
        )
        torch.manual_seed(self.args.seed + step)  # the masks of this step
        parameters = list(self.model.parameters())
        saved = watch or SavedBytes(skip=[*parameters, *self.model.buffers()])
        COMM.what, COMM.phase = "layers", "forward"
        with saved:
            logits_BSV = self.model(tokens)
        loss = self.loss(logits_BSV, target)
        COMM.phase = "backward"
        self.backward(loss)
        COMM.what, COMM.phase = "bookkeeping", ""
        self.losses.append(loss.item())
        if not self.first:
            self.first = {n: self.whole(n, p.grad) for n, p in self.named()}
            self.held = {
                "parameters": tensor_bytes(parameters),
                "gradients": tensor_bytes(p.grad for p in parameters),
                "activations": saved.total(),
            }
        COMM.what = "clipping"
        if self.tp_group:
            self.norms.append(clip_gradients(self.model, self.args.clip, self.tp_group))
        else:
            # clip_grad_norm_, but with the squares of large tensors added in float64
            norm = torch.nn.utils.get_total_norm(p.grad.double() for p in parameters)
            torch.nn.utils.clip_grads_with_norm_(parameters, self.args.clip, norm)
            self.norms.append(norm.item())
        COMM.what = "bookkeeping"
        update(self.model, self.optimizer)
        if "optimizer state" not in self.held:
            state = self.optimizer.state.values()
            moments = [x for one in state for x in one.values()]
            self.held["optimizer state"] = tensor_bytes(moments)

    def loss(self, logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
        return mean_loss(logits_BSV, target_BS)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def named(self):
        return self.model.named_parameters()

    def whole(self, name: str, x: Tensor) -> Tensor:
        """A parameter, or its gradient, put together from all ranks."""
        where = tell_placement(self.model, name) if self.tp_group else ()
        return unshard(x.detach(), where, {"tp": self.tp_group}).clone()


def allowed(without: Training, name: str) -> float:
    """The largest relative difference of a parameter's gradient that is no bug.

    In bfloat16 it is 2e-2, or three times what rounding does to it without TP.
    """
    floor = ALLOWED[without.args.dtype][1]
    return max(floor, 3 * without.rounding.get(name, 0.0))


def fold(name: str, verbose: bool) -> str:
    """layers.3.mlp… → mlp…: one row for the parameter in all layers."""
    parts = name.split(".")
    return ".".join(parts[2:]) if parts[0] == "layers" and not verbose else name


def check_sizes(args, ranks: int) -> None:
    """ValueError where the model cannot be built, or cannot be cut into `ranks`."""
    pairs = [
        ("--hidden", args.hidden, "--heads", args.heads),
        ("--heads", args.heads, "--kv-heads", args.kv_heads),
        ("--heads", args.heads, "ranks, by --nproc_per_node", ranks),
        ("--kv-heads", args.kv_heads, "ranks, by --nproc_per_node", ranks),
    ]
    for flag, value, other, parts in pairs:
        if value % parts:
            raise ValueError(
                f"{flag} {value} is not a multiple of {parts} ({other}): {value} % "
                f"{parts} = {value % parts}; {flag} {value + parts - value % parts} "
                "would do"
            )
    if args.hidden // args.heads % 2:
        raise ValueError(
            f"--hidden {args.hidden} / --heads {args.heads} = "
            f"{args.hidden // args.heads}: rotary embedding turns pairs, the head size "
            "must be even"
        )
    if args.vocab_size < 257:
        raise ValueError(
            f"--vocab-size {args.vocab_size}: 256 bytes and padding need 257"
        )
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout {args.dropout}: a probability below 1 is wanted")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: a norm above 0 is wanted")
    if args.profile and not args.profile.is_dir():
        raise ValueError(f"--profile {args.profile}: there is no such folder")


# ==== CARRIED OVER from 03, unchanged


def pad_vocab(full: Tensor, ranks: int) -> Tensor:
    """Zero rows below an embedding or a head, so that T divides them: any V and T.

    Shapes: [V, ...] → [⌈V/T⌉·T, ...]. Zeros stay zeros: no token is looked up there,
    and the loss gives those columns no gradient.
    """
    missing = -len(full) % ranks
    return torch.cat([full, full.new_zeros(missing, *full.shape[1:])])


def first_row(v: int, tp_group: dist.ProcessGroup) -> int:
    """Rank t has the tokens from t·v to (t + 1)·v − 1 of the vocabulary."""
    return tp_group.rank() * v


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError for a token that no rank has; nn.Embedding raises IndexError."""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        low, high = tokens.min().item(), tokens.max().item()
        raise ValueError(
            f"tokens {low} to {high}: the vocabulary is 0 to {vocab_size - 1}"
        )


def look_up(tokens_BS: Tensor, weight_vD: Tensor, V: int, tp_group) -> Tensor:
    """The embeddings of this rank's tokens, zeros for the others': a term of the sum.

    Shapes: tokens [B, S], weight [v, D] → [B, S, D] {U_tp}. ValueError for a token ≥ V.
    """
    check_tokens(tokens_BS, V)
    local_BS = tokens_BS - first_row(len(weight_vD), tp_group)
    mine_BS = (local_BS >= 0) & (local_BS < len(weight_vD))
    # Another rank's token looks up row 0, any row would do: it is zeroed next.
    x_BSD = F.embedding(local_BS.where(mine_BS, 0), weight_vD)
    return x_BSD * mine_BS.unsqueeze(-1)  # others' tokens: zero


def real_columns(logits_BSv: Tensor, vocab_size: int, tp_group) -> Tensor:
    """[v] bool: which of this rank's columns are tokens, and not padding."""
    v = logits_BSv.shape[-1]
    token_v = first_row(v, tp_group) + torch.arange(v, device=logits_BSv.device)
    return token_v < vocab_size


def largest_logit(logits_BSv: Tensor, tp_group) -> Tensor:
    """[B, S]: the maximum over the whole vocabulary, so that no exp overflows."""
    return all_reduce(logits_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)


def to_softmax(exp_BSv: Tensor, total_BS: Tensor) -> Tensor:
    """This rank's columns of the softmax: all that backward needs."""
    return exp_BSv / total_BS.unsqueeze(-1)


def without_ignored(grad_BSv: Tensor, has_target_BS: Tensor) -> Tensor:
    """Zero the rows of tokens that have no target, also where they are nan."""
    return grad_BSv.where(has_target_BS.unsqueeze(-1), 0)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(logits)[target] of sharded logits: vocab_parallel_cross_entropy.

    With m the largest logit, z = Σ exp(x − m): loss = log z − (x[target] − m). Each of
    m, z and x[target] takes a number from every rank: one all-reduce of B·S values.
    """

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        wide = torch.promote_types(logits_BSv.dtype, torch.float32)
        real_v = real_columns(logits_BSv, vocab_size, tp_group)
        x_BSv = logits_BSv.to(wide).masked_fill(~real_v, float("-inf"))
        # First all-reduce: the largest logit.
        x_BSv = x_BSv - largest_logit(x_BSv, tp_group).unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        total_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. One rank has its column, the others give zero.
        v = logits_BSv.shape[-1]
        local_BS = target_BS - first_row(v, tp_group)
        mine_BS = (local_BS >= 0) & (local_BS < v)
        local_BS = local_BS.where(mine_BS, 0)
        picked_BS = x_BSv.gather(-1, local_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(mine_BS, 0)
        if smoothing:  # and the mean of all logits, in the same all-reduce
            sum_BS = x_BSv.masked_fill(~real_v, 0).sum(-1)
            picked_BS = (1 - smoothing) * picked_BS + smoothing * sum_BS / vocab_size
        loss_BS = total_BS.log() - all_reduce(picked_BS, tp_group)
        has_target_BS = target_BS != ignore
        softmax_BSv = to_softmax(exp_BSv, total_BS)
        ctx.save_for_backward(softmax_BSv, local_BS, mine_BS, has_target_BS, real_v)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(has_target_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # dloss/dx = softmax − onehot(target): each rank has what it takes for its
        # columns, so nothing is sent.
        softmax_BSv, local_BS, mine_BS, has_target_BS, real_v = ctx.saved_tensors
        even = ctx.smoothing / ctx.vocab_size  # what smoothing gives to every token
        grad_BSv = softmax_BSv - even * real_v.to(softmax_BSv)
        hit_BS = (1 - ctx.smoothing) * mine_BS.to(softmax_BSv)
        grad_BSv.scatter_add_(-1, local_BS.unsqueeze(-1), -hit_BS.unsqueeze(-1))
        grad_BSv = without_ignored(grad_BSv * upstream_BS.unsqueeze(-1), has_target_BS)
        return grad_BSv.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor,
    target_BS: Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of every token, from logits whose vocabulary is split over the TP group.

    Args:
        logits_BSv: this rank's columns, padding included.
        target_BS: the right tokens, the same on every rank.
        vocab_size: V, the tokens there are; columns from V on are padding.
        ignore_index: a target that gives no loss and no gradient.
        label_smoothing: ε, as in F.cross_entropy.
    Shapes: logits [B, S, v] Shard(2), target [B, S] → loss [B, S] Replicate(), float32
        or wider; any number of leading dims will do.
    Communication: forward three all-reduces of B·S values; backward none.
    Raises: ValueError for a target outside the vocabulary.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
    """
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def mean_over_targets(loss_BS: Tensor, target_BS: Tensor) -> Tensor:
    """The mean over the tokens that have a target; nan if none has, as in PyTorch."""
    return loss_BS.sum() / (target_BS != IGNORE).sum()


def make_tied(args) -> Transformer:
    """Lesson 02's model; with --tie, head and embedding share their weight."""
    full = make_transformer(args)
    if args.tie:  # drawn small: as a head, the embedding's own rows give huge logits
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


# ==== CARRIED OVER from 04, unchanged


def pad_sequence(x_BSD: Tensor, ranks: int, value: float = 0) -> Tensor:
    """Positions at the end, so that T divides them: [B, S, …] → [B, ⌈S/T⌉·T, …].

    At the end: the others keep their positions. Where the whole x is put together it
    is cut off again; a model that does not (pad_batch) has a causal mask against it.
    """
    missing = -x_BSD.shape[1] % ranks
    filling = x_BSD.new_full((len(x_BSD), missing, *x_BSD.shape[2:]), value)
    return torch.cat([x_BSD, filling], 1) if missing else x_BSD


def gather_sequence(x_BsD: Tensor, S: int, tp_group: dist.ProcessGroup) -> Tensor:
    """Into the tensor-parallel region: all slices, and the padding cut off again.

    Each rank goes on with x in its own way, with its columns of W, so each has a term
    of the gradient: backward sums them. What padded rows hold (a bias, say) is cut off,
    so no gradient comes back to it.
    Shapes: x [B, s, D] → [B, S, D]. Communication: forward one all-gather of B·s·T·D
        elements (s·T is S, padded), backward one reduce-scatter of them.
    """
    return AllGather.apply(x_BsD, 1, tp_group)[:, :S]


def scatter_sequence(partial_y_BSD: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Out of it: the ranks' terms are summed, and each keeps its slice of positions.

    Shapes: y [B, S, D] {U_tp} → [B, s, D]. Communication: forward one reduce-scatter of
        B·s·T·D elements, backward one all-gather of them. In lesson 02 an all-reduce
        stood here: that is a reduce-scatter and an all-gather.
    Megatron-LM calls it reduce_scatter_to_sequence_parallel_region; its scatter_to… is
    the mere split below.
    """
    return ReduceScatter.apply(
        pad_sequence(partial_y_BSD, tp_group.size()), 1, tp_group
    )


def sum_to_slices(partial_grad_BSD: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Backward of the gather in GatherThenLinear: every rank has a term of the gradient
    for every position. (gather_sequence has the same from lesson 01's AllGather.)"""
    padded_BSD = pad_sequence(partial_grad_BSD, tp_group.size())
    return reduce_scatter(padded_BSD, 1, tp_group)


class GatherThenLinear(torch.autograd.Function):
    """gather_sequence and linears on it, keeping this rank's slice for backward.

    The weights' gradients need the whole x. Plain autograd would keep it, T slices; the
    paper keeps one slice and gathers again in backward (arXiv:2205.05198, sec. 4.2.2).
    """

    @staticmethod
    def forward(ctx, x_BsD: Tensor, S: int, tp_group, *parameters: Tensor) -> tuple:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x_BsD, *weights)
        ctx.S, ctx.tp_group = S, tp_group
        x_BSD = all_gather(x_BsD, 1, tp_group)[:, :S]
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        x_BsD, *weights = ctx.saved_tensors
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)[:, : ctx.S]  # the extra all-gather
        grads = []  # of weight and bias in turn, as forward was given them
        for grad_BSf in grads_BSf:
            grad_Rf = grad_BSf.flatten(0, 1)  # R rows: all tokens
            grads += [grad_Rf.T @ x_BSD.flatten(0, 1), grad_Rf.sum(0)]
        partial_grad_BSD = sum(g @ W for g, W in zip(grads_BSf, weights))
        return sum_to_slices(partial_grad_BSD, ctx.tp_group), None, None, *grads


def linears_of_sequence(
    x_BsD: Tensor, S: int, linears: list, tp_group, save_gathered: bool = False
) -> list[Tensor]:
    """Column-parallel linears of a split sequence: one gather for all of them.

    Args:
        linears: layers with this rank's rows of a weight, and its part of the bias.
        save_gathered: keep the whole x for backward; more memory, one gather less.
    Shapes: x [B, s, D], weights [f, D] → [B, S, f] each.
    Communication: forward one all-gather of B·s·T·D elements; backward one
        reduce-scatter and, unless save_gathered, one all-gather of as many.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2.
    """
    if save_gathered:
        x_BSD = gather_sequence(x_BsD, S, tp_group)
        return [F.linear(x_BSD, one.weight, one.bias) for one in linears]
    parameters = [p for one in linears for p in (one.weight, one.bias)]
    return list(GatherThenLinear.apply(x_BsD, S, tp_group, *parameters))


class SPRowParallelLinear(nn.Module):
    """RowParallelLinear that leaves each rank its slice of the sequence.

    Shapes (global → on a rank, placement):
        x       [B, S, F] → [B, S, F/T]     Shard(2)
        weight  [D, F]    → [D, F/T]        Shard(1)
        bias    [D]       → [D]             Replicate(), but see mend_replicated
        return  [B, S, D] → [B, ⌈S/T⌉, D]   Shard(1)
    Communication: forward one reduce-scatter of B·S·D elements, backward one
        all-gather of them.
    """

    placement = {"weight": (("tp", 1),)}

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.weight = nn.Parameter(shard(full.weight, 1, tp_group))  # [D, f]
        self.bias = nn.Parameter(full.bias.detach().clone())  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        return scatter_sequence(partial_y_BSD, self.tp_group) + self.bias


class SPAttention(nn.Module):
    """Attention by heads, from a slice of the sequence to a slice of it.

    A head needs all positions: q, k and v share one gather. Inside, on whole sequences,
    rotary tables and causal mask are those of lesson 02, by global position. (To leave
    the sequence split inside attention, too, is another method: context parallelism.)
    """

    def __init__(self, full: Attention, tp_group, save_gathered: bool = False):
        super().__init__()
        self.tp_group, self.save_gathered = tp_group, save_gathered
        self.q_proj, self.k_proj, self.v_proj = shard_qkv(full, tp_group)
        self.core = CoreAttention(full.head_size, full.dropout.p, tp_group)
        self.o_proj = SPRowParallelLinear(full.o_proj, tp_group)

    def forward(self, x_BsD: Tensor, *tables: Tensor) -> Tensor:
        three, S = [self.q_proj, self.k_proj, self.v_proj], len(tables[0])
        q_BSd, k_BSe, v_BSe = linears_of_sequence(
            x_BsD, S, three, self.tp_group, self.save_gathered
        )
        return self.o_proj(self.core(q_BSd, k_BSe, v_BSe, *tables))


class SPMLP(nn.Module):
    """Megatron's MLP, from a slice of the sequence to a slice of it."""

    def __init__(self, full: MLP, tp_group, save_gathered: bool = False):
        super().__init__()
        self.tp_group, self.save_gathered = tp_group, save_gathered
        self.up_proj = ColumnParallelLinear(full.up_proj, tp_group, copy_input=False)
        self.down_proj = SPRowParallelLinear(full.down_proj, tp_group)

    def forward(self, x_BsD: Tensor, S: int) -> Tensor:
        (h_BSf,) = linears_of_sequence(
            x_BsD, S, [self.up_proj], self.tp_group, self.save_gathered
        )
        return self.down_proj(F.gelu(h_BSf))


def sequence_dropout(x_BsD: Tensor, p: float, S: int, tp_group) -> Tensor:
    """Dropout of a slice of positions: each rank its part of one mask [B, S, D].

    As in sharded_dropout of lesson 02, every rank draws the whole mask, of the length
    without padding, so that the result is the single process's.
    """
    keep_BSD = torch.rand(len(x_BsD), S, x_BsD.shape[2], device=x_BsD.device) >= p
    padded_BSD = pad_sequence(keep_BSD, tp_group.size())
    return x_BsD * shard(padded_BSD, 1, tp_group) / (1 - p)


class SPDecoderLayer(nn.Module):
    """A layer that keeps nothing whole for backward: [B, s, D] around LayerNorm,
    dropout and residual; this rank's heads, and columns of the MLP, in between.

    Communication: forward 2 all-gathers and 2 reduce-scatters, backward the same and 2
        all-gathers more, each of B·S·D elements, S padded.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2, fig. 5.
    """

    def __init__(self, full: DecoderLayer, tp_group, save_gathered: bool = False):
        super().__init__()
        self.p, self.tp_group = full.dropout.p, tp_group
        self.input_layernorm = copy.deepcopy(full.input_layernorm)
        self.self_attn = SPAttention(full.self_attn, tp_group, save_gathered)
        self.post_attention_layernorm = copy.deepcopy(full.post_attention_layernorm)
        self.mlp = SPMLP(full.mlp, tp_group, save_gathered)

    def forward(self, x_BsD: Tensor, *tables: Tensor) -> Tensor:
        S = len(tables[0])
        y_BsD = self.self_attn(self.input_layernorm(x_BsD), *tables)
        x_BsD = x_BsD + self.dropout(y_BsD, S)
        y_BsD = self.mlp(self.post_attention_layernorm(x_BsD), S)
        return x_BsD + self.dropout(y_BsD, S)

    def dropout(self, y_BsD: Tensor, S: int) -> Tensor:
        p = self.p if self.training else 0
        return sequence_dropout(y_BsD, p, S, self.tp_group) if p else y_BsD


class SPEmbedding(nn.Module):
    """VocabParallelEmbedding that leaves each rank its slice of the sequence.

    Shapes: tokens [B, S] → [B, ⌈S/T⌉, D] Shard(1); weight as in lesson 03.
    Communication: forward one reduce-scatter of B·S·D elements, backward one
        all-gather of them.
    """

    placement = {"weight": (("tp", 0),)}

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size, self.tp_group = full.num_embeddings, tp_group
        padded = pad_vocab(full.weight.detach(), tp_group.size())
        self.weight = nn.Parameter(shard(padded, 0, tp_group))  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        partial_x_BSD = look_up(tokens_BS, self.weight, self.vocab_size, self.tp_group)
        return scatter_sequence(partial_x_BSD, self.tp_group)


class SPHead(nn.Module):
    """VocabParallelHead on a split sequence: x [B, s, D] → logits [B, S, v] Shard(2).

    Communication: that of linears_of_sequence.
    """

    placement = {"weight": (("tp", 0),), "bias": (("tp", 0),)}

    def __init__(self, full: nn.Linear, tp_group, tied: nn.Parameter | None = None):
        super().__init__()
        self.tp_group, self.save_gathered, T = tp_group, False, tp_group.size()
        weight = shard(pad_vocab(full.weight.detach(), T), 0, tp_group)
        self.weight = nn.Parameter(weight) if tied is None else tied  # [v, D]
        bias = shard(pad_vocab(full.bias.detach(), T), 0, tp_group)
        self.bias = nn.Parameter(bias)  # [v]

    def forward(self, x_BsD: Tensor, S: int) -> Tensor:
        return linears_of_sequence(x_BsD, S, [self], self.tp_group, self.save_gathered)[
            0
        ]


def mend_replicated(model: nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Sum the gradients of replicated parameters over the TP group: after backward,
    before clipping. (Megatron-LM does so in finalize_model_grads.)

    LayerNorms and the biases of row-parallel linears are whole on every rank, but met
    only its slice of the sequence: each rank has the part of the gradient that comes
    from its tokens. Without SP every rank had met all tokens, and no sum was needed.
    Communication: one all-reduce of (6L + 2)·D elements, all gradients in one tensor.
    """
    # A parameter without a placement is not cut: it is whole on every rank.
    replicated = [
        p for name, p in model.named_parameters() if not tell_placement(model, name)
    ]
    flat = torch.cat([p.grad.flatten() for p in replicated])
    parts = all_reduce(flat, tp_group).split([p.numel() for p in replicated])
    for p, whole in zip(replicated, parts):
        p.grad.copy_(whole.view_as(p))


# ==== BREAK IT


FIRST_SHAPE = []  # what the bug below remembers


def guess_shape(x, tp_group, device, good=broadcast_any):
    """The others allocate what the first batch needed, and do not ask again."""
    if not FIRST_SHAPE:
        first = good(x, tp_group, device)
        FIRST_SHAPE.extend(first.shape)
        return first
    if x is None:
        x = torch.empty(FIRST_SHAPE, dtype=torch.int64, device=device)
    return broadcast(x, 0, tp_group)


def own_batches(load, tp_group, device):
    """Every rank loads for itself, and its loader shuffles in an order of its own."""
    return [part.roll(tp_group.rank(), 1) for part in load()]


def micro_batch_means(self, logits_bSv, target_bS):
    """Each micro-batch's own mean, divided by their number."""
    COMM.what = "loss"
    loss_bS = vocab_parallel_cross_entropy(
        logits_bSv, target_bS, self.groups["tp"], self.args.vocab_size
    )
    COMM.what = "layers"
    parts = self.args.microbatches * self.groups["dp"].size()
    return mean_over_targets(loss_bS, target_bS) / parts


def send_and_wait(parts, to, group):
    """Wait for every send to end before anything else is done."""
    rank = dist.get_global_rank(group, to)
    for part in parts:
        part = part.detach().contiguous()
        COMM.count("send/recv", part.nbytes, group.group_desc)
        with COMM.at(f"message to rank {rank}", "send", [dist.get_rank(), rank]):
            dist.send(part, group=group, group_dst=to)
    return []


def sum_over_tp(self):
    """The gradients are added up along the wrong axis."""
    flat = self.flatten(p.grad for p in self.parameters.values())
    self.own.grad = all_reduce(flat, self.groups["tp"])


BREAKS = {
    "shape": Break(
        "broadcast_any",
        guess_shape,
        "TP receivers guess the shape of the batch (switches --ragged on)",
        "an error of the transport about sizes (with gloo: so many bytes came, there "
        "was room for so many), an abort, or a rank that waits",
        "only the group's first rank has the batch, and the others' buffer has the "
        "shape of another one. Broadcast the shape, then the batch (broadcast_any)",
        "github.com/NVIDIA/Megatron-LM/pull/4103, and a blog post on input shapes "
        "under 3D parallelism",
    ),
    "data": Break(
        "share_batch",
        own_batches,
        "the ranks of a TP group compute on different batches",
        "no error at all; the loss of step 1 is wrong already, and differs from rank "
        "to rank",
        "a TP group is one model in pieces: pieces of answers to different questions "
        "are added up. Let one rank load, and broadcast to its group (share_batch)",
        "github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "micro": Break(
        "MeshTraining.loss",
        micro_batch_means,
        "micro-batch losses are averaged, whatever number of targets each has",
        "the loss is a little off, and every gradient; not at all where no batch has "
        "padding",
        "a mean of means weighs a token of a micro-batch with much padding more than "
        "others. Divide by the targets of the whole batch, and add up (part_of_mean)",
        "github.com/meta-pytorch/torchtune/pull/1875, pytorch/torchtitan issue 2972",
    ),
    "order": Break(
        "send",
        send_and_wait,
        "a stage waits for each send to end before it receives",
        "two neighbours wait for each other until the timeout; GPipe's schedule, where "
        "all messages go one way at a time, gets through",
        "under 1F1B a stage sends its activation while the next one sends it a "
        "gradient: each send ends when the other receives, and neither does. Start "
        "sends without waiting, and wait for their end later (send, end_of)",
        "github.com/pytorch/pytorch/issues/109401, NVIDIA/nccl issue 479",
    ),
    "norm": Break(
        "counted_share",
        lambda stage, name, tp_group: 0.0 if is_copy(stage, name) else 1.0,
        "the global norm counts replicated parameters once a TP rank",
        "the norm is too large, so clipping takes away too much; loss and gradients of "
        "step 1 are right",
        "all T ranks hold the LayerNorms and row biases: their squares are T times in "
        "the sum over the group. Count a T-th of them on each rank (counted_share)",
        "github.com/ROCm/TransformerEngine/pull/715, NVIDIA-NeMo/RL pull request 3788",
    ),
    "tied": Break(
        "sum_tied",
        lambda stage, ends: None,
        "tied embedding and head on two stages are not summed (switches --tie on)",
        "step 1's loss is right; the embedding's gradient lacks the head's part and "
        "the head's the embedding's: two weights that were one part ways",
        "one weight with two uses gets the sum of two gradients, wherever they arise. "
        "All-reduce it over the first and the last stage after backward (sum_tied)",
        "github.com/NVIDIA/Megatron-LM/issues/844, pytorch/torchtitan issue 2252",
    ),
    "replicas": Break(
        "count_targets",
        lambda micro_batches, dp_group: (
            sum((target != IGNORE).sum() for _, target in micro_batches)
            * dp_group.size()
        ),
        "gradients are averaged over replicas that had different numbers of targets",
        "loss and gradients are a little off, each step by another factor",
        "each replica divides by its own number of targets, then all are weighed alike."
        " Divide by the number in the whole batch, and add up (count_targets)",
        "github.com/pytorch/torchtitan/pull/2206",
    ),
    "group": Break(
        "FlatAdamW.sum_over_replicas",
        sum_over_tp,
        "gradients are summed over tp in place of dp",
        "the loss of step 1 is right, every gradient is wrong, and replicas part ways",
        "slices of different parameters are added up, while each replica keeps the "
        "gradient of its own part of the batch. Sum over the ranks that hold the same "
        "parameters: dp",
        "github.com/ooples/AiDotNet/pull/393",
    ),
}

# The axis that has to have two ranks or more for a bug to show.
NEEDS = dict.fromkeys(("shape", "data", "norm"), "tp")
NEEDS |= dict(order="pp", tied="pp", replicas="dp", group="dp")


# ==== RUN

RANKS = 8  # what the command shows


def whole_tensor(training: MeshTraining, name: str, x: Tensor) -> Tensor:
    """A parameter or gradient put together from the TP group, without padding rows."""
    tp = {"tp": training.groups["tp"]}
    full = unshard(x.detach(), tell_placement(training.stage, name), tp)
    vocabulary = name.startswith(("embed_tokens", "lm_head"))
    return full[: training.args.vocab_size] if vocabulary else full


def full_name(training: MeshTraining, name: str) -> str:
    """The name in the full model: a tied head is the embedding there."""
    return "embed_tokens.weight" if is_copy(training.stage, name) else name


class MeshRun:
    """Training on the mesh, and what was measured of it."""

    def __init__(self, training: MeshTraining):
        self.training, self.losses, self.norms, self.first = training, [], [], {}
        self.groups = training.groups

    def step(self, batch) -> None:
        training, pipeline = self.training, self.training.pipeline
        dist.barrier()  # a common start for the timeline
        part = training.gradients(batch)
        COMM.what = "bookkeeping"
        for axis in ("dp", "pp"):  # replicas' parts add up; only the last stage has one
            part = all_reduce(part, self.groups[axis])
        self.losses.append(part.item())
        if not self.first:
            optimizer = training.optimizer
            grads = optimizer.unflatten(optimizer.whole(optimizer.own.grad))
            for name, grad in grads.items():
                self.first[name] = whole_tensor(training, name, grad).clone()
        self.norms.append(training.update())
        self.events = pipeline.events
        COMM.what = "bookkeeping"


def show_layout(report: Report, training: MeshTraining) -> None:
    """Section 1: which rank is where, in which groups, and what each axis moves."""
    args, groups = report.args, training.groups
    P, D, T = (groups[axis].size() for axis in AXES)
    report.say(
        "\n1  The mesh: rank = (stage · DP + replica) · TP + tp_rank; [ ]: a TP group"
    )
    here = {axis: dist.get_process_group_ranks(groups[axis]) for axis in AXES}
    places = gather_objects([groups[axis].rank() for axis in AXES])
    lists = gather_objects(here)
    rows = []
    for stage in range(P):
        mine = layers_of(stage, P, args.layers)
        holds = ["embedding"] if stage == 0 else []
        holds += [
            f"layers {mine[0]}–{mine[-1]}" if len(mine) > 1 else f"layer {mine[0]}"
        ]
        holds += ["norm, head"] if stage == P - 1 else []
        cells = [
            str([r for r in range(report.ranks) if places[r][:2] == [stage, d]])
            for d in range(D)
        ]
        rows.append([f"stage {stage}", *cells, ", ".join(holds)])
    replicas = [f"replica {d}" for d in range(D)]
    report.table("|".join(["", *replicas, "holds"]), rows, "l" * (D + 2))
    moves = {
        "tp": "activations, in every layer: fastest links",
        "dp": "gradients, once a step: grows with the model",
        "pp": "activations, once a stage: slow links will do",
    }
    rows = []
    for axis in reversed(AXES):
        found = sorted({tuple(one[axis]) for one in lists})
        listed = " ".join(str(list(ranks)).replace(", ", " ") for ranks in found[:4])
        rows.append([axis, listed + (" …" if len(found) > 4 else ""), moves[axis]])
    report.data["groups"] = lists
    report.table("axis|groups|moves", rows, "lll")
    wanted = {
        "tp": [r for r in range(report.ranks) if r // T == report.rank // T],
        "dp": [r for r in range(report.ranks)
               if r // (D * T) == report.rank // (D * T) and r % T == report.rank % T],
        "pp": [r for r in range(report.ranks) if r % (D * T) == report.rank % (D * T)],
    }  # fmt: skip
    report.check("ranks laid out TP innermost, then DP, then PP", float(here != wanted))


def show_both_losses(
    report: Report, alone: Training, run: MeshRun, begin: int, target: Tensor
) -> None:
    """Section 2: losses and gradient norms of every step; targets of the last."""
    rows, (loss_limit, limit) = [], ALLOWED[report.args.dtype]
    for i, loss in enumerate(run.losses):
        step = begin + i
        one, norms = alone.losses[step], (alone.norms[step], run.norms[i])
        diff, off = abs(loss - one) / one, abs(norms[1] - norms[0]) / norms[0]
        marks = {
            report.check(f"loss at step {step + 1}", diff, loss_limit),
            report.check(f"gradient norm at step {step + 1}", off, limit),
        }
        row = {"step": step + 1, "without": one, "with": loss}
        report.data["losses"].append(
            row | {"norm_without": norms[0], "norm_with": norms[1]}
        )
        cells = [f"{one:.8f}", f"{loss:.8f}", f"{diff:.1e}"]
        cells += [f"{norms[0]:.6f}", f"{norms[1]:.6f}", f"{off:.1e}"]
        rows.append([step + 1, *cells, "ok" if marks == {"ok"} else "✗"])
    report.say("\n2  Mean losses and gradient norms: one process, and the mesh")
    head = "step|loss alone|mesh|diff.|norm alone|mesh|diff.|ok"
    report.table(head, rows, "rrrrrrrr")
    parts = split(target, 0, report.args.dp)
    counts = ", ".join(str(int((part != IGNORE).sum())) for part in parts)
    report.say(
        f"   Tokens with a target in the last step, replica by replica: {counts}\n"
        f"   of {parts[0].numel()} each; the rest is padding. All weigh the same."
    )


def show_parameters_3d(report: Report, alone: Training, run: MeshRun) -> None:
    """Section 3: who holds what, and every gradient, layers folded into one row."""
    training, limit, mine = run.training, ALLOWED[report.args.dtype][1], {}
    for name, p in training.optimizer.parameters.items():
        reference, grad = alone.first[full_name(training, name)], run.first[name]
        diff = rel_diff(grad, reference)
        report.check(f"dL/d {name}", diff, limit)
        norms = [x.double().square().sum().item() for x in (reference, grad)]
        where = in_words(tell_placement(training.stage, name))
        mine[name] = [training.pipeline.number, list(p.shape), where, *norms, diff]
    cells = {}  # folded name → full name → a row of each rank that has it
    for rows in gather_objects(mine):
        for name, row in rows.items():
            one = cells.setdefault(fold(name, report.args.verbose), {})
            one.setdefault(name, []).append(row)
    table = []
    for key, one in cells.items():  # rank 0 has the bottom of the model
        every = [row for rows in one.values() for row in rows]
        norms = [math.sqrt(sum(rows[0][i] for rows in one.values())) for i in (3, 4)]
        diff = max(row[5] for row in every)
        stages = sorted({row[0] for row in every})
        row = dict(name=key, placement=every[0][2], stages=stages, rel_diff=diff)
        row |= dict(ok=diff <= limit, norm_without=norms[0], norm_with=norms[1])
        report.data["gradients"].append(row)
        where = f"{stages[0]}–{stages[-1]}" if len(stages) > 1 else stages[0]
        numbers = [f"{norm:.3f}" for norm in norms] + [f"{diff:.1e}"]
        mark = "ok" if diff <= limit else "✗"
        key = key.removeprefix("layers.")
        placed = every[0][2].replace("Replicate()", "whole")
        table.append([key, where, every[0][1], placed, *numbers, mark])
    report.say(
        "\n3  Who holds what (r: its stage); norms of the first gradients, all layers"
    )
    head = "parameter|r|on a rank|placed|alone|mesh|diff.|ok"
    report.table(head, table, "lrllrrrr")
    if "layers.0.self_attn.q_proj.weight" in run.first:
        name = "layers.0.self_attn.q_proj.weight"
        rows = [
            [" ".join(f"{v:9.6f}" for v in x[name][i, :3].tolist())
             for x in (alone.first, run.first)]
            for i in range(2)
        ]  # fmt: skip
        head = "dL/d q_proj.weight, layer 0, its first numbers: alone|on the mesh"
        report.table(head, rows, "ll")


def sort_rows(tokens: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A batch with its short lines first, so that parts of it differ in length."""
    order = (tokens != PAD).sum(1).argsort(stable=True)
    return tokens[order], target[order]


def show_lengths_3d(report: Report, run: MeshRun, batch: tuple) -> None:
    """`--ragged`: every micro-batch's own length, in the last step."""
    args, stage, groups = report.args, run.training.stage, run.groups
    mine = cut_batch(batch, groups["dp"], args.microbatches, True)
    ends = stage.first or stage.last
    got = run.training.pipeline.micro_batches if ends else mine
    off = sum(not torch.equal(a, b) for a, b in zip(got, mine)) + len(got) - len(mine)
    mark = report.check("a TP group's ranks have the batch of the first", off)
    every = gather_objects([part.shape[2] for part in mine])
    lengths = [every[rank] for rank in dist.get_process_group_ranks(groups["dp"])]
    report.data["lengths"] = lengths
    rows = args.batch_size // (args.dp * args.microbatches)
    tokens = rows * sum(map(sum, lengths))
    said = [f"replica {d}: {' '.join(map(str, x))}" for d, x in enumerate(lengths)]
    report.say(
        f"   Lengths of the last step's micro-batches, {rows} lines each:\n   "
        + "; ".join(said)
        + f"\n   {tokens} tokens in place of {args.batch_size * args.seq_len} with "
        "padding (sorted by length, to make\n   lengths differ). Why each axis works: "
        "DP sums gradients, shaped as parameters;\n   PP sends the shape ahead; TP "
        f"broadcasts it first: all have the same batch: {mark}"
    )


def show_after_3d(report: Report, alone: Training, run: MeshRun) -> None:
    """All parameters after the last step; what should be equal to the bit, is."""
    training, groups = run.training, run.groups
    worst, limit = 0.0, ALLOWED[report.args.dtype][1]
    reference = dict(alone.named())
    copies = {"tp": 0.0, "dp": 0.0, "pp": 0.0}
    for name, p in training.optimizer.parameters.items():
        full = reference[full_name(training, name)]
        diff = rel_diff(whole_tensor(training, name, p), full)
        report.check(f"{name} after the last step", diff, limit)
        worst = max(worst, diff)
        copies["dp"] = max(copies["dp"], rel_diff(broadcast(p, 0, groups["dp"]), p))
        if not tell_placement(training.stage, name):
            copies["tp"] = max(copies["tp"], rel_diff(broadcast(p, 0, groups["tp"]), p))
    stage = training.stage
    if stage.tied and stage.first != stage.last and (stage.first or stage.last):
        p = (stage.embed_tokens if stage.first else stage.lm_head).weight
        copies["pp"] = rel_diff(broadcast(p, 0, groups["ends"]), p)
    worst = max(gather_objects(worst))
    every = gather_objects(copies)
    what = {"dp": "replicas", "tp": "what a TP group holds whole"}
    what |= {"pp": "tied weights"} if stage.tied else {}
    marks = [
        report.check(f"{text}: equal to the bit", max(one[axis] for one in every))
        for axis, text in what.items()
    ]
    losses = gather_objects(run.losses)
    what["loss"] = "losses"
    marks.append(
        report.check(
            "one loss on every rank", float(losses.count(losses[0]) < len(losses))
        )
    )
    said = ", ".join(f"{text} {mark}" for text, mark in zip(what.values(), marks))
    report.say(
        f"   After the last step all parameters differ by {worst:.1e} at most: "
        f"{'ok' if worst <= limit else '✗'}."
    )
    said = textwrap.fill(f"Equal to the bit: {said}", 84, initial_indent="   ",
                         subsequent_indent="   ")  # fmt: skip
    report.say(said)


def show_holdings_3d(report: Report, run: MeshRun) -> None:
    """Section 4: what a rank of each stage holds, and micro-batches in flight."""
    training, args, P = run.training, report.args, run.groups["pp"].size()
    optimizer, stage = training.optimizer, training.pipeline.number
    parameters = optimizer.parameters.values()
    adam = optimizer.adamw.state[optimizer.own]
    held = tensor_bytes([adam["exp_avg"], adam["exp_avg_sq"]])
    n, D = sum(p.numel() for p in parameters), args.dp
    part = -(-n // D)  # of a vector padded so that D divides it
    wanted = 2 * (part if args.zero else part * D) * optimizer.own.element_size()
    M, in_flight = args.microbatches, training.pipeline.in_flight
    formula = M if args.schedule == "gpipe" else min(P - stage, M)
    marks = {
        report.check("bytes of AdamW's moments", abs(held - wanted)),
        report.check("micro-batches in flight", abs(in_flight - formula)),
    }
    row = [stage, n, tensor_bytes(parameters), held, wanted, in_flight, formula]
    row.append(training.pipeline.peak)
    rows = gather_objects([*row, "ok" if marks == {"ok"} else "✗"])
    rows = [rows[i] for i in range(0, report.ranks, report.ranks // P)]
    for row in rows:
        memory = dict(what=f"moments, stage {row[0]}", bytes=row[3])
        report.data["memory"].append(memory | {"predicted_bytes": row[4]})
        report.data["in_flight"].append(
            dict(stage=row[0], measured=row[5], formula=row[6], bytes=row[7])
        )
    zero = f"2·n/DP, DP = {D}" if args.zero else "2·n"
    held = "M" if args.schedule == "gpipe" else "min(P − r, M)"
    text = (
        f"4  Of what a rank of stage r holds, in bytes: n parameters; AdamW's moments, "
        f"{zero}, n rounded up to a multiple of DP; and activations kept for backward. "
        f"In flight: the micro-batches that these belong to, {held} at most"
    )
    report.say("\n" + textwrap.fill(text, 85, subsequent_indent="   "))
    head = "r|n|parameters|moments|predicted|in flight|predicted|activations|ok"
    report.table(head, rows, "rrrrrrrrr")


def gather_events(report: Report, name: str, events: list, groups) -> list:
    """Every rank's events into the JSON; those of rank 0's pipeline, stage by stage.

    Seconds from the first event of all. On several machines they are as good as the
    agreement of their clocks.
    """
    stage, ranks = groups["pp"].rank(), dist.get_process_group_ranks(groups["pp"])
    first = min(gather_objects(min(event[2] for event in events)))
    rows = [
        dict(stage=stage, what=what, microbatch=i, start=a - first, end=b - first)
        for what, i, a, b in events
    ]
    every = gather_objects(rows)
    report.data[name] = [
        dict(row, rank=r) for r, one in enumerate(every) for row in one
    ]
    return [every[rank] for rank in ranks]


def draw_timeline(report: Report, stages: list, P: int, M: int) -> tuple[float, float]:
    """A line a stage; the bubble as measured. Returns its two fractions."""
    width = 72
    begin = min(row["start"] for rows in stages for row in rows)
    span = max(row["end"] for rows in stages for row in rows) - begin
    busy = []
    for stage, rows in enumerate(stages):
        line, seconds = ["·"] * width, 0.0
        for row in rows:
            if row["what"] == "wait":
                continue
            seconds += row["end"] - row["start"]
            first = int((row["start"] - begin) / span * width)
            last = max(first + 1, round((row["end"] - begin) / span * width))
            i = row["microbatch"]
            mark = str((i + 1) % 10) if row["what"] == "forward" else chr(97 + i % 26)
            line[first:last] = mark * (last - first)
        busy.append(seconds)
        report.say(f"   stage {stage} {''.join(line[:width])}")
    ideal = sum(busy) / len(busy)
    found = span / ideal - 1, 1 - ideal / span
    wall = f"   Wall time {span * 1e3:.0f} ms; a stage computes for {ideal * 1e3:.0f}, "
    wall += "the ideal time"
    if P == 1:
        report.say(f"{wall}; one stage has no bubble")
        return found
    report.say(
        f"{wall}.\n   Bubble over ideal time {found[0]:.2f}, predicted (P−1)/M = "
        f"{(P - 1) / M:.2f}; over wall time {found[1]:.2f},\n   predicted "
        f"(P−1)/(M+P−1) = {(P - 1) / (M + P - 1):.2f}"
    )
    return found


def show_timeline(report: Report, run: MeshRun) -> None:
    """Section 5: who computed when, in the last step; then with simulated compute."""
    args, groups = report.args, run.groups
    P, M = groups["pp"].size(), args.microbatches
    report.say(
        f"\n5  The last step, {args.schedule}, ranks "
        f"{dist.get_process_group_ranks(groups['pp'])}: 1 2 3 … forwards of "
        "micro-batches,\n   a b c … their backwards (with collectives over tp), · waits"
    )
    stages = gather_events(report, "timeline", run.events, groups)
    found = draw_timeline(report, stages, P, M)
    report.data["bubble"] = dict(over_ideal=found[0], over_wall=found[1])
    if P > 1:
        explain_bubble(report, run.events, found[0], (P - 1) / M)
    if args.simulate_compute:
        simulate(report, groups)


def explain_bubble(report: Report, events: list, found: float, predicted: float):
    """What a bubble depends on, and why it is not the predicted one here."""
    args, cores = report.args, os.cpu_count()
    report.say(
        "   Both schedules have the same bubble; 1f1b has min(P − r, M) micro-batches\n"
        "   in flight, gpipe M. A larger M: a smaller bubble, but smaller matrices."
    )
    if found < 2 * predicted:
        return
    forward = [end - start for what, _, start, end in events if what == "forward"]
    where = f"a forward takes {1e3 * sum(forward) / len(forward):.0f} ms here"
    if args.device == "cpu" and report.ranks > cores:
        where += f", and {report.ranks} ranks share {cores} cores"
    text = f"The prediction takes equal stages and free messages; {where}."
    if not args.simulate_compute:
        text += " --simulate-compute 20 shows the true shape."
    report.say(textwrap.fill(text, 87, initial_indent="   ", subsequent_indent="   "))


class Sleep(torch.autograd.Function):
    """Takes the time of a stage, and computes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, unit: Tensor, seconds: float, shape: list) -> Tensor:
        ctx.seconds, ctx.like = seconds, x
        time.sleep(seconds)
        return unit.new_zeros(shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        time.sleep(2 * ctx.seconds)  # two matrix products for each one of forward
        floating = ctx.like.is_floating_point()
        return torch.zeros_like(ctx.like) if floating else None, grad.sum(), None, None


class SleepingStage(nn.Module):
    """A stage that sleeps, and sends tensors of the true size."""

    def __init__(self, milliseconds: int, shape: list, dtype: torch.dtype):
        super().__init__()
        self.seconds, self.shape = milliseconds / 1000, shape
        self.unit = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor, S: int) -> Tensor:
        return Sleep.apply(x, self.unit, self.seconds, self.shape)


def simulate(report: Report, groups) -> None:
    """The same schedule, with a sleep in place of each stage's compute."""
    args, P, M = report.args, groups["pp"].size(), report.args.microbatches
    ms, b = args.simulate_compute, args.batch_size // (args.dp * M)
    dtype, s = getattr(torch, args.dtype), -(-args.seq_len // args.tp)
    stage = SleepingStage(ms, [b, s, args.hidden], dtype).to(args.device)
    pipeline = Pipeline(stage, lambda y, target: y.sum(), groups, dtype)
    steps = schedule(args.schedule, groups["pp"].rank(), P, M)
    tokens = torch.zeros(2, b, args.seq_len, dtype=torch.int64, device=args.device)
    COMM.what = "simulated"
    for _ in range(2):  # the first one warms up
        dist.barrier()
        pipeline.run(steps, [tokens] * M, args.device)
    COMM.what = "bookkeeping"
    report.say(
        f"   Simulated: a forward sleeps {ms} ms, a backward {2 * ms} ms; messages are "
        "real"
    )
    stages = gather_events(report, "simulated", pipeline.events, groups)
    found = draw_timeline(report, stages, P, M)
    ideal = (M + P - 1) * 3 * ms
    rows = [row for rows in stages for row in rows]
    span = max(row["end"] for row in rows) - min(row["start"] for row in rows)
    report.data["simulation"] = dict(
        over_ideal=found[0], over_wall=found[1], makespan=span, ideal=ideal / 1e3
    )
    report.say(
        f"   (M + P − 1)·(forward + backward) = {ideal} ms, if messages took no time"
    )


class Sizes:
    """Tokens that this rank has dealt with, summed over steps and micro-batches."""

    def __init__(self, report: Report, batches: list, groups):
        args = report.args
        micro = [
            part
            for batch in batches
            for part in cut_batch(batch, groups["dp"], args.microbatches, args.ragged)
        ]
        shapes = [part.shape[1:] for part in micro]
        self.tokens = sum(b * S for b, S in shapes)
        self.slices = sum(b * -(-S // args.tp) for b, S in shapes)  # of a sequence
        self.messages, self.steps = len(micro), len(batches)


def predict_traffic(training: MeshTraining, size: Sizes) -> dict[tuple, tuple]:
    """(axis, what, phase, collective) → formula for a step, bytes of all steps."""
    args, stage, groups = training.args, training.stage, training.groups
    e = torch.empty((), dtype=getattr(torch, args.dtype)).element_size()
    D, n = args.hidden, len(training.optimizer.own) * e
    steps, M = size.steps, size.messages
    found = {}
    if groups["tp"].size() > 1:
        found |= predict_tp(training, size)
    if groups["pp"].size() > 1:
        one, what = size.slices * D * e, "layers"
        if not stage.last:
            row = "M·(e·b·s·D+32)", one + 32 * M
            found["pp", what, "forward", "send/recv"] = row
        if not stage.first:
            found["pp", what, "backward", "send/recv"] = "M·e·b·s·D", one
        if stage.tied and (stage.first or stage.last):
            weight = (stage.embed_tokens if stage.first else stage.lm_head).weight
            found["pp", "tied", "", "all-reduce"] = "e·v·D", weight.nbytes * steps
        found["pp", "norm", "", "all-reduce"] = "8", 8 * steps
    if groups["dp"].size() > 1:
        if stage.last:
            found["dp", "batch", "", "all-reduce"] = "8", 8 * steps
        if args.zero:
            n *= groups["dp"].size()
            found["dp", "replicas", "", "reduce-scatter"] = "e·n, padded", n * steps
            found["dp", "replicas", "", "all-gather"] = "e·n, padded", n * steps
            found["dp", "norm", "", "all-reduce"] = "8", 8 * steps
        else:
            found["dp", "replicas", "", "all-reduce"] = "e·n, padded", n * steps
    return found


def predict_tp(training: MeshTraining, size: Sizes) -> dict[tuple, tuple]:
    """What the TP group sends: the batch, the layers (lesson 04), the loss, …"""
    args, stage, L = training.args, training.stage, len(training.stage.layers)
    e = torch.empty((), dtype=getattr(torch, args.dtype)).element_size()
    one, steps = size.slices * args.tp * args.hidden * e, size.steps
    found = {}
    if stage.first or stage.last:
        count = 8 * steps + 24 * size.messages  # how many micro-batches, their shapes
        row = "8+M·(24+16·b·S)", count + 16 * size.tokens
        found["tp", "batch", "", "broadcast"] = row
    scatter, gather = 2 * L + stage.first, 2 * L + stage.last
    for phase, collective, calls in (
        ("forward", "all-gather", gather),
        ("forward", "reduce-scatter", scatter),
        ("backward", "all-gather", scatter + gather),
        ("backward", "reduce-scatter", gather),
    ):
        found["tp", "layers", phase, collective] = "calls·e·b·s·T·D", calls * one
    if stage.last:
        wide = max(4, e)
        found["tp", "loss", "forward", "all-reduce"] = (
            "3·e·M·b·S",
            3 * size.tokens * wide,
        )
    numbers = sum(
        p.numel()
        for name, p in training.optimizer.parameters.items()
        if not tell_placement(stage, name)
    )
    found["tp", "replicated", "", "all-reduce"] = (
        "e·n replicated",
        numbers * e * steps,
    )
    found["tp", "norm", "", "all-reduce"] = "8", 8 * steps
    return found


def show_traffic_3d(report: Report, run: MeshRun, batches: list) -> None:
    """Section 6: what a rank of the first and of the last stage sends, by axis."""
    training, steps = run.training, len(batches)
    wanted = predict_traffic(training, Sizes(report, batches, run.groups))
    mine, rest = {}, 0
    for key, (formula, predicted) in wanted.items():
        axis, what, phase, collective = key
        row = report.moved(what, collective, axis, predicted, phase)
        mine["|".join(key)] = [formula, row[0], row[1], predicted, row[2]]
    for (what, phase, collective, axis), (_, sent) in COMM.rows.items():
        ours = what not in ("bookkeeping", "simulated", "")
        rest += sent if ours and (axis, what, phase, collective) not in wanted else 0
    mark = report.check("bytes that no formula speaks of", rest)
    every = gather_objects(mine)
    report.data["communication"] = [
        dict(zip(("axis", "what", "phase", "collective"), key.split("|")), rank=rank,
             calls=row[1], bytes=row[2], predicted_bytes=row[3])
        for rank, rows in enumerate(every) for key, row in rows.items()
    ]  # fmt: skip
    line = dist.get_process_group_ranks(run.groups["pp"])
    numbers = sorted({0, min(1, len(line) - 1), len(line) - 1})  # stages in between: 1
    shown = [every[line[i]] for i in numbers]
    rows = traffic_rows(every, shown, steps)
    if not rows:
        report.say("\n6  What a step sends: nothing, there is one rank")
        return
    some = "some" if len(line) > 3 else "its"
    report.say(
        "\n6  Payload of a step's communication, in bytes (mean of the steps):\n"
        f"   replica 0 at {some} stages. e: bytes of a number"
    )
    names = [f"stage {i}" for i in numbers]
    head = "axis|of|way|collective|calls|" + "|".join(names)
    report.table(f"{head}|formula|ok", rows, "lllll" + "r" * len(shown) + "lr")
    explain_traffic(report, run, {row[-1] for row in rows} | {mark})


def traffic_rows(every: list[dict], shown: list[dict], steps: int) -> list[list]:
    """Rows of the table: means of the steps on the ranks shown, marks of every rank."""
    whats = "batch", "layers", "loss", "replicated", "tied", "replicas", "norm"
    order = lambda key: (
        ("tp", "pp", "dp").index(key[0]), whats.index(key[1]),
        ("forward", "backward", "").index(key[2]),
    )  # fmt: skip
    rows, keys = [], {key for one in shown for key in one}
    for key in sorted(keys, key=lambda key: order(key.split("|"))):
        axis, what, phase, collective = key.split("|")
        found = [one.get(key) for one in shown]
        calls = "/".join(str(r[1] // steps) if r else "–" for r in found)
        cells = [r[2] // steps if r else "–" for r in found]
        marks = {one[key][4] for one in every if key in one}
        formula = next(r[0] for r in found if r)
        short = {"forward": "fwd", "backward": "bwd"}.get(phase, "")
        ok = "ok" if marks == {"ok"} else "✗"
        rows.append([axis, what, short, collective, calls, *cells, formula, ok])
    return rows


def explain_traffic(report: Report, run: MeshRun, marks: set) -> None:
    """What the table of section 6 says in words."""
    args, text = report.args, ""
    if args.tp > 1:
        text += (
            "A layer gathers twice forward and reduce-scatters twice; the embedding "
            "reduce-scatters, the head gathers. Backward, each becomes the other, and "
            "inputs are gathered once more (lesson 04). "
        )
    if args.zero and args.dp > 1:
        text += (
            "--zero: reduce-scatter and all-gather are the halves of an all-reduce; "
            "in a ring they send its bytes. "
        )
    ok = "ok" if marks == {"ok"} else "✗"
    text += f"Each as its formula says, on every rank, and nothing else: {ok}"
    report.say(textwrap.fill(text, 87, initial_indent="   ", subsequent_indent="   "))


class PlainStage(nn.Module):
    """A stage of the single-process model, for PyTorch's plan to split."""

    def __init__(self, full: Transformer, stage: int, num_stages: int, recompute: bool):
        super().__init__()
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.recompute = recompute
        if self.first:
            self.embed_tokens = full.embed_tokens
        mine = layers_of(stage, num_stages, len(full.layers))
        self.layers = nn.ModuleDict({str(i): full.layers[i] for i in mine})
        if self.last:
            self.norm, self.lm_head = full.norm, full.lm_head
        for name, table in full.named_buffers():
            self.register_buffer(name, table.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed_tokens(x)
        tables = self.cos, self.sin, self.future
        for layer in self.layers.values():
            if self.recompute:  # keep x alone, and go forward once more in backward
                x = checkpoint(layer, x, *tables, use_reentrant=False)
            else:
                x = layer(x, *tables)
        return self.lm_head(self.norm(x)) if self.last else x


def plan_of_stage(stage: nn.Module, layers: int, sequence: bool) -> dict:
    """PyTorch's words for lessons 01 to 04, of the modules that this stage has."""
    plan, split = plan_for(layers), Shard(1) if sequence else Replicate()
    ahead = {"input_layouts": split, "desired_input_layouts": Replicate()}
    for i in range(layers if sequence else 0):
        norms = f"layers.{i}.input_layernorm", f"layers.{i}.post_attention_layernorm"
        plan |= {name: SequenceParallel() for name in norms}
        plan[f"layers.{i}.mlp"] = PrepareModuleInput(**ahead)
        four = [{key: (x, None, None, None) for key, x in ahead.items()}]
        plan[f"layers.{i}.self_attn"] = PrepareModuleInput(**four[0])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel(output_layouts=split)
    plan["embed_tokens"] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=split
    )
    plan |= {"norm": SequenceParallel()} if sequence else {}
    plan["lm_head"] = ColwiseParallel(
        input_layouts=split, output_layouts=Shard(-1), use_local_output=False
    )
    names = dict(stage.named_modules())
    return {name: style for name, style in plan.items() if name in names}


def pytorch_stage(full: Transformer, mesh: DeviceMesh, args) -> PlainStage:
    """init_device_mesh → parallelize_module over tp → fully_shard over dp."""
    stage, sequence = mesh["pp"].get_local_rank(), args.seq_len % args.tp == 0
    model = PlainStage(copy.deepcopy(full), stage, args.pp, args.recompute)
    plan = plan_of_stage(model, args.layers, sequence)
    parallelize_module(model, mesh["tp"], plan)
    options = {"mesh": mesh["dp"]}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in model.layers.values():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def whole_dtensor(x: Tensor) -> Tensor:
    """The whole tensor, gathered over one axis after the other: dp cut what tp had cut.

    Axes of one rank come first: there is nothing to undo, but DTensor would warn.
    """
    if not isinstance(x, DTensor):
        return x
    sizes = x.device_mesh.shape
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i] > 1):
        placements = [*x.placements]
        placements[i] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


def show_pytorch(report: Report, full: Transformer, batch: tuple, groups) -> None:
    """Section 7: the same mesh by PyTorch's own parts, against one process."""
    args, (tokens, target) = report.args, batch
    kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    full = copy.deepcopy(full)
    if args.tie:  # its weight as two: PyTorch's parts do not tie across stages
        full.lm_head.weight = nn.Parameter(full.lm_head.weight.detach().clone())
    reference = copy.deepcopy(full)
    wanted = mean_loss(reference(tokens), target)
    wanted.backward()
    sizes = tuple(getattr(args, axis) for axis in AXES)
    mesh = init_device_mesh(args.device, sizes, mesh_dim_names=AXES)
    model = pytorch_stage(full, mesh, args)
    stage = PipelineStage(
        model, mesh["pp"].get_local_rank(), args.pp, torch.device(args.device),
        group=mesh["pp"].get_group(),
    )  # fmt: skip
    targets = (target != IGNORE).sum()

    def loss_of(logits, target_bS):
        wide = torch.promote_types(logits.dtype, torch.float32)
        one = F.cross_entropy(
            logits.to(wide).flatten(0, 1), target_bS.flatten(), reduction="sum"
        )
        return one / targets * args.dp  # fully_shard averages over replicas

    # scale_grads would divide by M once more
    run = kinds[args.schedule](stage, args.microbatches, loss_of, scale_grads=False)
    mine = [shard(x, 0, groups["dp"]) for x in batch]
    inputs, losses = ([mine[0]] if model.first else []), []
    ends = dict(target=mine[1], losses=losses) if model.last else {}
    with loss_parallel():
        run.step(*inputs, **ends, return_outputs=False)
    loss = sum((whole_dtensor(x.detach()) for x in losses), torch.zeros(()).to(wanted))
    for axis in ("dp", "pp"):
        loss = all_reduce(loss / (args.dp if axis == "dp" else 1), groups[axis])
    rounding = bfloat16_alone(reference, batch) if args.bf16 else {}
    compare_pytorch(report, model, reference, loss, wanted, rounding)


def bfloat16_alone(reference: Transformer, batch: tuple) -> dict[str, float]:
    """How far bfloat16's rounding alone moves each gradient, in one process."""
    small = copy.deepcopy(reference).to(torch.bfloat16)
    small.zero_grad()
    mean_loss(small(batch[0]), batch[1]).backward()
    wide = {name: p.grad for name, p in reference.named_parameters()}
    return {
        n: rel_diff(p.grad.to(wide[n]), wide[n]) for n, p in small.named_parameters()
    }


def compare_pytorch(report, model, reference, loss, wanted, rounding: dict) -> None:
    """Loss and every gradient of PyTorch's parts; in bfloat16 they may differ by three
    times what rounding does in one process, as in lessons 02 to 04."""
    args, theirs = report.args, dict(reference.named_parameters())
    limits = ALLOWED["bfloat16" if args.bf16 else args.dtype]
    marks = {report.check("PyTorch: loss", rel_diff(loss, wanted), limits[0])}
    worst = 0.0
    for name, p in model.named_parameters():
        diff = rel_diff(whole_dtensor(p.grad), theirs[name].grad)
        worst = max(worst, diff)
        limit = max(limits[1], 3 * rounding.get(name, 0.0))
        marks.add(report.check(f"PyTorch: dL/d {name}", diff, limit))
    worst = max(gather_objects(worst))
    report.data["losses"][0]["dtensor"] = loss.item()
    extra = "".join(
        [", recomputed activations"] * args.recompute + [", bfloat16"] * args.bf16
    )
    kind = "Schedule1F1B" if args.schedule == "1f1b" else "ScheduleGPipe"
    batch = "the first batch" + ", padded" * args.ragged + ", untied" * args.tie
    report.say(
        "\n7  The same by PyTorch: init_device_mesh, parallelize_module, fully_shard,\n"
        f"   {kind}{extra}\n"
        f"   Forward and backward of {batch}; fully_shard cuts\n"
        "   parameters and gradients over dp too (ZeRO stage 3)\n"
        f"   loss {loss.item():.8f}, alone {wanted.item():.8f}; gradients differ by "
        f"{worst:.1e}: {'ok' if marks == {'ok'} else '✗'}\n"
    )


def parse_args(ranks: int) -> argparse.Namespace:
    parser = lesson_parser(__doc__, 3, "steps of AdamW, those before --load included")
    add = parser.add_argument
    add("--dp", type=positive, help="replicas (default: what is left of the ranks)")
    add("--pp", type=positive, help="stages (default: 2 if it divides what tp leaves)")
    add("--tp", type=positive, help="T (default: 2 if it divides the ranks)")
    add("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    add("--microbatches", type=positive, default=4, help="M (default 4)")
    add("--ragged", action="store_true", help="batches of different lengths")
    add("--zero", action="store_true", help="shard AdamW's state over the replicas")
    add("--simulate-compute", type=positive, metavar="MS",
        help="also a pipeline that sleeps MS milliseconds for a forward, twice "
        "as long for a backward")  # fmt: skip
    add("--save", type=Path, metavar="DIR", help="a checkpoint there after each step")
    add("--load", type=Path, metavar="DIR", help="go on from the newest one there")
    add("--hidden", type=positive, default=64, help="D (default 64)")
    add("--heads", type=positive, default=8, help="N (default 8)")
    add("--kv-heads", type=positive, help="K (default N)")
    add("--layers", type=positive, default=4, help="L (default 4)")
    add("--batch-size", type=positive, default=16, help="B (default 16)")
    add("--seq-len", type=positive, help="S (default 32; with --ragged 64)")
    add("--vocab-size", type=positive, default=257, help="V (default 257)")
    add("--clip", type=float, default=1.0, help="gradient norm allowed (default 1)")
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--verbose", action="store_true", help="a row for each layer's parameters")
    add("--recompute", action="store_true", help="in section 7: activations twice")
    add("--bf16", action="store_true", help="in section 7: bfloat16 mixed precision")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    args.profile, args.dropout = None, 0.0
    args.ragged = args.ragged or args.break_name == "shape"
    args.tie = args.tie or args.break_name == "tied"
    args.seq_len = args.seq_len or (64 if args.ragged else 32)
    fill_mesh(args, ranks)
    check_mesh(args, ranks)
    try:
        check_sizes(args, args.tp)
    except ValueError as error:  # there T was the number of ranks
        message = str(error).replace("ranks, by --nproc_per_node", "--tp")
        raise ValueError(message) from None
    check_checkpoints(args)
    return args


def fill_mesh(args, ranks: int) -> None:
    """Axes that were not given: tp 2 and pp 2 where they divide, dp takes the rest.

    A break has the axis that it is about first.
    """
    needed = NEEDS.get(args.break_name, "tp")
    for axis in (needed, "tp", "pp"):
        given = math.prod(getattr(args, a) or 1 for a in AXES)
        if getattr(args, axis) is None:
            setattr(args, axis, 2 if ranks % (2 * given) == 0 else 1)
    args.dp = args.dp or max(1, ranks // (args.tp * args.pp))


def check_mesh(args, ranks: int) -> None:
    """ValueError where the mesh does not fit the ranks, the layers or the batch."""
    needed = NEEDS.get(args.break_name)
    if needed and getattr(args, needed) == 1 and ranks > 1:
        raise ValueError(f"--break {args.break_name} needs --{needed} 2 or more")
    if args.dtype == "bfloat16":
        raise ValueError(
            "--dtype bfloat16: float32 and float64 are compared here; --bf16 shows "
            "PyTorch's mixed precision in section 7"
        )
    product = args.dp * args.pp * args.tp
    if product != ranks:
        raise ValueError(
            f"--dp {args.dp} × --pp {args.pp} × --tp {args.tp} = {product}, but there "
            f"are {ranks} ranks (--nproc_per_node): the product must be their number"
        )
    if args.pp > args.layers:
        raise ValueError(
            f"--pp {args.pp} stages, but --layers {args.layers}: each stage needs one "
            f"layer at least; --layers {args.pp} would do"
        )
    parts = args.dp * args.microbatches
    if args.batch_size % parts:
        raise ValueError(
            f"--batch-size {args.batch_size} is not a multiple of --dp {args.dp} × "
            f"--microbatches {args.microbatches} = {parts}: {args.batch_size} % {parts}"
            f" = {args.batch_size % parts}; --batch-size "
            f"{args.batch_size + parts - args.batch_size % parts} would do"
        )


def check_checkpoints(args) -> None:
    """ValueError for a checkpoint that cannot be loaded, a folder not to save in.

    With torchrun --max-restarts all ranks are started anew when one is lost: then they
    go on from the newest finished checkpoint of --save, if there is one.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and args.save and list(args.save.glob("step_[0-9]*")):
        args.load = args.load or args.save
    args.checkpoint, begin = None, 0
    if args.load:
        args.checkpoint = find_checkpoint(args.load, args)
        begin = args.checkpoint[1]
        if begin >= args.steps:
            raise ValueError(
                f"--load {args.load}: is at step {begin}, --steps {args.steps} leaves "
                f"nothing to do; --steps {begin + args.steps} would do"
            )
    if args.save:
        if not args.save.parent.is_dir() or args.save.is_file():
            raise ValueError(f"--save {args.save}: no folder, and none to make it in")
        later = [p for p in args.save.glob("step_[0-9]*") if int(p.name[5:]) > begin]
        if later:
            raise ValueError(
                f"--save {args.save}: {min(later).name} is there already; --load "
                f"{args.save} goes on from it, or choose another folder"
            )


def main(args: argparse.Namespace, backend: str) -> str:
    sizes = {axis: getattr(args, axis) for axis in AXES}
    groups = make_mesh(sizes, args.timeout)
    report = Report("05_3d_parallel", args, sizes, backend)
    report.data["in_flight"] = []
    full, batches = make_tied(args), make_batches(args, args.steps)
    if args.ragged:
        batches = [sort_rows(*batch) for batch in batches]
    alone, begin = Training(copy.deepcopy(full), None, args), 0
    run = MeshRun(MeshTraining(full, groups, args))
    if args.load:
        path, begin = args.checkpoint
        load_checkpoint(path, begin, run.training)
        made = json.loads((path / COMPLETE).read_text())["mesh"]
        report.data["loaded"] = dict(step=begin, mesh=made)
        report.say(
            f"   goes on after step {begin}, saved by the mesh {made}; the one process "
            "beside\n   it starts at step 1 again, and goes through all steps"
        )
    for step in range(args.steps):
        alone.step(batches, step)
        if step < begin:
            alone.first = {}  # gradients are compared at the first step on the mesh
            continue
        run.step(batches[step])
        if args.save:
            save_checkpoint(args.save, step + 1, run.training)
    show_layout(report, run.training)
    show_both_losses(report, alone, run, begin, batches[-1][1])
    if args.ragged:
        show_lengths_3d(report, run, batches[-1])
    show_parameters_3d(report, alone, run)
    show_after_3d(report, alone, run)
    show_holdings_3d(report, run)
    show_timeline(report, run)
    show_traffic_3d(report, run, batches[begin:])
    show_pytorch(report, full, batches[0], groups)
    return report.verdict("the mesh == one process", BREAKS.get(args.break_name))


if __name__ == "__main__":
    launch(__file__, parse_args, main, BREAKS, globals())
