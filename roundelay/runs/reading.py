"""One reaction as its records tell it: the one place where they are read back, for whoever explains, lists, counts,
judges or replays reactions.

The bodies of records are read by `roundelay.agents.journal`. A program of another kind may write what it likes under
these kinds; then there is no `RecordedReaction.run`, and what every program has to say (what it reacts to, that it has
ended) is still told. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import msgspec

from roundelay.agents.history import read_argument
from roundelay.agents.journal import Approval, Recorded, reaction_id, read_records
from roundelay.agents.models.model import ModelReply, Usage
from roundelay.agents.text import handoff_name
from roundelay.agents.values import Reviewed, Status
from roundelay.network.core.rows import Row
from roundelay.network.errors import LedgerError, RoundelayError
from roundelay.network.frames import decode_json
from roundelay.network.messages import BaseMessage, message_from_wire

Record = Mapping[str, Any]
"""One record, as ``network.records`` gives it: ``seq``, ``agent_id``, ``record_id``, ``kind``, ``body`` and ``at``."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One tool call of a reaction. ``seq`` is that of its first record; ``result`` is None while it has none.

    ``questions`` are the messages by which it asked others, by whom they are to, and ``replies`` those that it had for
    them; ``request`` is the message that asked people to approve it, ``approval`` what one of them decided.
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
        """Give the arguments as JSON; the text itself if it is none."""
        try:
            return msgspec.json.decode(self.arguments)
        except msgspec.DecodeError:
            return self.arguments


@dataclass(frozen=True, slots=True)
class RecordedReview:
    """What reviewers made of an answer in a turn, or of a message of this ``call`` to who asked, the ``send``-th of it.
    ``seq`` is that of its record."""

    seq: int
    turn: int
    reviewed: Reviewed
    path: str = ""
    call: int | None = None
    send: int = 0


@dataclass(frozen=True, slots=True)
class RecordedHandoff:
    """After this turn another agent went on. ``is_return``: it had the conversation before, and has it back; ``seq`` is
    that of the first record of the other's."""

    seq: int
    turn: int
    from_id: str
    to_id: str
    note: str = ""
    is_return: bool = False
    path: str = ""


RecordedWork = RecordedCall | RecordedReview | RecordedHandoff


