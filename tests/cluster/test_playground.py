"""The page at / in a real browser: a race of the circle model, its keys, its documents, and how it is served."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cluster.http import playground
from tests.helpers.waiting import eventually

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
FILES = sorted(path.name for path in playground._FOLDER.iterdir() if path.name != "index.html")
WAIT_MS = 60_000


def test_the_page_is_served_with_headers_that_hold_it_to_this_server(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert http.head("/").headers["etag"] == page.headers["etag"]
    assert http.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    # No inline script or style, and nothing of other servers.
    assert re.findall(r"<script(?![^>]*\bsrc=)|\bstyle=|\bon[a-z]+=|//[a-z]", page.text) == []
    assert "/" not in http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("name", FILES)
def test_its_files_have_their_types_and_name_no_other_server(http: httpx.Client, name: str) -> None:
    file = http.get(f"/playground/{name}")
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert file.status_code == 200
    assert file.headers["content-type"].partition(";")[0] == kinds[Path(name).suffix]
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", file.text) == []


def test_a_browser_finds_the_icon_where_it_looks_first(http: httpx.Client) -> None:
    assert http.get("/favicon.ico").content == http.get("/playground/favicon.svg").content


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium or Chrome, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"none of these browsers is on the path: {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver, closing(driver.chromium.launch(executable_path=path, args=ARGUMENTS)) as found:
        yield found


@pytest.fixture
def opened(browser: Any, api_server: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page in a window of its own; the test fails on what the page logs as an error."""
    contexts, errors = [], []

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if is_fault(message) else None)
        page.goto(api_server.url)
        page.locator("#strategies .chip").first.wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def is_fault(message: Any) -> bool:
    """Whether the console tells of an error of the page. What the server refuses Chromium tells there, too."""
    return message.type == "error" and "the server responded with a status of 400" not in message.text


def fill(page: Any, question: str, tokens: int, documents: str = "") -> None:
    """Another prompt than the sample's, and the length of the answer."""
    page.locator("#documents").fill(documents)
    page.locator("#question").fill(question)
    page.locator("#more").evaluate("node => node.open = true")
    page.locator("#max-tokens").fill(str(tokens))


def test_a_race_shows_equal_texts_who_drafted_them_and_how_fast(opened: Callable[..., Any]) -> None:
    page = opened()
    assert page.locator("#model").text_content().startswith("circle, 16,384 tokens")
    assert [box.input_value() for box in page.locator("#strategies input").all()] == ["llma", "prompt_lookup"]
    page.locator("#strategies .chip", has_text="prompt_lookup").click()
    fill(page, "walk: <abcdefgh", 60, documents="ijklm><abcdefgh")
    page.locator("#run").click()
    page.locator("#verdict[data-agree=true]").wait_for()
    lanes = page.locator(".lane")
    assert [lane.get_attribute("data-strategy") for lane in lanes.all()] == ["autoregressive", "llma", "prompt_lookup"]
    texts = [lane.locator(".text").text_content() for lane in lanes.all()]
    assert len(texts[0]) > 20 and texts.count(texts[0]) == 3
    assert page.locator("#agree").text_content() == "identical"
    assert "instead of 60" in page.locator("#summary").text_content()
    assert page.locator("#status").text_content() == page.locator("#summary").text_content()
    # The plain lane has the model's own tokens alone; the others show what was copied, and the legend counts it.
    assert lanes.nth(0).locator(".s-model").count() == 60 == lanes.nth(0).locator(".t").count()
    copied = lanes.nth(1).locator(".t:not(.s-model)")
    assert copied.count() > 20
    counts = page.locator("#legend .count").all_text_contents()
    assert sum(map(int, counts)) == 120 and len(counts) > 1
    steps = [int(lane.locator(".numbers dd").nth(2).text_content()) for lane in lanes.all()]
    assert steps[0] == 60 and max(steps[1:]) < 40


def test_the_keyboard_alone_runs_and_stops_a_race(opened: Callable[..., Any], http: httpx.Client) -> None:
    page = opened()
    fill(page, "walk: <", 16_000)  # a busy browser shows the first token late
    page.locator("#question").focus()
    page.keyboard.press("Control+Enter")
    page.locator(".lane .t").first.wait_for()
    eventually(lambda: http.get("/health").json()["running"] >= 1)
    page.keyboard.press("Escape")
    page.wait_for_function("document.getElementById('status').textContent === 'Stopped.'")
    states = {lane.get_attribute("data-strategy"): lane.get_attribute("data-state") for lane in page.locator(".lane").all()}
    assert states == {"autoregressive": "stopped", "llma": "stopped"}  # the one that had not begun, too
    page.wait_for_function("fetch('health').then(answer => answer.json()).then(state => state.running === 0)")


