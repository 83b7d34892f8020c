"""Erasure of persons and tenants: `erase` requests one, and the actors of `declare` execute it.

| Chapter | Answers |
|---|---|
| `graph` | which tables reach a subject, and what is decided about each |
| `stages` | which rows belong to it, and how they are changed |
| `work` | what happens in which order, and how it is proved that nothing is left |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from housekeeping.core.errors import DeclarationError, ErasureInterrupted, SettingsError, UnknownSubject, WrongArgument
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.logs import typed_error_line
from housekeeping.core.settings import Settings
from housekeeping.engine.registry import imported
from housekeeping.ledger import erasures
from housekeeping.ledger.operators import command_line_user
from housekeeping.sweeps.declaration import QUEUE, Sweep
from housekeeping.sweeps.send import actor_named, remember

if TYPE_CHECKING:
    from dramatiq import Actor, Broker

    from housekeeping.sweeps.subjects import Subject

logger = named_logger(__name__)

ERASE: Final = "housekeeping.erase"
ERASURES: Final = "housekeeping.erasures"
#: Of `housekeeping.erase`: it is longer than any erasure, whose runs end by themselves.
_TIME_LIMIT: Final = timedelta(days=1)

_settings: Settings | None = None


def erase(subject: str, key: Any, *, reason: str | None = None, requester: str | None = None) -> int:
    """Request the erasure of a person or tenant, and return its number. A worker executes it.

    ::

        housekeeping.erase("person", 4711, reason="request of 2026-05-01")

    The message has the number alone. If it is lost, a scheduler sends it again. While an erasure of the same subject
    has not ended, its number is returned. The request is committed at once, also within a transaction of the
    application, whose rollback does not withdraw it: call it after the commit.

    Parameters:
      subject: Name of a `Subject` in ``SUBJECTS`` of a module of ``HOUSEKEEPING_SWEEPS``.
      key: Its primary key, or the value of its column `by`. A tuple is always the primary key.
      reason: Why it is erased; in the receipt. It must not identify the person.
      requester: Who requests it; in the receipt. Default: the user of this process.

    Raises:
      UnknownSubject: There is no subject of this name, or no such row, and none was erased.
      DeclarationError: Several rows have this value, in the column `by` or as the primary key; or there is no such
        column. Nothing was requested.
      WrongArgument: The reason or the requester contains a NUL or a lone surrogate.
      SettingsError: ``HOUSEKEEPING_ERASURE_KEY`` is missing, or lacks the secret of an earlier erasure.
      peewee.PeeweeException: A database does not answer.
    """
    settings = _settings or Settings.load()
    number = request(subjects_of(settings), settings, subject, key, requester or command_line_user(), reason)
    send(number)
    return number


def use_settings(settings: Settings) -> None:
    """Use these settings for requests of this process, in place of those of its environment."""
    global _settings
    _settings = settings


def subjects_of(settings: Settings) -> dict[str, Subject]:
    """Return the persons and tenants that can be erased, by name, as the modules of sweeps declare them.

    Raises:
      SettingsError: A module cannot be imported, or a subject's database is not configured.
      DeclarationError: Two subjects have the same name.
    """
    found: dict[str, Subject] = {}
    for family in imported(settings.sweeps):
        for subject in family.subjects:
            if found.setdefault(subject.name, subject) is not subject:
                raise DeclarationError(
                    f"{family.name}: there is a subject {subject.name!r} already; give one of them another name"
                )
            if subject.database not in settings.database_names:
                raise SettingsError(
                    f"the subject {subject.name!r} has the database {subject.database!r}; the databases are "
                    f"{', '.join(settings.database_names)} (HOUSEKEEPING_DATABASES)"
                )
    return found


def request(
    subjects: Mapping[str, Subject], settings: Settings, name: str, key: Any, requester: str, reason: str | None
) -> int:
    """Record that a subject is to be erased, and return the number of its erasure. See `erase`."""
    require_storable(reason, requester)
    texts, digest = identify(subjects, settings, name, key)
    return erasures.request(name, texts, digest, requester=requester, reason=reason)


def require_storable(reason: str | None, requester: str | None) -> None:
    """Raise WrongArgument if PostgreSQL cannot store the reason or the requester."""
    for name, text in (("reason", reason), ("requester", requester)):
        if re.search("[\0\ud800-\udfff]", text or ""):
            raise WrongArgument(f"the {name} contains a NUL, or bytes that are not UTF-8; write it without them")


def identify(subjects: Mapping[str, Subject], settings: Settings, name: str, key: Any) -> tuple[list[str], str]:
    """Return the values of a subject's primary key as PostgreSQL writes them, and its HMAC. Raises as `erase`."""
    from housekeeping.erasures.work import find_key

    secret = settings.require_erasure_key()
    if name not in subjects:
        raise UnknownSubject(f"there is no subject {name!r}; the subjects are {', '.join(subjects) or 'none'}")
    texts, exists = find_key(subjects[name], key)
    erasures.require_known_secrets(secret)

    def digests(of_key: list[str]) -> list[str]:
        return [erasures.key_hmac(each, name, of_key) for each in erasures.each_secret(secret)]

    digest = erasures.erased_as(name, digests(texts))
    if not exists and digest is None:
        raise UnknownSubject(f"there is no {name} with this key (HMAC {digests(texts)[0][:12]})")
    if exists and not isinstance(key, tuple | list):
        try:
            primary, _ = find_key(subjects[name], (key,))
        except UnknownSubject:  # it cannot be a primary key
            primary = texts
        if primary != texts and erasures.erased_as(name, digests(primary)) is not None:
            raise DeclarationError(
                f"the {name} with this primary key was erased, and another one has this value in the column "
                f"{subjects[name].by}; give the primary key of the other one; in Python, a tuple is always "
                "a primary key"
            )
    # The HMAC of an earlier erasure, also by a former secret, so that the two are known to be of one subject.
    return texts, digest or digests(texts)[0]


