"""Who has which positions of a sequence, and which blocks of scores a rank computes.

A helper of beyond/11_context_parallel.py, no script. `ranks` is C there, and a rank has
s = S/C positions.

A query sees keys up to its own position. With contiguous slices rank 0 has little to
compute and the last rank much. Zigzag cuts the sequence into 2·C chunks and gives each
rank one from either end: the same work for all. An example, C = 2 and S = 8:

    contiguous   rank 0: 0 1 2 3    rank 1: 4 5 6 7     10 and 26 scores
    zigzag       rank 0: 0 1 6 7    rank 1: 2 3 4 5     18 and 18

The ring computes blocks in full, with masked scores: 16 and 32, or 20 and 20.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


def chunks_of(rank: int, ranks: int, layout: str) -> list[int]:
    """Which chunks of the sequence a rank has: t, or t and 2C − 1 − t if zigzag."""
    return [rank, 2 * ranks - 1 - rank] if layout == "zigzag" else [rank]


def positions_of(rank: int, ranks: int, layout: str, seq_len: int) -> Tensor:
    """Positions of a rank's tokens in the full sequence, in the order it has them."""
    held = chunks_of(rank, ranks, layout)
    chunks = ranks * len(held)
    if seq_len % chunks != 0:
        raise ValueError(f"{layout}: {chunks} chunks do not divide S = {seq_len}")
    return torch.arange(seq_len).view(chunks, -1)[held].flatten()


class Block(NamedTuple):
    """Some of this rank's queries, and some of the keys that it has at the moment."""

    queries: slice  # of this rank's s positions
    keys: slice  # of the s positions whose keys are here
    query_at: Tensor  # positions in the full sequence [i]
    key_at: Tensor  # [j]


def blocks_of(rank: int, owner: int, ranks: int, layout: str, s: int) -> list[Block]:
    """The blocks that a rank computes while it has the keys of rank `owner`.

    A block whose keys are all later than its queries is left out.
    """
    length = s // len(chunks_of(rank, ranks, layout))  # of a chunk
    offsets = torch.arange(length)
    blocks = []
    for query_place, query_chunk in enumerate(chunks_of(rank, ranks, layout)):
        for key_place, key_chunk in enumerate(chunks_of(owner, ranks, layout)):
            if key_chunk <= query_chunk:
                queries = slice(query_place * length, (query_place + 1) * length)
                keys = slice(key_place * length, (key_place + 1) * length)
                query_at = query_chunk * length + offsets
                blocks.append(
                    Block(queries, keys, query_at, key_chunk * length + offsets)
                )
    return blocks


@contextmanager
def recorded_blocks(script: dict):
    """Within `with`: a list that gets (ring step, Block) of each block computed.

    script: its globals(); its attend and pass_on are replaced meanwhile.
    """
    blocks = []
    hops = []  # whose keys are here depends on how often keys were passed on
    originals = {name: script[name] for name in ("attend", "pass_on")}

    def attend_and_record(q_BNiH, kv_2BKjH, block):
        blocks.append((len(hops), block))
        return originals["attend"](q_BNiH, kv_2BKjH, block)

    def pass_on_and_count(x, cp_group):
        hops.append("passed on")
        return originals["pass_on"](x, cp_group)

    script.update(attend=attend_and_record, pass_on=pass_on_and_count)
    try:
        yield blocks
    finally:
        script.update(originals)
