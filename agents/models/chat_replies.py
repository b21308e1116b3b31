"""Reads the replies of OpenAI-compatible servers, whole or in the pieces of a stream.

Servers differ from OpenAI's in every part: content as a list of parts, calls without an index or an id, streams without
a reason for their end. `read_completion` and `Draft.add_chunk` take the JSON as it came and raise `ValueError` for what
cannot be read, and `ErrorInside` where the server reports an error in place of a reply. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from pydantic import JsonValue

from .endpoint_rules import is_sealed
from .model import (
    MAX_TOKENS,
    AssistantMessage,
    ModelDelta,
    ModelRequest,
    ReplyOrigin,
    ToolCall,
    Usage,
    derive_call_id,
)
from .provider_errors import shorten_page

Json = Mapping[str, Any]


class ErrorInside(Exception):
    """An error inside a reply with status 200 or a piece of a stream. ``body`` is its JSON."""

    def __init__(self, body: object) -> None:
        super().__init__("the reply holds an error")
        self.body = body


@dataclass(slots=True)
class CallDraft:
    """A call while its pieces arrive. ``index`` is the server's, None where it gives none."""

    index: int | None = None
    id: str = ""
    name: str = ""
    # Not a str: a long one that grows piece by piece is copied each time.
    arguments: StringIO = field(default_factory=StringIO)
    fields: dict[str, JsonValue] = field(default_factory=dict)
    """Fields that the server wants back with the call."""

    def has_arguments(self) -> bool:
        return self.arguments.tell() > 0

    def is_whole(self) -> bool:
        """Whether the arguments so far are a JSON object, so that a further object is another call's."""
        written = self.arguments.getvalue().strip()
        if not written.endswith("}"):
            return False
        try:
            return isinstance(json.loads(written), dict)
        except (ValueError, RecursionError):
            return False


_OPEN_TAG = re.compile(r"\s*<(think|thinking|thought)>")
_ANY_OPEN = re.compile(r"<(think|thinking|thought)>")
_LONE_CLOSE = re.compile(r"</(think|thinking|thought)>[ \t]*(?:\r?\n|\Z)")
_MAYBE_OPEN = re.compile(r"\s*(<(t(h(i(n(k(i(n(g)?)?)?)?)?|o(u(g(h(t)?)?)?)?)?)?)?)?")
"""The beginning of a text that may still become such a tag."""


@dataclass(slots=True)
class ThinkTags:
    """Tells thinking between tags from the text behind it, where a reply begins with ``<think>``: so servers give it that
    do not know the model's way to think (https://github.com/zed-industries/zed/pull/58042)."""

    _held: str = ""  # what is not decided yet
    _tag: str = ""  # the closing tag that is waited for
    _is_decided: bool = False

    def feed(self, piece: str) -> tuple[str, str]:
        """Return what of the text so far is text, and what is thinking."""
        if self._is_decided or not piece:
            return piece, ""
        self._held += piece
        if not self._tag:
            begun = _OPEN_TAG.match(self._held)
            if begun is None:
                is_open = _MAYBE_OPEN.fullmatch(self._held) is not None
                return ("", "") if is_open else (self._decide(), "")
            self._tag, self._held = f"</{begun[1]}>", self._held[begun.end() :]
        thought, closing, text = self._held.partition(self._tag)
        if closing:
            self._held = text.lstrip()
            # Drop white space behind the tag. More of it may follow in the next piece.
            return (self._decide() if self._held else self._await_text()), thought
        kept = max(0, len(thought) - len(self._tag) + 1)  # the tag may be cut
        self._held = thought[kept:]
        return "", thought[:kept]

    def _await_text(self) -> str:
        self._tag, self._is_decided = "", True
        return ""

    def _decide(self) -> str:
        text, self._held, self._is_decided = self._held, "", True
        return text

    def close(self) -> tuple[str, str]:
        """Return what was held back, as text and as thinking, when the reply has ended."""
        held, self._held, self._is_decided = self._held, "", True
        return ("", held) if self._tag else (held, "")


