"""Live ranks for a notebook: processes that stay, one group, your cells run on each.

    import ranks
    live = ranks.start(2, "01_naive_mlp_tp")    # two ranks, and the lesson on each
    lesson = live.lesson                        # and here, to show its code
    %%px                                        # runs a cell on all of them
    live["y"]                                   # [rank 0's y, rank 1's y], here
    live.restart()                              # after an error or a hang: a new group

What a cell under `%%px` finds on every rank: all names of the lesson, and the lesson
itself as `lesson` (a script of beyond/ imports the lessons, so there it is
`lesson00.all_reduce`); `rank`, `T` or `ranks` (how many), `tp_group`, `torch`, `dist`;
`broken(name)`, which makes one of the lesson's bugs (`with broken("f"): …`);
`edit(name)`, which shows it; `edited(module, bug)`, for a bug that is not in bugs/;
`contributors(call, x)`, for the colors of pictures;
`of_all_ranks(value, group)`, a list; `check(claims)`, which ends an exercise.

How it works: ipyparallel starts a controller, and an engine (an IPython without a
screen) for each rank. The ranks connect to a store that this process keeps, so it
outlives every group. On Linux all are forked from one process that has imported what
they need: torch is imported once, not once per rank. Each watches a pipe to this
process, and ends when this process has ended, however it did.
"""

import __future__

import ast
import atexit
import contextlib
import functools
import importlib
import inspect
import io
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import FunctionType, ModuleType

import ipyparallel
import psutil
import torch.distributed as dist
from IPython import get_ipython
from IPython.display import Markdown, display

ROOT = Path(__file__).resolve().parents[1]
# On macOS the system's own libraries may have threads, which do not survive a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
START = multiprocessing.get_context(METHOD)
ENGINE, CONTROLLER = "ipyparallel.engine.app", "ipyparallel.controller.app"
TORCH = "torch.distributed.tensor.parallel"


def prepare() -> None:
    """Make lessons importable and `!torchrun` work, whatever was activated; tests have
    a torchrun of their own, in the folder NOTEBOOK_BIN."""
    os.chdir(ROOT)
    os.makedirs("traces", exist_ok=True)  # for --json; git ignores it
    sys.path.insert(1, str(ROOT))
    sys.path.insert(2, str(ROOT / "beyond"))
    folder = os.environ.get("NOTEBOOK_BIN", str(Path(sys.executable).parent))
    os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")  # see README, Troubleshooting
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def how_many(wanted: int) -> int:
    """`wanted` ranks, or 2 on fewer than four cores or with less than half a GiB free
    for each; the number in the environment variable NOTEBOOK_RANKS, if it is set."""
    if forced := os.environ.get("NOTEBOOK_RANKS"):
        return int(forced)
    enough = psutil.virtual_memory().available >= wanted * 2**29
    return wanted if enough and (os.cpu_count() or 4) >= 4 else 2


def code(*definitions) -> None:
    """Show definitions as they are in the lesson."""
    text = "\n\n".join(inspect.getsource(thing).rstrip() for thing in definitions)
    display(Markdown(f"```python\n{text}\n```"))


def bugs_of(lesson) -> dict[str, dict]:
    """The bugs of a lesson or script: name → old text, new text, and what it does."""
    path = Path(lesson.__file__)
    kind = "beyond" if path.parent.name == "beyond" else "lesson"
    return importlib.import_module(f"bugs.{kind}{path.name[:2]}").BUGS


def edit(name: str) -> None:
    """Show what a bug changes in the lesson: lines removed, lines added."""
    bug = bugs_of(HERE["lesson"] if HERE else Ranks.latest.lesson)[name]
    print(f"{bug['what']}:")
    for sign, lines in (("-", bug["old"]), ("+", bug["new"])):
        for line in lines.splitlines():
            print(sign, line)


