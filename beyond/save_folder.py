"""The folder that --save names, and what is in the files of a checkpoint.

A helper of beyond/10_checkpoints.py, no script.
"""

import argparse
import fcntl
import os
import tempfile
from pathlib import Path


def check_folder(args) -> None:
    """ValueError if --save cannot be written, or has other checkpoints."""
    try:
        args.save.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=args.save).close()
    except OSError as error:
        raise ValueError(f"--save {args.save}: {error.strerror}") from None
    for path in args.save.glob("part_*"):
        if not path.is_dir():
            text = f"{path.name} is a file, but a folder of this name will be written"
            raise ValueError(f"--save {args.save}: {text}; remove it")
    for path in args.save.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal() and int(number) > args.begin:
            text = f"{path.name} is already there"
            other = f"take --load {args.save}, or another folder"
            raise ValueError(f"--save {args.save}: {text}; {other}")
    if os.environ["RANK"] == "0":
        args.lock = lock_folder(args.save)


def lock_folder(folder: Path) -> int:
    """Two runs would remove each other's files. A lock ends with its process.

    Returns: the number of the open folder.
    Raises: ValueError if another run has the lock.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX + fcntl.LOCK_NB)
    except BlockingIOError:
        text = "another run saves into this folder; take another one"
        raise ValueError(f"--save {folder}: {text}") from None
    except OSError:  # a file system without locks
        pass
    return opened


def folder_path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is not the name of a folder")
    return Path(text)


def rows_of_files(parts: list[dict], path: Path) -> tuple[list, int]:
    """A row for each file of a checkpoint, and their sum; the bytes of all elements."""
    rows = []
    totals = {"parts": 0, "elements, bytes": 0, "file, bytes": 0}
    files = {part["file"] for part in parts}
    for file in sorted(files):  # dcp calls them __RANK_NUMBER.distcp
        inside = [part for part in parts if part["file"] == file]
        numbers = {"parts": len(inside)}
        numbers["elements, bytes"] = sum(part["bytes"] for part in inside)
        numbers["file, bytes"] = (path / file).stat().st_size
        row = {"file": file, "written by": f"rank {file.split('_')[2]}"}
        for column, number in numbers.items():
            row[column] = f"{number:,}"
            totals[column] += number
        rows.append(row)
    row = {"file": "sum", "written by": ""}
    row.update({column: f"{number:,}" for column, number in totals.items()})
    return [*rows, row], totals["elements, bytes"]
