"""What an event costs the hub among few and among many: 10,000 who are there and have nothing to do with it.

    ./dev bench population [--quick] [--rounds 5] [--only NAME ...] [--json FILE]
    ./dev bench population --markdown FILE

Two hubs in this process, over ledgers in memory: one with 10 others of every sort (connected agents with an open reaction each, people who left what
they have not acknowledged, members of channels who are away or have left), one with 10,000. Each round does every event in both, in turns; a value
is the CPU that it takes among many over that among few, by medians of five. The second form prints the table of a run that was kept.
docs/performance.md tells what each line means.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import MachineFacts, describe_machine
from report import Results, make_parser, pick_size, tell, tell_results
from table import Line

from roundelay.mods.channels import Channels
from roundelay.network.config import Limits
from roundelay.network.core.entries import Peer
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.visibility import audience, has_people, recipients
from roundelay.network.hub import Hub
from roundelay.network.hub.retention import KEEP_ALL, plan_trim
from roundelay.network.hub.session import Session
from roundelay.network.ledger.memory import MemoryLedger

MOST = 1.5
REPEATS = 5
"""Of which the median counts, in each round."""
FREE = Limits(
    sends_per_s=10**9, root_messages_per_s=10**9, max_root_messages=10**9, max_hops=10**9, max_unacked=10**9, messages_per_day=10**9,
    max_created_channels=10**9, max_reactions_per_message=10**9,
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    rounds: int
    few: int
    many: int
    times: int
    """How often an event is done for one time."""


SIZES = {"full": Size(5, 10, 10_000, 40), "quick": Size(1, 10, 2_000, 20), "tiny": Size(1, 4, 40, 2)}


class Wire:
    """A connection without a socket, which keeps what was written last."""

    def __init__(self) -> None:
        self.peer = Peer(is_trusted=True)
        self.is_paused = False
        self._written: list[bytes] = []
        self._moved = asyncio.Event()

    def write(self, payloads: list[bytes]) -> None:
        self._written += payloads
        self._moved.set()

    def forget(self) -> None:
        """What was written so far is of no use."""
        self._written.clear()

    async def find(self, answer: bytes) -> bytes:
        """The first frame written since that holds this, or the error."""
        while True:
            for written in self._written:
                if answer in written or b'"error"' in written[:20]:
                    return written
            self._moved.clear()
            await self._moved.wait()

    def admit(self) -> None: ...

    def end(self, code: int, reason: str) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class World:
    """A hub with ``size`` others of every sort, beside those with whom something happens: ann, ben, and zoe who comes and goes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wires: dict[Session, Wire] = {}
        self._ids = itertools.count(1)

    async def fill(self) -> None:
        ledger = MemoryLedger(epoch="bench")
        clock = lambda: int(time.time() * 1000)  # noqa: E731
        self.hub = Hub(ledger, limits=FREE, mods=[Channels()], clock=clock, new_id=self.new_id)
        await self.hub.start()
        self.ann, self.ben = await self.join("ann"), await self.join("ben", role="reactor")
        self.old = await self.send(self.ann, "broadcast")
        for channel in ("small", "away", "left"):
            await self.call(self.ann, "channels.create", name=channel)
            await self.call(self.ben, "channels.join", name=channel)
        self.asked = await self.send(self.ann, "agent:ben")
        await self.record(self.ben, self.asked, "own")
        reactors = [await self.join(f"agent-{number:05}", role="reactor") for number in range(self.size)]
        for number, reactor in enumerate(reactors):
            seq = await self.send(self.ann, f"agent:agent-{number:05}")
            await self.record(reactor, seq, f"reaction-{number:05}")
        people = [await self.join(f"person-{number:05}", kind="human") for number in range(self.size)]
        for person in people:
            for channel in ("away", "left"):
                await self.call(person, "channels.join", name=channel)
            await self.call(person, "channels.leave", name="left")
        await self.send(self.ann, "broadcast")
        for person in people:
            self.hub.disconnect(person)
        await self.call(self.ben, "network.watch", signals=True)
        await self.tick()

    def new_id(self) -> str:
        return f"id-{next(self._ids):08}"

    async def join(self, agent_id: str, *, kind: str = "agent", role: str = "observer") -> Session:
        wire = Wire()
        session = self.hub.connect(wire)
        self.wires[session] = wire
        await self.tell(session, b'"welcome"', type="hello", protocol=1, agent_id=agent_id, kind=kind, role=role)
        return session

    async def tell(self, session: Session, answer: bytes, **frame: Any) -> bytes:
        """Say something, wait for the frame that answers it."""
        wire = self.wires[session]
        wire.forget()
        self.hub.receive(session, json.dumps(frame).encode())
        return await wire.find(answer)

    async def send(self, session: Session, to: str, **fields: Any) -> int:
        fields = {"type": "send", "message_id": self.new_id(), "to": to, "content": "hello", **fields}
        stored = json.loads(await self.tell(session, b'"stored"', **fields))
        seq: int = stored["seq"]
        return seq

    async def call(self, session: Session, op: str, **args: Any) -> Any:
        answer = await self.tell(session, b'"result"', type="call", call_id=self.new_id(), op=op, args=args)
        return json.loads(answer)["value"]

    async def record(self, session: Session, trigger: int, reaction: str) -> None:
        fields = {"record_id": self.new_id(), "reaction": reaction, "kind": "started", "body": {"trigger": trigger}}
        await self.tell(session, b'"stored"', type="record", **fields)

    async def signal(self, **place: str) -> None:
        wire = self.wires[self.ben]
        wire.forget()
        frame = {"type": "signal", "kind": "typing", "body": None, **place}
        self.hub.receive(self.ann, json.dumps(frame).encode())
        await wire.find(b'"signal"')

    async def come_and_go(self) -> None:
        """A reactor joins, and is lost."""
        session = await self.join("zoe", role="reactor")
        self.hub.disconnect(session)
        del self.wires[session]
        await self.call(self.ann, "network.watch")  # what was begun is done

    async def register(self) -> None:
        session = await self.join(self.new_id())
        self.hub.disconnect(session)
        del self.wires[session]

    async def join_and_leave(self) -> None:
        await self.call(self.ann, "channels.leave", name="away")
        await self.call(self.ann, "channels.join", name="away")

    async def tick(self) -> None:
        """What the hub does with mailboxes twice a second."""
        mailboxes = self.hub.registry.participants
        for mailbox in mailboxes.list_changed():
            mailbox.snapshot()
        mailboxes.drop_idle()

    async def acknowledge(self) -> None:
        seq = await self.send(self.ann, "agent:ben")
        self.hub.receive(self.ben, json.dumps({"type": "ack", "seq": seq}).encode())
        await self.tick()

    async def ask(self, rule: Callable[[State, MessageHead], object], **fields: Any) -> None:
        """A rule of `visibility` about a message of ann's, a hundred times."""
        head = self.hub.state.head + 1
        values: dict[str, Any] = {
            "seq": head, "sender_id": "ann", "sender_kind": "agent", "root": head, "hops": 0, "label": head,
            "thread_id": fields["to"], **fields,
        }  # fmt: skip
        message, state = MessageHead(**values), self.hub.state
        for _ in range(100):
            rule(state, message)

    async def broadcast(self) -> None:
        await self.send(self.ann, "broadcast")


