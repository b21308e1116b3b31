"""Parser for errors of model providers: determines the category, text and code, and the delay until a retry.

`read_failure` parses the status, the headers and the body of a response, or the JSON of an error inside a reply.
Providers use different fields, so each value is searched under several names. This module is pure, except that it reads
the clock for a delay that a provider states as a date.
"""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .model import ModelFailure

MAX_WORDS = 1000
"""Maximum length of a provider's text, in characters."""


@dataclass(frozen=True, slots=True)
class ProviderFailure:
    """Error that a model provider reported. ``status`` is the HTTP status or the status inside the body. ``status`` is
    0 if the provider sent no status.
    """

    reason: ModelFailure
    words: str
    code: str = ""
    status: int = 0
    retry_after_ms: int | None = None
    is_output_limit: bool = False
    lacks_tools: bool = False
    """Whether the model, or the server in its current setup, does not support tools."""

    @property
    def description(self) -> str:
        """The provider's text, followed by the code unless the text contains the code."""
        words = self.words.rstrip(". ") or "no reason given"
        return words if not self.code or self.code.lower() in words.lower() else f"{words} ({self.code})"


def read_failure(status: int, headers: Mapping[str, str], body: object) -> ProviderFailure:
    """Parse an error. ``status`` is 200 for an error inside a reply."""
    error = _find_error(body)
    words = _read_words(error)[:MAX_WORDS]
    names = [name for name in (_name(error, "code"), _name(error, "status"), _name(error, "type")) if name]
    inner = next((int(name) for name in names if name.isdigit() and 400 <= int(name) < 600), 0)
    status = status if status >= 300 else inner  # an error inside a reply has status 200
    code = next((name for name in names if not name.isdigit()), "") or next(
        (name for name in names if name != str(status)), ""
    )
    delay = read_retry_after(headers)
    if delay is None:
        delay = _find_delay(error, words)
    kinds = {name.lower() for name in names}
    is_output = _is_output_limit(words.lower(), _name(error, "param").lower())
    lacks_tools = _NO_TOOLS.search(words) is not None
    reason = "rejected" if lacks_tools else _classify(status, kinds, words.lower(), delay, is_output)
    is_output = is_output and reason == "misconfigured"
    return ProviderFailure(reason, words, code, status, delay, is_output, lacks_tools)


# --- finding the error


def _find_error(body: object) -> Any:
    """Return the innermost part of a response body that describes the error."""
    match body:
        case str():
            try:
                parsed = json.loads(body)
            except (ValueError, RecursionError):
                return body
            return parsed if isinstance(parsed, str) else _find_error(parsed)
        case [first, *_]:
            return _find_error(first)
        case {"error": dict() | list() as inner} if inner:
            return _find_error(inner)
        case {"error": str(inner), **rest} if inner and not rest.get("message"):
            return {**rest, "message": inner}
        case {"errors": list() as inner} if inner:
            return _find_error(inner)
        case {"base_resp": {"status_code": code, "status_msg": str(words)}}:  # MiniMax
            return {"code": code, "message": words}
        case _:
            return body


def shorten_page(text: str) -> str:
    """Return the visible text of a possible web page, without tags, styles and scripts."""
    text = re.sub(r"<(style|script)\b.{0,5000}?</\1\s*>", " ", text[: 10 * MAX_WORDS], flags=re.DOTALL | re.IGNORECASE)
    return " ".join(re.sub(r"<[^>]{0,500}>", " ", text).split())[:MAX_WORDS]


def _read_words(error: Any) -> str:
    match error:
        case str():
            return shorten_page(error)
        case {"metadata": {"raw": raw, **rest}, **outer} if raw:  # OpenRouter forwards another provider's error
            words, inner = _read_words(outer), _read_words(_find_error(raw))
            by = f" {rest['provider_name']}:" if rest.get("provider_name") else ""
            return f"{words}:{by} {inner}"
        case Mapping():
            for name in ("message", "msg", "detail", "error_description", "title", "reason"):
                value = error.get(name)
                if isinstance(value, str) and value:
                    return value
                if isinstance(value, Mapping | list) and value:
                    return _read_details(value)
            return json.dumps(error, default=str) if error else ""
        case None:
            return ""
        case _:
            return json.dumps(error, default=str)


def _read_details(value: Any) -> str:
    """Return the text of a list of validation errors in FastAPI's form: ``body.n: Extra inputs are not permitted``."""
    if isinstance(value, Mapping) and isinstance(value.get("detail"), list):
        value = value["detail"]
    if not isinstance(value, list):
        return _read_words(value)
    descriptions = []
    for fault in value:
        location = fault.get("loc") if isinstance(fault, Mapping) else None
        where = ".".join(map(str, location)) + ": " if isinstance(location, list) else ""
        descriptions.append(where + _read_words(fault))
    return "; ".join(descriptions)


