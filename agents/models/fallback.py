"""Several models as one: the first that answers. For a provider that is down, busy or out of credit.

Each model has one try in an attempt; how often attempts are made is the reaction's budget, not this one's. What another
model would not do better (the request itself is refused, withheld or too long) is not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from .model import Model, ModelDelta, ModelError, ModelReply, ModelRequest, OnDelta

_logger = logging.getLogger(__name__)

_SAME_FOR_ALL = ("rejected", "content_filter", "context_too_long")


class FallbackModel:
    """Asks ``models`` in their order. Raises the `ModelError` of the last one, retryable if that of any is."""

    def __init__(self, *models: Model) -> None:
        if not models:
            raise ValueError("FallbackModel takes at least one model")
        self.models = models
        self.name = " or ".join(model.name for model in models)

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer by the first model that does."""
        passing: ModelError | None = None
        has_begun = False

        def tell(delta: ModelDelta) -> None:
            nonlocal has_begun
            has_begun = True
            if on_delta is not None:
                on_delta(delta)

        for model in self.models:
            try:
                return await model.complete(request, tell if on_delta is not None else None)
            except ModelError as error:
                if error.reason in _SAME_FOR_ALL:
                    raise
                _logger.warning("falling back", extra={"model": model.name, "reason": error.reason})
                failure = error
                if has_begun and on_delta is not None and model is not self.models[-1]:
                    on_delta(ModelDelta(broken_off=str(error)))
                    has_begun = False
                passing = error if error.retryable else passing
        raise passing or failure

    async def close(self) -> None:
        """Close those models that can be closed."""
        for model in self.models:
            close: Callable[[], Awaitable[None]] | None = getattr(model, "close", None)
            if close is not None:
                await close()


def list_names(model: Model) -> list[str]:
    """Give the names of the models that may answer for this one: its own, if it is no fallback."""
    return (
        [name for one in model.models for name in list_names(one)] if isinstance(model, FallbackModel) else [model.name]
    )
