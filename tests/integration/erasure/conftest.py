"""Fixtures of the tests of erasures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import redis
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from housekeeping import Call, Settings, install
from tests.integration.erasure import shop
from tests.integration.middleware.step_worker import StepWorker, close
from tests.integration.several_databases import two as two
from tests.internals.brokers import message_broker
from tests.internals.core import shared_redis
from tests.internals.database import Database
from tests.internals.erasures import work


@pytest.fixture
def customers(postgres: Database, housekeeping_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A customer to be erased and another one. Passes follow each other at once."""
    monkeypatch.setattr(work, "FIRST_WAIT_S", 0.0)
    shop.create()


@pytest.fixture
def broker(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A broker of an application that has declared a subject, and stores the results of all messages.

    Another system is called, which a test can make fail: `shop.forget`.
    """
    module: Any = ModuleType("shop_subjects")
    module.SUBJECTS = (replace(shop.PERSON, also=[Call(lambda key: shop.forget(key))]),)
    monkeypatch.setitem(sys.modules, "shop_subjects", module)
    made: Any = message_broker(settings)
    made.add_middleware(Results(backend=StubBackend(), store_results=True))
    install(made, shop.with_key(settings, sweeps=("shop_subjects",)))
    ours = shared_redis.get()
    yield made
    close(made)
    ours.connection_pool.disconnect()


@pytest.fixture
def worker(broker: Any) -> StepWorker:
    return StepWorker(broker, "cronjob")
