"""Error reports to Sentry, if it is configured, and to hooks of the application."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Final

from housekeeping.core.errors import SettingsError
from housekeeping.core.telemetry.logs import to_log_value
from housekeeping.core.wording import how_to_install

logger = logging.getLogger(__name__)

_EVENT_DEPTH: Final = 30  # deeper than anything Sentry's client nests
Hook = Callable[[BaseException, dict[str, Any]], None]

#: Called with the error and its context. Append your own; a hook that raises is logged and skipped.
hooks: Final[list[Hook]] = []


def report(error: BaseException, /, **context: Any) -> None:
    """Call every hook with the error; never raises."""
    for hook in hooks:
        try:
            hook(error, context)
        except Exception:
            logger.exception("An error hook failed: %r", hook)


def require_sentry() -> None:
    """Check that sentry-sdk is installed, without importing it.

    Raises:
      SettingsError: If it is not installed.
    """
    if importlib.util.find_spec("sentry_sdk") is None:
        raise SettingsError(
            f"HOUSEKEEPING_SENTRY_DSN is set, but sentry-sdk is not installed: {how_to_install('sentry')}"
        )


def report_to_sentry(dsn: str) -> None:
    """Configure Sentry; call it before the broker is created.

    Raises:
      SettingsError: If the extra ``sentry`` is not installed.
    """
    require_sentry()
    import sentry_sdk

    # Local variables contain URLs and rows, and messages may quote a URL.
    sentry_sdk.init(
        dsn=dsn, include_local_variables=False, before_send=lambda event, _: to_log_value(event, _EVENT_DEPTH)
    )

    def to_sentry(error: BaseException, context: dict[str, Any]) -> None:
        with sentry_sdk.new_scope() as scope:
            scope.set_context("housekeeping", context)
            sentry_sdk.capture_exception(error)

    hooks.append(to_sentry)
