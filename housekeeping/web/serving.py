"""The dashboard on a socket."""

from __future__ import annotations

import socket
from typing import Any, Final

from flask import Flask
from waitress.server import create_server

_THREADS: Final = 4
#: What a request may cost before anybody is asked who sent it. The longest form is a few hundred bytes; the keys of
#: leases and the ids of dead letters come in the address.
_LIMITS: Final[dict[str, Any]] = {
    "max_request_body_size": 64 * 1024,  # bytes
    "max_request_header_size": 32 * 1024,  # bytes
    "channel_timeout": 30,  # seconds without a byte
    "cleanup_interval": 10,  # seconds between looking for such channels
    "connection_limit": 200,
}


def server(app: Flask, listener: socket.socket) -> Any:
    """A server at a listening socket; ``run()`` serves, ``close()`` from another thread ends it.

    It says neither its own version nor that of anything else.
    """
    return create_server(
        app, sockets=[listener], threads=_THREADS, ident="housekeeping", clear_untrusted_proxy_headers=True, **_LIMITS
    )
