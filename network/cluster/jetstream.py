"""`JetStreamLog`: the shared log in a stream of NATS JetStream, by its official client.

One stream for a network, on file storage; what is full refuses instead of dropping. Each record is published with the
number that the stream's last one has to have (``Nats-Expected-Last-Sequence``), so that of two writers one is refused,
and with an id, so that one whose answer was lost may be published again.
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

from .shared_log import LogElectionPending, LogRecord, LogTruncated, LogUnavailable, UnusableLog, digest, find_no_log

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


WRONG_LAST_SEQUENCE = (10071, 10164)
"""The server's codes for a record that does not follow the last one."""
UNDER_WAY = 10158
"""Its code for a record whose earlier try is not stored yet."""
NO_LEADER = 10008
"""Its code where the servers are choosing who of them leads."""
FULL = (10023, 10047, 10077)
"""Its codes for a stream or a server without room: 503 as of what passes, and it does not."""
NOT_ENABLED = (10039, 10076)
TOO_FEW = (10005, 10074)
"""Its codes where there are fewer servers than replicas."""
CONNECT_S = 5
CONNECT_ALL_S = 10.0
"""How long the first connection may take, whichever of the servers takes it."""
RECONNECTS = 5
"""Tries at each server until a connection is given up; then whoever uses the log opens it again."""
APPEND_S = 2.0
"""How long one try of a record waits for its answer."""
PATIENCE_S = 10.0
"""How long a record is tried: a stream of several servers may have to find a leader of its own."""
FOLLOW_S = 5.0
"""A follower to whom nothing comes for so long looks whether there is anything."""
AWAY_S = 4.0
"""A server of which the one that leads the stream has heard nothing for so long is away; it says something each
second."""
HEARTBEAT_S = 5.0
"""How often a server says that it still has what follows the stream for this node: of two that are missing the client
makes it anew."""
CLOSE_S = 2.0
MONITOR_S = 1.0
"""So long a server's monitoring port may take to answer."""
MAX_ANSWER_BYTES = 1 << 20
HEARD = 64
"""What was said and not listened to yet: of more the oldest is dropped."""
MIN_RECORD_BYTES = 64 * 1024
UNBOUNDED = 1 << 62
ALWAYS = "always"
FAILURES = (NatsError, OSError, asyncio.TimeoutError)

_T = TypeVar("_T")


class _InTheClear(NatsError):
    pass


class _EncryptedClient(Client):
    """Says nothing of itself to a server that does not encrypt: the client of NATS would go on in the clear with
    whoever does not ask for TLS."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):  # else TLS has come about by now
            raise _InTheClear("it does not encrypt, and tls:// asks for that")
        return super()._connect_command()


class JetStreamLog:
    """A `SharedLog` in one stream."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self.name, self.network = address.shown, address.stream
        self._nats: Client | None = None
        self._heard: deque[str] = deque(maxlen=HEARD)
        self._hearing = asyncio.Event()
        self._subject = f"roundelay.{address.stream}"
        self._syncs: dict[str, str] = {}
        """How servers sync by what they have shown, by their names: ``always``, or how often."""

    async def open(self, *, is_made: bool = True) -> None:
        refusals = list[Exception]()
        client = self._nats = await self._connect(refusals)
        try:
            if self.max_bytes < MIN_RECORD_BYTES:
                raise LedgerError(
                    f"The server of {self.name} takes messages of at most {self.max_bytes} bytes; a shared log needs "
                    f"{MIN_RECORD_BYTES} (max_payload)."
                )
            await self._make_stream(is_made=is_made)
            await client.subscribe(f"{self._subject}.said", cb=self._hear)
            await _heed(client.flush(CONNECT_S))  # from here on nothing is said unheard
        except FAILURES as error:
            await self.close()
            if refusals:
                raise LedgerError(
                    f"The NATS servers of {self.name} do not let this user do what a node does ({refusals[-1]}): it "
                    f"has to publish to $JS.> and {self._subject}.>, and to subscribe to _INBOX.> and "
                    f"{self._subject}.said."
                ) from error
            if _is_without_jetstream(error):
                raise LogUnavailable(
                    f"The server of {self.name} has no JetStream for this user, and a shared log is a stream of it: "
                    "configure `jetstream` at the server, and of the user's account."
                ) from error
            if isinstance(error, asyncio.TimeoutError) or (isinstance(error, APIError) and error.err_code == NO_LEADER):
                raise LogElectionPending(
                    f"The servers of {self.name} are there, and do not answer ({_tell(error)})."
                ) from error
            raise self._failed(error) from error
        except BaseException:
            await self.close()
            raise

    async def _connect(self, refusals: list[Exception]) -> Client:
        """A client that is connected; from then on ``refusals`` gets what its servers do not let it do."""
        client = _EncryptedClient() if self._address.is_encrypted else Client()

        async def note(error: Exception) -> None:  # what a call needs is raised there
            if isinstance(error, ssl.SSLError | _InTheClear) and not client.is_reconnecting:
                raise error  # of TLS that did not come about the client would wait for the end, which never comes
            if "authorization" in str(error).lower() or "permissions" in str(error).lower():
                refusals.append(error)

        try:
            connecting = client.connect(
                list(self._address.servers),
                user=self._address.user if self._address.password is not None else None,
                password=self._address.password,
                token=self._address.user or None if self._address.password is None else None,
                connect_timeout=CONNECT_S,
                max_reconnect_attempts=RECONNECTS,  # of -1 the first connect tries for ever
                reconnect_time_wait=1,
                error_cb=note,
            )
            async with asyncio.timeout(CONNECT_ALL_S):
                await _heed(connecting)
        except asyncio.CancelledError:
            await _close(client)
            raise
        except FAILURES as error:
            await _close(client)
            if isinstance(error, ssl.SSLError | _InTheClear):
                raise LogUnavailable(
                    f"A NATS server of {self.name} cannot be trusted ({_tell(error)}): let it show a certificate of "
                    "its host, from an authority that this machine trusts (SSL_CERT_FILE names another one)."
                ) from error
            if refusals:
                raise LedgerError(
                    f"The NATS servers of {self.name} refuse who connects ({refusals[-1]}): name a user and a password "
                    "that they know, as in nats://USER:PASSWORD@HOST:PORT/STREAM."
                ) from error
            why = f"nothing that speaks NATS answered within {CONNECT_ALL_S:.0f} s" if not str(error) else _tell(error)
            raise LogUnavailable(f"No NATS server of {self.name} can be reached ({why}); is one running?") from error
        return client

    async def close(self) -> None:
        client, self._nats = self._nats, None
        if client is not None:
            await _close(client)

    @property
    def max_bytes(self) -> int:
        return self._client().max_payload  # a server may say another one later

    async def end(self) -> int:
        return (await self._get_info()).state.last_seq

    async def first(self) -> int:
        state = (await self._get_info()).state
        if state.num_deleted:
            raise UnusableLog(
                f"The shared log {self.name} lacks {state.num_deleted} between its first and its last: records are "
                "missing, as somebody has deleted them. Restore it."
            )
        return max(1, state.first_seq) if state.messages else state.last_seq + 1

    async def drop(self, before: int) -> bool:
        try:
            await _heed(self._context().purge_stream(self._address.stream, seq=before))
        except FAILURES as error:
            raise self._failed(error) from error
        return True

    async def room(self) -> tuple[int, int]:
        info = await self._get_info()
        of = info.config.max_bytes or -1
        return (UNBOUNDED, UNBOUNDED) if of < 0 else (max(0, of - info.state.bytes), of)

    async def append(self, data: bytes, after: int) -> int:
        headers = {"Nats-Expected-Last-Sequence": str(after), "Nats-Msg-Id": f"{after + 1}-{digest(data)}"}
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                answer = self._context().publish(
                    f"{self._subject}.log", data, timeout=APPEND_S, stream=self._address.stream, headers=dict(headers)
                )
                return (await _heed(answer)).seq
            except APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    if await self._is_ours(data, after + 1):  # an earlier try has arrived after all
                        return after + 1
                    raise LeadershipLost(f"Somebody else has written to the shared log {self.name}.") from error
                if not _is_passing(error) or asyncio.get_running_loop().time() > until:
                    raise self._failed(error) from error
            except FAILURES as error:
                if asyncio.get_running_loop().time() > until:
                    raise await self._explain_silence(error) from error
            await asyncio.sleep(0.05)

    async def follow(self, after: int) -> AsyncIterator[LogRecord]:
        while True:
            try:
                config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
                subscribing = self._context().subscribe(
                    f"{self._subject}.log",
                    stream=self._address.stream,
                    ordered_consumer=True,
                    idle_heartbeat=HEARTBEAT_S,
                    config=config,
                )
                subscription = await _heed(subscribing)
            except FAILURES as error:
                raise self._failed(error) from error
            is_first = True
            try:
                first = (await _heed(self._context().stream_info(self._address.stream))).state.first_seq
                if after + 1 < first:
                    raise LogTruncated(
                        f"The shared log {self.name} begins at {first} by now, and {after + 1} was to be read."
                    )
                while True:
                    try:
                        message = await _heed(subscription.next_msg(timeout=FOLLOW_S))
                    except TimeoutError:
                        if await self.end() > after:
                            break  # there is more, and it does not come
                        continue
                    metadata = message.metadata
                    position = metadata.sequence.stream
                    # Some were lost on their way, or the client has made its consumer anew from the stream's beginning,
                    # as it does where the server was started again before anything had come: begin again behind the
                    # last one.
                    if position <= after or (position != after + 1 and not is_first):
                        break
                    is_first = False
                    after = position
                    yield LogRecord(position, message.data, has_more=bool(metadata.num_pending))
            except FAILURES as error:
                raise self._failed(error) from error
            except asyncio.CancelledError as error:  # also of a client that gives up: then nobody has asked for it
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise LogUnavailable(f"The shared log {self.name} failed: the connection was given up.") from error
            finally:
                with suppress(*FAILURES):
                    await subscription.unsubscribe()

    async def say(self, text: str) -> None:
        try:
            await _heed(self._client().publish(f"{self._subject}.said", text.encode()))
        except FAILURES as error:
            raise self._failed(error) from error

    async def listen(self) -> str:
        while not self._heard:
            self._hearing.clear()
            await self._hearing.wait()
        return self._heard.popleft()

    async def find_doubt(self) -> str:
        self._refuse_kept_otherwise((await self._get_info()).config)
        if not self._address.monitors:
            return (
                "its address does not say where the servers show how they sync: name their monitoring port, as in "
                f"{self.name}?monitor=8222"
            )
        info, _ = await asyncio.gather(self._get_info(), self._ask_monitors())
        cluster = info.cluster
        names = [cluster.leader or ""] if cluster is not None else []
        peers = (cluster.replicas if cluster is not None else None) or []
        names += [it.name or "" for it in peers if not _is_away(it)]
        for name in names:  # who is away acknowledges nothing
            sync = self._syncs.get(name)
            if sync is None:
                return f"the server {name or 'of its stream'} has not shown at its monitoring port how it syncs"
            if sync != ALWAYS:
                return f"the server {name} syncs {sync}, not before it acknowledges: set sync_interval: always"
        return "" if names else "its servers do not say who of them keeps it"

    async def _ask_monitors(self) -> None:
        """Of a server that does not answer holds what it has shown before."""
        asked = (asyncio.to_thread(_ask_monitor, host, port) for host, port in self._address.monitors)
        for found in await asyncio.gather(*asked):
            self._syncs.update(found)

    async def _get_info(self) -> StreamInfo:
        try:
            return await _heed(self._context().stream_info(self._address.stream))
        except FAILURES as error:
            raise self._failed(error) from error

    async def describe(self) -> dict[str, Any]:
        doubt = await self.find_doubt()
        info = await self._get_info()
        config, cluster = info.config, info.cluster
        servers = [] if cluster is None else [{"name": cluster.leader or "", "leads": True, "is_current": True}]
        for peer in (cluster.replicas if cluster is not None else None) or []:
            lag = {"is_current": bool(peer.current) and not peer.offline, "records_behind": peer.lag or 0}
            servers.append({"name": peer.name or "", "leads": False, **lag})
        for server in servers:
            server["syncs"] = self._syncs.get(str(server["name"]), "")
        return {
            "durability": "replicated" if doubt else "full",
            "doubt": doubt,
            "engine": "JetStream",
            "records": info.state.messages,
            "bytes": info.state.bytes,
            "max_bytes": config.max_bytes,
            "replicas": config.num_replicas or 1,
            "servers": servers,
        }

    async def _hear(self, message: Msg) -> None:
        self._heard.append(message.data.decode(errors="replace"))
        self._hearing.set()

    def _wanted(self) -> StreamConfig:
        return StreamConfig(
            name=self._address.stream,
            subjects=[f"{self._subject}.log"],
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            num_replicas=self._address.replicas,
            max_bytes=self._address.max_bytes,
        )

    async def _make_stream(self, *, is_made: bool) -> None:
        """Find the stream, or make it. Raises `LedgerError` where it is another's or is not kept as a log has to be."""
        try:
            found = (await _heed(self._context().stream_info(self._address.stream))).config
        except NotFoundError:
            if not is_made:
                raise find_no_log(self.name) from None
            found = (await _heed(self._context().add_stream(self._wanted()))).config
        self._refuse_kept_otherwise(found)

    def _refuse_kept_otherwise(self, found: StreamConfig) -> None:
        """Raises `LedgerError` where a stream is not kept as a log has to be: somebody may have changed it."""
        wanted = self._wanted()
        wrong = [
            name
            for name in ("subjects", "retention", "discard", "storage", "sealed")
            if getattr(found, name) != getattr(wanted, name)
        ]
        # more than are asked for are more: somebody has scaled it
        wrong += ["num_replicas"] if (found.num_replicas or 1) < self._address.replicas else []
        wrong += ["persist_mode"] if found.persist_mode == PersistMode.ASYNC else []  # it acknowledges before it writes
        bounds = ("max_age", "max_msgs", "max_msgs_per_subject", "max_msg_size")  # they drop, or refuse
        wrong += [name for name in bounds if (getattr(found, name) or 0) > 0]
        if wrong:
            told = ", ".join(f"{name} {getattr(found, name)!r}" for name in wrong)
            raise LedgerError(
                f"The stream {self._address.stream} of {self.name} is there, and is no log of a Roundelay network as "
                f"it is asked for ({told}); name another stream, or the replicas that it has."
            )

    async def _explain_silence(self, error: BaseException) -> LedgerError:
        """Why no record was answered: a server whose disk has refused one answers everything else."""
        if isinstance(error, asyncio.TimeoutError):
            with suppress(LedgerError):
                cluster = (await self._get_info()).cluster
                name = (cluster.leader if cluster is not None else None) or "that leads it"
                return LogUnavailable(
                    f"The shared log {self.name} takes no record: its server {name} answers, and stores nothing. Its "
                    "disk may be full (its log says); make room, and start that server again."
                )
        return self._failed(error)

    async def _is_ours(self, data: bytes, position: int) -> bool:
        try:
            return (await _heed(self._context().get_msg(self._address.stream, seq=position))).data == data
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
                f"The shared log {self.name} has no room ({_tell(error)}): give the stream and its servers more, or "
                "name fewer bytes with ?max_bytes=."
            )
        if code in TOO_FEW:
            return LedgerError(
                f"The servers of {self.name} cannot keep {self._address.replicas} replicas ({_tell(error)}): as many "
                "servers have to run in one cluster, or name fewer with ?replicas=."
            )
        # while servers choose a new one to lead, a stream or a consumer may not even be found
        return LogUnavailable(f"The shared log {self.name} failed: {_tell(error)}.")


