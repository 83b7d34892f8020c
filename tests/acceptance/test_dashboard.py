"""Dashboard in a real browser, served by a real process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
import redis
from psycopg2.extensions import connection as Connection
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support import expected_conditions as until
from selenium.webdriver.support.wait import WebDriverWait

from housekeeping import ExclusiveLease, Settings, run_sweep
from tests.acceptance.browser import chromium, flaws, looks, require_chromium
from tests.acceptance.conftest import Command
from tests.integration.web.serving import serving_in_a_thread
from tests.internals.ledger import Override, operators
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.slow

WORKER: Final = "user_status_cleanup.batch"
TOKEN: Final = "a-token-of-the-tests"
PATIENCE_S: Final = 90
PAGES: Final = (
    *("/", f"/workers/{WORKER}", f"/workers/{WORKER}/plan", f"/workers/{WORKER}/run?rows=3&exact=1", "/runs/1"),
    *("/alerts", "/dead-letters", "/database", "/errors", "/actions", "/all/pause", "/all/resume"),
)


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChromiumDriver]:
    require_chromium()
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def browser(one_browser: ChromiumDriver) -> ChromiumDriver:
    """Return the shared browser in its initial state."""
    one_browser.get("about:blank")
    one_browser.execute_cdp_cmd("Network.clearBrowserCookies", {})
    looks(one_browser, 1200, 900)
    one_browser.get_log("browser")
    return one_browser


@pytest.fixture
def wait(browser: ChromiumDriver) -> WebDriverWait[ChromiumDriver]:
    return WebDriverWait(browser, PATIENCE_S, poll_frequency=0.05)


@contextmanager
def serving(environment: dict[str, str], port: int = 0, folder: Path | None = None) -> Iterator[str]:
    """Yield the address of a real dashboard process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "web", "--port", str(port)],
        env={"HOUSEKEEPING_WEB_OPEN_TO_READ": "true"} | environment | {"HOUSEKEEPING_WEB_TOKEN": TOKEN},
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+)/", line)
        assert found is not None, line
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(PATIENCE_S)
        process.stderr.close()
    assert status == 0


@pytest.fixture
def dashboard(made: None, settings: Settings, redis_client: redis.Redis) -> Iterator[str]:
    """Yield the address of a dashboard in this process, which starts faster than `process`."""
    only = {WORKER: configured_sweeps(settings)[WORKER]}
    with serving_in_a_thread(create_app(settings, only, TOKEN, open_to_read=True)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def process(made: None, environment: dict[str, str]) -> Iterator[str]:
    """Yield the address of a dashboard process started like an operator's."""
    with serving(environment) as address:
        yield address


@pytest.fixture
def logged_in(dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]) -> str:
    """Log in and open the worker's page."""
    browser.get(f"{dashboard}/login?next=/workers/{WORKER}")
    browser.find_element(By.NAME, "name").send_keys("kim")
    browser.find_element(By.NAME, "token").send_keys(TOKEN, Keys.ENTER)
    wait.until(until.presence_of_element_located((By.ID, "pause")))
    return dashboard


def text_of(browser: ChromiumDriver, css: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, css).text


def focused(browser: ChromiumDriver) -> WebElement:
    return browser.switch_to.active_element


def test_failing_worker_is_paused_and_resumed_by_keyboard(
    process: str,
    browser: ChromiumDriver,
    wait: WebDriverWait[ChromiumDriver],
    command: Command,
    admin: Connection,
    settings: Settings,
) -> None:
    command("run", WORKER)  # Its table existed before, so its absence is an error.
    with admin.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {settings.namespace}.user_statuses RENAME TO elsewhere")
    command("run", WORKER)

    browser.get(f"{process}/")
    assert "housekeeping doctor shows what is missing" in text_of(browser, "#alerts")

    browser.find_element(By.LINK_TEXT, "Log in").send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.NAME, "name"))).send_keys("kim", Keys.TAB)
    focused(browser).send_keys(TOKEN, Keys.ENTER)
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#workers tbody th a"))).send_keys(Keys.ENTER)
    reason = wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#pause [name=reason]")))
    reason.send_keys("table renamed", Keys.ENTER)
    wait.until(until.text_to_be_present_in_element((By.ID, "status"), "paused"))
    assert ": table renamed (kim@127.0.0.1)" in text_of(browser, "#status")
    assert "paused" in command("run", WORKER).stdout

    browser.find_element(By.XPATH, "//button[text()='Resume']").send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.XPATH, "//button[text()='Pause']")))
    assert text_of(browser, "#status .state") == "on"


def test_first_tab_stop_skips_the_heading_and_each_stop_is_visible(dashboard: str, browser: ChromiumDriver) -> None:
    browser.get(f"{dashboard}/")

    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    skip = focused(browser)
    shown = skip.text, skip.rect["x"] >= 0, skip.value_of_css_property("outline-style")
    skip.send_keys(Keys.ENTER)

    assert shown == ("Skip to content", True, "solid")
    assert focused(browser).get_attribute("id") == "main"


