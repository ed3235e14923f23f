"""What all tests share: a time limit each, and launches that start ahead of their test.

Launching ranks is most of what the suite costs. A test names what it launches,

    @pytest.mark.launches("01_naive_mlp_tp", 2, "--dtype", "float64")

and jobs start in the order of the tests, one per core (at least two; TEST_JOBS=6: six),
before the tests ask. TEST_COSTS=FILE writes down the seconds that each launch of ranks
takes, of CPU and in all. First run the modules that wait for none of them,
and the tests of live ranks; notebooks come last, and when nothing else runs, tests
marked `alone`. What is launched twice with the same flags runs once, also for a
notebook. One notebook runs next to two jobs, for its cells often wait; when no other
job is left, three run at a time. What mostly waits for a timeout is a function that a
test names by the mark `ahead`: two of these run next to the rest.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import jobs
import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

NAMES = "chromium-headless-shell chromium chromium-browser google-chrome chrome"
ON_MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
FLAGS += " --disable-background-networking --disable-component-update --disable-sync"
PATIENCE = 300_000  # ms for a page on a busy machine
OF_ITS_OWN = "test_site test_player test_submission test_draw test_setup test_text"
QUICK = [("00", 2), ("01", 2), ("02", 2), ("03", 2), ("04", 2), ("05", 4)]

pytest.register_assert_rewrite("runs")  # its asserts too say what differs


def pytest_configure(config):
    # A shell that starts tests in the background has them ignore Ctrl-C, and with them
    # all that they start; some tests send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        # Ranks wake each other up at every message. All that tests start inherits
        # this: who is woken waits for its turn. Four ranks on two cores need two thirds
        # of the time so.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    config.addinivalue_line(
        "markers", "launches(lesson, ranks, *flags): a lesson's run"
    )
    config.addinivalue_line(
        "markers", "ahead(function, *args): called ahead of its test"
    )
    config.addinivalue_line("markers", "alone: runs last, when nothing else does")
    config.addinivalue_line("markers", "essential: for `make quick`; set below")


@pytest.hookimpl(tryfirst=True)  # before some are left out by their markers
def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
        if is_essential(item):
            item.add_marker(pytest.mark.essential)
    items.sort(key=turn)


def turn(item) -> int:
    """When a test runs. Jobs start in this order, too."""
    if item.get_closest_marker("alone"):
        return 4
    if item.path.stem == "test_notebooks":
        return 3 if item.get_closest_marker("launches") else 1
    return 0 if item.path.stem in OF_ITS_OWN.split() else 2


def is_essential(item) -> bool:
    """The texts, refusals, wrappers, and what default runs of all lessons say."""
    if item.get_closest_marker("alone") or item.path.stem == "test_notebooks":
        return False
    runs = [marker.args for marker in item.iter_markers("launches")]
    defaults = [(run[0][:2], *run[1:]) for run in runs]
    if runs:
        return all(run in QUICK for run in defaults)
    return item.path.stem in ("test_text", "test_refusals", "test_wrappers")


def pytest_collection_finish(session):
    if session.config.option.collectonly:
        return
    # First what a notebook runs as well: notebooks go on next to all the other jobs.
    for item in sorted(session.items, key=is_run_of_a_notebook, reverse=True):
        for marker in item.iter_markers("launches"):
            jobs.ahead(*marker.args)
        for marker in item.iter_markers("ahead"):
            jobs.begin(*marker.args)


def is_run_of_a_notebook(item) -> bool:
    return item.originalname == "test_the_site_shows_what_is_printed"


def pytest_sessionfinish():
    for pool in (jobs.POOL, jobs.WAITING, jobs.NOTEBOOKS):
        pool.shutdown(wait=False, cancel_futures=True)
    for mark in list(jobs.RUNNING):
        jobs.end(mark)


@pytest.fixture(scope="module")
def ranks(request):
    """What each rank of the module's driver found."""
    return jobs.result(*request.module.DRIVER)


@pytest.fixture(autouse=True)
def no_figure_left():
    """Every test of a picture starts without one."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def browser():
    """One Chromium for the site and the players; CI has to have it."""
    paths = [shutil.which(name) for name in NAMES.split()] + [shutil.which(ON_MACOS)]
    if not any(paths):
        assert os.environ.get("CI") != "true", "CI has to have a chromium"
        pytest.skip("no chromium here: nothing was opened in a browser")
    from playwright.sync_api import sync_playwright

    path = next(filter(None, paths))
    with sync_playwright() as playwright:
        chromium = playwright.chromium
        yield chromium.launch(executable_path=path, args=FLAGS.split())


@pytest.fixture(scope="session")
def window(browser):
    """Where pages are opened: a new window each would cost two seconds of a core."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    return context


@pytest.fixture
def open_file(window):
    """Opens a file of docs/_static; errors and requests to elsewhere fail the test."""
    wrong = []
    pages = []

    def serve(route):
        path = urlsplit(route.request.url).path
        route.fulfill(path=jobs.ROOT / path.removeprefix("/"))

    def open_file(address: str, width: int, height: int, **media):
        page = window.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(**media)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.route("**/*", lambda route: route.abort())  # the console reports it
        page.route("http://localhost/**", serve)
        page.goto(f"http://localhost/docs/_static/{address}")
        return page

    yield open_file
    for page in pages:
        page.close()
    assert wrong == []
