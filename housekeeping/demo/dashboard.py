"""The dashboard of the demo, served by its own process."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from housekeeping.core.wording import how_to_install
from housekeeping.demo.stage import Stage


@contextmanager
def dashboard(stage: Stage) -> Iterator[str]:
    """Serve the dashboard on a free local port; yield its address, or how to install it."""
    try:
        from housekeeping.web.application import create_app, server
    except ModuleNotFoundError:
        yield f"not installed: {how_to_install('web')}"
        return
    app = create_app(stage.settings, stage.sweeps, secrets.token_urlsafe(16), open_to_read=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = server(app, listener)
        thread = threading.Thread(target=serving.run, name="dashboard", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            serving.close()
            thread.join(timeout=5)  # seconds; only open requests are finished
