"""The page of `moco report` in a real browser: no error, no request, dots that react, nothing executed from data."""

import functools
import http.server
import shutil
import threading

import cv2
import numpy as np
import pytest

import moco
from moco.data import fashion
from moco.reporting import report

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here")]

HOSTILE = ["<script>window.hurt = 1<", "{{ 7*7 }} \"quoted' & co", "<img src=x onerror=window.hurt=1>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "pictures"
    images, labels, *_ = fashion.load()
    for label, name in enumerate(HOSTILE):
        (root / name).mkdir(parents=True)
        for index in np.flatnonzero(labels == label)[:24]:
            cv2.imwrite(str(root / name / f'{index}" onload="window.hurt=1.png'), images[index])
    return root


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    given = {
        "recipe": "small", "base_width": 8, "image_size": 16, "epochs": 2, "batch_size": 16, "queue_size": 64,
        "quiet": True, "tensorboard": False, "device": "cpu", "precision": "fp32", "threads": 1, "log_every": 1,
        "workers": 0,
    }  # fmt: skip
    root = tmp_path_factory.mktemp("runs")
    return [moco.pretrain(str(folder), out=str(root / name), **given) for name in ("a <b>'x\"", "other")]


@pytest.fixture(scope="module")
def page_file(runs):
    return report(runs[0], quiet=True)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=[(400, "light"), (400, "dark"), (1400, "light"), (1400, "dark")], ids=str)