def _name(error: Any, key: str) -> str:
    value = error.get(key) if isinstance(error, Mapping) else None
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


# --- classifying the error

_CONTEXT_CODES = {"context_length_exceeded", "exceed_context_size_error", "request_too_large", "prompt_too_long"}
_FILTER_CODES = {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "data_inspection_failed"}
_FILTER_CODES |= {"content_filter_error", "moderation_blocked", "prohibited_content"}
_QUOTA_CODES = {"insufficient_quota", "billing_hard_limit_reached", "exceeded_current_quota_error", "arrearage"}
_QUOTA_CODES |= {"insufficient_balance", "billing_not_active", "insufficient_user_quota", "credits_exhausted"}
_QUOTA_CODES |= {"budget_exceeded"}  # LiteLLM: https://github.com/BerriAI/litellm/issues/36729
_BROKEN_CODES = {"tool_use_failed"}
"""Groq's code for a call that it could not parse. The next attempt may be valid
(https://github.com/pipecat-ai/pipecat/issues/1168)."""

_STATUS_BY_CODE = {
    "rate_limit_exceeded": 429, "rate_limit_error": 429, "rate_limit_reached_error": 429, "resource_exhausted": 429,
    "too_many_requests": 429, "engine_overloaded_error": 429,
    "authentication_error": 401, "invalid_api_key": 401, "unauthenticated": 401, "permission_error": 403,
    "permission_denied": 403,
    "model_not_found": 404, "not_found_error": 404, "not_found": 404,
    "invalid_request_error": 400, "invalid_argument": 400, "failed_precondition": 400, "bad_request": 400,
    "billing_error": 402,
}  # fmt: skip
"""HTTP status for each error code. After a stream has begun, a server can report an error only by its code."""

_CONTEXT = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum (context|prompt) length|model token limit|too many (input )?tokens"
    r"|(prompt|input|messages?|request|conversation)\b[^.]{0,40}(too long|too large)"
    r"|(prompt|input)[^.]{0,60}token[^.]{0,60}(exceed|maximum|limit|larger|>)|range of input length"
    r"|reduce the length of the (messages|prompt|input)|inputs?`? tokens"
)
_OUTPUT = re.compile(
    r"max[_ ]?(completion|output|new)?[_ ]?tokens|(completion|output|generated) tokens?\b|output (limit|length)"
    r"|maximum tokens you requested"
)
_INPUT = re.compile(r"input|prompt|messages|your request has|you requested")
_QUOTA = re.compile(
    r"insufficient (balance|credit|fund|quota)|credit balance is too low|out of credit|exceeded your current quota"
    r"|check your plan and billing|payment required|requires more credits"
)
_BUSY = re.compile(r"rate.?limit|too many requests|throttl|quota exceeded|resource exhausted")
_WRONG_KEY = re.compile(r"api key (not valid|not found|expired|is invalid)|(invalid|incorrect|pass a valid) api key")
"""Texts that report a wrong key. Google's answer to a wrong key has status 400, which alone does not show the cause
(https://github.com/continuedev/continue/issues/10290).
"""

_NO_TOOLS = re.compile(
    r"does not support tools\b|tools param requires --jinja|unsupported param: tools|requires --enable-auto-tool-choice"
    r"|no endpoints found that support tool use",
    re.IGNORECASE,
)
"""Texts with which Ollama, llama.cpp, vLLM and OpenRouter refuse tools: https://github.com/ollama/ollama/issues/13578,
https://github.com/containers/ramalama/issues/988, https://github.com/ggml-org/llama.cpp/issues/10920,
https://github.com/vllm-project/vllm/issues/9986, https://github.com/evalstate/fast-agent/issues/122"""

_FILTERED = re.compile(r"content (management )?polic|content filter|flagged by|safety (system|polic)")


def _is_output_limit(words: str, param: str) -> bool:
    """Return whether the error is about the requested length of the reply, and not about the length of the
    conversation.
    """
    if "max" in param and "token" in param and "context" not in words:
        return True
    if _OUTPUT.search(words) is None:
        return False
    return _CONTEXT.search(words) is None or _INPUT.search(words) is None


def _classify(status: int, kinds: set[str], words: str, delay: int | None, is_output: bool) -> ModelFailure:
    if status == 400 and _WRONG_KEY.search(words):
        return "unauthorized"
    # Check the text before the status: Groq reports a prompt that is too long with the code of a rate limit.
    if kinds & _CONTEXT_CODES or status == 413 or "request too large for" in words:
        return "context_too_long"
    if kinds & _FILTER_CODES:
        return "content_filter"
    if kinds & _BROKEN_CODES:
        return "broken_reply"
    # Google also writes "you exceeded your current quota" about a quota per minute, but then also states a delay.
    if kinds & _QUOTA_CODES or status == 402 or (_QUOTA.search(words) and delay is None and status not in (401, 404)):
        return "quota"
    status = status or next((_STATUS_BY_CODE[kind] for kind in sorted(kinds) if kind in _STATUS_BY_CODE), 0)
    if status in (400, 422) or status >= 500 or (status == 0 and not _BUSY.search(words)):
        if is_output and _mentions_limit(words):
            return "misconfigured"
        if _is_context(words) and not is_output:
            return "context_too_long"
    return _classify_status(status, words)


