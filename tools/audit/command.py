"""The command: reads arguments, starts the ranks, watches them, prints the findings."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from datetime import timedelta
from pathlib import Path

from .findings import some

TOOLS = Path(__file__).resolve().parents[1]
EXAMPLES = Path(__file__).parent / "examples"
# Phases of a rank before its model is parallel: an error there is wrong use.
BEFORE = ("importing the file", "build", "batch", "the full model", "optimizer()")
# Phases in which it runs: an error there is a fault of it.
PARALLEL = ("forward", "backward", "two batches", "dropout", "training")
OWN = "the audit itself, not your model"
STARTUP = 100  # seconds in which a rank must have imported torch and the model
BOUNDS = {  # flag → least and most, and the reason of the bound
    "ranks": (2, 64, "; each is a process of about 0.3 GB on this machine"),
    "steps": (1, 1e6, ""),
    "clip": (1e-12, 1e12, ""),
    "seed": (0, 2**60, ""),
    "timeout": (1e-3, 1e6, ""),
}
RIGHT, WRONG, UNKNOWN = "RIGHT", "WRONG", "NOT KNOWN"
CODES = {RIGHT: 0, WRONG: 1, UNKNOWN: 2}
# What gloo and NCCL say on a rank whose peer has died or never calls, and what they
# say if ranks call with tensors of different sizes.
LOST = re.compile(
    "gloo|Connection (closed|reset|refused)|Broken pipe|NCCL|DistNetworkError|"
    "DistBackendError|DistStoreError|wait timeout|[Tt]imed out"
)
SIZES = re.compile("EnforceNotMet|enforce fail|preamble")
SAY = re.compile("error|enforce|what\\(\\)|abort|assert", re.IGNORECASE)


class WrongUse(Exception):
    """Ends the command with one line and exit code 2."""


# ---- Ranks


def start_ranks(args, ranks: int, path: Path, folder: Path) -> dict:
    """Run one audit on N ranks. Returns the findings, or what went wrong."""
    import torch.distributed as dist

    limit = timedelta(seconds=args.timeout)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit
    )
    out = folder / f"{ranks}.json"
    names = ("dtype", "seed", "steps", "clip", "timeout", "forward")
    options = {name: getattr(args, name) for name in names}
    options.update(path=str(path), out=str(out), port=store.port, parent=os.getpid())
    processes = []
    try:
        for rank in range(ranks):
            env = environment(options, rank, ranks, store.port)
            command = [sys.executable, str(TOOLS / "audit.py")]
            with open(folder / f"{ranks}.{rank}.log", "w") as log:
                process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            processes.append(process)
        watch(processes, store, args.timeout)
        ended = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    if out.exists():
        return json.loads(out.read_text())
    logs = [folder / f"{ranks}.{rank}.log" for rank in range(ranks)]
    return {"ranks": ranks, "findings": [], **what_failed(store, ended, logs)}


def environment(options: dict, rank: int, ranks: int, port: int) -> dict:
    """A rank's variables: the user's, and those that torchrun sets."""
    env = dict(os.environ, AUDIT=json.dumps(options))
    env.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    env.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    env["MASTER_PORT"] = str(port)
    env.setdefault("OMP_NUM_THREADS", "1")
    interface = "lo0" if sys.platform == "darwin" else "lo"
    env.setdefault("GLOO_SOCKET_IFNAME", interface)
    known = [path for path in [os.environ.get("PYTHONPATH")] if path]
    env["PYTHONPATH"] = os.pathsep.join([*known, str(TOOLS.parent)])
    return env


def watch(processes: list, store, timeout: float) -> None:
    """Wait until all ranks have ended, one has failed, or none has made progress."""
    seen = []
    changed = time.time()
    while any(process.poll() is None for process in processes):
        statuses = [status_of(store, rank) for rank in range(len(processes))]
        if statuses != seen:
            seen = statuses
            changed = time.time()
        is_started = all(status["phase"] not in ("", "starting") for status in seen)
        if time.time() - changed > (timeout if is_started else max(timeout, STARTUP)):
            return
        if any(process.poll() for process in processes):
            time.sleep(2)  # the others may have something to say as well
            return
        time.sleep(0.05)


def status_of(store, rank: int) -> dict:
    """The phase of a rank, where in it the rank is, and its error."""
    key = f"rank {rank}"
    if not store.check([key]):
        return {"phase": "", "more": "", "error": None}
    return json.loads(store.get(key))


def what_failed(store, ended: list[int | None], logs: list[Path]) -> dict:
    """The verdict on a run without findings, and a line for each error or rank.

    A rank that loses its connection because another one has died is no cause.
    ended: exit codes of the ranks that had ended by themselves.
    """
    raised = {}  # error → ranks
    lost = []
    lines = []
    is_wrong = False  # an error of the parallel model
    for rank, code in enumerate(ended):
        status = status_of(store, rank)
        phase = status["phase"]
        error = status["error"]
        where = f"{status['more']}in {phase}" if phase else "has not started"
        if error is None:
            if code:
                where = f"ended with exit code {code} ({where}){last_words(logs[rank])}"
                is_abort = code in (-signal.SIGABRT, -signal.SIGSEGV)
                is_wrong = is_wrong or (is_abort and phase in PARALLEL)
            lines.append(f"rank {rank}: {where}")
        elif LOST.search(error) and not SIZES.search(error):
            lost.append(rank)
            lines.append(f"rank {rank} waited for other ranks in vain ({where})")
        else:
            if phase == OWN:
                print(status["traceback"], file=sys.stderr)
            if phase in BEFORE or (phase == "parallelize" and not status["calls"]):
                raise WrongUse(f"in {phase}: {error}")
            is_wrong = is_wrong or phase in PARALLEL
            raised.setdefault(f"raised {error} (in {phase})", []).append(rank)
    if raised and lost:
        lines = [line for line in lines if "in vain" not in line]
        lines.insert(0, f"{ranks_in_words(lost)} lost the connection")
    said = [f"{ranks_in_words(ranks)} {text}" for text, ranks in raised.items()]
    lines = said + lines
    if any(SIZES.search(line) for line in lines):
        lines.append(
            "Ranks have called with tensors of different sizes. Does the number of "
            "ranks divide the dim that is split? If the code names float32 (for an "
            "accumulator, a buffer), try --dtype float32."
        )
    return {"verdict": WRONG if is_wrong else UNKNOWN, "failed": lines}


def last_words(log: Path) -> str:
    """What a rank that was aborted has written last."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()[-40:]
    lines = [line.strip()[:300] for line in lines if SAY.search(line)]
    return f": {' | '.join(lines[-2:])}" if lines else ""


