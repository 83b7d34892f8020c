"""What operators do: pause and narrow workers, and the log of all their actions."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import EXCLUDED, SQL, fn

from housekeeping.core.logs import counted, error_line, format_duration, in_one_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database, time_limit, translate_postgres_errors
from housekeeping.database.queries import CompiledQuery, Parameter, QueryCache
from housekeeping.ledger.schema import NOT_ENDED, NOW, ActionRow, Deployment, Run, Switch, newest

logger = named_logger(__name__)

ActionName = Literal[
    "pause",
    "narrow",
    "resume",
    "stop",
    "run",
    "confirm",
    "purge",
    "restore",
    "erase",
    "export",
    "rekey",
    "acknowledge",
    "release_lease",
    "release_key",
    "requeue",
    "delete",
    "deploy",
    "login",
]

_MAX_TEXT: Final = 500  # characters of a user, a target or a result
_MAX_VALUE: Final = 100  # characters of a setting that has changed
#: An action must not wait for its log.
_TIME: Final = timedelta(seconds=1)


@dataclass(slots=True)
class ActionResult:
    """Result of an action, set by the block that carries it out.

    Attributes:
      result: One line for operators.
      row_id: Its row; None if it could not be written.
    """

    result: str = "done"
    row_id: int | None = None

    def report(self, progress: str) -> None:
        """Store the progress of a long action, so that it survives the process. Never raises."""
        if self.row_id is not None:
            result = in_one_line(f"{progress}; {NOT_ENDED}", _MAX_TEXT)
            _in_main(lambda: ActionRow.update(result=result).where(ActionRow.id == self.row_id).execute())


@contextmanager
def record_action(action: ActionName, target: str, user: str) -> Iterator[ActionResult]:
    """Record the action that the block carries out, with its result, in the table `actions`.

    The row is written before the block and gets its result after it, so that it also shows an action whose process was
    killed. An error of the block becomes the result, and is raised again. The row is in the database ``main``. If that
    database does not answer, the action is carried out, and a log line has it instead.

    Parameters:
      target: What is changed: a worker, lease, key, message or alert.
      user: The operator: `command_line_user`, or the user of the dashboard.
    """
    row = {name: in_one_line(text, _MAX_TEXT) for name, text in (("user", user), ("target", target))}
    row_id, problem = _in_main(lambda: ActionRow.insert(action=action, at=NOW, **row).execute())
    outcome = ActionResult(row_id=row_id)
    try:
        yield outcome
    except Exception as error:
        outcome.result = f"failed: {error_line(error)}"
        raise
    except BaseException:
        outcome.result = "interrupted"
        raise
    finally:
        result = in_one_line(outcome.result, _MAX_TEXT)
        if row_id is not None:
            _, problem = _in_main(lambda: ActionRow.update(result=result).where(ActionRow.id == row_id).execute())
        if problem is not None:
            user, target = row["user"], row["target"]
            logger.warning("Action not recorded", user=user, action=action, target=target, result=result, error=problem)


def record_deployment(state: Mapping[str, str], user: str) -> None:
    """Record in the action log what differs from the last process of the installation that booted.

    Of processes that boot at the same time with the same difference one records it. The first process of an
    installation records nothing, as there is nothing to compare with.

    Parameters:
      state: Versions, settings and declarations by name, without secrets.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    with database.using(MAIN), translate_postgres_errors(), time_limit(_TIME, _TIME), database.atomic():
        if Deployment.insert(state=dict(state)).on_conflict_ignore().returning(Deployment.single).tuples().execute():
            return
        # Locked only if there is something to record.
        if Deployment.get().state == state:
            return
        before = Deployment.select().for_update().get().state
        if before == state:
            return
        names = sorted(name for name in {*before, *state} if before.get(name) != state.get(name))
        changes = [_change(name, before.get(name), state.get(name)) for name in names]
        Deployment.update(state=dict(state)).execute()
        ActionRow.insert(
            action="deploy",
            at=NOW,
            user=in_one_line(user, _MAX_TEXT),
            target="the installation",
            result=in_one_line("; ".join(changes), _MAX_TEXT),
        ).execute()


def _change(name: str, before: str | None, after: str | None) -> str:
    shown = (in_one_line(text, _MAX_VALUE) if text else "unset" for text in (before, after))
    return f"{name}: {' -> '.join(shown)}"


def command_line_user() -> str:
    """Return who uses the command line: user and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = "?"
    return f"{user}@{socket.gethostname()}"


def logged_actions(
    limit: int,
    *,
    before: int | None = None,
    target: str | None = None,
    user: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[ActionRow]:
    """Return the newest actions, newest first.

    Parameters:
      before: Only older ones than the one with this id.
      target: Only those with this target, and the runs of this worker with an argument.
      user: Only those of this operator; a name without a place has those from all places.
      since, until: Only those that began at the first time or later, and before the second one.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    with database.using(MAIN), translate_postgres_errors():
        # PostgreSQL text cannot contain NUL characters, and none is stored.
        name, place = (in_one_line(text or "", _MAX_TEXT) for text in (user, target))
        of_user = (ActionRow.user == name) | fn.STARTS_WITH(ActionRow.user, f"{name}@")
        of_target = (ActionRow.target == place) | fn.STARTS_WITH(ActionRow.target, f"{place} ")
        given = (before, ActionRow.id < before), (target, of_target), (user, of_user)
        times = (since, ActionRow.at >= since), (until, ActionRow.at < until)
        return list(newest(ActionRow.select(), [ActionRow.id], limit, *given, *times))


