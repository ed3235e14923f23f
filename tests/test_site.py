"""The site, built as `make site` does and opened in a real browser."""

import functools
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jobs
import numpy as np
import pytest
from conftest import PATIENCE
from pictures import ARROWS, draw

DECKS = {"ninety": 90, "day": 60}  # minutes until the end, or of each hour
# What one look at a page finds.
LOOK = """() => {
    const all = (selector, find) => [...document.querySelectorAll(selector)].map(find);
    return {
        links: all("a[href]", link => link.href),
        ids: all("[id]", each => each.id),
        pictures: all("img", ({alt, src, complete, naturalWidth}) =>
            ({alt, src, there: complete && naturalWidth > 0})),
        code: all(".lesson-code", each => ({
            title: each.closest("section").querySelector("h2, h3").innerText,
            text: each.querySelector("pre").textContent,
            links: [...each.querySelectorAll("a.linenos")].map(link => link.href),
            shown: each.checkVisibility(),
            folds: each.closest("details") !== null,
        })),
        output: all(".lesson-output", each => each.innerText),
        titles: all(".lesson-output a", link => link.innerText),
        bugs: all("section[id^=bug-]", each => [each.id, each.innerText]),
        beside: all(".beside pre", each => each.textContent),
        printed: all(".cell_output .stream pre", each => [
            each.textContent.split("\\n").length - 1,
            each.closest("details") !== null,
            each.checkVisibility() && each.scrollWidth > each.clientWidth]),
        terms: all("dd", each => [each.innerText, each.querySelector("a") !== null]),
    };
}"""
# Contrast takes seconds in long code: of each colour one token is enough.
SHORTEN = """all => all.forEach(code => {
    const seen = new Set();
    for (const token of [...code.children])
        seen.has(token.className) ? token.remove() : seen.add(token.className);
})"""
RULES = """color-contrast image-alt heading-order empty-heading page-has-heading-one
    document-title html-has-lang link-name button-name label list
    listitem definition-list dlitem landmark-one-main scrollable-region-focusable
    aria-allowed-attr aria-valid-attr duplicate-id-aria"""
SLIDE = """() => {
    const slide = Reveal.getCurrentSlide();
    const prose = slide.querySelectorAll("p:not(.alone), li:not(:has(p))");
    return {
        title: slide.querySelector("h1, h2").innerText,
        prose: [...prose].map(each => each.innerText),
        notes: slide.querySelector("aside.notes").textContent,
        below: Math.floor(slide.getBoundingClientRect().bottom - window.innerHeight),
    };
}"""
# Of the player on the current slide: how many steps it has, and which one it shows.
PLAYER = 'Reveal.getCurrentSlide().querySelector("tp-player")'
STEPS = f"{PLAYER}?.events.length ?? 0"
STOPS = f"{PLAYER}?.getAttribute('steps')?.split(',').map(Number)"
STEP = f'{PLAYER}.shadowRoot.querySelector(".count").textContent'
LOADED = """[...document.querySelectorAll("tp-player")].every(
    player => player.shadowRoot?.querySelector(".count")?.textContent)"""
BACK = "it => getComputedStyle(it.box).backgroundColor"
CUT_LANES = """[...document.querySelectorAll("tp-player")].flatMap(player =>
    player.events.map((_, step) => {
        player.go(step, false);
        const lanes = [...player.shadowRoot.querySelectorAll(".boxes")];
        const cut = lanes.some(lane => lane.scrollWidth > lane.clientWidth);
        return cut ? [player.getAttribute("src"), step + 1] : [];
    })).filter(each => each.length)"""
