"""OpenAI's conversations and their items, read from the ledger. The gateway stores nothing itself.

A conversation is identified by its name. A conversation has one thread with each agent that was asked, and the messages
of these threads are its items. Facts about the conversation itself are stored as notes. Notes are messages of the
caller to itself, in a thread with the same name. Notes record the creation, the metadata and the deletion of the
conversation, and items that were added before an agent was asked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from roundelay.network.addresses import agent_address, conversation_of, direct_thread
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import UnknownMessage
from roundelay.network.extras import needs
from roundelay.network.messages import message_from_wire

from .requests import AgentRequest, ApiProblem, SaidItem, conversation_id, read_items

with needs("gateway"):
    from starlette.datastructures import QueryParams


OWN = "openai"
"""Key in the metadata of a message. The value under this key describes the request for which the message was sent."""
NOTE = "openai_conversation"
"""Key in the content of the caller's notes about a conversation."""
PAGE = 500
MAX_LISTED = 100
"""Maximum number of items on a page, equal to OpenAI's limit."""
MAX_ADDED = 20
"""Maximum number of items that one request can add, equal to OpenAI's limit."""
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Maximum number of metadata entries of a conversation, and maximum length of their keys and values. OpenAI's API has
the same limits.
"""


class ConversationItem(NamedTuple):
    """One item of a conversation, or of the input of a response."""

    id: str
    role: str
    content: list[dict[str, Any]]

    def show(self) -> dict[str, Any]:
        phase = {"phase": "final_answer"} if self.role == "assistant" else {}
        return {
            "type": "message",
            "id": self.id,
            "status": "completed",
            "role": self.role,
            "content": self.content,
            **phase,
        }


@dataclass(frozen=True)
class ConversationRecord:
    """The caller's notes about one conversation, in the order of the ledger."""

    messages: Sequence[AnyMessage]

    @property
    def is_deleted(self) -> bool:
        return any(_read_record_note(message).get("deleted") is True for message in self.messages)

    @property
    def created_at(self) -> int:
        return self.messages[0].sent_at // 1000

    @property
    def metadata(self) -> dict[str, str]:
        # Use only the newest note. As in OpenAI's API, an update replaces all metadata.
        notes = [
            note for message in self.messages if isinstance(note := _read_record_note(message).get("metadata"), dict)
        ]
        return {str(key): str(value) for key, value in notes[-1].items()} if notes else {}

    def said_after(self, seq: int) -> tuple[SaidItem, ...]:
        """Return the items that were added after the message ``seq``, which is the last question to the agent."""
        return tuple(said for message in self.messages if message.seq > seq for said in read_added(message))


async def read_record(client: NetworkClient, name: str) -> ConversationRecord | None:
    """Return the caller's notes about a conversation, or None if there are none. Raises `ApiProblem` if the
    conversation was deleted.
    """
    messages = await read_whole_thread(client, direct_thread(client.agent_id, client.agent_id, conversation_id(name)))
    own = [message for message in messages if _read_record_note(message)]
    if not own:
        return None
    record = ConversationRecord(own)
    # A deleted conversation cannot be created again under its name, because its notes stay in the ledger.
    if record.is_deleted:
        raise _unknown(name)
    return record


async def create_conversation(client: NetworkClient, body: object, message_id: str) -> dict[str, Any]:
    """Create a conversation. A repeated ``message_id`` creates no second conversation."""
    fields = _read_body(body, {"items", "metadata"})
    metadata = _read_metadata(fields.get("metadata"))
    items = _read_added(fields.get("items"), may_be_empty=True)
    # Derive the name from the idempotency key. A request that is repeated after a lost response then finds the same
    # conversation.
    name = f"conv_{hashlib.sha256(f'{client.agent_id}/{message_id}'.encode()).hexdigest()[:32]}"
    await _note(client, name, items, {"metadata": metadata}, message_id)
    return await show_conversation(client, name)


