"""Tests of A2A push notifications as a receiver gets them that has only the gateway's public keys and the official
types.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from a2a.client import A2ACardResolver
from a2a.client.errors import A2AClientError
from a2a.types import (
    AuthenticationInfo,
    DeleteTaskPushNotificationConfigRequest,
    GetTaskPushNotificationConfigRequest,
    GetTaskRequest,
    ListTaskPushNotificationConfigsRequest,
    PushNotificationNotSupportedError,
    StreamResponse,
    Task,
    TaskNotFoundError,
    TaskPushNotificationConfig,
    TaskState,
    UnsupportedOperationError,
)
from a2a.utils.errors import InvalidParamsError
from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped] # protobuf's runtime has no types

from roundelay.agents.models.model import ModelReply
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.interop import json_store
from roundelay.interop.gateway import serve_gateway
from roundelay.interop.webhooks.delivery import WebhookPace
from roundelay.network.backoff import Backoff
from tests.interop.test_a2a_server import BINDINGS, assemble, hears, official, say, state, tell, texts
from tests.support.a2a_kit_agent import kit_agent
from tests.support.asked import invite, working
from tests.support.counts import Note
from tests.support.gateways import gateway_process
from tests.support.node import Node, running_node
from tests.support.remote_team import Stepped
from tests.support.webhook_receiver import Receiver

QUICK = WebhookPace(Backoff(0.01, 0.05, factor=1))
SIGNATURE = "x-a2a-notification-signature"


class Keys:
    """The gateway's public keys, which verify a request."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.claims: list[dict[str, Any]] = []
        self.url = ""

    async def fetch(self, gateway: str) -> None:
        async with httpx.AsyncClient() as http:
            found = (await http.get(f"{gateway}/.well-known/jwks.json")).raise_for_status().json()["keys"]
        self.known = {it["kid"]: jwt.PyJWK(it) for it in found}
        assert not any("d" in it for it in found), "the private part is nobody's to see"

    def judge(self, body: bytes, headers: dict[str, str]) -> None:
        signature = headers[SIGNATURE]
        key = self.known[jwt.get_unverified_header(signature)["kid"]]
        claims = jwt.decode(
            signature, key.key, ["ES256"], audience=self.url, options={"require": ["iat", "exp", "jti", "aud"]}
        )
        assert claims["request_body_sha256"] == hashlib.sha256(body).hexdigest()
        self.claims.append(claims)
        headers["post"] = claims["jti"]


def task_of(body: dict[str, Any]) -> Task:
    told: StreamResponse = ParseDict(body, StreamResponse())
    assert told.HasField("task")
    return told.task


class Told:
    """A receiver, and the notifications for each task."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.receiver = Receiver(judge=self.keys.judge, id_header="post")
        self._tasks: list[Task] = []

    @property
    def tasks(self) -> list[Task]:
        # Parse each notification once: 80 waits for one of hundreds would take minutes, in which the node is not served.
        self._tasks += [task_of(body) for _, body in self.receiver.got[len(self._tasks) :]]
        return self._tasks

    async def wait_for_end(self, task_id: str) -> Task:
        count = 0
        while True:
            count += 1
            await self.receiver.wait_for(count)
            task = self.tasks[count - 1]
            if task.id == task_id and task.status.state == TaskState.TASK_STATE_COMPLETED:
                return task


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    made = Told()
    async with made.receiver.listening():
        made.keys.url = made.receiver.url
        yield made


@asynccontextmanager
async def pushing(node: Node, folder: Path, told: Told) -> AsyncIterator[str]:
    """Run a gateway with push notifications. Yield the gateway's URL."""
    serving = serve_gateway(node.url, webhooks_file=folder / "hooks", webhook_hosts=["127.0.0.1"], pace=QUICK)
    async with serving as url:
        await told.keys.fetch(url)
        yield url


def config(told: Told, task_id: str = "", **more: Any) -> TaskPushNotificationConfig:
    return TaskPushNotificationConfig(task_id=task_id, url=told.receiver.url, **more)


