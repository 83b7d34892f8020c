"""Check of the dashboard's token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from housekeeping.core.settings import Settings
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding

#: Random characters that cannot be guessed. The dashboard does not limit attempts.
_SAFE_LENGTH: Final = 32


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a warning if the token is short."""
    if settings.web_token is not None and len(settings.web_token) < _SAFE_LENGTH:
        text = f"HOUSEKEEPING_WEB_TOKEN has fewer than {_SAFE_LENGTH} characters, and attempts are not limited"
        yield Finding("warning", "dashboard", "token", text, "set it to the output of: openssl rand -hex 32")
