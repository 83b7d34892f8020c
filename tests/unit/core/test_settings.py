from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pydantic
import pytest

from housekeeping import Settings
from tests.internals.core import SettingsError

_WORKER = "user_status_cleanup.batch"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that no .env file of the machine is read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _refusal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    for name, value in variables.items():
        monkeypatch.setenv(f"HOUSEKEEPING_{name}", value)
    with pytest.raises(SettingsError) as refusal:
        Settings.load()
    return str(refusal.value)


def test_without_any_variable_the_defaults_hold() -> None:
    settings = Settings.load()

    assert (settings.database_url, settings.namespace, settings.schema_name) == (None, "housekeeping", "housekeeping")
    assert (settings.catch_up, settings.grace_s, str(settings.timezone)) == ("latest", 30, "UTC")


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_DATABASE_URL", "")
    monkeypatch.setenv("HOUSEKEEPING_WORKERS", "")

    assert Settings.load().database_url is None


@pytest.mark.parametrize(
    ("name", "value", "should"),
    [
        ("DATABASE_URL", "nonsense", "a URL such as postgresql://user:password@host:5432/database"),
        ("DATABASE_URL", "mysql://host/db", "a URL such as postgresql://"),
        ("DATABASE_URL", "postgresql://host:port/db", "a URL such as postgresql://"),
        ("DATABASE_URL", "postgresql://host/db?nosuch=1", "a URL such as postgresql://"),
        (
            "DATABASE_URL",
            "postgresql://host/db?options=-cstatement_timeout%3D1",
            "a URL in which statement_timeout has",
        ),
        ("REDIS_URL", "localhost:6379", "a URL such as redis://"),
        ("REDIS_URL", "redis://host:99999/0", "a URL such as redis://"),
        ("BROKER_URL", "http://host", "a URL such as redis://"),
        ("BROKER_URL", "amqp://one/;", "a URL such as redis://"),
        ("BROKER_URL", "amqp://one/;two", "a URL such as redis://"),
        ("BROKER_URL", "amqp://one/;redis://two", "a URL such as redis://"),
        ("SENTRY_DSN", "x", "a URL such as https://"),
        ("NAMESPACE", "{x}", "at most 64 letters, digits and the characters _ . -"),
        ("SCHEMA", "Foo", "a plain PostgreSQL name: small letters, digits and _"),
        ("TIMEZONE", "Mars/Crater", "a time zone such as UTC or Europe/Berlin"),
        ("TIMEZONE", "../../etc/passwd", "a time zone such as UTC or Europe/Berlin"),
        ("GRACE_S", "soon", "a number"),
        ("GRACE_S", "0", "greater than or equal to 1"),
        ("LOG_LEVEL", "info", "'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("LOG_FORMAT", "xml", "'json' or 'console'"),
        ("CATCH_UP", "all", "'latest' or 'none'"),
        ("WORKERS", "{", "JSON (Expecting"),
        ("WORKERS", "[]", "a JSON object by worker name"),
        ("WORKERS", "null", "a JSON object by worker name"),
    ],
)
def test_wrong_value_is_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, should: str
) -> None:
    line = _refusal(monkeypatch, **{name: value})

    assert line.startswith(f"HOUSEKEEPING_{name} is '{value}'; it should be {should}")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("key", "value", "should"),
    [
        ("batch_size", 0, "greater than or equal to 1"),
        ("batch_size", 10_001, "less than or equal to 10000"),
        ("batch_size", "ten", "a whole number"),
        ("batch_size", 1.5, "a whole number"),
        ("batch_size", True, "a whole number"),
        ("batch_size", None, "a value; leave the key out to keep the default"),
        ("enabled", "maybe", "true or false"),
        ("enabled", None, "true or false"),
        ("schedule", 5, "text"),
        ("max_runtime_s", 0, "greater than 0"),
        ("max_runtime_s", float("inf"), "less than or equal to 604800"),
        ("max_runtime_s", 1e20, "less than or equal to 604800"),
        ("lease_ttl_s", 2.9, "greater than or equal to 3"),
        ("table", "a; drop table b", "a table's name, or schema.table"),
    ],
)
def test_wrong_value_of_a_worker_is_rejected_with_its_path(
    monkeypatch: pytest.MonkeyPatch, key: str, value: Any, should: str
) -> None:
    line = _refusal(monkeypatch, WORKERS=json.dumps({_WORKER: {key: value}}))

    assert line.startswith(f'HOUSEKEEPING_WORKERS["{_WORKER}"]["{key}"] is ')
    assert line.endswith(f"; it should be {should}")