# The smallest number of a player on a slide, in percent of the slide's height.
SMALLEST = """player => 100 / 720 * Math.min(...[
    ...player.shadowRoot.querySelectorAll(
        ".stage .cell, .stage .cell small, .stage .bar b, .stage .closed .cells")
].filter(each => each.checkVisibility() && each.textContent
).map(each => parseFloat(getComputedStyle(each).fontSize)).filter(Boolean))"""
# And of a picture, whose numbers have draw.py's FONT at 100 pixels per inch.
PICTURE = """picture => 100 / 720 * FONT / 72 * 100 * Math.min(
    picture.offsetWidth / picture.naturalWidth,
    picture.offsetHeight / picture.naturalHeight)""".replace("FONT", str(draw.FONT))
CUT_NUMBERS = """player => [
    ...player.shadowRoot.querySelectorAll(".stage .cell")
].filter(cell => cell.offsetParent && cell.scrollWidth > cell.clientWidth
).map(cell => cell.textContent)"""
LANES = """player => [...player.shadowRoot.querySelectorAll(".lane")].map(
    lane => [lane.offsetTop, lane.offsetHeight])"""
# A player that has just come into sight fits its text at the next frame.
SETTLED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
WIDER = "() => document.documentElement.scrollWidth - window.innerWidth"


def build() -> Path:
    """The folder of the site; its line numbers lead to a repository on GitHub."""
    folder = Path(tempfile.mkdtemp())
    make = ["make", "-n", "site", f"RUN={sys.executable}"]
    told = subprocess.check_output(make, cwd=jobs.ROOT, text=True).splitlines()
    commands = [line for line in told if "-m sphinx" in line]
    assert len(commands) == 2 and all(" -W " in line for line in commands)
    env = {"GITHUB_REPOSITORY": "us/course", "GITHUB_SHA": "abc"}
    for line in commands:
        words = [re.sub("^site/", f"{folder}/", word) for word in shlex.split(line)]
        done = jobs.watch(["nice", *words], 900, env)
        assert done.code == 0, done.text
    return folder / "html"


pytestmark = [
    pytest.mark.timeout(2400),  # the build, and some thirty pages
    pytest.mark.ahead.with_args(build),
]


@pytest.fixture(scope="module")
def site():
    """What was built ahead of the tests."""
    html = jobs.begin(build).result()
    yield html
    shutil.rmtree(html.parent)


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.set_default_timeout(PATIENCE)
    return page


