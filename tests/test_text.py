"""The text of the lessons and of beyond/: their anatomy, and code that is plain.

CONTRIBUTING.md states the limits below; they are not today's counts. Where a limit is
left unmet on purpose, WAIVED says which and why.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter

import jobs
import pytest

PARTS = ["HEAD", "NEW", "RUN", "CARRIED OVER", "MEASURE"]
BANNER = re.compile(r"# ==== (NEW|RUN|CARRIED OVER|MEASURE)\b ?(.*)")
OWN = ["NEW", "RUN", "MEASURE"]  # whose code is looked at; others are copies
LINES = {"NEW": 310, "RUN": 340, "MEASURE": 360}
LINES_OF = {"05": {"NEW": 350, "RUN": 370, "MEASURE": 360}}
WHOLE = {"00": 920, "01": 910, "02": 1120, "03": 1500, "04": 1700, "05": 2000}
OF_A_SCRIPT = 700  # of a whole file in beyond/
CEILING = 7 / 6  # a limit that is waived may be exceeded by a sixth
CEILING_OF_MEASURE = 1.5
# (file, part): limits that are waived, up to the ceiling, each with its reason. A test
# fails for an entry that is not needed any more. No count is stated here.
WAIVED = {
    ("00_collectives", "file"): "common mistakes are shown where calls are explained",
    ("01_naive_mlp_tp", "file"): "gradients, output and memory of four splits and DP",
    ("02_transformer_tp", "file"): "what is carried over is a whole decoder, edited",
    ("03_vocab_parallel", "file"): "the same, and a vocabulary",
    ("04_sequence_parallel", "file"): "the same, and a sequence",
    ("02_transformer_tp", "RUN"): "terms of the bytes saved for backward are printed",
    ("03_vocab_parallel", "RUN"): "six hard cases, and backward as a finite difference",
    ("04_sequence_parallel", "RUN"): "the terms of 34·X + 5·A, measured and printed",
    ("10_checkpoints", "RUN"): "four ways in which a save is interrupted",
    ("14_schedules", "RUN"): "each stage's steps are drawn in time",
    ("15_zero", "RUN"): "four kinds of sharding, each with bytes held and sent",
    ("", "MEASURE"): "a failure says its cause and its ranks, a run that raises is a "
    "column, a wrong flag is one line: asked for by readers, in every lesson",
    ("05_3d_parallel", "NEW"): "messages between stages, and one step on three axes",
    ("05_3d_parallel", "RUN"): "three axes have their flags, checks and formulas",
    ("05_3d_parallel", "file"): "both, and four lessons that it carries over",
}
# At most, in one part of one file.
IDIOMS = {
    "a, b = x, y": 3,
    "starred": 3,
    "dicts merged with |": 3,
    "walrus": 0,
    "comparison as a number": 0,
    "comprehension in a comprehension": 0,
}
COMMENTS = 7  # at least, per 100 lines of RUN
FUNCTION = {"lines": 50, "local names": 20, "comprehensions and lambdas": 4}
LOOPS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
# Other people's code imports these (CONTRIBUTING.md).
PUBLIC = {
    "00": "all_reduce all_gather reduce_scatter broadcast all_to_all shard "
    "ring_all_reduce",
    "01": "CopyToTP ReduceFromTP ColumnParallelLinear RowParallelLinear MLP tp_mlp",
    "02": "Transformer tp_transformer",
    "03": "VocabParallelEmbedding vocab_parallel_cross_entropy",
    "04": "sp_transformer",
    "05": "schedule",
}
FILES = [*jobs.LESSONS, *jobs.BEYOND]


class Text:
    """A lesson or script as text: which part each line is in, and its syntax tree."""

    def __init__(self, name: str):
        self.number = name[:2]
        self.text = jobs.PATHS[name].read_text("utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse("\n".join(self.lines))
        self.banners = []  # (part, the rest of its line)
        self.part_of_line = []
        for line in self.lines:
            if match := BANNER.match(line):
                self.banners.append(match.groups())
            self.part_of_line.append(self.banners[-1][0] if self.banners else "HEAD")

    def part_of(self, node: ast.AST) -> str:
        return self.part_of_line[node.lineno - 1]

    def lines_of(self, part: str) -> list[str]:
        pairs = zip(self.lines, self.part_of_line)
        return [line for line, its_part in pairs if its_part == part]


TEXTS = {name: Text(name) for name in FILES}
each_file = pytest.mark.parametrize("name", FILES)


@each_file
def test_banners(name):
    text = TEXTS[name]
    (first, new), *others = text.banners
    assert first == "NEW" and re.fullmatch(rf"in {text.number}: \S.*", new)
    guard = text.text.partition("\nif __name__ ==")[2]
    assert re.search(r"^    (lesson00\.)?launch\(main, \w+, parser\)\n\Z", guard, re.M)
    if name in jobs.BEYOND:  # it imports the lessons, so nothing is copied
        assert others == [("RUN", "")]
        return
    carried = [rest for part, rest in others if part == "CARRIED OVER"]
    sources = [rest.split()[1].rstrip(",") for rest in carried]
    last = ("MEASURE", ", the same in every lesson: it counts, compares and prints")
    assert others == [("RUN", ""), *(("CARRIED OVER", rest) for rest in carried), last]
    assert sources == sorted(set(sources)), "earlier lessons, in order"
    assert carried == [f"from {source}, unchanged" for source in sources]


@each_file
def test_what_is_not_for_a_first_reading_is_folded(name):
    """Every definition from CARRIED OVER on is in a region, and no other."""
    text = TEXTS[name]
    folded = set()
    is_open = False
    for number, line in enumerate(text.lines, 1):
        if re.match(r"# (end)?region\b", line):
            assert is_open == line.startswith("# endregion"), f"line {number}"
            is_open = not is_open
        elif is_open:
            folded.add(number)
    assert not is_open
    for node in text.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            later = text.part_of(node) in ("CARRIED OVER", "MEASURE")
            assert (node.lineno in folded) == later, node.name


def test_copies_are_as_the_tool_writes_them():
    """CARRIED OVER and MEASURE of every file are built from the homes."""
    command = [sys.executable, "tools/carry.py", "--check"]
    done = subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("home, old, new, says", [
    ("01_naive_mlp_tp", "def values_of(", "def fields_of(", "values_of"),
    ("00_collectives", "    def section(", "    def chapter(", "report.section"),
])  # fmt: skip
def test_a_renamed_definition_is_not_dropped(tmp_path, home, old, new, says):
    """Who renames one in its home alone is told, and no file is written."""
    (tmp_path / "tools").mkdir()
    shutil.copy(jobs.ROOT / "tools" / "carry.py", tmp_path / "tools")
    for name in jobs.LESSONS:
        shutil.copy(jobs.PATHS[name], tmp_path)
    path = tmp_path / f"{home}.py"
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), "utf-8")
    before = {path: path.read_text("utf-8") for path in tmp_path.glob("*.py")}
    command = [sys.executable, "tools/carry.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{says} is defined nowhere" in done.stdout and done.stderr == ""
    assert before == {path: path.read_text("utf-8") for path in before}


def too_long(name: str) -> dict[str, float]:
    """Parts of a file with more lines than CONTRIBUTING.md allows: how many times."""
    text = TEXTS[name]
    limits = LINES_OF.get(text.number, LINES)
    whole = OF_A_SCRIPT if name in jobs.BEYOND else WHOLE[text.number]
    count = Counter(text.part_of_line)
    guard = text.text.partition("\nif __name__ ==")[2]
    count["MEASURE"] -= guard.count("\n") + 1 if count["MEASURE"] else 0
    times = {part: count[part] / limit for part, limit in limits.items()}
    # MEASURE is looked at by itself: it is the same in all files.
    times["file"] = (len(text.lines) - max(0, count["MEASURE"] - 360)) / whole
    return {part: share for part, share in times.items() if share > 1}


@each_file
def test_lines_of_parts(name):
    """Within the limits, or waived: then up to the ceiling."""
    for part, times in too_long(name).items():
        assert times <= (CEILING_OF_MEASURE if part == "MEASURE" else CEILING)
        assert {(name, part), ("", part)} & WAIVED.keys(), (part, times)


def test_waivers_are_needed():
    for name, part in WAIVED:
        assert part in too_long(name or FILES[0]), f"{name}, {part}: no longer needed"


def idioms(text: Text) -> dict[str, dict[str, list[int]]]:
    """Part → idiom → lines where it is used. Annotations do not count."""
    found = {part: {idiom: [] for idiom in IDIOMS} for part in PARTS}
    annotations = set()
    for node in ast.walk(text.tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                annotations.update(map(id, ast.walk(getattr(node, field))))
    for node in ast.walk(text.tree):
        if hasattr(node, "lineno") and id(node) not in annotations:
            for idiom in IDIOMS:
                if is_idiom(node, idiom):
                    found[text.part_of(node)][idiom].append(node.lineno)
    return found


def is_idiom(node: ast.AST, idiom: str) -> bool:
    if idiom == "a, b = x, y":
        targets = getattr(node, "targets", [None])
        is_pair = isinstance(targets[0], ast.Tuple)
        return is_pair and isinstance(node.value, ast.Tuple)
    if idiom == "starred":
        return isinstance(node, ast.Starred)
    if idiom == "dicts merged with |":
        is_binary = isinstance(node, (ast.BinOp, ast.AugAssign))
        return is_binary and isinstance(node.op, ast.BitOr)
    if idiom == "walrus":
        return isinstance(node, ast.NamedExpr)
    if idiom == "comparison as a number":
        is_sum = isinstance(node, ast.BinOp)
        if not is_sum or not isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
            return False
        sides = node.left, node.right
        return any(isinstance(side, (ast.Compare, ast.BoolOp)) for side in sides)
    inner = [n for n in ast.walk(node) if isinstance(n, LOOPS) and n is not node]
    return isinstance(node, LOOPS) and bool(inner or len(node.generators) > 1)


@each_file
def test_code_is_plain(name):
    text = TEXTS[name]
    found = idioms(text)
    for part in OWN:
        for idiom, most in IDIOMS.items():
            lines = found[part][idiom]
            assert len(lines) <= most, (part, idiom, lines)
    lines = text.lines_of("RUN")
    comments = [line for line in lines if re.search(r"^\s*#|\s\s# ", line)]
    assert 100 * len(comments) // len(lines) >= COMMENTS


def measure(function: ast.FunctionDef) -> dict[str, int]:
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        doc = function.body[0]
        lines -= doc.end_lineno - doc.lineno + 1
    inside = list(ast.walk(function))
    names = {n.arg for n in inside if isinstance(n, ast.arg)}
    for node in inside:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    loops = [n for n in inside if isinstance(n, (*LOOPS, ast.Lambda))]
    return dict(zip(FUNCTION, (lines, len(names), len(loops))))


@each_file
def test_functions_are_short(name):
    text = TEXTS[name]
    for node in ast.walk(text.tree):
        if isinstance(node, ast.FunctionDef) and text.part_of(node) in OWN:
            for what, count in measure(node).items():
                assert count <= FUNCTION[what], (node.name, what, count)


@each_file
def test_imports(name):
    """torch and the standard library. 04 may use transformers, where it is needed. A
    script of beyond/ imports the lessons, by their names."""
    text = TEXTS[name]
    known = {"torch", *sys.stdlib_module_names} - {"importlib"}
    foreign = set()
    for node in ast.walk(text.tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        foreign.update(
            module for module in modules if module.split(".")[0] not in known
        )
    optional = {"transformers", "importlib.util"} if text.number == "04" else set()
    helpers = {path.stem for path in (jobs.ROOT / "beyond").glob("[a-z]*.py")}
    assert foreign <= (helpers if name in jobs.BEYOND else optional)
    lines = [
        line.strip() for line in text.lines if re.search(r"\bcourse import\b", line)
    ]
    assert all(
        re.fullmatch(r"from course import lesson0[\d, leson]+", x) for x in lines
    )
    assert not re.search(r"^(import|from) transformers", "\n".join(text.lines), re.M)


@pytest.mark.parametrize("name", jobs.BEYOND)
def test_a_script_says_when_its_repository_is_missing(name):
    """In the same words; test_refusals.py tries one of them."""
    block = re.compile(
        r"^    from course import lesson00.*\n"
        r"(?:    from \w+ import .*\n)*(except (.*\n    )+.*\n)",
        re.M,
    )
    first, own = (block.search(TEXTS[n].text)[1] for n in (jobs.BEYOND[0], name))
    assert own == first and own.startswith("except ModuleNotFoundError")


@each_file
def test_docstrings(name):
    """The lesson's own names its notebook; every public definition of NEW has one."""
    text = TEXTS[name]
    doc = ast.get_docstring(text.tree)
    path = jobs.PATHS[name].relative_to(jobs.ROOT)
    assert re.search(rf"torchrun --standalone --nproc_per_node=\d {path}", doc)
    for part in ("What you will see", "Shapes:", "Sources:"):
        assert part in doc, part
    assert re.search(rf"\bnotebooks?[ /]{text.number}", doc)
    for node in text.tree.body:
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if is_definition and text.part_of(node) == "NEW":
            assert ast.get_docstring(node), f"{node.name} has no docstring"


