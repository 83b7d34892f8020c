"""Worker of the library as in production: ledger, lease, log lines, overrides, throttles, breaker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from benchmarks.comparison import Contestant, Place
from housekeeping.brokers import message_broker
from housekeeping.core.redis_client import shared_redis
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import logs
from housekeeping.database.connection import database
from housekeeping.installation import install
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.runner import run_sweep

#: Name prefixes of workers with a lease.
_LEASED: Final = ("ci.", "batched_git_ref_updates.")


def ours(worker: str, *, lines: bool = False, argument: Any = None, **setting: Any) -> Contestant:
    """Return a contestant that does a complete run with production settings.

    Parameters:
      lines: Whether the log line for each record is written; else lines begin at warnings.
      setting: What ``HOUSEKEEPING_WORKERS`` says of it.
    """

    def ready(place: Place) -> Callable[[], object]:
        sweep = composed(place, worker, lines=lines, **setting)
        return lambda: _done(sweep, argument)

    return ready


def composed(place: Place, worker: str, *, lines: bool = False, **setting: Any) -> Sweep:
    """Return the configured worker with open connections, as in a process that is already running."""
    # A run must not end early on a slow machine.
    own: dict[str, Any] = {"max_runtime_s": 1500, **setting}
    if worker.startswith(_LEASED):
        own |= {"lease_ttl_s": 3000}
    settings = Settings.load(
        database_url=place.database_url,
        redis_url=place.redis_url,
        log_level="INFO" if lines else "WARNING",
        workers={worker: own},
        repositories_root=place.folder,
        object_stores={"uploads": f"file://{place.store}"},
    )
    logs.configure(settings.log_level, "json")
    broker = message_broker(settings)
    actors = install(broker, settings)
    broker.client.ping()  # type: ignore[attr-defined]
    shared_redis.get().ping()
    database.connect()
    database.execute_sql("SELECT 1")
    sweep: Sweep = actors[worker].options["sweep"]
    return sweep


def _done(sweep: Sweep, argument: Any) -> None:
    result = run_sweep(sweep, argument)
    if result.outcome != "done":
        raise RuntimeError(f"{sweep.name} ended as {result.outcome}: {result.reason} {result.error}")
