"""CONTRIBUTING.md: what it says is so, and every script has all that it lists."""

import re

import jobs
import mutants
import pytest
import test_breaks

TEXT = (jobs.ROOT / "CONTRIBUTING.md").read_text("utf-8")


def read(path: str) -> str:
    return (jobs.ROOT / path).read_text("utf-8")


def lacks(script: str) -> list[str]:
    """The places of CONTRIBUTING.md's list that a script is not in."""
    number = script[:2]
    notebook = f"notebooks/{script}.ipynb"
    files = [notebook, f"tests/wrong_{number}.py", f"docs/lessons/{script}.md"]
    missing = [path for path in files if not (jobs.ROOT / path).exists()]
    for path, word in {
        "README.md": f"beyond/{script}.py",
        "docs/index.md": f"notebooks/{script}",
        "docs/plan.md": script,
        "tests/runs.py": f'"{script}"',
    }.items():
        if word not in read(path):
            missing.append(path)
    if script not in test_breaks.EXPECTED:
        missing.append("tests/test_breaks.py")
    if not (jobs.ROOT / mutants.TESTS.get(number, "nowhere")).exists():
        missing.append("tests/mutants.py")
    return missing


@pytest.mark.parametrize("script", jobs.BEYOND)
def test_every_script_has_what_a_script_needs(script):
    assert lacks(script) == []


def test_a_new_script_lacks_all_of_it():
    places = lacks("99_new")
    section = TEXT.partition("## Add a script")[2].partition("## ")[0]
    for place in places:
        name = place.replace("99_new", "NN_name").replace("99", "NN")
        assert name in section, place
    assert len(places) == 9


def test_every_mutant_still_edits_its_lesson():
    for mutant in mutants.MUTANTS:
        mutants.edited(mutant)  # raises if what it replaces is not there once


def test_files_and_targets_that_it_names_exist():
    assert TEXT.count("\n") <= 200
    makefile = read("Makefile")
    for target in re.findall(r"\bmake ([a-z]+)", TEXT):
        assert re.search(rf"^{target}\b.*:", makefile, re.M), target
    paths = re.findall(r"`((?:tests|tools|docs|beyond|notebooks)/[\w/.-]*)`", TEXT)
    for path in paths:
        if "NN" not in path:
            assert (jobs.ROOT / path).exists(), path
