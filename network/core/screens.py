"""Screens that a mod describes as data. The page and the terminal UI draw them without code of the mod.

A screen reads its items with one operation of the mod and shows them in one of four views: a list, a board with columns,
a document with its text, or a timeline. Actions are further operations, with a form for their arguments. The clients
call every operation as their own user, so a screen shows nobody more than the operations do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from roundelay.network.errors import ModError

View: TypeAlias = Literal["list", "board", "document", "timeline"]
FactKind: TypeAlias = Literal["text", "people", "time", "size", "thread", "message", "file"]


class Fact(Struct, frozen=True, omit_defaults=True):
    """A field of an item that is shown with a label. ``kind`` says how: ``time`` is in ms, ``size`` in bytes,
    ``message`` is a seq, ``file`` the id of a stored file."""

    field: str
    label: str = ""
    kind: FactKind = "text"


class Input(Struct, frozen=True, omit_defaults=True):
    """One argument that a person enters. With ``choices`` the person chooses one of them."""

    argument: str
    label: str
    is_long: bool = False
    choices: tuple[str, ...] = ()
    choices_from: str = ""
    """``LIST.FIELD``: the choices are this field of the entries of the item's list."""
    field: str = ""
    """Field of the item, or of the opened item, with the present value."""


class Action(Struct, frozen=True, omit_defaults=True):
    """A changing operation as a button. ``args`` maps arguments to fields of the item. ``when`` maps fields to the values
    with which the button is shown."""

    op: str
    label: str
    args: Mapping[str, str] = {}
    inputs: tuple[Input, ...] = ()
    when: Mapping[str, tuple[str, ...]] = {}


class DetailList(Struct, frozen=True, omit_defaults=True):
    """A list inside an opened item, such as its events or versions: the field ``items`` of the opened item, or of the
    result of ``op``. ``args`` maps arguments to fields of the item."""

    title: str
    items: str
    facts: tuple[Fact, ...]
    op: str = ""
    args: Mapping[str, str] = {}
    open_op: str = ""
    """Operation whose field ``open_text`` is shown when an entry is opened, such as a difference. ``open_args`` maps its
    arguments to fields of the entry, or else of the item."""
    open_args: Mapping[str, str] = {}
    open_text: str = ""


class Detail(Struct, frozen=True, omit_defaults=True):
    """The opened item: the result of ``op``. ``text`` is its field with Markdown."""

    op: str
    args: Mapping[str, str]
    text: str = ""
    facts: tuple[Fact, ...] = ()
    parts: tuple[DetailList, ...] = ()


class ModScreen(Struct, frozen=True, omit_defaults=True):
    """One screen. ``op`` returns the items in its field ``items``, and takes ``more`` for the next page: arguments by the
    field of the last item, or of the result for fields that start with ``.``."""

    id: str
    title: str
    view: View
    op: str
    items: str
    key: str
    """Field that identifies an item."""
    heading: str
    args: Mapping[str, str | int | bool] = {}
    """Fixed arguments."""
    more: Mapping[str, str] = {}
    facts: tuple[Fact, ...] = ()
    column: str = ""
    """For a board: the field with the column's value."""
    columns: tuple[str, ...] = ()
    at: str = ""
    """For a timeline: the field with the time in ms, by which items are sorted."""
    detail: Detail | None = None
    actions: tuple[Action, ...] = ()
    create: Action | None = None
    """The button that makes a new item."""


def check_screens(
    mod: str,
    screens: Iterable[ModScreen],
    known: Mapping[str, Collection[str]],
    read_schemas: Callable[[str], Mapping[str, Any]],
) -> None:
    """Check that each screen names operations of the mod, with arguments that they have. ``known`` has the arguments of
    each operation, and ``read_schemas`` returns their JSON schemas. Raises `ModError`."""
    seen: set[str] = set()
    for screen in screens:
        if screen.id in seen:
            raise ModError(f"The mod {mod} has two screens called {screen.id!r}. Give each its own id.")
        seen.add(screen.id)
        if (screen.view == "board") != bool(screen.column) or (screen.view == "timeline") != bool(screen.at):
            raise ModError(
                f"The screen {screen.id!r} of the mod {mod} is a {screen.view}. A board needs `column`, a timeline needs "
                "`at`, and no other view has them."
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
                        f"The screen {screen.id!r} of the mod {mod} lets people enter {entry.argument} of {action.op}, "
                        "which is no text. Take a text in the operation, and convert it there."
                    )


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether an argument takes a text, which is all that a form sends."""
    if "anyOf" in schema:
        return any(_is_text(each) for each in schema["anyOf"])
    return bool(schema.get("type", "string") == "string")


def _list_actions(screen: ModScreen) -> Iterable[Action]:
    return (*screen.actions, *((screen.create,) if screen.create else ()))


def _list_calls(screen: ModScreen) -> Iterable[tuple[str, set[str]]]:
    """Yield each operation that a screen calls, with the arguments that it passes."""
    yield screen.op, {*screen.args, *screen.more}
    if screen.detail is not None:
        yield screen.detail.op, {*screen.detail.args}
        for part in screen.detail.parts:
            yield from ((op, {*args}) for op, args in ((part.op, part.args), (part.open_op, part.open_args)) if op)
    for action in _list_actions(screen):
        yield action.op, {*action.args, *(entry.argument for entry in action.inputs)}
