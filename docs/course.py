"""A Sphinx extension: what the site shows of the lessons, their bugs and the notebooks.

    {lesson} 01_naive_mlp_tp       its code, part by part, and its recorded output; of
                                   a script in beyond/, its helpers' code as well
    {bugs}                         the bugs of all lessons and scripts, from bugs/
    {edits} tp_mlp                 the lines that it replaces, and its own
    {pair} apply_each copy_then_apply_each         two functions of lessons
    {tp-player} ring               a recorded run that the reader steps through
    {tp-player} ring 1,2,8         on a slide: the steps to stop at
For slides:
    {lesson-output} 01_naive_mlp_tp 5    section 5 of a lesson's recorded output
    {edit} 01_naive_mlp_tp f       a bug's diff; {symptom}, with the same: its symptom
    {picture} 01_naive_mlp_tp 6 2  the second picture of section 6 of its notebook
    {line}`words <01_naive_mlp_tp Report.expect>`      a link to a line of its code
    {exercises} 01_naive_mlp_tp    the names of the exercises in a lesson's notebook

Lessons are read as text, never imported: the site needs no torch. Notebooks are copied
to docs/notebooks; on the way pictures get descriptions, links to lessons lead to the
lessons' pages, and players are inserted where they teach.
"""

import ast
import base64
import difflib
import html
import json
import os
import re
import runpy
import textwrap
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parent
SCREEN = 34  # lines
CODE = 40  # lines of a lesson that a notebook shows open
FEW, AROUND = 3, 3  # lines of an edit, and lines shown around it, on a slide
ROOT = DOCS.parent
PATHS = [*sorted(ROOT.glob("0?_*.py")), *sorted(ROOT.glob("beyond/[0-9]*_*.py"))]
PATHS = {path.stem: path for path in PATHS}  # lessons, and scripts of beyond/
HELPERS = {path.stem: path for path in sorted(ROOT.glob("beyond/[a-z]*.py"))}
BUGS = sorted(ROOT.glob("bugs/*.py"))
SLIDES = [path.stem for path in DOCS.glob("slides/*.md")]
# Set by GitHub's runners. Elsewhere a line number leads to its own place in the page.
REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "")
if REPOSITORY:
    REPOSITORY = f"https://github.com/{REPOSITORY}"
COMMIT = os.environ.get("GITHUB_SHA", "main")
# Recording → the notebook, and the number of the section that it belongs to.
PLAYERS = {
    "ring": ("00", 4),
    "mlp": ("01", 4),
    "mlp-break-f": ("01", 8),
    "attention": ("02", 2),
    "vocab-loss": ("03", 3),
    "sp-layer": ("04", 3),
    "wrong-gradient": ("04", 4),
    "schedules": ("14", 3),
    "schedules-2": ("14", 5),
    "batch": ("05", 9),
    "context-ring": ("11", 2),
    "context-zigzag": ("11", 2),
    "mesh-2d": ("13", 4),
    "experts": ("16", 3),
}


# What one sees → words of the bugs' own symptoms: the index on the page of bugs. A bug
# may be under several.
SYMPTOMS = {
    "It hangs or aborts": r"block until|timeout|(?<!no )hang|abort|a rank that waits",
    "An error, often from inside a library": r"\ban error\b|raises an error",
    "The loss of step 1 is wrong": r"wrong from step 1|already wrong|never equal"
    r"|loss(es)? (is|are) (wrong|slightly|too large)|loss (of step 1 )?differs"
    r"|step 1's loss is wrong|loss of step 1 is wrong|loss and gradients are [^r]"
    r"|differ from the reference|different model|after the load is wrong",
    "The loss of step 1 is right, then it drifts": r"diverge|drift|later ones"
    r"|step 2 on|next ones|then the old weights|from then on|then replicas",
    "An output is wrong, although all shapes are right": r"shapes are right",
    "One gradient is a factor too large or too small": r"times too|too (large|small)"
    r"|too little|factor",
    "A gradient is wrong, or missing": r"gradients?[^,;]*(wrong|not\b|lack|differ)"
    r"|each other's gradients|no gradient|ranks but 0|(other|last) micro-batch",
    "Replicas or ranks differ": r"replicas.*(differ|diverge|drift)|between ranks"
    r"|on each rank|some of the ranks|one rank's|a rank computes|stays as it was",
    "The gradient norm is wrong": r"\bnorms?\b.*(wrong|too|differ)",
    "Only the last digits differ": r"\bbits\b|bitwise",
    "It shows later, or only in memory": r"memory|interrupted|seen these"
    r"|as much as|until such|now and then|large logits",
}


