"""Why a message was said, step by step up to its root, and what followed from one: read from a `Source`, told in words
or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roundelay.agents.journal import derived_id
from roundelay.agents.models.model import ModelReply, ToolCall
from roundelay.agents.values import KeptPrompt
from roundelay.network.addresses import short_address
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.text import count
from roundelay.runs.reactions import describe_prompt
from roundelay.runs.reading import RecordedCall, RecordedReaction, RecordedWork
from roundelay.runs.source import Source
from roundelay.runs.work import (
    choose_earlier,
    describe_exchange,
    describe_work,
    exchange_to_json,
    list_messages,
    tell,
    work_to_json,
)
from roundelay.terminal.screen import PLAIN, Paint, format_message
from roundelay.terminal.text import clean

MAX_DEPTH = 50
"""How deep a tree of effects is told: below, a line is all indent, and programs that read JSON give up."""


@dataclass(frozen=True, slots=True)
class Sent:
    """How a reaction came to say something: by a tool call, or as its answer (``how``); and its model's reply."""

    how: str
    path: str = ""
    turn: int = 0
    call: int | None = None
    tool_call: ToolCall | None = None
    result: str | None = None
    reply: ModelReply | None = None
    agent_id: str = ""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """One message of the way up, and the reaction that sent it, as far as there is one. ``messages`` are those of its
    prompt and of its work that may be seen."""

    message: BaseMessage
    reaction: RecordedReaction | None = None
    trigger: int | None = None
    sent: Sent | None = None
    messages: Mapping[int, BaseMessage] = field(default_factory=dict)

    @property
    def is_hidden(self) -> bool:
        """Whether its reaction recorded what the caller may not see."""
        return self.reaction is not None and self.reaction.run is None

    @property
    def status(self) -> str:
        return "" if self.reaction is None or self.is_hidden else self.reaction.status or "open"

    @property
    def manifest(self) -> Sequence[int]:
        return () if self.reaction is None or self.is_hidden else self.reaction.manifest

    @property
    def work(self) -> Sequence[RecordedWork]:
        """What its reaction had done before, which it rests on beside the prompt."""
        if self.reaction is None or self.is_hidden:
            return ()
        if self.sent is None:
            return [it for it in self.reaction.work if it.seq < self.message.seq]
        is_answer = self.sent.tool_call is None  # it comes after the calls of its turn, and may be the result of one
        return choose_earlier(self.reaction.work, self.sent.path, self.sent.turn + is_answer, self.sent.call)

    @property
    def prompt(self) -> KeptPrompt | None:
        """The exact prompt of the turn that sent it, where the agent keeps prompts."""
        if self.reaction is None or self.sent is None or self.is_hidden:
            return None
        run = self.reaction.runs.get(self.sent.path)
        return None if run is None else run.prompts.get(self.sent.turn)

    @property
    def sending_call(self) -> RecordedCall | None:
        """The call that sent it, or was to be approved by it, as recorded."""
        if self.reaction is None or self.sent is None:
            return None
        place = (self.sent.path, self.sent.turn, self.sent.call)
        calls = (it for it in self.reaction.work if isinstance(it, RecordedCall))
        return next((it for it in calls if (it.path, it.turn, it.call) == place), None)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"message": self.message.model_dump(mode="json", exclude_none=True)}
        if self.reaction is not None:
            value["reaction"] = {
                "reaction": self.reaction.reaction,
                "agent_id": self.message.sender_id,
                "trigger": self.trigger,
                "status": self.status,
                "manifest": list(self.manifest),
                "is_hidden": self.is_hidden,
                "sent": self._sent_to_json(),
                "work": [work_to_json(it, self.messages) for it in self.work],
                **({"prompt": asdict(self.prompt)} if self.prompt is not None else {}),
            }
        return value

    def _sent_to_json(self) -> dict[str, Any] | None:
        if self.sent is None:
            return None
        call = self.sending_call
        exchange = exchange_to_json(call, self.messages) if call is not None else {}
        sent = asdict(self.sent)
        if sent["reply"] is not None:
            del sent["reply"]["origin"]  # what a model's server wants back: nothing that a reader asks for
        return {**sent, **exchange}