async def _close(client: Client) -> None:
    with suppress(*FAILURES):
        async with asyncio.timeout(CLOSE_S):  # to a server that is away nothing can be written
            await client.close()


async def _heed(work: Awaitable[_T]) -> _T:
    """What ``work`` gives. The client waits with `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
    comes together with the answer (https://github.com/python/cpython/issues/86296); here it is heard."""
    task = asyncio.current_task()
    asked = 0 if task is None else task.cancelling()
    try:
        return await work
    finally:
        if task is not None and task.cancelling() > asked:
            raise asyncio.CancelledError


def _is_away(peer: PeerInfo) -> bool:
    """Whether the server that leads the stream has heard nothing of another one for long, or never since it leads."""
    is_heard = bool(peer.current or peer.active)
    return bool(peer.offline) or not is_heard or (peer.active or 0) > AWAY_S * 1e9


def _is_passing(error: APIError) -> bool:
    return error.err_code == UNDER_WAY or (error.code == 503 and error.err_code not in FULL)


def _is_without_jetstream(error: BaseException) -> bool:
    if isinstance(error, ServiceUnavailableError):
        return error.err_code in (None, *NOT_ENABLED)
    return isinstance(error, NoRespondersError)


def _ask_monitor(host: str, port: int) -> dict[str, str]:
    """How the server that answers there syncs, by its name; nothing where none answers that has JetStream."""
    connection = http.client.HTTPConnection(host, port, timeout=MONITOR_S)
    try:
        connection.request("GET", "/varz")
        shown = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
        config = shown["jetstream"]["config"]
        seconds = int(config.get("sync_interval", 0)) / 1e9
        return {str(shown["server_name"]): ALWAYS if config.get("sync_always") is True else f"every {seconds:,.10g} s"}
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return {}
    finally:
        connection.close()


def _tell(error: BaseException) -> str:
    if isinstance(error, APIError):
        return f"{error.description or error} (code {error.err_code})"
    return str(error) or type(error).__name__
