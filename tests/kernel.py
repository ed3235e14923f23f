"""Kernels that do not lose their ports, for tests and for a program that starts some.

    python tests/kernel.py pytest ARGUMENTS                 a module, as by python -m
    python tests/kernel.py tools/submission.py ARGUMENTS    or a file

Jupyter finds five free ports and lets go of them; the kernel binds them a second later.
If another program has been given its `iopub` port by then, the kernel lives on and
nothing that it says arrives.

In a nursery (nursery.py) the kernel is forked: it has imported torch and matplotlib.
"""

import atexit
import contextlib
import fcntl
import json
import os
import runpy
import signal
import socket
import sys
from multiprocessing import process, util
from pathlib import Path
from unittest import mock

from jobs import held_port
from jupyter_client.provisioning import local_provisioner
from jupyter_client.provisioning.local_provisioner import LocalPortCache


@contextlib.contextmanager
def held_ports():
    """Until the end, nobody else is given a port of the kernels started here; yields
    the list of these ports."""
    ports = []
    with contextlib.ExitStack() as held:

        def find(_cache, _ip: str) -> int:
            ports.append(held.enter_context(held_port()))
            return ports[-1]

        with mock.patch.object(LocalPortCache, "find_available_port", find):
            yield ports


def tell_of_stderr() -> None:
    """nbval says that there was an output on stderr, and not what it was."""
    from nbval.plugin import IPyNbCell

    compare = IPyNbCell.compare_outputs

    def and_tell(cell, test, ref, skip_compare=None):
        is_same = compare(cell, test, ref, skip_compare)
        for output in [] if is_same else test:
            if output.get("name") == "stderr":
                cell.comparison_traceback.append(f"stderr: {output['text']}")
        return is_same

    IPyNbCell.compare_outputs = and_tell


class Later:
    """A process that is forked now, and begins when it is told what to do.

    It looks like a subprocess.Popen, for Jupyter.
    """

    stdin = stdout = stderr = None

    def __init__(self, begin):
        self.returncode = None
        self.ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.ours.close()
            begin(theirs.detach())
        theirs.close()

    def tell(self, what: dict, fds=()) -> None:
        socket.send_fds(self.ours, [json.dumps(what).encode()], fds)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def told(fd: int) -> tuple[dict, list[int]]:
    """What to do, and open files; the process ends here if it was not needed."""
    with socket.socket(fileno=fd) as ours:
        text, fds, *_ = socket.recv_fds(ours, 2**20, 16)
    if not text:
        os._exit(0)
    what = json.loads(text)
    os.chdir(what["cwd"])
    os.environ.clear()
    os.environ.update(what["env"])
    return what, fds


def run_to_the_end(function, *args, **more) -> None:
    """As a program of its own would."""
    code = 0
    try:
        function(*args, **more)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def run_kernel(fd: int) -> None:
    """What `python -m ipykernel_launcher` is, in a session of its own. The server that
    it forks ranks from is forked here, as long as there is one thread."""
    os.setsid()
    sys.path.remove(str(Path(__file__).parent))
    server, spawn = Later(run_server), util.spawnv_passfds

    def start(path, args, fds):
        if "multiprocessing.forkserver" not in args[-1]:
            return spawn(path, args, fds)
        what = dict(code=args[-1], fds=[*fds], env={**os.environ}, cwd=os.getcwd())
        server.tell(what, fds)
        return server.pid

    util.spawnv_passfds = start
    what, _ = told(fd)
    process.ORIGINAL_DIR = os.getcwd()  # where ranks look for modules
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"
    sys.argv = [*what["command"][2:], parent]
    run_to_the_end(
        runpy.run_module, "ipykernel_launcher", run_name="__main__", alter_sys=True
    )


def run_server(fd: int) -> None:
    """multiprocessing's server, with its open files under the numbers in its code."""
    what, fds = told(fd)
    safe = [fcntl.fcntl(each, fcntl.F_DUPFD, 200) for each in fds]
    for each, number in zip(safe, what["fds"]):
        os.dup2(each, number)
    for each in fds:
        if each not in what["fds"]:
            os.close(each)
    for each in safe:
        os.close(each)  # it would keep the server alive after its kernel
    sys.path.insert(0, "")
    run_to_the_end(exec, what["code"], {"__name__": "__main__"})


def fork_ahead() -> None:
    """The one kernel that this process is going to start, before it has threads."""
    forked = Later(run_kernel)

    def launch(command: list[str], **more) -> Later:
        env = more.get("env") or os.environ
        cwd = more.get("cwd") or os.getcwd()
        forked.tell(dict(command=command, env={**env}, cwd=str(cwd)))
        return forked

    local_provisioner.launch_kernel = launch


def main() -> None:
    # jsonschema does without this, of which the import takes 3 seconds.
    sys.modules["rfc3987_syntax"] = None
    del sys.argv[0]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    if "--nbval" in sys.argv:
        tell_of_stderr()
    with held_ports():
        run(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
