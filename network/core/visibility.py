"""Rules that decide who may read a message, who receives it, and which prompts may contain it.

Delivery, history, resume and prompts all use these rules, so their results cannot differ. docs/protocol.md describes
the rules ("Addresses, threads, membership"). Pure.

The *audience* of a message is the people in the message's thread. If no person is in the thread, the message has the
audience of its cause. If a program (an agent or a service) started the conversation in a thread without people, the
audience is all participants of this thread.
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
"""Maximum size of an audience in which each member is checked. In a larger audience, only its newest members are
checked if their result applies to all members."""
VISIBILITIES: tuple[Visibility, ...] = ("people", "strict", "all", "current")


def parties(head: MessageHead) -> tuple[str, ...]:
    """Return the sender and the recipient of a direct message, or the one participant of a message to or from a mod."""
    kind, name = parse_address(head.to)
    if head.kind == "direct":
        return (head.sender_id, name)
    return (name,) if kind == "agent" else (head.sender_id,)


def may_read(state: State, agent_id: str, head: MessageHead) -> bool:
    """Return whether a participant may read a message. Operators' additional rights are not considered."""
    # Senders may read their own messages even after they have left the channel. A mod's message has the mod as its
    # sender, which is not a participant.
    if agent_id == head.sender_id and head.kind != "mod":
        return True
    match head.kind:
        case "broadcast":
            return _hears_broadcast(state.present(agent_id), head)
        case "channel":
            name = name_of(head.to)
            # Check the node's rights first. Members without the right to read the channel may not read its messages.
            if state.rights is not None and not has_right_to_read(state, agent_id, name):
                return False
            member = state.member(name, agent_id)
            return _gets(state, name, member, head) or (member.is_in and _is_open(state, name))
        case _:
            return agent_id in parties(head)


def is_recipient(state: State, agent_id: str, head: MessageHead) -> bool:
    """Return whether a message is delivered to a participant. The sender also counts as a recipient, because the
    sender's other sessions receive the message."""
    if head.kind == "channel" and agent_id != head.sender_id:
        name = name_of(head.to)
        if state.rights is not None and not has_right_to_read(state, agent_id, name):
            return False
        return _gets(state, name, state.member(name, agent_id), head)
    return may_read(state, agent_id, head)


def broadcast_readers(head: MessageHead) -> tuple[int, Set[str]]:
    """Return a seq and a set of ids that define the readers of a broadcast. The readers are the sender and everyone who
    was registered before this seq, except the participants in the set."""
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
    """Return the seq of the first message in a message's reply thread or, outside reply threads, the message's own seq.
    Participants who joined after this seq may not read the message."""
    start = thread_start(head.thread_id)
    return head.seq if start is None else start


def _gets(state: State, channel: str, member: Member, head: MessageHead) -> bool:
    """Return whether a member receives a channel message. The member must have been in the channel when the message was
    sent and when its reply thread began. In an open channel, the beginning of the reply thread does not matter."""
    if not member.was_in(head.seq):
        return False
    # A reply may quote its thread, so only participants who could read the beginning of the thread may read the reply.
    start = thread_start(head.thread_id)
    return start is None or member.was_in(start) or _is_open(state, channel)


def _is_open(state: State, channel: str) -> bool:
    """Return whether members of a channel may read messages from before their join."""
    info = state.channel(channel)
    return info is not None and info.history == "members"


def inbox_spans(state: State, participant: Participant) -> list[Span]:
    """Return the ranges of the log that contain a participant's deliveries. `is_recipient` must still filter the rows
    in these ranges."""
    spans = [
        Span(agent_address(participant.agent_id), participant.registered_seq),
        Span("broadcast", participant.registered_seq),
    ]
    for channel, member in state.memberships(participant.agent_id).items():
        spans += [Span(channel_address(channel), after, before) for after, before in member.spans]
    return spans


def readable_spans(state: State, participant: Participant) -> list[Span]:
    """Return the ranges of the log that a participant may read: its deliveries, and the whole history of its open
    channels."""
    spans = [Span(agent_address(participant.agent_id), 0), Span("broadcast", participant.registered_seq)]
    for name, member in state.memberships(participant.agent_id).items():
        channel = state.channel(name)
        if state.rights is not None and not has_right_to_read(state, participant.agent_id, name):
            continue
        is_open = channel is not None and channel.history == "members"
        # Start at the beginning of the log, because members of an open channel may read its whole history.
        if is_open and member.is_in:
            spans.append(Span(channel_address(name), 0))
        else:
            # Members who left an open channel may still read the replies that they received (see `_gets`).
            spans += [Span(channel_address(name), after, before, is_open) for after, before in member.spans]
    return spans


