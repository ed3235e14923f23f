"""The page with sliders: its formulas are those of tools/predict.py."""

import argparse
import random
import shlex
from urllib.parse import urlsplit

import jobs
import plan
import predict
import published
import pytest

lesson_00 = jobs.load("00_collectives")
FOLDER = jobs.ROOT / "docs/_static/planner"
CASES = 300


def random_sizes(draw: random.Random) -> dict:
    """Of a model whose heads and positions many tp divide; uneven vocabularies; some
    with experts, or heads that are wider than hidden / heads."""
    head = draw.choice([8, 16, 64, 128])
    kv_heads = draw.choice([1, 2, 4, 8])
    heads = kv_heads * draw.choice([1, 2, 4, 8])
    hidden = head * heads
    more = {}
    if draw.random() < 0.3:
        experts = draw.choice([4, 8, 16])
        more.update(experts=experts, top_k=draw.choice([1, 2, 3]))
        more.update(expert_ffn=64 * draw.randint(1, 30))
    if draw.random() < 0.3:
        more.update(head_dim=2 * head, qk_norm=True)
    return predict.model(
        draw.randint(1, 40), hidden, heads, kv_heads, draw.randint(100, 150_000),
        draw.choice([64, 512, 768, 2048, 8192, 131072]),
        draw.choice([16, 96, 512, 1024]),
        ffn=draw.choice([None, 64 * draw.randint(1, 300), 0 if more else 64]),
        gated=draw.random() < 0.5, biases=draw.choice(predict.BIASES),
        tie=draw.random() < 0.5, **more,
    )  # fmt: skip


def random_machine(draw: random.Random, gpus: int) -> dict:
    machine = draw.choice(list(predict.MACHINES.values()))
    return machine | {
        "gpus": gpus,
        "node": draw.choice([1, 2, 4, 6, 8, 16]),
        "inside": draw.choice([25e9, 300e9, 450e9]),
        "between": draw.choice([1e9, 12.5e9, 50e9]),
        "alpha_between": draw.choice([5e-6, 20e-6]),
    }


def random_case(draw: random.Random) -> dict:
    while True:
        sizes = random_sizes(draw)
        tp = draw.choice([1, 2, 3, 4, 8, 16])
        mesh = {"tp": tp, "pp": draw.randint(1, 9), "dp": draw.choice([1, 2, 3, 8, 16])}
        if draw.random() < 0.5:
            mesh["cp"] = draw.choice([2, 3, 4, 8, 16])
        if sizes["experts"]:
            mesh["ep"] = draw.choice([1, 2, 4])
        virtual = draw.choice([1, 1, 2, 3])
        if not predict.why_not(sizes, **mesh, virtual=virtual):
            break
    more = mesh | predict.layout_options(sizes, mesh, {"virtual": virtual})
    more["micro_batch"] = draw.choice(
        predict.divisors(sizes["batch_size"] // mesh["dp"])
    )
    more["loss"] = draw.choice(list(predict.LOSSES))
    more["grad_bytes"] = draw.choice([2, 4])
    more["imbalance"] = draw.choice([1.0, 1.3, 2.0])
    more["overlap_dp"] = draw.random() < 0.5
    more["mlp_saves"] = draw.choice([3, 4]) if sizes["gated"] else 2
    more["attention"] = "flash" if "cp" in mesh else draw.choice(predict.ATTENTION)
    ways = predict.ways_to_recompute(sizes, more["attention"])
    more["recompute"] = draw.choice(ways)
    if more["attention"] == "flash" and draw.random() < 0.5:
        more["scores"] = draw.choice(predict.SCORES)
    more["schedule"] = "1f1b"
    if more["virtual"] == 1:
        more["schedule"] = draw.choice(["1f1b", "gpipe", "zb-h1"])
    more["zero"] = draw.choice(predict.ZERO)
    ranks = mesh["tp"] * mesh["pp"] * mesh["dp"] * mesh.get("cp", 1)
    machine = random_machine(draw, ranks)
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
      phases: stages.map(s => js.phases(layout, s)),
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
        "phases": [predict.phases(layout, stage) for stage in stages],
        "traffic": sent,
    }


