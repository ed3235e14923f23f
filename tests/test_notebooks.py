"""The notebooks: live ranks that recover and end, exercises that judge, clean files.

Their text outputs are compared by nbval, their pictures are not: see test_draw.py.
"""

import base64
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace

import jobs
import nbformat
import pytest
import torch.distributed as dist
from jobs import ROOT
from jupyter_client.manager import start_new_kernel
from kernel import held_ports

FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

import ranks  # noqa: E402
import run  # noqa: E402

PATHS = sorted(FOLDER.glob("[0-9]*_*.ipynb"))
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in PATHS}
JAX = "06_the_same_in_jax"  # has no live ranks; its exercises: see test_jax.py
MESH = "05_3d_parallel"
# Their exercises need two axes of two ranks.
ON_FOUR = (MESH, "10_checkpoints", "11_context_parallel", "13_mesh_2d")


def first_run(name: str) -> tuple[str, int]:
    """Of a notebook's first run: the lesson or script, and on how many ranks."""
    command = r"!torchrun --standalone --nproc_per_node=(\d) (?:beyond/)?(\w+)\.py"
    for cell in NOTEBOOKS[name]["cells"]:
        found = re.match(command, "".join(cell["source"]))
        if found:
            return found[2], int(found[1])
    raise LookupError(f"{name} runs nothing")


# Whose code a notebook shows: of its own lesson, or else of the first that it runs.
LESSON = {}
for name in NOTEBOOKS:
    LESSON[name] = name if name in jobs.PATHS else first_run(name)[0]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [
    pytest.param(f"{name}.ipynb", marks=pytest.mark.launches(f"{name}.ipynb", 4))
    for name in sorted(NOTEBOOKS, reverse=True)  # the last ones take longest
])  # fmt: skip
def test_outputs_are_those_committed(name):
    """And when the notebook is closed, its ranks end."""
    if name.startswith(JAX):
        pytest.importorskip("jax", reason="jax is not installed: make setup EXTRA=1")
    done = jobs.result(name, 4)
    assert done.code == 0, done.text[-8000:]
    assert done.left == []
    lesson = LESSON[name.removesuffix(".ipynb")]
    assert lesson in done.data["launched"], "its first run was not in a nursery"


# Live ranks: in one kernel, to the last test that needs them, which kills it.


@pytest.fixture(scope="module")
def kernel():
    """As a notebook has one. Whatever it starts has its mark."""
    mark = uuid.uuid4().hex
    env = os.environ | {jobs.MARK: mark}
    with held_ports() as ports:
        manager, client = start_new_kernel(env=env, cwd=FOLDER)
        assert manager.iopub_port in ports
        yield SimpleNamespace(client=client, pid=manager.provisioner.pid, mark=mark)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    jobs.end(mark)


@pytest.fixture(scope="module")
def cell(kernel):
    """Runs a cell: what the notebook would show below it, an error too."""

    def run(code: str) -> str:
        said = []

        def note(message):
            content = message["content"]
            said.append(
                content.get("text", "") + "\n".join(content.get("traceback", ""))
            )

        kernel.client.execute_interactive(code, timeout=150, output_hook=note)
        return "".join(said)

    started = "live = ranks.start(2, '01_naive_mlp_tp', timeout=4)"
    said = run(f"import ranks; ranks.prepare(); {started}")
    assert all(line.endswith("please wait") for line in said.splitlines()), said
    return run


@pytest.fixture
def px(cell):
    return lambda code: cell(f"%%px\n{code}")


def test_ranks_speak_in_their_order(cell, px):
    late = "import time; time.sleep(0.3 * (1 - rank))\n"
    said = px(late + "print('I am', rank)\nrank + 5")
    assert said == "rank 0  I am 0\n        5\nrank 1  I am 1\n        6\n"
    px("value = torch.tensor([rank + 0.5])")
    assert cell("print([v.item() for v in live['value']])") == "[0.5, 1.5]\n"


TOLD = "(live.folder / 'security/ipcontroller-client.json').read_text()"


def test_the_controller_has_the_ports_that_were_held(cell):
    """Others may take some of those that it finds itself: then `start` hangs."""
    held, _, told = cell(f"print(live.ports)\nprint({TOLD})").partition("\n")
    told = {n for n in json.loads(told).values() if isinstance(n, int)}
    assert len(told) > 5 and told <= {*json.loads(held)}
    for each in ranks.hold_ports(2):  # a server takes one, as ZeroMQ does
        with socket.create_server(("127.0.0.1", each.getsockname()[1])):
            pass


def test_ranks_wait_for_a_controller_that_is_late(cell):
    """An engine that counts its beats ends by itself after 40 seconds without one."""
    log = cell("print((live.folder / f'{ranks.ENGINE}.log').read_text())")
    assert log.count("heartbeat signal from the hub is not enabled") == 2


def test_an_error_has_the_last_words_of_each_process(tmp_path):
    (tmp_path / "engine.log").write_text("started\nno room left\n")
    (tmp_path / "controller.log").write_text("")
    said = ranks.Ranks.last_words(SimpleNamespace(folder=tmp_path))
    assert said == "\nengine: no room left"


