"""Page mount-the-page.md of docs/howto, followed step by step in FastAPI and Flask, in a real browser."""

from __future__ import annotations

import pytest
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support import expected_conditions as until

from tests.acceptance.browser import Wait, press
from tests.acceptance.pages import in_a_shell
from tests.acceptance.test_dashboard import browser as browser
from tests.acceptance.test_dashboard import one_browser as one_browser
from tests.acceptance.test_dashboard import text_of
from tests.acceptance.test_dashboard import wait as wait
from tests.acceptance.test_own_sweep_pages import Reader
from tests.acceptance.test_own_sweep_pages import reader as own_sweep_reader
from tests.acceptance.test_own_sweep_pages import warehouse as warehouse
from tests.internals.ledger import logged_actions

pytestmark = pytest.mark.slow

reader = own_sweep_reader

WORKER = "housekeeping.old_runs"


@pytest.mark.parametrize(
    ("other", "login"), [("Flask", "login?name="), ("FastAPI", "login/")], ids=["FastAPI", "Flask"]
)
def test_mounted_page_works_behind_the_login_of_the_application(
    reader: Reader, browser: ChromiumDriver, wait: Wait, other: str, login: str
) -> None:
    with reader:
        reader.read("mount-the-page", without=other)
        page = f"{reader.address}ops/housekeeping/"

        browser.get(page)
        assert "you are not logged in to the application" in text_of(browser, "main")
        browser.get(f"{reader.address}{login}eve")
        browser.get(f"{page}workers/{WORKER}")
        assert "You do not have permission to pause, narrow or resume it." in text_of(browser, "main")
        browser.get(f"{reader.address}{login}kim")
        browser.get_log("browser")
        browser.get(page.rstrip("/"))
        press(wait, f"[id='worker-{WORKER}'] th a")
        wait.until(until.presence_of_element_located((By.CSS_SELECTOR, "#pause [name=reason]"))).send_keys("peak")
        browser.find_element(By.CSS_SELECTOR, "#pause [name=reason]").send_keys(Keys.ENTER)
        wait.until(until.text_to_be_present_in_element((By.CSS_SELECTOR, ".said"), "paused"))
        in_a_shell(f"housekeeping resume {WORKER}", reader.environment, reader.folder)
        wait.until(until.invisibility_of_element_located((By.ID, "resume")))  # refreshed by its script

        assert browser.current_url == f"{page}workers/{WORKER}" and browser.get_log("browser") == []
        assert [cookie["path"] for cookie in browser.get_cookies() if cookie["name"] == "housekeeping"] == [
            "/ops/housekeeping/"
        ]
    (_, paused) = logged_actions(2)
    assert (paused.user, paused.action, paused.target) == ("kim@127.0.0.1", "pause", WORKER)
