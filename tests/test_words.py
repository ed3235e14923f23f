"""The words of the course: phrases of our own in place of which the field has a word.

Read are comments and strings of Python files, and what pages and notebooks say. Code,
also in backquotes, is left out.
"""

import io
import json
import re
import tokenize

import jobs

# A phrase as a pattern, and what to write instead.
PHRASES = {
    r"\blosses part(?:ed)?\b|\bpart ways\b": "diverge",
    r"\bkept (?:for|in|until) (?:the )?backward\b": "saved for backward",
    r"\bbytes? (?:a|per) number\b": "bytes per element",
    r"\bnumbers? (?:has|have) e\b": "elements have e bytes",
    r"\b(?:bytes|sent|sends|calls|seconds) in a step\b": "per step",
    r"\bcalls? a (?:step|layer|rank)\b": "calls per step",
    r"\bput together\b": "gathered, unsharded",
    r"\bto the (?:last )?bit\b": "bitwise identical",
    r"\broundings\b": "rounding errors",
    r"\balike\b": "identical, the same",
    r"\bbeside\b": "next to, compared with",
    r"\bwanted\b": "expected, required, requested",
    r"\b(?:nobody|somebody|everybody|no one)\b": "no rank, another rank, every rank",
    r"\bknows? nothing\b": "autograd does not track",
    r"\bwants\b": "requires, expects",
    r"\bin place of\b": "instead of",
    r"\bso (?:many|much) (?:ranks|bytes|steps|tokens)\b": "N ranks",
    r"\bin turn\b": "alternating, one at a time",
    r"\bdeal(?:s|t)? out\b": "distribute, scatter",
    r"\bcolours?\b|\bneighbours?\b|\blearnt\b": "color, neighbor, learned",
    r"\btimes as (?:long|big)\b": "times slower, times as large",
    r"\bwhere \w+ ends\b": "what it costs, or its last value",
    r"; and yet\b|\band yet;": "but",
    r"\banew\b": "again, from scratch",
    r"\bgo on\b": "continue, resume",
}
# (file's name, phrase): where a phrase is the right one, and why.
ALLOWED = {}

ROOT = jobs.ROOT
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "docs/notebooks" not in page.as_posix()]
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CODE = [*jobs.PATHS.values(), *sorted((ROOT / "tools").rglob("*.py"))]
CODE += sorted((ROOT / "notebooks").glob("*.py"))


def without_code(text: str) -> str:
    """Markdown without fenced blocks and code in backquotes, in one line."""
    text = re.sub(r"^```.*?^```", " ", text, flags=re.M | re.S)
    return " ".join(re.sub(r"`[^`\n]*`", " ", text).split())


def sentences_of(source: str) -> str:
    """Comments and strings that have a space, of Python code; each comment joined."""
    found = []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for token in tokens:
        if token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and " " in token.string:
            text = re.sub(r"\{[^{}]*\}", "{}", token.string)  # of an f-string
            found.append(text.strip("\"'"))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT):
            found.append("|")  # code: a phrase does not reach over it
    return without_code(" ".join(found))


def text_of(path) -> str:
    if path.suffix == ".md":
        return without_code(path.read_text("utf-8"))
    if path.suffix == ".py":
        return sentences_of(path.read_text("utf-8"))
    texts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            texts.append(without_code(source))
        elif not source.lstrip().startswith(("!", "%")):
            texts.append(sentences_of(source))
    return " ".join(texts)


def test_phrases():
    found = []
    for path in [*PAGES, *BOOKS, *CODE]:
        text = text_of(path)
        for phrase, better in PHRASES.items():
            if (path.name, phrase) in ALLOWED:
                continue
            for match in re.finditer(phrase, text, re.I):
                around = text[max(0, match.start() - 30) : match.end() + 30]
                found.append(f"{path.relative_to(ROOT)}: …{around}… → {better}")
    assert found == [], "\n".join(found)


def test_comments_strings_and_pages_are_read():
    assert "alike" in sentences_of("x = 1  # all are alike\n")
    assert "alike" in sentences_of("say('all alike')\n")
    assert "alike" not in sentences_of("alike = 1\n")
    assert "alike" not in without_code("so `alike` is\n```\nalike\n```\n")
    assert "whole text" in without_code("whole\ntext")
