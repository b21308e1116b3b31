"""Parser for replies of OpenAI-compatible servers, both complete replies and streams.

Servers deviate from OpenAI's format in many ways: content as a list of parts, calls without an index or an id, streams
without a finish reason. The arguments of `read_completion` and `Draft.add_chunk` are parsed JSON. These functions raise
`ValueError` for a reply that cannot be read, and `ErrorInside` if the server reports an error instead of a reply. Pure.
"""

from __future__ import annotations

import json
import math
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
from .think_tags import ANY_OPEN, LONE_CLOSE, ThinkTags

Json = Mapping[str, Any]


class ErrorInside(Exception):
    """A server reported an error inside a reply with status 200 or inside a stream. ``body`` is the error's JSON."""

    def __init__(self, body: object) -> None:
        super().__init__("the reply contains an error")
        self.body = body


@dataclass(slots=True)
class CallDraft:
    """Tool call whose pieces are still arriving. ``index`` is the server's index of the call, or None."""

    index: int | None = None
    id: str = ""
    name: str = ""
    # Use a buffer instead of a str, because adding a piece to a long str copies the whole str.
    arguments: StringIO = field(default_factory=StringIO)
    fields: dict[str, JsonValue] = field(default_factory=dict)
    """Fields of the call that later requests must send back to the server."""

    def has_arguments(self) -> bool:
        return self.arguments.tell() > 0

    def is_whole(self) -> bool:
        """Return whether the received arguments are a complete JSON object. After a complete object, the next object
        belongs to another call.
        """
        arguments = self.arguments.getvalue().strip()
        if not arguments.endswith("}"):
            return False
        try:
            return isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(slots=True)
