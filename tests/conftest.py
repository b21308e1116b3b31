"""What holds for every test: no setting of the machine gets in, no state of the user is touched, slow tests run on request."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from roundelay.garbage import OBJECTS_UNTIL_COLLECTED
from roundelay.network.ledger import memtable
from tests.support import forks
from tests.support.counts import note, pytest_terminal_summary

__all__ = ["note", "pytest_terminal_summary"]

# Bytecode is kept, whatever the machine says: each of the tests' hundreds of processes would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

gc.disable()  # until all is collected, of which nothing is garbage

# Examples are the same in every run; a slow machine is no failure. `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    forks.is_forking = not config.getoption("--full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    selected: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if item.get_closest_marker("full") else selected).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = selected


def pytest_collection_finish() -> None:
    """Let the garbage collector, which tests call too, pass over modules and thousands of tests, and look as seldom as in
    a command."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(OBJECTS_UNTIL_COLLECTED)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new directory for each test: by a count, as `mktemp` reads the names of all that were made before."""
    root = tmp_path_factory.mktemp("homes")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def placed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of a test are found in memory, some by the tables, and some are on their way: the processes that tests
    start have thousands in memory."""
    monkeypatch.setattr(memtable, "FLUSH_ROWS", 7)
    monkeypatch.setattr(memtable, "MIN_FLUSH_ENTRIES", 3)
    monkeypatch.setattr(memtable, "FLUSH_ENTRIES_PER_ROW", 4)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start as a user's do, not as forks of one that has been loaded: each command has a test that asks for it."""
    monkeypatch.setattr(forks, "is_forking", False)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> None:
    """No ROUNDELAY_ variable and no model's key comes in; tokens are saved in a directory of the test's own."""
    for name in os.environ:
        if name.startswith(("ROUNDELAY_", "OPENAI_")):
            monkeypatch.delenv(name)
    home = next(homes)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("ROUNDELAY_HOME", str(home))
