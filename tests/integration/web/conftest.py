"""Fixtures of the dashboard tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from jinja2 import BytecodeCache
from jinja2.bccache import Bucket
from werkzeug.test import TestResponse

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.internals.database import Database
from tests.internals.ledger import NOW, Run
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps

TOKEN = "a-token-of-the-tests"
WORKER = "user_status_cleanup.batch"

#: Logs the client in.
LogIn = Callable[[FlaskClient], TestResponse]


def form_token(page: TestResponse) -> str:
    """Return the form token of a page."""
    found = re.search(r'name="form_token" value="([^"]+)"', page.get_data(as_text=True))
    assert found is not None
    return found[1]


def recorded(**given: Any) -> int:
    """Add a run that ended two minutes ago, unless given otherwise, and return its id."""
    moments = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), NOW - timedelta(minutes=2))
    run_id: int = Run.create(**{"worker": WORKER, "trigger": "schedule", "outcome": "done", **moments, **given}).id
    return run_id


class CompiledTemplates(BytecodeCache):
    """Templates in memory, compiled once for the applications of all tests."""

    def __init__(self) -> None:
        self._compiled: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self._compiled:
            bucket.bytecode_from_string(self._compiled[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._compiled[bucket.key] = bucket.bytecode_to_string()


@pytest.fixture(autouse=True, scope="package")
def compiled_templates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flask, "jinja_options", {"bytecode_cache": CompiledTemplates()})
        yield


@pytest.fixture
def make_app(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Callable[[bool], Flask]:
    postgres.create_tables([UserStatus])
    only = {WORKER: configured_sweeps(settings)[WORKER]}
    return lambda open_to_read: create_app(settings, only, TOKEN, open_to_read=open_to_read)


@pytest.fixture
def with_settings(settings: Settings, make_app: Callable[[bool], Flask]) -> Callable[..., FlaskClient]:
    """Return a browser of a dashboard with these settings, at an address that other machines reach."""

    def make(**changes: object) -> FlaskClient:
        changed = settings.model_copy(update=changes)
        only = {WORKER: configured_sweeps(settings)[WORKER]}
        return create_app(changed, only, TOKEN, open_to_read=False).test_client()

    return make


@pytest.fixture
def client(make_app: Callable[[bool], Flask]) -> FlaskClient:
    """Return a browser on the machine of a loopback dashboard."""
    return make_app(True).test_client()


@pytest.fixture
def log_in() -> LogIn:
    def enter(client: FlaskClient) -> TestResponse:
        word = form_token(client.get("/login"))
        return client.post("/login", data={"token": TOKEN, "form_token": word})

    return enter
