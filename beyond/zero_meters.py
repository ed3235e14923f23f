"""What a model in shards holds at most, and what it sends.

A helper of beyond/15_zero.py, no script.
"""

from collections import Counter

import torch
import torch.distributed as dist
from course import lesson00, lesson01
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Meter:
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


class CountFullyShard(TorchDispatchMode):
    """Within `with`: fully_shard's collectives are counted as well."""

    names = {
        "c10d::_allgather_base_": "all-gather",
        "c10d::_reduce_scatter_base_": "reduce-scatter",
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn it into local operations
        name = func._schema.name
        if name in self.names:  # (output, input, …): the larger one is the payload
            lesson00.COMM.count(self.names[name], max(x.nbytes for x in args[:2]), "dp")
        return func(*args, **(kwargs or {}))


def bytes_held(training) -> dict[str, int]:
    """Measured: parameters and gradients at most during a step, and the states."""
    held = dict(training.meter.most, states=0)
    for unit in training.units:
        for name, x in training.adamw.state[unit.shard].items():
            if name != "step":  # AdamW: two moments; another optimizer has others
                held["states"] += lesson01.nbytes([x])
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
    for call, calls in lesson00.COMM.calls.items():
        # Not TP, and not the single numbers: norm, number of targets.
        is_of_units = call.axis != "tp" and call.phase not in ("norm", "batch")
        if call.run != training.name or not is_of_units:
            continue
        ranks = dist.get_process_group_ranks(groups[call.axis])
        # In a ring a rank sends to the next rank of its group only.
        right = ranks[(ranks.index(rank) + 1) % len(ranks)]
        if only_other_node and right // half == rank // half:
            continue
        column = "gathers" if call.collective == "all-gather" else "sums"
        found[column] += lesson00.per_step(calls, training.args.steps)
        nbytes = lesson00.per_step(lesson00.COMM.bytes[call], training.args.steps)
        found["ring"] += lesson00.ring_bytes(call.collective, nbytes, len(ranks))
    return found


def sent_to_other_node(training) -> dict[str, int]:
    """Bytes per step of all ranks together."""
    ring = sent(training, only_other_node=True)["ring"]
    return {"to the other node": sum(lesson00.gather_objects(ring))}


def with_shards(size: dict, training) -> dict:
    """ψ: elements of a rank's shards; w: of the longest vector. Both with zeros."""
    size = dict(size, R=training.args.ranks)
    if size["DP"] == 1:
        size["U"] = 0  # one replica sends nothing
    if training.units:
        size["ψ"] = sum(len(unit.shard) for unit in training.units)
        size["w"] = max(len(unit.flat) for unit in training.units)
    else:  # fully_shard pads the shards of a parameter to the size of the largest
        numels = [lesson01.local(p).numel() for p in training.trained]
        of_ranks = lesson00.gather_objects(numels, training.groups["data"])
        size["ψ"] = torch.tensor(of_ranks).amax(0).sum().item()
    return size
