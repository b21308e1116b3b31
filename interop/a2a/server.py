"""Each agent of a network as a server of A2A 1.0, at ``/a2a/AGENT``: its card, JSON-RPC and HTTP+JSON, by the official
SDK.

A caller is a participant with its token, a task what the ledger has of it (`a2a_tasks`). So there is no store, no queue
and no executor of the SDK's here: its routes speak the protocol, `LedgerHandler` answers them. What streams is told as
it comes; what was lost of it comes whole with the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeAlias, cast

from roundelay.interop.conversations import (
    AgentAnswer,
    FollowedQuestion,
    QuestionEnded,
    QuestionStored,
    TextPiece,
    find_agent,
)
from roundelay.interop.http.public_names import PublicNames
from roundelay.interop.http.requests import parse_json, read_body, serve_while_connected
from roundelay.interop.session_pool import Credentials, SessionPool, read_authorization
from roundelay.network.addresses import agent_address
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import (
    ConnectError,
    GiveUp,
    IdConflict,
    InvalidFrame,
    RetryLater,
    RoundelayError,
    UnknownMessage,
    UnknownRecipient,
)

# the package of protobuf's runtime has no types
from roundelay.network.extras import needs
from roundelay.network.frames import is_id

from .parts import escape_line_ends, make_parts, read_json, read_parts
from .push import Push, TaskPushes
from .tasks import (
    INPUT_REQUIRED,
    INTERRUPTED,
    SUBMITTED,
    TERMINAL,
    WORKING,
    TaskLedger,
    TaskRecord,
    describe,
    is_request,
    make_task_id,
    newest_of,
)

with needs("gateway"):
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from a2a.server.jsonrpc_models import JSONParseError
    from a2a.server.request_handlers import RequestHandler, build_error_response, validate_request_params
    from a2a.server.routes import ServerCallContextBuilder, create_jsonrpc_routes, create_rest_routes
    from a2a.types import (
        AgentCapabilities,
        AgentCard,
        AgentInterface,
        AgentSkill,
        Artifact,
        CancelTaskRequest,
        ContentTypeNotSupportedError,
        DeleteTaskPushNotificationConfigRequest,
        GetExtendedAgentCardRequest,
        GetTaskPushNotificationConfigRequest,
        GetTaskRequest,
        HTTPAuthSecurityScheme,
        InternalError,
        InvalidParamsError,
        ListTaskPushNotificationConfigsRequest,
        ListTaskPushNotificationConfigsResponse,
        ListTasksRequest,
        ListTasksResponse,
        Message,
        Part,
        PushNotificationNotSupportedError,
        Role,
        SecurityRequirement,
        SecurityScheme,
        SendMessageConfiguration,
        SendMessageRequest,
        StringList,
        SubscribeToTaskRequest,
        Task,
        TaskArtifactUpdateEvent,
        TaskNotCancelableError,
        TaskNotFoundError,
        TaskPushNotificationConfig,
        TaskState,
        TaskStatusUpdateEvent,
        UnsupportedOperationError,
    )
    from a2a.utils.constants import A2A_JSON_MEDIA_TYPE
    from a2a.utils.error_handlers import build_rest_error_payload
    from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route, Router
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.types import Message as ServerEvent


_logger = logging.getLogger(__name__)

INPUT_MODES = ("text/plain", "application/json", "*/*")
"""A message carries any file; what an agent's model makes of it is the agent's affair."""
OUTPUT_MODES = ("text/plain", "application/json")
MAX_PAGE, PAGE = 100, 50
LOOK_EVERY_S = 15.0
_MESSAGE_ID = re.compile("[!-~]{1,128}")
_PAGE_TOKEN = re.compile("[0-9]{1,16}")
CANCEL_WAIT_S = 20.0
"""How long a cancel waits for its agent to stop."""
TOLD = "roundelay.a2a_told"
"""In the scope of a request: the seqs of the agent's messages that its answer holds."""
CARD_PATH = "/.well-known/agent-card.json"


