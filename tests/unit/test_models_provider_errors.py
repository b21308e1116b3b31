"""Tests of the classification of providers' errors by their texts. The source of a text is next to its row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roundelay.agents.models.model import ModelFailure
from roundelay.agents.models.provider_errors import ProviderFailure, read_failure


def fail(status: int, body: Any, **headers: str) -> ProviderFailure:
    return read_failure(status, headers, body)


def said(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


CONTEXT = [
    "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (5000 in the messages, 4000 in the completion). Please reduce the length of the messages or completion.",
    "prompt is too long: 208310 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length or `max_tokens` and try again",
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
    "the request exceeds the available context size (4096 tokens), try increasing it",
    "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 8192 tokens and your request has 5000 input tokens",
    "Invalid request: Your request exceeded model token limit: 262144 (requested: 300000)",
    "Range of input length should be [1, 129024]",
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "Input is too long for requested model.",
    "prompt token count of 128345 exceeds the limit of 128000",
    "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 1000 `max_new_tokens`",
]  # fmt: skip
OUTPUT = [
    "max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided 100000.",
    "max_tokens: 200000 > 64000, which is the maximum allowed number of output tokens for claude-sonnet-4-20250514",
    "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]",
    "Unable to submit request because it has a maxOutputTokens value of 100000 but the supported range is from 1 (inclusive) to 8193 (exclusive).",
    "The maximum tokens you requested exceeds the model limit of 4096. Try again with a maximum tokens value that is lower than 4096.",
    "Range of max_tokens should be [1, 8192]",
    "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less than the `context_window` for this model",
    "max_new_tokens (9000) exceeds the limit",
    "max_completion_tokens is too large for this model's context window of 8192",
]  # fmt: skip
QUOTA = [
    (402, "Insufficient Balance"),
    (400, "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase credits."),
    (429, "You exceeded your current quota, please check your plan and billing details."),
    (402, "This request requires more credits, or fewer max_tokens."),
    (403, "Insufficient balance."),
]  # fmt: skip


@pytest.mark.parametrize("status", [400, 422, 500, 200])
@pytest.mark.parametrize("words", CONTEXT)
def test_a_conversation_that_is_too_long_is_known_by_the_words(status: int, words: str) -> None:
    assert fail(status, said(words)).reason == "context_too_long"


@pytest.mark.parametrize("status", [400, 422, 200])
@pytest.mark.parametrize("words", OUTPUT)
def test_a_limit_of_the_reply_is_no_conversation_that_is_too_long(status: int, words: str) -> None:
    failure = fail(status, said(words))
    assert (failure.reason, failure.is_output_limit) == ("misconfigured", True)


@pytest.mark.parametrize(("status", "words"), QUOTA)
def test_credit_that_is_used_up_is_not_tried_again(status: int, words: str) -> None:
    assert fail(status, said(words)).reason == "quota"


OTHERS: list[tuple[int, Any, ModelFailure]] = [
    (429, said("Rate limit reached", code="rate_limit_exceeded"), "rate_limited"),
    (429, said("Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000."), "rate_limited"),
    (429, said("Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 45000.", code="rate_limit_exceeded"), "context_too_long"),
    (429, said("Too much.", type="insufficient_quota", code=None), "quota"),
    (429, said("You have no quota.", type="exceeded_current_quota_error"), "quota"),
    (413, "<html><body>413 Request Entity Too Large</body></html>", "context_too_long"),
    (400, said("Filtered.", code="content_filter", innererror={"code": "ResponsibleAIPolicyViolation"}), "content_filter"),
    (400, said("Your request was flagged by the safety system."), "content_filter"),
    (400, said("Something is wrong."), "rejected"),
    (422, {"detail": [{"loc": ["body", "n"], "msg": "Extra inputs are not permitted", "type": "extra_forbidden"}]}, "rejected"),
    (401, said("Incorrect API key provided.", code="invalid_api_key"), "unauthorized"),
    (401, said("You exceeded your current quota."), "unauthorized"),
    (404, said("The model does not exist.", code="model_not_found"), "not_found"),
    (503, said("Overloaded.", code=503, status="UNAVAILABLE"), "server"),
    # Google answers 400 for an invalid key: https://github.com/continuedev/continue/issues/10290
    (400, [{"error": {"code": 400, "message": "API key not valid. Please pass a valid API key.", "status": "INVALID_ARGUMENT"}}], "unauthorized"),
    (400, said("API key expired. Please renew the API key."), "unauthorized"),
    (400, said("The API key field of this tool call is missing."), "rejected"),
    (499, said("The operation was cancelled.", code=499, status="CANCELLED"), "server"),
    (499, "", "server"),
    (425, said("Too early"), "server"),
    # https://github.com/pipecat-ai/pipecat/issues/1168, https://github.com/BerriAI/litellm/issues/36729
    (400, said("Failed to call a function. Please adjust your prompt.", type="invalid_request_error", code="tool_use_failed"), "broken_reply"),
    (400, said("ExceededBudget: User=x over budget", type="budget_exceeded", code="400"), "quota"),
    (429, said("Budget has been exceeded!", type="budget_exceeded", code="429"), "quota"),
    (302, "", "not_found"),
    (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "server"),
    (502, "<html><head><title>502 Bad Gateway</title></head></html>", "server"),
    (500, "", "server"),
    # Errors inside a reply or a stream: the status is in the body, or only a name is.
    (200, said("Provider returned error", code=502), "server"),
    (200, said("Slow down", code=429), "rate_limited"),
    (200, said("Slow down", code="429"), "rate_limited"),
    (200, said("No such key", code=401), "unauthorized"),
    (200, said("Bad", code=400), "rejected"),
    (200, said("Rate limit exceeded", type="rate_limit_error"), "rate_limited"),
    (200, said("Bad", type="invalid_request_error"), "rejected"),
    (200, said("x", type="authentication_error"), "unauthorized"),
    (200, said("Overloaded", type="overloaded_error"), "server"),
    (200, {"error": "too many requests"}, "rate_limited"),
    (200, {"error": "the engine died"}, "server"),
    (200, {"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}, "quota"),
    (200, [{"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}}], "server"),
    (200, [{"error": {"code": 429, "message": "Resource exhausted.", "status": "RESOURCE_EXHAUSTED"}}], "rate_limited"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "reason"), OTHERS, ids=[json.dumps(it)[:70] for it in OTHERS])
def test_an_error_is_classified(status: int, body: Any, reason: ModelFailure) -> None:
    assert fail(status, body).reason == reason
    assert fail(status, json.dumps(body) if not isinstance(body, str) else body).reason == reason, "as text"


WORDS: list[tuple[Any, str]] = [
    (said("No.", code="bad_thing"), "No (bad_thing)"),
    (said("No: bad_thing.", code="bad_thing"), "No: bad_thing"),
    ([{"error": {"code": 400, "message": "Missing.", "status": "INVALID_ARGUMENT"}}], "Missing (INVALID_ARGUMENT)"),
    ({"error": "plain"}, "plain"),
    ({"error": {"msg": "plain"}}, "plain"),
    ({"message": "plain", "code": 7}, "plain (7)"),
    ({"detail": "plain"}, "plain"),
    ({"detail": [{"loc": ["body", "n"], "msg": "Extra"}, {"loc": ["body"], "msg": "More"}]}, "body.n: Extra; body: More"),
    ({"object": "error", "message": {"detail": [{"loc": ["body", "x"], "msg": "Extra"}]}}, "body.x: Extra"),
    ({"errors": [{"code": 5006, "message": "No."}], "success": False}, "No (5006)"),
    ("<html><title>502</title><body>Bad <b>Gateway</b></body></html>", "502 Bad Gateway"),
    ("", "no reason given"),
    (
        said("Provider returned error", code=400, metadata={"raw": '{"message":"Tool call id was x","code":"3280"}', "provider_name": "Mistral"}),
        "Provider returned error: Mistral: Tool call id was x",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "told"), WORDS, ids=[json.dumps(it[0])[:70] for it in WORDS])
def test_the_providers_words_and_code_are_kept(body: Any, told: str) -> None:
    assert fail(400, body).description.startswith(told)


def test_words_are_bounded() -> None:
    assert len(fail(500, "x" * 100_000).description) <= 1000


DELAYS: list[tuple[Any, int | None]] = [
    (said("Please try again in 20s."), 20_000),
    (said("Please try again in 1m30s. Visit https://x"), 90_000),
    (said("Please try again in 6m0s."), 360_000),
    (said("Please try again in 850ms."), 850),
    (said("Please try again in 1.5s."), 1500),
    (said("Please try again in 1h2m3s."), 3_723_000),
    (said("Please retry after 26 seconds."), 26_000),
    (said("Please retry in 34.074824224s."), 34_074),
    (said("Try again in 2 minutes and 5 seconds"), 125_000),
    (said("Please wait 30 seconds before retrying"), 30_000),
    (said("Rate limit exceeded. Retry after 5 s"), 5000),
    (said("x", details=[{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34s"}]), 34_000),
    (said("x", details=[{"retryDelay": "34.07s"}]), 34_070),
    (said("x", details=[{"retryDelay": {"seconds": 7}}]), 7000),
    (said("x", retry_after=5), 5000),
    (said("x", metadata={"retry_after_seconds": 3}), 3000),
    (said("x", retry_after_ms=250), 250),
    (said("x", retry_after="12"), 12_000),
    (said("x"), None),
    (said("Limit 30000, Used 29000 tokens per min"), None),
    (said("Try again with 2 messages"), None),
    (said("x", retry_after=True), None),
    (said("x", retry_after="soon"), None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "delay_ms"), DELAYS, ids=[json.dumps(it[0])[:70] for it in DELAYS])
def test_the_delay_that_a_body_asks_for_is_read(body: Any, delay_ms: int | None) -> None:
    assert fail(429, body).retry_after_ms == delay_ms
    assert fail(429, [body]).retry_after_ms == delay_ms


@pytest.mark.parametrize(
    ("name", "value", "delay_ms"),
    [
        ("retry-after", "99999999999", 7 * 24 * 3600 * 1000), ("retry-after-ms", "99999999999999", 7 * 24 * 3600 * 1000),
        ("retry-after", "-5", None), ("retry-after", "1e3", None), ("retry-after", "nan", None), ("retry-after", "inf", None),
        ("retry-after-ms", "1e400", None), ("retry-after-ms", "nan", None), ("retry-after", "9" * 5000, None),
        ("retry-after", "Fri, 31 Dec 9999 23:59:59 GMT", 7 * 24 * 3600 * 1000), ("retry-after", "1.2.3", None),
    ],
)  # fmt: skip
def test_a_delay_in_a_header_is_bounded(name: str, value: str, delay_ms: int | None) -> None:
    assert fail(429, said("x"), **{name: value}).retry_after_ms == delay_ms


def test_a_page_is_told_of_without_its_styles_and_scripts() -> None:
    page = "<html><style>b{x:1}</style><SCRIPT>var a</SCRIPT ><title>A timeout occurred</title></html>"
    assert fail(524, page).description == "A timeout occurred"


def test_a_header_comes_before_the_body() -> None:
    assert fail(429, said("Try again in 20s"), **{"retry-after": "3"}).retry_after_ms == 3000


def test_a_minutes_quota_of_google_is_waited_for() -> None:
    words = "You exceeded your current quota, please check your plan and billing details. Please retry in 34.07s."
    failure = fail(429, [{"error": {"code": 429, "message": words, "status": "RESOURCE_EXHAUSTED"}}])
    assert (failure.reason, failure.retry_after_ms) == ("rate_limited", 34_070)


@pytest.mark.parametrize(
    "body", [None, 3, True, [], {}, [[]], {"error": []}, {"error": {"message": {}}}, {"error": {"message": 3}}], ids=str
)
def test_an_error_of_any_shape_is_one(body: Any) -> None:
    assert fail(400, body).reason == "rejected"
    assert fail(400, body).description
