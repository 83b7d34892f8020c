"""Logins of the dashboard, in the memory of its process.

The cookie has only the id of a login. So a logout takes effect at once, a login ends with the process, and neither
needs a server: operators can log in and out while Redis or PostgreSQL is unavailable. Each process has its own logins.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["change", "read"]

_IDLE_S: Final = 12 * 3600.0  # a working day; a login that was not used for longer ends
_MOST: Final = 1000  # logins; the least recently used ones end


@dataclass(slots=True)
class Login:
    """One login.

    Attributes:
      role: ``read``: it may change nothing.
    """

    role: Role
    used_at: float


class Logins:
    """The current logins. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logins: dict[str, Login] = {}  # the least recently used first

    def begin(self, role: Role) -> str:
        """Return the id of a new login."""
        login_id = secrets.token_urlsafe(32)
        with self._lock:
            self._logins[login_id] = Login(role, time.monotonic())
            while len(self._logins) > _MOST:
                del self._logins[next(iter(self._logins))]
        return login_id

    def find(self, login_id: str | None) -> Login | None:
        """Return a login and note its use; None if it has ended, or another process has it."""
        with self._lock:
            login = self._logins.pop(login_id or "", None)
            if login is None or time.monotonic() - login.used_at > _IDLE_S:
                return None
            login.used_at = time.monotonic()
            self._logins[str(login_id)] = login
            return login

    def end(self, login_id: str | None) -> None:
        """End a login, if it has not ended."""
        with self._lock:
            self._logins.pop(login_id or "", None)