def asking(told: Told, text: str, message_id: str = "m-1", **more: Any) -> Any:
    request = say(text, message_id)
    request.configuration.return_immediately = True
    request.configuration.task_push_notification_config.CopyFrom(config(told, **more))
    return request


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_receiver_is_told_signed_of_a_task_until_it_is_over(tmp_path: Path, told: Told, binding: str) -> None:
    model = Stepped()
    async with asyncio.timeout(40), running_node() as node, pushing(node, tmp_path, told) as url:
        token = await invite(node, "ui")
        async with (
            working(node, SimpleAgentRunner("bob", instruction="", model=model)),
            official(f"{url}/a2a/bob", token, binding=binding, streaming=False) as client,
            httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http,
        ):
            card = await A2ACardResolver(http, f"{url}/a2a/bob").get_agent_card()
            assert card.capabilities.push_notifications
            begun = assemble(await tell(client, asking(told, "dig", token="mine")))
            await model.asked.get()
            model.reply.put_nowait(ModelReply("There is gold."))
            ended = await told.wait_for_end(begun.id)
            assert texts(ended) == ["There is gold."]
            states = [state(it) for it in told.tasks]
            assert states == sorted(states, key=["SUBMITTED", "WORKING", "COMPLETED"].index)
            assert {it["x-a2a-notification-token"] for it in told.receiver.heads} == {"mine"}
            assert {it["authorization"] for it in told.receiver.heads} == {
                f"Bearer {it[SIGNATURE]}" for it in told.receiver.heads
            }
            assert {it["sub"] for it in told.keys.claims} == {begun.id}
            page = await http.get(f"{url}/v1/messages", params={"wait_s": 0})
            assert page.json()["messages"] == [], "what a receiver has taken is handled"

            own = AuthenticationInfo(scheme="Basic", credentials="dWk6c2VjcmV0")
            made = await client.create_task_push_notification_config(
                config(told, begun.id, id="second", authentication=own)
            )
            await told.receiver.wait_for(len(states) + 1)  # a finished task is notified once
            assert told.receiver.heads[-1]["authorization"] == "Basic dWk6c2VjcmV0"
            listed = await client.list_task_push_notification_configs(
                ListTaskPushNotificationConfigsRequest(task_id=begun.id)
            )
            assert [it.id for it in listed.configs][1:] == ["second"]
            assert made == await client.get_task_push_notification_config(
                GetTaskPushNotificationConfigRequest(task_id=begun.id, id="second")
            )
            for _ in range(2):  # the second time, the configuration does not exist any more
                await client.delete_task_push_notification_config(
                    DeleteTaskPushNotificationConfigRequest(task_id=begun.id, id="second")
                )
            with pytest.raises(TaskNotFoundError):
                await client.get_task_push_notification_config(
                    GetTaskPushNotificationConfigRequest(task_id=begun.id, id="second")
                )
            for file in ("hooks", "hooks.a2a"):
                assert not (tmp_path / file).exists() or (tmp_path / file).stat().st_mode & 0o077 == 0


async def test_a_task_that_asks_is_told_and_goes_on(tmp_path: Path, told: Told) -> None:
    async with asyncio.timeout(40), running_node() as node, pushing(node, tmp_path, told) as url:
        token = await invite(node, "ui")
        async with kit_agent(node.url), official(f"{url}/a2a/kit", token, streaming=False) as client:
            asked = assemble(await tell(client, asking(told, "begin", "tck-input-required-1")))
            while not told.tasks or state(told.tasks[-1]) != "INPUT_REQUIRED":
                await told.receiver.wait_for(len(told.tasks) + 1)
            assert told.tasks[-1].status.message.parts[0].text == "What more?"
            await tell(client, say("go on", "tck-complete-task-1", task_id=asked.id))
            assert texts(await told.wait_for_end(asked.id)) == ["Hello from TCK"]