# What the repository has


def path_of(name: str) -> Path:
    """Of a lesson, of a script of beyond/ or of its helper."""
    return PATHS.get(name) or HELPERS[name]


def source(name: str) -> str:
    return path_of(name).read_text("utf-8")


def helpers_of(lesson: str) -> list[str]:
    """The modules of beyond/ that a script imports, and those that these import."""
    found = []
    to_read = [lesson]
    while to_read:
        text = source(to_read.pop(0))
        for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE):
            if name in HELPERS and name != "course" and name not in found:
                found.append(name)
                to_read.append(name)
    return found


def cells_of(lesson: str) -> list[dict]:
    text = (ROOT / f"notebooks/{lesson}.ipynb").read_text("utf-8")
    return json.loads(text)["cells"]


def command_of(lesson: str) -> str:
    """The command that the lesson's notebook begins with, without flags."""
    for cell in cells_of(lesson):
        command = "".join(cell["source"])
        if command.startswith("!torchrun"):
            return re.match(r"!(torchrun \S+ \S+ \S+)", command)[1]
    raise ValueError(f"no cell of notebooks/{lesson}.ipynb runs the lesson")


def recorded(lesson: str) -> tuple[str, str]:
    """The command that runs the lesson, and what it printed (record_outputs.py)."""
    printed = (DOCS / "outputs" / f"{lesson}.txt").read_text("utf-8")
    return command_of(lesson), printed.rstrip()


def bugs_of(lesson: str) -> dict[str, dict]:
    """The BUGS of a lesson or a script of beyond/, by name."""
    folder = "beyond" if path_of(lesson).parent.name == "beyond" else "lesson"
    path = ROOT / "bugs" / f"{folder}{lesson[:2]}.py"
    return runpy.run_path(str(path))["BUGS"]


def find(name: str, target: str) -> ast.AST | None:
    """A definition such as "CopyToTP.backward" of a file, if it is there."""
    found = [ast.parse(source(name))]
    for part in target.split("."):
        bodies = [node for each in found for node in each.body]
        found = [node for node in bodies if getattr(node, "name", "") == part]
    return found[0] if found else None


def place_of(lesson: str, target: str) -> str:
    """Page and line of a definition."""
    node = find(lesson, target)
    if node is None:
        raise ValueError(f"{target} is not defined in {lesson}")
    return place(lesson, lesson, node.lineno)


def place(page: str, name: str, line: int) -> str:
    """Page and line: of a lesson its own page, of a helper that of its script."""
    if name in PATHS:
        page = name
    elif name not in helpers_of(page):
        page = next(script for script in PATHS if name in helpers_of(script))
    return f"lessons/{page}.html#{line_id(name, line)}"


def where(lesson: str, edit: dict) -> tuple[str, str]:
    """Where a bug is: page and line, and the definition that it changes."""
    name = Path(edit["file"]).stem if "file" in edit else lesson
    before, _, _ = source(name).partition(edit["old"])
    line = before.count("\n") + 1
    around = ""  # the names of the class and the function around this line
    nodes = ast.parse(source(name)).body
    while inside := [n for n in nodes if n.lineno <= line <= n.end_lineno]:
        if not hasattr(inside[0], "name"):
            break
        around += f".{inside[0].name}"
        nodes = inside[0].body
    return place(lesson, name, line), around.removeprefix(".")


# Pieces of pages


