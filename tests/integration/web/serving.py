"""Dashboard on a real socket within this process, for tests and for the pictures in the documentation."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flask import Flask

from tests.internals.web import server

_PATIENCE_S = 30.0


@contextmanager
def serving_in_a_thread(app: Flask) -> Iterator[int]:
    """Yield the port of a dashboard that runs in a thread until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = server(app, listener)
    thread = threading.Thread(target=served.run)
    thread.start()

    woken = threading.Event()

    def end() -> None:
        # The server may be awake already: it must not close the pipe that wakes it during a write.
        woken.wait(_PATIENCE_S)
        # Browsers keep connections open, and the server would wait for them.
        for channel in [*served.active_channels.values()]:
            channel.handle_close()
        served.close()

    try:
        yield port
    finally:
        served.trigger.pull_trigger(end)
        woken.set()
        thread.join(_PATIENCE_S)
        served.task_dispatcher.shutdown()
    assert not thread.is_alive()
