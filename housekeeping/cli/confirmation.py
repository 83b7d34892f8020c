"""Question that an operator must confirm before a command changes something."""

from __future__ import annotations

import sys

import click

from housekeeping.core.errors import Refused, WrongArgument


class NotConfirmed(Refused):
    """The operator has declined; nothing was changed."""

    exit_code = 1


def confirm(question: str, unchanged: str) -> None:
    """Ask on stderr, and return if the answer is yes.

    Parameters:
      unchanged: What an answer of no means, such as "nothing was deleted".

    Raises:
      NotConfirmed: The answer is no.
      WrongArgument: There is no terminal to ask on.
    """
    try:
        confirmed = click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
        if sys.stdin is None or not sys.stdin.isatty():
            raise WrongArgument(f"there is no terminal to confirm it on; {unchanged}; add --yes") from None
        confirmed = False
    if not confirmed:
        raise NotConfirmed(f"not confirmed; {unchanged}")
