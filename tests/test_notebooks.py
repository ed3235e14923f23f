"""The notebooks: live ranks that recover and end, exercises that judge, clean files.

Their text outputs are compared by nbval, their pictures are not: see test_draw.py.
"""

import base64
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from types import SimpleNamespace
from unittest import mock

import jobs
import nbformat
import pytest
from jobs import ROOT
from jupyter_client.manager import KernelManager

FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

import ranks  # noqa: E402

PATHS = sorted(FOLDER.glob("0?_*.ipynb"))
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in PATHS}
JAX = "06_the_same_in_jax"  # has no live ranks; its exercises: see test_jax.py


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [
    pytest.param(f"{name}.ipynb", marks=pytest.mark.launches(f"{name}.ipynb", 4))
    for name in NOTEBOOKS
])  # fmt: skip
def test_outputs_are_those_committed(name):
    if name.startswith(JAX):
        pytest.importorskip("jax", reason="jax is not installed: make setup EXTRA=1")
    done = jobs.result(name, 4)
    assert done.code == 0, done.text[-8000:]
    assert done.left == []
    lesson = LESSON.get(name.removesuffix(".ipynb"), name.removesuffix(".ipynb"))
    assert lesson in done.data["launched"], "its first run was not in a nursery"


# Live ranks


@pytest.fixture(scope="module")
def home():
    """What `prepare` changes in this process is put back."""
    folder = os.getcwd()
    with mock.patch.dict(os.environ):
        ranks.prepare()
        yield
        if ranks.Ranks.latest:
            ranks.Ranks.latest.stop()
    os.chdir(folder)


@pytest.fixture(scope="module")
def live(home):
    return ranks.start(2, "01_naive_mlp_tp", timeout=4)


@pytest.fixture
def px(live, capsys):
    """What a cell prints here, run on every rank; without a cell, what `again` does."""

    def run(code: str = "") -> str:
        capsys.readouterr()
        if code:
            live.px("", code)
        else:
            live.again()
        return capsys.readouterr().out

    return run


def test_what_ranks_print(live, px):
    said = px("print('same'); print('lines')")
    assert said == "every rank  same\n            lines\n"
    late = "import time; time.sleep(0.3 * (1 - rank))\n"
    said = px(late + "print('I am', rank)\nrank + 5")
    assert said == "rank 0  I am 0\n        5\nrank 1  I am 1\n        6\n"
    assert px("print('one') if rank else None") == "rank 1  one\n"
    px("value = torch.tensor([rank + 0.5])")
    assert [v.item() for v in live["value"]] == [0.5, 1.5]


def test_a_rank_that_raises(px):
    px("kept = torch.ones(2) + rank\nmlp = tp_mlp(MLP(2, 4), tp_group)")
    with pytest.raises(ranks.RankFailed) as failed:
        px("if rank == 1:\n    raise ValueError('out')\nall_reduce(kept, tp_group)")
    waited, raised = str(failed.value).splitlines()
    assert raised == "rank 1: ValueError: out (line 2 of the cell)"
    assert waited.startswith("rank 0: RuntimeError: Timed out waiting 4000ms")
    assert failed.value._render_traceback_()[-1].endswith(": live.again()")
    said = px()
    assert "rank 1 is in no call" in said and "is kept" in said
    said = px("print(all_reduce(kept, tp_group).tolist(), mlp(torch.ones(1, 2)).shape)")
    assert said == "every rank  [3.0, 3.0] torch.Size([1, 2])\n"
    # What its parameters remember of their cuts has the new group, too.
    said = px("print([list(unshard(p, p.cuts).shape) for p in mlp.parameters()])")
    assert said == "every rank  [[4, 2], [4], [2, 4], [2]]\n"


