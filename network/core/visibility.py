"""Visibility of messages: their readers, their recipients, and the prompts that they may enter.

Pure rules over the state and message heads. Delivery, history, resume and prompts all use these rules, so they cannot
disagree. docs/protocol.md describes the rules ("Addresses, threads, membership"). The *audience* of a message is the
people in its thread. If there are none, it is the audience of its cause. If programs (agents and services) started the
conversation, the audience is the participants of its first thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Set
from copy import copy
from typing import Literal

from roundelay.network.addresses import (
    agent_address,
    channel_address,
    name_of,
    parse_address,
    thread_parties,
    thread_start,
)
from roundelay.network.frames import is_id

from .access import has_right_to_read
from .rows import MessageHead, Span
from .state import State
from .tables import Member, Participant

Visibility = Literal["people", "strict", "all", "current"]
FEW = 16
"""Maximum size of an audience that is checked member by member. In larger audiences the newest members decide for all
others, if possible."""
VISIBILITIES: tuple[Visibility, ...] = ("people", "strict", "all", "current")


def parties(head: MessageHead) -> tuple[str, ...]:
    """Return the participants of a direct or mod message: its sender and its recipient. Mods do not count as
    participants."""
    kind, name = parse_address(head.to)
    if head.kind == "direct":
        return (head.sender_id, name)
    return (name,) if kind == "agent" else (head.sender_id,)


def may_read(state: State, agent_id: str, head: MessageHead) -> bool:
    """Return whether a participant may read a message. Does not cover operators, who may read more."""
    # Senders keep their own messages, even after they left the channel. A mod is no participant and reads nothing.
    if agent_id == head.sender_id and head.kind != "mod":
        return True
    match head.kind:
        case "broadcast":
            return _hears_broadcast(state.present(agent_id), head)
        case "channel":
            name = name_of(head.to)
            # Rights come first and narrow everything else: membership gives no more than the rights allow.
            if state.rights is not None and not has_right_to_read(state, agent_id, name):
                return False
            member = state.member(name, agent_id)
            return _gets(state, name, member, head) or (member.is_in and _is_open(state, name))
        case _:
            return agent_id in parties(head)


def is_recipient(state: State, agent_id: str, head: MessageHead) -> bool:
    """Return whether a message is delivered to a participant, including its sender's other sessions. Recipients may
    read the message."""
    if head.kind == "channel" and agent_id != head.sender_id:
        name = name_of(head.to)
        if state.rights is not None and not has_right_to_read(state, agent_id, name):
            return False
        return _gets(state, name, state.member(name, agent_id), head)
    return may_read(state, agent_id, head)


def broadcast_readers(head: MessageHead) -> tuple[int, Set[str]]:
    """Return the readers of a broadcast in addition to its sender: everyone registered before this seq, except these
    ids."""
    return _first_seq(head), frozenset(head.excluded)


def recipients(state: State, head: MessageHead) -> Iterator[str]:
    """Yield all recipients of a message except its sender, in no particular order."""
    match head.kind:
        case "broadcast":
            before, excluded = broadcast_readers(head)
            for participant in state.registered_before(before):
                if participant.agent_id != head.sender_id and participant.agent_id not in excluded:
                    yield participant.agent_id
        case "channel":
            for agent_id in state.members(name_of(head.to)):
                if agent_id != head.sender_id and state.present(agent_id) and is_recipient(state, agent_id, head):
                    yield agent_id
        case _:
            kind, name = parse_address(head.to)
            if kind == "agent" and name != head.sender_id:
                yield name


def _hears_broadcast(participant: Participant | None, head: MessageHead) -> bool:
    if participant is None or participant.agent_id in head.excluded:
        return False
    return participant.registered_seq < _first_seq(head)


def _first_seq(head: MessageHead) -> int:
    """Return the seq of the first message of a reply thread, or else the message's own seq. Participants who joined
    after this seq cannot read the thread."""
    start = thread_start(head.thread_id)
    return head.seq if start is None else start


def _gets(state: State, channel: str, member: Member, head: MessageHead) -> bool:
    """Return whether a member receives a channel message. The member must have been in the channel when the message was
    sent and when its reply thread began. In an open channel only the first condition applies."""
    if not member.was_in(head.seq):
        return False
    # A reply quotes the message that it answers, so only participants who could read the beginning of the thread may
    # read it.
    start = thread_start(head.thread_id)
    return start is None or member.was_in(start) or _is_open(state, channel)


def _is_open(state: State, channel: str) -> bool:
    """Return whether members may read messages from before they joined."""
    info = state.channel(channel)
    return info is not None and info.history == "members"


def inbox_spans(state: State, participant: Participant) -> list[Span]:
    """Return the ranges of the log that contain a participant's deliveries. Rows read from these ranges are still
    filtered by `is_recipient`."""
    spans = [
        Span(agent_address(participant.agent_id), participant.registered_seq),
        Span("broadcast", participant.registered_seq),
    ]
    for channel, member in state.memberships(participant.agent_id).items():
        spans += [Span(channel_address(channel), after, before) for after, before in member.spans]
    return spans


def readable_spans(state: State, participant: Participant) -> list[Span]:
    """Return the ranges of the log that a participant may read: its deliveries, and the whole history of open
    channels."""
    spans = [Span(agent_address(participant.agent_id), 0), Span("broadcast", participant.registered_seq)]
    for name, member in state.memberships(participant.agent_id).items():
        channel = state.channel(name)
        if state.rights is not None and not has_right_to_read(state, participant.agent_id, name):
            continue
        is_open = channel is not None and channel.history == "members"
        # From the beginning of the log: an open channel shows its history to each member.
        if is_open and member.is_in:
            spans.append(Span(channel_address(name), 0))
        else:
            # Members who left an open channel may still read the replies that they received (see `_gets`).
            spans += [Span(channel_address(name), after, before, is_open) for after, before in member.spans]
    return spans


def hears_channel(state: State, agent_id: str, name: str) -> bool:
    """Return whether a participant receives new messages of a channel."""
    return state.member(name, agent_id).is_in and has_right_to_read(state, agent_id, name)


def is_reader(state: State, agent_id: str, head: MessageHead) -> bool:
    """Return whether a participant is among the `thread_readers` of a message."""
    return state.present(agent_id) is not None and may_read(state, agent_id, head)


def follows_live(state: State, agent_id: str, judges: Iterable[MessageHead]) -> bool:
    """Return whether a participant may see live progress that is derived from these messages. The participant must be
    able to read each message, and must be among the recipients if somebody replied to the message now."""
    return all(
        is_reader(state, agent_id, head)
        # At the next seq: live progress is about a message that is not stored yet.
        and _is_still_in(state, agent_id, head, state.head + 1)
        # senders read their own messages even if they are not in the channel
        and (head.kind != "channel" or hears_channel(state, agent_id, name_of(head.to)))
        for head in judges
    )


def thread_readers(state: State, head: MessageHead) -> set[str]:
    """Return everyone who may read a message now: the readers of its thread at the message's position."""
    readers = {agent_id for agent_id in recipients(state, head) if state.present(agent_id)}
    if head.kind == "channel":
        readers |= {
            agent_id
            for agent_id in state.members(name_of(head.to))
            if state.present(agent_id) and may_read(state, agent_id, head)
        }
    if state.present(head.sender_id) is not None and head.kind != "mod":
        readers.add(head.sender_id)
    elif head.kind == "mod":
        readers |= {agent_id for agent_id in parties(head) if is_id(agent_id) and state.present(agent_id)}
    return readers


