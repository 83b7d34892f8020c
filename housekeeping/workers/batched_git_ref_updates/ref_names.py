"""What can be the name of a ref to delete: git's own rules (git-check-ref-format), and below ``refs/``."""

from __future__ import annotations

import re
from typing import Final

#: What git refuses anywhere: control characters, space, its own notation, a component that begins with a dot, ends
#: with ``.lock`` or is empty. Of a slash at either end or twice the empty component is part.
_REFUSED: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|(^|/)\.|\.lock(/|$)|//|/$|^/|\.$")
_BELOW: Final = "refs/"


def is_ref_name(name: str) -> bool:
    """Whether git takes this for the full name of a ref, and it is one below ``refs/``.

    A name that begins with ``-``, ``HEAD`` and any other name outside of ``refs/`` are none; nor is text that has no
    form in bytes (a lone surrogate).
    """
    return name.startswith(_BELOW) and _REFUSED.search(name) is None and _has_bytes(name)


def _has_bytes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
