"""Builds the agents of a scenario: out of agent files, with another model where the scenario says so, or by a script.

`agents_of` gives for each a function that builds its runner, again for each restart. A model that really asks somebody is refused unless that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from roundelay.agents.models.model import Model, ModelError
from roundelay.agents.models.tape import TapeModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import AgentSpec, ModelChoice, build_runner, load_agents
from roundelay.network.config import YamlNode
from roundelay.scenario.file import Scenario
from roundelay.scenario.spec import AgentChoice

MakeRunner = Callable[[], SimpleAgentRunner]


@dataclass(frozen=True)
class AgentPlan:
    """How one agent of a scenario is built. ``tape`` is the file that its model is read from, if it is one."""

    agent_id: str
    make: MakeRunner
    tape: Path | None = None
    tape_model: TapeModel | None = None


def agents_of(
    scenario: Scenario, *, allows_real_models: bool = False, ignores_tapes: bool = False, is_live: bool = False
) -> dict[str, AgentPlan]:
    """Plan the agents. ``ignores_tapes``: each asks the model of its own file, to be taped anew. ``is_live``: one that asks a real model is
    refused only when it is started, since it may be online already. Raises `ConfigError`."""
    return {
        agent_id: plan_agent(
            agent_id,
            choice,
            scenario.find_node("agents", agent_id),
            allows_real_models=allows_real_models,
            ignores_tapes=ignores_tapes,
            is_live=is_live,
        )
        for agent_id, choice in scenario.head.agents.items()
    }


def plan_agent(
    agent_id: str,
    choice: AgentChoice,
    node: YamlNode,
    *,
    allows_real_models: bool = False,
    ignores_tapes: bool = False,
    is_live: bool = False,
) -> AgentPlan:
    """Plan one agent; as in `agents_of`. ``node`` is where it stands: files that it names are looked for there."""
    spec = _read_spec(agent_id, choice, node)
    tape: Path | None = None
    model: TapeModel | None = None
    if choice.model is not None and choice.model.replay is not None:
        tape = node.path.parent / choice.model.replay
        if not ignores_tapes:
            model = _open_tape(tape, node)
    elif choice.model is not None:
        spec = spec.model_copy(update={"model": choice.model})
    elif spec.model.replay is not None:  # its own file's: one tape for all its restarts
        model = _open_tape(spec.path.parent / spec.model.replay, node)
    make = _maker(spec, model)
    if model is None and _is_real(spec.model) and not allows_real_models:
        make = _refuser(agent_id, node)
        if not is_live:
            make()
    return AgentPlan(agent_id, make, tape, model)


def _refuser(agent_id: str, node: YamlNode) -> MakeRunner:
    def refuse() -> SimpleAgentRunner:
        raise node.error(
            f"the agent {agent_id} would ask a real model; give it another one here "
            "(model: {rules: ...} or model: {replay: TAPE}), or allow it with --real-models (in pytest: the mark roundelay_real_models)"
        )

    return refuse


def _maker(spec: AgentSpec, model: Model | None) -> MakeRunner:
    def make() -> SimpleAgentRunner:
        if model is None:
            return build_runner(spec)
        # Built with a model that costs nothing to make, which the tape then replaces.
        runner = build_runner(spec.model_copy(update={"model": ModelChoice(rules=[])}))
        runner.agent = replace(runner.agent, model=model)
        return runner

    return make


def _read_spec(agent_id: str, choice: AgentChoice, node: YamlNode) -> AgentSpec:
    if choice.file is not None:
        path = node.path.parent / choice.file
        if not path.is_file():
            raise node.error(f"the agent file {path} does not exist")
        specs = {spec.id: spec for spec in load_agents(path)}
        if agent_id not in specs:
            raise node.error(f'{path} has no agent "{agent_id}"; it has {", ".join(specs)}')
        found = specs[agent_id]
        if choice.visibility is not None:
            found = found.model_copy(update={"visibility": choice.visibility})
        return found
    script = choice.script
    model = ModelChoice(script=script) if isinstance(script, str) else ModelChoice(rules=script)
    spec = AgentSpec(
        id=agent_id,
        instruction=choice.instruction,
        model=model,
        description=choice.description,
        tools=choice.tools,
        react_to=choice.react_to,
        visibility=choice.visibility or "people",
        on_text=choice.on_text,
        on_new_message=choice.on_new_message,
        limits=choice.limits,
    )
    spec._node = node
    return spec


def _open_tape(path: Path, node: YamlNode) -> TapeModel:
    try:
        return TapeModel(path)
    except ModelError as error:
        raise node.error(str(error)) from error


def _is_real(choice: ModelChoice) -> bool:
    if choice.fallback is not None and _is_real(choice.fallback):
        return True
    return choice.openai is not None or choice.local is not None


def notes_of(plans: Mapping[str, AgentPlan], *, is_live: bool) -> list[str]:
    """What is left of the tapes: no fault, but perhaps less was asked than was meant. Of a live run only tapes that were begun, since an
    agent may have been online already."""
    return [
        f"{plan.agent_id} did not ask for all of its tape {plan.tape_model.name}; turns left: {plan.tape_model.unplayed}"
        for plan in plans.values()
        if plan.tape_model is not None and plan.tape_model.unplayed and (plan.tape_model.is_begun or not is_live)
    ]


def problems_of(plans: Mapping[str, AgentPlan]) -> list[str]:
    """What the tapes found to be other than recorded."""
    models = (plan.tape_model for plan in plans.values())
    return [problem for model in models if model is not None for problem in model.problems]
