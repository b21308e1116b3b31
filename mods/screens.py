"""Screen definitions of the included mods. docs/mods.md explains their format."""

from __future__ import annotations

from roundelay.network.mod import Action, Detail, DetailList, Fact, Input, ModScreen

UNFINISHED = ("waiting", "open", "claimed", "review")

TASK_BOARD = ModScreen(
    id="board",
    title="Tasks",
    view="board",
    op="tasks.list",
    args={"state": "", "limit": 100},
    items="tasks",
    key="task",
    more={"after": ".after"},
    heading="title",
    column="state",
    columns=(*UNFINISHED, "done", "failed", "cancelled"),
    facts=(
        Fact("holder", "Claimed by", "people"),
        Fact("assignee", "For", "people"),
        Fact("due", "Due", "time"),
        Fact("creator", "From", "people"),
    ),
    detail=Detail(
        op="tasks.get",
        args={"task": "task"},
        text="body",
        facts=(
            Fact("state", "State"),
            Fact("creator", "From", "people"),
            Fact("assignee", "For", "people"),
            Fact("holder", "Claimed by", "people"),
            Fact("pool", "Open to", "people"),
            Fact("reviewer", "Reviewer", "people"),
            Fact("depends_on", "Depends on"),
            Fact("due", "Due", "time"),
            Fact("conversation", "Conversation", "message"),
            Fact("done_by", "Done by", "people"),
            Fact("result", "Result"),
            Fact("references", "References"),
        ),
        parts=(DetailList("History", "events", (Fact("at", "", "time"), Fact("by", "", "people"), Fact("text"))),),
    ),
    create=Action(
        op="tasks.create",
        label="New task",
        inputs=(
            Input("title", "Title"),
            Input("body", "Text", is_long=True),
            Input("assignee", "For (empty: anybody)"),
            Input("channel", "Channel"),
            Input("due", "Due, such as 2026-12-01T18:00Z"),
        ),
    ),
    actions=(
        Action("tasks.claim", "Claim", {"task": "task"}, when={"state": ("open",)}),
        Action("tasks.release", "Release", {"task": "task"}, when={"state": ("claimed",)}),
        Action(
            "tasks.complete",
            "Complete",
            {"task": "task"},
            (Input("result", "Result", is_long=True),),
            when={"state": ("claimed", "review")},
        ),
        Action("tasks.cancel", "Cancel", {"task": "task"}, (Input("reason", "Reason"),), when={"state": UNFINISHED}),
        Action(
            "tasks.reopen",
            "Reopen",
            {"task": "task"},
            (Input("reason", "Reason"),),
            when={"state": ("review", "done", "failed", "cancelled")},
        ),
    ),
)

NOTES = ModScreen(
    id="notes",
    title="Notes",
    view="document",
    op="notes.list",
    args={"limit": 100},
    items="notes",
    key="note",
    more={"after": "note"},
    heading="note",
    facts=(Fact("by", "", "people"), Fact("at", "", "time"), Fact("version", "Version")),
    detail=Detail(
        op="notes.read",
        args={"note": "note"},
        text="text",
        facts=(
            Fact("version", "Version"),
            Fact("owner", "Owner", "people"),
            Fact("access", "Others may"),
            Fact("backlinks", "Linked from"),
        ),
        parts=(
            DetailList(
                "History",
                "versions",
                (Fact("version", "Version"), Fact("by", "", "people"), Fact("at", "", "time"), Fact("summary")),
                op="notes.history",
                args={"note": "note"},
                open_op="notes.diff",
                open_args={"note": "note", "version": "version"},
                open_text="diff",
            ),
        ),
    ),
    create=Action(
        op="notes.create",
        label="New note",
        inputs=(
            Input("thread_id", "Thread, such as channel:dev"),
            Input("name", "Name"),
            Input("text", "Text", is_long=True),
        ),
    ),
    actions=(
        Action(
            "notes.write",
            "Edit",
            {"note": "note", "expected_version": "version"},
            (Input("text", "Text", is_long=True, field="text"),),
        ),
    ),
)

POLLS = ModScreen(
    id="polls",
    title="Polls",
    view="list",
    op="polls.list",
    items="polls",
    key="poll",
    more={"after": "poll"},
    heading="question",
    facts=(
        Fact("by", "", "people"),
        Fact("thread_id", "", "thread"),
        Fact("choices", "Choices"),
        Fact("voters", "Votes"),
        Fact("is_open", "Open"),
        Fact("closes_at", "Closes", "time"),
    ),
    actions=(
        Action(
            "polls.vote",
            "Vote",
            {"poll": "poll"},
            (Input("choice", "Choice", choices_from="choices.choice"),),
            when={"is_open": ("true",)},
        ),
        Action("polls.close", "Close", {"poll": "poll"}, when={"is_open": ("true",)}),
    ),
)

SCHEDULE = ModScreen(
    id="schedule",
    title="Timers",
    view="timeline",
    op="timers.list",
    items="timers",
    key="timer",
    more={"after": ".after"},
    heading="text",
    at="at",
    facts=(Fact("to", "To", "people"), Fact("by", "From", "people"), Fact("cron", "Repeats")),
    create=Action(
        op="timers.create",
        label="New timer",
        inputs=(
            Input("text", "Message"),
            Input("to", "To (empty: yourself)"),
            Input("at", "Once at, such as 2026-12-01T18:00"),
            Input("cron", "Or repeated, such as 0 8 * * *"),
            Input("timezone", "Time zone, such as Europe/Berlin"),
        ),
    ),
    actions=(Action("timers.cancel", "Cancel", {"timer": "timer"}),),
)

FILES = ModScreen(
    id="files",
    title="Files",
    view="list",
    op="files.list",
    items="files",
    key="file",
    more={"after": ".next"},
    heading="name",
    facts=(
        Fact("file", "Open", "file"),
        Fact("owner", "", "people"),
        Fact("at", "", "time"),
        Fact("size", "", "size"),
        Fact("media_type", "Type"),
        Fact("version", "Version"),
    ),
    actions=(Action("files.delete", "Delete", {"file": "file"}),),
)
