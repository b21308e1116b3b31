"""Any OpenAI-compatible server as a `Model`, over the `openai` SDK's chat completions.

One `complete` is one HTTP request: the SDK's own retries are off, since who may retry is decided where the reaction is
driven. Every failure leaves as a `ModelError` that says whether a repeat can help. A server without tool calls is used
through `json_schema`. This module never runs tools, never keeps a conversation and never logs a key or a prompt. Its
parts: the model, how a request is written, how a reply is read, how a failure is explained.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal, assert_never
from urllib.parse import urlsplit

import httpx2
import openai
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionAssistantMessageParam,
    ChatCompletionChunk,
    ChatCompletionContentPartParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionToolChoiceOptionParam,
)
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta, ChoiceDeltaToolCall
from openai.types.shared_params import ResponseFormatJSONSchema

from roundelay.agents.containment import describe_error, without_words
from roundelay.agents.outgoing_http import check_environment, describe_proxy, load_certificates
from roundelay.agents.per_loop import PerLoop
from roundelay.network.credentials import describe_variable, hide_url_secrets, read_secret, remember_url
from roundelay.network.errors import ConfigError
from roundelay.network.home import is_loopback

from .json_schema import StepRequest, decode_step, encode_steps
from .model import (
    MAX_TOKENS,
    AssistantMessage,
    ChatMessage,
    File,
    ModelDelta,
    ModelError,
    ModelFailure,
    ModelReply,
    ModelRequest,
    NamedTool,
    OnDelta,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
    derive_call_id,
)

ToolMode = Literal["native", "json_schema"]

_PATH = "/chat/completions"
_DEFAULT_URL = "https://api.openai.com/v1"


class OpenAIModel:
    """A model on an OpenAI-compatible server.

    ``settings`` go into each request's body as they are (``temperature``, ``max_tokens``, ``reasoning_effort``, ...).
    With ``cache_control`` requests say where a provider that wants to be told may cache: behind the system message, the
    conversation and the last result. ``silence_s`` bounds the time without a byte, ``total_s`` the whole call. Raises
    `ModelError` at once when the key's variable is not set; a server on loopback needs none. Use ``await close()`` or
    ``async with`` at the end.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        api_key: str | None = None,
        tool_mode: ToolMode = "native",
        stream: bool = False,
        silence_s: float = 120.0,
        total_s: float = 600.0,
        settings: Mapping[str, object] | None = None,
        cache_control: bool = False,
    ) -> None:
        self.name = name
        self._base_url = _check_address(name, base_url or os.environ.get("OPENAI_BASE_URL") or "")
        self._key_source = f"the variable {describe_variable(api_key_env)}" if not api_key else "api_key"
        self._api_key_env = describe_variable(api_key_env)
        try:
            self._api_key = read_secret(api_key or os.environ.get(api_key_env) or "", self._key_source)
            self._organization = _read_variable("OPENAI_ORG_ID")
            self._project = _read_variable("OPENAI_PROJECT_ID")
            for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines():
                read_secret(line.partition(":")[2], "the variable OPENAI_CUSTOM_HEADERS")
            check_environment()
        except ConfigError as error:
            raise ModelError(f"Model {name} cannot be used. {error}", reason="misconfigured") from None
        self._tool_mode: ToolMode = tool_mode
        self._stream = stream
        self._silence_s = silence_s
        self._total_s = total_s
        self._cache_control = cache_control
        self.settings: Mapping[str, object] = dict(settings or {})
        """What goes into each request's body beside messages and tools."""

        self._clients = PerLoop(self._make_client)
        host = urlsplit(self._base_url or "").hostname or ""
        self._is_own = is_loopback(host) or host.endswith(".localhost")  # on this machine
        if not self._api_key and not self._is_own:
            state = "is empty" if os.environ.get(api_key_env) else "is not set"
            raise ModelError(
                f"Model {name} needs a key, and the environment variable {self._api_key_env} {state}: "
                f"export {self._api_key_env}=..., or name another variable with api_key_env.",
                reason="unauthorized",
            )

    async def __aenter__(self) -> OpenAIModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the model can be used again and then opens new ones."""
        client = self._clients.pop()
        if client is not None:
            await client.close()

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer the request by one call of the server."""
        step = encode_steps(request) if self._tool_mode == "json_schema" else None
        if step is not None and step.schema is not None:
            on_delta = None  # the text that streams is the JSON of a step: nobody's answer
        try:
            async with asyncio.timeout(self._total_s):
                draft = await self._ask(request, step, on_delta)
        except (openai.OpenAIError, TimeoutError, ValueError) as error:  # ValueError: a body or chunk that is not JSON
            # Without the words of the SDK's errors: some quote the header with the key.
            raise self._explain(error) from without_words(error)
        if draft.finish_reason is None:
            raise ModelError(f"The reply of model {self.name} broke off before its end.", reason="broken_reply")
        refusal = draft.refusal.getvalue()
        text = draft.text.getvalue() or refusal or None
        calls = tuple(_finish_calls(request, draft.calls))
        if step is not None and step.schema is not None and not calls:
            text, calls = decode_step(request, draft.text.getvalue())
        reason = "refusal" if refusal else draft.finish_reason
        thought = draft.reasoning.getvalue()
        return ModelReply(text, calls, draft.usage, reason, draft.model or self.name, thought)

    async def _ask(self, request: ModelRequest, step: StepRequest | None, on_delta: OnDelta | None) -> _Draft:
        # Not `chat.completions.create`: it walks through every message, and all types that one may have, to rename
        # fields that have their names here already. That is half of a call's CPU, more as the history grows
        # (docs/performance.md).
        client, body = self._clients.get(), self._build_body(request, step)
        if not self._stream:
            completion = await client.post(_PATH, cast_to=ChatCompletion, body=body)
            with _reading():
                return _read_completion(completion)
        draft = _Draft()
        stream = await client.post(
            _PATH, cast_to=ChatCompletion, body=body, stream=True, stream_cls=AsyncStream[ChatCompletionChunk]
        )
        async with stream:
            await _read_stream(stream, draft, on_delta)
        return draft

    def _build_body(self, request: ModelRequest, step: StepRequest | None) -> dict[str, object]:
        encoded = encode_request(request, step, cache_control=self._cache_control)
        body: dict[str, object] = {"model": self.name, **encoded}
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= self.settings
        if "tools" not in body:
            body.pop("parallel_tool_calls", None)  # refused without them
        return body

    def _make_client(self) -> AsyncOpenAI:
        try:
            check_environment()  # again: the variables may be others since the model was made
            certificates = load_certificates()
        except ConfigError as error:
            raise ModelError(f"Model {self.name} cannot be used. {error}", reason="misconfigured") from None
        return AsyncOpenAI(
            api_key=self._api_key or "none",  # the SDK insists on one; a server on loopback ignores it
            base_url=self._base_url,
            organization=self._organization,
            project=self._project,
            max_retries=0,
            timeout=openai.Timeout(self._silence_s, connect=min(10.0, self._silence_s)),
            http_client=DefaultAsyncHttpxClient(verify=certificates),
        )

    def _explain(self, error: Exception) -> ModelError:
        """Give the `ModelError` for a failure of the SDK: what went wrong, and what to do if that is known."""
        where = hide_url_secrets(self._base_url) if self._base_url else "the OpenAI API"
        proxy = describe_proxy(self._base_url or _DEFAULT_URL)
        if proxy and self._is_own and is_from_proxy(error):
            what = describe_failure(error)
            return ModelError(f"Model {self.name} at {where} gave no reply ({what}).{proxy}", reason="misconfigured")
        match error:
            case openai.APITimeoutError() | TimeoutError():
                return ModelError(f"Model {self.name} at {where} did not answer in time.", reason="timeout")
            case openai.APIStatusError():
                reason = _classify_status(error)
                hint = ""
                if reason == "unauthorized":
                    hint = f" Check the key in {self._api_key_env}."
                elif reason == "not_found":
                    hint = f" Check the model's name and the address {where}."
                return ModelError(
                    f"Model {self.name} answered {error.status_code}: {_read_message(error).rstrip('. ')}.{hint}{proxy}",
                    reason=reason,
                    retry_after_ms=_read_retry_after(error.response.headers),
                )
            case openai.APIConnectionError():
                advice = describe_tls_mistake(error)
                told = f"Model {self.name} at {where} cannot be reached ({describe_failure(error)}).{proxy}{advice}"
                # A proxy that refuses, and a certificate that is not trusted, stay so.
                is_refused = isinstance(error.__cause__, httpx2.ProxyError)
                return ModelError(told, reason="misconfigured" if advice or is_refused else "unreachable")
            case openai.APIError():
                return ModelError(f"Model {self.name} failed while answering: {error.message}", reason="server")
            case _:
                return ModelError(
                    f"Model {self.name} sent a reply that cannot be read ({error}).", reason="broken_reply"
                )


