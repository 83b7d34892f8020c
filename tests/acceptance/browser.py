"""Headless browser, for tests and for the pictures in the documentation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until
from selenium.webdriver.support.wait import WebDriverWait

Wait = WebDriverWait[ChromiumDriver]
_PATIENCE_S: Final = 90
#: Width in px of a phone, a tablet and a laptop, and whether the page is dark; None if only its words are looked at.
_SCREENS: Final = ((320, False), (320, True), (768, None), (1440, False), (1440, True))
#: Script that returns whether the page has this width in px and color scheme, and nothing wider. Wait for it: the
#: browser applies what it emulates shortly after the command.
_FITS: Final = """
const { clientWidth, scrollWidth } = document.documentElement;
return clientWidth === arguments[0] && scrollWidth <= clientWidth
  && matchMedia("(prefers-color-scheme: dark)").matches === arguments[1];
"""

#: Script that returns the words of the page that are broken in the middle, each with its text.
_BROKEN_WORDS: Final = r"""
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const range = document.createRange();
const broken = [];
for (let text = texts.nextNode(); text; text = texts.nextNode()) {
  if (!text.parentElement.checkVisibility() || text.parentElement.closest("script, option, svg")) continue;
  for (const { 0: word, index } of text.data.matchAll(/[\p{L}\p{N}]+/gu)) {
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    const lines = new Set([...range.getClientRects()].filter(({ width }) => width).map(({ top }) => Math.round(top)));
    if (lines.size > 1) broken.push(`${word} in ${text.data.trim()}`);
  }
}
return broken;
"""


@contextmanager
def chromium(profile: Path) -> Iterator[ChromiumDriver]:
    """Yield headless Chromium without background network traffic."""
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",  # useless as root, and refused
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--window-size=1200,900",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(_PATIENCE_S)
    try:
        yield driver
    finally:
        driver.quit()


def looks(driver: ChromiumDriver, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
    """Emulate this color scheme and this screen size in px."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def require_chromium() -> None:
    """Skip the test without a browser, or fail it where a browser is required."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    if os.getenv("HOUSEKEEPING_TEST_REQUIRE_CHROMIUM"):
        pytest.fail("chromium and chromedriver are not installed")
    pytest.skip("chromium and chromedriver are not installed")


def press(wait: Wait, css: str) -> None:
    """Press Enter on an element."""
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, css))).send_keys(Keys.ENTER)


def flaws(driver: ChromiumDriver, wait: Wait, address: str | None = None) -> list[str]:
    """Return the words and the accessibility rules that a page breaks on each screen, the latter in light and in dark.

    The page is the open one without an address. It must be no wider than each screen.
    """
    if address is not None:
        driver.get(address)
    script = (resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    # As the browser's own command, because the page's policy allows no other scripts.
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": script})
    found = []
    for width, dark in _SCREENS:
        looks(driver, width, 800, dark=bool(dark), phone=width < 500)
        screen = f"{width} px, {'dark' if dark else 'light'}"
        wait.until(partial(_fits, width, bool(dark)), f"{address or driver.current_url} is wider than {screen}")
        flawed = driver.execute_script(_BROKEN_WORDS) if not dark else []
        if dark is not None:
            flawed += _broken_rules(driver, **({"runOnly": ["color-contrast"]} if dark else {}))
        found += [f"{screen}: {each}" for each in flawed]
    return found


def _fits(width: int, dark: bool, driver: ChromiumDriver) -> bool:
    return bool(driver.execute_script(_FITS, width, dark))


def _broken_rules(driver: ChromiumDriver, **options: list[str]) -> list[str]:
    """Return the accessibility rules that the page breaks, each with an element."""
    found: list[str] = driver.execute_async_script(
        "const [options, done] = arguments;"
        "axe.run({ ...options, resultTypes: ['violations'] }).then((result) =>"
        " done(result.violations.map((each) => `${each.id}: ${each.nodes[0].html}`)))",
        options,
    )
    return found
