"""Lesson 05: data × pipeline × tensor parallelism, on one mesh of ranks.

Three ways to spread a model over ranks, orthogonal to each other: tensor parallelism
(TP) splits every matrix, a pipeline (PP) splits the stack of layers into stages, data
parallelism (DP) splits the batch. Each rank has a position on each of the three axes.

Run it (1, 2, 3, 4 and 6 ranks also work; on two ranks it is a pipeline):

    torchrun --standalone --nproc_per_node=8 05_3d_parallel.py

Read it in two sittings, marked in NEW and in the titles of the output:
    [pipeline]  stages, schedules, messages. Run it on 2 ranks, read sections 1 and 2,
                then see it in time: beyond/14_schedules.py on 4 ranks.
    [mesh]      one step of training on all axes. Run it on 8 ranks, sections 3 to 6.

What you will see: which rank is where, and in which order each stage computes; then the
same losses, gradients and parameters as in one process, and what each axis sends. Bytes
must equal formulas.

Exercises; answers are in the sections of notebooks/05_3d_parallel.ipynb in brackets:
    in schedule, let each stage do one forward pass more before its first backward pass:
                       what changes, values or memory? Then let only the last stage take
                       its micro-batches in another order: who notices? [4]
    --ragged           padding is trimmed: micro-batches have different lengths [9]
    --tie              embedding and head share one weight, on two stages [7]
    in MeshTraining.sum_gradients, take the mean over replicas instead of the sum [6]

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read schedule, Pipeline and MeshTraining.

Shapes: B batch, S sequence, D hidden, V vocabulary, L layers, T ranks in a TP group, P
    stages, DP replicas, M micro-batches of b = B/(DP·M) rows. UPPERCASE is the full
    size, lowercase a slice: x_bsD is a micro-batch with s = S/T of its positions. A
    tensor is replicated, sharded, or partial: this rank's part of a sum over ranks.
No dropout: the same masks as in one process would need random numbers that depend on
    step, layer and row, not on the rank. Large systems accept different masks.

Sources: Megatron-LM, arXiv:2104.04473 (3D, 1F1B, bubble); GPipe, arXiv:1811.06965;
    docs.pytorch.org, torch.distributed.pipelining.
"""

from __future__ import annotations

import copy
import logging
import math
from datetime import timedelta
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, parallel

# ==== NEW in 05: data × pipeline × tensor parallelism
# Read lines 61 to 407, in about 35 minutes. What follows is optional, up to RUN.

# From lesson 00: COMM counts collectives, and records in which call this rank waits.
# From 01: shardings_of(p) is ((dim, group), …), empty if p is replicated. From 02: PAD
# is the padding token, IGNORE the target of a position without one. From 03: p.rows is
# the number of rows without padding, and the loss is computed from sharded logits. From
# 04: sp_transformer splits heads, columns, vocabulary and sequence over the TP group;
# all_reduce_replicated_gradients must be called after its backward.

# ---- First sitting: a pipeline

# A stage needs the output of the stage before it: with the batch in one piece, only one
# stage would compute at a time. So each replica splits its rows into M micro-batches,
# and while stage 1 computes the first, stage 0 computes the second. Backward runs from
# the last stage to the first: each stage sends its dL/dx to the stage before it.


def make_mesh(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of {"pp": P, "dp": DP, "tp": T}, and two more.

    Rank = (stage · DP + replica) · T + tp_rank: a TP group is T neighbors, on the
    fastest links. Example for P = DP = T = 2: rank 5 = (1·2 + 0)·2 + 1 is in the TP
    group [4, 5], the DP group [5, 7] and the pipeline [1, 5].
    """
    groups = mesh_groups(sizes, timeout)
    pipelines = torch.arange(dist.get_world_size()).view(sizes["pp"], -1).T.tolist()
    # Gradients go back in a group of their own: NCCL runs the messages of one group in
    # order, so an activation whose receiver is busy would block a gradient behind it.
    groups["pp_backward"] = new_group_from(pipelines, "pp", timeout)
    # For --tie: first and last stage. Those between get a group that sends nothing.
    first_and_last = [sorted({line[0], line[-1]}) for line in pipelines]
    between = [line[1:-1] for line in pipelines if len(line) > 2]
    groups["embedding"] = new_group_from(first_and_last + between, "embed", timeout)
    return groups


def new_group_from(lists: list, axis: str, timeout: float) -> dist.ProcessGroup:
    """Create one group per list of ranks, on every rank; return this rank's group."""
    limit = timedelta(seconds=timeout)
    return dist.new_subgroups_by_enumeration(lists, timeout=limit, group_desc=axis)[0]


def slice_stage(model: Transformer, stage: int, num_stages: int) -> Transformer:
    """Remove from a model what other stages hold: its forward is then a stage's.

    Transformer.forward is lm_head(norm(layers(embed_tokens(x)))). With an Identity
    instead of the embedding, a stage takes the activations of the stage before it. The
    first L mod P stages get one layer more.

    Shapes: tokens [b, S] on the first stage, otherwise x [b, s, D] from the stage
        before → logits [b, S, v] on the last stage, otherwise x [b, s, D] for the next.
    """
    indices = torch.arange(len(model.layers)).tensor_split(num_stages)[stage]
    model.layers = nn.ModuleList(model.layers[i] for i in indices)
    if stage > 0:
        model.embed_tokens = nn.Identity()
    if stage < num_stages - 1:
        model.norm = nn.Identity()
        model.lm_head = nn.Identity()
    return model


def schedule(kind: str, stage: int, num_stages: int, num_microbatches: int) -> list:
    """The steps of a stage, in order: [("forward", 0), …, ("backward", 0), …].

    "gpipe": all forward passes, then all backward passes, so that a stage holds the
    activations of all M micro-batches at once (arXiv:1811.06965).
    "1f1b": one forward pass per later stage, then one forward and one backward pass
    alternating, then the remaining backward passes. A stage holds the activations of
    min(P − stage, M) micro-batches at most (arXiv:2104.04473, sec. 2.2).
    With either one, a stage waits as long as P − 1 micro-batches take (forward and
    backward) while the pipeline fills and drains, and it computes for M. The bubble is
    waiting/computing: (P − 1)/M.
    """
    M = num_microbatches
    warm_up = M if kind == "gpipe" else min(num_stages - stage - 1, M)
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(M - warm_up):
        steps += [("forward", warm_up + i), ("backward", i)]
    return steps + [("backward", i) for i in range(M - warm_up, M)]


class Label(NamedTuple):
    """What a message between stages carries, and for which stage."""

    kind: str  # "activation" or "gradient"
    microbatch: int
    stage: int  # that gets it

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch + 1} to stage {self.stage}"


class Message(NamedTuple):
    """A message on its way to another stage."""

    label: Label
    ranks: list[int]  # sender and receiver
    tensors: list[Tensor]  # must live until they have been received
    works: list[dist.Work]  # wait() of each returns when its tensor has been received


def send(x: Tensor, label: Label, dst: int, group) -> Message:
    """Start sending x to rank `dst` of a group, and return at once; wait_for waits.

    A header goes first, 5 int64: micro-batch, stage, shape. A send ends when its
    receiver has called receive. If two neighbors both waited for their sends here,
    neither would get to its receive (--break order).
    """
    header = torch.tensor([label.microbatch, label.stage, *x.shape], device=x.device)
    ranks = [dist.get_rank(), dist.get_global_rank(group, dst)]
    message = Message(label, ranks, [header, x.detach().contiguous()], [])
    for tensor in message.tensors:
        COMM.count("send/recv", tensor.nbytes, group.group_desc)
        message.works.append(dist.isend(tensor, group=group, group_dst=dst))
    return message


def wait_for(message: Message) -> None:
    """Wait until a message has been received."""
    with COMM.blocking(str(message.label), message.ranks):
        for work in message.works:
            work.wait()


def receive(like: Tensor, label: Label, src: int, group) -> Tensor:
    """Wait for a message from rank `src` of a group: a tensor, of the dtype of `like`.

    ValueError if it is another one than `label` says: the two lists of steps disagree.
    """
    ranks = [dist.get_global_rank(group, src), dist.get_rank()]
    with COMM.blocking(str(label), ranks):
        header = like.new_empty(5, dtype=torch.int64)
        dist.recv(header, group=group, group_src=src)
        microbatch, stage, *shape = header.tolist()
        x = like.new_empty(shape)
        dist.recv(x, group=group, group_src=src)
    got = Label(label.kind, microbatch, stage)
    if got != label:
        text = f"expected the {label}, got the {got}"
        raise ValueError(f"{text}: the steps of ranks {ranks} are in different orders")
    return x


class Pipeline:
    """Runs a stage's schedule: receive, compute, send.

    Communication per micro-batch: a header and b·s·D elements to the next stage; in
    backward the same to the stage before.
    """

    def __init__(self, stage: nn.Module, loss_of, groups):
        self.stage = stage
        self.loss_of = loss_of  # (output, targets) → loss; on the last stage only
        self.pp = groups["pp"]
        self.pp_backward = groups["pp_backward"]
        self.number = self.pp.rank()  # of the stage
        self.first = self.number == 0
        self.last = self.number == self.pp.size() - 1
        self.rank_before = self.number - 1
        self.rank_after = self.number + 1
        self.like = next(stage.parameters())  # messages have its dtype and device

    def run(self, steps: list[tuple], micro_batches: list) -> Tensor:
        """Run all steps. Return the sum of the losses; 0 except on the last stage."""
        self.micro_batches = micro_batches
        self.loss = self.like.new_zeros(())
        self.in_flight = {}  # micro-batch → input, output, the message with the output
        self.sent_back = []  # messages with gradients: no answer says they have arrived
        for phase, i in steps:
            with COMM.label("mesh", phase):
                getattr(self, phase)(i)  # forward or backward, of micro-batch i
        while self.sent_back:
            wait_for(self.sent_back.pop(0))
        return self.loss

    def forward(self, i: int) -> None:
        """Run micro-batch i through this stage, and send the result to the next."""
        x, target = self.micro_batches[i]  # (None, None) on a stage between
        if not self.first:
            label = Label("activation", i, self.number)
            x = receive(self.like, label, self.rank_before, self.pp)
            x.requires_grad_()  # without a history, x is a leaf: backward fills x.grad
        y = self.compute_forward(i, x, target)
        sent = None
        if not self.last:
            label = Label("activation", i, self.number + 1)
            sent = send(y, label, self.rank_after, self.pp)
        self.in_flight[i] = (x, y, sent)  # and, through y, all that autograd saved

    def compute_forward(self, i: int, x: Tensor, target: Tensor) -> Tensor:
        """This stage's output; on the last stage the loss, which is also added up."""
        y = self.stage(x)
        if self.last:
            y = self.loss_of(y, target)
            self.loss = self.loss + y.detach()
        return y

    def backward(self, i: int) -> None:
        """Run backward of micro-batch i, and send dL/dx to the stage before."""
        x, y, sent = self.in_flight.pop(i)
        grad = None  # the last stage has the loss, a scalar
        if not self.last:
            label = Label("gradient", i, self.number)
            grad = receive(self.like, label, self.rank_after, self.pp_backward)
            wait_for(sent)  # received long ago: this gradient is the answer to it
        self.compute_backward(i, y, grad)
        if not self.first:
            label = Label("gradient", i, self.number - 1)
            message = send(x.grad, label, self.rank_before, self.pp_backward)
            self.sent_back.append(message)

    def compute_backward(self, i: int, y: Tensor, grad: Tensor | None) -> None:
        """From dL/dy to dL/dx and the gradients of this stage's parameters."""
        y.backward(grad)


# ---- Second sitting: one step on the mesh


