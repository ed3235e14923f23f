"""A lesson whose optimizer may update lists of tensors, as by default on GPUs.

    torchrun … foreach.py LESSON [flags of the lesson]

On an H100 lessons 02 and 03 raised in the DTensor run: a list may not mix DTensors and
plain tensors. On CPU PyTorch makes no lists, so no test saw it.
"""

import sys

from in_ranks import load
from torch.optim import optimizer

if __name__ == "__main__":
    optimizer._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    lesson = load(sys.argv[1])
    sys.argv = [lesson.__file__, *sys.argv[2:]]
    getattr(lesson, "lesson00", lesson).launch(
        lesson.main, lesson.parse_args, vars(lesson)
    )