@pytest.fixture
def open_page(open_file):
    """Opens the page with a query."""

    def open_page(query="", width=390, scheme="light", refused=False):
        address = f"planner/index.html{query}"
        page = open_file(address, width, 800, color_scheme=scheme)
        page.wait_for_function("document.querySelector('#fits').textContent")
        assert refused or page.locator("#map button").count()
        return page

    return open_page


def test_formulas_are_those_of_the_tool(open_page):
    """Bytes are equal; times, which are floats, agree to 1e-9."""
    draw = random.Random(7)
    cases = [random_case(draw) for _ in range(CASES)]
    for axis in ("tp", "pp", "dp"):
        assert len({case["more"][axis] for case in cases}) > 3
    assert {case["more"]["zero"] for case in cases} == {0, 1, 2, 3}
    assert {case["more"].get("cp", 1) for case in cases} == {1, 2, 3, 4, 8, 16}
    assert {case["more"].get("ep", 1) for case in cases} == {1, 2, 4}
    assert {case["more"]["virtual"] for case in cases} == {1, 2, 3}
    assert {case["more"]["light_ends"] for case in cases} == {True, False}
    assert {case["more"]["recompute"] for case in cases} == set(predict.RECOMPUTE)
    found = open_page().evaluate(IN_PAGE, cases)
    for case, js in zip(cases, found, strict=True):
        python = in_python(case)
        for name in ("parameters", "saved", "memory", "phases"):
            assert js[name] == python[name], case
        for ours, theirs in zip(python["traffic"], js["traffic"], strict=True):
            assert sorted(ours) == sorted(theirs), case
        assert ("cp" in python["rates"]) == ("cp" in case["more"])
        row = python["row"]
        assert js["row"]["bytes"] == row["bytes"], case
        assert js["row"]["memory"] == row["memory"], case
        assert js["row"]["tp_leaves_node"] == row["tp_leaves_node"], case
        for name in ("seconds", "mfu", "bubble", "waiting", "parts", "sent"):
            assert js["row"][name] == pytest.approx(row[name], rel=1e-9, abs=1e-15)
        assert js["rates"] == python["rates"], case
        assert js["usable"] == python["usable"], case


REASONS = """async (cases) => {
  const js = await import("./predict.js");
  return cases.map(([sizes, mesh]) => js.whyNot(sizes, mesh));
}"""


def test_both_refuse_the_same_meshes(open_page):
    """The page adds the arithmetic to the tool's words."""
    draw = random.Random(8)
    cases = []
    for _ in range(CASES):
        mesh = {"tp": draw.choice([1, 2, 3, 4, 8, 16]), "pp": draw.randint(1, 9)}
        mesh["dp"] = draw.choice([1, 2, 3, 8, 16])
        mesh["cp"] = draw.choice([1, 2, 3, 4, 8, 16])
        mesh["ep"] = draw.choice([1, 1, 2, 16])
        mesh["virtual"] = draw.choice([1, 2, 3])
        sizes = random_sizes(draw)
        # Lengths that cp divides and 2 · cp or cp · tp may not.
        sizes["seq_len"] = mesh["cp"] * draw.choice([1, 2, 7, 48, 720])
        cases.append([sizes, mesh])
    seen = set()
    for case, reason in zip(cases, open_page().evaluate(REASONS, cases), strict=True):
        expected = predict.why_not(case[0], **case[1])
        assert reason.split(":")[0] == expected, case
        seen.add(expected)
    assert {
        "",
        "seq-len % (2 · cp) is not 0",
        "seq-len % (cp · tp) is not 0",
        "layers % (pp · virtual) is not 0",
        "experts % ep is not 0",
        "tp · cp · dp % ep is not 0",
        "ep without experts",
    } < seen


