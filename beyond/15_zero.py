"""Beyond the lessons 15: ZeRO, a model's states in shards over its replicas.

Data parallel replicas differ in their data only. Each of them holds all parameters, all
summed gradients and AdamW's moments: 16 bytes per parameter in float32. ZeRO gives each
of DP replicas 1/DP of the moments (ZeRO-1), also of the gradients (ZeRO-2), also of the
parameters (ZeRO-3, in PyTorch fully_shard). The results are those of one process.
ZeRO-1 sends what plain DP sends; ZeRO-2 sums, and ZeRO-3 also gathers, for each
micro-batch.

Run it on 4 ranks, 2 replicas × 2 TP ranks (1, 2 and 8 also work):

    torchrun --standalone --nproc_per_node=4 beyond/15_zero.py

What you will see: who holds which shard; a decoder trained in one process, by plain DP
and by ZeRO-1, 2 and 3, with equal losses, norms, gradients and parameters; bytes held
and sent, which equal formulas; ZeRO-3 in the order of a pipeline's schedule; shards
within a node only (HSDP), and what then crosses nodes; the same by fully_shard.

Try one change at a time (answers: notebooks/15_zero.ipynb, section 8):
    1. --microbatches 4 --stages 4: whose bytes grow, and whose do not?
    2. In units_of, put all layers into one unit. Which bytes change, and why?
    3. --bf16: products in 16 bits, updates in 32. Who holds 18 bytes per parameter?

How to read this file: NEW is the lesson, RUN trains and prints. Bugs to try:
`python tools/bug.py 15`. Short of time? Read the three classes and ZeroTraining.norm.

Shapes: B batch, S sequence, D hidden, V vocabulary, L layers, T ranks of a TP group, DP
    replicas, M micro-batches of b = B/(DP·M) rows. U units (parts of the model that are
    sharded as a whole), Ψ parameters of a rank, u of its largest unit, ψ = Ψ/DP of its
    shards, w of its longest vector (u with zeros). Bytes per element: e of a parameter,
    g of a gradient, o of optimizer states. "kept" is ZeRO-3 that gathers once per step.

Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277 (units, hybrid
    sharding); docs.pytorch.org, torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from course import lesson00, lesson01, lesson02, lesson05
    from flat_vector import flatten, norm_weights, views_of
    from harness import gather_objects, sizes_without_dropout
    from pytorch_zero import fully_sharded
    from rows_of_runs import checked_rows, replicas_differ, worst_difference
    from zero_meters import HeldMeter, bytes_held, sent, sent_to_other_node
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

METER = lesson00.METER

# ==== NEW in 15: optimizer states, gradients and parameters in shards
# Read lines 68 to 335, in about 27 minutes. Stop at RUN.

# From lesson 00: an all-reduce is a reduce_scatter and an all_gather; a group of one
# rank sends nothing. From 05: schedule, a list of ("forward", i) and ("backward", i).
# From flat_vector.py: flatten makes one vector of tensors, and views_of returns the
# tensors in it. What a rank holds, in elements, and sends per step (RS reduce-scatter,
# AG all-gather, of Ψ elements each):
#
#              parameters   gradients   moments   sends
#     DP       Ψ            Ψ           2·Ψ       RS + AG (an all-reduce)
#     ZeRO-1   Ψ            Ψ           2·Ψ/DP    RS + AG
#     ZeRO-2   Ψ            Ψ/DP        2·Ψ/DP    M·RS + AG
#     ZeRO-3   Ψ/DP         Ψ/DP        2·Ψ/DP    M·RS + 2·M·AG


def units_of(model: nn.Module) -> list[list[nn.Module]]:
    """Parts of the decoder that are summed, gathered and freed as a whole.

    Modules of a unit are in the order in which forward calls them.
    """
    layers = [[layer] for layer in model.layers]
    return [[model.embed_tokens]] + layers + [[model.norm, model.lm_head]]


# ---- ZeRO-1: optimizer states in shards

# AdamW treats each element separately: its moments and its update depend on its own
# gradient only. So a replica can update 1/DP of the elements, with 1/DP of the moments,
# and the vector can be cut anywhere, also within a parameter.


class ShardedStates:
    """A unit of ZeRO-1: each replica holds its parameters, and updates its shard.

    Args:
        modules: one entry of units_of.
        groups: this rank's group over "tp"; over "shard", the replicas that share one
            vector; over "replicate", those that hold the same shard. In ZeRO all
            replicas share one, in plain DP none do, in HSDP those of a node do.
    """

    copies_shard = False

    def __init__(self, modules: list[nn.Module], groups: dict[str, dist.ProcessGroup]):
        self.groups = groups
        self.parts = groups["shard"].size()
        self.parameters = list(nn.ModuleList(modules).parameters())
        self.flat = flatten(self.parameters, self.parts)
        for p, view in zip(self.parameters, views_of(self.flat, self.parameters)):
            p.data = view  # from here on, a parameter is a part of the vector
        # The shard is a part of the vector, too. Where that is freed it is a copy, and
        # in bfloat16 a float32 copy: an update small next to its weight would be lost.
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        shard = self.slice_of(self.flat).to(dtype, copy=self.copies_shard)
        self.shard = nn.Parameter(shard)

    def slice_of(self, flat: Tensor) -> Tensor:
        """The part of a vector that this replica updates, as a view."""
        return flat.chunk(self.parts)[self.groups["shard"].rank()]

    def sum_gradients(self) -> Tensor:
        """One reduce-scatter: this replica's shard of Σ p.grad over replicas."""
        partial_flat = flatten([p.grad for p in self.parameters], self.parts)
        for p in self.parameters:
            p.grad = None
        partial_flat = partial_flat.to(self.shard.dtype)  # sum in float32 at least
        return lesson00.reduce_scatter(partial_flat, 0, self.groups["shard"])

    def gather_parameters(self) -> None:
        """Copy the shards of all replicas into the vector: one all-gather."""
        shard = self.shard.to(self.flat.dtype)
        self.flat.copy_(lesson00.all_gather(shard, 0, self.groups["shard"]))

    def after_backward(self) -> None:
        """Called once per step: p.grad is the sum over all micro-batches."""
        self.shard.grad = self.sum_gradients()

    def after_update(self) -> None:
        """Get what the other replicas have updated."""
        self.shard.grad = None
        self.gather_parameters()


