"""Combines several models into one model, which returns the reply of the first model that answers.

Use a fallback for a provider that may be down, busy or out of credit. Each attempt asks each model at most once, and
the reaction's policy sets the number of attempts. If a request is rejected, filtered or too long, the error is raised
at once, because every other model would probably fail in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from .model import Model, ModelDelta, ModelError, ModelReply, ModelRequest, OnDelta

_logger = logging.getLogger(__name__)

_SAME_FOR_ALL = ("rejected", "content_filter", "context_too_long")


class FallbackModel:
    """Model that asks ``models`` in order until one of them answers. If all models fail, the last retryable
    `ModelError` is raised, or the last error if no error is retryable.
    """

    def __init__(self, *models: Model) -> None:
        if not models:
            raise ValueError("FallbackModel needs at least one model")
        self.models = models
        self.name = " or ".join(model.name for model in models)

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Return the reply of the first model that answers."""
        retryable: ModelError | None = None
        has_begun = False

        def forward(delta: ModelDelta) -> None:
            nonlocal has_begun
            has_begun = True
            if on_delta is not None:
                on_delta(delta)

        for model in self.models:
            try:
                return await model.complete(request, forward if on_delta is not None else None)
            except ModelError as error:
                if error.reason in _SAME_FOR_ALL:
                    raise
                _logger.warning("falling back", extra={"model": model.name, "reason": error.reason})
                failure = error
                # Screens already show the streamed pieces of the failed model, so mark these pieces as void.
                if has_begun and on_delta is not None and model is not self.models[-1]:
                    on_delta(ModelDelta(broken_off=str(error)))
                    has_begun = False
                retryable = error if error.retryable else retryable
        raise retryable or failure  # a retry can help if at least one of the failures was temporary

    async def close(self) -> None:
        """Close the models that have a ``close`` method."""
        for model in self.models:
            close: Callable[[], Awaitable[None]] | None = getattr(model, "close", None)
            if close is not None:
                await close()


def list_names(model: Model) -> list[str]:
    """Return the names of the models that may answer a request to ``model``: several names for a `FallbackModel`, and
    otherwise one name.
    """
    if not isinstance(model, FallbackModel):
        return [model.name]
    return [name for choice in model.models for name in list_names(choice)]