def make_a2a_app(pool: SessionPool, pushes: TaskPushes | None, names: PublicNames) -> ASGIApp:
    """One agent's server, whose id is the path parameter ``agent_id``. Who comes here has a token."""
    handler, builder = LedgerHandler(pool, pushes), _ContextBuilder()

    async def show_card(request: Request) -> Response:
        credentials = read_authorization(request.headers.get("authorization"))
        async with pool.session(credentials) as client:
            agent_id = request.path_params["agent_id"]
            agent = await find_agent(client, agent_id)
            if agent is None:
                raise UnknownRecipient(f"There is no agent {agent_id[:80]!r} here; GET /v1/agents lists who is.")
            url = f"{names.show_base(request)}{request.scope['root_path']}"
            card = make_card(client, agent, url, is_pushing=pushes is not None)
        body = read_json(card)
        tag = f'W/"{hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}"'
        return JSONResponse(body, headers={"ETag": tag, "Cache-Control": "private, max-age=60"})

    routes = [
        Route(CARD_PATH, show_card, methods=["GET"]),
        *create_jsonrpc_routes(handler, "/", builder),
        *create_rest_routes(handler, builder),
    ]
    return _AgentServer(Router(routes), pool)


class _AgentServer:
    """The SDK's routes, with what it leaves out: a body comes in time, is no larger than others may be and JSON that
    can be stored; ``application/json`` is taken and given, as 9.1 and 11.1 of the specification have it (the SDK takes
    whatever is JSON, and names what it gives by the media type of a later version); whoever has gone is waited for no
    more; answers that the caller has been given are handled."""

    def __init__(self, app: ASGIApp, pool: SessionPool) -> None:
        self._app = app
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind not in ("", "application/json", A2A_JSON_MEDIA_TYPE):
            await _refuse(scope, ContentTypeNotSupportedError("A request is application/json"))(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive))
            if body:
                parse_json(body)
        except ClientDisconnect:
            return
        except InvalidFrame as error:
            await _refuse(scope, JSONParseError(message=str(error)))(scope, receive, send)
            return
        is_given = False

        async def give(event: ServerEvent) -> None:
            nonlocal is_given
            if event["type"] == "http.response.start":
                headers = MutableHeaders(scope=event)
                if headers.get("content-type") == A2A_JSON_MEDIA_TYPE:
                    headers["content-type"] = "application/json"
            elif event.get("more_body"):  # of a stream
                event["body"] = escape_line_ends(event["body"])
            await send(event)
            is_given = event["type"] == "http.response.body" and not event.get("more_body")

        await serve_while_connected(self._app, scope, receive, give, body)
        if is_given and (told := scope.get(TOLD)):
            await self._acknowledge(read_authorization(Headers(scope=scope).get("authorization")), told)

    async def _acknowledge(self, credentials: Credentials, seqs: Iterable[int]) -> None:
        try:
            async with self._pool.conversations(credentials, is_cleanup=True) as conversations:
                await conversations.client.call("network.acknowledge", {"seqs": sorted(seqs)})
        except RoundelayError as error:
            _logger.info("answers could not be acknowledged", extra={"code": error.code})


def _refuse(scope: Scope, error: ContentTypeNotSupportedError | JSONParseError) -> Response:
    """In the words of the binding that is called."""
    if scope["path"] == f"{scope['root_path']}/":
        return JSONResponse(build_error_response(None, error))
    if isinstance(error, JSONParseError):
        return JSONResponse(build_rest_error_payload(ParseError(error.message)), 400)
    payload = build_rest_error_payload(error)
    payload["error"]["code"] = 415  # as 5.4 has it; the SDK says 400
    return JSONResponse(payload, 415)