# ---- ZeRO-2: gradients in shards

# Backward makes the gradients of the last unit first. As soon as a unit's are complete,
# they are summed and freed, so only one unit's exist in full at a time. The price: each
# micro-batch is summed on its own, M reduce-scatters instead of one.


class ShardedGradients(ShardedStates):
    """A unit of ZeRO-2: sums its gradients within backward, and frees them."""

    def __init__(self, modules, groups):
        super().__init__(modules, groups)
        self.shard.grad = torch.zeros_like(self.shard)
        self.complete = 0  # gradients of this unit and micro-batch
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p: nn.Parameter) -> None:
        """Called by autograd when p.grad is complete, in one order on all ranks."""
        self.complete += 1
        if self.complete == len(self.parameters):
            self.complete = 0
            self.shard.grad += self.sum_gradients()

    def after_backward(self) -> None:
        """Nothing is left to sum."""

    def after_update(self) -> None:
        self.gather_parameters()


# ---- ZeRO-3: parameters in shards

# A unit gathers its parameters before its forward pass and frees them after it, and
# again around its backward pass. Autograd saved no copies of the weights but
# tensors with the same memory: freed, then filled with the same values in backward.


class UnshardInBackward(torch.autograd.Function):
    """On a unit's output: identity forward; in backward it gathers, before the unit."""

    @staticmethod
    def forward(ctx, y: Tensor, unit: ShardedParameters) -> Tensor:
        ctx.unit = unit
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.unit.unshard()
        return grad, None


