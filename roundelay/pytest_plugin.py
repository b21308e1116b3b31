"""The pytest plugin of Roundelay: the fixture `network`, and scenario files (``*.scenario.yaml``) as tests.

pytest loads this plugin in every environment where Roundelay is installed. The plugin therefore imports Roundelay only
for tests that use it, and does not affect other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from roundelay.testing.networks import NetworkUnderTest
    from roundelay.testing.run import ScenarioResult

MARKS = (
    "roundelay(seed=0, clock='virtual', **setting): what the network of the fixture `network` is like",
    "roundelay_processes: the hub and each agent of the fixture `network` are real processes",
    "roundelay_real_models: agents of this test may ask real models",
)
SUFFIX = ".scenario.yaml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("roundelay", "networks of agents")
    group.addoption(
        "--scenario-seeds",
        type=int,
        default=1,
        metavar="N",
        help="run each scenario file with N seeds, from its own on",
    )
    parser.addini("roundelay_scenarios", "collect *.scenario.yaml as tests", type="bool", default=True)


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


@pytest.fixture
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NetworkUnderTest]:
    """Provide a network for this test, with `agent`, `person`, `idle`, `transcript` and `why`. The network runs in this
    process with virtual time unless a mark changes that."""
    from dataclasses import fields

    from roundelay.simulation.network import Setting
    from roundelay.testing.networks import NetworkUnderTest

    mark = request.node.get_closest_marker("roundelay")
    options: dict[str, Any] = dict(mark.kwargs) if mark is not None else {}
    if mark is not None and mark.args:
        raise pytest.UsageError(
            f"the mark roundelay of {request.node.nodeid}: name the setting, as in roundelay(seed=7)"
        )
    names = {"clock", *(option.name for option in fields(Setting))}
    clock = options.pop("clock", "virtual")
    if (unknown := sorted(options.keys() - names)) or clock not in ("virtual", "real"):
        what = f"setting {unknown[0]!r}" if unknown else f"clock {clock!r}, but 'virtual' and 'real'"
        raise pytest.UsageError(
            f"the mark roundelay of {request.node.nodeid}: there is no {what}; known are {sorted(names)}"
        )
    options.setdefault("is_virtual", clock == "virtual")
    in_processes = request.node.get_closest_marker("roundelay_processes") is not None
    network = NetworkUnderTest(
        Setting(**options),
        folder=request.path.parent,
        in_processes=tmp_path if in_processes else None,
        allows_real_models=request.node.get_closest_marker("roundelay_real_models") is not None,
    )
    with network:
        yield network


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Explain a failed ``said(...) in network.messages`` by listing the messages that were sent, most similar first."""
    import sys

    # Do not import the module here: this hook runs for failed comparisons of every project. A `Said` value exists only
    # if the module is loaded.
    testing = sys.modules.get("roundelay.testing.networks")
    if testing is None or not isinstance(left, testing.Said) or not isinstance(right, testing.Messages):
        return None
    if op not in ("in", "not in"):
        return None
    from roundelay.testing.record import describe_message

    if op == "not in":
        return [f"somebody said: {left}", *(f"  {describe_message(message)}" for message in right.matching(left))]
    near = right.matching(testing.Said(left.sender, left.to)) if left.text is not None else []
    lines = [f"nobody said: {left}", *(f"  nearest: {describe_message(message)}" for message in near)]
    return [*lines, "  what was said:", *(f"    {describe_message(message)}" for message in right)]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.name.endswith(SUFFIX) and parent.config.getini("roundelay_scenarios"):
        collected: pytest.Collector = ScenarioFile.from_parent(parent, path=file_path)
        return collected
    return None


class ScenarioFile(pytest.File):
    """A scenario file that yields one test per seed."""

    def collect(self) -> Iterator[pytest.Item]:
        from roundelay.network.errors import ConfigError
        from roundelay.testing.file import load_scenario

        try:
            first = load_scenario(self.path).head.seed
        except ConfigError:
            # Yield one failing test: an error during collection would stop all other tests.
            yield ScenarioItem.from_parent(self, name="read", seed=0)
            return
        for seed in range(first, first + max(1, self.config.getoption("--scenario-seeds"))):
            yield ScenarioItem.from_parent(self, name=f"seed-{seed}", seed=seed)


class ScenarioFailed(Exception):
    """Error of a scenario that did not pass."""

    def __init__(self, result: ScenarioResult) -> None:
        super().__init__(result.scenario.name)
        self.result = result


class ScenarioItem(pytest.Item):
    """A test that runs one scenario with one seed."""

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._seed = seed

    def runtest(self) -> None:
        from roundelay.testing.file import load_scenario
        from roundelay.testing.run import run_scenario

        result = run_scenario(load_scenario(self.path), seed=self._seed)
        if result.notes:
            self.add_report_section("call", "notes", "\n".join(result.notes))
        if not result.passed:
            raise ScenarioFailed(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **options: Any) -> Any:
        from roundelay.network.errors import ConfigError
        from roundelay.testing.report import describe_result

        if isinstance(excinfo.value, ScenarioFailed):
            return describe_result(excinfo.value.result)
        if isinstance(excinfo.value, ConfigError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **options)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.name}, seed {self._seed}"
