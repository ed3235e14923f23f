"""The lessons' runs that many tests look at, and how a test asks for them."""

import jobs
import pytest

COLLECTIVES, MLP = "00_collectives", "01_naive_mlp_tp"
TRANSFORMER, VOCAB = "02_transformer_tp", "03_vocab_parallel"
ALLOWED = {"float64": (1e-12, 1e-12), "float32": (1e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2}
BY_3 = ("--hidden", "48", "--batch-size", "6")  # sizes that 3 divides
SMALL = ("--hidden", "32", "--heads", "4", "--layers", "1", "--steps", "3")
ODD = ("--hidden", "48", "--heads", "4", "--kv-heads", "2", "--layers", "3")
ODD += ("--seq-len", "7", "--batch-size", "3", "--seed", "5")
BIG = ("--heads", "4", "--vocab-size", "1000", "--dropout", "0", "--clip", "100")
ALL_RUNS = [
    (COLLECTIVES, 1, "--dtype", "bfloat16"),
    (COLLECTIVES, 2, "--dtype", "float64"),
    (COLLECTIVES, 3, "--trace"),
    (COLLECTIVES, 4, "--dtype", "bfloat16", "--steps", "2"),
    (COLLECTIVES, 8),
    (MLP, 1, "--dtype", "float64"),
    (MLP, 2, "--dtype", "float64"),
    (MLP, 2, "--dtype", "bfloat16", "--hidden", "32", "--width", "96", "--seed", "7"),
    (MLP, 3, *BY_3, "--steps", "2", "--seq-len", "5"),
    (MLP, 4, "--dtype", "float64"),
    (MLP, 4, "--mesh", "4x1"),
    (MLP, 8),
    (TRANSFORMER, 1, "--dtype", "float64"),
    (TRANSFORMER, 2, "--dtype", "float64"),
    (TRANSFORMER, 2, *ODD, "--vocab-size", "1000", "--verbose",
     "--profile", jobs.FOLDER),
    (TRANSFORMER, 4, "--dtype", "float64", *SMALL, *BIG),
    (TRANSFORMER, 8),
    (VOCAB, 1, "--dtype", "float64", "--tie"),
    (VOCAB, 2, "--dtype", "float64"),
    (VOCAB, 2, *ODD, "--dtype", "float64", "--tie", "--train", "10", "--write", "60"),
    (VOCAB, 4, *BIG, "--tie", "--steps", "3", "--verbose"),
    (VOCAB, 8),
    (VOCAB, 2, "--vocab-size", "50257", "--steps", "1", "--layers", "1"),
]  # fmt: skip


def flag(run, name, default):
    return run[run.index(name) + 1] if name in run else default


def over(runs):
    """Parametrize a test by runs, each launched ahead of it."""
    cases = [
        pytest.param(run, id=" ".join(map(str, run)), marks=pytest.mark.launches(*run))
        for run in runs
    ]
    return pytest.mark.parametrize("run", cases)


def expect(data, wanted: dict):
    """Rows of the communication table: label → (calls, bytes), and no row besides."""
    found = {}
    for row in data["communication"]:
        assert row["bytes"] == row["predicted_bytes"], row
        label = (row["what"], row["phase"], row["collective"], row["axis"])
        assert label not in found, f"two rows {label}"
        found[label] = row["calls"], row["bytes"]
    assert found == wanted
