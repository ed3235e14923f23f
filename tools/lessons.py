"""`make lessons`: run every lesson and every script of beyond/, and print one table.

A lesson passes if its verdict is PASS and its exit code is 0. The exit code here is 1
if any lesson does not pass.
"""

import os
import re
import sys
import time
from pathlib import Path

from check import ROOT, Parser, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
RANKS = {"05_3d_parallel": 8}  # all others: 2
LIMIT = 300  # seconds for one lesson


def judge(code: int | None, text: str) -> tuple[str, str]:
    """("PASS" or "FAIL", the line that says why) of one run."""
    lines = [line for line in text.splitlines() if re.match("PASS|FAIL|error:", line)]
    line = lines[-1] if lines else "no line with PASS, FAIL or error:"
    if code is None:
        return "FAIL", f"stopped after {LIMIT} s; {line}"
    if code == 0 and line.startswith("PASS"):
        return "PASS", line
    return "FAIL", f"exit code {code}; {line}"


def scripts_of(folder: Path) -> list[Path]:
    """All lessons, then all scripts of beyond/."""
    lessons = sorted(folder.glob("0?_*.py"))
    return lessons + sorted(folder.glob("beyond/[0-9]*_*.py"))


def main(folder: Path = ROOT, ranks: int | None = None) -> int:
    lessons = scripts_of(folder)
    if not lessons:
        print(f"error: no lesson 0?_*.py in {folder}")
        return 1
    width = max(len(lesson.stem) for lesson in lessons)
    print(f"{'lesson':<{width}}  ranks  verdict  seconds", flush=True)
    failed = {}
    for lesson in lessons:
        n = ranks or RANKS.get(lesson.stem, 2)
        start = time.perf_counter()
        code, text = run([*TORCHRUN, f"--nproc_per_node={n}", str(lesson)], LIMIT)
        seconds = time.perf_counter() - start
        verdict, why = judge(code, text)
        print(
            f"{lesson.stem:<{width}}  {n:>5}  {verdict:<7}  {seconds:>7.1f}", flush=True
        )
        if verdict == "FAIL":
            failed[lesson] = why, n
    for lesson, (why, n) in failed.items():
        print(f"\n{lesson.stem}: {why}")
        path = lesson.relative_to(folder)
        print(f"   to see all of it: torchrun --standalone --nproc_per_node={n} {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    ranks = os.environ.get("RANKS")  # make lessons RANKS=4
    said = "for all lessons (default 2, and 8 for 05)"
    parser.add_argument("--ranks", type=int, default=ranks, help=said)
    parser.add_argument("--folder", type=Path, default=ROOT, help="where lessons are")
    args = parser.parse_args()
    if args.ranks is not None and args.ranks < 1:
        parser.error(f"--ranks {args.ranks} is not 1 or more")
    sys.exit(main(args.folder, args.ranks))
