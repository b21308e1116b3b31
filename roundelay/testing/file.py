"""Read scenario files strictly. Every step and expectation records its line, and every name must exist.

`load_scenario` reads a file, and `make_scenario` reads a Python mapping. An unknown key, a wrong value or an unknown
name raises a `ConfigError` with the file, the line and the nearest known name. This module only reads; `run` runs
scenarios.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roundelay.agents.options import Strict
from roundelay.agents.team import AgentSpec, load_agents
from roundelay.network.addresses import BROADCAST
from roundelay.network.config import NodeConfig, YamlNode, bind, load_yaml, resolve_config
from roundelay.network.frames import Kind
from roundelay.testing.form import (
    ACTIONS,
    HUB,
    AgentChoice,
    DecideStep,
    Expectation,
    MembershipStep,
    MessagePattern,
    ScenarioHead,
    Step,
)


@dataclass(frozen=True)
class PlacedStep:
    """A step, its position in the file, and the lists of steps inside it.

    `repeat` has one list, `if` has one or two lists, and `parallel` has one list for each branch.
    """

    step: Step
    place: YamlNode
    inner: tuple[tuple[PlacedStep, ...], ...] = ()


@dataclass(frozen=True)
class PlacedExpectation:
    expectation: Expectation
    place: YamlNode


@dataclass(frozen=True)
class Scenario:
    """Scenario as read from a file. ``node`` is the root of the file's YAML.

    If the scenario names a node's file, ``config`` is the configuration in that file and ``specs`` are the node's
    agents.
    """

    head: ScenarioHead
    steps: tuple[PlacedStep, ...]
    expectations: tuple[PlacedExpectation, ...]
    node: YamlNode = field(repr=False)
    config: NodeConfig | None = None
    specs: Mapping[str, AgentSpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.head.scenario

    @property
    def path(self) -> Path:
        return self.node.path

    @property
    def participants(self) -> list[str]:
        return [*self.head.agents, *self.programs]

    @property
    def programs(self) -> dict[str, Kind]:
        """Participants that act only through steps, with their kinds."""
        head = self.head
        groups: tuple[tuple[Kind, tuple[str, ...]], ...] = (
            ("human", head.people),
            ("service", head.services),
            ("agent", head.programs),
        )
        return {name: kind for kind, names in groups for name in names}

    def find_node(self, key: Literal["agents", "threads"], name: str) -> YamlNode:
        """Return the YAML node of an agent or a thread. For an agent that only the node's file declares, return the
        field `node`.
        """
        root = self.node.value if isinstance(self.node.value, dict) else {}
        named = root[key].value if key in root else None
        if isinstance(named, dict) and name in named:
            return named[name]
        return root.get("node", self.node)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises `ConfigError`."""
    return read_scenario(load_yaml(path))


def make_scenario(value: Mapping[str, Any], path: Path = Path("scenario.yaml")) -> Scenario:
    """Create a scenario from plain values in the format of a file. Paths are relative to ``path``. Raises
    `ConfigError`.
    """
    return read_scenario(as_node(value, path))


def read_scenario(root: YamlNode) -> Scenario:
    """Read a scenario from the root of its YAML. Raises `ConfigError`."""
    if not isinstance(root.value, dict):
        raise root.error("a scenario is a mapping: `scenario: its name`, agents, people, steps, expect")
    # Steps and expectations are validated one by one, so that each error names its own line.
    rest = {key: node for key, node in root.value.items() if key not in ("steps", "expect")}
    head = bind(ScenarioHead, YamlNode(rest, root.path, root.line))
    steps = tuple(_read_steps(root.value["steps"])) if "steps" in root.value else ()
    expected = _list_of(root.value["expect"], "expect") if "expect" in root.value else []
    expectations = tuple(PlacedExpectation(bind(Expectation, node), node) for node in expected)
    if not steps:
        raise root.error('a scenario needs "steps", with at least one step')
    if not expectations:
        raise root.error('a scenario has "expect": without an expectation it could not fail')
    config, specs = _read_node(head.node, root.value["node"]) if head.node is not None else (None, {})
    # The scenario's own entries take precedence, so that one agent of the node can get another model.
    agents = {**{agent_id: AgentChoice() for agent_id in specs}, **head.agents}
    head = head.model_copy(update={"agents": agents})
    scenario = Scenario(head, steps, expectations, root, config, specs)
    _check_names(scenario)
    return scenario