def raw(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def section(title: str, identity: str, *children) -> nodes.section:
    return nodes.section("", nodes.title(title, title), *children, ids=[identity])


def block(lines: list[str], name: str) -> str:
    text = "\n".join(lines)
    return f'<div class="highlight {name}"><pre tabindex="0">{text}\n</pre></div>'


def diff_of(edit: dict) -> nodes.literal_block:
    old, new = (edit[word].splitlines() for word in ("old", "new"))
    changed = [*difflib.unified_diff(old, new, n=len(old), lineterm="")][3:]
    text = "\n".join(f"{line[0]} {line[1:]}" for line in changed)
    return nodes.literal_block("", text, language="diff")


def as_html(text: str) -> str:
    """A line of a bug: `code`, and addresses that can be followed."""
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text, quote=False))
    address = r"github\.com/[\w./-]+\w"
    return re.sub(address, r'<a href="https://\g<0>">\g<0></a>', text)


# A lesson's page


def parts_of(lines: list[str]) -> list[tuple[str, str, int, int]]:
    """(mark, title, first line, last line) of each part. Line numbers begin at 1."""
    marks = [("====", "The lesson in words, and its imports", 1)]
    for number, line in enumerate(lines, 1):
        if match := re.match(r"# (====|----) (.*)", line):
            marks.append((*match.groups(), number))
    ends = [number - 1 for *_, number in marks[1:]] + [len(lines)]
    return [(*mark, end) for mark, end in zip(marks, ends)]


def line_id(name: str, line: int) -> str:
    """Of a line on a page; a page has the lines of a script and of its helpers."""
    return f"L{line}" if name in PATHS else f"{name}-L{line}"


def numbered_code(name: str) -> list[str]:
    """The lines as HTML, with numbers that lead to the file in the repository."""
    base = f"{REPOSITORY}/blob/{COMMIT}/{path_of(name).relative_to(ROOT)}"
    lexer, formatter = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    numbered = []
    for n, line in enumerate(highlight(source(name), lexer, formatter).splitlines(), 1):
        here = line_id(name, n)
        link = f"{base}#L{n}" if REPOSITORY else f"#{here}"
        number = f'<a class="linenos" id="{here}" href="{link}">{n:4}</a>'
        numbered.append(f"{number}  {line}")
    return numbered


def linked_output(lesson: str) -> list[str]:
    """What the lesson printed, a section's title linked to the line that prints it."""
    places = {}  # pattern of a title → id of a line
    for name in [lesson, *helpers_of(lesson)]:
        text = source(name)
        title = r'(?:report\.section\(\s*f?|title = )"(.*?)(?:\\n)?"'
        for match in re.finditer(title, text):
            pattern = re.sub(r"\\\{.*?\\\}", ".*", re.escape(match[1]))
            number = text.count("\n", 0, match.start()) + 1
            places[rf"\d+  {pattern}"] = line_id(name, number)
    shown = []
    for line in recorded(lesson)[1].splitlines():
        found = [place for title, place in places.items() if re.match(title, line)]
        line = html.escape(line)
        shown.append(f'<a href="#{found[0]}">{line}</a>' if found else line)
    return shown


def lesson_page(docname: str, lesson: str) -> list[nodes.Node]:
    command = nodes.literal_block("", recorded(lesson)[0], language="console")
    output = raw(block(linked_output(lesson), "lesson-output"))
    parts = [section("What it prints", "what-it-prints", command, output)]
    parts[0]["classes"] = ["prints"]
    lines = numbered_code(lesson)
    for mark, title, first, last in parts_of(source(lesson).splitlines()):
        code = block(lines[first - 1 : last], "lesson-code")
        if title.startswith(("CARRIED", "MEASURE")):
            about = f"{last - first + 1} lines; skip them on a first reading"
            code = f"<details><summary>{about}</summary>{code}</details>"
        part = section(title, f"line-{first}", raw(code))
        if mark == "====":
            parts.append(part)
        else:
            parts[-1] += part
    for name in helpers_of(lesson):
        code = raw(block(numbered_code(name), "lesson-code"))
        parts.append(section(f"Helper: {name}", name, code))
    return parts


# The page of bugs


