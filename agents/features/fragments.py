"""Context fragments: what tools gathered, ranked, shown to the model anew before each turn, and citable.

A tool gives ``Output(content, {"fragments": [{"id", "title", "url", "text", "score"}, ...]})``; the model reads of the
result only the content. The best fragments of the whole reaction stand in the trailing message of the next request,
which is not kept: the history stays short and the provider's cache holds. They are numbered with the references
(`features.references`), so both are cited alike. Pure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from pydantic import Field

from roundelay.agents.isolation import check_plain
from roundelay.agents.middleware import Around, CallModel, Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import IN_CODE, checked
from roundelay.agents.tools import PlannedCall
from roundelay.agents.values import AfterTool, ToolResult, TurnState
from roundelay.network.text import cut

from .references import FRAGMENTS, Reference, References, find_numbers, fit_found, read_found

_GATHERED = "fragments.gathered"  # in the state's values: by their keys


class Fragment(Reference):
    """A piece of context. ``score`` is higher for what matters more; tools that are used together should agree on its
    scale."""

    score: float = 0.0


Rank = Callable[[Sequence[Fragment], TurnState], Sequence[Fragment]]
"""Gives the fragments to show, the best first. Pure: it is asked again when a reaction is resumed."""


def rank_by_score(fragments: Sequence[Fragment], state: TurnState) -> Sequence[Fragment]:
    """Give them by score, of equals the one that came first."""
    return sorted(fragments, key=lambda fragment: -fragment.score)


class Fragments(Middleware):
    """Shows the ``limit`` best fragments before each turn, in at most ``max_chars``. `References` stand beside it: they
    check what is cited and say what that was."""

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

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        return fit_found(await proceed(call), FRAGMENTS)

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        known = state.values.setdefault(_GATHERED, {})
        assert isinstance(known, dict)
        for fragment in read_found(Fragment, result.data.get(FRAGMENTS), call.name):
            number = find_numbers(state).find(
                Reference(id=fragment.id, title=fragment.title, url=fragment.url, text=fragment.text)
            )
            if number is not None and (fragment.key not in known or known[fragment.key].score < fragment.score):
                known[fragment.key] = fragment
        return None

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        best = list(self._rank(list_fragments(state), state))[: self._limit]
        if not best:
            return step
        numbers = {source.key: number for number, source in find_numbers(state).sources.items()}
        shown = "\n\n".join(fragment.write(numbers[fragment.key]) for fragment in best if fragment.key in numbers)
        return step.tell(f"{_HEAD}\n{cut(shown, self._max_chars)}")


def list_fragments(state: TurnState) -> list[Fragment]:
    """Give what was gathered so far, in the order in which it came."""
    known = state.values.get(_GATHERED)
    return list(known.values()) if isinstance(known, dict) else []


_HEAD = (
    "What your tools have gathered, the best first; cite a piece by its number in brackets, like [1], right after what "
    "it shows:"
)
