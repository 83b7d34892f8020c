"""Log lines on stderr: JSON objects for machines, readable lines on a terminal.

Also the texts in them: without secrets, without control characters, short enough for a line, with nouns that agree with
their numbers. The handler writes one line or many lines at a time.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import housekeeping

if TYPE_CHECKING:
    import structlog
    from structlog.typing import EventDict, WrappedLogger


_KEPT: Final = frozenset("\n ")
_SCHEME: Final = r"[a-z][a-z0-9+.-]{0,30}://"
#: ``scheme://user:password@`` anywhere in a text. A password may contain characters that should have been
#: percent-encoded, so it extends to the last ``@`` before white space or the next URL.
_URL_PASSWORD: Final = rf"(?i)(?P<before>{_SCHEME}[^\s:/@]*:)(?:(?!{_SCHEME})\S)+(?=@)"
#: ``password=...`` of libpq, ``"password": "..."``, headers, and the parameters of object stores and brokers. In JSON
#: within JSON, quotes are preceded by backslashes.
_NAMED_SECRET: Final = (
    r"(?i)(?P<before>(?:passw(?:or)?d|pwd|secret|token|signature|credential|authorization|cookie|(?:ping|webhook)_url"
    r"|(?:api|access|account|private|erasure)[_-]?key)[a-z_-]{0,40}\\*[\"']?\s*[=:]\s*)(?:"
    r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\"']\S+"
    r"|(?P<quote>\\+[\"'])(?:(?!(?<!\\)(?P=quote))[\s\S])*(?:(?P=quote)|\Z)"
    r"|\[[^\]]*(?:\]|\Z)|\{[^}]*(?:\}|\Z)"
    # Of a header: a scheme before the secret, and further cookies after the first one.
    r"|(?:(?:basic|bearer|digest|negotiate|token)\s+)?[^\s&\"']+(?:(?<=;)\s+[^\s=;\"']+=[^\s\"']*)*)"
)
#: One of them is in each text with such a secret. To search for all of them takes a hundredth of the time.
_SECRET_WORDS: Final = tuple("passw pwd secret token signature credential authorization cookie _url key".split())
#: ``Bearer ...`` without the name of its header, but not the words after it in a sentence.
_BEARER: Final = (
    r"(?i)\b(?P<before>bearer\s+)"
    r"(?!(?:tokens?|auth\w*|scheme|realm|error|is|was|or|and|in|the|for|with|of)\b)[\w.~+/=-]+"
)
#: JSON Web Tokens: parts in base64, of which the first one is an object.
_JWT: Final = r"\beyJ[\w-]{5,}(?:\.[\w-]*){2,4}"
_PEM: Final = r"(?P<before>-----BEGIN [^-\n]{1,40}-----)[\s\S]*?(?P<end>-----END [^-\n]{1,40}-----|\Z)"
#: Compiles a pattern when the first text needs it, because that takes longer than the rest of this module's import.
_compiled: Final = cache(re.compile)
#: What each secret contains. The search for the secrets takes longer than the rest of a log line.
_SIGNS: Final = (":", "=", "eyJ", "earer ", "-----BEGIN")
#: How libpq begins the line of each host that it has tried.
_ATTEMPT: Final = "connection to server "


def mask_secrets(text: str) -> str:
    """Replace every password, key and token in the text by ``***``; user, host and path stay readable."""
    if "://" in text:
        text = _compiled(_URL_PASSWORD).sub(r"\g<before>***", text)
    if "-----BEGIN" in text:
        text = _compiled(_PEM).sub(r"\g<before>***\g<end>", text)
    lower = text.lower()
    # Other alphabets have characters that the pattern takes for a letter of these words.
    if not text.isascii() or any(word in lower for word in _SECRET_WORDS):
        text = _compiled(_NAMED_SECRET).sub(r"\g<before>***", text)
    if "eyJ" in text:
        text = _compiled(_JWT).sub("***", text)
    if "earer" in text or "EARER" in text:
        text = _compiled(_BEARER).sub(r"\g<before>***", text)
    return text


def is_secret(name: str) -> bool:
    """Return whether a value with this name is a secret, such as ``smtp_password``."""
    return _compiled(_NAMED_SECRET).search(f"{name}=x") is not None


def printable(text: str) -> str:
    """Write every character that is not plainly visible as an escape: ``\\x1b``, ``\\u202e``.

    A terminal obeys control characters: they can hide lines, change the window's title, or paste commands. Line ends
    stay, and tabs become spaces.
    """
    if text.isprintable():  # most texts; a page has thousands
        return text
    return "".join(_visible(character) for character in text.expandtabs(4))


def in_one_line(text: str, width: int) -> str:
    """Return the text `printable`, its line ends escaped, cut to `width` characters with an ellipsis."""
    # Cut twice, because escapes are longer than what they replace.
    line = printable(text[: width + 1].replace("\n", "\\n").replace("\t", " "))
    return line if len(line) <= width else f"{line[: width - 3]}..."


def shortened(text: str, width: int) -> str:
    """Return the text with its middle left out if it is longer than `width` characters.

    The end is kept because an error that quotes a name explains the problem after it.
    """
    if len(text) <= width:
        return text
    half = (width - 3) // 2
    return f"{text[: width - 3 - half]}...{text[-half:]}"


def error_line(error: BaseException) -> str:
    """Return the first line of the error's text, passwords masked; the name of its type if it has no text."""
    if isinstance(error, KeyError):
        return typed_error_line(error)  # the text of a KeyError is the key alone
    return _first_line(error) or type(error).__name__


