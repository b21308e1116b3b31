"""Collects the changes that one entry makes, and builds answers to refused entries.

A `ChangeSet` collects rows, table writes and effects on its own draft of the state. Each step sees the changes of
earlier steps, and one refusal discards all changes. `ChangeSet` implements `mod.Change`, the interface for mods.
`refuse_entry` and `refuse_over_budget` turn a refusal into an outcome that stores nothing under the entry's id but
counts against the sender's rate. Pure.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw

from roundelay.network.addresses import agent_address
from roundelay.network.errors import (
    Forbidden,
    InternalError,
    InvalidArguments,
    RateLimited,
    RetryLater,
    RoundelayError,
    UnknownMessage,
    UnknownRecipient,
)
from roundelay.network.frames import SendFrame, encode, is_id

from .access import check_admission, check_right, find_channel, is_found
from .buckets import Bucket
from .conversation_budgets import BudgetExceeded
from .entries import (
    AnsweredEntry,
    Effect,
    Entry,
    Group,
    Join,
    NotifyMembership,
    Operate,
    Origin,
    Outcome,
    Record,
    RefuseSession,
    Send,
    SendNotice,
    SessionReply,
    error_bytes,
)
from .limits import ROW_BYTES, count_entry, count_stored
from .mod import Incoming, run_before_hooks
from .mod_changes import ModChanges
from .quiet import ItemChanges, open_delivery
from .reserved_ids import NETWORK
from .rows import MessageHead, Row, RowType
from .scheduling import DueTimeChanges
from .sending import Rules, charge_message, find_budget, find_readable, mod_message, write_message
from .state import State
from .tables import (
    MAX_NOTIFIED_THREADS,
    MAX_SPANS,
    Access,
    Channel,
    Facts,
    History,
    Member,
    StoppedConversation,
    Table,
    TableWrite,
    descending_key,
)
from .visibility import parties, thread_readers

log = logging.getLogger(__name__)


def _find_payer(cause: MessageHead) -> str:
    """Return the participant who pays for a mod's answer: the sender of the cause. If a mod sent the cause, the
    recipient of the cause pays."""
    return parties(cause)[0] if cause.kind == "mod" else cause.sender_id


class ChangeSet(ItemChanges, DueTimeChanges, ModChanges):
    """The rows, table writes and effects of one entry. ``state`` is a draft that contains all changes so far."""

    def __init__(
        self, rules: Rules, state: State, facts: Facts, origin: Origin, *, mod_id: str = "", call_id: str = ""
    ) -> None:
        self.rules = rules
        self.state = state.draft()
        self.stamp = state.stamp
        self.origin = origin
        self.prepared: Any = None
        self.mod_id = mod_id
        self.effects: list[Effect] = []
        self.operate: Operate | None = None
        """The call that this change answers, or None if the change does not answer a call."""
        # Messages written by this change. Later steps can use them as a cause or a parent.
        self._heads: dict[int, MessageHead] = {}
        # Chain the maps instead of copying them: the facts of a batch may contain thousands of heads.
        self.facts = Facts(facts.stored, ChainMap(self._heads, facts.heads), facts.cold, facts.damaged)
        self.payer = origin.agent_id
        """Participant whose quota pays for the stored bytes (`limits.count_stored`)."""
        self._unpaid_bytes = self._unpaid_messages = 0
        self._deferred_refusal: RoundelayError | None = None
        """Refusal that is raised only after everything else was accepted and paid for. Such a refusal reveals a secret,
        for example that a closed channel exists. Probing for secrets must not be free."""
        self.absent_ms = 0
        self._call_id = call_id
        self._posts = 0
        self._rows: list[Row] = []
        self._writes: list[TableWrite] = []

    def outcome(self, *effects: Effect) -> Outcome:
        """Return all collected changes. ``effects`` come before the effects that the steps added."""
        return Outcome(self._rows, self._writes, (*effects, *self.effects))

    # --- used by apply

    def add_row(self, row: Row, writes: Sequence[TableWrite]) -> None:
        """Add a row that was built elsewhere, together with its table writes."""
        self._rows.append(row)
        if row.head is not None:
            self._heads[row.seq] = row.head
        # Rows of one change have consecutive seqs: each new row takes its seq from the draft.
        self.state.head = row.seq
        self.add_writes(writes)

    def add_writes(self, writes: Sequence[TableWrite]) -> None:
        """Add writes to the network's tables."""
        self._writes += writes
        self.state.apply_writes(writes)

    def set_call_key(self, keys: Sequence[tuple[str, str]], digest: str) -> None:
        """Store the call's key in the first row whose actor matches one of ``keys``. The key identifies a late repeat
        of the call."""
        for actor, key in keys:
            for number, row in enumerate(self._rows):
                # Skip rows that already have a key, because a message must keep the key of its own id.
                if row.actor == actor and not row.key:
                    self._rows[number] = msgspec.structs.replace(row, key=key, digest=digest)
                    return

    def messages(self) -> list[Row]:
        """Return the messages among the collected rows."""
        return [row for row in self._rows if row.type == "message"]

    def run_apply_hooks(self, messages: Sequence[Row]) -> None:
        """Run every mod's ``apply`` hook for these messages. Messages sent by hooks do not trigger hooks again."""
        own = self.mod_id
        for row in messages:
            for mod in self.rules.apply_hooks:
                self.mod_id = mod.id
                mod.apply(self, row)
        self.mod_id = own

    def run_hooks(
        self, hook: Literal["ended", "undelivered", "removed"], subject: object, *, as_mod: bool = False
    ) -> None:
        """Run a hook that cannot refuse, for every mod that defines it. Each mod gets its own nested change. If the
        hook raises an error, only this nested change is discarded."""
        for mod in getattr(self.rules, f"{hook}_hooks"):
            origin = Origin("", mod.id, "service") if as_mod else self.origin
            change = ChangeSet(self.rules, self.state, self.facts, origin, mod_id=mod.id)
            try:
                getattr(mod, hook)(change, subject)
                # Nobody could receive a refusal, so discard the whole change of this mod.
                if change._deferred_refusal is not None:
                    raise change._deferred_refusal
            except Exception:
                log.exception("a mod's %s hook failed", hook, extra={"mod": mod.id})
            else:
                self._merge(change)

    def _merge(self, other: ChangeSet) -> None:
        """Add all changes of a nested change to this change."""
        for row in other._rows:
            self.add_row(row, ())
        self.add_writes(other._writes)
        self.effects += other.effects
        self._unpaid_bytes += other._unpaid_bytes
        self._unpaid_messages += other._unpaid_messages

    def write_row(
        self, type_: RowType, *, key: str = "", stream: str = "", label: str = "", digest: str = "", data: bytes = b"{}"
    ) -> Row:
        """Add a row of any type except message."""
        row = Row(
            seq=self.state.head + 1,
            at=self.stamp,
            type=type_,
            actor=self.origin.agent_id,
            key=key,
            stream=stream,
            label=label,
            digest=digest,
            data=data,
        )
        self.add_row(row, ())
        self._unpaid_bytes += len(data) + ROW_BYTES
        return row

    def set_value(self, table: Table, key: str, value: Any) -> None:
        """Set a value in one of the network's own tables."""
        self.add_writes((TableWrite(table, key, value),))

    def lookup_cold(self, table: Table, key: str) -> Any:
        """Return a value from a cold table by its key. `apply.build_lookup` must have requested this key."""
        value = self.state.get(table, key, absent := object())
        return self.facts.cold.get((table, key)) if value is absent else value

    def count_send(self) -> None:
        """Count the entry of this change against the sender's rate. Raise `RateLimited` if the rate is exceeded."""
        self.add_writes((count_entry(self.rules.limits, self.state, self.origin.agent_id),))

    def count_stored(self, more_bytes: int = 0, *, is_bounded: bool = True) -> None:
        """Count the stored bytes of this change, plus ``more_bytes``, against the payer's daily quota. Each byte is
        counted only once.

        Raise `BudgetExhausted` if the quota is exceeded. Otherwise raise the deferred refusal, if any.
        """
        size, messages = self._unpaid_bytes + more_bytes, self._unpaid_messages
        if not size:
            return
        bucket = self.state.bucket(self.payer)
        rates, quotas = (bucket.sends, bucket.roots), self.rules.quotas
        self.add_writes(
            count_stored(quotas, self.payer, bucket, rates, self.stamp, size, messages, is_bounded=is_bounded)
        )
        # Reset the counters, so that a second call counts only newer additions.
        self._unpaid_bytes = self._unpaid_messages = 0
        if self._deferred_refusal is not None:
            raise self._deferred_refusal

    def charge_cause(self, seq: int | None) -> None:
        """Charge the data that a mod stored in its own name to the sender of the message ``seq``, if this message is
        known."""
        cause = self.facts.heads.get(seq) if seq is not None else None
        if cause is not None and self.state.participant(cause.sender_id) is not None:
            # Count the stored bytes but never refuse them. The message that caused them was already accepted, and
            # nobody could receive a refusal.
            self.payer = cause.sender_id
            self.count_stored(is_bounded=False)

    # --- mod.Change

    def get(self, key: str) -> Any:
        raw: Raw | None = self.state.get("mod", f"{self.mod_id}/{key}")
        return msgspec.json.decode(raw) if raw is not None else None

    def put(self, key: str, value: object) -> None:
        raw = Raw(encode(value)) if value is not None else None
        if raw is not None:
            self._unpaid_bytes += len(bytes(raw)) + len(key.encode()) + ROW_BYTES
        self.set_value("mod", f"{self.mod_id}/{key}", raw)

    def head(self, seq: int) -> MessageHead:
        return find_readable(self.state, self.facts, self.origin.agent_id, seq, "seq")

    def create_channel(
        self, name: str, *, topic: str = "", history: History = "since_join", access: Access = "open"
    ) -> None:
        if not is_id(name):
            raise InvalidArguments(
                f"{name!r} is not a channel name. Use lower-case letters, digits, '.', '_' and '-', at most 64."
            )
        creator = self.origin.agent_id
        check_right(self.state, self.origin, "create", name)
        created, most = len(self.state.channels_by(creator)), self.rules.quotas.of(creator).max_created_channels
        if created >= most:
            raise Forbidden(
                f"{creator} has created {created} channels. max_created_channels allows {most}. Use an existing "
                f"channel, or ask an operator to raise quotas.{creator}.max_created_channels in the node's file."
            )
        # Check the quota before the name. The refusal of a taken name reveals that a closed channel exists, and a
        # participant who has used up the quota must not be able to test names.
        existing = self.state.channel(name)
        if existing is not None:
            taken = InvalidArguments(
                f"The name {name!r} is taken. Choose another name, or join the channel if you may."
            )
            if is_found(self.state, self.origin, existing):
                raise taken
            self._deferred_refusal = taken
        body = {"channel": name, "event": "created", "topic": topic, "history": history, "access": access}
        row = self.write_row("channel", data=encode(body))
        self.set_value("channel", name, Channel(name, row.seq, creator, topic, history, access, creator))

    def set_channel(
        self,
        name: str,
        *,
        topic: str | None = None,
        history: History | None = None,
        access: Access | None = None,
        owner: str | None = None,
        title: str | None = None,
    ) -> None:
        """Set the given fields of a channel. Raise `UnknownRecipient` if the channel does not exist."""
        channel = self._channel(name)
        fields = {"topic": topic, "history": history, "access": access, "owner": owner, "title": title}
        changed = msgspec.structs.replace(
            channel, **{name: value for name, value in fields.items() if value is not None}
        )
        body = {"channel": name, "event": "set", "topic": changed.topic, "history": changed.history}
        if channel.title or changed.title:
            body["title"] = changed.title
        self.write_row("channel", data=encode({**body, "access": changed.access, "owner": changed.owner}))
        self.set_value("channel", name, changed)
        if (changed.history, changed.access, changed.title) != (channel.history, channel.access, channel.title):
            self.effects.append(NotifyMembership(name, None))

    def invite_to_channel(self, name: str, agent_id: str) -> None:
        """Invite a participant to a channel. Do nothing for members and for participants who are already invited. Raise
        `UnknownRecipient` if the channel or the participant does not exist."""
        self._channel(name)
        member = self.state.member(name, agent_id)
        if member.is_in or member.standing == "invited":
            return
        if self.state.present(agent_id) is None:
            raise UnknownRecipient(
                f"Nobody is registered as {agent_id!r}. network.list_agents lists the registered participants."
            )
        self.write_row("channel", data=encode({"channel": name, "event": "invited", "agent_id": agent_id}))
        self.set_value("member", f"{name}/{agent_id}", Member(member.spans, "invited"))

    def remove_from_channel(self, name: str, agent_id: str) -> None:
        channel = self._channel(name)
        member = self.state.member(name, agent_id)
        if not member.is_in and member.standing != "invited":
            raise InvalidArguments(
                f"{agent_id!r} is neither in the channel {name!r} nor invited to it, so it cannot be removed."
            )
        row = self.write_row(
            "left" if member.is_in else "channel",
            data=encode({"channel": name, "agent_id": agent_id, "event": "removed"}),
        )
        self.effects.append(NotifyMembership(name, agent_id))
        # Keep the spans: a removed member may still read messages from the time of its membership.
        spans = member.left(row.seq).spans if member.is_in else member.spans
        self.set_value("member", f"{name}/{agent_id}", Member(spans, "removed"))
        if agent_id == (channel.created_by if channel.owner is None else channel.owner):
            # Use an empty string, not None. An empty owner means that the owner was removed from the channel.
            self.set_value("channel", name, msgspec.structs.replace(channel, owner=""))

    def join_channel(self, name: str, agent_id: str) -> None:
        is_own = agent_id == self.origin.agent_id  # mods may add other participants without these checks
        if is_own:
            check_right(self.state, self.origin, "join", name)
        channel = self._channel(name)
        member = self.state.member(name, agent_id)
        if member.is_in:
            return
        if is_own:
            check_admission(self.state, self.origin, channel)
        joined = member.joined(self.state.head + 1)
        if len(joined.spans) > MAX_SPANS:
            raise Forbidden(
                f"{agent_id} has joined the channel {name!r} {MAX_SPANS} times, which is the maximum. Use another "
                "channel and stay in it."
            )
        self.write_row("joined", data=encode({"channel": name, "agent_id": agent_id}))
        self.set_value("member", f"{name}/{agent_id}", joined)
        self.effects.append(NotifyMembership(name, agent_id))

    def leave_channel(self, name: str, agent_id: str) -> None:
        """End a membership of a channel. Do nothing for participants who are not members."""
        self._channel(name)
        member = self.state.member(name, agent_id)
        if not member.is_in:
            return
        row = self.write_row("left", data=encode({"channel": name, "agent_id": agent_id}))
        self.set_value("member", f"{name}/{agent_id}", member.left(row.seq))
        self.effects.append(NotifyMembership(name, agent_id))

    def post(self, to: str, content: object, *, reply_to: int | None = None, cause: int | None = None) -> Row:
        self._posts += 1
        number = f"{self._posts}:" if self._posts > 1 else ""
        # Derive the id from the call or the position, never from randomness. A replay must produce the same message.
        message_id = (
            f"call:{number}{self._call_id}"[:128] if self._call_id else f"mod:{self.mod_id}:{self.state.head + 1}"
        )
        frame = SendFrame(
            message_id=message_id,
            to=to,
            content=Raw(encode(content)),
            reply_to=UNSET if reply_to is None else reply_to,
            cause=UNSET if cause is None else cause,
        )
        refusal = run_before_hooks(self.rules.before_hooks, Incoming(self.origin, frame))
        if refusal is not None:
            raise refusal
        # Use no key. The call's own id already makes the message idempotent (`set_call_key`), and a key could collide
        # with a client's key.
        row, writes = write_message(self.rules, self.state, self.facts, self.origin, frame, "")
        self.add_row(row, writes)
        if not self.origin.session_id:
            self._count_message(row)
        return row

    def _count_message(self, row: Row) -> None:
        self._unpaid_bytes += len(row.data) + ROW_BYTES
        self._unpaid_messages += 1

    def answer(self, agent_id: str, content: object, *, cause: int | None = None, conversation: str = "") -> Row:
        if self.state.present(agent_id) is None:
            raise UnknownRecipient(f"Nobody is registered as {agent_id!r}.")
        seq = self.state.head + 1
        origin = self.facts.heads.get(cause) if cause is not None else None
        if cause is not None and origin is None:
            raise UnknownMessage(
                f"This change does not know message {cause}. docs/mods.md says which messages may be a cause."
            )
        row = mod_message(
            self.mod_id, agent_id, content, seq=seq, stamp=self.stamp, cause=origin, conversation=conversation
        )
        writes = []
        if origin is not None and row.head is not None:  # charge the participant whom the mod answers
            limits, payer = self.rules.limits, _find_payer(origin)
            writes.append(charge_message(limits, self.state, self.facts, row.head, origin, payer, ()))
        if row.head is not None:
            writes += open_delivery(self.rules.limits, self.state, row.head)
        self.add_row(row, writes)
        self._count_message(row)
        return row

    def notify(self, agent_id: str, content: object, *, cause: int | None = None, conversation: str = "") -> Row | None:
        if self.state.present(agent_id) is None:
            return None
        try:
            return self.answer(
                agent_id, content, cause=cause if cause in self.facts.heads else None, conversation=conversation
            )
        except BudgetExceeded:
            return None

    def _channel(self, name: str) -> Channel:
        return find_channel(self.state, self.origin, name)


