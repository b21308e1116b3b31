r"""A model without a provider: a script (a callable, or rules in YAML) reads the request and chooses the actions.

Use a scripted model for tests, demos and YAML agents without a provider. The same request must always get the same
answer, because a resumed reaction repeats requests whose replies it had not recorded. Therefore a script must make its
decisions only from the request (`prompt_view.read_prompt`), and never from a counter or the time. The only IO of this
module is reading rule files::

    rules:
    - when: {from: mia, regex: '(?P<a>\d+) times (?P<b>\d+)'}
      do:
        - tool: multiply
          args: {a: '{{ match.a }}', b: '{{ match.b }}'}
    - when: {after: multiply}
      do:
        - send: {to: '{{ sender }}', text: 'It is {{ result }}.'}
        - finish: answered

The first matching rule determines the actions of a turn. A rule without ``turn`` or ``after`` matches only the first
turn. If no rule matches, the reaction finishes. Texts are jinja templates with variables from the agent's prompt
(`PromptView`). The text of messages is data in these templates and is never executed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, assert_never

from jinja2 import StrictUndefined, TemplateError
from pydantic import AfterValidator, Field, JsonValue, model_validator

from roundelay.agents.bounded_templates import BoundedEnvironment
from roundelay.agents.import_path import import_callable
from roundelay.agents.options import Strict
from roundelay.agents.patterns import PatternTimedOut, compile_pattern
from roundelay.network.config import bind, load_yaml
from roundelay.network.errors import ConfigError

from .model import (
    AssistantMessage,
    ModelDelta,
    ModelError,
    ModelReply,
    ModelRequest,
    OnDelta,
    ToolCall,
    Usage,
    derive_call_id,
)
from .prompt_view import PromptView, read_prompt


@dataclass(frozen=True, slots=True)
class Say:
    """Script action that adds text to the model's reply."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Script action that adds a tool call to the reply. If ``arguments`` is text, it is sent unchanged, even if it is
    not valid JSON.
    """

    tool: str
    arguments: Mapping[str, object] | str = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Think:
    """Script action that adds reasoning to the reply. Reasoning is streamed but not stored."""

    text: str


Action = Say | Call | Think
"""One action of a script in a turn. Functions such as `say`, `call` and `think` create actions."""

Answer = ModelReply | Action | str | Iterable[Action] | None
"""Return value of a script: a complete reply, one action, several actions of one turn, text, or None for an empty
reply.
"""

Script = Callable[[ModelRequest], Answer | Awaitable[Answer]]


def say(text: str) -> Action:
    """Return an action that answers with text."""
    return Say(text)


def think(text: str) -> Action:
    """Return an action that streams reasoning before the rest of the reply."""
    return Think(text)


def call(tool: str, /, **arguments: object) -> Action:
    """Return an action that calls a tool."""
    return Call(tool, arguments)


def send(to: str, text: str) -> Action:
    """Return an action that sends a direct message to a participant."""
    return Call("send_text_message", {"target_agent_id": to, "text": text})


def broadcast(text: str) -> Action:
    """Return an action that sends a message to everyone."""
    return Call("broadcast_text_message", {"text": text})


def finish(reason: str = "done") -> Action:
    """Return an action that ends the reaction."""
    return Call("finish", {"reason": reason})


class ScriptedModel:
    """Model that answers requests with a script, which may be a sync or async function.

    An exception of the script becomes a `ModelError` that is not retried. A `ModelError` of the script is raised
    unchanged. Usage is estimated at four characters per token, so that budgets can be tried without a provider.
    """

    def __init__(self, script: Script, *, name: str = "scripted") -> None:
        self.name = name
        self._script = script

    def named(self, name: str) -> ScriptedModel:
        """Return a model with another name and the same script."""
        return ScriptedModel(self._script, name=name)

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Call the script once. Send the script's reasoning as one delta and its text as another."""
        try:
            answer = self._script(request)
            if inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, ModelReply):
                reply, thoughts = answer, ""
            else:
                reply, thoughts = self._build_reply(request, _list_actions(answer))
        except ModelError:
            raise
        except Exception as error:  # a script may raise any exception
            raise ModelError(
                f"The script of model {self.name} failed ({type(error).__name__}: {error}).", reason="misconfigured"
            ) from error
        for delta in (ModelDelta(reasoning=thoughts), ModelDelta(reply.text or "")):
            if on_delta is not None and (delta.reasoning or delta.text):
                on_delta(delta)
        return reply

    def _build_reply(self, request: ModelRequest, actions: Iterable[Action]) -> tuple[ModelReply, str]:
        """Return the reply and the reasoning before it."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for action in actions:
            match action:
                case Say(text):
                    texts.append(text)
                case Think(text):
                    thoughts.append(text)
                case Call(tool, arguments):
                    arguments_text = (
                        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                    )
                    calls.append(ToolCall(derive_call_id(request, len(calls)), tool, arguments_text))
                case _:
                    assert_never(action)
        reasoning = _estimate(*thoughts)
        output_tokens = reasoning + _estimate(*texts, *(item.arguments for item in calls))
        usage = Usage(_estimate_prompt(request), output_tokens, reasoning_tokens=reasoning)
        reason = "tool_calls" if calls else "stop"
        reply = ModelReply("\n".join(texts) or None, tuple(calls), usage, reason, self.name)
        return reply, "\n".join(thoughts)


def _list_actions(answer: Action | str | Iterable[Action] | None) -> list[Action]:
    match answer:
        case None:
            return []
        case str():
            return [Say(answer)]
        case Say() | Call() | Think():
            return [answer]
        case _:
            return list(answer)


def load_script(spec: str) -> Script:
    """Import the callable ``package.module:function``. Raises `ModelError` if the callable does not exist."""
    try:
        script: Script = import_callable(spec, "script")
    except ConfigError as error:
        raise ModelError(str(error), reason="misconfigured") from error
    return script


def _estimate_prompt(request: ModelRequest) -> int:
    calls = (
        call for message in request.messages if isinstance(message, AssistantMessage) for call in message.tool_calls
    )
    return _estimate(*(message.content or "" for message in request.messages), *(call.arguments for call in calls))


def _estimate(*texts: str) -> int:
    return sum((len(text) + 3) // 4 for text in texts)


# Disable HTML escaping here: messages are plain text. The prompt of the receiving agent escapes the text of messages.
_ENVIRONMENT = BoundedEnvironment(undefined=StrictUndefined, autoescape=False)


def _check_template(source: str) -> str:
    try:
        _ENVIRONMENT.from_string(source)
    except TemplateError as error:
        raise ValueError(f"is not a valid template: {error}") from error
    return source


def _check_pattern(source: str) -> str:
    try:
        compile_pattern(source)
    except re.error as error:
        raise ValueError(f"is not a valid regular expression: {error}") from error
    return source


_Text = Annotated[str, AfterValidator(_check_template)]
Pattern = Annotated[str, AfterValidator(_check_pattern)]


class When(Strict):
    """Conditions of a rule, all of which must be met. An omitted condition is always met."""

    sender: str | list[str] | None = Field(None, alias="from")
    """Sender of the trigger, or a list of possible senders."""
    contains: str | None = None
    """Substring of the trigger's text, ignoring case."""
    regex: Pattern | None = None
    """Pattern to find in the trigger's text. The groups of the match are available as ``match`` in templates, by name
    and number.
    """
    thread: str | None = None
    """Id of the trigger's thread, with ``*`` as in file names."""
    turn: int | None = Field(None, ge=1)
    """Turn of the reaction, from 1."""
    after: str | None = None
    """Name of a tool that the previous turn called."""
    result_regex: Pattern | None = None
    """Pattern to find in a result of the previous turn. The groups of the match are available as ``match`` unless
    ``regex`` is set.
    """

    def find(self, view: PromptView) -> Mapping[str | int, str] | None:
        """Return the captured groups if every condition is met, and otherwise None. Raises `PatternTimedOut`."""
        results = [result for result in view.tool_results if result.turn == view.turn - 1]
        senders = [self.sender] if isinstance(self.sender, str) else self.sender
        if senders is not None and view.incoming_sender not in senders:
            return None
        if self.contains is not None and self.contains.casefold() not in view.incoming_text.casefold():
            return None
        if self.thread is not None and not fnmatchcase(view.incoming_thread_id, self.thread):
            return None
        if self.after is not None and self.after not in (result.tool for result in results):
            return None
        # A rule about the previous turn may match in any turn. All other rules match only in the first turn, so that a
        # reaction ends.
        if view.turn != (self.turn or (view.turn if self.after or self.result_regex else 1)):
            return None
        groups: Mapping[str | int, str] = {}
        if self.result_regex is not None:
            contents = [item.content for item in results if self.after is None or item.tool == self.after]
            match = next(
                filter(None, (compile_pattern(self.result_regex).search(content) for content in contents)), None
            )
            if match is None:
                return None
            groups = _read_groups(match)
        if self.regex is not None:
            match = compile_pattern(self.regex).search(view.incoming_text)
            if match is None:
                return None
            groups = _read_groups(match)
        return groups


