"""Record runs of the lessons for the player: what each rank held, sent and got.

    python docs/record.py                   all recordings, into docs/_static/recordings
    python docs/record.py ring mlp          these two
    python docs/record.py --folder F ring   into another folder

A recording is a JSON file. Its events are the player's steps. Each has a kind, a
caption, and for every rank the tensors that it made and the bytes that the lesson's own
METER counted. The ledger is what it counted at the end, next to the lesson's formula.

recorder.py is what watches a run, record_scenes.py has the scenes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from record_scenes import BUGS, SCENES
from recorder import FOLDER, ROOT


def load(name: str, bug: str | None) -> ModuleType:
    """A lesson or a script of beyond/, new each time; with a bug if one is named."""
    sys.modules.pop(name, None)
    if bug is None:
        return importlib.import_module(name)
    edit = importlib.import_module(f"bugs.lesson{name[:2]}").BUGS[bug]
    path = ROOT / f"{name}.py"
    before, after = path.read_text("utf-8").split(edit["old"])  # it occurs once
    module = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(before + edit["new"] + after, path, "exec"), vars(module))
    return module


def record(folder: Path, names: list[str]) -> None:
    """One rank: all scenes for as many ranks as there are."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    for name in names:
        _, module, scene = SCENES[name]
        lesson = load(module, BUGS.get(name))
        torch.manual_seed(1)
        group = dist.new_group(timeout=timedelta(seconds=60), group_desc="tp")
        about = {"name": name, "lesson": module}
        about.update(scene(lesson, group, name))
        if dist.get_rank() == 0:
            text = json.dumps(about, ensure_ascii=False, separators=(",", ":"))
            Path(folder, f"{name}.json").write_text(text + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)  # as the lessons do: what a tensor still holds of a group can abort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENES))
    args = parser.parse_args()
    names = args.names or list(SCENES)
    unknown = set(names) - set(SCENES)
    if unknown:
        parser.error(f"no recording is called {', '.join(sorted(unknown))}")
    if "RANK" in os.environ:
        return record(args.folder, names)
    args.folder.mkdir(parents=True, exist_ok=True)
    for ranks in dict.fromkeys(SCENES[name][0] for name in names):
        some = [name for name in names if SCENES[name][0] == ranks]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={ranks}", __file__, "--folder"]
        env = dict(OMP_NUM_THREADS="1", PET_LOCAL_ADDR="127.0.0.1")
        env.update(os.environ)
        subprocess.run([*command, str(args.folder), *some], check=True, env=env)
        for name in some:
            size = (args.folder / f"{name}.json").stat().st_size
            print(f"{name:12}  {size:6,} bytes")


if __name__ == "__main__":
    main()