def make_microbatches(batch: tuple, groups, count: int, ragged: bool) -> list[Tensor]:
    """This replica's rows of the batch, as M micro-batches of tokens and targets.

    ragged: trim each to its longest row, rounded up to a multiple of T.
    Shapes: tokens and targets [B, S] → M tensors [2, b, S].
    """
    rows = shard(torch.stack(batch), 1, groups["dp"])
    micro_batches = split(rows, 1, count)
    if ragged:
        for i, (tokens_bS, _) in enumerate(micro_batches):
            length = int((tokens_bS != PAD).any(0).sum())
            length += -length % groups["tp"].size()
            micro_batches[i] = micro_batches[i][..., :length].contiguous()
    return micro_batches


def broadcast_batch(batch: tuple, groups, args) -> list[Tensor]:
    """This replica's micro-batches: one rank of a TP group loads them, all get them.

    Communication per micro-batch, over tp: the shape (3 int64), then 2·b·S int64.
    """
    micro_batches = [None] * args.microbatches
    if groups["tp"].rank() == 0:
        micro_batches = make_microbatches(batch, groups, args.microbatches, args.ragged)
    received = []
    for x in micro_batches:
        # Only the first rank knows how long the rows are.
        shape = torch.tensor([0, 0, 0] if x is None else x.shape, device=args.device)
        shape = broadcast(shape, 0, groups["tp"]).tolist()
        if x is None:
            x = torch.empty(shape, dtype=torch.int64, device=args.device)
        received.append(broadcast(x, 0, groups["tp"]))
    return received


def count_targets(micro_batches: list[Tensor], dp_group) -> int:
    """Count the targets in the batch of all replicas: one all-reduce of one int64."""
    targets = sum((target != IGNORE).sum() for _, target in micro_batches)
    return all_reduce(targets, dp_group).item()


def part_of_mean(loss_bS: Tensor, batch_targets: int) -> Tensor:
    """What a micro-batch adds to the mean loss of the batch.

    Each part is divided by the targets of the batch instead of its own, so the parts
    and their gradients only have to be added up: every token has the same weight.
    """
    return loss_bS.sum() / batch_targets


def all_reduce_gradients(model: nn.Module, group) -> None:
    """Sum gradients over a group, as dp: each rank has a part of the batch's gradient.

    Communication: one all-reduce of all gradients, flattened into one vector.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]), group)
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(grad.view_as(p))


class MeshTraining:
    """Training of one model on the whole mesh, seen from one rank."""

    def __init__(self, full: Transformer, groups: dict[str, dist.ProcessGroup], args):
        self.groups = groups
        self.args = args
        pp = groups["pp"]
        model = sp_transformer(full, groups["tp"])
        names = {p: name for name, p in model.named_parameters()}
        self.stage = slice_stage(model, pp.rank(), pp.size())
        # Named as in the full model, where a tied head has the embedding's name.
        self.parameters = {names[p]: p for p in self.stage.parameters()}
        # As in lesson 02's train_transformer, which says why. Edit both or neither.
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=3e-3, eps=1e-4)
        self.pipeline = Pipeline(self.stage, self.loss, groups)
        self.steps = schedule(args.schedule, pp.rank(), pp.size(), args.microbatches)

    def loss(self, logits_bSv: Tensor, target_bS: Tensor) -> Tensor:
        """What a micro-batch adds to the mean loss, from sharded logits (lesson 03)."""
        V = self.args.vocab_size
        tp_group = self.groups["tp"]
        with COMM.label("mesh", "loss"):
            loss_bS = vocab_parallel_cross_entropy(logits_bSv, target_bS, tp_group, V)
        return part_of_mean(loss_bS, self.batch_targets)

    def gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Run forward and backward of a batch, then sum partial gradients over ranks.

        Returns this replica's part of the mean loss, on the last stage.
        """
        pipeline = self.pipeline
        micro_batches = [(None, None)] * self.args.microbatches
        with COMM.label("mesh", "batch"):
            if pipeline.first or pipeline.last:  # one needs tokens, the other targets
                micro_batches = broadcast_batch(batch, self.groups, self.args)
            if pipeline.last:
                self.batch_targets = count_targets(micro_batches, self.groups["dp"])
        loss = pipeline.run(self.steps, micro_batches)
        self.sum_gradients()
        return loss

    def sum_gradients(self) -> None:
        """Sum what is partial, once per step: backward has added up micro-batches."""
        with COMM.label("mesh", "tp sum"):
            all_reduce_replicated_gradients(self.stage, self.groups["tp"])
        with COMM.label("mesh", "dp sum"):
            all_reduce_gradients(self.stage, self.groups["dp"])

    def update(self) -> float:
        """Clip the gradient by its norm over the mesh, then step. Return the norm.

        Communication: one all-reduce of one float64 over tp, and one over pp. Replicas
        have equal gradients: a sum over dp would count them DP times.
        """
        with COMM.label("mesh", "norm"):
            norm_of_stage = global_norm(self.stage, self.groups["tp"])  # lesson 02's
            square = torch.tensor(norm_of_stage, dtype=torch.float64) ** 2
            square = all_reduce(square.to(self.args.device), self.groups["pp"])
        norm = square.sqrt().item()
        clip_gradients(self.stage, self.args.clip, norm)
        with COMM.label("mesh", "update"):
            self.optimizer.step()  # each rank what it holds: nothing is sent
        self.stage.zero_grad()
        return norm


# ---- Optional: embedding and head share one weight, on two stages


TIED = "embed_tokens.weight"  # the name of the weight in the full model


class TiedTraining(MeshTraining):
    """MeshTraining with a tied weight: the first stage owns it, the last has a copy.

    The first stage gets the sum of both gradients and updates the weight; the copy is
    renewed. (If both updated it, as in Megatron-LM, their gradients would have to be
    bitwise identical, or the two would drift apart.)

    Communication: one all-reduce of the gradient and one broadcast of the weight, v·D
        elements each, between first and last stage.
    """

    def __init__(self, full: Transformer, groups: dict[str, dist.ProcessGroup], args):
        super().__init__(full, groups, args)
        self.tied = self.parameters.get(TIED)  # None between the two

    def sum_gradients(self) -> None:
        if self.tied is not None:
            with COMM.label("mesh", "tied"):
                self.tied.grad = all_reduce(self.tied.grad, self.groups["embedding"])
            if self.groups["pp"].rank() > 0:
                self.tied.grad = None  # AdamW, norm and sums skip the copy
        MeshTraining.sum_gradients(self)

    def update(self) -> float:
        norm = MeshTraining.update(self)
        if self.tied is not None:
            with COMM.label("mesh", "update"):
                self.tied.data.copy_(broadcast(self.tied, 0, self.groups["embedding"]))
        return norm


# ==== RUN

AXES = ("pp", "dp", "tp")  # outermost first
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}  # PyTorch's


def main(args, report: Report) -> None:
    """Train one model in one process and on the mesh, then compare."""
    mesh = {axis: getattr(args, axis) for axis in AXES}
    groups = make_mesh(mesh, args.timeout)
    batches = make_batches(__doc__, args, args.steps)
    batches = [pad_batch(tokens, target, args.tp) for tokens, target in batches]
    args.seq_len = batches[0][0].shape[1]  # from here on T divides it
    size = mesh_size(args)
    report.begin(mesh, size)
    # A tied weight's gradient is summed over first and last stage: 2 ranks, not P.
    report.mesh = dict(mesh, embed=min(2, args.pp))
    full = make_tied(args)

    runs = {}
    model = copy.deepcopy(full)
    runs["one process"] = train_transformer("one process", model, batches, args)
    check_reference(report, runs["one process"], batches[0], size)
    with report.column("mesh"):
        kind = TiedTraining if args.tie else MeshTraining
        training = kind(full, groups, args)
        show_stages(report, training)
        show_steps_of_stages(report, training)
        runs["mesh"] = train_on_mesh(training, batches, args)
    report.number = 2  # so that section numbers stay if the mesh has raised an error
    show_training_mesh(report, runs)
    if "mesh" in runs:
        show_replicas_mesh(report, training, runs["mesh"])
        show_batch(report, training, batches[-1])
    show_gradients_mesh(report, runs)
    if "mesh" in runs:
        show_communication_mesh(report, training, size)
    report.number = 5
    show_pytorch(report, full, batches[0], groups)


# ---- Training


def train_on_mesh(training: MeshTraining, batches: list, args) -> TrainingRun:
    """One step on each batch, as lesson 02's train_transformer."""
    losses = {}
    norms = {}
    for step, batch in enumerate(batches, 1):
        # The counters restart, so they show the last step.
        COMM.calls.clear()
        COMM.bytes.clear()
        part_of_loss = training.gradients(batch)
        if step == 1:
            gradients = {name: p.grad for name, p in training.parameters.items()}
            gradients = gather_stages(training, gradients)
        norms[f"‖g‖, step {step}"] = training.update()
        # For the report: replicas have parts of the loss, other stages have 0.
        loss = all_reduce(part_of_loss, training.groups["dp"])
        losses[f"loss, step {step}"] = all_reduce(loss, training.groups["pp"]).item()
    parameters = gather_stages(training, training.parameters)
    return TrainingRun(
        training.stage, training.optimizer, losses, norms, gradients, parameters
    )


def gather_stages(training: MeshTraining, tensors: dict) -> dict[str, Tensor]:
    """Unsharded tensors of all stages, by name; this rank's own where it has them."""
    local = {}
    for name, x in tensors.items():
        if x is not None:  # only the first stage has the gradient of a tied weight
            p = training.parameters[name]
            x = unshard(x.detach(), shardings_of(p))
            local[name] = x[: getattr(p, "rows", None)].cpu().clone()
    unsharded = {}
    for of_stage in gather_objects(local, training.groups["pp"]):
        unsharded.update(of_stage)
    unsharded.update(local)
    return unsharded


# ---- The sections of the output, in order: first those of the pipeline


def show_stages(report: Report, training: MeshTraining) -> None:
    """Which rank is where, and what each stage holds."""
    args = report.args
    groups = training.groups
    stage, replica, tp_rank = [groups[axis].rank() for axis in AXES]
    rank = (stage * args.dp + replica) * args.tp + tp_rank
    formula = "rank = (stage · DP + replica) · T + tp_rank"
    report.check("mesh", formula, abs(rank - dist.get_rank()))
    modules = list(dict.fromkeys(part_of(name) for name in training.parameters))
    check_layers(report, modules, groups["pp"])
    few = ", ".join(modules)
    holds = gather_objects(few if len(few) < 60 else f"{modules[0]} … {modules[-1]}")
    members = {axis: dist.get_process_group_ranks(groups[axis]) for axis in AXES}
    report.data["groups"] = gather_objects(members)
    rows = []
    for stage in range(args.pp):
        row = {"": f"stage {stage}"}
        for replica in range(args.dp):
            first = (stage * args.dp + replica) * args.tp
            row[f"dp {replica}"] = str(report.data["groups"][first]["tp"])
        row["holds"] = holds[first]
        rows.append(row)
    report.section(f"[pipeline] The mesh: {formula}")
    report.say("   [ ]: a TP group. Row: a stage. Column: a replica, T pipelines.")
    report.table("stages", rows)


def check_layers(report: Report, modules: list[str], pp_group) -> None:
    """Are the layers in their order over the stages, and is their number predicted?"""
    layers = [module for module in modules if module.startswith("layers.")]
    order = list(chain.from_iterable(gather_objects(layers, pp_group)))
    right = [f"layers.{i}" for i in range(report.args.layers)]
    text = f"the stages run {', '.join(order)}: not in this order"
    report.check("outputs", "order of the layers", int(order != right), text=text)
    stage = pp_group.rank()
    predicted = layers_of(report.args, stage)
    text = f"stage {stage} has {len(layers)} layers, predicted {predicted}"
    name = f"layers of stage {stage}"
    report.check("memory", name, abs(len(layers) - predicted), text=text)


