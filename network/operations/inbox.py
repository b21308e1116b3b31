"""What waits for somebody (``network.inbox``): decisions on calls, questions that it has not answered, messages that
failed, conversations that stopped, budgets that are spent. Each is in a table already; here they come together.

An item is shown of a message that the caller may read, with a line of it. Reads change nothing; `dismiss` does.
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
"""So many dead letters, conversations and budgets that ended are looked at, of each kind."""
READ_AT_ONCE = 32
"""Of so many items are the messages read together."""
MAX_DISMISSED = 500
"""Of one participant; what it dismissed before is shown again."""


class Item(NamedTuple):
    """What may be shown, before its message was read; in the order of these fields, turned round."""

    seq: int
    kind: ItemKind
    agent_id: str
    at: int
    """When it came about; 0: with its message."""
    told: Mapping[str, Any]
    text: str | None = None
    """What it says, where that is not its message."""
    spent: BudgetStop | None = None
    request: ListedRequest | None = None
    """What asks for the decision, of an approval."""

    @property
    def place(self) -> tuple[int, str, str]:
        return self.seq, self.kind, self.agent_id


# --- what waits


async def inbox(
    reading: Reading,
    *,
    limit: Limit = 100,
    before: Annotated[str, Meta(pattern="^[0-9]{1,16}/[a-z_]{1,16}/[a-z0-9._-]{0,64}$")] | None = None,
) -> dict[str, Any]:
    """What waits for the caller, the newest first: calls that it may decide on, questions to it, messages that
    failed, conversations that stopped, spent budgets. Go on with `before` the answer's `next`."""
    known: DismissedItems = reading.hub.state.get("dismissed", reading.origin.agent_id) or DismissedItems()
    dismissed = {(kind, seq): at for kind, seq, at in known.items}
    items = [it for it in await _list_items(reading) if it.at > dismissed.get(_place_dismissed(it), -1)]
    if before is not None:
        seq, kind, agent_id = before.split("/")
        items = [it for it in items if it.place < (int(seq), kind, agent_id)]
    items.sort(key=lambda it: it.place, reverse=True)
    page = ListPage(limit, reading.hub.limits.max_result_bytes)
    last: Item | None = None
    for start in range(0, len(items), READ_AT_ONCE):
        chunk = items[start : start + READ_AT_ONCE]
        rows = await reading.hub.ledger.messages({it.seq for it in chunk})
        ended = await _find_ended(reading, chunk)
        for item in chunk:
            entry = _describe(reading, item, rows.get(item.seq)) if item.place not in ended else None
            if entry is not None and not page.add(entry):
                assert last is not None, "the first one is always taken"
                return {"items": page.entries, "has_more": True, "next": "/".join(map(str, last.place))}
            last = item
    return {"items": page.entries, "has_more": False}


def _place_dismissed(item: Item) -> tuple[str, int]:
    """Under what an item is dismissed: a fault is its agent's, whichever message it last concerned."""
    return (f"fault/{item.agent_id}", 0) if item.kind == "fault" else (item.kind, item.seq)


def _describe(reading: Reading, item: Item, row: Row | None) -> dict[str, Any] | None:
    """An item with a line of its message; None where the caller may not read that, or it is gone."""
    told: dict[str, Any] = {"kind": item.kind, "seq": item.seq}
    if item.seq == 0:  # it is about no message
        return {**told, "at": item.at, "text": item.text, "agent_id": item.agent_id, **item.told}
    if item.kind == "fault" and (row is None or row.head is None or item.told["cause"] == "ended"):
        return {**told, "seq": 0, "at": item.at, "text": item.text, "agent_id": item.agent_id, **item.told}
    if row is None or row.head is None:
        return None
    if item.kind == "question" and not reads_as_itself(reading, row.head):
        return None
    rights: dict[str, Any] = {}
    if item.request is not None:
        if not item.request.may_be_shown(reading, row.head):
            return None
        rights = item.request.describe_rights(reading, row.head)
        if not rights["may_call"]:
            return None
        if rights["may_decide"]:
            del rights["may_call"]
        del rights["may_decide"]
    if not reads(reading, row.head):
        return None
    line = describe_message_line(row)
    told |= {"thread_id": row.stream, "at": item.at or row.at, "text": item.text or line["text"]}
    told |= {"agent_id": item.agent_id} if item.agent_id else {}
    if item.kind == "question":
        told |= {"sender_kind": row.head.sender_kind, "to": row.head.to}
    return told | dict(item.told) | rights


