"""`JetStreamLog`: the shared log in a stream of NATS JetStream, accessed with its official client.

There is one stream per network, on file storage. A full stream refuses records instead of dropping old ones. Each
record is published with the sequence number that the stream's last record must have (``Nats-Expected-Last-Sequence``).
So if two nodes write at the same time, one is refused. The record also has an id, so that a record whose answer was
lost can be published again.
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


# Error codes of the server (https://github.com/nats-io/nats-server/blob/main/server/errors.json)
WRONG_LAST_SEQUENCE = (10071, 10164)
"""The record does not follow the last one."""
STILL_STORING = 10158
"""An earlier attempt to store the record has not finished."""
NO_LEADER = 10008
"""The servers are electing their leader."""
FULL = (10023, 10047, 10077)
"""The stream or the server has no room. The status is 503, as for temporary failures, but these failures do not
pass."""
NOT_ENABLED = (10039, 10076)
TOO_FEW_SERVERS = (10005, 10074)
"""There are fewer servers than replicas."""

CONNECT_S = 5
CONNECT_ALL_S = 10.0
"""Timeout of the first connection, over all servers, in seconds."""
RECONNECTS = 5
"""Attempts per server until a connection is given up. The log is then opened again."""
APPEND_S = 2.0
"""Timeout of one attempt to append a record, in seconds."""
PATIENCE_S = 10.0
"""Maximum time for all attempts to append a record, in seconds. The servers may have to elect a leader meanwhile."""
FOLLOW_S = 5.0
"""Time without a record after which a follower asks whether there is one, in seconds."""
AWAY_S = 4.0
"""Silence in seconds after which a replica counts as away. Replicas contact the stream's leader each second."""
HEARTBEAT_S = 5.0
"""Interval of the server's heartbeats for a consumer, in seconds. The client creates the consumer again when two are
missing."""
CLOSE_S = 2.0
MONITOR_S = 1.0
"""Timeout of a request to a server's monitoring port, in seconds."""
MAX_ANSWER_BYTES = 1 << 20
MAX_BROADCASTS = 64
"""Maximum number of unread broadcasts that are kept. The oldest are dropped."""
MIN_RECORD_BYTES = 64 * 1024
UNBOUNDED = 1 << 62
ALWAYS = "always"
FAILURES = (NatsError, OSError, asyncio.TimeoutError)

_T = TypeVar("_T")


class _NotEncryptedError(NatsError):
    pass