def _check_address(model: str, url: str) -> str | None:
    """Return the server's address without white space around it. Raises `ModelError` for what is none."""
    url = url.strip()
    remember_url(url)
    try:
        parts = httpx2.URL(url)
        is_address = not url or (parts.scheme in ("http", "https") and bool(parts.host))
    except (httpx2.InvalidURL, ValueError):
        is_address = False
    if not is_address:
        raise ModelError(
            f"Model {model} cannot be used. Its base_url is {hide_url_secrets(url)!r}, and has to be http://HOST/PATH or "
            "https://HOST/PATH, such as https://api.openai.com/v1.",
            reason="misconfigured",
        )
    return url or None


def _read_variable(name: str) -> str | None:
    return read_secret(os.environ.get(name, ""), f"the variable {name}") or None


def is_from_proxy(error: Exception) -> bool:
    """Whether a proxy, rather than the server behind it, may have failed: no connection, a page, a gateway's status."""
    match error:
        case openai.APITimeoutError():
            return isinstance(error.__cause__, httpx2.ConnectTimeout)
        case openai.APIStatusError():
            return error.status_code in (403, 407, 502, 503, 504) or not isinstance(error.body, dict)
        case _:
            return isinstance(error, openai.APIConnectionError | ValueError)


def describe_failure(error: Exception) -> str:
    """Return what the HTTP library says of a request that got no answer, or the SDK of one that did."""
    if isinstance(error, openai.APIStatusError):
        return f"{error.status_code}: {_read_message(error).rstrip('. ')}"
    return describe_error(error.__cause__ if isinstance(error.__cause__, Exception) else error)


