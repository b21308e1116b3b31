"""`tasks`: shared tasks that one participant at a time works on.

A claim is atomic, because `apply` processes one call at a time. A claim is also a lease. The lease ends when its
holder's reaction ends, when the holder has been offline for too long, or when somebody else takes over the task. The
task is then open again and its creator is notified. A task is visible to its creator, its assignee, its pool and its reviewer, and to
everybody who may read the message or the channel that it belongs to.
"""

from __future__ import annotations

import builtins
from collections.abc import Collection
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from roundelay.network.core.access import check_member, find_channel
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.tables import OpenReaction
from roundelay.network.errors import Forbidden, InvalidArguments, UnknownRecipient
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, Reading, Undelivered, Upkeep, operation
from roundelay.network.operations.paging import take_page
from roundelay.network.operations.views import find_audience

from .discovery import CardIndex
from .screens import TASK_BOARD
from .task_rules import (
    ENDED,
    KEEP_MS,
    LEASE_MS,
    MAX_EXAMINED,
    MAX_LINKS,
    MAX_TASKS,
    MAX_UNFINISHED_BY_ONE,
    SharedTask,
    TaskResult,
    TaskState,
    cause_of,
    channel_place,
    check_reachable,
    check_unfinished,
    count_unfinished,
    delete_task,
    describe_task,
    drop_claim,
    end_claim,
    end_work,
    find_held_task,
    find_own_task,
    find_task,
    finish_task,
    is_abandoned,
    is_manager,
    is_visible,
    link_tasks,
    list_standing,
    load_task,
    log_change,
    make_ready,
    may_claim,
    may_take_over,
    replace_reviewer,
    save_task,
    schedule_due,
    schedule_lease,
    set_due,
    take_task,
    unknown_task,
)

TaskId = Annotated[int, Meta(ge=1, le=2**53 - 1, description="The task's number.")]
Who = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=8000)]
Note = Annotated[str, Meta(max_length=1000)]
Links = Annotated[tuple[TaskId, ...], Meta(max_length=MAX_LINKS)]
Due = Annotated[str, Meta(max_length=40, description="Time in ISO 8601, such as 2026-03-01T18:00+01:00.")]


