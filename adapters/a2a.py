"""Agents elsewhere that speak A2A 1.0, as participants: ``a2a: https://agent.example`` in an agent's file, or
``await A2AAgent("helper", "https://agent.example").run()``.

The official SDK does the protocol. Each thread here is one context there, each message that wakes the agent one message
there, under an id that stays when it is sent again; the id of the task that it begins is recorded, so that a process
that was killed asks for that task and does not begin another one. What comes back is that agent's words, and nothing
else: no address in it is fetched, no other host than the one in the file is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Unpack
from urllib.parse import urlsplit

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientTimeoutError
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskNotFoundError,
    TaskState,
    UnsupportedOperationError,
)
from a2a.utils.errors import A2AError

from roundelay.agents.models.model import ModelError, ModelFailure
from roundelay.agents.runner import RunnerOptions
from roundelay.interop.a2a_parts import escape_line_ends, make_parts, read_parts
from roundelay.network.messages import write_content

from .participant import AdaptedAgent, IncomingTurn, mark, name_failure

_logger = logging.getLogger(__name__)

CARD_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 10.0
LOOK_EVERY_S = 2.0
"""So often an agent that does not stream is asked how far it has got."""
AGAIN_AFTER_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""When a connection that broke is tried again."""
MAX_NAMED = 32
"""Skills and tags of a card that others here are shown."""
OVER = (
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_REJECTED,
    TaskState.TASK_STATE_INPUT_REQUIRED,
    TaskState.TASK_STATE_AUTH_REQUIRED,
)
"""Nothing more comes by itself."""


