"""Bottom lines of `roundelay chat` at a terminal: growing texts, the prompt, and the line that is being typed.

Only this module imports `prompt_toolkit`, so that other commands start fast. Messages are written above the prompt, and
finished lines go to `PromptLine.lines`. Pasted text stays one line, even with line breaks. Otherwise each of its lines
would become a message and could wake agents.
"""

from __future__ import annotations

import asyncio
import os
import signal
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import accumulate, islice
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import Dimension
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output.vt100 import Vt100_Output
from wcwidth import grapheme_boundary_before, iter_graphemes

from roundelay.display.screen import Paint, terminal_height, terminal_width, wants_color
from roundelay.display.text import TAB, display_width, fit_start, sanitize
from roundelay.network.durable_files import make_folder, replace_file
from roundelay.network.errors import ConfigError, RoundelayError
from roundelay.network.home import home
from roundelay.network.platforms import CLOSE_ON_EXEC, handle_signals, set_mode
from roundelay.runs.lists import list_participants, list_threads
from roundelay.terminal.activity_lines import describe_active, draw_growing_texts
from roundelay.terminal.chat import Chat
from roundelay.terminal.chat_commands import COMMANDS

MAX_LINES = 1000
"""Maximum number of entered lines that wait for processing. Further lines stay in the prompt."""
MAX_LIVE_ROWS, MAX_TYPED_ROWS, MENU_ROWS = 10, 8, 6
"""Maximum number of rows for growing texts and for the typed line, so that the conversation remains visible. The third
value is the number of rows that completions need.
"""
DRAW_EVERY_S = 0.05
"""Minimum time between two redraws of others' activity, in seconds. Typing is drawn at once."""
ESCAPE_S = 0.1
"""Maximum time in seconds between Esc and a key that form one shortcut, as in Alt-b."""
MAX_LABEL, MIN_STATE, MIN_TYPING = 40, 8, 20
"""Numbers of columns in the prompt: the maximum for the activity and for the destination, the minimum for the activity,
and the minimum for typing.
"""
LINE_BREAK = "⏎ "
"""Prefix of the second and further lines of a pasted text."""
MAX_HISTORY, MAX_HISTORY_BYTES = 500, 1_000_000
"""Number of earlier lines that are loaded, and the size at which the older half of their file is deleted."""
COMPLETE_WITHIN_S, MAX_THREADS = 2.0, 50


