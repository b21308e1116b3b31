"""The demo: a node, three agents as processes of their own over WebSocket, and a person whose question needs them all.

It runs for real: the node (embedded SQLite, in a folder that is removed at the end) listens in this process, the agents (`team`) are
children that connect to it, and the person is one more client. The transcript shows what the hub stored, private messages between agents
included, which the person is not sent: a mod inside the node hands each message on after its commit. The numbers at the end come from the
ledger, read with the owner's token.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import roundelay
from roundelay.agents.foreign import first_error
from roundelay.agents.inbox import wakes
from roundelay.agents.records import fetch_records
from roundelay.app import Node
from roundelay.app import serve as serve_node
from roundelay.demo.process import DemoFailed, MemberProcess
from roundelay.demo.screen import DemoScreen, Totals
from roundelay.demo.team import DESK, ROLES, THINKING_S, Report
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.errors import RoundelayError
from roundelay.network.frames import decode_json
from roundelay.network.home import announce_node
from roundelay.network.ledger import Row
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.mod import AfterContext, Mod
from roundelay.terminal import Screen

PERSON = "zoe"
QUESTION = "What is 17 × 23, and which is the longest word in “a roundelay comes back to its refrain”?"
OTHER_QUESTION = "What is 2^10 - 24, and “roundelay” backwards?"
START_TIMEOUT_S = 30.0
SCRIPT_TIMEOUT_S = 60.0
MODEL_TIMEOUT_S = 600.0
SHOWN_TOOLS = frozenset(tool.name for role in ROLES.values() for tool in role.tools)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run of the demo is to do."""

    question: str = QUESTION
    model: str | None = None
    base_url: str | None = None
    serve: bool = False
    kill: str | None = None
    thinking_s: float = THINKING_S

    @property
    def timeout_s(self) -> float:
        """How long the answer may take."""
        return SCRIPT_TIMEOUT_S if self.model is None else MODEL_TIMEOUT_S


