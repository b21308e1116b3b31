"""Tests of an agent that finishes without a message to the waiting person: every screen shows it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, broadcast, finish, say, send
from roundelay.app import Network
from roundelay.network.client import Signal
from tests.support.agents import Person, make_runner, running
from tests.support.announced import announced_node
from tests.support.command import run
from tests.support.full_screen import full_screen
from tests.support.terminals import at_terminal

RULES = """
id: ann
instruction: Say what the rules say.
model:
  rules:
    - when: {contains: hello}
      do: [{say: "Hi."}]
    - when: {contains: quiet}
      do: [{finish: nothing to do}]
"""


def script(request: ModelRequest) -> Action | list[Action]:
    text = read_prompt(request).incoming_text
    if "hello" in text:
        return say("Hi.")
    if "beside" in text:
        return [say("Beside it."), finish("said it beside")]
    if "by a tool" in text:
        return send("mia", "By a tool.") if request.turn == 1 else finish("sent")
    if "elsewhere" in text:
        return broadcast("Hear, hear.") if request.turn == 1 else finish("sent")
    return finish("nothing to do")


async def silent_ends(network: Network, mia: Person, *texts: str, to: str = "agent:ann") -> list[bool]:
    """Return, for each reaction, whether its end signal reports a missing answer."""
    told: list[bool] = []
    for text in texts:
        await mia.client.send(to, text)
        async for event in mia.client.events():
            if isinstance(event, Signal) and event.kind == "thinking" and event.body["active"] is False:
                told.append(event.body.get("silent") is True)
                break
    return told


async def test_the_end_of_work_says_that_there_is_no_answer() -> None:
    async with Network.open() as network, running(network, make_runner("ann", script)):
        mia = await Person.join(network, "mia")
        await mia.client.call("network.watch", {"signals": True})
        texts = ("quiet", "hello", "beside", "by a tool", "elsewhere", "quiet")
        assert await silent_ends(network, mia, *texts) == [True, False, False, False, True, True]
        # A person's broadcast needs no answer from every agent, but a mentioned agent must answer.
        assert await silent_ends(network, mia, "quiet", "quiet @ann", to="broadcast") == [False, True]


async def test_chat_says_it_to_a_pipe_and_at_a_terminal(tmp_path: Path) -> None:
    async with announced_node(tmp_path) as node:
        runner = make_runner("ann", script, url=node.url)
        work = asyncio.create_task(runner.run())
        await runner.ready()
        done = await run("chat", "--as", "mia", "--to", "ann", stdin="quiet\n")
        assert re.search(r"(?m)^\* ann finished without an answer\.$", done.out)
        assert "without" not in (await run("chat", "--as", "mia", "--to", "ann", stdin="hello\n")).out
        async with at_terminal("--as", "mia", "--to", "ann") as chat:
            chat.type("quiet\r")
            await chat.shows(r"(?m)^\* ann finished without an answer\.")
        await runner.stop()
        await work


@pytest.mark.parametrize(
    ("text", "reason"), [("quiet, please", "nothing to do"), ("what no rule knows", "no rule fits this message")]
)
async def test_agent_try_says_it(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "ann.yaml").write_text(RULES, encoding="utf-8")
    told = (await run("agent", "try", tmp_path / "ann.yaml", text)).lines
    assert told[-2].startswith(f"* finished ({reason}): ")
    assert told[-1] == "* ann finished without an answer, so no message was sent"
    assert "without" not in (await run("agent", "try", tmp_path / "ann.yaml", "hello")).out


async def test_the_full_screen_says_it_until_something_is_said() -> None:
    async with Network.open() as network, running(network, make_runner("ann", script)):
        mia = await network.join("mia", kind="human")
        async with full_screen(mia, (80, 24), "ann") as screen:
            await screen.type("quiet")
            await screen.press("enter")
            await screen.shows("ann finished without an answer")
            await screen.type("hello")
            await screen.press("enter")
            shown = await screen.shows("Hi.")
            assert "without an answer" not in shown
