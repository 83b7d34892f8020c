"""Page docs/howto/rabbitmq.md, followed as written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from tests.acceptance.processes import Process, eventually, started
from tests.rabbitmq_server import Node, node
from tests.unit.docs.blocks import ROOT, blocks

PAGE: Final = ROOT / "docs/howto/rabbitmq.md"
PROGRAMS: Final = ("housekeeping worker", "housekeeping scheduler")


@pytest.fixture
def fresh(amqp_url: str) -> Iterator[Node]:
    """Start a freshly installed node, if RabbitMQ is available."""
    if "HOUSEKEEPING_TEST_AMQP_URL" in os.environ:
        pytest.skip("the page starts its own RabbitMQ")
    with node() as running:
        yield running


@pytest.fixture
def reader(fresh: Node, environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the reader's shell with the programs of both packages in its path."""
    programs = tmp_path / "programs"
    programs.mkdir()
    control = programs / "rabbitmqctl"
    settings = "\n".join(f"export {name}='{value}'" for name, value in fresh.environment.items())
    control.write_text(f'#!/bin/sh\n{settings}\nexec /usr/lib/rabbitmq/bin/rabbitmqctl "$@"\n')
    control.chmod(0o755)
    path = [str(programs), str(Path(sys.executable).parent), environment["PATH"]]
    (tmp_path / "@hashed").mkdir()
    own = {"HOUSEKEEPING_BROKER_URL": "", "HOUSEKEEPING_REPOSITORIES_ROOT": str(tmp_path)}
    return {**environment, **own, "PATH": os.pathsep.join(path)}


def test_page_leads_from_a_fresh_rabbitmq_to_running_workers(
    fresh: Node, reader: dict[str, str], postgres: Database, settings: Settings, tmp_path: Path
) -> None:
    made, pointed, programs, looked = (block.text for block in blocks(PAGE) if block.kind == "sh")
    assert settings.redis_url is not None
    pointed = pointed.replace("host:5672", f"127.0.0.1:{fresh.port}").replace("redis://host:6379/0", settings.redis_url)
    doctor, pointed = "housekeeping doctor", pointed.replace("housekeeping doctor", "")

    said(f"{made}{pointed}housekeeping init --with-tables\n{doctor} || [ $? -eq 3 ]", reader, tmp_path)
    worker, scheduler = (
        started(["bash", "-c", f"{pointed}exec {program}"], reader, tmp_path / program.split()[1])
        for program in programs.splitlines()
    )
    with worker as at_work, scheduler as ticking:
        eventually(lambda: at_work.said("Worker process is ready"), at_work, patience_s=60)
        eventually(lambda: is_up(ticking), ticking, patience_s=60)
        shown = said(f"{pointed}{looked}", reader, tmp_path)

    assert programs.splitlines() == list(PROGRAMS)
    assert f"{settings.namespace}.cronjob\t" in shown


def is_up(scheduler: Process) -> bool:
    return "Periodiq" in scheduler.text()


def said(text: str, environment: dict[str, str], folder: Path) -> str:
    """Run this text in a shell and return its output."""
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout
