"""What a model in shards holds at most, and what fully_shard sends.

A helper of beyond/15_zero.py, no script.
"""

from collections import Counter

from course import lesson00
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Meter:
    """The most bytes of a model's full parameters, and of gradients, at any time.

    It looks whenever backward has made a gradient: a unit has its parameters then. Make
    it before the units: hooks are called in order of registration, and units free.
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
