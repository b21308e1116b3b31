"""Where a chat's lines come from: keys on a terminal, or a pipe.

`run_chat` is the whole of ``roundelay chat``. On a terminal the line being typed stays below what arrives; otherwise lines are read to
the end of the input, and then answers are waited for.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
import termios
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TextIO

from roundelay.chat import Chat
from roundelay.clean_text import clean, display_width, fit
from roundelay.line_editor import EndOfInput, Interrupt, Key, Line, LineEditor
from roundelay.network.client import NetworkClient
from roundelay.network.errors import RequestError
from roundelay.patience import PIPE_PATIENCE_S, Patience
from roundelay.terminal import Paint, Screen, terminal_height, terminal_width, wants_color

QUIET_S = 2.0
"""After the end of a pipe the chat leaves when nothing has happened for so long and nobody is at work."""
MOST_QUIET_WAIT_S = 120.0
MAX_KEYS = 1000
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
CLEAR_LINE = "\r\x1b[2K"
MAX_LIVE_ROWS = 10
DRAW_EVERY_S = 0.05
"""What others do is drawn that often at most; what is typed at once."""
MAX_LABEL, MIN_STATE, MIN_TYPING = 40, 8, 20
"""Columns of the prompt: of who is at work and of the place, each, at most; of the former, at least; what is left to type in."""


async def run_chat(client: NetworkClient, *, to: str | None = None, wait_s: float | None = None) -> bool:
    """Chat until the person leaves or the input ends; True if every line could be obeyed.

    ``wait_s`` is how long to stay after the end of a pipe; without it, until it is quiet. Raises what ends the connection.
    """
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if is_interactive:
        with PromptLine(sys.stdout).at_work() as prompt:
            chat = Chat(client, Screen(prompt, paint=prompt.paint), shows_activity=False)
            prompt.follow(chat)
            await chat.begin(to)
            chat.screen.note("Type a line to send it; /help tells more, Ctrl-D leaves.")
            await _converse(chat, prompt.lines(), wait_s=0.0)
    else:
        chat = Chat(client, Screen(sys.stdout), errors=Screen(sys.stderr), patience=Patience(PIPE_PATIENCE_S))
        await chat.begin(to)
        open_before = await _count_open_reactions(client)
        await _converse(chat, read_lines(sys.stdin.fileno()), wait_s=wait_s, open_before=open_before)
    return not chat.has_failed or is_interactive


async def _converse(chat: Chat, lines: AsyncIterator[str], *, wait_s: float | None, open_before: int = 0) -> None:
    async with asyncio.TaskGroup() as group:
        beside = (chat.show_messages(), chat.show_events(), chat.tell_typing())
        tasks = [group.create_task(work) for work in beside]
        async for line in lines:
            if not await chat.take_line(line):
                break
        else:
            await _wait_for_answers(chat, wait_s, open_before)
        for task in tasks:
            task.cancel()


async def _wait_for_answers(chat: Chat, wait_s: float | None, open_before: int) -> None:
    """Wait until it is quiet and no more reactions are open than before: those may be of agents that never come back."""
    if wait_s is not None:
        await asyncio.sleep(wait_s)
        return
    try:
        async with asyncio.timeout(MOST_QUIET_WAIT_S):
            await chat.activity.wait_until_quiet(QUIET_S)
            while await _count_open_reactions(chat.client) > open_before + len(chat.activity.undecided):
                await chat.activity.wait_until_quiet(QUIET_S)
        for (agent_id, _), seq in chat.activity.undecided.items():
            decide = f"/approve {seq} or /deny {seq} in: roundelay chat --as {chat.client.agent_id}"
            chat.screen.note(f"{clean(agent_id)} waits for the decision of #{seq}: {decide}")
    except TimeoutError:
        chat.screen.note(f"Left after {MOST_QUIET_WAIT_S:g} s; to stay longer, give --wait SECONDS.")


async def _count_open_reactions(client: NetworkClient) -> int:
    """How many reactions agents are at; 0 for who may not know: then the agents' signals alone tell."""
    try:
        return int((await client.call("network.status"))["open_reactions"])
    except RequestError:
        return 0


