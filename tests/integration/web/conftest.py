"""Fixtures of the dashboard tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

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
def client(make_app: Callable[[bool], Flask]) -> FlaskClient:
    """Return a browser on the machine of a loopback dashboard."""
    return make_app(True).test_client()


@pytest.fixture
def log_in() -> LogIn:
    def enter(client: FlaskClient) -> TestResponse:
        word = form_token(client.get("/login"))
        return client.post("/login", data={"token": TOKEN, "form_token": word})

    return enter
