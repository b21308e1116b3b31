"""The interface between a reaction and a model: the request, the reply and the errors.

A reaction builds a `ModelRequest`. A `Model` answers the request with a `ModelReply` or raises `ModelError`. The
implementations are in other modules of this folder: `openai_model` (any OpenAI-compatible server), `scripted` (rules or
a callable), `local` (a small model on the CPU), `tape` (recorded replies) and `fallback` (several models as one). All
types are frozen. A reply can be converted to JSON and back, because it is recorded before its tools run. This module
does no IO and depends on no provider and no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pydantic import JsonValue, TypeAdapter

from roundelay.network.credentials import hide_secrets
from roundelay.network.errors import RoundelayError

JsonSchema = Mapping[str, object]
"""A JSON Schema as plain JSON values."""

ToolChoice = Literal["auto", "none", "required"]


MAX_TOKENS = 10**12
"""Maximum token count of one call. Larger counts from a server are reduced to this maximum, so that the hub's sums
cannot overflow.
"""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """Tool choice of a request in which the model must call the tool ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call in the model's reply. ``arguments`` is the text that the model wrote, which may be invalid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens of one or more model calls. ``prompt_tokens`` includes ``cached_tokens``, and
    ``completion_tokens`` includes ``reasoning_tokens``.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class ModelUse:
    """Usage of one model call that is not the call of a turn. A tool, a check or a summary may make a model call
    outside of turns.
    """

    model: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool in the form that a model sees. ``parameters`` is the JSON Schema of an object."""

    name: str
    description: str
    parameters: JsonSchema


@dataclass(frozen=True, slots=True)
class SystemMessage:
    """Instructions that the agent's author wrote. The system message is the first message of a request."""

    content: str


@dataclass(frozen=True, slots=True)
class File:
    """A file in a message to a model. ``data`` is the content of the file in base64."""

    name: str
    media_type: str
    data: str


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A message to the model, with its ``images`` and ``files``. An image is an ``https:`` or ``data:`` URL."""

    content: str
    images: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyOrigin:
    """The endpoint that sent a reply, and the fields that later requests must send back with the reply.

    ``endpoint`` names the server and its model (`endpoint_rules.name_endpoint`). ``message`` contains fields of the
    reply's message, such as ``reasoning_content``. ``calls`` contains the fields of each call by position, such as a
    signature. The fields are sent back only to the same endpoint.
    """

    endpoint: str
    message: Mapping[str, JsonValue] = field(default_factory=dict)
    calls: Sequence[Mapping[str, JsonValue]] = ()
    rules: Mapping[str, JsonValue] = field(default_factory=dict)
    """Rules by name that refusals of the server had revealed before this reply (`endpoint_rules.learn`)."""

    demanded: frozenset[str] = frozenset()
    """Fields of ``message`` that the server requires in later requests. Only the demanded fields are recorded."""

    @property
    def has_fields(self) -> bool:
        """Whether later requests must send any field of this reply back to the server."""
        return bool(self.message) or any(self.calls)

    def keep_demanded(self) -> ReplyOrigin:
        """Return a copy of the origin that keeps only the reasoning fields that the server requires."""
        return replace(self, message={name: value for name, value in self.message.items() if name in self.demanded})


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """Reply of the model in one turn. A `ToolMessage` for each of its calls must follow before any other message."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    origin: ReplyOrigin | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """Result of the tool call whose id is ``tool_call_id``."""

    tool_call_id: str
    content: str


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Request for one model call. ``agent_id``, ``reaction`` and ``turn`` identify the step that needs the call.
    Generated call ids are derived from these three fields, which are not sent to the server.

    ``prompt`` is the beginning of the message with the conversation, and is identical in every turn of the reaction.
    Text after ``prompt`` may be specific to this turn. If ``can_call`` is True, calls run in this turn even for tools
    that are not in ``tools``. If ``can_call`` is None, only calls of ``tools`` run. ``thread_id`` is the thread of the
    incoming message.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice | NamedTool = "auto"
    agent_id: str = ""
    reaction: str = ""
    turn: int = 0
    prompt: str = ""
    can_call: bool | None = None
    thread_id: str = ""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The model's reply to a request. ``text`` is None if there is no text. ``finish_reason`` is the provider's value
    (``stop``, ``length``, ...).
    """

    text: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    finish_reason: str = "stop"
    model: str = ""
    reasoning: str = ""
    """The model's reasoning, if the provider returns reasoning. An agent may store the reasoning in a separate record.
    """

    origin: ReplyOrigin | None = field(default=None, compare=False)

    @property
    def is_cut(self) -> bool:
        """Whether the reply was cut off at a length limit. Providers use different finish reasons for this case."""
        return self.finish_reason.lower() in _CUT

    @property
    def is_withheld(self) -> bool:
        """Whether a filter of the provider withheld the reply."""
        return self.finish_reason.lower() in _WITHHELD

    def to_json(self) -> dict[str, object]:
        """Return the reply as plain JSON values for the journal, without the reasoning."""
        value: dict[str, object] = _REPLY.dump_python(self, mode="json", exclude={"reasoning", "origin"})
        if self.origin is not None and (self.origin.has_fields or self.origin.rules):
            origin_json: dict[str, object] = {"endpoint": self.origin.endpoint}
            if self.origin.message:
                origin_json["message"] = dict(self.origin.message)
            if any(self.origin.calls):
                origin_json["calls"] = [dict(call) for call in self.origin.calls]
            if self.origin.rules:
                origin_json["rules"] = dict(self.origin.rules)
            value["origin"] = origin_json
        return value


_REPLY = TypeAdapter(ModelReply)

