"""A model under TP and PyTorch's fully_shard.

A helper of beyond/15_zero.py, no script.
"""

import copy
import logging
import warnings
from collections.abc import Callable

import torch
from course import lesson02
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel


def fully_sharded(full: nn.Module, units_of: Callable, groups, args) -> nn.Module:
    """A copy of the decoder under lesson 02's plan over tp and fully_shard over dp.

    units_of: model → lists of modules that are gathered and freed as a whole.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # hints
    warnings.filterwarnings("ignore", "FSDP2-wrapped")  # of edits that we do not do
    axes = {"dp": groups["data"], "tp": groups["tp"]}
    ranks = torch.arange(args.ranks).view(args.dp, args.tp)
    device = torch.device(args.device).type
    mesh = DeviceMesh.from_group(
        list(axes.values()), device, mesh=ranks, mesh_dim_names=tuple(axes)
    )
    plan = lesson02.tp_plan()
    model = parallel.parallelize_module(copy.deepcopy(full), mesh["tp"], plan)
    options = {"mesh": mesh["dp"]}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for modules in units_of(model):
        fully_shard(modules, **options)
    return fully_shard(model, **options)
