"""Errors for the user: one line that says what, found, allowed, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints its message without a traceback and exits with code 2.

    Example:
        >>> import concept_eraser
        >>> try:
        ...     model = concept_eraser.load("tiny-ds")
        ... except concept_eraser.UserError as error:
        ...     print(error)
    """


class ReportedElsewhere(UserError):
    """An error that another process reports already.

    The command line of this process does not print it again.
    """


class Interrupted(Exception):
    """The user stopped the work. The message says how to continue.

    Example:
        >>> import concept_eraser
        >>> try:
        ...     run = concept_eraser.erase("tiny_star_munba", output="runs/star")
        ... except concept_eraser.Interrupted:
        ...     run = concept_eraser.erase("tiny_star_munba", output="runs/star", resume=True)
    """


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, in at most 150 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:150]}" if lines else type(error).__name__


OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # RuntimeErrors of torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the machine or of its GPU is full."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


NEAREST = 6  # names that an error lists, where one is close to what was asked for
ALL_NAMED = 20  # up to so many names are all listed


def unknown(what: str, name: str, names: Iterable[str], *, hint: str = "") -> UserError:
    """Return an error such as `unknown method 'munbaa'; did you mean 'munba'? available: ...`."""
    return UserError(unknown_message(what, name, names, hint=hint))


def unknown_message(what: str, name: str, names: Iterable[str], *, hint: str = "") -> str:
    options = sorted(set(names))
    close = difflib.get_close_matches(str(name)[:200], options, n=NEAREST, cutoff=0.5)
    guess = f"; did you mean {quote(close[0])}?" if close else ";"
    if close and len(options) > ALL_NAMED:
        others = f"similar ones of {len(options)}: {names_text(close[1:])}" if close[1:] else ""
    else:
        others = f"available: {names_text(options, 100) or '(none)'}"
    end = "; ".join(filter(None, (others, hint)))
    return f"unknown {what} {quote(name)}{guess} {end}".rstrip()


def quote(value: object, limit: int = 200) -> str:
    """Return a value for a message: its `repr`, cut off after `limit` characters.

    Containers are not read to their end, so that the message about a huge value takes no time.
    """
    import reprlib

    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 8
    short.maxstring = short.maxother = short.maxlong = limit
    short.maxlevel = 4
    try:
        text = short.repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def names_text(names: Iterable[object], limit: int = 20) -> str:
    """Join names for a message by commas: at most `limit`, each of at most 60 characters."""
    some = [str(name)[:60] for name in names]
    return ", ".join(some[:limit]) + (
        f", and {len(some) - limit:,} more" if len(some) > limit else ""
    )


def mistakes_message(mistakes: Iterable[str], where: str) -> str:
    """List the mistakes in a file, one per line. Only the first of many are listed."""
    lines = [line if len(line) <= 900 else f"{line[:897]}..." for line in mistakes]
    where = where if len(where) <= 300 else f"...{where[-297:]}"
    head = f"{len(lines)} mistakes in {where}:" if len(lines) > 1 else f"a mistake in {where}:"
    first_lines: list[str] = []
    room = 3500 - len(head)
    for line in lines[:20]:
        room -= len(line) + 3
        if room < 0 and first_lines:
            break
        first_lines.append(line)
    last_line = (
        [f"... and {len(lines) - len(first_lines)} more"] if len(lines) > len(first_lines) else []
    )
    return head + "".join(f"\n  {line}" for line in (*first_lines, *last_line))