def show_steps_of_stages(report: Report, training: MeshTraining) -> None:
    """The order of each stage's steps; beyond/14_schedules.py draws them in time."""
    args = report.args
    M = args.microbatches
    all_steps = gather_objects(training.steps, training.groups["pp"])
    report.section(f"[pipeline] The steps of each stage, in order: {args.schedule}")
    report.say("   1 2 …: forward of micro-batch 1, 2, …; a b …: its backward")
    for stage, steps in enumerate(all_steps):
        marks = []
        for phase, i in steps:
            marks.append(str(i + 1) if phase == "forward" else chr(ord("a") + i % 26))
        most = max(accumulate(1 if phase == "forward" else -1 for phase, _ in steps))
        limit = M if args.schedule == "gpipe" else min(args.pp - stage, M)
        text = f"at most {most} held, predicted {limit}"
        what = f"micro-batches of stage {stage}: {text}"
        report.check("memory", f"stage {stage}", max(0, most - limit), text=what)
        report.say(wrap(f"   stage {stage}: {' '.join(marks)}, {text}"))
    if args.pp > 1 and args.layers % args.pp == 0:
        report.conclude(
            f"The bubble: a stage waits (P − 1)/M = {100 * (args.pp - 1) / M:.0f} % as "
            "long as it computes, if all stages take the same time (beyond/14)."
        )


# ---- The sections of one step on the mesh


def show_training_mesh(report: Report, runs: dict[str, TrainingRun]) -> None:
    """Losses, gradient norms before clipping, and the parameters after training."""
    report.section("[mesh] Losses, gradient norms before clipping, final parameters")
    report.compare("losses", values_of(runs, "losses"), report.allowed_loss)
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", values_of(runs, "norms"), brief="norms")
    parameters = values_of(runs, "parameters")
    fold = lambda name: "all parameters"
    report.compare("parameters", parameters, fold=fold, brief="parameters")
    report.agree("as in one process")


def show_replicas_mesh(report: Report, training: MeshTraining, run) -> None:
    """What several ranks hold must be bitwise identical on all of them."""
    groups = dict(training.groups, pp=training.groups["embedding"])
    axes = ("tp", "dp", "pp") if report.args.tie else ("tp", "dp")
    replicas = {axis: {} for axis in axes}
    for name, p in training.parameters.items():
        replicas["dp"][f"{name} over dp"] = p
        if not shardings_of(p):
            replicas["tp"][f"{name} over tp"] = p
        if report.args.tie and name == TIED:
            replicas["pp"][f"{name} over pp"] = p
    rows = [replicas_row(report, axis, replicas[axis], groups[axis]) for axis in axes]
    held = sum(row["tensors"] for row in rows if report.mesh[row["identical over"]] > 1)
    report.table("replicas", rows, brief=f"{held} tensors of rank 0 that others hold")
    report.agree("the same there")
    losses = gather_objects(run.losses)
    report.check("replicas", "losses", float(losses != [run.losses] * len(losses)))


def show_batch(report: Report, training: MeshTraining, batch) -> None:
    """All ranks of a TP group work on the same rows; replicas on others."""
    args = report.args
    groups = training.groups
    # Each rank can load the batch itself, to compare with what it was sent.
    expected = make_microbatches(batch, groups, args.microbatches, args.ragged)
    if training.pipeline.first or training.pipeline.last:
        pairs = zip(training.pipeline.micro_batches, expected)
        differ = sum(not torch.equal(x, other) for x, other in pairs)
        report.check("runs", "micro-batches unlike those of the TP group", differ)
    lengths = gather_objects([x.shape[2] for x in expected], groups["dp"])
    report.data["lengths"] = lengths
    targets = [int((part != IGNORE).sum()) for part in split(batch[1], 0, args.dp)]
    targets = f"   Last batch, targets per replica: {targets}"
    report.say(wrap(f"{targets}; losses must be divided by the sum"))
    if args.ragged:
        report.say(wrap(f"   lengths of their micro-batches: {lengths}"))


def show_gradients_mesh(report: Report, runs: dict[str, TrainingRun]) -> None:
    """Gradients of step 1. A row: all parameters of a layer, so of one stage."""
    report.section("[mesh] Gradients of step 1: norms, largest relative difference")
    report.compare("gradients", values_of(runs, "gradients"), fold=part_of)


def show_communication_mesh(report: Report, training, size: dict) -> None:
    """Calls and bytes of the last step: rank 0's, the last stage's, totals per axis."""
    args = report.args
    stage = training.pipeline.number
    trained = dict(training.parameters)
    if args.tie and stage > 0:
        trained.pop(TIED, None)  # the last stage's copy
    replicated = [p for p in trained.values() if not shardings_of(p)]
    size = dict(size, l=layers_of(args, stage))
    size["Ψ"] = sum(p.numel() for p in trained.values())
    size["ρ"] = sum(p.numel() for p in replicated)
    # Lengths of this replica's micro-batches, from show_batch: they may be ragged.
    lengths = report.data["lengths"][training.groups["dp"].rank()]
    size["S"] = sum(lengths) / len(lengths)
    size["X"] = size["b"] * size["S"] * size["D"]
    size["v"] = math.ceil(size["V"] / size["T"])
    size["w"] = max(4, size["e"])  # the loss is computed in float32 at least
    report.section(
        "[mesh] Communication of rank 0 in the last step; ring: bytes that it sends\n"
        "   X      elements of a micro-batch's activation, b·S·D (their mean)\n"
        "   l      layers of the stage; + 1: embedding or head, + 2: both\n"
        "   Ψ, ρ   parameters of the rank; those of them that are replicated over tp"
    )
    if args.tie or args.verbose or (args.pp == 1 and args.tp > 1):
        report.say("   v, w   ⌈V/T⌉ rows of the vocabulary; bytes of a loss")
    report.ledger(traffic(args, stage), size, hide=["run"], brief=["norm", "batch"])
    show_totals(report)


def traffic(args, stage: int) -> dict[Call, list[Calls]]:
    """What a rank of a stage sends per step.

    Calls that every stage makes come first, so that rows of all ranks match.
    Sources: arXiv:2205.05198, sec. 4.2 (layers); arXiv:2104.04473, sec. 3 (stages).
    """
    is_first = stage == 0
    is_last = stage == args.pp - 1
    embedding = int(is_first)  # it has a reduce-scatter; backward an all-gather
    head = int(is_last)  # it has an all-gather; backward one of each
    message = [Calls("M", "40"), Calls("M", "e·X/T")]  # header, then a slice of x
    formulas = {}

    def add(phase: str, collective: str, axis: str, *terms: Calls) -> None:
        formulas[Call("mesh", phase, collective, axis)] = list(terms)

    # Lesson 04: 2 of each per layer forward, and backward 2 extra all-gathers.
    add("forward", "all-gather", "tp", Calls(f"M·(2·l + {head})", "e·X"))
    add("forward", "reduce-scatter", "tp", Calls(f"M·(2·l + {embedding})", "e·X"))
    add("backward", "all-gather", "tp", Calls(f"M·(4·l + {embedding + head})", "e·X"))
    add("backward", "reduce-scatter", "tp", Calls(f"M·(2·l + {head})", "e·X"))
    add("tp sum", "all-reduce", "tp", Calls("1", "e·ρ"))
    add("dp sum", "all-reduce", "dp", Calls("1", "e·Ψ"))
    add("norm", "all-reduce", "tp", Calls("1", "8"))  # one float64
    add("norm", "all-reduce", "pp", Calls("1", "8"))
    if is_first or is_last:  # the shape, 3 int64; then tokens and targets
        add("batch", "broadcast", "tp", Calls("M", "24"), Calls("M", "2·8·b·S"))
        if args.tie:
            add("tied", "all-reduce", "embed", Calls("1", "e·v·D"))
            add("update", "broadcast", "embed", Calls("1", "e·v·D"))
    if not is_last:
        add("forward", "send/recv", "pp", *message)
    if not is_first:
        add("backward", "send/recv", "pp", *message)
    if is_last:
        add("batch", "all-reduce", "dp", Calls("1", "8"))  # count_targets
        add("loss", "all-reduce", "tp", Calls("3·M", "w·b·S"))  # lesson 03
    return formulas


def show_totals(report: Report) -> None:
    """What only the last stage sends, the sum per axis, and a conclusion."""
    rows = report.data.get("communication", [])
    rows = [row for row in rows if "elsewhere" not in row]  # of this rank
    rows_of_ranks = gather_objects(rows)
    of_rank_0 = [label_of(row) for row in rows_of_ranks[0]]
    rows = []
    for row in rows_of_ranks[-1]:
        if label_of(row) not in of_rank_0:
            rows.append(dict({"last stage also": row["phase"]}, **row))
    if rows:
        brief = f"{len(rows)} more that only the last stage has"
        report.table("communication of the last stage", rows, ["run", "phase"], brief)
        report.agree("as predicted")

    # Stages differ in what they send, so the last column adds up all ranks.
    totals = {}  # axis → its row
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            axis = "pp" if row["axis"] == "embed" else row["axis"]
            new = {"total of rank 0": axis, "calls": 0, "payload": 0, "ring": 0}
            new["ring, all ranks"] = 0
            total = totals.setdefault(axis, new)
            if rank == 0:
                total["calls"] += row["calls"]
                total["payload"] += row["bytes"]
                total["ring"] += row["ring"]
            total["ring, all ranks"] += row["ring"]
    order = sorted(totals, key=lambda axis: -totals[axis]["ring, all ranks"])
    report.table("totals", [totals[axis] for axis in order])
    if len(order) > 1:
        most = totals[order[0]]["ring, all ranks"]
        share = most / max(1, totals[order[-1]]["ring, all ranks"])
        text = f"{order[0]} sends {share:.0f} times as much as {order[-1]}."
        if "dp" in totals:
            text += " A larger B·S leaves dp as it is."
        report.conclude(f"All ranks together, {text}")


# ---- One step by PyTorch's API


def pytorch_stage(full: Transformer, groups, args) -> tuple[nn.Module, list[str]]:
    """This rank's part of the model by PyTorch's API, and its parameters' names.

    The order matters: tp (lesson 04's plan), then this stage, then fully_shard over dp
    (ZeRO stage 3: parameters are gathered around a module's forward pass).
    """
    # Not init_device_mesh: the groups that it makes time out after 30 minutes.
    ranks = torch.arange(args.ranks).view(args.pp, args.dp, args.tp)
    device = torch.device(args.device).type
    ours = [groups[axis] for axis in AXES]
    mesh = DeviceMesh.from_group(ours, device, mesh=ranks, mesh_dim_names=AXES)
    model = parallel.parallelize_module(copy.deepcopy(full), mesh["tp"], sp_plan())
    with torch.no_grad():  # what PyTorch cannot run raises here, on all ranks
        model(torch.zeros(1, args.seq_len, dtype=torch.int64, device=args.device))
    name_of = {p: name for name, p in model.named_parameters()}
    model = slice_stage(model, mesh["pp"].get_local_rank(), args.pp)
    names = [name_of[p] for p in model.parameters()]  # fully_shard makes new ones
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), names


