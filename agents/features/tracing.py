"""Traces by OpenTelemetry's conventions for generative AI (`invoke_agent`, `chat`, `execute_tool`); one trace spans all
agents that work on a message.

Middleware. The conversation's id is the thread's. A message that is sent from inside of a call carries `traceparent` in
its metadata, and a reaction to it goes on in that trace, in whatever process; one that is resumed has a span of its own
there. What was said is in the spans only if `content` asks for it. Needs `roundelay[otel]`; where the spans go is
OpenTelemetry's own configuration (a `TracerProvider`, by default the global one).
https://github.com/open-telemetry/semantic-conventions-genai (development status; names as of semconv 0.66)
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

from pydantic import JsonValue

from roundelay.agents.isolation import describe_error
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ChatMessage, ModelReply, ModelRequest, UserMessage
from roundelay.agents.tool_client import SENT_METADATA
from roundelay.agents.tools import PlannedCall
from roundelay.agents.values import Finish, ToolResult
from roundelay.network.credentials import hide_secrets
from roundelay.network.errors import ConfigError
from roundelay.network.extras import how_to_add

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(f"traces need the extra otel ({error.name} is missing). Run: {how_to_add('otel')}") from error


class Tracing(Middleware):
    """Makes spans of what an agent does. Give it to an agent that runs inside of a tool as well, if its turns are to be
    seen."""

    def __init__(self, *, content: bool = False, provider: TracerProvider | None = None) -> None:
        self._content = content
        self._provider = provider
        self._known: tuple[TracerProvider, Tracer] | None = None

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        trigger, agent = around.context.trigger, around.agent
        parent = _PROPAGATOR.extract(_read_carrier(trigger.metadata)) if not around.path else None
        facts = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.id": agent.id,
            "gen_ai.agent.name": agent.id,
            "gen_ai.conversation.id": trigger.thread_id,
            "gen_ai.request.model": agent.model.name,
        }
        with self._span(f"invoke_agent {agent.id}", SpanKind.INTERNAL, facts, parent) as (span, carrier):
            finish = await proceed()
            span.set_attribute("gen_ai.usage.input_tokens", finish.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", finish.usage.completion_tokens)
            if finish.status == "failed":
                span.set_status(Status(StatusCode.ERROR, finish.reason if self._content else finish.status))
        return replace(finish, metadata={**finish.metadata, **carrier})

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        name = around.model.name
        facts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": name,
            "gen_ai.conversation.id": around.context.trigger.thread_id,
        }
        with self._span(f"chat {name}", SpanKind.CLIENT, facts) as (span, _):
            if self._content:
                told = [{"role": _ROLES[type(message).__name__], **_write(message)} for message in request.messages]
                span.set_attribute("gen_ai.input.messages", json.dumps(told, ensure_ascii=False))
            reply = await proceed(request)
            used = reply.usage
            span.set_attributes(
                {
                    "gen_ai.response.model": reply.model or name,
                    "gen_ai.response.finish_reasons": [reply.finish_reason],
                    "gen_ai.usage.input_tokens": used.prompt_tokens,
                    "gen_ai.usage.output_tokens": used.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": used.cached_tokens,
                    "gen_ai.usage.reasoning.output_tokens": used.reasoning_tokens,
                }
            )
            if self._content:
                span.set_attribute(
                    "gen_ai.output.messages", json.dumps([replace(reply, origin=None).to_json()], ensure_ascii=False)
                )
        return reply

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        facts = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.tool.name,
            "gen_ai.tool.call.id": call.call.id,
            "gen_ai.tool.type": "function",
            "gen_ai.conversation.id": around.context.trigger.thread_id,
        }
        with self._span(f"execute_tool {call.tool.name}", SpanKind.INTERNAL, facts) as (span, carrier):
            if self._content:
                span.set_attribute("gen_ai.tool.call.arguments", call.call.arguments)
            token = SENT_METADATA.set({**SENT_METADATA.get(), **carrier})
            try:
                result = await proceed(call)
            finally:
                SENT_METADATA.reset(token)
            if self._content:
                span.set_attribute("gen_ai.tool.call.result", result.content)
            if not result.ok:
                span.set_status(Status(StatusCode.ERROR, result.content if self._content else None))
                span.set_attribute("error.type", "tool_error")
        return result

    @contextmanager
    def _span(
        self, name: str, kind: SpanKind, facts: Mapping[str, str], parent: Context | None = None
    ) -> Iterator[tuple[Span, dict[str, JsonValue]]]:
        """Make a span, current in its block; gives it with what names it in a message. An error that passes through is
        its error."""
        span = self._find_tracer().start_span(name, context=parent, kind=kind, attributes=facts)
        carrier: dict[str, str] = {}
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            _PROPAGATOR.inject(carrier)
            try:
                yield span, {**carrier}
            except Exception as error:  # of whatever is traced; it is recorded, and raised again below
                if self._content:
                    stack = hide_secrets("".join(traceback.format_exception(error)))
                    told = {"exception.message": hide_secrets(str(error)), "exception.stacktrace": stack}
                    span.record_exception(error, told)
                words = describe_error(error) if self._content else type(error).__name__
                span.set_status(Status(StatusCode.ERROR, words))
                raise

    def _find_tracer(self) -> Tracer:
        """The provider's tracer: to have one made costs a quarter of a span, so it is kept while the provider is the
        same."""
        provider = self._provider or trace.get_tracer_provider()
        if self._known is None or self._known[0] is not provider:
            self._known = (provider, provider.get_tracer("roundelay"))
        return self._known[1]


def _write(message: ChatMessage) -> dict[str, JsonValue]:
    """Return a message as JSON, without the thinking that goes back to its server."""
    return {name: value for name, value in asdict(_without_bytes(message)).items() if name != "origin"}


def _without_bytes(message: ChatMessage) -> ChatMessage:
    """Give a message as a span holds it: of images and files what they are. A span of megabytes is exported nowhere."""
    if not isinstance(message, UserMessage):
        return message
    images = tuple(image.partition(",")[0] if image.startswith("data:") else image for image in message.images)
    return replace(message, images=images, files=tuple(replace(file, data="") for file in message.files))


def _read_carrier(metadata: Mapping[str, object] | None) -> dict[str, str]:
    found = {key: (metadata or {}).get(key) for key in ("traceparent", "tracestate")}
    return {key: value for key, value in found.items() if isinstance(value, str)}


_PROPAGATOR = TraceContextTextMapPropagator()
_ROLES = {"SystemMessage": "system", "UserMessage": "user", "AssistantMessage": "assistant", "ToolMessage": "tool"}