def typed_error_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text, passwords masked."""
    line = _first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _first_line(error: BaseException) -> str:
    return first_line(str(error))


def first_line(text: str) -> str:
    """Return the first line of a text in a form that PostgreSQL can store, passwords masked.

    If libpq has tried several hosts, its text has a line for each. All of them are returned: the first host may be only
    a replica, and the second one the primary that has failed.
    """
    lines = text.strip().splitlines()
    if not lines:
        return ""
    attempts = [line for line in lines if line.startswith(_ATTEMPT)]
    line = "; ".join(attempts) if lines[0] in attempts else lines[0]
    # Escaped because PostgreSQL stores neither NUL nor lone surrogates, and the line is stored in the ledger.
    storable = line.replace("\0", r"\x00").encode(errors="backslashreplace").decode()
    return mask_secrets(storable)


def _visible(character: str) -> str:
    if character in _KEPT or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


#: Types whose values are written out.
_WRITTEN_OUT: Final = bool | int | float | str | bytes | list | tuple | dict | set | frozenset | timedelta


def described(value: object, most: int = 60) -> str:
    """Return a wrong value as text for an error. An object whose text may need a query is shown by its type."""
    if value is None or isinstance(value, type | _WRITTEN_OUT):
        return repr(value)[:most]
    if (name := getattr(value, "__name__", None)) is not None and callable(value):
        return "a lambda" if name == "<lambda>" else f"the function {name}"
    return f"an object of type {type(value).__name__}"


#: Bytes that a pipe writes at once. Longer writes can be mixed with lines of another process on the same pipe.
_ATOMIC_WRITE: Final = select.PIPE_BUF
#: The record that this thread's rows are copies of, and those collected by each handler; None outside of `log_rows`.
_rows: Final[ContextVar[tuple[logging.LogRecord, dict[StderrHandler, list[logging.LogRecord]]] | None]] = ContextVar(
    "rows", default=None
)
_MOST_COLLECTED: Final = 1000  # records of about 2 kB


class StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stderr`, so that lines and a progress display do not mix."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        # periodiq surrounds its banner with empty lines.
        return record.msg != "" and bool(super().filter(record))

    def handle(self, record: logging.LogRecord) -> bool:
        # The base class holds the lock here. Only `write` needs it.
        passed = self.filter(record)
        if passed:
            self.emit(record)
        return passed

    def emit(self, record: logging.LogRecord) -> None:
        if (rows := _rows.get()) is None:
            self._emit_one(record)
            return
        original, collected = rows
        if record.created != original.created or record.msg is not original.msg:  # a line between two rows
            self.emit_rows(collected.pop(self, []))
            self._emit_one(record)
            return
        records = collected.setdefault(self, [])
        records.append(record)
        if len(records) >= _MOST_COLLECTED:
            self.emit_rows(collected.pop(self))

    def emit_rows(self, records: Sequence[logging.LogRecord]) -> None:
        """Write the lines of rows. Those that differ only in the values of their fields are formatted together."""
        for form, group in itertools.groupby(records, _form):
            alike = list(group)
            if form is not None and isinstance(self.formatter, _JsonFormatter):
                with suppress(Exception):  # one of them cannot be formatted
                    self.write(self.formatter.format_alike(alike))
                    continue
            for record in alike:
                self._emit_one(record)

    def _emit_one(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self.write([line])

    def write(self, lines: Iterable[str]) -> None:
        """Write lines in few chunks, none of them split; never raises. Lines that stderr does not accept are lost."""
        assert self.lock is not None
        try:
            # Not `acquire` and `release`: an interrupt between `acquire` and `try` would leave it locked forever.
            with self.lock:
                self._write(lines)
        except BaseException:
            # From Python 3.14 on, an interrupt can also arrive after the lock is locked and before the block.
            with suppress(RuntimeError):  # this thread has unlocked it
                self.lock.release()
            raise

    def _write(self, lines: Iterable[str]) -> None:
        try:
            for chunk in _chunks(lines):
                self.stream.write(chunk)
            self.stream.flush()
        except Exception:
            # A full disk or a closed pipe cannot be reported anywhere else, and the work continues.
            return

    def handleError(self, record: logging.LogRecord) -> None:
        # A library logged with arguments that do not fit. logging would print a traceback, which is no log line.
        error = traceback.format_exception_only(*sys.exc_info()[:2])[-1].strip()
        # A message that is not a string can fail again when it is converted.
        line = record.msg if isinstance(record.msg, str) else f"<{type(record.msg).__name__}>"
        logging.getLogger("housekeeping.core.logs").error(
            "A log line could not be written", extra={"line": line, "of": record.name, "error": error}
        )


def _form(record: logging.LogRecord) -> tuple[Any, ...] | None:
    """Return what lines that are formatted together have in common; None for a record that is formatted by itself."""
    if record.args or record.exc_info or record.stack_info:
        return None
    return record.msg, record.name, record.levelname, record.created, *vars(record)


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    chunk: list[str] = []
    length = 0
    for line in lines:
        size = len(line.encode(errors="replace")) + 1
        if chunk and length + size > _ATOMIC_WRITE:
            yield "".join(chunk)
            chunk, length = [], 0
        chunk.append(f"{line}\n")
        length += size
    if chunk:
        yield "".join(chunk)


Format = Literal["json", "console"]

#: Libraries whose INFO lines concern only their own developers.
_QUIET: Final = ("pika", "urllib3", "botocore")
_JSON: Final = json.JSONEncoder(check_circular=False)  # `to_log_value` ends cycles by its depth
#: Types whose JSON has no line end, so that a list of them has a line for each.
_SINGLE: Final = frozenset({str, int, bool, type(None)})
_ONE_BY_LINE: Final = json.JSONEncoder(check_circular=False, separators=("\n", ": "))
_RECORD_ATTRIBUTES: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
_RESERVED: Final = _RECORD_ATTRIBUTES - {"exc_info", "stack_info"}
_DEPTH: Final = 6  # levels of nesting that are kept; deeper values are written as text


def to_log_value(value: Any, depth: int = _DEPTH) -> Any:
    """Return the value as JSON types, with passwords masked; never raises."""
    if type(value) is str:
        return _masked(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict) and depth:
        return {_text(key): to_log_value(each, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        return [to_log_value(each, depth - 1) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return _masked(str(value))
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _masked(text: str) -> str:
    return mask_secrets(text) if any(sign in text for sign in _SIGNS) else text


def _printable(value: Any, *, keep_lines: bool) -> Any:
    if isinstance(value, str):
        # A line end in a name would start another log line. Tracebacks keep their line ends.
        return printable(value) if keep_lines else printable(value).replace("\n", "\\n")
    return value


@lru_cache(maxsize=1)  # rows that are logged together differ in none of these
def _trailing_fields(level: str, name: str, created: float) -> dict[str, Any]:
    import structlog

    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    fields = {**structlog.stdlib.add_log_level(None, level.lower(), {}), "logger": name, "timestamp": at}
    return _to_log_values(fields)


def _to_log_values(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): to_log_value(value) for name, value in fields.items()}


class _LineFormatter(logging.Formatter):
    """Formatter that writes a record as one line: event, context, fields, logger, timestamp."""

    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.render: Final = render

    def format(self, record: logging.LogRecord) -> str:
        return self.render(self.fields(record))

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields of the line as JSON types."""
        import structlog

        event = record.getMessage()
        fields: EventDict = {"event": event}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        if record.stack_info:
            fields["stack_info"] = record.stack_info
        structlog.contextvars.merge_contextvars(None, "", fields)
        fields.update({name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES})
        # Event, level, logger and timestamp come last, so that no field of the caller replaces them.
        fields["event"] = event
        trailing = _trailing_fields(record.levelname, record.name, record.created)
        if "exc_info" in fields:
            # Before passwords are masked, because the exception's text may quote a URL.
            fields = structlog.processors.format_exc_info(None, "", {**fields, **trailing})
        return {**_to_log_values(fields), **trailing}