def pytorch_step(kind: type, full: Transformer, batch, groups, args) -> dict:
    """One step of PyTorch's pipeline: the loss, and the gradients of this stage."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # no hints
    model, names = pytorch_stage(full, groups, args)
    # fully_shard averages gradients over replicas. So each loss is multiplied by DP: it
    # is divided by 1/DP of the batch's targets.
    targets_per_replica = (batch[1] != IGNORE).sum() / args.dp

    def loss_of(logits: DTensor, target_bS: Tensor) -> Tensor:
        logits = logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, target_bS.flatten(), reduction="sum")
        return loss / targets_per_replica

    tokens_bS, target_bS = [shard(x, 0, groups["dp"]) for x in batch]
    rank = groups["pp"].rank()
    stage = PipelineStage(model, rank, args.pp, tokens_bS.device, group=groups["pp"])
    if torch.__version__ < (2, 10):  # its first message is 8 bytes, 4 are expected
        stage._get_init_p2p_neighbors_ops = list  # so send none (pytorch#165539)
    pipeline = kind(stage, args.microbatches, loss_of, scale_grads=False)  # no 1/M
    inputs = [tokens_bS] if stage.is_first else []
    losses = []
    with COMM.blocking("PyTorch's pipeline", list(range(args.ranks))):
        with parallel.loss_parallel():
            pipeline.step(*inputs, target=target_bS, losses=losses)
    zero = torch.zeros((), dtype=torch.float64, device=args.device)
    # Only the last stage has losses; the others add zero.
    loss = sum([x.detach().full_tensor() for x in losses], zero)
    loss = all_reduce(all_reduce(loss, groups["pp"]), groups["dp"])
    gradients = unshard_model(model, "grad").values()
    return dict(zip(names, gradients), loss=loss / args.dp)


def show_pytorch(report: Report, full: Transformer, batch: tuple, groups) -> None:
    """One step by PyTorch's API and in one process."""
    args = report.args
    model = copy.deepcopy(full)
    # PyTorch's stages cannot share a weight: with --tie, the two are independent here.
    model.lm_head.weight = nn.Parameter(full.lm_head.weight.detach().clone())
    # PyTorch's 1F1B requires M ≥ P.
    kind = "gpipe" if args.microbatches < args.pp else args.schedule
    report.section(f"[mesh] By PyTorch (rank 0's stage): fully_shard, {kind}")
    if args.tie:
        report.say("   The weights of embedding and head are not tied here.")
    with report.column("PyTorch", "plans"):
        got = pytorch_step(SCHEDULES[kind], model, batch, groups, args)
    if "PyTorch" in report.raised:
        return
    loss = mean_loss(model(batch[0]), batch[1])
    loss.backward()
    expected = dict(unshard_model(model, "grad"), loss=loss.detach())
    runs = {"one process": {name: expected[name] for name in got}, "PyTorch": got}
    losses = {run: {"loss": values.pop("loss")} for run, values in runs.items()}
    report.compare("PyTorch", losses, report.allowed_loss, brief="loss")
    report.compare("PyTorch", runs, fold=lambda name: "gradients", brief="gradients")
    report.agree("as in one process")


# ==== BREAK IT

BREAKS = {
    "order": dict(
        target="send",
        old="    return message\n",
        new="    wait_for(message)\n"
        "    message.works.clear()  # nothing is left to wait for\n"
        "    return message\n",
        what="a stage waits for each of its messages to be received",
        symptom="two neighbors wait for each other until the timeout; not with gpipe",
        why="activation and gradient cross, and neither stage gets to its receive",
        reported="github.com/pytorch/pytorch/issues/109401, NVIDIA/nccl issue 479",
    ),
    "mixed-up": dict(
        target="schedule",
        old='        steps += [("forward", warm_up + i), ("backward", i)]\n',
        new="        # the last stage has no stage after it, so it may begin anywhere\n"
        "        first = M - 1 - i if warm_up == 0 else warm_up + i\n"
        '        steps += [("forward", first), ("backward", first - warm_up)]\n',
        what="the last stage takes its micro-batches in another order than the others",
        symptom="a stage gets another micro-batch than its next step is about",
        why="messages arrive in the order in which they were sent, whatever is in them",
        reported="github.com/NVIDIA/Megatron-LM/pull/1451",
    ),
    "shape": dict(
        target="broadcast_batch",
        old='        shape = broadcast(shape, 0, groups["tp"]).tolist()\n',
        new="        rows = args.batch_size // args.dp // args.microbatches\n"
        "        shape = [2, rows, args.seq_len]\n",
        what="TP receivers guess the shape of the batch (--ragged is on)",
        symptom="memory behind rows is read as tokens; or an abort, or a rank waits",
        why="one rank sends the trimmed batch, the others receive into larger buffers",
        reported="github.com/NVIDIA/Megatron-LM/pull/4103",
    ),
    "data": dict(
        target="broadcast_batch",
        old="    return received\n",
        new='    return [x.roll(groups["tp"].rank(), 1) for x in received]\n',
        what="each rank of a TP group shuffles its batch for itself",
        symptom="no error; loss and gradients of step 1 are already wrong",
        why="a TP group is one model: its sums mix partial results of different rows",
        reported="github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "micro": dict(
        target="MeshTraining.loss",
        old="    return part_of_mean(loss_bS, self.batch_targets)\n",
        new='    parts = self.args.microbatches * self.groups["dp"].size()\n'
        "    return loss_bS.sum() / (target_bS != IGNORE).sum() / parts\n",
        what="micro-batch losses are averaged, whatever number of targets each has",
        symptom="loss and gradients are slightly off; right without padding",
        why="in a mean of means a token counts more where there is much padding",
        reported="github.com/meta-pytorch/torchtune/pull/1875, torchtitan issue 2972",
    ),
    "norm": dict(
        target="global_norm",
        old="        if not shardings_of(p):\n"
        "            squares /= tp_group.size()  # all T ranks add the same squares\n",
        new="",
        what="the global norm counts replicated parameters once per TP rank",
        symptom="loss and gradients of step 1 are right; the norm is too large",
        why="the sum over tp contains the squares of replicated elements T times",
        reported="github.com/ROCm/TransformerEngine/pull/715, NVIDIA-NeMo/RL pull 3788",
    ),
    "tied": dict(
        target="TiedTraining.sum_gradients",
        old='self.tied.grad = all_reduce(self.tied.grad, self.groups["embedding"])',
        new="pass",
        what="gradients of a weight tied over two stages are not summed (--tie is on)",
        symptom="the first loss is right; the embedding's gradient lacks the head's",
        why="a weight with two uses gets the sum of two gradients, wherever they arise",
        reported="github.com/uw-syfi/piper/issues/13",
    ),
    "replicas": dict(
        target="count_targets",
        old="    return all_reduce(targets, dp_group).item()\n",
        new="    return targets.item() * dp_group.size()\n",
        what="gradients are averaged over replicas with different numbers of targets",
        symptom="loss and gradients are slightly off, by another factor in each step",
        why="each replica divides by its own targets, so all replicas weigh the same",
        reported="github.com/pytorch/torchtitan/pull/2206",
    ),
    "group": dict(
        target="MeshTraining.sum_gradients",
        old='all_reduce_gradients(self.stage, self.groups["dp"])',
        new='all_reduce_gradients(self.stage, self.groups["tp"])',
        what="gradients are summed over tp instead of dp",
        symptom="the loss of step 1 is right, every gradient wrong; replicas diverge",
        why="over dp gradients stay partial; over tp different slices are added up",
        reported="github.com/ooples/AiDotNet/pull/393",
    ),
}
# The axis that must have 2 ranks or more for the bug to show.
NEEDS = {"order": "pp", "mixed-up": "pp", "tied": "pp", "replicas": "dp", "group": "dp"}
NEEDS.update({"shape": "tp", "data": "tp", "norm": "tp"})


# ==== FLAGS
# region

FROM_MESH = {  # flag → what it is; 0 stands for "not given"
    "dp": "DP, replicas (derived from the number of ranks)",
    "pp": "P, pipeline stages (derived from the number of ranks)",
    "tp": "T, ranks of a TP group (derived from the number of ranks)",
    "microbatches": "M per step and replica (4, or P if larger)",
    "layers": "L (4, or P if larger)",
    "batch_size": "B, rows (16, or the next multiple of DP·M)",
    "seq_len": "S (32; 64 with --ragged, so that lengths differ)",
    "hidden": "D (8 per head)",
    "heads": "N (2 per key/value head)",
    "kv_heads": "K (4, or the next multiple of T)",
}
OPTIONS = {
    "ragged": "trim each micro-batch to its longest row",
    "tie": "embedding and head share one weight",
}


def parse_args(ranks: int) -> argparse.Namespace:
    parser = lesson_parser(__doc__, BREAKS, sections=6, steps=3, vocab_size=257)
    add = parser.add_argument
    for name, text in FROM_MESH.items():
        add(f"--{name.replace('_', '-')}", type=positive, default=0, help=text)
    for name, text in OPTIONS.items():
        add(f"--{name}", action="store_true", help=text)
    add("--schedule", choices=["1f1b", "gpipe"], default="1f1b", help="(default 1f1b)")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    args = parser.parse_args()
    args.ragged = args.ragged or args.bug == "shape"
    args.tie = args.tie or args.bug == "tied"
    fill_mesh(args, ranks)
    fill_sizes(args)
    return args


def fill_mesh(args, ranks: int) -> None:
    """Give each axis without a flag 2 ranks if it can, and the last one all the rest.

    ValueError if the product of the axes cannot be the number of ranks.
    """
    needed = NEEDS.get(args.bug, "pp")  # is filled first: two ranks are a pipeline
    given = [axis for axis in AXES if getattr(args, axis)]
    free = [axis for axis in AXES if axis not in given]
    free.sort(key=lambda axis: axis != needed)  # stable: the others stay in order
    product = 1
    for axis in given:
        product *= getattr(args, axis)
    if ranks % product or (ranks > product and not free):
        text = " × ".join(f"--{axis} {getattr(args, axis)}" for axis in given)
        text = f"{text} = {product}, but there are {ranks} ranks"
        raise ValueError(f"{text}; start {product} (--nproc_per_node={product})")
    left = ranks // product
    for axis in free:
        is_halved = left % 2 == 0 and axis != free[-1]
        setattr(args, axis, 2 if is_halved else left)
        left //= getattr(args, axis)
    if args.bug in NEEDS and getattr(args, needed) == 1:
        raise ValueError(f"--break {args.bug} needs --{needed} 2 or more")


def fill_sizes(args) -> None:
    """Fill in sizes that the mesh divides. ValueError for one that it does not."""
    kv_heads = args.tp * math.ceil(4 / args.tp)
    if args.kv_heads > args.tp and not args.heads:  # which follow from them
        must_divide(args, "kv_heads", args.tp, "(--tp)")
    args.heads = args.heads or 2 * math.lcm(args.kv_heads or kv_heads, args.tp)
    args.kv_heads = args.kv_heads or math.gcd(args.heads, kv_heads)
    args.hidden = args.hidden or 8 * args.heads
    args.dropout = 0.0
    args.seq_len = args.seq_len or (64 if args.ragged else 32)
    args.layers = args.layers or max(4, args.pp)
    args.microbatches = args.microbatches or max(4, args.pp)
    parts = args.dp * args.microbatches
    args.batch_size = args.batch_size or parts * math.ceil(16 / parts)
    must_divide(args, "batch_size", parts, "(--dp · --microbatches)")
    must_divide(args, "heads", args.tp, "(--tp)")
    if args.kv_heads < args.tp:
        reason = f"fewer than --tp {args.tp} (possible in beyond/09_shared_heads.py)"
        refuse(args, "kv_heads", reason, args.tp)
    must_divide(args, "kv_heads", args.tp, "(--tp)")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    if args.layers < args.pp:
        refuse(args, "layers", f"fewer than --pp {args.pp}", args.pp)
    raise_refused(args)
    raise_wrong_sizes(args)


def mesh_size(args) -> dict[str, int]:
    """The letters of lesson 02, and those of the mesh."""
    size = sizes_of(args)
    rows = args.batch_size // args.dp // args.microbatches
    size.update(T=args.tp, P=args.pp, DP=args.dp, M=args.microbatches, b=rows)
    return size


