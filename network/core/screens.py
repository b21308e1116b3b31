"""Screens that a mod describes as data. The page and the terminal UI draw these screens without any code of the mod.

A screen reads its items with one operation of the mod. The items can be shown in four views: as a list, as a board with
columns, as a document with its text, or as a timeline. The actions of a screen are other operations of the mod, with
forms for their arguments. Clients call all operations with the rights of their own user, so a screen never shows more
than this user may read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from roundelay.network.errors import ModError

View: TypeAlias = Literal["list", "board", "document", "timeline"]
FactKind: TypeAlias = Literal["text", "people", "time", "size", "thread", "message", "file"]


class Fact(Struct, frozen=True, omit_defaults=True):
    """Field of an item that a screen shows with a label. ``kind`` is the type of the value: a ``time`` is in ms, a
    ``size`` is in bytes, a ``message`` is a seq, and a ``file`` is the id of a stored file."""

    field: str
    label: str = ""
    kind: FactKind = "text"


class Input(Struct, frozen=True, omit_defaults=True):
    """Argument of an operation that a person enters in a form. If ``choices`` is not empty, the person selects one of
    them."""

    argument: str
    label: str
    is_long: bool = False
    choices: tuple[str, ...] = ()
    choices_from: str = ""
    """Source of the choices, written as ``LIST.FIELD``: the values of ``FIELD`` in the entries of the item's list
    ``LIST``."""
    field: str = ""
    """Field of the item or of the opened item that contains the current value of the argument."""


class Action(Struct, frozen=True, omit_defaults=True):
    """Button that calls a changing operation. ``args`` maps arguments of the operation to fields of the item. ``when``
    maps fields of the item to allowed values. The button is shown only if each of these fields has an allowed value."""

    op: str
    label: str
    args: Mapping[str, str] = {}
    inputs: tuple[Input, ...] = ()
    when: Mapping[str, tuple[str, ...]] = {}


class DetailList(Struct, frozen=True, omit_defaults=True):
    """List in an opened item, such as the item's events or versions. ``items`` is a field of the opened item or, if
    ``op`` is set, of the result of this operation. ``args`` maps arguments of ``op`` to fields of the item."""

    title: str
    items: str
    facts: tuple[Fact, ...]
    op: str = ""
    args: Mapping[str, str] = {}
    open_op: str = ""
    """Operation that is called when a person opens an entry. The field ``open_text`` of its result is shown, for
    example a diff. ``open_args`` maps arguments of the operation to fields of the entry or, if the entry lacks a field,
    of the item."""
    open_args: Mapping[str, str] = {}
    open_text: str = ""


class Detail(Struct, frozen=True, omit_defaults=True):
    """View of an opened item. The operation ``op`` returns the item. ``text`` names the field that contains
    Markdown."""

    op: str
    args: Mapping[str, str]
    text: str = ""
    facts: tuple[Fact, ...] = ()
    parts: tuple[DetailList, ...] = ()


class ModScreen(Struct, frozen=True, omit_defaults=True):
    """Description of one screen. The operation ``op`` returns the items in the field ``items`` of its result.

    ``more`` maps arguments for the next page to fields of the last item. A field that starts with ``.`` is a field of
    the operation's result.
    """

    id: str
    title: str
    view: View
    op: str
    items: str
    key: str
    """Field that identifies an item."""
    heading: str
    args: Mapping[str, str | int | bool] = {}
    """Fixed values for arguments of ``op``."""
    more: Mapping[str, str] = {}
    facts: tuple[Fact, ...] = ()
    column: str = ""
    """Field that contains an item's column. Set only for a board."""
    columns: tuple[str, ...] = ()
    at: str = ""
    """Field that contains an item's time in ms. Items are sorted by this field. Set only for a timeline."""
    detail: Detail | None = None
    actions: tuple[Action, ...] = ()
    create: Action | None = None
    """Button that creates an item."""


def check_screens(
    mod: str,
    screens: Iterable[ModScreen],
    known: Mapping[str, Collection[str]],
    read_schemas: Callable[[str], Mapping[str, Any]],
) -> None:
    """Raise `ModError` if a screen names an unknown operation of the mod or an unknown argument. ``known`` contains the
    argument names of each operation. ``read_schemas`` returns the JSON schemas of the arguments of an operation."""
    seen: set[str] = set()
    for screen in screens:
        if screen.id in seen:
            raise ModError(f"The mod {mod} has two screens called {screen.id!r}. Give each its own id.")
        seen.add(screen.id)
        if (screen.view == "board") != bool(screen.column) or (screen.view == "timeline") != bool(screen.at):
            raise ModError(
                f"The screen {screen.id!r} of the mod {mod} is a {screen.view}. A board needs `column`, a timeline "
                "needs `at`, and no other view may have these fields."
            )
        for op, arguments in _list_calls(screen):
            if op not in known:
                raise ModError(
                    f"The screen {screen.id!r} of the mod {mod} names the operation {op!r}. The mod has {', '.join(known)}."
                )
            if unknown := sorted(arguments.difference(known[op])):
                raise ModError(
                    f"The screen {screen.id!r} of the mod {mod} passes {', '.join(unknown)} to {op}, which takes "
                    f"{', '.join(sorted(known[op])) or 'no arguments'}."
                )
        for action in _list_actions(screen):
            schemas = read_schemas(action.op) if action.inputs else {}
            for entry in action.inputs:
                if not _is_text(schemas[entry.argument]):
                    raise ModError(
                        f"The screen {screen.id!r} of the mod {mod} lets people enter {entry.argument} of "
                        f"{action.op}, which is not text. Accept text in the operation, and convert it there."
                    )


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether an argument accepts text, because forms send only text."""
    if "anyOf" in schema:
        return any(_is_text(each) for each in schema["anyOf"])
    return bool(schema.get("type", "string") == "string")


def _list_actions(screen: ModScreen) -> Iterable[Action]:
    return (*screen.actions, *((screen.create,) if screen.create else ()))


def _list_calls(screen: ModScreen) -> Iterable[tuple[str, set[str]]]:
    """Yield each operation that a screen calls, with the names of the arguments that the screen passes to it."""
    yield screen.op, {*screen.args, *screen.more}
    if screen.detail is not None:
        yield screen.detail.op, {*screen.detail.args}
        for part in screen.detail.parts:
            yield from ((op, {*args}) for op, args in ((part.op, part.args), (part.open_op, part.open_args)) if op)
    for action in _list_actions(screen):
        yield action.op, {*action.args, *(entry.argument for entry in action.inputs)}
