"""Building blocks of the screens: panes, lists and text fields, and the interfaces through which panes use the app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Footer, Input, OptionList
from textual.widgets._footer import FooterKey  # the key symbols of Textual's footer, which Textual does not export
from textual.widgets.option_list import Option

from roundelay.display.text import display_width, fit_start, sanitize_lines
from roundelay.network.client import AnyMessage
from roundelay.terminal.places import Place
from roundelay.terminal.saving import save_files
from roundelay.tui.desk import Desk, InboxItem, Part
from roundelay.tui.keys import is_typed

Parts = list[Content | str | tuple[str, str]]


class Actions(Protocol):
    """Actions that need a dialog, or that may outlive their pane. Failing methods raise `RoundelayError`."""

    def decide(self, word: str, seq: int, scope: str) -> None: ...

    async def send_decision(self, seq: int, decision: str) -> None: ...

    def resume_item(self, item: InboxItem) -> None: ...

    async def resume(self, what: str) -> None: ...

    def toggle_read_state(self, thread_id: str, name: str) -> None: ...

    def name_thread(self, thread_id: str) -> None: ...

    def stop(self, thread_id: str) -> None: ...

    def toggle_takeover(self, thread_id: str) -> None: ...

    def send_typing(self, place: Place) -> None: ...


class Terminal(Protocol):
    """Functions of the terminal app that panes use. Failing methods raise `RoundelayError`."""

    @property
    def actions(self) -> Actions: ...

    def work(self, do: Callable[..., Awaitable[object]], *args: object) -> None: ...

    def open_thread(self, thread_id: str, at: int | None = None) -> None: ...

    def open_why(self, seq: int) -> None: ...

    async def go_to(self, to: str) -> None: ...

    async def show_sent(self, seq: int) -> None: ...


class Pane(Vertical):
    """One screen of the app, below the top line with the names of the screens."""

    name_here = ""
    """Name of the screen."""
    tab = ""
    """Name to highlight in the top line, for a screen that the top line does not list."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk

    @property
    def terminal(self) -> Terminal:
        # Use a protocol instead of the class, because the app imports the panes.
        return cast(Terminal, self.app)

    def handle_change(self, part: Part) -> None:
        """Redraw the widgets that show a changed part of the data."""

    def focus_main(self) -> None:
        """Focus the main widget when the pane is shown."""
        for widget in self.query("Rows, Input"):
            widget.focus()
            break


class ReadStateKeys(Pane):
    """Pane with keys that change this person's state of one thread: read, pinned, muted, archived, and its name."""

    @property
    def marked_thread(self) -> str | None:
        """Thread to which the keys apply, or None."""
        raise NotImplementedError

    def action_read(self) -> None:
        if (thread_id := self.marked_thread) in self.desk.threads:
            self.terminal.work(self.desk.read_all, thread_id)

    def action_mark(self, name: str) -> None:
        if (thread_id := self.marked_thread) is not None:
            self.terminal.actions.toggle_read_state(thread_id, name)

    def action_name(self) -> None:
        if (thread_id := self.marked_thread) is not None:
            self.terminal.actions.name_thread(thread_id)


class FileKeys(Pane):
    """Pane with a key that saves the files of the selected message."""

    @property
    def chosen(self) -> AnyMessage | None:
        """Selected message, or None."""
        raise NotImplementedError

    def action_save_files(self) -> None:
        if self.chosen is None:
            self.desk.show_hint("Select a message by j and k: S saves its files.")
        else:
            self.terminal.work(self._save_files, self.chosen)

    async def _save_files(self, message: AnyMessage) -> None:
        for line in await save_files(self.desk.client, message, Path.cwd()):
            self.desk.show_line(line)


class Line(Input):
    """Text field with one line."""

    def on_mount(self) -> None:
        self.cursor_blink = False

    def check_consume_key(self, key: str, character: str | None) -> bool:
        return is_typed(key) or super().check_consume_key(key, character)

    def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        # Join the lines of a pasted text: a field with one line would keep only the first line.
        self.insert_text_at_cursor(" ".join(sanitize_lines(event.text.strip())))


class KeyLine(Footer):
    """Line that shows the keys that work now. Shows as many keys as fit, and always the key for help."""

    def compose(self) -> ComposeResult:
        found: list[Widget] = list(super().compose())
        keys = [it for it in found if isinstance(it, FooterKey)]
        last = [it for it in keys if it.action == "help"]
        room = self.app.size.width - sum(map(_width, last))
        for it in keys:
            if it in last:
                continue
            if _width(it) <= room:
                room -= _width(it)
                yield it
        yield from last

    def on_resize(self) -> None:
        self.call_after_refresh(self.recompose)


def _width(key: FooterKey) -> int:
    """Return the width of a key in columns, including the spaces around it."""
    return display_width(f" {key.key_display} {key.description} ")


class Rows(OptionList):
    """List whose entries have one or two lines. The selection survives a redraw."""

    BINDINGS: ClassVar = [
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._keys: list[str] = []

    def show(self, rows: Sequence[tuple[str, Content]]) -> None:
        """Show rows, each with the name that identifies it."""
        chosen = self.chosen
        self._keys = [key for key, _ in rows]
        # A redraw is not a choice of the person, so suppress its events.
        with self.prevent(OptionList.OptionHighlighted):
            self.clear_options()
            self.add_options([Option(content) for _, content in rows])
            if rows:
                self.highlighted = self._keys.index(chosen) if chosen in self._keys else 0

    @property
    def chosen(self) -> str | None:
        """Name of the highlighted row, or None."""
        at = self.highlighted
        return self._keys[at] if at is not None and at < len(self._keys) else None

    @property
    def room(self) -> int:
        """Width of a row in columns."""
        return max(self.scrollable_content_region.width - 2, 20)


def write_row(left: Parts, right: str, width: int, below: str = "") -> Content:
    """Return a line with a right-aligned part, and optionally a dim line below it. All arguments must already be
    sanitized."""
    head = Content.assemble(*left)
    room = width - display_width(right) - 1
    plain = fit_start(head.plain, room)
    if plain != head.plain:
        head = Content.assemble(head[: max(len(plain) - 1, 0)], "…")
    pad = " " * max(width - display_width(head.plain) - display_width(right), 1)
    parts: Parts = [head, pad, (right, "dim")]
    if below:
        parts.append((f"\n  {fit_start(below, width - 2)}", "dim"))
    return Content.assemble(*parts)