# Finish reasons of OpenAI, Anthropic, Google, Mistral, Cohere and Bedrock, and of gateways to these providers.
_CUT = frozenset(
    {"length", "max_tokens", "max_token", "max_length", "model_length", "max_output_tokens", "max_completion_tokens"}
    | {"token_limit", "length_limit", "context_length", "model_context_window_exceeded", "incomplete", "truncated"}
    | {"finish_reason_max_tokens"}
)
_WITHHELD = frozenset(
    {"content_filter", "content_filtered", "content-filter", "safety", "recitation", "blocklist", "prohibited_content"}
    | {"spii", "image_safety", "language", "guardrail_intervened", "sensitive", "blocked", "error_toxic"}
    | {"finish_reason_safety"}
)


def join_origins(replies: Sequence[ModelReply]) -> ReplyOrigin | None:
    """Return the origin of a reply that merges several replies. Return None if the replies have different endpoints."""
    origins = [reply.origin for reply in replies]
    first = origins[0] if origins else None
    # Signed fields of two endpoints cannot be merged, because each server accepts only its own fields.
    if first is None or any(origin is None or origin.endpoint != first.endpoint for origin in origins):
        return None
    message: dict[str, JsonValue] = {}
    calls: list[Mapping[str, JsonValue]] = []
    for reply in replies:
        assert reply.origin is not None
        for name, value in reply.origin.message.items():
            previous = message.get(name)
            if isinstance(previous, str) and isinstance(value, str):
                message[name] = f"{previous}\n\n{value}"
            elif isinstance(previous, list) and isinstance(value, list):
                message[name] = [*previous, *value]
            else:
                message.setdefault(name, value)
        call_fields = reply.origin.calls
        calls += call_fields if len(call_fields) == len(reply.tool_calls) else [{}] * len(reply.tool_calls)
    return ReplyOrigin(first.endpoint, message, tuple(calls), first.rules, first.demanded)


@dataclass(frozen=True, slots=True)
class ModelDelta:
    """Piece of a streamed reply.

    If ``broken_off`` is set, a new reply begins, and the earlier pieces are void. The value of ``broken_off`` is the
    reason. ``usage`` is the provider's token count so far, if the provider reports a count before the end.
    """

    text: str = ""
    reasoning: str = ""
    broken_off: str = ""
    usage: Usage | None = None


OnDelta = Callable[[ModelDelta], None]


class Model(Protocol):
    """Interface of all models. One model instance serves many reactions in parallel."""

    name: str

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer the request once, without a retry. If the model streams, call ``on_delta`` for each piece of text that
        arrives. Raises `ModelError`.
        """
        ...


ModelFailure = Literal[
    "unreachable",  # the connection failed or was lost
    "timeout",  # no data for too long
    "rate_limited",
    "server",  # the provider's own failure (5xx)
    "broken_reply",  # cut off, not JSON, or without a choice
    "unauthorized",  # the key is missing or refused
    "quota",  # paid credit is used up
    "not_found",  # no such model or address
    "context_too_long",
    "content_filter",
    "rejected",  # the provider refuses the request as malformed
    "misconfigured",  # local: a missing package, a broken script
    "budget",  # local: the budget is exceeded
]

FAILURE_SENTENCES: dict[ModelFailure, str] = {
    "unreachable": "my model cannot be reached",
    "timeout": "my model did not answer in time",
    "rate_limited": "my model has too much to do",
    "server": "my model failed",
    "broken_reply": "my model sent a broken reply",
    "unauthorized": "my model does not let me in",
    "quota": "the credit for my model is used up",
    "not_found": "my model does not exist",
    "context_too_long": "the conversation is too long for my model",
    "content_filter": "my model's provider withheld the reply",
    "rejected": "my model refused the request",
    "misconfigured": "my model is not set up right",
    "budget": "the budget for this is used up",
}
"""Sentences about a failure for other participants. The provider's own text may contain keys and URLs, so it is written
only to the record and the log.
"""

OF_ONE_CONVERSATION: frozenset[ModelFailure] = frozenset({"budget", "content_filter", "context_too_long"})
"""Failures that concern only one conversation. Other messages may succeed, so no operator is notified."""

_RETRYABLE: frozenset[ModelFailure] = frozenset({"unreachable", "timeout", "rate_limited", "server", "broken_reply"})


class ModelError(RoundelayError):
    """A model call failed. ``reason`` is the category of the failure. ``retryable``: the same request may succeed
    later, after ``retry_after_ms`` if this delay is known.
    """

    code = "model"

    def __init__(self, message: str, *, reason: ModelFailure, retry_after_ms: int | None = None) -> None:
        super().__init__(hide_secrets(message))  # errors of servers may contain keys
        self.reason: ModelFailure = reason
        self.retryable = reason in _RETRYABLE
        self.retry_after_ms = retry_after_ms


def derive_call_id(request: ModelRequest, index: int) -> str:
    """Return an id for the call at ``index`` in the reply to this request, for models that send no ids. The same
    request always leads to the same id.

    The id depends on the number of messages, so the calls of a reaction have different ids even if the caller leaves
    ``turn`` at 0.
    """
    return derive_short_id(request.agent_id, request.reaction, request.turn, len(request.messages), index)


def derive_short_id(*parts: str | int) -> str:
    """Hash the parts into nine letters and digits. Every known server accepts call ids of this form.

    Mistral accepts no other form (https://github.com/langchain-ai/langchain/pull/24668).
    """
    number = int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "replace")).digest()[:8])
    digits = ""
    for _ in range(9):
        number, digit = divmod(number, len(_ID_ALPHABET))
        digits += _ID_ALPHABET[digit]
    return digits


_ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
