"""tools/audit.py: finds and names the lessons' bugs, and has no false alarm."""

import json
import re
import shutil

import audit
import jobs
import pytest
import torch
from audit_findings import FullModel, placement_of

DRIVER = ("drive_audit.py", 2)
pytestmark = pytest.mark.launches(*DRIVER)


def test_every_rank_has_the_same_findings(ranks):
    assert all(rank == ranks[0] for rank in ranks)


def test_bugs_are_found_and_named(ranks):
    """Every bug is found, and its first category is what the lesson says it is."""
    bugs = ranks[0]["bugs"]
    assert len(bugs) >= 31
    assert [bug["bug"] for bug in bugs if not bug["categories"]] == []
    assert [bug for bug in bugs if not is_named(bug)] == []


def is_named(bug: dict) -> bool:
    """Is the first category the expected one, or this and more words (a factor)?"""
    return f"{bug['categories'][0][0]} ".startswith(f"{bug['expected']} ")


def test_bugs_of_other_models_are_found_and_named(ranks):
    """Models that are not the course's: each bug's first category is its cause."""
    bugs = ranks[0]["models"]
    assert len(bugs) >= 25
    for bug in bugs:
        assert bug["categories"] and is_named(bug), bug


def test_the_norms_of_all_ranks_are_said_of_the_first_step(ranks):
    """Rank 0's norm is right, so step 1 is wrong on rank 1 alone."""
    (bug,) = [bug for bug in ranks[0]["models"] if bug["bug"] == "norm on rank 0"]
    said = re.match(
        r"step 1: (\S+), (\S+) on ranks 0, 1, …, not (\S+); ", bug["texts"][0]
    )
    assert said and said[1] == said[3] != said[2]


def test_pieces_are_named(ranks):
    """What the table says of models that are cut in other ways than the lessons'."""
    held = {each["model"]: each["pieces"] for each in ranks[0]["right models"]}
    fused = held["fused_subject"]
    assert fused["attn.c_attn.weight"] == 2 * ["Shard(0) of each of 3 blocks"]
    assert fused["attn.c_attn.bias"] == 2 * ["Shard(0) of each of 3 blocks"]
    assert fused["attn.c_proj.weight"] == 2 * ["Shard(1)"]
    assert fused["wte.weight"] == fused["attn.c_proj.bias"] == 2 * ["replicated"]
    padded = []
    for each in ranks[0]["right"]:
        padded.append(each["pieces"].get("lm_head.weight"))
    assert ["Shard(0)", "Shard(0) with padding"] in padded


ROWS = [  # rows of a [4, 2] weight on rank 0 of 2 (None: zeros), and what they are
    ([0, 1, 2, 3], "replicated"),
    ([0, 1], "Shard(0)"),
    ([2, 3], "Shard(0), the piece of rank 1"),
    ([0, 1, None], "Shard(0) with padding"),
    ([0, 1, 2], "permuted or partial pieces"),
    ([1, 0], "permuted or partial pieces"),
    ([0, 0], "elements held several times"),
    ([3, 4], "pieces of weight … bias"),
    ([None], "nothing of the full model"),
]


@pytest.mark.parametrize("rows, words", ROWS)
def test_placements_in_words(rows, words):
    values = torch.arange(1, 11).view(5, 2)
    full = FullModel({"weight": values[:4], "bias": values[4:]})
    zeros = torch.zeros(2, dtype=torch.int64)
    part = torch.stack([zeros if row is None else values[row] for row in rows])
    assert placement_of(full.find(part), full, 0, 2) == words


def test_right_models_raise_no_alarm(ranks):
    models = ranks[0]["right models"]
    assert len(models) >= 10
    assert [model for model in models if model["categories"]] == []
    right = ranks[0]["right"]
    assert len(right) >= 12
    assert [model for model in right if model["categories"]] == []


