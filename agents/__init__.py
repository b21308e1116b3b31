"""Agents: runners that react to messages by asking a model and running tools. Every reaction is journaled and resumes
after a restart.

Start at `simple` (`SimpleAgentRunner`), or at `team` if the agents are defined in YAML files. A reaction passes through
`runner`, `reaction_scheduler`, `inbox` and `prompt`. Then `reaction` decides each next step, and `driver` performs it
with `models` and `tools`. `journal` records the reaction, and `events` report its progress. `middleware` defines how to
extend the loop, and each module in `features` is one extension. docs/design.md lists all modules.

This package imports only `roundelay.network` and `roundelay.templates`. Each of its modules is loaded at its first use,
and a model provider's library when the first model of that provider is built. A program that only reads records
therefore loads no model library.
"""

from __future__ import annotations

if __name__ == "agents":  # True if the current directory is the folder of the clone
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
