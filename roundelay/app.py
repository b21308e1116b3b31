"""Wires hub, ledger, mods and transports: a node that listens (`serve`), and a network in this process (`Network`). No
other module does that."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
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


def server_name() -> str:
    """Return the hub's name in ``welcome``."""
    try:
        return f"roundelay/{version('roundelay')}"
    except PackageNotFoundError:
        return "roundelay"


def make_ledger(
    path: Path | None, name: str, durability: Durability, new_id: NewId, *, is_read_only: bool = False
) -> Ledger:
    """Return the ledger of a node: in memory without a path or with durability ``memory``, or else the SQLite file. The index
    of a shared log can be opened only if nothing is written."""
    if path is None or durability == "memory":
        return MemoryLedger(epoch=new_id(), name=name)
    return SQLiteLedger(path, new_epoch=new_id, name=name, durability=durability, is_index=is_read_only)


def make_blobs(path: Path | None, durability: Durability, *, is_read_only: bool = False) -> BlobStore:
    """Return the blob store of a node: in memory like its ledger, or else a folder next to the database file."""
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
    """Return the log with this address. Raises `ConfigError` for a wrong address, or if the client of its engine is missing."""
    address = read_log_url(url)
    try:
        # Each client is imported only for its own address: an installation may have one and not the other.
        if isinstance(address, PostgresAddress):
            from roundelay.network.cluster.postgres import PostgresLog

            return PostgresLog(address)
        from roundelay.network.cluster.jetstream import JetStreamLog

        return JetStreamLog(address)
    except ImportError as error:
        raise ConfigError(f"A shared log needs the extra cluster. Run: {how_to_add('cluster')}") from error


def make_replicated_ledger(config: NodeConfig, say: Callable[[str], None], replica: ReadReplica) -> ReplicatedLedger:
    """Return the ledger of a node that shares its log. Raises `ConfigError` for a wrong address, for options that a shared log
    does not allow, or if the client of its engine is missing."""
    from roundelay.network.cluster.replicated import ReplicatedLedger

    assert config.log is not None
    shared = make_shared_log(config.log)
    if config.durability == "memory":
        raise ConfigError("durability memory does not go with a shared log, which outlives its nodes.")
    # The log is the truth: records that a power loss takes from the index are read again.
    index = SQLiteLedger(config.db, new_epoch=random_id, name=config.name, durability="normal", is_index=True)
    is_full = config.durability == "full" and "durability" in config.model_fields_set  # not by default
    return ReplicatedLedger(
        shared, index, new_id=random_id, name=config.name, report=say, requires_full=is_full, replica=replica
    )


def make_rights(config: NodeConfig, mods: Sequence[Mod]) -> Rights | None:
    """Return the rights of a node with these mods, if its file has a page of rights. Raises `ConfigError` for a wrong rule,
    with file and line."""
    if config.rights is None:
        return None
    try:
        return compile_rights(config.rights, list_operations(mods), [mod.id for mod in mods])
    except WrongRuleError as error:
        message = f"rights.{error.role}.{error.field}: {error}"
        place = config.rights_node
        for step in (error.role, error.field, error.index):
            value = place.value if place is not None else None
            # As deep as the file names it: a role without this field still has a line to point at.
            if isinstance(value, dict) and step in value:
                place = value[str(step)]
            elif isinstance(value, list) and isinstance(step, int):
                place = value[step]
        raise place.error(message) if place is not None else ConfigError(message) from error


class StoppedWaiting(Exception):
    """A node was stopped before it became the leader."""


class Node:
    """A hub that listens at ``url``. ``owner_token`` lets people and services join as operators."""

    def __init__(self, hub: Hub, url: str, token: str, durability: str, close: Callable[[], Awaitable[None]]) -> None:
        self.hub = hub
        self.durability = durability
        """Durability when the node became ready; only a shared log has ``replicated``."""
        self.url = url
        self.port = int(url.rpartition(":")[2].rstrip("/"))
        self.owner_token = token
        self._close = close

    async def close(self) -> None:
        """Stop listening, drain the hub, close the ledger. Idempotent."""
        await self._close()


