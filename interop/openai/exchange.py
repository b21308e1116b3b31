"""Follows one question for one HTTP connection, and streams its events.

`api` starts an exchange and chooses the format of the response (`answers`). The exchange follows the question until the
question ends. When the connection ends, the ``stack`` of the exchange releases the question and the session.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from roundelay.interop.conversations import AgentAnswer, FollowedQuestion, QuestionEnded, TextPiece
from roundelay.interop.http.requests import find_status, format_retry_after, run_while_connected
from roundelay.interop.session_pool import Credentials
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import ConnectError, RetryLater, RoundelayError, UnknownRecipient
from roundelay.network.extras import needs

from .answers import STATUSES, Answering, Showing, find_problem, make_response
from .lookup import read_usage
from .requests import ApiProblem

with needs("gateway"):
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.types import Receive, Scope, Send


ANSWER_S = 590.0
"""Maximum time that a request waits for an answer, in seconds. OpenAI's official clients wait for ten minutes."""
KEEPALIVE_S = 15.0
"""Interval between keepalive comments in an idle stream, in seconds."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""HTTP headers that keep proxies from storing or buffering a stream."""
KEEPALIVE = ": waiting\n\n"


class Exchange:
    """A question that is followed for one connection, and the part of the answer that the client has received."""

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
        """Whether the reaction continues if the connection ends before the reaction does."""
        self._client = client

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.answers]

    async def events(self) -> AsyncIterator[Any]:
        """Yield the changes of the shown text. Yield None after `KEEPALIVE_S` seconds without a change. Raises
        `ApiProblem` after `ANSWER_S` seconds.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_S
        events = aiter(self.question)
        # Await the same future again after a keepalive. Cancelling `anext` would end the iteration.
        coming: asyncio.Future[Any] = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=KEEPALIVE_S)
                if not done:
                    if loop.time() > until:
                        # Let the agent continue. The answer is stored in the ledger, where a later request finds it.
                        self.keeps_on = True
                        raise ApiProblem(
                            504,
                            "The agent is still working. Its answer will be in the ledger.",
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
                        yield self.showing.add_event(event)
                    case AgentAnswer():
                        self.answers.append(event.message)
                        yield self.showing.add_event(event)
                    case QuestionEnded():
                        self.ended = event
                coming = asyncio.ensure_future(anext(events, None))
        finally:
            coming.cancel()
            # Wait until the read has ended, because the iterator cannot be closed while it runs.
            await asyncio.wait({coming})

    async def follow(self, request: Request) -> None:
        """Wait until the question has ended. Raises `ClientDisconnect` if the client disconnects before that."""

        async def read_all() -> None:
            async for changes in self.events():
                for _ in changes or ():
                    pass

        await run_while_connected(request.receive, read_all())

    def check_end(self) -> None:
        """Raise `ApiProblem` if the question ended without a completion."""
        assert self.ended is not None
        problem = find_problem(self.ended, self.question.agent_id, self.texts)
        if problem is not None:
            raise problem

    async def read_usage(self) -> Any:
        return await read_usage(self._client, self.about.seq)

    async def make_response(self) -> dict[str, Any]:
        """Return the response object of OpenAI's API for a question that has ended."""
        assert self.ended is not None
        return make_response(
            self.about,
            STATUSES[self.ended.status],
            self.showing.segments,
            reason=f"{self.question.agent_id}: {self.ended.reason}",
            total=await self.read_usage(),
            ended_at=int(time.time()),
        )


class EventStream(StreamingResponse):
    """Server-sent events of an exchange. Closes the stack of the exchange at the end of the stream, even after an
    error.
    """

    def __init__(self, exchange: Exchange, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange.stack:
            await super().__call__(scope, receive, send)


def format_data(value: dict[str, Any]) -> str:
    """Return a data line of an event stream. The JSON is encoded in ASCII, because some clients also end lines at other
    characters than a line feed.
    """
    return f"data: {json.dumps(value)}\n\n"


def format_event(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\n{format_data(event)}"


def make_problem(error: RoundelayError | ApiProblem | TimeoutError) -> ApiProblem:
    """Convert an error to the form that OpenAI's clients understand."""
    if isinstance(error, ApiProblem):
        return error
    if isinstance(error, TimeoutError):
        error = ConnectError("The node does not answer. Try again.")
    status = find_status(error)
    code, kind, headers = error.code, "invalid_request_error", {}
    match status:
        case 401:
            code, headers = "invalid_api_key", {"WWW-Authenticate": 'Bearer realm="roundelay"'}
        case 404 if isinstance(error, UnknownRecipient):
            code = "model_not_found"
        case 429:
            kind = "rate_limit_error"
        case _ if status >= 500:
            kind = "server_error"
    if isinstance(error, RetryLater):
        headers["Retry-After"] = format_retry_after(error.retry_after_ms)
    return ApiProblem(status, str(error), kind=kind, code=code, headers=headers, is_final=status not in (429, 503))
