"""The lessons' runs that many tests look at, and how a test asks for them."""

import math
import re

import jobs
import pytest
from alone import rounding

COLLECTIVES, MLP = "00_collectives", "01_naive_mlp_tp"
TRANSFORMER, VOCAB = "02_transformer_tp", "03_vocab_parallel"
SEQUENCE = "04_sequence_parallel"
MESH = "05_3d_parallel"
ALLOWED = {"float64": (1e-12, 1e-12), "float32": (1e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2}
BY_3 = ("--hidden", "48", "--batch-size", "6")  # sizes that 3 divides
SMALL = ("--hidden", "32", "--heads", "4", "--layers", "1", "--steps", "3")
ODD = ("--hidden", "48", "--heads", "4", "--kv-heads", "2", "--layers", "3")
ODD += ("--seq-len", "7", "--batch-size", "3", "--seed", "5")
SPLIT = (*ODD[:8], "--seq-len", "33", "--batch-size", "3", "--tie")
BIG = ("--heads", "4", "--vocab-size", "1000", "--dropout", "0", "--clip", "100")
ALL_RUNS = [
    (COLLECTIVES, 1, "--dtype", "bfloat16"),
    (COLLECTIVES, 2, "--dtype", "float64"),
    (COLLECTIVES, 3, "--trace"),
    (COLLECTIVES, 4, "--dtype", "bfloat16", "--steps", "2"),
    (MLP, 1, "--dtype", "float64"),
    (MLP, 2, "--dtype", "float64"),
    (MLP, 2, "--dtype", "bfloat16", "--hidden", "32", "--width", "96", "--seed", "7"),
    (MLP, 3, *BY_3, "--steps", "2", "--seq-len", "5"),
    (MLP, 4, "--dtype", "float64"),
    (MLP, 4, "--mesh", "4x1"),
    (TRANSFORMER, 1, "--dtype", "float64"),
    (TRANSFORMER, 2, "--dtype", "float64"),
    (TRANSFORMER, 2, *ODD, "--vocab-size", "1000", "--verbose",
     "--profile", jobs.FOLDER),
    (TRANSFORMER, 4, "--dtype", "float64", *SMALL, *BIG),
    (TRANSFORMER, 2, "--dtype", "bfloat16", "--steps", "3"),
    (VOCAB, 1, "--dtype", "float64", "--tie"),
    (VOCAB, 2, "--dtype", "float64"),
    (VOCAB, 2, *ODD, "--dtype", "float64", "--tie", "--train", "10", "--write", "60"),
    (VOCAB, 4, *BIG, "--tie", "--steps", "3", "--verbose"),
    (VOCAB, 2, "--vocab-size", "50257", "--steps", "1", "--layers", "1"),
    (SEQUENCE, 1, "--dtype", "float64"),
    (SEQUENCE, 2, "--dtype", "float64"),
    (SEQUENCE, 2, *SPLIT, "--save-gathered", "--verbose", "--hf"),
    (SEQUENCE, 4, "--dtype", "bfloat16", "--hf"),
    (MESH, 1, "--dtype", "float64", "--steps", "2"),
    (MESH, 2, "--dtype", "float64"),
    (MESH, 4, "--dp", "2", "--ragged", "--zero", "--tie", "--dtype", "float64",
     "--heads", "4", "--kv-heads", "2", "--seq-len", "61", "--schedule", "gpipe"),
    (MESH, 4, "--pp", "4", "--microbatches", "8", "--simulate-compute", "20", "--tie"),
    (MESH, 8),
]  # fmt: skip


ALL_RUNS = [run for run in ALL_RUNS if run[0] not in jobs.NEW_ANATOMY]


def flag(run, name, default):
    return run[run.index(name) + 1] if name in run else default


def over(runs):
    """Parametrize a test by runs, each launched ahead of it."""
    cases = [
        pytest.param(run, id=" ".join(map(str, run)), marks=pytest.mark.launches(*run))
        for run in runs
    ]
    return pytest.mark.parametrize("run", cases)


def found(ranks, what) -> list:
    """What all ranks of a driver found of something."""
    return [case for rank in ranks for case in rank[what]]


def check_replicas(cases) -> None:
    """One digest of the replicas for all ranks of a group, another for each model."""
    digests = {}
    for case in cases:
        key = case["number"], tuple(case["group"])
        digests.setdefault(key, set()).add(case["replicas"])
    assert max(map(len, digests.values())) == 1
    assert len({next(iter(x)) for x in digests.values()}) >= 60, "all models alike"


def expect(data, wanted: dict):
    """Rows of the communication table: label → (calls, bytes), and no row besides."""
    found = {}
    for row in data["communication"]:
        assert row["bytes"] == row["predicted_bytes"], row
        label = (row["what"], row["phase"], row["collective"], row["axis"])
        assert label not in found, f"two rows {label}"
        found[label] = row["calls"], row["bytes"]
    assert found == wanted


def limits(run) -> dict:
    """Of a bfloat16 run of 02 or later: how far each gradient may be off.

    Three times what rounding alone does to it, where that is more than 2e-2.
    """
    if flag(run, "--dtype", "float32") != "bfloat16":
        return {}
    floor = ALLOWED["bfloat16"][1]
    return {name: max(floor, 3 * off) for name, off in rounding(run).items()}


def folded(name: str, row: str) -> bool:
    """Whether a parameter is in that row of a table, in which layers are one."""
    return name == row or name.endswith(f".{row}")


def gradient_limit(run, row: str) -> float:
    """What a row of the table of gradients may differ by: all its layers do."""
    wider = [limit for name, limit in limits(run).items() if folded(name, row)]
    return max([ALLOWED[flag(run, "--dtype", "float32")][1], *wider])


def check_gradients(run):
    """The rows of the table of gradients, of a model whose vocabulary is split."""
    data = jobs.result(*run).data
    columns = {
        f"{name}.{kind}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                     "mlp.up_proj")
        for kind in ("weight", "bias")
    }  # fmt: skip
    vocabulary = {"embed_tokens.weight", "lm_head.bias", "lm_head.weight"}
    vocabulary -= {"lm_head.weight"} if "--tie" in run else set()
    placements = {
        re.sub(r"^layers\.\d+\.", "", row["name"]): row["placement"]
        for row in data["gradients"]
    }
    shards = {name for name, where in placements.items() if where == "Shard(0)"}
    assert shards == vocabulary | columns
    rows = {name for name, where in placements.items() if where == "Shard(1)"}
    assert rows == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert len(placements) == (20 if "--tie" in run else 21)
    layers = int(flag(run, "--layers", 2)) if "--verbose" in run else 1
    assert len(data["gradients"]) == len(placements) + 16 * (layers - 1)
    for row in data["gradients"]:
        limit = gradient_limit(run, row["name"])
        assert row["ok"] is True and 0 <= row["rel_diff"] <= limit
        off = abs(row["norm_with"] - row["norm_without"])
        assert row["norm_without"] > 0 and off <= limit * row["norm_without"], row
        assert math.isfinite(row["norm_with"])
