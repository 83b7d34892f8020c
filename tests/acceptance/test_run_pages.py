"""Pages of the runs, the processes and the charts in a real browser, among ten thousand runs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import redis
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until

from housekeeping import Settings
from tests.acceptance.browser import Wait, flaws
from tests.acceptance.test_dashboard import browser as browser
from tests.acceptance.test_dashboard import one_browser as one_browser
from tests.acceptance.test_dashboard import wait as wait
from tests.integration.many_runs import many_runs
from tests.integration.web.serving import serving_in_a_thread
from tests.internals.database import Database
from tests.internals.ledger import Run
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.slow

RUNS = 10_000
PAGES = ("/runs", "/runs?outcome=nonsense", f"/runs/{RUNS - 1_000}", "/processes", "/charts?range=week")


@pytest.fixture
def dashboard(postgres: Database, settings: Settings, redis_client: redis.Redis) -> Iterator[str]:
    many_runs(postgres, runs=RUNS)
    with serving_in_a_thread(create_app(settings, configured_sweeps(settings), "a-token", open_to_read=True)) as port:
        yield f"http://127.0.0.1:{port}"


def first_run(browser: ChromiumDriver) -> str:
    return browser.find_element(By.CSS_SELECTOR, "#runs tbody a").text


def test_runs_are_filtered_paged_and_opened_by_keyboard(dashboard: str, browser: ChromiumDriver, wait: Wait) -> None:
    browser.get(f"{dashboard}/runs")

    browser.find_element(By.NAME, "worker").send_keys("shop.worker_40", Keys.TAB)
    browser.switch_to.active_element.send_keys("failed")
    browser.find_element(By.CSS_SELECTOR, "#filter button").send_keys(Keys.ENTER)
    wait.until(until.url_contains("outcome=failed"))
    assert {each.text for each in browser.find_elements(By.CSS_SELECTOR, "#runs .outcome")} == {"failed"}
    browser.find_element(By.LINK_TEXT, "Show all").send_keys(Keys.ENTER)
    wait.until(lambda page: first_run(page).endswith(str(RUNS)))
    browser.find_element(By.LINK_TEXT, "Older").send_keys(Keys.ENTER)
    wait.until(lambda page: first_run(page).endswith(str(RUNS - 50)))
    browser.find_element(By.CSS_SELECTOR, "#runs tbody a").send_keys(Keys.ENTER)
    wait.until(until.title_contains(f"run {RUNS - 50}"))

    assert browser.get_log("browser") == []


def test_chart_is_one_tab_stop_and_arrow_keys_show_its_values(
    dashboard: str, browser: ChromiumDriver, wait: Wait
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


def test_pointer_shows_the_values_of_a_bar(dashboard: str, browser: ChromiumDriver, wait: Wait) -> None:
    browser.get(f"{dashboard}/charts?range=week")
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "figure svg[role=slider]")))
    slot = browser.find_elements(By.CSS_SELECTOR, "#chart-rows .slot")[20]

    point = "const at = arguments[0].getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]"
    x, y = browser.execute_script(point, slot)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    title = slot.find_element(By.TAG_NAME, "title").get_attribute("textContent")
    wait.until(lambda page: page.find_element(By.CSS_SELECTOR, "#chart-rows .readout").text == title)


def test_refreshed_chart_keeps_its_focus_and_chosen_interval(
    dashboard: str, browser: ChromiumDriver, wait: Wait
) -> None:
    browser.get(f"{dashboard}/charts?range=hour")
    chart = wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#chart-outcomes svg[role=slider]")))
    chart.send_keys(Keys.HOME, Keys.PAGE_UP)  # the first interval leaves the chart when a minute ends
    chosen = chart.get_attribute("aria-valuetext")

    now = datetime.now(UTC)
    Run.create(worker="a", trigger="cli", outcome="missed", started_at=now, heartbeat_at=now, finished_at=now)
    chart_text = "return arguments[0].textContent"
    wait.until(lambda page: "1 missed" in page.execute_script(chart_text, chart))

    assert browser.switch_to.active_element == chart and chart.get_attribute("aria-valuetext") == chosen
    assert chart.find_element(By.CSS_SELECTOR, ".chosen title").get_attribute("textContent") == chosen
    assert browser.get_log("browser") == []


def test_no_page_is_too_wide_breaks_a_word_or_an_accessibility_rule(
    dashboard: str, browser: ChromiumDriver, wait: Wait
) -> None:
    names = {"worker": "batched_git_ref_updates.cleanup_scheduler", "host": "background-worker-17", "pid": 4_194_304}
    begun = dict.fromkeys(("tick", "started_at", "heartbeat_at", "finished_at"), datetime.now(UTC))
    counts = {"total_pending_entries": 4_031, "total_deleted_objects": 4_028, "timed_out_trackers": 10_360}
    Run.create(trigger="schedule", outcome="done", counts=counts, **names, **begun)
    request = {"purge": {"table": "sessions", "where": "expires_at < now() AND " * 20}}
    purge = Run.create(worker="purge:sessions", trigger="cli", outcome="done", counts=request, **begun)
    pages = [*PAGES, f"/runs/{purge.id}"]

    found = {page: flaws(browser, wait, f"{dashboard}{page}") for page in pages}

    assert found == dict.fromkeys(pages, [])
