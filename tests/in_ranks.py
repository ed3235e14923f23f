"""What the driver scripts share: how a rank of theirs starts and ends."""

import gc
import importlib
import json
import math
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


def difference(got, wanted) -> float:
    """max|got − wanted| / max|wanted|; inf for another shape, for none, for nan."""
    if got is None or got.shape != wanted.shape:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    diff = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    return diff.item() if diff == diff else math.inf


def groups_of_4(lesson) -> list:
    """Of four ranks: groups of 1, of 2 that are not neighbours, of 4, of neighbours."""
    found = []
    for sizes in ({"tp": 1, "x": 4}, {"tp": 2, "x": 2}, {"tp": 4}, {"x": 2, "tp": 2}):
        found.append(lesson.mesh_groups(sizes, 30)["tp"])
    return found


def write_found(found: dict) -> None:
    """For jobs.run_driver: the folder is the script's one argument."""
    path = Path(sys.argv[1], f"rank{dist.get_rank()}.json")
    path.write_text(json.dumps(found))