def sheet(request, browser):
    """A fresh window, and what it complained about or asked for beyond the page itself."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 500)
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith("data:") else page.complaints.append(asked.url))
    yield page
    context.close()


def opened(page, path):
    address = path.as_uri()
    page.goto(address)
    assert page.complaints == [address]
    page.complaints.clear()
    return page


def pixels(page, selector):
    """Sum of what is drawn on a canvas."""
    return page.evaluate(
        "async selector => { await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);"
        "const shown = document.querySelector(selector), copy = document.createElement('canvas');"
        "[copy.width, copy.height] = [shown.width, shown.height];"
        "const brush = copy.getContext('2d', {willReadFrequently: true});"
        "brush.drawImage(shown, 0, 0);"
        "return brush.getImageData(0, 0, copy.width, copy.height).data.reduce((a, b) => a + b, 0) }",
        selector,
    )


def where(page, index):
    """Where a dot is in the window, by the map's own rule: the layout's grid, centred, 94 % of the shorter side."""
    page.locator("#map-stage").scroll_into_view_if_needed()
    return page.evaluate(
        "index => { const m = JSON.parse(document.getElementById('data').textContent).map.layouts[0];"
        "const b = document.getElementById('map-dots').getBoundingClientRect();"
        "const side = Math.min(b.width, b.height) * 0.94;"
        "return [b.left + b.width / 2 + (m.x[index] - 5000) / 10000 * side,"
        "b.top + b.height / 2 - (m.y[index] - 5000) / 10000 * side] }",
        index,
    )


def test_it_opens_quietly_and_fits(sheet, page_file):
    page = opened(sheet, page_file)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("window.hurt") is None
    assert page.locator("h1").inner_text() == "a <b>'x\""
    assert page.evaluate("[...document.images].every(image => image.alt)")
    page.evaluate("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
    page.wait_for_function("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    for heading in ("Summary", "Curves", "Map", "Nearest neighbours", "Classes"):
        assert page.get_by_role("heading", name=heading, exact=True).is_visible()
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    numbers = [sum(int(word) for word in colour[4:-1].split(",")) for colour in (ground, ink)]
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (numbers[0] < numbers[1]) == dark
    assert abs(numbers[0] - numbers[1]) > 450  # easily read
    assert not page.complaints


def test_the_menu_shows_that_it_goes_on_and_options_stay_whole(sheet, page_file):
    page = opened(sheet, page_file)
    menu = page.locator("nav .wide")
    if not menu.evaluate("menu => menu.scrollWidth > menu.clientWidth"):
        return
    box = menu.bounding_box()
    edge = {"x": box["x"] + box["width"] - 12, "y": box["y"], "width": 12, "height": 8}  # above the words
    picture = page.screenshot(clip=edge)
    menu.evaluate("menu => menu.scrollLeft = menu.scrollWidth")
    page.wait_for_timeout(800)  # it scrolls smoothly
    at_the_end = page.screenshot(clip=edge)
    spans = [
        int(np.ptp(cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_GRAYSCALE))) for one in (picture, at_the_end)
    ]
    assert spans[0] > 20 > 5 > spans[1]  # a shadow while there is more to the right, and none at the end
    page.locator("#summary details").evaluate_all("all => all.forEach(one => one.open = true)")
    flags = page.locator(".flag").all()
    assert any(flag.inner_text().startswith("--") for flag in flags)
    for flag in flags:
        assert flag.evaluate("one => one.getClientRects().length") == 1


def test_pointing_at_a_dot_shows_its_picture(sheet, page_file):
    page = opened(sheet, page_file)
    names = page.evaluate("JSON.parse(document.getElementById('data').textContent).map.names")
    assert not page.locator("#map-tip").is_visible()
    assert pixels(page, "#map-dots") > 0
    for index in (3, 40):
        x, y = where(page, index)
        page.mouse.move(x, y)
        page.wait_for_function("!document.getElementById('map-tip').hidden")
        found = int(page.locator("#map-tip").get_attribute("data-index"))
        there = where(page, found)
        assert abs(there[0] - x) + abs(there[1] - y) < 6  # this dot, or one that lies over it
        assert page.locator("#map-name").inner_text() == names[found]
        assert pixels(page, "#map-tip canvas") > 0
        assert pixels(page, "#map-picture") > 0
    page.mouse.click(x, y)
    page.mouse.move(5, 5)
    assert page.locator("#map-lens").is_visible()  # kept
    assert page.locator("#map-near button").count() == 8
    page.locator("#map-near button").first.click()
    assert page.locator("#map-name").inner_text() != names[found]
    assert page.evaluate("window.hurt") is None
    assert not page.complaints


def test_the_keyboard_reaches_dots_and_curves(sheet, page_file):
    page = opened(sheet, page_file)
    page.locator("#map-stage").focus()
    said = []
    for key in ("Home", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
        said.append(page.locator("#map-said").text_content())
    assert all("nearest are of the same label" in text for text in said)
    assert len(set(said)) > 2
    page.keyboard.press("Enter")
    assert page.locator("#map-lens").is_visible()
    before = pixels(page, "#map-dots")
    page.keyboard.press("+")
    assert pixels(page, "#map-dots") != before
    page.keyboard.press("0")
    assert pixels(page, "#map-dots") == before
    page.keyboard.press("Escape")
    assert not page.locator("#map-lens").is_visible()
    plot = page.locator("#chart-loss .plot")
    plot.focus()
    page.keyboard.press("End")
    reading = page.locator("#chart-loss .reading")
    assert reading.inner_text().startswith("epoch 2: loss ")
    page.keyboard.press("Home")
    assert not reading.inner_text().startswith("epoch 2:")
    assert not page.complaints


def test_colours_and_maps_can_be_chosen(sheet, page_file):
    page = opened(sheet, page_file)
    legend = page.locator("#map-legend button")
    assert legend.count() == 3
    assert legend.first.inner_text() == f"{sorted(HOSTILE)[0]} (24)"
    before = pixels(page, "#map-dots")
    legend.first.click()
    assert legend.first.get_attribute("aria-pressed") == "true"
    assert pixels(page, "#map-dots") < before  # the others fade
    page.select_option("#map-colour", label="cluster")
    assert legend.first.inner_text().startswith("cluster 1 (")
    before = pixels(page, "#map-dots")
    page.select_option("#map-layout", label="PCA, before training")
    assert pixels(page, "#map-dots") != before
    assert page.evaluate("window.hurt") is None
    assert not page.complaints


def test_a_comparison_opens_quietly_too(sheet, runs):
    page = opened(sheet, report(runs, quiet=True))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#chart-c0 .legend li").count() == 2
    box = page.locator("#chart-c0 svg").bounding_box()
    page.locator("#chart-c0 svg").hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    assert "other" in page.locator("#chart-c0 .reading").inner_text()
    assert page.evaluate("window.hurt") is None
    assert not page.complaints


def test_the_policy_stops_what_would_get_through(browser, page_file, tmp_path):
    """Even a page that somebody put a script and a picture from outside into runs and fetches nothing."""
    asked = []

    class Server(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    spoilt = f'<script>window.hurt=1</script><img src="{address}/out.png" onerror="window.hurt=1">'
    text = page_file.read_text(encoding="utf-8").replace("</main>", spoilt + "</main>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    try:
        page = browser.new_page()
        page.add_init_script(
            "window.refused = [];"
            "addEventListener('securitypolicyviolation', event => window.refused.push(event.effectiveDirective))"
        )
        page.goto(f"{address}/report.html")
        # Not until the network is idle: a request that the policy refused may count as one on its way.
        page.wait_for_function("['script-src-elem', 'img-src'].every(kind => window.refused.includes(kind))")
        page.wait_for_function("document.querySelector('img[src^=http]').complete")
        assert page.evaluate("window.hurt") is None
        assert asked == ["/report.html"]
    finally:
        server.shutdown()
        server.server_close()
