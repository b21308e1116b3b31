"""The model seam: what a reaction asks of a model and what it gets back.

A reaction builds a `ModelRequest`, any `Model` answers it with a `ModelReply` or raises `ModelError`. Implementations
stand beside this module: `openai_model` (any OpenAI-compatible server), `scripted` (rules or a callable), `local` (a
small model on the CPU), `tape` (what one replied before), `fallback` (several as one). All types are frozen; a reply
goes to JSON and back, since it is recorded before its tools run. No IO, no provider, no clock.
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
"""Of one call: who counts more is not believed, and the hub can add it up."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A choice of tool: this one has to be called."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model asks for. ``arguments`` is the text as the model wrote it, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or more model calls. ``cached_tokens`` are part of ``prompt_tokens``, ``reasoning_tokens`` of
    ``completion_tokens``."""

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
    """What one call of a model used that is no turn's own: a tool's, a check's, a summary's."""

    model: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it: ``parameters`` is the JSON Schema of an object."""

    name: str
    description: str
    parameters: JsonSchema


@dataclass(frozen=True, slots=True)
class SystemMessage:
    """What the author of the agent tells its model, before all else."""

    content: str


@dataclass(frozen=True, slots=True)
class File:
    """A file as a model gets it: ``data`` is its bytes in base64."""

    name: str
    media_type: str
    data: str


@dataclass(frozen=True, slots=True)
class UserMessage:
    """What the model is asked or told. ``images`` are addresses (``https:``, or ``data:`` with the image itself) that
    the model sees beside the text, as it does the ``files``."""

    content: str
    images: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyOrigin:
    """Where a reply came from, and what that server wants back with it.

    ``endpoint`` names the server and its model (`endpoint_rules.name_endpoint`). ``message`` holds fields of the reply's
    message, such as ``reasoning_content``; ``calls`` those of each call by its place, such as a signature. They are sent
    to that endpoint only.
    """

    endpoint: str
    message: Mapping[str, JsonValue] = field(default_factory=dict)
    calls: Sequence[Mapping[str, JsonValue]] = ()
    rules: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the server had refused until then (`endpoint_rules.learn`), by the names of the rules."""

    demanded: frozenset[str] = frozenset()
    """The fields of ``message`` that the server refuses to miss; no others are recorded."""

    @property
    def has_fields(self) -> bool:
        """Whether the server wants anything back."""
        return bool(self.message) or any(self.calls)

    def keep_demanded(self) -> ReplyOrigin:
        """Return the origin without the thinking that the server can do without."""
        return replace(self, message={name: value for name, value in self.message.items() if name in self.demanded})


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """A turn of the model. Each of its calls is answered by one `ToolMessage` before anything else follows."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    origin: ReplyOrigin | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """The result of the call that ``tool_call_id`` names."""

    tool_call_id: str
    content: str


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call. ``agent_id``, ``reaction`` and ``turn`` say for whom it is; they seed generated call ids and are
    not sent.

    ``prompt`` is what the message of the conversation begins with in every turn of the reaction; what is behind it may
    be of this turn alone."""

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice | NamedTool = "auto"
    agent_id: str = ""
    reaction: str = ""
    turn: int = 0
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What the model answered. ``text`` is None rather than empty; ``finish_reason`` is the provider's word (``stop``,
    ``length``, ...)."""

    text: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    finish_reason: str = "stop"
    model: str = ""
    reasoning: str = ""
    """What the model thought, where it tells: for a record of its own, if the agent keeps that."""

    origin: ReplyOrigin | None = field(default=None, compare=False)

    @property
    def is_cut(self) -> bool:
        """Whether the reply ended at a limit of length, by whatever name the provider gives that."""
        return self.finish_reason.lower() in _CUT

    @property
    def is_withheld(self) -> bool:
        """Whether a filter of the provider held the reply back."""
        return self.finish_reason.lower() in _WITHHELD

    def to_json(self) -> dict[str, object]:
        """Give the reply as plain JSON values, for the journal; without the reasoning."""
        value: dict[str, object] = _REPLY.dump_python(self, mode="json", exclude={"reasoning", "origin"})
        if self.origin is not None and (self.origin.has_fields or self.origin.rules):
            told: dict[str, object] = {"endpoint": self.origin.endpoint}
            if self.origin.message:
                told["message"] = dict(self.origin.message)
            if any(self.origin.calls):
                told["calls"] = [dict(call) for call in self.origin.calls]
            if self.origin.rules:
                told["rules"] = dict(self.origin.rules)
            value["origin"] = told
        return value


_REPLY = TypeAdapter(ModelReply)

# OpenAI, Anthropic, Google, Mistral, Cohere, Bedrock, and what gateways to them pass on.
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
    """Return the origin of a reply that is made of several; None where they came from different endpoints."""
    origins = [reply.origin for reply in replies]
    first = origins[0] if origins else None
    if first is None or any(origin is None or origin.endpoint != first.endpoint for origin in origins):
        return None
    message: dict[str, JsonValue] = {}
    calls: list[Mapping[str, JsonValue]] = []
    for reply in replies:
        assert reply.origin is not None
        for name, value in reply.origin.message.items():
            known = message.get(name)
            if isinstance(known, str) and isinstance(value, str):
                message[name] = f"{known}\n\n{value}"
            elif isinstance(known, list) and isinstance(value, list):
                message[name] = [*known, *value]
            else:
                message.setdefault(name, value)
        given = reply.origin.calls
        calls += given if len(given) == len(reply.tool_calls) else [{}] * len(reply.tool_calls)
    return ReplyOrigin(first.endpoint, message, tuple(calls), first.rules, first.demanded)


@dataclass(frozen=True, slots=True)
class ModelDelta:
    """A piece of a reply while it streams. ``broken_off`` says why the pieces before this one are void: another
    reply begins. ``usage`` is what the provider has counted so far, where it says so before the end."""

    text: str = ""
    reasoning: str = ""
    broken_off: str = ""
    usage: Usage | None = None


OnDelta = Callable[[ModelDelta], None]


class Model(Protocol):
    """Answers requests. One instance serves many reactions at once."""

    name: str

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer the request once, without retrying; raises `ModelError`. ``on_delta`` is called as text arrives, if it
        streams."""
        ...


