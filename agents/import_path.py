"""Imports what a file names as ``package.module:name``: tools, middleware, checks, types. Importing runs the user's
module."""

from __future__ import annotations

import importlib
from typing import Any

from roundelay.network.errors import ConfigError


def import_named(spec: str, what: str, form: str = "name") -> Any:
    """Give what ``spec`` names. Raises `ConfigError`, which says ``what`` it was to be, a ``form`` of a module,
    whatever that raises."""
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"the {what} {spec!r} is no import path: write package.module:{form}")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # of the user's module
        raise ConfigError(f"the {what} {spec!r} cannot be loaded ({type(error).__name__}: {error})") from error
    return found


def import_callable(spec: str, what: str) -> Any:
    """As `import_named`; what is found can be called."""
    found = import_named(spec, what, "function")
    if not callable(found):
        raise ConfigError(f"the {what} {spec!r} is a {type(found).__name__}, not a function")
    return found
