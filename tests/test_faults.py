"""A rank that is killed, hangs, skips a call, raises or refuses: the job ends in time,
what is said about it is true and said once, and nothing is left running. Whose process
was killed torchrun says. A lesson says what raised, and the doctor the rest."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import bug
import jobs
import pytest
from runs import COLLECTIVES, MESH, MLP, SEQUENCE, TRANSFORMER, over

TIMEOUT = 10  # of a rank that gets no turn for so long on a busy machine
GRACE = 10  # seconds in which ranks end; torchrun kills a stopped one after 30
WAITED_FOR = r"rank {rank} is not in a collective, while ranks \[[\d, ]+\] are waiting"
SAYS = {
    "stop": WAITED_FOR,
    "sleep": WAITED_FOR,
    "raise": r"rank {rank} raised RuntimeError: out of luck",
}

# lesson, ranks, what goes wrong, on which rank, at which of its collectives (00 has
# about 30 in all, 01 about 45, 02 and later 12 and more in their first step alone).
FAULTS = [
    (COLLECTIVES, 2, "kill", 0, 1),
    (COLLECTIVES, 2, "sleep", 1, 12),
    (COLLECTIVES, 4, "raise", 3, 1),
    (COLLECTIVES, 2, "skip", 1, 8),
    (MLP, 2, "kill-inside", 1, 40),
    (MLP, 4, "sleep", 0, 1),
    (MLP, 2, "raise", 0, 35),
    (MLP, 4, "skip", 0, 33),
    (MLP, 4, "stop", 2, 20),
    (TRANSFORMER, 2, "kill", 1, 7),
    (SEQUENCE, 2, "sleep", 0, 44),
    # Two stages of three ranks: on the first, middle and last of a stage.
    (MESH, 6, "kill", 0, 60),
    (MESH, 6, "kill-inside", 1, 9),
    (MESH, 6, "sleep", 3, 40),
    (MESH, 6, "stop", 4, 1),
    (MESH, 6, "skip", 1, 50),
    (MESH, 6, "skip", 2, 35),
]
BY_3 = ("--pp", "2", "--tp", "3", "--heads", "3", "--kv-heads", "3", "--hidden", "48")


def run_of(lesson, ranks, fault, rank, number) -> tuple:
    flags = ("--timeout", TIMEOUT, *(BY_3 if lesson == MESH else ()))
    return "faulty.py", ranks, lesson, fault, rank, number, *flags


@over([run_of(*case) for case in FAULTS])
def test_ends_and_accuses_nobody_else(run):
    fault, rank = run[3:5]
    done = jobs.result(*run)
    assert done.data, f"the fault was never reached:\n{done.text}"
    assert done.code != 0 and "PASS" not in done.out, done.text
    at_fault = done.data["time"]
    start_up = at_fault - (done.ended - done.wall)  # a measure of how busy we are
    grace = GRACE + 30 * (fault == "stop") + 2 * start_up
    # A lesson waits twice as long for a rank that may have raised in the same run.
    assert done.ended - at_fault < 3 * TIMEOUT + grace
    assert done.left == []
    report = done.err.partition("Root Cause")[2]
    if "kill" in fault:
        assert re.search(rf"rank +: {rank} .*\n +exitcode +: -9 ", report), done.err
        assert "doctor: " not in done.err
        return
    said = " ".join(bug.what_failed("", done.err).split())
    assert said.startswith("doctor: ") and done.err.count("doctor: ") == 1, done.err
    said = said.removeprefix("doctor: ")
    if fault == "skip":  # nobody can know who; where it is known, it is this one
        circle = r"ranks (\[[\d, ]+\]) are waiting in different |the ranks made diff"
        words = f"{circle}|{WAITED_FOR.format(rank=rank)}"
        assert re.match(words, said), done.err
        assert "the first difference: " in said, done.err
    else:
        assert re.match(SAYS[fault].format(rank=rank), said), done.err


# What a lesson says of it alone: one line for each rank that knows something.
ALONE = [
    (MLP, 2, "sleep", 1, 20, "rank 0; its last call: number "),
    (MLP, 2, "raise", 0, 15, "rank [01]; its last call: number "),
    (COLLECTIVES, 2, "kill", 0, 9, r"Signal 9 \(SIGKILL\) received"),
]


def alone(lesson, ranks, fault, rank, number):
    with tempfile.TemporaryDirectory() as folder:
        at_fault = Path(folder, "time")
        flags = (lesson, fault, rank, number, "--timeout", TIMEOUT)
        script = jobs.ROOT / "tests" / "faulty.py"
        done = jobs.launch(script, ranks, *flags, FAULT_TIME=str(at_fault))
        return done, at_fault.exists()


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.ahead.with_args(alone, *case[:5]))
    for case in ALONE
])  # fmt: skip
def test_a_lesson_without_the_doctor_ends_as_well(case):
    done, is_reached = jobs.begin(alone, *case[:5]).result()
    assert is_reached and done.code == 1 and done.left == []
    assert re.search(case[5], bug.what_failed("", done.err)), done.err
    assert "PASS" not in done.out and "doctor: " not in done.err


def hang_while_groups_are_created():
    script = jobs.ROOT / "tests" / "faulty.py"
    flags = (MESH, "sleep", 1, 1, "--timeout", TIMEOUT)
    at = {"FAULT_AT": "torch.distributed.new_group", "FAULT_TIME": os.devnull}
    return jobs.launch(script, 2, *flags, FAULT_DOCTOR="1", **at)


@pytest.mark.ahead.with_args(hang_while_groups_are_created)
def test_a_rank_that_hangs_while_groups_are_created_is_named():
    """new_group waits for all ranks. PyTorch's error names none."""
    done = jobs.begin(hang_while_groups_are_created).result()
    assert done.code == 1 and done.left == [], done.text
    said = bug.what_failed("", done.err)
    assert said.startswith("doctor: rank 1 is not in a collective, while ranks [0] ")
    assert re.search(
        r"\n  rank 0: in call 1 of ranks \[0, 1\], dist.new_group\(\[0", said
    )


