"""Agents in YAML: read strictly, then built into runners.

A file has one agent (a mapping with ``id``) or several (a list under ``agents``, whose items are agents or paths of
agent files)::

    id: ann
    description: Adds numbers
    instruction: You add numbers, with your tools only.
    model:
      openai: {name: gpt-4o-mini, tool_mode: native}
    tools: [mytools:add]
    channels: [dev]
    limits: {max_turns: 6}
    middleware: [{budget: {tokens: {day: 100000}}}]

`load_agents` reads and checks the file. `build_runner` imports tools and creates the model. An item of ``middleware``
names a key of `FEATURES` with its options, or ``custom`` with a ``module:callable`` that returns a `Middleware`. The
first item is the outermost middleware. An unknown key or a wrong value raises `ConfigError` with file, line and the
nearest known key. This module opens no connections.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Unpack
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    create_model,
    field_validator,
    model_validator,
)

from roundelay.network.config import YamlNode, bind, load_yaml
from roundelay.network.credentials import describe_variable, read_secret
from roundelay.network.errors import ConfigError
from roundelay.network.frames import is_id
from roundelay.network.home import is_loopback
from roundelay.network.yaml import show_value

from .agent import check_needs
from .approval_rule import ApprovalRule, ApprovalsNeeded, Approver, Approvers
from .events import OnEvent
from .features.attachments import Attachments, show_images
from .features.budget import Budget
from .features.context_engine import ContextEngine
from .features.data_policy import DataPolicy
from .features.evaluations import Evaluations
from .features.few_shot import FewShot
from .features.forced_tools import ForcedTools
from .features.fragments import Fragments
from .features.keep_results import KeepResults
from .features.long_results import LongResults
from .features.many_results import ManyResults
from .features.mcp_servers import McpServers
from .features.memory import Memory
from .features.postprocessors import Postprocessors
from .features.prompt_budget import PromptBudget
from .features.prompts import Prompts
from .features.references import References
from .features.registry import ToolRegistry
from .features.shown_results import ShownResults
from .features.structured import StructuredAnswer
from .import_path import import_callable
from .inbox import ReactTo, Visibility
from .middleware import Middleware
from .model_choice import LocalChoice as LocalChoice  # documented here (docs/api.md)
from .model_choice import ModelChoice as ModelChoice
from .model_choice import OpenAIChoice as OpenAIChoice
from .models.model import Model, ModelError
from .models.tape import NamedModel
from .options import Seconds, Strict, Text, VariableName, form_of, make_from, read_form
from .policy import (
    ALL,
    APPROVALS,
    AgentLimits,
    AgentPolicy,
    KeptRecords,
    MessageFilter,
    OnNewMessage,
    OnText,
    PromptForm,
)
from .prompt import ConversationPrompt
from .runner import RunnerOptions
from .simple import SimpleAgentRunner
from .tools import Tool, load_tool
from .values import ToolError


def trace(content: bool = False) -> Middleware:
    """Return tracing middleware. With ``content``, spans also contain prompts, replies, arguments and results."""
    from .features.tracing import Tracing  # needs an extra that may not be installed

    return Tracing(content=content)


def load_custom(spec: str) -> Middleware:
    """Return the middleware that ``module:callable`` creates. Raises `ConfigError`."""
    make = import_callable(spec, "middleware")
    try:
        # Call the function now, so that an error names the file and the line, and does not first appear when a person
        # sends a message.
        made = make()
    except Exception as error:  # the user's code may raise any exception
        raise ConfigError(f"the middleware {spec!r} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(made, Middleware):
        raise ConfigError(f"the middleware {spec!r} returns a {type(made).__name__} and must return a Middleware")
    return made


FEATURES: Mapping[str, Callable[..., Middleware]] = {
    "attachments": Attachments,
    "budget": Budget,
    "context": ContextEngine,
    "long_results": LongResults,
    "many_results": ManyResults,
    "prompt_budget": PromptBudget,
    "data_policy": DataPolicy.from_file,
    "evaluations": Evaluations.from_file,
    "few_shot": FewShot,
    "forced_tools": ForcedTools,
    "fragments": Fragments,
    "images": show_images,
    "keep_results": KeepResults,
    "mcp": McpServers,
    "memory": Memory,
    "postprocessors": Postprocessors.from_file,
    "prompts": Prompts.from_file,
    "references": References,
    "registry": ToolRegistry.from_file,
    "shown_results": ShownResults,
    "structured": StructuredAnswer.from_file,
    "tracing": trace,
}
"""Constructor of each kind of ``middleware`` item. The parameters are the options in a file (`options`)."""


class _Choice(Strict):
    """One item of ``middleware``."""

    custom: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Refuse two keys in one item: the order of middleware matters, and the order of keys would be unclear.
        if len(self.model_fields_set) != 1:
            raise ValueError(f"must be exactly one of {', '.join(type(self).model_fields)}")
        if getattr(self, self.name) is None:
            # `budget:` without a value is null in YAML. The author may have meant the defaults or may have forgotten
            # the options, so refuse the item.
            wanted = "module:callable" if self.name == "custom" else "{}"
            raise ValueError(f"has no options: write {self.name}: {wanted}")
        return self

    @property
    def name(self) -> str:
        [name] = self.model_fields_set
        return name


_FORMS: dict[str, Any] = {name: (form_of(make) | None, None) for name, make in FEATURES.items()}


class MiddlewareChoice(create_model("Choice", __base__=_Choice, **_FORMS)):  # type: ignore[misc]  # a base made here
    """One item of the ``middleware`` list in a file: ``custom``, or a key of `FEATURES` with its options."""


SEVERAL = frozenset(
    {"custom", "attachments", "data_policy", "evaluations", "few_shot", "images", "mcp", "postprocessors", "prompts"}
)
"""Kinds of middleware that may occur several times in one list, for different models, servers or checks. A second item
of any other kind would process the output of the first item.
"""


def check_place(choice: MiddlewareChoice, before: Sequence[MiddlewareChoice]) -> None:
    """Refuse an item that may not follow the items before it. Raises `ConfigError`."""
    names = [it.name for it in before]
    if choice.name not in SEVERAL and choice.name in names:
        raise ConfigError(f"{choice.name} is already in the list, as item {names.index(choice.name) + 1}: keep one")
    # An outer `budget` would see one model call, while `forced_tools` may send several requests inside this call.
    if choice.name == "forced_tools" and "budget" in names:
        raise ConfigError(
            "budget precedes forced_tools, so it would reserve one request for several: move budget after forced_tools"
        )


def build_middleware(choice: MiddlewareChoice, folder: Path) -> Middleware:
    """Build the middleware of an item. ``folder`` contains the item's file. Raises `ConfigError`."""
    if choice.custom is not None:
        return load_custom(choice.custom)
    make = FEATURES[choice.name]
    # Pass the folder only to features that read files. Other features do not have the parameter ``folder``.
    beside = {"folder": folder} if "folder" in signature(make).parameters else {}
    return make_from(make, getattr(choice, choice.name), **beside)


