"""Token counts of texts and requests, and the cost of tokens.

Tokens are estimated from characters, or counted by `tiktoken` if it is installed and configured. A provider's own count
is more accurate, so features that depend on the size of requests begin with that count (`context_engine`). Costs are in
US dollars. Configured prices have priority over the prices of the package `genai-prices` (``[prices]``), whose tables
load at the first use. This module does no IO except loading the price tables, and never uses the network.
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
"""Returns the number of tokens of a text."""

MESSAGE_TOKENS = 4
"""Number of tokens that a message needs in addition to its text, for its role and delimiters."""

IMAGE_TOKENS = 1000
"""Approximate number of tokens that common providers count for a large image."""

FILE_CHARS, AUDIO_CHARS = 40, 2000
"""Base64 characters per token, for files and for audio. The value for files is a compromise between text and images of
pages. The value for audio assumes common compressed formats.
"""

CALL_TOKENS = 8
"""Number of tokens that a call needs in addition to its name and arguments, for its id and field names."""


SEVERAL_REQUESTS = "tokens.several_requests"
"""Key in a reaction's values. The value is true if the provider's count of this turn is the sum of several requests, so
that the count does not show the size of one request.
"""


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of a text. One token has 3.5 ASCII characters, or 2.5 bytes of other text.

    English text and JSON rarely need more tokens than this estimate.
    """
    if text.isascii():
        return (2 * len(text) + 6) // 7
    encoded_bytes = len(text.encode("utf-8", "replace"))
    ascii_chars = len(text.encode("ascii", "ignore"))
    return (2 * ascii_chars + 6) // 7 + (2 * (encoded_bytes - ascii_chars) + 4) // 5


def load_count(name: str | None) -> Count:
    """Return a counter that uses an encoding of `tiktoken` (``o200k_base``), or the estimate if ``name`` is None.

    The encoding is loaded once, when this function is called. `tiktoken` downloads an encoding that is not on this
    machine. Raises `ConfigError`.
    """
    if name is None:
        return estimate_tokens
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(f"counting tokens by tiktoken needs the extra tokens. Run: {how_to_add('tokens')}") from error
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # an unknown name, or any error of the HTTP library
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise ConfigError(
                f"tiktoken has no encoding {name!r}. Known encodings: {', '.join(sorted(known))}"
            ) from error
        raise ConfigError(
            f"the encoding {name!r} is not on this machine, and tiktoken could not download it "
            f"({type(error).__name__}). Give it network access once, set TIKTOKEN_CACHE_DIR to a folder that has it, "
            "or leave out encoding (tokens are then estimated)"
        ) from error

    @lru_cache(maxsize=512)
    def count(text: str) -> int:
        return len(encoding.encode(text, disallowed_special=()))

    count.__qualname__ = f"count by {name}"  # part of a reaction's config hash

    return count


def count_message(message: ChatMessage, count: Count) -> int:
    """Count the tokens of one message: its text, calls, images and files."""
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
    """Count all tokens of a request, including the schemas of its tools."""
    message_tokens = sum(count_message(message, count) for message in messages)
    return message_tokens + sum(_count_tool(tool, count) for tool in tools)


def _count_tool(tool: ToolSpec, count: Count) -> int:
    return CALL_TOKENS + count(tool.name) + count(tool.description) + count(json.dumps(dict(tool.parameters)))


# Pattern of the version suffixes that servers append to a model's name.
_VERSION = re.compile(r"[-@:](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)\Z")
_SCRIPT = re.compile(r"rules|scripted|script .+")
"""Pattern for the names of models that do not use a provider (`scripted`, `team`)."""
_Dollars = Annotated[Decimal, Field(ge=0)]


class Price(Strict):
    """Price of a model in US dollars per million tokens. ``cached`` is the price of prompt tokens from the provider's
    cache. The default of ``cached`` is the price ``input``.
    """

    input: _Dollars
    output: _Dollars
    cached: _Dollars | None = None


class Prices(dict[str, Price]):
    """Configured prices by model name. Configured prices have priority over the prices of the package `genai-prices`.

    A name without a version covers all versions (``gpt-4o`` covers ``gpt-4o-2024-08-06``).
    """

    def cost(self, model: str, usage: Usage, calls: int = 1) -> Decimal | None:
        """Return the cost of this usage in ``calls`` calls, or None if no price is known. Rules and scripts cost
        nothing.

        Some prices depend on the length of a call. For several calls, use the price for their average length.
        """
        price = self.get(model) or self.get(_VERSION.sub("", model))
        if price is None and _SCRIPT.fullmatch(model):
            return Decimal(0)
        if price is not None:
            cached_price = price.input if price.cached is None else price.cached
            # Some servers do not include cached tokens in the prompt tokens. Limit the cached tokens, so that a cost is
            # not negative.
            cached = min(usage.prompt_tokens, usage.cached_tokens)
            fresh = usage.prompt_tokens - cached
            return (price.input * fresh + cached_price * cached + price.output * usage.completion_tokens) / 1_000_000
        try:
            import genai_prices
        except ImportError:
            return None
        each = max(1, calls)
        prompt, cached, completion = (
            round(tokens / each) for tokens in (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        )
        try:
            average = genai_prices.Usage(
                input_tokens=prompt, cache_read_tokens=min(prompt, cached), output_tokens=completion
            )
            return genai_prices.calc_price(average, model_ref=model).total_price * each
        except (LookupError, ValueError):  # an unknown model, or counts outside of its price table
            return None


def has_price_table() -> bool:
    """Return whether `genai-prices`, the package with the prices of many models, is installed."""
    return find_spec("genai_prices") is not None


def write_dollars(cost: Decimal) -> str:
    """Format an amount of dollars for people: two decimal places, or more for an amount below one dollar."""
    return f"${cost:.2f}" if cost >= 1 or not cost else f"${cost:.4f}" if cost >= Decimal("0.001") else f"${cost:.2g}"