class A2AAgent(AdaptedAgent):
    """The agent whose card is at an address, as a participant. ``headers`` go with each request: the token, above all."""

    framework = "a2a"

    def __init__(
        self, agent_id: str, address: str, *, headers: Mapping[str, str] | None = None, **options: Unpack[RunnerOptions]
    ) -> None:
        super().__init__(agent_id, **options)
        self.address = address.rstrip("/")
        self._headers = dict(headers or {})
        self._http: httpx.AsyncClient | None = None
        self._there: Client | None = None
        self._card: AgentCard | None = None
        self._waiting: dict[str, str] = {}
        """By context: the task that waits for an answer."""

    async def prepare(self) -> None:
        """Read the card, which others here are shown. One that cannot be read is read again with the first message."""
        try:
            await self._connect()
        except (A2AError, ModelError) as error:
            told = {"agent_id": self.agent_id, "reason": str(error)}
            _logger.warning("the card of an agent elsewhere cannot be read now", extra=told)

    def describe_card(self) -> dict[str, object]:
        own, card = super().describe_card(), self._card
        if card is None:
            return own
        tags = [*self.tags, *dict.fromkeys(tag for skill in card.skills for tag in skill.tags)]
        return {
            **own,
            "description": self.description or card.description[:2000],
            "tags": tags[:MAX_NAMED],
            "tools": [skill.name for skill in card.skills][:MAX_NAMED],
        }

    async def close(self) -> None:
        await super().close()
        http, self._http, self._there = self._http, None, None
        if http is not None:
            await http.aclose()

    async def answer(self, turn: IncomingTurn) -> str:
        try:
            progress = _TaskThere(turn)
            try:
                await self._ask(turn, progress)
            except asyncio.CancelledError:
                if turn.is_stopped and self._there is not None:
                    await self._cancel_there(self._there, turn, progress.task_id)
                raise
        except A2AError as error:
            raise ModelError(f"{type(error).__name__}: {error}", reason=_name(error)) from error
        if progress.state == TaskState.TASK_STATE_INPUT_REQUIRED:
            self._waiting[_context_of(turn)] = progress.task_id
        return progress.conclude()

    async def _connect(self) -> Client:
        if self._there is not None:
            return self._there
        if self._http is None:
            limits = httpx.Timeout(None, connect=CARD_TIMEOUT_S)  # how long it may work is the policy's to say
            self._http = httpx.AsyncClient(headers=self._headers, timeout=limits, transport=_WholeLines())
        given = {"timeout": CARD_TIMEOUT_S}
        card = await A2ACardResolver(self._http, self.address).get_agent_card(http_kwargs=given)
        elsewhere = [it.url for it in card.supported_interfaces if _origin(it.url) != _origin(self.address)]
        if elsewhere:
            reason = f"The card of {self.address} names another host, {elsewhere[0]}: the token is not for that."
            raise ModelError(reason, reason="misconfigured")
        config = ClientConfig(httpx_client=self._http, supported_protocol_bindings=["JSONRPC", "HTTP+JSON"])
        try:
            self._there = ClientFactory(config).create(card)
        except ValueError as error:
            raise ModelError(f"{self.address} offers no binding that is known here", reason="misconfigured") from error
        self._card = card
        return self._there

    async def _ask(self, turn: IncomingTurn, progress: _TaskThere) -> None:
        """Send the message, or go on with the task that it has begun already, until nothing more comes."""
        kept = turn.kept.get("task")
        progress.task_id = kept if isinstance(kept, str) else ""
        request: SendMessageRequest | None = None
        delays = iter(AGAIN_AFTER_S)
        while not progress.is_over:
            try:
                client = await self._connect()
                if progress.task_id:
                    events = self._resume(client, progress.task_id)
                else:
                    request = request or await self._make_request(client, turn)
                    events = client.send_message(request)
                async for event in events:
                    had_task = bool(progress.task_id)
                    progress.add(event)
                    if progress.task_id and not had_task:
                        await turn.keep("task", progress.task_id)
                    delays = iter(AGAIN_AFTER_S)
                if not progress.is_over:
                    await asyncio.sleep(LOOK_EVERY_S)
            except TaskNotFoundError:
                if not progress.task_id:
                    raise
                progress.task_id = ""  # it keeps no tasks: the message is sent again, under its id
            except A2AError as error:
                delay = next(delays, None)
                if delay is None or _name(error) != "unreachable":
                    raise
                await asyncio.sleep(delay)

    async def _make_request(self, client: Client, turn: IncomingTurn) -> SendMessageRequest:
        context = _context_of(turn)
        if "continues" not in turn.kept:
            await turn.keep("continues", self._waiting.pop(context, None) or await self._find_waiting(client, context))
        message = turn.message
        if message.kind == "direct":
            parts = make_parts(message.content)
        else:
            parts = [Part(text="\n\n".join([turn.guide, *map(mark, turn.news)]))]
        return SendMessageRequest(
            message=Message(
                message_id=turn.reaction,
                context_id=context,
                task_id=str(turn.kept.get("continues") or ""),
                role=Role.ROLE_USER,
                parts=parts,
                metadata={"sender": message.sender_id},
            )
        )

    async def _find_waiting(self, client: Client, context: str) -> str:
        """The task of a context that waits for an answer, also one of an earlier process; empty if none does."""
        wanted = ListTasksRequest(context_id=context, status=TaskState.TASK_STATE_INPUT_REQUIRED, page_size=1)
        with suppress(A2AError):  # not every agent can list them
            found = await client.list_tasks(wanted)
            return next((it.id for it in found.tasks if it.context_id == context), "")
        return ""

    async def _resume(self, client: Client, task_id: str) -> AsyncIterator[StreamResponse]:
        task = await client.get_task(GetTaskRequest(id=task_id))
        yield StreamResponse(task=task)
        assert self._card is not None, "who resumes has connected"
        if task.status.state not in OVER and self._card.capabilities.streaming:
            with suppress(UnsupportedOperationError):  # it has ended since
                async for event in client.subscribe(SubscribeToTaskRequest(id=task_id)):
                    yield event

    async def _cancel_there(self, client: Client, turn: IncomingTurn, task_id: str) -> None:
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                task_id = task_id or await self._find_begun(client, turn)
                if task_id:
                    await client.cancel_task(CancelTaskRequest(id=task_id))
        except (A2AError, TimeoutError) as error:
            told = {"agent_id": self.agent_id, "task_id": task_id, "reason": str(error)}
            _logger.warning("a task elsewhere could not be cancelled", extra=told)

    async def _find_begun(self, client: Client, turn: IncomingTurn) -> str:
        """The task that the message has begun, of which nothing had come yet; empty if there is none."""
        wanted = ListTasksRequest(context_id=_context_of(turn), page_size=5)
        for delay in AGAIN_AFTER_S[:3]:  # it may be on its way
            for task in (await client.list_tasks(wanted)).tasks:
                if any(it.message_id == turn.reaction for it in task.history):
                    return str(task.id)
            await asyncio.sleep(delay)
        return ""


