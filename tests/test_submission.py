"""Hand-in: what tools/submission.py says of a student's notebooks, and of a class."""

import importlib
import json
import os
import platform
import subprocess
import sys

import pytest
import submission
import torch
from jobs import ROOT
from test_notebooks import FOLDER, NOTEBOOKS, exercises

HELPER = (
    "%%px\nsize = 4\n",
    "%%px\nboth = lambda B, S, D, F, e=size: e * B * S * (D + F)\n",
)
RIGHT = "%%px\n" + "\n".join([
    "def bytes_of_tp(B, S, D, F):", "    return 4 * 2 * B * S * D",
    "def bytes_of_naive(B, S, D, F):", "    return 2 * both(B, S, D, F)",
])  # fmt: skip
WRONG = "%%px\nsame = AllGather\ndifferent = GatherFromTP\n"


def test_which_cells_are_untouched():
    for name in NOTEBOOKS:
        found = exercises(name)
        for exercise in found.values():
            assert submission.is_untouched(exercise["exercise"])
            assert submission.is_untouched(exercise["exercise"] + "# so far nothing\n")
            assert not submission.is_untouched(exercise["solution"])
        for _, answer, _ in importlib.import_module(f"wrong_{name[:2]}").WRONG:
            assert isinstance(answer, dict) or not submission.is_untouched(answer)
    for half_done in ("def f(x):\n    y = x\n    ...", "f = 3", "def f(:", "", "f()"):
        assert not submission.is_untouched(half_done), half_done


def notebook(name: str, answers: dict[str, str], before: tuple = ()) -> str:
    """A notebook's text with these answers, and more cells at the top."""
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    for cell in book["cells"]:
        for tag in cell["metadata"].get("tags", []):
            cell["source"] = answers.get(tag, cell["source"])
    extra = [dict(cell_type="code", source=text, metadata={}) for text in before]
    return json.dumps(book | {"cells": [*extra, *book["cells"]]})


def checks_of(name: str) -> str:
    """The fingerprint of the checks in the course's own notebook."""
    return submission.checks_of(submission.read_notebook(FOLDER / f"{name}.ipynb"))


def hand_in(folder) -> tuple[int, str, dict]:
    command = [sys.executable, "tools/submission.py", "--notebooks", str(folder)]
    out = folder / "submission.json"
    env = os.environ | {"NOTEBOOK_RANKS": "2"}
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    data = json.loads(out.read_text()) if out.exists() else {}
    return done.returncode, done.stdout + done.stderr, data


def test_a_right_answer_a_wrong_one_and_the_rest_untouched(tmp_path):
    answers = {"exercise-2": RIGHT, "exercise-3": WRONG}
    one, other = "01_naive_mlp_tp", "03_vocab_parallel"
    (tmp_path / f"{one}.ipynb").write_text(notebook(one, answers, HELPER))
    (tmp_path / f"{other}.ipynb").write_text(notebook(other, {}))
    code, said, data = hand_in(tmp_path)
    assert code == 0, said
    not_tried = {"1": "not tried", "2": "not tried", "3": "not tried"}
    assert data == {
        "exercises": {
            one: {"1": "not tried", "2": "right", "3": "not yet"},
            other: not_tried,
        },
        "checks": {name: checks_of(name) for name in (one, other)},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lessons": submission.lessons_of(ROOT),
        },
    }  # fmt: skip
    assert "01_naive_mlp_tp 3: not yet; `same`: the gradient is" in said
    assert said.endswith("submission.json: 1 right, 1 not yet, 4 not tried\n")


def test_a_notebook_without_ranks_is_run_whole(tmp_path):
    texts = ["one = 1", "def f():\n    return 1", "def g():\n    return 2"]
    texts += [f'print("right" if {f}() == one else "not yet: no")' for f in "fg"]
    tags = "", "exercise-1", "exercise-2", "check-1", "check-2"
    cells = [
        dict(cell_type="code", source=text, metadata={"tags": [tag]}, outputs=[])
        | dict(execution_count=None, id=f"c{i}")
        for i, (text, tag) in enumerate(zip(texts, tags))
    ]
    book = dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)
    (tmp_path / "06_x.ipynb").write_text(json.dumps(book))
    code, said, data = hand_in(tmp_path)
    assert code == 0 and data["exercises"]["06_x"] == {"1": "right", "2": "not yet"}
    assert "06_x 2: not yet; no\n" in said


def test_fingerprints_are_of_the_lessons_code_and_of_the_checks(tmp_path):
    lesson, book = tmp_path / "00_a.py", tmp_path / "01_naive_mlp_tp.ipynb"
    prints = {submission.lessons_of(tmp_path)}
    for text in ("a = 1", "a = 2"):
        lesson.write_text(text)
        prints.add(submission.lessons_of(tmp_path))
    assert len(prints) == 3
    checks = []
    for answers in ({}, {"exercise-1": RIGHT}, {"check-1": "print('right')"}):
        book.write_text(notebook(book.stem, answers))
        checks.append(submission.checks_of(submission.read_notebook(book)))
    assert checks[0] == checks[1] == checks_of(book.stem) != checks[2]


def test_a_notebook_that_cannot_be_read(tmp_path):
    (tmp_path / "00_collectives.ipynb").write_text('{"cells": [')
    code, said, data = hand_in(tmp_path)
    assert code == 2 and data == {} and said.count("\n") == 1
    assert said.startswith("error: ") and "00_collectives.ipynb" in said


def handed_in(states: list[str], **changes) -> str:
    """The text of a submission in which one notebook was worked on."""
    books = {
        name: {n: "not tried" for n in map(str, exercises(name))} for name in NOTEBOOKS
    }
    books["01_naive_mlp_tp"] = dict(zip("123", states))
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
    rows = {line[:20].strip(): line[20:].split() for line in said.splitlines()}
    assert rows["01_naive_mlp_tp 1"] == ["3", "0", "0"]
    assert rows["01_naive_mlp_tp 2"] == ["1", "1", "1"]
    assert rows["01_naive_mlp_tp 3"] == ["0", "1", "2"]
    assert rows["05_3d_parallel 1"] == ["0", "0", "3"]
    total = sum(len(exercises(name)) for name in NOTEBOOKS)
    marks = ["·" * len(exercises(name)) for name in NOTEBOOKS]
    assert rows["a"] == ["2", "1", str(total - 3), marks[0], "++o", *marks[2:]]
    assert rows["b"][:3] == ["1", "1", str(total - 2)] and rows["b"][4] == "+o·"
    every = ", ".join(name[:2] for name in NOTEBOOKS)
    assert f"\nc: other checks in {every}; other lessons\n" in said
    assert "\na: " not in said and "\nb: " not in said
    assert all(len(line) <= 88 for line in said.splitlines())


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
