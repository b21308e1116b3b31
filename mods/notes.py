"""`notes`: shared Markdown documents with versions. Each note belongs to the readers of a thread.

Only participants who would receive the thread's next message can read the note. The hub's memory holds the properties
of each note. Texts, earlier versions and proposals are cold values.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roundelay.network.addresses import thread_start
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.ledger.search import list_words
from roundelay.network.mod import Change, Mod, Reading, operation
from roundelay.network.operations.documents import shows_thread
from roundelay.network.operations.paging import ListPage, take_page
from roundelay.network.operations.views import open_view

from .note_store import (
    MAX_NOTE_BYTES,
    MAX_NOTES,
    MAX_NOTES_BY_ONE,
    MAX_PROPOSALS,
    MAX_VERSIONS,
    SEARCHED_BYTES,
    Access,
    Body,
    Note,
    Proposal,
    check_owner,
    check_size,
    decode_body,
    decode_step,
    delete_note,
    describe,
    describe_conflict,
    describe_source,
    end_paragraph,
    find_label,
    find_note,
    find_range,
    list_backlinks,
    list_notes,
    open_note,
    put,
    read_version,
    reads_note,
    step_key,
    store,
    undo,
)
from .note_text import join, write_diff
from .screens import NOTES

NoteId = Annotated[
    str,
    Meta(max_length=300, pattern="^[^/]+/[^/]+$", description="Id of the note: THREAD/NAME, as notes.list shows it."),
]
Name = Annotated[str, Meta(pattern=r"^[\w][\w .-]{0,79}$", description="Name of the note, unique in its thread.")]
ThreadId = Annotated[str, Meta(max_length=220, description="Id of the thread, such as channel:dev.")]
Text = Annotated[str, Meta(max_length=MAX_NOTE_BYTES, description="Markdown.")]
Heading = Annotated[str, Meta(max_length=200, description="Heading of a section, without #.")]
Version = Annotated[int, Meta(ge=1)]
Summary = Annotated[str, Meta(max_length=200, description="What changed, in a few words.")]
PageLimit = Annotated[int, Meta(ge=1, le=500)]


def _needs_text(args: Any) -> list[str]:
    return [f"t/{args.note}"]


def _needs_proposal(args: Any) -> list[str]:
    return [f"t/{args.note}", f"p/{args.note}/{args.proposal}"]


def _needs_versions(args: Any) -> list[str]:
    later = range(args.version + 1, args.version + MAX_VERSIONS)
    return [f"t/{args.note}", *(step_key(args.note, version) for version in later)]


def _needs_thread(args: Any) -> list[int]:
    start = thread_start(args.thread_id or "")
    return [start] if start is not None else []


class Notes(Mod):
    """Create, read, write and search notes, and propose changes of notes that others own."""

    id = "notes"
    screens = (NOTES,)

    @operation("change", needs=_needs_thread)
    def create(
        self,
        change: Change,
        *,
        name: Name,
        text: Text,
        thread_id: ThreadId | None = None,
        access: Access = "open",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Create a shared note in a thread, by default in the thread of the message that you react to. Everyone in the
        thread reads it. With access "open" they also write it. With "owner" only you do, and others propose changes."""
        by = change.origin.agent_id
        if thread_id is None and cause is None:
            raise InvalidArguments("notes.create needs thread_id, such as channel:dev.")
        name = " ".join(name.split())
        head = change.thread(thread_id if thread_id is not None else change.head(cause or 0))
        note_id = f"{head.thread_id}/{name}"
        if change.get(f"n/{note_id}") is not None:
            raise InvalidArguments(
                f"The note {note_id!r} exists. Read it with notes.read and change it with notes.write."
            )
        total, own = change.get("count") or 0, change.get(f"by/{by}") or 0
        if total >= MAX_NOTES or own >= MAX_NOTES_BY_ONE:
            raise InvalidArguments(
                f"Too many notes: at most {MAX_NOTES_BY_ONE} per participant and {MAX_NOTES} in the network. Use a section "
                "of an existing note."
            )
        change.put("count", total + 1)
        change.put(f"by/{by}", own + 1)
        return store(change, note_id, Note(head, by, by, access), [], text, "created", "", cause)

    @operation("change", needs=_needs_text)
    def write(
        self,
        change: Change,
        *,
        note: NoteId,
        text: Text,
        expected_version: Version,
        summary: Summary = "",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Replace the text of a note. expected_version is the version that you read. If somebody else has written since,
        nothing is stored, and you get the current text and the difference."""
        found, body = open_note(change, note, writes=True)
        if expected_version != found.version:
            return describe_conflict(change, note, found, body, text, cause)
        return store(change, note, found, body.paragraphs, text, "written", summary, cause)

    @operation("change", needs=_needs_text)
    def append(
        self,
        change: Change,
        *,
        note: NoteId,
        text: Annotated[str, Meta(min_length=1, max_length=MAX_NOTE_BYTES)],
        heading: Heading | None = None,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Add a paragraph at the end of a note, or of the section under a heading. This never conflicts with other
        writers."""
        found, body = open_note(change, note, writes=True)
        _, end = find_range(note, body, heading)
        before, after = join(body.paragraphs[:end]), join(body.paragraphs[end:])
        added = f"{end_paragraph(before)}{text}"
        whole = f"{end_paragraph(added)}{after}" if after else added
        return store(change, note, found, body.paragraphs, whole, "appended", "", cause)

    @operation("change", needs=_needs_text)
    def patch(
        self,
        change: Change,
        *,
        note: NoteId,
        find: Annotated[str, Meta(min_length=1, max_length=MAX_NOTE_BYTES, description="Text that occurs once.")],
        replace: Text,
        summary: Summary = "",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Replace one passage of a note. `find` must occur exactly once in the current text."""
        found, body = open_note(change, note, writes=True)
        text = join(body.paragraphs)
        if (count := text.count(find)) != 1:
            raise InvalidArguments(
                f"`find` occurs {count} times in {note} (version {found.version}). It must occur once: read the note, and "
                "quote a longer passage."
            )
        return store(change, note, found, body.paragraphs, text.replace(find, replace), "patched", summary, cause)

    @operation("change", needs=_needs_versions)
    def revert(
        self,
        change: Change,
        *,
        note: NoteId,
        version: Version,
        expected_version: Version,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Write an earlier version of a note again, as a new version. Its paragraphs keep their authors.
        expected_version is the current version that you read."""
        found, body = open_note(change, note, writes=True)
        steps = [
            change.cold(step_key(note, later)) for later in range(found.version, version, -1)
        ] if found.version - version < MAX_VERSIONS else []  # fmt: skip
        paragraphs = undo(note, version, found.version, body.paragraphs, steps)
        if expected_version != found.version:
            return describe_conflict(change, note, found, body, join(paragraphs), cause)
        summary = f"as in version {version}"
        return store(change, note, found, body.paragraphs, paragraphs, "reverted", summary, cause)

    @operation("change", needs=_needs_text, is_tool=False)
    def set_access(self, change: Change, *, note: NoteId, access: Access, owner: str | None = None) -> dict[str, Any]:
        """Choose who writes a note that you own: everyone in its thread ("open") or you ("owner"). `owner` gives it to
        another reader."""
        found, _ = open_note(change, note)
        check_owner(change, note, found)
        if owner is not None and not reads_note(change, found, owner):
            raise InvalidArguments(f"{owner!r} does not read {note}. Only a reader of the thread can own the note.")
        changed = msgspec.structs.replace(found, access=access, owner=owner or found.owner)
        put(change, note, changed)
        change.log({"note": note})
        return {"note": note, "access": access, "owner": changed.owner}

    @operation("change", needs=_needs_text, is_tool=False)
    def delete(self, change: Change, *, note: NoteId) -> dict[str, Any]:
        """Delete a note that you own, with its history and its open proposals."""
        found, _ = open_note(change, note)
        check_owner(change, note, found)
        delete_note(change, note, found)
        change.log({"note": note})
        change.update_screens(found.head, {"note": note, "deleted": True})
        return {"note": note, "deleted": True}

    @operation("change", needs=_needs_text)
    def propose(
        self,
        change: Change,
        *,
        note: NoteId,
        text: Text,
        expected_version: Version,
        summary: Summary = "",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Propose a new text for a note that somebody else owns. The owner is notified and decides."""
        found, _ = open_note(change, note)
        change.check_may_write(found.head)
        by = change.origin.agent_id
        if len(found.proposals) >= MAX_PROPOSALS:
            raise InvalidArguments(
                f"{note} has {MAX_PROPOSALS} open proposals. Its owner, {found.owner}, decides them first."
            )
        check_size(text)
        label = find_label(change, found, cause)
        number = found.next_proposal
        proposal = Proposal(number, by, change.stamp, expected_version, cause or 0, label, summary)
        changed = msgspec.structs.replace(
            found, proposals=[*found.proposals, proposal], next_proposal=proposal.number + 1
        )
        put(change, note, changed)
        change.put_cold(f"p/{note}/{proposal.number}", text)
        change.log({"note": note, "proposal": proposal.number})
        if (
            found.owner != by
            and change.state.present(found.owner) is not None
            and reads_note(change, found, found.owner)
        ):
            change.answer(found.owner, f"{by} proposes a change of your note {note} (proposal {proposal.number}).")
        return {"note": note, "proposal": proposal.number}

    @operation("change", needs=_needs_proposal)
    def decide(
        self, change: Change, *, note: NoteId, proposal: Annotated[int, Meta(ge=1)], accept: bool, anyway: bool = False
    ) -> dict[str, Any]:
        """Accept or reject a proposal for a note that you own. The author may withdraw its own. If the note has changed
        since, you get the difference, and `anyway` replaces the text nevertheless."""
        found, body = open_note(change, note)
        chosen = next((it for it in found.proposals if it.number == proposal), None)
        if chosen is None:
            raise InvalidArguments(f"{note} has no open proposal {proposal}. notes.proposals lists them.")
        if accept or chosen.by != change.origin.agent_id:
            check_owner(change, note, found)
        text = change.cold(f"p/{note}/{proposal}") or ""
        if accept and chosen.base != found.version and not anyway:
            return describe_conflict(change, note, found, body, text, None)
        rest = msgspec.structs.replace(found, proposals=[it for it in found.proposals if it is not chosen])
        change.put_cold(f"p/{note}/{proposal}", None)
        result: dict[str, Any] = {"note": note, "version": found.version, "accepted": accept}
        if accept:
            summary = chosen.summary or f"proposal {proposal}"
            result |= store(change, note, rest, body.paragraphs, text, "accepted", summary, None, proposal=chosen)
        else:
            put(change, note, rest)
            change.log({"note": note})
        if (
            chosen.by != change.origin.agent_id
            and change.state.present(chosen.by)
            and reads_note(change, found, chosen.by)
        ):
            word = "accepted" if accept else "rejected"
            change.answer(chosen.by, f"{change.origin.agent_id} {word} your proposal {proposal} for {note}.")
        return result

    # --- reading

    @operation("read")
    async def read(
        self,
        reading: Reading,
        *,
        note: NoteId,
        heading: Heading | None = None,
        version: Version | None = None,
        sources: bool = False,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """Read a note, or only the section under a heading. `version` reads an earlier version. `sources` adds the author
        and the cause of each paragraph."""
        found, body = await find_note(reading, note, trigger)
        paragraphs = await read_version(reading, note, body, version)
        start, end = find_range(note, Body(body.version, paragraphs), heading) if heading else (0, len(paragraphs))
        chosen = paragraphs[start:end]
        view = await open_view(reading, trigger)
        value = {
            "note": note, "version": version or body.version, "text": join(chosen), "owner": found.owner,
            "access": found.access, "links": found.links, "backlinks": await list_backlinks(reading, view, note),
        }  # fmt: skip
        return {**value, "sources": [describe_source(it) for it in chosen]} if sources else value

    @operation("read")
    async def list(
        self,
        reading: Reading,
        *,
        thread_id: ThreadId | None = None,
        after: Annotated[str, Meta(max_length=300)] = "",
        limit: PageLimit = 100,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List the notes that you may read, of all threads or of one, by id after `after`."""
        view, shown = await open_view(reading, trigger), []
        for note_id, found in list_notes(reading, thread_id, after):
            if await shows_thread(reading, view, found.head, found.labels):
                shown.append({"note": note_id, **describe(found)})
            if len(shown) > limit:
                break
        notes, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
        return {"notes": notes, "has_more": has_more}

    @operation("read")
    async def search(
        self,
        reading: Reading,
        *,
        query: Annotated[str, Meta(min_length=1, max_length=500)],
        thread_id: ThreadId | None = None,
        after: Annotated[str, Meta(max_length=300)] = "",
        limit: PageLimit = 20,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """Find notes that contain all words of the query, by id after `after`, each with the first matching lines.
        Continue with `next` as `after`."""
        words = set(list_words(query))
        if not words:
            raise InvalidArguments("query needs at least one word of letters or digits.")
        view, page = await open_view(reading, trigger), ListPage(limit, reading.hub.limits.max_result_bytes)
        examined, last = 0, ""
        for note_id, found in list_notes(reading, thread_id, after):
            if not await shows_thread(reading, view, found.head, found.labels):
                continue
            if examined > SEARCHED_BYTES:
                page.has_more = True
                break
            body = decode_body(await reading.cold(f"t/{note_id}"))
            text = f"{note_id}\n{join(body.paragraphs)}"
            examined += len(text)
            if words <= set(list_words(text)):
                lines = [line.strip()[:200] for line in text.splitlines()[1:] if words & set(list_words(line))]
                if not page.add({"note": note_id, "version": body.version, "lines": lines[:3]}):
                    break
            last = note_id
        return {"notes": page.entries, "has_more": page.has_more, **({"next": last} if page.has_more else {})}

    @operation("read")
    async def history(
        self,
        reading: Reading,
        *,
        note: NoteId,
        before: Version | None = None,
        limit: PageLimit = 50,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List the versions of a note, newest first, below `before`: author, time (ms), cause and summary. The newest 200
        versions are kept."""
        await find_note(reading, note, trigger)
        after = step_key(note, before) if before is not None else ""
        steps = [decode_step(raw) for _, raw in await reading.list_cold(f"v/{note}/", limit + 1, after=after)]
        entries = [
            {name: getattr(step, name) for name in ("version", "by", "at", "seq", "cause", "action", "summary")}
            for step in steps
        ]
        versions, has_more = take_page(entries, limit, reading.hub.limits.max_result_bytes)
        return {"versions": versions, "has_more": has_more}

    @operation("read", is_tool=False)
    async def diff(
        self,
        reading: Reading,
        *,
        note: NoteId,
        version: Version,
        to_version: Version | None = None,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """Show the unified difference from one version of a note to another one, by default to the current one."""
        _, body = await find_note(reading, note, trigger)
        end = to_version or body.version
        old, new = [join(await read_version(reading, note, body, it)) for it in (version, end)]
        return {"note": note, "diff": write_diff(old, new, f"version {version}", f"version {end}")}

    @operation("read")
    async def proposals(self, reading: Reading, *, note: NoteId, trigger: Seq | None = None) -> dict[str, Any]:
        """List the open proposals for a note, each with its difference from the current text."""
        found, body = await find_note(reading, note, trigger)
        text, entries = join(body.paragraphs), []
        for proposal in found.proposals:
            proposed = await reading.cold(f"p/{note}/{proposal.number}") or ""
            diff = write_diff(text, proposed, f"version {body.version}", f"proposal {proposal.number}")
            entries.append({**msgspec.structs.asdict(proposal), "diff": diff})
        shown, has_more = take_page(entries, MAX_PROPOSALS, reading.hub.limits.max_result_bytes)
        return {"note": note, "proposals": shown, "has_more": has_more}
