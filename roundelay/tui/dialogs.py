"""Dialogs of the full-screen terminal: a question with a one-line answer, a choice from a list, the key after g, and
the help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from roundelay.tui.keys import HELP
from roundelay.tui.parts import Line


class Ask(ModalScreen[str | None]):
    """Dialog that asks for one line. The result is None if the person cancels."""

    BINDINGS: ClassVar = [("escape", "leave", "Back")]

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__()
        self._question = question
        self._value = value

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question), markup=False)
            yield Line(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value)

    def action_leave(self) -> None:
        self.dismiss(None)


class Choose(ModalScreen[str | None]):
    """Dialog that asks for one entry of a list, or for any other text. The result is None if the person cancels.

    Typed text filters the list.
    """

    BINDINGS: ClassVar = [
        ("escape", "leave", "Back"),
        Binding("down", "move(1)", show=False, priority=True),
        Binding("up", "move(-1)", show=False, priority=True),
    ]

    def __init__(self, question: str, choices: Sequence[tuple[str, Content]]) -> None:
        super().__init__()
        self._question = question
        self._choices = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question), markup=False)
            yield Line("")
            yield OptionList(*self._list(""), markup=False, classes="choices")

    def _list(self, typed: str) -> list[Option]:
        words = typed.strip().lower()
        found = [it for it in self._choices if words in it[1].plain.lower()]
        # Enter selects the first entry, so an entry with exactly the typed id must be first.
        found.sort(key=lambda it: (it[0] != words, not it[0].startswith(words)))
        return [Option(label, id=value) for value, label in found]

    def on_input_changed(self, event: Input.Changed) -> None:
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options(self._list(event.value))
        listed.highlighted = 0 if listed.option_count else None

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0
        self.query_one(Line).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        listed = self.query_one(OptionList)
        chosen = listed.get_option_at_index(listed.highlighted).id if listed.highlighted is not None else None
        # A text without a matching entry may name an unlisted place, for example a new channel.
        self.dismiss(chosen or event.value)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option.id)

    def action_move(self, step: int) -> None:
        listed = self.query_one(OptionList)
        if listed.option_count:
            listed.highlighted = ((listed.highlighted or 0) + step) % listed.option_count

    def action_leave(self) -> None:
        self.dismiss(None)


class GoTo(ModalScreen[str | None]):
    """Dialog that waits for the second key after g."""

    PLACES: ClassVar = {"i": "inbox", "t": "threads", "a": "agents", "c": "cost", "s": "search", "m": "mods"}
    BINDINGS: ClassVar = [
        *(Binding(key, f"take('{place}')") for key, place in PLACES.items()),
        Binding("escape", "take('')", "Back"),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(
                Content("Go to: i inbox   t threads   a agents   c cost   s search   m tasks, notes …"), markup=False
            )

    def action_take(self, place: str) -> None:
        self.dismiss(place or None)


class Help(ModalScreen[None]):
    """Dialog that lists all keys."""

    BINDINGS: ClassVar = [("escape,question_mark,q", "leave", "Back"), Binding("j", "down"), Binding("k", "up")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help"):
            for title, keys in HELP:
                yield Static(Text(title, "bold"))
                table = Table.grid(padding=(0, 1))  # a long meaning wraps within its column
                table.add_column(style="cyan", width=21)
                table.add_column()
                for key, meaning in keys:
                    table.add_row(Text(f"  {key}"), Text(meaning))
                yield Static(table)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_down(self) -> None:
        self.query_one(VerticalScroll).scroll_down(animate=False)

    def action_up(self) -> None:
        self.query_one(VerticalScroll).scroll_up(animate=False)
