"""Tests of delivery as a whole against a simple oracle. Participants join, send, acknowledge, fail and disconnect,
and hubs restart.

The hub is the real one over a ledger in memory or a file. The test steps it without sockets and without waiting. The
oracle stores every message with its recipients, and each session's deliveries, but knows nothing of ack cursors,
queues, windows or pages. After each step, it states which messages every session must have received by now, and which
it must never receive.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roundelay.network.core.tables import LookupRequest
from roundelay.network.hub.session import Session
from tests.support.counts import Note
from tests.support.stepped_hub import SteppedHub, StubConnection

AGENTS = ("alice", "bob", "carol", "dave")
CHANNELS = ("dev", "ops")
LIMITS = {
    "max_unacked": 3,
    "session_queue_bytes": 1024,  # two or three deliveries; the next one puts a session behind
    "sends_per_s": 1_000_000_000,
    "root_messages_per_s": 1_000_000_000,
}
ACK_LAG_MS = 1000
"""Time by which stored acks may lag behind a crash, in milliseconds (docs/protocol.md)."""
MAX_FAILURES = 5
PADDING = "x" * 150

agents = st.sampled_from(AGENTS)
channels = st.sampled_from(CHANNELS)
picks = st.integers(0, 11)
numbers = st.integers(1, 4)
rarely = st.sampled_from((False, False, False, True))
settles = st.sampled_from((True, True, False))
"""Whether the hub runs after this step. If not, the next step reaches it with this one still pending."""


@dataclass
class Message:
    """One stored message and its recipients."""

    seq: int
    sender: str
    message_id: str
    frame: dict[str, Any]
    by: Visit | None
    """The session that sent the message, which does not receive it."""
    recipients: frozenset[str]
    witnesses: frozenset[str]
    """Readers of the first message of the reply chain, who may also read all replies."""
    excluded: frozenset[str]


@dataclass(eq=False)
class Visit:
    """One session from its participant's point of view."""

    agent: str
    session: Session
    connection: StubConnection
    resumes: bool
    handled_before: set[int]
    cursor: int = -1
    head: int = 0
    is_open: bool = True
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    unread: dict[str, int | None] = field(default_factory=dict)
    """Answers to sends that the session has not read: the seq of each, or None for a refused one."""
    given: list[tuple[int, int]] = field(default_factory=list)
    """(seq, attempt) of every delivery."""
    held: set[int] = field(default_factory=set)
    """Seqs that were delivered, but neither acknowledged nor refused yet."""
    settled_at_join: set[int] | None = None
    """Seqs that the participant had handled or refused, or may have, at the session's welcome. For a session that
    starts from the ack cursor, nothing later changes what it receives.
    """
    refused: dict[int, int] = field(default_factory=dict)
    """Seqs that the session refused, with the time of the next attempt in milliseconds."""

    @property
    def is_welcome(self) -> bool:
        return self.is_open and self.cursor >= 0

    @property
    def top(self) -> int:
        return max([self.cursor, *(seq for seq, _ in self.given)])

    def top_before(self, seq: int) -> int:
        """Return the newest seq that the session had received before the last delivery of this one."""
        at = max(place for place, (given, _) in enumerate(self.given) if given == seq)
        return max([self.cursor, *(given for given, _ in self.given[:at])])

    @property
    def is_blocked(self) -> bool:
        return self.connection.is_paused or len(self.held) >= LIMITS["max_unacked"]


@dataclass
class Sending:
    """A `send` whose answer is pending."""

    visit: Visit
    frame: dict[str, Any]
    parent: Message | None = None


@dataclass
class Moving:
    """A call of `channels.join` or `channels.leave` whose result is pending."""

    visit: Visit
    call_id: str
    channel: str
    is_join: bool


@dataclass
class Inbox:
    """State of all messages of one participant."""

    handled: dict[int, int] = field(default_factory=dict)
    """Time when each seq was handled, in milliseconds."""
    forgotten: set[int] = field(default_factory=set)
    """Seqs that were acknowledged so shortly before a crash that they may or may not be delivered again."""
    failures: dict[int, int] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)
    """Time of the next attempt of each refused seq, in milliseconds."""
    dead: set[int] = field(default_factory=set)
    lives: dict[int, int] = field(default_factory=dict)
    """Number of times that each dead letter was restored. After each restore, a message has five new attempts."""

    def number(self, seq: int, attempt: int) -> int:
        """Return a number for an attempt that keeps growing when a dead letter is restored."""
        return attempt + 10 * self.lives.get(seq, 0)


def nack_frame(seq: int, retry_after_ms: int | None) -> dict[str, Any]:
    frame: dict[str, Any] = {"type": "nack", "seq": seq, "reason": "failed"}
    return frame if retry_after_ms is None else frame | {"retry_after_ms": retry_after_ms}


