"""OpenAI's API: agents as models, a thread for each conversation, so that whatever knows a `base_url` talks to them.

The official package's shapes (`openai_answers`), a client's requests (`openai_requests`), and a caller's questions to
agents (`conversations`) meet here. Nothing is kept: which conversation a request goes on with is found in the ledger,
by what each message of the caller says in its metadata of the request that it was sent for, and a request that is
repeated is found there too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

from roundelay.interop.conversations import (
    AgentAnswer,
    Conversations,
    FollowedQuestion,
    QuestionEnded,
    QuestionStored,
    TextPiece,
    find_agent,
)
from roundelay.interop.http.api import STATUS, read_json, while_there
from roundelay.interop.session_pool import Callers, Credentials, read_authorization
from roundelay.network.addresses import conversation_of, direct_thread, name_of
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.clock import ordered_id
from roundelay.network.errors import (
    ConnectError,
    IdConflict,
    InvalidArguments,
    RetryLater,
    RoundelayError,
    UnknownMessage,
    UnknownRecipient,
)
from roundelay.network.extras import needs
from roundelay.network.messages import message_from_wire

from .answers import (
    BETWEEN,
    STATUSES,
    Answering,
    ChatStream,
    ResponseStream,
    Segment,
    Showing,
    chat_completion,
    describe_model,
    find_problem,
    make_response,
    sum_usage,
)
from .conversations import (
    OWN,
    ConversationRecord,
    add_items,
    add_untold,
    create_conversation,
    cut_page,
    delete_conversation,
    find_item,
    last_seq,
    list_items,
    read_record,
    show_conversation,
    show_input,
    update_conversation,
)
from .requests import AgentRequest, ApiProblem, compose, conversation_id, read_chat, read_echo, read_response

with needs("gateway"):
    from starlette.background import BackgroundTask
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send


_logger = logging.getLogger(__name__)

PATIENCE_S = 29.0
"""How long anything but an answer may take."""
ANSWER_S = 590.0
"""How long an answer may take: the official clients wait for ten minutes."""
KEEPALIVE_S = 15.0
STOP_AFTER_S = 2.0
"""How long after its client has gone a reaction is stopped: an official client that comes back does so sooner."""
RETRIES_WITHIN_MS = 15 * 60_000
"""So long after it was sent a message is taken for the one that a client repeats without a key."""
MAX_THREADS = 1000
"""So many of the caller's newest threads are looked through for a conversation to go on with."""
MAX_CANDIDATES = 20
"""So many of them that begin alike are looked into."""
LOOKED_BACK = 100
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""A proxy is to keep nothing of a stream, and to hold nothing of it back."""
_KEY = re.compile("[!-~]{1,128}")


class _Place(NamedTuple):
    """Where a request goes: the conversation, and the message that has been sent for it already, if one has."""

    conversation: str
    is_new: bool = False
    has_instructions: bool = False
    has_answer: bool = True
    sent: AnyMessage | None = None
    record: ConversationRecord | None = None
    """What the caller has said of the conversation."""
    asked_last: int = 0
    """The seq of the caller's newest message in it."""


def make_openai_routes(callers: Callers) -> list[Route]:
    """The routes of the endpoint."""
    return _OpenAIApi(callers).make_routes()


