"""Object stores named in the settings: their URLs, clients whose requests end in bounded time, deletion of objects.

An object that is refused does not affect the others.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from housekeeping import (
    PREFIX,
    ObjectNotDeleted,
    ObjectStoreSettings,
    ObjectStoreUnavailable,
    Settings,
    SettingsError,
    error_line,
    how_to_install,
    mask_secrets,
    shortened,
)
from housekeeping import logger as named_logger

_EXAMPLES: Final = {
    "file": "file:///an/absolute/folder",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "memory": "memory:///",
}
#: Schemes for which obstore has only the protocol's request for several objects, also for a single one.
BULK_ONLY: Final = ("s3", "az")
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
RETRY: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}

#: Validity of a signed address: the request for it begins at once.
_SIGNED_FOR: Final = timedelta(minutes=5)

_SECRET: Final = ("secret", "token", "key", "password", "sas", "credential", "signature")
_LONGEST_TEXT: Final = 300
#: The error code in the answers of S3 and Azure; the rest of the answer is of no use in a log line.
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
#: End of the first line of an error without an answer. The last cause in the lines below says why there is none.
_NO_ANSWER: Final = "error sending request"
#: The part of a signed address that must not be shown.
_QUERY: Final = re.compile(r"(?<=/)([^\s?]*)\?\S+")
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

    def deletable(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return a client for each key whose only object, with an empty path, is the one of that key.

        Their deletion is HTTP's DELETE with a signed address. obstore itself has no such request for S3 and Azure.

        Raises:
          Exception: obstore cannot sign, for example because its Azure credentials are a signature themselves.
        """
        import obstore
        from obstore.store import HTTPStore

        addresses = obstore.sign(self.client(), "DELETE", list(keys), _SIGNED_FOR)
        options: Any = self._connection()
        return {
            key: HTTPStore.from_url(address, client_options=options, retry_config=RETRY)
            for key, address in zip(keys, addresses, strict=True)
        }

    def paths_below(self, prefix: str) -> Iterator[list[str]]:
        """Yield the paths of the objects whose path begins with a prefix that ends with a slash, some at a time.

        Raises:
          ObjectStoreUnavailable: When the store does not list them.
        """
        import obstore

        self.check_access()
        try:
            for found in obstore.list(self.client(), f"{self.prefix}{prefix}"):
                yield [each["path"].removeprefix(self.prefix) for each in found]
        except Exception as error:
            raise self.unavailable(type(error).__name__) from None  # its text may have the prefix

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
        text = _QUERY.sub(r"\1", text)
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
        store_options: Any = self._store_options()
        kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
        return kinds[self.scheme](
            self.place, config=store_options, client_options=self._connection(), retry_config=RETRY
        )

    def _store_options(self) -> dict[str, str]:
        return {name: value for name, value in self._options.items() if name not in _CONNECTION}

    def _connection(self) -> Any:
        connection = {**_CLIENT, **{name: value for name, value in self._options.items() if name in _CONNECTION}}
        plain = [name for name, value in self._store_options().items() if value.startswith("http://")]
        if any("endpoint" in name for name in plain):
            connection.setdefault("allow_http", "true")
        return connection


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


logger = named_logger(__name__)

#: Concurrent requests, each for one object.
_AT_ONCE: Final = 32
#: Local files that are deleted together at most; it takes a few milliseconds.
_FILES_AT_ONCE: Final = 256
#: Concurrent requests at first, and after one was throttled; then twice as many each time. If all of them are
#: throttled, so would be the rest.
_PROBES: Final = 4
#: How obstore names the answers of a store that has too much to do.
_THROTTLED: Final = re.compile(r"status code: (429|503)\b")
#: How obstore names the answers of a store that does not have the request that it uses, or that confirm no key.
_NO_SUCH_REQUEST: Final = re.compile(r"status code: (?:4(?!29)\d\d|501)\b|Got invalid \w+( \w+)? response")
#: How a store names a missing object in an answer about several.
_NO_SUCH_KEY: Final = "(code: NoSuchKey)"
#: After this many refusals without a deletion, the store itself refuses; most likely a permission is missing.
_REFUSES_ALL: Final = 100
#: Open a folder for `unlinkat`. On Linux this needs no permission to read it.
_FOLDER: Final = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
_HAS_PROC: Final = os.path.isdir("/proc/self/fd")

