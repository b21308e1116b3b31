"""Tests of the deep-research team as a person uses it: five processes and `roundelay chat` on a terminal, with agents
that are killed in between.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from roundelay.app import serve
from roundelay.network.config import NodeConfig
from tests.support.fake_openai import FakeOpenAI, Reply, text
from tests.support.forks import Process, start_python
from tests.support.loops import Body, results_of, system_of, use
from tests.support.terminals import at_terminal

RESEARCH = Path(__file__).parents[2] / "examples" / "deep_research" / "research.py"
TOPICS = ("bees", "whales", "leaves")


class ThinkingAloud:
    """Stand-in for the real model of all five agents. The researchers' thinking and text stay visible until the test
    lets it end.
    """

    def __init__(self) -> None:
        self.thought, self.written = asyncio.Event(), asyncio.Event()

    def __call__(self, body: Body) -> Reply:
        system, results = system_of(body), results_of(body)
        if system.startswith("You take questions"):
            return use(("hand_over_to_supervisor", {"note": "Please."}))
        if system.startswith("You supervise"):
            if not results:
                return use(*((f"researcher-{n}", {"task": topic}) for n, topic in enumerate(TOPICS, 1)))
            findings = [it.partition("\n\n")[0] for it in results]
            return use(("write_report", {"title": "The report", "findings": findings}))
        [topic] = [it for it in TOPICS if it in str(body["messages"][1])]
        if not results:
            wanted = use(("search", {"query": topic}))
            return Reply(None, wanted.tool_calls, reasoning=f"What is known of {topic}?", ends=self.thought)
        return text(f"So it is with {topic} [1].", ends=self.written)


class Team:
    """The agents' processes by ID."""

    def __init__(self, node: str, model: str, folder: Path) -> None:
        self._flags = ("--url", node, "--model", "m", "--base-url", model)
        self._folder = folder
        self._processes: dict[str, Process] = {}

    async def __aenter__(self) -> Team:
        await self.start("guide", "supervisor", "researcher-1", "researcher-2", "researcher-3")
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        await asyncio.gather(*(it.communicate() for it in self._processes.values()))

    async def start(self, *ids: str) -> None:
        await asyncio.gather(*map(self._start, ids))

    async def kill(self, *ids: str) -> None:
        for agent_id in ids:
            self._processes[agent_id].kill()
        await asyncio.gather(*(self._processes.pop(it).communicate() for it in ids))

    async def _start(self, agent_id: str) -> None:
        process = self._processes[agent_id] = await start_python(
            RESEARCH, "--agent", agent_id, *self._flags, stdout=asyncio.subprocess.PIPE, cwd=self._folder
        )  # fmt: skip
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"


@pytest.mark.full
async def test_chat_shows_thinking_streams_and_citations_of_five_processes_and_killed_ones_go_on(
    tmp_path: Path,
) -> None:
    model = ThinkingAloud()
    async with asyncio.timeout(90), AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeOpenAI(model, chunk_chars=5))
        node = await stack.enter_async_context(serve(NodeConfig(port=0, db=tmp_path / "node.db")))
        team = await stack.enter_async_context(Team(node.url, server.base_url, tmp_path))
        flags = ("--to", "guide", "--url", node.url, "--token", node.owner_token)
        terminal = await stack.enter_async_context(at_terminal(*flags, person="zoe", columns=100))
        terminal.type("How do bees dance, whales sing, leaves turn red?\r")
        await terminal.shows("guide › supervisor › researcher-2 · thinks: What is known of whales\\?")

        await team.kill("supervisor", "researcher-2")
        await team.start("supervisor", "researcher-2")
        model.thought.set()
        await terminal.shows("guide › supervisor › researcher-2 · writes: So it is with whales \\[1\\]\\.")
        model.written.set()
        await terminal.shows("guide › supervisor · write_report: The report")
        await terminal.shows("→ zoe .*The report")
        for n, topic in enumerate(TOPICS, 1):
            await terminal.shows(f"So it is with {topic} \\[{n}\\]\\.")
        for source in ("[1] The dance language of bees", "[2] Songs of the humpback", "[3] Why leaves turn red"):
            await terminal.shows(source.replace("[", "\\[").replace("]", "\\]"))
    asked = [it for it in server.requests if system_of(it).startswith("You supervise")]
    assert len(asked) == 2, "no recorded reply is asked for again"


@pytest.mark.full  # this test runs the five processes again, to check that the program passes on its model
async def test_the_program_gives_its_model_to_each_process(tmp_path: Path) -> None:
    model = ThinkingAloud()
    model.thought.set()
    model.written.set()
    async with asyncio.timeout(90), FakeOpenAI(model) as server:
        program = await start_python(
            RESEARCH, "How do bees dance, whales sing, leaves turn red?", "--model", "m", "--base-url", server.base_url,
            stdout=asyncio.subprocess.PIPE, cwd=tmp_path,
        )  # fmt: skip
        out, _ = await program.communicate()
    sources = ["[1] The dance language of bees", "[2] Songs of the humpback", "[3] Why leaves turn red"]
    assert out.decode().splitlines()[-3:] == sources