class Draft:
    """Partially received reply. ``is_done`` is true if the server has marked the end of the stream."""

    tools: Collection[str] = ()
    text: StringIO = field(default_factory=StringIO)
    reasoning: StringIO = field(default_factory=StringIO)
    refusal: StringIO = field(default_factory=StringIO)
    calls: list[CallDraft] = field(default_factory=list)
    fields: dict[str, JsonValue] = field(default_factory=dict)
    """Fields of the message that later requests must send back to the server."""

    usage: Usage = field(default_factory=Usage)
    finish_reason: str = ""
    model: str = ""
    is_done: bool = False
    _tags: ThinkTags = field(default_factory=ThinkTags)
    _choice: object = None  # index of the parsed choice; other choices are ignored
    _last: CallDraft | None = None  # call of the last piece

    @property
    def is_finished(self) -> bool:
        """Whether the reply is complete. Some servers end a stream with ``[DONE]`` and without a finish reason
        (https://github.com/waybarrios/vllm-mlx/issues/628).
        """
        return bool(self.finish_reason) or self.is_done

    def add_chunk(self, chunk: object) -> list[ModelDelta]:
        """Process one chunk of a streamed reply. Return the deltas to display."""
        if not isinstance(chunk, Mapping):
            raise_for_list(chunk)
            raise ValueError("a piece of the reply is not a JSON object")
        raise_for_error(chunk)
        self.model = as_text(chunk.get("model")) or self.model
        self._add_usage(chunk)
        return [self._add_choice(choice) for choice in _list_objects(chunk, "choices")]

    def _add_choice(self, choice: Json) -> ModelDelta:
        index = choice.get("index")
        if self._choice is None:
            self._choice = index
        # Ignore further choices: a server may send several although one was requested, and their texts must not mix.
        elif index is not None and index != self._choice:
            return ModelDelta()
        self._add_usage(choice)  # Kimi sends the usage here: https://github.com/earendil-works/pi/issues/2017
        reason = as_text(choice.get("finish_reason"))
        if reason and self.finish_reason in ("", "stop"):  # a later "stop" must not hide a limit or a filter
            self.finish_reason = reason
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            return self._add_message(delta, is_piece=True)
        message = choice.get("message")
        if isinstance(message, Mapping) and self._is_empty():  # after pieces, a whole message would repeat them
            return self._add_message(message, is_piece=False)
        if delta is not None:
            raise ValueError("a piece of the reply is not a JSON object")
        return ModelDelta()

    def close(self) -> list[ModelDelta]:
        """Process the text that is left when the reply ends. Return the deltas to display."""
        text, reasoning = self._tags.close()
        self.text.write(text)
        self.reasoning.write(reasoning)
        # Extract reasoning without an opening tag only at the end, because the closing tag may arrive with any piece.
        # People have already seen this reasoning as text.
        self._extract_unopened_reasoning()
        return [ModelDelta(text, reasoning)] if text or reasoning else []

    def _extract_unopened_reasoning(self) -> None:
        """Move reasoning that has only a closing tag from the text to the reasoning.

        The chat templates of some models end with the opening tag, so the reply does not contain the opening tag
        (https://github.com/deepseek-ai/DeepSeek-R1/issues/456, https://github.com/infiniflow/ragflow/issues/5698). A
        closing tag after an opening tag or inside a code block is part of the text.
        """
        text = self.text.getvalue()
        closing = LONE_CLOSE.search(text)
        if closing is None:
            return
        thought = text[: closing.start()]
        is_last = closing.end() == len(text)
        if ANY_OPEN.search(thought) or thought.count("```") % 2 or (is_last and not self.calls):
            return
        self.text = StringIO()
        self.text.write(text[closing.end() :].lstrip())
        self.reasoning.write(thought)

    def _add_usage(self, where: Json) -> None:
        """Merge the server's token counts. Take the maximum, because some streams end with zeros."""
        if isinstance(where.get("usage"), Mapping):
            previous, counted = self.usage, read_usage(where["usage"])
            self.usage = Usage(*(max(getattr(usage, name) for usage in (previous, counted)) for name in _COUNTS))

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
                raise ValueError("one of its tool calls has no function")
            if is_piece:
                self._add_piece(part, place, len(parts))
            elif part.get("function"):  # check the form of the part, because some servers omit the type
                self._open_call(part)
        call = message.get("function_call")  # older servers send a single call in this field
        if isinstance(call, Mapping) and not parts:
            self._add_piece({"function": call}, 0, 1)
        return ModelDelta(text, reasoning)

    # --- calls

    def _add_piece(self, part: Json, position: int, count: int) -> None:
        """Add a piece of a call to the draft. ``position`` is the index of the piece among the ``count`` pieces of the
        chunk.
        """
        call = self._find_call(part, position, count)
        if call is None:
            self._open_call(part)
        else:
            self._extend_call(call, part)

    def _open_call(self, part: Json) -> None:
        call = CallDraft(_read_index(part))
        self.calls.append(call)
        self._extend_call(call, part)

    def _extend_call(self, call: CallDraft, part: Json) -> None:
        self._last = call
        function = part.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, arguments = as_text(function.get("name")), as_text(function.get("arguments"))
        if call.index is None:
            call.index = _read_index(part)
        call.id = call.id or as_text(part.get("id"))
        # Ignore an equal name, because some servers repeat the name in every piece.
        if name and name != call.name:
            call.name += name
        # Ignore equal complete arguments, because some servers repeat the whole call at the end.
        is_repeated = arguments.strip() != "" and arguments == call.arguments.getvalue() and call.is_whole()
        call.arguments.write("" if is_repeated else arguments)
        _add_fields(call.fields, part, _CALL_FIELDS)
        inner: dict[str, JsonValue] = {}
        _add_fields(inner, function, _CALL_FIELDS)
        if inner:
            call.fields["function"] = {**_as_object(call.fields.get("function")), **inner}

    def _find_call(self, part: Json, position: int, count: int) -> CallDraft | None:
        """Return the call to which a piece belongs, or None if the piece begins a new call.

        Use the id of the piece or, without an id, its index. If a piece has neither an id nor an index, use its
        position. A server may repeat an id or index, send it only in the first piece, or send neither
        (https://github.com/open-webui/computer/issues/224).
        """
        call_id, index, name = as_text(part.get("id")), _read_index(part), _read_name(part)
        if call_id:
            return self._find_by_id(call_id, index, name, part)
        if index is not None:
            found = next((call for call in reversed(self.calls) if call.index == index), None)
            return None if found is None or self._begins_another(found, name, part) else found
        if count > 1:  # several calls in one piece: the position identifies them
            found = self.calls[position] if position < len(self.calls) else None
            continues = found is not None and (not name or (name == found.name and not found.is_whole()))
            return found if continues else None
        last = self._last
        return None if last is None or self._begins_another(last, name, part) else last

    def _find_by_id(self, call_id: str, index: int | None, name: str, part: Json) -> CallDraft | None:
        for call in reversed(self.calls):
            same_place = index is None or call.index is None or call.index == index
            if call.id == call_id and same_place:
                return None if self._begins_another(call, name, part) else call
        # If the id arrives after the first piece, assign it to the call that has no id yet.
        late = (
            next((call for call in reversed(self.calls) if call.index == index), None)
            if index is not None
            else self._last
        )
        if late is not None and not late.id and not self._begins_another(late, name, part):
            return late
        return None

    def _begins_another(self, call: CallDraft, name: str, part: Json) -> bool:
        """Return whether a piece begins a call after ``call``. A piece begins another call if it names a tool, and if
        the name and arguments of ``call`` are already complete.
        """
        if not name:
            return False
        if call.has_arguments():
            function = part.get("function")
            arguments = as_text(function.get("arguments")) if isinstance(function, Mapping) else ""
            if name != call.name:
                return True
            return arguments != call.arguments.getvalue() and call.is_whole()
        # A name may arrive in pieces: `get` and `_time` are one name if `get_time` is a tool, and two names if `get`
        # and `_time` are tools.
        if call.name in self.tools and name in self.tools and name != call.name:
            return not any(tool.startswith(call.name + name) for tool in self.tools)
        return False


