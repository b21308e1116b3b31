"""A network with time and chance of its own: its hub, its people and agents, which can be lost and come back.

`simulate` runs a function on a `Simulation`, in an event loop of its own. All time comes from that loop, all chance
from the seed, one stream for each purpose (`Simulation.chance`), and the hub, its sessions and the agents are those of
every other network.
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
"""Makes an agent's runner, anew for each start."""


@dataclass(frozen=True)
class Setting:
    """What a simulation is like. ``link_delay`` and ``model_delay`` are drawn anew each time; they are what makes seeds
    differ in order. ``operators`` are the people and services who join as operators; all others have the rights of
    participants. ``rights`` and ``quotas`` are as in a node's file."""

    seed: int = 0
    is_virtual: bool = True
    mods: Sequence[str | Mod] = ("channels", "discovery")
    limits: Limits = field(default_factory=Limits)
    visibility: Visibility = "people"
    operators: Sequence[str] = ()
    rights: Mapping[str, Role] | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the tools of all agents share, as `ToolContext.state`: each run begins with a copy of it."""

    link_delay: Delay = LINK_DELAY
    model_delay: Delay = MODEL_DELAY
    model_failure_rate: float = 0.0
    max_tokens: int | None = None
    horizon_s: float = HORIZON_S
    """How much virtual time may pass before a run is ended as one that never would."""


class SimulationError(RoundelayError):
    """A simulation was asked for what it cannot do; the sentence says what."""

    code = "simulation"


START_MS = 1_767_225_600_000
"""When every simulation begins: 2026-01-01, 0:00 UTC."""


class WatchedLedger(MemoryLedger):
    """The ledger of a simulation, which learns of each batch that is stored. It keeps what the hub trims."""

    def __init__(self, simulation: Simulation, epoch: str) -> None:
        super().__init__(epoch=epoch)
        self._simulation = simulation

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        await super().append(rows, puts)
        self._simulation.take_rows(rows)


class SimulatedNetwork(Network):
    """The `Network` of a simulation: its hub may be another one after a restart, its clients come over links that can
    be cut."""

    def __init__(self, hub: Hub, simulation: Simulation) -> None:
        super().__init__(hub, simulation.new_id, simulation.clock)
        self._simulation = simulation

    def _make_link(self, agent_id: str) -> tuple[Transport, Callable[[], float]]:
        return self._simulation.make_link(agent_id)


class Simulation:
    """A network with time and chance of its own, for the length of an ``async with`` inside a `SimulationLoop`;
    `simulate` does both.

    ``rows`` are all rows of the ledger, ``asked`` is what the models were asked.
    """

    def __init__(self, setting: Setting) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulationLoop):
            raise SimulationError(
                "A simulation runs in a loop of its own: call simulate(main), or roundelay.simulation.virtual_time.run."
            )
        self.setting = setting
        self.rows: list[Row] = []
        self.people: dict[str, Person] = {}
        self.members: dict[str, RunningAgent] = {}
        self.broken: dict[str, BaseException] = {}
        """Agents whose runner ended by an error, unasked."""

        self.state = copy.deepcopy(dict(setting.state))
        self.hub: Hub | None = None
        self.models = ModelWatch(setting.model_delay, setting.model_failure_rate, setting.max_tokens)
        self._loop = loop
        self._messages: list[AnyMessage] = []
        self._unread: list[Row] = []
        self._makers: dict[str, MakeAgent] = {}
        self._transports: dict[str, SimulatedTransport] = {}
        self._lives: dict[str, int] = {}
        self._traffic = Traffic()
        self._ids = self.chance("ids")
        self._mods = load_mods(list(setting.mods), OWN_MODS)
        page = NodeConfig(rights=dict(setting.rights)) if setting.rights is not None else NodeConfig()
        self._rights = make_rights(page, self._mods)
        self._epoch = self.new_id()
        self._ledger = WatchedLedger(self, self._epoch)
        self._awaited: list[tuple[Callable[[AnyMessage], bool], asyncio.Future[AnyMessage]]] = []
        self._network: SimulatedNetwork | None = None

    async def __aenter__(self) -> Self:
        if self.setting.is_virtual:
            isolation.run_inline.set(True)
        await self.restart_hub()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def asked(self) -> list[Asked]:
        return self.models.asked

    # --- chance and time

    def chance(self, purpose: str) -> random.Random:
        """A stream of chance of its own, from the seed."""
        return random.Random(f"{self.setting.seed}/{purpose}")  # nosec B311  # repeatable on purpose

    def new_id(self) -> str:
        """An id of the seed's."""
        return f"{self._ids.getrandbits(128):032x}"

    def clock(self) -> int:
        """The time in milliseconds since the Unix epoch: virtual, or the machine's."""
        return START_MS + round(self._loop.time() * 1000) if self.setting.is_virtual else system_clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the loop began."""
        return self._loop.time()

    @property
    def messages(self) -> list[AnyMessage]:
        """Every message that was stored, in order."""
        unread, self._unread = self._unread, []
        self._messages += [message_from_wire(decode_json(row.data)) for row in unread]
        return self._messages

    # --- the hub

    @property
    def network(self) -> Network:
        """The network as programs use it elsewhere: ``join`` and ``client``."""
        if self._network is None:
            raise SimulationError("The simulation has not begun.")
        return self._network

    async def restart_hub(self) -> None:
        """Start the hub, again over the same ledger if it was there before; one that runs is stopped first, in good
        order."""
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
            clock=self.clock,
            new_id=self.new_id,
        )
        await hub.start()
        self.hub = hub
        if self._network is None:
            self._network = SimulatedNetwork(hub, self)
        self._network.hub = hub

    async def kill_hub(self) -> None:
        """Stop the hub as ``kill -9`` does: connections end, what was not committed is gone. Clients look for it until
        `restart_hub`."""
        if self.hub is None:
            return
        hub, self.hub = self.hub, None
        await hub.abandon()
        for transport in list(self._transports.values()):
            await transport.cut()

    # --- participants

    def make_link(self, agent_id: str) -> tuple[SimulatedTransport, Callable[[], float]]:
        """A link of a participant's own, with delays and a chance of its own in each of its lives."""
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
        """A person joins, or comes back; or, of another ``kind``, a program that is no runner's agent."""
        if agent_id in self.people:
            raise SimulationError(f"{agent_id} is there already.")
        client = self.network.client(agent_id, kind=kind)
        await client.connect()
        person = self.people[agent_id] = Person(client)
        return person

    async def start_agent(self, make: MakeAgent) -> AgentRunner:
        """Start an agent; gives its runner once it is ready. ``make`` is called again for each `restart`."""
        runner = make()
        self._makers[runner.agent_id] = make
        return await self._start(runner)

    async def _start(self, runner: AgentRunner) -> AgentRunner:
        agent_id = runner.agent_id
        if agent_id in self.members:
            raise SimulationError(f"The agent {agent_id} is up already.")
        if isinstance(runner, SimpleAgentRunner):
            chance = self.chance(f"model/{agent_id}/{self._lives.get(agent_id, 0)}")
            runner.agent = self.models.watch(runner.agent, agent_id, chance)
            runner.state = self.state if runner.state is None else runner.state
        client = self.network.client(agent_id, role="reactor", card=runner.describe_card())
        member = self.members[agent_id] = await RunningAgent.start(runner, client, self._transports[agent_id])
        member.work.add_done_callback(lambda task: self._note_end(agent_id, member, task))
        await runner.ready()
        return runner

    def _note_end(self, agent_id: str, member: RunningAgent, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if self.members.get(agent_id) is member:
            del self.members[agent_id]
            if failure is not None:
                self.broken[agent_id] = failure

    async def kill(self, agent_id: str) -> None:
        """End an agent as ``kill -9`` does: nothing that it had begun reaches the hub any more."""
        await self._take_out(agent_id).kill()

    async def stop(self, agent_id: str) -> None:
        """End an agent in good order; what it had begun stays open for the next one."""
        await self._take_out(agent_id).stop()

    def _take_out(self, agent_id: str) -> RunningAgent:
        member = self.members.pop(agent_id, None)
        if member is None:
            raise SimulationError(f"No agent {agent_id} is up.")
        return member

    async def restart(self, agent_id: str) -> None:
        """Start an agent again that was killed or stopped, or one that runs after killing it."""
        if agent_id in self.members:
            await self.kill(agent_id)
        if agent_id not in self._makers:
            raise SimulationError(f"No agent {agent_id} has been started.")
        await self._start(self._makers[agent_id]())

    async def disconnect(self, agent_id: str) -> None:
        """Cut a participant's connection; its client finds out and comes back."""
        if agent_id not in self._transports:
            raise SimulationError(f"Nobody called {agent_id} is connected.")
        await self._transports[agent_id].cut()

    async def leave(self, agent_id: str) -> None:
        """A participant goes away in good order."""
        person = self.people.pop(agent_id, None)
        await (person.leave() if person is not None else self.stop(agent_id))

    # --- waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight: nothing on a link, to be committed, to be delivered again; no client looks for
        the hub; no reaction runs but those that wait for somebody's answer. What is for somebody who is away does not
        count. True only of a quiet loop."""
        hub = self.hub
        if hub is None or self._traffic.under_way or self._traffic.seekers or self.models.under_way:
            return False
        if hub.pending or hub.commit_lock.locked():
            return False
        if any(member.runner.is_at_work for member in self.members.values()):
            return False
        for key, _ in hub.state.items("attempt"):
            agent_id, _, seq = key.partition("/")
            if hub.is_online(agent_id) and hub.is_waiting(agent_id, int(seq)):
                return False
        return True

    async def idle(self, at_most_s: float = 60.0) -> None:
        """Wait until `is_idle`. Raises `TimeoutError`."""
        async with asyncio.timeout(at_most_s):
            await self._loop.when_quiet(lambda: self.is_idle)

    async def wait_for(self, wanted: Callable[[AnyMessage], bool], at_most_s: float = 60.0) -> AnyMessage:
        """Wait for the first message, from the beginning, that is ``wanted``. Raises `TimeoutError`."""
        for message in filter(wanted, self.messages):
            return message
        arrived: asyncio.Future[AnyMessage] = self._loop.create_future()
        entry = (wanted, arrived)
        self._awaited.append(entry)
        try:
            async with asyncio.timeout(at_most_s):
                return await arrived
        finally:
            self._awaited.remove(entry)

    def take_rows(self, rows: Sequence[Row]) -> None:
        """Take what the ledger has stored."""
        self.rows += rows
        new = [row for row in rows if row.type == "message"]
        self._unread += new
        if self._awaited and new:
            for message in self.messages[-len(new) :]:
                for wanted, arrived in self._awaited:
                    if not arrived.done() and wanted(message):
                        arrived.set_result(message)

    # --- the end

    def export(self) -> bytes:
        """The ledger as JSON lines, as `roundelay export` writes them: what must be the same for the same seed."""
        head = LogHead(epoch=self._epoch, name="roundelay")
        return b"".join(line + b"\n" for line in (encode_head(head), *map(encode_row, self.rows)))

    async def close(self) -> None:
        """End everybody and the hub. Idempotent."""
        for agent_id in (*self.members, *self.people):
            await self.leave(agent_id)
        if self._network is not None:
            await asyncio.gather(*(client.close() for client in self._network._clients))
        if self.hub is not None:
            hub, self.hub = self.hub, None
            await hub.close()


T = TypeVar("T")

GARBAGE_THRESHOLD = 50_000
"""How many new objects the garbage collector waits for while a simulation runs: it makes many that stay, and looking
through them took a fifth."""


def simulate(main: Callable[[Simulation], Awaitable[T]], setting: Setting | None = None, **options: Any) -> T:
    """Run ``main`` on a new simulation and give what it gives. Options are those of `Setting`, and go before it:
    ``simulate(main, seed=7)``.

    It has an event loop of its own, so it is not called from inside of one. Raises what ``main`` raises, and
    `virtual_time.Stalled`.
    """
    chosen = replace(setting or Setting(), **options)

    async def enter() -> T:
        async with Simulation(chosen) as simulation:
            return await main(simulation)

    return run_simulated(enter, chosen)


def run_simulated(enter: Callable[[], Coroutine[Any, Any, T]], setting: Setting) -> T:
    """Run what makes a simulation of this setting by itself, on a loop of its own; as `simulate` does."""
    if asyncio._get_running_loop() is not None:
        raise SimulationError(
            "A simulation has an event loop of its own: call it from a plain function, not from a coroutine."
        )
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *thresholds[1:])
    try:
        return run(enter(), SimulationLoop(is_virtual=setting.is_virtual, horizon_s=setting.horizon_s))
    finally:
        gc.set_threshold(*thresholds)
