"""Plan then run, many dead letters and many workers, in a real browser and by keyboard alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from dramatiq import Message
from dramatiq.common import current_millis
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until

from housekeeping import Settings
from tests.acceptance.browser import Wait, flaws, press
from tests.acceptance.test_dashboard import TOKEN, WORKER, focused, text_of
from tests.acceptance.test_dashboard import browser as browser
from tests.acceptance.test_dashboard import dashboard as dashboard
from tests.acceptance.test_dashboard import logged_in as logged_in
from tests.acceptance.test_dashboard import one_browser as one_browser
from tests.acceptance.test_dashboard import wait as wait
from tests.integration.middleware.step_worker import StepWorker, close
from tests.integration.web.serving import serving_in_a_thread
from tests.internals.app import broker_without_database
from tests.internals.ledger import Override, operators
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

pytestmark = pytest.mark.slow


@pytest.fixture
def broker_url() -> None:
    """Return a Redis broker's URL, with any ``--broker``."""


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    broker = broker_without_database(settings, {WORKER: configured_sweeps(settings)[WORKER]})
    yield broker
    close(broker)


def test_worker_is_planned_and_run_by_keyboard(
    logged_in: str, browser: ChromiumDriver, wait: Wait, add: Callable[[int], None], broker: Any
) -> None:
    add(3)
    press(wait, "#plan button")
    wait.until(until.title_contains("plan of"))
    planned = text_of(browser, "#summary")
    press(wait, "#run-now button")
    wait.until(until.text_to_be_present_in_element((By.TAG_NAME, "h1"), "now?"))
    press(wait, "main button.danger")
    wait.until(until.text_to_be_present_in_element((By.ID, "state"), "No run of this message has begun."))

    StepWorker(broker, queue_of(broker)).run()
    press(wait, "#runs th a")  # appears by itself
    wait.until(until.title_contains("run "))

    assert "Stale rows\n3" in planned and "deleted_rows" in text_of(browser, "main")


def queue_of(broker: Any) -> str:
    queue: str = broker.get_actor(WORKER).queue_name
    return queue


@pytest.fixture
def letters(broker: Any) -> Any:
    for number in range(60):
        message: Message[Any] = Message("cronjob", "charge", (number,), {}, {"traceback": "ValueError: timed out"})
        key = f"{broker.namespace}:cronjob.XQ"
        broker.client.zadd(key, {f"letter-{number}": current_millis() - 1000 * number})
        broker.client.hset(f"{key}.msgs", f"letter-{number}", message.encode())
    return broker


def test_filtered_dead_letters_are_deleted_by_keyboard(
    letters: Any, logged_in: str, browser: ChromiumDriver, wait: Wait
) -> None:
    browser.get(f"{logged_in}/dead-letters")
    browser.find_element(By.NAME, "error").send_keys("TIMED", Keys.ENTER)
    wait.until(until.url_contains("error=TIMED"))
    for box in browser.find_elements(By.CSS_SELECTOR, "#letters input")[:2]:
        box.send_keys(Keys.SPACE)
    press(wait, "#selection button.danger")
    wait.until(until.text_to_be_present_in_element((By.TAG_NAME, "h1"), "Delete 2 dead letters?"))
    press(wait, "main button.danger")
    wait.until(until.text_to_be_present_in_element((By.CSS_SELECTOR, ".said"), "2 deleted"))

    assert "error=TIMED" in browser.current_url and "58 in total" in text_of(browser, "main")


@pytest.fixture
def many_workers(made: None, settings: Settings, redis_client: redis.Redis) -> Iterator[str]:
    """Yield the address of a dashboard with 60 workers."""
    sweep = configured_sweeps(settings)[WORKER]
    names = [f"{family}.job_{number:02}" for number in range(15) for family in ("mail", "carts", "ci", "audit")]
    sweeps = {name: replace(sweep, name=name) for name in names}
    with serving_in_a_thread(create_app(settings, sweeps, TOKEN, open_to_read=True)) as port:
        yield f"http://127.0.0.1:{port}"


def test_live_updates_keep_search_order_and_an_open_form(
    many_workers: str, browser: ChromiumDriver, wait: Wait
) -> None:
    browser.get(many_workers)
    browser.find_element(By.NAME, "q").send_keys("job_0", Keys.ENTER)
    wait.until(until.url_contains("q=job_0"))
    browser.find_element(By.LINK_TEXT, "Worker").send_keys(Keys.ENTER)
    wait.until(until.url_contains("sort=name"))
    search = browser.find_element(By.NAME, "q")
    search.send_keys("7")

    operators.switch(Override("audit.job_00", "paused"))
    wait.until(until.text_to_be_present_in_element((By.ID, "worker-audit.job_00"), "paused"))

    rows = browser.find_elements(By.CSS_SELECTOR, "#workers tbody th")
    assert (len(rows), rows[0].text, rows[-1].text) == (40, "audit.job_00", "mail.job_09")
    assert "20 workers of 60 not found by the search." in text_of(browser, "#hidden")
    assert focused(browser) == search and search.get_property("value") == "job_07"


def test_no_page_of_many_is_too_wide_breaks_a_word_or_an_accessibility_rule(
    many_workers: str, letters: Any, browser: ChromiumDriver, wait: Wait
) -> None:
    pages = ("/", "/?q=mail&sort=backlog", "/dead-letters?actor=charge&since=soon")

    found = {page: flaws(browser, wait, f"{many_workers}{page}") for page in pages}

    assert found == dict.fromkeys(pages, [])


def test_no_page_of_a_change_is_too_wide_breaks_a_word_or_an_accessibility_rule(
    letters: Any, logged_in: str, browser: ChromiumDriver, wait: Wait
) -> None:
    pages = (f"/workers/{WORKER}/message?id=5f0c2a9e-1f0a-4a43-a7d9-0d7c1f0c2a9e", "/dead-letters/all/delete?all=1")

    found = {page: flaws(browser, wait, f"{logged_in}{page}") for page in pages}

    assert found == dict.fromkeys(pages, [])
