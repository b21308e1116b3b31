"""Reactions for tests of the agent loop's environment: the real driver and journal, a fake provider behind the real
SDK, and records in memory.

`Loop` is one reaction of an agent. `survives_kills` kills its process after each record in turn, resumes the
reaction, and checks that nothing differs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.driver import Driver
from roundelay.agents.events import Event
from roundelay.agents.journal import Journal
from roundelay.agents.loop_texts import ANSWER, OR_FINISH
from roundelay.agents.models.model import Model
from roundelay.agents.reaction import Reaction
from roundelay.agents.reaction_state import ReactionSetup
from roundelay.agents.recorded import Started
from roundelay.agents.tool_client import ToolClient
from roundelay.agents.tools import ToolContext
from roundelay.agents.values import Finish
from roundelay.network.messages import DirectMessage
from tests.support import fake_openai
from tests.support.agents import Provider
from tests.support.fake_openai import Reply

T = TypeVar("T")
Body = dict[str, Any]

TRIGGER = DirectMessage(
    seq=7, message_id="m7", sender_id="mia", sender_kind="human", to="agent:bob", thread_id="direct:bob~mia", root=7, hops=0,
    sent_at=0, content="hello",
)  # fmt: skip


class Killed(Exception):
    """The process ended at this point."""


@dataclass
class Stored:
    duplicate: bool


@dataclass
class Records:
    """The hub's records of one reaction, by ID. ``kill_after`` is the number of writes after which the process ends."""

    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    kill_after: int = 0
    writes: int = 0
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    agent_id: str = "bot"

    async def record(self, reaction: str, kind: str, body: Mapping[str, object], *, record_id: str) -> Stored:
        await asyncio.sleep(0)
        if self.killed.is_set():
            await asyncio.Event().wait()
        self.writes += 1
        written = {"kind": kind, "body": json.loads(json.dumps(body))}
        known = self.kept.setdefault(record_id, written)
        assert known == written, "a record was repeated with another body"
        if self.writes == self.kill_after:
            self.killed.set()
            await asyncio.Event().wait()  # a killed process does not continue, wherever the reaction is
        return Stored(known is not written)

    async def call(self, op: str, args: Mapping[str, object] | None = None, *, call_id: str | None = None) -> Any:
        return {"records": list(self.kept.values())}

    def bodies(self, kind: str) -> list[Body]:
        return [it["body"] for it in self.kept.values() if it["kind"] == kind]


@dataclass
class Loop:
    """One reaction of ``agent``. If ``records`` is not empty, the reaction is resumed."""

    agent: Agent
    records: Records = field(default_factory=Records)
    events: list[Event] = field(default_factory=list)

    async def drive(self) -> Finish:
        journal = Journal(self.records, "r1")
        is_resumed = bool(self.records.kept)
        recorded = await journal.load() if is_resumed else None
        if not is_resumed:
            started = Started(trigger=7, thread_id="direct:bob~mia", as_of=7, manifest=[7], config_hash="c1")
            await self._until_killed(journal.record_started(started))
        return await self._until_killed(self.make_driver(journal).run(recorded, config_hash="c1"))

    async def _until_killed(self, work: Coroutine[Any, Any, T]) -> T:
        task, death = asyncio.create_task(work), asyncio.create_task(self.records.killed.wait())
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise Killed
        return task.result()

    def make_driver(self, journal: Journal) -> Driver:
        reaction = Reaction(
            self.agent, prompt="<conversation/>", answers=True, setup=ReactionSetup(threads=("direct:bob~mia",))
        )
        return Driver(reaction, journal=journal, make_context=make_context, on_event=self.events.append)


def make_context(call_id: str, turn: int) -> ToolContext:
    return ToolContext("bob", "r1", turn, call_id, TRIGGER, ToolClient(cast("Any", None), call_id, TRIGGER.seq))


# --- the provider's side


def use(*calls: tuple[str, Any], text: str | None = None, **options: Any) -> Reply:
    """Return a reply with tool calls. The call IDs depend only on the reply, so that a test can compare two runs."""
    named = [fake_openai.call(name, given, f"c{at}_{name}"[:40]) for at, (name, given) in enumerate(calls)]
    return fake_openai.calls(named, text, **options)


def by_turn(*replies: Reply | str) -> Callable[[Body], Reply]:
    """Return a script with one reply per turn. The last reply repeats."""

    def answer(body: Body) -> Reply:
        reply = replies[min(turn_of(body), len(replies)) - 1]
        return fake_openai.text(reply) if isinstance(reply, str) else reply

    return answer


def facts(turn: int = 1, of: int = 30, *, finish: bool = False) -> str:
    """Return the end of a request to an agent whose text is its answer. ``finish`` adds the hint for agents with the
    tool `finish`.
    """
    how = ANSWER.format(to="the incoming thread")
    return f"Turn {turn} of {of}.\n{how}{f' {OR_FINISH}' if finish else ''}"


def turn_of(body: Body) -> int:
    found = re.search(r"Turn (\d+) of", str(body["messages"][-1]["content"]))
    if found is not None:
        return int(found[1])
    # A lean prompt does not state the turn: count the replies after the conversation.
    at = next((n for n, it in enumerate(body["messages"]) if "<conversation>" in str(it["content"])), 0)
    return 1 + sum(it["role"] == "assistant" for it in body["messages"][at:])


def tools_of(body: Body) -> list[str]:
    return [it["function"]["name"] for it in body.get("tools") or []]


def results_of(body: Body) -> list[str]:
    """Return the tool results in a request."""
    return [it["content"] for it in body["messages"] if it["role"] == "tool"]


def system_of(body: Body) -> str:
    return str(body["messages"][0]["content"])


# --- killed and resumed


@dataclass
class Whole:
    """An uninterrupted reaction: its end, its records, and the requests to the provider."""

    end: Finish
    records: Records
    requests: list[Body]


def count_replies(records: Records) -> int:
    return len(records.bodies("model_reply"))


async def survives_kills(
    provider: Provider, make: Callable[[Model], Agent], *, answered: Callable[[Records], int] = count_replies
) -> Whole:
    """Run a reaction once. Then kill its process after each record in turn, resume it with a new agent, and check
    that nothing differs.

    The end, the records and the requests must equal those of the uninterrupted run. A recorded reply is never
    requested again: ``answered`` returns the number of requests that the records replace.
    """
    model = provider.model()
    first = Loop(make(model))
    whole = Whole(await first.drive(), first.records, list(provider.requests))
    for last in range(1, first.records.writes + 1):
        loop = Loop(make(model), Records(kill_after=last))
        with pytest.raises(Killed):
            await loop.drive()
        loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
        replies = answered(loop.records)
        before = len(provider.requests)
        assert await Loop(make(model), loop.records).drive() == whole.end, f"killed after record {last}"
        again = provider.requests[before:]
        assert len(again) == len(whole.requests) - replies, "a recorded reply was asked for again"
        for body in again:
            assert body in whole.requests, f"killed after record {last}, another request is made"
        assert loop.records.kept == whole.records.kept, f"killed after record {last}, other records are kept"
    return whole