async def show_conversation(client: NetworkClient, name: str) -> dict[str, Any]:
    """Return a conversation. Raises `ApiProblem` if the caller has no conversation with this name."""
    record = await read_record(client, name)
    if record is not None:
        created_at, metadata = record.created_at, record.metadata
    else:
        threads = await _find_threads(client, name)
        if not threads:
            raise _unknown(name)
        # Date the conversation by its oldest message. A conversation that began with a question has no note.
        created_at = min([(await read_whole_thread(client, thread))[0].sent_at // 1000 for thread in threads])
        metadata = {}
    return {"id": name, "object": "conversation", "created_at": created_at, "metadata": metadata}


async def update_conversation(client: NetworkClient, name: str, body: object, message_id: str) -> dict[str, Any]:
    """Replace the metadata of a conversation."""
    fields = _read_body(body, {"metadata"})
    metadata = _read_metadata(fields.get("metadata"))
    # Check the name before sending the note. A note under an unknown name would create that conversation.
    await show_conversation(client, name)
    await _note(client, name, (), {"metadata": metadata}, message_id)
    return await show_conversation(client, name)


async def delete_conversation(client: NetworkClient, name: str, message_id: str) -> dict[str, Any]:
    """Delete a conversation. The messages of the conversation stay in the ledger. OpenAI keeps the items of a deleted
    conversation too.
    """
    await show_conversation(client, name)
    await _note(client, name, (), {"deleted": True}, message_id)
    return {"id": name, "object": "conversation.deleted", "deleted": True}


async def add_items(client: NetworkClient, name: str, body: object, message_id: str) -> dict[str, Any]:
    """Add items to a conversation. The next question to an agent includes these items."""
    fields = _read_body(body, {"items"})
    items = _read_added(fields.get("items"), may_be_empty=False)
    await show_conversation(client, name)
    stored = await _note(client, name, items, {}, message_id)
    return make_list([_show_added(stored, place, item) for place, item in enumerate(items)], has_more=False)


async def list_items(client: NetworkClient, name: str, query: QueryParams) -> dict[str, Any]:
    """Return one page of the items of a conversation."""
    return cut_page(await _read_items(client, name), query)


async def find_item(client: NetworkClient, name: str, item_id: str) -> dict[str, Any]:
    """Return one item of a conversation. Raises `ApiProblem` if the item does not exist."""
    for item in await _read_items(client, name):
        if item.id == item_id:
            return item.show()
    raise ApiProblem(404, f"There is no item {item_id[:80]!r} in this conversation.", code="item_not_found")


def add_unsent_items(request: AgentRequest, record: ConversationRecord | None, last_seq: int) -> AgentRequest:
    """Extend a request by the items that were added to its conversation since the last question to the agent."""
    unsent = record.said_after(last_seq) if record is not None else ()
    return replace(request, said=(*unsent, *request.said)) if unsent else request


def show_input(message: AnyMessage) -> ConversationItem:
    """Return the caller's question in a message as one item. Instructions and history in the text of the message are
    left out.
    """
    content = message.content if isinstance(message.content, dict) else {}
    text, new_chars = message.text, _read_note(message).get("new_chars")
    if isinstance(content.get("text"), str):
        text = content["text"]
    # Ignore an invalid length and show the whole text. The caller may have written the metadata through another
    # protocol.
    if isinstance(new_chars, int) and 0 <= new_chars < len(text):
        text = text[len(text) - new_chars :]
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": text}] if text else []
    parts += [_show_image(image) for image in _list_objects(content.get("images"))]
    parts += [_show_file(file) for file in _list_objects(content.get("files"))]
    return ConversationItem(f"msg_{message.seq}", "user", parts or [{"type": "input_text", "text": ""}])


def read_added(message: AnyMessage) -> list[SaidItem]:
    """Return the items that the caller added with a note."""
    try:
        return read_items(_list_objects(_read_record_note(message).get("items")), "items")
    except ApiProblem:  # the caller may have sent this note through another protocol
        return []


def cut_page(items: Sequence[ConversationItem], query: QueryParams) -> dict[str, Any]:
    """Return the page of ``items`` that a query requests. ``items`` is in the order of the ledger. Raises `ApiProblem`
    for an invalid query.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiProblem(400, f"order must be asc or desc, not {order[:80]!r}.", param="order")
    if not re.fullmatch("[0-9]{1,3}", limit, re.ASCII) or not 1 <= int(limit) <= MAX_LISTED:
        raise ApiProblem(400, f"limit must be 1 to {MAX_LISTED}, not {limit[:80]!r}.", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after:
        place = next((place for place, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise ApiProblem(
                404, f"There is no item {after[:80]!r} after which to continue.", code="item_not_found", param="after"
            )
        ordered = ordered[place + 1 :]
    return make_list(ordered[: int(limit)], has_more=len(ordered) > int(limit))


def make_list(items: Sequence[ConversationItem], *, has_more: bool) -> dict[str, Any]:
    first, last = (items[0].id, items[-1].id) if items else ("", "")
    return {
        "object": "list",
        "data": [item.show() for item in items],
        "first_id": first,
        "last_id": last,
        "has_more": has_more,
    }


async def read_whole_thread(client: NetworkClient, thread_id: str) -> list[AnyMessage]:
    """Return all messages of a thread, oldest first. The list is empty if the thread does not exist."""
    messages: list[AnyMessage] = []
    # Treat an unknown thread as empty. The hub does not know a thread without messages.
    with suppress(UnknownMessage):
        async for page in client.pages("network.history", {"thread_id": thread_id, "limit": PAGE}):
            # Insert each page before the earlier ones, because pages arrive from the newest to the oldest.
            messages = [*map(message_from_wire, page["messages"]), *messages]
    return messages


async def _read_items(client: NetworkClient, name: str) -> list[ConversationItem]:
    """Return all items of a conversation, in the order of the ledger. Raises `ApiProblem` if the conversation does not
    exist.
    """
    record, own = await read_record(client, name), client.agent_id
    threads = await _find_threads(client, name)
    if record is None and not threads:
        raise _unknown(name)
    placed: list[tuple[int, int, ConversationItem]] = []
    for note in record.messages if record is not None else ():
        placed += [(note.seq, place, _show_added(note.seq, place, said)) for place, said in enumerate(read_added(note))]
    for thread_id in threads:
        answers: dict[int, int] = {}
        for message in await read_whole_thread(client, thread_id):
            if message.sender_id == own:
                answers.setdefault(message.seq, 0)
                placed.append((message.seq, 0, show_input(message)))
                continue
            # An answer names its question as the message to which it replies, or only as its cause.
            question = next((seq for seq in (message.reply_to, message.cause) if seq in answers), None)
            number = answers[question] if question is not None else 0
            # Give the item the same id as in the response, because clients compare the two ids.
            item_id = f"msg_{question}_{number}" if question is not None else f"msg_{message.seq}"
            if question is not None:
                answers[question] += 1
            text = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
            placed.append((message.seq, 0, ConversationItem(item_id, "assistant", [text])))
    return [item for _, _, item in sorted(placed, key=lambda place: place[:2])]


async def _find_threads(client: NetworkClient, name: str) -> list[str]:
    """Return the ids of the caller's threads with agents that belong to a conversation."""
    own, wanted = client.agent_id, conversation_id(name)
    threads: list[str] = []
    async for page in client.pages("network.list_threads", {"limit": PAGE}):
        for thread in page["threads"]:
            thread_id = thread["thread_id"]
            # Collect all threads with this name. A client that changes the model talks to another agent in another
            # thread.
            is_named = thread_id.startswith("direct:") and conversation_of(thread_id) == wanted
            if is_named and own in thread["readers"] and thread_id != direct_thread(own, own, wanted):
                threads.append(thread_id)
    return threads


async def _note(
    client: NetworkClient, name: str, items: Sequence[SaidItem], note: Mapping[str, Any], message_id: str
) -> int:
    """Send a note about a conversation to the caller itself. Return the seq of the note."""
    stored = await client.send(
        agent_address(client.agent_id),
        # Send the note as content, not as metadata. The ledger then refuses a different note under the same id.
        {NOTE: {"id": name, **note, **({"items": [_write_item(item) for item in items]} if items else {})}},
        conversation=conversation_id(name),
        message_id=message_id,
    )
    return stored.seq


def _write_item(item: SaidItem) -> dict[str, Any]:
    """Encode an item in the form that `read_items` parses."""
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": item.text}] if item.text else []
    parts += [{"type": "input_image", "image_url": image["url"]} for image in item.images]
    parts += [
        {"type": "input_file", "filename": file["name"], "file_data": file.get("url") or file["data"]}
        for file in item.files
    ]
    return {"role": item.role, "content": parts}


def _show_added(seq: int, place: int, item: SaidItem) -> ConversationItem:
    kind = "output_text" if item.role == "assistant" else "input_text"
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    parts: list[dict[str, Any]] = [{"type": kind, "text": item.text, **more}] if item.text else []
    parts += [_show_image(image) for image in item.images] + [_show_file(file) for file in item.files]
    return ConversationItem(f"item_{seq}_{place}", item.role, parts)


def _show_image(image: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": str(image.get("url", "")), "file_id": None}


def _show_file(file: Mapping[str, Any]) -> dict[str, Any]:
    data = str(file.get("url") or file.get("data") or "")
    return {"type": "input_file", "filename": str(file.get("name", "file")), "file_data": data, "file_id": None}


def _list_objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _read_note(message: AnyMessage) -> dict[str, Any]:
    note = (message.metadata or {}).get(OWN)
    return note if isinstance(note, dict) else {}


def _read_record_note(message: AnyMessage) -> dict[str, Any]:
    note = message.content.get(NOTE) if isinstance(message.content, dict) else None
    return note if isinstance(note, dict) else {}


def _read_body(body: object, names: set[str]) -> dict[str, Any]:
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise ApiProblem(400, "The body must be a JSON object.")
    for name in body:
        if name not in names:
            raise ApiProblem(
                400, f"There is no parameter {name[:80]!r} here.", code="unknown_parameter", param=name[:80]
            )
    return body


def _read_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if (
        not isinstance(value, dict)
        or len(value) > MAX_PAIRS
        or not all(isinstance(text, str) and len(text) <= MAX_VALUE_CHARS for text in value.values())
        or not all(len(key) <= MAX_KEY_CHARS for key in value)
    ):
        raise ApiProblem(
            400,
            f"metadata must be an object of at most {MAX_PAIRS} texts, with keys of at most {MAX_KEY_CHARS} and values of at "
            f"most {MAX_VALUE_CHARS} characters.",
            param="metadata",
        )
    return value


def _read_added(value: object, *, may_be_empty: bool) -> Sequence[SaidItem]:
    if may_be_empty and value in (None, []):
        return ()
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= MAX_ADDED
        or not all(isinstance(entry, dict) for entry in value)
    ):
        raise ApiProblem(400, f"items must be a list of 1 to {MAX_ADDED} items.", param="items")
    items = read_items(value, "items")
    for number, item in enumerate(items):
        if not (item.text or item.images or item.files):
            raise ApiProblem(400, f"items[{number}]: the message has no content.", param=f"items[{number}]")
    return items


def _unknown(name: str) -> ApiProblem:
    return ApiProblem(404, f"You have no conversation {name[:80]!r}.", code="conversation_not_found")


def last_seq(messages: Iterable[AnyMessage]) -> int:
    """Return the highest seq of these messages, or 0 if there are none."""
    return max((message.seq for message in messages), default=0)
