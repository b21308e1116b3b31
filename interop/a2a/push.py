"""A2A push notifications. The gateway signs the state of a caller's task and posts it to the URL that the caller
registered.

The ledger serves as the queue. For each registration, the gateway reads the task and posts its state if the receiver
has not accepted this state yet. A receiver that was unreachable therefore gets only the current state, not every missed
change. The final state is posted until the receiver accepts it. A gateway that was killed continues from the
registrations in its file.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from msgspec import Struct

from roundelay.interop.conversations import AgentAnswer, QuestionEnded, QuestionStored, TextPiece
from roundelay.interop.json_store import JsonStore
from roundelay.interop.registrations import Registrations, WebhookPace
from roundelay.interop.session_pool import Credentials, SessionPool
from roundelay.interop.webhooks.posts import PostAnswer, WebhookPoster, WebhookUrl
from roundelay.network.client import NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.errors import (
    Forbidden,
    InvalidArguments,
    TooLarge,
)
from roundelay.network.extras import needs

from .parts import read_json
from .tasks import TERMINAL, TaskLedger, TaskRecord

with needs("gateway"):
    import jwt
    from a2a.types import AuthenticationInfo, TaskPushNotificationConfig
    from a2a.utils.proto_utils import to_stream_response
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec


_logger = logging.getLogger(__name__)

MAX_PUSHES = 1024
MAX_OF_TASK = 8
MAX_OF_CALLER = 64
"""Maximum number of registrations of one caller for unfinished tasks. Each registration occupies one call of the
caller's session until its task ends.
"""
LOOK_EVERY_S = 15.0
"""Interval between reads of a task while its agent waits for the caller's reply, in seconds. Polling is needed because
the caller may reply through another client.
"""
VALID_S = 300
"""Validity of a post's signature, in seconds."""
SIGNATURE = "X-A2A-Notification-Signature"
ECHOED = "X-A2A-Notification-Token"
_WORD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VISIBLE = re.compile(r"[!-~](?:[ -~]{0,4094}[!-~])?")
_PUSH_ID = re.compile("[!-~]{1,128}")

PushKey: TypeAlias = tuple[str, str, str, str]
PushState: TypeAlias = Literal["on", "done", "paused", "gone"]


class Push(Struct):
    """Registration of a push URL for one task of one caller, as stored in the file."""

    id: str
    task_id: str
    agent_id: str
    participant: str
    participant_token: str
    url: str
    token: str
    scheme: str
    credentials: str
    created_at: int
    state: PushState = "on"
    why: str = ""
    """Text of the last failure, or an empty string if the last post succeeded."""
    failing_since: int | None = None
    told: str = ""
    """Last state of the task that the receiver accepted, in the form of `_describe_state`."""

    @property
    def key(self) -> PushKey:
        return self.participant, self.agent_id, self.task_id, self.id

    def make_config(self) -> TaskPushNotificationConfig:
        config = TaskPushNotificationConfig(id=self.id, task_id=self.task_id, url=self.url, token=self.token)
        if self.scheme:
            config.authentication.CopyFrom(AuthenticationInfo(scheme=self.scheme, credentials=self.credentials))
        return config


class StoredPushes(Struct):
    """Contents of the registration file: the signing key as PEM, and the registrations."""

    key: str = ""
    pushes: list[Push] = []


class TaskPushes(Registrations[PushKey, Push]):
    """Push notifications of one gateway. Use this class with ``async with``, which locks the registration file.

    ``allowed_hosts`` lists private hosts to which posts may go, as for webhooks.
    """

    noun = "push notification"

    def __init__(
        self, node_url: str, file: Path, allowed_hosts: frozenset[str] = frozenset(), pace: WebhookPace | None = None
    ) -> None:
        super().__init__(pace)
        self._file = JsonStore(file, StoredPushes, StoredPushes(), "push notifications")
        self._allowed_hosts = allowed_hosts
        self._pool = SessionPool(node_url)
        self._turns: dict[str, asyncio.Event] = {}
        """Events that end the wait for the caller's reply, by thread id."""

    async def __aenter__(self) -> Self:
        """Lock and read the registration file. Raises `ConfigError` if the file is invalid or another gateway
        uses it.
        """
        stored = self._file.open()
        # Store the key, because receivers cache the public key. Receivers verify posts with the cached key even after
        # the gateway has restarted.
        self._key = _read_key(stored.key) if stored.key else ec.generate_private_key(ec.SECP256R1())
        self._load(stored.pushes)
        if not stored.key:
            self._save()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        await self._pool.__aexit__()
        self._file.close()

    def list_keys(self) -> dict[str, Any]:
        """Return the public key as a JSON Web Key Set. Receivers verify signatures with this key."""
        key = jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return {"keys": [{**key, "kid": self._key_id, "alg": "ES256", "use": "sig"}]}

    # --- requests of callers

    async def register(
        self, credentials: Credentials, client: NetworkClient, task: TaskRecord, config: TaskPushNotificationConfig
    ) -> Push:
        """Post a task's state now and after every change. A new registration replaces an existing registration with the
        same id.

        Raises `InvalidArguments`, `Forbidden`, `TooLarge` or `NotStored`. After an error, all registrations are
        unchanged.
        """
        if client.welcome.is_operator:
            raise Forbidden(
                "A push notification stores the token of its request, but operators' tokens must not be stored. "
                "Create a token for it: roundelay token create ID."
            )
        sign = config.authentication
        if sign.scheme and not (_WORD.fullmatch(sign.scheme) and _VISIBLE.fullmatch(sign.credentials)):
            raise InvalidArguments("authentication needs a scheme, such as Bearer, and credentials, in visible ASCII.")
        if config.token and not _VISIBLE.fullmatch(config.token):
            raise InvalidArguments("token must be visible ASCII, at most 4,096 characters.")
        if config.id and not _PUSH_ID.fullmatch(config.id):
            raise InvalidArguments("id must be 1 to 128 visible ASCII characters. Or leave it out.")
        target = WebhookUrl.read(config.url, self._allowed_hosts)
        # Resolve the host name now, although every post resolves it again. The caller then gets an error for a wrong
        # URL and can correct the URL.
        await target.find_addresses()
        push = Push(
            config.id or secrets.token_hex(16), task.id, task.agent_id, task.caller, credentials.token, config.url,
            config.token, sign.scheme, sign.credentials, system_clock(),
        )  # fmt: skip
        self._make_room(push)  # no await below this line: concurrent requests could exceed the limits
        self._save_all({**self._entries, push.key: push})
        self._start(push)
        return push

    def list_of(self, task: TaskRecord) -> list[Push]:
        """Return the registrations for a task, oldest first."""
        return [push for push in self._entries.values() if push.key[:3] == (task.caller, task.agent_id, task.id)]

    async def remove(self, push: Push) -> None:
        """Remove a registration. Raises `NotStored` and changes nothing if the file cannot be written."""
        # Save before cancelling the background task. Otherwise a gateway that is killed in between would restore the
        # registration.
        self._save_all({key: known for key, known in self._entries.items() if key != push.key})
        await self._cancel(push.key)

    def notify(self, thread_id: str) -> None:
        """Wake the registrations for tasks in this thread, because the caller has sent a message there."""
        turn = self._turns.pop(thread_id, None)
        if turn is not None:
            turn.set()

    def _make_room(self, push: Push) -> None:
        """If the gateway has reached its limit, drop the oldest finished registration. Raises `TooLarge` if no
        registration is finished, or if the task or the caller has reached its own limit.
        """
        others = [other for other in self._entries.values() if other.key != push.key]
        if sum(other.key[:3] == push.key[:3] for other in others) >= MAX_OF_TASK:
            raise TooLarge(f"This task has {MAX_OF_TASK} push notifications, the maximum. Delete one.")
        if sum(other.participant == push.participant and other.state == "on" for other in others) >= MAX_OF_CALLER:
            raise TooLarge(
                f"{push.participant} has push notifications for {MAX_OF_CALLER} unfinished tasks, the maximum. Delete one."
            )
        if len(others) >= MAX_PUSHES:
            resting = [other for other in others if other.state != "on"]
            if not resting:
                raise TooLarge(f"This gateway has {MAX_PUSHES} push notifications, the maximum.")
            del self._entries[min(resting, key=lambda other: other.created_at).key]

    # --- posting

    async def _serve(self, push: Push) -> None:
        credentials = Credentials(push.participant, push.participant_token)
        async with AsyncExitStack() as stack:
            # Check the URL again, because the allowed hosts may have changed since the registration.
            target = WebhookUrl.read(push.url, self._allowed_hosts)
            poster = await stack.enter_async_context(WebhookPoster(target, _Signer(self._key, self._key_id, push)))
            # Exempt this call from the limit of concurrent calls, because the call stays open until the task has
            # finished.
            conversations = await stack.enter_async_context(self._pool.conversations(credentials, is_cleanup=True))
            tasks, failures = TaskLedger(conversations, push.agent_id), 0
            while True:
                task = await tasks.read(push.task_id)
                if task is None:
                    return self._update(push, state="gone", why="The task no longer exists.")
                # Compare with the last accepted state, not with the last posted state. A post without a response must
                # be repeated.
                if (now := _describe_state(task)) == push.told:
                    if task.state in TERMINAL:
                        return self._update(push, state="done")
                    await self._wait_for_news(tasks, task)
                    continue
                delay_s = await self._post(push, poster, task, now, failures)
                if push.state != "on":
                    return
                if delay_s is None:
                    failures = 0
                    # Acknowledge the answers only after the receiver has responded with 2xx. Earlier, the caller has
                    # not received the answers.
                    answers = [message.seq for message in task.messages if message.sender_id == task.agent_id]
                    if answers:
                        await tasks.client.call("network.acknowledge", {"seqs": answers})
                else:
                    failures += 1
                    await asyncio.sleep(delay_s)

    async def _post(self, push: Push, poster: WebhookPoster, task: TaskRecord, now: str, failures: int) -> float | None:
        """Post the current state of a task. Return the delay until the next attempt in seconds, or None if no further
        attempt is needed.
        """
        value = read_json(to_stream_response(task.make_task(history_length=0)))
        # Derive the id of the post only from the task's state. If a response was lost, the receiver recognizes the
        # repeated post by this id.
        post_id = hashlib.sha256("\0".join((*push.key, now)).encode()).hexdigest()[:40]
        posted = await poster.post(post_id, value)
        match posted.answer:
            case PostAnswer.TAKEN:
                self._update(push, told=now, why="", failing_since=None)
                return None
            case PostAnswer.GONE:
                self._update(push, state="gone", why=posted.reason)
                return None
            case PostAnswer.REFUSED | PostAnswer.AWAY:
                return self._note_failure(push, posted, failures)

    async def _wait_for_news(self, tasks: TaskLedger, task: TaskRecord) -> None:
        """Wait until the state of a task may have changed."""
        if task.ended is not None:  # the agent waits for the caller's reply
            turn = self._turns.setdefault(task.root.thread_id, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await turn.wait()
            return
        seen = {message.seq for message in task.messages}
        stored = QuestionStored(task.active.seq, task.root.thread_id, True)
        async with tasks.conversations.follow(tasks.agent_id, stored) as question:
            async for event in question:
                match event:
                    case QuestionEnded():
                        return
                    case AgentAnswer(message=message) if message.seq not in seen:
                        return
                    case TextPiece() if not task.is_begun:
                        return
                    case _:
                        pass

    def _get_key(self, push: Push) -> PushKey:
        return push.key

    def _describe(self, push: Push) -> dict[str, str]:
        return {"agent_id": push.participant, "task_id": push.task_id}

    def _save(self) -> None:
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._file.save(StoredPushes(pem.decode(), list(self._entries.values())))

    @property
    def _key_id(self) -> str:
        public = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return hashlib.sha256(public).hexdigest()[:16]


class _Signer:
    """Signs each post with a JSON Web Token that contains the digest of the body."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, key_id: str, push: Push) -> None:
        self._key = key
        self._key_id = key_id
        self._push = push

    def __call__(self, post_id: str, now: datetime, body: bytes) -> Mapping[str, str]:
        push, at = self._push, int(now.astimezone(UTC).timestamp())
        claims = {
            "iss": "roundelay",
            # Include the receiver's URL in the signature. Otherwise a receiver could forward the post to another
            # receiver as if it were addressed there.
            "aud": push.url,
            "sub": push.task_id,
            "iat": at,
            "exp": at + VALID_S,
            "jti": post_id,
            "request_body_sha256": hashlib.sha256(body).hexdigest(),
        }
        signature = jwt.encode(claims, self._key, algorithm="ES256", headers={"kid": self._key_id})
        shown = f"{push.scheme} {push.credentials}" if push.scheme else f"Bearer {signature}"
        headers = {"authorization": shown, SIGNATURE: signature}
        return headers | ({ECHOED: push.token} if push.token else {})


def _read_key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _describe_state(task: TaskRecord) -> str:
    """Return a text that changes whenever the receiver must be notified about the task."""
    return f"{task.messages[-1].seq} {int(task.state)}"