async def _close(hub: Hub, server: WebSocketServer, shared: ReplicatedLedger | None) -> None:
    # First nobody new comes in; then the sessions that are there are ended in order.
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
    """Run a node for the length of an ``async with``; ``mods`` come after those that the config names.

    With ``is_read_only`` the hub accepts no messages, records or changes. ``prepare`` gets the hub and its address before
    anybody can connect; what it raises ends the node. A node that shares its log waits here until it leads. Meanwhile it
    listens and refuses sessions; it reports its address to ``listens`` and its state to ``say``. It raises `StoppedWaiting`
    if ``stopping`` is set before it leads. Raises `ModError`, `LedgerError`, `ConfigError` (the owner's token cannot be
    stored) or `ConnectError` (the address cannot be bound), and leaves nothing half open.
    """
    raise_file_limit()
    add_mod_folder(config.folder)
    # Before the ledger: a mod that cannot be loaded must leave no new database behind.
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
            # Bound before the ledger is opened, so that a second node at this address fails before it touches anything.
            port = await server.bind(config.host, config.port)
            url = f"{'wss' if tls else 'ws'}://{host}:{port}/"
            if shared is not None:  # clients must learn that it waits
                name = socket.gethostname() if config.host in ("0.0.0.0", "::") else host
                shared.set_identity(f"{name}:{port}", owner=hash_token(hash_token(token))[:16])
                server.is_accepting_sessions = False
                server.listen(tls=tls)
                listens(url)
            await _unless_stopped(hub.start(), stopping)
            if prepare is not None:
                await _unless_stopped(_prepare(hub, partial(prepare, hub, url)), stopping)
            # A node of its own listens only when it can serve: who connected earlier would only be refused.
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
    """Await work that may wait for a ledger. Raises `StoppedWaiting`, and what the work raises."""
    doing = asyncio.create_task(work, name="node-start")
    if stopping is not None:
        stop_request = asyncio.create_task(stopping.wait())
        await asyncio.wait((doing, stop_request), return_when=asyncio.FIRST_COMPLETED)
        stop_request.cancel()
        if not doing.done():
            # A node that waits for leadership may wait for days, and a stop must not.
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            raise StoppedWaiting
    await doing


async def _prepare(hub: Hub, prepare: Callable[[], Awaitable[None]]) -> None:
    """Prepare the hub. Repeat this if the shared log became unavailable meanwhile, or another node was elected."""
    while True:
        try:
            return await prepare()
        except (LeadershipLost, LogUnavailable) as error:
            hub.reopen_ledger(error)
            await hub.status.opened.wait()


async def _check_address(host: str, port: int) -> None:
    """Check that a node can listen at the address, before any file is made. Raises `ConnectError`."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # Without this, the probe for `::` would collide with the one for `0.0.0.0`.
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConnectError:
    return ConnectError(
        f"Cannot listen on {host}:{port}: {error.strerror or error}; choose another --port, or stop what uses it."
    )


class Network:
    """A hub in this process, without a port, for scripts and tests. Made by `Network.open`."""

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
        """Open a network over a database file, or in memory without one. Raises `LedgerError` or `ModError`.

        ``quotas`` are the participants' quotas, by id, and ``rights`` the roles of docs/rights.md (`ConfigError` for a wrong
        rule). ``clock`` and ``new_id`` are the only sources of time and randomness for the hub and this network's clients.
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
        """Return a client that is not connected yet. It is closed with the network."""
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
        """Return a client's transport to the hub, and the jitter of its reconnects."""
        return LocalTransport(self.hub), lambda: 1.0  # one process needs no spread

    async def join(
        self, agent_id: str, *, kind: Kind = "agent", role: SessionRole = "observer", card: Card = None
    ) -> NetworkClient:
        """Join as a participant and return the connected client. People and services are operators here."""
        client = self.client(agent_id, kind=kind, role=role, card=card)
        await client.connect()
        return client

    @asynccontextmanager
    async def run(self, *runners: AgentRunner) -> AsyncIterator[None]:
        """Run agents in this process until the block ends. Inside the block they are connected and ready.

        Raises the error of a runner that ended early, at the latest when the block ends.
        """
        clients = [await self.join(it.agent_id, role="reactor", card=it.describe_card()) for it in runners]
        # Wait before the first run begins: a run that fails at once would leave a later wait without an end.
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
