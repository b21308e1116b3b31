"""The agent's connection as a tool has it: what the call sends follows from the incoming message and is sent once, whatever is repeated.

Stands between `tools` and `NetworkClient`. Ids that the tool does not choose are derived from the call's, in the order of its sends;
where its messages went is remembered, since a reaction that has spoken in the incoming thread answers there no second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from roundelay.network.client import AnyMessage, History, NetworkClient, Stored, Welcome, Window

    from .inbox import Visibility


class ToolClient:
    """Sends and reads for one call. Methods as in `NetworkClient`, with ``message_id``, ``call_id`` and ``cause`` filled in."""

    def __init__(
        self, client: NetworkClient, *, call_id: str, cause: int, visibility: Visibility | None = None
    ) -> None:
        self.threads: list[str] = []
        """The threads that its messages went to."""
        self._client = client
        self._call_id = call_id
        self._cause = cause
        self._visibility = visibility
        self._sends = 0

    @property
    def agent_id(self) -> str:
        return self._client.agent_id

    @property
    def welcome(self) -> Welcome:
        return self._client.welcome

    async def send(self, to: str, content: Any, **options: Any) -> Stored:
        return self._note(await self._client.send(to, content, **self._fill(options)))

    async def send_text(self, agent_id: str, text: str, **options: Any) -> Stored:
        return await self.send(f"agent:{agent_id}", text, **options)

    async def broadcast(self, text: str, **options: Any) -> Stored:
        return await self.send("broadcast", text, **options)

    async def post(self, channel: str, text: str, **options: Any) -> Stored:
        return await self.send(f"channel:{channel}", text, **options)

    async def reply(self, message: AnyMessage, text: str, **options: Any) -> Stored:
        return self._note(await self._client.reply(message, text, **self._fill(options)))

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        value = await self._client.call(op, args, call_id=call_id if call_id is not None else self._next_id())
        match value:
            case {"seq": int(), "thread_id": str(thread_id)}:  # a mod's operation that posted
                self.threads.append(thread_id)
        return value

    async def signal(
        self, kind: Literal["typing", "thinking", "delta", "tool"], body: Any, *, thread_id: str | None = None
    ) -> None:
        await self._client.signal(kind, body, thread_id=thread_id)

    async def history(self, thread_id: str, *, before: int | None = None, limit: int = 50) -> History:
        return await self._client.history(thread_id, before=before, limit=limit)

    async def window(self, *, threads: int | Sequence[str] | None = None, per_thread: int | None = None) -> Window:
        """The conversation that may enter the prompt of this reaction."""
        named = threads if threads is None or isinstance(threads, int) else list(threads)
        return await self._client.window(self._cause, threads=named, per_thread=per_thread, visibility=self._visibility)

    def _fill(self, options: dict[str, Any]) -> dict[str, Any]:
        filled = {"cause": self._cause, **options}
        if filled.get("message_id") is None:
            filled["message_id"] = self._next_id()
        return filled

    def _next_id(self) -> str:
        self._sends += 1
        return f"{self._call_id}-{self._sends}"

    def _note(self, stored: Stored) -> Stored:
        self.threads.append(stored.thread_id)
        return stored
