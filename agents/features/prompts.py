"""Middleware that adds system and user prompts from jinja templates, rendered for each turn.

`Prompts` adds templates to the loop's own texts (the instruction, the agent's id, the conversation, the turn's number).
``system`` is added to the system message, ``user`` after the conversation, and ``turn`` to the last message, which the
history does not keep. The texts of ``system`` and ``user`` precede the history. Providers' caches stay valid while the
texts of ``system`` and ``user`` do not change. With the default templates, the texts change only when a tool with a
note about its results is first used, or when a server changes its instructions. The instructions of a server
(`CallModel.parts`) appear once, either where a template places them or in their default position. The time in a prompt
is the trigger's time, so a resumed reaction reads the same time. This module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from jinja2 import StrictUndefined, TemplateError, nodes
from pydantic import JsonValue

from roundelay.agents.agent import Agent
from roundelay.agents.bounded_templates import BoundedEnvironment
from roundelay.agents.middleware import CallModel, Middleware
from roundelay.agents.models.model import Model, SystemMessage, ToolSpec, UserMessage
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.models.scripted import say as answer
from roundelay.agents.network_tools import communication_tools
from roundelay.agents.options import IN_CODE
from roundelay.agents.values import PromptPart, TurnState
from roundelay.network.elements import escape_text
from roundelay.network.errors import ConfigError
from roundelay.templates import SYSTEM, USER, read_template

_SHOWN = "prompts.tools"  # key in ``state.values``: names of the tools in the last turn that had tools


@dataclass(frozen=True, slots=True)
class ToolNotes:
    """Notes about a tool in the prompt, in addition to the tool's description.

    ``display_name`` is the tool's name for people. ``system_prompt`` contains instructions for the system message, and
    ``user_prompt`` contains a reminder after the conversation. ``format`` explains how to show the results of the tool.
    The prompt contains ``format`` after the first use of the tool.
    """

    display_name: str = ""
    system_prompt: str = ""
    user_prompt: str = ""
    format: str = ""


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Variables of the templates, in addition to the variables of the turn. docs/prompts.md lists them.

    ``server_prompts`` and ``server_user_prompts`` are the texts about servers from the agent's author. The instructions
    of the servers themselves follow ``server_user_prompts``. The instructions of servers are never part of
    ``server_prompts``, because a server is untrusted and ``server_prompts`` is part of the system message.
    ``server_prompts`` and ``server_user_prompts`` are read in each turn, so they may be filled later.
    """

    custom_instructions: str = ""
    project_name: str = ""
    constraints: Sequence[str] = ()
    metadata: Mapping[str, JsonValue] | None = None
    model_info: Mapping[str, JsonValue] | None = None
    server_prompts: Sequence[str] = ()
    server_user_prompts: Sequence[str] = ()


