"""`make check`: can this machine run the course? One line a check, and what to do.

It calls torchrun in your own environment, as you will at the prompt, and takes a few
seconds. The exit code is 1 if anything fails.

`make check ARGS="--host HOST"` is for a run on two machines. Call it on both within a
minute; HOST is the first one, as the other machine reaches it.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GiB = 2**30
# Lessons and scripts ran at their defaults under these versions of torch, and passed
# (docs/run.md names the exception).
TRIED = ("2.9.1", "2.11.0", "2.13.0", "2.14.1")
OUR_OWN = "torchrun --local-addr=127.0.0.1 …, or export PET_LOCAL_ADDR=127.0.0.1"

# A check returns what it found, and what to do about it: "" where all is well.


class Parser(argparse.ArgumentParser):
    """Wrong arguments are one line with `error:`, as in the lessons."""

    def error(self, message):
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def output_path(text: str) -> Path:
    """A file that can be written, or an error before the work is done."""
    path = Path(text)
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if is_new:
        path.unlink()
    return path


def check_python(version=sys.version_info) -> tuple[str, str]:
    found = ".".join(map(str, version[:3]))
    if (3, 10) <= tuple(version[:2]) <= (3, 14):
        return found, ""
    return found, "use Python 3.10 to 3.14: make clean, make setup PYTHON=python3.12"


def pinned_torch() -> str:
    text = (ROOT / "requirements.txt").read_text()
    return re.search(r"^torch==(\S+)", text, re.M)[1]


def check_torch(pinned: str, tried=TRIED) -> tuple[str, str]:
    try:
        import torch
    except Exception as error:  # also what a broken installation raises, of any kind
        return f"cannot be imported: {error}", "make clean, then make setup"
    gpus = torch.cuda.device_count()
    found = f"{torch.__version__}, " + ("no GPU" if not gpus else f"GPUs: {gpus}")
    version = torch.__version__.partition("+")[0]
    if version == pinned:
        return found, ""
    if version in tried:
        return f"{found}; saved outputs are of {pinned}, its bytes may differ", ""
    advice = f"the course was tried with {', '.join(tried)}: make clean, make setup"
    return found, advice


def check_host_name(name: str | None = None, wait: float = 5) -> tuple[str, str]:
    """torchrun gives its ranks the machine's own name as the address to connect to."""
    if address := os.environ.get("PET_LOCAL_ADDR"):
        return f"not needed: PET_LOCAL_ADDR={address}", ""
    name = name or socket.gethostname()
    hosts = f'add "127.0.0.1 {name}" to /etc/hosts; or {OUR_OWN}'
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(resolve(name)), daemon=True)
    start = time.perf_counter()
    thread.start()
    thread.join(wait)
    seconds = time.perf_counter() - start
    if thread.is_alive():
        return f"{name}: no answer in {wait:.0f} s; torchrun will be as slow", hosts
    if not answers:
        return f"{name} does not resolve: torchrun will hang", hosts
    if not any(is_local(*answer) for answer in answers):
        address = answers[0][1]
        return f"{name} is {address}, which is not this machine: ranks will hang", hosts
    return f"{name} is {answers[0][1]}, in {seconds:.1f} s", ""


def resolve(name: str) -> list[tuple]:
    """(family, address) of a host name; nothing if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, address[0]) for family, _, _, _, address in found]


def is_local(family: int, address: str) -> bool:
    """One can listen only at an address of one's own."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
    except OSError:
        return False
    return True


def check_port(port: int = 0) -> tuple[str, str]:
    """Listen at a port (0: any free one) and connect to it, as two ranks would."""
    try:
        with socket.create_server(("127.0.0.1", port)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        which = f"port {port}" if port else "any port"
        advice = "another program uses it: wait for it, stop it, or take another port"
        if not port:
            advice = (
                "a firewall or security program stops local connections: allow them"
            )
        reason = str(error.strerror or error).partition(" (while")[0]
        return f"{which} at 127.0.0.1: {reason}", advice
    return f"127.0.0.1:{port} listens and answers", ""


def free_memory() -> float:
    """Bytes that new processes can have."""
    if sys.platform == "darwin":
        return free_in_vm_stat(subprocess.check_output(["vm_stat"], text=True))
    text = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) * 1024