def test_presets_are_those_of_the_tool():
    """If not: python tools/published.py --page > docs/_static/planner/presets.json"""
    assert (FOLDER / "presets.json").read_text() == published.page_data()


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
    "?model=llama-3-405b&machine=dgx-h100&nodes=128&tp=8&pp=16&virtual=8&zero=1"
    "&recompute=selective",
    "?model=qwen3-30b-a3b&machine=gb200-nvl72&node=72&nodes=1&tp=1&pp=1&ep=8"
    "&imbalance=1.2&zero=1&batch_size=1152",
    "?model=llama-3-8b&nodes=4&tp=2&pp=2&loss=pieces&grad_bytes=4&overlap_dp=yes"
    "&schedule=zb-h1&hidden=2048",
    "?model=llama-3-8b&machine=dgx-h100&nodes=8&tp=1&pp=1&micro_batch=2&zero=3"
    "&recompute=half",
    "?model=mixtral-8x7b&machine=dgx-h100&nodes=8&tp=2&pp=4&zero=1",
    "?model=qwen2.5-7b&machine=dgx-a100-40gb&nodes=1&tp=4&pp=2&schedule=zb-h1"
    "&recompute=half",
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
    everything, _, _ = predict.search(sizes, args, {}, **options)
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
    lines = "spans => spans.map(span => span.getClientRects().length)"
    words = page.eval_on_selector_all("#command span", lines)
    assert len(words) > 8 and set(words) == {1}  # no name is broken in two
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


# Address → what the page says instead of a result. The command refuses all of them.
REFUSED = {
    "?hidden=6145&heads=7": "hidden size 6145 is not a multiple of 7 heads",
    "?heads=48.5": "heads: 48.5 is not a whole number above 0",
    "?layers=0": "layers: 0 is not a whole number above 0",
    "?vocab_size=3.7": "vocabulary: 3.7 is not a whole number above 0",
    "?hidden=": "hidden size: nothing is not a whole number above 0",
    "?reserve=150": "reserve, %: 150 is not a number from 0 on, below 100",
    "?gpu_memory=-1": "memory, GB: -1 is not a number above 0",
    "?kv_heads=7": "heads: 48 is not a multiple of 7 key/value heads",
    "?hidden=144&heads=48": "head size 3 is odd",
    "?batch_size=99999999999": "is not a whole number above 0, up to 2147483647",
    "?top_k=2": "experts per token: 2, but there are 0 experts",
    "?experts=8": "experts: how many per token, and how wide?",
    "?imbalance=2": "expert imbalance: 2, but there are no experts",
    "?recompute=half&attention=math": "half, only with attention flash",
    "?scores=half&attention=math": "attention that is written out computes all",
}


def test_it_refuses_what_the_tool_refuses(open_page):
    for query, words in REFUSED.items():
        page = open_page(query, refused=True)
        shown = page.evaluate(SHOWN)
        assert shown["fits"].startswith("Not possible: "), shown
        assert words in shown["fits"]
        assert shown["command"] == "" and "NaN" not in page.content()
        assert page.locator("#map button").count() == 0
        with pytest.raises((ValueError, SystemExit)):
            plan.find(plan.read_flags(command_of(query)))


def command_of(query: str) -> list[str]:
    """The address of a page as arguments of the tool."""
    words = ["--model", "gpt-18.4b", "--gpus", "256"]
    for pair in query.removeprefix("?").split("&"):
        name, _, value = pair.partition("=")
        if name == "reserve":  # a share there
            value = f"{int(value) / 100}"
        words += [f"--{name.replace('_', '-')}", value]
    return words


def test_names_and_sliders_in_the_address_are_known_ones(open_page):
    wrong = "?model=__proto__", "?machine=constructor"
    for query in (*wrong, "?nodes=0", "?nodes=x&node=0&tp=nine"):
        page = open_page(query)
        shown = page.evaluate(SHOWN)
        assert "fit" in shown["fits"] and "NaN" not in shown["fits"], query
        assert "--model gpt-18.4b" in shown["command"], query


def test_an_empty_field_is_no_result(open_page):
    """And a number in its place brings the result back."""
    page = open_page()
    before = page.evaluate(SHOWN)
    page.locator("#hidden").fill("")
    assert page.locator("#fits").text_content().startswith("Not possible: hidden size")
    page.locator("#hidden").fill("6144")
    assert page.evaluate(SHOWN) == before


def test_the_map_marks_tp_that_leaves_the_node(open_page):
    page = open_page("?model=llama-3-405b&machine=dgx-h100&nodes=512&tp=8&pp=16&zero=1")
    marked = {"true": set(), "false": set()}
    for button in page.locator("#map button").all():
        tp = int(button.get_attribute("data-mesh").split(",")[0])
        says = "tp spans nodes" in button.get_attribute("aria-label")
        assert says == button.text_content().endswith("*")
        marked[str(says).lower()].add(tp)
    assert max(marked["false"]) == 8 and min(marked["true"]) == 16
    page.locator("#map button[data-mesh^='16,']").first.click()
    assert "spans nodes" in page.locator("#summary").text_content()


