"""One MoE layer on its own: a forward and backward pass, compared, and the same by TP.

A helper of beyond/16_expert_parallel.py, no script. `moe` is one of its MoE layers.
"""

import torch
from course import lesson00, lesson01
from harness import marked, take_calls
from torch import Tensor, nn


def run_layer(moe: nn.Module, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Forward, and backward of dL/dy and the balance loss. tensors: x and dL/dy."""
    x = tensors[0].clone().requires_grad_()
    y = moe(x)
    ((y * tensors[1]).sum() + moe.balance).backward()
    return {"y": y.detach(), "dL/dx": x.grad}


def router_gradient(moe: nn.Module, tensors: list[Tensor]) -> str:
    """The norm of the router's gradient without the balance loss."""
    moe.zero_grad()
    (moe(tensors[0]) * tensors[1]).sum().backward()
    return f"{moe.router.weight.grad.norm():.2f}"


def compare_layer(report, name: str, found: dict, expected: dict, allowed) -> str:
    """Check y and all gradients. The largest difference, but of the shared expert's."""
    worst = 0.0
    holds = True
    # k = 1, evenly spread rows: the router's gradient is 0, a sum of terms this large.
    gradients = [x for what, x in expected.items() if what != "y" and x.numel()]
    largest = max(x.abs().max().item() for x in gradients)
    is_zero = expected["router.weight"].abs().max() < allowed * largest
    for what, value in expected.items():
        least = largest if is_zero and what == "router.weight" else 0.0
        diff = lesson00.rel_diff(found[what], value, least)
        text = "" if diff <= allowed else lesson00.difference(found[what], value)
        holds &= report.check(f"one layer: {what}, {name}", diff, allowed, text)
        if "shared_expert" not in what:
            worst = max(worst, diff)
    return marked(f"{worst:.1e}", holds)


def bytes_under_tp(size: dict, groups: dict, args) -> int:
    """What a rank of a ring sends if the ep ranks split an MLP by TP instead.

    They have all tokens of the group then. f and g are around the layer, of R·t·D
    elements each, however many experts it has, and whatever its width (here R).
    """
    mlp = lesson01.tp_mlp(lesson01.MLP(size["D"], size["R"]), groups["ep"])
    mlp.to(args.device, getattr(torch, args.dtype))
    x = mlp.down_proj.weight.new_zeros(size["R"], size["t"], size["D"])
    with lesson00.METER.phase("by TP", ""):
        mlp(x.requires_grad_()).sum().backward()
    payloads = take_calls("by TP").get(("by TP", "", "all-reduce", "ep"), [])
    return lesson00.ring("all-reduce", sum(payloads), size["R"])