class _EncryptedClient(Client):
    """Sends no credentials to a server that does not encrypt. The NATS client itself would send them unencrypted to a
    server that does not ask for TLS."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):  # otherwise the connection is already encrypted
            raise _NotEncryptedError("it does not encrypt, and tls:// asks for that")
        return super()._connect_command()


class JetStreamLog:
    """A `SharedLog` in one stream."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self.name, self.network = address.shown, address.stream
        self._nats: Client | None = None
        self._broadcasts: deque[str] = deque(maxlen=MAX_BROADCASTS)
        self._has_broadcast = asyncio.Event()
        self._subject = f"roundelay.{address.stream}"
        self._syncs: dict[str, str] = {}
        """Last known sync setting by server name: ``always``, or an interval."""

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
            await _await_cancellable(client.flush(CONNECT_S))  # from here on no broadcast is missed
        except FAILURES as error:
            await self.close()
            if refusals:
                raise LedgerError(
                    f"The NATS servers of {self.name} do not give this user the permissions of a node ({refusals[-1]}): "
                    f"it has to publish to $JS.> and {self._subject}.>, and to subscribe to _INBOX.> and "
                    f"{self._subject}.said."
                ) from error
            if _is_without_jetstream(error):
                raise LogUnavailable(
                    f"The server of {self.name} has no JetStream for this user, and a shared log is a stream of it. "
                    "Enable it: configure `jetstream` at the server and in the user's account."
                ) from error
            if isinstance(error, asyncio.TimeoutError) or (isinstance(error, APIError) and error.err_code == NO_LEADER):
                raise LogElectionPending(
                    f"The servers of {self.name} can be reached, and do not answer ({_describe(error)})."
                ) from error
            raise self._failed(error) from error
        except BaseException:
            await self.close()
            raise

    async def _connect(self, refusals: list[Exception]) -> Client:
        """Return a connected client. Later refusals by the servers are appended to ``refusals``: most permission errors
        are reported only to this callback, not to a call."""
        client = _EncryptedClient() if self._address.is_encrypted else Client()

        async def note_error(error: Exception) -> None:
            if isinstance(error, ssl.SSLError | _NotEncryptedError) and not client.is_reconnecting:
                raise error  # otherwise the client would wait forever for a TLS connection that failed
            if "authorization" in str(error).lower() or "permissions" in str(error).lower():
                refusals.append(error)

        try:
            connecting = client.connect(
                list(self._address.servers),
                user=self._address.user if self._address.password is not None else None,
                password=self._address.password,
                token=self._address.user or None if self._address.password is None else None,
                connect_timeout=CONNECT_S,
                max_reconnect_attempts=RECONNECTS,  # with -1 the first connect would try forever
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
                    f"A NATS server of {self.name} cannot be trusted ({_describe(error)}): let it show a certificate of "
                    "its host, from an authority that this machine trusts (SSL_CERT_FILE names another one)."
                ) from error
            if refusals:
                raise LedgerError(
                    f"The NATS servers of {self.name} refuse who connects ({refusals[-1]}). Name a user and a password "
                    "that they know, as in nats://USER:PASSWORD@HOST:PORT/STREAM."
                ) from error
            why = (
                f"nothing that speaks NATS answered within {CONNECT_ALL_S:.0f} s"
                if not str(error)
                else _describe(error)
            )
            raise LogUnavailable(f"No NATS server of {self.name} can be reached ({why}); is one running?") from error
        return client

    async def close(self) -> None:
        # Forget the client before the wait, so that nobody uses a client that is closing.
        client, self._nats = self._nats, None
        if client is not None:
            await _close_client(client)

    @property
    def max_bytes(self) -> int:
        return self._client().max_payload  # may differ after a reconnect to another server

    async def end(self) -> int:
        return (await self._get_info()).state.last_seq

    async def first(self) -> int:
        state = (await self._get_info()).state
        # Purging from the front leaves no gaps. A gap means that somebody removed single records.
        if state.num_deleted:
            raise UnusableLog(
                f"The shared log {self.name} lacks {state.num_deleted} records between its first and its last: records are "
                "missing, as somebody has deleted them. Restore the log."
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
        # the fence: the server refuses a record that does not follow the last one this node has read
        headers = {"Nats-Expected-Last-Sequence": str(after), "Nats-Msg-Id": f"{after + 1}-{digest(data)}"}
        loop = asyncio.get_running_loop()
        # Repeat under the same id and the same expected sequence: the server stores the record once, however often it
        # arrives.
        deadline = loop.time() + PATIENCE_S
        while True:
            try:
                answer = self._context().publish(
                    f"{self._subject}.log", data, timeout=APPEND_S, stream=self._address.stream, headers=dict(headers)
                )
                return (await _await_cancellable(answer)).seq
            except APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    # The answer was lost, or the server no longer remembers the id. Compare the stored record itself
                    # before giving up leadership.
                    if await self._is_stored(data, after + 1):  # an earlier attempt has arrived
                        return after + 1
                    raise LeadershipLost(f"Somebody else has written to the shared log {self.name}.") from error
                # Permanent errors are raised at once: waiting would only delay the commit.
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
                        f"The shared log {self.name} begins at {first} by now, and record {after + 1} was requested."
                    )
                while True:
                    try:
                        message = await _await_cancellable(subscription.next_msg(timeout=FOLLOW_S))
                    except TimeoutError:
                        if await self.end() > after:
                            break  # a record exists and does not arrive: subscribe again
                        continue
                    metadata = message.metadata
                    position = metadata.sequence.stream
                    # A gap means that records were lost on their way. A repetition means that the client has created
                    # its consumer again at the beginning of the stream, because the server restarted before the first
                    # record came. In both cases subscribe again after the last record: a follower must neither miss nor
                    # repeat a record.
                    if position <= after or (position != after + 1 and not is_first):
                        break
                    is_first = False
                    after = position
                    yield LogRecord(position, message.data, has_more=bool(metadata.num_pending))
            except FAILURES as error:
                raise self._failed(error) from error
            # a client that gives up also cancels, although nobody has requested it
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise LogUnavailable(f"The shared log {self.name} failed: the connection was given up.") from error
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
        # Every server that may acknowledge must be safe. A server that syncs late can lose records that a majority has
        # acknowledged.
        names += [
            peer.name or "" for peer in peers if not _is_away(peer)
        ]  # a replica that is away acknowledges nothing
        for name in names:
            sync = self._syncs.get(name)
            if sync is None:
                return f"the server {name or 'of its stream'} has not shown at its monitoring port how it syncs"
            if sync != ALWAYS:
                return f"the server {name} syncs {sync}, not before it acknowledges: set sync_interval: always"
        return "" if names else "its servers do not say which of them stores it"

    async def _ask_monitors(self) -> None:
        """Ask each server how it syncs. If a server does not answer, keep its last answer."""
        requests = (asyncio.to_thread(_fetch_sync_mode, host, port) for host, port in self._address.monitors)
        for modes in await asyncio.gather(*requests):
            self._syncs.update(modes)

    async def _get_info(self) -> StreamInfo:
        return await self._request(self._context().stream_info(self._address.stream))

    async def _request(self, work: Awaitable[_T]) -> _T:
        """Await a request that is not retried. Raise its failure as a `LedgerError`."""
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
        """Find or create the stream. Raises `LedgerError` for a stream that is not configured as a log must be."""
        try:
            config = (await _await_cancellable(self._context().stream_info(self._address.stream))).config
        except NotFoundError:
            if not create:
                raise missing_log(self.name) from None
            config = (await _await_cancellable(self._context().add_stream(self._expected_config()))).config
        self._check_config(config)

    def _check_config(self, config: StreamConfig) -> None:
        """Raises `LedgerError` for a stream that may lose or refuse records, because somebody may have changed it."""
        expected = self._expected_config()
        wrong = [
            name
            for name in ("subjects", "retention", "discard", "storage", "sealed")
            if getattr(config, name) != getattr(expected, name)
        ]
        # more replicas than configured are fine: an operator has scaled the stream
        wrong += ["num_replicas"] if (config.num_replicas or 1) < self._address.replicas else []
        wrong += ["persist_mode"] if config.persist_mode == PersistMode.ASYNC else []  # acknowledges before it writes
        limits = ("max_age", "max_msgs", "max_msgs_per_subject", "max_msg_size")  # these drop or refuse records
        wrong += [name for name in limits if (getattr(config, name) or 0) > 0]
        if wrong:
            settings = ", ".join(f"{name} {getattr(config, name)!r}" for name in wrong)
            raise LedgerError(
                f"The stream {self._address.stream} of {self.name} exists, and is no log of a Roundelay network as "
                f"requested ({settings}). Name another stream, or the replicas that it has."
            )

    async def _explain_silence(self, error: BaseException) -> LedgerError:
        """Return why no append was answered. A server whose disk has refused a record still answers everything else."""
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
                f"The shared log {self.name} has no room ({_describe(error)}). Give the stream and its servers more, or "
                "name fewer bytes with ?max_bytes=."
            )
        if code in TOO_FEW_SERVERS:
            return LedgerError(
                f"The servers of {self.name} cannot keep {self._address.replicas} replicas ({_describe(error)}). Run as "
                "many servers in one cluster, or name fewer replicas with ?replicas=."
            )
        # while the servers elect a leader, a stream or a consumer may not even be found
        return LogUnavailable(f"The shared log {self.name} failed: {_describe(error)}.")


