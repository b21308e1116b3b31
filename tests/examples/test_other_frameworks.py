"""Tests of the examples with agents of other frameworks. Each example runs as a separate process with the framework's
real client and a fake provider.

Frameworks that install together with the project always run. The other frameworks have their own environments
(tests/suites) and run in `./dev test --full`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.team import build_runner, load_agents
from roundelay.network.client import NetworkClient, Signal
from roundelay.network.messages import BaseMessage
from tests.suites.environment import INSTALL_TIMEOUT_S, python_of
from tests.support.agents import cancel
from tests.support.asked import invite
from tests.support.command import invoke
from tests.support.fake_openai import FakeOpenAI, Reply, calls, text
from tests.support.node import Node, running_node
from tests.support.payloads import MARK, PAYLOADS

EXAMPLES = Path(__file__).parents[2] / "examples" / "other_frameworks"
TIMEOUT_S = 60.0
APART = ("langgraph", "openai_agents", "autogen", "agent_framework", "agentscope")
ANSWER = "It is 40, and there is nothing more to say about it."
KILL_ROUNDS = 2
ELEMENT = re.compile(r"<(message|incoming_message)\b([^<>]*)>\s*(?:<content>)?([^<>]*)(?:</content>\s*)?</\1>")
SENDER = re.compile(r'\b(?:sender|from)="([^"]*)"')

installs = pytest.mark.timeout(INSTALL_TIMEOUT_S + 600)  # the first test of a framework also installs it


class Provider(FakeOpenAI):
    """Fake provider that requests the tool and then writes its result. The reply does not end while ``ends`` is
    clear.
    """

    def __init__(self) -> None:
        super().__init__(lambda body: self.answer(body))
        self.answer: Callable[[dict[str, Any]], Reply] = self._answer
        self.ends = asyncio.Event()
        self.ends.set()

    def _answer(self, body: dict[str, Any]) -> Reply:
        last = body["messages"][-1]
        if last["role"] != "tool":
            return calls([("add", {"a": 17, "b": 23})], usage=(30, 5))
        return text(
            f"It is {last['content']}, and there is nothing more to say about it.", usage=(50, 10), ends=self.ends
        )


class Asker:
    """A person who asks the agent, and records its live activity."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self.signals: list[Signal] = []
        self._messages = client.__aiter__()
        self._news = asyncio.Condition()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for event in self.client.events():
            if isinstance(event, Signal):
                async with self._news:
                    self.signals.append(event)
                    self._news.notify_all()

    async def ask(self) -> str:
        """Ask the agent, and return the ID of its reaction."""
        self.signals.clear()
        asked = await self.client.send_text("adder", "What is 17 and 23?")
        return reaction_id("adder", asked.seq, self.client.welcome.network.epoch)

    async def until(self, is_seen: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._news:
                await self._news.wait_for(is_seen)
        except TimeoutError:
            raise AssertionError(f"not seen: {self.signals}") from None

    def streamed(self) -> str:
        pieces = [piece for it in self.signals if it.kind == "delta" for piece in it.body["pieces"]]
        return "".join(it["text"] for it in pieces if it["kind"] == "text")

    def tools(self) -> list[tuple[str, bool]]:
        return [(it.body["tool"], it.body["active"]) for it in self.signals if it.kind == "tool"]

    def is_streaming(self) -> bool:
        return "It is 40" in self.streamed()

    def has_ended(self) -> bool:
        return any(it.kind == "thinking" and it.body["active"] is False for it in self.signals)

    async def hear(self) -> BaseMessage:
        async with asyncio.timeout(TIMEOUT_S):
            return await anext(self._messages)

    async def answers(self) -> list[str]:
        page = await self.client.history("direct:adder~mia")
        return [it.text for it in page.messages if it.sender_id == "adder"]

    async def records(self, reaction: str, last: str = "finished") -> list[dict[str, Any]]:
        """Return the records of a reaction, once they contain one of the kind ``last``."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                records = (await self.client.call("network.records", {"reaction": reaction}))["records"]
                if any(it["kind"] == last for it in records):
                    return list(records)

    async def close(self) -> None:
        self._watching.cancel()
        await self.client.close()


class Life:
    """One process of the example."""

    def __init__(self, python: Path | str, example: Path, folder: Path, **environment: str) -> None:
        self._command = [str(python), "-W", "ignore", str(example)]
        self._folder = folder
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None
        self.log = folder / "agent.log"

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )

    async def kill(self) -> None:
        """Kill the process, which must still be running."""
        assert self._process is not None
        assert self._process.returncode is None, self.log.read_text()
        self._process.kill()
        await self._process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()


@asynccontextmanager
async def stage(name: str, folder: Path) -> AsyncIterator[tuple[Node, Provider, Asker, Life]]:
    """Run a node, the provider, a person and a framework's example."""
    python = python_of(name, with_roundelay=True) if name in APART else sys.executable
    async with running_node() as node, Provider() as provider:
        client = NetworkClient("mia", node.url, kind="human", token=node.owner_token)
        await client.connect()
        await client.call("network.watch", {"signals": True})
        mia = Asker(client)
        places = {"ROUNDELAY_URL": node.url, "ROUNDELAY_HOME": str(folder), "OPENAI_BASE_URL": provider.base_url}
        life = Life(python, EXAMPLES / f"{name}_agent.py", folder, OPENAI_API_KEY="key-of-the-tests", **places)
        try:
            await life.start()
            yield node, provider, mia, life
        except BaseException:
            print(life.log.read_text() if life.log.exists() else "")
            print([(it.status, it.path) for it in provider.received])
            raise
        finally:
            await life.close()
            await mia.close()


@pytest.mark.full
@installs
@pytest.mark.parametrize("name", ["pydantic_ai", *(pytest.param(it, marks=pytest.mark.full) for it in APART)])
async def test_an_agent_of_another_framework_answers_streams_stops_and_answers_once_after_a_kill(
    name: str, tmp_path: Path
) -> None:
    async with stage(name, tmp_path) as (node, provider, mia, life):
        while "adder" not in {it["agent_id"] for it in (await mia.client.call("network.list_agents", {}))["agents"]}:
            pass
        # The agent answers in the thread with its tool, and streams.
        provider.ends.clear()
        reaction = await mia.ask()
        await mia.until(mia.is_streaming)
        assert await mia.answers() == [], "it was shown before it was sent"
        assert mia.tools() == [("add", True), ("add", False)]
        provider.ends.set()
        answer = await mia.hear()
        assert (answer.text, answer.sender_id, answer.thread_id) == (ANSWER, "adder", "direct:adder~mia")
        # The cost is counted.
        await mia.records(reaction)
        told = await invoke(
            "cost", "--by", "model", "--json", ROUNDELAY_URL=node.url, ROUNDELAY_OWNER_TOKEN=node.owner_token
        )
        assert '"gpt-4o-mini"' in told.out
        assert ('"prompt_tokens": 80' in told.out, '"completion_tokens": 15' in told.out) == (True, True), told.out
        # A person stops the reaction.
        provider.ends.clear()
        reaction = await mia.ask()
        await mia.until(mia.is_streaming)
        await cancel(mia.client, reaction=reaction)
        await mia.until(mia.has_ended)
        end = (await mia.records(reaction))[-1]["body"]
        assert (end["status"], end["reason"]) == ("cancelled", "stopped by mia")
        # The text that she has read stays, with the reason why it ends.
        stopped = (await mia.hear()).text
        assert stopped.endswith("\n\nStopped by mia.")
        assert ANSWER.startswith(stopped.removesuffix("\n\nStopped by mia."))
        assert await mia.answers() == [ANSWER, stopped]
        # After a kill in the middle of the model's reply and a restart, the agent answers once.
        reaction = await mia.ask()
        await mia.until(mia.is_streaming)
        await life.kill()
        provider.ends.set()
        await life.start()
        assert (await mia.hear()).text == ANSWER
        kinds = [it["kind"] for it in await mia.records(reaction)]
        assert kinds == ["started", "model_reply", "finished"]
        assert await mia.answers() == [ANSWER, stopped, ANSWER]
        assert [it.status for it in provider.received if it.status not in (0, 200)] == []


def test_an_agents_file_has_the_same_agent_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-tests")
    [spec] = load_agents(EXAMPLES / "adder.yaml")
    runner = build_runner(spec)
    assert (type(runner).__name__, runner.agent_id, runner.description) == ("PydanticAIAgent", "adder", "Adds numbers")


@pytest.mark.full
@installs
@pytest.mark.parametrize("name", ["pydantic_ai", *APART])
async def test_no_payload_reaches_the_provider_as_a_system_text_as_the_agents_own_or_as_anothers(
    name: str, tmp_path: Path
) -> None:
    """The framework sends mallory's messages to its model, but only in elements that name mallory."""
    async with stage(name, tmp_path) as (node, provider, mia, _):
        while "adder" not in {it["agent_id"] for it in (await mia.client.call("network.list_agents", {}))["agents"]}:
            pass
        said = itertools.count()
        provider.answer = lambda body: text(f"Heard, the number {next(said)}.", usage=(3, 1))
        token = (await invite(node, "mallory", kind="human")).partition(":")[2]
        async with NetworkClient("mallory", node.url, kind="human", token=token) as mallory:
            heard = mallory.__aiter__()
            for payload in PAYLOADS:
                waits = {it.seq for it in (await mallory.send_text("adder", payload), await mallory.broadcast(payload))}
                async with asyncio.timeout(TIMEOUT_S):
                    while waits:
                        waits.discard((await anext(heard)).reply_to or 0)
        requests = provider.requests
        assert len(requests) == 2 * len(PAYLOADS)
        told = 0
        for body in requests:
            for it in body["messages"]:
                given = it["content"] or ""
                content = given if isinstance(given, str) else "\n".join(part["text"] for part in given)
                if it["role"] != "user":
                    assert MARK not in content.casefold(), (it["role"], content)
                    continue
                elements = ELEMENT.findall(content)
                assert MARK not in ELEMENT.sub("", content).casefold(), content
                told += sum(MARK in words.casefold() for _, _, words in elements)
                senders = {SENDER.search(head)[1] for _, head, words in elements if MARK in words.casefold()}  # type: ignore[index]  # each has one
                assert senders <= {"mallory"}, content
        assert told >= 2 * len(PAYLOADS)


@pytest.mark.full
@installs
@pytest.mark.parametrize("name", ["pydantic_ai", *APART])
async def test_killed_again_and_again_it_answers_each_question_once(name: str, tmp_path: Path) -> None:
    async with stage(name, tmp_path) as (_, provider, mia, life):
        while "adder" not in {it["agent_id"] for it in (await mia.client.call("network.list_agents", {}))["agents"]}:
            pass
        for number in range(KILL_ROUNDS):
            places: list[Callable[[], bool]] = [lambda: bool(mia.signals), lambda: bool(mia.tools()), mia.is_streaming]
            for is_there in places:
                provider.ends.clear()
                reaction = await mia.ask()
                await mia.until(is_there)
                await life.kill()
                provider.ends.set()
                await life.start()
                assert (await mia.hear()).text == ANSWER
                # Otherwise the process may be killed between its answer and its last record, or not at all.
                if number % 2:
                    await mia.records(reaction)
                await life.kill()
                await life.start()
                assert (await mia.records(reaction))[-1]["body"]["status"] == "finished"
        assert await mia.answers() == [ANSWER] * KILL_ROUNDS * 3
