"""Tests of the time that commands wait for a lost hub."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from roundelay.app import Network
from roundelay.connection import ReconnectLimit
from roundelay.display.screen import Screen
from roundelay.network.client import NetworkClient, Reconnected, Reconnecting
from roundelay.network.errors import ConnectError
from roundelay.network.hub.local import LocalConnection, LocalTransport
from roundelay.terminal.chat import Chat

LOST = Reconnecting("closed with 1006: ", 0.1)


class Gone(LocalTransport):
    """A hub that accepts one connection and then disappears."""

    connection: LocalConnection | None = None

    async def connect(self) -> LocalConnection:
        if self.connection is not None:
            raise ConnectError("Nothing listens there.")
        self.connection = await super().connect()
        return self.connection


async def test_only_a_loss_and_a_return_are_news_and_a_long_loss_is_the_end() -> None:
    async with Network.open() as network:
        back = Reconnected((await network.join("ann")).welcome)
    now = 0.0
    patience = ReconnectLimit(10, lambda: now)
    assert [patience.handle_event(event) for event in (LOST, LOST, back, LOST)] == [True, False, True, True]
    now = 9.9
    assert not patience.handle_event(LOST)
    now = 10.0
    with pytest.raises(ConnectError, match="10 s"):
        patience.handle_event(LOST)
    endless = ReconnectLimit(None, lambda: now)
    assert endless.handle_event(LOST)
    now = 1e9
    assert not endless.handle_event(LOST)


async def test_a_chat_in_a_pipe_gives_up_and_says_so_where_errors_go() -> None:
    out, errors = io.StringIO(), io.StringIO()
    async with Network.open() as network:
        transport = Gone(network.hub)
        client = NetworkClient("mia", kind="human", transport=transport, jitter=lambda: 0.0)
        await client.connect()
        chat = Chat(client, Screen(out), errors=Screen(errors), patience=ReconnectLimit(0))
        assert transport.connection is not None
        transport.connection.end(1006, "lost")
        with pytest.raises(ConnectError, match="Nothing listens there"):
            async with asyncio.timeout(5):
                await chat.show_events()
        await client.close()
    assert errors.getvalue().count("The connection is lost") == 1
    assert "lost" not in out.getvalue()


class Overtaken(NetworkClient):
    """Client that another client overtakes: its channel is created just before its own call."""

    other: NetworkClient

    async def call(self, op: str, *args: Any, **options: Any) -> Any:
        if op == "channels.create":
            await self.other.call(op, *args, **options)
        return await super().call(op, *args, **options)


async def test_two_people_who_go_to_a_new_channel_at_once_are_both_in_it() -> None:
    out = io.StringIO()
    async with Network.open() as network:
        async with Overtaken("mia", kind="human", transport=LocalTransport(network.hub)) as client:
            client.other = await network.join("bob", kind="human")
            chat = Chat(client, Screen(out), errors=Screen(out), patience=ReconnectLimit(0))
            await chat.go("channel:den")
        members = (await client.other.call("channels.members", {"name": "den"}))["members"]
    assert sorted(members) == ["bob", "mia"]
    assert "Created" not in out.getvalue()
