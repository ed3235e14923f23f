"""The text of the lessons: anatomy and gates (DESIGN 2), and same name, same code.

`make lint` sees to columns, blanks at ends of lines, and imports that nobody uses.
"""

import ast
import copy
import re
import sys
from collections import Counter
from functools import cache
from typing import NamedTuple

import jobs
import pytest

HEAD, NEW, RUN, BREAK = "", "NEW in", "RUN", "BREAK IT"
CARRIED, HARNESS = "CARRIED OVER from", "HARNESS"
BANNER = re.compile(rf"# ==== ({NEW}|{RUN}|{BREAK}|{CARRIED}|{HARNESS})\b ?(.*)")
FREE = {"parse_args", "main", "BREAKS"}  # may differ from lesson to lesson

# Lines of the parts. Lesson 05 may have more. 60 of the harness say who is
# missing (test_who_is_missing.py), the others count, compare, print, refuse and break.
# 02 also shows sums that are the same bits for every T, and copies of heads.
GATES = {"to read": 660, NEW: 270, RUN: 270, HARNESS: 389}
MORE = {
    "02": {"to read": 813, NEW: 340, RUN: 324},
    "05": {"to read": 950, NEW: 400, RUN: 400},
}
FUNCTION_LINES, LOCAL_NAMES, INNER_LOOPS = 40, 25, 6
# What each file has come to, in lines: one that grows by a tenth has to say why here.
SIZE = {"00": 1048, "01": 1111, "02": 1464, "03": 1698, "04": 1869, "05": 2255}
# Other people's code imports these (DESIGN 10).
STAY = {
    "00": "all_reduce all_gather reduce_scatter broadcast all_to_all shard "
    "ring_all_reduce",
    "01": "CopyToTP ReduceFromTP ColumnParallelLinear RowParallelLinear MLP tp_mlp",
    "02": "Transformer tp_transformer",
    "03": "VocabParallelEmbedding vocab_parallel_cross_entropy",
    "04": "sp_transformer",
    "05": "schedule",
}


class Definition(NamedTuple):
    """What a lesson defines at its top level."""

    name: str
    part: str
    source: str  # under CARRIED OVER: the number of the lesson it comes from
    node: ast.AST


class Lesson:
    def __init__(self, name: str):
        self.name, self.number = name, name[:2]
        self.lines = jobs.PATHS[name].read_text("utf-8").splitlines()
        self.tree = ast.parse("\n".join(self.lines))
        self.banners = []  # (part, the rest of its line), in order
        self.part_of_line = []  # the banner above each line, itself included
        for line in self.lines:
            if match := BANNER.match(line):
                self.banners.append(match.groups())
            self.part_of_line.append(self.banners[-1] if self.banners else (HEAD, ""))
        self.definitions = {}
        for node in self.tree.body:
            for name in names_defined(node):
                part, rest = self.part_of_line[node.lineno - 1]
                source = rest[:2] if part == CARRIED else ""
                self.definitions[name] = Definition(name, part, source, node)

    def part(self, *parts) -> list[str]:
        """The lines under these banners."""
        pairs = zip(self.lines, self.part_of_line)
        return [line for line, (found, _) in pairs if found in parts]


