"""Remote A2A 1.0 agents as participants: ``a2a: https://agent.example`` in an agent's file, or ``await
A2AAgent("helper", "https://agent.example").run()``.

The official SDK implements the protocol. Each thread in this network corresponds to one context at the remote agent.
Each message that wakes the agent is sent as one remote message, which keeps its id when it is sent again. The id of the
remote task is recorded. After a kill, the next process asks for this task instead of starting a second one. The remote
agent's answer is treated only as text. No URL in the answer is fetched, and only the configured host is contacted.
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
from roundelay.network.backoff import Backoff
from roundelay.network.credentials import read_secret
from roundelay.network.errors import ConfigError
from roundelay.network.extras import needs
from roundelay.network.messages import write_content

from .participant import AdaptedAgent, IncomingTurn, classify_status, mark

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
POLL_S = 2.0
"""Poll interval for a remote agent that does not stream, in seconds."""
RETRY_BACKOFF = Backoff(0.25, 8.0)
MAX_RETRIES = 6
"""Maximum number of consecutive retries after a lost connection. Each update from the remote agent resets the count."""
MAX_NAMED, MAX_NAME = 32, 64
"""Maximum number of skills and tags of a remote card that other participants see, and maximum length of each, in
characters.
"""
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
"""States of a remote task after which no update follows."""
BROKEN = (ParseError, httpx.InvalidURL, ValueError, TypeError, AttributeError, KeyError, RecursionError)
"""Exceptions that the SDK raises for invalid A2A data, in addition to its own errors."""


@dataclass(slots=True)
class _Connection:
    http: httpx.AsyncClient
    client: Client | None = None


class A2AAgent(AdaptedAgent):
    """Lets the remote agent whose card is at ``address`` take part in a network. ``headers``, such as the token, are
    sent with each request. Raises `ConfigError` for an invalid header.
    """

    framework = "a2a"

    def __init__(
        self, agent_id: str, address: str, *, headers: Mapping[str, str] | None = None, **options: Unpack[RunnerOptions]
    ) -> None:
        super().__init__(agent_id, **options)
        self.address = address.rstrip("/")
        self._headers = {name: read_secret(value, f"the header {name}") for name, value in (headers or {}).items()}
        self._connections = LoopLocal(self._make_connection)
        self._card: AgentCard | None = None
        # This dictionary is only a cache. After a restart, `_find_waiting` asks the remote agent for these tasks.
        self._waiting: dict[str, str] = {}
        """Ids of remote tasks that wait for input from this side, by context id."""

    async def prepare(self) -> None:
        """Read the remote card, whose content other participants see. If reading fails, the first message
        tries again.
        """
        try:
            await self._connect()
        except (A2AError, ModelError) as error:
            # Start in spite of the error. A remote agent that is briefly unavailable must not keep this participant out
            # of the network.
            extra = {"agent_id": self.agent_id, "reason": str(error)}
            _logger.warning("the card of a remote agent cannot be read now", extra=extra)

    def describe_card(self) -> dict[str, object]:
        own, card = super().describe_card(), self._card
        if card is None:
            return own
        tags = [*self.tags, *dict.fromkeys(tag for skill in card.skills for tag in skill.tags)]
        return {
            **own,
            # Limit each part of the card. The card contains text from a stranger, and every participant receives it.
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
        # Compute the time limit here. A timeout and the end of the process both arrive as a cancellation, and the clock
        # distinguishes them.
        until_s = now() + self.policy.model_timeout_s
        try:
            progress = _RemoteTask(turn)
            try:
                await self._ask(turn, progress)
            except asyncio.CancelledError:
                # Cancel the remote task only after a stop or a timeout. If only this process ends, the next process
                # continues the task.
                connection = self._connections.find()
                if (turn.is_stopped or now() >= until_s) and connection is not None and connection.client is not None:
                    await self._cancel_remote(connection.client, turn, progress.task_id)
                raise
        except A2AError as error:
            raise ModelError(f"{type(error).__name__}: {error}", reason=_classify(error)) from error
        if progress.state == TaskState.TASK_STATE_INPUT_REQUIRED:
            # Remember the task. The person's next message answers the question, and must continue this task instead of
            # starting a new one.
            self._waiting[_context_of(turn)] = progress.task_id
        return progress.conclude()

    def _make_connection(self) -> _Connection:
        try:
            # Check the certificates first. The error of this check names the variable (SSL_CERT_FILE) and the path to
            # correct.
            load_certificates()
        except ConfigError as error:
            raise ModelError(f"{self.address} cannot be used. {error}", reason="misconfigured") from None
        limits = httpx.Timeout(None, connect=CARD_TIMEOUT_S)  # the agent's policy limits the total time
        headers = {**self._headers, "Accept-Encoding": "identity"}  # a compressed answer may expand to any size
        return _Connection(
            httpx.AsyncClient(headers=headers, timeout=limits, transport=_SingleHostTransport(self.address))
        )

    async def _connect(self) -> Client:
        connection = self._connections.get()
        if connection.client is not None:
            return connection.client
        try:
            async with asyncio.timeout(CARD_TIMEOUT_S):
                with _as_a2a():
                    card = await A2ACardResolver(connection.http, self.address).get_agent_card()
        except TimeoutError as error:
            raise ModelError(
                f"{self.address} did not send its card within {CARD_TIMEOUT_S:g} s", reason="timeout"
            ) from error
        # Exclude gRPC, which would open its own connections, outside of the transport that limits hosts and sizes.
        config = ClientConfig(httpx_client=connection.http, supported_protocol_bindings=["JSONRPC", "HTTP+JSON"])
        try:
            connection.client = ClientFactory(config).create(card)
        except (ValueError, httpx.InvalidURL) as error:
            raise ModelError(
                f"{self.address} offers no supported protocol binding (JSONRPC or HTTP+JSON)", reason="misconfigured"
            ) from error
        # Set the card only together with a usable client, because `_resume` relies on the card of the connected agent.
        self._card = card
        return connection.client

    async def _ask(self, turn: IncomingTurn, progress: _RemoteTask) -> None:
        """Send the message, or continue the recorded task of the message, until the task is over."""
        kept = turn.kept.get("task")
        progress.task_id = kept if isinstance(kept, str) else ""
        request: SendMessageRequest | None = None
        is_forgotten = False
        failures = 0  # number of failures since the last update
        while not progress.is_over:
            try:
                client = await self._connect()
                if progress.task_id:
                    events = self._resume(client, progress.task_id)
                else:
                    # Create the request only once. Creating it removes the waiting task of the context, which a second
                    # call would not find.
                    request = request or await self._make_request(client, turn)
                    events = client.send_message(request)
                # Close the stream explicitly. Otherwise a stream that is left by `break` would keep its connection
                # until garbage collection.
                async with aclosing(_read(events)) as updates:
                    async for event in updates:
                        had_task = bool(progress.task_id)
                        progress.add(event)
                        if progress.task_id and not had_task:
                            # Record the task at once. After a kill, the next process then asks for this task instead of
                            # starting a second one.
                            await turn.keep("task", progress.task_id)
                        # Reset the count. An update shows that the agent works, so a long task may survive more than
                        # `MAX_RETRIES` lost connections.
                        failures = 0
                        if progress.is_over:
                            break
                if not (progress.is_over or progress.task_id):
                    failures += 1
                    if failures > MAX_RETRIES:
                        raise ModelError("The agent accepts the message but sends no reply.", reason="broken_reply")
                    await asyncio.sleep(RETRY_BACKOFF.delay_s(failures))
                elif not progress.is_over:
                    await asyncio.sleep(POLL_S)
            except TaskNotFoundError:
                if not progress.task_id or is_forgotten:
                    raise
                progress.forget()  # the agent lost the task: send the message again
                is_forgotten = True
            except A2AError as error:
                failures += 1
                # Retry only lost connections. After a refusal, the agent would refuse the request again, and a repeated
                # request could cost money again.
                if failures > MAX_RETRIES or _classify(error) != "unreachable":
                    raise
                await asyncio.sleep(RETRY_BACKOFF.delay_s(failures))

    async def _make_request(self, client: Client, turn: IncomingTurn) -> SendMessageRequest:
        context = _context_of(turn)
        if "continues" not in turn.kept:
            # Record the choice, because a repeated request must continue the same task.
            await turn.keep("continues", self._waiting.pop(context, None) or await self._find_waiting(client, context))
        message = turn.message
        if message.kind == "direct":
            # Send a direct message unchanged, with its files and data, because it is only for this agent.
            parts = make_parts(message.content)
        else:
            # Send the new messages of a channel as text, each with its sender, because the agent has not seen them.
            parts = [Part(text="\n\n".join([turn.guide, *map(mark, turn.news)]))]
        return SendMessageRequest(
            message=Message(
                # Use the same id for each attempt, so that an agent that already has the message can recognize the
                # repeat.
                message_id=turn.reaction,
                context_id=context,
                task_id=str(turn.kept.get("continues") or ""),
                role=Role.ROLE_USER,
                parts=parts,
                metadata={"sender": message.sender_id},
            )
        )

    async def _find_waiting(self, client: Client, context: str) -> str:
        """Return the id of the task in this context that waits for input, even if an earlier process started the task.
        Return an empty string if no task waits.
        """
        wanted = ListTasksRequest(context_id=context, status=TaskState.TASK_STATE_INPUT_REQUIRED, page_size=1)
        with suppress(A2AError), _as_a2a():  # not every agent can list tasks
            found = await client.list_tasks(wanted)
            # Check the context again. An agent may ignore the filter, and its task could then belong to another thread.
            return next((task.id for task in found.tasks if task.context_id == context and len(task.id) <= MAX_ID), "")
        return ""

    async def _resume(self, client: Client, task_id: str) -> AsyncIterator[StreamResponse]:
        task = await client.get_task(GetTaskRequest(id=task_id))
        # Yield the complete task first, because it includes the updates that were sent while no connection was open.
        yield StreamResponse(task=task)
        assert self._card is not None, "connected before"
        if task.status.state not in OVER and self._card.capabilities.streaming:
            with suppress(UnsupportedOperationError, NotImplementedError):  # the task ended meanwhile
                async for event in client.subscribe(SubscribeToTaskRequest(id=task_id)):
                    yield event

    async def _cancel_remote(self, client: Client, turn: IncomingTurn, task_id: str) -> None:
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                with _as_a2a():
                    # Search for the task if its id is not known yet. A stop may come before the first update, when the
                    # remote task is already running and costs money.
                    task_id = task_id or await self._find_started(client, turn)
                    if task_id:
                        await client.cancel_task(CancelTaskRequest(id=task_id))
        except (A2AError, TimeoutError) as error:
            extra = {"agent_id": self.agent_id, "task_id": task_id, "reason": str(error)}
            _logger.warning("a remote task could not be cancelled", extra=extra)

    async def _find_started(self, client: Client, turn: IncomingTurn) -> str:
        """Return the id of the task that the message started, even if the task has not sent an update yet. Return an
        empty string if no task was found.
        """
        wanted = ListTasksRequest(context_id=_context_of(turn), page_size=5)
        for attempt in (1, 2, 3):  # retry, because the message may still be in transit
            for task in (await client.list_tasks(wanted)).tasks:
                # Cancel only the task that contains this message. Other tasks of the context must continue.
                if any(message.message_id == turn.reaction for message in task.history):
                    return str(task.id)
            await asyncio.sleep(RETRY_BACKOFF.delay_s(attempt))
        return ""


@contextmanager
def _as_a2a() -> Iterator[None]:
    """Convert exceptions of the SDK. Invalid A2A data raises `A2AClientError`. A method that the remote agent lacks
    raises `UnsupportedOperationError`, for example because A2A 0.3 cannot list tasks.
    """
    try:
        yield
    except NotImplementedError as error:
        raise UnsupportedOperationError(str(error)) from error
    except BROKEN as error:
        raise A2AClientError("The answer is not valid A2A") from error


async def _read(events: AsyncIterator[StreamResponse]) -> AsyncGenerator[StreamResponse]:
    with _as_a2a():
        async for event in events:
            yield event


class _RemoteTask:
    """State of a remote task, and the answer that was received so far."""

    def __init__(self, turn: IncomingTurn) -> None:
        self._turn = turn
        self.task_id = ""
        self.state = TaskState.TASK_STATE_UNSPECIFIED
        self._artifacts: dict[str, list[Part]] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0
        self._parts: list[Part] = []
        """Content of the task's status, or of a plain message."""

        self._streamed = ""
        self._streamed_artifact: str | None = ""
        """Id of the artifact whose text is streamed. The id is None if streaming has ended, because the answer does not
        continue the streamed text.
        """

        self._is_message = False

    @property
    def is_over(self) -> bool:
        return self._is_message or self.state in OVER

    def forget(self) -> None:
        """Forget the task id, so that the next message starts a new task."""
        self.task_id = ""

    def add(self, event: StreamResponse) -> None:
        """Process an update. Raises `ModelError` if the answer is too long, or if the update belongs to
        another task.
        """
        match event.WhichOneof("payload"):
            case "task":
                self._set_task(event.task)
            case "message":
                self._is_message = True
                self._set_message(event.message)
            case "status_update":
                self._check_id(event.status_update.task_id)
                self.state = event.status_update.status.state
                self._set_message(event.status_update.status.message)
            case "artifact_update":
                self._check_id(event.artifact_update.task_id)
                self._add_artifact(event.artifact_update.artifact, is_append=event.artifact_update.append)

    def _set_task(self, task: Task) -> None:
        self._check_id(task.id)
        self.state = task.status.state
        self._set_message(task.status.message)
        self._artifacts, self._sizes, self._size = {}, {}, 0  # a complete task replaces all earlier updates
        for artifact in task.artifacts:
            self._store(artifact)
        self._streamed_artifact = None
        text = self._read_artifacts()
        if text.startswith(self._streamed):  # a rewritten text is shown only when the answer is sent
            self._stream(text[len(self._streamed) :])
            self._streamed_artifact = next(reversed(self._artifacts), "")

    def _check_id(self, task_id: str) -> None:
        if not 0 < len(task_id) <= MAX_ID or self.task_id not in ("", task_id):
            # Refuse the update. Otherwise the answer to another task would be sent as the answer to this message.
            raise ModelError(f"The agent sent an update of a different task, {task_id[:80]!r}.", reason="broken_reply")
        self.task_id = task_id

    def _set_message(self, message: Message) -> None:
        # Check the size before storing the message. An agent that streams without end must not fill the node's memory.
        self._check_size(message.ByteSize())
        self._parts = list(message.parts)

    def _add_artifact(self, artifact: Artifact, *, is_append: bool) -> None:
        name = artifact.artifact_id
        is_new = name not in self._artifacts
        self._store(artifact, is_append=is_append)
        if is_new and self._streamed_artifact is not None:
            self._stream("\n\n" if self._streamed else "")
            self._streamed_artifact = name
        # Stream only text that continues the streamed text, because streamed text cannot be changed afterwards. The
        # final answer contains all text.
        if (
            self._streamed_artifact == name
            and (is_append or is_new)
            and all(part.HasField("text") for part in artifact.parts)
        ):
            self._stream("".join(part.text for part in artifact.parts))
        else:
            self._streamed_artifact = None

    def _store(self, artifact: Artifact, *, is_append: bool = False) -> None:
        name, size = artifact.artifact_id, artifact.ByteSize()
        previous = self._sizes.get(name, 0)
        # Subtract the size of a replaced artifact. Otherwise an agent that rewrites its draft would reach the limit.
        self._sizes[name] = previous + size if is_append else size
        self._size += self._sizes[name] - previous
        self._check_size(self._size)
        if not is_append:
            self._artifacts[name] = []
        self._artifacts.setdefault(name, []).extend(artifact.parts)

    def _check_size(self, size: int) -> None:
        # Limit the memory here, not the length of the answer. The size includes metadata, and a character takes up to 4
        # bytes.
        if size > 8 * self._turn.max_chars:
            raise ModelError("The agent's answer is longer than a message may be.", reason="broken_reply")

    def _stream(self, text: str) -> None:
        if text:
            self._turn.stream(text)
            self._streamed += text

    def conclude(self) -> str:
        """Return the answer of the remote task. Raises `ModelError` if the task ended without an answer."""
        status_text = _write(self._parts)
        match self.state:
            case TaskState.TASK_STATE_FAILED:
                raise ModelError(f"The agent's task failed. {status_text}", reason="server")
            case TaskState.TASK_STATE_CANCELED | TaskState.TASK_STATE_REJECTED:
                raise ModelError(f"The agent rejected or cancelled the task. {status_text}", reason="rejected")
            case TaskState.TASK_STATE_AUTH_REQUIRED:
                raise ModelError(f"The agent's task needs an authorization. {status_text}", reason="unauthorized")
            case TaskState.TASK_STATE_INPUT_REQUIRED:
                # Return the artifacts and the status text, because the person needs both to answer. The status contains
                # the question, and the artifacts contain the work so far.
                return "\n\n".join(text for text in (self._read_artifacts(), status_text) if text)
            case _:
                # Prefer the artifacts, which are the result of an A2A task. Use the status text only if there is no
                # artifact.
                return self._read_artifacts() or status_text

    def _read_artifacts(self) -> str:
        return "\n\n".join(_write(artifact) for artifact in self._artifacts.values())


