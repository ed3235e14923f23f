"""The text of the lessons: anatomy and gates (DESIGN 2), and same name, same code."""

import ast
import re
import sys
from typing import NamedTuple

import jobs
import pytest

HEAD, NEW, RUN, BREAK = "", "NEW in", "RUN", "BREAK IT"
CARRIED, HARNESS = "CARRIED OVER from", "HARNESS"
TO_READ = [HEAD, NEW, RUN, BREAK]
BANNER = re.compile(rf"# ==== ({NEW}|{RUN}|{BREAK}|{CARRIED}|{HARNESS})\b ?(.*)")
FREE = {"parse_args", "main", "BREAKS"}  # may differ from lesson to lesson

# Lines of the parts. Lesson 05 may have more. 85 of the harness's say truly who is
# missing (test_who_is_missing.py), the others count, compare, print, refuse and break.
GATES = {"to read": 660, NEW: 270, RUN: 270, HARNESS: 430}
GATES_05 = GATES | {"to read": 950, NEW: 400, RUN: 400}
FUNCTION_LINES, LOCAL_NAMES, INNER_LOOPS = 40, 25, 6
COLUMNS = 88
# What each file has come to, in lines: one that grows by a tenth has to say why here.
SIZE = {
    "00_collectives": 1086,
    "01_naive_mlp_tp": 1149,
    "02_transformer_tp": 1327,
    "03_vocab_parallel": 1696,
    "04_sequence_parallel": 1866,
    "05_3d_parallel": 2251,
}
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

LESSONS = jobs.LESSONS
each_lesson = pytest.mark.parametrize("lesson", LESSONS)


class Definition(NamedTuple):
    """What a lesson defines at its top level."""

    name: str
    part: str
    source: str  # under CARRIED OVER: the number of the lesson it comes from
    node: ast.AST


class Lesson:
    def __init__(self, name: str):
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

    def count(self, *parts) -> int:
        return sum(part in parts for part, _ in self.part_of_line)

    def text(self, part: str) -> str:
        pairs = zip(self.lines, self.part_of_line)
        return "\n".join(line for line, (found, _) in pairs if found == part)


