"""Middleware with a registry of tools by name and by set, which may change while the agent runs. The registry also
reports disabled tools.

The loop asks `ToolRegistry` for tools once before each turn, so a change takes effect in the next turn. There are two
kinds of changes. `register`, `unregister` and `clear` apply to all reactions of the agent, until the process ends. A
tool result with ``use_sets`` in its data adds sets only in its own reaction. The data of a result is recorded, so a
resumed reaction has the same sets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import JsonValue

from roundelay.agents.middleware import Answer, Around, CallModel, Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.tools import FINISH, Tool, as_tool, load_tool
from roundelay.agents.values import DISABLED, AfterTool, ToolError, ToolResult, TurnState
from roundelay.network.errors import ConfigError

from .structured import is_structured

_logger = logging.getLogger(__name__)

DEFAULT_SET = "default"
USE_SETS = "use_sets"
"""Key in a result's data for the names of the tool sets that the reaction can use from its next turn on."""

DISABLED_TOOLS = "disabled_tools"
"""Key in the metadata of a structured answer for the names of the disabled tools that were called. The text of a
structured answer cannot contain this information.
"""

_IN_USE = "registry.sets"  # key in ``state.values``
_DISABLED = "registry.disabled"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools that are added together. If ``replaces`` is set, these tools replace the tools of all earlier sets."""

    tools: Sequence[Tool | Callable[..., object]] = ()
    replaces: bool = False


class ToolRegistry(Middleware):
    """Registry of an agent's tools, by name.

    At first, the agent has ``tools``, the set named `default`, and the sets in ``modes``. The system message shows the
    rules for choosing among the tools of the turn. A call of a disabled tool (`Tool.should_use`) returns an explanation
    as its result. ``reports_disabled`` also informs the person, in a sentence below the answer or, for a structured
    answer, in its metadata.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., object]] = (),
        *,
        sets: Mapping[str, ToolSet | Sequence[Tool | Callable[..., object]]] | None = None,
        modes: Sequence[str] = (),
        reports_disabled: bool = True,
    ) -> None:
        tool_sets = {
            name: tool_set if isinstance(tool_set, ToolSet) else ToolSet(tool_set)
            for name, tool_set in (sets or {}).items()
        }
        loaded = {
            name: (tuple(map(as_tool, tool_set.tools)), tool_set.replaces) for name, tool_set in tool_sets.items()
        }
        self._sets: Mapping[str, tuple[tuple[Tool, ...], bool]] = loaded
        self._reports_disabled = reports_disabled
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)
        initial = [DEFAULT_SET, *modes] if DEFAULT_SET in loaded else modes
        self._tools = self._add_sets(self._tools, initial)

    @classmethod
    def from_file(
        cls,
        tools: tuple[str, ...] = (),
        sets: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        replacing: tuple[str, ...] = (),
        modes: tuple[str, ...] = (),
        reports_disabled: bool = True,
    ) -> ToolRegistry:
        """Return the registry of an agent's file.

        Tools are given as ``package.module:function`` and are imported. ``replacing`` names the sets that replace all
        earlier sets. Raises `ConfigError`.
        """
        unknown = [name for name in (*replacing, *modes) if name not in sets]
        if unknown:
            known = ", ".join(sets) or "none"
            raise ConfigError(f"unknown tool set {', '.join(unknown)} in the registry. Known sets: {known}")
        try:
            loaded = {name: ToolSet(tuple(map(load_tool, listed)), name in replacing) for name, listed in sets.items()}
            return cls(map(load_tool, tools), sets=loaded, modes=modes, reports_disabled=reports_disabled)
        except ToolError as error:
            raise ConfigError(str(error)) from error

    # --- what is registered

    def register(self, tool: Tool | Callable[..., object]) -> Tool:
        """Add a tool, or replace the tool with the same name. Raises `ToolError` for the name `finish`."""
        registered = as_tool(tool)
        if registered.name == FINISH:
            raise ToolError(f'A registered tool cannot be named "{FINISH}". Rename it with @tool(name=...).')
        # Create a new mapping instead of changing the old one, because a turn may still iterate over the old mapping.
        self._tools = {
            **self._tools,
            registered.name: registered,
        }
        return registered

    def unregister(self, name: str) -> None:
        """Remove a tool if it is registered."""
        self._tools = {known: tool for known, tool in self._tools.items() if known != name}

    def clear(self) -> None:
        """Remove all tools."""
        self._tools = {}

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def get_all(self) -> tuple[Tool, ...]:
        """Return the registered tools in order."""
        return tuple(self._tools.values())

    # --- in the loop

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        # Ignore unknown sets: an agent that handed over may have a different registry.
        known = [name for name in _read_names(state, _IN_USE) if name in self._sets]
        return tuple(self._add_sets(self._tools, known).values())

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        rules = [
            f"- {tool.name}: {tool.selection_rule}"
            for spec in step.tools
            if (tool := step.agent.find_tool(spec.name)) is not None and tool.selection_rule
        ]
        return step.instruct("\n".join(["# Which tool when", *rules])) if rules else step

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        if DISABLED in result.data:
            state.values[_DISABLED] = [*_read_names(state, _DISABLED), call.name]
        wanted: JsonValue = result.data.get(USE_SETS)
        if isinstance(wanted, str):
            wanted = [wanted]
        if isinstance(wanted, list):
            known_sets = [str(name) for name in wanted if str(name) in self._sets]
            if len(known_sets) < len(wanted):
                _logger.warning(
                    "a result names unknown tool sets",
                    extra={"tool": call.name, "sets": wanted, "known": list(self._sets)},
                )
            state.values[_IN_USE] = [*_read_names(state, _IN_USE), *known_sets]
        return None

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        names = list(dict.fromkeys(_read_names(around.state, _DISABLED)))
        if not names or not self._reports_disabled:
            return answer
        if is_structured(around.agent):
            return Answer(answer, {DISABLED_TOOLS: list(names)})
        verb = "is not enabled here, so it was" if len(names) == 1 else "are not enabled here, so they were"
        return f"{answer}\n\n({', '.join(names)} {verb} not used.)"

    def _add_sets(self, tools: Mapping[str, Tool], names: Iterable[str]) -> dict[str, Tool]:
        merged = dict(tools)
        for name in names:
            if name not in self._sets:
                known = ", ".join(sorted(self._sets)) or "none"
                raise ToolError(f'Unknown tool set "{name}". Known sets: {known}.')
            added, replaces = self._sets[name]
            merged = {} if replaces else merged
            merged |= {tool.name: tool for tool in added}
        return merged


def _read_names(state: TurnState, key: str) -> list[str]:
    kept = state.values.get(key)
    return [str(name) for name in kept] if isinstance(kept, list) else []