def _check_id(text: str) -> str:
    if not is_id(text):
        raise ValueError(
            f"must be lower case letters, digits, '.', '_' and '-', a letter or digit first, not {show_value(text)}"
        )
    return text


_Id = Annotated[str, AfterValidator(_check_id)]


class ElsewhereChoice(Strict):
    """A remote agent. ``url`` is the base address of the agent's A2A card. The token is in an environment variable or
    in a file (relative to the agent's file), and never in the agent's file itself. The token is sent in ``header``, as
    a bearer token if the header is `Authorization`.
    """

    url: Text
    token_env: VariableName | None = None
    token_file: Path | None = None
    header: Text = "Authorization"

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        # Refuse a password in the address, because logs and errors show the address.
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError("url must be http://HOST or https://HOST, without a user name or a password")
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("must be one of token_env and token_file")
        # On loopback, the token does not leave the machine, so http is allowed.
        if parts.scheme == "http" and (self.token_env or self.token_file) and not is_loopback(parts.hostname):
            raise ValueError("url must be https://, because others could read the token on an http connection")
        return self


NOTHING = ModelChoice(rules=[])
"""Placeholder for the model of a remote agent or of another framework's agent, which calls its own model."""


class ToolChoice(Strict):
    """A tool in an agent's file, with the approval rule for its calls. Omitted fields come from the tool or agent."""

    tool: Text
    needs_approval: bool | None = None
    approvers: list[Approver] = Field(default_factory=list)
    approvals_needed: ApprovalsNeeded | None = None
    escalate_to: list[Approver] = Field(default_factory=list)
    requester_may_approve: bool | None = None
    approval_timeout_s: Seconds | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        rule = self.rule
        # Do not guess which part is the mistake: a wrong guess could run a tool that should be protected.
        if self.needs_approval is False and rule != ApprovalRule():
            raise ValueError("sets needs_approval to false, but states who approves: remove one of the two")
        return self

    @property
    def rule(self) -> ApprovalRule:
        """The part of the approval rule that this item of the file states."""
        return ApprovalRule(
            tuple(self.approvers),
            self.approvals_needed,
            tuple(self.escalate_to),
            self.requester_may_approve,
            self.approval_timeout_s,
        )

    def load(self) -> Tool:
        """Import the tool. Raises `ToolError`."""
        loaded, rule = load_tool(self.tool), self.rule
        # Include only fields that the item states. An empty value must not erase the rule in the tool's own code.
        given = {field.name: value for field in fields(rule) if (value := getattr(rule, field.name)) not in (None, ())}
        # If the item states any part of a rule, require approval. An author who names approvers expects that they are
        # asked.
        needs = loaded.needs_approval if self.needs_approval is None else self.needs_approval
        return replace(loaded, needs_approval=needs or bool(given), approval=replace(loaded.approval, **given))


