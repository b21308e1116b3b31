"""Middleware that shows the model only the beginning of a long result. The model can read the rest with the tool
`read_result`. The ledger stores the whole result as notes.

The result is stored before the policy's ``max_result_chars`` shortens it, in parts that each fit into a record.
Therefore the whole result is still available after the reaction resumes. Only the reaction that received the result can
read it. The stored results of one reaction have a total limit: new results replace the oldest results, and the model
reads a notice about the replacement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, JsonValue

from roundelay.agents.middleware import Around, Middleware, RunTool
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import checked
from roundelay.agents.tools import PlannedCall, Tool, tool
from roundelay.agents.values import AfterTool, ToolError, ToolResult, TurnState

from .references import REFERENCES, find_citations

READ_RESULT = "read_result"
WHOLE = "whole"
"""Key in a result's data for an object about the whole result: ``call`` (the id for `read_result`), ``chars`` (the
length of the result), ``kept`` (the number of stored characters), and ``notes`` (the names of the notes that contain
them).
"""

MAX_TOTAL_CHARS = 10_000_000

_KEPT = "results.kept"  # key in ``state.values``: the kept result of each call, by turn and index


@dataclass(frozen=True, slots=True)
class _Kept:
    """Stored parts of a long result. ``notes`` names the notes that contain the parts, and is empty after the result is
    dropped. ``cited`` lists the sources that the text of the result cites by its own numbers.
    """

    notes: tuple[str, ...] = ()
    chars: int = 0
    cited: tuple[JsonValue, ...] = ()


def _check_sizes(max_chars: int, max_kept_chars: int, max_total_chars: int | None) -> None:
    if max_kept_chars < max_chars:
        raise ValueError(f"max_kept_chars must be at least max_chars ({max_chars})")
    if max_total_chars is not None and max_total_chars < max_kept_chars:
        raise ValueError(f"max_total_chars must be at least max_kept_chars ({max_kept_chars})")


class LongResults(Middleware):
    """Shows the first ``max_chars`` of a longer result, and adds a tool that reads the rest.

    At most ``max_kept_chars`` characters of one result are stored, and at most ``max_total_chars`` of all results of a
    reaction. The newest results have priority.
    """

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
        self._tool = tool(name=READ_RESULT, read_only=True)(_read_result)

    def initial_state(self) -> Mapping[str, object]:
        return {_KEPT: {}}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return (self._tool,)

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        kept, kept_results = result.data.get(WHOLE), state.values.get(_KEPT)
        if not isinstance(kept, dict) or not isinstance(kept_results, dict):
            return None
        match kept:
            case {"call": str(call_id), "notes": list(notes), "kept": int(chars)}:
                references = result.data.get(REFERENCES)
                cited = (
                    [source for source in references if isinstance(source, dict) and "n" in source]
                    if isinstance(references, list)
                    else []
                )
                kept_results[call_id] = _Kept(tuple(map(str, notes)), chars, tuple(cited))
        dropped: list[str] = []
        # Drop the oldest results first. Never drop the newest result, because the model has just read its beginning.
        for call_id, kept_result in list(kept_results.items())[:-1]:
            if sum(other.chars for other in kept_results.values()) <= self._max_total_chars:
                break
            if kept_result.notes:
                dropped.append(call_id)
            kept_results[call_id] = _Kept()
            for name in kept_result.notes:
                state.values.pop(name, None)
        if not dropped:
            return None
        listed = ", ".join(f'call "{call_id}"' for call_id in dropped)
        return AfterTool(f"{result.content}\n[the rest of {listed} was dropped to make room for this result]")

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
        if call.tool is self._tool:
            return self._read(around, call.arguments)
        result = await proceed(call)
        whole, max_chars = result.whole or result.content, self._find_max_chars(around)
        # Show an answer completely: the person who gets it has no tool to read the rest.
        if len(whole) <= max_chars or result.is_answer:
            return result
        call_id = f"{around.state.turn}.{call.index}"
        kept = whole[: self._max_kept_chars]
        notes: list[JsonValue] = []
        # Include a hash of the content in the name, because a call that is repeated after a restart may return a
        # different result.
        digest = hashlib.sha256(kept.encode()).hexdigest()[:12]
        for start in range(0, len(kept), around.max_kept_chars):  # each note must fit into a record
            name = f"result.{call_id}.{digest}.{len(notes)}"
            await around.keep(name, kept[start : start + around.max_kept_chars], of=(call.tool.name,))
            notes.append(name)
        data: dict[str, JsonValue] = {
            **result.data,
            WHOLE: {"call": call_id, "chars": len(whole), "kept": len(kept), "notes": notes},
        }
        shown = f"{whole[:max_chars]}\n{_describe_cut(call_id, max_chars, len(kept), len(whole))}"
        return replace(result, content=shown, data=data, whole=None)

    def _read(self, around: Around, arguments: Mapping[str, object]) -> ToolResult:
        call_id, offset = str(arguments["call"]), int(str(arguments["offset"]))
        values = around.state.values
        kept_results = values.get(_KEPT)
        kept = kept_results.get(call_id) if isinstance(kept_results, dict) else None
        if not isinstance(kept, _Kept):
            available = (
                ", ".join(name for name, result in kept_results.items() if result.notes)
                if isinstance(kept_results, dict)
                else ""
            )
            sentence = f'The result of call "{call_id}" was not cut. Cut results: {available or "none"}.'
            return ToolResult(sentence, ok=False)
        if not kept.notes:
            text = (
                f'The rest of call "{call_id}" was dropped: only the newest {self._max_total_chars} characters of long '
                "results are kept. Call the tool again if you need it."
            )
            return ToolResult(text, ok=False)
        parts = [values.get(name) for name in kept.notes]
        whole = "".join(part for part in parts if isinstance(part, str))
        # After a restart, notes may be missing because a data policy did not store them.
        if not all(isinstance(part, str) for part in parts):
            sentence = f'The rest of call "{call_id}" was not kept. Call the tool again if you need it.'
            return ToolResult(sentence, ok=False)
        if offset >= len(whole):
            sentence = f"The result has {len(whole)} characters. Choose an offset below that, not {offset}."
            return ToolResult(sentence, ok=False)
        end = min(len(whole), offset + self._find_max_chars(around))
        if end < len(whole):
            rest = _describe_cut(call_id, end, len(whole), len(whole))
        else:
            rest = f"[end of the result: {len(whole)} characters]"
        piece = whole[offset:end]
        numbers = find_citations(piece)
        # List only the sources that this part cites, because a source gets its number when it is shown.
        cited: list[JsonValue] = [
            source for source in kept.cited if isinstance(source, dict) and source.get("n") in numbers
        ]
        return ToolResult(f"{piece}\n{rest}", ok=True, data={REFERENCES: cited} if cited else {})

    def _find_max_chars(self, around: Around) -> int:
        """Return how many characters of a result the model sees at once."""
        return min(self._max_chars, around.max_kept_chars, around.agent.policy.max_result_chars)


def _read_result(
    call: Annotated[str, Field(description='Id of the call, "TURN.CALL", from the cut result')],
    offset: Annotated[int, Field(ge=0, description="Number of characters to skip from the beginning")] = 0,
) -> str:
    """Read the next part of a result that was cut."""
    raise ToolError("Results can be read only inside a reaction.")


def _describe_cut(call_id: str, end: int, kept: int, whole: int) -> str:
    if end >= kept:
        return f"[cut here: the first {end} of {whole} characters; the rest was not kept]"
    lost = f", of which the first {kept} were kept" if kept < whole else ""
    return f'[cut here: the first {end} of {whole} characters{lost}; {READ_RESULT}(call="{call_id}", offset={end}) reads on]'