def test_a_rank_that_raises(cell, px):
    px("kept = torch.ones(2) + rank\nmlp = tp_mlp(MLP(2, 4), tp_group)")
    said = px("if rank == 1:\n    raise ValueError('out')\nall_reduce(kept, tp_group)")
    waited, raised, _, advice = said.splitlines()
    assert waited.startswith("rank 0: RuntimeError: Timed out waiting 4000ms")
    assert raised == "rank 1: ValueError: out (line 3 of the cell)"
    assert advice.endswith(": live.restart()")
    said = cell("live.restart()")
    assert "rank 1 is not in a collective" in said and "is kept" in said
    said = px("print(all_reduce(kept, tp_group).tolist(), mlp(torch.ones(1, 2)).shape)")
    assert said == "every rank  [3.0, 3.0] torch.Size([1, 2])\n"
    # What its parameters remember of their cuts has the new group, too.
    said = px("print([list(unshard(p, p).shape) for p in mlp.parameters()])")
    assert said == "every rank  [[4, 2], [4], [2, 4], [2]]\n"


SUM = "all_reduce(torch.ones(2), tp_group)"
MISUSED = "all_reduce(torch.ones(2), tp_group, op='max')"
LOST = "not yet: a collective did not complete; after it, run live.restart()"


@pytest.mark.parametrize("claim, starts", [
    (f"{SUM}.sum() == 4", ["every rank  right"]),
    ("rank == 0", ["rank 0  right", "rank 1  not yet:"]),
    (f"{MISUSED} is None", ["every rank  not yet: TypeError: (): incompatible"]),
    ("torch.ones(2) @ torch.ones(3)", ["every rank  not yet: RuntimeError: "]),
    (f"rank == 1 or {SUM} is None", [f"rank 0  {LOST}", "rank 1  right"]),
    (f"rank == 0 or {SUM} is None", ["rank 0  right", f"rank 1  {LOST}"]),
    (f"{SUM} if rank == 0 else {MISUSED}",
     [f"rank 0  {LOST}", "rank 1  not yet: TypeError: "]),
])  # fmt: skip
def test_check_tells_a_wrong_argument_from_a_rank_that_is_not_there(
    cell, px, claim, starts
):
    said = px(f"def claims():\n    yield {claim}, ''\ncheck(claims())").splitlines()
    assert len(said) == len(starts)
    for line, start in zip(said, starts):
        assert line.startswith(start)
        assert ("live.restart()" in line) == (LOST in start)
    if any(LOST in start for start in starts):
        cell("live.restart()")
    assert px(f"print({SUM}.tolist())") == "every rank  [2.0, 2.0]\n"


@pytest.mark.parametrize("hang", ["time.sleep(600)", "while True: pass"])
def test_a_rank_that_hangs(kernel, cell, px, hang):
    """The user stops the cell: Jupyter interrupts the kernel's process group."""
    px("import os, signal, time\nkept = torch.full((2,), rank + 1.0)")
    stop = f"time.sleep(1); os.killpg({kernel.pid}, signal.SIGINT)"
    said = px(f"if rank == 1:\n    {stop}\n    {hang}")
    assert said == "interrupted; to get the ranks back, run live.restart()\n"
    start = time.time()
    assert "is kept" in cell("live.restart()") and time.time() - start < 20
    said = px("print(all_reduce(kept, tp_group).tolist())")
    assert said == "every rank  [3.0, 3.0]\n"


CURED = """
from bugs.lesson01 import BUGS


def codes():
    places = [lesson, *(x for x in vars(lesson).values() if isinstance(x, type))]
    found = {}
    for place in places:
        for name, x in vars(place).items():
            x = getattr(x, "__func__", x)
            found[place.__name__, name] = getattr(x, "__code__", None)
    return found


good = codes()
for name in BUGS:
    with broken(name):
        assert codes() != good, name
    assert codes() == good, name
print("cured", len(BUGS) > 0)
"""


def test_broken_is_cured_again(cell, px):
    assert px(CURED) == "every rank  cured True\n"
    said = cell("ranks.edit('f')").splitlines()
    assert said[1:] == [
        "-         return all_reduce(partial_grad, ctx.tp_group), None",
        "+         return partial_grad, None",
    ]


WAITS = "in call 3 of group tp, all_reduce of [2]"


@pytest.mark.parametrize("statuses, said", [
    ([WAITS, "in no call"], "rank 1 is not in a collective, while ranks [0] are"),
    (["in no call", WAITS, "in no call"], "ranks [0, 2] are not in a collective"),
    ([WAITS, WAITS], "all ranks have entered the same call"),
    ([WAITS, WAITS.replace("2", "4")], "ranks [0, 1] are waiting in different calls"),
])  # fmt: skip
def test_who_is_missing(statuses, said):
    assert ranks.who_is_missing(statuses).startswith(said)


def test_numbers_of_a_run():
    """Rows are what was printed; a ledger has also the rows that were not."""
    rows = [{"section": 1, "run": "TP", "bytes": "1,024", "ok": "ok"}]
    texts = {
        "bytes: TP + SP forward all-gather tp": "1,024 bytes, the formula gives 1,024",
        "calls: TP + SP forward all-gather tp": "2.5 calls per step",
        "bytes: ring, TP": "3 bytes",
    }
    checks = [{"name": name, "text": text} for name, text in texts.items()]
    run = {"rows": rows, "checks": checks, "size": {}}
    found = [{"section": 1, "run": "TP", "bytes": 1024, "ok": "ok"}]
    assert ranks.table(run, "run", "bytes") == found
    call = ("TP + SP", "forward", "all-gather", "tp")
    assert ranks.ledger(run, "bytes") == {call: 1024}
    assert ranks.ledger(run, "calls") == {call: 2.5}


