"""Check for ``roundelay doctor`` that a model calls a tool and answers with the tool's result.

Each check sends two requests to the model, in the format that an agent uses. Nothing is stored.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from roundelay.network.errors import RoundelayError
from roundelay.nodes.check_result import Checked

if TYPE_CHECKING:
    from roundelay.agents.models.model import ChatMessage, Model, ModelReply, ModelRequest


async def check_named_model(name: str, base_url: str | None, timeout_s: float) -> Checked:
    from roundelay.agents.models.openai_model import OpenAIModel

    try:
        model = OpenAIModel(name, base_url=base_url)
    except RoundelayError as error:
        return Checked("model", "failed", str(error))
    return await check_model("model", model, timeout_s)


async def check_model(name: str, model: Model, timeout_s: float) -> Checked:
    """Ask a model to call a tool and to answer with the result, as an agent does. Close the model afterwards.

    The check needs two turns, because some servers accept the first turn but refuse the second.
    """
    try:
        return await _ask_for_call(name, model, timeout_s)
    finally:
        # A scripted model has no connection to close.
        if (close := getattr(model, "close", None)) is not None:
            await close()


async def _ask_for_call(name: str, model: Model, timeout_s: float) -> Checked:
    from roundelay.agents.history import repair, sanitize_call
    from roundelay.agents.models.model import (
        AssistantMessage,
        ModelRequest,
        SystemMessage,
        ToolMessage,
        ToolSpec,
        UserMessage,
    )
    from roundelay.agents.policy import describe_turn

    word, answer = "roundelay", "The number of this word is 4711."
    properties = {"word": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["word"], "additionalProperties": False}
    tool = ToolSpec("confirm", "Confirm that a word was received. Gives the number of the word.", schema)
    messages: list[ChatMessage] = [
        SystemMessage("You check a connection. First call the tool. Then say what it gave, in one short sentence."),
        UserMessage(f'Call the tool "confirm" with the word "{word}".'),
    ]
    # Use an agent's request format, including the description of the turn, so that a server that refuses the format
    # fails here.
    request = ModelRequest(repair(messages, describe_turn(1, 3)), [tool], agent_id="doctor", turn=1)
    first = await _ask_once(name, model, request, timeout_s)
    if isinstance(first, Checked):
        return first
    reply, took = first
    call = next((it for it in reply.tool_calls if it.name == "confirm"), None)
    # A model without tool calls can talk, but an agent cannot act with it.
    if call is None:
        detail = f"Model {model.name} answered {took}, but called no tool."
        return Checked(name, "failed", detail, "Choose a model that calls tools, or tool_mode: json_schema.")
    try:
        given = json.loads(call.arguments)
    except ValueError:
        given = None
    messages += [
        AssistantMessage(reply.text, tuple(map(sanitize_call, reply.tool_calls)), reply.origin),
        # answer every call, because servers refuse a request with an unanswered call
        *(ToolMessage(it.id, answer) for it in reply.tool_calls),
    ]
    request = ModelRequest(repair(messages, describe_turn(2, 3)), [tool], agent_id="doctor", turn=2)
    second = await _ask_once(name, model, request, timeout_s)
    if isinstance(second, Checked):
        detail = f"The model called a tool {took}, and fails at the second turn, with the result: {second.detail}"
        return replace(second, detail=detail)
    last, took_again = second
    # This is only a note: the server works, and a larger model on the same server would succeed.
    if not isinstance(given, dict) or word not in str(given.get("word", "")).lower():
        detail = f"Model {model.name} called the tool {took}, but with wrong arguments: {call.arguments[:80]}"
        return Checked(name, "note", detail, "It may be too small for tools; try tool_mode: json_schema.")
    done = f"Model {model.name} called a tool {took}"
    if last.is_cut:
        detail = f"{done}, and its answer to the result was cut off at its limit of length."
        return Checked(name, "note", detail, "Raise max_tokens, or max_completion_tokens, under settings.")
    if last.tool_calls:
        detail = f"{done}, and then called {last.tool_calls[0].name} again instead of answering with the result."
        return Checked(name, "note", detail, "It may be too small for tools; try tool_mode: json_schema.")
    if not (last.text or "").strip():
        detail = f"{done}, and returned an empty reply to the result."
        return Checked(name, "failed", detail, "Choose another model: an agent would get no answer from this one.")
    return Checked(name, "ok", f"{done} and answered with its result {took_again}.")


async def _ask_once(
    name: str, model: Model, request: ModelRequest, timeout_s: float
) -> tuple[ModelReply, str] | Checked:
    """Return the model's reply and the time that it took, or the failed check."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            reply = await model.complete(request)
    except RoundelayError as error:
        return Checked(name, "failed", str(error))
    except TimeoutError:
        detail = f"Model {model.name} did not answer within {timeout_s:g} s."
        return Checked(name, "failed", detail, "Try again, or give it more time with --timeout.")
    return reply, f"in {time.perf_counter() - began:.1f} s"