def make_card(client: NetworkClient, agent: dict[str, Any], url: str, *, is_pushing: bool) -> AgentCard:
    """An agent's card of A2A, made of the one that it has shown to the network."""
    agent_id: str = agent["agent_id"]
    own = agent.get("card")
    given: dict[str, Any] = own if isinstance(own, dict) else {}
    description = _text(given.get("description")) or f"An agent of the network {client.welcome.network.name}"
    tags = [it for it in given.get("tags") or [] if isinstance(it, str)]
    skills = [_make_skill(it, tags) for it in given.get("tools") or []] or [
        AgentSkill(id="converse", name="Converse", description=description, tags=tags or ["conversation"])
    ]
    return AgentCard(
        name=agent_id,
        description=description,
        version=client.welcome.server.rpartition("/")[2],
        supported_interfaces=[
            AgentInterface(url=f"{url}/", protocol_binding="JSONRPC", protocol_version="1.0"),
            AgentInterface(url=url, protocol_binding="HTTP+JSON", protocol_version="1.0"),
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=is_pushing, extended_agent_card=False),
        security_schemes={
            "token": SecurityScheme(
                http_auth_security_scheme=HTTPAuthSecurityScheme(
                    scheme="Bearer", bearer_format="ID:TOKEN", description="A participant's id and its token"
                )
            )
        },
        security_requirements=[SecurityRequirement(schemes={"token": StringList()})],
        default_input_modes=INPUT_MODES,
        default_output_modes=OUTPUT_MODES,
        skills=skills,
    )


def _make_skill(tool: object, tags: list[str]) -> AgentSkill:
    given = tool if isinstance(tool, dict) else {"name": tool}
    name = _text(given.get("name")) or "tool"
    return AgentSkill(
        id=name,
        name=name,
        description=_text(given.get("description")) or f"Uses its tool {name}",
        tags=tags or ["tool"],
    )


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


_Call: TypeAlias = tuple[Credentials, str, set[int]]
"""Who calls, which agent is asked, and `TOLD`."""


class _ContextBuilder(ServerCallContextBuilder):
    def build(self, request: Request) -> ServerCallContext:
        credentials = read_authorization(request.headers.get("authorization"))
        caller = credentials, request.path_params["agent_id"], cast(set[int], request.scope.setdefault(TOLD, set()))
        state = {"headers": dict(request.headers), "caller": caller}
        return ServerCallContext(state=state)


@contextmanager
def _in_words_of_a2a() -> Iterator[None]:
    """Raises what the network refuses as an error of A2A."""
    try:
        yield
    except (UnknownRecipient, UnknownMessage) as error:
        raise TaskNotFoundError(str(error)) from error
    except (GiveUp, ConnectError, RetryLater) as error:
        kind = UnsupportedOperationError if isinstance(error, GiveUp) else InternalError
        raise kind(str(error), {"code": error.code}) from error
    except RoundelayError as error:
        raise InvalidParamsError(str(error), {"code": error.code}) from error


