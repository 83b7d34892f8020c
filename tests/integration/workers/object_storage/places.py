"""Object stores that the same tests run on: a local folder and a real S3 bucket."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import obstore

from tests.integration.workers.object_storage.s3_server import BUCKET, SOME, S3Server


class Place(Protocol):
    """Direct access to a location's objects, without the library; all paths begin with ``may/``."""

    def settings(self) -> dict[str, Any]:
        """Return its entry for HOUSEKEEPING_OBJECT_STORES."""

    def put(self, *paths: str) -> None: ...

    def paths(self) -> set[str]:
        """All objects below the location's prefix."""

    def refuse(self, path: str) -> str:
        """Create an object with this or a similar path that the store refuses to delete; return the path."""

    def missing(self) -> dict[str, Any]:
        """Return settings with a missing bucket or folder."""


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
        # Root may delete any file, but no user can unlink a folder.
        self.put(f"{path}/inside")
        return path

    def missing(self) -> dict[str, Any]:
        return {"url": f"file://{self.root}/nowhere"}

    def vanish(self) -> None:
        shutil.rmtree(self.root)


class Bucket:
    """Prefix in the bucket of a real S3 server."""

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
