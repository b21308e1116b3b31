"""`timers`: reminders to oneself or others, and routines that wake an agent by a cron expression.

The hub stores each timer as a due time, so a timer fires exactly once, even if nodes are killed or another leader is
elected. Times that the hub missed while it was stopped are run once late, or skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta, Struct

from roundelay.network.core.access import check_right_to_send
from roundelay.network.core.entries import Origin
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import InvalidArguments, UnknownRecipient
from roundelay.network.extras import needs
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, Reading, operation
from roundelay.network.operations.paging import take_page
from roundelay.network.operations.views import find_audience
from roundelay.network.units import DAY_MS

from .screens import SCHEDULE

MAX_TIMERS, MAX_TIMERS_BY_ONE = 5000, 100
"""Maximum number of timers in a network, and of one creator."""
MAX_AHEAD_MS = 5 * 365 * DAY_MS
HALF_HOUR_MS = 1_800_000
GRACE_MS = 60_000
"""Delay after which a timer counts as missed, in ms. A running hub fires each timer within a second of its due time."""

TimerId = Annotated[int, Meta(ge=1, le=2**53 - 1, description="The timer's number.")]


class Timer(Struct, omit_defaults=True):
    """A stored timer. ``at`` is the next time at which the timer fires, in ms. ``place`` is the message whose conversation
    the timer belongs to."""

    id: int
    by: str
    to: str
    text: str
    at: int
    cron: str = ""
    timezone: str = "UTC"
    missed: Literal["run", "skip"] = "run"
    place: MessageHead | None = None


class TimersMod(Mod):
    """Create, list and cancel timers."""

    id = "timers"
    screens = (SCHEDULE,)

    def __init__(self) -> None:
        # Import the package at startup, so that a node without the extra fails at once instead of at the first call.
        with needs("timers"):
            import cronsim  # noqa: F401

    @operation("change")
    def create(
        self,
        change: Change,
        *,
        text: Annotated[str, Meta(min_length=1, max_length=2000, description="The message to send.")],
        in_minutes: Annotated[float | None, Meta(description="Once, after this time.")] = None,
        at: Annotated[str, Meta(max_length=40, description="Once: 2026-03-01T18:00, in `timezone`.")] = "",
        cron: Annotated[str, Meta(max_length=100, description="Repeatedly: 0 8 * * * is every day at 8.")] = "",
        timezone: Annotated[str, Meta(max_length=64, description="Such as Europe/Berlin.")] = "UTC",
        to: Annotated[str, Meta(max_length=64, description="Whom to send it to. Empty: yourself.")] = "",
        missed: Annotated[
            Literal["run", "skip"], Meta(description="What to do with times while the hub was stopped.")
        ] = "run",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Send a message later, once or repeatedly, to yourself or to another participant. It wakes an agent. Give one
        of in_minutes, at and cron."""
        me = change.origin.agent_id
        count, own = change.get("count") or 0, change.get(f"count/{me}") or 0
        if count >= MAX_TIMERS or own >= MAX_TIMERS_BY_ONE:
            raise InvalidArguments(
                f"Too many timers: at most {MAX_TIMERS_BY_ONE} per participant and {MAX_TIMERS} in the network. Cancel "
                "some with timers.cancel."
            )
        if (in_minutes is not None) + bool(at) + bool(cron) != 1:
            raise InvalidArguments("Give exactly one of in_minutes, at and cron.")
        if to not in ("", me):
            if change.state.present(to) is None:
                raise UnknownRecipient(f"Nobody is registered as {to!r}.")
            if change.state.rights is not None:
                check_right_to_send(change.state, change.origin, "agent", to)
        zone, now = find_zone(timezone), change.stamp
        if cron:
            due = next_time(cron, zone, now)
        elif at:
            due = _read_time(at, zone)
        else:
            assert in_minutes is not None
            due = now + round(in_minutes * 60_000) if abs(in_minutes) < 1e9 else 0
        if not now < due <= now + MAX_AHEAD_MS:
            raise InvalidArguments("A timer needs a time in the next five years.")
        place = change.head(cause) if cause is not None else None
        timer = Timer((change.get("last") or 0) + 1, me, to or me, text, due, cron, timezone, missed, place)
        change.put("last", timer.id)
        change.put("count", count + 1)
        change.put(f"count/{me}", own + 1)
        _schedule(change, timer)
        if place is not None and not cron:  # a routine never ends, so no conversation waits for it
            change.open_item(place.root, str(timer.id), "timer", timer.to, seq=place.seq)
        change.log({"timer": timer.id})
        return _describe(timer)

    @operation("change")
    def cancel(self, change: Change, *, timer: TimerId, cause: Seq | None = None) -> dict[str, Any]:
        """Cancel a timer that you created or receive."""
        found = _load(change, timer)
        origin = change.origin
        if found is None or not (origin.is_operator or origin.agent_id in (found.by, found.to)):
            raise InvalidArguments(f"There is no timer {timer} of yours. timers.list lists timers.")
        _remove(change, found)
        change.log({"timer": timer})
        return {"timer": timer, "is_cancelled": True}

    @operation("read")
    async def list(
        self,
        reading: Reading,
        *,
        after: Annotated[int, Meta(ge=0)] = 0,
        limit: Annotated[int, Meta(ge=1, le=200)] = 50,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List the timers that you created or receive, after the timer `after`."""
        listeners, last = await find_audience(reading, trigger), after

        def select() -> Iterator[dict[str, Any]]:
            nonlocal last
            for _, value in reading.items("timer/", f"timer/{after:010d}" if after else ""):
                timer = msgspec.convert(value, Timer)
                if _is_visible(reading.hub.state, reading.origin, timer, listeners):
                    # Advance the cursor only after the page has taken a timer, and never to the number of a hidden
                    # timer.
                    yield _describe(timer)
                    last = timer.id

        timers, has_more = take_page(select(), limit, reading.hub.limits.max_result_bytes)
        return {"timers": timers, "after": last, "has_more": has_more}

    def removed(self, change: Change, agent_id: str) -> None:
        """Remove the timers that a removed participant created or would receive."""
        for _, value in change.items("timer/"):
            timer = msgspec.convert(value, Timer)
            if agent_id in (timer.by, timer.to):
                _remove(change, timer)

    def due(self, change: Change, key: str) -> None:
        timer = _load(change, int(key))
        if timer is None:
            return
        late_ms = change.stamp - timer.at
        # Earlier versions of the mod did not remove the timers of a removed participant.
        is_present = all(change.state.present(name) is not None for name in (timer.to, timer.by))
        if is_present and not (late_ms > GRACE_MS and timer.missed == "skip"):
            sender = "" if timer.to == timer.by else f" from {timer.by}"
            late = f" (late: it was due {late_ms // 60_000} min ago)" if late_ms > GRACE_MS else ""
            text = f"{'Routine' if timer.cron else 'Reminder'} {timer.id}{sender}{late}: {timer.text}"
            # Each run of a routine starts a conversation in the thread of the routine.
            cause = timer.place.seq if timer.place is not None and not timer.cron else None
            change.notify(timer.to, text, cause=cause, conversation=f"timer-{timer.id}" if timer.cron else "")
        if timer.cron and is_present:
            # Compute the next time from now, not from the due time, so that several missed times cause only one run.
            timer.at = next_time(timer.cron, find_zone(timer.timezone), change.stamp)
            _schedule(change, timer)
        else:
            _remove(change, timer)


def find_zone(name: str) -> ZoneInfo:
    """Return the time zone with this name. Raises `InvalidArguments` for an unknown name. Each zone is loaded once."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise InvalidArguments(f"There is no time zone {name!r}. Write it like Europe/Berlin.") from error


def next_time(cron: str, zone: ZoneInfo, after: int) -> int:
    """Return the first time (ms) of a cron expression after a time. Raises `InvalidArguments`.

    Daylight saving time is handled as in Debian's cron. If the clock change skips the time of a timer, the timer runs
    right after the change. If the time occurs twice, the timer runs once.
    """
    from cronsim import CronSim, CronSimError

    problem = f"{cron!r} is not a cron expression. Write minute, hour, day, month and weekday: 0 8 * * MON-FRI."
    if len(cron.split()) != 5:  # a sixth field would mean seconds
        raise InvalidArguments(problem)

    def local(at: int) -> datetime:
        return datetime.fromtimestamp(at / 1000, zone)

    def first(after: int) -> int:
        times = CronSim(cron, local(after))
        return next(due for it in times if (due := round(it.timestamp() * 1000)) > after)

    try:
        due = first(after)
        early = due - 26 * 3_600_000
        if (_offset(local(due)) - _offset(local(early))) % timedelta(hours=1):
            # CronSim leaves out times after a change by half an hour (Lord Howe), so search from each half hour as well.
            start = max(after, early)
            starts = range(start - start % HALF_HOUR_MS + HALF_HOUR_MS - 1, due, HALF_HOUR_MS)
            due = min([due, *map(first, starts)])
    except CronSimError as error:
        raise InvalidArguments(f"{problem} ({error})") from error
    except StopIteration as error:
        raise InvalidArguments(f"{cron!r} never comes.") from error
    return due


def _offset(time: datetime) -> timedelta:
    return time.utcoffset() or timedelta()


def _read_time(text: str, zone: ZoneInfo) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArguments(f"{text!r} is not a time. Write it in ISO 8601: 2026-03-01T18:00.") from error
    local = time if time.tzinfo is not None else time.replace(tzinfo=zone)
    try:
        return round(local.timestamp() * 1000)
    except (OverflowError, ValueError):
        return 0


def _is_visible(state: State, origin: Origin, timer: Timer, listeners: Collection[str]) -> bool:
    def may_see(agent_id: str) -> bool:
        is_own = agent_id in (timer.by, timer.to)
        return is_own or (timer.place is not None and may_read(state, agent_id, timer.place))

    is_own = origin.agent_id in (timer.by, timer.to)
    return (origin.is_operator or is_own) and all(map(may_see, listeners))


def _load(change: Change, number: int) -> Timer | None:
    value = change.get(f"timer/{number:010d}")
    return msgspec.convert(value, Timer) if value is not None else None


def _schedule(change: Change, timer: Timer) -> None:
    cause = timer.place.seq if timer.place is not None and not timer.cron else None
    change.put(f"timer/{timer.id:010d}", timer)
    change.schedule(str(timer.id), timer.at, cause=cause)


def _remove(change: Change, timer: Timer) -> None:
    change.put(f"timer/{timer.id:010d}", None)
    change.unschedule(str(timer.id))
    for key in ("count", f"count/{timer.by}"):
        change.put(key, ((change.get(key) or 1) - 1) or None)
    if timer.place is not None and not timer.cron:
        change.close_item(timer.place.root, str(timer.id))


def _describe(timer: Timer) -> dict[str, Any]:
    at = (datetime.fromtimestamp(0, ZoneInfo("UTC")) + timedelta(milliseconds=timer.at)).astimezone(
        find_zone(timer.timezone)
    )
    fields = {"cron": timer.cron, "missed": timer.missed if timer.cron else ""}
    return {
        "timer": timer.id,
        "by": timer.by,
        "to": timer.to,
        "text": timer.text,
        "at": timer.at,
        "local_time": at.isoformat(timespec="minutes"),
        **{name: value for name, value in fields.items() if value},
    }
