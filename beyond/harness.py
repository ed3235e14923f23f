"""What several scripts of this folder use to gather, to count and to compare.

A helper of the scripts, no script. METER, which counts collectives, and Report, which
checks and prints, are lesson 00's.
"""

import math

import torch.distributed as dist
from course import lesson00, lesson02


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order; of all ranks without a group."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sizes_without_dropout(args) -> dict[str, int]:
    """Lesson 02's sizes, for scripts that split what Dropout samples as one mask."""
    if args.dropout:
        text = "each rank would have to sample its part of one mask"
        raise ValueError(f"--dropout {args.dropout:g}: {text}; take --dropout 0")
    args.kv_heads = args.kv_heads or args.tp * math.ceil(4 / args.tp)
    args.heads = args.heads or 2 * args.kv_heads
    args.hidden = args.hidden or 8 * args.heads
    return lesson02.transformer_sizes(args)


def take_calls(run: str) -> dict[tuple, list[int]]:
    """A run's collectives, call → payloads, which a later ledger then leaves out."""
    calls = lesson00.METER.calls
    return {call: calls.pop(call) for call in list(calls) if call[0] == run}


def on_axes(formulas: dict, ranks: dict[str, int]) -> dict:
    """The formulas of calls over axes of two ranks or more: one rank sends nothing."""
    return {call: formulas[call] for call in formulas if ranks[call[3]] > 1}


def cell(report, name: str, got: int, formula: str, **size: int) -> str:
    """A measured number, checked against a formula, as a table shows it."""
    predicted = lesson00.evaluate(formula, report.size | size)
    text = f"{got:,}, by the lesson's formula {predicted:,}"
    holds = report.check(name, abs(got - predicted), text=text, is_formula=True)
    return f"{got:,}" if holds else f"{got:,} ≠{predicted:,}"


def marked(text, holds: bool) -> str:
    """A cell of a table; ✗ if its value is wrong."""
    return str(text) if holds else f"{text} ✗"