def hears_channel(state: State, agent_id: str, name: str) -> bool:
    """Return whether a participant receives the new messages of a channel."""
    return state.member(name, agent_id).is_in and has_right_to_read(state, agent_id, name)


def is_reader(state: State, agent_id: str, head: MessageHead) -> bool:
    """Return whether a participant is one of the `thread_readers` of a message."""
    return state.present(agent_id) is not None and may_read(state, agent_id, head)


def follows_live(state: State, agent_id: str, judges: Iterable[MessageHead]) -> bool:
    """Return whether a participant may see live progress that is derived from the messages ``judges``. The participant
    must be allowed to read each of these messages, and would have to receive a reply to each of them that was sent
    now."""
    return all(
        is_reader(state, agent_id, head)
        # Check the membership at the next seq, because live progress is about a message that is not stored yet.
        and _is_still_in(state, agent_id, head, state.head + 1)
        # Senders may read their own messages even if they are not in the channel, so check the channel too.
        and (head.kind != "channel" or hears_channel(state, agent_id, name_of(head.to)))
        for head in judges
    )


def thread_readers(state: State, head: MessageHead) -> set[str]:
    """Return all participants who may read a message now. Removed participants are left out."""
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
    """Return the audience of a label at ``at_seq``. ``label`` is the head of the message that the label names.

    The audience is the people in the thread of this message or, if no person is in the thread, all participants of the
    thread. It does not include people who had left the thread at ``at_seq`` or who joined too late to read the message.
    """
    # Include people who have left since. If they could read the message, its thread still counts as a thread with
    # people.
    readers = frozenset(_people_reading(state, label))
    people = frozenset(agent_id for agent_id in readers if _is_still_in(state, agent_id, label, at_seq))
    # Include participants who have left. Otherwise their private messages could enter prompts for the other
    # participants.
    return people or readers | thread_readers(state, label) | _parties_ever(label)


def _programs_alone(state: State, label: MessageHead) -> frozenset[str] | None:
    """Return all participants of a label's thread if no person may read the thread. Return None if a person may read it
    or has written the label's message."""
    if label.sender_kind == "human" or has_people(state, label):
        return None
    return _parties_ever(label) | thread_readers(state, label)


def _parties_ever(label: MessageHead) -> frozenset[str]:
    """Return the participants that a message names, including removed participants: the sender, and the recipient of a
    direct or mod message."""
    return frozenset(parties(label) if label.kind in ("direct", "mod") else (label.sender_id,))


def _people_reading(state: State, head: MessageHead) -> Iterator[str]:
    """Yield the people who may read a message (`may_read`). Some people may be yielded more than once. Only people who
    can be in the thread are checked, because a network may have many people."""
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
    if head.seq <= state.head:  # a message that is just being written has no readers who have left
        outside = (agent_id for agent_id, member in state.people_of(name).items() if not member.is_in)
        yield from (agent_id for agent_id in outside if may_read(state, agent_id, head))


def _is_in_thread(state: State, agent_id: str, head: MessageHead, at_seq: int) -> bool:
    return may_read(state, agent_id, head) and _is_still_in(state, agent_id, head, at_seq)


def _is_still_in(state: State, agent_id: str, head: MessageHead, at_seq: int) -> bool:
    if state.present(agent_id) is None:
        return False
    return head.kind != "channel" or state.member(name_of(head.to), agent_id).was_in(at_seq)


