"""Reports errors to whoever tracks them: Sentry when it is set up, and any hook of the application's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

Hook = Callable[[BaseException, dict[str, Any]], None]

#: Called with the error and what is known of it. Append your own; a hook that raises is logged and skipped.
hooks: Final[list[Hook]] = []


def report(error: BaseException, **about: Any) -> None:
    """Hand the error to every hook; never raises."""
    for hook in hooks:
        try:
            hook(error, about)
        except Exception:
            logger.exception("An error hook failed: %r", hook)


def report_to_sentry(dsn: str) -> None:
    """Set up Sentry; to be called before the broker is made.

    Raises:
      ModuleNotFoundError: When the extra ``housekeeping[sentry]`` is not installed.
    """
    import sentry_sdk

    sentry_sdk.init(dsn=dsn)

    def to_sentry(error: BaseException, about: dict[str, Any]) -> None:
        with sentry_sdk.new_scope() as scope:
            scope.set_context("housekeeping", about)
            sentry_sdk.capture_exception(error)

    hooks.append(to_sentry)
