"""``housekeeping web``: serve the dashboard."""

from __future__ import annotations

import secrets
import signal
import socket

import click

from housekeeping.brokers.queues import reject_unusable_redis
from housekeeping.cli.context import load_workers
from housekeeping.core.errors import SettingsError
from housekeeping.core.termination import exit_on
from housekeeping.core.wording import how_to_install


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=9292,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 for any free port.",
)
def web(host: str, port: int) -> None:
    """Serve the dashboard: workers, runs, plans, backlog, alerts, queues, leases, dead letters; pause and resume.

    On a loopback address, every user of this machine can read the pages. Changes need a token. At any other address,
    reading needs it, too. The token is HOUSEKEEPING_WEB_TOKEN, or one that this command generates and prints.
    HOUSEKEEPING_WEB_READ_TOKEN allows only reading. Behind a proxy that knows its users, HOUSEKEEPING_WEB_USER_HEADER
    names the header with the user, for the log of actions.

    Requires the extra "web".
    """
    try:
        from housekeeping.web.application import create_app, server
        from housekeeping.web.security import is_loopback
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed: {how_to_install('web')}") from None
    settings, sweeps = load_workers()
    reject_unusable_redis(settings)
    local = is_loopback(host)
    token = settings.web_token
    if token is None and not local:
        raise SettingsError(
            f"HOUSEKEEPING_WEB_TOKEN is not set, and other machines can reach {host}; "
            "set it to at least 32 random characters"
        )
    if token is None:
        token = secrets.token_urlsafe(32)
        click.echo(f"to make changes, log in with this token (valid until the command ends): {token}", err=True)
    app = create_app(settings, sweeps, token, open_to_read=local)
    done = exit_on(signal.SIGTERM)
    try:
        with _listening(host, port) as listener:
            port = listener.getsockname()[1]
            click.echo(f"http://{f'[{host}]' if ':' in host else host}:{port}/  (Ctrl-C to stop)", err=True)
            server(app, listener).run()
    finally:
        done()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"cannot listen on {host}, port {port}: {reason}; choose others with --host, --port"
        ) from None