async def explain(source: Source, seq: int) -> list[Ancestor]:
    """Give the way from a message up to its root, as far as it may be seen. Raises `UnknownMessage`."""
    entries = await source.chain(seq)
    steps = []
    for entry, following in zip(entries, [*entries[1:], {}], strict=True):
        if "message_id" not in entry:
            continue
        message = message_from_wire(entry)
        if "reaction" not in following or following["agent_id"] != message.sender_id:
            steps.append(Ancestor(message))
            continue
        reaction = await source.reaction(message.sender_id, str(following["reaction"]))
        step = Ancestor(message, reaction, int(following["trigger"]))
        if reaction.run is not None:
            step = replace(step, sent=trace_message(reaction, message.message_id))
            call = step.sending_call
            seqs = list_messages([*step.work, *([call] if call is not None else [])])
            step = replace(step, messages=await source.messages(sorted({*reaction.manifest, *seqs})))
        steps.append(step)
    return steps


def trace_message(reaction: RecordedReaction, message_id: str) -> Sent | None:
    """Find what of a reaction sent a message: ids are derived from the call, or from the reaction alone."""
    if message_id == derived_id(reaction.reaction, "", 0, "answer"):
        turn = max(reaction.told.replies, default=0)
        return Sent(
            "its answer", turn=turn, reply=reaction.told.replies.get(turn), agent_id=_who_replied(reaction, "", turn)
        )
    for path, run in reaction.runs.items():
        for turn, reply in run.replies.items():
            for number, call in enumerate(reply.tool_calls):
                call_id = derived_id(reaction.reaction, path, turn, number)
                # an operation of a mod's that posts: the hub derives the message's id from the call's
                if not message_id.removeprefix("call:").startswith(call_id):
                    continue
                how = "a request for approval of" if message_id.endswith("-approval") else "the call of"
                result = run.results.get((turn, number))
                told = result.content if result is not None else None
                return Sent(how, path, turn, number, call, told, reply, _who_replied(reaction, path, turn))
    return None


def _who_replied(reaction: RecordedReaction, path: str, turn: int) -> str:
    record = reaction.find_reply(path, turn)
    return str(record["body"].get("agent", "")) if record is not None else ""


def describe_steps(steps: list[Ancestor], *, paint: Paint = PLAIN) -> list[str]:
    """Tell the way up in lines, each of which can go to a terminal."""
    lines: list[str] = []
    for place, step in enumerate(steps):
        lines.append(format_message(step.message, paint=paint))
        lines += [paint.dim("    ") + line for line in _describe_sent(step)]
        if place + 1 == len(steps) and step.message.seq != step.message.root:
            lines.append(f"    What it followed from, up to #{step.message.root}, may not be seen.")
    return lines


