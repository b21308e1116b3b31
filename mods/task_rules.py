"""Rules of the mod `tasks`: who may see and claim a task, how tasks are stored, and what happens when a claim or a task
ends. This module is pure: it does no IO and reads no clock."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from roundelay.network.addresses import channel_address
from roundelay.network.core.access import check_right_to_send
from roundelay.network.core.entries import Origin
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import Forbidden, InvalidArguments, UnknownRecipient
from roundelay.network.mod import Change, Reading
from roundelay.network.units import DAY_MS

MAX_TASKS, MAX_UNFINISHED_BY_ONE, MAX_HELD_BY_ONE = 4000, 500, 50
"""Maximum number of tasks in a network, of unfinished tasks of one creator, and of tasks that one participant holds."""
MAX_LINKS, MAX_EVENTS, MAX_EXAMINED = 50, 30, 1000
"""Limits of a task: its dependencies or dependents, its stored events, and the tasks that one page of a list or one
search for a dependency cycle examines."""
MAX_INDEXED, MAX_SHOWN_TITLE = 10, 60
"""Limits for tasks in prompts: the number of tasks per conversation, and the number of characters per title."""
LEASE_MS = 15 * 60_000
"""Default time for which the holder of a task may be offline before the claim ends, in ms."""
KEEP_MS = 7 * DAY_MS
"""Time for which the hub keeps an ended task, in ms."""

MAX_AHEAD_MS = 100 * 365 * DAY_MS
"""Maximum time until a task is due, in ms. Some clients cannot display later dates."""

TaskState: TypeAlias = Literal["waiting", "open", "claimed", "review", "done", "failed", "cancelled"]
ENDED: Collection[str] = ("done", "failed", "cancelled")


class TaskClaim(Struct, frozen=True, omit_defaults=True):
    """Current claim of a task. ``reaction`` identifies the reaction in which an agent claimed the task."""

    holder: str
    lease_ms: int
    reaction: str = ""


class TaskResult(Struct, frozen=True, omit_defaults=True):
    """Outcome of a task that has ended or waits for review: its author, a text, and named messages, notes and files.

    ``place`` is the first of the messages. Prompts name it to those who may read it.
    """

    by: str = ""
    text: str = ""
    messages: tuple[int, ...] = ()
    references: tuple[str, ...] = ()
    place: MessageHead | None = None


class SharedTask(Struct, omit_defaults=True):
    """Stored task. ``place`` is the message to which the task belongs; its seq is 0 if the task belongs to a channel
    itself. ``tried`` are the members of the pool who were offered the task. ``woken`` is the message that woke the
    assignee. ``events`` are (time in ms, participant, text).
    """

    id: int
    title: str
    creator: str
    state: TaskState = "open"
    place: MessageHead | None = None
    root: int = 0
    assignee: str = ""
    pool: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    depends_on: tuple[int, ...] = ()
    dependents: tuple[int, ...] = ()
    reviewer: str = ""
    due: int = 0
    woken: int = 0
    claim: TaskClaim | None = None
    result: TaskResult = TaskResult()
    events: tuple[tuple[int, str, str], ...] = ()

    @property
    def holder(self) -> str:
        return self.claim.holder if self.claim is not None else ""

    @property
    def name(self) -> str:
        return f"Task {self.id} ({self.title})"

    def log(self, at: int, by: str, text: str) -> None:
        self.events = (*self.events, (at, by, text[:1000]))[-MAX_EVENTS:]


# --- rules


def is_visible(state: State, origin: Origin, task: SharedTask, listeners: Collection[str] = ()) -> bool:
    """Return whether the caller and all ``listeners``, who may read the caller's answer, may see a task."""
    return (origin.is_operator or may_see(state, origin.agent_id, task)) and all(
        may_see(state, agent_id, task) for agent_id in listeners
    )


def may_see(state: State, agent_id: str, task: SharedTask) -> bool:
    if agent_id in (task.creator, task.assignee, task.holder, task.reviewer, *task.pool):
        return True
    place = task.place
    if place is not None and place.seq == 0:  # a channel: everyone who would receive its next message may see the task
        place = msgspec.structs.replace(place, seq=state.head + 1)
    return place is not None and may_read(state, agent_id, place)


