"""Command line with the shortened waits of the suite: ``python -m tests.chaos.command restore 4711``."""

from __future__ import annotations

from tests.chaos.shortened import shorten_if_asked

shorten_if_asked()

from tests.internals.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
