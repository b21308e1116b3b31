"""Performs the steps of a scenario on a stage: a simulated network, or one that runs. Knows the variables, not what is expected.

`Stage` is what a step may do to a network. A step that cannot be done ends the run with `StepFailed`, which says where it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roundelay.agents.channels import join_channel
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.config import YamlNode
from roundelay.network.errors import RoundelayError
from roundelay.scenario.expectations import MessageFilter
from roundelay.scenario.file import PlacedStep, Scenario
from roundelay.scenario.judge import describe_plain
from roundelay.scenario.spec import HUB, MembershipStep, Step, WaitStep

Fits = Callable[[MessageFilter, AnyMessage], bool]

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


class Stage(Protocol):
    """A network as steps see it. Methods raise `RoundelayError` for what cannot be done, `TimeoutError` when the time is over."""

    def client_of(self, participant: str) -> NetworkClient: ...

    async def idle(self, at_most_s: float) -> None: ...

    async def wait_for(self, wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage: ...

    async def kill(self, name: str) -> None: ...

    async def restart(self, name: str) -> None: ...

    async def disconnect(self, participant: str) -> None: ...

    async def join(self, participant: str) -> None: ...

    async def leave(self, participant: str) -> None: ...


ANSWER_S = 60.0
"""How long a step waits for the hub's answer to what is sent, in the scenario's time."""


class StepFailed(Exception):
    """A step could not be done. ``place`` is where it stands."""

    def __init__(self, place: YamlNode, reason: str) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason
        self.step = describe_plain(place)


class Variables:
    """The variables of one run, and texts with them filled in."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def render(self, text: str) -> str:
        """Fill in ``{{ name }}``. Raises `ValueError` for one that there is not."""
        if "{{" not in text and "{%" not in text:
            return text
        try:
            return _ENVIRONMENT.from_string(text).render(self.values)
        except (TemplateError, ArithmeticError, TypeError, LookupError, AttributeError, ValueError) as error:
            raise ValueError(f'"{text}" cannot be filled in: {error}') from error  # what the expressions in it raise

    def render_all(self, value: Any) -> Any:
        match value:
            case str():
                return self.render(value)
            case list():
                return [self.render_all(item) for item in value]
            case dict():
                return {key: self.render_all(item) for key, item in value.items()}
            case _:
                return value


