"""Plan the agents of a test from agent files or scripts. A scenario can replace the model that an agent file declares.

For each start of an agent, its plan builds a new runner. Real models are refused unless the caller allows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roundelay.agents.models.model import ModelError
from roundelay.agents.models.tape import TapeModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import AgentSpec, ModelChoice, build_runner, load_agents
from roundelay.network.config import YamlNode
from roundelay.simulation.network import MakeAgent
from roundelay.testing.file import Scenario
from roundelay.testing.form import AgentChoice


@dataclass(frozen=True)
class AgentPlan:
    """Plan for building one agent. ``tape`` is the file with recorded model replies, if the agent uses a tape.

    ``choice`` is the agent's entry in the scenario, and ``node`` is the YAML node of that entry.
    """

    agent_id: str
    make: MakeAgent
    choice: AgentChoice | None = None
    node: YamlNode | None = None
    tape: Path | None = None
    tape_model: TapeModel | None = None


def plan_agents(
    scenario: Scenario, *, allows_real_models: bool = False, ignores_tapes: bool = False, is_live: bool = False
) -> dict[str, AgentPlan]:
    """Plan the agents of a scenario. Raises `ConfigError`.

    With ``ignores_tapes``, each agent asks the model in its own file, so that new tapes can be written. With
    ``is_live``, a real model is refused only when its agent starts, because the agent may already be online.
    """
    plans = {}
    for agent_id, choice in scenario.head.agents.items():
        plan = plan_agent(
            agent_id,
            choice,
            scenario.find_node("agents", agent_id),
            spec=scenario.specs.get(agent_id),
            allows_real_models=allows_real_models,
            ignores_tapes=ignores_tapes,
            is_live=is_live,
        )
        plans[agent_id] = plan
    return plans


def plan_agent(
    agent_id: str,
    choice: AgentChoice,
    node: YamlNode,
    *,
    spec: AgentSpec | None = None,
    allows_real_models: bool = False,
    ignores_tapes: bool = False,
    is_live: bool = False,
) -> AgentPlan:
    """Plan one agent, as `plan_agents` does. ``node`` is the agent's YAML node; paths are relative to its file.

    ``spec`` is the agent's entry in a node's file, for a choice without a file or a script.
    """
    spec = _read_spec(agent_id, choice, node, spec)
    tape: Path | None = None
    model: TapeModel | None = None
    if choice.model is not None and choice.model.replay is not None:
        tape = node.path.parent / choice.model.replay
        if not ignores_tapes:
            model = _open_tape(tape, node)
    elif choice.model is not None:
        # The scenario's model takes precedence over the file's, so that a test needs no separate agent file.
        spec = spec.model_copy(update={"model": choice.model})
    elif spec.model.replay is not None:  # all restarts of the agent share one tape
        model = _open_tape(spec.path.parent / spec.model.replay, node)
    is_refused = model is None and _is_real(spec.model) and not allows_real_models

    def make() -> SimpleAgentRunner:
        if is_refused:
            raise node.error(
                f"the agent {agent_id} would ask a real model; set another model here "
                "(model: {rules: ...} or model: {replay: TAPE}), or allow real models with --real-models "
                "(in pytest: the mark roundelay_real_models)"
            )
        return build_runner(spec, model=model)

    # Build the agent once now, so that a refused model is reported before the scenario runs.
    if is_refused and not is_live:
        make()
    return AgentPlan(agent_id, make, choice, node, tape, model)


def _read_spec(agent_id: str, choice: AgentChoice, node: YamlNode, of_node: AgentSpec | None) -> AgentSpec:
    if choice.file is not None:
        path = node.path.parent / choice.file
        if not path.is_file():
            raise node.error(f"the agent file {path} does not exist")
        specs = {spec.id: spec for spec in load_agents(path)}
        if agent_id not in specs:
            raise node.error(f'{path} has no agent "{agent_id}"; it has {", ".join(specs)}')
        of_node = specs[agent_id]
    script = choice.script
    if script is None:
        if of_node is None:
            raise node.error("must have exactly one of file, script")
        return of_node.model_copy(update={"visibility": choice.visibility}) if choice.visibility else of_node
    spec = AgentSpec(
        id=agent_id,
        model=ModelChoice(script=script) if isinstance(script, str) else ModelChoice(rules=script),
        visibility=choice.visibility or "people",
        **{name: getattr(choice, name) for name in AgentChoice.SCRIPTED},
    )
    spec._node = node
    return spec


def _open_tape(path: Path, node: YamlNode) -> TapeModel:
    try:
        return TapeModel(path)
    except ModelError as error:
        raise node.error(str(error)) from error


def _is_real(choice: ModelChoice) -> bool:
    # A script with a real model as its fallback may ask that model at any time.
    if choice.fallback is not None and _is_real(choice.fallback):
        return True
    return choice.openai is not None or choice.local is not None
