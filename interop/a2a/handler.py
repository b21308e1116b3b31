"""Answers A2A requests from the ledger. `LedgerHandler` replaces the store, the queue and the executor of the A2A SDK.

The routes of the SDK (`server`) parse each request and call the handler. Every caller is a participant that sends its
token. Each request reads its task from the ledger (`tasks`). A streaming request follows the question that the caller
sent, and yields updates (`updates`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeAlias, cast

from roundelay.interop.conversations import (
    AgentAnswer,
    FollowedQuestion,
    QuestionEnded,
    QuestionStored,
    TextPiece,
)
from roundelay.interop.session_pool import Credentials, SessionPool, read_authorization
from roundelay.network.addresses import agent_address
from roundelay.network.errors import (
    ConnectError,
    GiveUp,
    IdConflict,
    RetryLater,
    RoundelayError,
    UnknownMessage,
    UnknownRecipient,
)

# protobuf's runtime package has no type annotations.
from roundelay.network.extras import needs
from roundelay.network.frames import is_id

from .parts import read_json, read_parts
from .push import Push, TaskPushes
from .tasks import (
    INPUT_REQUIRED,
    INTERRUPTED,
    TERMINAL,
    TaskLedger,
    TaskRecord,
    is_request,
    make_task_id,
    newest_of,
)
from .updates import TaskUpdates

with needs("gateway"):
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from a2a.server.request_handlers import RequestHandler, validate_request_params
    from a2a.server.routes import ServerCallContextBuilder
    from a2a.types import (
        AgentCard,
        CancelTaskRequest,
        DeleteTaskPushNotificationConfigRequest,
        GetExtendedAgentCardRequest,
        GetTaskPushNotificationConfigRequest,
        GetTaskRequest,
        InternalError,
        InvalidParamsError,
        ListTaskPushNotificationConfigsRequest,
        ListTaskPushNotificationConfigsResponse,
        ListTasksRequest,
        ListTasksResponse,
        Message,
        PushNotificationNotSupportedError,
        Role,
        SendMessageConfiguration,
        SendMessageRequest,
        SubscribeToTaskRequest,
        Task,
        TaskNotCancelableError,
        TaskNotFoundError,
        TaskPushNotificationConfig,
        TaskState,
        UnsupportedOperationError,
    )
    from starlette.requests import Request


MAX_PAGE, PAGE = 100, 50
LOOK_EVERY_S = 15.0
"""Interval between reads of a task while the agent waits for the caller's reply, in seconds."""
_MESSAGE_ID = re.compile("[!-~]{1,128}")
_PAGE_TOKEN = re.compile("[0-9]{1,16}")
CANCEL_WAIT_S = 20.0
"""Maximum time that a cancel request waits for the agent to stop, in seconds."""

SENT_SEQS = "roundelay.a2a_sent"
"""Key in the scope of an HTTP request. The value under this key is the set of seqs of all agent messages in the
response.
"""
_Call: TypeAlias = tuple[Credentials, str, set[int]]
"""The caller, the id of the called agent, and the set of seqs that is stored under `SENT_SEQS`."""