class _SingleHostTransport(httpx.AsyncHTTPTransport):
    """HTTP transport to a single host. Answers must be uncompressed, and their size is limited.

    In event streams, the transport escapes line ends that JSON text may contain, because httpx would split lines at
    them.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._origin = _origin(address)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if _origin(str(request.url)) != self._origin:
            reason = f"The card names a different host, {request.url.host}, which must not get the token."
            raise ModelError(reason, reason="misconfigured")
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        # Refuse compressed answers. The limit counts bytes as they arrive, and a compressed answer could expand to any
        # size.
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.stream.aclose()
            raise ModelError("The answer is compressed, although no compression was requested.", reason="broken_reply")
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _BoundedStream(response.stream, is_escaped=is_stream)
        return response


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, *, is_escaped: bool) -> None:
        self._stream = stream
        self._is_escaped = is_escaped

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest, count = b"", 0  # `rest` is an incomplete character at the end of a piece
        async for piece in self._stream:
            count += len(piece)
            if count > MAX_RESPONSE_BYTES:
                raise ModelError(
                    f"The answer has more than {MAX_RESPONSE_BYTES} bytes, the maximum.", reason="broken_reply"
                )
            if not self._is_escaped:
                yield piece
                continue
            whole = rest + piece
            # Hold back the first bytes of a separator that is split between two pieces. Otherwise the separator would
            # pass unescaped.
            end = next((n for n in (2, 1) if whole[-n:] in (b"\xc2", b"\xe2", b"\xe2\x80")), 0)
            rest = whole[len(whole) - end :]
            yield escape_line_ends(whole[: len(whole) - end])
        yield rest

    async def aclose(self) -> None:
        await self._stream.aclose()


def _write(parts: list[Part]) -> str:
    """Convert parts to the text of a message. Texts are joined, and each file becomes a line with its name."""
    texts = "".join(part.text for part in parts)
    others = [part for part in parts if part.WhichOneof("content") not in ("text", None)]
    try:
        return "\n".join([*([texts] if texts else []), *([write_content(read_parts(others))] if others else [])])
    except ValueError as error:
        raise ModelError(f"The answer contains invalid JSON: {error}", reason="broken_reply") from error


def _context_of(turn: IncomingTurn) -> str:
    """Return the remote context id of a thread. The id is stable, and unique to this network."""
    # Hash the names, so that the remote agent does not see them. The separator cannot occur in an id, so two threads
    # never share a context.
    parts = "\x1f".join(("a2a-context", turn.epoch, turn.agent_id, turn.message.thread_id))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _origin(address: str) -> tuple[str, str, int]:
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _classify(error: A2AError) -> ModelFailure:
    """Return the category of a failure of the remote agent, or of the connection to it."""
    cause: Any = error
    while cause is not None:
        if isinstance(cause, httpx.HTTPStatusError):
            return classify_status(cause.response.status_code)
        if isinstance(cause, A2AClientTimeoutError | httpx.TimeoutException):
            return "timeout"
        if isinstance(cause, httpx.RequestError):
            return "unreachable"
        if isinstance(cause, BROKEN):
            return "broken_reply"
        # Follow the chain of causes. The SDK wraps errors of httpx, and the original error decides whether to retry.
        cause = cause.__cause__
    return "not_found" if isinstance(error, TaskNotFoundError) else "rejected"