def table(run: dict, *columns: str) -> list[dict]:
    """The rows of a lesson's --json that have these columns; a number is a number."""
    found = []
    for row in run["rows"]:
        if row.keys() >= {*columns}:
            found.append({name: as_number(cell) for name, cell in row.items()})
    return found


COLLECTIVES = (
    "all-reduce all-gather reduce-scatter broadcast all-to-all all-to-all-v send/recv"
).split()


def ledger(run: dict, kind: str) -> dict[tuple, int]:
    """What was counted per step: (run, phase, collective, axis) → `calls` or `bytes`.

    From the checks of a lesson's --json: of tables they have also the rows that the
    lesson does not print. Each check's text begins with the number. Of lesson 05,
    calls that rank 0 does not make, only the last stage, are left out.
    """
    others = []
    if run["size"].get("P", 1) > 1:  # count_targets, a row that is not printed
        others.append(("load", "all-reduce"))
    for row in run["rows"]:
        if "on the last stage" in row:
            others.append((row["on the last stage"], row["collective"]))
    found = {}
    for check in run["checks"]:
        words = check["name"].split()
        if words[0] == f"{kind}:" and words[-2] in COLLECTIVES:
            call = " ".join(words[1:-3]), *words[-3:]
            if call[1:3] not in others:  # without the axis, as in the lesson's table
                found[call] = as_number(check["text"].split()[0])
    return found


def as_number(cell):
    """12,345 as it was printed, as an int or a float; any other text as it is."""
    try:
        value = float(str(cell).replace(",", ""))
        return int(value) if value.is_integer() else value
    except ValueError:
        return cell


def start(count: int, lesson: str, timeout: float = 8) -> "Ranks":
    """Start `count` ranks with a lesson on each; those that ran before are stopped."""
    if Ranks.latest:
        Ranks.latest.stop()
    return Ranks(count, lesson, timeout)


