"""Routes of OpenAI's API. Agents appear as models and threads as conversations, so any client with a `base_url` can use
them.

A request is parsed (`requests`) and assigned to a conversation in the ledger (`lookup`). The message is sent to the
agent, and its answer is followed (`exchange`). The response is returned in OpenAI's formats (`answers`). The gateway
stores no conversations and no responses. Each message in the ledger names the request for which it was sent, so a
repeated request finds its own answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from roundelay.interop.conversations import Conversations, FollowedQuestion, QuestionEnded
from roundelay.interop.http.requests import read_json
from roundelay.interop.session_pool import Credentials, SessionPool, read_authorization
from roundelay.network.addresses import name_of
from roundelay.network.client import AnyMessage
from roundelay.network.clock import ordered_id
from roundelay.network.errors import IdConflict, RoundelayError
from roundelay.network.extras import needs

from .answers import (
    STATUSES,
    Answering,
    ChatStream,
    ResponseStream,
    Segment,
    chat_completion,
    describe_model,
    make_response,
)
from .conversations import (
    OWN,
    add_items,
    add_unsent_items,
    create_conversation,
    cut_page,
    delete_conversation,
    find_item,
    list_items,
    show_conversation,
    show_input,
    update_conversation,
)
from .exchange import ANSWER_S, KEEPALIVE, EventStream, Exchange, format_data, format_event, make_problem
from .lookup import (
    find_model,
    find_place,
    find_response,
    find_sent,
    is_cancelled,
    make_own,
    make_stored,
    read_own,
    read_stored_echo,
    read_usage,
)
from .requests import AgentRequest, ApiProblem, compose, read_chat, read_response

with needs("gateway"):
    from starlette.background import BackgroundTask
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route


_logger = logging.getLogger(__name__)

PATIENCE_S = 29.0
"""Maximum duration of a request in seconds, without the time that the agent takes to answer."""
STOP_AFTER_S = 2.0
"""Delay before the gateway cancels the reaction of a client that has disconnected, in seconds. OpenAI's official
clients retry within this delay.
"""
_KEY = re.compile("[!-~]{1,128}")


def make_openai_routes(pool: SessionPool) -> list[Route]:
    """Return the routes of OpenAI's API."""
    return _OpenAIApi(pool).make_routes()


