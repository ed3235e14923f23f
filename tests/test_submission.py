"""Hand-in: what tools/submission.py says of a student's notebooks, and of a class."""

import importlib
import json
import os
import platform
import subprocess
import sys

import nbformat
import pytest
import submission
import torch
from jobs import ROOT
from test_notebooks import FOLDER, NOTEBOOKS, exercises

# What was filled in, and cells above it that it needs.
HELPERS = (
    "%%px\nsize = 4\n",
    "%%px\nboth = lambda B, S, D, F, e=size: e * B * S * (D + F)\n",
)
RIGHT = """%%px
def bytes_of_tp(B, S, D, F):
    return 4 * 2 * B * S * D
def bytes_of_naive(B, S, D, F):
    return 2 * both(B, S, D, F)
"""
WRONG = "%%px\nsame = AllGatherWithGrad\ndifferent = GatherFromTP\n"
ALONE = {  # a notebook without ranks, by tag
    "given": "one = 1",
    "exercise-1": "def f():\n    return 1",
    "exercise-2": "def g():\n    return 2",
    "check-1": 'print("right" if f() == one else "not yet: no")',
    "check-2": 'print("right" if g() == one else "not yet: no")',
}


def test_which_cells_are_untouched():
    for name in NOTEBOOKS:
        found = exercises(name)
        for exercise in found.values():
            assert submission.is_untouched(exercise["exercise"] + "# so far nothing\n")
            assert not submission.is_untouched(exercise["solution"])
        for _, answer, _ in importlib.import_module(f"wrong_{name[:2]}").WRONG:
            assert isinstance(answer, dict) or not submission.is_untouched(answer)
    for half_done in ("def f(x):\n    y = x\n    ...", "f = 3", "def f(:", "", "f()"):
        assert not submission.is_untouched(half_done), half_done


def notebook(name: str, answers: dict[str, str], above: tuple = ()) -> str:
    """A notebook's text with these answers, and more cells at the top."""
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    for cell in book["cells"]:
        for tag in cell["metadata"].get("tags", []):
            cell["source"] = answers.get(tag, cell["source"])
    more = [dict(cell_type="code", source=text, metadata={}) for text in above]
    return json.dumps(book | {"cells": [*more, *book["cells"]]})


def checks_of(name: str, folder=FOLDER) -> str:
    """The fingerprint of the checks in a notebook, or in the course's own."""
    return submission.checks_of(submission.read_notebook(folder / f"{name}.ipynb"))


def hand_in(folder) -> tuple[int, str, dict]:
    out = folder / "submission.json"
    program = [sys.executable, "tests/kernel.py", "tools/submission.py"]
    command = [*program, "--notebooks", folder, "--out", out]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NOTEBOOK_RANKS": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    data = json.loads(out.read_text()) if out.exists() else {}
    return done.returncode, done.stdout + done.stderr, data


def test_right_answers_wrong_ones_and_the_rest_untouched(tmp_path):
    """In a notebook with ranks, and in one without, which is run whole."""
    one, other, alone = "01_naive_mlp_tp", "03_vocab_parallel", "06_alone"
    answers = {"exercise-2": RIGHT, "exercise-3": WRONG}
    (tmp_path / f"{one}.ipynb").write_text(notebook(one, answers, HELPERS))
    (tmp_path / f"{other}.ipynb").write_text(notebook(other, {}))
    book = nbformat.v4.new_notebook()
    for tag, text in ALONE.items():
        cell = nbformat.v4.new_code_cell(text, metadata={"tags": [tag]})
        book.cells.append(cell)
    nbformat.write(book, tmp_path / f"{alone}.ipynb")
    code, said, data = hand_in(tmp_path)
    assert code == 0, said
    assert data == {
        "exercises": {
            one: {"1": "not tried", "2": "right", "3": "not yet"},
            other: {"1": "not tried", "2": "not tried", "3": "not tried"},
            alone: {"1": "right", "2": "not yet"},
        },
        "checks": {  # answers do not change them
            one: checks_of(one),
            other: checks_of(other),
            alone: checks_of(alone, tmp_path),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lessons": submission.lessons_of(ROOT),
        },
    }
    assert "01_naive_mlp_tp 3: not yet; `same`: the gradient is" in said
    assert "06_alone 2: not yet; no\n" in said
    assert "submission.json: 2 right, 2 not yet, 4 not tried\n" in said


def test_another_check_and_another_lesson_have_another_fingerprint(tmp_path):
    prints = {checks_of("01_naive_mlp_tp"), submission.lessons_of(tmp_path)}
    for text in ("print('right')", "print( 'right')"):
        book = notebook("01_naive_mlp_tp", {"check-1": text})
        (tmp_path / "00_a.ipynb").write_text(book)
        (tmp_path / "00_a.py").write_text(text)
        prints |= {checks_of("00_a", tmp_path), submission.lessons_of(tmp_path)}
    (tmp_path / "beyond").mkdir()
    (tmp_path / "beyond/11_a.py").write_text("a script of a notebook")
    prints.add(submission.lessons_of(tmp_path))
    assert len(prints) == 7


def test_a_notebook_that_cannot_be_read(tmp_path):
    (tmp_path / "00_collectives.ipynb").write_text('{"cells": [')
    code, said, data = hand_in(tmp_path)
    assert code == 2 and data == {} and said.count("\n") == 1
    assert said.startswith("error: ") and "00_collectives.ipynb" in said


def handed_in(states: list[str], **changes) -> str:
    """The text of a submission in which one of two notebooks was worked on."""
    books = {"01_naive_mlp_tp": dict(zip("123", states))}
    books["05_3d_parallel"] = {"1": "not tried"}
    checks = {name: checks_of(name) for name in NOTEBOOKS}
    versions = {"lessons": submission.lessons_of(ROOT)}
    data = {"exercises": books, "checks": checks, "versions": versions}
    return json.dumps(data | changes)


def test_a_class_in_one_table(tmp_path, capsys):
    (tmp_path / "a.json").write_text(handed_in(["right", "right", "not yet"]))
    (tmp_path / "b.json").write_text(handed_in(["right", "not yet", "not tried"]))
    text = handed_in(["right", "not tried", "not tried"], versions={}, checks={})
    (tmp_path / "c.json").write_text(text)
    assert submission.show_table(tmp_path) == 0
    said = capsys.readouterr().out
    rows = {line[:17].strip(): line[17:].split() for line in said.splitlines()}
    assert rows["01_naive_mlp_tp 1"] == ["3", "0", "0"]
    assert rows["01_naive_mlp_tp 2"] == ["1", "1", "1"]
    assert rows["01_naive_mlp_tp 3"] == ["0", "1", "2"]
    assert rows["05_3d_parallel 1"] == ["0", "0", "3"]
    assert rows["a"] == ["2", "1", "1", "++o", "·"]
    assert rows["b"] == ["1", "1", "2", "+o·", "·"]
    every = ", ".join(name[:2] for name in NOTEBOOKS)
    assert f"\nc: other checks in {every}; other lessons\n" in said
    assert "\na: " not in said and "\nb: " not in said


@pytest.mark.parametrize("text", [
    '{"exercises": ', "[]", '{"exercises": {}}', handed_in(["right", "done", "right"]),
])  # fmt: skip
def test_what_is_no_submission_is_one_error_line(tmp_path, capsys, text):
    (tmp_path / "good.json").write_text(handed_in(["right"] * 3))
    (tmp_path / "odd.json").write_text(text)
    assert submission.show_table(tmp_path) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: odd.json is not a submission: ")
    assert "\ngood" in said.out and "odd" not in said.out