async def read_lines(descriptor: int) -> AsyncIterator[str]:
    """The lines of a pipe, file or terminal, as they come.

    A thread reads, since not every descriptor can be polled. It is a daemon and reads below Python's buffers, so that a chat which ends
    early neither waits for it nor finds a lock of its.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str | None] = asyncio.Queue(
        maxsize=1
    )  # full: the thread waits, and so does who writes the pipe

    def read() -> None:
        try:
            for line in _split_lines(descriptor):
                asyncio.run_coroutine_threadsafe(queue.put(line), loop).result()
            asyncio.run_coroutine_threadsafe(queue.put(None), loop).result()
        except (RuntimeError, asyncio.CancelledError):
            return  # the loop has ended before the input

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while (line := await queue.get()) is not None:
        yield line


def _split_lines(descriptor: int) -> Iterator[str]:
    rest = b""
    while data := _read(descriptor):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.removesuffix(b"\r").decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # closed, or a terminal that is gone: the input has ended
        return b""


class PromptLine:
    """The lowest line of a terminal: a prompt and what is being typed. Its `write` puts text above it.

    Use inside ``with prompt.at_work()``, which gives the terminal back as it was.
    """

    def __init__(self, stream: TextIO) -> None:
        self.paint = Paint(is_on=wants_color(stream))
        self._stream = stream
        self._input = sys.stdin.fileno()
        self._editor = LineEditor()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chat: Chat | None = None
        self._is_at_work = False
        self._live_rows = 0  # drawn above the prompt, to be drawn over
        self._due: asyncio.TimerHandle | None = None  # the next time to draw
        # Full: the newest keys are dropped, which takes a paste of a thousand lines outside of a bracketed one.
        self._keys: asyncio.Queue[Key] = asyncio.Queue(maxsize=MAX_KEYS)

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> None:
        """Write whole lines above the prompt."""
        self._stream.write(f"{self._erase()}{text}")
        self._draw()

    def flush(self) -> None:
        self._stream.flush()

    def follow(self, chat: Chat) -> None:
        """Show the chat's place and who is at work in the prompt."""
        self._chat = chat
        chat.activity.on_change = self._draw_soon

    async def lines(self) -> AsyncIterator[str]:
        """What is entered, until the person leaves."""
        self._draw()
        while True:
            match await self._keys.get():
                case Line(text):
                    yield text
                    self._draw()
                case Interrupt() | EndOfInput():
                    return

    @contextmanager
    def at_work(self) -> Iterator[PromptLine]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        before = termios.tcgetattr(self._input)
        mode = termios.tcgetattr(self._input)
        mode[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
        try:
            termios.tcsetattr(self._input, termios.TCSADRAIN, mode)
            self._stream.write(PASTE_ON)
            self._is_at_work = True
            loop.add_reader(self._input, self._take_input)
            loop.add_signal_handler(signal.SIGWINCH, self._draw)
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
            yield self
        finally:
            self._is_at_work = False
            for number in (signal.SIGWINCH, signal.SIGTERM):
                loop.remove_signal_handler(number)
            loop.remove_reader(self._input)
            self._stream.write(f"{self._erase()}{PASTE_OFF}")
            self._stream.flush()
            termios.tcsetattr(self._input, termios.TCSADRAIN, before)

    def _take_input(self) -> None:
        data = _read(self._input)
        keys = self._editor.feed(self._decoder.decode(data)) if data else [EndOfInput()]
        if not data:
            asyncio.get_running_loop().remove_reader(self._input)
        for key in keys:
            if not self._keys.full():
                self._keys.put_nowait(key)
        self._draw()
        if self._chat is not None and self._editor.text and not self._editor.text.startswith("/"):
            self._chat.typed.set()

    def _draw_soon(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(DRAW_EVERY_S, self._draw)

    def _draw(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._is_at_work:
            return
        width = terminal_width(self._stream) or 80
        label, plain = self._describe(width)
        text, cursor = self._editor.view(max(width - display_width(plain) - 1, 10))
        column = display_width(plain) + cursor
        erased, live = self._erase(), self._view_live(width)
        self._live_rows = len(live)
        above = "".join(f"{line}\n" for line in live)
        self._stream.write(f"{erased}{above}{label}{text}" + (f"\r\x1b[{column}C" if column else ""))
        self._stream.flush()

    def _erase(self) -> str:
        """Go to where the live lines began, and clear from there."""
        rows, self._live_rows = self._live_rows, 0
        return f"\r\x1b[{rows}A\x1b[J" if rows else CLEAR_LINE

    def _view_live(self, width: int) -> list[str]:
        """What is being written in the chat's place, above the prompt; never the most of the terminal."""
        if self._chat is None:
            return []
        height = terminal_height(self._stream) or 24
        place = self._chat.place.thread_id
        return self._chat.live.lines(place, width=width - 1, rows=min(MAX_LIVE_ROWS, height // 2 - 1), paint=self.paint)

    def _describe(self, width: int) -> tuple[str, str]:
        """The prompt, in colours and without. It leaves room to type in: a line that the terminal breaks cannot be drawn over."""
        if self._chat is None:
            return "", ""
        place = f"{fit(clean(self._chat.place.describe()), min(MAX_LABEL, width // 3))}> "
        room = min(MAX_LABEL, width - display_width(place) - len("() ") - MIN_TYPING)
        busy = fit(self._chat.activity.describe(), room) if room >= MIN_STATE else ""
        state = f"({busy}) " if busy else ""
        return self.paint.dim(state) + self.paint.bold(place), state + place
