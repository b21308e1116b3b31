"""``roundelay tasks``: create, claim and finish the shared tasks of the mod `tasks`."""

from __future__ import annotations

from typing import Any

import click

from roundelay.commands.mod_calls import ListingGroup, call_mod, call_options, list_pages
from roundelay.commands.output import list_answer, show_answer
from roundelay.display.text import format_day, sanitize, sanitize_lines

TASK = click.argument("task", type=click.IntRange(1), metavar="TASK")
REASON = click.option("--reason", default="", metavar="TEXT", help="Why, for the participants concerned.")
STATES = ("unfinished", "waiting", "open", "claimed", "review", "done", "failed", "cancelled")


@click.group(cls=ListingGroup, short_help="List, create, claim and finish shared tasks.")
def tasks() -> None:
    """List, create, claim and finish the tasks of the mod `tasks`. Without a subcommand, list unfinished tasks."""


@tasks.command("list", short_help="List tasks.")
@click.option("--state", type=click.Choice(STATES), default="unfinished", show_default=True, help="Only this state.")
@click.option("--all", "is_all", is_flag=True, help="Tasks in every state.")
@click.option("--assignee", metavar="ID", help="Only tasks assigned to or held by ID.")
@click.option("--conversation", type=click.IntRange(1), metavar="SEQ", help="Only tasks of this conversation.")
@call_options
def list_tasks(as_json: bool, state: str, is_all: bool, assignee: str | None, conversation: int | None) -> None:
    """List the tasks that you may see, oldest first."""
    chosen = "" if is_all else state
    found = list_pages("tasks.list", "tasks", state=chosen, assignee=assignee, conversation=conversation)
    list_answer(
        {"tasks": found},
        {
            "TASK": lambda it: it["task"],
            "STATE": lambda it: it["state"],
            "TITLE": lambda it: it["title"],
            "CREATOR": lambda it: it["creator"],
            "ASSIGNEE": lambda it: it.get("assignee", ""),
            "HOLDER": lambda it: it.get("holder", ""),
            "WAITS FOR": lambda it: ", ".join(map(str, it.get("depends_on", ()))),
            "DUE": lambda it: format_day(it["due"]) if "due" in it else "",
        },
        empty="There are no such tasks. `roundelay tasks create TITLE` creates one.",
        as_json=as_json,
    )


@tasks.command("show", short_help="Show a task and its events.")
@TASK
@call_options
def show_task(task: int, as_json: bool) -> None:
    """Show the text, the result and the events of a task."""
    value = call_mod("tasks.get", task=task)
    lines = [*_describe(value), *sanitize_lines(value["body"])]
    if value["result"]:
        lines += ["", "Result:", *sanitize_lines(value["result"])]
    events = (f"{format_day(it['at'])}  {it['by'] or 'tasks'}: {it['text']}" for it in value["events"])
    show_answer(value, lambda _: [*lines, "", *map(sanitize, events)], as_json=as_json)


@tasks.command("create", short_help="Create a task.")
@click.argument("title")
@click.option("--body", default="", metavar="TEXT", help="What is to be done.")
@click.option("--assignee", metavar="ID", help="Who has to do it.")
@click.option("--pool", multiple=True, metavar="ID", help="Who may claim it; repeatable.")
@click.option("--capability", metavar="WORDS", help="Skills: picks a pool by the participants' cards.")
@click.option("--after", "depends_on", multiple=True, type=click.IntRange(1), metavar="TASK", help="Wait for TASK.")
@click.option("--reviewer", metavar="ID", help="Who must accept the result.")
@click.option("--due", metavar="TIME", help="As in ISO 8601: 2026-03-01T18:00+01:00.")
@click.option("--channel", metavar="NAME", help="The channel whose readers see it.")
@click.option("--cause", type=click.IntRange(1), metavar="SEQ", help="A message of its conversation.")
@call_options
def create_task(as_json: bool, **args: Any) -> None:
    """Create a task. Its assignee is woken when the task is ready."""
    _show(call_mod("tasks.create", **args), as_json=as_json)


@tasks.command("claim", short_help="Claim a task.")
@TASK
@click.option("--minutes", type=click.IntRange(1, 1440), metavar="N", help="How long you may be offline (15).")
@click.option("--take-over", is_flag=True, help="Take it from its holder.")
@call_options
def claim_task(as_json: bool, **args: Any) -> None:
    """Claim an open task. The exit code is 1 if somebody else holds the task, or if the task is not open."""
    value = call_mod("tasks.claim", **args)
    _show(value, as_json=as_json)
    if not value["is_claimed"]:
        raise SystemExit(1)


@tasks.command("progress", short_help="Report progress on a task.")
@TASK
@click.argument("note")
@call_options
def report_progress(as_json: bool, **args: Any) -> None:
    """Add NOTE to the events of a task that you hold."""
    _show(call_mod("tasks.progress", **args), as_json=as_json)


@tasks.command("complete", short_help="Complete a task.")
@TASK
@click.argument("result", default="")
@click.option("--message", "messages", multiple=True, type=click.IntRange(1), metavar="SEQ", help="A message with it.")
@click.option("--reference", "references", multiple=True, metavar="NAME", help="A note or a file with it.")
@call_options
def complete_task(as_json: bool, **args: Any) -> None:
    """Complete a task with RESULT. If you are the task's reviewer, accept the result instead."""
    _show(call_mod("tasks.complete", **args), as_json=as_json)


@tasks.command("fail", short_help="End a task that cannot be done.")
@TASK
@click.argument("reason")
@call_options
def fail_task(as_json: bool, **args: Any) -> None:
    """End a task that you hold without a result, because of REASON."""
    _show(call_mod("tasks.fail", **args), as_json=as_json)


def _add_command(name: str, help_text: str) -> None:
    @tasks.command(name, short_help=help_text, help=help_text)
    @TASK
    @REASON
    @call_options
    def change_task(as_json: bool, **args: Any) -> None:
        _show(call_mod(f"tasks.{name}", **args), as_json=as_json)


_add_command("release", "Give back a task that you hold or were assigned.")
_add_command("cancel", "Cancel a task that you created.")
_add_command("reopen", "Open an ended task again, or refuse its result.")


def _show(value: dict[str, Any], *, as_json: bool) -> None:
    show_answer(value, lambda _: _describe(value), as_json=as_json)


def _describe(value: dict[str, Any]) -> list[str]:
    by = value.get("holder") or value.get("assignee")
    return [sanitize(f"Task {value['task']} is {value['state']}{f' ({by})' if by else ''}: {value['title']}")]
