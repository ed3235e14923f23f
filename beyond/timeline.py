"""A pipeline's steps as one line of text per rank.

A helper of beyond/14_schedules.py, no script.
"""


def draw_rank(events: list[dict], length: float, scale: float) -> str:
    """One line of a timeline; scale: seconds per mark."""
    # It waits wherever no event is drawn.
    line = ["·"] * round(length / scale)
    for event in events:
        start = int(event["start"] / scale)
        # At least one mark, however short the step was.
        end = max(start + 1, round(event["end"] / scale))
        line[start:end] = mark_of(event) * (end - start)
    return "".join(line[: round(length / scale)])


def mark_of(event: dict) -> str:
    """The mark of a step in a timeline."""
    i = event["microbatch"]
    if event["what"] == "weight":
        return "="
    if event["what"] == "forward":
        digits = "⁰¹²³⁴⁵⁶⁷⁸⁹" if event["chunk"] else "0123456789"
        return digits[(i + 1) % 10]
    return chr(ord("A" if event["chunk"] else "a") + i % 26)
