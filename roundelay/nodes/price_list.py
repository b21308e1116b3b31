"""The node's prices of model calls, for `network.costs`. They are those of `roundelay cost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundelay.network.operations.reading import UsedTokens


class NodePrices:
    """The node's prices. The model code and the price table are imported on first use."""

    @property
    def has_table(self) -> bool:
        from roundelay.agents.models.tokens import has_price_table

        return has_price_table()

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]:
        """Return the dollars of each use, None without a known price."""
        from roundelay.agents.models.model import Usage
        from roundelay.agents.models.tokens import Prices

        prices = Prices()
        costs = (
            prices.cost(use.model, Usage(use.prompt_tokens, use.completion_tokens, use.cached_tokens)) for use in uses
        )
        return [None if cost is None else float(cost) for cost in costs]
