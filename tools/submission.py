"""Hand in exercises, and see what a class has handed in.

    python tools/submission.py                  check exercises, write submission.json
    python tools/submission.py --table FOLDER   one table of all the files in a folder

The first runs the checks of the exercises in notebooks/, as they were saved, on live
ranks. Of an exercise it notes `right`, `not yet` or `not tried`; of a notebook, a
fingerprint of its checks, and of the lessons, one of their code, so that the second can
say where these are not the course's own. There are no names in the file.

An exercise's cell and its check need nothing but the lesson, so nothing else of the
notebook is run; but if they miss a name that another cell defines, that cell is, too.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import json
import platform
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tools", "notebooks"):
    sys.path.insert(0, str(ROOT / folder))
from check import Parser, output_path  # noqa: E402

STATES = {"right": "+", "not yet": "o", "not tried": "·"}
LIMIT = 60  # seconds that a cell may take


# Notebooks


def read_notebook(path: Path) -> list[dict]:
    """Its code cells, {"text", "tags"}, without the line %%px."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [
            {
                "text": re.sub(r"\A%%px.*\n", "", "".join(cell["source"])),
                "tags": cell["metadata"].get("tags", []),
                "on ranks": "".join(cell["source"]).startswith("%%px"),
            }
            for cell in cells
            if cell["cell_type"] == "code"
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read as a notebook: {error!r}") from None


def exercises(cells: list[dict]) -> dict[str, dict[str, int]]:
    """Number → where its cell and its check are in the notebook."""
    found = {}
    for place, cell in enumerate(cells):
        for tag in cell["tags"]:
            if match := re.fullmatch(r"(exercise|check)-(\d+)", tag):
                found.setdefault(match[2], {})[match[1]] = place
    return found


def is_untouched(text: str) -> bool:
    """Is nothing filled in? Then all functions end in `...`, with nothing before it but
    a docstring or super().__init__(), and all names are None or {...}. Comments do not
    count, nor do imports and a class that the exercise gives in full."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    rest = [node for node in tree.body if not is_given(node)]
    return bool(rest) and all(map(is_placeholder, rest))


def is_given(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    return isinstance(node, ast.ClassDef) and "..." not in ast.unparse(node)


def is_placeholder(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return all(map(is_placeholder, node.body))
    if isinstance(node, ast.FunctionDef):
        *before, last = node.body[ast.get_docstring(node) is not None :]
        calls = [ast.unparse(line) for line in before]
        return calls in ([], ["super().__init__()"]) and ast.unparse(last) == "..."
    if not isinstance(node, ast.Assign):
        return False
    values = getattr(node.value, "values", [node.value])  # of a dict, or the one
    return {ast.unparse(value) for value in values} <= {"None", "{...}", "..."}


def fingerprint(texts) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def checks_of(cells: list[dict]) -> str:
    """A fingerprint of all the checks of a notebook."""
    return fingerprint(
        cell["text"]
        for cell in cells
        if any(t.startswith("check-") for t in cell["tags"])
    )


def lessons_of(folder: Path) -> str:
    paths = sorted(folder.glob("0?_*.py")) + sorted(folder.glob("beyond/[0-9]*_*.py"))
    return fingerprint(path.read_text(encoding="utf-8") for path in paths)


# Running what was filled in


def lesson_of(cells: list[dict]) -> str | None:
    """The lesson that a notebook's ranks have; None of one that starts no ranks."""
    starts = re.compile(r'\branks\.start\(\w+, "(\w+)"\)')
    found = [match[1] for cell in cells if (match := starts.search(cell["text"]))]
    return found[0] if found else None


def text_of(data: dict) -> str:
    """What a rank printed or warned, and its last value."""
    value = (data["execute_result"] or {}).get("data", {}).get("text/plain", "")
    return "\n".join(x.rstrip() for x in (data["stdout"], data["stderr"], value) if x)