class PromptFilter:
    """Filter that decides which messages may enter the prompt of one trigger with a given visibility. The caller
    supplies the heads of the label messages."""

    def __init__(
        self,
        state: State,
        visibility: Visibility,
        trigger: MessageHead,
        label: MessageHead,
        until: int | None = None,
    ) -> None:
        """Create a filter for the prompt of ``trigger``. Messages after the seq ``until`` are refused. The default for
        ``until`` is the seq of the trigger."""
        self._state = state
        self.visibility = visibility
        self._trigger = trigger
        self._until = trigger.seq if until is None else until
        self._audience = audience(state, label, trigger.seq) if visibility != "all" else frozenset()
        self._programs = _programs_alone(state, label) if visibility != "all" else None
        self._shared: dict[int, bool] = {}
        """Results of `_is_shared`, by the seq of the label."""
        self._readers = thread_readers(state, trigger) if visibility == "strict" else set()
        self._newest: dict[str, list[tuple[int, str]] | None] = {}
        """The two members of the audience who joined an address last, by address. None if their result would not apply
        to all members."""

    def renewed(self) -> PromptFilter:
        """Return a copy of the filter without cached results. The cache uses the seq of a label as its key, and labels
        that are not stored messages may all have the same seq."""
        fresh = copy(self)
        fresh._shared = {}
        return fresh

    def admits(self, head: MessageHead, label: MessageHead) -> bool:
        """Return whether a message that the agent may read may enter the prompt. ``strict`` and ``current`` admit fewer
        messages than ``people``. Except with ``all``, a message for one person never enters a prompt for another
        person, even if it was sent in a thread that only agents read."""
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
        """People who must be allowed to read each message that the filter admits."""
        if self.visibility == "all" or self._programs is not None:
            return frozenset()
        return frozenset(filter(self._state.is_person, self._audience))

    def excludes(self, thread_id: str) -> bool:
        """Return whether the id of a thread alone is enough to refuse all messages of the thread. This is true for a
        direct thread with a person if some member of the audience is not in the thread, because each message of such a
        thread is its own label. With the visibility ``current``, all threads except the trigger's thread are
        refused."""
        if self.visibility == "current" and thread_id != self._trigger.thread_id:
            return True
        if self.visibility == "all" or not thread_id.startswith("direct:"):
            return False
        parties = frozenset(thread_parties(thread_id))
        # In a thread without people, a message has the label of its cause, so the thread's id does not decide.
        return not self._audience <= parties and any(map(self._state.is_person, parties))

    def _is_for_audience(self, head: MessageHead, label: MessageHead) -> bool:
        # If possible, check only the newest members. A broadcast may have thousands of readers, and this method runs
        # for every message of a prompt.
        newest = self._came_last(label) if len(self._audience) > FEW else None
        if newest is not None:
            return self._reaches(label, newest)
        if all(self._is_in_audience(agent_id, head, label) for agent_id in self._audience):
            return True
        return self._programs is not None and self._is_shared(label)

    def _is_shared(self, label: MessageHead) -> bool:
        """Return whether the prompt for a trigger without people may contain messages with a label. The prompt may
        contain these messages if no person can read the label's thread and all participants of the trigger's thread are
        in the label's thread."""
        # Cache one result per label: thousands of messages have only a few different labels.
        if label.seq not in self._shared:
            state, at_seq = self._state, self._trigger.seq
            self._shared[label.seq] = _programs_alone(state, label) is not None and all(
                _is_in_thread(state, agent_id, label, at_seq) for agent_id in self._programs or ()
            )
        return self._shared[label.seq]

    def _is_in_audience(self, agent_id: str, head: MessageHead, label: MessageHead) -> bool:
        if self._state.is_person(agent_id):
            return _is_in_thread(self._state, agent_id, label, self._trigger.seq)
        # The audience contains programs only if the trigger's thread has no people. A program must be allowed to read
        # the message, unless `_is_shared` admits it.
        return may_read(self._state, agent_id, head)

    def _came_last(self, label: MessageHead) -> list[tuple[int, str]] | None:
        """Return the newest members of the audience in a channel or broadcast. If every member joined once and stayed,
        a message that the newest members may read is readable for all members. Return None if a member may have joined
        more than once, or if other checks are necessary."""
        if label.kind not in ("broadcast", "channel"):
            return None
        # On a node with rights, an early member may have no right to read the channel.
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
        # Members who left and joined again may also read messages from before their last join.
        stays = len(spans) == 1 and spans[0][1] is None and spans[0][0] < self._trigger.seq
        return spans[0][0] if stays else None, agent_id

    def _reaches(self, label: MessageHead, newest: list[tuple[int, str]]) -> bool:
        """Return whether the whole audience may read the message of a label. Only ``newest``, the newest members of the
        audience, are compared with the label. Senders may always read their own messages."""
        first, excluded = broadcast_readers(label)
        # Check excluded people separately. They may not read the message even if they joined early.
        if any(agent_id in self._audience and agent_id != label.sender_id for agent_id in excluded):
            return False
        channel = self._state.channel(name_of(label.to)) if label.kind == "channel" else None
        if channel is not None and channel.history == "members":
            return True
        return all(seq < first or agent_id == label.sender_id for seq, agent_id in newest)
