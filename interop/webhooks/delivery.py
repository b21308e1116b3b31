"""Webhooks: each message that is delivered to a participant is posted to the address that it has named, signed.

The ledger is the queue. Of each webhook the oldest message that is not handled is looked at, posted, and acknowledged
when the receiver has answered 2xx; only then comes the next. So nothing but the registrations is kept here, in one file
of its owner's alone, and a message whose answer was lost is posted again under the same ``webhook-id``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from roundelay.interop.json_store import JsonStore, NotStored
from roundelay.interop.latest_task import LatestTasks
from roundelay.interop.session_pool import Credentials
from roundelay.network.backoff import Backoff
from roundelay.network.client import NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.errors import (
    ConnectError,
    Forbidden,
    InvalidArguments,
    RetryLater,
    RoundelayError,
    TooLarge,
    UnknownMessage,
)

from .posts import PostAnswer, Posted, WebhookPoster, WebhookUrl, sign_as_standard

_logger = logging.getLogger(__name__)

MAX_WEBHOOKS = 256
"""Each has a session with the node, and one post at a time."""
PAGE = 20
WAIT_MS = 25_000
NODE_RETRY_S = 5.0
DELIVERY_BACKOFF = Backoff(5.0, 3600.0, factor=6.0)
MAX_DEAD_IN_ROW = 3
"""So many messages one after the other that the receiver refuses for good: then it is the receiver that is broken."""

State = Literal["on", "paused", "gone"]


@dataclass(frozen=True)
class WebhookPace:
    """Delays between the attempts to reach a receiver."""

    backoff: Backoff = DELIVERY_BACKOFF
    give_up_s: float = 3 * 86_400.0
    """Time after which a receiver that has accepted nothing is paused, in seconds."""

    def find_delay_s(self, failures: int, wanted_s: float) -> float:
        """Return the delay after ``failures`` in a row; longer if the receiver asks for more, within the maximum."""
        return max(self.backoff.delay_s(failures), min(wanted_s, self.backoff.max_s))


class Registration(Struct):
    """A participant's webhook, as the file holds it."""

    participant: str
    token: str
    url: str
    secret: str
    created_at: int
    state: State = "on"
    why: str = ""
    """What was wrong at the last try, if something was."""
    failing_since: int | None = None
    dead_in_row: int = 0

    def describe(self) -> dict[str, Any]:
        """What its owner and operators may see: neither token nor secret."""
        hidden = ("token", "secret")
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name not in hidden}