def part_of(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.3."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def layers_of(args, stage: int) -> int:
    """Layers of a stage: the first L mod P stages get one more."""
    return args.layers // args.pp + int(stage < args.layers % args.pp)


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
import argparse
from collections.abc import Callable

from torch.distributed.tensor import Replicate, Shard


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if that is impossible.

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


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group along each axis of a mesh (lesson 00)."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        for line in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            # Every rank creates every group, also those it is not in, in one order:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, sections: int, **sizes: int) -> Parser:
    """The flags that all lessons share, and integer flags with their defaults.

    (lesson 00)"""
    parser = Parser(
        description=(doc or "").partition("How to read")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, default in dict(sizes, seed=1).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "seconds that a call may wait (default 60; with --break at most 15)"
    add("--timeout", type=positive, default=60, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=range(1, sections + 1), metavar="N", help=text)
    add("--verbose", action="store_true", help="print all rows of all tables")
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def read_flags(parse_args, module: dict) -> argparse.Namespace:
    """The command line; the process ends here if it is wrong, or asks for a list.

    (lesson 00)"""
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
        if not is_reporter:
            time.sleep(10)  # torchrun ends this rank as soon as the other has said it
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
        # Each barrier would warn that it uses this GPU. It should.
        warnings.filterwarnings("ignore", r"barrier\(\): using the device")
    return args


COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
    "broadcast all_to_all all_to_all_single reduce gather scatter"
).split()


def watch_calls() -> None:
    """From here on, calls of dist are checked; groups are created in a named call.

    (lesson 00)"""
    FORWARD.watch()
    for name in COLLECTIVES + ["new_group", "new_subgroups_by_enumeration"]:
        watch = watch_new_groups if name.startswith("new_") else refuse_direct_calls
        setattr(dist, name, watch(getattr(dist, name)))


def refuse_direct_calls(call: Callable) -> Callable:
    """A lesson's own call of a collective raises, unless COMM records it.

    (lesson 00)"""

    def checked(*args, **kwargs):
        is_torch = {"COMM", "lesson00"}.isdisjoint(sys._getframe(1).f_globals)
        is_dtensor = args and type(args[0]).__name__ == "DTensor"
        if not (is_torch or is_dtensor or COMM.is_inside()):
            text = f"dist.{call.__name__} is called directly, so no table counts it; "
            raise RuntimeError(text + "use all_reduce(x, group) … of lesson 00")
        return call(*args, **kwargs)

    return checked


def watch_new_groups(call: Callable) -> Callable:
    """It waits for all ranks: note that this rank is in it, in case one hangs.

    (lesson 00)"""

    def watched(*args, **kwargs):
        before = COMM.status
        COMM.set_status(f"in call dist.{call.__name__}({args[0] if args else ''})")
        group = call(*args, **kwargs)
        COMM.set_status(before)
        return group

    return watched


class Output(NamedTuple):
    """What a module returned on this rank, in marks that can be compared.

    (lesson 00)"""

    shape: torch.Size
    norm: float
    mixed: float  # a sum with weights: it is another one in another order
    allowed: float  # relative difference


INPUT = "the model's input"


class FirstForward:
    """Notes down what each module returns in the first forward pass of each run.

    (lesson 00)"""

    def __init__(self):
        self.outputs = {}  # run → name of a module → its Output, in order of calls
        self.model = None  # while it is in its first forward pass
        self.names = {}  # module of this model → name

    def watch(self) -> None:
        """From here on, for all modules of this rank (lesson 00)."""
        torch.nn.modules.module.register_module_forward_pre_hook(self.before)
        torch.nn.modules.module.register_module_forward_hook(self.after)

    def before(self, module, inputs) -> None:
        if COMM.phase == "forward" and COMM.run not in self.outputs:
            self.outputs[COMM.run] = {}
            self.model = module
            self.names = {part: name for name, part in module.named_modules()}
            self.note(INPUT, inputs[0] if inputs else None)

    def after(self, module, inputs, out) -> None:
        if self.model is not None and module in self.names:
            self.note(self.names[module] or "the model's output", out)
        if module is self.model:
            self.model = None

    def note(self, name: str, out) -> None:
        if type(out) is not Tensor:
            return
        if name in self.outputs[COMM.run]:
            name += ", called again"
        x = torch.view_as_real(out) if out.is_complex() else out
        allowed = ALLOWED.get(str(x.dtype).removeprefix("torch."), 1e-2)
        x = x.detach().flatten().double()
        x = x.where(x.isfinite(), 0)  # masked scores are −∞
        weights = torch.arange(len(x), device=x.device).double().cos()
        marks = Output(out.shape, x.norm().item(), (x @ weights).item(), allowed)
        self.outputs[COMM.run][name] = marks

    def where_wrong(self, run: str) -> str:
        """Between which modules a run's forward pass becomes wrong, in words.

        (lesson 00)"""
        expected = next(iter(self.outputs.values()), {})
        ranks = gather_objects(self.outputs.get(run, {}))
        is_right = {}
        whole = []  # a list of names
        for name in ranks[0]:
            parts = [outputs[name] for outputs in ranks if name in outputs]
            if name in expected and len(parts) == len(ranks):
                is_right[name] = are_right(parts, expected[name])
                if all(part.shape == expected[name].shape for part in parts):
                    whole.append(name)
        if INPUT not in whole and not is_right.get(INPUT):
            return ""
        outer = tuple(f"{name}." for name in whole if is_right[name])
        texts = []
        for name in is_right:
            if name in whole and is_right[name]:
                texts = [f"right up to {name}"]
            if is_right[name] is False and not name.startswith(outer):
                texts.append(f"first seen wrong at {name}")
                break
        return f"; outputs of modules: {', '.join(texts)}" if texts else ""


def are_right(parts: list[Output], full: Output) -> bool | None:
    """Do the outputs of all ranks fit the one without TP? None: that cannot be said.

    (lesson 00)"""
    off = full.allowed * full.norm
    if all(part.shape == full.shape for part in parts):
        return all(abs(part.mixed - full.mixed) <= off for part in parts)
    if sum(math.prod(part.shape) for part in parts) == math.prod(full.shape):
        norm = math.sqrt(sum(part.norm**2 for part in parts))
        return abs(norm - full.norm) <= off
    return None


FORWARD = FirstForward()


def difference(got, expected) -> str:
    """How a wrong tensor differs, if that can be said in words (lesson 00)."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        text = lambda x: list(x.shape) if x.numel() else "none"  # this run has no such
        return f"shape {text(got)}, expected {text(expected)}"
    if got.numel() <= 4:
        values = lambda x: x.flatten().tolist()
        text = lambda x, n: " ".join(f"{value:.{n}g}" for value in values(x))
        digits = 16 if text(got, 7) == text(expected, 7) else 7
        return f"{text(got, digits)}, expected {text(expected, digits)}"
    if got.isnan().any():
        return f"{got.isnan().sum()} of {got.numel()} elements are nan"
    factor = ((got * expected).sum() / (expected * expected).sum()).item()
    if rel_diff(got, factor * expected) < 1e-4 and abs(factor - 1) > 1e-3:
        return f"{factor:.4g} times the expected tensor"
    return ""


def likely_cause(kind: str, failed: list[dict], forward_is_wrong: bool) -> dict:
    """The failed check that is named of those of one kind: in general the worst.

    (lesson 00)"""
    if kind in ("losses", "norms"):
        return failed[0]
    if kind == "gradients" and not forward_is_wrong:
        parameter = failed[-1]["name"].rpartition(",")[0] or failed[-1]["name"]
        return next(c for c in failed if c["name"].startswith(parameter))
    return max(failed, key=lambda check: check["diff"])


def in_words(check: dict) -> str:
    """A failed check: what was found, or by how much it is off (lesson 00)."""
    diff = f"off by {check['diff']:.3g}, allowed {check['allowed']:.3g}"
    if check["allowed"] == 0 and check["diff"] < 1e-5:
        diff += " (only last bits differ: a sum in another order?)"
    text = check["text"] or f"{check['name']}: {diff}"
    text += f", on ranks {check['ranks']}"
    if check["name"].startswith("losses: loss, step 1, "):
        text += FORWARD.where_wrong(check["name"].split(", ")[2])
    return text


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front.

    (lesson 00)"""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def where_raised(error: Exception) -> str:
    """The lesson's line that raised, the module that was called, input and weights.

    (lesson 00)"""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        # The last one in this file; `checked` is in refuse_direct_calls.
        if frame.filename == os.path.abspath(sys.argv[0]) and frame.name != "checked":
            lines = [f"line {frame.lineno}, in {frame.name}: {frame.line}"]
    root = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            root = root or module
            called = module
            inputs = frame.f_locals
    if root is None:
        return wrap(f"   {'; '.join(lines)}")
    names = {module: name for name, module in root.named_modules()}
    shapes = [list(x.shape) for x in inputs.values() if isinstance(x, Tensor)]
    lines.append(f"in {names.get(called) or 'the model'}, with tensors {shapes}")
    for name, layer in [("", called), *called.named_children()]:
        weights = [list(p.shape) for p in layer.parameters(recurse=False)]
        lines.append(f"{name} {type(layer).__name__} {weights}".strip())
    return wrap(f"   {'; '.join(lines)}")


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy.

    (lesson 00)"""
    owner, _, name = edit["target"].rpartition(".")
    modules = [getattr(other, "__dict__", {}) for other in sys.modules.values()]
    modules = [module] + [other for other in modules if other.get("COMM") is COMM]
    home = next(other for other in modules if (owner or name) in other)
    definition = getattr(home[owner], name) if owner else home[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {}  # where the edited copy is defined
    names = getattr(definition, "__globals__", home)  # that the copy may use
    exec(source.replace(edit["old"], edit["new"]), names, scope)
    if owner:
        setattr(home[owner], name, scope[name])
        return
    for other in modules:
        if other.get(name) is definition:
            other[name] = scope[name]


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, where it was reported, and what the audit says.

    (lesson 00)"""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    if "audit" in edit:  # how it is found in a model of your own
        lines.append(wrap(f'audit: tools/audit.py reports it as "{edit["audit"]} …"'))
    return "\n".join(lines)


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis.

    (lesson 00)"""

    def on_sigterm(*_):
        exit_rank(0, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    # gloo aborts a rank that receives too much, and C calls only functions of C.
    args.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_sigterm)
    ctypes.CDLL(None).signal(signal.SIGABRT, args.on_abort)
    args.timeout = min(args.timeout, 15)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


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


def shard_parameter(full: Tensor | None, dim: int | None = None, group=None):
    """This rank's slice of a parameter, which remembers how it was sharded.

    (lesson 01)"""
    if full is None:
        return None
    if dim is not None:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.shardings = () if dim is None else ((dim, group),)  # RUN asks: is it a slice?
    return p


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated.

    (lesson 01)"""
    return getattr(p, "shardings", ())


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # x itself, with a new backward; nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of T partial sums of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.tp_group = tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group = tp_group
        self.copy_input = copy_input
        self.gather_output = gather_output
        self.weight = shard_parameter(full.weight, 0, tp_group)  # [f, D]
        self.bias = shard_parameter(full.bias, 0, tp_group)  # [f]

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
        # y is one tensor that all ranks hold, so each has the full dL/dy; and y is the
        # sum of the partial sums, so dL/dy is also the gradient of each of them.
        return grad, None


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g, under a name: lesson 04 puts another here
        self.weight = shard_parameter(full.weight, 1, tp_group)  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        if self.bias is None:
            return y_BSD
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows (lesson 01)."""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


class AllGatherWithGrad(GatherFromTP):
    """The same forward, but different work follows: reduce-scatter backward.

    (lesson 01)"""

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.tp_group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' slices; the last split is undone first.

    (lesson 01)"""
    for dim, group in reversed(shardings):  # one at most in this lesson
        x = all_gather(x, dim, group)
    return x


def replicas_row(report: Report, axis: str, tensors: dict, group) -> dict:
    """Compare tensors with those of the group's first rank: the same on all ranks.

    (lesson 01)"""
    row = {"identical over": axis, "tensors": len(tensors), "equal": 0, "off": []}
    for name, x in tensors.items():
        replicas = all_gather(x[None], 0, group)
        diff = max(rel_diff(replica, replicas[0]) for replica in replicas)
        if report.check("replicas", name, diff):
            row["equal"] += 1
    if row["equal"] < row["tensors"]:
        row["off"].append("equal")
    return row


def must_divide(args, name: str, parts: int, what: str) -> None:
    """Refuse a flag's value that is no multiple of parts, with the arithmetic.

    (lesson 01)"""
    value = getattr(args, name)
    if value % parts:
        multiple = value + parts - value % parts
        if multiple >= 2**31:  # the largest value of a flag is 2^31 − 1
            multiple -= parts
        reason = f"{value} % {parts} {what} = {value % parts}, not 0"
        refuse(args, name, reason, multiple)


def refuse(args, name: str, reason: str, value: int) -> None:
    """Keep why a flag is wrong, and set a right value, on which others may depend.

    (lesson 01)"""
    flag = f"--{name.replace('_', '-')}"
    refused = vars(args).setdefault("refused", [])
    refused.append((flag, f"{flag} {getattr(args, name)}: {reason}", value))
    setattr(args, name, value)


def raise_refused(args) -> None:
    """ValueError with the first reason, and with all flags that have to change.

    (lesson 01)"""
    refused = vars(args).pop("refused", [])
    if refused:
        take = {flag: value for flag, _, value in refused}
        flags = " ".join(f"{flag} {value}" for flag, value in take.items())
        raise ValueError(f"{refused[0][1]}; take {flags}")


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes saved for backward, each storage once, `skip` left out.

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
    """This rank's slice of a DTensor, waited for; any other tensor as it is.

    (lesson 01)"""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank (lesson 01)."""
    return sum(local(x).nbytes for x in tensors if x is not None)


def values_of(runs: dict, field: str) -> dict:
    """run → its losses, gradients, … (whatever `field` names) (lesson 01)."""
    return {name: getattr(run, field) for name, run in runs.items()}


# endregion


# ==== CARRIED OVER from 02, unchanged
# region


class Config(NamedTuple):
    """The sizes of a model, and its dropout (lesson 02)."""

    vocab_size: int  # V
    hidden: int  # D
    heads: int  # N
    kv_heads: int  # K: each key/value head serves N/K query heads
    layers: int  # L
    seq_len: int  # S, the longest sequence
    dropout: float  # probability, of attention weights and of each block's output


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angles of a rotary embedding (arXiv:2104.09864).

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
    """nn.Dropout with a mask from torch.rand, as in ShardedDropout below.

    (lesson 02)"""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class CoreAttention(nn.Module):
    """The part of attention that has no parameters (lesson 02)."""

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
        # By keyword: PyTorch's plan in lesson 04 names the inputs of attention.
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
    kv_heads = attn.k_proj.out_features // attn.core.head_size
    if kv_heads % T != 0:  # a rank would get a fraction of a head
        raise ValueError(f"{kv_heads} key/value heads cannot be split over {T} ranks")

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
    return model.train(full.training)  # new modules start in training mode


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
        tokens_BS = rows[:, :-1].clone()
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
    """The reference: cross entropy, a mean over tokens. Edit it for another loss.

    (lesson 02)"""
    return F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())


class TrainingRun(NamedTuple):
    model: Transformer
    optimizer: torch.optim.Optimizer
    losses: dict[str, float]  # by step
    norms: dict[str, float]  # of the gradient before clipping, by step
    gradients: dict[str, Tensor]  # of step 1, unsharded
    parameters: dict[str, Tensor]  # after the last step, unsharded


def train_transformer(
    name, model, batches, args, tp_group=None, loss_of=mean_loss, after_backward=None,
    norm_of=None,
) -> TrainingRun:  # fmt: skip
    """Train one step on each batch (lesson 02)."""
    losses = {}
    norms = {}
    norm_of = norm_of or global_norm  # of (model, tp_group)
    # AdamW divides by a gradient's size: a tiny eps turns rounding errors into steps,
    # which only --dtype float64 keeps small.
    # foreach, the default on GPUs, cannot update DTensors and plain tensors together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, foreach=False)

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
                norm = norm_of(model, tp_group)
            clip_gradients(model, args.clip, norm)

        # Each rank updates what it holds, and sends nothing. Replicas stay equal only
        # because they start equal and get equal gradients. Nothing else enforces it.
        with COMM.label(name, "update"):
            optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm

    parameters = unshard_model(model, "data")
    return TrainingRun(model, optimizer, losses, norms, gradients, parameters)


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), from the slices of all ranks.

    (lesson 02)"""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            x = torch.empty(0)  # no gradient: a mismatch if another run has one
        elif isinstance(x, DTensor):
            x = x.full_tensor()  # an all-gather by PyTorch
        else:
            x = unshard(x, shardings_of(p))
        tensors[name] = x.clone()
    return tensors


PARAMETERS = {
    "embed_tokens, lm_head": "(2·D + 1)·V·e",
    "LayerNorms": "(2·L + 1)·2·D·e",
    "biases of o_proj, down_proj": "2·L·D·e",
    "q_proj, k_proj, v_proj": "L·(N + 2·K)·H·(D + 1)·e/T",  # q has N heads, k, v K each
    "weights of o_proj, down_proj": "L·(D + F)·D·e/T",
    "up_proj": "L·F·(D + 1)·e/T",
}


def saved_terms(dropout: float) -> dict[str, str]:
    """Bytes that the model, without the loss, saves for backward on a rank.

    (lesson 02)"""
    saved = {
        "tokens (int64)": "8·B·S",
        "inputs of LayerNorms": "(2·L + 1)·B·S·D·e",
        "mean and 1/σ of LayerNorms": "(2·L + 1)·2·B·S·e",
        "outputs of LayerNorms": "(2·L + 1)·B·S·D·e",
        "q, k, v in CoreAttention (N heads)": "3·L·B·S·D·e/T",
        "softmax output": "L·B·N·S·S·e/T",
        "input of o_proj": "L·B·S·D·e/T",
        "inputs of GELU and down_proj": "2·L·B·S·F·e/T",
    }
    if dropout > 0:
        saved["dropout masks of outputs (1 byte)"] = "2·L·B·S·D"
        saved["dropout mask of softmax (1 byte)"] = "L·B·N·S·S/T"
        saved["softmax output after dropout"] = "L·B·N·S·S·e/T"
    return saved


def raise_wrong_sizes(args) -> None:
    """Refuse sizes that no transformer of the course can have (lesson 02)."""
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not 0 <= getattr(args, "dropout", 0) <= 0.9:  # 1/(1 − p) scales rounding errors
        raise ValueError(f"--dropout {args.dropout}: must be at least 0, at most 0.9")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be greater than 0")


def sizes_of(args) -> dict[str, int]:
    """The letters of the shape legend, and e: bytes per element (lesson 02)."""
    e = getattr(torch, args.dtype).itemsize
    return dict(
        B=args.batch_size, S=args.seq_len, D=args.hidden, N=args.heads,
        K=args.kv_heads, H=args.hidden // args.heads, F=4 * args.hidden,
        V=args.vocab_size, L=args.layers, T=args.ranks, e=e,
    )  # fmt: skip


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which also handles DTensors; in float64.

    (lesson 02)"""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [sum_partial(gradient.double()) for gradient in gradients]
    norm = nn.utils.get_total_norm(gradients, foreach=False)
    # Before torch 2.11 a DTensor's .item() is this rank's part of it (pytorch#166638).
    return norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()


def sum_partial(x: Tensor) -> Tensor:
    """Sum a Partial() DTensor. Before torch 2.11 its norm was that of a rank's part.

    (lesson 02)"""
    if not isinstance(x, DTensor):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


def add_up(formulas: dict[str, str], sizes: dict[str, dict]) -> tuple[list, dict]:
    """A row for each term, name → formula, with its bytes in each run; and their sums.

    (lesson 02)"""
    rows = []
    sums = dict.fromkeys(sizes, 0)
    for name, formula in formulas.items():
        row = {"bytes": name, "formula": formula}
        for run, size in sizes.items():
            row[run] = evaluate(formula, size)
            sums[run] += row[run]
        row["ok"] = None  # nothing to check here: only the sum can be measured
        rows.append(row)
    return rows, sums


def bytes_stored(run: TrainingRun, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Measured on this rank, after training and in one more forward pass.

    (lesson 02)"""
    parameters = list(run.model.parameters())
    saved = SavedBytes([*parameters, *run.model.buffers()])
    with saved:
        run.model(batch[0])  # without a label: these calls are in no table
    moments = []  # and step counts: all that AdamW stores
    for state in run.optimizer.state.values():
        moments.extend(state.values())
    return {
        "parameters": nbytes(parameters),
        "gradients": nbytes(p.grad for p in parameters),
        "optimizer state": nbytes(moments),
        "saved for backward": saved.total(),
    }


def check_reference(report: Report, run: TrainingRun, batch, size: dict) -> None:
    """Find out whether the model without TP fits its formulas, or has been edited.

    (lesson 02)"""
    alone = {"without TP": dict(size, T=1)}
    measured = bytes_stored(run, batch)
    _, stored = add_up(PARAMETERS, alone)
    if getattr(report.args, "tie", False):  # lesson 03's flag: one weight for both
        stored["without TP"] -= evaluate("V·D·e", size)
    _, saved = add_up(saved_terms(report.args.dropout), alone)
    parameters = measured["parameters"], stored["without TP"]
    activations = measured["saved for backward"], saved["without TP"]
    report.is_edited = not isinstance(run.optimizer, torch.optim.AdamW)
    report.check_model(parameters=parameters, activations=activations)
    check_tiny_loss(report)


LOSS_OF_TINY = 3.7220588178732883  # of the lesson's model, by check_tiny_loss


def check_tiny_loss(report: Report) -> None:
    """Find out whether a tiny model with stated weights has the lesson's loss.

    (lesson 02)"""
    args = copy.copy(report.args)
    args.vocab_size = 7
    args.hidden = 16
    args.heads = 4
    args.kv_heads = 2
    args.layers = 2
    args.seq_len = 5
    args.dropout = 0.0
    args.dtype = "float64"
    with torch.random.fork_rng():
        model = make_transformer(args)
    with torch.no_grad():
        for number, p in enumerate(model.parameters(), 1):
            weights = torch.arange(p.numel(), dtype=p.dtype, device=p.device)
            p.copy_((number * weights).sin().view_as(p))
        tokens_BS = torch.arange(5, device=args.device)[None]
        loss = mean_loss(model(tokens_BS), tokens_BS + 1).item()
    text = f"loss of a tiny model with fixed weights: {loss:.6f}, the lesson has "
    text += f"{LOSS_OF_TINY:.6f}"
    diff = rel_diff(loss, LOSS_OF_TINY)
    if not report.check("loss", "tiny model", diff, ALLOWED["float64"], text):
        report.is_edited = True


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
    """Raise ValueError for a token outside the vocabulary: no rank has its row.

    (lesson 03)"""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        text = f"tokens {tokens.min()} to {tokens.max()}: the vocabulary is 0 to "
        raise ValueError(text + str(vocab_size - 1))


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
        self.weight = shard_parameter(padded.weight, 0, tp_group)  # [v, D]

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
        p.rows = full.config.vocab_size  # rows of the full weight; the rest is padding
    return model.train(full.training)  # in eval mode if full is


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The full loss: with padding, ignored positions, label smoothing, and backward.

    (lesson 03)"""

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        padding_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.masked_fill(padding_v, float("-inf"))  # exp(−∞) = 0
        x_BSv = x_BSv.to(torch.promote_types(x_BSv.dtype, torch.float32))
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # IGNORE is in no rank's range, so all ranks add 0 for it.
        column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
        q_x_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        q_x_BS = (1 - smoothing) * q_x_BS.where(is_local_BS, 0)  # of Σ q·(x − m)
        if smoothing:  # every token counts; padding (−∞) is left out
            q_x_BS += smoothing / vocab_size * x_BSv.masked_fill(padding_v, 0).sum(-1)
        loss_BS = sum_BS.log() - all_reduce(q_x_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        counts_BS = target_BS != ignore  # does this position have a target?
        ctx.save_for_backward(softmax_BSv, column_BS, is_local_BS, counts_BS, padding_v)
        ctx.smoothing = smoothing
        ctx.smooth_target = smoothing / vocab_size  # ε/V, for every token
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(counts_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # Nothing is sent: upstream_BS is equal on all ranks, because they all computed
        # the same loss, and softmax − q needs this rank's columns only.
        softmax_BSv, column_BS, is_local_BS, counts_BS, padding_v = ctx.saved_tensors
        grad_BSv = (softmax_BSv - ctx.smooth_target).masked_fill(padding_v, 0)
        extra_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)  # at the target
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -extra_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored position is 0, but its softmax − q is not.
        grad_BSv = grad_BSv.where(counts_BS.unsqueeze(-1), 0)
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
        # An embedding starts with a standard deviation of 1, which is too large for a
        # head: its logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


# endregion


# ==== CARRIED OVER from 04, unchanged
# region


def pad_batch(tokens_BS: Tensor, target_BS: Tensor, ranks: int) -> tuple:
    """Pad the sequence at its end so that T divides it (lesson 04)."""
    missing = -tokens_BS.shape[1] % ranks
    tokens_BS = F.pad(tokens_BS, (0, missing), value=PAD)
    target_BS = F.pad(target_BS, (0, missing), value=IGNORE)
    return tokens_BS, target_BS


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """Sum the ranks' partial outputs; each rank gets its slice of the positions.

    (lesson 04)"""
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


class GatherThenLinear(torch.autograd.Function):
    """All-gather the sequence, apply linears, and save only this rank's slice.

    (lesson 04)"""

    @staticmethod
    def forward(ctx, x_BsD: Tensor, tp_group, *parameters: Tensor | None) -> tuple:
        weights = parameters[0::2]  # weight, bias, weight, bias, …
        biases = parameters[1::2]  # None for a linear without bias
        ctx.save_for_backward(x_BsD, *weights)
        ctx.tp_group = tp_group
        ctx.has_bias = [bias is not None for bias in biases]
        x_BSD = all_gather(x_BsD, 1, tp_group)
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        saved = ctx.saved_tensors  # read once: checkpointing allows no second read
        x_BsD = saved[0]
        weights = saved[1:]
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)  # the second all-gather
        flat_x = x_BSD.flatten(0, 1)  # [B·S, D]
        partial_grad_BSD = torch.zeros_like(x_BSD)
        grads = []  # of the parameters, in the order of forward
        for grad_BSf, weight, has_bias in zip(grads_BSf, weights, ctx.has_bias):
            flat_grad = grad_BSf.flatten(0, 1)  # [B·S, f]
            grads.append(flat_grad.T @ flat_x)
            grads.append(flat_grad.sum(0) if has_bias else None)
            partial_grad_BSD += grad_BSf @ weight
        # Each rank multiplied all positions by its own columns, so it has a partial
        # dL/dx for every position. Sum over ranks; this rank gets its positions.
        grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)
        return tuple([grad_BsD, None] + grads)


def gather_then_apply_each(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Apply column-parallel linears to a sharded sequence: one all-gather for all.

    (lesson 04)"""
    parameters = []
    for linear in linears:
        parameters += [linear.weight, linear.bias]
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same by plain autograd (--save-gathered): saves T slices, gathers once.

    (lesson 04)"""
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


class LinearWithInputComm(nn.Module):
    """A column-parallel linear that first gathers its input, by a function from above.

    (lesson 04)"""

    def __init__(self, linear: ColumnParallelLinear, gather_and_apply):
        super().__init__()
        self.tp_group = linear.tp_group
        self.weight = linear.weight
        self.bias = linear.bias
        self.gather_and_apply = gather_and_apply

    def forward(self, x_BsD: Tensor) -> Tensor:
        outputs = self.gather_and_apply(x_BsD, self)
        return outputs[0]


def split_sequence(
    layer: DecoderLayer, tp_group, gather_and_apply=gather_then_apply_each
) -> None:
    """Edit a layer of tp_transformer: around attention and MLP the sequence is split.

    (lesson 04)"""
    layer.self_attn.project_qkv = gather_and_apply
    layer.self_attn.o_proj.reduce = reduce_scatter_sequence
    layer.mlp.up_proj = LinearWithInputComm(layer.mlp.up_proj, gather_and_apply)
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
    # The layer drops elements of a [B, s, D]: each rank must use its slice of the mask.
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)


def sp_transformer(
    full: Transformer, tp_group: dist.ProcessGroup, save_gathered: bool = False
) -> Transformer:
    """A copy of the decoder under TP, with the sequence split between its linears.

    (lesson 04)"""
    gather_and_apply = gather_and_save if save_gathered else gather_then_apply_each
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, gather_and_apply)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, gather_and_apply)
    return model.train(full.training)  # in eval mode if full is


def all_reduce_replicated_gradients(model: nn.Module, tp_group) -> None:
    """Sum the gradients of replicated parameters over the TP group, before clipping.

    (lesson 04)"""
    replicated = []
    for p in model.parameters():
        if p.grad is not None and not shardings_of(p):
            replicated.append(p)
    partial_flat = torch.cat([p.grad.flatten() for p in replicated])
    flat = all_reduce(partial_flat, tp_group)
    for p, grad in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.copy_(grad.view_as(p))


def sp_plan(keyword: str = "x_BSD", local: bool = True) -> dict:
    """PyTorch's plan for this model; Hugging Face models need few changes (--hf).

    (lesson 04)"""
    column = parallel.ColwiseParallel()
    row = parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    norm = parallel.SequenceParallel()
    gather = parallel.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    # A layer calls its attention by keyword, so there is nothing for input_layouts.
    gather_by_keyword = parallel.PrepareModuleInput(
        input_kwarg_layouts={keyword: Shard(1)},
        desired_input_kwarg_layouts={keyword: Replicate()},
    )
    # SequenceParallel treats a plain tensor as this rank's slice, so give it a slice.
    embedding = parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
    )
    # Logits stay a DTensor: loss_parallel requires it.
    head = parallel.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    return {
        "embed_tokens": embedding,
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": gather_by_keyword,
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
# region MEASURE: it counts, compares and prints tables. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import ctypes
import gc
import inspect
import itertools
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


class Calls(NamedTuple):
    """A formula: how many calls per step, and the payload of each in bytes."""

    count: str
    nbytes: str


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

    def is_inside(self) -> bool:
        """Did a collective of this rank fail, and not the code between collectives?"""
        return self.status.startswith("in call")

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run, outside collectives?"""
        if self.is_inside():
            return False
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        until = time.monotonic() + 5
        while not self.store.check(keys):  # store.wait would print warnings of C++
            if time.monotonic() > until:  # some rank did not raise
                return False
            time.sleep(0.1)
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = "runs outputs gradients replicas norms losses parameters".split()
# Kinds of checks that describe the lesson's model. All others are about values.
FORMULAS = ["plans", "loss", "calls", "steps", "bytes", "memory"]

# What errors are compared with at least. AdamW moves a bias that starts at 0 by 0.003
# per step: three of these. A gradient may be 0 but for rounding errors of some 1e-10.
LEAST = {"parameters": 0.009, "gradients": 1e-4, "PyTorch": 1e-4}


def rel_diff(got, expected, least=0.0) -> float:
    """max|got − expected| / max(max|expected|, least); inf for nan or another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    scale = expected.abs().max().clamp(min=least)
    diff = ((got - expected).abs().max() / scale).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("the report's own call", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok, text
        self.raised = {}  # run → the error that ended it
        self.is_edited = False  # does the model without TP differ from the lesson's?
        self.agreeing = []  # brief tables: (text, the largest diff)
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int], note="") -> None:
        """Print the first lines. size: letter of the legend → number."""
        self.mesh = mesh
        self.data.update(mesh=mesh, size=size)
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))
        if note:
            print(wrap(note))
        if getattr(self.args, "steps", 0) > 100:
            print(f"First, {self.args.steps} steps of the reference, without output.")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def conclude(self, text: str) -> None:
        """End a section with what it shows, if no formula has failed before."""
        failed = {check["kind"] for check in self.checks.values() if not check["ok"]}
        if self.is_edited or not failed.intersection(FORMULAS):
            self.say(textwrap.indent(textwrap.fill(text, 85), "   "))

    def check(self, kind: str, name: str, diff: float, allowed=0.0, text="") -> bool:
        """Record one comparison of this rank, `text` in words. Does it hold?"""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        check = dict(kind=kind, diff=diff, allowed=allowed, ok=ok, text=text)
        self.checks[name] = check
        return ok

    def check_tensor(self, kind, name, got, expected, allowed=0.0, least=0.0) -> bool:
        """Compare two tensors or numbers on this rank."""
        diff = rel_diff(got, expected, least or LEAST.get(kind.split()[-1], 0.0))
        words = "" if diff <= allowed else difference(got, expected)
        text = f"{kind}: {name}: {words}" if words else ""
        return self.check(kind, name, diff, allowed, text)

    def expect(self, row, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        value = row[column]
        is_edit = self.is_edited and kind in FORMULAS
        words = "the lesson has" if is_edit else "predicted"
        unit = f" {kind}" if kind in ("calls", "steps", "bytes") else ""
        text = f"{name}: {value:,}{unit}, {words} {predicted:,}"
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(value - predicted), text=text):
            off.append(column)
            mark = f" ≠ {predicted:,}" if is_edit else text
            row.setdefault("predicted", {})[column] = mark

    def check_model(self, **formulas: tuple[int, int]) -> None:
        """Does the run without TP fit its own formulas? If not, it has been edited.

        formulas: what was measured → (bytes, predicted bytes). In an edited model only
        values decide, because all formulas describe another model.
        """
        for name, (got, predicted) in formulas.items():
            text = f"{name}, without TP: {got:,}, the lesson has {predicted:,}"
            name = f"the model's {name}"
            if not self.check("memory", name, abs(got - predicted), text=text):
                self.is_edited = True

    @contextmanager
    def column(self, run: str, kind="runs"):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if not COMM.all_raised(run, error):
                raise
            if dist.get_rank() == 0 and self.args.verbose:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            text = wrap(f"   {run} raised {self.raised[run]}")
            print(f"{text}\n{where_raised(error)}", flush=True)
        text = f"{run} raised {self.raised.get(run)}"
        self.check(kind, f"{run} completes", int(run in self.raised), text=text)

    def table(self, key: str, rows: list[dict], hide=(), brief: str = "") -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank; row["predicted"]
        has words about them. Cells that failed on any rank are marked. hide: columns
        that are not printed. brief: "16 replicas", for rows that only repeat that all
        is as it must be; without --verbose, those that hold are left to `agree`.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for place, other in enumerate(rows_of_rank):
                merge_row(rows, place, other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if brief and not self.args.verbose:
            worst = max([row.get("diff", 0.0) for row in rows], default=0.0)
            rows = [row for row in rows if row.get("off")]
            if not rows:
                self.agreeing.append((brief, worst))
        if rows:
            self.print_rows(rows, hide)

    def agree(self, how: str) -> None:
        """One line for the brief tables since the last one, as far as they hold."""
        if self.agreeing:
            worst = max(diff for text, diff in self.agreeing)
            what = ", ".join(text for text, diff in self.agreeing)
            how += f", worst {worst:.1e}" if worst else ""
            self.say(wrap(f"   {what}: {how}"))
        self.agreeing.clear()

    def print_rows(self, rows: list[dict], hide, is_short=False) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        notes = []  # below the table
        for row in rows:
            notes.extend(notes_on(row))
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted", "elsewhere"):
                continue
            texts = [name] + [marked_cell(row, name, is_short) for row in rows]
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        if max(map(len, lines)) > 88 and not is_short:
            return self.print_rows(rows, hide, is_short=True)  # ≠ alone, as it fits
        self.say("\n".join([line.rstrip() for line in lines] + notes))

    def compare(self, key, runs: dict, allowed=0.0, fold=str, brief: str = "") -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        its values, and as diff the largest relative difference of one element. brief:
        what is compared, "norms", if it only repeats that the runs agree.
        """
        allowed = allowed or self.allowed
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        has_others = len(runs.keys() - self.raised.keys()) > 1  # to compare with it
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                for run in self.raised:
                    rows[label].setdefault(run, "raised")
                if has_others:
                    rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                if run in self.raised:  # it ended before it had all values
                    row[run] = "raised"
                    continue
                value = values.get(name, torch.empty(0))  # empty: it has none
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                expected = reference.get(name, torch.empty(0))
                diff = rel_diff(value, expected, LEAST.get(key.split()[-1], 0.0))
                row["diff"] = max(row["diff"], diff)
                what = f"{name}, {run}"
                if not self.check_tensor(key, what, value, expected, allowed):
                    row["off"].append(run)
        brief = f"{len(names)} {brief}" if brief and has_others else ""
        self.table(key, list(rows.values()), brief=brief)

    def ledger(self, formulas: dict, size: dict, steps=1, hide=(), brief=()) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → a list of Calls; several if it makes calls of several sizes.
        brief: runs and phases whose rows are printed with --verbose only, or if wrong.
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            if call.run in runs and self.mesh.get(call.axis, 1) > 1:
                row = self.ledger_row(call, formulas.get(call, []), size, steps)
                if row["calls"] or row["off"]:
                    rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = list(hide)
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        less = [row for row in rows if row["run"] in brief or row["phase"] in brief]
        if self.args.verbose:
            less = []
        if self.args.ranks == 1 and "communication" not in self.data:
            self.say("   One rank sends nothing.")
        self.table("communication", [row for row in rows if row not in less], hide)
        if less:
            more = "more " if len(less) < len(rows) else ""
            more += "row" if len(less) == 1 else "rows"
            brief = f"{len(less)} {more} ({', '.join(brief)})"
            self.table("communication", less, hide, brief)
            self.agree("calls and bytes as predicted")

    def ledger_row(self, call: Call, terms: list[Calls], size: dict, steps) -> dict:
        row = call._asdict()
        row["calls"] = per_step(COMM.calls[call], steps)
        row["bytes"] = per_step(COMM.bytes[call], steps)
        row["formula"] = formula_text(terms)
        row["ring"] = ring_bytes(call.collective, row["bytes"], self.mesh[call.axis])
        calls = 0
        nbytes = 0
        for term in terms:
            calls += evaluate(term.count, size)
            # Multiplied before rounding: a size may be a mean over micro-batches.
            nbytes += evaluate(f"({term.count})·({term.nbytes})", size)
        self.expect(row, "calls", "calls", " ".join(call), calls)
        self.expect(row, "bytes", "bytes", " ".join(call), nbytes)
        return row

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks, in order: the largest diff, and where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                one = merged.setdefault(name, dict(check, name=name, ranks=[]))
                one["diff"] = max(one["diff"], check["diff"])
                if not check["ok"]:
                    if one["ok"]:  # the first rank where it fails says what is wrong
                        one.update(ok=False, text=check["text"])
                    one["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """Print PASS or FAIL, and above it what failed and what an edit changed."""
        checks = self.merge_checks()
        kinds = {kind: [] for kind in CAUSES_FIRST}
        for check in checks:
            kinds.setdefault(check["kind"], []).append(check)
        edits = []  # plans and formulas that do not describe an edited model
        for kind in FORMULAS if self.is_edited else []:
            edits.extend(check for check in kinds.pop(kind, []) if not check["ok"])
        print()
        counts = self.name_failures(kinds)
        worst = max(checks, key=lambda check: check["ok"] and check["diff"])
        text = f"worst difference {worst['diff']:.1e} (allowed {worst['allowed']:.0e})"
        text = f"{len(checks) - len(edits)} checks, {text}"
        if counts:
            text = f"failed: {', '.join(counts.values())}"
            text += "; all values agree" if set(counts).issubset(FORMULAS) else ""
        if edits:
            self.name_edits(edits)
            text = text if counts else f"values agree: {text}"
            count = len([check for check in edits if check["kind"] != "plans"])
            count = "1 formula does" if count == 1 else f"{count} formulas do"
            text += f"; the lesson was edited: {count} not describe it"
        verdict = "FAIL" if counts else "PASS"
        self.data.update(verdict=verdict, edited=self.is_edited, checks=checks)
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        print(wrap(f"{verdict}  {self.data['lesson']}  {text}"), flush=True)
        return verdict

    def name_failures(self, kinds: dict[str, list]) -> dict[str, str]:
        """Print one failed check of each kind, causes first; count them by kind."""
        failed = {}
        counts = {}
        for kind, checks in kinds.items():
            wrong = [check for check in checks if not check["ok"]]
            if wrong:
                failed[kind] = wrong
                counts[kind] = f"{kind} {len(wrong)}/{len(checks)}"
        # If the loss of step 1 is wrong, forward is: this comes before gradients.
        forward = [c for c in failed.get("losses", []) if "step 1," in c["name"]]
        early = ("runs", "outputs", "losses") if forward else ()
        for kind in sorted(failed, key=lambda x: (x not in early, x in FORMULAS)):
            cause = likely_cause(kind, failed[kind], bool(forward))
            print(wrap(f"✗ {in_words(cause)}"))
        return counts

    def name_edits(self, edits: list[dict]) -> None:
        """Print what does not describe an edited model, communication before memory."""
        texts = list(dict.fromkeys(check["text"] for check in edits))
        shown = texts if self.args.verbose else texts[:8]
        text = "The lesson was edited. What does not fit it"
        if len(shown) < len(texts):
            text += f"; {len(shown)} of {len(texts)}, all with --verbose"
        print(f"{text}:")
        for text in shown:
            print(wrap(f"≠ {text}"))


def formula_text(terms: list[Calls]) -> str:
    """2·L × B·S·D·e for calls of one size; a sum for calls of several."""
    texts = [f"{term.count} × {term.nbytes}".removeprefix("1 × ") for term in terms]
    return " + ".join(texts) or "none"


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def merge_row(rows: list[dict], place: int, other: dict, rank: int) -> None:
    """Add to this rank's row what another rank's row says of failed checks.

    other: row `place` there. Pipeline stages may have different rows: rows are the same
    if they begin with the same texts. One that fails elsewhere only is added.
    """
    same = [row for row in rows[place:] + rows if label_of(row) == label_of(other)]
    if not same and other.get("off"):
        rows.append(dict(other, off=[], elsewhere=True))
        same = rows[-1:]
    for row in same[:1]:
        for column in other.get("off", []):
            if column not in row["off"]:
                row["off"].append(column)
        if other.get("off"):
            row.setdefault("off_ranks", []).append(rank)
        if "diff" in row:
            row["diff"] = max(row["diff"], other["diff"])


def label_of(row: dict) -> list[str]:
    """The texts that a row begins with; no texts if it begins with a number."""
    return list(itertools.takewhile(lambda x: isinstance(x, str), row.values()))


def notes_on(row: dict) -> list[str]:
    """Lines below a table: what was predicted for a cell that failed, and where."""
    texts = row.get("predicted", {}).values()
    notes = [f"   ✗ {text}" for text in texts if not text.startswith(" ≠")]
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = " ".join(label_of(row)) or next(iter(row.values()))
        notes.append(f"   ✗ {label}: fails on ranks {ranks}, not on rank 0")
    return notes


def marked_cell(row: dict, name: str, is_short: bool) -> str:
    """A value as a table shows it; ✗ if it failed, ≠ if the model was edited."""
    value = row[name]
    predicted = row.get("predicted", {})
    text = "" if value is None else str(value)
    if isinstance(value, bool):
        is_edit = any(mark.startswith(" ≠") for mark in predicted.values())
        text = "ok" if value else "≠" if is_edit else "✗"
    elif isinstance(value, float):
        digits = 4 if is_short else 7
        text = f"{value:.1e}" if name == "diff" else f"{value:#.{digits}g}"
    elif isinstance(value, int):
        text = f"{value:,}"
    if name not in row.get("off", []):
        return text
    mark = predicted.get(name, "")[: 2 if is_short else None]  # short: " ≠"
    return text + (mark if mark.startswith(" ≠") else "✗")


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


# endregion


# region START AND ERRORS: flags, bugs, joining the ranks, hangs. You never need it.


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
    if len({re.sub(r"all-to-all of .*?]", "", text) for text in statuses}) == 1:
        return "all ranks have entered the same call, and it raised an error"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def describe_hang(error: Exception) -> str:
    """Which call each rank is in, by what it wrote down itself."""
    ranks = range(dist.get_world_size())
    statuses = [COMM.store.get(f"status/{rank}").decode() for rank in ranks]
    lines = [wrap(f"error: {who_is_missing(statuses)}")]
    for rank in ranks:
        lines.append(f"  rank {rank}: {statuses[rank]}"[:88])
    silent = [rank for rank in ranks if not COMM.store.check([f"failed/{rank}"])]
    if silent:  # the others have waited 3 seconds for it
        text = f"  ranks {silent} have reported no error so far: they hang, "
        text += "are stopped, cannot be reached, or are still computing"
        lines.append(wrap(text))
    size = int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))  # ranks per machine
    for first in ranks[::size]:  # what a lost machine wrote last may be out of date
        if set(silent).issuperset(ranks[first : first + size]):
            text = f"error: no rank of machine {first // size} has reported an error: "
            lines[0] = wrap(text + "they hang, or it is lost or cannot be reached")
    lines.append(wrap(f"  raised: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank.

    With the diagnosis of a bug: it shows, so the exit code is 0 (no torchrun report).
    """
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    lost = f"error: rank {dist.get_rank()} got no answer from rank 0's machine: it is "
    lost += f"lost or cannot be reached\n  rank {dist.get_rank()}: {COMM.status}"
    # The store is on that machine, and its calls then never return.
    seconds = 20 + int(os.environ["LOCAL_RANK"])  # one per machine reports
    timer = threading.Timer(seconds, exit_rank, [1, lost, True])
    timer.start()
    COMM.store.set(f"failed/{dist.get_rank()}", text)
    if COMM.is_inside():  # others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 0 if diagnosis else 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif COMM.is_inside():
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    timer.cancel()
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and code:  # for torchrun's report
        # torchrun calls the earliest failure the root cause: the one that is printed.
        seconds = int(time.time()) + (0 if is_reporter else 3600)
        details = {"message": message, "extraInfo": {"timestamp": str(seconds)}}
        Path(path).write_text(json.dumps({"message": details}))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    elif code:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    member = dict(store=store, rank=rank, world_size=ranks)
    dist.init_process_group(backend, timeout=limit, **member)
    return store


def end_with_torchrun() -> None:
    """If torchrun is killed, Linux kills this rank as well, even if it sleeps."""
    if sys.platform == "linux":
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        # The command is in the lesson's docstring; flags are those that were given.
        command = "torchrun --standalone --nproc_per_node=2"
        if module["__doc__"]:
            command = re.search(r"torchrun \S+ \S+", module["__doc__"])[0]
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
    end_with_torchrun()
    torch.set_num_threads(1)  # ranks share the cores: more threads would be slower
    torch.manual_seed(args.seed)
    diagnosis = diagnosis_of(module["BREAKS"][args.bug]) if args.bug else ""
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.set_status("in no call")
        watch_calls()
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        fails = report.verdict() == "FAIL"
        print(f"{diagnosis}\n" if fails and args.bug else "", end="", flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if args.bug and not fails:
        text = "error: the bug does not show in this run; try it without other flags"
        exit_rank(1, text, is_reporter=os.environ["RANK"] == "0")
    if fails and not args.bug and os.environ["LOCAL_RANK"] == "0":
        # One rank per host: torchrun's report is then as short as it can be.
        time.sleep(1)  # the other ranks have ended
        exit_rank(1, "FAIL: the verdict is above this report of torchrun", True)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