@dataclass(slots=True)
class Draft:
    """A reply while it is read. ``is_done``: the server said that its stream has ended."""

    tools: Collection[str] = ()
    text: StringIO = field(default_factory=StringIO)
    reasoning: StringIO = field(default_factory=StringIO)
    refusal: StringIO = field(default_factory=StringIO)
    calls: list[CallDraft] = field(default_factory=list)
    fields: dict[str, JsonValue] = field(default_factory=dict)
    """Fields that the server wants back with the message."""

    usage: Usage = field(default_factory=Usage)
    finish_reason: str = ""
    model: str = ""
    is_done: bool = False
    _tags: ThinkTags = field(default_factory=ThinkTags)
    _choice: object = None  # the index of the choice that is read; others are passed over
    _last: CallDraft | None = None  # the call that the last piece belonged to

    @property
    def is_finished(self) -> bool:
        """Whether the reply is all there. Some servers end a stream with ``[DONE]`` and no reason
        (https://github.com/waybarrios/vllm-mlx/issues/628)."""
        return bool(self.finish_reason) or self.is_done

    def add_chunk(self, chunk: object) -> list[ModelDelta]:
        """Add a piece of a stream. Return what of it can be shown."""
        if not isinstance(chunk, Mapping):
            raise_for_list(chunk)
            raise ValueError("a piece of it is no JSON object")
        raise_for_error(chunk)
        self.model = as_text(chunk.get("model")) or self.model
        self._add_usage(chunk)
        return [self._add_choice(choice) for choice in _list_objects(chunk, "choices")]

    def _add_choice(self, choice: Json) -> ModelDelta:
        index = choice.get("index")
        if self._choice is None:
            self._choice = index
        elif index is not None and index != self._choice:
            return ModelDelta()
        self._add_usage(choice)  # Kimi's place for it: https://github.com/earendil-works/pi/issues/2017
        reason = as_text(choice.get("finish_reason"))
        if reason and self.finish_reason in ("", "stop"):  # a plain stop at the end does not hide a limit or a filter
            self.finish_reason = reason
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            return self._add_message(delta, is_piece=True)
        message = choice.get("message")
        if isinstance(message, Mapping) and self._is_empty():  # else it repeats what came in pieces
            return self._add_message(message, is_piece=False)
        if delta is not None:
            raise ValueError("a piece of it is no JSON object")
        return ModelDelta()

    def close(self) -> list[ModelDelta]:
        """Add what was held back at the beginning, when the reply has ended. Return what of it can be shown."""
        text, reasoning = self._tags.close()
        self.text.write(text)
        self.reasoning.write(reasoning)
        self._take_out_unopened()
        return [ModelDelta(text, reasoning)] if text or reasoning else []

    def _take_out_unopened(self) -> None:
        """Move thinking that only a closing tag marks from the text to the reasoning.

        Templates of some models end with the opening tag, so the reply lacks it
        (https://github.com/deepseek-ai/DeepSeek-R1/issues/456, https://github.com/infiniflow/ragflow/issues/5698). A tag
        behind its opening tag, or inside of a code block, is the model's text.
        """
        text = self.text.getvalue()
        found = _LONE_CLOSE.search(text)
        if found is None:
            return
        thought = text[: found.start()]
        is_last = found.end() == len(text)
        if _ANY_OPEN.search(thought) or thought.count("```") % 2 or (is_last and not self.calls):
            return
        self.text = StringIO()
        self.text.write(text[found.end() :].lstrip())
        self.reasoning.write(thought)

    def _add_usage(self, where: Json) -> None:
        """Take over what a server has counted. Its counts only grow: some end a stream with zeros."""
        if isinstance(where.get("usage"), Mapping):
            known, counted = self.usage, read_usage(where["usage"])
            self.usage = Usage(*(max(getattr(usage, name) for usage in (known, counted)) for name in _COUNTS))

    def _is_empty(self) -> bool:
        return not (self.text.tell() or self.refusal.tell() or self.calls)

    def _add_message(self, message: Json, *, is_piece: bool) -> ModelDelta:
        text, reasoning, refused = read_content(message.get("content"))
        text, inline = self._tags.feed(text)
        reasoning += inline + _read_reasoning(message)
        self.text.write(text)
        self.reasoning.write(reasoning)
        self.refusal.write(refused + as_text(message.get("refusal")))
        _add_fields(self.fields, message, _MESSAGE_FIELDS)
        parts = [_wrap_function(call) for call in _list_objects(message, "tool_calls")]
        for place, part in enumerate(parts):
            if not isinstance(part.get("function", {}), Mapping | None):
                raise ValueError("a call of it has no function")
            if is_piece:
                self._add_piece(part, place, len(parts))
            elif part.get("function"):  # by shape: some servers leave the type out
                self._open_call(part)
        call = message.get("function_call")  # older servers have one call, under this name
        if isinstance(call, Mapping) and not parts:
            self._add_piece({"function": call}, 0, 1)
        return ModelDelta(text, reasoning)

    # --- calls

    def _add_piece(self, part: Json, place: int, count: int) -> None:
        """Add a piece of a call. ``place``: its place among the ``count`` calls of its chunk."""
        call = self._find_call(part, place, count)
        if call is None:
            self._open_call(part)
        else:
            self._go_on(call, part)

    def _open_call(self, part: Json) -> None:
        call = CallDraft(_read_index(part))
        self.calls.append(call)
        self._go_on(call, part)

    def _go_on(self, call: CallDraft, part: Json) -> None:
        self._last = call
        function = part.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, arguments = as_text(function.get("name")), as_text(function.get("arguments"))
        if call.index is None:
            call.index = _read_index(part)
        call.id = call.id or as_text(part.get("id"))
        if name and name != call.name:
            call.name += name
        # Some servers send a call once more at the end.
        is_repeated = arguments.strip() != "" and arguments == call.arguments.getvalue() and call.is_whole()
        call.arguments.write("" if is_repeated else arguments)
        _add_fields(call.fields, part, _CALL_FIELDS)
        inner: dict[str, JsonValue] = {}
        _add_fields(inner, function, _CALL_FIELDS)
        if inner:
            call.fields["function"] = {**_as_object(call.fields.get("function")), **inner}

    def _find_call(self, part: Json, place: int, count: int) -> CallDraft | None:
        """Return the call that a piece belongs to. None means that the piece begins a new call.

        The id decides, then the index, then the place. A server may repeat an id or index, give either in the first piece
        only, or none at all (https://github.com/open-webui/computer/issues/224).
        """
        call_id, index, name = as_text(part.get("id")), _read_index(part), _read_name(part)
        if call_id:
            return self._find_by_id(call_id, index, name, part)
        if index is not None:
            known = next((call for call in reversed(self.calls) if call.index == index), None)
            return None if known is None or self._begins_another(known, name, part) else known
        if count > 1:  # several calls in one piece: the place tells them apart
            known = self.calls[place] if place < len(self.calls) else None
            goes_on = known is not None and (not name or (name == known.name and not known.is_whole()))
            return known if goes_on else None
        last = self._last
        return None if last is None or self._begins_another(last, name, part) else last

    def _find_by_id(self, call_id: str, index: int | None, name: str, part: Json) -> CallDraft | None:
        for call in reversed(self.calls):
            same_place = index is None or call.index is None or call.index == index
            if call.id == call_id and same_place:
                return None if self._begins_another(call, name, part) else call
        # An id that comes late belongs to the call that has none yet.
        late = (
            next((call for call in reversed(self.calls) if call.index == index), None)
            if index is not None
            else self._last
        )
        if late is not None and not late.id and not self._begins_another(late, name, part):
            return late
        return None

    def _begins_another(self, call: CallDraft, name: str, part: Json) -> bool:
        """Whether a piece begins another call: it names a tool, and the arguments of ``call`` are complete."""
        if not name:
            return False
        if call.has_arguments():
            function = part.get("function")
            arguments = as_text(function.get("arguments")) if isinstance(function, Mapping) else ""
            if name != call.name:
                return True
            return arguments != call.arguments.getvalue() and call.is_whole()
        # The name may come in pieces. `get` and `_time` are one name where `get_time` is a tool, two where both are.
        if call.name in self.tools and name in self.tools and name != call.name:
            return not any(tool.startswith(call.name + name) for tool in self.tools)
        return False


