from __future__ import annotations

import pytest

from tests.internals.core import error_line, in_one_line, mask_secrets, printable, typed_error_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 日本", "plain, größer, 日本"),
        ("\x1b]0;owned\x07\x1b[2J", "\\x1b]0;owned\\x07\\x1b[2J"),
        ("a\rb\x08c\x7f\x9b", "a\\rb\\x08c\\x7f\\x9b"),
        ("exe\u202etxt.\u200b", "exe\\u202etxt.\\u200b"),
        ("\ud800", "\\ud800"),
        ("one\ntwo\tthree", "one\ntwo three"),
    ],
)
def test_invisible_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * 9, "x" * 9),
        ("x" * 10, "x" * 10),
        ("x" * 11, "x" * 7 + "..."),
        ("\x1b" * 9, "\\x1b\\x1..."),
        ("a\nb", "a\\nb"),
    ],
)
def test_line_is_cut_at_its_width(text: str, shown: str) -> None:
    assert in_one_line(text, 10) == shown


_PEM = "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----."


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
        ("Authorization: Bearer hunter2", "Authorization: ***"),
        ("authorization: Basic aHVudGVyMg== was refused", "authorization: *** was refused"),
        ("curl -H 'Authorization: Bearer hunter2' http://host", "curl -H 'Authorization: ***' http://host"),
        ("{'Proxy-Authorization': 'Basic aHVudGVyMg=='}", "{'Proxy-Authorization': ***}"),
        ("Cookie: a=hunter2; b=hunter2\nHost: h", "Cookie: ***\nHost: h"),
        ("set-cookie=sid=hunter2; path=/; secure", "set-cookie=*** secure"),
        ("PWD=hunter2 db_pwd: hunter2", "PWD=*** db_pwd: ***"),
        ("sent Bearer hunter2.x-y~z+/== to host", "sent Bearer *** to host"),
        ("no eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln here", "no *** here"),
        ("-----BEGIN RSA PRIVATE KEY-----\nhunter2\nhunter2\n-----END RSA PRIVATE KEY-----.", _PEM),
        ("-----BEGIN PRIVATE KEY-----\\nhunter2, cut off", "-----BEGIN PRIVATE KEY-----***"),
        (r'{"body": "{\"password\": \"hunter2 x\", \"id\": 1}"}', r'{"body": "{\"password\": ***, \"id\": 1}"}'),
        (r'"{\\\"pwd\\\": \\\"hunter2\\\"}"', r'"{\\\"pwd\\\": ***}"'),
        (r"{\"token\": \"hun\\\"ter2\", \"a\": 1}", r"{\"token\": ***, \"a\": 1}"),
        ('{"api_key": ["hunter2", "x"], "secret": {"a": "hunter2"}}', '{"api_key": ***, "secret": ***}'),
        ("private_key=hunter2", "private_key=***"),
        ("ACCESS-KEY: hunter2, accountkey=hunter2", "ACCESS-KEY: *** accountkey=***"),
        ("passwd=hunter2 Credentials: hunter2", "passwd=*** Credentials: ***"),
        ("X-Amz-Signature=hunter2", "X-Amz-Signature=***"),
        ("PING_URL=hunter2 webhook_url=hunter2", "PING_URL=*** webhook_url=***"),
        ("pa\u017fsword=hunter2", "pa\u017fsword=***"),
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
        "the bearer token is missing, and no cookie was sent",
        "eyJust a word.with dots",
    ],
)
def test_text_without_a_password_is_unchanged(text: str) -> None:
    assert mask_secrets(text) == text


#: As libpq begins the line of each host.
_AT = 'connection to server at "db",'


@pytest.mark.parametrize(
    ("error", "line", "typed"),
    [
        (ValueError("first\nsecond"), "first", "ValueError: first"),
        (ValueError(), "ValueError", "ValueError"),
        (KeyError("sku"), "KeyError: 'sku'", "KeyError: 'sku'"),
        (
            ValueError("postgresql://me:hunter2@host"),
            "postgresql://me:***@host",
            "ValueError: postgresql://me:***@host",
        ),
        (
            ValueError(f"{_AT} 1 failed: session is read-only\n{_AT} 2 failed: refused\n\tIs it running?"),
            f"{_AT} 1 failed: session is read-only; {_AT} 2 failed: refused",
            f"ValueError: {_AT} 1 failed: session is read-only; {_AT} 2 failed: refused",
        ),
        # PostgreSQL stores neither. A lone surrogate is a byte of a file's name that is not UTF-8.
        (ValueError("a\0b"), r"a\x00b", r"ValueError: a\x00b"),
        (ValueError("caf\udce9"), r"caf\udce9", r"ValueError: caf\udce9"),
    ],
)
def test_error_line_shows_the_type_if_there_is_no_text(error: Exception, line: str, typed: str) -> None:
    assert (error_line(error), typed_error_line(error)) == (line, typed)