#: The error of each object, by key; None where it was deleted.
Answers = dict[str, BaseException | None]


@dataclass(slots=True)
class Deleted:
    """Results of a deletion. An object in neither attribute was not tried, or its state is unknown.

    Attributes:
      gone: Paths whose object no longer exists, or never did.
      refused: Path -> the reason why its object may still exist.
    """

    gone: list[str] = field(default_factory=list)
    refused: dict[str, ObjectNotDeleted] = field(default_factory=dict)


class StoreDeletion:
    """Deletions of one run in one store.

    Each object is a request of its own. obstore can delete a thousand objects by one request, but does not say which
    of them the store confirmed: an object that the answer does not name counts as deleted.

    Parameters:
      hides_keys: Whether errors have the type of the store's error only, because its text may have keys of objects.

    Attributes:
      unavailable: The reason why the rest of the run ignores the store, or None while it works.
      at_once: Number of objects for the next call of `delete`.
    """

    def __init__(self, store: ObjectStore, *, hides_keys: bool = False) -> None:
        self.store = store
        self._hides_keys = hides_keys
        self.unavailable: ObjectStoreUnavailable | None = None
        self._any_deleted = False
        self._refusals = 0
        self.at_once = _AT_ONCE if store.scheme in LOCAL else _PROBES
        self._most_at_once = _FILES_AT_ONCE if store.scheme in LOCAL else _AT_ONCE
        self._by_http = False
        self._is_available()

    def delete(self, paths: Sequence[str]) -> Deleted:
        """Delete the objects concurrently.

        Never raises because of the store: failures are in the result or in `unavailable`.
        """
        found = Deleted()
        try:
            answers = self._answers([self.store.prefix + path for path in paths])
        except ObjectStoreUnavailable as error:
            self._mark_unavailable(error)
            return found
        if any(answer is not None for answer in answers.values()) and not self._is_available():
            return found
        throttled = [_is_throttled(answer) for answer in answers.values()]
        if len(answers) >= _PROBES and all(throttled):
            self._mark_unavailable(self.store.unavailable(self._described(answers[self.store.prefix + paths[0]])))
            return found
        for path in paths:
            answer = answers[self.store.prefix + path]
            # The store answers, so an object that it does not find is gone.
            if answer is None or _is_missing(answer):
                found.gone.append(path)
                self._any_deleted = self._any_deleted or answer is None
            else:
                found.refused[path] = ObjectNotDeleted(self._described(answer))
                self._refusals += 1
        if any(throttled):
            self.at_once = _PROBES
        elif found.gone:
            self.at_once = min(2 * self.at_once, self._most_at_once)
        if self._refusals >= _REFUSES_ALL and not self._any_deleted:
            last = next(reversed(found.refused.values()))
            self._mark_unavailable(self.store.unavailable(f"refuses every deletion: {last}"))
        return found

    def _described(self, answer: BaseException | None) -> str:
        return type(answer).__name__ if self._hides_keys else self.store.describe_error(answer)

    def _answers(self, keys: Sequence[str]) -> Answers:
        client = self.store.client()
        if self.store.scheme == "file":
            # The client would follow a symbolic link out of the folder.
            root = os.path.realpath(self.store.place)
            return {key: _error_of(delete_file, root, key) for key in keys}
        import obstore

        if self.store.scheme in LOCAL:
            return {key: _error_of(obstore.delete, client, key) for key in keys}
        answers: Answers = {}
        if not self._by_http:
            answers = _concurrently(keys, lambda key: obstore.delete_async(client, key))
        if self.store.scheme in BULK_ONLY:
            # obstore uses the request for several objects for a single one as well, and not every store has it.
            answers |= self._by_delete([key for key in keys if key not in answers or _has_no_request(answers[key])])
        missing = [key for key, answer in answers.items() if answer is not None and _is_missing(answer)]
        return answers | self._found(missing)

    def _by_delete(self, keys: Sequence[str]) -> Answers:
        """Delete objects by HTTP's DELETE; return nothing if obstore cannot sign it."""
        if not keys:
            return {}
        import obstore

        try:
            clients = self.store.deletable(keys)
        except Exception as error:
            return dict.fromkeys(keys, error) if self._by_http else {}
        answers = _concurrently(keys, lambda key: obstore.delete_async(clients[key], ""))
        self._by_http = self._by_http or any(answer is None for answer in answers.values())
        return answers

    def _found(self, keys: Sequence[str]) -> Answers:
        """Return an error for each of these objects that the store has although it answered 404 to its deletion."""
        import obstore

        client, found = self.store.client(), Answers()
        for key, answer in _concurrently(keys, lambda key: obstore.head_async(client, key)).items():
            if answer is None:
                found[key] = ObjectNotDeleted("the store answers 404 to its deletion, but the object exists")
            elif self.store.scheme == "s3" and not _is_missing(answer):
                # S3 answers 204 to the deletion of a missing object. The others answer 404, and may refuse to look.
                found[key] = answer
        return found

    def _is_available(self) -> bool:
        try:
            self.store.check_access()
        except ObjectStoreUnavailable as error:
            self._mark_unavailable(error)
        return self.unavailable is None

    def _mark_unavailable(self, error: ObjectStoreUnavailable) -> None:
        self.unavailable = error
        logger.error("Object store unavailable; ignored for this run", location=self.store.location, error=str(error))


