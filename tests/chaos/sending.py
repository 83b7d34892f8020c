"""Client of the process that sends messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

_PATIENCE_S: Final = 30


class Sender:
    """Process with the application's actors that sends messages on request.

    Parameters:
      app: The module that has ``actors``.
    """

    def __init__(self, app: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.sender", app],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=_PATIENCE_S)

    def send(self, actor: str, *args: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Send a message and return its ``id`` and ``duplicate_of``, or its ``error``."""
        wish = {"actor": actor, "args": args, "kwargs": kwargs or {}, "options": options}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer
