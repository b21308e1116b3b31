"""What holds for every test: no setting of the machine gets in, no state of the user is touched, slow tests run on request."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.support.counts import note, pytest_terminal_summary

__all__ = ["note", "pytest_terminal_summary"]

# Examples are the same in every run; a slow machine is no failure. `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No ROUNDELAY_ variable and no model's key comes in; tokens are saved in a directory of the test's own."""
    for name in os.environ:
        if name.startswith(("ROUNDELAY_", "OPENAI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path_factory.mktemp("home")))