def test_the_page_says_how_wrong_the_times_are(open_page):
    page = open_page()
    rows = page.locator("#bands tr").all_text_contents()[1:]
    assert rows == [
        f"{k}{low:g} to {high:g}" for k, (low, high) in published.BANDS.items()
    ]
    least = min(low for low, _ in published.BANDS.values())
    most = max(high for _, high in published.BANDS.values())
    said = f"MFU of 90 % here is one of {90 / most:.0f} to {90 / least:.0f} % on"
    assert said in page.locator("main").text_content().replace("\xa0", " ")


def test_the_page_lists_published_peaks_and_says_its_units(open_page):
    page = open_page()
    rows = page.locator("#peaks tr").all_text_contents()[1:]
    assert len(rows) == len(published.peaks())
    for row, peak in zip(rows, published.peaks(), strict=True):
        measured, found = peak.measured / 1e9, peak.predicted / 1e9
        ratio = f"{peak.measured / peak.predicted:.2f}"
        assert row == f"{peak.name}{found:.1f}{measured:.1f}{ratio}"
    text = page.locator("main").text_content()
    low, high = published.reserved()
    assert page.locator("#reserved").text_content() == f"{low:.2f} to {high:.2f}"
    assert "GB are 10⁹ bytes" in text and "half of the S × S scores" in text


def test_a_model_without_experts_has_no_imbalance(open_page):
    """Not even the one of the model before it."""
    page = open_page("?model=mixtral-8x7b&nodes=8&imbalance=1.5&zero=1")
    page.select_option("#model", "gpt-18.4b")
    assert page.locator("#imbalance").input_value() == "1"
    assert page.locator("#map button").count()
    page.select_option("#recompute", "half")  # which experts have no formula for
    page.select_option("#model", "mixtral-8x7b")
    assert page.locator("#recompute").input_value() == "selective"
    assert page.locator("#map button").count()


def test_what_does_not_fit_says_why(open_page):
    page = open_page("?model=llama-3-405b&nodes=2&tp=8&pp=1")
    says = page.evaluate(SHOWN)["fits"]
    row = "16 bytes"
    assert (
        says.startswith("It does not fit") and row in says and "76.5 of 85 GB" in says
    )


WAYS = """async ([n, ranks, alpha, beta]) => {
  const js = await import("./predict.js");
  return js.allReduceWays(n, ranks, alpha, beta);
}"""


def test_ways_of_an_all_reduce(open_page):
    """The page's numbers are the tool's; those are of a tree that is walked here."""
    page = open_page()
    for ranks in (1, 2, 3, 4, 5, 8, 13, 64):
        case = [3 * 2**20, ranks, 1e-5, 5e10]
        ways = predict.all_reduce_ways(*case)
        found = page.evaluate(WAYS, case)
        assert found.keys() == ways.keys()
        for name, way in ways.items():
            assert found[name] == pytest.approx(way, rel=1e-12)
        if ranks == 1:
            continue
        sent = [0] * ranks  # messages of n bytes, by rank
        rounds = 0
        distance = 1
        while distance < ranks:
            for child in range(distance, ranks, 2 * distance):
                sent[child] += 1  # up
                sent[child - distance] += 1  # down
            rounds += 2
            distance *= 2
        assert ways["tree"]["rounds"] == rounds
        assert ways["tree"]["bytes"] == max(sent) * case[0]
        assert ways["one shot"]["bytes"] == (ranks - 1) * case[0]
        expected = lesson_00.ring("all-reduce", case[0] * ranks, ranks)
        assert ways["ring"]["bytes"] * ranks == pytest.approx(expected, rel=1e-12)


MASKS = """async ([sizes, more, e, stats, masks, sp]) => {
  const js = await import("./predict.js");
  return js.layerBytes(js.makeLayout(sizes, more), e, stats, masks, sp);
}"""


