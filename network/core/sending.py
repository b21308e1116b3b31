"""Rules that decide whether a message is a repeat, whether it is allowed, where it goes, and which budget it uses.

`apply_send` applies these rules to a ``send`` frame. `write_message` accepts any message, also one that a mod's
operation posts. The checks run in the order of docs/protocol.md: repeat, session, rate, named messages, rights,
recipients, the conversation's budget, the day's quota. A refusal is raised as an error, and nothing is stored under the
id of a refused message. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from roundelay.network.addresses import (
    agent_address,
    channel_address,
    conversation_of,
    direct_thread,
    mod_address,
    mod_thread,
    parse_address,
    reply_thread,
    thread_start,
)
from roundelay.network.config import Limits, Registration
from roundelay.network.errors import (
    Forbidden,
    IdConflict,
    InternalError,
    InvalidArguments,
    RoundelayError,
    UnknownMessage,
    UnknownRecipient,
)
from roundelay.network.frames import Follows, SendFrame, StoredFrame, WireMessage, encode
from roundelay.network.units import DAY_MS

from .access import check_right_to_send, find_channel
from .buckets import Bucket
from .conversation_budgets import charge_budget, start_budget
from .entries import Origin, Outcome, Send, SessionReply, body_digest
from .limits import ROW_BYTES, Quotas, count_stored, next_rates
from .mod import Mod, Operation
from .questions import add_questions, remove_answered
from .quiet import close_answered, open_delivery
from .rows import MessageHead, Row, StoredKey
from .state import State
from .tables import ConversationBudget, Facts, TableWrite
from .takeovers import check_may_answer
from .uncaused_answers import count_answer, has_unanswered_news, sends_like_program
from .visibility import has_people, may_read


class Rules(Struct, frozen=True):
    """Fixed inputs of `apply`: limits, quotas, operations, mods and their hooks, the registration policy, and whether
    the hub is read-only."""

    limits: Limits
    quotas: Quotas
    operations: Mapping[str, Operation]
    mods: Mapping[str, Mod]
    before_hooks: tuple[Mod, ...] = ()
    apply_hooks: tuple[Mod, ...] = ()
    ended_hooks: tuple[Mod, ...] = ()
    undelivered_hooks: tuple[Mod, ...] = ()
    deleted_hooks: tuple[Mod, ...] = ()
    removed_hooks: tuple[Mod, ...] = ()
    registration: Registration = "local"
    is_read_only: bool = False
    follows: Callable[[], Follows] | None = None
    """Function that describes the node that this read replica follows. None on a hub that stores entries itself."""


def apply_send(rules: Rules, state: State, facts: Facts, entry: Send) -> Outcome:
    """Return the outcome of a ``send`` frame. If the message is refused, raise the `RoundelayError` of the refusal."""
    origin, frame = entry.origin, entry.frame
    stored = facts.stored.get(entry.key)
    # Answer a repeat before every other check. The message was accepted once, even if it would be refused now.
    if stored is not None:
        if stored.is_damaged or not is_same_send(stored, frame):
            raise repeat_error("message", frame.message_id, stored.seq, is_damaged=stored.is_damaged)
        return Outcome(effects=(_stored_reply(origin, frame, stored, duplicate=True),))
    # Apply a mod's refusal only to a new message. A repeat must succeed, even if the mod has become stricter.
    if entry.refusal is not None:
        raise entry.refusal
    check_session(state, origin)
    row, puts = write_message(rules, state, facts, origin, frame, entry.key[1])
    return Outcome((row,), puts, (_stored_reply(origin, frame, row, duplicate=False),))


def _stored_reply(origin: Origin, frame: SendFrame, row: StoredKey, *, duplicate: bool) -> SessionReply:
    stored = StoredFrame(message_id=frame.message_id, seq=row.seq, thread_id=row.stream, duplicate=duplicate)
    return SessionReply(origin.session_id, encode(stored))


# --- repeats, and sessions that may still send


def is_same_send(stored: StoredKey, frame: SendFrame) -> bool:
    """Return whether a stored message has the same body as a frame. All fields except ``message_id`` and ``metadata``
    are compared, ``content`` byte by byte. An edited or deleted message counts as the same as any frame."""
    message = _stored_message.decode(stored.data)
    # The original content no longer exists, so it cannot be compared with the frame.
    if message.edited_at is not UNSET or message.deleted_at is not UNSET:
        return True
    return (
        message.content == frame.content
        and message.to == frame.to
        and (message.text_representation, message.reply_to, message.cause, message.requires_response)
        == (frame.text_representation, frame.reply_to, frame.cause, frame.requires_response)
        and stored.digest == excluded_digest(frame)
        and (frame.conversation is UNSET or frame.conversation == conversation_of(message.thread_id))
        # A frame without a conversation and without a parent goes to the thread that has no conversation id. If the
        # stored message is in the thread of a conversation, the frame is not a repeat of that message.
        and (frame.conversation is not UNSET or frame.reply_to is not UNSET or not conversation_of(message.thread_id))
    )


_stored_message = msgspec.json.Decoder(WireMessage)


def excluded_digest(frame: SendFrame) -> str:
    """Return a digest of the ids that a ``send`` frame excludes, or an empty string. The digest is stored because the
    stored message does not contain the excluded ids."""
    return "" if frame.exclude_agent_ids is UNSET else body_digest(encode(frame.exclude_agent_ids))


def repeat_error(
    noun: Literal["message", "record", "call"], key: str, seq: int | None, *, is_damaged: bool
) -> RoundelayError:
    """Return the error for a repeated id that cannot get the first answer again. Either the bodies differ, or the
    stored row is damaged and the bodies cannot be compared."""
    if not is_damaged:
        position = f" (seq {seq})" if seq is not None else ""
        return IdConflict(f"{noun}_id {key!r} was used for another {noun}{position}. Choose a new id.")
    position = f"under seq {seq}, " if seq is not None else ""
    return InternalError(
        f"{noun}_id {key!r} was stored, {position}but its row is damaged in the hub's ledger, so the two cannot be "
        "compared. Tell the hub's operator. If this must arrive, send it under a new id."
    )


def check_session(state: State, origin: Origin) -> None:
    """Raise `Forbidden` unless a session may still write. The participant must not be removed, the session's token must
    not be revoked, and no newer session may have superseded a reactor's session.

    The check also covers entries that were waiting for their batch when the hub ended their session. These entries are
    not stored.
    """
    # Example of the fencing tokens of one agent. In `apply_join` each joining reactor session gets the next number:
    #
    #   session     s1      s2                           s3
    #   token        1       2                            3
    #   entries      a   b       c   d        e               f
    #   of           s1  s1      s2  s1: no   s2              s2: no
    #
    # Entry d waited in the batch, or arrived before the connection of s1 was closed. So compare the session's token
    # with the participant's token at the entry's position in the log. A check whether the session is connected would
    # not be enough: two processes could then act for one agent at the same time.
    participant = state.everyone.get(origin.agent_id)
    if participant is None or participant.removed_seq is not None:
        raise Forbidden(f"{origin.agent_id} was removed from this network.")
    # All sessions that joined before the revocation have been ended, but the client may not have received the close
    # frame yet.
    if origin.joined_at < participant.cut_seq:
        raise Forbidden(f"The token of {origin.agent_id} was revoked.")
    if origin.token and (token := state.get("token", origin.token)) is not None and token.revoked:
        raise Forbidden(f"This token of {origin.agent_id} was revoked.")
    if origin.fencing_token is not None and participant.fence != origin.fencing_token:
        raise Forbidden(
            f"A newer reactor of {origin.agent_id} holds the fencing token {participant.fence}. This session's token "
            f"is {origin.fencing_token}, so it stores nothing more."
        )


# --- one message


def write_message(
    rules: Rules, state: State, facts: Facts, origin: Origin, frame: SendFrame, key: str
) -> tuple[Row, list[TableWrite]]:
    """Accept one message. Return the row of the message and all other writes. If the message is refused, raise the
    `RoundelayError` of the refusal."""
    limits, stamp, sender = rules.limits, state.stamp, origin.agent_id
    address_kind, name = parse_address(frame.to)
    bucket = state.bucket(sender)
    # Check the rate before looking up the named messages: a sender beyond its rate must learn nothing about them.
    sends, roots = next_rates(limits, bucket, stamp, is_root=frame.cause is UNSET and origin.kind == "agent")
    writes: list[TableWrite] = []
    parent = find_readable(state, facts, sender, frame.reply_to, "reply_to") if frame.reply_to is not UNSET else None
    cause = find_readable(state, facts, sender, frame.cause, "cause") if frame.cause is not UNSET else None
    if state.rights is not None:
        check_right_to_send(state, origin, address_kind, name)
    destination = _find_destination(rules, state, origin, address_kind, name, parent, frame)
    if origin.kind == "agent" and state.takeovers:
        for thread_id in {destination.thread_id, parent.thread_id} if parent is not None else (destination.thread_id,):
            check_may_answer(state, origin, thread_id, None if cause is None else cause.seq)
    # `head` belongs to the draft, so it counts the rows of earlier entries of this batch.
    seq = state.head + 1
    # Use the root of the stored cause, not a value from the frame. Otherwise a client could escape the budget of its
    # conversation.
    root, hops = (seq, 0) if cause is None else (cause.root, cause.hops + 1)
    head = MessageHead(
        seq=seq,
        sender_id=sender,
        sender_kind=origin.kind,
        kind=destination.kind,
        to=frame.to,
        thread_id=destination.thread_id,
        root=root,
        hops=hops,
        label=seq,
        cause=None if cause is None else cause.seq,
        excluded=destination.excluded,
    )
    if cause is not None:
        # Addressed participants become parties of the conversation, so they may use more of its budget
        # (`conversation_budgets`).
        addressed = (*_named(state, frame), *((name,) if address_kind == "agent" else ()))
        writes.append(charge_message(limits, state, facts, head, cause, sender, addressed))
        # No person reads this thread, so keep the audience of the cause. Otherwise text for one person could become
        # readable for others by passing through programs.
        if not has_people(state, head):
            head = msgspec.structs.replace(head, label=cause.label)
    else:
        if origin.kind == "agent" or (origin.kind == "human" and sends_like_program(limits, bucket, stamp)):
            # Count the message only if the sender has received something since the last counted answer. An agent that
            # receives nothing is not answering anyone.
            heard, last = state.recent_messages, bucket.answer_count.last
            if heard.delivered.get(sender, 0) > last or (
                heard.newest > last and has_unanswered_news(state, sender, last)
            ):
                bucket = count_answer(limits, state, bucket, head)
        if frame.requires_response is not UNSET and (named := _named(state, frame)):
            writes.append(TableWrite("root", str(root), start_budget(head, named)))
    if frame.requires_response is not UNSET:
        writes += add_questions(limits, state, head, frame.requires_response)
    if origin.kind == "human":
        writes += remove_answered(state, head, parent)
    else:
        writes += close_answered(state, head, parent, cause)
    required = frame.requires_response
    writes += open_delivery(limits, state, head, None if required is UNSET else required)
    row = message_row(head, frame, stamp, sender, key)
    size, day = len(row.data) + ROW_BYTES, stamp // DAY_MS
    size_now, messages_now = bucket.bytes + size, bucket.messages + 1
    upto, upto_messages = bucket.next_bytes, bucket.next_messages
    # A mod's own messages have no session. The `ChangeSet` of the mod counts them against the quota.
    if not origin.session_id:
        writes.append(TableWrite("bucket", sender, bucket.at_rates((sends, roots))))
    # Fast path for almost every message: it reaches neither the quota nor the next step at which sums are stored.
    elif size_now < upto and messages_now < upto_messages and day == bucket.day:
        now = Bucket(sends, roots, day, size_now, messages_now, upto, upto_messages, bucket.answer_count)
        writes.append(TableWrite("bucket", sender, now))
    else:
        writes += count_stored(rules.quotas, sender, bucket, (sends, roots), stamp, size, 1)
    return row, writes


def message_row(head: MessageHead, frame: SendFrame, stamp: int, actor: str, key: str = "") -> Row:
    """Build the row of a message from the fields of its frame and its head."""
    thread_id = head.thread_id
    message = WireMessage(
        seq=head.seq,
        message_id=frame.message_id,
        kind=head.kind,  # type: ignore[arg-type]
        sender_id=head.sender_id,
        sender_kind=head.sender_kind,
        to=frame.to,
        thread_id=thread_id,
        reply_to=frame.reply_to,
        cause=frame.cause,
        root=head.root,
        hops=head.hops,
        sent_at=stamp,
        content=frame.content,
        text_representation=frame.text_representation,
        requires_response=frame.requires_response,
    )
    # Set metadata separately. With more than 15 keywords, CPython builds a dict for the call, which costs more than the
    # rest of this function.
    if frame.metadata is not UNSET:
        message = msgspec.structs.replace(message, metadata=frame.metadata)
    return Row(
        seq=head.seq,
        at=stamp,
        type="message",
        actor=actor,
        key=key,
        target=frame.to,
        stream=thread_id,
        label=str(head.label),
        excluded=head.excluded,
        digest="" if frame.exclude_agent_ids is UNSET else excluded_digest(frame),
        data=encode(message),
        head=head,
    )


def mod_message(
    mod: str,
    agent_id: str,
    content: Any,
    *,
    seq: int,
    stamp: int,
    cause: MessageHead | None = None,
    about: int | None = None,
    conversation: str = "",
    text: str | UnsetType = UNSET,
) -> Row:
    """Build the row of a message from a mod, or from the network itself, to one participant.

    With a ``cause``, the message belongs to the conversation of the cause. With ``about``, the seq of a root, the
    message belongs to the conversation of this root but does not use its budget. Without both, the message starts a
    conversation.
    """
    to = agent_address(agent_id)
    root, hops, label, caused_by = (seq, 0, seq, None) if about is None else (about, 1, seq, about)
    if cause is not None:
        root, hops, label, caused_by = cause.root, cause.hops + 1, cause.label, cause.seq
    head = MessageHead(
        seq=seq,
        sender_id=mod,
        sender_kind="service",
        kind="mod",
        to=to,
        thread_id=mod_thread(mod, agent_id, conversation),
        root=root,
        hops=hops,
        label=label,
        cause=caused_by,
    )
    frame = SendFrame(
        message_id=f"{mod}:{seq}",
        to=to,
        content=Raw(encode(content)),
        cause=UNSET if caused_by is None else caused_by,
        text_representation=text,
    )
    return message_row(head, frame, stamp, mod_address(mod))


def _named(state: State, frame: SendFrame) -> tuple[str, ...]:
    """Return the known participants in the list ``requires_response`` of a frame."""
    required = frame.requires_response
    return tuple(name for name in required if state.participant(name) is not None) if isinstance(required, list) else ()


def charge_message(
    limits: Limits,
    state: State,
    facts: Facts,
    head: MessageHead,
    cause: MessageHead,
    spender: str,
    addressed: Sequence[str],
) -> TableWrite:
    """Return the write that charges a message to the budget of its conversation. Raise `BudgetExceeded` if the budget
    does not allow the message."""
    budget = find_budget(state, facts, head.root, cause)
    return TableWrite("root", str(head.root), charge_budget(limits, budget, head, spender, addressed))


def find_budget(state: State, facts: Facts, root: int, message: MessageHead | None = None) -> ConversationBudget:
    """Return the budget of the conversation with a given root. ``message`` is a message of this conversation.

    If no budget is stored, return a new budget. If ``message`` is the root, nothing has been counted yet. Otherwise the
    stored budget was damaged, so the new budget has no owner.
    """
    key = str(root)
    budget: ConversationBudget | None = state.get("root", key) or facts.cold.get(("root", key))
    if budget is None:
        budget = start_budget(message) if message is not None and message.seq == root else ConversationBudget(1, root)
    return budget


def find_readable(state: State, facts: Facts, agent_id: str, seq: int, field: str) -> MessageHead:
    """Return the head of the message with a seq. Raise `UnknownMessage` if the message does not exist or the
    participant may not read it. ``field`` names the frame's field that contains the seq, for the error text."""
    head = facts.heads.get(seq)
    if head is None or not may_read(state, agent_id, head):
        raise UnknownMessage(
            f"There is no message {seq} that {agent_id} may read. {field} must be the seq of a message."
        )
    return head


