"""The demo: a node, three agents as processes of their own over WebSocket, and a person whose question needs them all.

It runs for real: the node (embedded SQLite, in a folder that is removed at the end) listens in this process, the agents
(`member`) are children that connect to it, and the person is one more client. The transcript shows what the hub stored,
private messages between agents included, which the person is not sent: a mod inside the node hands each message on
after its commit. The numbers at the end come from the ledger, read with the owner's token.
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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

import roundelay
from roundelay.agents.inbox import wakes
from roundelay.agents.isolation import first_error
from roundelay.agents.journal import fetch_records, reaction_id
from roundelay.app import Node
from roundelay.app import serve as serve_node
from roundelay.demo.agents import DESK, THINKING_S, THINKING_VARIABLE
from roundelay.demo.member import LOCAL, Report, load_team
from roundelay.demo.screen import DemoScreen
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.core.tables import Row
from roundelay.network.errors import RoundelayError
from roundelay.network.frames import decode_json
from roundelay.network.home import announce_node
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.mod import AfterContext, Mod
from roundelay.network.platforms import handle_signals, list_stop_signals
from roundelay.nodes.links import make_link
from roundelay.nodes.processes import Process, ready_line
from roundelay.runs.reading import RecordedReaction
from roundelay.terminal.screen import Screen

PERSON = "zoe"
QUESTION = "What is 17 × 23, and which is the longest word in “a roundelay comes back to its refrain”?"
LOCAL_QUESTION = "Write one sentence about the sea."
OTHER_QUESTION = "What is 2^10 - 24, and “roundelay” backwards?"
START_TIMEOUT_S, SCRIPT_TIMEOUT_S, MODEL_TIMEOUT_S = 30.0, 60.0, 600.0


class DemoFailed(RoundelayError):
    """The demo could not come to its end; the sentence says who is missing."""

    code = "demo"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What one run of the demo is to do."""

    question: str = QUESTION
    model: str | None = None
    base_url: str | None = None
    serve: bool = False
    web: bool = False
    kill: str | None = None
    thinking_s: float = THINKING_S

    @property
    def stays(self) -> bool:
        """Whether the node goes on when the question is answered."""
        return self.serve or self.web

    @property
    def is_local(self) -> bool:
        """Whether the small model on this machine drives the agents."""
        return self.model == LOCAL and self.base_url is None


def run_demo(
    question: str | None,
    *,
    model: str | None = None,
    base_url: str | None = None,
    serve: bool = False,
    web: bool = False,
    kill: str | None = None,
) -> int:
    """Run the demo on standard output and give the exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    errors = Screen(sys.stderr)
    team = load_team()
    wrong = None
    if kill is not None and kill not in team:
        wrong = f"There is no agent {kill} in the demo to kill; there are {', '.join(team)}."
    elif question is not None and not question.strip():
        wrong = "The question is empty; ask something, or leave it out."
    elif base_url is not None and model is None:
        wrong = "--base-url says where a model is, and none is named; add --model NAME."
    if wrong is not None:
        errors.error(wrong)
        return 2
    try:
        plan = DemoPlan(question or QUESTION, model, base_url, serve, web, kill)
        if plan.is_local and question is None:
            plan = replace(plan, question=LOCAL_QUESTION)
        asyncio.run(_obey_signals(play(plan, DemoScreen(sys.stdout))))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not (serve or web):
            errors.error("Stopped before the end.")
        return 0 if serve or web else 130
    except RoundelayError as error:
        errors.error(str(error))
        return 1
    return 0


async def play(plan: DemoPlan, screen: DemoScreen) -> list[BaseMessage]:
    """Run the demo to its end, where it `stays` until it is cancelled; gives all that was said.

    Raises `RoundelayError`; leaves no process and no file behind.
    """
    with tempfile.TemporaryDirectory(prefix="roundelay-demo-") as folder:
        try:
            return await _Stage(plan, screen, Path(folder)).play()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures


class DemoAgent(Process):
    """One agent's process, started again when it was killed on purpose. ``take`` gets what it reports."""

    def __init__(
        self, agent_id: str, url: str, plan: DemoPlan, home: Path, take: Callable[[DemoAgent, Report], None]
    ) -> None:
        # -P: nothing in the current folder can stand in for a module
        command = ["-P", "-m", "roundelay.demo.member", agent_id, "--url", url]
        command += ["--model", plan.model] if plan.model is not None else []
        command += ["--base-url", plan.base_url] if plan.base_url is not None else []
        # its own token, wherever the user's are
        own = os.environ | {"ROUNDELAY_HOME": str(home), THINKING_VARIABLE: str(plan.thinking_s)}
        ready = ready_line(agent_id, "")
        super().__init__(agent_id, command, ready=ready, take_line=self._take_report, environment=own)
        self.is_killed = False
        self._take = take

    async def keep(self) -> None:
        """Run it until cancelled, which stops it. Raises `DemoFailed` when it ends by itself."""
        code = await self.run()
        if self.is_killed:
            code = await self.run()
        words = self.read_last_words() or "it said nothing."
        raise DemoFailed(f"{self.name} could not go on (exit code {code}): {words}")

    def read_last_words(self) -> str:
        """Give the last line that it wrote and that is no report, or nothing."""
        return "".join([line for line in self.last_lines if not line.startswith("{")][-1:])

    def _take_report(self, line: str) -> None:
        if line.startswith("{") and line.endswith("}"):  # else it was killed in the middle of it
            self._take(self, json.loads(line))


