"""Push notifications of A2A: where a task of a caller stands is posted to the address that the caller named for it,
signed.

The ledger is the queue here too: of each registration a task is read, posted when it is not as it was when the receiver
has last taken it, and waited for. So a receiver that was away gets the task as it is then, not each step that it
missed; the last state comes until it is taken. A gateway that was killed goes on from its file.
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
from roundelay.interop.json_store import JsonStore, NotStored
from roundelay.interop.latest_task import LatestTasks
from roundelay.interop.session_pool import Credentials, SessionPool
from roundelay.interop.webhooks.delivery import NODE_RETRY_S, WebhookPace
from roundelay.interop.webhooks.posts import PostAnswer, WebhookPoster, WebhookUrl
from roundelay.network.client import NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.errors import (
    ConnectError,
    Forbidden,
    InvalidArguments,
    RetryLater,
    RoundelayError,
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
"""Whose task is not over: each waits with a call of its caller's."""
LOOK_EVERY_S = 15.0
"""How often a task is looked at that waits for its caller, who goes on by whatever way."""
VALID_S = 300
"""How long a signature is good."""
SIGNATURE = "X-A2A-Notification-Signature"
ECHOED = "X-A2A-Notification-Token"
_WORD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VISIBLE = re.compile(r"[!-~](?:[ -~]{0,4094}[!-~])?")
_PUSH_ID = re.compile("[!-~]{1,128}")

PushState: TypeAlias = Literal["on", "done", "paused", "gone"]