class _OpenAIApi:
    """The endpoint of one gateway."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._answering: Counter[tuple[str, int]] = Counter()
        """How many connections wait for what comes of each message, by caller and seq."""
        self._ending: set[asyncio.Task[None]] = set()
        """What is left to do of connections that are done: answers to acknowledge, reactions to stop."""

    def make_routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model:path}", self._show_model),
            ("POST", "/v1/chat/completions", self._complete),
            ("POST", "/v1/responses", self._respond),
            ("GET", "/v1/responses/{id}", self._show_response),
            ("POST", "/v1/responses/{id}/cancel", self._cancel_response),
            ("DELETE", "/v1/responses/{id}", self._keep_response),
            ("GET", "/v1/responses/{id}/input_items", self._list_input),
            ("POST", "/v1/conversations", self._create_conversation),
            ("GET", "/v1/conversations/{id}", self._show_conversation),
            ("POST", "/v1/conversations/{id}", self._update_conversation),
            ("DELETE", "/v1/conversations/{id}", self._delete_conversation),
            ("GET", "/v1/conversations/{id}/items", self._list_items),
            ("POST", "/v1/conversations/{id}/items", self._add_items),
            ("GET", "/v1/conversations/{id}/items/{item}", self._show_item),
            ("DELETE", "/v1/conversations/{id}/items/{item}", self._keep_item),
        ]
        return [Route(path, partial(_answer, perform), methods=[method]) for method, path, perform in table]

    # --- models

    async def _list_models(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            pages = client.pages("network.list_agents", {"kind": "agent"})
            agents = [it["agent_id"] async for page in pages for it in page["agents"]]
            network = client.welcome.network.name
            return JSONResponse({"object": "list", "data": [describe_model(it, network) for it in agents]})

    async def _show_model(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            agent_id = await _find_model(client, request.path_params["model"])
            return JSONResponse(describe_model(agent_id, client.welcome.network.name))

    # --- chat completions

    async def _complete(self, request: Request) -> Response:
        asked = read_chat(await _read_body(request))
        exchange = await self._begin(request, asked)
        if asked.is_streamed:
            chat = ChatStream(exchange.about, wants_usage=asked.wants_usage)
            return _EventStream(exchange, self._stream_chat(exchange, chat))
        async with exchange.stack:
            await exchange.follow(request)
            exchange.check_end()
            assert exchange.ended is not None
            total = await exchange.read_usage()
            made = chat_completion(exchange.about, exchange.ended, exchange.texts, total)
            return JSONResponse(made, background=BackgroundTask(self._acknowledge, exchange))

    async def _stream_chat(self, exchange: _Exchange, chat: ChatStream) -> AsyncIterator[str]:
        for chunk in chat.begin():
            yield _data(chunk)
        try:
            async for changes in exchange.events():
                for chunk in chat.show(changes) if changes is not None else ():
                    yield _data(chunk)
                if changes is None:
                    yield ": waiting\n\n"
            for chunk in chat.show(exchange.showing.end()):
                yield _data(chunk)
            exchange.check_end()
            assert exchange.ended is not None
            for chunk in chat.end(exchange.ended, await exchange.read_usage()):
                yield _data(chunk)
        except (RoundelayError, ApiProblem) as error:
            yield _data({"error": _problem(error).body})
        self._spawn(self._acknowledge(exchange))  # before the last line: many a client closes when it has read that
        yield "data: [DONE]\n\n"

    # --- responses

    async def _respond(self, request: Request) -> Response:
        asked = read_response(await _read_body(request))
        exchange = await self._begin(request, asked)
        if asked.is_streamed:
            return _EventStream(exchange, self._stream_response(exchange, ResponseStream(exchange.about)))
        async with exchange.stack:
            if asked.is_background:
                exchange.keeps_on = True
                return JSONResponse(make_response(exchange.about, "queued", []))
            await exchange.follow(request)
            return JSONResponse(await exchange.make_response(), background=BackgroundTask(self._acknowledge, exchange))

    async def _stream_response(self, exchange: _Exchange, stream: ResponseStream) -> AsyncIterator[str]:
        for event in stream.begin():
            yield _event(event)
        try:
            async for changes in exchange.events():
                for event in stream.show(changes, exchange.showing.segments) if changes is not None else ():
                    yield _event(event)
                if changes is None:
                    yield ": waiting\n\n"
            for event in stream.show(exchange.showing.end(), exchange.showing.segments):
                yield _event(event)
            for event in stream.end(await exchange.make_response()):
                yield _event(event)
        except (RoundelayError, ApiProblem) as error:
            for event in stream.fail(_problem(error)):
                yield _event(event)
        self._spawn(self._acknowledge(exchange))  # before the last line: many a client closes when it has read that
        yield "data: [DONE]\n\n"

    async def _show_response(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            return await self._stream_again(request)
        async with self._callers.conversations(_credentials(request)) as conversations:
            message = await _find_response(conversations.client, request.path_params["id"])
            return JSONResponse(await self._look(conversations, message))

    async def _cancel_response(self, request: Request) -> Response:
        async with self._callers.conversations(_credentials(request)) as conversations:
            message = await _find_response(conversations.client, request.path_params["id"])
            stored = QuestionStored(message.seq, message.thread_id, True)
            async with conversations.follow(name_of(message.to), stored) as question:
                await question.stop()
                async for event in question:
                    if isinstance(event, QuestionEnded):
                        break
            return JSONResponse(await self._look(conversations, message))

    async def _keep_response(self, request: Request) -> Response:
        raise ApiProblem(
            405, "What was said stays in the ledger; an operator sets how long it keeps it.", headers={"Allow": "GET"}
        )

    async def _stream_again(self, request: Request) -> Response:
        """Stream a response from its beginning: what the ledger has of it, and what still comes."""
        if "starting_after" in request.query_params:
            raise ApiProblem(
                400,
                "The events of a stream are not numbered for later: leave starting_after out, and the response is "
                "streamed from its beginning.",
                code="unsupported_parameter",
                param="starting_after",
            )
        credentials = _credentials(request)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            conversations = await stack.enter_async_context(self._callers.conversations(credentials))
            message = await _find_response(conversations.client, request.path_params["id"])
            stored = QuestionStored(message.seq, message.thread_id, True)
            question = await stack.enter_async_context(conversations.follow(name_of(message.to), stored))
            about = Answering(message.seq, question.agent_id, message.sent_at // 1000, _read_echo(message))
            exchange = _Exchange(credentials, conversations.client, question, about, stack.pop_all())
        return _EventStream(exchange, self._stream_response(exchange, ResponseStream(about)))

    async def _list_input(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            message = await _find_response(client, request.path_params["id"])
            return JSONResponse(cut_page([show_input(message)], request.query_params))

    async def _look(self, conversations: Conversations, message: AnyMessage) -> dict[str, Any]:
        """A response as the ledger has it."""
        question = conversations.find(name_of(message.to), QuestionStored(message.seq, message.thread_id, True))
        answers, ended = await question.look()
        about = Answering(message.seq, question.agent_id, message.sent_at // 1000, _read_echo(message))
        segments = [Segment(None, it.text, is_answer=True) for it in answers]
        if ended is None:
            return make_response(about, "in_progress", segments)
        return make_response(
            about,
            STATUSES[ended.status],
            segments,
            reason=f"{question.agent_id}: {ended.reason}",
            total=await _read_usage(conversations.client, message.seq),
            ended_at=(answers[-1] if answers else message).sent_at // 1000,
        )

    # --- conversations

    async def _create_conversation(self, request: Request) -> Response:
        body = await _read_optional_body(request)
        async with self._callers.session(_credentials(request)) as client:
            return JSONResponse(await create_conversation(client, body, _find_key(request)))

    async def _show_conversation(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            return JSONResponse(await show_conversation(client, request.path_params["id"]))

    async def _update_conversation(self, request: Request) -> Response:
        body = await _read_body(request)
        async with self._callers.session(_credentials(request)) as client:
            name, key = request.path_params["id"], _find_key(request)
            return JSONResponse(await update_conversation(client, name, body, key))

    async def _delete_conversation(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            return JSONResponse(await delete_conversation(client, request.path_params["id"], _find_key(request)))

    async def _list_items(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            return JSONResponse(await list_items(client, request.path_params["id"], request.query_params))

    async def _add_items(self, request: Request) -> Response:
        body = await _read_body(request)
        async with self._callers.session(_credentials(request)) as client:
            return JSONResponse(await add_items(client, request.path_params["id"], body, _find_key(request)))

    async def _show_item(self, request: Request) -> Response:
        async with self._callers.session(_credentials(request)) as client:
            return JSONResponse(await find_item(client, request.path_params["id"], request.path_params["item"]))

    async def _keep_item(self, request: Request) -> Response:
        _credentials(request)
        raise ApiProblem(405, "What was said stays in the ledger: no item can be deleted.", headers={"Allow": "GET"})

    # --- asking

    async def _begin(self, request: Request, asked: AgentRequest) -> _Exchange:
        """Send what is asked for, unless it has been; whoever gets the exchange leaves its ``stack``."""
        key = _read_key(request)
        credentials = _credentials(request)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            conversations = await stack.enter_async_context(self._callers.conversations(credentials))
            client = conversations.client
            agent_id = await _find_model(client, asked.model)
            is_retry = key is None and request.headers.get("x-stainless-retry-count", "0") != "0"
            message_id = key or ordered_id()
            place = await self._find_place(client, agent_id, asked, message_id, is_retry=is_retry)
            if is_retry and place.sent is not None and await _is_stopped(conversations, place.sent):
                place = await self._find_place(client, agent_id, asked, message_id, is_retry=False)
            sent, question = place.sent, None
            if sent is None:
                told = add_untold(asked, place.record, place.asked_last)
                try:
                    question = await stack.enter_async_context(
                        conversations.ask(
                            agent_id,
                            compose(
                                told,
                                is_new=place.is_new,
                                has_instructions=place.has_instructions and told.instructions == asked.instructions,
                                has_answer=place.has_answer,
                            ),
                            conversation=place.conversation,
                            message_id=message_id,
                            metadata={OWN: _describe(asked, told)},
                        )
                    )
                except IdConflict:  # another request, or this one: its conversation has gone on since
                    sent = await _find_sent(client, _list_places(client, agent_id, asked), message_id)
                    if sent is None:
                        raise
            if question is None:
                assert sent is not None
                if _read_own(sent).get("request") != asked.digest:
                    raise ApiProblem(409, "Another request was made under this Idempotency-Key.", code="id_conflict")
                stored = QuestionStored(sent.seq, sent.thread_id, True)
                question = await stack.enter_async_context(conversations.follow(agent_id, stored))
            created_at = sent.sent_at // 1000 if sent is not None else int(time.time())
            about = Answering(question.stored.seq, asked.model, created_at, asked.echo)
            waiting = (client.agent_id, question.stored.seq)
            self._answering[waiting] += 1
            exchange = _Exchange(credentials, client, question, about, stack.pop_all())
            exchange.stack.callback(self._leave, exchange, waiting, keeps_on=key is not None)
        return exchange

    async def _find_place(
        self, client: NetworkClient, agent_id: str, asked: AgentRequest, message_id: str, *, is_retry: bool
    ) -> _Place:
        """The conversation in which a request goes on, or begins."""
        own, digest = client.agent_id, asked.digest

        def is_sent(message: AnyMessage) -> bool:
            if message.sender_id != own:
                return False
            if message.message_id == message_id:
                return True
            now = client.clock()
            return (
                is_retry
                and _read_own(message).get("request") == digest
                and now - message.sent_at < RETRIES_WITHIN_MS
                and not self._answering[own, message.seq]
            )

        record = None
        if asked.previous is not None or asked.conversation is not None:
            if asked.previous is not None:
                before = await _find_response(client, asked.previous)
                if name_of(before.to) != agent_id:
                    told = f"{asked.previous} is of a conversation with {name_of(before.to)}, not with {agent_id}."
                    raise ApiProblem(400, told, param="previous_response_id")
                name = conversation_of(before.thread_id)
            else:
                name = conversation_id(asked.conversation or "")
                record = await read_record(client, asked.conversation or "")
            messages = await _read_thread(client, direct_thread(own, agent_id, name))
            mine = [it for it in messages if it.sender_id == own]
            sent = next((it for it in reversed(mine) if is_sent(it)), None)
            known = _read_own(mine[-1]).get("instructions") if mine else None
            return _Place(
                name,
                not mine,
                known == _digest_text(asked.instructions),
                sent=sent,
                record=record,
                asked_last=last_seq(mine),
            )
        new = f"c-{asked.family}-{hashlib.sha256(message_id.encode()).hexdigest()[:16]}"
        asked_before = asked.asked_before
        if asked_before is None and not is_retry:
            return _Place(new, True)  # under a key, the same request comes to the same place
        answer = asked.earlier[-1].text.strip() if asked.earlier else ""
        async for thread_id in _list_threads(client, _family_prefix(client, agent_id, asked)):
            messages = await _read_thread(client, thread_id)
            mine = [it for it in messages if it.sender_id == own]
            if not mine:
                continue
            if is_sent(mine[-1]):
                return _Place(conversation_of(thread_id), sent=mine[-1])
            if _read_own(mine[-1]).get("request") != asked_before:
                continue
            told = BETWEEN.join(it.text for it in messages if mine[-1].seq in (it.reply_to, it.cause)).strip()
            if not told or told.startswith(answer) or answer.endswith(BETWEEN + told):
                return _Place(conversation_of(thread_id), has_instructions=True, has_answer=bool(told))
        return _Place(new, True)

    def _leave(self, exchange: _Exchange, waiting: tuple[str, int], *, keeps_on: bool) -> None:
        """A connection that waited is done, or has gone: then the reaction ends, unless somebody comes back for it."""
        self._answering[waiting] -= 1
        if exchange.ended is None and not (keeps_on or exchange.keeps_on):
            self._spawn(self._stop_later(exchange, waiting))
        elif not self._answering[waiting]:
            del self._answering[waiting]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="openai")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _stop_later(self, exchange: _Exchange, waiting: tuple[str, int]) -> None:
        await asyncio.sleep(STOP_AFTER_S)
        if self._answering[waiting]:
            return
        del self._answering[waiting]
        try:
            async with (
                self._callers.conversations(exchange.credentials, is_rest=True) as conversations,
                conversations.follow(exchange.question.agent_id, exchange.question.stored) as question,
            ):
                await question.stop(ANSWER_S)
        except RoundelayError as error:
            _logger.info("a reaction could not be stopped", extra={"seq": waiting[1], "code": error.code})

    async def _acknowledge(self, exchange: _Exchange) -> None:
        """The client has been given these: they are handled."""
        seqs = [it.seq for it in exchange.answers]
        if exchange.ended is None or not seqs:
            return
        try:
            async with self._callers.conversations(exchange.credentials, is_rest=True) as conversations:
                await conversations.client.call("network.acknowledge", {"seqs": seqs})
        except RoundelayError as error:
            _logger.info("answers could not be acknowledged", extra={"seqs": seqs, "code": error.code})


class _Exchange:
    """A question that is followed for one connection, and what is shown of it."""

    def __init__(
        self,
        credentials: Credentials,
        client: NetworkClient,
        question: FollowedQuestion,
        about: Answering,
        stack: AsyncExitStack,
    ) -> None:
        self.credentials = credentials
        self.question = question
        self.about = about
        self.stack = stack
        self.showing = Showing()
        self.answers: list[AnyMessage] = []
        self.ended: QuestionEnded | None = None
        self.keeps_on = False
        self._client = client

    @property
    def texts(self) -> list[str]:
        return [it.text for it in self.answers]

    async def events(self) -> AsyncIterator[Any]:
        """What changes in what is shown; None where nothing has come for a while. Raises `ApiProblem` when it takes too
        long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_S
        events = aiter(self.question)
        coming: asyncio.Future[Any] = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=KEEPALIVE_S)
                if not done:
                    if loop.time() > until:
                        self.keeps_on = True
                        raise ApiProblem(
                            504,
                            "The agent is still at it; its answer will be in the ledger.",
                            kind="server_error",
                            code="timeout",
                            is_final=False,
                        )
                    yield None
                    continue
                event = await coming
                match event:
                    case None:
                        return
                    case TextPiece():
                        yield self.showing.take(event)
                    case AgentAnswer():
                        self.answers.append(event.message)
                        yield self.showing.take(event)
                    case QuestionEnded():
                        self.ended = event
                coming = asyncio.ensure_future(anext(events, None))
        finally:
            coming.cancel()
            await asyncio.wait({coming})

    async def follow(self, request: Request) -> None:
        """Wait for the end, as long as the client does. Raises `ClientDisconnect`."""

        async def work() -> None:
            async for changes in self.events():
                for _ in changes or ():
                    pass

        await while_there(request.receive, work())

    def check_end(self) -> None:
        """Raises `ApiProblem` where no completion has come of it."""
        assert self.ended is not None
        problem = find_problem(self.ended, self.question.agent_id, self.texts)
        if problem is not None:
            raise problem

    async def read_usage(self) -> Any:
        return await _read_usage(self._client, self.about.seq)

    async def make_response(self) -> dict[str, Any]:
        """The response at its end."""
        assert self.ended is not None
        return make_response(
            self.about,
            STATUSES[self.ended.status],
            self.showing.segments,
            reason=f"{self.question.agent_id}: {self.ended.reason}",
            total=await self.read_usage(),
            ended_at=int(time.time()),
        )