def channel_place(name: str) -> MessageHead:
    to = channel_address(name)
    return MessageHead(
        seq=0, sender_id="", sender_kind="", kind="channel", to=to, thread_id=to, root=0, hops=0, label=0
    )


def may_claim(task: SharedTask, agent_id: str) -> bool:
    if task.state != "open":
        return False
    return agent_id == task.assignee or agent_id in task.pool or not (task.assignee or task.pool)


def is_abandoned(change: Change, task: SharedTask) -> bool:
    """Return whether the creator of a task and everyone who could work on it were removed from the network."""
    workers = {task.assignee, *task.pool} - {""}
    is_idle = task.state in ("open", "waiting") and workers
    return bool(is_idle) and not any(change.state.present(name) for name in {task.creator, *workers})


def is_manager(origin: Origin, task: SharedTask) -> bool:
    return origin.is_operator or origin.agent_id == task.creator


def may_take_over(origin: Origin, task: SharedTask) -> bool:
    return is_manager(origin, task) or origin.kind == "human"


def check_reachable(change: Change, name: str) -> None:
    if change.state.present(name) is None:
        raise UnknownRecipient(f"Nobody is registered as {name!r}.")
    if change.state.rights is not None:
        check_right_to_send(change.state, change.origin, "agent", name)


def check_unfinished(task: SharedTask) -> None:
    if task.state in ENDED:
        raise InvalidArguments(f"Task {task.id} is {task.state}. Its creator may reopen it.")


def unknown_task(number: int) -> InvalidArguments:
    return InvalidArguments(f"There is no task {number} that you may see. tasks.list lists tasks.")


# --- the store


def load_task(context: Change | Reading, number: int) -> SharedTask | None:
    value = context.get(f"task/{number:010d}")
    return msgspec.convert(value, SharedTask) if value is not None else None


def find_task(change: Change, number: int, cause: int | None = None) -> SharedTask:
    """Return a task that the caller may see. Raises `InvalidArguments`, and `UnknownMessage` for a cause that the
    caller may not read."""
    if cause is not None:
        change.head(cause)
    task = load_task(change, number)
    if task is None or not is_visible(change.state, change.origin, task):
        raise unknown_task(number)
    return task


def find_own_task(change: Change, number: int, cause: int | None, doing: str) -> SharedTask:
    task = find_task(change, number, cause)
    if not is_manager(change.origin, task):
        raise Forbidden(f"{task.creator} created task {number}. Only its creator {doing} it.")
    return task


def find_held_task(change: Change, number: int, cause: int | None) -> SharedTask:
    """Return a task that the caller holds. If the caller may claim the task, claim it first."""
    task, me = find_task(change, number, cause), change.origin.agent_id
    if task.holder != me:
        if not may_claim(task, me):
            holder = f" by {task.holder}" if task.holder else ""
            raise InvalidArguments(f"You do not hold task {number}: it is {task.state}{holder}.")
        take_task(change, task, cause, LEASE_MS)
    return task


def save_task(change: Change, task: SharedTask) -> None:
    change.put(f"task/{task.id:010d}", task)
    if not task.root:
        return
    index_task(change, task)
    if task.state in ENDED:
        change.close_item(task.root, str(task.id))
    else:
        who = task.reviewer if task.state == "review" else task.holder or task.assignee
        seq = task.place.seq if task.place is not None else None
        # Some readers of the conversation may not read the task's channel. Seq 0 refers to no message, so the item is
        # counted but not named.
        change.open_item(task.root, str(task.id), "task", who, task.title, seq=seq)


def index_task(change: Change, task: SharedTask, *, is_deleted: bool = False) -> None:
    """Update the conversation's index of its newest claimed and ended tasks. Each entry stores the seq of the change."""
    key = f"conversation/{task.root}"
    entries: list[list[Any]] = change.get(key) or []
    is_shown = task.state in ("claimed", "done", "failed") and not is_deleted
    if any(it[0] == task.id and it[1] == task.state for it in entries) and is_shown:
        return
    others = [it for it in entries if it[0] != task.id]
    changed = [*others, [task.id, task.state, change.state.head]][-MAX_INDEXED:] if is_shown else others
    if changed != entries:
        change.put(key, changed or None)


