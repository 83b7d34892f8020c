"""Command that takes the screenshots in docs/images, with real servers and sample data.

From the project's top folder: ``python -m docs.screenshots``. It takes Chromium with its driver, and the extra ``dev``.
"""

from __future__ import annotations

import random
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import dramatiq
from selenium.webdriver.chromium.webdriver import ChromiumDriver

from housekeeping import embedded
from housekeeping.brokers import message_broker
from housekeeping.core.cron import Cron
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.installation import install
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.overrides import Override, switch
from housekeeping.sweeps.ledger.schema import use_database
from housekeeping.web.application import create_app
from housekeeping.workers import BUILT_IN, configured_sweeps
from tests.acceptance.browser import chromium, looks
from tests.integration.web.serving import serving_in_a_thread

IMAGES: Final = Path(__file__).parent / "images"
PAUSED: Final = "ci.stuck_builds.drop_canceling"
FAILING: Final = "bulk_imports.stale_import"
GROWING: Final = "user_status_cleanup.batch"
RUNS: Final = 50
NOW: Final = datetime.now(UTC)


def main() -> None:
    with embedded.start() as servers, tempfile.TemporaryDirectory() as folder:
        settings = Settings.load(
            database_url=servers.database_url, redis_url=servers.redis_url, repositories_root=folder, namespace="shown"
        )
        sweeps = configured_sweeps(settings)
        use_database(settings)
        schema.init()
        database.create_tables([model for module in BUILT_IN for model in module.MODELS.values()])
        for place, sweep in enumerate(sweeps.values()):
            live_a_while(sweep, place)
        go_wrong(settings, sweeps)
        lease = ExclusiveLease("batched_git_ref_updates.project_cleanup/42", timedelta(minutes=30), worker=GROWING)
        assert lease.try_obtain() is not None
        app = create_app(settings, sweeps, "a token for the pictures", open_to_read=True)
        with serving_in_a_thread(app) as port, chromium(Path(folder, "profile")) as browser:
            address = f"http://127.0.0.1:{port}"
            take(browser, f"{address}/", "light", width=1200, height=780)
            take(browser, f"{address}/workers/{GROWING}", "dark", width=1200, height=780, dark=True)
            take(browser, f"{address}/", "phone", width=390, height=844, phone=True)
        database.close()


def live_a_while(sweep: Sweep, place: int) -> None:
    """Insert sample runs of a worker into the ledger."""
    period = Cron(sweep.schedule, UTC).period(NOW) if sweep.schedule else timedelta(minutes=10)
    rows: list[dict[str, Any]] = []
    chance = random.Random(place)
    for number in range(RUNS):
        tick = NOW - period * (RUNS - number) + timedelta(seconds=2)
        share = chance.uniform(0.5, 1) * (0.4 + number / 60 if sweep.name == GROWING else 0.8)
        lost = sweep.name == GROWING and number == 31
        row = {
            "worker": sweep.name,
            "trigger": "schedule" if sweep.schedule else "parent",
            "tick": tick.replace(second=0, microsecond=0) if sweep.schedule else None,
            "message_id": f"{place:04d}-{number:04d}",
            "epoch": number + 1,
            "started_at": tick,
            "heartbeat_at": tick + timedelta(seconds=share * 9),
            "finished_at": tick + timedelta(seconds=share * 9),
            "outcome": "lost" if lost else "done",
            "reason": "taken_over" if lost else None,
            "counts": dict.fromkeys(sweep.progress_counts[:1], int(share * (900 if sweep.name == GROWING else 70))),
            "backlog": int(share * 900) + (number * 45 if sweep.name == GROWING else 0),
            "backlog_exact": True,
        }
        rows.append(row)
    Run.insert_many(rows).execute()


def go_wrong(settings: Settings, sweeps: dict[str, Sweep]) -> None:
    """Create a missing table, a paused worker, a backlog and a dead letter."""
    database.execute_sql("ALTER TABLE bulk_imports RENAME TO bulk_imports_old")
    run_sweep(sweeps[FAILING])
    until = NOW + timedelta(hours=2)
    switch(Override(PAUSED, "paused", "migration of ci_builds", until, said_by="kim@ops-1"))
    database.execute_sql(
        "INSERT INTO user_statuses (user_id, clear_status_at) "
        "SELECT n, now() - interval '1 second' * n FROM generate_series(1, 2480) AS n"
    )
    broker = message_broker(settings)
    install(broker, settings.model_copy(update={"database_url": None}), workers=False)

    @dramatiq.actor(broker=broker, queue_name="cronjob", max_retries=0)
    def send_report(project_id: int) -> None:
        raise ConnectionError("the mail server did not answer")

    send_report.send(42)
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.start()
    broker.join("cronjob")
    worker.join()
    worker.stop()


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
