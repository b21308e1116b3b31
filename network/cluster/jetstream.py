"""`JetStreamLog`: a shared log in a stream of NATS JetStream, accessed with the official NATS client.

Each network has its own stream, in file storage. A full stream refuses new records instead of dropping old ones. Each
record is published with the sequence number that the last record of the stream must have
(``Nats-Expected-Last-Sequence``). So if two nodes publish at the same time, the server accepts only one record. Each
record also has an id. If the answer to a record is lost, the client publishes the record again with the same id, and
the server stores it only once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from roundelay.network.errors import LedgerError
from roundelay.network.extras import needs
from roundelay.network.ledger import LeadershipLost, LogFull
from roundelay.network.log_urls import NatsAddress

from .records import digest
from .shared_log import LogElectionPending, LogRecord, LogTruncated, LogUnavailable, UnusableLog, missing_log

with needs("cluster"):
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error as NatsError
    from nats.errors import NoRespondersError
    from nats.js import JetStreamContext
    from nats.js.api import (
        ConsumerConfig,
        DeliverPolicy,
        DiscardPolicy,
        PeerInfo,
        PersistMode,
        RetentionPolicy,
        StorageType,
        StreamConfig,
        StreamInfo,
    )
    from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError


# Error codes of the NATS server (https://github.com/nats-io/nats-server/blob/main/server/errors.json)
WRONG_LAST_SEQUENCE = (10071, 10164)
"""Error codes for a stream whose last record does not have the expected sequence number."""
STILL_STORING = 10158
"""Error code of a record while an earlier attempt to store it has not finished."""
NO_LEADER = 10008
"""Error code while the servers are electing their leader."""
FULL = (10023, 10047, 10077)
"""Error codes of a full stream or server. A retry does not help, although the server reports status 503, as it does for
temporary failures."""
NOT_ENABLED = (10039, 10076)
TOO_FEW_SERVERS = (10005, 10074)
"""Error codes if fewer servers are running than the configured number of replicas."""

CONNECT_S = 5
CONNECT_ALL_S = 10.0
"""Time limit for the first connection to any of the servers, in seconds."""
RECONNECTS = 5
"""Number of attempts to reconnect to each server. After the last attempt, the log must be opened again."""
APPEND_S = 2.0
"""Timeout of one attempt to append a record, in seconds."""
PATIENCE_S = 10.0
"""Maximum time for all attempts to append a record, in seconds. The servers may need this time to elect their
leader."""
FOLLOW_S = 5.0
"""Time without a new record after which a follower queries the end of the log, in seconds."""
AWAY_S = 4.0
"""Time without a sign of life from a replica after which it counts as absent, in seconds. Replicas normally contact the
stream's leader every second."""
HEARTBEAT_S = 5.0
"""Interval of the server's heartbeats to a consumer, in seconds. If two heartbeats are missing, the client creates the
consumer again."""
CLOSE_S = 2.0
MONITOR_S = 1.0
"""Timeout of a request to a server's monitoring port, in seconds."""
MAX_ANSWER_BYTES = 1 << 20
MAX_BROADCASTS = 64
"""Maximum number of unread broadcasts in memory. If there are more, the oldest ones are dropped."""
MIN_RECORD_BYTES = 64 * 1024
UNBOUNDED = 1 << 62
ALWAYS = "always"
FAILURES = (NatsError, OSError, asyncio.TimeoutError)

_T = TypeVar("_T")


class _NotEncryptedError(NatsError):
    pass


class _EncryptedClient(Client):
    """NATS client that never sends credentials over an unencrypted connection. The original client sends credentials
    unencrypted if the server does not request TLS."""

    def _connect_command(self) -> bytes:
        # If the server requires TLS, the connection is already encrypted at this point.
        if not self._server_info.get("tls_required"):
            raise _NotEncryptedError("the server does not encrypt, but the address begins with tls://")
        return super()._connect_command()


