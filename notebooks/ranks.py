"""Live ranks for a notebook: processes that stay, one group, your cells run on each.

    import ranks
    live = ranks.start(2, "01_naive_mlp_tp")    # two ranks, and the lesson on each
    lesson = live.lesson                        # and here, to show its code
    %%px                                        # runs a cell on all of them
    live["y"]                                   # [rank 0's y, rank 1's y], here
    live.again()                                # after an error or a hang: a new group

What a cell under `%%px` finds on every rank: all names of the lesson, and the lesson
itself as `lesson`; `rank`, `ranks` (how many), `tp_group`, `torch`, `dist`;
`broken(name)`, which switches one of the lesson's bugs on (`with broken("f"): …`);
`senders(call, x)`, for the colours of pictures; `check(claims)`, to end an exercise.

To write a notebook: the first cell finds the course (copy it from 00_collectives), the
next runs the lesson under torchrun with `--json traces/NN.json`, then start ranks.
Show code with `ranks.code(lesson.name)`, never retyped. Draw in the notebook's own
process, from what the ranks hold (`live["name"]`), with the functions of draw.py. Text
outputs are compared by the tests: print nothing that changes from run to run, or tag
the cell `nbval-ignore-output`; a cell that shall fail gets the tag `raises-exception`.
Other tags: `exercise-1` and `check-1`, 2, 3 and so on, whose folded solution the tests
try, and `asset-NAME`, whose picture becomes assets/NAME.png. `make notebooks-run`
executes all notebooks and saves them without metadata; tests/test_notebooks.py says
what else each must have, and wants wrong answers to its exercises in WRONG.

`again()` puts the new tp_group into modules that were made with the old one. Groups
that a cell made itself (`mesh_groups`) must be made again.

How it works: ipyparallel starts a controller, and an engine (an IPython without a
screen) for each rank. The ranks meet in a store that this process keeps, so it outlives
every group. Controller and engines are started through this file, which gives each a
watchdog: when the process that started them is gone, however it went, they end.
"""

import atexit
import contextlib
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TIMEOUT = 8  # seconds that a rank waits for another one; short, since someone watches


# In the notebook's own process


