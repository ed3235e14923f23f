"""Write what lessons carry over from earlier ones, MEASURE, and where to read.

    python tools/carry.py            rewrite the folded parts of all lessons
    python tools/carry.py --check    exit with 1 if a file would change

Every definition has one home: the lesson under whose NEW or RUN it is, or MEASURE of
lesson 00. Edit it there. This tool copies all that a later lesson uses, and what that
uses, below its RUN. Of a docstring it keeps the first line, which has to be a sentence.
Imports that only copies need are copied as well. Before it writes any file it checks
all of them: every name that a lesson reads must be defined, there or in an earlier
lesson. (Scripts in beyond/ import the lessons: nothing is copied there.)
The line below the banner NEW says which lines to read. It is written here as well, in
the lessons and in beyond/; README links to these lines.
"""

import ast
import builtins
import re
import symtable
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDED = re.compile(r"^# ==== (?:CARRIED OVER|MEASURE)", re.M)
MEASURE = "# ==== MEASURE"
GUARD = "\n\n\nif __name__ =="
IMPORTS = re.compile(
    r"^(?:import|from) .*\n(?:(?:import|from) .*\n|\n(?=import|from))*", re.M
)
READ = re.compile(r"^(# ==== NEW in .*\n)(?:# Read lines .*\n)?", re.M)
LINES_PER_MINUTE = 10  # of code that one reads for the first time
FREE = {"main"}  # each lesson has its own
DEFINITIONS = ast.FunctionDef, ast.ClassDef


def names_defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top level of a module defines."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    names = []
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.append(inner.id)
    return names


def names_used(node: ast.AST) -> set[str]:
    """The module's names that a definition, or a whole module, reads."""
    tables = [symtable.symtable(ast.unparse(node), "", "exec")]
    names = set()
    while tables:
        table = tables.pop()
        tables.extend(table.get_children())
        for symbol in table.get_symbols():
            if symbol.is_global() or table.get_type() == "module":
                names.add(symbol.get_name())
    return names


def undefined_names(tree: ast.Module) -> list[str]:
    """Names that a module reads, although nothing in it or in Python defines them."""
    defined = {*dir(builtins), "__file__", *imports_of(tree)}
    used = set()
    for node in tree.body:
        defined.update(names_defined(node))
        if isinstance(node, ast.If):  # the guard
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    defined.add(inner.id)
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            used |= names_used(node)
    return sorted(used - defined)


def plain_classes(tree: ast.Module) -> dict[str, set[str]]:
    """Class → its methods and attributes, of classes with no base but NamedTuple."""
    members = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        if [ast.unparse(base) for base in node.bases] not in ([], ["NamedTuple"]):
            continue
        found = {*dir(tuple), "_asdict", "_replace"}  # of NamedTuple, and of any class
        for inner in node.body:
            found.update(names_defined(inner))
        for inner in ast.walk(node):  # self.x = …
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                found.add(inner.attr)
        members[node.name] = found
    return members


def unknown_members(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, "report.ledger") for each attribute that the object's class has not.

    It sees plain cases: `self`, a parameter that is annotated with one of the module's
    own classes, and a global that is made like COMM = CommCounter().
    """
    members = plain_classes(tree)
    places = []  # (where, name of an object, its class)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            places.append((node, "self", node.name))
        if isinstance(node, ast.FunctionDef):
            for arg in node.args.args:
                if isinstance(arg.annotation, ast.Name):
                    places.append((node, arg.arg, arg.annotation.id))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for name in names_defined(node):
                places.append((tree, name, ast.unparse(node.value.func)))
    unknown = set()
    for where, name, its_class in places:
        if its_class not in members:
            continue
        for node in ast.walk(where):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
                if node.attr not in members[its_class]:
                    unknown.add((node.lineno, f"{name}.{node.attr}"))
    return sorted(unknown)


def imports_of(tree: ast.Module) -> dict[str, str]:
    """name → the statement that imports it."""
    statements = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                single = ast.Import([alias])
                name = alias.asname or alias.name.partition(".")[0]
                if isinstance(node, ast.ImportFrom):
                    single = ast.ImportFrom(node.module, [alias], node.level)
                statements[name] = ast.unparse(single)
    return statements


def with_lines_to_read(text: str) -> str:
    """The text, with the line below NEW that says where the idea begins and ends."""
    text = READ.sub(r"\1# Read lines\n", text, count=1)
    lines = text.splitlines()
    first = lines.index("# Read lines")
    run = lines.index("# ==== RUN")
    last = run
    for i in range(first, run):
        if lines[i].startswith("# ---- Optional") and last == run:
            last = i
    ends = "" if last == run else "The rest of NEW is optional. "
    minutes = round((last - first) / LINES_PER_MINUTE)
    here = f"# Read lines {first + 1} to {last}, in about {minutes} minutes. {ends}"
    here += "Stop at RUN."
    return text.replace("# Read lines", here, 1)


def with_links_to_new(readme: str, texts: dict) -> str:
    """README's column of lines to read: a link to NEW of each lesson, minutes."""
    for lesson, text in texts.items():
        lines = re.search(r"Read lines (\d+) to (\d+), in about (\d+) minutes", text)
        first, last, minutes = lines.groups()
        link = (
            f"[{first} to {last}]({lesson.path.name}#L{first}-L{last}), {minutes} min"
        )
        start = f"<!-- lines {lesson.number} -->"
        readme = re.sub(f"{start}.*?<!-- end -->", f"{start}{link}<!-- end -->", readme)
    return readme


