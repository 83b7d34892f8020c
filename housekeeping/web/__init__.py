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

    It uses the databases of the settings in this process, like `housekeeping.install`. Nothing is connected yet, and no
    thread keeps a connection between requests. Requires the extra ``web``.

    Parameters:
      settings: Read from the environment unless given.
      user: Returns the name of the user who has sent the request with this WSGI environ, for the log of actions. None
        or an empty text refuses the request. It is called for each page and form, and replaces the login with a token.
        If it raises, the request fails with status 500. Without `user`, ``HOUSEKEEPING_WEB_TOKEN`` is required, and
        logins are kept in this process.
      may_change: Returns whether this user may pause, run or release something, too. Without it, users only read.
      secret_key: The application's secret, from which the key of the dashboard's cookie is derived. Required if several
        processes serve the application: a random key makes each reject the forms of the others.
      sweeps: The application's sweeps that ``HOUSEKEEPING_SWEEPS`` does not name.

    Raises:
      SettingsError: A setting is missing or wrong, the extra is not installed, or `may_change` is given without `user`.
      DeclarationError: Two sweeps have the same name.

    Note:
      ``/-/live`` and ``/-/ready`` below the path need no login. They tell only whether something works.
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
    # Another key than the application's, so that neither accepts the cookies of the other.
    key = None if secret_key is None else hmac.digest(secret_key.encode(), b"housekeeping.web cookie", "sha256")
    declared = configured_sweeps(settings, sweeps)
    use_database(settings)
    pings.use(settings)
    return create_app(settings, declared, login, mounted=True, secret_key=key)
