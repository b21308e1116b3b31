"""Networks in tests, without `async`: agents by scripts, people who write and hear, and what was said to be looked at.

`NetworkUnderTest` is what the pytest fixture `network` gives; it works without pytest too. In-process it is a simulation, in which time passes only while
the test waits; with ``in_processes`` the hub and each agent are real processes. docs/scenarios.md shows it in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from roundelay.agents.models.scripted import Script, ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.clean_text import clean_lines
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.config import bind
from roundelay.network.errors import ConfigError
from roundelay.network.frames import is_id
from roundelay.scenario.agents import plan_agent
from roundelay.scenario.expectations import Expectation, MessageFilter
from roundelay.scenario.file import PlacedExpectation, as_node
from roundelay.scenario.judge import Judge
from roundelay.scenario.live_log import LiveLog
from roundelay.scenario.processes import ProcessNetwork
from roundelay.scenario.record import ReactionRecord, RunRecord, describe_message
from roundelay.scenario.simulated_stage import describe_simulation
from roundelay.scenario.spec import AgentChoice
from roundelay.simulation.network import Simulation
from roundelay.simulation.person import Person
from roundelay.simulation.run import open_simulation
from roundelay.simulation.setting import MakeAgent, Setting, SimulationError
from roundelay.simulation.virtual_time import SimulationLoop

T = TypeVar("T")


class Transcript(list[str]):
    """What was said, a line for each message: ``mia -> desk: hello``."""


@dataclass(frozen=True)
class Said:
    """Stands for any message that fits: ``said("desk", "mia", "40 EUR") in network.messages``."""

    sender: str | None = None
    to: str | None = None
    text: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AnyMessage):
            return NotImplemented
        wanted = MessageFilter.model_validate({"from": self.sender, "to": self.to, "contains": self.text})
        return Judge(RunRecord((), ()), (), str).fits(wanted, other)

    def __hash__(self) -> int:
        return hash((self.sender, self.to, self.text))

    def __str__(self) -> str:
        return f"{self.sender or 'anybody'} -> {self.to or 'anywhere'}: {self.text or 'anything'}"


def said(sender: str | None = None, to: str | None = None, text: str | None = None) -> Said:
    """Any message from this sender, to this participant or place, with this in its text; what is left out does not count."""
    return Said(sender, to, text)


class Messages(list[AnyMessage]):
    """Every message that was stored, in order."""

    def matching(self, wanted: Said) -> Messages:
        """Those that fit."""
        return Messages(message for message in self if wanted == message)

    def __str__(self) -> str:
        return "\n".join(map(describe_message, self))


class PersonUnderTest:
    """A person of a test: writes, and hears what is delivered."""

    def __init__(self, network: NetworkUnderTest, person: Person) -> None:
        self.id = person.client.agent_id
        self._network = network
        self._person = person

    @property
    def messages(self) -> Messages:
        """What was delivered, in order."""
        return Messages(self._person.heard)

    @property
    def heard(self) -> list[str]:
        """The texts of what was delivered."""
        return [message.text for message in self._person.heard]

    def send(self, to: str, content: Any, **options: Any) -> int:
        """Write to a participant or an address (``broadcast``, ``channel:NAME``); gives the message's seq. Options as in `NetworkClient.send`."""
        address = to if ":" in to or to == "broadcast" else f"agent:{to}"
        return self._network.run(self._person.client.send(address, content, **options)).seq

    def reply(self, message: AnyMessage, text: str) -> int:
        """Answer a message where it is."""
        return self._network.run(self._person.client.reply(message, text)).seq

    def call(self, op: str, **args: Any) -> Any:
        """Call an operation of the hub or of a mod."""
        return self._network.run(self._person.client.call(op, args))