def has_people(state: State, head: MessageHead) -> bool:
    """Return whether any person may read a message."""
    return next(_people_reading(state, head), None) is not None


def audience(state: State, label: MessageHead, at_seq: int) -> frozenset[str]:
    """Return the audience of a label at a seq: the people in its thread, or all participants of the thread if no person
    is in it.

    People who left the thread by ``at_seq`` are not included, and neither are people who joined too late to read the
    label's message.
    """
    # Includes everybody who could read the label and has left since: they also decide whether people are concerned.
    readers = frozenset(_people_reading(state, label))
    people = frozenset(agent_id for agent_id in readers if _is_still_in(state, agent_id, label, at_seq))
    # Keep participants who left. Without them, their private messages would go to everybody who is still in the thread.
    return people or readers | thread_readers(state, label) | _parties_ever(label)


def _programs_alone(state: State, label: MessageHead) -> frozenset[str] | None:
    """Return everyone in a label's thread if no person ever read it. Return None if a person reads it or has read
    it."""
    if label.sender_kind == "human" or has_people(state, label):
        return None
    return _parties_ever(label) | thread_readers(state, label)


def _parties_ever(label: MessageHead) -> frozenset[str]:
    """Return the participants that a message names, removed or not: its sender, and the recipient of a direct or mod
    message."""
    return frozenset(parties(label) if label.kind in ("direct", "mod") else (label.sender_id,))


