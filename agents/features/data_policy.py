"""What of an agent's work is kept in the ledger: its texts, its calls, their results; by tool, and with parts blacked
out.

Middleware that changes records on their way to the ledger (`Middleware.store`). The live model reads everything as it
is. A reaction that is resumed has the records alone: where something was left out or changed it is told so, never given
an empty result; a call whose arguments were not kept is not made, and an answer that was not kept is asked for again.
Agents that run inside of this one are covered as well.

What other middleware keeps in notes (`Around.keep`) is kept where texts are, and the results of all the tools that it
names.

Not covered: messages, which are the conversation itself (the answer, what tools send, a request for approval and its
decision), and events, which are not stored.
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
"""Of which tools something is kept: of all or none, of those named, or of those that a callable tells by their name."""

Redaction = str | re.Pattern[str] | Callable[[str], str]
"""What is blacked out: what a regular expression finds, or what a callable makes of a text. It must give the same each
time."""

_KEPT_DATA = (DISABLED, NOT_RUN, KEEPER)  # what the loop itself goes by


def _read_chosen(value: object) -> object:
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if not is_list and not isinstance(value, bool):
        hint = f": write [{value}]" if isinstance(value, str) else ""
        raise ValueError(f"must be true, false or a list of tools{hint}")
    return tuple(value) if isinstance(value, list) else value  # files are read strictly


_Listed = Annotated[bool | tuple[str, ...], BeforeValidator(_read_chosen)]


def _check_effect(text: bool, calls: Chosen, results: Chosen, redact: Sequence[str], thinking: bool) -> None:
    if text and thinking and calls is True and results is True and not redact:
        raise ValueError("keeps everything as it is: say what is not kept (text, thinking, calls, results), or redact")


class DataPolicy(Middleware):
    """What is kept of an agent's work. ``text`` is what its model writes, ``thinking`` what it thinks; ``calls`` their arguments (names are always
    kept), ``results`` what tools gave, each of the tools chosen. ``redact`` is applied to whatever is kept."""

    def __init__(
        self,
        *,
        text: bool = True,
        calls: Chosen = True,
        results: Chosen = True,
        redact: Sequence[Redaction] = (),
        thinking: bool = True,
    ) -> None:
        for name, given in (("calls", calls), ("results", results), ("redact", redact)):
            if isinstance(given, str):  # its letters would be taken for the items
                raise TypeError(f"DataPolicy: {name} is {given!r} and must be a list: write [{given!r}]")
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
        """Make the policy of an agent's file, where ``calls`` and ``results`` are true, false or the tools of which
        they are kept, and ``redact`` regular expressions. Raises `ConfigError`."""
        try:
            return cls(text=text, calls=calls, results=results, redact=redact, thinking=thinking)
        except re.error as error:
            raise ConfigError(
                f"the pattern {error.pattern!r} of the data policy is no regular expression: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{error} (redact of the data policy)") from error

    def describe(self) -> object:
        return self._options

    def _store_part(self, part: Mapping[str, Any]) -> Mapping[str, object]:
        """A message of a prompt: of what others wrote, of replies and results as much as is kept elsewhere."""
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
                reason = body["reason"] if self._keeps_text or body["status"] != "finished" else NOT_KEPT
                return {**body, "reason": self._redact(reason)}
            case "model_failed":
                return {**body, "reason": self._redact(body["reason"])}  # a provider's words may repeat the request's
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
                # A summary holds what the model wrote, too.
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
            written = call["arguments"]
            arguments = self._redact_arguments(written) if self._keeps_calls(call["name"]) else "{}"
            calls.append({**call, "arguments": arguments})
            if arguments != written:
                altered.append(place)
        made = {**body, "reply": {**reply, "text": kept, "tool_calls": calls}}
        if isinstance(reply.get("origin"), Mapping):
            made["reply"]["origin"] = self._store_origin(reply["origin"])
        changed: dict[str, object] = {"text": True} if kept != text else {}
        changed |= {"calls": altered} if altered else {}
        return {**made, ALTERED: changed} if changed else made

    def _store_origin(self, origin: Mapping[str, Any]) -> Mapping[str, object]:
        """Keep what the server wants back whole or not at all: it is thinking, or sealed thinking that no redaction can
        look into, and a server refuses a changed one."""
        is_kept = self._keeps_thinking and self._redact(origin) == origin
        return (
            origin if is_kept else {name: value for name, value in origin.items() if name not in ("message", "calls")}
        )

    def _store_review(self, body: Mapping[str, Any]) -> Mapping[str, object]:
        answer, made = body["answer"], dict(body)
        if not self._keeps_text:
            made |= {"answer": _say("answer") if answer else answer, "notes": [NOT_KEPT] if body["notes"] else []}
            made.pop("metadata", None)
        made |= {
            name: self._redact(made[name]) for name in ("answer", "correction", "notes", "metadata") if name in made
        }
        is_same = all(made.get(name) == (body.get(name) or made.get(name)) for name in ("answer", "metadata"))
        return made if is_same else {**made, ALTERED: True}

    def _store_result(self, body: Mapping[str, Any]) -> Mapping[str, object]:
        name, data = body["tool"], body.get("data", {})
        if self._keeps_results(name):
            content, kept = self._redact(body["content"]), self._redact(data)
        else:
            content, kept = _say(f"result of {name}"), {key: data[key] for key in _KEPT_DATA if key in data}
        if (content, kept) == (body["content"], data):
            return body
        return {**body, "content": content, "data": {**kept, ALTERED: True}}

    def _redact(self, value: Any) -> Any:
        """Black out what is to be, in every text of a JSON value; its names stay."""
        match value:
            case str():
                for redaction in self._redactions:
                    value = redaction(value)
                return value
            case bool() | None:
                return value
            case int() | float():
                redacted = self._redact(str(value))
                return value if redacted == str(value) else redacted
            case Mapping():
                return {name: self._redact(item) for name, item in value.items()}
            case list() | tuple():
                return [self._redact(item) for item in value]
            case _:
                return value

    def _redact_arguments(self, written: str) -> str:
        """The same in a call's arguments, which stay JSON; as they were, if nothing is found in them."""
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError):
            return str(self._redact(written))
        redacted = self._redact(arguments)
        return written if redacted == arguments else json.dumps(redacted)


def _say(what: str) -> str:
    """What a resumed reaction reads instead; it is a result to the model, so it says what to do."""
    return f"[The {what} was not kept, by this agent's data policy. If it is still needed, get it anew.]"


def _as_test(chosen: Chosen) -> Callable[[str], bool]:
    match chosen:
        case bool():
            return lambda name: chosen
        case Collection():
            return frozenset(chosen).__contains__
        case _:
            check_plain("What chooses tools for DataPolicy", chosen)
            return chosen


def _as_redaction(given: Redaction) -> Callable[[str], str]:
    if callable(given):
        check_plain("What redacts for DataPolicy", given)
        return given
    pattern = BoundedPattern.of(given) if isinstance(given, re.Pattern) else compile_pattern(given)
    if pattern.search(""):
        raise ValueError(f"the pattern {pattern.source!r} finds nothing, between any two characters: write + for *")

    def redact(text: str) -> str:
        try:
            return pattern.replace(text, REDACTED)
        except PatternTimedOut:  # what could not be searched may hold what is to be kept out
            _logger.exception("a pattern of the data policy takes too long; the text is not kept")
            return NOT_KEPT

    return redact
