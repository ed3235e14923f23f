"""Lesson 05 on two machines: how many bytes of a training step leave each of them.

    torchrun --nnodes=2 … cable.py FOLDER [flags of lesson 05]

The first rank of each machine reads the kernel's counter of the network interface,
before and after each step but the first, and writes FOLDER/sent-RANK.
"""

import argparse
import os
import sys
from pathlib import Path

import torch.distributed as dist
from in_ranks import load

FOLDER = Path(sys.argv[1])
INTERFACE = os.environ["GLOO_SOCKET_IFNAME"]
COUNTER = Path("/sys/class/net", INTERFACE, "statistics/tx_bytes")
lesson = load("05_3d_parallel")
before, sent = [], []


def read_counter(into: list) -> None:
    """Between two barriers: no rank sends a thing of its step meanwhile."""
    dist.barrier()
    into.append(int(COUNTER.read_text()))
    dist.barrier()


class Watched(lesson.MeshTraining):
    def train_step(self, batch):
        read_counter(before)
        loss, norm = super().train_step(batch)
        read_counter(sent)
        if os.environ["LOCAL_RANK"] == "0":
            steps = [b - a for a, b in zip(before[1:], sent[1:])]
            path = FOLDER / f"sent-{os.environ['RANK']}"
            path.write_text(str(sum(steps) / max(1, len(steps))))
        return loss, norm


if __name__ == "__main__":
    lesson.MeshTraining = Watched
    sys.argv = [lesson.__file__, *sys.argv[2:]]
    parser = argparse.ArgumentParser()
    lesson.add_mesh_flags(parser)
    lesson.launch(lesson.main, lesson.sizes_of_mesh, parser)
