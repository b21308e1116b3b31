"""Networks for tests without `async`: scripted agents, people who send and receive messages, and messages to check.

The pytest fixture `network` is a `NetworkUnderTest`, which also works without pytest. By default, the network is a
simulation in the test's process, where time passes only while the test waits. With ``in_processes``, the hub and each
agent are real processes. docs/scenarios.md shows examples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from roundelay.agents.models.scripted import Script, ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.display.text import sanitize_lines
from roundelay.network.addresses import channel_address, complete_address
from roundelay.network.client import AnyMessage
from roundelay.network.config import bind
from roundelay.network.errors import ConfigError
from roundelay.network.frames import is_id
from roundelay.runs.reading import RecordedReaction
from roundelay.simulation.network import MakeAgent, Setting, Simulation, SimulationError
from roundelay.simulation.participants import Person
from roundelay.simulation.virtual_time import SimulationLoop
from roundelay.testing.agents import AgentPlan, plan_agent
from roundelay.testing.file import PlacedExpectation, as_node
from roundelay.testing.form import HUB, AgentChoice, Expectation, MessagePattern
from roundelay.testing.judge import Judge, Matcher
from roundelay.testing.processes import NEEDS_SIMULATION, ProcessStage
from roundelay.testing.record import RunRecord, describe_message
from roundelay.testing.stage import SimulatedStage, Stage

T = TypeVar("T")


class Transcript(list[str]):
    """List of messages as text, one line per message: ``mia -> desk: hello``."""


@dataclass(frozen=True)
class Said:
    """Pattern that equals every matching message, as in ``said("desk", "mia", "40 EUR") in network.messages``."""

    sender: str | None = None
    to: str | None = None
    text: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AnyMessage):
            return NotImplemented
        pattern = MessagePattern.model_validate({"from": self.sender, "to": self.to, "contains": self.text})
        return Matcher().fits(pattern, other)

    def __hash__(self) -> int:
        return hash((self.sender, self.to, self.text))

    def __str__(self) -> str:
        return f"{self.sender or 'anybody'} -> {self.to or 'anywhere'}: {self.text or 'anything'}"


def said(sender: str | None = None, to: str | None = None, text: str | None = None) -> Said:
    """Return a pattern for messages from this sender, to this participant or address, with this text.

    An omitted argument matches every message.
    """
    return Said(sender, to, text)


class Messages(list[AnyMessage]):
    """List of stored messages, in order."""

    def matching(self, pattern: Said) -> Messages:
        """Return the messages that match a pattern."""
        return Messages(message for message in self if pattern == message)

    def __str__(self) -> str:
        return "\n".join(map(describe_message, self))


class PersonUnderTest:
    """Person in a test who sends and receives messages."""

    def __init__(self, network: NetworkUnderTest, person: Person) -> None:
        self.id = person.client.agent_id
        self._network = network
        self._person = person

    @property
    def messages(self) -> Messages:
        """Messages that were delivered to this person, in order."""
        return Messages(self._person.heard)

    @property
    def heard(self) -> list[str]:
        """Texts of the messages that were delivered to this person."""
        return [message.text for message in self._person.heard]

    def send(self, to: str, content: Any, **options: Any) -> int:
        """Send content to a participant or an address (``broadcast``, ``channel:NAME``). Return the message's sequence
        number.

        The options are those of `NetworkClient.send`.
        """
        return self._network.run(self._person.client.send(complete_address(to), content, **options)).seq

    def reply(self, message: AnyMessage, text: str) -> int:
        """Reply to a message in the same place. Return the sequence number of the reply."""
        return self._network.run(self._person.client.reply(message, text)).seq

    def call(self, op: str, **args: Any) -> Any:
        """Call an operation of the hub or of a mod, and return its result."""
        return self._network.run(self._person.client.call(op, args))


class NetworkUnderTest:
    """Network for one test. Use it in a ``with`` block, as the fixture does.

    ``folder`` contains the agent files. ``setting`` configures the simulation, for example its seed.
    """

    def __init__(
        self,
        setting: Setting | None = None,
        *,
        folder: Path | None = None,
        in_processes: Path | None = None,
        allows_real_models: bool = False,
    ) -> None:
        self.setting = setting or Setting()
        # Paths of agents are relative to a file, so name a file in the test's folder. The file need not exist.
        self._beside = (folder or Path.cwd()) / "test"
        self._folder = in_processes
        self._allows_real_models = allows_real_models
        # Other processes use the machine's clock, so virtual time is impossible.
        is_virtual = self.setting.is_virtual and in_processes is None
        self._runner = asyncio.Runner(loop_factory=lambda: SimulationLoop(is_virtual=is_virtual))
        self._stack = AsyncExitStack()
        self._began_at = 0

    def __enter__(self) -> Self:
        try:
            self.run(self._open())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _open(self) -> None:
        stage: Stage = SimulatedStage(self.setting) if self._folder is None else ProcessStage(self._folder)
        self._stage = await self._stack.enter_async_context(stage)
        self._began_at = stage.clock()

    def _close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the network's event loop, for actions that have no method in this class."""
        try:
            return self._runner.run(work)
        except RuntimeError as error:
            if "running event loop" not in str(error):
                raise
            # Close the coroutine: otherwise Python would also warn that it was never awaited.
            work.close()
            raise SimulationError(
                'A network under test has its own event loop: write the test as a plain "def", not "async def".'
            ) from error

    @property
    def simulation(self) -> Simulation:
        """Simulation of this test. Raises `SimulationError` if the network runs in processes."""
        if not isinstance(self._stage, SimulatedStage):
            raise SimulationError(NEEDS_SIMULATION)
        return self._stage

    # --- who takes part

    def agent(
        self,
        agent_id: str,
        *rules: Mapping[str, Any],
        file: str | Path | None = None,
        script: Script | str | None = None,
        runner: MakeAgent | None = None,
        **options: Any,
    ) -> None:
        """Start an agent from ``rules``, a ``script``, an agent ``file``, or your own ``runner``.

        ``rules`` have the format of a script in a scenario. A ``script`` is a function of the request, a file of rules,
        or ``module:function``. The options are those of a scenario, for example ``model``, ``tools`` and
        ``visibility``.
        """
        if not is_id(agent_id):
            raise ConfigError(
                f"{agent_id!r} is not a valid agent id. Use at most 64 lowercase letters, digits, '.', '_' and '-', "
                "and start with a letter or digit, as in desk-2."
            )
        if callable(script):
            runner = _script_runner(agent_id, script, options)
        if runner is not None:
            plan = AgentPlan(agent_id, runner)
        else:
            given = {
                "file": str(file) if file is not None else None,
                "script": script or list(rules) or None,
                **options,
            }
            node = as_node({name: value for name, value in given.items() if value is not None}, self._beside)
            # Check this for agents in processes too, because such an agent would also ask a real model.
            plan = plan_agent(agent_id, bind(AgentChoice, node), node, allows_real_models=self._allows_real_models)
        self._stage.plans[agent_id] = plan
        self.run(self._stage.join(agent_id))

    def person(self, agent_id: str) -> PersonUnderTest:
        """Let a person join and return the person. A person who has already joined is returned unchanged."""
        if agent_id not in self._stage.people:
            self.run(self._stage.join(agent_id))
        return PersonUnderTest(self, self._stage.people[agent_id])

    def thread(self, name: str, *members: str) -> str:
        """Create a channel, let these people join it in this order, and return its address.

        Agents join a channel with a tool or with the option ``channels``.
        """
        for member in members:
            op = "channels.create" if member == members[0] else "channels.join"
            self.person(member).call(op, name=name)
        return channel_address(name)

    # --- what happens

    def idle(self, at_most_s: float = 60.0) -> None:
        """Wait until every message has been handled, and every reaction has ended or waits for a participant. Raises
        `TimeoutError`.
        """
        self.run(self._stage.idle(at_most_s))

    def wait(self, seconds: float) -> None:
        """Wait for a number of seconds. A simulation advances its virtual time."""
        self.run(asyncio.sleep(seconds))

    def wait_for(self, pattern: Said, at_most_s: float = 60.0) -> AnyMessage:
        """Wait for the first message since the start that matches the pattern. Raises `TimeoutError`."""
        return self.run(self._stage.wait_for(lambda message: pattern == message, at_most_s))

    def kill(self, agent_id: str) -> None:
        """End an agent abruptly, as ``kill -9`` does."""
        self.run(self._stage.kill(agent_id))

    def restart(self, agent_id: str) -> None:
        """Kill an agent if it is running, and start it again."""
        self.run(self._stage.restart(agent_id))

    def disconnect(self, agent_id: str) -> None:
        """Cut a participant's connection. The client reconnects automatically. This works only in simulations."""
        self.run(self._stage.disconnect(agent_id))

    def restart_hub(self) -> None:
        """Kill the hub, and start it again with the same ledger."""
        self.run(self._stage.restart(HUB))

    # --- results

    @property
    def messages(self) -> Messages:
        """All stored messages, in order."""
        return Messages(self._stage.messages)

    @property
    def transcript(self) -> Transcript:
        """All stored messages as text, one line per message."""
        return Transcript(map(_tell, self.messages))

    @property
    def record(self) -> RunRecord:
        """Messages, reactions, tool calls and prompts of the run, in the form that expectations use."""
        return replace(self.run(self._stage.read_record()), began_at=self._began_at)

    @property
    def reactions(self) -> Sequence[RecordedReaction]:
        """Reactions of the agents, with their tool calls."""
        return self.record.reactions

    def prompts(self, agent_id: str | None = None) -> list[str]:
        """Return the prompts of all model calls, one text per call. This works only in simulations."""
        return [entry.text for entry in self.simulation.asked if agent_id in (None, entry.agent_id)]

    def why(self, message: AnyMessage | int) -> Transcript:
        """Return the chain of messages that led to a message, starting with the root."""
        record = self.record
        found = record.find(message) if isinstance(message, int) else message
        if found is None:
            raise SimulationError(f"There is no message #{message}.")
        return Transcript(map(_tell, reversed(record.path_to_root(found))))

    def expect(self, *expected: Mapping[str, Any]) -> None:
        """Check expectations, which have the format of a scenario file. Raises `AssertionError` with the actual result."""
        record = self.record
        judge = Judge(record)
        for value in expected:
            node = as_node(value, self._beside)
            verdict = judge.judge(PlacedExpectation(bind(Expectation, node), node))
            if not verdict.holds:
                lines = [verdict.name, verdict.found, "", "what was said:", *map(describe_message, record.messages)]
                raise AssertionError("\n".join(sanitize_lines("\n".join(lines))))


def _script_runner(agent_id: str, script: Script, options: Mapping[str, Any]) -> MakeAgent:
    given = {"instruction": "You act by a script.", **options}
    return lambda: SimpleAgentRunner(agent_id, model=ScriptedModel(script), **given)


def _tell(message: AnyMessage) -> str:
    return describe_message(message).partition(" ")[2]
