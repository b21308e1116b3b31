"""The operation that changes read states, and the fields of thread lists that depend on read states.

The last message and the unread messages of a thread include only messages that the caller may read. For operators, a
message counts as unread only if they could read it without operator rights too. Messages of other conversations are not
addressed to them.
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
"""Maximum number of unread messages that are counted per thread."""
UNREAD_LOOKED_AT = 200
"""Maximum number of a thread's newest messages that are examined to count the unread ones."""
THREADS_AT_ONCE = 16
"""Number of threads whose unread messages are counted before other tasks of the event loop may run."""


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
    """Store the caller's read state of a thread: how far it is read, and whether it is pinned, muted or archived. Also
    store the caller's own title for the thread. Omitted fields stay unchanged; an empty title removes the title."""
    check_may_mark(change, thread_id, read_upto)
    marks = change.state.read_states_of(change.origin.agent_id)
    # A thread without a stored entry counts as read up to the highest position of the evicted entries.
    before = marks.get(thread_id) or ReadState(read_upto=_upto_without(marks))
    fields = {"is_pinned": is_pinned, "is_muted": is_muted, "is_archived": is_archived, "title": title}
    # Never move the position back, because devices report in any order. Never move the position beyond the newest row,
    # because later messages would then count as read.
    read_upto_now = max(before.read_upto, min(read_upto or 0, change.state.head))
    changed = msgspec.structs.replace(
        before, read_upto=read_upto_now, **{name: value for name, value in fields.items() if value is not None}
    )
    description = describe_read_state(changed)
    # Change nothing if the state stays the same. Otherwise each repeated report would wake the other devices.
    if changed != before or thread_id not in marks:
        store_read_state(change, thread_id, changed)
        origin = change.origin
        change.effects.append(
            SendNotice(
                frozenset((origin.agent_id,)), "marked", thread_id, description, except_session=origin.session_id
            )
        )
    return {"thread_id": thread_id, **description}


def describe_read_state(read_state: ReadState) -> dict[str, Any]:
    description: dict[str, Any] = {
        "read_upto": read_state.read_upto,
        "is_pinned": read_state.is_pinned,
        "is_muted": read_state.is_muted,
        "is_archived": read_state.is_archived,
    }
    return description | ({"title": read_state.title} if read_state.title else {})


def _upto_without(states: Mapping[str, ReadState]) -> int:
    """Return the position up to which threads without a stored entry count as read."""
    rest = states.get("")
    return rest.read_upto if rest is not None else 0


async def count_unread(reading: Reading, newest: Mapping[str, int], marks: Mapping[str, ReadState]) -> dict[str, int]:
    """Return, for each of these threads, the number of unread messages from other participants, at most `MAX_UNREAD`.

    ``marks`` contains the caller's read states. ``newest`` maps each thread to the seq of the last message that the
    list shows. Later messages are not counted.
    """
    rest, names = _upto_without(marks), list(newest)
    counts: dict[str, int] = {}
    for start in range(0, len(names), THREADS_AT_ONCE):
        positions = {
            name: marks[name].read_upto if name in marks else rest for name in names[start : start + THREADS_AT_ONCE]
        }
        for thread_id, heads in (await reading.hub.ledger.newest_heads(positions, UNREAD_LOOKED_AT)).items():
            whole = (head for seq, head in heads if head is not None and seq <= newest[thread_id])
            # Use a generator, so that counting stops at the limit even in a thread with thousands of unread messages.
            unread = (head for head in whole if _is_unread(reading, head))
            counts[thread_id] = sum(1 for _ in islice(unread, MAX_UNREAD))
    return counts


def _is_unread(reading: Reading, head: MessageHead) -> bool:
    is_own = head.sender_id == reading.origin.agent_id and head.kind != "mod"
    return not is_own and reads_as_itself(reading, head)


def describe_message_line(row: Row) -> dict[str, Any]:
    """Return the description of a message for a list. Its text is cut to one line."""
    message = decode_json(row.data)
    return {
        "seq": row.seq,
        "sender_id": message["sender_id"],
        "sender_kind": message["sender_kind"],
        "sent_at": message["sent_at"],
        "text": format_line(message.get("text_representation") or write_content(message.get("content"))),
    }


def describe_thread_message(row: Row) -> dict[str, Any]:
    """Return the same description as `describe_message_line`, except for a request for approval, whose text is replaced
    by the name of its tool.

    The text of a request begins with JSON arguments, which do not help in a title or a list.
    """
    line = describe_message_line(row)
    approval = (decode_json(row.data).get("metadata") or {}).get("approval")
    tool = approval.get("tool") if isinstance(approval, dict) else None
    # Use the metadata only in messages of agents, because people could also write such metadata.
    if isinstance(tool, str) and tool and line["sender_kind"] == "agent":
        line["text"] = format_line(f"Approval request: {tool}")
    return line


def format_line(text: str) -> str:
    """Return a text as a single line of at most `MAX_LINE_CHARS`."""
    # Split only the beginning of the text, because the text may have megabytes. Use much more than one line, because
    # the beginning may be mostly white space.
    return shorten(text[: 64 * MAX_LINE_CHARS], MAX_LINE_CHARS, "…")