class JetStreamLog:
    """A `SharedLog` in one stream of NATS JetStream."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self.name, self.network = address.shown, address.stream
        self._nats: Client | None = None
        self._broadcasts: deque[str] = deque(maxlen=MAX_BROADCASTS)
        self._has_broadcast = asyncio.Event()
        self._subject = f"roundelay.{address.stream}"
        self._syncs: dict[str, str] = {}
        """Last known sync setting of each server, by server name: ``always`` or an interval."""

    async def open(self, *, create: bool = True) -> None:
        refusals = list[Exception]()
        client = self._nats = await self._connect(refusals)
        try:
            if self.max_bytes < MIN_RECORD_BYTES:
                raise LedgerError(
                    f"The server of {self.name} takes messages of at most {self.max_bytes} bytes; a shared log needs "
                    f"{MIN_RECORD_BYTES} (max_payload)."
                )
            await self._make_stream(create=create)
            await client.subscribe(f"{self._subject}.said", cb=self._receive)
            # After the flush, the subscription is active, so no broadcast is missed.
            await _await_cancellable(client.flush(CONNECT_S))
        except FAILURES as error:
            await self.close()
            if refusals:
                raise LedgerError(
                    f"The NATS servers of {self.name} do not give this user the permissions of a node "
                    f"({refusals[-1]}). The user must be allowed to publish to $JS.> and {self._subject}.>, and to "
                    f"subscribe to _INBOX.> and {self._subject}.said."
                ) from error
            if _is_without_jetstream(error):
                raise LogUnavailable(
                    f"The server of {self.name} has no JetStream for this user, and a shared log is a stream of it. "
                    "Enable it: configure `jetstream` at the server and in the user's account."
                ) from error
            if isinstance(error, asyncio.TimeoutError) or (isinstance(error, APIError) and error.err_code == NO_LEADER):
                raise LogElectionPending(
                    f"The servers of {self.name} can be reached, but do not answer ({_describe(error)})."
                ) from error
            raise self._failed(error) from error
        except BaseException:
            await self.close()
            raise

    async def _connect(self, refusals: list[Exception]) -> Client:
        """Connect to the servers and return the client. Errors that arrive later are appended to ``refusals``: the
        servers report most permission errors only to the client's error callback, not to the call that caused them."""
        client = _EncryptedClient() if self._address.is_encrypted else Client()

        async def note_error(error: Exception) -> None:
            if isinstance(error, ssl.SSLError | _NotEncryptedError) and not client.is_reconnecting:
                # Raise the error. Otherwise the client would wait forever for a TLS connection that has failed.
                raise error
            if "authorization" in str(error).lower() or "permissions" in str(error).lower():
                refusals.append(error)

        try:
            connecting = client.connect(
                list(self._address.servers),
                user=self._address.user if self._address.password is not None else None,
                password=self._address.password,
                token=self._address.user or None if self._address.password is None else None,
                connect_timeout=CONNECT_S,
                max_reconnect_attempts=RECONNECTS,  # with -1, the first attempt to connect would never end
                reconnect_time_wait=1,
                error_cb=note_error,
            )
            async with asyncio.timeout(CONNECT_ALL_S):
                await _await_cancellable(connecting)
        except asyncio.CancelledError:
            await _close_client(client)
            raise
        except FAILURES as error:
            await _close_client(client)
            if isinstance(error, ssl.SSLError | _NotEncryptedError):
                raise LogUnavailable(
                    f"A NATS server of {self.name} cannot be trusted ({_describe(error)}). Give the server a "
                    "certificate for its host from an authority that this machine trusts. SSL_CERT_FILE can name "
                    "another authority."
                ) from error
            if refusals:
                raise LedgerError(
                    f"The NATS servers of {self.name} refuse this user ({refusals[-1]}). Name a user and a password "
                    "that the servers know, as in nats://USER:PASSWORD@HOST:PORT/STREAM."
                ) from error
            why = (
                f"nothing that speaks NATS answered within {CONNECT_ALL_S:.0f} s"
                if not str(error)
                else _describe(error)
            )
            raise LogUnavailable(f"No NATS server of {self.name} can be reached ({why}); is one running?") from error
        return client

    async def close(self) -> None:
        # Clear the attribute before waiting, so that no other task uses a client that is being closed.
        client, self._nats = self._nats, None
        if client is not None:
            await _close_client(client)

    @property
    def max_bytes(self) -> int:
        return self._client().max_payload  # may change when the client reconnects to another server

    async def end(self) -> int:
        return (await self._get_info()).state.last_seq

    async def first(self) -> int:
        state = (await self._get_info()).state
        # `drop` deletes only the oldest records, so it leaves no gaps. A gap means that someone has deleted single
        # records.
        if state.num_deleted:
            raise UnusableLog(
                f"In the shared log {self.name}, {state.num_deleted} records are missing between the first and the "
                "last record, because someone has deleted them. Restore the log."
            )
        return max(1, state.first_seq) if state.messages else state.last_seq + 1

    async def drop(self, before: int) -> bool:
        await self._request(self._context().purge_stream(self._address.stream, seq=before))
        return True

    async def room(self) -> tuple[int, int]:
        info = await self._get_info()
        total = info.config.max_bytes or -1
        return (UNBOUNDED, UNBOUNDED) if total < 0 else (max(0, total - info.state.bytes), total)

    async def append(self, data: bytes, after: int) -> int:
        # Fencing: the server refuses this record if another node has appended a record that this node has not read.
        headers = {"Nats-Expected-Last-Sequence": str(after), "Nats-Msg-Id": f"{after + 1}-{digest(data)}"}
        loop = asyncio.get_running_loop()
        # Retry with the same id and the same expected sequence number. The server then stores the record only once,
        # even if it arrives several times.
        deadline = loop.time() + PATIENCE_S
        while True:
            try:
                answer = self._context().publish(
                    f"{self._subject}.log", data, timeout=APPEND_S, stream=self._address.stream, headers=dict(headers)
                )
                return (await _await_cancellable(answer)).seq
            except APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    # An earlier attempt may have stored the record: its answer may be lost, and the server may have
                    # forgotten the id. So read the stored record before giving up leadership.
                    if await self._is_stored(data, after + 1):  # an earlier attempt has stored the record
                        return after + 1
                    raise LeadershipLost(f"Another node has written to the shared log {self.name}.") from error
                # Raise permanent errors immediately, because a retry would only delay the commit.
                if not _may_pass(error) or loop.time() > deadline:
                    raise self._failed(error) from error
            except FAILURES as error:
                if loop.time() > deadline:
                    raise await self._explain_silence(error) from error
            await asyncio.sleep(0.05)

    async def follow(self, after: int) -> AsyncIterator[LogRecord]:
        while True:
            config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
            subscribing = self._context().subscribe(
                f"{self._subject}.log",
                stream=self._address.stream,
                ordered_consumer=True,
                idle_heartbeat=HEARTBEAT_S,
                config=config,
            )
            subscription = await self._request(subscribing)
            is_first = True
            try:
                first = (await _await_cancellable(self._context().stream_info(self._address.stream))).state.first_seq
                if after + 1 < first:
                    raise LogTruncated(
                        f"The shared log {self.name} now begins at record {first}, but record {after + 1} was "
                        "requested."
                    )
                while True:
                    try:
                        message = await _await_cancellable(subscription.next_msg(timeout=FOLLOW_S))
                    except TimeoutError:
                        if await self.end() > after:
                            break  # the consumer does not receive a record of the log, so subscribe again
                        continue
                    metadata = message.metadata
                    position = metadata.sequence.stream
                    # If a record is missing or repeated, subscribe again after the last record, because a follower must
                    # neither miss nor repeat records. Records may be lost in transit. Records are repeated if the
                    # server restarts before the consumer's first record: the client then creates the consumer again at
                    # the beginning of the stream.
                    if position <= after or (position != after + 1 and not is_first):
                        break
                    is_first = False
                    after = position
                    yield LogRecord(position, message.data, has_more=bool(metadata.num_pending))
            except FAILURES as error:
                raise self._failed(error) from error
            # When the client gives up its connection, it raises CancelledError too, although nobody has cancelled this
            # task.
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise LogUnavailable(
                    f"The shared log {self.name} failed, because its connection was closed."
                ) from error
            finally:
                with suppress(*FAILURES):
                    await subscription.unsubscribe()

    async def broadcast(self, text: str) -> None:
        await self._request(self._client().publish(f"{self._subject}.said", text.encode()))

    async def next_broadcast(self) -> str:
        while not self._broadcasts:
            self._has_broadcast.clear()
            await self._has_broadcast.wait()
        return self._broadcasts.popleft()

    async def find_sync_risk(self) -> str:
        self._check_config((await self._get_info()).config)
        if not self._address.monitors:
            return (
                "its address has no monitoring port, where the servers show how they sync: name their port, as in "
                f"{self.name}?monitor=8222"
            )
        info, _ = await asyncio.gather(self._get_info(), self._ask_monitors())
        cluster = info.cluster
        names = [cluster.leader or ""] if cluster is not None else []
        peers = (cluster.replicas if cluster is not None else None) or []
        # Check every server that may acknowledge records. A server that syncs late can lose records that a majority has
        # acknowledged.
        names += [
            peer.name or "" for peer in peers if not _is_away(peer)
        ]  # skip absent replicas, because they acknowledge nothing
        for name in names:
            sync = self._syncs.get(name)
            if sync is None:
                return f"the server {name or 'of its stream'} has not shown at its monitoring port how it syncs"
            if sync != ALWAYS:
                return f"the server {name} syncs {sync}, not before it acknowledges: set sync_interval: always"
        return "" if names else "its servers do not say which of them stores it"

    async def _ask_monitors(self) -> None:
        """Ask each server at its monitoring port how it syncs to disk. If a server does not answer, its last answer
        stays valid."""
        requests = (asyncio.to_thread(_fetch_sync_mode, host, port) for host, port in self._address.monitors)
        for modes in await asyncio.gather(*requests):
            self._syncs.update(modes)

    async def _get_info(self) -> StreamInfo:
        return await self._request(self._context().stream_info(self._address.stream))

    async def _request(self, work: Awaitable[_T]) -> _T:
        """Await a request that is not retried. A failure is raised as `LedgerError`."""
        try:
            return await _await_cancellable(work)
        except FAILURES as error:
            raise self._failed(error) from error

    async def describe(self) -> dict[str, Any]:
        risk = await self.find_sync_risk()
        info = await self._get_info()
        config, cluster = info.config, info.cluster
        servers = [] if cluster is None else [{"name": cluster.leader or "", "leads": True, "is_current": True}]
        for peer in (cluster.replicas if cluster is not None else None) or []:
            lag = {"is_current": bool(peer.current) and not peer.offline, "records_behind": peer.lag or 0}
            servers.append({"name": peer.name or "", "leads": False, **lag})
        for server in servers:
            server["syncs"] = self._syncs.get(str(server["name"]), "")
        return {
            "durability": "replicated" if risk else "full",
            "doubt": risk,
            "engine": "JetStream",
            "records": info.state.messages,
            "bytes": info.state.bytes,
            "max_bytes": config.max_bytes,
            "replicas": config.num_replicas or 1,
            "servers": servers,
        }

    async def _receive(self, message: Msg) -> None:
        self._broadcasts.append(message.data.decode(errors="replace"))
        self._has_broadcast.set()

    def _expected_config(self) -> StreamConfig:
        return StreamConfig(
            name=self._address.stream,
            subjects=[f"{self._subject}.log"],
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            num_replicas=self._address.replicas,
            max_bytes=self._address.max_bytes,
        )

    async def _make_stream(self, *, create: bool) -> None:
        """Find the stream of the log, or create it. Raises `LedgerError` if the stream is not configured as a log
        requires."""
        try:
            config = (await _await_cancellable(self._context().stream_info(self._address.stream))).config
        except NotFoundError:
            if not create:
                raise missing_log(self.name) from None
            config = (await _await_cancellable(self._context().add_stream(self._expected_config()))).config
        self._check_config(config)

    def _check_config(self, config: StreamConfig) -> None:
        """Raise `LedgerError` if the configuration of the stream could make it lose or refuse records. Someone may have
        changed the configuration since the last check."""
        expected = self._expected_config()
        wrong = [
            name
            for name in ("subjects", "retention", "discard", "storage", "sealed")
            if getattr(config, name) != getattr(expected, name)
        ]
        # Accept more replicas than configured, because an operator may have scaled the stream.
        wrong += ["num_replicas"] if (config.num_replicas or 1) < self._address.replicas else []
        # In ASYNC mode, a stream acknowledges records before it has written them.
        wrong += ["persist_mode"] if config.persist_mode == PersistMode.ASYNC else []
        # Each limit in this list would make the stream drop or refuse records.
        limits = ("max_age", "max_msgs", "max_msgs_per_subject", "max_msg_size")
        wrong += [name for name in limits if (getattr(config, name) or 0) > 0]
        if wrong:
            settings = ", ".join(f"{name} {getattr(config, name)!r}" for name in wrong)
            raise LedgerError(
                f"The stream {self._address.stream} of {self.name} exists, but is not a log of a Roundelay network "
                f"with the requested settings ({settings}). Name another stream, or the replicas that this stream "
                "has."
            )

    async def _explain_silence(self, error: BaseException) -> LedgerError:
        """Return an error that explains why no append was answered. If the disk of a server has refused a record, the
        server still answers all other requests."""
        if isinstance(error, asyncio.TimeoutError):
            with suppress(LedgerError):
                cluster = (await self._get_info()).cluster
                name = (cluster.leader if cluster is not None else None) or "that leads the stream"
                return LogUnavailable(
                    f"The shared log {self.name} takes no record: its server {name} answers, and stores nothing. Its "
                    "disk may be full: see its log, make room, and start that server again."
                )
        return self._failed(error)

    async def _is_stored(self, data: bytes, position: int) -> bool:
        try:
            return (await _await_cancellable(self._context().get_msg(self._address.stream, seq=position))).data == data
        except NotFoundError:
            return False
        except FAILURES as error:
            raise self._failed(error) from error

    def _client(self) -> Client:
        if self._nats is None:
            raise LedgerError(f"The shared log {self.name} is closed.")
        return self._nats

    def _context(self) -> JetStreamContext:
        return self._client().jetstream(timeout=CONNECT_S)

    def _failed(self, error: BaseException) -> LedgerError:
        code = error.err_code if isinstance(error, APIError) else None
        if code in FULL:
            return LogFull(
                f"The shared log {self.name} has no room ({_describe(error)}). Give the stream and its servers more, "
                "or name fewer bytes with ?max_bytes=."
            )
        if code in TOO_FEW_SERVERS:
            return LedgerError(
                f"The servers of {self.name} cannot keep {self._address.replicas} replicas ({_describe(error)}). Run "
                "as many servers in one cluster, or name fewer replicas with ?replicas=."
            )
        # While the servers elect a leader, they may not even find their streams or consumers.
        return LogUnavailable(f"The shared log {self.name} failed: {_describe(error)}.")