def delete_task(change: Change, task: SharedTask) -> None:
    change.put(f"task/{task.id:010d}", None)
    change.put(f"body/{task.id}", None)
    if task.root:
        index_task(change, task, is_deleted=True)
    for number in task.depends_on:
        if (other := load_task(change, number)) is not None:
            other.dependents = tuple(it for it in other.dependents if it != task.id)
            change.put(f"task/{number:010d}", other)
    change.put("total", (change.get("total") or 1) - 1)


def count_unfinished(change: Change, creator: str, by: int) -> None:
    change.put(f"unfinished/{creator}", ((change.get(f"unfinished/{creator}") or 0) + by) or None)


def cause_of(task: SharedTask) -> int | None:
    return task.place.seq if task.place is not None and task.place.seq else None


def set_due(change: Change, task: SharedTask, due: str) -> None:
    change.unschedule(f"due/{task.id}")
    task.due = 0
    if due:
        try:
            at = datetime.fromisoformat(due)
        except ValueError as error:
            raise InvalidArguments(f"{due!r} is not a time. Write it in ISO 8601: 2026-03-01T18:00+01:00.") from error
        task.due = round((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)
        if not 0 < task.due <= change.stamp + MAX_AHEAD_MS:
            raise InvalidArguments(f"{due!r} is too far away. A task is due between 1970 and a hundred years from now.")
        change.schedule(f"due/{task.id}", task.due, cause=cause_of(task))


def schedule_due(change: Change, task: SharedTask) -> None:
    """Schedule the due time of a reopened task, unless the due time has already passed."""
    if task.due > change.stamp:
        change.schedule(f"due/{task.id}", task.due, cause=cause_of(task))


def link_tasks(change: Change, task: SharedTask, depends_on: tuple[int, ...]) -> None:
    """Replace the dependencies of a task. Raises `InvalidArguments` with the task numbers of a cycle, if there is one."""
    wanted = tuple(dict.fromkeys(depends_on))
    for number in wanted:
        find_task(change, number)
    if cycle := _find_cycle(change, task.id, wanted):
        names = [str(number) if _is_own_view(change, number, task) else "a task of others" for number in cycle]
        raise InvalidArguments(f"These tasks would wait for each other: {' -> '.join(names)}.")
    for number in {*wanted, *task.depends_on}:
        other = load_task(change, number)
        if other is None or (number in wanted) == (task.id in other.dependents):
            continue
        others = tuple(it for it in other.dependents if it != task.id)
        other.dependents = (*others, task.id) if number in wanted else others
        if len(other.dependents) > MAX_LINKS:
            raise InvalidArguments(f"Task {number} has {MAX_LINKS} dependents, which is the maximum.")
        change.put(f"task/{number:010d}", other)
    task.depends_on = wanted


def _is_own_view(change: Change, number: int, task: SharedTask) -> bool:
    """Return whether the caller may see a task. The task may be the one that the caller is creating."""
    found = task if number == task.id else load_task(change, number)
    return found is not None and is_visible(change.state, change.origin, found)


def _find_cycle(change: Change, start: int, wanted: tuple[int, ...]) -> list[int]:
    """Return the task numbers of a cycle that the new dependencies would create, or an empty list."""
    paths, seen = [[start, number] for number in wanted], set[int]()
    while paths:
        path = paths.pop()
        if path[-1] == start:
            return path
        if path[-1] in seen:
            continue
        seen.add(path[-1])
        if len(seen) > MAX_EXAMINED:
            raise InvalidArguments(f"More than {MAX_EXAMINED} tasks depend on each other here. Use fewer dependencies.")
        task = load_task(change, path[-1])
        paths += [[*path, number] for number in task.depends_on] if task is not None else []
    return []


# --- steps


def make_ready(change: Change, task: SharedTask, cause: int | None, reason: str = "", *, is_new: bool = True) -> None:
    """Open a task and wake its assignee if all dependencies are done. Otherwise mark the task as waiting.

    Refuse a new task if the budget of its conversation is exceeded, because a new task wakes another agent.
    """
    done = all((other := load_task(change, it)) is None or other.state == "done" for it in task.depends_on)
    task.state = "open" if done else "waiting"
    if done and not task.assignee and task.pool:
        _choose(change, task)
    is_own = is_new and task.assignee == change.origin.agent_id  # the caller is already awake
    if done and task.assignee and not is_own:
        body = change.get(f"body/{task.id}") or ""
        text = "\n".join(filter(None, (f"Task {task.id} from {task.creator}: {task.title}", body, reason)))
        text += f"\nCall tasks_complete with the result, or tasks_fail or tasks_release (task {task.id}). Long work: tasks_claim first."
        forget_wake(change, task)
        send = change.answer if is_new else change.notify
        # Each task has its own thread, so each prompt contains one task and two tasks can run in parallel.
        row = send(task.assignee, text, cause=cause, conversation=f"task-{task.id}")
        if row is not None and row.head is not None:
            task.root, task.woken = task.root or row.head.root, row.seq
            change.put(f"woken/{row.seq}", task.id)
    save_task(change, task)


def forget_wake(change: Change, task: SharedTask) -> None:
    if task.woken:
        change.put(f"woken/{task.woken}", None)
        task.woken = 0


def _choose(change: Change, task: SharedTask) -> None:
    """Assign a task to the pool member who holds the fewest tasks. Skip members who were already offered the task."""
    left = [it for it in task.pool if it not in task.tried and change.state.present(it) is not None]
    if left:
        task.assignee = min(left, key=lambda it: len(change.get(f"held/{it}") or ()))
        task.tried = (*task.tried, task.assignee)


def take_task(change: Change, task: SharedTask, cause: int | None, lease_ms: int) -> None:
    me = change.origin.agent_id
    held = change.get(f"held/{me}") or []
    if task.id not in held:
        if len(held) >= MAX_HELD_BY_ONE:
            raise InvalidArguments(f"You hold {MAX_HELD_BY_ONE} tasks, which is the maximum. Complete or release some.")
        change.put(f"held/{me}", [*held, task.id])
        task.log(change.stamp, me, "claimed")
    forget_wake(change, task)
    reactions = change.state.reactions_to(me, cause).values() if cause is not None else ()
    newest = max(reactions, key=lambda it: it.seq, default=None)
    task.state, task.claim = "claimed", TaskClaim(me, lease_ms, newest.reaction if newest is not None else "")
    schedule_lease(change, task, lease_ms)
    save_task(change, task)


def schedule_lease(change: Change, task: SharedTask, in_ms: int) -> None:
    change.schedule(f"lease/{task.id}", change.stamp + in_ms, cause=cause_of(task), watched=task.holder)


def drop_claim(change: Change, task: SharedTask) -> None:
    """Remove the current claim of a task, if the task is claimed."""
    if task.holder:
        held = [it for it in change.get(f"held/{task.holder}") or [] if it != task.id]
        change.put(f"held/{task.holder}", held or None)
        change.unschedule(f"lease/{task.id}")
        task.state, task.claim = "open", None


def end_claim(change: Change, task: SharedTask, why: str, cause: int | None, *, offer: bool = True) -> None:
    """Open a task again, notify its creator, and offer the task to the next member of its pool."""
    task.log(change.stamp, task.holder or task.assignee, f"open again: {why}")
    forget_wake(change, task)
    drop_claim(change, task)
    if task.pool and task.assignee in task.pool:
        task.assignee = ""
    if offer and task.pool and set(task.pool) - set(task.tried):
        make_ready(change, task, cause, is_new=False)
    else:
        save_task(change, task)
    if task.creator != change.origin.agent_id:
        change.notify(task.creator, f"{task.name} is open again: {why}.", cause=cause)


def end_work(
    change: Change, agent_id: str, trigger: int, reactions: Collection[str], unfinished: str, unclaimed: str
) -> None:
    """Reopen the tasks that an agent claimed while it reacted to a message, and the task that the message announced.

    The last two arguments are the reasons that the creators of these tasks receive.
    """
    for number in change.get(f"held/{agent_id}") or ():
        task = load_task(change, number)
        if task is not None and task.claim is not None and task.claim.reaction in reactions:
            log_change(change, task)
            end_claim(change, task, unfinished, trigger)
    number = change.get(f"woken/{trigger}")
    task = load_task(change, number) if number is not None else None
    if task is not None and task.state == "open" and task.assignee == agent_id:
        log_change(change, task)
        end_claim(change, task, unclaimed, trigger)


def replace_reviewer(change: Change, task: SharedTask) -> None:
    """Make the creator of a task its reviewer, because the reviewer was removed.

    Accept the result at once if the creator wrote it or if the task has no creator left.
    """
    removed, task.reviewer = task.reviewer, task.creator
    task.log(change.stamp, "", f"{removed} was removed, {task.creator} reviews")
    if change.state.present(task.creator) is None or task.creator == task.result.by:
        finish_task(change, task, "done", cause_of(task))
        return
    text = (
        f"{task.name} needs your review: {removed} was removed from this network. {task.result.by} says: "
        f"{task.result.text}\nAccept it with tasks_complete or refuse it with tasks_reopen."
    )
    change.notify(task.creator, text, cause=cause_of(task), conversation=f"task-{task.id}")
    save_task(change, task)


def finish_task(change: Change, task: SharedTask, state: TaskState, cause: int | None) -> None:
    """End a task, notify its creator once, and open the tasks that waited for it."""
    drop_claim(change, task)
    forget_wake(change, task)
    task.state = state
    change.unschedule(f"due/{task.id}")
    change.schedule(f"drop/{task.id}", change.stamp + KEEP_MS)
    count_unfinished(change, task.creator, -1)
    save_task(change, task)
    me = change.origin.agent_id
    if task.creator != me:
        by = f" by {task.result.by}" if task.result.by else ""
        shown = [
            str(it)
            for it in task.dependents
            if (other := load_task(change, it)) and may_see(change.state, task.creator, other)
        ]
        blocked = f"\nTasks that wait for it: {', '.join(shown)}." if shown else ""
        text = f"{task.name} is {state}{by}.{f' {task.result.text}' if task.result.text else ''}"
        change.notify(task.creator, text + (blocked if state != "done" else ""), cause=cause)
    if state == "done":
        for number in task.dependents:
            other = load_task(change, number)
            if other is not None and other.state == "waiting":
                make_ready(change, other, cause, is_new=False)


def log_change(change: Change, task: SharedTask) -> None:
    """Log a change of a task for exports and replays.

    Call this before the change sends messages, because a replay repeats the whole call at its first log row.
    """
    change.log({"task": task.id, "state": task.state})


def list_standing(reading: Reading, trigger: MessageHead, listeners: Collection[str]) -> list[str]:
    """Describe who is working on, or has ended, the tasks of a conversation. Return one line per task, newest first."""
    me, lines = reading.origin.agent_id, list[str]()
    for number, state, seq in reversed(reading.get(f"conversation/{trigger.root}") or []):
        task = load_task(reading, number)
        # Include only changes before the trigger, because a prompt includes only earlier messages too.
        if task is None or task.state != state or seq >= trigger.seq:
            continue
        # Ignore operator rights here: a prompt must not reveal tasks that only operators may see.
        if not all(may_see(reading.hub.state, agent_id, task) for agent_id in (me, *listeners)):
            continue
        place = task.result.place
        is_readable = place and all(may_read(reading.hub.state, agent_id, place) for agent_id in (me, *listeners))
        where = f" in #{place.seq}" if place and is_readable else ""
        name = f"Task {task.id} ({task.title[:MAX_SHOWN_TITLE]})"
        by = task.holder or task.result.by
        if state != "claimed":
            lines.append(f"{name} is {state} by {'you' if by == me else by}{where}.")
        elif by != me:
            lines.append(f"{by} works on {name}.")
    return lines


def describe_task(context: Change | Reading, task: SharedTask, listeners: Collection[str] = ()) -> dict[str, Any]:
    """Return a summary of a task. Omit related tasks that the caller or a listener may not see."""
    state = context.hub.state if isinstance(context, Reading) else context.state
    dependencies = [
        number
        for number in task.depends_on
        if (other := load_task(context, number)) and is_visible(state, context.origin, other, listeners)
    ]
    fields = {
        "assignee": task.assignee,
        "holder": task.holder,
        "depends_on": dependencies,
        "due": task.due,
        "conversation": task.root,
    }
    return {
        "task": task.id,
        "title": task.title,
        "state": task.state,
        "creator": task.creator,
        **{name: value for name, value in fields.items() if value},
    }
