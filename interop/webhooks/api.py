"""How a webhook is registered, looked at, tried, resumed and removed over HTTP: rows as those of `http_api`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from roundelay.interop.http.api import Empty, Endpoint, HttpCall
from roundelay.network.errors import Forbidden

from .delivery import Webhooks
from .posts import MAX_URL_CHARS


class NewWebhook(BaseModel):
    """Where the caller's messages are to be posted."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(max_length=MAX_URL_CHARS, examples=["https://example.org/hook"])
    secret: str | None = Field(
        None, max_length=128, description="`whsec_` and 24 to 64 bytes as base64; without it a new one is made"
    )


class WebhookStatus(BaseModel):
    """How a webhook does."""

    participant: str
    url: str
    created_at: int
    state: Literal["on", "paused", "gone"] = Field(description="`gone`: the receiver answered 410")
    why: str = Field(description="What was wrong at the last try, if something was")
    failing_since: int | None = Field(description="Since when the receiver has taken nothing, in ms")
    dead_in_row: int = Field(description="How many messages it has refused for good, one after the other")


class RegisteredWebhook(WebhookStatus):
    """A webhook with its secret, which is not shown again."""

    secret: str


class CheckedWebhook(BaseModel):
    """The address and the secret are fit; nothing was registered."""

    would_be_taken: bool


class AllWebhooks(BaseModel):
    webhooks: list[WebhookStatus]


class TriedWebhook(BaseModel):
    """What came of a test post."""

    answer: Literal["taken", "refused", "away", "gone"]
    told: str


class Removed(BaseModel):
    removed: bool


class WhoseWebhook(BaseModel):
    model_config = ConfigDict(extra="forbid")

    participant: str | None = Field(None, description="Operators name anybody's")


class WebhookOf(WhoseWebhook):
    """Whose webhook is meant: the caller's own, if nobody is named."""


def make_webhook_endpoints(webhooks: Webhooks) -> tuple[Endpoint[Any], ...]:
    """The rows that work on these webhooks."""

    def whose(asked: HttpCall) -> str:
        named: str = asked.given.participant or asked.credentials.agent_id
        if named != asked.credentials.agent_id and not asked.client.welcome.is_operator:
            raise Forbidden("Another participant's webhook is an operator's to look at.")
        return named

    async def register(asked: HttpCall) -> tuple[int, Any]:
        secret = await webhooks.register(asked.credentials, asked.client, asked.given.url, asked.given.secret)
        return 201, {**webhooks.find(asked.credentials.agent_id).describe(), "secret": secret}

    async def check(asked: HttpCall) -> tuple[int, Any]:
        await webhooks.check(asked.given.url, asked.given.secret)
        return 200, {"would_be_taken": True}

    async def show(asked: HttpCall) -> tuple[int, Any]:
        return 200, webhooks.find(whose(asked)).describe()

    async def list_all(asked: HttpCall) -> tuple[int, Any]:
        if not asked.client.welcome.is_operator:
            raise Forbidden("All webhooks are an operator's to look at; /v1/webhook is the caller's own.")
        return 200, {"webhooks": webhooks.list_all()}

    async def remove(asked: HttpCall) -> tuple[int, Any]:
        await webhooks.remove(whose(asked))
        return 200, {"removed": True}

    async def test(asked: HttpCall) -> tuple[int, Any]:
        posted = await webhooks.test(whose(asked))
        return 200, {"answer": posted.answer.value, "told": posted.told}

    async def resume(asked: HttpCall) -> tuple[int, Any]:
        return 200, webhooks.resume(whose(asked)).describe()

    path = "/v1/webhook"
    return (
        Endpoint(
            "POST", path, "register_webhook", "Have your messages posted", NewWebhook, RegisteredWebhook, register
        ),
        Endpoint("POST", f"{path}/check", "check_webhook", "Would it be taken?", NewWebhook, CheckedWebhook, check),
        Endpoint("GET", path, "show_webhook", "How your webhook does", WhoseWebhook, WebhookStatus, show),
        Endpoint("DELETE", path, "remove_webhook", "End your webhook", WhoseWebhook, Removed, remove),
        Endpoint("POST", f"{path}/test", "test_webhook", "Post a test", WebhookOf, TriedWebhook, test),
        Endpoint("POST", f"{path}/resume", "resume_webhook", "Go on, at once", WebhookOf, WebhookStatus, resume),
        Endpoint("GET", "/v1/webhooks", "list_webhooks", "All webhooks, for operators", Empty, AllWebhooks, list_all),
    )
