"""The node's answers to `network.costs`, by the prices that `roundelay cost` uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundelay.network.operations.reading import UsedTokens


class NodePrices:
    """A node's price list. The models' code and the price table are imported at the first question."""

    @property
    def has_table(self) -> bool:
        from roundelay.agents.models.tokens import has_price_table

        return has_price_table()

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]:
        """Return the dollars for each use, None where no price is known."""
        from roundelay.agents.models.model import Usage
        from roundelay.agents.models.tokens import Prices

        prices = Prices()
        costs = (prices.cost(it.model, Usage(it.prompt_tokens, it.completion_tokens, it.cached_tokens)) for it in uses)
        return [None if cost is None else float(cost) for cost in costs]
