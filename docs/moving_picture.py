"""The moving picture of the README: the player of lesson 01's MLP, as a GIF.

    python docs/moving_picture.py           writes assets/mlp.gif

Chromium opens docs/_static/player on the recording mlp.json and takes a picture of each
step; where something is sent, also of the numbers on their way. The GIF takes less than
20 seconds, and then starts again.
"""

from __future__ import annotations

import io
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from matplotlib import image
from matplotlib.animation import PillowWriter
from matplotlib.figure import Figure
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "assets" / "mlp.gif"
WIDTH = 960  # pixels
HEIGHT = 660
RATE = 10  # pictures per second; identical ones are stored once
STEP = 13  # pictures per step
FLIGHT = 6  # pictures of numbers on their way
BROWSER = dict(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
# Only what changes: the caption and the lanes, without buttons and tables.
HIDE = ".head, .controls, .legend, .totals { display: none !important; }"
BEGIN = """style => {
    window.player = document.querySelector("tp-player");
    const sheet = document.createElement("style");
    sheet.textContent = style;
    player.shadowRoot.append(sheet);
    player.fit();
    return player.events.length;
}"""
GO = "step => { player.step = step - 1; player.go(step); }"
# Of a flight that takes one unit of time: stop it at this moment.
STOP = """moment => player.shadowRoot.getAnimations().map(flight => {
    flight.pause();
    flight.currentTime = moment * flight.effect.getTiming().duration;
}).length"""
LAND = "() => player.shadowRoot.getAnimations().forEach(flight => flight.finish())"


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def main() -> None:
    handler = partial(Silent, directory=ROOT / "docs" / "_static")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pictures = take(f"http://127.0.0.1:{server.server_port}/player/index.html")
        server.shutdown()
    write(pictures)
    seconds = len(pictures) / RATE
    print(f"{TARGET.name}: {seconds:.1f} s, {TARGET.stat().st_size:,} bytes")


def take(address: str) -> list[bytes]:
    """The pictures in order, as PNG; a picture that stands is in the list often."""
    pictures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**BROWSER)
        size = dict(width=WIDTH, height=HEIGHT)
        page = browser.new_page(viewport=size, color_scheme="light")
        page.goto(f"{address}?play=mlp")
        page.wait_for_selector("tp-player .caption")
        page.add_style_tag(content="nav, body > p { display: none }")
        steps = page.evaluate(BEGIN, HIDE)
        for step in range(steps):
            page.evaluate(GO, step)
            if page.evaluate(STOP, 0):
                for number in range(FLIGHT):
                    page.evaluate(STOP, number / FLIGHT)
                    pictures.append(page.screenshot())
                page.evaluate(LAND)
                page.wait_for_function("!player.shadowRoot.querySelector('.ghost')")
            pictures += [page.screenshot()] * STEP
        browser.close()
    return pictures


def write(pictures: list[bytes]) -> None:
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100)
    writer = PillowWriter(fps=RATE)
    with writer.saving(figure, TARGET, dpi=100):
        for picture in pictures:
            figure.clear()
            figure.figimage(image.imread(io.BytesIO(picture)))
            writer.grab_frame()


if __name__ == "__main__":
    main()
