from __future__ import annotations

from typing import Final

from tests.soak.checkpoints import Checkpoint
from tests.soak.conftest import THREADS, Soaked
from tests.soak.measured import Measured, slope

#: Keys without live messages: completions, enqueued retries and ticks with their ttl, the heartbeats of processes, and
#: Dramatiq's own.
LASTING: Final = ("done", "retried", "ticks", "throttle", "processes", "process_heartbeats", "broker")
DAY_S: Final = 24 * 3600
#: Actors whose enqueued messages each end exactly once.
EXACT: Final = ("record", "keep", "refresh", "plain", "remind", "stumble", "come_back")
#: Memory blocks: allows for caches, but less than one object per hundred messages.
MOST_BLOCKS: Final = (300, 0.01)
MOST_MEGABYTES: Final = 5  # over two thirds of the soak, independent of its length


def later(soaked: Soaked) -> list[Checkpoint]:
    """Return the last two thirds, when pools and caches are filled."""
    return soaked.checkpoints[len(soaked.checkpoints) // 3 :]


def grown(soaked: Soaked, what: str) -> float:
    """Return the fitted growth in the last two thirds, of the process with the larger one."""
    places = [each.asked for each in later(soaked)]
    both = ([getattr(process, what) for process in column] for column in zip(*processes(later(soaked)), strict=True))
    return max(slope(numbers, places) for numbers in both) * messages(soaked)


def processes(checkpoints: list[Checkpoint]) -> list[tuple[Measured, Measured]]:
    return [(each.worker, each.sender) for each in checkpoints]


def messages(soaked: Soaked) -> int:
    """Return the number of messages in the last two thirds."""
    return later(soaked)[-1].asked - later(soaked)[0].asked


def kinds(numbers: dict[str, int], *but: str) -> dict[str, int]:
    return {kind: number for kind, number in numbers.items() if kind.partition(":")[0] not in but}


def test_each_message_ends_once(soaked: Soaked) -> None:  # F10
    last = soaked.last

    assert {name: last.ended[name] for name in EXACT} == {name: last.enqueued[name] for name in EXACT}
    assert last.ended["charge"] == (last.enqueued["charge"] + 1) // 2  # I3


def test_there_are_at_most_as_many_keys_as_live_messages(soaked: Soaked) -> None:  # D10
    assert [each for each in soaked.checkpoints if each.loaded.number.get("dedup", 0) > each.live] == []


def test_each_thread_has_at_most_one_mark_and_two_leases(soaked: Soaked) -> None:  # D10
    for each in soaked.checkpoints:
        assert each.loaded.number.get("running", 0) <= THREADS
        assert each.loaded.number.get("lease", 0) <= 2 * THREADS
        assert each.loaded.number.get("retry", 0) <= 1  # R2: for the one scheduled actor


def test_no_key_is_held_without_live_messages(soaked: Soaked) -> None:  # D10, D4
    assert [kinds(each.drained.number, *LASTING) for each in soaked.checkpoints] == [{}] * len(soaked.checkpoints)


def test_every_library_key_has_a_ttl(soaked: Soaked) -> None:  # D10
    counted = [keys for each in soaked.checkpoints for keys in (each.loaded, each.drained)]

    assert [kinds(keys.without_ttl, "broker") for keys in counted] == [{}] * len(counted)
    longest = max(ttl for keys in counted for kind, ttl in keys.longest_ttl_s.items() if kind.startswith("done"))
    assert longest <= DAY_S


def test_completions_expire_after_their_ttl(soaked: Soaked) -> None:  # I1, D10
    kept = {kind: number for kind, number in soaked.last.drained.number.items() if kind.startswith("done:")}

    sweep = kept.pop("done:user_status_cleanup.batch", 0)
    assert kept == {"done:keep": soaked.last.ended["keep"], "done:charge": soaked.last.ended["charge"]}
    assert sweep <= soaked.last.enqueued["user_status_cleanup.batch"]


def test_failing_schedule_keeps_its_last_ten_dead_letters(soaked: Soaked) -> None:  # R1
    last = soaked.last

    assert last.dead_ticks == min(10, last.enqueued["tick"])
    assert last.dead == last.enqueued["give_up"] + last.dead_ticks


def test_broker_keys_do_not_grow_in_number(soaked: Soaked) -> None:
    numbers = [sum(kinds(each.drained.number, *LASTING[:-1]).values()) for each in soaked.checkpoints]

    assert max(numbers) <= 12


def test_no_object_is_kept_per_message(soaked: Soaked) -> None:
    filling, each = MOST_BLOCKS

    assert grown(soaked, "blocks") < filling + each * messages(soaked)


def test_resident_memory_does_not_grow(soaked: Soaked) -> None:
    assert grown(soaked, "resident_mb") < MOST_MEGABYTES


def test_threads_and_open_files_do_not_grow(soaked: Soaked) -> None:
    for at_first, *_, at_last in zip(*processes(soaked.checkpoints), strict=True):
        assert at_last.threads == at_first.threads
        # Each worker thread has three connections: broker's Redis, library's Redis, database.
        assert at_last.descriptors <= 10 + 3 * at_last.threads


def test_each_thread_has_at_most_two_redis_connections(soaked: Soaked) -> None:
    for each in soaked.checkpoints:
        assert each.connections <= 2 * (each.worker.threads + each.sender.threads) + 2


def test_worker_logs_no_hook_errors(soaked: Soaked) -> None:
    # Dramatiq only logs errors of hooks, at this level.
    assert [line for line in soaked.said if line["level"] == "critical"] == []
