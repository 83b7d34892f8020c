"""Logins of the dashboard, in the memory of its process.

The cookie has only the id of a login. So a logout takes effect at once, a login ends with the process, and neither
needs a server: operators can log in and out while Redis or PostgreSQL is unavailable. Each process has its own logins.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Literal

Role = Literal["change", "read"]

_IDLE_S: Final = 12 * 3600.0  # a working day; a login that was not used for longer ends
_MOST: Final = 1000  # logins; the least recently used ones end
_MESSAGES: Final = 5  # confirmations that are shown; older ones are removed


@dataclass(slots=True)
class Login:
    """One login.

    Attributes:
      role: ``read``: it may change nothing.
      messages: Confirmations that the user has not dismissed, by number.
    """

    role: Role
    used_at: float
    messages: dict[int, str] = field(default_factory=dict)


class Logins:
    """The current logins. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logins: dict[str, Login] = {}  # the least recently used first
        self._numbers = itertools.count(1)

    def begin(self, role: Role) -> str:
        """Return the id of a new login."""
        login_id = secrets.token_urlsafe(32)
        with self._lock:
            self._logins[login_id] = Login(role, time.monotonic())
            while len(self._logins) > _MOST:
                del self._logins[next(iter(self._logins))]
        return login_id

    def find(self, login_id: str | None) -> Login | None:
        """Return a login and note its use; None: it has ended, or another process has it."""
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

    def say(self, login: Login, message: str) -> None:
        """Show a confirmation to the user until it is dismissed."""
        with self._lock:
            login.messages[next(self._numbers)] = message
            while len(login.messages) > _MESSAGES:
                del login.messages[next(iter(login.messages))]

    def dismiss(self, login: Login, number: int) -> None:
        """Remove a confirmation, if it is still shown."""
        with self._lock:
            login.messages.pop(number, None)