def hold_ports(count: int) -> list[socket.socket]:
    """Sockets on free ports: a server may take one, no other program gets it by chance.
    Of the ports that a controller finds itself, some may be gone when it needs them."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("", 0))
    return held


class Ranks:
    """Engines that are the ranks of one process group, on CPU, over gloo; one waits for
    another for `timeout` seconds: few, since someone watches."""

    latest = None

    def __init__(self, count: int, lesson: str, timeout: float):
        self.count, self.timeout = count, timeout
        # The server that ranks are forked from does not find scripts of beyond/.
        START.set_forkserver_preload([ENGINE, CONTROLLER, TORCH, lesson])
        if METHOD == "forkserver":
            forkserver.ensure_running()  # while the lesson is imported here
        self.lesson = importlib.import_module(lesson)
        self.groups = 0  # how many groups were formed: each has its part of the store
        self.seconds_to_start = 0.0  # of the first rank: how busy this machine is
        Ranks.latest = self
        atexit.register(self.stop)  # otherwise Python waits for processes it started
        self.launch()

    def launch(self) -> None:
        """Start the ranks; if that fails, stop what has started and say what to do."""
        try:
            self.start_and_connect()
        except Exception as error:
            self.stop()
            text = f"the ranks did not start: {type(error).__name__}: {error}\n"
            text += "Close other programs, then run the cell with ranks.start( again."
            raise RankFailed(text) from error

    def start_and_connect(self) -> None:
        """Start a controller and the engines, connect to them, load the lesson."""
        self.processes, self.folder = [], Path(tempfile.mkdtemp(prefix="ranks-"))
        self.alive = START.Pipe(duplex=False)  # nothing is sent: it closes when we end
        # A store that makes its own socket listens on all of this machine's networks.
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        own = dict(is_master=True, master_listen_fd=listener.detach())
        own |= dict(wait_for_workers=False, timeout=timedelta(seconds=self.timeout))
        self.store = dist.TCPStore(host, port, **own)
        self.told = dict(MASTER_ADDR=host, MASTER_PORT=str(port))  # as by torchrun
        # An engine is there when it has answered two beats; after 30 s without, dead.
        beats = "--HeartMonitor."
        flags = [f"{beats}period=300", f"{beats}max_heartmonitor_misses=100"]
        # The controller forgets an engine that has not answered in time, 30 seconds.
        flags.append("--IPController.registration_timeout=600")
        held = hold_ports(20)  # it uses 18
        self.ports = [each.getsockname()[1] for each in held]
        flags.append("--ports=" + ",".join(map(str, self.ports)))
        self.spawn(CONTROLLER, "--ip=127.0.0.1", "--location=127.0.0.1", *flags)
        files = self.folder / "security"
        last = files / "ipcontroller-engine.json"  # that the controller writes
        while not (last.exists() and last.stat().st_size):
            if not self.processes[0].is_alive():
                raise OSError("ipyparallel's controller ended before it was ready")
            time.sleep(0.05)
        # An engine gives up after 5 seconds otherwise, or when it has heard no beat of
        # the controller for 40: too few on a busy machine, and ours watch a pipe.
        flags = ["--IPEngine.timeout=600", "--IPEngine.max_heartbeat_misses=0"]
        flags.append("--IPEngine.enable_nanny=False")
        flags.append("--InteractiveShell.colors=nocolor")
        for _ in range(self.count):
            self.spawn(ENGINE, *flags)
        with contextlib.redirect_stderr(io.StringIO()):  # it warns of a slow machine
            self.client = ipyparallel.Client(str(files / "ipcontroller-client.json"))
            self.wait_for_ranks()
        for each in held:
            each.close()
        self.view = self.client[:]
        self.view.block = True
        self.pids = self.view.apply_sync(os.getpid)
        if shell := get_ipython():
            shell.register_magic_function(self.px, "line_cell", "px")
        count, name = self.count, self.lesson.__name__
        self.view.map_sync(load, range(count), [count] * count, [name] * count)
        self.form_group()

    def wait_for_ranks(self) -> None:
        """Wait for all ranks as long as this machine needs, and say how many are there.

        The first rank has 10 minutes. From then on, there is an error if ten times what
        the first one took goes by (at least 3 minutes) and no further rank has come.
        """
        begin = time.time()
        told = begin
        limit = begin + 600
        present = 0
        while present < self.count:
            if not all(process.is_alive() for process in self.processes):
                raise OSError("a process ended before it was ready" + self.last_words())
            if time.time() > limit:
                raise TimeoutError(f"{present} of {self.count} ranks came in time")
            time.sleep(0.05)
            if len(self.client.ids) > present:
                if present == 0:
                    self.seconds_to_start = time.time() - begin
                present = len(self.client.ids)
                limit = time.time() + max(180, 10 * self.seconds_to_start)
            if time.time() > told + 20 and "NOTEBOOK_RANKS" not in os.environ:
                told = time.time()
                print(f"{present} of {self.count} ranks have started; please wait")

    def last_words(self) -> str:
        """The last line of each log of the processes, for an error's message."""
        text = ""
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").strip().splitlines()
            text += f"\n{log.stem}: {lines[-1]}" if lines else ""
        return text

    def spawn(self, module: str, *flags: str) -> None:
        """One process, which may start others, that runs a module of ipyparallel."""
        flags = [f"--profile-dir={self.folder}", *flags]
        args = self.alive[0], self.folder, os.environ | self.told, module, flags
        process = START.Process(target=serve, args=args)
        process.start()
        self.processes.append(process)

    def form_group(self) -> None:
        """All ranks join one group (again). A busy machine gets more time for it."""
        self.groups += 1
        limit = max(self.timeout, self.seconds_to_start)
        self.view.apply_sync(join, self.groups, self.timeout, limit)

    def px(self, line: str, cell: str | None = None) -> None:
        """Run code on every rank, wait, and print what each said, in rank order."""
        result = self.view.execute(cell or line, silent=False, block=False)
        try:
            result.wait()
        except KeyboardInterrupt:
            print("interrupted; to get the ranks back, run live.restart()")
            return
        result.wait_for_output(2)
        show_by_rank(result.metadata)
        for data in result.metadata:
            for output in data["outputs"]:
                display(output["data"], raw=True)
        replies = enumerate(result.get(return_exceptions=True))
        failed = [(rank, e) for rank, e in replies if isinstance(e, Exception)]
        if failed:
            raise RankFailed("\n".join(f"rank {r}: {in_short(e)}" for r, e in failed))

    def __getitem__(self, name: str) -> list:
        """Every rank's value of a variable, in rank order."""
        return self.view.pull(name, block=True)

    def restart(self) -> None:
        """A new group after an error or a hang; what ranks hold is kept. One that is
        busy is interrupted; if that fails, or one is dead, all are started again."""
        if self.interrupt():
            self.say_who_was_missing()
            self.form_group()
            print(f"a new group of {self.count} ranks; what they hold is kept")
        else:
            self.stop()
            self.launch()
            print(f"{self.count} new ranks; what the old ones held is lost")

    def say_who_was_missing(self) -> None:
        """Which rank is in which call, if a collective did not complete."""
        statuses = self.view.apply_sync(status)
        if any(text.startswith("in call") for text in statuses):
            print(who_is_missing(statuses))
            for rank, text in enumerate(statuses):
                print(f"  rank {rank}: {text}")

    def interrupt(self) -> bool:
        """Make every rank idle; False if that cannot be done."""
        lost = len(self.client.ids) < self.count  # one did not answer for 30 seconds
        if lost or not all(process.is_alive() for process in self.processes):
            return False
        answers = [self.client[r].apply_async(os.getpid) for r in range(self.count)]
        deadline = time.time() + self.timeout + max(3, 2 * self.seconds_to_start)
        while not all(answer.ready() for answer in answers):
            if time.time() > deadline:
                return False
            for pid, answer in zip(self.pids, answers):
                answer.wait(0.5)
                if not answer.ready():
                    with contextlib.suppress(ProcessLookupError):  # it has just died
                        os.kill(pid, signal.SIGINT)
        return all(answer.successful() for answer in answers)

    def stop(self) -> None:
        """End the ranks at once."""
        with contextlib.suppress(Exception):
            self.client.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may have no group of its own yet
            process.join()
        self.processes, self.store = [], None
        shutil.rmtree(self.folder, ignore_errors=True)


