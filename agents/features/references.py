"""References: what tools found, numbered for citation across tools and turns, and the sources that an answer cites.

A tool gives ``Output(content, {"references": [{"id", "title", "url", "text"}, ...]})``. `References` is middleware: the
model reads them with their numbers behind the result, a number that stands for nothing is taken out of the answer, and
what the answer cites goes into the metadata of its message (``sources``). Numbers follow the order of the calls, so a
resumed reaction gives them again. What an agent inside of a call cited is numbered anew in its caller's order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from roundelay.agents.citations import REFERENCES, SOURCES, find_citations, map_citations
from roundelay.agents.middleware import Answer, Around, Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import checked
from roundelay.agents.text import cut
from roundelay.agents.values import AfterTool, ToolResult, TurnState

from .structured import is_structured

_logger = logging.getLogger(__name__)
_NUMBERED = "references.numbered"  # in the state's values: each with its number, by its key

MAX_REFERENCES = 999
"""In one reaction: a citation has three digits at most. Another agent's answer may name as many as go into a frame."""

MAX_SOURCES = 50
"""In the metadata of one answer."""

MAX_FIELD_CHARS = 500
"""Of a title, an address or an id there."""


class Reference(BaseModel):
    """Something that may be cited. Two are the same if they have one ``url``, or, without any, one ``id``."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    id: str = ""
    title: str = ""
    url: str = ""
    text: str = ""
    n: int | None = None
    """The number under which the result's own text cites it."""

    @property
    def key(self) -> tuple[str, ...]:
        return ("url", self.url) if self.url else ("id", self.id) if self.id else ("text", self.title, self.text)

    @property
    def name(self) -> str:
        """How a reader knows it."""
        title = self.title or self.id
        return f"{title} ({self.url})" if title and self.url else title or self.url or cut(self.text, 80)

    def write(self, number: int) -> str:
        """Give it as a model reads it."""
        return f"[{number}] {self.name}\n{self.text}".strip()


R = TypeVar("R", bound=Reference)


class References(Middleware):
    """Numbers, shows and checks what may be cited. Stands before evaluations, which then see the answer as it
    goes out.

    ``max_chars`` bounds what one result shows of its references. ``in_text`` lists the sources under the answer instead
    of in its metadata, for readers that show no metadata.
    """

    withholds = False  # a citation of nothing may be seen while it is written

    @checked()
    def __init__(
        self, *, max_chars: Annotated[int, Field(ge=100, le=10_000_000)] = 16_000, in_text: bool = False
    ) -> None:
        self._max_chars = max_chars
        self._in_text = in_text

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        given = read_found(Reference, result.data.get(REFERENCES), call.name)
        found = [(number, it) for it in given if (number := number_of(state, it)) is not None]
        if not found:
            return None
        numbers = {it.n: number for number, it in found if it.n is not None}
        content = map_citations(result.content, numbers.get) if numbers else result.content
        if not result.is_answer:
            shown = "\n\n".join(it.write(number) for number, it in found)
            content = f"{content}\n\n{HOW_TO_CITE}\n{cut(shown, self._max_chars)}".strip()
        return AfterTool(content)

    async def review(self, around: Around, answer: str) -> str | Answer:
        known, is_json = len(list_references(around.state)), is_structured(around.agent)
        wrong = sorted({number for number in find_citations(answer, is_json=is_json) if not 1 <= number <= known})
        if not wrong:
            return answer
        valid = map_citations(answer, lambda number: number if 1 <= number <= known else None, is_json=is_json)
        listed = ", ".join(f"[{number}]" for number in wrong)
        return Answer(valid, notes=[f"references: {listed} taken out, for there is no such source"])

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        references, is_value = list_references(around.state), is_structured(around.agent)
        numbers = find_citations(answer, is_json=is_value)
        cited = [(n, references[n - 1]) for n in numbers if 1 <= n <= len(references)][:MAX_SOURCES]
        if not cited:
            return answer
        if self._in_text and not around.path and not is_value:
            return f"{answer}\n\nSources:\n" + "\n".join(f"[{number}] {it.name}" for number, it in cited)
        # Whoever called this agent may have to prove its own answer by them.
        sources: list[JsonValue] = [_describe(number, it, with_text=bool(around.path)) for number, it in cited]
        return Answer(answer, {SOURCES: sources})


HOW_TO_CITE = "Sources, to be cited by their numbers in brackets, like [1] or [1, 2], right after what they show:"


def read_found(kind: type[R], given: JsonValue, tool: str) -> list[R]:
    """Read what a tool, or another agent, found; what is of another shape is left out, and logged."""
    if given is None:
        return []
    if isinstance(given, list) and len(given) > MAX_REFERENCES:
        _logger.warning("references beyond the limit left out", extra={"tool": tool, "limit": MAX_REFERENCES})
        given = given[:MAX_REFERENCES]
    found: list[R] = []
    problems: list[str] = []
    for it in given if isinstance(given, list) else [given]:
        told = {name: value for name, value in it.items() if value is not None} if isinstance(it, dict) else it
        try:
            found.append(kind.model_validate(told))
        except ValidationError as error:
            problems.append(str(error.errors()[0]["msg"]))
    if problems:
        _logger.warning("references left out", extra={"tool": tool, "count": len(problems), "error": problems[0]})
    return found


def number_of(state: TurnState, reference: Reference) -> int | None:
    """Give the number of a reference in this reaction: that of the same one, or the next; None when all numbers are
    given out."""
    known = state.values.setdefault(_NUMBERED, {})
    assert isinstance(known, dict)
    if reference.key not in known:
        if len(known) >= MAX_REFERENCES:
            return None
        known[reference.key] = (len(known) + 1, reference.model_copy(update={"n": None}))
    number: int = known[reference.key][0]
    return number


def list_references(state: TurnState) -> list[Reference]:
    """Give what was numbered so far, the first one first."""
    known = state.values.get(_NUMBERED)
    return [it for _, it in known.values()] if isinstance(known, dict) else []


def _describe(number: int, reference: Reference, *, with_text: bool) -> dict[str, JsonValue]:
    fields: Mapping[str, str] = reference.model_dump(exclude={"n", "text"})
    shown: Iterable[tuple[str, str]] = ((name, value[:MAX_FIELD_CHARS]) for name, value in fields.items() if value)
    return {"n": number, **dict(shown), **({"text": reference.text} if with_text and reference.text else {})}
