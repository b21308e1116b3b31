"""A model without a model: a callable that sees the request and says what to do.

For tests, demos and rules (`script_rules`). The same request must always get the same answer, since a resumed reaction
asks again what it had not recorded: decide by the request alone (`prompt_view.read_prompt`), never by a counter or the
time. No IO of its own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from roundelay.agents.import_path import import_callable
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


@dataclass(frozen=True, slots=True)
class Say:
    """Text of the reply, beside its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the reply. Arguments given as text go out as they are, broken JSON too."""

    tool: str
    arguments: Mapping[str, object] | str = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Think:
    """Reasoning of the reply: it streams, and is kept nowhere."""

    text: str


Action = Say | Call | Think
Answer = ModelReply | Action | str | Iterable[Action] | None
"""What a script may give: a whole reply, one action or several (all in one turn), text, or None for an empty reply."""

Script = Callable[[ModelRequest], Answer | Awaitable[Answer]]


def say(text: str) -> Action:
    """Answer with text."""
    return Say(text)


def think(text: str) -> Action:
    """Reason, for whoever watches, before the rest of the reply."""
    return Think(text)


def call(tool: str, /, **arguments: object) -> Action:
    """Call a tool."""
    return Call(tool, arguments)


def send(to: str, text: str) -> Action:
    """Send a direct message to a participant."""
    return Call("send_text_message", {"target_agent_id": to, "text": text})


def broadcast(text: str) -> Action:
    """Send a message to everyone."""
    return Call("broadcast_text_message", {"text": text})


def finish(reason: str = "done") -> Action:
    """End the reaction."""
    return Call("finish", {"reason": reason})


class ScriptedModel:
    """Answers by a script, sync or async. What the script raises leaves as a `ModelError` that is not retried; its own
    pass through.

    Usage is estimated at four characters to a token, so that budgets can be tried without a provider.
    """

    def __init__(self, script: Script, *, name: str = "scripted") -> None:
        self.name = name
        self._script = script

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Ask the script once; what it thinks, and its text, arrive as one delta each."""
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
        except Exception as error:  # of the script
            raise ModelError(
                f"The script of model {self.name} failed ({type(error).__name__}: {error}).", reason="misconfigured"
            ) from error
        for delta in (ModelDelta(reasoning=thoughts), ModelDelta(reply.text or "")):
            if on_delta is not None and (delta.reasoning or delta.text):
                on_delta(delta)
        return reply

    def _build_reply(self, request: ModelRequest, actions: Iterable[Action]) -> tuple[ModelReply, str]:
        """Give the reply, and what was thought before it."""
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
                    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                    calls.append(ToolCall(derive_call_id(request, len(calls)), tool, given))
                case _:
                    assert_never(action)
        reasoning = _estimate(*thoughts)
        written = reasoning + _estimate(*texts, *(item.arguments for item in calls))
        usage = Usage(_estimate_prompt(request), written, reasoning_tokens=reasoning)
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
    """Import the callable that ``package.module:function`` names. Raises `ModelError` when there is none."""
    try:
        script: Script = import_callable(spec, "script")
    except ConfigError as error:
        raise ModelError(str(error), reason="misconfigured") from error
    return script


def _estimate_prompt(request: ModelRequest) -> int:
    calls = (call for it in request.messages if isinstance(it, AssistantMessage) for call in it.tool_calls)
    return _estimate(*(it.content or "" for it in request.messages), *(it.arguments for it in calls))


def _estimate(*texts: str) -> int:
    return sum((len(text) + 3) // 4 for text in texts)