class Delivery(RuleBasedStateMachine):
    """State machine of the module docstring. ``counts`` sums the events of a run."""

    counts: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.hub = self.make_hub()
        self.numbers = itertools.count(1)
        self.registered: dict[str, int] = {}
        self.members: dict[str, set[str]] = {name: set() for name in CHANNELS}
        self.inboxes = {agent: Inbox() for agent in AGENTS}
        self.messages: list[Message] = []
        self.lost_sends: list[Sending] = []
        self.visits: list[Visit] = []
        self.is_settled = True
        self.under_way: list[Visit | Sending | Moving] = []

    def make_hub(self) -> SteppedHub:
        return SteppedHub(LIMITS)

    def count(self, what: str, number: int = 1) -> None:
        type(self).counts[what] = type(self).counts.get(what, 0) + number

    @initialize()
    def begin(self) -> None:
        """Start with three participants. Two of them are in a channel."""
        for agent in AGENTS[:3]:
            self.arrive(agent, resumes=False, cursor=0)
        self.settle()
        for name, visit in zip(CHANNELS, self.visits, strict=False):
            frame = {"type": "call", "call_id": f"make-{name}", "op": "channels.create", "args": {"name": name}}
            self.hub.receive(visit.session, frame)
            self.under_way.append(Moving(visit, f"make-{name}", name, is_join=True))
        self.under_way.append(self.join_channel(self.visits[1], CHANNELS[0]))
        self.settle()

    # --- sessions

    @rule(agent=agents, resumes=st.booleans(), back=picks, settles=settles)
    def join_network(self, agent: str, resumes: bool, back: int, settles: bool) -> None:
        """Open a session from the ack cursor, or from a cursor that an earlier session of this participant had
        reached.
        """
        if len([visit for visit in self.visits if visit.is_open]) >= 7:
            return
        own = [self.registered.get(agent, 0)]
        own += [seq for visit in self.visits if visit.agent == agent for seq, _ in visit.given]
        is_known = agent in self.registered and not any(
            isinstance(item, Visit) and item.agent == agent for item in self.under_way
        )
        self.arrive(agent, resumes=resumes and is_known, cursor=sorted(set(own))[-1 - back % len(set(own))])
        self.finish(settles)

    def arrive(self, agent: str, *, resumes: bool, cursor: int, role: str = "observer") -> None:
        connection, session = self.hub.connect()
        visit = Visit(agent, session, connection, resumes, set(self.inboxes[agent].handled))
        frame: dict[str, Any] = {"type": "hello", "protocol": 1, "agent_id": agent, "kind": "agent", "role": role}
        if resumes:
            frame["resume"] = {"epoch": self.hub.hub.epoch, "cursor": cursor}
            self.count("resumed from a cursor")
        self.hub.receive(session, frame)
        self.visits.append(visit)
        self.under_way.append(visit)
        self.count("sessions")

    @rule(pick=picks, says_bye=st.booleans(), settles=settles)
    def leave_network(self, pick: int, says_bye: bool, settles: bool) -> None:
        visit = self.pick_visit(pick)
        if visit is None:
            return
        if says_bye:
            self.hub.receive(visit.session, {"type": "bye"})
            self.settle()
            assert visit.connection.closed == 1000
        else:
            self.take(visit)
            self.hub.hub.disconnect(visit.session)
            visit.is_open = False
            self.count("sessions lost")
        self.finish(settles)

    @rule(pick=picks)
    def pause_or_go_on(self, pick: int) -> None:
        """Let a session stop reading, or read again."""
        visit = self.pick_visit(pick)
        if visit is None:
            return
        visit.connection.is_paused = not visit.connection.is_paused
        if not visit.connection.is_paused:
            self.hub.hub.resume(visit.session)
        self.settle()

    # --- sending

    @rule(
        pick=picks,
        to=st.sampled_from((*(f"agent:{agent}" for agent in AGENTS), "broadcast")),
        number=numbers,
        settles=settles,
    )
    def send_some(self, pick: int, to: str, number: int, settles: bool) -> None:
        for _ in range(number):
            self.send(pick, to)
        self.finish(settles)

    @rule(pick=picks, excluded=agents, settles=settles)
    def broadcast_to_some(self, pick: int, excluded: str, settles: bool) -> None:
        self.send(pick, "broadcast", excluded=excluded)
        self.finish(settles)

    @rule(pick=picks, channel=channels, number=numbers, settles=settles)
    def post(self, pick: int, channel: str, number: int, settles: bool) -> None:
        for _ in range(number):
            self.send(pick, f"channel:{channel}")
        self.finish(settles)

    @rule(pick=picks, back=picks, settles=settles)
    def reply(self, pick: int, back: int, settles: bool) -> None:
        visit = self.pick_visit(pick)
        if visit is None:
            return
        readable = [m for m in self.messages if visit.agent in m.recipients or visit.agent == m.sender]
        if not readable:
            return
        parent = readable[-1 - back % len(readable)]
        to = str(parent.frame["to"])
        if to.startswith("agent:") and parent.sender != visit.agent:
            to = f"agent:{parent.sender}"
        self.send(pick, to, parent=parent)
        self.finish(settles)

    def send(self, pick: int, to: str, *, parent: Message | None = None, excluded: str | None = None) -> None:
        visit = self.pick_visit(pick)
        if visit is None:
            return
        number = next(self.numbers)
        frame: dict[str, Any] = {"type": "send", "message_id": f"m{number}", "to": to, "content": f"{number} {PADDING}"}
        if parent is not None:
            frame["reply_to"] = parent.seq
        if excluded is not None and excluded != visit.agent:
            frame["exclude_agent_ids"] = [excluded]
        self.submit(Sending(visit, frame, parent))

    def submit(self, sending: Sending) -> None:
        self.hub.receive(sending.visit.session, sending.frame)
        self.under_way.append(sending)

    @rule(pick=picks, back=picks, is_same=st.booleans())
    def repeat(self, pick: int, back: int, is_same: bool) -> None:
        """Send an old message ID again. The answer is the first ``seq``, or a conflict, whatever has changed since."""
        self.settle()
        visit = self.pick_visit(pick)
        if visit is None or visit.connection.is_paused:
            return
        sent = [message for message in self.messages if message.sender == visit.agent]
        if not sent:
            return
        message = sent[-1 - back % len(sent)]
        frame = message.frame if is_same else {**message.frame, "content": "another"}
        self.hub.receive(visit.session, frame)
        head = self.hub.hub.state.head
        self.settle()
        answer = visit.answers.pop(message.message_id)
        assert self.hub.hub.state.head == head
        if is_same:
            assert (answer["seq"], answer["duplicate"]) == (message.seq, True)
        else:
            assert answer["code"] == "id_conflict"
        self.count("repeats")

    @rule(pick=picks, channel=channels, is_join=st.booleans(), settles=settles)
    def change_membership(self, pick: int, channel: str, is_join: bool, settles: bool) -> None:
        visit = self.pick_visit(pick)
        if visit is None:
            return
        self.under_way.append(self.join_channel(visit, channel, is_join=is_join))
        self.finish(settles)

    def join_channel(self, visit: Visit, channel: str, *, is_join: bool = True) -> Moving:
        call_id, op = f"c{next(self.numbers)}", "channels.join" if is_join else "channels.leave"
        self.hub.receive(visit.session, {"type": "call", "call_id": call_id, "op": op, "args": {"name": channel}})
        return Moving(visit, call_id, channel, is_join)

    # --- handling

    @rule(pick=picks, back=picks, settles=settles)
    def ack(self, pick: int, back: int, settles: bool) -> None:
        """Acknowledge everything up to a delivery, including deliveries to other sessions. An ack does not cover a
        message that another session retries, or that was redelivered after this delivery, because the ack may already
        have been on its way.
        """
        visit, seq = self.pick_delivery(pick, back)
        if visit is not None:
            self.ack_up_to(visit, seq)
            self.finish(settles)

    def ack_up_to(self, visit: Visit, seq: int) -> None:
        inbox = self.inboxes[visit.agent]
        elsewhere = {seq for seq in inbox.failures if seq not in inbox.handled} - visit.held
        mine = {m.seq for m in self.messages if m.seq <= seq and visit.agent in m.recipients}
        again = {other for other in visit.held if other < seq <= visit.top_before(other)}
        self.hub.receive(visit.session, {"type": "ack", "seq": seq})
        visit.held = {other for other in visit.held if other > seq} | again
        self.handle(visit.agent, sorted(mine - elsewhere - again))

    @rule(pick=picks, back=picks, settles=settles)
    def ack_only(self, pick: int, back: int, settles: bool) -> None:
        visit, seq = self.pick_delivery(pick, back)
        if visit is None:
            return
        self.hub.receive(visit.session, {"type": "ack", "seq": seq, "only": True})
        visit.held.discard(seq)
        if visit.agent in self.message(seq).recipients:
            self.handle(visit.agent, [seq])
        self.finish(settles)

    @rule(pick=picks)
    def ack_everything_one_by_one(self, pick: int) -> None:
        """Acknowledge each message alone, as a client with parallel handlers does. Start with the newest, so that the
        ack cursor has to wait.
        """
        visit = self.pick_visit(pick)
        if visit is not None:
            self.ack_all_held(visit)
            self.settle()

    def ack_all_held(self, visit: Visit) -> None:
        for seq in sorted(visit.held, reverse=True):
            self.hub.receive(visit.session, {"type": "ack", "seq": seq, "only": True})
            visit.held.discard(seq)
            self.handle(visit.agent, [seq])

    @rule(pick=picks, back=picks, number=st.integers(4, 9), is_one_by_one=st.booleans(), settles=settles)
    def fall_behind(self, pick: int, back: int, number: int, is_one_by_one: bool, settles: bool) -> None:
        """Let one of two sessions stop reading while the other one handles the messages. Then the slow session
        continues.
        """
        self.settle()
        quick = self.pick_visit(pick)
        if quick is None or quick.is_blocked or len([visit for visit in self.visits if visit.is_open]) >= 7:
            return
        self.arrive(quick.agent, resumes=False, cursor=0)
        slow = self.visits[-1]
        self.settle()
        slow.connection.is_paused = True
        for _ in range(number):
            self.send(back, f"agent:{quick.agent}")
            self.settle()
            if is_one_by_one:
                self.ack_all_held(quick)
            elif quick.held:
                self.ack_up_to(quick, max(quick.held))
        slow.connection.is_paused = False
        self.hub.hub.resume(slow.session)
        self.settle()
        while slow.held and slow.is_open:
            self.ack_all_held(slow)
            self.settle()
        self.finish(settles)

    @rule(pick=picks, to=st.sampled_from(("agent:nobody", "channel:nowhere", "mod:nothing")))
    def ask_too_much(self, pick: int, to: str) -> None:
        """Check that refused frames are answered and change nothing."""
        self.settle()
        visit = self.pick_visit(pick)
        if visit is None or visit.connection.is_paused:
            return
        head = self.hub.hub.state.head
        self.hub.receive(visit.session, {"type": "send", "message_id": "nobody", "to": to, "content": 1})
        self.hub.receive(visit.session, {"type": "ack", "seq": visit.top + 1})
        self.settle()
        assert visit.answers.pop("nobody")["code"] == "unknown_recipient"
        assert visit.answers.pop("")["code"] == "invalid_arguments"
        assert self.hub.hub.state.head == head

    def handle(self, agent: str, seqs: list[int]) -> None:
        inbox = self.inboxes[agent]
        for seq in seqs:
            inbox.handled.setdefault(seq, self.hub.now_ms)
            inbox.forgotten.discard(seq)
            inbox.due.pop(seq, None)
        self.count("acknowledged", len(seqs))

    @rule(pick=picks, number=numbers, retry_after_ms=st.sampled_from((None, 1, 700, 3000)), settles=settles)
    def nack(self, pick: int, number: int, retry_after_ms: int | None, settles: bool) -> None:
        """Refuse some of a session's open messages, oldest first. The hub ignores a refusal of other messages."""
        self.settle()
        visits = [visit for visit in self.visits if visit.is_welcome and visit.given and not visit.connection.is_paused]
        if not visits:
            return
        visit = visits[pick % len(visits)]
        for seq in sorted(visit.held)[:number]:
            self.hub.receive(visit.session, nack_frame(seq, retry_after_ms))
            self.fail(visit, seq, retry_after_ms)
        if not visit.held:
            self.hub.receive(visit.session, nack_frame(visit.given[0][0], retry_after_ms))
            self.settle()
            assert visit.answers.pop("")["code"] == "invalid_arguments"
        self.finish(settles)

    @rule(pick=picks)
    def fail_always(self, pick: int) -> None:
        """Refuse one message after another at each delivery."""
        self.settle()
        visit = self.pick_visit(pick)
        for _ in range(MAX_FAILURES):
            if visit is None or visit.connection.is_paused or not visit.held:
                return
            seq = min(visit.held)
            self.hub.receive(visit.session, nack_frame(seq, 1))
            self.fail(visit, seq, 1)
            self.hub.loop.step(0.01)
            self.settle()

    @rule(pick=picks)
    def pass_on(self, pick: int) -> None:
        """Refuse a message in one session. A newer session receives it and is lost."""
        self.settle()
        visit = self.pick_visit(pick)
        if visit is None or visit.connection.is_paused or not visit.held:
            return
        seq = min(visit.held)
        self.hub.receive(visit.session, nack_frame(seq, 700))
        self.fail(visit, seq, 700)
        self.arrive(visit.agent, resumes=False, cursor=0)
        newer = self.visits[-1]
        self.settle()
        self.hub.loop.step(0.8)
        self.settle()
        self.hub.hub.disconnect(newer.session)
        newer.is_open = False
        self.settle()

    @rule(pick=picks, back=picks, settles=settles)
    def retry_dead_letter(self, pick: int, back: int, settles: bool) -> None:
        """Restore a dead letter. The message is delivered to one of the sessions, with five new attempts."""
        self.fail_always(pick)
        visit = self.pick_visit(pick)
        if visit is None or visit.connection.is_paused or not self.inboxes[visit.agent].dead:
            return
        inbox = self.inboxes[visit.agent]
        seq = sorted(inbox.dead)[-1 - back % len(inbox.dead)]
        call_id = f"c{next(self.numbers)}"
        call = {"type": "call", "call_id": call_id, "op": "network.retry_dead_letter", "args": {"seq": seq}}
        self.hub.receive(visit.session, call)
        inbox.dead.discard(seq)
        inbox.handled.pop(seq, None)
        inbox.failures[seq], inbox.due[seq] = 0, self.hub.now_ms
        inbox.lives[seq] = inbox.lives.get(seq, 0) + 1
        for other in self.visits:
            if other.agent == visit.agent:
                other.handled_before.discard(seq)
                if any(given == seq for given, _ in other.given):
                    other.refused[seq] = self.hub.now_ms
        self.count("dead letters taken back")
        self.settle()
        assert visit.answers.pop(call_id)["type"] == "result"
        self.finish(settles)

    def fail(self, visit: Visit, seq: int, retry_after_ms: int | None) -> None:
        """Record one more failure. The message is delivered again when due, or is a dead letter after the fifth
        failure. A handled message stays handled.
        """
        agent, inbox = visit.agent, self.inboxes[visit.agent]
        visit.held.discard(seq)
        if seq in inbox.forgotten and self.hub.hub.view.is_handled(agent, seq):
            self.handle(agent, [seq])
        if seq in inbox.handled:
            return
        failures = inbox.failures.get(seq, 0) + 1
        self.count("nacked")
        if failures == MAX_FAILURES:
            self.bury(agent, seq)
            return
        inbox.failures[seq] = failures
        delay_ms = 1000 * 2 ** (failures - 1) if retry_after_ms is None else retry_after_ms
        inbox.due[seq] = visit.refused[seq] = self.hub.now_ms + delay_ms

    def bury(self, agent: str, seq: int) -> None:
        """Record that a message has become a dead letter."""
        inbox = self.inboxes[agent]
        inbox.failures.pop(seq, None)
        inbox.due.pop(seq, None)
        inbox.dead.add(seq)
        self.release(agent, seq)
        self.count("dead letters")

    def release(self, agent: str, seq: int) -> None:
        """Record that a message is handled for all sessions of its recipient."""
        self.handle(agent, [seq])
        for other in self.visits:
            if other.agent == agent:
                other.held.discard(seq)

    # --- reactors

    @rule(pick=picks, times=st.sampled_from((1, 2, MAX_FAILURES)))
    def lose_reactors(self, pick: int, times: int) -> None:
        """Let a reactor start a reaction and disconnect, and each reactor after it too. The trigger counts as
        handled, and becomes a dead letter at the fifth failure, unless a reactor finishes.
        """
        self.settle()
        visit = self.pick_visit(pick)
        if visit is None:
            return
        agent, inbox, reaction = visit.agent, self.inboxes[visit.agent], f"x{next(self.numbers)}"
        reactor = self.come_as_reactor(agent)
        if reactor.held:
            seq = min(reactor.held)
            self.release(agent, seq)
            self.record(reactor, reaction, "started", {"trigger": seq})
            for _ in range(times):
                self.count("reactors lost")
                self.lose(reactor)
                # The hub counts this failure when the next reactor takes over.
                inbox.failures[seq] = inbox.failures.get(seq, 0) + 1
                if inbox.failures[seq] == MAX_FAILURES:
                    self.bury(agent, seq)
                reactor = self.come_as_reactor(agent)
            if seq not in inbox.dead:
                self.record(reactor, reaction, "finished", {})
                inbox.failures.pop(seq, None)
        self.hub.receive(reactor.session, {"type": "bye"})
        self.settle()
        assert reactor.connection.closed == 1000

    def come_as_reactor(self, agent: str) -> Visit:
        self.arrive(agent, resumes=False, cursor=0, role="reactor")
        self.settle()
        return self.visits[-1]

    def record(self, visit: Visit, reaction: str, kind: str, body: dict[str, Any]) -> None:
        record_id = f"r{next(self.numbers)}"
        frame = {"type": "record", "record_id": record_id, "reaction": reaction, "kind": kind, "body": body}
        self.hub.receive(visit.session, frame)
        self.settle()
        assert visit.answers.pop(record_id)["type"] == "stored"

    def lose(self, visit: Visit) -> None:
        self.hub.hub.disconnect(visit.session)
        visit.is_open = False
        self.settle()

    # --- time and failures

    @rule(seconds=st.sampled_from((0.01, 0.4, 1.2, 5.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.settle()
        self.hub.loop.step(seconds)
        self.settle()

    @rule(crashes=st.booleans(), is_time=rarely)
    def restart(self, crashes: bool, is_time: bool) -> None:
        if not is_time:
            return
        self.settle()
        here = self.who_is_here()
        if crashes:
            self.hub.crash()
            self.forget_late_acks()
        else:
            self.hub.restart()
        for visit in self.visits:
            if visit.is_open and not crashes:
                assert visit.connection.closed == 4503
            visit.is_open = False
        self.count("crashes" if crashes else "restarts")
        self.come_back(here)

    def who_is_here(self) -> list[str]:
        return sorted({visit.agent for visit in self.visits if visit.is_welcome})

    def come_back(self, agents: list[str]) -> None:
        """Reconnect the clients of these participants."""
        for agent in agents:
            self.arrive(agent, resumes=False, cursor=0)
        self.settle()

    def forget_late_acks(self) -> None:
        for inbox in self.inboxes.values():
            late = {seq for seq, at in inbox.handled.items() if self.hub.now_ms - at < ACK_LAG_MS} - inbox.dead
            for seq in late:
                del inbox.handled[seq]
            inbox.forgotten |= late

    @rule(pick=picks, to=agents, number=numbers, when=st.sampled_from(("before", "after")), is_time=rarely)
    def fail_a_commit(self, pick: int, to: str, number: int, when: Literal["before", "after"], is_time: bool) -> None:
        """Let the disk fail during some sends. The hub answers none of them and closes all sessions, and repeated
        sends reveal the result.
        """
        self.settle()
        if not is_time or self.pick_visit(pick) is None or to not in self.registered:
            return
        here = self.who_is_here()
        self.hub.fail_commit(when)
        for _ in range(number):
            self.send(pick, f"agent:{to}")
        sends = [item for item in self.under_way if isinstance(item, Sending)]
        self.hub.loop.step()
        if when == "before":
            self.under_way.clear()
            self.lost_sends += sends
        self.settle()
        for visit in self.visits:
            assert not visit.is_open or visit.connection.closed == 4503
            visit.is_open = False
        assert not any(visit.answers for visit in self.visits)
        self.forget_late_acks()
        self.count("failed commits")
        self.come_back(here)

    @precondition(lambda self: self.lost_sends)
    @rule(pick=picks)
    def send_again(self, pick: int) -> None:
        """Send a message without an answer again, with the same ID."""
        sending = self.lost_sends[0]
        visits = [visit for visit in self.visits if visit.is_welcome and visit.agent == sending.visit.agent]
        if visits:
            self.lost_sends.pop(0)
            self.submit(Sending(visits[pick % len(visits)], sending.frame, sending.parent))
            self.settle()

    # --- frames of the hub

    def finish(self, settles: bool) -> None:
        self.is_settled = False
        if settles:
            self.settle()

    def settle(self) -> None:
        """Let the hub do all pending work, and process its frames."""
        self.is_settled = True
        self.hub.loop.step()
        for visit in self.visits:
            if visit.is_open:
                self.take_answers(visit)
        under_way, self.under_way = self.under_way, []
        for item in under_way:
            match item:
                case Visit():
                    self.register(item)
                case Sending():
                    self.settle_send(item)
                case Moving():
                    self.settle_move(item)
        for visit in self.visits:
            if visit.is_open:
                self.take_deliveries(visit)

    def take(self, visit: Visit) -> None:
        """Process the frames of one session while other requests are pending."""
        self.settle()

    def take_answers(self, visit: Visit) -> None:
        deliveries = []
        for frame in visit.connection.take_frames():
            match frame["type"]:
                case "welcome":
                    visit.cursor, visit.head = frame["cursor"], frame["head"]
                case "deliver":
                    deliveries.append(frame)
                case "stored" | "error" | "result":
                    name = frame.get("message_id") or frame.get("call_id") or frame.get("record_id") or ""
                    if name in visit.unread:
                        assert frame.get("seq") == visit.unread.pop(name)
                        continue
                    assert name not in visit.answers, "one answer each"
                    visit.answers[name] = frame
                case "notice" if frame["kind"] == "behind":
                    self.count("times behind")
                case "notice" if frame["kind"] == "dead_letter" and frame["body"]["agent_id"] == visit.agent:
                    inbox, seq = self.inboxes[visit.agent], frame["body"]["seq"]
                    assert seq in inbox.dead or seq in inbox.lives, "heard late, it may have been taken back since"
        visit.connection.frames = deliveries

    def register(self, visit: Visit) -> None:
        participant = self.hub.hub.state.participant(visit.agent)
        assert participant is not None
        self.registered.setdefault(visit.agent, participant.registered_seq)
        inbox = self.inboxes[visit.agent]
        visit.settled_at_join = set(inbox.handled) | inbox.forgotten | set(inbox.failures)
        if visit.is_open:
            assert visit.cursor >= 0, "welcomed"

    def settle_send(self, sending: Sending) -> None:
        frame, visit = sending.frame, sending.visit
        message_id = str(frame["message_id"])
        key = (visit.agent, "m:" + message_id)
        known = self.hub.run(self.hub.ledger.lookup(LookupRequest({key}, set(), set()))).stored.get(key)
        readers = self.find_readers(sending)
        answer = visit.answers.pop(message_id, None)
        if answer is None:
            assert visit.connection.is_paused or not visit.is_open or visit.connection.closed is not None
            visit.unread[message_id] = known.seq if known is not None else None
        if readers is None:
            assert known is None
            assert answer is None or answer["type"] == "error"
            return
        assert known is not None, "everything that may be sent is stored"
        recipients, witnesses, excluded = readers
        if answer is not None:
            assert (answer["seq"], answer["duplicate"]) == (known.seq, False)
        assert known.seq > max([0, *(message.seq for message in self.messages)])
        by = visit
        self.messages.append(
            Message(known.seq, visit.agent, message_id, frame, by, recipients - {visit.agent}, witnesses, excluded)
        )
        self.count("messages")

    def find_readers(self, sending: Sending) -> tuple[frozenset[str], frozenset[str], frozenset[str]] | None:
        """Return the recipients, the readers of replies and the excluded participants, or None if the send must be
        refused.
        """
        frame, agent, parent = sending.frame, sending.visit.agent, sending.parent
        kind, _, name = str(frame["to"]).partition(":")
        excluded = frozenset(frame.get("exclude_agent_ids", ()))
        if kind == "agent":
            return (frozenset({name}), frozenset(), excluded) if name in self.registered else None
        if kind == "channel" and agent not in self.members[name]:
            return None
        present = frozenset(self.registered if kind == "broadcast" else self.members[name])
        if parent is None:
            return present - excluded, present, excluded
        excluded |= parent.excluded
        return (present & parent.witnesses) - excluded, parent.witnesses, excluded

    def settle_move(self, moving: Moving) -> None:
        answer = moving.visit.answers.pop(moving.call_id, None)
        if answer is not None:
            assert answer["type"] == "result"
        else:
            moving.visit.unread[moving.call_id] = None
        change = self.members[moving.channel].add if moving.is_join else self.members[moving.channel].discard
        change(moving.visit.agent)

    def take_deliveries(self, visit: Visit) -> None:
        for frame in visit.connection.take_frames():
            self.take_delivery(visit, frame)
        if visit.connection.closed is not None:
            visit.is_open = False

    def take_delivery(self, visit: Visit, frame: dict[str, Any]) -> None:
        """Check one delivery: this session may receive this message now, as this attempt."""
        message, inbox = self.message(frame["message"]["seq"]), self.inboxes[visit.agent]
        seq, attempt = message.seq, inbox.number(message.seq, frame["attempt"])
        assert frame["message"]["content"] == message.frame["content"]
        assert seq > visit.cursor or attempt > 1
        is_again = seq in visit.refused or attempt > 1
        if not is_again:
            assert seq > visit.top, "ascending, each once; nothing new below what the session may acknowledge"
        assert (seq, attempt) not in visit.given
        if message.sender == visit.agent:
            assert message.by is not visit, "who sent it gets only stored"
            assert visit.resumes or seq > visit.head, "own messages count as handled"
        else:
            assert visit.agent in message.recipients
            visit.held.add(seq)
            assert len(visit.held) <= LIMITS["max_unacked"]
            # The attempt is lower if another session failed while this delivery was on its way.
            assert attempt <= inbox.number(seq, inbox.failures.get(seq, 0) + 1)
            if seq in visit.refused:
                assert attempt > max(a for s, a in visit.given if s == seq), "a higher attempt each time"
                # An ack of another session, sent while this delivery was on its way, removes the due time.
                # the latest refusal sets the time for all sessions
                due = min(visit.refused[seq], inbox.due.get(seq, 0))
                assert self.hub.now_ms >= due, "not before it is due"
            if not visit.resumes:
                assert seq not in visit.handled_before, "what was handled does not come from the floor"
        visit.refused.pop(seq, None)
        visit.given.append((seq, attempt))
        self.count("deliveries")

    # --- invariants whenever the hub is idle

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        if not self.is_settled:
            return
        for visit in self.visits:
            if visit.is_welcome and not visit.is_blocked:
                missing = self.must_have(visit) - {seq for seq, _ in visit.given}
                assert not missing, f"{visit.agent} was never given {sorted(missing)}"
                self.check_retries(visit)

    def must_have(self, visit: Visit) -> set[int]:
        """Return the seqs that this session must have received by now."""
        inbox, must = self.inboxes[visit.agent], set()
        for message in self.messages:
            seq = message.seq
            if seq <= visit.cursor or message.by is visit:
                continue
            if message.sender == visit.agent:
                if visit.resumes or seq > visit.head:
                    must.add(seq)
            elif visit.agent in message.recipients:
                is_open = seq not in inbox.handled and seq not in inbox.forgotten
                is_waiting = inbox.due.get(seq, -1) >= self.hub.now_ms - 1
                was_open = visit.settled_at_join is not None and seq not in visit.settled_at_join
                is_elsewhere = seq in inbox.lives and not was_open and self.has_another(visit, seq)
                if (is_open and not is_waiting and not is_elsewhere) or was_open or visit.resumes:
                    must.add(seq)
                    if was_open and not is_open and not visit.resumes:
                        self.count("owed though handled elsewhere")
        return must

    def has_another(self, visit: Visit, seq: int) -> bool:
        """Whether another session of the participant has received this message, or may receive it as soon as it
        reads. A restored dead letter goes to one of the sessions. Sessions that joined while it was dead need not
        receive it.
        """
        others = [
            other for other in self.visits if other.agent == visit.agent and other.is_welcome and other is not visit
        ]
        return any(seq in other.held or other.is_blocked for other in others)

    def check_retries(self, visit: Visit) -> None:
        """Check that each message that this session refused was delivered again to some session, if it is due and not
        handled.
        """
        inbox = self.inboxes[visit.agent]
        others = [other for other in self.visits if other.agent == visit.agent and other.is_welcome]
        for seq in visit.refused:
            is_due = seq in inbox.due and inbox.due[seq] < self.hub.now_ms - 1
            if is_due and not any(seq in other.held or other.is_blocked for other in others):
                raise AssertionError(f"{visit.agent} refused {seq}, and it did not come again")

    def teardown(self) -> None:
        """Let every participant join once more, handle everything, and receive nothing twice."""
        try:
            self.settle()
            for visit in self.visits:
                if visit.is_open:
                    self.hub.hub.disconnect(visit.session)
                    visit.is_open = False
            self.settle()
            for agent in list(self.registered):
                self.handle_all(agent)
        finally:
            self.hub.close()

    def handle_all(self, agent: str) -> None:
        self.arrive(agent, resumes=False, cursor=0)
        self.settle()
        visit, inbox = self.visits[-1], self.inboxes[agent]
        given = -1
        while given < len(visit.given):  # each round is longer than any retry delay
            given = len(visit.given)
            for seq in sorted(visit.held):
                self.hub.receive(visit.session, {"type": "ack", "seq": seq, "only": True})
                visit.held.discard(seq)
                self.handle(agent, [seq])
            self.hub.loop.step(20.0)
            self.settle()
        open_ones = {m.seq for m in self.messages if agent in m.recipients} - set(inbox.handled) - inbox.forgotten
        assert not open_ones, f"{agent} was never given {sorted(open_ones)}"
        self.hub.hub.disconnect(visit.session)
        visit.is_open = False
        self.arrive(agent, resumes=False, cursor=0)
        self.settle()
        assert self.visits[-1].given == [], "what was handled comes again"

    # --- choosing

    def pick_visit(self, pick: int) -> Visit | None:
        visits = [visit for visit in self.visits if visit.is_welcome]
        return visits[pick % len(visits)] if visits else None

    def pick_delivery(self, pick: int, back: int, *, is_held: bool = False) -> tuple[Visit | None, int]:
        """Return a session and the seq of one of its deliveries, or of one of its open messages."""
        visits = [visit for visit in self.visits if visit.is_welcome and (visit.held if is_held else visit.given)]
        if not visits:
            return None, 0
        visit = visits[pick % len(visits)]
        seqs = sorted(visit.held if is_held else {seq for seq, _ in visit.given})
        return visit, seqs[-1 - back % len(seqs)]

    def message(self, seq: int) -> Message:
        return next(message for message in self.messages if message.seq == seq)


class DeliveryOverAFile(Delivery):
    """The delivery state machine with an SQLite ledger."""

    counts: ClassVar[dict[str, int]] = {}

    def make_hub(self) -> SteppedHub:
        self.folder = tempfile.TemporaryDirectory()
        return SteppedHub(LIMITS, Path(self.folder.name) / "team.db")

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.folder.cleanup()


def run(machine: type[Delivery], note: Note, examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine.counts = {}
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
    note(machine=machine.__name__, histories=examples, **machine.counts)


def test_every_session_is_given_what_is_its_own(note: Note) -> None:
    run(Delivery, note, 25, 50)


def test_every_session_is_given_what_is_its_own_over_a_file(note: Note) -> None:
    run(DeliveryOverAFile, note, 3, 50)


def test_a_dead_letter_that_was_just_taken_back_outlives_its_session() -> None:
    """The hub drops a dead letter's first five attempts from its memory. The new attempts must remain."""
    machine = Delivery()
    machine.begin()
    machine.send_some(pick=0, to="agent:bob", number=1, settles=True)
    machine.retry_dead_letter(pick=1, back=0, settles=True)
    assert machine.inboxes["bob"].lives
    machine.teardown()  # bob's session is lost, and the next one must receive the message


def test_a_dead_letter_taken_back_comes_to_one_session_also_where_another_came_while_it_was_dead() -> None:
    machine = Delivery()
    machine.begin()
    machine.send_some(pick=2, to="agent:alice", number=2, settles=True)
    # Keeps alice's ack cursor below the following messages.
    machine.nack(pick=0, number=2, retry_after_ms=700, settles=True)
    machine.send_some(pick=2, to="agent:alice", number=1, settles=True)
    machine.fail_always(pick=0)
    machine.join_network(agent="alice", resumes=False, back=0, settles=True)
    machine.retry_dead_letter(pick=3, back=0, settles=True)
    machine.wait(20.0)
    machine.everything_is_where_it_belongs()
    first, *_, second = (visit for visit in machine.visits if visit.agent == "alice")
    assert [[seq for seq in visit.held if seq in machine.inboxes["alice"].lives] for visit in (first, second)] == [
        [11],
        [],
    ]
    machine.teardown()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_session_is_given_what_is_its_own_in_many_histories(note: Note) -> None:
    run(Delivery, note, 3000, 80)
    run(DeliveryOverAFile, note, 200, 80)
