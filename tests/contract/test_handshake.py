"""Tests of the handshake: subprotocol, `hello`, `welcome`, and the binding of IDs. docs/protocol/identity.md and
docs/protocol/errors.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from tests.support.node import Node
from tests.support.wire import WireSession, expect_error, hello_frame, make_token

WELCOME_FIELDS = {
    "type",
    "protocol",
    "server",
    "network",
    "agent_id",
    "kind",
    "role",
    "session_id",
    "cursor",
    "head",
    "resume",
    "mods",
    "limits",
    "is_watched",
}


CLOSED_WITH = {"unsupported_protocol": 4400, "not_authenticated": 4401, "forbidden": 4403}


async def refused_hello(session: WireSession, hello: dict[str, Any], code: str) -> None:
    """Check that the hub answers with exactly one `error` and closes the connection."""
    await session.send_frame(hello)
    expect_error(await session.next_frame(), code)
    assert await session.rest() == []
    assert await session.closed() == CLOSED_WITH[code]


@pytest.mark.parametrize("subprotocols", [None, ["roundelay.v2"], ["chat"]])
async def test_a_handshake_without_the_subprotocol_is_refused_with_400(
    node: Node, subprotocols: list[str] | None
) -> None:
    offered = None if subprotocols is None else [Subprotocol(name) for name in subprotocols]
    with pytest.raises(InvalidStatus) as refusal:
        async with connect(node.url, subprotocols=offered, proxy=None):
            pass
    assert refusal.value.response.status_code == 400


async def test_the_subprotocol_is_chosen_among_several(node: Node) -> None:
    offered = [Subprotocol("chat"), Subprotocol("roundelay.v1")]
    async with connect(node.url, subprotocols=offered, proxy=None) as socket:
        assert socket.subprotocol == "roundelay.v1"


async def test_offered_compression_is_not_used(node: Node) -> None:
    async with connect(
        node.url, subprotocols=[Subprotocol("roundelay.v1")], compression="deflate", proxy=None
    ) as socket:
        assert socket.response is not None
        assert "Sec-WebSocket-Extensions" not in socket.response.headers


# -- welcome


async def test_welcome_has_every_field_and_no_other(node: Node) -> None:
    session = await node.agent("alice")
    welcome = session.welcome
    assert set(welcome) == WELCOME_FIELDS
    assert welcome["protocol"] == 1
    assert isinstance(welcome["server"], str)
    assert set(welcome["network"]) == {"name", "epoch"}
    assert isinstance(welcome["network"]["epoch"], str)
    assert (welcome["agent_id"], welcome["kind"], welcome["role"]) == ("alice", "agent", "observer")
    assert welcome["resume"] == "new"
    assert 0 <= welcome["cursor"] <= welcome["head"]


async def test_welcome_of_a_reactor_adds_the_fence_and_open_reactions(node: Node) -> None:
    welcome = (await node.agent("alice", role="reactor")).welcome
    assert set(welcome) == WELCOME_FIELDS | {"fence", "open_reactions"}
    assert welcome["role"] == "reactor"
    assert isinstance(welcome["fence"], int)
    assert welcome["open_reactions"] == []


async def test_welcome_lists_the_mods_with_their_operations(node: Node) -> None:
    mods = {mod["id"]: mod for mod in (await node.agent("alice")).welcome["mods"]}
    assert set(mods) >= {"channels", "discovery"}
    for mod in mods.values():
        for operation in mod["operations"]:
            assert set(operation) == {"op", "description", "args_schema", "kind"}
            assert operation["kind"] in ("change", "read")
            assert operation["op"].startswith(mod["id"] + ".")
            assert operation["description"]
            assert operation["args_schema"]["type"] == "object"
    assert {operation["op"] for operation in mods["channels"]["operations"]} >= {
        "channels.create",
        "channels.join",
        "channels.leave",
    }


async def test_session_ids_differ(node: Node) -> None:
    first, second = await node.agent("alice"), await node.agent("alice")
    assert first.welcome["session_id"] != second.welcome["session_id"]


async def test_the_wrong_field_of_a_card_is_named(node: Node) -> None:
    session = await node.connect()
    await session.send_frame(hello_frame("alice", token=node.token_of("alice"), card={"tags": ["math", 5]}))
    message = expect_error(await session.next_frame(), "invalid_frame")["message"]
    assert message.startswith("Card is wrong")
    assert "tags[1]" in message


async def test_anything_else_goes_inside_the_card(node: Node) -> None:
    card = {"description": "d", "tools": ["t", {"name": "u"}], "tags": ["a"], "mood": {"deep": [1, None, 2.5]}}
    await node.agent("alice", card=card)
    agents = (await (await node.agent("bob")).call("network.list_agents"))["agents"]
    assert next(agent["card"] for agent in agents if agent["agent_id"] == "alice") == card


async def test_hello_may_name_its_client(node: Node) -> None:
    await node.agent("alice", client="contract/1.0")


# -- wrong frames before welcome

WRONG_FIRST_FRAMES: dict[str, Any] = {
    "empty": "",
    "not_json": "hello",
    "binary": b'{"type":"hello"}',
    "array": "[]",
    "string": '"hello"',
    "empty_object": {},
    "no_type": {"protocol": 1, "agent_id": "alice", "kind": "agent"},
    "unknown_type": {"type": "greet"},
    "send": {"type": "send", "message_id": "m", "to": "broadcast", "content": "x"},
    "ack": {"type": "ack", "seq": 1},
    "call": {"type": "call", "call_id": "c", "op": "network.info", "args": {}},
    "bye": {"type": "bye"},
    "welcome": {"type": "welcome"},
    "no_protocol": {"type": "hello", "agent_id": "alice", "kind": "agent"},
    "protocol_string": hello_frame("alice") | {"protocol": "1"},
    "protocol_true": hello_frame("alice") | {"protocol": True},
    "protocol_null": hello_frame("alice") | {"protocol": None},
    "no_agent_id": {"type": "hello", "protocol": 1, "kind": "agent"},
    "agent_id_number": hello_frame("alice") | {"agent_id": 5},
    "agent_id_empty": hello_frame(""),
    "agent_id_upper_case": hello_frame("Alice"),
    "agent_id_leading_dot": hello_frame(".alice"),
    "agent_id_newline": hello_frame("alice\n"),
    "agent_id_nul": hello_frame("ali\0ce"),
    "agent_id_non_ascii": hello_frame("älice"),
    "agent_id_65_chars": hello_frame("a" * 65),
    "no_kind": {"type": "hello", "protocol": 1, "agent_id": "alice"},
    "kind_unknown": hello_frame("alice", kind="robot"),
    "kind_list": hello_frame("alice") | {"kind": ["agent"]},
    "token_number": hello_frame("alice") | {"token": 5},
    "role_unknown": hello_frame("alice", role="boss"),
    "fence_string": hello_frame("alice", role="reactor", fence="1"),
    "resume_string": hello_frame("alice", resume="now"),
    "resume_without_epoch": hello_frame("alice", resume={"cursor": 0}),
    "resume_without_cursor": hello_frame("alice", resume={"epoch": "e"}),
    "resume_cursor_string": hello_frame("alice", resume={"epoch": "e", "cursor": "0"}),
    "resume_cursor_negative": hello_frame("alice", resume={"epoch": "e", "cursor": -1}),
    "resume_unlisted_field": hello_frame("alice", resume={"epoch": "e", "cursor": 0, "seq": 0}),
    "card_list": hello_frame("alice", card=["description"]),
    "card_description_number": hello_frame("alice", card={"description": 5}),
    "card_description_null": hello_frame("alice", card={"description": None}),
    "card_description_too_long": hello_frame("alice", card={"description": "x" * 20_000}),
    "card_tags_text": hello_frame("alice", card={"tags": "math"}),
    "card_tags_numbers": hello_frame("alice", card={"tags": ["math", 5]}),
    "card_tags_nested": hello_frame("alice", card={"tags": [["math"]]}),
    "card_tools_text": hello_frame("alice", card={"tools": "add"}),
    "card_tools_numbers": hello_frame("alice", card={"tools": [1]}),
    "card_visibility_unknown": hello_frame("alice", card={"visibility": "everyone"}),
    "card_visibility_list": hello_frame("alice", card={"visibility": ["people"]}),
    "unlisted_field": hello_frame("alice", colour="red"),
    "hub_owned_field": hello_frame("alice", session_id="s"),
    "too_deep": '{"type":"hello","protocol":1,"agent_id":"alice","kind":"agent","card":'
    + '{"a":' * 70
    + "1"
    + "}" * 70
    + "}",
}


@pytest.mark.parametrize("frame", WRONG_FIRST_FRAMES.values(), ids=WRONG_FIRST_FRAMES.keys())
async def test_a_wrong_first_frame_gets_one_error_and_4400(node: Node, frame: Any) -> None:
    session = await node.connect()
    if isinstance(frame, dict):
        await session.send_frame(frame)
    else:
        await session.send_raw(frame, text=isinstance(frame, str))
    expect_error(await session.next_frame(), "invalid_frame")
    assert await session.rest() == []
    assert await session.closed() == 4400


@pytest.mark.parametrize("protocol", [0, 2, 99])
async def test_another_protocol_is_unsupported(node: Node, protocol: int) -> None:
    hello = hello_frame("alice", token=make_token()) | {"protocol": protocol}
    await refused_hello(await node.connect(), hello, "unsupported_protocol")


async def test_a_frame_too_large_before_welcome_is_closed_with_4413_and_no_error(node: Node) -> None:
    session = await node.connect()
    await session.send_raw(b" " * (256 * 1024 + 1))
    assert await session.rest() == []
    assert await session.closed() == 4413


async def test_invalid_utf8_before_welcome_is_closed_with_1007(node: Node) -> None:
    session = await node.connect()
    await session.send_raw(b'{"type":"hello","protocol":1,"agent_id":"\xff"}')
    assert await session.closed() == 1007


async def test_a_second_hello_is_refused_and_the_session_lives_on(node: Node) -> None:
    session = await node.agent("alice")
    await session.send_frame(hello_frame("alice", token=node.token_of("alice")))
    expect_error(await session.next_frame(), "invalid_frame")
    await session.settle()


# -- bindings of IDs


async def test_the_first_use_of_an_id_binds_the_token(node: Node) -> None:
    await node.agent("alice")
    again = await node.agent("alice")
    assert again.welcome["resume"] == "full"


REFUSED_HELLOS = {
    "another_token": ("alice", "agent", "a new one", "not_authenticated"),
    "no_token": ("alice", "agent", "none", "not_authenticated"),
    "no_token_at_first_use": ("newcomer", "agent", "none", "not_authenticated"),
    "the_token_of_somebody_else": ("alice", "agent", "bob's", "not_authenticated"),
    "the_token_of_somebody_else_at_first_use": ("newcomer", "agent", "bob's", "not_authenticated"),
    "the_owners_token_for_an_agent": ("newcomer", "agent", "the owner's", "not_authenticated"),
    "a_person_by_first_use": ("newcomer", "human", "a new one", "not_authenticated"),
    "a_service_by_first_use": ("newcomer", "service", "a new one", "forbidden"),
    "an_agent_as_a_person": ("alice", "human", "alice's", "forbidden"),
    "an_agent_as_a_person_by_the_owner": ("alice", "human", "the owner's", "forbidden"),
    "a_person_as_a_service_by_the_owner": ("mia", "service", "the owner's", "forbidden"),
    "the_id_of_the_networks_own_tool": ("roundelay-cli", "agent", "a new one", "forbidden"),
}


@pytest.mark.parametrize(("agent_id", "kind", "whose", "code"), REFUSED_HELLOS.values(), ids=REFUSED_HELLOS.keys())
async def test_a_token_is_good_for_its_own_id_and_kind_and_a_refusal_changes_nothing(
    node: Node, agent_id: str, kind: str, whose: str, code: str
) -> None:
    alice, bob, _ = await node.agent("alice"), await node.agent("bob"), await node.person("mia")
    tokens = {"alice's": node.token_of("alice"), "bob's": node.token_of("bob"), "the owner's": node.owner_token}
    token = None if whose == "none" else tokens.get(whose, make_token())
    head = (await alice.call("network.info"))["head"]
    await refused_hello(await node.connect(), hello_frame(agent_id, kind=kind, token=token), code)
    assert (await alice.call("network.info"))["head"] == head
    await alice.send("agent:bob", "still here")
    await bob.message("still here")
    if agent_id == "newcomer":  # this ID is not bound
        assert (await node.agent("newcomer")).welcome["resume"] == "new"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "the node's own page"},
        {"X-Forwarded-For": "10.0.0.1"},
        {"Forwarded": "for=10.0.0.1"},
    ],
    ids=lambda headers: next(iter(headers)),
)
async def test_first_use_through_a_browser_or_a_proxy_binds_nothing(node: Node, headers: dict[str, str]) -> None:
    own = {"Origin": node.origin} if "Origin" in headers else {}
    session = await node.connect(headers={**headers, **own})
    await refused_hello(session, hello_frame("alice", token=node.token_of("alice")), "not_authenticated")
    assert (await node.agent("alice")).welcome["resume"] == "new"


async def test_a_bound_token_is_good_with_an_origin_too(node: Node) -> None:
    await node.agent("alice")
    session = await node.connect(origin=node.origin)
    await session.hello("alice", token=node.token_of("alice"))


async def test_the_owner_joins_as_any_person_or_service(node: Node) -> None:
    assert (await node.person("mia")).welcome["kind"] == "human"
    assert (await node.person("bob")).welcome["kind"] == "human"
    assert (await node.service("clock")).welcome["kind"] == "service"


async def test_an_id_of_64_characters_is_fine(node: Node) -> None:
    longest = "a" + "0._-" * 15 + "abc"
    assert len(longest) == 64
    assert (await node.agent(longest)).welcome["agent_id"] == longest
