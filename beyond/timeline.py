"""A pipeline's actions in time: on one clock, and shown as one line of text per rank.

A helper of beyond/14_schedules.py, no script.
"""


def show_timelines(report, runs: dict) -> None:
    """When each rank computed, and waited; all schedules to one scale.

    runs: kind → a ScheduleRun of the script.
    """
    report.say(
        "1 2 …: forward of micro-batch 1, 2, … (a later chunk: ¹ ² …); a b …: its "
        "backward (a later chunk: A B …); =: a weight pass; ·: it waits"
    )
    # One scale, so that a shorter schedule has a shorter line: seconds per mark.
    scale = max((run.length for run in runs.values()), default=1.0) / 72
    for kind, run in runs.items():
        report.say(f"{kind}, {run.length:.2f} s")
        for rank, of_rank in enumerate(run.events):
            # Not printed, but written by --json.
            report.rows += [{"section": report.sections} | event for event in of_rank]
            report.say(f"rank {rank}  {draw_rank(of_rank, run.length, scale)}")


def draw_rank(events: list[dict], length: float, scale: float) -> str:
    """One line of a timeline; scale: seconds per mark."""
    # It waits wherever no event is drawn.
    line = ["·"] * round(length / scale)
    for event in events:
        start = int(event["start"] / scale)
        # At least one mark, however short the action was.
        end = max(start + 1, round(event["end"] / scale))
        line[start:end] = mark_of(event) * (end - start)
    return "".join(line[: round(length / scale)])


def mark_of(event: dict) -> str:
    """The mark of an action in a timeline."""
    i = event["microbatch"]
    if event["what"] == "weight":
        return "="
    if event["what"] == "forward":
        digits = "⁰¹²³⁴⁵⁶⁷⁸⁹" if event["chunk"] else "0123456789"
        return digits[(i + 1) % 10]
    return chr(ord("A" if event["chunk"] else "a") + i % 26)


def from_first_start(events_of_ranks: list[list[dict]], kind: str) -> float:
    """Make times seconds since the first start; ranks on one host share one clock.

    Each event also gets its rank and the kind of its run.
    Returns: the seconds that a rank computed, as a mean over ranks.
    """
    begin = min(events[0]["start"] for events in events_of_ranks)
    computing = 0.0
    for rank, events in enumerate(events_of_ranks):
        for event in events:
            event.update(run=kind, rank=rank)
            computing += event["end"] - event["start"]
            event["start"] -= begin
            event["end"] -= begin
    return computing / len(events_of_ranks)
