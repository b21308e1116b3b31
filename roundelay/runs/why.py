"""Explain why a message was sent, up to the root of its conversation, and list what followed from the message.

`explain` and `follow` read from a source and return values. `why_text` formats these values for people, and `to_json`
for programs. Data that the caller may not see is omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roundelay.agents.models.model import ModelReply, ToolCall
from roundelay.agents.reaction_ids import derived_id
from roundelay.agents.values import KeptPrompt
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.text import count
from roundelay.runs.reading import RecordedCall, RecordedReaction, RecordedWork
from roundelay.runs.source import ReadableSource
from roundelay.runs.work import choose_earlier, exchange_to_json, list_messages, work_to_json

MAX_DEPTH = 50
"""Maximum depth of a tree of effects. A deeper tree would be unreadable, and JSON parsers limit the depth."""


@dataclass(frozen=True, slots=True)
class SendOrigin:
    """Origin of a message inside a reaction: the answer or tool call that sent it, and the model's reply with that
    call."""

    how: str
    path: str = ""
    turn: int = 0
    call: int | None = None
    tool_call: ToolCall | None = None
    result: str | None = None
    reply: ModelReply | None = None
    agent_id: str = ""


@dataclass(frozen=True, slots=True)
class CauseStep:
    """One step of an explanation: a message, and the reaction that sent it, if any.

    ``messages`` contains the visible messages of the reaction's prompt and work, by sequence number.
    """

    message: BaseMessage
    reaction: RecordedReaction | None = None
    trigger: int | None = None
    sent: SendOrigin | None = None
    messages: Mapping[int, BaseMessage] = field(default_factory=dict)

    @property
    def is_hidden(self) -> bool:
        """Whether the caller may not see the records of the reaction."""
        return self.reaction is not None and self.reaction.run is None

    @property
    def status(self) -> str:
        return "" if self.reaction is None or self.is_hidden else self.reaction.status or "open"

    @property
    def manifest(self) -> Sequence[int]:
        return () if self.reaction is None or self.is_hidden else self.reaction.manifest

    @property
    def work(self) -> Sequence[RecordedWork]:
        """Work that was done before the message was written. Only this work and the prompt can have influenced the
        message.
        """
        if self.reaction is None or self.is_hidden:
            return ()
        if self.sent is None:
            # The call that sent the message is unknown, so use the order in the log. The result may include work of a
            # parallel call.
            return [it for it in self.reaction.work if it.seq < self.message.seq]
        # An answer is written after the calls of its turn, so their results may appear in it. A call is sent before
        # they have results.
        is_answer = self.sent.tool_call is None
        return choose_earlier(self.reaction.work, self.sent.path, self.sent.turn + is_answer, self.sent.call)

    @property
    def prompt(self) -> KeptPrompt | None:
        """Exact prompt of the turn that sent the message, if the agent stores prompts."""
        if self.reaction is None or self.sent is None or self.is_hidden:
            return None
        run = self.reaction.runs.get(self.sent.path)
        return None if run is None else run.prompts.get(self.sent.turn)

    @property
    def sending_call(self) -> RecordedCall | None:
        """Call that sent the message. For an approval request, the call to approve."""
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
                "sent": self._origin_to_json(),
                "work": [work_to_json(it, self.messages) for it in self.work],
                **({"prompt": asdict(self.prompt)} if self.prompt is not None else {}),
            }
        return value

    def _origin_to_json(self) -> dict[str, Any] | None:
        if self.sent is None:
            return None
        call = self.sending_call
        exchange = exchange_to_json(call, self.messages) if call is not None else {}
        sent = asdict(self.sent)
        if sent["reply"] is not None:
            del sent["reply"]["origin"]  # only the model's provider can use this value
        return {**sent, **exchange}


async def explain(source: ReadableSource, seq: int) -> list[CauseStep]:
    """Return the steps from a message up to its root, without steps that the caller may not see. Raises
    `UnknownMessage`."""
    entries = await source.chain(seq)
    return [await explain_step(source, message, sent_in) for message, sent_in in pair_with_reactions(entries)]


def pair_with_reactions(entries: Sequence[Mapping[str, Any]]) -> list[tuple[BaseMessage, Mapping[str, Any] | None]]:
    """Pair each message in the result of ``network.why`` with the entry of the reaction that sent it."""
    pairs: list[tuple[BaseMessage, Mapping[str, Any] | None]] = []
    for entry, following in zip(entries, [*entries[1:], {}], strict=True):
        if "message_id" in entry:
            message = message_from_wire(entry)
            is_sent_in = "reaction" in following and following["agent_id"] == message.sender_id
            pairs.append((message, following if is_sent_in else None))
    return pairs


async def explain_step(source: ReadableSource, message: BaseMessage, sent_in: Mapping[str, Any] | None) -> CauseStep:
    """Explain one message. ``sent_in`` is the entry of the reaction that sent it, from the result of
    ``network.why``."""
    if sent_in is None:
        return CauseStep(message)
    reaction = await source.reaction(message.sender_id, str(sent_in["reaction"]))
    step = CauseStep(message, reaction, int(sent_in["trigger"]))
    if reaction.run is None:
        return step
    step = replace(step, sent=trace_message(reaction, message.message_id))
    call = step.sending_call
    seqs = list_messages([*step.work, *([call] if call is not None else [])])
    return replace(step, messages=await source.messages(sorted({*reaction.manifest, *seqs})))


def trace_message(reaction: RecordedReaction, message_id: str) -> SendOrigin | None:
    """Find the answer or call of a reaction that sent a message.

    Message ids are derived from the call. The id of an answer is derived from the reaction alone.
    """
    if message_id == derived_id(reaction.reaction, "", 0, "answer"):
        # The last turn writes the answer.
        turn = max(reaction.recorded.replies, default=0)
        reply = reaction.recorded.replies.get(turn)
        return SendOrigin("its answer", turn=turn, reply=reply, agent_id=_find_author(reaction, "", turn))
    for path, run in reaction.runs.items():
        for turn, reply in run.replies.items():
            for number, call in enumerate(reply.tool_calls):
                call_id = derived_id(reaction.reaction, path, turn, number)
                # If an operation of a mod posts the message, the hub derives the message's id from the call's id.
                if not message_id.removeprefix("call:").startswith(call_id):
                    continue
                how = "a request for approval of" if message_id.endswith("-approval") else "the call of"
                result = run.results.get((turn, number))
                content = result.content if result is not None else None
                return SendOrigin(how, path, turn, number, call, content, reply, _find_author(reaction, path, turn))
    return None


def _find_author(reaction: RecordedReaction, path: str, turn: int) -> str:
    """Return the agent whose model replied in a turn. After a handoff, this agent is not the owner of the reaction."""
    record = reaction.find_reply(path, turn)
    return str(record["body"].get("agent", "")) if record is not None else ""


@dataclass(frozen=True, slots=True)
class ReactionEffect:
    """One reaction to a message, with its final status and its work. Both are empty if the caller may not see the
    records.

    ``messages`` contains the messages that belong to the work, by sequence number.
    """

    agent_id: str
    reaction: str
    status: str = ""
    work: Sequence[RecordedWork] = ()
    messages: Mapping[int, BaseMessage] = field(default_factory=dict)
    sent: frozenset[tuple[str, int, int | None]] = frozenset()
    """Positions of the calls that sent messages which the tree shows as followers."""

    def to_json(self) -> dict[str, Any]:
        work = [work_to_json(it, self.messages) for it in self.work]
        return {"agent_id": self.agent_id, "reaction": self.reaction, "status": self.status, "work": work}

    def list_further_work(self) -> list[RecordedWork]:
        """Return the work except for calls that only sent a message, because the tree shows that message anyway."""
        return [it for it in self.work if not self._is_shown_by_message(it)]

    def _is_shown_by_message(self, work: RecordedWork) -> bool:
        # The message does not show questions and approvals, so keep calls that have them.
        if not isinstance(work, RecordedCall) or work.questions or work.request or work.approval:
            return False
        return (work.path, work.turn, work.call) in self.sent


@dataclass(frozen=True, slots=True)
class Effect:
    """A message, the reactions to it, and the messages that it caused (``followers``)."""

    message: BaseMessage
    reactions: tuple[ReactionEffect, ...]
    followers: tuple[Effect, ...]
    count: int = 0
    """Number of messages in the tree below this message."""
    has_more: bool = False
    """Whether messages were omitted because of ``limit``."""

    def to_json(self, depth: int = 0) -> dict[str, Any]:
        """Return the tree as JSON. At `MAX_DEPTH`, ``more`` is the number of omitted messages below. To read them,
        request the tree of that message.
        """
        value: dict[str, Any] = {
            "message": self.message.model_dump(mode="json", exclude_none=True),
            "reactions": [it.to_json() for it in self.reactions],
        }
        if depth == MAX_DEPTH and self.count:
            return {**value, "followers": [], "more": self.count}
        return {**value, "followers": [it.to_json(depth + 1) for it in self.followers]}


async def follow(source: ReadableSource, seq: int, limit: int | None = None) -> Effect:
    """Return the tree of everything that followed from a message, with at most ``limit`` messages that the caller may
    see.

    Raises `UnknownMessage`.
    """
    start = message_from_wire((await source.chain(seq))[0])
    messages, has_more = await source.following(seq, limit)
    seqs = {start.seq, *(message.seq for message in messages)}
    by_cause: dict[int, list[BaseMessage]] = {}
    for message in messages:
        # Attach a message with a hidden cause to the root of the tree. Otherwise the tree would not contain it.
        cause = message.cause if message.cause in seqs and message.cause else seq
        by_cause.setdefault(cause, []).append(message)
    reactions = {}
    for message in (start, *messages):
        sent = by_cause.get(message.seq, [])
        found = await source.reactions_to(message)
        reactions[message.seq] = tuple([await describe_reaction(source, it, sent) for it in found])
    # Build the tree from the newest message backward. Effects come after their cause, so they are complete when the
    # cause is built.
    effects: dict[int, Effect] = {}
    for message in sorted((start, *messages), key=lambda message: message.seq, reverse=True):
        followers = tuple(effects[it.seq] for it in by_cause.get(message.seq, ()))
        total = sum(1 + it.count for it in followers)
        effects[message.seq] = Effect(message, reactions[message.seq], followers, total)
    return replace(effects[seq], has_more=has_more)


async def describe_reaction(
    source: ReadableSource, reaction: RecordedReaction, caused: Sequence[BaseMessage]
) -> ReactionEffect:
    """Describe a reaction. ``caused`` lists the messages of the reaction that the tree shows as followers."""
    if reaction.run is None:
        return ReactionEffect(reaction.agent_id, reaction.reaction)
    work = reaction.work
    origins = (trace_message(reaction, it.message_id) for it in caused if it.sender_id == reaction.agent_id)
    return ReactionEffect(
        reaction.agent_id,
        reaction.reaction,
        _describe_status(reaction),
        work,
        await source.messages(sorted(list_messages(work))),
        frozenset((it.path, it.turn, it.call) for it in origins if it is not None),
    )


def _describe_status(reaction: RecordedReaction) -> str:
    run = reaction.run
    if run is None:
        return ""
    if run.finished is None:
        return f"open after {count(len(run.replies), 'turn')}"
    return f"{run.finished.status} after {count(run.finished.turns, 'turn')}"
