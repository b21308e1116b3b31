"""Model calls of one run: the attempts of a request, its streamed text, and checks on the reply.

`driver` calls models only through `ModelCaller`. `ModelCaller` sends the request of a turn through the agent's
middleware and retries temporary failures. A permanent failure is returned as `ModelFailed`, and the reaction decides
how to end. Requests that middleware makes itself (`Around.complete`) get the same attempts. `driver` records the reply
before the reaction reads it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from pydantic import JsonValue

from .events import ModelOutput, ModelRetry
from .isolation import CallTimedOut, describe_error, pause_hook_timer, redact_error, run_isolated
from .middleware import Around, CallModel
from .models.model import (
    Model,
    ModelDelta,
    ModelError,
    ModelReply,
    ModelRequest,
    ModelUse,
    ReplyOrigin,
    ToolCall,
    Usage,
)
from .models.tokens import count_request, estimate_tokens
from .run_context import RunContext, add_usage
from .text import replace_all_surrogates, replace_surrogates
from .values import ModelFailed

_logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
"""Approximate delay before the second attempt, in seconds, if the provider does not request a delay. The delay doubles
for each further attempt, up to ``model_timeout_s``.
"""

MAX_DOUBLINGS = 30
"""Maximum number of times that the delay doubles. Without a maximum, a large ``model_attempts`` would cause an
overflow.
"""


class ModelCaller:
    """Requests of one run to its models."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.sent: tuple[Model, ModelRequest] | None = None
        """Model and request of the current turn, after all middleware. If middleware sends several requests, this is
        the first request. If middleware replies without a request, ``sent`` is None.
        """

        self.middleware_use: tuple[ModelUse, ...] = ()
        """Usage of requests that middleware made around the current turn's request."""

        self._releases: list[Callable[[], None]] = []

        self.streamed_text = ""
        """Text of the current turn's reply that has streamed so far."""

    async def request_reply(self, step: CallModel) -> ModelReply | ModelFailed:
        """Return the model's reply, or `ModelFailed` if no attempt is left. A failing model or middleware never raises
        an error here.
        """
        self.sent, self.middleware_use = None, ()
        run, model = self._run, step.model or step.agent.model
        prompt = step.state.history[1].content if len(step.state.history) > 1 else None
        deferred = run.reaction.setup.deferred
        request = ModelRequest(
            step.messages,
            step.tools,
            step.tool_choice,
            step.agent.id,
            run.id,
            step.turn,
            prompt=prompt or "",
            can_call=True if deferred and not step.tools and not step.is_last else None,
            thread_id=next(iter(run.reaction.setup.threads), ""),
        )
        used: list[ModelUse] = []
        around = partial(self.make_around, step.turn, "model", used, model)
        send = partial(self.complete, model, is_turn_request=True)
        outcome: ModelReply | ModelFailed
        try:
            reply = _check_reply(await run.reaction.agent.chain.around_model(around, request, send), model.name)
            self.middleware_use = tuple(used)
            outcome = replace(reply, usage=add_usage(used, reply.usage)) if used else reply
        except ModelError as error:
            _logger.warning("model failed", extra={"reaction": run.id, "reason": error.reason, "error": str(error)})
            run.unrecorded_use += used
            outcome = ModelFailed(replace_surrogates(str(error)), error.reason)
        except Exception as error:  # an error in user code (model, middleware) fails this call, but not the runner
            place = {"reaction": run.id, "agent_id": step.agent.id}
            _logger.error("model failed", extra=place, exc_info=redact_error(error))
            run.unrecorded_use += used
            outcome = ModelFailed(replace_surrogates(describe_error(error)))
        return outcome if run.playback is None else run.playback.settle(run.id, run.path, step.turn, outcome)

    async def complete(self, model: Model, request: ModelRequest, *, is_turn_request: bool = False) -> ModelReply:
        """Send a request, and retry temporary failures as often as the agent's policy allows. Raises `ModelError`.

        ``is_turn_request`` is False for requests that middleware makes itself. Replies to requests of middleware do not
        stream to people. The journal stores the first request of a turn.
        """
        is_recorded = is_turn_request and self.sent is None
        if is_recorded:
            self.sent = (model, request)
        send = partial(self._retry, model, is_turn_request=is_turn_request, is_recorded=is_recorded)
        limit = self._run.journal.max_root_tokens
        if limit is None or self._run.playback is not None:  # a replay makes no request
            return await send(request)
        from .features.budget import HubBudget  # import only if the network sets a token budget

        around = self.make_around(request.turn, "budget", [], model)
        releases = self._releases if is_turn_request else []
        try:
            return await HubBudget(limit).ask(around, request, send, releases)
        finally:
            if not is_turn_request:
                _release(releases)

    def release(self) -> None:
        """Release the tokens of the turn's requests in the budget of the conversation, because they are recorded."""
        _release(self._releases)

    async def _retry(
        self, model: Model, request: ModelRequest, *, is_turn_request: bool, is_recorded: bool
    ) -> ModelReply:
        policy, attempt = self._run.reaction.agent.policy, 0
        while True:
            attempt += 1
            try:
                return await self._attempt(model, request, policy.model_timeout_s, is_turn_request, is_recorded)
            except ModelError as error:
                delay_s = self._find_retry_delay(request, error, attempt)
                if delay_s is None:
                    raise
                # Warn once. If a provider is down for minutes, the log would otherwise fill with the same line.
                if attempt == 1:
                    details = {"model": model.name, "reason": error.reason, "attempts": policy.model_attempts}
                    _logger.warning("model call is retried", extra={"reaction": self._run.id, **details})
                self._emit_retry(request.turn, str(error), delay_s)
            await asyncio.sleep(delay_s)

    def _find_retry_delay(self, request: ModelRequest, error: ModelError, attempt: int) -> float | None:
        """Return the delay before the next attempt in seconds, or None if no attempt is left."""
        policy = self._run.reaction.agent.policy
        if not error.retryable or attempt >= policy.model_attempts:
            return None
        if error.retry_after_ms is not None:
            wanted_s = error.retry_after_ms / 1000
            # Give up if the provider requests a longer delay than the time limit of a model call.
            return wanted_s if wanted_s <= policy.model_timeout_s else None
        # Wait at most as long as one call may take, so that a person soon sees either a reply or a clear failure.
        delay_s: float = min(FIRST_DELAY_S * 2 ** min(attempt - 1, MAX_DOUBLINGS), policy.model_timeout_s)
        # Vary the delay, so that many agents that wait for the same provider do not retry at the same moment.
        return delay_s * _spread(self._run.id, request.turn, attempt)

    async def _attempt(
        self, model: Model, request: ModelRequest, timeout_s: float, is_shown: bool, is_recorded: bool
    ) -> ModelReply:
        run = self._run
        stream = _ReplyStream(self, model.name, request.turn, is_shown=is_shown, is_recorded=is_recorded)
        send = partial(model.complete, request, stream.add)
        if run.playback is not None:
            send = partial(run.playback.complete, model, request, run.path, is_own=is_recorded)
        try:
            return await run_isolated(send, name=f"model-{model.name}", timeout_s=timeout_s)
        except CallTimedOut:
            text = f"The model {model.name} gave no reply within {timeout_s:g} s."
            # Raise a `ModelError`, so that the timeout counts as one attempt, like other temporary failures.
            raise ModelError(text, reason="timeout") from None
        except asyncio.CancelledError:
            if run.playback is None:  # a replay calls no model, so nothing was billed
                # A provider may bill an interrupted request. Count the reported usage, or an estimate.
                used = _estimate_usage(request, "".join(stream.texts), stream.reported_usage)
                run.interrupted_use.append(ModelUse(model.name, used))
            raise
        finally:
            # An abandoned call may continue in the background. Close the stream, so that pieces of the abandoned call
            # do not mix with the text of the next attempt.
            stream.is_open = False

    def _emit_retry(self, turn: int, error: str, delay_s: float) -> None:
        self._run.emit(ModelRetry(self._run.id, turn, error, delay_s, path=self._run.path))

    def show_delta(self, turn: int, delta: ModelDelta, *, has_text: bool) -> None:
        """Emit a piece of the reply. If the stream was interrupted, first report that the reply starts again."""
        run = self._run
        if delta.broken_off:
            self._emit_retry(turn, replace_surrogates(delta.broken_off), 0.0)
        if has_text and (delta.text or delta.reasoning or not delta.broken_off):
            text, reasoning = replace_all_surrogates([delta.text, delta.reasoning])
            index, is_held = next(run.stream_numbers), run.is_text_withheld()
            run.emit(ModelOutput(run.id, turn, text, reasoning, index, is_held, path=run.path))

    # --- requests of middleware

    def make_around(self, turn: int, call: int | str, used: list[ModelUse], model: Model | None = None) -> Around:
        """Return the `Around` that middleware receives for a step. The usage of the middleware's requests is added
        to ``used``.
        """
        run = self._run
        agent = run.reaction.agent
        return Around(
            run.id,
            run.path,
            agent,
            model or agent.model,
            run.reaction.describe(),
            run.make_call_context(turn, call, "-around"),
            run.emit,
            partial(self._complete_for_middleware, used),
            partial(self._keep_note, turn),
            partial(run.find_replayed_note, turn),
            # An escaped character takes up to 6 bytes. Half of the record's size is left for other fields.
            run.journal.max_body_bytes // 12,
        )

    async def _complete_for_middleware(self, used: list[ModelUse], model: Model, request: ModelRequest) -> ModelReply:
        reply = await pause_hook_timer(self.complete(model, request))
        used.append(ModelUse(reply.model or model.name, reply.usage))
        return reply

    async def _keep_note(self, turn: int, name: str, value: JsonValue, *, of: Collection[str] = ()) -> None:
        # Record first: a value that hooks have seen must be the same in a resumed run.
        await pause_hook_timer(self._run.journal.record_note(turn, name, value, of))
        self._run.reaction.update_values({name: value})