def refused():
    # A rank that waited until --timeout would be killed, with another exit code.
    return jobs.torchrun(jobs.PATHS[MLP], 2, "--hidden", "65", "--timeout", "3000")


@pytest.mark.ahead.with_args(refused)
def test_refused_under_torchrun():
    done = jobs.begin(refused).result()
    assert done.code == 1 and done.out == ""
    assert len(re.findall(r"^error: ", done.err, re.M)) == 1, done.err
    exits = re.findall(r"exitcode +: (\S+)", done.err)
    assert "2" in exits and set(exits) <= {"2", "-15"}, exits  # rank 0; told to stop
    report = done.err.partition("Root Cause")[2]
    assert re.search(r"error: .*65", report), done.err
    assert not re.search(r'File "[^"]*/0\d_\w+\.py"', done.err), done.err
    assert done.left == []


@pytest.mark.alone
def test_control_c_while_ranks_wait(tmp_path):
    """Five seconds at most to the prompt, whatever the timeout; on a busy machine as
    many more as the ranks took to start."""
    at_fault, faulty = tmp_path / "time", jobs.ROOT / "tests" / "faulty.py"
    command = [*jobs.TORCHRUN, "--nproc_per_node=2", faulty, MLP, "sleep", "1", "20"]
    env = jobs.CLEAN_ENV | {"FAULT_TIME": str(at_fault), "FAULT_DOCTOR": "1"}
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    begin = time.time()
    job = subprocess.Popen(command, env=env, start_new_session=True, **quiet)
    while not at_fault.exists() and job.poll() is None:
        time.sleep(0.1)
    start_up = time.time() - begin
    time.sleep(1)  # now the other one waits
    start = time.time()
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(600) != 0 and time.time() - start < 5 + start_up


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends orphans")
def test_torchrun_is_killed_while_a_rank_sleeps(tmp_path):
    """No rank stays, and none prints a traceback because the store is gone."""
    at_fault, faulty = tmp_path / "time", jobs.ROOT / "tests" / "faulty.py"
    said = tmp_path / "said"
    command = [*jobs.TORCHRUN, "--nproc_per_node=2", faulty, MLP, "sleep", "1", "20"]
    mark = uuid.uuid4().hex
    env = jobs.CLEAN_ENV | {"FAULT_TIME": str(at_fault), jobs.MARK: mark}
    env["FAULT_DOCTOR"] = "1"
    with said.open("w") as file:
        job = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    while not at_fault.exists() and job.poll() is None:
        time.sleep(0.1)
    job.kill()
    job.wait()
    left = jobs.still_running(mark, grace=20)
    jobs.end(mark)
    assert left == [] and "Traceback" not in said.read_text()


def with_output(to: str):
    command = [*jobs.TORCHRUN, "--nproc_per_node=2", str(jobs.DOCTOR)]
    command += [str(jobs.PATHS[COLLECTIVES])]
    command = ["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} {to}"]
    return subprocess.run(command, env=jobs.CLEAN_ENV, capture_output=True, text=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("to, wanted", [
    pytest.param(to, wanted, marks=pytest.mark.ahead.with_args(with_output, to))
    for to, wanted in (
        ("> /dev/full", "raised OSError: No space left on device"),
        ("| head -1", "raised BrokenPipeError: Broken pipe"),
    )
])  # fmt: skip
def test_a_full_disk_or_a_closed_pipe_is_one_error(to, wanted):
    done = jobs.begin(with_output, to).result()
    said = bug.what_failed("", done.stderr)
    assert done.returncode == 1 and f"doctor: rank 0 {wanted}" in said, done.stderr


def skip_in_detail():
    edit = bug.bugs_of("00")["skip"]
    with tempfile.TemporaryDirectory() as folder:
        path = bug.copy_with_bug("00", edit, Path(folder))
        flags = (path, "--timeout", TIMEOUT)
        return jobs.launch(jobs.DOCTOR, 4, *flags, TORCH_DISTRIBUTED_DEBUG="DETAIL")


@pytest.mark.ahead.with_args(skip_in_detail)
def test_detail_accuses_nobody():
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL another part of torch notices first."""
    done = jobs.begin(skip_in_detail).result()
    said = bug.what_failed("", done.err)
    assert said.startswith("doctor: ranks [0, 1, 2, 3] are waiting in different"), said
    assert done.code == 1 and done.left == []
