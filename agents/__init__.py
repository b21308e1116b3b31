"""Agents: runners that react to messages by asking a model and running tools. Every reaction is journaled and resumes
after a restart.

Start at `simple` (`SimpleAgentRunner`), or at `team` for agents in YAML. A reaction passes through `runner`,
`reaction_scheduler`, `inbox` and `prompt`. Then `reaction` decides each next step, and `driver` performs it with
`models` and `tools`. `journal` records the reaction, and `events` report it. Additions to the loop are `middleware`:
one module each under `features`. docs/design.md lists all modules.

Imports only `roundelay.network` and `roundelay.templates`. Modules of this package are loaded when they are first used,
and a model provider when its first model is built. A program that only reads records therefore loads neither.
"""

from __future__ import annotations

if __name__ == "agents":  # the current directory is the clone's folder
    raise ImportError(
        "Import this package as roundelay.agents (from roundelay.agents import ...). Under the name agents it "
        "would be a second copy with classes of its own. For the OpenAI Agents SDK, which has this name too, "
        "start Python outside of the clone."
    )

from typing import TYPE_CHECKING

from roundelay.lazy import load_when_used

if TYPE_CHECKING:
    from .agent import Agent, Handoff, Returns
    from .agent_tools import agent_tool, remote_agent_tool, remote_handoff, template_instruction
    from .events import Event, OnEvent, event_to_json
    from .inbox import ReactTo
    from .middleware import Answer, Around, Correction, Instruction, Middleware
    from .models.fallback import FallbackModel
    from .models.model import Model, ModelDelta, ModelError, ModelReply, ModelRequest, NamedTool
    from .policy import AgentPolicy, OnText
    from .runner import AgentRunner
    from .running_reaction import ReactionResult
    from .simple import SimpleAgentRunner, SimpleOpenAIAgentRunner
    from .tools import Output, Tool, ToolContext, tool
    from .values import AfterTool, End, ToolResult, TurnState

__all__ = [
    "AfterTool",
    "Agent",
    "AgentPolicy",
    "AgentRunner",
    "Answer",
    "Around",
    "Correction",
    "End",
    "Event",
    "FallbackModel",
    "Handoff",
    "Instruction",
    "Middleware",
    "Model",
    "ModelDelta",
    "ModelError",
    "ModelReply",
    "ModelRequest",
    "NamedTool",
    "OnEvent",
    "OnText",
    "Output",
    "ReactTo",
    "ReactionResult",
    "Returns",
    "SimpleAgentRunner",
    "SimpleOpenAIAgentRunner",
    "Tool",
    "ToolContext",
    "ToolResult",
    "TurnState",
    "agent_tool",
    "event_to_json",
    "remote_agent_tool",
    "remote_handoff",
    "template_instruction",
    "tool",
]

_NAMES = {
    "agent": ("Agent", "Handoff", "Returns"),
    "agent_tools": ("agent_tool", "remote_agent_tool", "remote_handoff", "template_instruction"),
    "events": ("Event", "OnEvent", "event_to_json"),
    "inbox": ("ReactTo",),
    "middleware": ("Answer", "Around", "Correction", "Instruction", "Middleware"),
    "models.fallback": ("FallbackModel",),
    "models.model": ("Model", "ModelDelta", "ModelError", "ModelReply", "ModelRequest", "NamedTool"),
    "policy": ("AgentPolicy", "OnText"),
    "running_reaction": ("ReactionResult",),
    "runner": ("AgentRunner",),
    "simple": ("SimpleAgentRunner", "SimpleOpenAIAgentRunner"),
    "tools": ("Output", "Tool", "ToolContext", "tool"),
    "values": ("AfterTool", "End", "ToolResult", "TurnState"),
}  # fmt: skip
__getattr__ = load_when_used(__name__, {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names})
