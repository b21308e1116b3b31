"""Middleware that numbers the sources from tools for citation, and lists the sources that an answer cites. All code
about citations is in this module.

A tool returns ``Output(content, {"references": [{"id", "title", "url", "text"}, ...]})``. `References` is middleware
that shows the numbered sources after the result. If the answer cites a number that has no source, the citation is
removed. The cited sources are stored in the metadata of the answer's message (``sources``). Numbers follow the order of
the calls, so a resumed reaction assigns the same numbers. The citations in the answer of an agent that is called as a
tool are renumbered for its caller.

Within a thread, a number keeps its source while the prompt still shows a citation of this number. `find_numbers` reads
the citations in the shown messages at the start, so new sources get other numbers. If two agents assigned the same
number to different sources, the prompt shows the later message with new numbers. Messages of other threads are shown
without citations.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from roundelay.agents.middleware import Answer, Around, Middleware, RunTool
from roundelay.agents.models.model import ToolCall
from roundelay.agents.options import checked
from roundelay.agents.tools import PlannedCall
from roundelay.agents.values import AfterTool, ToolResult, TurnState
from roundelay.network.messages import BaseMessage, MessageThread
from roundelay.network.text import cut

from .structured import is_structured

REFERENCES, FRAGMENTS = "references", "fragments"
"""Keys in a tool result's data for lists of sources that may be cited."""

SOURCES = "sources"
"""Key in an answer's metadata for the list of the cited sources."""

MAX_SOURCES_CHARS = 40_000
"""Maximum characters of all sources as JSON. The data that accompanies a result may use only a quarter of a record."""

