"""Format the results of `why` and `impact` as lines for a terminal. This module sanitizes participants' text and
performs no IO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from roundelay.display.screen import PLAIN, Paint, format_message
from roundelay.display.text import sanitize
from roundelay.network.addresses import short_address
from roundelay.network.messages import BaseMessage
from roundelay.network.text import count
from roundelay.runs.reactions import describe_prompt
from roundelay.runs.why import MAX_DEPTH, CauseStep, Effect, SendOrigin
from roundelay.runs.work_text import describe_exchange, describe_work, quote


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
