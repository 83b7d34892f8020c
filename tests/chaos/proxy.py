"""TCP proxy in front of a server's unix socket that injects network faults. `tests.citus_like` changes statements."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

_PATIENCE_S: Final = 60
#: What a batch of one statement contains, prepared or not.
_COMMITS_BY_ITSELF: Final = (b"EXECUTE housekeeping_", b'"advanced" AS')
_CHUNK: Final = 65_536


class Link:
    """Connection of a client with its connection to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._writers = (client, server)
        self.ends_with_the_answer = False

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class Proxy:
    """Proxy that forwards bytes and injects faults on demand."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._links: set[Link] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._delay_s = 0.0
        self._commits_to_cut = 0
        self._bytes_left: int | None = None
        self.commits_cut = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy of {target.name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ask(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ask(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    def cut(self) -> int:
        """Close every connection and return their number."""
        return self._ask(self._cut)

    def freeze(self) -> None:
        """Stop forwarding. Connections stay open, and new ones are accepted."""
        self._ask(self._stop)

    def thaw(self) -> None:
        """Forward the held bytes and continue."""
        self._ask(self._go)

    def slow_down(self, seconds: float) -> None:
        """Delay each chunk by this many seconds."""
        self._delay_s = seconds

    def cut_commits(self, times: int) -> None:
        """Forward the next COMMITs and batches of one statement, and close the connection instead of each answer."""
        self._commits_to_cut = times

    def cut_after(self, number: int) -> None:
        """Close every connection after this many bytes."""
        self._bytes_left = number

    def _ask(self, what: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(what(), self._loop).result(_PATIENCE_S)

    async def _open(self) -> None:
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.sleep(0)  # the transports' last callbacks

    async def _cut(self) -> int:
        return self._cut_all()

    def _cut_all(self) -> int:
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    async def _stop(self) -> None:
        self._flowing.clear()

    async def _go(self) -> None:
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = asyncio.current_task()
        assert ours is not None
        self._pumps.add(ours)
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            self._pumps.discard(ours)
            return
        link = Link(writer, server_writer)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pump(link, reader, server_writer, self._from_client),
                self._pump(link, server_reader, writer, self._from_server),
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            link.cut()
            self._links.discard(link)
            self._pumps.discard(ours)

    async def _pump(
        self,
        link: Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        look: Callable[[Link, bytes], bytes | None],
    ) -> None:
        while data := await reader.read(_CHUNK):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._flowing.wait()
            forwarded = look(link, data)
            if forwarded is None:
                break
            writer.write(await self._as_far_as_it_goes(forwarded))
            await writer.drain()
        link.cut()

    def _from_client(self, link: Link, data: bytes) -> bytes | None:
        """Return what is forwarded of a client's bytes; None to close the connection."""
        if self._commits_to_cut and (b"COMMIT" in data or any(text in data for text in _COMMITS_BY_ITSELF)):
            self._commits_to_cut -= 1
            link.ends_with_the_answer = True
        return data

    def _from_server(self, link: Link, data: bytes) -> bytes | None:
        if link.ends_with_the_answer:
            self.commits_cut += 1
            return None
        return data

    async def _as_far_as_it_goes(self, data: bytes) -> bytes:
        if self._bytes_left is None:
            return data
        passed, self._bytes_left = data[: self._bytes_left], self._bytes_left - len(data)
        if self._bytes_left <= 0:
            self._bytes_left = None
            self._loop.call_soon(self._cut_all)
        return passed
