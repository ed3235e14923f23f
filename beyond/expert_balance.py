"""The balance loss: experts should get equally many rows.

A helper of beyond/16_expert_parallel.py, no script.
"""

from course import lesson00
from torch import Tensor


def balance_loss(probs_tE: Tensor, counts_E: Tensor, top_k: int, groups) -> Tensor:
    """This rank's part of E · Σ share · probability over the experts.

    The rank with the most rows makes the others wait. This loss spreads rows: its
    gradient lowers an expert's probability the more, the larger its share is.
    The parts of all ranks sum to 1 if all experts get the same number of rows, and
    to E/k at most: an expert gets a row per token at most, so its share is ≤ 1/k.
    share: an expert's part of the rows of all ranks; no gradient, so its counts are
    summed by a plain all-reduce. probability: the mean over all tokens, with
    padding; each rank adds its tokens' part. Source: arXiv:2101.03961, sec. 2.2.

    Args:
        groups: those over which the batch is split; () in one process.
    Communication: one all-reduce of E counts over each group.
    """
    all_counts_E = counts_E
    for group in groups:
        all_counts_E = lesson00.all_reduce(all_counts_E, group)
    rows = all_counts_E.sum()
    share_E = all_counts_E.to(probs_tE.dtype) / rows
    prob_E = probs_tE.sum(0) * top_k / rows  # rows / k: tokens of all ranks
    return len(counts_E) * (share_E * prob_E).sum()