class Prompts(Middleware):
    """Adds texts from templates to the system message, after the conversation, and to the last message.

    A template is a `Path` to a file, or the text of the template. None selects the default template; ``turn`` has no
    default template. Place this middleware after middleware that changes a turn's tools. Raises `ConfigError` for a
    template that cannot be read, parsed or rendered.
    """

    def __init__(
        self,
        *,
        system: str | Path | None = None,
        user: str | Path | None = None,
        turn: str | Path | None = None,
        notes: Mapping[str, ToolNotes] | None = None,
        facts: PromptFacts | None = None,
    ) -> None:
        self._notes = dict(notes or {})
        self._facts = facts or PromptFacts()
        self._system = _Source(read_template(SYSTEM) if system is None else system)
        self._user = _Source(read_template(USER) if user is None else user)
        self._turn = _Source("" if turn is None else turn)
        sources = (self._system, self._user, self._turn)
        self._by_server = {
            name for name in ("system", "user") if any({"servers", name} <= source.words for source in sources)
        }
        """Parts of each server's instructions that the templates place themselves by using ``servers``.
        ``server_prompts`` and ``server_user_prompts`` omit the parts that templates place themselves.
        """

        is_listed = any({"server_user_prompts", "mcp_server_user_prompts"} & source.words for source in sources)
        self._placed = {"system", "user"} if is_listed else self._by_server
        self._check()

    @classmethod
    def from_file(
        cls,
        folder: Annotated[Path, IN_CODE],
        *,
        system: str | None = None,
        user: str | None = None,
        turn: str | None = None,
        notes: Mapping[str, ToolNotes] = MappingProxyType({}),
        custom_instructions: str = "",
        project_name: str = "",
        constraints: tuple[str, ...] = (),
        metadata: Mapping[str, JsonValue] = MappingProxyType({}),
        model_info: Mapping[str, JsonValue] = MappingProxyType({}),
    ) -> Prompts:
        """Return the prompts for the options of an agent's file. A template that ends in ``.jinja`` is the name of a
        file in ``folder``. Any other text is the template itself. Raises `ConfigError`.
        """

        def find(template: str | None) -> str | Path | None:
            return folder / template if template is not None and template.endswith(".jinja") else template

        facts = PromptFacts(custom_instructions, project_name, constraints, metadata, model_info)
        return cls(system=find(system), user=find(user), turn=find(turn), notes=notes, facts=facts)

    def describe(self) -> object:
        return [source.text for source in (self._system, self._user, self._turn)], self._notes, self._facts

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        facts = self._collect(state, step)
        system, user, turn = (source.render(facts) for source in (self._system, self._user, self._turn))
        if system:
            step = step.instruct(system)
        if user:
            step = step.add_to_prompt(user)
        if turn:
            step = step.tell(turn)
        return replace(step, parts=tuple(map(self._drop_placed, step.parts)))

    def _drop_placed(self, part: PromptPart) -> PromptPart:
        """Return a server's part without the texts that a template already places."""
        system, user = ("" if name in self._placed else getattr(part, name) for name in ("system", "user"))
        return replace(part, system=system, user=user)

    def _collect(self, state: TurnState, step: CallModel) -> dict[str, Any]:
        """Return the variables for the templates."""
        if step.tools:
            state.values[_SHOWN] = [spec.name for spec in step.tools]
        # The last turn offers no tools. Use the tools of the earlier turns, so that the system message, and therefore
        # the provider's cache, stays the same.
        shown = state.values.get(_SHOWN)
        specs = step.tools or [spec for spec in step.agent.specs if not isinstance(shown, list) or spec.name in shown]
        agent, facts, model = step.agent, self._facts, step.model or step.agent.model
        day = datetime.fromtimestamp(state.sent_at / 1000, UTC)
        tools = [_describe_tool(spec, self._notes.get(spec.name, ToolNotes())) for spec in specs]
        by_server = self._by_server
        server_texts = [
            ("" if "system" in by_server else part.fenced, "" if "user" in by_server else part.user)
            for part in step.parts
        ]
        variables = {
            "agent": {"id": agent.id, "description": agent.description, "instruction": agent.instruct(state)},
            "model_info": {"name": model.name, **(facts.model_info or {})},
            "date": day.date().isoformat(),
            "date_string": f"{_DAYS[day.weekday()]}, {day.day} {_MONTHS[day.month - 1]} {day.year}",
            "tools": tools,
            "used_tools": list(state.calls),
            "custom_instructions": facts.custom_instructions,
            "project_name": facts.project_name,
            "constraints": list(facts.constraints),
            "metadata": dict(facts.metadata or {}),
            "servers": [_describe_server(part, tools) for part in step.parts],
            "server_prompts": list(facts.server_prompts),
            "server_user_prompts": [
                text for text in (*facts.server_user_prompts, *chain.from_iterable(server_texts)) if text
            ],
            "max_tool_calls_per_turn": agent.policy.max_tool_calls_per_turn,
            "turn": state.turn,
            "max_turns": state.turn if step.is_last else state.max_turns,
            "query": escape_text(state.trigger.text) if state.trigger is not None else "",
        }
        return variables | _add_aliases(variables)

    def _check(self) -> None:
        """Render the templates once with sample values, so that an unknown variable is reported when the agent is
        created, and not at the first message.
        """
        model: Model = ScriptedModel(lambda request: answer("sample"), name="sample")
        state = TurnState("sample", 1, 2, history=(SystemMessage(""), UserMessage("")), calls={"finish": 1})
        sample = Agent("sample", "sample", model, communication_tools())
        parts = (PromptPart("sample", ("finish",), "sample", "sample"),)
        self.prepare(state, CallModel(1, sample, tuple(state.history), (), state, parts=parts))


class _Source:
    """A template and its path. ``words`` contains the names of variables and attributes that its expressions use."""

    def __init__(self, template: str | Path) -> None:
        self._path = template if isinstance(template, Path) else None
        try:
            self.text = template.read_text(encoding="utf-8") if isinstance(template, Path) else template
            self._template = _ENVIRONMENT.from_string(self.text)
            self.words = _find_names(_ENVIRONMENT.parse(self.text))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the prompt template cannot be read: {error}", path=self._path) from error
        except TemplateError as error:
            raise ConfigError(f"the prompt template is invalid: {error}", path=self._path) from error

    def render(self, facts: Mapping[str, object]) -> str:
        try:
            return self._template.render(facts).strip()
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ConfigError(f"the prompt template cannot be rendered: {error}", path=self._path) from error


def _add_aliases(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return aliases of the variables, under names that templates for single-user orchestrators commonly use."""
    described = [
        {
            **{name: tool[name] for name in ("name", "display_name")},
            **{f"tool_{name}": tool[name] for name in ("description", "system_prompt", "user_prompt")},
            "tool_format_information_for_system_prompt": tool["format"],
        }
        for tool in variables["tools"]
    ]
    return {
        "tool_descriptions": described,
        "tool_descriptions_with_user_prompts": [
            description for description in described if description["tool_user_prompt"]
        ],
        "mcp_server_system_prompts": variables["server_prompts"],
        "mcp_server_user_prompts": variables["server_user_prompts"],
        "max_tools_per_iteration": variables["max_tool_calls_per_turn"],
        "max_loop_iterations": variables["max_turns"],
        "current_iteration": variables["turn"],
    }


def _describe_tool(spec: ToolSpec, notes: ToolNotes) -> dict[str, str]:
    fields = {**asdict(notes), "display_name": notes.display_name or spec.name}
    return {"name": spec.name, "description": spec.description, **fields}


def _describe_server(part: PromptPart, tools: Sequence[Mapping[str, str]]) -> dict[str, object]:
    own = [tool for tool in tools if tool["name"] in part.tools]
    return {"name": part.name, "tools": own, "system": part.fenced, "user": part.user}


def _find_names(template: nodes.Template) -> frozenset[str]:
    names = {node.name for node in template.find_all(nodes.Name)}
    read = {node.attr for node in template.find_all(nodes.Getattr)}
    constants = {
        node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)
    }  # names that a template uses in [...] and in the filter map
    return frozenset(names | read | constants)


_ENVIRONMENT = BoundedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
