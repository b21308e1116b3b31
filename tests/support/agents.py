"""Agents on a network, for tests: runners at work, people who hear, events and records to be waited for."""

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
    """The runners at work, their agents registered and in their channels."""
    return network.run(*runners)


class Person:
    """Somebody at the network: hears what is delivered, in order."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self._messages = client.__aiter__()

    @classmethod
    async def join(cls, network: Network, agent_id: str) -> Person:
        return cls(await network.join(agent_id, kind="human"))

    async def hear(self) -> BaseMessage:
        return await anext(self._messages)

    async def ask(self, agent_id: str, text: str) -> BaseMessage:
        """Say something to an agent and hear what comes back."""
        await self.client.send_text(agent_id, text)
        return await self.hear()

    async def records(self, reaction: str) -> list[dict[str, Any]]:
        value = await self.client.call("network.records", {"reaction": reaction})
        return list(value["records"])

    async def history(self, thread_id: str) -> list[tuple[str, str]]:
        return [(it.sender_id, it.text) for it in (await self.client.history(thread_id)).messages]


class Heard:
    """Events of runners, to be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def next(self) -> None:
        """Wait for another event, of any kind."""
        self._changed.clear()
        await self._changed.wait()

    def of(self, kind: type[E]) -> list[E]:
        """Those of a kind that were heard so far."""
        return [it for it in self.events if isinstance(it, kind)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for the event with which this is so."""
        while not is_so():
            await self.next()

    async def first(self, kind: type[Event]) -> Event:
        """Wait for the first event of a kind."""
        while not (found := [it for it in self.events if isinstance(it, kind)]):
            self._changed.clear()
            await self._changed.wait()
        return found[0]

    async def finished(self, count: int = 1) -> list[Finished]:
        """Wait until so many reactions have ended."""
        while len(ended := [it for it in self.events if isinstance(it, Finished)]) < count:
            self._changed.clear()
            await self._changed.wait()
        return ended


async def until_recorded(person: Person, reaction: str, kind: str) -> None:
    while kind not in {it["kind"] for it in await person.records(reaction)}:
        pass


async def cancel(client: NetworkClient, **named: str) -> list[str]:
    """Stop what runs under a reaction's or a thread's name, as soon as the hub knows of it."""
    while not (stopped := (await client.call("network.cancel", named))["reactions"]):
        pass
    return list(stopped)


async def until_open(client: NetworkClient, agent_id: str) -> None:
    """Ask until the hub knows of a running reaction of an agent."""
    while not (await client.call("network.open_reactions", {"agent_id": agent_id}))["reactions"]:
        pass


async def until_state(client: NetworkClient, seq: int, agent_id: str, expected: str) -> None:
    """Ask until a recipient has come so far: acks have no answer of their own to wait for."""
    while True:
        status = await client.call("network.message_status", {"seq": seq})
        [state] = [it["state"] for it in status["recipients"] if it["agent_id"] == agent_id]
        if state == expected:
            return


class Provider(FakeOpenAI):
    """The fake provider with models on it, which are closed with it."""

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
