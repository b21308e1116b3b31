"""A recorded log as it is looked into: messages, reactions and their records, what each model call and tool call came to.

Used by `replay` and the tapes; commands that look at a part of a log hold no more than that (`sources`). Built from the rows of a ledger's file (`roundelay.network.ledger_file`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundelay.agents.ids import derived_id, reaction_id
from roundelay.agents.models.tape import TapedTurn
from roundelay.agents.records import Recorded, read_records
from roundelay.network.errors import LedgerError, RoundelayError
from roundelay.network.frames import decode_json
from roundelay.network.ledger import Row
from roundelay.network.ledger_file import in_order
from roundelay.network.log_lines import LogHead
from roundelay.network.messages import BaseMessage, message_from_wire

MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class CallPlace:
    """One tool call: of which reaction, in which run inside of it, in which turn, at which place."""

    reaction: str
    path: str
    turn: int
    call: int


@dataclass(frozen=True, slots=True)
class Reaction:
    """One recorded reaction. ``run`` is what it recorded; None for one in another program's shape."""

    reaction: str
    agent_id: str
    trigger: int
    rows: tuple[Row, ...]
    run: Recorded | None

    def find_run(self, path: str) -> Recorded | None:
        if self.run is None or not path:
            return self.run
        return self.run.children.get(path)

    @property
    def is_finished(self) -> bool:
        return any(row.label == "finished" for row in self.rows)


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
        by_writer: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.type == "record":
                by_writer.setdefault((row.stream, row.actor), []).append(row)
        self.reactions: dict[str, Reaction] = {}
        self.intruders: set[str] = set()
        """Who wrote records under the id of another's reaction, as anybody can."""
        for (name, _), found in by_writer.items():
            it, other = self._read_reaction(name, found), self.reactions.get(name)
            if other is not None:
                it, other = (it, other) if self.is_ours(it) and not self.is_ours(other) else (other, it)
                self.intruders.add(other.agent_id)
            self.reactions[name] = it
        self.calls = {derived_id(it.reaction, it.path, it.turn, it.call): it for it in self._list_calls()}
        """Tool calls by the id that what they send begins with."""

    def message(self, seq: int) -> BaseMessage | None:
        """Give a message of the log. Raises `LedgerError` for what is none."""
        row = self.by_seq.get(seq)
        return _make_message(row, self.bodies[seq]) if row is not None and row.type == "message" else None

    def is_ours(self, reaction: Reaction) -> bool:
        """Whether a runner of this package wrote a reaction, under the ledger's epoch: then it can be replayed."""
        derived = reaction_id(reaction.agent_id, reaction.trigger, self.head.epoch)
        return reaction.run is not None and reaction.reaction == derived

    def read_path(self, row: Row) -> str:
        """Give the run inside of its reaction that a record is of; the reaction itself where none is named."""
        body = self.bodies[row.seq]
        return str(body.get("path", "")) if isinstance(body, Mapping) else ""

    def list_agents(self) -> list[str]:
        """Everybody who has reacted, by id."""
        return sorted({reaction.agent_id for reaction in self.reactions.values()})

    def list_tools(self) -> list[str]:
        """Every tool that a model called, by name."""
        replies = [
            reply
            for it in self.reactions.values()
            if it.run is not None
            for run in (it.run, *it.run.children.values())
            for reply in run.replies.values()
        ]
        return sorted({call.name for reply in replies for call in reply.tool_calls})

    def make_tapes(self) -> dict[str, list[TapedTurn]]:
        """Give the tape of each agent that asked a model, runs inside of others included."""
        tapes: dict[str, list[TapedTurn]] = {}
        for reaction in self.reactions.values():
            if reaction.run is None:
                continue
            for row in reaction.rows:
                path = self.read_path(row)
                run = reaction.find_run(path)
                if run is None or row.label not in ("model_reply", "model_failed"):
                    continue
                body = self.bodies[row.seq]
                name = reaction.reaction[:12] + (f"/{path}" if path else "")
                turn = int(body["turn"])
                if row.label == "model_reply":
                    agent_id = str(body["agent"])
                    told = self._describe_trigger(reaction) if turn == 1 else ""
                    taped = TapedTurn.of(
                        run.replies[turn], run=name, turn=turn, request=body.get("request"), for_message=told
                    )
                else:
                    agent_id = self._last_agent(reaction, path, row.seq)
                    failed = run.failures[turn]
                    taped = TapedTurn(run=name, turn=turn, text=failed.reason, failure=failed.kind)
                tapes.setdefault(agent_id, []).append(taped)
        return tapes

    def _last_agent(self, reaction: Reaction, path: str, before: int) -> str:
        """Who was asked last in a run: the record of a failure does not say."""
        agent_id = reaction.agent_id
        for row in reaction.rows:
            if row.seq < before and row.label == "model_reply" and self.read_path(row) == path:
                agent_id = str(self.bodies[row.seq]["agent"])
        return agent_id

    def _describe_trigger(self, reaction: Reaction) -> str:
        message = self.message(reaction.trigger)
        return f"{message.sender_id}: {shorten(message.text)}" if message is not None else ""

    def _read_reaction(self, name: str, rows: list[Row]) -> Reaction:
        records = [
            {
                "seq": row.seq,
                "agent_id": row.actor,
                "kind": row.label,
                "body": self.bodies[row.seq],
                "at": row.at,
                "record_id": row.key[2:],
            }
            for row in rows
        ]
        triggers = [read_trigger(row.label, self.bodies[row.seq]) for row in rows if row.label == "started"]
        trigger = (triggers[-1] if triggers else None) or 0
        return Reaction(name, rows[0].actor, trigger, tuple(rows), read_run(records))

    def _list_calls(self) -> Iterator[CallPlace]:
        for reaction in self.reactions.values():
            if reaction.run is None:
                continue
            for path, run in (("", reaction.run), *reaction.run.children.items()):
                for turn, reply in run.replies.items():
                    for call in range(len(reply.tool_calls)):
                        yield CallPlace(reaction.reaction, path, turn, call)


def read_message(row: Row) -> BaseMessage:
    """Give the message of a row that holds one. Raises `LedgerError`."""
    return _make_message(row, read_body(row))


def read_run(records: Sequence[Mapping[str, Any]]) -> Recorded | None:
    """Give what a reaction recorded; None for another program's, which may be of any shape."""
    try:
        run = read_records(records)
    except (RoundelayError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return run if run.started is not None else None


def read_trigger(kind: str, body: object) -> int | None:
    """Give the trigger of a reaction, where this record of it names one."""
    found = body.get("trigger") if kind == "started" and isinstance(body, Mapping) else None
    return found if isinstance(found, int) else None


def _make_message(row: Row, body: Any) -> BaseMessage:
    try:
        return message_from_wire(body)
    except (RoundelayError, ValueError, TypeError) as error:
        raise LedgerError(f"What the log has at seq {row.seq} is no message; export it anew.") from error


def read_body(row: Row) -> Any:
    """Give what a row holds. A message's cause came before it: the way up from it has an end. Raises `LedgerError`."""
    try:
        body = decode_json(row.data)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"What the log has at seq {row.seq} is no JSON; export it anew.") from error
    if row.type == "message":
        cause = body.get("cause") if isinstance(body, dict) else None
        is_whole = isinstance(body, dict) and body.get("seq") == row.seq and "content" in body
        if not is_whole or (isinstance(cause, int) and cause >= row.seq):
            raise LedgerError(f"What the log has at seq {row.seq} is not the message of that seq; export it anew.")
    return body


def shorten(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Give a text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."
