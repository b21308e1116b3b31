"""Test environment in which an agent's process is killed: a real hub, the agent's processes behind a proxy, its
model, and its conversation partners.

`Stage.react` lets the agent react to one message. `Stage.react` kills the process at the chosen points, and starts
another one each time, until the reaction is finished. The returned evidence is the content of the ledger at each kill
and at the end, the requests to the model in each process, and the number of bell rings.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.recorded import fetch_records
from roundelay.network.client import NetworkClient
from roundelay.network.errors import UnknownMessage
from roundelay.network.messages import BaseMessage
from tests.crash.agent_evidence import Evidence, Ledger, Point, decide
from tests.crash.agent_process import AgentProcess, AgentProcesses, agent_processes
from tests.crash.agent_proxy import AgentProxy, Frame, Gone, Way
from tests.crash.agent_tools import BELLS, GATE
from tests.support.fake_openai import FakeOpenAI, Reply
from tests.support.node import ProcessNode, node_process
from tests.support.openai_rules import Body
from tests.support.processes import Asked

TIMEOUT_S = 30.0
CONFIGS = {"plain": "Do what you are told.", "other": "Do it with care."}
Replies = Literal["at once", "while away", "when back"]
"""Time of bob's answer, relative to the kill."""
AGENT = """\
id: ann
instruction: {instruction}
model: {{openai: {{name: fake, base_url: "http://127.0.0.1:{port}/v1"}}}}
channels: [dev]
tools: ["tests.crash.agent_tools:ring", "tests.crash.agent_tools:weigh"]
"""


@dataclass
class _Act:
    """A running reaction, and the planned kills in it."""

    word: str
    points: list[Point] = field(default_factory=list)
    """Points at which its processes end, in order."""

    limits: list[int] = field(default_factory=list)
    """Numbers of bytes after which its processes end, in order."""

    freezes: bool = False
    """Whether the process is stopped (SIGSTOP) instead of killed."""

    is_exact: bool = False
    """Whether nothing after the point is forwarded."""

    asked: list[Body] = field(default_factory=list)
    """Requests to the model in this process."""

    passed: int = 0
    """Number of bytes that this process has sent and received."""

    is_ending: bool = False
    has_ended: bool = False
    is_finished: bool = False
    """Whether the ledger has its last record."""

    has_joined: bool = False
    """Whether this process has joined its channel."""

    has_looked_up: bool = False
    """Whether this process has read the thread with bob."""

    has_replied: bool = False
    """Bob."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Releases the frames from and to a stopped process."""


