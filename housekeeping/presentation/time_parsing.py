"""Parsing of the times and durations that operators type."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from housekeeping.core.errors import WrongArgument

_UNITS: Final = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
#: Schedules cannot be evaluated in the first and last years that datetime supports.
_LONGEST: Final = timedelta(days=3650)


def parse_past_time(text: str, now: datetime) -> datetime:
    """Return a time such as ``2026-11-20T03:00``, or the latest ``03:00``; UTC unless the text names a zone.

    Raises:
      WrongArgument: The text is not a time, or the time is more than ten years away.
    """
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = (int(part) for part in text.split(":"))
            today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return today if today <= now else today - timedelta(days=1)
        time = _aware(text)
        if abs(time - now) > _LONGEST:
            raise ValueError
        return time
    except (ValueError, OverflowError):
        raise WrongArgument(f"{text!r} is not a time; it should be such as 2026-11-20T03:00 or 03:00") from None


def parse_since(text: str, now: datetime) -> datetime:
    """Return the time a duration such as ``2h`` ago, or what `parse_past_time` returns.

    Raises:
      WrongArgument: The text is neither.
    """
    try:
        duration = _duration(text)
    except OverflowError:
        duration = _LONGEST
    try:
        return parse_past_time(text, now) if duration is None else now - min(duration, _LONGEST)
    except WrongArgument:
        raise WrongArgument(f"{text!r} is not a time; it should be such as 2h, 3d, 03:00 or 2026-11-20T03:00") from None


def parse_future_time(text: str, now: datetime) -> datetime:
    """Return a time such as ``2026-11-20T03:00``, the next ``03:00``, or a duration such as ``2h`` from now.

    Raises:
      WrongArgument: The text is not a time, or the time is past.
    """
    try:
        if (duration := _duration(text)) is not None:
            time = now + min(duration, _LONGEST)
        elif re.fullmatch(r"\d{1,2}:\d{2}", text):
            time = parse_past_time(text, now) + timedelta(days=1)
        else:
            time = _aware(text)
    except (ValueError, OverflowError):
        raise WrongArgument(
            f"{text!r} is not a time; it should be such as 2h, 30min, 03:00 or 2026-11-20T03:00"
        ) from None
    if time <= now:
        raise WrongArgument(f"{text!r} is past; it should be a future time, such as 2h or 03:00")
    return time


def _duration(text: str) -> timedelta | None:
    found = re.fullmatch(r"(\d+)\s*([a-z]+)", text.strip().lower())
    return None if found is None or found[2] not in _UNITS else timedelta(**{_UNITS[found[2]]: int(found[1])})


def _aware(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
