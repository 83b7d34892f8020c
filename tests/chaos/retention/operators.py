"""Operators at a terminal: one restores runs, one purges a table. Both repeat a command that has failed."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from typing import Final

from tests.acceptance.processes import Process, eventually
from tests.chaos.families import SPAN
from tests.chaos.retention.families import EXPIRED, ORDERS, ORDERS_TABLE, PURGED, SESSIONS
from tests.chaos.trial import PATIENCE_S, Trial

#: Rows per second of a purge, so that faults meet it at work.
_PACE: Final = 60


class Operator(ABC):
    """Operator who gives one command after another."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.process: Process | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a command is running."""
        return self.process is not None and self.process.running.poll() is None

    def proceed(self) -> None:
        """Give the next command, unless one is running."""
        if not self.is_busy and (command := self._next()) is not None:
            self.process = self._trial.command(*command)

    def kill(self) -> None:
        """Kill the running command."""
        if self.process is not None:
            self.process.running.kill()
            self.process.running.wait(PATIENCE_S)

    def _until_success(self, *command: str) -> None:
        """Give a command until it succeeds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            process = self._trial.command(*command)
            if process.running.wait(PATIENCE_S) == 0:
                return
            assert time.monotonic() < deadline, process.text()

    @abstractmethod
    def _next(self) -> tuple[str, ...] | None: ...


class Restorer(Operator):
    """Operator who restores archived runs at random, and resumes the sweep if a restore has paused it."""

    def __init__(self, trial: Trial, chance: random.Random) -> None:
        super().__init__(trial)
        self._chance = chance
        self._is_paused = False

    def resume(self) -> None:
        """Resume the sweep, without faults."""
        eventually(lambda: not self.is_busy, patience_s=PATIENCE_S)
        self._until_success("resume", SESSIONS.actor)

    def restore(self) -> None:
        """Restore one run, without faults. One must have archived rows."""
        self._until_success("restore", str(self._archived_runs()[0]), "--no-pause")

    @property
    def restored(self) -> int:
        """The number of rows that all restores have counted."""
        counted = f"SELECT coalesce(sum((counts->>'restored')::bigint), 0) FROM {self._trial.own_schema}.runs"
        [[number]] = self._trial.place.rows(counted)
        return int(number)

    def _next(self) -> tuple[str, ...] | None:
        if self._is_paused:
            self._is_paused = False
            return "resume", SESSIONS.actor
        runs = self._archived_runs()
        if not runs:
            return None
        self._is_paused = self._chance.random() < 0.5
        return "restore", str(self._chance.choice(runs)), *(() if self._is_paused else ("--no-pause",))

    def _archived_runs(self) -> list[int]:
        runs = self._trial.place.rows("SELECT DISTINCT archived_by_run FROM old_sessions ORDER BY 1")
        return [run_id for (run_id,) in runs]


class Purger(Operator):
    """Operator who purges round after round, and resumes each purge until it has deleted as many rows as it may."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self._round = 0
        self._is_last = False

    def begin_and_be_killed(self) -> None:
        """Purge until the first batches are committed."""
        self.proceed()
        eventually(lambda: len(ORDERS.left(self._trial.place, 1)) < EXPIRED, patience_s=PATIENCE_S)
        self.kill()

    def finish(self) -> None:
        """Finish the current round."""
        self._is_last = True

        def has_finished() -> bool:
            self.proceed()
            return not self.is_busy and self._is_done()

        eventually(has_finished, patience_s=PATIENCE_S)

    @property
    def resumed(self) -> int:
        """The number of runs that have continued another one."""
        runs = f"SELECT count(*) FROM {self._trial.own_schema}.runs WHERE counts->'purge'->>'resumes' IS NOT NULL"
        [[number]] = self._trial.place.rows(runs)
        return int(number)

    def _next(self) -> tuple[str, ...] | None:
        if self._is_done():
            if self._is_last:
                return None
            self._round += 1
            self._trial.fill(self._round, [ORDERS])
        last = self._last_run()
        if last is not None:
            return "purge", "--resume", str(last[0])
        limits = ("--batch-size", "10", "--max-rows", str(PURGED), "--max-rows-per-s", str(_PACE))
        return "purge", ORDERS_TABLE, "--where", self._where, *limits, "--yes"

    @property
    def _where(self) -> str:
        start = self._round * SPAN
        return f"expires_at < now() AND id BETWEEN {start + 1} AND {start + EXPIRED}"

    def _is_done(self) -> bool:
        last = self._last_run()
        return self._round == 0 or (last is not None and last[1] == "limit")

    def _last_run(self) -> tuple[int, str | None] | None:
        """Return id and reason of the last run of this round."""
        ledger = f"{self._trial.own_schema}.runs"
        query = f"SELECT id, reason FROM {ledger} WHERE counts->'purge'->>'where' = %s ORDER BY id DESC LIMIT 1"
        runs = self._trial.place.rows(query, self._where)
        return None if not runs else (int(runs[0][0]), runs[0][1])
