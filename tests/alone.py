"""The first step of a lesson's model, in this process alone, by plain PyTorch."""

import functools
import sys
from unittest import mock

import jobs
import torch
import torch.nn.functional as F


@functools.cache
def arguments(run):
    """What a run's flags are to its lesson."""
    lesson, ranks, *flags = run
    flags = [str(one) for one in flags if one != "--hf"]  # it would be imported
    with mock.patch.object(sys, "argv", [lesson, *flags]):
        args = jobs.load(lesson).parse_args(ranks)
    args.device = "cpu"
    return args


@functools.cache
def first_step(run, dtype: str, dropout: bool = True) -> tuple[float, dict]:
    """Loss and gradients of a run of 02, 03 or 04, the model cast to another dtype."""
    lesson, args = jobs.load(run[0]), arguments(run)
    make = getattr(lesson, "make_tied", None) or lesson.make_transformer
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: the order of sums is part of the rounding
    model = make(args).to(getattr(torch, dtype)).train(dropout)
    ((tokens, target),) = lesson.make_batches(args, 1)
    torch.manual_seed(args.seed)
    logits = model(tokens).flatten(0, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.to(wide), target.flatten(), ignore_index=-100)
    loss.backward()
    torch.set_num_threads(threads)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def rounding(run) -> dict:
    """Of a bfloat16 run: how far rounding alone moves each gradient, without TP."""
    near, exact = (first_step(run, dtype)[1] for dtype in ("bfloat16", "float32"))
    return {
        name: ((near[name].double() - g).abs().max() / g.double().abs().max()).item()
        for name, g in exact.items()
    }
