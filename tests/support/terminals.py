"""`roundelay chat` on a pseudo-terminal, as a person has it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Terminal:
    """A chat on a pseudo-terminal; ``text`` is everything that it wrote there."""

    def __init__(self, descriptor: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""
        self._descriptor = descriptor
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def is_as_before(self) -> bool:
        """Whether the terminal echoes and waits for whole lines, as a shell wants it."""
        return termios.tcgetattr(self._descriptor)[3] & (termios.ECHO | termios.ICANON) != 0

    async def shows(self, pattern: str) -> str:
        """Wait until the pattern stands in what was written since the last such wait; gives that, up to its end."""
        try:
            async with asyncio.timeout(20):
                while (found := re.search(pattern, self.text)) is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{pattern!r} is not in {self.text!r}") from None
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(self._descriptor)
            return
        self.text += data.decode(errors="replace")
        self._news.set()


@asynccontextmanager
async def at_terminal(*flags: str, person: str = "mia", columns: int = 60) -> AsyncIterator[Terminal]:
    """A chat on a node that is up here, or at ``--url``, until the block ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", "chat", "--as", person, *flags,
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    terminal = Terminal(ours, process)
    try:
        await terminal.shows("Ctrl-D leaves")
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(theirs)
        os.close(ours)