def free_in_vm_stat(text: str) -> int:
    """Free bytes in what macOS's vm_stat prints: pages that are not in use."""
    page = int(re.search(r"page size of (\d+) bytes", text)[1])
    kinds = r"Pages (?:free|inactive|speculative|purgeable):\s+(\d+)"
    return page * sum(map(int, re.findall(kinds, text)))


def check_memory(free=free_memory, wanted: float = 1 * GiB) -> tuple[str, str]:
    try:
        free = free()
    except (OSError, TypeError, subprocess.SubprocessError):
        return "this system does not say how much is free", ""
    found = f"{free / GiB:.1f} GiB free; two ranks take about 0.6"
    advice = f"close other programs: {wanted / GiB:.0f} GiB is needed"
    return found, "" if free >= wanted else advice


def check_disk(folder: Path = ROOT, wanted: float = 1 * GiB) -> tuple[str, str]:
    free = shutil.disk_usage(folder).free
    advice = f"make room: {wanted / GiB:.0f} GiB is needed where {folder} is"
    return f"{free / GiB:.1f} GiB free", "" if free >= wanted else advice


def run(command: list[str], limit: float, env=None) -> tuple[int | None, str]:
    """Exit code (None: stopped after `limit` seconds) and all that was printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    try:
        text, _ = process.communicate(timeout=limit)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks; killed, it would not
    try:
        text, _ = process.communicate(timeout=15)
    except subprocess.TimeoutExpired as error:
        process.kill()
        text = (error.stdout or b"").decode(errors="replace")
    return None, text


SUM = "[11.0, 22.0, 33.0]"  # of [1, 2, 3] and [10, 20, 30]


def check_two_ranks(limit: float = 60, command=None, **settings) -> tuple[str, str]:
    """Start two ranks with torchrun; they do one all-reduce and look at the values."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = command or [*torchrun, "--nproc_per_node=2", __file__, "--rank"]
    env = {"OMP_NUM_THREADS": "1", **os.environ, **settings}
    start = time.perf_counter()
    code, text = run(command, limit, env)
    seconds = time.perf_counter() - start
    if code == 0 and f"all-reduce {SUM}" in text:
        return f"all-reduce over gloo gives {SUM}, {seconds:.1f} s in total", ""
    lines = [line for line in text.splitlines() if re.search(r"error|Error", line)]
    said = lines[0].strip()[:200] if lines else "nothing about why"
    if code is None:
        advice = (
            f"try again after: export GLOO_SOCKET_IFNAME={loopback()} "
            "PET_LOCAL_ADDR=127.0.0.1"
        )
        return f"no end after {limit:.0f} s; it said: {said}", advice
    advice = f"all it says: {' '.join(map(str, command))}"
    return f"exit code {code}; it said: {said}", advice


def loopback() -> str:
    """The network interface by which a machine connects to itself."""
    return "lo0" if sys.platform == "darwin" else "lo"


def check_first_machine(host: str) -> tuple[str, str, int, str]:
    """Is HOST this machine? Also this machine's number, and the interface to HOST."""
    answers = resolve(host)
    if not answers:
        advice = "give HOST as an address: ip -brief address, on the first machine"
        return f"{host} does not resolve", advice, 1, ""
    family, address = answers[0]
    if any(is_local(*answer) for answer in answers):
        interface = interface_of(address)
        return f"{host} is this machine: --node_rank=0", "", 0, interface
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only chooses a route
        except OSError as error:
            return f"{host}, {address}: {error.strerror}", "connect the two", 1, ""
        own = probe.getsockname()[0]
    found = f"{host}, {address}, is another machine: --node_rank=1"
    return found, "", 1, interface_of(own)


def interface_of(address: str) -> str:
    """The network interface that has an address; of a loopback address, the only
    other interface that is up, or "" if there are several."""
    import psutil

    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        if psutil.net_if_stats()[name].isup:
            found[name] = [x.address.partition("%")[0] for x in addresses]
    real = [name for name, each in found.items() if "127.0.0.1" not in each]
    if not address.startswith("127."):
        real = [name for name in real if address in found[name]]
    return real[0] if len(real) == 1 else ""


