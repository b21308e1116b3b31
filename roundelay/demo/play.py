"""Run the demo: an example team on a real node, and a person whose question needs all agents of the team.

`roundelay demo` writes a node's file with the team of `team.yaml` into a temporary folder, and starts ``roundelay up``
with that file. After that, the demo acts only as a client of this node. The person asks the question, follows the
node's log as an operator, and reads the records of the agents' reactions. The demo also shows private messages between
agents, because an operator may read them. At the end, the demo deletes the folder and stops the processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import roundelay
from roundelay.agents.inbox import wakes
from roundelay.agents.isolation import first_error
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.recorded import fetch_records
from roundelay.demo.agents import DESK, THINKING_S, THINKING_VARIABLE
from roundelay.demo.screen import DemoScreen
from roundelay.display.screen import Screen
from roundelay.network.client import NetworkClient, Signal
from roundelay.network.errors import RoundelayError
from roundelay.network.home import announce_node
from roundelay.network.messages import BaseMessage
from roundelay.network.platforms import handle_signals, kill_process, list_stop_signals
from roundelay.nodes.links import make_link
from roundelay.nodes.processes import NotReady, Process
from roundelay.runs.node_source import HubLog
from roundelay.runs.reading import RecordedReaction

PERSON = "zoe"
QUESTION = "What is 17 × 23, and which is the longest word in “a roundelay comes back to its refrain”?"
LOCAL_QUESTION = "Write one sentence about the sea."
OTHER_QUESTION = "What is 2^10 - 24, and “roundelay” backwards?"
LOCAL = "local"
"""Value of ``--model`` that selects the small model on this machine."""
SCRIPT_TIMEOUT_S, MODEL_TIMEOUT_S = 60.0, 600.0
LOG_WAIT_MS = 250
"""Maximum time that the node holds a read of the log, in milliseconds. After each read the demo checks the agents'
progress, because the log does not report records and restarts.
"""


class DemoFailed(RoundelayError):
    """Raised when the demo could not be completed. The error message explains why."""

    code = "demo"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Options of one run of the demo."""

    question: str = QUESTION
    model: str | None = None
    base_url: str | None = None
    serve: bool = False
    web: bool = False
    kill: str | None = None
    thinking_s: float = THINKING_S

    @property
    def stays(self) -> bool:
        """Whether the node keeps running after the answer."""
        return self.serve or self.web

    @property
    def is_local(self) -> bool:
        """Whether the agents use the small model on this machine."""
        return self.model == LOCAL and self.base_url is None


@cache
def load_team() -> dict[str, dict[str, Any]]:
    """Return the agents that `team.yaml` declares, by id."""
    team = yaml.safe_load(Path(__file__).with_name("team.yaml").read_text(encoding="utf-8"))
    return {agent["id"]: agent for agent in team["agents"]}


