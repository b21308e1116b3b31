"""The context engine: keeps each request of a reaction within a number of tokens, by the first layout that fits.

The size of a request is what the provider counted for the one before it, and an estimate of what has been added since.
Layouts, in the order in which they are tried (`layouts`): ``full``, every turn as it was; ``tool_summary``, the
summaries that tools gave (`Output.summary`) in place of old results; ``summary``, the oldest turns summed up by a
model, once, and kept in the ledger. When nothing fits, old results are cut. What it decides by is in ``state.values``,
so that a resumed reaction decides alike.

A summary never leaves its reaction: it is made of what that reaction read, which is what the readers of the incoming
message may read (``audience`` in the note), and is read by the same reaction alone.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from roundelay.agents.history import compact
from roundelay.agents.middleware import AfterTool, Around, Middleware
from roundelay.agents.models.model import (
    AssistantMessage,
    ChatMessage,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    SystemMessage,
    ToolCall,
    ToolSpec,
    Usage,
    UserMessage,
)
from roundelay.agents.steps import CallModel, TurnState
from roundelay.agents.text import cut
from roundelay.agents.tools import ToolResult

from .layouts import (
    ALL_LAYOUTS,
    SHARE_AFTER,
    SUM_UP,
    Layout,
    Reduced,
    Split,
    Summary,
    apply_summary,
    count_own,
    digest_turns,
    find_summary,
    reduce_read,
    reduce_until,
    split,
    write_order,
)
from .tokens import SEVERAL_REQUESTS, Count, count_request, estimate_tokens, load_count

_logger = logging.getLogger(__name__)

SAVE = "save"
"""In the data of a tool's result: False for one that is to be read once; later turns hold only its summary, or its
beginning."""

SUMMARY = "context.summary"  # a note, and in the values
# In the values: how results are to be reduced, how many turns the prepared request holds as a summary, its estimated
# size (0: it does not fit), and the last size that was both estimated and counted.
_RESULTS, _APPLIED, _ASKED, _COUNTED = "context.results", "context.applied", "context.asked", "context.counted"


class ContextEngine(Middleware):
    """Keeps requests within ``max_tokens`` less ``reserve_tokens`` for the reply. ``model`` sums up, else the agent's
    own."""

    def __init__(
        self,
        max_tokens: int,
        *,
        reserve_tokens: int = 1000,
        layouts: Sequence[Layout] = ALL_LAYOUTS,
        summary_tokens: int = 600,
        model: Model | None = None,
        count: Count = estimate_tokens,
    ) -> None:
        if reserve_tokens >= max_tokens:
            raise ValueError(f"reserve_tokens is {reserve_tokens} and must be less than max_tokens ({max_tokens})")
        self.limit = max_tokens - reserve_tokens
        """How many tokens a request may have."""

        self._layouts = tuple(layouts)
        self._summary_tokens = summary_tokens
        self._model = model
        self._count = count

    # --- pure

    def initial_state(self) -> Mapping[str, object]:
        return {_RESULTS: {}, _APPLIED: 0, _ASKED: 0, _COUNTED: None}

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        summary, save = result.data.get("summary"), result.data.get(SAVE)
        if isinstance(summary, str) or save is False:
            known = state.values.setdefault(_RESULTS, {})
            assert isinstance(known, dict)
            known[call.id] = Reduced(summary if isinstance(summary, str) else None, save is not False)
        return None

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        """Take what the provider counted of a request that went out as it was prepared."""
        asked, counted = state.values.get(_ASKED), reply.usage.prompt_tokens
        is_one = not state.values.get(SEVERAL_REQUESTS)
        if is_one and isinstance(asked, int) and asked and asked // 4 <= counted <= asked * 4:
            state.values[_COUNTED] = (asked, counted)
        return reply.usage

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        known = find_summary(state.values.get(SUMMARY), state.history)
        parted = self._arrange(state, step, known)
        state.values[_APPLIED] = known.turns if known is not None else 0
        fits = self._fits(state, parted, step.tools)
        state.values[_ASKED] = count_request(parted.join(), step.tools, self._count) if fits else 0
        return replace(step, messages=parted.join())

    # --- live

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        state = around.state
        known, applied = find_summary(state.values.get(SUMMARY), state.history), state.values.get(_APPLIED)
        assert isinstance(applied, int)
        parted = split(request.messages, count_own(state.history) - applied)
        if known is not None and known.turns > applied:  # made in this turn, before the agent was interrupted
            parted = apply_summary(parted, known, beyond=applied)
        if not self._fits(state, parted, request.tools):
            if "summary" in self._layouts and (known is None or known.made_in != state.turn):
                parted = await self._sum_up(around, request, parted, known)
            if not self._fits(state, parted, request.tools):
                parted = split(compact(parted.join()), len(parted.blocks))
        return await proceed(replace(request, messages=parted.join()))

    async def _sum_up(self, around: Around, request: ModelRequest, parted: Split, known: Summary | None) -> Split:
        """Put a summary in place of the oldest turns, as many as it takes; all as it was if there is none, or the model
        fails."""
        state = around.state
        done = known.turns if known is not None else 0
        target = int(self.limit * SHARE_AFTER)
        turns = 0
        while turns < len(parted.blocks) - 1:
            turns += 1
            rest = Split(parted.head, parted.blocks[turns:])
            if self._measure(state, rest, request.tools) + self._summary_tokens <= target:
                break
        if not turns:
            return parted
        text = await self._ask(around, request, known, parted.blocks[:turns])
        if text is None:
            return parted
        summary = Summary(
            made_in=state.turn,
            turns=done + turns,
            digest=digest_turns(state.history, done + turns),
            text=text,
            audience=around.context.trigger.seq,
        )
        called = {call.name for it in state.history if isinstance(it, AssistantMessage) for call in it.tool_calls}
        await around.keep(SUMMARY, summary.model_dump(mode="json"), of=called)
        return apply_summary(parted, summary, beyond=done)

    async def _ask(
        self, around: Around, request: ModelRequest, known: Summary | None, blocks: Sequence[Sequence[ChatMessage]]
    ) -> str | None:
        # About 3 characters to a token, at the least.
        told = write_order(known, blocks, max_chars=3 * self.limit, max_tokens=self._summary_tokens)
        asked = replace(request, messages=(SystemMessage(SUM_UP), UserMessage(told)), tools=(), tool_choice="auto")
        try:
            reply = await around.complete(self._model or around.agent.model, asked)
        except ModelError as error:
            _logger.warning("no summary", extra={"reaction": around.reaction, "reason": error.reason})
            return None
        return cut(reply.text, min(8 * self._summary_tokens, around.max_kept_chars)) if reply.text else None

    # --- sizes

    def _arrange(self, state: TurnState, step: CallModel, known: Summary | None) -> Split:
        results = state.values.get(_RESULTS)
        reduced = results if isinstance(results, dict) else {}
        parted = split(step.messages, count_own(state.history))
        if known is not None:
            parted = apply_summary(parted, known)
        parted = reduce_read(parted, reduced)
        if "tool_summary" in self._layouts:
            is_first = self._layouts[0] == "tool_summary"
            parted = reduce_until(parted, reduced, lambda it: not is_first and self._fits(state, it, step.tools))
        return parted

    def _fits(self, state: TurnState, parted: Split, tools: Sequence[ToolSpec]) -> bool:
        return self._measure(state, parted, tools) <= self.limit

    def _measure(self, state: TurnState, parted: Split, tools: Sequence[ToolSpec]) -> int:
        """The provider's count of the request before, and the estimate of the difference; the estimate alone before
        there is one."""
        estimate = count_request(parted.join(), tools, self._count)
        match state.values.get(_COUNTED):
            case (int(asked), int(counted)):
                return max(estimate // 4, counted + estimate - asked)
            case _:
                return estimate


class ContextOptions(BaseModel):
    """``context`` in an agent's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[int, Field(ge=200)]
    reserve_tokens: Annotated[int, Field(ge=0)] | None = None
    """None: 1000, or half of a smaller ``max_tokens``."""

    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)] = ALL_LAYOUTS
    summary_tokens: Annotated[int, Field(ge=50)] | None = None
    """None: 600, or a third of what a request may have, where that is less."""

    encoding: str | None = None
    """Of `tiktoken`; without one tokens are estimated."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reserve_tokens is not None and self.reserve_tokens >= self.max_tokens:
            raise ValueError(f"reserve_tokens must be less than max_tokens ({self.max_tokens})")
        if list(self.layouts) != [it for it in ALL_LAYOUTS if it in self.layouts]:
            raise ValueError(f"layouts must stand in this order, each once: {', '.join(ALL_LAYOUTS)}")
        if self.summary_tokens is not None and self.summary_tokens >= (limit := self.max_tokens - self.reserve):
            raise ValueError(f"summary_tokens must be less than what a request may have ({limit})")
        return self

    @property
    def reserve(self) -> int:
        return min(1000, self.max_tokens // 2) if self.reserve_tokens is None else self.reserve_tokens

    def build(self) -> ContextEngine:
        """Make it. Raises `ConfigError`."""
        count, limit = load_count(self.encoding), self.max_tokens - self.reserve
        summary = self.summary_tokens or min(600, limit // 3)
        return ContextEngine(
            self.max_tokens, reserve_tokens=self.reserve, layouts=self.layouts, summary_tokens=summary, count=count
        )