def names_defined(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return [n.id for n in ast.walk(node) if is_stored(n)]
    return []


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def names_used(node: ast.AST) -> list[str]:
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return [n.id for n in names if isinstance(n.ctx, ast.Load)]


@cache
def without_docstrings(node: ast.AST) -> str:
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        kinds = ast.FunctionDef, ast.ClassDef
        if isinstance(inner, kinds) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


ALL = [Lesson(name) for name in jobs.LESSONS]
each_lesson = pytest.mark.parametrize("lesson", ALL, ids=jobs.LESSONS)


@each_lesson
def test_banners(lesson):
    (_, new), *others = lesson.banners
    sources = [rest[:2] for part, rest in others if part == CARRIED]
    carried = [(CARRIED, f"{source}, unchanged") for source in sources]
    last = (HARNESS, ", the same in every lesson")
    assert others == [(RUN, ""), (BREAK, ""), *carried, last]
    assert lesson.banners[0][0] == NEW
    assert re.fullmatch(rf"{lesson.number}: \S.*", new), new
    assert all(source < lesson.number for source in sources)
    assert sources == sorted(set(sources)), "the lessons in order"
    assert lesson.lines[-2:] == [
        'if __name__ == "__main__":',
        "    launch(main, parse_args, globals())",
    ]


@each_lesson
def test_what_nobody_needs_to_read_is_folded(lesson):
    """Every definition carried or of the harness is in a region, and no other."""
    folded, in_region = False, set()
    for number, line in enumerate(lesson.lines, 1):
        if re.match(r"# (end)?region\b", line):
            assert folded == line.startswith("# endregion"), f"line {number}"
            folded = not folded
        elif folded:
            in_region.add(number)
    assert not folded
    for name, part, _, node in lesson.definitions.values():
        assert (node.lineno in in_region) == (part in (CARRIED, HARNESS)), name


@each_lesson
def test_gates_of_parts_and_functions(lesson):
    gates = GATES | MORE.get(lesson.number, {})
    counted = {part: len(lesson.part(part)) for part in gates}
    counted["to read"] = len(lesson.part(HEAD, NEW, RUN, BREAK))
    assert {part: n for part, n in counted.items() if n > gates[part]} == {}
    assert len(lesson.lines) <= 1.1 * SIZE[lesson.number]
    loops = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda
    nodes = ast.walk(lesson.tree)
    for function in [node for node in nodes if isinstance(node, ast.FunctionDef)]:
        lines = function.end_lineno - function.lineno + 1
        if ast.get_docstring(function):
            doc = function.body[0]
            lines -= doc.end_lineno - doc.lineno + 1
        inside = [*ast.walk(function)]
        names = {n.id for n in inside if is_stored(n)}
        names |= {n.arg for n in inside if isinstance(n, ast.arg)}
        assert lines <= FUNCTION_LINES, function.name
        assert len(names) <= LOCAL_NAMES, function.name
        assert sum(isinstance(n, loops) for n in inside) <= INNER_LOOPS, function.name


@pytest.mark.parametrize("name, most", [("draw.py", 600), ("ranks.py", 385)])
def test_what_notebooks_share_is_short(name, most):
    text = (jobs.ROOT / "notebooks" / name).read_text("utf-8")
    assert len(text.splitlines()) <= most


@each_lesson
def test_definitions_are_the_same_everywhere_and_under_the_right_banner(lesson):
    for name, part, source, node in lesson.definitions.values():
        if name in FREE:
            assert part == (BREAK if name == "BREAKS" else RUN), name
            continue
        first = next(other for other in ALL if name in other.definitions)
        wanted = without_docstrings(first.definitions[name].node)
        assert without_docstrings(node) == wanted, f"{name} differs in {first.name}"
        if part == CARRIED:
            assert first.number == source, f"{name} comes from {first.name}"
        elif part != HARNESS:
            assert part in (NEW, RUN, BREAK), f"{name} stands above all banners"
            assert first == lesson, f"{name} is not new: it comes from {first.name}"
    assert lesson.part(HARNESS) == ALL[0].part(HARNESS)


@each_lesson
def test_carries_only_what_it_uses(lesson):
    uses = Counter(names_used(lesson.tree))
    for name, part, _, node in lesson.definitions.values():
        if part == CARRIED:
            assert uses[name] > names_used(node).count(name), f"nobody uses {name}"
    banners = {rest[:2] for part, rest in lesson.banners if part == CARRIED}
    assert {d.source for d in lesson.definitions.values()} - {""} == banners


@each_lesson
def test_imports(lesson):
    """torch and the standard library. 04 may look for transformers, where needed."""
    modules = []
    for node in ast.walk(lesson.tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append("." * node.level + (node.module or ""))
    known = {"torch", *sys.stdlib_module_names} - {"importlib"}
    foreign = {name for name in modules if name.split(".")[0] not in known}
    in_04 = {"transformers", "importlib.util"}  # which finds whether it is there
    assert foreign == (in_04 if lesson.number == "04" else set())
    assert not re.search(r"^(import|from) transformers", "\n".join(lesson.lines), re.M)


@each_lesson
def test_docstrings(lesson):
    ranks, doc = 8 if lesson.number == "05" else 2, ast.get_docstring(lesson.tree)
    parts = [f"torchrun --standalone --nproc_per_node={ranks} {lesson.name}.py"]
    parts += ["What you will see:", "How to read this file:", "Shapes:", "Sources:"]
    assert [part for part in parts if part not in doc] == []
    for name, part, source, node in lesson.definitions.values():
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        doc = ast.get_docstring(node)
        if part == CARRIED and (doc or not name.startswith("_")):
            wanted = rf"[^\n]*\S \(lesson {source}\)"
            assert doc and re.fullmatch(wanted, doc), f"{name}: {doc}"
        if part == NEW and not name.startswith("_"):
            assert doc, f"{name} has no docstring"


@each_lesson
def test_new_begins_with_a_reminder(lesson):
    """What from earlier lessons appears here: a comment of at most six lines."""
    text = "\n".join(lesson.part(NEW)[1:]).lstrip("\n")
    comment = re.match(r"(#.*\n)*", text)[0]
    assert lesson.number == "00" or 1 <= comment.count("\n") <= 6


@each_lesson
def test_names_stay_and_are_defined_once_and_words_are_ours(lesson):
    names = [n for node in lesson.tree.body for n in names_defined(node)]
    assert set(STAY[lesson.number].split()) <= set(names)
    assert len(names) == len(set(names))
    text = "\n".join(lesson.lines)
    assert "model parallel" not in text.lower(), "tensor parallel is what we call it"