DONE = "[DONE]"
"""The last event of a stream, for servers that mark its end."""


MAX_ATTEMPTS = 16
"""Maximum number of lines after which an event is tried to be read before its end."""


MAX_STRAY_CHARS = 2000


@dataclass(slots=True)
class EventReader:
    """Takes the bytes of a stream and gives its events: parsed JSON, or `DONE`.

    More lenient than server-sent events are: servers leave out the blank line between events, or behind the last one,
    and send an error as a bare line of JSON.
    """

    stray: str = ""
    """The first lines that are no part of any stream, such as those of a web page."""

    _rest: bytes = b""
    _pending: list[str] = field(default_factory=list)  # the lines of an event that is no whole JSON yet
    _is_bare: bool = False  # whether these are JSON on lines of its own
    _name: str = ""  # the name of the event
    _has_begun: bool = False

    def feed(self, data: bytes) -> list[object]:
        """Return the events that are whole now. Raises `ValueError` for what is no JSON."""
        # Bytes: `str.splitlines` would also split at characters that JSON may hold unescaped.
        lines = (self._rest + data).splitlines(keepends=True) if data else [self._rest]
        self._rest = lines.pop() if data and not lines[-1].endswith(b"\n") else b""
        return [event for line in lines for event in self._read_line(line.decode("utf-8", "replace").rstrip("\r\n"))]

    def close(self) -> list[object]:
        """Return what the end of the stream makes whole."""
        return [*self.feed(b""), *self._end_event()]

    def _read_line(self, line: str) -> list[object]:
        if not self._has_begun:
            line, self._has_begun = line.removeprefix("\ufeff"), True
        if line.startswith("data:"):
            return self._take(line.removeprefix("data:").strip())
        if self._is_bare or line.startswith(("{", "[")):
            self._is_bare = True
            return self._take(line)
        if line.startswith("event:"):
            self._name = line.removeprefix("event:").strip()
        elif line and not line.startswith((":", "id:", "retry:")) and len(self.stray) < MAX_STRAY_CHARS:
            self.stray += f"{line[:MAX_STRAY_CHARS]}\n"
        return self._end_event() if not line else []  # comments, and fields that number events

    def _take(self, text: str) -> list[object]:
        if text == DONE:
            return [*self._end_event(), DONE]
        if not text:
            return []
        self._pending.append(text)
        # Each attempt reads all lines again, so a long event is read at its end only.
        if len(self._pending) > MAX_ATTEMPTS and not (self._is_bare and text in ("}", "]")):
            return []
        try:
            event = json.loads("\n".join(self._pending))
        except ValueError:
            return []  # the JSON may continue on the next line
        return [self._finish_event(event)]

    def _end_event(self) -> list[object]:
        text = "\n".join(self._pending)
        if not text:
            self._name = ""
            return []
        if self._name == "error":
            return [self._finish_event(text)]
        self._finish_event(None)
        return [json.loads(text)]

    def _finish_event(self, event: object) -> object:
        """Forget the pending lines. Return the event; one with the name ``error`` as an error."""
        is_error = self._name == "error" and not (
            isinstance(event, Mapping) and ("error" in event or "choices" in event)
        )
        self._pending.clear()
        self._is_bare, self._name = False, ""
        return {"error": event} if is_error and event else event


