"""Format the results of `why` and `impact`, and the work of a reaction, as lines for a terminal. This module
sanitizes participants' text and performs no IO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import assert_never

from roundelay.agents.approvals import join_names
from roundelay.agents.inbox import is_declined
from roundelay.display.screen import PLAIN, Paint, format_message
from roundelay.display.text import sanitize, sanitize_lines
from roundelay.network.addresses import short_address
from roundelay.network.messages import BaseMessage
from roundelay.network.text import count, shorten
from roundelay.runs.reactions import describe_prompt
from roundelay.runs.reading import RecordedCall, RecordedHandoff, RecordedReview, RecordedWork
from roundelay.runs.why import MAX_DEPTH, CauseStep, Effect, SendOrigin
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


def describe_steps(steps: list[CauseStep], *, paint: Paint = PLAIN) -> list[str]:
    """Return the steps from a message up to its root as lines."""
    lines: list[str] = []
    for place, step in enumerate(steps):
        lines.append(format_message(step.message, paint=paint))
        lines += [paint.dim("    ") + line for line in _describe_step(step)]
        # The visible steps end before the root. Without this line, the conversation would seem to begin here.
        if place + 1 == len(steps) and step.message.seq != step.message.root:
            lines.append(f"    You may not see the messages above it, up to the root #{step.message.root}.")
    return lines


def _describe_step(step: CauseStep) -> list[str]:
    message = step.message
    if step.reaction is None:
        return ["Root of the conversation."] if message.cause is None else [f"Caused by #{message.cause}."]
    head = (
        f"Sent in the reaction {sanitize(step.reaction.reaction)} of {sanitize(message.sender_id)} to #{step.trigger}"
    )
    if step.is_hidden:
        return [f"{head}. Only that agent and operators may read its records."]
    lines = [f"{head} ({step.status})" if step.status else head]
    if step.sent is None:
        lines.append("The records do not say which call sent it.")
    else:
        lines += _describe_origin(step, step.sent)
    if step.work:
        lines.append("Before that:")
        lines += [f"  {line}" for it in step.work for line in describe_work(it, step.messages)]
    lines.append(f"Its prompt contained {count(len(step.manifest), 'message')}:")
    for seq in step.manifest:
        held = step.messages.get(seq)
        text = f"{sanitize(held.sender_id)}: {quote(held.text, 80)}" if held is not None else "(hidden from you)"
        lines.append(f"  #{seq} {text}")
    if step.prompt is not None:
        lines.append("The exact prompt of that turn:")
        lines += [f"  {sanitize(line)}" for line in describe_prompt(asdict(step.prompt))]
    return lines


def _describe_origin(step: CauseStep, sent: SendOrigin) -> list[str]:
    """Describe the call or answer that sent the message, and the model's reply that contained it."""
    lines: list[str] = []
    if sent.tool_call is None:
        lines.append(f"Sent as the answer, after turn {sent.turn}.")
    else:
        inside = f" inside call {sent.path}" if sent.path else ""
        where = f"{sanitize(sent.tool_call.name)} in turn {sent.turn}{inside}"
        verb = "Sent by" if sent.how == "the call of" else "Asks for approval of"
        lines.append(f"{verb} the call {where}: {quote(sent.tool_call.arguments)}")
        if sent.result is not None:
            lines.append(f"Result of the call: {quote(sent.result)}")
        if step.sending_call is not None:
            lines += describe_exchange(step.sending_call, step.messages)
    if sent.reply is not None:
        reply, usage = sent.reply, sent.reply.usage
        # Name the author only if a handoff made another agent the author.
        owner = f" of {sanitize(sent.agent_id)}" if sent.agent_id and sent.agent_id != step.message.sender_id else ""
        calls = f" requested {count(len(reply.tool_calls), 'call')}" if sent.tool_call is not None else " replied"
        text = f", and wrote: {quote(reply.text)}" if reply.text and sent.tool_call is not None else ""
        tokens = f"({usage.prompt_tokens} + {usage.completion_tokens} tokens)"
        lines.append(f"The model{owner} {sanitize(reply.model or 'unnamed')}{calls} {tokens}{text}")
    return lines


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch of the tree: its own lines, and the branches below it."""

    lines: list[str]
    children: list[_Branch] = field(default_factory=list)


def describe_effect(effect: Effect, *, paint: Paint = PLAIN) -> list[str]:
    """Return the tree of a message's effects as lines."""
    return [_describe_message(effect.message, paint), *_draw(_grow(effect, paint, 0), "")]


def _grow(effect: Effect, paint: Paint, depth: int) -> list[_Branch]:
    if depth == MAX_DEPTH and effect.count:
        return [_Branch([f"{effect.count} more: roundelay impact {effect.message.seq}"])]

    def grow_one(follower: Effect) -> _Branch:
        return _Branch([_describe_message(follower.message, paint)], _grow(follower, paint, depth + 1))

    branches: list[_Branch] = []
    placed: set[int] = set()
    for reaction in effect.reactions:
        sent = [follower for follower in effect.followers if follower.message.sender_id == reaction.agent_id]
        placed |= {id(follower) for follower in sent}
        head = f"{paint.name(reaction.agent_id)} reacted{f' ({sanitize(reaction.status)})' if reaction.status else ''}"
        work = [_Branch(describe_work(it, reaction.messages)) for it in reaction.list_further_work()]
        branches.append(_Branch([head], [*work, *map(grow_one, sent)]))
    # People and programs send messages without a reaction, so attach these messages directly to their cause.
    return branches + [grow_one(follower) for follower in effect.followers if id(follower) not in placed]


def _draw(branches: Sequence[_Branch], indent: str) -> Iterator[str]:
    for number, branch in enumerate(branches, 1):
        first, below = ("└─ ", "   ") if number == len(branches) else ("├─ ", "│  ")
        yield f"{indent}{first}{branch.lines[0]}"
        yield from (f"{indent}{below}{line}" for line in branch.lines[1:])
        yield from _draw(branch.children, indent + below)


def _describe_message(message: BaseMessage, paint: Paint) -> str:
    to = sanitize(short_address(message.to))
    return f"{paint.dim(f'#{message.seq}')} {paint.name(message.sender_id)} → {to}: {quote(message.text, 100)}"