class TranscriptMod(Mod):
    """Hands every message on that the hub stored: runs inside the node, after the commit."""

    id = "transcript"

    def __init__(self, take: Callable[[BaseMessage], None]) -> None:
        self._take = take

    def after(self, context: AfterContext, message: Row) -> None:
        self._take(message_from_wire(decode_json(message.data)))


class _Stage:
    """One run: who is on it, how far it has come, and what is shown of it."""

    def __init__(self, plan: DemoPlan, screen: DemoScreen, folder: Path) -> None:
        self._plan = plan
        self._screen = screen
        self._folder = folder
        self._team = load_team()
        self._shown_tools = {tool.tool.rpartition(":")[2] for spec in self._team.values() for tool in spec.tools}
        self._members: dict[str, DemoAgent] = {}
        self._ready: set[str] = set()
        self._messages: list[BaseMessage] = []
        self._unshown: asyncio.Queue[BaseMessage] = asyncio.Queue()  # as long as the transcript; the demo's is short
        self._reactions: dict[str, tuple[str, int]] = {}  # every one that a message begins: its agent, that message
        self._ended: set[object] = set()
        self._calls: dict[tuple[object, ...], str] = {}  # arguments of tool calls under way
        self._delays_ms: list[float] = []
        self._failure = ""
        self._epoch = ""
        self._changed = asyncio.Event()

    async def play(self) -> list[BaseMessage]:
        local = _name_local_model() if self._plan.is_local else None
        config = NodeConfig(name="demo", port=0, db=self._folder / "demo.db")
        async with (
            serve_node(config, mods=[TranscriptMod(self._take_message)]) as node,
            NetworkClient(PERSON, node.url, kind="human", token=node.owner_token) as person,
            asyncio.TaskGroup() as group,
        ):
            self._epoch = person.welcome.network.epoch
            self._screen.node(node.url)
            home = self._folder / "home"
            self._members = {it: DemoAgent(it, node.url, self._plan, home, self._take_report) for it in self._team}
            work = [self._hear(person), self._show(), *(member.keep() for member in self._members.values())]
            tasks = [group.create_task(it) for it in work]
            await self._reach(START_TIMEOUT_S, self._is_complete)
            for member in self._members.values():
                self._screen.member(member.name, member.pid, self._team[member.name].description)
            self._screen.write("")
            if local is not None:
                self._screen.incident(
                    f"The model is {local}, on this machine's CPU. It makes plain English sentences, often wrong ones; "
                    f"it calls no tools and asks nobody, so {DESK} answers alone, and whatever it says proves nothing."
                )
            began_s = time.monotonic()
            await person.send_text(DESK, self._plan.question)
            await self._reach(SCRIPT_TIMEOUT_S if self._plan.model is None else MODEL_TIMEOUT_S, self._has_ended)
            await self._sum_up(person, time.monotonic() - began_s)
            if self._plan.stays:
                await self._stay(node, person)
            else:
                self._screen.suggest("Next", _list_next())
            for task in tasks:
                task.cancel()
        return self._messages

    # --- what happens

    async def _hear(self, person: NetworkClient) -> None:
        """Take what is delivered to the person, as a terminal would."""
        async for message in person:
            self._delays_ms.append(time.time() * 1000 - message.sent_at)

    async def _show(self) -> None:
        while True:
            self._screen.message(await self._unshown.get())

    def _take_message(self, message: BaseMessage) -> None:
        """Note a message, and whom it wakes, within the hub's own step: showing it, which may fail or block, is left to
        a task."""
        self._messages.append(message)
        self._unshown.put_nowait(message)
        for agent_id in self._team:
            if message.to in ("broadcast", f"agent:{agent_id}") and wakes(message, agent_id):
                reaction = reaction_id(agent_id, message.seq, self._epoch)
                self._reactions[reaction] = agent_id, message.seq
        self._changed.set()

    def _take_report(self, member: DemoAgent, report: Report) -> None:
        call = (report.get("reaction"), report.get("turn"), report.get("call"))
        match report:
            case {"type": "ready", "open_reactions": count}:
                self._ready.add(member.name)
                if member.is_killed and not count:
                    self._screen.incident(f"{member.name} is back as process {member.pid}; its reaction had ended")
            case {"type": "resumed", "turns": int(turns)}:
                told = "1 turn of its reaction is" if turns == 1 else f"{turns} turns of its reaction are"
                back = f"{member.name} is back as process {member.pid} and goes on in the middle"
                self._screen.incident(f"{back}: {told} in the ledger and not asked again")
            case {"type": "delivered", "after_ms": float(after_ms)}:
                self._delays_ms.append(after_ms)
            case {"type": "turn_start", "turn": int(turn)} if turn > 1:
                self._kill_if_planned(member)
            case {"type": "tool_call_start", "arguments": str(arguments)}:
                self._calls[call] = arguments
            case {"type": "tool_call_end", "tool": str(tool), "content": str(content)} if tool in self._shown_tools:
                self._screen.tool_call(member.name, tool, self._calls.pop(call, ""), content)
            case {"type": "finished", "reaction": reaction, "status": str(status), "reason": str(reason)}:
                self._ended.add(reaction)
                if status != "finished":
                    self._failure = f"{member.name} ended a reaction as {status}: {reason}"
                self._kill_if_planned(member)  # it had but one turn
        self._changed.set()

    def _kill_if_planned(self, member: DemoAgent) -> None:
        if member.name == self._plan.kill and not member.is_killed:
            self._screen.incident(f"{member.name}, process {member.pid}, is killed at its work (SIGKILL)")
            self._ready.discard(member.name)
            member.is_killed = True
            member.kill()

    # --- how far it has come

    def _is_complete(self) -> bool:
        return len(self._ready) == len(self._team)

    def _has_ended(self) -> bool:
        """Whether the person has an answer, and nobody is at anything any more."""
        answers = (it for it in self._messages if it.sender_id == DESK and it.to == f"agent:{PERSON}")
        return self._is_complete() and self._reactions.keys() <= self._ended and any(answers)

    async def _reach(self, timeout_s: float, is_so: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._failure or is_so()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = ", ".join(sorted(self._team.keys() - self._ready))
            at_work = [it for reaction, it in self._reactions.items() if reaction not in self._ended]
            busy = ", ".join(f"{agent_id} with #{seq}" for agent_id, seq in at_work)
            what = f"at work: {busy}" if busy else f"{PERSON} has no answer"
            what = f"{missing} did not connect" if missing else what
            words = [f"{it.name}: {words}" for it in self._members.values() if (words := it.read_last_words())]
            raise DemoFailed(f"Not done within {timeout_s:.0f} s ({what}). {' '.join(words)}".rstrip()) from None
        if self._failure:
            raise DemoFailed(self._failure)

    # --- the end

    async def _sum_up(self, person: NetworkClient, duration_s: float) -> None:
        reactions = [
            RecordedReaction(reaction, agent_id, await fetch_records(person.call, reaction, agent_id))
            for reaction, (agent_id, _) in self._reactions.items()
        ]
        threads = Counter(message.thread_id for message in self._messages)
        turns, tool_calls = sum(it.turns for it in reactions), sum(len(it.calls) for it in reactions)
        self._screen.summary(threads, turns, tool_calls, self._delays_ms, duration_s)

    async def _stay(self, node: Node, person: NetworkClient) -> None:
        """Stay up until cancelled, found by every command on this machine that is given no address."""
        if self._plan.web:
            link = await make_link(person, PERSON, operator=True)
            self._screen.write(f"Open {link['url']}")
            self._screen.write(f"That link logs you in as {PERSON}, once, within 10 minutes.")
            self._screen.write("")
        note = announce_node(node.url, Path(f"{self._folder / 'demo.db'}.owner"))
        command = "./dev roundelay" if _is_checkout() else "roundelay"
        self._screen.suggest(
            "It stays up until Ctrl-C, and the transcript goes on here. In another terminal",
            [
                ("ask the team yourself", f"{command} chat --to {DESK}"),
                ("see who is there", f"{command} agents"),
                ("see what was said where", f"{command} threads"),
                (f"a further link to the page, as {PERSON}", f"{command} web --as {PERSON} --operator"),
            ],
        )
        self._screen.write("")
        try:
            await asyncio.Event().wait()
        finally:
            note.unlink(missing_ok=True)


async def _obey_signals(work: Coroutine[object, object, object]) -> None:
    """Await the work; a request to end (SIGTERM, a closed terminal) cancels it, so that it cleans up as after Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    with handle_signals([it for it in list_stop_signals() if it is not signal.SIGINT], task.cancel):
        await work


def _name_local_model() -> str:
    """Give the name of the small model's weights. Raises `ModelError` when they, or its engine, are not installed."""
    from roundelay.agents.models.local import LocalServer

    return LocalServer().name


def _list_next() -> list[tuple[str, str]]:
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
    """Whether this is run from the folder of a checkout, where ./dev stands."""
    root = Path(roundelay.__file__).resolve().parents[1]
    return (root / "dev").is_file() and Path.cwd() == root
