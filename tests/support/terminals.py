"""`roundelay chat` on a pseudo-terminal, as a person uses it."""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyte

from tests.support.forks import Forked, start_roundelay


class Terminal:
    """A chat on a pseudo-terminal. ``raw`` is its whole output, and ``screen`` is the visible text."""

    def __init__(self, descriptor: int, process: asyncio.subprocess.Process | Forked, columns: int) -> None:
        self.process = process
        self.raw = ""
        self._screen = pyte.Screen(columns, 24)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = [""]  # screens since the last wait, oldest first; a screen may change before the test looks
        self._descriptor = descriptor
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    @property
    def screen(self) -> str:
        """Return the lines on the screen, without trailing blanks and trailing empty lines."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n")

    @property
    def cursor(self) -> tuple[str, int]:
        """Return the line with the cursor, and the cursor's column."""
        return self._screen.display[self._screen.cursor.y].rstrip(), self._screen.cursor.x

    def type(self, keys: str | bytes) -> None:
        os.write(self._descriptor, keys.encode() if isinstance(keys, str) else keys)

    def resize(self, columns: int) -> None:
        self._screen.resize(24, columns)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process.send_signal(
            signal.SIGWINCH
        )  # the kernel signals only processes that this terminal controls, and the chat is not one of them

    def is_as_before(self) -> bool:
        """Whether the terminal echoes and reads whole lines, as a shell expects."""
        return bool(termios.tcgetattr(self._descriptor)[3] & (termios.ECHO | termios.ICANON))

    async def shows(self, pattern: str) -> str:
        """Wait until the pattern is on the screen, or was on it since the last call. Return that screen."""
        try:
            async with asyncio.timeout(20):
                while not (found := [at for at, screen in enumerate(self._seen) if re.search(pattern, screen)]):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{pattern!r} is not in:\n{self.screen}") from None
        self._seen = self._seen[found[0] :]
        return self._seen[0]

    async def told(self, text: str) -> None:
        """Wait until the command has written this text, including control characters."""
        async with asyncio.timeout(20):
            while text not in self.raw:
                self._news.clear()
                await self._news.wait()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # the other end of the terminal is closed
            asyncio.get_running_loop().remove_reader(self._descriptor)
            return
        text = self._decoder.decode(data)
        self.raw += text
        for line in text.splitlines(keepends=True):
            self._stream.feed(line)
            if (screen := self.screen) != self._seen[-1]:
                self._seen.append(screen)
        self._news.set()


@asynccontextmanager
async def at_terminal(*flags: str, person: str = "mia", columns: int = 60) -> AsyncIterator[Terminal]:
    """Run a chat on a node that is up, or at ``--url``, until the context ends."""
    async with command_at_terminal("chat", "--as", person, *flags, shows="Ctrl-D leaves", columns=columns) as terminal:
        yield terminal


@asynccontextmanager
async def command_at_terminal(
    *arguments: str, shows: str, columns: int = 60, cwd: Path | None = None, **environment: str
) -> AsyncIterator[Terminal]:
    """Run a command on a pseudo-terminal. On entry, the terminal's screen shows the text ``shows``. ``environment``
    is added to the inherited environment.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm", **environment}
    process = await start_roundelay(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=env)
    terminal = Terminal(ours, process, columns)
    try:
        await terminal.shows(shows)
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(theirs)
        os.close(ours)
