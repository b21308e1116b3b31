"""Middleware that records OpenTelemetry traces. The traces follow the conventions for generative AI (`invoke_agent`,
`chat`, `execute_tool`).

One trace covers all agents that work on a message. The id of the conversation is the thread's id. A message that is
sent during a call has `traceparent` in its metadata, so the reaction to this message continues the trace, in any
process. A resumed reaction has a separate span in the trace. Spans contain texts only if `content` is set. The feature
requires the extra `roundelay[otel]`. A `TracerProvider`, by default the global one, decides where spans are sent.

https://github.com/open-telemetry/semantic-conventions-genai (development status; names as of semconv 0.66)
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

from pydantic import JsonValue

from roundelay.agents.isolation import describe_error
from roundelay.agents.middleware import Around, AskModel, Middleware, RunReaction, RunTool
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
    raise ConfigError(f"Traces need the extra otel ({error.name} is missing). Run: {how_to_add('otel')}") from error


class Tracing(Middleware):
    """Records spans of an agent's work. To trace the turns of an agent that is called as a tool, add this middleware to
    that agent too.
    """

    def __init__(self, *, content: bool = False, provider: TracerProvider | None = None) -> None:
        self._content = content
        self._provider = provider
        self._cached_tracer: tuple[TracerProvider, Tracer] | None = None

    async def around_reaction(self, around: Around, proceed: RunReaction) -> Finish:
        trigger, agent = around.context.trigger, around.agent
        # For an agent inside a call, use the current span, which is the span of its caller.
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

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        name = around.model.name
        facts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": name,
            "gen_ai.conversation.id": around.context.trigger.thread_id,
        }
        with self._span(f"chat {name}", SpanKind.CLIENT, facts) as (span, _):
            if self._content:
                messages = [{"role": _ROLES[type(message).__name__], **_write(message)} for message in request.messages]
                span.set_attribute("gen_ai.input.messages", json.dumps(messages, ensure_ascii=False))
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

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
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
            # Add the trace to messages that are sent during the call, so that reactions in other processes continue the
            # trace.
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
        """Start a span, make it current inside the block, and yield it with its metadata for messages. An exception
        marks the span as failed.
        """
        span = self._find_tracer().start_span(name, context=parent, kind=kind, attributes=facts)
        carrier: dict[str, str] = {}
        # Record exceptions here, because OpenTelemetry would store their messages even if `content` is not set.
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            _PROPAGATOR.inject(carrier)
            try:
                yield span, {**carrier}
            except Exception as error:  # any traced code may have raised it; record it and raise it again
                if self._content:
                    stack = hide_secrets("".join(traceback.format_exception(error)))
                    attributes = {"exception.message": hide_secrets(str(error)), "exception.stacktrace": stack}
                    span.record_exception(error, attributes)
                description = describe_error(error) if self._content else type(error).__name__
                span.set_status(Status(StatusCode.ERROR, description))
                raise

    def _find_tracer(self) -> Tracer:
        """Return the provider's tracer. Tracers are cached per provider, because creating one takes a quarter of the
        time of a span.
        """
        provider = self._provider or trace.get_tracer_provider()
        if self._cached_tracer is None or self._cached_tracer[0] is not provider:
            self._cached_tracer = (provider, provider.get_tracer("roundelay"))
        return self._cached_tracer[1]


def _write(message: ChatMessage) -> dict[str, JsonValue]:
    """Return a message as JSON, without the reasoning fields that only the server reads."""
    return {name: value for name, value in asdict(_without_bytes(message)).items() if name != "origin"}


def _without_bytes(message: ChatMessage) -> ChatMessage:
    """Return a message without the bytes of images and files, because exporters do not accept spans of several
    megabytes.
    """
    if not isinstance(message, UserMessage):
        return message
    images = tuple(image.partition(",")[0] if image.startswith("data:") else image for image in message.images)
    return replace(message, images=images, files=tuple(replace(file, data="") for file in message.files))


def _read_carrier(metadata: Mapping[str, object] | None) -> dict[str, str]:
    values = {key: (metadata or {}).get(key) for key in ("traceparent", "tracestate")}
    return {key: value for key, value in values.items() if isinstance(value, str)}


_PROPAGATOR = TraceContextTextMapPropagator()
_ROLES = {"SystemMessage": "system", "UserMessage": "user", "AssistantMessage": "assistant", "ToolMessage": "tool"}
