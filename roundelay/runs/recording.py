"""A complete log in memory, for replays and tapes: its rows, its reactions, and tool calls that sent messages. No
IO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from roundelay.agents.models.tape import TapedTurn
from roundelay.agents.reaction_ids import derived_id, reaction_id
from roundelay.network.core.rows import Row
from roundelay.network.ledger.log_file import LogHead, in_order
from roundelay.network.messages import BaseMessage
from roundelay.network.text import shorten
from roundelay.runs.reading import RecordedReaction, read_body, read_message, read_path, read_reactions


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Position of a tool call: the reaction, the path of the run inside the reaction, the turn, and the index in the
    turn."""

    reaction: str
    path: str
    turn: int
    call: int


class Recording:
    """All rows of a ledger, with indexes for replays."""

    def __init__(self, head: LogHead, rows: Iterable[Row]) -> None:
        self.head = head
        self.rows: Sequence[Row] = list(in_order(rows))
        self.by_seq = {row.seq: row for row in self.rows}
        self.bodies: dict[int, Any] = {row.seq: read_body(row) for row in self.rows}
        self.keys = {(row.actor, row.key) for row in self.rows if row.key}
        self.answered_calls = {key for actor, key in self.keys if actor.startswith("mod:")}
        """Calls that a mod answered with a message, as (caller, ``c:`` and the call's id)."""
        self.reactions: dict[str, RecordedReaction] = {}
        self.intruders: set[str] = set()
        """Participants that wrote records under the id of another agent's reaction, as any participant can."""
        for it in read_reactions(self.rows):
            ours, other = it, self.reactions.get(it.reaction)
            if other is not None:
                # The agent whose id matches the reaction's id owns the reaction, even if another agent wrote first.
                ours, other = (it, other) if self.is_replayable(it) and not self.is_replayable(other) else (other, it)
                self.intruders.add(other.agent_id)
            self.reactions[it.reaction] = ours
        self.calls = {
            derived_id(it.reaction, path, turn, call): CallPlace(it.reaction, path, turn, call)
            for it in self._replayable()
            for path, run in it.runs.items()
            for turn, reply in run.replies.items()
            for call in range(len(reply.tool_calls))
        }
        """Tool calls by the beginning of the message ids that they use."""

    def message(self, seq: int) -> BaseMessage | None:
        """Return a message of the log, or None. Raises `LedgerError` for a damaged message."""
        row = self.by_seq.get(seq)
        return read_message(row) if row is not None and row.type == "message" else None

    def is_replayable(self, reaction: RecordedReaction) -> bool:
        """Return whether a reaction can be replayed. A runner of this package must have written it in the current
        epoch.
        """
        derived = reaction_id(reaction.agent_id, reaction.trigger, self.head.epoch)
        return reaction.run is not None and reaction.reaction == derived

    def find_others(self) -> set[str]:
        """Return the ids of agents with reactions that cannot be replayed."""
        strange = {it.agent_id for it in self.reactions.values() if not (it.is_kept or self.is_replayable(it))}
        return strange | self.intruders

    def list_agents(self) -> list[str]:
        """Return the ids of all agents that reacted."""
        return sorted({reaction.agent_id for reaction in self.reactions.values()})

    def list_tools(self) -> list[str]:
        """Return the names of all tools that models called."""
        replies = (reply for it in self._replayable() for reply in it.replies)
        return sorted({call.name for reply in replies for call in reply.tool_calls})

    def make_tapes(self) -> dict[str, list[TapedTurn]]:
        """Return a tape for each agent that asked a model, including agents inside other agents' calls."""
        tapes: dict[str, list[TapedTurn]] = {}
        for reaction in self._replayable():
            # last agent of each run, because the record of a failure does not name its agent
            asked: dict[str, str] = {}
            for record in reaction.records:
                if record["kind"] not in ("model_reply", "model_failed"):
                    continue
                path, body = read_path(record), record["body"]
                # Name the run for people who read the tape. The start of the reaction's id is enough to find the
                # reaction.
                name = reaction.reaction[:12] + (f"/{path}" if path else "")
                turn = int(body["turn"])
                if record["kind"] == "model_reply":
                    asked[path] = str(body["agent"])
                    # Only the first turn directly answers the trigger.
                    told = self._describe_trigger(reaction) if turn == 1 else ""
                    reply = reaction.runs[path].replies[turn]
                    taped = TapedTurn.of(reply, run=name, turn=turn, request=body.get("request"), for_message=told)
                else:
                    failed = reaction.runs[path].failures[turn]
                    taped = TapedTurn(run=name, turn=turn, text=failed.reason, failure=failed.failure)
                tapes.setdefault(asked.get(path, reaction.agent_id), []).append(taped)
        return tapes

    def _replayable(self) -> list[RecordedReaction]:
        return [it for it in self.reactions.values() if it.run is not None]

    def _describe_trigger(self, reaction: RecordedReaction) -> str:
        message = self.message(reaction.trigger)
        return f"{message.sender_id}: {shorten(message.text)}" if message is not None else ""