def read_completion(body: object, tools: Collection[str] = ()) -> Draft:
    """Read a whole reply."""
    if isinstance(body, str):  # sent as another type than JSON
        text = body
        try:
            body = json.loads(text)
        except ValueError:
            raise ValueError(describe_page(text)) from None
    if not isinstance(body, Mapping):
        raise_for_list(body)
        raise ValueError("it is no JSON object")
    raise_for_error(body)
    choices = list(_list_objects(body, "choices"))
    if not choices:
        raise ValueError("it has no choices")
    draft = Draft(tools, model=as_text(body.get("model")), usage=read_usage(body.get("usage")))
    choice, message = choices[0], choices[0].get("message")
    if not isinstance(message, Mapping):
        # Gemini leaves the message out where a filter, or the limit, left nothing of it.
        if "message" in choice or not choice.get("finish_reason"):
            raise ValueError("its choice has no message")
        message = {}
    draft._add_message(message, is_piece=False)
    draft.finish_reason = as_text(choice.get("finish_reason"))
    draft.is_done = True
    draft.close()
    return draft


def describe_page(text: str) -> str:
    """Return what a reply is that holds no JSON: most often the page of a login, a proxy or a wrong address."""
    words = shorten_page(text)[:200]
    return f"it is no JSON: {words!r}; check the address" if words else "it is empty"


def raise_for_error(body: Json) -> None:
    """Raise `ErrorInside` where a server reports an error in place of a reply."""
    if body.get("error"):
        raise ErrorInside(body)
    choices = body.get("choices")
    if isinstance(choices, list) and choices:
        first = choices[0]
        if isinstance(first, Mapping) and first.get("error"):
            raise ErrorInside({"error": first["error"]})
        return
    if choices is None and (any(name in body for name in ("errors", "detail", "base_resp")) or _is_status(body)):
        raise ErrorInside(body)