def test_a_refusal_is_told_in_words(opened: Callable[..., Any]) -> None:
    page = opened()
    fill(page, "walk", 999_999)
    page.locator("#run").click()
    page.locator(".lane[data-state=failed]").nth(1).wait_for()
    for detail in page.locator(".lane .detail").all_text_contents():
        assert "max_tokens" in detail and "16384" in detail
    assert "nothing to compare" in page.locator("#summary").text_content()
    page.locator("#strategies .chip").first.click()  # none is left
    page.locator("#run").click()
    page.locator("#notice:not([hidden])").wait_for()
    assert "at least one strategy" in page.locator("#notice").text_content()


def test_options_of_strategies_go_into_the_requests(opened: Callable[..., Any]) -> None:
    page = opened()
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json["speculation"]) if request.method == "POST" else None)
    page.locator("#strategies .chip", has_text="prompt_lookup").click()
    fill(page, "walk: <abcdefgh", 40, documents="ijklm><abcdefgh")
    page.locator("#options").fill("llma: copy_length=3, ties=recent; prompt_lookup:num_tokens=2")
    page.locator("#as-published").check()
    page.locator("#run").click()
    page.locator("#verdict[data-agree=true]").wait_for()
    assert {each["strategy"]: (each.get("options"), each.get("as_published")) for each in sent if "strategy" in each} == {
        "autoregressive": (None, None),
        "llma": ({"copy_length": 3, "ties": "recent"}, True),
        "prompt_lookup": ({"num_tokens": 2}, True),
    }
    page.locator("#options").fill("llma: copy_length=300")
    page.locator("#run").click()
    page.locator(".lane[data-strategy=llma] .detail", has_text="llma: 300 rows a step wanted").wait_for()
    page.locator("#options").fill("llma: copy_lengths=3")
    page.locator("#run").click()
    page.locator(".lane[data-strategy=llma][data-state=failed]").wait_for()
    assert "did you mean 'copy_length'" in page.locator(".lane[data-strategy=llma] .detail").text_content()


def test_a_conversation_goes_on_and_begins_anew(opened: Callable[..., Any]) -> None:
    page = opened()
    page.locator("label", has_text="Conversation").click()
    assert not page.locator("#verdict").is_visible() and not page.locator("#strategies").is_visible()
    fill(page, "walk: <abc", 12)
    for turn in range(2):
        page.locator("#question").fill("walk: <abc")
        page.locator("#run").click()
        page.locator(".lane[data-state=done]").nth(turn).wait_for()
    assert page.locator(".asked").all_text_contents() == ["walk: <abc"] * 2
    first, second = page.locator(".lane .text").all_text_contents()
    assert first == second and len(first) > 8 and page.locator("#question").input_value() == ""
    sizes = [int(re.search(r"the prompt had (\d+)", text)[1]) for text in page.locator(".lane .detail").all_text_contents()]  # type: ignore[index]
    assert sizes[1] > sizes[0] + 12  # the first question and its answer went along
    page.locator("#fresh").click()
    assert page.locator(".lane").count() == 0
    fill(page, "walk", 999_999)
    page.locator("#run").click()
    page.locator(".lane[data-state=failed]").wait_for()
    assert page.locator("#question").input_value() == "walk"  # nothing was answered: it may be asked again


def test_files_that_are_chosen_or_dropped_become_documents(opened: Callable[..., Any]) -> None:
    page = opened()
    page.locator("#documents").fill("[1] written")
    files = [("a.md", b"# Nine"), ("b.html", b"<html><p>ten &amp; <b>eleven</b></p></html>")]
    page.locator("#files").set_input_files([{"name": name, "mimeType": "", "buffer": text} for name, text in files])
    page.locator("#status", has_text="b.html is added").wait_for(state="attached")
    assert page.locator("#documents").input_value() == "[1] written\n\n[a.md]\n# Nine\n\n[b.html]\nten & **eleven**"
    page.locator("#documents-field").evaluate(DROP, ["c.txt", "twelve"])
    page.locator("#status", has_text="c.txt is added").wait_for(state="attached")
    assert page.locator("#documents").input_value().endswith("[c.txt]\ntwelve")
    page.locator("#documents-field").evaluate(DROP, ["d.bin", "\0"])
    page.locator("#notice:not([hidden])").wait_for()
    assert page.locator("#notice").text_content().startswith("d.bin: ")


# Drops a file on an element.
DROP = """(node, [name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  node.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_phone_and_can_be_read_in_both_schemes(opened: Callable[..., Any], scheme: str) -> None:
    page = opened(viewport={"width": 360, "height": 740}, color_scheme=scheme, reduced_motion="reduce")
    fill(page, "walk: <abc", 24)
    page.locator("#run").click()
    page.locator("#verdict[data-agree=true]").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    low = page.evaluate(CONTRASTS)
    assert low == []


CONTRASTS = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((byte) => byte / 255);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.matches(":disabled, :disabled *, noscript")) continue;
    const behind = [];
    for (let at = node; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const [a, b] = [light(paint([...behind, getComputedStyle(node).color])), light(paint(behind))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([node.tagName, node.className, node.textContent.slice(0, 20), ratio.toFixed(2)]);
  }
  return low;
}"""