@pytest.mark.parametrize("sign", ["@", ":", "/", "?", "#", "[", "]", "%", " ", "\t", "5432/", "1?", "1#", "://", "@x/"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://me:{}@host/db"),
        ("DATABASE_URL", "postgresql://me:{}@host:port/db"),
        ("DATABASES", '{{"ci": "postgresql://me:{}@host:port/db"}}'),
        ("DATABASES", '{{"ci": "postgresql://me:{}@host/db"'),
        ("REPLICA_URLS", "postgresql://a/db,postgresql://me:{}@host:port/db"),
        ("REDIS_URL", "redis://me:{}@host:port/0"),
        ("REDIS_URL", "me:{}@host/0"),
        ("BROKER_URL", "amqp://me:{}@host:port/;amqp://me:{}@host"),
        ("SENTRY_DSN", "ftp://me:{}@host/1"),
        ("OBJECT_STORES", '{{"a": "ftp://me:{}@host/1"}}'),
    ],
)
def test_password_with_any_signs_is_masked_in_errors(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sign: str
) -> None:
    line = _refusal(monkeypatch, **{name: value.format(*[f"hunter2{sign}hunter3"] * 2)})

    assert line.startswith(f"HOUSEKEEPING_{name}") and "hunter" not in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgresql://me:5432/hunter2@host/db"),
        ("DATABASE_URL", "postgresql://me:x@y/hunter2@host/db"),
        ("DATABASE_URL", "postgresql://me:5 hunter2@host/db"),
        ("REDIS_URL", "redis://:1/hunter2@host/0"),
        ("REDIS_URL", "redis://:1#hunter2@host/0"),
        ("REDIS_URL", "redis://:1?hunter2@host/0"),
        ("REDIS_URL", "redis://:x@y/hunter2@host/0"),
        ("REDIS_URL", "redis://:5 hunter2@host/0"),
        ("BROKER_URL", "amqp://me:1/hunter2@host/v"),
    ],
)
def test_password_that_could_be_read_as_a_host_or_path_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    line = _refusal(monkeypatch, **{name: value})

    assert "should be a URL such as" in line and "a space %20" in line and "hunter" not in line


@pytest.mark.parametrize(
    "value",
    [
        "amqp://me:pass@one:5672;amqp://me:pass@two:5672",
        "amqps://me:pass@one:5671/v;amqp://me:pass@two:5672/v?heartbeat=5",
        "redis://:half;half@host:6379/0",
    ],
)
def test_the_nodes_of_a_broker_may_be_several(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BROKER_URL", value)

    assert Settings.load().broker_url == value


def test_unknown_key_of_a_worker_is_rejected_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    line = _refusal(monkeypatch, WORKERS=json.dumps({_WORKER: {"batch_sise": 3}}))

    assert line == (f'HOUSEKEEPING_WORKERS["{_WORKER}"]["batch_sise"] is not a valid key; did you mean batch_size?')


def test_schedule_of_a_worker_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_WORKERS", json.dumps({_WORKER: {"schedule": None}}))

    assert Settings.load().workers[_WORKER].model_fields_set == {"schedule"}


def test_mistyped_variable_is_rejected_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    line = _refusal(monkeypatch, DATABSE_URL="x")

    assert line == "HOUSEKEEPING_DATABSE_URL is not a setting; did you mean HOUSEKEEPING_DATABASE_URL?"


def test_mistyped_argument_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(SettingsError, match=r"^HOUSEKEEPING_REDIS_ULR is not a setting; did you mean .*_REDIS_URL\?$"):
        Settings.load(redis_ulr="redis://localhost")


def test_empty_variable_is_unset_also_beside_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".env").write_text("HOUSEKEEPING_NAMESPACE=from_file\nHOUSEKEEPING_LOG_LEVEL=\n")
    monkeypatch.setenv("HOUSEKEEPING_NAMESPACE", "")

    settings = Settings.load()

    assert (settings.namespace, settings.log_level) == ("from_file", "INFO")


def test_unknown_variable_is_rejected_with_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    line = _refusal(monkeypatch, PASSWORD="hunter2")

    assert line.startswith("HOUSEKEEPING_PASSWORD is not a setting; the settings are HOUSEKEEPING_DATABASE_URL, ")
    assert "hunter2" not in line


def test_variables_of_tests_and_embedded_servers_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_TEST_DATABASE_URL", "x")
    monkeypatch.setenv("HOUSEKEEPING_EMBEDDED", "wheels")

    Settings.load()