def raise_for_list(body: object) -> None:
    """Raise `ErrorInside` for a list of errors, which is how Gemini's endpoint answers
    (https://github.com/FuzzAnything/PromptFuzz/issues/42)."""
    if isinstance(body, list) and any(isinstance(item, Mapping) and item.get("error") for item in body):
        raise ErrorInside(body)


def _is_status(body: Json) -> bool:
    """Whether an object without choices reports an error, and not just that the server is still at work."""
    kind = " ".join(str(body.get(name) or "") for name in ("object", "type", "status"))
    return isinstance(body.get("message") or body.get("msg"), str) and ("code" in body or "error" in kind.lower())


def finish_calls(request: ModelRequest, drafts: Iterable[CallDraft]) -> Iterator[ToolCall]:
    """Give each call a unique id. Servers omit or repeat ids, and results are paired by them."""
    seen = {
        call.id for message in request.messages if isinstance(message, AssistantMessage) for call in message.tool_calls
    }
    for index, draft in enumerate(drafts):
        call_id = draft.id if draft.id and draft.id not in seen else derive_call_id(request, index)
        seen.add(call_id)
        yield ToolCall(call_id, draft.name, _unwrap_arguments(draft.arguments.getvalue()))


def _unwrap_arguments(text: str) -> str:
    """Return arguments that are JSON inside of JSON as the object that is meant
    (https://github.com/vllm-project/vllm/pull/54964)."""
    if not text.lstrip().startswith('"'):
        return text
    try:
        inner = json.loads(text)
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError, TypeError):
        return text


def find_origin(draft: Draft, endpoint: str, learned: Mapping[str, JsonValue], *, is_required: bool) -> ReplyOrigin:
    """Return where a reply came from, with the fields that the server wants back.

    The fields are kept with tool calls only: no server asks for the thinking before an answer. ``learned`` holds the rules
    from refusals. ``is_required`` means that the server refuses requests without the thinking."""
    if not draft.calls:
        return ReplyOrigin(endpoint, rules=learned)
    calls = tuple(call.fields for call in draft.calls) if any(call.fields for call in draft.calls) else ()
    demanded = {name for name, value in draft.fields.items() if is_required or is_sealed(name, value)}
    return ReplyOrigin(endpoint, draft.fields, calls, learned, frozenset(demanded))


# --- parts of a message


def as_text(value: object) -> str:
    """Return a value as text. Some servers send an object instead of its JSON."""
    match value:
        case str():
            return value
        case None:
            return ""
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


def read_content(content: object) -> tuple[str, str, str]:
    """Return the text, the thinking and the refusal of a message's content, which may be a list of parts."""
    match content:
        case list():
            return _read_parts(content)
        case {"type": str()}:
            return _read_parts([content])
        case _:
            return as_text(content), "", ""


def _read_parts(parts: Iterable[object]) -> tuple[str, str, str]:
    texts: list[str] = []
    thoughts: list[str] = []
    refusals: list[str] = []
    for part in parts:
        match part:
            case str():
                texts.append(part)
            case {"type": str(kind)} if "think" in kind or "reason" in kind:
                thoughts.append(_read_inner(part))
            case {"type": "refusal"}:
                refusals.append(_read_inner(part))
            case {"text": str() | list() | dict()} | {"content": str() | list()}:
                texts.append(_read_inner(part))
            case _:
                pass  # an image, a sound or a part that is unknown: nothing that a person could read
    return "".join(texts), "".join(thoughts), "".join(refusals)


def _read_inner(value: object) -> str:
    """Return all text inside of a part: ``thinking`` may be a text or a list of parts again."""
    match value:
        case str():
            return value
        case list():
            return "".join(_read_inner(item) for item in value)
        case Mapping():
            names = ("text", "thinking", "reasoning", "refusal", "summary", "content", "value")
            return next((_read_inner(value[name]) for name in names if value.get(name)), "")
        case _:
            return ""


def _read_reasoning(message: Json) -> str:
    for name in ("reasoning_content", "reasoning", "reasoning_text"):  # no standard
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


_MESSAGE_FIELDS: tuple[str, ...] = (
    "reasoning_content", "reasoning", "reasoning_details", "reasoning_text", "reasoning_opaque", "thinking_blocks",
    "extra_content",
)  # fmt: skip
"""Fields that servers want back with a message: DeepSeek, Kimi, vLLM (``reasoning_content``), OpenRouter (``reasoning_details``),
LiteLLM for Anthropic's models (``thinking_blocks``), Google (``extra_content``).

https://api-docs.deepseek.com/guides/thinking_mode, https://openrouter.ai/docs/use-cases/reasoning-tokens,
https://github.com/BerriAI/litellm/issues/15601, https://ai.google.dev/gemini-api/docs/openai"""