def ranks_in_words(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


# ---- Printing


def wrap(text: str, indent: str = "   ") -> str:
    return textwrap.fill(text, 88, initial_indent=indent, subsequent_indent=indent)


def show(result: dict) -> str:
    """Print one audit. Returns the verdict."""
    print(f"\n{result['ranks']} ranks")
    if "failed" in result:
        print("   ✗ the run did not end")
        lines = list(result["failed"])
        if result["verdict"] == UNKNOWN and not any("raised" in x for x in lines):
            lines.append("A slow machine? --timeout gives the ranks more time.")
        for line in lines:
            print(wrap(line, "      "))
        return result["verdict"]
    print(f"   loss {result['loss']:.8g}, one process {result['full_loss']:.8g}")
    if result["first_batch"]:
        print("   all is right with batch(0); these are batch(1), batch(2), …")
    show_parameters(result["parameters"])
    if result["modules"]:
        pairs = [f"{own} is {full}" for own, full in result["modules"].items()]
        print(wrap(f"modules matched by their parameters: {some(pairs)}"))
    calls = [f"{k.replace(': ', ' ')} {count}" for k, count in result["calls"].items()]
    print(wrap(f"calls of collectives: {'; '.join(calls) or 'none'}"))
    for text in result["warnings"][:3]:
        print(wrap(f"warning in parallelize: {text}"))
    if result["not_compared"]:
        print(wrap(f"not compared: {'; '.join(result['not_compared'])}"))
    own = [finding for finding in result["findings"] if not finding["follows"]]
    for number, group in enumerate(groups_of(own, "change"), 1):
        show_fault(number, group)
    follow = [finding for finding in result["findings"] if finding["follows"]]
    if follow:
        print("\n   ✗ these may follow:")
        for group in groups_of(follow):
            names = some([finding["where"] for finding in group])
            print(wrap(f"{group[0]['category']}: {names}", "      "))
    if result["is_rounding"]:
        print(
            "\n   The differences are not larger than the full model's own rounding "
            "errors, so there\n   may be no fault. Compare without the conversion to a "
            "coarse format, in both models."
        )
        return UNKNOWN
    if result["findings"]:
        return WRONG
    if not result["is_split"]:
        print(
            "\n   Nothing is split: every rank holds the full model and calls no "
            "collective.\n   Does parallelize() return the parallel model, and do the "
            "names in its plan exist?"
        )
        return UNKNOWN
    return RIGHT


def show_parameters(rows: list[dict]) -> None:
    width = max(len("parameter"), *(len(row["parameter"]) for row in rows))
    places = max(len("on rank 0"), *(len(row["placement"]) for row in rows))
    print(f"   {'parameter':<{width}}  {'on rank 0':<{places}}  gradient")
    for row in rows:
        mark = "  ✗" if row["is_wrong"] else ""
        name = f"{row['parameter']:<{width}}"
        print(f"   {name}  {row['placement']:<{places}}  {row['gradient']}{mark}")


def groups_of(findings: list[dict], *more: str) -> list[list[dict]]:
    """Findings of one category together, in the order in which they were found. more:
    what else must be the same, such as the advice ("change")."""
    groups = {}
    for finding in findings:
        key = tuple(finding[name] for name in ("category", *more))
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def show_fault(number: int, group: list[dict]) -> None:
    first = group[0]
    print(f"\n   ✗ {number}. {first['where']}: {first['category']}")
    print(wrap(first["what"], "      "))
    if first["text"]:
        print(wrap(f"Seen: {first['text']}.", "      "))
    others = [finding["where"] for finding in group[1:]]
    if others:
        print(wrap(f"The same holds for {some(others)}.", "      "))
    print(wrap(f"Likely change: {first['change']}", "      "))
    print(wrap(f"Explained in {first['explained']}.", "      "))


# ---- Arguments


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise WrongUse(message)


def parse_args(arguments: list[str] | None, text: str):
    kind = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="audit.py", description=text, formatter_class=kind)
    add = parser.add_argument
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    add("file", nargs="?", type=Path, help="the file that defines the model")
    add("--example", choices=names, help="audit a model that comes with the course")
    add("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks (2)")
    add("--dtype", choices=("float64", "float32"), default="float64", help="(float64)")
    add("--steps", type=int, default=2, help="steps of training (2)")
    add("--clip", type=float, default=1.0, help="maximum gradient norm (1)")
    add("--seed", type=int, default=1, help="(1)")
    add("--forward", action="store_true", help="compare no gradients (a served model)")
    add("--timeout", type=float, default=60, help="seconds without progress (60)")
    add("--json", type=Path, metavar="FILE", help="write all findings there")
    args = parser.parse_args(arguments)
    if args.example and args.file:
        raise WrongUse(f"{args.file} and --example {args.example}: take one of them")
    if args.example is None and args.file is None:
        raise WrongUse("name a file, or --example tp")
    for flag, (least, most, why) in BOUNDS.items():
        value = getattr(args, flag)
        for number in value if flag == "ranks" else [value]:
            if not least <= number <= most:
                text = f"must be from {least:g} to {most:g}{why}"
                raise WrongUse(f"--{flag} {number}: {text}")
    return args


