"""HTTP endpoints that register, check, show, test, resume and remove webhooks. The endpoints are rows in the form of
`http.api`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from roundelay.interop.http.api import Empty, Endpoint, HttpCall
from roundelay.network.errors import Forbidden

from .delivery import Webhooks
from .posts import MAX_URL_CHARS


class NewWebhook(BaseModel):
    """A webhook to register for the caller's messages."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(max_length=MAX_URL_CHARS, examples=["https://example.org/hook"])
    secret: str | None = Field(
        None, max_length=128, description="`whsec_` and 24 to 64 bytes as base64. Without it, a new secret is created"
    )


class WebhookStatus(BaseModel):
    """State of a webhook, without its secret."""

    participant: str
    url: str
    created_at: int
    state: Literal["on", "paused", "gone"] = Field(description="`gone`: the receiver answered 410")
    why: str = Field(description="Text of the last failure, or empty if the last attempt succeeded")
    failing_since: int | None = Field(description="Time since which the receiver has accepted nothing, in ms")
    dead_in_row: int = Field(description="Number of consecutive messages that became dead letters")


class RegisteredWebhook(WebhookStatus):
    """A newly registered webhook with its secret. The secret is not shown again."""

    secret: str


class CheckedWebhook(BaseModel):
    """Result of a check: the URL and the secret are valid. The webhook was not registered."""

    would_be_taken: bool


class AllWebhooks(BaseModel):
    webhooks: list[WebhookStatus]


class TriedWebhook(BaseModel):
    """Result of a test post."""

    answer: Literal["taken", "refused", "away", "gone"]
    told: str


class Removed(BaseModel):
    removed: bool


class WhoseWebhook(BaseModel):
    model_config = ConfigDict(extra="forbid")

    participant: str | None = Field(None, description="Only operators may name another participant")


class WebhookOf(WhoseWebhook):
    """Owner of a webhook. The default is the caller."""


def make_webhook_endpoints(webhooks: Webhooks) -> tuple[Endpoint[Any], ...]:
    """Return the HTTP endpoints that manage these webhooks."""

    def find_owner(call: HttpCall) -> str:
        named: str = call.arguments.participant or call.credentials.agent_id
        if named != call.credentials.agent_id and not call.client.welcome.is_operator:
            raise Forbidden("Only operators may see or change another participant's webhook.")
        return named

    async def register(call: HttpCall) -> tuple[int, Any]:
        secret = await webhooks.register(call.credentials, call.client, call.arguments.url, call.arguments.secret)
        return 201, {**webhooks.find(call.credentials.agent_id).describe(), "secret": secret}

    async def check(call: HttpCall) -> tuple[int, Any]:
        await webhooks.check(call.arguments.url, call.arguments.secret)
        return 200, {"would_be_taken": True}

    async def show(call: HttpCall) -> tuple[int, Any]:
        return 200, webhooks.find(find_owner(call)).describe()

    async def list_all(call: HttpCall) -> tuple[int, Any]:
        if not call.client.welcome.is_operator:
            raise Forbidden("Only operators may list all webhooks. /v1/webhook is the caller's own.")
        return 200, {"webhooks": webhooks.list_all()}

    async def remove(call: HttpCall) -> tuple[int, Any]:
        await webhooks.remove(find_owner(call))
        return 200, {"removed": True}

    async def test(call: HttpCall) -> tuple[int, Any]:
        posted = await webhooks.test(find_owner(call))
        return 200, {"answer": posted.answer.value, "told": posted.reason}

    async def resume(call: HttpCall) -> tuple[int, Any]:
        return 200, webhooks.resume(find_owner(call)).describe()

    path = "/v1/webhook"
    return (
        Endpoint(
            "POST",
            path,
            "register_webhook",
            "Register a webhook for your messages",
            NewWebhook,
            RegisteredWebhook,
            register,
        ),
        Endpoint("POST", f"{path}/check", "check_webhook", "Check a registration", NewWebhook, CheckedWebhook, check),
        Endpoint("GET", path, "show_webhook", "Show your webhook", WhoseWebhook, WebhookStatus, show),
        Endpoint("DELETE", path, "remove_webhook", "Remove your webhook", WhoseWebhook, Removed, remove),
        Endpoint("POST", f"{path}/test", "test_webhook", "Post a test", WebhookOf, TriedWebhook, test),
        Endpoint("POST", f"{path}/resume", "resume_webhook", "Try again at once", WebhookOf, WebhookStatus, resume),
        Endpoint(
            "GET", "/v1/webhooks", "list_webhooks", "List all webhooks, for operators", Empty, AllWebhooks, list_all
        ),
    )
