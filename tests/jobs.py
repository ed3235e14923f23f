"""Start ranks and watch them: the one place where the tests do."""

import contextlib
import functools
import importlib
import io
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil

ROOT = Path(__file__).parents[1]
LESSONS = [path.stem for path in sorted(ROOT.glob("0?_*.py"))]
BEYOND = [path.stem for path in sorted((ROOT / "beyond").glob("[0-9]*.py"))]
PATHS = {name: ROOT / f"{name}.py" for name in LESSONS}
PATHS.update({name: ROOT / "beyond" / f"{name}.py" for name in BEYOND})
sys.path[:0] = [str(ROOT / "beyond"), str(ROOT)]  # where lessons and scripts are
sys.path.append(str(ROOT / "tools"))
import bug  # noqa: E402

DOCTOR = ROOT / "tools" / "doctor.py"
HANGS = "skip order empty mixed-up chunks".split()  # bugs that make a rank wait in vain
ABORTS = ("shape", "shapes")  # where gloo aborts a rank, it ends at once: no fork can
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MARK = "COURSE_TEST_JOB"  # in the environment of every process of a job

# The tests are about ranks on CPUs. One thread a rank, and no need of a host name.
ENV = dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
ENV["PET_LOCAL_ADDR"] = os.environ.get("PET_LOCAL_ADDR", "127.0.0.1")
RANK_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
CLEAN_ENV = {k: v for k, v in os.environ.items() if k not in RANK_ENV} | ENV


