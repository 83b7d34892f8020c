"""Command that takes the screenshots in docs/images from the demo, after it has run for some minutes.

From the project's top folder: ``python -m docs.screenshots``. It takes Chromium with its driver, and the extra ``dev``.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

from selenium.webdriver.chromium.webdriver import ChromiumDriver

from housekeeping.database.queries import database_now
from housekeeping.demo.demo import Stage, dashboard, send_each_once, stage
from housekeeping.demo.scenes import SCENES, others_at_work
from housekeeping.ledger.operators import Override, switch
from housekeeping.ledger.schema import Run
from tests.acceptance.browser import chromium, looks

IMAGES: Final = Path(__file__).parent / "images"
SHOWN: Final = "user_status_cleanup.batch"
#: Ended runs of the shown worker, which runs every minute.
RUNS: Final = 4
_POLL_S: Final = 1.0


def main() -> None:
    with stage() as ready:
        for scene in SCENES:
            scene.seed(ready.servers.folder)
        with (
            others_at_work(ready.servers.database_url),
            ready.processes() as processes,
            dashboard(ready, secrets.token_urlsafe()) as address,
        ):
            send_each_once(ready)
            while _ended() < RUNS:
                ready.check(processes)
                time.sleep(_POLL_S)
            until = database_now() + timedelta(hours=2)
            switch(Override(SHOWN, "paused", "migration of user_statuses", until, said_by="kim@ops-1"))
            _take_all(ready, address)


def _ended() -> int:
    return int(Run.select().where((Run.worker == SHOWN) & Run.outcome.in_(("done", "partial"))).count())


def _take_all(ready: Stage, address: str) -> None:
    with chromium(ready.servers.folder / "profile") as browser:
        take(browser, address, "light", width=1200, height=780)
        take(browser, f"{address}workers/{SHOWN}", "dark", width=1200, height=780, dark=True)
        take(browser, f"{address}workers/{SHOWN}/plan", "plan", width=1200, height=780)
        take(browser, f"{address}charts?range=hour", "charts", width=1200, height=900, dark=True)
        take(browser, address, "phone", width=390, height=844, phone=True)


def take(
    browser: ChromiumDriver,
    address: str,
    name: str,
    *,
    width: int,
    height: int,
    dark: bool = False,
    phone: bool = False,
) -> None:
    looks(browser, width, height, dark=dark, phone=phone)
    browser.get(address)
    browser.save_screenshot(str(IMAGES / f"dashboard-{name}.png"))


if __name__ == "__main__":
    main()