def prepare() -> None:
    """Make lessons importable and `!torchrun` work, whatever was activated."""
    os.chdir(ROOT)
    os.makedirs("traces", exist_ok=True)  # for --json; git ignores it
    if str(ROOT) not in sys.path:
        sys.path.insert(1, str(ROOT))
    bin_folder = str(Path(sys.executable).parent)
    if bin_folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = bin_folder + os.pathsep + os.environ["PATH"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")  # see README, Troubleshooting
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def how_many(wanted: int, free: float | None = None, cores: int = 4) -> int:
    """`wanted` ranks, or 2 on fewer than four cores or with less than half a GiB free
    for each; so many as the environment's NOTEBOOK_RANKS says, if it is set."""
    if free is None:
        import psutil

        free = psutil.virtual_memory().available / 2**30
        cores = os.cpu_count() or cores
        if forced := os.environ.get("NOTEBOOK_RANKS"):
            return int(forced)
    return wanted if free >= wanted / 2 and cores >= 4 else 2


def code(*definitions) -> None:
    """Show definitions as they stand in the lesson."""
    from IPython.display import Markdown, display

    text = "\n\n".join(inspect.getsource(thing).rstrip() for thing in definitions)
    display(Markdown(f"```python\n{text}\n```"))


def start(count: int, lesson: str, timeout: float = TIMEOUT) -> "Ranks":
    """Start so many ranks with a lesson on each; those that ran before are stopped."""
    Ranks.stop_all()
    return Ranks(count, lesson, timeout)


class Ranks:
    """Engines that are the ranks of one process group, on CPU, over gloo.

    Args:
        count: how many.
        lesson: module name of the lesson that every rank imports.
        timeout: seconds that a rank waits for another one before it gives up.
    """

    running = []

    def __init__(self, count: int, lesson: str, timeout: float):
        self.count, self.timeout = count, timeout
        self.name, self.lesson = lesson, importlib.import_module(lesson)
        self.groups = 0  # how many groups were formed: each has its corner of the store
        self.launch()
        self.form_group()

    def launch(self) -> None:
        """Start a controller and the engines, and connect to them."""
        import ipyparallel
        import torch.distributed as dist

        Ranks.running.append(self)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # A store that makes its own socket listens on all of this machine's networks.
        listener = socket.create_server(("127.0.0.1", 0))
        self.store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        here = ["--ip=127.0.0.1", "--location=127.0.0.1"]
        self.processes = [self.spawn("ipyparallel.controller", *here)]
        security = self.folder / "security"
        files = [security / f"ipcontroller-{who}.json" for who in ("engine", "client")]
        wait_until(lambda: all(map(is_json, files)), 60, "the controller")
        # an engine gives up after 5 seconds otherwise: too few on a busy machine
        flags = ["--IPEngine.timeout=60", "--IPEngine.enable_nanny=False"]
        for _ in range(self.count):
            self.processes.append(self.spawn("ipyparallel.engine", *flags))
        self.client = ipyparallel.Client(str(files[1]))
        self.client.wait_for_engines(self.count, timeout=100, interactive=False)
        self.view = self.client[:]
        self.view.block = True
        self.pids = self.view.apply_sync(os.getpid)
        self.offer_magics()
        everyone = range(self.count)
        self.view.map_sync(
            load, everyone, [self.count] * self.count, [self.name] * self.count
        )

    def spawn(self, module: str, *flags: str) -> subprocess.Popen:
        """One process with a watchdog, leader of a process group of its own."""
        watched = [sys.executable, __file__, str(os.getpid()), str(self.folder)]
        command = [*watched, module, f"--profile-dir={self.folder}", *flags]
        with open(self.folder / f"{module}.log", "ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def offer_magics(self) -> None:
        """`%%px` runs a cell on every rank."""
        from IPython import get_ipython

        if shell := get_ipython():
            shell.register_magic_function(self.px, "line_cell", "px")

    def px(self, line: str, cell: str | None = None) -> None:
        """Run code on every rank, wait, and print what each said, in rank order.

        (ipyparallel's own `%%px` does too, with `--no-stream`, but prints a page for an
        error. Flags are for that one; here they change nothing.)
        """
        from IPython.display import display

        result = self.view.execute(cell or line, silent=False, block=False)
        try:
            result.wait()
        except KeyboardInterrupt:
            print("interrupted; to get the ranks back, run live.again()")
            return
        result.wait_for_output(2)
        show_by_rank([said(data) for data in result.metadata])
        for data in result.metadata:
            for output in data["outputs"]:
                display(output["data"], raw=True)
        replies = result.get(return_exceptions=True)
        if any(isinstance(reply, Exception) for reply in replies):
            raise RankFailed(replies)

    def form_group(self) -> None:
        """All ranks join one group (again)."""
        self.groups += 1
        corner = self.store.port, self.groups
        self.view.apply_sync(join, corner, self.timeout)

    def __getitem__(self, name: str) -> list:
        """Every rank's value of a variable, in rank order."""
        return self.view.pull(name, block=True)

    def again(self) -> None:
        """A new group after an error or a hang; what the ranks hold is kept.

        A rank that is busy is interrupted. One that cannot be, or is dead, is started
        anew with all others, and then nothing is kept.
        """
        alive = self.interrupt()
        if alive:
            for line in self.view.apply_sync(who_was_missing)[0]:
                print(line)
            self.form_group()
            print(f"a new group of {self.count} ranks; what they hold is kept")
            return
        self.stop()
        self.launch()
        self.form_group()
        print(f"{self.count} new ranks; what the old ones held is lost")

    def interrupt(self) -> bool:
        """Make every rank idle; False if that cannot be done."""
        if len(self.client.ids) < self.count:  # it is known already that one is dead
            return False
        answers = [self.client[r].apply_async(os.getpid) for r in range(self.count)]
        deadline = time.time() + self.timeout + 3
        while time.time() < deadline:
            for pid, answer in zip(self.pids, answers):
                answer.wait(0.5)
                if not answer.ready():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
            if all(answer.ready() for answer in answers):
                return all(answer.successful() for answer in answers)
        return False

    def stop(self) -> None:
        """End the ranks at once."""
        if self not in Ranks.running:
            return
        Ranks.running.remove(self)
        with contextlib.suppress(Exception):
            self.client.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.store = None
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def stop_all() -> None:
        """End whatever this process has started."""
        for live in list(Ranks.running):
            live.stop()


atexit.register(Ranks.stop_all)


class RankFailed(Exception):
    """What each rank raised, a line each."""

    def __init__(self, replies: list):
        lines = {
            rank: in_short(reply)
            for rank, reply in enumerate(replies)
            if isinstance(reply, Exception)
        }
        super().__init__("\n".join(f"rank {r}: {text}" for r, text in lines.items()))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [str(self), "", "If collectives fail from now on: live.again()"]


def in_short(error: Exception) -> str:
    """Type, message and the line of the cell, of an error on a rank."""
    text = re.sub(
        r"^\[[^]]*third_party[^]]*\] *", "", str(getattr(error, "evalue", error))
    )
    trace = re.sub(r"\x1b\[[0-9;]*m", "", str(getattr(error, "traceback", "")))
    line = re.search(r"Cell [^,\n]*, line (\d+)|<ipython-input[^>]*>:(\d+)", trace)
    where = f" (line {line[1] or line[2]} of the cell)" if line else ""
    return f"{getattr(error, 'ename', type(error).__name__)}: {text}{where}"


def said(data: dict) -> str:
    """All text of one rank's run: printed, warned, and the last expression's value."""
    value = (data["execute_result"] or {}).get("data", {}).get("text/plain", "")
    value = re.sub(r"\x1b\[[0-9;]*m", "", value)
    return "\n".join(x.rstrip() for x in (data["stdout"], data["stderr"], value) if x)


def show_by_rank(texts: list[str]) -> None:
    """Print each rank's text behind its number; ranks that said the same, together."""
    speakers = {}
    for rank, text in enumerate(texts):
        if text:
            speakers.setdefault(text, []).append(rank)
    labels = {
        text: "every rank" if len(who) == len(texts) > 1 else
        ("ranks " if len(who) > 1 else "rank ") + ", ".join(map(str, who))
        for text, who in speakers.items()
    }  # fmt: skip
    width = max(map(len, labels.values()), default=0)
    for text, label in labels.items():
        for i, line in enumerate(text.splitlines()):
            print(f"{label if i == 0 else '':<{width}}  {line}".rstrip())


def is_json(file: Path) -> bool:
    """Is it there, and written to its end?"""
    try:
        return bool(json.loads(file.read_text()))
    except (OSError, ValueError):
        return False


def wait_until(ready, seconds: float, what: str) -> None:
    """Poll; TimeoutError with the name of what did not come."""
    deadline = time.time() + seconds
    while not ready():
        if time.time() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.05)


# On each rank

HERE = {}  # rank, ranks, lesson, tp_group and store of this rank


def names() -> dict:
    """The names that cells under `%%px` see."""
    from IPython import get_ipython

    return get_ipython().user_ns


def load(rank: int, count: int, lesson: str) -> None:
    """Import the lesson and offer its names, before anyone waits for anyone."""
    prepare()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))  # as torchrun does
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = importlib.import_module(lesson)
    public = {k: v for k, v in vars(module).items() if not k.startswith("__")}
    more = dict(rank=rank, ranks=count, lesson=module, torch=torch, dist=dist)
    HERE.update(rank=rank, ranks=count, lesson=module)
    more |= dict(broken=broken, check=check, senders=senders)
    names().update(public | more)


