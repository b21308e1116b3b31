"""Who is at work in a conversation, from what a client is told beside the messages. No IO; its clock is the event loop's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from roundelay.network.client import Presence, Reconnected, Reconnecting, Signal
from roundelay.terminal import clean

TYPING_SHOWN_S = 6.0
MAX_REACTIONS = 1000
"""Signals are anybody's to send; further reactions are not remembered."""
MAX_TOOLS = 32
"""Likewise of one agent."""


class Activity:
    """Who is thinking or typing, from signals, which may be lost: an agent that goes offline thinks no more."""

    def __init__(self) -> None:
        self.reactions: set[tuple[str, str]] = set()
        """Every reaction that was heard of: its id and its agent's."""
        self.on_change: Callable[[], None] = lambda: None
        self._thinking: dict[tuple[str, str], str] = {}  # agent and reaction -> its thread
        self._tools: dict[str, dict[object, str]] = {}  # agent -> the tools that it uses, by their calls
        self._typing: dict[str, float] = {}  # person -> when the line says so no more
        self._news = asyncio.Event()
        self._is_connected = True

    def happened(self) -> None:
        """Something was said or done; whoever waits for quiet waits on."""
        self._news.set()

    def take(self, event: object) -> None:
        match event:
            case Signal(kind="thinking" | "tool", body={"reaction": str(reaction), "active": bool(is_active)}):
                key = (event.sender_id, reaction)
                if len(self.reactions) < MAX_REACTIONS:
                    self.reactions.add((reaction, event.sender_id))
                if event.kind == "tool":
                    self._take_tool(event.sender_id, event.body, is_active=is_active)
                elif is_active and len(self._thinking) < MAX_REACTIONS:
                    self._thinking[key] = event.thread_id
                else:
                    self._thinking.pop(key, None)
                    self._tools.pop(event.sender_id, None)
            case Signal(kind="typing"):
                self._typing[event.sender_id] = time.monotonic() + TYPING_SHOWN_S
                asyncio.get_running_loop().call_later(TYPING_SHOWN_S + 0.1, self.on_change)
            case Presence(state="offline"):
                self._thinking = {key: place for key, place in self._thinking.items() if key[0] != event.agent_id}
                self._tools.pop(event.agent_id, None)
            case Reconnecting():
                self._is_connected = False
                self._thinking.clear()  # the signals that end it may be lost with the connection
            case Reconnected():
                self._is_connected = True
        self._news.set()
        self.on_change()

    def thinking_threads(self) -> set[str]:
        return set(self._thinking.values())

    def describe(self) -> str:
        """Who does what at the moment, for a prompt; empty when nobody does anything."""
        if not self._is_connected:
            return "not connected"
        now = time.monotonic()
        agents = sorted({agent_id for agent_id, _ in self._thinking})
        tools = {
            agent: ", ".join(dict.fromkeys(self._tools[agent].values())) for agent in agents if agent in self._tools
        }
        parts = [f"{clean(agent)} uses {clean(named)}" for agent, named in tools.items()]
        thinking = [clean(agent) for agent in agents if agent not in self._tools]
        typing = sorted(clean(person) for person, until in self._typing.items() if until > now)
        parts += [f"{', '.join(names)} {verb}" for names, verb in ((thinking, "thinking"), (typing, "typing")) if names]
        return "; ".join(parts)

    async def wait_until_quiet(self, quiet_s: float) -> None:
        """Wait until the hub is there, nobody thinks and nothing has happened for ``quiet_s``."""
        while True:
            self._news.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._news.wait()
            except TimeoutError:
                if not self._thinking and self._is_connected:
                    return

    def _take_tool(self, agent_id: str, body: dict[str, object], *, is_active: bool) -> None:
        call = (str(body["reaction"]), str(body.get("path", "")), str(body.get("turn")), str(body.get("call")))
        tools = self._tools.setdefault(agent_id, {})
        if not is_active:
            tools.pop(call, None)
        elif len(tools) < MAX_TOOLS:
            tools[call] = str(body.get("tool"))[:64]
        if not tools:
            del self._tools[agent_id]
