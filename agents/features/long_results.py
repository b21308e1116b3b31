"""Long results: the model reads the beginning, and the rest by `read_result`; the whole is kept in the ledger, as notes
of the reaction.

The whole is kept as the tool gave it, before the policy's ``max_result_chars`` cuts it, in parts that each fit into a
record, so that it is there again when the reaction is resumed. Only the reaction that made it reads it. What a reaction
keeps at hand is bounded: the oldest results make way for new ones, and the model is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, JsonValue

from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import checked
from roundelay.agents.tools import PlannedCall, Tool, tool
from roundelay.agents.values import AfterTool, ToolError, ToolResult, TurnState

from .references import REFERENCES, find_citations

READ_RESULT = "read_result"
WHOLE = "whole"
"""In the data of a result: ``call``, by which `read_result` knows it, how many ``chars`` it has and how many of them
are ``kept``, and the names of the ``notes`` that hold them."""

MAX_TOTAL_CHARS = 10_000_000

_KEPT = "results.kept"  # in the values: what is kept of each call, by its place


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a result: the notes that hold it; none any more, if it was let go. ``cited``: what its text may
    cite by numbers of its own."""

    notes: tuple[str, ...] = ()
    chars: int = 0
    cited: tuple[JsonValue, ...] = ()


def _check_sizes(max_chars: int, max_kept_chars: int, max_total_chars: int | None) -> None:
    if max_kept_chars < max_chars:
        raise ValueError(f"max_kept_chars must be at least max_chars ({max_chars})")
    if max_total_chars is not None and max_total_chars < max_kept_chars:
        raise ValueError(f"max_total_chars must be at least max_kept_chars ({max_kept_chars})")


class LongResults(Middleware):
    """Shows the first ``max_chars`` of a longer result, and brings the tool that reads on. Beyond ``max_kept_chars``
    nothing is kept of one, and of all together ``max_total_chars``, the newest."""

    @checked(_check_sizes)
    def __init__(
        self,
        max_chars: Annotated[int, Field(ge=100)] = 4000,
        *,
        max_kept_chars: Annotated[int, Field(ge=100, le=20_000_000)] = 1_000_000,
        max_total_chars: Annotated[int, Field(ge=100, le=200_000_000)] | None = None,
    ) -> None:
        self._max_chars = max_chars
        self._max_kept_chars = max_kept_chars
        self._max_total_chars = max_total_chars or max(MAX_TOTAL_CHARS, max_kept_chars)
        self._tool = tool(name=READ_RESULT, idempotent=True)(_read_result)

    def initial_state(self) -> Mapping[str, object]:
        return {_KEPT: {}}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return (self._tool,)

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        kept, known = result.data.get(WHOLE), state.values.get(_KEPT)
        if not isinstance(kept, dict) or not isinstance(known, dict):
            return None
        match kept:
            case {"call": str(place), "notes": list(notes), "kept": int(chars)}:
                found = result.data.get(REFERENCES)
                cited = (
                    [source for source in found if isinstance(source, dict) and "n" in source]
                    if isinstance(found, list)
                    else []
                )
                known[place] = _Kept(tuple(map(str, notes)), chars, tuple(cited))
        let_go: list[str] = []
        for place, kept_result in list(known.items())[:-1]:
            if sum(one.chars for one in known.values()) <= self._max_total_chars:
                break
            if kept_result.notes:
                let_go.append(place)
            known[place] = _Kept()
            for name in kept_result.notes:
                state.values.pop(name, None)
        if not let_go:
            return None
        listed = ", ".join(f'call "{place}"' for place in let_go)
        return AfterTool(f"{result.content}\n[to make room for it, the rest of {listed} was let go]")

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        if call.tool is self._tool:
            return self._read(around, call.arguments)
        result = await proceed(call)
        whole, most = result.whole or result.content, self._find_most(around)
        if len(whole) <= most or result.is_answer:
            return result
        place = f"{around.state.turn}.{call.index}"
        kept = whole[: self._max_kept_chars]
        notes: list[JsonValue] = []
        # By what it says: a call that is repeated after a restart may give another result.
        digest = hashlib.sha256(kept.encode()).hexdigest()[:12]
        for start in range(0, len(kept), around.max_kept_chars):
            name = f"result.{place}.{digest}.{len(notes)}"
            await around.keep(name, kept[start : start + around.max_kept_chars], of=(call.tool.name,))
            notes.append(name)
        data: dict[str, JsonValue] = {
            **result.data,
            WHOLE: {"call": place, "chars": len(whole), "kept": len(kept), "notes": notes},
        }
        shown = f"{whole[:most]}\n{_describe(place, most, len(kept), len(whole))}"
        return replace(result, content=shown, data=data, whole=None)

    def _read(self, around: Around, arguments: Mapping[str, object]) -> ToolResult:
        place, offset = str(arguments["call"]), int(str(arguments["offset"]))
        values = around.state.values
        known = values.get(_KEPT)
        kept = known.get(place) if isinstance(known, dict) else None
        if not isinstance(kept, _Kept):
            there = ", ".join(name for name, result in known.items() if result.notes) if isinstance(known, dict) else ""
            return ToolResult(f'No result of call "{place}" was cut. Those that were: {there or "none"}.', ok=False)
        if not kept.notes:
            text = (
                f'The rest of call "{place}" was let go: of all long results the newest {self._max_total_chars} '
                "characters are kept. Call the tool again, if it is needed."
            )
            return ToolResult(text, ok=False)
        parts = [values.get(name) for name in kept.notes]
        whole = "".join(part for part in parts if isinstance(part, str))
        if not all(isinstance(part, str) for part in parts):  # a data policy left them out, and the agent was restarted
            return ToolResult(
                f'The rest of call "{place}" was not kept. Call the tool again, if it is needed.', ok=False
            )
        if offset >= len(whole):
            return ToolResult(f"There are {len(whole)} characters: nothing from {offset} on.", ok=False)
        end = min(len(whole), offset + self._find_most(around))
        rest = (
            _describe(place, end, len(whole), len(whole)) if end < len(whole) else f"[the end: {len(whole)} characters]"
        )
        piece = whole[offset:end]
        numbers = find_citations(piece)
        cited: list[JsonValue] = [
            source for source in kept.cited if isinstance(source, dict) and source.get("n") in numbers
        ]
        return ToolResult(f"{piece}\n{rest}", ok=True, data={REFERENCES: cited} if cited else {})

    def _find_most(self, around: Around) -> int:
        """Give how much of a result is shown at once."""
        return min(self._max_chars, around.max_kept_chars, around.agent.policy.max_result_chars)


def _read_result(
    call: Annotated[str, Field(description='Which call: "TURN.CALL", as the cut result says')],
    offset: Annotated[int, Field(ge=0, description="How many characters to skip from its beginning")] = 0,
) -> str:
    """Read on in a result that was cut."""
    raise ToolError("Results are read inside of a reaction only.")


def _describe(place: str, end: int, kept: int, whole: int) -> str:
    if end >= kept:
        return f"[cut here: the first {end} of {whole} characters; no more was kept]"
    lost = f", of which the first {kept} were kept" if kept < whole else ""
    return f'[cut here: up to character {end} of {whole}{lost}; {READ_RESULT}(call="{place}", offset={end}) reads on]'
