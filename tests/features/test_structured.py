"""Tests of structured answers, which are values of a type: they check the provider's requests and the person's
messages.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from roundelay.agents.agent import Agent
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.network.messages import BaseMessage
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, calls, text
from tests.support.loops import Loop


class Bill(BaseModel):
    total: float = Field(gt=0)
    items: list[str]


BILL = StructuredAnswer(Bill)
GOOD = {"answer": {"total": 3, "items": ["pear"]}}


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
    assert "Give your answer by calling give_answer" in requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize("most", [0, 1, 2])
async def test_a_model_that_never_calls_the_tool_is_asked_again_as_often_as_it_may_be_corrected(
    network: Network, most: int
) -> None:
    answer, requests = await ask(network, BILL, *[text("You owe 3.")] * 10, max_corrections=most)
    assert len(requests) == 1 + most
    assert answer.text == "You owe 3."
    assert (answer.metadata or {})["failed_checks"] == ["structured"]


async def test_text_that_fits_is_the_answer(network: Network) -> None:
    answer, requests = await ask(network, BILL, text('{"total": 3, "items": ["pear"]}'))
    assert len(requests) == 1
    assert BILL.read(answer) == Bill(total=3, items=["pear"])


class Aliased(BaseModel):
    total: float = Field(alias="sum")


@pytest.mark.parametrize(
    "given", [calls([("give_answer", {"answer": {"sum": 3}})]), text('{"sum": 3}'), text('{"total": 3}')]
)
async def test_a_type_may_have_other_names_in_json(network: Network, given: Reply) -> None:
    layer = StructuredAnswer(Aliased)
    answer, requests = await ask(network, layer, given)
    assert len(requests) == 1
    assert answer.text == '{"total":3.0}'
    assert layer.read(answer) == Aliased(sum=3)


async def test_a_value_that_a_later_reviewer_undid_is_in_no_metadata() -> None:
    class Shout(Middleware):
        async def review(self, around: Around, answer: str) -> str:
            return f"{answer}!"

    async with Provider([calls([("give_answer", GOOD)])]) as provider:
        end = await Loop(Agent("bob", "", provider.model(), middleware=[BILL, Shout()])).drive()
    assert end.answer == '{"total":3.0,"items":["pear"]}!'
    assert "structured" not in end.metadata


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
