"""Read one reaction back from its records, for explanations, lists, costs, test verdicts and replays. This module
performs no IO.

`roundelay.agents.journal` parses the bodies of records. Another program may write records of the same kinds in a
different format. `RecordedReaction.run` is then None, and only the trigger and the end are available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import msgspec

from roundelay.agents.history import read_argument
from roundelay.agents.models.model import ModelReply, Usage
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.recorded import Approval, Recorded, read_records
from roundelay.agents.text import handoff_name
from roundelay.agents.values import Reviewed, Status
from roundelay.network.core.rows import Row
from roundelay.network.errors import LedgerError, RoundelayError
from roundelay.network.frames import decode_json
from roundelay.network.messages import BaseMessage, message_from_wire

Record = Mapping[str, Any]
"""One record as ``network.records`` returns it: ``seq``, ``agent_id``, ``record_id``, ``kind``, ``body`` and ``at``."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One tool call of a reaction.

    ``seq`` is the seq of the call's first record. ``questions`` holds the seqs of its questions by recipient, and
    ``replies`` the seqs of the answers. ``request`` is the message that asked people for approval.
    """

    seq: int
    turn: int
    call: int
    tool: str
    arguments: str
    result: str | None = None
    is_ok: bool = False
    path: str = ""
    is_begun: bool = False
    questions: Mapping[str, int] = field(default_factory=dict)
    replies: tuple[int, ...] = ()
    request: int | None = None
    approval: Approval | None = None

    def parsed(self) -> Any:
        """Return the arguments decoded from JSON, or the original text if it is not JSON."""
        try:
            return msgspec.json.decode(self.arguments)
        except msgspec.DecodeError:
            return self.arguments


@dataclass(frozen=True, slots=True)
class RecordedReview:
    """Review of an agent's answer. If ``call`` is set, the review is about message number ``send`` that this call
    sent."""

    seq: int
    turn: int
    reviewed: Reviewed
    path: str = ""
    call: int | None = None
    send: int = 0


@dataclass(frozen=True, slots=True)
class RecordedHandoff:
    """Handoff to another agent after a turn. ``seq`` is the sequence number of the new agent's first record.

    ``is_return`` means that the new agent had led the conversation before.
    """

    seq: int
    turn: int
    from_id: str
    to_id: str
    note: str = ""
    is_return: bool = False
    path: str = ""


RecordedWork = RecordedCall | RecordedReview | RecordedHandoff


class RecordedReaction:
    """One reaction and its records, oldest first.

    ``recorded`` is the state according to all readable records. ``run`` is the same state, or None if a record is
    unreadable.
    """

    def __init__(self, reaction: str, agent_id: str, records: Sequence[Record]) -> None:
        self.reaction = reaction
        self.agent_id = agent_id
        self.records = records
        # One unreadable record must not hide the others, so check each record separately.
        self.readable = records if _can_read(records) else [it for it in records if _can_read([it])]
        self.recorded = read_records(self.readable)
        # A replay or a verdict from only some of the records could be wrong, so `run` requires all records.
        is_ours = len(self.readable) == len(records) and self.recorded.started is not None
        self.run = self.recorded if is_ours else None

    @property
    def runs(self) -> Mapping[str, Recorded]:
        """The reaction itself (path ``""``) and the runs inside it, by path."""
        return {"": self.recorded, **self.recorded.children}

    @property
    def is_kept(self) -> bool:
        """Whether the records are not a reaction but an agent's standing approvals or memories, which are stored under
        a separate id.
        """
        return all(it["kind"] in ("standing", "memory") for it in self.records)

    @cached_property
    def triggers(self) -> list[int]:
        """Sequence numbers of the triggers that the records name. Usually there is one, but another program may record
        several."""
        triggers = (read_trigger(str(it["kind"]), it["body"]) for it in self.records)
        return [trigger for trigger in triggers if trigger is not None]

    @property
    def trigger(self) -> int:
        """Sequence number of the trigger, or 0 if unknown."""
        return self.triggers[-1] if self.triggers else 0

    @property
    def thread_id(self) -> str:
        return next((str(body.get("thread_id", "")) for body in self._bodies("started")), "")

    @property
    def manifest(self) -> Sequence[int]:
        """Sequence numbers of the messages in the prompt."""
        return self.recorded.started.manifest if self.recorded.started is not None else ()

    @property
    def status(self) -> str | None:
        """Final status, or None while the reaction is open."""
        if self.recorded.finished is not None:
            return self.recorded.finished.status
        # A ``finished`` record of another program may contain only the required status.
        ends = [body.get("status") for body in self._bodies("finished")]
        # An unknown status also means an end. If it were ignored, the reaction would be shown as open forever.
        return next((it for it in ends if it in get_args(Status)), "finished" if self._has_ended() else None)

    @property
    def reason(self) -> str:
        return self.recorded.finished.reason if self.recorded.finished is not None else ""

    @property
    def is_open(self) -> bool:
        return self.status is None

    @property
    def is_waiting(self) -> bool:
        """Whether the reaction is open and waits for answers or an approval."""
        return self.is_open and bool(self.recorded.open_waits())

    @property
    def state(self) -> str:
        """Final status, or else ``waiting`` or ``open``."""
        return self.status or ("waiting" if self.is_waiting else "open")

    @property
    def turns(self) -> int:
        """Number of turns with a recorded reply, not counting runs inside the reaction."""
        return len(self.recorded.replies)

    @property
    def replies(self) -> list[ModelReply]:
        """All recorded model replies, including replies in runs inside the reaction."""
        return [reply for run in self.runs.values() for reply in run.replies.values()]

    @property
    def usage(self) -> Usage:
        return sum((reply.usage for reply in self.replies), Usage())

    @property
    def misconfigured(self) -> str:
        """Error in the model's configuration, which a retry cannot fix, or an empty text."""
        failures = [failure for run in self.runs.values() for failure in run.failures.values()]
        # Use the newest error, because an earlier error may have been corrected.
        return next((it.reason for it in reversed(failures) if it.failure == "misconfigured"), "")

    @property
    def calls(self) -> list[RecordedCall]:
        """Tool calls that were started or refused, in order, including calls in runs inside the reaction."""
        return [it for it in self.work if isinstance(it, RecordedCall) and it.is_begun]

    @cached_property
    def work(self) -> list[RecordedWork]:
        """Calls, reviews and handoffs in the order in which they began, including those in runs inside the reaction.

        Includes calls that still wait for approval.
        """
        # the value for a call is the list of its records
        entries: dict[tuple[object, ...], RecordedWork | list[Record]] = {}
        authors: dict[str, tuple[int, str]] = {}  # last turn of each path, with its agent
        for record in self.readable:
            path, body = read_path(record), record["body"]
            match record["kind"]:
                case "asking" | "waiting" | "approval" | "tool_started" | "tool_result":
                    # A dictionary keeps the position of the first record, which marks the start of the call.
                    call_records = entries.setdefault((path, int(body["turn"]), int(body["call"])), [])
                    assert isinstance(call_records, list)
                    call_records.append(record)
                case "review":
                    review = self._read_review(record)
                    entries[path, "review", review.turn, review.call, review.send] = review
                case "model_reply":
                    author = (int(body["turn"]), str(body.get("agent", "")))
                    previous = authors.get(path, author)
                    if author[1] != previous[1]:
                        entries[path, "handoff", previous[0]] = self._read_handoff(record, *previous)
                    authors[path] = author
        return [self._read_call(it) if isinstance(it, list) else it for it in entries.values()]

    def _read_call(self, records: Sequence[Record]) -> RecordedCall:
        path, bodies = read_path(records[0]), [it["body"] for it in records]
        place = turn, number = int(bodies[0]["turn"]), int(bodies[0]["call"])
        run = self.runs[path]
        # Use a slice: for a number that the reply does not have, an index would raise an error.
        planned = run.replies[turn].tool_calls[number : number + 1] if turn in run.replies else ()
        name, arguments = (planned[0].name, planned[0].arguments) if planned else ("", "")
        result, wait, request = (
            run.results.get(place),
            run.waiting.waits.get(place),
            run.waiting.approval_waits.get(place),
        )
        approval = run.waiting.approvals.get(place)
        replies = [int(seq) for body in bodies for seq in body.get("replies", ())]
        return RecordedCall(
            records[0]["seq"],
            turn,
            number,
            next((str(body["tool"]) for body in bodies if "tool" in body), name),
            next((str(body["args"]) for body in bodies if "args" in body), arguments),
            result=result.content if result is not None else None,
            is_ok=result is not None and result.ok,
            path=path,
            is_begun=place in run.begun_calls or result is not None,
            questions=wait.questions if wait is not None else {},
            replies=tuple(seq for seq in replies if approval is None or seq != approval.seq),
            request=next(iter(request.questions.values()), None) if request is not None else None,
            approval=approval,
        )

    def _read_review(self, record: Record) -> RecordedReview:
        path, body = read_path(record), record["body"]
        turn, call, send = int(body["turn"]), int(body.get("call", 0)), int(body.get("send", 0))
        run = self.runs[path]
        if not send:
            return RecordedReview(record["seq"], turn, run.reviews[turn], path)
        return RecordedReview(record["seq"], turn, run.sent_reviews[turn, call, send], path, call, send)

    def _read_handoff(self, record: Record, turn: int, from_id: str) -> RecordedHandoff:
        """Read the handoff before a reply. A handoff back has no call, because it happens when the other agent has
        finished."""
        path, to_id = read_path(record), str(record["body"]["agent"])
        reply = self.runs[path].replies.get(turn)
        calls = reply.tool_calls if reply is not None else ()
        call = next((it for it in calls if it.name == handoff_name(to_id)), None)
        note = read_argument(call, "note") if call is not None else ""
        return RecordedHandoff(int(record["seq"]), turn, from_id, to_id, note, call is None, path)

    def find_reply(self, path: str, turn: int) -> Record | None:
        """Return the record of the model's reply in a turn."""
        replies = (it for it in self.readable if it["kind"] == "model_reply" and read_path(it) == path)
        return next((it for it in replies if it["body"]["turn"] == turn), None)

    def to_json(self) -> dict[str, object]:
        return {
            "reaction": self.reaction,
            "agent_id": self.agent_id,
            "trigger": self.trigger,
            "thread_id": self.thread_id,
            "state": self.state,
            "turns": self.turns,
        }

    def _bodies(self, kind: str) -> Iterable[Mapping[str, Any]]:
        return (it["body"] for it in self.records if it["kind"] == kind and isinstance(it["body"], Mapping))

    def _has_ended(self) -> bool:
        return any(it["kind"] == "finished" for it in self.records)


