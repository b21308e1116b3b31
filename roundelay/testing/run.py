"""Run scenarios: start the network, perform the steps, and evaluate each expectation.

`run_scenario` uses a simulation in this process. `run_live_scenario` uses a live hub.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roundelay.agents.models.tape import NamedModel, TapedTurn, fingerprint_request, write_tape
from roundelay.app import OWN_MODS, make_rights
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.errors import InvalidArguments, RoundelayError
from roundelay.network.mod import add_mod_folder, load_mods
from roundelay.simulation.faults import FaultPlan, inject_faults
from roundelay.simulation.links import Delay
from roundelay.simulation.network import LINK_DELAY, MODEL_DELAY, MakeAgent, Setting, run_simulated
from roundelay.simulation.virtual_time import Stalled
from roundelay.testing.agents import AgentPlan, plan_agents
from roundelay.testing.file import Scenario
from roundelay.testing.form import ThreadChoice
from roundelay.testing.judge import Judge, Matcher, Verdict
from roundelay.testing.live_stage import LiveStage
from roundelay.testing.record import RunRecord
from roundelay.testing.stage import SimulatedStage, Stage, client_of
from roundelay.testing.steps import (
    ANSWER_S,
    StepFailed,
    Steps,
    Variables,
    ask_operation,
    explain_failure,
    read_open_items,
)

_BEGINNING = "the network could not begin"


@dataclass(frozen=True)
class ScenarioResult:
    """Result of one run of a scenario. ``failure`` is the failed step, if any. After a failed step, no expectation is
    evaluated."""

    scenario: Scenario
    seed: int
    record: RunRecord
    verdicts: Sequence[Verdict] = ()
    failure: StepFailed | None = None
    problems: Sequence[str] = ()
    """Other reasons for a failed run, for example a tape that does not match, or an agent that crashed."""

    notes: Sequence[str] = ()
    """Notes that do not make the run fail, for example about unused turns of a tape."""

    faults: Sequence[str] = ()
    ledger: bytes = field(default=b"", repr=False)
    """Ledger of the run as JSON lines."""

    took_s: float = 0.0
    url: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.problems and all(verdict.holds for verdict in self.verdicts)


def run_scenario(
    scenario: Scenario,
    *,
    seed: int | None = None,
    agents: Mapping[str, MakeAgent] | None = None,
    allows_real_models: bool = False,
    updates_tapes: bool = False,
) -> ScenarioResult:
    """Run a scenario in this process. ``agents`` replaces some of the scenario's agents with your own runners.

    This function creates its own event loop, so do not call it inside another event loop. Raises `ConfigError` if the
    scenario cannot start.
    """
    chosen = scenario.head.seed if seed is None else seed
    plans = plan_agents(scenario, allows_real_models=allows_real_models or updates_tapes, ignores_tapes=updates_tapes)
    for agent_id, make in (agents or {}).items():
        plans[agent_id] = replace(plans[agent_id], make=make) if agent_id in plans else AgentPlan(agent_id, make)
    setting = _make_setting(scenario, chosen)

    async def enter() -> ScenarioResult:
        async with SimulatedStage(setting, plans) as stage:
            return replace(await play(scenario, stage), seed=chosen, ledger=stage.export())

    try:
        result = run_simulated(enter, setting)
    # The record ended with the event loop, so only the reason can be reported.
    except Stalled as error:
        failure = StepFailed(scenario.steps[-1].place, str(error))
        return ScenarioResult(scenario, chosen, RunRecord((), ()), failure=failure)
    # Write no tape after a failed step, because the tape would be incomplete.
    if updates_tapes and result.failure is None:
        _write_tapes(plans, result.record)
    return result


async def run_live_scenario(
    scenario: Scenario, url: str, *, token: str | None = None, allows_real_models: bool = False
) -> ScenarioResult:
    """Run a scenario against the network at ``url``, in real time.

    ``token`` is the owner's token. The default is the token of this machine's owner.

    Raises `ConfigError` if the scenario cannot start, and `ConnectError` or `NotAuthenticated` if the network cannot be
    joined.
    """
    plans = plan_agents(scenario, allows_real_models=allows_real_models, is_live=True)
    async with LiveStage(url, token, plans, scenario.head.operators) as stage:
        return replace(await play(scenario, stage), url=url)


async def play(scenario: Scenario, stage: Stage) -> ScenarioResult:
    """Perform the steps of a scenario on a stage, and evaluate its expectations."""
    began_s, began_at = time.perf_counter(), stage.clock()
    has_state = scenario.head.state is not None
    variables = Variables({**scenario.head.vars, **({"state": stage.state} if has_state else {})})
    matcher = Matcher(scenario.head.threads, variables.render)
    steps = Steps(scenario, stage, variables, matcher)
    faulting: asyncio.Task[list[str]] | None = None
    failure: StepFailed | None = None
    values: list[Any] = []
    still_open: Mapping[int, list[str]] = {}
    faults: list[str] = []
    try:
        faulting = await _begin(scenario, stage, steps)
        began_at = stage.clock()
        await steps.perform(scenario.steps)
        faults = await _end_faults(scenario, stage, faulting)
        values = await _ask_mods(scenario, stage, variables)
        if any(expected.expectation.quiet is not None for expected in scenario.expectations):
            still_open = await read_open_items(stage)
    except StepFailed as error:
        failure = error
    # Stop the remaining faults: otherwise they would change the network while its record is read.
    if faulting is not None:
        faulting.cancel()
    record = replace(await stage.read_record(), began_at=began_at, values=values, open_items=still_open)
    judge = Judge(record, matcher)
    # Skip the expectations after a failed step: most of them would fail too and hide the reason.
    verdicts = [judge.judge(expected) for expected in scenario.expectations] if failure is None else []
    tapes = [(plan.agent_id, plan.tape_model) for plan in stage.plans.values() if plan.tape_model is not None]
    broken = {
        f"the model of {reaction.agent_id}: {reaction.misconfigured}": None
        for reaction in record.reactions
        if reaction.misconfigured
    }
    problems = [*(problem for _, tape in tapes for problem in tape.problems), *stage.problems(), *broken]
    notes = [
        f"{agent_id} did not ask for all of its tape {tape.name}; turns left: {tape.unplayed}"
        for agent_id, tape in tapes
        # An agent that was already online did not use the tape of this run.
        if tape.unplayed and (tape.is_begun or isinstance(stage, SimulatedStage))
    ]
    took_s = time.perf_counter() - began_s
    return ScenarioResult(
        scenario, scenario.head.seed, record, verdicts, failure, problems, notes, faults, took_s=took_s
    )


async def _begin(scenario: Scenario, stage: Stage, steps: Steps) -> asyncio.Task[list[str]] | None:
    """Let the participants join the network and their threads. Then start the faults. Raises `StepFailed`."""
    head, place = scenario.head, scenario.node
    for name, wants in (("faults", "need"), ("state", "needs")):
        if getattr(head, name) is not None and not isinstance(stage, SimulatedStage):
            raise StepFailed(place, f"{name} {wants} a simulation; run it without --live", _BEGINNING)
    try:
        for participant, kind in scenario.programs.items():
            await stage.join(participant, kind)
        for agent_id, choice in head.agents.items():
            if choice.starts:
                await stage.join(agent_id)
        present = [name for name in scenario.participants if name in stage.people or name in stage.members]
        for name, thread in head.threads.items():
            # A member that joins in a later step cannot create the thread.
            for first in [who for who in thread.members if who in present][:1]:
                await _make_thread(client_of(stage, first), name, thread)
        for participant in present:
            await steps.join_threads(participant)
        if isinstance(stage, SimulatedStage):
            await stage.idle()
    except RoundelayError as error:
        raise StepFailed(place, f"{error.code}: {error}", _BEGINNING) from error
    except TimeoutError as error:
        raise StepFailed(place, "it was not ready within 60 s", _BEGINNING) from error
    if head.faults is None or not isinstance(stage, SimulatedStage):
        return None
    faults = head.faults
    plan = FaultPlan(faults.drops, faults.agent_kills, faults.hub_restarts, faults.within, faults.away)
    return asyncio.create_task(inject_faults(stage, plan))


async def _make_thread(client: NetworkClient, name: str, thread: ThreadChoice) -> None:
    """Create a channel. On a live network, an existing channel is joined and not changed."""
    try:
        await client.call("channels.create", {"name": name, "history": thread.history})
    except InvalidArguments:
        await client.join_channel(name)


async def _end_faults(scenario: Scenario, stage: Stage, faulting: asyncio.Task[list[str]] | None) -> list[str]:
    """Wait for the remaining faults and their effects. Return descriptions of all faults. Raises `StepFailed`."""
    faults = await faulting if faulting is not None else []
    if faults:
        try:
            await stage.idle(60)
        except TimeoutError as error:
            place = scenario.steps[-1].place
            raise StepFailed(place, "it was not idle within 60 s of the last fault") from error
    return faults


async def _ask_mods(scenario: Scenario, stage: Stage, variables: Variables) -> list[Any]:
    """Call the operations that the expectations name, in order, and return the results. Raises `StepFailed`."""
    values = []
    for expected in scenario.expectations:
        question = expected.expectation.mod
        if question is None:
            continue
        try:
            values.append(await ask_operation(stage, question, variables))
        except TimeoutError as error:
            raise StepFailed(expected.place, f"the hub did not answer within {ANSWER_S:g} s; is it down?") from error
        except (RoundelayError, ValueError) as error:
            raise explain_failure(expected.place, error) from error
    return values


def _make_setting(scenario: Scenario, seed: int) -> Setting:
    head, faults, config = scenario.head, scenario.head.faults, scenario.config or NodeConfig()
    add_mod_folder(config.folder)
    if config.rights is not None:
        make_rights(config, load_mods(config.mods, OWN_MODS))  # raises an error with the line of a wrong rule
    limits = {"max_hops": head.limits.hops, "max_root_messages": head.limits.messages}
    is_virtual = head.clock == "virtual"
    return Setting(
        seed=seed,
        is_virtual=is_virtual,
        mods=head.mods if scenario.config is None else config.mods,
        limits=config.limits.model_copy(update={name: value for name, value in limits.items() if value is not None}),
        visibility=head.visibility if scenario.config is None else config.visibility,
        operators=head.operators,
        rights=config.rights,
        quotas=config.quotas,
        state=head.state or {},
        link_delay=_make_delay(head.delays.link, LINK_DELAY if is_virtual else Delay()),
        model_delay=_make_delay(head.delays.model, MODEL_DELAY if is_virtual else Delay()),
        model_failure_rate=faults.model_failures if faults is not None else 0.0,
        max_tokens=head.limits.tokens,
    )


def _make_delay(value: float | tuple[float, float] | None, default: Delay) -> Delay:
    if value is None:
        return default
    low_s, high_s = value if isinstance(value, tuple) else (0.0, value)
    return Delay(low_s * 1000, high_s * 1000)


def _write_tapes(plans: Mapping[str, AgentPlan], record: RunRecord) -> None:
    """Write a tape for each agent that uses one, with the model's replies in this run."""
    for plan in plans.values():
        if plan.tape is None:
            continue
        turns = [
            TapedTurn.of(
                question.reply,
                run=question.request.reaction,
                turn=question.request.turn,
                request=fingerprint_request(NamedModel(question.model_name), question.request),
            )
            for question in record.asked
            if question.agent_id == plan.agent_id and question.reply is not None
        ]
        write_tape(plan.tape, plan.agent_id, turns)
