"""Any OpenAI-compatible server as a `Model`, over the `openai` SDK's chat completions.

One `complete` is one HTTP request: the SDK's own retries are off, since who may retry is decided where the reaction is
driven. Every failure leaves as a `ModelError` that says whether a repeat can help. A server without tool calls is used
through `json_schema`. What the server wants, and in which order, are `endpoint_rules`; messages are written by
`chat_messages`, replies read by `chat_replies` and errors by `provider_errors`. This module never runs tools, never
keeps a conversation and never logs a key or a prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import httpx2
import openai
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionToolChoiceOptionParam
from openai.types.shared_params import ResponseFormatJSONSchema

from roundelay.agents.isolation import describe_error, redact_error
from roundelay.agents.loop_local import LoopLocal
from roundelay.agents.outgoing_http import check_environment, describe_proxy, load_certificates
from roundelay.network.credentials import describe_variable, hide_url_secrets, read_secret, remember_url
from roundelay.network.errors import ConfigError
from roundelay.network.home import is_loopback

from .chat_messages import find_note, write_messages
from .chat_replies import (
    DONE,
    Draft,
    ErrorInside,
    EventReader,
    describe_page,
    find_origin,
    finish_calls,
    read_completion,
)
from .endpoint_rules import EndpointRules, RuleChanges, find_rules, learn, name_endpoint, recall
from .json_schema import StepRequest, decode_step, encode_steps
from .model import (
    AssistantMessage,
    ModelDelta,
    ModelError,
    ModelReply,
    ModelRequest,
    NamedTool,
    OnDelta,
    ToolChoice,
    ToolSpec,
)
from .provider_errors import ProviderFailure, read_failure

_logger = logging.getLogger(__name__)

ToolMode = Literal["native", "json_schema"]

_PATH = "/chat/completions"
_DEFAULT_URL = "https://api.openai.com/v1"


class OpenAIModel:
    """A model on an OpenAI-compatible server.

    ``settings`` go into each request's body as they are (``temperature``, ``max_tokens``, ``reasoning_effort``, ...).
    With ``cache_control`` requests say where a provider that wants to be told may cache: behind the system message, the
    conversation and the last result. ``rules`` changes what is known of the server (`endpoint_rules`). Replies stream
    where somebody listens; a server that refuses that is asked without from then on. ``stream`` True insists on streams,
    False never asks for them. ``silence_s`` bounds the time without a byte, ``total_s`` the whole call. Raises `ModelError` at once when the key's variable is not
    set; a server on loopback needs none. Use ``await close()`` or ``async with`` at the end.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        api_key: str | None = None,
        tool_mode: ToolMode = "native",
        stream: bool | None = None,
        silence_s: float = 120.0,
        total_s: float = 600.0,
        settings: Mapping[str, object] | None = None,
        cache_control: bool = False,
        rules: RuleChanges | None = None,
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
        self._stream = stream  # None: as long as the server takes it
        self._silence_s = silence_s
        self._total_s = total_s
        self._cache_control = cache_control
        self._rule_changes = rules
        self.rules = self._first_rules = find_rules(self._base_url, name, rules)
        """What the server wants back, and in which order: as configured, and as it refused requests since."""

        self.endpoint = name_endpoint(self._base_url, name)
        """Who is asked, as recorded replies name it."""

        self.settings: Mapping[str, object] = dict(settings or {})
        """What goes into each request's body beside messages and tools."""

        self._clients = LoopLocal(self._make_client)
        host = urlsplit(self._base_url or "").hostname or ""
        self._is_own = is_loopback(host) or host.endswith(".localhost")  # on this machine
        if not self._api_key and not self._is_own:
            state = "is empty" if os.environ.get(api_key_env) else "is not set"
            raise ModelError(
                f"Model {name} needs a key, and the environment variable {self._api_key_env} {state}: "
                f"export {api_key_env if self._api_key_env == api_key_env else 'NAME'}=..., or name another variable "
                "with api_key_env.",
                reason="unauthorized",
            )

    async def __aenter__(self) -> OpenAIModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def named(self, name: str) -> OpenAIModel:
        """Return the model of another name on the same server, with the same key, settings and connections."""
        other = copy(self)
        other.name = name
        # Another model has other rules, and never gets what belongs to this one.
        other.rules = other._first_rules = find_rules(self._base_url, name, self._rule_changes)
        other.endpoint = name_endpoint(self._base_url, name)
        return other

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
        except ErrorInside as error:
            raise self._explain_failure(read_failure(200, {}, error.body)) from error
        except (
            openai.OpenAIError,
            TimeoutError,
            ValueError,
            RecursionError,
        ) as error:  # a body that is no JSON, or too deep
            # Without the words of the SDK's errors: some quote the header with the key.
            raise self._explain(error) from redact_error(error)
        self._check_end(draft)
        refusal = draft.refusal.getvalue()
        text = draft.text.getvalue() or refusal or None
        calls = tuple(finish_calls(request, draft.calls))
        if step is not None and step.schema is not None and not calls:
            text, calls = decode_step(request, draft.text.getvalue())
        reason = draft.finish_reason or ("tool_calls" if calls else "stop")
        thought = draft.reasoning.getvalue()
        return ModelReply(
            text, calls, draft.usage, "refusal" if refusal else reason, draft.model or self.name, thought,
            find_origin(
                draft, self.endpoint, self.rules.list_changes(self._first_rules),
                is_required=self.rules.reasoning in ("returned", "required"),
            ),
        )  # fmt: skip

    def _check_end(self, draft: Draft) -> None:
        """Raise `ModelError` for a reply that did not come to its end, or that the server gave up on."""
        if not draft.is_finished:
            raise ModelError(f"The reply of model {self.name} broke off before its end.", reason="broken_reply")
        reason = draft.finish_reason.lower()
        if reason in _FAILED_ENDS or (reason in _BROKEN_ENDS and not draft.calls and not draft.text.tell()):
            raise ModelError(
                f'Model {self.name} ended its reply with "{draft.finish_reason}".',
                reason="server" if reason in _FAILED_ENDS else "broken_reply",
            )

    async def _ask(self, request: ModelRequest, step: StepRequest | None, on_delta: OnDelta | None) -> Draft:
        """Ask, and again where the server refuses the request by a rule that was not known of it."""
        for message in request.messages:
            origin = message.origin if isinstance(message, AssistantMessage) else None
            if origin is not None and origin.endpoint == self.endpoint and origin.rules:
                self.rules = recall(self.rules, origin.rules)
        tried = {self.rules}
        is_shown = False

        def show(delta: ModelDelta) -> None:
            nonlocal is_shown
            is_shown = is_shown or bool(delta.text or delta.reasoning)
            assert on_delta is not None
            on_delta(delta)

        while True:
            try:
                return await self._post(request, step, show if on_delta is not None else None)
            except (openai.APIStatusError, ErrorInside) as error:
                learned = None if is_shown else learn(self.rules, _read_refusal(error))
                if learned is None or learned in tried:
                    if isinstance(error, ErrorInside) or self._stream is not None or on_delta is None:
                        raise
                    if not _refuses_streams(error):
                        raise
                    draft = await self._post(request, step, None)
                    self._stream = False  # it answers once it is not asked to stream
                    return draft
                changes = learned.list_changes(self.rules)
            _logger.warning(
                "a server refused a request, and is asked by another rule", extra={"model": self.name, **changes}
            )
            self.rules = learned
            tried.add(learned)

    async def _post(self, request: ModelRequest, step: StepRequest | None, on_delta: OnDelta | None) -> Draft:
        # Not `chat.completions.create`: it walks through every message, and all types that one may have, to rename
        # fields that have their names here already. That is half of a call's CPU, more as the history grows
        # (docs/performance.md). The reply is read as JSON: servers differ from the SDK's types in every part.
        client, body = self._clients.get(), self._build_body(request, step, is_heard=on_delta is not None)
        tools = [tool.name for tool in request.tools]
        if not body.get("stream"):
            return read_completion(await client.post(_PATH, cast_to=object, body=body), tools)
        draft = Draft(tools)
        stream = await client.post(_PATH, cast_to=object, body=body, stream=True, stream_cls=_Events)
        async with stream:
            content_type = stream.response.headers.get("content-type", "")
            if "html" in content_type:  # no model answers with a page
                raise ValueError(describe_page((await stream.response.aread()).decode("utf-8", "replace")))
            if "json" in content_type:  # this server does not stream
                draft = read_completion(json.loads(await stream.response.aread()), tools)
                self._stream = False if self._stream is None else self._stream
                _show([ModelDelta(draft.text.getvalue(), draft.reasoning.getvalue())], on_delta)
                return draft
            try:
                await _read_stream(stream, draft, on_delta)
            except openai.APIConnectionError:
                if not draft.is_finished:  # else only the end of the connection is missing
                    raise
                _show(draft.close(), on_delta)
        return draft

    def _build_body(self, request: ModelRequest, step: StepRequest | None, *, is_heard: bool) -> dict[str, object]:
        encoded = encode_request(
            request, step, cache_control=self._cache_control, rules=self.rules, endpoint=self.endpoint
        )
        body: dict[str, object] = {"model": self.name, **encoded}
        if self._stream or (self._stream is None and is_heard):
            body["stream"] = True
            if self.rules.stream_usage:
                body["stream_options"] = {"include_usage": True}
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
        address, _, query = (self._base_url or "").partition("?")
        return AsyncOpenAI(
            api_key=self._api_key or "none",  # the SDK insists on one; a server on loopback ignores it
            base_url=address or None,
            default_query=dict(parse_qsl(query, keep_blank_values=True)),  # the SDK would put the path behind it
            organization=self._organization,
            project=self._project,
            max_retries=0,
            timeout=openai.Timeout(self._silence_s, connect=min(10.0, self._silence_s)),
            http_client=DefaultAsyncHttpxClient(
                verify=certificates, event_hooks={"response": [_check_redirect]}, max_redirects=MAX_REDIRECTS
            ),
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
                return self._explain_failure(_read_failure(error), proxy)
            case openai.APIConnectionError() if isinstance(error.__cause__, _ElsewhereError):
                told = f"Model {self.name} at {where} {error.__cause__}.{proxy}"
                return ModelError(told, reason="misconfigured")
            case openai.APIConnectionError():
                advice = describe_tls_mistake(error)
                told = f"Model {self.name} at {where} cannot be reached ({describe_failure(error)}).{proxy}{advice}"
                # A proxy that refuses, a circle and a certificate that is not trusted stay so.
                is_refused = isinstance(error.__cause__, httpx2.ProxyError | httpx2.TooManyRedirects)
                return ModelError(told, reason="misconfigured" if advice or is_refused else "unreachable")
            case openai.APIError():
                return ModelError(f"Model {self.name} failed while answering: {error.message}", reason="server")
            case _:
                return ModelError(
                    f"Model {self.name} sent a reply that cannot be read ({error}).", reason="broken_reply"
                )

    def _explain_failure(self, failure: ProviderFailure, proxy: str = "") -> ModelError:
        """Give the `ModelError` for an error that the provider reports, in its words."""
        where = hide_url_secrets(self._base_url) if self._base_url else "the OpenAI API"
        hint = ""
        if failure.reason == "unauthorized":
            hint = f" Check the key in {self._api_key_env}."
        elif failure.reason == "not_found":
            hint = f" Check the model's name and the address {where}."
        elif failure.lacks_tools:
            hint = " Start the server with tool calls, choose a model that has them, or set tool_mode: json_schema."
        elif failure.is_output_limit:
            hint = " Lower the limit of the reply's length (such as max_tokens) in the model's settings."
        answered = f"answered {failure.status}" if failure.status else "answered with an error"
        return ModelError(
            f"Model {self.name} {answered}: {failure.told}.{hint}{proxy}",
            reason=failure.reason,
            retry_after_ms=failure.retry_after_ms,
        )


_STREAM = re.compile(r"(?<![a-z])stream(?!_)", re.IGNORECASE)  # not "upstream", nor an option of streams


def _refuses_streams(error: openai.APIStatusError) -> bool:
    """Return whether a server says that it does not stream. There is no code for it: OpenAI refuses to stream some models
    to organizations that are not verified (400, also inside of a gateway's error:
    https://github.com/BeehiveInnovations/pal-mcp-server/issues/134), others know no field ``stream``."""
    return error.status_code in (400, 404, 405, 415, 422, 501) and _STREAM.search(error.response.text) is not None


def _read_refusal(error: openai.APIStatusError | ErrorInside) -> str:
    """Return the words by which a server refused a request; nothing for another error.

    Servers that render chat templates refuse with 500, all others with 400 or 422. A stream that has begun has status 200
    (https://github.com/sterlp/eclipse-peon-ai/issues/75)."""
    if isinstance(error, ErrorInside):
        failure = read_failure(200, {}, error.body)
        return failure.words if failure.status in (0, 400, 422, 500) else ""
    return error.response.text if error.status_code in (400, 422, 500) else ""


MAX_REDIRECTS = 3


class _ElsewhereError(httpx2.RequestError):
    """A server points to another address, where the conversation is not sent."""


async def _check_redirect(response: httpx2.Response) -> None:
    """Raise `_ElsewhereError` for a redirect that would lose the request or take it to another server."""
    if not response.has_redirect_location:
        return
    asked = response.request.url
    target = asked.join(response.headers["location"])
    is_same = target.host == asked.host and target.scheme in (asked.scheme, "https")
    if is_same and response.status_code in (307, 308):  # all others drop the body
        return
    raise _ElsewhereError(
        f"answers {response.status_code} and points to {hide_url_secrets(str(target))}, which is not followed: set "
        "base_url to the address of the model's server",
        request=response.request,
    )


def _read_failure(error: openai.APIStatusError) -> ProviderFailure:
    return read_failure(error.status_code, error.response.headers, error.response.text)


_FAILED_ENDS = frozenset({"error", "network_error", "insufficient_system_resource", "abort", "engine_error"})
"""Reasons by which servers say that they gave up on a reply. DeepSeek has the third, OpenRouter the first:
https://api-docs.deepseek.com/api/create-chat-completion, https://openrouter.ai/docs/api/reference/errors-and-debugging"""

_BROKEN_ENDS = frozenset({"malformed_function_call", "unexpected_tool_call", "malformed_response"})
"""Reasons for a reply that holds nothing, since the model wrote a call that is none
(https://ai.google.dev/api/generate-content#FinishReason, https://github.com/firebase/flutterfire/issues/17812)."""


def _check_address(model: str, url: str) -> str | None:
    """Return the server's address without white space around it, and without the path of its completions, which
    documents of servers often show. Raises `ModelError` for what is none."""
    url = given = url.strip()
    remember_url(url)
    path, mark, query = url.partition("#")[0].partition("?")
    url = path.rstrip("/").removesuffix(_PATH).rstrip("/") + mark + query
    try:
        parts = httpx2.URL(url)
        is_address = not url or (parts.scheme in ("http", "https") and bool(parts.host) and url.split() == [url])
    except (httpx2.InvalidURL, ValueError):
        is_address = False
    if not is_address:
        raise ModelError(
            f"Model {model} cannot be used. Its base_url is {hide_url_secrets(given)!r}, and has to be http://HOST/PATH or "
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
        return f"{error.status_code}: {_read_failure(error).told}"
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


def encode_request(
    request: ModelRequest,
    step: StepRequest | None,
    *,
    cache_control: bool = False,
    rules: EndpointRules | None = None,
    endpoint: str = "",
) -> dict[str, object]:
    """Give the fields of the body that say what is asked. ``step``: the request in plain texts, in place of tools."""
    rules = rules or EndpointRules()
    messages = write_messages(request.messages if step is None else step.messages, rules, endpoint)
    if cache_control:
        _mark_caches(messages, request.prompt)
    body: dict[str, object] = {"messages": messages}
    if step is None and request.tools:
        body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if request.tool_choice != "auto":  # the API's default, and refused without tools
            body["tool_choice"] = _encode_choice(request.tool_choice)
    elif step is None and rules.declares_used_tools:
        used = dict.fromkeys(call.name for message in request.messages for call in getattr(message, "tool_calls", ()))
        if used:
            body["tools"] = [_encode_tool(ToolSpec(name, "Not available any more.", _NO_PARAMETERS)) for name in used]
    if step is not None and step.schema is not None:
        body["response_format"] = _encode_schema(step)
    return body


_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}


def _mark_caches(messages: Sequence[Any], prompt: str) -> None:
    """Say where ends what is the same in the next turn: Anthropic's models cache up to such a mark, and nowhere else
    (https://platform.claude.com/docs/en/build-with-claude/prompt-caching; of at most four marks these are three)."""
    system = (message for message in messages if message["role"] == "system")
    conversation = (
        message for message in messages if message["role"] == "user" and _read_first_text(message).startswith(prompt)
    )
    results = (message for message in reversed(messages) if message["role"] == "tool")
    for found, end in ((system, None), (conversation, len(prompt)), (results, None)):
        message = next(found, None)
        if message is not None:
            # The notes behind a result are this turn's: the next one has them no more, or further ones.
            _mark(message, find_note(message["content"]) if message["role"] == "tool" else end)


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


class _Events(AsyncStream[object]):
    """The events of a stream as JSON: the SDK's own reading hides whether the server said that it was done."""

    async def read(self) -> AsyncIterator[object]:
        reader, response, is_empty = EventReader(), self.response, True
        try:
            async for data in response.aiter_bytes():
                for event in reader.feed(data):
                    is_empty = False
                    yield event
        except httpx2.TimeoutException as error:
            raise openai.APITimeoutError(request=response.request) from error
        except httpx2.RequestError as error:
            raise openai.APIConnectionError(request=response.request) from error
        for event in reader.close():
            is_empty = False
            yield event
        if is_empty and reader.stray:
            raise ValueError(describe_page(reader.stray))


async def _read_stream(stream: _Events, draft: Draft, on_delta: OnDelta | None) -> None:
    events = stream.read()
    async for event in events:
        if event == DONE:
            draft.is_done = True
            break
        before = draft.usage
        pieces = list(draft.add_chunk(event))
        if draft.usage != before and not draft.finish_reason:
            pieces.append(ModelDelta(usage=draft.usage))
        _show(pieces, on_delta)
    _show(draft.close(), on_delta)
    # Read what is left, if that is at hand: the connection serves the next request then.
    with suppress(TimeoutError, openai.APIConnectionError, ValueError, RecursionError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in events:
                pass


def _show(pieces: Sequence[ModelDelta], on_delta: OnDelta | None) -> None:
    for piece in pieces:
        if on_delta is not None and (piece.text or piece.reasoning or piece.usage is not None):
            on_delta(piece)


DRAIN_S = 0.5
"""Maximum time to wait for the end of a stream after the server says that it is done."""
