"""HTTP server of the dashboard, on a real socket."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from flask import Flask

from tests.integration.web.conftest import WORKER
from tests.integration.web.serving import serving_in_a_thread

Ask = Callable[..., http.client.HTTPResponse]


@pytest.fixture
def ask(make_app: Callable[[bool], Flask]) -> Iterator[Ask]:
    """Sends one request and returns its answer with the body read."""
    with serving_in_a_thread(make_app(True)) as port:

        def send(method: str, path: str, body: bytes = b"", **headers: str) -> http.client.HTTPResponse:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                answer.read()
                return answer

        yield send


@pytest.mark.parametrize("path", ["/", f"/workers/{WORKER}", "/static/style.css", "/nothing"])
def test_responses_name_no_version(ask: Ask, path: str) -> None:
    assert ask("GET", path).headers["Server"] == "housekeeping"


@pytest.mark.parametrize("path", ["/", f"/workers/{WORKER}", "/dead-letters", "/static/live.js"])
def test_head_requests_match_get_requests(ask: Ask, path: str) -> None:
    head, whole = ask("HEAD", path), ask("GET", path)

    assert (head.status, head.headers["Content-Type"]) == (200, whole.headers["Content-Type"])


def test_favicon_redirects_to_the_icon(ask: Ask) -> None:
    asked = ask("GET", "/favicon.ico")
    icon = ask("GET", asked.headers["Location"])

    assert (asked.status, icon.status, icon.headers["Content-Type"]) == (301, 200, "image/svg+xml; charset=utf-8")


def test_oversized_request_body_is_rejected(ask: Ask) -> None:
    assert ask("POST", "/login", b"x" * (64 * 1024 + 1)).status == 413


def test_oversized_request_headers_are_rejected(ask: Ask) -> None:
    assert ask("GET", "/", Cookie="x" * 40_000).status == 431


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nx"])
def test_clients_that_send_no_whole_request_keep_nobody_out(make_app: Callable[[bool], Flask], sent: bytes) -> None:
    with serving_in_a_thread(make_app(True)) as port, ExitStack() as stack:
        for _ in range(230):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            idle.sendall(sent)
        connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)))
        connection.request("GET", "/static/style.css")

        assert connection.getresponse().status == 200
