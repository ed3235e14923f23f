"""`make bench`: how long a step takes by hand and by DTensor, and how long a lesson.

First, lesson 01's MLP: a step (forward and backward) in one process, by hand (tp_mlp)
and by PyTorch (dtensor_mlp), over hidden sizes and numbers of tokens. Then each lesson
against an empty script under torchrun. What is compared alternates, so that a busy
machine slows both equally; a ratio is the median over the rounds, with the quartiles.
Seconds belong to this machine, ratios nearly not.
"""

import argparse
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

from check import ROOT
from lessons import RANKS, TORCHRUN

HIDDEN = [2**i for i in range(4, 12)]  # 16 to 2048
TOKENS = [64, 256]
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
    mlps = [full if group.rank() == 0 else None]
    mlps += [make(full, group) for make in (lesson.tp_mlp, lesson.dtensor_mlp)]
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


def ratio(seconds: dict[str, list[float]], way: str, to: str) -> dict:
    """Of two ways' times, round by round: the median, and the quartiles."""
    ratios = [a / b for a, b in zip(seconds[way], seconds[to])]
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


def bench_lessons(rounds: int) -> list[dict]:
    """Rows of the second table: a lesson and an empty script, alternately."""
    print("\nA lesson against an empty script, both under torchrun")
    print("lesson             ranks  empty s  lesson s  lesson / empty", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.py")
        empty.write_text("")
        for lesson in sorted(ROOT.glob("0?_*.py")):
            ranks = RANKS.get(lesson.stem, 2)
            seconds = {"empty": [], "lesson": []}
            for _ in range(rounds):
                for name, script in (("empty", empty), ("lesson", lesson)):
                    command = [*TORCHRUN, f"--nproc_per_node={ranks}", str(script)]
                    start = time.perf_counter()
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    seconds[name].append(time.perf_counter() - start)
            row = {"lesson": lesson.stem, "ranks": ranks}
            row |= {f"{name} s": statistics.median(seconds[name]) for name in seconds}
            row["lesson / empty"] = ratio(seconds, "lesson", "empty")
            times = f"{ranks:>5}  {row['empty s']:>7.1f}  {row['lesson s']:>8.1f}"
            times = f"{times}  {spread(row['lesson / empty'])}"
            print(f"{lesson.stem:<17}  {times}", flush=True)
            rows.append(row)
    return rows


def listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def numbers(text: str) -> list[int]:
    """The opposite of listed."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of ranks (2)")
    add("--hidden", type=numbers, default=HIDDEN, help="sizes, as 16,256")
    add("--tokens", type=numbers, default=TOKENS, help="numbers of tokens (64,256)")
    add("--rounds", type=int, default=40, help="of a step of a small MLP (40)")
    add("--times", type=int, default=5, help="each lesson runs, 0: no lessons (5)")
    add("--json", type=Path, metavar="PATH", help="write both tables there")
    add("--rank", metavar="PATH", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        sys.path.append(str(ROOT))
        rank_main(args.rank, args.hidden, args.tokens, args.rounds)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps = bench_steps(args.ranks, args.hidden, args.tokens, args.rounds)
    lessons = bench_lessons(args.times) if args.times else []
    if args.json:
        args.json.write_text(json.dumps({"steps": steps, "lessons": lessons}, indent=1))


if __name__ == "__main__":
    main()