async def _close_client(client: Client) -> None:
    with suppress(*FAILURES):
        async with asyncio.timeout(CLOSE_S):  # a server that is away accepts no bytes
            await client.close()


async def _await_cancellable(work: Awaitable[_T]) -> _T:
    """Await ``work`` without losing a cancellation.

    The client waits with `asyncio.wait_for`. Before Python 3.12, `wait_for` loses a cancellation that arrives together
    with the answer (https://github.com/python/cpython/issues/86296). The node would then ignore a request to stop.
    """
    task = asyncio.current_task()
    cancellations = 0 if task is None else task.cancelling()
    try:
        return await work
    finally:
        if task is not None and task.cancelling() > cancellations:
            raise asyncio.CancelledError


def _is_away(peer: PeerInfo) -> bool:
    """Return whether the stream's leader has not heard from a replica for a long time, or never since it leads."""
    is_heard = bool(peer.current or peer.active)
    return bool(peer.offline) or not is_heard or (peer.active or 0) > AWAY_S * 1e9


def _may_pass(error: APIError) -> bool:
    return error.err_code == STILL_STORING or (error.code == 503 and error.err_code not in FULL)


def _is_without_jetstream(error: BaseException) -> bool:
    if isinstance(error, ServiceUnavailableError):
        return error.err_code in (None, *NOT_ENABLED)
    return isinstance(error, NoRespondersError)


def _fetch_sync_mode(host: str, port: int) -> dict[str, str]:
    """Return how the server at a monitoring port syncs, by its name. Empty if no server with JetStream answers."""
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
