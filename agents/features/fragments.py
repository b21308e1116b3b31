"""Middleware for context fragments: pieces of text from tools, which are ranked and shown to the model before each
turn. The model can cite fragments.

A tool returns ``Output(content, {"fragments": [{"id", "title", "url", "text", "score"}, ...]})``. The result that the
model reads contains only the content. The last message of the next request shows the best fragments of the whole
reaction. The message with the fragments is not part of the history, so the history stays short and the provider's cache
stays valid. Fragments and references (`features.references`) share one sequence of numbers, and both are cited by
number. This module is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from roundelay.agents.isolation import check_plain
from roundelay.agents.middleware import Around, CallModel, Middleware, RunTool
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import IN_CODE, checked
from roundelay.agents.tools import PlannedCall
from roundelay.agents.values import AfterTool, ToolResult, TurnState
from roundelay.network.text import cut

from .references import FRAGMENTS, Reference, References, find_numbers, fit_found, read_found

_GATHERED = "fragments.gathered"  # key in the state's values: fragments by key


class Fragment(Reference):
    """A piece of text for the model's context. Fragments with a higher ``score`` are more important. Tools that are
    used together should use the same scale.
    """

    score: float = 0.0


Rank = Callable[[Sequence[Fragment], TurnState], Sequence[Fragment]]
"""Function that returns the fragments to show, best first. The function must be pure, because it runs again when a
reaction is resumed.
"""


def rank_by_score(fragments: Sequence[Fragment], state: TurnState) -> Sequence[Fragment]:
    """Sort fragments by score. Fragments with equal scores keep their order."""
    return sorted(fragments, key=lambda fragment: -fragment.score)


class Fragments(Middleware):
    """Shows the ``limit`` best fragments before each turn, in at most ``max_chars``.

    Requires `References`, which checks the citations and lists the cited sources.
    """

    needs = (References,)

    @checked()
    def __init__(
        self,
        *,
        limit: Annotated[int, Field(ge=1, le=999)] = 10,
        max_chars: Annotated[int, Field(ge=100, le=10_000_000)] = 8_000,
        rank: Annotated[Rank, IN_CODE] = rank_by_score,
    ) -> None:
        self._limit = limit
        self._max_chars = max_chars
        check_plain("The rank of Fragments", rank)
        self._rank = rank

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
        return fit_found(await proceed(call), FRAGMENTS)

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        gathered = state.values.setdefault(_GATHERED, {})
        assert isinstance(gathered, dict)
        for fragment in read_found(Fragment, result.data.get(FRAGMENTS), call.name):
            number = find_numbers(state).find(
                Reference(id=fragment.id, title=fragment.title, url=fragment.url, text=fragment.text)
            )
            # A tool may return the same fragment again with a different score. Keep the copy with the highest score.
            if number is not None and (fragment.key not in gathered or gathered[fragment.key].score < fragment.score):
                gathered[fragment.key] = fragment
        return None

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        best = list(self._rank(list_fragments(state), state))[: self._limit]
        if not best:
            return step
        numbers = {source.key: number for number, source in find_numbers(state).sources.items()}
        shown = "\n\n".join(fragment.write(numbers[fragment.key]) for fragment in best if fragment.key in numbers)
        return step.tell(f"{_HEAD}\n{cut(shown, self._max_chars)}")


def list_fragments(state: TurnState) -> list[Fragment]:
    """Return the fragments of this reaction so far, in the order of their arrival."""
    gathered = state.values.get(_GATHERED)
    return list(gathered.values()) if isinstance(gathered, dict) else []


_HEAD = (
    "Texts that your tools have found, best first. Cite a text by its number in brackets, like [1], right after the "
    "statement that it supports:"
)
