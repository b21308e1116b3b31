"""Storage of notes: their properties in the hub's memory, and texts, versions and proposals as cold values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.tables import descending_key
from roundelay.network.core.takeovers import next_message_head
from roundelay.network.core.visibility import has_people, may_read
from roundelay.network.errors import Forbidden, InvalidArguments, UnknownMessage
from roundelay.network.mod import Change, Reading
from roundelay.network.operations.documents import shows_thread
from roundelay.network.operations.views import View, open_view

from .note_text import Delta, Paragraph, attribute, find_delta, find_section, go_back, join, list_links, write_diff

MAX_NOTES, MAX_NOTES_BY_ONE = 2000, 200
"""Maximum number of notes in a network, and of notes that one participant created."""
MAX_NOTE_BYTES, MAX_PARAGRAPHS = 65_536, 1000
MAX_VERSIONS = 200
"""Maximum number of stored versions of a note, including the current version."""
MAX_LINKS, MAX_LABELS, MAX_PROPOSALS = 20, 8, 20
SEARCHED_BYTES = 4 * 1024 * 1024
"""Maximum total size of the texts that one call of `notes.search` examines, in bytes."""

Access = Literal["open", "owner"]


class Proposal(Struct, frozen=True):
    """Proposed new text for a note. ``base`` is the version of the note that the proposal's author had read. The text
    itself is stored as a cold value."""

    number: int
    by: str
    at: int
    base: int
    cause: int
    label: int = 0
    summary: str = ""


class Note(Struct, frozen=True, omit_defaults=True):
    """The properties of a note in the hub's memory. ``head`` is the next message of its thread (`Change.thread`)."""

    head: MessageHead
    creator: str
    owner: str
    access: Access
    version: int = 0
    bytes: int = 0
    by: str = ""
    at: int = 0
    seq: int = 0
    links: list[str] = []
    labels: list[int] = []
    """Labels of the causes of the note's writes. The labels identify the people concerned if no person reads the
    thread."""
    proposals: list[Proposal] = []
    next_proposal: int = 1


class Body(Struct, frozen=True):
    """The current text of a note."""

    version: int
    paragraphs: list[Paragraph]


class NoteStep(Struct, frozen=True):
    """One version in a note's history, with the difference from which the previous version can be restored."""

    version: int
    by: str
    at: int
    seq: int
    cause: int
    action: str
    summary: str
    delta: Delta


# --- changes


def open_note(change: Change, note_id: str, *, writes: bool = False) -> tuple[Note, Body]:
    """Return a note that the caller may read, or write with ``writes``. Raises `UnknownMessage` for other notes, whether
    they exist or not, and `Forbidden` for a note that only its owner writes."""
    raw = change.get(f"n/{note_id}")
    note = msgspec.convert(raw, Note) if raw is not None else None
    if note is None or not change.reads_now(note.head):
        raise unknown_note(note_id)
    if writes:
        change.check_may_write(note.head)
        if note.access == "owner":
            check_owner(change, note_id, note)
    return note, decode_body(change.cold(f"t/{note_id}"))


def check_owner(change: Change, note_id: str, note: Note) -> None:
    if change.origin.agent_id != note.owner and not change.origin.is_operator:
        raise Forbidden(f"{note.owner} owns {note_id}. Propose a change with notes.propose.")


