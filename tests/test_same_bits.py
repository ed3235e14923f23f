"""beyond/08: a sum, an MLP and a training run are bitwise identical for every T.

The script's own runs on 1, 2, 4 and 8 ranks, whose hashes must agree; and the tree of a
sum, against one that is written down here.
"""

import math
import re

import jobs
import pytest
import torch
import torch.distributed as dist
from runs import SAME_BITS, SAME_BITS_RUNS, number, over, passed, rows_with

script = jobs.load(SAME_BITS)
EVERY_T = SAME_BITS_RUNS[:4]  # the same flags on 1, 2, 4 and 8 ranks

pytestmark = pytest.mark.timeout(900)  # eight ranks share the cores


SUMS, HASHES = ("added", "one process"), ("run", "norms", "parameters")


def row_of(run, columns: tuple, label: str) -> dict:
    """The row with this label, of the table that has these columns."""
    rows = rows_with(jobs.result(*run).data, *columns)
    (row,) = [row for row in rows if label in row.values()]
    return row


def hashes(row: dict) -> list[str]:
    return [v for v in row.values() if re.fullmatch("[0-9a-f]{12}", str(v))]


@over(SAME_BITS_RUNS)
def test_passes_and_fits_the_screen(run):
    done = passed(run, 85)
    rows = rows_with(done.data, "name", "without TP")
    losses = [number(x["without TP"]) for x in rows if x["name"].startswith("loss")]
    assert losses == sorted(losses, reverse=True) and losses, "it learns"
    assert bool(rows_with(done.data, "collective", "ring")) is (run[1] > 1)


@pytest.mark.parametrize("table, label, count", [
    (SUMS, "tree", 2), (HASHES, "in blocks", 4), (HASHES, "blocks, T = 1", 4),
])  # fmt: skip
def test_one_hash_for_every_number_of_ranks(table, label, count):
    """Of a sum; of losses, gradients, norms and parameters."""
    first, *others = [hashes(row_of(run, table, label)) for run in EVERY_T]
    assert len(first) == count and all(other == first for other in others)


@pytest.mark.parametrize("table, label", [(SUMS, "one by one"), (HASHES, "TP")])
def test_another_hash_for_each_number_of_ranks(table, label):
    """Where sums are left to an all-reduce; without that the script proves nothing."""
    last = [hashes(row_of(run, table, label))[-1] for run in EVERY_T]
    assert len(set(last)) == len(EVERY_T)


def test_which_tensors_of_an_mlp_depend_on_t():
    """The sums over ranks do, in plain TP; no element of any does in blocks."""
    for run in EVERY_T[1:]:
        rows = rows_with(jobs.result(*run).data, "tensor", "TP: differ")
        assert all(row["in blocks: differ"] == "0" for row in rows) and rows
        sums = [row["TP: differ"] for row in rows if "sum over ranks" in row["tensor"]]
        assert len(sums) == 2 and "0" not in sums, rows


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_a_tree_is_the_same_however_it_is_shared(ranks):
    """Sixteen terms on so many ranks: added up as one process does, bit by bit."""
    generator = torch.Generator().manual_seed(ranks)
    for _ in range(20):
        terms = list(torch.randn(16, 50, generator=generator) * 10 ** torch.rand(16, 1))
        of_ranks = [terms[r * 16 // ranks :][: 16 // ranks] for r in range(ranks)]
        shared = script.tree_sum([script.tree_sum(local) for local in of_ranks])
        level = terms
        while len(level) > 1:  # pairs, pairs of pairs, …
            level = [a + b for a, b in zip(level[::2], level[1::2])]
        assert torch.equal(shared, level[0])
    assert not torch.equal(sum(terms), level[0])


def test_a_hash_sees_one_bit():
    x = torch.tensor([1.0, 2.0])
    almost = x.clone()
    almost[1] = math.nextafter(2.0, 3.0) if x.dtype == torch.float64 else 2.0000002
    assert script.digest(x) == script.digest(x.clone()) != script.digest(almost)
    assert script.digest(x, 3.0) == script.digest(torch.tensor([1.0, 2.0, 3.0]))


@pytest.fixture(scope="module")
def one_rank():
    """A group of one, of this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("bias", [True, False])
def test_blocks_of_an_mlp_with_and_without_biases(bias, one_rank):
    mlp = script.lesson01.MLP(16, 32)
    mlp.up_proj = torch.nn.Linear(16, 32, bias=bias)
    mlp.down_proj = torch.nn.Linear(32, 16, bias=bias)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(script.blocked_mlp(mlp, one_rank)(x), mlp(x))


def test_in_a_group_of_one_nothing_is_changed(one_rank):
    x = torch.randn(3)
    assert torch.equal(script.tree_all_reduce(x, one_rank), x)


def test_ranks_that_do_not_divide_the_blocks_are_refused():
    env = dict(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
    code, out, err = jobs.run_here(SAME_BITS, **env)
    assert (code, out) == (2, "")
    assert err.startswith("error: 8 blocks % 3 ranks = 2, not 0; start 1, 2, 4 or 8")