@pytest.mark.parametrize("count", [
    pytest.param(n, marks=pytest.mark.launches(MESH, n)) for n in (2, 4, 8)
])  # fmt: skip
def test_a_ledger_of_the_mesh_has_what_rank_0_sends(count):
    """And nothing that only the last stage sends: per axis, what the run adds up."""
    run = jobs.result(MESH, count).data
    totals = ranks.table(run, "axis, all phases")
    assert len(totals) == {2: 1, 4: 2, 8: 3}[count]
    for kind, column in (("calls", "calls"), ("bytes", "payload")):
        found = dict.fromkeys([row["axis, all phases"] for row in totals], 0)
        for (*_, axis), counted in ranks.ledger(run, kind).items():
            found[axis] += counted
        assert found == {row["axis, all phases"]: row[column] for row in totals}


def test_a_rank_that_died(cell, px):
    # A rank whose heart the client has not heard for half a minute is none to it.
    noticed = "with mock.patch.object(type(live.client), 'ids', [0]):\n    "
    said = cell(f"from unittest import mock\n{noticed}print(live.interrupt())")
    assert said == "False\n"
    cell("import os, signal; os.kill(live.pids[1], signal.SIGKILL)")
    said = cell("live.restart()")
    *waits, last = said.splitlines()  # one more line each 20 seconds
    assert all(line.endswith("please wait") for line in waits), said
    assert last == "2 new ranks; what the old ones held is lost"
    assert px(f"print({SUM}.tolist())") == "every rank  [2.0, 2.0]\n"


# Exercises


def exercises(name: str) -> dict[int, dict[str, str]]:
    """Number → the cell to fill in, the check, and the folded solution."""
    found = {}
    for cell in NOTEBOOKS[name]["cells"]:
        text = "".join(cell["source"]).removeprefix("%%px\n")
        tags = " ".join(cell["metadata"].get("tags", []))
        for kind, number in re.findall(r"\b(exercise|check)-(\d)\b", tags):
            found.setdefault(int(number), {})[kind] = text
        if "<summary>Solution" in text:  # below its check
            assert "<summary>Hint</summary>" in text
            code = re.search(r"```python\n(?:%%px\n)?(.*?)```", text, re.S)[1]
            found[max(found)]["solution"] = code
    return found


def judge_exercises(name: str, verdict) -> None:
    """Checks reject the cell as it is and wrong answers, and accept the solution.

    verdict: (answer, check) → what the check prints.
    """
    found = exercises(name)
    wrong = importlib.import_module(f"wrong_{name[:2]}").WRONG
    assert sorted(found) == sorted({number for number, *_ in wrong})
    assert sorted(found) == [*range(1, max(3, len(found)) + 1)]
    for exercise in found.values():
        said = verdict(exercise["exercise"], exercise["check"])
        assert said.startswith("not yet: ")
        assert verdict(exercise["solution"], exercise["check"]) == "right\n"
    for number, answer, wanted in wrong:
        if isinstance(answer, dict):  # what is other than in the solution
            edits, answer = answer, found[number]["solution"]
            for old, new in edits.items():
                assert old in answer, f"the solution has no {old!r}"
                answer = answer.replace(old, new)
        said = verdict(answer, found[number]["check"])
        assert "not yet" in said and wanted in said, (answer, said)


RENEW = """if live.count != {count}:
    live = ranks.start({count}, "{lesson}", timeout=4)
else:
    live.view.execute("%reset -f", block=True)
    each = range({count}), [{count}] * {count}, ["{lesson}"] * {count}
    live.view.map_sync(ranks.load, *each)
    live.form_group()
"""


@pytest.mark.parametrize("name", [
    *(name for name in NOTEBOOKS if name not in (JAX, *ON_FOUR)), *ON_FOUR,
])  # fmt: skip
def test_exercises(cell, px, name):
    """On ranks with the lesson and nothing else: the two that run, in the end four."""
    count = 4 if name in ON_FOUR else 2
    said = cell(RENEW.format(count=count, lesson=LESSON[name]))
    # Where machines are slow, start() says after 20 seconds how many have started.
    assert all(line.endswith("please wait") for line in said.splitlines()), said

    def verdict(answer, check):
        px(answer)
        return px(check).removeprefix("every rank  ")

    judge_exercises(name, verdict)


def test_ranks_end_with_a_kernel_that_is_killed(kernel, cell):
    """A restart kills it, too. The ranks are busy."""
    cell("live.view.execute('while True: pass', block=False)")
    assert len(jobs.processes(kernel.mark)) > 3
    os.kill(kernel.pid, signal.SIGKILL)
    assert jobs.still_running(kernel.mark, grace=20) == []


def test_how_many_ranks(monkeypatch):
    monkeypatch.delenv("NOTEBOOK_RANKS", raising=False)
    for free, cores, wanted in (
        (8, 4, 4), (2, 4, 4), (1.9, 4, 2), (8, 8, 4), (8, 3, 2), (8, None, 4),
    ):  # fmt: skip
        memory = SimpleNamespace(available=free * 2**30)
        monkeypatch.setattr(ranks.psutil, "virtual_memory", lambda m=memory: m)
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert ranks.how_many(4) == wanted
    for number in (2, 4):
        monkeypatch.setenv("NOTEBOOK_RANKS", str(number))
        assert ranks.how_many(4) == number