# Letter → its one meaning, as legends put it. A lowercase letter that is not here is a
# rank's slice of the uppercase one: "s = S/T positions".
MEANINGS = {
    "B": "batch", "S": "sequence", "D": "hidden", "F": "MLP width|the width of the MLP",
    "N": "heads", "H": "head size|heads of size H", "V": "vocabulary", "L": "layers",
    "T": "ranks (in|of) (the|a) TP group|the number of ranks in a group|outer · inner",
    "E": "experts", "R": "ranks that (share|split) the experts", "DP": "replicas",
    "P": "stages|ranks of the pipeline", "M": "micro-batches", "U": "units",
    "Q": "pieces",
    "Y": "B·S·D·e",
    "b": r"rows|B/\(DP·M\) rows|B/M rows|sequences of it on a rank",
    "e": "(the )?bytes per element|of a",
    "X": "B·S·D", "p": "parameter tensors",
    "θ": r"the bytes of|\(2·D·F \+ F \+ D\)·e the bytes",
    "Ψ": "parameters of (a rank|the model)", "ψ": "Ψ/DP of its", "u": "of its largest",
    "w": "of its longest vector", "g": "of a gradient", "o": "of optimizer states",
    "c": "T/K ranks", "r": "one for each|by r|k·t", "t": "b·S", "i": "queries",
    "j": "keys of a block", "n": "N/T", "k": "K/T", "s": "S/[TC] positions",
    "C": "ranks in the CP group", "K": "key/value heads",
    "v": r"V/T\b|⌈V/T⌉ rows",
}  # fmt: skip
# (letter, file): where it has another meaning, and why that stays.
OTHER_MEANINGS = {
    ("n", "00"): "the size of the small vectors",  # before there are heads
    ("K", "13"): "the dims of any matrices",  # C[I, K] of lesson 00
    ("v", "14"): "chunks per rank",  # as in arXiv:2104.04473
    ("k", "16"): "experts per token",  # the field's "top-k"
}


