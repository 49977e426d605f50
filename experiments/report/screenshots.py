"""Pictures of the playground for ``docs/``: a race of the demo model in a headless browser, on a desktop and on a phone.

``python -m experiments.report.screenshots`` starts a server itself; ``--url URL`` takes a server that runs. It needs Chromium
or Chrome on the path, and looks best with the fonts Inter and JetBrains Mono installed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from outrider.experiments.bench.record import ROOT
from outrider.experiments.service.served import server_at

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
STRATEGIES = "llma,trie,ngrammys,jacobi,suffix,recycling,prompt_lookup"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
_TIMEOUT_MS = 120_000


def browser_path() -> str | None:
    """The first browser on the path that can be driven; None where there is none."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def race(page: Page, url: str, sample: str) -> None:
    """Opens the page, has the server forget past answers, chooses a sample and lets its lanes run to the end."""
    page.goto(url)
    page.locator("#strategies .chip").first.wait_for(timeout=_TIMEOUT_MS)
    page.locator("#forget:enabled").click(timeout=_TIMEOUT_MS)
    page.locator("#memory", has_text=": 0 answers").wait_for(timeout=_TIMEOUT_MS)
    page.get_by_role("button", name=sample).click()
    page.locator("#run").click()
    page.locator("#verdict[data-agree]").wait_for(timeout=_TIMEOUT_MS)
    page.wait_for_function("document.getElementById('memory').textContent.includes('Tenant')", timeout=_TIMEOUT_MS)


def take(browser: Browser, url: str, sample: str, out: Path) -> list[Path]:
    """A picture for each size and colour scheme."""
    with contextlib.closing(browser.new_page()) as page:
        race(page, url, sample)  # what a first request sets up is no part of the pictures
    taken = []
    for name, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
                device_scale_factor=1 if name == "desktop" else 2,
                is_mobile=name == "phone",
                has_touch=name == "phone",
            )
            with contextlib.closing(context):
                page = context.new_page()
                race(page, url, sample)
                if name == "phone":  # where the form is above the race
                    page.locator("#verdict").evaluate("node => scrollTo(0, scrollY + node.getBoundingClientRect().top - 12)")
                path = out / f"playground-{name}-{scheme}.png"
                page.screenshot(path=path)
                taken.append(path)
    return taken


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs; one is started when absent")
    parser.add_argument("--sample", default="Rename a function", help="of the page's samples")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    arguments = parser.parse_args()
    path = browser_path()
    if path is None:
        parser.error(f"no browser on the path: install one of {', '.join(BROWSERS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        settings = [f"speculation.strategies=[{STRATEGIES}]", "tenancy.anonymous=local"]
        url = stack.enter_context(server_at(arguments.url, "demo_model", settings))
        playwright = stack.enter_context(sync_playwright())
        browser = stack.enter_context(contextlib.closing(playwright.chromium.launch(executable_path=path, args=ARGUMENTS)))
        for picture in take(browser, url, arguments.sample, arguments.out):
            print(f"{picture}  {picture.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
