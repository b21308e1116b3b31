"""Imports what a file names as ``package.module:name``: tools, middleware, checks, types. Importing runs the user's
module."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
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
        where = _tell_where(module_name, error) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"the {what} {spec!r} cannot be loaded ({type(error).__name__}: {error}){where}") from error
    return found


def _tell_where(module_name: str, error: ModuleNotFoundError) -> str:
    """Where a module that is not found was looked for, but for where packages are installed; nothing of what a module
    that was found lacks."""
    if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
        return ""
    installed = {"site-packages", "dist-packages", "lib-dynload", Path(os.__file__).parent.name}
    folders = [it for it in map(Path, sys.path) if it.is_dir() and it.name not in installed]
    beside = f"in {' and '.join(map(str, dict.fromkeys(it.resolve() for it in folders)))}, and " if folders else ""
    return f": it is looked for {beside}among the installed packages"


def import_callable(spec: str, what: str) -> Any:
    """As `import_named`; what is found can be called."""
    found = import_named(spec, what, "function")
    if not callable(found):
        raise ConfigError(f"the {what} {spec!r} is a {type(found).__name__}, not a function")
    return found