class RankFailed(Exception):
    """What each rank raised, a line each."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        lines = str(self).splitlines()
        if "ranks.start(" not in lines[-1]:
            lines += ["", "If collectives fail from now on: live.restart()"]
        return lines


def in_short(error: Exception) -> str:
    """Type, message and the line of the cell, of an error on a rank."""
    text = str(getattr(error, "evalue", error))
    text = re.sub(r"^\[[^]]*third_party[^]]*\] *", "", text)
    line = re.search(r"Cell [^,\n]*, line (\d+)", str(getattr(error, "traceback", "")))
    where = f" (line {int(line[1]) + 1} of the cell)" if line else ""  # %%px is 1
    return f"{getattr(error, 'ename', type(error).__name__)}: {text}{where}"


def who_is_missing(statuses: list[str]) -> str:
    """What the statuses of all ranks say for certain; no rank is blamed on a guess."""
    waiting, missing = [], []
    for rank, text in enumerate(statuses):
        (waiting if text.startswith("in call") else missing).append(rank)
    if missing:
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        text = f"{who} not in a collective, while ranks {waiting} are waiting in one: "
        return text + "it hung, crashed or skipped a call"
    if len(set(statuses)) == 1:
        return "all ranks have entered the same call, and it raised an error"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def show_by_rank(metadata: list[dict]) -> None:
    """Print each rank's text behind its number; ranks that said the same, together."""
    speakers = {}
    for rank, data in enumerate(metadata):
        value = (data["execute_result"] or {}).get("data", {}).get("text/plain", "")
        texts = data["stdout"], data["stderr"], value  # printed, warned, last value
        said = "\n".join(text.rstrip() for text in texts if text)
        speakers.setdefault(said, []).append(str(rank))
    lines = []
    for said, who in speakers.items():
        label = f"rank {who[0]}" if len(who) == 1 else f"ranks {', '.join(who)}"
        label = "every rank" if len(who) == len(metadata) > 1 else label
        for line in said.splitlines():
            lines.append((label, line))
            label = ""
    width = max((len(label) for label, _ in lines), default=0)
    for label, line in lines:
        print(f"{label:<{width}}  {line}".rstrip())


