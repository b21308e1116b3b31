"""A `Model` for any OpenAI-compatible server.

`OpenAIModel.complete` does not retry failures, because the reaction decides about retries. Every failure becomes a
`ModelError`, which states whether a retry can help. For a server without tool calls, `json_schema` encodes the calls.
`model_http` sends the requests, `endpoint_rules` contains the rules of servers, `chat_messages` writes messages,
`chat_replies` parses replies, and `provider_errors` parses errors. This module never runs tools, never stores a
conversation, and never logs a key or a prompt.
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
from importlib.metadata import version
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from roundelay.agents.isolation import describe_error, redact_error
from roundelay.agents.outgoing_http import check_environment, describe_proxy
from roundelay.network.credentials import describe_variable, hide_url_secrets, read_secret, remember_url
from roundelay.network.errors import ConfigError
from roundelay.network.home import is_loopback

from .chat_replies import (
    Draft,
    ErrorInside,
    describe_page,
    find_origin,
    finish_calls,
    read_completion,
)
from .endpoint_rules import RuleChanges, find_rules, learn, name_endpoint, recall
from .event_stream import DONE, EventReader
from .json_schema import StepRequest, decode_step, encode_steps
from .model import (
    AssistantMessage,
    ModelDelta,
    ModelError,
    ModelReply,
    ModelRequest,
    OnDelta,
)
from .model_http import ModelHttp, RedirectRefused, StatusError
from .provider_errors import ProviderFailure, read_failure
from .request_body import encode_request

_logger = logging.getLogger(__name__)

ToolMode = Literal["native", "json_schema"]

_PATH = "/chat/completions"
_DEFAULT_URL = "https://api.openai.com/v1"


class OpenAIModel:
    """A model on an OpenAI-compatible server.

    ``settings`` are added to each request's body unchanged (``temperature``, ``max_tokens``, ``reasoning_effort``,
    ...). ``cache_control`` marks where the provider may cache each request: after the system message, the conversation
    and the last result. ``rules`` overrides the known rules of the server (`endpoint_rules`). ``silence_s`` limits the
    time without a byte, and ``total_s`` limits the whole call.

    By default, a reply is streamed if the caller passes ``on_delta``. After a server has refused to stream, later
    requests do not stream. If ``stream`` is True, every request streams. If ``stream`` is False, no request streams.
    Call ``await close()`` at the end, or use ``async with``.

    The constructor raises `ModelError` if the environment variable with the key is not set. A server on loopback needs
    no key.
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
            headers = _read_headers(self._api_key)
            check_environment()
        except ConfigError as error:
            raise ModelError(f"Model {name} cannot be used. {error}", reason="misconfigured") from None
        self._tool_mode: ToolMode = tool_mode
        self._stream = stream  # None: stream until the server refuses to stream
        self._total_s = total_s
        self._cache_control = cache_control
        self._rule_changes = rules
        self.rules = self._first_rules = find_rules(self._base_url, name, rules)
        """Rules of the server: the configured rules, and the rules that its refusals revealed."""

        self.endpoint = name_endpoint(self._base_url, name)
        """Name of the endpoint in the origin of recorded replies."""

        self.settings: Mapping[str, object] = dict(settings or {})
        """Fields of each request's body, in addition to messages and tools."""

        self._http = ModelHttp(_join_path(self._base_url or _DEFAULT_URL), headers, silence_s=silence_s)
        host = urlsplit(self._base_url or "").hostname or ""
        self._is_own = is_loopback(host) or host.endswith(".localhost")  # whether the server runs on this machine
        if not self._api_key and not self._is_own:
            state = "is empty" if os.environ.get(api_key_env) else "is not set"
            raise ModelError(
                f"Model {name} needs a key, but the environment variable {self._api_key_env} {state}. "
                f"Set it where the agent or its node starts (export "
                f"{api_key_env if self._api_key_env == api_key_env else 'NAME'}=...), and start that command again. "
                "Or name another variable in api_key_env.",
                reason="unauthorized",
            )

    async def __aenter__(self) -> OpenAIModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def named(self, name: str) -> OpenAIModel:
        """Return a model with another name on the same server, with the same key, settings and connections."""
        # The copy shares the connections of each event loop with this model.
        other = copy(self)
        other.name = name
        # Set separate rules and a separate endpoint, so that the other model never receives the reasoning of this
        # model.
        other.rules = other._first_rules = find_rules(self._base_url, name, self._rule_changes)
        other.endpoint = name_endpoint(self._base_url, name)
        return other

    async def close(self) -> None:
        """Close the connections. A later call opens new connections."""
        await self._http.close()

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer the request with one call of the server."""
        step = encode_steps(request) if self._tool_mode == "json_schema" else None
        if step is not None and step.schema is not None:
            on_delta = None  # do not stream: the text is the JSON of a step, not an answer for readers
        try:
            async with asyncio.timeout(self._total_s):
                draft = await self._ask(request, step, on_delta)
        except ErrorInside as error:
            raise self._describe_provider_error(read_failure(200, {}, error.body)) from error
        except ConfigError as error:
            raise ModelError(f"Model {self.name} cannot be used. {error}", reason="misconfigured") from None
        except (*_HTTP_ERRORS, ValueError, RecursionError) as error:  # includes invalid or too deeply nested JSON
            # Chain the errors without their messages, because some messages quote the request with its headers.
            raise self._describe_http_error(error) from redact_error(error)
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
        """Raise `ModelError` if the reply is incomplete, or if its finish reason reports a failure of the server."""
        if not draft.is_finished:
            raise ModelError(f"The reply of model {self.name} was interrupted before its end.", reason="broken_reply")
        reason = draft.finish_reason.lower()
        if reason in _FAILED_ENDS or (reason in _BROKEN_ENDS and not draft.calls and not draft.text.tell()):
            raise ModelError(
                f'Model {self.name} ended its reply with "{draft.finish_reason}".',
                reason="server" if reason in _FAILED_ENDS else "broken_reply",
            )

    async def _ask(self, request: ModelRequest, step: StepRequest | None, on_delta: OnDelta | None) -> Draft:
        """Send the request. If the server refuses the request and the refusal reveals a new rule, send it again with
        this rule.
        """
        # Apply recorded rules first: a resumed reaction must send the same request that the server accepted earlier.
        for message in request.messages:
            origin = message.origin if isinstance(message, AssistantMessage) else None
            if origin is not None and origin.endpoint == self.endpoint and origin.rules:
                self.rules = recall(self.rules, origin.rules)
        tried_rules = {self.rules}
        is_shown = False

        def show(delta: ModelDelta) -> None:
            nonlocal is_shown
            is_shown = is_shown or bool(delta.text or delta.reasoning)
            assert on_delta is not None
            on_delta(delta)

        while True:
            try:
                return await self._post(request, step, show if on_delta is not None else None)
            except (StatusError, ErrorInside) as error:
                # Shown pieces cannot be withdrawn, so do not repeat the request after streaming has begun. Never repeat
                # a request with rules that the server has already refused.
                learned = None if is_shown else learn(self.rules, _read_refusal(error))
                if learned is None or learned in tried_rules:
                    if isinstance(error, ErrorInside) or self._stream is not None or on_delta is None:
                        raise
                    if not _refuses_streams(error):
                        raise
                    draft = await self._post(request, step, None)
                    self._stream = False  # the server answered a request without streaming
                    return draft
                changes = learned.list_changes(self.rules)
            _logger.warning(
                "the server refused the request; asking again with another rule",
                extra={"model": self.name, **changes},
            )
            self.rules = learned
            tried_rules.add(learned)

    async def _post(self, request: ModelRequest, step: StepRequest | None, on_delta: OnDelta | None) -> Draft:
        # Parse the reply as JSON without the SDK's types, because servers deviate from OpenAI's format in many ways.
        body = self._build_body(request, step, is_heard=on_delta is not None)
        draft = Draft([tool.name for tool in request.tools])
        async with self._http.post(body) as response:
            content_type = response.headers.get("Content-Type", "")
            if "html" in content_type:  # probably the web page of a proxy or of a wrong address
                raise ValueError(describe_page(await _read_text(response)))
            if not body.get("stream"):
                return read_completion(_parse(await _read_text(response), content_type), draft.tools)
            if "json" in content_type:  # the server ignored the request to stream
                draft = read_completion(json.loads(await _read_text(response)), draft.tools)
                self._stream = False if self._stream is None else self._stream
                _show([ModelDelta(draft.text.getvalue(), draft.reasoning.getvalue())], on_delta)
                return draft
            try:
                await _read_stream(response, draft, on_delta)
            except _BROKEN:
                if not draft.is_finished:  # a complete reply stays valid even if the connection broke afterwards
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
        # Apply the settings last, so that they override the derived values.
        body |= self.settings
        if "tools" not in body:
            body.pop("parallel_tool_calls", None)  # servers refuse this setting without tools
        return body

    def _describe_http_error(self, error: Exception) -> ModelError:
        """Convert a failure of the request into a `ModelError` that describes the failure and, if possible, its fix."""
        where = hide_url_secrets(self._base_url) if self._base_url else "the OpenAI API"
        proxy = describe_proxy(self._base_url or _DEFAULT_URL)
        if proxy and self._is_own and is_from_proxy(error):
            failure = describe_failure(error)
            return ModelError(f"Model {self.name} at {where} gave no reply ({failure}).{proxy}", reason="misconfigured")
        match error:
            case StatusError():
                return self._describe_provider_error(_read_failure(error), proxy)
            case RedirectRefused():
                return ModelError(f"Model {self.name} at {where} {error}.{proxy}", reason="misconfigured")
            case TimeoutError():
                return ModelError(f"Model {self.name} at {where} did not answer in time.", reason="timeout")
            case aiohttp.ClientError() | OSError():
                advice = describe_tls_mistake(error)
                text = f"Model {self.name} at {where} cannot be reached ({describe_failure(error)}).{proxy}{advice}"
                # A retry does not help against a proxy that refuses the request or against an untrusted certificate.
                is_refused = isinstance(error, aiohttp.ClientHttpProxyError)
                return ModelError(text, reason="misconfigured" if advice or is_refused else "unreachable")
            case _:
                return ModelError(
                    f"Model {self.name} sent a reply that cannot be read ({error}).", reason="broken_reply"
                )

    def _describe_provider_error(self, failure: ProviderFailure, proxy: str = "") -> ModelError:
        """Convert an error that the provider reported into a `ModelError`."""
        where = hide_url_secrets(self._base_url) if self._base_url else "the OpenAI API"
        hint = ""
        if failure.reason == "unauthorized":
            hint = f" Check the key in {self._api_key_env}."
        elif failure.reason == "not_found":
            hint = f" Check the model's name and the address {where}."
        elif failure.lacks_tools:
            hint = " Start the server with tool calls, choose a model with tool calls, or set tool_mode: json_schema."
        elif failure.is_output_limit:
            hint = " Lower the maximum reply length (such as max_tokens) in the model's settings."
        answered = f"answered {failure.status}" if failure.status else "answered with an error"
        return ModelError(
            f"Model {self.name} {answered}: {failure.description}.{hint}{proxy}",
            reason=failure.reason,
            retry_after_ms=failure.retry_after_ms,
        )


_STREAM = re.compile(r"(?<![a-z])stream(?!_)", re.IGNORECASE)  # neither "upstream" nor "stream_options"


def _refuses_streams(error: StatusError) -> bool:
    """Return whether the server refuses to stream. There is no standard error code for this refusal.

    OpenAI refuses to stream some models to unverified organizations (status 400, or the same error from a gateway:
    https://github.com/BeehiveInnovations/pal-mcp-server/issues/134). Other servers do not know the field ``stream``.
    """
    return error.status in (400, 404, 405, 415, 422, 501) and _STREAM.search(error.text) is not None


def _read_refusal(error: StatusError | ErrorInside) -> str:
    """Return the server's text about a refused request, or an empty string for any other error.

    Servers that render chat templates refuse requests with status 500, and other servers with 400 or 422. If a stream
    has begun, the status is 200 (https://github.com/sterlp/eclipse-peon-ai/issues/75).
    """
    if isinstance(error, ErrorInside):
        failure = read_failure(200, {}, error.body)
        return failure.words if failure.status in (0, 400, 422, 500) else ""
    return error.text if error.status in (400, 422, 500) else ""


_BROKEN = (aiohttp.ClientError, OSError)
"""Exception types of failed connections. Some errors of these types are also a `TimeoutError`."""

_HTTP_ERRORS = (*_BROKEN, StatusError, RedirectRefused, TimeoutError)


def _read_failure(error: StatusError) -> ProviderFailure:
    return read_failure(error.status, error.headers, error.text)


_FAILED_ENDS = frozenset({"error", "network_error", "insufficient_system_resource", "abort", "engine_error"})
"""Finish reasons of replies that a server ended because of a failure. DeepSeek sends ``insufficient_system_resource``
(https://api-docs.deepseek.com/api/create-chat-completion), and OpenRouter sends ``error``
(https://openrouter.ai/docs/api/reference/errors-and-debugging).
"""

_BROKEN_ENDS = frozenset({"malformed_function_call", "unexpected_tool_call", "malformed_response"})
"""Finish reasons of an empty reply that a server sends if the model wrote a malformed call
(https://ai.google.dev/api/generate-content#FinishReason, https://github.com/firebase/flutterfire/issues/17812).
"""


def _check_address(model: str, url: str) -> str | None:
    """Return the server's URL without surrounding white space and without the completions path, which documentation
    often includes. Raises `ModelError` for an invalid URL.
    """
    url = configured = url.strip()
    remember_url(url)
    path, mark, query = url.partition("#")[0].partition("?")
    url = path.rstrip("/").removesuffix(_PATH).rstrip("/") + mark + query
    try:
        parts = URL(url)
        is_address = not url or (parts.scheme in ("http", "https") and bool(parts.host) and url.split() == [url])
    except ValueError:
        is_address = False
    if not is_address:
        raise ModelError(
            f"Model {model} cannot be used. Its base_url is {hide_url_secrets(configured)!r} and must be "
            "http://HOST/PATH or https://HOST/PATH, such as https://api.openai.com/v1.",
            reason="misconfigured",
        )
    return url or None


def _join_path(address: str) -> str:
    """Return the URL for chat completions. A query string of the base URL stays at the end."""
    address, mark, query = address.partition("?")
    return f"{address}{_PATH}{mark}{query}"


def _read_headers(api_key: str) -> dict[str, str]:
    """Return the headers of every request. Raises `ConfigError` if a variable contains an invalid header value."""
    headers = {"User-Agent": f"roundelay/{version('roundelay')}"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    for name, header in (("OPENAI_ORG_ID", "OpenAI-Organization"), ("OPENAI_PROJECT_ID", "OpenAI-Project")):
        if value := read_secret(os.environ.get(name, ""), f"the variable {name}"):
            headers[header] = value
    # OpenAI's SDK reads this variable in the same way, with one header per line.
    for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines():
        name, mark, value = line.partition(":")
        value = read_secret(value, "the variable OPENAI_CUSTOM_HEADERS")
        if mark:
            headers[name.strip()] = value
    return headers


def is_from_proxy(error: Exception) -> bool:
    """Return whether an error may come from a proxy instead of the server. Signs are a failed connection, a web page,
    and a status that gateways send.
    """
    match error:
        case StatusError():
            return error.status in (403, 407, 502, 503, 504) or not _is_object(error.text)
        case RedirectRefused():
            return False
        case TimeoutError():
            return isinstance(error, aiohttp.ConnectionTimeoutError)
        case _:
            return isinstance(error, aiohttp.ClientError | OSError | ValueError)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def describe_failure(error: Exception) -> str:
    """Return the text of the server's error or, if there was no response, the HTTP library's text."""
    match error:
        case StatusError():
            return f"{error.status}: {_read_failure(error).description}"
        case aiohttp.ClientHttpProxyError():
            return f"the proxy answered {error.status} {error.message}"  # `str(error)` contains the request's URL
        case aiohttp.ClientConnectorError():
            return describe_error(error.os_error)  # `str(error)` adds internal details of the client
        case _:
            return describe_error(error)


def describe_tls_mistake(error: Exception) -> str:
    """Return advice for a failed TLS handshake that a retry cannot fix. Return an empty string for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return " Its certificate is not trusted: set SSL_CERT_FILE to a file with the right certificates."
        if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
            return " It does not speak TLS on this port: use http:// instead of https://, or another port."
        cause = cause.__cause__ or cause.__context__
    return ""


# --- reading a reply


async def _read_text(response: aiohttp.ClientResponse) -> str:
    return (await response.read()).decode("utf-8", "replace")


def _parse(text: str, content_type: str) -> object:
    """Parse a reply as JSON. Return the text unchanged if it is not JSON and the server declared another type."""
    try:
        return json.loads(text)
    except ValueError:
        if "json" in content_type:
            raise
        return text


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[object]:
    reader, is_empty = EventReader(), True
    async for data in response.content.iter_any():
        for event in reader.feed(data):
            is_empty = False
            yield event
    for event in reader.close():
        is_empty = False
        yield event
    if is_empty and reader.stray:
        raise ValueError(describe_page(reader.stray))


async def _read_stream(response: aiohttp.ClientResponse, draft: Draft, on_delta: OnDelta | None) -> None:
    events = _read_events(response)
    async for event in events:
        if event == DONE:
            draft.is_done = True
            break
        before = draft.usage
        pieces = list(draft.add_chunk(event))
        # Report counts as they arrive, because an interrupted request never receives the final count.
        if draft.usage != before and not draft.finish_reason:
            pieces.append(ModelDelta(usage=draft.usage))
        _show(pieces, on_delta)
    _show(draft.close(), on_delta)
    # Read the rest of the response if it is available: only then can the connection be used for the next request.
    with suppress(*_BROKEN, TimeoutError, ValueError, RecursionError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in events:
                pass


def _show(pieces: Sequence[ModelDelta], on_delta: OnDelta | None) -> None:
    for piece in pieces:
        if on_delta is not None and (piece.text or piece.reasoning or piece.usage is not None):
            on_delta(piece)


DRAIN_S = 0.5
"""Maximum time to wait for the end of a stream after the server marked it as done, in seconds."""