def store(
    change: Change,
    note_id: str,
    note: Note,
    before: Sequence[Paragraph],
    after: str | Sequence[Paragraph],
    action: str,
    summary: str,
    cause: int | None,
    *,
    proposal: Proposal | None = None,
) -> dict[str, Any]:
    """Store the next version of a note, and return its id and version. The author of an accepted ``proposal`` becomes
    the author of the change."""
    text = after if isinstance(after, str) else join(after)
    check_size(text)
    if action == "created":
        change.check_may_write(note.head)
    version = note.version + 1
    if proposal is not None:
        by, cause, label = proposal.by, proposal.cause, proposal.label
    else:
        by, label = change.origin.agent_id, find_label(change, note, cause)
    labels = note.labels
    if label and label not in labels:
        labels = [*labels, label]
        if len(labels) > MAX_LABELS:
            raise InvalidArguments(
                f"{note_id} has collected work of {MAX_LABELS} conversations, which is the maximum. Create another note."
            )
    row = change.log({"note": note_id, "version": version})
    source = Paragraph("", by, row.seq, cause or 0, version)
    paragraphs = attribute(text, before, source) if isinstance(after, str) else [*after]
    if len(paragraphs) > MAX_PARAGRAPHS:
        raise InvalidArguments(f"The text has {len(paragraphs)} paragraphs. A note has at most {MAX_PARAGRAPHS}.")
    step = NoteStep(version, by, change.stamp, row.seq, cause or 0, action, summary, find_delta(before, paragraphs))
    change.put_cold(f"t/{note_id}", Body(version, paragraphs))
    change.put_cold(step_key(note_id, version), step)
    if version > MAX_VERSIONS:
        change.put_cold(step_key(note_id, version - MAX_VERSIONS), None)
    links = list_links(text, note.head.thread_id, MAX_LINKS)
    changed = msgspec.structs.replace(
        note, version=version, bytes=len(text.encode()), by=by, at=change.stamp, seq=row.seq, links=links, labels=labels
    )
    put(change, note_id, changed)
    for target in {*note.links} ^ {*links}:
        change.put(f"l/{target}/{note_id}", True if target in links else None)
    change.update_screens(note.head, {"note": note_id, "version": version, "by": by})
    return {"note": note_id, "version": version}


def find_label(change: Change, note: Note, cause: int | None) -> int:
    """Return the label of the message that caused a write. Return 0 if there is no cause or a person reads the thread."""
    if cause is None:
        return 0
    label = change.head(cause).label
    return 0 if has_people(change.state, next_message_head(change.state, note.head)) else label


def delete_note(change: Change, note_id: str, note: Note) -> None:
    """Delete a note with its versions and proposals."""
    first = max(1, note.version - MAX_VERSIONS + 1)
    for key in (
        f"t/{note_id}",
        *(step_key(note_id, version) for version in range(first, note.version + 1)),
        *(f"p/{note_id}/{proposal.number}" for proposal in note.proposals),
    ):
        change.put_cold(key, None)
    for key in (f"n/{note_id}", *(f"l/{target}/{note_id}" for target in note.links)):
        change.put(key, None)
    for key in ("count", f"by/{note.creator}"):
        change.put(key, (change.get(key) or 1) - 1 or None)


def put(change: Change, note_id: str, note: Note) -> None:
    change.put(f"n/{note_id}", note)


def check_size(text: str) -> None:
    if (size := len(text.encode())) > MAX_NOTE_BYTES:
        raise InvalidArguments(
            f"The note would have {size} bytes. A note has at most {MAX_NOTE_BYTES}: begin another one and link to it with "
            "[[NAME]]."
        )


def describe_conflict(
    change: Change, note_id: str, note: Note, body: Body, text: str, cause: int | None
) -> dict[str, Any]:
    """Return the answer to a writer whose expected version is outdated. Nothing is stored."""
    value = {"note": note_id, "version": note.version, "is_conflict": True}
    # An agent must not carry the text into a conversation whose people may not read the note.
    trigger = change.head(cause) if cause is not None else None
    if trigger is not None and (trigger.thread_id != note.head.thread_id or {*note.labels} - {trigger.label}):
        return {**value, "hint": "The note has changed. Read it with notes_read, and write again."}
    current = join(body.paragraphs)
    diff = write_diff(current, text, f"version {note.version}", "yours")
    return {**value, "current": current, "yours": text, "diff": diff}


def reads_note(change: Change, note: Note, agent_id: str) -> bool:
    return may_read(change.state, agent_id, next_message_head(change.state, note.head))


# --- reads


