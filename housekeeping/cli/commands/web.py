"""``housekeeping web``"""

from __future__ import annotations

import secrets
import signal
import socket
import sys

import click

from housekeeping.cli.context import load_workers
from housekeeping.core.errors import SettingsError
from housekeeping.core.extras import how_to_install


@click.command(short_help="Serve the dashboard.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", default=9292, show_default=True, type=click.IntRange(0, 65535), help="The port; 0: any.")
def web(host: str, port: int) -> None:
    """Serve the dashboard: workers, runs, plans, backlog, alarms, queues, leases, dead letters; pause and resume.

    On this machine's own address everybody on it may look. To change something, and to look at all from any other
    address, takes the token: HOUSEKEEPING_WEB_TOKEN, or one made for this start and printed here.

    Requires the extra "web".
    """
    try:
        from housekeeping.web.application import create_app
        from housekeeping.web.security import is_loopback
        from housekeeping.web.serving import server
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed: {how_to_install('web')}") from None
    settings, sweeps = load_workers()
    local = is_loopback(host)
    token = settings.web_token
    if token is None and not local:
        raise SettingsError(
            f"HOUSEKEEPING_WEB_TOKEN is not set, and {host} can be reached from elsewhere; "
            "set it to 16 characters or more that nobody can guess"
        )
    if token is None:
        token = secrets.token_urlsafe(16)
        click.echo(f"to change something, log in with this token (for this start only): {token}", err=True)
    app = create_app(settings, sweeps, token, open_to_read=local)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with _listening(host, port) as listener:
        port = listener.getsockname()[1]
        click.echo(f"http://{f'[{host}]' if ':' in host else host}:{port}/  (Ctrl-C ends it)", err=True)
        server(app, listener).run()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"cannot listen at {host}, port {port}: {why}; choose others with --host, --port") from None
