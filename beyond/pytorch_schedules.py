"""PyTorch's schedules of pipelines: made, run, and their plans: lists, and the bubble.

A helper of beyond/14_schedules.py, no script. Some of these names are PyTorch's own and
not documented.
"""

import copy
import logging
from typing import NamedTuple

import torch
import torch.distributed as dist
from course import lesson05
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules


class PyTorchSchedule(NamedTuple):
    schedule: type
    is_v: bool  # the second chunk of rank r is stage 2·P − 1 − r, not P + r
    is_run: bool  # otherwise only its lists are looked at

    def make(self, full: nn.Module, loss_of, pp, M: int) -> tuple:
        """This rank's two stages in a schedule, and the names of their parameters.

        loss_of: a micro-batch's part of the loss. pp: the group of the pipeline.
        """
        # It logs its plans.
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
        P = pp.size()
        device = next(full.parameters()).device
        second = 2 * P - 1 - pp.rank() if self.is_v else P + pp.rank()
        stages = []
        names = {}
        for number in (pp.rank(), second):
            model = copy.deepcopy(full)
            name_of = {p: name for name, p in model.named_parameters()}
            module = lesson05.slice_stage(model, number, 2 * P)
            for p in module.parameters():
                names[p] = name_of[p]
            stage = PipelineStage(module, number, 2 * P, device, group=pp)
            if torch.__version__ < (2, 10):  # as in lesson 05
                stage._get_init_p2p_neighbors_ops = list
            stages.append(stage)
        # scale_grads: a loss is divided by the batch's targets already, not by M.
        return self.schedule(stages, M, loss_fn=loss_of, scale_grads=False), names

    def gradients(self, schedule, names: dict, micro_batches: list) -> dict:
        """One step; the gradients of this rank."""
        # PyTorch splits the batch itself: into the same micro-batches.
        tokens_BS = torch.cat([tokens for tokens, _ in micro_batches])
        target_BS = torch.cat([target for _, target in micro_batches])
        # The first stage takes tokens; the rank of the last one uses the targets.
        inputs = [tokens_BS] if dist.get_rank() == 0 else []
        schedule.step(*inputs, target=target_BS, losses=[])
        return {name: p.grad for p, name in names.items()}


PYTORCH = {
    "interleaved": PyTorchSchedule(schedules.ScheduleInterleaved1F1B, False, True),
    "interleaved zero bubble": PyTorchSchedule(
        schedules.ScheduleInterleavedZeroBubble, False, True
    ),
    "ZBV": PyTorchSchedule(schedules.ScheduleZBVZeroBubble, True, False),
    "DualPipeV": PyTorchSchedule(schedules.ScheduleDualPipeV, True, False),
}
PHASES = {
    "FORWARD": "forward",
    "BACKWARD_INPUT": "backward",
    "BACKWARD_WEIGHT": "weight",
}


def lists_by_pytorch(schedule, full: str = "full") -> list[list]:
    """A schedule's plan: of each rank (phase, virtual stage, micro-batch), in order.

    full: the name of a backward pass that is not split.
    """
    lists = []
    for theirs in schedule.pipeline_order.values():
        actions = []
        for action in theirs:
            if action is None:  # it waits
                continue
            # A forward and a backward pass that overlap are one action: two of ours.
            for part in action.sub_actions or [action]:
                phase = PHASES.get(part.computation_type.name, full)
                actions.append((phase, part.stage_index, part.microbatch_index))
        lists.append(actions)
    return lists


def pytorch_row(name: str, lists: list[list], M: int, plan) -> dict:
    """A schedule's bubble by its lists, and what a rank has in flight.

    lists: of each rank, with two chunks. plan: the script's, which says when each
    action ends.
    """
    # A chunk is half of a stage here; a full backward pass is B and W in one.
    cost = {"forward": 0.5, "backward": 0.5, "weight": 0.5, "full": 1.0}
    times = plan(lists, 2 * len(lists) - 1, cost)
    computing = 3 * M
    waits = max(end for _, end in times.values()) - computing
    row = {"PyTorch's": name, "waits": f"{waits:g}"}
    row["/computing"] = f"{waits / computing:.3f}"
    row["in flight"] = " ".join(peak_in_flight(x) for x in lists)
    row["gradients"] = ""  # largest relative difference
    return row


def peak_in_flight(actions: list[tuple]) -> str:
    """Forward passes of a rank without a backward pass yet, at most."""
    in_flight = [0]
    for phase, _, _ in actions:
        change = {"forward": 1, "weight": 0}.get(phase, -1)
        in_flight.append(in_flight[-1] + change)
    return str(max(in_flight))
