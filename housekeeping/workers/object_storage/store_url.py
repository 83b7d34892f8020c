"""URL of an object store: parsed and validated before anything connects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from housekeeping.sweeps import PREFIX, ObjectStoreSettings, SettingsError, mask_secrets

_EXAMPLES: Final = {
    "file": "file:///an/absolute/folder",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "memory": "memory:///",
}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Place of a store's objects.

    Attributes:
      scheme: ``file``, ``s3``, ``gs``, ``az`` or ``memory``.
      place: The bucket, container or absolute folder.
      prefix: Prefix of every object's key, ending with a slash unless empty.
    """

    scheme: str
    place: str
    prefix: str

    def key(self, path: str) -> str:
        """Return the key of the object with this path."""
        return self.prefix + path


def parse_store_url(location: str, settings: ObjectStoreSettings) -> StoreUrl:
    """Parse the URL and prefix of a location.

    Raises:
      SettingsError: When they do not name a place for objects.
    """
    where = f'{PREFIX}OBJECT_STORES["{location}"]'
    if not location or ":" in location:
        raise SettingsError(f"{where} should be named without a colon, which ends the location in an entry's field")
    url = urlsplit(settings.url)
    example = _EXAMPLES.get(url.scheme)

    def invalid(why: str) -> SettingsError:
        should = example or " or ".join(_EXAMPLES.values())
        return SettingsError(f'{where}["url"] is {mask_secrets(settings.url)!r}; {why}: {should}')

    if example is None:
        raise invalid("it should be a URL such as")
    if url.query or url.fragment:
        raise invalid('a query or fragment belongs in "options"; it should be a URL such as')
    if "@" in url.netloc:
        raise invalid('credentials belong in "options"; it should be a URL such as')
    path = unquote(url.path) if url.scheme == "file" else url.path
    if url.scheme == "file":
        if url.netloc or not path.strip("/") or ".." in path.split("/"):
            raise invalid("it should be the absolute path of a folder below /")
        return StoreUrl("file", "/" + path.strip("/"), _joined(where, settings.prefix))
    if url.scheme != "memory" and not url.netloc:
        raise invalid("it should name its bucket")
    return StoreUrl(url.scheme, url.netloc, _joined(where, path, settings.prefix))


def _joined(where: str, *parts: str) -> str:
    """Return the prefix of the URL followed by the prefix of the settings."""
    words = [word for part in parts for word in part.strip("/").split("/") if part.strip("/")]
    if any(word in ("", ".", "..") for word in words):
        raise SettingsError(f"{where} has the prefix {'/'.join(words)!r}; it should be a path such as a/b, without ..")
    return "".join(f"{word}/" for word in words)
