"""The rules of a model's endpoint: what an OpenAI-compatible server wants back, and in which order.

`find_rules` chooses the rules by the host of the base URL and by the model's name. An agent's file may override each of
them. For an unknown server, `learn` finds the rule in the words of a refusal. That rule is recorded with the reply
(`ReplyOrigin.rules`), so a resumed reaction sends the same requests. `name_endpoint` names an endpoint and its model: a
server's fields go back to that endpoint only. No IO.
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
    """The rules of one endpoint; the defaults are those of a server that nothing is known of.

    ``notes``: how text that follows tool results is sent. ``as_user`` sends a user's message. ``in_results`` appends it to
    the last result as a ``<system_note>``. Mistral's API and the chat templates of its models refuse a user's message
    there (https://github.com/avante-corp/avante.nvim/issues/2562). DeepSeek's models count a turn of thinking and tool
    calls from one user's message to the next (https://api-docs.deepseek.com/guides/thinking_mode). For Kimi and Gemini
    the same is assumed, and no source confirms it.

    ``call_ids``: ``own`` sends ids as they are, which Kimi needs. The others send ids of another form as nine letters or
    digits. ``nine``: Mistral takes nothing else (https://github.com/langchain-ai/langchain/pull/24668). ``safe``: OpenAI
    takes at most 40 characters (https://github.com/vercel/ai/issues/5171), Anthropic letters, digits, ``_`` and ``-``
    (https://github.com/BerriAI/litellm/pull/34523), so calls that another server made may need new ids.

    ``reasoning``: which thinking goes back that came with a reply that called tools. ``sealed``: what is signed or
    encrypted, which servers check (https://github.com/BerriAI/litellm/issues/15601). ``returned``: all of it.
    ``required``: all, and a blank where it is missing (https://github.com/openai/openai-agents-python/issues/2155).
    ``dropped``: none.

    ``signs_calls``: the first call of a turn needs a signature; a call that another model made gets Google's substitute
    (https://ai.google.dev/gemini-api/docs/thought-signatures).

    ``declares_used_tools``: a request without tools still has to declare those that its history used
    (https://github.com/BerriAI/litellm/issues/40735).

    ``stream_usage``: whether a stream is asked for its usage
    (https://github.com/avante-corp/avante.nvim/issues/2347).
    """

    notes: Notes = "as_user"
    call_ids: CallIds = "own"
    reasoning: Reasoning = "sealed"
    signs_calls: bool = False
    declares_used_tools: bool = False
    stream_usage: bool = True

    def list_changes(self, since: EndpointRules) -> dict[str, JsonValue]:
        """Return the rules that differ from earlier ones, by name."""
        names = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(since, name)}


class RuleChanges(TypedDict, total=False):
    """Rules that an agent's file sets otherwise; ``provider`` names the rules to begin with."""

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
    # They serve models of several makers and refuse fields that are not their own.
    ("groq.com", "other"),
    ("cerebras.ai", "other"),
)
"""The provider at a host or below it."""

_MISTRAL_MODELS = ("mistral", "mixtral", "ministral", "codestral", "devstral", "magistral", "pixtral")
_OLD_GEMINI = ("gemini-1", "gemini-2")  # these do not check signatures


def find_rules(base_url: str | None, model: str, changes: RuleChanges | None = None) -> EndpointRules:
    """Return the rules of the endpoint at ``base_url`` for this model, with ``changes`` made to them. Raises `ConfigError`
    for a change that there is not."""
    made: dict[str, object] = dict(changes or {})
    for name, value in made.items():
        allowed = _VALUES.get(name)
        if allowed is None:
            raise ConfigError(f"Unknown rule {name!r} of a model's server. Known rules: {', '.join(_VALUES)}.")
        if not isinstance(value, str | bool) or value not in allowed:
            raise ConfigError(
                f"The rule {name} of a model's server is {value!r} and must be {' or '.join(map(repr, allowed))}."
            )
    provider = made.pop("provider", None)
    rules = BY_PROVIDER[provider] if provider is not None else _choose_rules(base_url, model.lower())  # type: ignore[index]
    return replace(rules, **made)  # type: ignore[arg-type]  # read from a checked file


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
    # Gateways and servers of one's own: the model's name is all that there is to go by.
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
    # Mistral, its models' chat templates, and others that want roles to alternate.
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
    # Groq, Mistral and others that take no fields but their own.
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
"""The words of refusals, and the rule behind each. The first match that changes anything counts."""


def is_sealed(name: str, value: JsonValue) -> bool:
    """Whether a field with thinking bears a signature or is encrypted."""
    if isinstance(value, list):
        return any(isinstance(block, dict) and any(block.get(key) for key in ("signature", "data")) for block in value)
    return name in ("reasoning_opaque", "extra_content")


def learn(rules: EndpointRules, refusal: str) -> EndpointRules | None:
    """Return the rules with the one by which a server refused a request. None means that its words name no new rule."""
    words = refusal.lower()
    for pattern, changes in _REFUSALS:
        changed = replace(rules, **changes)  # type: ignore[arg-type]  # of `_REFUSALS` above
        if changed != rules and re.search(pattern, words):
            return changed
    return None


def recall(rules: EndpointRules, recorded: Mapping[str, object]) -> EndpointRules:
    """Return the rules with recorded ones applied. Ignore rules and values of a newer version."""
    known = {
        name: value
        for name, value in recorded.items()
        if isinstance(value, str | bool) and value in _VALUES.get(name, ())
    }
    known.pop("provider", None)
    return replace(rules, **known)  # type: ignore[arg-type]  # of the types checked above


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

    The digest is of the whole address. The path itself is left out because it may hold a key."""
    parts = urlsplit(base_url or "https://api.openai.com/v1")
    place = parts.netloc.rpartition("@")[2]  # without a name and a password
    address = f"{parts.scheme}://{place}{parts.path.rstrip('/')}?{parts.query}"
    return f"{parts.hostname or ''}#{hashlib.sha256(address.encode()).hexdigest()[:8]} {model}"