def read_completion(body: object, tools: Collection[str] = ()) -> Draft:
    """Parse a complete reply that was not streamed."""
    if isinstance(body, str):  # the server did not declare JSON
        text = body
        try:
            body = json.loads(text)
        except ValueError:
            raise ValueError(describe_page(text)) from None
    if not isinstance(body, Mapping):
        raise_for_list(body)
        raise ValueError("it is not a JSON object")
    raise_for_error(body)
    choices = list(_list_objects(body, "choices"))
    if not choices:
        raise ValueError("it has no choices")
    draft = Draft(tools, model=as_text(body.get("model")), usage=read_usage(body.get("usage")))
    choice, message = choices[0], choices[0].get("message")
    if not isinstance(message, Mapping):
        # Gemini omits the message if a filter or the length limit removed all of its content.
        if "message" in choice or not choice.get("finish_reason"):
            raise ValueError("its choice has no message")
        message = {}
    draft._add_message(message, is_piece=False)
    draft.finish_reason = as_text(choice.get("finish_reason"))
    draft.is_done = True
    draft.close()
    return draft


def describe_page(text: str) -> str:
    """Describe a reply that is not JSON. Most replies that are not JSON are web pages of a login, a proxy or a wrong
    address.
    """
    words = shorten_page(text)[:200]
    return f"it is not JSON: {words!r}; check the address" if words else "it is empty"


def raise_for_error(body: Json) -> None:
    """Raise `ErrorInside` if the server reports an error instead of a reply."""
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
    """Raise `ErrorInside` if the body is a list with an error, which is the form of errors from Gemini's endpoint
    (https://github.com/FuzzAnything/PromptFuzz/issues/42).
    """
    if isinstance(body, list) and any(isinstance(item, Mapping) and item.get("error") for item in body):
        raise ErrorInside(body)


def _is_status(body: Json) -> bool:
    """Return whether an object without choices reports an error. Servers also send objects without choices that report
    no error, for example their progress.
    """
    kind = " ".join(str(body.get(name) or "") for name in ("object", "type", "status"))
    return isinstance(body.get("message") or body.get("msg"), str) and ("code" in body or "error" in kind.lower())


def finish_calls(request: ModelRequest, drafts: Iterable[CallDraft]) -> Iterator[ToolCall]:
    """Yield the calls with unique ids. Servers omit or repeat ids, but results are matched to calls by id."""
    seen = {
        call.id for message in request.messages if isinstance(message, AssistantMessage) for call in message.tool_calls
    }
    for index, draft in enumerate(drafts):
        call_id = draft.id if draft.id and draft.id not in seen else derive_call_id(request, index)
        seen.add(call_id)
        yield ToolCall(call_id, draft.name, _unwrap_arguments(draft.arguments.getvalue()))


def _unwrap_arguments(text: str) -> str:
    """Return the inner JSON object of arguments that were encoded as JSON twice
    (https://github.com/vllm-project/vllm/pull/54964). Return other arguments unchanged.
    """
    if not text.lstrip().startswith('"'):
        return text
    try:
        inner = json.loads(text)
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError, TypeError):
        return text


