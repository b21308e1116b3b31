"""Tests of agents in a folder that share a process of `roundelay up`: one that crashes, blocks or does not stop
affects no other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from roundelay.network.client import NetworkClient
from tests.integration.test_node_agents import listed
from tests.integration.test_up import ask, children, gone, node_up
from tests.support.command import Command, invoke, run

RULES = """\
model:
  rules:
    - when: {after: show}
      do: [{say: shown}]
    - do: [{say: 'AGENT heard {{ text }}'}]
"""
TOOLS = """\
import asyncio, os, sys, time
from pathlib import Path
from roundelay import tool

@tool(idempotent=True)
def die() -> str:
    "Crash."
    os._exit(3)

@tool(idempotent=True)
async def block() -> str:
    "Block the event loop."
    while True:
        pass

@tool(idempotent=True)
async def hold() -> str:
    "Block the event loop inside C code, which runs no signal handler."
    Path("held").touch()
    return str(sum(range(10**13)))

@tool(idempotent=True)
async def linger() -> str:
    "Wait, and clean up when the agent stops."
    try:
        Path("held").touch()
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.3)
        Path("cleaned").touch()

@tool(idempotent=True)
def go_on() -> str:
    "Work for long in a thread."
    with open("began", "w"):
        pass
    while True:
        time.sleep(0.05)
        Path("alive").write_text(str(time.time()))

@tool(idempotent=True)
def show() -> str:
    "Print."
    print("printed in a thread")
    print("and on the error stream", file=sys.stderr)
    return "shown"
