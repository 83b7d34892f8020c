"""Each command with --json prints what docs/reference/json.md says, in an installation in which every object occurs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import ExclusiveLease, Settings
from tests.acceptance.conftest import Command
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.database import Database, database
from tests.internals.insight import LockWait, as_json
from tests.internals.ledger import NOW, Heartbeat, RedisHeartbeats, Run
from tests.unit.docs.json_page import PAGE, Shape, faults, objects, shape

#: Starts many processes.
pytestmark = pytest.mark.slow

WORKER: Final = "user_status_cleanup.batch"
AWAY: Final = "unix:///nowhere/redis.sock"
_SHOP: Final = """
from peewee import IntegerField
from housekeeping import BaseModel, Call, Delete, Rows, Subject, Sweep, UtcDateTimeField

class Order(BaseModel):
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "orders"

class Cart(Order):
    class Meta:
        table_name = "carts"

class Call_(Order):
    class Meta:
        table_name = "calls"

def refuse(row):
    if row.id > 1:
        raise ValueError(f"the carrier has lost {row.id}")

def sweep(name, model, action):
    return Sweep(name, Rows(model, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=action))

orders = sweep("shop.orders", Order, Delete())
carts = sweep("shop.carts", Cart, Delete(archive_to="old_carts"))
calls = sweep("shop.calls", Call_, Call(refuse, then=Delete()))
SUBJECTS = (Subject("buyer", "buyers"),)
"""
_TABLES: Final = """
CREATE TABLE orders (id int PRIMARY KEY, expires_at timestamptz NOT NULL);
CREATE TABLE lines (id int PRIMARY KEY, order_id int REFERENCES orders ON DELETE CASCADE);
CREATE TABLE carts (id int PRIMARY KEY, expires_at timestamptz NOT NULL);
CREATE TABLE calls (id int PRIMARY KEY, expires_at timestamptz NOT NULL);
CREATE TABLE buyers (id int PRIMARY KEY);
INSERT INTO buyers VALUES (1);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
CREATE TRIGGER noted BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION note();
INSERT INTO orders SELECT n, now() - n * interval '1 hour' FROM generate_series(1, 5) AS n;
INSERT INTO carts SELECT n, now() - n * interval '1 hour' FROM generate_series(1, 5) AS n;
INSERT INTO calls SELECT n, now() - n * interval '1 hour' FROM generate_series(1, 5) AS n;
"""


#: Objects that are no part of another one.
WHOLE: Final = {"erasure plan", "lock wait", "plan", "receipt", "replay", "result", "single run", "whole dead letter"}


class Checked:
    """Commands whose JSON is compared with the page.

    Attributes:
      seen: The objects that occurred.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self.faults: list[str] = []
        self.seen: set[str] = set()

    def __call__(
        self,
        words: str,
        page: str = "",
        *,
        item: str = "",
        variant: int = 0,
        more: Shape | None = None,
        **settings: str,
    ) -> Any:
        """Run a command, compare what it prints, and return it.

        Parameters:
          page: The command's words on the page; by default all words.
          item: The object that it prints, if that is not the command's usual one.
          more: Further keys that the page names in a sentence.
        """
        finished = self._command(*words.split(" "), "--json", SWEEPS="json_shop", **settings)
        lines = finished.stdout.splitlines()
        assert len(lines) == 1, f"{words}: {finished.stdout}{finished.stderr}"
        found = json.loads(lines[0])
        expected = {**shape(item or f"housekeeping {page or words}", variant), **(more or {})}
        self.faults += faults(found, expected, self.seen, words)
        return found


@pytest.fixture
def checked(command: Command, made: None, postgres: Database, redis_client: redis.Redis, tmp_path: Path) -> Checked:
    (tmp_path / "json_shop.py").write_text(_SHOP)
    postgres.execute_sql(_TABLES)
    return Checked(command)


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    with installed(settings) as broker:
        yield broker