def refuse_entry(rules: Rules, state: State, entry: AnsweredEntry, error: RoundelayError) -> Outcome:
    """Return the outcome of a refusal: an error for the sender, and one count against the sender's rate. Refusals count
    because a wrong request costs the hub as much as a correct one.

    If the sender exceeds its rate, the error is always `RateLimited`, whatever else is wrong with the entry.
    """
    origin = entry.origin
    writes: list[TableWrite] = []
    # Do not count `RetryLater`: it is the hub's fault, and the sender would pay twice for the same request.
    if not isinstance(error, RetryLater):
        try:
            writes = [count_entry(rules.limits, state, origin.agent_id)]
        # Report the exceeded rate instead of the original error, because the client must slow down first.
        except RateLimited as limited:
            error = limited
    return Outcome(writes=writes, effects=(SessionReply(origin.session_id, error_bytes(error, entry.keys)),))


def refuse_over_budget(
    rules: Rules, state: State, facts: Facts, entry: AnsweredEntry, error: BudgetExceeded
) -> Outcome:
    """Return the outcome of a message that exceeds a budget. The sender gets an error that counts against its rate.

    Once per limit, the participant who began the conversation gets a message, and operators get a notice. Once per
    thread, the readers of the thread get a notice.
    """
    refused = refuse_entry(rules, state, entry, error)
    if error.bound == "uncaused":
        return _stop_agent(rules, state, entry.origin, error, refused)
    head = error.head
    if head.root > state.head:  # the refused message would have started the conversation, so nobody has to be notified
        return refused
    # Read the stored budget. The refused change counted on a draft that is discarded.
    budget = find_budget(state, facts, head.root, facts.heads.get(head.root))
    is_news = error.bound not in budget.told
    # Notify at most `MAX_NOTIFIED_THREADS` threads. The first threads are those of the conversation's own members.
    is_new_here = head.thread_id not in budget.stopped_in and len(budget.stopped_in) < MAX_NOTIFIED_THREADS
    if not (is_news or is_new_here):
        return refused
    rows, writes, effects = list(refused.rows), list(refused.writes), list(refused.effects)
    body: dict[str, Any] = {
        "root": head.root,
        "seq": budget.last_seq,
        **_describe_stop(error),
        "began_by": budget.began_by,
    }
    if is_news:
        writes.append(TableWrite("stopped", stopped_key(head.root), StoppedConversation(at=state.stamp, **body)))
        if state.present(budget.began_by) is not None:
            rows.append(_write_notice(state, state.head + 1, budget.began_by, body, error.notice, root=head.root))
            writes += _open_notice(rules, state, rows[-1])
    readers = thread_readers(state, head) if is_new_here else set()
    effects.append(SendNotice(frozenset(readers), "loop_stopped", head.thread_id, body, to_operators=is_news))
    reported = (*budget.told, error.bound) if is_news else budget.told
    stopped_in = (*budget.stopped_in, head.thread_id) if is_new_here else budget.stopped_in
    writes.append(
        TableWrite("root", str(head.root), msgspec.structs.replace(budget, told=reported, stopped_in=stopped_in))
    )
    return Outcome(rows, writes, effects)


