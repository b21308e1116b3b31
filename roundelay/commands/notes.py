"""``roundelay notes``: the shared notes of the mod `notes`."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import click

from roundelay.commands.mod_calls import ListingGroup, call_mod, call_options, list_pages
from roundelay.commands.output import list_answer, print_answer, show_answer
from roundelay.display.text import format_day, sanitize, sanitize_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

NOTE = click.argument("note", metavar="THREAD/NAME")


@click.group(cls=ListingGroup, short_help="List, read and write shared notes.")
def notes() -> None:
    """List, read and write the notes of the mod `notes`. A note belongs to a thread, and its id is THREAD/NAME."""


@notes.command("list", short_help="List notes.")
@click.option("--thread", metavar="ID", help="Only notes of this thread.")
@call_options
def list_notes(as_json: bool, thread: str | None) -> None:
    """List the notes that you may read."""
    list_answer(
        {"notes": list_pages("notes.list", "notes", thread_id=thread)},
        {
            "NOTE": lambda it: it["note"],
            "VERSION": lambda it: it["version"],
            "BY": lambda it: it["by"],
            "CHANGED": lambda it: format_day(it["at"]),
            "OWNER": lambda it: it["owner"],
            "ACCESS": lambda it: it["access"],
            "PROPOSALS": lambda it: it["proposals"] or "",
        },
        empty="There are no notes. `roundelay notes create THREAD/NAME FILE` creates one.",
        as_json=as_json,
    )


@notes.command("show", short_help="Show a note.")
@NOTE
@click.option("--version", type=click.IntRange(1), help="An earlier version.")
@click.option("--heading", metavar="TEXT", help="Only the section under this heading.")
@click.option("--sources", is_flag=True, help="Show the author and the cause of each paragraph.")
@call_options
def show_note(note: str, as_json: bool, version: int | None, heading: str | None, sources: bool) -> None:
    """Show the text of a note."""
    value = call_mod("notes.read", note=note, version=version, heading=heading, sources=sources)
    show_answer(value, lambda _: _describe(value), as_json=as_json)


def _describe(value: dict[str, Any]) -> Iterable[str]:
    if "sources" not in value:
        yield from sanitize_lines(value["text"].rstrip())
        return
    for paragraph in value["sources"]:
        cause = f" because of #{paragraph['cause']}" if "cause" in paragraph else ""
        yield sanitize(f"[{paragraph['by']}, version {paragraph['version']}{cause}]")
        yield from sanitize_lines(paragraph["text"].rstrip())


@notes.command("create", short_help="Create a note from a file or stdin.")
@NOTE
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@click.option("--owned", is_flag=True, help="Only you write the note. Others propose changes.")
@call_options
def create_note(note: str, file: IO[str], as_json: bool, owned: bool) -> None:
    """Create a note with the text of FILE, or of stdin."""
    thread, slash, name = note.partition("/")
    if not slash:
        raise click.UsageError(f"{note!r} is not the id of a note. Write THREAD/NAME, such as channel:dev/plan.")
    access = "owner" if owned else "open"
    value = call_mod("notes.create", thread_id=thread, name=name, text=file.read(), access=access)
    _show_change(value, as_json=as_json)


@notes.command("write", short_help="Replace the text of a note.")
@NOTE
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@click.option("--expected", type=click.IntRange(1), required=True, metavar="VERSION", help="The version that you read.")
@call_options
def write_note(note: str, file: IO[str], as_json: bool, expected: int) -> None:
    """Replace the text of a note with FILE, or stdin. If the note has changed since, nothing is stored."""
    value = call_mod("notes.write", note=note, text=file.read(), expected_version=expected)
    _show_change(value, as_json=as_json)


@notes.command("append", short_help="Add a paragraph to a note.")
@NOTE
@click.argument("text")
@click.option("--heading", metavar="TEXT", help="At the end of the section under this heading.")
@call_options
def append_note(note: str, text: str, as_json: bool, heading: str | None) -> None:
    """Add a paragraph at the end of a note or of a section."""
    _show_change(call_mod("notes.append", note=note, text=text, heading=heading), as_json=as_json)


@notes.command("history", short_help="List the versions of a note.")
@NOTE
@call_options
def note_history(note: str, as_json: bool) -> None:
    """List the versions of a note, newest first."""
    value = call_mod("notes.history", note=note, limit=200)
    list_answer(
        {"versions": value["versions"]},
        {
            "VERSION": lambda it: it["version"],
            "BY": lambda it: it["by"],
            "WHEN": lambda it: format_day(it["at"]),
            "BECAUSE OF": lambda it: f"#{it['cause']}" if it["cause"] else "",
            "WHAT": lambda it: it["summary"] or it["action"],
        },
        empty="There are no versions.",
        as_json=as_json,
    )


@notes.command("diff", short_help="Show what changed between two versions.")
@NOTE
@click.argument("version", type=click.IntRange(1))
@click.argument("to_version", type=click.IntRange(1), required=False)
@call_options
def diff_note(note: str, version: int, to_version: int | None, as_json: bool) -> None:
    """Show the difference from VERSION to TO_VERSION, or to the current version."""
    value = call_mod("notes.diff", note=note, version=version, to_version=to_version)
    lines = sanitize_lines(value["diff"]) if value["diff"] else ["The two versions are equal."]
    show_answer(value, lambda _: lines, as_json=as_json)


@notes.command("search", short_help="Find notes by their words.")
@click.argument("words", nargs=-1, required=True)
@call_options
def search_notes(words: tuple[str, ...], as_json: bool) -> None:
    """Find the notes that contain all WORDS."""
    found = list_pages("notes.search", "notes", query=" ".join(words))
    columns = {"NOTE": lambda it: it["note"], "LINE": lambda it: next(iter(it["lines"]), "")}
    list_answer({"notes": found}, columns, empty="Nothing was found.", as_json=as_json)


def _show_change(value: dict[str, Any], *, as_json: bool) -> None:
    if value.get("is_conflict"):
        if as_json:
            print_answer(value)
        else:
            click.echo("\n".join(sanitize_lines(value["diff"])))
        raise click.ClickException(
            f"{value['note']} has version {value['version']} by now, so nothing was stored. Apply your change to that version."
        )
    show_answer(
        value,
        lambda _: [sanitize(f"{value['note']} has version {value['version']}.")],
        as_json=as_json,
    )