class RecordedReaction:
    """One reaction and its records, oldest first. ``told`` is what can be read of them; ``run`` is the same, or None
    where not all can."""

    def __init__(self, reaction: str, agent_id: str, records: Sequence[Record]) -> None:
        self.reaction = reaction
        self.agent_id = agent_id
        self.records = records
        self._readable = records if _can_read(records) else [it for it in records if _can_read([it])]
        self.told = read_records(self._readable)
        is_ours = len(self._readable) == len(records) and self.told.started is not None
        self.run = self.told if is_ours else None

    @property
    def runs(self) -> Mapping[str, Recorded]:
        """What is told of the reaction (``""``), and of the runs inside of it, by their paths."""
        return {"": self.told, **self.told.children}

    @property
    def is_kept(self) -> bool:
        """Whether it is no reaction: what an agent keeps beyond its reactions stands under an id of its own."""
        return all(it["kind"] in ("standing", "memory") for it in self.records)

    @cached_property
    def triggers(self) -> list[int]:
        """What its records name as its trigger: one message, but another program may write anything."""
        found = (read_trigger(str(it["kind"]), it["body"]) for it in self.records)
        return [trigger for trigger in found if trigger is not None]

    @property
    def trigger(self) -> int:
        """The message that it reacts to; 0 where that is not known."""
        return self.triggers[-1] if self.triggers else 0

    @property
    def thread_id(self) -> str:
        return next((str(body.get("thread_id", "")) for body in self._bodies("started")), "")

    @property
    def manifest(self) -> Sequence[int]:
        """The messages of its prompt."""
        return self.told.started.manifest if self.told.started is not None else ()

    @property
    def status(self) -> str | None:
        """How it ended; None while it is open."""
        if self.told.finished is not None:
            return self.told.finished.status
        ends = [body.get("status") for body in self._bodies("finished")]
        return next((it for it in ends if it in get_args(Status)), "finished" if self._has_ended() else None)

    @property
    def reason(self) -> str:
        return self.told.finished.reason if self.told.finished is not None else ""

    @property
    def is_open(self) -> bool:
        return self.status is None

    @property
    def is_waiting(self) -> bool:
        """Whether it only waits for others, or for an approval."""
        return self.is_open and bool(self.told.open_waits())

    @property
    def state(self) -> str:
        """How it ended, else ``open``, or ``waiting``."""
        return self.status or ("waiting" if self.is_waiting else "open")

    @property
    def turns(self) -> int:
        """How many turns of its own have a recorded reply."""
        return len(self.told.replies)

    @property
    def replies(self) -> list[ModelReply]:
        """What models replied, in the runs inside of it too."""
        return [reply for run in self.runs.values() for reply in run.replies.values()]

    @property
    def usage(self) -> Usage:
        return sum((reply.usage for reply in self.replies), Usage())

    @property
    def misconfigured(self) -> str:
        """What is wrong with its model's setting, a script say: no fault of the moment. Empty where nothing is."""
        failures = [it for run in self.runs.values() for it in run.failures.values()]
        return next((it.reason for it in reversed(failures) if it.failure == "misconfigured"), "")

    @property
    def calls(self) -> list[RecordedCall]:
        """The tool calls that were begun, or refused before, in their order, those of the runs inside of it too."""
        return [it for it in self.work if isinstance(it, RecordedCall) and it.is_begun]

    @cached_property
    def work(self) -> list[RecordedWork]:
        """What was done in it, the runs inside included, in the order in which that began: calls, those that only wait
        for an approval too, reviews of the answer, and handoffs."""
        found: dict[tuple[object, ...], RecordedWork | list[Record]] = {}  # of a call, its records
        speakers: dict[str, tuple[int, str]] = {}  # who replied last in each run, and in which turn
        for record in self._readable:
            path, body = read_path(record), record["body"]
            match record["kind"]:
                case "asking" | "waiting" | "approval" | "tool_started" | "tool_result":
                    of_call = found.setdefault((path, int(body["turn"]), int(body["call"])), [])
                    assert isinstance(of_call, list)
                    of_call.append(record)
                case "review":
                    review = self._read_review(record)
                    found[path, "review", review.turn, review.call, review.send] = review
                case "model_reply":
                    speaker = (int(body["turn"]), str(body.get("agent", "")))
                    before = speakers.get(path, speaker)
                    if speaker[1] != before[1]:
                        found[path, "handoff", before[0]] = self._read_handoff(record, *before)
                    speakers[path] = speaker
        return [self._read_call(it) if isinstance(it, list) else it for it in found.values()]

    def _read_call(self, records: Sequence[Record]) -> RecordedCall:
        """Read a call from its records."""
        path, bodies = read_path(records[0]), [it["body"] for it in records]
        place = turn, number = int(bodies[0]["turn"]), int(bodies[0]["call"])
        run = self.runs[path]
        planned = run.replies[turn].tool_calls[number : number + 1] if turn in run.replies else ()
        name, arguments = (planned[0].name, planned[0].arguments) if planned else ("", "")
        result, wait, request = run.results.get(place), run.waits.get(place), run.approval_waits.get(place)
        approval = run.approvals.get(place)
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
        """Read from whom to whom the conversation went before a reply."""
        path, to_id = read_path(record), str(record["body"]["agent"])
        reply = self.runs[path].replies.get(turn)
        calls = reply.tool_calls if reply is not None else ()
        call = next((it for it in calls if it.name == handoff_name(to_id)), None)
        note = read_argument(call, "note") if call is not None else ""
        return RecordedHandoff(int(record["seq"]), turn, from_id, to_id, note, call is None, path)

    def find_reply(self, path: str, turn: int) -> Record | None:
        """Give the record of what a model replied in a turn."""
        found = (it for it in self._readable if it["kind"] == "model_reply" and read_path(it) == path)
        return next((it for it in found if it["body"]["turn"] == turn), None)

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
    """Give the reactions of a log, each as one writer tells it, in the order in which they began."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if row.type == "record":
            found.setdefault((row.stream, row.actor), []).append(read_record(row))
    return [RecordedReaction(reaction, agent_id, records) for (reaction, agent_id), records in found.items()]


def choose_author(reaction: str, records: Sequence[Record], epoch: str) -> str:
    """Give the agent whose reaction it is, among those who wrote records under its id: the one of whom it was derived,
    else the first."""
    for it in records:
        trigger = read_trigger(str(it["kind"]), it["body"])
        if trigger is not None and reaction_id(it["agent_id"], trigger, epoch) == reaction:
            return str(it["agent_id"])
    return str(records[0]["agent_id"])


def read_trigger(kind: str, body: object) -> int | None:
    """Give the trigger of a reaction, where this record of it names one."""
    found = body.get("trigger") if kind == "started" and isinstance(body, Mapping) else None
    return found if isinstance(found, int) else None


def read_record(row: Row) -> Record:
    """Give the record of a row that holds one, as ``network.records`` does. Raises `LedgerError`."""
    return {
        "seq": row.seq,
        "agent_id": row.actor,
        "record_id": row.key[2:],
        "kind": row.label,
        "body": read_body(row),
        "at": row.at,
    }


def read_path(record: Record) -> str:
    """Give the run inside of its reaction that a record is of; empty for the reaction's own."""
    return str(record["body"].get("path", "")) if isinstance(record["body"], Mapping) else ""


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


def read_message(row: Row) -> BaseMessage:
    """Give the message of a row that holds one. Raises `LedgerError`."""
    try:
        return message_from_wire(read_body(row))
    except LedgerError:
        raise
    except (RoundelayError, ValueError, TypeError) as error:
        raise LedgerError(f"What the log has at seq {row.seq} is no message; export it anew.") from error


def _can_read(records: Sequence[Record]) -> bool:
    """Whether records are in this package's shape: another program's may be of any."""
    try:
        read_records(records)
    except (RoundelayError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return True
