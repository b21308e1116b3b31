"""What `roundelay replay` is given: a ledger, files of agents or of a node, a factory of runners. Reads files, imports what they name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from roundelay.agents.runner import AgentRunner
from roundelay.agents.team import build_runner, name_model
from roundelay.network.config import load_yaml, resolve_config
from roundelay.network.errors import ConfigError
from roundelay.network.ledger_file import read_log
from roundelay.nodes.run_agents import is_node_file, read_agents
from roundelay.reading.recording import Recording
from roundelay.replay.run import ReplayOptions


def load_replay(
    ledger: Path, files: Sequence[Path], factory: str | None, run_tools: frozenset[str], *, is_lenient: bool
) -> tuple[Recording, list[AgentRunner], ReplayOptions]:
    """Give what `replay` takes. Models are named and never made: no key is asked for. Raises `ConfigError`, `LedgerError`."""
    if not files and factory is None:
        raise ConfigError("a replay runs agents: give their files, the node's file, or --agents MODULE:FUNCTION")
    recording = Recording(*read_log(ledger))
    runners = {runner.agent_id: runner for runner in _call_factory(factory)} if factory is not None else {}
    for spec in read_agents(files) if files else []:
        runners[spec.id] = build_runner(spec, model=name_model(spec))
    called = recording.list_tools()
    for name in sorted(run_tools.difference(called)):
        raise ConfigError(
            f"--run-tool {name}: nobody called that in {ledger}; called were: {', '.join(called) or 'none'}"
        )
    options = ReplayOptions(run_tools=run_tools, is_lenient=is_lenient)
    for file in files:
        if is_node_file(load_yaml(file)):
            config = resolve_config(file, {}, {})[0]
            options = ReplayOptions(config.limits, config.mods, config.visibility, run_tools, is_lenient)
    return recording, list(runners.values()), options


def _call_factory(factory: str) -> list[AgentRunner]:
    module, colon, name = factory.partition(":")
    try:
        if not colon:
            raise ImportError("it has no colon")
        made = getattr(import_module(module), name)()
    except Exception as error:  # importing and calling runs the user's code, which may raise anything
        raise ConfigError(
            f"--agents {factory} gives no runners ({type(error).__name__}: {error}); write module:function, importable from here"
        ) from error
    if not isinstance(made, list | tuple) or not all(isinstance(it, AgentRunner) for it in made):
        raise ConfigError(f"--agents {factory} must give a list of runners; it gave a {type(made).__name__}")
    return list(made)
