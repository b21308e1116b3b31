"""The inbox (``network.inbox``): everything that waits for a participant.

The items are decisions on calls, unanswered questions, failed messages, stopped conversations, exceeded budgets, and
faults of agents. All items are already in tables, and this module only collects them. An item about a message contains
one line of this message, so it is shown only to callers who may read the message. Listing the inbox changes nothing.
The operation `dismiss` hides an item.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET, Meta

from roundelay.network.core.change import ChangeSet
from roundelay.network.core.limits import stored_today
from roundelay.network.core.questions import dismiss_question
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import (
    BudgetStop,
    ConversationBudget,
    DeadLetter,
    DismissedItems,
    LookupRequest,
    StoppedConversation,
    Table,
    TriggeredReactions,
    UndeliveredMessage,
)
from roundelay.network.core.uncaused_answers import has_person_written
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import ID_PATTERN, Seq
from roundelay.network.units import DAY_MS

from .activity import describe_fault
from .paging import ListPage
from .reactions import ListedRequest, list_requests
from .read_state import describe_message_line, format_line
from .reading import Reading, reads, reads_as_itself
from .views import Limit

ItemKind: TypeAlias = Literal["approval", "question", "dead_letter", "stopped", "budget", "fault"]
SCANNED = 1000
"""Maximum number of entries that one call examines in each of three tables: dead letters, stopped conversations, and
exceeded budgets."""
READ_AT_ONCE = 32
"""Number of items whose messages are read in one step."""
MAX_DISMISSED = 500
"""Maximum number of dismissed items that are stored per participant. Items beyond this number, the oldest ones, are
shown again."""


class WaitingItem(NamedTuple):
    """An item of the inbox before its message is read. Items are sorted by these fields, descending."""

    seq: int
    kind: ItemKind
    agent_id: str
    at: int
    """Time at which the item was created, in ms, or 0 to use the time of its message."""
    details: Mapping[str, Any]
    text: str | None = None
    """Text of the item, or None to use the text of its message."""
    spent: BudgetStop | None = None
    request: ListedRequest | None = None
    """Approval request of the item, or None if the item is not about an approval."""

    @property
    def place(self) -> tuple[int, str, str]:
        return self.seq, self.kind, self.agent_id


# --- listing


async def inbox(
    reading: Reading,
    *,
    limit: Limit = 100,
    before: Annotated[str, Meta(pattern="^[0-9]{1,16}/[a-z_]{1,16}/[a-z0-9._-]{0,64}$")] | None = None,
) -> dict[str, Any]:
    """What waits for the caller, newest first: calls to decide on, questions, failed messages, stopped conversations,
    exceeded budgets. To continue, pass the answer's `next` as `before`."""
    stored: DismissedItems = reading.hub.state.get("dismissed", reading.origin.agent_id) or DismissedItems()
    # Compare the times: an item that occurs again after it was dismissed must be shown again.
    dismissed = {(kind, seq): at for kind, seq, at in stored.items}
    items = [each for each in await _list_items(reading) if each.at > dismissed.get(_dismissal_key(each), -1)]
    if before is not None:
        seq, kind, agent_id = before.split("/")
        items = [each for each in items if each.place < (int(seq), kind, agent_id)]
    # Sort the items before reading messages, so that only the messages of one page are read.
    items.sort(key=lambda each: each.place, reverse=True)
    page = ListPage(limit, reading.hub.limits.max_result_bytes)
    last: WaitingItem | None = None
    for start in range(0, len(items), READ_AT_ONCE):
        chunk = items[start : start + READ_AT_ONCE]
        rows = await reading.hub.ledger.messages({each.seq for each in chunk})
        # Look up the ended budget stops for each chunk and not for all items, because most callers request only the
        # first page.
        ended = await _find_ended(reading, chunk)
        for item in chunk:
            entry = _describe(reading, item, rows.get(item.seq)) if item.place not in ended else None
            if entry is not None and not page.add(entry):
                assert last is not None, "the first one is always taken"
                return {"items": page.entries, "has_more": True, "next": "/".join(map(str, last.place))}
            last = item
    return {"items": page.entries, "has_more": False}


def _dismissal_key(item: WaitingItem) -> tuple[str, int]:
    """Return the key under which a dismissed item is stored. The key of a fault contains only the agent, because the
    message of a fault can change."""
    return (f"fault/{item.agent_id}", 0) if item.kind == "fault" else (item.kind, item.seq)