def bug(lesson: str, name: str, edit: dict) -> nodes.section:
    link, target = where(lesson, edit)
    at = f'<a href="{link}"><code>{target}</code></a>'
    what = raw(f"<p>{as_html(edit['what'])}, in {at}:</p>")
    command = " ".join(["python tools/bug.py", lesson[:2], name])
    rows = [f"<dt>run it</dt><dd><code>{command}</code></dd>"]
    for word in ("symptom", "why", "reported"):
        rows.append(f"<dt>{word}</dt><dd>{as_html(edit[word])}</dd>")
    if "audit" in edit:
        link = '<a href="audit.html"><code>tools/audit.py</code></a>'
        rows.append(f"<dt>audit</dt><dd>{link} reports it as “{edit['audit']} …”</dd>")
    told = raw(f'<dl class="bug">{"".join(rows)}</dl>')
    title = f"{lesson[:2]} {name}: {edit['what'].replace('`', '')}"
    return section(title, bug_id(lesson, name), what, diff_of(edit), told)


def bug_id(lesson: str, name: str) -> str:
    return f"bug-{lesson[:2]}-{name}"


def by_symptom() -> nodes.section:
    """For someone who has a bug: what one sees → the bugs that look like it."""
    groups = {symptom: [] for symptom in SYMPTOMS}
    for lesson in PATHS:
        for name, edit in bugs_of(lesson).items():
            link = f'<a href="#{bug_id(lesson, name)}">{lesson[:2]} {name}</a>'
            line = f"<li>{link}: {as_html(edit['symptom'])}</li>"
            for symptom, words in SYMPTOMS.items():
                if re.search(words, edit["symptom"]):
                    groups[symptom].append(line)
    text = ""
    for symptom, lines in groups.items():
        about = f"{html.escape(symptom)} ({len(lines)})"
        items = f"<ul>{''.join(lines)}</ul>"
        text += f'<details class="symptom"><summary>{about}</summary>{items}</details>'
    return section("By symptom", "by-symptom", raw(text))


def bugs_page(docname: str) -> list[nodes.Node]:
    pages = [by_symptom()]
    for lesson in PATHS:
        bugs = [bug(lesson, name, edit) for name, edit in bugs_of(lesson).items()]
        title = f"Lesson {lesson[:2]}: {len(bugs)} bugs"
        pages.append(section(title, f"lesson-{lesson[:2]}", *bugs))
    return pages


# The page of differences: what a function edits in a model

# Function that edits → name of what it edits → what made that.
EDITED = {
    "tp_mlp": {"mlp": "MLP.__init__"},
    "parallelize_layer": {
        "attn": "Attention.__init__",
        "core": "CoreAttention.__init__",
        "layer": "DecoderLayer.__init__",
    },
    "split_sequence": {
        "self_attn": "parallelize_layer",
        "o_proj": "RowParallelLinear.__init__",
        "mlp": "tp_mlp",
        "down_proj": "RowParallelLinear.__init__",
        "layer": "DecoderLayer.__init__",
    },
    "sp_transformer": {
        "embed_tokens": "VocabParallelEmbedding.__init__",
        "model": "vocab_transformer",
    },
}
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def home_of(target: str) -> tuple[str, ast.AST]:
    """A definition, and the lesson that introduces it: later ones carry it over."""
    for name in PATHS:
        if node := find(name, target):
            return name, node
    raise ValueError(f"{target} is not defined in any lesson")


def replaced(node: ast.AST) -> dict[tuple, ast.Assign]:
    """The statements of a function that set an attribute: x.a.b = … → (a, b)."""
    found = {}
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute):
            *_, owner, name = ast.unparse(each.targets[0]).split(".")
            found[owner, name] = each
    return found


def edits(docname: str, target: str) -> list[nodes.Node]:
    """Two columns: each line with which a function edits a model, and the old line."""
    home, node = home_of(target)
    rows = []
    for (owner, name), after in replaced(node).items():
        made, maker = home_of(EDITED[target][owner])
        lines = {name: line for (_, name), line in replaced(maker).items()}
        rows.append((code_of(made, lines[name]), code_of(home, after)))
    return [two_columns("before", target, rows)]


def pair(docname: str, left: str, right: str) -> list[nodes.Node]:
    """Two columns: two definitions, without their docstrings."""
    row = code_of(*home_of(left)), code_of(*home_of(right))
    return [two_columns(left, right, [row])]


