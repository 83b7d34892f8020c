"""Moments and lengths of time as people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from housekeeping.core.errors import WrongArgument

_UNITS: Final = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_LONGEST: Final = timedelta(days=3650)


def past_moment(text: str, now: datetime) -> datetime:
    """A moment such as ``2026-11-20T03:00``, or ``03:00`` for the last time it was that late; UTC unless it says.

    Raises:
      WrongArgument: When it is none, or more than ten years away.
    """
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = (int(part) for part in text.split(":"))
            today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return today if today <= now else today - timedelta(days=1)
        moment = _aware(text)
        # No schedule can be asked about the first or the last year that there is.
        if abs(moment - now) > _LONGEST:
            raise ValueError
        return moment
    except (ValueError, OverflowError):
        raise WrongArgument(f"{text!r} is no time; it should be such as 2026-11-20T03:00 or 03:00") from None


def since_moment(text: str, now: datetime) -> datetime:
    """Return a moment in the past: a length before now such as ``2h``, or as `past_moment`.

    Raises:
      WrongArgument: When it is none.
    """
    try:
        there = _length(text)
    except OverflowError:
        there = _LONGEST
    try:
        return past_moment(text, now) if there is None else now - min(there, _LONGEST)
    except WrongArgument:
        raise WrongArgument(f"{text!r} is no time; it should be such as 2h, 3d, 03:00 or 2026-11-20T03:00") from None


def coming_moment(text: str, now: datetime) -> datetime:
    """A moment to come: ``2026-11-20T03:00``, ``03:00`` for the next time, or a length from now such as ``2h``.

    Raises:
      WrongArgument: When it is none, or is past.
    """
    try:
        if (length := _length(text)) is not None:
            moment = now + min(length, _LONGEST)
        elif re.fullmatch(r"\d{1,2}:\d{2}", text):
            moment = past_moment(text, now) + timedelta(days=1)
        else:
            moment = _aware(text)
    except (ValueError, KeyError, OverflowError):
        raise WrongArgument(f"{text!r} is no time; it should be such as 2h, 30min, 03:00 or 2026-11-20T03:00") from None
    if moment <= now:
        raise WrongArgument(f"{text!r} is past; it should be a time to come, such as 2h or 03:00")
    return moment


def _length(text: str) -> timedelta | None:
    """Return a length of time such as ``2h``; None for what is none."""
    there = re.fullmatch(r"(\d+)\s*([a-z]+)", text.strip().lower())
    return None if there is None or there[2] not in _UNITS else timedelta(**{_UNITS[there[2]]: int(there[1])})


def _aware(text: str) -> datetime:
    given = datetime.fromisoformat(text)
    return given.replace(tzinfo=UTC) if given.tzinfo is None else given.astimezone(UTC)
