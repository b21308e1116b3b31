"""Tests of library values in JSON: subclasses of strings, numbers, mappings and lists are encoded as their base type."""

from __future__ import annotations

import asyncio
import json
from collections import ChainMap, UserDict, UserList, deque
from enum import Enum, IntEnum
from fractions import Fraction
from types import MappingProxyType

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.tools import Output
from roundelay.app import Network
from roundelay.network.frames import encode
from tests.support.agents import Provider
from tests.support.loops import Loop, by_turn, results_of, use


class Text(str):
    """String subclass like langchain-core's `TextAccessor`."""

    __slots__ = ()

    def __str__(self) -> str:
        return "(something else)"


class Count(int):
    def __int__(self) -> int:
        return -1


class Share(float):
    pass


class Color(str, Enum):  # noqa: UP042 - how users wrote it before `StrEnum`
    RED = "red"


class Level(IntEnum):
    HIGH = 3


PLAIN: list[tuple[object, object]] = [
    (Text("a"), "a"), (Count(2), 2), (Share(0.5), 0.5), (Color.RED, "red"), (Level.HIGH, 3),
    (UserDict({Text("k"): Text("v")}), {"k": "v"}), (MappingProxyType({"k": Count(1)}), {"k": 1}),
    (ChainMap({"k": [Text("v")]}), {"k": ["v"]}), (UserList([Text("a")]), ["a"]), (deque([1, 2]), [1, 2]),
    ({Text("k"): {Count(1): Share(1.5)}}, {"k": {"1": 1.5}}), (range(2), [0, 1]), (Fraction(1, 2), 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), PLAIN)
def test_a_subclass_is_encoded_as_the_type_it_extends(value: object, expected: object) -> None:
    assert json.loads(encode({"it": value})) == {"it": expected}


def test_what_is_no_json_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="A Kept cannot be written as JSON"):
        encode({"it": type("Kept", (), {})()})


class Names(str, Enum):  # noqa: UP042 - a StrEnum formats itself as its value
    MIA = "mia"
    BOB = "bob"


async def test_such_values_are_sent_called_with_and_are_ids() -> None:
    given = UserDict({Text("text"): Text("hi"), "parts": UserList([Count(1)])})
    async with asyncio.timeout(20), Network.open() as network:
        mia, bob = await network.join(Names.MIA, kind="human"), await network.join(Names.BOB)
        await mia.send_text(Names.BOB, "", message_id=Text("m-0"))
        await mia.send(Text("agent:bob"), given, metadata={"by": Text("x")}, message_id=Text("m-1"))
        for _ in range(2):
            async with bob.receive() as message:
                pass
        assert (message.content, message.metadata) == ({"text": "hi", "parts": [1]}, {"by": "x"})
        asked = UserDict({"thread_id": Text(message.thread_id)})
        found = await mia.call(Text("network.history"), asked, call_id=Text("c-1"))
        assert [it["content"] for it in found["messages"]] == ["", {"text": "hi", "parts": [1]}]


async def test_tools_may_return_them() -> None:
    given = UserDict({Text("text"): Text("hi"), "parts": UserList([Count(1)])})

    def look() -> Output:
        """Look."""
        return Output(given, {"debug": MappingProxyType({"n": Count(7)})})

    async with Provider(by_turn(use(("look", {})), "Done.")) as provider:
        loop = Loop(Agent("bob", "", provider.model(), (look,)))
        await loop.drive()
    assert [json.loads(it) for it in results_of(provider.requests[1])] == [{"text": "hi", "parts": [1]}]