def _describe_sent(step: Ancestor) -> list[str]:
    message = step.message
    if step.reaction is None:
        return (
            ["It begins the conversation."] if message.cause is None else [f"It names #{message.cause} as its cause."]
        )
    head = f"Sent in the reaction {clean(step.reaction.reaction)} of {clean(message.sender_id)} to #{step.trigger}"
    if step.is_hidden:
        return [f"{head}, whose records are its agent's and operators' to read."]
    lines = [f"{head} ({step.status})" if step.status else head]
    sent = step.sent
    if sent is None:
        lines.append("The records do not say by which call.")
    elif sent.tool_call is None:
        lines.append(f"It is {sent.how}, after turn {sent.turn}.")
    else:
        inside = f" inside of call {sent.path}" if sent.path else ""
        called = f"{clean(sent.tool_call.name)} in turn {sent.turn}{inside}"
        lines.append(f"It is {sent.how} {called}: {tell(sent.tool_call.arguments)}")
        if sent.result is not None:
            lines.append(f"The call gave: {tell(sent.result)}")
        if step.sending_call is not None:
            lines += describe_exchange(step.sending_call, step.messages)
    if sent is not None and sent.reply is not None:
        reply, usage = sent.reply, sent.reply.usage
        of = f" of {clean(sent.agent_id)}" if sent.agent_id and sent.agent_id != message.sender_id else ""
        said = f", and said: {tell(reply.text)}" if reply.text and sent.tool_call is not None else ""
        called = (
            ""
            if sent.tool_call is None
            else f" asked for {len(reply.tool_calls)} call{'s' if len(reply.tool_calls) != 1 else ''}"
        )
        lines.append(
            f"The model{of} {clean(reply.model or 'unnamed')}{called or ' replied'} "
            f"({usage.prompt_tokens} + {usage.completion_tokens} tokens){said}"
        )
    if step.work:
        lines.append("Before that:")
        lines += [f"  {line}" for it in step.work for line in describe_work(it, step.messages)]
    lines.append(f"Its prompt held {len(step.manifest)} message{'s' if len(step.manifest) != 1 else ''}:")
    for seq in step.manifest:
        held = step.messages.get(seq)
        told = f"{clean(held.sender_id)}: {tell(held.text, 80)}" if held is not None else "(may not be seen)"
        lines.append(f"  #{seq} {told}")
    if step.prompt is not None:
        lines.append("The prompt of that turn, as the model was sent it:")
        lines += [f"  {clean(line)}" for line in describe_prompt(asdict(step.prompt))]
    return lines


@dataclass(frozen=True, slots=True)
class Reacted:
    """One reaction to a message: how it ended and what was done in it, empty where that may not be seen. ``messages``
    are those that tell of its work, as far as they may be seen."""

    agent_id: str
    reaction: str
    status: str = ""
    work: Sequence[RecordedWork] = ()
    messages: Mapping[int, BaseMessage] = field(default_factory=dict)
    sent: frozenset[tuple[str, int, int | None]] = frozenset()
    """The calls, each by its place, that sent messages which followed."""

    def to_json(self) -> dict[str, Any]:
        work = [work_to_json(it, self.messages) for it in self.work]
        return {"agent_id": self.agent_id, "reaction": self.reaction, "status": self.status, "work": work}

    def describe(self) -> list[list[str]]:
        """Tell its work, without the calls of which a message that followed says all."""
        return [describe_work(it, self.messages) for it in self.work if not self._is_told_by_message(it)]

    def _is_told_by_message(self, it: RecordedWork) -> bool:
        if not isinstance(it, RecordedCall) or it.questions or it.request or it.approval:
            return False
        return (it.path, it.turn, it.call) in self.sent


@dataclass(frozen=True, slots=True)
class Effect:
    """A message and what followed from it: the reactions to it, each with the messages that it sent; and messages of
    nobody's reaction."""

    message: BaseMessage
    reactions: tuple[Reacted, ...]

    followers: tuple[Effect, ...]
    followed: int = 0
    """How many messages followed, at any depth."""

    def to_json(self, depth: int = 0) -> dict[str, Any]:
        """Give it as JSON. At `MAX_DEPTH` ``more`` says how many messages follow: ask for what followed from it."""
        value: dict[str, Any] = {
            "message": self.message.model_dump(mode="json", exclude_none=True),
            "reactions": [it.to_json() for it in self.reactions],
        }
        if depth == MAX_DEPTH and self.followed:
            return {**value, "followers": [], "more": self.followed}
        return {**value, "followers": [it.to_json(depth + 1) for it in self.followers]}


