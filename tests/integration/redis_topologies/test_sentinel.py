"""Broker, keys and leases behind Sentinel, and what its failovers do to connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

import housekeeping
from housekeeping import ExclusiveLease, Settings
from housekeeping.workers.object_storage import pending_uploads
from tests.integration.middleware.applications import eventually
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.core import SettingsError, redis_client, shared_redis
from tests.internals.doctor import servers as redis_server
from tests.internals.workers import Claims, pending_entry
from tests.sentinel_servers import SAYS_WHAT_IT_IS, SERVICE, SentinelServers, applications_client, sentinel_servers

pytestmark = pytest.mark.slow

_COUNT = "return redis.call('incr', KEYS[1])"


@pytest.fixture(scope="module")
def servers() -> Iterator[SentinelServers]:
    """Servers with passwords; each test leaves them complete."""
    with sentinel_servers(password="s3cret") as running:
        yield running


@pytest.fixture
def behind(settings: Settings, servers: SentinelServers) -> Settings:
    return settings.model_copy(update={"redis_url": servers.url, "database_url": None})


@pytest.fixture
def client(servers: SentinelServers) -> Iterator[redis.Redis]:
    with redis_client(servers.url) as client:
        yield client


def recovered(servers: SentinelServers, killed: int) -> None:
    servers.start_server(killed)
    servers.await_complete()


def test_message_runs_once_and_its_key_is_kept_until_then(behind: Settings) -> None:
    ran: list[int] = []
    with installed(behind) as broker:
        work: Any = dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed")(ran.append)
        worker = StepWorker(broker)

        assert "duplicate_of" not in work.send(1).options
        assert work.send(1).options["duplicate_of"]
        worker.run()
        assert "duplicate_of" not in work.send(1).options
        worker.run()

    assert ran == [1, 1]


def test_lease_has_one_holder_at_a_time(behind: Settings, client: redis.Redis) -> None:
    one, other = (ExclusiveLease("report", timedelta(minutes=1), client) for _ in range(2))

    assert one.try_obtain()
    assert not other.try_obtain()
    one.cancel()
    assert other.try_obtain()
    other.cancel()


def test_messages_wait_out_a_failover_and_run_after_it(behind: Settings, servers: SentinelServers) -> None:
    ran: list[int] = []
    old = servers.primary
    with installed(behind) as broker:
        work: Any = dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed")(ran.append)
        worker = StepWorker(broker)
        work.send(1)
        servers.await_replication()

        servers.kill(old)
        with pytest.raises(Exception, match="Redis did not answer: Error 111|Redis did not answer: Sentinel names no"):
            work.send(2)
        servers.await_failover(old)
        # The new primary does not know the scripts.
        assert work.send(1).options["duplicate_of"]
        work.send(3)
        worker.run()
        worker.run()
    recovered(servers, old)

    assert ran == [1, 3]


def test_command_fails_once_when_the_primary_is_demoted(servers: SentinelServers, client: redis.Redis) -> None:
    old = servers.primary
    count: Any = client.register_script(_COUNT)
    count(keys=["demoted"])
    servers.await_replication()

    with servers.client(servers.sentinels[0]) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
    servers.await_failover(old)
    servers.await_complete()
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(int(count(keys=["demoted"])))
        except redis.ConnectionError:
            outcomes.append(0)

    assert outcomes in ([2, 3, 4], [0, 2, 3])


def test_silent_primary_is_left_within_the_socket_timeout(servers: SentinelServers) -> None:
    old = servers.primary
    with redis_client(f"{servers.url}&socket_timeout=0.5") as client:
        client.set("silent", 1)
        servers.await_replication()

        servers.pause(old)
        with pytest.raises(redis.TimeoutError):
            client.get("silent")
        servers.await_failover(old)
        assert client.get("silent") == b"1"
        servers.resume(old)
        servers.await_complete()


@SAYS_WHAT_IT_IS
def test_replica_that_a_sentinel_names_is_not_used(servers: SentinelServers, client: redis.Redis) -> None:
    replica = ({servers.first, servers.second} - {servers.primary}).pop()
    pool: Any = client.connection_pool
    pool.sentinel_manager.discover_master = lambda service: ("127.0.0.1", replica)

    with pytest.raises(redis.ConnectionError, match=f"^Redis at 127.0.0.1:{replica} is not a primary, but a replica$"):
        client.get("x")


@SAYS_WHAT_IT_IS
def test_wrong_addresses_and_services_are_named_in_one_line(servers: SentinelServers) -> None:
    sentinel, login = servers.sentinels[0], "?sentinel_password=s3cret-sentinel"
    rejected = {
        f"redis://:s3cret-sentinel@127.0.0.1:{sentinel}/0": "is a Sentinel, whose URL is redis+sentinel://127.0.0.1:",
        f"redis+sentinel://127.0.0.1:{servers.first}/{SERVICE}?sentinel_password=s3cret": "is not a Sentinel, but a",
        f"redis+sentinel://:s3cret@127.0.0.1:{sentinel}/other{login}": "primary of the service 'other': it is not mon",
        f"redis+sentinel://:s3cret@127.0.0.1:{sentinel}/{SERVICE}": "already authenticated",
        f"redis+sentinel://:wrong@127.0.0.1:{sentinel}/{SERVICE}{login}": "invalid username-password",
    }
    for url, line in rejected.items():
        with pytest.raises((SettingsError, redis.ConnectionError)) as error:
            redis_client(url).ping()

        assert line in str(error.value)
        assert "s3cret" not in str(error.value) and "wrong" not in str(error.value)


def test_doctor_names_primary_replicas_and_silent_sentinels(behind: Settings, servers: SentinelServers) -> None:
    def said() -> list[str]:
        return [each.text for each in redis_server.examine_redis(behind, {}) if each.subject == "sentinel"]

    primary, killed = servers.primary, servers.sentinels[2]
    complete = said()
    servers.kill(killed)
    one_missing = said()
    servers.start_sentinel(killed)
    servers.await_complete()

    named = (
        f"service {SERVICE}, primary 127.0.0.1:{primary}, 1 replica, {{}} of 3 Sentinels answer; a failover may lose"
    )
    assert complete == [f"{named.format(3)} the last writes"]
    assert one_missing[0] == f"{named.format(2)} the last writes"
    assert one_missing[1].startswith("a Sentinel does not answer: Error 111 connecting to")


def test_doctor_warns_of_no_replica_and_of_accepting_writes_while_cut_off(
    behind: Settings, servers: SentinelServers
) -> None:
    def said(**info: Any) -> list[str]:
        with redis_client(servers.url) as client:
            client.ping()
            known: Any = client.info()
            return [each.text for each in redis_server._sentinel(client, known | info)]

    assert said(connected_slaves=0)[1] == "the primary has no replica: no failover is possible"
    assert said(connected_slaves=2)[1].startswith("a primary that is cut off from the others accepts messages")
    assert len(said(connected_slaves=2, min_slaves_good_slaves=2)) == 1


def test_doctor_counts_no_replica_that_a_sentinel_does_not_know_yet(
    behind: Settings, servers: SentinelServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis.Redis, "sentinel_slaves", lambda self, service: [])

    found = [each for each in redis_server.examine_redis(behind, {}) if each.subject == "sentinel"]

    assert ", 0 replicas, " in found[0].text
    assert found[1].text == "a Sentinel does not know a replica that is up: no failover is possible"
    assert found[1].way_out == "repeat the command after ten seconds"


def test_applications_own_client_shares_its_redis_with_the_keys(behind: Settings, servers: SentinelServers) -> None:
    broker: Any = RedisBroker(client=applications_client(servers.url), namespace=f"{behind.namespace}:own")
    housekeeping.install(broker, behind, workers=False)
    work: Any = dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate="until_executed")(
        lambda: None
    )

    assert broker.enqueue._redis.has_keys
    work.send()
    assert work.send().options["duplicate_of"]
    eventually(lambda: broker.client.llen(f"{broker.namespace}:default") == 1)
    broker.client.close()


@pytest.fixture
def uploads(behind: Settings, client: redis.Redis) -> Iterator[redis.Redis]:
    """Client that the functions for uploads use; the entry a:b is pending."""
    before = shared_redis.client, shared_redis._namespace
    shared_redis.use(client, behind.namespace)
    pending_uploads.prepare("a", "b")
    yield client
    client.delete(pending_entry.KEY)
    shared_redis.client, shared_redis._namespace = before


def _claimed() -> bool:
    [entry] = pending_uploads.page(0, 10)[1]
    return Claims(7).take([entry]) == [entry]


@pytest.mark.parametrize("change", [lambda: pending_uploads.complete("a", "b"), _claimed], ids=["complete", "claim"])
def test_change_of_an_upload_returns_when_a_replica_has_it(
    servers: SentinelServers, uploads: redis.Redis, change: Callable[[], bool]
) -> None:
    replica = ({servers.first, servers.second} - {servers.primary}).pop()
    servers.await_replication()
    resume = threading.Timer(0.4, servers.resume, [replica])
    servers.pause(replica)
    resume.start()
    began = time.monotonic()
    assert change()
    took = time.monotonic() - began
    resume.join()

    assert 0.3 < took < 1


def test_upload_is_completed_without_a_replica(servers: SentinelServers, uploads: redis.Redis) -> None:
    replica = ({servers.first, servers.second} - {servers.primary}).pop()
    servers.pause(replica)

    assert pending_uploads.complete("a", "b")
    servers.resume(replica)
    servers.await_complete()
