"""Perform the steps of a scenario on a stage. This module handles variables, but not expectations.

A failed step ends the run with `StepFailed`, which contains the step's position in the file.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from roundelay.agents.approvals import read_deciders
from roundelay.agents.models.scripted import map_texts
from roundelay.network.addresses import channel_address, complete_address, direct_thread
from roundelay.network.client import AnyMessage
from roundelay.network.config import YamlNode
from roundelay.network.errors import RoundelayError
from roundelay.network.text import shorten
from roundelay.runs.open_items import describe_open
from roundelay.testing.file import PlacedExpectation, PlacedStep, Scenario
from roundelay.testing.form import (
    ENVIRONMENT,
    HUB,
    DecideStep,
    Expectation,
    MembershipStep,
    ModExpectation,
    Step,
    WaitStep,
)
from roundelay.testing.judge import Judge, Matcher, describe_plain
from roundelay.testing.stage import Stage, client_of

_ONE_EXPRESSION = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)

ANSWER_S = 60.0
"""Maximum time that a step waits for an answer of the hub, in seconds of the scenario's clock."""


MAX_SHOWN_STEP = 160
"""Maximum number of characters of a failed step in the report. A step may contain many other steps."""


def _may_be_decided_by(request: AnyMessage, agent_id: str) -> bool:
    """Return whether a person may decide a request. If the request names approvers, the person must be an approver and
    read the request's thread."""
    deciders = read_deciders(request)
    is_here = request.kind != "direct" or request.to == f"agent:{agent_id}"
    return deciders is None or (agent_id in deciders and is_here)


class StepFailed(Exception):
    """Raised for a failed step. ``place`` is the step's position in the file, and ``what`` describes the step."""

    def __init__(self, place: YamlNode, reason: str, what: str | None = None) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason
        self.what = what or f"step {shorten(describe_plain(place), MAX_SHOWN_STEP)}"


class Variables:
    """Variables of one run, and the rendering of texts with these variables."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def render(self, text: str) -> str:
        """Replace ``{{ name }}`` in a text with the variable's value. Raises `ValueError` for an unknown name."""
        # Most texts have no variables. Skip the template, which would cost more than the rest of the step.
        if "{{" not in text and "{%" not in text:
            return text
        try:
            return ENVIRONMENT.from_string(text).render(self.values)
        except (TemplateError, ArithmeticError, TypeError, LookupError, AttributeError, ValueError) as error:
            # the expression may raise any of these errors
            raise ValueError(f'"{text}" cannot be rendered: {error}') from error

    def render_all(self, value: Any) -> Any:
        return map_texts(value, self.render)

    def work_out_all(self, value: Any) -> Any:
        """Render texts as `render_all` does. A text that is a single ``{{ expression }}`` is replaced with the
        expression's value."""
        return map_texts(value, self._work_out)

    def _work_out(self, text: str) -> Any:
        match = _ONE_EXPRESSION.fullmatch(text)
        if match is None:
            return self.render(text)
        self.render(text)  # raises an error that describes the problem in the expression
        return self._evaluate(match[1])

    def holds(self, expression: str) -> bool:
        """Return whether an expression over the variables is true. Raises `ValueError` for an unknown variable."""
        return bool(self._evaluate(expression))

    def _evaluate(self, expression: str) -> Any:
        try:
            value = ENVIRONMENT.compile_expression(expression, undefined_to_none=False)(**self.values)
            bool(value)  # raises an error for an undefined variable
            return value
        except (TemplateError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f'"{expression}" cannot be worked out: {error}') from error


def explain_failure(place: YamlNode, error: RoundelayError | ValueError) -> StepFailed:
    """Return the failure of a step whose action was refused by the hub or the stage, or that has a wrong value."""
    return StepFailed(place, f"{error.code if isinstance(error, RoundelayError) else 'wrong'}: {error}")


async def ask_operation(stage: Stage, question: ModExpectation, variables: Variables) -> Any:
    """Call the operation that an expectation names. Raises `TimeoutError` if the hub does not answer."""
    async with asyncio.timeout(ANSWER_S):
        client = await stage.reader() if question.asker is None else client_of(stage, question.asker)
        return await client.call(variables.render(question.op), variables.work_out_all(question.args))


async def read_open_items(stage: Stage) -> dict[int, list[str]]:
    """Return lines that describe the open items of each conversation, by root. Conversations without open items are
    omitted."""
    reader, found = await stage.reader(), dict[int, list[str]]()
    for root in sorted({message.root for message in stage.messages}):
        items = await reader.open_items(root)
        if not items.is_quiet:
            found[root] = list(describe_open(items, stage.clock()))
    return found