def check_file(path: Path) -> None:
    """The file must exist, be Python, and define what the ranks need."""
    if not path.is_file():
        raise WrongUse(f"{path}: no such file")
    if path.suffix != ".py":
        raise WrongUse(f"{path}: must be a Python file, as my_model.py")
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise WrongUse(f"{path}, line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise WrongUse(f"{path}: {error}") from None
    defined = names_in(tree)
    for name in ("build", "parallelize", "batch"):
        # With `from … import *` only the ranks can tell.
        if name not in defined and "*" not in defined:
            near = difflib.get_close_matches(name, defined, 1, 0.8)
            said = f"; is it {near[0]}, in line {defined[near[0]]}?" if near else ""
            raise WrongUse(f"{path} does not define {name}{said}")


def names_in(tree: ast.AST) -> dict[str, int]:
    """The names that a file defines, assigns or imports, and the line of each."""
    found = {}
    for node in ast.walk(tree):
        name = None
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.alias):
            name = node.asname or node.name
        if name is not None:
            found.setdefault(name, node.lineno)
    return found


def write_json(path: Path, results: list) -> None:
    try:
        path.write_text(json.dumps(results, indent=1))
    except OSError as error:
        raise WrongUse(f"--json {path}: {error.strerror}") from None


def on_signal(number, frame):
    raise SystemExit(128 + number)  # `finally` ends the ranks


def run(args) -> int:
    path = EXAMPLES / f"{args.example}.py" if args.example else args.file
    check_file(path)
    if args.json:
        write_json(args.json, [])  # before the run, in case it cannot be written
    results = []
    print(f"{path}  {args.dtype}, compared with one process")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            try:
                result = start_ranks(args, ranks, path.resolve(), Path(folder))
            except WrongUse as error:
                raise WrongUse(f"{path}: {error}") from None
            results.append({**result, "verdict": show(result)})
    if args.json:
        write_json(args.json, results)
    verdicts = [result["verdict"] for result in results]
    verdict = next(v for v in (WRONG, UNKNOWN, RIGHT) if v in verdicts)
    print(f"\n{verdict}  {path.name}")
    if verdict == RIGHT and any(result["not_compared"] for result in results):
        print("in what was compared; see “not compared” above")
    return CODES[verdict]


def main(arguments: list[str] | None = None, text: str = "") -> int:
    """The command. text: its description, which --help prints."""
    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        try:
            return run(parse_args(arguments, text))
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is noticed
    except WrongUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the ranks are ended", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
