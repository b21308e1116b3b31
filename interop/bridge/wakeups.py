"""Wakes an idle coding agent when it has new messages. This is a preview feature, and works only with some hosts.

A wake contains no message. A wake only starts a turn, in which the host's hooks or the tool `check` show the messages
as usual. All messages therefore have one ack cursor, receipts stay correct, and no text reaches the model in a second
way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import WebSocketException

from roundelay.network.errors import RoundelayError
from roundelay.network.extras import needs
from roundelay.network.home import find_user_folder

from .session import BridgeSession

with needs("bridge"):
    from mcp.server.mcpserver import MCPServer
    from mcp.server.runner import serve_loop
    from mcp.server.stdio import stdio_server
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCNotification


_logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""Delay before a wake, in seconds. During the delay, the hooks of a busy host may show the message."""
GAP_S = 20.0
MAX_AN_HOUR = 30
"""Maximum number of wakes per hour. Wakes are at least `GAP_S` seconds apart. The limit is needed because each wake
costs a turn, and two agents could wake each other endlessly.
"""
BUSY_S = 2.0
AGAIN_S = 5.0
WAIT_MS = 20_000
CODEX_S = 10.0
CHANNEL = "claude/channel"

Wake = Callable[[str], Awaitable[bool | None]]
"""Function that starts a turn of the host with a sentence as its prompt. The function returns True if a turn started,
False if the host is busy, and None if the host has no session in the project.
"""


async def serve_waking(server: MCPServer[Any], session: BridgeSession) -> None:
    """Serve MCP on stdin and stdout, and wake the host that started this process."""
    async with stdio_server() as (reading, writing):

        async def send_to_channel(sentence: str) -> bool:
            params = {"content": sentence, "meta": {"from": "roundelay"}}
            event = JSONRPCNotification(jsonrpc="2.0", method=f"notifications/{CHANNEL}", params=params)
            await writing.send(SessionMessage(event))
            return True

        async def start_turn(sentence: str) -> bool | None:
            return await start_codex_turn(find_codex_socket(), session.project, sentence)

        is_channel = session.host.name == "claude"
        inner = server._lowlevel_server  # the object that implements the protocol
        waking = asyncio.create_task(keep_waking(session, send_to_channel if is_channel else start_turn), name="waking")
        try:
            if is_channel:  # only MCP versions with a handshake allow unrequested notifications
                options = inner.create_initialization_options(experimental_capabilities={CHANNEL: {}})
                async with inner.lifespan(inner) as state:
                    await serve_loop(inner, reading, writing, lifespan_state=state, init_options=options)
            else:
                await inner.run(reading, writing, inner.create_initialization_options())
        finally:
            waking.cancel()
            await asyncio.gather(waking, return_exceptions=True)


async def keep_waking(session: BridgeSession, wake: Wake) -> None:
    """Wake the host whenever it has messages that its hooks have not shown. Runs until cancelled. Messages from before
    the start are left to the hooks, which show them when the host starts.
    """
    clock = asyncio.get_running_loop().time
    # Fill the queue with times more than an hour ago, so that ``woken[0] + 3600`` limits the rate from the first wake
    # on.
    woken: deque[float] = deque([-3600.0] * MAX_AN_HOUR, maxlen=MAX_AN_HOUR)
    position: tuple[str, int] | None = None
    """Epoch of the ledger's history, and the seq up to which messages have caused a wake."""
    while True:
        try:
            async with session.lend(None) as client:
                epoch = client.welcome.network.epoch
                if position is None or position[0] != epoch:
                    # Start at the end of the history. When the host starts, its hooks show the earlier messages.
                    position = epoch, client.welcome.head
                args = {"after": position[1], "limit": 100, "wait_ms": WAIT_MS, "peek": True}
                page = await client.call("network.receive", args)
            if page["messages"]:
                first = page["messages"][0]["seq"]
                await asyncio.sleep(max(GRACE_S, woken[-1] + GAP_S - clock(), woken[0] + 3600 - clock()))
                while waiting := await session.count_unseen(first):
                    # Count again before each attempt. If the hooks of a busy host have shown the messages meanwhile,
                    # the wake would be empty.
                    if await _wake_once(wake, waiting, woken) is not False:
                        break
                    await asyncio.sleep(BUSY_S)
            position = epoch, page["next"]  # advance only after the wake, so that a failed wake is retried
        except (RoundelayError, OSError, WebSocketException):
            await asyncio.sleep(AGAIN_S)
        except Exception:  # a new version of a host may answer in a new format
            _logger.exception("a host could not be woken")
            await asyncio.sleep(AGAIN_S)


async def _wake_once(wake: Wake, waiting: int, woken: deque[float]) -> bool | None:
    """Try to wake the host. An attempt that may have started a turn counts as a wake. Raises connection errors."""
    try:
        is_woken = await wake(_say(waiting))
    except TimeoutError:
        # Assume that the turn started although the reply was lost. Another wake could cost a second turn for the same
        # messages.
        is_woken = True
    if is_woken:
        woken.append(asyncio.get_running_loop().time())
    return is_woken


def _say(number: int) -> str:
    count = "A message has" if number == 1 else f"{number} messages have"
    return (
        f"This is Roundelay's bridge, not a person. {count} arrived for you while you were idle. The tool `check` of "
        "the server roundelay shows the messages that you have not seen yet."
    )


# --- Codex's app server


def find_codex_socket() -> Path:
    """Return the path of the socket on which this user's Codex app server listens, as of Codex 0.169."""
    folder = os.environ.get("CODEX_HOME")
    return (
        (Path(folder) if folder else find_user_folder() / ".codex") / "app-server-control" / "app-server-control.sock"
    )


async def start_codex_turn(path: Path, project: Path, sentence: str) -> bool | None:
    """Start a turn in the newest loaded thread of a project. Raises `OSError` if no app server listens. Also raises
    `WebSocketException` and `TimeoutError`.
    """
    async with asyncio.timeout(CODEX_S), unix_connect(str(path), uri="ws://localhost/", max_size=2**26) as socket:
        numbers = count(1)

        async def ask(method: str, params: dict[str, Any]) -> Any:
            return await _ask_codex(socket, next(numbers), method, params)

        client = {"name": "roundelay", "title": "Roundelay's bridge", "version": version("roundelay")}
        await ask("initialize", {"clientInfo": client})
        await socket.send(json.dumps({"method": "initialized"}))
        loaded = (await ask("thread/loaded/list", {}))["data"]
        threads = [(await ask("thread/read", {"threadId": thread_id}))["thread"] for thread_id in loaded]
        own = [
            thread
            for thread in threads
            if not thread.get("parentThreadId") and Path(thread["cwd"]).is_relative_to(project)
        ]
        if not own:
            return None
        newest = max(own, key=lambda thread: thread["updatedAt"])
        if newest["status"]["type"] != "idle":
            return False
        await ask("turn/start", {"threadId": newest["id"], "input": [{"type": "text", "text": sentence}]})
        return True


async def _ask_codex(socket: ClientConnection, number: int, method: str, params: dict[str, Any]) -> Any:
    await socket.send(json.dumps({"id": number, "method": method, "params": params}))
    while True:
        reply = json.loads(await socket.recv())
        # Skip notifications and requests of the server, because their ids may equal the id of this request.
        if reply.get("id") == number and "method" not in reply:
            if "error" in reply:
                raise OSError(f"Codex's app server refused {method}: {reply['error'].get('message')}")
            return reply["result"]
