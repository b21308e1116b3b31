"""Helpers for tests with agents on a network: running agents, people, and functions that wait for events and records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from roundelay.agents.events import Event, Finished
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.models.scripted import Script, ScriptedModel
from roundelay.agents.runner import AgentRunner
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.messages import BaseMessage
from tests.support.fake_openai import FakeOpenAI

E = TypeVar("E", bound=Event)


def make_runner(agent_id: str, script: Script, **options: Any) -> SimpleAgentRunner:
    return SimpleAgentRunner(agent_id, instruction="You are under test.", model=ScriptedModel(script), **options)


def running(network: Network, *runners: AgentRunner) -> AbstractAsyncContextManager[None]:
    """Run agents on a network. On entry, the agents are registered and have joined their channels."""
    return network.run(*runners)


class Person:
    """A person on the network. Receives deliveries in order."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self._messages = client.__aiter__()

    @classmethod
    async def join(cls, network: Network, agent_id: str) -> Person:
        return cls(await network.join(agent_id, kind="human"))

    async def hear(self) -> BaseMessage:
        return await anext(self._messages)

    async def ask(self, agent_id: str, text: str) -> BaseMessage:
        """Send a text to an agent and return the next message that arrives."""
        await self.client.send_text(agent_id, text)
        return await self.hear()

    async def records(self, reaction: str) -> list[dict[str, Any]]:
        value = await self.client.call("network.records", {"reaction": reaction})
        return list(value["records"])

    async def history(self, thread_id: str) -> list[tuple[str, str]]:
        return [(it.sender_id, it.text) for it in (await self.client.history(thread_id)).messages]


class Heard:
    """Callback that collects the events of runners, with methods that wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def next(self) -> None:
        """Wait for the next event of any kind."""
        self._changed.clear()
        await self._changed.wait()

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind so far."""
        return [it for it in self.events if isinstance(it, kind)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for events until the predicate is true."""
        while not is_so():
            await self.next()

    async def first(self, kind: type[Event]) -> Event:
        """Return the first event of a kind, and wait for it if necessary."""
        while not (found := [it for it in self.events if isinstance(it, kind)]):
            self._changed.clear()
            await self._changed.wait()
        return found[0]

    async def finished(self, count: int = 1) -> list[Finished]:
        """Wait until ``count`` reactions have ended."""
        while len(ended := [it for it in self.events if isinstance(it, Finished)]) < count:
            self._changed.clear()
            await self._changed.wait()
        return ended


async def until_recorded(person: Person, reaction: str, kind: str) -> None:
    while kind not in {it["kind"] for it in await person.records(reaction)}:
        pass


async def cancel(client: NetworkClient, **named: str) -> list[str]:
    """Cancel running reactions by reaction or thread, and return their IDs. Repeat the call until the hub has
    cancelled at least one.
    """
    while not (stopped := (await client.call("network.cancel", named))["reactions"]):
        pass
    return list(stopped)


async def until_open(client: NetworkClient, agent_id: str) -> None:
    """Poll the hub until it lists an open reaction of the agent."""
    while not (await client.call("network.open_reactions", {"agent_id": agent_id}))["reactions"]:
        pass


async def until_state(client: NetworkClient, seq: int, agent_id: str, expected: str) -> None:
    """Poll the status of a message until this recipient has the expected state. The hub does not answer acks, so a
    test cannot wait for an ack directly.
    """
    while True:
        status = await client.call("network.message_status", {"seq": seq})
        [state] = [it["state"] for it in status["recipients"] if it["agent_id"] == agent_id]
        if state == expected:
            return


class Provider(FakeOpenAI):
    """Fake provider whose models are closed together with it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made: list[OpenAIModel] = []

    def model(self, **options: Any) -> OpenAIModel:
        self._made.append(OpenAIModel("m", base_url=self.base_url, **options))
        return self._made[-1]

    async def __aexit__(self, *error: Any) -> None:
        for model in self._made:
            await model.close()
        await super().__aexit__(*error)