class _ReplyStream:
    """Streamed pieces of the reply in one attempt. A closed stream drops all later pieces, because an abandoned model
    call may still send some.
    """

    def __init__(self, caller: ModelCaller, model_name: str, turn: int, *, is_shown: bool, is_recorded: bool) -> None:
        self.is_open = True
        self.texts: list[str] = []
        self.reported_usage = Usage()
        self._caller = caller
        self._model_name = model_name
        self._turn = turn
        self._is_shown = is_shown
        self._is_recorded = is_recorded
        if is_recorded:
            caller.streamed_text = ""

    def add(self, delta: ModelDelta) -> None:
        if not self.is_open:
            return
        self.reported_usage = delta.usage or self.reported_usage
        # Check the types, because a user-written model may send any values.
        has_text = isinstance(delta.text, str) and isinstance(delta.reasoning, str)
        self.texts.append(delta.text + delta.reasoning if has_text else "")
        if self._is_recorded:
            # After an interruption the model writes the reply from the start again. Drop the old text, because its
            # beginning would appear twice.
            before = "" if delta.broken_off else self._caller.streamed_text
            self._caller.streamed_text = before + (delta.text if has_text else "")
        is_usage_only = delta.usage is not None and not (delta.text or delta.reasoning)
        if not self._is_shown or is_usage_only:
            return
        self._caller.show_delta(self._turn, delta, has_text=has_text)
        if not has_text:
            kinds = {"text": type(delta.text).__name__, "reasoning": type(delta.reasoning).__name__}
            _logger.error(
                "a piece of a streamed reply is not text and is not shown", extra={"model": self._model_name, **kinds}
            )