class PromptLine:
    """Prompt with a typed line. `write` writes text above the prompt. Use it inside ``async with prompt.at_work()``."""

    def __init__(self, stream: TextIO) -> None:
        self.paint = Paint(is_on=wants_color(stream))
        self._stream = stream
        self.chat: Chat | None = None
        self._has_hinted = False  # whether the hint was shown since the last entered line
        self._due: asyncio.TimerHandle | None = None  # timer of the next redraw
        # None means that the person leaves
        self._lines: asyncio.Queue[str | None] = asyncio.Queue(maxsize=MAX_LINES + 1)
        # Do not ask the terminal for the cursor position. Not every terminal answers, and typed keys would be mixed
        # into the answer.
        output = Vt100_Output(
            stream, Vt100_Output.from_pty(stream).get_size, term=os.environ.get("TERM"), enable_cpr=False
        )
        self._session: PromptSession[None] = PromptSession(
            self._describe,
            output=output,
            history=_open_history(),
            completer=_Completer(self),
            # Complete only on request: otherwise each letter would cause a request to the hub.
            complete_while_typing=False,
            input_processors=[_Clean()],
            key_bindings=self._make_keys(),
            prompt_continuation=lambda _width, _line, wraps: "" if wraps else LINE_BREAK,
            erase_when_done=True,
        )
        self._session.layout.current_window.height = self._limit_rows
        self._session.app.ttimeoutlen = self._session.app.timeoutlen = ESCAPE_S
        self._session.default_buffer.accept_handler = self._accept
        self._session.default_buffer.on_text_changed += self._tell_typing

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> None:
        """Write complete lines above the prompt."""
        app = self._session.app
        if app.is_running:
            # Erase the prompt first: otherwise parts of the old prompt would remain among the messages.
            app.renderer.erase()
        self._stream.write(text)
        self._stream.flush()  # write at once, because the caller acknowledges the message next
        app.invalidate()

    def flush(self) -> None:
        self._stream.flush()

    def follow(self, chat: Chat) -> None:
        """Show the chat's current destination and the active agents in the prompt."""
        self.chat = chat
        chat.activity.on_change = self._draw_soon

    async def lines(self) -> AsyncIterator[str]:
        """Yield the entered lines until the person leaves."""
        self._session.app.invalidate()
        while (line := await self._lines.get()) is not None:
            yield line
            self._session.app.invalidate()  # the line may have changed the current place

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[PromptLine]:
        """Show the prompt until the block ends. Then restore the terminal."""
        task = asyncio.current_task()
        assert task is not None
        typing = asyncio.create_task(self._session.prompt_async(set_exception_handler=False, handle_sigint=False))
        typing.add_done_callback(lambda _: self._leave())
        try:
            with handle_signals([signal.SIGTERM], task.cancel):
                yield self
        finally:
            if self._due is not None:
                self._due.cancel()
            typing.cancel()
            await asyncio.wait([typing])
        if not typing.cancelled() and (error := typing.exception()) is not None and not isinstance(error, EOFError):
            raise error

    def _accept(self, buffer: Buffer) -> bool:
        """Queue an entered line. Return True to keep the line in the prompt, because too many lines are waiting."""
        # Reserve one entry of the queue for the end of the input, which must never be lost.
        if self._lines.qsize() >= MAX_LINES:
            return True
        self._has_hinted = False
        # Python decodes bytes that are not UTF-8 to lone surrogates.
        self._lines.put_nowait(buffer.text.encode(errors="surrogateescape").decode(errors="replace"))
        return False

    def _hint_at_work(self) -> bool:
        """Explain once that agents continue to work after the person leaves. Return whether the hint was shown now."""
        busy = list(self.chat.activity.list_busy()) if self.chat is not None else []
        if self.chat is None or not busy or self._has_hinted:
            return False
        self._has_hinted = True
        names = sanitize(", ".join(busy))
        is_here = self.chat.place.thread_id in self.chat.activity.list_busy_threads()
        stop = "/stop" if is_here else "/stop THREAD"
        verb = "is" if len(busy) == 1 else "are"
        self.chat.screen.note(f"{names} {verb} at work: {stop} stops that; Ctrl-C again only leaves.")
        return True

    def _leave(self) -> None:
        if not self._lines.full():
            self._lines.put_nowait(None)

    def _limit_rows(self) -> Dimension:
        is_completing = self._session.default_buffer.complete_state is not None
        return Dimension(min=MENU_ROWS if is_completing else 1, max=MAX_TYPED_ROWS)

    def _tell_typing(self, buffer: Buffer) -> None:
        if self.chat is not None and buffer.text and not buffer.text.startswith("/"):
            self.chat.typed.set()

    def _make_keys(self) -> KeyBindings:
        """Return key bindings that differ from those of prompt_toolkit.

        These keys leave the chat, or they move and delete by whole characters, which may have several code points.
        """
        keys = KeyBindings()
        here = has_focus(DEFAULT_BUFFER)

        @keys.add(Keys.Any, filter=here)
        def _(event: KeyPressEvent) -> None:
            if event.data >= "\xa0" or event.data.isprintable():  # the bytes of an unknown key must not become text
                event.current_buffer.insert_text(event.data)

        @keys.add("escape", filter=here)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.cancel_completion()

        @keys.add("c-c", filter=here)
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            elif not self._hint_at_work():
                self._leave()

        @keys.add("c-d", filter=here)
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.delete(_count_after(event))
            else:
                self._leave()

        @keys.add("delete", filter=here)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.delete(_count_after(event))

        @keys.add("backspace", filter=here)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.delete_before_cursor(_count_before(event))

        @keys.add("left", filter=here)
        @keys.add("c-b", filter=here)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.cursor_position -= _count_before(event)

        @keys.add("right", filter=here)
        @keys.add("c-f", filter=here)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.cursor_position += _count_after(event)

        return keys

    def _draw_soon(self) -> None:
        # Use one timer for all changes until it fires, because texts grow many times per second.
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(DRAW_EVERY_S, self._draw)

    def _draw(self) -> None:
        self._due = None
        self._session.app.invalidate()

    def _describe(self) -> ANSI:
        """Return the growing texts in the current destination, followed by the prompt. The texts use less than half of
        the terminal.
        """
        if self.chat is None:
            return ANSI("")
        width, height = terminal_width(self._stream) or 80, terminal_height(self._stream) or 24
        rows = min(MAX_LIVE_ROWS, height // 2 - 1)
        here, under_way = self.chat.place, self.chat.activity
        live = draw_growing_texts(under_way, here.thread_id, width=width - 1, rows=rows, paint=self.paint)
        by, me = under_way.takeovers.get(here.thread_id), self.chat.client.agent_id
        held = "" if by is None else "taken over by you" if by == me else f"taken over by {sanitize(by)}"
        place = f"{fit_start(sanitize(here.describe()), min(MAX_LABEL, width // 3))}> "
        room = min(MAX_LABEL, width - display_width(place) - len("() ") - MIN_TYPING)
        busy = (
            fit_start("; ".join(filter(None, (held, describe_active(under_way, me)))), room)
            if room >= MIN_STATE
            else ""
        )
        state = f"({busy}) " if busy else ""
        return ANSI("\n".join([*live, self.paint.dim(state) + self.paint.bold(place)]))


async def _find_words(chat: Chat, before: list[str], word: str) -> list[tuple[str, str]]:
    """Return completions for a word: arguments according to the command's usage or, in a text, participants' ids."""
    if not before and word.startswith("/") and not word.startswith("//"):
        return [(f"/{name}", command.meaning) for name, command in COMMANDS.items()] + [("/quit", "leave")]
    command = COMMANDS.get(before[0][1:]) if before and before[0].startswith("/") else None
    usage = command.usage.split() if command is not None else []
    match usage[len(before)].strip("[]") if len(before) < len(usage) else "TEXT":
        case "CHANNEL":
            channels = (await chat.client.call("channels.list"))["channels"]
            return [(str(it["name"]), str(it.get("topic") or "")) for it in channels]
        case "THREAD":
            return [(str(it["thread_id"]), "") for it in await list_threads(chat.client, limit=MAX_THREADS)]
        case "ACCESS":
            return [("open", ""), ("invite", ""), ("closed", "")]
        case wanted if wanted in ("ID", "AGENT") or (wanted == "TEXT" and word):
            others = [it for it in await list_participants(chat.client) if it["agent_id"] != chat.client.agent_id]
            return [(str(it["agent_id"]), str(it["state"])) for it in others]
    return []


class _Completer(Completer):
    """Completes the last word of a line with data from the hub. If the hub fails or takes too long, there are no
    completions."""

    def __init__(self, prompt: PromptLine) -> None:
        self._prompt = prompt

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        return []  # completions are asynchronous, because they need the hub

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        *before, word = document.text_before_cursor.split(" ")
        found: list[tuple[str, str]] = []
        if self._prompt.chat is not None:
            with suppress(RoundelayError, TimeoutError):
                async with asyncio.timeout(COMPLETE_WITHIN_S):
                    found = await _find_words(self._prompt.chat, before, word)
        for it, meaning in found:
            # Skip a name that must be escaped, because the inserted text would differ from the shown text.
            if it.casefold().startswith(word.casefold()) and sanitize(it) == it:
                yield Completion(it, -len(word), display_meta=sanitize(meaning))


class _Clean(Processor):
    """Sanitizes the typed line on the screen, because pasted or earlier text could contain control characters."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        chars = explode_text_fragments(transformation_input.fragments)
        if all(it[1].isascii() and it[1].isprintable() for it in chars):
            return Transformation(chars)
        shown: StyleAndTextTuples = [(style, TAB if char == "\t" else sanitize(char)) for style, char, *_ in chars]
        starts = list(accumulate((len(it[1]) for it in shown), initial=0))
        last = len(shown)
        return Transformation(
            shown,
            source_to_display=lambda at: starts[min(at, last)] + max(at - last, 0),
            display_to_source=lambda at: bisect_right(starts, at) - 1,
        )


class _History(FileHistory):
    """History of the lines typed in this chat and earlier chats. If its file cannot be written, the chat continues
    without it."""

    def load_history_strings(self) -> Iterable[str]:
        return islice(super().load_history_strings(), MAX_HISTORY)

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _open_history() -> History:
    """Open the history of typed lines, in a file that only its user may read.

    The lines may contain private messages to participants.
    """
    try:
        path = home() / "chat_history"
        make_folder(path.parent)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | CLOSE_ON_EXEC, 0o600)
        try:
            set_mode(descriptor, 0o600)  # the file may have been copied here with other permissions
        finally:
            os.close(descriptor)
        if path.stat().st_size > MAX_HISTORY_BYTES:
            newest = path.read_bytes()[-MAX_HISTORY_BYTES // 2 :]
            with replace_file(path) as file:
                file.write(
                    newest[max(newest.find(b"\n# "), 0) :].decode(errors="replace")
                )  # start at the beginning of an entry
    except (OSError, ConfigError):
        return InMemoryHistory()
    return _History(path)


def _count_before(event: KeyPressEvent) -> int:
    """Return the number of code points in the character before the cursor. An emoji may have seven code points."""
    text = event.current_buffer.document.text_before_cursor
    return len(text) - grapheme_boundary_before(text, len(text)) if text else 0


def _count_after(event: KeyPressEvent) -> int:
    return len(next(iter_graphemes(event.current_buffer.document.text_after_cursor), ""))
