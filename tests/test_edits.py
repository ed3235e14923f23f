"""Edits of the scripts in beyond/ and of lesson 00, as a student makes them."""

import re
import shutil

import jobs
import pytest

ADAMW = "torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, foreach=False)"
SGD = "torch.optim.SGD(model.parameters(), lr=0.1)"
OF_02 = ("02_transformer_tp.py", ADAMW, SGD)
OF_15 = ("beyond/15_zero.py", "torch.optim.AdamW(self.trained, lr=3e-3, eps=1e-4)",
         "torch.optim.SGD(self.trained, lr=0.1)")  # fmt: skip
SHARED = ("beyond/16_expert_parallel.py",
          "return self.shared_expert(x_BSD) + y_tD.view_as(x_BSD)",
          "return y_tD.view_as(x_BSD)")  # fmt: skip
LAST = '    "Ulysses": Method(ulysses_attention, "contiguous"),\n'
FIFTH = '    "gather zigzag": Method(gather_attention, "zigzag"),\n'
METHODS = ("beyond/11_context_parallel.py", LAST, LAST + FIFTH)
ZIGZAG = ("beyond/11_context_parallel.py", 'Method(ring_attention, "contiguous")',
          'Method(ring_attention, "zigzag")')  # fmt: skip
SAVED = ("02_transformer_tp.py",  # another saved tensor in one attention
         "weights_BNSS = self.dropout(scores_BNSS.softmax(-1))",
         "weights_BNSS = self.dropout(scores_BNSS.softmax(-1)) * 1.0")  # fmt: skip
NAMES = (
    "beyond/10_checkpoints.py",
    'state[f"weight/{name}"]',
    'state[f"model.{name}"]',
)
NORMAL = ("00_collectives.py", 'torch.randint(-2, 3, (size["I"], size["J"]))',
          'torch.randn(size["I"], size["J"])')  # fmt: skip
MEANS = ("beyond/14_schedules.py", "lesson05.part_of_mean(loss_bS, targets)",
         "loss_bS.sum() / (target_bS != lesson02.IGNORE).sum()")  # fmt: skip
KEPT = ("beyond/15_zero.py", "return super().sum_gradients()\n",
        "return super().sum_gradients() * (2 if self.keep else 1)\n")  # fmt: skip

EDITED = "formulas describe another model or split"
RIGHT = {
    "another optimizer in 09": (4, "beyond/09_shared_heads.py", EDITED, [OF_02]),
    "another optimizer in 15": (2, "beyond/15_zero.py", EDITED, [OF_02, OF_15]),
    "another optimizer in 16": (2, "beyond/16_expert_parallel.py", EDITED, [OF_02]),
    "no shared expert": (2, "beyond/16_expert_parallel.py", EDITED, [SHARED]),
    "a fifth method": (2, "beyond/11_context_parallel.py", "", [METHODS]),
    "a ring with zigzag": (2, "beyond/11_context_parallel.py", "", [ZIGZAG]),
    "a tensor more saved": (2, "beyond/11_context_parallel.py", EDITED, [SAVED]),
    "other names of tensors": (2, "beyond/10_checkpoints.py", "", [NAMES]),
    "normal numbers": (4, "00_collectives.py", "", [NORMAL]),
}

WAIT = ("00_collectives.py", "    work.wait()\n", "")
DROPOUT = ("01_naive_mlp_tp.py", "return self.down_proj(F.gelu(self.up_proj(x_BSD)))",
           "return F.dropout(self.down_proj(F.gelu(self.up_proj(x_BSD))))")  # fmt: skip
WHOLE = ("beyond/14_schedules.py", "            split_linears(child)\n",
         "            pass\n")  # fmt: skip
WRONG = {  # ranks, script, what it says, and what it must not say
    "a sum that nobody waited for": (2, "00_collectives.py",
        "a sum started, then waited for: 0 0, expected 1 1", "51 checks", [WAIT]),
    # Only a slice of the batch has other masks; every other split is right.
    "dropout in DP": (2, "01_naive_mlp_tp.py", "✗ outputs: y, DP", "naive: off",
                      [DROPOUT]),
    "a layer's linears stay whole": (2, "beyond/14_schedules.py",
        "✗ plan: linears in W, zero-bubble: ", "≠", [WHOLE]),
}  # fmt: skip
SIZES = {  # what has no steps
    "00_collectives.py": [],
    "beyond/14_schedules.py": ["--sleep", "5", "--layers", "4"],
}


def run_edited(folder, ranks: int, script: str, edits: list) -> jobs.Done:
    """A script of a copy of the course in which these lines are others."""
    (folder / "beyond").mkdir()
    for pattern in ("0*.py", "beyond/*.py"):
        for path in jobs.ROOT.glob(pattern):
            shutil.copy(path, folder / path.relative_to(jobs.ROOT))
    for name, old, new in edits:
        path = folder / name
        text = path.read_text("utf-8")
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new), "utf-8")
    return jobs.launch(folder / script, ranks, *SIZES.get(script, ["--steps", "2"]))


@pytest.mark.parametrize("edit", RIGHT)
def test_a_right_edit_passes(edit, tmp_path):
    ranks, script, says, edits = RIGHT[edit]
    done = run_edited(tmp_path, ranks, script, edits)
    stem = script.partition("/")[2] or script
    assert done.code == 0, done.text
    last = done.out.rpartition("\nPASS  ")[2]
    assert last.startswith(f"{stem.removesuffix('.py')}  "), last
    assert says in " ".join(last.split()) and "✗" not in done.out
    assert ("≠" in done.out) is bool(says)


@pytest.mark.parametrize("edit", WRONG)
def test_a_wrong_edit_fails(edit, tmp_path):
    ranks, script, says, never, edits = WRONG[edit]
    done = run_edited(tmp_path, ranks, script, edits)
    name = script.removeprefix("beyond/").removesuffix(".py")
    assert done.code == 1 and f"\nFAIL  {name}" in done.out
    assert says in done.out and never not in re.sub(" +", " ", done.out)


def test_a_mean_of_means_fails(tmp_path):
    """One process has the same micro-batches: the batch at once shows it."""
    done = run_edited(tmp_path, 2, "beyond/14_schedules.py", [MEANS])
    assert done.code == 1 and "\n✗ losses: batch: " in done.out, done.text


def test_a_run_that_is_no_column_is_named_if_it_fails(tmp_path):
    done = run_edited(tmp_path, 2, "beyond/15_zero.py", [KEPT])
    assert done.code == 1, done.text
    assert "\n   5 runs of later sections; largest diff 1.0e+00, of kept\n" in done.out
    assert "\n✗ gradients: lm_head.bias, kept: 2 times the expected tensor" in done.out
