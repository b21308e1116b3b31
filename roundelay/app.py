"""Connect the hub with its ledger, mods and transports. `serve` runs a node that listens; `Network` runs a hub inside
this process. No other module connects these parts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundelay.mods.channels import Channels
from roundelay.mods.discovery import Discovery
from roundelay.mods.files import Files
from roundelay.mods.messages import MessageChanges
from roundelay.mods.notes import Notes
from roundelay.mods.notify_when import NotifyWhen
from roundelay.mods.polls import Polls
from roundelay.mods.reservations import Reservations
from roundelay.mods.tasks import Tasks
from roundelay.mods.timers import TimersMod
from roundelay.network.blobs import BlobStore, FolderBlobs, MemoryBlobs, blob_folder
from roundelay.network.client import NetworkClient
from roundelay.network.client.transport import Transport
from roundelay.network.clock import Clock, NewId, ordered_id, random_id, system_clock
from roundelay.network.cluster.shared_log import LogUnavailable
from roundelay.network.config import Limits, NodeConfig, Quota, Role, list_web_hosts
from roundelay.network.core.joining import hash_token
from roundelay.network.core.rights import Rights, WrongRuleError, compile_rights
from roundelay.network.errors import ConfigError, ConnectError
from roundelay.network.extras import how_to_add
from roundelay.network.frames import Kind
from roundelay.network.frames import Role as SessionRole
from roundelay.network.home import owner_token
from roundelay.network.hub import Hub
from roundelay.network.hub.hub import NO_QUOTAS
from roundelay.network.hub.local import LocalTransport
from roundelay.network.hub.origin_policy import OriginPolicy
from roundelay.network.hub.replica import ReplicaHub, ReplicaReaders
from roundelay.network.hub.server import WebSocketServer
from roundelay.network.ledger import LeadershipLost, Ledger
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.sqlite import Durability, SQLiteLedger
from roundelay.network.log_urls import PostgresAddress, read_log_url
from roundelay.network.mod import Mod, add_mod_folder, load_mods
from roundelay.network.operations import list_operations
from roundelay.network.platforms import raise_file_limit
from roundelay.network.visibility import Visibility
from roundelay.nodes.price_list import NodePrices
from roundelay.runs.node_answers import NodeRunReader
from roundelay.web.site import PageSite

if TYPE_CHECKING:
    from roundelay.agents.runner import AgentRunner
    from roundelay.network.cluster.read_replica import ReadReplica
    from roundelay.network.cluster.replicated import ReplicatedLedger
    from roundelay.network.cluster.shared_log import SharedLog

Card = Mapping[str, Any] | None
OWN_MODS: dict[str, type[Mod]] = {
    it.id: it
    for it in (
        Channels,
        Discovery,
        Files,
        MessageChanges,
        Notes,
        NotifyWhen,
        Polls,
        Reservations,
        Tasks,
        TimersMod,
    )
}


@cache  # Reading the metadata of the package takes 4 ms.
def server_name() -> str:
    """Return the name that the hub sends in its ``welcome`` frame."""
    try:
        return f"roundelay/{version('roundelay')}"
    except PackageNotFoundError:
        return "roundelay"


def make_ledger(
    path: Path | None, name: str, durability: Durability, new_id: NewId, *, is_read_only: bool = False
) -> Ledger:
    """Return the ledger of a node: a SQLite file, or memory if there is no path or the durability is ``memory``. With
    ``is_read_only``, an index of a shared log may be opened too."""
    if path is None or durability == "memory":
        return MemoryLedger(epoch=new_id(), name=name)
    return SQLiteLedger(path, new_epoch=new_id, name=name, durability=durability, is_index=is_read_only)


def make_blobs(path: Path | None, durability: Durability, *, is_read_only: bool = False) -> BlobStore:
    """Return the blob store of a node. If the ledger is in memory, so is the store; otherwise the store is a folder
    next to the database file.
    """
    if path is None or durability == "memory":
        return MemoryBlobs()
    return FolderBlobs(blob_folder(path), is_read_only=is_read_only)


def _check_shared(config: NodeConfig, mods: Sequence[Mod]) -> None:
    """Raise `ConfigError` for a mod that cannot work on a node with a shared log."""
    names = [mod.id for mod in mods if mod.stores_blobs] if config.log is not None else []
    if names:
        raise ConfigError(
            f"The mod {names[0]} stores contents on the disk of one node, which the other nodes of a shared log cannot read. "
            f"Remove {names[0]} from `mods`, or remove `log`."
        )


def make_shared_log(url: str) -> SharedLog:
    """Return the shared log at a URL. Raises `ConfigError` if the URL is wrong or the client library for this kind of
    log is not installed."""
    address = read_log_url(url)
    try:
        # Import a client library only for its own kind of URL: an installation may have just the PostgreSQL or just the
        # NATS library.
        if isinstance(address, PostgresAddress):
            from roundelay.network.cluster.postgres import PostgresLog

            return PostgresLog(address)
        from roundelay.network.cluster.jetstream import JetStreamLog

        return JetStreamLog(address)
    except ImportError as error:
        raise ConfigError(f"A shared log needs the extra cluster. Run: {how_to_add('cluster')}") from error


def make_replicated_ledger(config: NodeConfig, say: Callable[[str], None], replica: ReadReplica) -> ReplicatedLedger:
    """Return the ledger of a node that writes to a shared log. Raises `ConfigError` for a wrong URL, for an option that
    a shared log excludes, or for a missing client library."""
    from roundelay.network.cluster.replicated import ReplicatedLedger

    assert config.log is not None
    shared = make_shared_log(config.log)
    if config.durability == "memory":
        raise ConfigError(
            "durability: memory cannot be combined with a shared log, because a shared log outlives its nodes."
        )
    # The shared log is authoritative. The index may lose records in a power failure, because the node reads them again.
    index = SQLiteLedger(config.db, new_epoch=random_id, name=config.name, durability="normal", is_index=True)
    # `full` is also the default durability. Require it of the shared log only if the user has set it.
    is_full = config.durability == "full" and "durability" in config.model_fields_set
    return ReplicatedLedger(
        shared, index, new_id=random_id, name=config.name, report=say, requires_full=is_full, replica=replica
    )


def make_rights(config: NodeConfig, mods: Sequence[Mod]) -> Rights | None:
    """Return the rights of a node with these mods, or None if its file defines no rights. Raises `ConfigError` with
    file and line for a wrong rule."""
    if config.rights is None:
        return None
    try:
        return compile_rights(config.rights, list_operations(mods), [mod.id for mod in mods])
    except WrongRuleError as error:
        message = f"rights.{error.role}.{error.field}: {error}"
        place = config.rights_node
        for step in (error.role, error.field, error.index):
            value = place.value if place is not None else None
            # Point at the deepest entry that exists in the file: a missing field has no line, but its role has one.
            if isinstance(value, dict) and step in value:
                place = value[str(step)]
            elif isinstance(value, list) and isinstance(step, int):
                place = value[step]
        raise place.error(message) if place is not None else ConfigError(message) from error


class StoppedWaiting(Exception):
    """Raised when a node is stopped before it became the leader."""


class Node:
    """A hub that listens at ``url``. People and services that join with ``owner_token`` are operators."""

    def __init__(self, hub: Hub, url: str, token: str, durability: str, close: Callable[[], Awaitable[None]]) -> None:
        self.hub = hub
        self.durability = durability
        """Durability at the time when the node became ready. Only a node with a shared log can have the durability
        ``replicated``.
        """
        self.url = url
        self.port = int(url.rpartition(":")[2].rstrip("/"))
        self.owner_token = token
        self._close = close

    async def close(self) -> None:
        """Stop listening, drain the hub, close the ledger. Idempotent."""
        await self._close()


async def _close(hub: Hub, server: WebSocketServer, shared: ReplicatedLedger | None) -> None:
    # Accept no new sessions while the hub ends the existing ones in order.
    server.stop_listening()
    await hub.close(hand_over=None if shared is None else shared.hand_over)
    await server.close()


@asynccontextmanager
async def serve(
    config: NodeConfig,
    *,
    tls: ssl.SSLContext | None = None,
    mods: Sequence[Mod] = (),
    is_read_only: bool = False,
    prepare: Callable[[Hub, str], Awaitable[None]] | None = None,
    stopping: asyncio.Event | None = None,
    listens: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Node]:
    """Run a node for the duration of an ``async with`` block. ``mods`` are loaded after the mods in the config.

    With ``is_read_only``, the hub accepts no messages, records or changes. ``prepare`` receives the hub and its address
    before clients can connect; an error in ``prepare`` ends the node. A node with a shared log waits until it is the
    leader. While the node waits, it listens and refuses sessions, reports its address to ``listens``, and reports its
    state to ``say``. Raises `StoppedWaiting` if ``stopping`` is set during this wait. Raises `ModError`, `LedgerError`,
    `ConfigError` (the owner's token cannot be stored) or `ConnectError` (the address cannot be bound). Such an error
    closes everything that was opened.
    """
    raise_file_limit()
    add_mod_folder(config.folder)
    # Load the mods before the ledger: a mod that cannot be loaded must leave no new database file.
    loaded = load_mods([*config.mods, *mods], OWN_MODS)
    _check_shared(config, loaded)
    rights = make_rights(config, loaded)
    await _check_address(config.host, config.port)
    token = owner_token(config.db)
    settings: dict[str, Any] = {
        "limits": config.limits,
        "quotas": config.quotas,
        "retain": config.retain,
        "mods": loaded,
        "visibility": config.visibility,
        "registration": config.registration,
        "rights": rights,
        "server": server_name(),
        "owner_hash": hash_token(token),
        "is_read_only": is_read_only,
        "price_list": NodePrices(),
        "run_reader": NodeRunReader(),
        "blobs": make_blobs(config.db, config.durability, is_read_only=is_read_only),
        "clock": system_clock,
        "new_id": random_id,
    }
    ledger = make_ledger(config.db, config.name, config.durability, random_id, is_read_only=is_read_only)
    shared = readers = None
    if config.log is not None:
        readers = ReplicaReaders(lambda index: ReplicaHub(index, follows=index.describe_leader, **settings))
        ledger = shared = make_replicated_ledger(config, say, readers)
    hub = Hub(ledger, public_url=config.public_url, shared_log=shared, **settings)
    server = WebSocketServer(
        hub,
        config.limits,
        behind_proxy=config.behind_proxy,
        origin_policy=OriginPolicy(config.host, list_web_hosts(config), behind_proxy=config.behind_proxy),
        site=PageSite(is_reloaded=config.web_reload) if config.web else None,
        shared_log=shared,
        readers=readers,
    )
    close = partial(_close, hub, server, shared)
    try:
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            # Bind before the ledger is opened: a second node at this address must fail before it changes anything.
            port = await server.bind(config.host, config.port)
            url = f"{'wss' if tls else 'ws'}://{host}:{port}/"
            if shared is not None:  # clients must learn that this node waits for leadership
                name = socket.gethostname() if config.host in ("0.0.0.0", "::") else host
                shared.set_identity(f"{name}:{port}", owner=hash_token(hash_token(token))[:16])
                server.is_accepting_sessions = False
                server.listen(tls=tls)
                listens(url)
            await _unless_stopped(hub.start(), stopping)
            if prepare is not None:
                await _unless_stopped(_prepare(hub, partial(prepare, hub, url)), stopping)
            # A node without a shared log starts to listen only now, because it would have to refuse earlier
            # connections.
            if shared is None:
                server.listen(tls=tls)
                listens(url)
            server.is_accepting_sessions = True
        except OSError as error:
            raise _cannot_listen(config.host, config.port, error) from error
        yield Node(hub, url, token, config.durability if shared is None else shared.durability, close)
    finally:
        await close()


async def _unless_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event | None) -> None:
    """Await ``work``, which may wait for a ledger. Raises `StoppedWaiting` if ``stopping`` is set first, or the error
    of ``work``."""
    doing = asyncio.create_task(work, name="node-start")
    if stopping is not None:
        stop_request = asyncio.create_task(stopping.wait())
        await asyncio.wait((doing, stop_request), return_when=asyncio.FIRST_COMPLETED)
        stop_request.cancel()
        if not doing.done():
            # Cancel the work: a node may wait days for leadership, but a stop must take effect at once.
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            raise StoppedWaiting
    await doing


async def _prepare(hub: Hub, prepare: Callable[[], Awaitable[None]]) -> None:
    """Prepare the hub. Repeat the preparation if the shared log became unavailable or another node was elected
    meanwhile."""
    while True:
        try:
            return await prepare()
        except (LeadershipLost, LogUnavailable) as error:
            hub.reopen_ledger(error)
            await hub.status.opened.wait()


async def _check_address(host: str, port: int) -> None:
    """Check that a node can listen at the address, before any file is created. Raises `ConnectError`."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # Without this option, the probe for `::` would collide with the probe for `0.0.0.0`.
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConnectError:
    return ConnectError(
        f"Cannot listen on {host}:{port}: {error.strerror or error}; choose another --port, or stop the program "
        "that uses this port."
    )


class Network:
    """A hub in this process, without a port, for scripts and tests. Use `Network.open` to create it."""

    def __init__(self, hub: Hub, new_id: NewId, clock: Clock = system_clock) -> None:
        self.hub = hub
        self._new_id = new_id
        self._clock = clock
        self._clients: list[NetworkClient] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path | str | None = None,
        *,
        name: str = "roundelay",
        durability: Durability = "full",
        mods: Sequence[str | Mod] = ("channels", "discovery"),
        limits: Limits | None = None,
        quotas: Mapping[str, Quota] = NO_QUOTAS,
        visibility: Visibility = "people",
        rights: Mapping[str, Role] | None = None,
        clock: Clock = system_clock,
        new_id: NewId = ordered_id,
    ) -> AsyncIterator[Network]:
        """Open a network on a database file, or in memory if ``path`` is None. Raises `LedgerError` or `ModError`.

        ``quotas`` maps the id of a participant to its quota. ``rights`` defines the roles of docs/rights.md; a wrong
        rule raises `ConfigError`. ``clock`` and ``new_id`` are the only sources of time and randomness for the hub and
        this network's clients.
        """
        loaded = load_mods(list(mods), OWN_MODS)
        hub = Hub(
            make_ledger(Path(path) if path is not None else None, name, durability, new_id),
            limits=limits or Limits(),
            quotas=quotas,
            mods=loaded,
            visibility=visibility,
            rights=make_rights(NodeConfig(rights=dict(rights)), loaded) if rights is not None else None,
            server=server_name(),
            price_list=NodePrices(),
            run_reader=NodeRunReader(),
            blobs=make_blobs(Path(path) if path is not None else None, durability),
            clock=clock,
            new_id=new_id,
        )
        await hub.start()
        network = cls(hub, new_id, clock)
        try:
            yield network
        finally:
            await asyncio.gather(*(client.close() for client in network._clients))
            await hub.close()

    def client(
        self, agent_id: str, *, kind: Kind = "agent", role: SessionRole = "observer", card: Card = None
    ) -> NetworkClient:
        """Return a client that is not connected yet. Closing the network closes the client."""
        transport, jitter = self._make_link(agent_id)
        client = NetworkClient(
            agent_id,
            kind=kind,
            role=role,
            card=card,
            transport=transport,
            new_id=self._new_id,
            jitter=jitter,
            clock=self._clock,
        )
        self._clients.append(client)
        return client

    def _make_link(self, agent_id: str) -> tuple[Transport, Callable[[], float]]:
        """Return a client's transport to the hub, and the function that returns the jitter of its reconnects."""
        # clients in one process need no random delay between their reconnects
        return LocalTransport(self.hub), lambda: 1.0

    async def join(
        self, agent_id: str, *, kind: Kind = "agent", role: SessionRole = "observer", card: Card = None
    ) -> NetworkClient:
        """Join as a participant and return the connected client. People and services that join this way are
        operators.
        """
        client = self.client(agent_id, kind=kind, role=role, card=card)
        await client.connect()
        return client

    @asynccontextmanager
    async def run(self, *runners: AgentRunner) -> AsyncIterator[None]:
        """Run agents in this process until the block ends. The agents are connected and ready when the block begins.

        If a runner ends early with an error, the block raises this error, at its end or before.
        """
        clients = [await self.join(it.agent_id, role="reactor", card=it.describe_card()) for it in runners]
        # Create the wait before the first runner starts: if a runner fails at once, a later wait would never end.
        ready = asyncio.gather(*(it.ready() for it in runners))
        running = [asyncio.create_task(it.run(client)) for it, client in zip(runners, clients, strict=True)]
        try:
            await ready
            yield
        finally:
            for runner in runners:
                await runner.stop()
            await asyncio.gather(*(client.close() for client in clients))
            await asyncio.gather(*running)