class NetworkUnderTest:
    """A network for one test. Use as ``with``; the fixture does.

    ``folder`` is where agent files are looked for. ``setting`` says what the simulation is like, its seed above all.
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
        self._beside = (folder or Path.cwd()) / "test"
        self._allows_real_models = allows_real_models
        self._processes = ProcessNetwork(in_processes) if in_processes is not None else None
        is_virtual = self.setting.is_virtual and self._processes is None
        self._runner = asyncio.Runner(loop_factory=lambda: SimulationLoop(is_virtual=is_virtual))
        self._stack = AsyncExitStack()
        self._simulation: Simulation | None = None
        self._log: LiveLog | None = None
        self._people: dict[str, PersonUnderTest] = {}
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
        if self._processes is None:
            self._simulation = await self._stack.enter_async_context(open_simulation(self.setting))
            self._began_at = self._simulation.clock()
            return
        self._stack.push_async_callback(self._processes.close)
        await self._processes.start_hub()
        self._log = await self._stack.enter_async_context(LiveLog(self._processes.url, self._processes.token))
        self._began_at = system_clock()

    def _close(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the network's own loop: for what this class has no method for."""
        try:
            return self._runner.run(work)
        except RuntimeError as error:
            if "running event loop" not in str(error):
                raise
            work.close()
            raise SimulationError(
                'A network under test runs in a loop of its own: write the test as a plain "def", not "async def".'
            ) from error

    @property
    def simulation(self) -> Simulation:
        """The simulation underneath. Raises `SimulationError` where there are processes instead."""
        if self._simulation is None:
            raise SimulationError(
                "The network runs in real processes; leave out the mark roundelay_processes for this."
            )
        return self._simulation

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
        """Start an agent: by ``rules`` (as in a scenario's script), a ``script`` (a function of the request, a file of rules, ``module:function``), out
        of an agent ``file``, or with a ``runner`` of one's own. Options as in a scenario: ``model``, ``tools``, ``visibility``, ...
        """
        if not is_id(agent_id):
            raise ConfigError(
                f"{agent_id!r} is no id of an agent; one is like desk-2: lower case letters, digits, '.', '_' and '-', at most 64."
            )
        if runner is not None:
            self.run(self.simulation.start_agent(runner))
        elif callable(script):
            self.run(self.simulation.start_agent(_make_scripted(agent_id, script, options)))
        else:
            given = {
                "file": str(file) if file is not None else None,
                "script": script or (list(rules) or None),
                **options,
            }
            node = as_node({name: value for name, value in given.items() if value is not None}, self._beside)
            choice = bind(AgentChoice, node)
            # Checked in any case: a process of its own would ask a real model unasked too.
            plan = plan_agent(agent_id, choice, node, allows_real_models=self._allows_real_models)
            if self._processes is not None:
                self.run(self._processes.start_agent(agent_id, choice, self._beside))
            else:
                self.run(self.simulation.start_agent(plan.make))

    def person(self, agent_id: str) -> PersonUnderTest:
        """Let a person join, or give the one that is there."""
        if agent_id not in self._people:
            self._people[agent_id] = PersonUnderTest(self, self.run(self._join(agent_id)))
        return self._people[agent_id]

    async def _join(self, agent_id: str) -> Person:
        if self._processes is None:
            return await self.simulation.join_person(agent_id)
        client = NetworkClient(agent_id, self._processes.url, kind="human", token=self._processes.token)
        await client.connect()
        person = Person(client)
        self._stack.push_async_callback(person.leave)
        return person

    def thread(self, name: str, *members: str) -> str:
        """Make a channel with these people in it, in the order given; agents join by a tool or ``channels``. Gives its address."""
        for member in members:
            op = "channels.create" if member == members[0] else "channels.join"
            self.person(member).call(op, name=name)
        return f"channel:{name}"

    # --- what happens

    def idle(self, at_most_s: float = 60.0) -> None:
        """Wait until nothing is in flight: every message handled, every reaction ended or waiting for somebody. Raises `TimeoutError`."""
        if self._log is not None and self._processes is not None:
            self.run(self._log.idle({*self._processes.agent_ids, *self._people}, at_most_s))
        else:
            self.run(self.simulation.idle(at_most_s))

    def wait(self, seconds: float) -> None:
        """Let time pass: virtual, where it is."""
        self.run(asyncio.sleep(seconds))

    def wait_for(self, wanted: Said, at_most_s: float = 60.0) -> AnyMessage:
        """Wait for a message, from the beginning. Raises `TimeoutError`."""
        place: Simulation | LiveLog = self._log if self._log is not None else self.simulation
        return self.run(place.wait_for(lambda message: wanted == message, at_most_s))

    def kill(self, agent_id: str) -> None:
        """End an agent as ``kill -9`` does."""
        self.run(self._processes.kill_agent(agent_id) if self._processes else self.simulation.kill(agent_id))

    def restart(self, agent_id: str) -> None:
        """Start an agent again."""
        if self._processes is not None:
            self.run(self._processes.restart_agent(agent_id))
        else:
            self.run(self.simulation.restart(agent_id))

    def disconnect(self, agent_id: str) -> None:
        """Cut a participant's connection; it comes back by itself. In-process only."""
        self.run(self.simulation.disconnect(agent_id))

    def restart_hub(self) -> None:
        """Kill the hub and start it again over its ledger."""
        if self._processes is not None:
            self.run(self._processes.kill_hub())
            self.run(self._processes.start_hub())
        else:
            self.run(self.simulation.kill_hub())
            self.run(self.simulation.restart_hub())

    # --- what is left

    @property
    def messages(self) -> Messages:
        """Every message that was stored."""
        return Messages(self._log.messages if self._log is not None else self.simulation.messages)

    @property
    def transcript(self) -> Transcript:
        """What was said, a line for each message."""
        return Transcript(describe_message(message).partition(" ")[2] for message in self.messages)

    @property
    def record(self) -> RunRecord:
        """Messages, reactions, tool calls and prompts, as expectations look at them."""
        if self._log is not None:
            return self.run(self._log.describe(self._began_at))
        return self.run(describe_simulation(self.simulation, self._began_at, ()))

    @property
    def reactions(self) -> Sequence[ReactionRecord]:
        """What the agents did, with their tool calls."""
        return self.record.reactions

    def prompts(self, agent_id: str | None = None) -> list[str]:
        """Everything that models read, a text for each call. In-process only."""
        return [asked.text for asked in self.simulation.asked if agent_id in (None, asked.agent_id)]

    def why(self, message: AnyMessage | int) -> Transcript:
        """How a message came about, from its root to it."""
        found = self.record.find(message) if isinstance(message, int) else message
        if found is None:
            raise SimulationError(f"There is no message {message}.")
        return Transcript(describe_message(it).partition(" ")[2] for it in reversed(self.record.path_to_root(found)))

    def expect(self, *expected: Mapping[str, Any]) -> None:
        """Expectations in the form of a scenario's. Raises `AssertionError` with what was found instead."""
        record = self.record
        judge = Judge(record, (), str)
        for value in expected:
            node = as_node(value, self._beside)
            verdict = judge.judge(PlacedExpectation(bind(Expectation, node), node))
            if not verdict.holds:
                lines = [
                    verdict.name,
                    verdict.found,
                    "",
                    "what was said:",
                    *map(describe_message, record.messages),
                ]
                raise AssertionError("\n".join(clean_lines("\n".join(lines))))


def _make_scripted(agent_id: str, script: Script, options: Mapping[str, Any]) -> MakeAgent:
    given = {"instruction": "You act by a script.", **options}
    return lambda: SimpleAgentRunner(agent_id, model=ScriptedModel(script), **given)