class AgentSpec(Strict):
    """Definition of one agent in a file. ``template`` and the files of ``model`` are relative to the agent's file."""

    id: _Id
    instruction: Text = ""
    model: ModelChoice = NOTHING
    a2a: ElsewhereChoice | None = None
    """Remote agent that takes the place of an instruction and a model."""

    adapter: Text | None = None
    """Function ``module:function`` that creates an agent of another framework. The created agent takes the place of an
    instruction and a model. The function receives an id and `RunnerOptions`, and returns an agent of
    `roundelay.adapters`.
    """

    description: str = ""
    tags: tuple[str, ...] = ()
    tools: tuple[
        Annotated[ToolChoice, BeforeValidator(lambda it: {"tool": it} if isinstance(it, str) else it)], ...
    ] = ()
    network_tools: tuple[Text, ...] | None = None
    """Names or patterns that select from the common tools and the mods' operations. None selects all of them."""

    channels: tuple[_Id, ...] = ()
    react_to: ReactTo = "mentions"
    ignored_sender_ids: tuple[Text, ...] = ()
    visibility: Visibility = "people"
    on_text: OnText = "auto"
    on_new_message: OnNewMessage = "queue"
    prompt: PromptForm = "lean"
    template: Path | None = None
    message_filter: MessageFilter = ALL
    keep: KeptRecords = KeptRecords()
    shows_standing: bool = True
    limits: AgentLimits = AgentLimits()
    approvers: Approvers = ()
    approvals_needed: ApprovalsNeeded = 1
    escalate_to: Approvers = ()
    requester_may_approve: bool = False
    middleware: tuple[MiddlewareChoice, ...] = ()
    process: Literal["shared", "own"] = "shared"
    """Process in which `roundelay up` runs the agent: one process for all agents of a folder, or a separate process."""

    @field_validator("a2a", mode="before")
    @classmethod
    def _read_address(cls, given: object) -> object:
        return {"url": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = {"instruction", "model"}
        by = "a2a" if self.a2a is not None else "adapter" if self.adapter is not None else ""
        if not by and (missing := sorted(own - self.model_fields_set)):
            told = "a2a (the address of a remote agent), or adapter (a function that creates another framework's agent)"
            raise ValueError(f"needs {' and '.join(missing)}, or {told}")
        own |= {"tools", "network_tools", "template", "middleware"}
        if by == "a2a":
            own.add("adapter")
        if by and (extra := sorted(own & self.model_fields_set)):
            raise ValueError(f"has {by}, so it cannot have {', '.join(extra)}: the other agent defines these itself")
        return self

    _node: YamlNode = PrivateAttr(default_factory=lambda: YamlNode(None, Path(), 1))

    @property
    def path(self) -> Path:
        """File that defines the agent."""
        return self._node.path

    @property
    def line(self) -> int:
        """Line of the file where the agent begins."""
        return self._node.line

    def find_node(self, *keys: str) -> YamlNode:
        """Return the file position of a key, or of its nearest parent that the file contains. Errors about the value of
        the key report this position.
        """
        node = self._node
        for key in keys:
            # A default value is not in the file. Report the nearest parent, where the user can add the key.
            if not isinstance(node.value, dict) or key not in node.value:
                break
            node = node.value[key]
        return node


def load_agents(source: Path | YamlNode | Iterable[YamlNode]) -> list[AgentSpec]:
    """Read the agents of a file, or of some nodes of a file. A node is an item under ``agents``: an agent, or the path
    of an agent file.

    Raises `ConfigError` for an invalid file and for duplicate ids.
    """
    if isinstance(source, Path):
        specs = _read_file(source, ())
    elif isinstance(source, YamlNode):
        specs = _read_item(source, ())
    else:
        specs = [spec for node in source for spec in _read_item(node, ())]
    # Check ids across all files: two runners with the same id would repeatedly take over each other's session.
    places: dict[str, AgentSpec] = {}
    for spec in specs:
        first = places.setdefault(spec.id, spec)
        if first is not spec:
            raise spec.find_node("id").error(f'the agent "{spec.id}" is already defined in {first.path}:{first.line}')
    return specs


def build_runner(
    spec: AgentSpec,
    *,
    url: str | None = None,
    token: str | None = None,
    on_event: OnEvent | None = None,
    model: Model | None = None,
) -> SimpleAgentRunner:
    """Build the runner of an agent. This imports the tools, and so executes their modules. Raises `ConfigError` with
    the position in the file.

    ``model`` replaces the model of the file. The file's folder is appended to the import path, so that tools in the
    same folder are found.
    """
    folder = str(spec.path.resolve().parent)
    if folder not in sys.path:
        # Append the folder: a file next to the agent must not hide an installed package of the same name.
        sys.path.append(folder)
    template = spec.path.parent / spec.template if spec.template is not None else None
    if template is not None:
        try:
            # Check the template here, where an error can name its line in the agent's file.
            ConversationPrompt(template)
        except (ConfigError, OSError, ValueError) as error:
            raise spec.find_node("template").error(f"agent {spec.id}: {error}") from error
    if model is None and (spec.a2a is not None or spec.adapter is not None):
        # A ``model`` argument replaces the remote agent: tests and replays must not contact another machine.
        return _build_adapted(spec, url=url, token=token, on_event=on_event)
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
            ignored_sender_ids=spec.ignored_sender_ids,
            visibility=spec.visibility,
            policy=_build_policy(spec),
            middleware=_build_middleware(spec),
            # A remote agent does not use the network's tools, so its replay must not offer them to the model.
            network_tools=spec.network_tools if spec.a2a is None else (),
            template=template,
            url=url,
            token=token,
            on_event=on_event,
            # The model was created only for this runner, so the runner closes it at the end.
            owns_model=True,
        )
    except ToolError as error:  # two tools with the same name
        raise spec.find_node("tools").error(f"agent {spec.id}: {error}") from error
    except ValueError as error:  # checks across several keys: for example, nudge needs finish
        raise spec.find_node("network_tools").error(str(error)) from error


