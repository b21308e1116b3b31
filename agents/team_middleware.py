"""The ``middleware`` of an agent's file: one item each, by name with its options, built in order; the first is outermost.

Part of `team`. An item names exactly one; ``custom`` is ``module:callable``, which is called without arguments and gives a `Middleware`.
"""

from __future__ import annotations

import importlib
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from roundelay.network.errors import ConfigError

from .features.mcp_servers import McpOptions
from .features.registry import RegistryOptions
from .middleware import Middleware


class MiddlewareChoice(BaseModel):
    """One item."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    custom: str | None = None
    mcp: McpOptions | None = None
    registry: RegistryOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"must be exactly one of {', '.join(type(self).model_fields)}")
        return self


def build_middleware(choice: MiddlewareChoice) -> Middleware:
    """Make what an item names. Raises `ConfigError`."""
    if choice.custom is not None:
        return _load(choice.custom)
    if choice.mcp is not None:
        return choice.mcp.build()
    if choice.registry is not None:
        return choice.registry.build()
    raise AssertionError("exactly one is named")


def _load(spec: str) -> Middleware:
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"the middleware {spec!r} is no import path: write package.module:callable")
    try:
        made = getattr(importlib.import_module(module_name), attribute)()
    except Exception as error:  # importing and calling run the user's module, which may raise anything
        raise ConfigError(f"the middleware {spec!r} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(made, Middleware):
        raise ConfigError(f"the middleware {spec!r} is a {type(made).__name__}, no Middleware")
    return made
