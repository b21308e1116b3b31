"""Optional parts of the package. `needs` reports a missing extra and the command that installs it.

A module that depends on an extra imports the extra's packages inside ``with needs("NAME"):``. If a clone's ./dev script
started this program, the commands in error texts use that script, because only the script finds the package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError


class MissingExtra(ConfigError, ImportError):  # type: ignore[misc]  # both have a `path`
    """A Python package of an optional extra is not installed."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Context in which a module imports the packages of an extra. Raises `MissingExtra` with the install command if a
    package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of roundelay itself is a bug, and no extra would add the module.
        if error.name is None or error.name.partition(".")[0] == "roundelay" or isinstance(error, MissingExtra):
            raise
        raise MissingExtra(describe_missing(extra, error.name)) from error


def describe_missing(extra: str, package: str) -> str:
    """Return a sentence that names the extra of a missing package, and the command that installs it."""
    return f"This needs the extra {extra} ({package} is not installed). Run: {how_to_add(extra)}"


def how_to_add(extra: str) -> str:
    """Return the command that installs an extra: with ./dev if a clone's script runs this program, else with pip."""
    script = find_dev_script(Path.cwd())
    return f"pip install 'roundelay[{extra}]'" if script is None else f"{script} add {extra}"


def name_command(folder: Path) -> str:
    """Return the command that starts this program from ``folder``: the clone's ./dev script, or the program's name."""
    script = find_dev_script(folder)
    return "roundelay" if script is None else f"{script} roundelay"


def find_dev_script(folder: Path) -> str | None:
    """Return the path of the clone's ./dev script, relative to ``folder``. None if the script did not start this
    program."""
    script = Path(__file__).resolve().parents[1] / "dev"
    if "ROUNDELAY_DEV" not in os.environ or not script.is_file():
        return None
    path = os.path.relpath(script, folder.resolve())
    return path if os.sep in path else f"./{path}"