async def test_what_was_not_taken_is_told_again_also_by_another_gateway(tmp_path: Path, told: Told) -> None:
    told.receiver.answers = lambda *_: 503
    async with asyncio.timeout(40), running_node() as node:
        token = await invite(node, "ui")
        async with working(node, SimpleAgentRunner("bob", instruction="", model=ScriptedModel(hears))):
            async with (
                pushing(node, tmp_path, told) as url,
                official(f"{url}/a2a/bob", token, streaming=False) as client,
            ):
                task = assemble(await tell(client, asking(told, "one")))
                while not any(state(it) == "COMPLETED" for it in told.tasks):
                    await told.receiver.wait_for(len(told.tasks) + 1)
            seen = len(told.tasks)
            told.receiver.answers = lambda *_: 200
            async with pushing(node, tmp_path, told):
                await told.receiver.wait_for(seen + 1)
            assert (told.tasks[-1].id, texts(told.tasks[-1])) == (task.id, ["I hear one"])
            assert told.receiver.got[-1][0] in {key for key, _ in told.receiver.got[:seen]}, (
                "by its id a repeat is known"
            )


async def test_a_config_that_is_created_many_times_at_once_posts_once(tmp_path: Path, told: Told) -> None:
    model, at_once = Stepped(), 8
    async with asyncio.timeout(40), running_node() as node, pushing(node, tmp_path, told) as url:
        token = await invite(node, "ui")
        async with (
            working(node, SimpleAgentRunner("bob", instruction="", model=model)),
            official(f"{url}/a2a/bob", token, streaming=False) as client,
        ):
            begun = assemble(await tell(client, asking(told, "dig", id="one")))
            await model.asked.get()
            for _ in range(3):
                await asyncio.gather(
                    *(
                        client.create_task_push_notification_config(config(told, begun.id, id="one"))
                        for _ in range(at_once)
                    )
                )
            listed = await client.list_task_push_notification_configs(
                ListTaskPushNotificationConfigsRequest(task_id=begun.id)
            )
            assert [it.id for it in listed.configs] == ["one"]
            for _ in range(50):  # enough time for an endless sender to post again
                await client.get_task(GetTaskRequest(id=begun.id))
            assert len(told.tasks) <= 3 * at_once + 2
            model.reply.put_nowait(ModelReply("There is gold."))
            await told.wait_for_end(begun.id)