def test_page_refresh_keeps_focus_scroll_position_and_input(
    logged_in: str,
    browser: ChromiumDriver,
    wait: WebDriverWait[ChromiumDriver],
    command: Command,
    add: Callable[[int], None],
) -> None:
    command("run", WORKER)
    looks(browser, 390, 500, phone=True)
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#rows th a")))
    browser.find_element(By.CSS_SELECTOR, "#pause [name=reason]").send_keys("half a sen")
    first = browser.find_element(By.CSS_SELECTOR, "#rows th a")
    leads_to = first.get_attribute("href")
    browser.execute_script("arguments[0].focus(); window.scrollTo(0, 400)", first)

    add(3)
    command("run", WORKER)
    wait.until(until.text_to_be_present_in_element((By.ID, "rows"), "deleted_rows 3"))

    assert focused(browser) == first and first.get_attribute("href") == leads_to
    assert browser.execute_script("return window.scrollY") >= 400
    typed = browser.find_element(By.CSS_SELECTOR, "#pause [name=reason]").get_property("value")
    assert typed == "half a sen" and browser.get_log("browser") == []


@pytest.mark.parametrize(
    ("use", "typed"), [("arguments[0].focus()", ""), ("arguments[0].value = 'peak'", "peak")], ids=["focus", "text"]
)
def test_concurrent_pause_is_shown_and_keeps_an_open_form(
    logged_in: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver], use: str, typed: str
) -> None:
    reason = browser.find_element(By.CSS_SELECTOR, "#narrow [name=reason]")
    browser.execute_script(use, reason)
    before = focused(browser)

    operators.switch(Override(WORKER, "paused", said_by="kim"))
    wait.until(until.text_to_be_present_in_element((By.ID, "status"), "paused"))

    assert [each.get_attribute("id") for each in browser.find_elements(By.CSS_SELECTOR, ".forms form")] == [
        "plan",
        "resume",
        "narrow",
    ]
    assert focused(browser) == before and reason.get_property("value") == typed


def test_server_outage_and_return_are_shown(
    made: None, environment: dict[str, str], browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]
) -> None:
    with serving(environment) as address:
        browser.get(f"{address}/")
        assert text_of(browser, "#answers") == ""
    wait.until(until.text_to_be_present_in_element((By.ID, "answers"), "The dashboard does not answer."))
    assert "This page shows the state of" in text_of(browser, "#answers") and WORKER in text_of(browser, "#workers")

    with serving(environment, int(address.rpartition(":")[2])):
        wait.until(lambda driver: text_of(browser, "#answers") == "")


@pytest.fixture
def held(made: None, redis_client: redis.Redis) -> ExclusiveLease:
    """Hold a lease in this process."""
    lease = ExclusiveLease("reports/<b>nightly</b>", timedelta(minutes=10), worker="reports")
    assert lease.try_obtain() is not None
    return lease


def test_lease_of_a_hanging_run_is_released(
    held: ExclusiveLease, logged_in: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]
) -> None:
    browser.get(f"{logged_in}/")
    wait.until(until.presence_of_element_located((By.LINK_TEXT, "Release…"))).send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "button.danger"))).send_keys(Keys.ENTER)
    wait.until(until.text_to_be_present_in_element((By.CSS_SELECTOR, ".said"), "was released"))

    assert not held.exists() and "no leases are held" in text_of(browser, "#leases")


def test_no_page_is_too_wide_breaks_a_word_or_an_accessibility_rule(
    logged_in: str,
    browser: ChromiumDriver,
    wait: WebDriverWait[ChromiumDriver],
    command: Command,
    add: Callable[[int], None],
) -> None:
    add(3)
    command("run", WORKER)
    command("pause", WORKER, "--reason", "a migration of the table of user statuses")

    found = {page: flaws(browser, wait, f"{logged_in}{page}") for page in PAGES}

    assert found == dict.fromkeys(PAGES, [])


def test_bars_of_fifty_runs_stay_in_their_column(
    dashboard: str, browser: ChromiumDriver, settings: Settings, wait: WebDriverWait[ChromiumDriver]
) -> None:
    sweep = configured_sweeps(settings)[WORKER]
    for _ in range(50):
        run_sweep(sweep)

    browser.get(f"{dashboard}/")

    bars = wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "td.drawn .chart")))
    cell = bars.find_element(By.XPATH, "..")
    assert len(bars.find_elements(By.CSS_SELECTOR, ".bar")) == 50
    assert bars.rect["width"] <= cell.rect["width"]


def test_dark_color_scheme_is_followed(dashboard: str, browser: ChromiumDriver) -> None:
    browser.get(f"{dashboard}/")
    grounds = []
    for dark in (False, True):
        looks(browser, 1200, 900, dark=dark)
        grounds.append(browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))

    assert grounds == ["rgba(255, 255, 255, 1)", "rgba(18, 21, 23, 1)"]


def test_no_resource_is_loaded_from_other_hosts(
    dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]
) -> None:
    browser.get(f"{dashboard}/")
    # The browser lists a resource shortly after the page's load event.
    entries = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    loaded = wait.until(lambda page: page.execute_script(entries))

    assert all(address.startswith(dashboard) for address in loaded)
    assert browser.get_log("browser") == []