class _Model(FakeOpenAI):
    """The agent's model. The model reports each request to the stage before and after its answer."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(self._answer)
        self._stage = stage

    async def _answer(self, body: Body) -> Reply:
        asked = Asked.read(body)
        await self._stage.take_request(asked, body)
        return decide(asked, body)

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply, body: Body) -> bool:
        goes_on = await super()._send(reader, writer, reply, body)
        await self._stage.reach(Point(f"model {Asked.read(body).turn}", "after"))
        return goes_on


class Stage:
    """The whole test environment, with one reaction at a time. The stage is also the `Watcher` of its proxy."""

    mia: NetworkClient
    bob: NetworkClient
    auditor: NetworkClient
    alive: AgentProcess
    """The agent's current process."""

    def __init__(self, folder: Path, node: ProcessNode) -> None:
        self.heard: Counter[str] = Counter()
        """Answers to mia."""
        self.strays: list[Asked] = []
        """Requests to the model that do not belong to the current reaction."""
        self._folder = folder
        self._node = node
        self._model = _Model(self)
        self._proxy = AgentProxy(self)
        self._bells = folder / "bells"
        self._processes: AgentProcesses
        self._url = ""
        self._labels: dict[str, str] = {}  # expected answers of the hub, by the ID of the frame
        self._batches: dict[str, list[str]] = {}
        self._act = _Act("")
        self._news = asyncio.Event()
        self._may_reply = asyncio.Event()

    async def open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._model)
        stack.push_async_callback(self._proxy.close)
        model_port = await self._proxy.listen(lambda: _address(self._model.base_url), has_frames=False)
        hub_port = await self._proxy.listen(lambda: _address(self._node.url), has_frames=True)
        self._url = f"ws://127.0.0.1:{hub_port}/"
        for name, instruction in CONFIGS.items():
            config = AGENT.format(instruction=instruction, port=model_port)
            (self._folder / f"{name}.yaml").write_text(config, encoding="utf-8")
        gate = await asyncio.start_server(self._open_gate, "127.0.0.1", 0)
        stack.callback(gate.close)
        environment = {GATE: str(gate.sockets[0].getsockname()[1]), BELLS: str(self._bells)}
        self._processes = await stack.enter_async_context(agent_processes(self._folder, **environment))
        url, owner = self._urls, self._node.owner_token
        self.mia = await stack.enter_async_context(NetworkClient("mia", url, kind="human", token=owner))
        self.bob = await stack.enter_async_context(NetworkClient("bob", url, token=self._node.token_of("bob")))
        self.auditor = await stack.enter_async_context(NetworkClient("auditor", url, kind="service", token=owner))
        await self.mia.call("channels.create", {"name": "dev"})
        await self.bob.call("channels.join", {"name": "dev"})
        for client, hear in ((self.mia, self._listen), (self.bob, self._reply)):
            stack.callback(asyncio.create_task(client.handle(hear)).cancel)
        await self._begin_life()
        await self._until("it has joined", lambda: self._act.has_joined)

    @property
    def _urls(self) -> str:
        """URL for all participants except the agent."""
        return self._node.url

    # --- methods for tests

    @property
    def lives(self) -> list[AgentProcess]:
        """Return every process so far."""
        return self._processes.lives

    async def react(
        self,
        word: str,
        points: Sequence[Point] = (),
        *,
        limits: Sequence[int] = (),
        replies: Replies = "at once",
        next_config: str = "plain",
        is_given_up: bool = False,
    ) -> Evidence:
        """Send a text to the agent. Kill its process at each of these points, or after these numbers of bytes, and
        start another one each time.

        With ``is_given_up``, the last kill makes the message a dead letter, which the operator restores.
        """
        act = self._begin(_Act(word, list(points), list(limits), is_exact=bool(points)), may_reply=replies == "at once")
        evidence = await self._say(word)
        while await self._is_killed():
            await self._proxy.settle()
            await self._look(evidence)
            is_open = evidence.ledgers[-1].count()["tool_result"] == 0 and await self._is_asked(word)
            if replies == "while away":
                self._may_reply.set()
                if is_open:
                    await self._until("bob has replied", lambda: act.has_replied)
            await self._begin_life(next_config)
            if replies == "when back":
                if is_open:
                    await self._until("it has looked for a reply", lambda: act.has_looked_up)
                self._may_reply.set()
            if is_given_up and not act.points:
                await self._retry(evidence.seq)
        await self._look(evidence)
        await self._conclude(evidence)
        return evidence

    async def overtake(self, word: str, point: Point, *, cuts: bool = False) -> tuple[Evidence, AgentProcess]:
        """Send a text to the agent, stop its process at this point, and let another process take over and finish.

        With ``cuts``, the stopped process loses its connection. Pending frames wait for `let_go_on`.
        """
        act = self._begin(_Act(word, [point], freezes=True))
        evidence = await self._say(word)
        await self._until("it is stopped", lambda: act.has_ended)
        frozen = self.alive
        await self._look(evidence)
        if cuts:
            self._proxy.cut()
        await self._begin_life()
        await self._until("another one has finished", lambda: act.is_finished)
        await self._look(evidence)
        await self._conclude(evidence)
        return evidence, frozen

    async def let_go_on(self, frozen: AgentProcess) -> int:
        """Continue a stopped process together with its pending frames. Return the exit code of the process."""
        self._act.goes_on.set()
        frozen.resume()
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.shield(frozen.ended)

    def count_requests(self) -> int:
        """Return the number of requests to the model."""
        return len(self._model.requests)

    def count_bytes(self) -> int:
        """Return the number of bytes that this process has sent and received since the last message."""
        return self._act.passed

    def export(self) -> list[dict[str, Any]]:
        """Return the rows of the ledger in the hub's file."""
        connection = sqlite3.connect(f"file:{self._node.db}?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in connection.execute("SELECT * FROM log ORDER BY seq")]
        finally:
            connection.close()

    # --- the watcher

    def admit(self, size: int) -> int:
        act = self._act
        left = act.limits[0] - act.passed if act.limits and not act.is_ending else size
        if act.is_ending and act.is_exact:
            left = 0  # the process may run for a moment before the signal arrives
        act.passed += size
        return min(size, left)

    async def spent(self) -> None:
        if not self._act.is_ending:
            self._act.limits.pop(0)
            await self._end()

    async def before(self, way: Way, frame: Frame) -> None:
        labels = self._list_labels(way, frame)
        if "finished" in labels and way == "down":
            self._act.is_finished = True
            self._news.set()
        is_answer = way == "down" and labels not in (["delivery"], ["reply"])
        for label in labels:
            if await self.reach(Point(label, "unanswered" if is_answer else "before")):
                raise Gone

    async def after(self, way: Way, frame: Frame) -> None:
        labels = self._list_labels(way, frame) if way == "down" else []
        if not self._act.is_ending:
            self._act.has_joined |= "join" in labels
            self._act.has_looked_up |= "look up" in labels
            self._news.set()
        for label in labels:
            if await self.reach(Point(label, "after")):
                raise Gone

    async def take_request(self, asked: Asked, body: Body) -> None:
        if asked.incoming == self._act.word:
            self._act.asked.append(body)
        else:
            self.strays.append(asked)
        await self.reach(Point(f"model {asked.turn}", "before"))

    async def reach(self, point: Point) -> bool:
        """Report that the process has reached a point. Return True if the process ends there."""
        act = self._act
        if act.is_ending or not act.points or act.points[0] != point:
            return False
        act.points.pop(0)
        await self._end()
        if act.freezes and point.when == "before":
            await act.goes_on.wait()
        return not act.freezes

    async def _end(self) -> None:
        act = self._act
        act.is_ending = True  # until the next process starts, everything that arrives belongs to the dead one
        await (self.alive.stop() if act.freezes else self.alive.kill())
        act.has_ended = True
        self._news.set()

    def _list_labels(self, way: Way, frame: Frame) -> list[str]:
        """Return the labels of a frame in the reaction. A batch has the labels of all frames in it, because a kill
        affects all of them.
        """
        match way, frame:
            case "up", {"type": "batch", "batch_id": batch_id, "frames": frames}:
                self._batches[batch_id] = [label for it in frames if (label := self._label("up", it)) is not None]
                return self._batches[batch_id]
            case "down", {"type": "batched", "batch_id": batch_id}:
                return self._batches.get(batch_id, [])
        label = self._label(way, frame)
        return [] if label is None else [label]

    def _label(self, way: Way, frame: Frame) -> str | None:
        """Return the label of a frame in the reaction, or None if it has no meaning there."""
        match way, frame:
            case "up", {"type": "record", "record_id": frame_id, "kind": kind, "body": body}:
                place = "".join(f"{mark}{body[name]}" for mark, name in ((" ", "turn"), (".", "call")) if name in body)
                return self._labels.setdefault(frame_id, f"{kind}{place}")
            case "up", {"type": "send", "message_id": frame_id, "to": to}:
                return self._labels.setdefault(frame_id, f"send {to}")
            case "up", {"type": "call", "call_id": frame_id, "op": "channels.post"}:
                return self._labels.setdefault(frame_id, "post")
            case "up", {"type": "call", "call_id": frame_id, "op": "channels.join"}:
                return self._labels.setdefault(frame_id, "join")
            case "up", {"type": "call", "call_id": frame_id, "op": "network.history", "args": {"thread_id": thread_id}}:
                return self._labels.setdefault(frame_id, "look up") if thread_id == "direct:ann~bob" else None
            case "down", {"type": "deliver", "message": {"sender_id": "mia"}}:
                return "delivery"
            case "down", {"type": "deliver", "message": {"sender_id": "bob"}}:
                return "reply"
            case "down", {"record_id": frame_id} | {"message_id": frame_id} | {"call_id": frame_id}:
                return self._labels.get(frame_id)
        return None

    async def _open_gate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            what, _, when = (await reader.readline()).decode().strip().partition(" ")
            await self.reach(Point(what, "before" if when == "before" else "after"))
            writer.write(b"go on\n")
            await writer.drain()
        except ConnectionError:
            pass  # the process was killed here
        finally:
            writer.close()

    # --- other participants

    async def _listen(self, message: BaseMessage) -> None:
        self.heard[message.text] += 1

    async def _reply(self, message: BaseMessage) -> None:
        if message.text.endswith("?"):
            await self._may_reply.wait()
            await self.bob.reply(message, f"{message.text}!")  # type: ignore[arg-type]
            self._act.has_replied = True
            self._news.set()

    # --- course of a reaction

    def _begin(self, act: _Act, *, may_reply: bool = True) -> _Act:
        self._labels.clear()
        self._batches.clear()
        self._act = act
        if may_reply:
            self._may_reply.set()
        else:
            self._may_reply.clear()
        return act

    async def _begin_life(self, config: str = "plain") -> None:
        act = self._act
        act.is_ending = act.has_ended = act.has_joined = act.has_looked_up = False
        act.passed = 0
        self.alive = await self._processes.launch(self._folder / f"{config}.yaml", self._url)
        self.alive.ended.add_done_callback(lambda _: self._news.set())

    async def _say(self, word: str) -> Evidence:
        stored = await self.mia.send_text("ann", word)
        return Evidence(word, stored.seq, reaction_id("ann", stored.seq, self.mia.welcome.network.epoch))

    async def _is_killed(self) -> bool:
        """Wait for the next kill. Return False if the reaction has finished and no kill remains."""
        act = self._act
        what = f"it was killed at {act.points or act.limits}" if act.points or act.limits else "it has finished"
        # The last points come after the last record.
        await self._until(
            what, lambda: act.has_ended or (act.is_finished and not act.is_ending and not _ends(act.points))
        )
        assert act.has_ended or not act.points, f"it has finished, and never came to {act.points}"
        if not act.has_ended:
            act.limits.clear()  # the traffic of this process ended before the limit
        return act.has_ended

    async def _until(self, what: str, is_fact: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not is_fact():
                    assert self._act.is_ending or not self.alive.ended.done(), f"it has ended: {self.alive.told()}"
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"waited for this in vain: {what}; the agent: {self.alive.told()}") from None

    async def _look(self, evidence: Evidence) -> None:
        """Store the evidence of this process."""
        records = await fetch_records(self.auditor.call, evidence.reaction, None)
        evidence.lives.append(self.alive)
        evidence.ledgers.append(Ledger(records))
        evidence.asked.append(self._act.asked)
        self._act.asked = []

    async def _is_asked(self, word: str) -> bool:
        """Whether bob has received the question."""
        return any(it.text == f"{word}?" for it in await self._read("direct:ann~bob"))

    async def _conclude(self, evidence: Evidence) -> None:
        for thread_id in ("direct:ann~bob", "direct:ann~mia", "channel:dev"):
            for message in await self._read(thread_id):
                if message.sender_id == "ann" and message.cause == evidence.seq:
                    evidence.messages[message.to, message.text] += 1
        rings = self._bells.read_text(encoding="utf-8").splitlines() if self._bells.exists() else []
        evidence.rings = sum(line.startswith(evidence.reaction) for line in rings)

    async def _retry(self, seq: int) -> None:
        """Restore a dead letter as soon as the message is one."""
        async with asyncio.timeout(TIMEOUT_S):
            while [it["seq"] for it in (await self.auditor.call("network.dead_letters"))["dead_letters"]] != [seq]:
                continue
        await self.auditor.call("network.retry_dead_letter", {"agent_id": "ann", "seq": seq})

    async def _read(self, thread_id: str) -> list[BaseMessage]:
        """Return the last messages of a thread."""
        try:
            return list((await self.auditor.history(thread_id, limit=10)).messages)
        except UnknownMessage:
            return []  # nobody has written there yet


def _ends(points: Sequence[Point]) -> bool:
    return bool(points) and points[0].what == "finished"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.port is not None
    return "127.0.0.1", parts.port


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """Run a `Stage` with a first process of the agent. Everything is stopped at the end."""
    async with AsyncExitStack() as stack:
        limits = {"root_messages_per_s": 1_000_000, "sends_per_s": 1_000_000}
        made = Stage(folder, await stack.enter_async_context(node_process(folder / "team.db", limits=limits)))
        await made.open(stack)
        yield made
