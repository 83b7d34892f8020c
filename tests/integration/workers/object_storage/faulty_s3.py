"""S3 server in this process with configurable faults: denies, fails half-way, answers late or not at all."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "uploads"
#: What becomes of a request to delete these keys: status and body of the answer, or None for no answer at all.
Answer = tuple[int, str] | None
#: Told the method: POST for DeleteObjects, or DELETE.
Behaviour = Callable[["FaultyS3", Sequence[str], str], Answer]


class Server(ThreadingHTTPServer):
    """HTTP server that accepts as many connections at once as the worker opens."""

    request_queue_size = 64
    daemon_threads, block_on_close = True, False


class FaultyS3:
    """One bucket.

    Attributes:
      objects: The keys of all objects.
      methods: The method of each request to delete.
      behave: How requests to delete are answered.
      over: Set when the test is over; ends all waiting.
    """

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.objects: set[str] = set()
        self.methods: list[str] = []
        self.behave: Behaviour = healthy
        self.over = threading.Event()

    def settings(self) -> dict[str, Any]:
        """Return its entry for HOUSEKEEPING_OBJECT_STORES."""
        keys = {"aws_access_key_id": "some-access", "aws_secret_access_key": "some-secret", "aws_region": "us-east-1"}
        return {"url": f"s3://{BUCKET}", "options": {**keys, "endpoint": self.endpoint, "timeout": "3s"}}

    def remove(self, keys: Sequence[str], denied: Sequence[str] = ()) -> str:
        """Delete objects; the answer to a request for many."""
        self.objects -= set(keys) - set(denied)
        gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys if key not in denied)
        left = "".join(
            f"<Error><Key>{escape(key)}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            for key in keys
            if key in denied
        )
        return f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{gone}{left}</DeleteResult>'


def healthy(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    """Answer without faults."""
    return 200, server.remove(keys)


def deletes_only(status: int) -> Behaviour:
    """Return the behaviour of a store that answers DeleteObjects with this status, and has DELETE."""

    def behave(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
        return (status, "") if method == "POST" else (204, server.remove(keys)[:0])

    return behave


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """Run a server for the block."""
    with Server(("127.0.0.1", 0), _Requests) as server:
        state = FaultyS3(server.server_port)
        server.state = state  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield state
        state.over.set()
        server.shutdown()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        empty = "<IsTruncated>false</IsTruncated><KeyCount>0</KeyCount>"
        self._say(
            (200, f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{empty}</ListBucketResult>')
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._delete([unescape(key) for key in re.findall("<Key>(.*?)</Key>", body)])

    def do_HEAD(self) -> None:
        self.send_response(200 if self._key() in self.server.state.objects else 404)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()

    def do_DELETE(self) -> None:
        self._delete([self._key()])

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _delete(self, keys: list[str]) -> None:
        state: FaultyS3 = self.server.state  # type: ignore[attr-defined]
        state.methods.append(self.command)
        self._say(state.behave(state, keys, self.command))

    def _say(self, answer: Answer) -> None:
        if answer is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, text = answer
        body = text.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has given up


@contextmanager
def without_delete_objects(endpoint: str) -> Iterator[str]:
    """Run a gateway to a real S3 server that answers 404 to DeleteObjects; yield its address."""

    class Gateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.command == "POST":
                return self.answer(404, [], b"<Error><Code>NoSuchKey</Code></Error>")
            connection = HTTPConnection(urlsplit(endpoint).netloc, timeout=10)
            # The header Host is signed, so it stays as it is.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            headers = [each for each in response.getheaders() if each[0] not in ("Content-Length", "Connection")]
            self.answer(response.status, headers, response.read())
            connection.close()

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in [*headers, *([] if status == 204 else [("Content-Length", str(len(body)))])]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with Server(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
