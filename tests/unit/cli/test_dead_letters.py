from __future__ import annotations

from typing import Any

import pytest

from tests.internals.brokers import without_secrets


@pytest.mark.parametrize(
    ("carried", "shown"),
    [
        ("postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"),
        ([{"url": "amqp://me:hunter2@host"}], [{"url": "amqp://me:***@host"}]),
        ({"password": "hunter2", "api_key": [1], "id": 7}, {"password": "***", "api_key": "***", "id": 7}),
        ({"credentials": {"user": "me", "key": "hunter2"}}, {"credentials": "***"}),
        ({"Authorization": "Basic aHVudGVyMg==", "Cookie": "a=b"}, {"Authorization": "***", "Cookie": "***"}),
        ({"db_pwd": "hunter2", "HTTP_COOKIE": ["a=b"]}, {"db_pwd": "***", "HTTP_COOKIE": "***"}),
        ([["Cookie", "a=b; c=d"], ("host", "h")], [["Cookie", "***"], ["host", "h"]]),
        ({"password": None}, {"password": None}),
        ('{"a": {"pwd": ["hunter2", {"b": "hunter2"}]}, "c": 1}', '{"a": {"pwd": "***"}, "c": 1}'),
        ('["{\\"token\\": {\\"x\\": \\"hunter2\\"}}"]', '["{\\"token\\": \\"***\\"}"]'),
        ('{"password": "a", "password": "hunter2"', '{"password": ***, "password": ***'),
        ('{ "a" : [1,2] }', '{ "a" : [1,2] }'),
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