def _build_policy(spec: AgentSpec) -> AgentPolicy:
    return AgentPolicy(
        on_text=spec.on_text,
        on_new_message=spec.on_new_message,
        prompt=spec.prompt,
        message_filter=spec.message_filter,
        keep=spec.keep,
        shows_standing=spec.shows_standing,
        **{name: getattr(spec, name) for name in APPROVALS},
        **{name: value for name, value in read_form(spec.limits).items() if value is not None},
    )


def _build_adapted(spec: AgentSpec, **more: Unpack[RunnerOptions]) -> SimpleAgentRunner:
    """Build the runner of a remote agent (which needs the extra ``interop``) or of another framework's agent."""
    try:
        options = RunnerOptions(
            description=spec.description,
            tags=spec.tags,
            channels=spec.channels,
            react_to=spec.react_to,
            ignored_sender_ids=spec.ignored_sender_ids,
            visibility=spec.visibility,
            policy=_build_policy(spec),
            **more,
        )
        return _make_elsewhere(spec, spec.a2a, options) if spec.a2a is not None else _make_adapted(spec, options)
    except (ConfigError, OSError, ValueError) as error:
        raise spec.find_node("a2a" if spec.a2a is not None else "adapter").error(f"agent {spec.id}: {error}") from error


def _make_elsewhere(spec: AgentSpec, choice: ElsewhereChoice, options: RunnerOptions) -> SimpleAgentRunner:
    make = import_callable("roundelay.adapters.a2a:A2AAgent", "adapter")
    token = _read_token(spec, choice)
    # Send the bare token in any other header, such as a header for an API key.
    told = f"Bearer {token}" if choice.header.lower() == "authorization" else token
    made: SimpleAgentRunner = make(spec.id, choice.url, headers={choice.header: told} if token else {}, **options)
    return made