class Steps:
    """Performer of the steps of one run."""

    def __init__(self, scenario: Scenario, stage: Stage, variables: Variables, matcher: Matcher) -> None:
        self._scenario = scenario
        self._stage = stage
        self._variables = variables
        self._matcher = matcher
        self._waited_for: set[int] = set()
        self._decided: set[tuple[int, str]] = set()

    async def perform(self, steps: Sequence[PlacedStep]) -> None:
        """Perform steps in order. Raises `StepFailed`."""
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
            case "decide":
                await self._decide(placed)
            case "take" | "give":
                await self._expect_refusal(placed, self._hold(step))
            case "if":
                await self._choose(placed)
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
                self._variables.values |= self._variables.work_out_all(step.variables)

    # --- sending

    async def _expect_refusal(self, placed: PlacedStep, work: Any) -> None:
        wanted = placed.step.refused
        try:
            async with asyncio.timeout(ANSWER_S):
                await work
        except TimeoutError as error:
            reason = (
                f"the hub did not answer within {ANSWER_S:g} s; is it down, or is {placed.step.sender} disconnected?"
            )
            raise StepFailed(placed.place, reason) from error
        except RoundelayError as error:
            if wanted is None or error.code != wanted:
                raise
            return
        if wanted is not None:
            raise StepFailed(placed.place, f"it was accepted, but should be refused with {wanted}")

    async def _send(self, step: Step) -> None:
        render = self._variables.render
        client = client_of(self._stage, render(step.sender or ""))
        content, needed = self._variables.render_all(step.send), step.requires_response
        options = {
            "conversation": render(step.conversation) if step.conversation is not None else None,
            "requires_response": self._variables.render_all(needed) if isinstance(needed, list) else needed,
            "exclude_agent_ids": self._variables.render_all(step.exclude),
        }
        if step.reply_to is not None:
            sent = [await client.reply(self._find_saved(step.reply_to), content, **options)]
        else:
            named = step.to if isinstance(step.to, list) else [step.to or step.place or ""]
            sent = [await client.send(self._find_address(render(name)), content, **options) for name in named]
        if step.save is not None:
            # The hub's answer contains only the sequence number, but later steps need the whole message.
            saved = [await self._stage.wait_for(_has_seq(message.seq), 60) for message in sent]
            self._variables.values[step.save] = saved if isinstance(step.to, list) else saved[0]

    def _find_saved(self, name: str) -> AnyMessage:
        saved = self._variables.values.get(name)
        if not isinstance(saved, AnyMessage):
            raise ValueError(f'reply_to "{name}": no step has saved a message under that name')
        return saved

    def _find_address(self, name: str) -> str:
        return channel_address(name) if name in self._scenario.head.threads else complete_address(name)

    async def _call(self, step: Step) -> None:
        client = client_of(self._stage, self._variables.render(step.sender or ""))
        args = self._variables.work_out_all(step.args or {})
        value = await client.call(self._variables.render(step.call or ""), args)
        if step.save is not None:
            self._variables.values[step.save] = value

    # --- waiting

    async def _wait(self, step: Step) -> None:
        wait = _as_wait(step)
        if wait.duration is not None:
            await asyncio.sleep(wait.duration)
        elif wait.message is not None:
            wanted = wait.message
            match = await self._stage.wait_for(
                lambda message: message.seq not in self._waited_for and self._matcher.fits(wanted, message),
                wait.at_most,
            )
            self._waited_for.add(match.seq)  # the next wait must match a different message
            if step.save is not None:
                self._variables.values[step.save] = match
        elif wait.until == "quiet":
            await self._wait_until_quiet(wait.at_most)
        else:
            await self._stage.idle(wait.at_most)

    async def _wait_until_quiet(self, at_most_s: float) -> None:
        reader, loop = await self._stage.reader(), asyncio.get_running_loop()
        until, checked = loop.time() + at_most_s, 0
        # Check again after new messages, because the end of one conversation may start another.
        while self._stage.messages and (newest := self._stage.messages[-1].seq) != checked:
            checked = newest
            for root in sorted({message.root for message in self._stage.messages}):
                found = await reader.wait_until_quiet(root, max(0.0, until - loop.time()))
                if not found.is_quiet:
                    lines = "\n  ".join(describe_open(found, self._stage.clock()))
                    raise ValueError(f"the conversation of #{root} was not quiet within {at_most_s:g} s:\n  {lines}")

    async def _decide(self, placed: PlacedStep) -> None:
        """Wait for a request for approval, and reply to it."""
        step = placed.step
        client = client_of(self._stage, self._variables.render(step.sender or ""))
        wanted = step.decide if isinstance(step.decide, DecideStep) else DecideStep(approve=True)

        def is_wanted(message: AnyMessage) -> bool:
            asked = (message.metadata or {}).get("approval")
            return (
                isinstance(asked, dict)
                and (message.seq, client.agent_id) not in self._decided
                and _may_be_decided_by(message, client.agent_id)
                and wanted.agent in (None, message.sender_id)
                and wanted.tool in (None, asked.get("tool"))
            )

        request = await self._stage.wait_for(is_wanted, wanted.at_most)
        if wanted.deny is not None:
            text = f"/deny {self._variables.render(wanted.deny)}"
        elif wanted.edit is not None:
            text = f"/edit {json.dumps(self._variables.work_out_all(wanted.edit), ensure_ascii=False)}"
        else:
            text = f"/approve {wanted.approve}" if isinstance(wanted.approve, str) else "/approve"
        await self._expect_refusal(placed, client.reply(request, text))
        # Store the person too, because the same request may need the approval of two people.
        self._decided.add((request.seq, client.agent_id))

    async def _hold(self, step: Step) -> None:
        """Start or end a takeover of a thread. The name of a participant means the direct thread with that
        participant."""
        render = self._variables.render
        client, name = client_of(self._stage, render(step.sender or "")), render(step.take or step.give or "")
        if name in self._scenario.participants:
            name = direct_thread(client.agent_id, name)
        elif name in self._scenario.head.threads:
            name = channel_address(name)
        await client.call("network.take" if step.take is not None else "network.give", {"thread_id": name})

    # --- joining and leaving

    async def _join(self, moved: str | MembershipStep | None) -> None:
        if isinstance(moved, MembershipStep):
            await client_of(self._stage, moved.who).join_channel(moved.thread)
        elif moved is not None:
            await self._stage.join(moved, self._scenario.programs.get(moved, "human"))
            await self.join_threads(moved)

    async def join_threads(self, participant: str) -> None:
        """Let a participant join the threads that list it as a member."""
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
            # Raise the failed step, which names its position. The other branches only report that they were cancelled.
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
            # Check the condition after the steps, so that the steps are performed at least once.
            if repeat.until is not None and await self._holds(repeat.until, placed.place):
                return
        if repeat.until is not None:
            raise ValueError(f"the condition was still false after {repeat.times} times")

    async def _choose(self, placed: PlacedStep) -> None:
        assert placed.step.condition is not None
        then, *otherwise = placed.inner
        if await self._holds(placed.step.condition, placed.place):
            await self.perform(then)
        elif otherwise:
            await self.perform(otherwise[0])

    async def _holds(self, condition: str | Expectation, place: YamlNode) -> bool:
        """Return whether a condition is currently true."""
        if isinstance(condition, str):
            return self._variables.holds(condition)
        record = await self._stage.read_record()
        if condition.quiet is not None:
            record.open_items = await read_open_items(self._stage)
        if condition.mod is not None:
            try:
                record.values = [await ask_operation(self._stage, condition.mod, self._variables)]
            except TimeoutError as error:
                raise StepFailed(place, f"the hub did not answer within {ANSWER_S:g} s; is it down?") from error
        return Judge(record, self._matcher).judge(PlacedExpectation(condition, place)).holds


def _has_seq(seq: int) -> Callable[[AnyMessage], bool]:
    return lambda message: message.seq == seq


def _as_wait(step: Step) -> WaitStep:
    """Return the long form of a wait. For any other step, return a wait until idle, whose time limit also applies to
    that step."""
    if isinstance(step.wait, WaitStep):
        return step.wait
    return WaitStep.model_validate({"for": step.wait} if isinstance(step.wait, float) else {"until": "idle"})


def _overdue(step: Step) -> str:
    if step.decide is not None:
        at_most = step.decide.at_most if isinstance(step.decide, DecideStep) else DecideStep(approve=True).at_most
        return f"no such request for approval came within {at_most:g} s"
    wait = _as_wait(step)
    what = "no such message came" if wait.message is not None else "it was not idle"
    return f"{what} within {wait.at_most:g} s"
