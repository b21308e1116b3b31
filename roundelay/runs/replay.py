"""Implement ``roundelay replay``: run recorded agents on their recorded replies and report the first difference.

load      reads a ledger, and agent files, a node file or a factory of runners (this module)
stage     provides a hub in memory on virtual time, and the connections to it (`replay_stage`)
player    repeats the input of people, programs, and agents that do not run (`replay_stage`)
answers   answer for models, tools and reviewers from the records, without outside calls (`replay_answers`)
compare   compares each new row with the recorded row (`replay_compare`)

The replay produces the rows of the log again, in order, each with its recorded sequence number and time. The runners of
the agents must produce the agents' rows. A gate holds a runner's write until the row of that write is next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from roundelay.agent_files import is_node_file, read_agents
from roundelay.agents.reaction_ids import derived_id
from roundelay.agents.runner import AgentRunner
from roundelay.agents.team import build_runner, name_model
from roundelay.network.config import Limits, load_yaml, resolve_config
from roundelay.network.core.rows import Row
from roundelay.network.errors import ConfigError, LedgerError, RoundelayError
from roundelay.network.ledger.log_file import read_log
from roundelay.network.mod import Mod
from roundelay.network.text import shorten
from roundelay.network.visibility import Visibility
from roundelay.runs.reading import RecordedReaction, read_path
from roundelay.runs.recording import Recording
from roundelay.runs.replay_answers import RecordedAnswers
from roundelay.runs.replay_compare import Difference, compare_rows, describe_frame, describe_row
from roundelay.runs.replay_stage import Key, ReplayStage, is_decision_told
from roundelay.simulation.virtual_time import SimulationLoop, run

PATIENCE_S = 60.0
"""Maximum virtual time to wait for a row after its recorded time, in seconds."""
NO_RATE = 1_000_000_000
"""Value that disables a rate limit. The hub must accept again everything that it accepted in the recording."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Settings of a replay: the network's limits, mods and visibility, and the tools that run again (``run_tools``).

    All other tools return their recorded results.

    With ``is_lenient``, a changed prompt is reported but does not stop the replay.
    """

    limits: Limits = field(default_factory=Limits)
    mods: Sequence[str | Mod] = ("channels", "discovery")
    visibility: Visibility = "people"
    run_tools: frozenset[str] = frozenset()
    is_lenient: bool = False


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay. ``played`` lists the agents that ran. The rows of the agents in ``recorded`` came from the
    log."""

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


def load_replay(
    ledger: Path, files: Sequence[Path], factory: str | None, run_tools: frozenset[str], *, is_lenient: bool
) -> tuple[Recording, list[AgentRunner], ReplayOptions]:
    """Load the arguments of `replay`. No model is created, so no API key is needed.

    Raises `ConfigError` and `LedgerError`.
    """
    if not files and factory is None:
        raise ConfigError("a replay runs agents: pass their files, the node's file, or --agents MODULE:FUNCTION")
    recording = Recording(*read_log(ledger))
    runners = {runner.agent_id: runner for runner in _call_factory(factory)} if factory is not None else {}
    for spec in read_agents(files) if files else []:
        # only the adapter knows the model of an agent from another framework
        runners[spec.id] = build_runner(spec, model=name_model(spec) if spec.adapter is None else None)
    called = recording.list_tools()
    # Report a mistyped tool name: otherwise the tool's recorded result would be used and the tool would seem to work.
    for name in sorted(run_tools.difference(called)):
        raise ConfigError(
            f"--run-tool {name}: no agent called this tool in {ledger}; the recorded tools are: "
            f"{', '.join(called) or 'none'}"
        )
    options = ReplayOptions(run_tools=run_tools, is_lenient=is_lenient)
    for file in files:
        if is_node_file(load_yaml(file)):
            config = resolve_config(file, {}, {})[0]
            # The limits and mods of the node decide what the hub accepts and writes, so the replay needs the same
            # values.
            options = ReplayOptions(config.limits, config.mods, config.visibility, run_tools, is_lenient)
    return recording, list(runners.values()), options


def _call_factory(factory: str) -> list[AgentRunner]:
    module, colon, name = factory.partition(":")
    try:
        if not colon:
            raise ImportError("it has no colon")
        made = getattr(import_module(module), name)()
    except Exception as error:  # the factory is user code, which may raise any exception
        raise ConfigError(
            f"--agents {factory} returns no runners ({type(error).__name__}: {error}); write module:function, "
            "importable from here"
        ) from error
    if not isinstance(made, list | tuple) or not all(isinstance(it, AgentRunner) for it in made):
        raise ConfigError(f"--agents {factory} must return a list of runners; it returned a {type(made).__name__}")
    return list(made)


