"""Dashboard, rendered on the server without external resources: `wsgi_app` mounts it into an application.

The front page and the workers' pages show the latest `Snapshot`. `SnapshotCache` in `snapshot` keeps it, and
`SnapshotReader` in `housekeeping.insight.status` reads it, at most every two seconds. Runs, charts, plans and dead
letters are read when their page is opened. `application` registers the pages of the other modules. `security` checks
tokens, logins and forms.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from wsgiref.types import WSGIApplication, WSGIEnvironment

from housekeeping.core.errors import SettingsError
from housekeeping.core.logs import how_to_install
from housekeeping.core.pings import pings
from housekeeping.core.settings import Settings
from housekeeping.ledger.schema import use_database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import configured_sweeps


def wsgi_app(
    settings: Settings | None = None,
    *,
    user: Callable[[WSGIEnvironment], str | None] | None = None,
    may_change: Callable[[WSGIEnvironment], bool] | None = None,
    secret_key: str | None = None,
    sweeps: Sequence[Sweep] = (),
) -> WSGIApplication:
    """Return the dashboard as a WSGI application, to be mounted into an application under any path.

    Configures the databases of the settings for this process, like `housekeeping.install`. It opens no connection yet,
    and no thread keeps a connection between requests. Requires the extra ``web``.

    Parameters:
      settings: Read from the environment unless given.
      user: Called with the WSGI environ of each request. Returns the user's name for the action log; None or an empty
        string rejects the request with status 403. If it raises, the request fails with status 500. Without `user`,
        the dashboard has its own login: it requires ``HOUSEKEEPING_WEB_TOKEN`` and keeps logins in this process.
      may_change: Called likewise. Returns whether the user may make changes, such as to pause or run a worker. Without
        it, users can only read.
      secret_key: The application's secret; the key of the dashboard's cookie is derived from it. Required if several
        processes serve the application, because with random keys they reject each other's forms.
      sweeps: The application's sweeps that ``HOUSEKEEPING_SWEEPS`` does not name.

    Raises:
      SettingsError: A setting is missing or wrong, the extra is not installed, or `may_change` is given without `user`.
      DeclarationError: Two sweeps have the same name.

    Note:
      ``/-/live`` and ``/-/ready`` below the path need no login. They show only whether the servers answer.
    """
    try:
        from housekeeping.web.application import create_app
        from housekeeping.web.security import ApplicationLogin
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed: {how_to_install('web')}") from None
    settings = settings or Settings.load()
    if user is not None:
        login: str | ApplicationLogin = ApplicationLogin(user, may_change or (lambda environ: False))
    elif may_change is not None:
        raise SettingsError("wsgi_app() has may_change without user; give both, or neither for a login with a token")
    elif settings.web_token is not None:
        login = settings.web_token
    else:
        raise SettingsError("HOUSEKEEPING_WEB_TOKEN is not set; set it, or give wsgi_app() a function `user`")
    # Not the application's own key, so that neither accepts the other's cookies.
    key = None if secret_key is None else hmac.digest(secret_key.encode(), b"housekeeping.web cookie", "sha256")
    declared = configured_sweeps(settings, sweeps)
    use_database(settings)
    pings.use(settings)
    return create_app(settings, declared, login, mounted=True, secret_key=key)
