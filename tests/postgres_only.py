"""``--topology=postgres-only``: an installation without Redis, whose leases, ticks and heartbeats are in the ledger."""

from __future__ import annotations

from typing import Any, Final

_STORE: Final = "the test is about the store in Redis"
_LOST: Final = "the test loses Redis, its keys or its answers"
_BROKER: Final = "the test sends messages"
_SET_UP: Final = "the test expects that workers that need messages are set up"
_NO_DATABASE: Final = "the test is about an installation without a database"
#: Tests that need Redis or messages, with the reason. What follows a star is a part of the rest of the name.
NEEDS_REDIS: Final = {
    "tests/integration/brokers/": _BROKER,
    "tests/integration/middleware/": _BROKER,
    "tests/integration/redis_topologies/": _STORE,
    "tests/integration/leases/test_leases.py::*[redis": _STORE,
    "tests/integration/leases/test_async_leases.py::*[redis": _STORE,
    "tests/integration/leases/test_leases.py::test_a_lease_shares_the_installed_applications_redis": _STORE,
    "tests/integration/leases/test_leases_given_back.py::*redis": _LOST,
    "tests/integration/leases/test_fences.py::test_fenced_lease_without_a_database": _NO_DATABASE,
    "tests/integration/sweeps/engine/test_rejections.py::test_deferred_argument_is_retried": _BROKER,
    "tests/integration/sweeps/engine/test_runner.py::test_run_with_a_lease_fails_while_redis_is_away": _LOST,
    "tests/integration/sweeps/engine/test_zombies.py::test_lost_redis_keys": _LOST,
    "tests/integration/sweeps/ledger/test_lease_admin.py::test_foreign_redis_keys": _STORE,
    "tests/integration/sweeps/ledger/test_lease_admin.py::test_lease_without_a_database": _NO_DATABASE,
    "tests/integration/sweeps/ledger/test_uninstall.py::": _STORE,
    "tests/integration/sweeps/insight/test_alert_store.py::test_alerts_that_redis_tells_stay": _LOST,
    "tests/integration/sweeps/insight/test_alert_store.py::test_dead_letters_are": _BROKER,
    "tests/integration/sweeps/insight/test_alert_store.py::test_process_that_nobody_looks_at": _BROKER,
    "tests/integration/sweeps/insight/test_now.py::test_run_with_free_threads": _BROKER,
    "tests/integration/sweeps/insight/test_now.py::test_saturated_queue": _BROKER,
    "tests/integration/sweeps/insight/test_now.py::test_age_of_an_unreadable": _BROKER,
    "tests/integration/sweeps/insight/test_processes.py::": _STORE,
    "tests/integration/sweeps/test_family_setup.py::test_fresh_installation": _SET_UP,
    "tests/integration/sweeps/test_family_setup.py::test_status_column_may_be_an_enum": _SET_UP,
    "tests/integration/sweeps/test_family_setup.py::test_optional_columns_may_be_missing": _SET_UP,
    "tests/integration/sweeps/test_family_setup.py::test_every_family_fits": _SET_UP,
    "tests/integration/sweeps/test_family_setup.py::test_uploads_are_cleaned": _SET_UP,
}


class _NoRedis:
    """Fails at each use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the test uses Redis ({name}); list it in {__name__}.NEEDS_REDIS")


def no_redis() -> Any:
    """Return what a test has in place of a client."""
    return _NoRedis()