def _read_node(file: Path, node: YamlNode) -> tuple[NodeConfig, dict[str, AgentSpec]]:
    path = node.path.parent / file
    if not path.is_file():
        raise node.error(f"the node's file {path} does not exist")
    config, _ = resolve_config(path, {}, {})
    return config, {spec.id: spec for spec in load_agents(config.agents)}


def _list_of(node: YamlNode, key: str) -> list[YamlNode]:
    if not isinstance(node.value, list):
        raise node.error(f'"{key}" must be a list (`- item` lines)')
    return node.value


def _read_steps(node: YamlNode) -> Iterator[PlacedStep]:
    for item in _list_of(node, "steps"):
        yield _read_step(item)


def _read_step(node: YamlNode) -> PlacedStep:
    if not isinstance(node.value, dict):
        raise node.error(f"a step is a mapping with one of {', '.join(ACTIONS)}")
    keys = dict(node.value)
    inner: tuple[tuple[PlacedStep, ...], ...] = ()
    if "parallel" in keys:
        branches = _list_of(keys["parallel"], "parallel")
        inner = tuple(
            tuple(_read_steps(branch)) if isinstance(branch.value, list) else (_read_step(branch),)
            for branch in branches
        )
        # The branches have been read already. The value True marks the step as `parallel`.
        keys["parallel"] = YamlNode(True, node.path, node.line)
    elif "repeat" in keys and isinstance(keys["repeat"].value, dict):
        repeat = dict(keys["repeat"].value)
        if "steps" not in repeat:
            raise keys["repeat"].error('"repeat" needs "steps", the steps to repeat')
        inner = (tuple(_read_steps(repeat.pop("steps"))),)
        keys["repeat"] = YamlNode(repeat, node.path, keys["repeat"].line)
    elif "if" in keys:
        if "then" not in keys:
            raise node.error('"if" has "then": the steps that are done if it is so')
        branches = [keys.pop(name) for name in ("then", "else") if name in keys]
        inner = tuple(tuple(_read_steps(branch)) for branch in branches)
    return PlacedStep(bind(Step, YamlNode(keys, node.path, node.line)), node, inner)


def as_node(value: Any, path: Path) -> YamlNode:
    """Convert plain values to a YAML node, for functions that read YAML nodes."""
    if isinstance(value, Mapping):
        return YamlNode({str(key): as_node(item, path) for key, item in value.items()}, path, 1)
    if isinstance(value, list | tuple):
        return YamlNode([as_node(item, path) for item in value], path, 1)
    return YamlNode(str(value) if isinstance(value, Path) else value, path, 1)


# --- names


def _check_names(scenario: Scenario) -> None:
    head = scenario.head
    speakers = [*head.people, *head.services, *head.programs]
    for agent_id in (HUB, *speakers):
        if agent_id in head.agents:
            raise scenario.find_node("agents", agent_id).error(
                f'"{agent_id}" means the hub itself; give the agent another id'
                if agent_id == HUB
                else f'"{agent_id}" is an agent and one of {_group_of(scenario, agent_id)}; give one of them another id'
            )
    for agent_id in speakers:
        if speakers.count(agent_id) > 1:
            raise scenario.node.error(f'"{agent_id}" is listed twice among people, services and programs. List it once')
    for agent_id in head.operators:
        if agent_id not in (*head.people, *head.services):
            raise scenario.node.error(f'the operator "{agent_id}" is not listed under people or services')
    for agent_id, choice in head.agents.items():
        if choice.file is None and choice.script is None and agent_id not in scenario.specs:
            at_node = f", or be an agent of {head.node}" if head.node is not None else ""
            raise scenario.find_node("agents", agent_id).error(f"must have exactly one of file, script{at_node}")
    names = _Names(scenario)
    for name, thread in scenario.head.threads.items():
        names.need_participants(scenario.find_node("threads", name), *thread.members)
    for placed in _all_steps(scenario.steps):
        names.check_step(placed.step, placed.place)
    for expected in scenario.expectations:
        names.check_expectation(expected.expectation, expected.place)