async def _list_items(reading: Reading) -> list[Item]:
    """All that may be shown. An approval is no question, and a message that failed at several is several."""
    approvals = list(_list_approvals(reading)) if reading.origin.kind == "human" else []
    asked = {(it.seq, it.agent_id) for it in approvals}  # an agent may say of anybody's message that it decides
    return [
        *approvals,
        *(it for it in _list_questions(reading) if (it.seq, it.agent_id) not in asked),
        *await _list_dead_letters(reading),
        *await _list_stopped(reading),
        *_list_stopped_agents(reading),
        *await _list_spent_out(reading),
        *_list_quotas(reading),
        *_list_faults(reading),
    ]


def _list_approvals(reading: Reading) -> Iterator[Item]:
    for it in list_requests(reading, 0):
        shown = {name: it.told[name] for name in ("reaction", "call", "trigger", "until")}
        yield Item(it.seq, "approval", it.agent_id, 0, shown, request=it)


def _list_questions(reading: Reading) -> Iterator[Item]:
    for seq, it in reading.hub.state.questions_of(reading.origin.agent_id).items():
        yield Item(seq, "question", it.sender_id, 0, {})


async def _list_dead_letters(reading: Reading) -> list[Item]:
    """Of the caller's, or of all for operators; and of what the caller sent, without the reason."""
    origin, ledger = reading.origin, reading.hub.ledger
    sent: list[tuple[str, UndeliveredMessage]] = await ledger.cold("undelivered", f"{origin.agent_id}/", SCANNED)
    prefix = "" if origin.is_operator else f"{origin.agent_id}/"
    letters: list[tuple[str, DeadLetter]] = await ledger.cold("dead", prefix, SCANNED)
    found = {
        (it.seq, it.agent_id): Item(
            it.seq, "dead_letter", it.agent_id, it.at, {"attempts": it.attempts, "may_retry": False}
        )
        for _, it in sent
    }
    for _, it in letters:
        told = {"attempts": it.failures, "reason": it.reason, "may_retry": True}
        found[it.seq, it.agent_id] = Item(it.seq, "dead_letter", it.agent_id, it.at, told)
    return list(found.values())


def _may_resume(reading: Reading) -> bool:
    return reading.origin.kind == "human" or reading.origin.is_operator


async def _list_stopped(reading: Reading) -> list[Item]:
    """Conversations that stopped. Who used them up is told to who began it, and operators: not all who read how it
    began read where it went."""
    if not _may_resume(reading):
        return []
    items = []
    found: list[tuple[str, StoppedConversation]] = await reading.hub.ledger.cold("stopped", "", SCANNED)
    for _, it in found:
        told: dict[str, Any] = {"root": it.root, "limit": it.limit}
        text = f"The conversation that began with #{it.root} has stopped ({it.limit})."
        if reading.origin.is_operator or it.began_by == reading.origin.agent_id:
            told |= {"used_by": it.used_by, "used": it.used}
            text = it.reason
        items.append(Item(it.root, "stopped", "", it.at, told, format_line(text)))
    return items


def _list_stopped_agents(reading: Reading) -> Iterator[Item]:
    """Those that answered without causes until they were stopped: for operators."""
    if not reading.origin.is_operator:
        return
    state = reading.hub.state
    for agent_id, bucket in state.items("bucket"):
        answers = bucket.answer_count
        if answers.is_reported and not has_person_written(state, agent_id, answers.since):
            text = f"{agent_id} has answered others {answers.count} times without a cause, and is stopped."
            told = {"limit": "limits.max_uncaused_answers", "used": answers.count}
            yield Item(answers.last, "stopped", agent_id, 0, told, text)


