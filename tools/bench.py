"""`make bench`: how long a step takes by hand and by DTensor, and how long a lesson.

First, lesson 01's MLP: a step (forward and backward) in one process, by hand (tp_mlp)
and by PyTorch (dtensor_mlp), over hidden sizes and numbers of tokens; no time is
printed of a size at which output or gradients differ. Then each lesson and script
against a bare one, which imports what the lesson imports, joins a process group, and
makes one optimizer if the lesson has any: what such a program takes before it does
anything. The target is 1.4 times that, for 05, 10, 14 and 15 it is 1.8.
Its seconds are those of the processors, all ranks and torchrun together: what else
runs on this machine does not count. What is compared alternates, so that a busy machine
slows both equally; a ratio is the median over the rounds, with the quartiles. Seconds
belong to this machine, ratios nearly not.
"""

import argparse
import ast
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from check import ROOT, Parser, output_path
from lessons import RANKS, TORCHRUN, scripts_of

HIDDEN = [2**i for i in range(4, 12)]  # 16 to 2048
TOKENS = [64, 256]
# What a lesson is compared with, below its imports.
BARE = """
import os
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
OPTIMIZER = "torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])\n"
NO_OPTIMIZER = "00", "14"  # they train nothing
# On 8 ranks, or training and saving on several meshes; all others: 1.4.
TARGETS = dict.fromkeys(("05", "10", "14", "15"), 1.8)
ALLOWED = 1e-5  # relative difference in float32, as in the lessons
WAYS = "one process", "by hand", "DTensor"


def time_mlps(hidden: int, tokens: int, group, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of the three ways, on this rank.

    A collective call by all ranks of the group. One process is only rank 0;
    the others wait for it at the next start, and have 0.0 seconds.
    Shapes: x [1, tokens, hidden], the MLP's width 4·hidden, float32.
    """
    import torch
    import torch.distributed as dist

    lesson = importlib.import_module("01_naive_mlp_tp")
    torch.manual_seed(1)
    full = lesson.MLP(hidden, 4 * hidden)
    x = torch.randn(1, tokens, hidden)
    mlps = [make(full, group) for make in (lesson.tp_mlp, lesson.dtensor_mlp)]
    worst = max(difference(lesson, mlp, full, x) for mlp in mlps)
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, worst, group)
    if max(everyone) > ALLOWED:
        raise ValueError(f"hidden {hidden}: results are off by {max(everyone):.1e}")
    mlps.insert(0, full if group.rank() == 0 else None)
    seconds = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        for way, mlp in zip(WAYS, mlps):
            dist.barrier(group)  # one start for all
            start = time.perf_counter()
            if mlp is not None:
                y = mlp(x.clone().requires_grad_())
                y.square().mean().backward()
            if number > 1:  # two rounds to warm up
                seconds[way].append(time.perf_counter() - start if mlp else 0.0)
    return seconds


def difference(lesson, mlp, full, x) -> float:
    """The largest relative difference of the output or a gradient from one process."""
    import torch

    torch.manual_seed(2)
    dy = torch.randn(x.shape)
    found = {}
    for name, module in (("mlp", mlp), ("full", full)):
        module.zero_grad()
        own_x = x.clone().requires_grad_()
        y = module(own_x)
        y.backward(dy)
        found[name] = {"y": y, **lesson.gradients_of_mlp(module, own_x)}
    pairs = [(found["mlp"][key], found["full"][key]) for key in found["full"]]
    return max(lesson.rel_diff(got, expected) for got, expected in pairs)


def ratio(seconds: dict[str, list[float]], way: str, to: str) -> dict:
    """Of two ways' times, round by round: the median, and the quartiles."""
    ratios = [a / b for a, b in zip(seconds[way], seconds[to])]
    if len(ratios) == 1:
        ratios *= 2
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high]}


def rank_main(path: str, hidden: list, tokens: list, rounds: int) -> None:
    """What each rank does: all sizes; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rows = []
    for T in tokens:
        for D in hidden:
            # Large ones need fewer rounds: a step is long against what disturbs it.
            seconds = time_mlps(
                D, T, dist.group.WORLD, max(5, rounds // (1 + D // 256))
            )
            rows.append({"tokens": T, "hidden": D, "seconds": seconds})
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def bench_steps(ranks: int, hidden: list, tokens: list, rounds: int) -> list[dict]:
    """Rows of the first table, printed when all are known."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [*TORCHRUN, f"--nproc_per_node={ranks}", __file__]
        command += ["--rank", str(path), "--rounds", str(rounds)]
        command += ["--hidden", listed(hidden), "--tokens", listed(tokens)]
        subprocess.run(command, check=True)
        rows = json.loads(path.read_text())
    print(f"A step of lesson 01's MLP, {ranks} ranks; ratios with their quartiles")
    print("tokens  hidden  one process  by hand / one process     by hand / DTensor")
    for row in rows:
        seconds = row.pop("seconds")
        row["one process ms"] = 1000 * statistics.median(seconds["one process"])
        row["by hand / one process"] = ratio(seconds, "by hand", "one process")
        row["by hand / DTensor"] = ratio(seconds, "by hand", "DTensor")
        alone, dtensor = row["by hand / one process"], row["by hand / DTensor"]
        size = f"{row['tokens']:>6}  {row['hidden']:>6}"
        ratios = f"{spread(alone):>21}  {spread(dtensor):>20}"
        print(f"{size}  {row['one process ms']:>8.2f} ms  {ratios}")
    slower = [row for row in rows if row["by hand / DTensor"]["median"] > 1]
    for row in slower:
        size = f"{row['tokens']} tokens, hidden {row['hidden']}"
        print(f"By hand is slower than DTensor at {size}.")
    if not slower:
        print("By hand is slower than DTensor at no size.")
    return rows


