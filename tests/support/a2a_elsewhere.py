"""A remote A2A agent, built as in the samples of the A2A SDK, with an executor, a task store in memory and routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from a2a.helpers import new_task_from_user_message, new_text_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events.event_queue_v2 import EventQueue
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class Sample(AgentExecutor):
    """Executor whose reaction depends on the text. `hello` returns a plain message, `ask` asks a question, `fail`
    fails, and `slow` waits. Any other text creates a task whose result arrives in two parts.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        """Context ID and text of each received message."""

        self.may_answer = asyncio.Event()
        """A task with the text `slow` finishes after the test sets this event."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        said = context.get_user_input()
        self.heard.append((context.context_id or "", said))
        if said == "hello":
            await event_queue.enqueue_event(new_text_message("Hello World"))
            return
        assert context.message is not None
        task = context.current_task
        if task is None:
            task = new_task_from_user_message(context.message)
            await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work()
        if said == "slow":
            await self.may_answer.wait()
        if said == "ask":
            await updater.requires_input(new_text_message("Which one?"))
        elif said == "fail":
            await updater.failed(new_text_message("The secret reason"))
        else:
            await updater.add_artifact([Part(text="I heard ")], artifact_id="one", last_chunk=False)
            await updater.add_artifact([Part(text=said)], artifact_id="one", append=True, last_chunk=True)
            await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


class Guarded:
    """ASGI middleware that answers 401 to a request without the right bearer token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and Request(scope).headers.get("authorization") != f"Bearer {self._token}":
            await Response(status_code=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)


@asynccontextmanager
async def sample_agent(token: str, *, streaming: bool = True, card_url: str = "") -> AsyncIterator[tuple[str, Sample]]:
    """Run the sample agent. Yield the URL of its agent card and its executor."""
    sample = Sample()
    server = uvicorn.Server(uvicorn.Config(Starlette(), port=0, log_config=None, lifespan="off"))
    listening = server.config.bind_socket()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    card = AgentCard(
        name="sample",
        description="Says what it heard",
        version="1",
        supported_interfaces=[
            AgentInterface(url=card_url or f"{url}/", protocol_binding="JSONRPC", protocol_version="1.0")
        ],
        capabilities=AgentCapabilities(streaming=streaming),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="echo", name="Echo", description="Says it again", tags=["repeating"])],
    )
    handler = DefaultRequestHandlerV2(sample, InMemoryTaskStore(), card)
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/")]
    server.config.app = Guarded(Starlette(routes=routes), token)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield url, sample
    finally:
        server.should_exit = True
        await serving
        listening.close()