# --- destination


class _Destination(Struct, frozen=True, gc=False):
    kind: Literal["direct", "broadcast", "channel", "mod"]
    thread_id: str
    excluded: tuple[str, ...] = ()


def _find_destination(
    rules: Rules, state: State, origin: Origin, kind: str, name: str, parent: MessageHead | None, frame: SendFrame
) -> _Destination:
    """Return the destination of a message. Raise an error if the recipient does not exist, if the sender may not write
    to it, or if a reply does not go to the same place as its parent."""
    sender = origin.agent_id
    match kind:
        case "agent":
            recipient = state.everyone.get(name)
            if recipient is None or recipient.removed_seq is not None:
                raise UnknownRecipient(
                    f"Nobody is registered as {name!r}. network.list_agents lists the registered participants."
                )
            destination = _Destination("direct", _find_direct_thread(sender, name, parent, frame))
        case "channel":
            find_channel(state, origin, name)
            if not state.member(name, sender).is_in:
                raise Forbidden(f"{sender} is not a member of the channel {name!r}. Join it first.")
            destination = _Destination("channel", channel_address(name))
        case "mod":
            if name not in rules.mods:
                raise UnknownRecipient(f"This hub has no mod {name!r}. network.info lists its mods.")
            conversation = "" if parent is None else conversation_of(parent.thread_id)
            destination = _Destination("mod", mod_thread(name, sender, conversation))
        case _:
            destination = _Destination("broadcast", "broadcast", _list_excluded(state, frame))
    if parent is None:
        return destination
    is_private = destination.kind in ("direct", "mod")
    is_there = destination.thread_id == parent.thread_id if is_private else frame.to == parent.to
    if destination.kind != parent.kind or not is_there:
        raise InvalidArguments(
            f"reply_to {parent.seq} is in {parent.thread_id}, but the reply goes to {frame.to}. Reply in the same place."
        )
    if is_private:
        return destination
    start = thread_start(parent.thread_id)
    # A reply keeps the exclusions of its thread. Otherwise excluded participants would receive replies, which may quote
    # the thread.
    excluded = tuple(dict.fromkeys((*parent.excluded, *destination.excluded)))
    return _Destination(destination.kind, reply_thread(parent.seq if start is None else start), excluded)


def _find_direct_thread(sender: str, name: str, parent: MessageHead | None, frame: SendFrame) -> str:
    """Return the thread of a direct message. The conversation id comes from the frame or, if the frame has none, from
    the parent."""
    if frame.conversation is not UNSET:
        return direct_thread(sender, name, frame.conversation)
    return direct_thread(sender, name, "" if parent is None else conversation_of(parent.thread_id))


def _list_excluded(state: State, frame: SendFrame) -> tuple[str, ...]:
    """Return the registered participants that a broadcast excludes. Unregistered ids are omitted: they receive nothing
    anyway, and every reply would have to store them."""
    if frame.exclude_agent_ids is UNSET:
        return ()
    return tuple(name for name in dict.fromkeys(frame.exclude_agent_ids) if state.participant(name) is not None)