class Lesson:
    """A lesson's own text, which is kept, and the folded parts, which are written."""

    def __init__(self, path: Path):
        self.path = path
        self.number = path.name[:2]
        self.text = path.read_text("utf-8")
        self.own, _, folded = self.text.partition(FOLDED.search(self.text)[0])
        self.guard = GUARD + folded.partition(GUARD)[2]
        self.lines = self.own.splitlines()
        self.tree = ast.parse(self.own)
        self.guard_tree = ast.parse(self.guard)
        self.imports = imports_of(self.tree)
        self.problems = {}  # line → what keeps a copy from being made
        self.home = {}  # name → its definition
        for node in self.tree.body:
            for name in names_defined(node):
                self.home[name] = node

    def copy_of(self, node: ast.stmt) -> str:
        """A definition's text, with each docstring cut to its first line."""
        first = node.lineno
        if getattr(node, "decorator_list", []):
            first = node.decorator_list[0].lineno
        lines = {}
        for number in range(first, node.end_lineno + 1):
            lines[number] = self.lines[number - 1]
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITIONS) and ast.get_docstring(inner):
                self.shorten(inner.body[0], lines)
        return "\n".join(lines.values())

    def shorten(self, doc: ast.Expr, lines: dict[int, str]) -> None:
        """Keep the first line of a docstring, and say where the others are."""
        sentence = doc.value.value.splitlines()[0].strip()
        if not sentence.endswith((".", ":")):
            self.problems[doc.lineno] = "a docstring's first line is not a sentence"
        for number in range(doc.lineno, doc.end_lineno + 1):
            del lines[number]
        indent = " " * doc.col_offset
        text = f'{indent}"""{sentence[:-1]} (lesson {self.number})."""'
        if len(text) > 88:
            text = f'{indent}"""{sentence}\n\n{indent}(lesson {self.number})"""'
        lines[doc.lineno] = text
        ordered = dict(sorted(lines.items()))
        lines.clear()
        lines.update(ordered)


class Measure:
    """The part of lesson 00 that counts and compares: the same in every lesson."""

    def __init__(self, first: Lesson):
        text = first.text[first.text.index(MEASURE) :].partition(GUARD)[0]
        self.before, imports, self.after = text.partition(IMPORTS.search(text)[0])
        self.tree = ast.parse(text)
        self.imports = first.imports | imports_of(ast.parse(imports))

    def text(self, have: set[str]) -> str:
        """With the imports of what it reads and the file does not have so far."""
        names = sorted(names_used(self.tree) & self.imports.keys() - have)
        statements = [self.imports[name] for name in names]
        statements.sort(key=import_order)
        return f"{self.before}{joined(statements)}\n{self.after}"


def needed_from(lesson: Lesson, earlier: list[Lesson], measure: Measure) -> dict:
    """All names that a lesson needs from earlier ones: name → the lesson it is from."""
    found = {}
    todo = [lesson.tree, lesson.guard_tree, measure.tree]
    while todo:
        for name in names_used(todo.pop()) - lesson.home.keys() - FREE:
            for other in earlier:
                if name in other.home and name not in found:
                    found[name] = other
                    todo.append(other.home[name])
    return found