def _classify_status(status: int, words: str) -> ModelFailure:
    match status:
        case 429:
            return "rate_limited"
        case 401 | 403:
            return "unauthorized"
        case _ if status == 404 or 300 <= status < 400:
            return "not_found"
        case 0:
            return "rate_limited" if _BUSY.search(words) else "server"
        case _ if status in (408, 409, 425, 499) or status >= 500:
            # 408 is a timeout on the server, 409 a lock conflict: https://github.com/openai/openai-python#retries.
            # 425 is "too early" (RFC 8470, 5.2). A gateway sends 499 if its own connection was closed.
            return "server"
        case _:
            return "content_filter" if _FILTERED.search(words) else "rejected"


def _is_context(words: str) -> bool:
    if _CONTEXT.search(words):
        return True
    return ("context" in words and "exceed" in words) or (
        "token" in words and ("too long" in words or "exceed" in words)
    )


def _mentions_limit(words: str) -> bool:
    return (
        re.search(r"too large|exceed|at most|maximum|less than|range|larger|limit|must be|>|<=|greater|above", words)
        is not None
    )


# --- delays


def read_retry_after(headers: Mapping[str, str]) -> int | None:
    """Return the delay that the headers request, in ms: ``retry-after-ms``, or ``retry-after`` in seconds or as a
    date (RFC 9110, 10.2.3).
    """
    try:
        if "retry-after-ms" in headers:
            return _bound(float(headers["retry-after-ms"]))
        value = headers.get("retry-after", "")
        if value.replace(".", "", 1).isdigit():
            return _bound(float(value) * 1000)
        at = email.utils.parsedate_to_datetime(value)
        return _bound((at.timestamp() - time.time()) * 1000)
    except (ValueError, TypeError, OverflowError):
        return None


_FACTORS_MS = {"retry_after_ms": 1, "retryafterms": 1, "retry_after": 1000, "retryafter": 1000, "retry-after": 1000}
_FACTORS_MS |= {"retry_after_seconds": 1000, "retrydelay": 1000, "retry_delay": 1000}
MAX_DELAY_MS = 7 * 24 * 3600 * 1000
_UNITS_MS = {"ms": 1, "mi": 60_000, "m": 60_000, "h": 3_600_000, "s": 1000, "d": 86_400_000}
_TIME = r"\d+(?:\.\d+)?\s*(?:milliseconds?|ms|minutes?|mins?|m|hours?|hrs?|h|seconds?|secs?|s|days?|d)(?![a-z])\s*(?:and\s+)?"
_WAIT = re.compile(rf"(?:again|retry(?:ing)?|retry[- ]after|wait)\b[^\d.]{{0,40}}((?:{_TIME})+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


def _find_delay(error: object, words: str) -> int | None:
    """Return the delay that a body requests, in ms: a field such as Google's ``retryDelay: 34s``, or a text such as
    ``try again in 1m30s``.
    """
    for name, value in _walk(error):
        factor = _FACTORS_MS.get(name.lower())
        if factor is None or isinstance(value, bool):
            continue
        if isinstance(value, Mapping) and isinstance(value.get("seconds"), int | float):
            value = value["seconds"]
        if isinstance(value, int | float) and math.isfinite(value):
            return _bound(value * factor)
        if isinstance(value, str):
            if re.fullmatch(r"\d{1,15}(\.\d*)?", value):
                return _bound(float(value) * factor)
            if (delay := _read_time(value.lower())) is not None:
                return delay
    match = _WAIT.search(words.lower())
    return _read_time(match[1]) if match is not None else None


def _read_time(text: str) -> int | None:
    parts = _PART.findall(re.sub(r"\b(milliseconds?|minutes?|mins?)\b", _shorten_unit, text))
    if not parts:
        return None
    total = 0.0
    for amount, unit in parts:
        factor = _UNITS_MS.get(unit if unit == "ms" else unit[:1])
        total += float(amount[:15]) * (factor or 0)
    return _bound(total)


def _shorten_unit(unit: re.Match[str]) -> str:
    return "ms" if unit[0].startswith("milli") else "m"


def _bound(delay_ms: float) -> int:
    if not math.isfinite(delay_ms):
        raise ValueError("a delay must be finite")
    return int(min(max(0.0, delay_ms), MAX_DELAY_MS))


def _walk(value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the name and value of every field of a JSON value. Outer fields come before nested fields."""
    if depth > 8:
        return
    if isinstance(value, Mapping):
        yield from ((str(name), item) for name, item in value.items())
        for item in value.values():
            yield from _walk(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, depth + 1)