def find_origin(draft: Draft, endpoint: str, learned: Mapping[str, JsonValue], *, is_required: bool) -> ReplyOrigin:
    """Return the origin of a reply, with the fields that later requests must send back to the server.

    The fields are kept only for a reply with tool calls, because no server needs the reasoning of an earlier answer in
    text. ``learned`` contains the rules learned from refusals. ``is_required``: the server refuses requests without the
    reasoning.
    """
    if not draft.calls:
        return ReplyOrigin(endpoint, rules=learned)
    calls = tuple(call.fields for call in draft.calls) if any(call.fields for call in draft.calls) else ()
    demanded = {name for name, value in draft.fields.items() if is_required or is_sealed(name, value)}
    return ReplyOrigin(endpoint, draft.fields, calls, learned, frozenset(demanded))


# --- parts of a message


def as_text(value: object) -> str:
    """Return a value as text. Encode objects as JSON, because some servers send an object instead of JSON text."""
    match value:
        case str():
            return value
        case None:
            return ""
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


def read_content(content: object) -> tuple[str, str, str]:
    """Return the text, the reasoning and the refusal of a message's content, which may be a list of parts."""
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
                pass  # an image, audio or an unknown part: no text
    return "".join(texts), "".join(thoughts), "".join(refusals)


def _read_inner(value: object) -> str:
    """Return all text inside a content part. The field ``thinking`` of a part may be text or a nested list of parts."""
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
    for name in ("reasoning_content", "reasoning", "reasoning_text"):  # servers use different names
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


_MESSAGE_FIELDS: tuple[str, ...] = (
    "reasoning_content", "reasoning", "reasoning_details", "reasoning_text", "reasoning_opaque", "thinking_blocks",
    "extra_content",
)  # fmt: skip
"""Fields of a message that servers require or accept in later requests: ``reasoning_content`` (DeepSeek, Kimi, vLLM),
``reasoning_details`` (OpenRouter), ``thinking_blocks`` (LiteLLM for Anthropic's models), ``extra_content`` (Google).

https://api-docs.deepseek.com/guides/thinking_mode, https://openrouter.ai/docs/use-cases/reasoning-tokens,
https://github.com/BerriAI/litellm/issues/15601, https://ai.google.dev/gemini-api/docs/openai
"""

_CALL_FIELDS = ("extra_content", "provider_specific_fields", "thought_signature")
"""Fields of a call that servers require in later requests: signatures, from Google directly or through LiteLLM."""


def _add_fields(fields: dict[str, JsonValue], piece: Json, names: Iterable[str]) -> None:
    for name in names:
        value = piece.get(name)
        if value:
            fields[name] = _join(fields.get(name), value)


def _join(previous: JsonValue, value: Any) -> JsonValue:
    """Append a streamed piece of a field to the value that has arrived so far."""
    if isinstance(previous, str) and isinstance(value, str):
        return previous + value
    if isinstance(previous, list) and isinstance(value, list):
        return _join_blocks(previous, value)
    if isinstance(previous, dict) and isinstance(value, Mapping):
        return {**previous, **{name: _join_object(previous.get(name), item) for name, item in value.items()}}
    copied: JsonValue = json.loads(json.dumps(value, default=str))
    return copied


def _join_object(previous: JsonValue, value: Any) -> JsonValue:
    """Merge two pieces of an object. A later signature replaces the earlier one, because servers send it complete."""
    if isinstance(previous, dict) and isinstance(value, Mapping):
        return {**previous, **{name: _join_object(previous.get(name), item) for name, item in value.items()}}
    copied: JsonValue = json.loads(json.dumps(value, default=str))
    return copied


_GROWING = ("text", "thinking", "summary", "data")


def _join_blocks(previous: list[JsonValue], pieces: Iterable[Any]) -> list[JsonValue]:
    """Add streamed pieces to a list of blocks. A piece either continues the last block or becomes a new block.

    A piece continues a block if the block has no signature yet and has the same kind and index.
    """
    blocks = list(previous)
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
    value = where.get(name)
    if value is None:
        return
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list) and name == "tool_calls":
        value = [item for item in value if item is not None]
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"its {name} are not a list of objects")
    yield from value


def _wrap_function(part: Json) -> Json:
    """Return a call with its name and arguments inside ``function``. Some servers place the name and the arguments
    outside of ``function``.
    """
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
    """Return the token counts of a reply. A value that is not a number counts as 0."""
    if not isinstance(usage, Mapping):
        return Usage()
    prompt, completion = (usage.get(f"{kind}_tokens_details") for kind in ("prompt", "completion"))
    # OpenAI, DeepSeek and gateways to Anthropic's models use different fields for the count of cached tokens.
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
