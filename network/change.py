"""What a change is made of, inside `apply`: messages and rows in the making, on a draft that one refusal throws away.

`write_message` is the one place where a message is accepted, whether it came in a ``send`` or from a mod's operation. `ChangeSet`
implements `mod.Change`. Pure, as `apply` is.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from .config import Limits
from .entries import Effect, Origin, Outcome
from .errors import Forbidden, InvalidArguments, LoopStopped, UnknownMessage, UnknownRecipient
from .frames import SendFrame, WireMessage, encode, is_id
from .guard import SENDS, check_root, next_arrival, parse_address
from .ledger import Row, RowType
from .mod import Incoming, Mod, Operation, ask_before
from .quotas import ROW_BYTES, Quotas, count_stored, read_bucket
from .state import State
from .tables import MAX_SPANS, Bucket, Channel, Facts, MessageHead, Put, RootBudget, Table
from .visibility import anchor, direct_thread, has_people, may_read, mod_thread


class Rules(Struct, frozen=True):
    """What `apply` is told once: the limits, who may store how much, the operations that change something, the mods, and which have hooks."""

    limits: Limits
    quotas: Quotas
    operations: Mapping[str, Operation]
    mods: Mapping[str, Mod]
    before_hooks: tuple[Mod, ...] = ()
    apply_hooks: tuple[Mod, ...] = ()


class RootStopped(LoopStopped):
    """`LoopStopped`, with the message that would have been one too many."""

    def __init__(self, error: LoopStopped, head: MessageHead) -> None:
        super().__init__(str(error))
        self.head = head


class _Place(Struct, frozen=True, gc=False):
    kind: Literal["direct", "broadcast", "channel", "mod"]
    thread_id: str
    excluded: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def _direct_place(sender: str, name: str) -> _Place:
    return _Place("direct", direct_thread(sender, name))


def write_message(
    rules: Rules, state: State, facts: Facts, origin: Origin, frame: SendFrame, digest: str, key: str | None = None
) -> tuple[Row, list[Put]]:
    """Accept one message from a participant: its row, and what else it changes. Raises the `RoundelayError` that refuses it."""
    limits, stamp, sender = rules.limits, state.stamp, origin.agent_id
    address_kind, name = parse_address(frame.to)
    bucket = count_rates(limits, state, origin, stamp, frame.cause is UNSET)
    puts: list[Put] = []
    parent = _readable(state, facts, sender, frame.reply_to, "reply_to") if frame.reply_to is not UNSET else None
    cause = _readable(state, facts, sender, frame.cause, "cause") if frame.cause is not UNSET else None
    place = _find_place(rules, state, sender, address_kind, name, parent, frame)
    seq = state.head + 1
    root, hops = (seq, 0) if cause is None else (cause.root, cause.hops + 1)
    head = MessageHead(
        seq=seq, sender_id=sender, sender_kind=origin.kind, kind=place.kind, to=frame.to, thread_id=place.thread_id, root=root,
        hops=hops, label=seq, cause=cause.seq if cause is not None else None, excluded=place.excluded,
    )  # fmt: skip
    if cause is not None:
        puts.append(_charge_root(limits, state, facts, head))
        if not has_people(state, head):
            head = msgspec.structs.replace(head, label=cause.label)
    message = WireMessage(
        seq=seq, message_id=frame.message_id, kind=place.kind, sender_id=sender, sender_kind=origin.kind, to=frame.to,
        thread_id=place.thread_id, reply_to=frame.reply_to, cause=frame.cause, root=root, hops=hops, sent_at=stamp,
        content=frame.content, text_representation=frame.text_representation, requires_response=frame.requires_response,
    )  # fmt: skip
    # apart: CPython makes a dict for a call with more than 15 keywords, which costs more than all the rest of this message
    if frame.metadata is not UNSET:
        message = msgspec.structs.replace(message, metadata=frame.metadata)
    data = encode(message)
    if origin.session_id:
        puts += count_stored(rules.quotas, sender, bucket, stamp, len(data) + ROW_BYTES, 1)
    else:  # a mod's own: whose message it follows from is told by its `ChangeSet`
        puts.append(Put("bucket", sender, bucket))
    row = Row(
        seq=seq, at=stamp, type="message", actor=sender, key="m:" + frame.message_id if key is None else key, target=frame.to,
        stream=place.thread_id, label=str(head.label), excluded=place.excluded, digest=digest, data=data, head=head,
    )  # fmt: skip
    return row, puts


def _charge_root(limits: Limits, state: State, facts: Facts, head: MessageHead) -> Put:
    """Count a message against its root's budget. Raises `RootStopped`."""
    budget = find_budget(state, facts, head.root)
    try:
        check_root(budget, head.root, head.hops, limits.max_hops, limits.max_root_messages)
    except LoopStopped as error:
        raise RootStopped(error, head) from error
    return Put("root", str(head.root), msgspec.structs.replace(budget, messages=budget.messages + 1, last_seq=head.seq))


