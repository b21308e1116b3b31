"""Runs scenarios: the network of one, its steps, and the verdict on each expectation.

`run_scenario` runs it in this process, in a simulation of its own; `run_live_scenario` runs the same against a hub that is up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roundelay.agents.models.request_print import print_request
from roundelay.agents.models.tape import NamedModel, TapedTurn, write_tape
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.errors import RoundelayError
from roundelay.scenario.agents import AgentPlan, agents_of, notes_of, problems_of
from roundelay.scenario.file import Scenario
from roundelay.scenario.judge import Judge, Verdict
from roundelay.scenario.live_stage import LiveStage
from roundelay.scenario.record import RunRecord
from roundelay.scenario.simulated_stage import SimulatedStage
from roundelay.scenario.steps import ANSWER_S, Stage, StepFailed, Steps, Variables
from roundelay.simulation.links import Delay
from roundelay.simulation.network import Simulation
from roundelay.simulation.run import simulate
from roundelay.simulation.setting import LINK_DELAY, MODEL_DELAY, MakeAgent, Setting
from roundelay.simulation.virtual_time import Stalled


@dataclass(frozen=True)
class ScenarioResult:
    """What became of one run. ``failure`` is the step that could not be done; then nothing was judged."""

    scenario: Scenario
    seed: int
    record: RunRecord
    verdicts: Sequence[Verdict] = ()
    failure: StepFailed | None = None
    problems: Sequence[str] = ()
    """What makes it fail beside its expectations: a tape that does not fit, an agent that broke down."""

    notes: Sequence[str] = ()
    """What fails nothing and is worth knowing: turns of a tape that nobody asked for."""

    faults: Sequence[str] = ()
    ledger: bytes = field(default=b"", repr=False)
    """The ledger as JSON lines."""

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
    """Run a scenario in this process. ``agents`` replaces some of its agents by runners of one's own.

    Has an event loop of its own, so it is not called from inside of one. Raises `ConfigError` when the scenario cannot begin.
    """
    chosen = scenario.head.seed if seed is None else seed
    plans = agents_of(scenario, allows_real_models=allows_real_models or updates_tapes, ignores_tapes=updates_tapes)
    setting = _setting(scenario, chosen)
    made: dict[str, MakeAgent] = {agent_id: plan.make for agent_id, plan in plans.items()}
    made |= agents or {}

    async def enter(simulation: Simulation) -> ScenarioResult:
        return await play(scenario, chosen, SimulatedStage(scenario, simulation, made), plans)

    try:
        result = simulate(enter, setting)
    except Stalled as error:
        failure = StepFailed(scenario.steps[-1].place, str(error))
        return ScenarioResult(scenario, chosen, RunRecord((), ()), failure=failure)
    if updates_tapes and result.failure is None:
        _write_tapes(plans, result.record)
    return result


async def run_live_scenario(
    scenario: Scenario, url: str, *, token: str | None = None, allows_real_models: bool = False
) -> ScenarioResult:
    """Run a scenario against the network at ``url``, in real time. ``token`` is an operator's; without it this machine's owner joins.

    Raises `ConfigError` when the scenario cannot begin, `ConnectError` and `NotAuthenticated` when the network cannot be joined.
    """
    plans = agents_of(scenario, allows_real_models=allows_real_models, is_live=True)
    made: dict[str, MakeAgent] = {agent_id: plan.make for agent_id, plan in plans.items()}
    async with LiveStage(scenario, url, token, made) as stage:
        return await play(scenario, scenario.head.seed, stage, plans, url=url)


class ScenarioStage(Stage, Protocol):
    """What the engine asks of a stage beside its steps."""

    @property
    def ledger(self) -> bytes: ...

    def clock(self) -> int: ...

    async def begin(self, steps: Steps) -> None: ...

    async def finish(self) -> list[str]: ...

    async def reader(self) -> NetworkClient:
        """An operator's connection."""
        ...

    async def describe(self, began_at: int, values: Sequence[Any]) -> RunRecord: ...

    def problems(self) -> list[str]: ...