def _audience(state: State, head: MessageHead) -> object:
    return audience(state, head, head.seq)


def _recipients(state: State, head: MessageHead) -> object:
    return list(recipients(state, head))


async def _figures(world: World) -> None:
    world.hub.view.figures()


async def _pins(world: World) -> None:
    plan_trim(KEEP_ALL, world.hub.registry, 0)


Event = Callable[[World], Coroutine[Any, Any, object]]


@dataclass(frozen=True)
class Row:
    """One event; ``is_for_each`` when it reaches everybody who is there, so that its cost is told for each of them."""

    name: str
    title: str
    event: Event
    bound: float | None = MOST
    is_for_each: bool = False


ROWS = (
    Row("channel_connected", "channel message, 2 of all are members", lambda w: w.send(w.ann, "channel:small")),
    Row("channel_away", "channel message, all are members and away", lambda w: w.send(w.ann, "channel:away")),
    Row("caused_direct", "caused message, all others people", lambda w: w.send(w.ann, "agent:ben", cause=w.asked)),
    Row("caused_channel", "caused message, all others left", lambda w: w.send(w.ann, "channel:left", cause=w.asked)),
    Row("people_direct", "has_people, direct", lambda w: w.ask(has_people, kind="direct", to="agent:ben")),
    Row("people_channel", "has_people, channel", lambda w: w.ask(has_people, kind="channel", to="channel:away")),
    Row("people_left", "has_people, all left", lambda w: w.ask(has_people, kind="channel", to="channel:left")),
    Row(
        "people_thread", "has_people, older thread",
        lambda w: w.ask(has_people, kind="broadcast", to="broadcast", thread_id=f"thread:{w.old}"),
    ),
    Row("audience_direct", "audience, direct", lambda w: w.ask(_audience, kind="direct", to="agent:ben")),
    Row("audience_small", "audience, small channel", lambda w: w.ask(_audience, kind="channel", to="channel:small")),
    Row(
        "recipients_thread", "recipients, older thread",
        lambda w: w.ask(_recipients, kind="broadcast", to="broadcast", thread_id=f"thread:{w.old}"),
    ),
    Row("join_channel", "leave and join a channel of all", World.join_and_leave),
    Row("register", "registration", World.register),
    Row("come_and_go", "reactor joins and is lost, all react", World.come_and_go),
    Row("cancel", "network.cancel, all react", lambda w: w.call(w.ann, "network.cancel", reaction="own")),
    Row("open_reactions", "network.open_reactions, own", lambda w: w.call(w.ben, "network.open_reactions")),
    Row("acknowledge", "message, ack and tick, all have mailboxes", World.acknowledge),
    Row("status", "network.message_status, direct", lambda w: w.call(w.ann, "network.message_status", seq=w.asked)),
    Row("info", "network.info", lambda w: w.call(w.ann, "network.info")),
    Row("signal", "signal in a broadcast's thread, 1 watches", lambda w: w.signal(thread_id="broadcast")),
    Row("broadcast", "broadcast, for each session", World.broadcast, is_for_each=True),
    Row("metrics", "figures of /metrics, for each session", _figures, bound=None, is_for_each=True),
    Row("pins", "what retention keeps, for each session", _pins, bound=None, is_for_each=True),
)  # fmt: skip