async def test_what_cannot_be_deleted_for_good_is_told_as_before(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = Stepped()
    async with asyncio.timeout(40), running_node() as node, pushing(node, tmp_path, told) as url:
        token = await invite(node, "ui")
        async with (
            working(node, SimpleAgentRunner("bob", instruction="", model=model)),
            official(f"{url}/a2a/bob", token, streaming=False) as client,
        ):
            begun = assemble(await tell(client, asking(told, "dig", id="one")))
            await model.asked.get()
            with monkeypatch.context() as full:
                full.setattr(json_store, "replace_file", fail)
                given = DeleteTaskPushNotificationConfigRequest(task_id=begun.id, id="one")
                assert "no space is left" in await refused(client.delete_task_push_notification_config(given))
                model.reply.put_nowait(ModelReply("There is gold."))
                await told.wait_for_end(begun.id)
            asked = ListTaskPushNotificationConfigsRequest(task_id=begun.id)
            assert [it.id for it in (await client.list_task_push_notification_configs(asked)).configs] == ["one"]
            assert len(told.tasks) <= 3


async def refused(work: Any) -> str:
    with pytest.raises((InvalidParamsError, UnsupportedOperationError, TaskNotFoundError, A2AClientError)) as error:
        await work
    return str(error.value)


async def test_nobody_is_told_of_anothers_task_and_nothing_private_is_called(tmp_path: Path, told: Told) -> None:
    model = ScriptedModel(hears)
    async with asyncio.timeout(40), running_node() as node, pushing(node, tmp_path, told) as url:
        token, stranger = await invite(node, "ui"), await invite(node, "eve")
        async with (
            working(node, SimpleAgentRunner("bob", instruction="", model=model)),
            official(f"{url}/a2a/bob", token, streaming=False) as client,
            official(f"{url}/a2a/bob", stranger, streaming=False) as other,
        ):
            task = assemble(await tell(client, say("secret")))
            made = await client.create_task_push_notification_config(config(told, task.id))
            for work in (
                other.create_task_push_notification_config(config(told, task.id)),
                other.list_task_push_notification_configs(ListTaskPushNotificationConfigsRequest(task_id=task.id)),
                other.get_task_push_notification_config(
                    GetTaskPushNotificationConfigRequest(task_id=task.id, id=made.id)
                ),
            ):
                assert "has no task" in await refused(work)
            await other.delete_task_push_notification_config(
                DeleteTaskPushNotificationConfigRequest(task_id=task.id, id=made.id)
            )
            listed = await client.list_task_push_notification_configs(
                ListTaskPushNotificationConfigsRequest(task_id=task.id)
            )
            assert [it.id for it in listed.configs] == [made.id], "what another deletes is its own"
            for wrong in (
                {"url": "https://127.0.0.2/"}, {"url": "http://example.org/"}, {"url": "https://169.254.169.254/"}, {"token": "a\r\nx: y"},
                {"authentication": AuthenticationInfo(scheme="Bearer\r\nx:", credentials="y")}, {"id": "x" * 200},
                {"authentication": AuthenticationInfo(scheme="Bearer", credentials="a\nb")},
            ):  # fmt: skip
                given = TaskPushNotificationConfig(task_id=task.id, **({"url": told.receiver.url} | wrong))
                assert await refused(client.create_task_push_notification_config(given))
            for number in range(7):
                await client.create_task_push_notification_config(config(told, task.id, id=f"n-{number}"))
            assert "the maximum" in await refused(client.create_task_push_notification_config(config(told, task.id)))


async def test_without_a_file_they_are_refused_and_the_card_says_so(told: Told) -> None:
    async with asyncio.timeout(40), running_node() as node, serve_gateway(node.url) as url:
        token = await invite(node, "ui")
        async with (
            working(node, SimpleAgentRunner("bob", instruction="", model=ScriptedModel(hears))),
            official(f"{url}/a2a/bob", token, streaming=False) as client,
            httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http,
        ):
            card = await A2ACardResolver(http, f"{url}/a2a/bob").get_agent_card()
            assert not card.capabilities.push_notifications
            with pytest.raises(PushNotificationNotSupportedError):
                await tell(client, asking(told, "dig"))
            assert (await http.get(f"{url}/.well-known/jwks.json")).status_code == 404


async def _ask_and_kill(folder: Path, told: Told, rounds: int, note: Note) -> None:
    """Ask, and kill the gateway at a random moment of each task. Meanwhile, the receiver accepts two of three
    requests.
    """
    chance, posts, kills = random.Random(rounds), 0, 0
    asked = list[str]()

    def answer(*_: Any) -> int | None:
        nonlocal posts
        posts += 1
        if posts <= 2:
            return 503
        return chance.choice([200, 200, 200, 503, 500, None])

    told.receiver.answers = answer
    async with running_node() as node:
        token = await invite(node, "ui")
        options = ("--webhooks", str(folder / "hooks"), "--webhook-host", "127.0.0.1")
        async with (
            working(node, SimpleAgentRunner("bob", instruction="", model=ScriptedModel(hears))),
            gateway_process(node.url, *options) as gateway,
        ):
            url = f"http://127.0.0.1:{gateway.port}"
            await told.keys.fetch(url)
            for number in range(rounds):
                async with official(f"{url}/a2a/bob", token, streaming=False) as client:
                    for one in (f"{number}-a", f"{number}-b"):
                        asked.append(assemble(await tell(client, asking(told, one, one))).id)
                await asyncio.sleep(chance.random() * 0.2)
                await gateway.kill()
                kills += 1
                await gateway.start()
            told.receiver.answers = lambda *_: 200
            for task_id in asked:
                ended = await told.wait_for_end(task_id)
                assert len(texts(ended)) == 1
    seen = {key for key, _ in told.receiver.got}
    note(kills=kills, tasks=len(asked), lost=0, posts=len(told.receiver.got), again=len(told.receiver.got) - len(seen))
    bodies: dict[str, str] = {}
    for key, body in told.receiver.got:  # a repeated request has the same content
        assert bodies.setdefault(key, json.dumps(body, sort_keys=True)) == json.dumps(body, sort_keys=True)


async def test_the_end_of_each_task_is_told_whenever_the_gateway_is_killed(
    tmp_path: Path, told: Told, note: Note
) -> None:
    async with asyncio.timeout(100):
        await _ask_and_kill(tmp_path, told, 2, note)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_the_end_of_each_task_is_told_however_often_the_gateway_is_killed(
    tmp_path: Path, told: Told, note: Note
) -> None:
    await _ask_and_kill(tmp_path, told, 40, note)