@pytest.mark.parametrize("arguments, says", [
    ([], "name a file"),
    (["no_such_file.py"], "no_such_file.py: no such file"),
    (["tools/check.py"], "tools/check.py does not define build"),
    (["--example", "tp", "--ranks", "1"], "--ranks 1: take 2 or more"),
])  # fmt: skip
def test_wrong_use_is_one_line_and_2(arguments, says, capsys):
    assert audit.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_every_finding_has_advice(ranks):
    for result in ranks[0]["bugs"]:
        for category, _ in result["categories"]:
            assert category != "raised", result
            what, line, where = audit.advice_for(category)
            assert what and line and where


def test_the_page_shows_what_the_notebook_ran():
    """docs/audit.md has the output of the last run in notebook 12; README a part."""
    path = jobs.ROOT / "notebooks" / "12_wrong_gradients.ipynb"
    said = ""
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if "".join(cell["source"]).endswith("audit.py traces/my_model.py"):
            text = "".join(cell["outputs"][0]["text"])
            said = "\n".join(text.rstrip().splitlines())
    assert said.endswith("WRONG  my_model.py")
    assert said in (jobs.ROOT / "docs" / "audit.md").read_text("utf-8")
    readme = (jobs.ROOT / "README.md").read_text("utf-8")
    excerpt = readme.partition("## Audit your own model")[2].split("```")[1]
    for line in excerpt.splitlines()[1:]:
        assert line.strip() in ("", "…") or line in said.splitlines(), line


MISSING_F = """
import sys
sys.path.insert(0, {root!r})
import importlib, torch
lesson = importlib.import_module("01_naive_mlp_tp")

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), lesson.MLP(8, 16))

def parallelize(model, tp_group):
    model[1] = lesson.tp_mlp(model[1], tp_group)
    model[1].up_proj.copy_input = False  # the bug: f is missing
    {wrong}
    return model

def batch(step):
    return torch.randn(2, 3, 8), torch.randn(2, 3, 8)
"""


@pytest.mark.parametrize("wrong, code, says", [
    ("pass", 1, "0.weight: gradient sum"),
    ("1 / tp_group.rank()", 1, "rank 0 raised ZeroDivisionError"),
    ("tp_group.rank() and torch.distributed.barrier(tp_group)", 1, "(in parallelize)"),
], ids=["missing f", "raises", "hangs"])  # fmt: skip
def test_a_users_file(tmp_path, capsys, wrong, code, says):
    """A bug is explained; a rank that raises or hangs ends the run, and is named."""
    path = tmp_path / "my_model.py"
    path.write_text(MISSING_F.format(root=str(jobs.ROOT), wrong=wrong))
    arguments = [str(path), "--timeout", "30", "--json", str(tmp_path / "out.json")]
    assert audit.main(arguments) == code
    out = capsys.readouterr().out
    assert says in out and "\nWRONG  my_model.py\n" in out, out
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert result["ranks"] == 2
    shutil.rmtree(tmp_path, ignore_errors=True)


ORDER = """
import sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {root!r} + "/beyond")
import importlib, torch
lesson = importlib.import_module("09_shared_heads")
{bug}
config = lesson.lesson02.Config(30, 32, 8, 2, 1, 6, 0.0)

def build():
    return lesson.lesson02.Transformer(config)

def parallelize(model, tp_group):
    groups = lesson.kv_groups(2, 4, 60)
    groups["tp"] = tp_group
    make = lesson.lesson02.tp_transformer
    return lesson.shared_heads_transformer(model, make, groups)

def batch(step):
    tokens = torch.randint(30, (2, 3, 6))
    return tokens[0], tokens[1]
"""


@pytest.mark.parametrize("bug, code", [("", 0), ("order", 1)])
def test_the_order_of_shared_heads_on_four_ranks(tmp_path, capsys, bug, code):
    """beyond/09 --break order: a rank holds another rank's key/value head."""
    edit = (
        f"lesson.lesson00.apply_edit(lesson.BREAKS[{bug!r}], vars(lesson))"
        if bug
        else ""
    )
    path = tmp_path / "shared.py"
    path.write_text(ORDER.format(root=str(jobs.ROOT), bug=edit))
    assert audit.main([str(path), "--ranks", "4", "--timeout", "100"]) == code
    out = capsys.readouterr().out
    assert ("1. layers.0.self_attn.k_proj.weight: wrong piece" in out) == (code == 1)
