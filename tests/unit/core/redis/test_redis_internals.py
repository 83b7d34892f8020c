from __future__ import annotations

import inspect

import pytest
from redis.connection import AbstractConnection, Connection, UnixDomainSocketConnection


@pytest.mark.parametrize("kind", [Connection, UnixDomainSocketConnection])
def test_redis_py_has_the_attributes_of_connections_that_are_used(kind: type[AbstractConnection]) -> None:
    connection = kind()

    assert connection._sock is None
    assert {"pid", "handshake_metadata"} <= set(dir(connection))
    assert {"on_connect", "read_response", "send_packed_command", "can_read", "disconnect"} <= set(dir(kind))


def test_redis_py_calls_the_hook_that_checks_a_connection() -> None:
    hook = "on_connect_check_health" if hasattr(AbstractConnection, "on_connect_check_health") else "on_connect"

    assert f"self.{hook}(" in inspect.getsource(AbstractConnection)