def code_of(name: str, node: ast.AST) -> str:
    """The lines of a statement or a definition, as HTML, below a link to the page."""
    lines = source(name).splitlines()[node.lineno - 1 : node.end_lineno]
    if isinstance(node, DEFINITIONS) and ast.get_docstring(node):
        doc = node.body[0]
        del lines[doc.lineno - node.lineno : doc.end_lineno - node.lineno + 1]
    text = textwrap.dedent("\n".join(lines))
    code = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True))
    link = f'<a href="{place(name, name, node.lineno)}">{name[:2]}:{node.lineno}</a>'
    return f'<div class="highlight">{link}<pre tabindex="0">{code}</pre></div>'


def two_columns(left: str, right: str, rows: list[tuple[str, str]]) -> nodes.raw:
    cells = "".join(f"<div>{a}</div><div>{b}</div>" for a, b in rows)
    head = f"<div><code>{left}</code></div><div><code>{right}</code></div>"
    return raw(f'<div class="beside">{head}{cells}</div>')


# Players and slides


def player(docname: str, name: str, stops: str = "") -> list[nodes.Node]:
    """stops: on a slide, the steps to stop at, such as 1,3,7; otherwise all of them."""
    recording, script = f"recordings/{name}.json", "player/tp-player.js"
    for needed in (recording, script):
        if not (DOCS / "_static" / needed).exists():
            raise ValueError(f"there is no docs/_static/{needed}")
    static = "../" * docname.count("/") + "_static"
    alone = f'<a href="{static}/player/index.html?play={name}">This player alone</a>'
    once = " autoplay" if docname == "index" else ""  # the front page moves by itself
    chosen = f' steps="{stops}"' if stops else ""
    text = (
        f'<tp-player src="{static}/{recording}"{once}{chosen}></tp-player>'
        f'<script type="module" src="{static}/{script}"></script>'
        f'<p class="alone">{alone}</p>'
    )
    steps = json.loads((DOCS / "_static" / recording).read_text("utf-8"))["events"]
    numbers = [int(stop) for stop in stops.split(",") if stop] or [*range(len(steps))]
    if numbers != sorted(set(numbers)) or numbers[-1] > len(steps):
        raise ValueError(f"{name} has {len(steps)} steps, in order; not {stops}")
    if docname in SLIDES:  # a fragment per step: the player follows reveal.js
        text += '<span class="fragment"></span>' * (len(numbers) - 1)
    return [raw(text)]


def widget(docname: str, kind: str) -> list[nodes.Node]:
    """A small calculator with the planner's formulas."""
    static = "../" * docname.count("/") + "_static"
    text = (
        f'<tp-widget kind="{kind}"></tp-widget>'
        f'<script type="module" src="{static}/planner/widgets.js"></script>'
    )
    return [raw(text)]


def lesson_output(docname: str, lesson: str, number: str) -> list[nodes.Node]:
    sections = re.split(r"\n\n(?=\d+  |PASS)", recorded(lesson)[1])
    (text,) = [each for each in sections if each.startswith(f"{number}  ")]
    return [nodes.literal_block("", text, language="plaintext", linenos=False)]


def edit(docname: str, lesson: str, name: str) -> list[nodes.Node]:
    """A bug's diff, on a slide: a short one with three lines around it."""
    bug = bugs_of(lesson)[name]
    if len(bug["old"].splitlines()) > FEW:
        return [diff_of(bug)]
    text = source(Path(bug["file"]).stem if "file" in bug else lesson)
    before, _, after = text.partition(bug["old"])
    above = before.splitlines()[-AROUND:]
    below = after.splitlines()[:AROUND]
    whole = {}
    for word in ("old", "new"):
        whole[word] = "\n".join([*above, *bug[word].splitlines(), *below])
    return [diff_of(whole)]


def symptom(docname: str, lesson: str, name: str) -> list[nodes.Node]:
    bug = bugs_of(lesson)[name]
    return [nodes.paragraph("", f"Symptom: {bug['symptom']}. Why: {bug['why']}.")]


