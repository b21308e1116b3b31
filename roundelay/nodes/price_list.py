"""Prices of model calls for the node's operation `network.costs`. `roundelay cost` uses the same prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundelay.network.operations.reading import UsedTokens


class NodePrices:
    """Prices of a node. The model code and the price table are imported on first use."""

    @property
    def has_table(self) -> bool:
        from roundelay.agents.models.tokens import has_price_table

        return has_price_table()

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]:
        """Return the cost of each use in dollars, or None if its price is unknown."""
        from roundelay.agents.models.model import Usage
        from roundelay.agents.models.tokens import Prices

        prices = Prices()
        costs = (
            prices.cost(use.model, Usage(use.prompt_tokens, use.completion_tokens, use.cached_tokens)) for use in uses
        )
        return [None if cost is None else float(cost) for cost in costs]