def _group_of(scenario: Scenario, agent_id: str) -> str:
    return {"human": "the people", "service": "the services", "agent": "the programs"}[scenario.programs[agent_id]]


def _all_steps(steps: Iterable[PlacedStep]) -> Iterator[PlacedStep]:
    for placed in steps:
        yield placed
        for branch in placed.inner:
            yield from _all_steps(branch)


def _all_models(value: object) -> Iterator[Strict]:
    """Yield all models in a value, including the value itself."""
    if isinstance(value, Strict):
        yield value
        for name in type(value).model_fields:
            yield from _all_models(getattr(value, name))


class _Names:
    """Checks all names in a scenario. An unknown name raises a `ConfigError` with its line.

    A name with ``{{`` is checked later, when it is rendered.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._agents = list(scenario.head.agents)
        self._participants = scenario.participants
        self._threads = list(scenario.head.threads)

    def check_step(self, step: Step, place: YamlNode) -> None:
        self.need_participants(place, step.sender, step.disconnect)
        for agent_id in (step.kill, step.restart):
            self._need(agent_id, [*self._agents, HUB], place, "agent")
        for moved in (step.join, step.leave):
            if isinstance(moved, MembershipStep):
                self.need_participants(place, moved.who)
                self._need(moved.thread, self._threads, place, "thread")
            else:
                self.need_participants(place, moved)
        self._need_places(
            place, *([step.to] if isinstance(step.to, str) else step.to or ()), step.place, step.take, step.give
        )
        self.need_participants(place, *(step.exclude or ()))
        if isinstance(step.requires_response, list):
            self.need_participants(place, *step.requires_response)
        self._check_filters(step.wait, place)
        for part in (step.condition, step.repeat.until if step.repeat is not None else None):
            if isinstance(part, Expectation):
                self.check_expectation(part, place)
        if isinstance(step.decide, DecideStep):
            self._need(step.decide.agent, self._agents, place, "agent")

    def check_expectation(self, expected: Expectation, place: YamlNode) -> None:
        self._check_filters(expected, place)
        for part in _all_models(expected):
            named = getattr(part, "agent", None)
            for agent_id in named if isinstance(named, list) else [named]:
                self._need(agent_id, self._agents, place, "agent")
        for agent_id in expected.prompts.hold if expected.prompts is not None else ():
            self._need(agent_id, self._agents, place, "agent")
        if expected.caused_by is not None and isinstance(expected.caused_by.root, str):
            self.need_participants(place, expected.caused_by.root)
        if expected.mod is not None:
            self.need_participants(place, expected.mod.asker)
        for hop in expected.order or ():
            sender, _, rest = hop.partition(" -> ")
            self.need_participants(place, sender)
            self._need_places(place, rest.partition(": ")[0])
        if expected.thread is not None:
            if expected.thread.id != BROADCAST and ":" not in expected.thread.id:
                self._need(expected.thread.id, self._threads, place, "thread")
            self.need_participants(place, *expected.thread.members)

    def need_participants(self, place: YamlNode, *names: str | None) -> None:
        for name in names:
            self._need(name, self._participants, place, "participant")

    def _check_filters(self, value: object, place: YamlNode) -> None:
        for wanted in _all_models(value):
            if isinstance(wanted, MessagePattern):
                self.need_participants(place, wanted.sender)
                self._need_places(place, wanted.to, wanted.place)

    def _need_places(self, place: YamlNode, *names: str | None) -> None:
        for name in names:
            # A full address, such as `channel:x`, may name something that is created later in the run.
            if name != BROADCAST and ":" not in (name or ""):
                self._need(name, [*self._participants, *self._threads], place, "participant or thread")

    def _need(self, name: str | None, names: list[str], place: YamlNode, what: str) -> None:
        if name is None or name in names or "{{" in name:
            return
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known here: {', '.join(names) or 'nobody'}"
        raise place.error(f'no {what} "{name}" in this scenario; {advice}')