def picture(docname: str, lesson: str, place: str, number="1") -> list[nodes.Node]:
    """A picture of a section of the lesson's notebook, counted from 1."""
    cells = cells_of(lesson)
    describe_pictures(cells)
    found = []
    section = ""
    for cell in cells:
        if match := re.search(r"^## (\d+) ", "".join(cell["source"]), re.M):
            section = match[1]
        for output in cell.get("outputs", []) if section == place else []:
            if "image/png" in output.get("data", {}):
                alt = cell["metadata"]["mystnb"]["image"]["alt"]
                data = output["data"]["image/png"].replace("\n", "")
                found.append((html.escape(alt), data))
    if not 1 <= int(number) <= len(found):
        raise ValueError(f"section {place} of {lesson} has {len(found)} pictures")
    alt, data = found[int(number) - 1]
    return [raw(f'<img alt="{alt}" src="data:image/png;base64,{data}">')]


def exercises(docname: str, lesson: str) -> list[nodes.Node]:
    text = "\n".join("".join(cell["source"]) for cell in cells_of(lesson))
    names = re.findall(r"^\*\*\d\. (.*?)\.?\*\*", text, re.M)
    items = [nodes.list_item("", nodes.paragraph("", name)) for name in names]
    return [nodes.enumerated_list("", *items, enumtype="arabic")]


# Notebooks