def delete_file(root: str, key: str) -> None:
    """Delete the file with this path below the root. A symbolic link is deleted itself, not its target.

    Parameters:
      root: A folder whose path has no symbolic links.

    Raises:
      ObjectNotDeleted: When a symbolic link leads out of the root.
      OSError: When the file was not deleted, for example because it does not exist.

    Note: If the folder is moved out of the root during the call, the file is deleted there.
    """
    folder, name = os.path.split(os.path.join(root, key))
    opened = os.open(folder, _FOLDER)
    try:
        # Where the open folder is, and not where its path leads by now.
        where = os.readlink(f"/proc/self/fd/{opened}") if _HAS_PROC else os.path.realpath(folder)
        if not f"{where}/".startswith(f"{root}/"):
            raise ObjectNotDeleted(f"a symbolic link leads the path {key!r} out of the store's folder")
        os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)


def _is_throttled(answer: BaseException | None) -> bool:
    return answer is not None and _THROTTLED.search(_first_line(answer)) is not None


def _has_no_request(answer: BaseException | None) -> bool:
    return answer is not None and _NO_SUCH_REQUEST.search(_first_line(answer)) is not None


def _first_line(answer: BaseException) -> str:
    return str(answer).partition("\n")[0]


def _is_missing(answer: BaseException) -> bool:
    # No file can be below another file, or have a name that is too long.
    is_no_file = isinstance(answer, OSError) and answer.errno in (errno.ENOTDIR, errno.ENAMETOOLONG)
    return is_no_file or isinstance(answer, FileNotFoundError) or _first_line(answer).endswith(_NO_SUCH_KEY)


def _concurrently(keys: Sequence[str], request: Callable[[str], Awaitable[object]]) -> Answers:
    """Send a request for each key; return its error, or None."""
    # Imported here, because every command imports this module, but only runs of its worker send requests.
    import asyncio

    async def send() -> list[Any]:
        return await asyncio.gather(*map(request, keys), return_exceptions=True)

    answers = asyncio.run(send()) if keys else []
    return {
        key: answer if isinstance(answer, BaseException) else None for key, answer in zip(keys, answers, strict=True)
    }


def _error_of(delete: Callable[[Any, str], object], place: Any, key: str) -> Exception | None:
    try:
        delete(place, key)
    except Exception as error:
        return error
    return None
