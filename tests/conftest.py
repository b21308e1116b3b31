"""Isolate every test from the machine's settings and from the user's files. Run the tests marked `full` only with
``--full``.
"""

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

# Write bytecode, whatever the environment says. Without bytecode, each of the hundreds of test processes would
# compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

gc.disable()  # Nothing that collection creates is garbage. `pytest_collection_finish` enables the collector again.

# Hypothesis uses the same examples in every run, and no deadline because a slow machine is not a failure.
# `--hypothesis-profile=explore` looks for new examples.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("full", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    forks.is_forking = not config.getoption("--full")
    if config.getoption("--full") and config.getoption("--hypothesis-profile", None) is None:
        settings.load_profile("full")


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
    """Freeze the objects that collection created, so that garbage collections skip modules and thousands of tests.
    Use the collection threshold of the commands.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(OBJECTS_UNTIL_COLLECTED)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a new directory path for each test. Paths are numbered because `mktemp` lists all existing directories on
    each call.
    """
    root = tmp_path_factory.mktemp("homes")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def placed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the flush thresholds of the memtable, so that a test's few rows cover all states: in memory, being
    flushed, and flushed. Processes that tests start keep the default thresholds and hold thousands of rows in memory.
    """
    monkeypatch.setattr(memtable, "FLUSH_ROWS", 7)
    monkeypatch.setattr(memtable, "MIN_FLUSH_ENTRIES", 3)
    monkeypatch.setattr(memtable, "FLUSH_ENTRIES_PER_ROW", 4)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start commands as a user does, and not as forks of a preloaded process. Each command has a test that uses this
    fixture.
    """
    monkeypatch.setattr(forks, "is_forking", False)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> None:
    """Remove all variables that start with ROUNDELAY_ or OPENAI_, and save tokens in a directory of this test."""
    for name in os.environ:
        if name.startswith(("ROUNDELAY_", "OPENAI_")):
            monkeypatch.delenv(name)
    home = next(homes)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("ROUNDELAY_HOME", str(home))
