"""A registry of tools: which tools an agent has, by name and by set, changed while it runs; and what is said of those
that are disabled.

`ToolRegistry` is middleware. Its tools are asked for once before each turn, so a change during a turn holds from the
next one on. Two kinds of change: `register`, `unregister`, `clear` are everybody's, for all reactions of the agent, and
last as long as the process; a result whose data has ``use_sets`` turns sets on for its own reaction, and is in the
record, so that a resumed reaction has them again.
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
"""In the data of a tool's result: the names of sets that the reaction has from its next turn on."""

DISABLED_TOOLS = "disabled_tools"
"""In the metadata of a structured answer, to whose text no sentence may be added: the tools that were called and are
not enabled here."""

_IN_USE = "registry.sets"  # in the state's values
_DISABLED = "registry.disabled"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools that come and go together. ``replaces``: in place of those of the sets before it, not beside them."""

    tools: Sequence[Tool | Callable[..., object]] = ()
    replaces: bool = False


class ToolRegistry(Middleware):
    """The tools of an agent, by name. It starts with ``tools`` and, of ``sets`` (a `ToolSet`, or its tools), the one
    named `default` and those in ``modes``.

    The selection rules of a turn's tools stand in its system message. A call to a tool that is disabled
    (`Tool.should_use`) is answered to the model; ``reports_disabled`` says so to the person as well, in a sentence
    under the answer (of a structured one: in its metadata).
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., object]] = (),
        *,
        sets: Mapping[str, ToolSet | Sequence[Tool | Callable[..., object]]] | None = None,
        modes: Sequence[str] = (),
        reports_disabled: bool = True,
    ) -> None:
        given = {
            name: tool_set if isinstance(tool_set, ToolSet) else ToolSet(tool_set)
            for name, tool_set in (sets or {}).items()
        }
        made = {name: (tuple(map(as_tool, tool_set.tools)), tool_set.replaces) for name, tool_set in given.items()}
        self._sets: Mapping[str, tuple[tuple[Tool, ...], bool]] = made
        self._reports_disabled = reports_disabled
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)
        start = [DEFAULT_SET, *modes] if DEFAULT_SET in made else modes
        self._tools = self._add_sets(self._tools, start)

    @classmethod
    def from_file(
        cls,
        tools: tuple[str, ...] = (),
        sets: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        replacing: tuple[str, ...] = (),
        modes: tuple[str, ...] = (),
        reports_disabled: bool = True,
    ) -> ToolRegistry:
        """Make that of an agent's file. Tools are ``package.module:function``, and are imported; ``replacing`` are the
        sets that come in place of those before them. Raises `ConfigError`."""
        unknown = [name for name in (*replacing, *modes) if name not in sets]
        if unknown:
            known = ", ".join(sets) or "none"
            raise ConfigError(f"the registry has no set named {', '.join(unknown)}; there are: {known}")
        try:
            made = {name: ToolSet(tuple(map(load_tool, listed)), name in replacing) for name, listed in sets.items()}
            return cls(map(load_tool, tools), sets=made, modes=modes, reports_disabled=reports_disabled)
        except ToolError as error:
            raise ConfigError(str(error)) from error

    # --- what is registered

    def register(self, given: Tool | Callable[..., object]) -> Tool:
        """Add a tool; one of the same name makes way. Raises `ToolError` for the name of `finish`."""
        made = as_tool(given)
        if made.name == FINISH:
            raise ToolError(f'A registered tool cannot be named "{FINISH}": give it another name with @tool(name=...).')
        self._tools = {**self._tools, made.name: made}
        return made

    def unregister(self, name: str) -> None:
        """Take a tool away, if it is there."""
        self._tools = {known: tool for known, tool in self._tools.items() if known != name}

    def clear(self) -> None:
        """Take all away."""
        self._tools = {}

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def get_all(self) -> tuple[Tool, ...]:
        """Give what is registered, in order."""
        return tuple(self._tools.values())

    # --- in the loop

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        # Another registry, of an agent that handed over, may have turned on sets that this one does not know.
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
            known = [str(name) for name in wanted if str(name) in self._sets]
            if len(known) < len(wanted):
                _logger.warning(
                    "unknown sets of tools", extra={"tool": call.name, "sets": wanted, "known": list(self._sets)}
                )
            state.values[_IN_USE] = [*_read_names(state, _IN_USE), *known]
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
        together = dict(tools)
        for name in names:
            if name not in self._sets:
                known = ", ".join(sorted(self._sets)) or "none"
                raise ToolError(f'There is no set of tools named "{name}"; there are: {known}.')
            added, replaces = self._sets[name]
            together = {} if replaces else together
            together |= {tool.name: tool for tool in added}
        return together


def _read_names(state: TurnState, key: str) -> list[str]:
    kept = state.values.get(key)
    return [str(name) for name in kept] if isinstance(kept, list) else []