class Push(Struct):
    """Where one caller wants to be told of one task, as the file holds it."""

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
    """What was wrong at the last try, if something was."""
    failing_since: int | None = None
    told: str = ""
    """How the task was when the receiver has last taken it."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.participant, self.agent_id, self.task_id, self.id

    def make_config(self) -> TaskPushNotificationConfig:
        config = TaskPushNotificationConfig(id=self.id, task_id=self.task_id, url=self.url, token=self.token)
        if self.scheme:
            config.authentication.CopyFrom(AuthenticationInfo(scheme=self.scheme, credentials=self.credentials))
        return config


class Kept(Struct):
    """The file: the key that signs, as PEM, and what is registered."""

    key: str = ""
    pushes: list[Push] = []


class TaskPushes:
    """The push notifications of one gateway. Use as ``async with``; no other process has the file then.

    ``allowed_hosts`` are as those of webhooks.
    """

    def __init__(
        self, node_url: str, file: Path, allowed_hosts: frozenset[str] = frozenset(), pace: WebhookPace | None = None
    ) -> None:
        self._file = JsonStore(file, Kept, Kept(), "push notifications")
        self._allowed_hosts = allowed_hosts
        self._pace = pace or WebhookPace()
        self._pool = SessionPool(node_url)
        self._known: dict[tuple[str, str, str, str], Push] = {}
        self._tasks = LatestTasks[tuple[str, str, str, str]]()
        self._bells: dict[str, asyncio.Event] = {}
        """Of each thread in which it is a caller's turn."""

    async def __aenter__(self) -> Self:
        """Raises `ConfigError` where the file is no good, or another gateway has it."""
        kept = self._file.open()
        self._key = _read_key(kept.key) if kept.key else ec.generate_private_key(ec.SECP256R1())
        self._known = {it.key: it for it in kept.pushes}
        if not kept.key:
            self._save()
        for it in kept.pushes:
            self._start(it)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        await self._pool.__aexit__()
        self._file.close()

    def list_keys(self) -> dict[str, Any]:
        """The public key, as a set of JSON Web Keys: by it receivers know what comes from here."""
        key = jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return {"keys": [{**key, "kid": self._key_id, "alg": "ES256", "use": "sig"}]}

    # --- what pool ask for

    async def register(
        self, credentials: Credentials, client: NetworkClient, task: TaskRecord, config: TaskPushNotificationConfig
    ) -> Push:
        """Tell of a task of the caller's from now on, and how it is now; one with the same id gives way. Raises
        `InvalidArguments`, `Forbidden`, `TooLarge`; `NotStored`, and then nothing has changed."""
        if client.welcome.is_operator:
            raise Forbidden(
                "A push notification keeps the token that asks for it, and this one is an operator's. Make one for it: "
                "roundelay token create ID."
            )
        sign = config.authentication
        if sign.scheme and not (_WORD.fullmatch(sign.scheme) and _VISIBLE.fullmatch(sign.credentials)):
            raise InvalidArguments("authentication has a scheme, as Bearer, and credentials, in visible ASCII.")
        if config.token and not _VISIBLE.fullmatch(config.token):
            raise InvalidArguments("token is to be visible ASCII, at most 4,096 characters.")
        if config.id and not _PUSH_ID.fullmatch(config.id):
            raise InvalidArguments("id is to be 1 to 128 visible ASCII characters, or none.")
        target = WebhookUrl.read(config.url, self._allowed_hosts)
        await target.find_addresses()
        push = Push(
            config.id or secrets.token_hex(16), task.id, task.agent_id, task.caller, credentials.token, config.url,
            config.token, sign.scheme, sign.credentials, system_clock(),
        )  # fmt: skip
        self._make_room(push)  # from here on without an await: several may be asked for at once
        self._keep_all({**self._known, push.key: push})
        self._start(push)
        return push

    def list_of(self, task: TaskRecord) -> list[Push]:
        """What a caller has registered for a task, the oldest first."""
        return [it for it in self._known.values() if it.key[:3] == (task.caller, task.agent_id, task.id)]

    async def remove(self, push: Push) -> None:
        """Raises `NotStored`, and then nothing has changed."""
        self._keep_all({key: it for key, it in self._known.items() if key != push.key})
        await self._tasks.cancel(push.key)

    def ring(self, thread_id: str) -> None:
        """A caller goes on with a task in this thread."""
        bell = self._bells.pop(thread_id, None)
        if bell is not None:
            bell.set()

    def _make_room(self, push: Push) -> None:
        """Raises `TooLarge` where the caller, or everybody together, has too many."""
        others = [it for it in self._known.values() if it.key != push.key]
        if sum(it.key[:3] == push.key[:3] for it in others) >= MAX_OF_TASK:
            raise TooLarge(f"This task has {MAX_OF_TASK} push notifications, the most that it may; delete one.")
        if sum(it.participant == push.participant and it.state == "on" for it in others) >= MAX_OF_CALLER:
            raise TooLarge(
                f"{push.participant} has push notifications for {MAX_OF_CALLER} tasks that are not over, the most that "
                "it may."
            )
        if len(others) >= MAX_PUSHES:
            resting = [it for it in others if it.state != "on"]
            if not resting:
                raise TooLarge(f"This gateway has {MAX_PUSHES} push notifications, the most that it may.")
            del self._known[min(resting, key=lambda it: it.created_at).key]

    # --- what it does by itself

    def _start(self, push: Push) -> None:
        if push.state == "on":
            self._tasks.start(push.key, lambda: self._keep(push), f"push-{push.task_id}")

    async def _keep(self, push: Push) -> None:
        """Serve one registration until its task is over, or it is given up, visibly."""
        while True:
            try:
                return await self._serve(push)
            except (ConnectError, RetryLater) as error:  # the node's doing, not the receiver's
                _logger.warning("a push notification waits for the node: %s", error, extra={"task_id": push.task_id})
            except RoundelayError as error:
                return self._note(push, state="paused", why=str(error))
            except Exception:
                _logger.exception("a push notification failed and goes on", extra={"task_id": push.task_id})
            await asyncio.sleep(NODE_RETRY_S)

    async def _serve(self, push: Push) -> None:
        credentials = Credentials(push.participant, push.participant_token)
        async with AsyncExitStack() as stack:
            target = WebhookUrl.read(push.url, self._allowed_hosts)  # what is allowed may have changed
            poster = await stack.enter_async_context(WebhookPoster(target, _Signer(self._key, self._key_id, push)))
            conversations = await stack.enter_async_context(self._pool.conversations(credentials, is_cleanup=True))
            tasks, failures = TaskLedger(conversations, push.agent_id), 0
            while True:
                task = await tasks.read(push.task_id)
                if task is None:
                    return self._note(push, state="gone", why="There is no such task any more.")
                if (now := _mark(task)) == push.told:
                    if task.state in TERMINAL:
                        return self._note(push, state="done")
                    await self._wait_for_news(tasks, task)
                    continue
                delay_s = await self._post(push, poster, task, now, failures)
                if push.state != "on":
                    return
                if delay_s is None:
                    failures = 0
                    answers = [it.seq for it in task.messages if it.sender_id == task.agent_id]
                    if answers:
                        await tasks.client.call("network.acknowledge", {"seqs": answers})
                else:
                    failures += 1
                    await asyncio.sleep(delay_s)

    async def _post(self, push: Push, poster: WebhookPoster, task: TaskRecord, now: str, failures: int) -> float | None:
        """Post a task as it is; gives how long to wait before the next try, None where it was taken."""
        value = read_json(to_stream_response(task.make_task(history_length=0)))
        post_id = hashlib.sha256("\0".join((*push.key, now)).encode()).hexdigest()[:40]
        posted = await poster.post(post_id, value)
        match posted.answer:
            case PostAnswer.TAKEN:
                self._note(push, told=now, why="", failing_since=None)
                return None
            case PostAnswer.GONE:
                self._note(push, state="gone", why=posted.told)
                return None
            case PostAnswer.REFUSED | PostAnswer.AWAY:
                at = system_clock()
                since = push.failing_since if push.failing_since is not None else at
                self._note(push, why=posted.told, failing_since=since)
                if at - since > self._pace.give_up_s * 1000:
                    self._note(push, state="paused")
                return self._pace.find_delay_s(failures + 1, posted.retry_after_s)

    async def _wait_for_news(self, tasks: TaskLedger, task: TaskRecord) -> None:
        """Wait until a task may be another one than it was."""
        if task.ended is not None:  # it is the caller's turn
            bell = self._bells.setdefault(task.root.thread_id, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await bell.wait()
            return
        known = {it.seq for it in task.messages}
        stored = QuestionStored(task.active.seq, task.root.thread_id, True)
        async with tasks.conversations.follow(tasks.agent_id, stored) as question:
            async for happened in question:
                match happened:
                    case QuestionEnded():
                        return
                    case AgentAnswer(message=message) if message.seq not in known:
                        return
                    case TextPiece() if not task.is_begun:
                        return
                    case _:
                        pass

    def _note(self, push: Push, **changes: Any) -> None:
        """Change what is known of one, on the disk too; nothing where it is so already, or it was replaced."""
        if self._known.get(push.key) is not push or all(getattr(push, name) == it for name, it in changes.items()):
            return
        state = push.state
        for name, it in changes.items():
            setattr(push, name, it)
        try:
            self._save()
        except NotStored as error:  # what it says is found out again; that posts go on matters more
            _logger.warning(
                "what is known of a push notification is not kept: %s", error, extra={"task_id": push.task_id}
            )
        if push.state not in (state, "done"):
            told = {"agent_id": push.participant, "task_id": push.task_id, "state": push.state}
            _logger.warning("a push notification is %s: %s", push.state, push.why, extra=told)

    def _keep_all(self, known: dict[tuple[str, str, str, str], Push]) -> None:
        before, self._known = self._known, known
        try:
            self._save()
        except NotStored:
            self._known = before
            raise

    def _save(self) -> None:
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._file.save(Kept(pem.decode(), list(self._known.values())))

    @property
    def _key_id(self) -> str:
        public = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return hashlib.sha256(public).hexdigest()[:16]


class _Signer:
    """Proves that a post comes from this gateway and says what it said: a JSON Web Token over its body's digest."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, key_id: str, push: Push) -> None:
        self._key = key
        self._key_id = key_id
        self._push = push

    def __call__(self, post_id: str, now: datetime, body: bytes) -> Mapping[str, str]:
        push, at = self._push, int(now.astimezone(UTC).timestamp())
        claims = {
            "iss": "roundelay",
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


def _mark(task: TaskRecord) -> str:
    """How a task is: another one whenever a receiver is to be told."""
    return f"{task.messages[-1].seq} {int(task.state)}"
