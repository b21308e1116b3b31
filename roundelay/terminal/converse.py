"""Run the lines of ``roundelay chat`` from a prompt or a pipe. After a pipe has ended, wait for the answers."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator

from roundelay.connection import PIPE_PATIENCE_S, ReconnectLimit
from roundelay.display.screen import Screen
from roundelay.display.text import sanitize
from roundelay.network.client import NetworkClient
from roundelay.network.errors import RequestError
from roundelay.terminal.chat import Chat
from roundelay.terminal.chat_commands import COMMANDS

QUIET_S = 2.0
"""Time without events after the end of a pipe, in seconds, after which the chat ends if no agent is working."""
MOST_QUIET_WAIT_S = 120.0


async def run_chat(client: NetworkClient, *, to: str | None = None, wait_s: float | None = None) -> bool:
    """Chat until the person leaves or the input ends. Return whether every line succeeded.

    ``wait_s`` is the time to stay after the end of a pipe, in seconds. With None, stay until all agents are done.
    Raises the error that ends the connection.
    """
    # A prompt needs a terminal for both input and output.
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if is_interactive:
        from roundelay.terminal.prompt import PromptLine

        async with PromptLine(sys.stdout).at_work() as prompt:
            chat = Chat(client, Screen(prompt, paint=prompt.paint), shows_activity=False, commands=COMMANDS)
            prompt.follow(chat)
            await chat.start(to)
            chat.screen.note("Type a line to send it; /help shows more, Ctrl-D leaves.")
            await _converse(chat, prompt.lines(), wait_s=0.0)
    else:
        chat = Chat(
            client,
            Screen(sys.stdout),
            errors=Screen(sys.stderr),
            patience=ReconnectLimit(PIPE_PATIENCE_S),
            commands=COMMANDS,
        )
        await chat.start(to)
        open_before = await _count_open_reactions(client)
        await _converse(chat, read_lines(sys.stdin.fileno()), wait_s=wait_s, open_before=open_before)
    # A person has seen the error, but a script has only the exit code.
    return not chat.has_failed or is_interactive


async def _converse(chat: Chat, lines: AsyncIterator[str], *, wait_s: float | None, open_before: int = 0) -> None:
    async with asyncio.TaskGroup() as group:
        beside = (chat.show_messages(), chat.show_events(), chat.send_typing())
        tasks = [group.create_task(work) for work in beside]
        async for line in lines:
            if not await chat.handle_line(line):
                break
        else:
            await _wait_for_answers(chat, wait_s, open_before)
        for task in tasks:
            task.cancel()


async def _wait_for_answers(chat: Chat, wait_s: float | None, open_before: int) -> None:
    """Wait until no agent is working, and no more reactions are open than at the start.

    Reactions that were open at the start may belong to agents that never reconnect.
    """
    if wait_s is not None:
        # The caller has set the time, so ignore the activity.
        await asyncio.sleep(wait_s)
        return
    try:
        async with asyncio.timeout(MOST_QUIET_WAIT_S):
            await chat.activity.wait_until_quiet(QUIET_S)
            # A quiet agent may be waiting for its model, so also ask the hub for open reactions.
            while await _count_open_reactions(chat.client) > open_before + len(chat.activity.list_waiting_reactions()):
                await chat.activity.wait_until_quiet(QUIET_S)
        for it in chat.activity.list_own_requests():
            decide = f"/approve {it.seq} or /deny {it.seq} in: roundelay chat --as {chat.client.agent_id}"
            chat.screen.note(f"{sanitize(it.agent_id)} waits for the decision of #{it.seq}: {decide}")
    except TimeoutError:
        chat.screen.note(f"Left after {MOST_QUIET_WAIT_S:g} s. Use --wait SECONDS to stay longer.")


async def _count_open_reactions(client: NetworkClient) -> int:
    """Return the number of open reactions. If this client may not see the number, return 0, so that only signals
    count."""
    try:
        return int((await client.call("network.status"))["open_reactions"])
    except RequestError:
        return 0


async def read_lines(descriptor: int) -> AsyncIterator[str]:
    """Yield the lines of a pipe, file or terminal as they arrive.

    A daemon thread reads the lines, because not every file descriptor can be polled. The thread bypasses Python's
    buffers, because a chat that ends early must not wait for the thread or for a lock that the thread holds.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str | None] = asyncio.Queue(
        maxsize=1
    )  # if the queue is full, the thread and the writer of the pipe wait

    def read() -> None:
        try:
            for line in _split_lines(descriptor):
                asyncio.run_coroutine_threadsafe(queue.put(line), loop).result()
            asyncio.run_coroutine_threadsafe(queue.put(None), loop).result()
        except (RuntimeError, asyncio.CancelledError):
            return  # the event loop ended before the input

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while (line := await queue.get()) is not None:
        yield line


def _split_lines(descriptor: int) -> Iterator[str]:
    rest = b""
    while data := _read(descriptor):
        *lines, rest = (rest + data).split(b"\n")
        # Decode complete lines, because a chunk may end in the middle of a character.
        yield from (line.removesuffix(b"\r").decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the descriptor or its terminal was closed
        return b""
