"""Agents written in YAML: read strictly, then built into runners.

One agent to a file (a mapping with ``id``), or several (a list under ``agents``, whose items are agents or paths of
agent files)::

    id: ann
    description: Adds numbers
    instruction: You add numbers, with your tools only.
    model:
      openai: {name: gpt-4o-mini, tool_mode: native}
    tools: [mytools:add]
    channels: [dev]
    limits: {max_turns: 6}

Stands before everything that runs: `load_agents` reads and checks, `build_runner` imports tools and makes the model. An
unknown key or a wrong value is a `ConfigError` with file, line and the nearest known key. It never connects to
anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, model_validator

from roundelay.network.config import YamlNode, bind, load_yaml
from roundelay.network.errors import ConfigError
from roundelay.network.frames import is_id
from roundelay.network.yaml_nodes import show_value

from .arguments import ToolError
from .events import OnEvent
from .inbox import ReactTo, Visibility
from .message_filter import MAX_PER_THREAD, MessageFilter
from .middleware import Middleware
from .models.fallback import FallbackModel
from .models.model import Model, ModelError
from .models.script_rules import Rule, RuleSet, load_rules
from .models.scripted import ScriptedModel, load_script
from .models.tape import NamedModel, TapeModel
from .policy import MAX_COUNT, MAX_THREADS, AgentPolicy, OnNewMessage, OnText
from .prompt import ConversationPrompt
from .simple import SimpleAgentRunner
from .team_middleware import MiddlewareChoice, build_middleware, check_place
from .tools import Tool, load_tool

_Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
_Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _check_id(text: str) -> str:
    if not is_id(text):
        raise ValueError(
            f"must be lower case letters, digits, '.', '_' and '-', a letter or digit first, not {show_value(text)}"
        )
    return text


_Id = Annotated[str, AfterValidator(_check_id)]
_Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenAIChoice(_Strict):
    """A model on an OpenAI-compatible server. ``settings`` go into each request as they are."""

    name: _Text
    base_url: _Text | None = None
    api_key_env: _Text = "OPENAI_API_KEY"
    tool_mode: Literal["native", "json_schema"] = "native"
    stream: bool = False
    settings: dict[str, JsonValue] = {}


class LocalChoice(_Strict):
    """The small model on this machine's CPU, or other ``weights`` (a GGUF file)."""

    weights: Path | None = None
    context_tokens: _Count = 8192


