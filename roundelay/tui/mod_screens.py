"""Screens that mods describe as data (docs/mods.md). This module draws all of them as lists, without knowledge of a
particular mod.

A board is drawn as one list in the order of its columns. Texts of items are untrusted and sanitized here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from roundelay.display.text import format_day, sanitize, sanitize_lines
from roundelay.network.errors import RoundelayError
from roundelay.network.units import format_file_size
from roundelay.tui.desk import Desk
from roundelay.tui.dialogs import Ask, Choose
from roundelay.tui.parts import Pane, Parts, Rows, write_row

Item = Mapping[str, Any]
MAX_PAGES = 10
"""Maximum number of pages of items that a screen loads."""
MAX_TEXT_CHARS = 20_000


def take_args(names: Mapping[str, str], *sources: Item) -> dict[str, Any]:
    """Return the arguments of an operation. The value of an argument is a field of the first source that has this
    field.
    """
    values = {}
    for name, field in names.items():
        found = next((source[field] for source in sources if field in source), None)
        if found is not None:
            values[name] = found
    return values


def write_value(value: object, kind: str = "text") -> str:
    """Format a field's value on one line."""
    if isinstance(value, list | tuple):
        return ", ".join(write_value(one, kind) for one in value)
    if isinstance(value, dict):
        return " ".join(write_value(one) for one in value.values())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and kind in ("time", "size", "message"):
        return format_day(value) if kind == "time" else format_file_size(value) if kind == "size" else f"#{value}"
    return " ".join(line.strip() for line in sanitize_lines(str(value)[:1000]))


