"""An oracle for canaries, the secret words in the tests of visibility. The oracle never calls
`roundelay.network.core.visibility`.

The oracle reads the rows of the ledger in order, and the test adds the participants that each broadcast leaves out.
For each canary, it returns the participants who may know the canary. For each message, it returns the people
whom an agent serves when it reacts to the message.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roundelay.network.core.rows import Row

CANARY = re.compile(r"canary-[0-9a-f]{8}")


def find_canaries(text: str) -> set[str]:
    return set(CANARY.findall(text))


@dataclass(frozen=True)
class Said:
    """One message as the oracle sees it: sender, readers, cause and channel."""

    sender: str
    readers: frozenset[str]
    cause: int | None
    channel: str
    inside: Mapping[str, frozenset[str]]
    """Members of each channel when the message was stored. The key ``""`` holds everyone in the network."""


@dataclass
class Story:
    """All events so far. ``agents`` are the agents under test. Messages tell them what they know, and they may repeat
    it to each other.
    """

    agents: frozenset[str]
    people: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    open_channels: set[str] = field(default_factory=set)
    left_out: dict[str, frozenset[str]] = field(default_factory=dict)
    """Participants that a broadcast leaves out, by message ID."""

    said: dict[int, Said] = field(default_factory=dict)
    may_know: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    reactions: dict[str, int] = field(default_factory=dict)
    """Seq of the trigger, by reaction."""

    _told_in: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _named: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _read: int = 0

    def read(self, rows: list[Row]) -> None:
        """Process the rows that were stored since the last call."""
        for row in rows[self._read :]:
            body = json.loads(row.data)
            match row.type:
                case "registered":
                    self.present.add(body["agent_id"])
                    if body["kind"] == "human":
                        self.people.add(body["agent_id"])
                case "removed":
                    self.present.discard(body["agent_id"])
                case "joined":
                    self._join(body["channel"], body["agent_id"])
                case "left":
                    self.members[body["channel"]].discard(body["agent_id"])
                case "channel":
                    if body.get("history") == "members":
                        self.open_channels.add(body["channel"])
                    self._name(row.actor, body)
                case "record" if row.label == "started":
                    self.reactions.setdefault(row.stream, body["trigger"])
                case "message":
                    self._hear(row.seq, body)
        self._read = len(rows)

    def _name(self, actor: str, body: dict[str, Any]) -> None:
        """Record who may know the name and topic of a channel that is not open: its members and the people invited to
        it.
        """
        channel = body["channel"]
        for canary in find_canaries(f"{channel} {body.get('topic', '')}"):
            self._named[channel].add(canary)
            self.may_know[canary] |= self.members[channel] | {actor}
        if body["event"] == "invited":
            self._show_name(channel, body["agent_id"])

    def _show_name(self, channel: str, who: str) -> None:
        for canary in self._named[channel]:
            self.may_know[canary].add(who)

    def _join(self, channel: str, who: str) -> None:
        self.members[channel].add(who)
        self._show_name(channel, who)
        if channel in self.open_channels:
            for canary in self._told_in[channel]:
                self.may_know[canary].add(who)

    def _hear(self, seq: int, message: dict[str, Any]) -> None:
        sender, parent = message["sender_id"], message.get("reply_to")
        readers = self._find_readers(sender, message["to"], message["message_id"], parent, message["thread_id"])
        channel = message["to"].removeprefix("channel:")
        inside = {name: frozenset(members) for name, members in self.members.items()} | {"": frozenset(self.present)}
        self.said[seq] = Said(sender, frozenset(readers), message.get("cause"), channel, inside)
        for canary in find_canaries(json.dumps(message)):
            if sender not in self.present:
                continue  # text from the hub or a mod does not permit anybody to know the canary
            if sender not in self.agents:
                self.may_know[canary] |= readers
                self._told_in[channel].add(canary)
                if channel in self.open_channels:
                    self.may_know[canary] |= self.members[channel]
            # An agent's text may spread a canary to other agents but not to people. Participants who join an open
            # channel later may know its texts.
            else:
                self.may_know[canary] |= readers & self.agents
                self._told_in[channel].add(canary)

    def _find_readers(self, sender: str, to: str, message_id: str, parent: int | None, thread_id: str) -> set[str]:
        kind, _, name = to.partition(":")
        first = int(thread_id[7:]) if thread_id.startswith("thread:") else None
        match kind:
            case "agent":
                return {sender, name}
            case "mod":
                return {sender}
            case "channel":
                readers = self.members[name] | {sender}
                if first is not None and name not in self.open_channels:
                    readers &= self.said[first].readers | {sender}
                return readers
            case _:
                readers = self.present - self.left_out.get(message_id, frozenset())
                if parent is not None:
                    readers &= self.said[parent].readers
                return readers | {sender}

    def for_whom(self, seq: int) -> frozenset[str]:
        """Return the people whom an agent serves when it reacts to this message.

        These people could read the message (or the nearest cause with human readers) and were still present when it
        was stored. If no people remain, return the human readers, or else all readers of the first cause.
        """
        trigger = message = self.said[seq]
        while not (people := message.readers & self.people) and message.cause is not None:
            message = self.said[message.cause]
        there = trigger.inside[""] & trigger.inside.get(message.channel, trigger.inside[""])
        return (people & there) or people or message.readers


@dataclass(frozen=True)
class Leak:
    """A canary that reached a participant or a prompt against the policy. ``way`` is the type of the frame, or
    ``prompt``.
    """

    canary: str
    way: str
    who: str
    about: str = ""


def judge_frames(story: Story, who: str, frames: Iterable[bytes]) -> list[Leak]:
    """Return the canaries in the hub's frames to a participant who may not know these canaries.

    Skip signals between the agents under test. An agent relays such a signal to people, and their frames are judged.
    """
    found = []
    for frame in frames:
        for canary in find_canaries(frame.decode()):
            if who in story.may_know[canary]:
                continue
            way = json.loads(frame)["type"]
            if way != "signal" or who not in story.agents:
                found.append(Leak(canary, way, who, frame[:300].decode(errors="replace")))
    return found


def judge_prompt(story: Story, agent_id: str, reaction: str, text: str) -> list[Leak]:
    """Return the canaries in a prompt that some of the people whom the prompt serves may not know."""
    canaries = find_canaries(text)
    if not canaries:
        return []
    trigger = story.reactions[reaction]
    whom = story.for_whom(trigger)
    return [
        Leak(canary, "prompt", agent_id, f"for {sorted(whom - story.may_know[canary])}, trigger {trigger}")
        for canary in canaries
        if not whom <= story.may_know[canary]
    ]
