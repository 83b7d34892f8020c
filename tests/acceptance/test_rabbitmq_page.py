"""Page docs/howto/rabbitmq.md, followed as written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import pytest

from housekeeping import Settings
from tests.acceptance.pages import in_a_shell, with_programs
from tests.acceptance.processes import Process, eventually, started
from tests.internals.database import Database
from tests.internals.ledger import Run
from tests.rabbitmq_server import Node, cluster, node
from tests.unit.docs.blocks import ROOT, blocks

PAGE: Final = ROOT / "docs/howto/rabbitmq.md"
STATUSES: Final = "user_status_cleanup.batch"
PROGRAMS: Final = ("housekeeping worker", "housekeeping scheduler")


@pytest.fixture
def fresh(amqp_url: str) -> Iterator[Node]:
    """Start a freshly installed node, if RabbitMQ is available."""
    if "HOUSEKEEPING_TEST_AMQP_URL" in os.environ:
        pytest.skip("the page starts its own RabbitMQ")
    with node() as running:
        yield running


@pytest.fixture
def fresh_cluster(amqp_url: str) -> Iterator[list[Node]]:
    """Start three freshly installed nodes, if RabbitMQ is available."""
    if "HOUSEKEEPING_TEST_AMQP_URL" in os.environ:
        pytest.skip("the page starts its own RabbitMQ")
    with cluster(3) as running:
        yield running


@pytest.fixture
def reader(fresh: Node, environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return shell(fresh, environment, tmp_path)


@pytest.fixture
def cluster_reader(fresh_cluster: list[Node], environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the shell of a reader who is logged in to the last node."""
    return shell(fresh_cluster[-1], environment, tmp_path)


def shell(node: Node, environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the environment of a shell with the programs of both packages in its path."""
    programs = tmp_path / "programs"
    programs.mkdir()
    control = programs / "rabbitmqctl"
    settings = "\n".join(f"export {name}='{value}'" for name, value in node.environment.items())
    control.write_text(f'#!/bin/sh\n{settings}\nexec /usr/lib/rabbitmq/bin/rabbitmqctl "$@"\n')
    control.chmod(0o755)
    (tmp_path / "@hashed").mkdir()
    own = {"HOUSEKEEPING_BROKER_URL": "", "HOUSEKEEPING_REPOSITORIES_ROOT": str(tmp_path)}
    return with_programs({**environment, **own}, programs)


def test_page_leads_from_a_fresh_rabbitmq_to_running_workers(
    fresh: Node, reader: dict[str, str], postgres: Database, settings: Settings, tmp_path: Path
) -> None:
    made, pointed, programs, looked = (block.text for block in blocks(PAGE) if block.kind == "sh")
    assert settings.redis_url is not None
    pointed = pointed.replace("host:5672", f"127.0.0.1:{fresh.port}").replace("redis://host:6379/0", settings.redis_url)
    pointed = pointed.replace("housekeeping doctor", "")

    in_a_shell(f"{made}{pointed}housekeeping init --with-tables\nhousekeeping doctor", reader, tmp_path)
    worker, scheduler = (
        started(["bash", "-c", f"{pointed}exec {program}"], reader, tmp_path / program.split()[1])
        for program in programs.splitlines()
    )
    with worker as at_work, scheduler as ticking:
        eventually(lambda: at_work.said("Worker process is ready"), at_work, patience_s=60)
        eventually(lambda: is_up(ticking), ticking, patience_s=60)
        shown = in_a_shell(f"{pointed}{looked}", reader, tmp_path)

    assert programs.splitlines() == list(PROGRAMS)
    assert f"{settings.namespace}.cronjob\t" in shown


@pytest.mark.slow
def test_page_leads_a_cluster_to_quorum_queues_that_survive_a_node(
    fresh_cluster: list[Node], cluster_reader: dict[str, str], postgres: Database, settings: Settings, tmp_path: Path
) -> None:
    created, exports, _, _ = (block.text for block in blocks(PAGE) if block.kind == "sh")
    urls, limit = (block.text for block in blocks(PAGE) if block.kind == "text")
    [delete_queue] = re.findall(r"`(rabbitmqctl delete_queue .*) NAME`", PAGE.read_text())
    redis_url = next(line for line in exports.splitlines() if "REDIS_URL" in line)
    assert settings.redis_url is not None
    pointed = f"{urls}{redis_url}\n".replace("redis://host:6379/0", settings.redis_url)
    for number, each in enumerate(fresh_cluster, start=1):
        pointed = pointed.replace(f"rabbit{number}:5672", f"127.0.0.1:{each.port}")
    classic = pointed.replace("QUEUE_TYPE=quorum", "QUEUE_TYPE=classic")

    def run(text: str) -> str:
        return in_a_shell(text, cluster_reader, tmp_path)

    def queues(column: str) -> list[str]:
        return run(f"rabbitmqctl --quiet --no-table-headers list_queues --vhost housekeeping {column}").split()

    def work(settings: str, name: str) -> AbstractContextManager[Process]:
        return started(["bash", "-c", f"{settings}exec housekeeping worker"], cluster_reader, tmp_path / name)

    warned = run(f"{created}{classic}housekeeping init --with-tables\nhousekeeping doctor")
    with work(classic, "classic") as worker:
        eventually(lambda: worker.said("Worker process is ready"), worker)
        status = run(f"{classic}housekeeping status --json || true")
        assert worker.terminate() == 0
    assert "each classic queue" in " ".join(warned.split())
    assert {
        name: sum(lengths.values()) for name, lengths in json.loads(status)["queues"].items() if any(lengths.values())
    } == {}

    for name in queues("name"):
        if re.search(r"[.]DQ[.]\d+s$", name) is None:
            run(f"{delete_queue} {name}")
    run(limit)
    with work(pointed, "quorum") as worker:
        eventually(lambda: worker.said("Worker process is ready"), worker)
        found = run(f"{pointed}housekeeping doctor")
        types = queues("type")
        fresh_cluster[0].kill()
        run(f"{pointed}housekeeping enqueue {STATUSES}")
        eventually(lambda: Run.select().where(Run.outcome == "done").exists(), worker)

    assert "quorum queues" in " ".join(found.split())
    assert set(types) == {"quorum"}


def is_up(scheduler: Process) -> bool:
    return "Periodiq" in scheduler.text()