# Files


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_complete_clean_and_shows_the_lessons_code(name):
    book = NOTEBOOKS[name]
    nbformat.validate(book)
    cleaned = nbformat.from_dict(book)
    run.clean(cleaned)
    assert cleaned == book, "notebooks/run.py saves another"
    of_this_machine = r"/(tmp|root|home|Users|var|site-packages)/|\\u001b"
    assert not re.search(of_this_machine, json.dumps(book))

    code, text = [], ""
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text += source
            continue
        code.append(source)
        assert cell["execution_count"] == len(code), "run from top to bottom"
        failed = any(output["output_type"] == "error" for output in cell["outputs"])
        assert not failed or "raises-exception" in cell["metadata"]["tags"]
    first = NOTEBOOKS["00_collectives"]["cells"]
    finds_the_course = next("".join(c["source"]) for c in first if "outputs" in c)
    assert code[0].startswith(finds_the_course)
    assert code[0] == finds_the_course or name == JAX
    lesson = LESSON[name]
    path = jobs.PATHS[lesson].relative_to(ROOT)  # of a lesson, or in beyond/
    command = f"!torchrun --standalone --nproc_per_node={first_run(name)[1]} {path}"
    # A cell that only draws a picture may come before its first run.
    first = code[2] if "hide-input" in tags_of(book)[1] else code[1]
    assert first.startswith(command)
    assert name == JAX or any(re.search(r"(broken|edited)\(", cell) for cell in code)
    assert text.count("<summary><b>Quiz.</b>") >= 5
    assert text.count("<details>") == text.count("</details>")
    assert name == JAX or sum("ranks.code(" in cell for cell in code) >= 5
    for line in "\n".join(code).splitlines():
        assert len(line) <= 88, line
        if defined := re.match(r"(?:class|def) (\w+)", line):
            assert not hasattr(jobs.load(lesson), defined[1]), f"{line} is retyped"


SKIP = "**Skip this notebook if you can answer these three questions:**"
EXPLAIN = "**Explain it to a colleague in two minutes**"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_begins_with_a_picture_and_asks_at_both_ends(name):
    cells = NOTEBOOKS[name]["cells"]
    head = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown"  # so it precedes the set-up
    picture, questions, _ = head.partition(SKIP)
    assert re.search(r"^!\[.{20,}\]\(attachment:first\.png\)$", picture, re.M)
    pictures = []
    for cell in cells:
        if "first-picture" in cell["metadata"].get("tags", []):
            pictures += [o["data"].get("image/png") for o in cell["outputs"]]
            if name[:2] in ("14", "16"):  # the reader sees it once
                assert "remove-output" in cell["metadata"]["tags"]
                assert cell["metadata"]["jupyter"]["outputs_hidden"]
    assert cells[0]["attachments"]["first.png"]["image/png"] == pictures[-1]
    found = re.findall(r"^(\d)\. .+\? \(sections? .+\)$", head, re.M)
    assert questions and found == ["1", "2", "3"]
    texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    assert [text.startswith(EXPLAIN) for text in texts].count(True) == 1
    assert any(text.startswith(EXPLAIN) for text in texts[-2:])
    for text in texts:
        if text.startswith("## "):
            line = text.splitlines()[2]
            assert re.match(r"\*After it you .+ \(\d+ minutes\)\.\*", line), text


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_that_only_draw_are_folded_and_neighbors_are_one(name):
    above = ""
    for cell in NOTEBOOKS[name]["cells"]:
        tags = cell["metadata"].get("tags", [])
        outputs = cell.get("outputs", [])
        folded = "hide-input" in tags
        if any("image/png" in output.get("data", {}) for output in outputs):
            assert folded, cell["source"]
        where = "".join(cell["source"]).startswith("%%px")  # ranks, or here
        kind = f"folded, %%px {where}" if folded else ""
        assert not kind or kind != above, cell["source"]
        above = kind


# How long a reader takes. Rates were chosen so that their sum is near what authors had
# estimated for sections before: 200 words or 12 lines of code per minute.
LIMIT = 90


def minutes(cells) -> float:
    """A minute per picture and half of one per quiz, for thinking; 8 per exercise.

    Folded cells, checks and solutions are not read. Code that a cell shows is.
    """
    total = 0.0
    for cell in cells:
        source = "".join(cell["source"])
        tags = " ".join(cell["metadata"].get("tags", []))
        if cell["cell_type"] == "markdown":
            total += source.count("<summary><b>Quiz") / 2
            solution = r"<details><summary>Solution.*?</details>|```.*?```"
            total += len(re.sub(solution, "", source, flags=re.S).split()) / 200
            continue
        for output in cell["outputs"]:
            data = output.get("data", {})
            shown = "".join(data.get("text/markdown", "")).splitlines()
            total += sum(bool(line.strip()) for line in shown[1:-1]) / 12
            total += "image/png" in data
        if "exercise-" in tags:
            total += 8
        elif "check-" not in tags and "hide-input" not in tags:
            total += sum(bool(line.strip()) for line in source.splitlines()) / 12
    return total


def sections(book) -> dict[str, list]:
    """The line that says how long it takes → the cells of that section."""
    found, cells = {}, []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and source.startswith("## "):
            cells = found.setdefault(source.splitlines()[2], [])
        cells.append(cell)
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_takes_ninety_minutes_and_says_how_long_each_section_takes(name):
    book = NOTEBOOKS[name]
    assert minutes(book["cells"]) <= LIMIT
    for line, cells in sections(book).items():
        stated, estimate = int(re.search(r"\((\d+) minutes\)", line)[1]), minutes(cells)
        text = f"{line} Its text, code and exercises take {estimate:.0f}"
        assert abs(stated - estimate) <= 2 + estimate / 5, text


