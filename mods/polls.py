"""`polls`: questions with one vote for each reader of a thread, open or secret, with a closing time.

An open poll shows who voted for what. A secret poll stores only the sums and the names of the voters. It shows
the sums after its end, because a reader who watched the sums change could tell who voted for what.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from roundelay.network.addresses import thread_start
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.takeovers import next_message_head
from roundelay.network.core.visibility import has_people
from roundelay.network.errors import Forbidden, InvalidArguments, UnknownMessage
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, Reading, operation
from roundelay.network.operations.documents import shows_thread
from roundelay.network.operations.paging import take_page
from roundelay.network.operations.views import open_view
from roundelay.network.units import DAY_MS

from .screens import POLLS

MAX_POLLS, MAX_OPEN_BY_ONE, MAX_VOTERS = 500, 20, 500
"""Maximum number of stored polls, of open polls of one participant, and of voters of one poll. A new poll replaces the
oldest closed one."""
MAX_OPEN_MS = 366 * DAY_MS

PollId = Annotated[int, Meta(ge=1, lt=2**53, description="Number of the poll, as polls.create and polls.list show it.")]
Choice = Annotated[str, Meta(min_length=1, max_length=200)]


class Poll(Struct, frozen=True, omit_defaults=True):
    """Stored poll. ``head`` is the next message of its thread. A secret poll has ``sums`` and ``voted``. An open poll
    has ``votes``, which maps each voter to the number of a choice."""

    head: MessageHead
    by: str
    at: int
    question: str
    choices: list[str]
    is_secret: bool = False
    closes_at: int = 0
    closed_at: int = 0
    label: int = 0
    votes: dict[str, int] = {}
    voted: list[str] = []
    sums: list[int] = []


def _needs_thread(args: Any) -> list[int]:
    start = thread_start(args.thread_id or "")
    return [start] if start is not None else []


class Polls(Mod):
    """Create polls, vote, close polls and show their results."""

    id = "polls"
    screens = (POLLS,)

    @operation("change", needs=_needs_thread)
    def create(
        self,
        change: Change,
        *,
        question: Annotated[str, Meta(min_length=1, max_length=1000)],
        choices: Annotated[list[Choice], Meta(min_length=2, max_length=20)],
        thread_id: Annotated[str, Meta(max_length=220, description="Id of the thread, such as channel:dev.")]
        | None = None,
        secret: bool = False,
        closes_at: Annotated[
            int, Meta(ge=0, lt=2**53, description="Time in ms since 1970 at which the poll ends.")
        ] = 0,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Ask the readers of a thread, by default of the thread of the message that you react to. Each has one vote. A
        secret poll shows the sums after its end, and never who voted for what."""
        if thread_id is None and cause is None:
            raise InvalidArguments("polls.create needs thread_id, such as channel:dev.")
        if len({*choices}) < len(choices):
            raise InvalidArguments("Two choices are equal. Each choice must be different.")
        if closes_at and not change.stamp < closes_at <= change.stamp + MAX_OPEN_MS:
            raise InvalidArguments(f"closes_at must be later than {change.stamp}, and within a year.")
        trigger = change.head(cause) if cause is not None else None
        head = change.thread(thread_id if thread_id is not None else trigger or "")
        change.check_may_write(head)
        by = change.origin.agent_id
        _make_room(change, by)
        row = change.log({"mod": self.id})
        # If no person reads the thread, the poll gets the label of its trigger, because it concerns the people for whom
        # its author works.
        is_private = has_people(change.state, next_message_head(change.state, head))
        label = trigger.label if trigger is not None and not is_private else 0
        poll = Poll(head, by, change.stamp, question, choices, secret, closes_at, label=label)
        change.put("order", [*(change.get("order") or []), row.seq])
        change.put(f"open/{by}", (change.get(f"open/{by}") or 0) + 1)
        _put(change, row.seq, poll)
        if closes_at:
            change.schedule(str(row.seq), closes_at)
        return {"poll": row.seq}

    @operation("change")
    def vote(self, change: Change, *, poll: PollId, choice: Choice) -> dict[str, Any]:
        """Vote in a poll. In an open poll a new vote replaces your last one. A secret vote is final."""
        found = _open(change, poll)
        change.check_may_write(found.head)
        by = change.origin.agent_id
        if found.closed_at or (found.closes_at and change.stamp >= found.closes_at):
            raise InvalidArguments(f"Poll {poll} is closed.")
        if choice not in found.choices:
            raise InvalidArguments(
                f"Poll {poll} has no choice {choice[:80]!r}. Its choices: {', '.join(found.choices)}."
            )
        number = found.choices.index(choice)
        if len(found.votes) + len(found.voted) >= MAX_VOTERS and by not in found.votes:
            raise InvalidArguments(f"Poll {poll} has {MAX_VOTERS} votes, which is the maximum.")
        if not found.is_secret:
            changed = msgspec.structs.replace(found, votes={**found.votes, by: number})
        elif by in found.voted:
            raise InvalidArguments(f"You have voted in the secret poll {poll}. A secret vote is final.")
        else:
            sums = [count + (index == number) for index, count in enumerate(_count(found))]
            # Sort the voters, so that the stored value does not reveal the order of the votes.
            changed = msgspec.structs.replace(found, voted=sorted([*found.voted, by]), sums=sums)
        change.log({"poll": poll}, hides_args=found.is_secret)
        _put(change, poll, changed)
        return {"poll": poll, "voted": True}

    @operation("change")
    def close(self, change: Change, *, poll: PollId) -> dict[str, Any]:
        """End a poll that you created. Nobody votes any more, and everyone in the thread sees the result."""
        found = _open(change, poll)
        if change.origin.agent_id != found.by and not change.origin.is_operator:
            raise Forbidden(f"{found.by} created poll {poll}. Only {found.by} or an operator closes it.")
        change.log({"poll": poll})
        if not found.closed_at:
            change.unschedule(str(poll))
            found = _close(change, poll, found)
        return _describe(poll, found, change.origin.agent_id)

    def due(self, change: Change, key: str) -> None:
        raw = change.get(f"p/{int(key):016d}")
        found = msgspec.convert(raw, Poll) if raw is not None else None
        if found is not None and not found.closed_at:
            closed = _close(change, int(key), found)
            sums = ", ".join(f"{choice}: {votes}" for choice, votes in zip(closed.choices, _count(closed), strict=True))
            change.notify(found.by, f"Your poll {key} has ended. {sums}.")

    @operation("read")
    async def results(self, reading: Reading, *, poll: PollId, trigger: Seq | None = None) -> dict[str, Any]:
        """Show a poll: question, choices, number of voters, and the sums. An open poll also shows who voted for what. A
        secret poll shows its sums after its end."""
        view, raw = await open_view(reading, trigger), reading.get(f"p/{poll:016d}")
        found = msgspec.convert(raw, Poll) if raw is not None else None
        if found is None or not await shows_thread(reading, view, found.head, [found.label] if found.label else []):
            raise _unknown(poll)
        return _describe(poll, found, reading.origin.agent_id)

    @operation("read")
    async def list(
        self,
        reading: Reading,
        *,
        thread_id: Annotated[str, Meta(max_length=220)] | None = None,
        is_open: bool | None = None,
        after: Annotated[int, Meta(ge=0, lt=2**53)] = 0,
        limit: Annotated[int, Meta(ge=1, le=500)] = 100,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List the polls that you may see, by number above `after`: of all threads or one, open or closed."""
        view, shown = await open_view(reading, trigger), []
        # Copy into a list, because the state may change between two reads.
        polls = [(int(key[2:]), msgspec.convert(raw, Poll)) for key, raw in reading.items("p/", f"p/{after:016d}")]
        for poll, found in polls:
            if thread_id not in (None, found.head.thread_id) or is_open not in (None, not found.closed_at):
                continue
            if await shows_thread(reading, view, found.head, [found.label] if found.label else []):
                shown.append(_describe(poll, found, reading.origin.agent_id))
            if len(shown) > limit:
                break
        entries, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
        return {"polls": entries, "has_more": has_more}


def _open(change: Change, poll: int) -> Poll:
    """Return a poll in a thread that the caller may read. Raises `UnknownMessage` for missing and for hidden polls."""
    raw = change.get(f"p/{poll:016d}")
    found = msgspec.convert(raw, Poll) if raw is not None else None
    if found is None or not change.reads_now(found.head):
        raise _unknown(poll)
    return found


def _make_room(change: Change, by: str) -> None:
    """Delete the oldest closed poll if there are too many. Raises `InvalidArguments` if all are open."""
    if (change.get(f"open/{by}") or 0) >= MAX_OPEN_BY_ONE:
        raise InvalidArguments(
            f"{by} has {MAX_OPEN_BY_ONE} open polls, which is the maximum. Close one with polls.close."
        )
    order: list[int] = change.get("order") or []
    if len(order) < MAX_POLLS:
        return
    closed = next((poll for poll in order if (change.get(f"p/{poll:016d}") or {}).get("closed_at")), None)
    if closed is None:
        raise InvalidArguments(f"The network has {MAX_POLLS} open polls, which is the maximum. Close some first.")
    change.put(f"p/{closed:016d}", None)
    change.put("order", [poll for poll in order if poll != closed])


def _close(change: Change, poll: int, found: Poll) -> Poll:
    closed = msgspec.structs.replace(found, closed_at=change.stamp)
    change.put(f"open/{found.by}", (change.get(f"open/{found.by}") or 1) - 1 or None)
    _put(change, poll, closed)
    return closed


def _put(change: Change, poll: int, found: Poll) -> None:
    change.put(f"p/{poll:016d}", found)
    change.update_screens(found.head, {"poll": poll, "closed": bool(found.closed_at)})


def _count(found: Poll) -> list[int]:
    if found.is_secret:
        return found.sums or [0] * len(found.choices)
    votes = [*found.votes.values()]
    return [votes.count(number) for number in range(len(found.choices))]


def _describe(poll: int, found: Poll, caller: str) -> dict[str, Any]:
    """Return the JSON that operations return for a poll."""
    choices: list[dict[str, Any]] = [{"choice": choice} for choice in found.choices]
    if not found.is_secret or found.closed_at:
        for entry, votes in zip(choices, _count(found), strict=True):
            entry["votes"] = votes
    if not found.is_secret:
        for number, entry in enumerate(choices):
            entry["voters"] = sorted(voter for voter, voted in found.votes.items() if voted == number)
    return {
        "poll": poll, "thread_id": found.head.thread_id, "by": found.by, "at": found.at, "question": found.question,
        "is_secret": found.is_secret, "is_open": not found.closed_at, "closes_at": found.closes_at,
        "voters": len(found.votes) + len(found.voted), "has_voted": caller in found.votes or caller in found.voted,
        "choices": choices,
    }  # fmt: skip


def _unknown(poll: int) -> UnknownMessage:
    return UnknownMessage(f"There is no poll {poll} that you may see. polls.list lists polls.")
