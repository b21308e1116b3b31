"""Reads scenario files strictly: every step and expectation knows its line, every name is somebody's.

`load_scenario` reads a file, `make_scenario` a mapping of Python's. An unknown key, a wrong value or the name of nobody is a `ConfigError` with file,
line and the nearest known one. It runs nothing: `scenario` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roundelay.network.config import YamlNode, bind, load_yaml
from roundelay.scenario.expectations import Expectation, MessageFilter
from roundelay.scenario.spec import ACTIONS, HUB, MembershipStep, ScenarioHead, Step, WaitStep


@dataclass(frozen=True)
class PlacedStep:
    """A step, where it stands, and the steps inside of it: one list for `repeat`, one for each branch of `parallel`."""

    step: Step
    place: YamlNode
    inner: tuple[tuple[PlacedStep, ...], ...] = ()


@dataclass(frozen=True)
class PlacedExpectation:
    expectation: Expectation
    place: YamlNode


@dataclass(frozen=True)
class Scenario:
    """A scenario as it was read. ``node`` is its file's root."""

    head: ScenarioHead
    steps: tuple[PlacedStep, ...]
    expectations: tuple[PlacedExpectation, ...]
    node: YamlNode = field(repr=False)

    @property
    def name(self) -> str:
        return self.head.scenario

    @property
    def path(self) -> Path:
        return self.node.path

    @property
    def participants(self) -> list[str]:
        return [*self.head.agents, *self.head.people]

    def find_node(self, key: Literal["agents", "threads"], name: str) -> YamlNode:
        """Where an agent or a thread stands in the file."""
        named = self.node.value[key] if isinstance(self.node.value, dict) else self.node
        return named.value[name] if isinstance(named.value, dict) else named


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises `ConfigError`."""
    return read_scenario(load_yaml(path))


def make_scenario(value: Mapping[str, Any], path: Path = Path("scenario.yaml")) -> Scenario:
    """Make a scenario of plain values, in the form of the file; files that it names are looked for beside ``path``. Raises `ConfigError`."""
    return read_scenario(as_node(value, path))


def read_scenario(root: YamlNode) -> Scenario:
    """Read a scenario from a node. Raises `ConfigError`."""
    if not isinstance(root.value, dict):
        raise root.error("a scenario is a mapping: `scenario: its name`, agents, people, steps, expect")
    rest = {key: node for key, node in root.value.items() if key not in ("steps", "expect")}
    head = bind(ScenarioHead, YamlNode(rest, root.path, root.line))
    steps = tuple(_read_steps(root.value["steps"])) if "steps" in root.value else ()
    expected = _list_of(root.value["expect"], "expect") if "expect" in root.value else []
    expectations = tuple(PlacedExpectation(bind(Expectation, node), node) for node in expected)
    if not steps:
        raise root.error('a scenario has "steps": at least one, or nothing happens')
    if not expectations:
        raise root.error('a scenario has "expect": without an expectation it could not fail')
    scenario = Scenario(head, steps, expectations, root)
    _check_names(scenario)
    return scenario


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
        keys["parallel"] = YamlNode(True, node.path, node.line)
    elif "repeat" in keys and isinstance(keys["repeat"].value, dict):
        repeat = dict(keys["repeat"].value)
        if "steps" not in repeat:
            raise keys["repeat"].error('"repeat" has "steps": what is repeated')
        inner = (tuple(_read_steps(repeat.pop("steps"))),)
        keys["repeat"] = YamlNode(repeat, node.path, keys["repeat"].line)
    return PlacedStep(bind(Step, YamlNode(keys, node.path, node.line)), node, inner)


def as_node(value: Any, path: Path) -> YamlNode:
    """Plain values as a node, for what is read from nodes."""
    if isinstance(value, Mapping):
        return YamlNode({str(key): as_node(item, path) for key, item in value.items()}, path, 1)
    if isinstance(value, list | tuple):
        return YamlNode([as_node(item, path) for item in value], path, 1)
    return YamlNode(str(value) if isinstance(value, Path) else value, path, 1)


# --- names


def _check_names(scenario: Scenario) -> None:
    head, agents, people = scenario.head, list(scenario.head.agents), list(scenario.head.people)
    known = [*agents, *people]
    for agent_id in (HUB, *people):
        if agent_id in head.agents:
            raise scenario.find_node("agents", agent_id).error(
                f'"{agent_id}" means the hub itself; give the agent another id'
                if agent_id == HUB
                else f'"{agent_id}" is an agent and one of the people; give one of them another id'
            )
    for name, thread in head.threads.items():
        for member in thread.members:
            _need(member, known, scenario.find_node("threads", name), "participant")
    places = [*known, *head.threads]
    for placed in _all_steps(scenario.steps):
        step, place = placed.step, placed.place
        for agent_id in filter(None, (step.sender, step.disconnect)):
            _need(agent_id, known, place, "participant")
        for agent_id in filter(None, (step.kill, step.restart)):
            _need(agent_id, [*agents, HUB], place, "agent")
        for moved in (step.join, step.leave):
            if isinstance(moved, MembershipStep):
                _need(moved.who, known, place, "participant")
                _need(moved.thread, list(head.threads), place, "thread")
            elif moved is not None:
                _need(moved, known, place, "participant")
        for name in filter(None, (step.to, step.place)):
            _need_place(name, places, place)
        if isinstance(step.wait, WaitStep) and step.wait.message is not None:
            _check_filter(step.wait.message, known, places, place)
    for expected in scenario.expectations:
        _check_expectation(expected, known, agents, list(head.threads), places)


def _all_steps(steps: Iterable[PlacedStep]) -> Iterator[PlacedStep]:
    for placed in steps:
        yield placed
        for branch in placed.inner:
            yield from _all_steps(branch)


def _check_expectation(
    expected: PlacedExpectation, known: list[str], agents: list[str], threads: list[str], places: list[str]
) -> None:
    it, place = expected.expectation, expected.place
    filters: list[MessageFilter | None] = [it.message, it.never, it.count]
    if it.within is not None:
        filters += [it.within.message, it.within.after]
    if it.caused_by is not None:
        filters.append(it.caused_by.message)
        if isinstance(it.caused_by.root, str):
            _need(it.caused_by.root, known, place, "participant")
        else:
            filters.append(it.caused_by.root)
    filters += [part.when for part in (it.prompt, it.never_in_prompt) if part is not None]
    for wanted in filters:
        if wanted is not None:
            _check_filter(wanted, known, places, place)
    for part in (it.count, it.tool, it.prompt, it.never_in_prompt, it.cost, it.reaction):
        if part is not None and part.agent is not None:
            _need(part.agent, agents, place, "agent")
    if it.mod is not None and it.mod.asker is not None:
        _need(it.mod.asker, known, place, "participant")
    for hop in it.order or ():
        sender, _, rest = hop.partition(" -> ")
        _need(sender, known, place, "participant")
        _need_place(rest.partition(": ")[0], places, place)
    if it.thread is not None:
        _need_place(it.thread.id, threads, place, "thread")
        for member in it.thread.members:
            _need(member, known, place, "participant")


def _check_filter(wanted: MessageFilter, known: list[str], places: list[str], place: YamlNode) -> None:
    if wanted.sender is not None:
        _need(wanted.sender, known, place, "participant")
    for name in filter(None, (wanted.to, wanted.place)):
        _need_place(name, places, place)


def _need_place(name: str, places: list[str], place: YamlNode, what: str = "participant or thread") -> None:
    if name != "broadcast" and ":" not in name:
        _need(name, places, place, what)


def _need(name: str, known: list[str], place: YamlNode, what: str) -> None:
    if name in known or "{{" in name:
        return
    near = difflib.get_close_matches(name, known, n=1)
    told = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known) or 'nobody'}"
    raise place.error(f'no {what} "{name}" in this scenario; {told}')
