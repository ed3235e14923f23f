"""A lesson or script in which one rank goes wrong, at one of its collectives.

    torchrun … faulty.py NAME FAULT RANK NUMBER [flags of the lesson]

At its collective NUMBER (1 is the first one; those of a group of one do not count),
rank RANK is killed (before the call, or inside it), is stopped, sleeps, skips the call,
raises, finds the disk full, or runs the shell command in $FAULT_COMMAND. It writes the
time into $FAULT_TIME. With $FAULT_AT it does so at its call NUMBER of this function of
PyTorch, as torch.distributed.new_group. With $FAULT_DOCTOR the lesson runs under
tools/doctor.py. Ranks that torchrun starts again do nothing.
"""

import importlib
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

NAME, FAULT, RANK, NUMBER = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
ROOT = Path(__file__).resolve().parents[1]
calls = 0


def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_inside(good, args, kwargs):
    """The call is made; then this rank is gone."""
    good(*args, **kwargs)
    kill()


def skip(good, args, kwargs):
    """What is in this rank's tensors stays there, without a word to the others."""


def full_disk(good, args, kwargs):
    """From now on this process may write files of 50,000 bytes only.

    A checkpoint's are larger; what torchrun's report needs of a rank is smaller.
    """
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
    return good(*args, **kwargs)


def run_command(good, args, kwargs):
    """What stands in $FAULT_COMMAND happens to this machine, then the call is made."""
    os.system(os.environ["FAULT_COMMAND"])
    return good(*args, **kwargs)


def fail(*args):
    raise RuntimeError("out of luck")


FAULTS = {
    "kill": kill,
    "kill-inside": kill_inside,
    "stop": lambda *args: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda *args: time.sleep(3600),
    "skip": skip,
    "raise": fail,
    "full": full_disk,
    "command": run_command,
}


def watched(good):
    def wrapper(*args, **kwargs):
        global calls
        group = kwargs.get("group")
        if group is not None and group.size() == 1:  # nobody to do harm to
            return good(*args, **kwargs)
        calls += 1
        mine = int(os.environ["RANK"]) == RANK
        if calls == NUMBER and mine and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
            return FAULTS[FAULT](good, args, kwargs)
        return good(*args, **kwargs)

    return wrapper


def join(*args, init=dist.init_process_group, **kwargs) -> None:
    """Join the process group, then watch for the call, in front of the doctor."""
    init(*args, **kwargs)
    where, names = dist, ("all_reduce", "all_gather", "reduce_scatter")
    if "FAULT_AT" in os.environ:
        module, _, name = os.environ["FAULT_AT"].rpartition(".")
        where, names = importlib.import_module(module), (name,)
    for name in names:
        setattr(where, name, watched(getattr(where, name)))


def main() -> None:
    (path,) = [*ROOT.glob(f"{NAME}.py"), *ROOT.glob(f"beyond/{NAME}.py")]
    dist.init_process_group = join
    sys.argv = [str(path), *sys.argv[5:]]
    sys.path[0] = str(path.parent)
    if "FAULT_DOCTOR" in os.environ:
        path = ROOT / "tools" / "doctor.py"
        sys.argv = [str(path), *sys.argv]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