def jobs_at_a_time(cores: int, memory: int) -> int:
    """One per core, each with two gigabytes; at least two: one waits, one computes."""
    return max(2, min(cores, memory // 2_000_000_000))


CORES = psutil.Process().cpu_affinity() if sys.platform == "linux" else None
CORES = len(CORES) if CORES else os.cpu_count() or 2  # those that this process may use
MEMORY = psutil.virtual_memory().total
AT_A_TIME = int(os.environ.get("TEST_JOBS", jobs_at_a_time(CORES, MEMORY)))
POOL = ThreadPoolExecutor(AT_A_TIME)
STARTED = {}  # (lesson, ranks, *flags) → its future
TO_DO = {}  # the same → what runs it, until somebody begins with it
WAITING = ThreadPoolExecutor(2)  # and beside them two that mostly wait
NOTEBOOKS = ThreadPoolExecutor(max(1, AT_A_TIME // 2))  # cells wait half of the time
RUNNING = {}  # mark → the torchrun process
COSTS = os.environ.get("TEST_COSTS")  # a file: seconds of CPU and in all per launch


class Done(NamedTuple):
    """A job that has ended."""

    code: int
    out: str  # of all ranks
    err: str  # of all ranks and of torchrun
    wall: float  # seconds
    ended: float  # seconds since the epoch
    left: list  # what still ran after the end: (process id, command)
    data: dict  # what --json wrote

    @property
    def text(self) -> str:
        return self.out + self.err


class Nursery:
    """A process that starts ranks by forking (nursery.py): one job at a time.

    Most of what a launch costs is importing torch, once a rank; here it is done once.
    """

    idle = []  # those that no job is using

    def __init__(self):
        self.mark = uuid.uuid4().hex
        script = ROOT / "tests" / "nursery.py"
        self.process = RUNNING[self.mark] = subprocess.Popen(
            [sys.executable, str(script)], cwd=ROOT, env=CLEAN_ENV | {MARK: self.mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"
        self.own = processes(self.mark)

    def seconds(self) -> float:
        """Of CPU, by its own processes and by all ranks that have ended."""
        found = 0.0
        for pid, _ in self.own:
            with contextlib.suppress(psutil.Error):
                found += sum(psutil.Process(pid).cpu_times()[:4])
        return found

    def run(self, job: dict, limit: float) -> tuple[int, str]:
        """Exit code and closing report; whatever takes too long is killed."""
        alarm = threading.Timer(limit, end, [self.mark])
        alarm.start()
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        alarm.cancel()
        return json.loads(answer) if answer else (-9, f"killed after {limit} s")


def launch(script, ranks: int, *flags, limit=600, **env) -> Done:
    """As `torchrun` below, but with ranks from a nursery."""
    nursery = Nursery.idle.pop() if Nursery.idle else Nursery()
    with tempfile.TemporaryDirectory() as folder:
        job = {"script": str(script), "ranks": ranks, "flags": [*map(str, flags)]}
        start, before = time.time(), nursery.seconds()
        code, report = nursery.run(job | {"env": env, "folder": folder}, limit)
        ended = time.time()
        left = still_running(nursery.mark, nursery.own) if code != -9 else []
        out, err = (printed(Path(folder), name) for name in ("stdout", "stderr"))
    if COSTS:
        line = f"{nursery.seconds() - before:7.1f} {ended - start:7.1f}  {ranks} ranks:"
        with open(COSTS, "a") as file:
            print(line, Path(script).name, *flags, file=file)
    if left or code == -9:
        end(nursery.mark)
    else:
        Nursery.idle.append(nursery)
    return Done(code, out, err + report, ended - start, ended, left, {})


def printed(folder: Path, stream: str) -> str:
    """What all ranks printed, one after the other."""
    paths = sorted(folder.rglob(f"{stream}.log"))
    return "".join(path.read_text("utf-8") for path in paths)


def torchrun(script, ranks: int, *flags, limit=600, launcher=TORCHRUN, **env) -> Done:
    """Run a script on so many ranks, to its end or for `limit` seconds."""
    command = ["nice", *launcher, f"--nproc_per_node={ranks}", str(script)]
    command += map(str, flags)
    return watch(command, limit, env)


def watch(command: list[str], limit: float, env: dict[str, str], without=()) -> Done:
    """Run a command, and see to it that nothing is left of it.

    without: what names of variables start with that it is not to have.
    """
    mark, start = uuid.uuid4().hex, time.time()
    ours = {k: v for k, v in CLEAN_ENV.items() if not k.startswith((*without,))}
    job = RUNNING[mark] = subprocess.Popen(
        command, cwd=ROOT, env=ours | env | {MARK: mark}, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    alarm = threading.Timer(limit, end, [mark])
    alarm.start()
    out, err = job.communicate()
    ended = time.time()
    alarm.cancel()
    left = still_running(mark)
    end(mark)
    return Done(job.returncode, out, err, ended - start, ended, left, {})


def two_agents(script, ranks: int, *flags) -> list:
    """A script on so many ranks of each of two torchruns that meet, as on two hosts."""
    launcher = [*TORCHRUN[:-1], "--nnodes=2", "--master_addr=127.0.0.1"]
    with held_port() as port, ThreadPoolExecutor(2) as pool:
        launcher.append(f"--master_port={port}")
        both = []
        for node in range(2):
            command = [*launcher, f"--node_rank={node}"]
            both.append(pool.submit(torchrun, script, ranks, *flags, launcher=command))
        return [one.result() for one in both]


@contextlib.contextmanager
def held_port():
    """A free port: a server may take it, but nobody else is given it by chance."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def end(mark: str) -> None:
    """Stop a job that is too late, and whatever is left of it."""
    job = RUNNING.pop(mark, None)
    if job and job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(5)
    for pid, _ in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def still_running(mark: str, own: list = (), grace: float = 2) -> list:
    """The processes of a job that are there even some seconds after its end."""
    until = time.time() + grace
    while found := [p for p in processes(mark) if p not in own]:
        if time.time() > until:
            break
        time.sleep(0.1)
    return found


def processes(mark: str) -> list:
    """(id, command) of every process that was started with this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another's
            if process.environ().get(MARK) == mark:
                found.append((process.pid, " ".join(process.cmdline())))
    return found


def ahead(what: str, ranks: int, *flags):
    """The future of a job: a lesson, a script of this folder, or a notebook. Asked for
    twice, it runs once."""
    job = (what, ranks, *flags)
    if job not in STARTED:
        kinds = {".py": run_driver, ".ipynb": run_notebook}
        run = kinds.get(Path(what).suffix, run_lesson)
        pools = [POOL]
        if what == "faulty.py":
            run, pools = run_faulty, [WAITING]
        elif what == "bug.py":
            run, pools = run_bug, [WAITING if flags[1] in HANGS else POOL]
        elif run is run_notebook:
            pools = [NOTEBOOKS, POOL]  # there it is behind all other jobs
        STARTED[job], TO_DO[job] = Future(), run
        for pool in pools:
            pool.submit(do, job)
    return STARTED[job]


def do(job: tuple) -> None:
    """Run a job, unless somebody has begun with it."""
    run = TO_DO.pop(job, None)
    if run is None:
        return
    future = STARTED[job]
    future.set_running_or_notify_cancel()
    try:
        future.set_result(run(*job))
    except BaseException as error:
        future.set_exception(error)


def begin(function, *args):
    """The future of a function that mostly waits. Asked for twice, it runs once."""
    job = (function, *args)
    if job not in STARTED:
        STARTED[job] = WAITING.submit(*job)
    return STARTED[job]


def result(what: str, ranks: int, *flags):
    return ahead(what, ranks, *flags).result()


def path_of(name: str) -> Path:
    """The file of a lesson or a script; one beside a lesson has no number."""
    return PATHS.get(name, ROOT / "beyond" / f"{name}.py")


def run_lesson(lesson: str, ranks: int, *flags) -> Done:
    """A lesson, alone in a folder, or a script, under torchrun with --json."""
    with tempfile.TemporaryDirectory() as folder:
        path, script = Path(folder, "out.json"), path_of(lesson)
        if lesson in LESSONS:
            script = copy_alone(script, Path(folder))
        done = launch(script, ranks, *flags, "--json", path, limit=900)
        text = path.read_text() if path.exists() else ""
        data = json.loads(text) if text else {}  # empty: it came to no verdict
    return done._replace(data=data)


def copy_alone(script: Path, folder: Path) -> Path:
    """A copy in a folder of its own: a lesson is one file, and needs no other."""
    alone = folder / "alone"
    alone.mkdir()
    return Path(shutil.copy(script, alone))


def run_bug(_, ranks: int, number: str, name: str, *flags) -> Done:
    """A bug, as tools/bug.py runs it. data["said"] is what it ends with."""
    edit = bug.bugs_of(number)[name]
    with tempfile.TemporaryDirectory() as folder:
        script = bug.copy_with_bug(number, edit, Path(folder))
        path = Path(folder, "out.json")
        flags = [*bug.flags_of(edit, [*map(str, flags)]), "--json", path]
        start = torchrun if name in ABORTS else launch
        done = start(DOCTOR, ranks, script, *flags, limit=900)
        text = path.read_text() if path.exists() else ""
    failed = bug.what_failed(done.out.rpartition("\n\n")[2], done.err)
    file = bug.edited(number, edit)[0]
    code, said = bug.outcome(edit, file, done.code, failed)
    data = json.loads(text) if text else {}  # empty: it came to no verdict
    return done._replace(code=code, data=data | {"said": said})


def run_driver(script: str, ranks: int, *flags) -> list:
    """What each rank of a driver script found."""
    with tempfile.TemporaryDirectory() as folder:
        done = launch(ROOT / "tests" / script, ranks, folder, *flags, limit=1500)
        files = [Path(folder, f"rank{rank}.json") for rank in range(ranks)]
        if done.code or not all(path.exists() for path in files):
            raise RuntimeError(f"{script} ended with {done.code}:\n{done.text[-8000:]}")
        return [json.loads(path.read_text()) for path in files]


def run_faulty(script: str, ranks: int, *flags) -> Done:
    """A lesson in which one rank goes wrong, under the doctor; data: when it did."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "time")
        env = {"FAULT_TIME": str(path), "FAULT_DOCTOR": "1"}
        done = launch(ROOT / "tests" / script, ranks, *flags, **env)
        data = {"time": float(path.read_text())} if path.exists() else {}
    return done._replace(data=data)


NBVAL = "pytest -qx --color=no -p no:cacheprovider --nbval --nbval-current-env"
NBVAL += " --nbval-cell-timeout=600"


def run_notebook(name: str, ranks: int) -> Done:
    """Its cells, with so many live ranks; outputs are compared with those committed.
    What a cell starts with `!torchrun` runs in a nursery (the script bin/torchrun);
    data has which lessons did."""
    kernel = ["nice", sys.executable, "tests/kernel.py"]  # what tests open comes first
    command = [*kernel, *NBVAL.split(), f"notebooks/{name}"]
    env = {"NOTEBOOK_BIN": str(ROOT / "tests" / "bin"), "NOTEBOOK_RANKS": str(ranks)}
    launched = []
    with Listener() as listener:
        threading.Thread(target=answer, args=[listener, launched], daemon=True).start()
        done = watch(command, 1400, env | {"COURSE_TEST_LISTENER": listener.address})
    return done._replace(data={"launched": launched})


def answer(listener: Listener, launched: list[str]) -> None:
    """Launch what is asked for, and send back what was printed and the exit code."""
    with contextlib.suppress(OSError):  # closed: the notebook has ended
        while True:
            with listener.accept() as notebook:
                _, number, script, *flags = notebook.recv()  # after --standalone
                launched.append(Path(script).stem)
                ranks = int(number.removeprefix("--nproc_per_node="))
                done = run_of_a_test(script, ranks, *flags)
                done = done or launch(ROOT / script, ranks, *flags)
                notebook.send((done.text, done.code))


def run_of_a_test(script: str, ranks: int, *flags) -> Done | None:
    """The same run, if a test has asked for it: it is not run again for a notebook."""
    flags = [*flags]
    path = None
    if "--json" in flags:
        place = flags.index("--json")
        path = ROOT / flags[place + 1]
        del flags[place : place + 2]
    job = (Path(script).stem, ranks, *flags)
    if job not in STARTED:
        return None
    do(job)  # here, if it still waits for its turn: a cell has a time limit
    done = STARTED[job].result()
    if path:
        path.write_text(json.dumps(done.data, indent=1))
    return done


class Exited(BaseException):
    """What os._exit becomes in `run_here`."""


def run_here(lesson: str, *flags, **env) -> tuple[int, str, str]:
    """Run a lesson as `python lesson.py` would, in this process: code, out, err.

    For what a lesson does before it makes a group. It does not wait while it refuses.
    """

    def leave(code):
        raise Exited(code)

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    path = ROOT / f"{lesson}.py"  # also of "tools/check"
    if not path.exists():
        path = path_of(lesson)
    path = str(path)
    with (
        mock.patch.object(sys, "argv", [path, *map(str, flags)]),
        mock.patch.object(os, "_exit", leave),
        mock.patch.object(time, "sleep", lambda seconds: None),
        mock.patch.object(signal, "signal"),  # a lesson's handlers are not this test's
        mock.patch.dict(os.environ, CLEAN_ENV | env, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except (Exited, SystemExit) as ended:
            code = ended.args[0] if ended.args else 0
    return code or 0, said(out), said(err)


def said(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("utf-8")


@functools.cache
def load(lesson: str):
    """A lesson, or a script of beyond/, as a module."""
    return importlib.import_module(lesson)
