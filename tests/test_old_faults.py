"""A rank that is killed, hangs, skips a call or raises: the job ends in time, the
guilty rank is named, once, and nothing is left running."""

import re

import jobs
import pytest

COLLECTIVES, MLP = "00_collectives", "01_naive_mlp_tp"
TRANSFORMER, SEQUENCE = "02_transformer_tp", "04_sequence_parallel"
MESH = "05_3d_parallel"
TIMEOUT = 4

# lesson, ranks, what goes wrong, on which rank, at which of its collectives (00 has 31,
# 01 has 71, 02 has 12 and more in its first step alone; in 04's the 38th is the first
# one of the split sequence).
FAULTS = [
    (COLLECTIVES, 2, "kill", 0, 1),
    (MLP, 2, "kill", 1, 40),
    (MLP, 4, "sleep", 0, 1),
    (COLLECTIVES, 2, "sleep", 1, 30),
    (MLP, 2, "raise", 0, 70),
    (COLLECTIVES, 4, "raise", 3, 1),
    (MLP, 4, "skip", 0, 40),
    (COLLECTIVES, 2, "skip", 1, 8),
    (MLP, 2, "skip", 0, 30),
    (TRANSFORMER, 2, "kill", 1, 7),
    (SEQUENCE, 2, "sleep", 0, 44),
    # Two stages of three ranks: each fault on the first, middle and last of a stage.
    (MESH, 6, "kill", 0, 60),
    (MESH, 6, "kill", 1, 9),
    (MESH, 6, "kill", 5, 30),
    (MESH, 6, "sleep", 3, 40),
    (MESH, 6, "sleep", 4, 1),
    (MESH, 6, "sleep", 2, 75),
    (MESH, 6, "skip", 3, 20),
    (MESH, 6, "skip", 1, 50),
    (MESH, 6, "skip", 2, 35),
]
FAULTS = [case for case in FAULTS if case[0] not in jobs.NEW_ANATOMY]
BY_3 = ("--tp", "3", "--heads", "3", "--hidden", "48", "--layers", "2")


def job(lesson, ranks, fault, rank, number) -> tuple:
    flags = ("--timeout", TIMEOUT, *(BY_3 if lesson == MESH else ()))
    return "faulty.py", ranks, lesson, fault, rank, number, *flags


@pytest.mark.parametrize("lesson, ranks, fault, rank, number", [
    pytest.param(
        *case, id=" ".join(map(str, (case[0][:2], *case[1:]))),
        marks=pytest.mark.launches(*job(*case)),
    )
    for case in FAULTS
])  # fmt: skip
def test_ends_and_names_the_guilty_rank(lesson, ranks, fault, rank, number):
    done = jobs.result(*job(lesson, ranks, fault, rank, number))
    assert done.data, f"the fault was never reached:\n{done.text}"
    assert done.code != 0 and "PASS" not in done.out, done.text
    start_up = done.wall - done.talk  # a measure of how busy this machine is
    assert done.ended - done.data["time"] < TIMEOUT + start_up + 5
    assert done.left == []
    told = re.findall(r"^error: .*", done.err, re.M)
    assert len(told) == 1, done.err
    if fault == "raise":
        assert told == [f"error: rank {rank} raised RuntimeError: out of luck"]
        return
    named = re.search(
        r"this call was not made by rank ([\d, ]+)(?: \(a tie: .*)?$", told[0]
    )
    assert named, told[0]
    named = set(map(int, named[1].split(", ")))
    if fault == "skip" and ranks == 2:  # one word against the other
        assert rank in named or "(a tie: or the others skipped" in told[0], done.err
    else:
        assert named == {rank}, done.err
