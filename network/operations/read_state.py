"""What somebody keeps for itself of threads: the operation that changes it, and what lists of threads tell of it.

A thread's *last* message and its *unread* ones are those that the caller may read. Of unread ones an operator is
counted what it reads as itself: others' conversations are not written to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roundelay.network.core.change import ChangeSet
from roundelay.network.core.entries import SendNotice
from roundelay.network.core.read_state import check_may_mark, store_read_state
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.tables import ReadState
from roundelay.network.frames import Seq, decode_json
from roundelay.network.messages import write_content
from roundelay.network.text import shorten

from .reading import Reading, reads_as_itself

MAX_LINE_CHARS = 200
MAX_UNREAD = 100
"""More than so many unread messages of a thread are not counted."""
UNREAD_LOOKED_AT = 200
"""So many messages of a thread are looked at for them, the newest."""
THREADS_AT_ONCE = 16
"""In so many threads they are counted in one turn of the loop."""


def mark(
    change: ChangeSet,
    *,
    thread_id: str,
    read_upto: Seq | None = None,
    is_pinned: bool | None = None,
    is_muted: bool | None = None,
    is_archived: bool | None = None,
    title: Annotated[str, Meta(max_length=200)] | None = None,
) -> dict[str, Any]:
    """Keep for oneself how far one has read a thread, whether it is pinned, muted or archived, and a title of one's
    own for it. What is left out stays; an empty title takes it away."""
    check_may_mark(change, thread_id, read_upto)
    marks = change.state.read_states_of(change.origin.agent_id)
    before = marks.get(thread_id) or ReadState(read_upto=_upto_without(marks))
    given = {"is_pinned": is_pinned, "is_muted": is_muted, "is_archived": is_archived, "title": title}
    read = max(before.read_upto, min(read_upto or 0, change.state.head))
    now = msgspec.structs.replace(before, read_upto=read, **{name: it for name, it in given.items() if it is not None})
    told = describe_read_state(now)
    if now != before or thread_id not in marks:
        store_read_state(change, thread_id, now)
        origin = change.origin
        change.effects.append(
            SendNotice(frozenset((origin.agent_id,)), "marked", thread_id, told, except_session=origin.session_id)
        )
    return {"thread_id": thread_id, **told}


def describe_read_state(mark: ReadState) -> dict[str, Any]:
    told: dict[str, Any] = {
        "read_upto": mark.read_upto,
        "is_pinned": mark.is_pinned,
        "is_muted": mark.is_muted,
        "is_archived": mark.is_archived,
    }
    return told | ({"title": mark.title} if mark.title else {})


def _upto_without(marks: Mapping[str, ReadState]) -> int:
    """Up to where threads without a mark count as read."""
    rest = marks.get("")
    return rest.read_upto if rest is not None else 0


async def count_unread(reading: Reading, newest: Mapping[str, int], marks: Mapping[str, ReadState]) -> dict[str, int]:
    """How many messages of others the caller, whose ``marks`` these are, has not read in each of these threads, at most
    `MAX_UNREAD`: up to the ``newest`` one that is told of each. What has come since is told when it is told."""
    rest, names = _upto_without(marks), list(newest)
    counts: dict[str, int] = {}
    for start in range(0, len(names), THREADS_AT_ONCE):
        asked = {it: marks[it].read_upto if it in marks else rest for it in names[start : start + THREADS_AT_ONCE]}
        for thread_id, heads in (await reading.hub.ledger.newest_heads(asked, UNREAD_LOOKED_AT)).items():
            whole = (head for seq, head in heads if head is not None and seq <= newest[thread_id])
            unread = (head for head in whole if _is_unread(reading, head))
            counts[thread_id] = sum(1 for _ in islice(unread, MAX_UNREAD))
    return counts


def _is_unread(reading: Reading, head: MessageHead) -> bool:
    is_own = head.sender_id == reading.origin.agent_id and head.kind != "mod"
    return not is_own and reads_as_itself(reading, head)


def describe_message_line(row: Row) -> dict[str, Any]:
    """A message as lists show it: one line, and cut."""
    message = decode_json(row.data)
    return {
        "seq": row.seq,
        "sender_id": message["sender_id"],
        "sender_kind": message["sender_kind"],
        "sent_at": message["sent_at"],
        "text": format_line(message.get("text_representation") or write_content(message.get("content"))),
    }


def describe_thread_message(row: Row) -> dict[str, Any]:
    """Describe a message as `describe_message_line` does, but name a request for approval by its tool.

    The text of a request begins with JSON arguments, which say little in a title or in a list."""
    line = describe_message_line(row)
    approval = (decode_json(row.data).get("metadata") or {}).get("approval")
    tool = approval.get("tool") if isinstance(approval, dict) else None
    if isinstance(tool, str) and tool and line["sender_kind"] == "agent":
        line["text"] = format_line(f"Approval request: {tool}")
    return line


def format_line(text: str) -> str:
    """A text as one line of at most `MAX_LINE_CHARS`."""
    # a text of megabytes is not split for its beginning; white space at its start may fill all of this
    return shorten(text[: 64 * MAX_LINE_CHARS], MAX_LINE_CHARS, "…")
