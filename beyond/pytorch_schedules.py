"""PyTorch's schedules of pipelines, and their plans as lists of steps.

A helper of beyond/14_schedules.py, no script. Some of these names are PyTorch's own and
not documented.
"""

from typing import NamedTuple

from torch.distributed.pipelining import schedules


class PyTorchSchedule(NamedTuple):
    schedule: type
    is_v: bool  # the second chunk of rank r is stage 2·P − 1 − r, not P + r
    is_run: bool  # otherwise only its lists are looked at


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
    for actions in schedule.pipeline_order.values():
        steps = []
        for action in actions:
            if action is None:  # it waits
                continue
            # A forward and a backward pass that overlap are one action: two steps here.
            for part in action.sub_actions or [action]:
                phase = PHASES.get(part.computation_type.name, full)
                steps.append((phase, part.stage_index, part.microbatch_index))
        lists.append(steps)
    return lists