def names_defined(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return [n.id for n in ast.walk(node) if is_stored(n)]
    return []


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def names_used(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def without_docstrings(node: ast.AST) -> str:
    copy = ast.parse(ast.unparse(node))
    for inner in ast.walk(copy):
        kinds = ast.FunctionDef, ast.ClassDef
        if isinstance(inner, kinds) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(copy)


ALL = {name: Lesson(name) for name in LESSONS}
NUMBERS = {name[:2] for name in LESSONS}


def first_with(name: str) -> str:
    """The first lesson that defines a name."""
    return next(lesson for lesson in LESSONS if name in ALL[lesson].definitions)


@each_lesson
def test_banners(lesson):
    found, number = ALL[lesson].banners, lesson[:2]
    parts = [part for part, _ in found]
    sources = [rest[:2] for part, rest in found if part == CARRIED]
    assert parts == [NEW, RUN, BREAK, *[CARRIED] * len(sources), HARNESS]
    assert re.fullmatch(rf"{number}: \S.*", found[0][1]), found[0]
    rests = [rest for _, rest in found[1:]]
    wanted = [f"{source}, unchanged" for source in sources]
    assert rests == ["", "", *wanted, ", the same in every lesson"]
    assert len(set(sources)) == len(sources) and all(s < number for s in sources)
    assert sources == sorted(sources), "the lessons in order"
    assert ALL[lesson].lines[-2:] == [
        'if __name__ == "__main__":',
        "    launch(main, parse_args, globals())",
    ]


@each_lesson
def test_what_nobody_needs_to_read_is_folded(lesson):
    """Every definition carried or of the harness is in a region, and no other."""
    mine, folded, in_region = ALL[lesson], False, set()
    for number, line in enumerate(mine.lines, 1):
        if re.match(r"# (end)?region\b", line):
            assert folded == line.startswith("# endregion"), f"line {number}"
            folded = not folded
        elif folded:
            in_region.add(number)
    assert not folded
    for name, part, _, node in mine.definitions.values():
        assert (node.lineno in in_region) == (part in (CARRIED, HARNESS)), name


@each_lesson
def test_gates(lesson):
    mine, gates = ALL[lesson], GATES_05 if lesson.startswith("05") else GATES
    counted = {part: mine.count(part) for part in gates}
    counted["to read"] = mine.count(*TO_READ)
    assert {part: n for part, n in counted.items() if n > gates[part]} == {}
    assert len(mine.lines) <= 1.1 * SIZE[lesson]
    for number, line in enumerate(mine.lines, 1):
        assert len(line) <= COLUMNS, f"line {number} has {len(line)} columns"


@each_lesson
def test_functions_are_short(lesson):
    loops = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda
    functions = [
        n for n in ast.walk(ALL[lesson].tree) if isinstance(n, ast.FunctionDef)
    ]
    for function in functions:
        lines = function.end_lineno - function.lineno + 1
        if ast.get_docstring(function):
            doc = function.body[0]
            lines -= doc.end_lineno - doc.lineno + 1
        names = {n.id for n in ast.walk(function) if is_stored(n)}
        names |= {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
        inner = sum(isinstance(n, loops) for n in ast.walk(function))
        assert lines <= FUNCTION_LINES, function.name
        assert len(names) <= LOCAL_NAMES, function.name
        assert inner <= INNER_LOOPS, function.name


@each_lesson
def test_same_name_same_code(lesson):
    for name, mine in ALL[lesson].definitions.items():
        if name not in FREE:
            first = first_with(name)
            wanted = without_docstrings(ALL[first].definitions[name].node)
            assert without_docstrings(mine.node) == wanted, f"{name} differs in {first}"
    assert ALL[lesson].text(HARNESS) == ALL[LESSONS[0]].text(HARNESS)


@each_lesson
def test_every_definition_is_under_the_right_banner(lesson):
    for name, part, source, _ in ALL[lesson].definitions.values():
        first = first_with(name)
        if name in FREE:
            assert part == (BREAK if name == "BREAKS" else RUN), name
        elif part == CARRIED:
            if source in NUMBERS:  # until all have moved
                assert first.startswith(source), f"{name} comes from {first}"
        elif part != HARNESS:
            assert part in (NEW, RUN, BREAK), f"{name} stands above all banners"
            assert first == lesson, f"{name} is not new: it comes from {first}"


@each_lesson
def test_carries_only_what_it_uses(lesson):
    mine = ALL[lesson].definitions
    reached = set()  # names used by what is not carried, and by what that uses
    for node in ALL[lesson].tree.body:
        if not any(mine[name].part == CARRIED for name in names_defined(node)):
            reached |= names_used(node)
    while True:
        more = set().union(*(names_used(mine[n].node) for n in reached & set(mine)))
        if more <= reached:
            break
        reached |= more
    unused = {n for n, d in mine.items() if d.part == CARRIED} - reached
    assert unused == set()
    banners = {rest[:2] for part, rest in ALL[lesson].banners if part == CARRIED}
    assert {d.source for d in mine.values()} - {""} == banners


@each_lesson
def test_imports(lesson):
    """torch and the standard library; each is used. 04 may look for transformers."""
    tree, used, roots = ALL[lesson].tree, names_used(ALL[lesson].tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.append(node.module.split(".")[0])
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert "__import__" not in called
            if called.endswith("import_module"):
                roots.append(ast.literal_eval(node.args[0]))
            continue
        else:
            continue
        for alias in node.names:
            name = (alias.asname or alias.name).split(".")[0]
            assert name in used | {"annotations"}, f"{name} is imported and never used"
    foreign = [name for name in roots if name not in sys.stdlib_module_names]
    foreign = [name for name in foreign if name != "torch"]
    assert foreign == [] or (foreign, lesson[:2]) == (["transformers"], "04")
    top = {
        ast.unparse(n) for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)
    }
    assert not any("transformers" in line for line in top), "only where it is needed"


@each_lesson
def test_docstrings(lesson):
    mine = ALL[lesson]
    ranks = 8 if lesson.startswith("05") else 2
    doc = ast.get_docstring(mine.tree)
    parts = [f"torchrun --standalone --nproc_per_node={ranks} {lesson}.py"]
    parts += ["What you will see:", "How to read this file:", "Shapes:", "Sources:"]
    assert [part for part in parts if part not in doc] == []
    for name, part, source, node in mine.definitions.values():
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
    lines = ALL[lesson].text(NEW).splitlines()[1:]
    first = next(i for i, line in enumerate(lines) if line)
    comment = next(
        i for i, line in enumerate(lines[first:]) if not line.startswith("#")
    )
    if not lesson.startswith("00"):
        assert 1 <= comment <= 6


@each_lesson
def test_names_that_stay(lesson):
    assert set(STAY[lesson[:2]].split()) <= set(ALL[lesson].definitions)


@each_lesson
def test_a_name_is_defined_once_and_words_are_ours(lesson):
    names = [n for node in ALL[lesson].tree.body for n in names_defined(node)]
    assert len(names) == len(set(names))
    text = "\n".join(ALL[lesson].lines)
    assert "model parallel" not in text.lower(), "tensor parallel is what we call it"
    assert not re.search(r"[ \t]$|\t", text, re.M)