def _describe(reading: Reading, item: WaitingItem, row: Row | None) -> dict[str, Any] | None:
    """Return an inbox entry with one line of the item's message. Return None if the message no longer exists or the
    caller may not read it."""
    entry: dict[str, Any] = {"kind": item.kind, "seq": item.seq}
    if item.seq == 0:  # the item is not about a message
        return {**entry, "at": item.at, "text": item.text, "agent_id": item.agent_id, **item.details}
    # Show a fault even if its message no longer exists or is unreadable, because the agent still fails.
    if item.kind == "fault" and (row is None or row.head is None or item.details["cause"] == "ended"):
        return {**entry, "seq": 0, "at": item.at, "text": item.text, "agent_id": item.agent_id, **item.details}
    if row is None or row.head is None:
        return None
    if item.kind == "question" and not reads_as_itself(reading, row.head):
        return None
    rights: dict[str, Any] = {}
    if item.request is not None:
        # Check the rights again, now with the head of the message itself. The first check used only the seq from the
        # agent's records.
        if not item.request.may_be_shown(reading, row.head):
            return None
        rights = item.request.describe_rights(reading, row.head)
        if not rights["may_call"]:
            return None
        # Most decisions are made with a reply, so the entry mentions only the other way.
        if rights["may_decide"]:
            del rights["may_call"]
        del rights["may_decide"]
    if not reads(reading, row.head):
        return None
    line = describe_message_line(row)
    entry |= {"thread_id": row.stream, "at": item.at or row.at, "text": item.text or line["text"]}
    entry |= {"agent_id": item.agent_id} if item.agent_id else {}
    if item.kind == "question":
        entry |= {"sender_kind": row.head.sender_kind, "to": row.head.to}
    return entry | dict(item.details) | rights


async def _list_items(reading: Reading) -> list[WaitingItem]:
    """Return all items that the caller may see. A request for approval is not listed as a question too. A message that
    failed at several recipients has one item for each of them."""
    approvals = list(_list_approvals(reading)) if reading.origin.kind == "human" else []
    # Include the agent in the key, because an agent may name any message as its request.
    requests = {(approval.seq, approval.agent_id) for approval in approvals}
    return [
        *approvals,
        *(item for item in _list_questions(reading) if (item.seq, item.agent_id) not in requests),
        *await _list_dead_letters(reading),
        *await _list_stopped(reading),
        *_list_stopped_agents(reading),
        *await _list_budget_stops(reading),
        *_list_quotas(reading),
        *_list_faults(reading),
    ]


def _list_approvals(reading: Reading) -> Iterator[WaitingItem]:
    for waiting in list_requests(reading, 0):
        shown = {name: waiting.details[name] for name in ("reaction", "call", "trigger", "until")}
        yield WaitingItem(waiting.seq, "approval", waiting.agent_id, 0, shown, request=waiting)


def _list_questions(reading: Reading) -> Iterator[WaitingItem]:
    for seq, question in reading.hub.state.questions_of(reading.origin.agent_id).items():
        yield WaitingItem(seq, "question", question.sender_id, 0, {})


async def _list_dead_letters(reading: Reading) -> list[WaitingItem]:
    """Return two kinds of dead letters: messages to the caller (for operators, to anyone), and messages that the caller
    sent. A sender does not see the reason of the failure."""
    origin, ledger = reading.origin, reading.hub.ledger
    undelivered: list[tuple[str, UndeliveredMessage]] = await ledger.cold("undelivered", f"{origin.agent_id}/", SCANNED)
    prefix = "" if origin.is_operator else f"{origin.agent_id}/"
    stored: list[tuple[str, DeadLetter]] = await ledger.cold("dead", prefix, SCANNED)
    items = {
        (letter.seq, letter.agent_id): WaitingItem(
            letter.seq, "dead_letter", letter.agent_id, letter.at, {"attempts": letter.attempts, "may_retry": False}
        )
        for _, letter in undelivered
    }
    # Add the received messages last, so that an operator who is also the sender gets the entry with the reason.
    for _, letter in stored:
        details = {"attempts": letter.failures, "reason": letter.reason, "may_retry": True}
        items[letter.seq, letter.agent_id] = WaitingItem(letter.seq, "dead_letter", letter.agent_id, letter.at, details)
    return list(items.values())


def _may_resume(reading: Reading) -> bool:
    return reading.origin.kind == "human" or reading.origin.is_operator


async def _list_stopped(reading: Reading) -> list[WaitingItem]:
    """Return the conversations that were stopped. Only operators and the sender of the root see who used up the budget,
    because other readers of the root may not be allowed to read the rest of the conversation."""
    if not _may_resume(reading):
        return []
    items = []
    stored: list[tuple[str, StoppedConversation]] = await reading.hub.ledger.cold("stopped", "", SCANNED)
    for _, conversation in stored:
        details: dict[str, Any] = {"root": conversation.root, "limit": conversation.limit}
        text = f"The conversation that began with #{conversation.root} has stopped ({conversation.limit})."
        if reading.origin.is_operator or conversation.began_by == reading.origin.agent_id:
            details |= {"used_by": conversation.used_by, "used": conversation.used}
            text = conversation.reason
        items.append(WaitingItem(conversation.root, "stopped", "", conversation.at, details, format_line(text)))
    return items


def _list_stopped_agents(reading: Reading) -> Iterator[WaitingItem]:
    """Yield one item for each agent that was stopped because its answers named no cause. Only for operators."""
    if not reading.origin.is_operator:
        return
    state = reading.hub.state
    for agent_id, bucket in state.items("bucket"):
        count = bucket.answer_count
        if count.is_reported and not has_person_written(state, agent_id, count.since):
            text = f"{agent_id} has answered others {count.count} times without a cause, and is stopped."
            details = {"limit": "limits.max_uncaused_answers", "used": count.count}
            yield WaitingItem(count.last, "stopped", agent_id, 0, details, text)


