"""Middleware that selects, per tool, which parts of an agent's work the ledger stores (texts, calls, results), and
redacts the stored parts.

This middleware changes records before they are sent to the ledger (`Middleware.store`). The running model reads all
data unchanged, but a resumed reaction has only the records. In a resumed reaction, the model reads a notice in place of
data that was removed or changed. A call whose arguments were not stored does not run. If an answer was not stored, the
model is asked for an answer again. The policy also applies to agents that run inside this agent.

A note of other middleware (`Around.keep`) is stored only if the policy stores texts and also the results of all tools
that the note names.

The policy does not apply to messages, because they are the conversation itself: the answer, messages sent by tools,
approval requests and decisions. The policy does not apply to events either, because events are not stored.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from roundelay.agents.agent import KEEPER
from roundelay.agents.isolation import check_plain
from roundelay.agents.middleware import Middleware
from roundelay.agents.options import checks
from roundelay.agents.patterns import BoundedPattern, PatternTimedOut, compile_pattern
from roundelay.agents.values import ALTERED, DISABLED, NOT_RUN
from roundelay.network.errors import ConfigError

_logger = logging.getLogger(__name__)

REDACTED = "[redacted]"
NOT_KEPT = "[not kept]"

Chosen = bool | Collection[str] | Callable[[str], bool]
"""Type of an option that selects tools: True or False for all tools or none, a list of names, or a callable that
returns whether a name is selected.
"""

Redaction = str | re.Pattern[str] | Callable[[str], str]
"""Type of a rule that redacts text: a regular expression whose matches are replaced, or a callable that returns the
changed text. The callable must be deterministic.
"""

_KEPT_DATA = (DISABLED, NOT_RUN, KEEPER)  # data that the loop itself needs


def _read_chosen(value: object) -> object:
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if not is_list and not isinstance(value, bool):
        hint = f": write [{value}]" if isinstance(value, str) else ""
        raise ValueError(f"must be true, false or a list of tools{hint}")
    return tuple(value) if isinstance(value, list) else value  # strict validation would refuse a list


_Listed = Annotated[bool | tuple[str, ...], BeforeValidator(_read_chosen)]


def _check_effect(text: bool, calls: Chosen, results: Chosen, redact: Sequence[str], thinking: bool) -> None:
    if text and thinking and calls is True and results is True and not redact:
        raise ValueError("changes nothing: set text, thinking, calls, results or redact")


class DataPolicy(Middleware):
    """Selects the parts of an agent's work that the ledger stores.

    ``text`` and ``thinking`` determine whether the model's text and its reasoning are stored. ``calls`` selects the
    tools whose arguments are stored; the names of called tools are always stored. ``results`` selects the tools whose
    results are stored. ``redact`` applies to all stored text.
    """

    def __init__(
        self,
        *,
        text: bool = True,
        calls: Chosen = True,
        results: Chosen = True,
        redact: Sequence[Redaction] = (),
        thinking: bool = True,
    ) -> None:
        for name, option in (("calls", calls), ("results", results), ("redact", redact)):
            if isinstance(option, str):  # otherwise each letter of the text would count as one item
                raise TypeError(f"DataPolicy: {name} is {option!r} and must be a list. Write [{option!r}]")
        self._keeps_text = text
        self._keeps_calls = _as_test(calls)
        self._keeps_results = _as_test(results)
        self._redactions = [_as_redaction(redaction) for redaction in redact]
        self._keeps_thinking = text and thinking
        self._options = (text, calls, results, tuple(redact), *(() if thinking else (thinking,)))

    @classmethod
    @checks(_check_effect)
    def from_file(
        cls,
        text: bool = True,
        calls: _Listed = True,
        results: _Listed = True,
        redact: tuple[str, ...] = (),
        thinking: bool = True,
    ) -> DataPolicy:
        """Return the policy of an agent's file.

        ``calls`` and ``results`` are true, false or a list of tools. ``redact`` is a list of regular expressions.
        Raises `ConfigError`.
        """
        try:
            return cls(text=text, calls=calls, results=results, redact=redact, thinking=thinking)
        except re.error as error:
            raise ConfigError(
                f"the pattern {error.pattern!r} of the data policy is not a regular expression: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"redact of the data policy: {error}") from error

    def describe(self) -> object:
        return self._options

    def _store_part(self, part: Mapping[str, Any]) -> Mapping[str, object]:
        """Filter one message of a recorded prompt. The rule for texts applies to replies, and the rule for results
        applies to tool results.
        """
        is_kept = self._keeps_results(part["tool"]) if part["role"] == "tool" else self._keeps_text
        calls = [
            [name, self._redact_arguments(arguments) if self._keeps_calls(name) else "{}"]
            for name, arguments in part["calls"]
        ]
        return {**part, "text": self._redact(part["text"]) if is_kept else NOT_KEPT, "calls": calls}

    def store(self, kind: str, body: Mapping[str, Any]) -> Mapping[str, object]:
        match kind:
            case "model_reply":
                return self._store_reply(body)
            case "tool_started":
                is_kept = self._keeps_calls(body["tool"])
                return {**body, "args": self._redact_arguments(body["args"]) if is_kept else "{}"}
            case "tool_result":
                return self._store_result(body)
            case "review":
                return self._store_review(body)
            case "finished":
                # Redact the reason of a finished reaction, because the model wrote it. If a reaction has any other
                # status, the loop wrote the reason.
                reason = body["reason"] if self._keeps_text or body["status"] != "finished" else NOT_KEPT
                return {**body, "reason": self._redact(reason)}
            case "model_failed":
                # a provider's error may quote the request, and so the conversation
                return {**body, "reason": self._redact(body["reason"])}
            case "stopped":
                return {
                    **body,
                    "text": self._redact(body["text"]) if self._keeps_text or not body["text"] else NOT_KEPT,
                }
            case "thinking":
                return {**body, "text": self._redact(body["text"]) if self._keeps_thinking else NOT_KEPT}
            case "prompt":
                return {**body, "parts": [self._store_part(part) for part in body["parts"]]}
            case "progress":
                is_kept = self._keeps_results(body["tool"])
                return {**body, "steps": [self._redact(step) for step in body["steps"]] if is_kept else [NOT_KEPT]}
            case "note":
                # A note such as a summary also contains text of the model, so the rules for texts and for results
                # apply.
                is_kept = self._keeps_text and all(self._keeps_results(name) for name in body.get("of", ()))
                return {**body, "value": self._redact(body["value"]) if is_kept else None}
            case _:
                return body

    def _store_reply(self, body: Mapping[str, Any]) -> Mapping[str, object]:
        reply = body["reply"]
        text = reply["text"]
        kept = self._redact(text) if self._keeps_text else NOT_KEPT if text else text
        calls, altered = [], []
        for place, call in enumerate(reply["tool_calls"]):
            original = call["arguments"]
            arguments = self._redact_arguments(original) if self._keeps_calls(call["name"]) else "{}"
            calls.append({**call, "arguments": arguments})
            if arguments != original:
                altered.append(place)
        stored = {**body, "reply": {**reply, "text": kept, "tool_calls": calls}}
        if isinstance(reply.get("origin"), Mapping):
            stored["reply"]["origin"] = self._store_origin(reply["origin"])
        # Mark the changed parts. Without such a mark, a resumed run would use a redacted argument as if it were the
        # real value.
        changed: dict[str, object] = {"text": True} if kept != text else {}
        changed |= {"calls": altered} if altered else {}
        return {**stored, ALTERED: changed} if changed else stored

    def _store_origin(self, origin: Mapping[str, Any]) -> Mapping[str, object]:
        """Return the reply's origin, either with all fields that only the server reads, or with none of them.

        Fields that only the server reads contain reasoning, which may be encrypted, so redaction cannot search it. A
        server refuses fields that were changed.
        """
        is_kept = self._keeps_thinking and self._redact(origin) == origin
        return (
            origin if is_kept else {name: value for name, value in origin.items() if name not in ("message", "calls")}
        )

    def _store_review(self, body: Mapping[str, Any]) -> Mapping[str, object]:
        answer, stored = body["answer"], dict(body)
        if not self._keeps_text:
            stored |= {
                "answer": _describe_removed("answer") if answer else answer,
                "notes": [NOT_KEPT] if body["notes"] else [],
            }
            stored.pop("metadata", None)
        stored |= {
            name: self._redact(stored[name]) for name in ("answer", "correction", "notes", "metadata") if name in stored
        }
        is_same = all(stored.get(name) == (body.get(name) or stored.get(name)) for name in ("answer", "metadata"))
        return stored if is_same else {**stored, ALTERED: True}

    def _store_result(self, body: Mapping[str, Any]) -> Mapping[str, object]:
        name, data = body["tool"], body.get("data", {})
        if self._keeps_results(name):
            content, kept = self._redact(body["content"]), self._redact(data)
        else:
            content, kept = (
                _describe_removed(f"result of {name}"),
                {key: data[key] for key in _KEPT_DATA if key in data},
            )
        if (content, kept) == (body["content"], data):
            return body
        return {**body, "content": content, "data": {**kept, ALTERED: True}}

    def _redact(self, value: Any) -> Any:
        """Redact every text in a JSON value. The names of object fields stay unchanged."""
        match value:
            case str():
                for redaction in self._redactions:
                    value = redaction(value)
                return value
            case bool() | None:
                return value
            case int() | float():
                # Redact numbers too, because a card number or phone number may be a JSON number.
                redacted = self._redact(str(value))
                return value if redacted == str(value) else redacted
            case Mapping():
                return {name: self._redact(item) for name, item in value.items()}
            case list() | tuple():
                return [self._redact(item) for item in value]
            case _:
                return value

    def _redact_arguments(self, written: str) -> str:
        """Redact the arguments of a call. The result is valid JSON, and arguments without a match stay unchanged."""
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError):
            return str(self._redact(written))
        redacted = self._redact(arguments)
        # Redact the parsed values instead of the JSON text: a match in the text could include a quotation mark, and its
        # replacement would make the JSON invalid.
        return written if redacted == arguments else json.dumps(redacted)


def _describe_removed(what: str) -> str:
    """Return the text that the model reads in a resumed reaction in place of a removed result. The text also says how
    the model can get the result again.
    """
    return f"[This agent's data policy did not keep the {what}. If you still need it, get it again.]"


def _as_test(chosen: Chosen) -> Callable[[str], bool]:
    match chosen:
        case bool():
            return lambda name: chosen
        case Collection():
            return frozenset(chosen).__contains__
        case _:
            check_plain("What chooses tools for DataPolicy", chosen)
            return chosen


def _as_redaction(redaction: Redaction) -> Callable[[str], str]:
    if callable(redaction):
        check_plain("What redacts for DataPolicy", redaction)
        return redaction
    pattern = BoundedPattern.of(redaction) if isinstance(redaction, re.Pattern) else compile_pattern(redaction)
    # Refuse a pattern that matches the empty text, because its replacement would be inserted between all characters.
    if pattern.search(""):
        raise ValueError(f"the pattern {pattern.source!r} matches the empty text. Replace * by +")

    def redact(text: str) -> str:
        try:
            return pattern.replace(text, REDACTED)
        except PatternTimedOut:  # the text was not searched completely and may contain secrets
            _logger.exception("a pattern of the data policy timed out, so the text is not stored")
            return NOT_KEPT

    return redact