def test_every_command_prints_the_shape_on_the_page(
    checked: Checked, broker: RedisBroker, settings: Settings, redis_client: redis.Redis, add: Callable[[int], None]
) -> None:
    add(30)
    checked("init")
    checked("init --with-archives", "init")
    checked("plan shop.orders", "plan")
    checked("run shop.orders --dry-run", "run", more={"checks": "list of [check](#check)"})
    checked("purge orders --where id=1 --dry-run", "purge", more={"plan": "[purge plan](#purge-plan)"})
    checked("purge orders --where id=1 --yes", "purge")
    archived = checked("run shop.carts", "run")["run_id"]
    checked("run shop.calls", "run")
    checked(f"runs {archived}", item="single run")
    rejected = checked("runs shop.calls", "runs")["runs"][0]["run_id"]
    checked(f"runs {rejected}", item="single run")
    checked(f"restore {archived}", "restore")
    checked("resume shop.carts", "resume")
    checked("why shop.carts", "why")
    checked(f"why {WORKER}", "why")
    checked("pause shop.calls --reason move --until 2h", "pause")
    checked(f"narrow {WORKER} --batch-size 5", "narrow")

    _add_processes_and_messages(broker, settings, redis_client)
    opened = _open_run()
    checked("deadletters list")
    [letter] = checked("deadletters list")["dead_letters"]
    checked(f"deadletters show {letter['message_id']}", "deadletters show")
    checked(f"enqueue {WORKER}", "enqueue")
    checked(f"enqueue {WORKER}", "enqueue")
    [key] = checked("dedup list")["keys"]
    checked(f"dedup release {key['key']}", "dedup release")
    checked("leases list")
    checked("status")
    checked("acknowledge failed_rows", "acknowledge")
    checked("status")
    checked("status", REDIS_URL=AWAY)
    checked("leases list", REDIS_URL=AWAY)
    checked("errors")
    checked("list")
    checked("coverage")
    checked("doctor")
    checked("doctor --database", "doctor", variant=1)
    checked(f"stop {opened}", "stop")
    checked(f"runs {opened}", item="single run")
    checked("deadletters requeue --all --yes", "deadletters requeue")
    checked("deadletters delete --all --yes", "deadletters delete")
    checked("leases release reports", "leases release")
    checked("actions")
    checked("uninstall --dry-run", "uninstall")
    secret: Any = {"ERASURE_KEY": "a-secret-of-the-tests-of-erasures"}
    checked("erase buyer 1 --dry-run", item="erasure plan", **secret)
    erased = checked("erase buyer 1 --yes", "erase", **secret)["id"]
    database.execute_sql("INSERT INTO buyers VALUES (1)")
    checked("erase --replay-since 1h --yes", item="replay", **secret)
    checked("erasures")
    checked(f"receipt {erased}", "receipt", **secret)

    wait = LockWait(7, ours=True, table=None, blockers=[8], application="shop", waited_s=1.5)
    checked.faults += faults(as_json(wait), shape("lock wait"), checked.seen, "lock wait")
    assert "\n".join(checked.faults) == ""
    assert objects() - checked.seen - WHOLE == set(), f"these objects of {PAGE.name} did not occur"


def _add_processes_and_messages(broker: RedisBroker, settings: Settings, client: redis.Redis) -> None:
    """Add a living worker process, a lease, and a dead letter."""
    living = Heartbeat(kind="worker", host="a", pid=7, queues=["default"], threads=8, busy=3, version="1", up_s=60.0)
    RedisHeartbeats(client, settings.namespace).write("one", living)
    lease = ExclusiveLease("reports", timedelta(minutes=10), fenced=True, worker="reports")
    assert lease.try_obtain() is not None
    with database.atomic():
        lease.fence()

    @dramatiq.actor(broker=broker, max_retries=0)
    def charge(number: int) -> None:
        raise ConnectionError(f"no answer for {number}")

    charge.send(7)
    StepWorker(broker).run()


def _open_run() -> int:
    """Add a run that has been at work for a minute."""
    times = {"started_at": NOW - timedelta(minutes=1), "heartbeat_at": NOW}
    run_id: int = Run.insert(worker=WORKER, trigger="schedule", counts={"deleted_rows": 60}, **times).execute()
    return run_id
