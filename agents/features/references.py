"""References: what tools found, numbered for citation across tools and turns, and the sources that an answer cites. All
that is known of citing stands here.

A tool gives ``Output(content, {"references": [{"id", "title", "url", "text"}, ...]})``. `References` is middleware: the
model reads them with their numbers behind the result, a number that stands for nothing is taken out of the answer, and
what the answer cites goes into the metadata of its message (``sources``). Numbers follow the order of the calls, so a
resumed reaction gives them again. What an agent inside of a call cited is numbered anew in its caller's order.

A number stays what it was in a thread, as far as the prompt shows that: what its messages of agents cite is known at
the beginning (`find_numbers`), and what is found later gets other numbers. Where two agents gave one number to two
sources, the prompt has another one in the later message. Messages of other threads are shown without their citations.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from roundelay.agents.middleware import Answer, Around, Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import checked
from roundelay.agents.tools import PlannedCall
from roundelay.agents.values import AfterTool, ToolResult, TurnState
from roundelay.network.messages import BaseMessage, MessageThread
from roundelay.network.text import cut

from .structured import is_structured

REFERENCES, FRAGMENTS = "references", "fragments"
"""In the data of a tool's result: what may be cited."""

SOURCES = "sources"
"""In the metadata of an answer: what it cites."""

MAX_SOURCES_CHARS = 40_000
"""As JSON: what a call gives beside its result has a quarter of a record."""

