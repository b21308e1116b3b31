"""Rules that decide whether a conversation is quiet. A conversation is quiet if it has no open items. Pure.

Open items are stored in four tables. The table ``delivery`` contains messages that an agent has not handled.
``reaction`` contains running reactions, ``question`` unanswered questions to people, and ``open_item`` the items of
mods. `State` groups these values by the root of their conversation, and a conversation is quiet when its group is
empty. Each write updates one group, and nothing is scanned.
"""

# Example of one conversation. As in the termination detection of Dijkstra and Scholten, an agent first opens the items
# that it causes, and then closes the item that it works on.
#
#   entry                            delivery       reaction     open in the conversation
#   10 ann asks bob                  10: bob                     1
#   11 bob starts (trigger 10)       -              bob/r        1
#   12 bob asks cat (cause 10)       12: cat        bob/r        2
#   13 cat starts (trigger 12)       -              bob, cat     2
#   14 cat answers bob (cause 12)    14: bob        bob, cat     3
#   15 cat finishes                  14: bob        bob/r        2
#   -- bob acknowledges 14           -              bob/r        1
#   16 bob answers ann, 17 finishes  -              -            0: quiet
#
# The commit that starts a reaction also handles its trigger. A message without a reaction is handled when the ack
# cursor is stored, up to half a second after the ack. People do not acknowledge that they have handled a message, so
# only a required response is an open item for them. The same applies to programs that are not reactors, such as coding
# agents with hooks and clients over HTTP.

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import nsmallest

import msgspec

from roundelay.network.addresses import name_of, parse_address
from roundelay.network.config import Limits
from roundelay.network.errors import InvalidArguments

from .ack_cursor import AckCursor
from .limits import ROW_BYTES
from .open_items import OpenDelivery, OpenItem
from .questions import EVICTION_SHARE, MAX_ASKED
from .rows import MessageHead
from .state import State
from .tables import Attempt, TableWrite
from .visibility import is_recipient

MAX_DELIVERIES = 10_000
"""Maximum number of unhandled messages that are tracked for one reactor. Beyond the maximum, the oldest messages are
forgotten, and their conversations may count as quiet too early. Without a maximum, messages to an agent that never
returns would fill the memory."""
MAX_ITEM_KEY, MAX_ITEM_KIND, MAX_ITEM_NOTE = 128, 32, 200
"""Maximum lengths of an item's key, kind and note, in characters."""
MAX_MOD_ITEMS = 10_000
"""Maximum number of open items of one mod."""


# --- deliveries


def open_delivery(limits: Limits, state: State, head: MessageHead, required: object = None) -> list[TableWrite]:
    """Return the writes that record which participants have to handle a new message. ``required`` is the message's
    field ``requires_response``."""
    # Fast path for nearly every message: it goes to one participant who is not a reactor, and requires no response.
    if head.kind == "direct" and required is None:
        name = name_of(head.to)
        recipient = state.everyone.get(name)
        if recipient is None or not recipient.fence or name == head.sender_id:
            return []
        waiting: tuple[str, ...] = (name,)
        answers: tuple[str, ...] = ()
    else:
        waiting = tuple(_list_reactors(state, head))
        answers = tuple(_list_answering(state, head, required)) if required is not None else ()
        if not waiting and not answers:
            return []
    writes = [write for name in waiting for write in _evict_deliveries(state, name)]
    writes += [write for name in answers for write in _evict_answers(limits, state, name)]
    delivery = OpenDelivery(head.root, state.stamp, head.thread_id, head.sender_id, waiting, answers)
    writes.append(TableWrite("delivery", _delivery_key(head.seq), delivery))
    return writes


def _list_reactors(state: State, head: MessageHead) -> Iterator[str]:
    """Yield the recipients of a message that have a reactor session."""
    if head.kind in ("direct", "mod"):
        kind, name = parse_address(head.to)
        recipient = state.everyone.get(name) if kind == "agent" else None
        # Compare the kind too, because a mod may have the same id as its recipient.
        is_own = head.kind == "direct" and name == head.sender_id
        if recipient is not None and recipient.fence and recipient.removed_seq is None and not is_own:
            yield name
        return
    reactors = state.reactors()
    if head.kind == "channel" and reactors:
        members = state.members(name_of(head.to))
        # Check the smaller of the two groups. A network may have a thousand agents and a channel only three members.
        names: Iterable[str] = (
            (name for name in members if name in reactors) if len(members) < len(reactors) else reactors
        )
    else:
        names = reactors
    yield from (name for name in names if name != head.sender_id and is_recipient(state, name, head))