def judge_alone(path: Path, check: int) -> tuple[str, str]:
    """`right` or `not yet` of a notebook that starts no ranks: all of it is run."""
    import nbclient
    import nbformat

    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    client = nbclient.NotebookClient(
        book,
        timeout=LIMIT,
        allow_errors=True,
        resources=resources,
        kernel_name="python3",
    )
    client.execute()
    outputs = [cell for cell in book.cells if cell.cell_type == "code"][check].outputs
    said = "".join(x.text for x in outputs if x.output_type == "stream").rstrip()
    errors = [f"{x.ename}: {x.evalue}" for x in outputs if x.output_type == "error"]
    if not errors and said.splitlines()[-1:] == ["right"]:
        return "right", ""
    words = "".join(errors[:1]) or said or "nothing was said"
    return "not yet", re.sub(r"^not yet[:;] *", "", words)


class Judge:
    """Live ranks on which exercises of one lesson after the other are judged."""

    def __init__(self):
        self.live = None

    def begin(self, lesson: str) -> None:
        """Every rank has this lesson's names, and nothing else."""
        import ranks

        if self.live is None:
            ranks.prepare()
            self.live = ranks.start(ranks.how_many(4), lesson)
        each = range(self.live.count)
        self.live.view.execute("%reset -f")
        self.live.view.map_sync(
            ranks.load, each, [self.live.count] * len(each), [lesson] * len(each)
        )
        self.live.form_group()

    def run(self, text: str) -> tuple[list[str], str]:
        """A cell on every rank: what each said; the first error, or nothing."""
        import ranks

        result = self.live.view.execute(text, silent=False, block=False)
        result.wait(LIMIT)
        if not result.ready():
            return [], f"it took longer than {LIMIT} s"
        result.wait_for_output(2)
        replies = result.get(return_exceptions=True)
        errors = [ranks.in_short(x) for x in replies if isinstance(x, Exception)]
        return [text_of(data) for data in result.metadata], "".join(errors[:1])

    def run_cell(self, cells, place: int, defined: dict) -> tuple[list[str], str]:
        """A cell; and before it, those that define names which it misses."""
        said, error = self.run(cells[place]["text"])
        while (other := missing([*said, error], defined)) is not None:
            self.run_cell(cells, other, defined)
            said, error = self.run(cells[place]["text"])
        return said, error

    def judge(self, cells: list[dict], answer: int, check: int) -> tuple[str, str]:
        """`right` or `not yet` of the cells at two places, and what was said."""
        self.begin(lesson_of(cells))
        defined = definitions(cells[:answer])
        said, error = self.run_cell(cells, answer, defined)
        if not error:
            said, error = self.run_cell(cells, check, defined)
        last = [text.splitlines()[-1] if text else "" for text in said]
        if not error and set(last) == {"right"}:
            return "right", ""
        if error or any("live.restart()" in text for text in said):
            with contextlib.redirect_stdout(io.StringIO()):
                self.live.restart()  # a rank may still be in a collective, or hang
        words = error or next((text for text in said if text), "nothing was said")
        return "not yet", re.sub(r"^not yet[:;] *", "", words)


def missing(said: list[str], defined: dict[str, int]) -> int | None:
    """The cell that defines a name which was not defined; each is tried once."""
    name = re.search(r"name '(\w+)' is not defined", "\n".join(said))
    return defined.pop(name[1], None) if name else None


def definitions(cells: list[dict]) -> dict[str, int]:
    """Names that cells under %%px define → the last cell that does."""
    found = {}
    for place, cell in enumerate(cells):
        try:
            body = ast.parse(cell["text"]).body if cell["on ranks"] else []
        except SyntaxError:  # a magic
            continue
        for node in body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [getattr(node, "name", None)]
            names += [x.id for t in targets if t for x in ast.walk(t) if is_name(x)]
            names += [
                a.asname or a.name
                for a in getattr(node, "names", [])
                if is_import(node)
            ]
            found |= {name: place for name in names if name}
    return found


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def judge_all(folder: Path) -> dict:
    """Every exercise of every notebook of a folder, as the file has it."""
    books = {
        path.stem: read_notebook(path) for path in sorted(folder.glob("[0-9]*_*.ipynb"))
    }
    if not books:
        raise ValueError(f"no notebook 0?_*.ipynb in {folder}")
    judge, states = Judge(), {}
    for lesson, cells in books.items():
        states[lesson] = {}
        for number, found in exercises(cells).items():
            state, said = "not tried", ""
            if "check" not in found:
                said = "its check is gone from the notebook"
            elif "exercise" in found and not is_untouched(
                cells[found["exercise"]]["text"]
            ):
                places = found["exercise"], found["check"]
                if lesson_of(cells):
                    state, said = judge.judge(cells, *places)
                else:
                    path = folder / f"{lesson}.ipynb"
                    state, said = judge_alone(path, found["check"])
            states[lesson][number] = state
            line = f"{lesson} {number}: {state}{f'; {said}' if said else ''}"
            print(textwrap.shorten(line, 88, placeholder=" …"), flush=True)
    if judge.live:
        judge.live.stop()
    import torch  # only now: what is wrong with a notebook is said at once

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"lessons": lessons_of(ROOT)}
    checks = {lesson: checks_of(cells) for lesson, cells in books.items()}
    return {"exercises": states, "checks": checks, "versions": versions}


