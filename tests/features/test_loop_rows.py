"""Tests of the agent loop's behavior that other orchestrators promise too: its ends, limits and schemas, with a hub
and the real SDK.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from roundelay.agents.agent import Agent
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.agents.values import End
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from tests.support.agents import Person, Provider, cancel, running
from tests.support.fake_openai import Reply, calls, empty, error, silence, text
from tests.support.loops import Body, Loop, by_turn, results_of, tools_of, use


@tool(idempotent=True)
def look() -> str:
    """Look."""
    return "seen"


async def test_last_turn_without_tools() -> None:
    """A model that never stops calling tools must answer at the end. Tool calls in the last turn do not run."""
    async with Provider(by_turn(use(("look", {})), use(("look", {}), text="It was seen."))) as provider:
        end = await Loop(Agent("bob", "", provider.model(), [look], AgentPolicy(max_turns=2))).drive()
    assert [tools_of(body) for body in provider.requests] == [["look"], []]
    assert "the last one: no tools any more" in provider.requests[1]["messages"][-1]["content"]
    assert (end.status, end.answer, end.tool_calls) == ("stopped", "It was seen.", 1)


async def test_warning_on_an_empty_reply() -> None:
    """The model is asked again. If it stays silent, the person gets a message that says so and gives the reason."""
    replies = {1: [empty(), text("Here I am.")], 2: [empty()] * 3}
    for expected, script in (
        ("Here I am.", replies[1]),
        ("I reached the limit of 3 turns without an answer.", replies[2]),
    ):
        async with Provider(script) as provider, Network.open() as network:
            policy = AgentPolicy(max_turns=3)
            bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), policy=policy)
            async with running(network, bob):
                mia = await Person.join(network, "mia")
                assert (await mia.ask("bob", "hi")).text == expected
        assert provider.requests[1]["messages"][-1]["content"].startswith("Your reply was empty.")


class Ends(Middleware):
    def __init__(self, how: str) -> None:
        self._how = how

    def process_tool_calls(self, state: Any, calls: Any) -> End | None:
        return End("Enough.") if self._how == "hook" else None

    async def review(self, around: Around, answer: str) -> str:
        if self._how == "fault":
            raise LookupError("a fault of ours")
        return answer


EXITS: dict[str, tuple[Any, str]] = {
    "text": ([text("Hello.")], "finished"),
    "finish": ([calls([("finish", {"reason": "done"})])], "finished"),
    "hook": ([calls([("look", {})])], "finished"),
    "limit": ([calls([("look", {})]), text("That is all.")], "stopped"),
    "model": ([error(401, "no")], "failed"),
    "fault": ([text("Hello.")], "failed"),
    "stop": ([silence()], "cancelled"),
}


@pytest.mark.parametrize("how", EXITS)
async def test_completion_is_marked_at_every_exit_and_pollable_by_others(how: str) -> None:
    """The poller is an agent that may read the message, but is not an operator."""
    script, status = EXITS[how]
    async with Provider(script) as provider, Network.open() as network:
        policy = AgentPolicy(max_turns=2)
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), tools=[look], policy=policy, channels=["dev"], middleware=[Ends(how)]
        )  # fmt: skip
        async with running(network, bob):
            mia = await network.join("mia", kind="human")
            zoe = await network.join("zoe")
            for member in (mia, zoe):
                await member.call("channels.join", {"name": "dev"})
            sent = await mia.send("channel:dev", "hello")
            if how == "stop":
                await provider.wait_for_requests(1)
                while await poll(zoe, sent.seq) != "open":
                    continue
                await cancel(mia, thread_id="channel:dev")
            while (seen := await poll(zoe, sent.seq)) in ("none yet", "open"):
                continue
            assert seen == status


async def poll(client: NetworkClient, seq: int) -> str:
    recipients = (await client.call("network.message_status", {"seq": seq}))["recipients"]
    [bob] = [it for it in recipients if it["agent_id"] == "bob"]
    return str(bob.get("reaction_status", "none yet"))


class Period(BaseModel):
    """A span of years."""

    first: int
    last: int


async def test_tool_schemas_come_from_typed_functions() -> None:
    """The provider gets types, bounds, choices and descriptions of a function as JSON Schema. Wrong arguments never
    reach the function.
    """
    seen: list[Any] = []

    @tool(idempotent=True)
    def search(
        topic: Annotated[str, Field(description="What to look for", min_length=2)],
        period: Period,
        limit: Annotated[int, Field(ge=1, le=9)] = 3,
        order: Literal["new", "old"] = "new",
    ) -> str:
        """Search the library."""
        seen.append((topic, period, limit, order))
        return "found"

    wrong = {"topic": "x", "period": {"first": 1900}, "limit": 12}
    right = {"topic": "Rhine", "period": {"first": 1900, "last": 1950}, "order": "old"}
    async with Provider(by_turn(use(("search", wrong)), use(("search", right)), "Done.")) as provider:
        await Loop(Agent("bob", "", provider.model(), [search])).drive()
    [offered] = [it["function"] for it in provider.requests[0]["tools"]]
    assert (offered["name"], offered["description"]) == ("search", "Search the library.")
    schema = offered["parameters"]
    assert schema["required"] == ["topic", "period"]
    assert schema["properties"]["topic"] == {"type": "string", "minLength": 2, "description": "What to look for"}
    assert schema["properties"]["limit"] == {"type": "integer", "minimum": 1, "maximum": 9, "default": 3}
    assert schema["properties"]["order"]["enum"] == ["new", "old"]
    refused, found = results_of(provider.requests[2])
    assert refused.startswith("Not run: Wrong arguments for search")
    assert all(name in refused for name in ("topic", "period", "limit"))
    assert (found, seen) == ("found", [("Rhine", Period(first=1900, last=1950), 3, "old")])


async def test_a_tool_that_takes_control_gives_the_answer_and_ends_the_loop() -> None:
    @tool(idempotent=True, answers=True)
    def research() -> str:
        """Research it, and answer."""
        return "The whole report."

    def script(body: Body) -> Reply:
        assert not results_of(body), "the model is not asked again"
        return use(("research", {}))

    async with Provider(script) as provider:
        end = await Loop(Agent("bob", "", provider.model(), [research])).drive()
    assert (end.status, end.answer, len(provider.requests)) == ("finished", "The whole report.", 1)
