"""Counts that tests report. Each count is printed with its test and again at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Note = Callable[..., None]
_LINES: list[str] = []


@pytest.fixture
def note(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Note:
    """Report what a test counted, for example ``note(kills=20, lost=0)``."""

    def say(**counts: object) -> None:
        line = f"{request.node.name}: " + ", ".join(
            f"{name.replace('_', ' ')} {count}" for name, count in counts.items()
        )
        print(line)
        _LINES.append(line)
        for name, count in counts.items():
            record_property(name, count)

    return say


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _LINES:
        terminalreporter.section("what was counted")
        for line in _LINES:
            terminalreporter.write_line(line)
