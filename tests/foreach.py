"""A lesson whose optimizer may update lists of tensors, as by default on GPUs.

    torchrun … foreach.py LESSON [flags of the lesson]

On an H100 lessons 02 and 03 raised in the DTensor run: a list may not mix DTensors and
plain tensors. On CPU PyTorch makes no lists, so no test saw it.
"""

import runpy
import sys
from pathlib import Path

from torch.optim import optimizer

if __name__ == "__main__":
    optimizer._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    path = Path(__file__).parents[1] / f"{sys.argv.pop(1)}.py"
    sys.argv[0] = str(path)
    runpy.run_path(str(path), run_name="__main__")