def _make_adapted(spec: AgentSpec, options: RunnerOptions) -> SimpleAgentRunner:
    make = import_callable(str(spec.adapter), "adapter")
    try:
        made = make(spec.id, **options)
    except Exception as error:  # the user's code may raise any exception
        raise ConfigError(f"the adapter {spec.adapter!r} fails ({type(error).__name__}: {error})") from error
    if not isinstance(made, SimpleAgentRunner):
        kind = type(made).__name__
        raise ConfigError(f"the adapter {spec.adapter!r} returns a {kind}, not an agent of roundelay.adapters")
    # With another id, the agent would join as another participant, and its token would belong to the wrong id.
    if made.agent_id != spec.id:
        raise ConfigError(
            f"the adapter {spec.adapter!r} returns the agent {made.agent_id}: pass on the id that it receives"
        )
    return made


def _read_token(spec: AgentSpec, choice: ElsewhereChoice) -> str:
    if choice.token_env is not None:
        source, token = f"the variable {describe_variable(choice.token_env)}", os.environ.get(choice.token_env, "")
    elif choice.token_file is not None:
        # The path is relative to the agent's file, because a node may be started from any folder.
        source, token = f"the file {choice.token_file}", (spec.path.parent / choice.token_file).read_text("utf-8")
    else:
        return ""
    token = read_secret(token, source)
    # Fail at the start. The remote agent would refuse each message without naming the variable.
    if not token:
        raise ConfigError(f"{source} is missing or empty, and must contain the token")
    return token


def _read_file(path: Path, outer: tuple[Path, ...]) -> list[AgentSpec]:
    # Compare resolved paths, because a symbolic link to an outer file is also a circular reference.
    if path.resolve() in outer:
        raise ConfigError("the agent files refer to each other in a circle", path=path)
    outer = (*outer, path.resolve())
    root = load_yaml(path)
    if not isinstance(root.value, dict) or "agents" not in root.value:
        return _read_item(root, outer)
    for key, node in root.value.items():
        if key != "agents":
            raise node.error(f'unknown key "{key}" beside "agents": a file contains one agent, or a list of agents')
    listed = root.value["agents"]
    if not isinstance(listed.value, list) or not listed.value:
        raise listed.error('"agents" must be a list in which each item is an agent or the path of an agent file')
    return [spec for item in listed.value for spec in _read_item(item, outer)]


def _read_item(node: YamlNode, outer: tuple[Path, ...]) -> list[AgentSpec]:
    if isinstance(node.value, str):
        path = node.path.parent / node.value
        if not path.is_file():
            raise node.error(f"the agent file {path} does not exist")
        return _read_file(path, outer)
    spec = bind(AgentSpec, node)
    # Keep the node, so that later errors, when tools are imported and the model is built, can name a line.
    spec._node = node
    return [spec]


def _load_tools(spec: AgentSpec) -> list[Tool]:
    node = spec.find_node("tools")
    # Without the key ``tools``, the file has no list of tools. In this case, errors name the line of the agent.
    lines = node.value if isinstance(node.value, list) else [node] * len(spec.tools)
    tools = []
    for name, line in zip(spec.tools, lines, strict=True):
        try:
            tools.append(name.load())
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
    try:
        # Check the needs of items after all items have been built, because an item may need a later item of the list.
        check_needs(spec.id, made)
    except ConfigError as error:
        raise node.error(error.message) from error
    return made


def _build_model(spec: AgentSpec) -> Model:
    try:
        return spec.model.build(spec.path.parent)
    except (ModelError, OSError, ValueError) as error:
        raise spec.find_node("model").error(f"agent {spec.id}: {error}") from error


def name_model(spec: AgentSpec) -> NamedModel:
    """Return the name and settings of the agent's model without building the model, so that a replay needs neither API
    keys nor weights.
    """
    name, settings = spec.model.describe(spec.path.parent)
    return NamedModel(name if spec.a2a is None else "a2a", settings)