async def _list_budget_stops(reading: Reading) -> list[WaitingItem]:
    """Return one item for each reaction that ended because its agent's own budget was used up."""
    if not _may_resume(reading):
        return []
    stored: list[tuple[str, BudgetStop]] = await reading.hub.ledger.cold("spent_out", "", SCANNED)
    return [
        WaitingItem(
            stop.seq,
            "budget",
            stop.agent_id,
            stop.at,
            {"root": stop.root, "reaction": stop.reaction},
            format_line(stop.reason),
            stop,
        )
        for _, stop in stored
    ]


async def _find_ended(reading: Reading, items: Sequence[WaitingItem]) -> set[tuple[int, str, str]]:
    """Return the budget stops that need no more attention, because the conversation was resumed or the work was
    finished."""
    stops = {stop.place: stop.spent for stop in items if stop.spent is not None}
    if not stops:
        return set()
    wanted: set[tuple[Table, str]] = {("root", str(stop.root)) for stop in stops.values()}
    wanted |= {("triggered", f"{stop.agent_id}/{stop.seq}") for stop in stops.values()}
    cold = (await reading.hub.ledger.lookup(LookupRequest(set(), set(), wanted))).cold
    ended = set()
    for key, stop in stops.items():
        budget: ConversationBudget | None = cold.get(("root", str(stop.root)))
        started: TriggeredReactions | None = cold.get(("triggered", f"{stop.agent_id}/{stop.seq}"))
        # The stop has ended if the conversation has a new budget, or if another reaction to the message has taken over
        # the work.
        is_resumed = budget is not None and budget.resumed != stop.resumed
        if is_resumed or (started is not None and started.reaction != stop.reaction):
            ended.add(key)
    return ended


def _list_quotas(reading: Reading) -> Iterator[WaitingItem]:
    """Yield one item for each of today's quotas that is nearly used up. Operators see the quotas of all participants,
    and other callers only their own."""
    origin, state = reading.origin, reading.hub.state
    day = state.stamp // DAY_MS
    for agent_id, stored in state.near_quota().items():
        if stored.day != day or not (origin.is_operator or agent_id == origin.agent_id):
            continue
        allowed, (size, messages) = reading.hub.quotas.of(agent_id), stored_today(state, agent_id)
        shares = {
            "bytes_per_day": size / allowed.bytes_per_day,
            "messages_per_day": messages / max(1, allowed.messages_per_day),
        }
        limit = max(shares, key=lambda name: shares[name])
        text = f"{agent_id} has used {min(1.0, shares[limit]):.0%} of its {limit} today."
        yield WaitingItem(0, "budget", agent_id, day * DAY_MS, {"limit": limit, "until": (day + 1) * DAY_MS}, text)


def _list_faults(reading: Reading) -> Iterator[WaitingItem]:
    """Yield one item for each agent that cannot work. Only for operators. Dead letters have their own items."""
    if not reading.origin.is_operator:
        return
    for agent_id in reading.hub.state.faults():
        participant = reading.hub.state.participant(agent_id)
        if participant is None or participant.removed_seq is not None:
            continue
        details = describe_fault(reading, participant)
        if details is not None and details["cause"] != "dead_letter":
            text = f"{agent_id} {details.pop('text')}. {details['to_do']}"
            details.pop("seq", None)
            seq = participant.fault.seq if participant.fault is not UNSET else 0
            yield WaitingItem(seq, "fault", agent_id, details["since"], details, format_line(text))


# --- dismissing


def dismiss(
    change: ChangeSet,
    *,
    kind: Literal["question", "dead_letter", "stopped", "budget", "fault"],
    seq: Seq | None = None,
    agent_id: Annotated[str, Meta(pattern=ID_PATTERN)] | None = None,
) -> dict[str, Any]:
    """Hide an inbox item, given by its kind and seq, or the fault of an agent. The item is shown again if it arises
    again. Nothing else changes."""
    of_agent, agent_id = agent_id, change.origin.agent_id
    if kind == "fault" and of_agent is not None and seq is None:
        key = f"fault/{of_agent}", 0
    elif kind != "fault" and of_agent is None and seq is not None:
        key = kind, seq
    else:
        raise InvalidArguments("network.dismiss needs agent_id for the kind fault, and seq for every other kind.")
    if kind == "question":
        change.add_writes(dismiss_question(change.state, agent_id, key[1]))
        return {}
    stored: DismissedItems = change.state.get("dismissed", agent_id) or DismissedItems()
    others = [item for item in stored.items if item[:2] != key]
    # Append the new item at the end, so that the slice removes the oldest items.
    items = (*others, (*key, change.stamp))[-MAX_DISMISSED:]
    change.set_value("dismissed", agent_id, DismissedItems(items))
    return {}