_CALL_FIELDS = ("extra_content", "provider_specific_fields", "thought_signature")
"""The same of a call: signatures, by Google itself and through LiteLLM."""


def _add_fields(known: dict[str, JsonValue], piece: Json, names: Iterable[str]) -> None:
    for name in names:
        value = piece.get(name)
        if value:
            known[name] = _join(known.get(name), value)


def _join(known: JsonValue, value: Any) -> JsonValue:
    """Add a piece of a field to what came of it before."""
    if isinstance(known, str) and isinstance(value, str):
        return known + value
    if isinstance(known, list) and isinstance(value, list):
        return _join_blocks(known, value)
    if isinstance(known, dict) and isinstance(value, Mapping):
        return {**known, **{name: _join_object(known.get(name), item) for name, item in value.items()}}
    made: JsonValue = json.loads(json.dumps(value, default=str))
    return made


def _join_object(known: JsonValue, value: Any) -> JsonValue:
    """Signatures come whole: a later one replaces the earlier."""
    if isinstance(known, dict) and isinstance(value, Mapping):
        return {**known, **{name: _join_object(known.get(name), item) for name, item in value.items()}}
    made: JsonValue = json.loads(json.dumps(value, default=str))
    return made


_GROWING = ("text", "thinking", "summary", "data")


def _join_blocks(known: list[JsonValue], pieces: Iterable[Any]) -> list[JsonValue]:
    """Add pieces of blocks to the last block where they continue it: the same kind and index, not signed yet."""
    blocks = list(known)
    for piece in pieces:
        last = blocks[-1] if blocks else None
        if isinstance(last, dict) and isinstance(piece, Mapping) and _continues(last, piece):
            grown = {name: as_text(last.get(name)) + as_text(piece[name]) for name in _GROWING if piece.get(name)}
            rest = {name: value for name, value in piece.items() if name not in _GROWING and value is not None}
            blocks[-1] = {**last, **rest, **grown}
        else:
            blocks.append(json.loads(json.dumps(piece, default=str)))
    return blocks


def _continues(block: Json, piece: Json) -> bool:
    if block.get("type") != piece.get("type") or block.get("signature") or "redacted" in as_text(block.get("type")):
        return False
    if block.get("index") != piece.get("index"):
        return False
    return block.get("id") == piece.get("id") or not block.get("id") or not piece.get("id")


def _as_object(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _list_objects(where: Json, name: str) -> Iterator[Json]:
    given = where.get(name)
    if given is None:
        return
    if isinstance(given, Mapping):
        given = [given]
    if isinstance(given, list) and name == "tool_calls":
        given = [item for item in given if item is not None]
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise ValueError(f"its {name} are no list of objects")
    yield from given


def _wrap_function(part: Json) -> Json:
    """Return a call with its name and arguments inside of ``function``, where some servers put them beside it."""
    if part.get("function") is not None or not isinstance(part.get("name"), str):
        return part
    return {**part, "function": {name: part.get(name) for name in ("name", "arguments")}}


def _read_index(part: Json) -> int | None:
    index = part.get("index")
    return index if isinstance(index, int) and not isinstance(index, bool) else None


def _read_name(part: Json) -> str:
    function = part.get("function")
    return as_text(function.get("name")) if isinstance(function, Mapping) else ""


# --- usage


def read_usage(usage: object) -> Usage:
    """Return the tokens that a reply counts; none for what is no number."""
    if not isinstance(usage, Mapping):
        return Usage()
    prompt, completion = (usage.get(f"{kind}_tokens_details") for kind in ("prompt", "completion"))
    # Beside OpenAI's own: as DeepSeek says it, and as gateways to Anthropic's models do.
    cached = (_count(prompt, "cached_tokens"), *(_count(usage, name) for name in _CACHED))
    return Usage(
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        max(cached),
        _count(completion, "reasoning_tokens"),
    )


_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
_CACHED = ("prompt_cache_hit_tokens", "cache_read_input_tokens")


def _count(where: object, name: str) -> int:
    value = where.get(name) if isinstance(where, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return min(max(0, int(value)), MAX_TOKENS)
