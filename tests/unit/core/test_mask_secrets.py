from __future__ import annotations

import pytest

from housekeeping.core.sanitize import mask_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:hunter2@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("redis://:hunter2@host/0", "redis://:***@host/0"),
        ("postgresql://me:hun%40ter2@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:hun@ter/2:x@host/db", "postgresql://me:***@host/db"),
        ("from redis://:hunter2@a/0,redis://:hunter2@b/0 on", "from redis://:***@a/0,redis://:***@b/0 on"),
        ("{'a':'s3://me:hunter2@a/x','b':'s3://me:hunter2@b/x'}", "{'a':'s3://me:***@a/x','b':'s3://me:***@b/x'}"),
        ("postgresql://host/db?user=me&password=hunter2&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("host=h password=hunter2 dbname=d", "host=h password=*** dbname=d"),
        ("password='hunter2, or so' dbname=d", "password=*** dbname=d"),
        ('{"password": "hunter2\\" still", "x": 1}', '{"password": ***, "x": 1}'),
        ("password='hunter2 unended", "password=*** unended"),
        ("AWS_SECRET_ACCESS_KEY: hunter2", "AWS_SECRET_ACCESS_KEY: ***"),
        ('invalid percent-encoded token: "hun%2ter2"', "invalid percent-encoded token: ***"),
    ],
)
def test_passwords_are_masked_and_the_rest_stays_readable(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me@host:5432/db",
        'FATAL:  password authentication failed for user "me"',
        "http://host:80/path and a mail to me@example.org",
        "https://key@sentry.example.org/1",
    ],
)
def test_text_without_a_password_is_unchanged(text: str) -> None:
    assert mask_secrets(text) == text