def missing_imports(lesson: Lesson, found: dict) -> dict[str, str]:
    """Imports that only the copies need: name → statement."""
    statements = {}
    for name, other in found.items():
        for used in names_used(other.home[name]) & other.imports.keys():
            if used not in lesson.imports:
                statements[used] = other.imports[used]
    return statements


def joined(imports: list[str]) -> str:
    """Import statements in blocks: the standard library, then torch, as ruff does."""
    names = {}  # "from X import" → what is imported from there
    for line in imports:
        start, word, name = line.partition(" import ")
        names.setdefault(start + word if word else line, []).append(name)
    imports = [start + ", ".join(sorted(names[start])) for start in names]
    library = [line for line in imports if not import_order(line)[0]]
    others = [line for line in imports if import_order(line)[0]]
    blocks = ["\n".join(lines) for lines in (library, others) if lines]
    return "\n\n".join(blocks)


def import_order(statement: str) -> tuple:
    """ruff's order: the standard library, then torch; `import` before `from`."""
    module = statement.split()[1]
    is_torch = module.partition(".")[0] == "torch"
    return is_torch, statement.startswith("from"), module.lower()


def folded_part(lesson: Lesson, earlier: list[Lesson], measure: Measure) -> str:
    """CARRIED OVER, one banner for each earlier lesson, and MEASURE."""
    found = needed_from(lesson, earlier, measure)
    imports = missing_imports(lesson, found)
    have = {*lesson.imports, *imports}
    parts = []
    for other in earlier:
        nodes = []
        for name, node in other.home.items():
            if found.get(name) is other and node not in nodes:
                nodes.append(node)
        if nodes:
            banner = f"# ==== CARRIED OVER from {other.number}, unchanged\n# region"
            if imports:
                statements = sorted(imports.values(), key=import_order)
                banner += f"\n\n{joined(statements)}"
                imports = {}
            parts.append(banner)
            parts.extend(other.copy_of(node) for node in nodes)
            parts.append("# endregion")
    return "\n\n\n".join([*parts, measure.text(have)]) + lesson.guard


def second_homes(lessons: list[Lesson]) -> list[str]:
    """Names that two files define: one name must mean one thing in the course."""
    first = {}
    problems = []
    for lesson in lessons:
        for name in lesson.home.keys() - FREE:
            if name in first:
                problems.append(f"{lesson.path.name}: {name} is {first[name]}'s")
            first.setdefault(name, lesson.path.name)
    return problems


def find_problems(texts: dict[Lesson, str]) -> list[str]:
    """What keeps the files from being written. texts: lesson → its new file."""
    problems = second_homes(list(texts))
    for lesson, text in texts.items():
        name = lesson.path.name
        tree = ast.parse(text)
        for line, problem in lesson.problems.items():
            problems.append(f"{name}:{line}: {problem}")
        for undefined in undefined_names(tree):
            problems.append(f"{name}: {undefined} is defined nowhere")
        for line, member in unknown_members(tree):
            problems.append(f"{name}:{line}: {member} is defined nowhere")
    return problems


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(f"carry.py knows --check only, not: {' '.join(sys.argv[1:])}")
        return 2
    lessons = [Lesson(path) for path in sorted(ROOT.glob("0?_*.py"))]
    measure = Measure(lessons[0])
    texts = {}
    for i, lesson in enumerate(lessons):
        own = with_lines_to_read(lesson.own)
        texts[lesson] = own + folded_part(lesson, lessons[:i], measure)
    problems = find_problems(texts)
    if problems:
        print("\n".join(problems))
        return 2
    files = {lesson.path: text for lesson, text in texts.items()}
    for path in sorted(ROOT.glob("beyond/[0-9]*.py")):
        files[path] = with_lines_to_read(path.read_text("utf-8"))
    readme = ROOT / "README.md"
    if readme.exists():  # a test copies lessons alone
        files[readme] = with_links_to_new(readme.read_text("utf-8"), texts)
    stale = []
    for path, text in files.items():
        if text != path.read_text("utf-8"):
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text, "utf-8")
    word = "would change" if "--check" in sys.argv else "rewritten"
    print(f"{word}: {', '.join(stale) or 'nothing'}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
