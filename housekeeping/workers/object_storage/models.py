"""Tables of the upload worker: none, pending uploads live in Redis (see `pending_uploads`)."""

from __future__ import annotations

from typing import Any, Final

#: Tables of this worker, by their name in workers.md.
MODELS: Final[dict[str, Any]] = {}