class _OpenAIApi:
    """OpenAI's API on one gateway."""

    def __init__(self, pool: SessionPool) -> None:
        self._pool = pool
        self._awaited: Counter[tuple[str, int]] = Counter()
        """Number of connections that wait for the answer to a message, by the caller's id and the seq of the
        message.
        """
        self._cleanups: set[asyncio.Task[None]] = set()
        """Tasks that finish the work of closed connections: they acknowledge answers and cancel reactions."""

    def make_routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model:path}", self._show_model),
            ("POST", "/v1/chat/completions", self._complete),
            ("POST", "/v1/responses", self._respond),
            ("GET", "/v1/responses/{id}", self._show_response),
            ("POST", "/v1/responses/{id}/cancel", self._cancel_response),
            ("DELETE", "/v1/responses/{id}", self._refuse_to_delete_response),
            ("GET", "/v1/responses/{id}/input_items", self._list_input),
            ("POST", "/v1/conversations", self._create_conversation),
            ("GET", "/v1/conversations/{id}", self._show_conversation),
            ("POST", "/v1/conversations/{id}", self._update_conversation),
            ("DELETE", "/v1/conversations/{id}", self._delete_conversation),
            ("GET", "/v1/conversations/{id}/items", self._list_items),
            ("POST", "/v1/conversations/{id}/items", self._add_items),
            ("GET", "/v1/conversations/{id}/items/{item}", self._show_item),
            ("DELETE", "/v1/conversations/{id}/items/{item}", self._refuse_to_delete_item),
        ]
        return [Route(path, partial(_answer, perform), methods=[method]) for method, path, perform in table]

    # --- models

    async def _list_models(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            pages = client.pages("network.list_agents", {"kind": "agent"})
            # Read all pages. Clients choose a model from this list, and OpenAI's API has no paging for models.
            agents = [agent["agent_id"] async for page in pages for agent in page["agents"]]
            network = client.welcome.network.name
            return JSONResponse({"object": "list", "data": [describe_model(agent, network) for agent in agents]})

    async def _show_model(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            agent_id = await find_model(client, request.path_params["model"])
            return JSONResponse(describe_model(agent_id, client.welcome.network.name))

    # --- chat completions

    async def _complete(self, request: Request) -> Response:
        chat_request = read_chat(await _read_body(request))
        # Send the message before the response begins. After the first byte of a stream, no status code can report a
        # refusal.
        exchange = await self._start(request, chat_request)
        if chat_request.is_streamed:
            chat = ChatStream(exchange.about, wants_usage=chat_request.wants_usage)
            return EventStream(exchange, self._stream_chat(exchange, chat))
        async with exchange.stack:
            await exchange.follow(request)
            exchange.check_end()
            assert exchange.ended is not None
            total = await exchange.read_usage()
            completion = chat_completion(exchange.about, exchange.ended, exchange.texts, total)
            return JSONResponse(completion, background=BackgroundTask(self._acknowledge, exchange))

    async def _stream_chat(self, exchange: Exchange, chat: ChatStream) -> AsyncIterator[str]:
        for chunk in chat.begin():
            yield format_data(chunk)
        try:
            async for changes in exchange.events():
                for chunk in chat.show(changes) if changes is not None else ():
                    yield format_data(chunk)
                if changes is None:
                    yield KEEPALIVE
            for chunk in chat.show(exchange.showing.end()):
                yield format_data(chunk)
            exchange.check_end()
            assert exchange.ended is not None
            for chunk in chat.end(exchange.ended, await exchange.read_usage()):
                yield format_data(chunk)
        except (RoundelayError, ApiProblem) as error:
            # Report the error inside the stream, because the status code was sent with the first line.
            yield format_data({"error": make_problem(error).body})
        # Start this task before the last line. Many clients disconnect after the last line, which would cancel the
        # task.
        self._spawn(self._acknowledge(exchange))
        yield "data: [DONE]\n\n"

    # --- responses

    async def _respond(self, request: Request) -> Response:
        agent_request = read_response(await _read_body(request))
        exchange = await self._start(request, agent_request)
        if agent_request.is_streamed:
            return EventStream(exchange, self._stream_response(exchange, ResponseStream(exchange.about)))
        async with exchange.stack:
            if agent_request.is_background:
                # Keep the reaction running when the connection ends. The client disconnects on purpose and reads the
                # answer later.
                exchange.keeps_on = True
                return JSONResponse(make_response(exchange.about, "queued", []))
            await exchange.follow(request)
            return JSONResponse(await exchange.make_response(), background=BackgroundTask(self._acknowledge, exchange))

    async def _stream_response(self, exchange: Exchange, stream: ResponseStream) -> AsyncIterator[str]:
        for event in stream.begin():
            yield format_event(event)
        try:
            async for changes in exchange.events():
                for event in stream.show(changes, exchange.showing.segments) if changes is not None else ():
                    yield format_event(event)
                if changes is None:
                    yield KEEPALIVE
            for event in stream.show(exchange.showing.end(), exchange.showing.segments):
                yield format_event(event)
            for event in stream.end(await exchange.make_response()):
                yield format_event(event)
        except (RoundelayError, ApiProblem) as error:
            for event in stream.fail(make_problem(error)):
                yield format_event(event)
        # acknowledge in a separate task, because many clients disconnect after the last line
        self._spawn(self._acknowledge(exchange))
        yield "data: [DONE]\n\n"

    async def _show_response(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            return await self._stream_again(request)
        async with self._pool.conversations(_credentials(request)) as conversations:
            message = await find_response(conversations.client, request.path_params["id"])
            return JSONResponse(await self._read_response(conversations, message))

    async def _cancel_response(self, request: Request) -> Response:
        async with self._pool.conversations(_credentials(request)) as conversations:
            message = await find_response(conversations.client, request.path_params["id"])
            async with conversations.follow(name_of(message.to), make_stored(message)) as question:
                await question.stop()
                # Wait for the end, so that the response shows the status after the cancellation.
                async for event in question:
                    if isinstance(event, QuestionEnded):
                        break
            return JSONResponse(await self._read_response(conversations, message))

    async def _refuse_to_delete_response(self, request: Request) -> Response:
        raise ApiProblem(
            405,
            "Responses cannot be deleted, because messages stay in the ledger. An operator sets how long they stay.",
            headers={"Allow": "GET"},
        )

    async def _stream_again(self, request: Request) -> Response:
        """Stream a response from its beginning. The stream repeats the part that is in the ledger, and then continues
        live.
        """
        if "starting_after" in request.query_params:
            raise ApiProblem(
                400,
                "Events of a stream are not stored by number. Leave starting_after out, and the response is streamed "
                "from its beginning.",
                code="unsupported_parameter",
                param="starting_after",
            )
        credentials = _credentials(request)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            conversations = await stack.enter_async_context(self._pool.conversations(credentials))
            message = await find_response(conversations.client, request.path_params["id"])
            following = conversations.follow(name_of(message.to), make_stored(message))
            question = await stack.enter_async_context(following)
            about = _describe_answering(message, question)
            # Move the stack to the exchange. The timeout above applies only to the start, and must not end the stream.
            exchange = Exchange(credentials, conversations.client, question, about, stack.pop_all())
        return EventStream(exchange, self._stream_response(exchange, ResponseStream(about)))

    async def _list_input(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            message = await find_response(client, request.path_params["id"])
            return JSONResponse(cut_page([show_input(message)], request.query_params))

    async def _read_response(self, conversations: Conversations, message: AnyMessage) -> dict[str, Any]:
        """Return a response with its current state in the ledger."""
        question = conversations.open(name_of(message.to), make_stored(message))
        answers, ended = await question.read_outcome()
        about = _describe_answering(message, question)
        segments = [Segment(None, answer.text, is_answer=True) for answer in answers]
        if ended is None:
            return make_response(about, "in_progress", segments)
        return make_response(
            about,
            STATUSES[ended.status],
            segments,
            reason=f"{question.agent_id}: {ended.reason}",
            total=await read_usage(conversations.client, message.seq),
            ended_at=(answers[-1] if answers else message).sent_at // 1000,
        )

    # --- conversations

    async def _create_conversation(self, request: Request) -> Response:
        body = await _read_optional_body(request)
        async with self._pool.session(_credentials(request)) as client:
            return JSONResponse(await create_conversation(client, body, _choose_message_id(request)))

    async def _show_conversation(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            return JSONResponse(await show_conversation(client, request.path_params["id"]))

    async def _update_conversation(self, request: Request) -> Response:
        body = await _read_body(request)
        async with self._pool.session(_credentials(request)) as client:
            name, message_id = request.path_params["id"], _choose_message_id(request)
            return JSONResponse(await update_conversation(client, name, body, message_id))

    async def _delete_conversation(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            name, message_id = request.path_params["id"], _choose_message_id(request)
            return JSONResponse(await delete_conversation(client, name, message_id))

    async def _list_items(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            return JSONResponse(await list_items(client, request.path_params["id"], request.query_params))

    async def _add_items(self, request: Request) -> Response:
        body = await _read_body(request)
        async with self._pool.session(_credentials(request)) as client:
            return JSONResponse(await add_items(client, request.path_params["id"], body, _choose_message_id(request)))

    async def _show_item(self, request: Request) -> Response:
        async with self._pool.session(_credentials(request)) as client:
            return JSONResponse(await find_item(client, request.path_params["id"], request.path_params["item"]))

    async def _refuse_to_delete_item(self, request: Request) -> Response:
        _credentials(request)
        raise ApiProblem(405, "Items cannot be deleted, because messages stay in the ledger.", headers={"Allow": "GET"})

    # --- asking an agent

    async def _start(self, request: Request, agent_request: AgentRequest) -> Exchange:
        """Send the message of a request, unless it was already sent. The caller must close the ``stack`` of the
        returned exchange.
        """
        key = _read_key(request)
        credentials = _credentials(request)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            # Use a stack instead of a with-block. For a streamed response, the session must stay open after this
            # function returns.
            conversations = await stack.enter_async_context(self._pool.conversations(credentials))
            client = conversations.client
            agent_id = await find_model(client, agent_request.model)
            message_id = key or ordered_id()
            # Detect retries by a header. OpenAI's clients repeat a request without a key, and count the attempts in
            # this header.
            is_retry = key is None and request.headers.get("x-stainless-retry-count", "0") != "0"

            def is_awaited(seq: int) -> bool:
                return bool(self._awaited[client.agent_id, seq])

            find = partial(find_place, client, agent_id, agent_request, message_id, is_awaited=is_awaited)
            place = await find(is_retry=is_retry)
            if is_retry and place.sent is not None and await is_cancelled(conversations, place.sent):
                # Ask again. The reaction was cancelled before the retry arrived.
                place = await find(is_retry=False)
            sent, question = place.sent, None
            if sent is None:
                sent_request = add_unsent_items(agent_request, place.record, place.asked_last)
                has_instructions = place.has_instructions and sent_request.instructions == agent_request.instructions
                content = compose(
                    sent_request,
                    is_new=place.is_new,
                    has_instructions=has_instructions,
                    has_answer=place.has_answer,
                )
                try:
                    question = await stack.enter_async_context(
                        conversations.ask(
                            agent_id,
                            content,
                            conversation=place.conversation,
                            message_id=message_id,
                            metadata={OWN: make_own(agent_request, sent_request)},
                        )
                    )
                except IdConflict:
                    # The id belongs to another request, or to this request in a conversation that has continued in the
                    # meantime.
                    sent = await find_sent(client, agent_id, agent_request, message_id)
                    if sent is None:
                        raise
            if question is None:
                assert sent is not None
                # Refuse a key that was used for another question. Otherwise the client would get a wrong answer that
                # looks right.
                if read_own(sent).get("request") != agent_request.digest:
                    raise ApiProblem(409, "A different request was made with this Idempotency-Key.", code="id_conflict")
                question = await stack.enter_async_context(conversations.follow(agent_id, make_stored(sent)))
            created_at = sent.sent_at // 1000 if sent is not None else int(time.time())
            about = Answering(question.stored.seq, agent_request.model, created_at, agent_request.echo)
            waiting = (client.agent_id, question.stored.seq)
            # Count the connection before the stack can be closed. A retry of the same request must see that a
            # connection is waiting.
            self._awaited[waiting] += 1
            exchange = Exchange(credentials, client, question, about, stack.pop_all())
            exchange.stack.callback(self._leave, exchange, waiting, keeps_on=key is not None)
        return exchange

    def _leave(self, exchange: Exchange, waiting: tuple[str, int], *, keeps_on: bool) -> None:
        """Handle the end of a connection. Cancel the reaction if it has not ended, unless its client can return for the
        answer.
        """
        self._awaited[waiting] -= 1
        if exchange.ended is None and not (keeps_on or exchange.keeps_on):
            self._spawn(self._cancel_later(exchange, waiting))
        # Remove counters that are zero. Otherwise every question would stay in memory forever.
        elif not self._awaited[waiting]:
            del self._awaited[waiting]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="openai")
        self._cleanups.add(task)
        # Keep the task in a set. The event loop has only weak references to tasks, so the task could be garbage
        # collected.
        task.add_done_callback(self._cleanups.discard)

    async def _cancel_later(self, exchange: Exchange, waiting: tuple[str, int]) -> None:
        # Wait first. The client's automatic retry may continue this reaction.
        await asyncio.sleep(STOP_AFTER_S)
        # Keep the reaction: the client has repeated the request and waits for the same answer.
        if self._awaited[waiting]:
            return
        del self._awaited[waiting]
        try:
            async with (
                self._pool.conversations(exchange.credentials, is_cleanup=True) as conversations,
                conversations.follow(exchange.question.agent_id, exchange.question.stored) as question,
            ):
                await question.stop(ANSWER_S)
        except RoundelayError as error:
            _logger.info("a reaction could not be cancelled", extra={"seq": waiting[1], "code": error.code})

    async def _acknowledge(self, exchange: Exchange) -> None:
        """Acknowledge the answers that the client has received."""
        seqs = [answer.seq for answer in exchange.answers]
        # Do not acknowledge an unfinished answer, so that the caller can still receive it.
        if exchange.ended is None or not seqs:
            return
        try:
            async with self._pool.conversations(exchange.credentials, is_cleanup=True) as conversations:
                await conversations.client.call("network.acknowledge", {"seqs": seqs})
        except RoundelayError as error:
            _logger.info("answers could not be acknowledged", extra={"seqs": seqs, "code": error.code})


async def _answer(perform: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    try:
        return await perform(request)
    except ClientDisconnect:
        return Response(status_code=400)  # the client has disconnected and reads no response
    except (RoundelayError, ApiProblem, TimeoutError) as error:
        problem = make_problem(error)
        return JSONResponse({"error": problem.body}, problem.status, problem.headers)


def _describe_answering(message: AnyMessage, question: FollowedQuestion) -> Answering:
    return Answering(message.seq, question.agent_id, message.sent_at // 1000, read_stored_echo(message))


def _credentials(request: Request) -> Credentials:
    return read_authorization(request.headers.get("authorization"))


async def _read_body(request: Request) -> Any:
    _credentials(request)  # refuse a request without credentials before reading its body
    return await read_json(request)


async def _read_optional_body(request: Request) -> Any:
    """Read a body like `_read_body`. Return None if the request has no body."""
    has_body = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
    return await _read_body(request) if has_body else None


def _read_key(request: Request) -> str | None:
    """Return the idempotency key of a request, or None. Raises `ApiProblem` for an invalid key."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise ApiProblem(400, "The Idempotency-Key must be 1 to 128 visible ASCII characters.")
    return key


def _choose_message_id(request: Request) -> str:
    """Return the id of the message that a request sends: its idempotency key, or a new id."""
    return _read_key(request) or ordered_id()
