"""URLs of the dashboard, for ``path("ops/housekeeping/", include("housekeeping.contrib.django.urls"))``.

Users need the permission ``housekeeping.view_dashboard``, and ``housekeeping.change_dashboard`` to make changes.
"""

from __future__ import annotations

from functools import cache
from io import BytesIO
from threading import Lock
from typing import Any, Final
from wsgiref.types import WSGIApplication, WSGIEnvironment

from django.conf import settings
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt
from werkzeug.wrappers import Response

from housekeeping.contrib.django import load_settings
from housekeeping.web import wsgi_app

_USER: Final = "housekeeping.user"
_MAKING: Final = Lock()


def _name(environ: WSGIEnvironment) -> str:
    name: str = environ[_USER].get_username()
    return name


def _may_change(environ: WSGIEnvironment) -> bool:
    return bool(environ[_USER].has_perm("housekeeping.change_dashboard"))


@cache
def _page() -> WSGIApplication:
    return wsgi_app(load_settings(), user=_name, may_change=_may_change, secret_key=settings.SECRET_KEY)


def _show(request: HttpRequest, path: str) -> HttpResponse:
    """Return a page of the dashboard."""
    with _MAKING:  # two first requests may arrive at the same time
        page = _page()
    environ: dict[str, Any] = {
        **request.META,
        "HTTP_HOST": request.get_host(),
        "SCRIPT_NAME": _latin_1(request.path.removesuffix(path).rstrip("/")),
        "PATH_INFO": _latin_1(f"/{path}"),
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.input": BytesIO(request.body),
        "wsgi.url_scheme": request.scheme,
        _USER: request.user,
    }
    answer = Response.from_app(page, environ, buffered=True)
    cookies = answer.headers.getlist("Set-Cookie")
    del answer.headers["Set-Cookie"]
    response = HttpResponse(answer.get_data(), status=answer.status_code, headers=dict(answer.headers))
    for cookie in cookies:  # Django's middleware and test client expect them there
        response.cookies.load(cookie)
    return response


def _latin_1(text: str) -> str:
    """Return a text in the encoding of WSGI: its UTF-8 bytes read as Latin-1."""
    return text.encode().decode("latin-1")


_permitted: Any = login_required(permission_required("housekeeping.view_dashboard", raise_exception=True)(_show))
# The dashboard's forms have their own CSRF tokens.
urlpatterns = [re_path(r"^(?P<path>.*)$", csrf_exempt(_permitted), name="dashboard")]
