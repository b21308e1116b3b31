"""Answers that are values of a type: asserted on the provider's requests and on what the person gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel, Field

from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.middleware import Middleware
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.network.messages import BaseMessage
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, calls, text


class Bill(BaseModel):
    total: float = Field(gt=0)
    items: list[str]


BILL = StructuredAnswer(Bill)
GOOD = {"answer": {"total": 3, "items": ["pear"]}}


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


async def ask(
    network: Network, layer: Middleware, *replies: Reply, content: Any = "what do I owe?", **policy: Any
) -> tuple[BaseMessage, list[dict[str, Any]]]:
    async with Provider(list(replies)) as provider:
        runner = SimpleAgentRunner(
            "ann", instruction="", model=provider.model(), middleware=[layer], policy=AgentPolicy(**policy)
        )
        mia = await Person.join(network, "mia")
        async with running(network, runner):
            await mia.client.send("agent:ann", content)
            answer = await mia.hear()
        return answer, [dict(it) for it in provider.requests]


async def test_an_answer_is_a_value_of_the_type(network: Network) -> None:
    answer, requests = await ask(network, BILL, calls([("give_answer", GOOD)]))
    assert answer.text == '{"total":3.0,"items":["pear"]}'
    assert BILL.read(answer) == Bill(total=3, items=["pear"])
    [tool] = [it["function"] for it in requests[0]["tools"] if it["function"]["name"] == "give_answer"]
    assert {"Bill"} == set(tool["parameters"]["$defs"])


async def test_what_does_not_fit_is_said_precisely_and_asked_again(network: Network) -> None:
    wrong = {"answer": {"total": -1, "items": "pear"}}
    answer, requests = await ask(network, BILL, calls([("give_answer", wrong)]), calls([("give_answer", GOOD)]))
    assert BILL.read(answer).total == 3
    told = requests[1]["messages"][-2]["content"]
    assert "answer.total: Input should be greater than 0" in told
    assert "answer.items: Input should be a valid array" in told


async def test_text_is_sent_back_to_the_tool(network: Network) -> None:
    answer, requests = await ask(network, BILL, text("You owe 3."), calls([("give_answer", GOOD)]))
    assert BILL.read(answer).total == 3
    assert "Give your answer by calling give_answer." in requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    "written", ['{"total": 3, "items": ["pear"]}', '```json\n{"total": 3, "items": ["pear"]}\n```']
)
async def test_the_last_turn_writes_it_as_json(network: Network, written: str) -> None:
    answer, requests = await ask(network, BILL, text(written), max_turns=1)
    assert BILL.read(answer).items == ["pear"]
    assert "tools" not in requests[0]
    assert '"exclusiveMinimum": 0' in requests[0]["messages"][-1]["content"]


async def test_an_answer_that_never_fits_goes_out_unstructured_and_is_noted(network: Network) -> None:
    answer, _ = await ask(network, BILL, text("three"), max_turns=1)
    assert answer.text == "three"
    with pytest.raises(ValueError, match="Bill"):
        BILL.read(answer)
