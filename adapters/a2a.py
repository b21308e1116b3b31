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
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Unpack
from urllib.parse import urlsplit

from roundelay.agents.loop_local import LoopLocal
from roundelay.agents.models.model import ModelError, ModelFailure
from roundelay.agents.outgoing_http import load_certificates
from roundelay.agents.runner import RunnerOptions
from roundelay.interop.a2a.parts import escape_line_ends, make_parts, read_parts
from roundelay.network.credentials import read_secret
from roundelay.network.errors import ConfigError

# the package of protobuf's runtime has no types
from roundelay.network.extras import needs
from roundelay.network.messages import write_content

from .participant import AdaptedAgent, IncomingTurn, mark, name_failure

with needs("gateway"):
    import httpx
    from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
    from a2a.client.errors import A2AClientError, A2AClientTimeoutError
    from a2a.types import (
        AgentCard,
        Artifact,
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
    from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]


_logger = logging.getLogger(__name__)

CARD_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 10.0
LOOK_EVERY_S = 2.0
"""So often an agent that does not stream is asked how far it has got."""
AGAIN_AFTER_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""When a connection that broke is tried again."""
MAX_NAMED, MAX_NAME = 32, 64
"""Skills and tags of a card that others here are shown, and characters of each."""
MAX_RESPONSE_BYTES = 16 << 20
MAX_ID = 512
OVER = (
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_REJECTED,
    TaskState.TASK_STATE_INPUT_REQUIRED,
    TaskState.TASK_STATE_AUTH_REQUIRED,
)
"""Nothing more comes by itself."""
BROKEN = (ParseError, httpx.InvalidURL, ValueError, TypeError, AttributeError, KeyError, RecursionError)
"""What the SDK raises for what is no A2A, beside its own errors."""


@dataclass(slots=True)
class _Connection:
    http: httpx.AsyncClient
    there: Client | None = None


class A2AAgent(AdaptedAgent):
    """The agent whose card is at an address, as a participant. ``headers`` go with each request: the token, above
    all. Raises `ConfigError` for a header that cannot be sent."""

    framework = "a2a"

    def __init__(
        self, agent_id: str, address: str, *, headers: Mapping[str, str] | None = None, **options: Unpack[RunnerOptions]
    ) -> None:
        super().__init__(agent_id, **options)
        self.address = address.rstrip("/")
        self._headers = {name: read_secret(value, f"the header {name}") for name, value in (headers or {}).items()}
        self._connections = LoopLocal(self._make_connection)
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
            "tags": [tag[:MAX_NAME] for tag in tags[:MAX_NAMED]],
            "tools": [skill.name[:MAX_NAME] for skill in card.skills[:MAX_NAMED]],
        }

    async def close(self) -> None:
        await super().close()
        connection = self._connections.pop()
        if connection is not None:
            await connection.http.aclose()

    async def answer(self, turn: IncomingTurn) -> str:
        now = asyncio.get_running_loop().time
        until_s = now() + self.policy.model_timeout_s
        try:
            progress = _TaskThere(turn)
            try:
                await self._ask(turn, progress)
            except asyncio.CancelledError:  # where its process ends it goes on in the next one
                known = self._connections.find()
                if (turn.is_stopped or now() >= until_s) and known is not None and known.there is not None:
                    await self._cancel_there(known.there, turn, progress.task_id)
                raise
        except A2AError as error:
            raise ModelError(f"{type(error).__name__}: {error}", reason=_name(error)) from error
        if progress.state == TaskState.TASK_STATE_INPUT_REQUIRED:
            self._waiting[_context_of(turn)] = progress.task_id
        return progress.conclude()

    def _make_connection(self) -> _Connection:
        try:
            load_certificates()
        except ConfigError as error:
            raise ModelError(f"{self.address} cannot be asked. {error}", reason="misconfigured") from None
        limits = httpx.Timeout(None, connect=CARD_TIMEOUT_S)  # how long it may work is the policy's to say
        headers = {**self._headers, "Accept-Encoding": "identity"}  # what is packed may be of any size
        return _Connection(httpx.AsyncClient(headers=headers, timeout=limits, transport=_OneHost(self.address)))

    async def _connect(self) -> Client:
        connection = self._connections.get()
        if connection.there is not None:
            return connection.there
        try:
            async with asyncio.timeout(CARD_TIMEOUT_S):
                with _as_a2a():
                    card = await A2ACardResolver(connection.http, self.address).get_agent_card()
        except TimeoutError as error:
            raise ModelError(f"The card of {self.address} does not come", reason="timeout") from error
        config = ClientConfig(httpx_client=connection.http, supported_protocol_bindings=["JSONRPC", "HTTP+JSON"])
        try:
            connection.there = ClientFactory(config).create(card)
        except (ValueError, httpx.InvalidURL) as error:
            raise ModelError(f"{self.address} offers no binding that is known here", reason="misconfigured") from error
        self._card = card
        return connection.there

    async def _ask(self, turn: IncomingTurn, progress: _TaskThere) -> None:
        """Send the message, or go on with the task that it has begun already, until nothing more comes."""
        kept = turn.kept.get("task")
        progress.task_id = kept if isinstance(kept, str) else ""
        request: SendMessageRequest | None = None
        is_forgotten = False
        delays = iter(AGAIN_AFTER_S)
        while not progress.is_over:
            try:
                client = await self._connect()
                if progress.task_id:
                    events = self._resume(client, progress.task_id)
                else:
                    request = request or await self._make_request(client, turn)
                    events = client.send_message(request)
                async with aclosing(_read(events)) as updates:
                    async for event in updates:
                        had_task = bool(progress.task_id)
                        progress.add(event)
                        if progress.task_id and not had_task:
                            await turn.keep("task", progress.task_id)
                        delays = iter(AGAIN_AFTER_S)
                        if progress.is_over:
                            break
                if not (progress.is_over or progress.task_id):
                    delay = next(delays, None)
                    if delay is None:
                        raise ModelError("It takes the message and says nothing.", reason="broken_reply")
                    await asyncio.sleep(delay)
                elif not progress.is_over:
                    await asyncio.sleep(LOOK_EVERY_S)
            except TaskNotFoundError:
                if not progress.task_id or is_forgotten:
                    raise
                progress.forget()  # it keeps no tasks: the message is sent again, under its id
                is_forgotten = True
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
        with suppress(A2AError), _as_a2a():  # not every agent can list them
            found = await client.list_tasks(wanted)
            return next((task.id for task in found.tasks if task.context_id == context and len(task.id) <= MAX_ID), "")
        return ""

    async def _resume(self, client: Client, task_id: str) -> AsyncIterator[StreamResponse]:
        task = await client.get_task(GetTaskRequest(id=task_id))
        yield StreamResponse(task=task)
        assert self._card is not None, "who resumes has connected"
        if task.status.state not in OVER and self._card.capabilities.streaming:
            with suppress(UnsupportedOperationError, NotImplementedError):  # it has ended since
                async for event in client.subscribe(SubscribeToTaskRequest(id=task_id)):
                    yield event

    async def _cancel_there(self, client: Client, turn: IncomingTurn, task_id: str) -> None:
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                with _as_a2a():
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
                if any(message.message_id == turn.reaction for message in task.history):
                    return str(task.id)
            await asyncio.sleep(delay)
        return ""


@contextmanager
def _as_a2a() -> Iterator[None]:
    """Raises what the SDK makes of answers that are no A2A as an error of A2A, and what a protocol has no method for as
    `UnsupportedOperationError`: A2A 0.3 cannot list tasks."""
    try:
        yield
    except NotImplementedError as error:
        raise UnsupportedOperationError(str(error)) from error
    except BROKEN as error:
        raise A2AClientError("What it answers is no A2A") from error


async def _read(events: AsyncIterator[StreamResponse]) -> AsyncGenerator[StreamResponse]:
    with _as_a2a():
        async for event in events:
            yield event


class _TaskThere:
    """What has come of a task elsewhere."""

    def __init__(self, turn: IncomingTurn) -> None:
        self._turn = turn
        self.task_id = ""
        self.state = TaskState.TASK_STATE_UNSPECIFIED
        self._artifacts: dict[str, list[Part]] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0
        self._said: list[Part] = []
        """What its status, or a plain message, says."""

        self._streamed = ""
        self._shows: str | None = ""
        """The artifact whose text is streamed, if the answer goes on where that has ended."""

        self._is_message = False

    @property
    def is_over(self) -> bool:
        return self._is_message or self.state in OVER

    def forget(self) -> None:
        """The message begins another task."""
        self.task_id = ""

    def add(self, event: StreamResponse) -> None:
        """Take an update. Raises `ModelError` for more than an answer may hold, or what is of another task."""
        match event.WhichOneof("payload"):
            case "task":
                self._begin(event.task)
            case "message":
                self._is_message = True
                self._say(event.message)
            case "status_update":
                self._name(event.status_update.task_id)
                self.state = event.status_update.status.state
                self._say(event.status_update.status.message)
            case "artifact_update":
                self._name(event.artifact_update.task_id)
                self._take(event.artifact_update.artifact, goes_on=event.artifact_update.append)

    def _begin(self, task: Task) -> None:
        self._name(task.id)
        self.state = task.status.state
        self._say(task.status.message)
        self._artifacts, self._sizes, self._size = {}, {}, 0
        for artifact in task.artifacts:
            self._keep(artifact)
        self._shows = None
        text = self._read_artifacts()
        if text.startswith(self._streamed):  # what was written anew is seen when it is sent
            self._stream(text[len(self._streamed) :])
            self._shows = next(reversed(self._artifacts), "")

    def _name(self, task_id: str) -> None:
        if not 0 < len(task_id) <= MAX_ID or self.task_id not in ("", task_id):
            raise ModelError(f"It tells of another task, {task_id[:80]!r}.", reason="broken_reply")
        self.task_id = task_id

    def _say(self, message: Message) -> None:
        self._check(message.ByteSize())
        self._said = list(message.parts)

    def _take(self, artifact: Artifact, *, goes_on: bool) -> None:
        name = artifact.artifact_id
        is_new = name not in self._artifacts
        self._keep(artifact, goes_on=goes_on)
        if is_new and self._shows is not None:
            self._stream("\n\n" if self._streamed else "")
            self._shows = name
        if self._shows == name and (goes_on or is_new) and all(part.HasField("text") for part in artifact.parts):
            self._stream("".join(part.text for part in artifact.parts))
        else:
            self._shows = None

    def _keep(self, artifact: Artifact, *, goes_on: bool = False) -> None:
        name, size = artifact.artifact_id, artifact.ByteSize()
        known = self._sizes.get(name, 0)
        self._sizes[name] = known + size if goes_on else size
        self._size += self._sizes[name] - known
        self._check(self._size)
        if not goes_on:
            self._artifacts[name] = []
        self._artifacts.setdefault(name, []).extend(artifact.parts)

    def _check(self, size: int) -> None:
        if size > 8 * self._turn.max_chars:
            raise ModelError("Its answer is longer than a message can be.", reason="broken_reply")

    def _stream(self, text: str) -> None:
        if text:
            self._turn.stream(text)
            self._streamed += text

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
                return "\n\n".join(text for text in (self._read_artifacts(), said) if text)
            case _:
                return self._read_artifacts() or said

    def _read_artifacts(self) -> str:
        return "\n\n".join(_write(artifact) for artifact in self._artifacts.values())


class _OneHost(httpx.AsyncHTTPTransport):
    """HTTP to one host alone, which may answer as it is and no more than so much. Its event streams end lines where
    their sender does: what httpx takes for a line's end beyond that, a text may hold."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._origin = _origin(address)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if _origin(str(request.url)) != self._origin:
            reason = f"The card names another host, {request.url.host}: the token is not for that."
            raise ModelError(reason, reason="misconfigured")
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.stream.aclose()
            raise ModelError("Its answer is packed, as it was not asked to.", reason="broken_reply")
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _BoundedStream(response.stream, is_escaped=is_stream)
        return response


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, *, is_escaped: bool) -> None:
        self._stream = stream
        self._is_escaped = is_escaped

    async def __aiter__(self) -> AsyncIterator[bytes]:
        begun, count = b"", 0  # of a character whose rest comes with the next piece
        async for piece in self._stream:
            count += len(piece)
            if count > MAX_RESPONSE_BYTES:
                raise ModelError("It answers without an end.", reason="broken_reply")
            if not self._is_escaped:
                yield piece
                continue
            whole = begun + piece
            end = next((n for n in (2, 1) if whole[-n:] in (b"\xc2", b"\xe2", b"\xe2\x80")), 0)
            begun = whole[len(whole) - end :]
            yield escape_line_ends(whole[: len(whole) - end])
        yield begun

    async def aclose(self) -> None:
        await self._stream.aclose()


def _write(parts: list[Part]) -> str:
    """Parts as the text of a message: pieces of text as one, files as lines that name them."""
    texts = "".join(part.text for part in parts)
    others = [part for part in parts if part.WhichOneof("content") not in ("text", None)]
    try:
        return "\n".join([*([texts] if texts else []), *([write_content(read_parts(others))] if others else [])])
    except ValueError as error:
        raise ModelError(f"It says what is no JSON: {error}", reason="broken_reply") from error


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
        if isinstance(cause, BROKEN):
            return "broken_reply"
        cause = cause.__cause__
    return "not_found" if isinstance(error, TaskNotFoundError) else "rejected"


class _WithStatus(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code
