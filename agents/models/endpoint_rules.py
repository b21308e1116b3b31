"""Rules of a model's endpoint: the fields, ids and message order that an OpenAI-compatible server requires.

`find_rules` chooses the rules by the host of the base URL and by the model's name. An agent's file may override each
rule. For an unknown server, `learn` derives a rule from the text of a refusal. The rule is recorded with the reply
(`ReplyOrigin.rules`), so a resumed reaction sends the same requests. `name_endpoint` returns a name for an endpoint and
its model. Fields from a server's replies are sent back only to the same endpoint. This module does no IO.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, TypedDict, get_args
from urllib.parse import urlsplit

from pydantic import JsonValue

from roundelay.network.errors import ConfigError

Provider = Literal["openai", "azure", "mistral", "deepseek", "kimi", "gemini", "bedrock", "other"]
Notes = Literal["in_results", "as_user"]
CallIds = Literal["own", "safe", "nine"]
Reasoning = Literal["sealed", "returned", "required", "dropped"]


@dataclass(frozen=True, slots=True)
class EndpointRules:
    """Rules of one endpoint. The defaults suit an unknown server.

    ``notes``: form of text after tool results. ``as_user`` sends a user message. ``in_results`` appends the text to the
    last result as a ``<system_note>``. Mistral's API and the chat templates of its models refuse a user message after
    results (https://github.com/avante-corp/avante.nvim/issues/2562). DeepSeek's models end a turn of reasoning and tool
    calls at the next user message (https://api-docs.deepseek.com/guides/thinking_mode). Kimi and Gemini are assumed to
    behave like DeepSeek; no source confirms this.

    ``call_ids``: form of the ids of tool calls. ``own`` sends ids unchanged, as Kimi requires. The other values replace
    ids that the server would refuse with nine letters and digits. ``nine``: Mistral accepts only this form
    (https://github.com/langchain-ai/langchain/pull/24668). ``safe``: OpenAI accepts at most 40 characters
    (https://github.com/vercel/ai/issues/5171), and Anthropic accepts letters, digits, ``_`` and ``-``
    (https://github.com/BerriAI/litellm/pull/34523). Calls from another server may therefore need new ids.

    ``reasoning``: the reasoning that is sent back with a reply that called tools. ``sealed``: only signed or encrypted
    reasoning, which servers check (https://github.com/BerriAI/litellm/issues/15601). ``returned``: all reasoning.
    ``required``: all reasoning, or a blank if there is none
    (https://github.com/openai/openai-agents-python/issues/2155). ``dropped``: no reasoning.

    ``signs_calls``: the first call of a turn needs a signature. A call from another model gets a substitute that Google
    accepts (https://ai.google.dev/gemini-api/docs/thought-signatures).

    ``declares_used_tools``: a request without tools must still declare the tools that its history used
    (https://github.com/BerriAI/litellm/issues/40735).

    ``stream_usage``: whether requests ask the server to include token counts in the stream
    (https://github.com/avante-corp/avante.nvim/issues/2347).
    """

    notes: Notes = "as_user"
    call_ids: CallIds = "own"
    reasoning: Reasoning = "sealed"
    signs_calls: bool = False
    declares_used_tools: bool = False
    stream_usage: bool = True

    def list_changes(self, since: EndpointRules) -> dict[str, JsonValue]:
        """Return the rules that differ from ``since``, by name."""
        names = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(since, name)}


class RuleChanges(TypedDict, total=False):
    """Rules that an agent's file overrides. ``provider`` names the rules to start from."""

    provider: Provider
    notes: Notes
    call_ids: CallIds
    reasoning: Reasoning
    signs_calls: bool
    declares_used_tools: bool
    stream_usage: bool


BY_PROVIDER: dict[Provider, EndpointRules] = {
    "openai": EndpointRules(call_ids="safe"),
    "azure": EndpointRules(call_ids="safe"),
    "mistral": EndpointRules(notes="in_results", call_ids="nine", reasoning="dropped", stream_usage=False),
    "deepseek": EndpointRules(notes="in_results", reasoning="required"),
    "kimi": EndpointRules(notes="in_results", reasoning="required"),
    "gemini": EndpointRules(notes="in_results", signs_calls=True),
    "bedrock": EndpointRules(call_ids="safe", declares_used_tools=True),
    "other": EndpointRules(),
}

_HOSTS: tuple[tuple[str, Provider], ...] = (
    ("api.openai.com", "openai"),
    ("openai.azure.com", "azure"),
    ("mistral.ai", "mistral"),
    ("deepseek.com", "deepseek"),
    ("moonshot.ai", "kimi"),
    ("moonshot.cn", "kimi"),
    ("kimi.com", "kimi"),
    ("googleapis.com", "gemini"),
    ("amazonaws.com", "bedrock"),
    ("anthropic.com", "bedrock"),
    # Hosts of models of several vendors, which refuse unknown fields.
    ("groq.com", "other"),
    ("cerebras.ai", "other"),
)
"""Provider of a host and its subdomains."""

_MISTRAL_MODELS = ("mistral", "mixtral", "ministral", "codestral", "devstral", "magistral", "pixtral")
_OLD_GEMINI = ("gemini-1", "gemini-2")  # models that do not check signatures


def find_rules(base_url: str | None, model: str, changes: RuleChanges | None = None) -> EndpointRules:
    """Return the rules of ``model`` at ``base_url``, with ``changes`` applied. Raises `ConfigError` for an unknown rule
    or value."""
    overrides: dict[str, object] = dict(changes or {})
    for name, value in overrides.items():
        allowed = _VALUES.get(name)
        if allowed is None:
            raise ConfigError(f"Unknown rule {name!r} of a model's server. Known rules: {', '.join(_VALUES)}.")
        if not isinstance(value, str | bool) or value not in allowed:
            raise ConfigError(
                f"The rule {name} of a model's server is {value!r} and must be {' or '.join(map(repr, allowed))}."
            )
    provider = overrides.pop("provider", None)
    rules = BY_PROVIDER[provider] if provider is not None else _choose_rules(base_url, model.lower())  # type: ignore[index]
    return replace(rules, **overrides)  # type: ignore[arg-type]  # read from a checked file


def _choose_rules(base_url: str | None, model: str) -> EndpointRules:
    host = (urlsplit(base_url).hostname or "") if base_url else "api.openai.com"
    for name, provider in _HOSTS:
        if host == name or host.endswith(f".{name}"):
            rules = BY_PROVIDER[provider]
            return replace(rules, signs_calls=rules.signs_calls and not any(prefix in model for prefix in _OLD_GEMINI))
    rules = _choose_by_name(model)
    # https://openrouter.ai/docs/use-cases/reasoning-tokens
    is_open = host == "openrouter.ai" and rules.reasoning == "sealed"
    return replace(rules, reasoning="returned") if is_open else rules


def _choose_by_name(model: str) -> EndpointRules:
    # For gateways and self-hosted servers, choose the rules by the model's name.
    if any(name in model for name in _MISTRAL_MODELS):
        return EndpointRules(notes="in_results", call_ids="nine")
    if "deepseek" in model or "kimi" in model:
        return BY_PROVIDER["deepseek"]
    if "gemini" in model:
        return EndpointRules(notes="in_results", signs_calls=not any(prefix in model for prefix in _OLD_GEMINI))
    if any(name in model for name in ("claude", "anthropic", "bedrock")):
        return BY_PROVIDER["bedrock"]
    return EndpointRules()


_REFUSALS: tuple[tuple[str, dict[str, object]], ...] = (
    # Mistral, the chat templates of its models, and some other servers require alternating roles.
    (
        r"unexpected role|(message|role)[_ ]order|roles? (must|should) alternate|alternat\w* (between )?.?user"
        r"|after (a )?tool message",
        {"notes": "in_results"},
    ),
    (
        r"tool_calls\W{0,4}\d*\W{0,4}id\b.{0,20}too long|tool_use\.id\b.{0,40}pattern|tooluseid.{0,80}(pattern|length)",
        {"call_ids": "safe"},
    ),
    (r"tool.?call.?id.{0,80}(length of 9|9 characters|nine)", {"call_ids": "nine"}),
    (r"stream_options", {"stream_usage": False}),
    # LiteLLM for Bedrock, Bedrock itself, Anthropic.
    (
        r"without `?tools=|toolconfig field must be defined|must define tools|tools must be (defined|provided)",
        {"declares_used_tools": True},
    ),
    (r"thought_signature", {"signs_calls": True}),
    # Groq, Mistral and other servers refuse unknown fields.
    (
        r"(reasoning\w*|thinking_blocks)\W{0,4}.{0,40}(unsupported|not (permitted|supported|allowed)|unexpected|unrecognized|unknown)"
        r"|(unsupported|unexpected|unrecognized|unknown|additional).{0,60}(reasoning\w*|thinking_blocks)"
        r"|extra_forbidden.{0,200}reasoning|reasoning.{0,200}extra_forbidden",
        {"reasoning": "dropped"},
    ),
    (
        r"(reasoning|thinking)\w*\W.{0,80}(missing|must be|required|passed back)|missing.{0,30}(reasoning|thinking)"
        r"|expected `?thinking",
        {"reasoning": "required"},
    ),
)
"""Patterns of refusals, each with the rule that such a refusal reveals. The first match that changes a rule applies."""


def is_sealed(name: str, value: JsonValue) -> bool:
    """Return whether a reasoning field is signed or encrypted."""
    if isinstance(value, list):
        return any(isinstance(block, dict) and any(block.get(key) for key in ("signature", "data")) for block in value)
    return name in ("reasoning_opaque", "extra_content")


def learn(rules: EndpointRules, refusal: str) -> EndpointRules | None:
    """Return ``rules`` with the change that a refusal reveals. Return None if the text reveals no new rule."""
    words = refusal.lower()
    for pattern, changes in _REFUSALS:
        changed = replace(rules, **changes)  # type: ignore[arg-type]  # of `_REFUSALS` above
        # Skip a rule that already applies: the server refused the request for another reason.
        if changed != rules and re.search(pattern, words):
            return changed
    return None


def recall(rules: EndpointRules, recorded: Mapping[str, object]) -> EndpointRules:
    """Return ``rules`` with the rules that an earlier reply recorded. Ignore unknown rules and values, which a newer
    version of Roundelay may have recorded.
    """
    valid = {
        name: value
        for name, value in recorded.items()
        if isinstance(value, str | bool) and value in _VALUES.get(name, ())
    }
    valid.pop("provider", None)
    return replace(rules, **valid)  # type: ignore[arg-type]  # of the types checked above


_VALUES: Mapping[str, tuple[object, ...]] = {
    "provider": get_args(Provider),
    "notes": get_args(Notes),
    "call_ids": get_args(CallIds),
    "reasoning": get_args(Reasoning),
    "signs_calls": (False, True),
    "declares_used_tools": (False, True),
    "stream_usage": (False, True),
}


def name_endpoint(base_url: str | None, model: str) -> str:
    """Return a name for a model at an endpoint, such as ``api.deepseek.com#1f0c9a2b deepseek-reasoner``.

    The hash after ``#`` covers the whole URL. The path itself is omitted, because it may contain a key.
    """
    parts = urlsplit(base_url or "https://api.openai.com/v1")
    netloc = parts.netloc.rpartition("@")[2]  # without user name and password
    address = f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}?{parts.query}"
    return f"{parts.hostname or ''}#{hashlib.sha256(address.encode()).hexdigest()[:8]} {model}"