async def _list_spent_out(reading: Reading) -> list[Item]:
    """Reactions that their agents' own budgets ended."""
    if not _may_resume(reading):
        return []
    found: list[tuple[str, BudgetStop]] = await reading.hub.ledger.cold("spent_out", "", SCANNED)
    return [
        Item(
            it.seq, "budget", it.agent_id, it.at, {"root": it.root, "reaction": it.reaction}, format_line(it.reason), it
        )
        for _, it in found
    ]


async def _find_ended(reading: Reading, items: Sequence[Item]) -> set[tuple[int, str, str]]:
    """Which of these budgets do not stop anything any more."""
    stops = {it.place: it.spent for it in items if it.spent is not None}
    if not stops:
        return set()
    asked: set[tuple[Table, str]] = {("root", str(it.root)) for it in stops.values()}
    asked |= {("triggered", f"{it.agent_id}/{it.seq}") for it in stops.values()}
    cold = (await reading.hub.ledger.lookup(LookupRequest(set(), set(), asked))).cold
    ended = set()
    for place, it in stops.items():
        budget: ConversationBudget | None = cold.get(("root", str(it.root)))
        begun: TriggeredReactions | None = cold.get(("triggered", f"{it.agent_id}/{it.seq}"))
        is_resumed = budget is not None and budget.resumed != it.resumed
        if is_resumed or (begun is not None and begun.reaction != it.reaction):
            ended.add(place)
    return ended


def _list_quotas(reading: Reading) -> Iterator[Item]:
    """Quotas of today that are nearly used up: one's own; of everybody for operators."""
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
        limit = max(shares, key=lambda it: shares[it])
        text = f"{agent_id} has used {min(1.0, shares[limit]):.0%} of its {limit} today."
        yield Item(0, "budget", agent_id, day * DAY_MS, {"limit": limit, "until": (day + 1) * DAY_MS}, text)


def _list_faults(reading: Reading) -> Iterator[Item]:
    """Agents that cannot do their work, one item each, for operators. A dead letter has an item of its own."""
    if not reading.origin.is_operator:
        return
    for agent_id in reading.hub.state.faults():
        participant = reading.hub.state.participant(agent_id)
        if participant is None or participant.removed_seq is not None:
            continue
        told = describe_fault(reading, participant)
        if told is not None and told["cause"] != "dead_letter":
            text = f"{agent_id} {told.pop('text')}. {told['to_do']}"
            told.pop("seq", None)
            place = participant.fault.seq if participant.fault is not UNSET else 0
            yield Item(place, "fault", agent_id, told["since"], told, format_line(text))


# --- what is not to be shown any more


def dismiss(
    change: ChangeSet,
    *,
    kind: Literal["question", "dead_letter", "stopped", "budget", "fault"],
    seq: Seq | None = None,
    agent_id: Annotated[str, Meta(pattern=ID_PATTERN)] | None = None,
) -> dict[str, Any]:
    """Be told no more of what waits under a kind and a seq, or of the fault of an agent, until it comes about again.
    Nothing else changes."""
    of_agent, agent_id = agent_id, change.origin.agent_id
    if kind == "fault" and of_agent is not None and seq is None:
        place = f"fault/{of_agent}", 0
    elif kind != "fault" and of_agent is None and seq is not None:
        place = kind, seq
    else:
        raise InvalidArguments("network.dismiss takes agent_id for the kind fault, and seq for every other kind.")
    if kind == "question":
        change.add_writes(dismiss_question(change.state, agent_id, place[1]))
        return {}
    known: DismissedItems = change.state.get("dismissed", agent_id) or DismissedItems()
    others = [it for it in known.items if it[:2] != place]
    items = (*others, (*place, change.stamp))[-MAX_DISMISSED:]
    change.set_value("dismissed", agent_id, DismissedItems(items))
    return {}