def test_check_tells_a_wrong_argument_from_a_rank_that_is_not_there(px):
    def judged(*lines) -> str:
        """What `check` says of these claims."""
        code = "".join(f"    {line}\n" for line in lines)
        return px(f"def claims():\n{code}check(claims())").removeprefix("every rank  ")

    call = "all_reduce(torch.ones(2), tp_group)"
    wrong = "all_reduce(torch.ones(2), tp_group, op='max')"
    said = judged(f"yield {wrong} is None, ''")
    assert said.startswith("not yet: TypeError: (): incompatible function")
    assert "live.again()" not in said
    right = f"yield {call}.sum() == 4, ''"  # the group is as it was
    assert judged(right) == "right\n"
    assert judged("yield rank == 0, 'no'") == "rank 0  right\nrank 1  not yet: no\n"
    assert judged("yield False, ''") == "not yet:\n"

    lost = "a collective did not complete; after it, run live.again()\n"
    for caller in (0, 1):
        said = judged(f"yield ({call} if rank == {caller} else None) is None, ''")
        verdicts = {f"rank {caller}  not yet: {lost}", f"rank {1 - caller}  right\n"}
        assert {*said.splitlines(keepends=True)} == verdicts
        px()
    said = judged(f"{call} if rank == 0 else {wrong}", "yield 1, ''")
    waited, cause = said.splitlines(keepends=True)
    assert waited == f"rank 0  not yet: {lost}"
    assert cause.startswith("rank 1  not yet: TypeError: ")
    px()
    assert judged(right) == "right\n"
    # Outside a collective such an error means nothing of the kind.
    said = judged("yield torch.ones(2) @ torch.ones(3), ''")
    assert said.startswith("not yet: RuntimeError: ") and "live.again()" not in said


@pytest.mark.parametrize("hang", ["import time; time.sleep(600)", "while True: pass"])
def test_a_rank_that_hangs(live, px, hang):
    px("kept = torch.full((2,), rank + 1.0)")
    live.view.execute(f"if rank == 1:\n    {hang}", block=False)
    start = time.time()
    assert "is kept" in px() and time.time() - start < 20
    said = px("print(all_reduce(kept, tp_group).tolist())")
    assert said == "every rank  [3.0, 3.0]\n"


CURED = """
def state(target):
    owner, _, name = target.rpartition(".")
    held = getattr(lesson, owner) if owner else lesson
    return vars(held).get(name), globals().get(name)

for name, edit in BREAKS.items():
    before = state(edit["target"])
    with broken(name):
        assert state(edit["target"]) != before, name
    assert state(edit["target"]) == before, name
print(*BREAKS)
"""


def test_broken_is_cured_again(live, px):
    assert px(CURED) == f"every rank  {' '.join(live.lesson.BREAKS)}\n"


def test_a_rank_that_died(live, px):
    # The client needs half a minute to notice: then it does not know that rank at all.
    with mock.patch.object(type(live.client), "ids", [0]):
        assert live.interrupt() is False
    os.kill(live.pids[1], signal.SIGKILL)
    assert px() == "2 new ranks; what the old ones held is lost\n"
    said = px("print(all_reduce(torch.ones(1), tp_group).item())")
    assert said == "every rank  2.0\n"


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


def told(client, code: str) -> str:
    """What a kernel prints when it runs this."""
    said = []
    note = lambda message: said.append(message["content"].get("text", ""))
    reply = client.execute_interactive(code, timeout=90, output_hook=note)
    assert reply["content"]["status"] == "ok", reply
    return "".join(said)


@pytest.mark.alone
def test_a_kernel_that_is_interrupted_restarted_and_killed():
    """After the first its ranks come back, after the others nothing is left of them,
    though one was busy."""
    mark, kernel = uuid.uuid4().hex, KernelManager()
    only_kernel = lambda: all("ipykernel" in c for _, c in jobs.processes(mark))
    kernel.start_kernel(env=os.environ | {jobs.MARK: mark}, cwd=FOLDER)
    try:
        for last in (False, True):
            client = kernel.blocking_client()
            client.start_channels()
            client.wait_for_ready(timeout=60)
            told(client, "import ranks; ranks.prepare()")
            told(client, "live = ranks.start(2, '00_collectives')")
            assert len(jobs.processes(mark)) > 3
            if not last:
                threading.Timer(2, kernel.interrupt_kernel).start()
                said = told(client, "%%px\nwhile rank == 1: pass")
                assert said.startswith("interrupted")
                assert "is kept" in told(client, "live.again()")
                said = told(client, "%px print(all_reduce(torch.ones(1), tp_group))")
                assert said == "every rank  tensor([2.])\n"
            told(client, "live.view.execute('while True: pass', block=False)")
            client.stop_channels()
            if last:
                os.kill(kernel.provisioner.pid, signal.SIGKILL)
            else:
                kernel.restart_kernel(now=True)
            deadline = time.time() + 20
            while not only_kernel():
                assert time.time() < deadline, jobs.processes(mark)
                time.sleep(0.05)
    finally:
        kernel.shutdown_kernel(now=True)
        for pid, _ in jobs.processes(mark):
            os.kill(pid, signal.SIGKILL)


# Exercises

LIVE = {"05_3d_parallel": 4}  # ranks that stay; elsewhere 2, or as many as you like
RUN = {"05_3d_parallel": 8, "07_plan_a_run": 8, JAX: 4}  # of the first run
# Whose code a notebook shows that has no lesson of its own.
LESSON = {JAX: "01_naive_mlp_tp", "07_plan_a_run": "05_3d_parallel"}


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