def replay(recording: Recording, runners: Sequence[AgentRunner], options: ReplayOptions | None = None) -> ReplayReport:
    """Replay a recording in its own event loop. Raises `LedgerError` if the beginning of the log is missing."""
    if recording.head.is_excerpt:
        raise LedgerError(
            "This is a part of a log, and a replay needs all of it: export it without --thread, --root, --from and "
            "--to."
        )
    if recording.head.first_seq > 1 or (recording.rows and recording.rows[0].seq != 1):
        raise LedgerError(
            "This log has lost its beginning to retention, and a replay needs the whole log. Use an earlier backup or "
            "export."
        )
    # Use real time for tools that run again, because such a tool may wait for another system.
    loop = SimulationLoop(is_virtual=not (options is not None and options.run_tools))

    async def work() -> ReplayReport:
        return await _Replay(recording, runners, options or ReplayOptions(), loop).run()

    return run(work(), loop)


class _StopReplay(Exception):
    """Stops the replay at a difference."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference


class _Replay:
    """State of one replay. ``_seen`` is the sequence number of the last row that was produced."""

    def __init__(
        self, recording: Recording, runners: Sequence[AgentRunner], options: ReplayOptions, loop: SimulationLoop
    ) -> None:
        self._recording = recording
        self._loop = loop
        self._began_s = loop.time()
        self._is_lenient = options.is_lenient
        # Reaction ids are derived from the epoch, so a runner cannot repeat reactions of another epoch or of another
        # program.
        others = recording.find_others()
        self._runners = {runner.agent_id: runner for runner in runners if runner.agent_id not in others}
        self._notes = list(_find_left_out(recording, runners, others))
        self._read_after = _find_read_after(recording)
        self._stage = ReplayStage(
            recording, replace_limits(options.limits), options.mods, options.visibility, self._read_after.values()
        )
        self._answers = RecordedAnswers(recording, run_tools=options.run_tools, is_lenient=options.is_lenient)
        self._answer_ids = {derived_id(name, "", 0, "answer") for name in recording.reactions}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen = 0
        self._performed: set[int] = set()
        self._cancelled: set[str] = set()

    async def run(self) -> ReplayReport:
        await self._stage.hub.start()
        differences = []
        try:
            await self._reproduce()
            await self._look_at_the_end()
        except _StopReplay as stop:
            differences = [stop.difference]
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._stage.hub.close()
        agents, drifts = self._recording.list_agents(), self._answers.drifts
        come = [row for row in self._recording.rows if row.seq <= self._seen]
        return ReplayReport(
            rows=len(come),
            messages=sum(row.type == "message" for row in come),
            turns=self._answers.turns,
            played=tuple(agent_id for agent_id in agents if agent_id in self._runners),
            recorded=tuple(agent_id for agent_id in agents if agent_id not in self._runners),
            differences=tuple([*drifts, *differences] if self._is_lenient else differences or drifts[:1]),
            notes=tuple(dict.fromkeys((*self._answers.notes, *self._notes))),
        )

    # --- row by row

    async def _reproduce(self) -> None:
        rows, place = self._recording.rows, 0
        while place < len(rows):
            await self._settle()
            come = await self._stage.ledger.rows(self._seen, 500)
            for now in come:
                if place == len(rows):
                    self._stop(f"more is written than was recorded: {describe_row(now)}", now)
                self._compare(rows[place], now)
                self._saw(now.seq)
                place += 1
            self._look_at_requests()
            if come:
                continue
            row = rows[place]
            # Move the clock only when nothing is running: a working runner would otherwise see a time in the future.
            self._stage.move_to(row)
            # A hub in memory has no tokens, and the hub itself writes dead letters when an agent fails.
            if row.type in ("token", "dead"):
                self._notes.append(f"#{row.seq} ({row.type}) is not part of a replay")
            elif self._bring_about(row):
                continue
            # `mod:network` only reports refusals, and replayed tools read these reports from the log
            elif row.actor != "mod:network":
                await self._wait_for(row)
                continue
            # Skip the row but use up its sequence number, so that all later rows get their recorded numbers.
            self._stage.hub.state.head = row.seq
            self._saw(row.seq)
            place += 1

    def _saw(self, seq: int) -> None:
        self._seen = self._answers.seen = seq

    def _bring_about(self, row: Row) -> bool:
        """Release the write that will store a row, or perform the step that writes the row. Return False if a runner or the hub must still write the
        row."""
        if row.key and self._stage.gate.release((row.actor, row.key)):
            return True
        if row.type == "registered" and row.actor in self._runners:
            self._start(self._runners[row.actor])
            return True
        if not self._is_awaited(row):
            if row.seq in self._performed:
                return False  # wait until the hub stores or refuses the input
            self._performed.add(row.seq)
            return self._stage.hands.perform(row)
        before = self._read_after.get(row.seq)
        if before is not None and self._stage.gate.release_answer(before):
            return True
        reaction = self._recording.reactions.get(row.stream)
        if row.label in ("stopped", "finished") and reaction is not None and self._cancel(reaction, row):
            return True
        return self._let_go_another()

    def _let_go_another(self) -> bool:
        """Release a write that the log does not contain, because the hub refused it or it changed nothing. In the
        replay, the hub refuses or ignores this write too.

        """
        for held in self._stage.gate.held.values():
            # Keep holding a write whose row comes later, or whose reaction was still open at the end of the log.
            if held.key in self._recording.keys or self._is_over(str(held.frame.get("reaction", ""))):
                continue
            if not held.begins_reaction:  # a write that begins a reaction is reported at the end
                return self._stage.gate.release(held.key)
        return False

    def _is_over(self, reaction: str) -> bool:
        """Return whether the log ends with this reaction open and all recorded rows of the reaction have been
        produced."""
        found = self._recording.reactions.get(reaction)
        return found is not None and found.is_open and int(found.records[-1]["seq"]) <= self._seen

    async def _wait_for(self, row: Row) -> None:
        """Let virtual time pass until the write of a row arrives, or until shortly after the recorded time of the row.

        Raises `_StopReplay`.
        """
        # In the recording, the runner may have waited for a retry or a timer. Allow the same amount of virtual time.
        behind_s = (row.at - self._recording.rows[0].at) / 1000 - (self._loop.time() - self._began_s)
        allowed_s = max(0.0, behind_s) + PATIENCE_S
        passed_s = 0.0
        head, held = self._stage.hub.state.head, self._stage.gate.held
        while passed_s < allowed_s:
            # Increase the steps: a wait of hours would need many thousand small steps.
            step_s = min(max(0.5, passed_s / 4), allowed_s - passed_s)
            await asyncio.sleep(step_s)
            passed_s += step_s
            await self._settle()
            self._look_at_requests()
            if self._stage.hub.state.head > head or (row.actor, row.key) in held:
                return
        # Report a refused input first, because it explains why nothing followed.
        refused = self._stage.hands.take_error()
        if refused is not None:
            self._stop(f"{describe_row(row)}: the hub refuses it now ({refused})", row)
        instead = next((it for it in held.values() if it.key[0] == row.actor), None)
        also = f"; instead it wants to write: {describe_frame(instead.frame)}" if instead is not None else ""
        self._stop(f"the row did not follow: {describe_row(row)}{also}", row, row.stream)

    async def _settle(self) -> None:
        """Wait until nothing more happens without new input. Raise the error of a runner that failed."""
        await self._loop.when_quiet()
        for agent_id, task in self._tasks.items():
            # Without its runner, the replay would wait in vain for the agent's rows.
            if task.done():
                error = task.exception() if not task.cancelled() else None
                reason = f": {error}" if error is not None else "."
                raise RoundelayError(
                    f"The runner of {agent_id} has ended in the middle of the replay{reason}"
                ) from error

    def _look_at_requests(self) -> None:
        """Raise `_StopReplay` if a request to a model differs from the recorded request. All earlier rows have been
        compared.
        """
        if self._answers.drifts and not self._is_lenient:
            raise _StopReplay(self._answers.drifts[0])

    def _compare(self, recorded: Row, now: Row) -> None:
        difference = compare_rows(recorded, now, is_input=not self._is_awaited(recorded))
        if difference is not None:
            self._stop(difference, recorded, recorded.stream if recorded.type == "record" else "")

    def _stop(self, text: str, row: Row, reaction: str = "") -> NoReturn:
        known = reaction if reaction in self._recording.reactions else ""
        raise _StopReplay(Difference(text, row.seq, row.actor, known))

    async def _look_at_the_end(self) -> None:
        """Check the writes that remain after the last row of the log.

        A reaction that the log does not contain is a difference, unless the log ended before that reaction.
        """
        await self._settle()
        self._look_at_requests()
        for held in self._stage.gate.held.values():
            if held.key in self._recording.keys or not held.begins_reaction:
                continue
            agent_id, trigger = held.key[0], int(held.frame["body"]["trigger"])
            message = self._recording.message(trigger)
            said = f' ("{shorten(message.text)}" of {message.sender_id})' if message is not None else ""
            # A reaction to a later message shows that the agent skipped this message in the recording.
            if any(it.agent_id == agent_id and it.trigger > trigger for it in self._recording.reactions.values()):
                text = f"{agent_id} reacts to #{trigger}{said} now, but did not react in the recording"
                raise _StopReplay(Difference(text, trigger, agent_id))
            self._notes.append(
                f"{agent_id} would continue and react to #{trigger}{said}; the recording ends before that"
            )

    # --- sources of rows

    def _is_awaited(self, row: Row) -> bool:
        """Return whether a runner or a mod must write a row. The `InputPlayer` causes all other rows."""
        if is_decision_told(row):
            return False  # a person called network.decide
        # Mods are part of the hub, which also runs in the replay.
        if row.actor.startswith("mod:"):
            return True
        if row.actor not in self._runners:
            return False
        if row.type == "record":
            reaction = self._recording.reactions.get(row.stream)
            return reaction is not None and self._recording.is_replayable(reaction)
        client_id = row.key[2:]
        place = self._recording.calls.get(client_id[:32])
        if row.type == "message" and row.key.startswith("m:"):
            return client_id in self._answer_ids or (
                place is not None and (client_id.endswith("-approval") or self._answers.is_made(place))
            )
        return place is not None and row.key.startswith("c:")

    def _start(self, runner: AgentRunner) -> None:
        client = self._stage.make_client(runner)
        # Remove the limit of parallel reactions, because the order of the log already reflects it.
        runner.playback = self._answers
        runner.policy = replace(runner.policy, max_parallel_reactions=1_000_000)

        async def serve() -> None:
            await client.connect()
            await runner.run(client)

        self._tasks[runner.agent_id] = asyncio.create_task(serve(), name=f"replay-{runner.agent_id}")

    def _cancel(self, reaction: RecordedReaction, row: Row) -> bool:
        """Stop a reaction that a person stopped in the recording. Return True only the first time."""
        body: Mapping[str, Any] = self._recording.bodies[row.seq]
        is_stop = row.label == "stopped" or body.get("status") == "cancelled"
        if not is_stop or reaction.reaction in self._cancelled:
            return False
        self._cancelled.add(reaction.reaction)
        by = str(body.get("by") or str(body.get("reason", "")).removeprefix("stopped by "))
        self._stage.hands.cancel(by, reaction.reaction)
        return True


def replace_limits(limits: Limits) -> Limits:
    """Return the limits for a replay. Limits of conversations remain, and rate limits are removed."""
    unbounded = ("sends_per_s", "root_messages_per_s", "bytes_per_day", "messages_per_day", "max_uncaused_answers")
    # The log contains the end of each takeover, so no timer may end one. Disable batches: the gate releases each write
    # when its row is next.
    return limits.model_copy(update={**dict.fromkeys(unbounded, NO_RATE), "takeover_ms": 0, "max_batch": 1})


def _find_left_out(recording: Recording, runners: Sequence[AgentRunner], others: set[str]) -> list[str]:
    """Return notes about agents that the replay cannot run."""
    registered = {row.actor for row in recording.rows if row.type == "registered"}
    told = []
    for runner in runners:
        if runner.agent_id not in registered:
            told.append(f"{runner.agent_id} has no part in the recording")
        elif runner.agent_id in others:
            told.append(f"{runner.agent_id} is played from the log: another program wrote it, or under another epoch")
    return told


def _find_read_after(recording: Recording) -> dict[int, Key]:
    """Return the records whose answers from the hub must be held, by the sequence number of the record that follows
    each.

    A reaction that read new messages while it ran must read them again at the same point. Therefore the hub's answer to
    the preceding record is held until these messages have arrived.
    """
    found: dict[int, Key] = {}
    for reaction in recording.reactions.values():
        own = [it for it in reaction.records if not read_path(it)]
        for before, record in pairwise(own):
            if record["kind"] == "new_messages":
                found[record["seq"]] = (reaction.agent_id, f"r:{before['record_id']}")
    return found