class _TaskThere:
    """What has come of a task elsewhere."""

    def __init__(self, turn: IncomingTurn) -> None:
        self._turn = turn
        self.task_id = ""
        self.state = TaskState.TASK_STATE_UNSPECIFIED
        self._artifacts: dict[str, list[Part]] = {}
        self._said: list[Part] = []
        """What its status, or a plain message, says."""

        self._streamed = 0
        self._is_message = False

    @property
    def is_over(self) -> bool:
        return self._is_message or self.state in OVER

    def add(self, event: StreamResponse) -> None:
        """Take an update. Raises `ModelError` for more than an answer may hold."""
        match event.WhichOneof("payload"):
            case "task":
                self._begin(event.task)
            case "message":
                self._is_message, self._said = True, list(event.message.parts)
            case "status_update":
                self.task_id = event.status_update.task_id
                self.state = event.status_update.status.state
                self._said = list(event.status_update.status.message.parts)
            case "artifact_update":
                update = event.artifact_update
                self.task_id = update.task_id
                known = self._artifacts.get(update.artifact.artifact_id, []) if update.append else []
                self._artifacts[update.artifact.artifact_id] = [*known, *update.artifact.parts]
        if sum(it.ByteSize() for parts in self._artifacts.values() for it in parts) > 8 * self._turn.max_chars:
            raise ModelError("Its answer is longer than a message can be.", reason="broken_reply")
        text = self._read_artifacts()
        if len(text) > self._streamed:  # what was written anew is seen when it is sent
            self._turn.stream(text[self._streamed :])
            self._streamed = len(text)

    def _begin(self, task: Task) -> None:
        self.task_id, self.state = task.id, task.status.state
        self._artifacts = {it.artifact_id: list(it.parts) for it in task.artifacts}
        self._said = list(task.status.message.parts)

    def conclude(self) -> str:
        """Give the answer. Raises `ModelError` where there is none to come."""
        said = _write(self._said)
        match self.state:
            case TaskState.TASK_STATE_FAILED:
                raise ModelError(f"It has failed. {said}", reason="server")
            case TaskState.TASK_STATE_CANCELED | TaskState.TASK_STATE_REJECTED:
                raise ModelError(f"It does not do that. {said}", reason="rejected")
            case TaskState.TASK_STATE_AUTH_REQUIRED:
                raise ModelError(f"It waits for an authorization. {said}", reason="unauthorized")
            case TaskState.TASK_STATE_INPUT_REQUIRED:
                return "\n\n".join(it for it in (self._read_artifacts(), said) if it)
            case _:
                return self._read_artifacts() or said

    def _read_artifacts(self) -> str:
        return "\n\n".join(_write(it) for it in self._artifacts.values())


class _WholeLines(httpx.AsyncHTTPTransport):
    """HTTP whose event streams end lines where their sender does: what httpx takes for a line's end beyond that, a text
    may hold."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _EscapedStream(response.stream)
        return response


class _EscapedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        begun = b""  # of a character whose rest comes with the next piece
        async for piece in self._stream:
            whole = begun + piece
            end = next((n for n in (2, 1) if whole[-n:] in (b"\xc2", b"\xe2", b"\xe2\x80")), 0)
            begun = whole[len(whole) - end :]
            yield escape_line_ends(whole[: len(whole) - end])
        yield begun

    async def aclose(self) -> None:
        await self._stream.aclose()


def _write(parts: list[Part]) -> str:
    """Parts as the text of a message: pieces of text as one, files as lines that name them."""
    texts = "".join(it.text for it in parts)
    others = [it for it in parts if it.WhichOneof("content") not in ("text", None)]
    return "\n".join([*([texts] if texts else []), *([write_content(read_parts(others))] if others else [])])


def _context_of(turn: IncomingTurn) -> str:
    """The context of a thread: the same whenever it is asked for, and nobody's but this network's."""
    parts = "\x1f".join(("a2a-context", turn.epoch, turn.agent_id, turn.message.thread_id))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _origin(address: str) -> tuple[str, str, int]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _name(error: A2AError) -> ModelFailure:
    """What a failure of the other side, or on the way to it, was."""
    cause: Any = error
    while cause is not None:
        if isinstance(cause, httpx.HTTPStatusError):
            return name_failure(_WithStatus(cause.response.status_code)) or "server"
        if isinstance(cause, A2AClientTimeoutError | httpx.TimeoutException):
            return "timeout"
        if isinstance(cause, httpx.RequestError):
            return "unreachable"
        if isinstance(cause, json.JSONDecodeError):
            return "broken_reply"
        cause = cause.__cause__
    return "not_found" if isinstance(error, TaskNotFoundError) else "rejected"


class _WithStatus(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code
