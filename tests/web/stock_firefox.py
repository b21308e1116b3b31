"""Adapter that makes Debian's Firefox usable with Playwright. Playwright runs it as the browser. The adapter starts
Firefox and relays the protocol.

Playwright speaks WebDriver BiDi to a Firefox that is not its own build (channel ``moz-firefox``). At the creation of
each context, it uses one command that this year's long-term release of Firefox does not support. The adapter answers
this command itself, and forwards everything else unchanged.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection, serve

LACKED = frozenset({"emulation.setMediaFeaturesOverride"})
_LISTENING = re.compile(r"WebDriver BiDi listening on (ws://\S+)")


def write_launcher(folder: Path, firefox: str) -> Path:
    """Write the launcher that Playwright runs as Firefox."""
    launcher = folder / "firefox"
    launcher.write_text(
        f'#!/bin/sh\ncd "{Path(__file__).parents[2]}"\nexec "{sys.executable}" -m tests.web.stock_firefox "{firefox}" "$@"\n'
    )
    launcher.chmod(0o700)
    return launcher


async def main(*command: str) -> int:
    firefox = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert firefox.stderr is not None
    address = ""
    while not address:
        line = (await firefox.stderr.readline()).decode(errors="replace")
        if not line:
            return await firefox.wait()
        found = _LISTENING.search(line)
        address = found.group(1) if found else ""

    async def stand_between(playwright: ServerConnection) -> None:
        path = playwright.request.path if playwright.request else "/session"
        async with connect(f"{address}{path}", max_size=None, compression=None, ping_interval=None) as browser:
            await asyncio.wait(
                [
                    asyncio.ensure_future(_pass_commands(playwright, browser)),
                    asyncio.ensure_future(_pass(browser, playwright)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )

    async with serve(stand_between, "127.0.0.1", 0, max_size=None, compression=None, ping_interval=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        print(f"WebDriver BiDi listening on ws://127.0.0.1:{port}", file=sys.stderr, flush=True)
        await asyncio.gather(_drain(firefox.stderr), firefox.wait())
    return firefox.returncode or 0


async def _pass_commands(playwright: ServerConnection, browser: Connection) -> None:
    async for frame in playwright:
        command = json.loads(frame)
        if command["method"] in LACKED:
            await playwright.send(json.dumps({"type": "success", "id": command["id"], "result": {}}))
        else:
            await browser.send(frame)


async def _pass(browser: Connection, playwright: ServerConnection) -> None:
    async for frame in browser:
        await playwright.send(frame)


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