def test_the_plan_states_the_minutes_of_a_day():
    """docs/plan.md: minutes of notebooks 00 to 04 up to section 4, and of NEW."""
    plan = (ROOT / "docs" / "plan.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\d\d)\].* \| (\d+) min \| (\d+) min \|", plan, re.M)
    assert [number for number, *_ in rows] == ["00", "01", "02", "03", "04"]
    for number, notebook, script in rows:
        (name,) = [name for name in NOTEBOOKS if name.startswith(number)]
        first = []  # cells up to section 4
        for cell in NOTEBOOKS[name]["cells"]:
            if "".join(cell["source"]).startswith("## 5 "):
                break
            first.append(cell)
        assert abs(minutes(first) - int(notebook)) <= 3, (name, minutes(first))
        read = re.search(r"in about (\d+) minutes", (ROOT / f"{name}.py").read_text())
        assert read[1] == script, name


def test_minutes_count_what_is_read():
    def cell(source, tags=(), outputs=(), kind="code"):
        metadata = {"tags": list(tags)}
        made = {"source": source, "metadata": metadata, "outputs": list(outputs)}
        return made | {"cell_type": kind}

    code = "x = 1\n\n" * 24  # 24 lines, and empty ones
    png = {"data": {"image/png": ""}}
    shown = {"data": {"text/markdown": "```python\n" + "y\n" * 36 + "```"}}
    assert minutes([cell(code)]) == 2
    assert minutes([cell(code, ["hide-input"], [png])]) == 1
    assert minutes([cell(code, ["check-1"])]) == 0
    assert minutes([cell("...", ["exercise-1"])]) == 8
    assert minutes([cell("", [], [shown])]) == 3
    assert minutes([cell("word " * 400, kind="markdown")]) == 2
    hidden = "<details><summary>Solution</summary>\n" + "word " * 400 + "</details>"
    assert minutes([cell(hidden, kind="markdown")]) == 0


# Sentences about numbers, compared with the output beside them, or with the formula.


def text_of(name: str, kind: str = "markdown") -> str:
    """All of a notebook's prose; or of what its cells printed."""
    found = []
    for cell in NOTEBOOKS[name]["cells"]:
        if kind == "markdown" and cell["cell_type"] == "markdown":
            found.append("".join(cell["source"]))
        for output in cell.get("outputs", []) if kind == "printed" else []:
            found.append("".join(output.get("text", "")))
    return "\n".join(found)


def numbers(name: str, pattern: str, kind: str = "markdown") -> list[float]:
    """What the groups of a pattern match in the one place where it does."""
    found = re.findall(pattern, text_of(name, kind), re.S)
    assert len(found) == 1, f"{pattern!r} is {len(found)} times in {name}"
    groups = (found[0],) if isinstance(found[0], str) else found[0]
    return [float(group.replace(",", "")) for group in groups]


def test_times_of_01_are_as_its_table_says():
    """TP does not pay at the smallest width; the wider, the larger the last column."""
    name = "01_naive_mlp_tp"
    rows = re.findall(
        r"^ *(\d+) +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)$", text_of(name, "printed"), re.M
    )
    speedup = {int(width): float(ratio) for width, ratio in rows}
    by_width = [speedup[width] for width in sorted(speedup)]
    assert "the wider the MLP, the larger the last column" in text_of(name)
    assert by_width == sorted(by_width) and by_width[0] < 1
    assert "milliseconds per step" not in text_of(name), "of DTensor: within the noise"


def test_limits_of_01_are_those_of_its_formulas():
    name = "01_naive_mlp_tp"
    T, tokens = 1 + 4 * 8192 * 450e9 / 989e12, 989e12 / 450e9
    said = r"longer than sending up to T = (\d+) .the formula gives ([\d.]+)\)"
    assert numbers(name, said) == [int(T), round(T, 1)]
    assert numbers(name, r"On about (\d+): .* over ([\d,]+) tokens per rank") == [
        round(2**20 / tokens), round(tokens)
    ]  # fmt: skip


def test_00_names_no_distance_from_its_line():
    """How far points are from the fitted line is printed, and nowhere claimed."""
    prose = text_of("00_collectives")
    assert "twice off" not in prose and "times off" not in prose
    printed = text_of("00_collectives", "printed")
    assert len(re.findall(r"points are [\d.]+ to [\d.]+ times the line", printed)) == 3


def test_ring_and_ulysses_of_11():
    """Per training step and layer, in slices of keys and values."""
    name, per_kv = "11_context_parallel", 8
    ulysses = {C: 2 * (C - 1) / C * (per_kv + 1) for C in (2, 4, 5, 6, 8)}
    for C, whole in ulysses.items():
        ring, gather = (3 * C - 2) / whole, 2 * (C - 1) / whole
        row = rf"\n +{C} +([\d.]+) +([\d.]+)(?=\n)"
        assert numbers(name, row, "printed") == [round(ring, 2), round(gather, 2)]
    (most,) = numbers(name, r"Up to C = (\d) the ring sends less")
    less = [C for C in range(2, 9) if C * (3 * C - 2) / (2 * (C - 1)) < per_kv + 1]
    assert max(less) == most
    said = numbers(
        name, r"At C = 8 it sends ([\d.]+) times .+?, and gather ([\d.]+) times\."
    )
    assert said == [round(22 / ulysses[8], 2), round(14 / ulysses[8], 2)]


