"""Tests of approvals at an MCP host: only the person's answer counts, and nothing that a model writes, brings back or
repeats.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import ElicitResult, InputRequiredResult, TextContent

from roundelay.agents.models.model import ModelRequest, ToolMessage
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import call, say
from roundelay.agents.tools import tool
from roundelay.interop.gateway import serve_gateway
from roundelay.network.client import NetworkClient
from tests.support.agents import make_runner
from tests.support.asked import invite, working
from tests.support.node import Node, running_node

paid: list[str] = []


@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay."""
    paid.append(to)
    return f"{amount} paid to {to}"


class MiasHost:
    """Mia's MCP host: her model calls tools, and she answers forms. `asked` lists the forms that she saw."""

    def __init__(self, client: Client, person: NetworkClient, url: str = "") -> None:
        self.url = url
        """URL of the gateway."""
        self.client = client
        self.person = person
        """Mia's own session, with which the test reads the ledger."""
        self._messages = aiter(person)

    async def request(self, to: str) -> int:
        """Let the desk ask whether it may pay somebody. Return the request's seq once the desk waits."""
        trigger = (await self.person.send("agent:desk", to, conversation=to)).seq
        while True:  # the agent records its wait a moment after its question
            for it in (await self.person.call("network.approvals"))["approvals"]:
                if it["trigger"] == trigger and it["may_decide"]:
                    return int(it["seq"])

    async def reply(self, seq: int, text: str = "/approve", **rounds: Any) -> Any:
        arguments = {"seq": seq, "text": text}
        return await self.client.session.call_tool("reply", arguments, allow_input_required=True, **rounds)

    async def refusal(self, seq: int, text: str = "/approve") -> str:
        result = await self.client.call_tool("reply", {"seq": seq, "text": text})
        [content] = result.content
        assert isinstance(content, TextContent)
        assert result.is_error, content.text
        return content.text

    async def decisions(self, seq: int) -> list[str]:
        """Return mia's replies to a request."""
        followed = (await self.person.call("network.impact", {"seq": seq}))["messages"]
        return [it["content"] for it in followed if it.get("reply_to") == seq and it["sender_id"] == "mia"]

    async def result(self, to: str) -> str:
        """Return the desk's message at the end of the reaction for this payee."""
        while True:
            message = await anext(self._messages)
            if message.text.startswith(f"{to}: "):
                return message.text


def say_result(request: ModelRequest) -> Any:
    view = read_prompt(request)
    if request.turn == 1:
        return call("pay", to=view.incoming_text, amount=5)
    results = [str(it.content) for it in request.messages if isinstance(it, ToolMessage)]
    return say(f"{view.incoming_text}: {' '.join(results)}")


class Mia:
    """Mia's answer to each form of her host, and the forms that she has seen."""

    def __init__(self, action: str, **content: str) -> None:
        self.answer = ElicitResult.model_validate({"action": action, "content": content or None})
        self.asked: list[str] = []

    async def __call__(self, _: object, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        return self.answer


@asynccontextmanager
async def at_mias(node: Node, mia: Mia | None = None, mode: str = "auto") -> AsyncIterator[MiasHost]:
    """Run a gateway, mia's host with her token, and the desk."""
    credentials = await invite(node, "mia", "human")
    async with (
        serve_gateway(node.url) as url,
        working(node, make_runner("desk", say_result, tools=[pay])),
        NetworkClient("mia", node.url, kind=None, token=credentials.partition(":")[2]) as person,
        host_of(url, credentials, mia, mode) as client,
    ):
        yield MiasHost(client, person, url)


@asynccontextmanager
async def host_of(url: str, credentials: str, mia: Mia | None, mode: str = "auto") -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {credentials}"}, timeout=40) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode, elicitation_callback=mia) as client,
    ):
        yield client


async def test_what_the_person_answers_is_sent_and_not_what_the_model_wrote() -> None:
    mia = Mia("accept", decision="deny", reason="too much")
    async with running_node() as node, at_mias(node, mia) as host:
        paid.clear()
        denied = await host.request("eve")
        await host.client.call_tool("reply", {"seq": denied, "text": "/approve always"})
        assert await host.decisions(denied) == ["/deny too much"]
        assert "too much" in await host.result("eve")
        [form] = mia.asked
        assert form.startswith("desk (agent) asks mia in direct:desk~mia")
        assert "pay with" in form
        assert '"eve"' in form
        mia.answer = ElicitResult(action="accept", content={"decision": "approve", "reason": ""})
        approved = await host.request("ann")
        told = await host.client.call_tool("reply", {"seq": approved, "text": "No, never!"})
        assert "The person has decided: /approve." in str(told.content)
        assert await host.decisions(approved) == ["/approve"]
        assert "5 paid to ann" in await host.result("ann")
        assert paid == ["ann"]
        assert "is not waiting for a decision" in await host.refusal(approved)
        chat = (await host.person.send("agent:desk", "never asked", conversation="x")).seq
        assert "is not waiting for a decision" in await host.refusal(chat, "  /Approve")