def _people_reading(state: State, head: MessageHead) -> Iterator[str]:
    """Yield the people who may read a message (`may_read`). Some may be yielded more than once. Checks only people who
    can be in the thread, not everybody."""
    if head.kind in ("direct", "mod"):
        yield from (agent_id for agent_id in parties(head) if state.is_person(agent_id))
        return
    if state.is_person(head.sender_id):
        yield head.sender_id
    before, excluded = broadcast_readers(head)
    if head.kind == "broadcast":
        yield from (agent_id for agent_id in state.people_before(before) if agent_id not in excluded)
        return
    name = name_of(head.to)
    channel = state.channel(name)
    is_open = channel is not None and channel.history == "members"
    inside = state.people_in_before(name, None if is_open else before)
    yield from (agent_id for agent_id in inside if may_read(state, agent_id, head))
    if head.seq <= state.head:  # a message that is just being written has no readers who already left
        outside = (agent_id for agent_id, member in state.people_of(name).items() if not member.is_in)
        yield from (agent_id for agent_id in outside if may_read(state, agent_id, head))


def _is_in_thread(state: State, agent_id: str, head: MessageHead, at_seq: int) -> bool:
    return may_read(state, agent_id, head) and _is_still_in(state, agent_id, head, at_seq)


def _is_still_in(state: State, agent_id: str, head: MessageHead, at_seq: int) -> bool:
    if state.present(agent_id) is None:
        return False
    return head.kind != "channel" or state.member(name_of(head.to), agent_id).was_in(at_seq)