"""


NAMES = ("die", "block", "hold", "linger", "go_on", "show")


def write_agent(folder: Path, agent_id: str, more: str = "") -> None:
    tools = f"tools: [{', '.join(f'mytools:{name}' for name in NAMES)}]\n"
    text = f"id: {agent_id}\ninstruction: Answer.\n{more}{tools}{RULES.replace('AGENT', agent_id)}"
    for name in NAMES:
        text = text.replace(
            "  rules:\n", f"  rules:\n    - when: {{contains: do {name}}}\n      do: [{{tool: {name}}}]\n"
        )
    (folder / f"{agent_id}.yaml").write_text(text)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """Folder of a node with three agents."""
    for agent_id in ("ann", "bob", "cat"):
        write_agent(tmp_path, agent_id)
    (tmp_path / "mytools.py").write_text(TOOLS)
    (tmp_path / "roundelay.yaml").write_text("port: 0\nagents: [ann.yaml, bob.yaml, cat.yaml]\n")
    return tmp_path


async def pids(url: str) -> dict[str, int]:
    return {agent_id: it["pid"] for agent_id, it in (await listed(url)).items()}


@asynccontextmanager
async def person(url: str) -> AsyncIterator[NetworkClient]:
    async with NetworkClient("mia", url, kind="human") as mia:
        yield mia


async def test_agents_of_a_folder_share_a_process(team: Path) -> None:
    (team / "apart").mkdir()
    write_agent(team / "apart", "dan")
    write_agent(team, "eve", "process: own\n")
    agents = "agents: [ann.yaml, bob.yaml, cat.yaml, apart/dan.yaml, eve.yaml]"
    (team / "roundelay.yaml").write_text(f"port: 0\n{agents}\n")
    async with node_up(team) as (up, url):
        found = await listed(url)
        assert {agent_id: it["process"] for agent_id, it in found.items()} == {
            "ann": "shared", "bob": "shared", "cat": "shared", "dan": "own", "eve": "own",
        }  # fmt: skip
        assert len({found[agent_id]["pid"] for agent_id in ("ann", "bob", "cat")}) == 1
        assert len({it["pid"] for it in found.values()}) == 3
        assert set(children(up.pid)) == {"agents", "dan", "eve"}
        for agent_id in ("ann", "bob", "cat"):
            assert await ask(url, agent_id, "hello") == f"{agent_id} heard hello"
        await up.stop()
        assert up.errors == []


async def test_output_of_an_agent_in_a_shared_process_names_the_agent(team: Path) -> None:
    async with node_up(team) as (up, url):
        assert await ask(url, "bob", "do show") == "shown"
        await up.error("^bob: printed in a thread$")
        await up.error("^bob: and on the error stream$")
        await up.stop()


async def test_a_tool_that_crashes_twice_isolates_only_its_agent(team: Path) -> None:
    async with node_up(team) as (up, url), person(url) as mia:
        first = (await pids(url))["ann"]
        await mia.send_text("ann", "do die")
        await up.error(r"The shared process of 3 agents ended with exit code 3\. At work: ann\.")
        await up.error(r"The shared process of 3 agents ended with exit code 3\. At work: ann\.")
        await up.error(
            "Agent ann is isolated in its own process: a shared process ended with exit code 3 .* 2 times in all"
        )
        assert await ask(url, "bob", "hello") == "bob heard hello"
        assert await ask(url, "cat", "hello") == "cat heard hello"
        found = await listed(url)
        assert found["bob"]["pid"] == found["cat"]["pid"] != first
        assert (found["ann"]["process"], found["bob"]["process"]) == ("own", "shared")
        assert "2 times in all" in found["ann"]["isolated"]
        for command in (["agent", "list"], ["status", "--over", "0.1"]):
            assert "2 times in all" in (await invoke(*command, "--url", url)).out
        await up.error("Agent ann has ended with exit code 3")
        await up.error("Agent ann has ended with exit code 3")
        assert (await listed(url))["bob"]["pid"] == found["bob"]["pid"], "the crashes of ann end no other process"
        assert not any("Agent bob has ended" in line or "Agent cat has ended" in line for line in up.errors)
        await up.stop()


async def wait_for_restart(url: str, before: int) -> set[int]:
    """Return the processes of the agents once all run again, and none in the process ``before``."""
    async with asyncio.timeout(20):
        while True:
            found = (await listed(url)).values()
            if all(it["state"] == "running" and it["pid"] != before for it in found):
                return {it["pid"] for it in found}


async def test_a_killed_shared_process_returns_with_all_agents(team: Path) -> None:
    async with node_up(team) as (up, url):
        first = (await pids(url))["ann"]
        os.kill(first, signal.SIGKILL)
        await up.error(r"The shared process of 3 agents ended with signal 9\. At work: no agent\.")
        [second] = await wait_for_restart(url, first)
        os.kill(second, signal.SIGKILL)
        await up.error("Agent bob is isolated in its own process: .* nobody was at work")
        assert len(await wait_for_restart(url, second)) == 3
        for agent_id in ("ann", "bob", "cat"):
            assert await ask(url, agent_id, "hello") == f"{agent_id} heard hello"
        await up.stop()


async def test_a_reload_restarts_only_its_agent_with_new_code(team: Path) -> None:
    async with node_up(team) as (up, url):
        before = await pids(url)
        (team / "mytools.py").write_text(TOOLS.replace("printed in a thread", "printed by newer code"))
        write_agent(team, "ann", "description: new\n")
        await invoke("agent", "reload", "ann", "--url", url)
        after = await pids(url)
        assert after["ann"] != before["ann"]
        assert after["bob"] == after["cat"] == before["bob"]
        assert await ask(url, "ann", "do show") == "shown"
        await up.error("^ann: printed by newer code$")
        await ask(url, "bob", "do show")
        await up.error("^bob: printed in a thread$")
        await up.stop()


async def test_a_stopped_agent_whose_thread_goes_on_is_ended(team: Path) -> None:
    async with node_up(team) as (up, url), person(url) as mia:
        before = (await pids(url))["ann"]
        await mia.send_text("ann", "do go_on")
        while not (team / "alive").exists():  # noqa: ASYNC110 (written by another process)
            await asyncio.sleep(0.02)
        assert await ask(url, "bob", "hello") == "bob heard hello", "a blocking tool of ann runs in a thread"
        assert (await invoke("agent", "stop", "ann", "--url", url)).out == "ann is stopped.\n"
        await up.error("Agent ann is isolated in its own process: a tool of it still ran when it was stopped")
        await gone(before)
        assert await ask(url, "bob", "again") == "bob heard again"
        found = await listed(url)
        assert (found["ann"]["state"], found["bob"]["state"]) == ("stopped", "running")
        await up.stop()


async def test_agents_of_a_shared_process_stop_with_a_killed_node(team: Path) -> None:
    async with node_up(team) as (up, url):
        running = set((await pids(url)).values())
        await up.kill()
        for pid in running:
            await gone(pid)


@pytest.mark.parametrize("killed", ["node", "forker"])
async def test_an_agent_stuck_in_c_ends_with_its_parent(team: Path, killed: str) -> None:
    async with node_up(team) as (up, url):
        stuck = (await pids(url))["ann"]
        await begin_tool(team, url, "hold")
        if killed == "forker":
            os.kill(next(iter(_list_forkers(up))), signal.SIGKILL)
            await gone(stuck)
        await up.kill()
        await gone(stuck)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_agents_of_a_stopped_or_killed_node_clean_up(team: Path, number: signal.Signals) -> None:
    async with node_up(team) as (up, url):
        agent, [forker] = (await pids(url))["ann"], _list_forkers(up)
        await begin_tool(team, url, "linger")
        if number is signal.SIGTERM:  # a service manager stops all processes of a service
            os.kill(forker, number)
            assert await ask(url, "bob", "hello") == "bob heard hello"
        os.kill(up.pid, number)
        await gone(agent)
        assert (team / "cleaned").exists()
        await gone(forker)


async def begin_tool(team: Path, url: str, name: str) -> None:
    """Let ann run a tool that creates the file ``held`` when it starts."""
    async with person(url) as mia, asyncio.timeout(20):
        await mia.send_text("ann", f"do {name}")
        while not (team / "held").exists():  # noqa: ASYNC110 (written by another process)
            await asyncio.sleep(0.05)


@pytest.mark.full  # the agent has 12 seconds to stop on its own
@pytest.mark.parametrize("tool", ["hold", "linger"])
async def test_agent_in_a_new_interpreter_ends_with_its_node(team: Path, tool: str) -> None:
    async with node_up(team) as (up, url):
        before = (await pids(url))["ann"]
        os.kill(next(iter(_list_forkers(up))), signal.SIGKILL)
        await gone(before)
        assert await ask(url, "ann", "hello") == "ann heard hello"
        agent = (await pids(url))["ann"]
        await begin_tool(team, url, tool)
        await up.kill()
        await gone(agent)
        assert (team / "cleaned").exists() == (tool == "linger")


async def test_without_the_forker_agents_start_in_new_interpreters(team: Path) -> None:
    async with node_up(team) as (up, url):
        before = await pids(url)
        forker = next(iter(_list_forkers(up)))
        os.kill(forker, signal.SIGKILL)
        await gone(before["ann"])
        for agent_id in ("ann", "bob"):
            assert await ask(url, agent_id, "hello") == f"{agent_id} heard hello"
        await up.stop()


UNTIED = """\
import sys
from roundelay.nodes import forker

