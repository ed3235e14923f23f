"""The player of recorded runs shows what the recordings hold, and they are fresh."""

import json
import re
from collections import Counter
from urllib.parse import urlsplit

import jobs
import pytest
from pictures import contrast, draw

lesson_00 = jobs.load("00_collectives")
record = jobs.load("docs.record")
every_recording = pytest.mark.parametrize("name", record.SCENES)
RECORDED = {path.stem: json.loads(path.read_text()) for path in record.FOLDER.iterdir()}


@every_recording
def test_the_bytes_are_those_of_the_lessons_formula(name):
    ledger = RECORDED[name]["ledger"]
    off = {x["row"] for x in ledger if x["bytes"] != x["predicted"]}
    assert off == ({"backward all-reduce over tp"} if "break" in name else set())
    assert ledger and (record.FOLDER / f"{name}.json").stat().st_size <= 31_000


@every_recording
def test_bytes_are_payload_or_sent_by_a_rank(name):
    """Each caption says which; each step and the ledger agree with the lesson's rule."""
    recording = RECORDED[name]
    for event in recording["events"]:
        for found in re.finditer(r"\d+ bytes", event["says"]):
            after = event["says"][found.end() :]
            assert found[0] == "0 bytes" or after.startswith(" of payload"), event[
                "says"
            ]
        if "call" not in event:
            continue
        size = len(event["call"]["groups"][0])
        for part in event["ranks"]:
            payload = sum(part["bytes"].values())
            sends = lesson_00.ring_bytes(event["call"]["collective"], payload, size)
            assert part["sends"] == sends > 0
    for rank in range(recording["ranks"]):
        parts = [event["ranks"][rank] for event in recording["events"]]
        ring = [x["ring"] for x in recording["ledger"] if x["rank"] == rank]
        if "time" not in recording:  # its messages are of two runs
            assert sum(part.get("sends", 0) for part in parts) == sum(ring)


def check_ring(recording: dict) -> None:
    """In each of 2(T − 1) steps every rank gets one chunk, from its left neighbor, and
    it is the one that the neighbor's sum or copy then has, too."""
    T = recording["ranks"]
    steps = [event for event in recording["events"] if event["kind"] == "send"]
    assert len(steps) == 2 * (T - 1)
    chunks = [event["makes"][0] for event in recording["events"][0]["ranks"]]
    for number, event in enumerate(steps):
        made = [part["makes"][0] for part in event["ranks"]]
        for rank, part in enumerate(event["ranks"]):
            left = (rank - 1) % T
            assert part["from"] == left and part["to"] == (rank + 1) % T
            (chunk,) = part["moved"]
            arrived = chunks[left]["values"][chunk]
            adds = number < T - 1
            own = chunks[rank]["values"][chunk] if adds else 0
            assert made[rank]["values"][chunk] == own + arrived
            who = chunks[rank]["who"][chunk] if adds else 0
            assert made[rank]["who"][chunk] == chunks[left]["who"][chunk] | who
            for other in set(range(T)) - {chunk}:
                assert made[rank]["values"][other] == chunks[rank]["values"][other]
        chunks = made
    assert all(who == 2**T - 1 for part in chunks for who in part["who"])


RINGS = [name for name in RECORDED if name.startswith("ring")]


@pytest.mark.parametrize("name", RINGS)
def test_every_step_of_a_ring(name):
    check_ring(RECORDED[name])


def alike(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in {*a} - {"diff"})
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return abs(a - b) < 0.015 if isinstance(a, float) else a == b


def test_recorded_anew_they_are_the_same(tmp_path):
    names = "mlp-break-f", "vocab-loss"
    assert not jobs.launch(record.__file__, 2, "--folder", tmp_path, *names).code
    for name in names:
        anew = json.loads((tmp_path / f"{name}.json").read_text())
        assert alike(anew, RECORDED[name])
    marks = RECORDED["mlp-break-f"]["events"][-1]["ranks"][0]["marks"]
    assert [mark["name"] for mark in marks if not mark["ok"]] == ["dL/dx_BSD"]


def test_size_colours_and_contrast():
    paths = (jobs.ROOT / "docs/_static/player").glob("*.js")
    texts = [path.read_text() for path in paths]
    text = "\n".join(texts)
    assert max(part.count("\n") for part in texts) <= 500
    assert max(map(len, text.splitlines())) <= 100
    colors = re.findall(r'"(#\w{6})"', text.partition("COLORS = ")[2][:200])
    assert colors == [*draw.COLORS[:4], draw.EVERYONE]
    assert min(contrast("#000", color) for color in colors) >= 4.5
    for theme in zip(*re.findall(r"--\w+: light-dark\((\S+), (\S+)\)", text)):
        back, ink, soft, _, good, bad = theme
        for pair in ((ink, back), (ink, soft), (good, soft), (bad, soft)):
            assert contrast(*pair) >= 4.5, pair


