"""Client for tools, on the connection of the agent. Each message that a call sends is linked to the trigger and sent
only once.

`ToolClient` wraps `NetworkClient`. If the tool does not choose a message id, the id is derived from the call's id and
the number of the message in the call. The client remembers the threads of its messages: if a tool has sent a message to
the thread of the trigger, the reaction sends no second answer there. Reviewers check a message that may reach the
requester like an answer, before it is sent (``review``). Reads return only messages that the reaction's own prompt may
contain. The hub limits the answers to the trigger.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from roundelay.network.addresses import agent_address, channel_address, memory_of, write_address
from roundelay.network.client.stored_frames import make_send
from roundelay.network.client.values import Stored
from roundelay.network.errors import Forbidden
from roundelay.network.messages import message_from_wire

from .isolation import pause_hook_timer
from .reaction_ids import reaction_id
from .record_queue import RecordQueue, Write

if TYPE_CHECKING:
    from roundelay.network.client import AnyMessage, History, NetworkClient, Welcome, Window
    from roundelay.network.frames import OperationInfo

    from .inbox import Visibility

SENT_METADATA: ContextVar[Mapping[str, Any]] = ContextVar("roundelay_sent_metadata", default=MappingProxyType({}))
"""Metadata to add to every message that tools send in this context. Middleware sets the variable around a call."""

_FILTERED = frozenset(
    {"network.history", "network.search", "network.memory", "network.why", "network.impact", "network.window"}
)
"""Read operations whose answers the hub can limit to one trigger (``trigger``)."""

_UNFILTERED = frozenset(
    {
        "network.list_threads",
        "network.inbox",
        "network.message_status",
        "network.open_reactions",
        "network.approvals",
        "network.records",
        "network.usage",
        "network.dead_letters",
        "network.log",
        "network.rows",
    }
)
"""Operations that tools may not call, because their answers cannot be limited to one trigger and would reveal other
conversations.
"""


def takes_trigger(operation: OperationInfo) -> bool:
    """Return whether an operation has the argument ``trigger``, with which the hub limits its answer to a reaction."""
    return "trigger" in operation.args_schema.get("properties", {})


@dataclass(slots=True)
class ToolClient:
    """Client for one tool call. `ToolClient` has methods of `NetworkClient` and adds ``message_id``, ``call_id`` and
    ``cause`` to the requests.
    """

    _client: NetworkClient
    call_id: str
    cause: int
    visibility: Visibility | None = None
    reply_metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata to add to every reply to the trigger."""

    askers: Collection[str] = ()
    """Ids of the trigger's sender and of the participants that wait for the sender's answer."""

    review: Callable[[str], Awaitable[tuple[str, Mapping[str, Any]]]] | None = None
    """Reviews a text for the requester. Returns the text to send and the metadata of its message. Raises `ToolError`
    for a text that must not be sent. If ``review`` is None, texts are not reviewed.
    """

    admit: Callable[[str], None] | None = None
    """Called with the address of each message before the message is sent. Raises `ToolError` if the limit of messages
    to one recipient is exceeded. If ``admit`` is None, there is no limit.
    """

    queue: RecordQueue | None = None
    """Queue of the reaction's records. Waiting records are stored before each operation, and before or together with
    each message. If a message were stored earlier, people could see an effect of a model reply that a resumed reaction
    does not know. If the reaction keeps no records, ``queue`` is None.
    """

    threads: list[str] = field(default_factory=list)
    """Ids of the threads to which this client sent messages."""

    _sends: int = 0

    @property
    def agent_id(self) -> str:
        return self._client.agent_id

    @property
    def welcome(self) -> Welcome:
        return self._client.welcome

    async def send(self, to: str, content: Any, **options: Any) -> Stored:
        # Assign the id before the first await, so that ids follow the order of the calls of `send`.
        filled = self._fill(options)
        if self.admit is not None and not filled.get("requires_response"):  # questions do not count toward the limit
            self.admit(to)
        if self.review is not None and self._may_reach_asker(to):
            content, filled = await pause_hook_timer(self._have_reviewed(self.review, content, filled))
        if self.queue is None:
            return self._note(await pause_hook_timer(self._client.send(to, content, **filled)))
        # Store the message in one commit with the waiting records and with other messages that are sent at the same
        # time.
        write = Write(
            partial(self._client.send, to, content, **filled),
            partial(make_send, to, content, **filled),
            is_independent=True,
        )
        await self.queue.write(write)
        assert isinstance(write.stored, Stored)
        return self._note(write.stored)

    async def send_text(self, agent_id: str, text: str, **options: Any) -> Stored:
        return await self.send(agent_address(agent_id), text, **options)

    async def broadcast(self, text: str, **options: Any) -> Stored:
        return await self.send("broadcast", text, **options)

    async def post(self, channel: str, text: str, **options: Any) -> Stored:
        return await self.send(channel_address(channel), text, **options)

    async def reply(self, message: AnyMessage, text: str, **options: Any) -> Stored:
        return await self.send(self._client.find_reply_address(message), text, **{"reply_to": message.seq, **options})

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        """Call an operation. Operations that read the conversation return only messages that this reaction may read
        (see `history`).

        Raises `Forbidden` for an operation that would reveal other conversations.
        """
        # The agent may read more than the person who asked. The agent's answer must not reveal messages of other
        # conversations.
        if op in _UNFILTERED:
            raise Forbidden(f"{op} reveals other conversations. Inside a reaction, use network.history or network.why.")
        if op in _FILTERED:
            args = {**(args or {}), **self._view()}
        if op == "network.open_items":
            args = {**(args or {}), "root": self.cause, "trigger": self.cause}
        if self._takes_trigger(op):
            args = {**(args or {}), "trigger": self.cause}
        if self.review is not None and isinstance(text := (args or {}).get("text"), str) and self._is_change(op):
            args = {**(args or {}), "text": (await pause_hook_timer(self.review(text)))[0]}
        if self.admit is not None and op == "channels.post" and isinstance(name := (args or {}).get("name"), str):
            self.admit(channel_address(name))
        if self.admit is not None and op == "files.attach" and isinstance(to := (args or {}).get("to"), str):
            self.admit(write_address(to))
        if op not in _FILTERED:  # the operation may change something, or its result may depend on the waiting records
            await self._settle()
        call = self._client.call(op, args, call_id=call_id if call_id is not None else self._next_id())
        value = await pause_hook_timer(call)
        match value:  # the result of a mod's operation that posted a message
            case {"seq": int(), "thread_id": str(thread_id)} if self._is_change(op):
                self.threads.append(thread_id)
        return value

    async def read_own_reaction(self, seq: int) -> list[dict[str, Any]]:
        """Return the records of this agent's reaction to a message, oldest first. The list is empty if the agent has no
        reaction to the message.

        Raises `RoundelayError` for a message that this reaction may not read, so that no results of other conversations
        reach this conversation.
        """
        # The hub refuses a message that this reaction may not read, before any record is fetched.
        await self.call("network.why", {"seq": seq})
        client = self._client
        reaction = reaction_id(client.agent_id, seq, client.welcome.network.epoch)
        value = await pause_hook_timer(client.call("network.records", {"reaction": reaction}))
        return list(value["records"])

    def _takes_trigger(self, op: str) -> bool:
        """Return whether a mod's operation accepts a trigger, to which the hub limits its answer."""
        return any(
            operation.op == op and takes_trigger(operation) for mod in self.welcome.mods for operation in mod.operations
        )

    def _is_change(self, op: str) -> bool:
        """Return whether an operation may send a message. Operations that the hub declares as reads never send a
        message.
        """
        return not any(
            operation.op == op and operation.kind == "read" for mod in self.welcome.mods for operation in mod.operations
        )

    def _may_reach_asker(self, to: str) -> bool:
        """Return whether the requesters may read a message to this address. Only a direct message to another
        participant is private.
        """
        kind, _, name = to.partition(":")
        # The requester may also read channels and broadcasts.
        return kind not in ("agent", "mod") or name in self.askers

    async def _have_reviewed(
        self, review: Callable[[str], Awaitable[tuple[str, Mapping[str, Any]]]], content: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the content and the options of a message after their texts were reviewed. Values that are not text
        stay unchanged.
        """
        made: Mapping[str, Any] = {}
        match content:
            case str():
                content, made = await review(content)
            case {"text": str(text)}:
                text, made = await review(text)
                content = {**content, "text": text}
        if isinstance(shown := options.get("text_representation"), str):
            shown, made = await review(shown)
            options = {**options, "text_representation": shown}
        metadata = {**made, **(options.get("metadata") or {})}
        return content, {**options, "metadata": metadata} if metadata else options

    async def signal(
        self, kind: Literal["typing", "thinking", "delta", "tool"], body: Any, *, thread_id: str | None = None
    ) -> None:
        await self._client.signal(kind, body, thread_id=thread_id)

    async def history(self, thread_id: str, *, before: int | None = None, limit: int = 50) -> History:
        """Return messages of a thread that may enter the prompt of this reaction, up to the trigger."""
        from roundelay.network.client import History

        args: dict[str, Any] = {"thread_id": thread_id, "limit": limit, **self._view()}
        if before is not None:
            args["before"] = before
        value = await pause_hook_timer(self._client.call("network.history", args))
        return History([message_from_wire(message) for message in value["messages"]], value["has_more"])

    async def window(self, *, threads: int | Sequence[str] | None = None, per_thread: int | None = None) -> Window:
        """Return the conversation that may enter the prompt of this reaction."""
        named = threads if threads is None or isinstance(threads, int) else list(threads)
        return await pause_hook_timer(
            self._client.window(self.cause, threads=named, per_thread=per_thread, visibility=self.visibility)
        )

    async def remember(self, body: Mapping[str, Any], *, record_id: str) -> None:
        """Record a summary of some messages of a thread. ``network.memory`` returns it later."""
        await self._settle()
        await pause_hook_timer(self._client.record(memory_of(body["thread_id"]), "memory", body, record_id=record_id))

    async def _settle(self) -> None:
        if self.queue is not None:
            await pause_hook_timer(self.queue.flush())

    def _view(self) -> dict[str, Any]:
        """Return the arguments with which the hub limits its answer to this reaction. These arguments override the
        tool's own arguments.
        """
        narrower = {"visibility": self.visibility} if self.visibility is not None else {}
        return {"trigger": self.cause, **narrower}

    def _fill(self, options: dict[str, Any]) -> dict[str, Any]:
        filled = {"cause": self.cause, **options}
        own = self.reply_metadata if filled.get("reply_to") == self.cause else {}
        if added := {**SENT_METADATA.get(), **own}:
            filled["metadata"] = {**added, **(filled.get("metadata") or {})}
        if filled.get("message_id") is None:
            filled["message_id"] = self._next_id()
        return filled

    def _next_id(self) -> str:
        self._sends += 1
        # Number the ids in the order of the requests, so that a repeated call sends the same messages under the same
        # ids.
        return f"{self.call_id}-{self._sends}"

    def _note(self, stored: Stored) -> Stored:
        self.threads.append(stored.thread_id)
        return stored
