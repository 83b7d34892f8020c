"""Validation of ref names: git's own rules (git-check-ref-format), and only below ``refs/``."""

from __future__ import annotations

import re
from typing import Final

#: What git rejects anywhere in a name: control characters, spaces, its own notation, and components that are empty,
#: start with a dot or end with ``.lock``. A slash at either end or a double slash has an empty component.
_REFUSED: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|(^|/)\.|\.lock(/|$)|//|/$|^/|\.$")
_BELOW: Final = "refs/"


def is_ref_name(name: str) -> bool:
    """Return whether git accepts this as the full name of a ref below ``refs/``.

    Names that begin with ``-``, ``HEAD`` and other names outside of ``refs/`` are rejected, and so is text that cannot
    be encoded (a lone surrogate).
    """
    return name.startswith(_BELOW) and _REFUSED.search(name) is None and _has_bytes(name)


def _has_bytes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