def run_demo(
    question: str | None,
    *,
    model: str | None = None,
    base_url: str | None = None,
    serve: bool = False,
    web: bool = False,
    kill: str | None = None,
) -> int:
    """Run the demo on standard output. Return the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    errors = Screen(sys.stderr)
    problem = None
    if kill is not None and kill not in load_team():
        problem = f"There is no agent {kill} in the demo to kill; there are {', '.join(load_team())}."
    elif question is not None and not question.strip():
        problem = "The question is empty; ask something, or leave it out."
    elif base_url is not None and model is None:
        problem = "--base-url needs a model; add --model NAME."
    if problem is not None:
        errors.error(problem)
        return 2
    try:
        plan = DemoPlan(question or QUESTION, model, base_url, serve, web, kill)
        if plan.is_local and question is None:
            plan = replace(plan, question=LOCAL_QUESTION)
        asyncio.run(_stop_at_signals(play(plan, DemoScreen(sys.stdout))))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not (serve or web):
            errors.error("Stopped before the end.")
        return 0 if serve or web else 130
    except RoundelayError as error:
        errors.error(str(error))
        return 1
    return 0


async def play(plan: DemoPlan, screen: DemoScreen) -> list[BaseMessage]:
    """Run the demo and return all messages. If ``stays`` is set, keep running until cancelled.

    Raises `RoundelayError`. Leaves no process and no file behind.
    """
    with tempfile.TemporaryDirectory(prefix="roundelay-demo-") as folder:
        try:
            return await _Demo(plan, screen, Path(folder)).play()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures


class _Demo:
    """State of one run of the demo."""

    def __init__(self, plan: DemoPlan, screen: DemoScreen, folder: Path) -> None:
        self._plan = plan
        self._screen = screen
        self._folder = folder
        self._db = folder / "demo.db"
        self._messages: list[BaseMessage] = []
        self._reactions: dict[str, tuple[str, int]] = {}  # (agent, trigger) of each expected reaction
        self._finished: dict[str, RecordedReaction] = {}
        self._shown_calls: Counter[str] = Counter()  # number of shown tool calls, by reaction
        # replaced after each read of the log, so that every waiting task notices the next read
        self._read = asyncio.Event()
        self._person: NetworkClient
        self._log: HubLog

    async def play(self) -> list[BaseMessage]:
        local_model = _name_local_model() if self._plan.is_local else None
        node = Process(
            "the node",
            ["-m", "roundelay", "up", str(self._write_node_file()), "--until-input-ends"],
            folder=self._folder,
            environment=self._make_environment(),
        )
        try:
            url = await node.start()
            token = await asyncio.to_thread(Path(f"{self._db}.owner").read_text, encoding="ascii")
            async with (
                NetworkClient(PERSON, url, kind="human", token=token.strip()) as person,
                asyncio.TaskGroup() as group,
            ):
                self._person, self._log = person, HubLog(person)
                await person.call("network.watch", {"signals": True})
                tasks = [group.create_task(work) for work in (self._follow_log(), self._watch_node(node))]
                await self._introduce(url, local_model)
                if self._plan.kill is not None:
                    tasks.append(group.create_task(self._kill_at_work(self._plan.kill)))
                started_s = time.monotonic()
                await person.send_text(DESK, self._plan.question)
                await self._wait_for_answer()
                await self._summarize(time.monotonic() - started_s)
                if self._plan.stays:
                    await self._stay(url)
                else:
                    self._screen.suggest("Next", _list_next_commands())
                for task in tasks:
                    task.cancel()
        except NotReady as error:
            raise DemoFailed(node.error or str(error)) from error
        finally:
            await node.stop()
        return self._messages

    # --- the node

    def _write_node_file(self) -> Path:
        agents = [self._choose_model(agent) for agent in load_team().values()]
        file = self._folder / "roundelay.yaml"
        node = {"name": "demo", "port": 0, "db": str(self._db), "agents": agents}
        file.write_text(json.dumps(node, ensure_ascii=False), encoding="utf-8")  # JSON is also valid YAML
        return file

    def _choose_model(self, agent: dict[str, Any]) -> dict[str, Any]:
        if agent["id"] == self._plan.kill:
            agent = agent | {"process": "own"}  # one agent can be killed while the others continue
        if self._plan.model is None:
            return agent
        if self._plan.is_local:
            return agent | {
                "model": {"local": {}},
                "instruction": f"You are {agent['id']}, a friendly assistant.",
            }
        base_url = {"base_url": self._plan.base_url} if self._plan.base_url is not None else {}
        return agent | {"model": {"openai": {"name": self._plan.model, **base_url}}}

    def _make_environment(self) -> dict[str, str]:
        # Use separate settings and tokens. The user's settings must not affect the demo, and the demo must not change
        # them.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROUNDELAY_")}
        home = str(self._folder / "home")
        return inherited | {"ROUNDELAY_HOME": home, THINKING_VARIABLE: str(self._plan.thinking_s)}

    async def _watch_node(self, node: Process) -> None:
        code = await node.wait()
        raise DemoFailed(f"The node ended (exit code {code}): {node.error or ''.join([*node.last_lines][-1:])}")

    async def _read_processes(self) -> dict[str, dict[str, Any]]:
        value = await self._person.call("network.node_agents")
        return {process["agent_id"]: process for process in value["agents"]}

    # --- the conversation

    async def _introduce(self, url: str, local_model: str | None) -> None:
        self._screen.node(url)
        for agent_id, process in (await self._read_processes()).items():
            if process["state"] != "running":
                raise DemoFailed(process.get("error") or f"{agent_id} did not connect.")
            self._screen.member(agent_id, process["pid"], load_team()[agent_id]["description"])
        self._screen.write("")
        if local_model is not None:
            self._screen.incident(
                f"The model is {local_model}, on this machine's CPU. It makes plain English sentences, often wrong ones. "
                f"It calls no tools and asks no other agent, so {DESK} answers alone. Do not rely on its answers."
            )

    async def _follow_log(self) -> None:
        while True:
            for message in await self._log.read(LOG_WAIT_MS):
                await self._show_message(message)
            read, self._read = self._read, asyncio.Event()
            read.set()

    async def _wait_for_read(self) -> None:
        await self._read.wait()

    async def _show_message(self, message: BaseMessage) -> None:
        self._messages.append(message)
        for agent_id in load_team():
            # The demo ends when the reactions to all messages have ended, so record each reaction before it begins.
            if message.to in ("broadcast", f"agent:{agent_id}") and wakes(message, agent_id):
                self._reactions[self._name_reaction(agent_id, message.seq)] = agent_id, message.seq
        if message.sender_id in load_team() and message.cause is not None:
            reaction = self._name_reaction(message.sender_id, message.cause)
            self._show_calls(await self._read_reaction(reaction, message.sender_id))
        self._screen.message(message)

    def _show_calls(self, reaction: RecordedReaction) -> None:
        """Show the tool calls of a reaction that have a result and were not shown before."""
        own_tools = {path.rpartition(":")[2] for path in load_team()[reaction.agent_id].get("tools", ())}
        calls = [call for call in reaction.calls if call.tool in own_tools and call.result is not None]
        for call in calls[self._shown_calls[reaction.reaction] :]:
            self._screen.tool_call(reaction.agent_id, call.tool, call.arguments, call.result or "")
        self._shown_calls[reaction.reaction] = len(calls)

    def _name_reaction(self, agent_id: str, trigger: int) -> str:
        return reaction_id(agent_id, trigger, self._person.welcome.network.epoch)

    async def _read_reaction(self, reaction: str, agent_id: str) -> RecordedReaction:
        return RecordedReaction(reaction, agent_id, await fetch_records(self._person.call, reaction, agent_id))

    async def _kill_at_work(self, agent_id: str) -> None:
        """Kill an agent's process after its first tool call, or after its first reaction if the reaction calls no tool."""
        async for event in self._person.events():
            match event:
                case Signal(kind="tool" | "thinking", sender_id=sender, body={"active": False, "reaction": str(name)}):
                    if sender == agent_id:
                        break
        pid = (await self._read_processes())[agent_id]["pid"]
        kill_process(pid)
        self._screen.incident(f"{agent_id}, process {pid}, is killed while it works (SIGKILL)")
        # The agent's records do not change until the supervisor has restarted the agent.
        reaction = await self._read_reaction(name, agent_id)
        while (process := (await self._read_processes())[agent_id]).get("pid") in (None, pid):
            await self._wait_for_read()
        back = f"{agent_id} is back as process {process['pid']}"
        if reaction.status is not None:
            self._screen.incident(f"{back}; its reaction had ended")
        else:
            turns = (
                "1 turn of its reaction is" if reaction.turns == 1 else f"{reaction.turns} turns of its reaction are"
            )
            self._screen.incident(f"{back} and continues its reaction: {turns} in the ledger and not requested again")

    # --- the end

    async def _wait_for_answer(self) -> None:
        """Wait until the person has received an answer and all reactions have ended."""
        timeout_s = SCRIPT_TIMEOUT_S if self._plan.model is None else MODEL_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._has_answer() and await self._is_idle()):
                    await self._wait_for_read()
        except TimeoutError:
            unfinished = [work for reaction, work in self._reactions.items() if reaction not in self._finished]
            busy = ", ".join(f"{agent_id} with #{seq}" for agent_id, seq in unfinished)
            state = f"at work: {busy}" if busy else f"{PERSON} has no answer"
            raise DemoFailed(f"Not done within {timeout_s:.0f} s ({state}).") from None

    def _has_answer(self) -> bool:
        return any(message.sender_id == DESK and message.to == f"agent:{PERSON}" for message in self._messages)

    async def _is_idle(self) -> bool:
        """Return whether every message is shown and every reaction has finished. Raises `DemoFailed` if a reaction
        failed.
        """
        # Read the state before the checks: a message that is stored during the checks keeps the demo running.
        head: int = (await self._person.call("network.info"))["head"]
        for name, (agent_id, _) in list(self._reactions.items()):
            if name in self._finished:
                continue
            reaction = await self._read_reaction(name, agent_id)
            if reaction.status is None:
                return False
            if reaction.status != "finished":
                raise DemoFailed(f"{agent_id} ended a reaction as {reaction.status}: {reaction.reason}")
            self._show_calls(reaction)
            self._finished[name] = reaction
        return self._log.position >= head

    async def _summarize(self, duration_s: float) -> None:
        threads = Counter(message.thread_id for message in self._messages)
        turns = sum(reaction.turns for reaction in self._finished.values())
        tool_calls = sum(len(reaction.calls) for reaction in self._finished.values())
        self._screen.summary(threads, turns, tool_calls, duration_s)

    async def _stay(self, url: str) -> None:
        """Keep running until cancelled. Meanwhile, commands on this machine find the node without a URL."""
        if self._plan.web:
            link = await make_link(self._person, PERSON, operator=True)
            self._screen.write(f"Open {link['url']}")
            self._screen.write(f"That link logs you in as {PERSON}, once, within 10 minutes.")
            self._screen.write("")
        # The node has its own home folder. Without this announcement, the user's commands would not find the node.
        announcement = announce_node(url, Path(f"{self._db}.owner"))
        command = "./dev roundelay" if _is_checkout() else "roundelay"
        self._screen.suggest(
            "The node runs until Ctrl-C, and the transcript continues here. In another terminal",
            [
                ("ask the team yourself", f"{command} chat --to {DESK}"),
                ("see who is there", f"{command} agents"),
                ("list the threads", f"{command} threads"),
                (f"a further link to the page, as {PERSON}", f"{command} web --as {PERSON} --operator"),
            ],
        )
        self._screen.write("")
        try:
            await asyncio.Event().wait()
        finally:
            announcement.unlink(missing_ok=True)