class ShardedParameters(ShardedGradients):
    """A unit of ZeRO-3: its parameters exist in full only while it computes.

    keep: gather once per step, free after the last micro-batch; for a pipeline. (In
        PyTorch: reshard_after_forward=False, set_reshard_after_backward(False).)
    Communication per micro-batch: two all-gathers and one reduce-scatter.
    """

    copies_shard = True  # the vector will be freed

    def __init__(self, modules, groups, keep: bool = False):
        super().__init__(modules, groups)
        self.keep = keep
        modules[0].register_forward_pre_hook(lambda module, inputs: self.unshard())
        modules[-1].register_forward_hook(self.after_forward)
        self.reshard()

    def unshard(self) -> None:
        """Gather the parameters into new memory, unless they were kept."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)
            self.gather_parameters()

    def reshard(self) -> None:
        """Free the memory of the full parameters."""
        self.flat.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, inputs: tuple, y: Tensor) -> Tensor:
        if self.keep:
            return y
        self.reshard()
        return UnshardInBackward.apply(y, self)

    def sum_gradients(self) -> Tensor:
        if not self.keep:
            self.reshard()  # this unit's backward is complete
        return super().sum_gradients()

    def after_backward(self) -> None:
        self.reshard()

    def after_update(self) -> None:
        """Nothing: the next forward pass gathers."""


# ---- One step of training, the same for all three


class ZeroTraining:
    """Training of one model on replicas × TP ranks, seen from one rank.

    Args:
        units: of the model; none for fully_shard, which has its own.
        groups: "tp", "shard", "replicate", and "data": all replicas, which have
            different rows of the batch.
    """

    def __init__(self, name: str, model: nn.Module, units: list, groups, args):
        self.name = name  # METER counts its collectives under this name
        self.model = model
        self.units = units
        self.groups = groups
        self.args = args
        # Of the first of --stages; with one it is gradient accumulation.
        self.actions = lesson05.schedule("1f1b", 0, args.stages, args.microbatches)
        self.trained = [unit.shard for unit in units] or list(model.parameters())
        # lr and eps as in lesson 02's train_transformer, which says why.
        self.adamw = torch.optim.AdamW(self.trained, lr=3e-3, eps=1e-4)

    def forward_backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Forward and backward of this replica's rows. Return its part of the loss.

        Communication besides the units': one all-reduce of one int64 over "data", and
            one of each shard's gradient over "replicate".
        """
        data = self.groups["data"]
        rows = lesson00.shard(torch.stack(batch), 1, data)  # tokens and targets
        micro_batches = lesson00.split(rows, 1, self.args.microbatches)
        with METER.phase(self.name, "batch"):
            targets = lesson05.count_targets(micro_batches, data)
        losses = {}
        for phase, i in self.actions:
            with METER.phase(self.name, phase):
                if phase == "forward":
                    tokens_bS, target_bS = micro_batches[i]
                    loss_sum = sum_of_losses(self.model(tokens_bS), target_bS)
                    # targets: of all replicas and micro-batches, so add up the parts.
                    losses[i] = loss_sum / targets
                else:
                    self.scale(losses[i]).backward()
                    losses[i] = losses[i].detach()
        with METER.phase(self.name, "summing"):
            for unit in self.units:
                unit.after_backward()
                grad = unit.shard.grad
                unit.shard.grad = lesson00.all_reduce(grad, self.groups["replicate"])
        return sum(losses.values())

    def scale(self, loss: Tensor) -> Tensor:
        """What backward starts from: times DP where sums are divided by it (FSDP)."""
        return loss

    def norm(self) -> float:
        """The norm of the full gradient, of which each rank has a shard.

        Ranks over "shard" have different elements: sum their squares. Ranks over
        "replicate" have the same: no sum, or each would count several times. Over tp
        some are the same: norm_weights (flat_vector.py) counts these 1/T on each rank.
        Communication: two all-reduces of one float64.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for unit in self.units:
            of_parameters = norm_weights(unit.parameters, self.groups["tp"])
            weights = unit.slice_of(flatten(of_parameters, unit.parts))
            squares += (unit.shard.grad.double().square() * weights).sum()
        squares = lesson00.all_reduce(squares, self.groups["tp"])
        squares = lesson00.all_reduce(squares, self.groups["shard"])
        return squares.sqrt().item()

    def update(self) -> float:
        """Clip, update the shards, share them. Return the norm before clipping."""
        with METER.phase(self.name, "norm"):
            norm = self.norm()
        lesson02.clip_gradients(nn.ParameterList(self.trained), self.args.clip, norm)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=False)
        with METER.phase(self.name, "update"):
            for unit in self.units:
                unit.after_update()
        return norm


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """Train one model in one process, by DP, ZeRO-1 to 3, fully_shard and HSDP."""
    groups = make_groups(args)
    full = lesson02.make_transformer(args)
    batches = lesson02.make_batches(__doc__, args, args.steps)
    report.size.update(sizes_of_units(full, groups["ZeRO"]["tp"]))
    show_shards(report, full, groups["ZeRO"])
    plans = {  # run → its units, and over which groups
        "DP": (ShardedStates, "DP"),
        "ZeRO-1": (ShardedStates, "ZeRO"),
        "ZeRO-2": (ShardedGradients, "ZeRO"),
        "ZeRO-3": (ShardedParameters, "ZeRO"),
        "kept": (partial(ShardedParameters, keep=True), "ZeRO"),
        "fully_shard": (None, "ZeRO"),
        "over all": (ShardedParameters, "all ranks"),
        "HSDP": (ShardedParameters, "HSDP"),
    }
    model = copy.deepcopy(full)
    alone = lesson02.train_transformer("one process", model, batches, args)
    runs = {"one process": alone}
    args.allowed = lesson00.ALLOWED[args.dtype]
    args.allowed_loss = lesson00.ALLOWED_LOSS[args.dtype]
    if args.bf16:
        allow_rounding(args, full, groups["one process"], batches, alone)
    trainings = {}
    for name, (kind, which) in plans.items():
        if which in groups:
            # If your edit raises an error in one run, the others continue.
            with report.guard(name):
                training = make_training(name, full, kind, groups[which], args)
                runs[name] = train(training, batches)
                trainings[name] = training
    show_training(report, runs, trainings, args)
    show_memory(report, trainings)
    show_communication(report, trainings)
    if args.ranks % 2 == 0:
        show_nodes(report, trainings, args)


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError if the model cannot be built or split."""
    ranks = args.ranks
    args.tp = args.tp or (2 if ranks % 2 == 0 and ranks > 2 else 1)
    if ranks % args.tp != 0:
        left = f"{ranks} ranks % {args.tp} = {ranks % args.tp}, not 0"
        raise ValueError(f"--tp {args.tp}: {left}; take {math.gcd(ranks, args.tp)}")
    args.dp = ranks // args.tp
    parts = ranks * args.microbatches  # section 6 splits the batch over all ranks
    args.batch_size = args.batch_size or parts * math.ceil(16 / parts)
    lesson00.must_divide(args, "batch_size", parts, "(ranks · --microbatches)")
    letters = sizes_without_dropout(args)
    args.mesh = f"dp {args.dp} × tp {args.tp}"
    size = {letter: letters[letter] for letter in "BSDVL"}
    e = letters["e"]
    size.update(T=args.tp, DP=args.dp, M=args.microbatches)
    size.update(e=e, g=e, o=2 * e)  # o: two moments
    if args.bf16:
        size.update(e=2, o=3 * e)  # and a float32 copy of the parameters
    return size


