"""Two machines: docs/run.md's command, word for word, in two network namespaces."""

import re

import hosts
import jobs
import pytest
from runs import CHECKPOINTS, MLP

FOLDER = jobs.ROOT / "tests"
SMALL = ("--hidden", "16", "--heads", "2", "--layers", "2", "--batch-size", "8")
SMALL += ("--seq-len", "8", "--microbatches", "2", "--timeout", "300")


@pytest.fixture(scope="module")
def both():
    with hosts.two_hosts() as pair:
        yield pair


def passed(done: list) -> str:
    """What the first machine printed of a run that passed; the other prints nothing."""
    first, second = done
    assert first.code == second.code == 0, first.text + second.text
    assert re.search(r"^PASS ", first.out, re.M) and second.out == "", second.out
    assert first.left == second.left == []
    return first.out


def test_lesson_01_with_an_address(both):
    out = passed(hosts.on_both(both, MLP, "--steps", 1, "--timeout", 300))
    assert "ranks 4, mesh tp 4" in out


def test_lesson_05_with_a_name_and_bytes_as_the_kernel_counts_them(both, tmp_path):
    """What crosses: a batch's activations one way, their gradients the other."""
    flags = ("--pp", 2, "--tp", 2, "--steps", 4, "--timeout", 300)
    sizes = ("--batch-size", 16, "--seq-len", 32, "--hidden", 64)
    cable = str(FOLDER / "cable.py")
    name = both[0].name
    out = passed(hosts.on_both(both, cable, tmp_path, *flags, *sizes, master=name))
    assert "mesh pp 2 × dp 1 × tp 2" in out
    predicted = 4 * 16 * 32 * 64  # e·B·S·D; the two ranks of a stage send half each
    for rank in (0, 2):
        sent = float((tmp_path / f"sent-{rank}").read_text())
        # TCP's headers and acknowledgments come on top, and a norm of 8 bytes.
        assert predicted < sent < 1.15 * predicted, (predicted, sent)


def test_script_10_saves_on_two_machines_and_resumes(both, tmp_path):
    folder, flags = tmp_path / "saved", dict(ranks=1)
    saves = (*SMALL, "--steps", 2, "--save", folder)
    passed(hosts.on_both(both, CHECKPOINTS, *saves, **flags))
    assert (folder / "step_000002").exists()
    loads = (*SMALL, "--steps", 3, "--load", folder)
    out = passed(hosts.on_both(both, CHECKPOINTS, *loads, **flags))
    assert "step_000002" in out


def test_a_cable_that_is_pulled(both, tmp_path):
    """In the middle of a run: all ranks end in time, and say no more than they know.

    Rank 0's machine has the store, which says where other ranks are. The other machine
    gets no answer from it.
    """
    flags = (MLP, "command", 0, 20, "--timeout", 10)
    env = {"FAULT_COMMAND": f"ip link set {both[0].interface} down"}
    env["FAULT_TIME"] = str(tmp_path / "time")
    try:
        done = hosts.on_both(both, str(FOLDER / "faulty.py"), *flags, **env)
    finally:
        both[0].plug(True)
    at_fault = float((tmp_path / "time").read_text())
    for one in done:
        start_up = at_fault - (one.ended - one.wall)  # a measure of how busy we are
        assert one.ended - at_fault < 10 + 25 + 10 + 2 * start_up, one.text
        assert one.code == 1 and one.left == [] and "PASS" not in one.out, one.text
    first, second = (errors_of(one.err) for one in done)
    said = "error: no rank of machine 1 has reported an error: "
    assert first == [f"{said}they hang, or it is lost or cannot be reached"]
    said = "error: rank {} got no answer from rank 0's machine: it is lost or cannot be"
    assert sorted(second) == [f"{said.format(rank)} reached" for rank in (2, 3)]
    assert "  rank 2: in call " in done[1].err, "where it waits"


def errors_of(text: str) -> list[str]:
    """The errors that a machine's ranks print, each in one line."""
    found = re.findall(r"^error: .*(?:\n  (?!rank ).*)*", text, re.M)
    return [re.sub(r"\n *", " ", error) for error in found]


def test_check_names_the_interface_and_reaches_the_other_machine(both):
    """On one machine the interface is not named yet: make check says what to do."""
    command = [hosts.TORCHRUN.replace("torchrun", "python"), "tools/check.py"]
    command += ["--host", both[0].address]

    def run(host):
        named = {} if host.number else {"GLOO_SOCKET_IFNAME": ""}
        return host.run(command, **named)

    first, second = hosts.at_once(both, run)
    assert second.code == 0 and "--node_rank=1" in second.out, second.text
    assert "--node_rank=0" in first.out and first.code == 1, first.text
    assert f"export GLOO_SOCKET_IFNAME={both[0].interface}" in first.out
    for done in (first, second):
        assert re.search(r"^ok  two machines .*\[11.0, 22.0, 33.0\]", done.out, re.M)