def read_reactions(rows: Iterable[Row]) -> list[RecordedReaction]:
    """Return the reactions of a log in the order in which they began.

    If several writers used the same id, each writer's records are a separate reaction.
    """
    by_name: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if row.type == "record":
            by_name.setdefault((row.stream, row.actor), []).append(read_record(row))
    return [RecordedReaction(reaction, agent_id, records) for (reaction, agent_id), records in by_name.items()]


def choose_author(reaction: str, records: Sequence[Record], epoch: str) -> str:
    """Return the agent that owns a reaction, among all agents that wrote records under the reaction's id.

    The id of a reaction is derived from the owner's id. If no writer matches the id, the first writer is the owner.
    """
    for record in records:
        trigger = read_trigger(str(record["kind"]), record["body"])
        # Anybody may write under any id, but an agent cannot create an id that matches another agent's reaction.
        if trigger is not None and reaction_id(record["agent_id"], trigger, epoch) == reaction:
            return str(record["agent_id"])
    return str(records[0]["agent_id"])


def read_trigger(kind: str, body: object) -> int | None:
    """Return the trigger that a record names, or None."""
    trigger = body.get("trigger") if kind == "started" and isinstance(body, Mapping) else None
    return trigger if isinstance(trigger, int) else None


def read_record(row: Row) -> Record:
    """Return the record of a row, as ``network.records`` does. Raises `LedgerError`."""
    return {
        "seq": row.seq,
        "agent_id": row.actor,
        "record_id": row.key[2:],
        "kind": row.label,
        "body": read_body(row),
        "at": row.at,
    }


