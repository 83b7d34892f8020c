"""Pages of the runs, the processes and the charts in a real browser, among a hundred thousand runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until
from selenium.webdriver.support.wait import WebDriverWait

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.web.application import create_app
from housekeeping.workers import configured_sweeps
from tests.acceptance.browser import chromium, looks, require_chromium, violations
from tests.integration.many_runs import RUNS, many_runs
from tests.integration.web.serving import serving_in_a_thread

pytestmark = pytest.mark.slow

PATIENCE_S = 30
PAGES = ("/runs", "/runs?outcome=nonsense", f"/runs/{RUNS - 1_000}", "/processes", "/charts?range=week")
FITS = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChromiumDriver]:
    require_chromium()
    with chromium(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def browser(one_browser: ChromiumDriver) -> ChromiumDriver:
    one_browser.get("about:blank")
    looks(one_browser, 1280, 900)
    one_browser.get_log("browser")
    return one_browser


@pytest.fixture
def wait(browser: ChromiumDriver) -> WebDriverWait[ChromiumDriver]:
    return WebDriverWait(browser, PATIENCE_S, poll_frequency=0.05)


@pytest.fixture
def dashboard(postgres: Database, settings: Settings, redis_client: redis.Redis) -> Iterator[str]:
    many_runs(postgres)
    with serving_in_a_thread(create_app(settings, configured_sweeps(settings), "a-token", open_to_read=True)) as port:
        yield f"http://127.0.0.1:{port}"


def first_run(browser: ChromiumDriver) -> str:
    return browser.find_element(By.CSS_SELECTOR, "#runs tbody a").text


def test_runs_are_filtered_paged_and_opened_by_keyboard(
    dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]
) -> None:
    browser.get(f"{dashboard}/runs")

    browser.find_element(By.NAME, "worker").send_keys("shop.worker_40", Keys.TAB)
    browser.switch_to.active_element.send_keys("failed")
    browser.find_element(By.CSS_SELECTOR, "#filter button").send_keys(Keys.ENTER)
    wait.until(until.url_contains("outcome=failed"))
    assert {each.text for each in browser.find_elements(By.CSS_SELECTOR, "#runs .outcome")} == {"failed"}
    browser.find_element(By.LINK_TEXT, "All runs").send_keys(Keys.ENTER)
    wait.until(lambda page: first_run(page).endswith(str(RUNS)))
    browser.find_element(By.LINK_TEXT, "Older runs").send_keys(Keys.ENTER)
    wait.until(lambda page: first_run(page).endswith(str(RUNS - 50)))
    browser.find_element(By.CSS_SELECTOR, "#runs tbody a").send_keys(Keys.ENTER)
    wait.until(until.title_contains(f"run {RUNS - 50}"))

    assert browser.get_log("browser") == []


def test_chart_is_one_tab_stop_and_arrow_keys_show_its_values(
    dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]
) -> None:
    browser.get(f"{dashboard}/charts?range=week")
    charts = wait.until(until.presence_of_all_elements_located((By.CSS_SELECTOR, "figure svg[role=slider]")))
    readout = browser.find_element(By.CSS_SELECTOR, "#chart-outcomes .readout")

    charts[0].send_keys(Keys.HOME)
    first = readout.text
    charts[0].send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    second = readout.text
    charts[0].send_keys(Keys.TAB)

    assert len(charts) == 4 and browser.switch_to.active_element == charts[1]
    assert charts[0].get_attribute("aria-valuenow") == "1" and charts[0].get_attribute("aria-valuetext") == second
    assert "done" in second and first != second and browser.get_log("browser") == []


def test_pointer_shows_the_values_of_a_bar(
    dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver]
) -> None:
    browser.get(f"{dashboard}/charts?range=week")
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "figure svg[role=slider]")))
    slot = browser.find_elements(By.CSS_SELECTOR, "#chart-rows .slot")[20]

    point = "const at = arguments[0].getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]"
    x, y = browser.execute_script(point, slot)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    title = slot.find_element(By.TAG_NAME, "title").get_attribute("textContent")
    wait.until(lambda page: page.find_element(By.CSS_SELECTOR, "#chart-rows .readout").text == title)


@pytest.mark.parametrize("path", PAGES)
def test_narrow_screen_hides_nothing(
    dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver], path: str
) -> None:
    looks(browser, 320, 640, phone=True)

    browser.get(f"{dashboard}{path}")

    assert wait.until(lambda page: page.execute_script(FITS))


@pytest.mark.parametrize("path", PAGES)
def test_page_breaks_no_accessibility_rule(
    dashboard: str, browser: ChromiumDriver, wait: WebDriverWait[ChromiumDriver], path: str
) -> None:
    found = {}
    for width, dark in itertools.product((320, 390, 1280), (False, True)):
        looks(browser, width, 800, dark=dark, phone=width < 500)
        browser.get(f"{dashboard}{path}")
        wait.until(lambda page: page.execute_script(FITS))
        found[width, dark] = violations(browser)

    assert {each: broken for each, broken in found.items() if broken} == {}
