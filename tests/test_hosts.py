"""Two machines: docs/run.md's command, word for word, in two network namespaces."""

import re
import tempfile
from pathlib import Path

import hosts
import jobs
import pytest
from runs import CHECKPOINTS, MLP

FOLDER = jobs.ROOT / "tests"
SMALL = ("--hidden", "16", "--heads", "2", "--kv-heads", "2", "--layers", "2")
SMALL += ("--batch-size", "8", "--seq-len", "8", "--microbatches", "2")
SMALL += ("--timeout", "300")


# What is run on the two machines, one after the other, ahead of the tests: for most of
# the time the ranks wait.


def lesson_05_with_a_name(both, folder):
    flags = ("--pp", 2, "--tp", 2, "--steps", 4, "--timeout", 300)
    sizes = ("--batch-size", 16, "--seq-len", 32, "--hidden", 64)
    cable = str(FOLDER / "cable.py")
    name = both[0].name
    done = hosts.on_both(both, cable, folder, *flags, *sizes, master=name)
    files = [folder / f"sent-{rank}" for rank in (0, 2)]
    return done, [float(file.read_text()) for file in files if file.exists()]


def script_10_saves_and_resumes(both, folder):
    saved = folder / "saved"
    saves = (*SMALL, "--steps", 2, "--save", saved)
    first = hosts.on_both(both, CHECKPOINTS, *saves, ranks=1)
    names = sorted(path.name for path in saved.iterdir())
    loads = (*SMALL, "--steps", 3, "--load", saved)
    return first, names, hosts.on_both(both, CHECKPOINTS, *loads, ranks=1)


CHECK_OF_TWO = """if True:  # without the two ranks on one machine, which others test
    import sys
    sys.path.insert(0, "tools")
    import check
    start = check.check_two_ranks
    check.check_two_ranks = lambda *two, **one: start(*two, **one) if two else ("", "")
    sys.exit(check.main(host=sys.argv[1]))
"""


def make_check(both, folder):
    """On one machine the interface is not named yet."""
    python = hosts.TORCHRUN.replace("torchrun", "python")
    command = [python, "-c", CHECK_OF_TWO, both[0].address]

    def run(host):
        named = {} if host.number else {"GLOO_SOCKET_IFNAME": ""}
        return host.run(command, **named)

    return hosts.at_once(both, run), both[0].interface


def a_cable_is_pulled(both, folder):
    """At collective 20 of rank 0."""
    flags = (MLP, "command", 0, 20, "--timeout", 10)
    env = {"FAULT_COMMAND": f"ip link set {both[0].interface} down"}
    env |= {"FAULT_TIME": str(folder / "time"), "FAULT_DOCTOR": "1"}
    try:
        done = hosts.on_both(both, str(FOLDER / "faulty.py"), *flags, **env)
    finally:
        both[0].plug(True)
    return done, float((folder / "time").read_text())


RUNS = [
    lesson_05_with_a_name, script_10_saves_and_resumes, make_check, a_cable_is_pulled,
]  # fmt: skip


def run_all() -> dict:
    """What each of them returned, or raised."""
    found = {}
    with hosts.two_hosts() as both:
        for run in RUNS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[run] = run(both, Path(folder))
                except Exception as error:
                    found[run] = error
    return found


pytestmark = pytest.mark.ahead.with_args(run_all)


def found(run):
    result = jobs.begin(run_all).result()[run]
    if isinstance(result, Exception):
        raise result
    return result


def passed(done: list) -> str:
    """What the first machine printed of a run that passed; the other prints nothing."""
    first, second = done
    assert first.code == second.code == 0, first.text + second.text
    assert re.search(r"^PASS ", first.out, re.M) and second.out == "", second.out
    assert first.left == second.left == []
    return first.out


def test_lesson_05_with_a_name_and_bytes_as_the_kernel_counts_them():
    """What crosses: a batch's activations one way, their gradients the other."""
    done, both_sent = found(lesson_05_with_a_name)
    assert "mesh pp 2 × dp 1 × tp 2" in passed(done)
    predicted = 4 * 16 * 32 * 64  # e·B·S·D; the two ranks of a stage send half each
    assert len(both_sent) == 2
    for sent in both_sent:
        # TCP's headers and acknowledgments come on top, and a norm of 8 bytes.
        assert predicted < sent < 1.15 * predicted, (predicted, sent)


def test_script_10_saves_on_two_machines_and_resumes():
    """Two machines that meet at an address; lesson 05 above uses a name."""
    first, names, second = found(script_10_saves_and_resumes)
    passed(first)
    assert "step_000002" in names
    assert "step_000002" in passed(second)


def test_a_cable_that_is_pulled():
    """In the middle of a run: all ranks end in time, and say no more than they know.

    Rank 0's machine has the store, which says where other ranks are. The other machine
    gets no answer from it.
    """
    done, at_fault = found(a_cable_is_pulled)
    for one in done:
        start_up = at_fault - (one.ended - one.wall)  # a measure of how busy we are
        assert one.ended - at_fault < 3 * 10 + 25 + 10 + 2 * start_up, one.text
        assert one.code == 1 and one.left == [] and "PASS" not in one.out, one.text
    first, second = (jobs.bug.what_failed("", one.err) for one in done)
    said = (
        "doctor: no rank of machine 1 has reported an error: they hang, or it is lost"
    )
    assert " ".join(first.split()).startswith(said), first
    said = r"doctor: rank [23] got no answer from rank 0's machine: it is lost or "
    assert re.match(said, " ".join(second.split())), second
    assert re.search(r"\n  rank [23]: in call ", second), "where it waits"


def test_check_names_the_interface_and_reaches_the_other_machine():
    """make check says what to do where the interface is not named."""
    (first, second), interface = found(make_check)
    assert second.code == 0 and "--node_rank=1" in second.out, second.text
    assert "--node_rank=0" in first.out and first.code == 1, first.text
    assert f"export GLOO_SOCKET_IFNAME={interface}" in first.out
    for done in (first, second):
        assert re.search(r"^ok  two machines .*\[11.0, 22.0, 33.0\]", done.out, re.M)
