"""Scripts as rules, for agents that are written in YAML and run without a model.

::

    - when: {from: mia, regex: '(?P<a>\\d+) times (?P<b>\\d+)'}
      do:
        - tool: multiply
          args: {a: '{{ match.a }}', b: '{{ match.b }}'}
    - when: {after: multiply}
      do:
        - send: {to: '{{ sender }}', text: 'It is {{ result }}.'}
        - finish: answered

The first rule that holds gives the turn. A rule without ``turn`` or ``after`` is for the first turn only, so a reaction
that has acted and finds no rule for what came of it finishes. Texts are jinja templates over the prompt that the agent
received (`PromptView`); what stands in messages is data there and never runs. Pure: the same request, the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Self

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from roundelay.network.config import bind, load_yaml

from .model import ModelError, ModelRequest
from .prompt_view import PromptView, read_prompt
from .scripted import Action, Call, Say, broadcast, finish, send

# Not HTML: a text goes out as it is, and the prompt of its reader escapes it.
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


def _check_template(source: str) -> str:
    try:
        _ENVIRONMENT.from_string(source)
    except TemplateError as error:
        raise ValueError(f"is no valid template: {error}") from error
    return source


def _check_pattern(source: str) -> str:
    try:
        re.compile(source)
    except re.error as error:
        raise ValueError(f"is no valid regular expression: {error}") from error
    return source


_Text = Annotated[str, AfterValidator(_check_template)]
_Pattern = Annotated[str, AfterValidator(_check_pattern)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class When(_Strict):
    """Conditions, all of which must hold; one that is left out holds."""

    sender: str | list[str] | None = Field(None, alias="from")
    """The incoming message's sender, or any of several."""
    contains: str | None = None
    """In the incoming text, in upper or lower case."""
    regex: _Pattern | None = None
    """Found in the incoming text; its groups are ``match`` in templates, by name and number."""
    thread: str | None = None
    """The incoming thread's id, with ``*`` as in file names."""
    turn: int | None = Field(None, ge=1)
    """The reaction's turn, from 1."""
    after: str | None = None
    """The tool that the turn before called, among others."""
    result_regex: _Pattern | None = None
    """Found in a result of the turn before; its groups are ``match`` if there is no ``regex``."""

    def find(self, view: PromptView) -> Mapping[str | int, str] | None:
        """Give the captured groups if every condition holds, else None."""
        last = [result for result in view.tool_results if result.turn == view.turn - 1]
        senders = [self.sender] if isinstance(self.sender, str) else self.sender
        if senders is not None and view.incoming_sender not in senders:
            return None
        if self.contains is not None and self.contains.casefold() not in view.incoming_text.casefold():
            return None
        if self.thread is not None and not fnmatchcase(view.incoming_thread_id, self.thread):
            return None
        if self.after is not None and self.after not in (result.tool for result in last):
            return None
        if view.turn != (self.turn or (view.turn if self.after or self.result_regex else 1)):
            return None
        groups: Mapping[str | int, str] = {}
        if self.result_regex is not None:
            contents = [item.content for item in last if self.after is None or item.tool == self.after]
            found = next(filter(None, (re.search(self.result_regex, content) for content in contents)), None)
            if found is None:
                return None
            groups = _read_groups(found)
        if self.regex is not None:
            found = re.search(self.regex, view.incoming_text)
            if found is None:
                return None
            groups = _read_groups(found)
        return groups


class SendAction(_Strict):
    to: _Text
    text: _Text


class BroadcastAction(_Strict):
    text: _Text


class RuleAction(_Strict):
    """One action: exactly one of ``send``, ``broadcast``, ``tool`` (with ``args``), ``say``, ``finish``."""

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
            raise ValueError("has args, which belong to a tool")
        _map_texts(self.args or {}, _check_template)
        return self

    def build(self, render: Callable[[str], str]) -> Action:
        """Give the action with its templates rendered."""
        if self.send is not None:
            return send(render(self.send.to).strip(), render(self.send.text))
        if self.broadcast is not None:
            return broadcast(render(self.broadcast.text))
        if self.tool is not None:
            return Call(self.tool, {name: _map_texts(value, render) for name, value in (self.args or {}).items()})
        if self.say is not None:
            return Say(render(self.say))
        return finish(render(self.finish or "done"))


class Rule(_Strict):
    when: When = When.model_validate({})
    do: list[RuleAction] = Field(min_length=1)


class RuleSet(_Strict):
    """Rules in the order in which they are tried; ``ScriptedModel(rules.answer)`` makes a model of them."""

    rules: list[Rule]

    def answer(self, request: ModelRequest) -> list[Action]:
        """Give this turn's actions. Raises `ModelError` when a template uses what the prompt does not have."""
        view = read_prompt(request)
        actions = list(self._apply(request, view))
        if request.tools and request.tool_choice != "none":
            return actions or [finish("nothing to do" if view.turn == 1 else "done")]
        # No tool may be called: the closing turn. What the rule wanted to say is left of it.
        return [action for action in actions if isinstance(action, Say)] or [Say("I have nothing to add.")]

    def _apply(self, request: ModelRequest, view: PromptView) -> Iterable[Action]:
        for number, rule in enumerate(self.rules, 1):
            groups = rule.when.find(view)
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
    """Read a file with the key ``rules``. Raises `ConfigError` with file and line."""
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


def _read_groups(found: re.Match[str]) -> Mapping[str | int, str]:
    """The groups by number and name; one that took no part is empty, which suits a text better than ``None``."""
    groups: dict[str | int, str] = {number: found[number] or "" for number in range(len(found.groups()) + 1)}
    groups.update(found.groupdict(default=""))
    return groups


def _map_texts(value: JsonValue, change: Callable[[str], str]) -> JsonValue:
    match value:
        case str():
            return change(value)
        case list():
            return [_map_texts(item, change) for item in value]
        case dict():
            return {key: _map_texts(item, change) for key, item in value.items()}
        case _:
            return value