def _in_main(write: Callable[[], int]) -> tuple[int | None, str | None]:
    """Execute a statement in the database ``main``; return its result, and why it failed. No database is no failure."""
    with database.using(MAIN):
        if database.obj is None:
            return None, None
        try:
            with time_limit(_TIME):
                return write(), None
        except Exception as error:
            return None, error_line(error)


SwitchState = Literal["paused", "narrow"]
#: What operators want of a run: its worker's override, or that this one run stops.
OverrideState = Literal["paused", "narrow", "stopped"]

#: The override of a run's worker, for the statement that writes the run's row: it costs no round trip.
OVERRIDE: Final = Switch.select(
    fn.JSONB_BUILD_ARRAY(Switch.state, Switch.batch_size, Switch.max_runtime_s, Switch.rows_per_s)
).where((Switch.worker == Run.worker) & (Switch.until.is_null() | (Switch.until > NOW)))


@dataclass(frozen=True, slots=True)
class Override:
    """The active override of a worker, with the columns of its row; or of one run.

    Attributes:
      state: ``paused``: no run begins, and a running one stops after its batch. ``narrow``: lower limits. ``stopped``:
        only the run that reads it stops after its batch.
      until: When it expires; None if it stays until `resume`.
      said_by: The operator, as known to the command line or the dashboard.
      batch_size: The lower limit; None for the worker's own.
      max_runtime_s: The lower limit; None for the worker's own.
      rows_per_s: The lower limit; None for the worker's own.
    """

    worker: str
    state: OverrideState
    reason: str | None = None
    until: datetime | None = None
    since: datetime | None = None
    said_by: str | None = None
    batch_size: int | None = None
    max_runtime_s: float | None = None
    rows_per_s: float | None = None

    @property
    def max_runtime(self) -> timedelta | None:
        """The lower limit of a run's duration; None for the worker's own."""
        return None if self.max_runtime_s is None else timedelta(seconds=self.max_runtime_s)

    def as_json(self) -> dict[str, Any]:
        """Return one ``override`` of ``housekeeping status --json``."""
        shown = ("state", "reason", "until", "batch_size", "max_runtime_s", "rows_per_s", "since")
        return {**{name: getattr(self, name) for name in shown}, "user": self.said_by}


def describe_override(override: Override) -> str:
    """Return which override is in force, until when and why."""
    limits = [
        *([f"{counted(override.batch_size, 'record')} a batch"] if override.batch_size else []),
        *([f"{format_duration(override.max_runtime_s)} a run"] if override.max_runtime_s else []),
        *([f"{override.rows_per_s:,g} rows per second"] if override.rows_per_s else []),
    ]
    state = f"narrowed to {' and '.join(limits)}" if limits else override.state
    ends = f"until {override.until:%Y-%m-%d %H:%M:%S} UTC" if override.until else "until it is resumed"
    return f"{override.worker} is {state} {ends}" + (f": {override.reason}" if override.reason else "")


#: Beginning of the result of a change that has left a pause in force.
KEPT: Final = "kept: "


def describe_switch(active: Override, wanted: Override) -> str:
    """Return the result of `switch` in one line."""
    return f"{'' if active is wanted else KEPT}{describe_override(active)}"


def override_from(worker: str, values: Sequence[Any] | None, stopped_by: str | None) -> Override | None:
    """Return the override that `OVERRIDE` has selected.

    Parameters:
      stopped_by: The operator who wants this run to stop, from its row; None if it continues.
    """
    if stopped_by is not None:
        return Override(worker, "stopped", said_by=stopped_by)
    if values is None:
        return None
    state, batch_size, max_runtime_s, rows_per_s = values
    return Override(worker, state, batch_size=batch_size, max_runtime_s=max_runtime_s, rows_per_s=rows_per_s)


def overrides() -> dict[str, Override]:
    """Return the active overrides by worker."""
    rows: Any = Switch.select().where(_is_active()).dicts()
    return {row["worker"]: Override(**row) for row in rows}


#: Compiled statement of `override_of`, for each schema.
_of_worker: Final = QueryCache()


def override_of(worker: str) -> Override | None:
    """Return the active override of a worker; None without one."""

    def make() -> CompiledQuery:
        return CompiledQuery(Switch.select().where((Switch.worker == Parameter(0)) & _is_active()))

    for values in _of_worker.get(Switch._meta.schema, "active", make).rows(worker):
        columns = zip(Switch._meta.sorted_fields, values, strict=True)
        return Override(**{column.name: column.python_value(value) for column, value in columns})
    return None


def switch(to: Override, *, keep_pause: bool = False) -> Override:
    """Replace the worker's override; return the one that is active then.

    Parameters:
      keep_pause: Whether a pause that lasts at least as long stays, with its reason and operator.
    """
    values = {each.name: getattr(to, each.name) for each in fields(to) if each.name != "since"}
    replaced: Any = {getattr(Switch, name): getattr(EXCLUDED, name) for name in values if name != "worker"}
    shorter = Switch.until < fn.COALESCE(EXCLUDED.until, SQL("'infinity'"))
    with database.atomic():
        changed = (
            Switch.insert(**values, since=NOW)
            .on_conflict(
                conflict_target=[Switch.worker],
                update={**replaced, Switch.since: NOW},
                where=(Switch.state != "paused") | shorter if keep_pause else None,
            )
            .as_rowcount()
            .execute()
        )
        kept = None if changed else override_of(to.worker)
    return kept or to


def resume(worker: str) -> bool:
    """End the worker's override; return False if there was none."""
    with database.atomic():
        return bool(Switch.delete().where((Switch.worker == worker) & _is_active()).execute())


def _is_active() -> Any:
    return Switch.until.is_null() | (Switch.until > NOW)
