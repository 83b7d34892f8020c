"""Dashboard during incidents, in a real browser: unavailable servers, an alert storm, an ended login."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
import redis
from psycopg2.extensions import connection as Connection
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until

from housekeeping import Settings
from tests.acceptance.browser import Wait, flaws, press
from tests.acceptance.test_dashboard import TOKEN, WORKER, text_of
from tests.acceptance.test_dashboard import browser as browser
from tests.acceptance.test_dashboard import dashboard as dashboard
from tests.acceptance.test_dashboard import logged_in as logged_in
from tests.acceptance.test_dashboard import one_browser as one_browser
from tests.acceptance.test_dashboard import wait as wait
from tests.faults import unavailable_database
from tests.integration.web.serving import serving_in_a_thread
from tests.internals.ledger import Run, override_of
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.slow

WORKERS: Final = 60


@pytest.fixture
def storm(made: None, settings: Settings, redis_client: redis.Redis) -> Iterator[str]:
    """Yield the address of a dashboard with 60 workers, each with several alerts."""
    sweep = configured_sweeps(settings)[WORKER]
    sweeps = {name: replace(sweep, name=name) for name in (f"shop.worker_{number}" for number in range(WORKERS))}
    at = datetime.now(UTC) - timedelta(hours=1)
    Run.insert_many(
        {"worker": name, "trigger": "schedule", "outcome": "failed", "reason": "gone", "counts": {"failed": 3}}
        | dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), at)
        for name in sweeps
    ).execute()
    with serving_in_a_thread(create_app(settings, sweeps, TOKEN, open_to_read=True)) as port:
        yield f"http://127.0.0.1:{port}"


def test_alert_storm_leaves_the_table_of_workers_on_the_screen(storm: str, browser: ChromiumDriver, wait: Wait) -> None:
    browser.get(f"{storm}/login")
    browser.find_element(By.NAME, "name").send_keys("kim")
    browser.find_element(By.NAME, "token").send_keys(TOKEN, Keys.ENTER)
    wait.until(until.presence_of_element_located((By.ID, "alert-failed_rows")))

    table = browser.find_element(By.ID, "workers")
    groups = browser.find_elements(By.CSS_SELECTOR, "#alerts details")
    assert len(groups) >= 4 and all(not each.get_attribute("open") for each in groups)
    assert table.rect["y"] + 40 < browser.execute_script("return innerHeight")

    group = browser.find_element(By.CSS_SELECTOR, "#alert-failed_rows summary")
    assert f"{WORKERS} workers" in group.text and "since" in group.text
    group.send_keys(Keys.ENTER)
    browser.find_element(By.CSS_SELECTOR, "#alert-failed_rows button").send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.ID, "alert-failed_rows-known")))
    assert "acknowledged by kim@127.0.0.1" in text_of(browser, "#alert-failed_rows-known")


def test_only_changed_alerts_are_announced_and_an_open_group_stays_open(
    storm: str, browser: ChromiumDriver, wait: Wait
) -> None:
    browser.get(f"{storm}/")
    press(wait, "#alert-failed_rows summary")
    before = said(browser)
    times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), datetime.now(UTC))
    run = {"trigger": "schedule", "outcome": "done", "counts": {"failed": 1}, **times}

    Run.create(worker="shop.worker_0", **run)
    wait.until(lambda page: said(page) != before)
    first = said(browser)
    Run.insert_many({"worker": f"shop.worker_{number}", **run} for number in range(1, WORKERS)).execute()
    wait.until(lambda page: "No longer" in said(page))

    assert first == "Alert overdue, now: 59 workers. Alert last_run, now: 59 workers"
    assert said(browser) == "No longer: overdue. No longer: last_run"
    assert browser.find_element(By.ID, "alert-failed_rows").get_attribute("open")


def said(browser: ChromiumDriver) -> str:
    return str(browser.find_element(By.ID, "changes-said").get_property("textContent"))


def test_unavailable_database_is_named_and_its_workers_stay_on_the_page(
    dashboard: str, browser: ChromiumDriver, wait: Wait
) -> None:
    browser.get(f"{dashboard}/")
    wait.until(until.text_to_be_present_in_element((By.ID, "workers"), WORKER))
    with unavailable_database():
        wait.until(until.text_to_be_present_in_element((By.ID, "alerts"), "PostgreSQL did not answer"))
        during = text_of(browser, "#errors"), text_of(browser, "#workers")
        browser.get(f"{dashboard}/workers/{WORKER}")
        page = text_of(browser, "main")
    browser.get(f"{dashboard}/")
    wait.until(until.invisibility_of_element_located((By.ID, "errors")))

    assert "the workers are shown as of" in during[0] and "Redis" not in during[0] and WORKER in during[1]
    assert "Schedule" in page


def test_locked_ledger_does_not_block_other_pages(
    dashboard: str, browser: ChromiumDriver, wait: Wait, admin: Connection, settings: Settings
) -> None:
    browser.get(f"{dashboard}/")
    admin.autocommit = False
    try:
        with admin.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {settings.schema_name}.runs")
            wait.until(until.text_to_be_present_in_element((By.ID, "alerts"), "lock timeout"))
            browser.find_element(By.LINK_TEXT, "Actions").send_keys(Keys.ENTER)
            wait.until(until.title_contains("actions"))
            browser.find_element(By.LINK_TEXT, "Dead letters").send_keys(Keys.ENTER)
            wait.until(until.title_contains("dead letters"))
    finally:
        admin.rollback()
        admin.autocommit = True


def test_unchanged_page_is_polled_for_less_than_10_kb(storm: str, browser: ChromiumDriver, wait: Wait) -> None:
    browser.get(f"{storm}/")
    wait.until(until.presence_of_element_located((By.ID, "alert-failed_rows")))
    polls = (
        "return performance.getEntriesByType('resource').filter((each) => each.initiatorType === 'fetch')"
        ".map((each) => [each.responseStatus, each.transferSize])"
    )

    found = wait.until(lambda page: [each for each in page.execute_script(polls) if each[0] == 304])

    assert all(size < 10_000 for _, size in found)


def test_pause_pressed_after_the_logout_leads_to_the_login_and_back(
    logged_in: str, browser: ChromiumDriver, wait: Wait
) -> None:
    browser.find_element(By.CSS_SELECTOR, "#pause [name=reason]").send_keys("peak")
    page = browser.current_url
    browser.execute_cdp_cmd("Network.clearBrowserCookies", {})
    browser.find_element(By.CSS_SELECTOR, "#pause [name=until]").send_keys("2h", Keys.ENTER)
    wait.until(until.presence_of_element_located((By.NAME, "token")))
    assert "was not carried out" in text_of(browser, ".said")

    browser.find_element(By.NAME, "name").send_keys("kim")
    browser.find_element(By.NAME, "token").send_keys(TOKEN, Keys.ENTER)
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#pause button")))

    assert browser.current_url.rstrip("?") == page and override_of(WORKER) is None


def test_confirmation_stays_through_refreshes_until_the_next_page(
    logged_in: str, browser: ChromiumDriver, wait: Wait
) -> None:
    press(wait, "#pause button")
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, ".said")))
    polls = "return performance.getEntriesByType('resource').filter((each) => each.initiatorType === 'fetch').length"
    wait.until(lambda page: page.execute_script(polls) >= 2)
    assert "is paused" in text_of(browser, ".said")

    press(wait, "nav a")
    wait.until(until.url_to_be(f"{logged_in}/"))
    assert browser.find_elements(By.CSS_SELECTOR, ".said") == []


def test_wrong_input_is_an_error_beside_its_field(logged_in: str, browser: ChromiumDriver, wait: Wait) -> None:
    browser.find_element(By.CSS_SELECTOR, "#pause [name=reason]").send_keys("peak")
    browser.find_element(By.CSS_SELECTOR, "#pause [name=until]").send_keys("soon", Keys.ENTER)
    wait.until(until.presence_of_element_located((By.ID, "error-until")))

    field = browser.find_element(By.CSS_SELECTOR, "#pause [name=until]")
    assert field.get_attribute("aria-describedby") == "error-until" and field.get_property("value") == "soon"
    assert browser.find_element(By.CSS_SELECTOR, "#pause [name=reason]").get_property("value") == "peak"
    field.clear()
    field.send_keys("2h", Keys.ENTER)
    wait.until(until.text_to_be_present_in_element((By.CSS_SELECTOR, ".said"), "peak"))


def test_no_page_of_an_incident_is_too_wide_breaks_a_word_or_an_accessibility_rule(
    storm: str, browser: ChromiumDriver, wait: Wait
) -> None:
    found = {"login": flaws(browser, wait, f"{storm}/login")}
    browser.find_element(By.NAME, "name").send_keys("kim")
    browser.find_element(By.NAME, "token").send_keys(TOKEN, Keys.ENTER)
    wait.until(until.presence_of_element_located((By.ID, "alert-failed_rows")))
    browser.execute_script("document.querySelectorAll('details').forEach((each) => each.open = true)")
    found["front"] = flaws(browser, wait)
    browser.get(f"{storm}/workers/shop.worker_1")
    browser.find_element(By.CSS_SELECTOR, "#pause [name=until]").send_keys("soon", Keys.ENTER)
    wait.until(until.presence_of_element_located((By.ID, "error-until")))
    found["wrong input"] = flaws(browser, wait)
    field = browser.find_element(By.CSS_SELECTOR, "#pause [name=until]")
    field.clear()
    field.send_keys("2h", Keys.ENTER)
    wait.until(until.presence_of_element_located((By.CSS_SELECTOR, ".said")))
    found["confirmation"] = flaws(browser, wait)
    found["actions"] = flaws(browser, wait, f"{storm}/actions")

    assert found == dict.fromkeys(found, [])