class LedgerHandler(RequestHandler):
    """Answers what is asked of the agents of one network."""

    def __init__(self, pool: SessionPool, pushes: TaskPushes | None) -> None:
        self._pool = pool
        self._pushes = pushes
        self._subscribers: dict[str, set[asyncio.Event]] = {}
        """Of each thread: who waits for the caller to go on with a task of it."""

    # --- what is asked

    @validate_request_params
    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task:
        async with self._open(context) as tasks:
            task = await _read(tasks, params.id)
            _note(context, task)
            return task.make_task(_history_length(params))

    @validate_request_params
    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        size = params.page_size if params.HasField("page_size") else PAGE
        if not 1 <= size <= MAX_PAGE:
            raise InvalidParamsError(f"pageSize is to be from 1 to {MAX_PAGE}")
        if params.page_token and not _PAGE_TOKEN.fullmatch(params.page_token):
            raise InvalidParamsError("pageToken is to be a nextPageToken of an earlier answer")
        async with self._open(context) as tasks:
            found = await tasks.find(params.context_id or None)
            if params.status or params.HasField("status_timestamp_after"):
                after_ms = params.status_timestamp_after.ToMilliseconds()
                judged = [await tasks.judge(it) for it in found]
                fits = [it for it in judged if not params.status or it.state == params.status]
                fits = [it for it in fits if it.messages[-1].sent_at > after_ms]
                wanted = {it.root.seq for it in fits}
                found = [it for it in found if it.own[0].seq in wanted]
            below = int(params.page_token) if params.page_token else None
            page = [it for it in found if below is None or newest_of(it) < below]
            shown = [await tasks.judge(it) for it in page[:size]]
            return ListTasksResponse(
                tasks=[it.make_task(_history_length(params), with_artifacts=params.include_artifacts) for it in shown],
                next_page_token=str(newest_of(page[size - 1])) if len(page) > size else "",
                page_size=size,
                total_size=len(found),
            )

    @validate_request_params
    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task:
        async with self._open(context) as tasks:
            task = await _read(tasks, params.id)
            if task.state in TERMINAL:
                raise TaskNotCancelableError(f"The task is over: {TaskState.Name(task.state)}")
            if task.ended is not None and task.ended.status == "held":
                raise TaskNotCancelableError(
                    f"{task.ended.reason} Its agent goes on once it is given back; cancel it then"
                )
            if task.ended is not None:
                await tasks.call_off(task)  # nothing runs that could be stopped
            else:
                async with tasks.conversations.follow(tasks.agent_id, _stored(task)) as question:
                    if not await question.stop():
                        raise TaskNotCancelableError("Its agent has not begun it yet; cancel it when it works on it")
                    await _wait_for_end(question)
            self._ring(task.root.thread_id)
            return (await _read(tasks, params.id)).make_task()

    @validate_request_params
    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Task | Message:
        async with self._send(params, context) as (tasks, task, question):
            if not params.configuration.return_immediately:
                async for _ in self._follow(tasks, task, question):
                    pass
                task = await _read(tasks, task.id)
            _note(context, task)
            if len(task.results) == 1 and (task.results[0].metadata or {}).get("a2a") == "message":
                return task.make_message(task.results[0])
            return task.make_task(_history_length(params.configuration))

    @validate_request_params
    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        async with self._send(params, context) as (tasks, task, question):
            yield task.make_task(_history_length(params.configuration))
            async for event in self._follow(tasks, task, question):
                yield event
            _note(context, await _read(tasks, task.id))

    @validate_request_params
    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        async with self._open(context) as tasks:
            task = await _read(tasks, params.id)
            if task.state in TERMINAL:
                raise UnsupportedOperationError(f"The task is over: {TaskState.Name(task.state)}; get it instead")
            async with tasks.conversations.follow(tasks.agent_id, _stored(task)) as question:
                yield task.make_task()
                async for event in self._follow(tasks, task, question, is_subscription=True):
                    yield event
                _note(context, await _read(tasks, task.id))

    @validate_request_params
    async def on_create_task_push_notification_config(
        self, params: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        async with self._open(context) as tasks:
            return await self._push(tasks, await self._read_for_push(tasks, params.task_id), params, context)

    @validate_request_params
    async def on_get_task_push_notification_config(
        self, params: GetTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        async with self._open(context) as tasks:
            return (await self._find_push(tasks, params.task_id, params.id)).make_config()

    @validate_request_params
    async def on_list_task_push_notification_configs(
        self, params: ListTaskPushNotificationConfigsRequest, context: ServerCallContext
    ) -> ListTaskPushNotificationConfigsResponse:
        async with self._open(context) as tasks:
            task = await self._read_for_push(tasks, params.task_id)
            found = self._served_pushes().list_of(task)
            return ListTaskPushNotificationConfigsResponse(configs=[it.make_config() for it in found])

    @validate_request_params
    async def on_delete_task_push_notification_config(
        self, params: DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        async with self._open(context) as tasks:
            with suppress(TaskNotFoundError):  # to delete what is not there succeeds, as the specification has it
                await self._served_pushes().remove(await self._find_push(tasks, params.task_id, params.id))

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        raise UnsupportedOperationError("The card has no extension: whoever may see it sees all of it")

    # --- how it is done

    def _served_pushes(self) -> TaskPushes:
        if self._pushes is None:
            raise PushNotificationNotSupportedError
        return self._pushes

    async def _read_for_push(self, tasks: TaskLedger, task_id: str) -> TaskRecord:
        self._served_pushes()
        return await _read(tasks, task_id)

    async def _find_push(self, tasks: TaskLedger, task_id: str, push_id: str) -> Push:
        task = await self._read_for_push(tasks, task_id)
        for push in self._served_pushes().list_of(task):
            if push.id == push_id:
                return push
        raise TaskNotFoundError(f"The task {task_id} has no push notification {push_id[:80]!r}")

    async def _push(
        self, tasks: TaskLedger, task: TaskRecord, config: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        credentials, _, _ = cast(_Call, context.state["caller"])
        return (await self._served_pushes().register(credentials, tasks.client, task, config)).make_config()

    @asynccontextmanager
    async def _open(self, context: ServerCallContext) -> AsyncIterator[TaskLedger]:
        """The tasks of who calls with the agent that is asked."""
        credentials, agent_id, _ = cast(_Call, context.state["caller"])
        with _in_words_of_a2a():
            async with self._pool.conversations(credentials) as conversations:
                yield TaskLedger(conversations, agent_id)

    @asynccontextmanager
    async def _send(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncIterator[tuple[TaskLedger, TaskRecord, FollowedQuestion]]:
        """Send what is asked, once, and follow it for the length of the block."""
        wants_push = params.configuration.HasField("task_push_notification_config")
        if wants_push:
            self._served_pushes()
        message, content = params.message, _read_content(params.message)
        async with self._open(context) as tasks, AsyncExitStack() as stack:
            if message.task_id:
                task = await self._add(tasks, message, content)
                question = await stack.enter_async_context(tasks.conversations.follow(tasks.agent_id, _stored(task)))
            else:
                question = await self._begin(tasks, message, content, stack)
                task_id = make_task_id(tasks.client, tasks.agent_id, question.stored.seq)
                task = await _read(tasks, task_id)
            if wants_push:
                await self._push(tasks, task, params.configuration.task_push_notification_config, context)
            yield tasks, task, question

    async def _begin(
        self, tasks: TaskLedger, message: Message, content: Any, stack: AsyncExitStack
    ) -> FollowedQuestion:
        """Send the first message of a task. The same one again, where its answer was lost, is the same task."""
        mark = _digest(tasks.agent_id, message, content)
        conversation = message.context_id or f"a2a-{mark[:24]}"
        if not is_id(conversation):
            raise InvalidParamsError(
                "contextId is to be 1 to 64 lower case letters, digits, '.', '_' and '-', a letter or digit first; or "
                "none"
            )
        for message_id in _ids_of(message, mark):
            with suppress(IdConflict):  # it was used for something else: here, or with another agent of the network
                asking = tasks.conversations.ask(
                    tasks.agent_id,
                    content,
                    conversation=conversation,
                    message_id=message_id,
                    metadata=_keep(message),
                )
                return await stack.enter_async_context(asking)
        raise InvalidParamsError("messageId is another message's")

    async def _add(self, tasks: TaskLedger, message: Message, content: Any) -> TaskRecord:
        """Send a further message of a task; gives the task with it."""
        task = await _read(tasks, message.task_id)
        if message.context_id and message.context_id != task.context_id:
            raise InvalidParamsError("contextId is not that of the task")
        mark = _digest(tasks.agent_id, message, content)
        ids = _ids_of(message, mark)
        if any(it.message_id in ids and it.content == content for it in task.messages if it.sender_id == task.caller):
            return task  # its answer was lost
        if task.state in TERMINAL:
            raise UnsupportedOperationError(
                f"The task is over: {TaskState.Name(task.state)}; send it without taskId, in the same context"
            )
        given: dict[str, Any] = {"conversation": task.context_id}
        if task.asked is not None and not is_request(task.asked):  # no client decides on a call in a person's name
            given = {"reply_to": task.asked.seq, "cause": task.asked.seq}
        metadata = _keep(message, task=task.root.seq)
        if tasks.client.kind != "human":
            metadata["ask"] = {"watched": True}  # an agent streams to people, and to whom a person is behind
        for message_id in ids:
            with suppress(IdConflict):
                to = agent_address(tasks.agent_id)
                await tasks.client.send(
                    to, content, message_id=message_id, requires_response=True, metadata=metadata, **given
                )
                self._ring(task.root.thread_id)
                return await _read(tasks, task.id)
        raise InvalidParamsError("messageId is another message's")

    async def _follow(
        self, tasks: TaskLedger, task: TaskRecord, question: FollowedQuestion | None, *, is_subscription: bool = False
    ) -> AsyncGenerator[Event]:
        """What comes of a task after what ``task`` tells, until it is over; unless it is a subscription, until
        something is asked of the caller."""
        telling = _Telling(task)
        while task.state not in TERMINAL:
            if task.state in INTERRUPTED and not is_subscription:
                return
            if task.state == INPUT_REQUIRED:
                await self._wait(task.root.thread_id)
                question = None
                task = await _read(tasks, task.id)
                for event in telling.catch_up(task):
                    yield event
                continue
            async with AsyncExitStack() as stack:
                if question is None:
                    following = tasks.conversations.follow(tasks.agent_id, _stored(task))
                    question = await stack.enter_async_context(following)
                async for happened in question:
                    if isinstance(happened, TextPiece):
                        for event in telling.add(happened):
                            yield event
                    elif isinstance(happened, QuestionEnded) or (
                        isinstance(happened, AgentAnswer) and happened.message.seq not in telling.seqs
                    ):
                        task = await _read(tasks, task.id)
                        for event in telling.catch_up(task):
                            yield event
                        if isinstance(happened, QuestionEnded) or task.state in INTERRUPTED:
                            break
            question = None

    async def _wait(self, thread_id: str) -> None:
        """Wait until the caller goes on with a task in this thread; for a while at most, since it may do so
        elsewhere."""
        bell = asyncio.Event()
        waiting = self._subscribers.setdefault(thread_id, set())
        waiting.add(bell)
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await bell.wait()
        except TimeoutError:
            pass
        finally:
            waiting.discard(bell)
            if not waiting:
                self._subscribers.pop(thread_id, None)

    def _ring(self, thread_id: str) -> None:
        for bell in self._subscribers.get(thread_id, ()):
            bell.set()
        if self._pushes is not None:
            self._pushes.ring(thread_id)


class _Telling:
    """What a caller was told of a task, in updates."""

    def __init__(self, task: TaskRecord) -> None:
        self._task = task
        self._state = task.state
        self.seqs = {it.seq for it in task.messages}
        self._stream: object = None
        self._streamed = ""

    def add(self, piece: TextPiece) -> Iterator[Event]:
        """What streams: of the agent's own text a piece of the artifact that is to come. Other words begin it anew."""
        if self._state == SUBMITTED:
            self._state = WORKING
            status = self._task.make_status()
            status.state = WORKING
            yield TaskStatusUpdateEvent(task_id=self._task.id, context_id=self._task.context_id, status=status)
        if piece.kind != "text" or piece.path:
            return
        goes_on = piece.stream == self._stream
        self._stream, self._streamed = piece.stream, (self._streamed if goes_on else "") + piece.text
        artifact = Artifact(artifact_id=f"answer-{len(self._task.results) + 1}", parts=make_parts(piece.text))
        yield self._update(artifact, append=goes_on, is_last=False)

    def catch_up(self, task: TaskRecord) -> Iterator[Event]:
        """What the ledger has beyond what was told."""
        self._task = task
        for number, message in enumerate(task.results, 1):
            if message.seq not in self.seqs:
                yield self._tell_answer(number, message)
        questions = [it for it in task.messages if it.seq not in self.seqs and task.is_question(it)]
        self.seqs |= {it.seq for it in task.messages}
        if task.state != self._state or (questions and task.state in INTERRUPTED):
            self._state = task.state
            yield TaskStatusUpdateEvent(
                task_id=task.id,
                context_id=task.context_id,
                status=task.make_status(),
                metadata={"seq": task.messages[-1].seq},
            )

    def _tell_answer(self, number: int, message: AnyMessage) -> Event:
        """The rest of what has streamed where that is its beginning, else the whole in its place."""
        artifact, streamed = self._task.make_artifact(number, message), self._streamed
        self._stream, self._streamed = None, ""
        goes_on = bool(streamed) and isinstance(message.content, str) and message.content.startswith(streamed)
        if goes_on:
            del artifact.parts[:]
            artifact.parts.append(Part(text=cast(str, message.content)[len(streamed) :]))
        return self._update(artifact, append=goes_on, is_last=True, metadata=describe(message))

    def _update(
        self, artifact: Artifact, *, append: bool, is_last: bool, metadata: dict[str, Any] | None = None
    ) -> TaskArtifactUpdateEvent:
        return TaskArtifactUpdateEvent(
            task_id=self._task.id,
            context_id=self._task.context_id,
            artifact=artifact,
            append=append,
            last_chunk=is_last,
            metadata=metadata,
        )


def _note(context: ServerCallContext, task: TaskRecord) -> None:
    """Note that the caller is given this."""
    _, _, told = cast(_Call, context.state["caller"])
    told |= {it.seq for it in task.messages if it.sender_id == task.agent_id}


async def _read(tasks: TaskLedger, task_id: str) -> TaskRecord:
    task = await tasks.read(task_id)
    if task is None:
        raise TaskNotFoundError(f"There is no task {task_id!r} of {tasks.client.agent_id} with {tasks.agent_id}")
    return task


async def _wait_for_end(question: FollowedQuestion) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_WAIT_S):
            async for happened in question:
                if isinstance(happened, QuestionEnded):
                    return


def _stored(task: TaskRecord) -> QuestionStored:
    return QuestionStored(task.active.seq, task.root.thread_id, True)


def _read_content(message: Message) -> Any:
    """What a message says. Raises what is wrong with it."""
    if message.role != Role.ROLE_USER:
        raise InvalidParamsError("role is to be ROLE_USER: what the agent says is the agent's to send")
    if not _MESSAGE_ID.fullmatch(message.message_id):
        raise InvalidParamsError("messageId is to be 1 to 128 visible ASCII characters")
    try:
        return read_parts(message.parts)
    except ValueError as error:
        raise InvalidParamsError(str(error)) from error


def _keep(message: Message, **own: Any) -> dict[str, Any]:
    """What of a message stands in the metadata of the one that is sent."""
    given = {
        "metadata": read_json(message.metadata),
        "references": list(message.reference_task_ids),
        "extensions": list(message.extensions),
    }
    return {"a2a": {**{name: value for name, value in given.items() if value}, **own}}


def _digest(agent_id: str, message: Message, content: Any) -> str:
    told = [agent_id, message.message_id, message.context_id, message.task_id, content]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _ids_of(message: Message, mark: str) -> tuple[str, str]:
    """Under which ids a message is sent: its own, and where that is another's, one that only the same message has."""
    return message.message_id, f"{message.message_id[:100]}~{mark[:16]}"


def _history_length(given: GetTaskRequest | ListTasksRequest | SendMessageConfiguration) -> int | None:
    if not given.HasField("history_length"):
        return None
    if given.history_length < 0:
        raise InvalidParamsError("historyLength is to be 0 or more")
    return given.history_length
