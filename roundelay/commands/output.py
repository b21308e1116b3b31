"""Output of commands: text and tables for people, and JSON with ``--json`` for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from roundelay.display.text import sanitize_json

if TYPE_CHECKING:
    from roundelay.display.screen import Paint


def print_json(value: object, indent: int | None = None) -> None:
    """Print a value as sanitized JSON, on one line unless ``indent`` is given."""
    click.echo(sanitize_json(json.dumps(value, ensure_ascii=False, indent=indent)))


def print_answer(value: object) -> None:
    """Print a hub's answer on one line, or indented at a terminal. Numbers outside the range of a double become null,
    as in messages.
    """
    from pydantic_core import to_json  # imported here so that commands start fast

    click.echo(sanitize_json(to_json(value, indent=terminal_indent(), inf_nan_mode="null").decode()))


def terminal_indent() -> int | None:
    """Return the indentation of JSON at a terminal, or None in a pipe."""
    return 2 if sys.stdout.isatty() else None


def show(
    value: object,
    describe: Callable[[Paint], Iterable[str]],
    *,
    as_json: bool,
    print_value: Callable[[object], None] = print_json,
) -> None:
    """Print a value as JSON with ``--json``, or else as the lines that ``describe`` returns."""
    if as_json:
        print_value(value)
        return
    from roundelay.display.screen import Screen

    screen = Screen(sys.stdout)
    for line in describe(screen.paint):
        screen.write(line)


def show_list(
    listed: Mapping[str, Sequence[Any]],
    columns: Mapping[str, Callable[[Any], object]],
    *,
    empty: str,
    as_json: bool,
    print_value: Callable[[object], None] = print_json,
) -> None:
    """Print a list as a table, or as a JSON object that maps the list's name to the list. For an empty list, the text
    output is ``empty``."""
    [entries] = listed.values()
    rows = [[read(it) for read in columns.values()] for it in entries]
    describe = draw_table(list(columns), rows) if rows else lambda _: [empty]
    show(listed, describe, as_json=as_json, print_value=print_value)


show_answer = partial(show, print_value=print_answer)
list_answer = partial(show_list, print_value=print_answer)


def draw_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Callable[[Paint], Iterable[str]]:
    """Return a function that draws a table, for the ``describe`` argument of `show`."""
    from roundelay.display.screen import format_table

    return lambda paint: [format_table(head, rows, paint=paint)]