def run_demo(
    question: str | None,
    *,
    model: str | None = None,
    base_url: str | None = None,
    serve: bool = False,
    kill: str | None = None,
) -> int:
    """Run the demo on standard output and give the exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    screen, errors = DemoScreen(sys.stdout), Screen(sys.stderr)
    if kill is not None and kill not in ROLES:
        errors.error(f"There is no agent {kill} in the demo to kill; there are {', '.join(ROLES)}.")
        return 2
    if question is not None and not question.strip():
        errors.error("The question is empty; ask something, or leave it out.")
        return 2
    if base_url is not None and model is None:
        errors.error("--base-url says where a model is, and none is named; add --model NAME.")
        return 2
    plan = Plan(question or QUESTION, model, base_url, serve, kill)
    try:
        asyncio.run(_obey_signals(play(plan, screen)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not serve:
            errors.error("Stopped before the end.")
        return 0 if serve else 130
    except RoundelayError as error:
        errors.error(str(error))
        return 1
    return 0


@dataclass(slots=True)
class Progress:
    """What is known of a run so far: stored messages from the hub, and reports of the agents' processes."""

    messages: list[BaseMessage] = field(default_factory=list)
    awaited: set[tuple[str, int]] = field(default_factory=set)
    """Reactions that have not ended: the agent, and the seq of the message that wakes it."""
    reactions: set[str] = field(default_factory=set)
    """The ids of those that took a turn."""
    delays_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take_message(self, message: BaseMessage) -> None:
        """Note a stored message and whom it wakes."""
        self.messages.append(message)
        for agent_id in ROLES:
            is_recipient = message.to in ("broadcast", f"agent:{agent_id}")
            if is_recipient and wakes(message, agent_id):
                self.awaited.add((agent_id, message.seq))
        self.changed.set()

    def take_report(self, agent_id: str, report: Report) -> None:
        """Note what an agent's process says."""
        match report:
            case {"type": "ready"}:
                self.ready.add(agent_id)
            case {"type": "delivered", "after_ms": float(after_ms)}:
                self.delays_ms.append(after_ms)
            case {"type": "turn_start", "reaction": str(reaction)}:
                self.reactions.add(reaction)
            case {"type": "reacted", "trigger": int(trigger), "status": str(status), "reason": str(reason)}:
                self.awaited.discard((agent_id, trigger))
                if status != "finished":
                    self.failures.append(f"{agent_id} ended a reaction as {status}: {reason}")
        self.changed.set()

    @property
    def is_answered(self) -> bool:
        """Whether the person has an answer, and nobody is at anything any more."""
        answers = (it for it in self.messages if it.sender_id == DESK and it.to == f"agent:{PERSON}")
        return not self.awaited and any(answers)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return as soon as it is so; looked at after each change."""
        while not is_so():
            self.changed.clear()
            await self.changed.wait()


class Transcript(Mod):
    """Hands every message on that the hub stored: runs inside the node, after the commit."""

    id = "transcript"

    def __init__(self, take: Callable[[BaseMessage], None]) -> None:
        self._take = take

    def after(self, context: AfterContext, message: Row) -> None:
        self._take(message_from_wire(decode_json(message.data)))


async def play(plan: Plan, screen: DemoScreen) -> Progress:
    """Run the demo to its end, with `Plan.serve` until it is cancelled. Raises `RoundelayError`; leaves no process and no file behind."""
    with tempfile.TemporaryDirectory(prefix="roundelay-demo-") as folder:
        try:
            return await _Stage(plan, screen, Path(folder)).play()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures


class _Stage:
    """One run: who is on it, and what is shown of it."""

    def __init__(self, plan: Plan, screen: DemoScreen, folder: Path) -> None:
        self._plan = plan
        self._screen = screen
        self._folder = folder
        self._progress = Progress()
        self._members: dict[str, MemberProcess] = {}
        self._unshown: asyncio.Queue[BaseMessage] = asyncio.Queue()  # as long as the transcript; the demo's is short
        self._calls: dict[tuple[object, object, object], str] = {}  # arguments of tool calls under way

    async def play(self) -> Progress:
        config = NodeConfig(name="demo", port=0, db=self._folder / "demo.db")
        async with (
            serve_node(config, mods=[Transcript(self._take_message)]) as node,
            NetworkClient(PERSON, node.url, kind="human", token=node.owner_token) as person,
            asyncio.TaskGroup() as group,
        ):
            self._screen.node(node.url)
            background = [group.create_task(self._hear(person)), group.create_task(self._show())]
            async with self._team(node, group):
                await self._reach(START_TIMEOUT_S, lambda: len(self._progress.ready) == len(ROLES))
                for member in self._members.values():
                    self._screen.member(member.agent_id, member.pid, ROLES[member.agent_id].description)
                self._screen.write("")
                started_at = time.monotonic()
                await person.send_text(DESK, self._plan.question)
                await self._reach(self._plan.timeout_s, self._has_ended)
                await self._sum_up(person, time.monotonic() - started_at)
                if self._plan.serve:
                    await self._stay(node)
                else:
                    self._screen.suggest("Next", _list_next())
            for task in background:
                task.cancel()
        return self._progress

    @asynccontextmanager
    async def _team(self, node: Node, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        """The agents' processes, stopped at the end however it comes."""
        plan = self._plan
        arguments = ["--url", node.url, "--thinking-s", str(plan.thinking_s)]
        arguments += ["--model", plan.model] if plan.model is not None else []
        arguments += ["--base-url", plan.base_url] if plan.base_url is not None else []
        self._members = {name: MemberProcess(name, arguments, self._folder, self._take_report) for name in ROLES}
        keeping = [group.create_task(member.keep()) for member in self._members.values()]
        try:
            yield
        finally:
            await asyncio.gather(*(member.stop() for member in self._members.values()))
            for task in keeping:
                task.cancel()

    async def _hear(self, person: NetworkClient) -> None:
        """Take what is delivered to the person, as a terminal would."""
        async for message in person:
            self._progress.delays_ms.append(time.time() * 1000 - message.sent_at)

    def _take_message(self, message: BaseMessage) -> None:
        """Note a message within the hub's own step: showing it, which may fail or block, is left to a task."""
        self._progress.take_message(message)
        self._unshown.put_nowait(message)

    async def _show(self) -> None:
        while True:
            self._screen.message(await self._unshown.get())

    def _take_report(self, member: MemberProcess, report: Report) -> None:
        self._progress.take_report(member.agent_id, report)
        call = (report.get("reaction"), report.get("turn"), report.get("call"))
        match report:
            case {"type": "tool_call_start", "arguments": str(arguments)}:
                self._calls[call] = arguments
            case {"type": "tool_call_end", "tool": str(tool), "content": str(content)} if tool in SHOWN_TOOLS:
                self._screen.tool_call(member.agent_id, tool, self._calls.pop(call, ""), content)
            case {"type": "ready", "open_reactions": 0} if member.times_killed:
                self._screen.incident(f"{member.agent_id} is back as process {member.pid}; its reaction had ended")
            case {"type": "resumed", "turns": int(turns)}:
                self._screen.incident(
                    f"{member.agent_id} is back as process {member.pid} and goes on in the middle: "
                    f"{_count(turns, 'turn')} of its reaction {'is' if turns == 1 else 'are'} in the ledger and not asked again"
                )
        self._kill_when_due(member, report)

    def _kill_when_due(self, member: MemberProcess, report: Report) -> None:
        """Kill the agent that the plan names, once: in its second turn, or at the end of a reaction that had but one."""
        if member.agent_id != self._plan.kill or member.times_killed:
            return
        turn = report.get("turn")
        is_due = report["type"] == "reacted" or (report["type"] == "turn_start" and isinstance(turn, int) and turn > 1)
        if is_due:
            self._screen.incident(f"{member.agent_id}, process {member.pid}, is killed at its work (SIGKILL)")
            self._progress.ready.discard(member.agent_id)
            member.kill()

    def _has_ended(self) -> bool:
        return self._progress.is_answered and len(self._progress.ready) == len(ROLES)

    async def _reach(self, timeout_s: float, is_so: Callable[[], bool]) -> None:
        progress = self._progress
        try:
            async with asyncio.timeout(timeout_s):
                await progress.wait_until(lambda: is_so() or bool(progress.failures))
        except TimeoutError:
            missing = sorted(set(ROLES) - progress.ready)
            busy = ", ".join(f"{agent_id} with #{seq}" for agent_id, seq in sorted(progress.awaited))
            if missing:
                what = f"{', '.join(missing)} did not connect"
            else:
                what = f"at work: {busy}" if busy else f"{DESK} has not answered {PERSON}"
            words = [f"{it.agent_id}: {it.read_last_words()}" for it in self._members.values() if it.read_last_words()]
            raise DemoFailed(f"Not done within {timeout_s:.0f} s ({what}). {' '.join(words)}".rstrip()) from None
        if progress.failures:
            raise DemoFailed(progress.failures[0])

    async def _sum_up(self, person: NetworkClient, duration_s: float) -> None:
        kinds: Counter[str] = Counter()
        for reaction in self._progress.reactions:
            records = await fetch_records(person.call, reaction, None)
            kinds.update(str(record["kind"]) for record in records)
        delays_ms = self._progress.delays_ms
        self._screen.summary(
            Totals(
                messages_per_thread=Counter(message.thread_id for message in self._progress.messages),
                turns=kinds["model_reply"],
                tool_calls=kinds["tool_started"],
                deliveries=len(delays_ms),
                median_ms=statistics.median(delays_ms),
                slowest_ms=max(delays_ms),
                duration_s=duration_s,
            )
        )

    async def _stay(self, node: Node) -> None:
        """Stay up until cancelled, found by every command on this machine that is given no address."""
        note = announce_node(node.url, Path(f"{self._folder / 'demo.db'}.owner"))
        try:
            command = _roundelay()
            self._screen.suggest(
                "It stays up until Ctrl-C, and the transcript goes on here. In another terminal",
                [
                    ("ask the team yourself", f"{command} chat --to {DESK}"),
                    ("see who is there", f"{command} agents"),
                    ("see what was said where", f"{command} threads"),
                ],
            )
            self._screen.write("")
            await asyncio.Event().wait()
        finally:
            note.unlink(missing_ok=True)


async def _obey_signals(work: Coroutine[object, object, object]) -> None:
    """Await the work; a request to end (SIGTERM, SIGHUP) cancels it, so that it cleans up as after Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    await work


def _list_next() -> list[tuple[str, str]]:
    demo = "./dev demo" if _is_checkout() else "roundelay demo"
    return [
        ("ask something else", f"{demo} '{OTHER_QUESTION}'"),
        ("kill an agent at its work", f"{demo} --kill numbers"),
        ("stay up and join in", f"{demo} --serve"),
        ("the same on a real model", f"{demo} --model NAME [--base-url URL]"),
    ]


def _roundelay() -> str:
    return "./dev roundelay" if _is_checkout() else "roundelay"


def _is_checkout() -> bool:
    """Whether this is run from the folder of a checkout, where ./dev stands."""
    root = Path(roundelay.__file__).resolve().parents[1]
    return (root / "dev").is_file() and Path.cwd() == root


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
