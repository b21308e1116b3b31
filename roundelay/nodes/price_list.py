"""Compute the prices of model calls for the operation `network.costs` of a node. `roundelay cost` uses the same
prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundelay.network.operations.reading import UsedTokens


class NodePrices:
    """Price list of a node. The model code and the price table are imported at the first use."""

    @property
    def has_table(self) -> bool:
        from roundelay.agents.models.tokens import has_price_table

        return has_price_table()

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]:
        """Return the cost of each model usage in dollars, or None where the price is unknown."""
        from roundelay.agents.models.model import Usage
        from roundelay.agents.models.tokens import Prices

        prices = Prices()
        costs = (
            prices.cost(use.model, Usage(use.prompt_tokens, use.completion_tokens, use.cached_tokens)) for use in uses
        )
        return [None if cost is None else float(cost) for cost in costs]
