"""What EP has to send, from the experts that a router chose in one process.

A helper of beyond/16_expert_parallel.py, no script. Letters are those of its legend.
"""

import torch
from course import lesson00
from torch import Tensor


def rows_between(expert_tk: Tensor, groups: dict, args) -> Tensor:
    """Rows that each rank of this ep group has for each expert [R, E]."""
    # The batch is split over dp first, then over ep, as in split_batch.
    of_dp = lesson00.split(expert_tk, 0, groups["dp"].size())[groups["dp"].rank()]
    counts = []
    for of_rank in lesson00.split(of_dp, 0, groups["ep"].size()):
        counts.append(torch.bincount(of_rank.flatten(), minlength=args.experts))
    return torch.stack(counts)


def rows_of_rank(forwards: list[Tensor], groups: dict) -> dict[str, float]:
    """Of this rank, as letters; the mean of several forward passes of an MoE layer.

    arrived: rows that its experts compute. m: rows that leave this rank per all-to-all,
    the mean of those of its own tokens (to the experts) and of others' tokens (back).
    """
    rank = groups["ep"].rank()
    mean_RE = torch.stack(forwards).double().mean(0)
    by_owner_RR = mean_RE.view(len(mean_RE), len(mean_RE), -1).sum(2)
    has = by_owner_RR[rank].sum().item()
    got = by_owner_RR[:, rank].sum().item()
    return {"arrived": got, "m": (has + got) / 2 - by_owner_RR[rank, rank].item()}


def show_rows(report, rows_RE: Tensor) -> None:
    """The first MoE layer in step 1: who owns what, and what is sent to whom."""
    report.section("Who owns which experts, where rows go (step 1, first MoE layer)")
    R, E = rows_RE.shape
    by_owner_RR = rows_RE.view(R, R, -1).sum(2)
    rows = []
    for rank in range(R):
        first = rank * E // R
        row = {"ep rank": str(rank), "owns": f"experts {first} to {first + E // R - 1}"}
        row["its rows by expert"] = by_owner_text(rows_RE[rank], R)
        row["sends"] = int(by_owner_RR[rank].sum() - by_owner_RR[rank, rank])
        row["computes"] = int(by_owner_RR[:, rank].sum())
        rows.append(row)
    report.table(rows)
    busiest = by_owner_RR.sum(0).max().item()
    ratio = busiest * R / rows_RE.sum().item()
    text = f"The busiest rank computes {busiest} rows, {ratio:.2f} times the mean"
    report.say(f"{text}; the others wait.")


def by_owner_text(counts_E: Tensor, R: int) -> str:
    """17 16|15 20: rows by expert, a line between owners. If too long, by owner."""
    parts = counts_E.view(R, -1)
    text = "|".join(" ".join(map(str, part.tolist())) for part in parts)
    return text if len(text) < 40 else "|".join(map(str, parts.sum(1).tolist()))