class PromptFilter:
    """Decides which messages may enter the prompt of one trigger, under one visibility. The caller supplies the heads
    of the label messages."""

    def __init__(
        self,
        state: State,
        visibility: Visibility,
        trigger: MessageHead,
        label: MessageHead,
        until: int | None = None,
    ) -> None:
        """``until``: also judge messages after the trigger, up to this seq. Without ``until`` later messages are
        refused."""
        self._state = state
        self.visibility = visibility
        self._trigger = trigger
        self._until = trigger.seq if until is None else until
        self._audience = audience(state, label, trigger.seq) if visibility != "all" else frozenset()
        self._programs = _programs_alone(state, label) if visibility != "all" else None
        self._shared: dict[int, bool] = {}
        """Results of `_is_shared`, by label."""
        self._readers = thread_readers(state, trigger) if visibility == "strict" else set()
        self._newest: dict[str, list[tuple[int, str]] | None] = {}
        """By address: the two members of the audience who joined last. None if these members do not decide for all."""

    def renewed(self) -> PromptFilter:
        """Return the same filter without results for labels. Labels that are no messages may share a seq."""
        fresh = copy(self)
        fresh._shared = {}
        return fresh

    def admits(self, head: MessageHead, label: MessageHead) -> bool:
        """Return whether a message that the agent may read enters the prompt. ``strict`` and ``current`` narrow
        ``people``. In threads that only agents read, messages for one person stay hidden from another person."""
        if head.seq > self._until:
            return False
        match self.visibility:
            case "all":
                return True
            case "current":
                return head.thread_id == self._trigger.thread_id and self._is_for_audience(head, label)
            case "strict":
                reads = (may_read(self._state, agent_id, head) for agent_id in self._readers)
                return all(reads) and self._is_for_audience(head, label)
            case "people":
                return self._is_for_audience(head, label)

    @property
    def required(self) -> frozenset[str]:
        """People who must be able to read each admitted message."""
        if self.visibility == "all" or self._programs is not None:
            return frozenset()
        return frozenset(filter(self._state.is_person, self._audience))

    def excludes(self, thread_id: str) -> bool:
        """Return whether the id of a thread alone shows that none of its messages is admitted. This is the case if a
        person takes part in the thread (so each message is its own label) and a member of the audience does not."""
        if self.visibility == "current" and thread_id != self._trigger.thread_id:
            return True
        if self.visibility == "all" or not thread_id.startswith("direct:"):
            return False
        parties = frozenset(thread_parties(thread_id))
        # Without a person a message carries the label of its cause, and its thread alone decides nothing.
        return not self._audience <= parties and any(map(self._state.is_person, parties))

    def _is_for_audience(self, head: MessageHead, label: MessageHead) -> bool:
        # A broadcast may have thousands of readers, and this runs for every message of a prompt.
        newest = self._came_last(label) if len(self._audience) > FEW else None
        if newest is not None:
            return self._reaches(label, newest)
        if all(self._is_in_audience(agent_id, head, label) for agent_id in self._audience):
            return True
        return self._programs is not None and self._is_shared(label)

    def _is_shared(self, label: MessageHead) -> bool:
        """For a trigger without people: return whether no person reads the message either, and all participants of the
        trigger's thread are also in the message's thread."""
        # One result per label: thousands of messages share few labels.
        if label.seq not in self._shared:
            state, at_seq = self._state, self._trigger.seq
            self._shared[label.seq] = _programs_alone(state, label) is not None and all(
                _is_in_thread(state, agent_id, label, at_seq) for agent_id in self._programs or ()
            )
        return self._shared[label.seq]

    def _is_in_audience(self, agent_id: str, head: MessageHead, label: MessageHead) -> bool:
        if self._state.is_person(agent_id):
            return _is_in_thread(self._state, agent_id, label, self._trigger.seq)
        # For a trigger without people: its participants read the message themselves, or `_is_shared` admits it.
        return may_read(self._state, agent_id, head)

    def _came_last(self, label: MessageHead) -> list[tuple[int, str]] | None:
        """Return the newest members of the audience in a channel or broadcast, if all members joined once and stayed.
        In that case the newest members may read least, so they decide for all."""
        if label.kind not in ("broadcast", "channel"):
            return None
        # with rights, an early member may still be unable to read the channel
        if label.kind == "channel" and self._state.rights is not None:
            return None
        if label.to not in self._newest:
            arrivals = [self._came(agent_id, label) for agent_id in self._audience]
            stable = [(seq, agent_id) for seq, agent_id in arrivals if seq is not None]
            self._newest[label.to] = heapq.nlargest(2, stable) if len(stable) == len(arrivals) else None
        return self._newest[label.to]

    def _came(self, agent_id: str, label: MessageHead) -> tuple[int | None, str]:
        participant = self._state.present(agent_id)
        if participant is None or participant.kind != "human":
            return None, agent_id
        if label.kind == "broadcast":
            return participant.registered_seq, agent_id
        spans = self._state.member(name_of(label.to), agent_id).spans
        # Members who left and came back may read messages from before their last join.
        stays = len(spans) == 1 and spans[0][1] is None and spans[0][0] < self._trigger.seq
        return spans[0][0] if stays else None, agent_id

    def _reaches(self, label: MessageHead, newest: list[tuple[int, str]]) -> bool:
        """Return the result of `_is_in_audience` for the whole audience, decided by its newest members. Senders read
        their own messages."""
        first, excluded = broadcast_readers(label)
        # Excluded people cannot read the message, whenever they joined, so the newest members do not decide for them.
        if any(agent_id in self._audience and agent_id != label.sender_id for agent_id in excluded):
            return False
        channel = self._state.channel(name_of(label.to)) if label.kind == "channel" else None
        if channel is not None and channel.history == "members":
            return True
        return all(seq < first or agent_id == label.sender_id for seq, agent_id in newest)