_CITATION = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|(?P<citation> ?\[\d{1,3}(?:\s*[,;]\s*\d{1,3})*\](?!\())", re.DOTALL)

_logger = logging.getLogger(__name__)
_NUMBERED = "references.numbered"  # in the state's values: the `Numbers`

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
MessageT = TypeVar("MessageT", bound=BaseMessage)


class Numbers:
    """Which source each number of a thread stands for. A number that is written there and stands for none is not given
    out: it may be one of a message that is not shown."""

    def __init__(self) -> None:
        self.sources: dict[int, Reference] = {}
        self._by_key: dict[tuple[str, ...], int] = {}
        self._written: set[int] = set()

    def find(self, reference: Reference, wanted: int | None = None) -> int | None:
        """Give the number of a source: that of the same one, the one that is ``wanted`` if it is free, or the next;
        None when all are given out."""
        number = self._by_key.get(reference.key)
        if number is None:
            number = wanted if wanted is not None and wanted not in self.sources else self._find_free()
        if number is None:
            return None
        self._by_key[reference.key] = number
        if number not in self.sources or (reference.text and not self.sources[number].text):
            self.sources[number] = reference.model_copy(update={"n": None})
        return number

    def note_written(self, numbers: Iterable[int]) -> None:
        self._written.update(numbers)

    def _find_free(self) -> int | None:
        first = max(self.sources, default=0) + 1
        candidates = (*range(first, MAX_REFERENCES + 1), *range(1, min(first, MAX_REFERENCES + 1)))
        return next(
            (candidate for candidate in candidates if candidate not in self.sources and candidate not in self._written),
            None,
        )


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

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        numbers = Numbers()
        shown = {
            name: MessageThread(
                thread_id=name,
                messages=[
                    _renumber(message, numbers if name == trigger.thread_id else None) for message in thread.messages
                ],
                omitted=thread.omitted,
            )
            for name, thread in threads.items()
        }
        return shown, _renumber(trigger, numbers)

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        given = read_found(Reference, result.data.get(REFERENCES), call.name)
        found = [
            (number, reference) for reference in given if (number := find_numbers(state).find(reference)) is not None
        ]
        if not found:
            return None
        numbers = {reference.n: number for number, reference in found if reference.n is not None}
        content = map_citations(result.content, numbers.get) if numbers else result.content
        if not result.is_answer:
            shown = "\n\n".join(reference.write(number) for number, reference in found)
            content = f"{content}\n\n{HOW_TO_CITE}\n{cut(shown, self._max_chars)}".strip()
        return AfterTool(content)

    def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
        """Several answers, each with numbers of its own, get one numbering; what they cite can be cited here."""
        given = [(text, metadata.get(SOURCES)) for text, metadata in answers]
        match given:
            case [(text, list(sources))]:  # its numbers are changed when the result is read
                texts, merged = [text], fit_sources(sources)
            case _:
                texts, merged = merge_sources(given)
        return texts, {REFERENCES: merged} if merged else {}

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        return fit_found(await proceed(call), REFERENCES)

    async def review(self, around: Around, answer: str) -> str | Answer:
        sources, is_json = find_numbers(around.state).sources, is_structured(around.agent)
        wrong = sorted({number for number in find_citations(answer, is_json=is_json) if number not in sources})
        notes = []
        if wrong:
            answer = map_citations(answer, lambda number: number if number in sources else None, is_json=is_json)
            listed = ", ".join(f"[{number}]" for number in wrong)
            notes = [f"references: {listed} taken out, for there is no such source"]
        if not any(
            isinstance(hook, References) for hook in around.agent.chain.middleware
        ):  # nobody else lists them then
            cited = [_describe(number, source, with_text=False) for number, source in _find_cited(around, answer)]
            return Answer(answer, {SOURCES: [*cited]} if cited else {}, notes)
        return Answer(answer, notes=notes) if notes else answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        cited = _find_cited(around, answer)
        if not cited:
            return answer
        if self._in_text and not around.path and not is_structured(around.agent):
            return f"{answer}\n\nSources:\n" + "\n".join(f"[{number}] {source.name}" for number, source in cited)
        # Whoever called this agent may have to prove its own answer by them.
        sources: list[JsonValue] = [_describe(number, source, with_text=bool(around.path)) for number, source in cited]
        return Answer(answer, {SOURCES: sources})


HOW_TO_CITE = "Sources, to be cited by their numbers in brackets, like [1] or [1, 2], right after what they show:"


def fit_found(result: ToolResult, name: str) -> ToolResult:
    """Give a result with what it found as it goes into a record: shortened rather than left out, or the result would
    cite somebody else's."""
    listed = result.data.get(name)
    return replace(result, data={**result.data, name: fit_sources(listed)}) if isinstance(listed, list) else result


def read_found(kind: type[R], given: JsonValue, tool: str) -> list[R]:
    """Read what a tool, or another agent, found; what is of another shape is left out, and logged."""
    if given is None:
        return []
    if isinstance(given, list) and len(given) > MAX_REFERENCES:
        _logger.warning("references beyond the limit left out", extra={"tool": tool, "limit": MAX_REFERENCES})
        given = given[:MAX_REFERENCES]
    found: list[R] = []
    problems: list[str] = []
    for item in given if isinstance(given, list) else [given]:
        told = {name: value for name, value in item.items() if value is not None} if isinstance(item, dict) else item
        try:
            found.append(kind.model_validate(told))
        except ValidationError as error:
            problems.append(str(error.errors()[0]["msg"]))
    if problems:
        _logger.warning("references left out", extra={"tool": tool, "count": len(problems), "error": problems[0]})
    return found


def find_numbers(state: TurnState) -> Numbers:
    """Give the numbers of this reaction: at first those of what the prompt shows of the thread (`select_messages`)."""
    known = state.values.get(_NUMBERED)
    if not isinstance(known, Numbers):
        known = state.values[_NUMBERED] = Numbers()
        for message in state.conversation:
            for reference in _read_sources(message):
                known.find(reference, reference.n)
            if message.thread_id == state.conversation[-1].thread_id:
                known.note_written(find_citations(message.text))
    return known


def _read_sources(message: BaseMessage) -> list[Reference]:
    """Give what a message of an agent says that it cites."""
    given = (message.metadata or {}).get(SOURCES) if message.sender_kind == "agent" else None
    found = read_found(Reference, given, "a message") if isinstance(given, list) else []
    return [source for source in found if source.n is not None and 0 < source.n <= MAX_REFERENCES]


def _renumber(message: MessageT, numbers: Numbers | None) -> MessageT:
    """Give a message as it cites by these numbers; by None without its citations."""
    sources = _read_sources(message)
    if not sources:
        return message
    new = {
        source.n: numbers.find(source, source.n) if numbers is not None else None
        for source in sources
        if source.n is not None
    }
    if all(n == number for n, number in new.items()):
        return message
    text = map_citations(message.text, lambda n: new.get(n, n))
    kept: list[JsonValue] = [
        source.model_dump(exclude_defaults=True) | {"n": number}
        for source in sources
        if (number := new[source.n or 0]) is not None
    ]
    return message.model_copy(
        update={"text_representation": text, "metadata": {**(message.metadata or {}), SOURCES: kept}}
    )


def _find_cited(around: Around, answer: str) -> list[tuple[int, Reference]]:
    """Give what an answer cites, in the order of its text."""
    sources = find_numbers(around.state).sources
    numbers = find_citations(answer, is_json=is_structured(around.agent))
    return [(number, sources[number]) for number in numbers if number in sources][:MAX_SOURCES]


def _describe(number: int, reference: Reference, *, with_text: bool) -> dict[str, JsonValue]:
    fields: Mapping[str, str] = reference.model_dump(exclude={"n", "text"})
    shown: Iterable[tuple[str, str]] = ((name, value[:MAX_FIELD_CHARS]) for name, value in fields.items() if value)
    return {"n": number, **dict(shown), **({"text": reference.text} if with_text and reference.text else {})}


# --- citations in a text. Code and links of Markdown are left alone (`values[1]`, [1](https://...)). In a text that is
# JSON, a structured answer for example, only its strings cite: {"amounts": [10, 20]} cites nothing.


def find_citations(text: str, *, is_json: bool = False) -> list[int]:
    """Give the numbers that a text cites, each once, in the order in which they stand there. ``is_json``: it is known
    to be JSON, be it a list of numbers."""
    value = _read_json(text, is_json)
    texts = [text] if value is None else _list_strings(value)
    found = (match["citation"] for one in texts for match in _CITATION.finditer(one))
    return list(
        dict.fromkeys(
            int(number) for citation in found if citation is not None for number in re.findall(r"\d+", citation)
        )
    )


def map_citations(text: str, change: Callable[[int], int | None], *, is_json: bool = False) -> str:
    """Give the text with other numbers; one without a number is taken out."""
    value = _read_json(text, is_json)
    if value is None:
        return _map(text, change)
    changed = _map_strings(value, change)
    return text if changed == value else json.dumps(changed, ensure_ascii=False, separators=(",", ":"))


def merge_sources(answers: Sequence[tuple[str, JsonValue]]) -> tuple[list[str], list[JsonValue]]:
    """Give the texts of several answers, each with its own sources (objects with their number ``n``), as they cite the
    sources of all of them, in one numbering.

    What is no source is left out, and so is a number that stands for none. Where there are no sources at all, the texts
    stay as they are.
    """
    numbers: list[dict[int, int]] = []
    merged: list[JsonValue] = []
    for _, given in answers:
        own: dict[int, int] = {}
        for source in given if isinstance(given, list) else ():
            if isinstance(source, dict) and type(n := source.get("n")) is int and n not in own:
                own[n] = len(merged) + 1
                merged.append({**source, "n": own[n]})
        numbers.append(own)
    if not merged:
        return [text for text, _ in answers], []
    kept = fit_sources(merged)
    there = {source["n"] for source in kept if isinstance(source, dict)}
    left = [{n: new for n, new in own.items() if new in there} for own in numbers]
    return [map_citations(text, own.get) for (text, _), own in zip(answers, left, strict=True)], kept


def fit_sources(sources: list[JsonValue]) -> list[JsonValue]:
    """Give sources as they go into a record beside a result: if need be with shorter texts, without any, or the first
    ones."""
    fitting = sources
    for share in (4000, 1000, 0):
        if len(json.dumps(fitting)) <= MAX_SOURCES_CHARS:
            return fitting
        fitting = [_shorten(source, share) for source in sources]
    while len(json.dumps(fitting)) > MAX_SOURCES_CHARS:
        fitting = fitting[: len(fitting) * 3 // 4]
    return fitting


def _shorten(source: JsonValue, max_chars: int) -> JsonValue:
    if not isinstance(source, dict) or not isinstance(text := source.get("text"), str):
        return source
    rest = {name: value for name, value in source.items() if name != "text"}
    return {**rest, "text": cut(text, max_chars)} if max_chars else rest


def _map(text: str, change: Callable[[int], int | None]) -> str:
    def rewrite(found: re.Match[str]) -> str:
        if found["citation"] is None:
            return found[0]
        numbers = [change(int(number)) for number in re.findall(r"\d+", found[0])]
        kept = ", ".join(str(number) for number in dict.fromkeys(numbers) if number is not None)
        return f"{' ' if found[0].startswith(' ') else ''}[{kept}]" if kept else ""

    return _CITATION.sub(rewrite, text)


def _read_json(text: str, is_known: bool) -> object | None:
    """Give what a text says that is a JSON object, or a list with anything but numbers in it (which is a citation)."""
    if not is_known and not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_citation = isinstance(value, list) and all(isinstance(item, int) for item in value)
    return None if is_citation and not is_known else value


def _list_strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for item in value.values():
                yield from _list_strings(item)
        case list():
            for item in value:
                yield from _list_strings(item)


def _map_strings(value: object, change: Callable[[int], int | None]) -> object:
    match value:
        case str():
            return _map(value, change)
        case dict():
            return {name: _map_strings(item, change) for name, item in value.items()}
        case list():
            return [_map_strings(item, change) for item in value]
        case _:
            return value
