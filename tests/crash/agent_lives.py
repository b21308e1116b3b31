"""The stage on which an agent's process is killed: a real hub, the agent's processes behind a proxy, its model, and who it talks to.

`Stage.react` has the agent react to one message, and ends its process at chosen points of that, each time starting another one, until the
reaction is finished. What it gives is the evidence: what the ledger held at each kill and holds in the end, what the model was asked in
each life, how often the bell rang.
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
"""When bob answers what he is asked: relative to the kill."""
AGENT = """\
id: ann
instruction: {instruction}
model: {{openai: {{name: fake, base_url: "http://127.0.0.1:{port}/v1"}}}}
channels: [dev]
tools: ["tests.crash.agent_tools:ring", "tests.crash.agent_tools:weigh"]
"""


@dataclass
class _Act:
    """A reaction under way, and what is still to happen in it."""

    word: str
    points: list[Point] = field(default_factory=list)
    """Where its process ends, one after the other."""

    limits: list[int] = field(default_factory=list)
    """Likewise, after how many bytes."""

    freezes: bool = False
    """The process is stopped instead."""

    is_exact: bool = False
    """Nothing that comes after the point is passed on."""

    asked: list[Body] = field(default_factory=list)
    """In this life."""

    passed: int = 0
    """Bytes of this life."""

    is_ending: bool = False
    has_ended: bool = False
    is_finished: bool = False
    """Its last record is in the ledger."""

    has_joined: bool = False
    """This life is in its channel."""

    has_looked_up: bool = False
    """This life has read the thread with bob."""

    has_replied: bool = False
    """Bob."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """What was on its way from or to a process that was stopped."""


class _Model(FakeOpenAI):
    """The agent's model: it shows the stage each request, before it is answered and after."""

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
    """Everything there is. One reaction at a time. The `Watcher` of its proxy."""

    mia: NetworkClient
    bob: NetworkClient
    auditor: NetworkClient
    alive: AgentProcess
    """The agent's process of this life."""

    def __init__(self, folder: Path, node: ProcessNode) -> None:
        self.heard: Counter[str] = Counter()
        """What mia was answered."""
        self.strays: list[Asked] = []
        """What the model was asked beside the reaction under way."""
        self._folder = folder
        self._node = node
        self._model = _Model(self)
        self._proxy = AgentProxy(self)
        self._bells = folder / "bells"
        self._processes: AgentProcesses
        self._url = ""
        self._labels: dict[str, str] = {}  # what is awaited from the hub, by the id of the frame
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
        """Where everybody but the agent goes."""
        return self._node.url

    # --- what a test asks for

    @property
    def lives(self) -> list[AgentProcess]:
        """Every process so far."""
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
        """Say a thing to the agent, and kill its process at each of these points, or after so many bytes; the next one goes on.

        ``is_given_up``: the last kill makes what was said a dead letter, and the operator retries that.
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
        """Say a thing to the agent, stop its process at this point, and let another one take over and finish.

        ``cuts``: the connection of the process that stands still is lost. What is on its way waits for `let_go_on`.
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
        """Let a process that was stopped go on, with what was on its way, to its end; gives the exit code."""
        self._act.goes_on.set()
        frozen.resume()
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.shield(frozen.ended)

    def count_requests(self) -> int:
        """How many requests the model has had."""
        return len(self._model.requests)

    def count_bytes(self) -> int:
        """How many bytes have passed in this life since the last thing was said."""
        return self._act.passed

    def export(self) -> list[dict[str, Any]]:
        """The ledger, row by row, as it lies in the hub's file."""
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
            left = 0  # the process may have gone on for a moment before the signal reached it
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
        """The process has come so far. True if that was its end."""
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
        act.is_ending = True  # until the next life begins, whatever comes is of the dead
        await (self.alive.stop() if act.freezes else self.alive.kill())
        act.has_ended = True
        self._news.set()

    def _list_labels(self, way: Way, frame: Frame) -> list[str]:
        """What a frame is in the reaction. A batch is all that stands in it: a kill there meets all of it at once."""
        match way, frame:
            case "up", {"type": "batch", "batch_id": batch_id, "frames": frames}:
                self._batches[batch_id] = [label for it in frames if (label := self._label("up", it)) is not None]
                return self._batches[batch_id]
            case "down", {"type": "batched", "batch_id": batch_id}:
                return self._batches.get(batch_id, [])
        label = self._label(way, frame)
        return [] if label is None else [label]

    def _label(self, way: Way, frame: Frame) -> str | None:
        """What a frame is in the reaction; None for what is nothing in it."""
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
            pass  # it was killed here
        finally:
            writer.close()

    # --- the others

    async def _listen(self, message: BaseMessage) -> None:
        self.heard[message.text] += 1

    async def _reply(self, message: BaseMessage) -> None:
        if message.text.endswith("?"):
            await self._may_reply.wait()
            await self.bob.reply(message, f"{message.text}!")  # type: ignore[arg-type]
            self._act.has_replied = True
            self._news.set()

    # --- the course of a reaction

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
        """Wait for that; False when the reaction has been finished and no kill is to come."""
        act = self._act
        what = f"it was killed at {act.points or act.limits}" if act.points or act.limits else "it has finished"
        # the last points of all are behind the last record
        await self._until(
            what, lambda: act.has_ended or (act.is_finished and not act.is_ending and not _ends(act.points))
        )
        assert act.has_ended or not act.points, f"it has finished, and never came to {act.points}"
        if not act.has_ended:
            act.limits.clear()  # its traffic was over before
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
        """Keep what this life has come to."""
        records = await fetch_records(self.auditor.call, evidence.reaction, None)
        evidence.lives.append(self.alive)
        evidence.ledgers.append(Ledger(records))
        evidence.asked.append(self._act.asked)
        self._act.asked = []

    async def _is_asked(self, word: str) -> bool:
        """Whether bob has been sent the question."""
        return any(it.text == f"{word}?" for it in await self._read("direct:ann~bob"))

    async def _conclude(self, evidence: Evidence) -> None:
        for thread_id in ("direct:ann~bob", "direct:ann~mia", "channel:dev"):
            for message in await self._read(thread_id):
                if message.sender_id == "ann" and message.cause == evidence.seq:
                    evidence.messages[message.to, message.text] += 1
        rings = self._bells.read_text(encoding="utf-8").splitlines() if self._bells.exists() else []
        evidence.rings = sum(line.startswith(evidence.reaction) for line in rings)

    async def _retry(self, seq: int) -> None:
        """Give a dead letter back to the agent, as soon as it is one."""
        async with asyncio.timeout(TIMEOUT_S):
            while [it["seq"] for it in (await self.auditor.call("network.dead_letters"))["dead_letters"]] != [seq]:
                continue
        await self.auditor.call("network.retry_dead_letter", {"agent_id": "ann", "seq": seq})

    async def _read(self, thread_id: str) -> list[BaseMessage]:
        """The end of a thread."""
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
    """A `Stage` with its first process of the agent under way; nothing of it is left at the end."""
    async with AsyncExitStack() as stack:
        limits = {"root_messages_per_s": 1_000_000, "sends_per_s": 1_000_000}
        made = Stage(folder, await stack.enter_async_context(node_process(folder / "team.db", limits=limits)))
        await made.open(stack)
        yield made