class Steps:
    """The steps of one run. ``fits`` says whether a message is as a step wants it."""

    def __init__(self, scenario: Scenario, stage: Stage, variables: Variables, fits: Fits) -> None:
        self._scenario = scenario
        self._stage = stage
        self._variables = variables
        self._fits = fits
        self._waited_for: set[int] = set()

    async def perform(self, steps: Sequence[PlacedStep]) -> None:
        """Perform steps one after the other. Raises `StepFailed`."""
        for placed in steps:
            try:
                await self._perform(placed)
            except StepFailed:
                raise
            except TimeoutError as error:
                raise StepFailed(placed.place, _overdue(placed.step)) from error
            except (RoundelayError, ValueError) as error:
                code = error.code if isinstance(error, RoundelayError) else "wrong"
                raise StepFailed(placed.place, f"{code}: {error}") from error

    async def _perform(self, placed: PlacedStep) -> None:
        step, stage = placed.step, self._stage
        match step.action:
            case "send":
                await self._expect_refusal(placed, self._send(step))
            case "call":
                await self._expect_refusal(placed, self._call(step))
            case "wait":
                await self._wait(step)
            case "kill":
                await stage.kill(step.kill or HUB)
            case "restart":
                await stage.restart(step.restart or HUB)
            case "disconnect":
                await stage.disconnect(step.disconnect or "")
            case "join":
                await self._join(step.join)
            case "leave":
                await self._leave(step.leave)
            case "parallel":
                await self._parallel(placed)
            case "repeat":
                await self._repeat(placed)
            case _:
                self._variables.values |= self._variables.render_all(step.variables)

    # --- saying

    async def _expect_refusal(self, placed: PlacedStep, work: Any) -> None:
        wanted = placed.step.refused
        try:
            async with asyncio.timeout(ANSWER_S):
                await work
        except TimeoutError as error:
            told = f"the hub did not answer within {ANSWER_S:g} s; is it down, or is {placed.step.sender} disconnected?"
            raise StepFailed(placed.place, told) from error
        except RoundelayError as error:
            if wanted is None or error.code != wanted:
                raise
            return
        if wanted is not None:
            raise StepFailed(placed.place, f"it was taken, and was to be refused with {wanted}")

    async def _send(self, step: Step) -> None:
        render = self._variables.render
        client = self._stage.client_of(render(step.sender or ""))
        content = self._variables.render_all(step.send)
        options: dict[str, Any] = {"requires_response": step.requires_response}
        if step.reply_to is not None:
            original = self._find_saved(step.reply_to)
            sent = await client.reply(original, content, **options)
        else:
            sent = await client.send(self.address(render(step.to or step.place or "")), content, **options)
        if step.save is not None:
            saved = await self._stage.wait_for(lambda message: message.seq == sent.seq, 60)
            self._variables.values[step.save] = saved

    def _find_saved(self, name: str) -> AnyMessage:
        saved = self._variables.values.get(name)
        if not isinstance(saved, AnyMessage):
            raise ValueError(f'reply_to "{name}": no step has saved a message under that name')
        return saved

    def address(self, name: str) -> str:
        """The address of a participant, of a thread of the scenario, or of what is one already."""
        if name in self._scenario.head.threads:
            return f"channel:{name}"
        return name if ":" in name or name == "broadcast" else f"agent:{name}"

    async def _call(self, step: Step) -> None:
        client = self._stage.client_of(self._variables.render(step.sender or ""))
        value = await client.call(self._variables.render(step.call or ""), self._variables.render_all(step.args or {}))
        if step.save is not None:
            self._variables.values[step.save] = value

    # --- waiting

    async def _wait(self, step: Step) -> None:
        wait = step.wait
        if wait == "idle":
            wait = WaitStep.model_validate({"until": "idle"})
        if not isinstance(wait, WaitStep):
            await asyncio.sleep(float(wait or 0))
        elif wait.duration is not None:
            await asyncio.sleep(wait.duration)
        elif wait.message is not None:
            wanted = wait.message
            found = await self._stage.wait_for(
                lambda message: message.seq not in self._waited_for and self._fits(wanted, message), wait.at_most
            )
            self._waited_for.add(found.seq)  # the next wait is for another one
        else:
            await self._stage.idle(wait.at_most)

    # --- coming and going

    async def _join(self, moved: str | MembershipStep | None) -> None:
        if isinstance(moved, MembershipStep):
            await join_channel(self._stage.client_of(moved.who), moved.thread)
        elif moved is not None:
            await self._stage.join(moved)
            await self.join_threads(moved)

    async def join_threads(self, participant: str) -> None:
        """A participant takes its place in the threads that name it."""
        for name, thread in self._scenario.head.threads.items():
            if participant in thread.members:
                await join_channel(self._stage.client_of(participant), name)

    async def _leave(self, moved: str | MembershipStep | None) -> None:
        if isinstance(moved, MembershipStep):
            await self._stage.client_of(moved.who).call("channels.leave", {"name": moved.thread})
        elif moved is not None:
            await self._stage.leave(moved)

    # --- groups

    async def _parallel(self, placed: PlacedStep) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for branch in placed.inner:
                    group.create_task(self.perform(branch))
        except BaseExceptionGroup as failures:
            failed = failures.subgroup(StepFailed)
            first = failed.exceptions[0] if failed is not None else failures.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from failures

    async def _repeat(self, placed: PlacedStep) -> None:
        repeat = placed.step.repeat
        assert repeat is not None
        for value in repeat.each if repeat.each is not None else range(1, (repeat.times or 0) + 1):
            if repeat.var is not None:
                self._variables.values[repeat.var] = value
            await self.perform(placed.inner[0])


def _overdue(step: Step) -> str:
    wait = step.wait if isinstance(step.wait, WaitStep) else WaitStep.model_validate({"until": "idle"})
    what = "no such message came" if wait.message is not None else "it was not idle"
    return f"{what} within {wait.at_most:g} s"