class Webhooks:
    """The webhooks of one gateway. Use as ``async with Webhooks(...) as webhooks``; no other process has the file then.

    ``allowed_hosts`` may be called although they are not public, and without encryption.
    """

    def __init__(
        self, node_url: str, file: Path, allowed_hosts: frozenset[str] = frozenset(), pace: WebhookPace | None = None
    ):
        self._url = node_url
        self._file = JsonStore(file, list[Registration], [], "webhooks")
        self._allowed_hosts = allowed_hosts
        self._pace = pace or WebhookPace()
        self._known: dict[str, Registration] = {}
        self._tasks = LatestTasks[str]()

    async def __aenter__(self) -> Self:
        """Raises `ConfigError` where the file is no good, or another gateway has it."""
        known = self._file.open()
        self._known = {it.participant: it for it in known}
        for it in known:
            if it.state == "on":
                self._begin(it)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        self._file.close()

    # --- what pool ask for

    async def register(self, credentials: Credentials, client: NetworkClient, url: str, secret: str | None) -> str:
        """Post to this address from now on what is delivered to the caller; gives the secret, which is not shown again.
        Raises `InvalidArguments`, `Forbidden`, `TooLarge`; `NotStored`, and then nothing has changed."""
        if client.welcome.is_operator:
            raise Forbidden(
                "A webhook keeps the token that registers it, and this one is an operator's. Make one for it: "
                "roundelay token create ID."
            )
        chosen = secret if secret is not None else f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        await self.check(url, chosen)
        # from here on without an await: several may be asked for at once
        agent_id = credentials.agent_id
        if agent_id not in self._known and len(self._known) >= MAX_WEBHOOKS:
            raise TooLarge(f"This gateway has {MAX_WEBHOOKS} webhooks, the most that it may; remove one.")
        hook = Registration(agent_id, credentials.token, url, chosen, system_clock())
        self._keep_all({**self._known, agent_id: hook})
        self._begin(hook)
        return chosen

    async def check(self, url: str, secret: str | None) -> None:
        """Whether `register` would take these. Raises `InvalidArguments`."""
        target = WebhookUrl.read(url, self._allowed_hosts)
        await target.find_addresses()
        if secret is not None:
            _check_secret(secret)

    def find(self, agent_id: str) -> Registration:
        """Raises `UnknownMessage` where that participant has none."""
        found = self._known.get(agent_id)
        if found is None:
            raise UnknownMessage(
                f"{agent_id} has no webhook here; roundelay webhook add registers one, or POST /v1/webhook."
            )
        return found

    def list_all(self) -> list[dict[str, Any]]:
        return [it.describe() for _, it in sorted(self._known.items())]

    async def remove(self, agent_id: str) -> None:
        """Raises `UnknownMessage`; `NotStored`, and then nothing has changed."""
        self.find(agent_id)
        self._keep_all({name: it for name, it in self._known.items() if name != agent_id})
        await self._tasks.cancel(agent_id)

    def resume(self, agent_id: str) -> Registration:
        """Go on at once, wherever it waits or has given up. Raises `UnknownMessage`."""
        hook = self.find(agent_id)
        self._note(hook, state="on", why="", failing_since=None, dead_in_row=0)
        self._begin(hook)
        return hook

    async def test(self, agent_id: str) -> Posted:
        """Post something that is no message. Raises `UnknownMessage`, `InvalidArguments`."""
        hook = self.find(agent_id)
        async with WebhookPoster(
            WebhookUrl.read(hook.url, self._allowed_hosts), sign_as_standard(hook.secret)
        ) as poster:
            value = {"type": "test", "timestamp": _tell_time(system_clock()), "participant": agent_id}
            return await poster.post(f"test_{secrets.token_hex(16)}", value)

    # --- what it does by itself

    def _begin(self, hook: Registration) -> None:
        self._tasks.start(hook.participant, lambda: self._keep(hook), f"webhook-{hook.participant}")

    async def _keep(self, hook: Registration) -> None:
        """Serve one webhook until it is cancelled, or gives up, visibly."""
        while True:
            try:
                return await self._serve(hook)
            except (ConnectError, RetryLater) as error:  # the node's doing, not the receiver's
                _logger.warning("a webhook waits for the node: %s", error, extra={"agent_id": hook.participant})
            except RoundelayError as error:
                return self._note(hook, state="paused", why=str(error))
            except Exception:
                _logger.exception("a webhook failed and goes on", extra={"agent_id": hook.participant})
            await asyncio.sleep(NODE_RETRY_S)

    async def _serve(self, hook: Registration) -> None:
        async with AsyncExitStack() as stack:
            target = WebhookUrl.read(hook.url, self._allowed_hosts)  # what is allowed may have changed
            poster = await stack.enter_async_context(WebhookPoster(target, sign_as_standard(hook.secret)))
            client = NetworkClient(hook.participant, self._url, kind=None, token=hook.token, deliver=False)
            await stack.enter_async_context(client)
            failures, after = 0, None
            while True:
                args = {"after": after, "limit": PAGE, "wait_ms": WAIT_MS, "peek": True}
                page = await client.call("network.receive", args)
                # what is damaged can never be handled: wait for what comes above it, then look from the floor again
                after = page["next"] if after is None and page.get("damaged") and not page["messages"] else None
                if after is not None or args["after"] is not None:
                    continue
                for message in page["messages"]:
                    delay_s = await self._hand_over(hook, client, poster, message, failures)
                    if hook.state != "on":
                        return
                    if delay_s is not None:
                        failures += 1
                        await asyncio.sleep(delay_s)
                        break
                    failures = 0

    async def _hand_over(
        self,
        hook: Registration,
        client: NetworkClient,
        poster: WebhookPoster,
        message: Mapping[str, Any],
        failures: int,
    ) -> float | None:
        """Post one message; gives how long to wait before the next try, None where the next one may come."""
        seq = message["seq"]
        posted = await poster.post(*make_event(hook.participant, client.welcome.network.name, message))
        match posted.answer:
            case PostAnswer.TAKEN:
                await client.call("network.acknowledge", {"seqs": [seq]})
                self._note(hook, why="", failing_since=None, dead_in_row=0)
                return None
            case PostAnswer.REFUSED:
                args = {"seq": seq, "reason": f"The webhook refused it: {posted.told}.", "retry_after_ms": 0}
                failed = await client.call("network.nack", args)
                dead = hook.dead_in_row + failed["is_dead"]
                self._note(hook, why=f"#{seq}: {posted.told}", failing_since=None, dead_in_row=dead)
                if dead >= MAX_DEAD_IN_ROW:
                    self._note(hook, state="paused", why=f"{dead} messages in a row were refused; {posted.told}")
                return None if failed["is_dead"] else self._pace.backoff.delay_s(failed["attempts"])
            case PostAnswer.GONE:
                self._note(hook, state="gone", why=posted.told)
                return None
            case PostAnswer.AWAY:
                now = system_clock()
                since = hook.failing_since if hook.failing_since is not None else now
                self._note(hook, why=posted.told, failing_since=since)
                if now - since > self._pace.give_up_s * 1000:
                    self._note(hook, state="paused")
                return self._pace.find_delay_s(failures + 1, posted.retry_after_s)

    def _note(self, hook: Registration, **changes: Any) -> None:
        """Change what is known of a webhook, on the disk too if that takes it; nothing where it is so already."""
        if all(getattr(hook, name) == value for name, value in changes.items()):
            return
        state = hook.state
        for name, value in changes.items():
            setattr(hook, name, value)
        try:
            self._keep_all(self._known)
        except NotStored as error:  # what it says is found out again; that posts go on matters more
            _logger.warning("what is known of a webhook is not kept: %s", error, extra={"agent_id": hook.participant})
        if hook.state != state:
            level = logging.INFO if hook.state == "on" else logging.WARNING
            told = {"agent_id": hook.participant, "state": hook.state}
            _logger.log(level, "a webhook is %s: %s", hook.state, hook.why, extra=told)

    def _keep_all(self, known: dict[str, Registration]) -> None:
        self._file.save(list(known.values()))
        self._known = known


def make_event(agent_id: str, network: str, message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The id and the body of a message's post: the same whenever and from wherever it is posted."""
    identity = "\0".join((network, agent_id, message["sender_id"], message["message_id"]))
    value = {
        "type": "message",
        "timestamp": _tell_time(message["sent_at"]),
        "participant": agent_id,
        "network": network,
        "data": dict(message),
    }
    return f"msg_{hashlib.sha256(identity.encode()).hexdigest()[:40]}", value


def _tell_time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _check_secret(secret: str) -> None:
    """Raises `InvalidArguments` for what the standard's receivers would not take."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not (secret.startswith("whsec_") and 24 <= len(key) <= 64):
        raise InvalidArguments("A secret is whsec_ and 24 to 64 bytes as base64; without one a new one is made.")