# The teacher's side


def read_submission(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        states = [pair for book in data["exercises"].values() for pair in book.items()]
        for number, state in states:
            if not number.isdecimal() or state not in STATES:
                raise ValueError(f"exercise {number!r} is {state!r}")
        for name in ("checks", "versions"):
            data[name].keys()  # or it is no dict
        return data
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path.name} is not a submission: {words}") from None


def remarks(data: dict) -> str:
    """In what a file is not of this course as it lies here."""
    books = (ROOT / "notebooks").glob("[0-9]*_*.ipynb")
    own = {path.stem: checks_of(read_notebook(path)) for path in books}
    other = [name[:2] for name in sorted(own) if data["checks"].get(name) != own[name]]
    found = [f"other checks in {', '.join(other)}"] if other else []
    if data["versions"].get("lessons") != lessons_of(ROOT):
        found.append("other lessons")
    return "; ".join(found)


def tally(states: list[str]) -> str:
    """How many of each, in columns below their names."""
    return "".join(f"{states.count(word):>{len(word) + 2}}" for word in STATES)


def table(files: dict[str, dict]) -> str:
    """Exercise by exercise, then file by file."""
    names = {
        (book, number)
        for data in files.values()
        for book, states in data["exercises"].items()
        for number in states
    }
    names = sorted(names, key=lambda name: (name[0], int(name[1])))
    answers = {  # file → state of each exercise
        file: [data["exercises"].get(b, {}).get(n, "not tried") for b, n in names]
        for file, data in files.items()
    }
    width = max(len(text) for text in [*map(" ".join, names), *files])
    head = "".join(f"  {word}" for word in STATES)
    lines = [f"{'exercise':<{width}}{head}"]
    for name, *states in zip(names, *answers.values()):
        lines.append(f"{' '.join(name):<{width}}{tally(states)}")
    books = sorted({book for book, _ in names})
    titles = "".join(f" {book[:2]:<4}" for book in books)
    lines += ["", f"{'file':<{width}}{head}{titles}".rstrip()]
    for file, states in answers.items():
        marks = dict.fromkeys(books, "")
        for (book, _), state in zip(names, states):
            marks[book] += STATES[state]
        text = "".join(f" {mark:<4}" for mark in marks.values())
        lines.append(f"{file:<{width}}{tally(states)}{text}".rstrip())
    lines.append("   ".join(f"{mark} {word}" for word, mark in STATES.items()))
    return "\n".join(lines)


def show_table(folder: Path) -> int:
    files, errors = {}, []
    for path in sorted(folder.glob("*.json")):
        try:
            files[path.stem] = read_submission(path)
        except ValueError as error:
            errors.append(f"error: {error}")
    if not files and not errors:
        errors.append(f"error: no file *.json in {folder}")
    if files:
        print(table(files))
    for name, data in files.items():
        if words := remarks(data):
            print(f"{name}: {words}")
    sys.stdout.flush()
    for error in errors:
        print(error, file=sys.stderr)
    return 2 if errors else 0


def main() -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=about)
    add = parser.add_argument
    add("--table", type=Path, metavar="FOLDER", help="a table of the files in there")
    add("--notebooks", type=Path, default=ROOT / "notebooks", metavar="FOLDER")
    add("--out", type=output_path, default=ROOT / "submission.json", metavar="PATH")
    args = parser.parse_args()
    if args.table:
        return show_table(args.table)
    try:
        data = judge_all(args.notebooks.resolve())
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    states = [word for book in data["exercises"].values() for word in book.values()]
    counts = ", ".join(f"{states.count(word)} {word}" for word in STATES)
    print(f"wrote {args.out.name}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
