"""A whole log in memory, as a replay and tapes look at it: every row, the reactions, and which tool calls are behind
what was sent. Pure."""

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
    """One tool call: of which reaction, in which run inside of it, in which turn, at which place."""

    reaction: str
    path: str
    turn: int
    call: int


class Recording:
    """The whole log of a ledger."""

    def __init__(self, head: LogHead, rows: Iterable[Row]) -> None:
        self.head = head
        self.rows: Sequence[Row] = list(in_order(rows))
        self.by_seq = {row.seq: row for row in self.rows}
        self.bodies: dict[int, Any] = {row.seq: read_body(row) for row in self.rows}
        self.keys = {(row.actor, row.key) for row in self.rows if row.key}
        self.answered_calls = {key for actor, key in self.keys if actor.startswith("mod:")}
        """Calls that a mod answered by a message of its own, each as ``c:``, the caller, and its id."""
        self.reactions: dict[str, RecordedReaction] = {}
        self.intruders: set[str] = set()
        """Who wrote records under the id of another's reaction, as anybody can."""
        for it in read_reactions(self.rows):
            ours, other = it, self.reactions.get(it.reaction)
            if other is not None:
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
        """Tool calls by the id that what they send begins with."""

    def message(self, seq: int) -> BaseMessage | None:
        """Give a message of the log. Raises `LedgerError` for what is none."""
        row = self.by_seq.get(seq)
        return read_message(row) if row is not None and row.type == "message" else None

    def is_replayable(self, reaction: RecordedReaction) -> bool:
        """Whether a runner of this package wrote a reaction, under the ledger's epoch: then it can be replayed."""
        derived = reaction_id(reaction.agent_id, reaction.trigger, self.head.epoch)
        return reaction.run is not None and reaction.reaction == derived

    def find_others(self) -> set[str]:
        """Give whoever wrote what no runner of this package writes under the ledger's epoch, by id."""
        strange = {it.agent_id for it in self.reactions.values() if not (it.is_kept or self.is_replayable(it))}
        return strange | self.intruders

    def list_agents(self) -> list[str]:
        """Everybody who has reacted, by id."""
        return sorted({reaction.agent_id for reaction in self.reactions.values()})

    def list_tools(self) -> list[str]:
        """Every tool that a model called, by name."""
        replies = (reply for it in self._replayable() for reply in it.replies)
        return sorted({call.name for reply in replies for call in reply.tool_calls})

    def make_tapes(self) -> dict[str, list[TapedTurn]]:
        """Give the tape of each agent that asked a model, runs inside of others included."""
        tapes: dict[str, list[TapedTurn]] = {}
        for reaction in self._replayable():
            asked: dict[str, str] = {}  # who was asked last in each run: the record of a failure does not say
            for record in reaction.records:
                if record["kind"] not in ("model_reply", "model_failed"):
                    continue
                path, body = read_path(record), record["body"]
                name = reaction.reaction[:12] + (f"/{path}" if path else "")
                turn = int(body["turn"])
                if record["kind"] == "model_reply":
                    asked[path] = str(body["agent"])
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