@pytest.fixture
def open_page(browser):
    """Opens a recording, 360 px wide; nothing may go wrong or come from elsewhere."""
    wrong = []

    def serve(route):
        path = urlsplit(route.request.url).path
        route.fulfill(path=jobs.ROOT / path.removeprefix("/"))

    def open_page(name: str, motion="reduce"):
        size = dict(width=360, height=720)
        page = browser.new_page(viewport=size, reduced_motion=motion)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.route("**/*", lambda route: route.abort())  # the console tells
        page.route("http://localhost/**", serve)
        page.goto(f"http://localhost/docs/_static/player/index.html?play={name}")
        page.wait_for_selector("tp-player .caption")
        return page

    yield open_page
    assert wrong == []


SHOWN = """player => ({
  says: player.shadowRoot.querySelector("[aria-live=polite]").lastChild.data,
  count: player.shadowRoot.querySelector(".count").textContent,
  fits: document.documentElement.scrollWidth <= innerWidth,
  bytes: [...player.shadowRoot.querySelectorAll("td[data-rank]")].map(
    cell => [cell.dataset.row, +cell.dataset.rank, +cell.dataset.bytes]),
  badge: player.shadowRoot.querySelector(".badge").textContent,
  chips: [...player.shadowRoot.querySelectorAll(".chip")].map(chip => chip.textContent),
  off: [...player.shadowRoot.querySelectorAll("td.off")].map(cell => cell.textContent),
})"""


def labels_agree(shown: dict, event: dict) -> None:
    """The badge names the payload, the chips what a rank sends: from the recording."""
    if event["kind"] == "time" or not any("sends" in x for x in event["ranks"]):
        assert "bytes" not in shown["badge"] and shown["chips"] == []
        return
    payload = {sum(part["bytes"].values()) for part in event["ranks"]}
    word = "payload" if "call" in event else "each rank sends"
    (numbers,) = re.findall(rf"{word} ([\d or]+) bytes", shown["badge"])
    assert {int(number) for number in numbers.split(" or ")} == payload
    sends = re.findall(r"sends (\d+) bytes", " ".join(shown["chips"]))
    expected = [str(part["sends"]) for part in event["ranks"]]
    assert sends == ([] if "broadcast" in shown["badge"] else expected)


@every_recording
def test_it_plays_to_the_end_and_back(open_page, name):
    steps, page = [*enumerate(RECORDED[name]["events"], 1)], open_page(name)
    sent = {(x["row"], x["rank"]): x["bytes"] for x in RECORDED[name]["ledger"]}
    ledger = Counter(sent)  # a rank that has no such row has sent nothing
    for key, order in (("ArrowRight", steps), ("ArrowLeft", steps[-2::-1])):
        for number, event in order:
            shown = page.locator("tp-player").evaluate(SHOWN)
            assert shown["says"] == event["says"] and shown["fits"]
            assert shown["count"] == f"{number} / {len(steps)}"
            labels_agree(shown, event)
            assert ("✗ 0 of 24" in shown["off"]) == (
                "break" in name and number == len(steps)
            )
            if number == len(steps):
                table = Counter({(row, rank): n for row, rank, n in shown["bytes"]})
                assert table == ledger  # the sum of all events' bytes
            page.keyboard.press(key)
        page.keyboard.press("ArrowLeft")


def test_keys_clicks_slider_playing_and_theme(open_page):
    page = open_page("mlp", motion="no-preference")
    count = page.locator("tp-player .count")
    for key, wanted in (("End", 13), ("Home", 1), ("PageDown", 2)):
        page.keyboard.press(key)
        assert count.inner_text() == f"{wanted} / 13"
    page.locator("tp-player input").fill("5")
    page.locator("tp-player .stage").click()
    assert count.inner_text() == "6 / 13"
    flying = page.locator("tp-player .ghost .cell:first-child").all_inner_texts()
    made = [part["makes"][0] for part in RECORDED["mlp"]["events"][4]["ranks"]]
    assert flying == [f"{made[r]['values'][0]}".replace("-", "−") for r in (1, 0)]
    page.clock.install()
    page.get_by_role("button", name="play").click()
    page.clock.run_for(60_000)
    assert count.inner_text() == "13 / 13"
    color = "getComputedStyle(document.querySelector('tp-player').box).backgroundColor"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(color) == "rgb(20, 24, 30)"
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert page.evaluate(color) == "rgb(255, 255, 255)"