class Measure:
    """One row's times in both worlds, over the rounds."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.ratios: list[float] = []
        self.few_us: list[float] = []
        self.many_us: list[float] = []

    async def run_round(self, few: World, many: World, times: int) -> str:
        times = max(1, times // 20) if self.row.is_for_each else times
        took: tuple[list[float], list[float]] = ([], [])
        for world in (few, many):
            await self.row.event(world)
        for _ in range(REPEATS):
            for world, found in zip((few, many), took, strict=True):
                found.append(await _time_us(partial(self.row.event, world), times))
        few_us, many_us = map(statistics.median, took)
        self.few_us.append(few_us)
        self.many_us.append(many_us)
        per_us = (few_us / (few.size + 2), many_us / (many.size + 2)) if self.row.is_for_each else (few_us, many_us)
        self.ratios.append(per_us[1] / per_us[0])
        return f"{few_us:.1f} us among few, {many_us:.1f} us among many"

    def line(self, few: int, many: int) -> Line:
        times = f"{statistics.median(self.few_us):,.0f} us among {few:,}, {statistics.median(self.many_us):,.0f} us among {many:,}"
        return Line(self.row.name, self.row.title, self.ratios, self.row.bound, fewer_is_better=True, beside=times)


async def _time_us(event: Callable[[], Coroutine[Any, Any, object]], times: int) -> float:
    """CPU that an event takes on average. The collector waits: what it costs depends on all that is there, whatever happens."""
    gc.collect(0)
    gc.disable()
    try:
        started = time.thread_time()
        for _ in range(times):
            await event()
        return (time.thread_time() - started) / times * 1e6
    finally:
        gc.enable()


async def measure(size: Size, rows: Sequence[Row], rounds: int) -> list[Measure]:
    few, many = World(size.few), World(size.many)
    for world in (few, many):
        tell(f"a hub is filled with {world.size:,} of every sort")
        await world.fill()
    gc.collect()
    gc.freeze()
    measures = [Measure(row) for row in rows]
    for number in range(rounds):
        for it in measures:
            tell(f"round {number + 1}/{rounds}  {it.row.name}: {await it.run_round(few, many, size.times)}")
    for world in (few, many):
        await world.hub.close()
    return measures


def run(size: Size, names: Sequence[str], rounds: int) -> Results:
    """Take the named rows, ``rounds`` times, interleaved; gives the results as plain data."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as scratch:
        machine = describe_machine(Path(scratch))
    measures = asyncio.run(measure(size, [row for row in ROWS if row.name in names], rounds))
    return {
        "machine": asdict(machine),
        "rounds": rounds,
        "size": asdict(size),
        "took_s": round(time.monotonic() - started_s),
        "table": [it.line(size.few, size.many).to_plain() for it in measures],
    }


def describe_run(results: Results) -> str:
    """The machine and the run."""
    facts, size = MachineFacts(**results["machine"]), results["size"]
    return "\n".join(
        [
            f"{facts.cpu_model}, {facts.cores} cores, {facts.kernel}, {facts.python}",
            f"{results['rounds']} rounds, {size['few']:,} and {size['many']:,} others of each sort, {results['took_s']} s",
        ]
    )


def main() -> None:
    quick, rounds = "among 2,000, once: a look within seconds", "how often each event is measured"
    parser = make_parser(__doc__, SIZES, quick=quick, rounds=rounds)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", action="append", default=[], choices=names, help="this row; may be repeated")
    options = parser.parse_args()
    size = pick_size(options, SIZES)
    tell_results(options, lambda: run(size, options.only or names, options.rounds or size.rounds), describe_run)


if __name__ == "__main__":
    main()
