"""What a model in shards holds at most, and what it sends.

A helper of beyond/15_zero.py, no script.
"""

from collections import Counter

import torch
import torch.distributed as dist
from course import lesson00
from harness import gather_objects
from torch import nn


class HeldMeter:
    """The most bytes of a model's full parameters, and of gradients, in a step.

    It looks whenever backward has made a gradient: a unit has its parameters then. What
    a collective copies for a moment, it does not see. Make it before the units: hooks
    are called in order of registration, and units free.
    """

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.shards = []
        self.most = Counter()
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.look)

    def look(self, _=None) -> None:
        """Measure what there is now, by storages: parameters are views of vectors."""
        grads = [x.grad for x in self.parameters + self.shards]
        grads = [grad for grad in grads if grad is not None]
        for kind, tensors in (("parameters", self.parameters), ("gradients", grads)):
            storages = [x.untyped_storage() for x in tensors]
            nbytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
            self.most[kind] = max(self.most[kind], sum(nbytes.values()))


def bytes_held(training) -> dict[str, int]:
    """Measured: parameters and gradients at most during a step, and the states."""
    held = dict(training.meter.most, states=0)
    for unit in training.units:
        for name, x in training.adamw.state[unit.shard].items():
            if name != "step":  # AdamW: two moments; another optimizer has others
                held["states"] += x.nbytes
        if unit.copies_shard:  # ZeRO-3: besides the vector that comes and goes
            held["parameters"] += unit.shard.nbytes
        elif unit.shard.dtype != unit.flat.dtype:  # a copy, in float32
            held["states"] += unit.shard.nbytes
    return held


def sent(training, only_other_node: bool = False) -> dict[str, int]:
    """Calls per step of this rank's units, and the bytes that it sends in rings."""
    groups = {group.group_desc: group for group in training.groups.values()}
    half = training.args.ranks // 2  # ranks of a node
    rank = dist.get_rank()
    found = {"gathers": 0, "sums": 0, "ring": 0}
    for call, payloads in lesson00.METER.calls.items():
        run, phase, collective, axis = call
        # Not TP, and not the single numbers: norm, number of targets.
        if run != training.name or axis == "tp" or phase in ("norm", "batch"):
            continue
        ranks = dist.get_process_group_ranks(groups[axis])
        # In a ring a rank sends to the next rank of its group only.
        right = ranks[(ranks.index(rank) + 1) % len(ranks)]
        if only_other_node and right // half == rank // half:
            continue
        column = "gathers" if collective == "all-gather" else "sums"
        found[column] += len(payloads) // training.args.steps
        payload = sum(payloads) // training.args.steps
        found["ring"] += lesson00.ring(collective, payload, len(ranks))
    return found


def sent_to_other_node(training) -> dict[str, int]:
    """Bytes per step of all ranks together."""
    ring = sent(training, only_other_node=True)["ring"]
    return {"to the other node": sum(gather_objects(ring))}


def with_shards(size: dict, training) -> dict:
    """ψ: elements of a rank's shards; w: of the longest vector. Both with zeros."""
    size = dict(size)
    if size["DP"] == 1:
        size["U"] = 0  # one replica sends nothing
    if training.units:
        size["ψ"] = sum(len(unit.shard) for unit in training.units)
        size["w"] = max(len(unit.flat) for unit in training.units)
    else:  # fully_shard pads the shards of a parameter to the size of the largest
        numels = [p.to_local().numel() for p in training.trained]
        of_ranks = gather_objects(numels, training.groups["data"])
        size["ψ"] = torch.tensor(of_ranks).amax(0).sum().item()
    return size