class Tasks(Mod):
    """Create, claim, finish and list tasks."""

    id = "tasks"
    screens = (TASK_BOARD,)

    def __init__(self) -> None:
        self._cards = CardIndex()
        self._first_seq = 1

    @operation("change")
    def create(
        self,
        change: Change,
        *,
        title: Annotated[str, Meta(min_length=1, max_length=200)],
        body: Text = "",
        assignee: Annotated[Who, Meta(description="Who has to do it. Empty: whoever claims it first.")] = "",
        pool: Annotated[tuple[Who, ...], Meta(max_length=20, description="Only these may claim it.")] = (),
        capability: Annotated[str, Meta(max_length=200, description="Skills needed: picks a pool by cards.")] = "",
        depends_on: Links = (),
        reviewer: Annotated[Who, Meta(description="Who must accept the result.")] = "",
        due: Due = "",
        channel: Annotated[str, Meta(max_length=64, description="Channel whose readers see it.")] = "",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Create a task. Its assignee is woken when the task is ready. You get one message when it ends."""
        me, state = change.origin.agent_id, change.state
        total, unfinished = change.get("total") or 0, change.get(f"unfinished/{me}") or 0
        if total >= MAX_TASKS or unfinished >= MAX_UNFINISHED_BY_ONE:
            raise InvalidArguments(
                f"Too many tasks: at most {MAX_UNFINISHED_BY_ONE} unfinished ones per creator and {MAX_TASKS} in the "
                "network. Cancel tasks that nobody needs. Ended tasks are deleted after seven days."
            )
        if capability:
            pool = tuple(name for name, _, _ in self._cards.rank(state, capability, me))[:5]
            if not pool:
                raise UnknownRecipient(f"No participant has a card that matches {capability!r}.")
        for name in {assignee, reviewer, *pool} - {"", me}:
            check_reachable(change, name)
        task = SharedTask((change.get("last") or 0) + 1, title, me, assignee=assignee, pool=pool, reviewer=reviewer)
        if channel:
            found = find_channel(state, change.origin, channel)
            check_member(state, change.origin, found)
            task.place = channel_place(found.name)
        if cause is not None:
            head = change.head(cause)
            task.root, task.place = head.root, task.place or head
        log_change(change, task)
        change.put("last", task.id)
        change.put("total", total + 1)
        change.put(f"unfinished/{me}", unfinished + 1)
        if body:
            change.put(f"body/{task.id}", body)
        set_due(change, task, due)
        link_tasks(change, task, depends_on)
        task.log(change.stamp, me, "created")
        make_ready(change, task, cause)
        return describe_task(change, task)

    @operation("change")
    def update(
        self,
        change: Change,
        *,
        task: TaskId,
        assignee: Who | None = None,
        depends_on: Links | None = None,
        due: Due | None = None,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Change a task that you created. Another assignee ends the present claim."""
        found = find_own_task(change, task, cause, "changes")
        check_unfinished(found)
        log_change(change, found)
        if due is not None:
            set_due(change, found, due)
        if depends_on is not None:
            link_tasks(change, found, depends_on)
        if is_other := assignee is not None and assignee != found.assignee:
            assert assignee is not None
            if assignee not in ("", change.origin.agent_id):
                check_reachable(change, assignee)
            if found.holder:
                change.notify(found.holder, f"{found.name} was given to {assignee or 'others'}.", cause=cause)
                drop_claim(change, found)
            found.assignee = assignee
        found.log(change.stamp, change.origin.agent_id, "updated")
        if found.state == "waiting" or (found.state == "open" and (is_other or depends_on is not None)):
            make_ready(change, found, cause)
        else:
            save_task(change, found)
        return describe_task(change, found)

    @operation("change")
    def claim(
        self,
        change: Change,
        *,
        task: TaskId,
        minutes: Annotated[int, Meta(ge=1, le=1440, description="How long you may be offline.")] = LEASE_MS // 60_000,
        take_over: Annotated[bool, Meta(description="Take it from its holder (creator and people only).")] = False,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Claim a task before you work on it. Your claim ends with your reaction, or after `minutes` offline."""
        found, me = find_task(change, task, cause), change.origin.agent_id
        if take_over and found.holder not in ("", me) and may_take_over(change.origin, found):
            log_change(change, found)
            change.notify(found.holder, f"{me} has taken over {found.name}.", cause=cause)
            end_claim(change, found, f"{me} has taken it over", cause, offer=False)
        elif found.holder != me and not may_claim(found, me):
            return {**describe_task(change, found), "is_claimed": False}
        else:
            log_change(change, found)
        take_task(change, found, cause, minutes * 60_000)
        return {**describe_task(change, found), "is_claimed": True}

    @operation("change")
    def progress(self, change: Change, *, task: TaskId, note: Note, cause: Seq | None = None) -> dict[str, Any]:
        """Report progress on a task that you hold."""
        found = find_held_task(change, task, cause)
        log_change(change, found)
        found.log(change.stamp, change.origin.agent_id, note)
        save_task(change, found)
        return describe_task(change, found)

    @operation("change")
    def complete(
        self,
        change: Change,
        *,
        task: TaskId,
        result: Text = "",
        messages: Annotated[tuple[Seq, ...], Meta(max_length=20)] = (),
        references: Annotated[tuple[Note, ...], Meta(max_length=20, description="Names of notes and files.")] = (),
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Complete a task that you hold, with its result. As its reviewer: accept the result."""
        found, me = find_task(change, task, cause), change.origin.agent_id
        heads = [change.head(seq) for seq in messages]
        # Earlier versions of the mod did not replace a removed reviewer.
        reviewer = found.reviewer if change.state.present(found.reviewer) is not None else found.creator
        if (found.state == "done" and me in (found.result.by, found.reviewer)) or (
            found.state == "review" and me == found.result.by != reviewer
        ):
            return describe_task(change, found)
        if found.state == "review" and (me == reviewer or change.origin.is_operator):
            log_change(change, found)
            found.log(change.stamp, me, result or "accepted")
            finish_task(change, found, "done", cause)
            return describe_task(change, found)
        found = find_held_task(change, task, cause)
        log_change(change, found)
        found.result = TaskResult(me, result, messages, references, heads[0] if heads else None)
        found.reviewer = reviewer if found.reviewer else ""
        if found.reviewer not in ("", me) and change.state.present(found.reviewer) is not None:
            drop_claim(change, found)
            found.state = "review"
            found.log(change.stamp, me, "completed, waits for review")
            text = f"{found.name} needs your review. {me} says: {result}\nAccept it with tasks_complete or refuse it with tasks_reopen."
            change.notify(found.reviewer, text, cause=cause, conversation=f"task-{found.id}")
            save_task(change, found)
        else:
            found.log(change.stamp, me, "completed")
            finish_task(change, found, "done", cause)
        return describe_task(change, found)

    @operation("change")
    def fail(self, change: Change, *, task: TaskId, reason: Note, cause: Seq | None = None) -> dict[str, Any]:
        """Report that a task that you hold cannot be done."""
        found, me = find_task(change, task, cause), change.origin.agent_id
        if found.state == "failed" and found.result.by == me:
            return describe_task(change, found)
        found = find_held_task(change, task, cause)
        log_change(change, found)
        found.result = TaskResult(me, reason)
        found.log(change.stamp, me, "failed")
        finish_task(change, found, "failed", cause)
        return describe_task(change, found)

    @operation("change")
    def release(self, change: Change, *, task: TaskId, reason: Note = "", cause: Seq | None = None) -> dict[str, Any]:
        """Give back a task that you hold or were assigned. Its creator may release it too."""
        found, me = find_task(change, task, cause), change.origin.agent_id
        if found.holder:
            if me != found.holder and not is_manager(change.origin, found):
                raise Forbidden(f"{found.holder} holds task {task}. Only its holder and its creator may release it.")
            log_change(change, found)
            end_claim(change, found, f"{me} has released it{f': {reason}' if reason else ''}", cause)
        elif me == found.assignee and found.state == "open":
            log_change(change, found)
            end_claim(change, found, f"{me} has declined it{f': {reason}' if reason else ''}", cause)
        return describe_task(change, found)

    @operation("change")
    def cancel(self, change: Change, *, task: TaskId, reason: Note = "", cause: Seq | None = None) -> dict[str, Any]:
        """Cancel a task that you created."""
        found = find_own_task(change, task, cause, "cancels")
        if found.state not in ENDED:
            log_change(change, found)
            if found.holder:
                change.notify(found.holder, f"{found.name} was cancelled. {reason}".strip(), cause=cause)
            found.result = TaskResult("", reason)
            found.log(change.stamp, change.origin.agent_id, "cancelled")
            finish_task(change, found, "cancelled", cause)
        return describe_task(change, found)

    @operation("change")
    def reopen(self, change: Change, *, task: TaskId, reason: Note = "", cause: Seq | None = None) -> dict[str, Any]:
        """Open an ended task again, or refuse its result as reviewer. The last holder is woken with your reason."""
        found, me = find_task(change, task, cause), change.origin.agent_id
        if me != found.reviewer and not is_manager(change.origin, found):
            raise Forbidden(f"Only the creator and the reviewer of task {task} may reopen it.")
        if found.state in ENDED or found.state == "review":
            log_change(change, found)
            if found.state in ENDED:
                change.unschedule(f"drop/{found.id}")
                count_unfinished(change, found.creator, 1)
            found.assignee = found.assignee or found.result.by
            if change.state.present(found.assignee) is None:
                found.assignee = ""
            schedule_due(change, found)
            found.tried, found.result = (), TaskResult()
            found.log(change.stamp, me, f"reopened: {reason}")
            make_ready(change, found, cause, reason)
        return describe_task(change, found)

    @operation("read")
    async def list(
        self,
        reading: Reading,
        *,
        state: TaskState | Literal["", "unfinished"] = "unfinished",
        assignee: Annotated[Who, Meta(description="Only tasks assigned to or held by this participant.")] = "",
        conversation: Annotated[Seq | None, Meta(description="Only tasks of this conversation (its root).")] = None,
        after: Annotated[int, Meta(ge=0)] = 0,
        limit: Annotated[int, Meta(ge=1, le=200)] = 50,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List tasks that you may see, oldest first, after the task `after`."""
        listeners = await find_audience(reading, trigger)
        found: builtins.list[dict[str, Any]] = []
        key = f"task/{after:010d}"
        while key and len(found) <= limit:
            values = builtins.list(islice(reading.items("task/", key), MAX_EXAMINED))
            # Return only the numbers of tasks that the caller may see.
            key = values[-1][0] if len(values) == MAX_EXAMINED else ""
            for _, value in values:
                task = msgspec.convert(value, SharedTask)
                if (
                    is_visible(reading.hub.state, reading.origin, task, listeners)
                    and (not state or task.state == state or (state == "unfinished" and task.state not in ENDED))
                    and (not assignee or assignee in (task.assignee, task.holder))
                    and conversation in (None, task.root)
                ):
                    found.append(describe_task(reading, task, listeners))
            if key:
                await reading.take_turns()
        tasks, has_more = take_page(found, limit, reading.hub.limits.max_result_bytes)
        return {"tasks": tasks, "after": found[len(tasks) - 1]["task"] if tasks else after, "has_more": has_more}

    @operation("read")
    async def get(self, reading: Reading, *, task: TaskId, trigger: Seq | None = None) -> dict[str, Any]:
        """Return a task with its text, its result and what happened to it."""
        listeners = await find_audience(reading, trigger)
        value = reading.get(f"task/{task:010d}")
        found = msgspec.convert(value, SharedTask) if value is not None else None
        if found is None or not is_visible(reading.hub.state, reading.origin, found, listeners):
            raise unknown_task(task)
        return {
            **describe_task(reading, found, listeners),
            "body": reading.get(f"body/{task}") or "",
            "result": found.result.text,
            "messages": found.result.messages,
            "references": found.result.references,
            "pool": found.pool,
            "reviewer": found.reviewer,
            "done_by": found.result.by,
            "events": [{"at": at, "by": by, "text": text} for at, by, text in found.events],
        }

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        """End the task claims that an agent made during a reaction that has now ended."""
        agent_id, names = reaction.agent_id, (reaction.reaction,)
        unfinished = f"{agent_id}'s work ended without completing it"
        end_work(change, agent_id, reaction.trigger, names, unfinished, f"{agent_id} did not claim it")

    def undelivered(self, change: Change, failed: Undelivered) -> None:
        """End the claims that an agent made while it reacted to a message that became a dead letter.

        If the message was sent to wake the assignee of a task, end that assignment too.
        """
        why = f"{failed.agent_id} failed at it too often"
        end_work(change, failed.agent_id, failed.seq, failed.reactions, why, why)

    def removed(self, change: Change, agent_id: str) -> None:
        """Offer the tasks of a removed participant to others. Pass its pending reviews to the creators of the tasks."""
        for key, _ in change.items("task/"):
            task = load_task(change, int(key.removeprefix("task/")))  # an earlier iteration may have changed it
            assert task is not None
            if task.state == "review" and task.reviewer == agent_id:
                log_change(change, task)
                replace_reviewer(change, task)
            elif agent_id == task.holder or (task.state == "open" and agent_id == task.assignee):
                log_change(change, task)
                end_claim(change, task, f"{agent_id} was removed from this network", cause_of(task))
            if is_abandoned(change, task):
                log_change(change, task)
                task.result = TaskResult("", "Nobody is left who could do it or change it.")
                finish_task(change, task, "cancelled", cause_of(task))

    async def maintain(self, context: Upkeep) -> None:
        """Find the tasks whose assignees can no longer be woken because retention has deleted the wake-up messages."""
        if context.first_seq == self._first_seq:
            return
        self._first_seq = context.first_seq
        woken = "tasks/woken/"
        seqs = [int(key.removeprefix(woken)) for key, _ in context.state.items("mod") if key.startswith(woken)]
        for seq in seqs:
            if seq < context.first_seq:
                context.submit(seq)

    def apply_entry(self, change: Change, payload: int) -> None:
        number = change.get(f"woken/{payload}")
        task = load_task(change, number) if number is not None else None
        if task is None or task.state != "open" or change.state.ack_cursor(task.assignee).is_handled(payload):
            change.put(f"woken/{payload}", None)
        else:
            log_change(change, task)
            end_claim(change, task, f"{task.assignee} did not read its message in time", None)

    def standing(self, reading: Reading, trigger: MessageHead, listeners: Collection[str]) -> builtins.list[str]:
        return list_standing(reading, trigger, listeners)

    def due(self, change: Change, key: str) -> None:
        kind, _, number = key.partition("/")
        task = load_task(change, int(number))
        if task is None:
            return
        if kind == "drop":
            waiting = (load_task(change, it) for it in task.dependents)
            if any(it is not None and it.state == "waiting" for it in waiting):
                change.schedule(key, change.stamp + KEEP_MS)
            else:
                delete_task(change, task)
        elif kind == "due":
            log_change(change, task)
            task.log(change.stamp, "", "overdue")
            for name in dict.fromkeys((task.creator, task.holder or task.assignee)):
                change.notify(name, f"{task.name} is overdue.", cause=cause_of(task))
            save_task(change, task)
        elif kind == "lease" and (claim := task.claim) is not None:
            # A dead letter ends its reaction without a call of the hook ``ended``.
            is_over = claim.reaction and change.state.get("reaction", f"{claim.holder}/{claim.reaction}") is None
            if is_over or change.absent_ms >= claim.lease_ms:
                why = "'s work ended without completing it" if is_over else " was offline for too long"
                log_change(change, task)
                end_claim(change, task, f"{claim.holder}{why}", cause_of(task))
            else:
                schedule_lease(change, task, claim.lease_ms - change.absent_ms)