_CITATION = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|(?P<citation> ?\[\d{1,3}(?:\s*[,;]\s*\d{1,3})*\](?!\())", re.DOTALL)

_logger = logging.getLogger(__name__)
_NUMBERED = "references.numbered"  # key in ``state.values``: the `Numbers` of the reaction

MAX_REFERENCES = 999
"""Maximum number of sources in one reaction, because a citation has at most three digits. The answer of another agent
may list more sources, up to the size of a frame.
"""

MAX_SOURCES = 50
"""Maximum number of sources in one answer's metadata."""

MAX_FIELD_CHARS = 500
"""Maximum characters of a source's title, URL or id in the metadata."""


class Reference(BaseModel):
    """A source that may be cited. Two sources are equal if they have the same ``url`` or, without a URL, the same
    ``id``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    id: str = ""
    title: str = ""
    url: str = ""
    text: str = ""
    n: int | None = None
    """Number that the text of the result itself uses to cite the source."""

    @property
    def key(self) -> tuple[str, ...]:
        return ("url", self.url) if self.url else ("id", self.id) if self.id else ("text", self.title, self.text)

    @property
    def name(self) -> str:
        """Name of the source for readers."""
        title = self.title or self.id
        return f"{title} ({self.url})" if title and self.url else title or self.url or cut(self.text, 80)

    def write(self, number: int) -> str:
        """Return the source as text for a model."""
        return f"[{number}] {self.name}\n{self.text}".strip()


R = TypeVar("R", bound=Reference)
MessageT = TypeVar("MessageT", bound=BaseMessage)


class Numbers:
    """Assignment of citation numbers to sources in a thread.

    If the thread cites a number whose source is unknown, no new source gets this number, because the number may belong
    to a source of a message that the prompt does not show.
    """

    def __init__(self) -> None:
        self.sources: dict[int, Reference] = {}
        self._by_key: dict[tuple[str, ...], int] = {}
        self._reserved: set[int] = set()

    def find(self, reference: Reference, wanted: int | None = None) -> int | None:
        """Return the number of a source: the existing number of the source, ``wanted`` if that number is free, or the
        next free number. Return None if all numbers are used.
        """
        number = self._by_key.get(reference.key)
        if number is None:
            number = wanted if wanted is not None and wanted not in self.sources else self._find_free()
        if number is None:
            return None
        self._by_key[reference.key] = number
        # Prefer a copy of the source that has a text, because a calling agent may need the text to support its own
        # answer.
        if number not in self.sources or (reference.text and not self.sources[number].text):
            self.sources[number] = reference.model_copy(update={"n": None})
        return number

    def reserve(self, numbers: Iterable[int]) -> None:
        """Reserve numbers, so that no new source gets one of these numbers."""
        self._reserved.update(numbers)

    def _find_free(self) -> int | None:
        first = max(self.sources, default=0) + 1
        # Continue after the highest number, and fill gaps last, because readers may remember the source of an old
        # number.
        candidates = (*range(first, MAX_REFERENCES + 1), *range(1, min(first, MAX_REFERENCES + 1)))
        return next(
            (
                candidate
                for candidate in candidates
                if candidate not in self.sources and candidate not in self._reserved
            ),
            None,
        )


class References(Middleware):
    """Numbers, shows and checks sources. Place this middleware before evaluations, so that the evaluations see the
    final answer.

    ``max_chars`` limits the text of the sources that are shown with one result. With ``in_text``, the sources are
    listed below the answer instead of in its metadata, for programs that do not show metadata.
    """

    withholds = False  # an invalid citation may be visible while the answer streams

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
        references = read_found(Reference, result.data.get(REFERENCES), call.name)
        numbered = [
            (number, reference)
            for reference in references
            if (number := find_numbers(state).find(reference)) is not None
        ]
        if not numbered:
            return None
        numbers = {reference.n: number for number, reference in numbered if reference.n is not None}
        content = map_citations(result.content, numbers.get) if numbers else result.content
        if not result.is_answer:
            shown = "\n\n".join(reference.write(number) for number, reference in numbered)
            content = f"{content}\n\n{HOW_TO_CITE}\n{cut(shown, self._max_chars)}".strip()
        return AfterTool(content)

    def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
        """Renumber the sources of several answers together, so that one answer of this agent can cite all of them."""
        pairs = [(text, metadata.get(SOURCES)) for text, metadata in answers]
        match pairs:
            case [(text, list(sources))]:  # the sources of a single answer are renumbered when its result is read
                texts, merged = [text], fit_sources(sources)
            case _:
                texts, merged = merge_sources(pairs)
        return texts, {REFERENCES: merged} if merged else {}

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
        return fit_found(await proceed(call), REFERENCES)

    async def review(self, around: Around, answer: str) -> str | Answer:
        sources, is_json = find_numbers(around.state).sources, is_structured(around.agent)
        wrong = sorted({number for number in find_citations(answer, is_json=is_json) if number not in sources})
        notes = []
        if wrong:
            answer = map_citations(answer, lambda number: number if number in sources else None, is_json=is_json)
            listed = ", ".join(f"[{number}]" for number in wrong)
            notes = [f"references: {listed} removed, because there is no such source"]
        # List the sources here if the agent that took over the conversation does not have `References` itself.
        if not any(isinstance(hook, References) for hook in around.agent.chain.middleware):
            cited = [_describe(number, source, with_text=False) for number, source in _find_cited(around, answer)]
            return Answer(answer, {SOURCES: [*cited]} if cited else {}, notes)
        return Answer(answer, notes=notes) if notes else answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        cited = _find_cited(around, answer)
        if not cited:
            return answer
        if self._in_text and not around.path and not is_structured(around.agent):
            return f"{answer}\n\nSources:\n" + "\n".join(f"[{number}] {source.name}" for number, source in cited)
        # Include the texts of the sources for a calling agent, which may need them to support its own answer.
        sources: list[JsonValue] = [_describe(number, source, with_text=bool(around.path)) for number, source in cited]
        return Answer(answer, {SOURCES: sources})


HOW_TO_CITE = "Sources. Cite them by number in brackets, like [1] or [1, 2], right after the statement they support:"


def fit_found(result: ToolResult, name: str) -> ToolResult:
    """Shorten the sources of a result so that they fit into a record. Shorten before dropping sources: without a
    source, citations of the result would refer to a wrong source.
    """
    sources = result.data.get(name)
    return replace(result, data={**result.data, name: fit_sources(sources)}) if isinstance(sources, list) else result


def read_found(kind: type[R], listed: JsonValue, tool: str) -> list[R]:
    """Parse the sources from a tool or another agent. Invalid sources are skipped and logged."""
    if listed is None:
        return []
    if isinstance(listed, list) and len(listed) > MAX_REFERENCES:
        _logger.warning(
            "a result has too many references; the last ones are dropped", extra={"tool": tool, "limit": MAX_REFERENCES}
        )
        listed = listed[:MAX_REFERENCES]
    sources: list[R] = []
    problems: list[str] = []
    for item in listed if isinstance(listed, list) else [listed]:
        fields = {name: value for name, value in item.items() if value is not None} if isinstance(item, dict) else item
        try:
            sources.append(kind.model_validate(fields))
        except ValidationError as error:
            problems.append(str(error.errors()[0]["msg"]))
    if problems:
        _logger.warning(
            "invalid references are dropped", extra={"tool": tool, "count": len(problems), "error": problems[0]}
        )
    return sources


def find_numbers(state: TurnState) -> Numbers:
    """Return the numbers of this reaction, initialized from the messages of the trigger's thread that `select_messages`
    chose for the prompt.
    """
    numbers = state.values.get(_NUMBERED)
    if not isinstance(numbers, Numbers):
        numbers = state.values[_NUMBERED] = Numbers()
        for message in state.conversation:
            for reference in _read_sources(message):
                numbers.find(reference, reference.n)
            # The trigger is the last message of ``conversation``, so this comparison selects the trigger's thread. In
            # other threads, the same numbers refer to other sources.
            if message.thread_id == state.conversation[-1].thread_id:
                numbers.reserve(find_citations(message.text))
    return numbers


def _read_sources(message: BaseMessage) -> list[Reference]:
    """Return the sources that an agent's message cites."""
    value = (message.metadata or {}).get(SOURCES) if message.sender_kind == "agent" else None
    sources = read_found(Reference, value, "a message") if isinstance(value, list) else []
    return [source for source in sources if source.n is not None and 0 < source.n <= MAX_REFERENCES]


def _renumber(message: MessageT, numbers: Numbers | None) -> MessageT:
    """Return a message with renumbered citations. If ``numbers`` is None, return the message without citations."""
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
    renumbered: list[JsonValue] = [
        source.model_dump(exclude_defaults=True) | {"n": number}
        for source in sources
        if (number := new[source.n or 0]) is not None
    ]
    return message.model_copy(
        update={"text_representation": text, "metadata": {**(message.metadata or {}), SOURCES: renumbered}}
    )


def _find_cited(around: Around, answer: str) -> list[tuple[int, Reference]]:
    """Return the sources that an answer cites, in the order of the citations."""
    sources = find_numbers(around.state).sources
    numbers = find_citations(answer, is_json=is_structured(around.agent))
    return [(number, sources[number]) for number in numbers if number in sources][:MAX_SOURCES]


def _describe(number: int, reference: Reference, *, with_text: bool) -> dict[str, JsonValue]:
    fields: Mapping[str, str] = reference.model_dump(exclude={"n", "text"})
    shown: Iterable[tuple[str, str]] = ((name, value[:MAX_FIELD_CHARS]) for name, value in fields.items() if value)
    return {"n": number, **dict(shown), **({"text": reference.text} if with_text and reference.text else {})}


# --- citations in a text. Markdown code and links are not citations (`values[1]`, [1](https://...)). In a JSON text,
# such as a structured answer, only strings contain citations: {"amounts": [10, 20]} has none.


def find_citations(text: str, *, is_json: bool = False) -> list[int]:
    """Return the numbers that a text cites, without duplicates, in order of appearance. ``is_json`` means that the text
    is JSON, even if it is only a list of numbers.
    """
    value = _read_json(text, is_json)
    texts = [text] if value is None else _list_strings(value)
    matches = (match["citation"] for part in texts for match in _CITATION.finditer(part))
    return list(
        dict.fromkeys(
            int(number) for citation in matches if citation is not None for number in re.findall(r"\d+", citation)
        )
    )


def map_citations(text: str, change: Callable[[int], int | None], *, is_json: bool = False) -> str:
    """Replace the numbers of the citations in a text. If ``change`` returns None, the citation is removed."""
    value = _read_json(text, is_json)
    if value is None:
        return _map(text, change)
    changed = _map_strings(value, change)
    return text if changed == value else json.dumps(changed, ensure_ascii=False, separators=(",", ":"))


def merge_sources(answers: Sequence[tuple[str, JsonValue]]) -> tuple[list[str], list[JsonValue]]:
    """Renumber several answers that each have numbered sources, and merge their sources into one list.

    Invalid sources, and citations without a source, are removed. If no answer has sources, the texts stay unchanged.
    """
    numbers: list[dict[int, int]] = []
    merged: list[JsonValue] = []
    for _, sources in answers:
        own: dict[int, int] = {}
        for source in sources if isinstance(sources, list) else ():
            if isinstance(source, dict) and type(n := source.get("n")) is int and n not in own:
                own[n] = len(merged) + 1
                merged.append({**source, "n": own[n]})
        numbers.append(own)
    if not merged:
        return [text for text, _ in answers], []
    fitting = fit_sources(merged)
    available = {source["n"] for source in fitting if isinstance(source, dict)}
    maps = [{n: new for n, new in own.items() if new in available} for own in numbers]
    return [map_citations(text, own.get) for (text, _), own in zip(answers, maps, strict=True)], fitting


def fit_sources(sources: list[JsonValue]) -> list[JsonValue]:
    """Reduce sources until they fit into a record: shorten the texts, drop the texts, and drop the last sources."""
    fitting = sources
    # Drop texts before sources. A source without its text can still be cited, but a dropped source cannot.
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
    def rewrite(match: re.Match[str]) -> str:
        if match["citation"] is None:
            return match[0]
        numbers = [change(int(number)) for number in re.findall(r"\d+", match[0])]
        kept = ", ".join(str(number) for number in dict.fromkeys(numbers) if number is not None)
        return f"{' ' if match[0].startswith(' ') else ''}[{kept}]" if kept else ""

    return _CITATION.sub(rewrite, text)


def _read_json(text: str, is_known: bool) -> object | None:
    """Parse a text that is a JSON object or list. A list of integers counts as a citation, not as JSON, unless
    ``is_known`` is set.
    """
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