def _release(releases: list[Callable[[], None]]) -> None:
    while releases:
        releases.pop()()


def _spread(reaction: str, turn: int, attempt: int) -> float:
    """Return a factor from 0.75 to 1.25 for the delay of a retry. The factor differs between reactions, but a repeated
    run gets the same factor.
    """
    digest = hashlib.sha256(f"{reaction}/{turn}/{attempt}".encode()).digest()
    return 0.75 + int.from_bytes(digest[:4], "big") / 2**33


def _estimate_usage(request: ModelRequest, streamed: str, reported: Usage) -> Usage:
    """Return the usage of an interrupted request: the provider's count, or an estimate from the texts."""
    prompt = reported.prompt_tokens or count_request(request.messages, request.tools, estimate_tokens)
    completion = max(reported.completion_tokens, estimate_tokens(streamed))
    return replace(reported, prompt_tokens=prompt, completion_tokens=completion)


# --- checks on a reply


def _check_reply(reply: ModelReply, name: str) -> ModelReply:
    """Return a reply that can be recorded and sent, without lone surrogates. Raises `ModelError` for values of a
    wrong type, because output of user-written models and middleware is not checked earlier.
    """
    problem = _find_type_error(reply)
    if problem:
        raise ModelError(f"The model {name} returned a reply that cannot be used: {problem}.", reason="broken_reply")
    call_texts = [part for call in reply.tool_calls for part in (call.id, call.name, call.arguments)]
    # A lone surrogate cannot be encoded as UTF-8. The record could not be sent, and the paid reply would be lost.
    text, model, *parts = replace_all_surrogates([reply.text or "", reply.model, *call_texts])
    calls = tuple(itertools.starmap(ToolCall, zip(parts[::3], parts[1::3], parts[2::3], strict=True)))
    origin = reply.origin
    if origin is not None and origin.has_fields:
        origin = replace(origin, message=_clean_json(origin.message), calls=tuple(map(_clean_json, origin.calls)))
    return replace(reply, text=None if reply.text is None else text, tool_calls=calls, model=model, origin=origin)


def _clean_json(value: Any) -> Any:
    """Replace lone surrogates in every text of a JSON value."""
    match value:
        case str():
            return replace_surrogates(value)
        case Mapping():
            return {name: _clean_json(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_clean_json(inner) for inner in value]
        case _:
            return value


def _find_type_error(reply: object) -> str:
    """Return the part of a reply that has a wrong type, or an empty string if there is none."""
    if not isinstance(reply, ModelReply):
        return f"it is a {type(reply).__name__}"
    if not isinstance(reply.origin, ReplyOrigin | None):
        return f"origin is a {type(reply.origin).__name__}"
    texts = {"text": reply.text or "", "finish_reason": reply.finish_reason, "model": reply.model}
    texts["reasoning"] = reply.reasoning
    for index, call in enumerate(reply.tool_calls):
        where = f"tool_calls.{index}"
        texts |= {f"{where}.id": call.id, f"{where}.name": call.name, f"{where}.arguments": call.arguments}
    counts = {field.name: getattr(reply.usage, field.name) for field in fields(reply.usage)}
    for kind, values in ((str, texts), (int, counts)):
        for where, value in values.items():
            if not isinstance(value, kind):
                return f"{where} is a {type(value).__name__}"
    return ""