def test_initializers_of_12():
    name, T = "12_wrong_gradients", 8
    (said,) = numbers(name, r"the factor is √\(5/1\.5\) = ([\d.]+), for both")
    assert said == round(((1 + 4) / (1 + 4 / T)) ** 0.5, 2)
    pattern = r"{}, T = 8: rows ([\d.]+), columns ([\d.]+) times"
    rows, columns = numbers(name, pattern.format("Kaiming"), "printed")
    assert abs(rows - T**0.5) < 0.03 and columns == 1
    both = numbers(name, pattern.format("Xavier"), "printed")
    assert all(abs(found - said) < 0.03 for found in both)


def test_one_definition_of_the_bubble():
    """Waiting/computing, in every notebook that has the word's formula."""
    said = numbers(
        MESH, r"at most 10 % take M ≥ 10·\(P − 1\): (\d+) micro-batches for 8"
    )
    assert said == [10 * (8 - 1)]
    for name in (MESH, "07_plan_a_run", "14_schedules"):
        prose = text_of(name)
        assert re.search(r"waiting(/| over )computing", prose), name
        quizzes = re.sub(r"<details>.*?</details>", "", prose, flags=re.S)
        assert "(M + P − 1)" not in quizzes, f"{name}: another definition"


def test_rms_norm_of_04_is_as_measured():
    name = "04_sequence_parallel"
    more = dict(re.findall(r"RMSNorm, ([\w +]+): ([\d.]+)·X", text_of(name, "printed")))
    assert more == {"without TP": "12.0", "TP": "12.0", "TP + SP": "6.0"}
    assert "12·X bytes more without TP and with TP, and 12·X/T more" in text_of(name)


def rules(name: str) -> str:
    """The rule boxes of a notebook."""
    return "\n".join(re.findall(r"^> \*\*Rule\.\*\* .*", text_of(name), re.M))


def said(name: str, pattern: str) -> list[float]:
    """The numbers in a rule box."""
    found = re.findall(pattern, rules(name))
    assert len(found) == 1, f"{pattern!r} is {len(found)} times in {rules(name)}"
    groups = (found[0],) if isinstance(found[0], str) else found[0]
    return [float(group.replace(",", "")) for group in groups]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_sections_end_with_rules(name):
    assert len(rules(name).splitlines()) >= 3


def test_rules_of_06():
    more, less, times = said(
        JAX, r"carry ([\d,]+) bytes instead of ([\d,]+), (\d) times"
    )
    gathered, summed = numbers(
        JAX,
        r"h\[B, S, F\] +all-gather +([\d,]+) bytes\n"
        r"h\[B, S, F\] +all-reduce +([\d,]+) bytes",
        "printed",
    )
    assert (more, less, times) == (gathered + summed, summed, more / less)
    factor, T = said(JAX, r"T times too large \(([\d.]+) at T = (\d)\)")
    pattern = r"types off, psum: .*?dL/d up_proj\.weight +([\d.]+)"
    assert numbers(JAX, pattern, "printed") == [factor] == [T]


