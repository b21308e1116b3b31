"""`messages`: reactions to messages, pinned messages, and edits and deletions of one's own messages.

The core rewrites edited and deleted messages, so that every reader gets the current content. This mod decides who may
edit and delete a message. It stores reactions, the list of edits (cold values) and pins (in memory).
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct

from roundelay.network.core.revisions import Revision
from roundelay.network.core.rows import MessageHead
from roundelay.network.errors import InvalidArguments, Overloaded, UnknownMessage
from roundelay.network.frames import Seq, WireMessage
from roundelay.network.mod import Change, Mod, Reading, Upkeep, operation
from roundelay.network.operations.documents import shows_thread
from roundelay.network.operations.reading import reads_as_itself
from roundelay.network.operations.views import find_message, open_view
from roundelay.network.units import HOUR_MS

MAX_EDITS = 50
"""Maximum number of edits of one message."""
MAX_EMOJI, MAX_REACTIONS = 20, 500
"""Maximum number of different emoji on one message, and of all its reactions."""
MAX_PINS, MAX_PINNED_THREADS = 50, 5000
"""Maximum number of pinned messages of one thread, and of threads with pinned messages."""
SWEEP_MS, SWEPT_AT_ONCE = HOUR_MS, 500
"""Interval of the cleanup after retention has deleted messages, in ms, and the number of values that the cleanup reads
at once."""

Emoji = Annotated[str, Meta(min_length=1, max_length=32, description="An emoji, or a short word such as +1.")]
Text = Annotated[str, Meta(min_length=1, max_length=65_536, description="The new text.")]
OptionalSeq = Annotated[Seq | None, Meta(description="The message. Default: the message that you react to.")]


class Edits(Struct, frozen=True, omit_defaults=True):
    """Seqs of the rows that record a message's edits, and whether the message is deleted."""

    rows: list[int] = []
    is_deleted: bool = False


class Pin(Struct, frozen=True):
    seq: int
    by: str
    at: int


def _needs(args: Any) -> list[str]:
    seq = args.seq if args.seq is not None else args.cause
    return [f"e/{seq}", f"r/{seq}"]


def _needs_of_own(args: Any) -> list[str]:
    return [f"e/{args.seq}", f"r/{args.seq}"]


async def _read_before(_mod: Mod, reading: Reading, *, seq: int, text: str) -> dict[str, Any] | None:
    """Return the content of a message before an edit, and the number of its edits. The change is
    refused if the number has changed meanwhile, so that no concurrent edit is lost."""
    number = len(_decode(await reading.cold(f"e/{seq}")).rows)
    row = (await reading.hub.ledger.messages([seq])).get(seq)
    if row is None or row.head is None or not reads_as_itself(reading, row.head):
        return None
    message = msgspec.json.decode(row.data, type=WireMessage)
    before: dict[str, Any] = {"content": msgspec.json.decode(message.content)}
    if message.text_representation is not UNSET:
        before["text_representation"] = message.text_representation
    return {"number": number, "before": before}


