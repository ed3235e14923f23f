"""Lesson 05's mesh by PyTorch: fully_shard, a plan for TP, and a pipeline schedule.

One step of the same model on the same mesh, by three of PyTorch's parts in this order:
the TP plan of lesson 04, a stage of the layers, and fully_shard over the replicas.

    torchrun --standalone --nproc_per_node=8 beyond/pytorch_stages.py

It takes lesson 05's flags. You will see the same loss and the same gradients as in one
process. PyTorch's stages cannot share a weight, and take micro-batches of one length.
"""

import argparse
import copy
import logging
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, parallel

try:
    from course import lesson00, lesson02, lesson04, lesson05
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}  # PyTorch's


def pytorch_stage(full: nn.Module, groups, args) -> tuple[nn.Module, list[str]]:
    """This rank's part of the model by PyTorch's API, and its parameters' names.

    The order matters: tp (lesson 04's plan), then this stage, then fully_shard over dp
    (ZeRO stage 3: parameters are gathered around a module's forward pass).
    """
    # Not init_device_mesh: the groups that it makes time out after 30 minutes.
    ranks = torch.arange(args.ranks).view(args.pp, args.dp, args.tp)
    device = torch.device(args.device).type
    axes = lesson05.AXES
    ours = [groups[axis] for axis in axes]
    mesh = DeviceMesh.from_group(ours, device, mesh=ranks, mesh_dim_names=axes)
    plan = lesson04.sp_plan()
    model = parallel.parallelize_module(copy.deepcopy(full), mesh["tp"], plan)
    with torch.no_grad():  # what PyTorch cannot run raises here, on all ranks
        model(torch.zeros(1, args.seq_len, dtype=torch.int64, device=args.device))
    name_of = {p: name for name, p in model.named_parameters()}
    model = lesson05.slice_stage(model, mesh["pp"].get_local_rank(), args.pp)
    names = [name_of[p] for p in model.parameters()]  # fully_shard makes new ones
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), names


def pytorch_step(kind: type, full: nn.Module, batch: tuple, groups, args) -> dict:
    """One step of PyTorch's pipeline: the loss, and the gradients of this stage."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # no hints
    model, names = pytorch_stage(full, groups, args)
    # fully_shard averages gradients over replicas. So each loss is multiplied by DP: it
    # is divided by 1/DP of the batch's targets.
    targets_per_replica = (batch[1] != lesson02.IGNORE).sum() / args.dp

    def loss_of(logits: DTensor, target_bS: Tensor) -> Tensor:
        logits = logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, target_bS.flatten(), reduction="sum")
        return loss / targets_per_replica

    tokens_bS, target_bS = [lesson00.shard(x, 0, groups["dp"]) for x in batch]
    rank = groups["pp"].rank()
    stage = PipelineStage(model, rank, args.pp, tokens_bS.device, group=groups["pp"])
    if torch.__version__ < (2, 10):  # its first message is 8 bytes, 4 are expected
        stage._get_init_p2p_neighbors_ops = list  # so send none (pytorch#165539)
    pipeline = kind(stage, args.microbatches, loss_of, scale_grads=False)  # no 1/M
    inputs = [tokens_bS] if stage.is_first else []
    losses = []
    with parallel.loss_parallel():
        pipeline.step(*inputs, target=target_bS, losses=losses)
    zero = torch.zeros((), dtype=torch.float64, device=args.device)
    # Only the last stage has losses; the others add zero.
    loss = sum([x.detach().full_tensor() for x in losses], zero)
    for axis in ("pp", "dp"):
        loss = lesson00.all_reduce(loss, groups[axis])
    gradients = lesson02.unshard_model(model, "grad").values()
    return dict(zip(names, gradients), loss=loss / args.dp)


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """One step by PyTorch's API and in one process."""
    mesh = {axis: getattr(args, axis) for axis in lesson05.AXES}
    groups = lesson05.make_mesh(mesh, args.timeout)
    (batch,) = lesson02.make_batches(lesson05.__doc__, args, 1)
    batch = lesson04.pad_batch(*batch, args.tp)
    args.seq_len = report.size["S"]  # from here on T divides it
    model = lesson02.make_transformer(args)
    kind = args.schedule
    if args.microbatches < args.pp:
        kind = "gpipe"  # PyTorch's 1F1B requires M ≥ P
    report.section(f"One step by PyTorch (rank 0's stage): fully_shard, {kind}")
    with report.guard("PyTorch"):
        got = pytorch_step(SCHEDULES[kind], model, batch, groups, args)
    if report.raised:
        return
    loss = lesson02.mean_loss(model(batch[0]), batch[1])
    loss.backward()
    expected = dict(lesson02.unshard_model(model, "grad"), loss=loss.detach())
    runs = {"one process": {name: expected[name] for name in got}, "PyTorch": got}
    losses = {run: {"loss": values.pop("loss")} for run, values in runs.items()}
    report.compare("losses", losses, lesson00.ALLOWED_LOSS[args.dtype])
    allowed = lesson00.ALLOWED[args.dtype]
    report.compare("gradients", runs, allowed, fold=lesson05.part_of)


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson05.add_mesh_flags(parser)
    lesson00.launch(main, lesson05.sizes_of_mesh, parser)