class _EventStream(StreamingResponse):
    """Server-sent events, which end the exchange however they end."""

    def __init__(self, exchange: _Exchange, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange.stack:
            await super().__call__(scope, receive, send)


# --- requests and answers


async def _answer(perform: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    try:
        return await perform(request)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    except (RoundelayError, ApiProblem, TimeoutError) as error:
        problem = _problem(error)
        return JSONResponse({"error": problem.body}, problem.status, problem.headers)


def _problem(error: RoundelayError | ApiProblem | TimeoutError) -> ApiProblem:
    """An error as OpenAI's clients know it."""
    if isinstance(error, ApiProblem):
        return error
    if isinstance(error, TimeoutError):
        error = ConnectError("The node does not answer; ask again.")
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 409)
    status = 500 if type(error).code == "internal" else status
    code, kind, headers = error.code, "invalid_request_error", {}
    match status:
        case 401:
            code, headers = "invalid_api_key", {"WWW-Authenticate": 'Bearer realm="roundelay"'}
        case 404 if isinstance(error, UnknownRecipient):
            code = "model_not_found"
        case 429:
            kind = "rate_limit_error"
        case it if it >= 500:
            kind = "server_error"
    if isinstance(error, RetryLater):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return ApiProblem(status, str(error), kind=kind, code=code, headers=headers, is_final=status not in (429, 503))


def _credentials(request: Request) -> Credentials:
    return read_authorization(request.headers.get("authorization"))


async def _read_body(request: Request) -> Any:
    _credentials(request)  # who shows none is told that first
    return await read_json(request)


async def _read_optional_body(request: Request) -> Any:
    """As `_read_body`; None where there is no body."""
    has_body = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
    return await _read_body(request) if has_body else None


def _read_key(request: Request) -> str | None:
    """Return the key by which a request may be repeated, or None. Raises `ApiProblem`."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise ApiProblem(400, "The Idempotency-Key is to be 1 to 128 visible ASCII characters.")
    return key


def _find_key(request: Request) -> str:
    """Return the id of the message that a request sends."""
    return _read_key(request) or ordered_id()


def _data(told: dict[str, Any]) -> str:
    return f"data: {json.dumps(told)}\n\n"  # in ASCII: some clients end a line at more than a line's end


def _event(told: dict[str, Any]) -> str:
    return f"event: {told['type']}\n{_data(told)}"


# --- what the ledger says


async def _find_model(client: NetworkClient, model: str) -> str:
    """The agent that a model's name means: its id, also behind the network's name or ``team``. Raises `ApiProblem`."""
    where, slash, name = model.rpartition("/")
    agent_id = name if slash and where in ("team", client.welcome.network.name) else model
    if await find_agent(client, agent_id) is not None:
        return agent_id
    raise ApiProblem(
        404, f"There is no agent {model[:80]!r}; GET /v1/models lists who is.", code="model_not_found", param="model"
    )


async def _find_response(client: NetworkClient, response_id: str) -> AnyMessage:
    """The message of the caller that a response's id names. Raises `ApiProblem`."""
    found = re.fullmatch(r"resp_([1-9][0-9]{0,15})", response_id)
    try:
        chain = (await client.call("network.why", {"seq": int(found[1])}))["chain"] if found else []
    except (UnknownMessage, InvalidArguments):  # the latter: no seq is so high
        chain = []
    for it in chain:
        if found and it.get("seq") == int(found[1]) and it.get("sender_id") == client.agent_id:
            message = message_from_wire(it)
            if conversation_of(message.thread_id) and OWN in (message.metadata or {}):
                return message
    raise ApiProblem(404, f"There is no response {response_id[:80]!r} of yours.", code="response_not_found")


async def _is_stopped(conversations: Conversations, message: AnyMessage) -> bool:
    """Whether a message's reaction was ended, as by a client that went away."""
    question = conversations.find(name_of(message.to), QuestionStored(message.seq, message.thread_id, True))
    _, ended = await question.look()
    return ended is not None and ended.status == "cancelled"


def _family_prefix(client: NetworkClient, agent_id: str, asked: AgentRequest) -> str:
    """How the ids of the threads begin in which a conversation without a name may stand."""
    return direct_thread(client.agent_id, agent_id, f"c-{asked.family}-x").removesuffix("x")


async def _list_places(client: NetworkClient, agent_id: str, asked: AgentRequest) -> AsyncIterator[str]:
    """The threads in which a request may have been sent before."""
    if asked.previous is not None:
        yield (await _find_response(client, asked.previous)).thread_id
    elif asked.conversation is not None:
        yield direct_thread(client.agent_id, agent_id, conversation_id(asked.conversation))
    else:
        async for thread_id in _list_threads(client, _family_prefix(client, agent_id, asked)):
            yield thread_id


async def _find_sent(client: NetworkClient, threads: AsyncIterator[str], message_id: str) -> AnyMessage | None:
    """The caller's message of this id, however much has been said behind it."""
    async for thread_id in threads:
        try:
            async for page in client.pages("network.history", {"thread_id": thread_id, "limit": LOOKED_BACK}):
                for message in page["messages"]:
                    if (message["sender_id"], message["message_id"]) == (client.agent_id, message_id):
                        return message_from_wire(message)
        except UnknownMessage:  # there is no such thread yet
            continue
    return None


async def _read_thread(client: NetworkClient, thread_id: str) -> list[AnyMessage]:
    """The newest messages of a thread, oldest first; none where there is none."""
    try:
        return (await client.history(thread_id, limit=LOOKED_BACK)).messages
    except UnknownMessage:
        return []


async def _list_threads(client: NetworkClient, prefix: str) -> AsyncIterator[str]:
    """The caller's newest threads whose ids begin so."""
    looked_at, given = 0, 0
    async for page in client.pages("network.list_threads", {"limit": 500}):
        for thread in page["threads"]:
            looked_at += 1
            if thread["thread_id"].startswith(prefix):
                yield thread["thread_id"]
                given += 1
                if given == MAX_CANDIDATES:
                    return
        if looked_at >= MAX_THREADS:
            return


async def _read_usage(client: NetworkClient, seq: int) -> Any:
    """The tokens that a question has cost with all that it led to, as far as its agents' records tell."""
    return sum_usage((await client.call("network.spent", {"seq": seq}))["of_root"])


def _describe(asked: AgentRequest, told: AgentRequest) -> dict[str, Any]:
    """Return what a message says of its request. ``told`` is the request as its agent is told it."""
    echo = {name: value for name, value in asked.echo.items() if value}
    own = {"request": asked.digest, "instructions": _digest_text(asked.instructions), "model": asked.model}
    new = {"new_chars": asked.new_chars} if len(told.said) > 1 else {}
    return own | new | ({"echo": echo} if echo else {})


def _read_own(message: AnyMessage) -> dict[str, Any]:
    own = (message.metadata or {}).get(OWN)
    return own if isinstance(own, dict) else {}


def _read_echo(message: AnyMessage) -> dict[str, Any]:
    return read_echo(_read_own(message).get("echo"))


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""
