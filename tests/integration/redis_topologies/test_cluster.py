"""Redis Cluster: every connection to a node is rejected, because Dramatiq's script loses messages there."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

import housekeeping
from housekeeping import Settings
from tests.installation import Installation
from tests.internals.core import SettingsError, redis_client
from tests.internals.doctor import servers
from tests.internals.embedded import find_redis
from tests.rabbitmq_server import free_ports
from tests.sentinel_servers import SAYS_WHAT_IT_IS

_START_S = 20.0
_SAYS = "is a node of a Redis Cluster, and a Redis Cluster loses messages when it moves slots; use one primary with"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[redis.Redis]]:
    """Two nodes in cluster mode, which have not met."""
    running, clients = list[subprocess.Popen[bytes]](), list[redis.Redis]()
    try:
        # Ten thousand above, a node listens to the others: there, too, no port of the system's own choice.
        for port in [port for port in free_ports(100) if port < 22_000][:2]:
            folder = tmp_path_factory.mktemp("node")
            command = [str(find_redis().path), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
            command += ["--dir", str(folder), "--cluster-enabled", "yes"]
            with (folder / "log").open("wb") as log:
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            clients.append(redis.Redis(port=port))
        for client in clients:
            _await(partial(_answers, client))
        yield clients
    finally:
        for client in clients:
            client.close()
        for process in running:
            process.kill()
            process.wait()


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _state(client: redis.Redis) -> str:
    told: Any = client.execute_command("CLUSTER INFO")
    return str(told["cluster_state"])


def _port(client: redis.Redis) -> int:
    port: int = client.connection_pool.connection_kwargs["port"]
    return port


@pytest.fixture
def url(nodes: list[redis.Redis]) -> str:
    return f"redis://127.0.0.1:{_port(nodes[0])}/0"


@SAYS_WHAT_IT_IS
def test_plain_url_of_a_cluster_is_rejected_with_the_first_command(url: str) -> None:
    with pytest.raises(SettingsError, match=f"^Redis at 127.0.0.1:[0-9]+ {_SAYS} Sentinel: redis\\+sentinel://"):
        redis_client(url).ping()


def test_doctor_rejects_a_cluster_that_the_connection_did_not_recognize(url: str) -> None:
    with pytest.raises(SettingsError, match="^this Redis is a node of a Redis Cluster, and "):
        list(servers.examine_redis(Settings.load(redis_url=f"{url}?protocol=2"), {}))


@SAYS_WHAT_IT_IS
def test_applications_own_broker_on_a_cluster_is_rejected_when_it_sends(url: str, settings: Settings) -> None:
    broker = RedisBroker(url=url, middleware=[])
    housekeeping.install(broker, settings.model_copy(update={"database_url": None, "redis_url": None}), workers=False)
    work = dramatiq.actor(broker=broker, actor_name="work")(lambda: None)

    with pytest.raises(SettingsError, match=_SAYS):
        work.send()


#: Those that use Redis; others do not connect to it.
COMMANDS = [
    "status",
    "scheduler",
    *(
        pytest.param(line, marks=pytest.mark.slow)
        for line in (
            "why user_status_cleanup.batch",
            "run object_storage.delete_stale_direct_uploads",
            "enqueue user_status_cleanup.batch",
            "leases list",
            "dedup list",
            "deadletters list",
            "worker",
            "web --port 0",
        )
    ),
]


@SAYS_WHAT_IT_IS
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_end_on_a_cluster_with_one_line(installation: Installation, url: str, line: str) -> None:
    ended = installation.command(*line.split(), REDIS_URL=url)

    assert ended.returncode == 2
    assert _SAYS in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


@pytest.mark.parametrize("scheme", ["redis", pytest.param("redis+cluster", marks=pytest.mark.slow)])
def test_doctor_command_reports_a_cluster_as_an_error(installation: Installation, url: str, scheme: str) -> None:
    ended = installation.command("doctor", REDIS_URL=url.replace("redis", scheme, 1))

    assert ended.returncode != 0
    assert "a Redis Cluster loses messages when it moves slots; use" in ended.stdout + ended.stderr


@SAYS_WHAT_IT_IS
@pytest.mark.slow
def test_broker_url_of_a_cluster_is_rejected_as_well(installation: Installation, url: str) -> None:
    ended = installation.command("enqueue", "user_status_cleanup.batch", BROKER_URL=url)

    assert (ended.returncode, _SAYS in ended.stderr) == (2, True)


@pytest.mark.slow
def test_moving_slot_hides_the_queue_from_dramatiqs_script(nodes: list[redis.Redis]) -> None:
    """Show why a cluster is rejected, with a namespace that keeps all keys on one slot, and no part of the library."""
    source, target = nodes
    source.execute_command("CLUSTER", "MEET", "127.0.0.1", _port(target))
    for node, slots in ((source, (0, 8191)), (target, (8192, 16_383))):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
    _await(lambda: [_state(node) for node in nodes] == ["ok", "ok"])
    client = redis.RedisCluster(host="127.0.0.1", port=_port(source))
    broker: Any = RedisBroker(client=client, namespace="{shop}:broker", middleware=[])
    work = dramatiq.actor(broker=broker, actor_name="work")(lambda number: None)
    for number in range(5):
        work.send(number)
    in_hand = json.loads(broker.do_fetch("default", 1)[0])["options"]["redis_message_id"]

    slot = client.keyslot("{shop}:broker")
    ids = [node.execute_command("CLUSTER", "MYID").decode() for node in nodes]
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    work.send(5)
    fetched = broker.do_fetch("default", 10)
    broker.do_ack("default", in_hand)

    # The script declares the namespace as its key, which never exists, and so is redirected to the target.
    assert len(fetched) == 1, "four more are queued"
    assert source.hexists("{shop}:broker:default.msgs", in_hand), "it is acknowledged and still there"
    with pytest.raises(redis.ResponseError, match="BUSYKEY"):
        source.execute_command("MIGRATE", "127.0.0.1", _port(target), "{shop}:broker:default.msgs", 0, 5000)
    client.close()