def ranks_with(name: str):
    """Ranks with a notebook's lesson and nothing else: those that run, if as many."""
    count, lesson = LIVE.get(name, 2), LESSON.get(name, name)
    live = ranks.Ranks.latest
    if live and live.processes and live.count == count:
        live.view.execute("%reset -f")
        each = range(count), [count] * count, [lesson] * count
        live.view.map_sync(ranks.load, *each)
        live.form_group()
        return live
    return ranks.start(count, lesson, timeout=4)


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != JAX])
def test_exercises(name, home, capsys):
    live, found = ranks_with(name), exercises(name)
    wrong = importlib.import_module(f"wrong_{name[:2]}").WRONG
    assert sorted(found) == sorted({number for number, *_ in wrong})
    assert sorted(found) == [*range(1, max(3, len(found)) + 1)]

    def verdict(number, code):
        live.px("", code)
        capsys.readouterr()
        live.px("", found[number]["check"])
        return capsys.readouterr().out

    for number, exercise in found.items():
        assert verdict(number, exercise["exercise"]).startswith("every rank  not yet: ")
        assert verdict(number, exercise["solution"]) == "every rank  right\n"
    for number, answer, wanted in wrong:
        if isinstance(answer, dict):  # what is other than in the solution
            edits, answer = answer, found[number]["solution"]
            for old, new in edits.items():
                assert old in answer, f"the solution has no {old!r}"
                answer = answer.replace(old, new)
        said = verdict(number, answer)
        assert "not yet" in said and wanted in said, (answer, said)


# Files


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_complete_clean_and_shows_the_lessons_code(name):
    book, cells = NOTEBOOKS[name], {"code": [], "markdown": []}
    nbformat.validate(book)
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    for cell in book["cells"]:
        cells[cell["cell_type"]].append("".join(cell["source"]))
        assert set(cell["metadata"]) <= {"tags", "jupyter"}
        tags, folded = cell["metadata"].get("tags", []), cell["metadata"].get("jupyter")
        assert folded == ({"source_hidden": True} if "hide-input" in tags else None)
        if "drawing" in tags:  # test_draw.py tries what it defines
            assert "hide-input" in tags and not cell["outputs"]
            assert cell["source"][0].startswith("# Drawing: ")
            assert len(cell["source"]) <= 60
        if cell["cell_type"] == "code":
            number = len(cells["code"])
            assert cell["execution_count"] == number, "run from top to bottom"
            for output in cell["outputs"]:
                good = output["output_type"] != "error"
                assert good or "raises-exception" in cell["metadata"]["tags"]
                assert not output.get("metadata")
    text = json.dumps(book)
    assert not re.search(r"/(tmp|root|home|Users|var)/|\\u001b", text)

    code, text = cells["code"], "\n".join(cells["markdown"])
    first = NOTEBOOKS["00_collectives"]["cells"]
    finds_the_course = next("".join(c["source"]) for c in first if "outputs" in c)
    assert code[0].startswith(finds_the_course)
    assert code[0] == finds_the_course or name == JAX
    lesson = LESSON.get(name, name)
    command = f"!torchrun --standalone --nproc_per_node={RUN.get(name, 2)} {lesson}"
    assert code[1].startswith(command)
    assert name == JAX or any("broken(" in cell for cell in code)
    assert text.count("<summary><b>Quiz.</b>") >= 5
    assert text.count("<details>") == text.count("</details>")
    assert name == JAX or sum("ranks.code(" in cell for cell in code) >= 5
    for line in "\n".join(code).splitlines():
        assert len(line) <= 88, line
        if defined := re.match(r"(?:class|def) (\w+)", line):
            assert not hasattr(jobs.load(lesson), defined[1]), f"{line} is retyped"


def test_pictures_of_the_readme_are_the_notebooks():
    found = {}
    for book in NOTEBOOKS.values():
        for cell in book["cells"]:
            for tag in cell["metadata"].get("tags", []):
                if tag.startswith("asset-"):
                    (png,) = [o["data"]["image/png"] for o in cell["outputs"]]
                    found[f"{tag.removeprefix('asset-')}.png"] = base64.b64decode(png)
    stored = {path.name: path.read_bytes() for path in (ROOT / "assets").iterdir()}
    assert stored == found
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"^!\[.+\]\(assets/(.+)\)$", readme, re.M)
    assert sorted(shown) == sorted(stored)