def test_bytes_of_a_layer_with_and_without_sp_and_masks(open_page):
    page = open_page()
    sizes = predict.model(2, 64, 8, 8, 257, 32, 4)
    for tp in (1, 2, 8):
        for recompute in predict.ways_to_recompute(sizes, "math"):
            for masks in (False, True):
                for sp in (False, True):
                    more = {"tp": tp, "recompute": recompute, "micro_batch": 4}
                    layout = predict.make_layout(sizes, **more)
                    found = page.evaluate(MASKS, [sizes, more, 2, 2, masks, sp])
                    expected = predict.layer_bytes(layout, 2, 2, masks, sp)
                    assert found == expected, (tp, recompute, masks, sp)


WIDGET = """kind => new Promise(done => {
  const script = document.createElement("script");
  script.type = "module";
  script.src = "widgets.js";
  script.onload = () => {
    const widget = document.createElement("tp-widget");
    widget.setAttribute("kind", kind);
    document.body.prepend(widget);
    setTimeout(done, 300);
  };
  document.head.append(script);
})"""
ROWS = """widget => [...widget.shadowRoot.querySelectorAll("tr")].map(
    row => [...row.cells].map(cell => cell.textContent))"""


def open_widget(open_page, kind, query=""):
    page = open_page()
    # The planner has written its own state there.
    page.evaluate("query => history.replaceState(null, '', query)", query or "?")
    page.evaluate(WIDGET, kind)
    return page, page.locator("tp-widget")


def test_the_memory_widget_shows_lesson_04s_numbers(open_page):
    widget = open_widget(open_page, "memory")[1]
    rows = widget.evaluate(ROWS)
    size = {"B": 4, "S": 32, "X": 4 * 32 * 64, "A": 4 * 8 * 32 * 32, "c": 2}
    lesson_04 = jobs.load("04_sequence_parallel")
    for column, run in enumerate(["without TP", "TP", "TP + SP"], 1):
        nbytes = lesson_04.evaluate(lesson_04.LAYER_RUNS[run].saved, dict(size, T=2))
        assert rows[1][column] == f"{nbytes:,} B"
    recomputed = [name for name in lesson_04.LAYER_RUNS if ", " in name]
    assert len(recomputed) == 4
    for name in recomputed:
        run, _, recompute = name.partition(", ")
        line = [row for row in rows if row[0] == recompute]
        nbytes = lesson_04.evaluate(lesson_04.LAYER_RUNS[name].saved, dict(size, T=2))
        assert line[0][rows[0].index(run)] == f"{nbytes:,} B"
    widget.locator("select").select_option("llama-3-8b")
    assert "8192" in widget.locator("output").last.text_content()
    assert widget.evaluate(ROWS)[-1][0] == "none, FlashAttention"


@pytest.mark.parametrize("kind", ["all-reduce", "memory", "bubble"])
def test_widgets_are_accessible(open_page, kind):
    """Also inside: no column of a table is without a head."""
    from axe_playwright_python.sync_playwright import Axe

    page, widget = open_widget(open_page, kind)
    assert len(widget.evaluate(ROWS)) >= 3
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response
    assert [rule["id"] for rule in found["violations"]] == []


def test_widgets_have_keys_labels_and_their_state_in_the_address(open_page):
    page, widget = open_widget(open_page, "bubble")
    rows = widget.evaluate(ROWS)
    assert rows[0][1:] == ["GPipe", "1F1B", "interleaved", "ZB-H1"]
    assert rows[1][1:] == ["37.5 %", "37.5 %", "18.8 %", "12.5 %"]
    assert rows[2][1:] == ["8", "4", "5.5", "4"]
    widget.locator("input").first.press("ArrowRight")  # P = 6
    rows = widget.evaluate(ROWS)
    # 8 micro-batches are no multiple of 6 stages.
    assert rows[1][1:] == ["62.5 %", "62.5 %", "–", "20.8 %"]
    assert rows[2][1:] == ["8", "6", "–", "6"]
    query = "?" + urlsplit(page.url).query
    _, again = open_widget(open_page, "bubble", query)
    assert again.evaluate(ROWS) == rows
    _, ways = open_widget(open_page, "all-reduce")
    rows = ways.evaluate(ROWS)
    assert [row[0] for row in rows] == ["way", "ring", "tree", "one shot"]
    assert [row[-1] for row in rows].count("✓") == 1
    unlabeled = "all => all.filter(x => !x.labels.length).length"
    for each in (widget, ways):
        fields = "tp-widget >> input"
        assert each.page.eval_on_selector_all(fields, unlabeled) == 0
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert each.page.evaluate(wide)
