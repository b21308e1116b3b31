"""Runs the agents of a recorded network again, on their recorded replies, and tells the first thing that is not as it was.

The rows of the log are brought about again in their order, each at its own seq and stamp: what people and programs did is done by `Hand`s, what
agents did must come from their runners, whose writes wait at a `Gate` until their row is next. Models and tools are asked for nothing: the
replay stands in for them (`STAND_IN`) with what the records hold, and compares each request with the print that was kept of it. All of it is in
one process, in memory, on virtual time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn

from roundelay.agents.ids import derived_id
from roundelay.agents.runner import AgentRunner
from roundelay.agents.stand_in import STAND_IN
from roundelay.app import OWN_MODS, server_name
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.errors import LedgerError, RoundelayError
from roundelay.network.hub import Hub
from roundelay.network.ledger import Row
from roundelay.network.ledger_memory import MemoryLedger
from roundelay.network.mod import Mod, load_mods
from roundelay.network.operations import network_operations
from roundelay.network.visibility import Visibility
from roundelay.reading.recording import Reaction, Recording, shorten
from roundelay.replay.answers import Difference, RecordedAnswers
from roundelay.replay.compare import compare_rows, describe_frame, describe_row
from roundelay.replay.hands import Hands
from roundelay.replay.links import Gate, GatedTransport, Key
from roundelay.simulation.virtual_time import SimulationLoop, run

PATIENCE_S = 60.0
"""Of virtual time, beside what had passed when a row was recorded: for that it comes after all."""
NO_RATE = 1_000_000_000
"""A replay is no flood: what was accepted is accepted."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay. ``played`` are agents that were run again, ``recorded`` those whose part was taken from the log as it is."""

    rows: int
    messages: int
    turns: int
    played: tuple[str, ...]
    recorded: tuple[str, ...]
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "is_same": self.is_same}


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay: under which limits, mods and visibility the network was, which tools are to be run again, and whether another
    prompt is only told (``is_lenient``) and ends nothing."""

    limits: Limits = field(default_factory=Limits)
    mods: Sequence[str | Mod] = ("channels", "discovery")
    visibility: Visibility = "people"
    run_tools: frozenset[str] = frozenset()
    is_lenient: bool = False


def replay(recording: Recording, runners: Sequence[AgentRunner], options: ReplayOptions | None = None) -> ReplayReport:
    """Replay a recording, in an event loop of its own. Raises `LedgerError` for a log that has lost its beginning."""
    if recording.head.is_excerpt:
        raise LedgerError(
            "This is a part of a log, and a replay needs all of it: export it without --thread, --root, --from and --to."
        )
    if recording.head.first_seq > 1 or (recording.rows and recording.rows[0].seq != 1):
        raise LedgerError(
            "This log has lost its beginning to retention, and a replay needs all of it: take a backup or an export of before."
        )
    # A tool that is run again takes real time, and may wait for something outside.
    loop = SimulationLoop(is_virtual=not (options is not None and options.run_tools))

    async def work() -> ReplayReport:
        return await _Replay(recording, runners, options or ReplayOptions(), loop).run()

    return run(work(), loop)


class _Stop(Exception):
    """The first difference was found."""


class _Replay:
    """One replay. Stands in for models and tools while it runs."""

    def __init__(
        self, recording: Recording, runners: Sequence[AgentRunner], options: ReplayOptions, loop: SimulationLoop
    ) -> None:
        self._recording = recording
        # Ids follow from the epoch: a reaction of another one, or of another program, cannot be brought about by a runner.
        ours = recording.is_ours
        self._foreign = {it.agent_id for it in recording.reactions.values() if not ours(it)} | recording.intruders
        self._runners = {runner.agent_id: runner for runner in runners if runner.agent_id not in self._foreign}
        self._given = [runner.agent_id for runner in runners]
        self._options = options
        self._loop = loop
        self._stamp = recording.rows[0].at if recording.rows else 0
        self._ids = 0
        limits = replace_limits(options.limits)
        mods = load_mods(list(options.mods), OWN_MODS)
        operations = [operation for mod in (*network_operations(), *mods) for operation in mod.operations()]
        self._gate = Gate(operation.op for operation in operations if operation.is_change)
        self._gate.answers_to_hold = lambda key: key in self._before_arrivals
        self._ledger = MemoryLedger(epoch=recording.head.epoch, name=recording.head.name)
        self._hub = Hub(
            self._ledger, limits=limits, mods=mods, visibility=options.visibility, server=server_name(),
            clock=lambda: self._stamp, new_id=self._new_id,
        )  # fmt: skip
        self._hands = Hands(self._hub, recording, self._new_id)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._began_s = loop.time()
        self._seen = 0  # the last seq that has come about
        self._differences: list[Difference] = []
        self._notes: list[str] = []
        self._answered = RecordedAnswers(
            recording, run_tools=options.run_tools, is_lenient=options.is_lenient, seen=lambda: self._seen
        )
        self._cancelled: set[str] = set()
        self._performed: set[int] = set()
        self._answers = {derived_id(name, "", 0, "answer") for name in recording.reactions}
        self._before_arrivals = self._find_before_arrivals()

    async def run(self) -> ReplayReport:
        token = STAND_IN.set(self._answered)
        self._look_at_the_beginning()
        await self._hub.start()
        try:
            await self._reproduce()
            await self._look_at_the_end()
        except _Stop:
            pass
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._hub.close()
            STAND_IN.reset(token)
        agents = self._recording.list_agents()
        found = [*self._answered.drifts, *self._differences] if self._options.is_lenient else self._differences[:1]
        return ReplayReport(
            rows=sum(1 for row in self._recording.rows if row.seq <= self._seen),
            messages=sum(1 for row in self._recording.rows if row.seq <= self._seen and row.type == "message"),
            turns=self._answered.turns,
            played=tuple(agent_id for agent_id in agents if agent_id in self._runners),
            recorded=tuple(agent_id for agent_id in agents if agent_id not in self._runners),
            differences=tuple(found or self._answered.drifts[:1]),
            notes=tuple(dict.fromkeys((*self._answered.notes, *self._notes))),
        )

    # --- row by row

    async def _reproduce(self) -> None:
        rows = self._recording.rows
        place = 0
        while place < len(rows):
            await self._settle()
            come = await self._ledger.rows(self._seen, 500)
            for now in come:
                if place == len(rows):
                    self._stop(f"more is written than was recorded: {describe_row(now)}", now.seq, now.actor)
                self._compare(rows[place], now)
                self._seen = now.seq
                place += 1
            self._look_at_requests()
            if come:
                continue
            row = rows[place]
            self._stamp = max(self._stamp, row.at)
            if row.seq > self._hub.state.head + 1:
                self._hub.state.head = row.seq - 1  # a seq that was never used
            if row.type in ("token", "dead"):
                self._notes.append(f"#{row.seq} ({row.type}) is not part of a replay")
                self._hub.state.head, self._seen = row.seq, row.seq
                place += 1
                continue
            if not self._bring_about(row):
                await self._wait_for(row)

    def _bring_about(self, row: Row) -> bool:
        """Do what makes a row come, or let it go; False if it has to come by itself and has not."""
        key = (row.actor, row.key)
        held = self._gate.take(key) if row.key else None
        if held is not None:
            held.let_go()
            return True
        if row.type == "registered" and row.actor in self._runners:
            self._start(self._runners[row.actor])
            return True
        if not self._is_awaited(row):
            if row.seq in self._performed:
                return False  # and the hub took it, or refuses it: time will tell
            self._performed.add(row.seq)
            return self._hands.perform(row)
        reaction = self._recording.reactions.get(row.stream)
        if row.label == "new_messages" and reaction is not None:
            before = next((it for it, seq in self._before_arrivals.items() if seq == row.seq), None)
            if before is not None and self._gate.release_answer(before):
                return True
        if row.label == "finished" and reaction is not None and self._cancel(reaction, row):
            return True
        return self._let_go_another()

    def _let_go_another(self) -> bool:
        """Let go what the log does not have: a write that was refused then, or that changed nothing, is so again."""
        for held in list(self._gate.held):
            if held.key in self._recording.keys or self._is_over(str(held.frame.get("reaction", ""))):
                continue
            if held.frame["type"] == "record" and held.frame["kind"] == "started":
                continue  # of a reaction that was not begun: judged at the end
            self._gate.held.remove(held)
            held.let_go()
            return True
        return False

    def _is_over(self, reaction: str) -> bool:
        """Whether a reaction was left open, and nothing more of it is in the log."""
        found = self._recording.reactions.get(reaction)
        return found is not None and not found.is_finished and found.rows[-1].seq <= self._seen

    async def _wait_for(self, row: Row) -> None:
        """Let time pass until a row's write is there: as much as had passed since the beginning. Raises `_Stop`."""
        behind_s = (row.at - self._recording.rows[0].at) / 1000 - (self._loop.time() - self._began_s)
        allowed_s = max(0.0, behind_s) + PATIENCE_S
        passed_s = 0.0
        head = self._hub.state.head
        while passed_s < allowed_s:
            step_s = min(max(0.5, passed_s / 4), allowed_s - passed_s)
            await asyncio.sleep(step_s)
            passed_s += step_s
            await self._settle()
            self._look_at_requests()
            if self._hub.state.head > head or any(held.key == (row.actor, row.key) for held in self._gate.held):
                return
        refused = self._hands.take_error()
        if refused is not None:
            self._stop(f"{describe_row(row)}: the hub refuses it now ({refused})", row.seq, row.actor)
        instead = next((held for held in self._gate.held if held.key[0] == row.actor), None)
        also = f"; instead it wants to write: {describe_frame(instead.frame)}" if instead is not None else ""
        self._stop(f"it does not come: {describe_row(row)}{also}", row.seq, row.actor, row.stream)

    async def _settle(self) -> None:
        """Wait until nothing more can happen by itself. Raises what ended a runner."""
        await self._loop.when_quiet()
        for agent_id, task in self._tasks.items():
            if task.done():
                error = task.exception() if not task.cancelled() else None
                reason = f": {error}" if error is not None else "."
                raise RoundelayError(
                    f"The runner of {agent_id} has ended in the middle of the replay{reason}"
                ) from error

    def _look_at_requests(self) -> None:
        """Raises `_Stop` when a model was asked something else. What was written before has been compared."""
        if self._answered.drifts and not self._options.is_lenient:
            raise _Stop

    def _compare(self, recorded: Row, now: Row) -> None:
        difference = compare_rows(recorded, now, is_input=not self._is_awaited(recorded))
        if difference is not None:
            reaction = recorded.stream if recorded.type == "record" else ""
            self._stop(difference, recorded.seq, recorded.actor, reaction)

    def _stop(self, text: str, seq: int | None = None, agent_id: str = "", reaction: str = "") -> NoReturn:
        found = self._recording.reactions.get(reaction)
        self._differences.append(Difference(text, seq, agent_id, reaction if found is not None else ""))
        raise _Stop

    def _look_at_the_beginning(self) -> None:
        """What a replay of these agents leaves out, to be told."""
        registered = {row.actor for row in self._recording.rows if row.type == "registered"}
        for agent_id in self._given:
            if agent_id not in registered:
                self._notes.append(f"{agent_id} has no part in the recording")
            elif agent_id in self._foreign:
                self._notes.append(
                    f"{agent_id} is played from the log: another program wrote it, or under another epoch"
                )

    async def _look_at_the_end(self) -> None:
        """What is there beyond the log: a reaction that nobody had is a difference, one for which the log ended too early is not."""
        await self._settle()
        self._look_at_requests()
        for held in self._gate.held:
            if held.key in self._recording.keys or held.frame["type"] != "record" or held.frame["kind"] != "started":
                continue
            agent_id, trigger = held.key[0], int(held.frame["body"]["trigger"])
            message = self._recording.message(trigger)
            said = f' ("{shorten(message.text)}" of {message.sender_id})' if message is not None else ""
            later = any(it.agent_id == agent_id and it.trigger > trigger for it in self._recording.reactions.values())
            if later:
                self._stop(f"{agent_id} reacts to #{trigger}{said} now, and did not then", trigger, agent_id)
            self._notes.append(f"{agent_id} would go on and react to #{trigger}{said}; the recording ends before that")

    # --- who does what

    def _is_awaited(self, row: Row) -> bool:
        """Whether a row has to come from a runner, or from a mod; everything else is done by a hand."""
        if row.actor.startswith("mod:"):
            return True
        if row.actor not in self._runners:
            return False
        if row.type == "record":
            reaction = self._recording.reactions.get(row.stream)
            return reaction is not None and self._recording.is_ours(reaction)
        client_id = row.key[2:]
        place = self._recording.calls.get(client_id[:32])
        if row.type == "message" and row.key.startswith("m:"):
            return client_id in self._answers or (
                place is not None and (client_id.endswith("-approval") or self._answered.is_made(place))
            )
        return place is not None and row.key.startswith("c:")

    def _start(self, runner: AgentRunner) -> None:
        client = NetworkClient(
            runner.agent_id, kind="agent", role="reactor", card=runner.describe_card(), new_id=self._new_id, jitter=lambda: 1.0,
            transport=GatedTransport(self._hub, self._gate, runner.agent_id),
        )  # fmt: skip
        # as many reactions at once as there were: which of them had a place is in the order of the log
        runner.policy = replace(runner.policy, max_parallel_reactions=1_000_000)

        async def serve() -> None:
            await client.connect()
            await runner.run(client)

        self._tasks[runner.agent_id] = asyncio.create_task(serve(), name=f"replay-{runner.agent_id}")

    def _cancel(self, reaction: Reaction, row: Row) -> bool:
        """Stop a reaction that a person stopped; True the first time."""
        body: Mapping[str, Any] = self._recording.bodies[row.seq]
        if body.get("status") != "cancelled" or reaction.reaction in self._cancelled:
            return False
        self._cancelled.add(reaction.reaction)
        by = str(body.get("reason", "")).removeprefix("stopped by ")
        self._hands.cancel(by, reaction.reaction)
        return True

    def _find_before_arrivals(self) -> dict[Key, int]:
        """The records whose answer waits, by what follows them: messages that were read in the reaction, which had to arrive first."""
        found: dict[Key, int] = {}
        for reaction in self._recording.reactions.values():
            own = [row for row in reaction.rows if not self._recording.read_path(row)]
            for before, row in pairwise(own):
                if row.label == "new_messages":
                    found[before.actor, before.key] = row.seq
        return found

    def _new_id(self) -> str:
        self._ids += 1
        return f"replay-{self._ids}"


def replace_limits(limits: Limits) -> Limits:
    """Give the limits of a replay: those that conversations met, without rates."""
    unbounded = ("sends_per_s", "root_messages_per_s", "bytes_per_day", "messages_per_day")
    return limits.model_copy(update=dict.fromkeys(unbounded, NO_RATE))


def write_report(report: ReplayReport) -> str:
    """Give a report as JSON."""
    return json.dumps(report.to_json())