def join(corner: tuple[int, int], timeout: float) -> None:
    """Leave the old group, if there is one, and meet the others in a new one.

    Args:
        corner: port of the store, and which part of it this group uses.
    """
    import torch.distributed as dist

    rank, count, lesson = (HERE[k] for k in ("rank", "ranks", "lesson"))
    if dist.is_initialized():
        dist.destroy_process_group()
    port, number = corner
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    store = dist.PrefixStore(str(number), store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=limit
    )
    lesson.COMM.store = store
    lesson.COMM.made.clear()
    lesson.COMM.note()
    tp_group = lesson.mesh_groups({"tp": count}, timeout)["tp"]
    replace(HERE.get("tp_group"), tp_group)
    HERE.update(tp_group=tp_group, store=store, timeout=timeout, checks=0)
    names().update(tp_group=tp_group)


def replace(old, new) -> None:
    """Modules and parameters that were made with the old group go on with the new."""
    from torch import nn

    models = [value for value in names().values() if isinstance(value, nn.Module)]
    for model in models if old is not None else []:
        for module in model.modules():
            for name, held in list(vars(module).items()):
                if held is old:
                    setattr(module, name, new)
        for p in model.parameters():
            if cuts := getattr(p, "cuts", ()):
                p.cuts = tuple((dim, new if g is old else g) for dim, g in cuts)


