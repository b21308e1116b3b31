"""What was done in a reaction, in words and as JSON: tool calls with their results, the agents asked and what they
answered, approvals, reviews of the answer, handoffs. Read by `Reaction.work`; `why` and `impact` show it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from roundelay.agents.approvals import join_names
from roundelay.agents.inbox import is_declined
from roundelay.agents.journal import is_path
from roundelay.network.messages import BaseMessage
from roundelay.network.text import shorten
from roundelay.runs.reading import RecordedCall, RecordedHandoff, RecordedReview, RecordedWork
from roundelay.terminal.text import clean, clean_lines

MAX_TEXT_CHARS = 300
Messages = Mapping[int, BaseMessage]
"""Those of the messages that may be seen, by their seqs."""


def choose_earlier(work: Iterable[RecordedWork], path: str, turn: int, call: int | None = None) -> list[RecordedWork]:
    """Give what was over before the model of the run at ``path`` wrote in this turn, which is all that its words can
    rest on; and what reviewers made of what this ``call`` of it sends."""
    at = _place(path, turn)

    def counts(it: RecordedWork) -> bool:
        if isinstance(it, RecordedReview) and call is not None and (it.path, it.turn, it.call) == (path, turn, call):
            return True
        return _is_before(_place(it.path, it.turn), at)

    return [it for it in work if counts(it)]


def _place(path: str, turn: int) -> list[tuple[int, ...]]:
    """The turn, call and run of each call around, and last the turn itself. What another program wrote for a path is
    none."""
    parts = path.split("/") if path and is_path(path) else []
    return [*(tuple(map(int, part.split("."))) for part in parts), (turn,)]


def _is_before(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> bool:
    """Calls of one turn go on at once: none of them is before another."""
    for ours, theirs in zip(one, other, strict=False):
        if ours[0] != theirs[0]:
            return ours[0] < theirs[0]
        if ours != theirs:
            return ours[1:2] == theirs[1:2] and ours[2:] < theirs[2:]  # a further run in the same call
    return False


def list_messages(work: Iterable[RecordedWork]) -> set[int]:
    """Give the messages that tell of it: questions and answers, requests for approval and decisions."""
    found: set[int] = set()
    for it in work:
        if isinstance(it, RecordedCall):
            found |= {*it.questions.values(), *it.replies}
            found |= {seq for seq in (it.request, it.approval.seq if it.approval is not None else None) if seq}
            found |= {vote.seq for vote in it.approval.votes} if it.approval is not None else set()
    return found


# --- as JSON


def work_to_json(it: RecordedWork, messages: Messages) -> dict[str, Any]:
    place = {"seq": it.seq, "path": it.path, "turn": it.turn}
    match it:
        case RecordedCall():
            told = {"call": it.call, "tool": it.tool, "arguments": it.arguments, "result": it.result, "is_ok": it.is_ok}
            return {"type": "call", **place, **told, **exchange_to_json(it, messages)}
        case RecordedReview(reviewed=made):
            of = {
                "call": it.call,
                "answer": made.answer,
                "is_accepted": made.is_accepted,
                "is_blocked": made.is_blocked,
            }
            return {"type": "review", **place, **of, "correction": made.correction, "notes": list(made.notes)}
        case RecordedHandoff():
            told = {"from": it.from_id, "to": it.to_id, "note": it.note, "is_return": it.is_return}
            return {"type": "handoff", **place, **told}
        case _:
            assert_never(it)


def exchange_to_json(it: RecordedCall, messages: Messages) -> dict[str, Any]:
    """Give whom a call asked, each with the answer, and how it was approved."""
    approval = None
    if it.request is not None or it.approval is not None:
        decided = (
            it.approval.model_dump(include={"is_approved", "by", "seq", "arguments", "reason"}) if it.approval else {}
        )
        if it.approval is not None:
            votes = [vote.model_dump(include={"by", "seq", "at", "said"}) for vote in it.approval.votes]
            decided |= {"votes": votes} if votes else {}
        approval = {"request": it.request, "is_approved": None, **decided}
    asked = []
    for agent_id, seq in it.questions.items():
        answer = _find_answer(it, seq, messages)
        told = (
            {"seq": answer.seq, "text": answer.text, "is_declined": is_declined(answer)} if answer is not None else None
        )
        question = messages.get(seq)
        asked.append({"agent_id": agent_id, "seq": seq, "text": question.text if question else None, "answer": told})
    return {"asked": asked, "approval": approval}


def _find_answer(it: RecordedCall, question: int, messages: Messages) -> BaseMessage | None:
    answers = (messages[seq] for seq in it.replies if seq in messages)
    return next((answer for answer in answers if answer.reply_to == question), None)


# --- in words


def describe_work(it: RecordedWork, messages: Messages) -> list[str]:
    """Tell it in lines that can go to a terminal, those below the first one indented."""
    where = f"{f'[{clean(it.path)}] ' if it.path else ''}turn {it.turn}"
    match it:
        case RecordedCall():
            gave = (
                "and has no result"
                if it.result is None
                else f"which {'gave' if it.is_ok else 'failed'}: {tell(it.result)}"
            )
            called = f"{where} called {clean(it.tool)} {tell(it.arguments or '{}')}, {gave}"
            return [called, *(f"  {line}" for line in describe_exchange(it, messages))]
        case RecordedReview(reviewed=made):
            notes = tell("; ".join(made.notes))
            what = "the answer" if it.call is None else f"what call {it.turn}.{it.call} sends"
            if made.correction is not None:
                back = f"{where}: {what} was sent back: {notes or tell(made.correction)}"
                return [back, f"  It was: {tell(made.answer)}"]
            passed = "was found good" if made.is_accepted else "went out although it was not found good"
            found = "was blocked" if made.is_blocked else passed
            return [f"{where}: {what} {found}{f' ({notes})' if notes else ''}"]
        case RecordedHandoff():
            back, note = "back " if it.is_return else "", f": {tell(it.note)}" if it.note else ""
            return [f"{where}: {clean(it.from_id)} handed the conversation {back}to {clean(it.to_id)}{note}"]
        case _:
            assert_never(it)


def describe_exchange(it: RecordedCall, messages: Messages) -> list[str]:
    """Tell whom a call asked and what they answered, and how it was approved."""
    lines = []
    if it.request is not None or it.approval is not None:
        request = (
            f"It was to be approved (#{it.request}), and " if it.request is not None else "It was to be approved, and "
        )
        lines.append(request + _describe_decision(it))
    for agent_id, seq in it.questions.items():
        question, answer = messages.get(seq), _find_answer(it, seq, messages)
        put = f"It asked {clean(agent_id)} (#{seq})" + (f": {tell(question.text)}" if question is not None else "")
        if answer is None:
            lines.append(put)
            lines.append("No answer to that was had" if it.result is not None else "No answer to that is there yet")
        elif is_declined(answer):
            lines += [put, f"{clean(answer.sender_id)} declined (#{answer.seq})"]
        else:
            lines += [put, f"{clean(answer.sender_id)} answered (#{answer.seq}): {tell(answer.text)}"]
    return lines


def _describe_decision(it: RecordedCall) -> str:
    made = it.approval
    if made is None:
        return "nobody has decided" if it.result is None else "nobody did"
    changed = f", with {tell(made.arguments)}" if made.arguments is not None else ""
    reason = f": {tell(made.reason)}" if made.reason else ""
    what = "approved" if made.is_approved else "denied"
    votes = [f"{clean(it.by)} (#{it.seq}: {tell(it.said)})" for it in made.votes] if len(made.votes) > 1 else []
    said = f"; they said: {', '.join(votes)}" if votes else ""
    return f"{join_names(map(clean, made.people))} {what} it (#{made.seq}){changed}{reason}{said}"


def tell(text: str | None, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Give a text on one line, cut where it is long, that can go to a terminal."""
    return " ".join(clean_lines(shorten(text or "", max_chars)))
