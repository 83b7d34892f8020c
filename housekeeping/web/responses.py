"""Small responses: an unchanged page is not sent again, texts are compressed, static files are cached."""

from __future__ import annotations

import gzip
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Final

from flask import Flask, Response, request, url_for

_STATIC: Final = Path(__file__).parent / "static"
_COMPRESSIBLE: Final = ("text/html", "text/css", "text/javascript", "image/svg+xml")
_LEAST: Final = 500  # bytes; compressing less saves nothing
#: Ages and the time of the page, which the page's script keeps up to date.
_CLOCK: Final = re.compile(rb'<time id="at"[^>]*>[^<]*|(?<=<time class="ago")([^>]*>)[^<]*')


def shrink_responses(app: Flask) -> None:
    """Let pages be requested with the ``ETag`` of an earlier response, and compress them."""

    @app.after_request
    def shrink(response: Response) -> Response:
        versioned = request.endpoint == "static" and request.args.get("v") == _version(request.path.rpartition("/")[2])
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if versioned else "no-store"
        if response.status_code != 200 or response.mimetype not in _COMPRESSIBLE:
            return response
        response.direct_passthrough = False  # of static files, which are small
        body = response.get_data()
        if request.endpoint != "static":
            # A weak one: two pages with the same one may differ in their ages.
            response.set_etag(hashlib.sha256(_CLOCK.sub(rb"\1", body)).hexdigest()[:32], weak=True)
            response.make_conditional(request)
        if response.status_code == 200 and len(body) >= _LEAST and request.accept_encodings["gzip"] > 0:
            response.set_data(gzip.compress(body, 5, mtime=0))
            response.headers["Content-Encoding"] = "gzip"
        response.vary.update(("Accept-Encoding", "Cookie"))
        return response


def static_url(name: str) -> str:
    """Return the URL of a static file, which changes with its content."""
    return url_for("static", filename=name, v=_version(name))


@cache
def _version(name: str) -> str:
    path = _STATIC / name
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""