def find_budget(state: State, facts: Facts, root: int) -> RootBudget:
    """What the conversation from a root has used."""
    key = str(root)
    budget: RootBudget = state.get("root", key) or facts.cold.get(("root", key)) or RootBudget(1, root)
    return budget


def count_rates(limits: Limits, state: State, origin: Origin, stamp: int, is_root: bool) -> Bucket:
    """Count one entry against its sender's rates: of everything, and of messages without a cause."""
    bucket: Bucket = state.get("bucket", origin.agent_id) or read_bucket(state, origin.agent_id)
    sends = next_arrival(bucket.sends, stamp, limits.sends_per_s, SENDS)
    roots = bucket.roots
    if is_root and origin.kind == "agent":
        roots = next_arrival(roots, stamp, limits.root_messages_per_s, "messages without a cause (root_messages_per_s)")
    return Bucket(sends, roots, bucket.day, bucket.bytes, bucket.messages)


def _readable(state: State, facts: Facts, agent_id: str, seq: int, field: str) -> MessageHead:
    head = facts.heads.get(seq)
    if head is None or not may_read(state, agent_id, head):
        raise UnknownMessage(f"There is no message {seq} that {agent_id} may read; {field} is the seq of one.")
    return head


def _find_place(
    rules: Rules, state: State, sender: str, kind: str, name: str, parent: MessageHead | None, frame: SendFrame
) -> _Place:
    """Where the message goes: recipients exist, the sender may write there, and a reply stays where its parent is."""
    match kind:
        case "agent":
            if state.present(name) is None:
                raise UnknownRecipient(f"Nobody is registered as {name!r}; network.list_agents lists who is.")
            place = _direct_place(sender, name)
        case "channel":
            if state.channel(name) is None:
                raise UnknownRecipient(
                    f"There is no channel {name!r}; channels.list lists them, channels.create makes one."
                )
            if not state.member(name, sender).is_in:
                raise Forbidden(f"{sender} is not a member of the channel {name!r}; join it first.")
            place = _Place("channel", f"channel:{name}")
        case "mod":
            if name not in rules.mods:
                raise UnknownRecipient(f"This hub has no mod {name!r}; network.info lists its mods.")
            place = _Place("mod", mod_thread(name, sender))
        case _:
            place = _Place("broadcast", "broadcast", _left_out(state, frame))
    if parent is None:
        return place
    if not _is_same_place(sender, frame.to, place, parent):
        raise InvalidArguments(
            f"reply_to {parent.seq} is in {parent.thread_id}, and {frame.to} is not; reply to where it is."
        )
    if place.kind in ("direct", "mod"):
        return place
    start = anchor(parent.thread_id)
    excluded = tuple(dict.fromkeys((*parent.excluded, *place.excluded)))
    return _Place(place.kind, f"thread:{parent.seq if start is None else start}", excluded)


def _left_out(state: State, frame: SendFrame) -> tuple[str, ...]:
    """Whom a broadcast leaves out. Others than participants would not hear it anyway, and their names would be kept by every reply too."""
    if frame.exclude_agent_ids is UNSET:
        return ()
    return tuple(name for name in dict.fromkeys(frame.exclude_agent_ids) if state.participant(name) is not None)


def _is_same_place(sender: str, to: str, place: _Place, parent: MessageHead) -> bool:
    if place.kind != parent.kind:
        return False
    if place.kind in ("direct", "mod"):
        return place.thread_id == parent.thread_id
    return to == parent.to


