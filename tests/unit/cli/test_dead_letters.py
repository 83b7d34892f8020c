from __future__ import annotations

from typing import Any

import pytest

from tests.internals.brokers import without_secrets


@pytest.mark.parametrize(
    ("carried", "shown"),
    [
        ("postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"),
        ([{"url": "amqp://me:hunter2@host"}], [{"url": "amqp://me:***@host"}]),
        ({"password": "hunter2", "api_key": [1], "id": 7}, {"password": "***", "api_key": ["***"], "id": 7}),
        ({"password": None}, {"password": None}),
    ],
)
def test_passwords_in_messages_are_masked(carried: Any, shown: Any) -> None:
    assert without_secrets(carried) == shown


def test_truncated_text_shows_no_part_of_a_secret() -> None:
    text = "x" * 19_970 + " postgresql://me:" + "hunter2" * 10 + "@host"

    assert "hunter2" not in without_secrets(text)


def test_deeply_nested_values_are_omitted() -> None:
    nested: Any = "bottom"
    for _ in range(600):
        nested = [nested]

    assert "bottom" not in repr(without_secrets(nested))