# On each rank

HERE = {}  # rank, ranks, lesson and tp_group of this rank, and names: what cells see
FLAGS = __future__.annotations.compiler_flag  # all lessons import them
CALLS = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
    "broadcast all_to_all_single batch_isend_irecv recv barrier"
).split()


def load(rank: int, ranks: int, name: str) -> None:
    """Import the lesson and offer its names, before anyone waits for anyone."""
    prepare()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    lesson = importlib.import_module(name)
    lesson.torch.set_num_threads(1)
    lesson.torch.manual_seed(0)
    if not HERE:
        note_calls()
    HERE.update(rank=rank, ranks=ranks, lesson=lesson, names=get_ipython().user_ns)
    HERE.update(status="in no call", inside=False, counts={})
    own = dict(broken=broken, edit=edit, check=check, contributors=contributors)
    own |= dict(edited=edited, of_all_ranks=of_all_ranks)
    own |= dict(rank=rank, ranks=ranks, T=ranks, lesson=lesson, dist=dist)
    public = {k: v for k, v in vars(lesson).items() if not k.startswith("__")}
    HERE["names"].update(public | own)


def join(number: int, timeout: float, limit: float) -> None:
    """Leave the old group, if there is one, and join a new one within `limit` seconds;
    in it one rank waits for another for `timeout` seconds."""
    old = HERE.get("tp_group")
    if dist.is_initialized():
        dist.destroy_process_group()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"group {number}", store)  # nothing of the old group
    member = dict(store=store, rank=HERE["rank"], world_size=HERE["ranks"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **member)
    new = dist.new_group(timeout=timedelta(seconds=timeout), group_desc="tp")
    HERE.update(status="in no call", counts={}, tp_group=new)
    HERE["names"]["tp_group"] = new
    if old:
        replace(old, new)


def note_calls() -> None:
    """From now on, this rank knows in which call of dist it is."""
    for name in CALLS:
        setattr(dist, name, noted(name, getattr(dist, name)))


def noted(name: str, call):
    @functools.wraps(call)
    def with_note(*args, **kwargs):
        if HERE["inside"]:  # dist calls itself
            return call(*args, **kwargs)
        values = [*args, *kwargs.values()]
        if name == "batch_isend_irecv":
            values = [args[0][0].group, args[0][0].tensor]
        groups = [x for x in values if isinstance(x, dist.ProcessGroup)]
        group = groups[0].group_desc if groups else "of all ranks"
        number = HERE["counts"][group] = HERE["counts"].get(group, 0) + 1
        shapes = [list(x.shape) for x in values if hasattr(x, "shape")]
        of = f" of {shapes[0]}" if shapes else ""
        HERE["status"] = f"in call {number} of group {group}, {name}{of}"
        HERE["inside"] = True
        try:
            out = call(*args, **kwargs)  # if it raises, the status stays
        finally:
            HERE["inside"] = False
        HERE["status"] = "in no call"
        return out

    return with_note


def status() -> str:
    """Where this rank is. A call that did not complete counts as one that it is in."""
    return HERE["status"]


def replace(old, new) -> None:
    """Let modules and parameters that were made with the old group use the new one."""
    kind = HERE["lesson"].torch.nn.Module
    models = [value for value in HERE["names"].values() if isinstance(value, kind)]
    for module in [module for model in models for module in model.modules()]:
        for name, held in [*vars(module).items()]:
            if held is old:
                setattr(module, name, new)
        for p in module.parameters(recurse=False):
            dim, group = getattr(p, "sharding", None) or (None, None)
            if group is old:
                p.sharding = (dim, new)


def of_all_ranks(value, group) -> list:
    """The value of every rank, in order, as in lesson 00."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def contributors(call, x):
    """Which ranks are in each element of call(x), as bits: every rank has a tensor full
    of 2^rank. The call must move or add, as collectives do."""
    return call(x.new_full(x.shape, 2 ** HERE["rank"]))


@contextlib.contextmanager
def broken(name: str):
    """Make one of the lesson's bugs, as tools/bug.py does, and take it back again."""
    bug = bugs_of(HERE["lesson"])[name]
    path = ROOT / bug.get("script", HERE["lesson"].__file__)
    path = ROOT / bug.get("file", path)
    with edited(modules_of_course()[path], bug):
        yield


@contextlib.contextmanager
def edited(home: ModuleType, bug: dict):
    """Replace bug["old"] by bug["new"] in a module, and take it back again."""
    path = home.__file__
    source = Path(path).read_text("utf-8")
    if source.count(bug["old"]) != 1:
        raise LookupError(f"{path} has not once: {bug['old']}")
    known = {ast.unparse(node) for node in ast.parse(source).body}
    good = []  # functions, and what they were
    for node in ast.parse(source.replace(bug["old"], bug["new"])).body:
        if ast.unparse(node) not in known:
            made = {}
            code = compile(ast.Module([node], []), path, "exec", FLAGS)
            exec(code, vars(home), made)
            for function, other in pairs(vars(home)[node.name], made[node.name]):
                good.append((function, function.__code__, function.__defaults__))
                function.__code__ = other.__code__  # whoever has it, has the bug
                function.__defaults__ = other.__defaults__
    try:
        yield
    finally:
        for function, code, defaults in good:
            function.__code__ = code
            function.__defaults__ = defaults


def pairs(good, other) -> list[tuple]:
    """A function and its edited copy; of two classes, each method and its copy."""
    if not inspect.isclass(good):
        return [(inspect.unwrap(good), inspect.unwrap(other))]
    found = []
    for name, value in vars(other).items():
        if isinstance(value, (staticmethod, FunctionType)):
            found += pairs(inspect.unwrap(vars(good)[name]), inspect.unwrap(value))
    return found


def modules_of_course() -> dict[Path, ModuleType]:
    """The lesson, and the modules of the course that it imports, by file."""
    found = {}
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "")
        if path.parent in (ROOT, ROOT / "beyond"):
            found[path] = module
    # A script of beyond/ that was imported later has lessons of its own.
    return found | {Path(HERE["lesson"].__file__): HERE["lesson"]}


def check(claims) -> None:
    """Say `right`, or the first thing that is wrong on this rank.

    claims: yields (whether it holds, what to say if not), in order.
    """
    HERE["status"] = "in no call"  # a call that raised has left its name there
    try:
        wrong = next((text for holds, text in claims if not holds), None)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        in_a_call = HERE["status"].startswith("in call")
        if isinstance(error, RuntimeError) and in_a_call:
            wrong = "a collective did not complete; after it, run live.restart()"
    print("right" if wrong is None else f"not yet: {wrong}")


def serve(alive, folder: Path, env: dict, module: str, flags: list[str]) -> None:
    """One process of the cluster, until it is killed or `alive`, a pipe, is closed."""
    os.setsid()  # who interrupts the notebook does not mean its ranks
    os.chdir(ROOT)
    os.environ.update(env)
    with open(folder / f"{module}.log", "ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    threading.Thread(target=watch, args=(alive, folder), daemon=True).start()
    sys.argv = [module, *flags]
    importlib.import_module(module).main()


def watch(alive, folder: Path) -> None:
    """End this process and its children when the pipe's other end is gone."""
    alive.poll(None)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