def spread(ratio: dict) -> str:
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})"


def bench_lessons(rounds: int, lessons: list[Path]) -> list[dict]:
    """Rows of the second table: a lesson and its bare script, alternately."""
    print("\nA lesson against a script that imports the same and joins a group, both")
    print("under torchrun; seconds of processors")
    print("lesson               ranks  bare s  lesson s  lesson / bare        target")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare.py")
        for lesson in lessons:
            bare.write_text(bare_of(lesson), "utf-8")
            ranks = RANKS.get(lesson.stem, 2)
            seconds = {"bare": [], "lesson": []}
            for _ in range(rounds):
                for name, script in (("bare", bare), ("lesson", lesson)):
                    command = [*TORCHRUN, f"--nproc_per_node={ranks}", str(script)]
                    before = seconds_of_children()
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    seconds[name].append(seconds_of_children() - before)
            row = {"lesson": lesson.stem, "ranks": ranks}
            for name in seconds:
                row[f"{name} s"] = statistics.median(seconds[name])
            row["lesson / bare"] = ratio(seconds, "lesson", "bare")
            row["target"] = TARGETS.get(lesson.stem[:2], 1.4)
            print(row_of(row), flush=True)
            rows.append(row)
    return rows


def bare_of(lesson: Path) -> str:
    """A script with the imports of a lesson, which joins a group and ends."""
    text = lesson.read_text("utf-8")
    imports = []
    for node in ast.parse(text).body:
        for inner in node.body if isinstance(node, ast.Try) else [node]:
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                imports.append(ast.unparse(inner))
    # Of a script, its helpers and the lessons too; `from __future__` has to be first.
    folder = f"import sys; sys.path.insert(0, {str(lesson.parent)!r})"
    lines = [imports[0], folder, *imports[1:], BARE]
    if lesson.stem[:2] not in NO_OPTIMIZER:
        lines.append(OPTIMIZER)
    return "\n".join(lines)


def seconds_of_children() -> float:
    """Of processors, for all processes that this one started and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def row_of(row: dict) -> str:
    """A row of the second table; ✗ where the ratio is above the target."""
    times = f"{row['ranks']:>5}  {row['bare s']:>6.1f}  {row['lesson s']:>8.1f}"
    found = row["lesson / bare"]
    mark = " ✗" if found["median"] > row["target"] else ""
    text = f"{row['lesson']:<19}  {times}  {spread(found):<19}  {row['target']:>5}"
    return text + mark


def listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def numbers(text: str) -> list[int]:
    """The opposite of listed."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> None:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    lessons = scripts_of(ROOT)
    names = [path.stem for path in lessons]
    add("--ranks", type=positive, default=2, help="number of ranks (2)")
    add("--hidden", type=numbers, default=HIDDEN, help="sizes, as 16,256")
    add("--tokens", type=numbers, default=TOKENS, help="numbers of tokens (64,256)")
    add("--rounds", type=positive, default=40, help="of a step of a small MLP (40)")
    add("--times", type=int, default=5, help="each lesson runs, 0: no lessons (5)")
    text = "only these lessons and scripts"
    add("--lessons", nargs="+", choices=names, metavar="NAME", default=names, help=text)
    text = "write both tables there"
    add("--json", type=output_path, metavar="PATH", help=text)
    add("--rank", metavar="PATH", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        sys.path.append(str(ROOT))
        rank_main(args.rank, args.hidden, args.tokens, args.rounds)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps = bench_steps(args.ranks, args.hidden, args.tokens, args.rounds)
    chosen = [path for path in lessons if path.stem in args.lessons]
    lessons = bench_lessons(args.times, chosen) if args.times > 0 else []
    if args.json:
        args.json.write_text(json.dumps({"steps": steps, "lessons": lessons}, indent=1))


if __name__ == "__main__":
    main()
