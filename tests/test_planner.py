"""The page with sliders: its formulas are those of tools/predict.py."""

import argparse
import math
import random
import shlex
from urllib.parse import urlsplit

import jobs
import plan
import predict
import pytest

FOLDER = jobs.ROOT / "docs/_static/planner"
CASES = 300


def random_sizes(draw: random.Random) -> dict:
    """Of a model whose heads and positions many tp divide; uneven vocabularies."""
    head = draw.choice([8, 16, 64, 128])
    kv_heads = draw.choice([1, 2, 4, 8])
    heads = kv_heads * draw.choice([1, 2, 4, 8])
    hidden = head * heads
    return predict.model(
        draw.randint(1, 40), hidden, heads, kv_heads, draw.randint(100, 150_000),
        draw.choice([64, 512, 768, 2048, 8192, 131072]),
        draw.choice([16, 96, 512, 1024]),
        ffn=draw.choice([None, 64 * draw.randint(1, 300)]),
        gated=draw.random() < 0.5, biases=draw.choice(predict.BIASES),
        tie=draw.random() < 0.5,
    )  # fmt: skip


def random_machine(draw: random.Random, gpus: int) -> dict:
    machine = draw.choice(list(predict.MACHINES.values()))
    return machine | {
        "gpus": gpus,
        "node": draw.choice([1, 2, 4, 6, 8, 16]),
        "inside": draw.choice([25e9, 300e9, 450e9]),
        "between": draw.choice([1e9, 12.5e9, 50e9]),
    }