def test_dotenv_file_is_read_and_the_environment_takes_precedence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text("HOUSEKEEPING_NAMESPACE=from_file\nhousekeeping_schema=from_file\nOTHER=1\n")
    monkeypatch.setenv("HOUSEKEEPING_SCHEMA", "from_environment")

    settings = Settings.load()

    assert (settings.namespace, settings.schema_name) == ("from_file", "from_environment")


@pytest.mark.parametrize("name", ["HOUSEKEEPING_DATABSE_URL", "housekeeping_databse_url"])
def test_mistyped_variable_in_the_file_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / ".env").write_text(f"{name}=x\n")

    assert _refusal(monkeypatch) == f"{name} is not a setting (in .env); did you mean HOUSEKEEPING_DATABASE_URL?"


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (b"A=1\nHOUSEKEEPING_NAMESPACE = 'x\n", ".env, line 2 is malformed; it should be NAME=value"),
        (b"HOUSEKEEPING_NAMESPACE=\xff\n", ".env cannot be read; it should be UTF-8 text"),
    ],
)
def test_unreadable_dotenv_file_is_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, refusal: str
) -> None:
    (folder / ".env").write_bytes(content)

    assert _refusal(monkeypatch) == refusal


def test_malformed_lines_without_the_prefix_are_ignored(folder: Path) -> None:
    (folder / ".env").write_text("if true; then\n  OTHER='1\nfi\n")

    Settings.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "me:hunter2@host/db"),
        ("DATABASE_URL", "mysql://me:hunter2@host/db"),
        ("DATABASE_URL", "postgresql://me:hunter2@host/db?nosuch=1"),
        ("DATABASE_URL", "postgresql://host/db?password=hunter2&nosuch=1"),
        # Unescaped, so that what is left of the password is taken for a port or a host.
        ("DATABASE_URL", "postgresql://me:hunter2/x@host/db"),
        ("DATABASE_URL", "postgresql://me:hun/hunter2@host/db"),
        ("DATABASE_URL", "postgresql://me:hun@hunter2@host/db"),
        ("DATABASE_URL", "postgresql://me:hunter2%zz@host/db"),
        ("REDIS_URL", "redis://me:hunter2/x@host"),
        ("REDIS_URL", "redis://me:hun@hunter2@host"),
        ("REDIS_URL", "host=h password=hunter2"),
        ("BROKER_URL", "http://me:hunter2@host"),
        ("BROKER_URL", "amqp://me:pass@one/;amqp://me:hunter2/x@two:5672/v"),
        ("SENTRY_DSN", "ftp://me:hunter2@host"),
        ("WORKERS", '{"x": "postgresql://me:hunter2@host/db"}'),
        ("OBJECT_STORES", '{"uploads": {"url": "ftp://me:hunter2@host"}}'),
        ("OBJECT_STORES", '{"uploads": {"url": "s3://b", "options": {"aws_secret_access_key": ["hunter2"]}}}'),
        ("OBJECT_STORES", '{"uploads": {"options": {"aws_secret_access_key": "hunter2"}}}'),
    ],
)
def test_settings_error_shows_no_password(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"HOUSEKEEPING_{name}", value)

    with pytest.raises(SettingsError) as refusal:
        Settings.load()

    shown = "".join(traceback.format_exception(refusal.value))
    assert f"HOUSEKEEPING_{name}" in shown
    assert "hunter2" not in shown


def test_settings_show_no_password() -> None:
    settings = Settings.load(
        database_url="postgresql://me:hunter2@host/db",
        redis_url="redis://:hunter2@host/0",
        broker_url="redis://host/0?password=hunter2",
        sentry_dsn="https://key:hunter2@host/1",
        object_stores={"uploads": {"url": "s3://me:hunter2@bucket", "options": {"secret": "hunter2"}}},
    )

    assert "hunter2" not in f"{settings!r} {settings}"
    assert "postgresql://me:***@host/db" in repr(settings)


def test_pydantics_own_error_shows_no_password() -> None:
    with pytest.raises(pydantic.ValidationError) as error:
        Settings(database_url="mysql://me:hunter2@host/db")

    assert "hunter2" not in str(error.value)


def test_missing_url_is_reported_with_an_example() -> None:
    with pytest.raises(SettingsError, match=r"^HOUSEKEEPING_REDIS_URL is not set; .* redis://host:6379/0$"):
        Settings.load().require_redis_url()
