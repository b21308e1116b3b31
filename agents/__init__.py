"""Agents: runners that react to messages by asking a model and running tools, each reaction journaled and resumable.

The way in is `simple` (`SimpleAgentRunner`), for agents in YAML `team`. A reaction's path: `runner` -> `inbox` -> `context` -> `prompt` -> `reaction`
and `driver`, with `models` and `tools`, written down by `journal`, told by `events`. Imports only `roundelay.network` and
`roundelay.templates`; no model provider is loaded until one is built.
"""

from .events import Event, OnEvent, event_to_json
from .inbox import ReactTo
from .models.model import Model, ModelDelta, ModelError, ModelReply, ModelRequest
from .ongoing import ReactionResult
from .policy import AgentPolicy, OnText
from .runner import AgentRunner
from .simple import SimpleAgentRunner, SimpleOpenAIAgentRunner
from .tools import Tool, ToolContext, ToolResult, tool

__all__ = [
    "AgentPolicy",
    "AgentRunner",
    "Event",
    "Model",
    "ModelDelta",
    "ModelError",
    "ModelReply",
    "ModelRequest",
    "OnEvent",
    "OnText",
    "ReactTo",
    "ReactionResult",
    "SimpleAgentRunner",
    "SimpleOpenAIAgentRunner",
    "Tool",
    "ToolContext",
    "ToolResult",
    "event_to_json",
    "tool",
]
