"""Places for objects that the same tests run on: a local folder and a real S3 bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import obstore

from tests.integration.workers.object_storage.s3_server import BUCKET, SOME, S3Server


class Place(Protocol):
    """Where a location's objects are, seen from behind the library's back; all paths begin with ``may/``."""

    def settings(self) -> dict[str, Any]:
        """What HOUSEKEEPING_OBJECT_STORES says of it."""

    def put(self, *paths: str) -> None: ...

    def paths(self) -> set[str]:
        """All objects below the location's prefix."""

    def refuse(self, path: str) -> str:
        """Make an object that the store refuses to delete, of this path or a similar one, which is returned."""

    def missing(self) -> dict[str, Any]:
        """Settings of the same with a bucket or folder that is not there."""


class Folder:
    """A local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix = "some/prefix"
        (root / self.prefix).mkdir(parents=True)

    def settings(self) -> dict[str, Any]:
        return {"url": f"file://{self.root}", "prefix": self.prefix}

    def put(self, *paths: str) -> None:
        for path in paths:
            file = self.root / self.prefix / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def paths(self) -> set[str]:
        below = self.root / self.prefix
        return {str(file.relative_to(below)) for file in below.rglob("*") if file.is_file()}

    def refuse(self, path: str) -> str:
        # Root may delete any file, but nobody deletes a folder as if it were one.
        self.put(f"{path}/inside")
        return path

    def missing(self) -> dict[str, Any]:
        return {"url": f"file://{self.root}/nowhere"}

    def vanish(self) -> None:
        shutil.rmtree(self.root)


class Bucket:
    """A prefix of its own in the bucket of a real S3 server."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._client = server.client()
        self.prefix = uuid4().hex

    def settings(self) -> dict[str, Any]:
        return {"url": f"s3://{BUCKET}/{self.prefix}", "options": self._server.options(SOME)}

    def put(self, *paths: str) -> None:
        for path in paths:
            obstore.put(self._client, f"{self.prefix}/{path}", b"")

    def paths(self) -> set[str]:
        below = obstore.list(self._client, self.prefix)
        return {each["path"].removeprefix(f"{self.prefix}/") for page in below for each in page}

    def refuse(self, path: str) -> str:
        # The server lets these credentials delete only what has /may/ in its key.
        path = path.replace("may/", "must-not/")
        self.put(path)
        return path

    def missing(self) -> dict[str, Any]:
        return {"url": "s3://no-such-bucket", "options": self._server.options()}