def random_case(draw: random.Random) -> dict:
    while True:
        sizes = random_sizes(draw)
        tp = draw.choice([1, 2, 3, 4, 8, 16])
        mesh = {"tp": tp, "pp": draw.randint(1, 9), "dp": draw.choice([1, 2, 3, 8, 16])}
        if draw.random() < 0.5:
            mesh["cp"] = draw.choice([2, 3, 4, 8, 16])
        if not predict.why_not(sizes, **mesh):
            break
    more = dict(mesh)
    more["micro_batch"] = draw.choice(
        predict.divisors(sizes["batch_size"] // mesh["dp"])
    )
    more["recompute"] = draw.choice(predict.RECOMPUTE)
    more["attention"] = "flash" if "cp" in mesh else draw.choice(predict.ATTENTION)
    more["schedule"] = draw.choice(["1f1b", "gpipe"])
    more["zero"] = draw.choice(predict.ZERO)
    machine = random_machine(draw, math.prod(mesh.values()))
    return {"sizes": sizes, "more": more, "machine": machine}


IN_PAGE = """async (cases) => {
  const js = await import("./predict.js");
  return cases.map(({sizes, more, machine}) => {
    const layout = js.makeLayout(sizes, more);
    const stages = Array.from({length: layout.pp}, (_, stage) => stage);
    return {
      row: js.predict(layout, machine),
      rates: js.rates(layout, machine),
      usable: js.usable(machine),
      parameters: stages.map(s => Object.values(js.parameters(layout, s))),
      saved: stages.map(s => js.savedBytes(layout, s)),
      memory: stages.map(s => js.memory(layout, s)),
      traffic: stages.map(s => js.traffic(layout, s).map(
        x => [x.phase, x.collective, x.axis, x.calls, x.nbytes])),
    };
  });
}"""


def in_python(case: dict) -> dict:
    layout = predict.make_layout(case["sizes"], **case["more"])
    machine = argparse.Namespace(**case["machine"])
    stages = range(layout.pp)
    sent = []
    for stage in stages:
        rows = predict.traffic(layout, stage)
        sent.append([[*row.call[1:], row.calls, row.nbytes] for row in rows])
    return {
        "row": predict.predict(layout, machine),
        "rates": predict.rates(layout, machine),
        "usable": predict.usable(machine),
        "parameters": [list(predict.parameters(layout, stage)) for stage in stages],
        "saved": [predict.saved_bytes(layout, stage) for stage in stages],
        "memory": [predict.memory(layout, stage) for stage in stages],
        "traffic": sent,
    }


@pytest.fixture
def open_page(browser):
    """Opens the page with a query; no errors, and no requests to elsewhere."""
    wrong = []

    def serve(route):
        path = urlsplit(route.request.url).path
        route.fulfill(path=jobs.ROOT / path.removeprefix("/"))

    def open_page(query="", width=390, scheme="light"):
        size = {"width": width, "height": 800}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.route("**/*", lambda route: route.abort())  # the console reports it
        page.route("http://localhost/**", serve)
        page.goto(f"http://localhost/docs/_static/planner/index.html{query}")
        page.wait_for_selector("#map button")
        return page

    yield open_page
    assert wrong == []


def test_formulas_are_those_of_the_tool(open_page):
    """Bytes are equal; times, which are floats, agree to 1e-9."""
    draw = random.Random(7)
    cases = [random_case(draw) for _ in range(CASES)]
    for axis in ("tp", "pp", "dp"):
        assert len({case["more"][axis] for case in cases}) > 3
    assert {case["more"]["zero"] for case in cases} == {0, 1, 2, 3}
    assert {case["more"].get("cp", 1) for case in cases} == {1, 2, 3, 4, 8, 16}
    found = open_page().evaluate(IN_PAGE, cases)
    for case, js in zip(cases, found, strict=True):
        python = in_python(case)
        for name in ("parameters", "saved", "memory"):
            assert js[name] == python[name], case
        for ours, theirs in zip(python["traffic"], js["traffic"], strict=True):
            assert sorted(ours) == sorted(theirs), case
        assert ("cp" in python["rates"]) == ("cp" in case["more"])
        row = python["row"]
        assert js["row"]["bytes"] == row["bytes"], case
        assert js["row"]["memory"] == row["memory"], case
        for name in ("seconds", "mfu", "bubble", "parts", "sent"):
            assert js["row"][name] == pytest.approx(row[name], rel=1e-9, abs=1e-15)
        assert js["rates"] == python["rates"], case
        assert js["usable"] == python["usable"], case


def test_presets_are_those_of_the_tool():
    """If not: python tools/predict.py > docs/_static/planner/presets.json"""
    assert (FOLDER / "presets.json").read_text() == predict.presets()


SHOWN = """() => ({
  command: document.querySelector("#command").textContent,
  seconds: +document.querySelector("#seconds").dataset.value,
  memory: +document.querySelector("#memory").dataset.value,
  fits: document.querySelector("#fits").textContent,
  best: document.querySelector("#map .best")?.dataset.mesh,
  here: document.querySelector("#map [aria-pressed=true]")?.dataset.mesh,
  tooWide: document.documentElement.scrollWidth - innerWidth,
})"""
QUERIES = [
    "",
    "?model=llama-3-70b&machine=dgx-h100&nodes=32&tp=8&pp=4&zero=1",
    "?model=gpt-18.4b&nodes=32&tp=8&pp=1&recompute=full&attention=math",
    "?model=gpt3&nodes=128&tp=8&pp=16&between=5&reserve=5",
    "?model=llama-3-8b&nodes=16&tp=4&pp=1&cp=8&seq_len=131072&recompute=full",
]


@pytest.mark.parametrize("query", QUERIES)
def test_its_command_says_the_same(open_page, query):
    page = open_page(query)
    shown = page.evaluate(SHOWN)
    words = shlex.split(shown["command"])
    assert words[:2] == ["python", "tools/plan.py"]
    args = plan.read_flags(words[2:])
    sizes, fixed, options = plan.asked(args)
    assert set(fixed) >= {"dp", "pp", "tp", "micro_batch", "recompute"}
    fits, too_large, _ = predict.search(sizes, args, fixed, **options)
    (row,) = fits + too_large
    assert shown["memory"] == row["memory"]
    assert shown["seconds"] == pytest.approx(row["seconds"], rel=1e-9)
    assert shown["fits"].startswith("It fits" if fits else "It does not fit")
    everything, _, _ = predict.search(sizes, args, {"cp": args.cp}, **options)
    best = everything[0]
    assert shown["best"] == f"{best['tp']},{best['pp']}"
    assert shown["here"] == f"{row['tp']},{row['pp']}"


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_it_fits_any_screen_and_its_address_has_the_state(open_page, width):
    page = open_page(width=width, scheme="dark")
    page.select_option("#model", "llama-3-8b")
    page.locator("#nodes").fill("3")  # a step of the slider
    page.locator("#map button").nth(2).click()
    page.locator("#map button").nth(2).press("Enter")
    first = page.evaluate(SHOWN)
    assert first["tooWide"] <= 0
    again = open_page("?" + urlsplit(page.url).query, width).evaluate(SHOWN)
    assert again == first


def test_accessible(open_page):
    """Labels, contrast, names of buttons, in both color schemes."""
    from axe_playwright_python.sync_playwright import Axe

    for scheme in ("light", "dark"):
        page = open_page(scheme=scheme)
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response
        assert [rule["id"] for rule in found["violations"]] == []
        unlabeled = "all => all.filter(x => !x.labels.length).map(x => x.id)"
        assert page.eval_on_selector_all("input, select", unlabeled) == []


def test_what_does_not_fit_says_why(open_page):
    page = open_page("?model=llama-3-405b&nodes=2&tp=8&pp=1")
    says = page.evaluate(SHOWN)["fits"]
    row = "16 bytes"
    assert (
        says.startswith("It does not fit") and row in says and "72.0 of 80 GB" in says
    )