def who_was_missing() -> list[str]:
    """The lesson's own words about a collective that did not complete."""
    lesson, store = HERE["lesson"], HERE["store"]
    places = [json.loads(store.get(f"place/{rank}")) for rank in range(HERE["ranks"])]
    for place in places:
        place["process"] = lesson.process_of(place)
    if not any("call" in place for place in places):
        return []
    lines = [f"  rank {rank}: {place['state']}" for rank, place in enumerate(places)]
    return [lesson.who_is_missing(places), *lines]


def senders(call, x):
    """Which ranks are in each element of call(x): bit r stands for rank r.

    All ranks run the call on tensors full of 2^rank. It must move or add, as
    collectives do.
    """
    import torch

    return call(torch.full_like(x, 2 ** HERE["rank"]))


@contextlib.contextmanager
def broken(name: str):
    """Switch one of the lesson's bugs on, as `--break NAME` does, and off again."""
    lesson = HERE["lesson"]
    edit = lesson.BREAKS[name]
    owner, _, attribute = edit["target"].rpartition(".")
    place = getattr(lesson, owner) if owner else lesson
    good = vars(place)[attribute]
    lesson.apply_edit(edit, vars(lesson))
    seen = () if owner else (names(),)  # cells have names of their own
    for space in seen:
        space[attribute] = getattr(lesson, attribute)
    try:
        yield
    finally:
        setattr(place, attribute, good)
        for space in seen:
            space[attribute] = good


LOST = "a collective did not complete; after it, run live.again()"


def check(claims) -> None:
    """Say `right`, or what is wrong on which rank.

    Args:
        claims: yields (whether it holds, what to say if not), in order; the first that
            does not hold is reported. Ranks tell each other by the store, not by the
            group: what is being checked may have broken it.
    """
    store, rank = HERE["store"], HERE["rank"]
    HERE["checks"] += 1
    wrong = ""
    try:
        wrong = next((text for holds, text in claims if not holds), "")
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        if lost_the_others(error):
            wrong = LOST
    corners = [f"check/{HERE['checks']}/{r}" for r in range(HERE["ranks"])]
    store.set(corners[rank], wrong)
    # The others may still be waiting for this rank, in a collective that it left out.
    store.wait(corners, timedelta(seconds=2 * HERE["timeout"] + 5))
    everyone = [store.get(corner).decode() for corner in corners]
    told = {r: text for r, text in enumerate(everyone) if text}
    first = min(told, key=lambda r: told[r] == LOST, default=None)  # a cause, if told
    if first is None:
        print("right")
        return
    who = "not yet:" if len(set(everyone)) == 1 else f"not yet; rank {first}:"
    print(who, told[first])
    if LOST in everyone and told[first] != LOST:
        print("and", LOST)


def lost_the_others(error: Exception) -> bool:
    """Has a collective failed since a rank did not come, or was lost? (One that refuses
    its arguments leaves the group as it was.)"""
    place = HERE["lesson"].COMM.place
    inside = "call" in place
    transport = re.search(r"third_party.gloo|timed? ?out|connection", str(error), re.I)
    return inside and isinstance(error, RuntimeError) and bool(transport)


# As a program: one process of the cluster, with its watchdog


def watch(parent: int, folder: str) -> None:
    """End this process and its children when the parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    parent, folder, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    threading.Thread(target=watch, args=(parent, folder), daemon=True).start()
    sys.argv[1:] = sys.argv[4:]
    runpy.run_module(module, run_name="__main__")
