"""Is my tensor-parallel model right? If not: which parameter is wrong, and why?

    python tools/audit.py my_model.py --ranks 2 4
    python tools/audit.py --example tp            also: dtensor, hf

my_model.py defines

    build() -> nn.Module                    the full model
    parallelize(model, tp_group) -> Module  your parallel version of it, made in any way
    batch(step) -> (inputs, target)         inputs: a tensor, a tuple of arguments, or
                                            a dict of keyword arguments

and may define

    loss(output, target)                    or loss(output, target, tp_group), where
                                            tp_group is None for the full model.
                                            Default: cross entropy for integer targets,
                                            otherwise the mean squared error
    after_backward(model)                   sums of gradients that your training makes
    clip(model, max_norm) -> norm           your own clipping
    optimizer(parameters)                   default: AdamW
    names() -> dict                         parallel name → full name, of modules or
                                            parameters whose names differ

The tool starts the ranks itself (gloo on CPU, NCCL if each rank has a GPU) and compares
with one process: parameters, outputs of modules, gradients, dropout masks, norms, and
parameters after some steps. It makes constant parameters of the full model unique, and
then finds every element of a rank's parameters by its value, so names and placements
need not be told. Exit code: 0 right, 1 a fault, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "tools" / "audit_examples"
# Where a rank is before it calls parallelize(): an error there is wrong use. And when
# it compares the results: an error there is a bug of this tool.
BEFORE = (
    "importing the file", "in build", "in batch", "in the full model",
    "in the audit itself, not in your model",
)  # fmt: skip
STARTUP = 100  # seconds in which a rank must have imported torch and the model
# category → what is wrong, the line to look at, and where the course explains it.
ADVICE = {
    "batch": (
        "The ranks of a TP group have different batches. They compute one model "
        "together, so partial sums of different tokens are added up.",
        "Seed the data by the data-parallel rank, or broadcast the batch in the group.",
        "lesson 02, --break data",
    ),
    "build": (
        "build() uses random numbers that differ between ranks, so the ranks start "
        "from different models.",
        "Build with the same seed on all ranks, or broadcast the parameters.",
        "lesson 02, --break seed",
    ),
    "not a piece": (
        "The values of this parameter are in no parameter of the full model: this rank "
        "has initialized it itself, or has combined or scaled it.",
        "Slice the full parameter instead of initializing the shard.",
        "lesson 02, --break seed",
    ),
    "wrong parameter": (
        "This parameter holds elements that belong to another parameter of the full "
        "model.",
        "A fused weight (q, k, v or gate, up) must be split into its parts first, and "
        "each part into T slices. An expert must be on the rank that calls it.",
        "lesson 02, --break qkv",
    ),
    "forward bias": (
        "The output of this module is right but for its bias, which was added on every "
        "rank before a sum.",
        "Add the bias of a row-parallel linear after the all-reduce, or on one rank.",
        "lesson 01, --break bias",
    ),
    "buffer": (
        "This buffer (a table of positions, a mask) is not that of the full model, nor "
        "each rank's slice of it.",
        "A table of positions starts at rank t's own offset, not at 0; if the module "
        "gathers the sequence first, it needs the full table.",
        "lesson 04, --break rotary",
    ),
    "wrong piece": (
        "A rank holds the piece of another rank.",
        "Take the slice of the group rank. Did a broadcast overwrite the shards? "
        "DistributedDataParallel sends the parameters of its first rank to all others. "
        "With c ranks per key/value head, rank t holds head t // c.",
        "notebook 12, fault 3; beyond/09, --break order",
    ),
    "fused": (
        "A fused weight is split into T slices as if it were one matrix: rank 0 gets "
        "rows of q only.",
        "Split it into its parts (q, k, v or gate, up) first, and each part into T "
        "slices.",
        "lesson 02, --break qkv",
    ),
    "missing": (
        "Some elements of the full model are on no rank, and others probably twice.",
        "Check which slice each rank takes: the group rank, the dim, the order of "
        "blocks in a fused weight.",
        "lesson 02, --break qkv",
    ),
    "forward partial": (
        "The sum of this module's output over the ranks is right, so each rank has "
        "only a partial sum: an all-reduce is missing.",
        "All-reduce the output of this row-parallel module (g).",
        "lesson 01, ReduceFromTP",
    ),
    "forward T times": (
        "The output is T times too large: a tensor that every rank has in full was "
        "summed over the ranks, or it was summed twice.",
        "Reduce once, and only partial sums.",
        "lesson 01, --break g",
    ),
    "forward 1/T": (
        "The output is 1/T of the right one: it was averaged instead of summed.",
        "Use ReduceOp.SUM, and do not divide by the number of ranks.",
        "lesson 01, ReduceFromTP",
    ),
    "forward": (
        "This is the first module whose output is wrong.",
        "Look at this module's parameters in the table, at its bias (is it added on "
        "every rank before a sum?), and at what it assumes about the shape of its "
        "input: a mean, a norm or a number of heads may be that of the local shard. A "
        "table with an entry per head is sliced like the heads. A sharded embedding "
        "has its first row at rank · rows, and gives 0 for tokens of other ranks "
        "before the sum.",
        "lesson 01, --break bias; lesson 02, --break qkv; lesson 03, section 1",
    ),
    "forward in another order": (
        "The ranks hold the right elements of this output in the wrong order or on the "
        "wrong ranks.",
        "Check the dim and the order in which pieces are split, gathered and reshaped, "
        "and that each rank takes the piece of its own group rank.",
        "lesson 00, section 6; lesson 02, --break qkv",
    ),
    "forward right on": (
        "The output of this module is right on some ranks and wrong on others.",
        "Look for what depends on the rank: an offset (positions, the first row of the "
        "vocabulary, a mask), an index of a slice, or a branch such as if rank == 0.",
        "lesson 03; lesson 04, --break rotary",
    ),
    "loss backward": (
        "The loss is right and its gradient is not: the gradient of the model's output "
        "is wrong before any module has been through backward.",
        "Look at the backward of the loss: masked positions, the division by the "
        "number of targets, and what it saved for backward. Does a collective in the "
        "loss have the right backward?",
        "lesson 03, --break ignored and --break exponentials",
    ),
    "loss": (
        "The outputs of all modules are right and the loss is not.",
        "Check over which ranks and by which count the loss is averaged, and whether "
        "padding of the vocabulary joins in.",
        "lesson 03",
    ),
    "backward partial": (
        "Backward returns a partial sum to the output of this module: the modules that "
        "read it return each rank's own part only.",
        "All-reduce dL/dx in the backward of the modules that read this output (f, in "
        "front of a column-parallel linear).",
        "lesson 01, --break f",
    ),
    "gradient sum": (
        "The sum of this gradient over the ranks that hold the same piece is right, so "
        "each rank has only a partial gradient: a reduction is missing.",
        "If dL/d(output of the module) is right, sum the parameter's gradient after "
        "backward (a replicated weight with a sharded input). If it is partial as "
        "well, f is missing: all-reduce dL/dx in the backward of the column-parallel "
        "linears that read this module's output.",
        "lesson 01, --break f; lesson 04, --break norms",
    ),
    "gradient mean": (
        "The mean of this gradient over the replicas is right, but they differ.",
        "Average the gradient over the ranks that hold this parameter.",
        "lesson 01, average_gradients",
    ),
    "gradient factor": (
        "This gradient is right up to a factor.",
        "T: summed twice, or g all-reduces in backward too. 1/T: averaged instead of "
        "summed, or a bias is added as bias/T on every rank before a sum. The loss may "
        "be divided by the wrong number of targets.",
        "lesson 01, --break g",
    ),
    "gradient scaled sum": (
        "The sum of this gradient over the ranks is right up to a factor.",
        "A reduction is missing, and the loss or the sum is scaled.",
        "lesson 01, --break f and --break average",
    ),
    "gradient factor per rank": (
        "Each rank's gradient is right up to a factor of its own.",
        "Each rank divides by its own number (of tokens, of samples), or a rank's "
        "partial sum is scaled by the rank: divide by the number of all ranks.",
        "notebook 12, fault 12",
    ),
    "gradient of several pieces": (
        "The ranks hold different pieces of this parameter, and their gradients were "
        "summed or averaged over the ranks.",
        "Reduce gradients of sharded parameters over the data-parallel group only. "
        "DistributedDataParallel must get that group as process_group.",
        "notebook 12, fault 3",
    ),
    "gradient tied": (
        "Two parameters hold the same piece, and only the sum of their gradients is "
        "right: a tied weight has become two parameters.",
        "Assign the same nn.Parameter to both modules after sharding.",
        "lesson 03, --break tie",
    ),
    "gradient of another shape": (
        "The gradient does not have the shape of its parameter.",
        "Look for code that assigns p.grad or p.data.",
        "lesson 01",
    ),
    "gradient None": (
        "Autograd did not reach this parameter: a collective that it does not track, "
        "detach(), or a copy of the parameter is used in forward.",
        "Wrap the collective in an autograd.Function.",
        "beyond/13, --break plain",
    ),
    "gradient of its uses": (
        "This weight is tied: several modules use it, and their gradients are not "
        "summed with the same factor. Factors are means over the ranks that hold the "
        "same piece: 1 is "
        "complete, 1/T is a partial gradient that was not summed, T was summed twice, "
        "0 was lost.",
        "0: look for a detach() or a copy. 1/T: all-reduce dL/dx in the module that "
        "this use comes from (f), or sum the gradient of this use alone.",
        "lesson 03, --break tie",
    ),
    "backward of a module": (
        "The gradient that arrives at this module is right, and the gradient that it "
        "returns is wrong: its own backward is.",
        "Look at the backward of the functions and collectives that this module calls. "
        "What other ranks sent forward is needed again in backward; the gradient of "
        "what this rank received belongs to the rank that sent it, and is a sum over "
        "ranks; the weights of a softmax over all ranks need the statistics of all.",
        "beyond/11, --break stale, home and lse; lesson 01, the table of collectives "
        "and their backward",
    ),
    "backward slice": (
        "This module gathers its input, and its backward returns each rank's slice of "
        "its own partial gradient: what the other ranks computed for that slice is "
        "lost.",
        "The backward of an all-gather in front of column-parallel linears is a "
        "reduce-scatter: sum over the ranks, then slice.",
        "lesson 04, --break split",
    ),
    "gradient zero": (
        "This gradient is zero on all ranks.",
        "Look for a mask or a detach() between this parameter and the loss.",
        "beyond/13, --break plain",
    ),
    "gradient another rank's piece": (
        "This rank has the gradient of another rank's piece.",
        "Check the order of ranks in the group and the index of the slice in backward.",
        "lesson 01, GatherFromTP",
    ),
    "gradient permuted": (
        "The gradient has the right elements in another order.",
        "Check the order in which pieces are gathered or split.",
        "lesson 02, --break qkv",
    ),
    "gradient differs between replicas": (
        "Ranks that hold the same piece have different gradients, and their sum is not "
        "right either: some modules that read this module's output return a complete "
        "gradient to it, others a partial one.",
        "If modules are named under Seen, all-reduce dL/dx in their backward (f). If a "
        "parameter closer to the loss is wrong as well, mend that first.",
        "lesson 01, --break f; beyond/09, --break input",
    ),
    "gradient unexplained": (
        "This gradient is wrong in no simple relation to the right one.",
        "The modules named under Seen are the first in backward that return a wrong "
        "gradient: look at the backward of their collectives (a slice without a sum?). "
        "If a parameter closer to the loss is wrong as well, mend that first.",
        "lesson 01, the table of collectives and their backward; lesson 04, --break "
        "split",
    ),
    "dropout differs": (
        "The input of this dropout is replicated, and the ranks drop different "
        "elements of it, so their replicas drift apart.",
        "Use the same random state on all ranks of the group here.",
        "lesson 02, --break mask-residual",
    ),
    "dropout same": (
        "The input of this dropout is sharded, and all ranks drop the same elements.",
        "Give each rank its own part of the mask, or its own random state.",
        "lesson 02, --break mask-heads",
    ),
    "dropout recomputed": (
        "Backward computes this dropout again (recomputation) with another mask than "
        "forward had: the gradient is that of another model.",
        "Keep preserve_rng_state=True in torch.utils.checkpoint, and restore every "
        "generator that dropout uses.",
        "notebook 12, fault 7",
    ),
    "dropout loss": (
        "With dropout (or other noise in train mode) the ranks of a TP group have "
        "different losses: somewhere it differs for a replicated tensor.",
        "Use the same random state on all ranks for replicated tensors.",
        "lesson 02, --break mask-residual",
    ),
    "norm": (
        "The norm of the gradient is wrong.",
        "Sum the squares of sharded gradients over the group, and count replicated "
        "gradients once.",
        "lesson 02, --break clip",
    ),
    "not in the optimizer": (
        "The optimizer does not have this parameter. Was it created before the model "
        "was made parallel?",
        "Make the optimizer after parallelize().",
        "notebook 12, fault 2",
    ),
    "stale": (
        "The loss is right with the first parameters, and wrong after an update that "
        "was right: the model still uses something that was computed from the old "
        "parameters.",
        "Compute it in forward, or again after each step (a norm that was stored, a "
        "copy or a merged form of a weight, a cache).",
        "lesson 03, --break tie: two parameters for one weight",
    ),
    "update missing": (
        "The gradients are right, and some ranks have not updated this parameter: they "
        "skipped a step.",
        "Ranks must decide together: all-reduce the flag (an overflow, a nan) by which "
        "a step is skipped.",
        "notebook 12, fault 8",
    ),
    "update differs between replicas": (
        "The gradients are right, and after the step the replicas of this parameter "
        "differ.",
        "All ranks need the same flags, norms, learning rates and optimizer state.",
        "lesson 02, --break drift; notebook 12, fault 8",
    ),
    "update": (
        "The gradients are right and the updated parameter is not: the optimizer is "
        "not elementwise (it takes a norm or a matrix product of a shard).",
        "Gather what the optimizer needs of the full parameter, or use an elementwise "
        "optimizer.",
        "notebook 12, fault 9",
    ),
}
MOST_NAMES = 16  # in one paragraph
RIGHT = ("right", "not compared", "frozen")  # gradients without a mark
# What may follow from the first fault: its own paragraph would only repeat that one.
FOLLOW = (
    "gradient unexplained",
    "gradient differs between replicas",
    "gradient factor",
    "gradient of its uses",
)


# What gloo and NCCL say on a rank whose peer has died or never calls.
LOST = re.compile(
    "gloo|Connection (closed|reset|refused)|Broken pipe|NCCL|DistNetworkError|"
    "DistBackendError|DistStoreError|wait timeout|[Tt]imed out"
)


def wrong_use(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


def advice_for(category: str) -> tuple[str, str, str]:
    """The longest category that this one begins with."""
    names = [name for name in ADVICE if category.startswith(name)]
    return ADVICE[max(names, key=len)]


def start_ranks(args, ranks: int, path: Path, folder: Path) -> dict:
    """Run one audit on N ranks. Returns the findings, or what went wrong."""
    import torch.distributed as dist

    limit = timedelta(seconds=args.timeout)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit
    )
    out = folder / f"{ranks}.json"
    options = {"path": str(path), "out": str(out), "port": store.port}
    for name in ("dtype", "seed", "steps", "clip", "timeout"):
        options[name] = getattr(args, name)
    processes = []
    for rank in range(ranks):
        env = dict(os.environ, AUDIT=json.dumps(options), RANK=str(rank))
        env.update(WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault(
            "GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
        )
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), str(ROOT)])
        command = [sys.executable, str(ROOT / "tools" / "audit_rank.py")]
        with open(folder / f"{ranks}.{rank}.log", "w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        processes.append(process)
    try:
        watch(processes, store, args.timeout)
        ended = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if out.exists():
        return json.loads(out.read_text())
    failed = what_failed(processes, store, ended)
    result = {"ranks": ranks, "findings": [], "failed": failed}
    mistake = wrong_use_on(ranks, store)
    if mistake:
        result["wrong use"] = mistake
    return result


def wrong_use_on(ranks: int, store) -> str:
    """The error of a rank that failed before it called parallelize()."""
    for rank in range(ranks):
        key = f"error/{rank}"
        if store.check([key]):
            status, text, _ = json.loads(store.get(key))
            if status in BEFORE:
                return f"{status}: {text}"
    return ""


def watch(processes: list, store, timeout: float) -> None:
    """Wait until all ranks have ended, one has failed, or none has made progress."""
    seen = []
    changed = time.time()
    while any(process.poll() is None for process in processes):
        statuses = statuses_of(processes, store)
        if statuses != seen:
            seen = statuses
            changed = time.time()
        is_started = all(status not in ("", "starting") for status in statuses)
        if time.time() - changed > (timeout if is_started else max(timeout, STARTUP)):
            return
        if any(process.poll() for process in processes):
            time.sleep(2)  # the others may have something to say as well
            return
        time.sleep(0.05)


def statuses_of(processes: list, store) -> list[str]:
    statuses = []
    for rank in range(len(processes)):
        key = f"status/{rank}"
        statuses.append(store.get(key).decode() if store.check([key]) else "")
    return statuses


def what_failed(processes: list, store, ended: list[int | None]) -> list[str]:
    """A line for each error that ranks raised themselves, then where the others were.

    A rank that loses its connection because another one has died is no cause.
    ended: exit codes of the ranks that had ended by themselves.
    """
    raised = {}  # error → ranks
    lost = []
    waiting = []
    for rank, status in enumerate(statuses_of(processes, store)):
        key = f"error/{rank}"
        if not store.check([key]):
            where = status or "has not started"
            if ended[rank]:
                where = f"ended with exit code {ended[rank]} ({where})"
            waiting.append(f"rank {rank}: {where}")
            continue
        status, text, _ = json.loads(store.get(key))
        if LOST.search(text):
            lost.append((rank, status))
        else:
            raised.setdefault(f"raised {text} ({status})", []).append(rank)
    lines = [f"{ranks_in_words(ranks)} {text}" for text, ranks in raised.items()]
    if raised and lost:
        names = ranks_in_words([rank for rank, _ in lost])
        return [*lines, f"{names} lost the connection", *waiting]
    for rank, status in lost:
        waiting.append(f"rank {rank} waited for other ranks in vain ({status})")
    return lines + waiting


def ranks_in_words(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def wrap(text: str, indent: str = "   ") -> str:
    return textwrap.fill(text, 88, initial_indent=indent, subsequent_indent=indent)


def show(result: dict) -> bool:
    """Print one audit. Returns whether everything is right."""
    print(f"\n{result['ranks']} ranks")
    if "failed" in result:
        print("   ✗ the run did not end")
        for line in result["failed"]:
            print(wrap(line, "      "))
        return False
    print(f"   loss {result['loss']:.8g}, one process {result['full_loss']:.8g}")
    rows = result["parameters"]
    width = max(len("parameter"), *(len(row["parameter"]) for row in rows))
    places = max(len("on rank 0"), *(len(row["placement"]) for row in rows))
    print(f"   {'parameter':<{width}}  {'on rank 0':<{places}}  gradient")
    for row in rows:
        mark = "" if row["gradient"] in RIGHT else "  ✗"
        name = f"{row['parameter']:<{width}}"
        print(f"   {name}  {row['placement']:<{places}}  {row['gradient']}{mark}")
    if result["unmatched"]:
        print(wrap(f"not in the full model: {', '.join(result['unmatched'])}"))
    if result["modules"]:
        pairs = [f"{own} is {full}" for own, full in result["modules"].items()]
        print(wrap(f"modules matched by their parameters: {some(pairs)}"))
    calls = []
    for name, count in result["calls"].items():
        calls.append(f"{name.replace(': ', ' ')} {count}")  # "forward all-reduce 2"
    print(wrap(f"calls of collectives: {'; '.join(calls) or 'none'}"))
    for number, group in enumerate(groups_of(result["findings"]), 1):
        if number > 1 and group[0]["category"].startswith(FOLLOW):
            print(f"\n   ✗ {number}. {group[0]['category']}, may follow from 1")
            print(wrap(some([finding["where"] for finding in group]), "      "))
        else:
            show_fault(number, group)
    return not result["findings"]


def groups_of(findings: list[dict]) -> list[list[dict]]:
    """Findings of one category together, in the order in which they were found."""
    groups = {}
    for finding in findings:
        groups.setdefault(finding["category"], []).append(finding)
    return list(groups.values())


def some(names: list[str]) -> str:
    """The first names of a list; --json and the table have all."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"


