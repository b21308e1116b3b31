"""Format the work of a reaction as lines for a terminal. This module sanitizes participants' text and performs no
IO.
"""

from __future__ import annotations

from typing import assert_never

from roundelay.agents.approvals import join_names
from roundelay.agents.inbox import is_declined
from roundelay.display.text import sanitize, sanitize_lines
from roundelay.network.text import shorten
from roundelay.runs.reading import RecordedCall, RecordedHandoff, RecordedReview, RecordedWork
from roundelay.runs.work import Messages, find_answer

MAX_QUOTE_CHARS = 300


def describe_work(work: RecordedWork, messages: Messages) -> list[str]:
    """Describe one piece of work in lines. All lines after the first are indented."""
    where = f"{f'[{sanitize(work.path)}] ' if work.path else ''}turn {work.turn}"
    match work:
        case RecordedCall():
            outcome = "no result yet"
            if work.result is not None:
                outcome = f"{'result' if work.is_ok else 'failed'}: {quote(work.result)}"
            line = f"{where} called {sanitize(work.tool)} {quote(work.arguments or '{}')}, {outcome}"
            return [line, *(f"  {it}" for it in describe_exchange(work, messages))]
        case RecordedReview():
            return _describe_review(work, where)
        case RecordedHandoff():
            back, note = "back " if work.is_return else "", f": {quote(work.note)}" if work.note else ""
            return [f"{where}: {sanitize(work.from_id)} handed the conversation {back}to {sanitize(work.to_id)}{note}"]
        case _:
            assert_never(work)


def _describe_review(work: RecordedReview, where: str) -> list[str]:
    reviewed = work.reviewed
    notes = quote("; ".join(reviewed.notes))
    subject = "the answer" if work.call is None else f"the message of call {work.turn}.{work.call}"
    if reviewed.correction is not None:
        returned = f"{where}: {subject} was sent back: {notes or quote(reviewed.correction)}"
        return [returned, f"  Rejected text: {quote(reviewed.answer)}"]
    passed = "passed the review" if reviewed.is_accepted else "was sent although it did not pass the review"
    verdict = "was blocked" if reviewed.is_blocked else passed
    return [f"{where}: {subject} {verdict}{f' ({notes})' if notes else ''}"]


def describe_exchange(call: RecordedCall, messages: Messages) -> list[str]:
    """Describe the people and agents that a call asked, with their answers, in lines."""
    lines = []
    if call.request is not None or call.approval is not None:
        request = f" (#{call.request})" if call.request is not None else ""
        lines.append(f"Needed approval{request}: {_describe_decision(call)}")
    for agent_id, seq in call.questions.items():
        question, answer = messages.get(seq), find_answer(call, seq, messages)
        lines.append(f"Asked {sanitize(agent_id)} (#{seq})" + (f": {quote(question.text)}" if question else ""))
        if answer is None:
            # A call with a result no longer waits. A call without a result may still receive its answer.
            lines.append("Got no answer" if call.result is not None else "Has no answer yet")
        elif is_declined(answer):
            lines.append(f"{sanitize(answer.sender_id)} declined (#{answer.seq})")
        else:
            lines.append(f"{sanitize(answer.sender_id)} answered (#{answer.seq}): {quote(answer.text)}")
    return lines


def _describe_decision(call: RecordedCall) -> str:
    approval = call.approval
    if approval is None:
        return "nobody has decided yet" if call.result is None else "nobody decided"
    changed = f", with {quote(approval.arguments)}" if approval.arguments is not None else ""
    reason = f": {quote(approval.reason)}" if approval.reason else ""
    verb = "approved" if approval.is_approved else "denied"
    votes = []
    # With only one vote, the line above already names the person and the decision.
    if len(approval.votes) > 1:
        votes = [f"{sanitize(vote.by)} (#{vote.seq}: {quote(vote.said)})" for vote in approval.votes]
    said = f"; their words: {', '.join(votes)}" if votes else ""
    return f"{join_names(map(sanitize, approval.people))} {verb} it (#{approval.seq}){changed}{reason}{said}"


def quote(text: str | None, max_chars: int = MAX_QUOTE_CHARS) -> str:
    """Return a text on one line, sanitized and cut to ``max_chars``."""
    return " ".join(sanitize_lines(shorten(text or "", max_chars)))