def check_interface(interface: str) -> tuple[str, str]:
    """Will this machine's ranks tell the others an address that leads here?"""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interface:
        advice = "give HOST as an address; ip -brief address lists addresses"
        return "the interface that leads to the other machine is not known", advice
    if named == interface:
        return f"GLOO_SOCKET_IFNAME={interface}", ""
    if named:
        advice = f"export GLOO_SOCKET_IFNAME={interface}"
        return f"GLOO_SOCKET_IFNAME={named}, but HOST is reached by {interface}", advice
    name = socket.gethostname()
    addresses = [address for _, address in resolve(name)]
    if addresses and interface_of(addresses[0]) == interface:
        if not addresses[0].startswith("127."):
            return f"{name} is {addresses[0]}, on {interface}", ""
    own = addresses[0] if addresses else "no address"
    advice = f"export GLOO_SOCKET_IFNAME={interface}"
    return f"ranks would give the others the address of {name}: {own}", advice


def check_two_machines(host: str, port: int, number: int, interface: str, limit=90):
    """Start one rank here and expect one on the other machine; they do one sum."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += ["--nproc_per_node=1", f"--node_rank={number}", f"--master_addr={host}"]
    command += [f"--master_port={port}", __file__, "--rank"]
    settings = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    found, advice = check_two_ranks(limit, command, **settings)
    if advice:
        advice = "call the same on the other machine within a minute; then see whether "
        advice += f"port {port} of HOST, and the ports above, are open on both machines"
    return found, advice


def rank_main() -> int:
    """What each of the two ranks does."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    x = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
    dist.all_reduce(x)
    good = str(x.tolist()) == SUM
    print(f"all-reduce {x.tolist()}", flush=True)
    here = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    versions = [None] * dist.get_world_size()
    dist.all_gather_object(versions, here)
    if len(set(versions)) > 1:
        good = False
        print(f"error: the ranks have {' and '.join(versions)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


def show(name: str, found: str, advice: str) -> bool:
    """Print one check; did it pass?"""
    print(f"{'✗ ' if advice else 'ok'}  {name:<12} {found}", flush=True)
    if advice:
        indent = " " * 17
        style = dict(width=88, break_long_words=False, break_on_hyphens=False)
        print(textwrap.fill(f"→ {advice}", initial_indent=indent, **style,
                            subsequent_indent=indent + "  "))  # fmt: skip
    return not advice


def main(port: int = 0, host: str = "") -> int:
    start = time.perf_counter()
    passed = [
        show("python", *check_python()),
        show("torch", *check_torch(pinned_torch())),
        show("port", *check_port(port)),
        show("memory", *check_memory()),
        show("disk", *check_disk()),
        show("host name", *check_host_name()),
    ]
    # A bad host name would stop the ranks too: said once is enough, so go round it.
    settings = {} if passed[-1] else {"PET_LOCAL_ADDR": "127.0.0.1"}
    passed.append(show("two ranks", *check_two_ranks(**settings)))
    if host:
        found, advice, number, interface = check_first_machine(host)
        passed.append(show("HOST", found, advice))
        passed.append(show("interface", *check_interface(interface)))
        found, advice = check_two_machines(host, port or 29400, number, interface)
        passed.append(show("two machines", found, advice))
    seconds, bad = time.perf_counter() - start, passed.count(False)
    verdict = f"FAIL  {bad} of {len(passed)} checks" if bad else "PASS  ready"
    print(f"{verdict}  ({seconds:.0f} s)")
    return 1 if bad else 0


if __name__ == "__main__":
    parser = Parser(description=__doc__.partition("\n\n`")[0])
    parser.add_argument("--port", type=int, default=0, help="try this one, not any")
    text = "name or address of the first of two machines; call this on both"
    parser.add_argument("--host", default="", help=text)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 0 <= args.port <= 65535:
        parser.error(f"--port {args.port}: ports are 0 to 65535")
    sys.exit(rank_main() if args.rank else main(args.port, args.host))
