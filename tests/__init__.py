"""Tests. Where ``PYTHONDONTWRITEBYTECODE`` is set, as in many containers, they keep bytecode in ``.pytest_cache``.

Without bytecode each process compiles all that it imports, which takes a command longer than its work. Only pytest
writes it. What a test starts reads it, and compiles the files of the test: they may change twice within a second.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.flags.dont_write_bytecode and "pytest" in sys.modules:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = sys.pycache_prefix or str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
