"""Imports tools, middleware, checks and types that a file names as ``package.module:name``. Importing a module runs the
user's code.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from roundelay.network.errors import ConfigError


def import_named(spec: str, what: str, form: str = "name") -> Any:
    """Return the object that ``spec`` names. Raises `ConfigError` for every failure, including an exception in the
    module. For the error text, ``what`` is the kind of object and ``form`` is an example of its name.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"the {what} {spec!r} is not an import path: write package.module:{form}")
    try:
        target: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:  # the module is user code
        where = _describe_search_path(module_name, error) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"the {what} {spec!r} cannot be loaded ({type(error).__name__}: {error}){where}") from error
    return target


def _describe_search_path(module_name: str, error: ModuleNotFoundError) -> str:
    """Describe the folders, in addition to the installed packages, that were searched for a missing module. Return an
    empty string if the module exists but one of its own imports is missing.
    """
    if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
        return ""
    installed = {"site-packages", "dist-packages", "lib-dynload", Path(os.__file__).parent.name}
    folders = [it for it in map(Path, sys.path) if it.is_dir() and it.name not in installed]
    beside = (
        f"in {' and '.join(map(str, dict.fromkeys(folder.resolve() for folder in folders)))}, and " if folders else ""
    )
    return f": it is looked for {beside}among the installed packages"


def import_callable(spec: str, what: str) -> Any:
    """Return the callable that ``spec`` names. Raises `ConfigError`."""
    target = import_named(spec, what, "function")
    if not callable(target):
        raise ConfigError(f"the {what} {spec!r} is a {type(target).__name__}, not a function")
    return target
