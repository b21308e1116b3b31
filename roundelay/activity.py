"""Who is at work in a conversation, from what a client is told beside the messages. No IO; its clock is the event loop's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from roundelay.agents.paths import is_inside
from roundelay.clean_text import clean
from roundelay.live import MAX_ID_CHARS, read_place
from roundelay.network.client import Presence, Reconnected, Reconnecting, Signal

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
        self._tools: dict[str, dict[tuple[str, str], str]] = {}  # agent -> what its calls do, by reaction and path
        self.undecided: dict[tuple[str, str], int] = {}
        """The reactions that wait for a person's decision, by agent: the seq of the request."""
        self._typing: dict[str, float] = {}  # person -> when the line says so no more
        self._news = asyncio.Event()
        self._is_connected = True

    def happened(self) -> None:
        """Something was said or done; whoever waits for quiet waits on."""
        self._news.set()

    def asked(self, agent_id: str, reaction: str, seq: int) -> None:
        """An agent waits for a person's approval: until then it does nothing that somebody else could wait for."""
        if len(self.undecided) < MAX_REACTIONS:
            self.undecided[agent_id, reaction] = seq

    def decided(self, seq: int) -> None:
        """A person has decided the request with this seq."""
        self.undecided = {key: request for key, request in self.undecided.items() if request != seq}

    def take(self, event: object) -> None:
        match event:
            case Signal(kind="thinking" | "tool", body={"reaction": str(reaction), "active": bool(is_active)}) if (
                len(reaction) <= MAX_ID_CHARS
            ):
                key = (event.sender_id, reaction)
                if len(self.reactions) < MAX_REACTIONS:
                    self.reactions.add((reaction, event.sender_id))
                if event.kind == "tool":
                    self._take_call(key, event.body, is_active=is_active)
                elif is_active and len(self._thinking) < MAX_REACTIONS:
                    self._thinking[key] = event.thread_id
                else:
                    self._thinking.pop(key, None)
                    self.undecided.pop(key, None)
                    self._end_calls(key)
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
        parts = [
            f"{clean(agent)} {clean(_describe_calls(self._tools[agent]))}" for agent in agents if agent in self._tools
        ]
        thinking = [clean(agent) for agent in agents if agent not in self._tools]
        typing = sorted(clean(person) for person, until in self._typing.items() if until > now)
        parts += [f"{', '.join(names)} {verb}" for names, verb in ((thinking, "thinking"), (typing, "typing")) if names]
        return "; ".join(parts)

    async def wait_until_quiet(self, quiet_s: float) -> None:
        """Wait until the hub is there, nobody thinks, but for who waits for a decision, and nothing has happened for ``quiet_s``."""
        while True:
            self._news.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._news.wait()
            except TimeoutError:
                if self._thinking.keys() <= self.undecided.keys() and self._is_connected:
                    return

    def _take_call(self, key: tuple[str, str], body: Mapping[str, object], *, is_active: bool) -> None:
        agent_id, reaction = key
        place = read_place(body)
        if place is None:
            return
        if not is_active:
            self._end_calls(key, place)
        elif len(tools := self._tools.setdefault(agent_id, {})) < MAX_TOOLS:
            asked = body.get("asked")
            names = ", ".join(str(it)[:64] for it in asked[:MAX_TOOLS]) if isinstance(asked, list) else ""
            tools[reaction, place] = f"waits for {names}" if names else f"uses {str(body.get('tool'))[:64]}"

    def _end_calls(self, key: tuple[str, str], place: str | None = None) -> None:
        """A call of a reaction is done, with whatever runs inside of it; without a place, all are."""
        agent_id, reaction = key
        left = {
            (other, path): tool
            for (other, path), tool in self._tools.pop(agent_id, {}).items()
            if other != reaction or (place is not None and not is_inside(path, place))
        }
        if left:
            self._tools[agent_id] = left


def _describe_calls(calls: Mapping[tuple[str, str], str]) -> str:
    """What an agent is at: its innermost calls, each thing once."""
    inner = [
        what
        for (reaction, path), what in calls.items()
        if not any(key != (reaction, path) and key[0] == reaction and is_inside(key[1], path) for key in calls)
    ]
    used = ", ".join(dict.fromkeys(it.removeprefix("uses ") for it in inner if it.startswith("uses ")))
    waits = ", ".join(dict.fromkeys(it.removeprefix("waits for ") for it in inner if it.startswith("waits for ")))
    return " and ".join([*([f"uses {used}"] if used else []), *([f"waits for {waits}"] if waits else [])])