def plain(markdown: str) -> str:
    """Text without marks, folded parts and line ends."""
    text = re.sub(r"<details>.*?</details>", "", markdown, flags=re.S)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*`#]|<[^>]*>", "", text).split())


def describe_pictures(cells: list[dict]) -> None:
    """Each picture's alt text: the question of its section, and the text next to it:
    the text below, or the text above if code follows."""
    question = above = ""
    for cell, following in zip(cells, [*cells[1:], cells[0]]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if match := re.search(r"^## \d* ?(.*)", text, re.M):
                question = plain(match[1])
            above = plain(text)
        elif any("image/png" in each.get("data", {}) for each in cell["outputs"]):
            beside = above
            if following["cell_type"] == "markdown":
                beside = plain("".join(following["source"])) or above
            alt = f"Picture to “{question}” {' '.join(beside.split()[:40])}"
            cell["metadata"]["mystnb"] = {"image": {"alt": alt}}


def add_players(cells: list[dict], number: str) -> None:
    """Below the text that begins the section that each belongs to."""
    for name, (notebook, place) in PLAYERS.items():
        if notebook == number:
            begins = (c for c in cells if c["source"][0].startswith(f"## {place} "))
            next(begins)["source"].append(f"\n\n```{{tp-player}} {name}\n```")


def write_attachments(cells: list[dict], stem: str, folder: Path) -> None:
    """The pictures attached to texts become files, which is what Sphinx can show."""
    for cell in cells:
        for name, data in cell.pop("attachments", {}).items():
            png = base64.b64decode(data["image/png"])
            (folder / f"{stem}-{name}").write_bytes(png)
            link = f"attachment:{name}"
            lines = [line.replace(link, f"{stem}-{name}") for line in cell["source"]]
            cell["source"] = lines


def fold_long_outputs(cells: list[dict]) -> None:
    """What is longer than a screen is folded, and code of a lesson above 40 lines."""
    for cell in cells:
        outputs = cell.get("outputs", [])
        texts = ["".join(output.get("text", "")) for output in outputs]
        shown = [output.get("data", {}).get("text/markdown", "") for output in outputs]
        code = "".join("".join(text) for text in shown)  # ranks.code writes Markdown
        # A browser leaves out an empty first line.
        is_long = len("".join(texts).strip().splitlines()) > SCREEN
        if is_long or len(code.splitlines()) > CODE + 2:  # 2: ```python and ```
            cell["metadata"].setdefault("tags", []).append("hide-output")


def write_notebooks(app) -> None:
    """notebooks/*.ipynb → docs/notebooks/, which git ignores, for Sphinx to read."""
    folder = DOCS / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("[0-9]*_*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        describe_pictures(notebook["cells"])
        add_players(notebook["cells"], path.name[:2])
        fold_long_outputs(notebook["cells"])
        write_attachments(notebook["cells"], path.stem, folder)
        text = on_site(json.dumps(notebook), path.parent, folder)
        copy = folder / path.name
        if (
            not copy.exists() or copy.read_text("utf-8") != text
        ):  # otherwise it is unchanged
            copy.write_text(text, "utf-8")


def on_site(text: str, here: Path, there: Path) -> str:
    """Text whose links work in a file of the folder `here` of a clone, with links that
    work on the page of the site that it becomes, in the folder `there`."""

    def page_of(match) -> str:
        path = (here / match[2]).resolve()
        shown_with = [name for name in PATHS if path.stem in helpers_of(name)]
        if path.suffix == ".ipynb" and path.is_file():
            path = DOCS / "notebooks" / path.name
        elif path in PATHS.values():
            path = DOCS / "lessons" / f"{path.stem}.md"
        elif path in HELPERS.values() and shown_with:
            path = DOCS / "lessons" / f"{shown_with[0]}.md"
        elif path in BUGS:
            path = DOCS / "bugs.md"
        return match[1] + os.path.relpath(path, there)

    links = r"(\]\(|^\[.*\]: )([\w./]+\.(?:py|ipynb|md))\b"
    return re.sub(links, page_of, text, flags=re.M)


def lead_to_pages(app, docname: str, content: list[str]) -> None:
    folder = (DOCS / docname).parent
    if folder.name != "notebooks":  # write_notebooks has done it
        content[0] = on_site(content[0], folder, folder)


def clone(docname: str) -> list:
    """How to get the course, if the site knows where it is."""
    if not REPOSITORY:
        return []
    text = f"git clone {REPOSITORY}\ncd {REPOSITORY.rpartition('/')[2]}"
    return [nodes.literal_block(text, text, language="bash")]


def leave_out_icons(app, failed) -> None:
    """The theme's script of icons is 1.6 MB. Its stylesheet has them as a font, too."""
    script = r"\s*<script [^>]*/fontawesome\.js[^>]*></script>"
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text("utf-8")
        without = re.sub(script, "", text)
        if without != text:
            page.write_text(without, "utf-8")
    for left in Path(app.outdir).rglob("fontawesome.js*"):
        left.unlink()


def line_role(name, rawtext, text, lineno, inliner, options=None, content=None):
    """{line}`words <01_naive_mlp_tp Report.expect>`: a link to where that begins."""
    words, lesson, target = re.fullmatch(r"(.+) <(\S+) (\S+)>", text).groups()
    docname = inliner.document.settings.env.docname
    uri = "../" * docname.count("/") + place_of(lesson, target)
    return [nodes.reference(rawtext, words, refuri=uri)], []


def directive(build, arguments: int, optional: int = 0):
    """A directive that puts into a page the nodes that build(docname, …) returns."""

    class Built(SphinxDirective):
        required_arguments = arguments
        optional_arguments = optional

        def run(self):
            for path in [*PATHS.values(), *ROOT.glob("notebooks/*.ipynb"), *BUGS]:
                self.env.note_dependency(str(path))
            try:
                return build(self.env.docname, *self.arguments)
            except (LookupError, ValueError) as problem:
                raise self.error(f"{self.name}: {problem!r}") from problem

    return Built


def mark_short_cells(app, doctree, docname: str) -> None:
    """Cells with a few characters: on a narrow screen they need no more room."""
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) <= 10:
            cell["classes"].append("short")


def setup(app):
    app.add_directive("lesson", directive(lesson_page, 1))
    app.add_directive("clone", directive(clone, 0))
    app.add_directive("bugs", directive(bugs_page, 0))
    app.add_directive("edits", directive(edits, 1))
    app.add_directive("pair", directive(pair, 2))
    app.add_directive("tp-player", directive(player, 1, optional=1))
    app.add_directive("tp-widget", directive(widget, 1))
    app.add_directive("lesson-output", directive(lesson_output, 2))
    app.add_directive("edit", directive(edit, 2))
    app.add_directive("symptom", directive(symptom, 2))
    app.add_directive("picture", directive(picture, 2, optional=1))
    app.add_role("line", line_role)
    app.add_directive("exercises", directive(exercises, 1))
    app.connect("doctree-resolved", mark_short_cells)
    if Path(app.srcdir) == DOCS:  # not for the slides
        app.connect("builder-inited", write_notebooks)
        app.connect("source-read", lead_to_pages)
        app.connect("build-finished", leave_out_icons)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