def describe_tls_mistake(error: Exception) -> str:
    """Return what to do about a failed handshake that no repeat will change, or nothing."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return " Its certificate is not trusted here: name the file with the right certificates in SSL_CERT_FILE."
        if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
            return " It does not speak TLS there: write http:// instead of https://, or another port."
        cause = cause.__cause__ or cause.__context__
    return ""


# --- how a request is written

_AUDIO: Mapping[str, Literal["wav", "mp3"]] = {"audio/wav": "wav", "audio/mpeg": "mp3"}
"""What the API has a part for; anything else goes as a file."""


def encode_request(
    request: ModelRequest, step: StepRequest | None, *, cache_control: bool = False
) -> dict[str, object]:
    """Give the fields of the body that say what is asked. ``step``: the request in plain texts, in place of tools."""
    messages = request.messages if step is None else step.messages
    encoded = [_encode_message(message) for message in messages]
    if cache_control:
        _mark_caches(encoded, request.prompt)
    body: dict[str, object] = {"messages": encoded}
    if step is None and request.tools:
        body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if request.tool_choice != "auto":  # the API's default, and refused without tools
            body["tool_choice"] = _encode_choice(request.tool_choice)
    if step is not None and step.schema is not None:
        body["response_format"] = _encode_schema(step)
    return body


def _encode_message(message: ChatMessage) -> ChatCompletionMessageParam:
    match message:
        case SystemMessage(content):
            return {"role": "system", "content": content}
        case UserMessage(content, images, files) if images or files:
            parts: list[ChatCompletionContentPartParam] = [{"type": "text", "text": content}]
            parts += [{"type": "image_url", "image_url": {"url": url}} for url in images]
            parts += [_encode_file(file) for file in files]
            return {"role": "user", "content": parts}
        case UserMessage(content):
            return {"role": "user", "content": content}
        case AssistantMessage(content, calls):
            turn: ChatCompletionAssistantMessageParam = {"role": "assistant", "content": content}
            if calls:  # an empty list is refused
                turn["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls
                ]
            elif content is None:
                turn["content"] = ""  # null is refused beside no calls
            return turn
        case ToolMessage(call_id, content):
            return {"role": "tool", "tool_call_id": call_id, "content": content}
        case _:
            assert_never(message)


def _mark_caches(messages: Sequence[Any], prompt: str) -> None:
    """Say where ends what is the same in the next turn: Anthropic's models cache up to such a mark, and nowhere else
    (https://docs.claude.com/en/docs/build-with-claude/prompt-caching; of at most four marks these are three)."""
    system = (it for it in messages if it["role"] == "system")
    conversation = (it for it in messages if it["role"] == "user" and _read_first_text(it).startswith(prompt))
    results = (it for it in reversed(messages) if it["role"] == "tool")
    for found, end in ((system, None), (conversation, len(prompt)), (results, None)):
        message = next(found, None)
        if message is not None:
            _mark(message, end)


def _mark(message: Any, end: int | None) -> None:
    """Mark a message behind the first ``end`` characters of its text, or behind all of that."""
    text, content = _read_first_text(message), message["content"]
    stable = text[:end]
    if not stable:  # a mark on nothing is refused
        return
    parts: list[dict[str, object]] = [{"type": "text", "text": stable, "cache_control": {"type": "ephemeral"}}]
    if len(text) > len(stable):
        parts.append({"type": "text", "text": text[len(stable) :]})
    message["content"] = [*parts, *(content[1:] if isinstance(content, list) else ())]


def _read_first_text(message: Any) -> str:
    content = message["content"]
    return str(content[0]["text"] if isinstance(content, list) else content or "")


def _encode_file(file: File) -> ChatCompletionContentPartParam:
    form = _AUDIO.get(file.media_type)
    if form is not None:
        return {"type": "input_audio", "input_audio": {"data": file.data, "format": form}}
    # The API's reference says base64; what it takes is that as a `data:` address, with the type.
    data = f"data:{file.media_type};base64,{file.data}"
    return {"type": "file", "file": {"filename": file.name, "file_data": data}}


def _encode_tool(tool: ToolSpec) -> ChatCompletionFunctionToolParam:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def _encode_choice(choice: ToolChoice | NamedTool) -> ChatCompletionToolChoiceOptionParam:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def _encode_schema(step: StepRequest) -> ResponseFormatJSONSchema:
    schema = dict(step.schema or {})
    return {"type": "json_schema", "json_schema": {"name": "step", "schema": schema, "strict": step.is_strict}}


# --- how a reply is read


@dataclass(slots=True)
class _CallDraft:
    id: str = ""
    name: str = ""
    # Not a str: a long one that grows piece by piece is copied each time.
    arguments: StringIO = field(default_factory=StringIO)


@dataclass(slots=True)
class _Draft:
    """A reply while it is read; without a ``finish_reason`` it was cut off."""

    text: StringIO = field(default_factory=StringIO)
    reasoning: StringIO = field(default_factory=StringIO)
    refusal: StringIO = field(default_factory=StringIO)
    calls: list[_CallDraft] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    model: str = ""


@contextmanager
def _reading() -> Iterator[None]:
    """The SDK does not validate: what a server sends in another shape than its types say is noticed where it is
    read."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"it has another shape: {error}") from error


def _read_completion(completion: object) -> _Draft:
    if not isinstance(completion, ChatCompletion) or not completion.choices:
        raise ValueError("it has no choices")
    choice = completion.choices[0]
    message = choice.message
    draft = _Draft(
        StringIO(_text(message.content)),
        StringIO(_read_reasoning(message.model_extra)),
        StringIO(_text(message.refusal)),
        model=_text(completion.model),
        usage=_read_usage(completion.usage),
    )
    draft.finish_reason = _text(getattr(choice, "finish_reason", None)) or "stop"
    for call in message.tool_calls or ():
        function = getattr(call, "function", None)  # by shape: some servers leave the type out
        if function is not None:
            draft.calls.append(_CallDraft(_text(call.id), _text(function.name), StringIO(_text(function.arguments))))
    return draft


async def _read_stream(stream: AsyncIterator[ChatCompletionChunk], draft: _Draft, on_delta: OnDelta | None) -> None:
    positions: dict[int, int] = {}  # the server's index of a call -> its place in the draft
    async for chunk in stream:
        with _reading():
            pieces = [_add_choice(draft, positions, choice) for choice in chunk.choices or ()]
            draft.model = _text(chunk.model) or draft.model
            if chunk.usage is not None:
                draft.usage = _read_usage(chunk.usage)
        if on_delta is not None:
            for piece in pieces:
                if piece.text or piece.reasoning:
                    on_delta(piece)


def _add_choice(draft: _Draft, positions: dict[int, int], choice: Choice) -> ModelDelta:
    """Put what is new to the draft; give what of it can be shown."""
    draft.finish_reason = _text(choice.finish_reason) or draft.finish_reason
    delta: ChoiceDelta | None = choice.delta  # None of some servers, at the end
    if delta is None:
        return ModelDelta()
    text = _text(delta.content)
    draft.text.write(text)
    draft.refusal.write(_text(delta.refusal))
    for part in delta.tool_calls or ():
        _add_call_part(draft.calls, positions, part)
    reasoning = _read_reasoning(delta.model_extra)
    draft.reasoning.write(reasoning)
    return ModelDelta(text, reasoning)


def _read_reasoning(extra: Mapping[str, object] | None) -> str:
    found = (extra or {}).get("reasoning_content") or (extra or {}).get("reasoning")  # two spellings, no standard
    return found if isinstance(found, str) else ""


def _add_call_part(calls: list[_CallDraft], positions: dict[int, int], part: ChoiceDeltaToolCall) -> None:
    """Put a piece of a call to its call. Some servers give every call the same index, or none: a new id then begins a
    new call."""
    at = positions.get(part.index)
    if at is None or (part.id and calls[at].id and part.id != calls[at].id):
        at = len(calls)
        calls.append(_CallDraft())
        positions[part.index] = at
    call = calls[at]
    call.id = call.id or _text(part.id)
    if part.function is not None:
        call.name = call.name or _text(part.function.name)
        call.arguments.write(_text(part.function.arguments))


def _finish_calls(request: ModelRequest, drafts: Iterable[_CallDraft]) -> Iterable[ToolCall]:
    """Give each call an id of its own: servers leave it out, or repeat it, and results are paired by it."""
    seen = {
        call.id for message in request.messages if isinstance(message, AssistantMessage) for call in message.tool_calls
    }
    for index, draft in enumerate(drafts):
        call_id = draft.id if draft.id and draft.id not in seen else derive_call_id(request, index)
        seen.add(call_id)
        yield ToolCall(call_id, draft.name, draft.arguments.getvalue())


def _text(value: object) -> str:
    """Give a text, whatever a server wrote in its place: the parts of one, arguments as an object rather than its
    JSON."""
    match value:
        case str():
            return value
        case None:
            return ""
        case [{"text": str()}, *_] as parts:
            return "".join(_text(part.get("text")) for part in parts if isinstance(part, dict))
        case _:
            return json.dumps(value, default=str)


def _read_usage(usage: object) -> Usage:
    prompt, completion = (getattr(usage, f"{kind}_tokens_details", None) for kind in ("prompt", "completion"))
    # Beside OpenAI's own: as DeepSeek says it, and as gateways to Anthropic's models do.
    cached = (_count(prompt, "cached_tokens"), *(_count(usage, name) for name in _CACHED))
    return Usage(
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        max(cached),
        _count(completion, "reasoning_tokens"),
    )


_CACHED = ("prompt_cache_hit_tokens", "cache_read_input_tokens")


def _count(where: object, name: str) -> int:
    value = getattr(where, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return min(max(0, int(value)), MAX_TOKENS)


def _classify_status(error: openai.APIStatusError) -> ModelFailure:
    match error.status_code, error.code:
        case _, "context_length_exceeded":
            return "context_too_long"
        case _, "content_filter" | "content_policy_violation":
            return "content_filter"
        case (429, "insufficient_quota") | (402, _):  # 402 is how others than OpenAI say it
            return "quota"
        case 429, _:
            return "rate_limited"
        case 401 | 403, _:
            return "unauthorized"
        case 404, _:
            return "not_found"
        case status, _ if status in (408, 409) or status >= 500:
            # 408 timed out on the server, 409 met a lock there: https://github.com/openai/openai-python#retries
            return "server"
        case _:
            # Servers other than OpenAI's have no code for it, only words.
            text = error.message.lower()
            is_context = "context" in text and ("length" in text or "exceed" in text)
            is_prompt = "token" in text and ("too long" in text or "exceed" in text)
            return "context_too_long" if is_context or is_prompt else "rejected"


def _read_message(error: openai.APIStatusError) -> str:
    match error.body:
        case {"message": str(message)} | {"error": str(message)} | {"detail": str(message)}:
            return message
        case _:
            return error.message


def _read_retry_after(headers: Mapping[str, str]) -> int | None:
    """Give the wait that the server asks for, in ms: ``retry-after-ms``, or ``retry-after`` in seconds or as a date
    (RFC 9110, 10.2.3)."""
    try:
        if "retry-after-ms" in headers:
            return max(0, int(float(headers["retry-after-ms"])))
        value = headers.get("retry-after", "")
        if value.replace(".", "", 1).isdigit():
            return int(float(value) * 1000)
        at = email.utils.parsedate_to_datetime(value)
        return max(0, int((at.timestamp() - time.time()) * 1000))
    except (ValueError, TypeError, OverflowError):
        return None