class _JsonFormatter(_LineFormatter):
    """Formatter that writes JSON. A thousand lines that are formatted together take a tenth of the time."""

    def __init__(self) -> None:
        super().__init__(_JSON.encode)

    def format_alike(self, records: Sequence[logging.LogRecord]) -> list[str]:
        """Return the lines of records with the same `_form`."""
        first = records[0]
        fields = self.fields(first)
        fixed = {"event", *_trailing_fields(first.levelname, first.name, first.created)}
        given = list(map(vars, records))
        columns: dict[str, list[str]] = {}
        for name in given[0].keys() - _RECORD_ATTRIBUTES - fixed:
            values = [each[name] for each in given]
            if len(set(map(id, values))) > 1:
                columns[str(name)] = _encode_each(values)
        encoded = {
            name: "%s" if name in columns else _JSON.encode(value).replace("%", "%%") for name, value in fields.items()
        }
        names = (_JSON.encode(name).replace("%", "%%") for name in fields)
        template = "{" + ", ".join(map(": ".join, zip(names, encoded.values(), strict=True))) + "}"
        if not columns:
            return [template % ()] * len(records)
        return [
            template % values for values in zip(*(columns[name] for name in fields if name in columns), strict=True)
        ]


def _encode_each(values: Sequence[Any]) -> list[str]:
    """Return the JSON of each value."""
    if set(map(type, values)) <= _SINGLE:
        text = _ONE_BY_LINE.encode(values)
        if not any(sign in text for sign in _SIGNS):
            return text[1:-1].split("\n")
    return [_JSON.encode(to_log_value(value)) for value in values]


