"""Console for output to people."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from housekeeping.core.sanitize import printable

#: Width without a terminal: output to a file or a program is not wrapped.
NO_LIMIT: Final = 1000


class _SafeConsole(Console):
    """Console that prints control characters from databases and messages as visible escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


#: `sys.stdout` is `None` if the process started with it closed.
_HAS_WIDTH: Final = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ

#: Output for people. Logs and progress go to stderr. Colors need a terminal, and no environment variable NO_COLOR.
#: No markup: values from databases and error texts contain brackets.
out: Final = _SafeConsole(width=None if _HAS_WIDTH else NO_LIMIT, highlight=False, markup=False, emoji=False)
