"""Webhooks: the gateway signs each message that is delivered to a participant, and posts it to the participant's URL.

The ledger serves as the queue. A webhook peeks at the oldest unhandled message of its participant and posts it. The
webhook acknowledges the message when the receiver has answered 2xx, and only then reads the next message. The gateway
therefore stores only the registrations, in one private file. If the response to a post was lost, the message is posted
again with the same ``webhook-id``.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct

from roundelay.interop.json_store import JsonStore
from roundelay.interop.registrations import Registrations, WebhookPace
from roundelay.interop.session_pool import Credentials
from roundelay.network.client import NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.errors import (
    Forbidden,
    InvalidArguments,
    TooLarge,
    UnknownMessage,
)

from .posts import PostAnswer, Posted, WebhookPoster, WebhookUrl, sign_as_standard

_logger = logging.getLogger(__name__)

MAX_WEBHOOKS = 256
"""Maximum number of webhooks of one gateway. Each webhook has one session with the node, and sends one post
at a time.
"""
PAGE = 20
WAIT_MS = 25_000
MAX_DEAD_IN_ROW = 3
"""Number of consecutive dead letters after which a webhook is paused. After so many failures, the receiver is probably
broken, not the messages.
"""

State = Literal["on", "paused", "gone"]


class Registration(Struct):
    """Registration of a participant's webhook, as stored in the file."""

    participant: str
    token: str
    url: str
    secret: str
    created_at: int
    state: State = "on"
    why: str = ""
    """Text of the last failure, or an empty string if the last post succeeded."""
    failing_since: int | None = None
    dead_in_row: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the fields that the owner and operators may see: everything except the token and the secret."""
        hidden = ("token", "secret")
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name not in hidden}


class Webhooks(Registrations[str, Registration]):
    """The webhooks of one gateway. Use this class as ``async with Webhooks(...) as webhooks``, which locks the file.

    URLs with a host in ``allowed_hosts`` may have a private address and may use http://.
    """

    noun = "webhook"

    def __init__(
        self, node_url: str, file: Path, allowed_hosts: frozenset[str] = frozenset(), pace: WebhookPace | None = None
    ):
        super().__init__(pace)
        self._url = node_url
        self._file = JsonStore(file, list[Registration], [], "webhooks")
        self._allowed_hosts = allowed_hosts

    async def __aenter__(self) -> Self:
        """Lock and read the file. Raises `ConfigError` if the file is invalid or another gateway uses it."""
        self._load(self._file.open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        self._file.close()

    # --- requests of callers

    async def register(self, credentials: Credentials, client: NetworkClient, url: str, secret: str | None) -> str:
        """Register a URL to which the caller's messages are posted. Return the secret, which is not shown again.

        Raises `InvalidArguments`, `Forbidden`, `TooLarge` or `NotStored`. After an error, all registrations are
        unchanged.
        """
        if client.welcome.is_operator:
            raise Forbidden(
                "A webhook stores the token of its registration, but operators' tokens must not be stored. "
                "Create a token for it: roundelay token create ID."
            )
        chosen = secret if secret is not None else f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        await self.check(url, chosen)
        # Do not await below this line. Otherwise concurrent registrations could exceed the limit.
        agent_id = credentials.agent_id
        if agent_id not in self._entries and len(self._entries) >= MAX_WEBHOOKS:
            raise TooLarge(f"This gateway has {MAX_WEBHOOKS} webhooks, the maximum. Remove one.")
        webhook = Registration(agent_id, credentials.token, url, chosen, system_clock())
        self._save_all({**self._entries, agent_id: webhook})
        self._start(webhook)
        return chosen

    async def check(self, url: str, secret: str | None) -> None:
        """Check a URL and a secret in the same way as `register`. Raises `InvalidArguments`."""
        target = WebhookUrl.read(url, self._allowed_hosts)
        await target.find_addresses()
        if secret is not None:
            _check_secret(secret)

    def find(self, agent_id: str) -> Registration:
        """Return a participant's webhook. Raises `UnknownMessage` if the participant has no webhook."""
        webhook = self._entries.get(agent_id)
        if webhook is None:
            raise UnknownMessage(
                f"{agent_id} has no webhook here. Register one with roundelay webhook add, or POST /v1/webhook."
            )
        return webhook

    def list_all(self) -> list[dict[str, Any]]:
        return [webhook.describe() for _, webhook in sorted(self._entries.items())]

    async def remove(self, agent_id: str) -> None:
        """Remove a webhook. Raises `UnknownMessage` or `NotStored`. After an error, all registrations are unchanged."""
        self.find(agent_id)
        # Save first. Otherwise a gateway that is killed here would restore the removed webhook.
        self._save_all({name: webhook for name, webhook in self._entries.items() if name != agent_id})
        await self._cancel(agent_id)

    def resume(self, agent_id: str) -> Registration:
        """Post again at once, even if the webhook is waiting or paused. Raises `UnknownMessage`."""
        webhook = self.find(agent_id)
        self._update(webhook, state="on", why="", failing_since=None, dead_in_row=0)
        self._start(webhook)
        return webhook

    async def test(self, agent_id: str) -> Posted:
        """Post a test event to the receiver. Raises `UnknownMessage` and `InvalidArguments`."""
        webhook = self.find(agent_id)
        async with WebhookPoster(
            WebhookUrl.read(webhook.url, self._allowed_hosts), sign_as_standard(webhook.secret)
        ) as poster:
            value = {"type": "test", "timestamp": _format_time(system_clock()), "participant": agent_id}
            return await poster.post(f"test_{secrets.token_hex(16)}", value)

    # --- posting

    async def _serve(self, webhook: Registration) -> None:
        async with AsyncExitStack() as stack:
            # Check the URL again, because the allowed hosts may have changed since the registration.
            target = WebhookUrl.read(webhook.url, self._allowed_hosts)
            poster = await stack.enter_async_context(WebhookPoster(target, sign_as_standard(webhook.secret)))
            client = NetworkClient(webhook.participant, self._url, kind=None, token=webhook.token, deliver=False)
            await stack.enter_async_context(client)
            failures, after = 0, None
            while True:
                args = {"after": after, "limit": PAGE, "wait_ms": WAIT_MS, "peek": True}
                page = await client.call("network.receive", args)
                # Skip damaged rows: they can never be handled, and would end each wait at once. After the next message
                # has arrived above them, read from the ack cursor again, because older messages may be due for another
                # attempt.
                after = page["next"] if after is None and page.get("damaged") and not page["messages"] else None
                if after is not None or args["after"] is not None:
                    continue
                for message in page["messages"]:
                    delay_s = await self._hand_over(webhook, client, poster, message, failures)
                    if webhook.state != "on":
                        return
                    if delay_s is not None:
                        failures += 1
                        await asyncio.sleep(delay_s)
                        break
                    failures = 0

    async def _hand_over(
        self,
        webhook: Registration,
        client: NetworkClient,
        poster: WebhookPoster,
        message: Mapping[str, Any],
        failures: int,
    ) -> float | None:
        """Post one message. Return the delay until the next attempt in seconds, or None if the next message may be
        posted.
        """
        seq = message["seq"]
        posted = await poster.post(*make_event(webhook.participant, client.welcome.network.name, message))
        match posted.answer:
            case PostAnswer.TAKEN:
                # Acknowledge only after the receiver has responded with 2xx. If the gateway is killed before that, the
                # message is posted again with the same id.
                await client.call("network.acknowledge", {"seqs": [seq]})
                self._update(webhook, why="", failing_since=None, dead_in_row=0)
                return None
            case PostAnswer.REFUSED:
                # Report the failure to the hub, which counts the failures of each message across restarts of the
                # gateway.
                args = {"seq": seq, "reason": f"The webhook refused it: {posted.reason}.", "retry_after_ms": 0}
                failed = await client.call("network.nack", args)
                dead = webhook.dead_in_row + failed["is_dead"]
                self._update(webhook, why=f"#{seq}: {posted.reason}", failing_since=None, dead_in_row=dead)
                if dead >= MAX_DEAD_IN_ROW:
                    self._update(webhook, state="paused", why=f"{dead} messages in a row were refused; {posted.reason}")
                # Continue after a dead letter, which no longer blocks the queue. Operators can find the dead letter and
                # deliver the message again.
                return None if failed["is_dead"] else self._pace.backoff.delay_s(failed["attempts"])
            case PostAnswer.GONE:
                self._update(webhook, state="gone", why=posted.reason)
                return None
            case PostAnswer.AWAY:
                return self._note_failure(webhook, posted, failures)

    def _get_key(self, webhook: Registration) -> str:
        return webhook.participant

    def _describe(self, webhook: Registration) -> dict[str, str]:
        return {"agent_id": webhook.participant}

    def _save(self) -> None:
        self._file.save(list(self._entries.values()))


def make_event(agent_id: str, network: str, message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the id and the body of the post for a message. Every attempt and every gateway computes the same id."""
    # Do not derive the id from the seq. After a restore from a backup, another message may have the same seq.
    identity = "\0".join((network, agent_id, message["sender_id"], message["message_id"]))
    value = {
        "type": "message",
        "timestamp": _format_time(message["sent_at"]),
        "participant": agent_id,
        "network": network,
        "data": dict(message),
    }
    return f"msg_{hashlib.sha256(identity.encode()).hexdigest()[:40]}", value


def _format_time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _check_secret(secret: str) -> None:
    """Raise `InvalidArguments` for a secret that receivers of Standard Webhooks would refuse."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not (secret.startswith("whsec_") and 24 <= len(key) <= 64):
        raise InvalidArguments(
            "A secret must be whsec_ followed by 24 to 64 bytes in base64. Without a secret, a new one is created."
        )
