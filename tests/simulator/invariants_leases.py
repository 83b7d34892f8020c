"""What must hold of leases, by the history of their keys in Redis and of their epochs in the database."""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulator.stage import Stage
from tests.simulator.workload import LEASES


def nobody_runs_without_its_lease(stage: Stage) -> Iterator[str]:
    """L5: a run begins only after Redis has put its own message's token into the key, once for each run."""
    taken: dict[tuple[str, str], set[bytes]] = {}
    for when, where, what, *details in stage.events("key", "reads", "run began"):
        if what == "key":
            key, before, after = details
            if not key.startswith("sim:lease:"):
                continue
            for token in (before, after):
                if token is not None:
                    mine = taken.setdefault((where, _message_of(token)), set())
                    (mine.add if token == after else mine.discard)(token)
        elif details[0] in LEASES:
            mine = taken.get((where, details[2]), set())
            if not mine:
                yield f"message {details[2]} of {details[0]} began at {when} in {where} and had not taken its lease"
            mine.clear()


def each_acquisition_has_a_higher_epoch(stage: Stage) -> Iterator[str]:
    """L3: than all before it for its key, whoever took it."""
    highest: dict[str, int] = {}
    for when, where, _, key, epoch, *_ in stage.of("epoch taken"):
        if epoch <= highest.get(key, 0):
            yield f"{where} took lease {key} at {when} with epoch {epoch}, after {highest[key]}"
        highest[key] = max(epoch, highest.get(key, 0))


def _message_of(token: bytes) -> str:
    return token.decode().rpartition(" ")[2]


LEASE_KEYS = (nobody_runs_without_its_lease, each_acquisition_has_a_higher_epoch)