def test_rules_of_07():
    name = "07_plan_a_run"
    whole, saved, loss = numbers(
        name,
        r"dp 64  +([\d.]+) GB at the peak; activations: ([\d.]+) GB, loss: ([\d.]+) GB",
        "printed",
    )
    size, usable, of, ranks_per_copy = said(
        name, r"take (\d+) GB, and ([\d.]+) of (\d+) GB are usable: at least (\d) ranks"
    )
    assert size == round(whole - saved - loss) and usable == 0.9 * of
    assert ranks_per_copy == -(-size // usable)
    pattern = r"the planner said ([\d.]+) GB, and the model, .+?, holds ([\d.]+): "
    row = r"\nbackward +([\d.]+) +([\d.]+)\n"
    assert numbers(name, pattern) == numbers(name, row, "printed")
    widest, tokens, outside, more = said(
        name,
        r"T up to (\d+) and ([\d,]+) tokens .*\(([\d.]+)\), .* needs ([\d,]+) tokens",
    )
    row = r"dgx-a100 +{} +T − 1 < F·W/C = +([\d.]+), tokens > C/W = +([\d,]+)"
    inside = numbers(name, row.format("inside"), "printed")
    assert (widest, tokens) == (int(inside[0]) + 1, inside[1])
    assert [outside, more] == numbers(name, row.format("between"), "printed")
    with_sp, without, flash, full = said(
        name,
        r"\(([\d.]+) instead of (\d+) · B·S·D.*?\(([\d.]+)\).*?: ([\d.]+) · B·S·D",
    )
    for kind, expected in (
        ("none, TP", without), ("none, TP \\+ SP", with_sp),
        ("none, TP \\+ SP, flash", flash), ("full, TP \\+ SP", full),
    ):  # fmt: skip
        row = rf"\n{kind} +[\d.]+ MB = +([\d.]+) · B·S·D|\A{kind} +[\d.]+ MB = ([\d.]+)"
        found = re.findall(row, text_of(name, "printed"))
        assert [float(pair[0] or pair[1]) for pair in found] == [expected], kind
    short, _, long = text_of(name, "printed").partition("sequences of 65,536 and more")
    ratios = [float(ratio) for ratio in re.findall(r"ratio ([\d.]+)", short)]
    long_ratios = [float(ratio) for ratio in re.findall(r"ratio ([\d.]+)", long)]
    found = [min(ratios + long_ratios), max(ratios), max(long_ratios)]
    pattern = r"Multiply predicted times by ([\d.]+) to ([\d.]+), .* up to ([\d.]+)\."
    assert found == pytest.approx(said(name, pattern), abs=0.06)


def test_stages_of_07():
    """What more stages cost per step, by the planner, for tp 2, 4 and 8."""
    sys.path.append(str(ROOT / "tools"))
    predict = importlib.import_module("predict")
    sizes = predict.model(40, 5120, 40, 40, 51200, 2048, 512)
    machine = SimpleNamespace(**predict.MACHINES["dgx-a100"], gpus=64)
    more = {2: [], 8: []}
    for tp in (2, 4, 8):
        seconds = {}
        for pp in (1, 2, 8):
            layout = predict.make_layout(
                sizes, pp, 64 // pp // tp, tp, attention="flash"
            )
            seconds[pp] = predict.predict(layout, machine)["seconds"]
        for pp, costs in more.items():
            costs.append(round(100 * (seconds[pp] / seconds[1] - 1)))
    pattern = (
        r"two stages cost (\d+) to (\d+) % per step, eight stages (\d+) to (\d+) %"
    )
    least_2, most_2, least_8, most_8 = said("07_plan_a_run", pattern)
    assert [least_2, most_2] == [min(more[2]), max(more[2])]
    assert [least_8, most_8] == [min(more[8]), max(more[8])]


def test_rules_of_08_to_10():
    assert said("08_same_bits", r": ([\d.]+) instead of ([\d.]+) with 8 ranks") == [
        8 - 1, 2 * 7 / 8
    ]  # fmt: skip
    name = "09_shared_heads"
    K, T, size = said(name, r"with K = (\d) .* past T = (\d) \((\d+) KiB per token")
    assert K == T
    for ranks_ in (8, 16, 32):
        row = rf"\n *{ranks_} ranks +(\d+) KiB per token and rank"
        assert numbers(name, row, "printed") == [size]
    name = "10_checkpoints"
    pattern = r"([\d,]+) elements in all parts = 3 · ([\d,]+) parameters"
    elements = numbers(name, pattern, "printed")
    assert said(name, r"here ([\d,]+) for ([\d,]+)\.") == elements
    shard, full = said(name, r"here ([\d,]+) bytes of ([\d,]+)\.")
    printed = text_of(name, "printed")
    assert f"the full model                        {full:,.0f} bytes" in printed
    assert f"read in slices, peak                  {shard:,.0f}\n" in printed
    (times,) = said(name, r"takes ([\d.]+) times the full model")
    assert printed.count(f"peak       {times} × the full") == 2
    own, gelu = said(name, r"here ([\d.e-]+)\).* off by ([\d.e-]+)\.")
    assert f"Hugging Face   {own:.1e}" in printed
    assert f"GELU by tanh   {gelu:.1e}" in printed and gelu > 2 * own


def test_rules_of_12():
    name = "12_wrong_gradients"
    (spread,) = said(name, r"√T \(([\d.]+) for T = 8\)")
    assert spread == round(8**0.5, 2)
    one, split = said(name, r"here ([\d.]+) and ([\d.]+)\)")
    printed = text_of(name, "printed")
    assert re.search(rf"of step 20 {one}\n.*of step 20 {split}\n", printed)


def test_rules_of_14():
    name = "14_schedules"
    share, *needed = said(
        name, r"at most (\d+) %: M ≥ (\d+)·.* 1F1B, (\d+)·.* rank, ([\d.]+)·"
    )
    # Bubbles of (P − 1)/M, half and a third of that.
    assert needed == pytest.approx([100 / share / n for n in (1, 2, 3)], abs=0.05)
    (times,) = said(name, r"it holds ([\d.]+) times as much as with 1F1B")
    pattern = r"rank 3: 1F1B .*?: ([\d.]+) times"
    assert numbers(name, pattern, "printed") == [times]
    many, few, P, v, stages, most = said(
        name,
        r"\((\d+) instead of (\d+) per micro-batch for P = (\d) and v = (\d)\)"
        r".*\(([\d.]+) instead of (\d)\)",
    )
    assert (many, few) == (2 * (v * P - 1), 2 * (P - 1))
    assert (stages, most) == (P * (1 + (P - 1) / (P * v)), P)


def test_rules_of_15():
    name = "15_zero"
    DP, plain, *stages = said(
        name, r"With (\d+) replicas these are (\d+), ([\d.]+), ([\d.]+) and (\d)\."
    )
    exact = [4 + 12 / DP, 2 + 14 / DP, 16 / DP]
    assert plain == 16 and stages == pytest.approx(exact, abs=0.006)
    M, one, two, three = said(name, r"with M = (\d) these are (\d), (\d) and (\d+)\.")
    assert (one, two, three) == (2, M + 1, 3 * M)
    low, high, right = said(name, r"here ([\d.]+) to ([\d.]+) for ([\d.]+)\)")
    wrong = re.findall(r"bug shards +([\d.]+)", text_of(name, "printed"))
    assert [low, high] == [round(f(map(float, wrong)), 2) for f in (min, max)]
    exact = re.findall(r"rank 0  one process +([\d.]+)", text_of(name, "printed"))
    assert right == round(float(exact[0]), 2)
    fewer, more = said(
        name, r"here ([\d.]+) times fewer bytes .* ([\d.]+) times as much"
    )
    row = r"{} +([\d,]+) bytes to the other node [^\n]* holds ([\d,]+) bytes"
    everywhere = numbers(name, row.format("over all"), "printed")
    inside = numbers(name, row.format("HSDP"), "printed")
    assert fewer == round(everywhere[0] / inside[0], 1)
    assert more == round(inside[1] / everywhere[1], 2)
    (terms,) = said(name, r"stops at (\d+) of them")
    pattern = r"1000 × 1, one by one: bfloat16 (\d+)"
    assert numbers(name, pattern, "printed") == [terms]
    shared, own = said(name, r"off by ([\d.]+) here .*, by ([\d.]+) and more")
    off = re.findall(r"own rows: .*? off by ([\d.]+)", text_of(name, "printed"))
    assert min(map(float, off)) == own
    off = re.findall(r"all rows: .*? off by ([\d.]+)", text_of(name, "printed"))
    assert set(map(float, off)) == {shared}


def test_rules_of_13_and_16():
    name = "13_mesh_2d"
    more, inside, between = said(
        name,
        r"sends ([\d.]+) times as much .*: ([\d,]+) on an H100 .*, ([\d,]+) between",
    )
    assert numbers(name, r"FSDP / DP: ([\d.]+)", "printed") == [more]
    row = r"{}: FSDP pays from ([\d,]+) tokens"
    assert numbers(name, row.format("in a node, 450 GB/s"), "printed") == [inside]
    assert numbers(name, row.format("between nodes, 50 GB/s"), "printed") == [between]
    name = "16_expert_parallel"
    (counts,) = said(name, r"8·E bytes, (\d+) here")
    E = len(
        re.search(r"rows for each expert: \[(.*)\]", text_of(name, "printed"))[
            1
        ].split()
    )
    assert counts == 8 * E
    without, with_loss = said(name, r"was ([\d.]+) without .* and ([\d.]+) with one")
    pattern = r"last 60 steps: ([\d.]+) and ([\d.]+)"
    assert numbers(name, pattern, "printed") == [without, with_loss]


# What docs/run.md says a rank needs; notebook 00 had it as cells.

DEFINE = """
import pickle, sys
def hello(rank):
    print("I am", rank)
sys.stdout.buffer.write(pickle.dumps(hello))
"""


def test_a_function_of_a_cell_is_sent_by_name_only():
    run_python = [sys.executable, "-c"]
    sent = subprocess.run([*run_python, DEFINE], capture_output=True, check=True).stdout
    assert b"hello" in sent and b"I am" not in sent
    load = f"import pickle; pickle.loads({sent!r})"
    child = subprocess.run([*run_python, load], capture_output=True, text=True)
    said = child.stderr.splitlines()[-1].partition(" on ")[0]
    assert said in " ".join((ROOT / "docs" / "run.md").read_text("utf-8").split())


def test_what_gloo_says_of_an_address():
    page = " ".join((ROOT / "docs" / "run.md").read_text("utf-8").split())
    create = dist.ProcessGroupGloo.create_device
    for where, pattern in (
        ({"hostname": "192.0.2.1"}, r"Cannot resolve \S+ (to a \(local\) address)"),
        ({"interface": "eth7"}, r"(Unable to find address for: eth7)"),
    ):
        with pytest.raises(RuntimeError, match=pattern) as error:
            create(**where)
        assert re.search(pattern, str(error.value))[1] in page
    create(hostname="127.0.0.1")  # this machine itself: no error


# Exercises in the docstrings of lessons: where they are answered, and by what.
ANSWERS = {
    "00_collectives": {
        8: "no error, no hang, wrong numbers",
        10: "that is case 3|product by rows|a product, and its bytes",
        4: "recursive doubling",
    },
    "01_naive_mlp_tp": {6: "down_proj</code> is|naive_mlp", 2: "rmsnorm", 9: "gated"},
    "03_vocab_parallel": {10: "delete the line that replaces"},
    "04_sequence_parallel": {
        6: "rmsnorm", 5: "plain autograd saves", 7: "25 %",
        8: "t does not divide",
    },
    MESH: {4: "one forward pass more", 9: "its own longest line", 7: "tied", 6: "1/dp"},
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_exercises_of_a_docstring_are_answered_where_it_says(name):
    source = jobs.PATHS[name].read_text("utf-8")
    docstring = source.split('"""')[1]
    for number, answer in ANSWERS[name].items():
        assert re.search(
            rf"section {number}\b|\[(\d, )?{number}(, \d)?\]", docstring
        ), number
        texts = []
        for cells in sections(NOTEBOOKS[name]).values():
            if "".join(cells[0]["source"]).startswith(f"## {number} "):
                texts = ["".join(cell["source"]) for cell in cells]
                for cell in cells:
                    texts += [
                        "".join(o.get("text", "")) for o in cell.get("outputs", [])
                    ]
        assert re.search(answer, "\n".join(texts).lower()), (
            f"section {number}: {answer}"
        )


def tags_of(book) -> list[list[str]]:
    """The tags of each code cell."""
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    return [cell["metadata"].get("tags", []) for cell in cells]


def test_pictures_of_the_readme_are_the_notebooks():
    found = {}
    for book in NOTEBOOKS.values():
        for cell in book["cells"]:
            for tag in cell["metadata"].get("tags", []):
                if tag.startswith("asset-"):
                    (png,) = [o["data"]["image/png"] for o in cell["outputs"]]
                    found[f"{tag.removeprefix('asset-')}.png"] = base64.b64decode(png)
    stored = {path.name: path.read_bytes() for path in (ROOT / "assets").iterdir()}
    moving = stored.pop("mlp.gif")  # by docs/moving_picture.py
    assert moving.startswith(b"GIF89a") and len(moving) <= 1_000_000
    assert stored == found
    pages = [ROOT / "README.md", ROOT / "docs" / "mesh.md"]
    text = "\n".join(page.read_text() for page in pages)
    shown = re.findall(r"^!\[.+\]\((?:\.\./)?assets/(.+)\)$", text, re.M)
    assert sorted(shown) == sorted([*stored, "mlp.gif"])