forker.end_with_parent = lambda *arguments: None
from roundelay.__main__ import main

main(["up"])
"""


async def test_node_survives_agents_that_end_after_a_lost_forker(team: Path) -> None:
    """The node learns about the forker's end first. Then its agents end one after another, and start again."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UNTIED, cwd=team, stdin=-1, stdout=-1, stderr=-1, env=dict(os.environ)
    )
    up = Command(process)
    try:
        url = (await up.line(r"^Roundelay is ready at (ws://\S+) "))[1]
        await begin_tool(team, url, "linger")  # ann ends later than the others
        os.kill(next(iter(_list_forkers(up))), signal.SIGKILL)
        for agent_id in ("bob", "cat"):
            assert await ask(url, agent_id, "hello") == f"{agent_id} heard hello"
        await up.stop()
    finally:
        await up.kill()


def _list_forkers(up: Command) -> list[int]:
    listed_pids = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    return [int(pid) for pid in listed_pids if Path(f"/proc/{pid}/comm").read_text().strip() == "forker"]


async def test_one_wrong_file_of_a_shared_process_stops_the_start(team: Path) -> None:
    write_agent(team, "cat", "network_tools: [no_such_tool]\n")
    write_agent(team, "bob", "template: missing.j2\n")
    done = await run("up", cwd=team, code=2)
    assert "bob.yaml" in done.err
    assert "missing.j2" in done.err


@pytest.mark.full  # this test waits until the node is certain
@pytest.mark.parametrize("tool", ["block", "hold"])
async def test_an_agent_that_blocks_the_event_loop_is_isolated(team: Path, tool: str) -> None:
    async with node_up(team) as (up, url), person(url) as mia:
        await mia.send_text("ann", f"do {tool}")
        if tool == "block":
            await up.error("^ann: .*in block")
            await up.error(
                "Agent ann is isolated in its own process: it blocked the event loop of a shared process for"
            )
        else:
            await up.error(r"The shared process of 3 agents ended with signal 9\. At work: ann\.")
        await up.error("Agent ann has ended with")
        assert await ask(url, "bob", "hello") == "bob heard hello"
        found = await listed(url)
        assert (found["ann"]["process"], found["bob"]["process"]) == ("own" if tool == "block" else "shared", "shared")
        await up.stop()
