"""Run a lesson or a script with a bug that people have shipped, and say what it does.

    python tools/bug.py 04                   # names all bugs of lesson 04
    python tools/bug.py 04 norms             # on 2 ranks
    python tools/bug.py 04 norms --ranks 4 --dtype float64

A bug is an edit of a few lines, in bugs/. It is made in a copy of the course, where the
lesson then runs under the doctor (tools/doctor.py). The last lines say what was
changed, what failed and why. Exit code: 0 if the bug shows, 1 if it does not, 2 for a
wrong name or flag.
"""

import argparse
import difflib
import importlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = sorted(path.stem[-2:] for path in (ROOT / "bugs").glob("*[0-9].py"))


def bugs_of(number: str) -> dict[str, dict]:
    """The bugs of a lesson or a script: name → what, old, new, symptom, …"""
    (path,) = (ROOT / "bugs").glob(f"*{number}.py")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"bugs.{path.stem}").BUGS


def script_of(number: str, bug: dict) -> Path:
    """What is run, from the root of the course: beyond/08_same_bits.py."""
    if "script" in bug:
        return Path(bug["script"])
    (path,) = [*ROOT.glob(f"{number}_*.py"), *ROOT.glob(f"beyond/{number}_*.py")]
    return path.relative_to(ROOT)


def edited(number: str, bug: dict) -> tuple[Path, str]:
    """The file that a bug edits, and its text with the bug."""
    path = Path(bug.get("file", script_of(number, bug)))
    text = (ROOT / path).read_text("utf-8")
    if text.count(bug["old"]) != 1:
        raise ValueError(f"{path} does not have these lines once:\n{bug['old']}")
    return path, text.replace(bug["old"], bug["new"])


def copy_with_bug(number: str, bug: dict, folder: Path) -> Path:
    """Write lessons and scripts into a folder, one with the bug. Return what to run."""
    (folder / "beyond").mkdir()
    for pattern in ("0*.py", "beyond/*.py"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder / path.relative_to(ROOT))
    path, text = edited(number, bug)
    (folder / path).write_text(text, "utf-8")
    return folder / script_of(number, bug)


def diff(bug: dict) -> list[str]:
    """The lines that the bug removes and adds."""
    lines = difflib.ndiff(bug["old"].splitlines(), bug["new"].splitlines())
    return [line for line in lines if line[0] in "+-"]


def run(script: Path, ranks: int, flags: list[str]) -> tuple[int, str]:
    """Run it under the doctor. Return torchrun's exit code and what it says at the end.

    The lesson's last paragraph, its verdict, is not printed, but returned.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(ROOT / "tools" / "doctor.py")]
    command += [str(script), *flags]
    held = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
        )
        for line in job.stdout:
            if not line.strip():
                print("".join(held), end="", flush=True)
                held.clear()
            held.append(line)
        job.wait()
        errors.seek(0)
        said = errors.read()
    last = "".join(held)
    if not is_verdict(last):
        print(last)
    return job.returncode, what_failed(last, said)


def is_verdict(paragraph: str) -> bool:
    return re.search("^(PASS|FAIL)  ", paragraph, re.M) is not None


def what_failed(last: str, errors: str) -> str:
    """The verdict; without one, the message of torchrun's report, or a refused flag.

    last: the last paragraph of stdout. errors: all of stderr.
    """
    if is_verdict(last):
        return last
    refused = re.search("^error: .*", errors, re.M)
    if refused:
        return refused[0]
    found = re.search(r"Root Cause.*?traceback : (.*?)\n=+$", errors, re.S | re.M)
    return textwrap.dedent(f"  {found[1]}") if found else errors


def explain(bug: dict, path: Path, failed: str) -> str:
    """What was changed, what failed, and why: the last thing on the screen."""
    lines = [fill(f"changed in {path}: {bug['what']}")]
    changed = diff(bug)
    if len(changed) > 6:
        changed = [*changed[:5], f"  … {len(changed) - 5} lines more"]
    # The doctor has looked already.
    advice = r"\.\s+Where\s+it\s+begins:.*?(?=\n\S|\Z)"
    failed = re.sub(advice, "", failed, flags=re.S)
    lines += [*changed, failed.strip()]
    for word in ("symptom", "why", "reported"):
        lines.append(fill(f"{word}: {bug[word]}"))
    if "audit" in bug:  # how it is found in a model of your own
        words = "in a model of yours: tools/audit.py reports it as"
        lines.append(fill(f'{words} "{bug["audit"]} …"'))
    return "\n".join(lines)


def fill(text: str, indent: int = 2) -> str:
    indent = " " * indent
    return textwrap.fill(text, 88, subsequent_indent=indent, break_on_hyphens=False)


def flags_of(bug: dict, given: list[str]) -> list[str]:
    """The flags of a run: those that the bug needs, then those that were given."""
    timeout = [] if "--timeout" in given else ["--timeout", "15"]  # it may hang
    return [*timeout, *bug.get("flags", "").split(), *given]


def wrong_name(number: str, name: str | None) -> str:
    """What to say if there is no such lesson or bug; "" if there is."""
    if number not in NUMBERS:
        return f"error: no bugs of {number}; there are those of {', '.join(NUMBERS)}"
    if name is not None and name not in bugs_of(number):
        names = ", ".join(bugs_of(number))
        return fill(f"error: {number} has no bug {name}; there are: {names}")
    return ""


def outcome(bug: dict, path: Path, code: int, failed: str) -> tuple[int, str]:
    """The exit code, and the text that ends the run.

    code: torchrun's. failed: what the run says at its end.
    """
    if failed.startswith("error: "):
        return 2, failed
    if code == 0 and "≠" not in failed:
        text = "The bug does not show in this run. Try it without other flags."
        return 1, f"{failed}{text}"
    return 0, f"\n{explain(bug, path, failed)}"


def main(argv: list[str]) -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=style, allow_abbrev=False
    )
    parser.add_argument("number", help="of the lesson or script: 00, 01, …")
    parser.add_argument("name", nargs="?", help="of the bug; without it, all are named")
    text = "number of processes (2, or what the bug needs)"
    parser.add_argument("--ranks", type=int, help=text)
    args, flags = parser.parse_known_args(argv)
    said = wrong_name(args.number, args.name)
    if said:
        print(said, file=sys.stderr)
        return 2
    if args.name is None:
        for name, bug in bugs_of(args.number).items():
            print(fill(f"{name:<14}{bug['what']}", 14))
        return 0
    bug = bugs_of(args.number)[args.name]
    path = edited(args.number, bug)[0]
    print("\n".join([fill(f"{path}: {bug['what']}"), *diff(bug), ""]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = copy_with_bug(args.number, bug, Path(folder))
        ranks = args.ranks or bug.get("ranks", 2)
        code, failed = run(script, ranks, flags_of(bug, flags))
    code, text = outcome(bug, path, code, failed)
    print(text, file=sys.stderr if code == 2 else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
