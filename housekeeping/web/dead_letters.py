"""Pages of the errors by cause, and of the dead letters: list, details, and forms that requeue or delete them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import unquote

from flask import Flask, abort, flash, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from housekeeping.brokers.dead_letters import (
    NAME_WIDTH,
    BulkResult,
    DeadLetter,
    DeadLetterStore,
    LetterAction,
    LetterFilter,
    LetterPosition,
    Page,
    apply,
    body,
    bounded,
    describe_choice,
    find,
    found,
    readable,
    search,
)
from housekeeping.core.errors import WrongArgument
from housekeeping.core.logs import error_line, in_one_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.connection import close_databases, database
from housekeeping.insight.causes import Causes, read_causes
from housekeeping.insight.wording import describe_requeue, parse_since
from housekeeping.ledger.operators import record_action
from housekeeping.web.security import Form, current_user
from housekeeping.web.snapshot import Cache, SnapshotCache

logger = named_logger(__name__)

#: Time to search for the letters of a page, which says so if it ended before all were searched.
MAX_SEARCH: Final = timedelta(seconds=1)


class FilterForm(Form):
    """Fields of the filter."""

    def __init__(self, sent: Mapping[str, str]) -> None:
        super().__init__(sent, "queue", "actor", "error", "since", "until")
        queue, actor, error = (self.typed.get(name) for name in ("queue", "actor", "error"))
        self.filter = LetterFilter(queue, actor, error, *self.times())


#: Letters that are changed within a request, in about a second. More are changed in the background.
_MOST: Final = 1000
_KEPT: Final = 5  # letters that stay, named one by one


@dataclass(frozen=True, slots=True)
class _Choice:
    """Dead letters that the operator has chosen.

    Attributes:
      ids: The broker ids of the selected ones; empty: all that meet the filter.
      until: When the confirmation was shown; of a filter's letters, those that died later are left alone.
      shown: The number that the confirmation showed.
    """

    action: LetterAction
    ids: Sequence[str]
    form: FilterForm
    until: datetime
    shown: int = 0

    @classmethod
    def of_request(cls, action: LetterAction) -> _Choice:
        values = request.form if request.method == "POST" else request.args
        form, ids = FilterForm(values), [*dict.fromkeys(map(unquote, values.getlist("id")))][:_MOST]
        for text in form.errors.values():
            raise WrongArgument(text)
        if not ids and "all" not in values:
            raise WrongArgument("no dead letter is selected; select some, or choose all that match")
        if request.method == "POST" and not ids:
            return cls(action, ids, form, _shown_at(values.get("shown_at", "")), _number(values.get("shown", "")))
        return cls(action, ids, form, datetime.now(UTC))

    def found(self, store: DeadLetterStore, max_time: timedelta | None = None) -> Page:
        """Return the chosen letters that are still there.

        Parameters:
          max_time: Time to search for those that meet the filter; None for no limit.
        """
        if self.ids:
            found = find(store, self.ids)
            return Page([found[each] for each in self.ids if each in found])
        until = min(self.until, self.form.filter.until or self.until)
        return search(store, replace(self.form.filter, until=until), max_time=max_time)

    def apply(self, store: DeadLetterStore, user: str, report: Callable[[str], object] | None = None) -> BulkResult:
        """Requeue or delete the chosen letters, and record that.

        Parameters:
          report: Called with the progress at regular intervals.
        """
        letters = self.found(store).letters[::-1]  # the oldest first, as they were sent
        with record_action(self.action, describe_choice(letters, self._conditions), user) as outcome:

            def said(text: str) -> None:
                outcome.report(text)
                if report is not None:
                    report(text)

            result = apply(store, self.action, letters, said)
            outcome.result = str(result)
        return result

    @property
    def _conditions(self) -> LetterFilter | None:
        return None if self.ids else self.form.filter


class BackgroundChange:
    """Background change of many dead letters, one at a time. Its progress is also in the action log.

    Attributes:
      text: The running change and its progress; None if none is running.
    """

    def __init__(self) -> None:
        self.text: str | None = None
        self._lock = threading.Lock()

    def start(self, choice: _Choice, store: DeadLetterStore, user: str, ended: Callable[[], object]) -> bool:
        """Start a change unless another one is running. Return whether it was started."""
        with self._lock:
            if self.text is not None:
                return False
            self.text = begin = f"{choice.action} dead letters ({choice.form.filter})"

        def change() -> None:
            def report(progress: str) -> None:
                self.text = f"{begin}: {progress}"

            try:
                choice.apply(store, user, report)
            except Exception as error:  # also in the action log
                logger.error("Dead letters could not be changed", error=error_line(error))
            finally:
                close_databases()
                self.text = None
                ended()

        threading.Thread(target=change, name="housekeeping-dead-letters", daemon=True).start()
        return True


def add_dead_letter_changes(app: Flask, snapshots: SnapshotCache, background: BackgroundChange) -> None:
    """Register the pages.

    Parameters:
      background: The change in the background, which the list shows.
    """

    def chosen(action: str) -> _Choice:
        if action not in ("requeue", "delete"):
            abort(404)
        return _Choice.of_request("requeue" if action == "requeue" else "delete")

    @app.get("/dead-letters/all/<action>")
    def letters_to_change(action: str) -> str:
        choice = chosen(action)
        page = choice.found(snapshots.dead_letters(), MAX_SEARCH)
        # After an incomplete search the number is unknown.
        shown = len(page.letters) if page.complete else _MOST + 1
        return render_template(
            "dead_letter_changes.html",
            choice=choice,
            page=page,
            groups=Counter(_group(letter) for letter in page.letters).most_common(),
            missing=len(choice.ids) - len(page.letters) if choice.ids else 0,
            in_background=shown > _MOST,
            shown=shown,
        )

    @app.post("/dead-letters/all/<action>")
    def change_letters(action: str) -> Response:
        choice, store = chosen(action), snapshots.dead_letters()
        if choice.shown > _MOST:
            if not background.start(choice, store, current_user(), snapshots.invalidate):
                abort(409, "another change of dead letters is running; try again when it has ended")
        else:
            result = choice.apply(store, current_user())
            snapshots.invalidate()
            flash(f"Dead letters: {result}.")
            for each in result.kept[:_KEPT]:
                flash(f"{in_one_line(each.id, NAME_WIDTH)}: {describe_requeue(each)}")
        return redirect(url_for("dead_letters", **dict[str, Any](choice.form.typed)), 303)


def _group(letter: DeadLetter) -> tuple[str, str]:
    actor = letter.message.actor_name if letter.message else "(unreadable)"
    return in_one_line(actor, NAME_WIDTH), in_one_line(letter.queue, NAME_WIDTH)


def _shown_at(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise WrongArgument("the form lacks the time of its page; open it again from the dead letters") from None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise WrongArgument("the form lacks the number of dead letters; open it again from the dead letters")
    return int(text)


#: Times since which the page of the errors shows them.
_SPANS: Final = ("1h", "6h", "24h", "7d")
_KEPT_S: Final = 5.0  # seconds for which the errors are kept for all readers


def add_errors(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the page."""
    cache = Cache()

    @app.get("/errors")
    def errors() -> tuple[str, int]:
        form = Form(request.args, "since")
        span = form.choice("since", _SPANS) or "24h"

        def read() -> Causes:
            return read_causes(
                tuple(database.by_name()), snapshots.dead_letters(), parse_since(span, datetime.now(UTC))
            )

        found = cache.get(span, _KEPT_S, read, keeps=lambda each: not each.incomplete)
        shown = render_template("errors.html", read=found, span=span, spans=_SPANS)
        return shown, 400 if form.errors else 200


