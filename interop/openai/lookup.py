"""Finds the objects in the ledger to which a request of OpenAI's API refers: agents, responses, conversations and
earlier requests.

The gateway keeps no state. The metadata of each message that it sends names the request for which the message was sent
(`OWN`). A repeated request therefore finds its message, and a request with a history finds its thread.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from roundelay.interop.conversations import Conversations, QuestionStored, find_agent
from roundelay.network.addresses import conversation_of, direct_thread, name_of
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import InvalidArguments, UnknownMessage
from roundelay.network.messages import message_from_wire

from .answers import BETWEEN, sum_usage
from .conversations import OWN, ConversationRecord, last_seq, read_record
from .requests import AgentRequest, ApiProblem, conversation_id, read_echo

RETRIES_WITHIN_MS = 15 * 60_000
"""Maximum age of a message that a client may repeat without an idempotency key, in ms."""
MAX_THREADS = 1000
"""Maximum number of threads that are searched for a conversation to continue. The caller's newest threads are searched
first.
"""
MAX_CANDIDATES = 20
"""Maximum number of threads with a matching id whose messages are read."""
LOOKED_BACK = 100
"""Number of messages per page of a thread. The newest page also decides whether a request continues the
conversation.
"""


class ConversationPlace(NamedTuple):
    """Destination of a request: its conversation, and the message that was already sent for the request, if any."""

    conversation: str
    is_new: bool = False
    has_instructions: bool = False
    has_answer: bool = True
    sent: AnyMessage | None = None
    record: ConversationRecord | None = None
    """The caller's notes about the conversation, or None if there are none."""
    asked_last: int = 0
    """Seq of the caller's newest message in the conversation."""


async def find_place(
    client: NetworkClient,
    agent_id: str,
    request: AgentRequest,
    message_id: str,
    *,
    is_retry: bool,
    is_awaited: Callable[[int], bool],
) -> ConversationPlace:
    """Return the conversation that a request continues or starts. Raises `ApiProblem`.

    ``is_awaited`` gets the seq of a message, and returns whether another connection waits for the answer to it. With
    ``is_retry``, the request may be a repeat of a recent message that has the same digest and that no connection
    awaits.
    """

    def is_sent(message: AnyMessage) -> bool:
        if message.sender_id != client.agent_id:
            return False
        if message.message_id == message_id:
            return True
        now = client.clock()
        return (
            is_retry
            and read_own(message).get("request") == request.digest
            and now - message.sent_at < RETRIES_WITHIN_MS
            # Skip a message that a connection still awaits. A client may send equal requests in parallel on purpose.
            and not is_awaited(message.seq)
        )

    if request.previous is not None or request.conversation is not None:
        return await _find_named_place(client, agent_id, request, is_sent)
    new = f"c-{request.family}-{hashlib.sha256(message_id.encode()).hexdigest()[:16]}"
    asked_before = request.asked_before
    if asked_before is None and not is_retry:
        return ConversationPlace(new, True)  # a repeated key leads to the same new conversation
    answer = request.earlier[-1].text.strip() if request.earlier else ""
    # Clients send no conversation id here. Search the threads whose id contains the digest of the conversation's start.
    # Several conversations may start alike, so compare the last request in each thread.
    async for thread_id in _list_threads(client, _make_thread_prefix(client, agent_id, request)):
        messages = await _read_thread(client, thread_id)
        mine = [message for message in messages if message.sender_id == client.agent_id]
        if not mine:
            continue
        # The request repeats the last question in the thread. The answer is already in the thread, or will follow.
        if is_sent(mine[-1]):
            return ConversationPlace(conversation_of(thread_id), sent=mine[-1])
        if read_own(mine[-1]).get("request") != asked_before:
            continue
        # Compare the last answer in the request's history with the answer in the ledger. If they differ, the client has
        # edited the history, and the request starts a new thread.
        texts = [message.text for message in messages if mine[-1].seq in (message.reply_to, message.cause)]
        stored = BETWEEN.join(texts).strip()
        if not stored or stored.startswith(answer) or answer.endswith(BETWEEN + stored):
            return ConversationPlace(conversation_of(thread_id), has_instructions=True, has_answer=bool(stored))
    return ConversationPlace(new, True)


async def _find_named_place(
    client: NetworkClient, agent_id: str, request: AgentRequest, is_sent: Callable[[AnyMessage], bool]
) -> ConversationPlace:
    """Return the conversation of a request that names the conversation or a previous response."""
    record = None
    if request.previous is not None:
        previous = await find_response(client, request.previous)
        if name_of(previous.to) != agent_id:
            reason = f"{request.previous} belongs to a conversation with {name_of(previous.to)}, not with {agent_id}."
            raise ApiProblem(400, reason, param="previous_response_id")
        name = conversation_of(previous.thread_id)
    else:
        name = conversation_id(request.conversation or "")
        record = await read_record(client, request.conversation or "")
    messages = await _read_thread(client, direct_thread(client.agent_id, agent_id, name))
    mine = [message for message in messages if message.sender_id == client.agent_id]
    instructions = read_own(mine[-1]).get("instructions") if mine else None
    return ConversationPlace(
        name,
        not mine,
        instructions == digest_text(request.instructions),
        sent=next((message for message in reversed(mine) if is_sent(message)), None),
        record=record,
        asked_last=last_seq(mine),
    )