class SendAction(Strict):
    to: _Text
    text: _Text


class BroadcastAction(Strict):
    text: _Text


class RuleAction(Strict):
    """One action of a rule: exactly one of ``send``, ``broadcast``, ``tool`` (with ``args``), ``say``, ``finish``."""

    send: SendAction | None = None
    broadcast: BroadcastAction | None = None
    tool: str | None = None
    args: dict[str, JsonValue] | None = None
    say: _Text | None = None
    finish: _Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = (self.send, self.broadcast, self.tool, self.say, self.finish)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("must be exactly one of send, broadcast, tool, say, finish")
        if self.args is not None and self.tool is None:
            raise ValueError("has args without tool")
        map_texts(self.args or {}, _check_template)
        return self

    def build(self, render: Callable[[str], str]) -> Action:
        """Return the action with its templates rendered."""
        if self.send is not None:
            return send(render(self.send.to).strip(), render(self.send.text))
        if self.broadcast is not None:
            return broadcast(render(self.broadcast.text))
        if self.tool is not None:
            return Call(self.tool, {name: map_texts(value, render) for name, value in (self.args or {}).items()})
        if self.say is not None:
            return Say(render(self.say))
        return finish(render(self.finish or "done"))


class ScriptRule(Strict):
    when: When = When.model_validate({})
    do: list[RuleAction] = Field(min_length=1)


