"""Helpers for tests with real processes: a provider, the processes of hub, agents and person, and functions that read
their output and the ledger.

The provider is `FakeOpenAI` in the test's own event loop. A test can therefore read its requests and hold back its
replies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from roundelay.agents.reaction_ids import reaction_id
from roundelay.network.client import NetworkClient
from roundelay.network.messages import BaseMessage
from tests.support.command import TIMEOUT_S, Command, command
from tests.support.fake_openai import FakeOpenAI, Reply

API_KEY = "key-of-the-tests"
AGENT = """\
id: {agent_id}
description: Does what the test says.
instruction: Pass on what you are told to pass on, and answer who asks.
model: {{openai: {{name: {agent_id}-model, base_url: {base_url}, stream: {stream}}}}}
channels: [dev]
{more}
"""


# -- the provider


@dataclass(frozen=True)
class Asked:
    """The agent, incoming text and turn of one request to the provider."""

    agent_id: str
    incoming: str
    turn: int

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        messages = body["messages"]
        agent_id = re.findall(r'(?:Your id in this network is|As) "([a-z]+)"', messages[0]["content"])[0]
        # A lean prompt has no `<content>` element around the text.
        shown = r"<incoming_message [^>]*>\s*(?:<content>)?(.*?)(?:</content>|</incoming_message>)"
        incoming = re.findall(shown, messages[1]["content"])[0]
        return cls(agent_id, incoming, 1 + sum(message["role"] == "assistant" for message in messages))


class Provider(FakeOpenAI):
    """The model of every agent. The provider's replies depend only on the request. While ``answers`` is clear, the
    provider sends no replies.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(self._answer, api_key=API_KEY, **options)
        self.answers = asyncio.Event()
        self.answers.set()

    @property
    def asked(self) -> list[Asked]:
        return [Asked.read(body) for body in self.requests]

    async def until_asked(self, asked: Asked, times: int = 1) -> None:
        """Return when this request has arrived ``times`` times."""
        while self.asked.count(asked) < times:
            await self.until_requests(len(self.requests) + 1)

    async def until_requests(self, count: int) -> None:
        """Return when ``count`` requests have arrived."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.wait_for_requests(count)
        except TimeoutError:
            raise AssertionError(f"{count} requests were awaited, and these came: {self.asked}") from None

    def refusals(self) -> list[int]:
        """Return the error statuses that the provider answered. Status 0 is excluded: it is an answer that the client
        did not wait for.
        """
        return [item.status for item in self.received if item.status not in (0, 200)]

    def _answer(self, body: dict[str, Any]) -> Reply:
        return replace(self.decide(Asked.read(body)), until=self.answers)

    def decide(self, asked: Asked) -> Reply:
        raise NotImplementedError


# -- the processes


class Hub:
    """`roundelay up` on its own port and database. After a kill, `start` runs the same command again."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self.kills = 0
        self._folder = folder
        self._process: Command | None = None

    async def start(self) -> None:
        port = self.url.rpartition(":")[2].strip("/") or "0"
        flags = ("--port", port, "--db", "team.db", "--durability", "full", "--no-agents")
        self._process = await Command.start("up", *flags, cwd=self._folder)
        ready = await self._process.line(r"^Roundelay is ready at (ws://\S+) \(.*durability full")
        assert self.url in ("", ready[1]), "it must come back where its clients look for it"
        self.url = ready[1]

    async def kill(self) -> None:
        assert self._process is not None
        assert self._process.process.returncode is None, self._process.errors
        await self._process.kill()
        assert self._process.process.returncode == -9
        self.kills += 1

    async def restart(self) -> None:
        """Kill it and start it again."""
        await self.kill()
        await self.start()

    async def end(self) -> None:
        """Stop the hub with a signal if it runs, and check that it wrote no errors."""
        if self._process is not None and self._process.process.returncode is None:
            await self._process.stop()
            assert self._process.errors == []


