"""What the driver scripts share: how a rank of theirs starts and ends."""

import gc
import importlib
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))


def load(lesson: str):
    return importlib.import_module(lesson)


def start(seconds: float = 30) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def finish() -> None:
    """End a rank when all have come here, and nothing refers to a group any more."""
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def mesh_table(groups: dict) -> dict:
    """axis → the ranks of this rank's group, in order."""
    return {axis: dist.get_process_group_ranks(g) for axis, g in groups.items()}