def send(number: int) -> None:
    """Send the message that executes an erasure. If that fails, the scheduler sends it later."""
    try:
        actor_named(ERASE).send(number)
    except Exception as error:
        logger.warning("Message not sent; the scheduler sends it", actor=ERASE, error=typed_error_line(error))


def declare(broker: Broker, settings: Settings, sweeps: Collection[Sweep]) -> dict[str, Actor[..., Any]]:
    """Declare the actors that execute erasures, if subjects are declared; return them by name.

    Parameters:
      sweeps: All declared sweeps, whose holds erasures respect.

    Raises:
      SettingsError, DeclarationError: As `subjects_of`.
    """
    subjects = subjects_of(settings) if settings.database_url is not None else {}
    if not subjects:
        return {}
    use_settings(settings)
    import dramatiq

    def execute(number: int) -> None:
        from housekeeping.brokers.dramatiq_internals import Requeue
        from housekeeping.core.telemetry import current_message
        from housekeeping.erasures import work

        message = current_message.get()
        try:
            work.execute(number, settings, subjects, sweeps, message.stopping if message else None)
        except ErasureInterrupted as error:
            raise Requeue(str(error), timedelta(seconds=error.after_s)) from None

    def resend() -> None:
        for number in erasures.unfinished():
            send(number)

    options: dict[str, Any] = {"broker": broker, "queue_name": QUEUE, "idempotent": True}
    limit = int(_TIME_LIMIT.total_seconds() * 1000)
    erasing = dramatiq.actor(actor_name=ERASE, deduplicate="until_executed", time_limit=limit, **options)
    found: list[Any] = [erasing(execute), dramatiq.actor(actor_name=ERASURES, schedule="* * * * *", **options)(resend)]
    for each in found:
        remember(each)
    return {each.actor_name: each for each in found}
