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