def sizes_of_units(full: nn.Module, tp_group) -> dict[str, int]:
    """U, Ψ and u of the legend: of a rank's model under TP."""
    units = []
    for modules in units_of(lesson02.tp_transformer(full, tp_group)):
        units.append(sum(p.numel() for p in nn.ModuleList(modules).parameters()))
    return {"U": len(units), "Ψ": sum(units), "u": max(units)}


def make_groups(args) -> dict[str, dict[str, dist.ProcessGroup]]:
    """Ways to choose this rank's groups "data", "shard", "replicate" and "tp"."""
    mesh = lesson00.mesh_groups({"dp": args.dp, "one": 1, "tp": args.tp}, args.timeout)
    dp = mesh["dp"]
    one = mesh["one"]
    groups = {
        "one process": dict(data=one, shard=one, replicate=one, tp=one),
        "DP": dict(data=dp, shard=one, replicate=dp, tp=mesh["tp"]),
        "ZeRO": dict(data=dp, shard=dp, replicate=one, tp=mesh["tp"]),
    }
    # Two levels (HSDP, hybrid sharding): ZeRO-3 over all ranks gathers each parameter
    # over all nodes, twice per micro-batch, and links between nodes are slow. HSDP
    # shards in a node ("shard") and replicates over nodes ("replicate"): only the
    # gradients of shards cross, once per step. The price is memory: the ranks of a node
    # share a vector.
    if args.ranks % 2 == 0:  # two nodes; without TP, all ranks are replicas
        mesh = lesson00.mesh_groups({"node": 2, "local": args.ranks // 2}, args.timeout)
        every = lesson00.mesh_groups({"all": args.ranks}, args.timeout)["all"]
        groups["all ranks"] = dict(data=every, shard=every, replicate=one, tp=one)
        groups["HSDP"] = dict(
            data=every, shard=mesh["local"], replicate=mesh["node"], tp=one
        )
    return groups


# ---- Training


def sum_of_losses(logits_bSV: Tensor, target_bS: Tensor) -> Tensor:
    """Cross entropy in float32 at least, summed over the targets."""
    logits = logits_bSV.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, target_bS.flatten(), reduction="sum")


def make_training(name: str, full: nn.Module, kind, groups, args) -> ZeroTraining:
    """A copy of the model under TP, in units of this kind, with a meter."""
    if kind is None:
        return FullyShardTraining(name, full, groups, args)
    model = lesson02.tp_transformer(full, groups["tp"])
    model = model.bfloat16() if args.bf16 else model
    meter = HeldMeter(model)
    units = [kind(modules, groups) for modules in units_of(model)]
    training = ZeroTraining(name, model, units, groups, args)
    meter.shards = training.trained
    training.meter = meter
    return training


def allow_rounding(args, full, groups, batches, alone) -> None:
    """--bf16: allowed is thrice the difference that bfloat16 makes in one process."""
    training = make_training("bfloat16", full, ShardedStates, groups, args)
    run = train(training, batches)
    # A measured difference can be tiny by chance. So at least one rounding of bfloat16
    # is allowed: 2^-8 of a gradient; of a loss, a mean of n numbers, 2^-9 / √n.
    targets = batches[0][1].numel()
    worst = lambda got, exact: max(lesson00.rel_diff(got[x], exact[x]) for x in exact)
    args.allowed_loss = max(2**-9 / targets**0.5, 3 * worst(run.losses, alone.losses))
    args.allowed = max(2**-8, 3 * worst(run.gradients, alone.gradients))


def train(training: ZeroTraining, batches: list) -> lesson02.TrainingRun:
    """One step on each batch, as lesson 02's train_transformer."""
    losses = {}
    norms = {}
    for step, batch in enumerate(batches, 1):
        part_of_loss = training.forward_backward(batch)
        if training.units:
            training.meter.look()
        if step == 1:
            gradients = unshard_all(training, "grad")
        norms[f"‖g‖, step {step}"] = training.update()
        # For the report, so without a label: the loss of all replicas.
        loss = lesson00.all_reduce(part_of_loss, training.groups["data"])
        losses[f"loss, step {step}"] = loss.item()
    parameters = unshard_all(training, "data")
    return lesson02.TrainingRun(
        training.model, training.adamw, losses, norms, gradients, parameters
    )


def unshard_all(training: ZeroTraining, what: str) -> dict[str, Tensor]:
    """Full gradients ("grad"), from the shards, or full parameters ("data")."""
    for unit in training.units:
        if what == "grad":
            flat = lesson00.all_gather(unit.shard.grad, 0, unit.groups["shard"])
            for p, view in zip(unit.parameters, views_of(flat, unit.parameters)):
                p.grad = view.to(p.dtype)  # PyTorch requires the parameter's dtype
        elif isinstance(unit, ShardedParameters):
            unit.unshard()
    tensors = lesson02.unshard_model(training.model, what)  # over tp
    for unit in training.units:
        if isinstance(unit, ShardedParameters):
            unit.reshard()
        for p in unit.parameters:
            p.grad = None
    return tensors


# ---- The sections of the output, in order


def show_shards(report: lesson00.Report, full: nn.Module, groups: dict) -> None:
    """Which elements of layer 0's vector the ranks of each replica update."""
    layer = lesson02.tp_transformer(full, groups["tp"]).layers[0]
    unit = ShardedStates([layer], groups)
    names = [name for name, _ in layer.named_parameters()]
    # For each element of this replica's shard, the number of its parameter.
    numbers = [torch.full(p.shape, i) for i, p in enumerate(unit.parameters)]
    held = unit.slice_of(flatten(numbers, unit.parts))
    start = groups["shard"].rank() * len(held)
    row = {"ranks": str(dist.get_process_group_ranks(groups["tp"]))}
    row["elements"] = f"{start:,} to {start + len(held) - 1:,}"
    row.update({"first": names[held[0]], "last": names[held.max()]})
    report.section("Who updates what: layer 0 as a vector, in DP shards")
    report.table(gather_objects(row, groups["shard"]))
    size = report.size
    text = f"{size['U']} units (U) have {size['Ψ']:,} parameters per TP rank (Ψ), "
    report.say(text + f"the largest {size['u']:,} (u).")


def show_training(report: lesson00.Report, runs: dict, trainings: dict, args) -> None:
    """Losses, norms, gradients, parameters; what ranks share is the same on all."""
    shown = {}  # as columns
    others = {}  # run → its largest difference
    alone = runs["one process"]
    for name, run in runs.items():
        if name == "one process" or name.startswith("ZeRO"):
            shown[name] = run
        else:
            others[name] = worst_difference(report, name, run, alone, args)
    values = lambda field: lesson01.values_of(shown, field)
    report.section("Losses, norms of gradients before clipping, final parameters")
    report.compare("losses", values("losses"), args.allowed_loss)
    report.compare("norms", values("norms"), args.allowed, brief=True)
    if not args.bf16:
        report.compare("parameters", values("parameters"), args.allowed, brief=True)
    if others:
        worst = max(others, key=others.get)
        text = f"{len(others)} runs of later sections; largest diff"
        report.say(f"{text} {others[worst]:.1e}, of {worst}")
    differ = 0
    for name, training in trainings.items():
        differ += replicas_differ(report, name, runs[name], training.groups)
    equal = len(trainings) - differ
    text = f"{equal} of {len(trainings)} runs have bitwise the same parameters"
    report.say(f"{text} on all ranks.")
    report.section("Gradients of step 1: norms, and the largest relative difference")
    report.compare("gradients", values("gradients"), args.allowed, fold=unit_name)


def unit_name(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.3, embed_tokens.weight → embed."""
    first, second, *_ = name.split(".")
    return f"layers.{second}" if first == "layers" else first.removesuffix("_tokens")


# ---- Memory

# The most bytes of parameters, of gradients, and of optimizer states. A collective's
# input or result, copied for a moment, is not counted.
MEMORY = {
    "DP": ("Ψ·e", "Ψ·g", "Ψ·o"),
    "ZeRO-1": ("DP·ψ·e", "max(Ψ·e, ψ·g)", "ψ·o"),
    "ZeRO-2": ("DP·ψ·e", "u·e + ψ·g", "ψ·o"),
    "ZeRO-3": ("w·e + ψ·g", "u·e + ψ·g", "ψ·2·g"),
    "kept": ("DP·ψ·e + ψ·g", "u·e + ψ·g", "ψ·2·g"),
}


def show_memory(report: lesson00.Report, trainings: dict[str, ZeroTraining]) -> None:
    """Bytes per rank of parameters, gradients and optimizer states, at most."""
    size = report.size
    report.section("Memory per rank, the most in a step (without collectives' copies)")
    rows, found = checked_rows(report, "memory", MEMORY, bytes_held, trainings)
    per_parameter = {run: sum(held.values()) / size["Ψ"] for run, held in found.items()}
    for row in rows:
        row["sum/Ψ"] = f"{per_parameter[row['run']]:.2f}"
    report.table(rows)
    if "ZeRO-3" in found:
        unit = 2 * size["u"] * size["e"] / size["Ψ"]
        report.say(
            f"ZeRO-3 holds {per_parameter['ZeRO-3']:.2f} bytes per parameter: 1/DP of "
            f"{4 * size['g']}, and {unit:.2f} for one unit in full."
        )
    report.say("sum/Ψ adds three maxima, which need not occur at the same time.")


# ---- Communication

# All-gathers, reduce-scatters (plain DP: all-reduces), each of one unit's vector, and
# the bytes that a rank of a ring sends for them: its shard DP − 1 times per call, for
# an all-reduce twice that.
TRAFFIC = {
    "DP": ("0", "U", "2·Ψ/DP·g·(DP-1)"),
    "ZeRO-1": ("U", "U", "ψ·(e+g)·(DP-1)"),
    "ZeRO-2": ("U", "M·U", "ψ·(e+M·g)·(DP-1)"),
    "ZeRO-3": ("2·M·U", "M·U", "ψ·M·(2·e+g)·(DP-1)"),
    "fully_shard": ("2·M·U", "M·U", "ψ·M·(2·e+g)·(DP-1)"),
    "kept": ("U", "M·U", "ψ·(e+M·g)·(DP-1)"),
}
# Of all DP·T ranks together, to another node. A ring of all ranks has one link out of
# each of two nodes. HSDP has a ring for each two ranks, for their shard of gradients.
CROSSING = {
    "over all": ("2·M·(2·e+g)·ψ·(DP·T-1)",),
    "HSDP": ("DP·T·ψ·g",),
}


def show_communication(report: lesson00.Report, trainings: dict) -> None:
    """What each run's units send over replicas per step."""
    size = report.size
    report.section("Communication over replicas per step; ring: bytes a rank sends")
    rows, found = checked_rows(report, "bytes", TRAFFIC, sent, trainings)
    report.table(rows)
    if "ZeRO-3" in found and "DP" in found and found["DP"]["ring"]:
        ratio = found["ZeRO-3"]["ring"] / found["DP"]["ring"]
        each = (2 * size["e"] + size["g"]) / (2 * size["g"])
        report.say(
            f"ZeRO-3 sends {ratio:.2f} times what DP sends: {each:.1f} for each of "
            f"{size['M']} micro-batches."
        )


def show_nodes(report: lesson00.Report, trainings: dict, args) -> None:
    """All ranks as replicas on two nodes: ZeRO-3 over all of them, and HSDP."""
    title = f"2 nodes × {args.ranks // 2} ranks, all of them replicas"
    report.section(f"{title}: bytes sent to the other node per step")
    rows, found = checked_rows(report, "bytes", CROSSING, sent_to_other_node, trainings)
    held = {run: sum(bytes_held(trainings[run]).values()) for run in found}
    for row in rows:
        row["held by a rank"] = f"{held[row['run']]:,}"
    report.table(rows)
    sent_by = {run: of_run["to the other node"] for run, of_run in found.items()}
    if all(sent_by.values()) and len(sent_by) == 2:
        ratio = sent_by["over all"] / sent_by["HSDP"]
        text = f"HSDP sends 1/{ratio:.2f} of the bytes between nodes, and a rank holds "
        text += f"{held['HSDP'] / held['over all']:.2f} times as many. "
        report.say(text + "Only gradients cross, once per step.")


# ---- The same by PyTorch


class FullyShardTraining(ZeroTraining):
    """The same steps on a model under TP (lesson 02's plan) and fully_shard over dp.

    fully_shard shards each parameter along dim 0 instead of a vector: its shards are
    DTensors. It divides the sum of gradients by DP. Its calls are in pytorch_zero.py.
    """

    def __init__(self, name: str, full: nn.Module, groups, args):
        model = fully_sharded(full, units_of, groups, args)
        super().__init__(name, model, [], groups, args)
        # Whatever --stages is. In 1F1B's order PyTorch gathers once more.
        self.actions = lesson05.schedule("1f1b", 0, 1, args.microbatches)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.args.dp

    def norm(self) -> float:
        """By full gradients: PyTorch's norm refuses DTensors of different meshes."""
        gradients = lesson02.unshard_model(self.model, "grad").values()
        return math.sqrt(sum(x.double().square().sum().item() for x in gradients))


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson02.add_model_flags(parser)
    add = parser.add_argument
    positive = lesson00.positive
    add("--tp", type=positive, default=0, help="T (2 on 4 ranks or more, otherwise 1)")
    add("--microbatches", type=positive, default=2, help="M (2)")
    text = "order of passes as on the first of so many pipeline stages (1)"
    add("--stages", type=positive, default=1, help=text)
    add("--bf16", action="store_true", help="compute in bfloat16, update in float32")
    # B: 16, or the next multiple of ranks · M
    parser.set_defaults(batch_size=None, dropout=0.0, clip=0.25)
    lesson00.launch(main, sizes, parser)