def _list_answering(state: State, head: MessageHead, required: object) -> Iterator[str]:
    """Yield the programs from which a message requires an answer, except reactors. Questions to people have their own
    table (`questions`)."""
    if isinstance(required, list):
        names = list(dict.fromkeys(required))[:MAX_ASKED]
    else:
        names = [name_of(head.to)] if required is True and head.kind == "direct" else []
    for name in names:
        recipient = state.present(name)
        if recipient is None or recipient.fence or recipient.kind == "human" or name == head.sender_id:
            continue
        if is_recipient(state, name, head):
            yield name


def _evict_deliveries(state: State, agent_id: str) -> list[TableWrite]:
    if state.count_deliveries(agent_id) < MAX_DELIVERIES:
        return []
    # Evict several at once, because finding the oldest deliveries means scanning all of them.
    oldest = nsmallest(MAX_DELIVERIES // EVICTION_SHARE, state.deliveries_to(agent_id).items())
    return [write for _, key in oldest for write in _without(state, key, (agent_id,))]


def _evict_answers(limits: Limits, state: State, agent_id: str) -> list[TableWrite]:
    answers = state.answers_of(agent_id)
    if len(answers) < limits.max_questions:
        return []
    # Evict several at once, as for questions to people.
    oldest = nsmallest(max(1, limits.max_questions // EVICTION_SHARE), answers)
    return [write for seq in oldest for write in _without(state, _delivery_key(seq), (agent_id,))]


def reopen_delivery(state: State, agent_id: str, head: MessageHead) -> list[TableWrite]:
    """Return the writes that open the delivery of a dead letter again."""
    recipient, key = state.present(agent_id), _delivery_key(head.seq)
    if recipient is None or not recipient.fence:
        return []
    delivery: OpenDelivery | None = state.get("delivery", key)
    if delivery is None:
        delivery = OpenDelivery(head.root, state.stamp, head.thread_id, head.sender_id)
    if agent_id in delivery.waiting:
        return []
    return [TableWrite("delivery", key, msgspec.structs.replace(delivery, waiting=(*delivery.waiting, agent_id)))]


def close_delivery(state: State, agent_id: str, seq: int) -> list[TableWrite]:
    """Return the writes that close the delivery of a message that an agent has handled or will never handle."""
    return _without(state, _delivery_key(seq), (agent_id,))


def close_handled(state: State, cursors: Sequence[TableWrite]) -> list[TableWrite]:
    """Return the writes that close all deliveries that new ack cursors mark as handled. ``cursors`` may also contain
    writes of other tables."""
    handled: dict[str, set[str]] = {}
    cleared: set[str] | None = None
    for write in cursors:
        if write.table != "floor":
            continue
        cursor: AckCursor = write.value
        for seq, key in state.deliveries_to(write.key).items():
            if cursor.is_handled(seq):
                if cleared is None:
                    cleared = {other.key for other in cursors if other.table == "attempt" and other.value is None}
                if f"{write.key}/{seq}" in cleared or not _is_revived(state, write.key, seq):
                    handled.setdefault(key, set()).add(write.key)
    # Create one write per message, even if many agents have handled the same broadcast.
    return [write for key, names in handled.items() for write in _without(state, key, names)]


def _is_revived(state: State, agent_id: str, seq: int) -> bool:
    """Return whether a message is a restored dead letter. The ack cursor still marks such a message as handled."""
    attempt: Attempt | None = state.get("attempt", f"{agent_id}/{seq}")
    return attempt is not None and attempt.is_revived


def close_answered(
    state: State, head: MessageHead, parent: MessageHead | None, cause: MessageHead | None
) -> list[TableWrite]:
    """Return the writes that record a new message as its sender's answer to the message's parent and cause. A direct
    message also answers all earlier messages in the same thread that required an answer from the sender."""
    sender = head.sender_id
    if not state.may_have_answers(sender):  # almost every message returns here
        return []
    answers = state.answers_of(sender)
    seqs = set(state.answers_in(sender, head.thread_id)) if head.kind == "direct" else set[int]()
    seqs |= {named.seq for named in (parent, cause) if named is not None and named.seq in answers}
    writes = []
    for seq in sorted(seqs):
        key = _delivery_key(seq)
        delivery: OpenDelivery = state.get("delivery", key)
        remaining = tuple(name for name in delivery.answers if name != sender)
        writes.append(TableWrite("delivery", key, _or_none(msgspec.structs.replace(delivery, answers=remaining))))
    return writes


def close_all_of(state: State, agent_id: str) -> list[TableWrite]:
    """Return the writes that close the open items of a removed participant: unhandled messages, missing answers, and
    running reactions. Messages of the participant no longer require answers."""
    draft = state.draft()
    for seq in {*state.deliveries_to(agent_id), *state.answers_of(agent_id)}:
        draft.apply_writes(_without(draft, _delivery_key(seq), (agent_id,)))
    # Nobody has to answer the participant's own messages any more. Scan the whole table, because removals are rare.
    for key, delivery in list(draft.items("delivery")):
        if delivery.sender_id == agent_id and delivery.answers:
            unanswered = _or_none(msgspec.structs.replace(delivery, answers=()))
            draft.apply_writes((TableWrite("delivery", key, unanswered),))
    draft.apply_writes([TableWrite("reaction", key, None) for key in state.reactions_of(agent_id)])
    return [draft.durable_writes[key] for key in sorted(draft.durable_writes)]


def close_dropped(state: State, first_seq: int) -> list[TableWrite]:
    """Return the writes that close the deliveries of messages that retention has deleted."""
    old = (key for key, _ in state.items("delivery") if int(key) < first_seq)
    return [TableWrite("delivery", key, None) for key in list(old)]


def _without(state: State, key: str, names: Collection[str]) -> list[TableWrite]:
    """Return the writes that remove participants from the open delivery under a key."""
    delivery: OpenDelivery | None = state.get("delivery", key)
    if delivery is None:
        return []
    waiting = tuple(name for name in delivery.waiting if name not in names)
    answers = tuple(name for name in delivery.answers if name not in names)
    if len(waiting) == len(delivery.waiting) and len(answers) == len(delivery.answers):
        return []
    return [TableWrite("delivery", key, _or_none(msgspec.structs.replace(delivery, waiting=waiting, answers=answers)))]


def _or_none(delivery: OpenDelivery) -> OpenDelivery | None:
    return delivery if delivery.waiting or delivery.answers else None


def _delivery_key(seq: int) -> str:
    return f"{seq:016d}"


# --- items of mods


class ItemChanges:
    """Methods of `ChangeSet` that open and close the items of a mod."""

    state: State
    stamp: int
    mod_id: str
    _unpaid_bytes: int

    def add_writes(self, writes: list[TableWrite]) -> None:
        raise NotImplementedError

    def open_item(
        self, root: int, key: str, kind: str, who: str = "", note: str = "", *, seq: int | None = None
    ) -> None:
        """Open an item of a conversation, or replace the item with the same key. `mod.Change` describes the
        arguments."""
        if not 0 < root <= self.state.head:
            raise InvalidArguments(f"There is no conversation {root}. A conversation is named by its first message.")
        if not 0 < len(key) <= MAX_ITEM_KEY or not 0 < len(kind) <= MAX_ITEM_KIND:
            raise InvalidArguments(
                f"An open item needs a key of 1 to {MAX_ITEM_KEY} characters and a kind of 1 to {MAX_ITEM_KIND}. "
                f"These have {len(key)} and {len(kind)}."
            )
        full_key = _item_key(self.mod_id, root, key)
        before: OpenItem | None = self.state.get("open_item", full_key)
        if before is None and len(self.state.open_items_of(self.mod_id)) >= MAX_MOD_ITEMS:
            raise InvalidArguments(
                f"The mod {self.mod_id} has {MAX_MOD_ITEMS} open items, the maximum. Close some of them."
            )
        # A replaced item keeps its start time: the conversation has been waiting for the item since then.
        at = self.stamp if before is None else before.at
        item = OpenItem(root, kind, at, root if seq is None else seq, who, note[:MAX_ITEM_NOTE])
        self._unpaid_bytes += len(full_key) + len(kind) + len(who) + len(item.note) + ROW_BYTES
        self.add_writes([TableWrite("open_item", full_key, item)])

    def close_item(self, root: int, key: str) -> None:
        """Close an item of the mod. Do nothing if the item is not open."""
        full_key = _item_key(self.mod_id, root, key)
        if self.state.get("open_item", full_key) is not None:
            self.add_writes([TableWrite("open_item", full_key, None)])


def _item_key(mod_id: str, root: int, key: str) -> str:
    return f"{mod_id}/{root:016d}/{key}"
