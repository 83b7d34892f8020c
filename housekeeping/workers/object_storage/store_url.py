"""Where a location's objects are, read from its URL and checked before anything connects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from housekeeping.core.sanitize import mask_secrets
from housekeeping.sweeps import PREFIX, ObjectStoreSettings, SettingsError

_EXAMPLES: Final = {
    "file": "file:///an/absolute/folder",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "memory": "memory:///",
}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """What a URL and prefix say.

    Attributes:
      scheme: ``file``, ``s3``, ``gs``, ``az`` or ``memory``.
      place: The bucket, container or absolute folder.
      prefix: In front of every object's path, with a slash at its end unless empty.
    """

    scheme: str
    place: str
    prefix: str

    def key(self, path: str) -> str:
        """The key of the object of this path."""
        return self.prefix + path


def parse_store_url(location: str, settings: ObjectStoreSettings) -> StoreUrl:
    """Take a location's URL and prefix apart.

    Raises:
      SettingsError: When they cannot name a place for objects.
    """
    where = f'{PREFIX}OBJECT_STORES["{location}"]'
    if not location or ":" in location:
        raise SettingsError(f"{where} should be named without a colon, which ends the location in an entry's field")
    url = urlsplit(settings.url)
    example = _EXAMPLES.get(url.scheme)

    def refused(why: str) -> SettingsError:
        should = example or " or ".join(_EXAMPLES.values())
        return SettingsError(f'{where}["url"] is {mask_secrets(settings.url)!r}; {why}: {should}')

    if example is None:
        raise refused("it should be a URL such as")
    if url.query or url.fragment:
        raise refused('what is not the place belongs into "options"; it should be a URL such as')
    if "@" in url.netloc:
        raise refused('credentials belong into "options"; it should be a URL such as')
    path = unquote(url.path) if url.scheme == "file" else url.path
    if url.scheme == "file":
        if url.netloc or not path.strip("/") or ".." in path.split("/"):
            raise refused("it should be the absolute path of a folder below /")
        return StoreUrl("file", "/" + path.strip("/"), _joined(where, settings.prefix))
    if url.scheme != "memory" and not url.netloc:
        raise refused("it should name its bucket")
    return StoreUrl(url.scheme, url.netloc, _joined(where, path, settings.prefix))


def _joined(where: str, *parts: str) -> str:
    """The prefix from the URL, then that of the settings."""
    words = [word for part in parts for word in part.strip("/").split("/") if part.strip("/")]
    if any(word in ("", ".", "..") for word in words):
        raise SettingsError(f"{where} has the prefix {'/'.join(words)!r}; it should be parts such as a/b, without ..")
    return "".join(f"{word}/" for word in words)