class ChangeSet:
    """One entry's change in the making: rows, puts and effects, seen by its own later steps through ``state``."""

    def __init__(
        self, rules: Rules, state: State, facts: Facts, origin: Origin, *, mod_id: str = "", call_id: str = ""
    ) -> None:
        self.rules = rules
        self.state = state.draft()
        self.stamp = state.stamp
        self.origin = origin
        self.mod_id = mod_id
        self.effects: list[Effect] = []
        # what this change writes itself is known to its later steps: as a cause, or to be replied to
        self._heads: dict[int, MessageHead] = {}
        self.facts = Facts(facts.known, ChainMap(self._heads, facts.heads), facts.cold, facts.damaged)
        self.payer = origin.agent_id
        """For whom it is stored, as `quotas` counts."""
        self._unpaid_bytes = self._unpaid_messages = 0
        self._call_id = call_id
        self._posts = 0
        self._rows: list[Row] = []
        self._puts: list[Put] = []

    def outcome(self, *effects: Effect) -> Outcome:
        """Everything gathered; ``effects`` come before those that its steps added."""
        return Outcome(self._rows, self._puts, (*effects, *self.effects))

    # --- for apply

    def take(self, row: Row, puts: Sequence[Put]) -> None:
        """Add a row made elsewhere, with its puts."""
        self._rows.append(row)
        if row.head is not None:
            self._heads[row.seq] = row.head
        self.state.head = row.seq
        self._puts += puts
        self.state.change(puts)

    def sign(self, keys: Sequence[tuple[str, str]], digest: str) -> None:
        """Let the first row whose actor has one of these keys stand for the whole call: by it a late repeat is recognised."""
        for actor, key in keys:
            for number, row in enumerate(self._rows):
                if row.actor == actor and not row.key:
                    self._rows[number] = msgspec.structs.replace(row, key=key, digest=digest)
                    return

    def messages(self) -> list[Row]:
        """The messages among the rows so far."""
        return [row for row in self._rows if row.type == "message"]

    def run_apply_hooks(self, messages: Sequence[Row]) -> None:
        """Let every mod's ``apply`` see these messages; what hooks send themselves is not shown to hooks again."""
        own = self.mod_id
        for row in messages:
            for mod in self.rules.apply_hooks:
                self.mod_id = mod.id
                mod.apply(self, row)
        self.mod_id = own

    def write_row(
        self, type_: RowType, *, key: str = "", stream: str = "", label: str = "", digest: str = "", data: bytes = b"{}"
    ) -> Row:
        """Add a row that is no message."""
        row = Row(
            seq=self.state.head + 1, at=self.stamp, type=type_, actor=self.origin.agent_id, key=key, stream=stream, label=label,
            digest=digest, data=data,
        )  # fmt: skip
        self.take(row, ())
        self._unpaid_bytes += len(data) + ROW_BYTES
        return row

    def put_row(self, table: Table, key: str, value: Any) -> None:
        """Change a table of the network's."""
        put = Put(table, key, value)
        self._puts.append(put)
        self.state.change((put,))

    def find_cold(self, table: Table, key: str) -> Any:
        """A value of a table that is not loaded; `apply.wanted` must have asked for it."""
        found = self.state.get(table, key, absent := object())
        return self.facts.cold.get((table, key)) if found is absent else found

    def count_send(self) -> None:
        """Count this entry against the sender's rate. Raises `RateLimited`."""
        bucket = count_rates(self.rules.limits, self.state, self.origin, self.stamp, is_root=False)
        self.put_row("bucket", self.origin.agent_id, bucket)

    def count_stored(self, more_bytes: int = 0, *, is_bounded: bool = True) -> None:
        """Count all that this change stores, and ``more_bytes``, against the day of whoever asked for it: what it has not counted yet.

        Raises `BudgetExhausted` when it is more than that one may.
        """
        size, messages = self._unpaid_bytes + more_bytes, self._unpaid_messages
        if not size:
            return
        bucket = read_bucket(self.state, self.payer)
        puts = count_stored(self.rules.quotas, self.payer, bucket, self.stamp, size, messages, is_bounded=is_bounded)
        self._unpaid_bytes = self._unpaid_messages = 0
        self._puts += puts
        self.state.change(puts)

    # --- mod.Change

    def get(self, key: str) -> Any:
        raw: Raw | None = self.state.get("mod", f"{self.mod_id}/{key}")
        return msgspec.json.decode(raw) if raw is not None else None

    def put(self, key: str, value: object) -> None:
        raw = Raw(encode(value)) if value is not None else None
        if raw is not None:
            self._unpaid_bytes += len(bytes(raw)) + len(key) + ROW_BYTES
        self.put_row("mod", f"{self.mod_id}/{key}", raw)

    def head(self, seq: int) -> MessageHead:
        return _readable(self.state, self.facts, self.origin.agent_id, seq, "seq")

    def create_channel(
        self, name: str, *, topic: str = "", history: Literal["since_join", "members"] = "since_join"
    ) -> None:
        if not is_id(name):
            raise InvalidArguments(
                f"{name!r} is no channel name; use lower case letters, digits, '.', '_', '-', at most 64."
            )
        if self.state.channel(name) is not None:
            raise InvalidArguments(f"The channel {name!r} exists; join it with channels.join.")
        creator = self.origin.agent_id
        created, most = len(self.state.channels_by(creator)), self.rules.quotas.of(creator).max_created_channels
        if created >= most:
            raise Forbidden(
                f"{creator} has created {created} channels, and max_created_channels allows it {most}; use one of those that there are, or let "
                f"an operator allow more: quotas.{creator}.max_created_channels in the node's file."
            )
        body = {"channel": name, "event": "created", "topic": topic, "history": history}
        row = self.write_row("channel", data=encode(body))
        self.put_row("channel", name, Channel(name, row.seq, self.origin.agent_id, topic, history))

    def set_channel(
        self, name: str, *, topic: str | None = None, history: Literal["since_join", "members"] | None = None
    ) -> None:
        channel = self._channel(name)
        changed = msgspec.structs.replace(
            channel,
            topic=channel.topic if topic is None else topic,
            history=channel.history if history is None else history,
        )
        self.write_row(
            "channel",
            data=encode({"channel": name, "event": "set", "topic": changed.topic, "history": changed.history}),
        )
        self.put_row("channel", name, changed)

    def join_channel(self, name: str, agent_id: str) -> None:
        self._channel(name)
        member = self.state.member(name, agent_id)
        if member.is_in:
            return
        joined = member.joined(self.state.head + 1)
        if len(joined.spans) > MAX_SPANS:
            raise Forbidden(
                f"{agent_id} has come to the channel {name!r} {MAX_SPANS} times, with messages in between, and no more is kept; "
                f"talk in another channel, and stay in it."
            )
        self.write_row("joined", data=encode({"channel": name, "agent_id": agent_id}))
        self.put_row("member", f"{name}/{agent_id}", joined)

    def leave_channel(self, name: str, agent_id: str) -> None:
        self._channel(name)
        member = self.state.member(name, agent_id)
        if not member.is_in:
            return
        row = self.write_row("left", data=encode({"channel": name, "agent_id": agent_id}))
        self.put_row("member", f"{name}/{agent_id}", member.left(row.seq))

    def post(self, to: str, content: object, *, reply_to: int | None = None, cause: int | None = None) -> Row:
        self._posts += 1
        number = f"{self._posts}:" if self._posts > 1 else ""
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
        refusal = ask_before(self.rules.before_hooks, Incoming(self.origin, frame))
        if refusal is not None:
            raise refusal
        # the call's own id makes it idempotent (`sign`): the message needs no key, and cannot meet a client's
        row, puts = write_message(self.rules, self.state, self.facts, self.origin, frame, "", key="")
        self.take(row, puts)
        if not self.origin.session_id:
            self._count_message(row)
        return row

    def _count_message(self, row: Row) -> None:
        self._unpaid_bytes += len(row.data) + ROW_BYTES
        self._unpaid_messages += 1

    def answer(self, agent_id: str, content: object, *, cause: int | None = None) -> Row:
        if self.state.present(agent_id) is None:
            raise UnknownRecipient(f"Nobody is registered as {agent_id!r}.")
        seq = self.state.head + 1
        origin = self.facts.heads.get(cause) if cause is not None else None
        if cause is not None and origin is None:
            raise UnknownMessage(f"There is no message {cause} here; docs/mods.md says which may be a cause.")
        root, hops, label = (seq, 0, seq) if origin is None else (origin.root, origin.hops + 1, origin.label)
        thread_id = mod_thread(self.mod_id, agent_id)
        head = MessageHead(
            seq=seq, sender_id=self.mod_id, sender_kind="service", kind="mod", to=f"agent:{agent_id}", thread_id=thread_id,
            root=root, hops=hops, label=label, cause=origin.seq if origin is not None else None,
        )  # fmt: skip
        message = WireMessage(
            seq=seq, message_id=f"{self.mod_id}:{seq}", kind="mod", sender_id=self.mod_id, sender_kind="service", to=head.to,
            thread_id=thread_id, cause=UNSET if head.cause is None else head.cause, root=root, hops=hops, sent_at=self.stamp,
            content=Raw(encode(content)),
        )  # fmt: skip
        row = Row(
            seq=seq, at=self.stamp, type="message", actor=f"mod:{self.mod_id}", target=head.to, stream=thread_id,
            label=str(label), data=encode(message), head=head,
        )  # fmt: skip
        self.take(row, [_charge_root(self.rules.limits, self.state, self.facts, head)] if origin is not None else ())
        self._count_message(row)
        return row

    def _channel(self, name: str) -> Channel:
        channel = self.state.channel(name)
        if channel is None:
            raise UnknownRecipient(
                f"There is no channel {name!r}; channels.list lists them, channels.create makes one."
            )
        return channel