def write_plain(value: object) -> str:
    """Format a value as the key `when` of an action names it, with ``true`` and ``false`` as in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_facts(facts: Sequence[Item], item: Item) -> str:
    """Format the facts of an item on one line."""
    given = [(fact, item.get(fact["field"])) for fact in facts]
    return " · ".join(
        f"{sanitize(fact['label'])} {write_value(value, fact.get('kind', 'text'))}".strip()
        if fact.get("label")
        else write_value(value, fact.get("kind", "text"))
        for fact, value in given
        if value not in (None, "", 0, [], ())
    )


class ModPane(Pane):
    """Screen with the items of a mod. Enter opens an item."""

    name_here = "mods"
    BINDINGS: ClassVar = [("c", "create", "Create"), ("x", "act", "Actions"), ("r", "read", "Read again")]

    def __init__(self, desk: Desk, screen: Item) -> None:
        super().__init__(desk)
        self._screen = screen
        self._items: dict[str, Item] = {}
        self._about = "Reading…"

    def compose(self) -> ComposeResult:
        yield Static(id="about", markup=False)
        yield Rows()

    def on_mount(self) -> None:
        self.action_read()

    def action_read(self) -> None:
        self._work(self._read)

    def _work(self, do: Callable[..., Awaitable[object]], *args: object) -> None:
        self.terminal.work(self._refuse_other_fields, do, *args)

    async def _refuse_other_fields(self, do: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a call, and raise `RoundelayError` if the mod's result lacks fields that its screen names. Any other
        error would end the program."""
        try:
            await do(*args)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._items = {}
            raise RoundelayError(
                f"The mod {self._screen['mod']} returned something that cannot be drawn: {error!r}."
            ) from error

    async def _read(self) -> None:
        screen, found, is_cut = self._screen, list[Item](), True
        more: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = await self.desk.client.call(screen["op"], {**screen.get("args", {}), **more})
            found += page[screen["items"]]
            if not page.get("has_more") or not found or "more" not in screen:
                is_cut = bool(page.get("has_more"))
                break
            more = {
                name: page[field[1:]] if field.startswith(".") else found[-1][field]
                for name, field in screen["more"].items()
            }
        columns = list(screen.get("columns", ()))
        if column := screen.get("column"):
            found = [item for item in found if item[column] in columns]
            found.sort(key=lambda item: columns.index(item[column]))
        elif at := screen.get("at"):
            found.sort(key=lambda item: item[at])
        self._items = {str(item[screen["key"]]): item for item in found}
        self._about = f"{sanitize(screen['title'])}: {len(found)}{', the first ones' if is_cut else ''}"
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        rows = self.query_one(Rows)
        rows.show([(key, self._write(item, rows.room)) for key, item in self._items.items()])
        self.query_one("#about", Static).update(Content(self._about))

    def _write(self, item: Item, width: int) -> Content:
        screen = self._screen
        left: Parts = []
        if column := screen.get("column"):
            left.append((f"{write_value(item[column]):<10} ", "cyan"))
        left.append((write_value(item.get(screen["heading"], "")), "bold"))
        right = write_value(item[screen["at"]], "time") if screen.get("at") else ""
        return write_row(left, right, width, write_facts(screen.get("facts", ()), item))

    @property
    def item(self) -> Item | None:
        return self._items.get(self.query_one(Rows).chosen or "")

    def on_option_list_option_selected(self) -> None:
        if self.item is not None and "detail" in self._screen:
            self._work(self._open, self.item)

    async def _open(self, item: Item) -> None:
        detail = self._screen["detail"]
        opened = {**item, **await self.desk.client.call(detail["op"], take_args(detail["args"], item))}
        lines = [write_value(item.get(self._screen["heading"], "")), write_facts(detail.get("facts", ()), opened), ""]
        lines += sanitize_lines(str(opened.get(detail.get("text", ""), ""))[:MAX_TEXT_CHARS])
        for part in detail.get("parts", ()):
            value = await self.desk.client.call(part["op"], take_args(part["args"], opened)) if "op" in part else opened
            lines += [
                "",
                sanitize(part["title"]),
                *(f"  {write_facts(part['facts'], it)}" for it in value[part["items"]]),
            ]
        self.app.push_screen(Reader("\n".join(lines)))

    def action_create(self) -> None:
        if "create" in self._screen:
            self._enter(self._screen["create"], {}, {})

    def action_act(self) -> None:
        item = self.item
        if item is None:
            return
        possible = {
            action["label"]: action
            for action in self._screen.get("actions", ())
            if all(write_plain(item.get(field)) in values for field, values in action.get("when", {}).items())
        }

        def choose(label: str | None) -> None:
            if label in possible:
                self._work(self._begin, possible[label], item)

        if possible:
            self.app.push_screen(
                Choose("What do you want to do?", [(label, Content(sanitize(label))) for label in possible]),
                choose,
            )

    async def _begin(self, action: Item, item: Item) -> None:
        """Read the opened item, whose fields are the current values of a form. Then ask for the inputs."""
        detail = self._screen.get("detail")
        if detail is not None and action.get("inputs"):
            item = {**item, **await self.desk.client.call(detail["op"], take_args(detail["args"], item))}
        self._enter(action, item, {})

    def _enter(self, action: Item, item: Item, entered: dict[str, str]) -> None:
        """Ask for the inputs in separate dialogs, one after the other. Then call the operation."""
        inputs = action.get("inputs", ())
        if len(entered) == len(inputs):
            args = {**take_args(action.get("args", {}), item), **{name: text for name, text in entered.items() if text}}
            self._work(self._call, action["op"], args)
            return
        entry = inputs[len(entered)]

        def go_on(text: str | None) -> None:
            if text is not None:
                self._enter(action, item, {**entered, entry["argument"]: text})

        self.app.push_screen(self._make_dialog(entry, item), go_on)

    def _make_dialog(self, entry: Item, item: Item) -> Ask | Choose:
        label = sanitize(entry["label"])
        name, _, field = entry.get("choices_from", "").partition(".")
        choices = (
            [str(it[field]) for it in item.get(name) or () if isinstance(it, Mapping) and field in it]
            if name
            else entry.get("choices")
        )
        if choices:
            # Remove duplicates: two entries with the same id would raise an error in the list and end the program.
            return Choose(label, [(choice, Content(sanitize(choice))) for choice in dict.fromkeys(choices)])
        value = item.get(entry.get("field", ""))
        return Ask(label, "" if value is None else str(value))

    async def _call(self, op: str, args: dict[str, Any]) -> None:
        await self.desk.client.call(op, args)
        await self._read()


class Reader(ModalScreen[None]):
    """Screen that shows a text and scrolls."""

    BINDINGS: ClassVar = [("escape,q", "leave", "Back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help"):
            yield Static(Content(self._text), markup=False)

    def action_leave(self) -> None:
        self.dismiss(None)
