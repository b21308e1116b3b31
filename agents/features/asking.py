"""How middleware asks a model for something of a certain shape: by a tool that it has to call, whose parameters are a
pydantic type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from roundelay.agents.arguments import tidy_schema
from roundelay.agents.middleware import Around
from roundelay.agents.models.model import (
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    NamedTool,
    SystemMessage,
    ToolSpec,
    UserMessage,
)
from roundelay.agents.text import take_fence_away

T = TypeVar("T", bound=BaseModel)

ATTEMPTS = 2


async def ask_for(
    kind: type[T],
    around: Around,
    instruction: str,
    facts: Mapping[str, object],
    *,
    tool: str,
    model: Model | None = None,
) -> T:
    """Ask ``model``, or the agent's own, to call ``tool`` with what ``kind`` describes; a second time if it gives
    something else.

    ``facts`` go to it as JSON, so that no text in them passes for another. Raises `ModelError`.
    """
    schema = tidy_schema(kind.model_json_schema())
    request = ModelRequest(
        (SystemMessage(instruction), UserMessage(json.dumps(facts, ensure_ascii=False, indent=1))),
        (ToolSpec(tool, (kind.__doc__ or "").strip(), schema),),
        NamedTool(tool),
        agent_id=around.agent.id,
        reaction=around.reaction,
        turn=around.state.turn,
    )
    asked = model or around.agent.model
    for _ in range(ATTEMPTS):
        reply = await around.complete(asked, request)
        try:
            return kind.model_validate_json(_read(reply, tool))
        except ValidationError:
            continue
    raise ModelError(f"The model {asked.name} did not call {tool} as it was asked to.", reason="broken_reply")


def _read(reply: ModelReply, tool: str) -> str:
    """What should be the arguments: of the tool, of another one that the model made up, or, of one that only writes, its
    text."""
    calls = sorted(reply.tool_calls, key=lambda call: call.name != tool)
    return calls[0].arguments if calls else take_fence_away(reply.text or "")