async def follow(source: Source, seq: int) -> Effect:
    """Give what followed from a message, as far as it may be seen. Raises `UnknownMessage`."""
    start = message_from_wire((await source.chain(seq))[0])
    messages = await source.following(seq)
    known = {start.seq, *(message.seq for message in messages)}
    by_cause: dict[int, list[BaseMessage]] = {}
    for message in messages:  # what followed from something hidden stands with the first
        by_cause.setdefault(message.cause if message.cause in known and message.cause else seq, []).append(message)
    reactions = {}
    for message in (start, *messages):
        caused = by_cause.get(message.seq, [])
        found = await source.reactions_to(message)
        reactions[message.seq] = tuple([await _look_into(source, it, caused) for it in found])
    made: dict[int, Effect] = {}
    for message in sorted((start, *messages), key=lambda it: it.seq, reverse=True):
        followers = tuple(made[it.seq] for it in by_cause.get(message.seq, ()))
        followed = sum(1 + it.followed for it in followers)
        made[message.seq] = Effect(message, reactions[message.seq], followers, followed)
    return made[seq]


async def _look_into(source: Source, reaction: RecordedReaction, caused: Sequence[BaseMessage]) -> Reacted:
    if reaction.run is None:
        return Reacted(reaction.agent_id, reaction.reaction)
    work = reaction.work
    traced = (trace_message(reaction, it.message_id) for it in caused if it.sender_id == reaction.agent_id)
    return Reacted(
        reaction.agent_id,
        reaction.reaction,
        _tell_status(reaction),
        work,
        await source.messages(sorted(list_messages(work))),
        frozenset((it.path, it.turn, it.call) for it in traced if it is not None),
    )


def _tell_status(reaction: RecordedReaction) -> str:
    run = reaction.run
    if run is None:
        return ""
    if run.finished is None:
        return f"open after {count(len(run.replies), 'turn')}"
    return f"{run.finished.status} after {run.finished.turns} turn{'s' if run.finished.turns != 1 else ''}"


@dataclass(frozen=True, slots=True)
class _Branch:
    """Lines of the tree, and what stands below them."""

    lines: list[str]
    below: list[_Branch] = field(default_factory=list)


def describe_effect(effect: Effect, *, paint: Paint = PLAIN) -> list[str]:
    """Tell it as a tree, in lines that can go to a terminal."""
    return [_describe_message(effect.message, paint), *_draw(_grow(effect, paint, 0), "")]


def _grow(effect: Effect, paint: Paint, depth: int) -> list[_Branch]:
    if depth == MAX_DEPTH and effect.followed:
        return [_Branch([f"{effect.followed} more: roundelay impact {effect.message.seq}"])]

    def grow_one(follower: Effect) -> _Branch:
        return _Branch([_describe_message(follower.message, paint)], _grow(follower, paint, depth + 1))

    branches: list[_Branch] = []
    grouped: set[int] = set()
    for it in effect.reactions:
        sent = [follower for follower in effect.followers if follower.message.sender_id == it.agent_id]
        grouped |= set(map(id, sent))
        head = f"{paint.name(it.agent_id)} reacted{f' ({clean(it.status)})' if it.status else ''}"
        branches.append(_Branch([head], [*map(_Branch, it.describe()), *map(grow_one, sent)]))
    return branches + [grow_one(it) for it in effect.followers if id(it) not in grouped]


def _draw(branches: Sequence[_Branch], indent: str) -> Iterator[str]:
    for number, branch in enumerate(branches, 1):
        first, below = ("└─ ", "   ") if number == len(branches) else ("├─ ", "│  ")
        yield f"{indent}{first}{branch.lines[0]}"
        yield from (f"{indent}{below}{line}" for line in branch.lines[1:])
        yield from _draw(branch.below, indent + below)


def _describe_message(message: BaseMessage, paint: Paint) -> str:
    to = clean(short_address(message.to))
    return f"{paint.dim(f'#{message.seq}')} {paint.name(message.sender_id)} → {to}: {tell(message.text, 100)}"