def show_fault(number: int, group: list[dict]) -> None:
    first = group[0]
    what, line, where = advice_for(first["category"])
    print(f"\n   ✗ {number}. {first['where']}: {first['category']}")
    print(wrap(what, "      "))
    if first["text"]:
        print(wrap(f"Seen: {first['text']}.", "      "))
    others = [finding["where"] for finding in group[1:]]
    if others:
        print(wrap(f"The same holds for {some(others)}.", "      "))
    print(wrap(f"Likely change: {line}", "      "))
    print(wrap(f"Explained in {where}.", "      "))


def parse_args(arguments: list[str] | None):
    about = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about[0] + "\n\n" + about[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    add("file", nargs="?", type=Path, help="the file that defines the model")
    add("--example", choices=names, help="audit a model that comes with the course")
    add("--ranks", nargs="+", type=int, default=[2], help="numbers of ranks (2)")
    add("--dtype", choices=("float64", "float32"), default="float64", help="(float64)")
    add("--steps", type=int, default=2, help="steps of training (2)")
    add("--clip", type=float, default=1.0, help="maximum gradient norm (1)")
    add("--seed", type=int, default=1, help="(1)")
    add("--timeout", type=float, default=60, help="seconds without progress (60)")
    add("--json", type=Path, metavar="FILE", help="write all findings there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    path = EXAMPLES / f"{args.example}.py" if args.example else args.file
    if path is None:
        return wrong_use("name a file, or --example tp")
    if not path.is_file():
        return wrong_use(f"{path}: no such file")
    text = path.read_text("utf-8")
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        return wrong_use(f"{path}, line {error.lineno}: {error.msg}")
    for name in ("build", "parallelize", "batch"):
        # With `from … import *` only the ranks can tell.
        if name not in text and "import *" not in text:
            return wrong_use(f"{path} does not define {name}")
    if min(args.ranks) < 2:
        return wrong_use(f"--ranks {min(args.ranks)}: take 2 or more")
    if args.steps < 1 or args.timeout <= 0 or args.clip <= 0:
        return wrong_use("--steps, --timeout and --clip must be greater than 0")
    results = []
    right = True
    print(f"{path}  {args.dtype}, compared with one process")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            result = start_ranks(args, ranks, path.resolve(), Path(folder))
            if "wrong use" in result:
                return wrong_use(f"{path}: {result['wrong use']}")
            results.append(result)
            right = show(result) and right
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print(f"\n{'RIGHT' if right else 'WRONG'}  {path.name}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
