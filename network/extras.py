"""Optional parts of the package: `needs` names the extra that is missing, and the command that adds it.

A module that leans on an extra imports it inside of ``with needs("NAME"):``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ConfigError


class MissingExtra(ConfigError, ImportError):  # type: ignore[misc]  # both have a `path`
    """An optional part is not installed."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import packages of an extra. Raise `MissingExtra` with the command to run where one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "roundelay" or isinstance(error, MissingExtra):
            raise
        raise MissingExtra(describe_missing(extra, error.name)) from error


def describe_missing(extra: str, package: str) -> str:
    """Say which extra a package belongs to, and how it is added."""
    return f"This needs the extra {extra} ({package} is not installed). Run: {how_to_add(extra)}"


def how_to_add(extra: str) -> str:
    """Return the one command that adds an extra: ./dev of a clone that ./dev runs, else pip."""
    return f"./dev add {extra}" if "ROUNDELAY_DEV" in os.environ else f"pip install 'roundelay[{extra}]'"