def stopped_key(root: int) -> str:
    """Return the key of a stopped conversation. Newer conversations sort first."""
    return descending_key(root)


def _stop_agent(rules: Rules, state: State, origin: Origin, error: BudgetExceeded, refused: Outcome) -> Outcome:
    """Return the outcome for an agent that is stopped because its answers have no cause. The agent and the person who
    wrote to it last get a message."""
    head = error.head
    bucket: Bucket = refused.writes[0].value if refused.writes else state.bucket(origin.agent_id)
    # Notify once per stop. Otherwise a loop would send its operators a message for each refused answer.
    if bucket.answer_count.is_reported:
        return refused
    stopped = msgspec.structs.replace(
        bucket, answer_count=msgspec.structs.replace(bucket.answer_count, is_reported=True)
    )
    body = {"agent_id": origin.agent_id, **_describe_stop(error)}
    person = state.recent_messages.from_people.get(agent_address(origin.agent_id), (0, ""))[1]
    names = [name for name in dict.fromkeys((origin.agent_id, person)) if state.present(name) is not None]
    rows = [
        _write_notice(state, state.head + 1 + offset, name, body, error.notice) for offset, name in enumerate(names)
    ]
    notice = SendNotice(frozenset(thread_readers(state, head)), "loop_stopped", head.thread_id, body, to_operators=True)
    writes = [TableWrite("bucket", origin.agent_id, stopped)]
    writes += [write for row in rows for write in _open_notice(rules, state, row)]
    return Outcome(rows, writes, (*refused.effects, notice))