_SHOWN: Final = 50  # letters


def add_dead_letters(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the pages."""
    background = BackgroundChange()
    add_dead_letter_changes(app, snapshots, background)

    @app.get("/dead-letters")
    def dead_letters() -> tuple[str, int]:
        store, form, before = snapshots.dead_letters(), FilterForm(request.args), request.args.get("before")
        place, page = None if before is None else LetterPosition.parse(before), Page([])
        if not form.errors:
            page = search(store, form.filter, _SHOWN, place, MAX_SEARCH)
        shown = render_template(
            "dead_letters.html",
            page=page,
            form=form,
            counts=store.counts(),
            now=datetime.now(UTC),
            running=background.text,
            live=background.text is not None,
        )
        return shown, 400 if form.errors else 200

    @app.get("/dead-letters/one")
    def dead_letter() -> str:
        [letter] = found(snapshots.dead_letters(), [request.args.get("id", "")])
        return render_template("dead_letter.html", letter=letter, details=_details(letter), error=bounded(letter.error))

    @app.post("/dead-letters/requeue")
    def requeue_letter() -> Response:
        message_id = request.args.get("id", "")
        with record_action("requeue", message_id, current_user()) as outcome:
            store = snapshots.dead_letters()
            [result] = store.change_each("requeue", readable(found(store, [message_id])))
            outcome.result = describe_requeue(result)
        snapshots.invalidate()
        flash(f"{in_one_line(result.id, NAME_WIDTH)}: {describe_requeue(result)}")
        return redirect(url_for("dead_letters"), 303)


def _details(letter: DeadLetter) -> dict[str, Any]:
    details = body(letter)
    if letter.message is not None:
        details["traceback"] = details["traceback"] or "the broker has none"
    return details