class ContextBuilder(ServerCallContextBuilder):
    def build(self, request: Request) -> ServerCallContext:
        credentials = read_authorization(request.headers.get("authorization"))
        sent = cast(set[int], request.scope.setdefault(SENT_SEQS, set()))
        caller = credentials, request.path_params["agent_id"], sent
        state = {"headers": dict(request.headers), "caller": caller}
        return ServerCallContext(state=state)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert errors of the network into A2A errors."""
    try:
        yield
    # Return the same error for a missing task and for a task that the caller may not read. Otherwise callers could
    # probe task ids.
    except (UnknownRecipient, UnknownMessage) as error:
        raise TaskNotFoundError(str(error)) from error
    except (GiveUp, ConnectError, RetryLater) as error:
        kind = UnsupportedOperationError if isinstance(error, GiveUp) else InternalError
        raise kind(str(error), {"code": error.code}) from error
    except RoundelayError as error:
        raise InvalidParamsError(str(error), {"code": error.code}) from error


class LedgerHandler(RequestHandler):
    """Handles the A2A requests to all agents of one network."""

    def __init__(self, pool: SessionPool, pushes: TaskPushes | None) -> None:
        self._pool = pool
        self._pushes = pushes
        self._subscribers: dict[str, set[asyncio.Event]] = {}
        """Events that wake streams when the caller sends its next message, by thread id."""

    # --- operations of A2A

    @validate_request_params
    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task:
        async with self._open(context) as tasks:
            task = await _read(tasks, params.id)
            _mark_sent(context, task)
            return task.make_task(_history_length(params))

    @validate_request_params
    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        size = params.page_size if params.HasField("page_size") else PAGE
        if not 1 <= size <= MAX_PAGE:
            raise InvalidParamsError(f"pageSize must be from 1 to {MAX_PAGE}")
        if params.page_token and not _PAGE_TOKEN.fullmatch(params.page_token):
            raise InvalidParamsError("pageToken must be the nextPageToken of an earlier response")
        async with self._open(context) as tasks:
            listed = await tasks.find(params.context_id or None)
            # Compute the state of every task only if a filter needs the states. Each state costs several reads from the
            # hub.
            if params.status or params.HasField("status_timestamp_after"):
                after_ms = params.status_timestamp_after.ToMilliseconds()
                judged = [await tasks.judge(gathered) for gathered in listed]
                matching = [task for task in judged if not params.status or task.state == params.status]
                wanted = {task.root.seq for task in matching if task.messages[-1].sent_at > after_ms}
                listed = [gathered for gathered in listed if gathered.own[0].seq in wanted]
            below = int(params.page_token) if params.page_token else None
            page = [gathered for gathered in listed if below is None or newest_of(gathered) < below]
            shown = [await tasks.judge(gathered) for gathered in page[:size]]
            return ListTasksResponse(
                tasks=[
                    task.make_task(_history_length(params), with_artifacts=params.include_artifacts) for task in shown
                ],
                next_page_token=str(newest_of(page[size - 1])) if len(page) > size else "",
                page_size=size,
                total_size=len(listed),
            )

    @validate_request_params
    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task:
        async with self._open(context) as tasks:
            task = await _read(tasks, params.id)
            if task.state in TERMINAL:
                raise TaskNotCancelableError(f"The task has ended: {TaskState.Name(task.state)}")
            if task.ended is not None and task.ended.status == "held":
                raise TaskNotCancelableError(
                    f"{task.ended.reason} The agent continues when the takeover ends. Cancel the task then"
                )
            if task.ended is not None:
                await tasks.call_off(task)  # no reaction is running, so there is none to cancel
            else:
                async with tasks.conversations.follow(tasks.agent_id, _stored(task)) as question:
                    if not await question.stop():
                        raise TaskNotCancelableError(
                            "The agent has not started this task yet. Cancel the task when the agent works on it"
                        )
                    # Wait until the reaction has recorded its end. Otherwise the response would not show the task as
                    # cancelled.
                    await _wait_for_end(question)
            self._notify(task.root.thread_id)
            return (await _read(tasks, params.id)).make_task()

    @validate_request_params
    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Task | Message:
        async with self._send(params, context) as (tasks, task, question):
            if not params.configuration.return_immediately:
                async for _ in self._follow(tasks, task, question):
                    pass
                task = await _read(tasks, task.id)
            _mark_sent(context, task)
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
            _mark_sent(context, await _read(tasks, task.id))

    @validate_request_params
    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        async with self._open(context) as tasks:
            task = await _read(tasks, params.id)
            if task.state in TERMINAL:
                raise UnsupportedOperationError(
                    f"The task has ended: {TaskState.Name(task.state)}; read it with GetTask"
                )
            async with tasks.conversations.follow(tasks.agent_id, _stored(task)) as question:
                yield task.make_task()
                async for event in self._follow(tasks, task, question, is_subscription=True):
                    yield event
                _mark_sent(context, await _read(tasks, task.id))

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
            pushes = self._served_pushes().list_of(task)
            return ListTaskPushNotificationConfigsResponse(configs=[push.make_config() for push in pushes])

    @validate_request_params
    async def on_delete_task_push_notification_config(
        self, params: DeleteTaskPushNotificationConfigRequest, context: ServerCallContext
    ) -> None:
        async with self._open(context) as tasks:
            with suppress(TaskNotFoundError):  # A2A requires that deleting a missing configuration succeeds
                await self._served_pushes().remove(await self._find_push(tasks, params.task_id, params.id))

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        raise UnsupportedOperationError("This agent has no extended card. Every caller gets the complete card")

    # --- shared steps

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
        """Provide the tasks that the caller has with the agent of this request."""
        credentials, agent_id, _ = cast(_Call, context.state["caller"])
        with _translate_errors():
            async with self._pool.conversations(credentials) as conversations:
                yield TaskLedger(conversations, agent_id)

    @asynccontextmanager
    async def _send(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncIterator[tuple[TaskLedger, TaskRecord, FollowedQuestion]]:
        """Send the message of a request, and follow its task until the block ends. A repeated message is not sent
        again.
        """
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
        """Send the first message of a task. A repeated message returns the existing task, because the client may have
        lost the first response.
        """
        # If the client sent no contextId, derive the conversation id from the message, so that a repeated message finds
        # the same conversation.
        mark = _digest(tasks.agent_id, message, content)
        conversation = message.context_id or f"a2a-{mark[:24]}"
        if not is_id(conversation):
            raise InvalidParamsError(
                "contextId must be 1 to 64 lower case letters, digits, '.', '_' and '-', starting with a letter or "
                "digit. Or leave it out"
            )
        for message_id in _ids_of(message, mark):
            with suppress(IdConflict):  # the caller has used this id for another message
                asking = tasks.conversations.ask(
                    tasks.agent_id,
                    content,
                    conversation=conversation,
                    message_id=message_id,
                    metadata=_make_metadata(message),
                )
                return await stack.enter_async_context(asking)
        raise InvalidParamsError("This messageId was already used for another message")

    async def _add(self, tasks: TaskLedger, message: Message, content: Any) -> TaskRecord:
        """Add another message of the caller to a task. Return the task with this message."""
        task = await _read(tasks, message.task_id)
        if message.context_id and message.context_id != task.context_id:
            raise InvalidParamsError("The task belongs to a different contextId")
        mark = _digest(tasks.agent_id, message, content)
        # Recognize a repeated message by its id and content. A client repeats a message when the first response was
        # lost, so the repeat must be neither sent again nor refused.
        ids = _ids_of(message, mark)
        if any(
            message.message_id in ids and message.content == content
            for message in task.messages
            if message.sender_id == task.caller
        ):
            return task  # the message is already part of the task
        if task.state in TERMINAL:
            raise UnsupportedOperationError(
                f"The task has ended: {TaskState.Name(task.state)}; send it without taskId, in the same context"
            )
        options: dict[str, Any] = {"conversation": task.context_id}
        # Do not send a reply to an approval request. The reply would count as a decision, and only a person may decide.
        if task.open_question is not None and not is_request(task.open_question):
            options = {"reply_to": task.open_question.seq, "cause": task.open_question.seq}
        metadata = _make_metadata(message, task=task.root.seq)
        if tasks.client.kind != "human":
            metadata["ask"] = {"watched": True}  # agents stream to programs only if this flag is set
        for message_id in ids:
            with suppress(IdConflict):
                to = agent_address(tasks.agent_id)
                await tasks.client.send(
                    to, content, message_id=message_id, requires_response=True, metadata=metadata, **options
                )
                self._notify(task.root.thread_id)
                return await _read(tasks, task.id)
        raise InvalidParamsError("This messageId was already used for another message")

    async def _follow(
        self, tasks: TaskLedger, task: TaskRecord, question: FollowedQuestion | None, *, is_subscription: bool = False
    ) -> AsyncGenerator[Event]:
        """Yield updates to ``task`` until the task has ended. Without a subscription, the updates also end when the
        agent asks the caller a question.
        """
        updates = TaskUpdates(task)
        while task.state not in TERMINAL:
            if task.state in INTERRUPTED and not is_subscription:
                return
            # No reaction runs while the agent waits for the caller's reply, so there is no question to follow.
            if task.state == INPUT_REQUIRED:
                await self._wait(task.root.thread_id)
                question = None
                task = await _read(tasks, task.id)
                for update in updates.catch_up(task):
                    yield update
                continue
            async with AsyncExitStack() as stack:
                if question is None:
                    following = tasks.conversations.follow(tasks.agent_id, _stored(task))
                    question = await stack.enter_async_context(following)
                async for event in question:
                    if isinstance(event, TextPiece):
                        for update in updates.add_piece(event):
                            yield update
                    elif isinstance(event, QuestionEnded) or (
                        isinstance(event, AgentAnswer) and event.message.seq not in updates.seqs
                    ):
                        task = await _read(tasks, task.id)
                        for update in updates.catch_up(task):
                            yield update
                        if isinstance(event, QuestionEnded) or task.state in INTERRUPTED:
                            break
            question = None

    async def _wait(self, thread_id: str) -> None:
        """Wait until the caller sends a message to a task in this thread, for at most `LOOK_EVERY_S` seconds. The time
        limit is needed because the caller may send the message through another gateway.
        """
        sent = asyncio.Event()
        waiting = self._subscribers.setdefault(thread_id, set())
        waiting.add(sent)
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await sent.wait()
        except TimeoutError:
            pass
        finally:
            waiting.discard(sent)
            if not waiting:
                self._subscribers.pop(thread_id, None)

    def _notify(self, thread_id: str) -> None:
        for sent in self._subscribers.get(thread_id, ()):
            sent.set()
        if self._pushes is not None:
            self._pushes.notify(thread_id)


def _mark_sent(context: ServerCallContext, task: TaskRecord) -> None:
    """Record that the response contains the agent's messages of this task. The server acknowledges these messages when
    the client has received the response.
    """
    _, _, sent = cast(_Call, context.state["caller"])
    sent |= {message.seq for message in task.messages if message.sender_id == task.agent_id}


async def _read(tasks: TaskLedger, task_id: str) -> TaskRecord:
    task = await tasks.read(task_id)
    if task is None:
        raise TaskNotFoundError(f"{tasks.client.agent_id} has no task {task_id!r} with {tasks.agent_id}")
    return task


async def _wait_for_end(question: FollowedQuestion) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_WAIT_S):
            async for event in question:
                if isinstance(event, QuestionEnded):
                    return


def _stored(task: TaskRecord) -> QuestionStored:
    return QuestionStored(task.active.seq, task.root.thread_id, True)


def _read_content(message: Message) -> Any:
    """Return the content of an A2A message as content of a network message. Raises `InvalidParamsError`."""
    if message.role != Role.ROLE_USER:
        raise InvalidParamsError("role must be ROLE_USER, because only the agent itself can send messages as the agent")
    if not _MESSAGE_ID.fullmatch(message.message_id):
        raise InvalidParamsError("messageId must be 1 to 128 visible ASCII characters")
    try:
        return read_parts(message.parts)
    except ValueError as error:
        raise InvalidParamsError(str(error)) from error


def _make_metadata(message: Message, **own: Any) -> dict[str, Any]:
    """Return the metadata of a message to send. The metadata preserves the fields of the A2A message that are not
    content.
    """
    parts = {
        "metadata": read_json(message.metadata),
        "references": list(message.reference_task_ids),
        "extensions": list(message.extensions),
    }
    return {"a2a": {**{name: value for name, value in parts.items() if value}, **own}}


def _digest(agent_id: str, message: Message, content: Any) -> str:
    identity = [agent_id, message.message_id, message.context_id, message.task_id, content]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _ids_of(message: Message, mark: str) -> tuple[str, str]:
    """Return the two possible ids of a message: the client's id, and an id that is derived from the content.

    A2A clients choose ids that are unique per agent, but the ledger requires ids that are unique per sender. The second
    id is used when the first one is already taken.
    """
    return message.message_id, f"{message.message_id[:100]}~{mark[:16]}"


def _history_length(request: GetTaskRequest | ListTasksRequest | SendMessageConfiguration) -> int | None:
    if not request.HasField("history_length"):
        return None
    if request.history_length < 0:
        raise InvalidParamsError("historyLength must be 0 or more")
    return request.history_length