ModelFailure = Literal[
    "unreachable",  # no connection, or it broke
    "timeout",  # silence for too long
    "rate_limited",
    "server",  # the provider's own failure (5xx)
    "broken_reply",  # an answer that is none: cut off, not JSON, without a choice
    "unauthorized",  # the key is missing or refused
    "quota",  # paid credit is used up
    "not_found",  # no such model or address
    "context_too_long",
    "content_filter",
    "rejected",  # the provider refuses the request as malformed
    "misconfigured",  # this side: a missing package, a broken script
    "budget",  # this side: what may be spent is spent
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
"""What others are told of a failure. A provider's own words may hold keys and addresses: they go to the record and the
log."""

OF_ONE_CONVERSATION: frozenset[ModelFailure] = frozenset({"budget", "content_filter", "context_too_long"})
"""Failures that say nothing about the next message, so that no operator is notified."""

_PASSING: frozenset[ModelFailure] = frozenset({"unreachable", "timeout", "rate_limited", "server", "broken_reply"})


class ModelError(RoundelayError):
    """A model call failed. ``reason`` says how; ``retryable`` that the same request may succeed later, after
    ``retry_after_ms`` if known."""

    code = "model"

    def __init__(self, message: str, *, reason: ModelFailure, retry_after_ms: int | None = None) -> None:
        super().__init__(hide_secrets(message))  # servers repeat keys in their errors
        self.reason: ModelFailure = reason
        self.retryable = reason in _PASSING
        self.retry_after_ms = retry_after_ms


def derive_call_id(request: ModelRequest, index: int) -> str:
    """Give an id for the call at ``index`` of this request's reply, where the model gave none: the same again for the
    same request.

    The number of messages enters, so that a reaction's calls differ even when a caller leaves ``turn`` at 0.
    """
    return derive_nine(request.agent_id, request.reaction, request.turn, len(request.messages), index)


def derive_nine(*parts: str | int) -> str:
    """Return nine letters and digits for these: the form of a call's id that every known server accepts.

    Mistral takes no other form (https://github.com/langchain-ai/langchain/pull/24668).
    """
    number = int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "replace")).digest()[:8])
    digits = ""
    for _ in range(9):
        number, digit = divmod(number, len(_NINE))
        digits += _NINE[digit]
    return digits


_NINE = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
