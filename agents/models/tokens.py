"""How many tokens a text or a request is, and what tokens cost.

Tokens are estimated from characters, or counted by `tiktoken` where that is installed and asked for. What a provider
has counted is better than both, and the features that decide by size start from that (`context_engine`). Costs are in
US dollars: by prices of one's own, else by those of `genai-prices` where that is installed (``[prices]``), whose tables
are read when the first price is asked for; the network is never asked here. Pure but for these tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from typing import Annotated

from pydantic import Field

from roundelay.agents.options import Strict
from roundelay.network.errors import ConfigError
from roundelay.network.extras import how_to_add

from .model import AssistantMessage, ChatMessage, ToolSpec, Usage, UserMessage

Count = Callable[[str], int]
"""Gives the tokens of a text."""

MESSAGE_TOKENS = 4
"""What a message costs beside its text: its role and its ends, in the chat formats of common models."""

IMAGE_TOKENS = 1000
"""About what a large image costs at common providers; small ones cost less."""

FILE_CHARS, AUDIO_CHARS = 40, 2000
"""How much base64 of a file, and of audio, is about one token: between a text and the picture of a page, and common
compressed sound."""

CALL_TOKENS = 8
"""Likewise a call: its id and the names of its fields."""


SEVERAL_REQUESTS = "tokens.several_requests"
"""In a reaction's values: what the provider counts of this turn is the sum of several requests, and says nothing about
the size of one."""


def estimate_tokens(text: str) -> int:
    """Estimate from the characters: 3.5 of ASCII to a token, which English text and JSON rarely fall below, 2.5 bytes
    of others."""
    if text.isascii():
        return (2 * len(text) + 6) // 7
    others = len(text.encode("utf-8", "replace"))
    ascii_chars = len(text.encode("ascii", "ignore"))
    return (2 * ascii_chars + 6) // 7 + (2 * (others - ascii_chars) + 4) // 5


def load_count(name: str | None) -> Count:
    """Give the count by an encoding of `tiktoken` (``o200k_base``), or the estimate without a name.

    An encoding is read here, once; `tiktoken` fetches one that this machine does not have yet. Raises `ConfigError`.
    """
    if name is None:
        return estimate_tokens
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(f"counting by tiktoken needs the extra tokens. Run: {how_to_add('tokens')}") from error
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # an unknown name; or the network, in any of its library's words
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise ConfigError(f"tiktoken has no encoding {name!r}; it has: {', '.join(sorted(known))}") from error
        raise ConfigError(
            f"the encoding {name!r} is not on this machine, and tiktoken could not fetch it ({type(error).__name__}): "
            "let it reach the network once, or name a folder that holds it in TIKTOKEN_CACHE_DIR, or leave encoding "
            "out (tokens are then estimated)"
        ) from error

    @lru_cache(maxsize=512)
    def count(text: str) -> int:
        return len(encoding.encode(text, disallowed_special=()))

    count.__qualname__ = f"count by {name}"  # what a reaction's config hash sees

    return count


def count_message(message: ChatMessage, count: Count) -> int:
    """Count one message: its text, and its calls."""
    tokens = MESSAGE_TOKENS + count(message.content or "")
    if isinstance(message, AssistantMessage):
        tokens += sum(CALL_TOKENS + count(call.name) + count(call.arguments) for call in message.tool_calls)
    elif isinstance(message, UserMessage):
        tokens += IMAGE_TOKENS * len(message.images)
        tokens += sum(
            len(file.data) // (AUDIO_CHARS if file.media_type.startswith("audio/") else FILE_CHARS)
            for file in message.files
        )
    return tokens


def count_request(messages: Iterable[ChatMessage], tools: Iterable[ToolSpec], count: Count) -> int:
    """Count all that a request holds, the schemas of its tools included."""
    told = sum(count_message(message, count) for message in messages)
    return told + sum(_count_tool(tool, count) for tool in tools)


def _count_tool(tool: ToolSpec, count: Count) -> int:
    return CALL_TOKENS + count(tool.name) + count(tool.description) + count(json.dumps(dict(tool.parameters)))


# What a server adds to the name that it was asked by.
_VERSION = re.compile(r"[-@:](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)\Z")
_SCRIPT = re.compile(r"rules|scripted|script .+")
"""What is named so asks nobody: see `scripted` and `team`."""
_Dollars = Annotated[Decimal, Field(ge=0)]


class Price(Strict):
    """Dollars for a million tokens; ``cached`` for those of the prompt that the provider had cached, as ``input``
    unless said."""

    input: _Dollars
    output: _Dollars
    cached: _Dollars | None = None


class Prices(dict[str, Price]):
    """Prices by the model's name, which come before those of the package. One without a version is of all versions
    (``gpt-4o`` of ``gpt-4o-2024-08-06``)."""

    def cost(self, model: str, usage: Usage, calls: int = 1) -> Decimal | None:
        """Give what this usage of ``calls`` calls cost, None where no price is known; nothing for rules and scripts,
        which ask no model.

        Some prices depend on a call's length: of several calls the average one counts.
        """
        known = self.get(model) or self.get(_VERSION.sub("", model))
        if known is None and _SCRIPT.fullmatch(model):
            return Decimal(0)
        if known is not None:
            cached_price = known.input if known.cached is None else known.cached
            cached = min(usage.prompt_tokens, usage.cached_tokens)  # some servers count them beside the prompt
            fresh = usage.prompt_tokens - cached
            return (known.input * fresh + cached_price * cached + known.output * usage.completion_tokens) / 1_000_000
        try:
            import genai_prices
        except ImportError:
            return None
        each = max(1, calls)
        prompt, cached, completion = (
            round(tokens / each) for tokens in (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        )
        try:
            asked = genai_prices.Usage(
                input_tokens=prompt, cache_read_tokens=min(prompt, cached), output_tokens=completion
            )
            return genai_prices.calc_price(asked, model_ref=model).total_price * each
        except (LookupError, ValueError):  # no such model; or figures that its price is not made for
            return None


def has_price_table() -> bool:
    """Return whether `genai-prices`, which knows the prices of many models, is installed."""
    return find_spec("genai_prices") is not None


def write_dollars(cost: Decimal) -> str:
    """Write an amount as a person reads it: cents, and of less than a dollar as many digits as say something."""
    return f"${cost:.2f}" if cost >= 1 or not cost else f"${cost:.4f}" if cost >= Decimal("0.001") else f"${cost:.2g}"
