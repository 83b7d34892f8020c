"""Counter of the round trips between a client and PostgreSQL or Redis, measured on the wire."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

_CHUNK: Final = 1 << 20
_PATIENCE_S: Final = 60


class RoundTrips:
    """Proxy in front of a server that counts how often its clients send something and then wait for the answer.

    A pipeline counts once, and so do several statements in one string. Connect before you begin to count: opening a
    connection takes round trips as well.

    Attributes:
      url: The server's URL with the address of the proxy instead.
      count: Round trips of all connections so far.
    """

    def __init__(self, url: str) -> None:
        self.count = 0
        self._server = _address(url)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url: Final = _by_way_of(url, self._listening.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop to listen, and wait until all clients have disconnected."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return  # closed
            self._threads.append(threading.Thread(target=self._forward, args=(client,), daemon=True))
            self._threads[-1].start()

    def _forward(self, client: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self._server, str) else socket.AF_INET
        with client, socket.socket(family) as server, selectors.DefaultSelector() as ready:
            server.connect(self._server)
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            waits = False
            while True:
                for key, _ in ready.select():
                    source: Any = key.fileobj
                    chunk = source.recv(_CHUNK)
                    if not chunk:
                        return
                    if source is client and not waits:
                        self.count += 1
                    waits = source is client
                    key.data.sendall(chunk)


@contextmanager
def round_trips(url: str) -> Iterator[RoundTrips]:
    """Count the round trips to a server within the block."""
    counter = RoundTrips(url)
    try:
        yield counter
    finally:
        counter.close()


def _address(url: str) -> str | tuple[str, int]:
    """Return the server's address: the path of a Unix socket, or host and port."""
    parts, postgres = urlsplit(url), url.startswith("postgres")
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    folder = query.get("host", "")
    port = int(query.get("port") or parts.port or (5432 if postgres else 6379))
    if folder.startswith("/"):
        return f"{folder}/.s.PGSQL.{port}"
    return parts.path if parts.scheme == "unix" else (parts.hostname or "localhost", port)


def _by_way_of(url: str, port: int) -> str:
    """Return the URL with the proxy's address. PostgreSQL's connection is not encrypted."""
    parts, query = urlsplit(url), parse_qs(urlsplit(url).query)
    user = parts.netloc.rpartition("@")[0]
    address = f"{user}@127.0.0.1:{port}" if user else f"127.0.0.1:{port}"
    if parts.scheme == "unix":
        return f"redis://{address}/{query.get('db', ['0'])[0]}"
    if url.startswith("postgres"):
        query = {name: value for name, value in query.items() if name not in ("host", "port")}
        query |= {"sslmode": ["disable"], "gssencmode": ["disable"]}
    return urlunsplit(parts._replace(netloc=address, query=urlencode(query, doseq=True)))