def read_path(record: Record) -> str:
    """Return the path of the run that a record belongs to; empty for the reaction itself."""
    return str(record["body"].get("path", "")) if isinstance(record["body"], Mapping) else ""


def read_body(row: Row) -> Any:
    """Return the decoded body of a row. Raises `LedgerError` for damaged rows.

    A message whose cause does not have a lower sequence number is damaged too, because following its causes might never
    end.
    """
    try:
        body = decode_json(row.data)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"The log is damaged: seq {row.seq} is not JSON. Export the log again.") from error
    if row.type == "message":
        cause = body.get("cause") if isinstance(body, dict) else None
        is_complete = isinstance(body, dict) and body.get("seq") == row.seq and "content" in body
        if not is_complete or (isinstance(cause, int) and cause >= row.seq):
            raise LedgerError(
                f"The log is damaged: seq {row.seq} does not contain the message of that seq. Export the log again."
            )
    return body


def read_message(row: Row) -> BaseMessage:
    """Return the message of a row. Raises `LedgerError`."""
    try:
        return message_from_wire(read_body(row))
    # This error already names the damage.
    except LedgerError:
        raise
    except (RoundelayError, ValueError, TypeError) as error:
        raise LedgerError(f"The log is damaged: seq {row.seq} is not a message. Export the log again.") from error


def _can_read(records: Sequence[Record]) -> bool:
    """Return whether all records have the format of this package. Other programs may use any format."""
    try:
        read_records(records)
    except (RoundelayError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return True