@pytest.fixture(scope="module")
def looks(site, address, page) -> dict[str, dict]:
    """What was found on every page, opened once."""
    from axe_playwright_python.sync_playwright import Axe

    errors, found, ours = [], {}, (address, "data:", "blob:")
    page.on("console", lambda m: m.type == "error" and errors.append(m.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.on("request", lambda r: r.url.startswith(ours) or errors.append(r.url))
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if "_static" in name:  # the players' own page, and reveal.js's notes
            continue
        errors.clear()
        page.goto(address + name)  # to its end; then until players have their recording
        page.wait_for_function(LOADED)
        found[name] = look = page.evaluate(LOOK)
        look["errors"] = list(errors)
        look["too wide"] = []
        for width in (360, 1280):
            page.set_viewport_size({"width": width, "height": 720})
            if more := page.evaluate(WIDER):
                look["too wide"].append(f"by {more} pixels at {width}")
        page.eval_on_selector_all("pre", SHORTEN)
        rules = set(RULES.split())
        if re.match(r"(lessons|notebooks)/(0[1-9]|1)", name):
            rules.remove("color-contrast")  # slow; the 00s have all colours
        options = {"runOnly": sorted(rules), "resultTypes": ["violations"]}
        result = Axe().run(page, options=options).response["violations"]
        nodes = [(rule["id"], node) for rule in result for node in rule["nodes"]]
        look["axe"] = [f"{rule}: {node['html'][:120]}" for rule, node in nodes]
    return found


def test_every_notebook_is_there(looks):
    paths = (jobs.ROOT / "notebooks").glob("[0-9]*_*.ipynb")
    assert {f"notebooks/{path.stem}.html" for path in paths} <= set(looks)


@pytest.mark.parametrize("fault", ["errors", "too wide", "axe"])
def test_no_page_has_faults(looks, fault):
    """No errors, no requests to elsewhere; as wide as the window, for code and tables
    scroll by themselves; axe-core's rules for contrast, headings and others."""
    assert {name: look[fault] for name, look in looks.items() if look[fault]} == {}


def test_links_and_pictures_lead_somewhere(looks, address, site):
    for name, look in looks.items():
        for link in look["links"]:
            if not link.startswith(address):
                continue
            place, _, fragment = link.removeprefix(address).partition("#")
            place = place.partition("?")[0] or "index.html"
            assert (site / place).is_file(), (name, link)
            if fragment and not place.startswith("slides/"):
                assert fragment in looks[place]["ids"], (name, link)
        for picture in look["pictures"]:
            assert picture["there"] and len(picture["alt"]) > 20, (name, picture["src"])


def test_search(page, address):
    page.goto(address + "search.html?q=reduce-scatter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_selector("text=Search finished")
    links = page.locator("#search-results li a").all()
    found = {link.get_attribute("href").partition(".html")[0] for link in links}
    assert {"glossary", "lessons/00_collectives", "notebooks/00_collectives"} <= found


@pytest.mark.parametrize(
    "asked, answers",
    {
        "wrong gradient": {"bugs", "audit", "notebooks/12_wrong_gradients"},
        "loss is wrong": {"bugs", "audit", "notebooks/12_wrong_gradients"},
        "ring attention": {
            "notebooks/11_context_parallel",
            "lessons/11_context_parallel",
        },
        "out of memory": {"mesh", "notebooks/07_plan_a_run"},
        "it hangs": {"bugs", "run"},
    }.items(),
)
def test_search_answers_first(page, address, asked, answers):
    page.goto(f"{address}search.html?q={asked.replace(' ', '+')}")
    page.wait_for_selector("text=Search finished")
    links = page.locator("#search-results > ul > li > a").all()[:3]
    found = {link.get_attribute("href").partition(".html")[0] for link in links}
    assert answers <= found


def test_home_says_how_to_get_the_course(page, address):
    page.goto(f"{address}index.html")
    text = page.locator("article").inner_text()
    assert "git clone https://github.com/us/course\ncd course" in text
    assert "tools/audit.py" in text and "3.75 times as much" in text


def test_icons_are_a_font_and_no_script(browser, address, site):
    """A page loads half of the bytes, and its icons can be seen."""
    assert not list(site.rglob("fontawesome.js*"))
    page = browser.new_page()  # with an empty cache
    page.set_default_timeout(PATIENCE)
    responses = []
    page.on("response", lambda response: responses.append(response))
    page.goto(f"{address}index.html", wait_until="networkidle")
    page.wait_for_function(LOADED)
    assert 500_000 < sum(len(each.body()) for each in responses) < 1_400_000
    assert page.evaluate("document.fonts.load('900 16px \"Font Awesome 7 Free\"')")
    icon = "document.querySelector('i.fa-magnifying-glass'), '::before'"
    assert page.evaluate(f"getComputedStyle({icon}).content.length") >= 3


def test_outputs_of_notebooks(looks):
    """On a wide screen no output scrolls by itself; long ones are folded."""
    for name, look in looks.items():
        for lines, folded, scrolls in look["printed"]:
            assert not scrolls, name
            assert folded == (lines > 34), (name, lines)


def test_code_of_more_than_40_lines_is_folded():
    course = jobs.load("docs.course")

    def cell(lines: int) -> dict:
        text = ["```python\n", *["x = 1\n"] * lines, "```"]
        return {"metadata": {}, "outputs": [{"data": {"text/markdown": text}}]}

    cells = [cell(40), cell(41)]
    course.fold_long_outputs(cells)
    tags = [each["metadata"].get("tags", []) for each in cells]
    assert tags == [[], ["hide-output"]]


@pytest.mark.parametrize("lesson", jobs.PATHS)
def test_lesson(looks, lesson):
    """All of the file, numbered and linked; what is carried over and MEASURE are
    folded; the helpers that it imports; and what a run printed."""
    look = looks[f"lessons/{lesson}.html"]
    of_files = {jobs.PATHS[lesson]: []}
    for each in look["code"]:
        path = jobs.PATHS[lesson]
        if each["title"].startswith("Helper: "):
            path = path.with_name(each["title"].split()[1] + ".py")
        of_files.setdefault(path, []).append(each)
    for path, parts in of_files.items():
        lines = "".join(each["text"] for each in parts).splitlines()
        links = [link for each in parts for link in each["links"]]
        wanted = path.read_text("utf-8").splitlines()
        assert lines == [f"{n:4}  {line}" for n, line in enumerate(wanted, 1)]
        place = f"https://github.com/us/course/blob/abc/{path.relative_to(jobs.ROOT)}"
        assert links == [f"{place}#L{n}" for n, _ in enumerate(wanted, 1)]
    shown = {path.stem for path in of_files}
    for path in of_files:
        for name in re.findall(
            r"^ *(?:from|import) (\w+)", path.read_text("utf-8"), re.M
        ):
            is_helper = (jobs.ROOT / "beyond" / f"{name}.py").exists()
            assert name in shown or name == "course" or not is_helper, (lesson, name)
    code = of_files[jobs.PATHS[lesson]]
    wanted = jobs.PATHS[lesson].read_text("utf-8").splitlines()
    titles = {each["title"].split()[0] for each in code}
    assert {"NEW", "RUN"} <= titles
    assert ("MEASURE," in titles) == (lesson in jobs.LESSONS)
    for each in code:
        folded = each["title"].startswith(("CARRIED", "MEASURE"))
        assert each["folds"] == folded and each["shown"] != folded, each["title"]

    output = (jobs.ROOT / "docs" / "outputs" / f"{lesson}.txt").read_text("utf-8")
    assert [shown.split() for shown in look["output"]] == [output.split()]
    sections = re.findall(r"^\d+  .*", output, re.M)
    assert [title.split() for title in look["titles"]] == [s.split() for s in sections]


def test_all_bugs(looks):
    course = jobs.load("docs.course")
    text = dict(looks["bugs.html"]["bugs"])
    edits = {
        f"bug-{lesson[:2]}-{name}": edit
        for lesson in jobs.PATHS
        for name, edit in course.bugs_of(lesson).items()
    }
    assert list(text) == list(edits) and len(edits) > 90
    for name, edit in edits.items():
        if "audit" in edit:
            assert f"reports it as “{edit['audit']} …”" in text[name], name
        _, number, bug = name.split("-", 2)
        assert f"python tools/bug.py {number} {bug}\n" in text[name]
        for word in ("what", "symptom", "why", "reported"):
            assert edit[word].replace("`", "") in text[name], (name, word)
        for sign, code in (("- ", edit["old"]), ("+ ", edit["new"])):
            lines = [line for line in text[name].splitlines() if line[2:].strip()]
            shown = [line[2:] for line in lines if line[:2] in (sign, "  ")]
            assert shown == [line for line in code.splitlines() if line.strip()], name


def test_bugs_by_symptom(looks):
    """What someone sees who has a bug; each bug is there, and under what it says."""
    course = jobs.load("docs.course")
    groups = {symptom: set() for symptom in course.SYMPTOMS}
    missing = []
    for lesson in course.PATHS:
        for name, edit in course.bugs_of(lesson).items():
            found = [
                symptom
                for symptom, words in course.SYMPTOMS.items()
                if re.search(words, edit["symptom"])
            ]
            for symptom in found:
                groups[symptom].add(f"bug-{lesson[:2]}-{name}")
            if not found:
                missing.append((lesson, name, edit["symptom"]))
    assert missing == []
    drifts = groups["The loss of step 1 is right, then it drifts"]
    assert {"bug-01-f", "bug-02-drift", "bug-04-norms"} <= drifts
    factor = groups["One gradient is a factor too large or too small"]
    assert {"bug-01-g", "bug-01-average", "bug-09-twice"} <= factor
    assert {"bug-00-skip", "bug-05-order"} <= groups["It hangs or aborts"]
    wrong = groups["The loss of step 1 is wrong"]
    assert {"bug-01-bias", "bug-02-qkv"} <= wrong and not wrong & {"bug-01-f"}
    linked = {link.partition("#")[2] for link in looks["bugs.html"]["links"]}
    assert set().union(*groups.values()) <= linked


def test_where_a_bug_is():
    """Page, line and definition: in its lesson, in a helper, in another lesson."""
    course = jobs.load("docs.course")
    for lesson, name, target, page in [
        ("01_naive_mlp_tp", "f", "CopyToTP.backward", "01_naive_mlp_tp.html#L"),
        (
            "09_shared_heads",
            "input",
            "copy_then_apply_each",
            "02_transformer_tp.html#L",
        ),
        ("15_zero", "hybrid", "", "15_zero.html#"),
    ]:
        edit = course.bugs_of(lesson)[name]
        link, found = course.where(lesson, edit)
        assert page in link and target in found, (lesson, name, link, found)
        file = jobs.ROOT / edit.get("file", f"{jobs.PATHS[lesson]}")
        line = int(link.rpartition("L")[2])
        assert edit["old"].startswith(file.read_text("utf-8").splitlines()[line - 1])


def test_differences(looks):
    """Each line of an edit is shown next to the line that made what it replaces."""
    shown = [text.strip() for text in looks["differences.html"]["beside"]]
    pairs = dict(zip(shown[1::2], shown[0::2]))
    edits = re.findall(
        r"^    mlp\.\w+ = .*|^ +(?:attn|layer|model)\.[\w.]+ = .*",
        "\n".join(
            jobs.PATHS[lesson]
            .read_text("utf-8")
            .partition(f"def {name}(")[2]
            .partition("\n\n\n")[0]
            for lesson, name in [
                ("01_naive_mlp_tp", "tp_mlp"),
                ("02_transformer_tp", "parallelize_layer"),
                ("04_sequence_parallel", "split_sequence"),
                ("04_sequence_parallel", "sp_transformer"),
            ]
        ),
        re.M,
    )
    assert len(edits) == 16
    for line in edits:
        line = line.strip()
        attribute = re.search(r"(\w+) = ", line)[0]
        assert line in pairs and attribute in pairs[line], line
    assert "nn.Linear" in pairs[edits[0].strip()]


MARKDOWN = [*jobs.ROOT.glob("*.md"), *(jobs.ROOT / "docs").glob("*.md")]
MARKDOWN += (jobs.ROOT / "docs" / "lessons").glob("*.md")


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.stem)
def test_links_lead_somewhere_in_a_clone(path):
    """The same links lead to pages of the site: lead_to_pages sees to it."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)", text, re.M)
    for link in [one or other for one, other in links]:
        target = link.partition("#")[0]
        if target and "://" not in target:
            assert (path.parent / target).exists(), link
            assert not target.endswith(".html"), link


def test_glossary(looks):
    """One sentence a term, and where it is shown."""
    terms = looks["glossary.html"]["terms"]
    assert len(terms) > 50
    shown_in = r"\((across stages |notebook |[ ,;]|\d\d)+\)\."
    for text, linked in terms:
        assert re.fullmatch(rf"[^.]*{shown_in}", text) and linked, text


@pytest.mark.parametrize("width", [1280, 1920])
@pytest.mark.parametrize("deck", DECKS)
def test_players_on_slides(browser, address, deck, width):
    """In the dark and on a projector: nothing is cut off, lanes keep their places,
    arrows end at their cells, no number is smaller than 3 % of the slide's height."""
    size = {"width": width, "height": width * 9 // 16}
    page = browser.new_page(viewport=size, color_scheme="dark", reduced_motion="reduce")
    page.set_default_timeout(PATIENCE)
    page.goto(f"{address}slides/{deck}.html")
    page.wait_for_function(LOADED)
    arrows = 0
    for number in range(page.evaluate("Reveal.getTotalSlides()")):
        page.evaluate(f"Reveal.slide({number})")
        steps = page.evaluate(STOPS) or [*range(page.evaluate(STEPS))]
        lanes = []
        for turn, step in enumerate(steps):
            if turn:
                page.keyboard.press("ArrowRight")
            page.evaluate(SETTLED)
            player = page.locator("section.present tp-player")
            smallest = player.evaluate(SMALLEST)  # none at the start of schedules
            assert smallest is None or smallest >= 2.99, (number, step)
            assert player.evaluate(CUT_NUMBERS) == [], (number, step)
            assert player.evaluate("it => it.scrollHeight <= it.clientHeight")
            assert player.evaluate(BACK) == "rgb(255, 255, 255)"
            seen = player.evaluate(ARROWS)
            assert seen["astray"] == seen["crossed"] == [], (number, seen)
            arrows += seen["tips"]
            lanes.append(player.evaluate(LANES))
        off = np.ptp(lanes, axis=0) if lanes else np.zeros(1)
        assert off.max(initial=0) <= 1, (number, lanes)
    assert arrows >= 10
    page.close()


@pytest.mark.parametrize("name", ["players", "notebooks/04_sequence_parallel"])
def test_no_lane_is_wider_than_its_player(page, address, name):
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(f"{address}{name}.html")
    page.wait_for_function(LOADED)
    assert page.evaluate(CUT_LANES) == []


@pytest.mark.parametrize("deck", DECKS)
def test_slides(page, address, deck):
    """They turn; a slide has few words, stays on the screen, and has notes in time."""
    page.goto(f"{address}slides/{deck}.html")
    total = page.evaluate("Reveal.getTotalSlides()")
    minute = players = keys = 0
    printed = []  # the steps of players that are on paper: those to stop at
    page.wait_for_function(LOADED)
    for number in range(total):
        assert page.evaluate("Reveal.getSlidePastCount()") == number
        slide = page.evaluate(SLIDE)
        title, notes = slide["title"], slide["notes"]
        assert len(" ".join(slide["prose"]).split()) <= 25, title
        assert slide["below"] <= 0, title
        for picture in page.locator("section.present img[src*=png]").all():
            assert picture.evaluate(PICTURE) >= 3, title
        assert re.search(r"\bAsk\b|Everyone writes", notes), title
        if times := re.search(r"[Mm]inutes (\d+)–(\d+)\.", notes):
            start, end = map(int, times.groups())
            assert start == minute % DECKS[deck] and start < end, title
            minute = end
        else:  # a day's title and its end
            assert number in (0, total - 1), title
        steps = page.evaluate(STEPS)
        stops = page.evaluate(STOPS) or [*range(1, steps + 1)]
        for step in stops[1:]:  # a key leads to the next step to stop at
            page.keyboard.press("ArrowRight")
            assert page.evaluate(STEP) == f"{step} / {steps}", title
            assert page.evaluate("Reveal.getSlidePastCount()") == number
        players += steps > 0
        printed += [f"{step} / {steps}" for step in stops]
        page.keyboard.press("ArrowRight")
        keys += len(stops) or 1
    assert minute == DECKS[deck] and players >= 4
    assert keys <= {"ninety": 60, "day": 90}[deck]
    page.goto(f"{address}slides/{deck}.html?print-pdf")
    page.wait_for_selector(".pdf-page")
    fragments = page.locator(".fragment").count()
    assert fragments > total
    assert page.locator(".pdf-page").count() == keys  # a page for each step to stop at
    page.wait_for_function(LOADED)
    shown = page.evaluate("""[...document.querySelectorAll("tp-player")].map(
        player => player.shadowRoot.querySelector(".count").textContent)""")
    assert shown == printed