def _describe_stop(error: BudgetExceeded) -> dict[str, Any]:
    """Return the details of an exceeded budget for the notices about the stop."""
    return {"reason": str(error), "limit": f"limits.{error.limit}", "used_by": error.used_by, "used": error.used}


def _write_notice(
    state: State, seq: int, agent_id: str, body: dict[str, Any], text: str, *, root: int | None = None
) -> Row:
    """Return the network's message to one participant about a stopped conversation. The message belongs to the
    conversation but is not charged to its budget. Replies to the message are refused, so it cannot start a loop."""
    content = {"kind": "loop_stopped", **body}
    return mod_message(NETWORK, agent_id, content, seq=seq, stamp=state.stamp, about=root, text=text)


def _open_notice(rules: Rules, state: State, row: Row) -> list[TableWrite]:
    return open_delivery(rules.limits, state, row.head) if row.head is not None else []


def refuse_after_defect(entry: Entry, quote: str) -> Outcome:
    """Return the outcome of an entry on which the hub itself failed. The sender gets an id to quote to the operator."""
    error = InternalError(f"The hub failed on this frame and changed nothing. Quote {quote} to its operator.")
    return refuse_unstored(entry, error, 1011)


def refuse_unstored(entry: Entry, error: RoundelayError, code: int) -> Outcome:
    """Return the outcome of an entry that could not be stored: an error for the sender. A ``hello`` is refused, and its
    connection is closed with ``code``."""
    match entry:
        case Send() | Record() | Group() | Operate():
            return Outcome(effects=(SessionReply(entry.origin.session_id, error_bytes(error, entry.keys)),))
        case Join():
            return Outcome(effects=(RefuseSession(entry.session_id, code, error),))
        case _:
            return Outcome()