class RuleSet(Strict):
    """Rules in the order in which they are tried. ``ScriptedModel(rules.answer)`` turns them into a model."""

    rules: list[ScriptRule]

    def answer(self, request: ModelRequest) -> list[Action]:
        """Return the actions for the turn of a request. Raises `ModelError` if a template uses an unknown variable."""
        view = read_prompt(request)
        actions = list(self._apply(request, view))
        can_call = bool(request.tools) if request.can_call is None else request.can_call
        if can_call and request.tool_choice != "none":
            # Finish explicitly: after an empty reply, the reaction loop would call the model again.
            return actions or [finish("no rule fits this message" if view.turn == 1 else "done")]
        # The closing turn has no tools, so keep only the rule's text.
        return [action for action in actions if isinstance(action, Say)] or [Say("I have nothing to add.")]

    def _apply(self, request: ModelRequest, view: PromptView) -> Iterable[Action]:
        for number, rule in enumerate(self.rules, 1):
            try:
                groups = rule.when.find(view)
            except PatternTimedOut as error:
                sentence = f"Rule {number} of the script cannot be evaluated: {error}"
                raise ModelError(sentence, reason="misconfigured") from error
            if groups is None:
                continue
            render = partial(_render, _template_values(request, view, groups))
            try:
                return [action.build(render) for action in rule.do]
            except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
                sentence = f"Rule {number} of the script cannot be rendered: {error}."
                raise ModelError(sentence, reason="misconfigured") from error
        return ()


def load_rules(path: Path) -> RuleSet:
    """Read a YAML file with the key ``rules``. Raises `ConfigError` with file and line."""
    return bind(RuleSet, load_yaml(path))


def _template_values(request: ModelRequest, view: PromptView, groups: Mapping[str | int, str]) -> dict[str, object]:
    return {
        "agent_id": request.agent_id,
        "sender": view.incoming_sender,
        "text": view.incoming_text,
        "thread_id": view.incoming_thread_id,
        "threads": view.threads,
        "turn": view.turn,
        "match": groups,
        "results": view.tool_results,
        "result": view.tool_results[-1].content if view.tool_results else "",
    }


def _render(values: Mapping[str, object], source: str) -> str:
    return _ENVIRONMENT.from_string(source).render(values)


def _read_groups(match: re.Match[str]) -> Mapping[str | int, str]:
    """Return the groups of a match by number and name. A group that did not match is an empty string, because a
    template would show None as text.
    """
    groups: dict[str | int, str] = {number: match[number] or "" for number in range(len(match.groups()) + 1)}
    groups.update(match.groupdict(default=""))
    return groups


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply a function to each text in a JSON value, and return the new value. Keys stay unchanged."""
    match value:
        case str():
            return change(value)
        case list():
            return [map_texts(item, change) for item in value]
        case dict():
            return {key: map_texts(item, change) for key, item in value.items()}
        case _:
            return value
