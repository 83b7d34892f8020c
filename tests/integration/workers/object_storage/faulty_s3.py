"""S3 server in this process with configurable faults: denies, fails half-way, answers late or not at all."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "uploads"
#: What becomes of a request to delete these keys: status and body of the answer, or None for no answer at all.
Answer = tuple[int, str] | None
Behaviour = Callable[["FaultyS3", Sequence[str], bool], Answer]


class FaultyS3:
    """One bucket.

    Attributes:
      objects: The keys of all objects.
      behave: How requests to delete are answered; told whether it is one for many.
      gave_up: Set when the test is over, for whoever waits.
    """

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.objects: set[str] = set()
        self.requests = 0
        self.behave: Behaviour = healthy
        self.over = threading.Event()

    def settings(self) -> dict[str, Any]:
        """Return its entry for HOUSEKEEPING_OBJECT_STORES."""
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_region": "us-east-1"}
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


def healthy(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    """Answer without faults."""
    return 200, server.remove(keys)


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """Run a server for the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Requests) as server:
        server.daemon_threads, server.block_on_close = True, False
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

    def do_DELETE(self) -> None:
        self._delete([unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")])

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def _delete(self, keys: list[str]) -> None:
        state: FaultyS3 = self.server.state  # type: ignore[attr-defined]
        state.requests += 1
        self._say(state.behave(state, keys, len(keys) > 1))

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
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has given up
