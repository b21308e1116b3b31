"""Tests of the inputs of `roundelay replay`: the node's file applies as it did in the run, and runners may be made in
Python.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roundelay.agents.runner import AgentRunner
from roundelay.agents.team import build_runner
from roundelay.app import Network
from roundelay.network.config import Limits
from roundelay.network.errors import ConfigError
from roundelay.runs.replay import load_replay, replay
from tests.support.agents import Person, make_runner
from tests.support.recorded import record, written

NODE = """
db: log.db
limits: {max_hops: 1}
visibility: current
agents:
  - id: ann
    instruction: You ask bob.
    model:
      rules:
        - when: {turn: 1}
          do:
            - send: {to: bob, text: 'Well?'}
  - id: bob
    instruction: You answer.
    on_text: reply
    model:
      rules:
        - when: {turn: 1}
          do:
            - say: I would say so.
"""


@pytest.fixture
async def recorded(tmp_path: Path) -> Path:
    """Record a network in which bob's answer exceeds the hop limit. Return the folder of the recorded network."""
    (tmp_path / "node.yaml").write_text(NODE, encoding="utf-8")
    runners = _build(tmp_path)

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await people["mia"].client.send_text("ann", "Ask bob")
        await written(network, lambda row: row.actor == "bob" and row.label == "finished")
        await written(network, lambda row: row.actor == "ann" and row.label == "finished")

    await record(tmp_path / "log.db", runners, talk, limits=Limits(max_hops=1), visibility="current")
    return tmp_path


def _build(folder: Path) -> list[AgentRunner]:
    from roundelay.agent_files import read_agents

    return [build_runner(spec) for spec in read_agents([folder / "node.yaml"])]


def play(folder: Path, files: list[Path], factory: str | None = None) -> list[str]:
    recording, runners, options = load_replay(folder / "log.db", files, factory, frozenset(), is_lenient=False)
    return [str(it) for it in replay(recording, runners, options).differences]


async def test_the_limits_of_the_nodes_file_hold(recorded: Path) -> None:
    assert await asyncio.to_thread(play, recorded, [recorded / "node.yaml"]) == []


async def test_without_them_what_was_refused_is_said_and_that_is_named(recorded: Path) -> None:
    _, _, agents = NODE.partition("visibility: current\n")
    (recorded / "agents.yaml").write_text(agents, encoding="utf-8")
    (difference,) = await asyncio.to_thread(play, recorded, [recorded / "agents.yaml"])
    assert 'bob to ann: "I would say so."' in difference


def make_nobody() -> list[AgentRunner]:
    return [make_runner("nobody", lambda request: None)]


def make_nonsense() -> object:
    return ["no runner"]


async def test_runners_may_come_from_a_function(recorded: Path) -> None:
    assert await asyncio.to_thread(play, recorded, [], f"{__name__}:make_nobody") == []


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("make_nobody", "it has no colon"),
        (f"{__name__}:missing", "has no attribute 'missing'"),
        (f"{__name__}:make_nonsense", "must return a list of runners"),
    ],
)
def test_a_function_that_gives_none_is_named(tmp_path: Path, factory: str, named: str) -> None:
    from roundelay.network.ledger.log_file import LogHead, encode_head

    (tmp_path / "log.db").write_bytes(encode_head(LogHead(epoch="e", name="n")) + b"\n")
    with pytest.raises(ConfigError, match=named):
        play(tmp_path, [], factory)