@asynccontextmanager
async def hub_up(folder: Path) -> AsyncIterator[Hub]:
    hub = Hub(folder)
    try:
        await hub.start()
        yield hub
        await hub.end()
    finally:
        if hub._process is not None:
            await hub._process.kill()


@asynccontextmanager
async def agent_run(
    folder: Path, hub: Hub, provider: Provider, agent_id: str, *, stream: bool, more: str = ""
) -> AsyncIterator[Command]:
    """Run an agent as a separate process. On entry, the agent is ready. The agent is killed at the end if the test
    has not ended it.
    """
    file = folder / f"{agent_id}.yaml"
    stream_word = "true" if stream else "false"
    file.write_text(
        AGENT.format(agent_id=agent_id, base_url=provider.base_url, stream=stream_word, more=more), encoding="utf-8"
    )
    async with command("agent", "run", file, "--url", hub.url, OPENAI_API_KEY=API_KEY) as agent:
        await agent.line(f"^Agent {agent_id} is ready at ")
        yield agent


@asynccontextmanager
async def chatting(hub: Hub) -> AsyncIterator[Command]:
    """Run a chat of the person mia, with a pipe as input that stays open."""
    async with command("chat", "--as", "mia", "--url", hub.url) as chat:
        await chat.line("^. You are mia in the network")
        yield chat


# -- results


@dataclass(frozen=True)
class Said:
    """One message as the tests expect it. Seqs differ between runs, so ``thread`` names a reply thread by the text of
    its first message.
    """

    sender: str
    to: str
    thread: str
    text: str


async def read_ledger(url: str) -> dict[str, list[BaseMessage]]:
    """Return every thread of the network with its messages, as an operator reads them."""
    found: dict[str, list[BaseMessage]] = {}
    async with NetworkClient("auditor", url, kind="service") as auditor:
        for thread in (await auditor.call("network.list_threads", {"limit": 500}))["threads"]:
            history = await auditor.history(thread["thread_id"], limit=500)
            assert not history.has_more
            found[thread["thread_id"]] = list(history.messages)
    return found


def describe(threads: dict[str, list[BaseMessage]]) -> list[Said]:
    """Return the messages of all threads in ledger order."""
    messages = sorted((it for thread in threads.values() for it in thread), key=lambda it: it.seq)
    assert len({it.seq for it in messages}) == len(messages)
    texts = {it.seq: it.text for it in messages}

    def name(thread_id: str) -> str:
        return texts[int(thread_id.removeprefix("thread:"))] if thread_id.startswith("thread:") else thread_id

    return [Said(it.sender_id, it.to, name(it.thread_id), it.text) for it in messages]


def seen(chat: Command) -> list[tuple[int, str, str]]:
    """Return the messages on the person's screen as (seq, sender, text)."""
    found = (re.match(r"\d\d:\d\d:\d\d #(\d+) (\S+) → [^:]*(?::[^:]*)*?: (.*)$", line) for line in chat.lines)
    return [(int(it[1]), it[2], it[3]) for it in found if it is not None]


async def until_seen(chat: Command, texts: Iterable[str]) -> None:
    """Wait until all these texts are on the person's screen."""
    wanted = set(texts)
    while not wanted <= {text for _, _, text in seen(chat)}:
        await chat.line(r"^\d\d:\d\d:\d\d #\d+ ")


def is_ascending(numbers: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(numbers))


async def read_records(url: str, agent_id: str, trigger: str) -> list[dict[str, Any]]:
    """Return the records of an agent's reaction to the message with this text."""
    ledger = await read_ledger(url)
    [seq] = [it.seq for messages in ledger.values() for it in messages if it.text == trigger]
    async with NetworkClient("auditor", url, kind="service") as auditor:
        reaction = reaction_id(agent_id, seq, auditor.welcome.network.epoch)
        value = await auditor.call("network.records", {"reaction": reaction})
    return list(value["records"])
