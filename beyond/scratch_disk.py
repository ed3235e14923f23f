"""A folder that is removed at the end, and a disk that seems to be full.

A helper of beyond/10_checkpoints.py, no script.
"""

import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from harness import gather_objects


@contextmanager
def temporary_folder(parent: Path | None = None):
    """A folder that all ranks use, and that is removed at the end."""
    # Rank 0 creates it, and all get its name.
    name = ""
    if dist.get_rank() == 0:
        name = tempfile.mkdtemp(prefix="scratch_", dir=parent)
    folder = Path(gather_objects(name)[0])
    try:
        yield folder
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def full_disk(rank: int):
    """Within `with`: no file that this rank writes may have more than 1,000 bytes.

    No disk is full. The system raises the error that it also has for a file that is
    larger than the file system allows.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
