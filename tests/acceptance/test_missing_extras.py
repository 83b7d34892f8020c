"""Processes that need an optional dependency that is not installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.installation import Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.internals.core import how_to_install

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("command", ["worker", "scheduler"])
@pytest.mark.parametrize(
    ("module", "setting", "message"),
    [
        (
            "sentry_sdk",
            ("SENTRY_DSN", "https://k@host/1"),
            f"HOUSEKEEPING_SENTRY_DSN is set, but sentry-sdk is not installed: {how_to_install('sentry')}",
        ),
        (
            "pika",
            ("BROKER_URL", "amqp://host/"),
            f"HOUSEKEEPING_BROKER_URL names RabbitMQ, whose client pika is not installed: {how_to_install('rabbitmq')}",
        ),
    ],
)
def test_process_without_an_extra_it_needs_ends_with_one_line(
    installation: Installation, tmp_path: Path, command: str, module: str, setting: tuple[str, str], message: str
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    site.joinpath("sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    without = replace(installation, environment=installation.environment | {"PYTHONPATH": str(site)})

    done = without.command(command, **dict([setting]))

    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, said) == (2, [f"housekeeping: {message}"])