class MessageChanges(Mod):
    """React to messages, pin them, edit and delete own messages."""

    id = "messages"

    def __init__(self) -> None:
        self._swept_at = 0

    @operation("change", needs=_needs)
    def react(
        self,
        change: Change,
        *,
        emoji: Emoji,
        seq: OptionalSeq = None,
        remove: bool = False,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Add your reaction to a message, or remove it."""
        seq = seq if seq is not None else cause
        if seq is None:
            raise InvalidArguments("messages.react needs seq, the number of a message.")
        head, emoji = change.head(seq), _check_emoji(emoji)
        change.check_may_write(change.thread(head))
        _check_not_deleted(change, seq)
        reactions: dict[str, list[str]] = change.cold(f"r/{seq}") or {}
        others = [by for by in reactions.get(emoji, []) if by != change.origin.agent_id]
        reactions[emoji] = others if remove else [*others, change.origin.agent_id]
        if len(reactions) > MAX_EMOJI or sum(map(len, reactions.values())) > MAX_REACTIONS:
            raise InvalidArguments(
                f"Message {seq} has too many reactions: at most {MAX_EMOJI} emoji and {MAX_REACTIONS} reactions."
            )
        change.log({"seq": seq})
        reactions = {name: names for name, names in reactions.items() if names}
        change.put_cold(f"r/{seq}", reactions or None)
        change.update_screens(head, {"seq": seq, "event": "reacted", "reactions": reactions})
        return {"seq": seq, "reactions": reactions}

    @operation("change", needs=_needs_of_own)
    def pin(self, change: Change, *, seq: Seq) -> dict[str, Any]:
        """Pin a message in its thread."""
        head = change.head(seq)
        change.check_may_write(change.thread(head))
        _check_not_deleted(change, seq)
        pins = _read_pins(change, head)
        if any(pin.seq == seq for pin in pins):
            return {"seq": seq, "is_pinned": True}
        threads = change.get("pinned threads") or 0
        if len(pins) >= MAX_PINS or (not pins and threads >= MAX_PINNED_THREADS):
            raise InvalidArguments(
                f"Too many pins: at most {MAX_PINS} in a thread, in {MAX_PINNED_THREADS} threads. Unpin some."
            )
        _put_pins(change, head, pins, [*pins, Pin(seq, change.origin.agent_id, change.stamp)])
        change.log({"seq": seq})
        change.update_screens(head, {"seq": seq, "event": "pinned"})
        return {"seq": seq, "is_pinned": True}

    @operation("change", needs=_needs_of_own, is_tool=False)
    def unpin(self, change: Change, *, seq: Seq) -> dict[str, Any]:
        """Unpin a message."""
        head = change.head(seq)
        change.check_may_write(change.thread(head))
        _unpin(change, head)
        change.log({"seq": seq})
        change.update_screens(head, {"seq": seq, "event": "unpinned"})
        return {"seq": seq, "is_pinned": False}

    @operation("change", needs=_needs_of_own, prepare=_read_before)
    def edit(self, change: Change, *, seq: Seq, text: Text) -> dict[str, Any]:
        """Replace the text of a message that you sent. Earlier texts stay in its history."""
        edits = _check_not_deleted(change, seq)
        if change.prepared is None:
            raise UnknownMessage(f"There is no message {seq} that {change.origin.agent_id} may read.")
        if change.prepared["number"] != len(edits.rows):
            raise Overloaded(f"Message {seq} was edited at the same time. Send the same again.", 50)
        if len(edits.rows) >= MAX_EDITS:
            raise InvalidArguments(f"Message {seq} was edited {MAX_EDITS} times, which is the maximum.")
        before = change.prepared["before"]
        content = before["content"]
        # An edit replaces only the text. The message keeps its files and its data.
        content = {**content, "text": text} if isinstance(content, dict) and "text" in content else text
        shown = text if "text_representation" in before else None
        row = change.edit(seq, content, text=shown, before=before)
        change.put_cold(f"e/{seq}", Edits([*edits.rows, row.seq]))
        change.update_screens(change.head(seq), {"seq": seq, "event": "edited"})
        return {"seq": seq, "edits": len(edits.rows) + 1}

    @operation("change", needs=_needs_of_own)
    def delete(self, change: Change, *, seq: Seq) -> dict[str, Any]:
        """Delete a message that you sent. Its text and its history are removed for everybody."""
        edits = _decode(change.cold(f"e/{seq}"))
        if not edits.is_deleted:
            row = change.delete(seq, edits.rows)
            head = change.message_head(seq)
            change.put_cold(f"e/{seq}", Edits(is_deleted=True))
            change.put_cold(f"r/{seq}", None)
            _unpin(change, head)
            change.update_screens(head, {"seq": seq, "event": "deleted", "by": row.actor})
        else:
            change.message_head(seq)
        return {"seq": seq, "is_deleted": True}

    @operation("read", is_tool=False)
    async def reactions(
        self,
        reading: Reading,
        *,
        seqs: Annotated[list[Seq], Meta(min_length=1, max_length=100)],
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """Show the reactions to some messages: who reacted with which emoji."""
        view, shown = await open_view(reading, trigger), {}
        heads = await reading.hub.ledger.heads(seqs)
        for seq, head in heads.items():
            if await view.shows(head) and (reactions := await reading.cold(f"r/{seq}")):
                shown[str(seq)] = reactions
        return {"reactions": shown}

    @operation("read", is_tool=False)
    async def pins(
        self, reading: Reading, *, thread_id: Annotated[str, Meta(max_length=220)], trigger: Seq | None = None
    ) -> dict[str, Any]:
        """List the pinned messages of a thread, in the order of pinning."""
        view, raw = await open_view(reading, trigger), reading.get(f"p/{thread_id}")
        if raw is None:
            return {"pins": []}
        if not await shows_thread(reading, view, msgspec.convert(raw["head"], MessageHead)):
            return {"pins": []}
        pins = msgspec.convert(raw["pins"], list[Pin])
        heads = await reading.hub.ledger.heads([pin.seq for pin in pins])
        return {"pins": [pin for pin in pins if await view.shows(heads.get(pin.seq))]}

    @operation("read", is_tool=False)
    async def edits(self, reading: Reading, *, seq: Seq, trigger: Seq | None = None) -> dict[str, Any]:
        """Show the earlier contents of an edited message, oldest first, each with the time (ms) at which it was
        replaced."""
        view = await open_view(reading, trigger)
        await find_message(reading, seq, "seq", view)
        edits = _decode(await reading.cold(f"e/{seq}"))
        versions = []
        for number in edits.rows:
            for row in await reading.hub.ledger.rows(number - 1, 1):
                revision = msgspec.json.decode(row.data, type=Revision) if row.type == "edited" else None
                # Retention or a deletion may have removed the content.
                if row.seq == number and revision is not None and revision.before is not UNSET:
                    versions.append({"at": row.at, **msgspec.json.decode(revision.before)})
        return {"seq": seq, "edits": versions, "is_deleted": edits.is_deleted}

    async def maintain(self, context: Upkeep) -> None:
        """Remove pins, reactions and edits of messages that retention has deleted, once an hour."""
        if context.first_seq <= 1 or 0 <= context.now - self._swept_at < SWEEP_MS:
            return
        for prefix in ("e/", "r/"):
            after = ""
            while keys := await context.list_cold(prefix, SWEPT_AT_ONCE, after):
                after = keys[-1]
                if gone := [key for key in keys if int(key[2:]) < context.first_seq]:
                    context.submit({"keys": gone, "first_seq": context.first_seq})
        context.submit({"keys": [], "first_seq": context.first_seq})
        self._swept_at = context.now

    def apply_entry(self, change: Change, payload: Any) -> None:
        for key in payload["keys"]:
            change.put_cold(key, None)
        if payload["keys"]:
            return
        for _, value in change.items("p/"):
            pins = msgspec.convert(value["pins"], list[Pin])
            kept = [pin for pin in pins if pin.seq >= payload["first_seq"]]
            _put_pins(change, msgspec.convert(value["head"], MessageHead), pins, kept)


def _check_emoji(emoji: str) -> str:
    # Allow format characters, because some emoji need them. Refuse other invisible characters: two reactions that look
    # the same would be counted separately.
    if any(unicodedata.category(char)[0] in "CZ" and char not in "\u200d" for char in emoji):
        raise InvalidArguments(f"{emoji!r} is not an emoji. Use one emoji, or a word without spaces such as +1.")
    return unicodedata.normalize("NFC", emoji)


def _check_not_deleted(change: Change, seq: int) -> Edits:
    edits = _decode(change.cold(f"e/{seq}"))
    if edits.is_deleted:
        raise InvalidArguments(f"Message {seq} was deleted.")
    return edits


def _read_pins(change: Change, head: MessageHead) -> list[Pin]:
    return msgspec.convert((change.get(f"p/{head.thread_id}") or {}).get("pins", []), list[Pin])


def _unpin(change: Change, head: MessageHead) -> None:
    pins = _read_pins(change, head)
    _put_pins(change, head, pins, [pin for pin in pins if pin.seq != head.seq])


def _put_pins(change: Change, head: MessageHead, before: list[Pin], pins: list[Pin]) -> None:
    if pins == before:
        return
    place = msgspec.structs.replace(head, seq=0, sender_id=head.sender_id if head.kind in ("direct", "mod") else "")
    change.put(f"p/{head.thread_id}", {"head": place, "pins": pins} if pins else None)
    if bool(before) != bool(pins):
        change.put("pinned threads", (change.get("pinned threads") or 0) + (1 if pins else -1) or None)


def _decode(raw: Any) -> Edits:
    return msgspec.convert(raw, Edits) if raw is not None else Edits()