def legend_of(text: str) -> list[tuple[str, str]]:
    """Letters that a legend explains, each with the words that follow it."""
    legend = text.partition("Shapes:")[2].partition("Sources:")[0]
    legend = re.split(r"\n\n|^[A-Z][a-z]+ [a-z ]+:", legend)[0]
    legend = " ".join(legend.split())
    letter = r"(?:(?<=^)|(?<=[,;.:] )|(?<= and )|(?<= In formulas: ))(DP|[A-Za-zθΨψ])"
    return re.findall(rf"{letter}(?: = | is | )([^,;.]+?)(?=[,;.]| and \w |$)", legend)


@each_file
def test_a_letter_has_one_meaning(name):
    """In the legends of all files."""
    doc = ast.get_docstring(TEXTS[name].tree)
    for letter, words in legend_of(doc):
        assert means_the_same(letter, words, name[:2]), (letter, words)


def means_the_same(letter: str, words: str, number: str) -> bool:
    meaning = OTHER_MEANINGS.get((letter, number), MEANINGS.get(letter))
    if meaning is None:  # no letter of a legend, but a word
        return letter in ("a", "A", "f")
    return re.search(meaning, words) is not None


def test_a_second_meaning_is_seen():
    legend = (
        "Shapes: B batch, n parameters of the model, e bytes per element.\n\nSources:"
    )
    pairs = legend_of(legend)
    assert [letter for letter, _ in pairs] == ["B", "n", "e"]
    assert [means_the_same(*pair, "10") for pair in pairs] == [True, False, True]


@each_file
def test_public_names(name):
    text = TEXTS[name]
    names = []
    for node in text.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
    assert set(PUBLIC.get(text.number, "").split()) <= set(names)
    assert len(names) == len(set(names)), "defined once"
    assert "model parallel" not in "\n".join(text.lines).lower(), "say: tensor parallel"


@pytest.mark.parametrize("code, idiom", [
    ("a, b = 1, 2", "a, b = x, y"),
    ("f(*xs)", "starred"),
    ("a = b | c", "dicts merged with |"),
    ("a |= c", "dicts merged with |"),
    ("f(a := 1)", "walrus"),
    ("n = 2 * (a > b)", "comparison as a number"),
    ("[[x for x in y] for y in z]", "comprehension in a comprehension"),
    ("[x for y in z for x in y]", "comprehension in a comprehension"),
])  # fmt: skip
def test_each_idiom_is_seen(code, idiom):
    assert any(is_idiom(node, idiom) for node in ast.walk(ast.parse(code)))
