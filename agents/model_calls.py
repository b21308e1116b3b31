"""Asks models for a run: middleware around the call, attempts within it, each in a task of its own and within its time.

Part of `driver`. A failure that may pass is tried again here; what is left over is a `ModelFailed` for the reaction to
end with.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Collection
from dataclasses import fields, replace

from pydantic import JsonValue

from .events import ModelOutput, ModelRetry
from .foreign import Overdue, describe_error, run_foreign
from .hook_time import uncounted
from .middleware import Around
from .models.model import Model, ModelDelta, ModelError, ModelReply, ModelRequest, ToolCall, Usage
from .retry import retry
from .run import Run
from .stand_in import STAND_IN
from .steps import CallModel, ModelFailed
from .text import replace_surrogates

_logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
"""Before the second attempt of a model call that named no delay, about; doubled for each further one."""


class ModelCalls:
    """The model calls of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.asked: tuple[Model, ModelRequest] | None = None
        """What the turn's own request came to, middleware included, and which model got it; of several
        (`features.forced_tools`) the first. None if none did."""

    async def ask(self, step: CallModel) -> ModelReply | ModelFailed:
        """Ask until there is a reply or nothing more to try."""
        self.asked, stand_in = None, STAND_IN.get()
        outcome = await self._ask(step)
        if stand_in is None:
            return outcome
        return stand_in.settle(self._run.id, self._run.path, step.turn, outcome)

    async def _ask(self, step: CallModel) -> ModelReply | ModelFailed:
        run, agent = self._run, step.agent
        model = step.model or agent.model
        request = ModelRequest(
            step.messages, step.tools, step.tool_choice, agent_id=agent.id, reaction=run.id, turn=step.turn
        )
        spent: list[Usage] = []

        async def proceed(asked: ModelRequest) -> ModelReply:
            is_first = self.asked is None
            if is_first:
                self.asked = (model, asked)
            return await self.complete(model, asked, is_own=is_first)

        try:
            reply = await agent.chain.around_model(
                lambda: self.describe(step.turn, "model", spent, model), request, proceed
            )
            reply = _check(reply, model.name)
        except ModelError as error:
            told = {"reaction": run.id, "reason": error.reason, "error": str(error)}
            _logger.warning("model failed", extra=told)
            return ModelFailed(replace_surrogates(str(error)), error.reason)
        except Exception as error:  # of a model or of middleware: this call's end, never the runner's
            _logger.exception("model failed", extra={"reaction": run.id, "agent_id": agent.id})
            return ModelFailed(replace_surrogates(describe_error(error)))
        if spent:
            reply = replace(reply, usage=sum(spent, reply.usage))
        return reply

    def describe(self, turn: int, call: int | str, spent: list[Usage], asked: Model | None = None) -> Around:
        """Give what middleware may know; what it spends by ``complete`` is added to ``spent``. ``asked``: the model, if
        one is."""
        run = self._run

        async def complete(model: Model, request: ModelRequest) -> ModelReply:
            reply = await uncounted(self.complete(model, request, is_shown=False, is_own=False))
            spent.append(reply.usage)
            return reply

        async def keep(name: str, value: JsonValue, *, of: Collection[str] = ()) -> None:
            await run.journal.record_note(turn, name, value, of)
            run.reaction.note({name: value})

        reaction = run.reaction
        context = run.make_context(f"{run.journal.derive_id(turn, call)}-around", turn)
        return Around(
            run.id,
            run.path,
            reaction.agent,
            asked or reaction.agent.model,
            reaction.describe(),
            context,
            run.emit,
            complete,
            keep,
            run.journal.max_body_bytes // 12,
        )

    async def complete(
        self, model: Model, request: ModelRequest, *, is_shown: bool = True, is_own: bool = True
    ) -> ModelReply:
        """Ask a model, with the agent's attempts. ``is_own``: it is the request that is recorded with the turn's reply.
        Raises `ModelError`."""
        run, policy = self._run, self._run.reaction.agent.policy
        made = 0

        def judge(error: Exception) -> bool | float:
            nonlocal made
            made += 1
            if not isinstance(error, ModelError) or not error.retryable or made >= policy.model_attempts:
                return False
            # Not all at once: many agents may wait for one provider.
            delay_s: float = FIRST_DELAY_S * 2 ** (made - 1) * _spread(run.id, request.turn, made)
            if error.retry_after_ms is not None:
                delay_s = error.retry_after_ms / 1000
            if delay_s > policy.model_timeout_s:
                return False  # a provider that wants longer than a model call may take will not be waited for
            run.emit(ModelRetry(run.id, request.turn, str(error), delay_s, path=run.path))
            return delay_s

        return await retry(
            lambda: self._attempt(model, request, policy.model_timeout_s, is_shown, is_own),
            judge=judge,
            attempts=policy.model_attempts,
        )

    async def _attempt(
        self, model: Model, request: ModelRequest, timeout_s: float, is_shown: bool, is_own: bool
    ) -> ModelReply:
        run, is_heard = self._run, is_shown

        def tell(delta: ModelDelta) -> None:
            if is_heard:  # an attempt that was given up may go on for a while
                text, reasoning = replace_surrogates(delta.text), replace_surrogates(delta.reasoning)
                index, is_held = next(run.pieces), run.is_held
                run.emit(ModelOutput(run.id, request.turn, text, reasoning, run.path, index, is_held=is_held))

        stand_in = STAND_IN.get()

        def ask() -> Awaitable[ModelReply]:
            if stand_in is not None:
                return stand_in.complete(model, request, run.path, is_own=is_own)
            return model.complete(request, tell)

        try:
            return await run_foreign(ask, name=f"model-{model.name}", timeout_s=timeout_s)
        except Overdue:
            text = f"The model {model.name} gave no reply within {timeout_s:g} s."
            raise ModelError(text, reason="timeout") from None
        finally:
            is_heard = False


