"""Simulated network with its own time and randomness. Its hub, people and agents can fail and restart.

`simulate` runs a function on a `Simulation` in a separate event loop. All time comes from that loop. All randomness
comes from the seed, with one random stream per purpose (`Simulation.chance`). The code of the hub, its sessions and the
agents is the same as in a real network.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from roundelay.agents import isolation
from roundelay.agents.runner import AgentRunner
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import OWN_MODS, Network, make_rights, server_name
from roundelay.network.blobs import MemoryBlobs
from roundelay.network.client import AnyMessage
from roundelay.network.client.transport import Transport
from roundelay.network.clock import system_clock
from roundelay.network.config import Limits, NodeConfig, Quota, Role
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import RoundelayError
from roundelay.network.frames import Kind, decode_json
from roundelay.network.hub import Hub
from roundelay.network.ledger.log_file import LogHead, encode_head, encode_row
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.messages import message_from_wire
from roundelay.network.mod import Mod, load_mods
from roundelay.network.visibility import Visibility
from roundelay.simulation.links import Delay, SimulatedTransport, Traffic
from roundelay.simulation.models import Asked, ModelWatch
from roundelay.simulation.participants import Person, RunningAgent
from roundelay.simulation.virtual_time import HORIZON_S, SimulationLoop, run

LINK_DELAY, MODEL_DELAY = Delay(0, 5), Delay(50, 500)

MakeAgent = Callable[[], AgentRunner]
"""Function that makes the runner of an agent. The function is called for each start."""


@dataclass(frozen=True)
class Setting:
    """Settings of a simulation.

    ``link_delay`` is drawn for each frame and ``model_delay`` for each model call, so the order of events differs
    between seeds. ``operators`` names the people and services that join as operators. ``rights`` and ``quotas`` have
    the format of a node's file.
    """

    seed: int = 0
    is_virtual: bool = True
    mods: Sequence[str | Mod] = ("channels", "discovery")
    limits: Limits = field(default_factory=Limits)
    visibility: Visibility = "people"
    operators: Sequence[str] = ()
    rights: Mapping[str, Role] | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """State that the tools of all agents share (`ToolContext.state`). Each run starts with a copy of this state."""

    link_delay: Delay = LINK_DELAY
    model_delay: Delay = MODEL_DELAY
    model_failure_rate: float = 0.0
    max_tokens: int | None = None
    horizon_s: float = HORIZON_S
    """Maximum virtual time of a run, in seconds. A longer run is stopped, because it would probably never end."""


class SimulationError(RoundelayError):
    """Raised when the simulation cannot perform the requested action. The error message explains why."""

    code = "simulation"


START_MS = 1_767_225_600_000
"""Start time of every simulation: 2026-01-01, 0:00 UTC."""


class RecordingLedger(MemoryLedger):
    """Ledger of a simulation. Keeps all rows, including rows that the hub deletes, and wakes tasks that wait for a
    message.
    """

    def __init__(self, epoch: str) -> None:
        super().__init__(epoch=epoch)
        self.all_rows: list[Row] = []
        self._decoded: list[AnyMessage] = []
        self._undecoded: list[Row] = []
        self._waiters: list[tuple[Callable[[AnyMessage], bool], asyncio.Future[AnyMessage]]] = []

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        await super().append(rows, puts)
        # Collect the rows after the write: a row that could not be stored does not belong to the run.
        self.all_rows += rows
        new = [row for row in rows if row.type == "message"]
        self._undecoded += new
        if self._waiters and new:
            for message in self.all_messages[-len(new) :]:
                for is_wanted, arrived in self._waiters:
                    if not arrived.done() and is_wanted(message):
                        arrived.set_result(message)

    @property
    def all_messages(self) -> list[AnyMessage]:
        """All stored messages, in order. Messages are decoded at the first access, because most runs never read
        them."""
        undecoded, self._undecoded = self._undecoded, []
        self._decoded += [message_from_wire(decode_json(row.data)) for row in undecoded]
        return self._decoded

    async def wait_for(self, is_wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage:
        """Wait for the first message since the start for which ``is_wanted`` is true. Raises `TimeoutError`."""
        # The message may have been stored before this call.
        for message in filter(is_wanted, self.all_messages):
            return message
        arrived: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        waiter = (is_wanted, arrived)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(at_most_s):
                return await arrived
        finally:
            self._waiters.remove(waiter)


class SimulatedNetwork(Network):
    """`Network` of a simulation. A restart replaces the hub, and clients use links that can be cut."""

    def __init__(self, hub: Hub, simulation: Simulation) -> None:
        super().__init__(hub, simulation.new_id, simulation.clock)
        self._simulation = simulation

    def _make_link(self, agent_id: str) -> tuple[Transport, Callable[[], float]]:
        return self._simulation.make_link(agent_id)


class Simulation:
    """Simulated network that runs during an ``async with`` block inside a `SimulationLoop`. `simulate` sets up both.

    ``rows`` are the rows of the ledger, and ``asked`` are the requests to models.
    """

    def __init__(self, setting: Setting) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulationLoop):
            raise SimulationError(
                "A simulation needs its own event loop: call simulate(main), or roundelay.simulation.virtual_time.run."
            )
        self.setting = setting
        self.people: dict[str, Person] = {}
        self.members: dict[str, RunningAgent] = {}
        self.broken: dict[str, BaseException] = {}
        """Agents whose runner ended with an error, and the errors."""

        # Copy the state: several runs may use the same setting, and the tools of one run must not change the start of
        # the next.
        self.state = copy.deepcopy(dict(setting.state))
        self.hub: Hub | None = None
        self.models = ModelWatch(setting.model_delay, setting.model_failure_rate, setting.max_tokens)
        self._loop = loop
        self._makers: dict[str, MakeAgent] = {}
        self._transports: dict[str, SimulatedTransport] = {}
        self._lives: dict[str, int] = {}
        self._traffic = Traffic()
        self._ids = self.chance("ids")
        self._mods = load_mods(list(setting.mods), OWN_MODS)
        page = NodeConfig(rights=dict(setting.rights)) if setting.rights is not None else NodeConfig()
        self._rights = make_rights(page, self._mods)
        self._epoch = self.new_id()
        self._ledger = RecordingLedger(self._epoch)
        self._blobs = MemoryBlobs()  # survives a restart of the hub, like the folder of a node
        self._network: SimulatedNetwork | None = None

    async def __aenter__(self) -> Self:
        if self.setting.is_virtual:
            # Disable threads: they take real time and end in any order, so a run with threads would not be repeatable.
            isolation.run_inline.set(True)
        await self.restart_hub()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def asked(self) -> list[Asked]:
        return self.models.asked

    # --- randomness and time

    def chance(self, purpose: str) -> random.Random:
        """Return the random stream for a purpose, derived from the seed."""
        # Seed the stream by its name, so that a new purpose does not change the numbers of other purposes.
        return random.Random(f"{self.setting.seed}/{purpose}")  # nosec B311  # repeatable on purpose

    def new_id(self) -> str:
        """Return a new id, derived from the seed."""
        return f"{self._ids.getrandbits(128):032x}"

    def clock(self) -> int:
        """Return the virtual or real time in milliseconds since the Unix epoch."""
        return START_MS + round(self._loop.time() * 1000) if self.setting.is_virtual else system_clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the event loop started."""
        return self._loop.time()

    @property
    def rows(self) -> list[Row]:
        """All rows of the ledger."""
        return self._ledger.all_rows

    @property
    def messages(self) -> list[AnyMessage]:
        """All stored messages, in order."""
        return self._ledger.all_messages

    # --- the hub

    @property
    def network(self) -> Network:
        """Current network, with the same interface as a real network (``join`` and ``client``)."""
        if self._network is None:
            raise SimulationError("The simulation has not started. Use it in an `async with`.")
        return self._network

    async def restart_hub(self) -> None:
        """Start the hub with the same ledger. If the hub is running, it is first stopped cleanly."""
        if self.hub is not None:
            hub, self.hub = self.hub, None
            await hub.close()
        hub = Hub(
            self._ledger,
            limits=self.setting.limits,
            quotas=self.setting.quotas,
            rights=self._rights,
            mods=self._mods,
            visibility=self.setting.visibility,
            server=server_name(),
            blobs=self._blobs,
            clock=self.clock,
            new_id=self.new_id,
        )
        await hub.start()
        self.hub = hub
        if self._network is None:
            self._network = SimulatedNetwork(hub, self)
        self._network.hub = hub

    async def kill_hub(self) -> None:
        """Stop the hub as ``kill -9`` does: connections end, and uncommitted entries are lost. Clients try to reconnect until
        `restart_hub`."""
        if self.hub is None:
            return
        # Remove the hub first, so that clients that reconnect meanwhile find no hub instead of a hub that is ending.
        hub, self.hub = self.hub, None
        await hub.abandon()
        for transport in list(self._transports.values()):
            await transport.cut()

    # --- participants

    def make_link(self, agent_id: str) -> tuple[SimulatedTransport, Callable[[], float]]:
        """Create a link for a participant. Each start of the participant gets different random delays."""
        self._lives[agent_id] = self._lives.get(agent_id, 0) + 1
        chance = self.chance(f"link/{agent_id}/{self._lives[agent_id]}")
        transport = SimulatedTransport(
            lambda: self.hub,
            self._traffic,
            chance,
            self.setting.link_delay,
            administers=agent_id in self.setting.operators,
        )
        self._transports[agent_id] = transport
        return transport, chance.random

    async def join_person(self, agent_id: str, kind: Kind = "human") -> Person:
        """Let a person join or rejoin. With another ``kind``, the participant is a program without a runner."""
        if agent_id in self.people:
            raise SimulationError(f"{agent_id} has joined already.")
        client = self.network.client(agent_id, kind=kind)
        await client.connect()
        person = self.people[agent_id] = Person(client)
        return person

    async def start_agent(self, make: MakeAgent) -> AgentRunner:
        """Start an agent. Return its runner when the agent is ready. Each `restart` calls ``make`` again."""
        runner = make()
        self._makers[runner.agent_id] = make
        return await self._start(runner)

    async def _start(self, runner: AgentRunner) -> AgentRunner:
        agent_id = runner.agent_id
        if agent_id in self.members:
            raise SimulationError(f"The agent {agent_id} is running already.")
        if isinstance(runner, SimpleAgentRunner):
            chance = self.chance(f"model/{agent_id}/{self._lives.get(agent_id, 0)}")
            runner.agent = self.models.watch(runner.agent, agent_id, chance)
            # Keep the state of a runner that was created with its own state.
            runner.state = self.state if runner.state is None else runner.state
        client = self.network.client(agent_id, role="reactor", card=runner.describe_card())
        member = self.members[agent_id] = await RunningAgent.start(runner, client, self._transports[agent_id])
        member.work.add_done_callback(lambda task: self._handle_end(agent_id, member, task))
        await runner.ready()
        return runner

    def _handle_end(self, agent_id: str, member: RunningAgent, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        # Keep the entry if a restart has already replaced this runner.
        if self.members.get(agent_id) is member:
            del self.members[agent_id]
            if failure is not None:
                self.broken[agent_id] = failure

    async def kill(self, agent_id: str) -> None:
        """End an agent abruptly, as ``kill -9`` does. No further frame of the agent reaches the hub."""
        await self._remove(agent_id).kill()

    async def stop(self, agent_id: str) -> None:
        """Stop an agent cleanly. Its open reactions continue after the next start."""
        await self._remove(agent_id).stop()

    def _remove(self, agent_id: str) -> RunningAgent:
        member = self.members.pop(agent_id, None)
        if member is None:
            raise SimulationError(f"The agent {agent_id} is not running.")
        return member

    async def restart(self, agent_id: str) -> None:
        """Start an agent again. If the agent is running, it is killed first."""
        if agent_id in self.members:
            await self.kill(agent_id)
        if agent_id not in self._makers:
            raise SimulationError(f"The agent {agent_id} was never started.")
        await self._start(self._makers[agent_id]())

    async def disconnect(self, agent_id: str) -> None:
        """Cut a participant's connection. The participant's client reconnects."""
        if agent_id not in self._transports:
            raise SimulationError(f"{agent_id} is not connected.")
        await self._transports[agent_id].cut()

    async def leave(self, agent_id: str) -> None:
        """Disconnect a participant cleanly."""
        person = self.people.pop(agent_id, None)
        await (person.leave() if person is not None else self.stop(agent_id))

    # --- waiting

    @property
    def is_idle(self) -> bool:
        """Whether the network currently has nothing left to do.

        This means: no frame in transit, no entry to commit, no delivery to repeat, no client that is trying to connect,
        and no reaction unless it waits for a participant. Deliveries to absent participants are ignored. The value is
        reliable only while the event loop is quiet.
        """
        hub = self.hub
        if hub is None or self._traffic.under_way or self._traffic.seekers or self.models.under_way:
            return False
        if hub.pending or hub.lock.locked():
            return False
        if any(member.runner.is_at_work for member in self.members.values()):
            return False
        for key, _ in hub.state.items("attempt"):
            agent_id, _, seq = key.partition("/")
            # Ignore absent participants: they may never return, and waiting for them would never end.
            if hub.view.is_online(agent_id) and hub.view.is_waiting(agent_id, int(seq)):
                return False
        return True

    async def idle(self, at_most_s: float = 60.0) -> None:
        """Wait until `is_idle`. Raises `TimeoutError`."""
        async with asyncio.timeout(at_most_s):
            await self._loop.when_quiet(lambda: self.is_idle)

    async def wait_for(self, is_wanted: Callable[[AnyMessage], bool], at_most_s: float = 60.0) -> AnyMessage:
        """Wait for the first message since the start for which ``is_wanted`` is true. Raises `TimeoutError`."""
        return await self._ledger.wait_for(is_wanted, at_most_s)

    # --- the end

    def export(self) -> bytes:
        """Return the ledger as JSON lines, as `roundelay export` does. The same seed produces the same bytes."""
        head = LogHead(epoch=self._epoch, name="roundelay")
        return b"".join(line + b"\n" for line in (encode_head(head), *map(encode_row, self.rows)))

    async def close(self) -> None:
        """Stop all participants and the hub. Idempotent."""
        for agent_id in (*self.members, *self.people):
            await self.leave(agent_id)
        if self._network is not None:
            await asyncio.gather(*(client.close() for client in self._network._clients))
        if self.hub is not None:
            hub, self.hub = self.hub, None
            await hub.close()


T = TypeVar("T")

GARBAGE_THRESHOLD = 50_000
"""Number of new objects before a garbage collection during a simulation. A simulation keeps most of its objects, and
searching them took a fifth of its time."""


def simulate(main: Callable[[Simulation], Awaitable[T]], setting: Setting | None = None, **options: Any) -> T:
    """Run ``main`` with a new simulation and return its result, as in ``simulate(main, seed=7)``.

    The options are the fields of `Setting`, and override the values in ``setting``. Do not call this function inside an
    event loop, because it creates its own. Raises the exceptions of ``main``, and `virtual_time.Stalled`.
    """
    chosen = replace(setting or Setting(), **options)

    async def enter() -> T:
        async with Simulation(chosen) as simulation:
            return await main(simulation)

    return run_simulated(enter, chosen)


def run_simulated(enter: Callable[[], Coroutine[Any, Any, T]], setting: Setting) -> T:
    """Run a coroutine that creates a simulation with this setting, on a separate event loop, as `simulate` does."""
    # Raise a separate error here, because asyncio's error message would not mention simulations.
    if asyncio._get_running_loop() is not None:
        raise SimulationError(
            "A simulation has its own event loop: call it from a plain function, not from a coroutine."
        )
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *thresholds[1:])
    try:
        return run(enter(), SimulationLoop(is_virtual=setting.is_virtual, horizon_s=setting.horizon_s))
    finally:
        gc.set_threshold(*thresholds)
