"""The text of the lessons that have not moved yet."""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jobs
import pytest

BANNER = re.compile(r"^# ==== (NEW in|CARRIED OVER from|BREAK IT|RUN)\b ?(.*)")
FREE = {"parse_args", "main", "BREAKS"}  # may differ from lesson to lesson
LONGEST = 45  # lines of a function without its docstring


class Definition(NamedTuple):
    name: str
    section: str  # NEW in, CARRIED OVER from, BREAK IT, RUN, or "" for above them all
    source: str  # the number of the lesson in a CARRIED OVER banner
    text: str  # decorators and comments included
    node: ast.AST


def definitions(path: Path) -> dict:
    """name → everything a lesson defines at its top level."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name, first = ast.unparse(target), node.lineno
        else:
            continue
        banners = [match for line in lines[:first] if (match := BANNER.match(line))]
        section, rest = banners[-1].groups() if banners else ("", "")
        source = rest[:2] if section == "CARRIED OVER from" else ""
        body = "\n".join(lines[first - 1 : node.end_lineno])
        found[name] = Definition(name, section, source, body, node)
    return found


PATHS = {
    name: path for name, path in jobs.PATHS.items() if name not in jobs.NEW_ANATOMY
}
LESSONS = {name: definitions(path) for name, path in PATHS.items()}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in PATHS.items()}
each_lesson = pytest.mark.parametrize("lesson", LESSONS)


def names_used(node: ast.AST) -> set:
    """Every name and attribute that a piece of a program speaks of."""
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    used |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    strings = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return used | {word for s in strings if isinstance(s, str) for word in s.split(".")}


@each_lesson
def test_banners_are_in_order(lesson):
    lines = PATHS[lesson].read_text("utf-8").splitlines()
    heads = [line for line in lines if line.startswith("# ====")]
    number = lesson[:2]
    assert re.fullmatch(rf"# ==== NEW in {number}: \S.*", heads[0]), heads
    assert heads[-2:] == ["# ==== BREAK IT", "# ==== RUN"]
    carried = heads[1:-2]
    shape = r"# ==== CARRIED OVER from (\d\d), unchanged"
    sources = [re.fullmatch(shape, head)[1] for head in carried]
    assert len(sources) == len(set(sources))
    assert all(source < number for source in sources)
    mine = LESSONS[lesson].values()
    assert set(sources) == {d.source for d in mine} - {""}, "a banner over nothing"


@each_lesson
def test_carries_only_what_it_uses(lesson):
    mine = LESSONS[lesson]
    rest = [n for n in TREES[lesson].body if not isinstance(n, ast.Import)]
    used = {}
    for node in rest:
        for name in names_used(node):
            used.setdefault(name, []).append(node)
    for name, definition in mine.items():
        if definition.section == "CARRIED OVER from" and "." not in name:
            others = [
                node for node in used.get(name, []) if node is not definition.node
            ]
            about_it = [n for n in others if ast.unparse(n).startswith(f"{name}.")]
            assert len(others) > len(about_it), f"{name} is carried and never used"


@each_lesson
def test_imports_torch_and_the_standard_library_alone(lesson):
    seen = set()
    for node in ast.walk(TREES[lesson]):
        if isinstance(node, ast.Import):
            seen |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            seen.add(node.module.split(".")[0])
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "importlib.import_module":  # an extra of lesson 04, for --hf
                assert [ast.unparse(x) for x in node.args] == ["'transformers'"]
            assert called != "__import__"
    assert "torch" in seen
    assert seen - {"torch"} <= set(sys.stdlib_module_names), seen


@each_lesson
def test_every_import_is_used(lesson):
    text = PATHS[lesson].read_text("utf-8")
    for node in TREES[lesson].body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if getattr(node, "module", "") == "__future__":
                continue
            for alias in node.names:
                name = alias.asname or alias.name
                assert len(re.findall(rf"\b{re.escape(name)}\b", text)) > 1, name


@each_lesson
def test_columns_and_whitespace(lesson):
    text = PATHS[lesson].read_text("utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        assert len(line) <= 88, f"line {number} has {len(line)} columns"
        assert line == line.rstrip() and "\t" not in line, f"line {number}"


@each_lesson
def test_functions_are_short(lesson):
    for node in ast.walk(TREES[lesson]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node, clean=False)
            lines = node.end_lineno - node.lineno + 1
            lines -= doc.count("\n") + 1 if doc else 0
            assert lines <= LONGEST, f"{node.name} has {lines} lines"


@each_lesson
def test_what_is_public_says_what_it_does(lesson):
    """A docstring on every class and function; FREE ones speak for themselves."""
    tree = TREES[lesson]
    doc = ast.get_docstring(tree)
    parts = ["Run it", "What you will see:", "New here:", "Carried over", "Shapes:"]
    ranks = 8 if lesson.startswith("05") else 2
    parts += [f"torchrun --standalone --nproc_per_node={ranks} {lesson}.py", "Sources:"]
    assert [part for part in parts if part not in doc] == []
    silent = [
        d.name
        for d in LESSONS[lesson].values()
        if isinstance(d.node, (ast.FunctionDef, ast.ClassDef))
        and d.name not in FREE
        and not ast.get_docstring(d.node)
    ]
    assert silent == []


@each_lesson
def test_names_of_a_lesson_are_defined_once(lesson):
    names = [
        node.name
        for node in TREES[lesson].body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    assert len(names) == len(set(names))
    words = PATHS[lesson].read_text("utf-8").lower()
    assert "model parallel" not in words, "tensor parallel is what we call it"
