from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support import expected_conditions as until
from selenium.webdriver.support.wait import WebDriverWait

from housekeeping.foundation.settings import Settings
from tests.acceptance.browser import chromium, require_chromium
from tests.acceptance.conftest import Command

WORKER = "user_status_cleanup.batch"
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def dashboard(made: None, environment: dict[str, str]) -> Iterator[str]:
    """The address of a real dashboard process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "web", "--port", "0"],
        env=environment | {"HOUSEKEEPING_WEB_TOKEN": TOKEN},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.match(r"(http://127\.0\.0\.1:\d+)/", line)
    assert found is not None, line
    yield found[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    process.stderr.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[WebDriver]:
    require_chromium()
    with chromium(tmp_path / "profile") as driver:
        yield driver


def text_of(browser: WebDriver, css: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, css).text


def test_a_failing_worker_is_seen_paused_and_resumed_by_keyboard(
    dashboard: str, browser: WebDriver, command: Command, admin: Connection, settings: Settings
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {settings.namespace}.user_statuses RENAME TO elsewhere")
    command("run", WORKER)
    wait = WebDriverWait(browser, 30)

    browser.get(f"{dashboard}/")
    assert "the last run ended as failed" in text_of(browser, "#alarms")

    browser.find_element(By.LINK_TEXT, "Log in").send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.NAME, "token"))).send_keys(TOKEN, Keys.ENTER)
    wait.until(until.presence_of_element_located((By.LINK_TEXT, WORKER))).send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.NAME, "reason"))).send_keys("table renamed", Keys.ENTER)
    wait.until(until.text_to_be_present_in_element((By.ID, "standing"), "paused"))
    assert ": table renamed (dashboard)" in text_of(browser, "#standing")
    assert "paused" in command("run", WORKER).stdout

    browser.find_element(By.XPATH, "//button[text()='Resume']").send_keys(Keys.ENTER)
    wait.until(until.presence_of_element_located((By.XPATH, "//button[text()='Pause']")))
    assert text_of(browser, "#standing .state") == "on"


def test_the_page_follows_what_happens_without_being_loaded_again(
    dashboard: str, browser: WebDriver, command: Command, add: Callable[[int], None]
) -> None:
    browser.get(f"{dashboard}/workers/{WORKER}")
    assert "it never ran" in text_of(browser, "#rows")

    add(3)
    command("run", WORKER)

    WebDriverWait(browser, 30).until(until.text_to_be_present_in_element((By.ID, "rows"), "deleted_rows 3"))
    assert isinstance(browser, ChromiumDriver) and browser.get_log("browser") == []


def test_nothing_of_a_narrow_screen_is_out_of_sight(dashboard: str, tmp_path: Path) -> None:
    require_chromium()
    with chromium(tmp_path / "phone", size=(390, 844)) as phone:
        for path in ("/", f"/workers/{WORKER}", "/login"):
            phone.get(f"{dashboard}{path}")
            wider = phone.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wider <= 0, path


def test_nothing_is_loaded_from_elsewhere(dashboard: str, browser: WebDriver) -> None:
    browser.get(f"{dashboard}/")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")

    assert loaded and all(address.startswith(dashboard) for address in loaded)