async def _close_client(client: Client) -> None:
    with suppress(*FAILURES):
        async with asyncio.timeout(CLOSE_S):  # limit the time, because an unreachable server accepts no more bytes
            await client.close()


async def _await_cancellable(work: Awaitable[_T]) -> _T:
    """Await ``work`` without losing a cancellation.

    The NATS client waits with `asyncio.wait_for`. Before Python 3.12, `wait_for` loses a cancellation that arrives at
    the same time as the answer (https://github.com/python/cpython/issues/86296). The node would then ignore a request
    to stop.
    """
    task = asyncio.current_task()
    cancellations = 0 if task is None else task.cancelling()
    try:
        return await work
    finally:
        if task is not None and task.cancelling() > cancellations:
            raise asyncio.CancelledError


def _is_away(peer: PeerInfo) -> bool:
    """Return whether a replica is absent. It is absent if the stream's leader has received nothing from it for a long
    time, or nothing since the leader's election."""
    is_heard = bool(peer.current or peer.active)
    return bool(peer.offline) or not is_heard or (peer.active or 0) > AWAY_S * 1e9


def _may_pass(error: APIError) -> bool:
    return error.err_code == STILL_STORING or (error.code == 503 and error.err_code not in FULL)


def _is_without_jetstream(error: BaseException) -> bool:
    if isinstance(error, ServiceUnavailableError):
        return error.err_code in (None, *NOT_ENABLED)
    return isinstance(error, NoRespondersError)


def _fetch_sync_mode(host: str, port: int) -> dict[str, str]:
    """Ask a monitoring port how its server syncs to disk. Return the sync setting by server name, or an empty dict if
    no server with JetStream answers."""
    connection = http.client.HTTPConnection(host, port, timeout=MONITOR_S)
    try:
        connection.request("GET", "/varz")
        answer = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
        config = answer["jetstream"]["config"]
        seconds = int(config.get("sync_interval", 0)) / 1e9
        return {str(answer["server_name"]): ALWAYS if config.get("sync_always") is True else f"every {seconds:,.10g} s"}
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return {}
    finally:
        connection.close()


def _describe(error: BaseException) -> str:
    if isinstance(error, APIError):
        return f"{error.description or error} (code {error.err_code})"
    return str(error) or type(error).__name__
