"""HTTP server of the dashboard."""

from __future__ import annotations

import socket
from typing import Any, Final

from flask import Flask
from waitress.server import create_server

_THREADS: Final = 4
#: Limits for unauthenticated requests. The longest form has a few hundred bytes. Lease keys and dead letter ids are in
#: the URL.
_LIMITS: Final[dict[str, Any]] = {
    "max_request_body_size": 64 * 1024,  # bytes
    "max_request_header_size": 32 * 1024,  # bytes
    "channel_timeout": 30,  # seconds without data
    "cleanup_interval": 10,  # seconds between checks for idle channels
    "connection_limit": 200,
}


def server(app: Flask, listener: socket.socket) -> Any:
    """Return a server on a listening socket; ``run()`` serves, and ``close()`` from another thread stops it.

    Its responses contain no version numbers.
    """
    return create_server(
        app, sockets=[listener], threads=_THREADS, ident="housekeeping", clear_untrusted_proxy_headers=True, **_LIMITS
    )
