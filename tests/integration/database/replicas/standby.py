"""A real streaming replica, made by PostgreSQL's own tools, that a test can hold up, promote and kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg2
import pytest

from tests.internals.embedded import (
    data_folder,
    find_postgres,
    release_shared_memory,
    runnable_postgres,
    spawn,
    stop_all_in,
    unprivileged_user,
)

PATIENCE_S: Final = 60.0
#: At least the primary's, or the replica does not start; without a disk to be kept.
_SETTINGS: Final = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "16MB",
    "fsync": "off",
    "dynamic_shared_memory_type": "mmap",
    # Asks for more of the log at once when the connection to the primary is lost.
    "wal_retrieve_retry_interval": "100ms",
}


class Standby:
    """A replica of the server at `primary`, in an empty folder that its account may enter."""

    def __init__(self, primary: str, folder: Path) -> None:
        self._program = find_postgres().path
        backup = self._program.with_name("pg_basebackup")
        if not backup.is_file():
            pytest.skip(f"{self._program.parent} has no pg_basebackup")
        self._account = unprivileged_user()
        self._folder, self._log = folder, folder / "log"
        data = data_folder(folder)
        data.parent.mkdir()
        if self._account is not None:
            for each in (folder, data.parent):
                os.chown(each, self._account.uid, self._account.gid)
            # The programs may be where that account has no access: in a home folder, or a folder of CI.
            self._program = runnable_postgres(self._program, self._account, folder)
            if backup.parent != self._program.parent:
                backup = Path(shutil.copy(backup, self._program.parent))
        # The slot keeps what the replica has not received: else a checkpoint before it streams may remove its log.
        slot = ["--create-slot", f"--slot={folder.name.replace('-', '_').lower()}"]
        self._run([backup, "-D", data, "-d", primary, *slot, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"])
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self._folder), safe='')}"

    def start(self) -> None:
        settings = {**_SETTINGS, "unix_socket_directories": str(self._folder)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command: list[str | Path] = [self._program, "-D", data_folder(self._folder), *options]
        self._process = spawn(command, self._account, self._folder, self._log)
        self._eventually(self._answers)

    def hold_up(self) -> None:
        """Pause the replay. The replica still receives."""
        self.ask("SELECT pg_wal_replay_pause()")
        self._eventually(lambda: self.ask("SELECT pg_get_wal_replay_pause_state()") == "paused")

    def go_on(self) -> None:
        self.ask("SELECT pg_wal_replay_resume()")

    def catch_up(self, primary: Any) -> None:
        """Go on, until what the primary has written is replayed."""
        self.go_on()
        # Something that is flushed at once: what is only inserted into the log is not sent before the next flush.
        primary.execute("SELECT pg_switch_wal()")
        primary.execute("SELECT pg_logical_emit_message(true, 'test', 'x'), pg_current_wal_insert_lsn()::text")
        lsn = primary.fetchone()[1]
        self._eventually(lambda: self.ask(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'"))

    def promote(self) -> None:
        assert self.ask("SELECT pg_promote()"), "it was not promoted in time"

    def kill(self) -> None:
        """As SIGKILL does, with its sessions."""
        self._process.kill()
        self._process.wait()
        stop_all_in(self._folder, signal.SIGKILL)
        release_shared_memory(self._folder)

    def remove(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE_S)
        shutil.rmtree(self._folder)

    def ask(self, statement: str) -> Any:
        connection = psycopg2.connect(self.url)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
                [value] = cursor.fetchone()
                return value
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            return bool(self.ask("SELECT true"))
        except psycopg2.OperationalError:
            return False

    def _run(self, command: list[str | Path]) -> None:
        made = spawn(command, self._account, self._folder, self._log)
        try:
            assert made.wait(PATIENCE_S) == 0, self._log.read_text()
        except subprocess.TimeoutExpired:
            made.kill()
            made.wait()
            raise

    def _eventually(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)