def _field_name(name: str) -> str:
    # logging raises KeyError for an extra field with the name of one of its own.
    return f"{name}_" if name in _RESERVED else name


def _rename_reserved(_: WrappedLogger, __: str, event: Mapping[str, Any]) -> dict[str, Any]:
    return {_field_name(name): value for name, value in event.items()}


#: Modules that call actors.
_CALLERS: Final = ("dramatiq.", "housekeeping.middleware.", "housekeeping.core.interrupts")


def leave_out_callers(error: BaseException) -> None:
    """Remove the frames above the actor from the traceback. They show nothing of its error, and formatting is slow."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
        frames = frames.tb_next
    if frames is not None:  # otherwise a hook failed
        error.__traceback__ = frames


class _WorkerLines(logging.Filter):
    """Filter that lowers the line for a skipped message to INFO, and lets a traceback begin with the actor."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            leave_out_callers(error)
            record.exc_info = type(error), error, error.__traceback__
        if record.msg != "Message %s was skipped.":
            return True
        # A skip, as for a held lease, is no problem.
        record.levelno, record.levelname = logging.INFO, "INFO"
        return logging.getLogger().isEnabledFor(logging.INFO)


def configure(level: str = "INFO", form: Format | None = None) -> None:
    """Write every log line of this process, those of libraries included, to stderr.

    Replaces the handlers of the root logger. Meant for the library's own processes: the command line,
    ``dramatiq housekeeping.app`` and ``periodiq housekeeping.app``. Importing the library does not call it.

    Parameters:
      level: The lowest level that is written.
      form: ``json`` or ``console``; by default ``console`` if stderr is a terminal.
    """
    form = form or ("console" if sys.stderr.isatty() else "json")
    handler = StderrHandler()
    # JSON escapes everything that a terminal would obey.
    handler.setFormatter(_JsonFormatter() if form == "json" else _LineFormatter(_console()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("dramatiq.worker.WorkerThread").addFilter(_WorkerLines())
    logging.captureWarnings(True)


def _console() -> Callable[[dict[str, Any]], str]:
    # https://no-color.org
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    @cache
    def renderer() -> structlog.dev.ConsoleRenderer:
        import structlog

        return structlog.dev.ConsoleRenderer(
            colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )

    def render(fields: dict[str, Any]) -> str:
        # Names of objects and refs can contain control characters, which a terminal would obey.
        shown = {printable(name): _printable(value, keep_lines=name == "exception") for name, value in fields.items()}
        return renderer()(None, "", shown)

    return render


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger that writes keywords as fields: ``logger(__name__).info("event", rows=3)``.

    It uses the standard library's logging and no global configuration of structlog. In an application with its own
    logging configuration the fields arrive as ``extra``.
    """
    return cast("structlog.stdlib.BoundLogger", _Logger(name))


class _Logger:
    """Logger that imports structlog with its first line, because structlog imports much more."""

    def __init__(self, name: str) -> None:
        self._name: Final = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        bound = structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                _rename_reserved,
                structlog.stdlib.render_to_log_kwargs,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        ).bind()
        found = getattr(bound, method)
        setattr(self, method, found)
        return found


def log_rows(name: str, level: int, event: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Log one line for each row, with its items as fields: ``logger(name).log(level, event, **row)``.

    Each row has a record that passes through all filters and handlers. `StderrHandler` writes their lines at once.
    """
    standard_logger = logging.getLogger(name)
    if not standard_logger.isEnabledFor(level):
        return
    import structlog

    file, line, *_ = standard_logger.findCaller(stacklevel=2)
    context = _rename_reserved(standard_logger, "", structlog.contextvars.get_contextvars())
    shared = standard_logger.makeRecord(name, level, file, line, event, (), None, extra=context)
    collected: dict[StderrHandler, list[logging.LogRecord]] = {}
    token = _rows.set((shared, collected))
    try:
        for row in rows:
            # A copy costs a third of a new record.
            record = shared.__class__.__new__(shared.__class__)
            record.__dict__ = {
                **vars(shared),
                **(row if _RESERVED.isdisjoint(row) else _rename_reserved(standard_logger, "", row)),
            }
            standard_logger.handle(record)
    finally:
        _rows.reset(token)
        for handler, records in collected.items():
            handler.emit_rows(records)


#: The distribution's name. The name of the import package belongs to another project on the public index.
DISTRIBUTION: Final = "dramatiq-housekeeping"


def counted(number: float, noun: str, nouns: str | None = None) -> str:
    """Return the number and its noun: ``1 error``, ``0 errors``, ``1,234 queries``.

    Parameters:
      nouns: The plural, if it is not the noun followed by an s.
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def format_size(size: float | None) -> str:
    """Return a number of bytes in the unit that fits: ``0 B``, ``8 kB``, ``1.5 GB``, ``-3 MB``; ``?`` if unknown."""
    if size is None:
        return "?"
    unit, *others = ("B", "kB", "MB", "GB", "TB")
    while others and abs(round(size, 1)) >= 1_000:
        size, unit = size / 1_024, others.pop(0)
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def format_duration(seconds: float | None) -> str:
    """Return a duration in the unit that fits: ``12 ms``, ``3.4 s``, ``5 min``, ``2 h``, ``3 d``."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{max(0, seconds) * 1000:.0f} ms"
    for unit, size, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3_600, 48)):
        # Compare the rounded number, so that 59.96 s becomes 1 min instead of 60.0 s.
        if round(seconds / size, 1) < limit:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds / 86_400:,.1f}".removesuffix(".0") + " d"


def how_to_install(extra: str) -> str:
    """Return the commands that install `extra`, for the end of an error message of one line."""
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{housekeeping.__version__}-py3-none-any.whl"
    return (
        f"pip install '.[{extra}]' in a clone, pip install '{wheel}[{extra}]' with the wheel, "
        f"or pip install '{DISTRIBUTION}[{extra}]' once it is released"
    )
