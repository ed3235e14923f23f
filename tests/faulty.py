"""A lesson in which one rank goes wrong, at one of its collectives.

    torchrun … faulty.py LESSON FAULT RANK NUMBER [flags of the lesson]

At its collective NUMBER (1 is the first one; those of a group of one do not count),
rank RANK is killed (before the call, or inside it), is stopped, sleeps, skips the call,
raises, finds the disk full, or runs the shell command in $FAULT_COMMAND. It writes the
time into $FAULT_TIME. With $FAULT_SAVE it does so when it saves its checkpoint of that
number, with $FAULT_AT when it calls the function of that name. Ranks that torchrun
starts again do nothing.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from in_ranks import load

NAME, FAULT, RANK, NUMBER = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
lesson = load(NAME)
lesson00 = getattr(lesson, "lesson00", lesson)  # of a script, the one that it imports
calls = 0


def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_inside(name, args):
    """The call is made, and noted; then this rank is gone."""
    set_status = lesson00.COMM.set_status
    lesson00.COMM.set_status = lambda status: (set_status(status), kill())
    return getattr(lesson, name).good(*args)


def skip(name, args):
    """What the call would return, without a word to the others."""
    x, group = args[0], args[-1]
    if name == "all_gather":
        return torch.cat([x] * group.size(), args[1])
    if name == "reduce_scatter":
        return x.chunk(group.size(), args[1])[group.rank()].clone()
    return x.clone()


def full_disk(name, args):
    """From now on this process may write files of 1,000 bytes only."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    return getattr(lesson, name).good(*args)


def run_command(name, args):
    """What stands in $FAULT_COMMAND happens to this machine, then the call is made."""
    os.system(os.environ["FAULT_COMMAND"])
    return getattr(lesson, name).good(*args)


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


def watched(name: str, good, number: int):
    def wrapper(*args):
        global calls
        groups = [x for x in args if isinstance(x, dist.ProcessGroup)]
        if groups and groups[0].size() == 1:  # nobody to do harm to
            return good(*args)
        calls += 1
        mine = int(os.environ["RANK"]) == RANK
        if calls == number and mine and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
            return FAULTS[FAULT](name, args)
        return good(*args)

    wrapper.good = good
    return wrapper


if __name__ == "__main__":
    number, names = NUMBER, ("all_reduce", "all_gather", "reduce_scatter")
    if "FAULT_SAVE" in os.environ:
        number, names = int(os.environ["FAULT_SAVE"]), ("state_to_save",)
    names = os.environ.get("FAULT_AT", " ".join(names)).split()
    for name in names:
        if hasattr(lesson, name):
            setattr(lesson, name, watched(name, getattr(lesson, name), number))
    sys.argv = [lesson.__file__, *sys.argv[5:]]
    lesson00.launch(lesson.main, lesson.parse_args, vars(lesson))
