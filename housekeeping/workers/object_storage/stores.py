"""Object stores named in the settings: their URLs, and clients whose requests end in bounded time."""

from __future__ import annotations

import os
import re
import uuid
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from housekeeping.sweeps import (
    PREFIX,
    ObjectStoreSettings,
    ObjectStoreUnavailable,
    Settings,
    SettingsError,
    error_line,
    how_to_install,
    mask_secrets,
    shortened,
)

_EXAMPLES: Final = {
    "file": "file:///an/absolute/folder",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "memory": "memory:///",
}
#: Keys per request of a bulk deletion: the protocols' limits. Other stores delete one object per request.
BULK: Final = {"s3": 1000, "az": 256}
#: Schemes whose requests are system calls, which gain nothing from concurrency.
LOCAL: Final = ("file", "memory")

#: Options of the connection. All others are options of the store; obstore panics if the two are mixed.
_CONNECTION: Final = frozenset(
    """allow_http allow_invalid_certificates connect_timeout default_content_type http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only pool_idle_timeout
    pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url timeout user_agent""".split()
)
#: obstore's defaults are 30 s and 10 retries within 3 minutes: one request could use up a run. These requests end
#: within 25 s, so that a deletion and an access check stay below the minute after which a run counts as lost.
_CLIENT: Final = {"connect_timeout": "5s", "timeout": "15s"}
_RETRY: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}

_SECRET: Final = ("secret", "token", "key", "password", "sas", "credential", "signature")
_LONGEST_TEXT: Final = 300
#: The error code in the answers of S3 and Azure; the rest of the answer is of no use in a log line.
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
#: End of the first line of an error without an answer. The last cause in the lines below says why there is none.
_NO_ANSWER: Final = "error sending request"
_CAUSE: Final = re.compile(r"(?<=\")[^\"\n]+(?=\")|\b[A-Z]\w+")


class ObjectStore:
    """Object store of one location.

    Attributes:
      scheme: ``file``, ``s3``, ``gs``, ``az`` or ``memory``.
      place: The bucket, container or absolute folder.
      prefix: Prefix of every object's key, ending with a slash unless empty.

    Raises:
      SettingsError: When the settings can never work.
    """

    def __init__(self, location: str, settings: ObjectStoreSettings) -> None:
        self.location = location
        self.enabled = settings.enabled
        self.scheme, self.place, self.prefix = parse_store_url(location, settings)
        self._options = dict(settings.options)
        self._client: Any = None
        self._client_pid: int | None = None
        if self.enabled:
            self._check_settings()

    def __repr__(self) -> str:
        return f"ObjectStore({self.location!r}, {self.scheme}://{self.place})"

    def client(self) -> Any:
        """Return the obstore client.

        Raises:
          ObjectStoreUnavailable: When the folder is missing, or the client was created before this process was forked.
        """
        # The client's threads do not survive a fork: a request would wait for ever.
        if self.scheme not in LOCAL:
            self._client_pid = self._client_pid or os.getpid()
            if self._client_pid != os.getpid():
                raise ObjectStoreUnavailable(
                    f"object store {self.location!r} was used before this process was forked; fork first, or spawn"
                )
        if self._client is None:
            try:
                self._client = self._make()
            except Exception as error:
                raise self.unavailable(error) from None
        return self._client

    def check_access(self) -> None:
        """Check that the bucket or folder exists and may be listed.

        Called before a missing object counts as deleted: a missing bucket gives the same answer.

        Raises:
          ObjectStoreUnavailable: When it does not exist, cannot be reached, or may not be listed.
        """
        if self.scheme == "file" and not os.path.isdir(self.place):
            raise self.unavailable(f"there is no folder {self.place}")
        import obstore

        client = self.client()
        try:
            # A prefix that does not exist, so that a full bucket costs no more than an empty one.
            next(iter(obstore.list(client, f"{self.prefix}no-such-{uuid.uuid4().hex}")), None)
        except Exception as error:
            raise self.unavailable(error) from None

    def unavailable(self, reason: object) -> ObjectStoreUnavailable:
        """Return the error for an unavailable store, without secrets."""
        return ObjectStoreUnavailable(f"object store {self.location!r}: {self.describe_error(reason)}")

    def describe_error(self, reason: object) -> str:
        """Return one line of an error, without secrets.

        Stores include whole requests in their errors, and clients the options they were given.
        """
        text = error_line(reason) if isinstance(reason, BaseException) else mask_secrets(str(reason))
        text, separator, _ = text.partition("<?xml")
        if separator and (code := _CODE.search(str(reason))):
            text += code[1]
        if text.endswith(_NO_ANSWER) and (causes := _CAUSE.findall(str(reason).partition("HttpError {")[2])):
            text += f": {mask_secrets(causes[-1])}"
        for value in self._secrets():
            text = text.replace(value, "***")
        return shortened(text, _LONGEST_TEXT)

    def _secrets(self) -> list[str]:
        secret_names = [name for name in self._options if any(word in name.lower() for word in _SECRET)]
        return [self._options[name] for name in secret_names if self._options[name]]

    def _check_settings(self) -> None:
        where = f'{PREFIX}OBJECT_STORES["{self.location}"]'
        try:
            import obstore  # noqa: F401
        except ModuleNotFoundError:
            raise SettingsError(
                f'{where} needs obstore: set "enabled": false to switch it off, or {how_to_install("s3")}'
            ) from None
        if self.scheme in LOCAL:
            if self._options:
                raise SettingsError(
                    f'{where}["options"] has {", ".join(self._options)}; a {self.scheme} store takes none'
                )
            return
        try:
            self._client = self._make()
        except Exception as error:
            raise SettingsError(f'{where} cannot work with its "options": {self.describe_error(error)}') from None

    def _make(self) -> Any:
        from obstore import store

        if self.scheme == "file":
            return store.LocalStore(self.place)
        if self.scheme == "memory":
            return store.MemoryStore()
        connection = {**_CLIENT, **{name: value for name, value in self._options.items() if name in _CONNECTION}}
        store_options: Any = {name: value for name, value in self._options.items() if name not in _CONNECTION}
        if any("endpoint" in name and value.startswith("http://") for name, value in store_options.items()):
            connection.setdefault("allow_http", "true")
        kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
        return kinds[self.scheme](self.place, config=store_options, client_options=connection, retry_config=_RETRY)


def parse_store_url(location: str, settings: ObjectStoreSettings) -> tuple[str, str, str]:
    """Return the `scheme`, `place` and `prefix` of a location's `ObjectStore`, without connecting to it.

    Raises:
      SettingsError: When the location, URL or prefix is invalid.
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
        return "file", "/" + path.strip("/"), _joined(where, settings.prefix)
    if url.scheme != "memory" and not url.netloc:
        raise invalid("it should name its bucket")
    return url.scheme, url.netloc, _joined(where, path, settings.prefix)


def _joined(where: str, *parts: str) -> str:
    """Return the prefix of the URL followed by the prefix of the settings."""
    words = [word for part in parts for word in part.strip("/").split("/") if part.strip("/")]
    if any(word in ("", ".", "..") for word in words):
        raise SettingsError(f"{where} has the prefix {'/'.join(words)!r}; it should be a path such as a/b, without ..")
    return "".join(f"{word}/" for word in words)


#: Location -> store; set by `configure`.
configured: dict[str, ObjectStore] = {}


def configure(settings: Settings) -> None:
    """Replace the stores of this process; nothing is connected yet.

    Raises:
      SettingsError: When the settings of a store can never work.
    """
    stores = {location: ObjectStore(location, given) for location, given in settings.object_stores.items()}
    configured.clear()
    configured.update(stores)
