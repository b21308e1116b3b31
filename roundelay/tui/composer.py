"""Text field of a thread, with several lines. After an @, the field offers participants' ids.

Enter posts `Composer.Entered`, and the handler of that event sends the text and empties the field. Pasted text is
sanitized, so that the person sends exactly the text on the screen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from textual import events
from textual.message import Message as TextualMessage
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from roundelay.display.text import sanitize, sanitize_lines
from roundelay.tui.keys import is_typed

MAX_OFFERED = 6
_NAMED = re.compile(r"(?:^|\s)@([a-z0-9._-]*)$")
_SEND, _NEW_LINE = ("enter",), ("ctrl+j", "shift+enter", "alt+enter")


class Composer(TextArea):
    """Text field of a thread. ``list_ids`` returns the ids that can be mentioned."""

    class Entered(TextualMessage):
        """Event: the person has sent the text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Left(TextualMessage):
        """Event: the person has moved from the text field back to the messages."""

    def __init__(self, offered: Offered, list_ids: Callable[[], Iterable[str]]) -> None:
        super().__init__(soft_wrap=True, show_line_numbers=False, highlight_cursor_line=False, compact=True)
        self.cursor_blink = False
        self._offered = offered
        self._list_ids = list_ids

    def check_consume_key(self, key: str, character: str | None = None) -> bool:
        return is_typed(key) or super().check_consume_key(key, character)

    async def _on_key(self, event: events.Key) -> None:
        # While ids are offered, these keys select an id. Otherwise Enter would send an incomplete name.
        if self._offered.display and event.key in ("tab", "up", "down", "escape", "enter"):
            self._choose(event.key)
        elif event.key in _SEND:
            self.post_message(self.Entered(self.text))
        elif event.key in _NEW_LINE:
            self._replace_via_keyboard("\n", *self.selection)
        elif event.key == "escape":
            self.post_message(self.Left())
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        text = "\n".join(sanitize_lines(event.text.replace("\r\n", "\n").replace("\r", "\n")))
        if result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)

    def on_text_area_changed(self, _event: TextArea.Changed) -> None:
        named = self._find_named()
        # Skip ids that must be escaped, because the inserted text would differ from the shown text.
        ids = [it for it in self._list_ids() if named is not None and it.startswith(named) and sanitize(it) == it]
        # Offer nothing for a complete name, so that Enter sends the text.
        self._offered.offer(ids[:MAX_OFFERED] if ids != [named] else [])

    def _find_named(self) -> str | None:
        """Return the beginning of the id that is being typed after an @, or None."""
        row, column = self.cursor_location
        found = _NAMED.search(self.document[row][:column])
        return found[1] if found is not None else None

    def _choose(self, key: str) -> None:
        offered = self._offered
        match key:
            case "up":
                offered.action_cursor_up()
            case "down":
                offered.action_cursor_down()
            case "escape":
                offered.offer([])
            case _:
                chosen, named = offered.chosen, self._find_named()
                if chosen is not None and named is not None:
                    self.insert(f"{chosen[len(named) :]} ")
                offered.offer([])


class Offered(OptionList, can_focus=False):
    """List of participants' ids that is shown after an @."""

    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self.display = False

    @property
    def chosen(self) -> str | None:
        option = self.highlighted_option
        return str(option.prompt) if option is not None else None

    def offer(self, ids: list[str]) -> None:
        self.clear_options()
        self.add_options([Option(it) for it in ids])
        self.highlighted = 0 if ids else None
        self.display = bool(ids)