async def _stop_at_signals(work: Coroutine[object, object, object]) -> None:
    """Run a coroutine. SIGTERM and a closed terminal cancel it, so that it cleans up as it does after Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    with handle_signals([number for number in list_stop_signals() if number is not signal.SIGINT], task.cancel):
        await work


def _name_local_model() -> str:
    """Return the name of the small model's weights. Raises `ModelError` if the weights or the engine are not installed."""
    from roundelay.agents.models.local import LocalServer

    return LocalServer().name


def _list_next_commands() -> list[tuple[str, str]]:
    demo = "./dev demo" if _is_checkout() else "roundelay demo"
    return [
        ("ask something else", f"{demo} '{OTHER_QUESTION}'"),
        ("kill an agent at its work", f"{demo} --kill numbers"),
        ("stay up and join in", f"{demo} --serve"),
        ("see the team on a page", f"{demo} --web"),
        ("the same on a real model", f"{demo} --model NAME [--base-url URL]"),
        ("one answer of a small model on this machine", f"{demo} --model {LOCAL}"),
    ]


def _is_checkout() -> bool:
    """Return whether the current folder is a source checkout with the script ./dev."""
    root = Path(roundelay.__file__).resolve().parents[1]
    return (root / "dev").is_file() and Path.cwd() == root
