"""The norm of gradients, some of which are sharded over ep, over tp, or over both.

A helper of beyond/16_expert_parallel.py, no script.
"""

import math

import torch
from course import lesson00
from shardings import shardings_of


def ep_norm(model, groups: dict) -> float:
    """The norm of all gradients after they are summed; dp ranks hold equal ones.

    If c ranks of ep × tp hold a parameter, each divides by c, so that it counts once.
    """
    total = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for p in model.parameters():
        if p.grad is None:
            continue
        sharded_over = [group for _, group in shardings_of(p)]
        copies = 1
        for axis in ("ep", "tp"):
            if groups[axis] not in sharded_over:
                copies *= groups[axis].size()
        total += p.grad.double().square().sum() / copies
    for axis in ("ep", "tp"):
        total = lesson00.all_reduce(total, groups[axis])
    return math.sqrt(total)