async def test_what_is_typed_in_a_chat_of_openais_api_decides_nothing() -> None:
    async with running_node() as node, at_mias(node) as host:
        paid.clear()
        asked = await host.request("eve")
        others = {"mia": node.tokens["mia"], "ann": (await invite(node, "ann", "human")).partition(":")[2]}
        async with httpx2.AsyncClient(base_url=f"{host.url}/v1", timeout=60) as http:
            chats = []
            for name, token in others.items():  # mia in the same thread, and another person in their own thread
                head = {"Authorization": f"Bearer {name}:{token}", "Idempotency-Key": f"typed-by-{name}"}
                body = {"model": "desk", "user": "eve", "messages": [{"role": "user", "content": "/approve"}]}
                chats.append(asyncio.create_task(http.post("/chat/completions", headers=head, json=body)))
            async with asyncio.timeout(30):
                thread: list[str] = []
                while "typed-by-mia" not in thread:
                    thread = [it.message_id for it in (await host.person.history("direct:desk~mia:eve")).messages]
                assert asked in [it["seq"] for it in (await host.person.call("network.approvals"))["approvals"]]
                await host.person.send("agent:desk", "/deny no", conversation="eve", reply_to=asked)
                assert "denied" in await host.result("eve")
            for chat in chats:
                chat.cancel()
            await asyncio.wait(chats)
        assert paid == []


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_person_who_does_not_answer_has_decided_nothing(action: str) -> None:
    async with running_node() as node, at_mias(node, Mia(action)) as host:
        request = await host.request("eve")
        assert f"made no decision ({action})" in await host.refusal(request)
        assert await host.decisions(request) == []


async def test_a_host_that_cannot_ask_its_person_is_refused_in_plain_words() -> None:
    async with running_node() as node, at_mias(node) as host:
        request = await host.request("eve")
        with pytest.raises(MCPError, match="does not support elicitation") as refused:
            await host.reply(request)
        assert refused.value.error.code == -32021
        assert f"roundelay approvals approve {request}" in refused.value.error.message
        async with serve_gateway(node.url) as url:
            credentials = f"mia:{node.tokens['mia']}"
            async with host_of(url, credentials, Mia("accept", decision="approve"), "legacy") as older:
                said = await MiasHost(older, host.person).refusal(request)
        assert "HTTP has no session here" in said
        assert await host.decisions(request) == []


async def test_nothing_that_a_host_brings_back_decides_another_request_or_twice() -> None:
    answer = {"decision": "approve", "reason": ""}
    async with running_node() as node, at_mias(node, Mia("cancel")) as host:
        one, two = await host.request("eve"), await host.request("bob")
        asked = await host.reply(one)
        assert isinstance(asked, InputRequiredResult)
        [key] = asked.input_requests or {}
        yes = {"input_responses": {key: ElicitResult(action="accept", content=answer)}}
        no = {"input_responses": {key: ElicitResult(action="accept", content={**answer, "decision": "deny"})}}
        state = asked.request_state or ""
        # An answer to a question that was never asked.
        assert isinstance(await host.reply(one, **yes), InputRequiredResult)
        for seq, text, brought in (
            (two, "/approve", state),
            (one, "/approve always", state),
            (one, "/approve", state[:-3] + "AAA"),
            (one, "/approve", "v1.e30"),
        ):
            with pytest.raises(MCPError, match="Invalid or expired requestState"):
                await host.reply(seq, text, request_state=brought, **yes)
        other = await invite(node, "bea", "human")
        async with serve_gateway(node.url) as restarted:
            for url, credentials in ((host.url, other), (restarted, f"mia:{node.tokens['mia']}")):
                async with host_of(url, credentials, None) as client:
                    with pytest.raises(MCPError, match="Invalid or expired requestState"):
                        await MiasHost(client, host.person).reply(one, request_state=state, **yes)
        assert await host.decisions(one) + await host.decisions(two) == []
        assert "has decided: /deny" in str((await host.reply(one, request_state=state, **no)).content)
        again = await host.reply(one, request_state=state, **yes)
        assert again.is_error
        assert await host.decisions(one) == ["/deny"]
        assert await host.decisions(two) == []


async def test_over_stdio_a_person_decides_in_both_revisions() -> None:
    async with running_node() as node:
        credentials = await invite(node, "mia", "human")
        token = credentials.partition(":")[2]
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "roundelay", "mcp", "--as", "mia", "--url", node.url],
            env={**os.environ, "ROUNDELAY_TOKEN": token},
        )
        mia = Mia("accept", decision="approve", reason="")
        async with (
            working(node, make_runner("desk", say_result, tools=[pay])),
            NetworkClient("mia", node.url, kind=None, token=token) as person,
        ):
            for mode, name in (("auto", "ann"), ("legacy", "bob")):
                async with Client(stdio_client(server), mode=mode, elicitation_callback=mia) as client:
                    host = MiasHost(client, person)
                    request = await host.request(name)
                    await client.call_tool("reply", {"seq": request, "text": "/deny"})
                    assert await host.decisions(request) == ["/approve"]
                    assert f"5 paid to {name}" in await host.result(name)
            assert len(mia.asked) == 2
