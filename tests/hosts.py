"""Two machines on this one: two network namespaces, joined by a cable (a veth pair).

Each has its own address, name, network interface and list of names, as two machines on
one switch have. What a machine sent through the cable is counted by the kernel.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jobs
import psutil
import pytest

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
RUN_MD = (jobs.ROOT / "docs" / "run.md").read_text()


def ip(*words: str) -> str:
    """What the command ip prints; an error if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One of two machines: a namespace, and how to start a command in it."""

    def __init__(self, number: int):
        self.number = number
        self.space = f"course-{os.getpid()}-{number}"
        self.name, self.address = f"node{number}", f"10.77.0.{number + 1}"
        self.interface = f"cable{number}"
        self.files = Path("/etc/netns", self.space)

    def set_up(self) -> None:
        """The interface gets its address. As on Debian, the own name is 127.0.1.1."""
        ip("-n", self.space, "link", "set", "lo", "up")
        ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.interface)
        self.plug(True)
        other = Host(1 - self.number)
        self.files.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {self.name}"]
        lines.append(f"{other.address} {other.name}")
        (self.files / "hosts").write_text("\n".join(lines) + "\n")

    def plug(self, is_in: bool) -> None:
        state = "up" if is_in else "down"
        ip("-n", self.space, "link", "set", self.interface, state)

    def sent(self) -> int:
        """Bytes that left through the cable, by the kernel's counter."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(subprocess.check_output([*self.enter(), "cat", path], text=True))

    def enter(self) -> list[str]:
        """What stands in front of a command that is to run on this machine."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"']
        return ["ip", "netns", "exec", self.space, *named, "sh"]

    def run(self, command: list[str], limit: float = 600, **env) -> jobs.Done:
        env = {"GLOO_SOCKET_IFNAME": self.interface} | env
        return jobs.watch([*self.enter(), *command], limit, env, without=["PET_"])


@contextlib.contextmanager
def two_hosts():
    """Both machines with the cable plugged in. Whatever happens, they are removed."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and the command ip")
    remove_leftovers()
    first, second = hosts = [Host(0), Host(1)]
    try:
        for host in hosts:
            allowed("netns", "add", host.space)
        cable = f"{first.interface} netns {first.space} type veth peer "
        cable += f"{second.interface} netns {second.space}"
        allowed("link", "add", *cable.split())
        for host in hosts:
            host.set_up()
        yield hosts
    finally:
        remove(host.space for host in hosts)


def allowed(*words: str) -> None:
    """The command ip; where the system forbids it, or has no such thing, a skip."""
    try:
        ip(*words)
    except OSError as error:
        if re.search("not permitted|not supported|denied|Unknown device", str(error)):
            pytest.skip(f"no network namespaces here: {error}")
        raise


def remove_leftovers() -> None:
    """Remove what a run of the tests has left that was killed."""
    spaces = re.findall(r"^course-\d+-\d", ip("netns", "list"), re.M)
    remove(x for x in spaces if not psutil.pid_exists(int(x.split("-")[1])))


def remove(spaces) -> None:
    for space in spaces:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True)
        shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)


def command_of_page(script: str) -> str:
    """The command that docs/run.md has for several machines, without the script."""
    text = RUN_MD.replace("\\\n", "")
    (words,) = re.findall(rf"^torchrun (--nnodes=2 .*) {script}\.py", text, re.M)
    return words


def at_once(pair: list[Host], what) -> list:
    """What a function of a machine returns for each, called for both at once."""
    with ThreadPoolExecutor(2) as pool:
        return [one.result() for one in [pool.submit(what, host) for host in pair]]


def on_both(
    pair, script: str, *flags, master="", ranks=2, **settings
) -> list[jobs.Done]:
    """The command of the page on both machines, with a script: what each of them did.

    script: a lesson, a script of beyond/, or a path. master: HOST, a name or address.
    """

    def run(host: Host) -> jobs.Done:
        words = command_of_page(script if script in jobs.LESSONS else jobs.LESSONS[1])
        words = words.replace("HOST", master or pair[0].address)
        words = words.replace("node_rank=0", f"node_rank={host.number}")
        words = re.sub(r"per_node=\d", f"per_node={ranks}", words)
        path = str(jobs.PATHS.get(script, script))
        return host.run([TORCHRUN, *words.split(), path, *map(str, flags)], **settings)

    return at_once(pair, run)
