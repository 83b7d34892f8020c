"""Invariants of leases, checked on the history of keys in Redis and epochs in the database."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulator.stage import Stage
from tests.simulator.workload import LEASES


def no_run_lacks_its_lease(stage: Stage) -> Iterator[str]:
    """L5: a run starts only after Redis stored its message's token in the key, once per run.

    A sweep's run tells its token by its epoch. It may be gone from the key by then: where Redis lost the mark of being
    at work, another delivery of the message takes it for a dead attempt's. In the database only the later one commits.
    """
    obtained: dict[bytes, str] = {}  # token -> the process that put it into the key
    freed: set[bytes] = set()
    holders: dict[tuple[str, int], bytes] = {}
    for when, where, what, *details in stage.events("key", "epoch taken", "reads", "run began"):
        if what == "key":
            key, before, after = details
            if not key.startswith("sim:lease:"):
                continue
            if before is not None:
                freed.add(before)
            if after is not None:
                obtained[after] = where
                freed.discard(after)
        elif what == "epoch taken":
            key, epoch, holder = details
            holders[key, epoch] = holder.encode()
        elif details[0] in LEASES:
            if what == "run began":
                its = {holders.get((details[0], details[3]), b"")}
            else:
                its = {token for token in obtained if _message_of(token) == details[2]} - freed
            mine = {token for token in its if obtained.get(token) == where}
            if not mine:
                yield f"message {details[2]} of {details[0]} began at {when} in {where} and had not taken its lease"
            for token in mine:
                del obtained[token]


def each_acquisition_has_a_higher_epoch(stage: Stage) -> Iterator[str]:
    """L3: each acquisition of a key has a higher epoch than all before."""
    highest: dict[str, int] = {}
    for when, where, _, key, epoch, *_ in stage.of("epoch taken"):
        if epoch <= highest.get(key, 0):
            yield f"{where} took lease {key} at {when} with epoch {epoch}, after {highest[key]}"
        highest[key] = max(epoch, highest.get(key, 0))


def _message_of(token: bytes) -> str:
    return token.decode().rpartition(" ")[2]


LEASE_KEYS = (no_run_lacks_its_lease, each_acquisition_has_a_higher_epoch)