class ModelChoice(_Strict):
    """Which model: exactly one of the five. ``script`` is a file of rules or ``module:function``; ``rules`` are those
    rules, inline; ``replay`` is a tape, the recorded replies of a model."""

    openai: OpenAIChoice | None = None
    script: _Text | None = None
    rules: list[Rule] | None = None
    local: LocalChoice | None = None
    replay: Path | None = None
    fallback: ModelChoice | None = None
    """Beside the one chosen: what is asked when that is down, busy or out of credit."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(choice is not None for choice in (self.openai, self.script, self.rules, self.local, self.replay)) != 1:
            raise ValueError("must be exactly one of openai, script, rules, local, replay")
        return self


class AgentLimits(_Strict):
    """The limits of `AgentPolicy` that a file may set; what is left out keeps its default."""

    max_turns: _Count | None = None
    max_tool_calls_per_turn: _Count | None = None
    max_tool_calls: _Count | None = None
    uncounted_tools: tuple[_Text, ...] | None = None
    max_corrections: Annotated[int, Field(ge=0, le=100)] | None = None
    tool_timeout_s: _Seconds | None = None
    approval_timeout_s: Annotated[float, Field(gt=0, le=366 * 86_400)] | None = None
    model_timeout_s: _Seconds | None = None
    hook_timeout_s: _Seconds | None = None
    model_attempts: _Count | None = None
    hub_attempts: _Count | None = None
    max_same_calls: _Count | None = None
    max_result_chars: _Count | None = None
    max_depth: _Count | None = None
    max_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = None
    per_thread: Annotated[int, Field(ge=1, le=MAX_PER_THREAD)] | None = None
    max_parallel_reactions: _Count | None = None


class FilterChoice(_Strict):
    """The fields of `MessageFilter`."""

    kinds: tuple[Literal["direct", "broadcast", "channel", "mod"], ...] = ()
    senders: tuple[_Text, ...] = ()
    exclude_senders: tuple[_Text, ...] = ()
    per_thread: dict[_Text, Annotated[int, Field(ge=0, le=MAX_PER_THREAD)]] = {}


class AgentSpec(_Strict):
    """One agent as its file says. ``template`` and files of ``model`` are relative to that file."""

    id: _Id
    instruction: _Text
    model: ModelChoice
    description: str = ""
    tags: tuple[str, ...] = ()
    tools: tuple[_Text, ...] = ()
    channels: tuple[_Id, ...] = ()
    react_to: ReactTo = "mentions"
    visibility: Visibility = "people"
    on_text: OnText = "auto"
    on_new_message: OnNewMessage = "queue"
    template: Path | None = None
    message_filter: FilterChoice = FilterChoice()
    limits: AgentLimits = AgentLimits()
    middleware: tuple[MiddlewareChoice, ...] = ()

    _node: YamlNode = PrivateAttr(default_factory=lambda: YamlNode(None, Path(), 1))

    @property
    def path(self) -> Path:
        """The file that the agent stands in."""
        return self._node.path

    @property
    def line(self) -> int:
        """Where in the file it begins."""
        return self._node.line

    def find_node(self, *keys: str) -> YamlNode:
        """Give the place of a key, as far down as the file has it: where an error about its value belongs."""
        node = self._node
        for key in keys:
            if not isinstance(node.value, dict) or key not in node.value:
                break
            node = node.value[key]
        return node


def load_agents(source: Path | YamlNode | Iterable[YamlNode]) -> list[AgentSpec]:
    """Read the agents of a file, or of nodes of one (an item under ``agents``: an agent, or the path of an agent file).

    Raises `ConfigError`, for an id that stands twice too.
    """
    if isinstance(source, Path):
        specs = _read_file(source, ())
    elif isinstance(source, YamlNode):
        specs = _read_item(source, ())
    else:
        specs = [spec for node in source for spec in _read_item(node, ())]
    places: dict[str, AgentSpec] = {}
    for spec in specs:
        first = places.setdefault(spec.id, spec)
        if first is not spec:
            raise spec.find_node("id").error(f'the agent "{spec.id}" stands in {first.path}:{first.line} already')
    return specs


def build_runner(
    spec: AgentSpec,
    *,
    url: str | None = None,
    token: str | None = None,
    on_event: OnEvent | None = None,
    model: Model | None = None,
) -> SimpleAgentRunner:
    """Build the runner of an agent; importing its tools runs their modules. Raises `ConfigError` with the place in the
    file.

    ``model`` takes the place of the one that the file names.

    The file's folder is added to the end of the import path, so that tools beside it are found.
    """
    folder = str(spec.path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    template = spec.path.parent / spec.template if spec.template is not None else None
    if template is not None:
        try:
            ConversationPrompt(template)
        except (ConfigError, OSError, ValueError) as error:
            raise spec.find_node("template").error(f"agent {spec.id}: {error}") from error
    try:
        return SimpleAgentRunner(
            spec.id,
            instruction=spec.instruction,
            model=model if model is not None else _build_model(spec),
            tools=_load_tools(spec),
            description=spec.description,
            tags=spec.tags,
            channels=spec.channels,
            react_to=spec.react_to,
            visibility=spec.visibility,
            policy=AgentPolicy(
                on_text=spec.on_text,
                on_new_message=spec.on_new_message,
                message_filter=MessageFilter(**spec.message_filter.model_dump()),
                **spec.limits.model_dump(exclude_none=True),
            ),
            middleware=_build_middleware(spec),
            template=template,
            url=url,
            token=token,
            on_event=on_event,
            owns_model=True,
        )
    except ToolError as error:  # two tools of one name
        raise spec.find_node("tools").error(f"agent {spec.id}: {error}") from error


def _read_file(path: Path, outer: tuple[Path, ...]) -> list[AgentSpec]:
    if path.resolve() in outer:
        raise ConfigError("the agent files name each other in a circle", path=path)
    outer = (*outer, path.resolve())
    root = load_yaml(path)
    if not isinstance(root.value, dict) or "agents" not in root.value:
        return _read_item(root, outer)
    for key, node in root.value.items():
        if key != "agents":
            raise node.error(f'unknown key "{key}" beside "agents"; a file holds one agent, or a list of them')
    listed = root.value["agents"]
    if not isinstance(listed.value, list) or not listed.value:
        raise listed.error('"agents" must be a list: each item an agent, or the path of an agent file')
    return [spec for item in listed.value for spec in _read_item(item, outer)]


def _read_item(node: YamlNode, outer: tuple[Path, ...]) -> list[AgentSpec]:
    if isinstance(node.value, str):
        path = node.path.parent / node.value
        if not path.is_file():
            raise node.error(f"the agent file {path} does not exist")
        return _read_file(path, outer)
    spec = bind(AgentSpec, node)
    spec._node = node
    return [spec]


def _load_tools(spec: AgentSpec) -> list[Tool]:
    node = spec.find_node("tools")
    lines = node.value if isinstance(node.value, list) else [node] * len(spec.tools)
    tools = []
    for name, line in zip(spec.tools, lines, strict=True):
        try:
            tools.append(load_tool(name))
        except ToolError as error:
            raise line.error(f"agent {spec.id}: {error}") from error
    return tools


def _build_middleware(spec: AgentSpec) -> list[Middleware]:
    node = spec.find_node("middleware")
    lines = node.value if isinstance(node.value, list) else [node] * len(spec.middleware)
    made = []
    for place, (choice, line) in enumerate(zip(spec.middleware, lines, strict=True)):
        try:
            check_place(choice, spec.middleware[:place])
            made.append(build_middleware(choice, spec.path.parent))
        except (ConfigError, OSError) as error:
            raise line.error(f"agent {spec.id}: {error}") from error
    return made


def _build_model(spec: AgentSpec) -> Model:
    try:
        models = [_build_choice(spec, choice) for choice in _list_choices(spec)]
        return FallbackModel(*models) if len(models) > 1 else models[0]
    except (ModelError, OSError, ValueError) as error:
        raise spec.find_node("model").error(f"agent {spec.id}: {error}") from error


def name_model(spec: AgentSpec) -> NamedModel:
    """Give what the agent's model is called and how it is set, and never ask it: for a replay, without keys and
    weights."""
    choices = _list_choices(spec)
    names = [_name_choice(spec, choice) for choice in choices]
    settings = spec.model.openai.settings if spec.model.openai is not None and len(choices) == 1 else {}
    return NamedModel(" or ".join(names), settings)


def _list_choices(spec: AgentSpec) -> list[ModelChoice]:
    """Give the model that is asked first, and those that are asked when it fails."""
    choices = [spec.model]
    while (fallback := choices[-1].fallback) is not None:
        choices.append(fallback)
    return choices


def _name_choice(spec: AgentSpec, choice: ModelChoice) -> str:
    if choice.openai is not None:
        return choice.openai.name
    if choice.local is not None:
        return "local"
    if choice.replay is not None:
        return str(spec.path.parent / choice.replay)
    return choice.script or "rules"


def _build_choice(spec: AgentSpec, choice: ModelChoice) -> Model:
    if choice.openai is not None:
        from .models.openai_model import OpenAIModel  # only here: it loads the SDK

        it = choice.openai
        return OpenAIModel(
            it.name,
            base_url=it.base_url,
            api_key_env=it.api_key_env,
            tool_mode=it.tool_mode,
            stream=it.stream,
            settings=it.settings,
        )
    if choice.local is not None:
        from .models.local import LocalModel  # likewise

        weights = spec.path.parent / choice.local.weights if choice.local.weights is not None else None
        return LocalModel(weights, context_tokens=choice.local.context_tokens)
    if choice.replay is not None:
        return TapeModel(spec.path.parent / choice.replay)
    if choice.script is None:
        return ScriptedModel(RuleSet(rules=choice.rules or []).answer, name="rules")
    if choice.script.endswith((".yaml", ".yml")):
        return ScriptedModel(load_rules(spec.path.parent / choice.script).answer, name=choice.script)
    return ScriptedModel(load_script(choice.script), name=choice.script)