def _spread(reaction: str, turn: int, made: int) -> float:
    """Give a factor from 0.75 to 1.25: another one for each reaction, and the same again when a run is repeated."""
    digest = hashlib.sha256(f"{reaction}/{turn}/{made}".encode()).digest()
    return 0.75 + int.from_bytes(digest[:4], "big") / 2**33


def _check(reply: ModelReply, name: str) -> ModelReply:
    """Give the reply of a model, or of middleware, as it can be recorded and sent. Raises `ModelError` for what
    cannot."""
    odd = _find_odd(reply)
    if odd:
        raise ModelError(f"The model {name} gave a reply that cannot be used: {odd}.", reason="broken_reply")
    calls = tuple(
        ToolCall(replace_surrogates(it.id), replace_surrogates(it.name), replace_surrogates(it.arguments))
        for it in reply.tool_calls
    )
    text = None if reply.text is None else replace_surrogates(reply.text)
    return replace(reply, text=text, tool_calls=calls, model=replace_surrogates(reply.model))


def _find_odd(reply: object) -> str:
    """Say what in a reply is of another kind than it should be: servers and models of one's own are not checked
    before."""
    if not isinstance(reply, ModelReply):
        return f"it is a {type(reply).__name__}"
    texts = {"text": reply.text or "", "finish_reason": reply.finish_reason, "model": reply.model}
    for index, call in enumerate(reply.tool_calls):
        where = f"tool_calls.{index}"
        texts |= {f"{where}.id": call.id, f"{where}.name": call.name, f"{where}.arguments": call.arguments}
    counts = {field.name: getattr(reply.usage, field.name) for field in fields(reply.usage)}
    return next(
        (
            f"{where} is a {type(value).__name__}"
            for kind, values in ((str, texts), (int, counts))
            for where, value in values.items()
            if not isinstance(value, kind)
        ),
        "",
    )