def list_notes(reading: Reading, thread_id: str | None, after: str) -> Iterator[tuple[str, Note]]:
    """Return the notes of one thread or of all threads, sorted by id. The result is a copy, because the state may change
    between two reads."""
    prefix = f"n/{thread_id}/" if thread_id is not None else "n/"
    items = reading.items(prefix, f"n/{after}" if after else "")
    return iter([(key[2:], msgspec.convert(raw, Note)) for key, raw in items])


async def find_note(reading: Reading, note_id: str, trigger: int | None) -> tuple[Note, Body]:
    """Return a note that the caller may read. Raises `UnknownMessage` for other notes, whether they exist or not."""
    view = await open_view(reading, trigger)
    raw = reading.get(f"n/{note_id}")
    note = msgspec.convert(raw, Note) if raw is not None else None
    if note is None or not await shows_thread(reading, view, note.head, note.labels):
        raise unknown_note(note_id)
    return note, decode_body(await reading.cold(f"t/{note_id}"))


async def read_version(reading: Reading, note_id: str, body: Body, version: int | None) -> list[Paragraph]:
    if version is None or version == body.version:
        return body.paragraphs
    end = step_key(note_id, body.version + 1)
    count = max(0, min(body.version - version, MAX_VERSIONS))
    steps = [raw for _, raw in await reading.list_cold(f"v/{note_id}/", count, after=end)]
    return undo(note_id, version, body.version, body.paragraphs, steps)


def undo(
    note_id: str, version: int, current: int, paragraphs: list[Paragraph], steps: Sequence[Any]
) -> list[Paragraph]:
    """Return the paragraphs of an earlier version. Undo the steps of the history, beginning with the newest step."""
    decoded = [decode_step(raw) for raw in steps if raw is not None]
    first = max(1, current - MAX_VERSIONS + 1)
    if not first <= version <= current or [step.version for step in decoded] != [*range(current, version, -1)]:
        raise InvalidArguments(f"{note_id} has no version {version}. It has {first} to {current}.")
    for step in decoded:
        paragraphs = go_back(paragraphs, step.delta)
    return paragraphs


async def list_backlinks(reading: Reading, view: View, note_id: str) -> list[str]:
    prefix = f"l/{note_id}/"
    shown: list[str] = []
    for key in [key for key, _ in reading.items(prefix)]:
        other = key.removeprefix(prefix)
        raw = reading.get(f"n/{other}")
        note = msgspec.convert(raw, Note) if raw is not None else None
        if note is not None and len(shown) < MAX_LINKS and await shows_thread(reading, view, note.head, note.labels):
            shown.append(other)
    return shown


def find_range(note_id: str, body: Body, heading: str | None) -> tuple[int, int]:
    if heading is None:
        return 0, len(body.paragraphs)
    section = find_section(body.paragraphs, heading)
    if section is None:
        raise InvalidArguments(f"{note_id} has no heading {heading!r}. Read the note to see its headings.")
    return section


def end_paragraph(text: str) -> str:
    """Return the text with a blank line at its end. Return an empty string for an empty text."""
    return f"{text.rstrip()}\n\n" if text.strip() else ""


def describe(note: Note) -> dict[str, Any]:
    return {
        "version": note.version, "bytes": note.bytes, "by": note.by, "at": note.at, "owner": note.owner,
        "access": note.access, "proposals": len(note.proposals),
    }  # fmt: skip


def describe_source(paragraph: Paragraph) -> dict[str, Any]:
    cause = {"cause": paragraph.cause} if paragraph.cause else {}
    return {"text": paragraph.text, "by": paragraph.by, "seq": paragraph.seq, "version": paragraph.version, **cause}


def decode_body(raw: Any) -> Body:
    return msgspec.convert(raw, Body) if raw is not None else Body(0, [])


def decode_step(raw: Any) -> NoteStep:
    return msgspec.convert(raw, NoteStep)


def step_key(note_id: str, version: int) -> str:
    return f"v/{note_id}/{descending_key(version)}"


def unknown_note(note_id: str) -> UnknownMessage:
    return UnknownMessage(f"There is no note {note_id!r} that you may read. notes.list lists notes.")
