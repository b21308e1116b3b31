"""What tokens cost, in US dollars: by prices of one's own, else by those of `genai-prices` where that is installed
(``[prices]``).

Pure but for that package's tables, which are read when the first price is asked for; it never asks the network here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from roundelay.agents.models.model import Usage

# What a server adds to the name that it was asked by.
_VERSION = re.compile(r"[-@:](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)\Z")
_Dollars = Annotated[Decimal, Field(ge=0)]


class Price(BaseModel):
    """Dollars for a million tokens; ``cached`` for those of the prompt that the provider had cached, as ``input``
    unless said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: _Dollars
    output: _Dollars
    cached: _Dollars | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices by the model's name; ``own`` come before those of the package. One without a version is of all versions
    (``gpt-4o`` of ``gpt-4o-2024-08-06``)."""

    own: Mapping[str, Price] = field(default_factory=dict)

    def cost(self, model: str, usage: Usage, calls: int = 1) -> Decimal | None:
        """Give what this usage of ``calls`` calls cost, None where no price is known.

        Some prices depend on a call's length: of several calls the average one counts.
        """
        known = self.own.get(model) or self.own.get(_VERSION.sub("", model))
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
            round(it / each) for it in (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        )
        try:
            asked = genai_prices.Usage(
                input_tokens=prompt, cache_read_tokens=min(prompt, cached), output_tokens=completion
            )
            return genai_prices.calc_price(asked, model_ref=model).total_price * each
        except (LookupError, ValueError):  # no such model; or figures that its price is not made for
            return None


def write_dollars(cost: Decimal) -> str:
    """Write an amount as a person reads it: cents, and of less than a dollar as many digits as say something."""
    return f"${cost:.2f}" if cost >= 1 or not cost else f"${cost:.4f}" if cost >= Decimal("0.001") else f"${cost:.2g}"
