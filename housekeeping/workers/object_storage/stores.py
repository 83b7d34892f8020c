"""The object stores that the settings name, each with a client that gives up in bounded time."""

from __future__ import annotations

import os
import re
import uuid
from datetime import timedelta
from typing import Any, Final

from housekeeping.core.sanitize import error_line, mask_secrets
from housekeeping.sweeps import (
    PREFIX,
    ObjectStoreSettings,
    ObjectStoreUnavailable,
    Settings,
    SettingsError,
    how_to_install,
)
from housekeeping.workers.object_storage.store_url import parse_store_url

#: Keys a request, where a store deletes many at once: the protocols' own limits. The others delete one a request.
BULK: Final = {"s3": 1000, "az": 256}
#: Where a request is a system call: nothing is gained by having several under way.
AT_HAND: Final = ("file", "memory")

#: Options of the connection, all others are the store's own; obstore panics when it gets these among the others.
_CONNECTION: Final = frozenset(
    """allow_http allow_invalid_certificates connect_timeout default_content_type http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only pool_idle_timeout
    pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url timeout user_agent""".split()
)
#: obstore's own are 30 s and 10 retries within 3 minutes: one request could use up a run. These end within 25 s:
#: a request and a look at the store stay below the minute after which a silent run is taken for dead.
_CLIENT: Final = {"connect_timeout": "5s", "timeout": "15s"}
_RETRY: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}

_SECRET: Final = ("secret", "token", "key", "password", "sas", "credential", "signature")
_LONGEST_TEXT: Final = 300
#: Where S3 and Azure say what is wrong, in an answer that is otherwise of no use in a log line.
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")


class ObjectStore:
    """One location: where its objects are, and how they are reached.

    Raises:
      SettingsError: When the settings cannot work, whatever the world is like.
    """

    def __init__(self, location: str, settings: ObjectStoreSettings) -> None:
        self.location = location
        self.enabled = settings.enabled
        self.address = parse_store_url(location, settings)
        self._options = dict(settings.options)
        self._client: Any = None
        self._used_by: int | None = None
        if self.enabled:
            self._refuse_what_cannot_work()

    def __repr__(self) -> str:
        return f"ObjectStore({self.location!r}, {self.address.scheme}://{self.address.place})"

    def client(self) -> Any:
        """The obstore client.

        Raises:
          ObjectStoreUnavailable: When the folder is missing, or a process that was forked cannot use it.
        """
        # The threads that do the work are not there after a fork: a request would wait for ever.
        if self.address.scheme not in AT_HAND:
            self._used_by = self._used_by or os.getpid()
            if self._used_by != os.getpid():
                raise ObjectStoreUnavailable(
                    f"object store {self.location!r} was used before this process was forked; fork first, or spawn"
                )
        if self._client is None:
            try:
                self._client = self._make()
            except Exception as error:
                raise self.unavailable(error) from None
        return self._client

    def look(self) -> None:
        """Return when the bucket or folder is there and may be listed.

        Asked before a missing object is believed to be gone: a missing bucket answers in the same words.

        Raises:
          ObjectStoreUnavailable: When it is not there, not to be reached, or may not be listed.
        """
        if self.address.scheme == "file" and not os.path.isdir(self.address.place):
            raise self.unavailable(f"there is no folder {self.address.place}")
        import obstore

        client = self.client()
        try:
            # Below a prefix that nobody has, so that a full bucket costs no more than an empty one.
            next(iter(obstore.list(client, f"{self.address.prefix}no-such-{uuid.uuid4().hex}")), None)
        except Exception as error:
            raise self.unavailable(error) from None

    def unavailable(self, why: object) -> ObjectStoreUnavailable:
        """The error that says that this store is out of reach, without secrets."""
        return ObjectStoreUnavailable(f"object store {self.location!r}: {self.in_words(why)}")

    def in_words(self, why: object) -> str:
        """One line of an error, no secret in it.

        Stores put whole requests into their errors, and clients the options they were given.
        """
        text = error_line(why) if isinstance(why, BaseException) else mask_secrets(str(why))
        text, separator, _ = text.partition("<?xml")
        if separator and (code := _CODE.search(str(why))):
            text += code[1]
        for value in self._secrets():
            text = text.replace(value, "***")
        return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."

    def _secrets(self) -> list[str]:
        hidden = [name for name in self._options if any(word in name.lower() for word in _SECRET)]
        return [self._options[name] for name in hidden if self._options[name]]

    def _refuse_what_cannot_work(self) -> None:
        where = f'{PREFIX}OBJECT_STORES["{self.location}"]'
        try:
            import obstore  # noqa: F401
        except ModuleNotFoundError:
            raise SettingsError(
                f'{where} needs obstore: set "enabled": false to switch it off, or {how_to_install("s3")}'
            ) from None
        if self.address.scheme in AT_HAND:
            if self._options:
                raise SettingsError(
                    f'{where}["options"] has {", ".join(self._options)}; a {self.address.scheme} store takes none'
                )
            return
        try:
            self._client = self._make()
        except Exception as error:
            raise SettingsError(f'{where} cannot work with its "options": {self.in_words(error)}') from None

    def _make(self) -> Any:
        from obstore import store

        scheme, place = self.address.scheme, self.address.place
        if scheme == "file":
            return store.LocalStore(place)
        if scheme == "memory":
            return store.MemoryStore()
        connection = {**_CLIENT, **{name: value for name, value in self._options.items() if name in _CONNECTION}}
        own: Any = {name: value for name, value in self._options.items() if name not in _CONNECTION}
        if any("endpoint" in name and value.startswith("http://") for name, value in own.items()):
            connection.setdefault("allow_http", "true")
        kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
        return kinds[scheme](place, config=own, client_options=connection, retry_config=_RETRY)


#: By location; set by `configure`.
configured: dict[str, ObjectStore] = {}


def configure(settings: Settings) -> None:
    """Make these the stores of this process; nothing is connected yet.

    Raises:
      SettingsError: When one cannot work.
    """
    stores = {location: ObjectStore(location, given) for location, given in settings.object_stores.items()}
    configured.clear()
    configured.update(stores)
