"""Test of a remote agent that speaks A2A 0.3: its server knows only the methods of that release, and refuses all
others.

The agent's card, methods and results follow https://a2a-protocol.org/v0.3.0/specification/.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from roundelay.adapters.a2a import A2AAgent
from roundelay.app import Network
from tests.support.agents import Person, running

METHODS = ("message/send", "message/stream", "tasks/get", "tasks/cancel", "tasks/resubscribe")


class Old:
    """The remote agent. ``asked`` lists the called methods."""

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self.asked: list[str] = []
        self.url = ""
        self.tasks: dict[str, dict[str, Any]] = {}

    async def show_card(self, request: Request) -> Response:
        card = {
            "protocolVersion": "0.3.0", "name": "Old", "description": "Says what it heard", "version": "1", "url": self.url,
            "preferredTransport": "JSONRPC", "capabilities": {"streaming": self.streams}, "defaultInputModes": ["text/plain"],
            "defaultOutputModes": ["text/plain"],
            "skills": [{"id": "hear", "name": "hear", "description": "Hears", "tags": ["hear"]}],
        }  # fmt: skip
        return JSONResponse(card)

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body["method"])
        if body["method"] not in METHODS:
            error = {"code": -32601, "message": "Method not found"}
            return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "error": error})
        if body["method"] == "tasks/get":
            return self.give(body, self.tasks[body["params"]["id"]])
        message = body["params"]["message"]
        said = "".join(part["text"] for part in message["parts"] if part["kind"] == "text")
        if said == "ask":
            return self.give(body, self.make_task(message, "input-required", "Which one?"))
        if said == "work":
            task = self.make_task(message, "completed", "")
            artifact = {"artifactId": "one", "parts": [{"kind": "text", "text": "I worked."}]}
            self.tasks[task["id"]] = task = {**task, "artifacts": [artifact]}
            return self.give(body, task)
        told = {
            "kind": "message",
            "role": "agent",
            "messageId": "m1",
            "parts": [{"kind": "text", "text": f"I heard {said}"}],
        }
        return self.give(body, told)

    def make_task(self, message: dict[str, Any], state: str, said: str) -> dict[str, Any]:
        task_id = message.get("taskId") or f"t{len(self.tasks) + 1}"
        status: dict[str, Any] = {"state": state}
        if said:
            parts = [{"kind": "text", "text": said}]
            status["message"] = {"kind": "message", "role": "agent", "messageId": "m2", "parts": parts}
        task = {"kind": "task", "id": task_id, "contextId": message["contextId"], "status": status}
        self.tasks[task_id] = task
        return task

    def give(self, body: dict[str, Any], result: dict[str, Any]) -> Response:
        told = {"jsonrpc": "2.0", "id": body["id"], "result": result}
        if body["method"] != "message/stream":
            return JSONResponse(told)

        async def stream() -> AsyncIterator[str]:
            yield f"data: {json.dumps(told)}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@asynccontextmanager
async def elsewhere(old: Old) -> AsyncIterator[None]:
    routes = [Route("/.well-known/agent-card.json", old.show_card), Route("/", old.answer, methods=["POST"])]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off"))
    listening = server.config.bind_socket()
    old.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    work = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await work
        listening.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_of_a2a_03_answers_each_message(streams: bool) -> None:
    old = Old(streams=streams)
    async with elsewhere(old), Network.open() as network:
        mia = await Person.join(network, "mia")
        async with running(network, A2AAgent("far", old.url)):
            assert (await mia.ask("far", "one")).text == "I heard one"
            assert (await mia.ask("far", "two")).text == "I heard two"
            assert (await mia.ask("far", "work")).text == "I worked."
            assert (await mia.ask("far", "ask")).text == "Which one?"
            assert (await mia.ask("far", "this one")).text == "I heard this one"
    assert set(old.asked) <= set(METHODS)