async def find_model(client: NetworkClient, model: str) -> str:
    """Return the id of the agent that a model name refers to. The name is the agent's id, alone or after the network's
    name or ``team`` and a slash. Raises `ApiProblem`.
    """
    where, slash, name = model.rpartition("/")
    agent_id = name if slash and where in ("team", client.welcome.network.name) else model
    if await find_agent(client, agent_id) is not None:
        return agent_id
    raise ApiProblem(
        404,
        f"There is no agent {model[:80]!r}. GET /v1/models lists the agents.",
        code="model_not_found",
        param="model",
    )


async def find_response(client: NetworkClient, response_id: str) -> AnyMessage:
    """Return the caller's message that corresponds to a response id. Raises `ApiProblem`."""
    match = re.fullmatch(r"resp_([1-9][0-9]{0,15})", response_id)
    try:
        chain = (await client.call("network.why", {"seq": int(match[1])}))["chain"] if match else []
    except (UnknownMessage, InvalidArguments):  # InvalidArguments: the number exceeds the largest possible seq
        chain = []
    for entry in chain:
        if match and entry.get("seq") == int(match[1]) and entry.get("sender_id") == client.agent_id:
            message = message_from_wire(entry)
            if conversation_of(message.thread_id) and OWN in (message.metadata or {}):
                return message
    raise ApiProblem(404, f"You have no response {response_id[:80]!r}.", code="response_not_found")


async def is_cancelled(conversations: Conversations, message: AnyMessage) -> bool:
    """Return whether the reaction to a message was cancelled, for example because the client disconnected."""
    _, ended = await conversations.open(name_of(message.to), make_stored(message)).read_outcome()
    return ended is not None and ended.status == "cancelled"


def make_stored(message: AnyMessage) -> QuestionStored:
    return QuestionStored(message.seq, message.thread_id, True)


async def find_sent(client: NetworkClient, agent_id: str, request: AgentRequest, message_id: str) -> AnyMessage | None:
    """Return the caller's message with this id. Return None if no conversation to which the request may belong contains
    such a message.
    """
    async for thread_id in _list_candidates(client, agent_id, request):
        try:
            async for page in client.pages("network.history", {"thread_id": thread_id, "limit": LOOKED_BACK}):
                for message in page["messages"]:
                    if (message["sender_id"], message["message_id"]) == (client.agent_id, message_id):
                        return message_from_wire(message)
        except UnknownMessage:  # the thread does not exist yet
            continue
    return None


async def _list_candidates(client: NetworkClient, agent_id: str, request: AgentRequest) -> AsyncIterator[str]:
    """Yield the ids of the threads in which a request may already have been sent."""
    if request.previous is not None:
        yield (await find_response(client, request.previous)).thread_id
    elif request.conversation is not None:
        yield direct_thread(client.agent_id, agent_id, conversation_id(request.conversation))
    else:
        async for thread_id in _list_threads(client, _make_thread_prefix(client, agent_id, request)):
            yield thread_id


def _make_thread_prefix(client: NetworkClient, agent_id: str, request: AgentRequest) -> str:
    """Return the common prefix of the ids of all threads that may contain an unnamed conversation of this request."""
    return direct_thread(client.agent_id, agent_id, f"c-{request.family}-x").removesuffix("x")


async def _read_thread(client: NetworkClient, thread_id: str) -> list[AnyMessage]:
    """Return the newest messages of a thread, oldest first. The list is empty if the thread does not exist."""
    try:
        return (await client.history(thread_id, limit=LOOKED_BACK)).messages
    except UnknownMessage:
        return []


async def _list_threads(client: NetworkClient, prefix: str) -> AsyncIterator[str]:
    """Yield the ids of the caller's newest threads that start with a prefix."""
    looked_at, candidates = 0, 0
    async for page in client.pages("network.list_threads", {"limit": 500}):
        for thread in page["threads"]:
            looked_at += 1
            if thread["thread_id"].startswith(prefix):
                yield thread["thread_id"]
                candidates += 1
                if candidates == MAX_CANDIDATES:
                    return
        if looked_at >= MAX_THREADS:
            return


async def read_usage(client: NetworkClient, seq: int) -> Any:
    """Return the recorded token usage of a question and of all messages that it caused."""
    return sum_usage((await client.call("network.spent", {"seq": seq}))["of_root"])


# --- metadata of a message that was sent for a request


def make_own(request: AgentRequest, sent: AgentRequest) -> dict[str, Any]:
    """Return the metadata of the message for a request. ``sent`` is the request without the items that the agent
    already knows.
    """
    echo = {name: value for name, value in request.echo.items() if value}
    own = {"request": request.digest, "instructions": digest_text(request.instructions), "model": request.model}
    new = {"new_chars": request.new_chars} if len(sent.said) > 1 else {}
    return own | new | ({"echo": echo} if echo else {})


def read_own(message: AnyMessage) -> dict[str, Any]:
    own = (message.metadata or {}).get(OWN)
    return own if isinstance(own, dict) else {}


def read_stored_echo(message: AnyMessage) -> dict[str, Any]:
    return read_echo(read_own(message).get("echo"))


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""
