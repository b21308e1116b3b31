"""Performs the steps of a scenario on a stage. Knows the variables, not what is expected.

A step that cannot be done ends the run with `StepFailed`, which says where it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roundelay.network.addresses import channel_address, complete_address
from roundelay.network.client import AnyMessage
from roundelay.network.config import YamlNode
from roundelay.network.errors import RoundelayError
from roundelay.testing.file import PlacedStep, Scenario
from roundelay.testing.form import HUB, MembershipStep, Step, WaitStep
from roundelay.testing.judge import Matcher, describe_plain, map_texts
from roundelay.testing.stage import Stage, client_of

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


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
        return map_texts(value, self.render)


def explain_failure(place: YamlNode, error: RoundelayError | ValueError) -> StepFailed:
    """What a hub, a stage or a wrong value has refused, as the failure of what stands there."""
    return StepFailed(place, f"{error.code if isinstance(error, RoundelayError) else 'wrong'}: {error}")


class Steps:
    """The steps of one run."""

    def __init__(self, scenario: Scenario, stage: Stage, variables: Variables, matcher: Matcher) -> None:
        self._scenario = scenario
        self._stage = stage
        self._variables = variables
        self._matcher = matcher
        self._waited_for: set[int] = set()

    async def perform(self, steps: Sequence[PlacedStep]) -> None:
        """Perform steps one after the other. Raises `StepFailed`."""
        for placed in steps:
            try:
                await self._perform(placed)
            except TimeoutError as error:
                raise StepFailed(placed.place, _overdue(placed.step)) from error
            except (RoundelayError, ValueError) as error:
                raise explain_failure(placed.place, error) from error

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
        client = client_of(self._stage, render(step.sender or ""))
        content, needs_answer = self._variables.render_all(step.send), step.requires_response
        if step.reply_to is not None:
            sent = await client.reply(self._find_saved(step.reply_to), content, requires_response=needs_answer)
        else:
            to = self._find_address(render(step.to or step.place or ""))
            sent = await client.send(to, content, requires_response=needs_answer)
        if step.save is not None:
            saved = await self._stage.wait_for(lambda message: message.seq == sent.seq, 60)
            self._variables.values[step.save] = saved

    def _find_saved(self, name: str) -> AnyMessage:
        saved = self._variables.values.get(name)
        if not isinstance(saved, AnyMessage):
            raise ValueError(f'reply_to "{name}": no step has saved a message under that name')
        return saved

    def _find_address(self, name: str) -> str:
        return channel_address(name) if name in self._scenario.head.threads else complete_address(name)

    async def _call(self, step: Step) -> None:
        client = client_of(self._stage, self._variables.render(step.sender or ""))
        value = await client.call(self._variables.render(step.call or ""), self._variables.render_all(step.args or {}))
        if step.save is not None:
            self._variables.values[step.save] = value

    # --- waiting

    async def _wait(self, step: Step) -> None:
        wait = _as_wait(step)
        if wait.duration is not None:
            await asyncio.sleep(wait.duration)
        elif wait.message is not None:
            wanted = wait.message
            found = await self._stage.wait_for(
                lambda message: message.seq not in self._waited_for and self._matcher.fits(wanted, message),
                wait.at_most,
            )
            self._waited_for.add(found.seq)  # the next wait is for another one
        else:
            await self._stage.idle(wait.at_most)

    # --- coming and going

    async def _join(self, moved: str | MembershipStep | None) -> None:
        if isinstance(moved, MembershipStep):
            await client_of(self._stage, moved.who).join_channel(moved.thread)
        elif moved is not None:
            await self._stage.join(moved)
            await self.join_threads(moved)

    async def join_threads(self, participant: str) -> None:
        """A participant takes its place in the threads that name it."""
        for name, thread in self._scenario.head.threads.items():
            if participant in thread.members:
                await client_of(self._stage, participant).join_channel(name)

    async def _leave(self, moved: str | MembershipStep | None) -> None:
        if isinstance(moved, MembershipStep):
            await client_of(self._stage, moved.who).call("channels.leave", {"name": moved.thread})
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
            first: BaseException = failed or failures
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


def _as_wait(step: Step) -> WaitStep:
    """The long form of a wait; of another step, which may take as long as a wait until all is idle, that one."""
    if isinstance(step.wait, WaitStep):
        return step.wait
    return WaitStep.model_validate({"for": step.wait} if isinstance(step.wait, float) else {"until": "idle"})


def _overdue(step: Step) -> str:
    wait = _as_wait(step)
    what = "no such message came" if wait.message is not None else "it was not idle"
    return f"{what} within {wait.at_most:g} s"