async def play(
    scenario: Scenario, seed: int, stage: ScenarioStage, plans: Mapping[str, AgentPlan], *, url: str | None = None
) -> ScenarioResult:
    """Act a scenario out on a stage, and judge."""
    began_s = time.perf_counter()
    threads, variables = list(scenario.head.threads), Variables(scenario.head.vars)
    failure: StepFailed | None = None
    values: list[Any] = []
    faults: list[str] = []
    steps = Steps(scenario, stage, variables, Judge(RunRecord((), ()), threads, variables.render).fits)
    began_at = stage.clock()
    try:
        await stage.begin(steps)
        began_at = stage.clock()
        await steps.perform(scenario.steps)
        faults = await stage.finish()
        values = await _ask_mods(scenario, stage, variables)
    except StepFailed as error:
        failure = error
    record = await stage.describe(began_at, values)
    verdicts: list[Verdict] = []
    if failure is None:
        judge = Judge(record, threads, variables.render)
        verdicts = [judge.judge(expected) for expected in scenario.expectations]
    broken = {f"the model of {it.agent_id}: {it.misconfigured}": None for it in record.reactions if it.misconfigured}
    problems = [*problems_of(plans), *stage.problems(), *broken]
    took_s = time.perf_counter() - began_s
    notes = notes_of(plans, is_live=url is not None)
    return ScenarioResult(scenario, seed, record, verdicts, failure, problems, notes, faults, stage.ledger, took_s, url)


async def _ask_mods(scenario: Scenario, stage: ScenarioStage, variables: Variables) -> list[Any]:
    """What the operations give that expectations name, in their order. Raises `StepFailed`."""
    values = []
    for expected in scenario.expectations:
        asked = expected.expectation.mod
        if asked is None:
            continue
        try:
            async with asyncio.timeout(ANSWER_S):
                client = await stage.reader() if asked.asker is None else stage.client_of(asked.asker)
                values.append(await client.call(variables.render(asked.op), variables.render_all(asked.args)))
        except TimeoutError as error:
            raise StepFailed(expected.place, f"the hub did not answer within {ANSWER_S:g} s; is it down?") from error
        except (RoundelayError, ValueError) as error:
            code = error.code if isinstance(error, RoundelayError) else "wrong"
            raise StepFailed(expected.place, f"{code}: {error}") from error
    return values


def _setting(scenario: Scenario, seed: int) -> Setting:
    head, faults = scenario.head, scenario.head.faults
    limits = {"max_hops": head.limits.hops, "max_root_messages": head.limits.messages}
    is_virtual = head.clock == "virtual"
    return Setting(
        seed=seed,
        is_virtual=is_virtual,
        mods=head.mods,
        limits=Limits(**{name: value for name, value in limits.items() if value is not None}),
        visibility=head.visibility,
        link_delay=_delay(head.delays.link, LINK_DELAY if is_virtual else Delay()),
        model_delay=_delay(head.delays.model, MODEL_DELAY if is_virtual else Delay()),
        model_failure_rate=faults.model_failures if faults is not None else 0.0,
        max_tokens=head.limits.tokens,
    )


def _delay(value: float | tuple[float, float] | None, default: Delay) -> Delay:
    if value is None:
        return default
    low_s, high_s = value if isinstance(value, tuple) else (0.0, value)
    return Delay(low_s * 1000, high_s * 1000)


def _write_tapes(plans: Mapping[str, AgentPlan], record: RunRecord) -> None:
    """Write what each taped agent's model answered in this run."""
    for plan in plans.values():
        if plan.tape is None:
            continue
        own = [asked for asked in record.asked if asked.agent_id == plan.agent_id and asked.reply is not None]
        turns = [
            TapedTurn.of(
                asked.reply,
                run=asked.request.reaction,
                turn=asked.request.turn,
                request=print_request(NamedModel(asked.model_name), asked.request),
            )
            for asked in own
            if asked.reply is not None
        ]
        write_tape(plan.tape, plan.agent_id, turns)
