"""Select the work of a reaction that influenced a message, list the messages of the work, and convert it to JSON. No
IO.

`RecordedReaction.work` lists the work: tool calls with their results, questions to agents with the answers, approvals,
reviews and handoffs. `work_text` formats the work for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from roundelay.agents.inbox import is_declined
from roundelay.agents.reaction_ids import is_path
from roundelay.network.messages import BaseMessage
from roundelay.runs.reading import RecordedCall, RecordedHandoff, RecordedReview, RecordedWork

Messages = Mapping[int, BaseMessage]
"""Messages that the caller may see, by sequence number."""


def choose_earlier(work: Iterable[RecordedWork], path: str, turn: int, call: int | None = None) -> list[RecordedWork]:
    """Return the work that was done before the model wrote its reply in this turn of the run at ``path``.

    Only earlier work can have influenced the reply. Reviews of messages that ``call`` sends are also included.
    """
    place = _find_place(path, turn)

    def is_earlier(it: RecordedWork) -> bool:
        if isinstance(it, RecordedReview) and call is not None and (it.path, it.turn, it.call) == (path, turn, call):
            return True
        return _is_before(_find_place(it.path, it.turn), place)

    return [it for it in work if is_earlier(it)]


def _find_place(path: str, turn: int) -> list[tuple[int, ...]]:
    """Return (turn, call, run) for each call that encloses a run, outermost first, followed by the turn.

    Another program may record any text as the path. Text that is not a path is treated as the empty path.
    """
    parts = path.split("/") if path and is_path(path) else []
    return [*(tuple(map(int, part.split("."))) for part in parts), (turn,)]


def _is_before(place: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> bool:
    """Return whether one position is before another. Calls of the same turn run concurrently, so their order is
    undefined.
    """
    for ours, theirs in zip(place, other, strict=False):
        if ours[0] != theirs[0]:
            return ours[0] < theirs[0]
        if ours != theirs:
            return ours[1:2] == theirs[1:2] and ours[2:] < theirs[2:]  # an earlier run inside the same call
    return False


def list_messages(work: Iterable[RecordedWork]) -> set[int]:
    """Return the sequence numbers of the work's messages: questions, answers, approval requests and decisions."""
    seqs: set[int] = set()
    for it in work:
        if isinstance(it, RecordedCall):
            seqs |= {*it.questions.values(), *it.replies}
            seqs |= {seq for seq in (it.request, it.approval.seq if it.approval is not None else None) if seq}
            seqs |= {vote.seq for vote in it.approval.votes} if it.approval is not None else set()
    return seqs


def find_answer(call: RecordedCall, question: int, messages: Messages) -> BaseMessage | None:
    """Return the answer that a call received to a question, if the caller may see it."""
    answers = (messages[seq] for seq in call.replies if seq in messages)
    # One call may ask several agents, whose answers arrive in any order.
    return next((answer for answer in answers if answer.reply_to == question), None)


def work_to_json(work: RecordedWork, messages: Messages) -> dict[str, Any]:
    place = {"seq": work.seq, "path": work.path, "turn": work.turn}
    match work:
        case RecordedCall():
            call = {
                "call": work.call,
                "tool": work.tool,
                "arguments": work.arguments,
                "result": work.result,
                "is_ok": work.is_ok,
            }
            return {"type": "call", **place, **call, **exchange_to_json(work, messages)}
        case RecordedReview(reviewed=reviewed):
            review = {
                "call": work.call,
                "answer": reviewed.answer,
                "is_accepted": reviewed.is_accepted,
                "is_blocked": reviewed.is_blocked,
            }
            return {
                "type": "review",
                **place,
                **review,
                "correction": reviewed.correction,
                "notes": list(reviewed.notes),
            }
        case RecordedHandoff():
            handoff = {"from": work.from_id, "to": work.to_id, "note": work.note, "is_return": work.is_return}
            return {"type": "handoff", **place, **handoff}
        case _:
            assert_never(work)


def exchange_to_json(call: RecordedCall, messages: Messages) -> dict[str, Any]:
    """Return the questions of a call with their answers, and people's decision on the call, as JSON."""
    approval = None
    if call.request is not None or call.approval is not None:
        decision: dict[str, Any] = {}
        if call.approval is not None:
            decision = call.approval.model_dump(include={"is_approved", "by", "seq", "arguments", "reason"})
            votes = [vote.model_dump(include={"by", "seq", "at", "said"}) for vote in call.approval.votes]
            decision |= {"votes": votes} if votes else {}
        approval = {"request": call.request, "is_approved": None, **decision}
    asked = []
    for agent_id, seq in call.questions.items():
        answer, question = find_answer(call, seq, messages), messages.get(seq)
        answer_json = None
        if answer is not None:
            answer_json = {"seq": answer.seq, "text": answer.text, "is_declined": is_declined(answer)}
        text = question.text if question is not None else None
        asked.append({"agent_id": agent_id, "seq": seq, "text": text, "answer": answer_json})
    return {"asked": asked, "approval": approval}
