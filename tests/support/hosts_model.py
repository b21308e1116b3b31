"""A model server on loopback for coding agents. The server streams Anthropic messages, OpenAI responses and chat
completions, and Gemini contents.

``async with hosts_model(script) as (url, requests)``: the script receives each request that offers tools, as text.
The script returns the model's text, or the name of a tool to call without arguments. A request without tools (for
example, for the session's title) gets a fixed one-word answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Says(NamedTuple):
    text: str = ""
    tool: str = ""
    """End of a tool's name in the request's list of tools."""


Script = Callable[[str], Awaitable[Says]]


@asynccontextmanager
async def hosts_model(script: Script) -> AsyncIterator[tuple[str, list[str]]]:
    requests: list[str] = []

    async def answer(request: Request) -> Response:
        asked = await request.json()
        if request.url.path.endswith("count_tokens"):
            return JSONResponse({"input_tokens": 10})
        if not asked.get("tools"):
            said = Says("A title")
        else:
            requests.append(json.dumps(asked, ensure_ascii=False))
            said = await script(requests[-1])
        name = (
            next((it for it in _names(asked.get("tools")) if it[1].endswith(said.tool)), ("", ""))
            if said.tool
            else ("", "")
        )
        assert bool(name[1]) == bool(said.tool), "the host offers no such tool"
        if asked.get("contents"):
            return Response(_as_gemini(said, name), media_type="text/event-stream")
        write = {"messages": _as_messages, "responses": _as_responses, "completions": _as_chat}
        events = write[request.url.path.rpartition("/")[2]](said, name, len(requests), str(asked.get("model")))
        return Response("".join(events), media_type="text/event-stream")

    async def nothing(_: Request) -> Response:
        return JSONResponse({"error": {"message": "There is nothing here.", "type": "not_found_error"}}, 404)

    paths = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions")
    gemini = Route("/{version}/models/{model}:streamGenerateContent", answer, methods=["POST"])
    routes = [gemini, *(Route(path, answer, methods=["POST"]) for path in paths)]
    app = Starlette(routes=[*routes, Route("/{rest:path}", nothing, methods=["GET", "POST", "HEAD"])])
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving


def _names(tools: Any, space: str = "") -> Iterator[tuple[str, str]]:
    """Yield the namespace and the name of each offered tool."""
    for tool in tools or []:
        if "functionDeclarations" in tool:
            yield from _names(tool["functionDeclarations"])
        elif tool.get("type") == "namespace":
            yield from _names(tool["tools"], tool["name"])
        else:
            yield space, str(tool.get("name") or tool.get("function", {}).get("name") or "")


def _event(data: dict[str, Any]) -> str:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"


def _as_messages(said: Says, name: tuple[str, str], number: int, model: str) -> Iterator[str]:
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "content": [],
               "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 1}}  # fmt: skip
    yield _event({"type": "message_start", "message": message})
    if said.tool:
        block: dict[str, Any] = {"type": "tool_use", "id": f"toolu_{number}", "name": name[1], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": "{}"}
    else:
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": said.text}
    yield _event({"type": "content_block_start", "index": 0, "content_block": block})
    yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _event({"type": "content_block_stop", "index": 0})
    stop = {"stop_reason": "tool_use" if said.tool else "end_turn", "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 5}})
    yield _event({"type": "message_stop"})


def _as_responses(said: Says, name: tuple[str, str], number: int, _model: str) -> Iterator[str]:
    if said.tool:
        item: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": name[1],
            "arguments": "{}",
        }
        item |= {"namespace": name[0]} if name[0] else {}
    else:
        content = [{"type": "output_text", "text": said.text, "annotations": []}]
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
    response = {"id": f"resp_{number}", "object": "response", "output": [item], "status": "completed",
                "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}}  # fmt: skip
    yield _event({"type": "response.created", "response": {**response, "output": [], "status": "in_progress"}})
    yield _event({"type": "response.output_item.done", "output_index": 0, "item": item})
    yield _event({"type": "response.completed", "response": response})


def _as_chat(said: Says, name: tuple[str, str], number: int, model: str) -> Iterator[str]:
    call = {"index": 0, "id": f"call_{number}", "type": "function", "function": {"name": name[1], "arguments": "{}"}}
    delta = {"role": "assistant", **({"tool_calls": [call]} if said.tool else {"content": said.text})}
    head = {"id": f"chat_{number}", "object": "chat.completion.chunk", "created": 1, "model": model}
    for choice in (
        {"delta": delta, "finish_reason": None},
        {"delta": {}, "finish_reason": "tool_calls" if said.tool else "stop"},
    ):
        yield f"data: {json.dumps({**head, 'choices': [{'index': 0, **choice}]})}\n\n"
    yield "data: [DONE]\n\n"


def _as_gemini(said: Says, name: tuple[str, str]) -> str:
    part = {"functionCall": {"name": name[1], "args": {}}} if said.tool else {"text": said.text}
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    return f"data: {json.dumps({'candidates': [candidate], 'usageMetadata': usage})}\n\n"
